"""ctxext beside the authors' code and other packages: what `make fidelity` runs, in a few minutes on a CPU.

    python benchmarks/fidelity/run.py                    # writes docs/fidelity/summary.json and the tables of the page
    python benchmarks/fidelity/run.py --tiny --output runs/fidelity.json

Prints a line for each number and exits non-zero if one is above its bar. The trained parts are commands of their own
(posgen.py, cope.py), and so is what the authors' code gives (authors.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fidelity import frequencies, key_tokens, posgen, ruler_lm_eval, sliding
from fidelity.row import ROOT, Row
from report import Report

COMMAND = "python benchmarks/fidelity/run.py"


def origin(part: str) -> dict[str, str]:
    """Where the other side of a comparison comes from, and the command that made it."""
    if part == "lm-eval":
        version = importlib.metadata.version("lm_eval")
        return {"source": f"lm_eval {version}, ruler", "link": "https://pypi.org/project/lm_eval", "command": COMMAND}
    if part == "loop":
        return {"source": "a loop in sliding.py", "link": "../benchmarks/fidelity/sliding.py", "command": COMMAND}
    of = frequencies.golden()[part]
    repository = of["repository"].removeprefix("https://github.com/")
    return {
        "source": f"{repository}@{of['commit'][:7]}",
        "link": f"{of['repository']}/blob/{of['commit']}/{of['file']}",
        "command": of["command"],
    }


def sections(tiny: bool) -> Iterator[tuple[str, list[Row]]]:
    yield "frequencies", [*frequencies.rows(tiny), *posgen.rows(tiny)]
    yield "sliding", list(sliding.rows(tiny))
    yield "key_tokens", list(key_tokens.rows(tiny))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="every comparison on less, in seconds")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/fidelity/summary.json")
    args = parser.parse_args()
    report, about = Report("fidelity", seed=0), {}
    tasks = ruler_lm_eval.compared(ruler_lm_eval.tasks(args.tiny))
    for section, rows in (*sections(args.tiny), ("ruler", list(ruler_lm_eval.rows(tasks)))):
        for row in rows:
            report.add(row.name, row.value, at_most=row.at_most)
            about[row.name] = {"section": section, "of": row.n, **origin(row.part)}
    ruler = {
        one.task: {"worded_alike": one.worded_alike, "tokens": one.tokens, "reasons": one.reasons} for one in tasks
    }
    try:
        report.finish(args.output, command=COMMAND + " --tiny" * args.tiny, about=about, ruler=ruler)
    finally:
        if not args.tiny:
            subprocess.run([sys.executable, str(ROOT / "docs/update_readme.py")], check=True)


if __name__ == "__main__":
    main()
