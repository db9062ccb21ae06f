"""Validate the lines of a results file: field types and array lengths."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from ctxext.utils.json_files import FLAG, TEXT, Kind, or_none
from ctxext.utils.values import MAX_TOKENS, are_numbers, are_words, is_count, is_number, shown

_COUNT = Kind(f"a whole number from 0 to {MAX_TOKENS}", partial(is_count, low=0, high=MAX_TOKENS))
_WORDS = Kind("a list of strings", are_words)
_SHARE = Kind("a number from 0 to 1", partial(is_number, low=0, high=1))
# Overflow in float16 gives NaN and infinities, which are valid measurements.
_MEASURED = Kind("a number", lambda value: is_number(value) or (isinstance(value, float) and not math.isfinite(value)))
_SECONDS = Kind("a number of seconds", partial(is_number, low=0))
_BYTES = Kind("a number of bytes", partial(is_count, low=0, high=2**60))
# Fields of every sample; depth is null for tasks without depths.
NEEDED = {
    "variant": TEXT, "key": TEXT, "task": TEXT, "length": _COUNT, "trial": _COUNT, "seed": _COUNT,
    "depth": or_none(_SHARE),
}  # fmt: skip
FIELDS = {
    **NEEDED,
    "hit": FLAG, "score": _SHARE, "digits": or_none(_SHARE),
    **dict.fromkeys(("logprob", "loss"), or_none(_MEASURED)),
    **dict.fromkeys(("tokens", "bytes", "key_tokens", "answer_tokens"), _COUNT),
    "got": TEXT, "question": TEXT, "expected": _WORDS,
    "contexts": Kind("a list of lists of strings", lambda each: isinstance(each, list) and all(map(are_words, each))),
    "needle_tokens": Kind("a list of whole numbers", partial(are_numbers, low=0, high=MAX_TOKENS)),
    "start": or_none(_COUNT),
    **dict.fromkeys(("prefill_seconds", "decode_seconds"), _SECONDS),
    "kv_bytes": _BYTES, "peak_bytes": or_none(_BYTES),
}  # fmt: skip
OF_RETRIEVAL = ("digits", "logprob", "got", "expected", "question", "contexts", "needle_tokens", "tokens")
OF_TEXT = ("tokens", "bytes", "losses")
# Bits per token in the arrays written by `ctxext.evals.perplexity.packed`.
ARRAYS = {"losses": 32, "top1": 32, "mask": 1}
# Further fields by task; all other tasks are retrieval.
NEEDED_OF = {
    "perplexity": ("losses", "loss", "bytes"), "sliding_perplexity": ("losses", "loss", "bytes"),
    "short": ("losses",), "key_tokens": ("mask",),
    "cost": ("prefill_seconds", "decode_seconds", "kv_bytes", "peak_bytes"),
}  # fmt: skip

# Fields of a header's `about`.
_LENGTH = Kind(f"a number of tokens from 1 to {MAX_TOKENS}", partial(is_count, low=1, high=MAX_TOKENS))
ABOUT = {
    **dict.fromkeys(("trained_length", "text_tokens"), _LENGTH), "reach": or_none(_LENGTH),
    "lengths": Kind("a list of numbers of tokens", lambda n: isinstance(n, list) and all(map(_LENGTH.holds, n))),
    "eliminated": Kind("a list of variants", are_words),
}  # fmt: skip


class CorruptLine(ValueError):
    """A malformed line of a results file; the message names the field."""


def check_record(record: Any) -> None:
    """Raise CorruptLine, naming the field, unless `record` is a valid sample."""
    if not isinstance(record, dict):
        raise CorruptLine(f"a sample must be an object, got {shown(record)}")
    for name, (words, holds) in FIELDS.items():
        if name in NEEDED and name not in record:
            raise CorruptLine(f"a sample has no {name}")
        if name in record and not holds(record.get(name)):
            raise CorruptLine(f"{name} of a sample must be {words}, got {shown(record.get(name))}")
    for name in OF_RETRIEVAL if "score" in record else OF_TEXT if "loss" in record else ():
        if name not in record:
            raise CorruptLine(f"a sample has no {name}")
    for name, bits in ARRAYS.items():
        if name in record and not _is_array(record[name], record.get("tokens"), bits):
            raise CorruptLine(f"{name} of a sample must be base64 with one number per token")


def check_alike(records: Iterable[dict[str, Any]]) -> None:
    """Raise CorruptLine unless samples that are combined in one figure have the same fields, and windows the same
    tokens."""
    scored: dict[str, bool] = {}
    sizes: dict[tuple[str, int, int], int] = {}
    for record in records:
        task, length, needed = record["task"], record["length"], NEEDED_OF.get(record["task"], ())
        if scored.setdefault(task, "score" in record) != ("score" in record):
            raise CorruptLine(f"some samples of {task} have a score and others have none")
        for name in needed:
            if name not in record:
                raise CorruptLine(f"a sample of {task} has no {name}")
        if not needed:
            continue
        # The first sliding window has more tokens; masks must match the losses of the same windows.
        kind = "perplexity" if task == "key_tokens" else task
        window = record["trial"] if task == "sliding_perplexity" else 0
        tokens = sizes.setdefault((kind, length, window), record["tokens"])
        if not 0 < record["tokens"] == tokens <= length or record.get("bytes") == 0:
            raise CorruptLine(
                f"a sample of {task} at {length} tokens has {record['tokens']} tokens, where others have {tokens}"
            )


def _is_array(value: Any, tokens: Any, bits: int) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == -(-tokens * bits // 8)
    except (ValueError, TypeError):
        return False


def check_header(value: dict[str, Any]) -> None:
    """Raise CorruptLine, naming the part, unless `value` is a valid header."""
    for name in ("identity", "tasks", "variants", "about"):
        part = value.get(name)
        if not isinstance(part, dict):
            raise CorruptLine(f"{name} in its header must be an object, got {shown(part)}")
        bad = [each for each in part.values() if name in ("tasks", "variants") and not isinstance(each, dict)]
        if bad:
            raise CorruptLine(f"{name} in its header must hold objects, got {shown(bad[0])}")
    for name, variant in value["variants"].items():
        if not isinstance(variant.get("model", ""), str):
            raise CorruptLine(f"model of {name} in its header must be a string, got {shown(variant['model'])}")
        extension = variant.get("extension")
        method = extension.get("method") if isinstance(extension, dict) else extension
        if not (method is None or (isinstance(method, dict) and isinstance(method.get("name"), str))):
            raise CorruptLine(f"extension of {name} in its header must be an object that describes its method")
        limit = variant.get("limit")
        if not (limit is None or is_count(limit, 0, MAX_TOKENS)):
            raise CorruptLine(
                f"limit of {name} in its header must be a number of tokens from 0 to {MAX_TOKENS}, got {shown(limit)}"
            )
    for part, fields in (("identity", {"seed": _COUNT}), ("about", ABOUT)):
        for name, (words, holds) in fields.items():
            if name in value[part] and not holds(value[part][name]):
                raise CorruptLine(f"{name} in its header must be {words}, got {shown(value[part][name])}")
