"""Read training text from files or a dataset into one column."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.data.retrieval import MOST
from ctxext.utils.extras import require
from ctxext.utils.values import MAX_TOKENS, one_line, shown, suggest

if TYPE_CHECKING:
    from datasets import Dataset

# File name suffixes, and the `datasets` builder for each.
KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Names of dataset splits, as a folder or as the beginning of a file's name.
_SPLITS = {"train", "validation", "valid", "val", "dev", "test", "eval"}
_NUMBER = re.compile(r"[-_.]\d+(-of-\d+)?$")
# The columns of a question and its answer: Alpaca's, and TRL's.
_PAIRS = (("instruction", "output"), ("prompt", "completion"))
# Where conversations usually are, and who speaks in ShareGPT's.
_CHATS = ("messages", "conversations", "conversation")
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# A dataset's hub name: owner/name, or a name alone.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of training data.

    Attributes:
        path: a .txt file (one document), a .jsonl, .json or .parquet file (one document per row; all but .parquet may
            be gzipped), a glob or a folder of them; or a dataset: a folder of `save_to_disk`, or a hub name.
        name: a display name; by default from the path.
        weight: its share of the mixture's tokens, relative to the other sources; > 0.
        max_document: in tokens; longer documents are split into pieces of this length, each a separate document. Short
            documents in the mixture preserve short-context quality (Gao et al. 2024, ProLong).
        retrieval: hide up to so many sentences with numbers in the text of each row, and ask for them at its end; see
            `ctxext.data.retrieval`. The text may be that of another source.
        text: the text column.
        messages: the column of chat messages, used instead of `text`: lists of role and content, or of ShareGPT's from
            and value. Only assistant turns have a loss. Without it, and without a column `text`, rows of instruction,
            input, output and system (Alpaca), or of prompt and completion (TRL), are read as conversations. One with a
            blank question, answer or turn is skipped.
        take: read only the first so many rows. Of a hub dataset no more files are downloaded than hold them, so that it
            need not fit on the disk.
        split, subset, revision: of a dataset; not for local files.

    Raises:
        ValueError: weight <= 0, or max_document, retrieval or take out of range.
    """

    path: str
    name: str | None = None
    weight: float = 1.0
    max_document: int | None = None
    retrieval: int = 0
    text: str = "text"
    messages: str | None = None
    take: int | None = None
    split: str = "train"
    subset: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.name is None:
            is_file = _kind(Path(self.path)) is not None and not has_magic(self.path)
            object.__setattr__(self, "name", Path(self.path).name if is_file else self.path)
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"the weight of {self.name} must be a finite number > 0, got {self.weight}. "
                "To leave a source out, remove it."
            )
        if self.max_document is not None and not 2 <= self.max_document <= MAX_TOKENS:
            raise ValueError(
                f"max_document of {self.name} must be 2 to {MAX_TOKENS:,} tokens, got {shown(self.max_document)}: "
                "the first token of a document has no loss."
            )
        if not 0 <= self.retrieval <= MOST:
            raise ValueError(f"retrieval of {self.name} must be 0 to {MOST} sentences, got {self.retrieval}.")
        if self.take is not None and self.take < 1:
            raise ValueError(f"take of {self.name} must be at least 1 row, got {self.take}.")


def read_source(source: Source, relative_to: Path) -> Dataset:
    """The documents of `source`: a dataset with one column, `text` (strings) or `messages` (lists of role and content).

    A relative path is resolved against the folder `relative_to`, then against the working directory.

    Raises:
        FileNotFoundError: not found locally nor on the hub; the error lists the places.
        ValueError: an empty file, mixed or unknown file types, or a missing column.
    """
    require("eval")
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    found = _find(source.path, relative_to)
    if found is None:
        return _column(source, _from_hub(source, relative_to))
    has_splits = (found / "dataset_dict.json").is_file()
    asked = {"split": not has_splits and source.split != "train", "subset": source.subset, "revision": source.revision}
    if any(asked.values()):
        raise ValueError(
            f"{', '.join(name for name in asked if asked[name])} of {source.name} is only for hub datasets, but "
            f"{found} is local. Drop it, and select files with a glob such as train-*.parquet."
        )
    if has_splits or (found / "state.json").is_file():
        dataset = load_from_disk(str(found))
        if isinstance(dataset, DatasetDict):
            if source.split not in dataset:
                raise ValueError(f"{found} has no split {source.split!r}{suggest(source.split, list(dataset))}")
            dataset = dataset[source.split]
    else:
        kind, files = _files(found)
        options = {"sample_by": "document"} if kind == "text" else {}
        try:
            dataset = load_dataset(kind, data_files=[str(file) for file in files], split="train", **options)
        except Exception as error:  # any class: each builder raises its own
            reason = error.__cause__ or error
            raise ValueError(
                f"{found} cannot be read as {kind}: {reason}{_bad_line(files)}. Fix the file or remove it."
            ) from error
    assert isinstance(dataset, Dataset)
    return _column(source, dataset if source.take is None else dataset.select(range(min(source.take, len(dataset)))))


