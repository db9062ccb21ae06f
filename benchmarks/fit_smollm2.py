"""A fit of a public model, SmolLM2-135M-Instruct at twice its 8,192 tokens, on a CPU.

    python benchmarks/fit_smollm2.py

benchmarks/at_scale measures it beside other methods, on other texts (part `quality`). A forward pass of 16,384 tokens
takes up to a minute and a half on two cores, so this is smaller than a default fit: the start is chosen on two rows,
and an evaluation reads one. Each step is kept in runs/fit_smollm2, from which an interrupted run resumes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fit import halves
from report import SMOLLM2, Report, kept, options
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.evals.prompts import Prompter
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.fitting.episodes import split
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import STARTS, GradientSettings, Validation, start_at
from ctxext.fitting.live import LiveFactors, frozen

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
from smollm2 import fetch

TRAINED, FACTOR, SEED = 8192, 2, 7
TARGET = TRAINED * FACTOR
RUNS = Path("runs/fit_smollm2")


def main() -> None:
    args = options(__doc__, "docs/fit/smollm2.json").parse_args()
    fetch(SMOLLM2)
    text, _ = halves()
    prompter = Prompter(AutoTokenizer.from_pretrained(SMOLLM2))
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.bfloat16).eval()
    tried = kept(RUNS / "starts.json", lambda: starts(model, prompter, text))
    saved = fitted(model, prompter, text, min(tried, key=lambda name: tried[name]["total"]))
    report = Report("fit, SmolLM2-135M-Instruct", seed=SEED)
    report.add("the fit in seconds", saved.about["seconds"])
    report.finish(args.output, starts=tried, method=asdict(saved.method), about=saved.about)


def say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, flush=True)


def starts(model: Any, prompter: Prompter, text: str) -> dict[str, dict[str, float]]:
    """The losses of each start on rows of held-out text that hide a key at the beginning and in the middle."""
    _, held_out = split(text, prompter, TRAINED, TARGET)
    two = Validation((), tuple(held_out.hidden(TARGET, depth, SEED) for depth in (0.0, 0.5)))
    live, tried = LiveFactors(model), {}
    with live, frozen(model):
        for name in STARTS:
            tried[name] = two.losses(model, live, start_at(name, live.rope, FACTOR), GradientSettings())
            say(f"{name} {tried[name]}")
    return tried


def fitted(model: Any, prompter: Prompter, text: str, start: str) -> SavedMethod:
    path = RUNS / "method.json"
    if not path.is_file():
        settings = GradientSettings(start=start, evaluations=4, rows=1)
        names = ("SmolLM2-135M-Instruct", "first half of Persuasion")
        saved = fit(
            model, prompter, text, FACTOR, settings=settings, names=names,
            advance=lambda share, state: say(f"{share:4.0%} {state}"),
        )  # fmt: skip
        saved.save(path)
    return read_saved(path)


if __name__ == "__main__":
    main()
