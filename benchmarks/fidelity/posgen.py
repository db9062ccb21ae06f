"""PosGen, the benchmark of the Resonance RoPE paper (Wang et al., 2024, arXiv:2403.00071), trained from scratch.

    python benchmarks/fidelity/posgen.py                                   # all that is missing; some forty minutes
    python benchmarks/fidelity/posgen.py --subtasks recursive --seeds 1

A sequence continues four numbers modulo 17 by a rule; a model trained on 64 of its numbers writes 256, and what counts
is its accuracy on those beyond 64. As in the authors' code: sequences, splits (their test sequences begin as
training sequences do), labels, teacher forcing, frequencies (`posgen` in authors.json), the schedule. Not as there:
`Setting`, beside theirs in `THEIRS`. Finished cells in `--runs` are reused.

Writes docs/fidelity/posgen.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fidelity.frequencies import golden, posgen_encoding
from fidelity.row import ROOT, Row, spread

from ctxext import extend_context
from ctxext.encodings.rope import inverse_frequencies
from ctxext.methods import ABF, LongRoPE, Resonance, RopeScaling, YaRN
from ctxext.utils.machine import versions

SUBTASKS = ("recursive", "cot", "semi_recursive")
MODULUS, NEAR, FAR = 17, 3, 1
TRAINED, TARGET = 64, 256  # numbers; an end-of-sequence token stands before them
HEAD, THETA = 64, 1e4
FACTOR = (TARGET + 1) / (TRAINED + 1)
GIVEN = NEAR + FAR  # numbers that no rule produces


@dataclass(frozen=True)
class Setting:
    """What is smaller here than in the authors' experiment."""

    layers: int = 2
    hidden: int = 128
    heads: int = 2
    intermediate: int = 512
    steps: int = 250
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    sequences: int = 10_000
    test_sequences: int = 200


# configs/experiment/sweep.yaml and the README's command at the commit in authors.json; two layers are the paper's.
THEIRS = {
    "model": "T5-small's decoder in 2 layers (hidden 512, 8 heads of 64, feed-forward 2048, dropout 0.1)",
    "steps": 11_850,
    "batch": 128,
    "learning_rate": 2e-4,
    "weight_decay": 0.01,
    "test_sequences": 1000,
    "seeds": 5,
}

# What is compared by seed: models of one seed see the same batches.
PAIRS = (
    ("rope", "resonance"),
    ("yarn", "resonance_yarn"),
    ("rope", "yarn"),
    ("yarn", "yarn, ramp over 64"),
)


def sequences(subtask: str, n: int, length: int = TARGET) -> Tensor:
    """`(n, 1 + length)`: the end-of-sequence token, four increasing numbers, and what the rule makes of them."""
    numbers = list(torch.tensor(list(islice(cycle(combinations(range(MODULUS), GIVEN)), n))).T)
    while len(numbers) < length:
        far = {"recursive": -GIVEN, "cot": 0, "semi_recursive": (len(numbers) - GIVEN) // 2}[subtask]
        numbers.append((numbers[far] + sum(numbers[-NEAR:])) % MODULUS)
    return torch.stack([torch.full_like(numbers[0], MODULUS), *numbers], dim=1)


def new_model(setting: Setting) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=MODULUS + 1,
            hidden_size=setting.hidden,
            intermediate_size=setting.intermediate,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            head_dim=HEAD,
            max_position_embeddings=TRAINED + 1,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            bos_token_id=None,
            eos_token_id=MODULUS,
        )
    )


def rounded() -> Resonance:
    """Resonance RoPE: the wavelengths of an unchanged base, rounded."""
    return Resonance(factor=FACTOR, rounds=ABF(factor=FACTOR, rope_theta=THETA))


def as_theirs(name: str) -> LongRoPE:
    """YaRN with the frequencies of their experiment, whose ramp is taken over the target length."""
    case = next(case for case in golden()["posgen"]["cases"] if case["encoding"] == name)
    inv_freq, attention_factor = posgen_encoding(case)
    factors = tuple((inverse_frequencies(HEAD, THETA) / inv_freq).tolist())
    return LongRoPE(factor=FACTOR, long_factor=factors, short_factor=factors, attention_factor=attention_factor)


def encodings(resonance: bool) -> dict[str, RopeScaling | None]:
    """What a model trained with or without rounded wavelengths is read with; None: as it was trained."""
    yarn = YaRN(factor=FACTOR, beta_fast=2, beta_slow=1)
    if resonance:
        return {
            "resonance": rounded(),
            "resonance_yarn": as_theirs("resonance_yarn"),
            "resonance_yarn, ramp over 64": Resonance(factor=FACTOR, rounds=yarn),
        }
    return {"rope": None, "yarn": as_theirs("yarn"), "yarn, ramp over 64": yarn}


