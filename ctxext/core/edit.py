"""Reversible changes to a live model. The inverses are data, so they survive deepcopy, pickle and `.to(...)`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ABSENT = "absent"  # A string, not an object(): compared after deepcopy and pickle as well.


@dataclass(frozen=True)
class ConfigPair:
    """A config that a model held, and the copy that replaces it."""

    original: Any
    extended: Any


@dataclass(frozen=True, eq=False)
class Undo:
    """The inverse of one change: what was at `name` of the module at `path` before.

    Attributes:
        kind: "module", "attribute", "class", "field", "configs", "hook", or the dictionary that held a tensor.
        dtype: of the tensor that replaced it.
        aliases: other paths of a module.
    """

    path: str
    kind: str
    name: str
    old: Any
    dtype: torch.dtype | None = None
    aliases: tuple[str, ...] = ()

    def __call__(self, model: nn.Module) -> None:
        if self.kind == "module":
            _put(model, (self.path, *self.aliases), self.old)
            return
        module = model.get_submodule(self.path)
        match self.kind:
            case "attribute" if isinstance(self.old, str) and self.old == _ABSENT:
                module.__dict__.pop(self.name, None)
            case "attribute":
                module.__dict__[self.name] = self.old
            case "_parameters" | "_buffers":
                held = getattr(module, self.kind)
                _follow(self.old, held[self.name], self.dtype)
                held[self.name] = self.old
            case "class":
                module.__class__ = self.old
            case "field":
                config, written, old = self.old
                if config.__dict__.get(self.name) == written:
                    del config.__dict__[self.name]
                    config.__dict__.update({} if old == _ABSENT else {self.name: old})
            case "configs":
                _restore_configs(model, *self.old)
            case "hook":
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    for key in [key for key, each in hooks.items() if each is self.old]:
                        del hooks[key]
                        module._forward_pre_hooks_with_kwargs.pop(key, None)
                        module._forward_hooks_with_kwargs.pop(key, None)
                        module._forward_hooks_always_called.pop(key, None)


def _follow(old: Tensor, now: Tensor, written: torch.dtype | None) -> None:
    """Give the restored tensor the model's current device and dtype, in place because optimisers may hold it."""
    dtype = old.dtype if now.dtype == written else now.dtype
    if now.device.type != "meta" and (old.device != now.device or old.dtype != dtype):
        old.data = old.data.to(now.device, dtype)


