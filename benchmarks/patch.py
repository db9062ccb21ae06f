"""What the patch costs: time of forward, decode and patching itself, beside stock transformers.

    python benchmarks/patch.py

Stock and patched models run interleaved; each ratio is the median of per-round ratios. The ratio of
a second stock model over the first is printed beside it: that much is noise.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
from report import WARM, Report, interleaved, options, over, seconds
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ctxext import extend_context, restore_context
from ctxext.assets import MODEL

METHODS = ("pi", "ntk", "yarn", "resonance")  # one of each saved form: linear, theta, yarn, longrope


@torch.inference_mode()
def forward(model: torch.nn.Module) -> object:
    return model(input_ids=torch.ones((2, 512), dtype=torch.long), use_cache=False)


@torch.inference_mode()
def decode(model: torch.nn.Module) -> object:
    """64 tokens, one at a time, behind a cached prompt of 64."""
    output = model(input_ids=torch.ones((1, 64), dtype=torch.long), use_cache=True)
    token = torch.ones((1, 1), dtype=torch.long)
    for _ in range(64):
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return output


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares the weights: where they lie in memory alone moves a decode step by 5%."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def meta_model() -> LlamaForCausalLM:
    """The shape of LLaMA-2-7B, with no weights."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096))


def sharded_checkpoint(folder: Path, shards: int) -> None:
    """A checkpoint of `shards` weight files."""
    LlamaConfig(max_position_embeddings=4096, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    for shard in range(shards):
        weights = {f"weight.{shard}": torch.zeros(1024, 1024)}
        save_file(weights, folder / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors")


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/patch.json")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    report = Report("patch", seed=0)

    stock = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    models = {"stock": stock, "stock again": twin(stock)}
    for method in METHODS:
        models[method] = extend_context(twin(stock), 4, method)
    for name, work in (("forward", forward), ("decode", decode)):
        times = interleaved({model: partial(work, models[model]) for model in models}, WARM + args.rounds, name)
        for model in list(models)[1:]:
            bar = None if model == "stock again" else 1.02
            report.add(f"{name} time, {model} / stock", over(times, model, "stock"), at_most=bar)

    empty = meta_model()
    times = []
    for _ in range(21):
        times.append(seconds(lambda: extend_context(empty, 4, "yarn")))
        restore_context(empty)
    report.add("extend_context on a 32-layer 7B shape on meta, ms", 1000 * median(times), at_most=20)

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        sharded_checkpoint(source, shards=30)
        plain = median(seconds(partial(run, "import torch")) for _ in range(5))
        whole = []
        for attempt in range(5):
            output = str(Path(folder) / f"out{attempt}")
            arguments = ["extend", str(source), "--factor", "4", "-o", output]
            code = f"import sys; sys.argv[1:] = {arguments!r}; from ctxext.__main__ import main; main()"
            whole.append(seconds(partial(run, code)))
    report.add("ctxext extend on 30 shards, seconds beyond importing torch", median(whole) - plain, at_most=2)
    report.finish(args.output, rounds=args.rounds)


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


if __name__ == "__main__":
    main()