def _check_one_split(folder: Path, files: list[Path]) -> None:
    names = (
        name
        for path in files
        for name in (*path.relative_to(folder).parts[:-1], _NUMBER.sub("", path.name.partition(".")[0]))
    )
    splits = _SPLITS.intersection(names)
    if len(splits) > 1:
        raise ValueError(
            f"{folder} holds several splits ({', '.join(sorted(splits))}), which would all be read. Select one by its "
            "folder or a glob such as train*.parquet; *.parquet reads all."
        )


def find_file(path: str, relative_to: Path) -> Path:
    """The file at `path`, resolved against the folder `relative_to`, then the working directory.

    Raises:
        FileNotFoundError: not found; the error lists the places.
    """
    found = _find(path, relative_to)
    if found is None or not found.is_file():
        raise FileNotFoundError(f"{path} was not found ({_looked_in(relative_to)}).")
    return found


def is_table(path: str | Path) -> bool:
    """Whether a file is read as rows, not as one text."""
    kind = _kind(Path(path))
    return kind is not None and (kind != "text" or _is_gzipped(Path(path)))


def _is_gzipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _kind(path: Path) -> str | None:
    if not _is_gzipped(path):
        return KINDS.get(path.suffix.lower())
    kind = KINDS.get(Path(path.stem).suffix.lower())
    return None if kind == "parquet" else kind


def _find(path: str, relative_to: Path) -> Path | None:
    """The file, folder or glob at `path`, or None."""
    for folder in (relative_to, Path.cwd()):
        here = folder / Path(path).expanduser()  # an absolute path is unchanged
        if here.exists() or (has_magic(path) and _expand(here)):
            return here
    return None


def _expand(pattern: Path) -> list[Path]:
    return sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))


def _files(found: Path) -> tuple[str, list[Path]]:
    """The kind and the files of a file, folder or glob."""
    if found.is_dir():  # may hold a licence or a script besides the data
        files = sorted(path for path in found.rglob("*") if path.is_file() and _kind(path))
        _check_one_split(found, files)
    else:
        files = [found] if found.exists() else [path for path in _expand(found) if path.is_file()]
    if not files:
        raise FileNotFoundError(f"{found} has no data files. Supported: {', '.join(KINDS)}.")
    kinds: dict[str, Path] = {}
    for path in files:
        kind = _kind(path)
        if kind is None:
            raise ValueError(f"{path} has an unknown file type{suggest(path.suffix, list(KINDS))}")
        try:
            is_empty = _is_empty(path)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read ({one_line(error)}). Fix the file or remove it.") from error
        if is_empty:
            raise ValueError(f"{path} is empty. Remove it or write it again.")
        kinds.setdefault(kind, path)
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise ValueError(
            f"{found} mixes file types: {first.name} and {second.name}. "
            f"Make each type its own source, with a glob such as *{first.suffix}."
        )
    return next(iter(kinds)), files


def _is_empty(path: Path) -> bool:
    if _kind(path) == "parquet" and path.stat().st_size:
        from pyarrow.parquet import read_metadata

        return read_metadata(path).num_rows == 0
    with gzip.open(path) if _is_gzipped(path) else path.open("rb") as file:
        return all(line.isspace() for line in file)  # stops at the first non-empty line


def _bad_line(files: list[Path]) -> str:
    """The first line of a .jsonl file that is not JSON; what reads it counts rows from 0, within a block."""
    for path in files:
        if ".jsonl" not in path.suffixes:
            continue
        number = 0
        try:
            with gzip.open(path) if _is_gzipped(path) else path.open("rb") as file:
                for number, line in enumerate(file, 1):  # noqa: B007
                    json.loads(line.strip() or "null")
        except (ValueError, EOFError, zlib.error):
            return f" (line {number} of {path.name})"
    return ""


def _looked_in(relative_to: Path) -> str:
    return f"looked in {' and '.join(dict.fromkeys([str(relative_to.resolve()), str(Path.cwd())]))}"


def _from_hub(source: Source, relative_to: Path) -> Dataset:
    from datasets import load_dataset

    looked = _looked_in(relative_to)
    is_file = _kind(Path(source.path)) is not None or has_magic(source.path)
    if is_file or not _HUB_NAME.fullmatch(source.path):
        raise FileNotFoundError(f"{source.path} was not found ({looked}). Correct the path of the source.")
    try:
        if source.take is not None:
            return _first_rows(source)
        return load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{source.path} was not found ({looked}, and for a dataset of this name on the hub: {error}). "
            "Correct the path of the source."
        ) from error
    except ValueError as error:
        raise ValueError(f"{source.path}: {one_line(error)} Correct split or subset of the source.") from error


