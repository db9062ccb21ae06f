"""Tokenise documents and pack them into rows of one length, cached by `datasets`, with every token accounted for."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ctxext.data.retrieval import RetrievalRows
from ctxext.data.sources import Source
from ctxext.utils.extras import require
from ctxext.utils.values import counted, shown, suggest

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # transformers' label of a token that has no loss
# The cache identifies an installed package's functions by name only: increase this whenever they produce different
# rows.
_VERSION = 3
# Documents are packed in batches of about this many rows, so that little space is lost at a batch's end.
_ROWS_PER_BATCH = 128
# A chat template marks assistant turns with this tag, for transformers' assistant mask.
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The token counts of a source: `tokens_read == tokens_in_rows - padding - added + dropped`.

    Pieces of a split document count as documents. `blank` are rows of the source without text, which are skipped.
    `added` is what retrieval rows hold besides text. `dropped` is the text that fills no row, of joined documents or
    retrieval rows; `targets` are tokens with a loss.
    """

    documents: int
    blank: int = 0
    tokens_read: int
    tokens_in_rows: int
    padding: int
    added: int = 0
    dropped: int
    targets: int

    def __str__(self) -> str:
        added = f", {self.added:,} added to retrieve" * bool(self.added)
        rows = f"{self.tokens_in_rows:,} in rows ({self.padding:,} of padding{added}, {self.dropped:,} dropped)"
        blank = f" ({self.blank:,} more without text are skipped)" if self.blank else ""
        return f"{counted(self.documents, 'document')}{blank}, {self.tokens_read:,} tokens, {rows}"


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A source as rows of `length` tokens.

    A row has `input_ids` and `labels`, (length,), with unshifted labels that are -100 where a token has no loss;
    `documents`, the lengths of its documents, the last of which is the padding; `padding` and `added`, their tokens
    (see `Accounting`); and `n_targets`, the number of labels[1:] that are not -100.
    """

    source: Source
    length: int
    rows: Dataset
    accounting: Accounting

    @property
    def fingerprint(self) -> str:
        """A hash of the rows alone, not of their files."""
        import xxhash

        digest = xxhash.xxh64()
        for name in ("input_ids", "labels", "documents"):
            for chunk in self.rows.data.column(name).chunks:
                digest.update(np.ascontiguousarray(_flat(chunk)).data)
        return f"{self.source.name} {digest.hexdigest()}"


def lengths_of(packed: Iterable[Packed]) -> Iterator[int]:
    """The length of every document, in tokens. The last one of a padded row is its padding."""
    for part in packed:
        for documents, padding in zip(part.rows["documents"], part.rows["padding"]):
            yield from documents[:-1] if padding else documents


def pack(
    source: Source,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    documents: Literal["separate", "joined"] = "separate",
    *,
    vocab_size: int | None = None,
    num_proc: int | None = None,
    seed: int = 0,
) -> Packed:
    """Tokenise the documents of `source` and pack them into rows of `length` tokens.

    A document begins with the tokenizer's special tokens and ends with EOS, if there is one. Beyond
    `source.max_document` it is split into pieces that each begin like a document. Conversations are rendered by the
    chat template. A second call with the same text, tokenizer and settings reads the cache.

    "separate": documents stay whole, packed by best-fit decreasing; longer ones are split at `length`. The first token
    of a document has no loss, since nothing within the document predicts it. "joined": all documents are concatenated
    into one and split at row ends. A source with `retrieval` makes documents of exactly one row for either.

    Args:
        dataset: as `read_source` returns it, with one column `text` or `messages`.
        vocab_size: token ids that the model embeds; None checks none.
        num_proc: tokenisation processes; rows do not depend on them.
        seed: of retrieval rows.

    Raises:
        ValueError: no row is filled or no token has a loss; joined documents with `max_document`; a tokenizer without
            chat template, or with one whose assistant turns cannot be located; a token outside the model's vocabulary.
    """
    require("eval")
    from datasets import Features, Sequence, Value

    if documents not in ("separate", "joined"):
        raise ValueError(f"unknown documents {documents!r}{suggest(str(documents), ['separate', 'joined'])}")
    joined = documents == "joined" or source.retrieval
    if joined and source.max_document:
        by = "retrieval" if source.retrieval else "documents='joined'"
        raise ValueError(
            f"{source.name} has max_document={source.max_document}, which makes short documents, but "
            f"{by} makes one long one. Pack it with "
            "documents='separate' and without retrieval, or drop max_document."
        )
    prefix, suffix = _special_tokens(tokenizer)
    limit = None if joined else min(source.max_document or length, length)
    if limit is not None and limit < len(prefix) + 2:
        raise ValueError(
            f"length and max_document of {source.name} must be at least {len(prefix) + 2} tokens, got {limit}: "
            "special tokens, one to read and one to predict."
        )
    (column,) = dataset.column_names
    if column == "messages":
        if source.retrieval:
            raise ValueError(
                f"{source.name} has retrieval: {source.retrieval}, which hides sentences in text, got messages. "
                "Drop retrieval."
            )
        _check_chat(source, tokenizer)

    numbers, number = Sequence(Value("int32")), Value("int32")
    tokenised = dataset.map(
        _tokenise,
        batched=True,
        batch_size=100,
        fn_kwargs={"tokenizer": tokenizer, "prefix": prefix, "suffix": suffix, "limit": limit, "version": _VERSION},
        remove_columns=[column],
        num_proc=min(num_proc, len(dataset)) if num_proc else None,
        features=Features({"input_ids": numbers, "has_loss": Sequence(Value("bool")), "begins": Value("bool")}),
        desc=f"tokenising {source.name}",
    )
    chunks = tokenised.data.column("input_ids").chunks
    read = sum(len(_flat(chunk)) for chunk in chunks)
    if not read:
        raise ValueError(f"{source.name} has no text: every document is blank. Remove the source.")
    if joined and read < length:
        raise ValueError(
            f"the text of {source.name} has {read:,} tokens, fewer than one sequence of {length:,}. "
            "Pass a longer text or a shorter length."
        )
    largest = max(int(_flat(chunk).max(initial=0)) for chunk in chunks)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{source.name} has token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) but the model embeds "
            f"{vocab_size} ids (0..{vocab_size - 1}). Use the model's own tokenizer, or resize the model with "
            "resize_token_embeddings and train the new rows."
        )

    make_rows: Any = _Join(length)
    if source.retrieval:
        make_rows = _Hide(RetrievalRows(tokenizer, length, source.retrieval, seed, prefix, suffix))
    elif not joined:
        padding_id = tokenizer.eos_token_id or 0  # any valid id: it is never attended to
        make_rows = partial(_fit, length=length, padding_id=padding_id)
    # In one process, as batches determine the rows, which must not depend on the number of processes.
    rows = tokenised.with_format("arrow").map(
        make_rows,
        batched=True,
        batch_size=math.ceil(_ROWS_PER_BATCH * length * len(tokenised) / read),
        fn_kwargs={"version": _VERSION},
        remove_columns=tokenised.column_names,
        features=Features(
            {"input_ids": numbers, "labels": numbers, "documents": numbers}
            | dict.fromkeys(("padding", "added", "n_targets"), number)
        ),
        desc=f"packing {source.name}",
    )
    rows = rows.with_format("numpy")

    counts = ("padding", "added", "n_targets")
    padding, added, targets = (sum(rows.data.column(name).to_pylist()) for name in counts)
    in_rows = len(rows) * length
    dropped = read - (in_rows - padding - added)
    if not 0 <= dropped < (length if joined else 1):
        raise RuntimeError(f"{source.name}: {read:,} tokens read, but {in_rows - padding - added:,} are in rows.")
    if not targets:
        raise ValueError(
            f"no token of {source.name} has a loss: "
            + (_no_answers(dataset) if column == "messages" else "its documents have one token each.")
        )
    blank = len(dataset) - sum(tokenised.data.column("begins").to_pylist())
    accounting = Accounting(
        documents=len(tokenised), blank=blank, tokens_read=read, tokens_in_rows=in_rows,
        padding=padding, added=added, dropped=dropped, targets=targets,
    )  # fmt: skip
    return Packed(source=source, length=length, rows=rows, accounting=accounting)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The prefix and suffix of a document: the tokenizer's special tokens, or else EOS at the end."""
    full, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return full[:start], full[start + len(bare) :] or end


