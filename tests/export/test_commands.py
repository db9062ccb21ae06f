"""Command lines as they are pasted: from a shell, a script, Docker or a model card."""

from __future__ import annotations

import re
from pathlib import Path

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
    with pytest.raises(ValueError, match=re.escape("--rope-scale must be a number from 1 to 1,000,000, got 'four'")):
        parse_command("llama-server -m a.gguf --rope-scale four").number("--rope-scale")
    assert parse_overrides('{"a": 1}', "LINE") == {"a": 1}


JSON = '{"a": 1}'


@pytest.mark.parametrize(("line", "length", "says"), [
    (f"vllm serve a/b --hf-overides '{JSON}'", None, "is not an option of vLLM; did you mean --hf-overrides?"),
    ("vllm serve a/b --max-model-length 9", 9, "did you mean --max-model-len?"),
    ("vllm serve a/b --context-length 9", 9, "--context-length is not an option of vLLM: write --max-model-len"),
    ("vllm serve a/b --rope-scale 4", None, "write rope_parameters in --hf-overrides"),
    ("vllm serve a/b --max 9", None, "--max is ambiguous"),
    ("vllm serve a/b 9 --port 80", None, "'9' belongs to no option"),
    ("vllm serve a/b --max-model-len 1 072", 1, "'072' belongs to no option"),
    ("vllm serve a/b —max-model-len 9", 9, "begins with a typographic dash: write --max-model-len."),
    ("vllm serve a/b\u00a0--max-model-len 9", 9, "a no-break space: write a plain space"),
    ("llama-server -m a.gguf –c 9", 9, "–c begins with a typographic dash: write -c."),
    ("docker run vllm/vllm-openai vllm serve a/b --max-model-len 9", 9, "starts vllm serve by itself: leave vllm"),
    ("llama-server -m a.gguf -c9", 9, "-c9 is rejected by llama-server: write -c 9."),
    ("llama-server -m a.gguf --ctx-size=9", 9, "write --ctx-size 9."),
    ("sglang serve a/b --context_length 9", 9, "did you mean --context-length?"),
    ("sglang serve a/b --rope-scaling yarn", None, "write rope_parameters in --json-model-override-args"),
    (f"vllm serve a/b --hf-overrides '{JSON}' --hf-overrides.b.c 1", None, "replaces the whole of --hf-overrides"),
])  # fmt: skip
def test_what_the_engines_parser_rejects_is_a_mistake_and_read_as_meant(
    line: str, length: int | None, says: str
) -> None:
    command = parse_command(line)
    assert says in " ".join(command.mistakes)
    assert command.length == length


@pytest.mark.parametrize(("line", "length"), [
    ("vllm serve a/b --max-model 9", 9),
    ("vllm serve a/b --max_model_len 9", 9),
    ("sglang serve a/b --context-len 9 --json-model-override '{}'", 9),
    ("llama-server -m a.gguf --ctx_size 9", 9),
    ("LLAMA_ARG_CTX_SIZE=9 llama-server -m a.gguf", 9),
    ("LLAMA_ARG_CTX_SIZE=9 llama-server -m a.gguf -c 8", 8),
    ("vllm serve a/b --lora-modules c=d e=f --request-static-yarn-factors 1 2 4 --max-model-len 9", 9),
    ("vllm serve a/b --max-log-len 9 --hf-token x --gpu-memory-utilization .9", None),
    ("N=9; vllm serve a/b --max-model-len $N", 9),
    ("vllm serve a/b --max-model-len ${N:-9} --port $PORT", 9),
    ("MORE='--max-model-len 9'\nvllm serve a/b $MORE", 9),
    ("docker run --entrypoint bash vllm/vllm-openai -c 'vllm serve a/b --max-model-len 9'", 9),
    ("docker run --entrypoint vllm vllm/vllm-openai serve a/b --max-model-len 9", 9),
    ("docker run vllm/vllm-openai-rocm:v0.31.0 a/b --max-model-len 9", 9),
    ("python -m vllm.entrypoints.cli.main serve a/b --max-model-len 9", 9),
    ("vllm serve a/b ^\n  --max-model-len 9", 9),
    ("vllm serve a/b `\n  --max-model-len 9", 9),
    ("\ufeffvllm serve a/b --max-model-len 9", 9),
    ("(cd x; vllm serve a/b --max-model-len 9)", 9),
])  # fmt: skip
def test_what_the_engines_parser_accepts_is_no_mistake(line: str, length: int | None) -> None:
    command = parse_command(line)
    assert (command.length, command.mistakes, command.unread) == (length, (), ())


