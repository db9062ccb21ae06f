"""What any engine may get wrong: readings that every case of a method is tried with, the most plausible first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import IGNORED, LEFT_OUT, Case, Config
from mpmath import mpf
from reference import Rope, parameters_of, plain, rope


def misreadings(case: Case) -> Iterator[tuple[str, str | None, Rope]]:
    """In words, who has it, and the numbers: the case's own readings before those of its method."""
    for words, (seen_in, config) in case.misread.items():
        yield words, seen_in, rope(config, case.length)
    for words, found in common(case.config, case.length):
        yield words, None, found


def common(config: Config, length: int) -> Iterator[tuple[str, Rope]]:
    """The misreadings of a config's `rope_type`; in some configs one changes nothing, or the same as an earlier one."""
    parameters, exact = parameters_of(config), rope(config, length)
    kind, factor = parameters["rope_type"], mpf(parameters["factor"])

    def read(**changed: Any) -> Rope:
        outside = ("rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        kept = {key: value for key, value in config.items() if key not in outside}
        return rope({**kept, "rope_parameters": {**parameters, **changed}}, length)

    if kind in ("yarn", "longrope"):
        yield LEFT_OUT, exact._replace(attention_factor=mpf(1))
        yield "the attention factor is squared", exact._replace(attention_factor=exact.attention_factor**2)
    if kind != "default":
        yield IGNORED, read(rope_type="default")
    yield "rope_theta is 10000", read(rope_theta=1e4)
    if kind in ("yarn", "llama3"):
        unscaled = plain(2 * len(exact.inv_freq), mpf(parameters["rope_theta"]))
        reversed_ramp = [each + each / factor - found for each, found in zip(unscaled, exact.inv_freq)]
        yield "the ramp is reversed", exact._replace(inv_freq=reversed_ramp)
    if kind == "yarn" and parameters.get("truncate", True):
        yield "the ramp's ends are not rounded", read(truncate=False)
    if kind == "longrope":
        yield "short_factor is taken at every length", read(long_factor=parameters["short_factor"])
        yield "long_factor is taken at every length", read(short_factor=parameters["long_factor"])
    if kind in ("yarn", "llama3"):
        limit = config["max_position_embeddings"]
        yield "the original length is max_position_embeddings", read(original_max_position_embeddings=limit)
    if kind in ("linear", "yarn", "llama3"):
        yield "the factor is applied twice", read(factor=factor**2)
    if kind == "linear":
        yield "frequencies are multiplied by the factor", read(factor=1 / factor)
    if kind in ("yarn", "llama3"):
        yield f"{kind} is read as linear", read(rope_type="linear")
    if kind in ("linear", "yarn", "llama3"):
        yield "the factor is doubled", read(factor=2 * factor)
