"""Rows that train retrieval: sentences with numbers hidden in a text, and questions about them at the end.

Retrieval tasks among the text of continued pre-training are from Yang et al. (2025), "Qwen2.5-1M Technical Report";
facts at every depth of the context from An et al. (2024), "Make Your LLM Fully Utilize the Context"; several keys in
one context from Xiong et al. (2024), "From Artificial Needles to Real Haystacks". The latter two tune chat models and
train on answers alone. Here the rows take the place of text, so all of it is trained on, except the hidden numbers,
which nothing predicts where they are first said.

No word or number is one of the evaluation's (`ctxext.evals.needle`), whose numbers have 5 and 7 digits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The sentence to hide, the question, and its answer.
FORMS = (
    ("They counted the {who} {n} times.", "How often did they count the {who}?", "They counted it {n} times."),
    ("Parcel {n} went to the {who}.", "Which parcel went to the {who}?", "It got parcel {n}."),
    ("Somebody paid {n} crowns for the {who}.", "How much did the {who} cost?", "It cost {n} crowns."),
    ("The {who} sleeps in cabin {n}.", "Where does the {who} sleep?", "It sleeps in cabin {n}."),
)
COLOURS = (
    "amber", "black", "brown", "crimson", "golden", "green", "grey", "purple", "scarlet", "silver", "white", "yellow",
)  # fmt: skip
ANIMALS = (
    "badger", "falcon", "heron", "horse", "lizard", "otter", "parrot", "pony", "rabbit", "spaniel", "tortoise", "wolf",
)  # fmt: skip
DIGITS = (4, 6)
MOST = len(COLOURS) * len(ANIMALS)  # sentences of a row
SHARE = 4  # at most a quarter of a row is not text
# The ends of sentences, before closing quotes.
_ENDS, _QUOTES = (".", "!", "?", "。", "！", "？"), "\"'”’)_」』 "

Row = tuple[Int[np.ndarray, " token"], Bool[np.ndarray, " token"]]


@dataclass
class RetrievalRows:
    """Makes rows of exactly `length` tokens, each a document; a function of the seed, the row's number and the text.

    The sentences of a row have one form and different keys. The first is before all text, the second behind it, the
    others are at depths drawn uniformly, at the nearest end of a sentence; a single one is at either end or between.
    All are asked for, in another order.

    Attributes:
        sentences: at most so many in a row; fewer if they and their questions are more than a quarter of it.
        prefix, suffix: the special tokens of a document.

    Raises:
        ValueError: `length` is too short for one sentence and its question.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    sentences: int
    seed: int
    prefix: list[int]
    suffix: list[int]
    _is_end: dict[int, bool] = field(default_factory=dict, repr=False)

    def row(self, number: int, text: Int[np.ndarray, " token"]) -> tuple[Row, int]:
        """The ids of row `number`, and where they have a loss, from the beginning of `text`, `length` tokens or more.

        Returns:
            The row, and how many tokens of the text it took.
        """
        rng = Random(f"{self.seed} {number}")
        said, question, answer = rng.choice(FORMS)
        keys = [f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS]
        facts = [(who, _number(rng)) for who in rng.sample(keys, self.sentences)]
        hidden = [self._sentence(f" {said}", *fact, has_loss=False) for fact in facts]
        asked = [[*self._sentence(f"\n{question}", *fact), *self._sentence(f" {answer}", *fact)] for fact in facts]
        ends = len(self.prefix) + len(self.suffix)
        while (added := ends + sum(map(len, (*hidden, *asked)))) > self.length // SHARE and len(hidden) > 1:
            hidden.pop()
            asked.pop()
        asked = rng.sample(asked, len(asked))
        room = self.length - added
        if room < added:
            raise ValueError(
                f"a retrieval row needs at least {2 * added} tokens with this tokenizer, got {self.length}. Raise "
                "data.length, or drop the source with `retrieval`."
            )
        taken = text[:room]
        depths = [0.0, 1.0, *(rng.random() for _ in hidden)][: len(hidden)]
        if len(hidden) == 1:
            depths = [rng.choice((0.0, 1.0, rng.random()))]
        parts: list[list[tuple[int, bool]]] = [[(token, True) for token in self.prefix]]
        done = 0
        for place, sentence in sorted(zip(self._places(taken, depths), hidden), key=lambda pair: pair[0]):
            parts += [[(int(token), True) for token in taken[done:place]], sentence]
            done = place
        parts += [[(int(token), True) for token in taken[done:]], *asked, [(token, True) for token in self.suffix]]
        ids, has_loss = zip(*(token for part in parts for token in part))
        return (np.array(ids, np.int32), np.array(has_loss)), room

    def _sentence(self, form: str, who: str, number: str, has_loss: bool = True) -> list[tuple[int, bool]]:
        """The tokens of a sentence, and whether they have a loss: its number only if `has_loss`."""
        before, said, after = form.format(who=who, n=" {n}").partition("  {n}")
        numbers = [(token, has_loss) for token in self._encode(f" {number}" * bool(said))]
        return [(token, True) for token in self._encode(before)] + numbers + [(t, True) for t in self._encode(after)]

    def _encode(self, text: str) -> list[int]:
        """The tokens of `text` behind another sentence."""
        options = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        before, whole = (self.tokenizer(each, **options)["input_ids"] for each in (".", f".{text}"))
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self.tokenizer(text, **options)["input_ids"]

    def _places(self, text: Int[np.ndarray, " token"], depths: list[float]) -> list[int]:
        """The ends of sentences nearest to the depths; the ends of the text for 0 and 1."""
        for token in np.unique(text).tolist():
            if token not in self._is_end:
                self._is_end[token] = str(self.tokenizer.decode([token])).rstrip(_QUOTES).endswith(_ENDS)
        ends = np.flatnonzero([self._is_end[token] for token in text.tolist()]) + 1
        places = []
        for depth in depths:
            place = round(depth * len(text))
            if len(ends) and 0 < depth < 1:
                place = int(ends[np.abs(ends - place).argmin()])
            places.append(place)
        return places


def _number(rng: Random) -> str:
    digits = rng.choice(DIGITS)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))
