"""Typed reading of JSON files that others may have edited; errors name file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ctxext.utils.values import MAX_FACTOR, MAX_TOKENS, is_count, is_number, shown


class Kind(NamedTuple):
    """The valid values of a field: in words, and as a predicate."""

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
    """A JSON object with typed access to its fields.

    Attributes:
        file: as errors name it.
        entry: the object's path in the file, with a trailing dot; "" for the whole file.
    """

    file: str
    content: dict[str, Any]
    entry: str = ""

    def get(self, name: str, kind: Kind) -> Any:
        """The field `name`. Raises ValueError if it is missing or invalid."""
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
        """The object in the field `name`. Raises ValueError if there is none."""
        return JsonObject(self.file, self.get(name, OBJECT), f"{self.entry}{name}.")

    def check(self, holds: bool, words: str) -> None:
        """Raise ValueError with the condition in `words` unless it `holds`."""
        if not holds:
            raise ValueError(f"{self.entry}{words} in {self.file}. Restore it, or write it again.")

    def check_names(self, known: set[str]) -> None:
        """Raise ValueError unless the fields are exactly `known`."""
        if self.content.keys() != known:
            wrong = ", ".join(sorted(map(repr, known ^ self.content.keys())))
            entry = f"{self.entry.rstrip('.')} in {self.file}" if self.entry else self.file
            version = f"; written by version {shown(self.content['version'])}" if "version" in self.content else ""
            raise ValueError(
                f"{entry} does not match this version of ctxext (missing or unknown: {wrong[:200]}{version}). "
                "Restore it, or write it again."
            )


def read_json(path: Path) -> JsonObject:
    """The JSON object in a file. Raises ValueError if there is none, or the file is not UTF-8."""
    return parsed_json(read_text(path), str(path))


def parsed_json(text: str, file: str) -> JsonObject:
    """Parse the JSON object in `text`. Raises ValueError, naming `file`, if it is not a valid one."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is not valid JSON ({reason}). Restore it, or write it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {shown(content)}. Restore it, or write it again.")
    return JsonObject(file, content)


def read_text(path: Path) -> str:
    """The text in a file. Raises ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8.") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, creating its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    building = path.with_name(f".{path.name}.part")
    try:
        building.write_text(text + "\n", encoding="utf-8")
        building.replace(path)
    finally:
        building.unlink(missing_ok=True)
