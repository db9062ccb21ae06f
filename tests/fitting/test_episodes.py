"""What λ is fitted on."""

from __future__ import annotations

import copy
import hashlib
from functools import cache

import pytest
from tokenizers_of_all_kinds import KINDS, tokenizer_of_kind

from ctxext.assets import PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.fitting.episodes import Episode, Material, split

TRAINED, TARGET = 128, 512
TEXT = PERSUASION.read_text(encoding="utf-8")[:60_000]


@cache
def parts(kind: str = "bundled") -> tuple[Material, Material]:
    return split(TEXT, Prompter(tokenizer_of_kind(kind)), TRAINED, TARGET)


def told(rows: list[Episode]) -> str:
    return hashlib.sha256(repr([(row.input_ids, row.text_from, row.n_answer) for row in rows]).encode()).hexdigest()


def texts(seed: int = 0) -> str:
    shorts, rows = parts()[0].texts(seed, 3)
    return told([*shorts, *rows])


def test_the_seed_decides_what_is_read_and_no_two_are_alike() -> None:
    """In another process the same: `test_two_processes_fit_as_one_does`."""
    parts.cache_clear()
    before = texts()
    parts.cache_clear()
    assert texts() == before != texts(seed=1)
    shorts, rows = parts()[0].texts(0, 6)
    assert len({told([row]) for row in [*shorts, *rows]}) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_exactly_the_lengths_and_ask_for_what_they_hide(kind: str) -> None:
    material = parts(kind)[0]
    decode = material.prompter.decode
    shorts, rows = material.texts(0, 12)
    for short in shorts:
        assert len(short) == TRAINED
        assert short.n_answer == 0
        assert short.text_from == max(1, len(material.prompter.special))
    for row in rows:
        assert len(row) == TARGET
        text = decode(row.input_ids[: -row.n_answer])
        key = decode(row.input_ids[-row.n_answer :]).strip()
        assert key.isdigit()
        assert f"The pass key is {key}. Remember it." in text
        assert text.rstrip().endswith("The pass key is")


def test_many_keys_stand_right_at_the_beginning_or_right_before_the_question() -> None:
    material = parts()[0]
    first = last = 0
    for row in material.texts(0, 70)[1]:
        before, after = material.prompter.decode(row.input_ids).split("The pass key is", 1)
        fact = after[: after.index("What is the pass key?")]
        last += fact.count(".") == 3  # its own
        first += sum(before.count(mark) for mark in ".?!") <= 1
    assert 10 <= first <= 30
    assert 10 <= last <= 30


@pytest.mark.parametrize("kind", KINDS)
def test_text_to_choose_by_is_never_learned_from(kind: str) -> None:
    learnt, other = parts(kind)
    assert TEXT.startswith(learnt.haystack.text.strip())
    assert TEXT.strip().endswith(other.haystack.text.strip())
    assert len(learnt.haystack.text) + len(other.haystack.text) == pytest.approx(len(TEXT), abs=4)
    assert len(other.haystack.text) == pytest.approx(0.25 * len(TEXT), abs=4)
    for material, foreign in ((learnt, other), (other, learnt)):
        for seed in range(3):
            rows = [material.text(TARGET, seed), material.hidden(TARGET, 0.5, seed)]
            for row in rows:
                for at in range(1, TARGET - 60, 40):  # but for where the ring closes, of the own text
                    piece = material.prompter.decode(row.input_ids[at : at + 20]).strip()
                    assert piece not in foreign.haystack.text


def test_each_part_holds_the_target_even_where_a_quarter_does_not() -> None:
    prompter = Prompter(tokenizer_of_kind("bundled"))
    text = TEXT[:10_000]
    n = Haystack.from_text(text, prompter.tokenizer).n_tokens
    target = round(n / 2.25)
    for part in split(text, prompter, TRAINED, target):
        assert part.haystack.n_tokens >= target
        assert len(part.text(target, 0)) == target
    with pytest.raises(ValueError, match=rf"story has {n:,} tokens, too few to fit at {n:,}.*Pass a longer text"):
        split(text, prompter, TRAINED, n, name="story")


def test_text_begins_with_bos_whatever_the_style_of_the_questions() -> None:
    tokenizer = copy.deepcopy(tokenizer_of_kind("bundled"))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rows = [split(TEXT, Prompter(tokenizer, style), TRAINED, TARGET)[0].text(TRAINED, 0) for style in ("base", "chat")]
    assert rows[0] == rows[1]
    assert rows[0].input_ids[0] == tokenizer.bos_token_id
