"""Changes to a live model, each with its undo, which is data: it survives deepcopy, pickle and `.to(...)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

_ABSENT = "absent"  # A string, not an object(): compared after deepcopy and pickle as well.


@dataclass(frozen=True)
class Undo:
    """What stood at `name` of the module at `path` before it was changed."""

    path: str
    kind: str
    name: str
    old: Any

    def __call__(self, model: nn.Module) -> None:
        module = model.get_submodule(self.path)
        match self.kind:
            case "attribute" if isinstance(self.old, str) and self.old == _ABSENT:
                module.__dict__.pop(self.name, None)
            case "attribute":
                module.__dict__[self.name] = self.old
            case "parameter":
                now = module._parameters[self.name]
                _follow(self.old, now)
                module._parameters[self.name] = self.old
            case "buffer":
                _follow(self.old, module._buffers[self.name])
                module._buffers[self.name] = self.old
            case "class":
                module.__class__ = self.old
            case "hook":
                for key, hook in list(module._forward_pre_hooks.items()):
                    if type(hook) is self.old:
                        del module._forward_pre_hooks[key]
                        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _follow(old: Tensor, now: Tensor) -> None:
    """Move and cast the tensor that comes back as the model was since, in place: optimisers may hold it."""
    if now.device.type != "meta" and (old.device != now.device or old.dtype != now.dtype):
        old.data = old.data.to(now.device, now.dtype)


@dataclass
class Surgery:
    """Changes a model in place and notes how to take each change back. Instances only, never a class."""

    model: nn.Module
    undos: list[Undo] = field(default_factory=list)

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """A plain attribute of a module: a number, or a callable in the place of a method."""
        module = self.model.get_submodule(path)
        self.undos.append(Undo(path, "attribute", name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value

    def set_tensor(self, path: str, name: str, value: Tensor) -> None:
        """A parameter (trainable if the old one was) or a buffer, on the old one's device and in its dtype."""
        module = self.model.get_submodule(path)
        kind = "parameter" if name in module._parameters else "buffer"
        held: dict[str, Any] = module._parameters if kind == "parameter" else module._buffers
        old = held[name]
        self.undos.append(Undo(path, kind, name, old))
        new = value.to(old.device, old.dtype)
        held[name] = nn.Parameter(new, requires_grad=old.requires_grad) if kind == "parameter" else new

    def exchange_class(self, path: str, mixin: type) -> None:
        """The module's class becomes a subclass of it and of `mixin`, for this instance alone."""
        module = self.model.get_submodule(path)
        self.undos.append(Undo(path, "class", "", type(module)))
        module.__class__ = mixed_class(mixin, type(module))

    def add_hook(self, path: str, hook: Callable[..., Any]) -> None:
        """A forward pre-hook with keyword arguments: an instance of a class of its own, by which it is found again."""
        self.undos.append(Undo(path, "hook", "", type(hook)))
        self.model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def undo(self) -> None:
        """Take everything back, newest first."""
        undo(self.model, self.undos)
        self.undos.clear()


def undo(model: nn.Module, undos: list[Undo]) -> None:
    """Take the noted changes back, newest first."""
    for each in reversed(undos):
        each(model)


@functools.cache
def mixed_class(mixin: type, base: type) -> type:
    """A subclass of both that pickles by what it is made of."""
    return type(f"Extended{base.__name__}", (_Rebuilt, mixin, base), {"__module__": __name__})


class _Rebuilt:
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, mixin, base = type(self).__bases__
        return _blank, (mixin, base), self.__dict__


def _blank(mixin: type, base: type) -> Any:
    cls = mixed_class(mixin, base)
    return cls.__new__(cls)
