"""The class of a rotary embedding that replaces a family's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def table_names(module: nn.Module) -> list[str]:
    """The buffers in which a rotary embedding keeps frequencies."""
    return [name for name in module._buffers if name.endswith("inv_freq")]


def of_label(label: str, name: str) -> str:
    """The name of the buffer `name` in the table `label`; the label "" is a module's only table."""
    return f"{label}_{name}" if label else name


class ExtendedRotary:
    """Mixed into a family's own rotary class: says what it is, and keeps its frequencies exact.

    Casting a model to bfloat16 would cast the frequencies too (58 radians off at position 32768),
    and `to_empty` would leave garbage; here both keep the float32 table that was built.
    """

    summary: str
    exact: dict[str, Tensor]  # The built tables: float32, on the CPU, not registered, so that no cast reaches them.

    def __init_subclass__(cls) -> None:
        if issubclass(cls, nn.Module):  # mixed by `mixed_class`; transformers looks for RotaryEmbedding in the name
            cls.__name__ = f"Extended{cls.__name__}"
            cls.forward = cls.adjust_forward(inspect.unwrap(cls.forward))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, table in self.exact.items():
            device = getattr(self, name).device
            if device.type != "meta":
                self._buffers[name] = table.to(device, copy=True)  # type: ignore[attr-defined]
        return self

    def extra_repr(self) -> str:
        return self.summary

    @staticmethod
    def adjust_forward(plain: Any) -> Any:
        """The forward of the mixed class, from the family's own without transformers' decorator.

        That reads the positions on every call to choose between longrope's two lists. Ours are equal, and reading
        costs a few percent of a decode step.
        """
        return torch.no_grad()(plain)
