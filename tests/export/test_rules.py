"""What `ctxext export` says, put through each engine's own reading of it, gives the frequencies that were meant.

`vllm_*`, `sglang_*` and `llama_cpp_*` are written after the public code named at each; they know nothing of ctxext.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import LENGTH, tiny_config
from lint_cases import config_json
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ctxext import PI, LongRoPE, RopeScaling, YaRN, list_methods
from ctxext.export.commands import parse_command
from ctxext.export.lint import lint
from ctxext.export.rules import ENGINES, INTERLEAVED, NotExportable, export_for
from ctxext.extension.request import plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.models.context import read_context
from ctxext.models.text_config import text_config_of

FACTOR = 4
TARGET = FACTOR * LENGTH
STATIC = {
    method.name: example
    for method in list_methods("rope")
    if isinstance(example := method.example(read_context(tiny_config("llama")).rope, FACTOR), RopeScaling)
    and not example.in_attention
}
STATIC |= {
    "yarn with options": YaRN(factor=FACTOR, beta_fast=4, beta_slow=0.25, attention_factor=1.3),
    "yarn not truncated": YaRN(factor=FACTOR, truncate=False),
    "pi by 2.5": PI(factor=2.5),
}
FAMILIES = ["llama", "gpt_neox", "phi3"]  # all of a head turns, a quarter of it, and lengths beside rope_parameters


def method_for(config: PreTrainedConfig, name: str) -> RopeScaling:
    """The method, for the pairs that `config` has."""
    if name == "longrope":
        return LongRoPE.example(read_context(config).rope, FACTOR)
    return STATIC[name]


def loaded(config: dict[str, Any]) -> PreTrainedConfig:
    """As the engines load a config.json: by transformers 5."""
    return AutoConfig.for_model(**config)


# ------------------------------------------------------------------------------ vLLM, by its public code


def plain(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim))


def server_yarn(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """yarn_scaling_rope.py of vllm-project/vllm@0cd57848, yarn.py of sgl-project/sglang@0b1fd02d: the same."""
    base, original = parameters["rope_theta"], parameters["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return (rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dim_of(parameters.get("beta_fast", 32)), dim_of(parameters.get("beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = ((torch.arange(rotary_dim // 2) - low) / (high - low + 0.001 * (low == high))).clamp(0, 1)
    extrapolated = plain(parameters, rotary_dim)
    return extrapolated / parameters["factor"] * ramp + extrapolated * (1 - ramp)


def server_llama3(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """llama3_rope.py of vllm-project/vllm, Llama3RotaryEmbedding of sgl-project/sglang: Meta's own formula."""
    inv_freq, original = plain(parameters, rotary_dim), parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wave_len = 2 * math.pi / inv_freq
    smooth = (original / wave_len - low) / (high - low)
    between = (1 - smooth) * inv_freq / parameters["factor"] + smooth * inv_freq
    kept = torch.where(wave_len < original / high, inv_freq, between)
    return torch.where(wave_len > original / low, inv_freq / parameters["factor"], kept)


def vllm_reads(config: PreTrainedConfig, older: bool = False) -> tuple[torch.Tensor, float]:
    """`get_rope` of vllm-project/vllm@0cd57848 (older: 07b12f1b): frequencies, and the multiplier of cos and sin."""
    parameters = config.rope_parameters
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_size * parameters.get("partial_rotary_factor", 1.0))
    match parameters.get("rope_type", "default"):
        case "default":
            return plain(parameters, rotary_dim), 1.0
        case "linear":
            return plain(parameters, rotary_dim) / parameters["factor"], 1.0
        case "llama3":
            return server_llama3(parameters, rotary_dim), 1.0
        case "yarn":
            usual = 0.1 * math.log(parameters["factor"]) + 1.0
            if older:
                return server_yarn(parameters, rotary_dim), usual * parameters.get("attn_factor", 1)
            return server_yarn(parameters, rotary_dim), parameters.get("attention_factor") or usual
        case "longrope":
            # All lengths use the long list once max_model_len exceeds the original length.
            scale = config.max_position_embeddings / parameters["original_max_position_embeddings"]
            own = math.sqrt(1 + math.log(scale) / math.log(parameters["original_max_position_embeddings"]))
            inv_freq = plain(parameters, rotary_dim) / torch.tensor(parameters["long_factor"], dtype=torch.float32)
            return inv_freq, parameters.get("long_mscale", own)
    raise ValueError(f"Unknown RoPE scaling type {parameters['rope_type']}")


