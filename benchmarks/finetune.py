"""Memory and time of a long LoRA step against stock `Trainer` + PEFT, with the same loss and gradients.

    python benchmarks/finetune.py                          # 8,192 tokens; about a quarter of an hour on two cores
    python benchmarks/finetune.py --length 1024 --rounds 1 --gigabytes 2

The model has SmolLM2-135M's shape with 4 of its 30 layers and random weights, in float32 with sdpa; LoRA of rank 16 on
q, k, v and o. Stock is `Trainer.train()` with its own loss; ours is the loop of recipes/finetune.py in miniature.
Each run is a process of its own: a short step, so that permanent allocations are not counted, then a full one. glibc
gives freed tensors back to the system at once (MALLOC_MMAP_THRESHOLD_); by default its heap keeps some 0.9 GB of them
in every variant, which hides what a step needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from report import Report, largest, options
from rich.progress import track
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ctxext.training.estimate import resident
from ctxext.training.loss import use_chunked_loss
from ctxext.training.tiled import use_tiled_mlp

VARIANTS = ("stock", "stock, checkpointed", "ours", "ours, checkpointed", "ours, checkpointed, tiled")
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # bytes from which memory is mapped, and given back when freed
SHORT = 256  # tokens of the step that is not counted
CLIP, LEARNING_RATE = 1.0, 1e-4


def lora_model(window: int | None = None) -> Any:
    """With a sliding window of so many tokens in every layer, the model is a Mistral, which differs in nothing else."""
    kind, own = (LlamaConfig, {}) if window is None else (MistralConfig, {"sliding_window": window})
    config = kind(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49_152, max_position_embeddings=2**17, tie_word_embeddings=True, attn_implementation="sdpa",
        use_cache=False, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def batches(lengths: list[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 49_152, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


class Meter(TrainerCallback):
    """Measures the step after the first, short one: its seconds, and the growth and the peak of memory in bytes."""

    def __init__(self) -> None:
        self.before: int | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds, peak = time.perf_counter() - self.begin, resident("VmHWM")
        if self.before is None:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            self.before = resident("VmRSS")
        else:
            self.record = {"growth": peak - self.before, "peak": peak, "seconds": seconds}


class Rows(torch.utils.data.IterableDataset):
    """Rows in the order given; Trainer would shuffle a list."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def train_stock(model: Any, rows: list[dict[str, Tensor]], checkpointed: bool, meter: Meter) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=len(rows), learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", max_grad_norm=CLIP, gradient_checkpointing=checkpointed,
            gradient_checkpointing_kwargs={"use_reentrant": False}, use_cpu=True, dataloader_pin_memory=False,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Rows(rows), callbacks=[meter]).train()


