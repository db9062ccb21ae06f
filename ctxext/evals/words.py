"""Word lists: our own, wonderwords' if installed, and words of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from itertools import islice
from random import Random


@dataclass(frozen=True)
class WordLists:
    """Words by kind, without duplicates; `source` names their origin."""

    source: str
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]

    @property
    def all(self) -> list[str]:
        return sorted({*self.adjectives, *self.nouns, *self.verbs})

    def pair(self, rng: Random) -> str:
        """As RULER's keys: "gentle-harbour"."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"


@cache
def own_words() -> WordLists:
    """454 adjectives, 722 nouns and 367 verbs, common and lower-case. Written for ctxext; CC0."""
    return _read("ctxext", "ctxext.evals", "{}s.txt")


@cache
def nvidia_words() -> WordLists:
    """The lists of wonderwords (MIT), which RULER uses; our own if it is not installed."""
    return _read("wonderwords", "wonderwords.assets", "{}list.txt") if find_spec("wonderwords") else own_words()


def _read(source: str, package: str, pattern: str) -> WordLists:
    lists = [
        tuple(dict.fromkeys((files(package) / pattern.format(kind)).read_text(encoding="utf-8").split("\n")))
        for kind in ("adjective", "noun", "verb")
    ]
    return WordLists(source, *(tuple(word.strip() for word in words if word.strip()) for words in lists))


@lru_cache(maxsize=4)
def words_of(text: str) -> list[str]:
    """The lower-case words of a text, of four letters or more, sorted."""
    return sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))


def vocabulary(lists: WordLists, text: str, n: int, rng: Random) -> list[str]:
    """At least `n` different words, shuffled: from the lists, then the text, then pairs."""
    words = lists.all
    if len(words) < n:
        words = sorted({*words, *words_of(text)})
    words += islice(distinct(lambda: lists.pair(rng)), max(0, n - len(words)))
    rng.shuffle(words)
    return words


def distinct(draw: Callable[[], str]) -> Iterator[str]:
    """The values of `draw`, without repeats.

    Raises:
        ValueError: `draw` gives no new values.
    """
    seen: set[str] = set()
    while True:
        new = next((word for word in (draw() for _ in range(1000)) if word not in seen), None)
        if new is None:
            raise ValueError(
                f"ran out of different words after {len(seen):,}. Choose another kind of key or a shorter length."
            )
        seen.add(new)
        yield new
