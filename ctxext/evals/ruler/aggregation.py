"""Aggregation: the most common words of a list, and of a coded text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, ClassVar

from ctxext.evals.ruler.fitting import Draft, RulerTask, bare_tokens
from ctxext.evals.samples import Scene
from ctxext.evals.words import distinct, nvidia_words, own_words, vocabulary


@dataclass(frozen=True, kw_only=True)
class CommonWords(RulerTask):
    """Which ten words are the most common in a list, after a worked example? RULER, section 3.3.

    Attributes:
        freq_common, freq_uncommon: occurrences of each of the ten words and of each other word. Below 4096 tokens they
            are 6 and 1, as in NVIDIA's code.
        english_words: NVIDIA's english_words.json, from which compat="nvidia" draws if wonderwords has too few words.
            None: words of the haystack follow.
    """

    tokens_to_generate: ClassVar[int] = 120
    template: ClassVar[str] = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\n"
        "Question: What are the 10 most common words in the above list?"
    )
    lead: ClassVar[str] = " Answer: The top 10 words that appear most often in the list are:"
    common: ClassVar[int] = 10

    freq_common: int = 30
    freq_uncommon: int = 3
    english_words: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.english_words is not None and self.exact:
            raise ValueError(f"english_words of {self.name} are for compat='nvidia' only. Drop one or the other.")

    def settings(self) -> dict[str, Any]:
        """With a hash of the word file instead of its path."""
        held = self.english_words and blake2b(Path(self.english_words).read_bytes(), digest_size=8).hexdigest()
        return {**super().settings(), "english_words": held}

    def fewest(self) -> int:
        return self.common + 1

    def step(self, length: int) -> int:
        return 10

    def right_answer(self, draft: Draft) -> str:
        return " " + _numbered(list(draft.references))

    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """`units` counts different words."""
        if scene.place.length < 4096:
            of_example, example_often, often = 20, (3, 1), (6, 1)
        else:
            of_example, example_often, often = 40, (10, 3), (self.freq_common, self.freq_uncommon)
        if self.exact:
            lists = own_words()
            per_word = bare_tokens(scene.prompter, _numbered(lists.all[:100])) / 100 * often[1]
            enough = of_example + self.common + max(math.ceil(1.1 * scene.place.length / per_word), units)
            words = vocabulary(lists, scene.haystack.text, enough, rng)
            # No answer is part of another word: "art" would be found in "start".
            alone = (word for word in words if sum(word in other for other in words) == 1)
            common = list(islice(alone, 2 * self.common))
            rest = [word for word in words if word not in common]
            example_words = common[: self.common] + rest[: of_example - self.common]
            list_words = (common[self.common :] + rest[of_example - self.common :])[:units]
        else:
            held = len(nvidia_words().all)
            from_file = self.english_words if units > held else None
            words = vocabulary(nvidia_words(), scene.haystack.text, held if from_file else units, rng)
            example_words = rng.sample(words, of_example)
            list_words = rng.sample(_english_words(from_file) if from_file else words, units)
        shown = self.template.format(context=self._list(rng, example_words, *example_often))
        return Draft.of(
            self.template,
            self.lead,
            self._list(rng, list_words, *often),
            references=tuple(list_words[: self.common]),
            example=f"{shown}{self.lead} {_numbered(example_words[: self.common])}\n",
        )

    def nvidia_most(self, length: int, count: Callable[[int], int]) -> int:
        return int(length // (count(4096) / 4096)) * 2

    def _list(self, rng: Random, words: list[str], often: int, seldom: int) -> str:
        return _numbered(_scattered(rng, {word: often if k < self.common else seldom for k, word in enumerate(words)}))


@cache
def _english_words(path: str) -> list[str]:
    """Raises ValueError unless the file is a JSON object of words."""
    try:
        return [str(word) for word in json.loads(Path(path).read_text(encoding="utf-8")).values()]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not NVIDIA's english_words.json ({error}). Pass that file.") from None


def _scattered(rng: Random, counts: dict[str, int]) -> list[str]:
    """Each word as often as `counts` says, in random order; a further word does not change the order of the others."""
    placed = []
    for word, count in counts.items():
        places = Random(rng.random())
        placed += [(places.random(), word) for _ in range(count)]
    return [word for _, word in sorted(placed)]


def _numbered(words: list[str]) -> str:
    return " ".join(f"{k}. {word}" for k, word in enumerate(words, 1))


@dataclass(frozen=True, kw_only=True)
class FrequentWords(RulerTask):
    """Which three words are the most frequent in a coded text? RULER, section 3.3.

    The word of rank k occurs ⌊N k^-α / ζ(α)⌋ times. The first is written "...", and is not asked for.

    Attributes:
        alpha: exponent of the zeta distribution; > 1.
    """

    tokens_to_generate: ClassVar[int] = 50
    template: ClassVar[str] = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    lead: ClassVar[str] = " Answer: According to the coded text above, the three most frequently appeared words are:"

    alpha: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.alpha < math.inf:
            raise ValueError(f"alpha must be > 1, got {self.alpha:g}. RULER has 2.0.")

    def fewest(self) -> int:
        # From here on, rank 4, the last that is asked for, occurs more often than rank 5.
        return math.ceil(zeta(self.alpha) / (4**-self.alpha - 5**-self.alpha))

    def step(self, length: int) -> int:
        return (length - self.tokens_to_generate) // 32

    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """`units` is the N of the distribution."""
        size = (scene.place.length if self.exact else scene.place.length - self.tokens_to_generate) // 50
        code = distinct(lambda: "".join(rng.choices(ascii_lowercase, k=6)))
        ranked = ["...", *islice(code, max(size, 5) - 1)]
        total = zeta(self.alpha)
        often = {word: int(units * rank**-self.alpha / total) for rank, word in enumerate(ranked, 1)}
        return Draft.of(self.template, self.lead, " ".join(_scattered(rng, often)), references=tuple(ranked[1:4]))

    def nvidia_units(self, scene: Scene) -> int:
        """In steps, from a sixth of the prompt's room up to the first prompt that fills it."""
        room, step = scene.place.length - self.tokens_to_generate, self.step(scene.place.length)
        units = room // 6
        while self.nvidia_tokens(scene, self.draft(scene, scene.place.rng("size"), units))[0] < room:
            units += step
        return units - step


def zeta(alpha: float) -> float:
    """Riemann's ζ for alpha > 1: the first terms, and the rest by the Euler-Maclaurin formula."""
    head = sum(math.pow(k, -alpha) for k in range(1, 1000))
    return head + math.pow(1000, -alpha) * (1000 / (alpha - 1) + 1 / 2 + alpha / 12_000)
