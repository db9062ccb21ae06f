"""RULER's tasks: exact in tokens whatever the tokenizer, worded as NVIDIA's, and what they say is true."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruler_reference import COMMIT, ENGLISH, GOLDEN, SAMPLES, TEMPLATES, by_words, example_layout, shape
from ruler_reference import HOTPOT as HOTPOT_OF_REFERENCE
from ruler_reference import SQUAD as SQUAD_OF_REFERENCE
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals import ruler, words
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter, Style
from ctxext.evals.ruler import RULER, fitting, niah
from ctxext.evals.ruler.aggregation import zeta
from ctxext.evals.ruler.niah import DEPTHS, NOISE
from ctxext.evals.samples import Place, Sample, TooShort, list_tasks, make_task
from ctxext.evals.words import distinct, nvidia_words, own_words

FORCED = {"niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"}
TEXT = PERSUASION.read_text()
# NVIDIA's tokens_to_generate.
BUDGET = {**dict.fromkeys(RULER, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}

KINDS = ["bundled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("unigram", "merging"))]


def unigram() -> PreTrainedTokenizerFast:
    """As sentencepiece's: words with a mark before them, BOS."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = [chr(code) for code in range(32, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, special_tokens=["<s>", "<unk>"], unk_token="<unk>", initial_alphabet=["\n", *alphabet]
    )
    tokenizer.train_from_iterator([TEXT[:60_000]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def merging() -> PreTrainedTokenizerFast:
    """Byte-level, no BOS; a full stop and the line's end behind it are one token, as in Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([TEXT[:60_000], f"{NOISE}\n" * 200], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bundled() -> PreTrainedTokenizerFast:
    """Byte-level, BOS."""
    return AutoTokenizer.from_pretrained(MODEL)


MAKERS = {"bundled": bundled, "unigram": unigram, "merging": merging, "words": by_words}
CHAT = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


@pytest.fixture(autouse=True)
def own_words_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether or not wonderwords is installed here."""
    monkeypatch.setattr(words, "find_spec", lambda name: None)
    nvidia_words.cache_clear()
    yield
    nvidia_words.cache_clear()


@cache
def prompter_of(kind: str, answer_tokens: int | None = None, chat: bool = False) -> Prompter:
    tokenizer = MAKERS[kind]()
    if chat:
        tokenizer.chat_template = CHAT
    return Prompter(tokenizer, answer_tokens=answer_tokens)


@cache
def haystack_of(kind: str) -> Haystack:
    return Haystack.from_text(TEXT, prompter_of(kind).tokenizer)


def draw(name: str, length: int, trial: int = 0, kind: str = "bundled", seed: int = 0, **settings) -> Sample:
    place = Place(name, length, None, trial, seed)
    return make_task(name, **settings).sample(place, prompter_of(kind), haystack_of(kind))


def context(sample: Sample, begin: str, end: str) -> str:
    """What is between the last `begin` and the last `end`."""
    return sample.body.rpartition(begin)[2].rpartition(end)[0]


# ------------------------------------------------------------------------------------------ length


def test_the_merging_tokenizer_merges() -> None:
    assert prompter_of("merging").tokenizer.tokenize("again.\nThe")[-2] == ".Ċ"


def check_exact(sample: Sample, prompter: Prompter) -> None:
    prompt = prompter.prompt(sample.body, sample.lead)
    ids, name, length = list(sample.input_ids), sample.place.task, sample.place.length
    assert ids[: sample.n_prompt] == prompter.encode(prompt)
    assert sample.n_prompt + sample.answer_tokens == length
    if name in FORCED and prompter.answer_tokens is None:
        # A space that is a token of its own belongs to the lead.
        assert (sample.lead + sample.answer).endswith(f" {sample.references[0]}")
        assert not prompter.decode(ids[sample.n_prompt : sample.n_prompt + 1]).isspace()
        assert len(ids) == length
        assert ids == prompter.encode(prompt + sample.answer)
    else:
        assert sample.answer == ""
        assert len(ids) == sample.n_prompt
        budget = prompter.answer_tokens or BUDGET[name]
        # A word of cwe comes three times, with its number; a further N of fwe may bring several words; five names of
        # vt and their commas may be more than RULER's 30 tokens.
        rest = {"cwe": 30, "fwe": 40, "vt": 10}.get(name, 0)
        assert budget <= sample.answer_tokens <= budget + rest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULER)
def test_prompts_are_exact_in_tokens(name: str, kind: str) -> None:
    @settings(max_examples=4, derandomize=True, deadline=None)
    @given(length=st.integers(1300, 6000), trial=st.integers(0, 1000))
    def check(length: int, trial: int) -> None:
        # Just over 4096 tokens the lists of cwe need more room than there is.
        if not (name == "cwe" and 4096 <= length < 4200):
            check_exact(draw(name, length, trial, kind), prompter_of(kind))

    check()


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_3", "niah_multivalue", "vt", "cwe", "qa_2"])
def test_chat_templates_and_larger_budgets_count_too(name: str) -> None:
    for chat, answer_tokens in ((True, None), (True, 200), (False, 200)):
        prompter = prompter_of("merging", answer_tokens, chat)
        place = Place(name, 1600, None, 0, 0)
        check_exact(make_task(name).sample(place, prompter, haystack_of("merging")), prompter)


ROOMS = [
    pytest.param(style, room, marks=() if (style, room) == ("chat", None) else pytest.mark.slow)
    for style, room in product(get_args(Style), (None, 1, 64))
]


@pytest.mark.parametrize(("style", "answer_tokens"), ROOMS)
@pytest.mark.parametrize("name", list_tasks())
def test_the_longest_right_answer_fits_its_room(name: str, style: str, answer_tokens: int | None) -> None:
    tokenizer = bundled()
    tokenizer.chat_template = CHAT
    prompter, task = Prompter(tokenizer, style, answer_tokens), make_task(name)
    depth = 0.5 if task.uses_depth else None
    for trial in range(3):
        sample = task.sample(Place(name, 2000, depth, trial, 0), prompter, haystack_of("bundled"))
        numbered = [f"{k}. {word}" for k, word in enumerate(sample.references, 1)]
        # The example of cwe numbers its words; that of vt has spaces, where most models write commas.
        said = " ".join(numbered) if name == "cwe" else ", ".join(sample.references)
        begun = style == "base" or prompter.answer_tokens is None
        assert sample.begun == begun
        right = f" {said}" if begun and sample.lead[-1:] != " " else said if begun else f"{sample.lead.rstrip()} {said}"
        assert len(tokenizer(right, add_special_tokens=False)["input_ids"]) <= sample.answer_tokens
        if name in BUDGET and not sample.answer:
            assert sample.answer_tokens >= BUDGET[name]


def test_a_filling_that_was_measured_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fitting._fillings

    def wrong_first(draft, prompter, spare):
        yield from original(draft, prompter, spare + 1)
        yield from original(draft, prompter, spare)

    monkeypatch.setattr(fitting, "_fillings", wrong_first)
    for name in ("niah_single_2", "niah_multikey_3", "vt", "qa_1"):
        check_exact(draw(name, 1500), prompter_of("bundled"))


def shortest(name: str, **settings) -> int:
    """The length that a refusal of 60 tokens names."""
    message = rf"a {name} prompt needs at least \d+ tokens with this tokenizer, got 60\."
    with pytest.raises(ValueError, match=message) as refused:
        draw(name, 60, **settings)
    return int(re.search(r"at least (\d+)", str(refused.value))[1])


@pytest.mark.parametrize("name", RULER)
def test_a_length_below_the_minimum_is_refused(name: str) -> None:
    check_exact(draw(name, shortest(name) + 60), prompter_of("bundled"))


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"200000 tokens needs a text of that many tokens, got \d+\. Pass a longer"):
        draw("niah_single_2", 200_000)


