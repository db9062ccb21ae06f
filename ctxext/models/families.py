"""What the standard structure does not say of a family. Add a family here.

Families are found by structure (`ctxext.patches`), so most need no row. A row holds what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What is unusual about some model types.

    Attributes:
        rope_types: the only `rope_type`s that the family's config accepts; None for all. Other methods are written as
            `longrope`; where that is none of them either, live tables are changed, which config.json cannot express.
        refuse: why a model of this family is not extended.
        rope_window: the field with the window of the only layers that rotate, as all others have no positions; a config
            that leaves it out has no such layers.
        sin_cos_tables: every attention layer keeps a table of sines and cosines, of base 10000, and the config nothing.
        window_labels: keys of nested `rope_parameters`, beside those that say "sliding", whose layers see a window.
        softmax_mscale: the softmax scale takes `mscale_all_dim` (multi-head latent attention), and so does an
            attention factor.
        mscale_keys: parameters that multiply cos and sin instead of `attention_factor`.
        norm_after_rope: queries and keys are normalised after the rotation, so that an attention factor does nothing;
            unless the config has a use_qk_norm and says no.
        refuse_in_attention: why nothing can be rotated in attention in this family.
        no_positions: the family has no position encoding that could run out.
        version_4_names: keys of `rope_parameters` that transformers 4 knows by another name at the top level.
    """

    rope_types: frozenset[str] | None = None
    refuse: str | None = None
    rope_window: str | None = None
    sin_cos_tables: bool = False
    window_labels: frozenset[str] = frozenset()
    softmax_mscale: bool = False
    mscale_keys: tuple[str, ...] = ()
    norm_after_rope: bool = False
    refuse_in_attention: str | None = None
    no_positions: bool = False
    version_4_names: dict[str, str] = field(default_factory=dict)


STANDARD = Family()

_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_QUERIES = "scales its queries by position as well, from the same parameters"

# fmt: off
FAMILIES: dict[str, Family] = {
    # Its config rewrites "yarn" to "longrope" and accepts nothing else (Phi3Config.validate_rope).
    "phi3": Family(rope_types=frozenset({"default", "longrope"})),
    "phi4_multimodal": Family(rope_types=frozenset({"default", "longrope"})),
    "gpt_neox": Family(version_4_names=_NEOX_NAMES),
    "gpt_neox_japanese": Family(version_4_names=_NEOX_NAMES),
    # Its forward recomputes the table from the config, never from the long factors, and multiplies by these.
    "phimoe": Family(
        mscale_keys=("short_mscale", "long_mscale"),
        refuse_in_attention="recomputes its frequencies in every forward pass",
    ),
    # Its theta is in layer_rope_theta as well, so a raised one would not be read.
    **{name: Family(rope_types=frozenset({"linear", "yarn", "llama3", "longrope"})) for name in (
        "granite_swa", "granitemoe_swa",
    )},
    "recurrent_gemma": Family(rope_types=frozenset({"default"})),
    "ernie4_5_vl_moe": Family(rope_types=frozenset({"default"})),
    "cosmos3_edge": Family(rope_types=frozenset({"default"})),
    "blt": Family(
        refuse="is four models in one, each with rope_parameters, a length and positions (bytes or patches) of its own"
    ),
    "t5_gemma_module": Family(
        refuse="is half of an encoder-decoder whose halves have rope_parameters and a length each: one of them alone "
        "would be extended"
    ),
    "gptj": Family(sin_cos_tables=True),
    "codegen": Family(sin_cos_tables=True),
    "deepseek_v4": Family(window_labels=frozenset({"main"})),
    "encoder-decoder": Family(refuse="is two models: extend its encoder and its decoder, each by itself"),
    "speech-encoder-decoder": Family(refuse="is two models: extend its decoder by itself"),
    # Queries are scaled by a function of position and original_max_position_embeddings as well.
    "ministral3": Family(refuse_in_attention=_QUERIES),
    # Its default table is as wide as the whole head, whatever partial_rotary_factor says.
    "mistral4": Family(
        rope_types=frozenset({"linear", "yarn", "llama3", "longrope"}),
        softmax_mscale=True,
        refuse_in_attention=_QUERIES,
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


def family_of(text_config: Any) -> Family:
    """The row of a text config's model type."""
    return FAMILIES.get(text_config.model_type.removesuffix("_text"), STANDARD)
