"""What each engine needs to serve an extension: its config.json and command line. No model, no weights.

transformers, vLLM, SGLang and llama.cpp read the same keys differently; `readings.py` says how, with evidence.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctxext.core.plan import ENCODINGS, Plan
from ctxext.export.gguf import ARCHITECTURES, why_not_written
from ctxext.export.readings import READINGS
from ctxext.extension.saving import version_4_keys
from ctxext.methods import RopeScaling
from ctxext.models.config_fields import check_config
from ctxext.models.context import has_rope, read_context
from ctxext.models.families import family_of
from ctxext.models.metadata import live_mark
from ctxext.models.rope_tables import RopeTable
from ctxext.models.text_config import text_config_of, text_section_of
from ctxext.utils.values import suggest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENGINES = ("transformers", "transformers-v4", "vllm", "sglang", "llama.cpp")
_LEAST = {
    "transformers": "5.0", "transformers-v4": "4.57", "vllm": "0.12", "sglang": "0.5.10", "llama.cpp": "December 2025",
}  # fmt: skip
_VERSION_4_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "llama3", "longrope"})
_PHI_3_TYPES = frozenset({"default", "longrope"})
_TWO_FIELDS = frozenset({"chameleon", "fuyu", "hunyuan_v1_dense", "hunyuan_v1_moe", "olmo", "olmo2"})
# Families with interleaved pairs (2i, 2i + 1), which the longrope classes of vLLM and SGLang do not support.
_INTERLEAVED = frozenset({
    "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium",
})  # fmt: skip
# The length fields of configs with RoPE that vLLM and SGLang read besides max_position_embeddings.
_LENGTHS = (
    "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# transformers' model types whose name differs from llama.cpp's architecture.
_GGUF_NAMES = {"mistral": "llama", "mixtral": "llama"}
_AS_IT_WAS = "MODEL.gguf is of the model as it was: a file of the extended one holds the extension already."


class NotExportable(ValueError):
    """An engine cannot serve the extension; the message gives the reason and the nearest alternative."""


@dataclass(frozen=True)
class EngineExport:
    """What one engine needs to serve an extension.

    Attributes:
        least_version: the oldest version of the engine that reads these keys in this way.
        config: the complete config.json for this engine.
        flags: the command line; empty for transformers. It contains the changes of `config`, so that the checkpoint
            needs no edit.
        warnings: how versions of the engine read a field in use, a sentence each.
    """

    engine: str
    least_version: str
    config: dict[str, Any]
    flags: tuple[str, ...]
    warnings: tuple[str, ...]


def export_for(
    engine: str,
    config: PreTrainedConfig,
    plan: Plan | None = None,
    *,
    model: str = "DIR",
    source: dict[str, Any] | None = None,
) -> EngineExport:
    """What `engine` needs to serve the extension `plan` of `config`; without a plan, the extension that `config`
    already has.

    Args:
        engine: one of `ENGINES`.
        model: the checkpoint's name on the command line.
        source: its current config.json, whose other keys are kept; by default `config` itself.

    Raises:
        NotExportable: the engine cannot serve it.
        ValueError: an unknown engine, or `config` is not extended and there is no plan.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}{suggest(engine, ENGINES)}")
    check_config(config)
    source = json.loads(config.to_json_string()) if source is None else source
    extended = _extended(engine, config, plan)
    text_config = text_config_of(extended)
    written = copy.deepcopy(source)
    section = text_section_of(written, extended)
    section.update({} if plan is None else copy.deepcopy(plan.updates))
    if not has_rope(text_config):
        return EngineExport(engine, _LEAST[engine], written, (), ())
    facts = read_context(extended)
    target = facts.reach if plan is None else plan.target_length
    as_it_is = plan is None and "rope_parameters" not in section  # written for version 4, which 5 reads as well
    if engine.startswith("transformers"):
        warnings = _as_transformers(engine, text_config, section, facts.tables, target, as_it_is)
        return EngineExport(engine, _LEAST[engine], copy.deepcopy(source) if as_it_is else written, (), warnings)
    _refuse_others_static(engine, text_config, facts.tables, target)
    if engine == "llama.cpp":
        _as_transformers("transformers", text_config, section, facts.tables, target, as_it_is)
        before = read_context(config).tables[0] if plan is not None else None
        command, warnings = _llama_cpp(text_config, facts.tables, target, before)
        if plan is None and why_not_written(text_config) is None:
            command = ("llama-server", "-m", "OUT.gguf", "--ctx-size", str(target))
            where = f"ctxext export {model} --engine llama.cpp -o OUT.gguf"
            warnings = (f"OUT.gguf, which {where} writes, holds the extension: no flag may say it again.",)
        return EngineExport(engine, _LEAST[engine], written, command, warnings)
    _as_server(engine, text_config, section, facts.tables, target)
    changed = {name: value for name, value in written.items() if source.get(name) != value and name != "ctxext"}
    if (
        engine == "vllm" and source.get("rope_scaling") and "rope_scaling" not in written
    ):  # an override cannot remove a key
        changed["rope_scaling"] = written["rope_parameters"]
    warnings = _server_warnings(engine, facts.tables, family_of(text_config).softmax_mscale)
    if engine == "vllm":
        flags = ["vllm", "serve", model, "--max-model-len", str(target)]
        flags += ["--hf-overrides", json.dumps(changed)] if changed else []
    else:
        flags = ["python", "-m", "sglang.launch_server", "--model-path", model, "--context-length", str(target)]
        if changed and section is not written:
            warnings += (f"{READINGS['sglang-overrides']}: put the exported config.json in the checkpoint's place.",)
        elif changed:
            flags += ["--json-model-override-args", json.dumps(changed)]
    return EngineExport(engine, _LEAST[engine], written, tuple(flags), warnings)


