"""Fitted rescale factors beside every named static method, on the bundled model: no weight changes.

    python benchmarks/fit.py                   # ×2 to ×32, five seeds (×16: two, ×32: one)
    python benchmarks/fit.py --factors 8 --seeds 0
    python benchmarks/fit.py --ablation 0 --factors 4  # what each part of the fit does

Fitted on the first half of *Persuasion*, measured on the second: passkeys at every length from a quarter of the
trained one to the target, text at the target length and within the trained one, the same samples for every method.
Fits run one after another, so that each has the machine to itself. Each part is kept in runs/fit, from which an
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import texts
import torch
from report import Report, kept, options
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ctxext import extend_context, temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.encodings.rope import RopeGeometry
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity, stretches, window_stretches
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, fingerprint
from ctxext.evals.statistics import Difference, paired_difference, paired_loss_difference
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.fitting import gradient
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import GradientSettings
from ctxext.methods import RopeScaling, make_method

STATIC = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3", "abf", "resonance", "drope")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Texts a length; fewer where the target is LONG, in tokens, as are the fits; still fewer of such a length itself.
TRIALS, FEW_TRIALS, LONG_TRIALS, LONG = 36, 12, 4, 8192
WINDOWS, SHORT_WINDOWS, SEED = 10, 24, 7
SETTINGS = {
    "trials": TRIALS, "few_trials": FEW_TRIALS, "long_trials": LONG_TRIALS, "long": LONG, "depths": DEPTHS,
    "windows": WINDOWS, "short_windows": SHORT_WINDOWS,
}  # fmt: skip
# Against the defaults: one thing changed in each.
ABLATION: dict[str, dict[str, Any]] = {
    "its start, no descent": {"evaluations": 1},
    "λ alone": {"learned": "factors"},
    "attention factor alone": {"learned": "attention"},
    "a number for each pair, too": {"learned": "pairs"},
    "no keys": {"retrieval": 0.0},
    "start from yarn": {"start": "yarn"},
}
# These at every factor of an ablation; the others at its first alone.
MAIN = ("its start, no descent", "λ alone", "attention factor alone", "a number for each pair, too")
# What the kept parts depend on besides their names: also that they say where their texts begin.
MEASURED = fingerprint(SETTINGS, SEED, "start")
FITTED = fingerprint(asdict(GradientSettings()), gradient.TOKENS, gradient.KEY_NATS, gradient.STARTS)
RUNS = Path("runs/fit")


def main() -> None:
    parser = options(__doc__, "docs/fit")
    parser.add_argument("--factors", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--ablation", type=int, nargs="*", help="seeds; measure parts of the fit instead")
    args = parser.parse_args()
    if args.ablation is not None:
        ablate(args)
    parts: list[Part] = []
    for factor in args.factors:
        parts += [(factor, f"fitted, seed {seed}", {"seed": seed}, factor) for seed in seeds_at(factor, args.seeds)]
        parts += [(factor, name, None, factor) for name in ("none", *STATIC)]
    measured = run(parts)
    report = Report("fit", seed=SEED)
    table = {factor: compare(report, factor, measured, seeds_at(factor, args.seeds)) for factor in args.factors}
    draw(table, args.output / "lambda.png")
    report.finish(args.output / "summary.json", table=table, settings=SETTINGS)


def seeds_at(factor: int, seeds: list[int]) -> list[int]:
    return seeds[: max(1, 2 * LONG // (512 * factor))] if 512 * factor >= LONG else seeds


def trials_at(length: int, target: int) -> int:
    return LONG_TRIALS if length >= LONG else FEW_TRIALS if target >= LONG else TRIALS


# ------------------------------------------------------------------------------------------- the parts


Part = tuple[int, str, dict[str, Any] | None, int]


def run(parts: list[Part]) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Fit what is to be fitted and measure everything: by factor, name and the factor measured up to."""
    logging.disable_progress_bar()
    return {
        (factor, name, to): kept(measured_file(factor, name, to, how is not None), partial(part, factor, name, how, to))
        for factor, name, how, to in track(parts, "measuring")
    }


def fit_file(factor: int, name: str) -> Path:
    return RUNS / FITTED / f"x{factor} {name}.json"


def measured_file(factor: int, name: str, to: int, fitted: bool) -> Path:
    return RUNS / MEASURED / (FITTED if fitted else "static") / f"x{factor} {name}, to x{to}.json"


def ready() -> tuple[Any, Prompter, str, str]:
    """The model, its prompts, and the two halves of the book, the first to fit on."""
    return AutoModelForCausalLM.from_pretrained(MODEL).eval(), Prompter(AutoTokenizer.from_pretrained(MODEL)), *halves()


def halves() -> tuple[str, str]:
    return texts.halves(PERSUASION.read_text(encoding="utf-8"))


