"""`adapter_config.json`: the base that an adapter names, and the extension that it was trained with.

An adapter names its base so that both can be moved: by hub name, or by a path from the adapter's folder if the base
lies beside it, or else by an absolute path. The name also says how the base was extended: PEFT and transformers, which
would load the base unextended, fail with that as the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctxext.extension.metadata_file import RECORD, Record, weights_fingerprint, write_record
from ctxext.methods import ContextMethod, method_from_dict
from ctxext.models.metadata import Lengths, live_mark, summary_of
from ctxext.utils.download import snapshot
from ctxext.utils.json_files import TEXT, or_none, read_json, write_json

ADAPTER_CONFIG = "adapter_config.json"
BASE = "ctxext.json"  # of `ctxext.hub.adapters.AdapterBase`
EXTENDED = " (extended by ctxext, {summary}; load this adapter with ctxext.load)"
_PATTERN = re.compile(re.escape(EXTENDED).replace(r"\{summary\}", "(?P<summary>.*)") + "$", re.DOTALL)

# PeftModel.from_pretrained(base, adapter) does not read the base's name, but warns of each key that it does not know.
WARNING = "trained on an extended base: load it with ctxext.load"


def portable(base: str, folder: Path) -> str:
    """How files in `folder` name a base: an absolute path in or beside that folder as seen from there (`../base`).

    Hub names and other paths stay as they are.
    """
    here = folder.resolve()
    if not (Path(base).is_absolute() and Path(base).is_relative_to(here.parent)):
        return base
    path = Path(os.path.relpath(base, here)).as_posix()
    return path if path.startswith("..") else f"./{path}"


def located(base: str, folder: Path) -> str:
    """The inverse of `portable`."""
    return str((folder / base).resolve()) if base.startswith(".") else base


def origin(base: str | Path, revision: str | None = None) -> tuple[str, str | None]:
    """A base's hub name and revision, also of a snapshot in the hub's cache; an absolute path for other folders."""
    if not Path(base).is_dir():
        return str(base), revision
    return snapshot(Path(base)) or (str(Path(base).resolve()), None)


def short_name(base: str) -> str:
    """For readers, of an `origin`: the hub name, or the folder's name."""
    return Path(base).name if Path(base).is_absolute() else base


def plain_name(named: str | None) -> str | None:
    """The base model's name within an adapter's `base_model_name_or_path`; None if it has none."""
    return _PATTERN.sub("", named or "") or None


def base_named(adapter_config: Path) -> str | None:
    """An adapter's `base_model_name_or_path`. Raises ValueError if the file is malformed."""
    read = read_json(adapter_config)
    return read.get("base_model_name_or_path", or_none(TEXT)) if "base_model_name_or_path" in read.content else None


def trained_under(named: str | None) -> str | None:
    """The summary of the extension within an adapter's `base_model_name_or_path`, or None."""
    found = _PATTERN.search(named or "")
    return None if found is None else found["summary"]


def extension_in(text_config: Any) -> str | None:
    """The summary of the extension that plain transformers reads from a config; None if there is none."""
    mark = live_mark(text_config)
    return None if mark is None else summary_in(mark)


def method_in(text_config: Any) -> ContextMethod | None:
    """The method of the extension that plain transformers reads from a config; None if there is none."""
    mark = live_mark(text_config)
    return None if mark is None or mark["method"] is None else method_from_dict(mark["method"])


def summary_in(mark: dict[str, Any]) -> str:
    """The summary of the extension in a config, the same as that of its plan."""
    kept = mark["existing"] == "keep" or mark["method"] is None
    return summary_of(None if kept else method_from_dict(mark["method"]).title, Lengths.of_mark(mark))


def name_base(folder: Path, base: str, revision: str | None, summary: str) -> None:
    """Write the base and the extension that the adapter in `folder` was trained with into its `adapter_config.json`."""
    path = folder / ADAPTER_CONFIG
    named = base + EXTENDED.format(summary=summary)
    content = {**read_json(path).content, "base_model_name_or_path": named, "revision": revision, WARNING: summary}
    write_json(path, content)


def carry_extension(owner: Any, folders: Iterable[Path]) -> None:
    """Write the extension of the model `owner` beside the adapters just saved in `folders`.

    `owner` is None if the model is not extended: then only the metadata of earlier adapters is removed.
    """
    for folder in folders:
        (folder / RECORD).unlink(missing_ok=True)  # from an adapter saved here earlier
        if owner is None or not (folder / ADAPTER_CONFIG).is_file():
            continue
        plan, named, weights = owner.__dict__["context_extension"].plan, owner.name_or_path or "", None
        name, revision = origin(named, getattr(owner.config, "_commit_hash", None)) if named else ("", None)
        if name and any(Path(named).glob("*.safetensors")):
            weights = weights_fingerprint(Path(named))
        name = portable(name, folder)
        write_record(folder, plan, name=name or None, revision=revision, weights=weights)
        name_base(folder, name, revision, plan.summary)


def adapter_record(folder: Path) -> Record | None:
    """The extension that an adapter was trained with, or None. Raises ValueError if its files disagree."""
    path, summary = folder / RECORD, trained_under(base_named(folder / ADAPTER_CONFIG))
    if not path.is_file():
        if summary is None:
            return None
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} says that the adapter was trained with {summary}, but {RECORD} (or {BASE}, of "
            "ctxext finetune) is missing. Copy that file too, or save the adapter again with ctxext imported."
        )
    record = Record.of_json(read_json(path))
    if record.summary != summary:
        named = (base_named(folder / ADAPTER_CONFIG) or "") + EXTENDED.format(summary=record.summary)
        raise ValueError(
            f"{path} ({record.summary}) does not match base_model_name_or_path in the {ADAPTER_CONFIG} beside "
            f"it. If you moved the base model, write {named!r} there; if another adapter has been saved there since, "
            f"delete {RECORD}."
        )
    return record
