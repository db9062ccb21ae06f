"""The command line: one thin file per command."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from safetensors import SafetensorError

from ctxext import __version__
from ctxext.cli.common import Command, commands, console, in_flags, in_settings, one_line_of, say
from ctxext.cli.compare import compare
from ctxext.cli.demo import demo
from ctxext.cli.describe import describe
from ctxext.cli.eval import evaluate
from ctxext.cli.export import export
from ctxext.cli.extend import extend
from ctxext.cli.finetune import finetune
from ctxext.cli.fit import fit
from ctxext.cli.lint import lint
from ctxext.cli.merge import merge
from ctxext.cli.methods import methods
from ctxext.cli.push import push
from ctxext.cli.report import report
from ctxext.cli.serve import serve
from ctxext.cli.verify import verify
from ctxext.utils.four_bits import hold_warnings
from ctxext.utils.screen import plain_warnings

PANELS = {
    "Extend": (describe, extend, methods),
    "Measure": (evaluate, compare, report, demo),
    "Fit and train": (fit, finetune, merge),
    "Serve and share": (export, verify, lint, serve, push),
}
for panel, group in PANELS.items():
    for command in group:
        name = "eval" if command is evaluate else None
        commands.command(name, cls=Command, rich_help_panel=panel)(command)


@commands.command(
    "lm-eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel="Measure",
)
def lm_eval(context: typer.Context) -> None:
    """lm-eval's command line, with extended models (`--model ctxext`) and the tasks of ctxext."""
    from ctxext.evals.harness import main

    main(context.args)


def print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@commands.callback()
def options(
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Python module to import first, such as one with your own methods."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    if not console.is_terminal:  # read by transformers and the hub, also in child processes
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    hold_warnings()
    plain_warnings()
    sys.path.insert(0, "")
    for module in plugin or ():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or f"{module}.".startswith(f"{error.name}."):
                raise typer.BadParameter(
                    f"--import {module}: there is no such module in the current folder or among the installed ones. "
                    "Pass its name without .py, from the folder that contains it."
                ) from None
            raise ImportError(f"--import {module}: it needs {error.name}, which is not installed.") from error


def app(pressed: Sequence[int] = ()) -> None:
    """Run the command line; expected errors are printed without a traceback.

    `pressed` is not empty once Ctrl-C was pressed, which libraries may swallow or turn into an error.
    """
    # At exit Python would spend a second on garbage collection of torch and transformers.
    atexit.register(gc.freeze)
    try:
        # Otherwise typer prints usage errors itself, in a box.
        code = commands(prog_name="ctxext", standalone_mode=False)
    except (ValueError, RuntimeError, OSError, ImportError, ArithmeticError, SafetensorError) as error:
        if pressed:
            raise
        said = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:  # Python's own
            said = f"{error.filename} cannot be read or written ({error.strerror}). Pass another path."
        if isinstance(error, SafetensorError):  # it names no file
            said = f"a .safetensors file of the model is corrupt ({said}). Download it again."
        if "finetune" in sys.argv:
            said = in_settings(said)
        elif "lm-eval" not in sys.argv:  # its arguments have the library's names
            said = in_flags(said)
        _end(said, 1, error)
    except Exception as error:
        if pressed or not hasattr(error, "format_message"):  # typer's, from a module that depends on its version
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed
            raise SystemExit(0) from None
        _end(one_line_of(error), getattr(error, "exit_code", 2), error)
    if code == 130 and not pressed:  # Ctrl-C, which typer turns into an exit code
        say("interrupted")
    raise SystemExit(code if isinstance(code, int) else 0)


def _end(said: str, code: int, error: Exception) -> NoReturn:
    console.print("[bold red]error:[/] ", end="")
    # A terminal gets whole words; a file gets one line.
    console.print(said, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    raise SystemExit(code) from error
