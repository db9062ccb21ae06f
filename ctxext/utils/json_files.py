"""JSON that a person or another program may have edited: read with types, and refused by file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ctxext.utils.values import MAX_FACTOR, MAX_TOKENS, is_count, is_number, shown


class Kind(NamedTuple):
    """What a field may hold: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
FACTOR = Kind(f"a number from 1 to {MAX_FACTOR:,.0f}", partial(is_number, low=1, high=MAX_FACTOR))
NUMBER = Kind("a finite number > 0", lambda value: is_number(value, low=0) and value > 0)
TOKENS = Kind(f"a number of tokens from 1 to {MAX_TOKENS:,}", partial(is_count, high=MAX_TOKENS))


def or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


@dataclass(frozen=True)
class JsonObject:
    """A JSON object whose fields are read by kind.

    Attributes:
        file: as errors name it.
        entry: the object's own place in the file, with a dot behind it; "" for all of it.
    """

    file: str
    content: dict[str, Any]
    entry: str = ""

    def get(self, name: str, kind: Kind) -> Any:
        """The field `name`.

        Raises:
            ValueError: it is missing, or of another kind.
        """
        if name not in self.content:
            raise ValueError(f"{self.file} lacks {self.entry}{name}, {kind.words}. Restore it, or write it again.")
        value = self.content[name]
        if not kind.holds(value):
            raise ValueError(
                f"{self.entry}{name} in {self.file} must be {kind.words}, got {shown(value)}. Restore it, or write "
                "it again."
            )
        return value

    def part(self, name: str) -> JsonObject:
        """The object in the field `name`.

        Raises:
            ValueError: there is none.
        """
        return JsonObject(self.file, self.get(name, OBJECT), f"{self.entry}{name}.")

    def check(self, holds: bool, words: str) -> None:
        """Raise ValueError, with what must hold in `words`, unless it `holds`."""
        if not holds:
            raise ValueError(f"{self.entry}{words} in {self.file}. Restore it, or write it again.")

    def check_names(self, known: set[str]) -> None:
        """Raise ValueError unless the fields are exactly `known`."""
        if self.content.keys() != known:
            wrong = ", ".join(sorted(map(repr, known ^ self.content.keys())))
            entry = f"{self.entry.rstrip('.')} in {self.file}" if self.entry else self.file
            version = f"; written by version {shown(self.content['version'])}" if "version" in self.content else ""
            raise ValueError(
                f"{entry} is not as this version of ctxext writes it (missing or unknown: {wrong[:200]}{version}). "
                "Restore it, or write it again."
            )


def read_json(path: Path) -> JsonObject:
    """The JSON object in a file.

    Raises:
        ValueError: it holds something else: broken JSON, or other bytes than UTF-8.
    """
    return parsed_json(read_text(path), str(path))


def parsed_json(text: str, file: str) -> JsonObject:
    """The JSON object that `text` is; `file` is where it is, as errors name it.

    Raises:
        ValueError: it is something else, or broken.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is not valid JSON ({reason}). Restore it, or write it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {shown(content)}. Restore it, or write it again.")
    return JsonObject(file, content)


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as that.") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A file of JSON, whole or not at all, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    building = path.with_name(f".{path.name}.part")
    try:
        building.write_text(text + "\n", encoding="utf-8")
        building.replace(path)
    finally:
        building.unlink(missing_ok=True)
