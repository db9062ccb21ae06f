"""The rotary embedding of a live model: find it, build its replacement, swap it, see it used.

Families are found by structure. A module that holds `inv_freq`, `original_inv_freq` and
`attention_scaling`, or these for each type of layer (`full_attention_inv_freq` and so on), is
transformers' standard rotary embedding, whatever the model is called. Its
replacement is built by its own class from the extended config, so shapes and partial rotary stay
the family's, and a plain reload of the saved config gives bitwise the same module.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ctxext.core.encoding import probe_inputs
from ctxext.encodings.rope import RopeGeometry, cos_sin


def table_names(module: nn.Module) -> list[str]:
    """The buffers in which a rotary embedding keeps frequencies."""
    return [name for name in module._buffers if name.endswith("inv_freq")]


def of_label(label: str, name: str) -> str:
    """`inv_freq` as the table of `label` calls it; "" is the only table of a module."""
    return f"{label}_{name}" if label else name


class ExtendedRotary:
    """Mixed into a family's own rotary class: says what it is, and keeps its frequencies exact.

    Casting a model to bfloat16 would cast the frequencies too (58 radians off at position 32768),
    and `to_empty` would leave garbage; here both end with the float32 table that was built.
    """

    summary: str
    exact: dict[str, Tensor]  # The built tables: float32, on the CPU, not registered, so that no cast reaches them.

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, table in self.exact.items():
            device = getattr(self, name).device
            if device.type != "meta":
                self._buffers[name] = table.to(device, copy=True)  # type: ignore[attr-defined]
        return self

    def extra_repr(self) -> str:
        return self.summary

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time: pickle and deepcopy rebuild it from what it was made of.
        return _blank, type(self).__bases__, self.__dict__

    @staticmethod
    def adjust_forward(plain: Any) -> Any:
        """The forward of the mixed class, from the family's own without transformers' decorator.

        That looks at the positions on every call to choose between longrope's two lists; ours are equal, and
        looking costs some percent of a decode step.
        """
        return torch.no_grad()(plain)


@functools.cache
def extended_class(mixin: type[ExtendedRotary], base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a family's rotary class. Its name keeps `RotaryEmbedding`, as transformers looks for it."""
    members = {"__module__": __name__, "forward": mixin.adjust_forward(inspect.unwrap(base.forward))}
    return type(f"Extended{base.__name__}", (mixin, base), members)


def _blank(mixin: type[ExtendedRotary], base: type[nn.Module]) -> nn.Module:
    cls = extended_class(mixin, base)
    return cls.__new__(cls)


@dataclass
class RotarySite:
    """One rotary embedding of a live model, and every path that leads to it."""

    paths: tuple[str, ...]
    module: nn.Module

    @property
    def labels(self) -> tuple[str, ...]:
        """The types of layers that it has a table for; "" for the only one."""
        return tuple(_labels(self.module))

    def table(self, label: str) -> Float[Tensor, " pair"]:
        """The frequencies of a type of layer."""
        table: Tensor = getattr(self.module, of_label(label, "inv_freq"))
        return table

    def laid_out(
        self, label: str, inv_freq: Float64[Tensor, " turning"], in_use: Float64[Tensor, " turning"]
    ) -> Float64[Tensor, " pair"]:
        """`inv_freq` as the module keeps a table: zeros for the pairs that do not turn, and its own order of pairs.

        Some multimodal families keep the pairs of a section together.

        Args:
            in_use: the frequencies that the module should have now.
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
        """The replacement on the CPU, made by the module's own class from the extended `config`.

        Raises:
            ValueError: the class does not build from such a config.
        """
        cls = extended_class(mixin, type(self.module))
        try:
            with torch.device("cpu"):
                new = cls(config)
        except Exception as error:  # transformers' rotary embeddings raise many kinds
            parameters = next(
                (v for v in config.rope_parameters.values() if isinstance(v, dict)), config.rope_parameters
            )
            raise ValueError(
                f"{type(self.module).__name__} at {self.paths[0]!r} cannot be built with "
                f"rope_type {parameters.get('rope_type')!r} ({type(error).__name__}: {error}). This family is not "
                "supported with this method; try method='ntk', which changes rope_theta alone."
            ) from error
        new.summary = summary
        new.exact = {name: getattr(new, name).detach().clone() for name in table_names(new)}
        return new.train(self.module.training)


def _agree(table: Tensor, expected: Tensor) -> bool:
    return torch.allclose(table, expected, rtol=1e-5, atol=0.0)


def write_table(new: nn.Module, label: str, inv_freq: Float64[Tensor, " pair"], attention_factor: float) -> None:
    """Overwrite what the family's class has built; for what no config of the family can say."""
    assert isinstance(new, ExtendedRotary)
    for name in (of_label(label, "inv_freq"), of_label(label, "original_inv_freq")):
        new.exact[name] = inv_freq.float()
        new._buffers[name] = new.exact[name].clone()
    setattr(new, of_label(label, "attention_scaling"), attention_factor)


