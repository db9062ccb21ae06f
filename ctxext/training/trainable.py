"""Choose the trained parameters: all, LoRA, or LoRA with embeddings and norms."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ctxext.core.apply import transformers_model
from ctxext.extension.request import find_encoding
from ctxext.models.context import has_rope
from ctxext.models.metadata import live_mark
from ctxext.models.text_config import text_config_of
from ctxext.patches.rotary import RotaryProof, find_rotary_sites, table_errors
from ctxext.training.settings import TrainableSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attach_trainable(model: PreTrainedModel, settings: TrainableSettings) -> nn.Module:
    """Freeze `model` except for the trained parameters, which become float32; returns a `PeftModel` for LoRA.

    Embeddings and norms beside LoRA follow LongLoRA (Chen et al., 2024, section 3.3). They are PEFT's
    `modules_to_save`, since PEFT does not save parameters that merely require gradients. Embeddings tied to the head
    stay tied. An extended learned position table is trained too.

    Raises:
        ValueError: no projection matches `settings.targets`.
    """
    if settings.kind == "full":
        model.requires_grad_(True)
        return model.float()
    from peft import LoraConfig, get_peft_model

    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On a CPU, bitsandbytes repacks four-bit weights for inference in the first pass without gradients, for
            # good; later training gets wrong gradients (with a warning).
            module.support_avx512bf16_for_cpu = False
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    also = [names[embeddings]] if settings.embeddings else []
    also += dict.fromkeys(name for module, name in names.items() if settings.norms and _is_norm(module))
    also += _extended_tables(model)
    tied = settings.embeddings and head.weight is embeddings.weight
    if tied and names[embeddings] != "embed_tokens":  # the only name that PEFT ties to the head by itself
        also.append(names[head])
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT divides it alone
        lora_dropout=settings.dropout,
        target_modules=_targets(model, settings),
        modules_to_save=also or None,
        ensure_weight_tying=tied,
    )
    attached = get_peft_model(model, config)
    for parameter in attached.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return attached


def _targets(model: PreTrainedModel, settings: TrainableSettings) -> str | list[str]:
    if settings.targets == "all-linear":
        return "all-linear"
    head = model.get_output_embeddings()
    names = {
        path: path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }
    known = ", ".join(sorted({*names.values()}))
    if settings.targets != "attention":
        for name in settings.targets:
            if name not in names.values():
                raise ValueError(f"trainable.targets: no projection is named {name!r}. Available: {known}.")
        return settings.targets
    inside = [path for path in names if re.search(r"(attention|attn).*\.", path)]
    # GPT-2's c_proj is also in the MLP, so its parent's name is needed.
    outside = {names[path] for path in names.keys() - {*inside}}
    chosen = {".".join(path.split(".")[-2:]) if names[path] in outside else names[path] for path in inside}
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no projections inside a module named attention. Name them in "
            f"trainable.targets; available: {known}."
        )
    return sorted(chosen)


def _is_norm(module: nn.Module) -> bool:
    """Whether it is called a norm, and has only one-dimensional weights."""
    own = list(module.parameters(recurse=False))
    return bool(own) and "norm" in type(module).__name__.lower() and all(weight.ndim == 1 for weight in own)


def _extended_tables(model: PreTrainedModel) -> list[str]:
    """The names of extended learned position tables, most of whose rows are new."""
    text_config = text_config_of(model.config)
    if has_rope(text_config) or live_mark(text_config) is None:
        return []
    found = find_encoding(model, text_config)
    return [path.rpartition(".")[2] for path in found.paths] if found is not None and found.name == "learned" else []


def trained_parameters(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_no_dropout(model: nn.Module) -> None:
    """Raise ValueError if the model's config has dropout; a classifier head's is not used in training."""
    found = {
        name: value
        for name, value in text_config_of(transformers_model(model).config).to_dict().items()
        if "drop" in name and "classifier" not in name and "summary" not in name
        if isinstance(value, float) and value > 0
    }
    if found:
        raise ValueError(
            f"engines that split a row across processes do not support dropout, and the model's config has {found}. "
            "Set them to 0, or use another engine."
        )


def check_rotary(model: nn.Module) -> None:
    """Raise RuntimeError unless every rotary table of `model` is float32 and matches its config.

    `model.to(bfloat16)` rounds the frequencies of a stock model: 14 radians off at 32,768 tokens.
    """
    text_config = text_config_of(transformers_model(model).config)
    parameters = getattr(text_config, "rope_parameters", None)
    if parameters is None:  # no RoPE, or GPT-J's tables of sines and cosines
        return
    for site in find_rotary_sites(model, text_config):
        for table in map(site.table, site.labels):
            if table.dtype != torch.float32:
                raise RuntimeError(
                    f"the rotary frequencies at {site.paths[0]!r} are {table.dtype}, which is too coarse for long "
                    "positions: load the model with dtype= instead of casting it."
                )
    for path, error in table_errors(model, text_config, parameters):
        if error > RotaryProof.FREQUENCY_BAR:
            raise RuntimeError(
                f"the rotary frequencies at {path!r} do not match the model's config: they changed after loading. "
                "Extend the checkpoint before loading it."
            )
