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
from typing import ClassVar

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, RetrievalTask, Sample, register_task
from ctxext.evals.words import distinct

OWNERS = (
    "lighthouse", "bakery", "observatory", "harbour", "library", "orchard", "theatre", "railway", "brewery",
    "museum", "quarry", "windmill", "embassy", "stadium", "monastery", "laboratory",
)  # fmt: skip


@dataclass(frozen=True)
class Hidden:
    """The hidden sentences of a sample, the first at the requested depth, and its question.

    Attributes:
        breaks: extra line breaks before the question, to reach the length in texts where every character has as many
            tokens.
    """

    sentences: tuple[str, ...]
    numbers: tuple[str, ...]
    question: str
    lead: str
    breaks: int = 0

    def size(self, prompter: Prompter) -> int:
        """Its tokens, apart from how it merges with the surrounding text."""
        return len(prompter.encode(" ".join((*self.sentences, self.question + self.lead, *self.numbers))))


class HiddenNumbers(RetrievalTask):
    """Number sentences inserted between the sentences of a text."""

    looks_up: ClassVar[bool] = True
    intro: ClassVar[str]
    # Phrases that the haystack must not contain.
    phrase: ClassVar[re.Pattern[str]]

    @abstractmethod
    def hide(self, words: Random, numbers: Random) -> Hidden:
        """The needles; `words` draws what all depths of a trial share, `numbers` the numbers."""

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        # If no sentence of the trial's window fits, use another window, without a shared prefix.
        haystack, said = haystack.for_length(place.length), False
        for attempt in range(8):
            window = _trial_window(self, place.length, place.trial, place.seed, attempt, prompter, haystack)
            if said := haystack.says(self.phrase, *window[:2]):
                continue
            sample = self._fit(place, prompter, haystack, *window)
            if sample is not None:
                return sample
        if said:
            raise ValueError(
                f"{self.name}: the text {haystack.name} has the words of the needle itself, so the question would have "
                "more than one answer. Pass another text."
            )
        raise ValueError(
            f"{self.name}: no prompt of exactly {place.length} tokens at depth {place.depth:g}. Pass another text."
        )

    def _fit(
        self,
        place: Place,
        prompter: Prompter,
        haystack: Haystack,
        start: int,
        end: int,
        others: tuple[int, ...],
        size: int,
        breaks: int,
    ) -> Sample | None:
        """The sample in this window, exact in tokens, with its first needle as near to the depth as possible."""
        assert place.depth is not None
        numbers = place.rng("numbers")
        drawn = (replace(self.hide(_words(place), numbers), breaks=breaks) for _ in range(400))
        for hidden in drawn:
            # Numbers may differ in tokens: draw until they fit the trial's window.
            if hidden.size(prompter) != size:
                continue
            for cut in islice(haystack.cuts(start, end, place.depth), 24):
                sample = self._write(place, prompter, haystack, start, end, (cut, *others), hidden)
                excess = sample.n_prompt + sample.answer_tokens - place.length
                if excess == 0:
                    prompt = prompter.prompt(sample.body, sample.lead)
                    begins = [prompt.index(sentence) for sentence in sample.needles]
                    return replace(sample, needle_tokens=prompter.tokens_at(prompt, begins))
            size -= excess  # sentences merge differently here than where the window was sized
        return None

    def _write(
        self,
        place: Place,
        prompter: Prompter,
        haystack: Haystack,
        start: int,
        end: int,
        cuts: tuple[int, ...],
        hidden: Hidden,
    ) -> Sample:
        pieces, done = [], start
        for cut, sentence in sorted(zip(cuts, hidden.sentences)):
            pieces += [haystack.text[done:cut], " ", sentence]
            done = cut
        context = "".join((*pieces, haystack.text[done:end]))
        intro = "" if prompter.style == "base" else self.intro + "\n\n"
        body = intro + context + "\n" * (2 + hidden.breaks) + hidden.question
        right = " " + ", ".join(hidden.numbers)
        lead, answer = prompter.divided(hidden.lead, right)
        answer = answer if prompter.answer_tokens is None else ""
        ids, n_prompt = prompter.with_answer(prompter.prompt(body, lead), answer)
        return Sample(
            place=place,
            body=body,
            lead=lead,
            question=hidden.question,
            references=hidden.numbers,
            metric="numbers",
            answer=answer,
            input_ids=tuple(ids),
            n_prompt=n_prompt,
            answer_tokens=len(ids) - n_prompt if answer else prompter.room(hidden.lead, right),
            begun=prompter.begins,
            needles=hidden.sentences,
        )


