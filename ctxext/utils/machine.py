"""The machine and versions recorded with a measurement."""

from __future__ import annotations

import platform

import torch

from ctxext.utils.values import counted


def versions() -> dict[str, str]:
    import transformers

    from ctxext import __version__

    return {"ctxext": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def machine(device: str) -> str:
    """The processor, its threads, and the device type."""
    return f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}, {device}"
