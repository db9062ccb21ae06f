"""Write docs/calculator/known.js: what the calculator's page takes from ctxext. `python docs/calculator.py`

The rows of checkpoints.toml, models of those rows to choose from, what each model type's config leaves out, and the
words of each engine's readings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ctxext import __version__
from ctxext.encodings.rope import RopeGeometry
from ctxext.export.readings import READINGS
from ctxext.export.rules import LEAST_VERSIONS
from ctxext.methods import list_methods
from ctxext.models.checkpoints import checkpoints
from ctxext.models.families import STANDARD, family_of

PAGE = Path(__file__).resolve().parent / "calculator" / "known.js"

# Of the rows of checkpoints.toml, published models and the sizes in their config.json that the row leaves open:
# hidden, intermediate, layers, heads, KV heads, vocabulary, tied embeddings, and whatever else.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
MODELS: list[tuple[str, str, tuple[int, int, int, int, int, int, bool], dict[str, Any]]] = [
    ("Qwen/Qwen3-0.6B", "Qwen3 dense, 0.6B to 32B", (1024, 3072, 28, 16, 8, 151936, True), {"head_dim": 128}),
    ("Qwen/Qwen3-4B", "Qwen3 dense, 0.6B to 32B", (2560, 9728, 36, 32, 8, 151936, True), {"head_dim": 128}),
    ("Qwen/Qwen3-8B", "Qwen3 dense, 0.6B to 32B", (4096, 12288, 36, 32, 8, 151936, False), {"head_dim": 128}),
    ("Qwen/Qwen3-32B", "Qwen3 dense, 0.6B to 32B", (5120, 25600, 64, 64, 8, 151936, False), {"head_dim": 128}),
    ("Qwen/Qwen3-30B-A3B", "Qwen3 MoE, 30B-A3B and 235B-A22B", (2048, 6144, 48, 32, 4, 151936, False),
     {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
    ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-2507, 4B", (2560, 9728, 36, 32, 8, 151936, True), {"head_dim": 128}),
    ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen1.5, and Qwen2, Qwen2.5 and Qwen2.5-Coder up to 3B",
     (896, 4864, 24, 14, 2, 151936, True), {}),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen2, Qwen2.5 and Qwen2.5-Coder 7B", (3584, 18944, 28, 28, 4, 152064, False), {}),
    ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen2.5-1M, 7B and 14B", (3584, 18944, 28, 28, 4, 152064, False), {}),
    ("Qwen/Qwen2.5-14B-Instruct", "Qwen2.5 and Qwen2.5-Coder 14B", (5120, 13824, 48, 40, 8, 152064, False), {}),
    ("Qwen/Qwen2.5-32B-Instruct", "Qwen2.5 and Qwen2.5-Coder 32B", (5120, 27648, 64, 40, 8, 152064, False), {}),
    ("Qwen/Qwen2.5-72B-Instruct", "Qwen2 and Qwen2.5 72B", (8192, 29568, 80, 64, 8, 152064, False), {}),
    ("meta-llama/Llama-3.1-8B-Instruct", "Llama 3.1 and 3.3", (4096, 14336, 32, 32, 8, 128256, False),
     {"rope_scaling": {**LLAMA3, "factor": 8.0}}),
    ("meta-llama/Llama-3.3-70B-Instruct", "Llama 3.1 and 3.3", (8192, 28672, 80, 64, 8, 128256, False),
     {"rope_scaling": {**LLAMA3, "factor": 8.0}}),
    ("meta-llama/Llama-3.2-1B-Instruct", "Llama 3.2, 1B and 3B", (2048, 8192, 16, 32, 8, 128256, True),
     {"head_dim": 64, "rope_scaling": {**LLAMA3, "factor": 32.0}}),
    ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama 3", (4096, 14336, 32, 32, 8, 128256, False), {}),
    ("meta-llama/Llama-2-7b-hf", "Llama 2", (4096, 11008, 32, 32, 32, 32000, False), {}),
    ("codellama/CodeLlama-7b-hf", "Code Llama", (4096, 11008, 32, 32, 32, 32016, False), {}),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama 1.1B", (2048, 5632, 22, 32, 4, 32000, False), {}),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2 135M and 360M", (576, 1536, 30, 9, 3, 49152, True), {}),
    ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "SmolLM2 1.7B", (2048, 8192, 24, 32, 32, 49152, True), {}),
    ("HuggingFaceTB/SmolLM3-3B", "SmolLM3 3B", (2048, 11008, 36, 16, 4, 128256, True), {"rope_theta": 5000000.0}),
    ("tiiuae/Falcon3-7B-Instruct", "Falcon3, 3B to 10B", (3072, 23040, 28, 12, 4, 131072, False), {"head_dim": 256}),
    ("01-ai/Yi-1.5-9B", "Yi and Yi-1.5, 4K", (4096, 11008, 48, 32, 4, 64000, False), {}),
    ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral 7B v0.2 and v0.3", (4096, 14336, 32, 32, 8, 32768, False),
     {"sliding_window": None}),
    ("mistralai/Mistral-7B-v0.1", "Mistral 7B v0.1", (4096, 14336, 32, 32, 8, 32000, False), {}),
    ("mistralai/Mistral-Nemo-Base-2407", "Mistral Nemo 12B, corrected config",
     (5120, 14336, 40, 32, 8, 131072, False), {"head_dim": 128, "sliding_window": None}),
    ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral Small 3 (2501), 24B",
     (5120, 32768, 40, 32, 8, 131072, False), {"head_dim": 128, "sliding_window": None}),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral 8x7B", (4096, 14336, 32, 32, 8, 32000, False),
     {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    ("google/gemma-7b", "Gemma", (3072, 24576, 28, 16, 16, 256000, True), {"head_dim": 256}),
    ("google/gemma-2-9b", "Gemma 2", (3584, 14336, 42, 16, 8, 256000, True),
     {"head_dim": 256, "sliding_window": 4096}),
    ("microsoft/phi-4", "Phi-4 14B", (5120, 17920, 40, 40, 10, 100352, False), {"sliding_window": None}),
    ("microsoft/Phi-3-mini-4k-instruct", "Phi-3 4k", (3072, 8192, 32, 32, 32, 32064, False), {"sliding_window": 2047}),
    ("openai/gpt-oss-20b", "gpt-oss 20b and 120b", (2880, 2880, 24, 64, 8, 201088, False),
     {"head_dim": 64, "num_local_experts": 32, "sliding_window": 128, "rope_theta": 150000.0, "rope_scaling": {
         "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
         "beta_slow": 1.0, "truncate": False}}),
    ("allenai/OLMo-2-1124-7B", "OLMo 2", (4096, 11008, 32, 32, 32, 100352, False), {"rope_theta": 500000.0}),
]  # fmt: skip

# What the page reads of a config.
FIELDS = (
    "max_position_embeddings", "rope_theta", "partial_rotary_factor", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size", "sliding_window",
    "use_sliding_window", "tie_word_embeddings", "kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers",
    "multi_query", "new_decoder_architecture", "attention_chunk_size",
)  # fmt: skip


def config_json(name: str, row: Any, sizes: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json, as far as the page reads it."""
    match = {key: value for key, value in row.match.items() if key not in ("rope_type", "factor")}
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    config = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[match["model_type"]]], **match}
    return {**config, **dict(zip(names, sizes, strict=True)), **more}


