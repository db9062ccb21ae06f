"""Prompts: exact in tokens, a function of their place, readable, and asked as the model expects."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers_of_all_kinds import KINDS, tokenizer_of_kind
from transformers import AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.haystack import _SENTENCE_END, FILLER, Haystack, read_prose
from ctxext.evals.needle import Needle, NeedleAmongDistractors, Needles, Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.ruler import RULER  # noqa: F401  # registers its tasks
from ctxext.evals.samples import Place, Sample, fingerprint, list_tasks, make_task, numbers_in
from ctxext.evals.targets import digit_accuracy

TASKS = (Passkey(), Needle(), Needles(), NeedleAmongDistractors(), Passkey(digits=9))
CHAT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}{{ '<s>assistant\n' }}"


@cache
def prompter_of(kind: str, style: str = "base", answer_tokens: int | None = None) -> Prompter:
    if style == "base":
        return Prompter(tokenizer_of_kind(kind), "base", answer_tokens)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = CHAT
    return Prompter(tokenizer, style, answer_tokens)


@cache
def haystack_of(kind: str, text: str = "novel") -> Haystack:
    tokenizer = tokenizer_of_kind(kind)
    return (
        Haystack.from_text(FILLER * 800, tokenizer) if text == "filler" else Haystack.from_file(PERSUASION, tokenizer)
    )


def made(task, length: int, depth: float, trial: int = 0, kind: str = "bundled", seed: int = 0, **style) -> Sample:
    place = Place(task.name, length, depth, trial, seed)
    return task.sample(place, prompter_of(kind, **style), haystack_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(
    task=st.sampled_from(TASKS),
    length=st.integers(360, 3000),
    depth=st.floats(0, 1),
    trial=st.integers(0, 5),
    text=st.sampled_from(["novel", "filler"]),
)
def test_prompts_hit_every_length_exactly(kind: str, task, length: int, depth: float, trial: int, text: str) -> None:
    prompter, haystack = prompter_of(kind), haystack_of(kind, text)
    sample = task.sample(Place(task.name, length, depth, trial, 0), prompter, haystack)
    assert len(sample.input_ids) == sample.n_prompt + sample.answer_tokens == length
    # The tokens are those that the tokenizer makes of the text, BOS included; nothing was glued.
    text = prompter.prompt(sample.body, sample.lead) + sample.answer
    assert list(sample.input_ids) == prompter.tokenizer(text)["input_ids"]
    assert prompter.decode(sample.input_ids[sample.n_prompt :]).strip() == ", ".join(sample.references)
    for needle, at in zip(sample.needles, sample.needle_tokens):
        assert sample.body.count(needle) == 1
        assert prompter.decode(sample.input_ids[at : at + 40]).strip().startswith(needle[:12])


@pytest.mark.parametrize(("style", "answer_tokens"), [("chat", None), ("chat", 48), ("thinking", None)])
def test_chat_template_and_answer_budget_count(style: str, answer_tokens: int | None) -> None:
    sample = made(Passkey(), 2000, 0.3, style=style, answer_tokens=answer_tokens)
    assert sample.n_prompt + sample.answer_tokens == 2000
    prompter = prompter_of("bundled", style, answer_tokens)
    text = prompter.decode(sample.input_ids[: sample.n_prompt])
    begun = answer_tokens is None and style == "chat"
    assert text.endswith("<s>assistant\nThe pass key is " if begun else "<s>assistant\n")
    assert text.count("<s>") == 2  # the template's, and none of the tokenizer's before it
    assert sample.answer_tokens == {"chat": answer_tokens or 5, "thinking": 1024}[style]
    assert bool(sample.answer) == begun


def test_needles_stand_between_sentences_at_their_depth() -> None:
    for depth in (0.0, 0.1, 0.5, 0.9, 1.0):
        sample = made(Passkey(), 2048, depth, trial=1)
        before, _ = sample.body.split(" The pass key is", 1)
        assert not before or before.rstrip("\"'”’)").endswith((".", "!", "?")) or depth == 0.0
        assert sample.needle_tokens[0] / 2048 == pytest.approx(depth, abs=0.06)


def test_every_trial_has_a_text_and_a_number_of_its_own() -> None:
    samples = [made(Passkey(), 512, 0.5, trial) for trial in range(8)]
    assert len({sample.references for sample in samples}) == 8
    assert len({sample.body[:80] for sample in samples}) == 8


def test_depths_of_a_trial_share_what_stands_before_the_needle() -> None:
    early, late = made(Needles(), 1024, 0.3), made(Needles(), 1024, 0.8)
    first = min((*early.needle_tokens, *late.needle_tokens))
    assert early.input_ids[:first] == late.input_ids[:first]
    assert early.references != late.references


@pytest.mark.slow
def test_samples_are_a_function_of_their_place_alone() -> None:
    """Not of what was made before, nor of the process and its hash seed."""
    places = [(512, 0.25, 3), (400, 1.0, 0), (512, 0.25, 1)]
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/support']\n"
        "from evals.test_needle import *\n"
        f"print([fingerprint(made(task, *p).input_ids) for task in TASKS for p in {places}])"
    )
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    for task in TASKS:
        made(task, 512, 0.5, 2)
    assert there == str([fingerprint(made(task, *place).input_ids) for task in TASKS for place in places])
    assert made(Passkey(), 512, 0.5).input_ids != made(Passkey(), 512, 0.5, seed=1).input_ids


def test_distractors_are_not_asked_for() -> None:
    sample = made(NeedleAmongDistractors(), 1500, 0.4)
    assert len(sample.needles) == 8
    assert len(sample.references) == 1
    assert sample.references[0] in sample.needles[0]
    owner = sample.needles[0].removeprefix("The special number of ").split(" is")[0]
    assert owner in sample.question
    assert not any(needle.removeprefix("The special number of ").split(" is")[0] in sample.question
                   for needle in sample.needles[1:])  # fmt: skip


def test_answers_are_scored_by_their_numbers_in_order() -> None:
    sample = made(Needles(), 1024, 0.5)
    a, b, c, d = sample.references
    assert sample.score(f"They are {a}, {b}, {c} and {d}.") == 1.0
    assert sample.score(f"{a}, {c}, {b}, {d}") == 0.5
    assert sample.score(f"{a}9, {b}") == 0.25  # a longer number is another number
    assert sample.score("I don't know.") == 0.0
    assert sample.score(f"1. {a}\n2. {b}\n3. {c}\n4. {d}") == 1.0  # numbered
    assert sample.score(", ".join(f"{int(number):,}" for number in (a, b, c, d))) == 1.0  # grouped
    passkey = made(Passkey(), 512, 0.5)
    assert passkey.score(f" {passkey.references[0]}.") == 1.0
    assert passkey.score(f"The pass key, stated 2 times in the text, is {passkey.references[0]}.") == 1.0
    assert passkey.score(f"11111 22222 {passkey.references[0]}") == 0.0  # naming many is no answer


SEPARATORS = [",", ".", " ", "'", "’", "\u00a0", "\u2009", "\u202f", "，", "．", "٬"]
DIGITS = ["0123456789", "０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗"]
SENTENCES = ["{}", "{}.", " {}.\n", "The pass key is {}, said 2 times.", "pass-key-{}", "key--{}!", "- {}", "{}... yes",
             "1. {}", "2.5 times on 12.05.2024: {}", "**{}**", "page 12, {}; 1 of 3"]  # fmt: skip


@given(
    number=st.integers(10_000, 10**12 - 1),
    separator=st.sampled_from(["", *SEPARATORS]),
    digits=st.sampled_from(DIGITS),
    sentence=st.sampled_from(SENTENCES),
)
def test_a_number_is_the_same_however_it_is_written(number: int, separator: str, digits: str, sentence: str) -> None:
    written = f"{number:,}".replace(",", separator).translate(str.maketrans(DIGITS[0], digits))
    assert numbers_in(sentence.format(written), len(str(number))) == [str(number)]


@given(
    number=st.integers(10_000, 10**12 - 1),
    other=st.sampled_from(["{}1", "1{}", "{}.5", "{},5", "{}.0", "2.{}", ".{}", "-{}", "−{}", "{}e5", "{:,}.5", "-{:,}",
                           "1,{:,}", "1.2.{}", "{}.5.{}", "0{}"]),
    digits=st.sampled_from(DIGITS),
    sentence=st.sampled_from(["{}", "{}.", "It is {}, I think."]),
)  # fmt: skip
def test_another_number_is_not_the_one_asked_for(number: int, other: str, digits: str, sentence: str) -> None:
    written = other.format(number, number).translate(str.maketrans(DIGITS[0], digits))
    assert str(number) not in numbers_in(sentence.format(written), len(str(number)))


@given(numbers=st.lists(st.integers(100, 999), min_size=1, max_size=4), zeros=st.integers(0, 5),
       comma=st.sampled_from([",", ", ", " and ", "，"]))  # fmt: skip
def test_a_list_of_numbers_is_no_number_of_its_own(numbers: list[int], zeros: int, comma: str) -> None:
    """Also not where they have three digits, as a group of a longer one has."""
    said = [str(number) + "0" * zeros for number in numbers]
    assert numbers_in(comma.join(said), 3 + zeros) == said


def test_groups_are_of_three_from_the_right_and_separated_alike() -> None:
    for said in ("1106 3", "110,63", "11,06,3", "11 063 1", "11.063,512", "11,063.512", "1,11063", "11\n063"):
        assert "11063" not in numbers_in(said.replace("11 063 1", "11 0631"), 5)
    for said in ("11,063,", "11.063.", "11 063 times", "11'063' "):
        assert numbers_in(said, 5) == ["11063"]
    assert numbers_in("1,234,567 and 1.234.568", 7) == ["1234567", "1234568"]


def test_a_thinking_model_is_scored_by_what_it_says_after_its_thoughts() -> None:
    prompter = prompter_of("bundled", "thinking")

    def text(answer: str, prompt: str = "<s>assistant\n") -> str:
        return prompter.answer_text(prompter.encode(prompt), prompter.encode(answer), budget=1024)

    assert text("<think>maybe 1</think> 23456</s>") == " 23456"
    assert text("<think>the key is 23456") == ""  # the budget ran out
    assert text("the key is 23456", prompt="<s>assistant\n<think>\n") == ""
    assert text("23456") == "23456"


def test_bad_input_is_refused_with_a_remedy() -> None:
    tokenizer = tokenizer_of_kind("bundled")
    with pytest.raises(ValueError, match=r"at least 5. tokens with this tokenizer, got 20"):
        made(Passkey(), 20, 0.5)
    with pytest.raises(ValueError, match="Pass a longer text"):
        made(Passkey(), 200_000, 0.5)
    for text in ("", "  \n"):
        with pytest.raises(ValueError, match="is empty"):
            Haystack.from_text(text, tokenizer)
    with pytest.raises(ValueError, match="unknown task 'paskey'; did you mean 'passkey'"):
        make_task("paskey")
    with pytest.raises(ValueError, match="needs a chat template"):
        Prompter(tokenizer, "chat")
    with pytest.raises(ValueError, match="one of base, chat, thinking"):
        Prompter(tokenizer, "bsae")
    with pytest.raises(ValueError, match="needles must be >= 1"):
        Needle(needles=0)


def test_a_tokenizer_that_cannot_write_the_key_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: k for k, word in enumerate({"<unk>", *PERSUASION.read_text(encoding="utf-8").split()})}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")
    haystack = Haystack.from_file(PERSUASION, tokenizer)
    with pytest.raises(ValueError, match="cannot encode the answer"):
        Passkey().sample(Place("passkey", 300, 0.5, 0, 0), Prompter(tokenizer), haystack)


def test_a_text_that_is_no_text_is_refused(tmp_path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match="not a UTF-8 text"):
        Haystack.from_file(tmp_path / "picture.png", tokenizer_of_kind("bundled"))


@pytest.mark.parametrize("name", list_tasks())
def test_samples_do_not_depend_on_how_often_a_short_text_is_repeated(name: str) -> None:
    prompter, task = prompter_of("bundled"), make_task(name)
    text = PERSUASION.read_text(encoding="utf-8")[:5000]
    samples = []
    for at_least in (1300, 9000, 40_000):
        haystack = Haystack.from_text(text, prompter.tokenizer, at_least=at_least)
        place = Place(name, 1300, 0.5 if task.uses_depth else None, 1, 0)
        samples.append((task.sample(place, prompter, haystack), haystack.fingerprint))
    assert samples[0] == samples[1] == samples[2]


@pytest.mark.slow
def test_a_text_that_has_the_needles_words_is_drawn_again_or_refused() -> None:
    prompter, text = prompter_of("bundled"), PERSUASION.read_text(encoding="utf-8")
    said = {
        "passkey": "A passkey is a key. ",
        "needle": "The special number of the bakery is 7. ",
        "niah_multikey_1": "One of the special magic numbers for old-oak is: 7654321. ",
    }
    for name, sentence in said.items():
        task = make_task(name)
        places = [Place(name, 1500, 0.5 if task.uses_depth else None, trial, 0) for trial in range(6)]
        # Said in one place of many, it is left out; said in every paragraph, no text is left.
        rare = Haystack.from_text(text[:12_000] + sentence + text[12_000:20_000], prompter.tokenizer)
        for place in places:
            sample = task.sample(place, prompter, rare)
            assert sentence.strip() not in sample.body
            assert len(sample.input_ids) + (0 if sample.answer else sample.answer_tokens) == 1500
        dense = Haystack.from_text(f" {sentence}".join(text[:40_000].split("\n\n")), prompter.tokenizer)
        with pytest.raises(ValueError, match=r"contains the words of the needle.* Pass another text"):
            task.sample(places[0], prompter, dense)


def test_no_distractor_has_the_number_asked_for() -> None:
    for trial in range(30):
        sample = made(Needle(distractors=7, digits=1), 700, 0.5, trial)
        numbers = [re.search(r"is (\d+)\.", needle)[1] for needle in sample.needles]
        assert len(set(numbers)) == 8
    with pytest.raises(ValueError, match="only 9 different numbers of 1 digits, got 10 needles"):
        Needle(distractors=9, digits=1)


UNSPACED = {
    "chinese": "".join(f"第{k}天，她走了很远的路。他问：「你去哪里？」她没有回答！" for k in range(900)),
    "japanese": "".join(f"{k}日目に彼女は遠い道を歩いて町に着いたが誰もいなかった" for k in range(900)),
    "thai": "".join(f"วันที่{k}เธอเดินทางไกลไปยังเมืองเก่าและไม่มีใครอยู่ที่นั่น" for k in range(500)),
    "code": "".join(f"function f{k}(a,b){{return a*{k}+b[{k}]}};" for k in range(1500)),
}


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=[] if script == "chinese" else pytest.mark.slow) for script in UNSPACED]
)
@pytest.mark.parametrize("name", list_tasks())
def test_every_task_works_on_text_without_spaces(name: str, script: str) -> None:
    prompter, task = prompter_of("bundled"), make_task(name)
    haystack = Haystack.from_text(UNSPACED[script], prompter.tokenizer)
    for trial, depth in enumerate((0.2, 0.8)):
        sample = task.sample(Place(name, 1500, depth if task.uses_depth else None, trial, 0), prompter, haystack)
        assert len(sample.input_ids) + (0 if sample.answer else sample.answer_tokens) == 1500
        if task.uses_depth:
            assert sample.needle_tokens[0] / 1500 == pytest.approx(depth, abs=0.12)
        if name == "niah_single_2":
            before, after = sample.body.split(sample.needles[0])
            around = (before[-20:-1], after[1:20])
            assert all("afterwards" in before[-20:] or "What is" in part or part in UNSPACED[script] for part in around)
            assert all(sample.body.count(f" {mark}") == 0 for mark in "ัิีึืุู่้")


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 1025, 1026])
def test_a_text_of_characters_of_three_tokens_makes_every_length(length: int) -> None:
    prompter = prompter_of("bundled")
    haystack = Haystack.from_text("山高水长日落风起云飞" * 400, prompter.tokenizer)
    assert len(haystack.token_ids) > 3 * 3900
    sample = make_task("needle_distractors").sample(Place("needle_distractors", length, 0.5, 0, 0), prompter, haystack)
    assert len(sample.input_ids) == length


def test_a_table_of_texts_is_read_as_data(tmp_path) -> None:
    rows = [{"text": 'He said "no".\nShe left.'}, {"text": "Thé end."}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("Thé end.".encode()))
    (tmp_path / "b.jsonl").write_text('{"body": "no text"}\n')
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_prose(tmp_path / name) == 'He said "no".\nShe left.\nThé end.'
    assert read_prose(tmp_path / "a.txt.gz") == "Thé end."
    with pytest.raises(ValueError, match="has no column 'text'"):
        read_prose(tmp_path / "b.jsonl")
    with pytest.raises(OSError, match="was not found"):
        read_prose(tmp_path / "c.jsonl")


def test_a_short_text_is_repeated_for_retrieval() -> None:
    haystack = Haystack.from_text(FILLER * 3, tokenizer_of_kind("bundled"), at_least=2000)
    sample = Passkey().sample(Place("passkey", 1500, 0.5, 0, 0), prompter_of("bundled"), haystack)
    assert len(sample.input_ids) == 1500
    assert haystack.repeats > 10


def test_a_depth_is_a_place_however_it_is_written() -> None:
    assert Place("passkey", 512, 0, 1, 0) == Place("passkey", 512, 0.0, 1, 0)
    assert Place("passkey", 512, 1, 1, 0).rng().random() == Place("passkey", 512, 1.0, 1, 0).rng().random()


def test_prose_without_spaces_between_its_sentences_hides_a_key_too() -> None:
    text = "".join(f"第{k}天，她走了很远的路。他问：「你去哪里？」她没有回答！" for k in range(400))
    prompter = Prompter(tokenizer_of_kind("bundled"))
    haystack = Haystack.from_text(text, prompter.tokenizer)
    sample = Passkey().sample(Place("passkey", 1024, 0.5, 0, 0), prompter, haystack)
    assert len(sample.input_ids) == 1024
    assert sample.needles[0] in sample.body
    assert sample.body[sample.body.index(sample.needles[0]) - 2] in "。！」 "


def test_sentences_end_behind_all_of_their_marks() -> None:
    text = '他说：你去哪里？！"她没有回答。」'
    assert [text[: match.end()] for match in _SENTENCE_END.finditer(text)] == ['他说：你去哪里？！"', text]


@pytest.mark.parametrize(
    ("number", "said", "score", "digits"),
    [
        ("12345", "12x45", 0.0, 0.0),
        ("12345", "12355", 0.0, 0.8),
        ("12345", "12,345", 1.0, 1.0),
        ("12345", "1. 12345", 1.0, 1.0),
        ("123", "123,456", 1.0, 1.0),
        ("11063", "The text of 1817 says the pass key is 11063.", 1.0, 1.0),
        ("11063", "It is mentioned 2 times, in 1817 and 1818: 11063, not 12345.", 1.0, 1.0),
        ("11063", "It is not 12345 but 11063.", 0.0, 0.2),
        ("11063", "110634", 0.0, 1.0),
        ("11063", " a term coined by 1106", 0.0, 0.0),
    ],
)
def test_numbers_are_read_as_people_write_them(number: str, said: str, score: float, digits: float) -> None:
    haystack = Haystack.from_text(FILLER, tokenizer_of_kind("bundled"), at_least=300)
    sample = Passkey().sample(Place("passkey", 256, 0.5, 0, 0), prompter_of("bundled"), haystack)
    sample = replace(sample, references=(number,))
    assert sample.score(said) == score
    assert digit_accuracy(sample, said) == digits
