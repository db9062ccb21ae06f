"""Retrieval rows: exact, answerable from the row alone, and unlike what is evaluated."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ctxext.data.packing import IGNORED, Packed, pack
from ctxext.data.retrieval import ANIMALS, COLOURS, DIGITS, FORMS, MOST, RetrievalRows
from ctxext.data.sources import Source
from ctxext.evals.hidden import HiddenNumbers
from ctxext.evals.languages import wording
from ctxext.evals.needle import NeedleAmongDistractors, Needles, Passkey

FILLER = [f"Sentence {word} of the text is here." for word in ("one", "two", "three", "four", "five", "six")]
TEXT = " ".join(Random(0).choices(FILLER, k=1200))
LENGTH = 512


def packed(
    tokenizer: Any,
    *,
    length: int = LENGTH,
    documents: str = "separate",
    seed: int = 0,
    text: str = TEXT,
    sentences: int = 8,
) -> Packed:
    source = Source(path="some.txt", retrieval=sentences)
    return pack(source, Dataset.from_dict({"text": [text]}), tokenizer, length, documents, seed=seed)


@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_each_row_is_one_document_that_fills_it(documents: str, tokenizer) -> None:
    rows = packed(tokenizer, documents=documents)
    assert len(rows.rows) > 10
    for row in rows.rows:
        assert len(row["input_ids"]) == LENGTH
        assert row["documents"].tolist() == [LENGTH]
        assert (row["input_ids"][0], row["input_ids"][-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    accounting = rows.accounting
    assert (accounting.documents, accounting.padding) == (1, 0)
    assert accounting.tokens_in_rows == len(rows.rows) * LENGTH
    assert accounting.tokens_read == len(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) + 2  # BOS and EOS
    assert accounting.tokens_read == accounting.tokens_in_rows - accounting.added + accounting.dropped
    assert 0 < accounting.dropped < LENGTH
    assert f", {accounting.dropped:,} dropped)" in str(accounting)


def test_no_text_is_read_twice_or_left_out(tokenizer) -> None:
    rows = packed(tokenizer)
    said = "".join(tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows.rows)
    for form in (part for parts in FORMS for part in parts):
        pattern = re.escape(form).replace(r"\{who\}", KEY).replace(r"\{n\}", r"\d+")
        said = re.sub(f"[ \n]{pattern}", "", said)
    assert len(said) > 0.9 * len(TEXT)
    assert TEXT.startswith(said)
    left = len(tokenizer(TEXT[len(said) :], add_special_tokens=False)["input_ids"])
    assert rows.accounting.dropped == pytest.approx(left, abs=3)  # BOS and EOS of the text, and a word cut in two


KEY = rf"(?:{'|'.join(COLOURS)}) (?:{'|'.join(ANIMALS)})"


def facts_of(row: str) -> tuple[dict[str, str], dict[str, str]]:
    """The numbers of a row by key, as hidden and as answered."""
    hidden, answered = {}, {}
    for form, question, answer in FORMS:
        pattern = re.escape(form).replace(r"\{who\}", f"(?P<who>{KEY})").replace(r"\{n\}", r"(?P<n>\d+)")
        hidden |= {found["who"]: found["n"] for found in re.finditer(pattern, row)}
        pattern = re.escape(f"{question} {answer}").replace(r"\{who\}", f"(?P<who>{KEY})")
        pattern = pattern.replace(r"\{n\}", r"(?P<n>\d+)")
        answered |= {found["who"]: found["n"] for found in re.finditer(pattern, row)}
    return hidden, answered


@pytest.mark.parametrize("length", [256, LENGTH, 2048])
def test_every_hidden_number_is_asked_for_and_answered_right(length: int, tokenizer) -> None:
    for row in packed(tokenizer, length=length).rows:
        hidden, answered = facts_of(tokenizer.decode(row["input_ids"]))
        assert hidden == answered
        assert 1 <= len(hidden) <= 8
        assert len(hidden) == 8 or length < 2048


def test_a_row_has_as_many_sentences_as_asked_for(tokenizer) -> None:
    places = []
    for row in packed(tokenizer, sentences=1, text=TEXT * 4).rows:
        text = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        hidden, answered = facts_of(text)
        assert hidden == answered
        (number,) = hidden.values()
        window = text[: text.index("\n")]
        places.append(window.index(number) / len(window))
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert any(0.2 < place < 0.8 for place in places)
    with pytest.raises(ValueError, match=rf"retrieval of some.txt must be 0 to {MOST} sentences, got -1"):
        packed(tokenizer, sentences=-1)


def test_all_tokens_are_trained_on_but_the_hidden_numbers(tokenizer) -> None:
    for row in packed(tokenizer).rows:
        ids, labels = row["input_ids"], row["labels"]
        ignored = tokenizer.decode(ids[labels == IGNORED])
        assert ignored.split()[1:] == re.findall(r"\d+", tokenizer.decode(ids))[: len(ignored.split()) - 1]
        assert sorted(ignored.split()[1:]) == sorted(facts_of(tokenizer.decode(ids))[0].values())
        assert (labels[labels != IGNORED] == ids[labels != IGNORED]).all()


def test_numbers_are_hidden_at_both_ends_and_at_every_depth(tokenizer) -> None:
    depths = []
    for row in packed(tokenizer, length=1024, text=TEXT * 3).rows:
        text = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        window = text[: text.index("\n")]
        hidden, _ = facts_of(text)
        at = sorted(window.index(number) / len(window) for number in hidden.values())
        assert at[0] < 0.02
        assert at[-1] > 0.98
        depths += at[1:-1]
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert counts.min() > 0.5 * counts.mean()


def test_sentences_are_hidden_between_sentences(tokenizer) -> None:
    for row in packed(tokenizer).rows:
        text = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        window = text[: text.index("\n")]
        *inner, _ = sorted(facts_of(text)[0].values(), key=window.index)
        for number in inner[1:]:
            start = max(window.rindex(mark, 0, window.index(number)) for mark in (". ", "? ") if mark in window)
            assert re.match(r"[.?] [A-Z]", window[start:])


def test_rows_are_a_function_of_the_seed(tokenizer) -> None:
    first, again, other = (packed(tokenizer, seed=seed).fingerprint for seed in (0, 0, 1))
    assert first == again != other


def test_rows_do_not_depend_on_how_the_text_is_batched(tokenizer) -> None:
    text = np.array(tokenizer(TEXT)["input_ids"])
    whole = RetrievalRows(tokenizer, 256, 8, 0, [0], [1])
    (ids, has_loss), taken = whole.row(3, text)
    (again, _), _ = RetrievalRows(tokenizer, 256, 8, 0, [0], [1]).row(3, text[:256])
    assert ids.tolist() == again.tolist()
    assert taken < len(ids) == len(has_loss) == 256


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


@pytest.mark.parametrize("task", [Passkey(), Needles(), NeedleAmongDistractors()], ids=lambda task: task.name)
def test_rows_share_no_number_and_no_wording_with_the_evaluation(task: HiddenNumbers) -> None:
    """What is retrieved is then found by what was learned of retrieval, not by what was learned by heart."""
    assert task.digits not in DIGITS
    rng = Random(0)
    evaluated = [task.intro]
    for _ in range(200):
        hidden = task.hide(rng, rng)
        evaluated += [*hidden.sentences, hidden.question, hidden.lead]
    mine = [part.format(who="", n="") for form in FORMS for part in form]
    common = {"the", "of", "to", "for", "in", "it", "a", "what", "is", "this", "and", "are", "did", "does", "i", "you"}
    assert not {word for text in mine for word in words(text)} - common & {w for text in evaluated for w in words(text)}
    assert not {*COLOURS, *ANIMALS} & {*wording("en", "needle").owners}
    pairs = [{pair for text in texts for pair in pairwise(words(text))} for texts in (mine, evaluated)]
    assert not pairs[0] & pairs[1]


def test_what_cannot_be_made_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match=r"a retrieval row needs at least \d+ tokens .* got 32"):
        packed(tokenizer, length=32)
    with pytest.raises(ValueError, match="fewer than one sequence"):
        packed(tokenizer, text="A short text.")
    with pytest.raises(ValueError, match="which hides sentences in text, got messages"):
        pack(Source(path="a.jsonl", retrieval=8), Dataset.from_dict({"messages": [[]]}), tokenizer, 256)
    source = Source(path="a.txt", retrieval=8, max_document=64)
    with pytest.raises(ValueError, match="max_document"):
        pack(source, Dataset.from_dict({"text": [TEXT]}), tokenizer, 256)