def with_transformers_4(config: dict[str, Any]) -> PreTrainedConfig:
    """`patch_rope_parameters` of vLLM 0.12 to 0.19.0, whose classes of transformers 4 have a theta by default."""
    read = loaded(config)
    parameters = dict(config.get("rope_scaling") or config["rope_parameters"])
    parameters["rope_theta"] = config.get("rope_theta", config.get("rotary_emb_base", 10000.0))
    share = config.get("partial_rotary_factor", config.get("rotary_pct"))
    read.rope_parameters = parameters if share is None else {**parameters, "partial_rotary_factor": share}
    return read


VLLM_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "seq_len")


def vllm_length(config: PreTrainedConfig, older: bool = False) -> float:
    """`_get_and_verify_max_len` of vLLM 0.32 (older: 0.12 to 0.29), vllm/config/model.py; no tokenizer is asked."""
    length = min(getattr(config, name) for name in VLLM_LENGTHS if getattr(config, name, None) is not None)
    length = getattr(config, "model_max_length", None) or length
    parameters = config.rope_parameters
    scaling_factor = 1.0
    if parameters["rope_type"] not in ("su", "longrope", "llama3", *(() if older else ("yarn",))):
        scaling_factor = parameters.get("factor", scaling_factor)
        if parameters["rope_type"] == "yarn":
            length = parameters["original_max_position_embeddings"]
    return length * scaling_factor


def vllm_rows(config: PreTrainedConfig) -> float:
    """Rows of its table of cos and sin: base.py, linear_scaling_rope.py and yarn_scaling_rope.py of vLLM 0.32."""
    parameters = config.rope_parameters
    length = config.max_position_embeddings
    if parameters["rope_type"] == "yarn":
        length = parameters["original_max_position_embeddings"]
    return length * (parameters["factor"] if parameters["rope_type"] in ("yarn", "linear") else 1)


# ---------------------------------------------------------------------------- SGLang, by its public code


def sglang_reads(config: PreTrainedConfig, position: int) -> tuple[torch.Tensor, float]:
    """Angles at `position`, decoded alone, and the multiplier: `get_rope` of sgl-project/sglang@108c36c0."""
    parameters = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if parameters["rope_type"] == "yarn":  # yarn.py
        usual = 0.1 * math.log(parameters["factor"]) + 1.0
        if parameters.get("mscale") is not None and parameters.get("mscale_all_dim") is not None:
            usual = 1.0
        return position * server_yarn(parameters, rotary_dim), usual * parameters.get("attn_factor", 1)
    if parameters["rope_type"] == "longrope":  # rope_variant.py: one table of the short rows, then the long ones
        k = parameters["original_max_position_embeddings"]
        row, inv_freq = position + k * (position > k), plain(parameters, rotary_dim)
        name, at = ("short", row) if row < k else ("long", row - k)
        return at * inv_freq / torch.tensor(parameters[f"{name}_factor"]), parameters[f"{name}_mscale"]
    inv_freq, scaling = vllm_reads(config)
    return position * inv_freq, scaling


def sglang_length(config: PreTrainedConfig) -> int:
    """`get_context_length` of sgl-project/sglang@002fc100, hf_transformers_utils.py."""
    rope_scaling = config.rope_parameters
    factor = rope_scaling.get("factor", 1)
    if "original_max_position_embeddings" in rope_scaling or rope_scaling.get("rope_type") == "llama3":
        factor = 1
    keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
    return int(factor * next(getattr(config, key) for key in keys if getattr(config, key, None) is not None))


# ------------------------------------------------------------------------- llama.cpp, by its public code


def llama_cpp_reads(config: PreTrainedConfig, flags: tuple[str, ...]) -> tuple[torch.Tensor, float]:
    """The constructor of llama_context, ggml-org/llama.cpp@001d906a, and `rope_yarn` of ggml."""
    options = dict(zip(flags[1::2], flags[2::2]))
    keys = dict(pair.split("=") for pair in options.get("--override-kv", "").split(","))
    keys = {name: float(value.split(":")[1]) for name, value in keys.items()}
    theta = float(options.get("--rope-freq-base", config.rope_parameters["rope_theta"]))
    scale = float(options.get("--rope-scale", 1))
    attn_factor = keys.get("llama.rope.scaling.attn_factor", 1.0)
    if options.get("--rope-scaling") == "yarn":
        original = int(options["--yarn-orig-ctx"])
        betas = {name: float(options.get(f"--yarn-{name.replace('_', '-')}", usual))
                 for name, usual in (("beta_fast", 32), ("beta_slow", 1))}  # fmt: skip
        parameters = {"rope_theta": theta, "factor": scale, "original_max_position_embeddings": original, **betas}
        return server_yarn(parameters, config.head_dim), (0.1 * math.log(scale) + 1) * attn_factor
    return plain({"rope_theta": theta}, config.head_dim) / scale, attn_factor


# ----------------------------------------------------------- ExLlamaV3 and LMDeploy, by their public code