def part(factor: int, name: str, how: dict[str, Any] | None, to: int) -> dict[str, Any]:
    """One method at one factor."""
    model, prompter, seen, text = ready()
    extended: Any = nullcontext()
    more = {}
    if how is not None:
        saved = fitted(model, prompter, seen, factor, fit_file(factor, name), **how)
        extended, more = temporarily_extended(model, method=saved.method), {"seconds": saved.about["seconds"]}
    elif name != "none":
        extended = temporarily_extended(model, factor, name)
    with extended:
        return {**measure(model, prompter, text, trials_to(to * 512)), **more}


NAMES = ("austen-4m", "first half of Persuasion")


def fitted(
    model: Any, prompter: Prompter, seen: str, factor: int, path: Path, *, learned: str = "ramp", **changes: Any
) -> SavedMethod:
    if not path.is_file():
        with learned_as(LEARNED[learned]):
            saved = fit(model, prompter, seen, factor, settings=GradientSettings(**changes), names=NAMES)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved.save(path)
    return read_saved(path)


class FactorsAlone(gradient.Ramp):
    """The attention factor stays that of the start."""

    def attention_factor(self, numbers: torch.Tensor) -> torch.Tensor:
        return super().attention_factor(torch.zeros_like(numbers))


class AttentionAlone(gradient.Ramp):
    """λ stays that of the start."""

    def __init__(self, rope: RopeGeometry, start: RopeScaling) -> None:
        super().__init__(rope, start)
        self.UNITS = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64) * self.UNITS


class EachPair(gradient.Ramp):
    """Beside the four, a number for each pair: of ln λ, in units that move all angles at the target alike."""

    def __init__(self, rope: RopeGeometry, start: RopeScaling) -> None:
        super().__init__(rope, start)
        self.units = 0.3 / (2**self.octaves * start.factor).clamp(min=1)
        self.numbers = torch.zeros(4 + len(self.units), dtype=torch.float64, requires_grad=True)

    def rescale_factors(self, numbers: torch.Tensor) -> torch.Tensor:
        ramp = super().rescale_factors(numbers[:4])
        return (ramp.log() + self.units * numbers[4:]).clamp(min=0).exp() if len(numbers) > 4 else ramp

    def attention_factor(self, numbers: torch.Tensor) -> torch.Tensor:
        return super().attention_factor(numbers[:4])


LEARNED = {"ramp": gradient.Ramp, "factors": FactorsAlone, "attention": AttentionAlone, "pairs": EachPair}


@contextmanager
def learned_as(kind: type[gradient.Ramp]) -> Iterator[None]:
    """Fits learn the numbers of another kind."""
    former = gradient.Ramp
    gradient.Ramp = kind  # type: ignore[misc]
    try:
        yield
    finally:
        gradient.Ramp = former  # type: ignore[misc]


def trials_to(target: int) -> dict[int, int]:
    """How many texts of each length, from a quarter of the trained one to the target."""
    trials = {}
    length = 512 // 4
    while length <= target:
        trials[length] = trials_at(length, target)
        length *= 2
    return trials


def measure(
    model: Any,
    prompter: Prompter,
    text: str,
    trials: dict[int, int],
    trained: int = 512,
    depths: tuple[float, ...] = DEPTHS,
    windows: int = WINDOWS,
    short_windows: int = SHORT_WINDOWS,
) -> dict[str, Any]:
    """Passkeys by length and trial, and the loss of each window, of the longest length and of the trained, in nats."""
    haystack, engine = Haystack.from_text(text, prompter.tokenizer), Engine(model)
    keys = []
    for length, count in trials.items():
        for trial in range(count):
            row = [Passkey().sample(Place("passkey", length, d, trial, SEED), prompter, haystack) for d in depths]
            for sample, forced in engine.forced([row]):
                hit = forced.guess.tolist() == list(sample.input_ids[sample.n_prompt :])
                logprob = float(forced.logprobs.double().sum())
                keys.append({
                    "length": length, "trial": trial, "depth": sample.place.depth, "hit": hit, "logprob": logprob,
                    "start": sample.start,
                })  # fmt: skip

    def losses(length: int, count: int) -> list[float]:
        places = [Place("perplexity", length, None, trial, SEED) for trial in range(count)]
        found = [Perplexity().window(place, haystack, prompter.special) for place in places]
        return [float(engine.losses(window.input_ids).losses.double().mean()) for window in found]

    return {
        "keys": keys,
        "long": losses(max(trials), windows),
        "text_tokens": haystack.n_tokens,
        "stretches": window_stretches(range(windows), SEED, max(trials), haystack.n_tokens),
        "short": losses(trained, short_windows),
    }


