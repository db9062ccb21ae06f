"""What `ctxext compare --minutes` promises: it keeps its time, and what it recommends is not beaten on other text.

    python benchmarks/recommend.py

The command gets two thirds of *Persuasion*. On the last third, which it never saw, the bundled model is then measured
under every registered method and under the recommended one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import Report, options

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.choice import ACCURACY, Comparisons
from ctxext.evals.haystack import Haystack, read_prose
from ctxext.evals.loading import default_lengths, load
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.screen import run_with_bar
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED, LiveModel, Variant, compared_variants
from ctxext.extension.method_file import read_saved

RECOMMENDED = "recommended"


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/recommend.json")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--factor", type=float, default=4)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--trials", type=int, default=10, help="texts for each length")
    parser.add_argument("--seed", type=int, default=1, help="of the comparison; the command's is 0")
    args = parser.parse_args()

    prose = read_prose(PERSUASION)
    cut = len(prose) * 2 // 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "seen.txt").write_text(prose[:cut], encoding="utf-8")
        began = time.perf_counter()
        subprocess.run(
            [
                *(sys.executable, "-m", "ctxext", "compare", str(args.model)),
                *("--factor", str(args.factor), "--minutes", str(args.minutes)),
                *("--haystack", str(folder / "seen.txt"), "--output", str(folder / "comparison.jsonl")),
                *("--best", str(folder / "extension.json")),
            ],
            check=True,
        )
        seconds = time.perf_counter() - began
        saved = read_saved(folder / "extension.json")
        model, tokenizer = load(args.model)
        target = LiveModel(model, Prompter(tokenizer), args.model.name)
        trained = target.about["trained_length"]
        grid = Grid(
            retrieval=(Passkey(),),
            texts=(Perplexity(),),
            lengths=default_lengths(trained, round(args.factor * trained)),
            trials=args.trials,
            windows=max(2, args.trials),
            gate=(trained,),
            seed=args.seed,
        )
        variants = [
            *compared_variants(model.config, None, args.factor),
            Variant(RECOMMENDED, {"method": saved.method}),
        ]
        other = Haystack.from_text(prose[cut:], tokenizer, name="the last third of persuasion.txt")
        results = run_with_bar(Runner(target, other, grid, beyond=True), folder / "results.jsonl", variants)
    summary = Summary(results)
    longest, tasks = summary.beyond[-1], summary.deciding_tasks
    found = {v: summary.pooled(v, tasks, summary.beyond).value for v in summary.variants}
    # One that can keep no key from token to token is measured for comparison alone.
    rivals = [v for v in summary.variants if v not in (UNEXTENDED, RECOMMENDED, "transformers_dynamic")]
    best = max(rivals, key=lambda v: (found[v], -summary.perplexity(v, longest)))
    against = summary.difference(RECOMMENDED, best, tasks, summary.beyond)

    report = Report("recommend", seed=args.seed)
    report.add("minutes given", args.minutes)
    report.add("time used or left over the time given, from 1", abs(seconds / (60 * args.minutes) - 1), at_most=0.1)
    for variant in sorted(found, key=found.__getitem__, reverse=True):
        report.add(f"found beyond {trained}, {variant}", found[variant])
        report.add(f"perplexity to {longest}, {variant}", summary.perplexity(variant, longest))
    report.add(f"points, recommended against {best}", 100 * against.value)
    tests = Comparisons(summary, [*rivals, RECOMMENDED])
    ahead = [v for v in rivals if tests.behind(ACCURACY, RECOMMENDED, [v])]
    report.add("methods significantly ahead of the recommended", len(ahead), at_most=0)
    loss = summary.loss_difference(RECOMMENDED, best, longest)
    report.add(f"nats a token, recommended against {best}, lower end of 95%", loss.low)
    report.add(f"nats a token at {trained}, regression of the recommended", summary.gate(RECOMMENDED).loss.value)
    report.finish(args.output, recommended=saved.method.to_dict(), why=saved.about["recommendation"])


if __name__ == "__main__":
    main()
