"""CoPE (arXiv:2602.05258) with the baseline that its claim needs: trained short with and without it, read beyond.

    python benchmarks/fidelity/cope.py             # all that is missing; some half an hour on one core
    python benchmarks/fidelity/cope.py --seeds 1

Three models with the same first weights and batches: plain RoPE, CoPE on the pairs that complete no turn within the
trained length, and CoPE on 20 pairs as in the authors' code. Each is trained at 256 tokens of five novels and read at
256, 512 and 1,024 tokens of a sixth. The plain model is also read by YaRN, by CoPE without training, and
256 tokens at a time. Finished models in `--runs` are reused.

Writes docs/fidelity/cope.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fidelity.row import ROOT, spread

from ctxext import extend_context, restore_context
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import Perplexity, sliding_losses
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.methods.clipped import CoPE
from ctxext.utils.machine import versions

sys.path.append(str(ROOT / "recipes"))
from pretrain import HELD_OUT, KEPT, learning_rate, make_batch, train_tokenizer, weighted_loss

FACTORS = (1, 2, 4)
MOST = FACTORS[-1]
# None: plain RoPE. CoPE ignores the factor but for the window.
ARMS: dict[str, CoPE | None] = {
    "rope": None,
    "cope by length": CoPE(factor=MOST),
    "cope n=20": CoPE(factor=MOST, clipped=20),
}


@dataclass(frozen=True)
class Setting:
    """theta is to the trained length what LLaMA 2's 10000 is to its 4096; heads have 32 pairs, LLaMA's 64."""

    length: int = 256
    steps: int = 600
    batch_tokens: int = 512
    learning_rate: float = 3e-3
    warmup: int = 50
    dropout: float = 0.1
    vocab_size: int = 1024
    hidden: int = 128
    layers: int = 4
    heads: int = 2
    head_dim: int = 64
    rope_theta: float = 625.0
    windows: int = 24
    characters: int | None = None  # of the texts to train on; None for all


@cache
def data(vocab_size: int, characters: int | None) -> tuple[PreTrainedTokenizerBase, Haystack, Haystack]:
    """The tokenizer, and the texts to train on and to read."""
    books = {title: path.read_text("utf-8") for title, path in KEPT.items()}
    prose = [text[:characters] for title, text in books.items() if title != HELD_OUT]
    tokenizer = train_tokenizer(prose, vocab_size)
    return (
        tokenizer,
        Haystack.from_text("\n".join(prose), tokenizer),
        Haystack.from_text(books[HELD_OUT][:characters], tokenizer),
    )


def new_model(setting: Setting, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=setting.hidden,
            intermediate_size=setting.hidden * 43 // 16,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            head_dim=setting.head_dim,
            max_position_embeddings=setting.length,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": setting.rope_theta},
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def train(method: CoPE | None, seed: int, setting: Setting) -> LlamaForCausalLM:
    tokenizer, prose, _ = data(setting.vocab_size, setting.characters)
    torch.manual_seed(seed)
    model, rng, prompter = new_model(setting, tokenizer), Random(seed), Prompter(tokenizer)
    if method is not None:
        extend_context(model, method=method)
    args = Namespace(**asdict(setting), seed=seed, needle_share=0.0, answer_weight=1.0)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setting.learning_rate, betas=(0.9, 0.95))
    model.train()
    for step in range(setting.steps):
        ids, weights = make_batch(prompter, prose, args, setting.length, rng)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        weighted_loss(model, ids, weights, setting.dropout).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def losses(model: LlamaForCausalLM, setting: Setting, alone: bool = False) -> dict[str, float]:
    """The loss in nats of the last half trained length of windows of each length.

    Args:
        alone: the model reads at most one trained length that ends with each token, and at least half of one.
    """
    tokenizer, _, text = data(setting.vocab_size, setting.characters)
    bos, engine, tail = Prompter(tokenizer).special, Engine(model), setting.length // 2
    found: dict[str, list[float]] = {str(factor * setting.length): [] for factor in FACTORS}
    for trial in range(setting.windows):
        place = Place("perplexity", MOST * setting.length, None, trial, 0)
        ids = Perplexity().window(place, text, bos).input_ids
        for end, of in found.items():
            row = ids[: int(end)]
            if alone:
                each = sliding_losses(engine, row[len(bos) :], setting.length, tail, bos)
            else:
                each = engine.losses(row).losses
            of.append(float(each[-tail:].double().mean()))
    return {end: sum(of) / len(of) for end, of in found.items()}


def readings(arm: str, model: LlamaForCausalLM, setting: Setting) -> dict[str, dict[str, float]]:
    """The losses of a trained model, and for the plain one those by methods that it was not trained with."""
    found = {arm: losses(model, setting)}
    if arm != "rope":
        return found
    found["rope, 256 tokens at a time"] = losses(model, setting, alone=True)
    untrained: dict[str, Callable[[], Any]] = {
        "rope, then yarn ×4": lambda: extend_context(model, MOST, "yarn"),
        "rope, then cope by length": lambda: extend_context(model, method=ARMS["cope by length"]),
        "rope, then cope n=20": lambda: extend_context(model, method=ARMS["cope n=20"]),
    }
    for name, extend in untrained.items():
        extend()
        found[name] = losses(model, setting)
        restore_context(model)
    return found


def cell(arm: str, seed: int, setting: Setting, runs: Path) -> dict[str, Any]:
    """What one trained model loses, from `runs` if it is there."""
    path = runs / f"{arm.replace(' ', '-')}-{seed}.json"
    if path.is_file() and (kept := json.loads(path.read_text()))["setting"] == asdict(setting):
        return kept
    started = time.perf_counter()
    model = train(ARMS[arm], seed, setting)
    trained = time.perf_counter() - started
    found = readings(arm, model, setting)
    record = {"setting": asdict(setting), "seconds": round(trained), "found": found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    print(path.stem, record["seconds"], found[arm], flush=True)
    return record


def measured(seeds: int, setting: Setting, runs: Path) -> dict[str, Any]:
    """For each reading its loss, and what it loses more than plain RoPE, with 95% intervals over seeds."""
    cells = [(seed, cell(arm, seed, setting, runs)) for seed in range(seeds) for arm in ARMS]
    by_seed: dict[str, dict[int, dict[str, float]]] = {}
    for seed, one in cells:
        for name, of in one["found"].items():
            by_seed.setdefault(name, {})[seed] = of
    found: dict[str, Any] = {}
    for name, of in by_seed.items():
        found[name] = {}
        for end in of[0]:
            more = [of[seed][end] - by_seed["rope"][seed][end] for seed in of]
            found[name][end] = {"loss": spread([of[seed][end] for seed in of]), "against_rope": spread(more)}
    return {"setting": asdict(setting), "seconds_to_train": [one["seconds"] for _, one in cells], "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/fidelity/cope")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/fidelity/cope.json")
    args = parser.parse_args()
    record = {
        "command": "python benchmarks/fidelity/cope.py",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {**versions(), "python": platform.python_version()},
        **measured(args.seeds, Setting(), args.runs),
    }
    args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