@pytest.mark.slow
def test_a_prompt_is_read_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full-length readings of a 16k prompt, estimates and all."""
    read = 0
    tokenizer = prompter_of("bundled").tokenizer
    original = type(tokenizer).__call__

    def counting(self, text, **options):
        nonlocal read
        read += len(text)
        return original(self, text, **options)

    haystack_of("bundled")
    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    readings = []
    for name in RULER:
        read = 0
        sample = draw(name, 16384, 1)
        readings.append(read / len(sample.body))
    assert max(readings) < 7
    assert sum(readings) / len(readings) < 4


# --------------------------------------------------------------------------------------- the words

NIAH = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    "\nWhat are all the special magic numbers for {q} mentioned in the provided text?",
    " The special magic numbers for {q} mentioned in the provided text are",
)
NIAH_ONE = (
    "A special magic {v} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {v} afterwards.\n",
    "\nWhat is the special magic {v} for {q} mentioned in the provided text?",
    " The special magic {v} for {q} mentioned in the provided text is",
)
QA = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\nDocument 1:\n",
    "\n\nAnswer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\nQuestion: {q}",
    " Answer:",
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {q} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "5 variables are assigned the value {q}, they are: ",
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n1. ",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
WORDED = {"vt": VT, "cwe": CWE, "fwe": FWE, "qa_1": QA, "qa_2": QA}


@pytest.mark.parametrize("compat", ["exact", "nvidia"])
@pytest.mark.parametrize("name", [name for name in RULER if "qa" not in name])
def test_prompts_are_worded_as_nvidias(name: str, compat: str) -> None:
    check_words(draw(name, 3000, compat=compat))


def check_words(sample: Sample) -> None:
    name = sample.place.task
    begin, end, lead = WORDED.get(name, NIAH_ONE if name in FORCED else NIAH)
    kind = "uuid" if name in ("niah_single_3", "niah_multikey_3") else "number"
    asked = re.search(r" for (.*) mentioned| value (\d+) in |^Question: ([^?]*\?)$", sample.question)
    words = {"v": kind, "q": next(filter(None, asked.groups())) if asked else ""}
    assert sample.body.startswith(begin.format(**words))
    assert sample.body.endswith(end.format(**words))
    assert end.format(**words).endswith(sample.question)
    assert sample.lead.rstrip() == lead.format(**words).rstrip()


# ----------------------------------------------------------------------------------------- needles

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
SHAPES = {"numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "words": r"[a-z]+-[a-z]+"}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
@pytest.mark.parametrize(
    ("name", "haystack", "key", "value", "keys", "values", "queries"),
    [
        ("niah_single_1", "noise", "words", "numbers", 1, 1, 1),
        ("niah_single_2", "essay", "words", "numbers", 1, 1, 1),
        ("niah_single_3", "essay", "words", "uuids", 1, 1, 1),
        ("niah_multikey_1", "essay", "words", "numbers", 4, 1, 1),
        ("niah_multikey_2", "needle", "words", "numbers", 1, 1, 1),
        ("niah_multikey_3", "needle", "uuids", "uuids", 1, 1, 1),
        ("niah_multivalue", "essay", "words", "numbers", 1, 4, 1),
        ("niah_multiquery", "essay", "words", "numbers", 4, 1, 4),
    ],
)
def test_keys_have_their_values_once(
    name: str, haystack: str, key: str, value: str, keys: int, values: int, queries: int, kind: str
) -> None:
    for trial in range(3):
        sample = draw(name, 2500, trial, kind)
        text = context(sample, "afterwards.\n", "\nWhat ")
        found = NEEDLE.findall(text)
        pairs = [(k, v) for _, k, v in found]
        hidden = [(k, v) for _, k, v in map(lambda needle: NEEDLE.fullmatch(needle).groups(), sample.needles)]
        assert len(hidden) == keys * values
        assert set(hidden) <= set(pairs)
        assert {kinds for kinds, _, _ in found} == {value}
        assert all(re.fullmatch(SHAPES[key], k) and re.fullmatch(SHAPES[value], v) for k, v in pairs)
        assert len({v for _, v in pairs}) == len(pairs)
        assert set(Counter(k for k, _ in pairs).values()) == {values}
        asked = re.split(r", and |, ", re.search(r" for (.*) mentioned", sample.question)[1])
        assert len(set(asked)) == queries
        assert [v for k in asked for v in dict.fromkeys(v for q, v in pairs if q == k)] == sorted(
            sample.references, key=[v for k in asked for q, v in pairs if q == k].index
        )
        _, *lines = text.split("\n") if NEEDLE.match(text) is None else [None, *text.split("\n")]
        if haystack == "noise":
            assert set(lines) == {NOISE, *sample.needles}
        elif haystack == "needle":
            assert len(pairs) > 20
            assert all(NEEDLE.search(line) for line in lines)
        else:
            assert len(pairs) == keys * values
            assert "\n" not in text
            plain = " ".join(NEEDLE.sub("", text).split())
            assert plain in " ".join((TEXT + TEXT).split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in RULER if name not in ("cwe", "fwe")])
def test_needles_begin_at_their_tokens(name: str, kind: str) -> None:
    sample = draw(name, 2000, 3, kind)
    assert sample.needles
    assert len(sample.needles) == len(sample.needle_tokens)
    decode = prompter_of(kind).decode
    for needle, token in zip(sample.needles, sample.needle_tokens):
        assert needle in sample.body
        ids = sample.input_ids[token : token + 20 + 4 * len(needle)]
        assert needle in decode(ids)
        assert needle not in decode(ids[1:])


@pytest.mark.slow
def test_needles_stand_between_sentences_at_forty_depths() -> None:
    assert np.round(np.linspace(0, 100, num=40)).astype(int).tolist() == DEPTHS
    depths = set()
    for trial in range(60):
        sample = draw("niah_single_2", 1500, trial)
        text = context(sample, "afterwards.\n", "\nWhat ")
        before, after = text.split(sample.needles[0])
        assert not before or re.search(r"[.!?][\"'”’)_]* $", before)
        depths.add(round(len(before) / (len(before) + len(after)), 1))
    assert depths >= {0.0, 0.3, 0.5, 0.7, 1.0}


@pytest.mark.parametrize("depth", [0, 100])
def test_the_outermost_depths_are_the_very_ends(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niah, "DEPTHS", [depth])
    for trial in range(10):
        sample = draw("niah_single_3", 1500, trial)
        text = context(sample, "afterwards.\n", "\nWhat ")
        assert (text.endswith if depth else text.startswith)(sample.needles[0])


def test_every_trial_begins_elsewhere_in_the_text() -> None:
    begins = [draw("niah_single_2", 1500, trial).body[130:190] for trial in range(8)]
    assert len(set(begins)) == 8
    same = {NEEDLE.sub("", draw("niah_single_2", 3000, trial, compat="nvidia").body)[130:190] for trial in range(8)}
    assert len(same) < 4


# ---------------------------------------------------------------------------------- variable tracking


def solve(text: str, value: str) -> list[str]:
    """The variables that have a value once all assignments were made, line by line."""
    memory: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.M):
        assert name not in memory
        memory[name] = source if source.isdigit() else memory[source]
    return [name for name, held in memory.items() if held == value]


@pytest.mark.parametrize("compat", ["exact", "nvidia"])
@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (3, 2)])
def test_chains_lead_to_the_variables_asked_for(compat: str, chains: int, hops: int) -> None:
    for trial in range(4):
        sample = draw("vt", 2500, trial, compat=compat, chains=chains, hops=hops)
        example, _, puzzle = sample.body.rpartition("Memorize and track")
        value = re.search(r"the value (\d{5}) in", sample.question)[1]
        assert solve(puzzle, value) == list(sample.references)
        assert len(sample.references) == hops + 1
        assert len(sample.needles) == puzzle.count("VAR ") - chains * hops == chains * (hops + 1)
        assert all(len(name) == 5 for name in sample.references)
        # The worked example, with another value.
        shown, answered = re.search(r"the value (\d{5}), they are:  ([A-Z ]+)\n\n$", example).groups()
        assert shown != value
        assert solve(example, shown) == answered.split()
        assert {len(name) for name in answered.split()} == {3}
        assert f"{hops + 1} variables are assigned" in example
        tokens = len(prompter_of("bundled").tokenizer.tokenize(example))
        assert 440 < tokens < 530


# ----------------------------------------------------------------------------------------- word lists


def listed(text: str) -> list[str]:
    """The words of a numbered list; the numbers have to be right."""
    found = re.findall(r"(\d+)\. (\S+)", text)
    assert [int(k) for k, _ in found] == list(range(1, len(found) + 1))
    return [word for _, word in found]


@pytest.mark.parametrize(("length", "often", "shown_often"), [(2500, (6, 1), (3, 1)), (6000, (30, 3), (10, 3))])
@pytest.mark.parametrize("compat", ["exact", "nvidia"])
def test_common_words_are_ten_and_come_as_often_as_they_should(
    compat: str, length: int, often: tuple[int, int], shown_often: tuple[int, int]
) -> None:
    sample = draw("cwe", length, compat=compat)
    example, _, text = sample.body.rpartition("Below is a numbered")
    counts = Counter(listed(text))
    assert set(counts.values()) == set(often)
    assert {word for word, n in counts.items() if n == often[0]} == set(sample.references)
    assert len(sample.references) == 10
    shown, _, answer = example.rpartition(" Answer: The top 10 words that appear most often in the list are: ")
    shown_counts = Counter(listed(shown))
    assert set(shown_counts.values()) == set(shown_often)
    assert {word for word, n in shown_counts.items() if n == shown_often[0]} == set(listed(answer))
    assert len(shown_counts) == (20 if length < 4096 else 40)
    if compat == "exact":
        assert not shown_counts.keys() & counts.keys()
        assert not any(word != other and word in other for word in sample.references for other in counts)


def test_nvidias_words_are_those_of_wonderwords_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia_words() is own_words()
    assets = tmp_path / "wonderwords/assets"
    assets.mkdir(parents=True)
    for kind in ("adjective", "noun", "verb"):
        (assets / f"{kind}list.txt").write_text(f"a {kind}\r\n\nb\nb\n", newline="")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(words, "find_spec", find_spec)
    nvidia_words.cache_clear()
    assert nvidia_words() == words.WordLists("wonderwords", ("a adjective", "b"), ("a noun", "b"), ("a verb", "b"))


def test_own_words_are_plain_and_of_one_kind() -> None:
    lists = own_words()
    kinds = [lists.adjectives, lists.nouns, lists.verbs]
    assert len(lists.all) == sum(map(len, kinds)) == 1543
    assert all(re.fullmatch("[a-z]{3,}", word) for word in lists.all)


def test_what_is_distinct_comes_once() -> None:
    drawn = distinct(cycle("abcab").__next__)
    assert [next(drawn) for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="ran out of different words after 3"):
        next(drawn)


def test_words_do_not_run_out() -> None:
    """Where our list is too short, the words of the text follow, and then pairs."""
    sample = draw("cwe", 60_000)
    words = set(listed(sample.body.rpartition("Below is a numbered")[2]))
    assert len(words) > len(own_words().all) > 1500
    assert set(Counter(listed(sample.body.rpartition("Below is a numbered")[2])).values()) == {30, 3}


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("length", [None, 1500, 6000])
def test_coded_words_follow_the_zeta_distribution_without_tie(length: int | None, alpha: float) -> None:
    sample = draw("fwe", length or shortest("fwe", alpha=alpha) + 20, alpha=alpha)
    counts = Counter(context(sample, "coded words. ", "\nQuestion").split())
    ranked = counts.most_common()
    assert ranked[0][0] == "..."
    assert tuple(word for word, _ in ranked[1:4]) == sample.references
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
    assert ranked[3][1] > ranked[4][1]
    # Some N explains every count.
    shares = [rank**-alpha / zeta(alpha) for rank in range(1, len(ranked) + 1)]
    low = max(n / share for (_, n), share in zip(ranked, shares))
    high = min((n + 1) / share for (_, n), share in zip(ranked, shares))
    assert low < high


def test_zeta_is_riemanns() -> None:
    assert zeta(2.0) == pytest.approx(math.pi**2 / 6, rel=1e-12)
    assert zeta(4.0) == pytest.approx(math.pi**4 / 90, rel=1e-12)
    assert zeta(1.5) == pytest.approx(2.612375348685488, rel=1e-12)


# ----------------------------------------------------------------------------------------- questions


def documents(sample: Sample) -> list[str]:
    text = context(sample, "given documents.\n\n", "\n\nAnswer the question")
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", text)[1:]
    assert [int(k) for k in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[1::2]


@pytest.mark.parametrize(("name", "hops"), [("qa_1", 1), ("qa_2", 2)])
def test_only_the_gold_documents_answer(name: str, hops: int) -> None:
    kinds = set()
    for trial in range(12):
        sample = draw(name, 1500, trial)
        check_words(sample)
        given_documents, (answer,) = documents(sample), sample.references
        assert len(sample.needles) == hops
        assert [answer.lower() in text.lower() for text in given_documents].count(True) == 1
        assert answer in sample.needles[-1]
        assert all(given_documents.count(gold) == 1 for gold in sample.needles)
        assert all(3 <= len(gold.split(". ")) <= 5 for gold in sample.needles)
        subject = max(re.findall(r"[A-Z]\w+(?: [A-Z]\w+)?", sample.question.removeprefix("Question: ")), key=len)
        assert [subject in text for text in given_documents].count(True) == 1
        assert subject in sample.needles[0]
        if hops == 2:
            town = re.search(r"born in (\w+)", sample.needles[0])[1]
            assert town in sample.needles[1]
            assert [town in text for text in given_documents].count(True) == 2
        kinds.add(sample.question.split()[1])
    assert len(kinds) > 2


SQUAD = {
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"The {thing} of {title} is {k} feet high. " + f"Stone {k} lies there. " * 8,
                    "qas": [
                        {
                            "question": f"How high is the {thing} of {title}?",
                            "answers": [{"text": f"{k} feet"}, {"text": f"{k} feet high"}, {"text": f"{k} feet"}],
                        },
                        {"question": "What is not said?", "answers": [], "is_impossible": True},
                    ],
                }
                for k, thing in enumerate(("tower", "gate", "bridge", "dome"), start)
            ],
        }
        for title, start in (("Arden", 110), ("Bexley", 210), ("Corby", 310), ("Deal", 410))
    ]
}
HOTPOT = [
    {
        "question": question,
        "answer": answer,
        "supporting_facts": [[f"Town {k}", 0], [f"Hero {k}", 1]],
        "context": [
            [f"Town {k}", [f"Town {k} was founded by Hero {k}.", " It is known to be old."]],
            [f"Hero {k}", [f"Hero {k} came from the isle", f" of Isle{k}."]],
            *([f"Other {k}{j}", [f"Nothing is known of {k}{j}."] * 6] for j in range(8)),
        ],
    }
    for k in range(20, 40)
    for question, answer in ((f"Whence came the founder of Town {k}?", f"Isle{k}"), (f"Is Town {k} known?", "no"))
]
OURS = {
    "documents": [f"Lamp {k} is lit by oil {k}" + " and hangs on a hook" * (k % 4) + "." for k in range(50, 90)]
    + [f"Oil 60 was never seen by {k} people." for k in range(50, 90)],
    "questions": [{"question": "Which oil lights lamp 60?", "answers": ["oil 60"], "documents": [10]}],
}


@pytest.fixture(params=[("qa_1", SQUAD), ("qa_2", HOTPOT), ("qa_1", OURS)], ids=["squad", "hotpot", "ours"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    name, content = request.param
    path = tmp_path / "data.json"
    path.write_text(json.dumps(content))
    return name, str(path)


def test_questions_of_a_file_are_asked_with_their_documents(data: tuple[str, str]) -> None:
    name, path = data
    asked = set()
    for trial in range(4):
        sample = draw(name, 900, trial, data=path)
        check_exact(sample, prompter_of("bundled"))
        check_words(sample)
        assert not {"no", "What is not said?"} & {*sample.references, sample.question.removeprefix("Question: ")}
        whole = documents(sample)
        gold = [text for text in whole if any(answer.lower() in text.lower() for answer in sample.references)]
        assert gold
        assert set(gold) <= set(sample.needles) <= set(whole)
        assert draw(name, 1500, trial, data=path).question == sample.question
        asked.add(sample.question)
    assert len(asked) == (1 if "lamp" in sample.question else 4)


def test_nvidia_asks_in_the_files_order_and_adds_what_is_near_first(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    sample = draw("qa_1", 1400, 1, data=str(tmp_path / "squad.json"), compat="nvidia")
    assert sample.question == "Question: How high is the gate of Arden?"
    whole = documents(sample)
    assert sum("of Arden" in text for text in whole) == 4
    assert len(set(whole)) == len(whole) >= 10
    assert sample.references == ("111 feet", "111 feet high")
    # Of HotpotQA, all ten documents of a question are there, whatever its answer.
    (tmp_path / "hotpot.json").write_text(json.dumps(HOTPOT))
    sample = draw("qa_2", 1200, 1, data=str(tmp_path / "hotpot.json"), compat="nvidia")
    assert sample.references == ("no",)
    assert sum(text.splitlines()[0].startswith(("Town 20", "Hero 20", "Other 20")) for text in documents(sample)) == 10


ONE = '{"documents": ["a"], "questions": [{"question": "b", "answers": ["%s"], "documents": [%d]}]}'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"data": [{}]}', "KeyError: 'paragraphs'"),
        (ONE % ("a", 1), r"names documents \[1\] of 1"),
        (ONE % ("c", 0), "questions, none answered"),
        ('{"documents": [1], "questions": []}', "expected texts"),
    ],
)
def test_a_malformed_file_is_refused(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"bad\.json (holds no|has \d).*{problem}.*Pass a dev file of SQuAD"):
        draw("qa_1", 1000, data=str(path))


def test_a_file_without_distractors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text('{"documents": ["a b"], "questions": [{"question": "c", "answers": ["a"], "documents": [0]}]}')
    with pytest.raises(ValueError, match=r"no document without the answer to 'c'\. Pass a larger file"):
        draw("qa_1", 1000, data=str(path))


def test_settings_name_what_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SQUAD))
    (tmp_path / "b.json").write_text(json.dumps(SQUAD))
    (tmp_path / "c.json").write_text(json.dumps(HOTPOT))
    a, b, c = (json.dumps(make_task("qa_1", data=str(tmp_path / f"{k}.json")).settings()) for k in "abc")
    assert a == b != c
    assert make_task("cwe", compat="nvidia").settings()["words"] == nvidia_words().source


# ------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("name", "references", "said", "score"),
    [
        ("niah_multivalue", ("1234567", "7654321"), "1234567 and 7654321.", 1.0),
        ("niah_multivalue", ("1234567", "7654321"), "It is 7654321", 0.5),
        ("vt", ("ABCDE", "FGHIJ", "KLMNO", "PQRST"), "abcde, klmno, pqrst", 0.75),
        ("cwe", ("oak", "elm"), "1. birch 2. fir", 0.0),
        ("qa_1", ("Denver Broncos", "The Broncos", "Broncos"), "the denver broncos", 1.0),
        ("qa_1", ("110 feet", "110 feet high"), "110 feet", 1.0),
        ("qa_2", ("Isle20",), "Isle 20", 0.0),
    ],
)
def test_scores_are_nvidias(name: str, references: tuple[str, ...], said: str, score: float) -> None:
    sample = replace(draw(name, 1300), references=references)
    assert sample.score(said) == score

    # string_match_part and string_match_all of NVIDIA's scripts/eval/synthetic/constants.py, for one prediction.
    matches = [1.0 if reference.lower() in said.lower() else 0.0 for reference in references]
    assert score == (max(matches) if name.startswith("qa") else sum(matches) / len(references))


# ------------------------------------------------------------------------------------ independence

PLACES = [(name, length, trial) for name in RULER for length, trial in ((1500, 0), (1700, 2))]


def digest(place: tuple[str, int, int]) -> str:
    sample = draw(*place)
    return blake2b(json.dumps([sample.input_ids, sample.references, sample.needle_tokens]).encode()).hexdigest()


@pytest.mark.slow
def test_samples_depend_on_their_place_alone() -> None:
    """Not on the order or the process, nor on Python's hashing."""
    code = (
        "import sys, json; sys.path[:0] = sys.argv[1:]\n"
        "from evals.test_ruler import PLACES, digest\n"
        "print(json.dumps([digest(place) for place in reversed(PLACES)]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")],
        check=True,
        capture_output=True,
        text=True,
    )
    here = [digest(place) for place in PLACES]
    assert json.loads(ran.stdout)[::-1] == here
    assert len(set(here)) == len(here)
    assert digest(PLACES[0]) != blake2b(json.dumps([draw(*PLACES[0], seed=1).input_ids]).encode()).hexdigest()


