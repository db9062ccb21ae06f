"""Sinusoidal tables that grow on demand: M2M-100, NLLB-MoE, XGLM, speech-to-text and FSMT.

Such a module computes a longer table when a position exceeds it. Sines stored as weights are in `position_table.py`.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding, stated_length
from ctxext.core.patch import FormulaProof, Patch
from ctxext.core.probing import probe_inputs, run, seen_by
from ctxext.encodings.sinusoidal import Layout, sinusoidal_table
from ctxext.methods import ContextMethod, PositionScaling

PROBE = 64  # tokens


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


@dataclass(frozen=True)
class GrowingTable(ModuleEncoding):
    """Modules that recompute their own table.

    Attributes:
        names: the name of the table in each of `paths`.
        sines: its layout.
        length_field: the config field with the trained length.
    """

    name: ClassVar[str] = "sinusoidal"
    default_method: ClassVar[str] = "sinusoidal_interpolation"
    why_not_portable: ClassVar[str | None] = "its table of sines is computed again, from no parameter"

    names: tuple[str, ...]
    sines: tuple[Sines, ...]
    length_field: str

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        return {self.length_field: target_length}

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        assert isinstance(method, PositionScaling)
        return ScaleRows(self, method, target_length)


@dataclass(frozen=True)
class SavedGrowingTable(GrowingTable):
    """FSMT's tables, which are parameters and saved with the weights."""

    why_not_portable: ClassVar[str | None] = None
    changes_weights: ClassVar[bool] = True

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        return (
            "Reloaded without ctxext, its tables hold the extended rows, and grow beyond the target length without "
            "the method. Save before a sequence is longer than that: transformers cannot load a table that has grown.",
        )


@dataclass(frozen=True)
class ScaleRows(Patch):
    """The tables, however far they grow, hold the sines at the method's positions."""

    encoding: GrowingTable
    method: PositionScaling
    target_length: int

    def write(self, edit: Edit, before: Any) -> None:
        for path, name, sines in self._tables:
            edit.exchange_class(path, ScaledRows)
            edit.set_attribute(path, "scaling", self.method)
            edit.set_attribute(path, "sines", sines)
            module: Any = edit.model.get_submodule(path)
            # As many as a model of the extended config has, even if it grew earlier: FSMT saves them.
            n_rows = sines.origin + self.target_length
            padding_idx = getattr(module, "padding_idx", None)
            rows = module.get_embedding(n_rows, module.embedding_dim, padding_idx)
            edit.set_tensor(path, name, rows.to(getattr(module, name).dtype))

    def observe(self, model: nn.Module) -> Tensor:
        return run(model, probe_inputs(model, PROBE))

    def prove(self, model: nn.Module, before: Tensor) -> FormulaProof:
        with ExitStack() as stack:
            seen = [stack.enter_context(seen_by(model, path)) for path in self.encoding.paths]
            effect = float((run(model, probe_inputs(model, PROBE)) - before).abs().max())
        error = 0.0 if any(seen) else float("inf")
        for (path, name, sines), calls in zip(self._tables, seen):
            table: Tensor = getattr(model.get_submodule(path), name)
            positions = sines.origin + self.method.positions(torch.arange(PROBE, dtype=torch.float64))
            want = sines.rows(positions, table.shape[-1]).to(table.device, table.dtype)
            # The module's output, or its table if the probe does not run it (a speech encoder).
            for rows in (*calls, table[sines.origin :]):
                error = max(error, float((rows.reshape(-1, rows.shape[-1])[:PROBE] - want).abs().max()))
        return FormulaProof(error, effect, PROBE)

    @property
    def _tables(self) -> list[tuple[str, str, Sines]]:
        return list(zip(self.encoding.paths, self.encoding.names, self.encoding.sines))


def find(model: nn.Module, text_config: Any) -> GrowingTable | None:
    """Modules with the methods `get_embedding` and `make_weights` (FSMT: `make_weight`), and a table of sines."""
    stated = stated_length(text_config, "max_position_embeddings", "max_target_positions")
    found = [(path, *table) for path, module in model.named_modules() if (table := _table_of(module)) is not None]
    if not found or stated is None:
        return None
    paths, names, sines = zip(*found)
    saved = any(name in model.get_submodule(path)._parameters for path, name in zip(paths, names))
    return (SavedGrowingTable if saved else GrowingTable)(
        paths=paths,
        trained_length=stated[1],
        source=f"{stated[0]} of the config",
        limit=None,
        names=names,
        sines=sines,
        length_field=stated[0],
    )


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
    with torch.device("cpu"):  # The default device may be meta here.
        stock = _stock_rows(type(module), module.embedding_dim)
        for layout in get_args(Layout):
            for cosines_first in (False, True):
                sines = Sines(origin, layout, cosines_first)
                if torch.allclose(stock, sines.rows(torch.arange(len(stock)), module.embedding_dim), atol=1e-4):
                    return name, sines
    return None


def _stock_rows(cls: Any, dim: int) -> Float64[Tensor, "row dim"]:
    """The first rows that a family's class computes, without padding rows."""
    no_padding = (None,) if "padding_idx" in inspect.signature(cls.get_embedding).parameters else ()
    rows: Tensor = cls.get_embedding(8, dim, *no_padding)
    return rows.double()
