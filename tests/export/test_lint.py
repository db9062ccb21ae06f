"""`lint` on lines that people wrote: wrong ones are found, for the right reason, and right ones give no alarm."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from lint_cases import CONFIGS, RIGHT, WRONG, Case, config_json
from transformers import AutoConfig, PreTrainedConfig

import ctxext
from ctxext import list_methods
from ctxext.cli.lint import config_from
from ctxext.export.commands import Command, parse_command
from ctxext.export.effective import VERSIONS
from ctxext.export.gguf import context_of_gguf, extend_gguf, write_gguf
from ctxext.export.lint import Lint, lint
from ctxext.export.readings import READINGS
from ctxext.export.rules import EngineExport, NotExportable, export_for
from ctxext.extension.request import plan_extension
from ctxext.models.config_fields import ROPE_FIELDS
from ctxext.models.context import read_context


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
        assert any(part in found.why_not for part in ("not supported", "options alone cannot", "window of 4096"))
        return
    again = judged_again(found, case.model, case.version)
    assert not again.is_wrong, told(again)
    for finding in again.findings:
        assert any(part in finding.words for part in ("own", "without scaling; this model")), told(again)


@pytest.mark.slow
@pytest.mark.parametrize("model", CONFIGS)
def test_no_right_line_is_wrong_itself(model: str) -> None:
    """Over lines that people would write for each model, in versions before and after each change."""
    text = config_json(model).get("text_config", config_json(model))
    length, theta = text["max_position_embeddings"], text.get("rope_theta", 1e4)
    blocks: list[Any] = [None, {"rope_type": "default", "rope_theta": 5 * theta}]
    for kind in ("yarn", "linear", "dynamic"):
        original = {"original_max_position_embeddings": length} if kind == "yarn" else {}
        blocks.append({"rope_type": kind, "factor": 2.0, "rope_theta": theta, **original})
    for engine, versions in {"vllm": ("0.12", "0.29", "0.33"), "sglang": ("0.5.10", "0.5.20", "0.5.23")}.items():
        for block in blocks:
            for extra in ({}, {"max_position_embeddings": 2 * length}):
                overrides = {} if block is None else {"rope_parameters": block, **extra}
                overrides = (
                    {"text_config": overrides} if overrides and "text_config" in config_json(model) else overrides
                )
                for version in versions:
                    check_right(Command(engine, "a/b", overrides, 2 * length), model, version)
    for flags in ((), ("--rope-scaling", "yarn", "--rope-scale", "2"), ("--rope-freq-base", str(4 * theta))):
        for version in ("2025-12", "2026-11"):
            check_right(parse_command(["llama-server", "-m", "a.gguf", "-c", str(2 * length), *flags]), model, version)


def check_right(command: Command, model: str, version: str) -> None:
    try:
        found = lint(command, *loaded(model), version)
    except ValueError:  # such as a graph of llama.cpp that is not known
        return
    assert (found.right is None) == (not found.is_wrong or bool(found.why_not))
    if found.right is not None:
        again = judged_again(found, model, version)
        assert not again.is_wrong, (command, version, found.right.flags, told(again))


BAD: dict[str, tuple[Any, ...]] = {
    "rope_type": ("yarn", "linear", "longrope", "llama3", "mrope", "", None, 4), "type": ("yarn", None, []),
    "factor": (None, "4", 0, -1, True, 1e9, {}), "rope_theta": (None, "x", 0, 1e-3, []),
    "original_max_position_embeddings": (None, 0, "x", 4096), "attention_factor": (None, 0, "x"),
    "beta_fast": (1, 0, None, "x"), "beta_slow": (64, None), "truncate": (None, "x"), "mscale": (None, 0, "x"),
    "short_factor": ([], [1.0], None), "long_factor": ([1.0] * 64, "x"), "mrope_section": ([1], None, 3),
    "full_attention": ({}, None, 3), "max_position_embeddings": (None, 0, -5, "x", 1e9), "sliding_window": (None, "x"),
    "model_type": (None, [1], "x"), "num_hidden_layers": (None, "x"), "layer_types": (None, ["x"], 3),
    "head_dim": (None, 0.5, 7),
}  # fmt: skip


def mutated(random: Random, section: str | None) -> dict[str, Any]:
    """An override with one to three odd values, mostly where the engine reads them."""
    block: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6} if random.random() < 0.5 else {}
    odd = {"rope_parameters": block} if random.random() < 0.8 else {}
    for key in random.sample(list(BAD), random.choice((1, 1, 2, 3))):
        is_rope = key in ROPE_FIELDS or key in ("mrope_section", "full_attention")
        (block if is_rope and random.random() < 0.9 else odd)[key] = random.choice(BAD[key])
    if random.random() < 0.3:
        odd[random.choice(("rope_scaling", "rope_parameters"))] = random.choice((block, {}, None, 3))
    odd = json.loads(json.dumps(odd))
    return {section or "text_config": odd} if (section is not None) == (random.random() < 0.9) else odd


def merged(config: dict[str, Any], odd: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(config[key], odd[key]) for key in config.keys() & odd.keys() if isinstance(config[key], dict)
            and isinstance(odd[key], dict)}  # fmt: skip
    return {**config, **odd, **both}


def check_odd(seed: int) -> None:
    random = Random(seed)
    model, engine = random.choice(list(CONFIGS)), random.choice(list(VERSIONS))
    source = config_json(model)
    odd = mutated(random, "text_config" if "text_config" in source else None)
    length, version = random.choice((None, 8192, 131072)), random.choice(VERSIONS[engine])
    with suppress(ValueError):
        if random.random() < 0.5 and engine != "llama.cpp":
            lint(Command(engine, "a/b", odd, length), *loaded(model), version)
        else:
            config, source = config_from(merged(source, odd), "config.json")
            lint(Command(engine, "a/b", length=length), config, source, version)


def test_odd_values_have_a_verdict_or_an_error() -> None:
    """Any exception but ValueError fails."""
    for seed in range(60):
        check_odd(seed)


@pytest.mark.slow
def test_more_odd_values_have_a_verdict_or_an_error() -> None:
    for seed in range(60, 1500):
        check_odd(seed)


def judged_again(found: Lint, model: str, version: str | None) -> Lint:
    """The verdict on the right line as it is printed: of the model's own file, or of one that holds the extension."""
    assert found.right is not None
    config, source = loaded(model)
    if "OUT.gguf" in found.right.flags:
        source = json.loads(json.dumps(found.right.config))
        config = AutoConfig.for_model(**json.loads(json.dumps(source)))
    return lint(parse_command(found.right.flags), config, source, version)


