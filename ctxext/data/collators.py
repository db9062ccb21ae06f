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
            raise ValueError(
                f"rows of a batch must have the same length, got {sorted(lengths)}. Pack them to the same length."
            )
        columns = {name: [torch.as_tensor(row[name]).long() for row in rows] for name in ("input_ids", "labels")}
        columns["position_ids"] = [self.positions(row) for row in rows]
        return {name: torch.stack(tensors) for name, tensors in columns.items()}

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
        padding = int(row.get("padding", 0))
        if "index" not in row:
            raise ValueError(f"{kind} seeds positions by a row's index, but {name} has none. Take rows from a Mixture.")
        if len(row["documents"]) > 1 + bool(padding):
            raise ValueError(
                f"{kind} skips positions within one document, but {name} holds {len(row['documents'])}, and they "
                "would attend to each other. Pack with documents='joined', or use Plain."
            )
        if length > self.target_length:
            raise ValueError(
                f"{kind} spreads a row over target_length={self.target_length} positions, but {name} has {length} "
                "tokens. Pack shorter rows or raise target_length."
            )
        steps = self.skip(length - padding, Random(f"{self.seed}:{int(row['index'])}"))
        return torch.cat([steps, steps[-1:].expand(padding)])

    @abstractmethod
    def skip(self, n: int, rng: Random) -> Tensor:
        """Ascending positions below `target_length` for a document of `n` tokens, (n,)."""


@dataclass(frozen=True, kw_only=True)
class PoSE(Skipping):
    """Chunks of random lengths, each shifted by at least as many positions as the one before it.

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
            raise ValueError(f"a document of {n} tokens cannot be split into {self.chunks} chunks. Pass longer text.")
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
            raise ValueError(f"a document of {n} tokens is too short for a head, middle and tail. Pass longer text.")
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
        batch_size: rows per forward pass of the run: flash attention separates documents only in batches of one.

    Raises:
        RuntimeError: the check failed.
    """
    n = min(length, 64)

    def batch(*documents: int) -> Batch:
        row = {"input_ids": [0] * n, "labels": [0] * n, "documents": documents, "index": 0}
        return collator([row] * batch_size)

    one = batch(n)
    if isinstance(collator, Skipping):
        gaps = (one["position_ids"][0].diff() != 1).nonzero()
        if not _influence(model, one, int(gaps[-1]) + 1 if len(gaps) else n // 2, vocab_size):
            raise RuntimeError(
                "the model reads skipped positions as packed documents: the last token does not attend across a gap, "
                f"so {type(collator).__name__} would train no long distances. Pass the collator's attention_mask of "
                "ones unchanged, or use another attention implementation."
            )
        return
    if _influence(model, batch(n // 2, n - n // 2), n // 2, vocab_size):
        raise RuntimeError(
            "packed documents attend to each other: the last token depends on another document's. Pass "
            "use_cache=False and no attention_mask, use attn_implementation='sdpa' (flash attention separates "
            "documents only in batches of one row), or pack with documents='joined'."
        )
    if not _influence(model, one, n // 2, vocab_size):
        raise RuntimeError(
            "the last token of a document does not attend to its beginning, so no long distances would be trained. "
            f"Check for a sliding window or mask narrower than {n} tokens."
        )


@torch.no_grad()
def _influence(model: nn.Module, batch: Batch, changed: int, vocab_size: int) -> bool:
    """Whether the last token's logits depend on the first `changed` tokens."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randint(vocab_size, batch["input_ids"].shape, generator=generator)
    other = one.clone()
    other[:, :changed] = (one[:, :changed] + vocab_size // 2) % vocab_size
    device = next(model.parameters()).device
    given = {name: tensor.to(device) for name, tensor in batch.items() if name not in ("input_ids", "labels")}
    with in_eval_mode(model):
        before, after = (
            model(input_ids=ids.to(device), use_cache=False, **given).logits[:, -1] for ids in (one, other)
        )
    # Masked tokens have weight exactly zero; the margin is for kernels with a nondeterministic summation order.
    return bool((before - after).abs().max() > 1e-5 * before.abs().max())


def make_collator(positions: str, *, target_length: int, chunks: int, seed: int) -> Collator:
    """The collator that `data.positions` names: "plain", "pose" or "cream"."""
    if positions == "pose":
        return PoSE(target_length=target_length, chunks=chunks, seed=seed)
    if positions == "cream":
        return CREAM(target_length=target_length, seed=seed)
    return Plain()
