"""The order of rows: a function of the seed and the row's number alone, so that a run can resume at any step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ctxext.data.packing import Packed


class Mixture:
    """An endless sequence of rows from several weighted sources.

    Row j of a source with the share w of all weights is due at (j + 1/2) / w, and rows come as they are due. So after
    any number k of rows, the counts n are the nearest to the weights: they minimise Σ (n - k w)² / w over all counts
    that sum to k (Sainte-Laguë's apportionment, which takes no row back as k grows). Each epoch of a source is a
    permutation of its own.

    Attributes:
        length: tokens of a row.

    Raises:
        ValueError: no source, or rows of different lengths.
    """

    def __init__(self, packed: Sequence[Packed], seed: int) -> None:
        lengths = {one.length for one in packed}
        if len(lengths) != 1:
            raise ValueError(
                f"all sources of a mixture must have rows of the same length, got lengths {sorted(lengths)}."
            )
        self.packed, self.seed, self.length = tuple(packed), seed, lengths.pop()
        total = sum(one.source.weight for one in packed)
        self._shares = [one.source.weight / total for one in packed]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # by source: its latest epoch and permutation

    def rows(self, first: int, count: int) -> list[tuple[int, int]]:
        """Rows `first` to `first + count` of the run, as (source, index within the source), in time of O(count)."""
        taken = self._taken(first)
        due = [(self._due(source, n), source) for source, n in enumerate(taken)]
        heapq.heapify(due)
        rows = []
        for _ in range(count):
            source = due[0][1]
            rows.append((source, self._index(source, taken[source])))
            taken[source] += 1
            heapq.heapreplace(due, (self._due(source, taken[source]), source))
        return rows

    def read(self, first: int, count: int) -> list[dict[str, Any]]:
        """The same rows as a collator takes them: `index` is the number within the run, from which collators seed."""
        found = []
        for number, (source, index) in enumerate(self.rows(first, count), first):
            one = self.packed[source]
            found.append({**one.rows[index], "index": number, "name": f"{one.source.name}#{index}"})
        return found

    def epochs(self, count: int) -> list[float]:
        """How often each source is repeated in a run of `count` rows."""
        return [n / len(one.rows) for n, one in zip(self._taken(count), self.packed)]

    def mean(self, of: Callable[[Packed], float]) -> float:
        """The mean over the rows of a long run, from the mean `of` the rows of each source."""
        return sum(share * of(one) for share, one in zip(self._shares, self.packed))

    def _due(self, source: int, n: int) -> float:
        return (n + 0.5) / self._shares[source]

    def _taken(self, count: int) -> list[int]:
        """How many rows of each source are among the first `count`."""
        # What is due before `count - sources` is certainly among them; the rest is added row by row.
        taken = [max(0, int((count - len(self._shares)) * share - 0.5)) for share in self._shares]
        while sum(taken) < count:
            _, source = min((self._due(source, n), source) for source, n in enumerate(taken))
            taken[source] += 1
        return taken

    def _index(self, source: int, n: int) -> int:
        """The index within a source of the `n`th row taken from it."""
        epoch, place = divmod(n, len(self.packed[source].rows))
        if self._orders.get(source, (-1,))[0] != epoch:
            order = np.random.default_rng([self.seed, source, epoch]).permutation(len(self.packed[source].rows))
            self._orders[source] = epoch, order
        return int(self._orders[source][1][place])
