"""What a person wants to know of a model before choosing how to extend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxext.configs import Checkpoint, attention_layers, head_dim, plan_extension, read_context
from ctxext.families import family_of

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ContextDescription:
    """The answer of `describe_context`. `print` it, or read its fields.

    Attributes:
        encoding: "rope", or what stands in its place; there the fields that RoPE has are None.
        rope_theta: the base in the config.
        rotary_dim, head_dim: rotary dimensions of a head, and all of them.
        trained_length: tokens, with `trained_length_source` saying where that number comes from.
        scaling: the method in use, None for plain RoPE.
        reach: tokens that the model covers as it is.
        checkpoint: what is known of this published model.
        target_length: tokens that was asked about.
        kv_cache_bytes: of one sequence of `target_length` tokens, in `kv_dtype`.
        would_do: what `extend_context` would do for that target, or why it refuses.
    """

    model_type: str
    encoding: str
    rope_theta: float | None
    rotary_dim: int | None
    head_dim: int | None
    trained_length: int | None
    trained_length_source: str
    scaling: dict[str, Any] | None
    reach: int | None
    checkpoint: Checkpoint | None
    target_length: int | None
    kv_cache_bytes: int | None
    kv_dtype: str
    would_do: str

    def rows(self) -> list[tuple[str, str]]:
        """The description as (label, value) pairs, in the order in which a person reads them."""
        rows = [("model type", self.model_type), ("position encoding", self.encoding)]
        if self.encoding == "rope":
            assert self.rope_theta is not None
            rows += [
                ("rope theta", f"{self.rope_theta:g}"),
                ("rotary dimensions", f"{self.rotary_dim} of {self.head_dim} a head"),
                ("trained length", f"{self.trained_length:,} tokens ({self.trained_length_source})"),
                ("scaling in use", _scaling_words(self.scaling, self.checkpoint)),
                ("reach as it is", f"{self.reach:,} tokens"),
            ]
        if self.checkpoint is not None:
            recipe = self.checkpoint.recipe
            words = ", ".join(f"{key} {value}" for key, value in recipe.items()) if recipe else "none published"
            rows += [("known as", self.checkpoint.name), ("vendor's recipe", words), ("source", self.checkpoint.source)]
            if self.checkpoint.note:
                rows.append(("note", self.checkpoint.note))
        if self.kv_cache_bytes is not None:
            large = self.kv_cache_bytes >= 2**30
            size = f"{self.kv_cache_bytes / 2**30:.2f} GiB" if large else f"{self.kv_cache_bytes / 2**20:.1f} MiB"
            rows.append((f"KV cache at {self.target_length:,}", f"{size} a sequence in {self.kv_dtype}"))
        return [*rows, ("extend_context would", self.would_do)]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _encoding_without_standard_rope(text_config: Any) -> str:
    if family_of(text_config).no_positions:
        return "none"
    return "rope, one table for each layer type" if getattr(text_config, "rope_parameters", None) else "not rope"


def _scaling_words(scaling: dict[str, Any] | None, checkpoint: Checkpoint | None) -> str:
    if scaling is None:
        return "none"
    how = f", {checkpoint.scaling}" if checkpoint is not None and checkpoint.scaling != "none" else ""
    return f"{scaling['name']} ×{scaling['factor']:g}{how}"


def kv_cache_bytes(text_config: Any, n_tokens: int, bytes_each: int) -> int:
    """Bytes of the KV cache of one sequence; sliding layers count their window, linear attention nothing."""
    window = getattr(text_config, "sliding_window", None)
    if getattr(text_config, "kv_lora_rank", None):  # multi-head latent attention: one latent and one rotary key
        numbers = text_config.kv_lora_rank + text_config.qk_rope_head_dim
    else:
        heads = text_config.num_attention_heads
        numbers = 2 * (getattr(text_config, "num_key_value_heads", None) or heads) * head_dim(text_config)
    tokens = sum(
        min(n_tokens, window or n_tokens) if layer == "sliding_attention" else n_tokens
        for layer in attention_layers(text_config)
    )
    return tokens * numbers * bytes_each


def describe(config: Any, factor: float | None, target_length: int | None, **options: Any) -> ContextDescription:
    """See `ctxext.describe_context`."""
    text_config = config.get_text_config(decoder=True)
    dtype = str(getattr(text_config, "dtype", None) or getattr(config, "dtype", None) or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    original = options.get("original_max_position_embeddings")
    try:
        facts = read_context(config, original)
    except ValueError as error:
        return ContextDescription(
            model_type=text_config.model_type,
            encoding=_encoding_without_standard_rope(text_config),
            rope_theta=None,
            rotary_dim=None,
            head_dim=None,
            trained_length=None,
            trained_length_source="",
            scaling=None,
            reach=None,
            checkpoint=None,
            target_length=None,
            kv_cache_bytes=None,
            kv_dtype=dtype,
            would_do=f"refuse: {error}",
        )
    try:
        plan = plan_extension(config, factor, target_length=target_length, **options)
        target, would_do = plan.target_length, plan.summary
        if plan.is_late:
            would_do += ", rotating inside attention: no config can say it, ctxext.load brings it back"
    except ValueError as error:
        target, would_do = target_length or round((factor or 4) * facts.reach), f"refuse: {error}"
    return ContextDescription(
        model_type=text_config.model_type,
        encoding="rope",
        rope_theta=facts.rope_parameters["rope_theta"],
        rotary_dim=facts.rotary_dim,
        head_dim=head_dim(text_config),
        trained_length=facts.trained_length,
        trained_length_source=facts.trained_length_source,
        scaling=None if facts.scaling is None else facts.scaling.to_dict(),
        reach=facts.reach,
        checkpoint=facts.checkpoint,
        target_length=target,
        kv_cache_bytes=kv_cache_bytes(text_config, target, BYTES.get(dtype, 2)),
        kv_dtype=dtype,
        would_do=would_do,
    )
