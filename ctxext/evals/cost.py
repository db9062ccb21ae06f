"""What a model takes at a length: prefill seconds, decoded tokens per second, KV cache, peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.evals.engine import Engine, Scorer
from ctxext.evals.perplexity import TextTask, Window
from ctxext.training.estimate import PeakMemory
from ctxext.utils.values import size_in_words

# The fields of a sample.
COST = ("prefill_seconds", "decode_seconds", "kv_bytes", "peak_bytes")


@dataclass(frozen=True)
class Cost(TextTask):
    """The cost of one prompt of each length, a batch of one.

    The prompt is a piece of the text; its last `decoded` tokens are decoded one by one. A shorter pass comes first and
    is not counted. Memory is the peak of the accelerators' allocations, or on a CPU that of the whole process (None
    where the system does not report it). A model that keeps no cache reads the prompt again for each token.
    """

    name: ClassVar[str] = "cost"
    prefixes: ClassVar[bool] = False
    decoded: int = 16

    def record(self, window: Window, engine: Scorer) -> dict[str, Any]:
        assert isinstance(engine, Engine)  # others are refused before the run
        ids = window.input_ids
        n_decoded = min(self.decoded, len(ids) // 2)
        engine.passed(ids[:64], 1)
        memory = PeakMemory(engine.model.device)
        return {"tokens": len(ids), **dict(zip(COST, (*engine.passed(ids, n_decoded), memory.at_most)))}


def figures(sample: Mapping[str, Any]) -> dict[str, str]:
    """A sample's figures in words, by their headings."""
    peak = sample["peak_bytes"]
    return {
        "prefill (s)": f"{sample['prefill_seconds']:.3g}",
        "decoded tokens/s": f"{1 / max(sample['decode_seconds'], 1e-9):.3g}",
        "KV cache": size_in_words(sample["kv_bytes"]),
        "peak memory": "" if peak is None else size_in_words(peak),
    }
