"""Estimate a run's time and memory from two short passes on its machine, and measure the actual ones."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


class PeakMemory:
    """Peak memory since `restart()`: of the GPU, or of this process without one.

    `at_most` and `now` are in bytes; None if unknown (a CPU without Linux' /proc).
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None
        self.restart()

    def restart(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)
        elif Path("/proc/self/clear_refs").exists():
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns freed memory, so that it no longer counts
            with contextlib.suppress(OSError):  # a sandbox forbids it: the peak is then that of the process so far
                Path("/proc/self/clear_refs").write_text("5")

    @property
    def at_most(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.cuda) if self.cuda else resident("VmHWM")

    @property
    def now(self) -> int | None:
        return torch.cuda.memory_allocated(self.cuda) if self.cuda else resident("VmRSS")

    @property
    def room(self) -> int:
        """Free memory in bytes."""
        if self.cuda:
            cached = torch.cuda.memory_reserved(self.cuda) - torch.cuda.memory_allocated(self.cuda)
            return torch.cuda.mem_get_info(self.cuda)[0] + cached
        import psutil

        return psutil.virtual_memory().available


def resident(what: str) -> int | None:
    """Memory of this process in bytes, now (VmRSS) or at its peak (VmHWM); None without Linux' /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of each process.

    Attributes:
        held: bytes before the first step: weights and everything else loaded.
        state: bytes of AdamW's two moments.
        growth: bytes that one micro-batch adds, including gradients; None, like `held`, if unknown.
        room: free bytes.
        seconds: of the whole training.
    """

    held: int | None
    state: int
    growth: int | None
    room: int
    seconds: float

    @property
    def peak(self) -> int | None:
        return None if self.held is None or self.growth is None else self.held + self.state + self.growth

    @property
    def fits(self) -> bool:
        """Whether it fits in memory, as far as is known."""
        return self.growth is None or self.state + self.growth <= self.room

    def __str__(self) -> str:
        said = f"about {duration(self.seconds)} of training"
        if self.peak is None:
            return f"{said}; memory is unknown on this system."
        said += (
            f" and {gib(self.peak)} per process ({gib(self.held)} now, {gib(self.state)} for the optimizer, "
            f"{gib(self.growth)} for a micro-batch)."
        )
        if not self.fits:
            said += (
                f" [bold red]Only {gib(self.room)} are free.[/] Lower data.length or "
                "training.micro_batch_size, or set training.gradient_checkpointing to recompute or offload."
            )
        return said


def estimate(
    step: Callable[[int], object],
    *,
    length: int,
    micro_batches: int,
    trained: int,
    memory: PeakMemory,
    multiple: int = 1,
) -> Estimate:
    """Run forward and backward passes of an eighth and a quarter of `length`, and extrapolate.

    Memory is linear in the tokens, time has a linear and (for attention) a quadratic term. Most of the error comes from
    the state of caches and allocator, which a short pass does not show.

    Args:
        step: runs forward and backward passes of a micro-batch of this many tokens, a multiple of `multiple`.
        length: tokens of a sequence.
        micro_batches: micro-batches of this process in the whole run.
        trained: number of trained parameters on this process.
    """
    held = memory.now
    unit = math.lcm(64, multiple)
    if 2 * unit > length:
        unit = multiple
    short = max(1, length // 8 // unit) * unit
    long = 2 * short
    step(short)  # the first call allocates and compiles
    seconds, growth = [], []
    for tokens in (short, long):
        memory.restart()
        before = memory.now or 0
        step(tokens)
        growth.append((memory.at_most or 0) - before)
        begin = time.perf_counter()
        step(tokens)
        seconds.append(time.perf_counter() - begin)
    (fast, slow), (small, large) = seconds, growth
    # seconds = a n + b n², both >= 0
    square = max(0.0, (slow / long - fast / short) / (long - short))
    each = max(0.0, slow / long - square * long)
    return Estimate(
        held=held,
        state=8 * trained,
        # Constant parts, such as gradients, are in both.
        growth=None if held is None else round(large + max(0, large - small) * (length - long) / (long - short)),
        room=memory.room,
        seconds=micro_batches * (each * length + square * length**2),
    )


def gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """`1 h 05 min`, `3 min 20 s`, `8 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
