"""Check which attention layers use what a patch put into a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ctxext.core.probing import has_hooks, probe_inputs, running

N_TOKENS = 8
# Relative RMS differences by which reordering the earlier tokens may change the last one's output, by rounding alone.
ORDER_BAR, HALF_ORDER_BAR = 1e-4, 1e-2


@dataclass(frozen=True)
class Readers:
    """The attention layers that are given rotary tables, by what they do with them.

    Attributes:
        reading: their output changes with the tables.
        blind: it changes with neither the tables nor the order of earlier tokens (layers without positions).
        astray: it changes with the order alone, although they are, or hold, attention of a class that reads the tables
            elsewhere.
        inline: whether tables are read by operations outside of such layers.
    """

    reading: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    astray: tuple[str, ...] = ()
    inline: bool = False

    def __bool__(self) -> bool:
        return bool(self.reading) or self.inline

    def __str__(self) -> str:
        if not self.reading:
            return "yes" if self.inline else "NO"
        n_layers = len(self.reading) + len(self.blind)
        return f"in {len(self.reading)} of {n_layers} layers" if self.blind else f"in all {n_layers} layers"

    def fault(self, name: str) -> str | None:
        """Why a patch of the rotary embedding would not reach all of the model, or None."""
        if not self.astray:
            return None
        return (
            f"{', '.join(self.astray[:3])}{' …' if self.astray[3:] else ''} of {name} do not use its rotary embedding, "
            "yet attend by position. A patch would miss them, so this model is not supported."
        )


def readers(model: nn.Module, modules: list[nn.Module], replaced: Iterable[nn.Module] = ()) -> Readers:
    """Find the layers that read what the rotary `modules` return, in a forward pass of `N_TOKENS` tokens.

    Each layer runs again with noise in place of the tables. Some families keep a rotary module that they never use, so
    it suffices that one is read; but nothing is if one of them is called in vain, or one of the `replaced` is called.
    """
    watch, called = _Watch(modules), set()
    handles = [m.register_forward_hook(lambda module, args, output: called.add(id(module))) for m in replaced]
    for path, module in model.named_modules():
        if module in modules:
            handles.append(module.register_forward_hook(watch.returned))
        elif next(module.children(), None) is not None:
            before, after = watch.around(path)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        _run(model)
    finally:
        for handle in handles:
            handle.remove()
    elsewhere = [_is_touched(model, module) for module in watch.unclaimed]
    if called or not all(elsewhere):
        return Readers()
    if not watch.reading and not watch.ordered:  # layers without positions, or with zeros for weights
        elsewhere += [_is_touched(model, module) for module in watch.claimed]
    # Linear attention depends on the order without any tables.
    kinds = tuple({type(model.get_submodule(path)) for path in watch.reading})
    astray = [
        path
        for path in watch.ordered
        if any(isinstance(module, kinds) for module in model.get_submodule(path).modules())
    ]
    return Readers(tuple(watch.reading), tuple(watch.blind), tuple(astray), any(elsewhere))


@dataclass
class _Running:
    """A running module that was given tables: whether a module inside it reads them, and those inside that do not."""

    reading: bool = False
    unread: list[tuple[str, nn.Module, Any, Any]] = field(default_factory=list)


class _Watch:
    """Follows the outputs of rotary modules to the modules that are given them, and tries those, from the inside."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.owners: dict[int, tuple[Tensor, nn.Module]] = {}  # keyed by storage; held, so that no address is reused
        self.claimed: set[nn.Module] = set()
        self.running: list[_Running] = []
        self.trying = False  # what is inside a module that runs again is not judged again
        self.reading: list[str] = []
        self.blind: list[str] = []
        self.ordered: list[str] = []

    @property
    def unclaimed(self) -> list[nn.Module]:
        """The rotary modules that ran, and whose output was given to no module."""
        ran = {module for _, module in self.owners.values()}
        return [module for module in self.modules if module in ran - self.claimed]

    def returned(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self.owners[_storage(tensor)] = tensor, module

    def around(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks before and after the module at `path`."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            owners = self._given(args, kwargs)
            if owners:
                self.claimed |= owners
                self.running.append(_Running())

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._given(args, kwargs):
                self.trying = True
                self._ended(self.running.pop(), path, module, args, kwargs)
                self.trying = False

        return before, after

    def _ended(self, inside: _Running, *called: Any) -> None:
        """Judge a module by whether it reads the tables, or else by what is inside of it: an attention layer may give
        them to a part (an indexer) that has no say over a few tokens."""
        outer = self.running[-1] if self.running else _Running()
        if inside.reading:
            outer.reading = True
            self._judge(inside.unread)
        elif self._reads(*called):
            outer.reading = True
            self.reading.append(called[0])
        elif self.running:
            outer.unread += inside.unread or [called]
        else:
            self._judge(inside.unread or [called])

    def _judge(self, unread: Iterable[Any]) -> None:
        for path, *called in unread:
            (self.ordered if _is_ordered(*called) else self.blind).append(path)

    def _given(self, args: Any, kwargs: Any) -> set[nn.Module]:
        ignored = self.trying or not self.owners
        storages = set() if ignored else {_storage(tensor) for tensor in _tensors((args, kwargs))}
        return {self.owners[storage][1] for storage in storages & self.owners.keys()}

    def _reads(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether noise in place of the tables changes what a module returns, more than running it again does."""

        def noise(tensor: Tensor) -> Tensor:
            return _noise(tensor) if _storage(tensor) in self.owners else tensor

        output = _output(module, args, kwargs)
        changed = _output(module, *tree_map_only(Tensor, noise, (args, kwargs)))
        again = _output(module, args, kwargs)  # last, so that what the module stores is its own
        effect, chance = _gap(changed, output), _gap(again, output)
        return effect > 4 * chance or (math.isnan(effect) and not math.isnan(chance))


def _is_ordered(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether the order of the earlier tokens changes the output of the last one."""
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[1] != N_TOKENS:
        return False
    order = torch.tensor([*reversed(range(N_TOKENS - 1)), N_TOKENS - 1], device=hidden.device)
    bar = HALF_ORDER_BAR if hidden.dtype in (torch.float16, torch.bfloat16) else ORDER_BAR

    def last(inputs: Tensor) -> Tensor:
        given = tree_map_only(Tensor, lambda tensor: inputs if tensor is hidden else tensor, (args, kwargs))
        return _output(module, *given)[:, -1]

    # At some scale attention is neither uniform nor all on one token.
    return any(_gap(last(scale * hidden[:, order]), last(scale * hidden)) > bar for scale in (1, 2, 4, 8))


def are_read(model: nn.Module, paths: list[str], name: str) -> bool:
    """Whether noise in place of the buffer `name` changes the output of every one of the modules at `paths`."""
    found: dict[str, bool] = {}

    def trying(path: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            kept, whole = module.get_buffer(name), _output(module, args, kwargs)
            try:
                module._buffers[name] = _noise(kept)
                found[path] = bool(_gap(_output(module, args, kwargs), whole) != 0)
            finally:
                module._buffers[name] = kept

        return after

    handles = [model.get_submodule(path).register_forward_hook(trying(path), with_kwargs=True) for path in paths]
    try:
        _run(model)
    finally:
        for handle in handles:
            handle.remove()
    return all(found.get(path, False) for path in paths)


def _run(model: nn.Module) -> None:
    with running(model):
        model(**probe_inputs(model, N_TOKENS), use_cache=False)


def _output(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """The first tensor that a module returns, without its hooks; in float32, as float16 may overflow."""
    return next(_tensors(module.forward(*args, **kwargs))).float()


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def _noise(tensor: Tensor) -> Tensor:
    """Random numbers far from any sine: small ones would be rounded away in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    factors = 8 * torch.randn(tensor.shape, generator=generator)
    return tensor + factors.to(tensor.device, tensor.real.dtype if tensor.is_complex() else tensor.dtype)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (each for each in tree_iter(tree) if isinstance(each, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ------------------------------------------------------------------------- tables that no module is given


class _Consumed(BaseException):
    """Raised to stop the forward pass once the rotary output was used."""


class _SeeReads(TorchDispatchMode):
    """Watches for operations that read the outputs of modules, and calls `noticed` with these modules at each."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self) -> None:
        super().__init__()
        # Each with its module, by storage; held, so that no address is reused.
        self.outputs: dict[int, tuple[Tensor, nn.Module]] = {}

    def returned(self, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs.update({_storage(tensor): (tensor, module) for tensor in _tensors(output)})

    def noticed(self, owners: set[nn.Module]) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor) for tensor in _tensors((args, kwargs or {}))} if self.outputs else set()
        if found := given & self.outputs.keys():
            self.noticed({self.outputs[storage][1] for storage in found})
        return func(*args, **(kwargs or {}))


class _SeeConsumed(_SeeReads):
    """Whether anything reads them."""

    def __init__(self, stop: bool) -> None:
        super().__init__()
        self.stop = stop
        self.read = False

    def noticed(self, owners: set[nn.Module]) -> None:
        self.read = True
        if self.stop:
            raise _Consumed


def _is_touched(model: nn.Module, module: nn.Module) -> bool:
    """Whether an operation reads what `module` returns.

    The pass stops there, in the first attention layer. Models with accelerate hooks run to the end, as their hooks move
    weights back afterwards.
    """
    see = _SeeConsumed(stop=not has_hooks(model))
    handle = module.register_forward_hook(see.returned)
    try:
        with suppress(_Consumed), see:
            _run(model)
    finally:
        handle.remove()
    return see.read


class _SeeReaders(_SeeReads):
    """In which module, the innermost one running, each read is."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, nn.Module]] = []
        self.found: dict[nn.Module, dict[str, nn.Module]] = {}

    def around(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks before and after the module at `path`."""

        def before(module: nn.Module, args: Any) -> None:
            self.running.append((path, module))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        return before, after

    def noticed(self, owners: set[nn.Module]) -> None:
        if self.running:
            path, module = self.running[-1]
            for owner in owners:
                self.found.setdefault(owner, {})[path] = module


def modules_that_read(model: nn.Module, rotary: Collection[nn.Module]) -> dict[nn.Module, dict[str, nn.Module]]:
    """For each of `rotary` that is used, the modules with operations that read what it returns, by path, in a forward
    pass of `N_TOKENS` tokens."""
    see = _SeeReaders()
    handles = []
    for path, module in model.named_modules():
        if module in rotary:
            handles.append(module.register_forward_hook(see.returned))
        else:
            before, after = see.around(path)
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after))
    try:
        with see:
            _run(model)
    finally:
        for handle in handles:
            handle.remove()
    return see.found
