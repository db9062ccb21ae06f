"""The languages of the hidden numbers, and made-up prose in each; code is one of them.

The prose is written for ctxext: 6,000 different sentences of a few lists of words. It tests scripts and tokenizers, and
costs no download; it is far more uniform than a novel.
"""

from __future__ import annotations

import sysconfig
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from ctxext.utils.values import suggest

SENTENCES, PARAGRAPH = 6_000, 6


@dataclass(frozen=True)
class Wording:
    """How a task hides a number and asks for it, in one language. `{owners}` are `owners`, joined.

    Attributes:
        phrase: a regular expression of what the text must not contain.
        question_several, lead_several: for several numbers.
        between, last: what joins owners.
        joint: what comes before a hidden sentence.
    """

    intro: str
    phrase: str
    sentence: str
    question: str
    lead: str
    question_several: str = ""
    lead_several: str = ""
    between: str = ""
    last: str = ""
    owners: tuple[str, ...] = ()
    joint: str = " "


@cache
def read_table(file: str) -> dict[str, Any]:
    """A TOML file of this package."""
    return tomllib.loads(files("ctxext.evals").joinpath(file).read_text(encoding="utf-8"))


def _table() -> dict[str, Any]:
    return read_table("languages.toml")


def languages() -> list[str]:
    """The languages of the hidden numbers, "code" included."""
    return list(_table())


def prose_languages() -> list[str]:
    """The languages of `prose`."""
    return [name for name, parts in _table().items() if "prose" in parts]


@cache
def wording(language: str, task: str) -> Wording:
    """How `task` ("passkey" or "needle") is worded. Raises ValueError for an unknown language."""
    if language not in languages():
        raise ValueError(f"unknown language {language!r}{suggest(language, languages())}")
    parts = _table()[language][task]
    return Wording(**{**parts, "owners": tuple(parts.get("owners", ()))})


def prose(language: str) -> str:
    """6,000 sentences, no two alike, in paragraphs."""
    parts = _table()[language]["prose"]
    lists = [parts[name] for name in ("when", "who", "verb", "where")]
    sentences = []
    for k in Random(f"prose {language}").sample(range(prod(map(len, lists))), SENTENCES):
        drawn = []
        for words in lists:
            k, index = divmod(k, len(words))
            drawn.append(words[index])
        when, who, (verb, of), where = drawn
        sentences.append(parts["pattern"].format(when=when, who=who, verb=verb, object=of, where=where))
    joined = parts.get("joined", " ")
    starts = range(0, len(sentences), PARAGRAPH)
    return "\n\n".join(joined.join(sentences[start : start + PARAGRAPH]) for start in starts)


def standard_library() -> str:
    """The modules of this Python's standard library, without packages, by name: the first million characters."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n\n".join(path.read_text(encoding="utf-8").strip() for path in modules)[:1_000_000]
