"""Sources: every kind of file is read into one column, and what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hub import LocalHub

from ctxext.data import Source, read_source

TEXTS = ["It is a truth\nuniversally acknowledged.", "No one who had ever seen Catherine Morland."]
CHAT = [[{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Emma."}]] * 2


def write(folder: Path, name: str, texts: list[str] = TEXTS, column: str = "text") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text(texts[0])
    elif path.suffix == ".parquet":
        Dataset.from_dict({column: texts, "id": list(range(len(texts)))}).to_parquet(path)
    else:
        path.write_text("".join(json.dumps({column: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Emma."}]},
         {"messages": "conversations"}),
        ({"instruction": "Who?", "input": "", "output": "Emma."}, {}),
        ({"prompt": "Who?", "completion": "Emma.", "id": 1}, {}),
        ({"prompt": CHAT[0][:1], "completion": CHAT[0][1:]}, {}),
        ({"prompt": "no", "completion": "no", "messages": CHAT[0]}, {"messages": "messages"}),
    ],
    ids=["ShareGPT", "Alpaca", "TRL", "TRL's messages", "messages win"],
)  # fmt: skip
def test_conversations_of_every_form_are_messages(tmp_path: Path, row: dict, options: dict) -> None:
    (tmp_path / "a.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    dataset = read_source(Source(path="a.jsonl", **options), tmp_path)
    assert dataset.column_names == ["messages"]
    assert dataset["messages"][:] == CHAT


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"instruction": "Who?", "output": None}, {}),
        ({"instruction": None, "output": "Emma."}, {}),
        ({"c": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": None}]}, {"messages": "c"}),
        ({"c": [{"from": "human", "value": "Who?"}, None]}, {"messages": "c"}),
    ],
)
def test_a_conversation_without_an_answer_is_skipped(tmp_path: Path, row: dict, options: dict) -> None:
    whole = {"c": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Emma."}]}
    rows = [whole if "c" in row else {"instruction": "Who?", "output": "Emma."}, row]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert read_source(Source(path="a.jsonl", **options), tmp_path)["messages"][:] == [CHAT[0], []]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"instruction": "Who?", "output": ["Emma."]}, {}),
        ({"instruction": "Who?", "output": 4}, {}),
        ({"instruction": "Who?", "input": ["q"], "output": "Emma."}, {}),
        ({"prompt": "Who?", "completion": CHAT[0][1:]}, {}),
        ({"c": [{"from": "human", "value": ["Who?"]}]}, {"messages": "c"}),
    ],
)
def test_what_is_no_text_is_not_trained_on(tmp_path: Path, row: dict, options: dict) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="where a text is expected"):
        read_source(Source(path="a.jsonl", **options), tmp_path)


def test_a_column_that_was_asked_for_is_not_replaced_by_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a", "prompt": "b", "completion": "c"}\n')
    with pytest.raises(ValueError, match="no column 'bdy'; did you mean 'body'"):
        read_source(Source(path="a.jsonl", text="bdy"), tmp_path)
    with pytest.raises(ValueError, match="read as conversations without it"):
        read_source(Source(path="a.jsonl", messages="messages"), tmp_path)


def test_an_instruction_comes_before_its_input(tmp_path: Path) -> None:
    row = {"instruction": "Sum up.", "input": "A novel.", "output": "Emma."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (turns,) = read_source(Source(path="a.jsonl"), tmp_path)["messages"]
    assert turns[0] == {"role": "user", "content": "Sum up.\n\nA novel."}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_text_column_is_read_as_text_beside_questions_and_answers(tmp_path: Path, name: str) -> None:
    line = (json.dumps({"text": TEXTS[0], "prompt": "Who?", "completion": "Emma."}) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    assert read_source(Source(path=name), tmp_path)["text"][:] == TEXTS[:1]


@pytest.mark.parametrize(("name", "documents"), [("a.txt", 1), ("a.jsonl", 2), ("a.json", 2), ("a.parquet", 2)])
def test_every_kind_of_file_gives_its_documents_whole(tmp_path, name, documents) -> None:
    write(tmp_path, name)
    dataset = read_source(Source(path=name), tmp_path)
    assert dataset.column_names == ["text"]
    assert dataset["text"][:] == TEXTS[:documents]


def test_globs_and_folders_take_their_files_in_order(tmp_path) -> None:
    write(tmp_path, "novels/b.txt", ["b"])
    write(tmp_path, "novels/a.txt", ["a"])
    write(tmp_path, "novels/LICENSE")  # of no known kind
    for path in ("novels", "novels/*.txt", "*/?.txt", str(tmp_path / "novels")):
        assert read_source(Source(path=path), tmp_path)["text"][:] == ["a", "b"]


def test_a_saved_dataset_is_read_by_its_split(tmp_path) -> None:
    dataset = Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(tmp_path / "one")
    DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(tmp_path / "two")
    assert read_source(Source(path="one"), tmp_path)["text"][:] == TEXTS
    assert read_source(Source(path="two", split="test"), tmp_path)["text"][:] == TEXTS[1:]
    with pytest.raises(ValueError, match="no split 'tset'; did you mean 'test'"):
        read_source(Source(path="two", split="tset"), tmp_path)


def test_a_path_is_taken_from_the_config_first_and_then_from_here(tmp_path, monkeypatch) -> None:
    config, here = tmp_path / "config", tmp_path / "here"
    write(config, "both.txt", ["config"])
    write(here, "both.txt", ["here"])
    write(here, "only.txt", ["here"])
    monkeypatch.chdir(here)
    assert read_source(Source(path="both.txt"), config)["text"][:] == ["config"]
    assert read_source(Source(path="only.txt"), config)["text"][:] == ["here"]


def test_columns_are_renamed_and_messages_win(tmp_path) -> None:
    Dataset.from_dict({"story": TEXTS, "chat": CHAT}).to_parquet(tmp_path / "a.parquet")
    assert read_source(Source(path="a.parquet", text="story"), tmp_path).column_names == ["text"]
    chat = read_source(Source(path="a.parquet", messages="chat"), tmp_path)
    assert chat.column_names == ["messages"]
    assert chat[0]["messages"] == CHAT[0]


CUT = gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9]  # the time would be part of a test's name


@pytest.mark.parametrize(
    ("name", "content", "options", "error", "said"),
    [
        ("missing.txt", None, {}, FileNotFoundError, "missing.txt was not found (looked in "),
        ("missing-*", None, {}, FileNotFoundError, "was not found (looked in "),
        ("../no/such/folder", None, {}, FileNotFoundError, "was not found (looked in "),
        ("folder", "", {}, FileNotFoundError, "has no data files. Supported: .txt"),
        ("empty.txt", b"", {}, ValueError, "empty.txt is empty"),
        ("blank.jsonl", b"\n \n", {}, ValueError, "blank.jsonl is empty"),
        ("book.docx", b"x", {}, ValueError, "book.docx has an unknown file type. Known: .txt"),
        ("book.jsonnl", b"x", {}, ValueError, "did you mean '.jsonl'"),
        (
            "a.jsonl",
            b'{"txt": "a"}\n',
            {},
            ValueError,
            "no column 'text'; did you mean 'txt'? Known: txt. Name the right one in the source, as text: COLUMN.",
        ),
        ("a.jsonl", b'{"text": 3}\n', {}, ValueError, "must hold text, got 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', {}, ValueError, "must hold text, got 5"),
        ("a.jsonl.gz", b"no gzip", {}, ValueError, "a.jsonl.gz cannot be read (Not a gzipped file"),
        ("a.jsonl.gz", CUT, {}, ValueError, "a.jsonl.gz cannot be read"),
        ("a.parquet", b"no parquet", {}, ValueError, "a.parquet cannot be read (Parquet magic bytes not found"),
        ("a.jsonl", b'{"chat": ["a"]}\n', {"messages": "chat"}, ValueError, "or from and value, got ['a']"),
        ("a.jsonl", b'{"conversations": []}\n', {}, ValueError, "For conversations, set messages: conversations."),
        (
            "a.jsonl",
            b'{"c": [{"from": "tool", "value": "3"}]}\n',
            {"messages": "c"},
            ValueError,
            "turns from tool, known",
        ),
        ("a.jsonl", b'{"chat": [[{"role": "user"}]]}\n', {"messages": "chat"}, ValueError, "or from and value, got"),
        ("a.jsonl", b'{"chosen": "a", "rejected": "b"}\n', {}, ValueError, "no column 'text'"),
        ("a.jsonl", b'{"text": "a"\n', {}, ValueError, "cannot be read as json"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": b}\n', {}, ValueError, "in row 1 (line 3 of a.jsonl). Fix"),
        ("a.txt", b"\xff\xfe\xfa", {}, ValueError, "cannot be read as text"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, name, content, options, error, said) -> None:
    monkeypatch.chdir(tmp_path)
    if content == "":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=re.escape(said)):
        read_source(Source(path=name, **options), tmp_path)


def test_an_empty_shard_among_full_ones_is_named(tmp_path) -> None:
    for name in ("s/0.jsonl", "s/1.jsonl", "s/2.parquet", "t/0.parquet"):
        write(tmp_path, name)
    write(tmp_path, "s/1.jsonl", [])
    with pytest.raises(ValueError, match=r"1\.jsonl is empty"):
        read_source(Source(path="s/*.jsonl"), tmp_path)
    write(tmp_path, "t/1.parquet", [])
    with pytest.raises(ValueError, match=r"1\.parquet is empty"):
        read_source(Source(path="t"), tmp_path)


def test_kinds_are_not_mixed_in_one_source(tmp_path) -> None:
    write(tmp_path, "s/0.jsonl")
    write(tmp_path, "s/1.parquet")
    with pytest.raises(ValueError, match=r"mixes file types: 0\.jsonl and 1\.parquet"):
        read_source(Source(path="s"), tmp_path)


def test_names_come_from_the_path_and_numbers_are_checked() -> None:
    assert [Source(path=path).name for path in ("x/emma.txt", "owner/name", "x/*.txt")] == [
        "emma.txt", "owner/name", "x/*.txt",
    ]  # fmt: skip
    for weight in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"weight of emma\.txt must be a finite number > 0"):
            Source(path="emma.txt", weight=weight)
    with pytest.raises(ValueError, match="must be 2 to 134,217,728 tokens, got 1"):
        Source(path="emma.txt", max_document=1)


def test_what_is_asked_of_files_that_only_a_hub_gives_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet")
    for asked in ({"split": "train[:1]"}, {"subset": "x"}, {"revision": "y"}):
        with pytest.raises(ValueError, match=f"{next(iter(asked))} of a.parquet is only for hub datasets"):
            read_source(Source(path="a.parquet", **asked), tmp_path)
    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="split of saved is only for hub datasets"):
        read_source(Source(path="saved", split="train[:1]"), tmp_path)


FIRST_ROWS = """
from pathlib import Path
from ctxext.data import Source, read_source
for options in {"take": 3}, {"take": 3}, {"take": 9}, {"take": 1, "split": "test"}, {"take": 1, "revision": "old"}:
    try:
        print(read_source(Source(path="ada/books", **options), Path())["text"][:])
    except (ValueError, FileNotFoundError) as error:
        print(error)
