"""Invented documents about people and towns, and questions about them.

No model has read them, so an answer can only come from the prompt. They need no download.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from ctxext.evals.words import own_words


def _list(text: str) -> list[str]:
    return text.split()


_FIRST = _list(
    "Ada Albin Alma Anselm Aron Astrid Bela Berta Bruno Cato Celia Clemens Dora Edda Egon Elin Emil Enno Esther "
    "Fanny Felix Flora Gerda Greta Hanno Hedda Henrik Ida Ines Ivo Jonas Judith Karin Klara Leo Lina Lorenz Magda "
    "Marten Mila Nora Olaf Oskar Paula Petra Rasmus Rosa Ruben Selma Simon Tessa Thea Tilda Ulf Vera Viktor Wanda"
)
_BEGINNING = _list(
    "Al Ar Bel Bor Bran Cal Cor Dal Dor El Fal Fen Gal Gar Hal Har Hol Il Kar Kel Lan Lor Mar Mel Mor Nar Nor Or "
    "Pel Ral Ros Sal Sel Tar Tol Ul Var Vel Wal Wen"
)
_MIDDLE = _list("a an ar e en er i in o on or u")
_FAMILY = _list("bach berg dahl feld gren holm lind lund mark quist rup sen stad sten strom tal vik wald")
_TOWN = _list("bridge burgh bury cliffe combe ford gate ham haven hurst leigh mere minster mouth stead ton wick worth")
_RIVER = _list("na ra sel ska tis va wen zel")
_TRADE = _list(
    "architect bookbinder botanist cartographer clockmaker composer engraver glassblower historian organist painter "
    "playwright poet potter sculptor weaver"
)
_WORK = _list("atlas bell chronicle fountain mural novel opera symphony tapestry")
_GOODS = _list("bread cheese clocks horses lace linen pears salt wool")
_MONTH = _list("January February March April May June July August September October November December")


@dataclass(frozen=True)
class Fact:
    """A sentence, and the question about "{subject}" that it answers; "" if it answers none."""

    sentence: str
    question: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Story:
    """A question, its answers, and the documents needed to answer it."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def invent(rng: Random, hops: int) -> tuple[Story, Iterator[str]]:
    """A question, and endless documents that contain neither its answer nor its names.

    One document answers it; with two hops, another leads to it.
    """
    while True:
        person, town = _person_name(rng), _town_name(rng)
        about_person, about_town = _person(rng, person, town), _town(rng, town)
        if hops == 2:
            facts, subject, names = about_town, f"the town in which {person} was born", [person, town]
        elif rng.random() < 0.5:
            facts, subject, names = about_town, f"the town of {town}", [town]
        else:
            facts, subject, names = about_person, person, [person]
        fact = rng.choice([fact for fact in facts if fact.question])
        question = fact.question.format(subject=subject)
        first = [_document(rng, about_person)] if hops == 2 else []
        if not _speaks_of([fact.answer], "\n".join((question, *first))):
            story = Story(question, (fact.answer,), (*first, _document(rng, facts, fact)))
            return story, (text for text in _documents(rng) if not _speaks_of([*names, fact.answer], text))


def _documents(rng: Random) -> Iterator[str]:
    while True:
        town = _town_name(rng)
        yield _document(rng, _person(rng, _person_name(rng), town) if rng.random() < 0.5 else _town(rng, town))


def _speaks_of(names: list[str], text: str) -> bool:
    return any(name.lower() in text.lower() for name in names)


def _document(rng: Random, facts: list[Fact], told: Fact | None = None) -> str:
    """Three to five sentences: the first fact, `told`, and some of the others."""
    others = [fact for fact in facts[1:] if fact is not told]
    left_out = rng.sample(others, rng.randint(0, 2))
    return " ".join(fact.sentence for fact in facts if fact not in left_out)


def _person(rng: Random, name: str, town: str) -> list[Fact]:
    family, teacher, birth = name.split()[1], _person_name(rng), rng.randrange(1700, 1850)
    trade, work, death = rng.choice(_TRADE), rng.choice(_WORK), str(birth + rng.randint(30, 85))
    words = own_words()
    title = f"{rng.choice(words.adjectives).capitalize()} {rng.choice(words.nouns).capitalize()}"
    return [
        Fact(
            f"{name}, {trade} by profession, was born in {town} in {birth}.", "In which town was {subject} born?", town
        ),
        Fact(f"{family} learned the craft from {teacher}.", "From whom did {subject} learn the craft?", teacher),
        Fact(f"For some years {family} lived in {_town_name(rng)} and sold {rng.choice(_GOODS)} there."),
        Fact(
            f"The {work} that made {family} known is called The {title}.",
            f"What is the {work} of {{subject}} called?",
            title,
        ),
        Fact(f"{family} died in {death} after a short illness.", "In which year did {subject} die?", death),
    ]


def _town(rng: Random, name: str) -> list[Fact]:
    river = rng.choice(_BEGINNING) + rng.choice(_MIDDLE) + rng.choice(_RIVER)
    founder, builder, year = _person_name(rng), _person_name(rng), str(rng.randrange(1000, 1700))
    return [
        Fact(f"{name} is a town on the river {river}.", "On which river does {subject} lie?", river),
        Fact(f"It was founded by {founder}.", "Who founded {subject}?", founder),
        Fact(f"Its market, which sells {rng.choice(_GOODS)}, is held every {rng.choice(_MONTH)}."),
        Fact(f"Its bridge was built by {builder}.", "Who built the bridge of {subject}?", builder),
        Fact(
            f"Most of it burned down in {year} and was built again.",
            "In which year did most of {subject} burn down?",
            year,
        ),
    ]


def _person_name(rng: Random) -> str:
    return f"{rng.choice(_FIRST)} {rng.choice(_BEGINNING)}{rng.choice(_MIDDLE)}{rng.choice(_FAMILY)}"


def _town_name(rng: Random) -> str:
    return rng.choice(_BEGINNING) + rng.choice(_MIDDLE) + rng.choice(_TOWN)
