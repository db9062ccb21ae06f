"""What the bundled model must do: retrieve inside its window, break beyond it, work when extended.

    python benchmarks/bundled_model.py

On *Persuasion*, which it never saw in training. 200 passkey prompts a length and method, 20 texts at ten
depths each; the methods see the same prompts and are not trained.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from report import Report, options

from ctxext.assets import MODEL
from ctxext.evals.choice import all_figures
from ctxext.evals.loading import load, load_text
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.screen import run_with_bar
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED, LiveModel, compared_variants

METHODS = ("pi", "ntk", "ntk_by_parts", "yarn")
DEPTHS = tuple((2 * tenth + 1) / 20 for tenth in range(10))  # the middle of each tenth of the haystack


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/bundled_model.json")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--trials", type=int, default=20, help="texts for each length")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    prompter = Prompter(tokenizer)
    target = LiveModel(model, prompter, args.model.name)
    trained = target.about["trained_length"]
    lengths = (trained // 2, trained, 2 * trained, 4 * trained)
    grid = Grid(
        retrieval=(Passkey(),), texts=(Perplexity(),), lengths=lengths, depths=DEPTHS, trials=args.trials, windows=16
    )
    haystack = load_text(None, tokenizer, 0)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(target, haystack, grid, beyond=True)
        results = run_with_bar(runner, Path(folder) / "results.jsonl", compared_variants(model.config, METHODS, 4))
    summary = Summary(results)

    def passkey(variant: str, length: int) -> float:
        return summary.by_length(variant, "passkey")[length].value

    report = Report("bundled_model", seed=grid.seed)
    for inside in lengths[:2]:
        report.add(f"passkey at {inside}, not extended", passkey(UNEXTENDED, inside), at_least=0.98)
    for band, after, length in zip(("0-0.5x", "0.5-1x", "1-2x", "2-4x"), (0, *lengths), lengths):
        report.add(f"perplexity at {band}, not extended", summary.perplexity(UNEXTENDED, length, after))
    report.add("passkey at 2x, not extended", passkey(UNEXTENDED, 2 * trained), at_most=0.60)
    report.add("passkey at 4x, not extended", passkey(UNEXTENDED, 4 * trained), at_most=0.20)
    for method in METHODS:
        for many in (1, 2, 4):
            report.add(f"passkey at {many}x, {method}", passkey(method, many * trained))
        report.add(f"perplexity at 2-4x, {method}", summary.perplexity(method, 4 * trained, 2 * trained))
    for many, bar in ((2, 0.85), (4, 0.70)):
        best = max(passkey(method, many * trained) for method in METHODS)
        report.add(f"passkey at {many}x, best method", best, at_least=bar)
    report.finish(args.output, summary=all_figures(summary))


if __name__ == "__main__":
    main()
