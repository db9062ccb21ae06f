"""What λ is fitted on: pieces of a text and hidden numbers, a function of the seed and the step alone."""

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
        text_from: index of the first token whose loss counts as text: the second, or the one behind BOS.
        n_answer: how many at the end answer a question about what the text hides; 0 for text alone.
    """

    input_ids: tuple[int, ...]
    text_from: int
    n_answer: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Material:
    """Text of one model's tokens, and the lengths that matter.

    Attributes:
        trained, target: tokens.
    """

    haystack: Haystack
    prompter: Prompter
    trained: int
    target: int

    def text(self, length: int, seed: int, trial: int = 0) -> Episode:
        """Text alone."""
        bos = self.prompter.bos
        ids = Perplexity().window(Place("perplexity", length, None, trial, seed), self.haystack, bos).input_ids
        return Episode(ids, max(1, len(bos)))

    def hidden(self, length: int, depth: float, seed: int, trial: int = 0) -> Episode:
        """Text that hides a passkey and asks for it."""
        sample = Passkey().sample(Place("passkey", length, depth, trial, seed), self.prompter, self.haystack)
        return Episode(sample.input_ids, 1, len(sample.input_ids) - sample.n_prompt)

    def texts(self, seed: int, n_rows: int) -> tuple[list[Episode], list[Episode]]:
        """What a fit reads: two texts of the trained length, and rows of the target length that hide a key."""
        rng = Random(f"fit {seed}")
        shorts = [self.text(self.trained, rng.randrange(2**31)) for _ in range(2)]
        # Two in seven right at the beginning or right before the question, where most keys are lost.
        places = [1.4 * (k + rng.random()) / n_rows - 0.2 for k in range(n_rows)]
        return shorts, [self.hidden(self.target, min(1.0, max(0.0, at)), rng.randrange(2**31)) for at in places]

    def between(self, shortest: int, share: float) -> int:
        """The length in tokens at `share` of the way from `shortest` to the target, in its logarithm."""
        return round(shortest * (self.target / shortest) ** share)


def split(
    text: str, prompter: Prompter, trained: int, target: int, held_out: float = 0.25, name: str = "text"
) -> tuple[Material, Material]:
    """A text to learn from, and its end, on which to choose: at least the target length of each.

    Args:
        trained, target: tokens.
        held_out: the share of the end.

    Raises:
        ValueError: the text is too short for both.
    """
    n = Haystack.from_text(text, prompter.tokenizer, name=name).n_tokens
    # Tokens are not spread evenly over the characters.
    share = max(held_out, 1.1 * target / n)
    if share > 0.5:
        raise ValueError(
            f"{name} has {n:,} tokens, too few to fit at {target:,}: one part to learn from and one to choose by each "
            f"need more than that, {math.ceil(2.2 * target):,} in all. Pass a longer text, or a smaller factor."
        )
    cut = round(len(text) * (1 - share))
    parts = (Haystack.from_text(part, prompter.tokenizer, name=name) for part in (text[:cut], text[cut:]))
    learnt, other = (Material(part, prompter, trained, target) for part in parts)
    return learnt, other
