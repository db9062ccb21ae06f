"""Command lines as they are pasted: from a shell, a script, Docker or a model card."""

from __future__ import annotations

import re

import pytest

from ctxext.export.commands import parse_command, parse_overrides


@pytest.mark.parametrize(("line", "engine", "model", "length"), [
    ("vllm serve owner/name --max-model-len 131072", "vllm", "owner/name", 131072),
    ("/opt/venv/bin/vllm serve owner/name --max_model_len=128K -tp 4 &", "vllm", "owner/name", 131072),
    ("python -m vllm.entrypoints.openai.api_server --model a/b --max-model-len 32k", "vllm", "a/b", 32000),
    ("docker run --gpus all -p 80:80 vllm/vllm-openai:v0.30.0 --model owner/name", "vllm", "owner/name", None),
    ("docker run vllm/vllm-openai owner/name --max-model-len -1", "vllm", "owner/name", None),
    ("python3 -m sglang.launch_server --model-path owner/name --context-length 65536", "sglang", "owner/name", 65536),
    ("./build/bin/llama-server -m a.gguf -c 65536 -ngl 99", "llama.cpp", "a.gguf", 65536),
    ("llama-server -hf owner/name:Q4_K_M -c 0", "llama.cpp", "owner/name:Q4_K_M", None),
    ("docker run ghcr.io/ggml-org/llama.cpp:server -m /a.gguf --ctx-size 512", "llama.cpp", "/a.gguf", 512),
])  # fmt: skip
def test_a_server_its_model_and_its_length_are_found(line: str, engine: str, model: str, length: int | None) -> None:
    command = parse_command(line)
    assert (command.engine, command.model, command.length) == (engine, model, length)


def test_a_script_is_read_with_its_comments_line_breaks_and_variables() -> None:
    command = parse_command("""#!/bin/bash
        # vllm serve old --max-model-len 1
        export VLLM_ALLOW_LONG_MAX_MODEL_LEN=1
        docker run -e A=b --env=C=d vllm/vllm-openai:latest \\
          --model owner/name --enable-prefix-caching \\
          --hf-overrides '{"rope_parameters": {"factor": 4.0}}' > log.txt
    """)
    assert command.environment == {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "A": "b", "C": "d"}
    assert command.overrides == {"rope_parameters": {"factor": 4.0}}
    assert command.options["--enable-prefix-caching"] == ""


def test_dotted_overrides_of_vllm_are_put_together() -> None:
    command = parse_command(
        "vllm serve owner/name --hf-overrides.rope_parameters.rope_type yarn --hf-overrides.rope_parameters.factor=4.0"
    )
    assert command.overrides == {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(("line", "says"), [
    ("ollama run qwen3", "no server found in 'ollama run qwen3'. Known: vllm serve, python -m sglang.launch_server"),
    ("vllm serve owner/name --hf-overrides '{\"a\": 1", "unbalanced quotes"),
    ("vllm serve owner/name --hf-overrides '{\"a\": 1,}'", "--hf-overrides is not valid JSON: .* at character .*1,}"),
    ('vllm serve owner/name --hf-overrides {"a":1}', "The shell removed its quotes: write it in single quotes"),
    ("vllm serve owner/name --hf-overrides [1]", r"must be a JSON object, got \[1\]"),
    ("vllm serve owner/name --max-model-len many", "--max-model-len must be a number of tokens, got 'many'"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_command(line)


def test_an_option_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("--rope-scale must be a number, got 'four'")):
        parse_command("llama-server -m a.gguf --rope-scale four").number("--rope-scale")
    assert parse_overrides('{"a": 1}', "LINE") == {"a": 1}
