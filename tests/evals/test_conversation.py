"""Multi-turn co-reference: the turn that is asked for is the one that the ordinal names."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import pairwise

import pytest
from evals.test_hidden import made

from ctxext.evals.conversation import FORMS, MRCR, ORDINALS


def turns(body: str) -> list[tuple[str, str]]:
    """What the user said, and what the assistant answered."""
    parts = re.split(r"(?:^|\n\n)(User|Assistant): ?", body)[1:]
    said = list(zip(parts[::2], parts[1::2]))
    return [(one[1], other[1]) for one, other in pairwise(said) if one[0] == "User"]


@pytest.mark.parametrize(("needles", "distractors"), [(2, 2), (4, 1), (3, 0)])
def test_the_ordinal_names_the_turn_that_is_asked_for(needles: int, distractors: int) -> None:
    ordinals = set()
    for depth in (0.1, 0.5, 0.9):
        for trial in range(3):
            how = {"needles": needles, "distractors": distractors}
            sample = made("mrcr", trial, depth, 1500, settings=how)
            ordinal, form, topic = re.search(r"the (\w+) (\w+) about the (\w+)\.$", sample.question).groups()
            asked = [
                answer for request, answer in turns(sample.body) if request == f"Write a {form} about the {topic}."
            ]
            assert len(asked) == needles
            assert len(set(asked)) == needles
            assert asked[ORDINALS.index(ordinal)] == sample.references[0]
            assert sum("Write a" in request for request, _ in turns(sample.body)) == needles + distractors
            ordinals.add(ordinal)
    assert len(ordinals) > 1


def test_the_other_turns_read_the_text() -> None:
    sample = made("mrcr")
    assert sample.body.startswith("User: Read a book to me.\n\nAssistant: ")
    assert sample.question.startswith("User: ")
    assert sum(request == "Read on." for request, _ in turns(sample.body)) == 4
    assert all(reply.strip() for _, reply in turns(sample.body))


def test_the_score_is_that_of_openais_mrcr() -> None:
    """Their `grade`: 0 without the code, else SequenceMatcher's ratio of what follows it."""

    def grade(response: str, answer: str, code: str) -> float:
        if not response.startswith(code):
            return 0
        return float(SequenceMatcher(None, response.removeprefix(code), answer.removeprefix(code)).ratio())

    sample = made("mrcr", style="chat", answer_tokens=200, length=2000)
    code, reply = sample.lead.strip(), sample.references[0]
    assert re.fullmatch(r"[a-z0-9]{8}:", code)
    for said in (reply, reply[:30], f"{reply} And so on.", "Something else."):
        assert sample.score(f"{code}{said}") == grade(f"{code}{said}", f"{code}{reply}", code)
        assert sample.score(said) == 0.0
    assert sample.score(f"{code} {reply}") == 1.0


@pytest.mark.parametrize(
    ("how", "words"), [({"needles": 0}, "needles must be 1 to 8"), ({"distractors": 9}, "0 to 8, got 9")]
)
def test_wrong_settings_are_refused(how: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MRCR(**how)


def test_every_form_is_about_its_topic() -> None:
    assert all("{topic}" in form for form in FORMS.values())
