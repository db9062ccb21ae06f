"""A method in a file: what `ctxext fit` writes, and every call that takes a method's name reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.methods import ContextMethod, method_from_dict

SUFFIX = ".json"


@dataclass(frozen=True)
class SavedMethod:
    """A method, and where it comes from.

    Attributes:
        about: for the reader and for a model card: the model that it was found for, how, and what was measured.
    """

    method: ContextMethod
    about: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all."""
        from ctxext import __version__

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"ctxext": __version__, "method": self.method.to_dict(), "about": self.about},
            indent=2, ensure_ascii=False, allow_nan=False,
        )  # fmt: skip
        building = path.with_name(f".{path.name}.part")
        building.write_text(text + "\n", encoding="utf-8")
        building.replace(path)


def read_saved(path: str | Path) -> SavedMethod:
    """The method that `SavedMethod.save` wrote.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds no method, or one with bad numbers in it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file here. Pass what `ctxext fit` wrote, or a name of `ctxext methods`.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        method = method_from_dict(content["method"])
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not a saved method ({type(error).__name__}: {error}). Pass what `ctxext fit` wrote."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return SavedMethod(method, content.get("about", {}))


def opened(method: str | ContextMethod | None) -> str | ContextMethod | None:
    """A method as people write it: the file's where it is the path of a .json file, else as it is."""
    return read_saved(method).method if isinstance(method, str) and method.endswith(SUFFIX) else method
