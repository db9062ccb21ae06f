"""An adapter served by vLLM beside its extended base, where that is exact."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ctxext.export.rules import EngineExport, NotExportable
from ctxext.extension.adapter_config import ADAPTER_CONFIG
from ctxext.utils.json_files import read_json

# The values that vLLM's --max-lora-rank takes.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Fields of adapter_config.json that must be unset: vLLM rejects them, or some of its versions ignore them.
_UNSET = (
    "modules_to_save", "use_dora", "lora_bias", "layer_replication", "alora_invocation_tokens", "use_qalora",
    "use_bdlora", "rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters",
)  # fmt: skip
# Initial values of the adapter alone; others (PiSSA, OLoRA) change the base's weights.
_INITS = ("gaussian", "eva", "orthogonal")


def why_merge(adapter: Path) -> str | None:
    """Why vLLM cannot serve the adapter in this folder beside its base; None if it can."""
    config = read_json(adapter / ADAPTER_CONFIG).content
    if config.get("peft_type") != "LORA":
        return f"is an adapter of type {config.get('peft_type')}, and vLLM serves LoRA alone"
    if odd := [name for name in _UNSET if config.get(name)]:
        return f"is an adapter with {odd[0]}, which vLLM rejects"
    if config.get("bias", "none") != "none":
        return f"is an adapter with bias {config['bias']!r}, which vLLM rejects"
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _INITS:
        return f"is an adapter whose init_lora_weights, {init!r}, changed the weights of its base"
    if not isinstance(rank := config.get("r"), int) or not 0 < rank <= RANKS[-1]:
        return f"is an adapter of rank {rank}, and vLLM takes 1 to {RANKS[-1]}"
    names = _parameters(adapter)
    if names is None:
        return "is an adapter without adapter_model.safetensors"
    if outer := [name for name in names if "lora_embedding" in name or "lm_head" in name]:
        return f"is an adapter of the embeddings ({outer[0]}), with which vLLM was not run"
    return None


def merge_first(adapter: str, why: str) -> str:
    """An error: what the adapter is, and the command that merges it."""
    return f"{adapter} {why}. Merge it first: ctxext merge {shlex.quote(adapter)} -o MERGED."


def with_adapter(export: EngineExport, adapter: Path) -> EngineExport:
    """The export of an adapter's base, with the flags that serve the adapter too, under its folder's name.

    Raises:
        NotExportable: another engine than vLLM.
    """
    if export.engine != "vllm":
        raise NotExportable(merge_first(str(adapter), "is an adapter, which is exported only for vLLM"))
    rank = read_json(adapter / ADAPTER_CONFIG).content["r"]
    flags: tuple[str, ...] = ("--enable-lora", "--lora-modules", f"{adapter.resolve().name}={adapter}")
    least = next(each for each in RANKS if each >= rank)
    return replace(export, flags=(*export.flags, *flags, "--max-lora-rank", str(least)))


def _parameters(adapter: Path) -> list[str] | None:
    path: Any = adapter / "adapter_model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        return list(file.keys())
