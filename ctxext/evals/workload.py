"""What a measurement will take, before it begins: samples, tokens, time and memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ctxext.evals.engine import Pass
from ctxext.evals.perplexity import KeyTokens, TextTask
from ctxext.evals.runner import Batch, Runner
from ctxext.evals.summary import label
from ctxext.evals.targets import LiveModel, Variant
from ctxext.models.rope_tables import head_dim
from ctxext.models.text_config import text_config_of
from ctxext.training.estimate import duration
from ctxext.utils.values import counted, size_in_words

# The prompt of the timed pass: tokens read, and decoded.
READ, DECODED = 512, 8
# In-attention RoPE rotates keys whenever it uses them.
IN_ATTENTION = 1.5


@dataclass(frozen=True)
class Speed:
    """One timed pass of a live model, and what time and memory grow with.

    Attributes:
        found: the pass, of `n_tokens` tokens.
        weights: the parameters that every token is multiplied with.
        width: the dimensions of all queries of a token, over all layers.
        weight_bytes: of all parameters.
    """

    found: Pass
    n_tokens: int
    weights: int
    width: int
    weight_bytes: int

    @classmethod
    def measured(cls, target: LiveModel, text: Sequence[int]) -> Speed:
        """Time one pass, after a short one that is not counted."""
        model, config = target.model, text_config_of(target.model.config)
        size = max(2 * DECODED, min(READ, target.about["trained_length"]))
        ids = (list(text) * size)[:size]
        target.engine.passed(ids[: 2 * DECODED], DECODED)
        found = target.engine.passed(ids, DECODED)
        heads = config.num_attention_heads
        each = head_dim(config)
        sizes = [(p.numel(), p.numel() * p.element_size()) for p in model.parameters()]
        embedded = sum(p.numel() for p in model.get_input_embeddings().parameters())
        return cls(
            found, len(ids), max(1, sum(n for n, _ in sizes) - embedded), config.num_hidden_layers * heads * each,
            sum(size for _, size in sizes),
        )  # fmt: skip

    def reading(self, n_tokens: float, context: float = 0) -> float:
        """Seconds to read tokens after `context` others: 2 operations per token and weight, 4 per pair of tokens."""

        def operations(n: float, before: float) -> float:
            return 2 * n * self.weights + 4 * self.width * n * (before + n / 2)

        return self.found.prefill * operations(n_tokens, context) / operations(self.n_tokens - DECODED, 0)

    def decoding(self, context: int) -> float:
        """Seconds of one token, by the bytes that it reads: all weights and the cache."""
        kv = self.found.kv_bytes
        return self.found.decode * (self.weight_bytes + kv * context / self.n_tokens) / (self.weight_bytes + kv)

    def memory(self, n_tokens: int) -> int:
        """Bytes of the weights and a cache of `n_tokens`."""
        return self.weight_bytes + round(self.found.kv_bytes * n_tokens / self.n_tokens)


class Workload:
    """What a run has left to do, on all processes.

    Args:
        done: the variants and keys of samples that the results file already has.
    """

    def __init__(
        self, runner: Runner, variants: Sequence[Variant], done: Collection[tuple[str, str]] = frozenset()
    ) -> None:
        self.runner, self.variants = runner, variants
        plans = {variant.name: runner.target.plan(variant) for variant in variants}
        self._slower = {name: 1.0 if plan is None or plan.is_portable else IN_ATTENTION for name, plan in plans.items()}
        self._whole = {variant.name: runner.target.whole(variant) for variant in variants}
        self.parts = [
            (variant.name, part) for variant in variants for part in runner.left(variant, runner.batches(variant), done)
        ]
        self.samples = sum(len(batch) for _, batch in self.parts)
        self.tokens = round(sum(n for part in self.parts for n, _ in self._reads(*part)))

    def seconds(self, speed: Speed) -> float:
        """The estimated time of one process; every answer of a retrieval task is counted as decoded."""
        return sum(self._seconds(speed, *part) for part in self.parts) / self.runner.processes.world

    def _seconds(self, speed: Speed, variant: str, batch: Batch) -> float:
        read = sum(speed.reading(n, context) for n, context in self._reads(variant, batch))
        n_decoded = self.runner.answer_tokens.get(batch.task.name, 0) * len(batch.rows[0])
        return self._slower[variant] * (read + n_decoded * speed.decoding(batch.length))

    def _reads(self, variant: str, batch: Batch) -> Iterator[tuple[float, float]]:
        """The pieces of a batch: the tokens read, and those before them that are cached."""
        if isinstance(batch.task, KeyTokens):  # sliding windows of two sizes, each token read twice
            sizes = (batch.task.long, batch.task.short)
            yield from ((size, 0) for size in sizes for _ in range(max(1, 2 * batch.length // size)))
            return
        whole = isinstance(batch.task, TextTask) or self._whole[variant]
        for row in batch.rows:
            depths = [place.depth or 0.0 for place in row]
            # The prompts of a trial share what precedes their needles.
            starts = [0.0 for _ in row] if whole else [0.0, *sorted(depths)[:-1]]
            yield from ((batch.length * (1 - start), batch.length * start) for start in starts)

    def said(self, speed: Speed | None) -> list[str]:
        """The plan, as lines for the screen; none if nothing is left.

        Args:
            speed: None for a server, whose time is unknown.
        """
        if not self.parts:
            return []
        batches = [batch for _, batch in self.parts]
        tasks = dict.fromkeys(batch.task.name for batch in batches)
        lengths = sorted({batch.length for batch in batches})
        names = [label(variant.name) for variant in self.variants]
        variants = f"{counted(len(names), 'variant')} ({some(names)})"
        lines = [
            f"plan: {variants} × {counted(len(tasks), 'task')} ({some([*tasks])})",
            f"  at {', '.join(f'{length:,}' for length in lengths)} tokens: {counted(self.samples, 'sample')}, "
            f"{counted(self.tokens, 'token')} to read",
        ]
        if speed is not None:
            longest = max(len(batch.rows) * batch.length for batch in batches if batch.length == lengths[-1])
            lines += [
                f"  about {duration(self.seconds(speed))} on this machine: {speed.n_tokens:,} tokens took "
                f"{speed.found.prefill:.2g} s",
                f"  {size_in_words(speed.memory(longest))} for weights and KV cache at {lengths[-1]:,} tokens",
            ]
        return lines


def some(names: Sequence[str]) -> str:
    """Up to four names, and how many more."""
    more = [f"{len(names) - 3} more"] if len(names) > 4 else []
    return ", ".join([*(names[:3] if more else names), *more])
