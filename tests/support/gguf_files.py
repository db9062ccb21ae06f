"""Small models as GGUF files, written tensor by tensor with the package gguf and nothing of ctxext."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}


def save_gguf(model: PreTrainedModel, path: Path, tokens_of: Path, **more: Any) -> None:
    """Write `model` in float32, with the tokenizer of the file `tokens_of` and `more` keys of its architecture."""
    config = model.config
    name = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    for key, field in gguf.GGUFReader(tokens_of).fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    tables = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.sliding_window": getattr(config, "sliding_window", None) or 0,
        "rope.dimension_count": int(head_dim * tables.get("partial_rotary_factor", 1.0)),
    }
    if config.model_type == "gpt_oss":
        numbers |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
        }
    floats = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": tables.get("full_attention", tables)["rope_theta"],
    }
    for key, value in {**numbers, **floats, **more}.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{name}.{key}", value)
    for key, tensor in _tensors(model, name):
        writer.add_tensor(key, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: PreTrainedModel, name: str) -> Iterator[tuple[str, Tensor]]:
    """The weights under llama.cpp's names."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and tied:
            continue
        if name == "gemma3" and key.endswith("norm.weight"):
            tensor = tensor + 1  # transformers adds it as it runs
        prefix, _, of_experts = key.partition("experts.")
        if not of_experts:
            key = f"{key}.weight" if key.endswith("sinks") else key
            yield names.get_name(key, try_suffixes=(".weight", ".bias")), tensor
            continue
        block, kind = prefix.split(".")[2], "bias" if key.endswith("_bias") else "weight"
        if kind == "weight":
            tensor = tensor.transpose(-1, -2)
        if of_experts.startswith("down"):
            yield f"blk.{block}.ffn_down_exps.{kind}", tensor
        else:
            gate, up = (tensor[:, 0::2], tensor[:, 1::2])  # alternating rows
            yield f"blk.{block}.ffn_gate_exps.{kind}", gate
            yield f"blk.{block}.ffn_up_exps.{kind}", up


def logprobs(model: PreTrainedModel, ids: list[int], start: int) -> Tensor:
    """Transformers' log p of each token from `start` on."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
    return logits.double().log_softmax(-1)[range(len(ids) - start), ids[start:]]
