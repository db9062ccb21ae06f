"""Numbers hidden in text: passkey, one needle, several needles, and needles with distractors, in several languages.

The passkey task of Mohtashami and Jaggi (2023), "Landmark Attention", without the defects of its copies: prompts have
exactly the requested number of tokens for any tokenizer, the number is between two sentences, every trial has its own
text, and every sample is a function of its place and seed alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar

from ctxext.evals.hidden import Hidden, HiddenNumbers
from ctxext.evals.languages import Wording, wording
from ctxext.evals.samples import register_task
from ctxext.evals.words import distinct


class WordedNumbers(HiddenNumbers):
    """Numbers in the words of a language."""

    worded: ClassVar[str]
    language: str

    def __post_init__(self) -> None:
        super().__post_init__()
        wording(self.language, self.worded)  # raises for an unknown language

    @property
    def wording(self) -> Wording:
        return wording(self.language, self.worded)

    @property
    def intro(self) -> str:  # type: ignore[override]
        return self.wording.intro

    @property
    def phrase(self) -> re.Pattern[str]:  # type: ignore[override]
        return re.compile(self.wording.phrase)

    @property
    def joint(self) -> str:  # type: ignore[override]
        return self.wording.joint


@register_task
@dataclass(frozen=True)
class Passkey(WordedNumbers):
    """A number called the pass key, stated twice. Mohtashami and Jaggi (2023).

    Attributes:
        language: of the hidden sentence and the question (`languages.toml`); "code" for a constant.
    """

    name: ClassVar[str] = "passkey"
    worded: ClassVar[str] = "passkey"

    digits: int = 5
    language: str = "en"

    def hide(self, words: Random, answers: Random) -> Hidden:
        key, say = self.number(answers), self.wording
        return Hidden((say.sentence.format(number=key),), (key,), say.question, say.lead)


@register_task
@dataclass(frozen=True)
class Needle(WordedNumbers):
    """Sentences that give a person a number, retrieved by the person. After Kamradt (2023) and RULER.

    Attributes:
        needles: the number of sentences in the question; the first is at the depth, the others anywhere.
        distractors: further sentences of the same form, not in the question.
        language: as in `Passkey`.
    """

    name: ClassVar[str] = "needle"
    worded: ClassVar[str] = "needle"

    needles: int = 1
    distractors: int = 0
    digits: int = 7
    language: str = "en"

    def __post_init__(self) -> None:
        super().__post_init__()
        owners = self.wording.owners
        if not (self.needles >= 1 and self.distractors >= 0 and self.needles + self.distractors <= len(owners)):
            raise ValueError(
                f"needles must be >= 1, distractors >= 0 and both together <= {len(owners)}, "
                f"got {self.needles} and {self.distractors}."
            )
        if self.needles + self.distractors > 9 * 10 ** (self.digits - 1):
            raise ValueError(
                f"there are only {9 * 10 ** (self.digits - 1)} different numbers of {self.digits} digits, got "
                f"{self.needles + self.distractors} needles and distractors. Pass more digits."
            )

    def hide(self, words: Random, answers: Random) -> Hidden:
        say = self.wording
        owners = words.sample(say.owners, self.needles + self.distractors)
        drawn = list(islice(distinct(lambda: self.number(answers)), len(owners)))
        *first, final = owners[: self.needles]
        asked = f"{say.between.join(first)}{say.last}{final}" if first else final
        question, lead = (say.question_several, say.lead_several) if first else (say.question, say.lead)
        return Hidden(
            sentences=tuple(say.sentence.format(owner=owner, number=number) for owner, number in zip(owners, drawn)),
            references=tuple(drawn[: self.needles]),
            question=question.format(owners=asked),
            lead=lead.format(owners=asked),
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
