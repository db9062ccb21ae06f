"""lm-eval with extended models: a model named `ctxext`, and tasks that need no network.

lm-eval finds models only in its own package, so its command line is entered here: `main` makes the
model and the tasks known and hands over. In Python:

    from ctxext.evals import harness

    harness.register()
    tasks = lm_eval.tasks.TaskManager(include_path=harness.TASKS, metadata=model_args)
    lm_eval.simple_evaluate(model="ctxext", model_args=model_args, tasks=["ctxext_passkey"], task_manager=tasks)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"


def register() -> None:
    """Make the model `ctxext` known to lm-eval.

    Raises:
        ImportError: lm-eval is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError(f"this needs lm-eval ({error}): pip install 'ctxext[lm-eval]'") from error
    import ctxext.evals.harness.model  # noqa: F401


def main(arguments: Sequence[str] | None = None) -> None:
    """lm-eval's command line, with the model `ctxext` and our tasks beside its own.

    Args:
        arguments: as `lm-eval` takes them; None: those of this process.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: as `lm-eval` and the model `ctxext` raise it.
    """
    register()
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]  # lm-eval reads its arguments there
    setup_logging()
    command_line = HarnessCLI()
    parsed = command_line.parse_args()
    # A later path wins, so that a task of the user's may take the place of one of ours.
    theirs = getattr(parsed, "include_path", None)
    if theirs is None and getattr(parsed, "config", None):
        theirs = EvaluatorConfig.load_yaml_config(parsed.config).get("include_path")
    parsed.include_path = [str(TASKS)] if theirs is None else [str(TASKS), theirs]
    command_line.execute(parsed)