def test_a_model_trained_with_a_scaling_is_told_to_keep_it() -> None:
    """As unslothai/unsloth#7028 found: llama3 extends far beyond its window, linear scaling does not."""
    line = 'vllm serve NAME --hf-overrides \'{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}\''
    for length, overridden in ((262144, {"max_position_embeddings"}), (8192, set())):
        right = lint(parse_command(f"{line} --max-model-len {length}"), *loaded("Llama-3.1-8B")).right
        assert right is not None
        overrides = parse_command(right.flags).overrides
        assert overrides.pop("rope_parameters", {"rope_type": "llama3"})["rope_type"] == "llama3"
        assert overridden <= overrides.keys()


SPAN = {"vllm": ("0.12", "0.29", "0.33"), "sglang": ("0.5.10", "0.5.23"), "llama.cpp": ("2025-12", "2026-11")}
SCALED = ("Llama-3.1-8B", "gemma-3-4b", "DeepSeek-V3", "gpt-oss-20b", "Phi-3.5-mini")


def exports(engine: str, model: str) -> list[tuple[str, EngineExport]]:
    """Every static method at two factors, on the model's own scaling if it has one, where one line serves it."""
    config, source = loaded(model)
    existing, found = "compose" if read_context(config).is_scaled else "refuse", []
    for method in list_methods("rope"):
        for factor in (2, 2.5):
            try:
                made = method.example(read_context(config).rope, factor)
                export = export_for(
                    engine, config, plan_extension(config, method=made, existing=existing), source=source
                )
            except (NotExportable, ValueError, NotImplementedError):
                continue
            if "OUT.gguf" not in export.flags:
                found.append((f"{method.name} {factor}", export))
    return found


@pytest.mark.parametrize("model", ["Llama-3-8B", "Qwen3-8B", "Qwen3.5", *SCALED])
@pytest.mark.parametrize("engine", SPAN)
def test_no_exported_line_of_a_known_checkpoint_gives_an_alarm(engine: str, model: str) -> None:
    config, source = loaded(model)
    for name, export in exports(engine, model):
        edited = None
        if any("replace the checkpoint" in warning for warning in export.warnings):
            edited = (AutoConfig.for_model(**json.loads(json.dumps(export.config))), export.config)
        for version in SPAN[engine]:
            found = lint(parse_command(export.flags), config, source, version, edited)
            assert not found.is_wrong, (name, version, told(found))


