"""Configs, overrides of them, and lengths, that engines are asked about. No imports but the standard library's."""

from __future__ import annotations

from typing import Any

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

QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0}
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "moe_intermediate_size": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
# Configs of transformers 5 on a version that knows no rope_parameters: the base of the config's class.
_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 2000000.0}}
_MIXTRAL = {**SHAPE, **_BASE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "max_position_embeddings": 32768}  # fmt: skip
_COHERE = {**SHAPE, **_BASE, "architectures": ["CohereForCausalLM"], "model_type": "cohere",
           "max_position_embeddings": 8192}  # fmt: skip
_NO_BASE = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
VLLM_CASES: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    (_MIXTRAL, {}, None),
    (_COHERE, {}, None),
    ({**_NO_BASE, **_BASE}, {}, None),
]
SGLANG_CASES: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    (QWEN2, {"rope_parameters": {**YARN, "original_max_position_embeddings": 8192}}, None),
    (QWEN3, {"max_position_embeddings": 131072}, None),
    (QWEN3, {"model_max_length": 20480}, None),
    (LLAMA, {"rope_parameters": SHORT, "max_position_embeddings": 65536}, None),
    (LLAMA, {"rope_parameters": {**SHORT, "attn_factor": 0.8, "mscale": 0.7, "mscale_all_dim": 0.3}}, None),
    (LLAMA, {"rope_parameters": {**SHORT, "mscale": 0.7, "mscale_all_dim": 0.3, "mrope_section": [8, 12, 12]}}, None),
    (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000.0}}, None),
    (DEEPSEEK, {}, None),
    (DEEPSEEK, {"rope_parameters": {**YARN, "original_max_position_embeddings": 8192}}, None),
    (DEEPSEEK, {"rope_parameters": SHORT, "max_position_embeddings": 32768}, 32768),
    (DEEPSEEK, {"rope_parameters": {**SHORT, "mscale": 0.7, "mscale_all_dim": 0.3}}, None),
    (DEEPSEEK, {"rope_parameters": {**SHORT, "attn_factor": 1.5, "attention_factor": 2.0}}, None),
    (DEEPSEEK, {"rope_parameters": {**SHORT, "truncate": False, "beta_fast": 16.0}}, None),
]
