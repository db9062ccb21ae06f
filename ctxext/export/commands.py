"""Read a server's command line: engine, model, overrides of the config, length, other options and environment."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxext.utils.values import shown

SERVERS = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server", "llama.cpp": "llama-server"}
_OVERRIDES = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
_LENGTH = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "--ctx-size"}
_MODEL = {"vllm": ("--model",), "sglang": ("--model-path", "--model"), "llama.cpp": ("--model", "--hf-repo")}
_SAME = {
    "-c": "--ctx-size",
    "-m": "--model",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
    "--hf-override": "--hf-overrides",
}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_K, _KI = 10**3, 2**10
_UNITS = {  # human_readable_int in the wheels of vLLM 0.12.0 and 0.32.0, and of SGLang 0.5.10 and 0.5.23
    "vllm": {"k": _K, "m": _K**2, "g": _K**3, "K": _KI, "M": _KI**2, "G": _KI**3},
    "sglang": {"k": _K, "M": _K**2, "G": _K**3, "Ki": _KI, "Mi": _KI**2, "Gi": _KI**3},
    "llama.cpp": {},  # std::stoi reads the digits and drops the rest
}  # fmt: skip
# vLLM's options without a value (the parsers of 0.20.0 to 0.32.0), except those that begin with one of _SWITCH.
_SWITCH = ("--enable-", "--disable-", "--no-")
_SWITCHES = """
    --aggregate-engine-logging --allow-credentials --allow-deprecated-quantization --async-scheduling
    --calculate-kv-scales --cohere-is-reasoning-model --cudagraph-metrics --data-parallel-external-lb
    --data-parallel-hybrid-lb --data-parallel-multi-port-external-lb --dcp-q-replicate --enforce-eager
    --exclude-tools-when-tool-choice-none --fail-on-environ-validation --fully-sharded-loras --grpc --headless --help
    --interleave-mm-strings --jit-monitor-verbose --kv-cache-metrics --kv-sharing-fast-prefill --language-model-only
    --log-error-stack --long-prefill-token-threshold-adaptive --mm-device-do-normalize --mm-encoder-only --numa-bind
    --ray-workers-use-nsight --return-sampling-mask --return-tokens-as-token-ids --scheduler-reserve-full-isl
    --skip-mm-profiling --skip-tokenizer-init --sleep-mode-offload-cudagraph --specialize-active-lora
    --swa-bounded-replay --tokens-only --trust-remote-code --trust-request-chat-template --trust-request-mm-kwargs
    --use-fp64-gumbel --use-replayssm --use-tqdm-on-load -dpe -dph -dpm -ep -h"""
_VALUED = ("--disable-access-log-for-endpoints",)
# The parts of a script that are more than words: quotes, escapes, comments, redirections and ends of commands.
_SHELL = re.compile(
    r"""(?P<continued>\\[^\S\n]*\n)|(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<redirect>(?<!\S)(?:\d+|&)?>[>&|]?\s*[^\s;&|]+)|(?P<end>[;&|\n]+)""",
    re.DOTALL | re.VERBOSE,
)
_IMAGE = re.compile(r"(?:^|/)(?:vllm-openai|sglang)[\w.-]*:v?(\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Command:
    """How a server is started.

    Attributes:
        engine: "vllm", "sglang" or "llama.cpp".
        model: as the line names it; None if it does not.
        overrides: what is to replace keys of the config; empty for llama.cpp.
        length: the maximum length asked for, in tokens; None if the line sets none.
        options: every option with its value ("" for a switch), by its long name.
        environment: the variables set for it.
        version: of the engine, if the tag of a Docker image states it; None otherwise.
    """

    engine: str
    model: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    version: str | None = None

    def number(self, option: str) -> float | None:
        """The value of a numeric option. Raises ValueError if it is none."""
        return None if option not in self.options else _number(self.options[option], option)


def parse_command(line: str | Sequence[str]) -> Command:
    """Read a command line, or a short script with one server in it.

    Raises:
        ValueError: no known server, unbalanced quotes, a line without its backslash, invalid JSON or an invalid length.
    """
    exported: dict[str, str] = {}
    commands = _commands(line) if isinstance(line, str) else [list(line)]
    for number, words in enumerate(commands):
        environment, version = dict(exported), None
        for at, word in enumerate(words):
            version = found[1] if (found := _IMAGE.search(word)) else version
            engine, skip = _server(words, at)
            if engine is not None:
                _check_rest(commands[number + 1 :])
                return _command(engine, words[at + skip :], environment, version)
            if assigned := _ASSIGNED.fullmatch(word.removeprefix("--env=")):
                environment[assigned[1]] = assigned[2]
        if all(_ASSIGNED.fullmatch(word) or word == "export" for word in words):
            exported = environment
    words = [word for each in commands for word in each]
    raise ValueError(
        f"no server found in {shown(' '.join(words))}. Known: {', '.join(SERVERS.values())}, and the image "
        "vllm/vllm-openai."
    )


def parse_overrides(text: str, option: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError, with the place of the mistake, if there is none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        remedy = "Correct it" if '"' in text else "The shell removed its quotes: write it in single quotes"
        raise ValueError(
            f"{option} is not valid JSON: {error.msg} at character {error.pos + 1}, near {near!r}. {remedy}."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f'{option} must be a JSON object, got {shown(found)}. Write it as {{"key": value}}.')
    return found


def _commands(script: str) -> list[list[str]]:
    """The words of each command of a shell script, without comments and redirections."""

    def marked(found: re.Match[str]) -> str:
        if found["quoted"]:
            return re.sub(r"\\\n", "", found[0]) if found[0].startswith('"') else found[0]
        return "\0" if found["end"] else " "

    try:
        commands = [shlex.split(command) for command in _SHELL.sub(marked, script).split("\0")]
    except ValueError as error:
        raise ValueError(f"the command line has unbalanced quotes ({error}). Close every ' and \".") from error
    return [words for words in commands if words]


def _check_rest(commands: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if what follows the server's command is another server, or an option that it lacks."""
    if commands and commands[0][0].startswith("-"):
        option = " ".join(commands[0])
        raise ValueError(
            f"the line before {shown(option)} does not end in \\, so the server starts without it. Add the \\."
        )
    if any(_server(words, at)[0] for words in commands for at in range(len(words))):
        raise ValueError("LINE starts more than one server. Pass the command line of one.")


