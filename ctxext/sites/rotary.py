"""The rotary embedding of a live model: find it, build its replacement, swap it, see it used.

Families are found by structure. A module that holds `inv_freq`, `original_inv_freq` and
`attention_scaling` is transformers' standard rotary embedding, whatever the model is called. Its
replacement is built by its own class from the extended config, so shapes and partial rotary stay
the family's, and a plain reload of the saved config gives bitwise the same module.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ctxext.encodings.rope import RopeGeometry, cos_sin

TABLES = ("inv_freq", "original_inv_freq")


class ExtendedRotary:
    """Mixed into a family's own rotary class: says what it is, and keeps its frequencies exact.

    Casting a model to bfloat16 would cast the frequencies too (58 radians off at position 32768),
    and `to_empty` would leave garbage; here both end with the float32 table that was built.
    """

    summary: str
    exact: Tensor  # The built table: float32, on the CPU, not registered, so that no cast reaches it.

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name in TABLES:
            device = getattr(self, name).device
            if device.type != "meta":
                self._buffers[name] = self.exact.to(device, copy=True)  # type: ignore[attr-defined]
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
    def rotary_dim(self) -> int:
        return 2 * int(self.module.inv_freq.shape[-1])

    def build(self, config: Any, summary: str, mixin: type[ExtendedRotary] = ExtendedRotary) -> nn.Module:
        """The replacement on the CPU, made by the module's own class from the extended `config`.

        Raises:
            ValueError: the class does not build from such a config.
        """
        cls = extended_class(mixin, type(self.module))
        try:
            with torch.device("cpu"):
                new = cls(config)
        except Exception as error:
            rope_type = config.rope_parameters.get("rope_type")
            raise ValueError(
                f"{type(self.module).__name__} at {self.paths[0]!r} cannot be built with "
                f"rope_type {rope_type!r} ({type(error).__name__}: {error}). This family is not supported "
                "with this method; try method='ntk', which changes rope_theta alone."
            ) from error
        new.summary = summary
        new.exact = new.inv_freq.detach().clone()
        return new.train(self.module.training)


def find_rotary_sites(model: nn.Module, text_config: Any) -> list[RotarySite]:
    """The standard rotary embeddings of the text model, each once, with all their aliases."""
    paths: dict[int, list[str]] = {}
    found: dict[int, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if (
            isinstance(getattr(module, "inv_freq", None), Tensor)
            and isinstance(getattr(module, "original_inv_freq", None), Tensor)
            and hasattr(module, "attention_scaling")
            and type(getattr(module, "config", None)) is type(text_config)
        ):
            found[id(module)] = module
            paths.setdefault(id(module), []).append(path)
    return [RotarySite(paths=tuple(paths[key]), module=module) for key, module in found.items()]


def other_rotary_tables(model: nn.Module, sites: list[RotarySite]) -> list[str]:
    """Paths of text modules that keep rotary tables in another way than the standard one."""
    known = {path for site in sites for path in site.paths}
    others = []
    for path, module in model.named_modules():
        names = [*module._buffers, *module.__dict__]
        tables = [n for n in names if n.endswith("inv_freq") or n in ("embed_positions", "freqs_cis")]
        if tables and path not in known and not any(w in path for w in ("visual", "vision", "audio")):
            others.append(f"{path} ({type(module).__name__}: {', '.join(tables)})")
    return others


def put(model: nn.Module, site_paths: tuple[str, ...], new: nn.Module) -> nn.Module:
    """Set `new` at every path, with the device, mode and accelerate hook of what stood there; return that."""
    old = model.get_submodule(site_paths[0])
    device = old.inv_freq.device
    if new.inv_freq.device.type == "meta" and device.type != "meta":
        # The module was made on meta and its model has been materialised since: build it again.
        fresh = type(new)(new.config)
        new._buffers.update({name: fresh._buffers[name] for name in TABLES})
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


def output_error(module: nn.Module, rope: RopeGeometry) -> float | None:
    """Largest difference between the cos and sin that `module` gives and the written-out formula.

    None where the module's output has none of the layouts known here. It must run on the CPU.
    """
    positions = torch.tensor([[0, 1, 7, 100]])
    with torch.no_grad():
        output = module(torch.zeros(1, 1, 1), positions)
    cos, sin = cos_sin(positions, rope.inv_freq, rope.attention_factor)
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
    """Watches for an operation that reads what the rotary modules returned."""

    def __init__(self, stop: bool) -> None:
        super().__init__()
        self.stop = stop
        self.outputs: dict[int, Tensor] = {}  # keyed by storage; held, so that no address is reused
        self.consumed = False

    def watch(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self.outputs[tensor.untyped_storage()._cdata] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.outputs and any(
            tensor.untyped_storage()._cdata in self.outputs
            for tensor in tree_iter((args, kwargs or {}))
            if isinstance(tensor, Tensor)
        ):
            self.consumed = True
            if self.stop:
                raise _Consumed
        return func(*args, **(kwargs or {}))


def is_consumed(model: nn.Module, modules: list[nn.Module]) -> bool:
    """Whether a forward pass of two tokens reads what each of `modules` returns.

    The pass stops where it has seen that, in the first attention layer; models with accelerate hooks
    run through, as their hooks move weights back afterwards.
    """
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    ids = torch.ones((1, 2), dtype=torch.long, device=device)
    for module in modules:
        see = _SeeConsumed(stop=not hooked)
        handle = module.register_forward_hook(see.watch)
        devices = [device] if device.type == "cuda" else []
        try:
            with (
                torch.random.fork_rng(devices=devices),
                torch.compiler.set_stance("force_eager"),
                torch.no_grad(),
                see,
            ):
                model(input_ids=ids, use_cache=False)
        except _Consumed:
            pass
        finally:
            handle.remove()
        if not see.consumed:
            return False
    return True


def on_meta(model: nn.Module) -> bool:
    """Whether weights are missing, so that no forward pass can run yet."""
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not hooked and any(p.device.type == "meta" for p in model.parameters())
