"""Perplexity and loss by position over windows of a text.

Windows depend on their place and the text alone, and start at evenly spread positions of the text, which is treated as
a ring. One pass over a window gives the loss at every position, and so the perplexity of every prefix.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ctxext.evals.engine import Scorer
from ctxext.evals.haystack import Haystack
from ctxext.evals.samples import Place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Window:
    """A window of text.

    Attributes:
        input_ids: its tokens; the first `n_bos` are not text.
        scored_from: index of the first token whose loss counts; at least 1.
        n_bytes: UTF-8 bytes of the scored tokens.
        text, starts: the text of the tokens that are text, and where each begins in it, in characters.
    """

    input_ids: tuple[int, ...]
    n_bos: int
    scored_from: int
    n_bytes: int
    text: str = ""
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextTask:
    """A task on windows of a text: of the full length, every token scored, unless a subclass says otherwise.

    Its fields are its settings.

    Attributes:
        prefixes: whether a window also gives the figures of all shorter lengths.
        bos: begin each window with BOS, if the tokenizer adds one.
    """

    name: ClassVar[str]
    prefixes: ClassVar[bool] = True
    bos: bool = True

    def window(self, place: Place, haystack: Haystack, bos: Sequence[int]) -> Window:
        """The window of this place; `place.length` tokens, `bos` included.

        Raises:
            ValueError: the text is too short.
        """
        bos = bos if self.bos else ()
        if haystack.documents:
            start = haystack.document(place.trial, place.length - len(bos))
        else:
            start = int(beginning(place.seed, place.trial) * haystack.n_tokens)
        return piece(haystack, start, place.length, bos, max(1, len(bos)))

    def record(self, window: Window, engine: Scorer) -> dict[str, Any]:
        """The fields of its record: the losses in nats."""
        return _losses(window, losses=engine.losses(window.input_ids).losses)

    def settings(self) -> dict[str, Any]:
        return asdict(self)


class Perplexity(TextTask):
    """Perplexity by position and by prefix length."""

    name: ClassVar[str] = "perplexity"


@dataclass(frozen=True)
class SlidingPerplexity(TextTask):
    """Sliding windows from the beginning of the text; each token is scored once, after at least `length - stride`
    tokens.

    The first window scores all its tokens; each later one moves on by `stride` tokens and scores the new ones. Means
    are over tokens, so windows need no weights.

    Attributes:
        stride: in tokens; equal to the length for windows without overlap.
    """

    name: ClassVar[str] = "sliding_perplexity"
    # Shorter windows give each scored token a different context.
    prefixes: ClassVar[bool] = False
    stride: int = 512

    def window(self, place: Place, haystack: Haystack, bos: Sequence[int]) -> Window:
        bos = bos if self.bos else ()
        body, start = place.length - len(bos), place.trial * self.stride
        _check_stride(self.stride, body)
        if start + body > haystack.n_tokens:
            raise ValueError(
                f"window {place.trial} of {place.length} tokens at stride {self.stride} ends at token "
                f"{start + body:,}, but the text has {haystack.n_tokens:,}. Pass a longer text or fewer windows."
            )
        new = place.length - self.stride
        return piece(haystack, start, place.length, bos, max(1, len(bos)) if place.trial == 0 else new)


class ShortContext(TextTask):
    """The windows of `Perplexity` with the most likely token at each position, for the short-context regression."""

    name: ClassVar[str] = "short"

    def record(self, window: Window, engine: Scorer) -> dict[str, Any]:
        losses, top1 = engine.losses(window.input_ids)
        return _losses(window, losses=losses, **({} if top1 is None else {"top1": top1}))


@dataclass(frozen=True)
class KeyTokens(TextTask):
    """The tokens of the windows of `Perplexity` that need long context, by LongPPL's rule. Fang et al. (2024), equation
    5.

    A token is a key token if the judge (the unextended model, within its trained length, or another model) loses `gain`
    nats more on it with a short context, and less than `sure` nats with a long one. Both are sliding windows that move
    by half their size, so a token has between `short / 2` and `short` tokens of context, or `long / 2` and `long`. The
    judge finds tokens that need more than `short` tokens, not more than `long`.

    Attributes:
        judge: the name of another model that judges (`Judge`); None for the baseline.
        long: the long window in tokens: the judge's trained length.
        short: the short window in tokens. In LongPPL's code a token has `trunc_len` to `trunc_len + sliding_window`
            (4096 and 1024) of 32768; the two are equal where both are `short / 2`.
        gain, sure: nats, the paper's alpha and -beta.
    """

    name: ClassVar[str] = "key_tokens"
    judge: str | None = None
    long: int = 8192
    short: int = 1024
    gain: float = 2.0
    sure: float = 2.0

    def record(self, window: Window, engine: Scorer) -> dict[str, Any]:
        bos, ids = window.input_ids[: window.n_bos], window.input_ids[window.n_bos :]
        return self.judged(self.key(engine, ids, bos))

    def key(self, engine: Scorer, ids: Sequence[int], bos: Sequence[int]) -> Tensor:
        """Whether each token of `ids` (but the first, without BOS) is a key token to the model of `engine`."""
        long, short = (sliding_losses(engine, ids, length, length // 2, bos) for length in (self.long, self.short))
        return (short - long > self.gain) & (long < self.sure)

    def judged(self, key: Tensor) -> dict[str, Any]:
        return {"tokens": len(key), "key_tokens": int(key.sum()), **packed(mask=key)}


@dataclass(frozen=True)
class Judge:
    """Another model that finds the key tokens of a text, in its own tokens.

    As in LongPPL's code, a token of the evaluated model is a key token if its characters are all in key tokens of the
    judge.

    Attributes:
        name: with a fingerprint of its weights.
        bos: the special tokens that its tokenizer puts before a text.
        trained_length: in tokens.
    """

    name: str
    engine: Scorer
    tokenizer: PreTrainedTokenizerBase
    bos: Sequence[int]
    trained_length: int

    def record(self, task: KeyTokens, window: Window) -> dict[str, Any]:
        read = self.tokenizer(window.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        key = task.key(self.engine, read["input_ids"], self.bos).tolist()
        held = torch.zeros(len(window.text) + 1, dtype=torch.long)
        for (start, end), is_key in zip(read["offset_mapping"][0 if self.bos else 1 :], key):
            held[start:end] |= int(is_key)
        # Characters that are not key before each place.
        others = torch.cat([torch.zeros(1, dtype=torch.long), (1 - held).cumsum(0)])
        # Several tokens may be parts of one character.
        bounds = [*dict.fromkeys(window.starts), len(window.text)]
        ends = dict(pairwise(bounds))
        inside = [bool(others[start] == others[ends[start]]) for start in window.starts]
        return task.judged(torch.tensor(inside[window.scored_from - window.n_bos :]))


def _losses(window: Window, **arrays: Tensor) -> dict[str, Any]:
    scored = {name: array[window.scored_from - 1 :] for name, array in arrays.items()}
    mean = scored["losses"].double().mean().item()
    return {"tokens": len(scored["losses"]), "bytes": window.n_bytes, "loss": mean, **packed(**scored)}


def _check_stride(stride: int, body: int) -> None:
    if not 1 <= stride <= body:
        raise ValueError(f"the stride must be between 1 and the window's {body} tokens of text, got {stride}.")


def sliding_losses(engine: Scorer, ids: Sequence[int], window: int, stride: int, bos: Sequence[int] = ()) -> Tensor:
    """The loss in nats of every token of `ids` (except the first, without BOS).

    Args:
        window: the context in tokens, including BOS.
        stride: the step in tokens; every token after the first window has at least `window - stride` tokens of context.
    """
    body = window - len(bos)
    _check_stride(stride, body)
    parts, done = [], 0
    while done < len(ids):
        end = min(len(ids), body if done == 0 else done + stride)
        start = max(0, end - body)
        losses = engine.losses([*bos, *ids[start:end]]).losses
        # losses[k] belongs to token k + 1 of what was read.
        parts.append(losses[max(0, len(bos) + done - start - 1) :])
        done = end
    return torch.cat(parts)


def beginning(seed: int, trial: int) -> float:
    """The relative position in the text at which a window of `Perplexity` begins."""
    return (Random(seed).random() + trial * GOLDEN) % 1


def stretches(begun: Sequence[float], spans: Sequence[float], n_tokens: int) -> list[int]:
    """For each passage its stretch of text, the unit of independence.

    In the order of the text, which is a ring, a stretch begins with a passage that does not overlap the first of the
    stretch before. So the first passages of all stretches are apart.

    Args:
        begun: where each passage begins, in tokens.
        spans: the length of each, in tokens.
        n_tokens: of the text.
    """
    if not begun:
        return []
    order = sorted(range(len(begun)), key=begun.__getitem__)
    gaps = [(begun[k] - begun[before]) % n_tokens for before, k in zip([order[-1], *order], order)]
    widest = gaps.index(max(gaps))
    of, stretch, end = [0] * len(begun), -1, 0.0
    for k in order[widest:] + order[:widest]:
        place = (begun[k] - begun[order[widest]]) % n_tokens
        if stretch < 0 or place >= end:
            stretch, end = stretch + 1, place + spans[k]
        of[k] = stretch
    if end > n_tokens:  # the last stretch reaches around into the first
        of = [0 if each == stretch else each for each in of]
    return of


def window_stretches(trials: Sequence[int], seed: int, span: int, n_tokens: int) -> list[int]:
    """`stretches` of windows of `Perplexity`, of `span` tokens each."""
    return stretches([beginning(seed, trial) * n_tokens for trial in trials], [span] * len(trials), n_tokens)


def piece(haystack: Haystack, start: int, length: int, bos: Sequence[int], scored_from: int) -> Window:
    """`bos` and then the text as a ring from token `start`, `length` tokens in all."""
    body, n = length - len(bos), haystack.n_tokens
    if body < 2:
        raise ValueError(f"a window of text needs at least {len(bos) + 2} tokens, got {length}.")
    if body > n:
        raise ValueError(
            f"a window of {length:,} tokens is longer than the text, which has {n:,}. Pass a longer text: repeating it "
            "would let the model copy."
        )
    ids = (*haystack.token_ids[start : start + body], *haystack.token_ids[: max(0, start + body - n)])
    first = start + scored_from - len(bos)
    text, starts = haystack.stretch(start, start + body)
    return Window((*bos, *ids), len(bos), scored_from, haystack.n_bytes(first, start + body), text, starts)


def packed(**tensors: Tensor) -> dict[str, str]:
    """Tensors for a JSON line: base64 of little-endian float32, of int32, or of bits."""
    lines = {}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        kind = {"f": "<f4", "i": "<i4"}.get(array.dtype.kind)
        data = np.packbits(array) if kind is None else array.astype(kind)
        lines[name] = base64.b64encode(data.tobytes()).decode()
    return lines


def unpacked(record: dict[str, Any], name: str) -> np.ndarray:
    """The array `name` ("losses", "top1" or "mask") of a record written by `packed`."""
    data = base64.b64decode(record[name])
    if name == "mask":
        return np.unpackbits(np.frombuffer(data, "u1"), count=record["tokens"]).astype(bool)
    return np.frombuffer(data, "<i4" if name == "top1" else "<f4")
