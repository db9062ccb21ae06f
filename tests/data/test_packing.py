"""Packing: every token is accounted for, every document stays itself, and what was made once is not made again."""

from __future__ import annotations

import copy
import re
from collections import Counter
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from ctxext.assets import PERSUASION
from ctxext.data import Source, pack, read_source
from ctxext.data.packing import best_fit

BOS, EOS = 0, 1
NOVEL = PERSUASION.read_text(encoding="utf-8")[:60_000]
PARAGRAPHS = [part.strip() for part in NOVEL.split("\n\n") if part.strip()]
CHAT = [
    [
        {"role": "user", "content": "Who was Anne?"},
        {"role": "assistant", "content": "A daughter."},
        {"role": "user", "content": "Whose?"},
        {"role": "assistant", "content": "Of Sir Walter."},
    ],
    [{"role": "user", "content": "Name a town."}, {"role": "assistant", "content": "Bath."}],
]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\n"
    "{% endgeneration %}{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Makes a dataset on disk, as read ones are: one in memory is never cached."""

    def make(documents: list, column: str = "text") -> Dataset:
        folder = tmp_path_factory.mktemp("texts")
        Dataset.from_dict({column: documents}).save_to_disk(folder)
        return Dataset.load_from_disk(folder)

    return make


@pytest.fixture
def chatty(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def documents_of(packed) -> list[list[int]]:
    """The documents that lie in the rows, padding left out."""
    found = []
    for row in packed.rows:
        ends = np.cumsum(row["documents"])
        parts = np.split(row["input_ids"], ends[:-1])
        found += [part.tolist() for part in (parts[:-1] if row["padding"] else parts)]
    return found


def check_accounts(packed) -> None:
    accounting, rows = packed.accounting, packed.rows[:]
    assert accounting.tokens_read == accounting.tokens_in_rows - accounting.padding + accounting.dropped
    assert accounting.tokens_in_rows == rows["input_ids"].size == len(packed.rows) * packed.length
    assert accounting.targets == rows["n_targets"].sum() == (rows["labels"][:, 1:] != -100).sum()
    assert rows["input_ids"].shape == rows["labels"].shape
    scored = rows["labels"] != -100
    assert (rows["labels"][scored] == rows["input_ids"][scored]).all()
    for row in packed.rows:
        assert row["documents"].sum() == packed.length
        assert not row["padding"] or row["documents"][-1] == row["padding"]


def test_separate_documents_come_out_whole_and_once_each(tokenizer, texts) -> None:
    packed = pack(Source(path="novel"), texts(PARAGRAPHS), tokenizer, 256)
    check_accounts(packed)
    short = [ids for ids in ([*tokenizer(text)["input_ids"], EOS] for text in PARAGRAPHS) if len(ids) <= 256]
    found = documents_of(packed)
    assert not Counter(map(tuple, short)) - Counter(map(tuple, found))
    assert sum(map(len, found)) == packed.accounting.tokens_read
    assert packed.accounting.documents == len(found) > len(short) > 50
    assert packed.accounting.dropped == 0
    assert packed.accounting.padding < 0.05 * packed.accounting.tokens_in_rows


def test_the_first_token_of_a_document_and_padding_have_no_loss_and_all_else_has(tokenizer, texts) -> None:
    packed = pack(Source(path="novel"), texts(PARAGRAPHS), tokenizer, 256)
    for row in packed.rows:
        ends = np.cumsum(row["documents"])
        silent = {0, *ends[:-1].tolist(), *range(packed.length - row["padding"], packed.length)}
        assert set(np.flatnonzero(row["labels"] == -100)) == silent


def test_a_long_document_is_cut_into_pieces_that_each_begin_as_a_document(tokenizer, texts) -> None:
    bare = tokenizer(NOVEL, add_special_tokens=False, verbose=False)["input_ids"]
    packed = pack(Source(path="novel"), texts([NOVEL]), tokenizer, 300)
    check_accounts(packed)
    pieces = documents_of(packed)
    assert all(piece[0] == BOS and len(piece) == 300 for piece in pieces[:-1])
    whole = [token for piece in sorted(pieces, key=len, reverse=True) for token in piece[1:]]
    assert whole == [*bare, EOS]  # the order of equal lengths is kept, and the last piece is the shortest


def test_max_document_makes_short_text_of_long(tokenizer, texts) -> None:
    packed = pack(Source(path="novel", max_document=64), texts([NOVEL]), tokenizer, 256)
    check_accounts(packed)
    lengths = Counter(map(len, documents_of(packed)))
    assert max(lengths) == 64
    assert sum(lengths.values()) - lengths[64] == 1
    assert {tuple(row["documents"]) for row in packed.rows.select(range(len(packed.rows) - 1))} == {(64,) * 4}


def test_joined_documents_are_one_stream_whose_remainder_is_accounted(tokenizer, texts) -> None:
    packed = pack(Source(path="novel"), texts(PARAGRAPHS), tokenizer, 128, "joined")
    check_accounts(packed)
    stream = packed.rows[:]["input_ids"].reshape(-1).tolist()
    read = [token for text in PARAGRAPHS for token in [*tokenizer(text)["input_ids"], EOS]]
    assert stream == read[: len(stream)]
    assert packed.accounting.tokens_read == len(read)
    assert packed.accounting.dropped == packed.accounting.tokens_read - len(stream) < 128
    assert packed.accounting.padding == 0
    for row in packed.rows:
        assert row["documents"].tolist() == [128]
        assert np.flatnonzero(row["labels"] == -100).tolist() == [0]  # labels continue over the joints


def test_a_joined_stream_goes_on_from_batch_to_batch(tokenizer, texts, monkeypatch) -> None:
    whole = pack(Source(path="novel"), texts(PARAGRAPHS), tokenizer, 100, "joined")
    monkeypatch.setattr("ctxext.data.packing._ROWS_PER_BATCH", 0.3)  # batches that often fill no row
    parts = pack(Source(path="novel"), texts(PARAGRAPHS), tokenizer, 100, "joined")
    assert (whole.rows[:]["input_ids"] == parts.rows[:]["input_ids"]).all()
    assert whole.accounting == parts.accounting


@pytest.mark.parametrize("own", ["model_max_length", "tokenizer.json"])
def test_no_tokenizer_setting_truncates(tokenizer, texts, own) -> None:
    """Trap: model_max_length is 512 here, and a tokenizer.json may hold a truncation and a padding of its own."""
    strict = copy.deepcopy(tokenizer)
    if own == "tokenizer.json":
        strict.backend_tokenizer.enable_truncation(16)
        strict.backend_tokenizer.enable_padding(length=5000)
    packed = pack(Source(path="novel"), texts([NOVEL, "Short."]), strict, 128)
    bodies = (len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in (NOVEL, "Short."))
    assert packed.accounting.tokens_read == sum(bodies) + 2 + packed.accounting.documents  # 2 EOS, a BOS each


def test_blank_documents_are_skipped_and_counted(tokenizer, chatty, texts) -> None:
    packed = pack(Source(path="novel"), texts(["", " \n", *PARAGRAPHS[:3], None]), tokenizer, 512)
    assert packed.accounting.documents == 3
    assert str(packed.accounting).startswith("3 documents (3 more without text are skipped), ")
    assert pack(Source(path="chat"), texts([*CHAT, [], None], "messages"), chatty, 512).accounting.blank == 2
    with pytest.raises(ValueError, match="novel has no text"):
        pack(Source(path="novel"), texts(["", " "]), tokenizer, 512)


def test_a_second_call_reads_the_cache_and_another_setting_does_not(tokenizer, texts, monkeypatch) -> None:
    dataset, source = texts(PARAGRAPHS), Source(path="novel")
    calls = []
    real = Dataset._map_single
    counting = wraps(real)(lambda *args, **options: calls.append(1) or real(*args, **options))
    monkeypatch.setattr(Dataset, "_map_single", staticmethod(counting))

    def work(source: Source, tokenizer, *settings: object) -> int:
        calls.clear()
        pack(source, dataset, tokenizer, *settings)
        return len(calls)

    assert work(source, tokenizer, 256) == 2  # tokenised and packed
    assert work(source, tokenizer, 256) == 0
    assert work(source, copy.deepcopy(tokenizer), 256) == 0
    assert work(Source(path="novel", name="else", weight=3), tokenizer, 256) == 0  # they make no other rows
    assert work(source, tokenizer, 255) == 2
    assert work(source, tokenizer, 256, "joined") == 2
    assert work(source, tokenizer, 255, "joined") == 1  # packed
    assert work(Source(path="novel", max_document=64), tokenizer, 256) == 2
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["Elliot"])
    assert work(source, other, 256) == 2
    monkeypatch.setattr("ctxext.data.packing._VERSION", -1)
    assert work(source, tokenizer, 256) == 2


