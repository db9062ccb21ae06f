"""What each engine needs to serve an extension: its config.json and command line. No model, no weights.

Engines read the same keys differently; `readings.py` says how, with evidence.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ctxext.core.plan import ENCODINGS, Plan
from ctxext.encodings.rope import RopeGeometry, correction_dim
from ctxext.export.gguf import ARCHITECTURES, why_not_written
from ctxext.export.readings import READINGS
from ctxext.extension.saving import version_4_keys
from ctxext.methods import RopeScaling, SelfExtend, yarn_growth
from ctxext.models.config_fields import check_config
from ctxext.models.context import ContextFacts, has_rope, read_context
from ctxext.models.families import family_of
from ctxext.models.metadata import live_mark
from ctxext.models.rope_tables import RopeTable, attention_layers
from ctxext.models.text_config import path_to_text, text_config_of, text_section_of
from ctxext.utils.values import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEAST_VERSIONS = {
    "transformers": "5.0", "transformers-v4": "4.57", "vllm": "0.12", "sglang": "0.5.10", "mlx": "0.32",
    "exllamav3": "1.6", "lmdeploy": "0.18", "onnxruntime-genai": "0.18", "openvino": "optimum-intel 2.2",
    "llama.cpp": "December 2025", "ollama": "August 2026",
}  # fmt: skip
ENGINES = tuple(LEAST_VERSIONS)
GGUF_ENGINES = ("llama.cpp", "ollama")  # which read a GGUF file, not a folder
_VERSION_4_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3", "longrope"})
_PHI_3_TYPES = frozenset({"default", "longrope"})
_TWO_FIELDS = frozenset({"chameleon", "fuyu", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2"})
# Families with interleaved pairs (2i, 2i + 1), which the longrope classes of vLLM and SGLang do not support.
INTERLEAVED = frozenset({"cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"})
# The length fields of configs with RoPE that vLLM and SGLang read besides max_position_embeddings.
LENGTHS = (
    "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# The model types whose class in mlx-lm was run (benchmarks/engines/run.py).
_MLX_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gemma3")
# The model types whose class in ExLlamaV3 and LMDeploy was read: one table, by their common rotary code.
_COMMON_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_oss")
# The model types whose class in ONNX Runtime GenAI's builder was run (benchmarks/engines/run.py); in the first group,
# weights and graph are those of its classes for Mistral and Phi-3 as well.
_ORT_COMMON = ("llama", "mistral", "qwen2", "phi3")
_ORT_TYPES = (*_ORT_COMMON, "qwen3")
# The model types that optimum-intel was run with.
_OPENVINO_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_oss")
# transformers' model types whose name differs from llama.cpp's architecture.
_GGUF_NAMES = {"mistral": "llama", "mixtral": "llama"}
_GGUF_WINDOWLESS = (*(graph.model_type for graph in ARCHITECTURES.values() if graph.full_every == 1), *_GGUF_NAMES)
# The model types whose sliding windows an engine ignores, or was not run with.
_WINDOWLESS = {
    "mlx": ("mistral", "qwen2", "qwen3", "phi3"),
    "sglang": ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3"),
    "exllamav3": ("mistral", "qwen2", "qwen3", "phi3"),
    "onnxruntime-genai": _ORT_TYPES,
    "llama.cpp": _GGUF_WINDOWLESS,
    "ollama": _GGUF_WINDOWLESS,
}
_AS_IT_WAS = "MODEL.gguf is the file of the unextended model; a file of the extended one already holds the extension."


class NotExportable(ValueError):
    """An engine cannot serve the extension; the message gives the reason and the nearest alternative."""


@dataclass(frozen=True)
class EngineExport:
    """What one engine needs to serve an extension.

    Attributes:
        least_version: the oldest version of the engine that reads these keys in this way.
        config: the complete config.json for this engine.
        flags: the command line; empty for transformers and ExLlamaV3, and for mlx, LMDeploy, ONNX Runtime GenAI and
            OpenVINO unless the folder is ready. It contains the changes of `config`, so that the checkpoint needs no
            edit.
        warnings: how versions of the engine read a field in use, a sentence each.
        length: tokens that it serves; 0 if the config of a model without RoPE states none.
    """

    engine: str
    least_version: str
    config: dict[str, Any]
    flags: tuple[str, ...]
    warnings: tuple[str, ...]
    length: int


def export_for(
    engine: str,
    config: PreTrainedConfig,
    plan: Plan | None = None,
    *,
    model: str = "DIR",
    source: dict[str, Any] | None = None,
    ready: bool = False,
) -> EngineExport:
    """What `engine` needs to serve the extension `plan` of `config`; without a plan, the extension that `config`
    already has.

    Args:
        engine: one of `ENGINES`.
        model: the checkpoint's name on the command line.
        source: its current config.json, whose other keys are kept; by default `config` itself.
        ready: `model` will hold the config that is returned, so the command line needs no overrides.

    Raises:
        NotExportable: the engine cannot serve it.
        ValueError: an unknown engine, or `config` is not extended and there is no plan.
    """
    export = _export_for(engine, config, plan, model, source, ready)
    if plan is None or not _undoes(config, plan):
        return export
    lost = "the model's own scaling, which it was trained with, is replaced: ctxext lint calls that wrong."
    return replace(export, warnings=(lost, *export.warnings))


def _undoes(config: PreTrainedConfig, plan: Plan) -> bool:
    """Whether pairs that the checkpoint's own scaling slows are faster in the extension."""
    if not has_rope(text_config_of(config)):
        return False
    before, extended = read_context(config), copy.deepcopy(config)
    plan.apply_to(text_config_of(extended))
    if before.mark is not None or (before.checkpoint is not None and before.checkpoint.scaling == "bolted-on"):
        return False
    after = {table.label: table.in_use.inv_freq for table in read_context(extended).tables}
    for table in before.tables:
        own, plain = table.in_use.inv_freq, before.original_rope_of(table).inv_freq
        if ((own < plain / 1.05) & (after[table.label] > own * 1.05)).any():
            return True
    return False


