"""Command lines as people write them, with their source and the verdict.

A line is copied from its source; where that elides the model, `model` names it. A line without a public source is
marked "constructed", and one that a thread describes in words is "constructed from" it. The configs hold the fields of
the published ones that matter here. Qwen3.6 and Qwen3.8 lines are checked with the schema of Qwen3.5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 36, "max_position_embeddings": 40960, "rope_theta": 1000000, "vocab_size": 151936,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "num_hidden_layers": 80, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "vocab_size": 152064,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip
_MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28},
    "Qwen3-8B": _QWEN3,
    "Qwen3-14B": {**_QWEN3, "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40},
    "Qwen3-235B-A22B": {**_QWEN3, "model_type": "qwen3_moe", "num_attention_heads": 64, "num_key_value_heads": 4},
    "Qwen2.5-7B": {**_QWEN2, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    "Qwen2.5-32B": {**_QWEN2, "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 64},
    "Qwen2.5-72B": _QWEN2,
    "Qwen3.5": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4,
            "head_dim": 256, "num_hidden_layers": 4, "max_position_embeddings": 262144,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, **_MROPE},
        },
    },
    "Llama-3.1-8B": {
        **_LLAMA,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Llama-3-8B": {**_LLAMA, "max_position_embeddings": 8192},
    "Llama-2-7B": {
        **_LLAMA, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 1e4,
    },
    "TinyLlama": {
        **_LLAMA, "hidden_size": 2048, "num_key_value_heads": 4, "num_hidden_layers": 22, "vocab_size": 32000,
        "max_position_embeddings": 2048, "rope_theta": 1e4,
    },
    "Yi-34B": {
        **_LLAMA, "hidden_size": 7168, "num_attention_heads": 56, "vocab_size": 64000, "max_position_embeddings": 4096,
        "rope_theta": 5e6,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 4, "max_position_embeddings": 163840, "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 6, "num_attention_heads": 8,
            "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1e6,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "sliding_window": 128,
        "rope_theta": 150000.0, "vocab_size": 201088, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    },
    "Phi-3.5-mini": {  # with lists of its own
        "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 32,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
        "vocab_size": 32064, "pad_token_id": 32000, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0 + pair / 48 for pair in range(48)],
            "long_factor": [1.0 + pair for pair in range(48)],
        },
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1e4, "vocab_size": 32000,
        "sliding_window": 4096,
    },
    "Llama-2-dynamic": {  # as in InternLM2.5
        **_LLAMA, "max_position_embeddings": 262144, "rope_theta": 5e7, "vocab_size": 92544,
        "rope_scaling": {"type": "dynamic", "factor": 2.5},
    },
    "MiniMax-M2": {
        "model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "max_position_embeddings": 196608,
        "rope_theta": 5e6, "vocab_size": 200064,
    },
    "Qwen2.5-VL": {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_hidden_layers": 4, "max_position_embeddings": 128000, "rope_theta": 1e6, "vocab_size": 152064,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {},
    },
    "Mistral-Nemo": {
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
        "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e6, "vocab_size": 131072,
        "sliding_window": None,
    },
    "SmolLM3": {
        "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "max_position_embeddings": 65536, "rope_theta": 5e6, "vocab_size": 128256,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A line and its verdict.

    Attributes:
        model: a key of CONFIGS.
        source: where the line stands.
        why: the verdict in a sentence.
        says: parts of the findings; for a right line, of its warnings.
        version: of the engine; the newest known one by default.
        has_right: whether `export_for` has a line that does what was meant.
    """

    line: str
    model: str
    source: str
    why: str
    says: tuple[str, ...] = ()
    version: str | None = None
    has_right: bool = True


_YARN = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}'
_THETA = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1000000}'
_LONG = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":262144}'
_CARD = (
    '{"text_config": {"rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": '
    '"yarn", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "factor": 4.0, '
    '"original_max_position_embeddings": 262144}}}'
)
_BUG = "https://github.com/vllm-project/vllm/issues"
_QWEN_VLLM = "https://qwen.readthedocs.io/en/latest/deployment/vllm.html#context-length"
_INDEXED = "a public repository, in a text index that names none"

