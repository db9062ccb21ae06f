"""The receipt of an extension: apply it to a live model, prove it, restore, save a portable config."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ctxext.attention.rotary import LateRotary, Layer
from ctxext.core.edit import Surgery, Undo, undo
from ctxext.core.encoding import SiteProof
from ctxext.core.plan import ENCODINGS, Plan
from ctxext.extension.metadata_file import BESIDE, RECORD, carry_extension, weights_fingerprint, write_record
from ctxext.extension.method_file import PROBE
from ctxext.extension.request import SitePlan, model_on_meta, plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.methods import ContextMethod, geometry_in_use
from ctxext.models.families import family_of
from ctxext.models.rope_tables import rope_tables, slides_over
from ctxext.models.text_config import path_to_text, text_config_of
from ctxext.patches import rotary

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
class LateProof:
    """What was seen of late rotation, each part of which could have failed.

    Attributes:
        rotation_error: largest difference between the queries and keys of the stock model and the same rotated late,
            relative to the largest of them, over all layers.
        output_error: difference to the stock model's last hidden states at random positions within the trained length,
            with the frequencies from before the extension, with and without a cache; root mean square, relative.
        effect: the same difference, that the method makes at random positions up to the target.
    """

    rotation_error: float
    output_error: float
    effect: float

    def __str__(self) -> str:
        return (
            f"with nothing scaled, queries and keys are {self.rotation_error:.1e} and the output "
            f"{self.output_error:.1e} off the stock model's; beyond its trained length the method changes the output "
            f"by {self.effect:.1e}"
        )


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
    proof: Proof | LateProof | SiteProof | None  # None where the frequencies were kept
    sites: tuple[SwappedSite, ...] = ()
    configs: tuple[SwappedConfig, ...] = ()
    undos: list[Undo] = field(default_factory=list)

    @property
    def method(self) -> ContextMethod | None:
        """The method; None where the native scaling was kept and only the window widened."""
        return self.plan.method

    @property
    def inv_freq(self) -> torch.Tensor:
        """The frequencies in effect (a dynamic method's at full reach), radians a token, float64 of shape (pair,)."""
        return self._rope.extended.inv_freq

    @property
    def attention_factor(self) -> float:
        """The multiplier of cos and sin in effect."""
        return self._rope.extended.attention_factor

    def rope_parameters(self) -> dict[str, Any]:
        """The portable form, as it stands in the saved config."""
        return copy.deepcopy(self._rope.updates["rope_parameters"])

    @property
    def _rope(self) -> RopePlan:
        if not isinstance(self.plan, RopePlan):
            raise ValueError(f"this model has {ENCODINGS[self.plan.encoding]}, not RoPE: it has no frequencies.")
        return self.plan

    def __repr__(self) -> str:
        paths = [path for site in self.sites for path in site.paths]
        paths += dict.fromkeys(each.path for each in self.undos if each.kind == "buffer")
        if isinstance(self.plan, SitePlan):
            paths = list(self.plan.site.paths)
        numbers = []
        if isinstance(self.plan, RopePlan):
            rope, before = self.plan.extended, self.plan.rope
            numbers = [
                f"  inverse freq.     {rope.inv_freq[0]:.4g} … {rope.inv_freq[-1]:.4g} rad/token "
                f"(before {before.inv_freq[0]:.4g} … {before.inv_freq[-1]:.4g})",
                f"  attention factor  {rope.attention_factor:.6g}",
            ]
        lines = [
            self.plan.summary,
            f"  encoding          {ENCODINGS[self.plan.encoding]}",
            f"  sites             {', '.join(paths) or 'none: only the config changed'}",
            *numbers,
            f"  trained length    {self.plan.start} ({self.plan.start_source})",
            f"  target length     {self.plan.target_length}",
            f"  saved as          {self._saved_as()}",
            f"  proof             {self.proof or 'none needed: no frequency changed'}",
            *(f"  note              {note}" for note in self.plan.notes),
        ]
        return "\n".join(lines)

    def _saved_as(self) -> str:
        if not self.plan.is_portable:
            return f"{RECORD} beside an unextended config: no config can say it, as {self.plan.why_not_portable}"
        if isinstance(self.plan, RopePlan):
            parameters = self.plan.updates["rope_parameters"]
            first = parameters.get(self.plan.facts.tables[0].label, parameters)
            return f"rope_type {first.get('rope_type')!r}"
        return f"weights and config ({', '.join(name for name in self.plan.updates if name != 'ctxext')})"


def table_errors(model: nn.Module, text_config: Any, rope_parameters: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """How far each rotary table of a live model is from what `rope_parameters` say: (path, relative error).

    Tables that follow the length of the call and tables that are offloaded are left out.
    """
    tables = rope_tables(text_config, rope_parameters)
    for site, facts in itertools.product(rotary.find_rotary_sites(model, text_config), tables):
        parameters, rope = facts.parameters, facts.in_use
        if parameters["rope_type"] == "dynamic" or parameters.get("short_factor") != parameters.get("long_factor"):
            continue
        inv_freq = site.table(facts.label)
        if inv_freq.device.type != "meta":
            scaling = getattr(site.module, rotary.of_label(facts.label, "attention_scaling"))
            expected = site.laid_out(facts.label, rope.inv_freq, rope.inv_freq)
            yield (
                site.paths[0],
                max(rotary.relative_error(inv_freq, expected), abs(scaling / rope.attention_factor - 1)),
            )


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
        ValueError: the model has no standard rotary embedding, or one whose class refuses the plan, or attention
            that cannot be rotated late.
        RuntimeError: the new rotary embedding is not what the formula says, or nothing reads it.
    """
    by_tables = isinstance(plan, RopePlan) and family_of(plan.text_config).sin_cos_tables
    configs = _config_copies(model)
    plan.apply_to(configs[-1].extended)
    for config in (configs[0].original, configs[0].extended):
        config.__dict__.pop(BESIDE, None)  # true of the folder that it was loaded from, and of no other
    extension = Extension(plan=plan, proof=None, configs=configs)
    sites = _sites(model, plan) if isinstance(plan, RopePlan) and not by_tables else []
    try:
        if isinstance(plan, SitePlan):
            _write_sites(model, plan, extension)
        elif isinstance(plan, RopePlan) and plan.is_late:
            _rotate_late(model, sites, extension)
        elif by_tables:
            _grow_sin_cos_tables(model, extension)
        elif isinstance(plan, RopePlan) and plan.method is not None:
            if plan.softmax_factor != plan.facts.softmax_factor:
                _scale_softmax(model, extension)
            built, extension.proof = _build(sites, configs[-1].extended, plan)
            _put(model, sites, built, extension)
        _swap_configs(model, {id(pair.original): pair.extended for pair in configs})
        model.__dict__[ATTRIBUTE] = extension
        # On the instance, as data (a partial), so that it survives deepcopy, pickle and PEFT's merge.
        save = save_portable if plan.is_portable else save_with_record
        model.__dict__["save_pretrained"] = functools.partial(save, model)
        if isinstance(extension.proof, Proof):
            if rotary.on_meta(model):
                model.register_forward_pre_hook(_prove_at_first_forward)
            else:
                prove_consumed(model)
    except BaseException:
        restore(model, extension)
        raise
    return extension


def _write_sites(model: PreTrainedModel, plan: SitePlan, extension: Extension) -> None:
    """Extend an encoding other than RoPE, and prove it.

    Raises:
        ValueError: there are no weights yet.
        RuntimeError: the model does not do what the method's formula says, or its output does not depend on it.
    """
    if rotary.on_meta(model):
        raise ValueError(
            f"{type(model).__name__} has no weights yet, and {plan.method.name} works on them. Load them first."
        )
    left = "The model was left as it was."
    with (
        torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
        in_eval_mode(model),
        torch.no_grad(),
    ):
        before = _run_proof(model, plan.site.observe, model)
        extension.configs = (*_held_copies(model, plan, extension.configs[-1].original), *extension.configs)
        _swap_configs(model, {id(pair.original): pair.extended for pair in extension.configs})
        plan.site.write(Surgery(model, extension.undos), plan.method, plan.target_length)
        proof = _run_proof(model, plan.site.prove, model, plan.method, before)
    if not proof.formula_error <= SiteProof.FORMULA_BAR:
        raise RuntimeError(
            f"{type(model).__name__} does not do what {plan.summary!r} says: it is {proof.formula_error:.1e} off the "
            f"formula. {left}"
        )
    if not proof.effect > 0:
        raise RuntimeError(f"{plan.summary} changes nothing in the output of {type(model).__name__}. {left}")
    extension.proof = proof


def _held_copies(model: PreTrainedModel, plan: SitePlan, original: Any) -> list[SwappedConfig]:
    """The copies of its config that a model's parts hold (T5's encoder and decoder), each with one that is extended."""
    held = {id(config): config for m in model.modules() if type(config := m.__dict__.get("config")) is type(original)}
    names = [name for name in plan.updates if name != "ctxext"]
    pairs = []
    for config in held.values():
        if config is not original and all(getattr(config, n, None) == getattr(original, n, None) for n in names):
            extended = copy.deepcopy(config)
            plan.apply_to(extended)
            pairs.append(SwappedConfig(config, extended))
    return pairs


def _run_proof(model: PreTrainedModel, part: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return part(*arguments)
    except Exception as error:  # the model's own code raises many kinds
        raise RuntimeError(
            f"{type(model).__name__} could not run the forward pass that proves the patch ({type(error).__name__}: "
            f"{error}). The model was left as it was."
        ) from error


def _put(model: PreTrainedModel, sites: list[rotary.RotarySite], built: list[nn.Module], extension: Extension) -> None:
    for site, new in zip(sites, built):
        old = rotary.put(model, site.paths, new)
        extension.sites += (SwappedSite(paths=site.paths, original=old),)


def _scale_softmax(model: PreTrainedModel, extension: Extension) -> None:
    """Give latent attention the scale that a model built from the extended config has.

    Raises:
        RuntimeError: that is not what the method says.
    """
    plan, (before, after) = extension.plan, _text_configs(extension)
    wanted = (plan.softmax_factor / plan.facts.softmax_factor) ** 2
    scales = rotary.softmax_scales(model, before, after)
    for path, scale in scales.items():
        if not math.isclose(scale / model.get_submodule(path).scaling, wanted, rel_tol=1e-6):
            raise RuntimeError(
                f"{path!r} built anew has a softmax scale of {scale:.6g}, and not {wanted:.6g} times what it was. This "
                "family reads its config in its own way. The model was left as it was."
            )
        Surgery(model, extension.undos).set_attribute(path, "scaling", scale)
    if not scales:
        raise RuntimeError(
            f"found no attention in {type(model).__name__} whose softmax scale could be set. The model was left as it "
            "was."
        )


def _text_configs(extension: Extension) -> tuple[Any, Any]:
    return extension.configs[-1].original, extension.configs[-1].extended


def _grow_sin_cos_tables(model: PreTrainedModel, extension: Extension) -> None:
    """Give each attention layer of GPT-J and kin a longer table of sines and cosines, scaled.

    Raises:
        ValueError: a present table is not the formula's.
    """
    plan = extension.plan
    paths = rotary.find_sin_cos_tables(model)
    if not paths:
        raise ValueError(f"found no table of sines and cosines in {type(model).__name__}. It was left as it was.")
    worst = 0.0
    for path in paths:
        old = model.get_submodule(path)._buffers[rotary.SIN_COS]
        assert old is not None
        if old.device.type == "meta":
            raise ValueError(
                f"{type(model).__name__} has no weights yet, so that its tables cannot be compared with the formula. "
                "Load them first. The model was left as it was."
            )
        stock = rotary.sin_cos_table(len(old), plan.facts.rope).to(old.dtype)
        error = (
            float((old.detach().cpu().float() - stock.float()).abs().max()) if old.shape == stock.shape else math.inf
        )
        if error > (1e-3 if old.dtype == torch.float32 else 2e-2):
            raise ValueError(
                f"the table of {path!r} differs from RoPE of base 10000 by {error:.1e}: it was changed by hand. Load "
                "the model afresh."
            )
        # In float32 whatever the model was cast to, as a stock model loaded in that type has it.
        new = rotary.sin_cos_table(plan.target_length, plan.extended)
        surgery = Surgery(model, extension.undos)
        surgery.set_tensor(path, rotary.SIN_COS, new)
        surgery.set_attribute(path, "max_positions", plan.target_length)
        worst = max(worst, error)
    extension.proof = Proof(worst, worst, None)


def _config_copies(model: PreTrainedModel) -> tuple[SwappedConfig, ...]:
    """The model's config, those in it on the way to its text config and, last, that, each with a copy to be extended.

    Two models may share one config object, so it is never edited in place.
    """
    way = (model.config, *(inner for _, inner in path_to_text(model.config)))
    *outer, text_config = way
    # Modules hold the parts that are none of the text model's.
    parts = {id(part): part for name in text_config.sub_configs if (part := getattr(text_config, name, None))}
    pairs = [SwappedConfig(text_config, copy.deepcopy(text_config, parts))]
    for config in reversed(outer):
        held, extended = pairs[0].original, copy.copy(config)
        extended.__dict__.update({k: pairs[0].extended for k, v in config.__dict__.items() if v is held})
        pairs.insert(0, SwappedConfig(config, extended))
    return tuple(pairs)


def _swap_configs(model: PreTrainedModel, new: dict[int, Any]) -> None:
    """Every module of the model that holds a config in `new` (by identity) now holds the other one."""
    for module in model.modules():
        module.__dict__.update({k: new[id(v)] for k, v in module.__dict__.items() if id(v) in new})


def _sites(model: PreTrainedModel, plan: RopePlan) -> list[rotary.RotarySite]:
    text_config = plan.facts.text_config
    name = f"{type(model).__name__} (model_type {text_config.model_type!r})"
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


def _check_present_table(site: rotary.RotarySite, plan: RopePlan) -> None:
    """The model must do what its config says before it is changed; float16 and bfloat16 casts are allowed."""
    tables = {table.label: table for table in plan.facts.tables}
    if set(site.labels) != tables.keys():
        raise ValueError(
            f"{site.paths[0]!r} has tables for {', '.join(site.labels)}, but the config for {', '.join(tables)}. This "
            "family keeps them in its own way and is not supported."
        )
    for label, facts in tables.items():
        table = site.table(label)
        if len(table) != facts.rotary_dim // 2 + facts.n_zero:
            raise ValueError(
                f"{site.paths[0]!r} rotates {2 * len(table)} dimensions, but the config says {facts.rotary_dim}. "
                "This family computes them in its own way and is not supported."
            )
        scaling = facts.scaling
        if table.device.type == "meta" or (scaling is not None and scaling.is_late):
            continue  # Those two change the table as they run.
        in_use = plan.facts.rope_of(facts).inv_freq
        expected = site.laid_out(label, in_use, in_use).float().to(table.dtype).double()
        exact = table.dtype == torch.float32
        # Float32 keeps a frequency of 1e-38 as that, and some families one of exactly zero.
        if not torch.allclose(
            table.cpu().double(), expected, rtol=1e-5 if exact else 1e-2, atol=1e-30 if exact else 1e-7
        ):
            raise ValueError(
                f"the frequencies of {site.paths[0]!r} differ from what its config says (by up to "
                f"{rotary.relative_error(table, expected):.1e}, relative): they were changed by hand, or this family "
                "computes them in its own way. Load the model afresh, or see ctxext.describe_context."
            )


def _build(sites: list[rotary.RotarySite], config: Any, plan: RopePlan) -> tuple[list[nn.Module], Proof]:
    """The replacements on the CPU, made from the extended `config` and compared with the method's own formula."""
    built, frequency_error, output_error = [], 0.0, None
    for site in sites:
        new = site.build(config, plan.summary)
        for facts in plan.facts.tables:
            label, rope = facts.label, plan.tables[facts.label]
            inv_freq = site.laid_out(label, rope.inv_freq, plan.facts.rope_of(facts).inv_freq)
            if plan.live_only is not None:
                rotary.write_table(new, label, inv_freq, rope.attention_factor)
            got = getattr(new, rotary.of_label(label, "inv_freq"))
            frequency_error = max(frequency_error, rotary.relative_error(got, inv_freq))
            if torch.equal(inv_freq[: len(rope.inv_freq)], rope.inv_freq):  # in no order of the family's own
                error = rotary.output_error(new, label, inv_freq, rope.attention_factor)
                output_error = error if output_error is None else max(output_error, error or 0.0)
        built.append(new)
    if frequency_error > Proof.FREQUENCY_BAR or (output_error or 0.0) > Proof.OUTPUT_BAR:
        raise RuntimeError(
            f"{type(sites[0].module).__name__} does not do what {plan.summary!r} says: frequencies differ by "
            f"{frequency_error:.1e}, its output by {output_error if output_error is not None else 0.0:.1e}. This "
            "family reads its config in its own way. The model was left as it was."
        )
    return built, Proof(frequency_error, output_error, None)


# ------------------------------------------------------------------------------------ late rotation


def _rotate_late(model: PreTrainedModel, sites: list[rotary.RotarySite], extension: Extension) -> None:
    """Put late rotation in the place of a rotary embedding, and prove it.

    Raises:
        ValueError: the model cannot be rotated late: the reason is given.
        RuntimeError: it can, but its output is not the stock model's as long as nothing is scaled.
    """
    from ctxext.attention import call, proof

    plan, config = extension.plan, extension.configs[-1].extended
    assert isinstance(plan, RopePlan)
    name, left = f"{type(model).__name__} (model_type {config.model_type!r})", "The model was left as it was."
    if rotary.on_meta(model):
        raise ValueError(
            f"{name} has no weights yet, so that late rotation cannot be compared with it. Load them first. {left}"
        )
    implementation = _refuse_to_rotate_late(model, sites, config, name, left)
    (site,) = sites
    parent, _, leaf = site.paths[0].rpartition(".")
    base = model.get_submodule(parent)
    new = site.build(config, plan.summary, LateRotary)
    assert isinstance(new, LateRotary)
    new.attention_scaling = 1.0
    new.attend = call.own_attention(model, implementation)
    new.additive_masks = implementation == "eager"
    new.rotated_copy = plan.rotated_copy
    trained = plan.rope.original_max_position_embeddings
    new.owner = f"{plan.method!r}, trained at {trained} tokens"
    facts = plan.facts
    limit = facts.text_config.max_position_embeddings
    in_use = geometry_in_use(facts.rope_parameters, facts.rotary_dim, limit, within=True)
    # Until they are compared, phases are those of the stock model: of its table as it is, and in float32. At 8,192
    # tokens and more the last bit of a frequency is more than the bar, and a table may have been cast further.
    own = site.table("").double().cpu()
    same = own.shape == in_use.inv_freq.shape and torch.allclose(own, in_use.inv_freq, rtol=1e-2, atol=0.0)
    new.in_use, new.phases = replace(in_use, inv_freq=own) if same else in_use, torch.float32
    new.set_method(None, plan.rope)
    new.layers = {}
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    inputs = proof.probe(config.vocab_size, trained, device)

    def run(whole: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return whole(base, *arguments)
        except Exception as error:  # the model's own code raises many kinds
            raise ValueError(
                f"{name} does more in its attention than is known here: it cannot be run under late rotation "
                f"({type(error).__name__}: {error}). Use a method that changes frequencies, such as 'yarn'. {left}"
            ) from error

    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.compiler.set_stance("force_eager"),
        in_eval_mode(model),
        torch.no_grad(),
    ):
        stock = run(proof.output, inputs)
        half = model.dtype in (torch.float16, torch.bfloat16)
        bar = proof.OUTPUT_BAR
        if half:
            # In 16 bits the stock model is a tenth and more off itself as soon as sums are taken in another order.
            bar = max(proof.HALF_OUTPUT_BAR, 4 * proof.difference(run(proof.cached_output, inputs), stock))
        config._attn_implementation_internal = call.IMPLEMENTATIONS[implementation]
        _swap_configs(model, {id(pair.original): pair.extended for pair in extension.configs})
        rotated = run(proof.look, inputs, proof.Looker(new))
        _put(model, sites, [new], extension)
        unrotated = run(proof.look, inputs, proof.Looker(new, instead=rotated))
        try:
            found, rotation_error = proof.conventions(rotated, unrotated, new, inputs["position_ids"])
        except ValueError as error:
            raise ValueError(f"{name}: {error} {left}") from None
        for index, convention in found.items():
            window = slides_over(config, index)
            new.layers[index] = Layer(convention, within=window is not None and window <= trained)
        if all(layer.within or layer.convention.pairs == "none" for layer in new.layers.values()):
            raise ValueError(f"{name} has no layer with RoPE that sees beyond its trained length. {left}")
        base.register_forward_pre_hook(
            call.BeforeForward(leaf, call.parameter_names(base), int(config.num_hidden_layers)), with_kwargs=True
        )
        outputs = run(proof.output, inputs), run(proof.cached_output, inputs)
        output_error = max(proof.difference(late, stock) for late in outputs)
        if not output_error <= bar:
            rounding = " (or rounds more than most: load it in float32 to tell)" if half else ""
            raise RuntimeError(
                f"{name}, rotated late with its own frequencies, gives an output {output_error:.1e} off its own, "
                f"relative; up to {bar:.0e} can be rounding. Its attention does more than is known here{rounding}. "
                f"{left}"
            )
        far = proof.probe(config.vocab_size, plan.target_length, device)
        before = run(proof.output, far)
        new.in_use, new.phases = in_use, torch.promote_types(torch.float32, model.dtype)
        new.set_method(plan.method, plan.rope)
        effect = proof.difference(run(proof.output, far), before)
    new.train(site.module.training)
    # Another order of sums alone makes some difference (1.3e-6 on a CPU without AVX, where one token of scaling makes
    # 1e-4); in 16 bits more than a small factor does.
    if effect <= (0.0 if half else max(1e-5, 3 * output_error)):
        raise RuntimeError(f"{plan.summary} changes nothing in {name} beyond its trained length. {left}")
    extension.proof = LateProof(rotation_error, output_error, effect)


def _refuse_to_rotate_late(
    model: PreTrainedModel, sites: list[rotary.RotarySite], config: Any, name: str, left: str
) -> str:
    """What can be said before anything is run; the attention implementation that is in use.

    Raises:
        ValueError: the model cannot be rotated late: the reason is given.
    """
    from ctxext.attention import call

    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()} - {"cpu", "disk"}
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over {', '.join(sorted(devices))}; late rotation runs on one device. Load it on one, or "
            f"use a method that changes frequencies, such as 'yarn'. {left}"
        )
    if len(sites) != 1:
        raise ValueError(f"{name} has {len(sites)} rotary embeddings; late rotation needs exactly one. {left}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{name} has attention code of its own that does not go through transformers' attention interface, so "
            f"nothing can be rotated late in it. Use a method that changes frequencies, such as 'yarn'. {left}"
        )
    implementation = str(config._attn_implementation)
    if implementation not in call.IMPLEMENTATIONS:
        raise ValueError(
            f"{name} attends by {implementation!r}, but late rotation runs over {' or '.join(call.IMPLEMENTATIONS)}. "
            f"Call model.set_attn_implementation('sdpa') first. {left}"
        )
    return implementation


