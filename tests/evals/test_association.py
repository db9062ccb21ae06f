"""NoLiMa's condition: no content word of the question is in the needle."""

from __future__ import annotations

import re

import pytest

from ctxext.evals.association import NAMES, PAIRS, NoLiMa

# Function words, and what every question of a kind shares.
FUNCTION = {
    "a",
    "an",
    "and",
    "as",
    "at",
    "been",
    "both",
    "by",
    "could",
    "every",
    "for",
    "from",
    "had",
    "has",
    "in",
    "into",
    "is",
    "it",
    "no",
    "not",
    "of",
    "off",
    "on",
    "one",
    "ones",
    "over",
    "the",
    "to",
    "under",
    "up",
    "was",
    "who",
    "with",
    "which",
    "according",
    "text",
    "person",
    "answer",
    "name",
}


def content(text: str) -> set[str]:
    """The content words, without their endings: "drilling" and "drills" are one."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return {word[:4] for word in words if word not in FUNCTION}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.predicate)
def test_needle_and_question_share_no_content_word(pair) -> None:
    question = f"According to the text, which person {pair.predicate}? Answer with the name."
    assert not content(pair.needle.format(name="Priya")) & content(question)
    assert re.search(rf"\b(?:{pair.taken})\b", pair.predicate, re.IGNORECASE)
    assert re.search(rf"\b(?:{pair.taken})\b", f"{pair.needle} {pair.predicate}", re.IGNORECASE)


def test_questions_have_one_answer() -> None:
    assert len({pair.predicate for pair in PAIRS}) == len(PAIRS) >= 30
    assert len(set(NAMES)) == len(NAMES)
    taken = [re.compile(rf"\b(?:{pair.taken})\b", re.IGNORECASE) for pair in PAIRS]
    for k, pair in enumerate(PAIRS):
        others = [other for j, other in enumerate(PAIRS) if j != k and taken[k].search(other.needle)]
        assert not others, pair


def test_distractors_are_about_others() -> None:
    from random import Random

    hidden = NoLiMa(distractors=5).hide(Random(0), Random(1))
    assert len(hidden.sentences) == 6
    assert hidden.references[0] in hidden.sentences[0]
    assert not any(hidden.references[0] in sentence for sentence in hidden.sentences[1:])
    with pytest.raises(ValueError, match="distractors must be 0 to 23, got 24"):
        NoLiMa(distractors=24)
