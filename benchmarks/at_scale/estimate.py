"""What a run on a GPU would take, without running anything: operations of the cells that are left, and time at a rate.

    python benchmarks/at_scale/run.py --plan

The time is operations over a share of the H100's peak, which the H200 has, too. A wide model in bfloat16 reaches about
half of it (docs/planning.md); a narrow one, whose steps are bound by memory and by starting kernels, far less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from at_scale.cells import Part, Store, minutes

PEAK = 989.4e12  # operations a second, dense, in bfloat16
SHARES = (0.5, 0.05)  # of the peak


@dataclass(frozen=True)
class Estimate:
    """What is left of a part.

    Attributes:
        device: "cuda", or "cpu" for a part that runs there alone.
        operations: None where the cost of a cell is a guess in seconds.
        seconds: at each of SHARES; None on a CPU before the first cell is measured.
        held_bytes: the weights and KV caches of the largest cell; None if the code cannot tell.
    """

    part: str
    device: str
    cells: int
    done: int
    operations: float | None
    seconds: tuple[float, float] | None
    held_bytes: float | None

    def row(self) -> list[str]:
        """The words of a table, `done` left out."""
        times = ["–", "–"] if self.seconds is None else [minutes(each) for each in self.seconds]
        return [
            self.part,
            str(self.cells),
            "–" if self.operations is None else f"{self.operations:.1e}",
            *times,
            "–" if self.held_bytes is None else f"{self.held_bytes / 2**30:.1f} GiB",
        ]


def estimate(part_class: type[Part], raw: Path, rounds: int = 1) -> Estimate:
    """Of the cells that are not in the folder `raw`; on a GPU unless the part runs on a CPU alone.

    The rate of a part with measured cells is theirs.
    """
    device = part_class.only_on or "cuda"
    part = part_class(raw / f"{part_class.name}-{device}", device, rounds=rounds, planned=True)
    cells = part.cells()
    done = Store(part.folder / "cells.json").done(cells)
    left = sum(cell.cost for cell in cells if cell.name not in done)
    spent = sum(entry["seconds"] for entry in done.values())
    if spent:
        rate = sum(cell.cost for cell in cells if cell.name in done) / spent
        seconds = (left / rate, left / rate)
    elif part.in_seconds:
        seconds = (left, left)
    else:
        seconds = None if device == "cpu" else (left / (SHARES[0] * PEAK), left / (SHARES[1] * PEAK))
    return Estimate(
        part.name, device, len(cells), len(done), None if part.in_seconds else left, seconds, part.held_bytes
    )


def total(found: Iterable[Estimate]) -> Estimate:
    """All that runs on a GPU."""
    of = [each for each in found if each.device == "cuda"]
    first, second = (sum(each.seconds[k] for each in of if each.seconds) for k in (0, 1))
    operations = sum(each.operations or 0 for each in of)
    most = max(each.held_bytes or 0 for each in of)
    return Estimate(
        "all on a GPU",
        "cuda",
        sum(each.cells for each in of),
        sum(each.done for each in of),
        operations,
        (first, second),
        most,
    )


HEAD = [
    "part",
    "cells",
    "operations",
    *(f"time at {100 * share:g}% of the peak" for share in SHARES),
    "weights and KV caches",
]


def printed(found: list[Estimate]) -> str:
    """The table for a terminal, with the cells that are done."""
    head = [*HEAD[:2], "done", "operations left", *HEAD[3:]]
    on_cpu = [each.part for each in found if each.device == "cpu"]
    all_of_them = [total(found)] if len(found) > len(on_cpu) else []
    rows = [[*each.row()[:2], str(each.done), *each.row()[2:]] for each in (*found, *all_of_them)]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in (head, *rows)]
    return "\n".join([
        *lines,
        f"The peak is {PEAK / 1e12:.0f} TFLOP/s (H100, H200). Parts with measured cells are taken at their rate.",
        "Not counted: loading, and starting kernels, which is most of the time of a small model.",
        *([f"On the CPU alone: {', '.join(on_cpu)}."] if on_cpu else []),
    ])  # fmt: skip
