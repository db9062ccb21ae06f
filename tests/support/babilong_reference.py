"""Goldens of BABILong's code at one commit: `python tests/support/babilong_reference.py CHECKOUT`.

Of a clone of github.com/booydar/babilong it runs `babilong/prompts.py` and `babilong/metrics.py`, unmodified: prompts
of a made-up context, and verdicts on published answers of Phi-3-mini (`babilong_evals`), half of them right.
"""

from __future__ import annotations

import csv
import json
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path

GOLDEN = Path(__file__).with_name("babilong_golden.json")
TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
CONTEXT, QUESTION = " Mary went to the office.\nIt was cold. ", "Where is Mary? "
ANSWERED = "babilong_evals/microsoft/Phi-3-mini-128k-instruct"


def main(checkout: Path) -> None:
    prompts = runpy.run_path(str(checkout / "babilong/prompts.py"))
    metrics = runpy.run_path(str(checkout / "babilong/metrics.py"))
    asked = {
        task: prompts["get_formatted_input"](
            CONTEXT,
            QUESTION,
            *(prompts["DEFAULT_PROMPTS"][task][part] for part in ("examples", "instruction", "post_prompt")),
        )
        for task in TASKS
    }
    verdicts = []
    for task in TASKS:
        rows = []
        for path in sorted((checkout / ANSWERED).glob(f"{task}_*k_*.csv")):
            with path.open(newline="", encoding="utf-8") as file:
                rows += [(row["target"], row["output"], row["question"]) for row in csv.DictReader(file)]
        labels = metrics["TASK_LABELS"][task]
        judged = [(task, *row, metrics["compare_answers"](*row, labels)) for row in sorted(set(rows))]
        for right in (True, False):
            verdicts += islice((each for each in judged if each[-1] is right), 0, None, max(1, len(judged) // 60))
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    golden = {"commit": commit.stdout.strip(), "prompts": asked, "verdicts": verdicts}
    GOLDEN.write_text(json.dumps(golden, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
