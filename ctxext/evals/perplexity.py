"""Loss by position: what each token cost, given all that stands before it in its window."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.inference_mode()
def position_losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    length: int,
    windows: int,
    *,
    chunk: int = 2048,
    advance: Callable[[], None] = lambda: None,
) -> Tensor:
    """Cross-entropy in nats of every next token, of shape `(windows, length - 1)`.

    The windows are spread evenly over `ids`, do not overlap, and begin with BOS where the tokenizer
    has one. Each is read `chunk` tokens at a time through a cache, so that logits stay small; for
    static methods that is the same computation as one forward pass.

    Raises:
        ValueError: `ids` is too short for that many windows.
    """
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    body = length - len(bos)
    if len(ids) < windows * body:
        raise ValueError(
            f"{windows} windows of {length} tokens need {windows * body} tokens of text, got {len(ids)}. "
            "Pass a longer text, fewer windows or a shorter length."
        )
    starts = [round(k * (len(ids) - body) / max(1, windows - 1)) for k in range(windows)]
    losses = []
    for start in starts:
        row = torch.tensor([bos + ids[start : start + body]], device=model.device)
        cache, parts = None, []
        for begin in range(0, length - 1, chunk):
            end = min(begin + chunk, length - 1)
            output = model(input_ids=row[:, begin:end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            targets = row[0, begin + 1 : end + 1]
            parts.append(torch.nn.functional.cross_entropy(output.logits[0].float(), targets, reduction="none").cpu())
        losses.append(torch.cat(parts))
        advance()
    return torch.stack(losses)


def perplexity(losses: Tensor) -> float:
    """exp of the mean loss over tokens."""
    return math.exp(losses.double().mean().item())
