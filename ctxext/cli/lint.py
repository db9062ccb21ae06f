"""`ctxext lint`: is the extension live on that command line?"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ctxext.cli import common
from ctxext.cli.export import command_lines, copied

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ctxext.export.lint import Lint

# Model types without a class in transformers whose config vLLM and SGLang read as another's
# (vllm/transformers_utils/config.py, _CONFIG_REGISTRY; the architectures of their config.json).
_READ_AS = {"kimi_k2": "deepseek_v3"}
_COLOURS = {"wrong": "bold red", "unread": "bold yellow", "warning": "yellow"}


def lint(
    line: Annotated[
        str,
        typer.Argument(
            help="A server's command line in quotes, a file that holds one (a script, Dockerfile, systemd unit, Docker "
            "Compose, Kubernetes), - for the standard input, an overrides object in JSON, or an edited config.json or "
            "its folder."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="The model as published: a folder, its config.json, a hub name, or the config itself in JSON. "
            "Default: the model that the line names.",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm, sglang or llama.cpp, if LINE is not a command line.")
    ] = None,
    engine_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Such as 0.29 (of llama.cpp, its month: 2026-08). Default: the newest known one."
        ),
    ] = None,
    target_length: common.TargetLength = None,
    revision: common.Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what an engine really does with a command line: what it ignores, replaces or rejects, and the line that is
    right.

    Reads only the config. The exit code is 1 if something is wrong.
    """
    with common.without_garbage_collection():
        from ctxext.export.commands import SERVERS, Command, parse_command, parse_overrides
        from ctxext.export.lint import lint
        from ctxext.utils.values import suggest

    if engine is not None and engine not in SERVERS:
        raise ValueError(f"unknown engine {engine!r}{suggest(engine, tuple(SERVERS))}")
    text = _text(line)
    edited = None
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        if engine is None:
            what = "LINE is JSON" if text == line else f"{line} holds JSON, not a command line"
            raise ValueError(f"{what}: name the server that reads it with --engine. Known: {', '.join(SERVERS)}.")
        content = parse_overrides(text.lstrip("\ufeff"), "LINE")
        command = Command(engine, length=target_length)
        if "model_type" in content:
            edited = config_from(content, "LINE")
        else:
            command = replace(command, overrides=content)
    else:
        command = parse_command(text)
        if engine not in (None, command.engine):
            raise ValueError(f"--engine {engine} contradicts LINE, which starts {command.engine}. Drop --engine.")
        if target_length is not None:
            command = replace(command, length=target_length)
    named = model or command.model
    if named and not (command.model or "").strip(".…") and not named.endswith((".json", "}")):
        command = replace(command, model=named)  # which the right line repeats
    if edited is not None and model is None:
        config, source = edited
    elif named is None or not named.strip(".…"):
        raise ValueError("LINE names no model. Pass --model, such as --model Qwen/Qwen3-8B or --model config.json.")
    else:
        config, source = _published(named, revision)
    found = lint(command, config, source, engine_version, edited)
    if as_json:
        print(json.dumps({**asdict(found), "is_wrong": found.is_wrong}, indent=2))
    else:
        _show(found, named)
    if found.is_wrong:
        raise typer.Exit(1)


def _text(line: str) -> str:
    """The line itself, or what a file or the standard input holds."""
    from ctxext.utils.json_files import read_text

    if line == "-":
        line = sys.stdin.read()
    if not line.strip():
        raise ValueError("the line is empty. Paste the server's command line, in quotes.")
    if len(line) >= 1000 or any(mark in line for mark in ' \n{"'):
        return line
    file = Path(line, "config.json") if Path(line).is_dir() else Path(line)
    if not file.is_file():
        raise ValueError(f"{file} is neither a command line nor a file. Put the command line in quotes.")
    return read_text(file)


def config_from(content: dict[str, Any], where: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config in a config.json, and the file's content. Raises ValueError, naming `where`, if it is not valid."""
    from transformers import AutoConfig

    from ctxext.hub.checkpoint import rejecting
    from ctxext.models.config_fields import check_config, check_counts

    check_counts(content)
    kind = content.get("model_type")
    with rejecting(Path(where)):
        config = AutoConfig.for_model(**{**content, "model_type": _READ_AS.get(str(kind), kind)})
    check_config(config)
    return config, content


def _published(name: str, revision: str | None) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config of a model and its config.json."""
    from ctxext.export.commands import parse_overrides
    from ctxext.export.gguf import context_of_gguf
    from ctxext.hub import checkpoint
    from ctxext.utils.json_files import read_json

    if name.lstrip().startswith("{"):
        return config_from(parse_overrides(name, "--model"), "--model")
    if Path(name).suffix == ".gguf" and Path(name).is_file():
        config = context_of_gguf(name)
        return config, json.loads(config.to_json_string())
    if name.endswith(".gguf"):
        raise ValueError(
            f"{name} is not on this machine. Pass the model that it was made from, such as --model Qwen/Qwen3-8B."
        )
    if Path(name).suffix == ".json" and Path(name).is_file():
        return config_from(read_json(Path(name)).content, name)
    try:
        folder = checkpoint.checkpoint_folder(name, revision, config_only=True)
    except (OSError, ValueError) as error:
        if Path(name).exists():
            raise
        remedy = "Or pass its config with --model: a folder, its config.json, or the JSON itself."
        raise ValueError(f"{error} {remedy}") from error
    content = read_json(folder / "config.json").content
    if str(content.get("model_type")) in _READ_AS:
        return config_from(content, str(folder / "config.json"))
    return checkpoint.read_config(folder), content


def _show(found: Lint, model: str | None) -> None:
    console = Console()
    console.print(Text.assemble((f"{found.engine} {found.version}", "bold"), (f"  {model or ''}", "dim")))
    console.print(Padding(Text(found.does), (0, 0, 0, 2)))
    for finding in found.findings:
        severity = (f"{finding.severity}: ", _COLOURS[finding.severity])
        console.print(Text.assemble(severity, finding.words))
        if (reading := finding.reading) is not None:
            evidence = Text(f"{reading.engine} {reading.versions}; {reading.known}", style="dim")
            console.print(Padding(evidence, (0, 0, 0, 2)))
    if found.right is not None:
        console.print("The right line, to which your other options can be added:")
        copied(command_lines(found.right.flags))
        for warning in found.right.warnings:
            console.print(Padding(Text(f"note: {warning}"), (0, 0, 0, 2)))
    elif found.is_wrong:
        console.print(Text(f"There is no right line: {found.why_not}"))
    elif not found.findings:
        *most, last = found.read or ("",)
        read = f"{', '.join(most)} and {last}" if most else last
        said = f"Nothing is wrong with {read}." if read else "No option here sets the context; no other was checked."
        console.print(Text(said, style="green" if read else ""))
