"""Changes to a live model, each with its undo, which is data: it survives deepcopy, pickle and `.to(...)`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ABSENT = "absent"  # A string, not an object(): compared after deepcopy and pickle as well.


@dataclass(frozen=True)
class Undo:
    """What stood at `name` of the module at `path` before it was changed."""

    path: str
    kind: str
    name: str
    old: Any
    dtype: torch.dtype | None = None  # of the tensor that took its place

    def is_there(self, model: nn.Module) -> bool:
        """Whether the module still holds the tensor that is to be taken away."""
        module = model.get_submodule(self.path)
        return self.name in (module._parameters if self.kind == "parameter" else module._buffers)

    def __call__(self, model: nn.Module) -> None:
        module = model.get_submodule(self.path)
        match self.kind:
            case "attribute" if isinstance(self.old, str) and self.old == _ABSENT:
                module.__dict__.pop(self.name, None)
            case "attribute":
                module.__dict__[self.name] = self.old
            case "parameter":
                now = module._parameters[self.name]
                _follow(self.old, now, self.dtype)
                module._parameters[self.name] = self.old
            case "buffer":
                _follow(self.old, module._buffers[self.name], self.dtype)
                module._buffers[self.name] = self.old
            case "class":
                module.__class__ = self.old


def _follow(old: Tensor, now: Tensor, written: torch.dtype | None) -> None:
    """Move and cast the tensor that comes back as the model was since, in place: optimisers may hold it."""
    dtype = old.dtype if now.dtype == written else now.dtype
    if now.device.type != "meta" and (old.device != now.device or old.dtype != dtype):
        old.data = old.data.to(now.device, dtype)


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
        """A parameter (trainable if the old one was) or a buffer, on the old one's device.

        Float64, as formulas give it, is rounded once to the old one's dtype.

        Raises:
            ValueError: the module does not hold it: an adapter has taken its place.
        """
        module = self.model.get_submodule(path)
        kind = "parameter" if name in module._parameters else "buffer"
        held: dict[str, Any] = module._parameters if kind == "parameter" else module._buffers
        if name not in held:
            raise ValueError(
                f"{path}.{name} is held by an adapter (PEFT's modules_to_save or target_modules). Extend the model "
                "first and wrap it afterwards, or merge the adapter."
            )
        old = held[name]
        with torch.inference_mode(False):  # what is made within it would never train
            new = value.to(old.device, old.dtype if value.dtype == torch.float64 else value.dtype)
            new = new.clone() if new.is_inference() else new
            self.undos.append(Undo(path, kind, name, old, new.dtype))
            held[name] = nn.Parameter(new, requires_grad=old.requires_grad) if kind == "parameter" else new

    def exchange_class(self, path: str, mixin: type) -> None:
        """The module's class becomes a subclass of it and of `mixin`, for this instance alone."""
        module = self.model.get_submodule(path)
        self.undos.append(Undo(path, "class", "", type(module)))
        module.__class__ = mixed_class(mixin, type(module))

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
    """A subclass of both that pickles by what it is made of, and is found by name (FSDP's wrapping) as the base is."""
    return type(base.__name__, (_Rebuilt, mixin, base), {"__module__": __name__})


class _Rebuilt:
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, mixin, base = type(self).__bases__
        return _blank, (mixin, base), self.__dict__


def _blank(mixin: type, base: type) -> Any:
    cls = mixed_class(mixin, base)
    return cls.__new__(cls)