def _server(words: Sequence[str], at: int) -> tuple[str | None, int]:
    """The engine that starts at this word, and how many words name it. A pulled image starts none."""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    name = word.rpartition("/")[2]
    if name == "vllm" and following == "serve":
        return "vllm", 2
    if word == "vllm.entrypoints.openai.api_server":
        return "vllm", 1
    if re.search(r"(^|/)vllm-openai(:|@|$)", word) and not {"run", "create"}.isdisjoint(words[:at]):
        return "vllm", 1
    if word == "sglang.launch_server":
        return "sglang", 1
    if name == "sglang" and following == "serve":
        return "sglang", 2
    if re.search(r"(^|[/\\.])llama-(server|cli|completion|perplexity)(\.exe)?$", word):
        return "llama.cpp", 1
    if "llama.cpp:server" in word and not {"run", "create"}.isdisjoint(words[:at]):
        return "llama.cpp", 1
    return None, 0


def _command(engine: str, words: Sequence[str], environment: Mapping[str, str], version: str | None) -> Command:
    options, positional = _options(engine, words)
    overrides: dict[str, Any] = {}
    if (name := _OVERRIDES.get(engine)) is not None:
        if name in options:
            overrides = parse_overrides(options[name], name)
        for option, value in options.items():
            if option.startswith(f"{name}."):  # vLLM's dotted form
                _put(overrides, option.removeprefix(f"{name}.").split("."), value)
    model = next((options[each] for each in _MODEL[engine] if each in options), None)
    if model is None and positional and (engine == "vllm" or (engine == "sglang" and positional[0] == words[0])):
        model = positional[0]
    asked = options.get(_LENGTH[engine])
    length = None if asked is None or asked in ("-1", "auto") else _length(engine, asked)
    return Command(engine, model, overrides, length or None, options, dict(environment), version)


def _options(engine: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    positional = []
    name = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            if engine == "vllm" and name.startswith("--"):
                head, dot, rest = name.partition(".")
                name = head.replace("_", "-") + dot + rest
            name = _SAME.get(name, name)
            options[name] = value
            if equals or (engine == "vllm" and _is_switch(name)):
                name = None
        elif name is not None:
            options[name] = word
            name = None
        else:
            positional.append(word)
    return options, positional


def _is_switch(option: str) -> bool:
    return option in _SWITCHES.split() or (option.startswith(_SWITCH) and option not in _VALUED)


def _put(overrides: dict[str, Any], path: Sequence[str], value: str) -> None:
    for name in path[:-1]:
        overrides = overrides.setdefault(name, {})
    try:
        overrides[path[-1]] = json.loads(value)
    except ValueError:
        overrides[path[-1]] = value


def _length(engine: str, text: str) -> int:
    """A number of tokens as the engine reads it. Raises ValueError if it rejects it or drops its unit."""
    option, units = _LENGTH[engine], _UNITS[engine]
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]i?)?", text)) is None:
        raise ValueError(f"{option} must be a number of tokens, got {text!r}. Write it as 131072.")
    number, unit = found.groups()
    if unit is None and number.isdecimal():
        return int(number)
    meant = int(float(number) * (1 if unit is None else _KI ** ("kmg".index(unit[0].lower()) + 1)))
    if unit in units and ("." not in number or units[unit] % 10 == 0):
        return int(float(number) * units[unit])
    if engine == "llama.cpp":
        raise ValueError(f"llama.cpp reads {option} {text} as {int(float(number))} tokens. Write it as {meant}.")
    raise ValueError(
        f"{option} {text} is rejected by {engine}: it takes whole numbers, and {', '.join(units)}. Write it as {meant}."
    )


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{option} must be a number, got {text!r}. Correct it.") from error
