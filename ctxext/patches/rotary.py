"""The rotary embedding of a live model: find it, build its replacement, replace it, verify that it is used.

Families are found by structure: a module with `inv_freq`, `original_inv_freq` and `attention_scaling`, or these per
layer type (`full_attention_inv_freq`), is transformers' standard rotary embedding. Its replacement is built by its own
class from the extended config, so shapes and partial rotary are kept, and a plain reload of the saved config gives
bitwise the same module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ctxext.core.consumed import Readers, readers
from ctxext.core.edit import Edit, mixed_class
from ctxext.core.patch import Patch, Proof
from ctxext.core.probing import on_meta
from ctxext.core.rotary_module import ExtendedRotary, of_label, table_names
from ctxext.encodings.rope import RopeGeometry, cos_sin
from ctxext.models.context import ContextFacts
from ctxext.models.rope_tables import rope_tables
from ctxext.models.text_config import text_config_of

SIN_COS = "embed_positions"  # the buffer of GPT-J's attention


@dataclass
class RotarySite:
    """One rotary embedding of a live model, and all its paths."""

    paths: tuple[str, ...]
    module: nn.Module

    @property
    def labels(self) -> list[str]:
        """The layer types that it has a table for; "" for the only one."""
        return _labels(self.module)

    def table(self, label: str) -> Float[Tensor, " pair"]:
        """The frequencies of a layer type."""
        table: Tensor = getattr(self.module, of_label(label, "inv_freq"))
        return table

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """The module as before its first call, within a `with` block; its state is put back afterwards.

        For transformers' dynamic scaling, whose module keeps the frequencies of its longest call until it sees one
        shorter than the trained length.
        """
        held, buffers = {**self.module.__dict__}, {**self.module._buffers}
        for label in self.labels:
            built = getattr(self.module, of_label(label, "original_inv_freq"))
            if built.device.type != "meta":
                self.module._buffers[of_label(label, "inv_freq")] = built.clone()
            if hasattr(self.module, "original_max_seq_len"):
                setattr(self.module, of_label(label, "max_seq_len_cached"), self.module.original_max_seq_len)
        try:
            yield
        finally:
            for now, then in ((self.module.__dict__, held), (self.module._buffers, buffers)):
                for name in now.keys() - then.keys():
                    del now[name]
                now.update(then)

    def laid_out(
        self, label: str, inv_freq: Float64[Tensor, " turning"], in_use: Float64[Tensor, " turning"]
    ) -> Float64[Tensor, " pair"]:
        """`inv_freq` in the module's layout: zeros for the pairs that do not rotate, and its own order of pairs.

        `in_use` are the expected current frequencies. Some multimodal families group the pairs by section.
        """
        own = self.table(label)
        if own.dtype != torch.float32 or own.device.type == "meta":
            with torch.device("cpu"):
                own = getattr(type(self.module)(self.module.config), of_label(label, "inv_freq"))
        own, zeros = own.double().cpu(), in_use.new_zeros(max(len(own) - len(in_use), 0))
        inv_freq, in_use = torch.cat([inv_freq, zeros]), torch.cat([in_use, zeros])
        in_order = own.shape == in_use.shape and _agree(own.sort()[0], in_use.sort()[0])
        if in_order and not _agree(own, in_use):
            return inv_freq[in_use.argsort()[own.argsort().argsort()]]
        return inv_freq

    def build(self, config: Any, summary: str, mixin: type[ExtendedRotary] = ExtendedRotary) -> nn.Module:
        """Build the replacement on the CPU, by the module's own class from the extended `config`.

        Raises ValueError if the class rejects the config.
        """
        cls = mixed_class(mixin, type(self.module))  # type: ignore[arg-type]
        try:
            with torch.device("cpu"):
                new: Any = cls(config)
        except Exception as error:  # rotary embeddings raise many exception types
            whole = config.rope_parameters
            parameters = next((each for each in whole.values() if isinstance(each, dict)), whole)
            raise ValueError(
                f"{type(self.module).__name__} at {self.paths[0]!r} cannot be built with "
                f"rope_type {parameters.get('rope_type')!r} ({type(error).__name__}: {error}). This family is not "
                "supported with this method; try method='ntk', which only changes rope_theta."
            ) from error
        new.summary = summary
        new.exact = {name: getattr(new, name).detach().clone() for name in table_names(new)}
        return cast(nn.Module, new.train(self.module.training))


def _agree(table: Tensor, expected: Tensor) -> bool:
    return torch.allclose(table, expected, rtol=1e-5, atol=0.0)


def find_rotary_sites(model: nn.Module, text_config: Any) -> list[RotarySite]:
    """The standard rotary embeddings of the text model, each once, with all their paths."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _labels(module) and type(getattr(module, "config", None)) is type(text_config):
            paths.setdefault(module, []).append(path)
    return [RotarySite(tuple(its), module) for module, its in paths.items()]


