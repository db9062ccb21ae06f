"""Published results, for `ctxext eval --suite`: `python tools/published_rows.py ruler|babilong CHECKOUT`.

Of github.com/NVIDIA/RULER it reads the table of the README; of github.com/booydar/babilong the answers that are in the
repository, scored by its own code. Writes `ctxext/evals/published/NAME.json`.
"""

from __future__ import annotations

import csv
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

PUBLISHED = Path(__file__).resolve().parents[1] / "ctxext/evals/published"
LENGTHS = tuple(4096 * 2**k for k in range(6))
# The notes under the table: whose results these rows are, if not NVIDIA's.
REPORTED = {
    "Jamba-1.5-large": "arXiv:2408.12570", "FILM-7B": "arXiv:2404.16811", "Qwen2.5": "arXiv:2501.15383",
    "Qwen3": "arXiv:2505.09388", "EXAONE-4.0": "arXiv:2507.11407",
}  # fmt: skip


def shown(checkout: Path, path: str) -> str:
    """A file at the commit that is checked out."""
    command = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def ruler(checkout: Path) -> list[dict]:
    """The rows of the README's table."""
    readme = shown(checkout, "README.md")
    found: list[dict] = []
    for line in re.findall(r"^\|?\[.*\|.*$", readme, re.M):
        cells = [re.sub(r"</?ins>", "", cell).strip() for cell in line.strip("|").split("|")]
        name, size = re.match(r"\[([^\]]+)\]\([^)]*\)\s*(?:\((.+)\))?", cells[0]).groups()
        source = next((paper for model, paper in REPORTED.items() if name.startswith(model)), "NVIDIA")
        scores = {n: float(cell) for n, cell in zip(LENGTHS, cells[3:]) if re.fullmatch(r"[\d.]+", cell)}
        found.append(
            {"model": name.rstrip("*"), "size": size or "", "effective": cells[2], "scores": scores, "source": source}
        )
    return found


def babilong(checkout: Path) -> list[dict]:
    """The mean accuracy on qa1 to qa5 of each published run, by its file names' lengths."""
    metrics = runpy.run_path(str(checkout / "babilong/metrics.py"))
    runs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for path in sorted(
        (checkout / "babilong_evals").rglob("qa[1-5]_*_instruction_yes_examples_yes_post_prompt_yes*.csv")
    ):
        task, length, how = path.stem.split("_", 2)
        with path.open(newline="", encoding="utf-8") as file:
            judged = [
                metrics["compare_answers"](row["target"], row["output"], row["question"], metrics["TASK_LABELS"][task])
                for row in csv.DictReader(file)
            ]
        tokens = int(length[:-1]) * {"k": 1024, "M": 1024**2}[length[-1]]
        by_length = runs.setdefault((path.parent.name, "chat" if how.endswith("chat_template_yes") else ""), {})
        by_length.setdefault(tokens, []).append(100 * sum(judged) / len(judged))
    return [
        {
            "model": model, "size": chat, "effective": "", "source": "babilong_evals",
            "scores": {n: round(sum(all_) / 5, 1) for n, all_ in sorted(by_length.items()) if n and len(all_) == 5},
        }
        for (model, chat), by_length in runs.items()
    ]  # fmt: skip


def main(name: str, folder: str) -> None:
    checkout = Path(folder)
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    of = {"ruler": (ruler, "NVIDIA/RULER"), "babilong": (babilong, "booydar/babilong")}
    read, repository = of[name]
    source = f"https://github.com/{repository}/tree/{commit}"
    published = {"source": source, "rows": read(checkout)}
    (PUBLISHED / f"{name}.json").write_text(json.dumps(published, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
