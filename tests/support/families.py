"""Small random models of the families that the tests cover, in their own shapes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

LENGTH = 64  # the trained length of every model here, in tokens

COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

# What each family needs beside that. Windows are longer than the trained length, or off.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"original_max_position_embeddings": LENGTH, "sliding_window": None},
    "gemma2": {"head_dim": 16, "sliding_window": 32},
    "olmo2": {},
    "gpt_neox": {"rotary_pct": 0.25, "head_dim": None},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "qwen3_5": {},
}

# Families that the matrices of all methods leave out: what in-attention RoPE meets in no family above.
DEVIATING: dict[str, dict[str, Any]] = {
    "stablelm": {},  # layers that drop keyword arguments
    "nemotron": {},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},  # attention in a method, not by transformers' interface
    "moshi": {"head_dim": 16, "sliding_window": 256, "ffn_dim": 96, "audio_vocab_size": 64},  # a rotary in each layer
    "phimoe": {"num_local_experts": 4},  # frequencies computed again in every pass
    "diffllama": {},  # layers that attend twice, with other values
    "doge": {},  # layers that compute with the mask
    "got_ocr2": {  # a vision part with attention of its own
        "text_config": {**COMMON, "model_type": "qwen2"},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 32},
    },
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A config of `family` with two attention layers of 4 heads, trained (so to say) at LENGTH."""
    values = {**COMMON, **FAMILIES.get(family, {}), **DEVIATING.get(family, {}), **changes}
    values = {key: value for key, value in values.items() if value is not None or key == "sliding_window"}
    if family == "qwen3_5":
        text = {
            **values,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                **(changes.get("rope_parameters") or {}),
            },
        }
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        return AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    return AutoConfig.for_model(family, **values)


def from_config(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of `config` with random weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    if config.model_type == "qwen3_5":
        from transformers import Qwen3_5ForConditionalGeneration

        return Qwen3_5ForConditionalGeneration(config).to(dtype).eval()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if config.model_type == "doge":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.A)  # with zeros, every key has the same score of its own
    return model


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    return from_config(tiny_config(family, **changes), seed)


def token_ids(n_tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch, n_tokens), generator=generator)


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model(input_ids=ids, **kwargs).logits
