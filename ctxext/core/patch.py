"""The contract of a patch: one mechanism that changes a live model and verifies that the change took effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ctxext.core.edit import Edit


class Proof(ABC):
    """The measurements that verify a patch. `str` gives the figures."""

    @property
    def is_pending(self) -> bool:
        """Whether the proof waits for the first forward pass, as the model was on the meta device."""
        return False

    @abstractmethod
    def fault(self, name: str, summary: str) -> str | None:
        """Why the proof fails, in a sentence that names the model's class and the plan; None if it holds."""


class Patch(ABC):
    """One mechanism. `core.apply` calls these four methods in order; after an error in any, the model is unchanged."""

    # Whether it refuses a model on the meta device.
    needs_weights: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, before anything is changed, if this model cannot be patched."""
        return

    def observe(self, model: nn.Module) -> Any:
        """What `write` and `prove` need to know of the unchanged model."""
        return None

    @abstractmethod
    def write(self, edit: Edit, before: Any) -> None:
        """Change the model, which already holds the extended config; `before` may be added to, for `prove`."""

    @abstractmethod
    def prove(self, model: nn.Module, before: Any) -> Proof:
        """Verify the changed model."""


@dataclass(frozen=True)
class FormulaProof(Proof):
    """The proof of a patch that writes the values of a formula.

    Attributes:
        formula_error: largest difference between what the live model's own code reads and the method's formula.
        effect: how much the model's output changed, which shows that the new values are used.
        n_tokens: the length of the forward pass; beyond the stock model's limit unless that is too long to run.
    """

    formula_error: float
    effect: float
    n_tokens: int

    # Tables are float32 at best, where angles at positions in the thousands are exact to 1e-4 radians.
    FORMULA_BAR: ClassVar[float] = 1e-3

    def __str__(self) -> str:
        return (
            f"matches the formula (error {self.formula_error:.1e}) and changes the output by {self.effect:.1e} in a "
            f"forward pass of {self.n_tokens} tokens"
        )

    def fault(self, name: str, summary: str) -> str | None:
        if not self.formula_error <= self.FORMULA_BAR:
            return f"{name} does not do what {summary!r} says: it is {self.formula_error:.1e} off the formula."
        if not self.effect > 0:
            return f"{summary} does not change the output of {name}."
        return None
