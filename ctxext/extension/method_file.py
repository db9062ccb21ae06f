"""Method files: `ctxext fit` and `recommend` write them, and every `method=` or `--method` reads them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.extension.metadata_file import RECORD, Record, read_record
from ctxext.methods import ContextMethod, method_from_dict
from ctxext.utils.download import hub_folder
from ctxext.utils.json_files import OBJECT, read_json, write_json

SUFFIX = ".json"
# Beside an export: the answers that `ctxext verify` compares an engine's with.
PROBE = "verify.json"


@dataclass(frozen=True)
class SavedMethod:
    """A method and its origin.

    Attributes:
        about: for model cards: the model it was fitted to, how, and the figures measured.
    """

    method: ContextMethod
    about: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically."""
        from ctxext import __version__

        write_json(Path(path), {"ctxext": __version__, "method": self.method.to_dict(), "about": self.about})


def check_method_file(path: Path) -> None:
    """Check the output path of a method file before the work starts.

    Raises:
        ValueError: its name does not end in `SUFFIX`, so `--method` would not read it.
        OSError: as `check_writable`.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"--output must end in {SUFFIX}, as --method takes {str(path)!r} for a name.")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work starts.

    Raises:
        OSError: it is a folder, or its folder cannot be written to.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "is a folder" if path.is_dir() else f"cannot be written in {parent}"
        raise OSError(f"{path} {why}. Choose another name for the file.")


def read_saved(path: str | Path) -> SavedMethod:
    """Read a file of `SavedMethod.save`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds no valid method.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Pass what `ctxext fit` wrote, or a name of `ctxext methods`.")
    read = read_json(path)
    if "method" not in read.content:
        raise ValueError(f"{path} holds no method. Pass what `ctxext fit` or `ctxext recommend` wrote.")
    method = method_from_dict(read.get("method", OBJECT), str(path))
    return SavedMethod(method, read.part("about").content if "about" in read.content else {})


def opened(method: str | ContextMethod | None) -> str | ContextMethod | None:
    """Resolve a `method` argument: read a .json file or an extension on the hub (owner/name); pass anything else on.

    Raises:
        FileNotFoundError: no such file or extension.
        ValueError: as `read_saved`; the extension has arguments besides its method; or a path of something else.
    """
    if not isinstance(method, str):
        return method
    if method.endswith(SUFFIX):
        return read_saved(method).method
    is_file = Path(method).suffix != "" and Path(method).is_file()
    if "/" not in method and not is_file:
        return method
    if Path(method).exists() or method.startswith((".", "/", "~")):
        raise ValueError(
            f"{method} is not a method: name one of `ctxext methods`, a {SUFFIX} file that `ctxext fit` wrote, or an "
            "extension on the hub (owner/name)."
        )
    record = _on_the_hub(method)
    more = {"existing": "refuse", "rotated_copy": False}
    said = [f"{name}={getattr(record, name)!r}" for name, usual in more.items() if getattr(record, name) != usual]
    if said:
        raise ValueError(
            f"{method} was made with {', '.join(said)}, which its method does not include. Load the extended model "
            f"with ctxext.load({method!r}), or pass the values in its {RECORD} as arguments."
        )
    return record.method


def check_made_for(method: str | ContextMethod | None, trained_length: int) -> None:
    """Check that an extension on the hub was made for this trained length, which methods' equations use.

    Args:
        trained_length: of the model to extend, before any scaling, in tokens.

    Raises:
        ValueError: it was made for another one.
    """
    if not isinstance(method, str) or "/" not in method or method.endswith(SUFFIX):
        return
    its = _on_the_hub(method).original_max_position_embeddings
    if its != trained_length:
        raise ValueError(
            f"{method} was made for a model trained at {its} tokens, and this one counts as trained at "
            f"{trained_length}. If that is wrong, pass original_max_position_embeddings={its}; else make one for it."
        )


def _on_the_hub(name: str) -> Record:
    record = read_record(hub_folder(name, patterns=[RECORD]))
    if record is None:
        raise FileNotFoundError(
            f"{name!r} holds no {RECORD} on the hub, so it is not an extension. `ctxext push METHOD.json "
            "OWNER/NAME` makes one. If it is a model that is extended in its config, use it as it is."
        )
    return record
