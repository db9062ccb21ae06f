"""Fit a method to a model on a text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from ctxext.api import temporarily_extended
from ctxext.core.plan import factor_and_target
from ctxext.evals.prompts import Prompter
from ctxext.evals.targets import model_fingerprint
from ctxext.extension.method_file import SavedMethod
from ctxext.fitting.episodes import split
from ctxext.fitting.gradient import GradientSettings, fit_by_gradient
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.fitting.longrope2 import LongRoPE2Settings, fit_by_longrope2
from ctxext.methods import LongRoPE
from ctxext.utils.machine import machine, versions
from ctxext.utils.processes import ALONE, Processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT = GradientSettings()


@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    model: PreTrainedModel,
    prompter: Prompter,
    text: str,
    factor: float | None = None,
    *,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    settings: GradientSettings | LongRoPE2Settings = DEFAULT,
    names: tuple[str, str] = ("model", "text"),
    advance: Callable[[float, str], None] = lambda share, state: None,
    processes: Processes = ALONE,
) -> SavedMethod:
    """Fit the rescale factors to `model`; its weights are unchanged.

    Args:
        settings: `GradientSettings` also learn the attention factor; `LongRoPE2Settings` search the critical dimension.
        prompter: of the model's tokenizer, `Prompter(tokenizer)`.
        text: prose; three quarters for training, the rest held out for selection.
        factor, target_length, original_max_position_embeddings: as in `ctxext.extend_context`.
        names: the names of model and text, for the file.
        advance: called with the finished share and a progress message.

    Returns:
        A method for `extend_context(model, method=...)`, with its origin in `about`.

    Raises:
        ValueError: the text is too short, RoPE is missing or already scaled, the budget is too small for one
            evaluation, or `prompter` needs generated answers.
        RuntimeError: a loss is not finite. The model is unchanged in every case.
    """
    began = time.perf_counter()
    if prompter.answer_tokens is not None:
        raise ValueError(
            f"a prompter of style {prompter.style!r} leaves {prompter.answer_tokens} tokens for a free-form "
            "answer, and a fit scores answers token by token. Use style='base' or style='chat', without answer_tokens."
        )
    live = LiveFactors(model, original_max_position_embeddings)
    trained = live.rope.original_max_position_embeddings
    factor, target = factor_and_target(factor, target_length, "longrope", trained)
    # Fails early if the model cannot be extended.
    with temporarily_extended(
        model,
        method=LongRoPE.example(live.rope, factor),
        original_max_position_embeddings=original_max_position_embeddings,
    ):
        pass
    learnt, held_out = split(text, prompter, trained, target, name=names[1])
    with live, frozen(model):
        if isinstance(settings, LongRoPE2Settings):
            found = fit_by_longrope2(model, live, learnt, held_out, settings, advance=advance, processes=processes)
        else:
            found = fit_by_gradient(model, live, learnt, held_out, settings, advance=advance, processes=processes)
    about = {
        "model": names[0],
        "model_fingerprint": model_fingerprint(model),
        "trained_length": trained,
        "target_length": target,
        "text": f"{names[1]} {learnt.haystack.fingerprint}",
        "by": settings.by,
        "settings": asdict(settings),
        "start": found.start,
        "kept_start": found.kept_start,
        "losses": found.tried,
        **found.searched,
        "history": found.history,
        "seconds": time.perf_counter() - began,
        "machine": machine(model.device.type),
        "versions": versions(),
    }
    return SavedMethod(found.method, about)