def train_ours(
    model: Any, rows: list[dict[str, Tensor]], checkpointed: bool, meter: Meter, tiled: bool = False
) -> None:
    use_chunked_loss(model)
    if tiled:
        use_tiled_mlp(model)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    model.train()
    for row in rows:
        meter.on_step_begin()
        model(**{name: values[None] for name, values in row.items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.on_step_end()


def measure(variant: str, length: int) -> dict[str, Any]:
    """Run a step of `variant` in this process."""
    way, *more = variant.split(", ")
    meter = Meter()
    train = train_stock if way == "stock" else partial(train_ours, tiled="tiled" in more)
    train(lora_model(), batches([SHORT, length]), "checkpointed" in more, meter)
    return meter.record


def measured(variant: str, length: int) -> dict[str, Any]:
    """Run a step of `variant` in a process of its own."""
    command = [sys.executable, __file__, "--variant", variant, "--length", str(length)]
    environment = {**os.environ, **AT_ONCE}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def difference(length: int) -> tuple[float, float]:
    """Relative difference of the loss, and the largest of any LoRA gradient, on the same batch and weights."""
    model = lora_model()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, through which lora_A gets no gradient
            torch.nn.init.normal_(parameter, std=0.02)
    batch = {name: values[None] for name, values in batches([length])[0].items()}
    results = []
    for patch in (lambda model: None, lambda model: (use_chunked_loss(model), use_tiled_mlp(model, 512))):
        patch(model)
        model.zero_grad()
        loss = model(**batch, num_items_in_batch=length - 1).loss
        loss.backward()
        gradients = [p.grad.double().clone() for p in model.parameters() if p.requires_grad]
        results.append((loss.item(), gradients))
    (stock, theirs), (ours, own) = results
    assert len(own) == 32
    return abs(ours / stock - 1), largest(float((a - b).norm() / b.norm()) for a, b in zip(own, theirs))


def longest(variant: str, limit: float, seen: dict[int, float], most: int) -> int:
    """The most tokens, in multiples of 256, for which a whole step stays within `limit` bytes.

    Memory is almost linear in the tokens, so the secant through the two nearest lengths is better than bisection. Steps
    of up to `most` tokens are run; a longer answer is extrapolated, since attention takes quadratic time.

    Args:
        seen: peaks in bytes by length, of which there are two.
    """
    for _ in range(3):
        near = sorted(sorted(seen, key=lambda length: abs(seen[length] - limit))[:2])
        slope = (seen[near[1]] - seen[near[0]]) / (near[1] - near[0])
        # A margin of 1%, so that noise does not cost another run.
        guess = int(near[0] + (0.99 * limit - seen[near[0]]) / slope) // 256 * 256
        if guess > most and most in seen:
            return guess
        if guess in seen:
            break
        run = min(guess, most)
        seen[run] = measured(variant, run)["peak"]
        if 0.97 * limit <= seen[run] <= limit:
            break
    return max((length for length, peak in seen.items() if peak <= limit), default=0)


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/finetune.json")
    parser.add_argument("--length", type=int, default=8192, help="tokens a step")
    parser.add_argument("--rounds", type=int, default=3, help="of a step of every variant, one after the other")
    parser.add_argument("--gigabytes", type=float, default=8, help="that the longest sequence has to fit in")
    parser.add_argument(
        "--most", type=int, default=32_768, help="tokens of a step that is run; longer ones take minutes"
    )
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.length)))
        return
    report = Report("finetune", seed=0)
    loss, gradient = difference(min(args.length, 2048))
    report.add("loss: relative difference", loss, at_most=1e-5)
    report.add("gradients: largest relative difference", gradient, at_most=1e-5)
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for _ in track(range(args.rounds), f"steps of {args.length} tokens"):
        for variant in VARIANTS:
            runs[variant].append(measured(variant, args.length))
    memory = {variant: median(run["growth"] for run in runs[variant]) for variant in VARIANTS}
    seconds = {variant: median(run["seconds"] for run in runs[variant]) for variant in VARIANTS}
    for variant in VARIANTS:
        report.add(f"{variant}: growth of memory (GB)", memory[variant] / 1e9)
        report.add(f"{variant}: seconds a step", seconds[variant])
    for ours, stock, most_memory, most_time in (
        ("ours", "stock", 0.33, 0.95),
        ("ours, checkpointed", "stock, checkpointed", 0.27, 0.95),
        ("ours, checkpointed", "stock", 0.22, 1.30),
        ("ours, checkpointed, tiled", "stock, checkpointed", 0.20, 1.00),
    ):
        report.add(f"{ours} over {stock}: memory", memory[ours] / memory[stock], at_most=most_memory)
        report.add(f"{ours} over {stock}: time", seconds[ours] / seconds[stock], at_most=most_time)
    peaks = {}
    for variant in track(VARIANTS, f"longest in {args.gigabytes:g} GB"):
        half = args.length // 2
        peaks[variant] = {half: measured(variant, half)["peak"], args.length: max(r["peak"] for r in runs[variant])}
        fits = longest(variant, args.gigabytes * 1e9, peaks[variant], args.most)
        how = (
            "run" if fits <= args.most else f"by the line through {' and '.join(map(str, sorted(peaks[variant])[-2:]))}"
        )
        report.add(f"{variant}: longest step in {args.gigabytes:g} GB (tokens, {how})", fits)
    report.finish(args.output, length=args.length, rounds=args.rounds, peaks=peaks, runs=runs)


if __name__ == "__main__":
    main()
