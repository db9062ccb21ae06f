"""The configs for ONNX Runtime GenAI's builder and for optimum-intel. benchmarks/engines/run.py runs both."""

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

FACTOR, HEAD = 4, 64
TRAINED = 512
EXAMPLES = [method.example(RopeGeometry.plain(HEAD, 1e4, TRAINED), FACTOR) for method in list_methods("rope")]
METHODS: dict[str, Any] = {
    **{made.name: made for made in EXAMPLES if isinstance(made, RopeScaling) and not made.in_attention},
    "yarn with options": YaRN(factor=FACTOR, beta_fast=4, beta_slow=0.5, attention_factor=1.3),
    "yarn not truncated": YaRN(factor=FACTOR, truncate=False),
    "yarn from the first pair": YaRN(factor=FACTOR, beta_fast=400),
}
IN_LISTS = ("llama3", "drope", "p_rope", "resonance", "cope", "longrope", "yarn from the first pair")


def config_of(family: str, **more: Any) -> Any:
    sizes = dict(hidden_size=2 * HEAD, num_attention_heads=2, num_key_value_heads=2, head_dim=HEAD, num_hidden_layers=1)
    lengths = {"original_max_position_embeddings": TRAINED} if family == "phi3" else {}
    names = [{"phi3": "Phi3ForCausalLM", "llama": "LlamaForCausalLM"}.get(family, "OtherForCausalLM")]
    others = {"max_position_embeddings": TRAINED, "sliding_window": None, "pad_token_id": 0, "architectures": names}
    return AutoConfig.for_model(family, **{**sizes, **lengths, **others, **more})


def builder_reads(config: Any) -> tuple[torch.Tensor, float]:
    """onnxruntime_genai/models/builders/ of 0.18.0: radians per token of each pair, and the multiplier."""
    parameters = config.rope_parameters
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    original = getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
    plain = 1 / theta ** (torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    of_phi = config.architectures[0] == "Phi3ForCausalLM" and config.max_position_embeddings != original
    if of_phi:
        assert kind == parameters["type"] == "longrope"
        assert parameters["short_factor"] == parameters["long_factor"]
        return plain / torch.tensor(parameters["long_factor"], dtype=torch.float64), parameters["long_mscale"]
    if config.architectures[0] == "LlamaForCausalLM":  # every other type is ignored
        if kind != "llama3":
            assert kind == "default"
            return plain, 1.0
        wavelengths, low, high = 2 * math.pi / plain, parameters["low_freq_factor"], parameters["high_freq_factor"]
        smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / parameters["factor"] + smooth * plain, 1.0
    if kind == "yarn":
        ends = [
            HEAD / 2 * math.log(original / (parameters[beta] * 2 * math.pi)) / math.log(theta)
            for beta in ("beta_fast", "beta_slow")
        ]
        assert 0 < ends[0] < ends[1] < HEAD / 2 - 1
        assert not parameters.get("mscale_all_dim")
        ramp = ((torch.arange(HEAD // 2, dtype=torch.float64) - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)
        return plain / parameters["factor"] * ramp + plain * (1 - ramp), parameters["mscale"]
    assert kind in ("default", "linear")
    return plain / parameters.get("factor", 1.0), 1.0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("name", METHODS)
def test_the_builder_reads_what_was_meant_or_is_refused(name: str, family: str) -> None:
    config = config_of(family)
    plan = plan_extension(config, method=METHODS[name])
    stale = {**json.loads(config.to_json_string()), "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    if family == "qwen3" and name in IN_LISTS:
        with pytest.raises(NotExportable, match="Nearest: 'yarn' with its usual betas"):
            export_for("onnxruntime-genai", config, plan)
        return
    extended = export_for("transformers", config, plan).config
    for export in (
        export_for("onnxruntime-genai", config, plan, source={**stale, "rope_theta": 5.0}),
        export_for("onnxruntime-genai", AutoConfig.for_model(**extended), source=extended),
    ):
        read = AutoConfig.for_model(**export.config)
        found, scale = builder_reads(read)
        torch.testing.assert_close(found, plan.extended.inv_freq, rtol=1e-6, atol=0)
        assert scale == pytest.approx(plan.extended.attention_factor, rel=1e-9)
        assert (read.max_position_embeddings, read.model_type) == (plan.target_length, family)


def test_the_command_builds_the_folder_that_was_written() -> None:
    config = config_of("llama")
    plan = plan_extension(config, 4, "yarn")
    assert export_for("onnxruntime-genai", config, plan).flags == ()
    built = export_for("onnxruntime-genai", config, plan, model="OUT/a/", ready=True)
    assert built.flags[:7] == (
        "python", "-m", "onnxruntime_genai.models.builder", "--input", "OUT/a/", "--output", "OUT/a-onnx",
    )  # fmt: skip
    assert built.config["architectures"] == ["MistralForCausalLM"]
    assert "builds plain RoPE without a message" in built.warnings[0]
    source = export_for("transformers", config, plan).config
    as_it_is = export_for("openvino", AutoConfig.for_model(**source), model="DIR", source=source)
    assert as_it_is.flags[:5] == ("optimum-cli", "export", "openvino", "--model", "DIR")
    assert as_it_is.config == source


@pytest.mark.parametrize(
    ("engine", "family", "said"),
    [
        ("onnxruntime-genai", "olmo2", r"was not run with olmo2 \(run: llama.*Nearest: openvino"),
        ("openvino", "gpt_oss", "fails for longrope of gpt_oss. Nearest: 'yarn'"),
        ("openvino", "olmo2", r"export of olmo2 was not run, or fails \(run: llama.*Nearest: transformers"),
    ],
)
def test_a_model_that_was_not_run_is_refused(engine: str, family: str, said: str) -> None:
    config = tiny_config(family)
    with pytest.raises(NotExportable, match=said):
        export_for(engine, config, plan_extension(config, 4, "resonance"))


def test_a_window_two_lists_and_a_dynamic_type_are_refused() -> None:
    windowed = config_of("mistral", max_position_embeddings=LENGTH, sliding_window=2 * LENGTH)
    export_for("onnxruntime-genai", windowed, plan_extension(windowed, 2, "yarn"))
    with pytest.raises(NotExportable, match=f"sliding window. Nearest: a target of {2 * LENGTH} tokens"):
        export_for("onnxruntime-genai", windowed, plan_extension(windowed, 4, "ntk"))
    config = config_of("phi3")
    method = LongRoPE.example(read_context(config).rope, 4)
    lists = method.long_factor
    written = export_for("transformers", config, plan_extension(config, method=method)).config
    del written["rope_scaling"]  # it would be read first
    written["rope_parameters"] |= {"short_factor": [1.0] * len(lists), "long_factor": list(lists)}
    with pytest.raises(NotExportable, match="two lists of factors"):
        export_for("onnxruntime-genai", AutoConfig.for_model(**written), source=written)
    config = config_of("llama")
    written = export_for("transformers", config, plan_extension(config, 4, "resonance")).config
    assert "short_mscale" in export_for("openvino", AutoConfig.for_model(**written), source=written).warnings[0]
    del written["rope_scaling"]
    written["rope_parameters"] |= {"short_mscale": 1.1, "long_mscale": 1.1}
    with pytest.raises(NotExportable, match=r"replace attention_factor. Nearest: write the folder"):
        export_for("openvino", AutoConfig.for_model(**written), source=written)
    dynamic = config_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    for engine in ("onnxruntime-genai", "openvino"):
        with pytest.raises(NotExportable, match="'ntk' or 'yarn'"):
            export_for(engine, dynamic)