WRONG = (
    Case(
        f"vllm serve Qwen/Qwen3-8B --rope-scaling '{_YARN}' --max-model-len 131072",
        "Qwen3-8B", f"{_QWEN_VLLM}, reported in {_BUG}/37886", "The flag was removed, so the server does not start.",
        ("--rope-scaling was removed",),
    ),
    Case(
        f"VLLM_USE_MODELSCOPE=true vllm serve ... --rope-scaling '{_YARN}' --max-model-len 131072",
        "Qwen3-8B", "https://github.com/vllm-project/vllm-ascend/issues/1024", "The flag was removed.",
        ("--rope-scaling was removed",),
    ),
    Case(
        f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3.8-Flash-Next-FP8 --tensor-parallel-size 4 "
        f"--rope-scaling '{_LONG}' --max-model-len 1000000",
        "Qwen3.5", "https://github.com/vllm-project/recipes/pull/856, before", "The flag was removed.",
        ("--rope-scaling was removed",),
    ),
    Case(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 \\\nvllm serve Qwen/Qwen3.8-Flash-Next-FP8 \\\n  --tensor-parallel-size 4 \\\n"
        f"  --hf-overrides '{{\"rope_parameters\":{_LONG}}}' \\\n  --max-model-len 1000000",
        "Qwen3.5", "https://github.com/vllm-project/recipes/pull/856, after",
        "The model's parameters are in text_config, so it boots and serves 1M tokens without scaling.",
        ("write it inside text_config", "the scaling is not applied"),
    ),
    Case(
        f"vllm serve Qwen/Qwen3-0.6B --hf-overrides '{{\"rope_parameters\": {_THETA}}}' --max-model-len 131072",
        "Qwen3-0.6B", "https://docs.vllm.ai/en/stable/features/context_extension/",
        "From 0.30 the factor does not lengthen the config's 40960 tokens, so 131072 are rejected.",
        ("131072 is rejected, as this config allows 40960",),
    ),
    Case(
        "vllm serve Qwen/Qwen3-0.6B --hf-overrides "
        f"'{{\"rope_parameters\": {_THETA}, \"max_model_len\": 131072}}'",
        "Qwen3-0.6B", "constructed from https://docs.vllm.ai/en/latest/examples/features/context_extension/",
        "max_model_len is no key of the config, so 40960 tokens are served.",
        ("max_model_len is ignored", "factor 4 is more than 40960 tokens need"),
    ),
    Case(
        "vllm serve Qwen/Qwen3-14B-AWQ --host 0.0.0.0 --port 8000 --enable-auto-tool-choice --enable-prefix-caching "
        f"--gpu-memory-utilization 0.92 --hf-overrides '{{\"rope_parameters\": {_YARN}}}' --kv-cache-dtype fp8 "
        "--max-model-len 131072 --reasoning-parser deepseek_r1 --tool-call-parser hermes",
        "Qwen3-14B", _INDEXED, "From 0.30 the length is rejected.", ("131072 is rejected",),
    ),
    Case(
        "vllm serve Qwen/Qwen2.5-32B-Instruct --seed 42 --generation-config vllm --port 8020 --tensor-parallel-size 2 "
        '--max-model-len 131072 --hf-overrides \'{"rope_scaling":{"factor":4, "original_max_position_embeddings": '
        '32768, "rope_type":"yarn"}}\' --enable-auto-tool-choice --tool-call-parser hermes',
        "Qwen2.5-32B", _INDEXED, "Up to 0.19.0 an override of rope_scaling comes too late to be read.",
        ("rope_scaling is ignored", "the scaling is not applied", "131072 is rejected, as this config allows 32768"),
        "0.19",
    ),
    Case(
        "vllm serve Qwen/Qwen3-8B --hf-overrides '{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
        "\"original_max_position_embeddings\": 32768}}'",
        "Qwen3-8B", "https://github.com/ls1intum/edutelligence/issues/744, the extra_args of a comment",
        "Up to 0.19.0 an override of rope_scaling comes too late to be read.",
        ("rope_scaling is ignored",), "0.16",
    ),
    Case(
        "vllm serve Qwen/Qwen3-235B-A22B --hf-overrides '{\"rope_parameters\": {\"rope_type\":\"yarn\","
        "\"rope_theta\":1000,\"factor\":4,\"original_max_position_embeddings\":32768}}'",
        "Qwen3-235B-A22B", "https://github.com/vllm-project/vllm-ascend/issues/5201, a tutorial's parameter",
        "The base is a thousandth of the model's, and the output is gibberish.",
        ("rope_theta is 1000, but this model was trained with 1000000",), "0.12",
    ),
    Case(
        "python -m vllm.entrypoints.openai.api_server --model NousResearch/Meta-Llama-3.1-8B-Instruct  "
        "--max-model-len 12000 --gpu-memory-utilization 0.95 --rope-scaling '{\"factor\": 8.0, \"type\": \"dynamic\"}'",
        "Llama-3.1-8B", f"{_BUG}/10537", "The flag was removed, and the model serves 131072 tokens without it.",
        ("--rope-scaling was removed",),
    ),
    Case(
        "docker run -d --runtime=nvidia --shm-size=10.24gb -p 5001:5001 -e NCCL_IGNORE_DISABLED_P2P=1 --network host "
        "--name qwen25_72b vllm/vllm-openai:latest --port=5001 --host=0.0.0.0 --model=Qwen/Qwen2.5-72B-Instruct "
        "--tensor-parallel-size=4 --seed 1234 --trust-remote-code --max-model-len=131072 "
        "--max-num-batched-tokens 131072 --max-log-len=100 &>> logs.vllm_server.qwen25_72b.txt",
        "Qwen2.5-72B", f"{_BUG}/8793", "Without an override the config allows 32768 tokens.",
        ("131072 is rejected, as this config allows 32768",),
    ),
    Case(
        "python -m vllm.entrypoints.openai.api_server --port=5000 --host=0.0.0.0 --model=01-ai/Yi-34B-Chat --seed 1234 "
        "--tensor-parallel-size=4 --trust-remote-code --max-model-len=204800",
        "Yi-34B", f"{_BUG}/2565", "Yi-34B-Chat is the 4K model.", ("204800 is rejected, as this config allows 4096",),
    ),
    Case(
        "vllm serve TinyLlama/TinyLlama-1.1B-Chat-v1.0 --hf-overrides '{\"max_position_embeddings\": 4096, "
        "\"rope_parameters\": {\"rope_type\": \"linear\", \"rope_theta\": 10000.0, \"factor\": 2.0}}'",
        "TinyLlama", "constructed from https://github.com/NVIDIA-NeMo/Safe-Synthesizer/pull/623",
        "Linear scaling multiplies the length, which holds the factor already: 8192 tokens are served.",
        ("8192 tokens are served, but factor 2 reaches only 4096",),
    ),
    Case(
        "vllm serve unsloth/Llama-3.1-8B --hf-overrides '{\"rope_parameters\": {\"rope_type\": \"linear\", "
        "\"factor\": 2.0}}' --max-model-len 262144",
        "Llama-3.1-8B", "constructed from https://github.com/unslothai/unsloth/pull/7028",
        "Its own scaling and its base of 500000 are lost, as perplexity 11316 showed.",
        ("linear replaces the model's own llama3 scaling", "theta 10000 instead of 500000", "rope_theta is lost"),
    ),
    Case(
        "vllm serve Qwen/Qwen2.5-7B-Instruct --hf-overrides '{\"rope_scaling\": {\"factor\": 4.0, "
        "\"original_max_position_embeddings\": 32768, \"type\": \"yarn\"}}'",
        "Qwen2.5-7B", "constructed from the block of https://huggingface.co/Qwen/Qwen2.5-7B-Instruct",
        "`type` is an older spelling that is not read from an override.",
        ("The key is `rope_type`, not `type`: the server stops with KeyError",),
    ),
    Case(
        "/usr/bin/python -m vllm.entrypoints.openai.api_server --model /dockerdata/models/Qwen3-32B-FP8 "
        "--served-model-name qwen3-32b --hf-overrides '{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,"
        "\"original_max_position_embeddings\":40960},\"max_position_embeddings\":163840}' --no-async-scheduling",
        "Qwen3-8B", _INDEXED, "Qwen3 was trained at 32768 tokens; 40960 is the config's limit.",
        ("the original length is 40960, but this model was trained at 32768",),
    ),
    Case(
        "vllm serve Qwen/Qwen3-8B --max-model-len 65536 --hf-overrides '{\"rope_scaling\": {\"rope_type\": \"yarn\", "
        "\"rope_theta\": 1000000, \"factor\": 1.6, \"original_max_position_embeddings\": 40960, \"truncate\": true, "
        "\"beta_fast\": 32, \"beta_slow\": 1, \"mscale\": 1, \"mscale_all_dim\": 0}}'",
        "Qwen3-8B", "constructed from https://docs.nvidia.com/nemo/rl/latest/guides/yarn-long-context.html",
        "The original length is not the trained one, and the config's limit is not raised.",
        ("the original length is 40960", "65536 is rejected"),
    ),
    Case(
        "vllm serve deepseek-ai/DeepSeek-V3 --hf-overrides '{\"rope_parameters\":{\"rope_type\":\"yarn\","
        "\"factor\":8.0,\"original_max_position_embeddings\":163840}}'",
        "DeepSeek-V3", _INDEXED, "It was pre-trained at 4096 tokens, and its own factor of 40 is replaced.",
        ("the original length is 163840, but this model was trained at 4096",),
    ),
    Case(
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --enable-metrics --dtype bfloat16 "
        "--trust-remote-code --disable-radix-cache --disable-cuda-graph --context-length 131092 "
        "--json-model-override-args '{\"rope_type\":\"yarn\",\"factor\":2.0,"
        "\"original_max_position_embeddings\":40960}'",
        "Qwen3-8B", _INDEXED, "The keys are outside rope_parameters, and the length is rejected.",
        ("rope_type is not read: write it inside rope_parameters", "131092 is rejected", "the scaling is not applied"),
    ),
    Case(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server ... --json-model-override-args "
        f"'{_CARD}' --context-length 1000000",
        "Qwen3.5", "https://huggingface.co/Qwen/Qwen3.8-27B", "Up to 0.5.16 text_config is replaced entirely.",
        ("would be replaced entirely",), "0.5.16", has_right=False,
    ),
    Case(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server ... --json-model-override-args "
        "'{\"text_config\": {\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
        "\"original_max_position_embeddings\": 262144}}}' --context-length 1000000",
        "Qwen3.5", _INDEXED, "rope_parameters in text_config are replaced, with the base and the sections.",
        ("rope_theta is lost", "mrope_section is lost", "partial_rotary_factor is lost"),
    ),
    Case(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python3 -m sglang.launch_server --model "
        "all-hands/openhands-lm-32b-v0.1 --served-model-name openhands-lm-32b-v0.1 --port 8000 --tp 2 --dp 1 "
        "--host 0.0.0.0 --api-key mykey --context-length 131072",
        "Qwen2.5-32B", "the guide to OpenHands LM, of a Qwen2.5-Coder-32B with its config; " + _INDEXED,
        "The guard is off and nothing is scaled.", ("131072 tokens are served without scaling",),
    ),
    Case(
        "python -m sglang.launch_server --model-path Qwen/Qwen2.5-72B-Instruct --context-length 128000",
        "Qwen2.5-72B", "constructed from https://github.com/sgl-project/sglang/issues/2943",
        "Without an override the config allows 32768 tokens.", ("128000 is rejected, as this config allows 32768",),
    ),
    Case(
        f"python -m sglang.launch_server --model-path Qwen/Qwen2.5-7B-Instruct --json-model-override-args "
        f"'{{\"rope_scaling\":{_YARN}}}'",
        "Qwen2.5-7B", "https://qwen.readthedocs.io/en/latest/deployment/sglang.html, with Qwen2.5",
        "Up to 0.5.22 the base is lost with the rope_parameters that are replaced.",
        ("rope_theta is lost", "theta 10000 instead of 1000000"), "0.5.22",
    ),
    Case(
        "llama-server -m ./model/with/4096context -c 16384 --rope-scaling yarn --rope-scale 4",
        "Llama-2-7B", "https://github.com/ggml-org/llama.cpp/issues/17459", "The server caps the context at 4096.",
        ("--ctx-size is capped",), "2025-12",
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --rope-scaling yarn --rope-scale 4",
        "Qwen3-8B", "constructed from https://github.com/ggml-org/llama.cpp/pull/28030",
        "Without --yarn-orig-ctx the original length is the file's 40960.",
        ("the original length is 40960, but this model was trained at 32768",),
    ),
    Case(
        r".\llama-server.exe -m Qwen3-14B-Q4_K_M.gguf --host 0.0.0.0 --port 8080 -ngl 99 --parallel 1 "
        "--ctx-size 65536 --rope-scaling yarn --yarn-orig-ctx 40960 --override-kv qwen3.context_length=int:65536 "
        "-ctk q4_0 -ctv q4_0",
        "Qwen3-14B", _INDEXED, "Nothing sets the factor, so nothing is scaled.",
        ("changes nothing without --rope-scale", "the scaling is not applied", "trained at 32768"),
    ),
    Case(
        "./llama-server -m Qwen2.5-72B-Instruct-Q4_K_M.gguf --rpc a:50052,b:50052 -dev CUDA0,RPC0,RPC1 -ngl 99 "
        "-sm layer -ts 0.4,0.4,0.2 --parallel 1 -c 131072 --rope-scaling yarn --yarn-orig-ctx 32768 -ctk q4_0 "
        "-ctv q4_0", "Qwen2.5-72B", _INDEXED, "Nothing sets the factor: no scaling, and 32768 tokens.",
        ("changes nothing without --rope-scale", "--ctx-size is capped"),
    ),
    Case(
        "./build/bin/llama-server -hf unsloth/Qwen3.8-27B-GGUF:UD-Q3_K_XL -dev CUDA0 -sm none --rope-scaling yarn "
        "--rope-scale 5 --yarn-orig-ctx 32768 -fa on -ctk q8_0 -ctv q5_1 -np 2 -c 296000 --jinja",
        "Qwen3.5", _INDEXED, "It was trained at 262144 tokens, and 296000 tokens need a factor of 1.13.",
        ("the original length is 32768, but this model was trained at 262144", "--ctx-size is capped"),
        has_right=False,
    ),
    Case(
        "llama-server -m model.gguf -c 32768 --rope-scale 8.0 --rope-freq-base 10000",
        "Llama-2-7B", "constructed from https://agentbeck.bot/report/95133",
        "Linear scaling does not lift the server's cap of 4096.", ("--ctx-size is capped",),
    ),
    Case(
        "llama-server -m Qwen3-8B-Q4_K_M.gguf -c 138240",
        "Qwen3-8B", _INDEXED, "Without scaling the server caps the context at 40960.", ("--ctx-size is capped",),
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 "
        "--yarn-attn-factor 1.1",
        "Qwen3-8B", "constructed", "The flag is overwritten.",
        ("--yarn-attn-factor is overwritten", "multiplied by 1.139, not by 1.252"),
    ),
    Case(
        "vllm serve Qwen/Qwen3-8B --max-model-len 131072 --hf-overrides '{\"max_position_embeddings\": 131072, "
        "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4.0, \"original_max_position_embeddings\": 32768, "
        "\"rope_theta\": 1000000, \"attention_factor\": 1.0}}'",
        "Qwen3-8B", f"constructed from {_BUG}/48351", "Up to 0.29 attention_factor is ignored.",
        ("attention_factor is ignored", "multiplied by 1.139, not by 1"), "0.29",
    ),
    Case(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve meta-llama/Meta-Llama-3-8B --max-model-len 32768",
        "Llama-3-8B", "constructed", "Past the 8192 rows of the table logits are NaN.",
        ("the cos/sin table has 8192 rows", "without scaling"),
    ),
    Case(
        "vllm serve meta-llama/Meta-Llama-3-8B --max-model-len 16384 --hf-overrides "
        "'{\"rope_parameters\": {\"rope_type\": \"dynamic\", \"factor\": 2.0, \"rope_theta\": 500000.0}}'",
        "Llama-3-8B", "constructed from https://github.com/vllm-project/vllm/pull/5093",
        "From 0.22 the dynamic type does not change the frequencies, and its table ends at 8192 tokens.",
        ("rope_type \"dynamic\" uses the original base", "the cos/sin table has 8192 rows"),
    ),
    Case(
        "vllm serve google/gemma-3-4b-it --max-model-len 262144 --hf-overrides '{\"text_config\": "
        "{\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2.0, \"original_max_position_embeddings\": "
        "131072}, \"max_position_embeddings\": 262144}}'",
        "gemma-3-4b", "constructed", "Its rope_parameters hold an object for each layer type.",
        ("write an object for each layer type", "replaces the model's own linear scaling"),
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --rope-freq-base 4000000 --override-kv llama.context_length=int:131072",
        "Qwen3-8B", "constructed", "The architecture of the file is qwen3, so the key is not read.",
        ("llama.context_length is not read", "--ctx-size is capped"),
    ),
    Case(
        "llama-server -m Qwen3-8B.gguf -c 131072 --rope-freq-base 4000000 --override-kv "
        "qwen3.context_length=float:131072",
        "Qwen3-8B", "constructed", "llama.cpp ignores an override of another type than the key's.",
        ("qwen3.context_length is ignored as a float: write qwen3.context_length=int:131072",),
    ),
    Case(
        "llama-server -m Qwen3-8B.gguf -c 131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 "
        "--yarn-ext-factor 0.5",
        "Qwen3-8B", "constructed", "Half of yarn's ramp is neither yarn nor linear scaling.",
        ("--yarn-ext-factor is the weight of the unscaled frequencies", "off by a factor of up to 1.6"),
    ),
    Case(
        "llama-server -m Llama-2.gguf -c 16384 --rope-scaling linear --rope-scale 4 --yarn-ext-factor 1 --override-kv "
        "llama.context_length=int:16384",
        "Llama-2-7B", "constructed", "The factor turns yarn on, whatever the type.",
        ("--yarn-ext-factor is the weight", "multiplied by 1.139, not by 1"),
    ),
    Case(
        "llama-perplexity -m Llama-2.gguf -f wiki.txt -c 16384",
        "Llama-2-7B", "constructed", "It is not capped, and so reads 16384 tokens without scaling.",
        ("16384 tokens are served without scaling",),
    ),
    Case(
        "python -m sglang.launch_server --model-path mistralai/Mistral-7B-v0.1 --context-length 8192",
        "Mistral-7B-v0.1", "constructed", "SGLang has no windows for Mistral, which was trained with one of 4096.",
        ("the sliding window of 4096 tokens is ignored",), has_right=False,
    ),
    Case(
        "llama-server -m mistral-7b-v0.1.gguf -c 8192",
        "Mistral-7B-v0.1", "constructed", "Nor has llama.cpp.",
        ("the sliding window of 4096 tokens is ignored",), has_right=False,
    ),
    Case(
        "vllm serve internlm/internlm2_5-7b-chat-1m", "Llama-2-dynamic", "constructed",
        "vLLM serves the factor's length from a table without it.",
        ("rope_type \"dynamic\" uses the original base", "the cos/sin table has 262144 rows, fewer than 655360"),
    ),
    Case(
        "vllm serve deepseek-ai/DeepSeek-V3 --hf-overrides "
        "'{\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":2.0,\"rope_theta\":10000}}'",
        "DeepSeek-V3", "constructed", "Its class reads every type as yarn.",
        ("linear needs original_max_position_embeddings; without it the server does not start",),
    ),
    Case(
        "vllm serve Qwen/Qwen3-8B --max-model-len 65536 --hf-overrides '{\"max_position_embeddings\": 65536, "
        "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2.0, \"rope_theta\": 1000000, "
        "\"original_max_position_embeddings\": null}}'",
        "Qwen3-8B", "constructed", "A null is no length.", ("yarn needs original_max_position_embeddings",),
    ),
    Case(
        "python -m sglang.launch_server --model-path google/gemma-3-4b-it --json-model-override-args "
        "'{\"text_config\": {\"rope_scaling\": {}}}'",
        "gemma-3-4b", "constructed", "It replaces both tables.", ("write an object for each layer type",),
    ),
)  # fmt: skip

