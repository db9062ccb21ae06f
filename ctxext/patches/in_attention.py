"""In-attention RoPE: the rotary embedding returns the identity rotation, and attention rotates queries and keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.attention import call, proof
from ctxext.attention.rotary import InAttentionRotary, Layer
from ctxext.core.consumed import modules_that_read, readers
from ctxext.core.edit import Edit
from ctxext.core.patch import Patch, Proof
from ctxext.core.rotary_module import of_label
from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeMethod, geometry_in_use
from ctxext.methods.change import neutral, score_change
from ctxext.models.context import ContextFacts
from ctxext.models.families import family_of
from ctxext.models.rope_tables import label_of_layer, slides_over
from ctxext.models.text_config import text_config_of
from ctxext.patches.rotary import RotarySite, standard_sites


@dataclass(frozen=True)
class InAttentionProof(Proof):
    """The proof of in-attention RoPE.

    Attributes:
        rotation_error: largest difference between the stock model's rotated queries and keys and those rotated in
            attention, over all layers, relative to the largest value.
        output_error: relative RMS difference to the stock model's last hidden states with the original frequencies, at
            random positions within the trained length, with and without a cache.
        effect: the same difference caused by the method, at random positions up to the target. The other side is its
            `neutral` twin, which runs the same code: a method without effect gives exactly 0 in every dtype.
        score_change: what the formula says of the method's effect (`ctxext.methods.change`).
        output_bar: the largest accepted `output_error`.
        effect_bar: the smallest accepted `effect`.
        score_bar: the smallest accepted `score_change`; the dtype's rounding.
    """

    rotation_error: float
    output_error: float
    effect: float
    score_change: float
    output_bar: float
    effect_bar: float
    score_bar: float

    def __str__(self) -> str:
        return (
            f"with the frequencies of the config, queries, keys (error {self.rotation_error:.1e}) and output (error "
            f"{self.output_error:.1e}) match the stock model's; up to the target the method changes the output (by "
            f"{self.effect:.1e})"
        )

    def fault(self, name: str, summary: str) -> str | None:
        if not self.output_error <= self.output_bar:
            return (
                f"with in-attention RoPE and its own frequencies, the output of {name} has a relative error of "
                f"{self.output_error:.1e} (rounding explains {self.output_bar:.0e}). Its attention is not supported, "
                "or the model is in 16 bits, where rounding may be larger: load it in float32."
            )
        if not self.score_change > self.score_bar:
            return (
                f"{summary} changes attention scores by {self.score_change:.1e} at most, which the rounding of this "
                f"model's dtype ({self.score_bar:.1e}) hides. Load it in float32, or pass a larger factor or other "
                "options."
            )
        if not self.effect > self.effect_bar:
            return f"{summary} does not change the output of {name} beyond its trained length."
        return None


@dataclass
class Seen:
    """The stock model's behaviour before the patch.

    Attributes:
        sites: the rotary embeddings in use, which are alike.
        inputs: tokens at random positions within the trained length.
        stock: the stock model's output for them.
        reading: the modules with operations on cos and sin, by path.
        output_bar: the largest accepted difference from it.
        rotation_error: as in the proof; set while the patch is written.
    """

    sites: list[RotarySite]
    inputs: dict[str, Tensor]
    stock: Tensor
    reading: dict[str, nn.Module]
    output_bar: float
    rotation_error: float = float("nan")


@dataclass(frozen=True)
class RotateInAttention(Patch):
    """The patch that moves rotation into attention.

    Attributes:
        facts: the config's context.
        ropes: by layer type, the RoPE that the method starts from, of the layers that see beyond the trained length.
        summary: of the plan.
    """

    facts: ContextFacts
    method: RopeMethod
    ropes: dict[str, RopeGeometry]
    target_length: int
    summary: str

    # A different summation order alone makes a difference (1.3e-6 on a CPU without AVX; scaling one token: 1e-4).
    EFFECT_BAR: ClassVar[float] = 1e-5

    def check(self, model: nn.Module) -> None:
        name = self._name(model)
        # Not `model`: the class of a vision part beside the text model may have attention of its own.
        base: Any = model.get_submodule(_base_of(model, standard_sites(model, self.facts)[0])[0])
        if not base._can_set_attn_implementation() and not call.own_methods(base):
            raise ValueError(
                f"{name} has custom attention code that does not use transformers' attention interface, which "
                "in-attention RoPE needs. Use a method that changes frequencies, such as 'yarn'."
            )
        implementation = self._implementation(model)
        if implementation in call.IMPLEMENTATIONS.values():
            raise ValueError(
                f"the config of {name} is an extended model's, which that model may still use: its attention is "
                f"{implementation!r}. Build this model from a config that was loaded again "
                "(AutoConfig.from_pretrained)."
            )
        if implementation not in call.IMPLEMENTATIONS:
            raise ValueError(
                f"{name} uses {implementation!r} attention, but in-attention RoPE supports only "
                f"{', '.join(call.IMPLEMENTATIONS)}. Call model.set_attn_implementation('sdpa') first: on a GPU, it "
                "runs flash kernels, too."
            )

    def observe(self, model: Any) -> Seen:
        sites, reading = self._used(model)
        with _as_built(sites):
            fault = readers(model, [site.module for site in sites]).fault(self._name(model))
        if fault is not None:  # otherwise such a layer would pass for one without positions
            raise ValueError(fault)
        inside = {part for module in reading.values() for part in [*module.modules()][1:]}
        self._refuse_readers(model, {path: module for path, module in reading.items() if module in inside})
        inputs = self._probe(model, self._trained)
        base = model.get_submodule(_base_of(model, sites[0])[0])
        with _as_built(sites):
            stock, bar = self._run(model, proof.output, base, inputs), proof.OUTPUT_BAR
            if _is_half(model):
                # In 16 bits, a different summation order alone moves the stock model's output by 10% and more.
                again = self._run(model, proof.cached_output, base, inputs)
                bar = max(proof.HALF_OUTPUT_BAR, 4 * proof.difference(again, stock))
        return Seen(sites, inputs, stock, reading, bar)

    def write(self, edit: Edit, before: Seen) -> None:
        model: Any = edit.model
        config, implementation = text_config_of(model.config), self._implementation(model)
        site, parent, leaf = before.sites[0], *_base_of(model, before.sites[0])
        base = model.get_submodule(parent)
        # Each on the device of the one that it replaces; the first holds the tables of all.
        built = [self._identity(each, config) for each in before.sites]
        new = built[0]
        new.attend = call.own_attention(base, implementation)
        new.implementation = implementation
        starts = [(label, rope.inv_freq.tolist(), rope.attention_factor) for label, rope in sorted(self.ropes.items())]
        digest = hashlib.sha256(repr((self.method, self._trained, starts)).encode()).hexdigest()[:8]
        new.gives_keys_on = bool(getattr(config, "num_kv_shared_layers", 0))
        new.owner = f"{self.summary} (fingerprint {digest})"
        # For the comparison, phases are the stock model's: from its own table, in float32. From 8,192 tokens on, the
        # last bit of a frequency exceeds the bar, and the table may have been cast.
        new.in_use, new.pairs = self._in_use, {}
        with site.as_built():
            for label, in_use in new.in_use.items():
                own, n_turning = site.table(label).double().cpu(), len(in_use.inv_freq)
                new.pairs[label] = len(own)
                if torch.allclose(own[:n_turning], in_use.inv_freq, rtol=1e-2, atol=0.0):
                    new.in_use[label] = replace(in_use, inv_freq=own[:n_turning])
        new.set_method(None, self.ropes)
        new.layers = {}

        edit.set_config_field(config, "_attn_implementation_internal", call.IMPLEMENTATIONS[implementation])
        for path in call.own_methods(base):
            edit.exchange_class(f"{parent}.{path}" if parent else path, call.OwnMethod)
        looker = proof.Looker(new)
        with _as_built(before.sites):
            rotated = self._run(model, proof.look, base, before.inputs, looker)
        attending = {*looker.modules}
        if looker.repeated is not None:
            raise ValueError(
                f"{self._name(model)} runs layer {looker.repeated} several times in a forward pass, but in-attention "
                "RoPE needs every layer to run once. Use a method that changes frequencies, such as 'yarn'."
            )
        others = {path: one for path, one in before.reading.items() if attending.isdisjoint(one.modules())}
        self._refuse_readers(model, others)
        for each, its in zip(before.sites, built):
            edit.replace_module(each.paths, cast(nn.Module, its))
        unrotated = self._run(model, proof.look, base, before.inputs, proof.Looker(new, instead=rotated))
        try:
            at, by_config = before.inputs["position_ids"], partial(label_of_layer, config)
            proof.check_own_methods(looker)
            found, before.rotation_error = proof.conventions(rotated, unrotated, new, at, by_config)
        except ValueError as error:
            raise ValueError(f"{self._name(model)}: {error}") from None
        for index, (label, convention) in found.items():
            window = slides_over(config, index)
            within = label not in self.ropes or (window is not None and window <= self._trained)
            new.layers[index] = Layer(label, convention, within)
        if all(layer.within or layer.convention.pairs == "none" for layer in new.layers.values()):
            raise ValueError(f"{self._name(model)} has no RoPE layer that attends beyond the trained length.")
        hook = call.BeforeForward(base, leaf, int(config.num_hidden_layers), looker.dropped)
        edit.add_forward_pre_hook(parent, hook, with_kwargs=True)
        edit.add_forward_hook(parent, call.Finish(), with_kwargs=True, always_call=True)
        if looker.dropped:
            edit.add_forward_hook(parent, call.AfterForward(leaf), always_call=True)

    def prove(self, model: Any, before: Seen) -> InAttentionProof:
        parent, leaf = _base_of(model, before.sites[0])
        base = model.get_submodule(parent)
        new: Any = base.get_submodule(leaf)
        outputs = [self._run(model, run, base, before.inputs) for run in (proof.output, proof.cached_output)]
        output_error = max(proof.difference(output, before.stock) for output in outputs)
        far = self._probe(model, self.target_length)
        new.in_use, new.phases = self._in_use, torch.promote_types(torch.float32, model.dtype)
        new.set_method(neutral(self.method), self.ropes)
        unscaled = self._run(model, proof.output, base, far)
        new.set_method(self.method, self.ropes)
        effect = proof.difference(self._run(model, proof.output, base, far), unscaled)
        half = _is_half(model)
        return InAttentionProof(
            rotation_error=before.rotation_error,
            output_error=output_error,
            effect=effect,
            score_change=score_change(self.method, self.rope, self.target_length),
            output_bar=before.output_bar,
            # In 16 bits a small factor has less effect than another summation order: that of the neutral twin is the
            # same, and what rounding hides is judged by the formula.
            effect_bar=0.0 if half else max(self.EFFECT_BAR, 3 * output_error),
            score_bar=torch.finfo(model.dtype).eps if half else 0.0,
        )

    def _used(self, model: nn.Module) -> tuple[list[RotarySite], dict[str, nn.Module]]:
        """The rotary embeddings that are used, and what reads them; some families hold others that nothing uses.

        Several are alike, as each has the tables of the config.
        """
        sites = standard_sites(model, self.facts)
        with _as_built(sites):
            found = modules_that_read(model, [site.module for site in sites])
        used = [site for site in sites if site.module in found]
        if len({_base_of(model, site)[0] for site in used}) != 1:
            raise ValueError(
                f"{self._name(model)} has {len(sites)} rotary embeddings, of which {len(used)} are used, but "
                "in-attention RoPE needs those in use to be in one text model. Use a method that changes frequencies, "
                "such as 'yarn'."
            )
        return used, {path: module for site in used for path, module in found[site.module].items()}

    def _identity(self, site: RotarySite, config: Any) -> InAttentionRotary:
        """The replacement of a rotary embedding, which returns the identity rotation."""
        new = site.build(config, self.summary, InAttentionRotary)
        assert isinstance(new, InAttentionRotary)
        for label in site.labels:
            setattr(new, of_label(label, "attention_scaling"), 1.0)
        new.phases = torch.float32
        return new

    def _refuse_readers(self, model: nn.Module, others: dict[str, nn.Module]) -> None:
        """Raise ValueError if there are `others`: indexers, which choose the keys that attention sees."""
        if others:
            path, module = next(iter(others.items()))
            raise ValueError(
                f"{self._name(model)} also rotates in {path} ({type(module).__name__}), outside of the attention that "
                "in-attention RoPE reaches. Use a method that changes frequencies, such as 'yarn'."
            )

    @property
    def rope(self) -> RopeGeometry:
        """Of the layers with the largest window."""
        return next(iter(self.ropes.values()))

    @property
    def _trained(self) -> int:
        return self.rope.original_max_position_embeddings

    @property
    def _in_use(self) -> dict[str, RopeGeometry]:
        found = {}
        for table in self.facts.tables:
            rope = geometry_in_use(table.of_turning_pairs, table.rotary_dim, table.limit, within=True)
            for key in family_of(self.facts.text_config).mscale_keys[:1]:  # of short calls
                rope = replace(rope, attention_factor=table.parameters.get(key, rope.attention_factor))
            found[table.label] = rope
        return found

    def _name(self, model: nn.Module) -> str:
        return f"{type(model).__name__} (model_type {self.facts.text_config.model_type!r})"

    def _implementation(self, model: Any) -> str:
        return str(text_config_of(model.config)._attn_implementation)

    def _probe(self, model: nn.Module, length: int) -> dict[str, Tensor]:
        device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        return proof.probe(self.facts.text_config.vocab_size, length, device)

    def _run(self, model: nn.Module, whole: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return whole(*arguments)
        except Exception as error:  # model code raises many exception types
            raise ValueError(
                f"{self._name(model)} has attention that is not supported: it cannot run with "
                f"in-attention RoPE ({type(error).__name__}: {error}). Use a method that changes frequencies, such as "
                "'yarn'."
            ) from error


@contextmanager
def _as_built(sites: list[RotarySite]) -> Iterator[None]:
    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(site.as_built())
        yield


def _is_half(model: Any) -> bool:
    return model.dtype in (torch.float16, torch.bfloat16)


def _base_of(model: nn.Module, site: RotarySite) -> tuple[str, str]:
    """The path of the model that runs a rotary embedding, and the embedding's path within it."""
    parent, _, leaf = site.paths[0].rpartition(".")
    while not isinstance(model.get_submodule(parent), PreTrainedModel):  # such as a list of rotary embeddings
        parent, _, name = parent.rpartition(".")
        leaf = f"{name}.{leaf}"
    return parent, leaf
