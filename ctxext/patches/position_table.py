"""Position tables, added to the embeddings, one row per position: learned ones, and sinusoidal ones stored as weights.

Found by building the model from its config with larger limits: the tensor that grows is the table. Causal masks,
position ids and token types stored as buffers grow with it.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ctxext.core.edit import Edit
from ctxext.core.encoding import ModuleEncoding
from ctxext.core.patch import FormulaProof
from ctxext.core.probing import probe_inputs, run, seen_by
from ctxext.core.twin import Difference, differences, twin_of
from ctxext.encodings.sinusoidal import Layout, sinusoidal_table
from ctxext.methods import ContextMethod, PositionScaling, TableResizing
from ctxext.models.text_config import text_config_of
from ctxext.patches.module_patch import ModulePatch

# Config fields with a number of positions. The first that a model uses is its context; all grow by the same factor.
LIMITS = (
    "max_encoder_position_embeddings", "max_position_embeddings", "n_positions", "max_target_positions",
    "max_decoder_position_embeddings",
)  # fmt: skip
LONGEST_PROBE = 4096  # tokens; longer forward passes cost too much time and memory


@dataclass(frozen=True)
class Table:
    """The location of a table, and the config field that limits it.

    Attributes:
        first: the row of position 0, after the padding rows.
        limit: the field; `held` is its value, which counts the padding rows in some families.
        positions: the number of positions.
    """

    path: str
    name: str
    first: int
    limit: str
    held: int
    positions: int


class GrowTables(ModulePatch["TableEncoding", Any]):
    """The tables, and every buffer that grows with them, match the extended config."""

    def write(self, edit: Edit, before: list[Tensor]) -> None:
        model, encoding = edit.model, self.encoding
        tables = {(table.path, table.name): self._expected(table, old) for table, old in zip(encoding.tables, before)}
        for found in list(differences(twin_of(model, encoding.config), twin_of(model, model.config))):
            module, new = model.get_submodule(found.path), tables.get((found.path, found.name), found.after)
            if new is found.after and isinstance(new, Tensor):
                new = _regrown(found, getattr(module, found.name), getattr(encoding.config, "window_size", None))
            if found.kind != "attribute":
                edit.set_tensor(found.path, found.name, new)
            elif found.name in module.__dict__:  # BigBird replaces its attention at run time.
                held = module.__dict__[found.name]
                new = new.to(held.device, held.dtype) if isinstance(new, Tensor) else new
                edit.set_attribute(found.path, found.name, new)

    def observe(self, model: nn.Module) -> list[Tensor]:
        """The current tables."""
        return [_held(model, table).detach().clone() for table in self.encoding.tables]

    def prove(self, model: nn.Module, before: list[Tensor]) -> FormulaProof:
        trained = self.encoding.trained_length
        n_tokens = trained + 1 if trained <= LONGEST_PROBE else 16
        inputs = probe_inputs(model, n_tokens)
        error, effects = 0.0, []
        for table, old in zip(self.encoding.tables, before, strict=True):
            live = _held(model, table)
            expected = self._expected(table, old).to(live.dtype)
            same = live.shape == expected.shape
            error = max(error, float((live - expected).abs().max()) if same else float("inf"))
            with seen_by(model, table.path) as seen:
                output = run(model, inputs)
            if isinstance(model.get_submodule(table.path), nn.Embedding):
                if not seen:
                    continue  # for inputs other than tokens, e.g. LUKE's entities
                rows = next(tensor for tensor in tree_iter(seen[0]) if isinstance(tensor, Tensor))
                read = rows.reshape(-1, rows.shape[-1])[:n_tokens]
                error = max(error, float((read - expected[table.first :][: len(read)]).abs().max()))
            # A changed value in the last row that is read must reach the output.
            row = live.data[table.first + n_tokens - 1]
            kept = row.clone()
            # Not by a constant, which a norm would remove.
            row += torch.linspace(-1, 1, len(row), device=row.device, dtype=row.dtype)
            effects.append(float((run(model, inputs) - output).abs().max()))
            row.copy_(kept)
        return FormulaProof(error, min(effects, default=0.0), n_tokens)

    def _expected(self, table: Table, old: Tensor) -> Tensor:
        """The whole new table in float64: the unchanged padding rows, then those of the positions."""
        n_positions = self.encoding.n_positions(table, self.target_length)
        rows = self.encoding.rows(self.method, old[table.first :].double(), n_positions)
        return torch.cat([old[: table.first].double(), rows])


@dataclass(frozen=True)
class TableEncoding(ModuleEncoding):
    """The tables of a model; the first one's limit is its context.

    Attributes:
        saved: whether `save_pretrained` writes them.
        config: of the model, as it was found.
    """

    mechanism = GrowTables
    changes_weights: ClassVar[bool] = True

    tables: tuple[Table, ...]
    saved: bool
    config: Any = field(compare=False, repr=False)

    @property
    def why_not_portable(self) -> str | None:  # type: ignore[override]
        return None if self.saved else "its position table is not saved with the weights"

    @abstractmethod
    def rows(self, method: Any, table: Tensor, n_rows: int) -> Tensor:
        """The rows of positions 0 .. n_rows - 1, from the current rows; float64 in and out."""

    def n_positions(self, table: Table, target_length: int) -> int:
        """The number of positions of the new table; a second table of a field grows by as many as its first."""
        first = next(each for each in self.tables if each.limit == table.limit)
        return table.positions + round(first.positions * target_length / self.trained_length) - first.positions

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        fields = {}
        for table in self.tables:
            n_positions = self.n_positions(table, target_length)
            self.rows(method, torch.zeros(table.positions, 4, dtype=torch.float64), n_positions)  # or it raises
            fields[table.limit] = table.held - table.positions + n_positions
        return fields

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        return (
            "the longer table is a new parameter: build optimisers afterwards and train it, as its new rows are only "
            "derived from the old ones.",
        )


@dataclass(frozen=True)
class LearnedTable(TableEncoding):
    """Learned rows."""

    name: ClassVar[str] = "learned"

    def rows(self, method: TableResizing, table: Tensor, n_rows: int) -> Tensor:
        return method.rows(table, n_rows)


@dataclass(frozen=True)
class SinusoidalTable(TableEncoding):
    """Sines and cosines stored as weights or buffers."""

    name: ClassVar[str] = "sinusoidal"

    layout: Layout

    def rows(self, method: PositionScaling, table: Tensor, n_rows: int) -> Tensor:
        positions = method.positions(torch.arange(n_rows, dtype=torch.float64))
        return sinusoidal_table(positions, table.shape[-1], layout=self.layout).to(table.device)


def find(model: nn.Module, text_config: Any) -> TableEncoding | None:
    """The position tables of a model, or None. Raises ValueError if its tables are not those of its config."""
    tables: list[Table] = []
    frozen, stock = [], None
    for limit in LIMITS:
        held = text_config.__dict__.get(limit)
        if not isinstance(held, int) or held < 2:
            continue
        longer = copy.deepcopy(model.config)
        setattr(text_config_of(longer), limit, 2 * held)
        try:
            stock = twin_of(model, model.config) if stock is None else stock
            twin = twin_of(model, longer)
        except Exception:  # a limit tied to other fields, such as Reformer's axes
            continue
        for found in differences(stock, twin):
            before, after = found.before, found.after
            if not isinstance(before, Tensor) or before.ndim != 2 or not before.is_floating_point():
                continue
            n_rows, dim = before.shape
            # A module's second tensor is derived from the first (I-BERT's integers).
            if after.shape != (n_rows + held, dim) or any(table.path == found.path for table in tables):
                continue
            padding = getattr(model.get_submodule(found.path), "padding_idx", None)
            # RoBERTa and its derivatives count the padding rows in their limit; OPT and BART do not.
            first = n_rows - held or (0 if padding is None else padding + 1)
            table = Table(found.path, found.name, first, limit, held, n_rows - first)
            _check_held(model, table, before)
            tables.append(table)
            frozen.append(not after.requires_grad)
    if not tables:
        return None
    context = tables[0].positions
    layout = _layout(model, tables) if all(frozen) else None
    common: dict[str, Any] = {
        "paths": tuple(table.path for table in tables),
        "trained_length": context,
        "source": f"{tables[0].limit} of the config",
        "limit": context,
        "tables": tuple(tables),
        "saved": all(_is_saved(model, f"{table.path}.{table.name}") for table in tables),
        "config": model.config,
    }
    return LearnedTable(**common) if layout is None else SinusoidalTable(**common, layout=layout)


def _check_held(model: nn.Module, table: Table, expected: Tensor) -> None:
    """Raise ValueError unless the model's table has the length of its config and its own parameter."""
    held = getattr(model.get_submodule(table.path), table.name, None)
    if not isinstance(held, Tensor) or held.shape != expected.shape:
        got = "another object (an adapter?)" if held is None else f"one of shape {tuple(held.shape)}"
        raise ValueError(
            f"{table.limit}={table.held} in the config implies a position table of shape "
            f"{tuple(expected.shape)} at {table.path}.{table.name}, but the model holds {got}. Merge adapters, or "
            "correct the config."
        )


