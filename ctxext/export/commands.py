"""Read a server's command line: engine, model, overrides of the config, length, other options and environment."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ctxext.utils.json_files import FACTOR, Kind
from ctxext.utils.values import MAX_TOKENS, is_count, is_number, shown

SERVERS = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server", "llama.cpp": "llama-server"}
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama-server"}
_OVERRIDES = {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}
LENGTH_OPTIONS = {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "--ctx-size"}
_MODEL = {"vllm": ("--model",), "sglang": ("--model-path", "--model"), "llama.cpp": ("--model", "--hf-repo")}
_UNSET = -1.0  # llama.cpp: what the file holds
_OR_UNSET = Kind("a number from 0, or -1", lambda value: value == _UNSET or is_number(value, low=0, high=1e6))
_NUMBERS = {
    "--rope-scale": FACTOR,
    "--rope-freq-scale": Kind("a number from 0 to 1", partial(is_number, low=0, high=1)),
    "--rope-freq-base": Kind("0 or a number above 1", lambda value: value == 0 or is_number(value, 1 + 1e-6, 1e30)),
    "--yarn-orig-ctx": Kind(f"a whole number from 0 to {MAX_TOKENS}", partial(is_count, low=0, high=MAX_TOKENS)),
    "--yarn-ext-factor": _OR_UNSET,
    "--yarn-attn-factor": _OR_UNSET,
    "--yarn-beta-slow": _OR_UNSET,
    "--yarn-beta-fast": _OR_UNSET,
    "--rope-theta": Kind("a number above 1", partial(is_number, low=1 + 1e-6, high=1e30)),
}
# The options that are read, and others like them, which are neither typing errors nor abbreviations.
_READ = {
    "vllm": ("--model", "--max-model-len", "--hf-overrides", "--config", "--rope-scaling", "--rope-theta"),
    "sglang": ("--model-path", "--model", "--context-length", "--json-model-override-args", "--config"),
    "llama.cpp": ("--model", "--hf-repo", "--ctx-size", "--override-kv", "--rope-scaling", *list(_NUMBERS)[:-1]),
}
_BESIDE = {
    "vllm": """--model-impl --model-loader-extra-config --max-log-len --max-logprobs --max-loras --max-lora-rank
        --max-num-seqs --max-num-batched-tokens --max-num-partial-prefills --max-parallel-loading-workers
        --max-cpu-loras --max-long-partial-prefills --config-format --hf-token --hf-config-path""",
    "sglang": "--model-impl --model-loader-extra-config --model-checksum",
    "llama.cpp": """--model-url --model-draft --model-vocoder --hf-file --hf-token --hf-repo-draft --hf-repo-v
        --hf-file-v --ctx-size-draft --override-tensor""",
}
_SHORT = {  # llama.cpp's
    "-c": "--ctx-size", "-m": "--model", "-hf": "--hf-repo", "-hfr": "--hf-repo", "-gan": "--grp-attn-n",
    "-gaw": "--grp-attn-w",
}  # fmt: skip
# Programs of llama.cpp that warn of a context beyond the file's, which the server and llama-cli cap.
_UNCAPPED = ("llama-completion", "llama-perplexity")
# What people write for the same purpose, besides the options of other engines.
_PURPOSES = (
    (LENGTH_OPTIONS, ("--max-context-length", "--max-context-len", "--max-seq-len", "--n-ctx")),
    (_OVERRIDES, ("--model-override-args", "--override-args", "--hf-config-overrides")),
)
_ASSIGNED = re.compile(r"(?:--env=|-e(?=\w+=))?([A-Za-z_]\w*)=(.*)", re.DOTALL)
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
# What the shell replaces, and with it the parts of a script that are more than words: quotes, escapes, comments,
# redirections and ends of commands. A line continues after \, in Windows after ^ or `.
_EXPANSION = r"\$\([^()]*\)|\$\{[^}]*\}|\$\w+|\$[@*]|`[^`\n]+`"
_SHELL = re.compile(
    rf"""(?P<continued>\\[^\S\n]*\n|(?<=\s)[\^`][^\S\n]*\n)|(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)
    |(?P<expansion>{_EXPANSION})|(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<redirect>(?<!\S)(?:\d+|&)?>[>&|]?\s*[^\s;&|]+)|(?P<end>[;&|\n()]+)
    |(?P<dash>(?<!\S)-?[\u2010-\u2015\u2212]-?(?=\w))|(?P<typeset>[\u00a0\u202f“”‘’])""",
    re.DOTALL | re.VERBOSE,
)
_ASCII = {"“": '"', "”": '"', "‘": "'", "’": "'"}
_BARE, _QUOTED, _END = "\1", "\2", "\3"  # around what the shell replaces, outside and inside double quotes
_IMAGE = re.compile(r"(?:^|/)(?:vllm-openai|sglang)[\w.-]*:v?(\d+(?:\.\d+)+)")
_KEY = re.compile(r"([^=]{1,127})=(int|float|bool|str):(.*)")  # string_parse_kv_override of llama.cpp
_SHELLS = ("bash", "sh", "zsh", "dash")


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
        program: of llama.cpp, if it is not its server: llama-completion or llama-perplexity; None otherwise.
        version: of the engine, if the tag of a Docker image states it; None otherwise.
        mistakes: what the engine's parser rejects or drops, a sentence each; the fields above hold what was meant.
        unread: what could not be read, a sentence each.
    """

    engine: str
    model: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    length: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    program: str | None = None
    version: str | None = None
    mistakes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[str, ...]:
        """The options that were read, except the model's."""
        names = dict.fromkeys(name.partition(".")[0] for name in self.options)
        return tuple(name for name in names if name in _READ[self.engine] and name not in _MODEL[self.engine])

    @property
    def keys(self) -> tuple[tuple[str, str, str], ...]:
        """The keys of --override-kv, as many as are well formed: name, type and value."""
        items = self.options.get("--override-kv", "").split(",")
        return tuple((found[1], found[2], found[3]) for item in items if (found := _KEY.fullmatch(item.strip())))

    def number(self, option: str) -> float | None:
        """The value of a numeric option, None if it is left out. Raises ValueError if it is not valid."""
        if option not in self.options:
            return None
        value = _number(self.options[option], option)
        return None if value == _UNSET else value


def parse_command(line: str | Sequence[str]) -> Command:
    """Read a command line, a short script with one server in it, or a file of Docker Compose or Kubernetes.

    Raises:
        ValueError: no known server, unbalanced quotes, a line without its backslash, invalid JSON or an invalid number.
    """
    typeset = list[str]()
    if not isinstance(line, str):
        commands = [list(line)]
    else:
        line = line.removeprefix("\ufeff")
        commands = _containers(line) or _commands(_unit_or_dockerfile(line), typeset)
    found = _first_server(commands, {})
    if found is None:
        words = " ".join(_plain(word) for each in commands for word in each)
        raise ValueError(
            f"no server found in {shown(words)}. Known: {', '.join(SERVERS.values())}, and the image vllm/vllm-openai."
        )
    return replace(found, mistakes=(*typeset, *found.mistakes))


def parse_overrides(text: str, option: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError, with the place of the mistake, if there is none."""
    if not text:
        raise ValueError(f"{option} has no value. Write a JSON object in single quotes.")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        remedy = "Write it as '{\"key\": value}'"
        if any(mark in text for mark in _ASCII):
            remedy = 'Write " for “ and ”'
        elif '"' in text:
            remedy = "Correct it"
        elif "'" in text:
            remedy = "JSON has double quotes: write \" for '"
        elif text.startswith("{"):
            remedy = "The shell removed its quotes: write it in single quotes"
        raise ValueError(
            f"{option} is not valid JSON: {error.msg} at character {error.pos + 1}, near {near!r}. {remedy}."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f'{option} must be a JSON object, got {shown(found)}. Write it as {{"key": value}}.')
    return found


# -------------------------------------------------------------------------------- from a script to words


def _commands(script: str, typeset: list[str] | None = None) -> list[list[str]]:
    """The words of each command of a shell script, without comments and redirections.

    Args:
        typeset: takes a sentence for each character that a word processor wrote for another.
    """
    expansions, wrong = list[str](), list[str]() if typeset is None else typeset

    def hidden(found: re.Match[str], mark: str = _BARE) -> str:  # from shlex
        expansions.append(found[0])
        return f"{mark}{len(expansions) - 1}{_END}"

    def marked(found: re.Match[str]) -> str:
        if quoted := found["quoted"]:
            if not quoted.startswith('"'):
                return str(quoted)
            return re.sub(rf"(?<!\\)(?:{_EXPANSION})", partial(hidden, mark=_QUOTED), re.sub(r"\\\n", "", quoted))
        if found["expansion"]:
            return hidden(found)
        if dash := found["dash"]:
            plain = "-" if re.match(r"\w(?!\S)", script[found.end() :]) else "--"
            word = re.split(r"\s|=", script[found.end() :], maxsplit=1)[0]
            wrong.append(f"{dash}{word} begins with a typographic dash: write {plain}{word}.")
            return plain
        if mark := found["typeset"]:
            name = "a no-break space" if mark.isspace() else mark
            wrong.append(f"the shell does not read {name}: write {_ASCII.get(mark, 'a plain space')}.")
            return _ASCII.get(mark, " ")
        return "\0" if found["end"] else " "

    try:
        commands = [shlex.split(command) for command in _SHELL.sub(marked, script).split("\0")]
    except ValueError as error:
        raise ValueError(f"the command line has unbalanced quotes ({error}). Close every ' and \".") from error

    def back(found: re.Match[str]) -> str:
        return f"{found[1]}{expansions[int(found[2])]}{_END}"

    return [[re.sub(rf"([{_BARE}{_QUOTED}])(\d+){_END}", back, word) for word in words] for words in commands if words]


def _expanded(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """The words with the values of the variables that the script sets."""

    def value(found: re.Match[str]) -> str:
        name = re.fullmatch(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})", found[1])
        known = None if name is None else variables.get(name[1] or name[2], name[3])
        return found[0] if known is None else known

    for word in words:
        whole = re.sub(rf"[{_BARE}{_QUOTED}]([^{_END}]*){_END}", value, word)
        yield from whole.split() if word.startswith(_BARE) and not _is_open(whole) else (whole,)


def _is_open(word: str) -> bool:
    """Whether a part of the word is left to the shell."""
    return _END in word


def _plain(word: str) -> str:
    return re.sub(rf"[{_BARE}{_QUOTED}{_END}]", "", word)


def _unit_or_dockerfile(text: str) -> str:
    """The script that a systemd unit or a Dockerfile runs; any other text as it is."""
    joined = re.sub(r"\\[^\S\n]*\n", " ", text)
    if starts := re.findall(r"^ExecStart=[-@:+!]*(.+)$", joined, re.MULTILINE):
        return "\n".join([*re.findall(r"^Environment=(.+)$", joined, re.MULTILINE), starts[-1]])
    steps = dict(re.findall(r"^(FROM|ENTRYPOINT|CMD)\s+(.+)$", joined, re.MULTILINE))  # the last of each counts
    if "FROM" not in steps:
        return text

    def words(step: str) -> str:  # in JSON, or for the shell
        given = steps.get(step, "")
        with suppress(ValueError):
            if isinstance(listed := json.loads(given), list):
                return shlex.join(map(str, listed))
        return shlex.join(("sh", "-c", given)) if given else ""

    variables = " ".join(
        f"{name}={value}" for name, value in re.findall(r"^ENV\s+(\w+)[ =](.+)$", joined, re.MULTILINE)
    )
    starter = words("ENTRYPOINT") or f"docker run {steps['FROM'].split()[0]}"
    return f"{variables} {starter} {words('CMD')}"


def _containers(text: str) -> list[list[str]]:
    """The containers in a file of Docker Compose or Kubernetes as `docker run` lines; none if it is no such file."""
    if not re.search(r"^\s*(- )?image:\s*\S", text, re.MULTILINE):
        return []
    import yaml

    def containers(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict) and isinstance(node.get("image"), str):
            yield node
        elif isinstance(node, (dict, list)):
            for each in node.values() if isinstance(node, dict) else node:
                yield from containers(each)

    try:
        return [_docker_run(each) for each in containers(list(yaml.safe_load_all(text)))]
    except yaml.YAMLError as error:
        raise ValueError(
            f"LINE is not a valid YAML file ({shown(str(error))}). Correct it, or paste the container's command."
        ) from error


def _docker_run(container: dict[str, Any]) -> list[str]:
    """A container as a `docker run` line. Kubernetes' command and args are Compose's entrypoint and command."""
    keys = ("command", "args") if "args" in container or "name" in container else ("entrypoint", "command")
    entry, rest = (_words_of(container.get(key), key) for key in keys)
    pairs = container.get("env") or container.get("environment") or []
    if not isinstance(pairs, (dict, list)):
        raise ValueError(f"the environment must be a list or an object, got {shown(pairs)}. Correct it.")
    if isinstance(pairs, dict):
        pairs = [f"{name}={value}" for name, value in pairs.items()]
    pairs = [f"{pair.get('name')}={pair.get('value')}" if isinstance(pair, dict) else pair for pair in pairs]
    entered = [f"--entrypoint={entry[0]}"] if entry else []
    return ["docker", "run", *(f"--env={pair}" for pair in pairs), *entered, container["image"], *entry[1:], *rest]


def _words_of(command: Any, key: str) -> list[str]:
    if isinstance(command, str):
        return [word for each in _commands(command.replace("\n", " ")) for word in each]
    if command is not None and not isinstance(command, list):
        raise ValueError(f"{key} must be a string or a list of words, got {shown(command)}. Correct it.")
    return [str(word) for word in command or ()]


# --------------------------------------------------------------------------------- from words to a server


def _first_server(commands: Sequence[Sequence[str]], known: Mapping[str, str]) -> Command | None:
    """The server that one of the commands starts, with the variables that are `known` or set before it."""
    variables = dict(known)
    for number, each in enumerate(commands):
        words = list(_expanded(each, variables))
        environment, version, entry = dict(variables), None, list[str]()
        for at, word in enumerate(words):
            version = found[1] if (found := _IMAGE.search(word)) else version
            if word.partition("=")[0] == "--entrypoint":
                entry = [word.partition("=")[2]] if "=" in word else words[at + 1 : at + 2]
            inner = _inner(words, at, entry)
            if inner is not None:
                command = _first_server(inner, environment)
                return None if command is None else replace(command, version=command.version or version)
            engine, skip = _server(words, at)
            if engine is not None:
                _check_rest(commands[number + 1 :])
                if _is_image(word) and (inner := _inner(words, at + skip, entry)) is not None:
                    command = _first_server(inner, environment)
                    itself = f"the image starts {SERVERS[engine]} {words[at + skip]}: set the entry point to a shell."
                    return command and replace(command, version=version, mistakes=(itself, *command.mistakes))
                again, more = _server(words, at + skip) if _is_image(word) and at + skip < len(words) else (None, 0)
                command = _command(engine, word, words[at + skip + more :], environment, version)
                twice = f"the image starts {SERVERS[engine]} by itself: leave {' '.join(words[at + 1 :][:more])} out."
                return command if again is None else replace(command, mistakes=(twice, *command.mistakes))
            if assigned := _ASSIGNED.fullmatch(word):
                environment[assigned[1]] = assigned[2]
        if all(_ASSIGNED.fullmatch(word) or word in ("export", "set") for word in words):
            variables = environment
    return None


def _inner(words: Sequence[str], at: int, entry: Sequence[str]) -> list[list[str]] | None:
    """The commands that a shell runs, as in `bash -c '…'`, or a container with an entry point of its own."""
    word, rest = "".join(words[at : at + 1]), words[at + 1 :]
    if word.rpartition("/")[2] in _SHELLS and len(rest) > 1 and re.fullmatch(r"-\w*c", rest[0]):
        return _commands(rest[1])
    if _is_image(word) and entry:
        return [[*entry, *rest]]
    return None


def _check_rest(commands: Sequence[Sequence[str]]) -> None:
    """Raise ValueError if what follows the server's command is another server, or an option that it lacks."""
    if commands and commands[0][0].startswith("-"):
        option = " ".join(map(_plain, commands[0]))
        raise ValueError(
            f"the line before {shown(option)} does not end in \\, so the server starts without it. Add the \\."
        )
    if any(_server(words, at)[0] for words in commands for at in range(len(words))):
        raise ValueError("LINE starts more than one server. Pass the command line of one.")


def _server(words: Sequence[str], at: int) -> tuple[str | None, int]:
    """The engine that starts at this word, and how many words name it. A pulled image starts none."""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    name = word.rpartition("/")[2]
    if following == "serve" and (name == "vllm" or word == "vllm.entrypoints.cli.main"):
        return "vllm", 2
    if word == "vllm.entrypoints.openai.api_server":
        return "vllm", 1
    if _is_image(word) and not {"run", "create"}.isdisjoint(words[:at]):
        return "llama.cpp" if "llama.cpp" in word else "vllm", 1
    if "llama.cpp:full" in word and following in ("--server", "-s"):
        return "llama.cpp", 2
    if word == "sglang.launch_server":
        return "sglang", 1
    if name == "sglang" and following == "serve":
        return "sglang", 2
    if re.search(r"(^|[/\\.])llama-(server|cli|completion|perplexity)(\.exe)?$", word):
        return "llama.cpp", 1
    return None, 0


def _is_image(word: str) -> bool:
    """Whether a Docker image starts a server by itself."""
    return bool(re.search(r"(^|/)vllm-openai[\w.-]*(:|@|$)|llama\.cpp:server", word))


# ------------------------------------------------------------------------------ from a server to its options


def _command(
    engine: str, starter: str, words: Sequence[str], environment: Mapping[str, str], version: str | None
) -> Command:
    line, program = _Line(engine), re.sub(r"^.*[/\\]|\.exe$", "", starter)
    if engine == "llama.cpp":
        line.read_environment(environment)
    line.read(words)
    options, overrides = line.options, dict[str, Any]()
    if (name := _OVERRIDES.get(engine)) is not None:
        dotted = {option: value for option, value in options.items() if option.startswith(f"{name}.")}
        if name in options and not dotted:
            overrides = parse_overrides(options[name], name)
        elif name in options:
            line.mistakes.append(f"{next(iter(dotted))} replaces the whole of {name}: write all keys in one object.")
        for option, value in dotted.items():  # vLLM's form
            _put(overrides, option.removeprefix(f"{name}.").split("."), value)
    for option in options:
        if option in _NUMBERS:
            _number(options[option], option)
    kinds = ("none", "linear", "yarn")
    if engine == "llama.cpp" and (kind := options.get("--rope-scaling", "none")) not in kinds:
        raise ValueError(f"--rope-scaling of llama-server must be none, linear or yarn, got {kind!r}. Correct it.")
    if engine == "llama.cpp":
        for item in filter(None, options.get("--override-kv", "").split(",")):
            if not _KEY.fullmatch(item.strip()):
                line.mistakes.append(f"{item} is rejected by {line.name}: write KEY=TYPE:VALUE, such as a.b=int:4096.")
        _check_group_attention(options, program)
    model = next((options[each] for each in _MODEL[engine] if each in options), line.model)
    if model is not None and _is_open(model):
        model = None
    asked = options.get(LENGTH_OPTIONS[engine])
    length = None if asked is None or asked in ("-1", "auto") else _length(engine, asked)
    return Command(
        engine, model, overrides, length or None, options, dict(environment),
        program if program in _UNCAPPED else None, version, tuple(line.mistakes), tuple(line.unread),
    )  # fmt: skip


def _check_group_attention(options: Mapping[str, str], program: str) -> None:
    """Raise ValueError if positions are not those of RoPE alone."""
    if any(option in options for option in ("--grp-attn-n", "--grp-attn-w")):
        where = "which is not checked" if program == "llama-completion" else "which only llama-completion has"
        raise ValueError(f"--grp-attn-n and --grp-attn-w are group attention (self-extend), {where}. Leave them out.")


class _Line:
    """The options of a line as the engine's parser reads them.

    vLLM's and SGLang's argparse takes abbreviations, and vLLM's also _ for - and keys after a dot
    (vllm/utils/argparse_utils.py). llama-server takes _ for -, but no abbreviation, no = and no attached value
    (common/arg.cpp).
    """

    def __init__(self, engine: str) -> None:
        self.engine, self.name = engine, _NAMES[engine]
        self.model: str | None = None
        self.options: dict[str, str] = {}
        self.mistakes: list[str] = []
        self.unread: list[str] = []

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """LLAMA_ARG_*, which options overrule."""
        for variable, value in environment.items():
            option = "--" + variable.removeprefix("LLAMA_ARG_").removesuffix("_TYPE").lower().replace("_", "-")
            if variable.startswith("LLAMA_ARG_") and option in _READ["llama.cpp"] and option != "--override-kv":
                self.keep(option, value, variable)

    def read(self, words: Sequence[str]) -> None:
        """Read the options, with those of --config before them, and the model."""
        option, takes = "", "nothing"
        for number, word in enumerate(words):
            may_be_model = self.model is None and (self.engine == "vllm" or (self.engine == "sglang" and number == 0))
            if re.match(r"--?[A-Za-z]", word):
                option, equals, value = word.partition("=")
                attached = re.fullmatch(r"(-[a-z]+)(\d\S*)", word) if self.engine == "llama.cpp" else None
                if (attached and attached[1] in _SHORT) or (equals and self.engine == "llama.cpp"):
                    option, value = attached.groups() if attached else (option, value)
                    equals = "="
                    self.mistakes.append(f"{_plain(word)} is rejected by {self.name}: write {option} {_plain(value)}.")
                option = self.option_of(option)
                is_read = option.partition(".")[0] in _READ[self.engine]
                takes = "nothing" if equals or self.is_switch(option) else "a value" if is_read else "values"
                self.keep(option, value)
            elif takes == "a value":
                self.keep(option, word)
                takes = "nothing"
            elif takes == "values" and "[@]" not in word:
                self.keep(option, word)
                takes = "more values"
            elif may_be_model and "[@]" not in word:
                self.model = word
            elif _is_open(word):
                self.unread.append(f"{_plain(word)} was not read: paste the line as the shell expands it.")
            elif takes == "nothing":
                self.mistakes.append(f"{word!r} belongs to no option: {self.name} rejects it.")

    def keep(self, option: str, value: str, where: str = "") -> None:
        """Note an option's value. Raises ValueError if it is left to the shell and matters."""
        name = option.partition(".")[0]
        if name == "--config" and value and name in _READ[self.engine]:
            self.read_file(_plain(value))
        elif _is_open(value) and name in _READ[self.engine]:
            if name not in _MODEL[self.engine]:
                raise ValueError(f"{where or option} is {_plain(value)}, which only the shell knows. Write its value.")
            return
        if option == "--override-kv" and option in self.options:  # appended; all others replaced
            value = f"{self.options[option]},{value}"
        self.options[option] = _plain(value)

    def read_file(self, name: str) -> None:
        """The options in the YAML file of --config, which those of the line overrule."""
        import yaml

        file, given = Path(name), dict(self.options)
        if file.suffix not in (".yaml", ".yml") or not file.is_file():
            self.unread.append(f"--config {name} was not read: pass the options that it holds, or lint beside it.")
            return
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} is not valid YAML ({shown(str(error))}). Correct it.") from error
        words = list[str]()
        for key, value in content.items() if isinstance(content, dict) else ():
            if value is not False:
                words.append(f"--{key}")
            if isinstance(value, dict):
                words.append(json.dumps(value))
            elif not isinstance(value, bool):
                words += map(str, value) if isinstance(value, list) else [str(value)]
        self.read(words)
        self.options |= given

    def option_of(self, word: str) -> str:
        """The option that a word names, or was meant to."""
        head, dot, rest = word.partition(".")
        if head.startswith("--") and self.engine != "sglang":
            head = head.replace("_", "-")
        if self.engine == "llama.cpp":
            head = _SHORT.get(head, head)
        read, beside = _READ[self.engine], _BESIDE[self.engine].split()
        if head in read or head in beside:
            return head + dot + rest
        longer = [each for each in (*read, *beside) if each.startswith(head) and len(head) > 3]
        if self.engine != "llama.cpp" and len(longer) == 1:
            return longer[0] + dot + rest
        if self.engine != "llama.cpp" and set(longer) & set(read):
            self.mistakes.append(f"{word} is ambiguous: {self.name} has {' and '.join(longer[:2])}.")
            return word
        meant = next((own.get(self.engine) for own, also in _PURPOSES if head in (*own.values(), *also)), None)
        if meant is not None:
            self.mistakes.append(f"{word} is not an option of {self.name}: write {meant}. The server does not start.")
            return meant
        near = get_close_matches(head, read, 1, 0.85)
        if near:
            self.mistakes.append(f"{word} is not an option of {self.name}; did you mean {near[0]}{dot}{rest}?")
            return near[0] + dot + rest
        if self.engine != "llama.cpp" and head in (*_READ["llama.cpp"], "--rope-theta"):
            self.mistakes.append(
                f"{word} is not an option of {self.name}: write rope_parameters in {_OVERRIDES[self.engine]}."
            )
        return head + dot + rest

    def is_switch(self, option: str) -> bool:
        return option in _SWITCHES.split() or (option.startswith(_SWITCH) and option not in _VALUED)


def _put(overrides: dict[str, Any], path: Sequence[str], value: str) -> None:
    for name in path[:-1]:
        if not isinstance(overrides.get(name), dict):
            overrides[name] = {}
        overrides = overrides[name]
    try:
        overrides[path[-1]] = json.loads(value)
    except ValueError:
        overrides[path[-1]] = value


def _length(engine: str, text: str) -> int:
    """A number of tokens as the engine reads it. Raises ValueError if it rejects it or drops its unit."""
    option, units = LENGTH_OPTIONS[engine], _UNITS[engine]
    if not text:
        raise ValueError(f"{option} has no value. Write it as {option} 131072.")
    if engine != "llama.cpp" and re.fullmatch(r"\d+(_\d+)+", text):
        return int(text)  # as Python reads it
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
    kind = _NUMBERS[option]
    try:
        value = float(text)
    except ValueError:
        value = None
    if value is None or not kind.holds(int(value) if value.is_integer() else value):
        raise ValueError(f"{option} must be {kind.words}, got {text!r}. Correct it.")
    return value
