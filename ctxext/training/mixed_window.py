"""Mixed context windows: short documents train on the original RoPE, longer ones on the extended one.

So that one set of weights serves both: short inputs on the frequencies that they always had, long ones on the rescaled
ones. Shang et al. (2025), "LongRoPE2: Near-Lossless LLM Context Window Scaling", arXiv 2502.20082.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ctxext.core.apply import transformers_model
from ctxext.core.edit import Edit
from ctxext.data.packing import Packed, lengths_of
from ctxext.encodings.rope import RopeGeometry
from ctxext.extension.rope import SCALING_KEYS
from ctxext.models.context import ContextFacts, read_context
from ctxext.models.families import family_of
from ctxext.patches.rotary import RotaryProof, find_rotary_sites, output_error, standard_sites


def document_lengths(position_ids: Int[Tensor, "*batch token"]) -> Int[Tensor, "*batch token"]:
    """The length in tokens of each token's document. A document begins where positions do not go on by one."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[..., 1:] = position_ids.diff() != 1
    document = begins.cumsum(-1) - 1
    lengths = torch.zeros_like(position_ids).scatter_add_(-1, document, torch.ones_like(position_ids))
    return lengths.gather(-1, document)


def use_mixed_window(model: nn.Module) -> Edit:
    """Make documents within the trained length use the original RoPE, and longer ones the extended RoPE, in training.

    The length of a document is read from `position_ids`, which begin anew in each document of a packed row. In
    evaluation mode the model is the extended one, as it is saved: parts of a long text have positions of their own
    there, and a cache must hold keys of one RoPE.

    Args:
        model: an extended model, or an adapter on one.

    Returns:
        The edit, whose `undo()` reverts it.

    Raises:
        ValueError: the model is not extended by fixed frequencies from plain RoPE, or has several RoPE tables.
        RuntimeError: its rotary embedding does not give the original cos and sin. The model is unchanged.
    """
    inner = transformers_model(model)
    rope, rotary = original_rotary(inner, "mixed windows")
    edit, trained = Edit(inner), rope.original_max_position_embeddings
    try:
        for path, original in rotary.items():
            module = inner.get_submodule(path)
            edit.set_attribute(path, "forward", partial(_forward, module, original, trained))
            mode = module.training
            try:
                check_original(module.train(), path, rope)
            finally:
                module.train(mode)
    except BaseException:
        edit.undo()
        raise
    return edit


def original_rotary(model: Any, purpose: str) -> tuple[RopeGeometry, dict[str, Any]]:
    """The RoPE that `model` had before its extension, and its rotary embeddings with it, by their paths in `model`.

    Args:
        purpose: what needs it, for errors.

    Raises:
        ValueError: the model is not extended by fixed frequencies from plain RoPE, or has several RoPE tables.
    """
    facts = _checked(model, purpose)
    with torch.device("cpu"):
        config = _original_config(facts)
        rotary = {site.paths[0]: type(site.module)(config) for site in find_rotary_sites(model, facts.text_config)}
    return facts.original_rope, rotary


def check_original(module: nn.Module, path: str, rope: RopeGeometry) -> None:
    """Raise RuntimeError unless a rotary embedding gives the cos and sin of `rope`."""
    error = output_error(module, "", rope.inv_freq, rope.attention_factor)
    if error is None or not error <= RotaryProof.OUTPUT_BAR:
        raise RuntimeError(
            f"the rotary embedding at {path!r} does not give the original cos and sin (error {error}). Train without "
            "mixed windows and distillation."
        )


@torch.no_grad()
def _forward(extended: Any, original: Any, trained: int, x: Tensor, position_ids: Tensor) -> Any:
    rescaled = type(extended).forward(extended, x, position_ids)
    if not extended.training:
        return rescaled
    plain, short = original(x, position_ids), (document_lengths(position_ids) <= trained)[..., None]
    if isinstance(rescaled, Tensor):  # Llama 4's, in complex numbers
        return torch.where(short, plain, rescaled)
    return tuple(torch.where(short, *both) for both in zip(plain, rescaled, strict=True))


def _original_config(facts: ContextFacts) -> Any:
    config = copy.deepcopy(facts.text_config)
    kept = {name: value for name, value in facts.rope_parameters.items() if name not in SCALING_KEYS}
    config.rope_parameters = {**kept, "rope_type": "default", "rope_theta": facts.original_theta}
    return config


def _checked(model: Any, purpose: str) -> ContextFacts:
    facts = read_context(model.config)
    if facts.mark is None or facts.lengths.start != facts.original_length:
        raise ValueError(
            f"{purpose}: the model must be extended from plain RoPE, got {facts.summary}. Extend it first "
            f"(ctxext.extend_context), or train without {purpose}."
        )
    family, table = family_of(facts.text_config), facts.tables[0]
    several = len(facts.tables) > 1 or table.n_zero or "mrope_section" in facts.rope_parameters
    if several or family.softmax_mscale or family.mscale_keys:
        raise ValueError(
            f"{purpose}: only a single RoPE table can be switched, and model_type {facts.text_config.model_type!r} has "
            f"several, positions with several axes or a softmax temperature. Train without {purpose}."
        )
    if facts.scaling is not None and facts.scaling.in_attention:
        raise ValueError(
            f"{purpose}: only fixed frequencies can be switched, and {facts.scaling.name} is length-dependent. Extend "
            "with a static method, such as yarn or a fitted longrope."
        )
    standard_sites(model, facts)
    return facts


def check_mixture(packed: Sequence[Packed], trained: int, setting: str, wanted: set[bool]) -> None:
    """Raise ValueError unless there are documents within `trained` tokens (True in `wanted`) and longer ones (False).

    Args:
        setting: what needs them.
    """
    lacking = set(wanted)
    for length in lengths_of(packed):
        lacking.discard(length <= trained)
        if not lacking:
            return
    got, add = ("longer", "shorter") if True in lacking else ("no longer", "longer")
    raise ValueError(
        f"{setting} needs documents within {trained:,} tokens{' and longer ones' if len(wanted) > 1 else ''}, but all "
        f"are {got}. Add a source with {add} ones (max_document splits documents), or drop {setting}."
    )