def _export_for(
    engine: str, config: PreTrainedConfig, plan: Plan | None, model: str, source: dict[str, Any] | None, ready: bool
) -> EngineExport:
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}{suggest(engine, ENGINES)}")
    check_config(config)
    source = json.loads(config.to_json_string()) if source is None else source
    extended = _extended(engine, config, plan)
    written = copy.deepcopy(source)
    section = text_section_of(written, extended)
    section.update({} if plan is None else copy.deepcopy(plan.updates))
    if not has_rope(text_config_of(extended)):
        stated = getattr(text_config_of(extended), "max_position_embeddings", None) or 0
        reach = stated if plan is None else plan.target_length
        return EngineExport(engine, LEAST_VERSIONS[engine], written, (), (), reach)
    facts = read_context(extended)
    target = facts.reach if plan is None else plan.target_length
    as_it_is = plan is None and "rope_parameters" not in section  # written for version 4, which 5 reads as well
    if engine.startswith("transformers"):
        warnings = _transformers(engine, facts, section, target, as_it_is)
        return EngineExport(
            engine, LEAST_VERSIONS[engine], copy.deepcopy(source) if as_it_is else written, (), warnings, target
        )
    if any(_rope_type(table) == "dynamic" for table in facts.tables):
        raise NotExportable(
            f"{READINGS[f'{engine}-dynamic']}, unlike in transformers. Nearest: 'ntk' or 'yarn', with "
            "existing='replace'."
        )
    # By which an engine picks its class: the outer one of a nested config.
    name = str(written.get("model_type") or facts.text_config.model_type)
    if (window := ignored_window(engine, facts.text_config, target)) is not None:
        why = READINGS.get(f"{engine}-window", f"{engine} was not run with a sliding window")
        raise NotExportable(f"{why}. Nearest: a target of {window} tokens, or vLLM.")
    if engine in GGUF_ENGINES:
        _transformers("transformers", facts, section, target, as_it_is)
        before = None if plan is None else read_context(config).tables[0]
        return EngineExport(
            engine, LEAST_VERSIONS[engine], written, *_llama_cpp(engine, model, facts, target, before), target
        )
    if engine in ("onnxruntime-genai", "openvino"):
        if engine == "openvino":
            warnings = _openvino(name, facts, section, target, as_it_is)
        else:
            warnings = _onnxruntime(name, facts, section, written, target)
        launch = build_command(engine, model) if ready or written == source else ()
        return EngineExport(engine, LEAST_VERSIONS[engine], written, launch, warnings, target)
    if engine in ("mlx", "exllamav3", "lmdeploy"):
        launch = {
            "mlx": ("mlx_lm.server", "--model", model),
            "lmdeploy": (
                "lmdeploy",
                "serve",
                "api_server",
                model,
                "--backend",
                "pytorch",
                "--session-len",
                str(target),
            ),
        }.get(engine, ())
        if engine == "mlx":
            warnings = _mlx(name, facts, section, target)
        else:
            warnings = _by_length(engine, name, facts, section, target)
        return EngineExport(engine, LEAST_VERSIONS[engine], written, launch if ready else (), warnings, target)
    warnings = _server(engine, facts, section, target)
    there = copy.deepcopy(written if ready else source)
    held = text_section_of(there, config)
    changed = changes(there, written)
    if engine == "vllm":
        if held.get("rope_scaling") and "rope_scaling" not in section:
            # An override cannot remove a key.
            place = changed
            for part, _ in path_to_text(extended):
                place = place.setdefault(part, {})
            place["rope_scaling"] = section["rope_parameters"]
        flags = ["vllm", "serve", model, "--max-model-len", str(target)]
        if section is not written and changed and _left_by_merge(text_config_of(config), section):
            warnings += (f"{READINGS['vllm-overrides']}: replace the checkpoint's config.json by the export.",)
        elif changed:
            flags += ["--hf-overrides", json.dumps(changed)]
    else:
        flags = ["python", "-m", "sglang.launch_server", "--model-path", model, "--context-length", str(target)]
        nested, merged = section is not written, _left_by_merge(text_config_of(config), section)
        if changed and (nested or merged):
            why = READINGS["sglang-overrides" if nested else "sglang-overrides-merged"]
            warnings += (f"{why}: replace the checkpoint's config.json by the export.",)
        elif changed:
            flags += ["--json-model-override-args", json.dumps(changed)]
        if any(yarn_rows(table) < target for table in facts.tables if _rope_type(table) == "yarn"):
            return EngineExport(
                engine, "0.5.21", written, tuple(flags), (*warnings, *_warn("sglang-yarn-rows")), target
            )
    return EngineExport(engine, LEAST_VERSIONS[engine], written, tuple(flags), warnings, target)


