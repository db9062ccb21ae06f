"""The machine and versions recorded with a measurement."""

from __future__ import annotations

import platform

import torch

from ctxext.utils.values import counted


def versions() -> dict[str, str]:
    import transformers

    from ctxext import __version__

    return {"ctxext": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def device_name(device: str) -> str:
    """A GPU by its name, others by their type."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device


def machine(device: str) -> str:
    """The processor, its threads, and the device."""
    return f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}, {device_name(device)}"


def slow_in_bfloat16(device: str) -> bool:
    """Whether `device` is a CPU on which oneDNN has no kernels for bfloat16: it multiplies ten times as slowly there as
    in float32, as without AVX-512."""
    return torch.device(device).type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