def check_on_paper(config: Any, plan: Plan, model: PreTrainedModel | None = None) -> None:
    """See that a model of `config` could be rotated late, if `plan` asks for it; no weights are needed.

    Args:
        model: the live one, where there is one.

    Raises:
        ValueError: it could not.
    """
    if not (isinstance(plan, RopePlan) and plan.is_late):
        return
    if model is None:
        model = model_on_meta(config)
    name = f"{type(model).__name__} (model_type {plan.facts.text_config.model_type!r})"
    _refuse_to_rotate_late(model, _sites(model, plan), text_config_of(model.config), name, "")


# ------------------------------------------------------------------------------------------- proof


def prove_consumed(model: PreTrainedModel) -> None:
    """Run a forward pass of two tokens and see that the replaced modules' output is read."""
    extension: Extension = model.__dict__[ATTRIBUTE]
    modules = [model.get_submodule(site.paths[0]) for site in extension.sites]
    tables = [model.get_submodule(each.path)._buffers[each.name] for each in extension.undos if each.kind == "buffer"]
    try:
        if modules:
            replaced = [site.original for site in extension.sites]
            consumed = all(isinstance(m, rotary.ExtendedRotary) for m in modules)
            consumed = consumed and rotary.is_consumed(model, modules, replaced)
        else:
            consumed = rotary.are_read(model, tables)
    except Exception as error:  # the model's own code raises many kinds
        raise RuntimeError(
            f"{type(model).__name__} could not run the forward pass of two tokens that proves the patch "
            f"({type(error).__name__}: {error}). The model was left as it was. Extend it before it is sharded or "
            "wrapped, on one device."
        ) from error
    assert isinstance(extension.proof, Proof)
    extension.proof = replace(extension.proof, consumed=consumed)
    if not consumed:
        what = f"the output of {extension.sites[0].paths[0]!r}" if modules else "its tables of sines and cosines"
        raise RuntimeError(
            f"nothing in {type(model).__name__} reads {what}, so replacing it "
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
    from ctxext.attention.call import BeforeForward

    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _prove_at_first_forward or isinstance(hook, BeforeForward):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def restore(model: PreTrainedModel, extension: Extension) -> None:
    """Undo everything that `apply` did, newest first.

    Raises:
        RuntimeError: a tensor is not there any more, as an adapter took its place; nothing was undone then.
    """
    for each in extension.undos:
        if each.kind in ("parameter", "buffer") and not each.is_there(model):
            raise RuntimeError(
                f"{each.path}.{each.name} is not where the extension put it: an adapter has taken its place. Merge or "
                "unload that first. The model was left as it is."
            )
    for name in (ATTRIBUTE, "save_pretrained"):
        model.__dict__.pop(name, None)
    _remove_hook(model)
    extended = {id(pair.extended) for pair in extension.configs}
    for pair in extension.configs:
        for name, value in pair.extended.__dict__.items():
            # What was edited in the meantime, such as use_cache, stays edited.
            ours = name in extension.plan.updates or id(value) in extended or _is_late_attention(name, value)
            if not ours:
                pair.original.__dict__[name] = value
    _swap_configs(model, {id(pair.extended): pair.original for pair in extension.configs})
    for site in reversed(extension.sites):
        rotary.put(model, site.paths, site.original)
    undo(model, extension.undos)
    extension.undos.clear()


def _is_late_attention(name: str, value: Any) -> bool:
    return name == "_attn_implementation_internal" and isinstance(value, str) and value.startswith("late_")


# ----------------------------------------------------------------------------------------- saving


def version_4_keys(text_config: Any, rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor` and `rope_scaling` as transformers 4 and older engines read them.

    Without them transformers 4.57 loads a version 5 config as plain RoPE of theta 10000, silently. Where each type of
    layer has its own parameters, version 4 has no common words for them.
    """
    if "rope_type" not in rope_parameters:
        return {}
    keys = {name: rope_parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope_parameters}
    for name, older in family_of(text_config).version_4_names.items():
        keys[older] = rope_parameters[name]
    scaled_by_default = (type(text_config)().rope_parameters or {}).get("rope_type", "default") != "default"
    more = rope_parameters.keys() - {"rope_type", *keys}  # mrope_section, say
    if rope_parameters["rope_type"] != "default" or scaled_by_default or more:
        # Version 5 reads `rope_scaling` in the place of `rope_parameters`, so it must say all that those do.
        keys["rope_scaling"] = copy.deepcopy(rope_parameters)
    return keys


def save_portable(model: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.save_pretrained`, with a config.json that transformers 5 and 4 both read.

    The keys of version 4 stand in the config only while it is written: kept there, they would go
    stale and win over later edits of `rope_parameters`.
    """
    if "length" in kwargs:
        raise ValueError(
            f"length={kwargs['length']} freezes a dynamic method as it is saved, and this model is static already. "
            "Leave it out."
        )
    text_config = text_config_of(model.config)
    rope_parameters = getattr(text_config, "rope_parameters", None)
    keys = version_4_keys(text_config, rope_parameters) if rope_parameters else {}
    before = {name: value for name, value in text_config.__dict__.items() if name in keys}
    text_config.__dict__.update(keys)
    try:
        saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    finally:
        for name in keys:
            del text_config.__dict__[name]
        text_config.__dict__.update(before)
    if kwargs.get("is_main_process", True):
        _follow_up(model, Path(save_directory))
    return saved


def _follow_up(model: PreTrainedModel, folder: Path) -> None:
    """Remove what belongs to a model that was saved in `folder` before; an adapter alone carries its extension."""
    for name in (RECORD, PROBE):
        (folder / name).unlink(missing_ok=True)
    if _saves_adapter(model):
        carry_extension(model, [folder])


def _saves_adapter(model: PreTrainedModel) -> bool:
    """Whether transformers' own `save_pretrained` writes no model but its adapter (`model.add_adapter`)."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def save_with_record(
    model: PreTrainedModel, save_directory: Any, *args: Any, length: int | None = None, **kwargs: Any
) -> Any:
    """`model.save_pretrained` for a model whose extension no config can say.

    The config is written as it was before the extension, so that plain transformers loads the unextended model; an
    entry in it names the extension, and `context_extension.json` beside it is what `ctxext.load` extends by.

    Args:
        length: writes a plain checkpoint instead, frozen at the scale of this many tokens; dynamic methods only.

    Raises:
        ValueError: `length` with a method that has no static form.
    """
    extension: Extension = model.__dict__[ATTRIBUTE]
    folder, main = Path(save_directory), kwargs.get("is_main_process", True)
    push = kwargs.pop("push_to_hub", False)
    if push and length is None and main:
        # transformers would upload before the record is written; its other way of pushing saves by this function.
        names = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
        hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        repo_id = kwargs.pop("repo_id", Path(save_directory).name)
        save_with_record(model, save_directory, *args, **kwargs)
        return model.push_to_hub(repo_id, **hub, **{k: v for k, v in kwargs.items() if k == "max_shard_size"})
    if length is not None:
        return _save_frozen(model, extension, length, save_directory, *args, push_to_hub=push, **kwargs)
    text_config, original = extension.configs[-1].extended, extension.configs[-1].original
    extended = {name: text_config.__dict__.pop(name) for name in extension.plan.updates}
    text_config.__dict__.update({name: original.__dict__[name] for name in extended if name in original.__dict__})
    model.config.__dict__[BESIDE] = extension.plan.summary
    try:
        saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    finally:
        for name in extended:
            text_config.__dict__.pop(name, None)
        text_config.__dict__.update(extended)
        del model.config.__dict__[BESIDE]
    if not main:
        return saved
    _follow_up(model, folder)
    if _saves_adapter(model):
        return saved
    write_record(folder, extension.plan, weights=weights_fingerprint(folder))
    warnings.warn(
        f"{extension.plan.summary} is what no config can say, as {extension.plan.why_not_portable}: the config was "
        f"saved unextended, and the extension in {RECORD}. ctxext.load({str(save_directory)!r}) brings it back; plain "
        "transformers and other engines load the unextended model.",
        stacklevel=2,
    )
    return saved


def _save_frozen(
    model: PreTrainedModel, extension: Extension, length: int, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    plan = extension.plan
    frozen = plan_extension(
        extension.configs[0].original,
        method=plan.method,
        original_max_position_embeddings=plan.original_length,
        existing=plan.existing,
        length=length,
    )
    restore(model, extension)
    try:
        frozen_extension = apply(model, frozen)
        try:
            return save_portable(model, save_directory, *args, **kwargs)
        finally:
            restore(model, frozen_extension)
    finally:
        apply(model, plan)
