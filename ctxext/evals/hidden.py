"""Tasks that hide sentences in a text and ask about them: prompts of exactly the requested number of tokens.

The sentences are between those of the text, the first at the requested depth, in tokens; every trial has its own text,
and every sample is a function of its place and seed alone.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from random import Random
from typing import ClassVar, NamedTuple

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, RetrievalTask, Sample, Scene, TooShort, written


@dataclass(frozen=True)
class Hidden:
    """The hidden sentences of a sample, the first at the requested depth, and its question.

    Attributes:
        references, lead, rivals: as in `Sample`.
        taken: what the whole text must not contain, so that the question has one answer.
    """

    sentences: tuple[str, ...]
    references: tuple[str, ...]
    question: str
    lead: str
    rivals: tuple[str, ...] = ()
    taken: re.Pattern[str] | None = None

    def size(self, prompter: Prompter) -> int:
        """Its size in tokens, ignoring merges with the surrounding text."""
        return len(prompter.encode(" ".join((*self.sentences, self.question + self.lead, *self.references))))


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


class HiddenSentences(RetrievalTask):
    """Sentences inserted between those of a text.

    Attributes:
        intro: what a chat prompt begins with.
        phrase: what the text around the sentences must not contain.
        joint: what comes before each hidden sentence.
    """

    metric: ClassVar[str] = "first"
    intro: str
    phrase: re.Pattern[str] | None = None
    joint: str = " "

    @abstractmethod
    def hide(self, words: Random, answers: Random) -> Hidden:
        """The needles; `words` draws what all depths of a trial share, `answers` the rest."""

    def opening(self, prompter: Prompter) -> str:
        """What comes before the text."""
        return "" if prompter.style == "base" else self.intro + "\n\n"

    def asked(self, hidden: Hidden, order: list[int]) -> Hidden:
        """The same sentences, with a question that depends on their `order` in the text."""
        return hidden

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        scene, said = Scene(place, prompter, haystack.for_length(place.length)), True
        # If no sentence of the trial's window fits, use another window, without a shared prefix.
        for attempt in islice(self._attempts(place, haystack), 8):
            window = _trial_window(self, replace(scene, place=replace(place, depth=None)), attempt)
            said = self.phrase is not None and bool(self.phrase.search(scene.haystack.text, window.start, window.end))
            if not said and (sample := self._fit(scene, window, attempt)) is not None:
                return sample
        if said:
            raise self.ambiguous(haystack)
        raise ValueError(
            f"{self.name}: cannot make a prompt of exactly {place.length} tokens"
            f"{'' if place.depth is None else f' at depth {place.depth:g}'}. Pass another text."
        )

    def _attempts(self, place: Place, haystack: Haystack) -> Iterator[int]:
        """The attempts whose words the text does not speak of."""
        for attempt in range(64):
            taken = self.hide(_words(place, attempt), place.rng("numbers")).taken
            if taken is None or not _contains(haystack, taken):
                yield attempt

    def _fit(self, scene: Scene, window: Window, attempt: int) -> Sample | None:
        """The sample in this window, exact in tokens, with its first needle as near to the depth as possible."""
        place, prompter, size = scene.place, scene.prompter, window.size
        depth = place.rng("depth").random() if place.depth is None else place.depth
        answers = place.rng("numbers")
        # Answers may differ in tokens: draw until they fit the trial's window.
        for _ in range(400):
            hidden = self.hide(_words(place, attempt), answers)
            if hidden.size(prompter) != size:
                continue
            for cut in islice(scene.haystack.cuts(window.start, window.end, depth), 24):
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
        cuts = (first, *window.others)
        order = sorted(range(len(cuts)), key=lambda k: (cuts[k], hidden.sentences[k]))
        for k in order:
            context += text[done : cuts[k]] + self.joint + hidden.sentences[k]
            done = cuts[k]
        context += text[done : window.end]
        hidden = self.asked(hidden, order)
        body = self.opening(prompter) + context + "\n" * (2 + window.breaks) + hidden.question
        right = " " + ", ".join(hidden.references)
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
            references=hidden.references,
            rivals=hidden.rivals,
            metric=self.metric,
            begun=prompter.begins,
            start=scene.haystack.token_at(window.start) % scene.haystack.n_tokens,
        )


class HiddenNumbers(HiddenSentences):
    """Sentences that give numbers of so many digits."""

    looks_up: ClassVar[bool] = True
    metric: ClassVar[str] = "numbers"
    digits: int

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"digits must be >= 1, got {self.digits}.")

    def number(self, rng: Random) -> str:
        return str(rng.randrange(10 ** (self.digits - 1), 10**self.digits))


def _words(place: Place, attempt: int) -> Random:
    """What draws the words that all depths of a trial share: others if a first attempt failed."""
    return place.rng("words", *([str(attempt)] if attempt else []), depth=False)


@lru_cache(maxsize=256)
def _contains(haystack: Haystack, pattern: re.Pattern[str]) -> bool:
    return pattern.search(haystack.once) is not None


@lru_cache(maxsize=256)
def _trial_window(task: HiddenSentences, scene: Scene, attempt: int) -> Window:
    """The window of a trial; the place of `scene` has no depth."""
    rng = scene.place.rng("window", str(attempt))
    for breaks in (*[0] * 8, *[1, 2, 3, 4, 5] * 2):
        # Answers with other tokens may fit where the first ones did not.
        hidden = task.hide(_words(scene.place, attempt), rng)
        if (window := _window_for(hidden, breaks, task, scene, rng)) is not None:
            return window
    raise ValueError(
        f"found no window of this text that makes a {task.name} prompt of exactly {scene.place.length} tokens. "
        "Pass another text."
    )


def _window_for(hidden: Hidden, breaks: int, task: HiddenSentences, scene: Scene, rng: Random) -> Window | None:
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
