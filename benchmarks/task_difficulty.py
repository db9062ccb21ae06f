"""How difficult the retrieval tasks are: SmolLM2-135M-Instruct within its trained length, on a CPU.

    python benchmarks/task_difficulty.py

A task that a model fails within its trained length cannot compare extensions of that model. So every task is asked
within it, in the model's chat format, beside the score by chance. Entries that --output has already are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from report import SMOLLM2, Report, options
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.evals.association import NAMES
from ctxext.evals.loading import load_text
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import RetrievalTask, Sample, make_task
from ctxext.evals.statistics import wilson
from ctxext.evals.targets import LiveModel

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
from smollm2 import fetch as fetch_model

# The task, its settings, its text, and the length in tokens.
TASKS: dict[str, tuple[str, dict, str | None, int]] = {
    "passkey": ("passkey", {}, None, 768),
    "needles": ("needles", {}, None, 768),
    "nolima": ("nolima", {}, None, 768),
    "mrcr": ("mrcr", {}, None, 768),
    "counting": ("counting", {}, None, 768),
    "code": ("code", {}, "code", 768),
    "passkey in code": ("passkey", {"language": "code"}, "code", 768),
    **{
        f"passkey in {name}": ("passkey", {"language": name}, name, 768)
        for name in ("de", "fr", "es", "ru", "zh", "ja", "ar")
    },
    # As easy as they get.
    "nolima, hardly any text": ("nolima", {}, None, 128),
    "mrcr, one text": ("mrcr", {"needles": 1, "distractors": 0}, None, 320),
    "counting, two or three": ("counting", {"most": 3, "sentences": 4}, None, 192),
    "code, one function": ("code", {"distractors": 0}, None, 256),
}


def by_chance(name: str, task: RetrievalTask, samples: Sequence[Sample]) -> float:
    """The score of the best answer that does not depend on the prompt's text, or of another candidate in it."""
    if name == "nolima":
        return 1 / len(NAMES)
    if name == "counting":
        return 1 / (task.most - 1)
    if name == "code" and task.distractors:
        return 1 / (task.distractors + 1)
    if name == "mrcr":  # the wrong one of the texts that were asked for
        others = [other.references[0] for other in samples]
        scores = [s.score(f"{'' if s.begun else s.lead} {o}") for s in samples for o in others if o != s.references[0]]
        return sum(scores) / len(scores)
    return 0.0


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/task_difficulty.json")
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--tasks", default=";".join(TASKS))
    args = parser.parse_args()
    if args.model == SMOLLM2:
        fetch_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    target = LiveModel(model, Prompter(tokenizer), args.model.name)
    report = Report(f"difficulty of the tasks, {args.model.name}", seed=0)
    measured = json.loads(args.output.read_text(encoding="utf-8"))["measured"] if args.output.is_file() else {}
    for label in args.tasks.split(";"):
        name, settings, text, length = TASKS[label]
        if label not in measured:
            task, haystack = make_task(name, **settings), load_text(text, tokenizer, 0)
            places = task.places([length], [0.5], args.trials, 0)
            samples = [task.sample(place, target.prompter, haystack) for place in places]
            records = [r for part in target.outcomes([[[sample]] for sample in samples], False) for _, r in part]
            share = wilson(sum(record["score"] for record in records), len(records))
            measured[label] = {
                "length": length, **share._asdict(), "by_chance": by_chance(name, task, samples),
                "answers": [[record["expected"], record["got"]] for record in records],
            }  # fmt: skip
        report.add(f"{label}, {length} tokens", measured[label]["value"])
    report.finish(args.output, model=args.model.name, style=target.prompter.style, depth=0.5, measured=measured)


if __name__ == "__main__":
    main()
