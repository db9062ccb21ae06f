"""Fit RULER's prompts to a length.

A task writes a `Draft` with a number of units (tokens of text, lines, words, documents). In mode "exact", that number
is estimated from short drafts, corrected by whole prompts, and the remaining tokens are filled with the end of one more
unit. In mode "nvidia" it is found as NVIDIA's code finds it.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from random import Random
from typing import Any, ClassVar, Literal

from ctxext.evals.haystack import Haystack, words_in
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, RetrievalTask, Sample, Scene, TooShort, written
from ctxext.evals.words import nvidia_words, own_words

# Where a draft has room, before its haystack and at its end. Replaced before any tokenizer sees them.
GAP, REST = "\0", "\1"


@dataclass(frozen=True)
class Draft:
    """A prompt with room for a few tokens.

    Attributes:
        text: the user's message after `example`, with a `GAP` and a `REST` where there is room.
        question, lead, references, needles: as in `Sample`.
        fills: what may replace the gap: groups of texts, better ones first, each from the longest to the shortest.
        rests: what may replace the rest.
    """

    text: str
    question: str
    lead: str
    references: tuple[str, ...]
    needles: tuple[str, ...] = ()
    example: str = ""
    fills: tuple[tuple[str, ...], ...] = (("",),)
    rests: tuple[str, ...] = ("",)

    @classmethod
    def of(cls, template: str, lead: str, context: str, facts: Mapping[str, Any] | None = None, **more: Any) -> Draft:
        """The draft of a template, whose last line is the question, with its `facts` filled in."""
        facts, question = facts or {}, template.rpartition("\n")[2]
        return cls(template.format(context=context, **facts), question.format(**facts), lead.format(**facts), **more)

    def filled(self, fill: str = "", rest: str = "") -> str:
        return self.text.replace(GAP, fill).replace(REST, rest)

    def extra(self, prompter: Prompter, mark: str, filling: str) -> int:
        """The tokens of a text that replaces a mark, together with the text around it."""
        before, _, after = self.text.partition(mark)
        around = before[-40:] + mark + after[:40]
        return len(prompter.encode(around.replace(mark, filling).replace(GAP, "").replace(REST, "")))


@dataclass(frozen=True, kw_only=True)
class RulerTask(RetrievalTask):
    """One of RULER's tasks.

    Attributes:
        compat: "exact" counts every token, including BOS, chat template and answer; "nvidia" sizes and scores as
            NVIDIA's code, to compare with published numbers.
    """

    uses_depth: ClassVar[bool] = False
    tokens_to_generate: ClassVar[int]
    template: ClassVar[str]
    lead: ClassVar[str]
    metric: ClassVar[str] = "all"

    name: str  # type: ignore[misc]  # an instance's: one class has several tasks
    compat: Literal["exact", "nvidia"] = "exact"

    def __post_init__(self) -> None:
        if self.compat not in ("exact", "nvidia"):
            raise ValueError(f"compat must be 'exact' or 'nvidia', got {self.compat!r}.")

    @abstractmethod
    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """A prompt with this number of units of haystack."""

    @abstractmethod
    def fewest(self) -> int:
        """The smallest number of units in mode "exact"."""

    @abstractmethod
    def step(self, length: int) -> int:
        """NVIDIA's `incremental`: the smallest number of units that it tries, and its step down."""

    @property
    def one_answer(self) -> bool:
        """Whether the answer has a single form, so that teacher forcing can score it."""
        return False

    @property
    def exact(self) -> bool:
        return self.compat == "exact"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "words": (own_words() if self.exact else nvidia_words()).source}

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        scene = Scene(place, prompter, haystack.for_length(place.length))
        return self._fitted(scene) if self.exact else self._as_nvidia(scene)

    def right_answer(self, draft: Draft) -> str:
        """The text expected after the lead, with commas, as most models write it. An answer has room for it."""
        return " " + ", ".join(draft.references)

    def prompt(self, scene: Scene, draft: Draft, fill: str = "", rest: str = "") -> str:
        """The whole prompt. NVIDIA's code appends the lead to any chat template unchanged, including its spaces."""
        prompter, body = scene.prompter, draft.example + draft.filled(fill, rest)
        if self.exact:
            return prompter.prompt(body, draft.lead)
        return prompter.asked(body) + draft.lead * self._begins(prompter)

    def _begins(self, prompter: Prompter) -> bool:
        # A thinking model would read NVIDIA's lead as its thought.
        return prompter.begins if self.exact else prompter.style != "thinking"

    def budget(self, scene: Scene, draft: Draft) -> int:
        """Tokens for a generated answer: RULER's number, or more if the style or the right answer needs more."""
        if self.exact or scene.prompter.style == "thinking":
            return max(self.tokens_to_generate, scene.prompter.room(draft.lead, self.right_answer(draft)))
        return self.tokens_to_generate

    def begun(self, scene: Scene, draft: Draft) -> tuple[str, str]:
        """The lead, and the answer that teacher forcing scores; "" if the answer is generated."""
        if not (self.exact and self.one_answer):
            return draft.lead, ""
        lead, answer = scene.prompter.divided(draft.lead, f" {draft.references[0]}")
        return lead, answer if scene.prompter.answer_tokens is None else ""

    def _write(self, scene: Scene, draft: Draft, fill: str, rest: str) -> Sample:
        lead, answer = self.begun(scene, draft)
        return written(
            scene,
            self.prompt(scene, replace(draft, lead=lead), fill, rest),
            answer,
            None if self.exact else self.budget(scene, draft),
            needles=draft.needles,
            body=draft.example + draft.filled(fill, rest),
            lead=lead,
            question=draft.question,
            references=draft.references,
            metric=self.metric,
            begun=self._begins(scene.prompter),
        )

    # ------------------------------------------------------------------------------------ exact

    def _fitted(self, scene: Scene) -> Sample:
        # A tokenizer may be unable to make exactly this length from what was drawn.
        said = False
        for attempt in range(32):
            sample = self._fit(scene, str(attempt))
            if sample is not None and not (said := self.said_elsewhere(sample)):
                return sample
        if said:
            raise self.ambiguous(scene.haystack)
        raise ValueError(
            f"{self.name}: cannot make a prompt of exactly {scene.place.length} tokens. Pass another length or text."
        )

    def said_elsewhere(self, sample: Sample) -> bool:
        """Whether the haystack contains words of a needle, so that the question has more than one answer."""
        return False

    def _fit(self, scene: Scene, attempt: str) -> Sample | None:
        length = scene.place.length

        @cache
        def write(units: int) -> Draft:
            return self.draft(scene, scene.place.rng("draft", attempt), units)

        @cache
        def spare(units: int) -> int:
            """The tokens left over with the shortest fill."""
            draft = write(units)
            lead, answer = self.begun(scene, draft)
            prompt = self.prompt(scene, replace(draft, lead=lead), draft.fills[0][-1])
            return length - len(scene.prompter.encode(prompt + answer)) - (0 if answer else self.budget(scene, draft))

        fewest = self.fewest()
        if spare(fewest) < 0:
            needed = length - spare(fewest)
            raise TooShort(f"a {self.name} prompt needs at least {needed} tokens with this tokenizer, got {length}.")
        draft = write(fewest)
        least, most = (draft.extra(scene.prompter, GAP, draft.fills[0][end]) for end in (-1, 0))
        units = _search(spare, fewest, most - least, length / 2048)
        draft = write(units)
        if GAP not in draft.text:
            return self._write(scene, draft, "", "")
        for fill, rest in _fillings(draft, scene.prompter, spare(units)):
            sample = self._write(scene, draft, fill, rest)
            if len(sample.input_ids) + (0 if sample.answer else self.budget(scene, draft)) == length:
                return sample
        return None

    # ----------------------------------------------------------------------------------- nvidia

    def _as_nvidia(self, scene: Scene) -> Sample:
        length = scene.place.length
        units = _nvidia_units(self, replace(scene, place=replace(scene.place, trial=0)))
        rng, step = scene.place.rng("draft"), self.step(length)
        # NVIDIA's loop never ends if nothing fits.
        for _ in range(100):
            draft = self.draft(scene, rng, units)
            prompt_tokens = bare_tokens(scene.prompter, self.prompt(scene, draft))
            if prompt_tokens + self.budget(scene, draft) <= length:
                sample = self._write(scene, draft, "", "")
                if self.said_elsewhere(sample):  # NVIDIA's essays are always the beginning of the text
                    raise self.ambiguous(scene.haystack)
                return sample
            units = units - step if units > step else units
        raise TooShort(
            f"{self.name}: the shortest prompt of NVIDIA's code, with {units} units, is longer than {length} "
            "tokens (those of compat='exact' are shorter)."
        )

    def nvidia_units(self, scene: Scene) -> int:
        """NVIDIA's search, which draws each prompt anew and counts all tokens but BOS."""
        rng, length = scene.place.rng("size"), scene.place.length

        def counted(units: int) -> tuple[int, int]:
            return self.nvidia_tokens(scene, self.draft(scene, rng, units))

        most = self.nvidia_most(length, lambda units: counted(units)[0])
        return nvidia_search(lambda units: sum(counted(units)), length, self.step(length), most)

    def nvidia_tokens(self, scene: Scene, draft: Draft) -> tuple[int, int]:
        """The tokens that this search assumes to grow with the units, and those that it adds to them."""
        return bare_tokens(scene.prompter, self.prompt(scene, draft)), self.budget(scene, draft)

    def nvidia_most(self, length: int, count: Callable[[int], int]) -> int:
        """The upper end of this search: three times the estimate of a short prompt."""
        return int(length / (count(self.step(length)) / self.step(length)) * 3)