RIGHT = (
    Case(
        f"vllm serve Qwen/Qwen3-0.6B --hf-overrides '{{\"rope_parameters\": {_THETA}}}' --max-model-len 131072",
        "Qwen3-0.6B", "https://docs.vllm.ai/en/stable/features/context_extension/",
        "Up to 0.29 the factor lengthens the original length.", version="0.29",
    ),
    Case(
        f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3-8B --hf-overrides '{{\"rope_parameters\": {_THETA}}}' "
        "--max-model-len 131072",
        "Qwen3-8B", _INDEXED, "The table of yarn has 131072 rows, so the guard does no harm.",
        ("switches the length check off",),
    ),
    Case(
        "vllm serve Qwen/Qwen3-8B --hf-overrides '{\"max_position_embeddings\": 131072, \"rope_parameters\": "
        f"{_THETA}}}' --max-model-len 131072",
        "Qwen3-8B", "constructed", "The newest versions need the length in the config as well.",
    ),
    Case(
        f"vllm serve Qwen/Qwen3-14B-AWQ --hf-overrides '{{\"rope_parameters\": {_YARN}}}' --max-model-len 131072",
        "Qwen3-14B", _INDEXED, "The base of the class Qwen3 is the model's, and 0.29 counts the factor.",
        version="0.29",
    ),
    Case(
        "vllm serve Qwen/Qwen2.5-32B-Instruct --max-model-len 131072 --hf-overrides '{\"rope_scaling\":{\"factor\":4, "
        "\"original_max_position_embeddings\": 32768, \"rope_type\":\"yarn\"}}'",
        "Qwen2.5-32B", _INDEXED, "From 0.19.1 rope_scaling is another name of rope_parameters.", version="0.29",
    ),
    Case(
        f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve ... --hf-overrides '{_CARD}' --max-model-len 1000000",
        "Qwen3.5", "https://huggingface.co/Qwen/Qwen3.8-27B", "The vendor's line; the guard is needed from 0.30.",
        ("switches the length check off",),
    ),
    Case(
        f"vllm serve Qwen/Qwen3.8-27B --hf-overrides '{_CARD}' --request-static-yarn-factors 1 2 4 "
        "--max-model-len 1000000",
        "Qwen3.5", f"{_BUG}/53964, the proposed page", "Up to 0.29 the factor counts.", version="0.29",
    ),
    Case(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve Qwen/Qwen3.5-4B --max-model-len 1000000 --max-num-seqs 1 "
        "--hf-overrides '{\"text_config\": {\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
        "\"original_max_position_embeddings\": 262144}}}'",
        "Qwen3.5", _INDEXED, "vLLM merges into text_config, so base and sections stay.",
        ("switches the length check off",),
    ),
    Case(
        f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server ... --json-model-override-args "
        f"'{_CARD}' --context-length 1000000",
        "Qwen3.5", "https://huggingface.co/Qwen/Qwen3.8-27B", "From 0.5.17 text_config keeps its other keys.",
        ("switches the length check off",),
    ),
    Case(
        "SGLANG_USE_MODELSCOPE=true python -m sglang.launch_server ... --json-model-override-args "
        f"'{{\"rope_scaling\":{_YARN}}}'",
        "Qwen3-8B", "https://blog.deepfal.cn/index.php/archives/951",
        "yarn is on, but without --context-length only 40960 tokens are served.",
        ("factor 4 is more than 40960 tokens need",),
    ),
    Case(
        f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server --model-path "
        f"Qwen/Qwen2.5-72B-Instruct --context-length 131072 --json-model-override-args '{{\"rope_scaling\":{_YARN}}}'",
        "Qwen2.5-72B", "constructed from https://github.com/sgl-project/sglang/issues/2108",
        "SGLang's table grows, and from 0.5.23 the base is kept.", ("switches the length check off",),
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768",
        "Qwen3-8B", "https://qwen.readthedocs.io/en/latest/run_locally/llama.cpp.html",
        "From September 2026 the flags lift the cap.",
    ),
    Case(
        "./llama-server -m ./models/Qwen3-14B-Q5_K_M.gguf -c 131072 --rope-scaling yarn --rope-scale 4.0 "
        "--yarn-orig-ctx 32768 --yarn-ext-factor 1.0 --yarn-attn-factor 1.0 --yarn-beta-fast 32 --yarn-beta-slow 1 "
        "-ngl 99 -b 1024 -t 24 --host 0.0.0.0 --port 8000",
        "Qwen3-14B", _INDEXED, "The other flags hold their defaults.",
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 "
        "--override-kv qwen3.context_length=int:131072",
        "Qwen3-8B", "constructed from https://github.com/ggml-org/llama.cpp/issues/17459",
        "Before September 2026 the key lifts the cap.", version="2025-12",
    ),
    Case(
        "llama-server -m model.gguf -c 16384 --rope-scaling yarn --rope-scale 4",
        "Llama-2-7B", "https://github.com/ggml-org/llama.cpp/issues/17459",
        "The file's length is the trained one, and #28030 lifted the cap.",
    ),
    Case("vllm serve microsoft/Phi-3.5-mini-instruct", "Phi-3.5-mini", "constructed",
        "vLLM serves the original length, and the short list with it."),
    Case("vllm serve microsoft/Phi-3.5-mini-instruct --max-model-len 4096", "Phi-3.5-mini", "constructed",
        "The short list."),
    Case("vllm serve microsoft/Phi-3.5-mini-instruct --max-model-len 8192", "Phi-3.5-mini", "constructed",
        "The long list, for short prompts too.", ("long_factor is used for every sequence",)),
    Case("python -m sglang.launch_server --model-path microsoft/Phi-3.5-mini-instruct --context-length 4096",
        "Phi-3.5-mini", "constructed", "The short list."),
    Case("llama-server -m phi-3.5.gguf -c 4096", "Phi-3.5-mini", "constructed", "The short list."),
    Case("llama-server -m phi-3.5.gguf -c 8192", "Phi-3.5-mini", "constructed", "The long list."),
    Case("vllm serve internlm/internlm2_5-7b-chat-1m --max-model-len 32768", "Llama-2-dynamic", "constructed",
        "Up to its max_position_embeddings dynamic scaling is plain RoPE."),
    Case("llama-server -m internlm2.gguf -c 32768", "Llama-2-dynamic", "constructed", "Likewise."),
    Case("llama-server -hf ggml-org/gpt-oss-20b-GGUF -c 131072", "gpt-oss-20b", "constructed",
        "The line that its makers recommend; the ends of its ramp are rounded.",
        ("truncate of yarn is not supported", "frequencies are off by a factor of up to 1.76")),
    Case("vllm serve Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL", "constructed", "Its own config holds the old `type`."),
    Case("python -m sglang.launch_server --model-path Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL", "constructed",
        "Its own config holds the old `type`."),
    Case(
        "vllm serve MiniMaxAI/MiniMax-M2 --max-model-len 393216 --hf-overrides '{\"max_position_embeddings\": 393216, "
        "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2.0, \"rope_theta\": 5000000, "
        "\"original_max_position_embeddings\": 196608}}'",
        "MiniMax-M2", "constructed", "Its class takes the share that rotates from rotary_dim.",
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --override-kv qwen3.rope.scaling.type=str:yarn,qwen3.rope.scaling.factor="
        "float:4,qwen3.rope.scaling.original_context_length=int:32768,qwen3.context_length=int:131072",
        "Qwen3-8B", "constructed", "Keys of the file are read before flags.",
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --rope-freq-base 4000000 --override-kv qwen3.context_length=int:131072 "
        "--override-kv tokenizer.ggml.add_bos_token=bool:false",
        "Qwen3-8B", "constructed", "The option may be repeated.",
    ),
    Case(
        "llama-server -m qwen3.gguf -c 131072 --override-kv tokenizer.ggml.add_bos_token=bool:false --override-kv "
        "qwen3.context_length=int:131072,qwen3.rope.freq_base=float:4000000",
        "Qwen3-8B", "constructed", "In any order.",
    ),
    Case(
        "llama-perplexity -m Llama-2.gguf -f wiki.txt -c 16384 --rope-scaling yarn --rope-scale 4", "Llama-2-7B",
        "constructed", "Only the server caps.", version="2025-12",
    ),
    Case(
        "docker run ghcr.io/ggml-org/llama.cpp:full-cuda --server -m llama-2.gguf -c 4096", "Llama-2-7B", "constructed",
        "The image with all programs starts the one that its first word names.",
    ),
    Case(
        "python -m sglang.launch_server --model-path mistralai/Mistral-7B-v0.1 --context-length 4_096",
        "Mistral-7B-v0.1", "constructed", "Within the window; int() takes underscores.",
    ),
    Case("vllm serve Qwen/Qwen3-8B", "Qwen3-8B", _QWEN_VLLM, "The model as it is."),
    Case(
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 131072", "Llama-3.1-8B", "constructed",
        "Its own scaling is read.",
    ),
    Case(
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 131072", "Llama-3.1-8B", "constructed",
        "Its own scaling is read by version 4 of transformers too.", version="0.12",
    ),
    Case(
        "vllm serve deepseek-ai/DeepSeek-V3 --max-model-len 163840", "DeepSeek-V3", "constructed",
        "Its own yarn is read.",
    ),
    Case(
        "vllm serve google/gemma-3-4b-it --max-model-len 131072", "gemma-3-4b", "constructed",
        "Its linear scaling is not multiplied again.",
    ),
    Case(
        "vllm serve Qwen/Qwen3.6-35B-A3B --tensor-parallel-size 8 --max-model-len 262144 --reasoning-parser qwen3",
        "Qwen3.5", "https://docs.vllm.ai/projects/recipes/en/latest/Qwen/Qwen3.5.html", "The model as it is.",
    ),
    Case(
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tensor-parallel-size 4",
        "Qwen3-8B", "https://qwen.readthedocs.io/zh-cn/stable/_sources/deployment/sglang.md.txt", "The model as it is.",
    ),
    Case(
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --context-length 131072",
        "Llama-3.1-8B", "constructed", "Its own scaling is read.",
    ),
    Case("llama-server -m llama-3.1.gguf -c 131072", "Llama-3.1-8B", "constructed", "The file holds the scaling."),
    Case(
        "vllm serve HuggingFaceTB/SmolLM3-3B --max-model-len 131072 --hf-overrides '{\"max_position_embeddings\": "
        "131072, \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2.0, "
        "\"original_max_position_embeddings\": 65536, \"rope_theta\": 5000000.0}}'",
        "SmolLM3", "constructed from the block of https://huggingface.co/HuggingFaceTB/SmolLM3-3B-Base",
        "The vendor's recipe, with the length.",
    ),
    Case(
        "vllm serve mistralai/Mistral-Nemo-Instruct-2407 --max-model-len 131072", "Mistral-Nemo", "constructed",
        "The trained length.",
    ),
    Case(
        "vllm serve meta-llama/Meta-Llama-3-8B --max-model-len 32768 --hf-overrides '{\"max_position_embeddings\": "
        "32768, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 2500000.0}}'",
        "Llama-3-8B", "constructed", "A raised base needs only the base and the length.",
    ),
)  # fmt: skip


def config_json(model: str) -> dict[str, Any]:
    """A config of its own for each call."""
    return json.loads(json.dumps(CONFIGS[model]))
