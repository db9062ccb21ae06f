"""Apply a plan to a live model, verify it, and undo it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ctxext.core.edit import ConfigPair, Edit, Undo, is_mixed
from ctxext.core.patch import Proof
from ctxext.core.plan import ENCODINGS, Plan
from ctxext.core.probing import on_meta, probing
from ctxext.methods import ContextMethod
from ctxext.models.metadata import BESIDE
from ctxext.models.text_config import path_to_text, text_config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "context_extension"


@dataclass(repr=False)
class Extension:
    """What `extend_context` did to a model; stored as `model.context_extension`.

    Attributes:
        proofs: one per patch of the plan; empty where the frequencies were kept.
        undos: the inverse of each change.
    """

    plan: Plan
    proofs: tuple[Proof, ...] = ()
    undos: list[Undo] = field(default_factory=list)

    @property
    def method(self) -> ContextMethod | None:
        """The method; None if the current scaling was kept and only the window widened."""
        return self.plan.method

    @property
    def proof(self) -> Proof | None:
        """The proof of the first patch."""
        return self.proofs[0] if self.proofs else None

    @property
    def changed(self) -> list[str]:
        """Paths of the changed modules, without the model itself."""
        paths = [path for each in self.undos if each.kind != "hook" for path in (each.path, *each.aliases)]
        return [path for path in dict.fromkeys(paths) if path]

    @property
    def original_config(self) -> Any:
        """The model's config before the extension."""
        return self._configs[0].original

    def text_configs(self, model: PreTrainedModel) -> ConfigPair:
        """The model's text config before and after the extension."""
        now = text_config_of(model.config)
        return next(pair for pair in self._configs if pair.extended is now)

    @property
    def _configs(self) -> list[ConfigPair]:
        return next(each.old[0] for each in self.undos if each.kind == "configs")

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies in effect (a dynamic method's at its maximum length), radians per token, float64 (pair,)."""
        return self._rope_plan.extended.inv_freq

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin in effect."""
        return self._rope_plan.extended.attention_factor

    def rope_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` of the saved config."""
        return copy.deepcopy(self._rope_plan.updates["rope_parameters"])

    @property
    def _rope_plan(self) -> Any:
        if not hasattr(self.plan, "extended"):
            raise ValueError(f"this model has {ENCODINGS[self.plan.encoding]}, not RoPE: it has no frequencies.")
        return self.plan

    def __repr__(self) -> str:
        changed, lengths = self.changed, self.plan.lengths
        if len(changed) > 4:
            changed = [*changed[:2], f"… {changed[-1]} ({len(changed)} modules)"]
        rows = [
            ("encoding", ENCODINGS[self.plan.encoding]),
            ("changed", ", ".join(changed) or "the config alone"),
            *self.plan.figures,
            ("trained length", f"{lengths.trained} ({self.plan.trained_source})"),
            *([("starts from", f"{lengths.start} tokens")] if lengths.start != lengths.trained else []),
            ("target length", self.plan.target_length),
            ("saved as", self.plan.saved_as),
            *(("verified", proof) for proof in self.proofs or ("not needed: no frequency changed",)),
            *(("note", note) for note in self.plan.notes),
        ]
        return "\n".join([self.plan.summary, *(f"  {label:<16}  {value}" for label, value in rows)])


def apply(model: PreTrainedModel, plan: Plan, save: Callable[..., Any] | None = None) -> Extension:
    """Apply `plan` to a live model, in place. On any error the model is unchanged.

    Args:
        save: becomes the model's `save_pretrained`, with the model as its first argument.

    Raises:
        ValueError: a patch cannot be made on this model.
        RuntimeError: a patch was made but does not do what the method says, or the forward pass does not read it.
    """
    if any(patch.needs_weights for patch in plan.patches) and on_meta(model):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and {plan.method and plan.method.name} is verified by "
            "running the model. Load the weights first."
        )
    edit = Edit(model)
    try:
        with probing(model):
            for patch in plan.patches:
                patch.check(model)
            before = [patch.observe(model) for patch in plan.patches]
            edit.swap_configs(_config_copies(model, plan), tuple(plan.updates))
            for patch, seen in zip(plan.patches, before):
                patch.write(edit, seen)
            proofs = prove(model, plan, before)
        extension = Extension(plan, proofs, edit.undos)
        for config in (model.config, extension.original_config):
            config.__dict__.pop(BESIDE, None)  # only valid for the folder that it was loaded from
        if not plan.is_portable:  # so that a folder of config.save_pretrained is refused
            edit.set_config_field(model.config, BESIDE, plan.summary)
        edit.set_attribute("", ATTRIBUTE, extension)
        if save is not None:  # as data (a partial), so that it survives deepcopy, pickle and PEFT's merge
            edit.set_attribute("", "save_pretrained", functools.partial(save, model))
        if any(proof.is_pending for proof in proofs):
            edit.add_forward_pre_hook("", ProveAtFirstForward(before))
    except BaseException:
        edit.undo()
        raise
    return extension


