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
# vLLM's human_readable_int: a lower-case unit is decimal.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


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
    """

    engine: str
    model: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def number(self, option: str) -> float | None:
        """The value of a numeric option. Raises ValueError if it is none."""
        return None if option not in self.options else _number(self.options[option], option)


def parse_command(line: str | Sequence[str]) -> Command:
    """Read a command line, or a short script with one server in it.

    Raises:
        ValueError: no known server, unbalanced quotes, invalid JSON or an invalid length.
    """
    words = _words(line) if isinstance(line, str) else list(line)
    environment: dict[str, str] = {}
    for at, word in enumerate(words):
        engine, skip = _server(words, at)
        if engine is not None:
            return _command(engine, words[at + skip :], environment)
        if assigned := _ASSIGNED.fullmatch(word.removeprefix("--env=")):
            environment[assigned[1]] = assigned[2]
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


def _words(line: str) -> list[str]:
    """The words of a shell line, without comments and line breaks."""
    try:
        return shlex.split(re.sub(r"\\\s*\n", " ", line), comments=True)
    except ValueError as error:
        raise ValueError(f"the command line has unbalanced quotes ({error}). Close every ' and \".") from error


def _server(words: Sequence[str], at: int) -> tuple[str | None, int]:
    """The engine that starts at this word, and how many words name it."""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    name = word.rpartition("/")[2]
    if name == "vllm" and following == "serve":
        return "vllm", 2
    if word == "vllm.entrypoints.openai.api_server" or re.search(r"(^|/)vllm-openai(:|@|$)", word):
        return "vllm", 1
    if word == "sglang.launch_server":
        return "sglang", 1
    if name == "sglang" and following == "serve":
        return "sglang", 2
    if re.search(r"(^|[/\\.])llama-(server|cli|completion|perplexity)(\.exe)?$|llama\.cpp:server", word):
        return "llama.cpp", 1
    return None, 0


def _command(engine: str, words: Sequence[str], environment: Mapping[str, str]) -> Command:
    options, positional = _options(engine, words)
    overrides: dict[str, Any] = {}
    if (name := _OVERRIDES.get(engine)) is not None:
        if name in options:
            overrides = parse_overrides(options[name], name)
        for option, value in options.items():
            if option.startswith(f"{name}."):  # vLLM's dotted form
                _put(overrides, option.removeprefix(f"{name}.").split("."), value)
    model = next((options[each] for each in _MODEL[engine] if each in options), None)
    if model is None and engine == "vllm" and positional:
        model = positional[0]
    asked = options.get(_LENGTH[engine])
    length = None if asked is None or asked in ("-1", "auto") else _length(asked, _LENGTH[engine])
    return Command(engine, model, overrides, length or None, options, dict(environment))


def _options(engine: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    positional = []
    name = None
    for word in words:
        if word in ("&", "&&", "|", "||", ";") or word.startswith((">", "2>", "&>")):
            break
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            if engine == "vllm" and name.startswith("--"):
                head, dot, rest = name.partition(".")
                name = head.replace("_", "-") + dot + rest
            name = _SAME.get(name, name)
            options[name] = value
            if equals:
                name = None
        elif name is not None:
            options[name] = word
            name = None
        else:
            positional.append(word)
    return options, positional


def _put(overrides: dict[str, Any], path: Sequence[str], value: str) -> None:
    for name in path[:-1]:
        overrides = overrides.setdefault(name, {})
    try:
        overrides[path[-1]] = json.loads(value)
    except ValueError:
        overrides[path[-1]] = value


def _length(text: str, option: str) -> int:
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)) is None:
        raise ValueError(f"{option} must be a number of tokens, got {text!r}. Write it as 131072.")
    return int(float(found[1]) * _UNITS[found[2]])


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{option} must be a number, got {text!r}. Correct it.") from error
