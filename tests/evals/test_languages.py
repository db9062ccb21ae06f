"""Needles and haystacks in several languages and in code."""

from __future__ import annotations

import re
import unicodedata

import pytest
from tokenizers_of_all_kinds import tokenizer_of_kind

from ctxext.evals.haystack import _SENTENCE_END, CODE_ENDS, Haystack
from ctxext.evals.languages import PARAGRAPH, SENTENCES, languages, prose, prose_languages, standard_library, wording
from ctxext.evals.loading import load_text
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, make_task

SCRIPTS = {"ru": "CYRILLIC", "zh": "CJK", "ja": "HIRAGANA", "ar": "ARABIC", "de": "LATIN", "fr": "LATIN", "es": "LATIN"}
FAST = {"de", "ar"}
IN_TEXT = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in [*SCRIPTS, "code"]]


@pytest.mark.parametrize("language", IN_TEXT)
def test_needles_are_hidden_in_the_text_of_their_language(language: str) -> None:
    prompter = Prompter(tokenizer_of_kind("bundled"), "base")
    haystack = load_text(language, prompter.tokenizer, 2000)
    assert haystack.repeats == 1
    for name in ("passkey", "needles", "needle_distractors"):
        task = make_task(name, language=language)
        for trial, depth in enumerate((0.2, 0.8)):
            sample = task.sample(Place(name, 2000, depth, trial, 0), prompter, haystack)
            assert len(sample.input_ids) == 2000
            assert sample.score(sample.answer) == 1.0
            # In code between functions, which are long in this tokenizer.
            near = 0.35 if language == "code" else 0.2
            assert sample.needle_tokens[0] / 2000 == pytest.approx(depth, abs=near)
            assert all(sample.body.count(needle) == 1 for needle in sample.needles)
            for needle in sample.needles:
                before = sample.body[: sample.body.index(needle)].rstrip()
                if language == "code":
                    assert sample.body[len(before) :].startswith("\n\n")
                else:
                    assert not before or before[-1] in ".。" or depth < 0.01


@pytest.mark.parametrize("language", [*SCRIPTS])
def test_prose_is_in_its_script_and_repeats_no_sentence(language: str) -> None:
    text = prose(language)
    sentences = [each.strip() for each in re.split(_SENTENCE_END, text.replace("\n\n", " ")) if each.strip()]
    assert len(sentences) == len(set(sentences)) == SENTENCES
    assert text.count("\n\n") == SENTENCES // PARAGRAPH - 1
    assert prose(language) == text
    letters = [c for c in text[:3000] if c.isalpha()]
    assert any(SCRIPTS[language] in unicodedata.name(c) for c in letters)
    others = [c for c in letters if not re.match(f"{SCRIPTS[language]}|CJK|KATAKANA", unicodedata.name(c))]
    assert not others
    for task in ("passkey", "needle"):
        assert not re.search(wording(language, task).phrase, text)


@pytest.mark.parametrize("language", languages())
def test_wordings_are_complete_and_found_by_their_own_phrase(language: str) -> None:
    say = wording(language, "passkey")
    assert "{number}" in say.sentence
    for part in (say.sentence, say.question, say.lead):
        assert re.search(say.phrase, part)
    say = wording(language, "needle")
    assert len(set(say.owners)) == 16
    assert {"{owner}", "{number}"} <= set(re.findall(r"{\w+}", say.sentence))
    for part in (say.question, say.lead, say.question_several, say.lead_several):
        assert "{owners}" in part
        assert re.search(say.phrase, part)


def test_english_is_worded_as_ever() -> None:
    say = wording("en", "needle")
    assert say.question_several.format(owners="bakery" + say.between + "quarry" + say.last + "museum") == (
        "What are the special numbers of the bakery, the quarry and the museum, in this order?"
    )


def test_code_is_cut_between_functions_and_classes() -> None:
    tokenizer = tokenizer_of_kind("bundled")
    text = standard_library()
    assert len(text) == 1_000_000
    haystack = Haystack.from_text(text[:60_000], tokenizer, ends=CODE_ENDS)
    ends = [end for end in haystack.sentence_ends if end < len(haystack.once) - 1]
    blocks = [re.match(r"\n{2,} *(?:@|async def |def |class )", text[end : end + 40]) is not None for end in ends]
    assert sum(blocks) > 30
    # Lines are cut only in stretches without a function.
    between = [b - a for a, b, is_block in zip(ends, ends[1:], blocks[1:]) if not is_block]
    assert len(between) < len(blocks)


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown language 'dee'; did you mean 'de'"):
        Passkey(language="dee")
    assert set(prose_languages()) == {*SCRIPTS}
