"""`ctxext lint` as a person meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from lint_cases import config_json
from typer.testing import CliRunner

from ctxext.cli import commands

YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000}'
REMOVED = f"vllm serve Qwen/Qwen3-8B --rope-scaling '{YARN}' --max-model-len 131072"
RIGHT = (
    f"vllm serve Qwen/Qwen3-8B --max-model-len 131072 "
    f'--hf-overrides \'{{"max_position_embeddings": 131072, "rope_parameters": {YARN}}}\''
)


def lint(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(commands, ["lint", *map(str, arguments)], input=stdin)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_json("Qwen3-8B")))
    return path


@pytest.mark.parametrize(
    ("method", "servers"),
    [
        ("yarn", ""),
        ("pi", ""),
        ("llama3", ""),
        ("ntk_by_parts", "SGLang"),
        ("resonance", "vLLM and SGLang"),
        ("self_extend", ""),
    ],
)
def test_extend_names_the_servers_that_would_misread_the_folder(method: str, servers: str, tmp_path: Path) -> None:
    folder = tmp_path / "x4"
    done = CliRunner().invoke(commands, ["extend", "bundled", "--factor", "4", "--method", method, "-o", str(folder)])
    assert done.exit_code == 0, done.output
    note = f"{servers} would not read this config.json as meant. To serve it there: ctxext export"
    said = " ".join(done.output.split())
    assert (note in said) == bool(servers), said
    if method == "self_extend":
        return
    for name, line in {
        "vLLM": f"vllm serve {folder} --max-model-len 2048",
        "SGLang": f"python -m sglang.launch_server --model-path {folder} --context-length 2048",
    }.items():
        assert lint(line).exit_code == (name in servers)
    export = ["export", str(folder), "--engine", "sglang", "-o", str(tmp_path / "out"), "--no-probe"]
    assert CliRunner().invoke(commands, export).exit_code == 0
    line = f"python -m sglang.launch_server --model-path {tmp_path}/out/sglang --context-length 2048"
    assert lint(line).exit_code == 0


def test_a_wrong_line_is_explained_and_the_right_one_can_be_copied(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run = lint(REMOVED, "--model", model)
    assert run.exit_code == 1
    said = " ".join(run.stdout.split())
    assert "wrong: --rope-scaling was removed; pass rope_parameters in --hf-overrides." in said
    assert "vllm-project/vllm#28006" in said
    right = run.stdout.partition("can be added:\n")[2]
    assert "--hf-overrides '{" in right
    again = lint("-", "--model", model, stdin=right)
    assert again.exit_code == 0, again.stdout
    assert "Nothing is wrong with --max-model-len and --hf-overrides." in " ".join(again.stdout.split())


def test_a_right_line_ends_with_0_and_a_warning_does_too(model: Path) -> None:
    assert lint(RIGHT, "--model", model.parent).exit_code == 0
    open_guard = lint(f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {RIGHT}", "--model", model)
    assert open_guard.exit_code == 0
    assert "warning: VLLM_ALLOW_LONG_MAX_MODEL_LEN switches the length check off" in " ".join(open_guard.stdout.split())


def test_the_version_decides(model: Path) -> None:
    line = f"vllm serve Qwen/Qwen3-8B --hf-overrides '{{\"rope_parameters\": {YARN}}}' --max-model-len 131072"
    assert lint(line, "--model", model, "--engine-version", "0.29").exit_code == 0
    assert lint(line, "--model", model, "--engine-version", "0.30").exit_code == 1


def test_a_script_an_overrides_object_and_an_edited_config_are_read(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\n{REMOVED}\n")
    assert lint(script, "--model", model).exit_code == 1
    overrides = f'{{"rope_parameters": {YARN}}}'
    assert lint(overrides, "--engine", "vllm", "--model", model, "--target-length", "128k").exit_code == 1
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps({**config_json("Qwen3-8B"), "rope_scaling": json.loads(YARN)}))
    how = ("--engine", "vllm", "--target-length", "128k", "--model", model)
    assert "131072 is rejected" in lint(edited, *how).stdout
    edited.write_text(json.dumps({**json.loads(edited.read_text()), "max_position_embeddings": 131072}))
    assert lint(edited, *how).exit_code == 0
    assert lint(edited, "--engine", "sglang").exit_code == 0


def test_the_right_line_names_the_model_that_the_user_names(model: Path) -> None:
    overrides = f'{{"rope_scaling": {YARN}}}'
    how = ("--engine", "vllm", "--target-length", "128k", "--json")
    for line in (overrides, RIGHT.replace("Qwen/Qwen3-8B", "...").replace("131072", "999999")):
        told = json.loads(lint(line, *(how if line == overrides else how[-1:]), "--model", model.parent).stdout)
        assert told["right"]["flags"][:3] == ["vllm", "serve", str(model.parent)]


def test_programs_get_severity_words_and_evidence(model: Path) -> None:
    told = json.loads(lint(REMOVED, "--model", model, "--json").stdout)
    assert (told["engine"], told["version"], told["is_wrong"]) == ("vllm", "0.33", True)
    assert told["findings"][0]["severity"] == "wrong"
    assert told["findings"][0]["reading"]["known"] == "read: vllm-project/vllm#28006"
    assert told["right"]["flags"][:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]


def test_a_model_may_be_pasted(model: Path) -> None:
    assert lint(RIGHT, "--model", model.read_text()).exit_code == 0


@pytest.mark.parametrize(("arguments", "says"), [
    (("ollama run qwen3",), "no server found in 'ollama run qwen3'"),
    (("vllm serve ... --max-model-len 4096",), "LINE names no model. Pass --model"),
    (("vllm serve no/such/model",), "is neither a folder nor a hub name"),
    (('{"rope_parameters": {}}',), "LINE is JSON: name the server that reads it with --engine"),
    (("nope.sh",), r"nope\.sh is neither a command line nor a file"),
    (("vllm serve no/such/model",), "Or pass its config with --model: a folder, its config.json, or the JSON itself"),
    (('{"a": 1}', "--engine", "llama.cpp", "--model", "MODEL"), "llama.cpp has no overrides in JSON"),
    ((RIGHT, "--engine", "vlm"), "unknown engine 'vlm'; did you mean 'vllm'"),
    (('{"rope_parameters": {}}', "--engine", "vlm"), "did you mean 'vllm'"),
    (('{"a": 1,}', "--engine", "vllm"), "LINE is not valid JSON: .* at character \\d+, near"),
    ((RIGHT, "--engine", "sglang"), "--engine sglang contradicts LINE, which starts vllm"),
    ((RIGHT, "--model", "MODEL", "--engine-version", "0.8.5"), r"knows vllm from 0\.12 on, got 0\.8\.5"),
    (("llama-server -m gone.gguf -c 8192",), "gone.gguf is not on this machine"),
    ((RIGHT, "--model", '{"model_type": "gpt2"}'), "GPT2Config .* has no rotary position embedding"),
    ((RIGHT.replace("4.0", '"four"'), "--model", "MODEL"), r"rope_parameters\.factor must be a number .*, got 'four'"),
    ((RIGHT.replace(YARN, "4"), "--model", "MODEL"), "rope_parameters must be an object, got 4. Write {} around"),
    ((RIGHT.replace("131072,", '"long",'), "--model", "MODEL"), "max_position_embeddings .*'long'"),
    ((RIGHT.replace(YARN, f'{{"full_attention": {YARN}}}'), "--model", "MODEL"), "has one table for all layers"),
    ((RIGHT.replace('"yarn"', '"yarm"'), "--model", "MODEL"), "unsupported rope_type 'yarm'"),
])  # fmt: skip
def test_bad_input_gives_one_clear_error(arguments: tuple[str, ...], says: str, model: Path) -> None:
    run = lint(*(str(model) if argument == "MODEL" else argument for argument in arguments))
    assert run.exit_code == 1
    assert re.search(says, str(run.exception)), run.exception
    assert run.stdout == ""


def test_nothing_is_called_right_that_was_not_read(model: Path) -> None:
    run = lint("vllm serve a/b $MORE", "--model", model)
    assert run.exit_code == 0
    assert "Nothing is wrong" not in run.stdout
    assert "$MORE was not read" in run.stdout


def test_a_folder_is_its_config(model: Path) -> None:
    assert lint(model.parent, "--engine", "vllm").exit_code == 0