def _tokenise(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    prefix: list[int],
    suffix: list[int],
    limit: int | None,
    version: int,  # for the cache alone
) -> dict[str, list[Any]]:
    if "messages" in batch:
        documents = [_read_chat(messages, tokenizer) for messages in batch["messages"] if messages]
    else:
        texts = [text for text in batch["text"] if text and not text.isspace()]
        # model_max_length warns and may truncate; a tokenizer.json may hold a truncation of its own.
        options = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        bodies = tokenizer(texts, **options)["input_ids"] if texts else []
        wholes = ([*prefix, *body, *suffix] for body in bodies)
        documents = [(ids, [True] * len(ids)) for ids in wholes]
    made: dict[str, list[Any]] = {"input_ids": [], "has_loss": [], "begins": []}
    for ids, has_loss in documents:
        if not ids:
            continue
        # The pieces after the first get the prefix too.
        cuts = [] if limit is None else range(limit, len(ids), limit - len(prefix))
        for start, end in pairwise([0, *cuts, len(ids)]):
            again = prefix if start else []
            made["input_ids"].append(np.array([*again, *ids[start:end]], dtype=np.int32))
            made["has_loss"].append(np.array([False] * len(again) + has_loss[start:end], dtype=bool))
            made["begins"].append(not start)
    return made


