"""The config for mlx-lm, as its rope_utils.py reads it. benchmarks/engines/run.py runs mlx-lm itself."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from families import LENGTH, tiny_config
from transformers import AutoConfig

from ctxext import LongRoPE, RopeScaling, YaRN, list_methods
from ctxext.encodings.rope import RopeGeometry
from ctxext.export.rules import NotExportable, export_for
from ctxext.extension.request import plan_extension
from ctxext.models.context import read_context
from ctxext.models.text_config import text_config_of

FACTOR = 4
EXAMPLES = [method.example(RopeGeometry.plain(16, 1e4, LENGTH), FACTOR) for method in list_methods("rope")]
METHODS: dict[str, Any] = {
    **{made.name: type(made) for made in EXAMPLES if isinstance(made, RopeScaling) and not made.in_attention},
    "yarn with options": YaRN(factor=FACTOR, beta_fast=4, beta_slow=0.25, attention_factor=1.3),
    "yarn not truncated": YaRN(factor=FACTOR, truncate=False),
}
# Attention factors that no whole original length gives.
NOT_WHOLE = ("yarn", "resonance", "yarn with options", "yarn not truncated")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")


def config_of(family: str) -> Any:
    if family == "gemma3_text":
        layers = ["sliding_attention", "full_attention"]
        return AutoConfig.for_model(
            family, max_position_embeddings=LENGTH, num_hidden_layers=2, layer_types=layers, sliding_window=16
        )
    return tiny_config(family)


def as_read(config: dict[str, Any], dims: int) -> tuple[list[float], float]:
    """mlx_lm/models/rope_utils.py: radians per token of each pair, and the multiplier of cos and sin."""
    theta, scaling = config["rope_theta"], config.get("rope_scaling") or {"type": "default"}
    turns = [theta ** (2 * i / dims) for i in range(dims // 2)]  # tokens per radian
    kind = scaling["type"]
    if kind == "default":
        return [1 / each for each in turns], 1.0
    if kind == "linear":
        return [1 / (scaling["factor"] * each) for each in turns], 1.0
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        if config["model_type"] == "phi3":
            assert original == config["original_max_position_embeddings"]  # where Phi-3's class reads it
            assert isinstance(original, int)  # or transformers refuses the config
        factor = config["max_position_embeddings"] / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return [1 / (long * each) for long, each in zip(scaling["long_factor"], turns)], scale
    if kind == "llama3":
        found, factor = [], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        for each in turns:
            rotations = scaling["original_max_position_embeddings"] / (2 * math.pi * each)
            smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
            found.append(((1 - smooth) / factor + smooth) / each)
        return found, 1.0
    assert kind == "yarn"

    def pair(rotations: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1

    low = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(scaling.get("beta_slow", 1))), dims - 1)
    ramp = [min(1.0, max(0.0, (i - low) / ((high - low) or 0.001))) for i in range(dims // 2)]
    frequencies = [(1 - r + r / scaling["factor"]) / each for r, each in zip(ramp, turns)]
    return frequencies, grown(scaling.get("mscale", 1)) / grown(scaling.get("mscale_all_dim", 0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_mlx_computes_what_was_meant(family: str, name: str) -> None:
    config, method = config_of(family), METHODS[name]
    method = method if isinstance(method, RopeScaling) else method.example(read_context(config).rope, FACTOR)
    plan = plan_extension(config, method=method)
    if family == "phi3" and name in NOT_WHOLE:
        with pytest.raises(NotExportable, match="takes a whole number"):
            export_for("mlx", config, plan)
        return
    export = export_for("mlx", config, plan)
    extended = type(config).from_dict(config.to_dict())
    plan.apply_to(text_config_of(extended))
    table = read_context(extended).tables[0]
    frequencies, scale = as_read(export.config, table.rotary_dim)
    torch.testing.assert_close(torch.tensor(frequencies, dtype=torch.float64), table.in_use.inv_freq, rtol=1e-9, atol=0)
    assert scale == pytest.approx(table.in_use.attention_factor, rel=1e-9)
    assert export.config["max_position_embeddings"] == plan.target_length
    assert "rope_parameters" not in export.config  # a class that reads them prefers nothing else
    if family == "phi3":
        assert export.config.get("rope_scaling", {"type": "longrope"})["type"] == "longrope"
    if family == "gemma3_text":
        assert export.config["rope_local_base_freq"] == 10000.0
    json.dumps(export.config)


def test_what_mlx_cannot_compute_is_refused() -> None:
    config = tiny_config("llama")
    cold = LongRoPE(factor=FACTOR, long_factor=(2.0,) * 8, attention_factor=0.9)
    with pytest.raises(NotExportable, match=r"no two lengths give 0\.9"):
        export_for("mlx", config, plan_extension(config, method=cold))
    neox = tiny_config("gpt_neox")
    with pytest.raises(NotExportable, match="class for gpt_neox was not run"):
        export_for("mlx", neox, plan_extension(neox, FACTOR, "yarn"))
