"""The models of the plan, and what a forward pass of them costs."""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from report import SMOLLM2
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig

from ctxext.assets import MODEL
from ctxext.extension.describe import kv_cache_bytes

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
from smollm2 import fetch


@lru_cache(maxsize=1)
def loaded(folder: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def model_of(tiny: bool, device: str) -> tuple[Any, Any]:
    """SmolLM2 in bfloat16, as it is served, or the bundled model in float32 where the plan only rehearses."""
    return loaded(folder_of(tiny), device, torch.float32 if tiny else torch.bfloat16)


# What a plan needs of the public models' configs, so that it fetches nothing.
SMOLLM2_CONFIG = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, vocab_size=49_152, tie_word_embeddings=True, max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)  # fmt: skip
GEMMA_CONFIG = Gemma3TextConfig(
    hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
    head_dim=256, vocab_size=262_144, sliding_window=512, max_position_embeddings=32_768,
)  # fmt: skip


def config_of(tiny: bool) -> Any:
    return AutoConfig.from_pretrained(folder_of(tiny))


def folder_of(tiny: bool) -> Path:
    """Fetched where it is missing."""
    if not tiny:
        fetch(SMOLLM2)
    return MODEL if tiny else SMOLLM2


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def weights(config: Any) -> int:
    """Those that every token passes, the head among them."""
    hidden, heads = config.hidden_size, 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = hidden * head_dim(config) * heads + 3 * hidden * config.intermediate_size
    return config.num_hidden_layers * layer + hidden * config.vocab_size


def forward_cost(config: Any, n_tokens: int) -> float:
    """Operations of one causal forward pass: two a weight and token, four a pair of tokens and channel."""
    channels = config.num_hidden_layers * config.num_attention_heads * head_dim(config)
    return 2.0 * weights(config) * n_tokens + 2.0 * channels * n_tokens**2


def held(config: Any, n_tokens: int, device: str, caches: int = 1) -> float:
    """Bytes of the weights and of `caches` KV caches of `n_tokens`: in 2 bytes on a GPU, in 4 on a CPU."""
    each = 2 if device == "cuda" else 4
    embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return each * (weights(config) + embeddings) + caches * kv_cache_bytes(config, n_tokens, each)


@torch.inference_mode()
def operations_a_second(model: Any, n_tokens: int) -> float:
    """Of one timed forward pass."""
    ids = torch.zeros((1, n_tokens), dtype=torch.long, device=model.device)
    model(input_ids=ids[:, :16], logits_to_keep=1)
    begun = time.perf_counter()
    model(input_ids=ids, logits_to_keep=1).logits[0, -1, 0].item()  # synchronises a GPU
    return forward_cost(model.config, n_tokens) / (time.perf_counter() - begun)
