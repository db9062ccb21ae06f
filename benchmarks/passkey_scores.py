"""Check passkey scores against the model's own answers: SmolLM2-135M-Instruct on four kinds of text, on a CPU.

    python benchmarks/passkey_scores.py

Each prompt is answered twice: scored as in `ctxext eval`, and by `generate`, which reads the prompt again. Both must
agree sample by sample. A third answer is to a prompt that ends before its space, as the prompts of ctxext did at first:
there the digits are right under teacher forcing, but the model begins a sentence instead.

The texts are those of benchmarks/texts.py. A prefill of 1,024 tokens takes some four seconds on one core.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from report import SMOLLM2, Report, options
from texts import TEXTS, fetch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import temporarily_extended
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.targets import LiveModel, outcome

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
from smollm2 import fetch as fetch_model

# Text, style, length in tokens, depths, and how the model is extended.
CELLS = [
    *((text, "chat", 1024, (0.2, 0.8), None) for text in ("novel", "essay", "manual", "code")),
    *((text, "base", 1024, (0.2, 0.8), None) for text in ("novel", "essay")),
    ("essay", "chat", 1024, (0.2, 0.8), {"method": "pi", "factor": 16}),
    ("essay", "chat", 2048, (0.2, 0.8), None),
    ("essay", "chat", 4096, (0.5,), None),
]


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/passkey_scores.json")
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--texts", type=Path, default=TEXTS)
    args = parser.parse_args()
    fetch_model(args.model)
    fetch(args.texts)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    texts = {
        name: Haystack.from_file(args.texts / f"{name}.txt", tokenizer) for name in ("novel", "essay", "manual", "code")
    }
    report, samples, agree = Report("passkey scores, SmolLM2-135M-Instruct", seed=0), [], []
    for text, style, length, depths, extension in CELLS:
        prompter, task = Prompter(tokenizer, style), Passkey()
        target = LiveModel(model, prompter, args.model.name)
        row = [task.sample(place, prompter, texts[text]) for place in task.places([length], depths, 1, 0)]
        # The same tokens, with the space on the answer's side.
        first = [replace(s, n_prompt=s.n_prompt - 1, answer_tokens=s.answer_tokens + 1) for s in row]
        with nullcontext() if extension is None else temporarily_extended(model, **extension):
            scored = dict(next(target.outcomes([[row]], generate=False)))
            generated = dict(one for outcomes in target.outcomes([[row]], generate=True) for one in outcomes)
            before = {
                sample.place: outcome(sample, prompter.decode(answer.written))
                for sample, answer in target.engine.answers([first])
            }
        found = [scored[s]["score"] for s in row]
        agree += [scored[s]["score"] == generated[s]["score"] for s in row]
        how = "" if extension is None else ", {method} ×{factor}".format(**extension)
        cell = f"{text}, {style}, {length}{how}"
        report.add(f"{cell}: passkey accuracy", sum(found) / len(row))
        report.add(f"{cell}: generated", sum(generated[s]["score"] for s in row) / len(row))
        report.add(f"{cell}: generated without the space", sum(b["score"] for b in before.values()) / len(row))
        samples += [
            {
                "cell": cell, "depth": s.place.depth, "expected": s.references[0], "scored": scored[s]["got"],
                "generated": generated[s]["got"], "without_the_space": before[s.place]["got"],
                "logprob": scored[s]["logprob"],
            }
            for s in row
        ]  # fmt: skip
    report.add("samples whose score is that of the generated answer", sum(agree) / len(agree), at_least=1.0)
    fingerprints = {name: text.fingerprint for name, text in texts.items()}
    report.finish(args.output, samples=samples, texts=fingerprints)


if __name__ == "__main__":
    main()
