"""Counting: how many sentences of a text report the same thing?

After Counting-Stars, Song et al. (2024), arXiv:2403.11802, which asks for the list of all numbers that are scattered
over a text. Here the answer is one number, which must be aggregated; one of eight is right by chance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from ctxext.evals.hidden import Hidden, HiddenSentences
from ctxext.evals.samples import register_task

BIRDS = ("owl", "eagle", "swan", "crow", "hawk", "duck", "robin", "stork", "goose", "raven")
PLACES = (
    "lighthouse", "bakery", "orchard", "theatre", "brewery", "museum", "quarry", "windmill", "stadium", "monastery",
    "station", "market", "cellar", "meadow", "fountain", "bridge",
)  # fmt: skip


@register_task
@dataclass(frozen=True)
class Counting(HiddenSentences):
    """How many owls did the keeper see?

    Attributes:
        most: the largest right answer; answers are from 2 to `most`, equally likely.
        sentences: the hidden sentences in all; the others are about other birds.
    """

    name: ClassVar[str] = "counting"
    uses_depth: ClassVar[bool] = False
    metric: ClassVar[str] = "numbers"
    intro = (
        "The keeper reports on birds in the text below. Read it well: I will ask you how many there were of one kind."
    )
    phrase = re.compile(r"\bkeeper\s+saw\b", re.IGNORECASE)

    most: int = 9
    sentences: int = 12

    def __post_init__(self) -> None:
        if not 2 <= self.most < self.sentences <= len(PLACES):
            raise ValueError(
                f"most must be >= 2 and less than sentences, which must be <= {len(PLACES)}, got most={self.most} and "
                f"sentences={self.sentences}."
            )

    def hide(self, words: Random, answers: Random) -> Hidden:
        bird, *others = words.sample(BIRDS, len(BIRDS))
        places = words.sample(PLACES, self.sentences)
        count = answers.randint(2, self.most)
        seen = answers.sample(
            [bird] * count + [words.choice(others) for _ in range(self.sentences - count)], len(places)
        )
        return Hidden(
            sentences=tuple(f"At the {at} the keeper saw the {kind}." for kind, at in zip(seen, places)),
            references=(str(count),),
            question=f"How many times did the keeper see the {bird}? Answer in digits.",
            lead=f" The number of times that the keeper saw the {bird} is",
        )
