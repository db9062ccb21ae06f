"""The models of the plan, and what a forward pass of them costs."""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from report import SMOLLM2
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL

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


def config_of(tiny: bool) -> Any:
    return AutoConfig.from_pretrained(folder_of(tiny))


def folder_of(tiny: bool) -> Path:
    """Fetched where it is missing."""
    if not tiny:
        fetch(SMOLLM2)
    return MODEL if tiny else SMOLLM2


def forward_cost(config: Any, n_tokens: int) -> float:
    """Operations of one causal forward pass: two a weight and token, four a pair of tokens and channel."""
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * config.num_key_value_heads)
    weights = layers * (attention + 3 * hidden * config.intermediate_size) + hidden * config.vocab_size
    return 2.0 * weights * n_tokens + 2.0 * layers * heads * head_dim * n_tokens**2


@torch.inference_mode()
def operations_a_second(model: Any, n_tokens: int) -> float:
    """Of one timed forward pass."""
    ids = torch.zeros((1, n_tokens), dtype=torch.long, device=model.device)
    model(input_ids=ids[:, :16], logits_to_keep=1)
    begun = time.perf_counter()
    model(input_ids=ids, logits_to_keep=1).logits[0, -1, 0].item()  # synchronises a GPU
    return forward_cost(model.config, n_tokens) / (time.perf_counter() - begun)
