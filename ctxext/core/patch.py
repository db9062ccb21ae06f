"""The contract of a patch: one mechanism that changes a live model and proves that the change took effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ctxext.core.edit import Edit


class Proof(ABC):
    """What was seen of a patch, each part of which could have failed. `str` says it in figures."""

    @property
    def is_pending(self) -> bool:
        """Whether it waits for the first forward pass, as the weights were not there yet."""
        return False

    @abstractmethod
    def fault(self, name: str, summary: str) -> str | None:
        """Why the patch does not hold, a sentence; None where it does.

        Args:
            name: the model's class.
            summary: of the plan.
        """


class Patch(ABC):
    """One mechanism. `core.apply` calls these four in order; an error in any leaves the model as it was."""

    # Whether it refuses a model whose weights are not there yet.
    needs_weights: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Raise ValueError, before anything is changed, if this model cannot be patched so."""
        return

    def observe(self, model: nn.Module) -> Any:
        """What `write` and `prove` need of the model before it is changed."""
        return None

    @abstractmethod
    def write(self, edit: Edit, before: Any) -> None:
        """Change the model; it holds the extended config already.

        Args:
            before: what `observe` returned; may be added to, for `prove`.
        """

    @abstractmethod
    def prove(self, model: nn.Module, before: Any) -> Proof:
        """Look at the changed model."""


@dataclass(frozen=True)
class FormulaProof(Proof):
    """What was seen of a patch that writes what a formula says.

    Attributes:
        formula_error: largest difference between what the live model's own code reads and the method's formula.
        effect: how far the model's output moved, so that what was changed is seen to be used.
        n_tokens: the length of the forward pass that was run; past the stock model's limit, where it has one that is
            not too long to run.
    """

    formula_error: float
    effect: float
    n_tokens: int

    # Tables are held in float32 at best, and positions of some thousand tokens are good to 1e-4 radians there.
    FORMULA_BAR: ClassVar[float] = 1e-3

    def __str__(self) -> str:
        return (
            f"off by {self.formula_error:.1e} from the formula; moves the output by {self.effect:.1e} in a forward "
            f"pass of {self.n_tokens} tokens"
        )

    def fault(self, name: str, summary: str) -> str | None:
        if not self.formula_error <= self.FORMULA_BAR:
            return f"{name} does not do what {summary!r} says: it is {self.formula_error:.1e} off the formula."
        if not self.effect > 0:
            return f"{summary} changes nothing in the output of {name}."
        return None
