"""Part 2: time and memory of prefill and decoding, patched over stock, at real lengths and random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from at_scale.cells import Cell, Part
from at_scale.models import forward_cost, held, operations_a_second
from attention import (
    AGAIN,
    SHAPE,
    SHORT,
    STOCK,
    Decoder,
    growth,
    memory_growth,
    memory_in_a_process,
    prefill,
    prompt,
    random_models,
)
from report import WARM, Report, interleaved, over
from transformers import DynamicCache, LlamaConfig

STATIC, IN_ATTENTION = "yarn", ("dynamic_ntk", "self_extend", "dca", "rerope")
NAMES = (STOCK, AGAIN, STATIC, *IN_ATTENTION)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
}
TINY = {"num_hidden_layers": 1, "vocab_size": 256}
# At most, over stock; a static method is stock, but for noise.
MOST = {"prefill": 1.3, "decode": 1.1, "memory": 1.1}


@dataclass
class Speed(Part):
    """Llama-3.1-8B's shape in bfloat16 on a GPU, SmolLM2's in float32 on a CPU.

    A prefill is timed in three rounds of each of `rounds`, the longest on a GPU in one, after one not counted; a
    decode step in ten. A GPU tells the memory of a timed prefill; on a CPU it is measured by a prefill of its own.
    """

    name = "speed"
    title = "time and memory over stock transformers"

    @property
    def shape(self) -> dict[str, Any]:
        return TINY if self.tiny else LLAMA_8B if self.device == "cuda" else {"num_hidden_layers": 30}

    @property
    def lengths(self) -> tuple[int, ...]:
        return (256, 512) if self.tiny else (32_768, 131_072) if self.device == "cuda" else (4096, 8192)

    @cached_property
    def models(self) -> dict[str, Any]:
        trained = max(self.lengths) // 4
        return random_models(NAMES, trained, 2 * max(self.lengths), torch.device(self.device), **self.shape)

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(**{**SHAPE, **self.shape})

    @property
    def held_bytes(self) -> float:
        """The models share their weights; a decode step is timed with a cache for each."""
        return held(self.config, max(self.lengths), self.device, caches=len(NAMES))

    def cells(self) -> Sequence[Cell]:
        config, cells = self.config, []
        for length in self.lengths:
            once, rounds = forward_cost(config, length), self.prefills(length)
            cost, settings = (1 + len(NAMES) * rounds) * once, f"{rounds} rounds after one of stock"
            cells.append(Cell(f"prefill {length}", cost, lambda n=length: self.prefill(n), settings))
            cells.append(Cell(f"decode {length}", once, lambda n=length: self.decode(n)))
            cells += [
                Cell(f"memory {length} {name}", 2 * once, lambda n=length, name=name: self.memory(name, n))
                for name in NAMES
                if name != AGAIN and self.device == "cpu"
            ]
        return [replace(cell, settings=cell.settings or f"rounds {self.rounds}") for cell in cells]

    def speed(self) -> float:
        return operations_a_second(self.models[STOCK], min(self.lengths) // 2)

    def prefills(self, length: int) -> int:
        """Rounds."""
        return (1 if self.device == "cuda" and length == max(self.lengths) else 3) * self.rounds

    def prefill(self, length: int) -> dict[str, Any]:
        """Seconds of each model in each round, and, on a GPU, the bytes by which it raises the peak."""
        tokens = prompt(length, self.models[STOCK].device) % self.models[STOCK].config.vocab_size
        grown: dict[str, int] = {}

        def work(name: str) -> None:
            if self.device == "cuda":
                grown[name] = growth(self.models[name], tokens)
            else:
                prefill(self.models[name], tokens)

        for model in self.models.values():
            prefill(model, tokens[:, :SHORT])  # compiles
        prefill(self.models[STOCK], tokens)  # allocates
        works = {name: partial(work, name) for name in self.models}
        return {"seconds": interleaved(works, self.prefills(length), f"prefill of {length}"), "bytes": grown}

    def decode(self, length: int) -> dict[str, list[float]]:
        """Seconds of a step behind a cache of `length` tokens, of each model in each round."""
        decoders = {
            name: Decoder(model, [length], DynamicCache(config=model.config)) for name, model in self.models.items()
        }
        works = {name: decoder.step for name, decoder in decoders.items()}
        times = interleaved(works, WARM + 10 * self.rounds, f"decode, {length} cached")
        return {name: seconds[WARM:] for name, seconds in times.items()}

    def memory(self, name: str, length: int) -> int:
        """Bytes that a prefill takes at its peak on a CPU, in a process of its own, as memory is not given back."""
        if self.tiny:
            return memory_growth(self.models[name], length)
        return memory_in_a_process(name, max(self.lengths) // 4, 2 * max(self.lengths), length, torch.device("cpu"))

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        report = Report(self.name, seed=0, rehearsal=self.tiny)
        for length in self.lengths:
            prefills = kept.get(f"prefill {length}", {})
            for what, times in (("prefill", prefills.get("seconds")), ("decode", kept.get(f"decode {length}"))):
                for name in NAMES[1:] if times else ():
                    most = MOST[what] if name in IN_ATTENTION else None
                    report.add(
                        f"{what} {length}: time, {name} over stock", over(times, name, STOCK, skip=0), at_most=most
                    )
            measured = {name: kept[cell] for name in NAMES if (cell := f"memory {length} {name}") in kept}
            grown = prefills.get("bytes") or measured
            for name in (STATIC, *IN_ATTENTION) if STOCK in grown else ():
                if name in grown:
                    ratio = grown[name] / grown[STOCK]
                    report.add(f"prefill {length}: memory, {name} over stock", ratio, at_most=MOST["memory"])
        return {"shape": self.models[STOCK].config.to_dict(), "figures": report.figures, "measured": kept}