def models() -> list[dict[str, Any]]:
    rows = {row.name: row for row in checkpoints()}
    return [
        {"name": name, "row": row, "config": config_json(name, rows[row], sizes, more)}
        for name, row, sizes, more in MODELS
    ]


def type_of(name: str) -> dict[str, Any] | None:
    """What a config.json of this model type leaves out; None if its class has no RoPE in its own fields."""
    kind = CONFIG_MAPPING[name]
    try:
        config = kind()
    except StrictDataclassError:  # its defaults describe no model
        return None
    rope = getattr(config, "rope_parameters", None)
    if not rope or getattr(config, "is_heterogeneous", False):
        return None
    flat = "rope_theta" in rope
    values = {field: getattr(config, field, None) for field in FIELDS}
    table = rope if flat else rope.get("full_attention") or {}
    values |= {field: table.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    for size in ("num_key_value_heads", "head_dim"):  # None in the class where they follow other sizes
        values[size] = kind.__dict__.get(size)
    family = family_of(config)
    names = {**config.attribute_map, **family.version_4_names}
    described = {
        "defaults": {key: value for key, value in values.items() if isinstance(value, (int, float))},
        "names": {key: own for key, own in names.items() if key in FIELDS},
        "layerPattern": pattern(getattr(config, "layer_types", None)),
        **windows(kind, config),
        "ropeTypes": sorted(family.rope_types) if family.rope_types else None,
        "perLayer": not flat,
        "scaledByDefault": rope.get("rope_type", "default") != "default",
        "hasOriginal": "original_max_position_embeddings" in config.__dict__,
        "headDimLeftOut": config.__dict__.get("head_dim", 0) is None,
        "headDimDerived": "head_dim" in kind.__dict__ and kind.__dict__["head_dim"] is None and bool(config.head_dim),
        "served": flat and name in {row["config"]["model_type"] for row in models()} and served(family),
    }
    return {key: value for key, value in described.items() if value not in (None, False, {}, [])}


def served(family: Any) -> bool:
    """Whether the family differs from the standard in no more than the rope types that it accepts."""
    return all(getattr(family, key) == value for key, value in vars(STANDARD).items() if key != "rope_types")


def windows(kind: type[PreTrainedConfig], config: PreTrainedConfig) -> dict[str, Any]:
    """Where `max_window_layers` chooses the sliding layers: the first of them by default, or that another rule does."""
    default = getattr(config, "max_window_layers", None)
    if default is None or getattr(config, "layer_types", None) is None:
        return {}
    tried = kind(use_sliding_window=True, sliding_window=64, max_window_layers=2, num_hidden_layers=4).layer_types
    if tried == ["full_attention"] * 2 + ["sliding_attention"] * 2:
        return {"slidesFrom": default}
    return {"slidesByRule": True}


def pattern(layers: list[str] | None) -> list[str] | None:
    """The shortest period of a list of layer types; None for full attention alone or no period."""
    if not layers or set(layers) == {"full_attention"}:
        return None
    return next(
        (layers[:n] for n in range(1, 9) if all(layer == layers[i % n] for i, layer in enumerate(layers))), None
    )


def types() -> dict[str, Any]:
    """Of every model type with a causal model."""
    found = {name: type_of(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING}
    return {name: described for name, described in found.items() if described is not None}


def methods() -> dict[str, Any]:
    """Every static method for RoPE with its options, as config.json records it."""
    rope = RopeGeometry.plain(128, 1e4, 4096)
    made = [cls.example(rope, 4.0) for cls in list_methods("rope")]
    return {method.name: method.to_dict() for method in made if not method.in_attention and method.name != "longrope"}


def known() -> dict[str, Any]:
    rows = [{key: value for key, value in vars(row).items() if value not in ("", None, {})} for row in checkpoints()]
    return {
        "version": __version__, "checkpoints": rows, "models": models(), "types": types(), "methods": methods(),
        "readings": {name: str(reading) for name, reading in READINGS.items()}, "least": LEAST_VERSIONS,
    }  # fmt: skip


def page() -> str:
    """known.js."""
    parts = [f"  {name}: {json.dumps(value, ensure_ascii=False)}," for name, value in known().items()]
    head = "// Written by docs/calculator.py from ctxext and transformers. Do not edit."
    return "\n".join([head, '"use strict";', "const KNOWN = {", *parts, "};", ""])


if __name__ == "__main__":
    logging.set_verbosity_error()  # of the token ids of default configs
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
