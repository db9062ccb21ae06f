"""Needles in a haystack: sentences that give a key its value, among noise, essays or similar sentences."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, repeat
from random import Random
from typing import ClassVar, Literal
from uuid import UUID

from ctxext.evals.haystack import FILLER, Haystack, words_in
from ctxext.evals.ruler.fitting import GAP, REST, Draft, RulerTask, tails
from ctxext.evals.samples import Sample, Scene
from ctxext.evals.words import distinct, nvidia_words, own_words

NOISE = FILLER.strip()
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# In percent, as RULER's: np.round(np.linspace(0, 100, 40)).
DEPTHS = [round(100 * k / 39) for k in range(40)]

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True, kw_only=True)
class Niah(RulerTask):
    """What are the special magic numbers for this key? RULER, section 3.1.

    Attributes:
        haystack: "noise", five short sentences, repeated; "essay", natural text; "needle", needles with other keys.
        key, value: "words", an adjective and a noun; "numbers", of seven digits; "uuids".
        keys: the number of different keys, at least `queries`.
        values: needles per key.
        queries: keys in the question.
    """

    looks_up: ClassVar[bool] = True
    tokens_to_generate: ClassVar[int] = 128
    template: ClassVar[str] = (
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n{context}\n"
        "What are all the special magic {kind} for {query} mentioned in the provided text?"
    )
    lead: ClassVar[str] = " The special magic {kind} for {query} mentioned in the provided text are"

    haystack: Literal["noise", "essay", "needle"] = "essay"
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def one_answer(self) -> bool:
        return self.queries * self.values == 1

    def fewest(self) -> int:
        return 16 if self.haystack == "essay" else max(self.keys, self.queries) * self.values - 1

    def step(self, length: int) -> int:
        return 500 if self.haystack == "essay" else 25 if length >= 4096 else 5

    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """`units` counts tokens of the essay (in mode "nvidia" words), or lines."""
        new_key, new_value = self._drawn(self.key, rng), self._drawn(self.value, rng)
        keys = list(islice(new_key, max(self.keys, self.queries)))
        values = {key: tuple(islice(new_value, self.values)) for key in keys}
        asked = rng.sample(keys, self.queries)
        in_order = [*asked, *(key for key in keys if key not in asked)]
        needles = [self._needle(key, value) for key in in_order for value in values[key]]
        fills: tuple[tuple[str, ...], ...]
        if self.haystack == "essay":
            context, before, rests = self._among_sentences(scene, rng, units, needles)
            # Long words, as in code, would rarely fit exactly.
            fills = (tails(before) if before.count(" ") > len(before) / 12 else tails(before, r"\w"),)
        else:
            others = map(self._needle, new_key, new_value)
            lines = list(islice(repeat(NOISE) if self.haystack == "noise" else others, units + 2))
            context, before = self._among_lines(rng, lines, needles)
            fills, rests = (tails(before), tails(before, r"\S")), ("",)
        template, lead, kind = self.template, self.lead, str(self.value)
        if self.one_answer:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
            lead, kind = lead.replace("are", "is"), kind.removesuffix("s")
        return Draft.of(
            template,
            lead,
            context,
            {"kind": kind, "query": ", ".join(asked[:-1]) + ", and " * (len(asked) > 1) + asked[-1]},
            references=tuple(value for key in asked for value in values[key]),
            needles=tuple(needles),
            fills=fills,
            rests=rests,
        )

    def said_elsewhere(self, sample: Sample) -> bool:
        text = sample.body
        for needle in sample.needles:
            text = text.replace(needle, "", 1)
        return self.haystack == "essay" and text.lower().count("special magic") > self.template.count("special magic")

    def _drawn(self, kind: Kind, rng: Random) -> Iterator[str]:
        lists = own_words() if self.exact else nvidia_words()
        draws: dict[Kind, Callable[[], str]] = {
            "words": lambda: lists.pair(rng),
            "numbers": lambda: str(rng.randrange(1_000_000, 10_000_000)),
            "uuids": lambda: str(UUID(int=rng.getrandbits(128), version=4)),
        }
        return distinct(draws[kind])

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _among_lines(self, rng: Random, lines: list[str], needles: list[str]) -> tuple[str, str]:
        """The needles before random lines; and the first two lines, left out for the gap."""
        before, lines = "\n".join(lines[:2]), lines[2:]
        if self.exact:
            lines = [GAP, *lines]
        places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
        for place, needle in zip(places, rng.sample(needles, len(needles))):
            lines.insert(place, needle)
        return "\n".join(lines), before

    def _among_sentences(
        self, scene: Scene, rng: Random, units: int, needles: list[str]
    ) -> tuple[str, str, tuple[str, ...]]:
        """The needles between sentences, at RULER's depths; text for the gap before it, and for the rest after it."""
        words, starts, ends = _words(scene.haystack)
        n_words, n_tokens = len(words), len(scene.haystack.token_starts)
        if self.exact:
            if n_tokens < scene.place.length:
                raise ValueError(
                    f"a {self.name} prompt of {scene.place.length} tokens needs a text of that many tokens, "
                    f"got {n_tokens}. Pass a longer text."
                )
            # The text continues with its beginning, so that a window may lie anywhere.
            copies = 4 + units // n_tokens
            end = rng.choice(scene.haystack.sentence_ends)
            back, token = divmod(scene.haystack.token_at(end) - units, n_tokens)
            first = (copies - 2 + back) * n_words + bisect_left(starts, scene.haystack.token_starts[token])
            last = (copies - 2) * n_words + bisect_left(starts, end)
        else:
            copies, first, last = -(-units // n_words), 0, units
        words = words * copies
        ends = [end + k * n_words for k in range(copies) for end in ends]
        behind = bisect_left(ends, last)
        bounds = [first, *ends[bisect_right(ends, first) : behind], last]
        places = sorted(bounds[int((len(bounds) - 1) * (depth / 100))] for depth in rng.sample(DEPTHS, len(needles)))
        texts = [_joined(words[a:b]) for a, b in pairwise([first, *places, last])]
        if self.exact:
            # The gap and the rest touch the text, not the needles at its very beginning and end.
            texts[places.count(first)] = f"{GAP}{_space(words, first)}{texts[places.count(first)]}"
            texts[-1 - places.count(last)] += REST
        parts = [part for pair in zip(texts, [*rng.sample(needles, len(needles)), ""]) for part in pair][:-1]
        if self.exact:
            parts = [part for part in parts if part]
        rests = ("", *(_space(words, last) + _joined(words[last:end]) for end in ends[behind + 1 : behind + 7]))
        margin = min(192, 32 + scene.place.length // 32)
        return " ".join(parts), _joined(words[max(0, first - margin) : first]), rests


@lru_cache(maxsize=4)
def _words(haystack: Haystack) -> tuple[list[str], list[int], list[int]]:
    """The words of a text, each with the space after it; their starts in characters; sentence ends in words."""
    text, spans = haystack.text, words_in(haystack.text)
    starts = [start for start, _ in spans]
    words = [text[start:end] + " " * text[end].isspace() for start, end in spans]
    return words, starts, [bisect_left(starts, end) for end in haystack.sentence_ends]


def _joined(words: list[str]) -> str:
    return "".join(words).removesuffix(" ")


def _space(words: list[str], place: int) -> str:
    """What is between the words before and after `place`."""
    return " " * words[place - 1].endswith(" ")