@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_rows_do_not_depend_on_the_number_of_processes(tokenizer, tmp_path, documents) -> None:
    made = []
    for num_proc in (None, 2):
        Dataset.from_dict({"text": PARAGRAPHS}).save_to_disk(tmp_path / str(num_proc))
        dataset = Dataset.load_from_disk(tmp_path / str(num_proc))
        made.append(pack(Source(path="novel"), dataset, tokenizer, 200, documents, num_proc=num_proc))
    assert made[0].rows[:]["input_ids"].tolist() == made[1].rows[:]["input_ids"].tolist()
    assert made[0].accounting == made[1].accounting


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_the_loss_of_a_conversation_is_on_what_the_assistant_says(chatty, texts, template) -> None:
    chatty.chat_template = template
    packed = pack(Source(path="chat", messages="m"), texts(CHAT, "messages"), chatty, 128)
    check_accounts(packed)
    scored = [
        chatty.decode(row["labels"][row["labels"] != -100], clean_up_tokenization_spaces=False) for row in packed.rows
    ]
    assert scored == [" A daughter.</s>\n Of Sir Walter.</s>\n Bath.</s>\n"]
    whole = "".join(chatty.apply_chat_template(messages, tokenize=False) for messages in CHAT)
    (row,) = packed.rows
    assert chatty.decode(row["input_ids"][: 128 - row["padding"]], clean_up_tokenization_spaces=False) == whole


