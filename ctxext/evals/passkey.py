"""Passkey retrieval: a number hidden in natural text, asked for at the end.

After Mohtashami and Jaggi (2023), "Landmark Attention", with the defects of its copies mended: the
prompt is exact in tokens, the number stands between two sentences, and every sample is a function
of (length, depth, trial, seed) alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from ctxext.evals.haystack import Haystack

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEEDLE = (" The pass key is", ". Remember it.", " is the pass key.")
QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class PasskeySample:
    """One prompt with its answer: `input_ids` is exactly the asked length in tokens.

    `answer`, `first_mention` and `second_mention` are slices of `input_ids` over the key's tokens.
    """

    input_ids: list[int]
    answer: slice
    first_mention: slice
    second_mention: slice


def passkey_sample(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, depth: float, rng: Random
) -> PasskeySample:
    """A prompt of exactly `length` tokens (BOS, question and answer included).

    Args:
        depth: where the needle stands in the haystack, 0 (start) to 1 (just before the question),
            moved to the nearest sentence end.
        rng: the only source of chance: the key and the window of text.

    Raises:
        ValueError: `length` is too short for needle and question, or longer than the haystack.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    key = encode(f" {rng.randrange(10_000, 100_000)}")
    before, between, after = (encode(part) for part in NEEDLE)
    needle = before + key + between + key + after
    question = encode(QUESTION)
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    n_hay = length - len(bos) - len(needle) - len(question) - len(key)
    if n_hay < 1:
        raise ValueError(f"a passkey prompt needs at least {length - n_hay + 1} tokens, got length={length}.")
    start, end = haystack.window(n_hay, rng)
    cut = haystack.cut(start, end, depth)
    input_ids = bos + haystack.ids[start:cut]
    first = len(input_ids) + len(before)
    second = first + len(key) + len(between)
    input_ids += needle + haystack.ids[cut:end] + question + key
    return PasskeySample(
        input_ids=input_ids,
        answer=slice(length - len(key), length),
        first_mention=slice(first, first + len(key)),
        second_mention=slice(second, second + len(key)),
    )


def passkey_hits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    haystack: Haystack,
    length: int,
    depths: Sequence[float],
    trials: int,
    *,
    seed: int = 0,
    batch_size: int = 8,
) -> Iterator[tuple[float, int, bool]]:
    """Yield `(depth, trial, hit)` for each of `len(depths) * trials` prompts of `length` tokens.

    A hit is the whole key as the argmax under teacher forcing, in one forward pass; that equals an
    exact match of greedy decoding. Different models and methods see the same prompts.
    """
    cells = [(depth, trial) for depth in depths for trial in range(trials)]
    for begin in range(0, len(cells), batch_size):
        batch = cells[begin : begin + batch_size]
        samples = [
            passkey_sample(tokenizer, haystack, length, depth, Random(f"passkey/{seed}/{length}/{depth}/{trial}"))
            for depth, trial in batch
        ]
        ids = torch.tensor([sample.input_ids for sample in samples], device=model.device)
        keep = max(length - sample.answer.start for sample in samples) + 1
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
        # The logits at position t predict token t + 1.
        guess = torch.cat([ids[:, : length - keep + 1], logits[:, :-1].argmax(-1)], dim=1)
        for (depth, trial), sample, row, truth in zip(batch, samples, guess, ids, strict=True):
            yield depth, trial, bool(torch.equal(row[sample.answer], truth[sample.answer]))
