"""Common parts of retrieval tasks: the place in the grid, the sample and its score.

A sample depends only on its place (task, length, depth, trial, seed), the text and the tokenizer, not on order, other
tasks, number of processes or batch.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.utils.values import suggest


@dataclass(frozen=True)
class Place:
    """The place of a sample: `length` in tokens, `depth` from 0 to 1 (None: the task draws its own)."""

    task: str
    length: int
    depth: float | None
    trial: int
    seed: int

    def __post_init__(self) -> None:
        if self.depth is not None:  # 0 and 0.0 are one place
            object.__setattr__(self, "depth", float(self.depth))

    def rng(self, *purpose: str, depth: bool = True) -> Random:
        """The random generator of this place; without `depth`, one shared by all depths of a trial."""
        parts = (*purpose, self.task, self.length, self.depth if depth else None, self.trial, self.seed)
        # A string seeds by its SHA-512: the same on every platform and in every process.
        return Random(json.dumps(parts))


@dataclass(frozen=True)
class Scene:
    """Everything that a sample depends on besides its task."""

    place: Place
    prompter: Prompter
    haystack: Haystack


# Normalise thousands separators, decimal separators and minus signs.
_PLAIN = str.maketrans("，٬．٫’−\u00a0\u2009\u202f", ",,..'-   ")
_GROUPED = re.compile(r"(?<!\d)(?<!\d[.,])[1-9]\d{0,2}([,.' ])\d{3}(?:\1\d{3})*(?!\d)")
_NUMBER = re.compile(r"(?:(?<![\w.-])-?\.?)?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")


def numbers_in(text: str, fewest: int) -> list[str]:
    """The numbers in a text with at least `fewest` digits in a row, in order.

    Integers are returned as ASCII digits, with thousands separators (comma, point, space, apostrophe) removed: `11.063`
    is 11063. With `fewest` <= 3 no separator is recognised, as a group could be an answer. Fractions (also `.0`),
    exponents and minus signs are kept, so such numbers equal no integer. A comma between two numbers of `fewest` digits
    separates them. A hyphen after a word, or before a space, is not a minus.
    """
    text = re.sub(r"\d", lambda digit: str(int(digit[0])), text.translate(_PLAIN))
    if fewest > 3:
        text = _GROUPED.sub(lambda grouped: re.sub(r"\D", "", grouped[0]), text)
    text = re.sub(rf"(?<=\d{{{fewest}}}),(?=\d{{{fewest}}})", ", ", text)
    return [number for number in _NUMBER.findall(text) if re.search(rf"\d{{{fewest}}}", number)]


@dataclass(frozen=True)
class Sample:
    """A prompt with its answer.

    Attributes:
        body: the user's message, including the haystack. `question` is the part that asks.
        lead: the beginning of the answer, up to its first token.
        references: what the answer must contain.
        metric: a name in `METRICS`. "numbers" scores the share of `references` that are the answer's `numbers`, in
            order; "all" the share that the answer contains; "part" whether it contains any; "first" whether any comes
            before all `rivals`; "ratio" how alike the answer and the reference are, 0 unless it begins with `lead`.
        answer: the exact answer, scored by teacher forcing; empty if there are many right forms, so that it must be
            generated.
        input_ids: `n_prompt` tokens of the prompt, then those of `answer`.
        answer_tokens: the token limit of a generated answer. `n_prompt + answer_tokens` is the place's length.
        rivals: wrong answers, for the metric "first".
        begun: whether the prompt ends with `lead`, so that the model completes the answer.
        needles: the hidden sentences in order; `needle_tokens` are their start indices in `input_ids`.
        start: the haystack's token at which its text begins; None without a haystack.
    """

    place: Place
    body: str
    lead: str
    question: str
    references: tuple[str, ...]
    metric: str
    answer: str
    input_ids: tuple[int, ...]
    n_prompt: int
    answer_tokens: int
    begun: bool
    needles: tuple[str, ...] = ()
    needle_tokens: tuple[int, ...] = ()
    start: int | None = None
    rivals: tuple[str, ...] = ()

    def numbers(self, text: str) -> list[str]:
        """The numbers of an answer (`numbers_in`) with at least as many digits as the shortest reference, in order."""
        return numbers_in(text, min(map(len, self.references)))

    def score(self, text: str) -> float:
        """The score of a generated answer, from 0 to 1."""
        return METRICS[self.metric](self, text)


# How answers are scored: functions of the sample and the answer's text, from 0 to 1.
METRICS: dict[str, Callable[[Sample, str], float]] = {}


def register_metric(name: str) -> Callable[[Callable[[Sample, str], float]], Callable[[Sample, str], float]]:
    """Function decorator: register a way to score answers."""

    def registered(function: Callable[[Sample, str], float]) -> Callable[[Sample, str], float]:
        METRICS[name] = function
        return function

    return registered


@register_metric("numbers")
def _numbers(sample: Sample, text: str) -> float:
    """The first numbers count, right or wrong."""
    found = [said == number for said, number in zip(sample.numbers(text), sample.references)]
    return sum(found) / len(sample.references)


@register_metric("all")
def _all(sample: Sample, text: str) -> float:
    """RULER's, ignoring case."""
    return sum(reference.lower() in text.lower() for reference in sample.references) / len(sample.references)


