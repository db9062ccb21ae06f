"""Write the conformance vectors of this folder: `python conformance/generate.py`. docs/conformance.md describes them.

Every number of the RoPE files is computed in 50 digits and rounded once, so the files are the same on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import AUSTEN, BUNDLED, FILES, SOURCES, Case, Config
from check import agrees
from misreadings import misreadings
from mpmath import mpf
from reference import Rope, logprobs, plain, rope, sha256
from transformers import AutoTokenizer

from ctxext.assets import MODEL, PERSUASION

HERE = Path(__file__).parent
# Raise the first number if a value or a field changes its meaning, the second if cases or misreadings are added.
HEADER = {"version": "1.2", "license": "Apache-2.0", "description": "docs/conformance.md of ctxext"}


def vector(case: Case) -> dict[str, Any]:
    """A case as it is written."""
    exact = rope(case.config, case.length)
    pairs = len(exact.inv_freq)
    unscaled = plain(case.geometry.head_dim if case.method == "proportional" else 2 * pairs, mpf(case.geometry.theta))
    trained = case.geometry.trained
    positions = sorted({at for at in (0, 1, 7, trained - 1, trained, case.length - 1) if at < case.length})
    shown = sorted({0, 1, pairs // 4, pairs // 2, pairs - 1})
    cos, sin = exact.cos_sin(positions, shown)
    return {
        "name": case.name,
        "source": SOURCES[case.method],
        "note": case.note,
        "config": case.config,
        "length": case.length,
        "original_theta": case.geometry.theta,
        "attention_factor": float(exact.attention_factor),
        "rescale_factors": [float(was / now) if now else None for was, now in zip(unscaled, exact.inv_freq)],
        "inv_freq": [float(each) for each in exact.inv_freq],
        "positions": positions,
        "pairs": shown,
        "cos": [[float(each) for each in row] for row in cos],
        "sin": [[float(each) for each in row] for row in sin],
        "known_wrong": known_wrong(case, exact),
    }


def known_wrong(case: Case, exact: Rope) -> dict[str, dict[str, Any]]:
    """The misreadings by their words with the numbers that are wrong, the most plausible first.

    Left out are those that a check cannot tell from the exact numbers or from an earlier one.
    """
    right = in_float64(exact)
    told, found = [right], {}
    for words, seen_in, misread in misreadings(case):
        numbers = in_float64(misread)
        if not any(agrees(other, **numbers) for other in told):
            told.append(numbers)
            found[words] = {"seen_in": seen_in, **{key: numbers[key] for key in right if numbers[key] != right[key]}}
    return found


def in_float64(numbers: Rope) -> dict[str, Any]:
    return {
        "attention_factor": float(numbers.attention_factor),
        "inv_freq": [float(each) for each in numbers.inv_freq],
    }


# --------------------------------------------------------------------------------- log-probabilities

LENGTH = 4 * AUSTEN.trained
# Dense at the start, around the trained length and at the end.
POSITIONS = sorted({*range(1, 9), *range(32, LENGTH, 48), *range(508, 517), *range(LENGTH - 5, LENGTH)})


def probe_ids() -> list[int]:
    """The first tokens of the held-out novel's text, with the BOS."""
    text = PERSUASION.read_text(encoding="utf-8")[3000:15000]
    return AutoTokenizer.from_pretrained(MODEL)(text).input_ids[:LENGTH]


def logprobs_of(name: str, token_ids: list[int]) -> list[float]:
    """In nats, at POSITIONS, rounded to what float64 gives on every machine."""
    config = json.loads((MODEL / "config.json").read_text()) | extended(name)
    found = logprobs(MODEL / "model.safetensors", config, rope(config, LENGTH), token_ids)
    return [round(float(found[at - 1]), 10) for at in POSITIONS]


def extended(name: str) -> Config:
    """The fields that a method replaces in the model's config.json."""
    return {"max_position_embeddings": LENGTH, "rope_parameters": BUNDLED[name]}


def logprob_file() -> dict[str, Any]:
    token_ids = probe_ids()
    return {
        **HEADER,
        "model": "ctxext/assets/austen-4m",
        "sha256": sha256(MODEL / "model.safetensors"),
        "token_ids": token_ids,
        "positions": POSITIONS,
        "cases": [
            {"name": name, "config": extended(name), "logprobs": logprobs_of(name, token_ids)} for name in BUNDLED
        ],
    }


def rope_file(name: str) -> dict[str, Any]:
    return {**HEADER, "cases": [vector(case) for case in FILES[name]]}


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each field of each case."""

    def lines(fields: dict[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())

    cases = ",\n".join(f"  {{\n{lines(case, '   ')}\n  }}" for case in content["cases"])
    header = {key: value for key, value in content.items() if key != "cases"}
    return f'{{\n{lines(header, " ")},\n "cases": [\n{cases}\n ]\n}}\n'


def main() -> None:
    for name in FILES:
        (HERE / name).write_text(as_text(rope_file(name)), encoding="utf-8")
    (HERE / "logprobs.json").write_text(as_text(logprob_file()), encoding="utf-8")


if __name__ == "__main__":
    main()
