"""`lint` on lines that people wrote: wrong ones are found, for the right reason, and right ones give no alarm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lint_cases import RIGHT, WRONG, Case, config_json
from transformers import AutoConfig, PreTrainedConfig

from ctxext.export.commands import Command, parse_command
from ctxext.export.effective import VERSIONS
from ctxext.export.lint import Lint, lint


def loaded(model: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    source = config_json(model)
    return AutoConfig.for_model(**config_json(model)), source


def checked(case: Case) -> Lint:
    return lint(parse_command(case.line), *loaded(case.model), case.version)


def told(found: Lint) -> str:
    return "\n".join(f"{finding.severity}: {finding.words}" for finding in found.findings)


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_found_for_the_right_reason(case: Case) -> None:
    found = checked(case)
    assert found.is_wrong, found.does
    for part in case.says:
        assert part in told(found)


@pytest.mark.parametrize("case", RIGHT, ids=range(len(RIGHT)))
def test_a_right_line_gives_no_alarm(case: Case) -> None:
    found = checked(case)
    assert not found.is_wrong, told(found)
    assert len(found.findings) == len(case.says), told(found)
    for part in case.says:
        assert part in told(found)


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
def test_the_line_given_instead_is_right(case: Case) -> None:
    found = checked(case)
    assert (found.right is not None) == case.has_right, found.why_not
    if found.right is None:
        assert "not supported" in found.why_not
        return
    command = parse_command(found.right.flags)
    if command.engine == "llama.cpp" and "OUT.gguf" in found.right.flags:
        return
    config, source = loaded(case.model)
    edited = None
    if any("replace the checkpoint" in warning for warning in found.right.warnings):
        edited = (AutoConfig.for_model(**found.right.config), found.right.config)
    again = lint(command, config, source, case.version, edited)
    assert not again.findings, told(again)


def test_a_model_trained_with_a_scaling_is_told_to_keep_it() -> None:
    """As unslothai/unsloth#7028 found: llama3 extends far beyond its window, linear scaling does not."""
    line = 'vllm serve NAME --hf-overrides \'{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}\''
    for length, overridden in ((262144, {"max_position_embeddings"}), (8192, set())):
        right = lint(parse_command(f"{line} --max-model-len {length}"), *loaded("Llama-3.1-8B")).right
        assert right is not None
        overrides = parse_command(right.flags).overrides
        assert overrides.pop("rope_parameters", {"rope_type": "llama3"})["rope_type"] == "llama3"
        assert overridden <= overrides.keys()


def test_a_length_of_its_own_is_allowed_whatever_the_scaling() -> None:
    """vLLM compares --max-model-len with model_max_length too, before it rejects."""
    overrides = {"model_max_length": 200_000, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6,
    }}  # fmt: skip
    found = lint(Command("vllm", overrides=overrides, length=200_000), *loaded("Qwen3-8B"), "0.29")
    assert "is rejected" not in told(found)
    assert "the cos/sin table has 131072 rows" in told(found)


def test_there_are_enough_cases_and_each_has_a_source() -> None:
    assert min(len(WRONG), len(RIGHT)) >= 25
    assert all(case.source and case.why for case in (*WRONG, *RIGHT))
    assert {parse_command(case.line).engine for case in WRONG} == set(VERSIONS)


def test_the_config_of_the_model_is_left_as_it_is() -> None:
    config, source = loaded("Qwen3.5")
    before = json.dumps([config.to_dict(), source], default=str)
    for case in WRONG:
        if case.model == "Qwen3.5":
            lint(parse_command(case.line), config, source, case.version)
    assert json.dumps([config.to_dict(), source], default=str) == before


@pytest.mark.parametrize(("version", "is_short"), [("0.5.20", True), ("0.5.21", False)])
def test_sglang_lengthens_yarns_table_wrongly_up_to_a_version(version: str, is_short: bool) -> None:
    config, source = loaded("Qwen3-8B")
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 32768}
    command = Command("sglang", overrides={"rope_parameters": yarn, "max_position_embeddings": 131072})
    found = lint(command, config, source, version)
    assert ("has 65536 rows, fewer than 131072: the frequencies are others beyond" in told(found)) == is_short
