"""Training rows for λ: text and hidden passkeys, a function of seed and step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place


@dataclass(frozen=True)
class Episode:
    """A row of tokens.

    Attributes:
        text_from: index of the first token whose loss counts as text: the second, or the one after BOS.
        n_answer: number of answer tokens at the end; 0 for plain text.
    """

    input_ids: tuple[int, ...]
    text_from: int
    n_answer: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Material:
    """A text in a model's tokens, and the trained and target lengths.

    Attributes:
        trained, target: tokens.
    """

    haystack: Haystack
    prompter: Prompter
    trained: int
    target: int

    def text(self, length: int, seed: int, trial: int = 0) -> Episode:
        """A row of plain text."""
        bos = self.prompter.bos
        ids = Perplexity().window(Place("perplexity", length, None, trial, seed), self.haystack, bos).input_ids
        return Episode(ids, max(1, len(bos)))

    def hidden(self, length: int, depth: float, seed: int, trial: int = 0) -> Episode:
        """A row with a hidden passkey and its question."""
        sample = Passkey().sample(Place("passkey", length, depth, trial, seed), self.prompter, self.haystack)
        return Episode(sample.input_ids, 1, len(sample.input_ids) - sample.n_prompt)

    def texts(self, seed: int, n_rows: int) -> tuple[list[Episode], list[Episode]]:
        """The rows of an evaluation: two texts of the trained length, and rows of the target length with a passkey."""
        rng = Random(f"fit {seed}")
        shorts = [self.text(self.trained, rng.randrange(2**31)) for _ in range(2)]
        # Two in seven at the very beginning or just before the question, where most passkeys are missed.
        places = [1.4 * (k + rng.random()) / n_rows - 0.2 for k in range(n_rows)]
        return shorts, [self.hidden(self.target, min(1.0, max(0.0, at)), rng.randrange(2**31)) for at in places]

    def between(self, shortest: int, share: float) -> int:
        """The length in tokens at `share` of the way from `shortest` to the target, on a logarithmic scale."""
        return round(shortest * (self.target / shortest) ** share)


def split(
    text: str, prompter: Prompter, trained: int, target: int, held_out: float = 0.25, name: str = "text"
) -> tuple[Material, Material]:
    """Split a text into a training part and a held-out end, each at least the target length.

    Args:
        trained, target: tokens.
        held_out: the held-out share.

    Raises:
        ValueError: the text is too short for both.
    """
    n = Haystack.from_text(text, prompter.tokenizer, name=name).n_tokens
    # Tokens per character vary over the text.
    share = max(held_out, 1.1 * target / n)
    if share > 0.5:
        raise ValueError(
            f"{name} has {n:,} tokens, too few to fit at {target:,}: the training and held-out parts each "
            f"need more than that, {math.ceil(2.2 * target):,} in all. Pass a longer text, or a smaller factor."
        )
    cut = round(len(text) * (1 - share))
    parts = (Haystack.from_text(part, prompter.tokenizer, name=name) for part in (text[:cut], text[cut:]))
    learnt, other = (Material(part, prompter, trained, target) for part in parts)
    return learnt, other
