"""lm-eval with extended models: a model named `ctxext`, and tasks that need no network.

lm-eval finds models only in its own package, so `main` registers the model and the tasks and starts lm-eval's command
line. In Python:

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
    """Register the model `ctxext` with lm-eval. Raises ImportError if lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError(f"this needs lm-eval ({error}): pip install '.[lm-eval]' in the clone") from error
    import ctxext.evals.harness.model  # noqa: F401


def main(arguments: Sequence[str] | None = None) -> None:
    """lm-eval's command line, with the model `ctxext` and our tasks beside its own.

    Args:
        arguments: those of `lm-eval`; None: of this process.
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
    # The last path wins, so a task of the user can replace one of ours.
    theirs = getattr(parsed, "include_path", None)
    if theirs is None and getattr(parsed, "config", None):
        theirs = EvaluatorConfig.load_yaml_config(parsed.config).get("include_path")
    parsed.include_path = [str(TASKS)] if theirs is None else [str(TASKS), theirs]
    command_line.execute(parsed)
