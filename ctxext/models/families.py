"""How families deviate from the standard structure. Add a family here.

Families are detected by structure (`ctxext.patches`), so most need no row. A row holds the deviations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The deviations of a family.

    Attributes:
        rope_types: the only `rope_type`s that the family's config accepts; None for all. Other methods are written as
            `longrope`; if that is not accepted either, only the live tables are changed, which config.json cannot
            express.
        refuse: why a model of this family is not extended.
        rope_window: if only sliding-window layers have RoPE, the field with their window; a config without it has no
            such layers.
        sin_cos_tables: every attention layer holds a table of sines and cosines with base 10000, and the config has no
            RoPE fields.
        window_labels: keys of nested `rope_parameters`, besides those with "sliding", whose layers have a window.
        softmax_mscale: the softmax scale takes `mscale_all_dim` (multi-head latent attention), and so does an
            attention factor.
        mscale_keys: parameters that multiply cos and sin instead of `attention_factor`.
        norm_after_rope: queries and keys are normalised after rotation, so an attention factor has no effect (unless
            the config sets use_qk_norm=False).
        no_positions: the family has no position encoding with a length limit.
        version_4_names: keys of `rope_parameters` with another top-level name in transformers 4.
    """

    rope_types: frozenset[str] | None = None
    refuse: str | None = None
    rope_window: str | None = None
    sin_cos_tables: bool = False
    window_labels: frozenset[str] = frozenset()
    softmax_mscale: bool = False
    mscale_keys: tuple[str, ...] = ()
    norm_after_rope: bool = False
    no_positions: bool = False
    version_4_names: dict[str, str] = field(default_factory=dict)


STANDARD = Family()

_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}

# fmt: off
FAMILIES: dict[str, Family] = {
    # Its config rewrites "yarn" to "longrope" and accepts nothing else (Phi3Config.validate_rope).
    "phi3": Family(rope_types=frozenset({"default", "longrope"})),
    "phi4_multimodal": Family(rope_types=frozenset({"default", "longrope"})),
    "gpt_neox": Family(version_4_names=_NEOX_NAMES),
    "gpt_neox_japanese": Family(version_4_names=_NEOX_NAMES),
    # Its forward recomputes the table from the config, ignores the long factors, and multiplies by these.
    "phimoe": Family(mscale_keys=("short_mscale", "long_mscale")),
    # Its theta is also in layer_rope_theta, so a raised rope_theta would be ignored.
    **{name: Family(rope_types=frozenset({"linear", "yarn", "llama3", "longrope"})) for name in (
        "granite_swa", "granitemoe_swa",
    )},
    "recurrent_gemma": Family(rope_types=frozenset({"default"})),
    "ernie4_5_vl_moe": Family(rope_types=frozenset({"default"})),
    "cosmos3_edge": Family(rope_types=frozenset({"default"})),
    "blt": Family(
        refuse="consists of four models, each with its own rope_parameters, length and positions (bytes or patches)"
    ),
    "t5_gemma_module": Family(
        refuse="is half of an encoder-decoder, and each half has its own rope_parameters and length: only one of them "
        "would be extended"
    ),
    "gptj": Family(sin_cos_tables=True),
    "codegen": Family(sin_cos_tables=True),
    "deepseek_v4": Family(window_labels=frozenset({"main"})),
    "encoder-decoder": Family(refuse="consists of two models: extend its encoder and its decoder separately"),
    "speech-encoder-decoder": Family(refuse="consists of two models: extend its decoder separately"),
    # Its default table covers the whole head and ignores partial_rotary_factor.
    "mistral4": Family(
        rope_types=frozenset({"linear", "yarn", "llama3", "longrope"}),
        softmax_mscale=True,
    ),
    **{name: Family(softmax_mscale=True) for name in (
        "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
        "hy_v4", "longcat_flash", "minicpm3", "mistral_large4", "youtu",
    )},
    **{name: Family(norm_after_rope=True) for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat")},
    "llama4": Family(norm_after_rope=True, rope_window="attention_chunk_size"),
    **{name: Family(rope_window="sliding_window") for name in (
        "afmoe", "cohere2", "exaone4", "exaone4_5", "exaone_moe", "flint", "kolibri1", "muse_glimmer", "muse_spark",
    )},
    **{name: Family(no_positions=True) for name in (
        "jamba", "kimi_linear", "zamba", "nemotron_h", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm",
    )},
}
# fmt: on


def is_encoder(config: Any) -> bool:
    """Whether transformers has masked language models of this type, but no causal ones (ModernBERT)."""
    from transformers.models.auto import modeling_auto

    masked, causal = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return config.model_type in masked and config.model_type not in causal


def family_of(text_config: Any) -> Family:
    """The row of a text config's model type."""
    return FAMILIES.get(text_config.model_type.removesuffix("_text"), STANDARD)