"""


def test_the_first_rows_of_a_hub_dataset_are_read_without_the_rest(tmp_path: Path) -> None:
    files = {f"data/train-{k}.jsonl": f'{{"text": "{k}a"}}\n{{"text": "{k}b"}}\n'.encode() for k in range(4)}
    with LocalHub() as hub:
        hub.create("datasets/ada/books", files)
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", FIRST_ROWS]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        fetched = [sum(request.startswith("GET") and name in request for request in hub.requests) for name in files]
    three, again, all_, split, revision = run.stdout.splitlines()
    assert three == again == "['0a', '0b', '1a']"
    assert all_ == "['0a', '0b', '1a', '1b', '2a', '2b', '3a', '3b']"
    assert fetched[3] == 1  # for nine rows, and not for three
    assert split.startswith("ada/books: Bad split: test.")
    assert "ada/books was not found" in revision


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_text_is_read_however_a_table_holds_it(kind: str, tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(TEXTS, getattr(pa, kind)())})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_source(Source(path="a.parquet"), tmp_path)["text"][:] == TEXTS


def test_the_first_rows_of_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    assert read_source(Source(path="a.jsonl", take=1), tmp_path)["text"][:] == TEXTS[:1]
    assert read_source(Source(path="a.jsonl", take=99), tmp_path)["text"][:] == TEXTS
    with pytest.raises(ValueError, match=r"take of a\.jsonl must be at least 1 row, got 0"):
        Source(path="a.jsonl", take=0)


def test_a_clone_of_a_dataset_is_not_read_with_its_test_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path, f"clone/data/{split}-00000-of-00001.parquet", [split])
        write(tmp_path, f"folders/{split}/0000.parquet", [split])
        write(tmp_path, f"plain/{split}.parquet", [split])
    for path in ("clone", "folders", "plain"):
        with pytest.raises(ValueError, match=r"several splits \(test, train\)"):
            read_source(Source(path=path), tmp_path)
    for path in ("clone/data/train-*.parquet", "folders/train", "plain/train*.parquet"):
        assert read_source(Source(path=path), tmp_path)["text"][:] == ["train"]


def test_words_in_names_of_files_are_no_splits(tmp_path: Path) -> None:
    for name in ("dev-guide.parquet", "test-driven-development.parquet"):
        write(tmp_path, f"folder/{name}", [name])
    assert len(read_source(Source(path="folder"), tmp_path)["text"]) == 2
