"""What a person plans by: seconds of a prefill and of a decode step, and bytes of the KV cache, of stock transformers.

docs/planning.py turns these into docs/planning.md, beside a model of the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from at_scale.cells import Cell, Part
from at_scale.models import forward_cost, held
from attention import STOCK, Decoder, cache_bytes, prefill, prompt, random_models
from report import WARM, seconds
from transformers import DynamicCache, LlamaConfig

# The shapes of SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B.
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip((
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "tie_word_embeddings",
    ), shape))
    for name, shape in {
        "0.1B": (576, 1536, 30, 9, 3, 64, 49_152, True),
        "1B": (2048, 8192, 16, 32, 8, 64, 128_256, True),
        "8B": (4096, 14_336, 32, 32, 8, 128, 128_256, False),
        "70B": (8192, 28_672, 80, 64, 8, 128, 128_256, False),
    }.items()
}  # fmt: skip
STEPS = 10  # of decoding
LENGTHS = {"32k": 2**15, "128k": 2**17, "1M": 2**20}


@dataclass
class Planning(Part):
    """A cell is one shape at one length: on a GPU those that may fit on one, on a CPU SmolLM2's at its own lengths."""

    name = "planning"
    title = "prefill, decoding and KV cache of stock transformers at length"

    @property
    def plan(self) -> list[tuple[str, int]]:
        if self.tiny:
            return [("tiny", 256)]
        if self.device == "cuda":
            return [(shape, length) for length in LENGTHS.values() for shape in ("0.1B", "1B", "8B")]
        return [("0.1B", length) for length in (1024, 2048, 4096, 8192)]

    def shape(self, name: str) -> dict[str, Any]:
        return {**SHAPES["0.1B"], "num_hidden_layers": 2, "vocab_size": 256} if name == "tiny" else SHAPES[name]

    @property
    def held_bytes(self) -> float:
        return max(held(LlamaConfig(**self.shape(shape)), length, self.device) for shape, length in self.plan)

    def cells(self) -> Sequence[Cell]:
        return [
            Cell(
                f"{shape} {length}",
                2 * self.rounds * forward_cost(LlamaConfig(**self.shape(shape)), length),
                lambda shape=shape, length=length: self.measured(shape, length),
                f"rounds {self.rounds}",
            )
            for shape, length in self.plan
        ]

    def speed(self) -> float:
        shape, length = self.plan[0]
        self.measured(shape, 64)  # what the first call allocates
        config = LlamaConfig(**self.shape(shape))
        return forward_cost(config, length // 4) / self.measured(shape, length // 4)["prefill_seconds"]

    def measured(self, shape: str, length: int) -> dict[str, Any]:
        """Medians of the prefill and of decode steps behind `length` random keys, or that it does not fit."""
        try:
            model = random_models((STOCK,), length, length, torch.device(self.device), **self.shape(shape))[STOCK]
            tokens = prompt(length, model.device) % model.config.vocab_size
            prefills = [seconds(lambda: prefill(model, tokens)) for _ in range(2 * self.rounds)]
            decoder = Decoder(model, [length], DynamicCache(config=model.config))
            kv = cache_bytes(decoder.cache)
            steps = [seconds(decoder.step) for _ in range(WARM + STEPS * self.rounds)]
        except torch.OutOfMemoryError as error:
            return {"shape": shape, "length": length, "fits": False, "why": str(error).splitlines()[0][:300]}
        return {
            "shape": shape, "length": length, "fits": True, "bytes_each": model.dtype.itemsize, "kv_bytes": kv,
            "prefill_seconds": min(prefills), "decode_seconds": median(steps[WARM:]),
        }  # fmt: skip

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        return {"measured": list(kept.values())}
