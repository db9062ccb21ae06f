"""The receipt of an extension: apply it to a live model, prove it, restore, save a portable config."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ctxext.configs import Plan
from ctxext.families import family_of
from ctxext.methods import RopeScaling
from ctxext.sites import rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "context_extension"


@dataclass(frozen=True)
class Proof:
    """What was seen of a patch, each part of which could have failed.

    Attributes:
        frequency_error: largest relative difference between the new module's frequencies (built by the
            family's own class from the saved config) and the method's formula.
        output_error: largest difference between the cos and sin that the module returns and the
            formula; None where its output has a layout that is not compared.
        consumed: whether a forward pass was seen to read what the module returns; None until the
            first forward pass of a model whose weights were not there yet.
    """

    frequency_error: float
    output_error: float | None
    consumed: bool | None

    def __str__(self) -> str:
        consumed = {True: "seen", False: "NOT seen", None: "due at the first forward pass"}[self.consumed]
        output = "layout not compared" if self.output_error is None else f"off by {self.output_error:.1e}"
        return f"frequencies off by {self.frequency_error:.1e}, cos and sin {output}, use by attention {consumed}"

    # Float32 tables against float64 formulas: powers of theta are good to about 1e-6 there.
    FREQUENCY_BAR = 1e-5
    OUTPUT_BAR = 1e-3


@dataclass(frozen=True)
class SwappedSite:
    """Undo data: the paths of a rotary embedding, and the module that stood there."""

    paths: tuple[str, ...]
    original: nn.Module


@dataclass(frozen=True)
class SwappedConfig:
    """Undo data: a config that the model held, and the copy that took its place."""

    original: Any
    extended: Any


@dataclass(repr=False)
class Extension:
    """What `extend_context` did to a model. It stays on the model as `model.context_extension`."""

    plan: Plan
    proof: Proof | None  # None where the frequencies were kept
    sites: tuple[SwappedSite, ...] = ()
    configs: tuple[SwappedConfig, ...] = ()

    @property
    def method(self) -> RopeScaling | None:
        """The method; None where the native scaling was kept and only the window widened."""
        return self.plan.method

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies in effect, radians a token, float64 of shape (pair,)."""
        return self.plan.extended.inv_freq

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin in effect."""
        return self.plan.extended.attention_factor

    def rope_parameters(self) -> dict[str, Any]:
        """The portable form, as it stands in the saved config."""
        return copy.deepcopy(self.plan.updates["rope_parameters"])

    def __repr__(self) -> str:
        rope = self.plan.extended
        paths = ", ".join(path for site in self.sites for path in site.paths)
        lines = [
            self.plan.summary,
            f"  sites             {paths or 'none: only the config changed'}",
            f"  inverse freq.     {rope.inv_freq[0]:.4g} … {rope.inv_freq[-1]:.4g} rad/token "
            f"(before {self.plan.rope.inv_freq[0]:.4g} … {self.plan.rope.inv_freq[-1]:.4g})",
            f"  attention factor  {rope.attention_factor:.6g}",
            f"  trained length    {self.plan.rope.original_max_position_embeddings} "
            f"({self.plan.facts.trained_length_source})",
            f"  target length     {self.plan.target_length}",
            f"  saved as          rope_type {self.plan.updates['rope_parameters'].get('rope_type')!r}",
            f"  proof             {self.proof or 'none needed: no frequency changed'}",
            *(f"  note              {note}" for note in self.plan.notes),
        ]
        return "\n".join(lines)


def extension_of(model: nn.Module) -> Extension | None:
    """The receipt on `model` or on a model inside it (PEFT, compile, DDP, the base of a head)."""
    owner = extended_model(model)
    return None if owner is None else owner.__dict__[ATTRIBUTE]


def extended_model(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model in `model` that was extended, if any."""
    return next((m for m in model.modules() if ATTRIBUTE in m.__dict__), None)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model in `model`, whatever wraps it."""
    from transformers import PreTrainedModel

    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next((m for m in modules if isinstance(m, PreTrainedModel)), None)
    if found is None:
        raise TypeError(
            f"expected a transformers model (or one wrapped by PEFT, torch.compile or DDP), got "
            f"{type(model).__name__}. For a config alone, use extend_config."
        )
    return found


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode for the length of a `with` block, and then in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def apply(model: PreTrainedModel, plan: Plan) -> Extension:
    """Put `plan` into effect on a live model, in place. On any error the model is left as it was.

    Raises:
        ValueError: the model has no standard rotary embedding, or one whose class refuses the plan.
        RuntimeError: the new rotary embedding is not what the formula says, or nothing reads it.
    """
    sites = _sites(model, plan)
    configs = _config_copies(model)
    extended_config = configs[-1].extended
    plan.apply_to(extended_config)
    built, proof = ([], None) if plan.method is None else _build(sites, extended_config, plan)
    extension = Extension(plan=plan, proof=proof, configs=configs)
    try:
        for site, new in zip(sites, built):
            old = rotary.put(model, site.paths, new)
            extension.sites += (SwappedSite(paths=site.paths, original=old),)
        _swap_configs(model, {id(pair.original): pair.extended for pair in configs})
        model.__dict__[ATTRIBUTE] = extension
        # On the instance, as data (a partial), so that it survives deepcopy, pickle and PEFT's merge.
        model.__dict__["save_pretrained"] = functools.partial(save_bilingual, model)
        if built:
            if rotary.on_meta(model):
                model.register_forward_pre_hook(_prove_at_first_forward)
            else:
                prove_consumed(model)
    except BaseException:
        restore(model, extension)
        raise
    return extension


def _config_copies(model: PreTrainedModel) -> tuple[SwappedConfig, ...]:
    """The model's config and, last, its text config, each with the copy that is to be extended.

    Two models may share one config object, so it is never edited in place.
    """
    config = model.config
    text_config = config.get_text_config(decoder=True)
    text_copy = copy.deepcopy(text_config)
    if text_config is config:
        return (SwappedConfig(config, text_copy),)
    whole = copy.copy(config)
    whole.__dict__.update({k: text_copy for k, v in config.__dict__.items() if v is text_config})
    return SwappedConfig(config, whole), SwappedConfig(text_config, text_copy)


def _swap_configs(model: PreTrainedModel, new: dict[int, Any]) -> None:
    """Every module of the model that holds a config in `new` (by identity) now holds the other one."""
    for module in model.modules():
        module.__dict__.update({k: new[id(v)] for k, v in module.__dict__.items() if id(v) in new})


def _sites(model: PreTrainedModel, plan: Plan) -> list[rotary.RotarySite]:
    text_config = plan.facts.text_config
    name = f"{type(model).__name__} (model_type {text_config.model_type!r})"
    family = family_of(text_config)
    if family.refuse is not None and plan.method is not None:
        raise ValueError(f"{name} {family.refuse}. The model was left as it was.")
    sites = rotary.find_rotary_sites(model, text_config)
    others = rotary.other_rotary_tables(model, sites)
    if not sites:
        seen = f" It keeps other rotary tables: {'; '.join(others[:3])}." if others else ""
        raise ValueError(
            f"found no standard rotary embedding in {name}: no module holds inv_freq, original_inv_freq and "
            f"attention_scaling.{seen} The model was left as it was."
        )
    if others:
        raise ValueError(
            f"{name} has rotary tables beside the standard one, so a patch would be half done: "
            f"{'; '.join(others[:3])}. The model was left as it was."
        )
    for site in sites:
        _check_present_table(site, plan)
    return sites


def _check_present_table(site: rotary.RotarySite, plan: Plan) -> None:
    """The model must do what its config says before it is changed; float16 and bfloat16 casts are allowed."""
    if site.rotary_dim != plan.facts.rotary_dim:
        raise ValueError(
            f"{site.paths[0]!r} rotates {site.rotary_dim} dimensions, but the config says {plan.facts.rotary_dim}. "
            "This family computes them in its own way and is not supported."
        )
    table = site.module.inv_freq
    scaling = plan.facts.scaling
    if table.device.type == "meta" or (scaling is not None and scaling.name in ("longrope", "dynamic_ntk")):
        return  # Those two change the table as they run.
    expected = plan.facts.rope.inv_freq.float().to(table.dtype).double()
    exact = table.dtype == torch.float32
    if not torch.allclose(table.cpu().double(), expected, rtol=1e-5 if exact else 1e-2, atol=0.0 if exact else 1e-7):
        raise ValueError(
            f"the frequencies of {site.paths[0]!r} differ from what its config says (by up to "
            f"{rotary.relative_error(table, expected):.1e}, relative): they were changed by hand, or this family "
            "computes them in its own way. Load the model afresh, or see ctxext.describe_context."
        )


def _build(sites: list[rotary.RotarySite], config: Any, plan: Plan) -> tuple[list[nn.Module], Proof]:
    """The replacements on the CPU, made from the extended `config` and compared with the method's own formula."""
    built, frequency_error, output_error = [], 0.0, None
    for site in sites:
        new = site.build(config, plan.summary)
        frequency_error = max(frequency_error, rotary.relative_error(new.inv_freq, plan.extended.inv_freq))
        error = rotary.output_error(new, plan.extended)
        output_error = error if output_error is None else max(output_error, error or 0.0)
        built.append(new)
    if frequency_error > Proof.FREQUENCY_BAR or (output_error or 0.0) > Proof.OUTPUT_BAR:
        raise RuntimeError(
            f"{type(sites[0].module).__name__} does not do what {plan.summary!r} says: frequencies differ by "
            f"{frequency_error:.1e}, its output by {output_error if output_error is not None else 0.0:.1e}. This "
            "family reads its config in its own way. The model was left as it was."
        )
    return built, Proof(frequency_error, output_error, None)


