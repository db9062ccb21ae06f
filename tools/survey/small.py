"""Any model type of the installed transformers as a small random model.

The published config of a type is shrunk by the names of its fields, sub-configs included. What matters for positions
stays as published: rope_type, rope_theta, the share of rotary dimensions, ALiBi flags, and every type of layer.
"""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LENGTH = 64  # the trained length of every model here that has one, in tokens
WINDOW = 32  # of layers that slide beside others that do not
VOCABULARY = 128
SPECIAL = 100  # tokens from here on may mean an image, a sound or the end; below it, only words

# A kind of model: its auto class, and the mapping that lists its model types. A type is of the first kind that has it.
KINDS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "speech": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "base": ("AutoModel", "MODEL_MAPPING_NAMES"),
}

# What a number becomes by the name of its field, the first pattern deciding; never more than it was.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(original_)?max_position_embeddings|max_(encoder|decoder)_position_embeddings|max_(target|source)_positions"
     r"|max_seq_len|max_sequence_length|context_length"
     r"|encoder_max_position_embeddings|decoder_max_position_embeddings", LENGTH),
    (r"rotary_dim|qk_rope_head_dim|index_head_dim", 16),
    (r".*head_dim|dim_head|d_head|d_kv|attention_head_size|mamba_d_head|mamba_headdim", 32),
    (r".*experts_per_tok|moe_topk|moe_k|top_k_experts|moe_top_k", 2),
    (r"n_group|topk_group|.*n_groups|.*ngroups|.*shared_experts", 1),
    (r".*experts|zero_expert_num", 4),
    (r".*hidden_layers|(n|num)_layers?|(encoder|decoder)_layers|num_(encoder|decoder)_layers|num_blocks|depth", 2),
    (r"(mamba|ssm|linear).*heads", 4),
    (r".*_heads?|attention_heads|num_query_groups", 4),
    (r".*_rank|.*state_size|.*d_state|(?!acoustic).*chunk_size", 16),
    (r".*vocab_size.*|n_words|.*byte_group_vocab", VOCABULARY),
    (r"(.*_)?hidden_size(_global)?|.*(intermediate|ffn|feed_forward|inner).*|d_(inner|ff|model)|.*(ff|emb|embed|proj)_dim"
     r"|embedding_(size|dim)|projection_dim|lru_width|adapter_in(put)?_(dim|size)|adapter_out_dim|dff|dim_ff", 64),
)  # fmt: skip
# Numbers by which initial weights are scaled, as wide as a change of positions needs to show in the logits.
SPREAD = {"initializer_range": 0.3, "init_std": 0.3}

_BERT_LIKE = {"max_position_embeddings": LENGTH + 2}  # positions are counted from the padding token's number + 1
_TWO_OF_FOUR = {"num_experts_per_tok": 2}

# Where the names are not enough: values of fields by model type, sub-configs included.
# fmt: off
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
                     "ibert", "longformer", "luke", "mpnet", "prophetnet", "markuplm"), _BERT_LIKE),
    "led": {"attention_window": [16, 16]},
    "xmod": _BERT_LIKE | {"default_language": "en_XX"},
    "esm": _BERT_LIKE | {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 101},  # published as None
    # Published as None, to be said by each checkpoint.
    "deepseek_v2": _TWO_OF_FOUR,
    "nemotron": {"num_key_value_heads": 2},
    "dots1": _TWO_OF_FOUR | {"n_routed_experts": 4, "n_shared_experts": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 500000.0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0,
                                               "mrope_section": [3, 3, 2]}},
    },
    # Attention and other layers follow a count, which two layers would not reach.
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    # The last layers reuse keys and values of earlier ones of their type.
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    # Layers that see everything have heads of another size.
    "gemma4_text": {"global_head_dim": 64},
    "gemma4_unified_text": {"global_head_dim": 64},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 48, "swa_qk_nope_head_dim": 32, "swa_v_head_dim": 32,
    },
    # The share of rotary dimensions is written twice.
    "mistral4": {"qk_nope_head_dim": 16},
    # Multimodal sections that are checked before, or not named where, they could be shared out.
    "cosmos3_edge_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e8, "mrope_section": [5, 5, 6]},
    },
    "paddleocr_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [5, 5, 6]},
    },
    "step3p5": {"sliding_window": WINDOW},  # published as None, beside layers that slide
    # All heads together are as wide as the model.
    "helium": {"head_dim": 16},
    "longcat_flash": {"head_dim": 16},
    "musicgen_decoder": {"num_codebooks": 1},  # each codebook would be a row of the batch
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 512,
                       "indexer_compress_ratio": 4},
    "falcon_h1": {"mamba_d_ssm": 32},
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 48)},
    "xlstm": {"qk_dim_factor": 1.0},
}
# fmt: on