def _labels(module: nn.Module) -> list[str]:
    labels = [name.removesuffix("original_inv_freq").rstrip("_") for name in module._buffers if "original_inv" in name]
    return [
        label
        for label in labels
        if of_label(label, "inv_freq") in module._buffers and hasattr(module, of_label(label, "attention_scaling"))
    ]


# In the path or class of rotary embeddings that are not for text; MusicFlamingo's is for audio time.
NOT_TEXT = ("visual", "vision", "audio", "protein", "MusicFlamingoRotary")


def other_rotary_tables(model: nn.Module, sites: list[RotarySite]) -> list[str]:
    """Paths of text modules with non-standard rotary tables."""
    known = {path for site in sites for path in site.paths}
    others = []
    for path, module in model.named_modules():
        names = [*module._buffers, *module.__dict__]
        tables = [n for n in names if n.endswith("inv_freq") or n in (SIN_COS, "freqs_cis")]
        name = f"{path} ({type(module).__name__}: {', '.join(tables)})"
        if tables and path not in known and not any(word in name for word in NOT_TEXT):
            others.append(name)
    return others


def standard_sites(model: nn.Module, facts: ContextFacts) -> list[RotarySite]:
    """The rotary embeddings of a model; they must be its only position encoding and match its config.

    Raises ValueError if there are none, there are other encodings too, or one was edited.
    """
    text_config = facts.text_config
    name = f"{type(model).__name__} (model_type {text_config.model_type!r})"
    sites = find_rotary_sites(model, text_config)
    others = other_rotary_tables(model, sites)
    if not sites:
        seen = f" It has other rotary tables: {'; '.join(others[:3])}." if others else ""
        raise ValueError(
            f"found no standard rotary embedding in {name}: no module holds inv_freq, original_inv_freq and "
            f"attention_scaling.{seen}"
        )
    if others:
        raise ValueError(f"{name} has non-standard rotary tables, which would not be patched: {'; '.join(others[:3])}.")
    for site in sites:
        _check_present_table(site, facts)
    return sites


def _check_present_table(site: RotarySite, facts: ContextFacts) -> None:
    """Check that the model matches its config before it is changed; float16 and bfloat16 casts are allowed."""
    tables = {table.label: table for table in facts.tables}
    if set(site.labels) != tables.keys():
        raise ValueError(
            f"{site.paths[0]!r} has tables for {', '.join(site.labels)}, but the config for {', '.join(tables)}. This "
            "family stores them in a non-standard way and is not supported."
        )
    for label, described in tables.items():
        table = site.table(label)
        if len(table) != described.rotary_dim // 2 + described.n_zero:
            raise ValueError(
                f"{site.paths[0]!r} rotates {2 * len(table)} dimensions, but the config says {described.rotary_dim}. "
                "This family computes them in a non-standard way and is not supported."
            )
        if table.device.type == "meta" or (described.scaling is not None and described.scaling.in_attention):
            continue  # A dynamic scaling changes the table at run time.
        in_use = facts.rope_of(described).inv_freq
        expected = site.laid_out(label, in_use, in_use).float().to(table.dtype).double()
        exact = table.dtype == torch.float32
        # Float32 keeps a frequency of 1e-38; some families set it to exactly zero.
        if not torch.allclose(
            table.cpu().double(), expected, rtol=1e-5 if exact else 1e-2, atol=1e-30 if exact else 1e-7
        ):
            raise ValueError(
                f"the frequencies of {site.paths[0]!r} differ from its config's (relative error up to "
                f"{relative_error(table, expected):.1e}): they were edited, or this family computes them in a "
                "non-standard way. Reload the model, or see ctxext.describe_context."
            )


