"""Natural text to hide things in: token ids, and the places where a sentence ends."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A full stop behind a title ends no sentence.
_SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"'”’)_]*(?=\s)")


@dataclass(frozen=True)
class Haystack:
    """A long text as token ids, without special tokens.

    `sentence_ends` are indices into `ids`, ascending: a cut there falls between two sentences.
    """

    ids: list[int]
    sentence_ends: list[int]

    @classmethod
    def from_text(cls, text: str, tokenizer: PreTrainedTokenizerBase) -> Haystack:
        """Tokenise `text` once. Needs a fast tokenizer, whose offsets place the sentence ends."""
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so sentence ends cannot be "
                "placed on tokens. Load it with AutoTokenizer.from_pretrained(..., use_fast=True)."
            )
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        ends = [bisect_left(starts, match.end()) for match in _SENTENCE_END.finditer(text)]
        return cls(ids=list(encoded["input_ids"]), sentence_ends=sorted({0, *ends}))

    @classmethod
    def from_file(cls, path: str | Path, tokenizer: PreTrainedTokenizerBase) -> Haystack:
        return cls.from_text(Path(path).read_text(encoding="utf-8"), tokenizer)

    def window(self, n_tokens: int, rng: Random) -> tuple[int, int]:
        """A random `(start, end)` of exactly `n_tokens` tokens that ends where a sentence ends."""
        first = bisect_left(self.sentence_ends, n_tokens)
        if first == len(self.sentence_ends):
            raise ValueError(f"the haystack has {len(self.ids)} tokens, but {n_tokens} are needed. Pass a longer text.")
        end = rng.choice(self.sentence_ends[first:])
        return end - n_tokens, end

    def cut(self, start: int, end: int, depth: float) -> int:
        """The sentence end in `[start, end]` that is nearest to `depth` (0 = start, 1 = end)."""
        target = start + depth * (end - start)
        low = bisect_left(self.sentence_ends, start)
        high = bisect_left(self.sentence_ends, end + 1)
        inside = self.sentence_ends[low:high]
        return min(inside, key=lambda cut: abs(cut - target), default=end)