@pytest.mark.parametrize("words", ["$MORE", '"${MORE[@]}"', "$(cat options)", "`cat options`", "--config gone.yaml"])
def test_what_only_the_shell_or_another_file_holds_is_named(words: str) -> None:
    (unread,) = parse_command(f"vllm serve a/b {words} --port 80").unread
    assert words.strip('"') in unread


def test_a_model_that_only_the_shell_knows_is_none() -> None:
    command = parse_command("vllm serve $MODEL --max-model-len 9")
    assert (command.model, command.unread) == (None, ())


@pytest.mark.parametrize("engine", ["vllm serve a/b", "sglang serve a/b"])
def test_the_options_in_a_yaml_file_come_before_those_of_the_line(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    overrides = "hf_overrides" if engine.startswith("vllm") else "json-model-override-args"
    value = "{a: {b: 1}}" if engine.startswith("vllm") else '\'{"a": {"b": 1}}\''
    length = "max-model-len" if engine.startswith("vllm") else "context-length"
    file.write_text(f"{overrides}: {value}\n{length}: 9\nenable-metrics: true\n")
    command = parse_command(f"{engine} --config {file}")
    assert (command.length, command.overrides, command.unread) == (9, {"a": {"b": 1}}, ())
    assert parse_command(f"{engine} --config {file} --{length} 8").length == 8
    assert parse_command(f"{engine} --{length} 8 --config {file}").length == 8


COMPOSE = """
services:
  model:
    image: vllm/vllm-openai:v0.30.0
    environment: [VLLM_ALLOW_LONG_MAX_MODEL_LEN=1]
    command: COMMAND
"""
KUBERNETES = """
spec:
  containers:
    - name: model
      image: vllm/vllm-openai:v0.30.0
      env: [{name: VLLM_ALLOW_LONG_MAX_MODEL_LEN, value: "1"}]
      COMMAND
"""


@pytest.mark.parametrize(("file", "words"), [
    (COMPOSE, "--model a/b --max-model-len 9 --hf-overrides '{\"a\":1}'"),
    (COMPOSE, '["--model", "a/b", "--max-model-len", "9", "--hf-overrides", \'{"a": 1}\']'),
    (COMPOSE, ">\n      --model a/b\n      --max-model-len 9 --hf-overrides '{\"a\": 1}'"),
    (KUBERNETES, 'command: [vllm, serve, a/b, --max-model-len, "9", --hf-overrides, \'{"a": 1}\']'),
    (KUBERNETES, 'args: [a/b, --max-model-len, "9", --hf-overrides, \'{"a": 1}\']'),
    (KUBERNETES, "command: [/bin/sh, -c]\n      args:\n      - vllm serve a/b --max-model-len 9 --hf-overrides.a 1"),
])  # fmt: skip
def test_a_container_of_compose_or_kubernetes_is_read(file: str, words: str) -> None:
    command = parse_command(file.replace("COMMAND", words))
    assert (command.engine, command.model, command.length, command.version) == ("vllm", "a/b", 9, "0.30.0")
    assert (command.overrides, command.mistakes, command.unread) == ({"a": 1}, (), ())
    assert command.environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"


@pytest.mark.parametrize(("option", "says"), [
    ("--rope-scale -4", "--rope-scale must be a number from 1 to 1,000,000, got '-4'"),
    ("--rope-scale nan", "--rope-scale must be a number"),
    ("--rope-freq-scale -1", "--rope-freq-scale must be a number from 0 to 1"),
    ("--rope-freq-base -1", "--rope-freq-base must be 0 or a number above 1, got '-1'"),
    ("--yarn-orig-ctx -1", "--yarn-orig-ctx must be a whole number"),
    ("--yarn-beta-fast -5", "--yarn-beta-fast must be a number from 0, or -1, got '-5'"),
    ("--rope-scaling foo", "--rope-scaling of llama-server must be none, linear or yarn, got 'foo'"),
    ("-c $N", r"-c is \$N, which only the shell knows. Write its value"),
])  # fmt: skip
def test_a_number_is_checked_by_the_name_of_its_flag(option: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("-c is", "--ctx-size is")):
        parse_command(f"llama-server -m a.gguf {option}")


@pytest.mark.parametrize(("value", "remedy"), [
    ("{a:1}", "The shell removed its quotes"), ("yarn", "Write it as "), ("{'a': 1}", "JSON has double quotes"),
    ("{“a”: 1}", "Write \" for “ and ”"), ('{"a": 1,}', "Correct it"),
])  # fmt: skip
def test_the_remedy_for_invalid_json_fits_its_mistake(value: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        parse_overrides(value, "--hf-overrides")


@pytest.mark.parametrize(("file", "variable"), [
    ('FROM vllm/vllm-openai:v0.30.0\nENV A=1\nCMD ["--model", "a/b", "--max-model-len", "9"]\n', "A"),
    ('FROM ubuntu\nENTRYPOINT ["vllm", "serve"]\nENV A 1\nCMD ["a/b", "--max-model-len", "9"]\n', "A"),
    ("FROM ubuntu\nENV A=1\nCMD vllm serve a/b \\\n  --max-model-len 9\n", "A"),
    ("[Service]\nExecStart=/opt/bin/vllm serve a/b \\\n  --max-model-len 9\nEnvironment=A=1\nRestart=always\n", "A"),
    ("[Service]\nEnvironment=\"A=1\" B=2\nExecStart=-/opt/bin/vllm serve a/b --max-model-len 9\n", "A"),
])  # fmt: skip
def test_a_dockerfile_or_a_systemd_unit_is_read(file: str, variable: str) -> None:
    command = parse_command(file)
    assert (command.engine, command.model, command.length) == ("vllm", "a/b", 9)
    assert (command.environment[variable], command.mistakes, command.unread) == ("1", (), ())


@pytest.mark.parametrize("step", ["5", '"a"', '{"a": 1}', "[5]", "[", ""])
def test_a_dockerfile_without_a_server_is_refused(step: str) -> None:
    with pytest.raises(ValueError, match="no server found"):
        parse_command(f"FROM ubuntu\nCMD {step}\n")


def test_an_image_that_starts_the_server_takes_a_shell_for_the_model() -> None:
    file = 'services:\n  a:\n    image: vllm/vllm-openai:v0.30.0\n    command: ["bash", "-c", "vllm serve a/b"]\n'
    command = parse_command(file)
    assert (command.model, command.version) == ("a/b", "0.30.0")
    assert command.mistakes == ("the image starts vllm serve bash: set the entry point to a shell.",)


@pytest.mark.parametrize("key", ["command: 5", "entrypoint: true", "environment: 5"])
def test_a_container_with_a_value_of_another_kind_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"must be a (string or a )?list"):
        parse_command(f"services:\n  a:\n    image: vllm/vllm-openai:v0.30.0\n    {key}\n")


def test_keys_of_a_file_are_put_together() -> None:
    line = "llama-server -m a.gguf --override-kv a.x=int:1,a.y=str:z --override-kv a.x=float:2"
    assert parse_command(line).keys == (("a.x", "int", "1"), ("a.y", "str", "z"), ("a.x", "float", "2"))
    assert "a.x:1 is rejected by llama-server" in parse_command("llama-server --override-kv a.x:1").mistakes[0]


@pytest.mark.parametrize("line", ["llama-completion -m a.gguf -gan 4 -gaw 512", "llama-server -m a.gguf -gan 4"])
def test_group_attention_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="group attention"):
        parse_command(line)
