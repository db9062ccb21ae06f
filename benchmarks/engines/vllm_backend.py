"""A plugin for vLLM's CPU build: in-attention RoPE, for a folder that `ctxext.load` loads. A prototype.

vLLM's rotary embedding rotates nothing, so the paged cache holds pre-RoPE keys. The attention backend gathers the keys
of each sequence by its block table, and calls ctxext's attention function with the positions of queries and keys.

vLLM calls `register` in each of its processes if an entry point of the group `vllm.general_plugins` names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import ctxext
from ctxext.attention.call import Call
from ctxext.attention.keys import PositionedLayer
from ctxext.attention.rotary import InAttentionRotary
from ctxext.methods import RopeScaling

TRIED = ("llama", "mistral", "qwen2", "qwen3")


def register() -> None:
    """Replace attention and rotary embedding of every model that this process builds."""
    if not current_platform.is_cpu():
        raise RuntimeError(f"in-attention RoPE in vLLM was tried on CPUs alone, not on {current_platform.device_name}.")
    # The CPU platform ignores --attention-backend CUSTOM, and takes whatever is registered under its own name.
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.InAttentionBackend")
    CustomOp.register_oot(Unrotated, name="RotaryEmbedding")


def refuse(what: dict[str, object]) -> None:
    """Raise ValueError with the names whose values are true."""
    found = [name for name, value in what.items() if value]
    if found:
        raise ValueError(
            f"in-attention RoPE in vLLM does not support {', '.join(found)}. Use `ctxext serve`, or start vLLM without "
            "this plugin and extend by a static method, such as 'yarn'."
        )


def refuse_config(config: VllmConfig) -> None:
    model, parallel, text = config.model_config, config.parallel_config, config.model_config.hf_text_config
    rope_type = (text.rope_parameters or {}).get("rope_type", "default")
    refuse({
        f"model_type {text.model_type!r} (but {', '.join(TRIED)})": text.model_type not in TRIED,
        f"rope_type {rope_type!r}": rope_type != "default",
        f"{model.dtype} (but float32)": model.dtype != torch.float32,
        "quantised weights": model.quantization,
        "several workers": parallel.world_size_across_dp > 1,
        "KV cache transfer": config.kv_transfer_config,
        "adapters": config.lora_config,
        "speculative decoding": config.speculative_config,
        "compiled models (pass --enforce-eager)": not model.enforce_eager,
    })  # fmt: skip


def load_rotary(config: VllmConfig) -> InAttentionRotary:
    """The rotary embedding of the served folder, as `ctxext.load` builds and verifies it; the model is dropped."""
    folder = config.model_config.model
    model = ctxext.load(folder, dtype=torch.float32)
    extension = getattr(model, "context_extension", None)
    rotary = next((each for each in model.modules() if isinstance(each, InAttentionRotary)), None)
    if extension is None or rotary is None:
        raise ValueError(
            f"{folder} is not extended by a method with in-attention RoPE. Start vLLM without this plugin: set "
            "VLLM_PLUGINS= (empty)."
        )
    refuse({
        "methods with one scale for the whole call": (
            isinstance(rotary.method, RopeScaling) and rotary.method.of_the_call
        ),
    })  # fmt: skip
    target, given = extension.plan.target_length, config.model_config.max_model_len
    if given > target:
        raise ValueError(f"{extension.plan.summary} reaches {target} tokens, got --max-model-len {given}.")
    return rotary


class Unrotated(RotaryEmbedding):
    """Leaves queries and keys as they are; attention rotates them."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return query, key


class InAttentionBackend(CPUAttentionBackend):
    """Pages of shape (block, key heads, token, 2 · head_dim): each token's key, then its value."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return InAttention

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return Builder


class Paged(PositionedLayer):
    """What `Call` asks of a cache layer: the positions of a sequence's keys, which are their indices."""

    incoming = None

    def __init__(self, n_keys: int) -> None:
        self.key_positions = torch.arange(n_keys)[None]


@dataclass
class Sequence:
    """A sequence in a batch.

    Attributes:
        queries: its rows of the batch's tokens, the last of its keys.
        pages: the blocks that hold its keys.
        call: shared by all layers.
    """

    queries: slice
    n_keys: int
    pages: torch.Tensor
    call: Call


@dataclass
class Batch:
    """One forward pass.

    Attributes:
        slots: where each token's key is stored, counted in tokens.
    """

    sequences: list[Sequence]
    slots: torch.Tensor


class Builder(AttentionMetadataBuilder[Batch]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.rotary = load_rotary(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        batch = common_attn_metadata
        starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens.tolist()
        n_layers, sequences = len(self.rotary.layers), []
        for row in range(batch.num_reqs):
            queries, n_keys = slice(starts[row], starts[row + 1]), lengths[row]
            positions = torch.arange(n_keys - (queries.stop - queries.start), n_keys)[None]
            cache: Any = SimpleNamespace(layers=[Paged(n_keys)] * n_layers)
            n_pages = -(-n_keys // self.kv_cache_spec.block_size)
            pages = batch.block_table_tensor[row, :n_pages].long()
            sequences.append(Sequence(queries, n_keys, pages, Call(self.rotary, positions, cache)))
        return Batch(sequences, batch.slot_mapping[: batch.num_actual_tokens])


class InAttention(AttentionImpl):
    """One layer."""

    is_causal = True  # as ctxext and transformers' attention function read it

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        refuse_config(get_current_vllm_config())
        refuse({
            "ALiBi": alibi_slopes,
            "sliding windows": sliding_window,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float32"),
            "softcaps": logits_soft_cap,
            f"{attn_type} attention": attn_type != "decoder",
            "layers that share keys": kv_sharing_target_layer_name,
            "attention sinks": sinks is not None,
        })  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.num_key_value_groups = num_heads // num_kv_heads

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Batch | None, output: torch.Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """All of shape (tokens, heads, head_dim), as is `output`, which it fills."""
        if attn_metadata is None:  # vLLM measures memory
            return output
        self.layer_idx = extract_layer_index(layer.layer_name)
        slots, size = attn_metadata.slots, kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat([key, value], dim=-1)[: len(slots)]
        for each in attn_metadata.sequences:
            held = kv_cache[each.pages].transpose(0, 1).flatten(1, 2)[None, :, : each.n_keys]
            keys, values = held.split(self.head_size, dim=-1)
            rows = query[each.queries].transpose(0, 1)[None]
            output[each.queries] = each.call.attend(self, rows, keys, values, None, scaling=self.scale)[0][0]
        return output