def measure_saved(
    folder: Path, trials: dict[int, int], extension: dict[str, Any] | None = None, config: Any = None, **sizes: int
) -> dict[str, Any]:
    """`measure` of a checkpoint on the half of the book that nothing is fitted on.

    Args:
        extension: arguments of `extend_context`, applied first.
        config: in place of its own.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    if extension:
        extend_context(model, **extension)
    return measure(model, Prompter(AutoTokenizer.from_pretrained(MODEL)), halves()[1], trials, **sizes)


# -------------------------------------------------------------------------------------- the comparison


def found(result: dict[str, Any]) -> float:
    return mean([key["hit"] for key in result["keys"]])


def lost(result: dict[str, Any]) -> float:
    return -mean([key["logprob"] for key in result["keys"]])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def clusters(result: dict[str, Any]) -> list[int]:
    """For each passkey its stretch of text: one for those whose texts overlap."""
    keys = result["keys"]
    return stretches([key["start"] for key in keys], [key["length"] for key in keys], result["text_tokens"])


def key_difference(one: dict[str, Any], other: dict[str, Any]) -> Difference:
    """The loss of a key under `one`, in nats, minus that under `other`; a stretch of text is resampled whole."""
    losses = [[-key["logprob"] for key in each["keys"]] for each in (one, other)]
    return paired_loss_difference(*losses, [1] * len(losses[0]), clusters(one))


def hit_difference(one: dict[str, Any], other: dict[str, Any]) -> Difference:
    hits = [[float(key["hit"]) for key in each["keys"]] for each in (one, other)]
    return paired_difference(*hits, clusters(one))


def text_difference(one: dict[str, Any], other: dict[str, Any], what: str = "long") -> Difference:
    # Long windows may be more than the text holds apart.
    clusters = one["stretches"] if what == "long" else None
    return paired_loss_difference(one[what], other[what], [1] * len(one[what]), clusters)


def row(result: dict[str, Any], base: dict[str, Any] | None, target: int) -> dict[str, Any]:
    """A row of the tables; `base` is the unextended model's result, None for that row itself."""
    return {
        "found": found(result),
        "found_at_target": mean([k["hit"] for k in result["keys"] if k["length"] == target]),
        "key_loss": lost(result),
        "key_loss_at_target": -mean([k["logprob"] for k in result["keys"] if k["length"] == target]),
        "perplexity": math.exp(mean(result["long"])),
        "short": base and text_difference(result, base, "short")._asdict(),
        "seconds": result.get("seconds"),
    }


def compare(report: Report, factor: int, measured: dict[Any, Any], seeds: list[int]) -> dict[str, Any]:
    """The bars of one factor, and a row for each method."""
    static = {name: measured[factor, name, factor] for name in STATIC}
    base = measured[factor, "none", factor]
    best_keys = min(static, key=lambda name: lost(static[name]))
    best_text = min(static, key=lambda name: mean(static[name]["long"]))
    fits = {seed: measured[factor, f"fitted, seed {seed}", factor] for seed in seeds}
    rows = {}
    for name, result in {"none": base, **static, **{f"fitted, seed {s}": r for s, r in fits.items()}}.items():
        rows[name] = row(result, None if name == "none" else base, 512 * factor)
        if name.startswith("fitted"):
            rows[name] |= {
                "key_loss_against_best": key_difference(result, static[best_keys])._asdict(),
                "text_against_best": text_difference(result, static[best_text])._asdict(),
            }
    here, best = f"×{factor}", "best static method as measured here"
    report.add(f"{here}: {best}, share of keys found ({best_keys})", found(static[best_keys]))
    report.add(
        f"{here}: {best}, share of keys found at the target",
        max(row["found_at_target"] for name, row in rows.items() if name in static),
    )
    report.add(f"{here}: {best}, loss of a key in nats ({best_keys})", lost(static[best_keys]))
    report.add(f"{here}: {best}, perplexity ({best_text})", math.exp(mean(static[best_text]["long"])))
    for seed, result in fits.items():
        report.add(f"{here}, seed {seed}: share of keys found", found(result))
        report.add(f"{here}, seed {seed}: at the target", rows[f"fitted, seed {seed}"]["found_at_target"])
        report.add(f"{here}, seed {seed}: loss of a key in nats", lost(result))
        report.add(f"{here}, seed {seed}: perplexity", math.exp(mean(result["long"])))
    better = [s for s, r in fits.items() if all(key_difference(r, other).high < 0 for other in static.values())]
    lower = [s for s, r in fits.items() if all(lost(r) < lost(other) for other in static.values())]
    behind = [s for s, r in fits.items() if any(hit_difference(r, other).high < 0 for other in static.values())]
    more = [s for s, r in fits.items() if found(r) >= max(found(other) for other in static.values())]
    worse = [s for s, r in fits.items() if text_difference(r, static[best_text]).low > 0]
    gained = [s for s, r in fits.items() if text_difference(r, static[best_text]).high < 0]
    n = len(fits)
    report.add(f"{here}: seeds that lose less on keys than every static method, of {n}", len(lower), at_least=n)
    report.add(f"{here}: of them surely (95% intervals, each method)", len(better), at_least=n)
    report.add(f"{here}: seeds that find at least as many keys as every static method", len(more), at_least=n)
    report.add(f"{here}: seeds that surely find fewer keys than some static method", len(behind), at_most=0)
    report.add(f"{here}: seeds surely behind the best static perplexity", len(worse), at_most=0)
    report.add(f"{here}: seeds surely ahead of the best static perplexity", len(gained))
    report.add(
        f"{here}: most loss within the trained length, over the unextended model's",
        max(mean(r["short"]) / mean(base["short"]) - 1 for r in fits.values()), at_most=0.01,
    )  # fmt: skip
    report.add(f"{here}: longest fit in seconds", max(r["seconds"] for r in fits.values()), at_most=300)
    drawn = ["yarn", "llama3", *(name for name in rows if name.startswith("fitted"))]
    return {
        "best_static": {"keys": best_keys, "text": best_text, "as": "measured on these prompts and windows"},
        "rows": rows,
        "rescale_factors": {name: rescale_factors(factor, name) for name in drawn},
    }