def _extended(engine: str, config: PreTrainedConfig, plan: Plan | None) -> PreTrainedConfig:
    """The config of the extended model.

    Raises:
        NotExportable: config.json cannot express it to this engine.
    """
    text_config = text_config_of(config)
    extended = copy.deepcopy(config)
    if plan is not None:
        if plan.method is not None and not plan.is_portable:
            raise NotExportable(_why_live_only(plan))
        if plan.changes_weights:
            name = plan.method.name if plan.method else "this"
            raise NotExportable(
                f"{name} makes new weights, so a config alone fits no checkpoint. Write the extended folder with "
                "ctxext extend, and export that."
            )
        plan.apply_to(text_config_of(extended))
    if not has_rope(text_config):
        if plan is None and live_mark(text_config) is None:
            raise ValueError(
                "this config has no rotary position embedding and was not extended by ctxext, so there is nothing to "
                "export. Name a method and a factor."
            )
        if not engine.startswith("transformers"):
            what = ENCODINGS[plan.encoding] if plan is not None else "its position encoding"
            raise NotExportable(
                f"what {engine} makes of {what} is not known here. Plain transformers loads the extended folder."
            )
    elif plan is None:
        facts = read_context(config)
        if facts.scaling is None and facts.mark is None:
            raise ValueError(
                f"this config is not extended: plain RoPE of theta {facts.original_theta:g} for "
                f"{facts.trained_length} tokens. Name a method, such as yarn, and a factor or a target length."
            )
    return extended


def _why_live_only(plan: Plan) -> str:
    assert plan.method is not None
    name = plan.method.name
    where = f" ctxext.load runs {name} in transformers."
    if plan.in_attention and isinstance(plan.method, RopeScaling):
        return (
            f"config.json cannot express {name}, as {plan.why_not_portable}. Nearest: {name} frozen at one length "
            f"(--length {plan.target_length}), which is static, or 'yarn'.{where}"
        )
    if plan.in_attention:
        return (
            f"{name} maps positions inside attention, which config.json cannot express. Nearest: 'yarn', as far.{where}"
        )
    nearest = "" if plan.encoding != "rope" else " Nearest: a method that its config takes, such as 'pi'."
    return f"config.json cannot express {name} here, as {plan.why_not_portable}.{nearest}{where}"


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _limit_name(text_config: Any) -> str:
    """The config's name for max_position_embeddings."""
    return str(text_config.attribute_map.get("max_position_embeddings", "max_position_embeddings"))


