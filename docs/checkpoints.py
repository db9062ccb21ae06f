"""Write docs/checkpoints.md and .json: the known checkpoints under existing="keep", "compose" and "replace".

python docs/checkpoints.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ctxext.extension.request import plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.models.checkpoints import Checkpoint, checkpoints, known_checkpoint
from ctxext.models.rope_tables import RopeTable, rope_tables

HERE = Path(__file__).resolve().parent
FACTOR = 4.0
VERBS = ("keep", "compose", "replace")

# Of the published configs, what the rows leave open. Families that transformers has no config for borrow one.
BORROWED = {"kimi_k2": "deepseek_v3", "internlm2": "llama"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN = {"original_max_position_embeddings": 32768}
PHI_35 = [
    1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46, 28.57, 30.42,
    30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14, 63.14,
    63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84,
]  # fmt: skip
PHI_4_MINI = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "Llama 3.1 and 3.3": LLAMA3,
    "Llama 3.2, 1B and 3B": LLAMA3,
    "YaRN Llama 2, 64K": {"original_max_position_embeddings": 4096},
    "YaRN Llama 2, 128K": {"original_max_position_embeddings": 4096},
    "Yi 200K, 6B to 34B": {"rope_theta": 5e6},
    "SmolLM3 3B": {"rope_theta": 5e6},
    "Qwen2 and Qwen2.5 with Qwen's YaRN block": QWEN,
    "Qwen3 dense with Qwen's YaRN block": QWEN,
    "Qwen3 MoE with Qwen's YaRN block": QWEN,
    "Qwen3-2507 MoE, 30B-A3B and 235B-A22B": {"rope_theta": 5e6},
    **{name: {"rope_theta": 1e7} for name in ("Qwen3-Next 80B-A3B", "Qwen3.5 dense", "Qwen3.5 MoE")},
    "Phi-4-mini": {
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * 48, "long_factor": PHI_4_MINI,
    },
    "Phi-3 128k and Phi-3.5-mini": {
        "original_max_position_embeddings": 4096, "short_factor": [1.0] * 48, "long_factor": PHI_35,
    },
    "gpt-oss 20b and 120b": {"rope_theta": 150000.0, "original_max_position_embeddings": 4096, "truncate": False},
    "DeepSeek-V2": {"original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707},
    "DeepSeek-V3 and R1": {"original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    "Kimi K2": {
        "rope_theta": 50000.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "OLMo 2": {"rope_theta": 500000.0},
    "Olmo 3, 7B and 32B": {"original_max_position_embeddings": 8192},
    "Granite 3.1 and 3.2": {"rope_theta": 5e6},
    "InternLM2 with its dynamic NTK block": {"rope_theta": 1e6},
    "InternLM2": {"rope_theta": 1e6},
}  # fmt: skip
SHAPE: dict[str, dict[str, Any]] = {
    "Phi-4-mini": {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8},
    "Phi-3 128k and Phi-3.5-mini": {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32},
    "Pythia, and other GPT-NeoX models at 2048": {"hidden_size": 2048, "num_hidden_layers": 16},
    **{name: {"sliding_window": None} for name in (
        "Mistral Small 2409, 22B", "Mistral 7B v0.2 and v0.3", "Mistral Nemo 12B",
        "Mistral Nemo 12B, corrected config", "Mistral Small 3 (2501), 24B",
    )},
    "YaRN Llama 2, 128K": {"max_position_embeddings": 131072},
    **{name: {"max_position_embeddings": 32768} for name, rope in ROPE.items() if rope is QWEN},
}  # fmt: skip


def config_of(row: Checkpoint) -> PreTrainedConfig:
    """The config of a row; what neither it nor the tables above say is transformers' default."""
    match = dict(row.match)
    model_type = match.pop("model_type")
    rope = {name: match.pop(name) for name in ("rope_type", "rope_theta", "factor") if name in match}
    rope = {**rope, **ROPE.get(row.name, {})}
    whole = CONFIG_MAPPING[BORROWED.get(model_type, model_type)]
    if model_type in BORROWED:
        whole = type(model_type, (whole,), {"model_type": model_type})
    shape = {**match, **SHAPE.get(row.name, {})}
    usual = whole(**shape).rope_parameters
    if "full_attention" in usual:
        rope = {**usual, "full_attention": {**usual["full_attention"], **rope}}
    else:
        rope = {
            **{k: v for k, v in usual.items() if k in ("rope_theta", "partial_rotary_factor", "mrope_section")},
            **rope,
        }
    config: PreTrainedConfig = whole(**shape, rope_parameters=rope)
    found = known_checkpoint(config, rope_tables(config, config.rope_parameters)[0].parameters)
    if found != row:
        raise ValueError(f"the config of {row.name!r} is taken for {found and found.name!r}.")
    return config