def table_errors(model: nn.Module, text_config: Any, rope_parameters: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The relative error of each rotary table of a live model against `rope_parameters`: (path, error).

    Skips tables that depend on the call's length, and offloaded tables.
    """
    tables = rope_tables(text_config, rope_parameters)
    for site, facts in itertools.product(find_rotary_sites(model, text_config), tables):
        parameters, rope = facts.parameters, facts.in_use
        if parameters["rope_type"] == "dynamic" or parameters.get("short_factor") != parameters.get("long_factor"):
            continue
        inv_freq = site.table(facts.label)
        if inv_freq.device.type != "meta":
            scaling = getattr(site.module, of_label(facts.label, "attention_scaling"))
            expected = site.laid_out(facts.label, rope.inv_freq, rope.inv_freq)
            yield site.paths[0], max(relative_error(inv_freq, expected), abs(scaling / rope.attention_factor - 1))


# ------------------------------------------------------------------------------------------ the patch


@dataclass(frozen=True)
class RotaryProof(Proof):
    """The proof of new frequencies.

    Attributes:
        frequency_error: largest relative difference between the new module's frequencies (built by the family's class
            from the extended config) and the method's formula.
        output_error: largest difference between the module's cos and sin and the formula's; None if the output's layout
            is unknown.
        consumed: the attention layers that use the module's output; None until the first forward pass of a model
            extended on meta.
    """

    frequency_error: float
    output_error: float | None
    consumed: Readers | None

    # Float32 tables against float64 formulas: powers of theta agree to about 1e-6.
    FREQUENCY_BAR: ClassVar[float] = 1e-5
    OUTPUT_BAR: ClassVar[float] = 1e-3

    def __str__(self) -> str:
        consumed = "checked at the first forward pass" if self.consumed is None else self.consumed
        output = "not compared" if self.output_error is None else f"match (error {self.output_error:.1e})"
        return (
            f"frequencies match (error {self.frequency_error:.1e}), cos and sin {output}, used by attention: {consumed}"
        )

    @property
    def is_pending(self) -> bool:
        return self.consumed is None

    def fault(self, name: str, summary: str) -> str | None:
        output_error = self.output_error or 0.0
        if not (self.frequency_error <= self.FREQUENCY_BAR and output_error <= self.OUTPUT_BAR):
            return (
                f"{name} does not do what {summary!r} says: frequencies differ by {self.frequency_error:.1e}, cos and "
                f"sin by {output_error:.1e}. This family reads its config in a non-standard way."
            )
        if self.consumed is not None and not self.consumed:
            return (
                f"no attention layer of {name} uses its rotary embedding, so replacing it has no effect. This family "
                "is not supported."
            )
        return None if self.consumed is None else self.consumed.fault(name)


@dataclass(frozen=True)
class ReplaceRotary(Patch):
    """Replaces the rotary embedding by one that the family's class builds from the extended config.

    Attributes:
        facts: the context before the extension.
        tables: the formula's new frequencies, by label.
        summary: the plan in one line, shown in the module's repr.
        writes_tables: whether tables are written into the module, as the family's config cannot express them.
    """

    needs_weights: ClassVar[bool] = False

    facts: ContextFacts
    tables: dict[str, RopeGeometry]
    summary: str
    writes_tables: bool

    def check(self, model: nn.Module) -> None:
        standard_sites(model, self.facts)

    def observe(self, model: nn.Module) -> list[tuple[RotarySite, dict[str, Tensor]]]:
        """The sites, each with its expected frequencies by label."""
        sites = find_rotary_sites(model, self.facts.text_config)
        return [(site, {table.label: self._laid_out(site, table) for table in self.facts.tables}) for site in sites]

    def write(self, edit: Edit, before: list[tuple[RotarySite, dict[str, Tensor]]]) -> None:
        config = text_config_of(edit.model.config)
        for site, expected in before:
            new: Any = site.build(config, self.summary)
            for label, inv_freq in expected.items() if self.writes_tables else ():
                for name in (of_label(label, "inv_freq"), of_label(label, "original_inv_freq")):
                    new.exact[name] = inv_freq.float()
                    new._buffers[name] = new.exact[name].clone()
                setattr(new, of_label(label, "attention_scaling"), self.tables[label].attention_factor)
            edit.replace_module(site.paths, new)

    def prove(self, model: nn.Module, before: list[tuple[RotarySite, dict[str, Tensor]]]) -> RotaryProof:
        modules: list[Any] = [model.get_submodule(site.paths[0]) for site, _ in before]
        frequency_error, output_errors = 0.0, []
        for module, (_, expected) in zip(modules, before):
            for label, inv_freq in expected.items():
                rope, name = self.tables[label], of_label(label, "inv_freq")
                held, live = getattr(module, name), getattr(module, name).device.type != "meta"
                if not live:
                    held = module.exact[name] if isinstance(module, ExtendedRotary) else inv_freq * torch.inf
                frequency_error = max(frequency_error, relative_error(held, inv_freq))
                in_order = torch.equal(inv_freq[: len(rope.inv_freq)], rope.inv_freq)  # standard order of pairs
                if in_order and live:
                    output_errors.append(output_error(module, label, inv_freq, rope.attention_factor))
        found = [error for error in output_errors if error is not None]
        consumed = None
        if not on_meta(model):
            replaced = all(isinstance(module, ExtendedRotary) for module in modules)
            consumed = readers(model, modules, [site.module for site, _ in before]) if replaced else Readers()
        return RotaryProof(frequency_error, max(found, default=None), consumed)

    def _laid_out(self, site: RotarySite, table: Any) -> Tensor:
        return site.laid_out(table.label, self.tables[table.label].inv_freq, self.facts.rope_of(table).inv_freq)


# ------------------------------------------------------------------------------------------ comparing


def relative_error(table: Tensor, expected: Tensor) -> float:
    """Largest |table / expected - 1|; frequencies below 1e-9 of the largest count as zero."""
    table, expected = table.detach().double().cpu(), expected.detach().double().cpu()
    if table.shape != expected.shape:
        return float("inf")
    return float(((table - expected).abs() / expected.abs().clamp(min=1e-15)).max())


def output_error(
    module: nn.Module, label: str, inv_freq: Float64[Tensor, " pair"], attention_factor: float
) -> float | None:
    """Largest difference between the cos and sin of `module` for a table and the formula's.

    None if the layout of the module's output is unknown.
    """
    positions = torch.tensor([[0, 1, 7, 100]])
    device = getattr(module, of_label(label, "inv_freq")).device
    hidden = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)  # of whose dtype cos and sin are returned
    with torch.no_grad():
        output = module(hidden, positions.to(device), *([label] if label else []))
    cos, sin = cos_sin(positions, inv_freq, attention_factor)
    if isinstance(output, Tensor):
        if not output.is_complex():
            return None
        output = (output.real, output.imag)
    pairs, errors = cos.shape[-1], []
    for got, want in zip(output, (cos, sin), strict=True):
        got = got.reshape(-1, positions.shape[-1], got.shape[-1])[:1].double().cpu()
        if got.shape[-1] not in (pairs, 2 * pairs):
            return None
        halves = [got] if got.shape[-1] == pairs else [got[..., :pairs], got[..., 0::2]]
        errors.append(min(float((half - want).abs().max()) for half in halves))
    return max(errors)