def _warn(*names: str) -> tuple[str, ...]:
    return tuple(f"{READINGS[name]}." for name in names)


# ------------------------------------------------------------------------------------- transformers


def _as_transformers(
    engine: str, text_config: Any, section: dict[str, Any], tables: tuple[RopeTable, ...], target: int, as_it_is: bool
) -> tuple[str, ...]:
    """Write `section` for transformers 5 and 4, or for 4 alone; returns the warnings.

    Args:
        as_it_is: both versions already read it, so nothing is written.
    """
    older, kinds = version_4_keys(text_config, text_config.rope_parameters), {_rope_type(t.parameters) for t in tables}
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
        parameters = tables[0].parameters
        section["rope_scaling"] = {"type": _rope_type(parameters), "factor": parameters["factor"]}
    if three_fields:
        section.update(_in_three_fields(tables[0], target))
    return warnings


def _in_three_fields(table: RopeTable, target: int) -> dict[str, Any]:
    """A table of Phi-3 for version 4, which derives the attention factor from the two lengths.

    a = sqrt(1 + ln(max / original) / ln(original)) holds at original = max^(1 / a²), a whole number or not.

    Raises:
        NotExportable: an attention factor below 1, which no lengths give.
    """
    scaling = table.in_use.attention_factor
    if scaling < 1:
        raise NotExportable(
            f"{READINGS['transformers-4-phi3']}, and no two lengths give {scaling:.4g}. Nearest: transformers 5."
        )
    original = target ** (1 / scaling**2)
    whole = round(original)
    lists = {name: table.parameters[name] for name in ("short_factor", "long_factor")}
    return {
        "rope_scaling": {"type": "longrope", **lists},
        "original_max_position_embeddings": whole if math.isclose(original, whole) else original,
    }


# ---------------------------------------------------------------------------------- vLLM and SGLang


def _refuse_others_static(engine: str, text_config: Any, tables: tuple[RopeTable, ...], target: int) -> None:
    """Refuse what the classes of vLLM and SGLang do not support, and dynamic scaling, which only transformers has.

    Raises:
        NotExportable: with the nearest alternative.
    """
    family, yarn = family_of(text_config), "Nearest: 'yarn', with existing='replace' where it is scaled already."
    name = text_config.model_type
    for table in tables:
        kind = _rope_type(table.parameters)
        if kind == "dynamic":
            raise NotExportable(
                f"{READINGS[f'{engine}-dynamic']}, another model than in transformers. Nearest: 'ntk' or 'yarn', with "
                "existing='replace'."
            )
        if engine == "llama.cpp":
            continue
        if kind == "yarn" and engine == "vllm":
            rows = math.ceil(table.parameters["original_max_position_embeddings"] * table.parameters["factor"])
            if rows < target:
                raise NotExportable(
                    f"{READINGS['vllm-yarn-rows']}, here {rows}, and positions up to {target} were asked for. Nearest: "
                    f"a target of {rows} tokens, or existing='compose'."
                )
        if kind == "proportional" and table.parameters.get("factor", 1.0) != 1.0:
            raise NotExportable(
                f"{READINGS[f'{engine}-proportional']} ({name}). Nearest: 'ntk', which is a base alone."
            )
        if kind == "longrope" and name.removesuffix("_text") in _INTERLEAVED:
            raise NotExportable(f"{READINGS[f'{engine}-longrope-pairs']}, and {name} has such. {yarn}")
        if kind not in ("default", "yarn") and "mrope_section" in table.parameters:
            raise NotExportable(f"{READINGS[f'{engine}-mrope']}, and {name} has it. {yarn}")
        if kind == "yarn" and family.softmax_mscale and not table.parameters.get("truncate", True):
            raise NotExportable(f"{READINGS[f'{engine}-mla-truncate']} ({name}). Nearest: 'yarn' with truncate=true.")
        if kind not in ("default", "yarn") and family.softmax_mscale:
            raise NotExportable(
                f"{engine} rotates multi-head latent attention ({name}) by a yarn of its own and nothing else. {yarn}"
            )


