"""A LLaMA model with position encodings other than RoPE, to compare them: ALiBi, learned, sinusoidal, T5's bias.

`PositionedLlama` is transformers' LLaMA with its rotation taken out and one of these put in; RMSNorm, SwiGLU, widths
and initial weights are the same. Importing this module registers it, so that `AutoModelForCausalLM.from_pretrained`
loads what was saved.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from ctxext.attention.masks import additive

POSITIONS = ("rope", "alibi", "learned", "sinusoidal", "t5")


@strict
class PositionedConfig(LlamaConfig):
    """LlamaConfig without `rope_parameters`, and with a `position`; the buckets are those of `t5`, as T5 has them."""

    model_type = "positioned_llama"

    position: Literal["alibi", "learned", "sinusoidal", "t5"] = "alibi"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.rope_parameters = None


class NoRotation(nn.Module):
    """Instead of a rotary embedding: a cosine of 1 and a sine of 0, which broadcast to every position."""

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states.new_ones(1, 1, 1), hidden_states.new_zeros(1, 1, 1)


class BucketedBias(nn.Module):
    """T5's bias of each head for each bucket of distances, for a decoder. Raffel et al. (2020), section 2.1.

    Attributes are named as in T5's attention, whose arithmetic it is.
    """

    is_decoder = True
    has_relative_attention_bias = True
    compute_bias = T5Attention.compute_bias
    _relative_position_bucket = staticmethod(T5Attention._relative_position_bucket)

    def __init__(self, config: PositionedConfig) -> None:
        super().__init__()
        self.relative_attention_num_buckets = config.relative_attention_num_buckets
        self.relative_attention_max_distance = config.relative_attention_max_distance
        self.relative_attention_bias = nn.Embedding(self.relative_attention_num_buckets, config.num_attention_heads)


class LinearBias(nn.Module):
    """ALiBi: a key loses `slopes` nats for each token between it and the query. Press et al. (2022), section 3."""

    def __init__(self, config: PositionedConfig) -> None:
        super().__init__()
        self.slopes = nn.Buffer(torch.empty(config.num_attention_heads))

    def initial_slopes(self) -> Tensor:
        """2^(-8/n), 2^(-16/n), …, 2^-8 for n heads."""
        n = len(self.slopes)
        if not math.log2(n).is_integer():
            raise ValueError(f"num_attention_heads must be a power of two for ALiBi, got {n}.")
        return torch.exp2(-8 * torch.arange(1, n + 1) / n)

    def compute_bias(self, n_queries: int, n_keys: int, past_seen_tokens: int) -> Tensor:
        queries = torch.arange(n_queries, device=self.slopes.device)[:, None] + past_seen_tokens
        keys = torch.arange(n_keys, device=self.slopes.device)
        return self.slopes[None, :, None, None] * (keys - queries)


class PositionedLlama(LlamaForCausalLM):
    """LLaMA with the encoding that its config names.

    With the same seed, its body starts bitwise equal to LlamaForCausalLM's, and torch's generator ends up the same.
    """

    config_class = PositionedConfig

    def __init__(self, config: PositionedConfig) -> None:
        # The rotary embedding needs parameters to be built; it is then replaced.
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__init__(config)
        config.rope_parameters = None
        self.model.rotary_emb = NoRotation()
        with torch.random.fork_rng(devices=[]):
            if config.position == "learned":
                self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            elif config.position == "sinusoidal":
                self.embed_positions = XGLMSinusoidalPositionalEmbedding(
                    config.max_position_embeddings, config.hidden_size, padding_idx=1
                )
            elif config.position == "alibi":
                self.bias = LinearBias(config)
            else:
                self.bias = BucketedBias(config)
            self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, XGLMSinusoidalPositionalEmbedding):
            init.copy_(module.weights, module.get_embedding(*module.weights.shape, module.padding_idx))
        elif isinstance(module, LinearBias):
            init.copy_(module.slopes, module.initial_slopes())

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As LlamaForCausalLM.forward; the positions of `learned` and `sinusoidal` are `position_ids`."""
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if self.config.position in ("alibi", "t5"):
            mask = create_causal_mask(
                self.config, inputs_embeds, attention_mask, past_key_values, position_ids, allow_is_causal_skip=False
            )
            mask = additive(mask, inputs_embeds.dtype)
            # The distance between two tokens is that of their slots, regardless of padding.
            attention_mask = mask + self.bias.compute_bias(*mask.shape[-2:], past_seen_tokens=seen)
        else:
            if position_ids is None:
                position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None] + seen
            if self.config.position == "learned":
                inputs_embeds = inputs_embeds + self.embed_positions(position_ids)
            else:
                # As in the paper (section 3.4): sines of amplitude 1 would dominate the embeddings.
                scaled = inputs_embeds * math.sqrt(self.config.hidden_size)
                # The table grows to cover the tokens read before.
                n_before = int(position_ids.max()) + 1 - position_ids.shape[1]
                inputs_embeds = scaled + self.embed_positions(position_ids, n_before)
        return super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )


AutoConfig.register(PositionedConfig.model_type, PositionedConfig)
AutoModelForCausalLM.register(PositionedConfig, PositionedLlama)