def find_rotary_sites(model: nn.Module, text_config: Any) -> list[RotarySite]:
    """The standard rotary embeddings of the text model, each once, with all their aliases."""
    paths: dict[int, list[str]] = {}
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _labels(module) and type(getattr(module, "config", None)) is type(text_config):
            found[id(module)] = module
            paths.setdefault(id(module), []).append(path)
    return [RotarySite(paths=tuple(paths[key]), module=module) for key, module in found.items()]


def _labels(module: nn.Module) -> list[str]:
    labels = [name.removesuffix("original_inv_freq").rstrip("_") for name in module._buffers if "original_inv" in name]
    return [
        label
        for label in labels
        if of_label(label, "inv_freq") in module._buffers and hasattr(module, of_label(label, "attention_scaling"))
    ]


SIN_COS = "embed_positions"


def find_sin_cos_tables(model: nn.Module) -> list[str]:
    """The attention modules of GPT-J and kin, which keep a table of sines and cosines each."""
    return [path for path, module in model.named_modules() if isinstance(module._buffers.get(SIN_COS), Tensor)]


def sin_cos_table(n_rows: int, rope: RopeGeometry) -> Float[Tensor, "row two_pairs"]:
    """Sines and then cosines of positions 0 to `n_rows` - 1, in float32 as GPT-J computes them."""
    cos, sin = cos_sin(torch.arange(n_rows), rope.inv_freq.float(), rope.attention_factor)
    return torch.cat([sin, cos], dim=-1)


# In the path or the class of tables that turn no text; MusicFlamingo's turns the time of a sound.
NOT_TEXT = ("visual", "vision", "audio", "protein", "MusicFlamingoRotary")


def other_rotary_tables(model: nn.Module, sites: list[RotarySite]) -> list[str]:
    """Paths of text modules that keep rotary tables in another way than the standard one."""
    known = {path for site in sites for path in site.paths}
    others = []
    for path, module in model.named_modules():
        names = [*module._buffers, *module.__dict__]
        tables = [n for n in names if n.endswith("inv_freq") or n in (SIN_COS, "freqs_cis")]
        name = f"{path} ({type(module).__name__}: {', '.join(tables)})"
        if tables and path not in known and not any(word in name for word in NOT_TEXT):
            others.append(name)
    return others


def put(model: nn.Module, site_paths: tuple[str, ...], new: nn.Module) -> nn.Module:
    """Set `new` at every path, with the device, mode and accelerate hook of what stood there; return that."""
    old = model.get_submodule(site_paths[0])
    device = getattr(old, table_names(old)[0]).device
    if getattr(new, table_names(new)[0]).device.type == "meta" and device.type != "meta":
        # The module was made on meta and its model has been materialised since: build it again.
        fresh = type(new)(new.config)
        new._buffers.update({name: fresh._buffers[name] for name in table_names(new)})
    new.to(device)
    new.train(old.training)
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(new)
        add_hook_to_module(new, copy.copy(hook))
    for path in site_paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
    return old


# ------------------------------------------------------------------------------------------ proof


def relative_error(table: Tensor, expected: Tensor) -> float:
    """Largest |table / expected - 1|, where a frequency below 1e-9 of the largest counts as zero."""
    table, expected = table.detach().double().cpu(), expected.detach().double().cpu()
    if table.shape != expected.shape:
        return float("inf")
    return float(((table - expected).abs() / expected.abs().clamp(min=1e-15)).max())