def test_a_long_conversation_is_cut_and_keeps_its_loss(chatty, texts) -> None:
    two = [("<s>", BOS)]
    chatty.backend_tokenizer.post_processor = TemplateProcessing(single="<s> <s> $A", special_tokens=two)
    whole = pack(Source(path="chat", messages="m"), texts(CHAT[:1], "messages"), chatty, 256)
    parts = pack(Source(path="chat", messages="m", max_document=20), texts(CHAT[:1], "messages"), chatty, 20)
    check_accounts(parts)
    assert sum(piece[:2] == [BOS, BOS] for piece in documents_of(parts)) == len(documents_of(parts)) - 1 > 1
    assert parts.accounting.targets == whole.accounting.targets
    assert not (parts.rows[:]["labels"] == BOS).any()


def test_a_template_that_rewrites_earlier_turns_is_refused(chatty, texts) -> None:
    """As the templates of thinking models do, which drop the thoughts of all answers but the last."""
    chatty.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:3] }}")
    with pytest.raises(ValueError, match=r"has no \{% generation %\}, and its text for the first 1 messages"):
        pack(Source(path="chat", messages="m"), texts(CHAT, "messages"), chatty, 128)


def test_what_cannot_be_packed_is_refused(tokenizer, chatty, texts) -> None:
    def refuse(
        said: str, documents: list, *settings: object, source=None, tokenizer=tokenizer, column="text", **options
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            pack(source or Source(path="novel"), texts(documents, column), tokenizer, *settings, **options)

    n = len(tokenizer(PARAGRAPHS[2])["input_ids"]) + 1
    refuse(f"has {n} tokens, fewer than one sequence of 2,048. Pass a longer text", [PARAGRAPHS[2]], 2048, "joined")
    refuse("unknown documents 'join'; did you mean 'joined'", ["a"], 64, "join")
    refuse("must be at least 3 tokens, got 2", ["a"], 2)
    refuse("must be at least 3 tokens, got 2", ["a"], 64, source=Source(path="x", max_document=2))
    refuse("has max_document=64, which makes short", ["a"], 9, "joined", source=Source(path="x", max_document=64))
    refuse("the tokenizer has no chat template", CHAT, 64, column="messages")
    refuse("no assistant turn has text", [CHAT[0][:1]], 64, column="messages", tokenizer=chatty)
    refuse("Roles: user; that of answers must be assistant", [CHAT[0][:1]], 64, column="messages", tokenizer=chatty)
    numbered = [[{"role": "user", "content": 5}, {"role": "assistant", "content": 6}]]
    refuse("must have text as its content, got {'role'", numbered, 64, column="messages", tokenizer=chatty)
    refuse("begins with an assistant turn", [CHAT[0][1:]], 64, column="messages", tokenizer=chatty)
    top = max(tokenizer(NOVEL, verbose=False)["input_ids"])
    refuse(f"has token {top} (", [NOVEL], 256, vocab_size=top)
    refuse(f"the model embeds {top} ids (0..{top - 1})", [NOVEL], 256, vocab_size=top)
    pack(Source(path="novel"), texts([NOVEL]), tokenizer, 256, vocab_size=top + 1)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_places_everything_once_and_wastes_little(lengths) -> None:
    bins = best_fit(lengths, 50)
    assert sorted(item for one in bins for item in one) == list(range(len(lengths)))
    loads = [sum(lengths[item] for item in one) for one in bins]
    assert all(load <= 50 for load in loads)
    assert all(a + b > 50 for i, a in enumerate(loads) for b in loads[:i])  # no two could share one


def test_equal_pieces_fill_their_rows() -> None:
    assert best_fit([25, 10, 40, 25], 50) == [[2, 1], [0, 3]]


def test_the_fingerprint_is_of_the_rows_and_not_of_the_file(tmp_path: Path, tokenizer) -> None:
    def packed(name: str, text: str):
        path = tmp_path / name
        path.write_text(text)
        source = Source(path=str(path), name="text")
        return pack(source, read_source(source, tmp_path), tokenizer, 16)

    text = " ".join(f"word{n}" for n in range(100))
    assert packed("one.txt", text).fingerprint == packed("two.txt", text).fingerprint
    assert packed("one.txt", text).fingerprint != packed("three.txt", text + " more").fingerprint