def exllama_reads(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """`read_rope_settings_default` and RoPE of ExLlamaV3 1.6.5: the raw config.json, and lengths before a factor."""
    scaling = config.get("rope_scaling") or config["rope_parameters"]
    share = config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    read = {**scaling, "rope_theta": config.get("rope_theta", scaling.get("rope_theta"))}
    rotary_dim, length = int(head_dim * share), config["max_position_embeddings"]
    match scaling["rope_type"]:
        case "default":
            return plain(read, rotary_dim), 1.0
        case "linear":
            return plain(read, rotary_dim) / scaling["factor"], 1.0
        case "llama3":
            return server_llama3(read, rotary_dim), 1.0
        case "yarn":
            factor = length / scaling["original_max_position_embeddings"]
            multiplier = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1
            return server_yarn({**read, "factor": factor}, rotary_dim), multiplier
        case "longrope":
            original = scaling["original_max_position_embeddings"]
            factors = scaling["long_factor" if length > original else "short_factor"]
            scale = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
            return plain(read, rotary_dim) / torch.tensor(factors, dtype=torch.float32), scale
    raise ValueError(f"Unknown rope_type: {scaling['rope_type']}")


def lmdeploy_reads(config: PreTrainedConfig) -> tuple[torch.Tensor, float]:
    """`build_rotary_params` and the default classes of LMDeploy 0.18.0, as transformers loads the config."""
    parameters, length = config.rope_parameters, config.max_position_embeddings
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    match parameters["rope_type"]:
        case "default":
            return plain(parameters, rotary_dim), 1.0
        case "linear":
            return plain(parameters, rotary_dim) / parameters["factor"], 1.0
        case "llama3":
            return server_llama3(parameters, rotary_dim), 1.0
        case "yarn":
            usual = 0.1 * math.log(parameters["factor"]) + 1
            return server_yarn(parameters, rotary_dim), parameters.get("attention_factor", usual)
        case "longrope":
            original = parameters["original_max_position_embeddings"]
            scale = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
            factors = torch.tensor(parameters["long_factor"], dtype=torch.float32)
            return plain(parameters, rotary_dim) / factors, scale
    raise ValueError(parameters["rope_type"])


# ------------------------------------------------------------------------------------------- the laws


def check(inv_freq: torch.Tensor, scaling: float, plan: RopePlan) -> None:
    torch.testing.assert_close(inv_freq.double(), plan.extended.inv_freq, rtol=1e-5, atol=1e-12)
    assert scaling == pytest.approx(plan.extended.attention_factor, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", STATIC)
def test_every_engine_reads_the_frequencies_and_the_length_that_were_meant(name: str, family: str) -> None:
    config = tiny_config(family)
    plan = plan_extension(config, method=method_for(config, name))
    for engine in ("transformers", "vllm", "sglang"):
        export = export_for(engine, config, plan)
        read = loaded(export.config)
        if engine == "transformers":
            kind = read.rope_parameters["rope_type"]
            if kind != "default":
                check(*ROPE_INIT_FUNCTIONS[kind](read, "cpu"), plan)
            assert read.max_position_embeddings == plan.target_length
            continue
        overridden = loaded(json.loads(config.to_json_string()))
        overridden.update(json.loads(export.flags[-1]))
        assert export.flags[export.flags.index("--max-model-len" if engine == "vllm" else "--context-length") + 1] == (
            str(plan.target_length)
        )
        older = with_transformers_4({**json.loads(config.to_json_string()), **json.loads(export.flags[-1])})
        for seen in (read, overridden, *((with_transformers_4(export.config), older) if engine == "vllm" else ())):
            if engine == "vllm":
                check(*vllm_reads(seen), plan)
                check(*vllm_reads(seen, older=True), plan)
                for length in (vllm_length(seen), vllm_length(seen, older=True), vllm_rows(seen)):
                    assert plan.target_length <= length < plan.target_length + FACTOR
            else:
                angles, scaling = sglang_reads(seen, position=7)
                check(angles / 7, scaling, plan)
                assert plan.target_length <= sglang_length(seen) < plan.target_length + FACTOR


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_scaling_in_the_words_of_version_4_does_not_outlive_the_export(family: str) -> None:
    """With transformers 4 vLLM takes rope_scaling before rope_parameters, and an override removes no key."""
    config = tiny_config(family)
    plan = plan_extension(config, 4, "ntk")
    source = json.loads(config.to_json_string()) | {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "su", "factor": 2.0},
    }
    export = export_for("vllm", config, plan, source=source)
    for written in (export.config, {**source, **json.loads(export.flags[-1])}):
        check(*vllm_reads(with_transformers_4(written)), plan)


@pytest.mark.parametrize("name", [name for name, method in STATIC.items() if "longrope" in str(
    method.rope_parameters(read_context(tiny_config("llama")).rope)["rope_type"])])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_no_position_within_reach_is_taken_for_another_in_sglang(name: str, family: str) -> None:
    """Its longrope gives the position original_max_position_embeddings the angles of 0 where no other is longer."""
    config = tiny_config(family)
    plan = plan_extension(config, method=method_for(config, name))
    read = loaded(export_for("sglang", config, plan).config)
    for position in range(plan.target_length):
        angles, _ = sglang_reads(read, position)
        torch.testing.assert_close(angles.double(), position * plan.extended.inv_freq, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["pi", "ntk", "abf", "yarn", "ntk_by_parts", "yarn with options", "pi by 2.5"])
def test_llama_cpp_is_told_the_frequencies_by_its_command_line(name: str) -> None:
    config = tiny_config("llama")
    plan = plan_extension(config, method=STATIC[name])
    export = export_for("llama.cpp", config, plan)
    check(*llama_cpp_reads(config, export.flags), plan)
    assert export.flags[export.flags.index("--ctx-size") + 1] == str(plan.target_length)
    assert f"llama.context_length=int:{plan.target_length}" in export.flags[-1]


def test_llama_cpp_serves_what_its_flags_do_not_reach_from_a_file() -> None:
    """gpt-oss scales its windowed layers too, by the file's keys alone, and Phi-3's factors are tensors."""
    for family, name in (("gpt_oss", "yarn"), ("gpt_oss", "ntk"), ("phi3", "resonance")):
        config = tiny_config(family)
        export = export_for("llama.cpp", config, plan_extension(config, 4, name))
        assert export.flags == ("llama-server", "-m", "OUT.gguf", "--ctx-size", str(4 * LENGTH))
        assert "convert_hf_to_gguf.py, and extend that file" in export.warnings[0]
    assert len(export_for("llama.cpp", config, plan_extension(config, 4, "yarn")).warnings) == 1


@pytest.mark.parametrize(
    ("family", "method", "said"),
    [
        ("qwen3", "llama3", r"qwen2, qwen3, gemma3 and gpt-oss have none. Nearest for qwen3: 'yarn'"),
        ("gemma3_text", "ntk_by_parts", r"multiplies cos and sin of gemma3's windowed layers too.*Nearest"),
        ("gemma3_text", "resonance", r"have none. Nearest for gemma3_text: 'yarn'"),
        ("gpt_oss", YaRN(factor=4, beta_fast=4), r"have none. Nearest for gpt_oss: 'yarn' as in the paper"),
        ("gpt_oss", YaRN(factor=4, truncate=False), "always rounded. Nearest for gpt_oss"),
        ("llama", "self_extend", r"llama-completion alone, not of llama-server.*Nearest: 'yarn'"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused_with_the_nearest(family: str, method: Any, said: str) -> None:
    config = tiny_config(family) if family != "gemma3_text" else AutoConfig.for_model(
        family, max_position_embeddings=LENGTH, sliding_window=32, num_hidden_layers=6
    )  # fmt: skip
    factor = 4 if isinstance(method, str) else None
    with pytest.raises(NotExportable, match=said):
        export_for("llama.cpp", config, plan_extension(config, factor, method))


def test_a_window_that_llama_cpp_ignores_is_refused_where_it_would_matter() -> None:
    for family in ("phi3", "mistral"):
        config = tiny_config(family, sliding_window=2 * LENGTH)
        export_for("llama.cpp", config, plan_extension(config, 2, "yarn"))
        with pytest.raises(NotExportable, match=f"full attention. Nearest: a target of {2 * LENGTH} tokens"):
            export_for("llama.cpp", config, plan_extension(config, 4, "yarn"))


@pytest.mark.parametrize("name", STATIC)
def test_the_two_lengths_of_phi_3_give_version_4_the_attention_factor(name: str) -> None:
    config = tiny_config("phi3")
    plan = plan_extension(config, method=method_for(config, name))
    written = export_for("transformers-v4", config, plan).config
    if plan.updates["rope_parameters"]["rope_type"] == "default":
        assert written["rope_theta"] == plan.updates["rope_parameters"]["rope_theta"]
        return
    assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    original = written["original_max_position_embeddings"]
    factor = written["max_position_embeddings"] / original  # modeling_rope_utils.py of 4.57.6
    scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    assert scaling == pytest.approx(plan.extended.attention_factor, rel=1e-9)


def test_an_extended_checkpoint_is_served_as_it_is_where_its_config_says_enough() -> None:
    config = tiny_config("llama")
    plan = plan_extension(config, 4, "yarn")
    source = export_for("transformers", config, plan).config
    extended = loaded(source)
    for engine in ENGINES:
        export = export_for(engine, extended, source=source)
        assert not any("override" in flag and "kv" not in flag for flag in export.flags)
        if engine not in ("llama.cpp", "ollama"):
            of_plan = export_for(engine, config, plan, source=json.loads(config.to_json_string()))
            assert of_plan.warnings == export.warnings


def test_llama_cpp_is_not_told_to_extend_a_file_of_an_extended_folder() -> None:
    config = tiny_config("llama")
    plan = plan_extension(config, 4, "yarn")
    source = export_for("transformers", config, plan).config
    export = export_for("llama.cpp", loaded(source), source=source, model="mine")
    assert export.flags == ("llama-server", "-m", "OUT.gguf", "--ctx-size", str(TARGET))
    assert "ctxext export mine --engine llama.cpp -o OUT.gguf" in export.warnings[0]
    assert "file of the unextended model" in export_for("llama.cpp", config, plan).warnings[0]


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
@pytest.mark.parametrize("name", STATIC)
def test_exllamav3_and_lmdeploy_read_what_was_meant_or_are_refused(name: str, family: str) -> None:
    config = tiny_config(family)
    plan = plan_extension(config, method=method_for(config, name))
    stale = {**json.loads(config.to_json_string()), "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    exllama = export_for("exllamav3", config, plan, source={**stale, "rope_theta": 5.0})
    check(*exllama_reads(exllama.config), plan)
    assert exllama.config["max_position_embeddings"] >= plan.target_length
    original = plan.target_length ** (1 / plan.extended.attention_factor**2)
    if family == "phi3" and not math.isclose(original, round(original)):
        with pytest.raises(NotExportable, match="takes a whole number there"):
            export_for("lmdeploy", config, plan)
        return
    lmdeploy = export_for("lmdeploy", config, plan, source=stale, ready=True, model="DIR")
    check(*lmdeploy_reads(loaded(lmdeploy.config)), plan)
    assert lmdeploy.flags[-4:] == ("--backend", "pytorch", "--session-len", str(plan.target_length))


def test_a_class_that_was_not_read_is_refused() -> None:
    config = tiny_config("olmo2")
    for engine in ("exllamav3", "lmdeploy"):
        with pytest.raises(NotExportable, match=r"class for olmo2 was not read .*Nearest: vLLM"):
            export_for(engine, config, plan_extension(config, 4, "ntk"))


def test_ollama_is_given_a_file_and_no_flags() -> None:
    for family in ("llama", "qwen3"):
        config = tiny_config(family)
        export = export_for("ollama", config, plan_extension(config, 4, "yarn"))
        assert export.flags == ("ollama", "create", "NAME", "-f", "OUT.Modelfile")
        assert "--engine ollama" in export.warnings[0]
    with pytest.raises(NotExportable, match="Nearest for qwen3: 'yarn' as in the paper"):
        export_for("ollama", config, plan_extension(config, method=YaRN(factor=4, beta_fast=4)))


@pytest.mark.parametrize("name", ["seq_length", "model_max_length", "max_seq_len"])
@pytest.mark.parametrize("method", ["yarn", "pi", "resonance"])
def test_no_guard_of_a_length_is_lifted_as_no_older_key_forbids_the_target(name: str, method: str) -> None:
    config = tiny_config("llama", **{name: LENGTH})
    plan = plan_extension(config, 4, method)
    for engine, reads in (("vllm", vllm_length), ("sglang", sglang_length)):
        assert reads(config) < TARGET
        export = export_for(engine, config, plan)
        overridden = loaded({**json.loads(config.to_json_string()), **json.loads(export.flags[-1])})
        for seen in (loaded(export.config), overridden):
            assert TARGET <= reads(seen) < TARGET + FACTOR
        assert "ALLOW" not in json.dumps(asdict(export))


def test_no_engine_is_asked_to_go_past_its_table() -> None:
    """vLLM's table of yarn has original * factor rows, and behind it are NaN: a window that was only widened is not."""
    config = tiny_config("llama")
    yarn = loaded(export_for("transformers", config, plan_extension(config, 4, "yarn")).config)
    kept = plan_extension(yarn, 2, existing="keep")
    with pytest.raises(NotExportable, match=rf"\(here {TARGET}\), fewer than the target of {2 * TARGET}"):
        export_for("vllm", yarn, kept)
    composed = loaded(export_for("vllm", yarn, plan_extension(yarn, 2, "yarn", existing="compose")).config)
    assert vllm_rows(composed) >= 2 * TARGET


@pytest.mark.parametrize(("family", "method", "engines", "nearest"), [
    ("llama", {"method": "dynamic_yarn"}, ENGINES, "--length 256"),
    ("llama", {"method": "self_extend"}, ENGINES, "'yarn'"),
    ("cohere", {"method": "resonance"}, ["vllm", "sglang"], "'yarn'"),
    ("qwen3_5", {"method": "pi"}, ["vllm", "sglang"], "'yarn'"),
    ("qwen3", {"method": "resonance"}, ["llama.cpp"], "'yarn' as in the paper"),
    ("qwen3", {"method": "yarn", "truncate": False}, ["llama.cpp"], "'yarn' as in the paper"),
    ("gemma2", {"method": "yarn"}, ["llama.cpp"], "convert_hf_to_gguf.py"),
    ("olmo2", {"method": "yarn"}, ["transformers-v4"], "'ntk' or 'pi'"),
])  # fmt: skip
def test_what_an_engine_cannot_do_is_refused_with_the_nearest_that_works(
    family: str, method: dict[str, Any], engines: list[str], nearest: str
) -> None:
    config = (
        AutoConfig.for_model("cohere", max_position_embeddings=LENGTH) if family == "cohere" else tiny_config(family)
    )
    before = config.to_dict()
    for engine in engines:
        with pytest.raises(NotExportable, match=re.escape(nearest)):
            export_for(engine, config, plan_extension(config, 4, **method))
        assert config.to_dict() == before


def test_native_dynamic_scaling_is_for_transformers_alone() -> None:
    config = tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    assert "longest call" in export_for("transformers", config).warnings[0]
    for engine in ("vllm", "sglang", "llama.cpp"):
        with pytest.raises(NotExportable, match="existing='replace'"):
            export_for(engine, config)


def test_what_is_not_extended_is_named() -> None:
    with pytest.raises(ValueError, match="not extended: plain RoPE with theta 10000 and 64 tokens"):
        export_for("vllm", tiny_config("llama"))
    with pytest.raises(ValueError, match="did you mean 'vllm'"):
        export_for("vlm", tiny_config("llama"))


@pytest.mark.parametrize(
    ("method", "replaced"), [("pi", False), ("ntk", True), ("yarn", False), ("llama3", False), ("resonance", False)]
)
def test_keys_that_sglang_would_keep_of_a_scaling_are_not_overridden(method: str, replaced: bool) -> None:
    """From 0.5.23 it merges rope_parameters, so an original length that the new type has no use for would stay."""
    native = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = tiny_config("llama", rope_parameters=native)
    plan = plan_extension(config, 8, method, existing="replace")
    found = export_for("sglang", config, plan, source=config.to_dict())
    assert ("--json-model-override-args" in found.flags) != replaced
    if replaced:
        assert "replace the checkpoint's config.json" in found.warnings[-1]
    else:
        merged = {**native, **json.loads(found.flags[-1])["rope_parameters"]}
        ours = {**found.config["rope_parameters"]}
        assert merged.keys() - ours.keys() <= {"low_freq_factor", "high_freq_factor"}
        assert {**merged, **ours} == merged


def test_a_nested_config_is_overridden_where_the_engine_merges_and_replaced_where_it_does_not() -> None:
    config = tiny_config("qwen3_5")
    plan = plan_extension(config, 4, "yarn")
    vllm, sglang = export_for("vllm", config, plan), export_for("sglang", config, plan)
    override = json.loads(vllm.flags[-1])
    assert override.keys() == {"text_config"}
    assert {"rope_parameters", "max_position_embeddings"} <= override["text_config"].keys()
    assert not {"hidden_size", "layer_types", "vocab_size"} & override["text_config"].keys()
    assert "--json-model-override-args" not in sglang.flags
    assert "replace the checkpoint's config.json" in sglang.warnings[-1]
    assert sglang.config["text_config"]["rope_parameters"]["rope_type"] == "yarn"


def test_a_key_that_a_merge_would_leave_is_not_overridden() -> None:
    config = tiny_config("qwen3_5")
    plan_extension(config, 4, "ntk_by_parts").apply_to(text_config_of(config))  # with attention_factor
    vllm = export_for("vllm", config, plan_extension(config, 4, "yarn", existing="replace"))
    assert "--hf-overrides" not in vllm.flags
    assert "replace the checkpoint's config.json" in vllm.warnings[-1]
    kept = export_for("vllm", config, plan_extension(config, 8, "ntk_by_parts", existing="replace"))
    assert "--hf-overrides" in kept.flags


@pytest.mark.parametrize("engine", ["mlx", "sglang", "exllamav3", "llama.cpp", "onnxruntime-genai"])
def test_an_engine_that_ignores_the_window_is_refused_beyond_it(engine: str) -> None:
    config = tiny_config("mistral", sliding_window=2 * LENGTH)
    with pytest.raises(NotExportable, match=f"window.*Nearest: a target of {2 * LENGTH} tokens"):
        export_for(engine, config, plan_extension(config, 4, "yarn"))
    for wide in (plan_extension(config, 2, "yarn"), plan_extension(tiny_config("mistral"), 4, "yarn")):
        assert export_for(engine, config if wide.target_length == 2 * LENGTH else tiny_config("mistral"), wide)
    assert export_for("vllm", config, plan_extension(config, 4, "yarn"))


def test_some_windowed_layers_are_enough() -> None:
    config = tiny_config(
        "qwen2", use_sliding_window=True, sliding_window=LENGTH, layer_types=["full_attention", "sliding_attention"]
    )
    for engine in ("mlx", "llama.cpp", "onnxruntime-genai"):
        with pytest.raises(NotExportable, match=f"a target of {LENGTH} tokens"):
            export_for(engine, config, plan_extension(config, 4, "yarn"))


@pytest.mark.parametrize("engine", ["mlx", "sglang", "vllm", "transformers", "onnxruntime-genai"])
@pytest.mark.parametrize("method", ["ntk", "abf"])
def test_the_share_of_the_head_that_rotates_is_written_where_it_is_read(engine: str, method: str) -> None:
    config = tiny_config("phi3")
    config.rope_parameters["partial_rotary_factor"] = 0.5
    source = json.loads(config.to_json_string())
    source.pop("partial_rotary_factor", None)  # as transformers 5 saves it
    written = export_for(engine, config, plan_extension(config, 4, method), source=source).config
    assert written["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in written.get("rope_scaling", {}) or engine != "mlx"


@pytest.mark.parametrize("engine", ["mlx", "exllamav3", "lmdeploy", "onnxruntime-genai", "openvino"])
def test_an_engine_is_refused_by_the_class_that_it_takes_for_a_nested_config(engine: str) -> None:
    text = tiny_config("mistral", num_hidden_layers=1).to_dict()
    config = AutoConfig.for_model("mistral3", text_config=text)
    with pytest.raises(NotExportable, match=r"(?s)mistral3 .*\((run|read): .*mistral,"):
        export_for(engine, config, plan_extension(config, 4, "yarn"))


@pytest.mark.parametrize("family", sorted(INTERLEAVED))
def test_the_families_refused_for_their_pairs_have_such(family: str) -> None:
    code = Path(transformers.__file__).parent / f"models/{family}/modeling_{family}.py"
    assert re.search(r"def rotate_half\(x\):.*?\.\.\., 0?::2\]", code.read_text(), re.S)


# ------------------------------------------------------------------------- configs that are scaled already


@pytest.mark.parametrize(("family", "scaling"), [
    ("gemma3_text", {"rope_type": "linear", "factor": 8.0}),
    ("llama", {"type": "linear", "factor": 8.0}),
])  # fmt: skip
def test_a_checkpoint_in_the_words_of_version_4_is_exported_as_it_is(family: str, scaling: dict[str, Any]) -> None:
    source = {**json.loads(AutoConfig.for_model(family).to_json_string()), "rope_scaling": scaling}
    source = {key: value for key, value in source.items() if key != "rope_parameters"}
    config = loaded(source)
    assert read_context(config).scaling is not None
    for engine in ("transformers", "transformers-v4"):
        assert export_for(engine, config, source=source).config == source


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": LENGTH},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": LENGTH},
])  # fmt: skip
def test_llama_cpp_s_flags_are_not_put_on_top_of_the_scaling_of_a_file(scaling: dict[str, Any]) -> None:
    config = tiny_config("llama", rope_parameters={"rope_theta": 1e4, **scaling})
    for method in ("ntk", "yarn", "pi"):
        with pytest.raises(NotExportable, match=r"MODEL\.gguf --engine llama\.cpp --existing replace"):
            export_for("llama.cpp", config, plan_extension(config, 4, method, existing="replace"))
    assert "OUT.gguf" in export_for("llama.cpp", config, plan_extension(config, 4, "llama3", existing="replace")).flags


def test_llama_cpp_is_told_again_what_its_file_holds_where_that_is_kept() -> None:
    config = tiny_config("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0})
    plan = plan_extension(config, 2, existing="keep")
    flags = export_for("llama.cpp", config, plan).flags
    assert flags[flags.index("--rope-scaling") :][:4] == ("--rope-scaling", "linear", "--rope-scale", "2")


def test_llama_cpp_is_told_the_base_that_a_file_of_a_raised_one_does_not_have() -> None:
    config = tiny_config("llama")
    raised = loaded(export_for("transformers", config, plan_extension(config, 4, "ntk")).config)
    plan = plan_extension(raised, 4, "yarn", existing="replace")
    check(*llama_cpp_reads(raised, export_for("llama.cpp", raised, plan).flags), plan)


def test_yarn_that_was_switched_on_beside_the_old_length_reaches_what_it_says() -> None:
    """As Qwen documents it: max_position_embeddings stays, and factor * original_max_position_embeddings is meant."""
    config = tiny_config("qwen2", rope_parameters={
        "rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH,
    })  # fmt: skip
    assert (read_context(config).reach, read_context(config).trained_length) == (TARGET, LENGTH)
    for engine, flag in (("vllm", "--max-model-len"), ("sglang", "--context-length"), ("llama.cpp", "--ctx-size")):
        flags = export_for(engine, config).flags
        assert flags[flags.index(flag) + 1] == str(TARGET)


def mla_reads(parameters: dict[str, Any]) -> float:
    """DeepseekScalingRotaryEmbedding of vLLM 0.32 and of sgl-project/sglang@108c36c0: the multiplier of cos and sin.

    vLLM reads no attn_factor from 0.30 on, so there must be none to read.
    """
    assert "attn_factor" not in parameters
    terms = (parameters.get("mscale", 1), parameters.get("mscale_all_dim", 0))
    above, below = (0.1 * term * math.log(parameters["factor"]) + 1 for term in terms)
    return above / below


@pytest.mark.parametrize("options", [{}, {"attention_factor": 1.0}, {"attention_factor": 1.2}])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_latent_attention_gets_the_attention_factor_that_was_meant(engine: str, options: dict[str, float]) -> None:
    config = AutoConfig.for_model("deepseek_v3", max_position_embeddings=LENGTH)
    plan = plan_extension(config, 4, "yarn", **options)
    export = export_for(engine, config, plan)
    written = loaded(export.config).rope_parameters
    assert mla_reads(written) == pytest.approx(plan.extended.attention_factor)
    assert ("an mscale of the same effect" in " ".join(export.warnings)) == bool(options)
    with pytest.raises(NotExportable, match="truncate=true"):
        export_for(engine, config, plan_extension(config, 4, "yarn", truncate=False))


@pytest.mark.parametrize("family", ["mixtral", "granite"])
def test_a_file_that_is_not_written_here_is_to_be_converted_first(family: str) -> None:
    config = AutoConfig.for_model(family, max_position_embeddings=LENGTH)
    export = export_for("llama.cpp", config, plan_extension(config, 4, "llama3"))
    assert "convert_hf_to_gguf.py" in export.warnings[0]


def test_flags_are_for_the_file_that_cannot_be_written() -> None:
    config = tiny_config("qwen2")
    source = export_for("transformers", config, plan_extension(config, 4, "yarn")).config
    assert "--yarn-orig-ctx" in export_for("llama.cpp", loaded(source), source=source).flags


def test_a_config_nested_twice_is_written_where_it_stands() -> None:
    config = AutoConfig.for_model("qwen2_5_omni")
    section = export_for("vllm", config, plan_extension(config, 4, "yarn")).config["thinker_config"]["text_config"]
    assert section["rope_parameters"]["rope_type"] == "yarn"


def known(model: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    return loaded(config_json(model)), config_json(model)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "DeepSeek-V3"])
def test_sglang_needs_a_version_that_lengthens_the_table_of_yarn(model: str) -> None:
    """As `ctxext lint` says of older ones."""
    config, source = known(model)
    limit = config.max_position_embeddings
    for target, least in ((2 * limit, "0.5.21"), (limit, "0.5.10")):
        plan = plan_extension(config, target_length=target, existing="keep") if target > limit else None
        export = export_for("sglang", config, plan, source=source)
        assert export.least_version == least
        assert any("the table of yarn has" in warning for warning in export.warnings) == (target > limit)
        for version in ("0.5.20", "0.5.21"):
            short = target > limit and version == "0.5.20"
            assert lint(parse_command(export.flags), config, source, version).is_wrong == short


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "gemma-3-4b", "DeepSeek-V3", "Phi-3.5-mini"])
def test_an_export_says_where_a_trained_in_scaling_is_replaced(model: str) -> None:
    config, source = known(model)
    for existing in ("replace", "compose"):
        try:
            plan = plan_extension(config, method="yarn", factor=2, existing=existing)
            export = export_for("vllm", config, plan, source=source)
        except NotExportable:
            continue
        lost = existing == "replace"
        assert any("ctxext lint calls that wrong" in warning for warning in export.warnings) == lost


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_reach_of_an_exported_linear_scaling_is_in_its_config(engine: str) -> None:
    config = tiny_config("llama")
    export = export_for(engine, config, plan_extension(config, method="pi", factor=1.37), ready=True)
    served = loaded(json.loads(json.dumps(export.config)))
    assert read_context(served).reach == export.length
    assert not lint(parse_command(export.flags), served, export.config).findings