def model_types() -> dict[str, str]:
    """The kind of every model type of the installed transformers, causal language models first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind, (_, mapping) in KINDS.items():
        for model_type in getattr(modeling_auto, mapping):
            found.setdefault(model_type, kind)
    return found


def small_config(model_type: str, kind: str, **changes: Any) -> PreTrainedConfig:
    """The published config of `model_type`, shrunk to a trained length of LENGTH tokens.

    Args:
        changes: values of fields, instead of those chosen here.

    Raises:
        Exception: whatever the family's config class raises where it cannot be built, or not small.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    if kind == "causal" and "is_decoder" in {field.name for field in fields(type(config))}:
        changes = {"is_decoder": True, **changes}
    return _shrunk(config, changes)


def _shrunk(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    cls = type(config)
    standard_names = {own: name for name, own in cls.attribute_map.items()}
    declared = {field.name: field.default for field in fields(cls)}
    small: dict[str, Any] = {}
    special = iter(range(VOCABULARY - 1, SPECIAL, -1))
    for name, default in declared.items():
        value = config.__dict__.get(cls.attribute_map.get(name, name))
        standard = standard_names.get(name, name)
        if hasattr(value, "attribute_map"):
            small[name] = _shrunk(value, {})
        elif standard in ("num_key_value_heads", "num_kv_heads") and type(default) is int:
            heads = config.__dict__[cls.attribute_map.get("num_attention_heads", "num_attention_heads")]
            small[name] = 4 if value == heads else min(value, 2)
        elif re.fullmatch(r".*_token_(id|index)", name) and type(value) is int and value > 2:
            small[name] = next(special)
        elif default is not None and type(value) is int:
            small[name] = _size(standard, _size(name, value))
        elif name in SPREAD:
            small[name] = SPREAD[name]
    small |= _fewer_layers(config, declared)
    small |= _windows(config, small, declared)
    small |= EXCEPTIONS.get(config.model_type, {}) | changes
    new = cls(**small)
    if "head_dim" in declared and new.__dict__["head_dim"] is None:  # published checkpoints of some families say it
        small["head_dim"] = new.hidden_size // new.num_attention_heads
        new = cls(**small)
    if isinstance(config.__dict__.get("rope_parameters"), dict):
        new = cls(**{"rope_parameters": _shorter(config.rope_parameters, new), **small})
    return new


def _size(name: str, value: int) -> int:
    return next((min(value, size) for pattern, size in SIZES if re.fullmatch(pattern, name)), value)


def _fewer_layers(config: PreTrainedConfig, declared: dict[str, Any]) -> dict[str, Any]:
    """Lists that say something of every layer, cut to the fewest layers that hold every pair of types."""
    depth = getattr(config, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in config.__dict__.items()
        if name in declared and isinstance(value, (list, tuple)) and depth and len(value) == depth > 2
    }
    types = [name for name in lists if name.endswith(("types", "type"))] or list(lists)
    if not lists:
        return {}
    first: dict[Any, int] = {}
    for layer in range(depth):
        for name in types:
            first.setdefault((name, str(lists[name][layer])), layer)
    kept = sorted({*first.values()}) if len({*first.values()}) > 1 else [0, 1]
    small = {name: type(value)(value[layer] for layer in kept) for name, value in lists.items()}
    small[type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    return small


def _windows(config: PreTrainedConfig, small: dict[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    """Within the trained length where other layers see everything, beyond all that is run where every layer slides."""
    layers = small.get("layer_types") or getattr(config, "layer_types", None)
    mixed = layers is not None and any("sliding" not in layer for layer in layers)
    return {
        name: WINDOW if mixed else 16 * LENGTH
        for name in ("sliding_window", "local_attention", "window_size", "attention_window_size")
        if type(config.__dict__.get(name)) is int and name in declared
    }


def _shorter(parameters: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Published rope_parameters at the small length, multimodal sections shared out again over fewer pairs."""
    parameters = copy.deepcopy(parameters)
    for value in parameters.values():
        if isinstance(value, dict):
            value.update(_shorter(value, config))
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = LENGTH
    for name, n in (("mrope_section", 3), ("xdrope_section", 4)):
        if name in parameters or name in getattr(config, "ignore_keys_at_rope_validation", ()):
            head_dim = config.__dict__.get("head_dim") or config.hidden_size // config.num_attention_heads
            pairs = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
            parameters[name] = [*[pairs // n] * (n - 1), pairs - (n - 1) * (pairs // n)]
    return parameters


def small_model(model_type: str, kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of `small_config`, float32, in eval mode; its weights depend on `seed` alone."""
    return from_config(small_config(model_type, kind, **changes), kind, seed)


def from_config(config: PreTrainedConfig, kind: str, seed: int = 0) -> PreTrainedModel:
    """The model of `config` by the auto class of `kind`."""
    torch.manual_seed(seed)
    cls = _model_class(config.model_type, kind)
    # The model of some types is that of a part of its config.
    parts = [part for part in config.__dict__.values() if isinstance(part, cls.config_class)]
    whole = isinstance(config, cls.config_class) or not parts
    model: PreTrainedModel = cls._from_config(config if whole else parts[0], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # A fresh model's zeros hide what is multiplied by them: ZAYA's temperatures.
                parameter.normal_(std=0.1)
    return model.eval()


def without_tokens(model_type: str, kind: str) -> str | None:
    """Why a model type has no positions of tokens; None where it reads tokens."""
    cls = _model_class(model_type, kind)
    takes = inspect.signature(cls.forward).parameters
    if "input_ids" in takes or "decoder_input_ids" in takes:
        return None
    return f"{cls.__name__}.forward takes no token ids"


def _model_class(model_type: str, kind: str) -> type[PreTrainedModel]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto = getattr(transformers, KINDS[kind][0])
    found = auto._model_mapping[CONFIG_MAPPING[model_type]]
    cls: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return cls


def token_ids(n_tokens: int, seed: int = 0) -> Tensor:
    """Random words, (1, n_tokens): no special token among them."""
    return torch.randint(3, SPECIAL, (1, n_tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stock_logits(model: nn.Module, n_tokens: int, seed: int = 0) -> Tensor:
    """What a model of any kind makes of `n_tokens` random tokens: logits, or the last hidden states where it has none.

    Encoder-decoders read that many tokens and write that many.

    Raises:
        ValueError: nothing that it returns is a finite tensor of (1, tokens, values).
    """
    from transformers.modeling_outputs import BaseModelOutput

    takes = inspect.signature(model.forward).parameters
    ids = token_ids(n_tokens, seed)
    inputs: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    if "input_ids" in takes:
        inputs["input_ids"] = ids
    if "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = ids
        if "input_ids" not in takes:  # it hears: the decoder is what has positions of tokens, so it hears noise
            width = model.config.get_text_config(decoder=True).hidden_size
            noise = BaseModelOutput(torch.randn((1, 16, width), generator=torch.Generator().manual_seed(seed)))
            noise.attention_mask = torch.ones((1, 16), dtype=torch.long)
            inputs["encoder_outputs"] = noise
    torch.manual_seed(seed)  # Reformer hashes at random
    output = model(**inputs)
    for name in ("logits", "last_hidden_state"):
        found = output.get(name)
        if isinstance(found, Tensor):
            if not bool(found.isfinite().all()):
                raise ValueError(f"{name} of {type(model).__name__} are not finite.")
            return found
    raise ValueError(f"{type(model).__name__} returns no logits: {', '.join(output)}.")
