"""Haystacks: natural text with the positions of its tokens and sentence ends."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from ctxext.data.sources import Source, is_table, read_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A full stop after a title does not end a sentence; Chinese and Japanese have no space after theirs.
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"'”’)_]*(?=\s)|[。！？]+[」』”’）\"')]*")
# Before functions and classes of Python; in long ones before methods, then before empty lines.
CODE_ENDS = tuple(
    re.compile(rf"(?=\n{{2,}}{line})") for line in (r"(?:@|async def |def |class )", r" +(?:@|async def |def )", "")
)
# Where to cut text without sentence ends for `_LONG` characters, such as Thai or minified code: before a line's end,
# before a space, after a clause; then anywhere.
_FINER = [re.compile(pattern) for pattern in (r"(?=\n)", r"(?=\s)", r"[;,:})\]；，、：]+", r"(?s).{32,64}?(?=\w)")]
_LONG = 2000
# A longer "word" is text without spaces.
_LONG_WORD = 40
# The easy mode: it tests saliency more than retrieval. Mohtashami and Jaggi (2023).
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True, eq=False)
class Haystack:
    """A long text and its tokens.

    Attributes:
        token_ids: the tokens of the text, without repeats.
        token_starts: the start of each token, in characters, ascending.
        sentence_ends: where needles can be inserted, in characters, ascending: the ends of sentences, or of lines,
            words or clauses if a text has no sentences.
        repeats: how often the text is repeated to be long enough.
        name: a display name.
        documents: the first token of each document, where each is read on its own; the last entry is `n_tokens`.
    """

    text: str
    token_ids: list[int]
    token_starts: list[int]
    sentence_ends: list[int]
    repeats: int = 1
    name: str = "text"
    documents: tuple[int, ...] = ()

    @classmethod
    def from_text(
        cls,
        text: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        at_least: int = 0,
        name: str = "text",
        ends: Sequence[re.Pattern[str]] = (_SENTENCE_END,),
    ) -> Haystack:
        """Tokenise `text`, repeated until it has `at_least` tokens.

        Args:
            ends: where needles can be inserted, the end of each match; the second and later ones in long stretches.

        Raises:
            ValueError: the text is empty, or the tokenizer is not a fast one (its offsets are needed).
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it gives no token "
                "offsets. Load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
            )
        text = text.strip() + "\n"
        if text.isspace():
            raise ValueError(f"{name} is empty. Pass a text.")
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        once = cls(text, list(encoded["input_ids"]), starts, _cuts(text, ends), name=name)
        return _repeated(once, once._copies(at_least))

    @classmethod
    def of_documents(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase, *, at_least: int = 0) -> Haystack:
        """Like `from_file`, for a table of texts; perplexity reads each document on its own.

        Raises ValueError if `path` is not a .jsonl, .json or .parquet file.
        """
        if not is_table(path):
            raise ValueError(f"{path} is not a table of documents. Pass a .jsonl file with a column `text`.")
        rows = [row.strip() for row in read_rows(path) if row.strip()]
        whole = cls.from_text("\n".join(rows), tokenizer, at_least=at_least, name=Path(path).name)
        firsts = [0, *accumulate(len(row) + 1 for row in rows[:-1])]
        return replace(whole, documents=(*map(whole.token_at, firsts), whole.n_tokens))

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase, *, at_least: int = 0) -> Haystack:
        """Like `from_text`, for a file that `read_prose` reads."""
        return cls.from_text(read_prose(path), tokenizer, at_least=at_least, name=Path(path).name)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text without repeats, and of where its documents begin."""
        documents = str(self.documents) if self.documents else ""
        return blake2b((self.once + documents).encode(), digest_size=8).hexdigest()

    @property
    def once(self) -> str:
        return self.text[: len(self.text) // self.repeats]

    def for_length(self, length: int) -> Haystack:
        """The same text, repeated as often as prompts of `length` tokens need."""
        return _repeated(self, min(self.repeats, self._copies(length)))

    def _copies(self, length: int) -> int:
        # One more than the length needs, so that a window may begin anywhere.
        return 1 if length <= self.n_tokens else 1 - -length // self.n_tokens

    @property
    def n_tokens(self) -> int:
        """The number of tokens without repeats."""
        return len(self.token_ids)

    def n_bytes(self, first: int, end: int) -> int:
        """UTF-8 bytes of the tokens from `first` to `end`, with the text as a ring: `end` is below twice `n_tokens`."""
        once, starts = self.once, self.token_starts[: self.n_tokens]
        chars = [*starts, *(len(once) + start for start in starts)]
        return len((once * 2)[chars[first] : chars[end]].encode())

    def stretch(self, first: int, end: int) -> tuple[str, tuple[int, ...]]:
        """The text of the tokens from `first` to `end`, as in `n_bytes`, and where each begins in it.

        A last token that is a part of a character counts with all of it.
        """
        once, starts = self.once, self.token_starts[: self.n_tokens]
        chars = [*starts, *(len(once) + start for start in starts), 2 * len(once)]
        text = (once * 2)[chars[first] : chars[bisect_right(chars, chars[end - 1])]]
        return text, tuple(char - chars[first] for char in chars[first:end])

    def document(self, rank: int, n_tokens: int) -> int:
        """The first token of the document of this rank, longest first.

        Raises ValueError if there are not as many, or if it is shorter than `n_tokens`.
        """
        sizes = {start: end - start for start, end in pairwise(self.documents)}
        longest = sorted(sizes, key=lambda start: -sizes[start])
        if rank >= len(longest) or sizes[longest[rank]] < n_tokens:
            enough = sum(size >= n_tokens for size in sizes.values())
            raise ValueError(
                f"{self.name} has {enough} documents of {n_tokens:,} tokens or more, and window {rank + 1} needs one "
                f"of its own. Pass windows={enough}, shorter lengths or longer documents."
            )
        return longest[rank]

    def token_at(self, char: int) -> int:
        """The index of the first token that begins at `char` or later."""
        return bisect_left(self.token_starts, char)

    def exact_window(
        self, length: int, guess: int, count: Callable[[int, int], int], rng: Random
    ) -> tuple[int, int] | None:
        """Find `(start, end)` in characters with `count(start, end) == length`, or None.

        The end is a random sentence end, the start the beginning of a word if possible, moved until the size fits.
        Raises ValueError if the text is too short.

        Args:
            guess: the approximate size of the window in tokens. The exact size is `count`'s: neighbouring pieces merge.
        """
        first = bisect_left(self.sentence_ends, self.token_starts[min(guess + 64, len(self.token_starts)) - 1])
        if guess > len(self.token_starts) or first >= len(self.sentence_ends):
            raise ValueError(
                f"the haystack has {len(self.token_starts):,} tokens, but about {guess:,} are needed. "
                "Pass a longer text."
            )
        for attempt in range(40):
            end = rng.choice(self.sentence_ends[first:])
            token, step = self.token_at(end) - guess, -1
            for _ in range(4):
                if attempt < 20:  # if that never fits, as in repeated filler, begin within a word
                    token = self._word_start(token, step)
                if not 0 <= token < self.token_at(end):
                    break
                excess = count(self.token_starts[token], end) - length
                if excess == 0:
                    return self.token_starts[token], end
                token, step = token + excess, 1 if excess > 0 else -1
        return None

    def _word_start(self, token: int, step: int) -> int:
        """The nearest token that begins a word, from `token` forwards (step 1) or backwards (-1).

        `token` itself if none is near, as in text without spaces.
        """
        for near in range(token, token + 64 * step, step):
            start = self.token_starts[near] if 0 < near < len(self.token_starts) else 0
            if start == 0 or self.text[start].isspace() or self.text[start - 1].isspace():
                return near
        return token

    def cuts(self, start: int, end: int, depth: float) -> Iterator[int]:
        """The sentence ends in `[start, end]`, in characters, ordered by distance to `depth`, in tokens."""
        first, last = self.token_at(start), self.token_at(end)
        target = first + depth * (last - first)
        low, high = bisect_left(self.sentence_ends, start), bisect_left(self.sentence_ends, end + 1)
        inside = self.sentence_ends[low:high]
        yield from sorted(inside, key=lambda cut: abs(self.token_at(cut) - target))


@lru_cache(maxsize=32)
def _repeated(haystack: Haystack, repeats: int) -> Haystack:
    """The same text with another number of repeats."""
    if repeats == haystack.repeats:
        return haystack
    once, n_ends = haystack.once, len(haystack.sentence_ends) // haystack.repeats
    shifts = [k * len(once) for k in range(repeats)]
    return replace(
        haystack,
        text=once * repeats,
        token_starts=[shift + start for shift in shifts for start in haystack.token_starts[: haystack.n_tokens]],
        sentence_ends=[shift + end for shift in shifts for end in haystack.sentence_ends[:n_ends]],
        repeats=repeats,
    )


def _cuts(text: str, ends: Sequence[re.Pattern[str]]) -> list[int]:
    """The ends of sentences; in long stretches without any, the next best places."""
    cuts = [match.end() for match in ends[0].finditer(text)]
    for finer in (*ends[1:], *_FINER):
        stretches = [(a, b) for a, b in pairwise([0, *cuts, len(text)]) if b - a > _LONG or not cuts]
        cuts = sorted({*cuts, *(match.end() for a, b in stretches for match in finer.finditer(text, a, b))} - {0})
    return cuts


def words_in(text: str) -> list[tuple[int, int]]:
    """The start and end of each word; of each character in text without spaces."""
    spans: list[tuple[int, int]] = []
    for match in re.finditer(r"\S+", text):
        first, end = match.span()
        inner = range(first + 1, end) if end - first > _LONG_WORD else ()
        # Keep vowel signs with their letters.
        bounds = [first, *(k for k in inner if unicodedata.category(text[k])[0] != "M"), end]
        spans += pairwise(bounds)
    return spans


def read_prose(path: str | Path) -> str:
    """Read the text of a file; of .jsonl, .json or .parquet (also gzipped), the column `text`, joined.

    Raises:
        ValueError: it is not UTF-8 text, or has no such column.
        OSError: it cannot be read.
    """
    if is_table(path):
        return "\n".join(read_rows(path))
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text ({error.reason} at byte {error.start}). Pass prose.") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}). Pass a text file.") from None


def read_rows(path: str | Path) -> list[str]:
    """The texts of a table, without empty ones. Raises as `read_prose`."""
    return [row for row in read_source(Source(path=str(path)), Path.cwd())["text"] if row]