def _first_rows(source: Source) -> Dataset:
    """The first `source.take` rows of a hub dataset, cached by its commit."""
    import xxhash
    from datasets import Dataset, load_dataset_builder

    builder = load_dataset_builder(source.path, source.subset, revision=source.revision)
    rows: Any = builder.as_streaming_dataset(split=source.split).take(source.take)
    key = f"{source.path} {builder.hash} {builder.config_id} {source.split} {source.take}"
    fingerprint = xxhash.xxh64(key.encode()).hexdigest()
    return Dataset.from_generator(partial(iter, rows), features=rows.features, fingerprint=fingerprint)


def _column(source: Source, dataset: Dataset) -> Dataset:
    """`dataset` with only its documents, in a column `text` or `messages`."""
    if not len(dataset):
        raise ValueError(f"{source.name} has no rows. Remove it or write it again.")
    columns = dataset.column_names
    if source.messages is None and source.text == "text" and "text" not in columns:
        for asked, answer in _PAIRS:
            if {asked, answer} <= {*columns}:
                return _of_pairs(source, dataset, asked, answer)
    wanted, name = (source.messages, "messages") if source.messages else (source.text, "text")
    if wanted not in columns:
        hint = f" Name the right one in the source, as {name}: COLUMN."
        hint = next((f" For conversations, set messages: {column}." for column in _CHATS if column in columns), hint)
        if source.messages and any({*pair} <= {*columns} for pair in _PAIRS):
            hint = " These rows are read as conversations without it: drop messages."
        raise ValueError(f"{source.name} has no column {wanted!r}{suggest(wanted, columns)}{hint}")
    dataset = dataset.select_columns([wanted])
    example = next((row[wanted] for row in dataset if row[wanted]), None)
    if name == "text":
        if getattr(dataset.features[wanted], "dtype", "") not in ("string", "large_string"):  # rows of several types
            others = (row[wanted] for row in dataset if row[wanted] and not isinstance(row[wanted], str))
            example = next(others, example)
        valid, what = isinstance(example, str), "text"
    else:
        turn = example[0] if isinstance(example, list) else None
        keys = {*turn} if isinstance(turn, dict) else set()
        valid, what = {"role", "content"} <= keys, "lists of messages with role and content, or from and value"
        if {"from", "value"} <= keys:
            dataset, valid = dataset.map(lambda row: {wanted: _of_sharegpt(source, row[wanted] or [])}), True
    if not valid:
        got = "only blank values" if example is None else shown(example)
        raise ValueError(f"column {wanted!r} of {source.name} must hold {what}, got {got}.")
    return dataset if wanted == name else dataset.rename_column(wanted, name)


def _of_pairs(source: Source, dataset: Dataset, asked: str, answer: str) -> Dataset:
    """Rows of a question and its answer as conversations; Alpaca's `input` follows its instruction."""

    def conversation(row: dict[str, Any]) -> dict[str, Any]:
        if isinstance(row[asked], list) and isinstance(row[answer], list):  # TRL's may be messages already
            return {"messages": row[asked] + row[answer]}
        question = "\n\n".join(part for part in (_said(source, row[asked]), _said(source, row.get("input"))) if part)
        system, answered = _said(source, row.get("system")), _said(source, row[answer])
        turns = [("system", system)] * bool(system) + [("user", question), ("assistant", answered)]
        return {"messages": [{"role": role, "content": said} for role, said in turns] if question and answered else []}

    return dataset.map(conversation, remove_columns=dataset.column_names)


def _of_sharegpt(source: Source, turns: list[dict[str, Any] | None]) -> list[dict[str, str]]:
    """The conversation with role and content; an empty one, which is skipped, if a turn is missing or blank."""
    if any(turn is not None and not {"from", "value"} <= {*turn} for turn in turns):
        raise ValueError(
            f"{source.name} mixes conversations of from and value with others. Write all with role and content."
        )
    said = [(turn["from"], _said(source, turn["value"])) for turn in turns if turn is not None]
    unknown = sorted({str(who) for who, _ in said} - {*_SHAREGPT})
    if unknown:
        raise ValueError(
            f"{source.name} has turns from {', '.join(unknown)}, known are {', '.join(_SHAREGPT)}. Leave these "
            "conversations out, or write them as messages with role and content."
        )
    whole = len(said) == len(turns) and all(text for _, text in said)
    return [{"role": _SHAREGPT[who], "content": text} for who, text in said] if whole else []


def _said(source: Source, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{source.name} holds {shown(value)} where a text is expected. Write it as text.")
    return value or ""