@pytest.mark.parametrize("model", SCALED)
def test_the_right_line_of_a_composed_extension_is_that_extension(model: str) -> None:
    config, source = loaded(model)
    for engine in ("vllm", "sglang"):
        for name, export in exports(engine, model):
            command = parse_command(export.flags)
            if command.overrides.pop("max_position_embeddings", None):
                found = lint(command, config, source)
                assert found.right is not None, (name, found.why_not)
                assert found.right.flags == export.flags, name


def test_a_rejected_length_is_explained_by_the_rule_of_that_version() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    for version, row in (("0.29", "vllm-yarn-length"), ("0.30", "vllm-yarn-length-new")):
        found = lint(Command("vllm", "a/b", {"rope_parameters": yarn}, 200_000), *loaded("Qwen3-8B"), version)
        assert READINGS[row] in [finding.reading for finding in found.findings]


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


def test_the_image_states_the_version_unless_the_user_contradicts_it() -> None:
    yarn = '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, '
    overrides = f'{yarn}"rope_theta": 1e6}}}}'
    line = f"docker run vllm/vllm-openai:TAG --model a/b --max-model-len 131072 --hf-overrides '{overrides}'"
    config, source = loaded("Qwen3-8B")
    for tag, is_wrong in (("v0.29.0", False), ("v0.30.0", True)):
        found = lint(parse_command(line.replace("TAG", tag)), config, source)
        assert (found.version, found.is_wrong) == (tag[1:], is_wrong)
    command = parse_command(line.replace("TAG", "v0.29.0"))
    assert lint(command, config, source, "0.29").findings == ()
    with pytest.raises(ValueError, match=r"--engine-version 0\.30 contradicts LINE, whose image is 0\.29\.0\. Drop"):
        lint(command, config, source, "0.30")
    with pytest.raises(ValueError, match=r"knows vllm from 0\.12 on, got 0\.10\.2"):
        lint(parse_command(line.replace("TAG", "v0.10.2")), config, source)


@pytest.mark.parametrize("engine", VERSIONS)
def test_a_version_later_than_the_known_ones_is_judged_with_a_warning(engine: str) -> None:
    newest = VERSIONS[engine][1]
    for version, says in ((f"{newest}.1", ""), ("9999", f"knows {engine} up to {newest}, and judges 9999 by")):
        found = lint(Command(engine, "a/b"), *loaded("Llama-2-7B"), version)
        assert not found.is_wrong
        assert (says in told(found)) if says else not found.findings


@pytest.mark.parametrize(("engine", "value", "is_on"), [
    ("vllm", "1", True), ("vllm", "TRUE", True), ("vllm", " True ", True), ("vllm", "yes", False), ("vllm", "0", False),
    ("sglang", "Y", True), ("sglang", "Yes", True), ("sglang", "on", False), ("sglang", "no", False),
])  # fmt: skip
def test_a_guard_is_on_for_the_values_that_its_engine_takes(engine: str, value: str, is_on: bool) -> None:
    guards = {"vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}
    command = Command(engine, "a/b", length=8192, environment={guards[engine]: value})
    assert ("8192 is rejected" in told(lint(command, *loaded("Llama-2-7B")))) != is_on


def test_a_capped_length_within_the_trained_one_needs_no_scaling() -> None:
    line = "llama-server -m a.gguf -c 32768 --rope-scaling none --rope-scale 4"
    assert told(lint(parse_command(line), *loaded("Llama-3-8B"))).startswith("wrong: --ctx-size is capped")
    assert "without scaling" not in told(lint(parse_command(line), *loaded("Llama-3-8B")))


def test_an_original_length_that_sglang_takes_from_the_config_is_only_reported_where_it_is_another() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}
    for more, says in (
        ({}, ""),
        (
            {"max_position_embeddings": 32768},
            "defaults to max_position_embeddings, here 32768; the model was trained at 8192.",
        ),
    ):
        found = lint(Command("sglang", "a/b", {"rope_parameters": yarn, **more}), *loaded("Llama-3-8B"))
        assert (says in told(found)) if says else found.findings == ()


