"""Checks of values from users and files.

Numbers from files have bounds, so that a wrong one causes no huge allocation or loop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
MAX_TOKENS = 2**27  # any length: far beyond any model's
MAX_FACTOR = 1e6  # any extension
MAX_SIZE = 2**24  # anything allocated: heads, dimensions, experts
MAX_ROTARY = 2**16  # rotary dimensions of a head
MAX_COUNT = 10_000  # of layers
MAX_ROWS = 2**24  # rows of a position table


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether `value` is a finite float64 in [low, high]; bools are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value) and low <= float(value) <= high
    except OverflowError:  # an int of more than 308 digits
        return False


def is_count(value: Any, low: int = 1, high: int = MAX_SIZE) -> bool:
    """Whether `value` is an int in [low, high]."""
    return is_number(value, low, high) and isinstance(value, int)


def are_numbers(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether `value` is a sequence of such numbers."""
    return _is_sequence(value) and all(is_number(each, low, high) for each in value)


def are_words(value: Any) -> bool:
    """Whether `value` is a sequence of strings."""
    return _is_sequence(value) and all(isinstance(each, str) for each in value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def reached(factor: float, length: int) -> int:
    """`factor` times `length` in whole tokens, never more: engines that multiply the two reject a longer length."""
    return math.floor(factor * length * (1 + 1e-12))


def check_rows(tokens: int) -> None:
    """Raise ValueError if a position table with one row per token would have more than MAX_ROWS rows."""
    if tokens > MAX_ROWS:
        raise ValueError(
            f"{tokens} tokens exceed the limit of {MAX_ROWS} rows of a position table. Pass a shorter length."
        )


def check_minutes(minutes: float | None) -> None:
    """Raise ValueError unless `minutes` is a time limit, or None for none."""
    if minutes is not None and not (is_number(minutes) and minutes > 0):
        raise ValueError(f"minutes must be a finite number > 0, got {minutes}.")


def finite(value: Any) -> Any:
    """`value` with every infinite or NaN number replaced by None, for JSON."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(value: Any) -> str:
    """The beginning of `value` on one line, for error messages."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints, or lists in lists
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def counted(n: float, noun: str) -> str:
    """`1 sample`, `2 samples`"""
    return f"{n:,} {noun}{'s' * (n != 1)}" if isinstance(n, int) else f"{n:g} {noun}{'s' * (n != 1)}"


def size_in_words(size: int) -> str:
    """`312 B`, `16.0 MiB` or `2.50 GiB`, of a number of bytes."""
    power = 0 if size == 0 else min(3, (size.bit_length() - 1) // 10)
    decimals, unit = ((0, "B"), (1, "KiB"), (1, "MiB"), (2, "GiB"))[power]
    return f"{size / 1024**power:.{decimals}f} {unit}"


def one_line(error: BaseException) -> str:
    """The message of another library's error, on one line of at most 300 characters."""
    text = re.sub(r"\s+", " ", str(error)).strip().rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def suggest(word: str, known: Sequence[str] | dict[str, Any], within: str = "") -> str:
    """The end of an error about an unknown `word`: the nearest known word, behind `within`, and all of them."""
    near = get_close_matches(str(word).lower(), list(known), n=1)
    hint = f"; did you mean {within + near[0]!r}?" if near else "."
    return f"{hint} Known: {', '.join(known)}."


def parse_tokens(text: str) -> int:
    """`131072`, `128k` (times 1024) or `1m` (times 1024²) as a number of tokens; ValueError for anything else."""
    value = text.strip().lower().replace("_", "").replace(",", "")
    unit = {"k": 1024, "m": 1024**2}.get(value[-1:], 1)
    try:
        tokens = float(value[:-1] if unit > 1 else value) * unit
    except ValueError:
        tokens = 0.5
    if not 1 <= tokens < math.inf or tokens != int(tokens):
        raise ValueError(f"{shown(text)} is not a number of tokens; write 131072 or 128k.")
    return int(tokens)