def _is_saved(model: Any, name: str) -> bool:
    """Whether `save_pretrained` writes a tensor; Marian omits its tables."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return name in model.state_dict() and not any(re.search(pattern, name) for pattern in ignored)


def _held(model: nn.Module, table: Table) -> Tensor:
    held: Tensor = getattr(model.get_submodule(table.path), table.name)
    return held


def _layout(model: nn.Module, tables: list[Table]) -> Layout | None:
    """The layout of sinusoidal tables; None if they are learned. On meta, the most common layout."""
    held = [_held(model, table).detach()[table.first :] for table in tables]
    if any(rows.device.type == "meta" for rows in held):
        return "halves"
    for layout in get_args(Layout):
        if all(
            torch.allclose(
                rows.double().cpu(),
                sinusoidal_table(torch.arange(len(rows)), rows.shape[1], layout=layout),
                atol=1e-2 if rows.dtype in (torch.float16, torch.bfloat16) else 1e-3,
            )
            for rows in held
        ):
            return layout
    return None


def _regrown(found: Difference, here: Tensor, window: int | None) -> Tensor:
    """A longer buffer of the same kind: position ids, token types, or a causal mask, banded by `window` tokens.

    Raises ValueError if it is of another kind, or its window only shows in the longer buffer.
    """
    shape = found.after.shape
    makes = {
        "positions in order": lambda shape: (torch.arange(shape[-1]) + int(here.flatten()[0])).expand(shape),
        "one value": lambda shape: here.flatten()[:1].cpu().expand(shape),
        "a triangle": lambda shape: torch.ones(shape).tril(),
        "a band": lambda shape: torch.ones(shape).tril() - torch.ones(shape).tril(-int(here[..., -1, :].sum())),
    }
    for name, make in makes.items():
        if here.shape == found.before.shape and torch.equal(make(here.shape).to(here.dtype), here.cpu()):
            if name == "a triangle" and window is not None and here.shape[-1] <= window < shape[-1]:
                raise ValueError(
                    f"{found.path}.{found.name} holds {here.shape[-1]} tokens, less than the window of {window}, so "
                    "layers with and without a window cannot be told apart."
                )
            return make(shape).to(here.dtype).contiguous()
    raise ValueError(
        f"{found.path}.{found.name} grows with the model's limit from {tuple(here.shape)} to {tuple(shape)}, but is "
        f"not one of {', '.join(makes)}. This family is not supported."
    )