@lru_cache(maxsize=256)
def _trial_window(
    task: HiddenNumbers, length: int, trial: int, seed: int, attempt: int, prompter: Prompter, haystack: Haystack
) -> tuple[int, int, tuple[int, ...], int, int]:
    """What all depths of a trial share, including the text before their needles.

    The window of text in characters, the places of all needles but the first, the needles' tokens, and the extra line
    breaks.
    """
    place = Place(task.name, length, None, trial, seed)
    rng = place.rng("window", str(attempt))
    for breaks in (*[0] * 8, *[1, 2, 3, 4, 5] * 2):
        # Numbers with other tokens may fit where the first ones did not.
        hidden = replace(task.hide(_words(place), rng), breaks=breaks)
        window = _window_for(hidden, task, place, rng, prompter, haystack)
        if window is not None:
            return (*window, hidden.size(prompter), breaks)
    raise ValueError(
        f"found no window of this text that makes a {task.name} prompt of exactly {length} tokens. Pass another text."
    )


def _window_for(
    hidden: Hidden, task: HiddenNumbers, place: Place, rng: Random, prompter: Prompter, haystack: Haystack
) -> tuple[int, int, tuple[int, ...]] | None:
    others = tuple(rng.random() for _ in hidden.sentences[1:])

    def cuts(start: int, end: int) -> tuple[int, ...]:
        return tuple(next(haystack.cuts(start, end, depth)) for depth in (0.5, *others))

    def count(start: int, end: int) -> int:
        sample = task._write(place, prompter, haystack, start, end, cuts(start, end), hidden)
        return sample.n_prompt + sample.answer_tokens

    needed = count(haystack.sentence_ends[0], haystack.sentence_ends[0])
    if place.length <= needed:
        raise ValueError(
            f"a {task.name} prompt needs at least {needed + 1} tokens, got {place.length}. Leave it out of lengths=."
        )
    window = haystack.exact_window(place.length, place.length - needed, count, rng)
    return window and (*window, cuts(*window)[1:])


def _words(place: Place) -> Random:
    return place.rng("words", depth=False)


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

    def __post_init__(self) -> None:
        _check_digits(self.digits)

    def hide(self, words: Random, numbers: Random) -> Hidden:
        key = _number(numbers, self.digits)
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
        if not (self.needles >= 1 and self.distractors >= 0 and self.needles + self.distractors <= len(OWNERS)):
            raise ValueError(
                f"needles must be >= 1, distractors >= 0 and both together <= {len(OWNERS)}, "
                f"got {self.needles} and {self.distractors}."
            )
        _check_digits(self.digits)
        if self.needles + self.distractors > 9 * 10 ** (self.digits - 1):
            raise ValueError(
                f"there are only {9 * 10 ** (self.digits - 1)} different numbers of {self.digits} digits, got "
                f"{self.needles + self.distractors} needles and distractors. Pass more digits."
            )

    def hide(self, words: Random, numbers: Random) -> Hidden:
        owners = words.sample(OWNERS, self.needles + self.distractors)
        drawn = list(islice(distinct(lambda: _number(numbers, self.digits)), len(owners)))
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


def _check_digits(digits: int) -> None:
    if digits < 1:
        raise ValueError(f"digits must be >= 1, got {digits}.")


def _number(rng: Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))