def _check_chat(source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{source.name} holds conversations, but the tokenizer has no chat template. "
            "Use an instruction-tuned model, or put a chat_template.jinja into the model's folder."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so assistant turns cannot be mapped to tokens."
            " Load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
        )


def _read_chat(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool] | list[int]]:
    """The token ids of a conversation, and for each whether it belongs to an assistant turn.

    Without a `{% generation %}` in the template, the messages are rendered up to each answer and up to its end: each
    rendering must be a prefix of the next.
    """
    from jinja2 import TemplateError

    # A column of dicts has all keys in every row, with None for missing ones.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in messages:
        if not isinstance(message.get("content", ""), (str, list)):  # a list of parts
            raise ValueError(f"a turn must have text as its content, got {shown(message)}. Write it as text.")
    try:
        if _GENERATION.search(tokenizer.get_chat_template()):
            encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return encoded["input_ids"], encoded["assistant_masks"]
        whole: Any = tokenizer.apply_chat_template(messages, tokenize=False)
        spans = []
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                if not k:
                    raise ValueError(
                        f"a conversation begins with an assistant turn: {messages[:1]}. Add a user turn before it."
                    )
                asked = tokenizer.apply_chat_template(messages[:k], tokenize=False, add_generation_prompt=True)
                answered: Any = tokenizer.apply_chat_template(messages[: k + 1], tokenize=False)
                if not (answered.startswith(asked) and whole.startswith(answered)):
                    raise ValueError(
                        "the chat template does not mark assistant turns: it has no {% generation %}, and its text "
                        f"for the first {k} messages is not a prefix of its text for {k + 1}. "
                        "Put {% generation %} around assistant turns in tokenizer.chat_template."
                    )
                spans.append((len(asked), len(answered)))
    except TemplateError as error:
        raise ValueError(
            f"the chat template cannot render a conversation: {error}. The conversation begins {messages[:2]}."
        ) from error
    encoded = tokenizer(
        whole, add_special_tokens=False, truncation=False, padding=False, verbose=False, return_offsets_mapping=True
    )
    starts, ends = zip(*encoded["offset_mapping"])
    marked = [False] * len(starts)
    for begin, end in spans:  # a token with a space and the first word counts, as in transformers
        first, last = bisect_right(ends, begin), bisect_left(starts, end)
        marked[first:last] = [True] * (last - first)
    return encoded["input_ids"], marked


def _no_answers(conversations: Dataset) -> str:
    """Why conversations have no token with a loss."""
    roles = {str(turn["role"]) for row in conversations for turn in row["messages"] or () if turn}
    others = f" Roles: {', '.join(sorted(roles))}; that of answers must be assistant." * ("assistant" not in roles)
    return f"no assistant turn has text.{others}"


