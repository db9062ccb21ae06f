"""How every benchmark here reports: a line a figure, a JSON file, and the exit code."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import ctxext


@dataclass
class Report:
    """Figures with their bars. `finish` writes them and exits non-zero when one is short."""

    name: str
    seed: int
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, value: float, at_most: float | None = None, at_least: float | None = None) -> None:
        """One figure; without a bar it is there for comparison."""
        ok = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        bar = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}" if at_least is not None else "no bar"
        self.figures[name] = {"value": value, "bar": bar, "ok": ok}
        print(f"{name} {value:.4g} ({bar}) {'ok' if ok else 'short'}", flush=True)

    def finish(self, path: Path, **more: Any) -> None:
        record = {
            "benchmark": self.name,
            "seed": self.seed,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "ctxext": ctxext.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "figures": self.figures,
            **more,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        sys.exit(0 if all(figure["ok"] for figure in self.figures.values()) else 1)
