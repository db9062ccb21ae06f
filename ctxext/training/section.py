"""The base of a fine-tune's settings: no unknown keys, infinite numbers, empty text, or true and false for a number."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any, info: ValidationInfo) -> Any:
        check_meant(value, cls.model_fields[str(info.field_name)].annotation)
        return value


def check_meant(value: Any, annotation: Any, name: str = "") -> None:
    """Raise ValueError for text that is empty, as a path the current folder, and for true or false where a number is
    wanted, which pydantic would read as 1 and 0."""
    kinds, values = {*_kinds(annotation)}, value if isinstance(value, (list, tuple)) else [value]
    flags = [each for each in values if isinstance(each, bool)]
    if flags and kinds & {int, float} and bool not in kinds:
        raise ValueError(f"{name}must be a number, got {str(flags[0]).lower()}")
    if blank := [each for each in values if isinstance(each, str) and not each.strip()]:
        raise ValueError(f"{name}must not be empty, got {blank[0]!r}")


def _kinds(annotation: Any) -> Iterator[Any]:
    """A type and those that it is made of."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from _kinds(part)
