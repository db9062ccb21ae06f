"""Shared by the commands: the console, and parsers for lengths and options."""

from __future__ import annotations

import gc
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.models.metadata import Existing
from ctxext.utils import values
from ctxext.utils.screen import console

# Each command is added in ctxext/cli/__init__.py.
commands = typer.Typer(
    help="Extend the context window of Hugging Face language models, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Reading a config, transformers imports thousands of modules; garbage collection would cost half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parse_tokens(text: str) -> int:
    """`131072` or `128k` as a number of tokens."""
    try:
        return values.parse_tokens(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_pairs(pairs: Sequence[str] | None) -> dict[str, Any]:
    """`["beta_fast=16", "truncate=false"]` by name; values are JSON, or plain words."""
    found = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is not an option; write NAME=VALUE, such as beta_fast=16.")
        try:
            found[name] = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def parse_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Options of a method, as keyword arguments of `extend_context`; the method checks their names."""
    from ctxext.api import extend_context

    options = parse_pairs(pairs)
    for name in options:
        if name in {*inspect.signature(extend_context).parameters, "say"} - {"rotated_copy"}:
            raise typer.BadParameter(f"{name} is not an option of a method. Use the flag that --help lists.")
    return options


def in_flags(said: str) -> str:
    """Rewrite Python arguments in an error as flags: `existing='keep'` as --existing keep, `length=` as --length.

    Paths, quotes and calls such as `YaRN(factor=4)` are unchanged. On the command line there is no model to restore.
    """
    from typer.main import get_command

    options = [option for command in get_command(commands).commands.values() for option in command.params]  # type: ignore[attr-defined]
    flags = {o.name: max(o.opts, key=len) for o in options if o.param_type_name == "option" and not o.is_flag}
    names = "|".join(flags)
    said = re.sub(rf"^({names})(?= must be )", lambda found: flags[found[1]], said)
    said = re.sub(
        rf"(?<![\w./\\'\"`-])(?<!\w\()({names})=('[^']*'|[\w.+-]*\w)?(?![\w/\\=(\[])",
        lambda found: f"{flags[found[1]]} {(found[2] or '').strip(chr(39))}".rstrip(),
        said,
    )
    said = re.sub(r"Call restore_context\(model\), or (\w)", lambda found: found[1].upper(), said)
    return re.sub(r", or call restore_context\(model\)|restore_context\(model\), or ", "", said)


def folder_of(model: str) -> str:
    """A folder's config.json may be given for the folder."""
    return str(Path(model).parent) if Path(model).name == "config.json" else model


def name_of(model: str) -> str:
    """A checkpoint's name in files and tables: its folder's or hub name."""
    return Path(model).absolute().name if Path(model).is_dir() else model


def say_written(
    output: Path,
    model: str,
    revision: str | None,
    original_max_position_embeddings: int | None,
    existing: str = "refuse",
) -> None:
    """Report a written method, and the command that extends the model with it."""
    options = [model, "--method", str(output), "-o", "FOLDER"]
    if revision is not None:
        options += ["--revision", revision]
    if original_max_position_embeddings is not None:
        options += ["--original-max-position-embeddings", str(original_max_position_embeddings)]
    if existing != "refuse":
        options += ["--existing", existing]
    console.print(f"wrote {output}. To use it: ctxext extend {shlex.join(options)}", markup=False, soft_wrap=True)


Model = Annotated[str, typer.Argument(help="A checkpoint: a folder, or a name on the hub (owner/name).")]
# After it, what happens where none is named.
METHOD = (
    "A name of `ctxext methods`, a .json file of `ctxext fit` or `recommend`, or an extension on the hub (owner/name)"
)
Method = Annotated[str | None, typer.Option(help=f"{METHOD}; yarn for RoPE where none is named.")]
Factor = Annotated[float | None, typer.Option(help="Target length / trained length. Default: 4, or the file's.")]
TargetLength = Annotated[
    int | None, typer.Option(parser=parse_tokens, metavar="TOKENS", help="Tokens to reach, such as 131072 or 128k.")
]
TrainedLength = Annotated[
    int | None,
    typer.Option(
        "--original-max-position-embeddings",
        parser=parse_tokens,
        metavar="TOKENS",
        help="The length it was really trained at, where you know better than its config.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the method, such as beta_fast=16."),
]
Length = Annotated[
    int | None,
    typer.Option(parser=parse_tokens, metavar="TOKENS", help="Pin a dynamic method at the scale of this length."),
]
HowExisting = Annotated[
    str,
    typer.Option(
        help=f"What to do with a model that is scaled already: {', '.join(Existing.__args__)}. replace needs "
        "--original-max-position-embeddings where nothing says the length before; encodings other than RoPE take "
        "refuse and compose."
    ),
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit of a name on the hub.")]