@dataclass
class Edit:
    """Changes a model in place and records how to undo each change. Changes instances only, never a class."""

    model: nn.Module
    undos: list[Undo] = field(default_factory=list)

    def set_attribute(self, path: str, name: str, value: Any) -> None:
        """Set a plain attribute of a module: a number, or a callable that replaces a method."""
        module = self.model.get_submodule(path)
        self.undos.append(Undo(path, "attribute", name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value

    def set_tensor(self, path: str, name: str, value: Tensor) -> None:
        """Replace a parameter (trainable if the old one was) or a buffer, on the same device.

        Float64 values are rounded once to the old tensor's dtype. Raises ValueError if an adapter replaced the tensor.
        """
        module = self.model.get_submodule(path)
        kind = "_parameters" if name in module._parameters else "_buffers"
        held = getattr(module, kind)
        if name not in held:
            raise ValueError(
                f"{path}.{name} is held by an adapter (PEFT's modules_to_save or target_modules). Extend the model "
                "first and wrap it afterwards, or merge the adapter."
            )
        old = held[name]
        with torch.inference_mode(False):  # inference tensors could not be trained
            new = value.to(old.device, old.dtype if value.dtype == torch.float64 else value.dtype)
            new = new.clone() if new.is_inference() else new
            self.undos.append(Undo(path, kind, name, old, new.dtype))
            held[name] = nn.Parameter(new, requires_grad=old.requires_grad) if kind == "_parameters" else new

    def exchange_class(self, path: str, mixin: type) -> None:
        """Give this module instance a subclass of its class and `mixin`."""
        module = self.model.get_submodule(path)
        self.undos.append(Undo(path, "class", "", type(module)))
        module.__class__ = mixed_class(mixin, type(module))  # type: ignore[arg-type]

    def replace_module(self, paths: Sequence[str], new: nn.Module) -> None:
        """Put `new` at all `paths` of one module, with the old one's device, mode and accelerate hook."""
        path, *aliases = paths
        old = self.model.get_submodule(path)
        self.undos.append(Undo(path, "module", "", old, aliases=tuple(aliases)))
        _put(self.model, paths, new)
        for each in self.undos:
            if each.kind == "configs":  # undone after this module, which may have to be rebuilt from its own config
                _swap(old, {id(pair.extended): pair.original for pair in each.old[0]})

    def swap_configs(self, pairs: Sequence[ConfigPair], fields: Sequence[str]) -> None:
        """Replace the original config of each pair by its copy in every module, with `fields` changed."""
        self.undos.append(Undo("", "configs", "", (tuple(pairs), tuple(fields))))
        _swap(self.model, {id(pair.original): pair.extended for pair in pairs})

    def set_config_field(self, config: Any, name: str, value: Any) -> None:
        """Set a field of a config's copy for this process alone; undoing keeps a value that the user set since."""
        self.undos.append(Undo("", "field", name, (config, value, config.__dict__.get(name, _ABSENT))))
        config.__dict__[name] = value

    def add_forward_pre_hook(self, path: str, hook: Any, *, with_kwargs: bool = False) -> None:
        """Run `hook` before each forward pass of a module."""
        module = self.model.get_submodule(path)
        module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        self.undos.append(Undo(path, "hook", "", hook))

    def add_forward_hook(self, path: str, hook: Any, **options: bool) -> None:
        """Run `hook` after each forward pass of a module; `options` as torch's `register_forward_hook` takes them."""
        self.model.get_submodule(path).register_forward_hook(hook, **options)
        self.undos.append(Undo(path, "hook", "", hook))

    def remove_hook(self, hook: Any) -> None:
        """Remove one hook."""
        (added,) = (each for each in self.undos if each.old is hook)
        added(self.model)
        self.undos.remove(added)

    def undo(self) -> None:
        """Undo everything, newest first. Raises RuntimeError, and undoes nothing, if an adapter replaced a tensor."""
        for each in self.undos:
            is_tensor = each.kind in ("_parameters", "_buffers")
            if is_tensor and each.name not in getattr(self.model.get_submodule(each.path), each.kind):
                raise RuntimeError(
                    f"{each.path}.{each.name} was replaced by an adapter after the model was extended. Merge "
                    "or unload the adapter first."
                )
        while self.undos:
            self.undos.pop()(self.model)


# ------------------------------------------------------------------------------------------- modules


def _put(model: nn.Module, paths: Sequence[str], new: nn.Module) -> None:
    old = model.get_submodule(paths[0])
    device = _device(old)
    if _device(new).type == "meta" and device.type != "meta":
        # The module was built on meta and the model has since been materialised: rebuild it.
        new._buffers.update(type(new)(new.config)._buffers)
    new.to(device)
    new.train(old.training)
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(new)
        add_hook_to_module(new, copy.copy(hook))
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)


def _device(module: nn.Module) -> torch.device:
    return next(iter(module.buffers()), torch.empty(0)).device


@functools.cache
def mixed_class(mixin: type, base: type) -> type:
    """A subclass of both that can be pickled and copied, with the base's name (for FSDP's wrapping policy)."""
    return type(base.__name__, (_Rebuilt, mixin, base), {"__module__": __name__})


def is_mixed(module: nn.Module) -> bool:
    """Whether its class is one of `mixed_class`: an extended model holds it."""
    return isinstance(module, _Rebuilt)


class _Rebuilt:
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, mixin, base = type(self).__bases__
        return _blank, (mixin, base), self.__dict__


def _blank(mixin: type, base: type) -> Any:
    cls: Any = mixed_class(mixin, base)
    return cls.__new__(cls)


# ------------------------------------------------------------------------------------------- configs


def _swap(model: nn.Module, new: dict[int, Any]) -> None:
    for module in model.modules():
        module.__dict__.update({k: new[id(v)] for k, v in module.__dict__.items() if id(v) in new})


def _restore_configs(model: nn.Module, pairs: Sequence[ConfigPair], fields: Sequence[str]) -> None:
    """Fields edited since, such as use_cache, keep their values."""
    extended = {id(pair.extended) for pair in pairs}
    for pair in pairs:
        edited = {k: v for k, v in pair.extended.__dict__.items() if k not in fields and id(v) not in extended}
        pair.original.__dict__.update(edited)
    _swap(model, {id(pair.extended): pair.original for pair in pairs})