def ignored_window(engine: str, text_config: PreTrainedConfig, length: int) -> int | None:
    """The sliding window below `length` tokens that an engine replaces by full attention; None if there is none."""
    slides = "sliding_attention" in attention_layers(text_config)
    window = text_config.sliding_window if slides else None
    is_ignored = window is not None and window < length and text_config.model_type in _WINDOWLESS.get(engine, ())
    return window if is_ignored else None


def changes(source: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `config` that are new or have another value than in `source`, in nested configs as well."""
    return {
        name: changes(source[name], value) if name.endswith("_config") and isinstance(source.get(name), dict) else value
        for name, value in config.items()
        if source.get(name) != value and name != "ctxext"
    }


def _left_by_merge(text_config: PreTrainedConfig, section: dict[str, Any]) -> bool:
    """Whether keys of `text_config.rope_parameters` would stay where those of `section` are merged into them."""
    old, new = text_config.rope_parameters or {}, section["rope_parameters"]
    pairs = [(old, new), *((old[name], new[name]) for name in old.keys() & new.keys() if isinstance(old[name], dict))]
    of_llama3 = {"low_freq_factor", "high_freq_factor"}  # which no other type reads, and which llama3 has
    return any(one.keys() - other.keys() - of_llama3 for one, other in pairs)


def _extended(engine: str, config: PreTrainedConfig, plan: Plan | None) -> PreTrainedConfig:
    """The config of the extended model; raises if there is no extension, or config.json cannot express it."""
    extended = copy.deepcopy(config)
    if plan is not None:
        if plan.method is not None and not plan.is_portable:
            raise NotExportable(_why_live_only(engine, plan))
        if plan.changes_weights:
            name = plan.method.name if plan.method else "this"
            raise NotExportable(
                f"{name} creates new weights, so a config alone would match no checkpoint. Write the extended folder "
                "with ctxext extend, and export that."
            )
        plan.apply_to(text_config_of(extended))
    if not has_rope(text_config_of(config)):
        if plan is None and live_mark(text_config_of(config)) is None:
            raise ValueError(
                "this config has no rotary position embedding and was not extended by ctxext, so there is nothing to "
                "export. Pass a method and a factor."
            )
        if not engine.startswith("transformers"):
            what = ENCODINGS[plan.encoding] if plan is not None else "its position encoding"
            raise NotExportable(f"how {engine} reads {what} is unknown. Plain transformers loads the extended folder.")
    elif plan is None:
        check_extended(config)
    return extended


def check_extended(config: Any) -> None:
    """Raise ValueError if the RoPE of `config` is plain."""
    facts = read_context(config)
    if not facts.is_scaled:
        raise ValueError(
            f"this config is not extended: plain RoPE with theta {facts.original_theta:g} and "
            f"{facts.trained_length} tokens. Pass method= with factor= or target_length=."
        )


def _why_live_only(engine: str, plan: Plan) -> str:
    assert plan.method is not None
    name = plan.method.name
    if engine in GGUF_ENGINES and isinstance(plan.method, SelfExtend):
        return (
            f"{READINGS['llama.cpp-group-attention']}. Nearest: 'yarn' for the same length, or {name} in transformers "
            "with ctxext.load."
        )
    if plan.in_attention and isinstance(plan.method, RopeScaling):
        return (
            f"config.json cannot express {name} because {plan.why_not_portable}. Use ctxext.load or `ctxext serve`, or "
            f"export the original model with 'yarn' or at one length: --method {name} --factor {plan.factor:g} "
            f"--length {plan.target_length}."
        )
    if plan.in_attention:
        return (
            f"{name} works inside attention, which config.json cannot express. Use 'yarn' for the same "
            "length, or ctxext.load and `ctxext serve`."
        )
    other = "Use a method that its config accepts, such as 'pi', or run" if plan.encoding == "rope" else "Run"
    return (
        f"config.json cannot express {name} here because {plan.why_not_portable}. {other} it in transformers with "
        "ctxext.load."
    )


def _rope_type(table: RopeTable) -> str:
    return str(table.parameters.get("rope_type") or table.parameters.get("type") or "default")


def _warn(*names: str) -> tuple[str, ...]:
    return tuple(f"{READINGS[name]}." for name in dict.fromkeys(names))


# ------------------------------------------------------------------------------------- transformers


def _transformers(
    engine: str, facts: ContextFacts, section: dict[str, Any], target: int, as_it_is: bool
) -> tuple[str, ...]:
    """Write `section` for transformers 5 and 4, or for 4 alone, unless both read it as it is. Returns the warnings."""
    text_config, tables = facts.text_config, facts.tables
    older, kinds = version_4_keys(text_config, text_config.rope_parameters), {_rope_type(table) for table in tables}
    warnings = _warn("transformers-dynamic") if "dynamic" in kinds else ()
    if as_it_is:
        return warnings
    section.pop("rope_scaling", None)
    section.update(older)
    three_fields = family_of(text_config).rope_types == _PHI_3_TYPES and "longrope" in kinds
    two_fields = text_config.model_type in _TWO_FIELDS and kinds != {"default"}
    if engine == "transformers":
        strict = ("transformers-4-phi3",) * three_fields + ("transformers-4-olmo",) * two_fields
        return warnings + _warn(*strict)
    if not older:
        raise NotExportable(f"{READINGS['transformers-4-nested']} ({text_config.model_type}). Nearest: transformers 5.")
    unknown = kinds - _VERSION_4_TYPES
    if unknown:
        raise NotExportable(f"transformers 4 has no rope_type {min(unknown)!r}. Nearest: transformers 5.")
    if two_fields and not kinds <= {"linear", "dynamic"}:
        raise NotExportable(f"{READINGS['transformers-4-olmo']}. Nearest: 'ntk' or 'pi', or transformers 5.")
    if two_fields or three_fields:
        section.pop("rope_parameters", None)
    if two_fields:
        section["rope_scaling"] = {"type": _rope_type(tables[0]), "factor": tables[0].parameters["factor"]}
    if three_fields:
        section.update(_in_three_fields(tables[0], target))
    return warnings


def _in_three_fields(table: RopeTable, target: int) -> dict[str, Any]:
    """A table of Phi-3 for version 4, which derives the attention factor from the two lengths."""
    original = _original_for(table.in_use.attention_factor, target, "transformers-4-phi3")
    lists = {name: table.parameters[name] for name in ("short_factor", "long_factor")}
    return {"rope_scaling": {"type": "longrope", **lists}, "original_max_position_embeddings": original}


def _original_for(scale: float, target: int, reading: str) -> float:
    """The original length for which sqrt(1 + ln(target / original) / ln(original)) is `scale`: target^(1 / scale²),
    a whole number or not."""
    if scale < 1:
        raise NotExportable(f"{READINGS[reading]}, and no two lengths give {scale:.4g}. Nearest: transformers 5.")
    original = target ** (1 / scale**2)
    return round(original) if math.isclose(original, round(original)) else original


# ---------------------------------------------------------------------------------- vLLM and SGLang


def yarn_rows(table: RopeTable) -> int:
    """Positions in the servers' table of yarn."""
    parameters = table.parameters
    return math.ceil(parameters["original_max_position_embeddings"] * parameters["factor"])


def _refuse_unserved(engine: str, text_config: Any, table: RopeTable, target: int) -> None:
    """Refuse, with the nearest alternative, what the classes of vLLM and SGLang do not support."""
    name, kind, parameters = text_config.model_type, _rope_type(table), table.parameters
    latent = family_of(text_config).softmax_mscale
    yarn = "Nearest: 'yarn', with existing='replace' if the model is already scaled."
    if kind == "yarn" and engine == "vllm" and (rows := yarn_rows(table)) < target:
        raise NotExportable(
            f"{READINGS['vllm-yarn-rows']} (here {rows}), fewer than the target of {target}. Nearest: "
            f"a target of {rows} tokens, or existing='compose'."
        )
    if engine == "vllm" and name == "gpt_oss":
        own = yarn_growth(parameters.get("factor", 1.0))
        if kind != "yarn" or not math.isclose(table.in_use.attention_factor, own):
            raise NotExportable(f"{READINGS['vllm-gpt-oss']}. {yarn}")
    if kind == "yarn" and latent and not parameters.get("truncate", True):
        raise NotExportable(f"{READINGS[f'{engine}-mla-truncate']} ({name}). Nearest: 'yarn' with truncate=true.")
    if kind in ("default", "yarn"):
        return
    if kind == "proportional" and parameters.get("factor", 1.0) != 1.0:
        raise NotExportable(f"{READINGS[f'{engine}-proportional']} ({name}). Nearest: 'ntk', which is a base.")
    if kind == "longrope" and name.removesuffix("_text") in INTERLEAVED:
        raise NotExportable(f"{READINGS[f'{engine}-longrope-pairs']}, and {name} has these. {yarn}")
    if "mrope_section" in parameters:
        raise NotExportable(f"{READINGS[f'{engine}-mrope']}, and {name} has it. {yarn}")
    if latent:
        raise NotExportable(f"{engine} supports only its own yarn for multi-head latent attention ({name}). {yarn}")


def _server(engine: str, facts: ContextFacts, section: dict[str, Any], target: int) -> tuple[str, ...]:
    """Write `section` for vLLM and SGLang: the keys of transformers 5 and their own. Returns the warnings."""
    text_config, new, warnings = facts.text_config, {}, []
    for table in facts.tables:
        _refuse_unserved(engine, text_config, table, target)
        new[table.label], names = _in_server_words(engine, text_config, table, target)
        if _rope_type(table) == "linear" and facts.original_length is not None:  # for readers, as vLLM ignores it
            new[table.label].setdefault("original_max_position_embeddings", facts.original_length)
        warnings += names
    parameters = new.get("", {**text_config.rope_parameters, **new})
    for name in ("rope_scaling", "rope_theta", "ctxext"):
        section.pop(name, None)
    section["rope_parameters"] = parameters
    older = version_4_keys(text_config, parameters)
    if engine == "sglang":  # reads the share of the head that rotates at the top level alone
        section.update({name: value for name, value in older.items() if name not in ("rope_theta", "rope_scaling")})
    if engine == "vllm":  # up to 0.19.0 with transformers 4
        section.update(older)
        if family_of(text_config).rope_types == _PHI_3_TYPES or text_config.model_type in _TWO_FIELDS:
            section.pop("rope_scaling", None)  # rejected in any other form
    is_fixed = engine == "sglang" and "original_max_position_embeddings" in parameters
    multiplied = parameters.get("rope_type") == "linear" and not is_fixed
    # Never suggest an environment variable that lifts the length check: past its table an engine computes NaN silently.
    length = math.ceil(target / parameters["factor"]) if multiplied else target
    section[text_config.attribute_map.get("max_position_embeddings", "max_position_embeddings")] = length
    section.update({name: length for name in LENGTHS if section.get(name) is not None})
    if "original_max_position_embeddings" in section.keys() & parameters.keys():  # beside them it wins (Phi-3)
        section["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
    return _warn(*warnings)


def _in_server_words(engine: str, text_config: Any, table: RopeTable, target: int) -> tuple[dict[str, Any], list[str]]:
    """One table's `rope_parameters`, with the keys that this server reads for the attention factor, and the names of
    the readings to warn of."""
    kind, parameters, warnings = _rope_type(table), dict(table.parameters), []
    scaling = table.in_use.attention_factor
    if kind == "yarn" and family_of(text_config).softmax_mscale:
        if "attention_factor" in parameters:
            warnings.append(f"{engine}-mla-attention-factor")
        # Their own: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), of 1 and 0 where left out.
        grow = 0.1 * math.log(max(1.0, parameters["factor"]))
        parameters = {name: value for name, value in parameters.items() if value is not None}
        below = 1 + grow * parameters.get("mscale_all_dim", 0.0)
        if not math.isclose(scaling, (1 + grow * parameters.get("mscale", 1.0)) / below):
            if grow == 0:
                raise NotExportable(
                    f"{engine} computes the attention factor of yarn with factor 1 as 1, not {scaling}."
                )
            parameters["mscale"] = (scaling * below - 1) / grow
    elif kind == "yarn":
        if {"attention_factor", "mscale"} & parameters.keys():
            warnings.append(f"{engine}-attention-factor")
        usual = yarn_growth(parameters["factor"])
        for name in ("mscale", "mscale_all_dim", "attention_factor", "attn_factor"):
            parameters.pop(name, None)
        if not math.isclose(scaling, usual):
            parameters |= {"attention_factor": scaling, "attn_factor": scaling / usual}
    elif kind == "longrope":
        warnings.append(f"{engine}-longrope")
        parameters |= {name: parameters.get(name) or scaling for name in ("short_mscale", "long_mscale")}
        if parameters["short_factor"] != parameters["long_factor"]:
            warnings.append("vllm-longrope-lists" if engine == "vllm" else "sglang-longrope-switch")
        elif engine == "sglang":
            parameters["original_max_position_embeddings"] = target
    return parameters, warnings


# -------------------------------------------------------------------------------------------- mlx-lm


def _mlx(name: str, facts: ContextFacts, section: dict[str, Any], target: int) -> tuple[str, ...]:
    """Write `section` for mlx-lm: `rope_theta` and `rope_scaling`. Returns the warnings.

    Its longrope takes any λ, and any attention factor of 1 or more by the two lengths (`_original_for`).
    """
    table = facts.tables[0]
    if name not in _MLX_TYPES:
        raise NotExportable(
            f"mlx-lm's class for {name} was not run (run: {', '.join(_MLX_TYPES)}). Check it yourself: compare "
            "log-probabilities with those in a probe of ctxext verify."
        )
    parameters, kind, scale = table.of_turning_pairs, _rope_type(table), table.in_use.attention_factor
    theta, factor = parameters["rope_theta"], parameters.get("factor") or 1.0
    for key in ("rope_scaling", "rope_parameters", "original_max_position_embeddings", "ctxext"):
        section.pop(key, None)
    section["rope_theta"], section["max_position_embeddings"] = theta, target
    if "partial_rotary_factor" in parameters:
        if name != "phi3":
            raise NotExportable(f"mlx-lm's class for {name} reads no partial_rotary_factor. Nearest: vLLM.")
        section["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    if len(facts.tables) > 1:
        local = facts.tables[1]
        if _rope_type(local) != "default":
            raise NotExportable("mlx-lm has no scaling for layers with a sliding window. Nearest: transformers.")
        section["rope_local_base_freq"] = local.parameters["rope_theta"]
    warnings, scaling = ["mlx-config"], dict[str, Any]()
    by_list = family_of(facts.text_config).rope_types == _PHI_3_TYPES and kind != "default"
    if kind in ("linear", "llama3") and not by_list:
        scaling = {
            key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
    elif kind == "yarn" and parameters.get("truncate", True) and factor > 1 and not by_list:
        given = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        scaling = {key: parameters[key] for key in given if parameters.get(key) is not None}
        if not math.isclose(scale, yarn_growth(factor)):
            scaling |= {"mscale": (scale - 1) / (0.1 * math.log(factor)), "mscale_all_dim": 0}
            warnings.append("mlx-attention-factor")
    elif kind != "default":
        warnings.append("mlx-truncate" if kind == "yarn" else "mlx-longrope")
        plain = table.plain(table.parameters["rope_theta"], table.limit)
        factors = (plain.inv_freq / table.in_use.inv_freq).tolist()
        original = _original_for(scale, target, "mlx-longrope")
        if family_of(facts.text_config).rope_types == _PHI_3_TYPES:
            if not isinstance(original, int):
                raise NotExportable(
                    f"{READINGS['mlx-longrope']}, and {name} takes a whole number there, none of which gives "
                    f"{scale:.4g}. Nearest: 'pi' or 'ntk'."
                )
            section["original_max_position_embeddings"] = original
        scaling = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": original}
        kind = "longrope"
    if scaling:
        section["rope_scaling"] = {"rope_type": kind, "type": kind, **scaling}
    return _warn(*warnings)


# -------------------------------------------------------------------------------- ExLlamaV3 and LMDeploy


def _by_length(engine: str, name: str, facts: ContextFacts, section: dict[str, Any], target: int) -> tuple[str, ...]:
    """Write `section` for ExLlamaV3 and LMDeploy: the keys of transformers 5. Returns the warnings.

    Both compute longrope's attention factor from the two lengths (`_original_for`), and ExLlamaV3 yarn's factor.
    """
    table = facts.tables[0]
    if name not in _COMMON_TYPES:
        known = ", ".join(_COMMON_TYPES)
        raise NotExportable(f"{engine}'s class for {name} was not read (read: {known}). Nearest: vLLM.")
    parameters, kind, length = dict(table.parameters), _rope_type(table), target
    for key in ("rope_scaling", "original_max_position_embeddings", "ctxext"):
        section.pop(key, None)
    warnings = []
    if kind == "yarn":
        parameters = {key: value for key, value in parameters.items() if not key.startswith("mscale")}
        parameters["attention_factor"] = table.in_use.attention_factor
    if engine == "exllamav3" and kind == "yarn":
        warnings.append("exllamav3-yarn")
        product = parameters["original_max_position_embeddings"] * parameters["factor"]
        kind, length = ("yarn", int(product)) if product == int(product) >= target else ("longrope", target)
    if kind == "longrope":
        warnings.append(f"{engine}-longrope")
        if parameters.get("short_factor") != parameters.get("long_factor"):
            raise NotExportable(f"{READINGS[f'{engine}-longrope']}, for every length. Nearest: vLLM.")
        scale = table.in_use.attention_factor
        plain = table.plain(parameters["rope_theta"], table.limit)
        factors = (plain.inv_freq / table.in_use.inv_freq).tolist()
        original = _original_for(scale, target, f"{engine}-longrope")
        if engine == "lmdeploy" and family_of(facts.text_config).rope_types == _PHI_3_TYPES:
            if not isinstance(original, int):
                raise NotExportable(
                    f"{READINGS['lmdeploy-longrope']}, and {name} takes a whole number there, none of which gives "
                    f"{scale:.4g}. Nearest: 'pi' or 'ntk'."
                )
            section["original_max_position_embeddings"] = original
        parameters = {
            **{key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters},
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": original, "attention_factor": scale,
        }  # fmt: skip
    section["rope_parameters"], section["max_position_embeddings"] = parameters, length
    section["rope_theta"] = parameters["rope_theta"]  # where ExLlamaV3 looks first
    return _warn(*warnings)


# ------------------------------------------------------------------ ONNX Runtime GenAI and OpenVINO


def build_command(engine: str, model: str) -> tuple[str, ...]:
    """The command that builds the engine's own model from a folder."""
    if engine == "openvino":
        task = ("--task", "text-generation-with-past")
        return ("optimum-cli", "export", "openvino", "--model", model, *task, f"{model.rstrip('/')}-openvino")
    builder = ("python", "-m", "onnxruntime_genai.models.builder", "--input", model)
    return (*builder, "--output", f"{model.rstrip('/')}-onnx", "--precision", "fp32", "--execution_provider", "cpu")


def _openvino(name: str, facts: ContextFacts, section: dict[str, Any], target: int, as_it_is: bool) -> tuple[str, ...]:
    """Write `section` for optimum-intel, which traces the model of transformers 5. Returns the warnings."""
    if name not in _OPENVINO_TYPES:
        known = ", ".join(_OPENVINO_TYPES)
        raise NotExportable(
            f"optimum-intel's export of {name} was not run, or fails (run: {known}). Nearest: transformers, or vLLM."
        )
    kinds = {_rope_type(table) for table in facts.tables}
    _transformers("transformers", facts, section, target, as_it_is)
    if "longrope" not in kinds:
        return ()
    if name == "gpt_oss":
        raise NotExportable(f"optimum-intel's export fails for longrope of {name}. Nearest: 'yarn', 'ntk' or 'pi'.")
    for table in facts.tables:  # beside attention_factor they win
        if {"short_mscale", "long_mscale"} & table.parameters.keys():
            raise NotExportable(
                f"{READINGS['openvino-longrope']}. Nearest: write the folder with ctxext extend, and export that."
            )
    return _warn("openvino-longrope")


def _onnxruntime(
    name: str, facts: ContextFacts, section: dict[str, Any], written: dict[str, Any], target: int
) -> tuple[str, ...]:
    """Write `section` for the model builder of ONNX Runtime GenAI. Returns the warnings.

    Its class for LLaMA reads llama3 alone, that for Mistral linear and yarn, and that for Phi-3 longrope. Which class
    it takes is decided by `architectures`, and the weights are loaded by model_type.
    """
    table = facts.tables[0]
    if name not in _ORT_TYPES:
        known = ", ".join(_ORT_TYPES)
        raise NotExportable(
            f"ONNX Runtime GenAI's builder was not run with {name} (run: {known}). Nearest: openvino, or vLLM."
        )
    parameters, kind, warnings = dict(table.parameters), _rope_type(table), list[str]()
    theta, scale = parameters["rope_theta"], table.in_use.attention_factor
    original = int(parameters.get("original_max_position_embeddings") or target)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if "partial_rotary_factor" in parameters:
        found["partial_rotary_factor"] = section["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    whole = table.rotary_dim == table.head_dim
    ends = _ramp(parameters, table.plain(theta, original)) if kind == "yarn" and whole else None
    if kind == "default":
        original = target
    elif kind == "llama3" and name == "llama":
        found |= {key: parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
    elif kind == "linear" and name != "phi3":
        found["factor"], original = parameters["factor"], target
    elif ends is not None and name != "phi3":
        turns = [original / (2 * math.pi * theta ** (2 * end / table.rotary_dim)) for end in ends]
        found |= {"factor": parameters["factor"], "beta_fast": turns[0], "beta_slow": turns[1], "mscale": scale}
        warnings.append("onnxruntime-genai-yarn")
    elif name in _ORT_COMMON:
        if parameters.get("short_factor") != parameters.get("long_factor"):
            raise NotExportable(
                "ONNX Runtime GenAI's builder was not run with two lists of factors. Nearest: vLLM, or 'yarn'."
            )
        factors = (table.plain(theta, table.limit).inv_freq / table.in_use.inv_freq).tolist()
        original = min(original, target - 1)  # the class that reads lists is taken where the two lengths differ
        found |= {"rope_type": "longrope", "type": "longrope", "short_factor": factors, "long_factor": factors,
                  "short_mscale": scale, "long_mscale": scale, "factor": target / original,
                  "attention_factor": scale}  # fmt: skip
        warnings.append("onnxruntime-genai-longrope")
    else:
        raise NotExportable(
            f"{READINGS['onnxruntime-genai-types']}, so {kind} cannot be written for {name} here. Nearest: 'yarn' with "
            "its usual betas, 'ntk' or 'pi'."
        )
    if name != "phi3" and found["rope_type"] == "longrope":
        written["architectures"] = ["Phi3ForCausalLM"]
    elif name == "llama" and found["rope_type"] in ("linear", "yarn"):
        written["architectures"] = ["MistralForCausalLM"]
    if name == "llama" and kind != "default":
        warnings.insert(0, "onnxruntime-genai-class")
    for key in ("rope_scaling", "original_max_position_embeddings", "ctxext"):
        section.pop(key, None)
    section |= {"rope_parameters": found, "rope_theta": theta, "max_position_embeddings": target}
    if original != target or name == "phi3":
        found["original_max_position_embeddings"] = section["original_max_position_embeddings"] = original
    return _warn(*warnings)


def _ramp(parameters: dict[str, Any], rope: RopeGeometry) -> tuple[float, float] | None:
    """The ends of yarn's ramp in pairs, rounded where transformers rounds them; None if the builder rejects them."""
    low, high = (
        correction_dim(parameters.get(beta) or paper, rope) for beta, paper in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return (low, high) if 0 < low < high < rope.dim / 2 - 1 else None


# ------------------------------------------------------------------------------- llama.cpp and Ollama


def architecture_of(text_config: PreTrainedConfig) -> str | None:
    """llama.cpp's name for a model's architecture; None if its graph is not known here."""
    name = _GGUF_NAMES.get(text_config.model_type, text_config.model_type)
    return next((key for key, graph in ARCHITECTURES.items() if graph.model_type == name), None)


def _llama_cpp(
    engine: str, model: str, facts: ContextFacts, target: int, before: RopeTable | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command line and its warnings. Flags extend a GGUF file of the unextended checkpoint as far as they can.

    Args:
        engine: "llama.cpp", or "ollama", which passes no such flag.
        before: the table before the plan; None without one.
    """
    config, table = facts.text_config, facts.tables[0]
    parameters, kind = table.parameters, _rope_type(table)
    of_extended: tuple[str, ...] = ("llama-server", "-m", "OUT.gguf", "--ctx-size", str(target))
    if engine == "ollama":
        of_extended = ("ollama", "create", "NAME", "-f", "OUT.Modelfile")
    unwritten = why_not_written(config)
    if before is None and unwritten is None:
        how = f"ctxext export {model} --engine {engine} -o OUT.gguf"
        return of_extended, (f"write OUT.gguf first: {how}. It holds the extension: do not repeat it in flags.",)
    architecture = architecture_of(config)
    if architecture is None:
        known = ", ".join((*(each.model_type for each in ARCHITECTURES.values()), *_GGUF_NAMES))
        raise NotExportable(
            f"llama.cpp's graph for {config.model_type} is not supported (supported: {known}). "
            "Nearest: convert the extended folder with llama.cpp's convert_hf_to_gguf.py, and verify the file."
        )
    graph, truncated = ARCHITECTURES[architecture], parameters.get("truncate", True)
    nearest = f"Nearest for {config.model_type}: 'yarn' as in the paper, 'ntk' or 'pi'."
    if any(_rope_type(local) != "default" for local in facts.tables[1:]):
        raise NotExportable(f"{READINGS['llama.cpp-local']}. Nearest: scale the layers with full attention alone.")
    ratio = table.in_use.attention_factor / yarn_growth(parameters.get("factor", 1.0)) if kind == "yarn" else 1.0
    if graph.windowed_rope == "own" and not math.isclose(ratio, 1.0):
        raise NotExportable(f"{READINGS['llama.cpp-local-factor']}. {nearest}")
    in_flags = kind in ("default", "linear") or (kind == "yarn" and truncated)
    in_keys = in_flags and (parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1) == (32, 1)
    missed = graph.full_every > 1 and graph.windowed_rope == "same"
    if not in_flags or missed or engine == "ollama":
        if not (graph.factors or in_keys):
            raise NotExportable(f"{READINGS['llama.cpp-factors' if truncated else 'llama.cpp-truncate']}. {nearest}")
        how = f"write it with ctxext export, --engine {engine} -o OUT.gguf"
        if unwritten is not None:
            how = (
                "convert the original with llama.cpp's convert_hf_to_gguf.py, and extend that file, ctxext export "
                f"MODEL.gguf --engine {engine} … -o OUT.gguf"
            )
        stored = f"the frequencies are stored in the file: {how}."
        return of_extended, (stored, *(_warn("llama.cpp-flags-windows") if missed else ()))
    if before is not None and _rope_type(before) != "default" and before.parameters != parameters:
        raise NotExportable(
            f"{READINGS['llama.cpp-scaled-file']}. Nearest: extend the file itself: ctxext export MODEL.gguf --engine "
            "llama.cpp --existing replace … -o OUT.gguf."
        )
    flags = ["llama-server", "-m", "MODEL.gguf", "--ctx-size", str(target)]
    keys, warnings = f"{architecture}.context_length=int:{target}", [_AS_IT_WAS]
    if kind == "default" or (before is not None and before.parameters["rope_theta"] != parameters["rope_theta"]):
        flags += ["--rope-freq-base", f"{parameters['rope_theta']:.9g}"]
    if kind != "default":
        flags += ["--rope-scaling", kind, "--rope-scale", f"{parameters['factor']:.9g}"]
    if kind == "yarn":
        flags += ["--yarn-orig-ctx", str(parameters["original_max_position_embeddings"])]
        for beta, paper in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            if (parameters.get(beta) or paper) != paper:
                flags += [f"--yarn-{beta.replace('_', '-')}", f"{parameters[beta]:.9g}"]
        if not math.isclose(ratio, 1.0):
            keys += f",{architecture}.rope.scaling.attn_factor=float:{ratio:.9g}"
            warnings += _warn("llama.cpp-attn-flag")
    return (*flags, "--override-kv", keys), tuple(warnings)
