"""Read a model's context from its config, without model or weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, cast

from ctxext.encodings.rope import RopeGeometry
from ctxext.methods import RopeMethod, method_from_dict, yarn_growth
from ctxext.models.checkpoints import Checkpoint, known_checkpoint
from ctxext.models.config_fields import check_config
from ctxext.models.families import family_of
from ctxext.models.metadata import Lengths, live_mark, summary_of
from ctxext.models.rope_tables import RopeTable, head_dim, length_limit, rope_tables
from ctxext.models.text_config import text_config_of
from ctxext.utils.values import MAX_TOKENS, is_count, reached, shown


@dataclass(frozen=True)
class ContextFacts:
    """The context of a (text) config.

    Attributes:
        whole_parameters: `rope_parameters` of the config, possibly nested.
        tables: the tables they describe, those of the layers with the largest window first.
        lengths: the model's maximum, start and trained lengths.
        trained_length_source: the source of `lengths.trained`.
        scaling: the scaling in use; None for plain RoPE.
        original_thetas: the unscaled base of each table, by label.
        softmax_factor: the current softmax scale is a plain model's times the square of this.
    """

    text_config: Any
    whole_parameters: dict[str, Any]
    tables: tuple[RopeTable, ...]
    lengths: Lengths
    trained_length_source: str
    original_thetas: dict[str, float]
    softmax_factor: float
    scaling: RopeMethod | None
    mark: dict[str, Any] | None
    checkpoint: Checkpoint | None

    @property
    def is_scaled(self) -> bool:
        """Whether its RoPE is already scaled, natively or by ctxext."""
        return self.scaling is not None or self.mark is not None

    @property
    def trained_length(self) -> int:
        return self.lengths.trained

    @property
    def reach(self) -> int:
        """The maximum length, beyond the trained length if scaling was added without training."""
        return self.lengths.target

    @property
    def original_length(self) -> int | None:
        return self.lengths.original

    @property
    def summary(self) -> str:
        """`yarn ×4: 512 → 2,048 tokens` for an extension; only the name for native scaling."""
        name = "plain RoPE" if self.scaling is None else self.scaling.title
        if self.mark is not None:
            return summary_of(None if self.mark["existing"] == "keep" else name, self.lengths)
        if self.original_length is None:
            return f"{name}: {self.reach:,} tokens"
        return f"{name}: {self.lengths.words}"

    def seen_beyond(self, length: int) -> tuple[RopeTable, ...]:
        """The tables of layers whose window exceeds `length` tokens, which an extension changes."""
        return tuple(table for table in self.tables if table.window is None or table.window > length)

    def rope_of(self, table: RopeTable) -> RopeGeometry:
        """The frequencies in use, with their maximum length."""
        return replace(table.in_use, original_max_position_embeddings=self.reach)

    def original_rope_of(self, table: RopeTable) -> RopeGeometry:
        """The unscaled frequencies."""
        return table.plain(self.original_thetas[table.label], self.original_length or self.reach)

    # Of the first table:

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return self.tables[0].parameters

    @property
    def rotary_dim(self) -> int:
        return self.tables[0].rotary_dim

    @property
    def original_theta(self) -> float:
        return self.original_thetas[self.tables[0].label]

    @property
    def rope(self) -> RopeGeometry:
        return self.rope_of(self.tables[0])

    @property
    def original_rope(self) -> RopeGeometry:
        return self.original_rope_of(self.tables[0])


def has_rope(text_config: Any) -> bool:
    """Whether a config's model uses RoPE; if a family supports both RoPE and ALiBi, ALiBi takes precedence."""
    parameters = getattr(text_config, "rope_parameters", None) or family_of(text_config).sin_cos_tables
    return bool(parameters) and not getattr(text_config, "alibi", False)


def no_encoding(text_config: Any) -> str | None:
    """Why a family without position encoding cannot be extended; None for all others."""
    if not family_of(text_config).no_positions:
        return None
    return (
        "has no position encoding with a length limit, so there is nothing to extend: just raise the limit (the "
        "tokenizer's model_max_length, or your server's maximum length)."
    )


def check_trained_length(length: int | None) -> None:
    """Raise ValueError unless `length` is None or a valid trained length in tokens."""
    if length is not None and not is_count(length, 8, MAX_TOKENS):
        raise ValueError(
            f"original_max_position_embeddings must be the trained length in tokens (an int from 8 to {MAX_TOKENS}), "
            f"got {shown(length)}."
        )