def prove_consumed(model: PreTrainedModel) -> None:
    """Run a forward pass of two tokens and see that the replaced modules' output is read."""
    extension: Extension = model.__dict__[ATTRIBUTE]
    modules = [model.get_submodule(site.paths[0]) for site in extension.sites]
    try:
        consumed = all(isinstance(m, rotary.ExtendedRotary) for m in modules) and rotary.is_consumed(model, modules)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} could not run the forward pass of two tokens that proves the patch "
            f"({type(error).__name__}: {error}). The model was left as it was. Extend it before it is sharded or "
            "wrapped, on one device."
        ) from error
    assert extension.proof is not None
    extension.proof = replace(extension.proof, consumed=consumed)
    if not consumed:
        raise RuntimeError(
            f"nothing in {type(model).__name__} reads the output of {extension.sites[0].paths[0]!r}, so replacing it "
            "changes nothing. The model was left as it was; its attention gets positions from elsewhere."
        )


def _prove_at_first_forward(model: PreTrainedModel, args: Any) -> None:
    """A pre-forward hook for models that had no weights when they were extended. It removes itself.

    Inside a compiled graph nothing can be watched, so there the proof stays due.
    """
    if torch.compiler.is_compiling() or rotary.on_meta(model):
        return
    _remove_hook(model)
    try:
        prove_consumed(model)
    except BaseException:
        restore(model, model.__dict__[ATTRIBUTE])
        raise


