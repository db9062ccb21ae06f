"""Sinusoidal tables that grow on demand: M2M-100, NLLB-MoE, XGLM, speech-to-text and FSMT.

Such a module computes a longer table when a position exceeds it. Sines stored as weights are in `position_table.py`.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding
from ctxext.core.plan import DEFAULT_METHODS
from ctxext.encodings.sinusoidal import Layout, sinusoidal_table
from ctxext.methods import ContextMethod, PositionScaling
from ctxext.patches.module_patch import ModulePatch, stated_length


class Sines(NamedTuple):
    """The row layout of a family.

    Attributes:
        origin: the row of the first token.
        layout: the order of sines and cosines.
        cosines_first: whether cosines come first, as in MusicGen.
    """

    origin: int
    layout: Layout
    cosines_first: bool

    def rows(self, positions: Shaped[Tensor, "*batch"], dim: int) -> Float64[Tensor, "*batch dim"]:
        """The rows for `positions`, in the family's numbering."""
        table = sinusoidal_table(positions, dim, layout=self.layout)
        return table.roll(dim // 2, dims=-1) if self.cosines_first else table


class ScaledRows:
    """Mixin for a table's class: computes its rows at the method's positions, however far it grows."""

    scaling: PositionScaling
    sines: Sines

    def get_embedding(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> Float[Tensor, "row dim"]:
        row = torch.arange(num_embeddings, dtype=torch.float64)
        origin = self.sines.origin
        # The rows before the first token's are for padding.
        position = torch.where(row < origin, row, origin + self.scaling.positions((row - origin).clamp(min=0)))
        table = self.sines.rows(position, embedding_dim)
        if padding_idx is not None:
            table[padding_idx] = 0
        return table.to(torch.get_default_dtype())


class ScaleRows(ModulePatch["GrowingTable", PositionScaling]):
    """The tables, however far they grow, hold the sines at the method's positions."""

    def write(self, edit: Edit, before: Any) -> None:
        for path, name, sines in self.encoding.tables:
            edit.exchange_class(path, ScaledRows)
            edit.set_attribute(path, "scaling", self.method)
            edit.set_attribute(path, "sines", sines)
            module: Any = edit.model.get_submodule(path)
            # As many rows as a model of the extended config, even if the table grew earlier: FSMT saves them.
            n_rows = sines.origin + self.target_length
            rows = module.get_embedding(n_rows, module.embedding_dim, getattr(module, "padding_idx", None))
            edit.set_tensor(path, name, rows.to(getattr(module, name).dtype))

    def watched(self, model: nn.Module) -> list[tuple[str, str | None]]:
        return [(path, None) for path in self.encoding.paths]

    def error(self, model: nn.Module, seen: list[list[Any]], held: Any) -> float:
        worst = 0.0 if any(seen) else float("inf")
        for (path, name, sines), calls in zip(self.encoding.tables, seen):
            table: Tensor = getattr(model.get_submodule(path), name)
            positions = sines.origin + self.method.positions(torch.arange(self.n_probe, dtype=torch.float64))
            want = sines.rows(positions, table.shape[-1]).to(table.device, table.dtype)
            # The module's output, or its table if the probe does not run it (a speech encoder).
            for rows in (*calls, table[sines.origin :]):
                worst = max(worst, float((rows.reshape(-1, rows.shape[-1])[: self.n_probe] - want).abs().max()))
        return worst


@dataclass(frozen=True)
class GrowingTable(ModuleEncoding):
    """Modules that recompute their own table: `tables` holds the path, the name of the table and its layout of each."""

    name: ClassVar[str] = "sinusoidal"
    mechanism = ScaleRows
    why_not_portable: ClassVar[str | None] = "its sinusoidal table is recomputed and depends on no parameter"

    tables: tuple[tuple[str, str, Sines], ...]

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        assert isinstance(method, PositionScaling)
        positions = torch.linspace(0, target_length - 1, 1024, dtype=torch.float64)
        if torch.equal(method.positions(positions), positions):
            raise ValueError(
                f"{method.name} changes nothing in this model, which computes more rows of the same sines for any "
                f"longer input. Use the model unextended, or {DEFAULT_METHODS[self.name]!r}."
            )
        return super().updates(method, target_length)


@dataclass(frozen=True)
class SavedGrowingTable(GrowingTable):
    """FSMT's tables, which are parameters and saved with the weights."""

    why_not_portable: ClassVar[str | None] = None
    changes_weights: ClassVar[bool] = True

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        return (
            "Reloaded without ctxext, its tables hold the extended rows, but grow beyond the target length without "
            "the method. Save before any sequence exceeds that length: transformers cannot load a grown table.",
        )


def find(model: nn.Module, text_config: Any) -> GrowingTable | None:
    """Modules with the methods `get_embedding` and `make_weights` (FSMT: `make_weight`), and a table of sines."""
    stated = stated_length(text_config, "max_position_embeddings", "max_target_positions")
    tables = tuple((path, *table) for path, module in model.named_modules() if (table := _table_of(module)) is not None)
    if not tables or not stated:
        return None
    saved = any(name in model.get_submodule(path)._parameters for path, name, _ in tables)
    paths = tuple(path for path, *_ in tables)
    return (SavedGrowingTable if saved else GrowingTable)(paths=paths, tables=tables, **stated)


def _table_of(module: Any) -> tuple[str, Sines] | None:
    makers = {"make_weights": "weights", "make_weight": "weight"}
    name = next((table for maker, table in makers.items() if hasattr(module, maker) and hasattr(module, table)), None)
    if name is not None and isinstance(module, ScaledRows):
        return name, module.sines
    # A table without a known width cannot grow, such as TIPSv2's.
    if name is None or not hasattr(module, "get_embedding") or not hasattr(module, "embedding_dim"):
        return None
    counts_tokens = hasattr(module, "create_position_ids_from_input_ids") or hasattr(module, "make_positions")
    origin = module.padding_idx + 1 if counts_tokens else getattr(module, "offset", 0)
    no_padding = (None,) if "padding_idx" in inspect.signature(module.get_embedding).parameters else ()
    with torch.device("cpu"):  # The default device may be meta here.
        stock = type(module).get_embedding(8, module.embedding_dim, *no_padding).double()
        for layout, cosines_first in itertools.product(get_args(Layout), (False, True)):
            sines = Sines(origin, layout, cosines_first)
            if torch.allclose(stock, sines.rows(torch.arange(len(stock)), module.embedding_dim), atol=1e-4):
                return name, sines
    return None
