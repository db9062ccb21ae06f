"""Needles that share no content word with their question: only knowledge of the world connects the two.

NoLiMa, Modarressi et al. (2025), arXiv:2502.05167: a model cannot find such a needle by matching words. The pairs are
our own; as in NoLiMa, the answer is a person's name, and the text must not contain the names or either side of the
association. NoLiMa's pairs with two steps ("Semper Opera House", "the state of Saxony") are not imitated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from ctxext.evals.hidden import Hidden, HiddenSentences
from ctxext.evals.samples import register_task


class Pair(NamedTuple):
    """What is told of a person, what is asked, and a pattern of words that the whole text must not contain."""

    needle: str
    predicate: str
    taken: str


PAIRS = (
    Pair("{name} climbed the Eiffel Tower on foot", "has been to Paris", "Eiffel|Paris"),
    Pair("{name} took a photograph of the Colosseum at dusk", "has been to Rome", "Colosseum|Rome"),
    Pair(
        "{name} walked over the Golden Gate Bridge in thick fog", "has been to San Francisco", "Golden Gate|Francisco"
    ),
    Pair("{name} rode a camel around the pyramids of Giza", "has been to Egypt", "pyramids?|Giza|Egypt"),
    Pair("{name} swam off Copacabana beach every morning for a week", "has been to Brazil", "Copacabana|Brazil"),
    Pair("{name} got engaged in front of the Taj Mahal", "has been to India", "Taj|India"),
    Pair("{name} lost an umbrella under the Brandenburg Gate", "has been to Berlin", "Brandenburg|Berlin"),
    Pair("{name} heard Big Ben strike midnight", "has been to London", "Big Ben|London"),
    Pair("{name} saw Mount Fuji from the window of a train", "has been to Japan", "Fuji|Japan"),
    Pair("{name} took the cable car up Table Mountain", "has been to South Africa", "Table Mountain|Africa"),
    Pair("{name} watched kangaroos near Ayers Rock", "has been to Australia", "kangaroos?|Ayers|Australia"),
    Pair("{name} put a note into the Wailing Wall", "has been to Jerusalem", "Wailing|Jerusalem"),
    Pair("{name} lit a candle in the Sagrada Família", "has been to Barcelona", "Sagrada|Barcelona"),
    Pair("{name} ran up the steps of the Acropolis", "has been to Athens", "Acropolis|Athens"),
    Pair("{name} counted the soldiers of the Terracotta Army", "has been to China", "Terracotta|China"),
    Pair("{name} hiked to Machu Picchu with a broken boot", "has been to Peru", "Machu|Peru"),
    Pair("{name} greeted the New Year on Red Square", "has been to Moscow", "Red Square|Moscow"),
    Pair("{name} took off both shoes before entering the Hagia Sophia", "has been to Istanbul", "Hagia|Istanbul"),
    Pair("{name} spends the whole week drilling and filling molars", "is a dentist", "molars?|dentists?"),
    Pair("{name} was up all night because a cow could not give birth", "is a vet", "vets?|veterinary"),
    Pair("{name} puts on a black robe and decides who goes to prison", "is a judge", "judges?"),
    Pair("{name} kneads dough long before sunrise", "is a baker", "dough|bakers?"),
    Pair("{name} told the passengers that cruising altitude had been reached", "is a pilot", "altitude|pilots?"),
    Pair("{name} puts on a net and smokes the hives", "is a beekeeper", "hives?|bees?|beekeepers?"),
    Pair("{name} eats no bread, because gluten hurts the stomach", "has coeliac disease", "gluten|c?o?eliac"),
    Pair("{name} cannot tell ripe tomatoes from green ones by looking", "is colour-blind", "tomato(?:es)?|blind"),
    Pair("{name} injects insulin before every meal", "has diabetes", "insulin|diabet\\w+"),
    Pair("{name} follows the raised dots on the page with one fingertip", "is blind", "fingertips?|blind|braille"),
    Pair("{name} leaves meat, milk, eggs and honey on the plate", "is a vegan", "vegans?|vegetarians?"),
    Pair("{name} takes the stairs, as lifts and cellars bring on panic", "has claustrophobia", "claustrophobi\\w+"),
)
NAMES = (
    "Aiko", "Bjarne", "Chidi", "Dagny", "Eluned", "Farouk", "Gwilym", "Hanako", "Ikram", "Jolanta", "Kwame", "Lupita",
    "Marek", "Ngozi", "Oisin", "Priya", "Qadir", "Rohan", "Sunniva", "Tomasz", "Ulrike", "Vusi", "Wanjiru", "Yusuf",
)  # fmt: skip


@register_task
@dataclass(frozen=True)
class NoLiMa(HiddenSentences):
    """Who has been to Paris, where the text says who climbed the Eiffel Tower? After Modarressi et al. (2025).

    Attributes:
        distractors: sentences of the same kind about other people and other things.
    """

    name: ClassVar[str] = "nolima"
    intro = "The text below tells something about a person. Read it well: I will ask you about that person."
    phrase = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")

    distractors: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.distractors < min(len(NAMES), len(PAIRS)):
            raise ValueError(f"distractors must be 0 to {len(NAMES) - 1}, got {self.distractors}.")

    def hide(self, words: Random, answers: Random) -> Hidden:
        pairs = words.sample(PAIRS, 1 + self.distractors)
        names = answers.sample(NAMES, len(pairs))
        asked = pairs[0].predicate
        return Hidden(
            sentences=tuple(f"{pair.needle.format(name=name)}." for pair, name in zip(pairs, names)),
            references=(names[0],),
            rivals=tuple(name for name in NAMES if name != names[0]),
            question=f"According to the text, which person {asked}? Answer with the name.",
            lead=f" The person who {asked} is",
            taken=re.compile(rf"\b(?:{pairs[0].taken})\b", re.IGNORECASE),
        )
