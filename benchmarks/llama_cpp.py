"""Perplexity beyond the trained length by llama.cpp, beside ours: the same weights, extended in a GGUF file.

    python benchmarks/llama_cpp.py                            # the bundled model at 2, 4 and 8 times its length
    python benchmarks/llama_cpp.py --method fitted.json       # and at a saved method's factor
    python benchmarks/llama_cpp.py --model runs/SmolLM2-135M-Instruct --factors 2 --scored 256

The model is written as a GGUF file and that is extended; llama.cpp reads up to the trained length at once and the rest
a token at a time. All in float32; the model that is not extended is there for comparison.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import torch
from report import Report, options
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.export.gguf import extend_gguf, write_gguf
from ctxext.export.llama_cpp import GGUFModel
from ctxext.extension.method_file import read_saved
from ctxext.methods import ContextMethod, YaRN


def perplexity(logprobs: Tensor) -> float:
    return math.exp(-logprobs.mean())


def compare(report: Report, label: str, model, plain: Path, ids: list[int], method: ContextMethod) -> None:
    """What both engines make of the tokens of `ids` behind the trained length."""
    trained = model.config.max_position_embeddings
    unextended = perplexity(-Engine(model).losses(ids).losses[trained - 1 :].double())
    begin = time.perf_counter()
    with temporarily_extended(model, method=method):
        ours = -Engine(model).losses(ids).losses[trained - 1 :].double()
    middle = time.perf_counter()
    extended = plain.with_name("extended.gguf")
    extend_gguf(plain, extended, method=method)
    with GGUFModel(extended) as engine:
        theirs = engine.logprobs(ids, trained)
    end = time.perf_counter()
    extended.unlink()
    report.add(f"{label}: tokens scored beyond {trained}", len(theirs))
    report.add(f"{label}: perplexity, transformers, not extended", unextended)
    report.add(f"{label}: perplexity, transformers", perplexity(ours))
    report.add(f"{label}: perplexity, llama.cpp", perplexity(theirs))
    report.add(f"{label}: llama.cpp's over ours, off 1", abs(perplexity(theirs) / perplexity(ours) - 1), at_most=0.01)
    report.add(f"{label}: largest difference at a token (nats)", float((ours - theirs).abs().max()))
    report.add(f"{label}: seconds, transformers", middle - begin)
    report.add(f"{label}: seconds, llama.cpp", end - middle)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--factors", type=float, nargs="*", default=[2, 4, 8])
    parser.add_argument("--method", type=Path, help="a saved method, such as `ctxext fit` writes")
    parser.add_argument(
        "--scored", type=int, help="tokens beyond the trained length; all up to the target if not given"
    )
    args = parser.parse_args()
    methods: list[ContextMethod] = [YaRN(factor=factor) for factor in args.factors]
    if args.method:
        methods.append(read_saved(args.method).method)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    haystack, special = Haystack.from_file(PERSUASION, tokenizer), Prompter(tokenizer).special
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    trained = model.config.max_position_embeddings
    report = Report(f"llama.cpp, {args.model.name}", seed=0)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.gguf"
        write_gguf(args.model, plain)
        for method in methods:
            length = round(method.factor * trained) if args.scored is None else trained + args.scored
            ids = Perplexity().window(Place("perplexity", length, None, 0, 0), haystack, special).input_ids
            compare(report, f"{method.name} ×{method.factor:g}", model, plain, list(ids), method)
    name = "llama_cpp.json" if args.model == MODEL else f"llama_cpp_{args.model.name}.json"
    report.finish(args.output or Path("docs/benchmarks") / name, scored=args.scored)


if __name__ == "__main__":
    main()
