"""What the standard structure does not say of a family. Add a family here.

Families are found by structure (`ctxext.sites`), so most need no row. A row holds what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What is unusual about some model types.

    Attributes:
        rope_types: the only `rope_type`s that the family's config accepts; None for all. Other
            methods are written as `longrope`.
        refuse: why a live model of this family is refused, and what to do instead.
        no_positions: the family has no position encoding that could run out.
        version_4_names: keys of `rope_parameters` that transformers 4 knows by another name at the top level.
    """

    rope_types: frozenset[str] | None = None
    refuse: str | None = None
    no_positions: bool = False
    version_4_names: dict[str, str] = field(default_factory=dict)


STANDARD = Family()

_NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_ONE_RECIPE = "takes no other rope_type than 'default'"

# fmt: off
FAMILIES: dict[str, Family] = {
    # Its config rewrites "yarn" to "longrope" and accepts nothing else (Phi3Config.validate_rope).
    "phi3": Family(rope_types=frozenset({"default", "longrope"})),
    "phi4_multimodal": Family(rope_types=frozenset({"default", "longrope"})),
    "gpt_neox": Family(version_4_names=_NEOX_NAMES),
    "gpt_neox_japanese": Family(version_4_names=_NEOX_NAMES),
    # Its forward recomputes the table from the config and never uses the long factors.
    "phimoe": Family(refuse="recomputes its frequencies in every forward pass and ignores any replacement"),
    "recurrent_gemma": Family(refuse=_ONE_RECIPE),
    # Queries are scaled by a function of position and original_max_position_embeddings as well.
    "ministral3": Family(refuse="scales its queries by position as well, from the same parameters"),
    "mistral4": Family(refuse="scales its queries by position as well, from the same parameters"),
    "encoder-decoder": Family(refuse="is two models: extend its encoder and its decoder, each by itself"),
    "speech-encoder-decoder": Family(refuse="is two models: extend its decoder by itself"),
    **{name: Family(no_positions=True) for name in (
        "jamba", "nemotron_h", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm",
    )},
}
# fmt: on


def family_of(text_config: Any) -> Family:
    """The row of a text config's model type."""
    return FAMILIES.get(text_config.model_type.removesuffix("_text"), STANDARD)
