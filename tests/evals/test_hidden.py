"""Tasks that hide sentences: exact in tokens, at their depth, with one right answer, for every tokenizer and style."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers_of_all_kinds import KINDS, tokenizer_of_kind
from transformers import AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.association import PAIRS
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, Sample, make_task

CHAT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}{{ '<s>assistant\n' }}"
STYLES = [("base", None), ("base", 64), ("chat", None), ("chat", 64), ("thinking", None)]
TASKS = ("nolima", "mrcr", "counting", "code")


@cache
def prompter_of(kind: str, style: str = "base", answer_tokens: int | None = None) -> Prompter:
    tokenizer = tokenizer_of_kind(kind) if style == "base" else AutoTokenizer.from_pretrained(MODEL)
    if style != "base":
        tokenizer.chat_template = CHAT
    return Prompter(tokenizer, style, answer_tokens)


@cache
def novel(kind: str) -> Haystack:
    return Haystack.from_file(PERSUASION, tokenizer_of_kind(kind))


def made(name: str, trial: int = 0, depth: float = 0.5, length: int = 1200, kind: str = "bundled", **how) -> Sample:
    task, style = make_task(name, **how.pop("settings", {})), how
    place = Place(name, length, depth if task.uses_depth else None, trial, 0)
    return task.sample(place, prompter_of(kind, **style), novel(kind))


def right_answer(sample: Sample) -> str:
    """What a perfect model writes: behind the lead if the prompt begins it."""
    space = "" if sample.lead.endswith(" ") else " "
    said = space + ", ".join(sample.references)
    return said if sample.begun else sample.lead.strip() + said


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "bundled" else pytest.mark.slow) for kind in KINDS]
)
def test_prompts_are_exact_in_tokens(name: str, kind: str) -> None:
    if (kind, name) == ("sentencepiece", "code"):
        pytest.skip("its alphabet has no underscore")
    prompter = prompter_of(kind)
    for trial, (length, depth) in enumerate([(900, 0.1), (1113, 0.5), (2000, 0.9)]):
        sample = made(name, trial, depth, length, kind)
        assert len(sample.input_ids) == sample.n_prompt + sample.answer_tokens == length
        assert list(sample.input_ids) == prompter.encode(sample.body + sample.lead + sample.answer)
        assert f" {sample.answer.strip()}" == right_answer(sample).rstrip() or sample.lead.endswith(" ")
        for needle, at in zip(sample.needles, sample.needle_tokens):
            assert sample.body.count(needle) == 1
            # What ends a sentence may be one token with the line's end behind it.
            assert needle.strip()[:12] in prompter.decode(sample.input_ids[at : at + 60])[:24]


@pytest.mark.parametrize("name", [name for name in TASKS if make_task(name).uses_depth])
def test_the_first_needle_is_at_its_depth_in_tokens(name: str) -> None:
    for depth in (0.0, 0.3, 0.7, 1.0):
        sample = made(name, 1, depth, 3000)
        room = sample.n_prompt - (len(sample.needles) - 1) * 80
        assert sample.needle_tokens[0] / room == pytest.approx(depth, abs=0.15)


@pytest.mark.parametrize(("style", "answer_tokens"), STYLES)
@pytest.mark.parametrize("name", TASKS)
def test_the_right_answer_scores_1_and_a_wrong_first_token_does_not(
    name: str, style: str, answer_tokens: int | None
) -> None:
    prompter = prompter_of("bundled", style, answer_tokens)
    words = [k for k in range(len(prompter.tokenizer)) if prompter.decode([k]).strip().isalnum()]
    for trial in range(3):
        sample = made(name, trial, length=2400, style=style, answer_tokens=answer_tokens)
        assert sample.n_prompt + sample.answer_tokens == 2400
        right = right_answer(sample)
        ids = prompter.tokenizer(right, add_special_tokens=False)["input_ids"]
        assert len(ids) <= sample.answer_tokens
        assert sample.score(right) == 1.0
        assert sample.score("") == 0.0
        before = len(prompter.tokenizer(right[: right.rindex(sample.references[0])].rstrip())["input_ids"])
        before -= len(prompter.tokenizer("")["input_ids"])
        for wrong in words[:: len(words) // 40]:
            if ids[before] != wrong and prompter.decode([wrong]).strip() != prompter.decode([ids[before]]).strip():
                assert sample.score(prompter.decode([*ids[:before], wrong, *ids[before + 1 :]])) < 1.0
        for rival in sample.rivals:
            assert sample.score(right.replace(sample.references[0], rival)) == 0.0
            assert sample.score(right.replace(sample.references[0], f"{rival}, {sample.references[0]}")) == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_every_trial_and_seed_has_an_answer_of_its_own(name: str) -> None:
    samples = [made(name, trial) for trial in range(6)]
    assert len({sample.references for sample in samples}) >= 3
    assert len({sample.body for sample in samples}) == 6
    assert made(name, 0).input_ids == samples[0].input_ids


def test_depths_of_a_trial_share_the_text_before_their_needles() -> None:
    early, late = made("nolima", depth=0.3), made("nolima", depth=0.8)
    first = min(*early.needle_tokens, *late.needle_tokens)
    assert early.input_ids[:first] == late.input_ids[:first]


def test_a_text_that_speaks_of_the_answer_is_not_asked_about_it() -> None:
    """Another association is drawn; where every one is spoken of, the text is refused."""
    text = PERSUASION.read_text(encoding="utf-8")[:60_000]
    tokenizer = tokenizer_of_kind("bundled")
    spoken, left = [pair.predicate for pair in PAIRS[:-2]], {pair.predicate for pair in PAIRS[-2:]}
    haystack = Haystack.from_text(f"{text} It {'. It '.join(spoken)}. {text}", tokenizer)
    task = make_task("nolima")
    for trial in range(4):
        sample = task.sample(Place("nolima", 900, 0.5, trial, 0), prompter_of("bundled"), haystack)
        assert any(predicate in sample.question for predicate in left)
    named = Haystack.from_text(text.replace(". ", ", said Priya. "), tokenizer)
    with pytest.raises(ValueError, match=r"contains the words of the needle.*Pass another text"):
        task.sample(Place("nolima", 900, 0.5, 0, 0), prompter_of("bundled"), named)