def _flat(lists: pa.ListArray | pa.ChunkedArray) -> np.ndarray:
    """The values of all lists, one after the other."""
    import pyarrow.compute as pc

    return pc.list_flatten(lists).to_numpy(zero_copy_only=False)


def _streams(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of all documents of a batch, one after the other, and their labels."""
    ids, has_loss = (_flat(table.column(name)) for name in ("input_ids", "has_loss"))
    return ids, np.where(has_loss, ids, np.int32(IGNORED))


class _Join:
    """Concatenates all documents and splits them into rows; a batch's remainder starts the next batch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rest: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int32), np.zeros(0, np.int32))

    def __call__(self, table: pa.Table, version: int) -> pa.Table:
        ids, labels = (np.concatenate(pair) for pair in zip(self.rest, _streams(table)))
        n = len(ids) // self.length
        end = n * self.length
        self.rest = ids[end:], labels[end:]
        ids, labels = (stream[:end].reshape(n, self.length) for stream in (ids, labels))
        labels[:, 0] = IGNORED
        return _rows(ids, labels, [[self.length]] * n, [0] * n)


class _Hide:
    """Retrieval rows from all documents, one after the other; a batch's remainder starts the next batch."""

    def __init__(self, make: RetrievalRows) -> None:
        self.make, self.made = make, 0
        self.rest = np.zeros(0, np.int32)

    def __call__(self, table: pa.Table, version: int) -> pa.Table:
        text, length, rows, added = np.concatenate((self.rest, _streams(table)[0])), self.make.length, [], []
        while len(text) >= length:
            row, taken = self.make.row(self.made, text)
            rows.append(row)
            added.append(length - taken)
            text, self.made = text[taken:], self.made + 1
        self.rest = text
        ids, has_loss = (np.array([row[k] for row in rows]).reshape(-1, length) for k in (0, 1))
        labels = np.where(has_loss, ids, np.int32(IGNORED))
        labels[:, 0] = IGNORED
        return _rows(ids, labels, [[length]] * len(rows), [0] * len(rows), added)


def _fit(table: pa.Table, version: int, length: int, padding_id: int) -> pa.Table:
    """Pack whole documents of a batch into rows: the longest first, each where it leaves the least space."""
    import pyarrow.compute as pc

    ids, labels = _streams(table)
    lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
    ends = np.cumsum(lengths)
    labels[ends - lengths] = IGNORED
    rows = best_fit(lengths.tolist(), length)
    row_ids = np.full((len(rows), length), padding_id, dtype=np.int32)
    row_labels = np.full((len(rows), length), IGNORED, dtype=np.int32)
    documents, padding = [], []
    for k, row in enumerate(rows):
        start = 0
        for document in row:
            place = slice(start, start := start + lengths[document])
            where = slice(ends[document] - lengths[document], ends[document])
            row_ids[k, place], row_labels[k, place] = ids[where], labels[where]
        padding.append(length - start)
        documents.append([*lengths[row], *padding[-1:]] if start < length else lengths[row])
    return _rows(row_ids, row_labels, documents, padding)


def best_fit(lengths: list[int], space: int) -> list[list[int]]:
    """Assign items of at most `space` to bins of `space` by best-fit decreasing (Johnson 1973).

    Uses at most 11/9 of the optimal number of bins, plus one.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (space left, bin), ascending
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[item], -1))
        if at == len(free):
            bins.append([])
            left, chosen = space, len(bins) - 1
        else:
            left, chosen = free.pop(at)
        bins[chosen].append(item)
        if left > lengths[item]:
            insort(free, (left - lengths[item], chosen))
    return bins


def _rows(
    ids: np.ndarray, labels: np.ndarray, documents: list[Any], padding: list[int], added: list[int] | None = None
) -> pa.Table:
    """A table of rows from `ids` and `labels`, (rows, length)."""
    import pyarrow as pa

    lists = pa.list_(pa.int32())
    return pa.table(
        {
            "input_ids": pa.array([*ids], lists),
            "labels": pa.array([*labels], lists),
            "documents": pa.array(documents, lists),
            "padding": pa.array(padding, pa.int32()),
            "added": pa.array(added or [0] * len(padding), pa.int32()),
            "n_targets": pa.array((labels[:, 1:] != IGNORED).sum(1), pa.int32()),
        }
    )
