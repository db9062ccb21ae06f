"""How long `ctxext export` takes from a config alone, beside transformers reading the same config.

    python benchmarks/export.py

Every run is a process of its own: most of its time is that of importing torch and transformers.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import Report, options
from rich.progress import track

from ctxext.assets import MODEL


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/export.json")
    parser.add_argument("--config", type=Path, default=MODEL / "config.json")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    reads = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(args.config.parent)!r})"
    commands = {
        "import torch": ["-c", "import torch"],
        "transformers reads the config": ["-c", reads],
        "ctxext export": ["-m", "ctxext", "export", str(args.config), "--factor", "4", "--method", "yarn"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    # The first run of each fills the machine's file cache.
    for run in track(range(args.runs + 1), "running"):
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True)
            if run:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    report = Report("export", seed=0)
    for name in ("import torch", "transformers reads the config"):
        report.add(f"{name}, s", median[name])
    report.add("ctxext export, s", median["ctxext export"], at_most=2.0)
    report.add(
        "ctxext export over transformers reading the config",
        median["ctxext export"] / median["transformers reads the config"],
        at_most=1.5,
    )
    report.finish(args.output, seconds=seconds)


if __name__ == "__main__":
    main()