@lru_cache(maxsize=64)
def _nvidia_units(task: RulerTask, scene: Scene) -> int:
    """Searched for once: all of NVIDIA's samples of one length have the same number of units."""
    return task.nvidia_units(scene)


def nvidia_search(count: Callable[[int], int], length: int, step: int, most: int) -> int:
    """The number of units, from `step` to `most`, at which RULER's binary search ends; `step` if nothing fits."""
    low, high, best = step, max(most, 2 * step), step
    while low <= high:
        units = (low + high) // 2
        if count(units) <= length:
            low, best = units + 1, units
        else:
            high = units - 1
    return best


def bare_tokens(prompter: Prompter, text: str) -> int:
    return len(prompter.encode(text)) - len(prompter.special)


def _search(spare: Callable[[int], int], fewest: int, gap: int, little: float) -> int:
    """A number of units that leaves no more tokens than the gap holds, or else the largest that fits.

    Args:
        spare: the tokens left over, fewer with more units. It tokenises a whole prompt, so it is called rarely: the
            tokens per unit are estimated from a short prompt, then from the last two.
        gap: the tokens that the gap holds. If 0, less than a unit or `little` may be left over.
    """
    room = spare(fewest)
    if room <= gap:
        return fewest
    before = fewest + 32
    per_unit = max((room - spare(before)) / 32, 0.1)
    units = fewest + math.floor((room - gap / 2) / per_unit)
    low, high = fewest, math.inf
    while high > low + 1:
        units = int(min(max(units, low + 1), high - 1))
        left = spare(units)
        if abs(units - before) >= 8:
            per_unit = max((spare(before) - left) / (units - before), 0.1)
        if 0 <= left <= (gap or max(little, per_unit - 1)):
            return units
        low, high = (units, high) if left > 0 else (low, units)
        before, units = units, units + math.floor((left - gap / 2) / per_unit)
    return low


def _fillings(draft: Draft, prompter: Prompter, spare: int) -> Iterator[tuple[str, str]]:
    """The pairs of fill and rest that take `spare` tokens more than the shortest."""
    least = draft.extra(prompter, GAP, draft.fills[0][-1])
    bare = draft.extra(prompter, REST, "")

    def size(fill: str) -> int:
        return draft.extra(prompter, GAP, fill)

    for fills in draft.fills:
        for rest in draft.rests:
            wanted = least + spare - (draft.extra(prompter, REST, rest) - bare)
            # A shorter text rarely has more tokens, so sizes are nearly sorted.
            near = bisect_left(fills, -wanted, key=lambda fill: -size(fill))
            yield from ((fill, rest) for fill in fills[max(0, near - 4) : near + 5] if size(fill) == wanted)


def tails(text: str, start: str | None = None) -> tuple[str, ...]:
    """The ends of a text that begin at a match of `start` (None: at a word), from the longest to the shortest."""
    begins = [a for a, _ in words_in(text)] if start is None else [match.start() for match in re.finditer(start, text)]
    return tuple(text[a:] for a in begins)
