"""What the shipped model must do: retrieve inside its window, break beyond it, work when extended.

    python benchmarks/shipped_model.py

On *Persuasion*, which it never saw in training. 200 passkey prompts a length and method; the methods
see the same prompts and are not trained.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from report import Report
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.comparison import compare, n_steps

METHODS = ("pi", "ntk", "ntk_by_parts", "yarn")
DEPTHS = tuple((2 * tenth + 1) / 20 for tenth in range(10))  # the middle of each tenth of the haystack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--trials", type=int, default=20, help="prompts for each length and depth")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/shipped_model.json"))
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    length = model.config.max_position_embeddings
    lengths = [length // 2, length, 2 * length, 4 * length]
    with Progress() as progress:
        bar = progress.add_task("", total=n_steps(METHODS, lengths, DEPTHS, args.trials, 16))
        comparison = compare(
            model,
            tokenizer,
            PERSUASION.read_text(encoding="utf-8"),
            METHODS,
            name=MODEL.name,
            trained_length=length,
            factor=4,
            lengths=lengths,
            depths=DEPTHS,
            trials=args.trials,
            windows=16,
            advance=lambda method: progress.update(bar, advance=1, description=method),
        )
    none, *extended = comparison.results
    report = Report("shipped_model", seed=comparison.seed)
    for inside in lengths[:2]:
        report.add(f"passkey at {inside}, not extended", comparison.passkey(none, inside), at_least=0.98)
    for band, value in zip(("0-0.5x", "0.5-1x", "1-2x", "2-4x"), none.perplexity):
        report.add(f"perplexity at {band}, not extended", value)
    report.add("passkey at 2x, not extended", comparison.passkey(none, 2 * length), at_most=0.60)
    report.add("passkey at 4x, not extended", comparison.passkey(none, 4 * length), at_most=0.20)
    for result in extended:
        for many in (1, 2, 4):
            report.add(f"passkey at {many}x, {result.method}", comparison.passkey(result, many * length))
        report.add(f"perplexity at 2-4x, {result.method}", result.perplexity[-1])
    report.add("passkey at 2x, best method", max(comparison.passkey(r, 2 * length) for r in extended), at_least=0.85)
    report.add("passkey at 4x, best method", max(comparison.passkey(r, 4 * length) for r in extended), at_least=0.70)
    report.finish(args.output, comparison=asdict(comparison))


if __name__ == "__main__":
    main()
