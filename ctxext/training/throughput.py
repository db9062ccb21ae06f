"""What a step of training reads and computes: tokens, targets, and the share of the devices' peak (MFU)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ctxext.core.apply import transformers_model
from ctxext.data.mixture import Mixture
from ctxext.data.packing import lengths_of
from ctxext.models.rope_tables import attention_layers, head_dim, span_of
from ctxext.models.text_config import text_config_of
from ctxext.training.settings import Settings

# Operations a second in bfloat16, dense, from the makers' data sheets (RTX: NVIDIA's architecture white papers, with
# float32 sums). The first name that a device's name contains counts.
PEAKS = {
    "B200": 2250e12, "H200 NVL": 835.5e12, "H200": 989.4e12, "H100 NVL": 835.5e12, "H100 PCIe": 756e12,
    "H100": 989.4e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12,
    "MI300X": 1307.4e12,
}  # fmt: skip
# A part of a GPU, and variants of a name with other peaks.
OTHERS = re.compile(r"\b(MIG|Laptop|Ti|D)\b")


def peak_of(device: str) -> float | None:
    """The peak of a device in operations a second, by its name in torch; None if it is not known."""
    if OTHERS.search(device):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)


@dataclass(frozen=True)
class Work:
    """Operations (a multiplication and an addition are two) of a forward and a backward pass over documents.

    Each weight takes two per token, and two for the gradient of its input; a trained one two more for its own. Each
    pair of a query and a key that it may attend to takes twelve per channel of a head. What gradient checkpointing
    repeats is not counted, nor are masked pairs and padding.

    Attributes:
        by_token: operations per token.
        by_pair: operations per pair in one layer.
        windows: the sliding window of each layer with attention, or its chunk; None for full attention.
        chunked: whether the windows are chunks, each of which attends to itself alone (Llama 4).
    """

    by_token: float
    by_pair: float
    windows: tuple[int | None, ...]
    chunked: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Work:
        config: Any = text_config_of(transformers_model(model).config)
        active = getattr(config, "num_experts_per_tok", None)
        by_token = 0.0
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding) or "original_module" in path.split("."):  # PEFT trains a copy of it
                continue
            for weight in module.parameters(recurse=False):
                numel = float(weight.numel())
                if weight.ndim < 2:
                    continue
                if isinstance(module, nn.Linear):  # weights of four bits are packed
                    numel = module.in_features * module.out_features
                elif weight.ndim == 3 and active:  # all experts of a layer
                    numel *= active / len(weight)
                by_token += numel * (6 if weight.requires_grad else 4)
        keys = getattr(config, "qk_head_dim", None) or head_dim(config)  # they differ in latent attention
        channels = config.num_attention_heads * (keys + (getattr(config, "v_head_dim", None) or head_dim(config)))
        layers = attention_layers(config)
        windows = tuple(span_of(config, layer) for layer in layers)
        return cls(by_token, 6.0 * channels, windows, "chunked_attention" in layers)

    def operations(self, documents: Iterable[int]) -> float:
        """For documents of these lengths, in tokens."""
        total = 0.0
        for length in documents:
            pairs = sum(self._pairs(length, min(length, window or length)) for window in self.windows)
            total += self.by_token * length + self.by_pair * pairs
        return total

    def _pairs(self, length: int, window: int) -> float:
        """The pairs of a layer that attend, in a document of `length` tokens."""
        first = window * (window + 1) / 2
        if self.chunked:
            chunks, rest = divmod(length, window)
            return chunks * first + rest * (rest + 1) / 2
        return first + (length - window) * window


@dataclass(frozen=True)
class Throughput:
    """What a step holds, over all processes; means over the run.

    Attributes:
        tokens: tokens of its rows.
        packing: the share of them that are not padding (packing efficiency).
        targets: tokens with a loss.
        least_seconds: what its operations take at the peak of all devices; None if that is unknown.
    """

    tokens: int
    packing: float
    targets: float
    least_seconds: float | None

    @classmethod
    def of(cls, accelerator: Accelerator, settings: Settings, model: nn.Module, mixture: Mixture) -> Throughput:
        """Of a model that is not sharded yet."""
        rows, device = settings.training.batch_size, accelerator.device
        peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        seconds = None
        if peak and settings.training.precision == "bf16":
            work = Work.of(model)
            each = mixture.mean(lambda part: work.operations(lengths_of([part])) / len(part.rows))
            seconds = rows * each / (peak * accelerator.num_processes)

        def counted(name: str) -> float:
            return rows * mixture.mean(lambda part: getattr(part.accounting, name) / len(part.rows))

        tokens = rows * mixture.length
        return cls(tokens, 1 - counted("padding") / tokens, counted("targets"), seconds)

    def at(self, seconds: float) -> dict[str, float]:
        """Tokens a second, and the share of the devices' peak if it is known, of a step that took so long."""
        known = {} if self.least_seconds is None else {"mfu": self.least_seconds / seconds}
        return {"tokens_per_second": self.tokens / seconds, **known}

    def __str__(self) -> str:
        return (
            f"each step reads {self.tokens:,} tokens: {100 * self.packing:.1f}% are text and the rest padding, "
            f"{self.targets:,.0f} have a loss"
        )


def in_words(tokens_per_second: float, mfu: float | None = None) -> str:
    return f"{tokens_per_second:,.0f} tokens/s, MFU {'unknown' if mfu is None else f'{100 * mfu:.0f}%'}"
