"""How each engine reads each field, and the evidence: the rows of the warnings and of docs/engine_evidence.md."""

from __future__ import annotations

from dataclasses import dataclass

VLLM = "vllm-project/vllm"
SGLANG = "sgl-project/sglang"
LLAMA_CPP = "ggml-org/llama.cpp"


@dataclass(frozen=True)
class Reading:
    """How some versions of an engine read a field.

    Attributes:
        field: its name in a config or on the command line.
        does: what the engine does with it, as a clause with the field as subject.
        known: "run" and by which command or test; or "read" and where: repository@commit:path, or a thread.
    """

    engine: str
    versions: str
    field: str
    does: str
    known: str

    def __str__(self) -> str:
        return f"{self.engine} {self.versions}: {self.field} {self.does}"


_VLLM_ROPE = f"{VLLM}@0cd57848:vllm/model_executor/layers/rotary_embedding"
_VLLM_LENGTH = f"{VLLM}@18ec6629:vllm/config/model.py"
_LENGTH_WHEELS = "vllm/config/model.py (_get_and_verify_max_len) in the wheels of 0.12.0, 0.29.0, 0.30.0 and 0.32.0"
_VLLM_WHEELS = "vllm/model_executor/layers/rotary_embedding/__init__.py in the wheels of"
_SGLANG_ROPE = f"{SGLANG}@108c36c0:python/sglang/srt/layers/rotary_embedding"
_SGLANG_LENGTH = f"{SGLANG}@001adf56:python/sglang/srt/configs/model_config.py"
_LLAMA_CPP_CONTEXT = f"{LLAMA_CPP}@001d906a:src/llama-context.cpp"
_EXLLAMA = "read: exllamav3/util/rope.py in the wheel of 1.6.5"
_LMDEPLOY = "read: lmdeploy/pytorch/nn/rotary_embedding.py, backends/default/rotary_embedding.py in the wheel of 0.18.0"
_ORT = "onnxruntime_genai/models/builders/"
_ORT_BASE = f"run: benchmarks/engines/run.py; read: {_ORT}base.py in the wheel of 0.18.0"
_ORT_LLAMA = f"run: benchmarks/engines/run.py; read: {_ORT}llama.py, mistral.py and phi.py in the wheel of 0.18.0"
_OPENVINO = "read: optimum/exporters/openvino/model_patcher.py in the wheel of 2.2.0"
_LLAMA_CPP_MODELS = f"{LLAMA_CPP} b11549:src/models/"
_LLAMA_CPP_RUN = "run: tests/export/test_gguf_families.py"
_VERSIONS = "run: benchmarks/versions.py"
_MLX = "run: benchmarks/engines/run.py; read: mlx_lm/models/rope_utils.py in the wheel of 0.32.2"
_VLLM_RUN = "run: benchmarks/engines/vllm_reads.py"
_VLLM_VERSIONS = "run: benchmarks/engines/versions.py"
_VLLM_OVERRIDES = "vllm/config/model.py (_apply_dict_overrides) in the wheels of 0.12.0, 0.19.1, 0.29.0 and 0.32.0"
_SGLANG_VERSIONS = "run: benchmarks/engines/versions.py --engine sglang"
_SGLANG_CONFIG = "sglang/srt/utils/hf_transformers/config.py (get_config) in the wheels of"

