"""The base of a fine-tune's settings: no unknown keys, no infinite numbers, and no true or false for a number."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        check_no_flag(value, cls.model_fields[str(info.field_name)].annotation)
        return value


def check_no_flag(value: Any, annotation: Any, name: str = "") -> None:
    """Raise ValueError for true or false where a number is wanted; pydantic would read them as 1 and 0."""
    kinds, values = {*_kinds(annotation)}, value if isinstance(value, (list, tuple)) else [value]
    flags = [each for each in values if isinstance(each, bool)]
    if flags and kinds & {int, float} and bool not in kinds:
        raise ValueError(f"{name}must be a number, got {str(flags[0]).lower()}")


def _kinds(annotation: Any) -> Iterator[Any]:
    """A type and those that it is made of."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from _kinds(part)
