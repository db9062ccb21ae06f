"""RULER's published results, for `ctxext eval --suite ruler-nvidia`: `python tools/ruler_rows.py CHECKOUT`.

It reads the table in the README of a checkout of github.com/NVIDIA/RULER, and writes
`ctxext/evals/ruler/published.json`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PUBLISHED = Path(__file__).resolve().parents[1] / "ctxext/evals/ruler/published.json"
LENGTHS = tuple(4096 * 2**k for k in range(6))
# The notes under the table: whose results these rows are, if not NVIDIA's.
REPORTED = {
    "Jamba-1.5-large": "arXiv:2408.12570", "FILM-7B": "arXiv:2404.16811", "Qwen2.5": "arXiv:2501.15383",
    "Qwen3": "arXiv:2505.09388", "EXAONE-4.0": "arXiv:2507.11407",
}  # fmt: skip


def rows(readme: str) -> list[dict]:
    """The rows of the table of results, scores in percent by length in tokens."""
    found = []
    for line in re.findall(r"^\|?\[.*\|.*$", readme, re.M):
        cells = [re.sub(r"</?ins>", "", cell).strip() for cell in line.strip("|").split("|")]
        name, size = re.match(r"\[([^\]]+)\]\([^)]*\)\s*(?:\((.+)\))?", cells[0]).groups()
        source = next((paper for model, paper in REPORTED.items() if name.startswith(model)), "NVIDIA")
        scores = {n: float(cell) for n, cell in zip(LENGTHS, cells[3:]) if re.fullmatch(r"[\d.]+", cell)}
        found.append(
            {"model": name.rstrip("*"), "size": size or "", "effective": cells[2], "scores": scores, "source": source}
        )
    return found


def main(checkout: str) -> None:
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    readme = subprocess.run(
        ["git", "-C", checkout, "show", "HEAD:README.md"], check=True, capture_output=True, text=True
    ).stdout
    source = f"https://github.com/NVIDIA/RULER/blob/{commit}/README.md"
    PUBLISHED.write_text(json.dumps({"source": source, "rows": rows(readme)}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
