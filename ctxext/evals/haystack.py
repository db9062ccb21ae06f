"""Natural text to hide things in: where its tokens begin and where its sentences end."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A full stop behind a title ends no sentence; Chinese and Japanese put no space behind theirs.
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"'”’)_]*(?=\s)|[。！？]+[」』”’）\"')]*")
# The easy mode: it tests saliency more than retrieval. Mohtashami and Jaggi (2023).
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True, eq=False)
class Haystack:
    """A long text, and the tokens that a tokenizer makes of it.

    Attributes:
        token_ids: the tokens of the text, written once.
        token_starts: where each token begins, in characters, ascending.
        sentence_ends: where each sentence ends, in characters, ascending: what is put there stands
            between two sentences.
        repeats: how often the text was written one after the other to be long enough.
        name: for people.
    """

    text: str
    token_ids: list[int]
    token_starts: list[int]
    sentence_ends: list[int]
    repeats: int = 1
    name: str = "text"

    @classmethod
    def from_text(
        cls, text: str, tokenizer: PreTrainedTokenizerBase, *, at_least: int = 0, name: str = "text"
    ) -> Haystack:
        """Tokenise `text`, repeated until it has `at_least` tokens (0: as it is).

        Raises:
            ValueError: the text has no sentence, or the tokenizer is not a fast one, whose offsets place
                sentence ends on tokens.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so sentence ends cannot be "
                "placed on tokens. Load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
            )
        text = text.strip() + "\n"
        sentence_ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        if not sentence_ends:
            raise ValueError(f"{name} has no sentence to cut at (it has {len(text.strip())} characters). Pass prose.")
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        repeats = max(1, -(-at_least // len(starts)))
        shifts = [k * len(text) for k in range(repeats)]
        return cls(
            text=text * repeats,
            token_ids=list(encoded["input_ids"]),
            token_starts=[shift + start for shift in shifts for start in starts],
            sentence_ends=[shift + end for shift in shifts for end in sentence_ends],
            repeats=repeats,
            name=name,
        )

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase, *, at_least: int = 0) -> Haystack:
        """As `from_text`, of what `read_prose` reads."""
        return cls.from_text(read_prose(path), tokenizer, at_least=at_least, name=Path(path).name)

    @cached_property
    def fingerprint(self) -> str:
        return blake2b(self.text.encode(), digest_size=8).hexdigest()

    @property
    def n_tokens(self) -> int:
        """Tokens of the text, written once."""
        return len(self.token_ids)

    def n_bytes(self, first: int, end: int) -> int:
        """UTF-8 bytes of the tokens from `first` up to `end`, on the ring that the text, written once, makes."""
        n = self.n_tokens
        once = self.text[: len(self.text) // self.repeats]
        chars = [*self.token_starts[:n], len(once)]
        parts = [(first, end)] if end <= n else [(first, n), (0, end - n)] if first <= n else [(first - n, end - n)]
        return sum(len(once[chars[low] : chars[high]].encode()) for low, high in parts)

    def token_at(self, char: int) -> int:
        """The index of the first token that begins at `char` or behind it."""
        return bisect_left(self.token_starts, char)

    def exact_window(
        self, length: int, guess: int, count: Callable[[int, int], int], rng: Random
    ) -> tuple[int, int] | None:
        """A `(start, end)` in characters for which `count(start, end)` is exactly `length`; None if none was found.

        The end is a random sentence end, the start is where a word begins if possible. Tokens of neighbouring
        pieces can merge, so the size is not computed but counted, and the start moved until it fits.

        Args:
            guess: about how many tokens the window itself will have.

        Raises:
            ValueError: the text is too short.
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
                if attempt < 20:  # where that never fits, as in repeated filler, begin within a word
                    token = self._word_start(token, step)
                if not 0 <= token < self.token_at(end):
                    break
                excess = count(self.token_starts[token], end) - length
                if excess == 0:
                    return self.token_starts[token], end
                token, step = token + excess, 1 if excess > 0 else -1
        return None

    def _word_start(self, token: int, step: int) -> int:
        """The first token with which a word begins, from `token` on forwards (step 1) or backwards (-1)."""
        while 0 < token < len(self.token_starts):
            start = self.token_starts[token]
            if self.text[start].isspace() or self.text[start - 1].isspace():
                break
            token += step
        return token

    def cuts(self, start: int, end: int, depth: float) -> Iterator[int]:
        """The sentence ends in `[start, end]`, in characters, from the one nearest to `depth` tokens on."""
        first, last = self.token_at(start), self.token_at(end)
        target = first + depth * (last - first)
        low, high = bisect_left(self.sentence_ends, start), bisect_left(self.sentence_ends, end + 1)
        inside = self.sentence_ends[low:high]
        yield from sorted(inside, key=lambda cut: abs(self.token_at(cut) - target))


def read_prose(path: str | Path) -> str:
    """The text in a file. Raises ValueError if it is no UTF-8 text, OSError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text ({error.reason} at byte {error.start}). Pass prose.") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}). Pass a text file.") from None
