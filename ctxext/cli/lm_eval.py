"""`ctxext lm-eval`: lm-eval's own command line, with extended models and our offline tasks."""

from __future__ import annotations

import typer


def lm_eval(context: typer.Context) -> None:
    """lm-eval's command line, with extended models (`--model ctxext`) and the tasks of ctxext."""
    from ctxext.evals.harness import main

    main(context.args)
