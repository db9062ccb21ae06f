"""The command line: one thin file per command."""

from __future__ import annotations

import atexit
import gc
import importlib
import re
import sys
from typing import Annotated

import typer
from safetensors import SafetensorError

from ctxext import __version__
from ctxext.cli.common import commands, console, in_flags
from ctxext.cli.compare import compare
from ctxext.cli.demo import demo
from ctxext.cli.describe import describe
from ctxext.cli.eval import evaluate
from ctxext.cli.export import export
from ctxext.cli.extend import extend
from ctxext.cli.finetune import finetune
from ctxext.cli.fit import fit
from ctxext.cli.lm_eval import lm_eval
from ctxext.cli.merge import merge
from ctxext.cli.methods import methods
from ctxext.cli.push import push
from ctxext.cli.recommend import recommend
from ctxext.cli.report import report
from ctxext.cli.verify import verify

commands.command()(describe)
commands.command()(extend)
commands.command()(recommend)
commands.command()(fit)
commands.command()(export)
commands.command()(finetune)
commands.command()(merge)
commands.command()(methods)
commands.command()(push)
commands.command("eval")(evaluate)
commands.command()(compare)
commands.command()(report)
commands.command(
    "lm-eval", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(lm_eval)
commands.command()(demo)
commands.command()(verify)


@commands.callback()
def options(
    plugin: Annotated[
        list[str] | None, typer.Option("--import", help="Import this module first: it registers methods of your own.")
    ] = None,
) -> None:
    sys.path.insert(0, "")
    for module in plugin or ():
        importlib.import_module(module)


@commands.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def app() -> None:
    """Run the command line; expected errors are printed without a traceback."""
    # At exit Python would spend a second on garbage collection of torch and transformers.
    atexit.register(gc.freeze)
    try:
        commands()
    except (ValueError, RuntimeError, OSError, ImportError, ArithmeticError, SafetensorError) as error:
        said = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
        if isinstance(error, SafetensorError):  # it names no file
            said = f"a .safetensors file of the model is broken ({said}). Fetch it again."
        if not {"finetune", "lm-eval"} & {*sys.argv}:  # these take arguments by the library's names
            said = in_flags(said)
        console.print("[bold red]error:[/] ", end="")
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(1) from error
