"""A fit of a public model, SmolLM2-135M-Instruct at twice its 8,192 tokens, beside static methods: on a CPU.

    python benchmarks/fit_smollm2.py

A forward pass of 16,384 tokens takes a minute and a half on two cores, so everything is smaller than in a default fit
and in benchmarks/fit.py: the start is chosen on one text, an evaluation reads one row, and the result is measured on
few prompts and windows. It takes over two hours; each part is kept in runs/fit_smollm2, from which an interrupted run
resumes.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fit import add_part, halves, key_difference, lost, mean, measure
from report import SMOLLM2, Report, kept, options
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import temporarily_extended
from ctxext.evals.prompts import Prompter
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.fitting.episodes import split
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import STARTS, GradientSettings, Validation, start_at
from ctxext.fitting.live import LiveFactors, frozen

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
from smollm2 import fetch

TRAINED, FACTOR = 8192, 2
TARGET = TRAINED * FACTOR
STATIC = ("llama3", "yarn")
# Texts a length; three keys in each.
TRIALS = {2048: 2, 4096: 2, TRAINED: 2, TARGET: 1}
DEPTHS, WINDOWS, SHORT_WINDOWS, SEED = (0.0, 0.5, 1.0), 2, 3, 7
RUNS = Path("runs/fit_smollm2")


def main() -> None:
    parser = options(__doc__, "docs/fit/smollm2.json")
    args = parser.parse_args()
    fetch(SMOLLM2)
    seen, text = halves()
    prompter = Prompter(AutoTokenizer.from_pretrained(SMOLLM2))
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2).eval()
    tried = kept(RUNS / "starts.json", lambda: starts(model, prompter, seen))
    saved = fitted(model, prompter, seen, min(tried, key=lambda name: tried[name]["total"]))
    measured = {}
    for name in ("fitted", "llama3", "none", "yarn"):
        extended = (
            nullcontext()
            if name == "none"
            else temporarily_extended(model, method=saved.method)
            if name == "fitted"
            else temporarily_extended(model, FACTOR, name)
        )
        with extended:
            measured[name] = kept(RUNS / f"{name}.json", lambda: measured_now(model, prompter, text))
    report_on(measured, saved, tried, args.output)


def say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, flush=True)


def starts(model: Any, prompter: Prompter, text: str) -> dict[str, dict[str, float]]:
    """The losses of each start on one row of held-out text that hides a key at its beginning."""
    _, held_out = split(text, prompter, TRAINED, TARGET)
    one = Validation((), (held_out.hidden(TARGET, 0.0, SEED),))
    live, tried = LiveFactors(model), {}
    with live, frozen(model):
        for name in STARTS:
            tried[name] = one.losses(model, live, start_at(name, live.rope, FACTOR), GradientSettings())
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


def measured_now(model: Any, prompter: Prompter, text: str) -> dict[str, Any]:
    say("measuring")
    return measure(model, prompter, text, TRIALS, TRAINED, DEPTHS, WINDOWS, SHORT_WINDOWS)


def report_on(
    measured: dict[str, dict[str, Any]], saved: SavedMethod, tried: dict[str, dict[str, float]], output: Path
) -> None:
    report, base, ours = Report("fit, SmolLM2-135M-Instruct", seed=SEED), measured["none"], measured["fitted"]
    for name, result in measured.items():
        add_part(report, name, result, base, TRAINED, TARGET)
    keys = {name: key_difference(ours, measured[name])._asdict() for name in STATIC}
    for name in STATIC:
        other = measured[name]
        report.add(f"fitted, loss of a key over {name}'s, in nats", lost(ours) - lost(other), at_most=0)
        report.add(
            f"fitted, loss of text over {name}'s, in nats a token", mean(ours["long"]) - mean(other["long"]), at_most=0
        )
    report.add(
        f"fitted, loss within {TRAINED}, over the unextended model's",
        mean(ours["short"]) / mean(base["short"]) - 1, at_most=0.01,
    )  # fmt: skip
    report.add("the fit in seconds", saved.about["seconds"])
    sizes = {"trials": TRIALS, "depths": DEPTHS, "windows": WINDOWS, "short_windows": SHORT_WINDOWS}
    report.finish(
        output, starts=tried, keys_against=keys, settings=sizes, method=asdict(saved.method), about=saved.about,
        text={name: {"long": result["long"], "short": result["short"]} for name, result in measured.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
