"""Counting: the answer is the number of sentences about the thing asked for."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from evals.test_hidden import made

from ctxext.evals.counting import Counting


def test_the_answer_is_the_number_of_sightings() -> None:
    answers = Counter()
    for trial in range(30):
        sample = made("counting", trial)
        seen = Counter(re.findall(r"keeper saw the (\w+)\.", sample.body))
        bird = re.search(r"see the (\w+)\?", sample.question)[1]
        assert str(seen[bird]) == sample.references[0]
        assert sum(seen.values()) == len(sample.needles) == 12
        answers[sample.references[0]] += 1
    assert set(answers) <= set("23456789")
    assert max(answers.values()) <= 10  # no answer is a good guess


def test_sightings_are_all_over_the_text() -> None:
    sample = made("counting", length=3000)
    thirds = Counter(min(2, 3 * at // sample.n_prompt) for at in sample.needle_tokens)
    assert set(thirds) == {0, 1, 2}


def test_a_first_number_counts_and_a_later_one_does_not() -> None:
    sample = made("counting")
    (right,) = sample.references
    assert sample.score(f" {right}.") == 1.0
    assert sample.score(f" {int(right) % 9 + 1}, no, {right}") == 0.0


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="less than sentences, which must be <= 16, got most=12 and sentences=12"):
        Counting(most=12)