def output_error(
    module: nn.Module, label: str, inv_freq: Float64[Tensor, " pair"], attention_factor: float
) -> float | None:
    """Largest difference between the cos and sin that `module` gives for a table and the written-out formula.

    None where the module's output has none of the layouts known here. It must run on the CPU.
    """
    positions = torch.tensor([[0, 1, 7, 100]])
    with torch.no_grad():
        output = module(torch.zeros(1, 1, 1), positions, *([label] if label else []))
    cos, sin = cos_sin(positions, inv_freq, attention_factor)
    if isinstance(output, Tensor):
        if not output.is_complex():
            return None
        output = (output.real, output.imag)
    pairs = cos.shape[-1]
    worst = None
    for got, want in zip(output, (cos, sin), strict=True):
        got = got.reshape(-1, positions.shape[-1], got.shape[-1])[:1].double()
        if got.shape[-1] == pairs:
            candidates = [got]
        elif got.shape[-1] == 2 * pairs:
            candidates = [got[..., :pairs], got[..., 0::2]]
        else:
            return None
        error = min(float((candidate - want).abs().max()) for candidate in candidates)
        worst = error if worst is None else max(worst, error)
    return worst


class _Consumed(Exception):
    """The rotary output was used; nothing more of the forward pass is needed."""


class _SeeConsumed(TorchDispatchMode):
    """Watches for operations that read some tensors: those given, and what watched modules return."""

    def __init__(self, stop: bool, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.stop = stop
        self.outputs: dict[int, Tensor] = {}  # keyed by storage; held, so that no address is reused
        self.read: set[int] = set()
        self.add(tensors)

    def add(self, tensors: Iterable[Any]) -> None:
        self.outputs.update({t.untyped_storage()._cdata: t for t in tensors if isinstance(t, Tensor)})

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        self.add(tree_iter(output))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.outputs:
            tensors = (t for t in tree_iter((args, kwargs or {})) if isinstance(t, Tensor))
            self.read |= self.outputs.keys() & {tensor.untyped_storage()._cdata for tensor in tensors}
            if self.read and self.stop:
                raise _Consumed
        return func(*args, **(kwargs or {}))


def is_consumed(model: nn.Module, modules: list[nn.Module], replaced: list[nn.Module]) -> bool:
    """Whether a forward pass of two tokens reads what `modules` return.

    A module that the pass does not call needs no reader if another is called (some families keep one that they never
    use), but none of those that were `replaced` may be called.
    """
    called: set[int] = set()
    handles = [m.register_forward_hook(lambda module, args, output: called.add(id(module))) for m in replaced]
    some = False
    try:
        for module in modules:
            see = _SeeConsumed(stop=not _hooked(model))
            handles += [module.register_forward_hook(see.watch)]
            _run_two_tokens(model, see)
            if called or (see.outputs and not see.read):
                return False
            some |= bool(see.read)
    finally:
        for handle in handles:
            handle.remove()
    return some


def are_read(model: nn.Module, tensors: list[Tensor]) -> bool:
    """Whether a forward pass of two tokens reads every one of `tensors`."""
    see = _SeeConsumed(stop=False, tensors=tensors)
    _run_two_tokens(model, see)
    return see.read == see.outputs.keys()


def _run_two_tokens(model: nn.Module, see: _SeeConsumed) -> None:
    """The pass stops where `see` has seen enough, in the first attention layer.

    Models with accelerate hooks run through, as their hooks move weights back afterwards.
    """
    inputs = probe_inputs(model, 2)
    device = next(tensor.device for tensor in tree_iter(inputs) if isinstance(tensor, Tensor))
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
            see,
        ):
            model(**inputs, use_cache=False)
    except _Consumed:
        pass


def _hooked(model: nn.Module) -> bool:
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def on_meta(model: nn.Module) -> bool:
    """Whether weights are missing, so that no forward pass can run yet."""
    return not _hooked(model) and any(p.device.type == "meta" for p in model.parameters())


# ---------------------------------------------------------------------- the scale of the softmax


def softmax_scales(model: nn.Module, before: Any, after: Any) -> dict[str, float]:
    """The `scaling` of each attention module of latent attention, by path, as its own class sets it from `after`.

    Args:
        before: the text config that the modules hold now.

    Raises:
        ValueError: a module's present scale is not what its config says.
    """
    scales = {}
    for path, module in model.named_modules():
        if module.__dict__.get("config") is not before or not isinstance(module.__dict__.get("scaling"), float):
            continue
        with torch.device("meta"):
            old, new = (type(module)(config, module.layer_idx) for config in (before, after))
        if module.scaling != old.scaling:
            raise ValueError(
                f"the softmax scale of {path!r} is {module.scaling:.6g}, but its config says {old.scaling:.6g}: it was "
                "changed by hand. Load the model afresh."
            )
        scales[path] = new.scaling
    return scales
