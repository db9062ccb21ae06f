"""Detect how a family rotates, and compare in-attention RoPE with the stock model.

Nothing is assumed of a family: the stock model's rotated queries and keys are compared with unrotated ones (the rotary
embedding returning the identity) under every known convention of rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ctxext.attention.call import KEYWORD, OwnMethod, running
from ctxext.attention.masks import additive, as_taken
from ctxext.attention.rotary import Convention, InAttentionRotary, rotate

PAIRS: tuple[Literal["half_split", "interleaved"], ...] = ("half_split", "interleaved")
CONVENTIONS = (
    *(Convention(pairs, sign, last) for last in (False, True) for sign in (1, -1) for pairs in PAIRS),
    Convention("none"),
)
# Relative to the largest value: for float32 phases, and for cos and sin rounded to 16 bits.
EXACT_BAR, HALF_BAR = 1e-4, 3e-2
# Relative to the output's root mean square.
OUTPUT_BAR, HALF_OUTPUT_BAR = 1e-4, 1e-1


class Looker:
    """Replaces a `Call`: records the queries and keys of every layer, and lets attention run.

    Attributes:
        seen: the recorded queries and keys, by layer.
        modules: the layers' modules.
        instead: queries and keys to substitute, by layer, so that every layer has the same inputs in both passes.
        repeated: a layer that ran several times, on other keys.
        dropped: whether a layer did not pass the keyword argument on to attention.
    """

    def __init__(self, rotary: InAttentionRotary, instead: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.rotary = rotary
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.modules: list[nn.Module] = []
        self.instead = instead
        self.dropped = False
        self.repeated: int | None = None

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        index = module.layer_idx
        # DiffLlama attends twice in a layer, with other values.
        if index in self.seen and not torch.equal(self.seen[index][1], key):
            self.repeated = index
        self.seen[index] = query, key
        self.modules.append(module)
        if self.instead is not None:
            query, key = self.instead[index]
        mask = as_taken(None if mask is None else mask.to(query.device), self.rotary.implementation, query.dtype)
        return self.rotary.attend(module, query, key, value, mask, **kwargs)


def probe(vocabulary: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Sixteen random tokens at random, ascending positions up to the last of `length` tokens."""
    generator = torch.Generator().manual_seed(0)
    n_tokens = min(16, length)
    ids = torch.randint(0, vocabulary, (1, n_tokens), generator=generator)
    positions = torch.randperm(length - 1, generator=generator)[: n_tokens - 1].sort().values
    positions = torch.cat([positions, torch.tensor([length - 1])])[None]
    # With a mask, gaps between positions are not mistaken for borders of packed documents.
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def difference(one: Tensor, other: Tensor) -> float:
    """The RMS difference of two outputs, relative to the second's RMS."""
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


def output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's output in float32, in one pass without a cache."""
    return model(**inputs, use_cache=False)[0].float()


def cached_output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The same in three passes with a cache: all but two tokens, then these one by one."""
    ids, positions, mask = (inputs[name] for name in ("input_ids", "position_ids", "attention_mask"))
    cache, parts, n_tokens = None, [], ids.shape[1]
    for start, end in pairwise([0, n_tokens - 2, n_tokens - 1, n_tokens]):
        found = model(
            input_ids=ids[:, start:end],
            position_ids=positions[:, start:end],
            attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = found.past_key_values
        parts.append(found[0].float())
    return torch.cat(parts, dim=1)


def look(model: Any, inputs: dict[str, Tensor], looker: Looker) -> dict[int, tuple[Tensor, Tensor]]:
    """The queries and keys of every layer in a forward pass.

    Raises RuntimeError if the model does not use transformers' attention interface.
    """
    with running(looker):
        model(**inputs, use_cache=False, **{KEYWORD: looker})
    if not looker.seen:
        raise RuntimeError("no layer uses transformers' attention interface")
    return looker.seen


def check_own_methods(looker: Looker) -> None:
    """Raise ValueError if an attention module's `_attn` is not plain softmax attention, with the queries and keys seen.

    In-attention RoPE uses a softmax of its own wherever queries and keys are rotated in several ways.
    """
    for module in looker.modules:
        if isinstance(module, OwnMethod):
            index: Any = module.layer_idx
            query, key = looker.seen[index]
            causal = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
            expected = nn.functional.scaled_dot_product_attention(query, key, key, causal, enable_gqa=True)
            output, _ = OwnMethod.attend(module, query, key, key, additive(causal[None, None], key.dtype))
            bar = HALF_BAR if key.dtype in (torch.float16, torch.bfloat16) else EXACT_BAR
            if not difference(output.transpose(1, 2), expected) <= bar:
                raise ValueError(
                    f"layer {index} computes other than plain softmax attention, which in-attention RoPE "
                    "does not support. Use a method that changes frequencies, such as 'yarn'."
                )


def conventions(
    stock: dict[int, tuple[Tensor, Tensor]],
    unrotated: dict[int, tuple[Tensor, Tensor]],
    rotary: InAttentionRotary,
    positions: Tensor,
    expected: Callable[[int], str | None],
) -> tuple[dict[int, tuple[str, Convention]], float]:
    """For each layer, the table and the convention that rotate as the stock model does, and the largest error.

    Args:
        expected: the label of a layer's table by the config, which is preferred where several tables fit.

    Raises ValueError if none fits, e.g. if a norm follows RoPE or queries are scaled by position.
    """
    found: dict[int, tuple[str, Convention]] = {}
    worst = 0.0
    for index, wanted in sorted(stock.items()):
        bar = HALF_BAR if wanted[0].dtype in (torch.float16, torch.bfloat16) else EXACT_BAR
        errors: dict[tuple[str, Convention], float] = {}
        for label, convention in product(rotary.in_use, CONVENTIONS):
            gaps = []
            for want, plain in zip(wanted, unrotated[index]):
                got = plain
                if convention.pairs != "none":
                    at = rotary.of(label).as_it_was(positions.to(plain.device))
                    if 2 * at[0].shape[-1] > plain.shape[-1]:  # of layers with larger heads
                        gaps.append(math.inf)
                        continue
                    got = rotate(plain, at, convention)
                gaps.append(float((got - want).abs().max() / want.abs().max().clamp(min=1e-30)))
            errors[label, convention] = max(gaps)
        named = expected(index)
        best = min(errors, key=lambda each: (errors[each] > bar, each[0] != named, errors[each]))
        if errors[best] > bar:
            best = min(errors, key=lambda each: errors[each])
            raise ValueError(
                f"layer {index} transforms queries and keys other than by rotation (the best known rotation differs "
                f"from the stock model by {errors[best]:.1e}), which in-attention RoPE does not support. "
                "Use a method that changes frequencies, such as 'yarn'."
            )
        found[index] = best
        worst = max(worst, errors[best])
    return found, worst