def test_a_model_served_past_its_own_scaling_is_told_of() -> None:
    overrides = {"max_position_embeddings": 262144}
    found = lint(Command("vllm", "a/b", overrides, 262144), *loaded("Llama-3.1-8B"))
    assert told(found) == "warning: 262144 tokens are served, but this model's own llama3 scaling reaches 131072."
    found = lint(Command("vllm", "a/b", {"max_position_embeddings": 131072}), *loaded("Qwen3-8B"))
    assert "wrong: 131072 tokens are served without scaling; this model was trained at 32768." in told(found)
    assert found.right is not None
    assert found.right.length == 131072


def test_flags_that_repeat_the_extension_of_a_file_are_dropped(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "extended.gguf"
    write_gguf(Path(ctxext.__file__).parent / "assets/austen-4m", tmp_path / "plain.gguf")
    extend_gguf(tmp_path / "plain.gguf", file, 8, method="yarn")
    config = context_of_gguf(file)
    line = f"llama-server -m {file} --rope-scaling yarn --rope-scale 8 -c 4096"
    found = lint(parse_command(line), config, config.to_dict())
    assert told(found) == f"wrong: {file} already holds yarn ×8 (512 → 4,096); these flags repeat it."
    assert found.right is not None
    assert found.right.flags == ("llama-server", "-m", str(file), "--ctx-size", "4096")
    assert not lint(parse_command(found.right.flags), config, config.to_dict()).findings
    longer = lint(parse_command(f"llama-server -m {file} -c 8192"), config, config.to_dict())
    assert longer.why_not == "the file reaches 4096 tokens, so extend the file that it was made from."


def test_flags_add_to_the_factors_that_a_file_holds() -> None:
    line = "llama-server -m a.gguf -c 65536 --rope-scaling yarn --rope-scale 2 --yarn-orig-ctx 8192"
    found = lint(parse_command(line), *loaded("Llama-3.1-8B"))
    assert "the file's own scaling stays in effect whatever flags you pass" in told(found)
    assert "divided by up to 16" in found.does
    assert "replaces" not in told(found)
    assert found.right is not None
    assert found.right.flags == ("llama-server", "-m", "a.gguf", "--ctx-size", "65536")


def test_a_part_that_was_not_read_is_a_finding() -> None:
    found = lint(parse_command("vllm serve a/b $MORE"), *loaded("Llama-2-7B"))
    assert told(found) == "unread: $MORE was not read: paste the line as the shell expands it."
    assert not found.is_wrong


def test_the_config_of_another_model_is_wrong() -> None:
    found = lint(Command("vllm"), *loaded("Llama-3-8B"), edited=loaded("Qwen2.5-7B"))
    assert (
        told(found) == "wrong: this is another model's config: its model_type is qwen2, and that of the model is llama."
    )


@pytest.mark.parametrize(("engine", "overrides", "options", "says"), [
    ("vllm", {"rope_scaling": None}, {}, "^rope_scaling must be an object"),
    ("sglang", {"rope_theta": "x"}, {}, "^rope_theta must be a number"),
    ("vllm", {"model_type": "mistral"}, {}, "^model_type makes this another model"),
    ("llama.cpp", {}, {"--override-kv": "llama.context_length=int:x"}, "llama.context_length in --override-kv must be"),
    ("llama.cpp", {}, {"--override-kv": "llama.rope.scaling.type=str:x"}, "must be none, linear, yarn or longrope"),
    ("llama.cpp", {"a": 1}, {}, "llama.cpp has no overrides in JSON"),
    ("vllm", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}}, {},
     "^rope_parameters.beta_fast must exceed"),
    ("llama.cpp", {}, {"--rope-scaling": "yarn", "--rope-scale": "4", "--yarn-beta-fast": "0.5"},
     "^--yarn-beta-fast must exceed --yarn-beta-slow"),
])  # fmt: skip
def test_errors_name_what_the_line_holds(engine: str, overrides: Any, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lint(Command(engine, "a/b", overrides, options=options), *loaded("Llama-2-7B"))


def test_the_right_line_of_a_later_vllm_has_no_keys_for_transformers_4() -> None:
    command = parse_command("vllm serve a/b --max-model-len 131072")
    for version, has_older in (("0.19.0", True), ("0.19.1", False), ("0.32", False), (None, True)):
        right = lint(command, *loaded("Qwen3-8B"), version).right
        assert right is not None
        assert ("rope_scaling" in parse_command(right.flags).overrides) == has_older


def test_linear_scaling_in_place_of_the_vendors_yarn_is_told_of() -> None:
    line = "llama-server -m a.gguf --rope-freq-scale 0.25"
    found = told(lint(parse_command(line), *loaded("Qwen3-8B")))
    assert "warning: linear scaling needs fine-tuning; the vendor's recipe is yarn ×4." in found


def test_a_removed_flag_is_told_of_whatever_its_value() -> None:
    found = lint(parse_command("vllm serve a/b --rope-scaling yarn --max-model-len 131072"), *loaded("Qwen3-8B"))
    assert told(found).startswith("wrong: --rope-scaling was removed")
    assert found.right is not None
    assert found.right.length == 131072


@pytest.mark.parametrize("version", ["0.30.0+cu129", "v0.30.1rc1", "0.30.0.post1"])
def test_a_build_of_a_release_is_judged_as_that_release(version: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    found = lint(Command("vllm", "a/b", {"rope_parameters": yarn}, 131072), *loaded("Qwen3-8B"), version)
    assert READINGS["vllm-yarn-length-new"] in [finding.reading for finding in found.findings]


def test_the_length_asked_for_is_kept() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    line = f"vllm serve a/b --max-model-len 131000 --hf-overrides '{json.dumps({'rope_parameters': yarn})}'"
    right = lint(parse_command(line), *loaded("Qwen3-8B")).right
    assert right is not None
    assert right.length == parse_command(right.flags).length == 131000
    assert parse_command(right.flags).overrides["rope_parameters"]["factor"] == 4.0


def test_a_program_of_llama_cpp_keeps_its_name() -> None:
    right = lint(parse_command("./llama-perplexity.exe -m a.gguf -c 16384"), *loaded("Llama-2-7B")).right
    assert right is not None
    assert right.flags[0] == "llama-perplexity"


def test_equal_betas_are_a_step_as_in_kimi_k2() -> None:
    yarn = {**config_json("DeepSeek-V3")["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}
    source = {**config_json("DeepSeek-V3"), "rope_scaling": yarn, "max_position_embeddings": 131072}
    config, source = config_from({**source, "model_type": "kimi_k2"}, "config.json")
    for line in ("vllm serve a/b", "python -m sglang.launch_server --model-path a/b"):
        found = lint(parse_command(f"{line}"), config, source)
        assert found.findings == (), told(found)
        assert "divided by up to 32" in found.does


def test_a_context_length_that_is_raised_in_the_file_is_the_original_one_of_yarn() -> None:
    line = "llama-server -m a.gguf -c 16384 --rope-scaling yarn --rope-scale 4"
    assert not lint(parse_command(line), *loaded("Llama-2-7B")).findings
    raised = f"{line} --override-kv llama.context_length=int:16384"
    assert "frequencies are off by" in told(lint(parse_command(raised), *loaded("Llama-2-7B")))


SELF_EXTEND = "self_extend ×4: 32,768 → 131,072 tokens"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize("length", [None, 131072])
def test_an_extension_that_an_engine_does_not_read_is_told(engine: str, length: int | None) -> None:
    config, source = loaded("Qwen3-8B")
    plain = lint(Command(engine, length=length), config, source)
    found = lint(Command(engine, length=length), config, {**source, "context_extension": SELF_EXTEND})
    assert f"does not read the model's extension, {SELF_EXTEND} in context_extension.json." in told(found)
    assert (found.is_wrong, found.right) == (True, None)
    assert found.why_not == "config.json cannot express it. Serve it with ctxext serve."
    assert {finding.words for finding in plain.findings} <= {finding.words for finding in found.findings}


def test_an_extension_that_a_line_replaces_or_a_file_has_lost_is_told() -> None:
    config, source = loaded("Qwen3-8B")
    extended = {**source, "context_extension": SELF_EXTEND}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    line = Command("vllm", length=131072, overrides={"rope_parameters": yarn, "max_position_embeddings": 131072})
    assert "warning: this runs yarn scaling instead of the model's own extension" in told(lint(line, config, extended))
    plain = {"rope_type": "default", "rope_theta": 1000000.0}
    line = Command("vllm", overrides={"rope_parameters": plain})
    assert "wrong: vLLM does not read the model's extension" in told(lint(line, config, extended))
    lost = lint(Command("vllm"), config, extended, edited=(config, source))
    assert "wrong: vLLM does not read the model's extension" in told(lost)