def train(subtask: str, resonance: bool, seed: int, setting: Setting) -> dict[str, Tensor]:
    """The weights of a model trained on 64 numbers."""
    torch.manual_seed(seed)
    model = new_model(setting)
    if resonance:
        extend_context(model, method=rounded())
    data = sequences(subtask, setting.sequences, TRAINED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, weight_decay=setting.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=setting.learning_rate, total_steps=setting.steps, pct_start=0.1
    )
    model.train()
    for _ in range(setting.steps):
        rows = data[torch.randint(len(data), (setting.batch,))]
        logits = model(rows).logits[:, GIVEN:-1]
        loss = cross_entropy(logits.flatten(0, 1), rows[:, GIVEN + 1 :].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.state_dict()


@torch.inference_mode()
def read(weights: dict[str, Tensor], method: RopeScaling | None, subtask: str, setting: Setting) -> dict[str, float]:
    """Accuracy on the numbers that follow a rule, up to 64, beyond, and on the first, under teacher forcing."""
    model = new_model(setting)
    model.load_state_dict(weights)
    if method is not None:
        extend_context(model, method=method)
    model.eval()
    # Their test set begins where their validation set ends, within the training sequences.
    start = setting.sequences // 10
    rows = sequences(subtask, start + setting.test_sequences)[start:]
    right = torch.cat([model(part).logits[:, :-1].argmax(-1) == part[:, 1:] for part in rows.split(50)]).float()
    return {
        "within": float(right[:, GIVEN:TRAINED].mean()),
        "beyond": float(right[:, TRAINED:].mean()),
        "first": float(right[:, GIVEN].mean()),
    }


def cell(subtask: str, resonance: bool, seed: int, setting: Setting, runs: Path) -> dict[str, Any]:
    """What one trained model gets, from `runs` if it is there."""
    path = runs / f"{subtask}-{'resonance' if resonance else 'rope'}-{seed}.json"
    if path.is_file() and (kept := json.loads(path.read_text()))["setting"] == asdict(setting):
        return kept
    started = time.perf_counter()
    weights = train(subtask, resonance, seed, setting)
    trained = time.perf_counter() - started
    found = {name: read(weights, method, subtask, setting) for name, method in encodings(resonance).items()}
    record = {"setting": asdict(setting), "seconds": round(trained), "found": found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    print(path.stem, {name: {k: round(v, 4) for k, v in of.items()} for name, of in found.items()}, flush=True)
    return record


def measured(subtask: str, seeds: int, setting: Setting, runs: Path) -> dict[str, Any]:
    """Mean and 95% interval over seeds for each encoding, in percent, and the seeds themselves."""
    cells = [cell(subtask, resonance, seed, setting, runs) for seed in range(seeds) for resonance in (False, True)]
    names = [name for one in cells[:2] for name in one["found"]]
    found: dict[str, Any] = {}
    for name in names:
        of = [one["found"][name] for one in cells if name in one["found"]]
        found[name] = {kind: spread([100 * each[kind] for each in of]) for kind in ("within", "beyond", "first")}
    differences = {}
    for base, other in PAIRS:
        more = [b - a for a, b in zip(found[base]["beyond"]["seeds"], found[other]["beyond"]["seeds"])]
        differences[f"{other} − {base}"] = spread(more)
    seconds = [one["seconds"] for one in cells]
    return {"setting": asdict(setting), "seconds_to_train": seconds, "found": found, "differences": differences}


def steps_of(subtask: str, setting: Setting) -> Setting:
    """More steps for the rule that two tokens do not give away (docs/fidelity.md)."""
    return Setting(**{**asdict(setting), "steps": 10 * setting.steps}) if subtask == "semi_recursive" else setting


def numbers_that_differ() -> tuple[int, int]:
    """Numbers of the authors' sequences that ours do not have, of how many."""
    differ = total = 0
    for case in golden()["posgen_sequences"]["cases"]:
        theirs = torch.tensor(case["numbers"])
        rows = sequences(case["subtask"], 4, len(theirs))[:, 1:]
        ours = rows[(rows[:, :GIVEN] == theirs[:GIVEN]).all(dim=1)]
        assert len(ours) == 1, "the same beginning"
        differ, total = differ + int((ours[0] != theirs).sum()), total + len(theirs)
    return differ, total


def rows(tiny: bool = False) -> Iterator[Row]:
    differ, total = numbers_that_differ()
    yield Row("PosGen: numbers of the sequences that differ", differ, 0, "posgen_sequences", f"{total:,} numbers")


def run(subtasks: list[str], seeds: int, setting: Setting, runs: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for subtask in subtasks:
        yield subtask, measured(subtask, seeds, steps_of(subtask, setting), runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--subtasks", choices=SUBTASKS, nargs="*", default=list(SUBTASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/fidelity/posgen")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/fidelity/posgen.json")
    args = parser.parse_args()
    before = json.loads(args.output.read_text())["subtasks"] if args.output.is_file() else {}
    record = {
        "command": "python benchmarks/fidelity/posgen.py",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {**versions(), "python": platform.python_version()},
        "theirs": THEIRS,
        "subtasks": before | dict(run(args.subtasks, args.seeds, Setting(), args.runs)),
    }
    args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
