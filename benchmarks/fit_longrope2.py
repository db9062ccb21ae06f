"""LongRoPE2's searched factors beside `yarn` and the fit by gradient, on the bundled model: no weight changes.

    python benchmarks/fit_longrope2.py             # ×4, three seeds
    python benchmarks/fit_longrope2.py --fits 0 1  # and paired with fits by gradient of these seeds

The searched factors are measured also where `ctxext fit` keeps YaRN instead. Texts and prompts are those of
benchmarks/fit.py, whose parts in runs/fit are reused, so rows of docs/fit/summary.json can be read beside these.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from fit import (
    MEASURED,
    NAMES,
    RUNS,
    SEED,
    SETTINGS,
    Part,
    hit_difference,
    key_difference,
    mean,
    measure,
    ready,
    row,
    run,
    text_difference,
    trials_to,
)
from report import Report, kept, options
from rich.progress import track

from ctxext import temporarily_extended
from ctxext.evals.samples import fingerprint
from ctxext.fitting import longrope2
from ctxext.fitting.fit import fit
from ctxext.fitting.longrope2 import LongRoPE2Settings
from ctxext.methods import LongRoPE

SEARCHED = fingerprint(
    asdict(LongRoPE2Settings()),
    *(getattr(longrope2, name) for name in ("TURNS", "PARENTS", "MOVES", "CHANGES", "SPREAD", "TOKENS")),
)


def main() -> None:
    parser = options(__doc__, "docs/fit/longrope2.json")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--fits", type=int, nargs="*", default=[], help="seeds of fits by gradient")
    args = parser.parse_args()
    factor, target = args.factor, 512 * args.factor
    searched = {
        seed: kept(RUNS / MEASURED / SEARCHED / f"x{factor}, seed {seed}.json", partial(search, factor, seed))
        for seed in track(args.seeds, "searching")
    }
    parts: list[Part] = [(factor, name, None, factor) for name in ("none", "yarn")]
    parts += [(factor, f"fitted, seed {seed}", {"seed": seed}, factor) for seed in args.fits]
    others = {name: result for (_, name, _), result in run(parts).items()}
    base = others["none"]
    rows = {name: row(result, None if name == "none" else base, target) for name, result in others.items()}
    report = Report("fit, LongRoPE2", seed=SEED)
    for seed, result in searched.items():
        name = f"longrope2, seed {seed}"
        against = {
            other: {
                "found": hit_difference(result, theirs)._asdict(),
                "keys": key_difference(result, theirs)._asdict(),
                "text": text_difference(result, theirs)._asdict(),
            }
            for other, theirs in others.items()
            if other != "none"
        }
        rows[name] = {**row(result, base, target), "against": against, "about": result["about"]}
    for name, result in {**others, **{f"longrope2, seed {seed}": result for seed, result in searched.items()}}.items():
        rows[name]["found_within"] = mean([key["hit"] for key in result["keys"] if key["length"] <= 512])
    for name, each in rows.items():
        for kind in ("found", "found_within", "found_at_target", "key_loss", "perplexity"):
            report.add(f"×{factor} {name}: {kind}", each[kind])
    report.finish(args.output, factor=factor, rows=rows, settings=SETTINGS, search=asdict(LongRoPE2Settings()))


def search(factor: int, seed: int) -> dict[str, Any]:
    """A search and what its factors measure."""
    model, prompter, seen, text = ready()
    about = fit(model, prompter, seen, factor, settings=LongRoPE2Settings(seed=seed), names=NAMES).about
    with temporarily_extended(model, method=LongRoPE(factor=factor, long_factor=about["long_factor"])):
        return {**measure(model, prompter, text, trials_to(512 * factor)), "seconds": about["seconds"], "about": about}


if __name__ == "__main__":
    main()
