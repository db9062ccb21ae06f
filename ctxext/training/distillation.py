"""Distillation of short documents: the model in training is held to the one it started from, on its original RoPE.

Training on long text costs some of what a model could do with short text. LongReD (Dong et al., 2025, arXiv 2502.07365)
holds hidden states of short text to those of the original model; here it is the probabilities of the next token.
The original model needs no memory of its own: it is the model in training without its adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ctxext.core.apply import transformers_model
from ctxext.core.edit import Edit
from ctxext.core.probing import in_eval_mode
from ctxext.training.loss import Reference, chunked_loss_of, head_of
from ctxext.training.mixed_window import check_original, document_lengths, original_rotary


def use_distillation(model: nn.Module, share: float, *, alone: bool = True) -> None:
    """Make a share of the chunked loss of short documents their divergence from the model without its adapter.

    For each token with a loss in a document within the trained length, in training mode, the loss becomes
    (1 - share) · -log p(target) + share · KL(q ‖ p), where p is the model in training, and q the same model without
    its adapter, without dropout and on the original RoPE. A document's length is read from `position_ids`.

    Args:
        model: an adapter on an extended model, after `use_chunked_loss`.
        alone: the other model is run only where there is a short document. Processes that share weights must run it
            together.

    Raises:
        ValueError: the model is not extended by fixed frequencies from plain RoPE, or has several RoPE tables.
        RuntimeError: it has no chunked loss, or its rotary embedding does not give the original cos and sin.
    """
    inner, patch = transformers_model(model), chunked_loss_of(model)
    if patch is None:
        raise RuntimeError("distillation is a part of the chunked loss. Call use_chunked_loss(model) first.")
    rope, rotary = original_rotary(inner, "distillation")
    distillation = Distillation(inner, share, rope.original_max_position_embeddings, rotary, alone)
    with distillation.original():
        for path in rotary:
            check_original(inner.get_submodule(path), path, rope)
    patch.reference = distillation


@dataclass(frozen=True, eq=False)
class Distillation:
    """Gives the chunked loss its reference.

    Attributes:
        trained: the trained length in tokens.
        rotary: rotary embeddings of the original RoPE, by their paths in the model.
    """

    model: Any
    share: float
    trained: int
    rotary: dict[str, nn.Module]
    alone: bool

    def __call__(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Reference | None:
        """The reference for a batch, from the arguments of the model's decoder; None if there is no short document."""
        if position_ids is None:
            raise ValueError("distillation reads the length of documents from position_ids, got none. Pass them.")
        short = document_lengths(position_ids) <= self.trained
        if self.alone and not short.any():
            return None
        with torch.no_grad(), self.original():
            decoder, head = self.model.base_model, head_of(self.model)
            hidden = decoder(*args, **{**kwargs, "position_ids": position_ids, "use_cache": False}).last_hidden_state
            share = self.share * short.to(torch.promote_types(hidden.dtype, torch.float32))
            return Reference(hidden, head.weight, head.bias, share)

    @contextmanager
    def original(self) -> Iterator[None]:
        """The model without its adapter, on its original RoPE and in eval mode, within a `with` block."""
        # PEFT's own switch changes requires_grad too, which FSDP2 reads once.
        layers: list[Any] = [module for module in self.model.modules() if hasattr(module, "_disable_adapters")]
        edit = Edit(self.model)
        with in_eval_mode(self.model):
            try:
                for layer in layers:
                    layer._disable_adapters = True
                for path, module in self.rotary.items():
                    edit.set_attribute(path, "forward", module.forward)
                yield
            finally:
                edit.undo()
                for layer in layers:
                    layer._disable_adapters = False