def rescale_factors(factor: int, name: str) -> list[float]:
    """λ of each pair of the bundled model, by a formula or as it was fitted."""
    fitted = name.startswith("fitted")
    method = read_saved(fit_file(factor, name)).method if fitted else make_method(name, float(factor))
    return method.rescale_factors(RopeGeometry.plain(64, 1250.0, 512)).tolist()


# --------------------------------------------------------------------------------- ablation and figure


def ablate(args: argparse.Namespace) -> None:
    parts: list[Part] = []
    first = args.factors[0]
    for factor in args.factors:
        for seed in args.ablation:
            parts.append((factor, f"fitted, seed {seed}", {"seed": seed}, factor))
            for name, changes in ABLATION.items():
                if factor == first or name in MAIN:
                    parts.append((factor, f"{name}, seed {seed}", {"seed": seed, **changes}, factor))
        parts += [(factor, name, None, factor) for name in ("llama3", "none")]
    # Beyond the fitted length.
    parts += [(first, f"fitted, seed {seed}", {"seed": seed}, 2 * first) for seed in args.ablation]
    parts += [(first, name, None, 2 * first) for name in ("llama3", "yarn")]
    measured = run(parts)
    report = Report("fit, ablation", seed=SEED)
    for (factor, name, to), result in measured.items():
        base, here = measured[factor, "none", factor], f"×{factor} {name}" + f", read to ×{to}" * (to != factor)
        add_part(report, here, result, base)
    report.finish(args.output / "ablation.json", settings=SETTINGS, changes=ABLATION)


def add_part(
    report: Report,
    here: str,
    result: dict[str, Any],
    base: dict[str, Any],
    trained: int = 512,
    target: int | None = None,
) -> None:
    """The figures of one row of docs/fit/README.md; `base` is the unextended model's."""
    report.add(f"{here}: share of keys found", found(result))
    if target is not None:
        report.add(f"{here}: at the target", mean([key["hit"] for key in result["keys"] if key["length"] == target]))
    report.add(f"{here}: loss of a key in nats", lost(result))
    report.add(f"{here}: perplexity", math.exp(mean(result["long"])))
    report.add(f"{here}: loss within {trained}, over", mean(result["short"]) / mean(base["short"]) - 1)


def draw(table: dict[Any, dict[str, Any]], path: Path) -> None:
    """λ by pair: each fit, and the two formulas that it may begin at, from the table of a summary."""
    from matplotlib.figure import Figure  # at_scale imports this module where matplotlib may be missing

    figure = Figure(figsize=(3 * len(table), 3.4), layout="constrained")
    for axes, (factor, part) in zip(figure.subplots(1, len(table), squeeze=False)[0], table.items()):
        formulas = {"yarn": "--", "llama3": ":"}
        fits = {name: λ for name, λ in part["rescale_factors"].items() if name not in formulas}
        for k, λ in enumerate(fits.values()):
            axes.plot(λ, color="#c23b22", alpha=0.6, linewidth=1, label=None if k else "fitted, each seed")
        for name, style in formulas.items():
            axes.plot(part["rescale_factors"][name], style, color="#333333", linewidth=1.4, label=name)
        axes.set_title(f"×{factor}", loc="left")
        axes.set_xlabel("pair, from the fastest to the slowest")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("rescale factor λ")
    figure.axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
