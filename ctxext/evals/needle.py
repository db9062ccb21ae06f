"""Numbers hidden in natural text: passkey, one needle, several needles, and needles with distractors.

The passkey task of Mohtashami and Jaggi (2023), "Landmark Attention", without the defects of its copies: prompts have
exactly the requested number of tokens for any tokenizer, the number is between two sentences, every trial has its own
text, and every sample is a function of its place and seed alone.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from random import Random
from typing import ClassVar, NamedTuple

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, RetrievalTask, Sample, Scene, TooShort, register_task, written
from ctxext.evals.words import distinct

OWNERS = (
    "lighthouse", "bakery", "observatory", "harbour", "library", "orchard", "theatre", "railway", "brewery",
    "museum", "quarry", "windmill", "embassy", "stadium", "monastery", "laboratory",
)  # fmt: skip


@dataclass(frozen=True)
class Hidden:
    """The hidden sentences of a sample, the first at the requested depth, and its question."""

    sentences: tuple[str, ...]
    numbers: tuple[str, ...]
    question: str
    lead: str

    def size(self, prompter: Prompter) -> int:
        """Its size in tokens, ignoring merges with the surrounding text."""
        return len(prompter.encode(" ".join((*self.sentences, self.question + self.lead, *self.numbers))))


class Window(NamedTuple):
    """What all depths of a trial share, including the text before their needles.

    Attributes:
        start, end: the text, in characters.
        others: the places of all needles but the first.
        size: the tokens of the hidden sentences and the question.
        breaks: extra line breaks before the question, to reach the length in texts where every character has as many
            tokens.
    """

    start: int
    end: int
    others: tuple[int, ...]
    size: int
    breaks: int


class HiddenNumbers(RetrievalTask):
    """Number sentences inserted between the sentences of a text."""

    looks_up: ClassVar[bool] = True
    intro: ClassVar[str]
    # What the haystack must not contain.
    phrase: ClassVar[re.Pattern[str]]
    digits: int

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"digits must be >= 1, got {self.digits}.")

    @abstractmethod
    def hide(self, words: Random, numbers: Random) -> Hidden:
        """The needles; `words` draws what all depths of a trial share, `numbers` the numbers."""

    def number(self, rng: Random) -> str:
        return str(rng.randrange(10 ** (self.digits - 1), 10**self.digits))

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        scene, said = Scene(place, prompter, haystack.for_length(place.length)), False
        # If no sentence of the trial's window fits, use another window, without a shared prefix.
        for attempt in range(8):
            window = _trial_window(self, replace(scene, place=replace(place, depth=None)), attempt)
            said = self.phrase.search(scene.haystack.text, window.start, window.end) is not None
            if not said and (sample := self._fit(scene, window)) is not None:
                return sample
        if said:
            raise self.ambiguous(haystack)
        raise ValueError(
            f"{self.name}: cannot make a prompt of exactly {place.length} tokens at depth {place.depth:g}. "
            "Pass another text."
        )

    def _fit(self, scene: Scene, window: Window) -> Sample | None:
        """The sample in this window, exact in tokens, with its first needle as near to the depth as possible."""
        place, prompter, size = scene.place, scene.prompter, window.size
        assert place.depth is not None
        numbers = place.rng("numbers")
        # Numbers may differ in tokens: draw until they fit the trial's window.
        for _ in range(400):
            hidden = self.hide(place.rng("words", depth=False), numbers)
            if hidden.size(prompter) != size:
                continue
            for cut in islice(scene.haystack.cuts(window.start, window.end, place.depth), 24):
                sample = self._write(scene, window, cut, hidden)
                excess = sample.n_prompt + sample.answer_tokens - place.length
                if excess == 0:
                    return sample
            size -= excess  # sentences merge differently here than where the window was sized
        return None

    def _write(self, scene: Scene, window: Window, first: int, hidden: Hidden) -> Sample:
        """The sample with its first needle at the character `first`."""
        prompter, text = scene.prompter, scene.haystack.text
        context, done = "", window.start
        for cut, sentence in sorted(zip((first, *window.others), hidden.sentences)):
            context += f"{text[done:cut]} {sentence}"
            done = cut
        context += text[done : window.end]
        intro = "" if prompter.style == "base" else self.intro + "\n\n"
        body = intro + context + "\n" * (2 + window.breaks) + hidden.question
        right = " " + ", ".join(hidden.numbers)
        lead, answer = prompter.divided(hidden.lead, right)
        return written(
            scene,
            prompter.prompt(body, lead),
            answer if prompter.answer_tokens is None else "",
            prompter.room(hidden.lead, right),
            needles=hidden.sentences,
            body=body,
            lead=lead,
            question=hidden.question,
            references=hidden.numbers,
            metric="numbers",
            begun=prompter.begins,
            start=scene.haystack.token_at(window.start) % scene.haystack.n_tokens,
        )


@lru_cache(maxsize=256)
def _trial_window(task: HiddenNumbers, scene: Scene, attempt: int) -> Window:
    """The window of a trial; the place of `scene` has no depth."""
    rng = scene.place.rng("window", str(attempt))
    for breaks in (*[0] * 8, *[1, 2, 3, 4, 5] * 2):
        # Numbers with other tokens may fit where the first ones did not.
        hidden = task.hide(scene.place.rng("words", depth=False), rng)
        if (window := _window_for(hidden, breaks, task, scene, rng)) is not None:
            return window
    raise ValueError(
        f"found no window of this text that makes a {task.name} prompt of exactly {scene.place.length} tokens. "
        "Pass another text."
    )


def _window_for(hidden: Hidden, breaks: int, task: HiddenNumbers, scene: Scene, rng: Random) -> Window | None:
    length, haystack, size = scene.place.length, scene.haystack, hidden.size(scene.prompter)
    depths = [rng.random() for _ in hidden.sentences[1:]]

    def window(start: int, end: int) -> Window:
        return Window(start, end, tuple(next(haystack.cuts(start, end, depth)) for depth in depths), size, breaks)

    def count(start: int, end: int) -> int:
        sample = task._write(scene, window(start, end), next(haystack.cuts(start, end, 0.5)), hidden)
        return sample.n_prompt + sample.answer_tokens

    needed = count(haystack.sentence_ends[0], haystack.sentence_ends[0])
    if length <= needed:
        raise TooShort(f"a {task.name} prompt needs at least {needed + 1} tokens with this tokenizer, got {length}.")
    found = haystack.exact_window(length, length - needed, count, rng)
    return found and window(*found)


@register_task
@dataclass(frozen=True)
class Passkey(HiddenNumbers):
    """A number called the pass key, stated twice. Mohtashami and Jaggi (2023)."""

    name: ClassVar[str] = "passkey"
    intro: ClassVar[str] = (
        "There is a pass key hidden in the text below. Find it and memorise it: I will ask you about it."
    )
    phrase: ClassVar[re.Pattern[str]] = re.compile(r"\bpass[\s-]*key", re.IGNORECASE)

    digits: int = 5

    def hide(self, words: Random, numbers: Random) -> Hidden:
        key = self.number(numbers)
        return Hidden(
            sentences=(f"The pass key is {key}. Remember it. {key} is the pass key.",),
            numbers=(key,),
            question="What is the pass key?",
            lead=" The pass key is",
        )


@register_task
@dataclass(frozen=True)
class Needle(HiddenNumbers):
    """Sentences that give a person a number, retrieved by the person. After Kamradt (2023) and RULER.

    Attributes:
        needles: the number of sentences in the question; the first is at the depth, the others anywhere.
        distractors: further sentences of the same form, not in the question.
    """

    name: ClassVar[str] = "needle"
    intro: ClassVar[str] = (
        "Some special numbers are hidden in the text below. Memorise them: I will ask you about them."
    )
    phrase: ClassVar[re.Pattern[str]] = re.compile(r"\bspecial\s+numbers?\b", re.IGNORECASE)

    needles: int = 1
    distractors: int = 0
    digits: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.needles >= 1 and self.distractors >= 0 and self.needles + self.distractors <= len(OWNERS)):
            raise ValueError(
                f"needles must be >= 1, distractors >= 0 and both together <= {len(OWNERS)}, "
                f"got {self.needles} and {self.distractors}."
            )
        if self.needles + self.distractors > 9 * 10 ** (self.digits - 1):
            raise ValueError(
                f"there are only {9 * 10 ** (self.digits - 1)} different numbers of {self.digits} digits, got "
                f"{self.needles + self.distractors} needles and distractors. Pass more digits."
            )

    def hide(self, words: Random, numbers: Random) -> Hidden:
        owners = words.sample(OWNERS, self.needles + self.distractors)
        drawn = list(islice(distinct(lambda: self.number(numbers)), len(owners)))
        asked = [f"the {owner}" for owner in owners[: self.needles]]
        if len(asked) == 1:
            subject, verb = f"the special number of {asked[0]}", "is"
        else:
            subject, verb = f"the special numbers of {', '.join(asked[:-1])} and {asked[-1]}, in this order,", "are"
        return Hidden(
            sentences=tuple(f"The special number of the {o} is {n}." for o, n in zip(owners, drawn)),
            numbers=tuple(drawn[: self.needles]),
            question=f"What {verb} {subject.removesuffix(',')}?",
            lead=f" {subject.capitalize()} {verb}",
        )


@register_task
@dataclass(frozen=True)
class Needles(Needle):
    """Four needles in one question."""

    name: ClassVar[str] = "needles"
    needles: int = 4


@register_task
@dataclass(frozen=True)
class NeedleAmongDistractors(Needle):
    """One needle among seven sentences of the same form."""

    name: ClassVar[str] = "needle_distractors"
    distractors: int = 7
