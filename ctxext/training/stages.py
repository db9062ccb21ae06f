"""Stages of a fine-tune: each starts from the weights of the one before, and extends the original config.

So a factor counts from the original model's trained length, and the model's own scaling is composed with only once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pydantic import ValidationError

from ctxext.extension.adapter_config import ADAPTER_CONFIG, origin, short_name
from ctxext.hub.adapters import RECORD, changed_adapter, merge
from ctxext.hub.checkpoint import checkpoint_folder, extended_json, link_with_config, local_folder, written_whole
from ctxext.training.settings import Settings
from ctxext.utils.json_files import OBJECT, read_json
from ctxext.utils.screen import console, next_command, next_measurement

FIGURES = "figures.json"  # the last file that a stage writes


def is_finished(stages: Sequence[Settings], number: int) -> bool:
    """Whether the stage `number` was trained, measured and saved with its settings.

    Raises:
        ValueError: it was not, but the next stage started from an earlier result of it.
    """
    settings, figures = stages[number], Path(stages[number].output) / FIGURES
    if figures.is_file() and settings.saved.exists():
        try:
            then = Settings.model_validate(read_json(figures).get("settings", OBJECT))
        except ValidationError:  # of another version
            then = None
        of_result = ("evaluation", "merge", "steps", "tokens")
        if then and then.binding(*of_result) == settings.binding(*of_result):
            return True
    later = [stage.output for stage in stages[number + 1 :] if Path(stage.output).exists()]
    if later:
        raise ValueError(
            f"{settings.output} holds no result of these settings, but {later[0]} started from its result. Choose "
            f"another output, or remove {' and '.join(later)}."
        )
    return False


class Start(NamedTuple):
    """The checkpoint that a stage trains.

    Attributes:
        original: the model of the settings; an adapter's is merged.
        folder: the same, or for a stage after the first, its config with the weights of the stage before.
        name: the original model's hub name, or its folder's name; an adapter's as in the settings.
    """

    original: Path
    folder: Path
    name: str


def starting_point(stages: Sequence[Settings], number: int, folder: Path, alone: bool = False) -> Start:
    """What the stage `number` trains, written to `folder` if it is a new checkpoint.

    Args:
        alone: without the stage before, for a dry run.

    Raises:
        FileNotFoundError, ValueError: there is no such model; a stage cannot be extended; or a later one would extend
            weights, such as a position table, that the stage before has changed.
    """
    settings = stages[number]
    start = _original(settings, folder if alone else Path(stages[0].output) / folder.name)
    if number == 0:
        _check_extensions(stages, start.original)
    if number == 0 or alone:
        return start
    if not folder.exists():
        _write_start(start.original, stages[number - 1].saved, folder)
    return start._replace(folder=folder)


def _original(settings: Settings, folder: Path) -> Start:
    given = local_folder(settings.model, settings.revision)
    if (given / ADAPTER_CONFIG).is_file():
        merged = folder if folder.exists() else merge(given, folder)
        return Start(merged, merged, settings.model)
    given = checkpoint_folder(settings.model, settings.revision)
    return Start(given, given, short_name(origin(given)[0]))


def _check_extensions(stages: Sequence[Settings], original: Path) -> None:
    reached = 0
    for number, stage in enumerate(stages, 1):
        plan, _ = extended_json(original, **stage.extension.arguments())
        if plan.target_length < reached:
            warnings.warn(
                f"stage {number} extends to {plan.target_length:,} tokens, fewer than the {reached:,} of the stage "
                "before: factors count from the original trained length.",
                stacklevel=2,
            )
        reached = plan.target_length
        if number > 1 and plan.changes_weights:
            raise ValueError(
                f"stage {number}: {plan.summary} makes new weights from the original ones, which the stage before "
                "changes. Train such a model in one stage."
            )


def _write_start(original: Path, trained: Path, folder: Path) -> None:
    """Write the config of `original` with the weights of `trained`, an adapter or a model."""
    with written_whole(folder) as building, TemporaryDirectory(prefix=".merged-", dir=folder.parent) as temporary:
        if (trained / ADAPTER_CONFIG).is_file():
            trained = merge(trained, Path(temporary) / "merged")
        link_with_config(trained, building, read_json(original / "config.json").content, 0, console.print)
        for name in (RECORD, "README.md"):  # of the extended model
            (building / name).unlink(missing_ok=True)


def what_next(saved: Path) -> str:
    """The command for what a fine-tune saved: it merges an adapter, or evaluates a whole model."""
    if saved.name != "adapter":
        return next_measurement(saved)
    merged = saved.with_name("merged")
    merging = next_command("merge", saved, "-o", merged)
    if not merged.exists():
        return merging
    if not (merged / "config.json").is_file() or changed_adapter(merged):
        return f"{merged} was not merged from these weights: remove it and {merged}.jsonl first.\n{merging}"
    return next_measurement(merged)