def _as_server(
    engine: str, text_config: Any, section: dict[str, Any], tables: tuple[RopeTable, ...], target: int
) -> None:
    """Write `section` for vLLM and SGLang: the keys of transformers 5 and their own."""
    in_softmax = family_of(text_config).softmax_mscale
    new = {table.label: _in_server_words(engine, table, target, in_softmax) for table in tables}
    parameters = new.get("", {**text_config.rope_parameters, **new})
    for name in ("rope_scaling", "rope_theta", "ctxext"):
        section.pop(name, None)
    section["rope_parameters"] = parameters
    if engine == "vllm":  # until 0.19 with transformers 4
        section.update(version_4_keys(text_config, parameters))
        if family_of(text_config).rope_types == _PHI_3_TYPES or text_config.model_type in _TWO_FIELDS:
            section.pop("rope_scaling", None)  # refused in any other form
    multiplied = parameters.get("rope_type") == "linear" and "original_max_position_embeddings" not in parameters
    length = math.ceil(target / parameters["factor"]) if multiplied else target
    # Never suggest an environment variable that lifts the length check: past its table an engine computes NaN silently.
    for name in (_limit_name(text_config), *_LENGTHS):
        if section.get(name) is not None or name == _limit_name(text_config):
            section[name] = length
    if "original_max_position_embeddings" in section.keys() & parameters.keys():  # beside them it wins (Phi-3)
        section["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]


def _in_server_words(engine: str, table: RopeTable, target: int, in_softmax: bool) -> dict[str, Any]:
    """One table's `rope_parameters`, with the keys that this server reads for the attention factor."""
    parameters, kind = dict(table.parameters), _rope_type(table.parameters)
    if kind == "yarn" and in_softmax:
        # Their own: (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), of 1 and 0 where left out.
        grow = 0.1 * math.log(max(1.0, parameters["factor"]))
        parameters = {name: value for name, value in parameters.items() if value is not None}
        below = 1 + grow * parameters.get("mscale_all_dim", 0.0)
        scaling, usual = table.in_use.attention_factor, (1 + grow * parameters.get("mscale", 1.0)) / below
        if not math.isclose(scaling, usual):
            if grow == 0:
                raise NotExportable(
                    f"{engine} computes the attention factor of a yarn of factor 1 as 1, not {scaling}."
                )
            parameters["mscale"] = (scaling * below - 1) / grow
    elif kind == "yarn":
        scaling, usual = table.in_use.attention_factor, 0.1 * math.log(parameters["factor"]) + 1
        for name in ("mscale", "mscale_all_dim", "attention_factor", "attn_factor"):
            parameters.pop(name, None)
        if not math.isclose(scaling, usual):
            parameters |= {"attention_factor": scaling, "attn_factor": scaling / usual}
    elif kind == "longrope":
        equal = parameters["short_factor"] == parameters["long_factor"]
        names = ("short_mscale", "long_mscale")
        parameters |= {name: parameters.get(name) or table.in_use.attention_factor for name in names}
        if equal and engine == "sglang":
            parameters["original_max_position_embeddings"] = target
    return parameters


def _server_warnings(engine: str, tables: tuple[RopeTable, ...], in_softmax: bool) -> tuple[str, ...]:
    names = []
    for table in tables:
        kind = _rope_type(table.parameters)
        if kind == "yarn" and {"attention_factor", "mscale"} & table.parameters.keys() and not in_softmax:
            names.append(f"{engine}-attention-factor")
        if kind == "yarn" and "attention_factor" in table.parameters and in_softmax:
            names.append(f"{engine}-mla-attention-factor")
        if kind == "longrope":
            names.append(f"{engine}-longrope")
            if table.parameters["short_factor"] != table.parameters["long_factor"]:
                names.append("vllm-longrope-lists" if engine == "vllm" else "sglang-longrope-switch")
    return _warn(*dict.fromkeys(names))


# ----------------------------------------------------------------------------------------- llama.cpp


def _llama_cpp(
    text_config: Any, tables: tuple[RopeTable, ...], target: int, before: RopeTable | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command line for a GGUF file of the unextended checkpoint, and its warnings.

    Args:
        before: the config before the plan; None without one.

    Raises:
        NotExportable: unsupported family, one whose graph takes no frequency factors, or the file is already scaled.
    """
    name = _GGUF_NAMES.get(text_config.model_type, text_config.model_type)
    found = {key: each for key, each in ARCHITECTURES.items() if each.model_type == name}
    if not found or len(tables) > 1:
        known = ", ".join((*(each.model_type for each in ARCHITECTURES.values()), *_GGUF_NAMES))
        raise NotExportable(
            f"what llama.cpp's graph for {text_config.model_type} makes of this is not known here (known: {known}). "
            "Nearest: convert the extended folder with llama.cpp's convert_hf_to_gguf.py, and verify the file."
        )
    (architecture, graph), (table,) = next(iter(found.items())), tables
    parameters, kind = table.parameters, _rope_type(table.parameters)
    flags = ["llama-server", "-m", "MODEL.gguf", "--ctx-size", str(target)]
    lifted = ["--override-kv", f"{architecture}.context_length=int:{target}"]
    in_flags = kind in ("default", "linear") or (kind == "yarn" and parameters.get("truncate", True))
    if (
        in_flags
        and before is not None
        and _rope_type(before.parameters) != "default"
        and before.parameters != parameters
    ):
        raise NotExportable(
            f"{READINGS['llama.cpp-scaled-file']}. Nearest: extend the file itself: ctxext export MODEL.gguf --engine "
            "llama.cpp --existing replace … -o OUT.gguf."
        )
    if kind == "default" or (before is not None and before.parameters["rope_theta"] != parameters["rope_theta"]):
        flags += ["--rope-freq-base", f"{parameters['rope_theta']:.9g}"]
    if kind == "default":
        return (*flags, *lifted), (_AS_IT_WAS,)
    if kind == "linear":
        return (*flags, "--rope-scaling", "linear", "--rope-scale", f"{parameters['factor']:.9g}", *lifted), (
            _AS_IT_WAS,
        )
    if in_flags:
        usual = 0.1 * math.log(parameters["factor"]) + 1
        flags += ["--rope-scaling", "yarn", "--rope-scale", f"{parameters['factor']:.9g}"]
        flags += ["--yarn-orig-ctx", str(parameters["original_max_position_embeddings"])]
        for beta, paper in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            if (parameters.get(beta) or paper) != paper:
                flags += [f"--yarn-{beta.replace('_', '-')}", f"{parameters[beta]:.9g}"]
        if math.isclose(table.in_use.attention_factor, usual):
            return (*flags, *lifted), (_AS_IT_WAS,)
        ratio = table.in_use.attention_factor / usual
        lifted[1] += f",{architecture}.rope.scaling.attn_factor=float:{ratio:.9g}"
        return (*flags, *lifted), (_AS_IT_WAS, *_warn("llama.cpp-attn-flag"))
    if not graph.takes_factors:
        why = READINGS["llama.cpp-truncate"] if kind == "yarn" else READINGS["llama.cpp-factors"]
        raise NotExportable(f"{why}. For {text_config.model_type} nearest: 'yarn' as in the paper, 'ntk' or 'pi'.")
    warning = "the frequencies are stored in the file: write it with ctxext export, --engine llama.cpp -o OUT.gguf."
    if why_not_written(text_config) is not None:
        warning = (
            "the frequencies are stored in the file: convert the original with llama.cpp's convert_hf_to_gguf.py, "
            "and extend that file, ctxext export MODEL.gguf --engine llama.cpp … -o OUT.gguf."
        )
    return ("llama-server", "-m", "OUT.gguf", "--ctx-size", str(target)), (warning,)
