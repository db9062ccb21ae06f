"""What the retrieval tasks have in common: a place in the grid, the sample that belongs there, and its score.

A sample is a function of its place (task, length, depth, trial, seed), of the text and of the
tokenizer alone: not of the order, of the other tasks, of the number of processes or of the batch.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from random import Random
from typing import Any, ClassVar, Literal

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.utils.values import suggest


@dataclass(frozen=True)
class Place:
    """Where a sample is: `length` in tokens, `depth` from 0 to 1 (None: the task draws its own)."""

    task: str
    length: int
    depth: float | None
    trial: int
    seed: int

    def __post_init__(self) -> None:
        if self.depth is not None:  # 0 and 0.0 are one place
            object.__setattr__(self, "depth", float(self.depth))

    def rng(self, *purpose: str, depth: bool = True) -> Random:
        """The source of chance for this place; without `depth`, one that all depths of a trial share."""
        parts = (*purpose, self.task, self.length, self.depth if depth else None, self.trial, self.seed)
        # A string seeds by its SHA-512: the same on every platform and in every process.
        return Random(json.dumps(parts))


# Of several ways to write a thousands separator, a decimal separator or a minus sign, one.
_PLAIN = str.maketrans("，٬．٫’−\u00a0\u2009\u202f", ",,..'-   ")
_GROUPED = re.compile(r"(?<!\d)(?<!\d[.,])[1-9]\d{0,2}([,.' ])\d{3}(?:\1\d{3})*(?!\d)")
_NUMBER = re.compile(r"(?:(?<![\w.-])-?\.?)?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")


def numbers_in(text: str, fewest: int) -> list[str]:
    """The numbers in a text that have `fewest` digits or more in a row, in order.

    An integer comes back as its digits alone, whether it was written in ASCII digits or others (full-width, Arabic),
    and with or without a thousands separator: a comma, a point, a space or an apostrophe before every three digits from
    the right. So `11.063` is 11063. Where numbers of three digits could be answers, there are no thousands separators.
    A number with a fraction (also `.0`), an exponent or a minus sign keeps them, so that it equals no integer. A comma
    between two numbers of `fewest` digits separates them. A hyphen after a word or a space after one is no minus.
    Years, counts and dates are too short to be there.
    """
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text.translate(_PLAIN))
    if fewest > 3:
        text = _GROUPED.sub(lambda grouped: re.sub(r"\D", "", grouped[0]), text)
    text = re.sub(rf"(?<=\d{{{fewest}}}),(?=\d{{{fewest}}})", ", ", text)
    return [number for number in _NUMBER.findall(text) if re.search(rf"\d{{{fewest}}}", number)]


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    Attributes:
        body: what the user says, the haystack included; `lead` is how the answer begins, up to its first token.
        question: the part of `body` that asks.
        references: what the answer must hold; `metric` says how they count.
        metric: "numbers" - the share of the references that are the answer's `numbers`, in order; "all" -
            the share of the references that the answer contains; "part" - whether it contains any.
        answer: the answer as the model should write it, which teacher forcing scores; empty where there
            are many right ways to write it, so that it has to be generated.
        input_ids: the prompt's tokens, and behind them those of `answer`.
        n_prompt: how many of `input_ids` are the prompt.
        answer_tokens: how many tokens a generated answer may take. `n_prompt + answer_tokens` is the
            place's length.
        begun: whether the prompt ends with `lead`, so that the model only completes the answer.
        needles: what is hidden, in order; `needle_tokens` are the indices into `input_ids` at which it begins.
    """

    place: Place
    body: str
    lead: str
    question: str
    references: tuple[str, ...]
    metric: Literal["numbers", "all", "part"]
    answer: str
    input_ids: tuple[int, ...]
    n_prompt: int
    answer_tokens: int
    begun: bool
    needles: tuple[str, ...] = ()
    needle_tokens: tuple[int, ...] = ()

    def numbers(self, text: str) -> list[str]:
        """The numbers that a text answers with, in order: those of at least as many digits as the shortest reference.

        Of several numbers that could be one the first counts, right or wrong. How they are written: `numbers_in`.
        """
        return numbers_in(text, min(map(len, self.references)))

    def score(self, text: str) -> float:
        """Between 0 and 1, of a generated answer. "all" and "part" are RULER's, and ignore case."""
        if self.metric == "numbers":
            found = [said == number for said, number in zip(self.numbers(text), self.references)]
        else:
            found = [reference.lower() in text.lower() for reference in self.references]
        return float(any(found)) if self.metric == "part" else sum(found) / len(self.references)


class RetrievalTask(ABC):
    """A task that hides something in a text and asks for it: a frozen dataclass, its fields the settings.

    Attributes:
        uses_depth: whether what is hidden is at a depth that the grid sets.
        looks_up: whether it only has to be found, so that a model which does the task does it nearly always where
            the text is short.
    """

    name: ClassVar[str]
    uses_depth: ClassVar[bool] = True
    looks_up: ClassVar[bool] = False

    @abstractmethod
    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        """The sample of this place.

        Raises:
            ValueError: the length is too short for the prompt, or longer than the text.
        """

    def settings(self) -> dict[str, Any]:
        """What the samples depend on beside place, tokenizer and text; JSON-ready."""
        return asdict(self) if fields(self) else {}  # type: ignore[arg-type, call-overload]

    def places(self, lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int) -> list[Place]:
        """The whole grid, trial by trial, so that the depths of one trial stand together."""
        return [
            Place(self.name, length, depth, trial, seed)
            for length in lengths
            for trial in range(trials)
            for depth in (depths if self.uses_depth else (None,))
        ]


_TASKS: dict[str, Callable[..., RetrievalTask]] = {}


def add_task(name: str, make: Callable[..., RetrievalTask]) -> None:
    """Make a task known by `name` to `ctxext eval` and `ctxext compare`; `make` takes its settings."""
    _TASKS[name] = make


def register_task(cls: type[RetrievalTask]) -> type[RetrievalTask]:
    """Class decorator: the task is known by its `name`."""
    add_task(cls.name, cls)
    return cls


def make_task(name: str, **settings: Any) -> RetrievalTask:
    """A registered task by its name. Raises ValueError for an unknown name or setting."""
    if name not in _TASKS:
        raise ValueError(f"unknown task {name!r}{suggest(name, _TASKS)}")
    return _TASKS[name](**settings)


def list_tasks() -> list[str]:
    return list(_TASKS)


def fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits that stand for JSON-ready values."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
