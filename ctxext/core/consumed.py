"""Check that a forward pass reads what a patch put into a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ctxext.core.probing import has_hooks, probe_inputs, running


class _Consumed(BaseException):
    """Raised to stop the forward pass once the rotary output was used."""


class _SeeConsumed(TorchDispatchMode):
    """Watches for operations that read given tensors or the outputs of given modules."""

    def __init__(self, stop: bool, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.stop = stop
        self.outputs: dict[int, Tensor] = {}  # keyed by storage; held, so that no address is reused
        self.read: set[int] = set()
        self.add(tensors)

    def add(self, tensors: Iterable[Any]) -> None:
        self.outputs.update({t.untyped_storage()._cdata: t for t in tensors if isinstance(t, Tensor)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.outputs:
            tensors = (t for t in tree_iter((args, kwargs or {})) if isinstance(t, Tensor))
            self.read |= self.outputs.keys() & {tensor.untyped_storage()._cdata for tensor in tensors}
            if self.read and self.stop:
                raise _Consumed
        return func(*args, **(kwargs or {}))


def is_consumed(model: nn.Module, modules: list[nn.Module], replaced: list[nn.Module]) -> bool:
    """Whether a forward pass of two tokens reads what `modules` return.

    Some families keep a module that they never use, so it suffices that one of them is called; but none of the
    `replaced` modules may be called.
    """
    called: set[int] = set()
    handles = [m.register_forward_hook(lambda module, args, output: called.add(id(module))) for m in replaced]
    some = False
    try:
        for module in modules:
            see = _SeeConsumed(stop=not has_hooks(model))
            handles += [module.register_forward_hook(lambda module, args, output, see=see: see.add(tree_iter(output)))]
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
    """The pass stops once `see` has seen enough, in the first attention layer.

    Models with accelerate hooks run to the end, as their hooks move weights back afterwards.
    """
    with suppress(_Consumed), running(model), see:
        model(**probe_inputs(model, 2), use_cache=False)
