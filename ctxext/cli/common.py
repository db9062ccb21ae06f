"""Shared by the commands: the console, and parsers for lengths and options."""

from __future__ import annotations

import gc
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ctxext.models.metadata import Existing
from ctxext.utils import values
from ctxext.utils.screen import console

if TYPE_CHECKING:
    from ctxext.core.plan import Plan

# What Python says of arguments that the command line has no flag for, and what to say there.
PHRASES = {
    r"Pass (\w+)=\.\.\.(, which `ctxext fit` finds)?\.": r"Pass --option \1=VALUE, or a --method file that ctxext fit "
    "wrote.",
    r"^options (.*) require a method name, but .* is an instance\. .*": r"--option \1 needs the name of a method, such "
    "as --method yarn, but a saved method has its options already. Drop --option, or pass a name.",
    r"Pass (group_size|window|chunk_size)=": r"Pass --option \1=",
    r"^a fit cannot start from (.*?)\. Known: (.*)\.": r"--start must be one of \2, got \1.",
    r"Pass at least ([\d.]+) minutes, or one start": r"Pass --minutes \1, or one --start, such as yarn",
    r" \(an int\)": "",
    r"Pass a longer text, or a smaller factor": "Pass a longer --text, or a smaller --factor",
    r"Pass a longer text: repeating it would let the model copy": "Pass a longer --haystack",
    r"Pass a longer text or fewer windows": "Pass a longer --haystack or fewer --windows",
    r"^the url must (?=.*, got '(?!http))": "--server must ",  # that of verify begins with http
    r"got torch\.(\w+)": r"got '\1'",
    r"Pass base_model='owner/name'": "Pass --base-model OWNER/NAME",
    r"Pass results='FILE'": "Pass --results FILE",
    r"Pass other options, or a larger factor or length": "Pass another --option, or a larger --factor or --length",
    r"^(unknown method .*)": r"\1 For a method of your own: ctxext --import MODULE ...",
}

# What help shows for a value, by the type in a command's signature; others have the option's name.
METAVARS = {int: "N", float: "NUMBER", Path: "PATH"}


class PlainHelp:
    """Mixin for commands whose help shows METHOD or N for what an option takes, not its Python type."""

    def get_params(self, ctx: Any) -> Any:
        params, callback = super().get_params(ctx), getattr(self, "callback", None)  # type: ignore[misc]
        kinds = get_type_hints(inspect.unwrap(callback)) if callback else {}
        for param in params:
            kind, name = kinds.get(param.name), param.name.upper().replace("_", "-")
            if param.param_type_name == "argument":  # typer adds <str>, and braces in the usage line
                param.metavar = param.metavar or name
                usage = (param.metavar if param.required else f"[{param.metavar}]") + "..." * (param.nargs != 1)
                param.display_type_rich = lambda ctx: None
                param._usage_display_name = lambda usage=usage: usage
            elif getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.metavar is None:
                param.metavar = next((METAVARS[each] for each in (kind, *get_args(kind)) if each in METAVARS), name)
        return params


class Command(PlainHelp, TyperCommand):
    pass


class Group(PlainHelp, TyperGroup):
    pass