def test_the_tasks_are_rulers_thirteen() -> None:
    assert len(RULER) == 13
    assert set(RULER) <= set(list_tasks())
    for name in RULER:
        task = make_task(name)
        assert task.name == name
        assert not task.uses_depth
        assert task.places([1000], [0.0, 1.0], 2, 0) == [Place(name, 1000, None, trial, 0) for trial in (0, 1)]
        json.dumps(task.settings())


# ----------------------------------------------------------------------------------- NVIDIA's sizes
# With one token for each word they can be worked out by hand. BOS comes before that, and is not counted.


def in_words(sample: Sample) -> int:
    assert sample.answer == ""
    assert sample.answer_tokens == BUDGET[sample.place.task]
    assert sample.n_prompt == 1 + len((sample.body + sample.lead).split())
    return sample.n_prompt - 1


@pytest.mark.parametrize("length", [3000, 4096, 9001])
def test_nvidias_noise_is_the_most_lines_that_fit(length: int) -> None:
    sample = draw("niah_single_1", length, kind="words", compat="nvidia")
    frame = len((NIAH_ONE[0] + NIAH_ONE[1] + NIAH_ONE[2]).split())
    needle = 10
    assert sample.body.count(NOISE) == (length - 128 - frame - needle) // 19
    assert in_words(sample) + 128 <= length < in_words(sample) + 128 + 19


