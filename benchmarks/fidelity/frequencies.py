"""λ, attention factors and distances of ctxext beside those of the authors' code, in docs/fidelity/authors.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from fidelity.authors import GOLDEN, Case
from fidelity.row import Row
from report import largest

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import ABF, DualChunkAttention, DynamicYaRN, LongRoPE, NTKAware, Resonance, RopeScaling, YaRN
from ctxext.methods.clipped import CoPE
from ctxext.methods.contract import NO_ROTATION

# Their arithmetic is float32, with a power of theta in it; ours is float64.
FLOAT32 = 2e-6


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def geometry(case: Case, length: int | None = None) -> RopeGeometry:
    return RopeGeometry.plain(case["dim"], case["theta"], length or case["length"])


def scaled(method: RopeScaling, rope: RopeGeometry, length: int | None = None) -> tuple[torch.Tensor, float]:
    """The frequencies and attention factor of a method; with `length`, of a query at that position."""
    inv_freq, attention_factor = method.scaled(rope, None if length is None else torch.tensor(length))
    return inv_freq, float(attention_factor)


def posgen_encoding(case: Case) -> tuple[torch.Tensor, float]:
    """The four encodings of PosGen. Its code takes YaRN's ramp over the target length, not the trained one."""
    factor, name = case["factor"], case["encoding"]
    plain = ABF(factor=factor, rope_theta=case["theta"])  # an unchanged base
    target = round(factor * case["length"])
    if name == "rope":
        return scaled(plain, geometry(case))
    if name == "resonance":
        return scaled(Resonance(factor=factor, rounds=plain), geometry(case))
    yarn = YaRN(factor=factor, beta_fast=2, beta_slow=1)
    return scaled(yarn if name == "yarn" else Resonance(factor=factor, rounds=yarn), geometry(case, target))


def ours(part: str, case: Case) -> tuple[torch.Tensor, float]:
    """What ctxext has for a case: frequencies in radians per token, and the attention factor."""
    if part == "posgen":
        return posgen_encoding(case)
    rope = geometry(case)
    if part == "cope":
        return scaled(CoPE(factor=2, clipped=min(case["clipped"], case["dim"] // 2)), rope)
    factor = case["factor"]
    if part == "dynamic_yarn":
        # They scale from the first token beyond the trained length.
        return scaled(DynamicYaRN(factor=max(factor, 2)), rope, round(factor * case["length"]))
    if part == "longrope":
        rescale = tuple(case["rescale"])
        return scaled(LongRoPE(factor=factor, long_factor=rescale, short_factor=rescale), rope)
    method: dict[str, type[RopeScaling]] = {"yarn": YaRN, "ntk": NTKAware, "resonance": Resonance}
    return scaled(method[part](factor=factor), rope)


def difference(part: str, case: Case) -> tuple[float, float]:
    """The largest relative difference of a frequency, and that of the attention factor.

    A frequency of zero is one of 1 / NO_ROTATION here, because a config cannot say infinity.
    """
    inv_freq, attention_factor = ours(part, case)
    theirs = torch.tensor(case["inv_freq"], dtype=torch.float64)
    still = theirs == 0
    assert torch.all(inv_freq[still] <= 2 / NO_ROTATION), f"{part}: a pair that stands still there turns here"
    relative = ((inv_freq - theirs) / theirs)[~still].abs().max()
    factor = case.get("attention_factor", 1.0)
    return float(relative), abs(attention_factor / factor - 1)


def compared(part: str) -> list[Case]:
    """The cases of a part but for those that docs/fidelity.md explains: hard clipping, and a ramp with crossed ends."""
    return [case for case in golden()[part]["cases"] if not case.get("hard") and case.get("model") != "crossed"]


def distance_differences() -> Iterator[tuple[Case, int, int]]:
    """For every setting of DCA the distances that differ, and how many there are."""
    for case in golden()["dca"]["cases"]:
        rope = RopeGeometry.plain(64, 1e4, case["length"])
        method = DualChunkAttention(factor=8, chunk_size=case["chunk_size"], local_window=case["local_window"])
        rows = case["distances"]
        positions = torch.arange(len(rows))
        found = method.distance(rope, positions[:, None], positions[None])
        wrong = sum(int((found[k, : k + 1] != torch.tensor(row)).sum()) for k, row in enumerate(rows))
        wrong += int((found[-1] != torch.tensor(case["decoded"])).sum())
        yield case, wrong, sum(map(len, rows)) + len(rows)


TITLES = {
    "yarn": "YaRN",
    "ntk": "NTK-aware",
    "dynamic_yarn": "dynamic YaRN, at the length of the call",
    "longrope": "LongRoPE, given λ",
    "resonance": "Resonance YaRN",
    "posgen": "RoPE, Resonance RoPE, YaRN and Resonance YaRN of PosGen",
    "cope": "CoPE, n = 20",
}


def rows(tiny: bool = False) -> Iterator[Row]:
    """One row for the frequencies of each part, one for its attention factors if it has any, and one for DCA."""
    for part, title in TITLES.items():
        cases = compared(part)
        found = [difference(part, case) for case in cases]
        about: dict[str, str] = {"part": part, "n": f"{len(cases)} settings"}
        yield Row(f"{title}: frequencies, largest relative difference", largest(f for f, _ in found), FLOAT32, **about)
        if any("attention_factor" in case for case in cases):
            most = largest(a for _, a in found)
            yield Row(f"{title}: attention factor, largest relative difference", most, FLOAT32, **about)
    settings = list(distance_differences())
    pairs = sum(n for _, _, n in settings)
    wrong = sum(wrong for _, wrong, _ in settings)
    yield Row(
        "DCA: distances of query and key that differ",
        wrong,
        0,
        part="dca",
        n=f"{len(settings)} settings, {pairs:,} pairs",
    )