# By engine and field: versions, field, does, known.
_ROWS = {
    # ------------------------------------------------------------------------------------ transformers
    "transformers-config": (">= 5.0", "rope_parameters",
        "is read; rope_theta and rope_scaling hold the same for version 4", _VERSIONS),
    "transformers-4-config": ("4.57", "rope_parameters",
        "is ignored: without rope_theta and rope_scaling the model silently becomes plain RoPE with theta 10000",
        _VERSIONS),
    "transformers-4-nested": ("4", "rope_parameters per layer type",
        "has no common format: each family has its own", "read: modeling_rope_utils.py of 4.57.6"),
    "transformers-4-phi3": ("4.57", "rope_scaling of Phi-3",
        "must hold only type, short_factor and long_factor, or loading raises; the attention factor is computed from "
        "max_position_embeddings and original_max_position_embeddings, which an export for version 4 sets accordingly",
        _VERSIONS),
    "transformers-4-olmo": ("4.57", "rope_scaling of OLMo, OLMo-2, Hunyuan, Chameleon and Fuyu",
        "must hold only type (linear or dynamic) and factor, or loading raises", _VERSIONS),
    "transformers-dynamic": ("4 and 5", 'rope_type "dynamic"',
        "computes its base from the longest call so far, so cached decoding differs from a full forward pass",
        "run: tests/attention/test_stock_defects.py"),
    "transformers-longrope": ("4 and 5", 'rope_type "longrope"',
        "switches lists at original_max_position_embeddings, even within one sequence; ctxext writes two equal lists",
        "run: tests/attention/test_stock_defects.py"),
    # -------------------------------------------------------------------------------------------- vLLM
    "vllm-config": (">= 0.12", "rope_parameters", "is read, instead of rope_scaling",
        "read: vllm-project/vllm#28542"),
    "vllm-transformers-4": ("0.12 to 0.19.0", "rope_theta",
        "overrides the one in rope_parameters, even by the default of the config's class, and rope_scaling overrides "
        "rope_parameters: these versions require transformers 4, so both are written with equal values. 0.19.1 also "
        "allows transformers 5, which pip installs",
        f"{_VLLM_VERSIONS}; read: vllm/transformers_utils/config.py (patch_rope_parameters) and METADATA in the wheels "
        "of 0.19.0 and 0.19.1, configuration_*.py in that of transformers 4.57.6"),
    "vllm-rope-scaling": (">= 0.12", "--rope-scaling", "was removed; pass rope_parameters in --hf-overrides",
        "read: vllm-project/vllm#28006"),
    "vllm-overrides": (">= 0.12", "--hf-overrides",
        "replaces top-level keys, but merges into a nested text config",
        f"read: {_VLLM_LENGTH} (_apply_dict_overrides)"),
    "vllm-misplaced": (">= 0.12", "a context key outside a nested text config",
        "is set on the outer config, which the text model does not read: write it inside text_config",
        f"read: vllm-project/recipes#856, {_VLLM_OVERRIDES}"),
    "vllm-bare": (">= 0.12", "a rope key of --hf-overrides outside rope_parameters",
        "is not read: write it inside rope_parameters",
        f"read: {_VLLM_OVERRIDES}"),
    "vllm-flat-model": (">= 0.12", "text_config in --hf-overrides of a model without one",
        "is taken for the whole text config, which then lacks num_attention_heads: write its keys at the top level",
        _VLLM_RUN),
    "vllm-layer-types": (">= 0.12", "flat rope_parameters for a model with one object per layer type",
        "are not read: write an object for each layer type, such as full_attention",
        "read: vllm/model_executor/models/gemma3.py in the wheel of 0.32.0"),
    "vllm-rope-scaling-key": ("0.12 to 0.19.0", "rope_scaling in --hf-overrides",
        "is ignored, as rope_parameters were read before: write rope_parameters",
        f"{_VLLM_VERSIONS}; read: {_VLLM_OVERRIDES}"),
    "vllm-type": (">= 0.12", "type in place of rope_type in --hf-overrides",
        "stops the server with KeyError 'rope_type'; in a nested text config the old rope_type stays",
        f"{_VLLM_RUN}; read: {_VLLM_OVERRIDES}"),
    "vllm-theta-key": (">= 0.19.1", "a top-level rope_theta in --hf-overrides",
        "is ignored: the base is the one in rope_parameters", _VLLM_RUN),
    "vllm-theta-lost": (">= 0.12", "a rope_theta missing from the override",
        "is lost with the rope_parameters that it replaces: the model class's own base is used, which is 1e6 for Qwen2 "
        "and Qwen3, and 10000 for most",
        f"{_VLLM_RUN}; read: vllm/model_executor/models/ (set_default_rope_theta) and {_VLLM_WHEELS} 0.32.0"),
    "vllm-theta-missing": ("0.12", "a rope_theta missing from the override",
        "stops the start with KeyError 'rope_theta', except in model classes with a base of their own (Qwen2, Qwen3)",
        f"{_VLLM_VERSIONS}; read: {_VLLM_WHEELS} 0.12.0 and 0.13.0"),
    "vllm-replaced": (">= 0.12", "a mrope_section or partial_rotary_factor missing from the override",
        "is lost with the rope_parameters that it replaces; MiniMax-M2's class takes the factor from rotary_dim",
        f"read: {_VLLM_OVERRIDES}; {VLLM}@01d99586:vllm/model_executor/models/minimax_m2.py"),
    "vllm-missing": (">= 0.12", "a factor or original_max_position_embeddings",
        "is needed by some types, such as yarn; without it the server does not start", f"read: {_VLLM_WHEELS} 0.32.0"),
    "vllm-unknown-key": (">= 0.12", "max_model_len in --hf-overrides",
        "is ignored: pass --max-model-len", _VLLM_RUN),
    "vllm-length": (">= 0.12", "max_position_embeddings",
        "is the maximum length served, multiplied by factor for linear scaling. A longer --max-model-len is "
        "rejected", f"read: {_LENGTH_WHEELS}"),
    "vllm-yarn-length": ("<= 0.29", "max_position_embeddings with yarn",
        "is ignored: original_max_position_embeddings * factor is served", f"{_VLLM_VERSIONS}; read: {_LENGTH_WHEELS}"),
    "vllm-yarn-length-new": (">= 0.30", "max_position_embeddings with yarn",
        "is the maximum length, and factor is not counted: an override with yarn needs the new length there too",
        f"{_VLLM_RUN}; read: vllm-project/vllm#56446"),
    "vllm-yarn-rows": (">= 0.12", "the table of yarn", "has original_max_position_embeddings * factor rows",
        "read: vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py in the wheels of 0.12.0 and 0.32.0"),
    "vllm-long-override": (">= 0.12", "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "lets --max-model-len exceed the cos/sin table, beyond which logits are NaN without an error; ctxext never "
        "needs it", f"read: {_LENGTH_WHEELS}"),
    "vllm-tokenizer-length": (">= 0.12", "model_max_length of tokenizer_config.json",
        "is only read for pooling models with absolute positions", f"read: {_LENGTH_WHEELS}"),
    "vllm-attention-factor": ("<= 0.29", "attention_factor of yarn",
        "is ignored; ctxext also writes attn_factor, a multiplier of 0.1 ln(factor) + 1",
        f"{_VLLM_VERSIONS}; read: vllm-project/vllm#48351, {_VLLM_WHEELS} 0.12.0, 0.19.1, 0.25.1 and 0.29.0"),
    "vllm-attention-factor-new": (">= 0.30", "attention_factor of yarn",
        "is the multiplier of cos and sin, as in transformers, and attn_factor is ignored",
        f"{_VLLM_VERSIONS}; read: {_VLLM_WHEELS} 0.30.0 and 0.32.0"),
    "vllm-attn-factor": (">= 0.30", "attn_factor of yarn",
        "is ignored: write attention_factor, or an mscale in the DeepSeek families",
        f"{_VLLM_VERSIONS}; read: {_VLLM_WHEELS} 0.30.0 and 0.32.0"),
    "vllm-mla-attention-factor": (">= 0.12", "attention_factor of yarn in the DeepSeek families",
        "is ignored, and from 0.30 attn_factor as well; ctxext also writes an mscale of the same effect",
        f"read: {_VLLM_WHEELS} 0.29.0, 0.30.0 and 0.32.0"),
    "vllm-lora": (">= 0.12", "modules_to_save of an adapter",
        "is rejected by --enable-lora, except for classification heads: merge the adapter first",
        "read: vllm/lora/peft_helper.py in the wheels of 0.12.0, 0.21.0 and 0.32.0"),
    "vllm-mla-truncate": (">= 0.12", "truncate of yarn in the DeepSeek families",
        "is ignored: the ramp's ends are always rounded",
        f"read: {VLLM}@07b12f1b:vllm/model_executor/layers/rotary_embedding/__init__.py"),
    "vllm-gpt-oss": (">= 0.12", "rope_parameters of gpt-oss",
        "are read as yarn, whatever their rope_type, and must hold factor, original_max_position_embeddings, beta_fast "
        "and beta_slow; attention_factor is ignored",
        "run: benchmarks/engines/run.py; read: vllm/model_executor/models/gpt_oss.py in the wheel of 0.32.0"),
    "vllm-mscale": ("<= 0.29", "mscale and mscale_all_dim of yarn", "are ignored outside the DeepSeek families",
        f"{_VLLM_VERSIONS}; read: vllm-project/vllm#48621, {_VLLM_WHEELS} 0.29.0 and 0.30.0"),
    "vllm-longrope": (">= 0.12", "attention_factor of longrope",
        "is ignored, and so is factor; short_mscale and long_mscale multiply cos and sin",
        f"read: {_VLLM_ROPE}/__init__.py"),
    "vllm-longrope-lists": (">= 0.12", "long_factor",
        "is used for every sequence, short ones too, once --max-model-len exceeds original_max_position_embeddings",
        f"read: {VLLM}@17d618b0:vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py"),
    "vllm-longrope-pairs": (">= 0.12", "longrope", "is rejected for interleaved pairs (Cohere, GLM, ERNIE)",
        f"read: {VLLM}@17d618b0:vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py"),
    "vllm-mrope": (">= 0.12", "mrope_section", "is only read for default and yarn",
        f"read: {_VLLM_ROPE}/__init__.py"),
    "vllm-dynamic": ("<= 0.21", 'rope_type "dynamic"',
        "uses one static base, computed for max_position_embeddings * factor",
        f"{_VLLM_VERSIONS}; read: vllm-project/vllm#5093"),
    "vllm-dynamic-new": (">= 0.22", 'rope_type "dynamic"',
        "uses the original base with a table of max_position_embeddings rows: NaN beyond", _VLLM_VERSIONS),
    "vllm-proportional": (">= 0.12", "factor of proportional RoPE", "is ignored", f"read: {_VLLM_ROPE}/__init__.py"),
    # ------------------------------------------------------------------------------------------ SGLang
    "sglang-config": (">= 0.5.10", "rope_parameters", "is read in the format of transformers 5",
        f"{_SGLANG_VERSIONS}; read: sgl-project/sglang#17784, sgl-project/sglang-omni#675"),
    "sglang-overrides": ("0.5.10 to 0.5.16", "--json-model-override-args",
        "replaces top-level keys; a nested text_config would be replaced entirely",
        f"read: {_SGLANG_LENGTH}, hf_transformers_utils.py (get_config) in the wheels of 0.5.10, 0.5.12 and 0.5.16"),
    "sglang-overrides-new": (">= 0.5.17", "text_config in --json-model-override-args",
        "keeps its other keys; its rope_parameters are replaced", f"read: {_SGLANG_CONFIG} 0.5.17, 0.5.22 and 0.5.23"),
    "sglang-overrides-merged": (">= 0.5.23", "rope_parameters in --json-model-override-args",
        "are merged with the checkpoint's, except inside text_config",
        f"{_SGLANG_VERSIONS}; read: {_SGLANG_CONFIG} 0.5.22 and 0.5.23"),
    "sglang-misplaced": (">= 0.5.10", "a context key outside a nested text config",
        "is set on the outer config, which the text model does not read: write it inside text_config",
        f"read: {_SGLANG_CONFIG} 0.5.23"),
    "sglang-bare": (">= 0.5.10", "a rope key of --json-model-override-args outside rope_parameters",
        "is not read: write it inside rope_parameters",
        f"read: {_SGLANG_CONFIG} 0.5.23"),
    "sglang-flat-model": (">= 0.5.10", "text_config in --json-model-override-args of a model without one",
        "is taken for the whole text config, which then lacks num_attention_heads: write its keys at the top level",
        _SGLANG_VERSIONS),
    "sglang-layer-types": (">= 0.5.10", "flat rope_parameters for a model with one object per layer type",
        "are not read: write an object for each layer type, such as full_attention",
        "read: sglang/srt/models/gemma3_causal.py in the wheel of 0.5.23"),
    "sglang-type": (">= 0.5.10", "type with another rope_type", "is ignored: write rope_type", _SGLANG_VERSIONS),
    "sglang-theta-key": (">= 0.5.10", "a top-level rope_theta in --json-model-override-args",
        "is ignored: the base is the one in rope_parameters", _SGLANG_VERSIONS),
    "sglang-window": (">= 0.5.10", "sliding_window",
        "is ignored in Llama, Mistral, Mixtral, Qwen2, Qwen3 and Phi-3: every layer has full attention",
        "read: sglang/srt/models/llama.py, mistral.py, mixtral.py, qwen2.py and qwen3.py in the wheel of 0.5.23"),
    "sglang-partial": (">= 0.5.10", "partial_rotary_factor in rope_parameters",
        "is not read (Llama, Phi-3): ctxext writes it at the top level, too",
        "read: sglang/srt/models/llama.py in the wheel of 0.5.23"),
    "sglang-theta-lost": (">= 0.5.10", "a rope_theta missing from the override",
        "is lost with the rope_parameters that it replaces: the classes that start without it use 10000 (1e6 for "
        "Qwen3); from 0.5.23 only inside text_config", _SGLANG_VERSIONS),
    "sglang-theta-missing": (">= 0.5.10", "a rope_theta missing from the override",
        "stops the start with KeyError 'rope_theta': for Qwen3 in 0.5.10, for Qwen2 and the MoE classes of both up to "
        "0.5.17, for DeepSeek, gpt-oss, Granite, Mixtral, OLMo and Phi always; from 0.5.23 only inside text_config",
        f"{_SGLANG_VERSIONS} (Qwen2, Qwen3, DeepSeek); read: sglang/srt/models/ in the wheels of 0.5.10 and 0.5.23"),
    "sglang-replaced": (">= 0.5.10", "a mrope_section or partial_rotary_factor missing from the override",
        "is lost with the rope_parameters that it replaces", f"read: {_SGLANG_CONFIG} 0.5.22 and 0.5.23"),
    "sglang-missing": (">= 0.5.10", "a factor", "is taken as 1 where it is left out",
        f"{_SGLANG_VERSIONS}; read: {_SGLANG_ROPE}/factory.py"),
    "sglang-missing-original": (">= 0.5.10", "original_max_position_embeddings",
        "defaults to max_position_embeddings",
        f"{_SGLANG_VERSIONS}; read: {_SGLANG_ROPE}/factory.py"),
    "sglang-unknown-key": (">= 0.5.10", "max_model_len in --json-model-override-args",
        "is ignored: pass --context-length", _SGLANG_VERSIONS),
    "sglang-long-override": (">= 0.5.10", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "lets --context-length exceed what the config allows, with whatever frequencies it has",
        "read: sglang/srt/configs/model_config.py (_derive_context_length) in the wheels of 0.5.10 and 0.5.23"),
    "sglang-length": (">= 0.5.10", "max_position_embeddings",
        "is multiplied by factor, unless rope_parameters hold original_max_position_embeddings or are llama3. A "
        "longer --context-length is rejected", _SGLANG_VERSIONS),
    "sglang-yarn-rows": ("<= 0.5.20", "the table of yarn",
        "has original_max_position_embeddings * factor right rows: those added for a longer length have the "
        "frequencies of a factor equal to rope_theta", _SGLANG_VERSIONS),
    "sglang-attention-factor": (">= 0.5.10", "attention_factor of yarn",
        "is ignored; ctxext also writes attn_factor, a multiplier of 0.1 ln(factor) + 1",
        f"{_SGLANG_VERSIONS}; read: sgl-project/sglang#33558"),
    "sglang-mscale": ("<= 0.5.15", "mscale and mscale_all_dim of yarn", "are ignored outside the DeepSeek families",
        _SGLANG_VERSIONS),
    "sglang-mrope-mscale": (">= 0.5.16", "mscale or mscale_all_dim of yarn with mrope_section",
        "stops the start with a TypeError: write attn_factor", _SGLANG_VERSIONS),
    "sglang-mla-attention-factor": (">= 0.5.10", "attention_factor of yarn in the DeepSeek families",
        "is ignored; ctxext also writes an mscale of the same effect", _SGLANG_VERSIONS),
    "sglang-mla-truncate": (">= 0.5.10", "truncate of yarn in the DeepSeek families",
        "is ignored: the ramp's ends are always rounded", _SGLANG_VERSIONS),
    "sglang-longrope": (">= 0.5.10", "attention_factor of longrope",
        "is ignored, and so is factor; short_mscale and long_mscale multiply cos and sin",
        f"{_SGLANG_VERSIONS}; read: {_SGLANG_ROPE}/factory.py"),
    "sglang-longrope-switch": (">= 0.5.10", "longrope",
        "switches lists by the largest position in a batch, and if that is original_max_position_embeddings, rotates "
        "it as position 0; with equal lists ctxext writes the target length there",
        f"read: {SGLANG}@0b1fd02d:python/sglang/srt/layers/rotary_embedding/rope_variant.py"),
    "sglang-longrope-pairs": (">= 0.5.10", "longrope", "is rejected for interleaved pairs (Cohere, GLM, ERNIE)",
        f"read: {SGLANG}@0b1fd02d:python/sglang/srt/layers/rotary_embedding/rope_variant.py"),
    "sglang-mrope": (">= 0.5.10", "mrope_section", "is only read for default and yarn",
        f"read: {_SGLANG_ROPE}/factory.py"),
    "sglang-dynamic": (">= 0.5.10", 'rope_type "dynamic"',
        "uses one static base, computed for max_position_embeddings * factor", _SGLANG_VERSIONS),
    "sglang-proportional": (">= 0.5.10", "factor of proportional RoPE", "is ignored",
        f"read: {_SGLANG_ROPE}/factory.py"),
    # ------------------------------------------------------------------------------------------ mlx-lm
    "mlx-config": (">= 0.32", "rope_parameters",
        "are ignored by most classes (Llama, Qwen2): rope_theta and rope_scaling are read, and without them the base "
        "is the class's default", _MLX),
    "mlx-attention-factor": (">= 0.32", "attention_factor of yarn",
        "is ignored; ctxext writes an mscale of the same effect", _MLX),
    "mlx-truncate": (">= 0.32", "truncate of yarn",
        "is ignored: the ramp's ends are always rounded; ctxext writes longrope instead", _MLX),
    "mlx-longrope": (">= 0.32", "attention_factor of longrope",
        "is ignored: the multiplier is computed from max_position_embeddings and original_max_position_embeddings, "
        "which ctxext sets accordingly; long_factor is used for every sequence", _MLX),
    "mlx-dynamic": (">= 0.32", 'rope_type "dynamic"',
        "computes its base from each call, so cached keys keep another base",
        "read: mlx_lm/models/rope_utils.py in the wheel of 0.32.2"),
    "mlx-window": (">= 0.32", "sliding_window",
        "is ignored in Mistral, Qwen2, Qwen3 and Phi-3: every layer has full attention",
        "read: mlx_lm/models/llama.py, qwen2.py, qwen3.py and phi3.py in the wheel of 0.32.2"),
    # -------------------------------------------------------------------------------------- ExLlamaV3
    "exllamav3-window": (">= 1.6", "sliding_window",
        "is ignored in Mistral, Qwen2, Qwen3 and Phi-3: every layer has full attention",
        "read: exllamav3/architecture in the wheel of 1.6.5"),
    "exllamav3-yarn": (">= 1.6", "factor of yarn",
        "is ignored: max_position_embeddings / original_max_position_embeddings is used, and ctxext writes their "
        "product",
        _EXLLAMA),
    "exllamav3-longrope": (">= 1.6", "attention_factor of longrope",
        "is ignored: the multiplier is computed from max_position_embeddings and original_max_position_embeddings, "
        "which ctxext sets accordingly; long_factor is used wherever the first is greater", _EXLLAMA),
    "exllamav3-theta": (">= 1.6", "rope_theta and rope_scaling", "take precedence over rope_parameters",
        "read: exllamav3/model/config.py (read_rope_settings_default) in the wheel of 1.6.5"),
    "exllamav3-dynamic": (">= 1.6", 'rope_type "dynamic"', "is rejected", _EXLLAMA),
    # --------------------------------------------------------------------------------------- LMDeploy
    "lmdeploy-yarn": (">= 0.18", "attention_factor and truncate of yarn",
        "are honoured by the PyTorch engine, as in transformers", _LMDEPLOY),
    "lmdeploy-longrope": (">= 0.18", "attention_factor of longrope",
        "is ignored: the multiplier is computed from max_position_embeddings and original_max_position_embeddings, "
        "which ctxext sets accordingly; the list is chosen by the largest position of a batch", _LMDEPLOY),
    "lmdeploy-dynamic": (">= 0.18", 'rope_type "dynamic"',
        "computes its base from the largest position of a batch, so cached keys keep another base", _LMDEPLOY),
    # ----------------------------------------------------------------------------- ONNX Runtime GenAI
    "onnxruntime-genai-class": (">= 0.18", "rope_parameters of LLaMA",
        "are read for llama3 alone, and every other type builds plain RoPE without a message; which class builds the "
        "graph is decided by architectures, so ctxext writes the one that reads this type", _ORT_LLAMA),
    "onnxruntime-genai-yarn": (">= 0.18", "yarn",
        "takes beta_fast and beta_slow without defaults, never rounds the ramp's ends, rejects a ramp that ends "
        "outside the pairs, and multiplies cos and sin by mscale; attention_factor and truncate are ignored. ctxext "
        "writes betas that put the ramp's ends on the rounded pairs", _ORT_BASE),
    "onnxruntime-genai-longrope": (">= 0.18", "longrope",
        "is read by the class of Phi-3 alone, with short_mscale and long_mscale; attention_factor is ignored",
        _ORT_LLAMA),
    "onnxruntime-genai-types": (">= 0.18", "any other rope_type",
        "is rejected by the class of each model but those of LLaMA and Phi-3", _ORT_BASE),
    "onnxruntime-genai-length": (">= 0.18", "max_position_embeddings",
        "is the number of rows of the cos/sin table, and max_length", _ORT_BASE),
    "onnxruntime-genai-dynamic": (">= 0.18", 'rope_type "dynamic"',
        "is rejected, or builds plain RoPE for LLaMA", f"read: {_ORT}base.py and llama.py in the wheel of 0.18.0"),
    # --------------------------------------------------------------------------------------- OpenVINO
    "openvino-config": (">= optimum-intel 2.2", "rope_parameters",
        "are read by transformers 5, and its model is traced: every static type and attention_factor is kept",
        _OPENVINO),
    "openvino-longrope": (">= optimum-intel 2.2", "longrope",
        "has a forward pass of its own, which fails for gpt-oss, and where short_mscale and long_mscale replace "
        "attention_factor", _OPENVINO),
    "openvino-dynamic": (">= optimum-intel 2.2", 'rope_type "dynamic"',
        "is traced once, at the length of the example", "read: optimum/exporters/openvino/model_patcher.py, "
        "transformers' modeling_rope_utils.py in the wheels of 2.2.0 and 5.5.4"),
    # --------------------------------------------------------------------------------------- llama.cpp
    "llama.cpp-yarn": (">= December 2025", "yarn", "multiplies cos and sin by 0.1 ln(factor) + 1, as the paper does",
        f"read: ggml-org/llama.cpp#18006, {_LLAMA_CPP_CONTEXT}"),
    "llama.cpp-attn-flag": (">= December 2025", "--yarn-attn-factor",
        "is overwritten whenever yarn is on; the metadata key rope.scaling.attn_factor multiplies the computed value",
        f"read: {_LLAMA_CPP_CONTEXT}"),
    "llama.cpp-attention-factor": (">= December 2025", "attention_factor of yarn",
        "is converted to the key rope.scaling.yarn_attn_factor, which is also overwritten",
        f"read: {LLAMA_CPP}:convert_hf_to_gguf.py, {_LLAMA_CPP_CONTEXT}"),
    "llama.cpp-truncate": ("all", "truncate of yarn", "is not supported: the ramp's ends are always rounded",
        f"read: {LLAMA_CPP}:ggml/src/ggml.c (ggml_rope_yarn_corr_dims)"),
    "llama.cpp-length": ("< September 2026", "--ctx-size",
        "is capped by llama-server at the file's context_length, whatever the scaling; --override-kv lifts that",
        "read: ggml-org/llama.cpp#17459, #28030"),
    "llama.cpp-length-new": (">= September 2026", "--ctx-size",
        "is capped by llama-server at the file's context_length, or, where flags change yarn's scale, at "
        "--yarn-orig-ctx * --rope-scale", "read: ggml-org/llama.cpp#28030, meta-models/meta-oss-cookbook#37"),
    "llama.cpp-override-kv": (">= December 2025", "--override-kv",
        "replaces keys of the file before flags are read: those of its own architecture alone, and of the key's own "
        "type. The option may be repeated, and the first of two values of a key counts",
        f"read: {LLAMA_CPP}:src/llama-model-loader.cpp (validate_override), src/llama-model.cpp (load_hparams), "
        "common/arg.cpp, common/common.cpp (string_parse_kv_override)"),
    "llama.cpp-ext-factor": ("all", "--yarn-ext-factor",
        "is the weight of the unscaled frequencies in yarn's ramp, whatever --rope-scaling is: 1 is yarn, 0 is linear "
        "scaling, and any other value is neither",
        f"read: {_LLAMA_CPP_CONTEXT}, ggml/src/ggml-cpu/ops.cpp (rope_yarn)"),
    "llama.cpp-no-scale": ("all", "--rope-scaling yarn",
        "changes nothing without --rope-scale: the scale is 1, whatever --ctx-size and --yarn-orig-ctx are",
        f"read: {_LLAMA_CPP_CONTEXT}"),
    "llama.cpp-factors": ("all", "the tensor rope_freqs.weight",
        "divides the frequencies in graphs that use it (llama, granite); phi3 has rope_factors_long.weight and "
        "rope_factors_short.weight; qwen2, qwen3, gemma3 and gpt-oss have none",
        f"run: tests/export/test_gguf.py, test_gguf_families.py; read: {_LLAMA_CPP_MODELS}"),
    "llama.cpp-window": ("b11549", "sliding_window",
        "is ignored in llama (Mistral) and phi3: every layer has full attention", f"read: {_LLAMA_CPP_MODELS}"),
    "llama.cpp-local": ("b11549", "the windowed layers of gemma3",
        "take their base from rope.freq_base_swa, and no scaling", f"{_LLAMA_CPP_RUN}; read: {_LLAMA_CPP_MODELS}"),
    "llama.cpp-local-factor": ("b11549", "rope.scaling.attn_factor",
        "multiplies cos and sin of gemma3's windowed layers too, so yarn is exact with its own attention factor alone",
        f"read: {_LLAMA_CPP_MODELS}, src/llama-context.cpp"),
    "llama.cpp-flags-windows": ("b11549", "--rope-scale and --rope-freq-base",
        "do not reach the windowed layers of gpt-oss; the keys of the file do",
        f"read: {_LLAMA_CPP_MODELS}, src/llama-model.cpp (get_rope_freq_base)"),
    "llama.cpp-group-attention": ("b11549", "--grp-attn-n and --grp-attn-w",
        "are options of llama-completion alone, not of llama-server, and shift keys in the cache in steps of a whole "
        "window: not the paper's self_extend",
        f"read: {LLAMA_CPP} b11549:common/arg.cpp, tools/completion/completion.cpp"),
    "llama.cpp-scaled-file": ("all", "the file's own scaling",
        "stays in effect whatever flags you pass: --rope-freq-base leaves it, and none removes rope_freqs.weight",
        f"read: {_LLAMA_CPP_CONTEXT}"),
    "llama.cpp-dynamic": ("all", 'rope_type "dynamic"', "is dropped by the converter",
        f"read: {LLAMA_CPP}:convert_hf_to_gguf.py"),
    # ----------------------------------------------------------------------------------------- Ollama
    "ollama-server": (">= August 2026", "a GGUF file",
        "is served by llama.cpp's own llama-server (b10488), at num_ctx tokens, at most the file's context_length",
        "read: ollama/ollama@fb307609:llm/llama_server.go, llm/server.go"),
    "ollama-import": (">= August 2026", "rope_parameters and yarn",
        "are dropped where a folder of Llama is imported, which reads linear and llama3 of rope_scaling: import a GGUF "
        "file",
        "read: ollama/ollama@fb307609:convert/convert_llama.go"),
    "ollama-dynamic": ("all", 'rope_type "dynamic"', "has no place in a GGUF file",
        "read: ollama/ollama@fb307609:llm/llama_server.go"),
}  # fmt: skip
ENGINE_NAMES = {
    "vllm": "vLLM", "sglang": "SGLang", "mlx": "mlx-lm", "exllamav3": "ExLlamaV3", "lmdeploy": "LMDeploy",
    "ollama": "Ollama", "onnxruntime": "ONNX Runtime GenAI", "openvino": "OpenVINO",
}  # fmt: skip
READINGS = {key: Reading(ENGINE_NAMES.get(engine := key.partition("-")[0], engine), *row) for key, row in _ROWS.items()}


def engine_table() -> str:
    """Every row, in Markdown."""
    lines = ["| engine | version | field | how it is handled | evidence |", "|---|---|---|---|---|"]
    for row in READINGS.values():
        how, _, where = row.known.partition(": ")
        field = " ".join(f"`{word}`" if "_" in word or word.startswith("--") else word for word in row.field.split())
        lines.append(f"| {row.engine} | {row.versions} | {field} | {row.does} | **{how}**: {where} |")
    return "\n".join(lines)
