"""Collate rows into a batch with position ids, in a form that transformers reads as intended.

Without an attention mask and a cache, transformers treats every step of positions other than +1 as a document boundary,
and masks attention across it. That is right for rows of several documents, but a method that skips positions would
silently train no long distances. An attention mask of ones disables it. So `Plain` returns no mask, and the skipping
collators return one of ones; `check_positions` verifies this on the live model.

They also work with `transformers.Trainer` and `remove_unused_columns=False`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.core.probing import in_eval_mode

Row = dict[str, Any]
Batch = dict[str, Tensor]


class Collator(ABC):
    """Collates rows of `Packed.rows` into `input_ids`, `labels` and `position_ids`, int64 of shape (batch, tokens)."""

    def __call__(self, rows: Sequence[Row]) -> Batch:
        lengths = {len(row["input_ids"]) for row in rows}
        if len(lengths) != 1:
            raise ValueError(f"rows of one batch have one length, got {sorted(lengths)}. Pack them to the same length.")
        batch = {name: torch.stack([_tensor(row[name]) for row in rows]) for name in ("input_ids", "labels")}
        batch["position_ids"] = torch.stack([self.positions(row) for row in rows])
        return batch

    @abstractmethod
    def positions(self, row: Row) -> Tensor:
        """The position of each token of `row`, (tokens,)."""


@dataclass(frozen=True, kw_only=True)
class Plain(Collator):
    """Plain positions, from 0 in every document, which isolates documents (no attention mask)."""

    def positions(self, row: Row) -> Tensor:
        return torch.cat([torch.arange(int(n)) for n in row["documents"]])


@dataclass(frozen=True, kw_only=True)
class Skipping(Collator):
    """Positions with gaps, so that a short row has the distances of a long one; with a mask of ones.

    A row's positions depend only on `seed` and its `index`. Padding has the last position.

    Attributes:
        target_length: in tokens; positions are below it.

    Raises (on a batch):
        ValueError: a row has several documents, is longer than `target_length`, is too short to be split, or has no
            index.
    """

    target_length: int
    seed: int = 0

    def __call__(self, rows: Sequence[Row]) -> Batch:
        batch = super().__call__(rows)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    def positions(self, row: Row) -> Tensor:
        kind, name, length = type(self).__name__, row.get("name", "a row"), len(row["input_ids"])
        if "index" not in row:
            raise ValueError(f"{kind} draws positions by a row's index, but {name} has none. Read rows of a Mixture.")
        padding = int(row.get("padding", 0))
        n = length - padding
        if len(row["documents"]) > 1 + bool(padding):
            raise ValueError(
                f"{kind} skips positions within one document, but {name} holds {len(row['documents'])}, and its "
                "mask would let them see each other. Pack with documents='joined', or use Plain."
            )
        if length > self.target_length:
            raise ValueError(
                f"{kind} spreads a row over target_length={self.target_length} positions, but {name} has {length} "
                "tokens. Pack shorter rows or raise target_length."
            )
        steps = self.skip(n, Random(f"{self.seed}:{int(row['index'])}"))
        return torch.cat([steps, steps[-1:].expand(padding)])

    @abstractmethod
    def skip(self, n: int, rng: Random) -> Tensor:
        """Ascending positions below `target_length` for a document of `n` tokens, (n,)."""


@dataclass(frozen=True, kw_only=True)
class PoSE(Skipping):
    """Chunks of random lengths, each shifted by a random number of positions, at least that of the previous chunk.

    u_0 = 0, u_i ~ U{u_(i-1), ..., target_length - n}: chunk i is at its own positions plus u_i. The text itself
    is contiguous. Zhu et al. (2024), "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise
    Training", arXiv 2309.10400, section 3.

    Attributes:
        chunks: 2 suffice in the paper.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ValueError(f"chunks must be at least 2, got {self.chunks}: one chunk skips nothing; use Plain.")

    def skip(self, n: int, rng: Random) -> Tensor:
        if n < self.chunks:
            raise ValueError(f"a document of {n} tokens cannot be parted into {self.chunks} chunks. Give longer text.")
        cuts = [0, *sorted(rng.sample(range(1, n), self.chunks - 1)), n]
        positions, bias = torch.arange(n), 0
        for start, end in pairwise(cuts[1:]):
            bias = rng.randint(bias, self.target_length - n)
            positions[start:end] += bias
        return positions


