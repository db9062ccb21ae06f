"""Export and lint are two sides of one law: what an engine does with an exported line is what was meant."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LENGTH, tiny_config
from transformers import AutoConfig, PreTrainedConfig

from ctxext import RopeScaling, YaRN, list_methods
from ctxext.export.commands import Command, parse_command
from ctxext.export.effective import VERSIONS, Effective, effective, meant_scale, version_of
from ctxext.export.lint import lint
from ctxext.export.rules import NotExportable, export_for
from ctxext.extension.request import plan_extension
from ctxext.models.context import read_context
from ctxext.models.families import family_of
from ctxext.models.text_config import text_config_of

FACTOR = 4
ENGINES = {
    "vllm": ("0.12", "0.19", "0.19.1", "0.29", "0.30", "0.33"),
    "sglang": ("0.5.10", "0.5.17", "0.5.23"),
    "llama.cpp": ("2025-12", "2026-09"),
}
LATENT = {"max_position_embeddings": LENGTH, "num_hidden_layers": 2}


def config_of(family: str) -> PreTrainedConfig:
    if family == "deepseek_v3":
        return AutoConfig.for_model(family, **LATENT)
    if family == "gemma3":
        text = {"max_position_embeddings": LENGTH, "num_hidden_layers": 6, "sliding_window": 16, "head_dim": 32}
        return AutoConfig.for_model(family, text_config=text)
    return tiny_config(family)


FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gpt_neox", "qwen3_5", "gemma3", "deepseek_v3", "gpt_oss")
METHODS: dict[str, Any] = {
    **{method.name: method for method in list_methods("rope")},
    "yarn with options": YaRN(factor=FACTOR, beta_fast=4, beta_slow=0.25, attention_factor=1.3),
    "yarn not truncated": YaRN(factor=FACTOR, truncate=False),
}


def method_for(name: str, config: PreTrainedConfig) -> RopeScaling:
    method = METHODS[name]
    return method if isinstance(method, RopeScaling) else method.example(read_context(config).rope, FACTOR)


def exported(engine: str, family: str, name: str) -> tuple[PreTrainedConfig, dict[str, Any], Any, Any]:
    config = config_of(family)
    source = json.loads(config.to_json_string())
    plan = plan_extension(config, method=method_for(name, config))
    return config, source, plan, export_for(engine, config, plan, source=source)


def cells() -> list[tuple[str, str, str]]:
    """What `export_for` supports by a line alone, without a new file."""
    found = []
    for engine in ENGINES:
        for family in FAMILIES:
            for name in METHODS:
                try:
                    *_, export = exported(engine, family, name)
                except (NotExportable, ValueError, NotImplementedError):
                    continue
                if "OUT.gguf" not in export.flags:
                    found.append((engine, family, name))
    return found


def check(does: Effective, plan: Any, config: PreTrainedConfig) -> None:
    extended = text_config_of(_applied(plan, config))
    facts = read_context(extended)
    for table in facts.tables:
        used = does.tables[table.label]
        torch.testing.assert_close(used.inv_freq, table.in_use.inv_freq, rtol=1e-6, atol=0)
        meant = meant_scale(table, family_of(extended).softmax_mscale)
        assert used.attention_factor == pytest.approx(meant, rel=1e-6)
    assert plan.target_length <= does.limit < plan.target_length + FACTOR
    assert does.length == plan.target_length
    assert does.rows is None or does.rows >= does.length
    assert not any(remark.fatal for remark in does.remarks)


def _applied(plan: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    extended = type(config).from_dict(config.to_dict())
    plan.apply_to(text_config_of(extended))
    return extended


@pytest.mark.parametrize(("engine", "family", "name"), cells())
def test_an_exported_line_does_what_was_meant_in_every_version(engine: str, family: str, name: str) -> None:
    config, source, plan, export = exported(engine, family, name)
    command = parse_command(export.flags)
    for version in ENGINES[engine]:
        served, served_source = config, source
        if engine == "sglang" and command.overrides == {}:  # the config.json is to be replaced
            served_source = export.config
            served = type(config).from_dict(served_source)
        check(effective(command, served, served_source, version), plan, config)
        found = lint(command, config, source, version, None if served is config else (served, served_source))
        assert not found.is_wrong, found.findings


def test_the_law_covers_every_engine_and_family_and_a_wrong_line_breaks_it() -> None:
    covered = cells()
    assert {engine for engine, *_ in covered} == set(ENGINES)
    assert {family for _, family, _ in covered} == set(FAMILIES)
    config, source, plan, export = exported("vllm", "llama", "yarn")
    command = parse_command([flag.replace('"factor": 4.0', '"factor": 3.9') for flag in export.flags])
    with pytest.raises(AssertionError):
        check(effective(command, config, source), plan, config)


RECORDED = [
    (engine, version, {**case, "does": did["does"]})
    for engine, file in (("vllm", "engine_versions.json"), ("sglang", "sglang_versions.json"))
    for case in json.loads((Path(__file__).parents[2] / "docs" / file).read_text())["cases"]
    for did in case["did"]
    for version in did["versions"]
]


@pytest.mark.parametrize(("engine", "version", "case"), RECORDED, ids=range(len(RECORDED)))
def test_what_an_engine_itself_did_is_what_is_said_of_it(engine: str, version: str, case: dict[str, Any]) -> None:
    """Recorded by benchmarks/engines/versions.py: vLLM's and SGLang's own code."""
    config = AutoConfig.for_model(**json.loads(json.dumps(case["config"])))
    command = Command(engine, overrides=case["overrides"], length=case["asked"])
    said, did = effective(command, config, case["config"], version), case["does"]
    starts = said.length <= said.limit and not any(remark.fatal for remark in said.remarks)
    assert starts == did["starts"]
    if starts:
        rows = said.rows
        if engine == "sglang" and rows is not None and rows >= said.length:
            rows = None  # as recorded: a table that is right up to the last position
        assert (said.length, rows) == (did["length"], did["rows"])
        found = said.tables[""]
        torch.testing.assert_close(
            found.inv_freq, torch.tensor(did["inv_freq"], dtype=torch.float64), rtol=1e-6, atol=0
        )
        assert found.attention_factor == pytest.approx(did["attention_factor"], rel=1e-6)


@pytest.mark.parametrize(("engine", "version", "attn_factor"), [
    ("vllm", "0.29", 1.5), ("vllm", "0.30", 1.0), ("sglang", "0.5.10", 1.5), ("sglang", "0.5.23", 1.5),
])  # fmt: skip
def test_latent_attention_has_a_multiplier_of_its_own(engine: str, version: str, attn_factor: float) -> None:
    """DeepseekScalingRotaryEmbedding: an mscale of 1 and an mscale_all_dim of 0 where left out."""
    config = config_of("deepseek_v3")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    for terms, usual in (({}, 1.0), ({"mscale": 0.7}, 0.7), ({"mscale_all_dim": 0.5}, 1.0)):
        parameters = {**yarn, **terms, "attn_factor": 1.5, "attention_factor": 2.0}
        does = effective(Command(engine, overrides={"rope_parameters": parameters}), config, config.to_dict(), version)
        below = 0.1 * terms.get("mscale_all_dim", 0.0) * math.log(4) + 1
        assert does.tables[""].attention_factor == pytest.approx((0.1 * usual * math.log(4) + 1) / below * attn_factor)
        assert [remark.field for remark in does.remarks] == ["attention_factor"]


GROWN = 0.1 * math.log(4) + 1
BY_TERMS = (0.7 * 0.1 * math.log(4) + 1) / (0.3 * 0.1 * math.log(4) + 1)
TERMS = {"mscale": 0.7, "mscale_all_dim": 0.3}


@pytest.mark.parametrize(("engine", "version", "keys", "multiplier", "dropped"), [
    ("vllm", "0.29", TERMS, GROWN, ["mscale"]),
    ("vllm", "0.30", TERMS, BY_TERMS, []),
    ("sglang", "0.5.15", TERMS, GROWN, ["mscale"]),
    ("sglang", "0.5.16", TERMS, BY_TERMS, []),
    ("vllm", "0.29", {"attn_factor": 1.5}, 1.5 * GROWN, []),
    ("vllm", "0.30", {"attn_factor": 1.5}, GROWN, ["attn_factor"]),
    ("sglang", "0.5.15", {"attn_factor": 1.5, **TERMS}, 1.5 * GROWN, ["mscale"]),
    ("sglang", "0.5.16", {"attn_factor": 1.5, **TERMS}, 1.5 * BY_TERMS, []),
])  # fmt: skip
def test_a_dropped_term_of_yarns_multiplier_is_named(
    engine: str, version: str, keys: dict[str, float], multiplier: float, dropped: list[str]
) -> None:
    config = config_of("llama")
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    command = Command(engine, overrides={"rope_parameters": {**parameters, **keys}})
    does = effective(command, config, config.to_dict(), version)
    assert does.tables[""].attention_factor == pytest.approx(multiplier)
    assert [remark.field for remark in does.remarks] == dropped
    for remark in does.remarks:
        assert remark.reading.field.startswith(remark.field)
        sign, bound = remark.reading.versions.split()
        numbers, at = version_of(engine, version), version_of(engine, bound)
        assert numbers <= at if sign == "<=" else numbers >= at


def test_versions_that_are_too_old_or_none_are_refused() -> None:
    assert version_of("vllm", None) == (0, 33)
    assert version_of("llama.cpp", "2026-09") == (2026, 9)
    with pytest.raises(ValueError, match=r"knows vllm from 0\.12 on, got 0\.8\.5"):
        version_of("vllm", "0.8.5")
    with pytest.raises(ValueError, match=r"must look like 0\.33 for vllm, got 'newest'"):
        version_of("vllm", "newest")
    assert set(VERSIONS) == set(ENGINES)


@pytest.mark.parametrize(("family", "base"), [
    ("mixtral", 1e6), ("cohere", 1e4), ("persimmon", 25e3), ("gpt_neox", 1e4), ("llama", 1e4), ("qwen2_moe", 1e4),
])  # fmt: skip
def test_before_transformers_5_the_base_is_the_default_of_the_configs_class(family: str, base: float) -> None:
    source = {"model_type": family, "rope_parameters": {"rope_type": "default", "rope_theta": 2e6}}
    for version, theta in (("0.19.0", base), ("0.19.1", 2e6)):
        config = AutoConfig.for_model(**json.loads(json.dumps(source)))
        assert effective(Command("vllm"), config, source, version).tables[""].rope_theta == theta


def test_before_transformers_5_a_default_scaling_replaces_rope_parameters() -> None:
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
    source = {"model_type": "gpt_oss", "rope_parameters": {**yarn, "beta_fast": 32.0, "beta_slow": 1.0}}
    for version, factor in (("0.19.0", 32), ("0.19.1", 64)):
        config = AutoConfig.for_model(**json.loads(json.dumps(source)))
        used = effective(Command("vllm"), config, source, version).tables[""]
        assert used.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)


def test_vllm_reads_yarn_alone_for_gpt_oss() -> None:
    """As it was run: KeyErrors for other rope types, and an attention factor that is ignored."""
    for name in METHODS:
        if name in ("yarn", "yarn not truncated"):
            assert ("vllm", "gpt_oss", name) in cells()
        elif name != "transformers_dynamic":
            with pytest.raises((NotExportable, ValueError)):
                exported("vllm", "gpt_oss", name)
    config = config_of("gpt_oss")
    source = json.loads(config.to_json_string())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH, "rope_theta": 150000.0}
    for parameters, fatal in (
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 150000.0}, True),
        (yarn, True),
        ({**yarn, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}, False),
    ):
        overrides = json.dumps({"rope_parameters": parameters, "max_position_embeddings": 4 * LENGTH})
        does = effective(parse_command(["vllm", "serve", "DIR", "--hf-overrides", overrides]), config, source)
        assert any(remark.fatal for remark in does.remarks) == fatal
        assert any("gpt-oss" in str(remark.reading) for remark in does.remarks)
        assert does.tables[""].attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_a_key_for_all_layers_reaches_the_windowed_ones_of_gemma_and_a_flag_does_not() -> None:
    config = config_of("gemma3")
    words = ["llama-server", "-m", "gemma.gguf", "--rope-scaling", "yarn", "--rope-scale", "4"]
    plain = effective(parse_command(words), config, config.to_dict())
    keyed = [*words, "--override-kv", "gemma3.rope.scaling.attn_factor=float:1.5"]
    keyed = effective(parse_command(keyed), config, config.to_dict())
    windowed = next(label for label in plain.tables if "sliding" in label)
    assert plain.tables[windowed].attention_factor == 1.0
    assert keyed.tables[windowed].attention_factor == 1.5
    (whole,) = plain.tables.keys() - {windowed}
    assert plain.tables[whole].attention_factor == pytest.approx(0.1 * math.log(4) + 1)