def _remove_hook(model: PreTrainedModel) -> None:
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is _prove_at_first_forward:
            del model._forward_pre_hooks[key]


def restore(model: PreTrainedModel, extension: Extension) -> None:
    """Undo everything that `apply` did, newest first."""
    for name in (ATTRIBUTE, "save_pretrained"):
        model.__dict__.pop(name, None)
    _remove_hook(model)
    extended = {id(pair.extended) for pair in extension.configs}
    for pair in extension.configs:
        for name, value in pair.extended.__dict__.items():
            # What was edited in the meantime, such as use_cache, stays edited.
            if name not in extension.plan.updates and id(value) not in extended:
                pair.original.__dict__[name] = value
    _swap_configs(model, {id(pair.extended): pair.original for pair in extension.configs})
    for site in reversed(extension.sites):
        rotary.put(model, site.paths, site.original)


# ----------------------------------------------------------------------------------------- saving


def version_4_keys(text_config: Any, rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor` and `rope_scaling` as transformers 4 and older engines read them.

    Without them transformers 4.57 loads a version 5 config as plain RoPE of theta 10000, silently.
    """
    keys = {name: rope_parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope_parameters}
    for name, older in family_of(text_config).version_4_names.items():
        keys[older] = rope_parameters[name]
    scaled_by_default = (type(text_config)().rope_parameters or {}).get("rope_type", "default") != "default"
    more = rope_parameters.keys() - {"rope_type", *keys}  # mrope_section, say
    if rope_parameters["rope_type"] != "default" or scaled_by_default or more:
        # Version 5 reads `rope_scaling` in the place of `rope_parameters`, so it must say all that those do.
        keys["rope_scaling"] = copy.deepcopy(rope_parameters)
    return keys


def save_bilingual(model: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.save_pretrained`, with a config.json that transformers 5 and 4 both read.

    The keys of version 4 stand in the config only while it is written: kept there, they would go
    stale and win over later edits of `rope_parameters`.
    """
    text_config = model.config.get_text_config(decoder=True)
    keys = version_4_keys(text_config, text_config.rope_parameters)
    before = {name: value for name, value in text_config.__dict__.items() if name in keys}
    text_config.__dict__.update(keys)
    try:
        return type(model).save_pretrained(model, save_directory, *args, **kwargs)
    finally:
        for name in keys:
            del text_config.__dict__[name]
        text_config.__dict__.update(before)
