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
    ("vllm serve --enforce-eager owner/name --max-model-len 4k", "vllm", "owner/name", 4000),
    ("vllm serve --no_enable_prefix_caching -ep --enable-lora owner/name", "vllm", "owner/name", None),
    ("vllm serve --seed 1 owner/name --disable-access-log-for-endpoints /health", "vllm", "owner/name", None),
    ("sglang serve owner/name --context-length 128Ki", "sglang", "owner/name", 131072),
    ("docker pull vllm/vllm-openai; docker run vllm/vllm-openai --model a/b", "vllm", "a/b", None),
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


@pytest.mark.parametrize("end", [
    "\n", ";", " ; ", "&", " &\n", "&&", " || ", "|", " # a comment; it's long\n", " 2>&1 | tee log\n", " > log\n",
    " &>log\n",
])  # fmt: skip
def test_a_later_command_gives_the_server_no_options(end: str) -> None:
    line = f"cd a && A=1 python x.py; export B='2;3'\nvllm serve a/b --port 80 --max-model-len 32768{end}"
    command = parse_command(f"{line}python bench.py --model c/d --max-model-len 9 -e C=1")
    assert command == parse_command("B='2;3' vllm serve a/b --port 80 --max-model-len 32768")
    assert command.options == {"--port": "80", "--max-model-len": "32768"}


def test_marks_of_the_shell_within_quotes_are_part_of_the_word() -> None:
    command = parse_command("""vllm serve a\\;b --chat-template 'a & b; # c
d' --hf-overrides "{\\"a\\": \\"|\\"\\\n}" --port 80""")
    assert command.model == "a;b"
    assert command.options["--chat-template"] == "a & b; # c\nd"
    assert command.overrides == {"a": "|"}
    assert command.options["--port"] == "80"


def test_the_tag_of_an_image_states_the_version() -> None:
    for tag, version in ((":v0.29.0", "0.29.0"), (":v0.10.2-x86_64", "0.10.2"), (":latest", None), ("", None)):
        assert parse_command(f"docker run vllm/vllm-openai{tag} --model a/b").version == version
    line = "docker run --gpus all lmsysorg/sglang:v0.5.17-cu129 python3 -m sglang.launch_server --model-path a/b"
    assert parse_command(line).version == "0.5.17"


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
    ("vllm serve a/b --max-model-len 1.5K", "1.5K is rejected by vllm: .* k, m, g, K, .* Write it as 1536"),
    ("sglang serve a/b --context-length 128K", "128K is rejected by sglang: .* k, M, G, Ki, .* Write it as 131072"),
    ("llama-server -m a.gguf -c 128k", "llama.cpp reads --ctx-size 128k as 128 tokens. Write it as 131072."),
    ("vllm serve a/b\n  --max-model-len 9", r"the line before '--max-model-len 9' does not end in \\, so the server"),
    ("vllm serve a/b &\nvllm serve c/d", "starts more than one server. Pass the command line of one"),
    ("docker pull vllm/vllm-openai:v0.30.0", "no server found"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_command(line)


def test_an_option_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("--rope-scale must be a number, got 'four'")):
        parse_command("llama-server -m a.gguf --rope-scale four").number("--rope-scale")
    assert parse_overrides('{"a": 1}', "LINE") == {"a": 1}