@dataclass(frozen=True, kw_only=True)
class CREAM(Skipping):
    """Head at the start of the target, tail at its end, and the middle in between, mostly near the centre.

    For n tokens and s = target_length / n, a coin decides on head and tail: n/3 each (relativity), or 4s each, at
    most n/3 (continuity). The middle, m tokens, ends at a position drawn from U{head + (m - 1) α/2, ..., n α/2 - tail
    - 1}, where α is drawn from a Gaussian of mean 1 + s and deviation σ, truncated to [2, 2s].
    Wu et al. (2024), "An Efficient Recipe for Long Context Extension via Middle-Focused Positional Encoding",
    arXiv 2406.07138, section 3. Unlike the authors' code, α is not rounded down, the Gaussian's tails are cut off
    instead of moved onto 2 and 2s, and the text itself is contiguous, as in PoSE.

    Attributes:
        sigma: σ; 3 in the paper's ablation.
    """

    sigma: float = 3.0

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise ValueError(f"sigma must be > 0, got {self.sigma}. The paper uses 3.")

    def skip(self, n: int, rng: Random) -> Tensor:
        if n < 3:
            raise ValueError(f"a document of {n} tokens has no head, middle and tail. Give longer text.")
        scale = self.target_length / n
        side = n // 3 if rng.random() < 0.5 else min(int(4 * scale), n // 3)
        middle = n - 2 * side
        gaussian = NormalDist(1 + scale, self.sigma)
        alpha = gaussian.inv_cdf(rng.uniform(gaussian.cdf(2), gaussian.cdf(2 * scale)))
        alpha = min(max(alpha, 2), 2 * scale)  # against rounding
        last = rng.randint(int(side + (middle - 1) * alpha / 2), int(n * alpha / 2) - side - 1)
        tail = torch.arange(self.target_length - side, self.target_length)
        return torch.cat([torch.arange(side), torch.arange(last - middle + 1, last + 1), tail])


def check_positions(model: nn.Module, collator: Collator, length: int, vocab_size: int, *, batch_size: int = 1) -> None:
    """Verify on the live model that it reads the collator's positions as intended.

    Skipping: the last token attends across the last gap. Plain: a document attends to its own beginning, and not to
        another document. Runs a few short forward passes in eval mode; the model is unchanged afterwards.

    Args:
        length: tokens per row of the run; at most 64 are read.
        vocab_size: the size of the model's vocabulary.
        batch_size: rows per forward pass of the run, if rows hold several documents: flash attention separates
            documents only in batches of one.

    Raises:
        RuntimeError: the check failed.
    """
    n = min(length, 64)
    if isinstance(collator, Skipping):
        row = _guard_row([n])
        gaps = (collator.positions(row).diff() != 1).nonzero()
        before = int(gaps[-1]) + 1 if len(gaps) else n // 2
        if not _influence(model, collator, row, slice(0, before), batch_size, vocab_size):
            raise RuntimeError(
                f"positions that skip are read as packed documents: the last token does not see what comes before "
                f"a gap, so {type(collator).__name__} would train no long distance. Let the model get the collator's "
                "attention_mask of ones as it is, and use another attention implementation if it does."
            )
        return
    first = slice(0, n // 2)
    if _influence(model, collator, _guard_row([n // 2, n - n // 2]), first, batch_size, vocab_size):
        raise RuntimeError(
            "packed documents see each other: the last token depends on another document's. Pass use_cache=False and "
            "no attention_mask, use attn_implementation='sdpa' (flash attention keeps documents apart in batches of "
            "one row only), or pack with documents='joined'."
        )
    if not _influence(model, collator, _guard_row([n]), first, batch_size, vocab_size):
        raise RuntimeError(
            "the last token of a document does not see its beginning, so no long distance would be trained. "
            f"Look for a sliding window or a mask that is narrower than {n} tokens."
        )


def _guard_row(documents: list[int]) -> Row:
    return {"input_ids": [0] * sum(documents), "labels": [0] * sum(documents), "documents": documents, "index": 0}


@torch.no_grad()
def _influence(
    model: nn.Module, collator: Collator, row: Row, changed: slice, batch_size: int, vocab_size: int
) -> bool:
    """Whether the last token's logits depend on the tokens `changed`."""
    generator = torch.Generator().manual_seed(0)
    batch = collator([row] * batch_size)
    one = torch.randint(vocab_size, batch["input_ids"].shape, generator=generator)
    other = one.clone()
    other[:, changed] = (one[:, changed] + vocab_size // 2) % vocab_size
    device = next(model.parameters()).device
    given = {name: tensor.to(device) for name, tensor in batch.items() if name not in ("input_ids", "labels")}
    with in_eval_mode(model):
        before, after = (
            model(input_ids=ids.to(device), use_cache=False, **given).logits[:, -1] for ids in (one, other)
        )
    # Masked tokens have weight exactly zero; the margin is for kernels with a nondeterministic summation order.
    return bool((before - after).abs().max() > 1e-5 * before.abs().max())


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)


def make_collator(positions: str, *, target_length: int, chunks: int, seed: int) -> Collator:
    """The collator that `data.positions` names: "plain", "pose" or "cream"."""
    if positions == "pose":
        return PoSE(target_length=target_length, chunks=chunks, seed=seed)
    if positions == "cream":
        return CREAM(target_length=target_length, seed=seed)
    return Plain()