def prove(model: PreTrainedModel, plan: Plan, before: list[Any]) -> tuple[Proof, ...]:
    """The proof of each patch. Raises RuntimeError if one failed."""
    proofs = []
    for patch, seen in zip(plan.patches, before):
        proof = patch.prove(model, seen)
        fault = proof.fault(type(model).__name__, plan.summary)
        if fault is not None:
            raise RuntimeError(fault)
        proofs.append(proof)
    return tuple(proofs)


def restore(model: PreTrainedModel, extension: Extension) -> None:
    """Undo everything that `apply` did. Errors: as `Edit.undo`."""
    Edit(model, extension.undos).undo()


@dataclass
class ProveAtFirstForward:
    """Forward pre-hook of a model that was extended on the meta device: verifies the patches once."""

    before: list[Any]

    def __call__(self, model: PreTrainedModel, args: Any) -> None:
        extension: Extension = model.__dict__[ATTRIBUTE]
        # A compiled graph cannot be observed, so the proof stays pending there.
        if torch.compiler.is_compiling() or on_meta(model) or not any(proof.is_pending for proof in extension.proofs):
            return
        pending, extension.proofs = extension.proofs, ()  # the proof itself runs a forward pass
        try:
            with probing(model):
                extension.proofs = prove(model, extension.plan, self.before)
        except BaseException:
            extension.proofs = pending
            restore(model, extension)
            raise
        Edit(model, extension.undos).remove_hook(self)


def _config_copies(model: PreTrainedModel, plan: Plan) -> list[ConfigPair]:
    """The configs that the plan changes, each with an extended copy.

    These are the configs from the model's own down to its text config, and the copies of the text config that its parts
    hold (T5's encoder and decoder). Two models may share one config object, so none is edited in place.
    """
    way = (model.config, *(inner for _, inner in path_to_text(model.config)))
    *outer, text_config = way
    # Modules hold the sub-configs of other parts, such as vision.
    parts = {id(part): part for name in text_config.sub_configs if (part := getattr(text_config, name, None))}
    pairs = [ConfigPair(text_config, copy.deepcopy(text_config, parts))]
    for config in reversed(outer):
        held, extended = pairs[0].original, copy.copy(config)
        extended.__dict__.update({k: pairs[0].extended for k, v in config.__dict__.items() if v is held})
        pairs.insert(0, ConfigPair(config, extended))
    names = [name for name in plan.updates if name != "ctxext"]
    held_by_parts = {id(c): c for m in model.modules() if type(c := m.__dict__.get("config")) is type(text_config)}
    for config in held_by_parts.values():
        same = all(getattr(config, name, None) == getattr(text_config, name, None) for name in names)
        if same and all(config is not pair.original for pair in pairs):
            pairs.append(ConfigPair(config, copy.deepcopy(config)))
    for pair in pairs:
        if type(pair.extended) is type(text_config):
            plan.apply_to(pair.extended)
    return pairs


def extension_of(model: nn.Module) -> Extension | None:
    """The extension of `model` or of a model inside it (PEFT, compile, DDP, the base of a head)."""
    owner = extended_model(model)
    return None if owner is None else owner.__dict__[ATTRIBUTE]


def extended_model(model: nn.Module) -> PreTrainedModel | None:
    """The extended transformers model inside `model`, or None."""
    return next((cast(Any, m) for m in model.modules() if ATTRIBUTE in m.__dict__), None)


def refuse_extended(model: nn.Module) -> None:
    """Raise RuntimeError if `model`, a model inside it or one around it is extended."""
    done = extension_of(model)
    if done is not None:
        raise RuntimeError(f"this model is already extended ({done.plan.summary}). Call restore_context(model) first.")
    if any(is_mixed(module) for module in model.modules()):
        raise RuntimeError(
            "this model is part of one that is already extended. Call restore_context on that one first."
        )


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model inside any wrappers."""
    from transformers import PreTrainedModel

    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next((m for m in modules if isinstance(m, PreTrainedModel)), None)
    if found is None:
        remedy = "Pass the model itself (of a pipeline, its .model); for a config alone, use extend_config."
        if isinstance(model, (str, Path)):
            remedy = "Load it first with AutoModelForCausalLM.from_pretrained."
        raise TypeError(
            f"expected a transformers model (or one wrapped by PEFT, torch.compile or DDP), got "
            f"{type(model).__name__}. {remedy}"
        )
    return found