@register_metric("part")
def _part(sample: Sample, text: str) -> float:
    """RULER's, ignoring case."""
    return float(_all(sample, text) > 0)


@register_metric("first")
def _first(sample: Sample, text: str) -> float:
    """Whole words, ignoring case."""
    named = re.search(_either((*sample.references, *sample.rivals)), text, re.IGNORECASE)
    return float(named is not None and re.fullmatch(_either(sample.references), named[0], re.IGNORECASE) is not None)


@register_metric("ratio")
def _ratio(sample: Sample, text: str) -> float:
    """That of OpenAI's MRCR."""
    said, lead = text.strip(), "" if sample.begun else sample.lead.strip()
    if not said.startswith(lead):
        return 0.0
    return SequenceMatcher(None, said.removeprefix(lead).strip(), sample.references[0]).ratio()


def _either(names: Sequence[str]) -> str:
    """A pattern of any of these names as whole words."""
    return rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)"


def written(
    scene: Scene, prompt: str, answer: str, room: int | None, *, needles: tuple[str, ...], **parts: Any
) -> Sample:
    """The sample of a prompt and its exact `answer`, or of `room` tokens (None: all that are left) to generate one."""
    prompter = scene.prompter
    # Tokenise a long prompt only once: its end shows how the answer is split into tokens.
    n_answer = prompter.answer_size(prompt[-256:], answer)
    read = prompter.tokenizer(prompt + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = (*prompter.special, *read["input_ids"])
    starts = [start for start, _ in read["offset_mapping"]]
    n_prompt = len(ids) - n_answer
    return Sample(
        place=scene.place,
        answer=answer,
        input_ids=ids,
        n_prompt=n_prompt,
        answer_tokens=n_answer if answer else scene.place.length - n_prompt if room is None else room,
        needles=needles,
        needle_tokens=tuple(len(prompter.special) + bisect_right(starts, prompt.index(each)) - 1 for each in needles),
        **parts,
    )


class TooShort(ValueError):
    """A task's prompt needs more tokens than it got."""


class RetrievalTask(ABC):
    """A retrieval task: a frozen dataclass whose fields are its settings.

    Attributes:
        uses_depth: whether the grid sets the depth of the (first) needle.
        looks_up: whether it is pure lookup, which a capable model solves almost always in short text.
    """

    name: ClassVar[str]
    uses_depth: ClassVar[bool] = True
    looks_up: ClassVar[bool] = False

    @abstractmethod
    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        """The sample of this place.

        Raises:
            TooShort: the length is too short for the prompt.
            ValueError: it is longer than the text.
        """

    def ambiguous(self, haystack: Haystack) -> ValueError:
        return ValueError(
            f"{self.name}: the text {haystack.name} contains the words of the needle, so the question would have "
            "more than one answer. Pass another text."
        )

    def settings(self) -> dict[str, Any]:
        """The samples' inputs besides their scene; JSON-ready."""
        return asdict(self)  # type: ignore[call-overload]

    def places(self, lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int) -> list[Place]:
        """The whole grid, trial by trial, so that the depths of a trial are adjacent."""
        return [
            Place(self.name, length, depth, trial, seed)
            for length in lengths
            for trial in range(trials)
            for depth in (depths if self.uses_depth else (None,))
        ]


# The tasks of `ctxext eval` and `ctxext compare`, each built from its settings; and those of published data sets, whose
# data are settings.
TASKS: dict[str, Callable[..., RetrievalTask]] = {}
DATA_TASKS: dict[str, Callable[..., RetrievalTask]] = {}


@contextmanager
def reading(path: str | Path, what: str, remedy: str) -> Iterator[None]:
    """Raise ValueError with the remedy if a file of published data is missing or has another form."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no {what} ({type(error).__name__}: {error}). {remedy}") from None


def register_task(cls: type[RetrievalTask]) -> type[RetrievalTask]:
    """Class decorator: register the task under its `name`."""
    TASKS[cls.name] = cls
    return cls


def make_task(name: str, **settings: Any) -> RetrievalTask:
    """A registered task by its name. Raises ValueError for an unknown name."""
    known = {**TASKS, **DATA_TASKS}
    if name not in known:
        raise ValueError(f"unknown task {name!r}{suggest(name, known)}")
    return known[name](**settings)


def list_tasks(*, data: bool = False) -> list[str]:
    """The tasks, with `data` also those that need data of their own."""
    return [*TASKS, *(DATA_TASKS if data else ())]


def fingerprint(*parts: Any) -> str:
    """A hash of JSON-ready values, as sixteen hexadecimal digits."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
