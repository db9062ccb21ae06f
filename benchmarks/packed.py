"""A training step on packed documents, or with a sliding window, against the masks of transformers' sdpa.

    python benchmarks/packed.py                   # 4,096 tokens; some eight minutes on two cores
    python benchmarks/packed.py --length 1024 --rounds 3

The model is that of benchmarks/finetune.py (SmolLM2-135M's shape, 4 layers, LoRA) with the chunked loss and recomputed
layers, as the recipe trains it. Its row is one document, or six: a half, a quarter and so on, down to two of
a thirty-second. The same step is run with both, in turn; a case is a process of its own, with memory given back as in
finetune.py. In the last case our model rotates in attention, by dynamic_yarn from a quarter of the row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from finetune import AT_ONCE, lora_model
from report import Report, interleaved, options, over

from ctxext import extend_context
from ctxext.core.apply import transformers_model
from ctxext.training.documents import use_document_attention
from ctxext.training.estimate import resident
from ctxext.training.loss import use_chunked_loss

STOCK, OURS = "sdpa with masks", "by document"
BAR = 0.9  # of time and memory, at most
CASES = {
    "packed documents": (True, None, None),
    "window": (False, 8, None),
    "packed documents and window": (True, 8, None),
    "packed documents, in attention": (True, None, "dynamic_yarn"),
}


def measure(case: str, length: int, rounds: int) -> dict[str, Any]:
    """Seconds and growth of memory in bytes of both ways, by round, and how far their losses differ."""
    packed, share, method = CASES[case]
    models = {way: lora_model(window=length // share if share else None) for way in (STOCK, OURS)}
    for model in models.values():
        use_chunked_loss(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    if method is None:
        use_document_attention(models[OURS])
    else:
        extend_context(models[OURS], 4, method, original_max_position_embeddings=length // 4)
    ids = torch.randint(0, 49_152, (1, length), generator=torch.Generator().manual_seed(0))
    sizes = [length // 2**n for n in range(1, 6)] if packed else []
    positions = torch.cat([torch.arange(size) for size in (*sizes, length - sum(sizes))])[None]
    growth: dict[str, list[int]] = {way: [] for way in models}
    losses: dict[str, float] = {}

    def step(way: str) -> None:
        model = models[way]
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resident("VmRSS")
        loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        growth[way].append(resident("VmHWM") - before)
        losses[way] = loss.item()
        model.zero_grad()

    assert transformers_model(models[STOCK]).config._attn_implementation == "sdpa"
    times = interleaved({way: lambda way=way: step(way) for way in growth}, rounds, case)
    found: dict[str, Any] = {"seconds": times, "growth": growth}
    return found if method else {**found, "loss": abs(losses[OURS] / losses[STOCK] - 1)}


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/packed.json")
    parser.add_argument("--length", type=int, default=4096, help="tokens a step")
    parser.add_argument("--rounds", type=int, default=4, help="of both ways; the first is not counted")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.length, args.rounds)))
        return
    report, found = Report("packed", seed=0), {}
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--length", str(args.length), "--rounds", str(args.rounds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **AT_ONCE})
        found[case] = run = json.loads(done.stdout.splitlines()[-1])
        ours, stock = (median(run["growth"][way][1:]) for way in (OURS, STOCK))
        report.add(f"{case}: time", over(run["seconds"], OURS, STOCK, skip=1), at_most=BAR)
        report.add(f"{case}: memory", ours / stock, at_most=BAR)
        if "loss" in run:
            report.add(f"{case}: loss, relative difference", run["loss"], at_most=1e-5)
    report.finish(args.output, length=args.length, counted=args.rounds - 1, runs=found)


if __name__ == "__main__":
    main()
