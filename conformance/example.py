"""An engine in miniature: plain RoPE and YaRN in pure Python, checked against the vectors: `python example.py`."""

import math
import sys
from typing import Any

from check import check_rope


def rope(config: dict[str, Any], length: int) -> tuple[list[float], float]:
    """The frequency of each pair in radians per token, and the multiplier of cos and sin."""
    limit = config["max_position_embeddings"]
    given = config.get("rope_scaling") or config["rope_parameters"]
    p = {"rope_theta": config.get("rope_theta", 10000.0), "original_max_position_embeddings": limit, **given}
    p = {key: value for key, value in p.items() if value is not None}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dim = int(head_dim * p.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    plain = [p["rope_theta"] ** (-2 * pair / dim) for pair in range(dim // 2)]
    match p.get("rope_type", p.get("type", "default")):
        case "default":
            return plain, 1.0
        case "yarn":
            original = config.get("original_max_position_embeddings") or p["original_max_position_embeddings"]
            factor = p.get("factor") or limit / original
            return yarn(p, plain, factor, original), attention_factor(p, factor)
    raise NotImplementedError


def yarn(p: dict[str, Any], plain: list[float], factor: float, original: int) -> list[float]:
    """The fast pairs are kept, the slow ones divided by factor, and a ramp over the pair's index joins the two."""
    dim = 2 * len(plain)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = pair_of(p.get("beta_fast", 32)), pair_of(p.get("beta_slow", 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    shares = [min(max((pair - low) / (high - low or 0.001), 0), 1) for pair in range(len(plain))]
    return [each * (1 - share + share / factor) for each, share in zip(plain, shares)]


def attention_factor(p: dict[str, Any], factor: float) -> float:
    """`attention_factor`; or mscale over mscale_all_dim if there are both; or 0.1 ln(factor) + 1."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1

    if "attention_factor" in p:
        return p["attention_factor"]
    both = p.get("mscale") and p.get("mscale_all_dim")
    return grown(p["mscale"]) / grown(p["mscale_all_dim"]) if both else grown(1)


if __name__ == "__main__":
    sys.exit(check_rope(rope) > 0)
