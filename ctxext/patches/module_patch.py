"""Base classes of the patches for encodings other than RoPE, verified by the tensors that modules pass on."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ctxext.core.patch import FormulaProof, Patch
from ctxext.core.probing import probe_inputs, run, seen_by

E = TypeVar("E")
M = TypeVar("M")


@dataclass(frozen=True)
class ModulePatch(Patch, Generic[E, M]):
    """Base of the patches of a `ModuleEncoding`."""

    encoding: E
    method: M
    target_length: int

    @property
    def n_probe(self) -> int:
        """Tokens of the forward pass before and after the change."""
        return 64

    def inputs(self, model: nn.Module, n_tokens: int) -> dict[str, Any]:
        """Inputs of the forward pass."""
        return probe_inputs(model, n_tokens)

    def held(self, model: nn.Module) -> Any:
        """What `error` needs to know of the unchanged model."""
        return None

    def watched(self, model: nn.Module) -> list[tuple[str, str | None]]:
        """The modules to watch: the path of each, and the keyword argument to record, or None for its output."""
        return []

    def error(self, model: nn.Module, seen: list[list[Any]], held: Any) -> float:
        """Largest difference from the method's formula; `seen` has the recorded calls of each watched module."""
        raise NotImplementedError

    def look(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[list[list[Any]], Tensor]:
        """Run the model: the calls of each watched module, and the output."""
        with ExitStack() as stack:
            seen = [stack.enter_context(seen_by(model, *where)) for where in self.watched(model)]
            return seen, run(model, inputs)

    def observe(self, model: nn.Module) -> Any:
        return self.held(model), run(model, self.inputs(model, self.n_probe))

    def prove(self, model: nn.Module, before: Any) -> FormulaProof:
        held, stock = before
        seen, output = self.look(model, self.inputs(model, self.n_probe))
        return FormulaProof(self.error(model, seen, held), float((output - stock).abs().max()), self.n_probe)


def stated_length(config: Any, *names: str) -> dict[str, Any]:
    """The fields of a `ModuleEncoding` for the first of `names` in which `config` holds a length in tokens, if any."""
    for name in names:
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return {"trained_length": length, "source": f"{name} of the config", "length_field": name}
    return {}


def published_length(length: int, source: str) -> dict[str, Any]:
    """The same for a model whose config holds none."""
    return {"trained_length": length, "source": f"as published: {source}"}