def test_nvidias_essay_is_the_beginning_of_the_text_to_the_word() -> None:
    sample = draw("niah_multiquery", 5000, kind="words", compat="nvidia")
    assert in_words(sample) + 128 == 5000
    plain = NEEDLE.sub("", context(sample, "afterwards.\n", "\nWhat ")).split()
    assert plain == TEXT.split()[: len(plain)]


def test_nvidia_counts_the_example_of_vt_apart() -> None:
    sample = draw("vt", 5000, kind="words", compat="nvidia")
    example, _, puzzle = sample.body.rpartition("Memorize and track")
    frame = len("".join(VT).split())
    # An example of up to 500 words: its answer's five come on top. An assignment has four words, or five.
    assert example.count(NOISE) == (500 - frame - 4 - 4 * 5) // 19
    assert len(example.split()) == frame + 4 + 4 * 5 + example.count(NOISE) * 19 + 5
    assert puzzle.count(NOISE) == (5000 - 30 - len(example.split()) - frame - 4 - 4 * 5) // 19
    assert in_words(sample) + 30 <= 5000


def test_nvidias_list_is_the_most_words_that_fit() -> None:
    sample = draw("cwe", 6000, kind="words", compat="nvidia")
    frame = len("".join(CWE).replace("1. ", "").split())
    example = frame + 2 * (10 * 10 + 30 * 3) + 2 * 10
    words = set(listed(sample.body.rpartition("Below is a numbered")[2]))
    assert len(words) - 10 == (6000 - 120 - frame - example - 2 * 10 * 30) // 6
    assert in_words(sample) + 120 <= 6000


