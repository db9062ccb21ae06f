"""Convert a config's `rope_parameters` to a method, and a method to `rope_parameters`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ctxext.encodings.rope import RopeGeometry, inverse_frequencies
from ctxext.methods.contract import RopeScaling, longrope_parameters
from ctxext.methods.dynamic import LongRoPE, TransformersDynamic
from ctxext.methods.scaling import PI, Llama3, YaRN


def method_from_rope_parameters(parameters: dict[str, Any], max_position_embeddings: int) -> RopeScaling | None:
    """The method that a config's `rope_parameters` describe; None for unscaled RoPE.

    Args:
        max_position_embeddings: of the same config, for formats without `factor`.

    Raises:
        ValueError: unsupported `rope_type`.
    """
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    length = parameters.get("original_max_position_embeddings") or max_position_embeddings
    factor = parameters.get("factor") or max_position_embeddings / length
    attention_factor = parameters.get("attention_factor")
    match rope_type:
        case "default":
            return None
        case "linear":
            return PI(factor=factor)
        case "dynamic":
            return TransformersDynamic(factor=factor)
        case "llama3":
            return Llama3(
                factor=factor,
                low_freq_factor=parameters["low_freq_factor"],
                high_freq_factor=parameters["high_freq_factor"],
            )
        case "longrope" | "su":
            return LongRoPE(
                factor=max(factor, 1.0),
                long_factor=tuple(parameters["long_factor"]),
                short_factor=tuple(parameters["short_factor"]),
                attention_factor=attention_factor,
            )
        case "yarn":
            mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
            if attention_factor is None and mscale and all_dim:
                attention_factor = yarn_growth(factor, mscale) / yarn_growth(factor, all_dim)
            return YaRN(
                factor=factor,
                beta_fast=parameters.get("beta_fast") or 32.0,
                beta_slow=parameters.get("beta_slow") or 1.0,
                truncate=parameters.get("truncate", True),
                attention_factor=attention_factor,
            )
    raise ValueError(
        f"unsupported rope_type {rope_type!r}; ctxext reads default, linear, dynamic, yarn, longrope and llama3."
    )


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, the YaRN paper's multiplier of cos and sin; 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def geometry_in_use(
    parameters: dict[str, Any], dim: int, max_position_embeddings: int, within: bool = False
) -> RopeGeometry:
    """The frequencies of a config's `rope_parameters`, over `dim` rotary dimensions.

    Args:
        within: for a length-dependent method, return those within the trained length instead of those at its maximum
            length.
    """
    scaling = method_from_rope_parameters(parameters, max_position_embeddings)
    length = parameters.get("original_max_position_embeddings") or max_position_embeddings
    plain = RopeGeometry.plain(dim, parameters["rope_theta"], length)
    if scaling is None:
        return plain
    at = torch.tensor(length) if within else None
    inv_freq, attention_factor = scaling.scaled(plain, at)
    return replace(plain, inv_freq=inv_freq, attention_factor=float(attention_factor))


def scaled_rope_parameters(method: RopeScaling, rope: RopeGeometry) -> dict[str, Any]:
    """`method` on top of `rope` as transformers' `rope_parameters`, native if possible.

    Composed scaling has no native form, so it becomes `longrope` over plain RoPE.
    """
    if rope.is_plain:
        return method.rope_parameters(rope)
    return as_longrope(method, rope)


def as_longrope(method: RopeScaling, rope: RopeGeometry) -> dict[str, Any]:
    """`method` on top of `rope` as `longrope` over plain RoPE, which expresses any static λ."""
    factors = inverse_frequencies(rope.dim, rope.rope_theta) / rope.inv_freq * method.rescale_factors(rope)
    return longrope_parameters(factors, float(method.scaled(rope)[1]), method.factor, rope)
