"""The class of a rotary embedding that replaces a family's own."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn


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
    cls = extended_class(mixin, base)  # type: ignore[arg-type]
    return cls.__new__(cls)