# ------------------------------------------------------------------------------ NVIDIA's own samples


GOLDENS = json.loads(GOLDEN.read_text())["samples"]


@pytest.fixture(scope="module")
def question_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("questions")
    contents = {"qa_1": SQUAD_OF_REFERENCE, "qa_2": HOTPOT_OF_REFERENCE, "cwe": ENGLISH}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return {name: str(folder / name) for name in contents}


def as_nvidia(run: str, question_files: dict[str, str]) -> tuple[list[Sample], list[str], Prompter]:
    """Our samples of a run of NVIDIA's, with their prompts."""
    template, length, name = run.split("/")
    prompter = template_prompter(template) if template != "base" else prompter_of("words")
    setting = "english_words" if name == "cwe" else "data"
    data = {setting: question_files[name]} if name in question_files else {}
    task = make_task(name, compat="nvidia", **data)
    places = [Place(name, int(length), None, trial, 42) for trial in range(SAMPLES)]
    samples = [task.sample(place, prompter, haystack_of("words")) for place in places]
    prompts = [prompter.asked(sample.body) + sample.lead for sample in samples]
    for sample, prompt in zip(samples, prompts):
        assert list(sample.input_ids) == prompter.encode(prompt)
        assert sample.begun
    return samples, prompts, prompter


@cache
def template_prompter(template: str) -> Prompter:
    tokenizer = by_words()
    tokenizer.chat_template = TEMPLATES[template].format(task_template="{{ messages[0].content }}")
    return Prompter(tokenizer, "chat", answer_tokens=64)


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if k % 3 == 0 else pytest.mark.slow) for k, run in enumerate(GOLDENS)]
)
def test_samples_are_those_of_nvidias_commit(run: str, question_files: dict[str, str]) -> None:
    golden, name = GOLDENS[run], run.rpartition("/")[2]
    samples, prompts, prompter = as_nvidia(run, question_files)
    shapes = [shape(name, prompt, sample.references) for prompt, sample in zip(prompts, samples)]
    assert sorted(shapes, key=json.dumps) == golden["shapes"]
    lengths = {sample.n_prompt - len(prompter.special) + sample.answer_tokens for sample in samples}
    assert sorted(lengths) == golden["lengths"]
    if name == "vt":
        assert len({example_layout(prompt) for prompt in prompts}) == golden["layouts"] == 1


