"""Prompts that fill a length: what RULER's tasks have in common.

A task writes a `Draft` from a number of units (tokens of text, lines, words, documents). In mode "exact" that
number is estimated from short drafts and corrected once a whole prompt has been read, and what is left over is
filled with the end of one unit more. In mode "nvidia" it is found as NVIDIA's code finds it.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from random import Random
from typing import Any, ClassVar, Literal

from ctxext.evals.haystack import Haystack, words_in
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, RetrievalTask, Sample
from ctxext.evals.words import nvidia_words, own_words

# Where a draft leaves room, before its haystack and at its end; no tokenizer ever sees them.
GAP, REST = "\0", "\1"


@dataclass(frozen=True, eq=False)
class Scene:
    """All that a sample depends on beside its task."""

    place: Place
    prompter: Prompter
    haystack: Haystack


@dataclass(frozen=True)
class Draft:
    """A prompt with room for a few tokens.

    Attributes:
        text: what the user says, with a `GAP` and a `REST` where there is room; `example` comes before it.
        question, lead, references, needles: as in `Sample`.
        fills: what may go to the gap: groups of texts, better ones first, each from the longest to the shortest.
        rests: what may go to the rest. None of them is needed.
    """

    text: str
    question: str
    lead: str
    references: tuple[str, ...]
    needles: tuple[str, ...] = ()
    example: str = ""
    fills: tuple[tuple[str, ...], ...] = (("",),)
    rests: tuple[str, ...] = ("",)

    def filled(self, fill: str = "", rest: str = "") -> str:
        return self.text.replace(GAP, fill).replace(REST, rest)

    def extra(self, prompter: Prompter, mark: str, filling: str) -> int:
        """The tokens of what goes to a mark, measured where it is."""
        before, _, after = self.text.partition(mark)
        around = before[-40:] + mark + after[:40]
        return len(prompter.encode(around.replace(mark, filling).replace(GAP, "").replace(REST, "")))


@dataclass(frozen=True, kw_only=True)
class RulerTask(RetrievalTask):
    """One of RULER's tasks.

    Attributes:
        compat: "exact" - the length counts every token, those of BOS, chat template and answer too; "nvidia" -
            sized and scored as NVIDIA's code does it, to compare with published numbers.
    """

    uses_depth: ClassVar[bool] = False
    tokens_to_generate: ClassVar[int]
    metric: ClassVar[Literal["all", "part"]] = "all"

    name: str  # type: ignore[misc]  # an instance's: one class has several tasks
    compat: Literal["exact", "nvidia"] = "exact"

    def __post_init__(self) -> None:
        if self.compat not in ("exact", "nvidia"):
            raise ValueError(f"compat must be 'exact' or 'nvidia', got {self.compat!r}.")

    @abstractmethod
    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """A prompt with that many units of haystack."""

    @abstractmethod
    def fewest(self, scene: Scene) -> int:
        """The smallest number of units that makes a prompt in mode "exact"."""

    @abstractmethod
    def step(self, length: int) -> int:
        """NVIDIA's `incremental`: the smallest number of units that it tries, and by how many it goes down."""

    @property
    def one_answer(self) -> bool:
        """Whether there is one way to write the answer, so that teacher forcing can score it."""
        return False

    @property
    def exact(self) -> bool:
        return self.compat == "exact"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "words": (own_words() if self.exact else nvidia_words()).source}

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        scene = Scene(place, prompter, haystack.for_length(place.length))
        return self._fitted(scene) if self.exact else self._as_nvidia(scene)

    def right_answer(self, scene: Scene, draft: Draft) -> str:
        """The answer as it is to be written behind the lead, by which the room for it is measured."""
        return " " + ", ".join(draft.references)

    def prompt(self, scene: Scene, draft: Draft, fill: str = "", rest: str = "") -> str:
        """The whole prompt. NVIDIA's code puts the lead behind any chat template, as it is, spaces included."""
        prompter, body = scene.prompter, draft.example + draft.filled(fill, rest)
        return prompter.prompt(body, draft.lead) if self.exact else prompter.asked(body) + self._prefix(scene, draft)

    def _prefix(self, scene: Scene, draft: Draft) -> str:
        # A lead would stand within the thoughts.
        return "" if scene.prompter.style == "thinking" else draft.lead

    def budget(self, scene: Scene, draft: Draft) -> int:
        """Tokens for a generated answer: RULER's number, and more where the style or the right answer needs it."""
        if self.exact or scene.prompter.style == "thinking":
            return max(self.tokens_to_generate, scene.prompter.room(draft.lead, self.right_answer(scene, draft)))
        return self.tokens_to_generate

    def begun(self, scene: Scene, draft: Draft) -> tuple[str, str]:
        """The lead, and the answer that teacher forcing scores; "" where the answer is generated."""
        if not (self.exact and self.one_answer):
            return draft.lead, ""
        lead, answer = scene.prompter.divided(draft.lead, f" {draft.references[0]}")
        return lead, answer if scene.prompter.answer_tokens is None else ""

    def _write(self, scene: Scene, draft: Draft, fill: str, rest: str) -> Sample:
        prompter, (lead, answer) = scene.prompter, self.begun(scene, draft)
        prompt = self.prompt(scene, replace(draft, lead=lead), fill, rest)
        # A long prompt is read once; how its answer is cut into tokens shows at its end.
        end, n_end = prompter.with_answer(prompt[-256:], answer)
        read = prompter.tokenizer(prompt + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = [*prompter.special, *read["input_ids"]]
        n_prompt = len(ids) - (len(end) - n_end)
        starts = [start for start, _ in read["offset_mapping"]]
        needles = [prompt.index(needle) for needle in draft.needles]
        return Sample(
            place=scene.place,
            body=draft.example + draft.filled(fill, rest),
            lead=lead,
            question=draft.question,
            references=draft.references,
            metric=self.metric,
            answer=answer,
            input_ids=tuple(ids),
            n_prompt=n_prompt,
            answer_tokens=scene.place.length - n_prompt if self.exact else self.budget(scene, draft),
            begun=prompter.begins if self.exact else bool(self._prefix(scene, draft)),
            needles=draft.needles,
            needle_tokens=tuple(len(prompter.special) + bisect_right(starts, char) - 1 for char in needles),
        )

    # ------------------------------------------------------------------------------------ exact

    def _fitted(self, scene: Scene) -> Sample:
        # A tokenizer may be unable to make this very length of what was drawn.
        said = False
        for attempt in range(32):
            sample = self._fit(scene, str(attempt))
            if sample is not None and not (said := self.said_elsewhere(sample)):
                return sample
        if said:
            raise ValueError(self._ambiguous(scene))
        raise ValueError(
            f"{self.name}: found no prompt of exactly {scene.place.length} tokens. Pass another length or text."
        )

    def said_elsewhere(self, sample: Sample) -> bool:
        """Whether the text has words of a needle's, so that the question has more than one answer."""
        return False

    def _ambiguous(self, scene: Scene) -> str:
        return (
            f"{self.name}: the text {scene.haystack.name} has the words of the needle itself, so the question would "
            "have more than one answer. Pass another text."
        )

    def _fit(self, scene: Scene, attempt: str) -> Sample | None:
        length = scene.place.length

        @cache
        def write(units: int) -> Draft:
            return self.draft(scene, scene.place.rng("draft", attempt), units)

        @cache
        def spare(units: int) -> int:
            """Tokens left over, if as little as possible goes to the gap."""
            draft = write(units)
            lead, answer = self.begun(scene, draft)
            prompt = self.prompt(scene, replace(draft, lead=lead), draft.fills[0][-1])
            return length - len(scene.prompter.encode(prompt + answer)) - (0 if answer else self.budget(scene, draft))

        fewest = self.fewest(scene)
        if spare(fewest) < 0:
            raise ValueError(
                f"a {self.name} prompt needs at least {length - spare(fewest)} tokens with this tokenizer, "
                f"got {length}. Leave it out of lengths=."
            )
        units = _search(spare, fewest, _gap(write(fewest), scene.prompter), length / 2048)
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
        units = _nvidia_units(self, length, scene.place.seed, scene.prompter, scene.haystack)
        rng, step = scene.place.rng("draft"), self.step(length)
        # NVIDIA's loop has no end where nothing fits.
        for _ in range(100):
            draft = self.draft(scene, rng, units)
            prompt_tokens = bare_tokens(scene.prompter, self.prompt(scene, draft))
            if prompt_tokens + self.budget(scene, draft) <= length:
                sample = self._write(scene, draft, "", "")
                if self.said_elsewhere(sample):  # NVIDIA's essays are always the beginning of the text
                    raise ValueError(self._ambiguous(scene))
                return sample
            units = units - step if units > step else units
        raise ValueError(
            f"{self.name}: NVIDIA's code makes no prompt shorter than {units} units, and that is longer than "
            f"{length}. Leave it out of lengths=, or set compat='exact'."
        )

    def nvidia_units(self, scene: Scene) -> int:
        """NVIDIA's search, over prompts that are drawn again each time; it counts all but BOS."""
        rng, length = scene.place.rng("size"), scene.place.length

        def counted(units: int) -> tuple[int, int]:
            return self.nvidia_tokens(scene, self.draft(scene, rng, units))

        most = self.nvidia_most(length, lambda units: counted(units)[0])
        return nvidia_search(lambda units: sum(counted(units)), length, self.step(length), most)

    def nvidia_tokens(self, scene: Scene, draft: Draft) -> tuple[int, int]:
        """What that search takes to grow with the units, and what it leaves room for beside that."""
        return bare_tokens(scene.prompter, self.prompt(scene, draft)), self.budget(scene, draft)

    def nvidia_most(self, length: int, count: Callable[[int], int]) -> int:
        """The upper end of that search: three times what a short prompt lets expect."""
        return int(length / (count(self.step(length)) / self.step(length)) * 3)


@lru_cache(maxsize=64)
def _nvidia_units(task: RulerTask, length: int, seed: int, prompter: Prompter, haystack: Haystack) -> int:
    """Searched for once: NVIDIA's samples of one length have the same number of units."""
    return task.nvidia_units(Scene(Place(task.name, length, None, 0, seed), prompter, haystack))


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
    """A number of units that leaves over no more than goes to the gap; else the largest that fits.

    Args:
        spare: the tokens left over, fewer with more units. It reads a whole prompt, so it is asked seldom: what
            a unit takes is measured on a short prompt, and then on the last two.
        gap: the tokens that can go to the gap. Where there is none, less than a unit may be left over, or `little`.
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


def _gap(draft: Draft, prompter: Prompter) -> int:
    """By how many tokens what goes to the gap can be longer than it need be."""
    most, least = draft.fills[0][0], draft.fills[0][-1]
    return draft.extra(prompter, GAP, most) - draft.extra(prompter, GAP, least)


def _fillings(draft: Draft, prompter: Prompter, spare: int) -> Iterator[tuple[str, str]]:
    """What may go to gap and rest, so that it takes `spare` tokens more than the least that may go there."""
    least = draft.extra(prompter, GAP, draft.fills[0][-1])
    bare = draft.extra(prompter, REST, "")

    def size(fill: str) -> int:
        return draft.extra(prompter, GAP, fill)

    for fills in draft.fills:
        for rest in draft.rests:
            wanted = least + spare - (draft.extra(prompter, REST, rest) - bare)
            # A shorter text has hardly ever more tokens.
            near = bisect_left(fills, -wanted, key=lambda fill: -size(fill))
            yield from ((fill, rest) for fill in fills[max(0, near - 4) : near + 5] if size(fill) == wanted)


def tails(text: str, start: str | None = None) -> tuple[str, ...]:
    """The ends of a text, from the longest to the shortest, that begin where `start` does: by default with a word."""
    begins = [a for a, _ in words_in(text)] if start is None else [match.start() for match in re.finditer(start, text)]
    return tuple(text[a:] for a in begins)
