"""`ctxext verify` on transformers and llama.cpp: live, ignored and without the temperature, told apart 20 of 20 times.

    python benchmarks/verify.py --public runs/SmolLM2-135M-Instruct

Twenty extensions of two models, by factor, method, precision and text. Each is run in its three states by plain
transformers (float32, bfloat16) and by llama.cpp (F32; Q8_0 of the bundled model, BF16 of the public one), and judged
by a short text alone, whose probe was made from the extended model in float32. Q8_0 of the public model has no bar:
llama.cpp rounds activations as well, which moves it as much as a change of state does. `make smollm2` fetches it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from report import Report, largest, options
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.export.gguf import extend_gguf, write_gguf
from ctxext.export.probe import TEXT, WORDS, make_probe
from ctxext.export.verify import verify
from ctxext.hub.checkpoint import extend_folder
from ctxext.methods import LongRoPE, Resonance, RopeScaling, YaRN

# Up, down and up again, as no formula has it.
WAVY = LongRoPE(
    factor=4,
    attention_factor=1.07,
    long_factor=tuple((1 + torch.linspace(0, 2, 32) + torch.linspace(0, 9, 32).sin()).clamp(min=0.9).tolist()),
)
SHIPPED = [*(YaRN(factor=factor) for factor in (2, 4, 8, 16)), *(Resonance(factor=factor) for factor in (4, 8)), WAVY]
PUBLIC = [YaRN(factor=factor) for factor in (2, 4, 8)]
GGUF = ("F32", "Q8_0", "BF16")


@dataclass(frozen=True)
class Case:
    """One extension of one model, and the precisions that it is run in, by engine."""

    model: Path
    method: RopeScaling
    precisions: dict[str, str]
    text: str
    barred: bool = True


def cases(public: Path) -> Iterator[Case]:
    excerpt = PERSUASION.read_text(encoding="utf-8")[3000:3800]
    for model, methods in ((MODEL, SHIPPED), (public, PUBLIC)):
        for index, method in enumerate(methods):
            text = excerpt if index % 2 else TEXT
            yield Case(model, method, {"transformers": "float32", "llama.cpp": "F32"}, text)
            half = "Q8_0" if model == MODEL else "BF16"
            yield Case(model, method, {"transformers": "bfloat16", "llama.cpp": half}, text)
            if model != MODEL:
                yield Case(model, method, {"llama.cpp": "Q8_0"}, text, barred=False)


def without_temperature(method: RopeScaling) -> RopeScaling:
    if isinstance(method, Resonance):
        return replace(method, rounds=YaRN(factor=method.factor, attention_factor=1.0))
    return replace(method, attention_factor=1.0)  # type: ignore[call-arg]


def bases(model: Path, root: Path) -> dict[str, Path]:
    """The unextended model in each engine's form and precision."""
    found = {"float32": root / "float32", "bfloat16": root / "bfloat16"}
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, folder in found.items():
        AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, name)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for name in GGUF:
        found[name] = root / f"{name}.gguf"
        write_gguf(found["float32"], found[name], name)
    return found


def in_state(engine: str, base: Path, method: RopeScaling, state: str, root: Path) -> Path:
    """What the engine is given: the base as it is, or extended."""
    if state == "unextended":
        return base
    method = method if state == "extended" else without_temperature(method)
    output = root / f"{state}{base.suffix}"
    if engine == "llama.cpp":
        extend_gguf(base, output, method=method)
    else:
        extend_folder(base, output, method=method, say=lambda line: None)
    return output


def right(rows: list[dict[str, Any]]) -> int:
    """How many verdicts are the true state."""
    return sum(row["verdict"] == row["state"] for row in rows)


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/verify.json")
    parser.add_argument("--public", type=Path, default=Path("runs/SmolLM2-135M-Instruct"))
    args = parser.parse_args()
    report = Report("verify", seed=0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ready: dict[Path, dict[str, Path]] = {}
        for case in cases(args.public):
            if case.model not in ready:
                ready[case.model] = bases(case.model, root / str(len(ready)))
            model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
            extend_context(model, method=case.method)
            probe = make_probe(model, AutoTokenizer.from_pretrained(case.model), case.text, far=0)
            probe.save(root / "verify.json")
            del model
            for engine, precision in case.precisions.items():
                for state, word in WORDS.items():
                    (root / "run").mkdir()
                    where = in_state(engine, ready[case.model][precision], case.method, state, root / "run")
                    verdict = verify(where, root / "verify.json", far=0).verdict
                    shutil.rmtree(root / "run")
                    rows.append({
                        "engine": engine, "model": case.model.name, "extension": probe.summary, "precision": precision,
                        "tokens": len(probe.input_ids), "state": word, "verdict": verdict.name,
                        "distances": {WORDS[s]: round(d, 6) for s, d in verdict.distances.items()},
                        "limit": round(verdict.limit, 6), "noise_floor": round(probe.noise_floor, 6),
                        "barred": case.barred,
                    })  # fmt: skip
                    if verdict.name != word:
                        print(f"wrong: {rows[-1]}", flush=True)
    barred = [row for row in rows if row["barred"]]
    for engine in ("transformers", "llama.cpp"):
        for word in WORDS.values():
            told = [row for row in barred if row["engine"] == engine and row["state"] == word]
            report.add(f"{engine}, {word}: told, of {len(told)}", right(told), at_least=20)
    others = [row for row in rows if not row["barred"]]
    report.add(f"llama.cpp, {args.public.name} in Q8_0: told, of {len(others)}", right(others))
    false = sum(row["verdict"] == WORDS["extended"] != row["state"] for row in rows)
    report.add("live said of what is not", false, at_most=0)
    share = largest(row["distances"][row["state"]] / row["limit"] for row in barred)
    report.add("largest distance to the true state / limit", share, at_most=1)
    report.add("tokens of the longest probe", max(row["tokens"] for row in rows), at_most=199)
    report.finish(args.output, cases=rows)


if __name__ == "__main__":
    main()