def test_words_come_from_nvidias_file_where_the_lists_do_not_suffice(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text(json.dumps({"1": "a"}))
    english = GOLDENS["base/16384/cwe"]["shapes"][0]["english"]
    assert english[0] == 0 < english[1]
    (tmp_path / "english.json").write_text(json.dumps(ENGLISH))
    sample = draw("cwe", 16_384, kind="words", compat="nvidia", english_words=str(tmp_path / "english.json"))
    example, _, text = sample.body.rpartition("Below is a numbered")
    assert set(listed(example.rpartition(" Answer: The top")[0])) <= {*nvidia_words().all}
    assert set(listed(text)) <= {*ENGLISH.values()}
    with pytest.raises(ValueError, match="english_words of cwe are for compat='nvidia' only"):
        make_task("cwe", english_words=str(tmp_path / "words.json"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad\.json is not NVIDIA's english_words\.json"):
        draw("cwe", 60_000, compat="nvidia", english_words=str(tmp_path / "bad.json"))
    one, other = (
        make_task("cwe", compat="nvidia", english_words=str(tmp_path / f"{k}.json")) for k in ("words", "bad")
    )
    assert one.settings() != other.settings()


def test_goldens_are_of_the_commit_that_the_docs_name() -> None:
    assert json.loads(GOLDEN.read_text())["commit"] == COMMIT
    assert COMMIT[:7] in ruler.__doc__


@pytest.mark.parametrize("length", [1024, 1500])
def test_no_sample_of_nvidias_overruns_its_length(length: int) -> None:
    for name in ("niah_single_1", "niah_multikey_3", "vt", "cwe", "fwe"):
        sample = draw(name, length, compat="nvidia")
        # BOS is not counted, and the last token that is generated is not read.
        assert sample.n_prompt + sample.answer_tokens - 1 <= sample.place.length


def test_nvidia_lowers_what_is_too_long_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = draw("niah_single_1", 4096, kind="words", compat="nvidia").body.count(NOISE)
    monkeypatch.setattr(fitting, "_nvidia_units", lambda *_: fits + 1)
    assert draw("niah_single_1", 4096, kind="words", compat="nvidia").body.count(NOISE) == fits + 1 - 25


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_3", "vt", "cwe"])
def test_where_nothing_fits_nvidias_loop_ends_in_an_error(name: str) -> None:
    with pytest.raises(
        TooShort, match=rf"{name}: the shortest prompt of NVIDIA's code, .* 150 tokens \(those of compat"
    ):
        draw(name, 150, compat="nvidia")


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("vt", {"compat": "nvida"}, "compat must be 'exact' or 'nvidia', got 'nvida'"),
        ("vt", {"hops": 0}, "chains and hops must be >= 1, got 1 and 0"),
        ("fwe", {"alpha": 1.0}, "alpha must be > 1, got 1"),
        ("qa_1", {"hops": 3}, "hops must be 1 or 2, got 3"),
        ("qa_2", {"compat": "nvidia"}, "needs NVIDIA's documents, got data=None. Pass the dev file"),
    ],
)
def test_wrong_settings_are_refused(name: str, wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_task(name, **wrong)
