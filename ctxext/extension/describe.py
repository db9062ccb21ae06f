"""Describe a model's context, and what extending it would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from ctxext.core.encoding import ModuleEncoding
from ctxext.core.plan import ENCODINGS, Plan
from ctxext.extension.request import check_on_paper, encoding_of, plan_extension
from ctxext.models.checkpoints import Checkpoint
from ctxext.models.config_fields import check_config
from ctxext.models.context import ContextFacts, has_rope, no_encoding, read_context
from ctxext.models.families import is_encoder
from ctxext.models.metadata import Lengths, live_mark, summary_of
from ctxext.models.rope_tables import attention_layers, head_dim, key_value_heads, span_of
from ctxext.models.text_config import text_config_of
from ctxext.utils.values import MAX_FACTOR, MAX_TOKENS, is_count, is_number, size_in_words

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """The RoPE in effect in the layers of one type.

    Attributes:
        n_layers: the number of these layers.
        window: their sliding window in tokens; None for full attention.
        rope_theta: their base in the config.
        scaling: a summary of their scaling or extension; "plain RoPE" if there is none.
    """

    name: str
    n_layers: int
    window: int | None
    rope_theta: float
    scaling: str

    def __str__(self) -> str:
        window = "" if self.window is None else f"window of {self.window:,} tokens, "
        return f"{self.n_layers} layer{'s' * (self.n_layers > 1)}, {window}theta {self.rope_theta:g}, {self.scaling}"


@dataclass(frozen=True, kw_only=True)
class ContextDescription:
    """The answer of `describe_context`. `print` it, or read its fields.

    Attributes:
        encoding: "rope", "alibi", "learned", "sinusoidal", "t5", "relative", "none" or "unknown"; fields that only
            apply to RoPE are None for the others.
        rope_theta: the base in the config.
        rotary_dim, head_dim: the rotary dimensions of a head, and all its dimensions.
        trained_length: in tokens; `trained_length_source` says where that number comes from.
        original_length: trained length in tokens before any scaling; None if unknown.
        scaling: the method in use, None for plain RoPE.
        summary: the extension in place, such as `yarn ×4: 512 → 2,048 tokens`; "" for plain RoPE.
        layer_types: the RoPE of each type of layer; () if all layers with RoPE are of one type.
        reach: the model's maximum context length in tokens; None if it has no hard limit (quality may still drop).
        checkpoint: what the table of known checkpoints says about this model.
        target_length: the target in tokens that was asked about.
        kv_cache_bytes: of one sequence of `target_length` tokens, in `kv_dtype`.
        would_do: what `extend_context` would do for that target, or why it refuses.
        notes: notes on that for the user, a sentence each.
    """

    model_type: str
    encoding: str
    rope_theta: float | None = None
    rotary_dim: int | None = None
    head_dim: int | None = None
    trained_length: int | None = None
    trained_length_source: str = ""
    original_length: int | None = None
    scaling: dict[str, Any] | None = None
    summary: str = ""
    layer_types: tuple[LayerType, ...] = ()
    reach: int | None = None
    checkpoint: Checkpoint | None = None
    target_length: int | None = None
    kv_cache_bytes: int | None = None
    kv_dtype: str
    would_do: str
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """The description as (label, value) pairs, in reading order."""
        rows = [("model type", self.model_type), ("position encoding", ENCODINGS.get(self.encoding, self.encoding))]
        if self.rope_theta is not None:
            rows += [
                ("rope theta", f"{self.rope_theta:g}"),
                ("rotary dimensions", f"{self.rotary_dim} of {self.head_dim} per head"),
            ]
        if self.trained_length is not None:
            rows += [("trained length", f"{self.trained_length:,} tokens ({self.trained_length_source})")]
            rows += [("scaling in use", self._scaling_words())]
            rows += [(f"  {layers.name}", str(layers)) for layers in self.layer_types]
            rows += [("maximum context length", "no limit" if self.reach is None else f"{self.reach:,} tokens")]
        if self.checkpoint is not None:
            recipe = self.checkpoint.recipe
            words = ", ".join(f"{key} {value}" for key, value in recipe.items()) if recipe else "none published"
            rows += [("known as", self.checkpoint.name), ("vendor's recipe", words), ("source", self.checkpoint.source)]
            if self.checkpoint.note:
                rows.append(("note", self.checkpoint.note))
        if self.kv_cache_bytes is not None:
            size = size_in_words(self.kv_cache_bytes)
            rows.append((f"KV cache at {self.target_length:,}", f"{size} per sequence in {self.kv_dtype}"))
        return [*rows, ("extend_context would", self.would_do), *(("", f"note: {note}") for note in self.notes)]

    def _scaling_words(self) -> str:
        if self.scaling is None:
            return "none"
        how = f", {self.checkpoint.scaling}" if self.checkpoint and self.checkpoint.scaling != "none" else ""
        if self.original_length is None:
            return f"{self.summary}{how}; original length unknown"
        origin = f"; {self.original_length:,} before any scaling" if self.original_length != self.trained_length else ""
        return f"{self.summary}{how}{origin}"

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


# Their layers without a window have no RoPE either, which no field of their configs says.
_PARTLY_ROPE = ("cohere2", "exaone4", "exaone_moe", "flint", "kolibri1")


def _layer_types(facts: ContextFacts) -> tuple[LayerType, ...]:
    config, found = facts.text_config, []
    if config.model_type.startswith(_PARTLY_ROPE) or getattr(config, "no_rope_layers", None):
        return ()
    layers, tables = Counter(attention_layers(config)), {table.label: table for table in facts.tables}
    for name, n_layers in layers.items():
        table = tables.get(name, tables.get(""))
        if table is None or len(layers) == 1:  # some families name their tables otherwise
            return ()
        window = table.window
        if not table.label and name == "sliding_attention":
            window = config.sliding_window
        # Within attention each layer has a rotation of its own; otherwise layers that share a table are scaled alike.
        in_attention = facts.scaling is not None and facts.scaling.in_attention
        over = window if in_attention else table.window
        scaling = "plain RoPE" if table.scaling is None else table.scaling.title
        if facts.mark is not None and (over is None or over > facts.lengths.start):
            scaling = facts.summary
        theta = float(table.parameters["rope_theta"])
        found.append(LayerType(name=name, n_layers=n_layers, window=window, rope_theta=theta, scaling=scaling))
    return tuple(found)


def kv_cache_bytes(text_config: Any, n_tokens: int, bytes_each: int) -> int | None:
    """Bytes of the KV cache of one sequence; None for an encoder, which has none.

    Sliding layers count their window; linear attention and layers that share another layer's keys count nothing.
    """
    if is_encoder(text_config):
        return None
    total, layers = 0, attention_layers(text_config)
    for layer in layers[: len(layers) - (getattr(text_config, "num_kv_shared_layers", None) or 0)]:
        several = getattr(text_config, "is_heterogeneous", False)  # sizes differ between layer types
        config = text_config.per_layer_config[layer] if several else text_config
        window = span_of(config, layer) or n_tokens
        if getattr(config, "kv_lora_rank", None):  # multi-head latent attention caches one latent and one rotary key
            numbers = config.kv_lora_rank + config.qk_rope_head_dim
        else:
            numbers = 2 * key_value_heads(config) * head_dim(config)
        total += min(n_tokens, window) * numbers
    return total * bytes_each


def describe(
    config: Any,
    factor: float | None,
    target_length: int | None,
    *,
    model: Any = None,
    planned: Callable[..., Plan] | None = None,
    **options: Any,
) -> ContextDescription:
    """See `ctxext.describe_context`; `planned` plans the extension, by default `plan_extension` for `config`."""

    def planned_here(**how: Any) -> Plan:
        plan = plan_extension(config, model=model, **how)
        check_on_paper(config, plan, model)
        return plan

    planned = planned or planned_here
    check_config(config)
    text_config = text_config_of(config)
    dtype = str(getattr(text_config, "dtype", None) or getattr(config, "dtype", None) or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    common: dict[str, Any] = {"model_type": text_config.model_type, "kv_dtype": dtype}
    is_rope = has_rope(text_config)
    try:
        if is_rope:
            facts = read_context(config, options.get("original_max_position_embeddings"))
        else:
            found = cast(ModuleEncoding, encoding_of(config, model))
    except ValueError as error:
        encoding = "rope" if is_rope else "none" if no_encoding(text_config) else "unknown"
        return ContextDescription(**common, encoding=encoding, would_do=f"refuse: {error}")
    reach = facts.reach if is_rope else found.trained_length
    target, would_do, notes = _would_do(planned, reach, factor, target_length, **options)
    common |= {"target_length": target, "would_do": would_do, "notes": notes}
    if is_rope:
        return ContextDescription(
            **common,
            encoding="rope",
            rope_theta=facts.rope_parameters["rope_theta"],
            rotary_dim=facts.rotary_dim,
            head_dim=facts.tables[0].head_dim,
            trained_length=facts.trained_length,
            trained_length_source=facts.trained_length_source,
            original_length=facts.original_length,
            scaling=None if facts.scaling is None else facts.scaling.to_dict(),
            summary="" if facts.scaling is None else facts.summary,
            layer_types=_layer_types(facts),
            reach=facts.reach,
            checkpoint=facts.checkpoint,
            kv_cache_bytes=kv_cache_bytes(text_config, target, BYTES.get(dtype, 2)),
        )
    mark = live_mark(text_config)
    return ContextDescription(
        **common,
        encoding=found.name,
        trained_length=found.original_length(config),
        trained_length_source=found.source if mark is None else "before its extension by ctxext",
        original_length=found.original_length(config),
        scaling=None if mark is None else mark["method"],
        summary="" if mark is None else summary_of(mark["method"]["name"], Lengths.of_mark(mark)),
        reach=found.limit,
    )


def _would_do(
    planned: Callable[..., Plan], reach: int, factor: float | None, target_length: int | None, **options: Any
) -> tuple[int, str, tuple[str, ...]]:
    """The target in tokens, what extending would do, and notes on that."""
    try:
        plan = planned(factor=factor, target_length=target_length, **options)
    except ValueError as error:
        asked = target_length if is_count(target_length, 1, MAX_TOKENS) else None
        # Where nothing was asked for, the model's own length: it is extended already, say.
        times = factor if factor is not None and is_number(factor, 1, MAX_FACTOR) else 1
        return asked or round(times * reach), f"refuse: {error}", ()
    why = plan.why_not_portable
    how = "" if why is None else f"; config.json cannot express it because {why}: reload with ctxext.load"
    with_options = f", with {words}" if (words := plan.options_in_words) else ""
    return plan.target_length, plan.summary + with_options + how, plan.notes