def read_context(config: Any, original_max_position_embeddings: int | None = None) -> ContextFacts:
    """Read a config.

    Args:
        original_max_position_embeddings: the trained length before any scaling, where the config and the table of known
            checkpoints are wrong.

    Raises:
        ValueError: the config has no standard RoPE.
    """
    check_config(config)
    check_trained_length(original_max_position_embeddings)
    text_config = text_config_of(config)
    name = f"{type(text_config).__name__} (model_type {text_config.model_type!r})"
    reason = no_encoding(text_config) or family_of(text_config).refuse
    if reason is not None:
        raise ValueError(f"{name} {reason}")
    whole = getattr(text_config, "rope_parameters", None)
    if family_of(text_config).sin_cos_tables:
        whole = _sin_cos_parameters(text_config)
    if not whole:
        raise ValueError(f"{name} has no rotary position embedding: its config holds no rope_parameters.")
    tables = rope_tables(text_config, whole)
    if not tables:
        raise ValueError(f"{name} has no layer with RoPE.")
    mark = live_mark(text_config)
    scaled = next((table for table in tables if table.scaling is not None), tables[0])
    parameters = tables[0].parameters
    checkpoint = known_checkpoint(text_config, parameters)
    limit = length_limit(text_config)
    thetas = {table.label: float(table.parameters["rope_theta"]) for table in tables}
    if mark is not None:
        try:
            scaling = None if mark["method"] is None else cast(RopeMethod, method_from_dict(mark["method"]))
        except ValueError:  # not registered here: the `longrope` that it was saved as
            scaling = tables[0].scaling
        theta = mark["original"].get("rope_theta", {})
        thetas = theta if isinstance(theta, dict) else {"": theta}
        if not {table.label for table in tables} <= thetas.keys():
            raise ValueError(
                f"{name}: ctxext.original.rope_theta in its config must hold the base of every table, got {theta!r}. "
                "Restore it, or extend the original model again."
            )
        lengths, source = Lengths.of_mark(mark), "the config's extension metadata"
        if original_max_position_embeddings is not None:
            lengths = replace(lengths, original=original_max_position_embeddings)
    else:
        scaling = scaled.scaling
        lengths, source = _native_lengths(scaled, limit, checkpoint, original_max_position_embeddings)
    return ContextFacts(
        text_config=text_config,
        whole_parameters=copy.deepcopy(whole),
        tables=tables,
        lengths=lengths,
        trained_length_source=source,
        original_thetas=thetas,
        softmax_factor=softmax_factor_of(text_config, parameters),
        scaling=scaling,
        mark=mark,
        checkpoint=checkpoint,
    )


def _native_lengths(
    table: RopeTable, limit: int, checkpoint: Checkpoint | None, given: int | None
) -> tuple[Lengths, str]:
    """The lengths of a model that ctxext did not extend, and the source of its trained length.

    Args:
        table: the scaled table, if any.
        given: the trained length before any scaling that the caller passed.
    """
    trained, source = limit, "max_position_embeddings of the config"
    if checkpoint is not None:
        trained, source = checkpoint.trained_length, f"checkpoints.toml: {checkpoint.name}"
    scaling, own = table.scaling, table.parameters.get("original_max_position_embeddings")
    if scaling is None:
        if given is not None:
            trained, source = given, "given or saved as original_max_position_embeddings="
        return Lengths(original=trained, trained=trained, start=trained, target=trained, factor=1.0), source
    bolted_on = checkpoint is not None and checkpoint.scaling == "bolted-on"
    original = own
    if scaling.of_the_call:  # transformers' dynamic scaling counts from max_position_embeddings
        original = limit
    if bolted_on:  # its weights were trained with unscaled frequencies only
        original = trained
    elif checkpoint is not None and checkpoint.original_length is not None:
        original = checkpoint.original_length
    original = given or original
    reach = limit if bolted_on else trained
    is_linear = table.parameters.get("rope_type") == "linear" and own is not None
    if (is_linear or table.parameters.get("rope_type") == "yarn") and limit <= (own or trained):
        # As in Qwen with YaRN enabled, or linear scaling for vLLM: no field holds the extended length.
        reach = max(reach, reached(scaling.factor, own or trained))
    start = original or reach
    return Lengths(original=original, trained=trained, start=start, target=reach, factor=reach / start), source


def _sin_cos_parameters(text_config: Any) -> dict[str, Any]:
    """The RoPE of GPT-J and CodeGen, which is in their code instead of the config."""
    n = text_config.rotary_dim or text_config.hidden_size
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": n / (head_dim(text_config) or n)}


def softmax_factor_of(text_config: Any, parameters: dict[str, Any]) -> float:
    """The square root of the factor of `mscale_all_dim` on the softmax scale."""
    if not family_of(text_config).softmax_mscale or parameters.get("rope_type", "default") == "default":
        return 1.0
    factor = parameters.get("factor") or 1.0
    return yarn_growth(factor, parameters.get("mscale_all_dim") or 0.0)