def trained_phases(row: Checkpoint, plan: RopePlan, table: RopeTable) -> torch.Tensor:
    """The largest angle in radians that each pair reached in training, of shape (pair,)."""
    facts = plan.facts
    unscaled = facts.original_rope_of(table).inv_freq
    if row.scaling != "trained-in":
        return unscaled * row.trained_length
    assert facts.original_length is not None
    return torch.maximum(table.in_use.inv_freq * row.trained_length, unscaled * facts.original_length)


def phase_ratio(row: Checkpoint, plan: RopePlan) -> float | None:
    """The largest angle at the target over the largest in training, over the pairs that finished no turn in training.

    None where every pair finished one.
    """
    ratios = []
    for table in plan.facts.seen_beyond(plan.start):
        trained = trained_phases(row, plan, table)
        reached = plan.tables[table.label].inv_freq * plan.target_length
        ratios += (reached / trained)[trained < 2 * math.pi].tolist()
    return max(ratios, default=None)


def cell(row: Checkpoint, config: PreTrainedConfig, existing: Any) -> dict[str, Any]:
    try:
        plan = plan_extension(config, FACTOR, existing=existing)
    except ValueError as error:
        return {"refused": str(error)}
    ratio = phase_ratio(row, plan)
    return {"start": plan.start, "target": plan.target_length, "ratio": None if ratio is None else round(ratio, 4)}


def rows() -> list[dict[str, Any]]:
    """What each verb makes of every row, at FACTOR times what it counts from."""
    found = []
    for row in checkpoints():
        config = config_of(row)
        scaled = row.scaling != "none"
        verbs = VERBS if scaled else ("replace",)
        found.append({
            "name": row.name, "scaling": row.scaling, "trained_length": row.trained_length,
            **{verb: cell(row, config, verb) for verb in verbs},
        })  # fmt: skip
    return found


def _words(found: dict[str, Any] | None) -> str:
    if found is None:
        return "—"
    if "refused" in found:
        return "refused"
    ratio = "every pair turns" if found["ratio"] is None else f"{found['ratio']:.2f}"
    return f"{ratio} ({found['start']:,} → {found['target']:,})"


def page(found: list[dict[str, Any]]) -> str:
    """docs/checkpoints.md."""
    lines = [
        "# What each `existing=` does to known checkpoints",
        "",
        f"What `extend_context(model, {FACTOR:g}, existing=…)` makes of every row of "
        "[checkpoints.toml](../ctxext/models/checkpoints.toml) with the default method, YaRN; `keep` takes no method.",
        "",
        "**Above 1 means angles never seen in training.** The number is a ratio of angles: at position p, a pair of",
        "rotary dimensions has turned by inv_freq × p radians. Over all pairs that finished no full turn in training,",
        "it is the largest quotient of the angle at the target length and the largest angle in training. The angle in",
        "training is the unscaled frequency × the length before any scaling. Where a scaling was trained in, it is the",
        "larger of that and the scaled frequency × the trained length. Brackets hold the length that the factor counts",
        "from and the target, in tokens.",
        "",
        "**Which one?** `keep` for a target that the vendor's scaling was made for: only the maximum length rises.",
        "`compose` to go further, in the smaller step: Llama 3.1 from 131,072 to 524,288 tokens is ×4 of what it was",
        "trained at. `replace` starts again from the length before any scaling: the same target is ×64 of 8,192, which",
        "needs continued pretraining ([UltraLong](https://arxiv.org/abs/2504.06214) did so for 1M). A composed YaRN is",
        "saved as a list of factors (`longrope`): vLLM and SGLang need the folder that `ctxext export` writes.",
        "",
        "Where nothing is scaled, `replace` is the default, and the other two are refused (—).",
        "",
        "| checkpoint | scaling | trained at | keep | compose | replace |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [row["name"], row["scaling"], f"{row['trained_length']:,}", *(_words(row.get(verb)) for verb in VERBS)]
        lines.append("| " + " | ".join(cells) + " |")
    refused = {
        f"{row['name']}, {verb}: {row[verb]['refused']}"
        for row in found
        for verb in VERBS
        if "refused" in row.get(verb, {})
    }
    lines += ["", *(f"- {words}" for words in sorted(refused))]
    lines += ["", "Written by `python docs/checkpoints.py` from [checkpoints.json](checkpoints.json).", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    found = rows()
    (HERE / "checkpoints.json").write_text(json.dumps({"factor": FACTOR, "rows": found}, indent=1) + "\n")
    (HERE / "checkpoints.md").write_text(page(found))
