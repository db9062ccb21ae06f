"""What the evaluators save over the plain way, with the same answers.

    python benchmarks/evaluators.py                 # the bundled model
    python benchmarks/evaluators.py --model runs/SmolLM2-135M-Instruct --length 1024 --trials 2

- A passkey grid against a loop of `generate` over the prompts, with transformers' default of 20 new tokens; and,
  without a bar, with as many new tokens as the answer has.
- A perplexity curve against one forward pass per point.
- The memory of scoring a long text against the stock loss, each in a process of its own.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import torch
from report import Report, largest, options
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.evals.targets import LiveModel
from ctxext.training.estimate import resident

DEPTHS = tuple(tenth / 10 for tenth in range(11))
# The trials of a round of the grid, which alternates with the same trials of the plain loop.
ROUND = 4
VOCABULARY, LONG = 49_152, 16_384


def passkey_grid(report: Report, model, tokenizer, length: int, trials: int) -> None:
    """11 depths × `trials`, a haystack for every trial; both ways read the same prompts."""
    prompter = Prompter(tokenizer)
    haystack = Haystack.from_file(PERSUASION, tokenizer)
    target, task = LiveModel(model, prompter, "model"), Passkey()
    answers: dict[str, dict[Place, str]] = {"plain": {}, "ours": {}}
    seconds, tokens = dict.fromkeys((*answers, "told"), 0.0), dict.fromkeys(answers, 0)
    for first in track(range(0, trials, ROUND), "passkey grid"):
        rows = [
            [task.sample(Place("passkey", length, depth, trial, 0), prompter, haystack) for depth in DEPTHS]
            for trial in range(first, min(trials, first + ROUND))
        ]
        for way in ("plain", "told"):
            begin = time.perf_counter()
            for sample in (sample for row in rows for sample in row):
                prompt = torch.tensor([sample.input_ids[: sample.n_prompt]], device=model.device)
                given: dict = {"do_sample": False, "pad_token_id": 0}
                if way == "told":
                    given["max_new_tokens"] = sample.answer_tokens
                with torch.inference_mode():
                    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **given)
                if way == "plain":
                    answer, written = list(sample.input_ids[sample.n_prompt :]), output[0, prompt.shape[1] :]
                    answers["plain"][sample.place] = written[: len(answer)].tolist() == answer
                    tokens["plain"] += output.shape[1] - 1
            seconds[way] += time.perf_counter() - begin
        begin, before = time.perf_counter(), target.engine.tokens
        for sample, record in next(target.outcomes([rows], generate=False)):
            answers["ours"][sample.place] = record["hit"]
        seconds["ours"] += time.perf_counter() - begin
        tokens["ours"] += target.engine.tokens - before
    same = sum(answers["plain"][place] == answers["ours"][place] for place in answers["plain"])
    report.add("passkey grid: same answers", same / len(answers["plain"]), at_least=1.0)
    report.add("passkey grid: share found", sum(answers["ours"].values()) / len(answers["ours"]))
    report.add("passkey grid: tokens over plain", tokens["ours"] / tokens["plain"], at_most=0.62)
    report.add("passkey grid: time over plain", seconds["ours"] / seconds["plain"], at_most=0.35)
    report.add("passkey grid: time over plain told the answer's length", seconds["ours"] / seconds["told"])
    report.add("passkey grid: seconds, plain", seconds["plain"])


def perplexity_curve(report: Report, model, tokenizer, length: int) -> None:
    """32 prefix lengths of one document."""
    haystack = Haystack.from_file(PERSUASION, tokenizer)
    window = Perplexity().window(Place("perplexity", length, None, 0, 0), haystack, Prompter(tokenizer).special)
    points = [length * k // 32 for k in range(1, 33)]
    begin = time.perf_counter()
    plain = []
    for n in track(points, "perplexity curve"):
        ids = torch.tensor([window.input_ids[:n]], device=model.device)
        with torch.inference_mode():
            plain.append(math.exp(model(input_ids=ids, labels=ids, use_cache=False).loss))
    middle = time.perf_counter()
    losses = Engine(model).losses(window.input_ids).losses.double()
    ours = [math.exp(losses[: n - 1].mean()) for n in points]
    end = time.perf_counter()
    worst = largest(abs(math.log(a / b)) for a, b in zip(ours, plain))
    report.add("perplexity curve: largest difference (nats)", worst, at_most=1e-4)
    report.add("perplexity curve: time over plain", (end - middle) / (middle - begin), at_most=0.1)


def scoring_memory(report: Report, folder: Path) -> None:
    """The growth of memory while 16,384 tokens are scored."""
    growth = {}
    for way in ("stock", "ours"):
        command = [sys.executable, __file__, "--model", str(folder), "--memory", way]
        growth[way] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        report.add(f"scoring {LONG} tokens: growth of memory, {way} (GiB)", growth[way] / 2**30)
    report.add("scoring: growth over stock", growth["ours"] / growth["stock"], at_most=0.25)


def measure_memory(folder: Path, way: str) -> None:
    """Print the bytes by which scoring raised this process's peak."""
    config = AutoConfig.from_pretrained(folder)
    if config.vocab_size == VOCABULARY:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:  # the shape of the bundled model with a vocabulary of the usual size
        config.vocab_size = VOCABULARY
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    extend_context(model, target_length=max(LONG, 2 * config.max_position_embeddings))
    ids = torch.randint(0, VOCABULARY, (1, LONG), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(input_ids=ids[:, :256], labels=ids[:, :256])  # what the first call allocates for good
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
        before = resident("VmRSS")
        if way == "stock":
            model(input_ids=ids, labels=ids, use_cache=False)
        else:
            Engine(model).losses(ids[0].tolist())
    print(resident("VmHWM") - before)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--length", type=int, default=1024, help="tokens a prompt; the curve has twice as many")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--memory", choices=["stock", "ours"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        measure_memory(args.model, args.memory)
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if 2 * args.length > model.config.max_position_embeddings:
        extend_context(model, target_length=2 * args.length)
    report = Report(f"evaluators, {args.model.name}", seed=0)
    passkey_grid(report, model, tokenizer, args.length, args.trials)
    perplexity_curve(report, model, tokenizer, 2 * args.length)
    scoring_memory(report, args.model)
    name = "evaluators.json" if args.model == MODEL else f"evaluators_{args.model.name}.json"
    report.finish(args.output or Path("docs/benchmarks") / name, length=args.length, trials=args.trials)


if __name__ == "__main__":
    main()
