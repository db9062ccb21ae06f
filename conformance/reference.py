"""What a config means, exactly: RoPE in 50 digits, and the bundled model's log-probabilities in float64.

Plain formulas that share no code with ctxext or transformers. `generate.py` writes them into the files of this folder;
the tests compare both libraries with those.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import Config
from mpmath import ceil, cos, floor, log, mp, mpf, pi, sin, sqrt
from safetensors.torch import load_file
from torch import Tensor

mp.dps = 50


class Rope(NamedTuple):
    """The frequency of each pair in radians per token, and the multiplier of cos and sin."""

    inv_freq: list[mpf]
    attention_factor: mpf

    def cos_sin(self, positions: list[int], pairs: list[int]) -> tuple[list[list[mpf]], list[list[mpf]]]:
        """cos and sin, [position][pair], each times the attention factor."""
        angles = [[position * self.inv_freq[pair] for pair in pairs] for position in positions]
        return (
            [[self.attention_factor * cos(angle) for angle in row] for row in angles],
            [[self.attention_factor * sin(angle) for angle in row] for row in angles],
        )


def parameters_of(config: Config) -> dict[str, Any]:
    """`rope_parameters` with what transformers 5 fills in: `RotaryEmbeddingConfigMixin`."""
    given = config.get("rope_scaling") or config["rope_parameters"]
    elsewhere = {
        "rope_type": given.get("type", "default"),
        "rope_theta": config.get("rope_theta", 10000.0),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": config["max_position_embeddings"],
    }
    parameters = {**elsewhere, **given}
    if "original_max_position_embeddings" in config:  # Phi-3: this one wins
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if parameters.get("factor") is None:
        parameters["factor"] = config["max_position_embeddings"] / mpf(parameters["original_max_position_embeddings"])
    return parameters


def rope(config: Config, length: int) -> Rope:
    """What a config means for a sequence of `length` tokens; only longrope depends on the length.

    A config.json with the keys of transformers 5; its numbers are taken as the float64 that they are read as.
    """
    parameters = parameters_of(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share, theta, factor = (mpf(parameters[key]) for key in ("partial_rotary_factor", "rope_theta", "factor"))
    dim = int(head_dim * share)
    inv_freq = plain(dim, theta)
    match parameters["rope_type"]:
        case "default":
            return Rope(inv_freq, mpf(1))
        case "linear":
            return Rope([each / factor for each in inv_freq], mpf(1))
        case "proportional":
            pairs = int(head_dim * share / 2)
            turning = plain(head_dim, theta)[:pairs]
            return Rope([each / factor for each in turning] + [mpf(0)] * (head_dim // 2 - pairs), mpf(1))
        case "yarn":
            return yarn(parameters, inv_freq, theta, factor)
        case "llama3":
            return llama3(parameters, inv_freq, factor)
        case "longrope":
            return longrope(parameters, inv_freq, factor, length)
    raise ValueError(f"unsupported rope_type {parameters['rope_type']!r}.")


def plain(dim: int, theta: mpf) -> list[mpf]:
    """theta^(-2i/d), in radians per token. RoFormer, section 3.2.2."""
    return [theta ** (-mpf(2 * pair) / dim) for pair in range(dim // 2)]


def ramp_ends(parameters: dict[str, Any], dim: int, theta: mpf) -> tuple[mpf, mpf]:
    """The pairs, unrounded, that turn `beta_fast` and `beta_slow` times within the original length."""
    original = parameters["original_max_position_embeddings"]
    turns = (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1)
    fast, slow = (dim * log(original / (2 * pi * mpf(each))) / (2 * log(theta)) for each in turns)
    return fast, slow


def yarn(parameters: dict[str, Any], inv_freq: list[mpf], theta: mpf, factor: mpf) -> Rope:
    """YaRN paper (arXiv:2309.00071), equations 17 to 22, with the code's ramp over the pair's index."""
    dim = 2 * len(inv_freq)
    low, high = ramp_ends(parameters, dim, theta)
    if parameters.get("truncate", True):
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or mpf(0.001)
    shares = [min(max((pair - low) / width, 0), 1) for pair in range(dim // 2)]
    scaled = [each * (1 - share) + each / factor * share for each, share in zip(inv_freq, shares)]
    return Rope(scaled, yarn_attention_factor(parameters, factor))


def yarn_attention_factor(parameters: dict[str, Any], factor: mpf) -> mpf:
    """`attention_factor`; or mscale over mscale_all_dim (DeepSeek) if there are both; or equation 22."""

    def grown(mscale: float) -> mpf:
        return 1 + mscale * log(factor) / 10 if factor > 1 else mpf(1)

    if parameters.get("attention_factor") is not None:
        return mpf(parameters["attention_factor"])
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(mpf(mscale)) / grown(mpf(all_dim)) if mscale and all_dim else grown(mpf(1))


def llama3(parameters: dict[str, Any], inv_freq: list[mpf], factor: mpf) -> Rope:
    """Frequencies of fewer than `low` turns are divided by factor, of more than `high` kept, linear between."""
    low, high = mpf(parameters["low_freq_factor"]), mpf(parameters["high_freq_factor"])
    turns = [parameters["original_max_position_embeddings"] * each / (2 * pi) for each in inv_freq]
    kept = [min(max((each - low) / (high - low), 0), 1) for each in turns]
    return Rope([each * (keep + (1 - keep) / factor) for each, keep in zip(inv_freq, kept)], mpf(1))


def longrope(parameters: dict[str, Any], inv_freq: list[mpf], factor: mpf, length: int) -> Rope:
    """LongRoPE (arXiv:2402.13753): `long_factor` divides for sequences longer than the original length."""
    original = parameters["original_max_position_embeddings"]
    factors = parameters["long_factor" if length > original else "short_factor"]
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1
    return Rope([each / mpf(by) for each, by in zip(inv_freq, factors)], mpf(attention_factor))


# ------------------------------------------------------------------------------- log-probabilities


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@torch.inference_mode()
def logprobs(weights: Path, config: Config, turned: Rope, token_ids: list[int]) -> Tensor:
    """log p(token_ids[k] | token_ids[:k]) in nats for k >= 1, of a LLaMA with tied embeddings, all in float64."""
    weight = {name: value.double() for name, value in load_file(weights).items()}
    heads, layers, eps = config["num_attention_heads"], config["num_hidden_layers"], config["rms_norm_eps"]
    inv_freq = torch.tensor([float(each) for each in turned.inv_freq], dtype=torch.float64)
    angles = torch.arange(len(token_ids))[:, None] * inv_freq
    cosines, sines = (table * float(turned.attention_factor) for table in (angles.cos(), angles.sin()))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weight[f"{name}.weight"].T

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(0, 1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)  # pair i is dimensions i and i + d/2
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    x = weight["model.embed_tokens.weight"][token_ids]
    future = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).triu(1)
    for layer in range(layers):
        block = f"model.layers.{layer}"
        hidden = norm(x, f"{block}.input_layernorm")
        query, key, value = (by_head(linear(hidden, f"{block}.self_attn.{part}_proj")) for part in "qkv")
        scores = rotated(query) @ rotated(key).transpose(1, 2) / query.shape[-1] ** 0.5
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        x = x + linear(mixed.transpose(0, 1).flatten(1), f"{block}.self_attn.o_proj")
        hidden = norm(x, f"{block}.post_attention_layernorm")
        gate, up = (linear(hidden, f"{block}.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + linear(torch.nn.functional.silu(gate) * up, f"{block}.mlp.down_proj")
    logits = norm(x, "model.norm")[:-1] @ weight["model.embed_tokens.weight"].T
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
