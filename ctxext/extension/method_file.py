"""Method files: `ctxext fit` and `compare` write them, and every `method=` or `--method` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ctxext.extension.metadata_file import RECORD, Record, read_record
from ctxext.methods import ContextMethod, method_from_dict
from ctxext.utils.download import hub_folder
from ctxext.utils.json_files import OBJECT, read_json, write_json

SUFFIX = ".json"
# Beside an export: the reference that `ctxext verify` compares an engine with.
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


def check_method_file(path: Path, flag: str = "--output") -> None:
    """Check the output path of a new method file, which `flag` gave, and its suffix.

    Raises:
        ValueError: another suffix.
        OSError: as `check_writable`; FileExistsError if it exists.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"{flag} must end in {SUFFIX}: --method would read {str(path)!r} as a name.")
    check_writable(path)
    if path.exists():
        raise FileExistsError(f"{path} already exists. Pass {flag} another file name, or remove it first.")


def check_writable(path: Path) -> None:
    """Raise OSError, before the work starts, if `path` is a folder or its folder cannot be written to."""
    if path.is_dir():
        raise OSError(f"{path} is a folder. Choose another file name.")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=parent, prefix=".ctxext-"):  # permissions alone do not tell: /proc has them
            pass
    except OSError:
        raise OSError(f"{path} cannot be written in {parent}. Choose another folder.") from None


def check_new(path: Path) -> None:
    """Raise FileExistsError if anything is at `path`, even a link that leads nowhere."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists already. Choose another name, or remove it first.")


def check_apart(path: Path, flag: str, other: Path, holds: str) -> None:
    """Raise ValueError if `path`, which `flag` gave, is the file `other` with the content `holds`."""
    same = path.exists() and other.exists() and path.samefile(other)  # also a hard link
    if same or path.resolve() == other.resolve():
        raise ValueError(f"{flag} {path} would overwrite {holds}. Choose another file name.")


def read_saved(path: str | Path) -> SavedMethod:
    """Read a file of `SavedMethod.save`. Raises FileNotFoundError, or ValueError if it holds no valid method."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist. Pass a file that `ctxext fit` wrote, or a name from `ctxext methods`."
        )
    read = read_json(path)
    if "method" not in read.content:
        raise ValueError(f"{path} holds no method. Pass a file that `ctxext fit` or `ctxext compare --best` wrote.")
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
            f"{method} is not a method. Pass a name from `ctxext methods`, a {SUFFIX} file that `ctxext fit` wrote, "
            "or an extension on the hub (owner/name)."
        )
    record = _on_the_hub(method)
    if record.existing != "refuse":
        raise ValueError(
            f"{method} was made with existing={record.existing!r}, which its method does not include. Load the "
            f"extended model with ctxext.load({method!r}), or pass the values in its {RECORD} as arguments."
        )
    return record.method


def check_made_for(method: str | ContextMethod | None, trained_length: int) -> None:
    """Raise ValueError if an extension on the hub was made for another trained length, which methods' equations use.

    Args:
        trained_length: of the model to extend, before any scaling, in tokens.
    """
    if not isinstance(method, str) or "/" not in method or method.endswith(SUFFIX):
        return
    its = _on_the_hub(method).original_max_position_embeddings
    if its != trained_length:
        raise ValueError(
            f"{method} was made for a model trained at {its} tokens, but this model's trained length is "
            f"{trained_length}. If that is wrong, pass original_max_position_embeddings={its}; else use another method."
        )


def _on_the_hub(name: str) -> Record:
    record = read_record(hub_folder(name, patterns=[RECORD]))
    if record is None:
        raise FileNotFoundError(
            f"{name!r} has no {RECORD} on the hub, so it is not an extension. Create one with `ctxext push METHOD.json "
            "OWNER/NAME`; if it is a model extended in its config, use it as it is."
        )
    return record