# Each command is added in ctxext/cli/__init__.py.
commands = typer.Typer(
    cls=Group,
    help="Extend the context window of Hugging Face language models, and verify the result.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, so that transformers imports half a second faster."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def say(text: str) -> None:
    """Print a line on stderr without markup or wrapping, so that it can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def parse_tokens(text: str) -> int:
    """`131072` or `128k` as a number of tokens."""
    try:
        return values.parse_tokens(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_tokens_or_none(text: str) -> int:
    """Like `parse_tokens`, but accepts 0."""
    return 0 if text == "0" else parse_tokens(text)


def parse_pairs(
    pairs: Sequence[str] | None, form: str = "--option must be NAME=VALUE, such as beta_fast=16"
) -> dict[str, Any]:
    """`["beta_fast=16", "truncate=false"]` by name; values are JSON, or plain words."""
    found = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{form}; got {pair!r}.")
        if name in found:
            raise typer.BadParameter(f"{name} is set twice. Pass it once.")
        try:
            found[name] = json.loads(text.lower() if text in ("True", "False") else text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def parse_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Options of a method, as keyword arguments of `extend_context`. The method checks their names."""
    from ctxext.api import extend_context

    options = parse_pairs(pairs)
    for name in options:
        if name in {*inspect.signature(extend_context).parameters, "say"}:
            raise typer.BadParameter(f"{name} is not a method option. Use its own flag (see --help).")
    return options


def in_flags(said: str) -> str:
    """Rewrite Python arguments in an error as flags: `existing='keep'` as --existing keep, `length=` as --length.

    Paths and quotes are unchanged, and the method `YaRN(factor=4)` is called yarn ×4. On the command line there is no
    model to restore.
    """
    from typer.main import get_command

    from ctxext.methods import list_methods

    params = [param for command in get_command(commands).commands.values() for param in command.params]  # type: ignore[attr-defined]
    flags = {p.name: max(p.opts, key=len) for p in params if p.param_type_name == "option" and not p.is_flag}
    names = "|".join(flags)
    methods = {cls.__name__: cls.name for cls in list_methods()}
    said = re.sub(
        rf"\b({'|'.join(methods)})\(\w+=([\d.]+)(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)",
        lambda found: f"{methods[found[1]]} ×{float(found[2]):g}",
        said,
    )
    options = "|".join({field.name for cls in list_methods() for field in fields(cls)} - flags.keys())
    said = re.sub(rf"^({options})(?: of '\w+')?(?= must | has )", r"--option \1", said)
    for pattern, phrase in PHRASES.items():
        said = re.sub(pattern, phrase, said)
    said = re.sub(rf"^({names})(?= must be )", lambda found: flags[found[1]], said)
    said = re.sub(
        rf"(?<![\w./\\'\"`-])(?<!\w\()({names})=('[^']*'|[\w.+-]*\w)?(?![\w/\\=(\[])",
        lambda found: f"{flags[found[1]]} {(found[2] or '').strip(chr(39))}".rstrip(),
        said,
    )
    said = re.sub(r"Call restore_context\(model\), or (\w)", lambda found: found[1].upper(), said)
    return re.sub(r", or call restore_context\(model\)|restore_context\(model\), or ", "", said)


def in_settings(said: str) -> str:
    """Rewrite Python arguments of `extend_context` in an error as a recipe's settings: `existing='keep'` as
    extension.existing=keep."""
    from ctxext.api import extend_context

    keys = {name: f"extension.{name}" for name in inspect.signature(extend_context).parameters}
    keys["length"] = "extension.options.length"
    return re.sub(
        rf"(?<![\w./'\"`-])({'|'.join(keys)})=(?:'([^']*)')?", lambda found: f"{keys[found[1]]}={found[2] or ''}", said
    )


def one_line_of(error: Any) -> str:
    """A usage error of typer, with the flag it is about, what was passed and a remedy."""
    param, context = getattr(error, "param", None), error.ctx
    flag = max(param.opts, key=len) if param is not None and param.param_type_name == "option" else ""
    if hasattr(error.__cause__, "errors"):  # pydantic's, of a number
        (wrong,) = error.__cause__.errors()
        kind = {"float_parsing": "a number", "int_parsing": "a whole number"}.get(wrong["type"])
        if flag and kind:
            return f"{flag} must be {kind}, such as 4, got {wrong['input']!r}."
    if isinstance(error, typer.BadParameter) and error.message:
        return f"{flag}: {error.message}" if flag else error.message
    if getattr(error, "option_name", None) == "--import":
        return "--import goes before the command: ctxext --import MODULE COMMAND."
    said = re.sub(r"([^.?])$", r"\1.", error.format_message())
    if said.startswith("Got unexpected extra argument"):
        said += " A list has commas between its values: --methods yarn,pi."
    return f"{said} See {context.command_path} --help." if context else said


def folder_of(model: str) -> str:
    """The model, or the folder of a config.json."""
    return str(Path(model).parent) if Path(model).name == "config.json" else model


def name_of(model: str) -> str:
    """A checkpoint's name in files and tables: its folder's or hub name."""
    return Path(model).absolute().name if Path(model).is_dir() else model


def loaded_by(folder: Path) -> str:
    """What loads a written checkpoint as extended."""
    from ctxext.extension.metadata_file import RECORD

    return f"ctxext.load({str(folder)!r})" if (folder / RECORD).is_file() else "plain transformers"


def say_servers(folder: Path) -> None:
    """Say which servers would not serve a written checkpoint as extended, and what helps."""
    from ctxext.export.lint import misread_by
    from ctxext.extension.metadata_file import RECORD
    from ctxext.hub.checkpoint import read_config
    from ctxext.utils.json_files import read_json

    if (folder / RECORD).is_file():  # then none reads it
        return
    if misread := misread_by(read_config(folder), read_json(folder / "config.json").content):
        say(
            f"note: {' and '.join(misread)} would not read this config.json as meant. To serve it there: ctxext export "
            f"{shlex.quote(str(folder))} -o EXPORTED"
        )


def say_plan(plan: Plan) -> None:
    """Report an extension and its notes."""
    console.print(f"[bold]{plan.summary}[/]", highlight=False)
    for note in plan.notes:
        say(f"note: {in_flags(note)}")


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
    say(f"wrote {output}. To use it: ctxext extend {shlex.join(options)}")


Model = Annotated[
    str,
    typer.Argument(
        help="A checkpoint: a folder, a name on the hub (owner/name), or `bundled` for the package's small model."
    ),
]
# Commands append their default.
METHOD = "A method from `ctxext methods`, a .json file from `ctxext fit` or `compare`, or a hub extension (owner/name)"
Method = Annotated[str | None, typer.Option(help=f"{METHOD}. Default for RoPE: yarn.")]
Factor = Annotated[
    float | None, typer.Option(help="Target length / trained length. Default: 4, or that of a --method file.")
]
TargetLength = Annotated[
    int | None,
    typer.Option(parser=parse_tokens, metavar="TOKENS", help="Target length in tokens, such as 131072 or 128k."),
]
TrainedLength = Annotated[
    int | None,
    typer.Option(
        "--original-max-position-embeddings",
        parser=parse_tokens,
        metavar="TOKENS",
        help="The trained length, if it differs from the one in the config.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="A method option, such as beta_fast=16."),
]
Length = Annotated[
    int | None,
    typer.Option(
        parser=parse_tokens, metavar="TOKENS", help="Freeze a dynamic method at this length, which becomes the target."
    ),
]
HowExisting = Annotated[
    str,
    typer.Option(
        help=f"What to do if the model is already scaled: {', '.join(Existing.__args__)}. replace needs "
        "--original-max-position-embeddings if the trained length is unknown; encodings other than RoPE accept "
        "refuse and compose."
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")]
