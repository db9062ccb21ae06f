"""What a server really does with a config and a command line: frequencies, attention factor, length and table.

An engine's reading of `rope_parameters` is translated into transformers' meaning, so that the frequencies come from the
same maths as an extension's. `readings.py` holds the evidence for each rule.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ctxext.encodings.rope import RopeGeometry
from ctxext.export.commands import Command
from ctxext.export.gguf import ARCHITECTURES, KINDS
from ctxext.export.readings import READINGS, Reading
from ctxext.export.rules import INTERLEAVED, LENGTHS, architecture_of
from ctxext.methods import yarn_growth
from ctxext.models.config_fields import NEEDED, ROPE_FIELDS, check_config
from ctxext.models.families import family_of
from ctxext.models.rope_tables import RopeTable, length_limit, rope_tables
from ctxext.models.text_config import path_to_text, text_config_of, text_section_of
from ctxext.utils.values import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The versions that the rules were read in: the oldest, and the newest, which is the default.
VERSIONS = {"vllm": ("0.12", "0.33"), "sglang": ("0.5.10", "0.5.23"), "llama.cpp": ("2025-12", "2026-11")}
ROPE_KEYS = ("rope_parameters", "rope_scaling")
BARE_KEYS = ("rope_type", "type", "factor")  # only within those
# Bases that an engine's model class falls back to where rope_parameters lack one; 10000 for all others.
_THETAS = {
    "vllm": {
        "qwen2": 1e6, "qwen3": 1e6, "exaone4": 1e6, "exaone_moe": 1e6, "ernie4_5_moe": 5e5, "ernie4_5_vl_moe": 5e5,
        "falcon_h1": 1e11,
    },
    "sglang": {"qwen3": 1e6},
}  # fmt: skip
# Classes that put a missing partial_rotary_factor back, from the config's rotary_dim.
_OWN_SHARE = {"vllm": ("minimax_m2",), "sglang": ()}
# The first release of SGLang whose class starts without a rope_theta; 1.0 where none does yet.
_NEED_THETA = {
    "qwen3": (0, 5, 11), "qwen2": (0, 5, 18), "qwen2_moe": (0, 5, 18), "qwen3_moe": (0, 5, 18), "deepseek_v3": (1,),
    "deepseek_v2": (1,), "gpt_oss": (1,), "granite": (1,), "mixtral": (1,), "olmo": (1,), "phi": (1,),
}  # fmt: skip
# Defaults of config classes in transformers 4.57.6 (configuration_*.py in the wheel) that version 5 does not share.
_DEFAULTS_4: dict[str, dict[str, Any]] = {
    "apertus": {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }},
    "gpt_oss": {"rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }},
    "cohere": {"rope_theta": 1e4}, "falcon_h1": {"rope_theta": 1e5}, "kyutai_speech_to_text": {"rope_theta": 1e5},
    "olmo3": {"rope_theta": 1e4}, "persimmon": {"rope_theta": 25e3}, "qwen3_vl_moe_text": {"rope_theta": 5e6},
    "qwen3_vl_text": {"rope_theta": 5e6},
}  # fmt: skip
# The keys of a GGUF file that llama.cpp reads for every architecture, and that --override-kv sets, by their type.
_KEYS = {
    "context_length": "int", "rope.freq_base": "float", "rope.scale_linear": "float", "rope.scaling.type": "str",
    "rope.scaling.factor": "float", "rope.scaling.original_context_length": "int", "rope.scaling.attn_factor": "float",
}  # fmt: skip
# The length fields of a config.
CAPACITY = ("max_position_embeddings", *LENGTHS)


@dataclass(frozen=True)
class Remark:
    """A part of the line or config that the engine does not use as written.

    Attributes:
        field: its name there.
        reading: the evidence.
        fatal: whether the engine refuses to start.
        told: the sentence for it; by default field and reading.
    """

    field: str
    reading: Reading
    fatal: bool = False
    told: str = ""

    @property
    def words(self) -> str:
        end = " The server does not start." if self.fatal else ""
        return self.told or f"{self.field} {self.reading.does}.{end}"


@dataclass(frozen=True)
class Effective:
    """What an engine does.

    Attributes:
        tables: the frequencies (radians per token) and the multiplier of cos and sin, by label of the table.
        limit: the maximum length in tokens that it derives from the config.
        length: the maximum length in tokens that it serves; `limit` if the line asks for none.
        rows: of its table of cos and sin, in tokens, beyond which there is no valid position; None if it grows.
        remarks: what it refuses or does not use.
    """

    tables: dict[str, RopeGeometry]
    limit: int
    length: int
    rows: int | None
    remarks: tuple[Remark, ...]


def version_of(engine: str, text: str | None) -> tuple[int, ...]:
    """The numbers of a version's base release, by default the newest known one.

    Raises:
        ValueError: it is too old, or not a version.
    """
    from packaging.version import InvalidVersion, Version

    oldest, newest = VERSIONS[engine]
    try:
        version = Version((text or newest).replace("-", ".") if engine == "llama.cpp" else text or newest).release
    except InvalidVersion as error:
        raise ValueError(f"--engine-version must look like {newest} for {engine}, got {text!r}. Correct it.") from error
    if version < tuple(int(part) for part in re.findall(r"\d+", oldest)):
        raise ValueError(f"ctxext knows {engine} from {oldest} on, got {text}. Upgrade the server.")
    return version


def version_for(command: Command, version: str | None) -> str:
    """`version`, or the one that the line states, or the newest known one. Raises ValueError if two contradict."""
    if version and command.version:
        numbers = version_of(command.engine, version), version_of(command.engine, command.version)
        if any(one != other for one, other in zip(*numbers, strict=False)):
            raise ValueError(
                f"--engine-version {version} contradicts LINE, whose image is {command.version}. Drop --engine-version."
            )
    return command.version or version or VERSIONS[command.engine][1]


def effective(
    command: Command, config: PreTrainedConfig, source: dict[str, Any], version: str | None = None
) -> Effective:
    """What the engine of `command` does with the checkpoint of `config`.

    Args:
        source: its config.json.
        version: of the engine; by default the line's own, or the newest known one.

    Raises:
        ValueError: an unsupported version, an invalid config, or a graph of llama.cpp that ctxext does not know.
    """
    numbers = version_of(command.engine, version_for(command, version))
    _check_rope(command.overrides)
    if command.engine == "llama.cpp":
        return _llama_cpp(command, numbers, config)
    server = _Server(command.engine, numbers, config, source, command.overrides)
    for flag in ("--rope-scaling", "--rope-theta"):
        if flag in command.options and command.engine == "vllm":
            server.remark(flag, "rope-scaling", fatal=True)
    return server.serve(command.length)


def _check_rope(overrides: dict[str, Any], path: str = "") -> None:
    """Raise ValueError, naming the key, if a rope key of overrides is not an object, or a base not a number."""
    for key, value in overrides.items():
        if key in ROPE_KEYS and not isinstance(value, dict):
            raise ValueError(f"{path}{key} must be an object, got {shown(value)}. Write {{}} around its keys.")
        if key == "rope_theta" and not ROPE_FIELDS[key].holds(value):
            raise ValueError(f"{path}{key} must be {ROPE_FIELDS[key].words}, got {shown(value)}. Correct it.")
        if isinstance(value, dict):
            _check_rope(value, f"{path}{key}.")


def kind_of(parameters: dict[str, Any]) -> str:
    """The rope_type of one table's parameters."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def each_table(parameters: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of `rope_parameters` by label; "" where they are flat."""
    nested = [(label, value) for label, value in parameters.items() if isinstance(value, dict)]
    yield from nested or [("", parameters)]


def _latent_growth(parameters: dict[str, Any]) -> float:
    """The multiplier in the DeepSeek families: an mscale of 1 and an mscale_all_dim of 0 where left out."""
    mscale, all_dim, factor = (parameters.get(name) for name in ("mscale", "mscale_all_dim", "factor"))
    above = yarn_growth(factor or 1.0, 1.0 if mscale is None else mscale)
    return above / yarn_growth(factor or 1.0, 0.0 if all_dim is None else all_dim)


def meant_scale(table: RopeTable, latent: bool) -> float:
    """The multiplier of cos and sin that a table's parameters ask for, by whichever key they use.

    attention_factor is transformers'; attn_factor, mscale and long_mscale are the engines' own.
    """
    parameters, kind = table.parameters, kind_of(table.parameters)
    if parameters.get("attention_factor") is None:
        if kind == "yarn":
            scale = _latent_growth(parameters) if latent else table.in_use.attention_factor
            return scale * float(parameters.get("attn_factor") or 1.0)
        if kind == "longrope" and parameters.get("long_mscale"):
            return float(parameters["long_mscale"])
    return table.in_use.attention_factor


class _Server:
    """The way of vLLM and SGLang from a config and its overrides to frequencies."""

    def __init__(
        self,
        engine: str,
        version: tuple[int, ...],
        config: PreTrainedConfig,
        source: dict[str, Any],
        overrides: dict[str, Any],
    ) -> None:
        self.engine, self.version, self.remarks = engine, version, list[Remark]()
        self.text = copy.deepcopy(text_config_of(config))
        self.path = [name for name, _ in path_to_text(config)]
        # vLLM up to 0.19.0 requires transformers < 5.
        self.is_version_4 = engine == "vllm" and version < (0, 19, 1)
        if self.is_version_4:
            self.read_version_4(text_section_of(copy.deepcopy(source), config), overrides)
        self.before = copy.deepcopy(self.text.rope_parameters)
        self.override(overrides)
        self.has_original = "original_max_position_embeddings" in self.text.rope_parameters
        self.complete()

    def remark(self, field: str, name: str, fatal: bool = False, told: str = "") -> None:
        self.remarks.append(Remark(field, READINGS[f"{self.engine}-{name}"], fatal, told))

    @property
    def only_yarn(self) -> bool:
        """Whether the model's class reads any `rope_parameters` as yarn."""
        return self.engine == "vllm" and self.text.model_type == "gpt_oss"

    # ------------------------------------------------------------------------------ the merged config

    def read_version_4(self, section: dict[str, Any], overrides: dict[str, Any]) -> None:
        """Read rope_theta and rope_scaling before rope_parameters, even as the class's defaults: transformers 4."""
        if any(label for label, _ in each_table(self.text.rope_parameters)):
            return  # parameters for each layer type had no common format
        usual = {"rope_theta": getattr(self.text, "default_theta", 1e4), **_DEFAULTS_4.get(self.text.model_type, {})}
        scalars = {key: value for key, value in overrides.items() if not isinstance(value, dict)}
        section = {**usual, **section, **scalars}
        parameters = dict(section.get("rope_scaling") or self.text.rope_parameters)
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        for name, older in {"rope_theta": "rope_theta", **family_of(self.text).version_4_names}.items():
            parameters[name] = section.get(older, usual.get(name, parameters.get(name)))
        self.text.rope_parameters = parameters

    def override(self, overrides: dict[str, Any], depth: int = 0) -> None:
        """Set what `overrides` holds for the text config, which is `path` below the config."""
        for key, value in overrides.items():
            field = ".".join((*self.path[:depth], key))
            if depth < len(self.path):
                if key == self.path[depth] and isinstance(value, dict):
                    if self.engine == "sglang" and self.version < (0, 5, 17):
                        self.remark("--json-model-override-args", "overrides", fatal=True)
                    self.override(value, depth + 1)
                elif key in (*ROPE_KEYS, *BARE_KEYS, *CAPACITY, "rope_theta"):
                    self.remark(field, "misplaced")
            elif key == "rope_scaling" and self.is_version_4:
                if value != overrides.get("rope_parameters"):
                    self.remark(field, "rope-scaling-key")
            elif key in ROPE_KEYS:
                self.override_rope(value, field, nested=depth > 0)
            elif key == "text_config":
                self.remark(field, "flat-model", fatal=True)
            elif key == "rope_theta":  # before any rope_parameters
                wanted = {**self.text.rope_parameters, **overrides.get("rope_parameters", {})}.get("rope_theta")
                if not self.is_version_4 and value != wanted:
                    self.remark(field, "theta-key")
            elif key in BARE_KEYS:
                self.remark(field, "bare")
            elif key == "model_type" and value != self.text.model_type:
                raise ValueError(f"{field} makes this another model, which cannot be checked. Leave it out.")
            elif key == "max_model_len":
                self.remark(field, "unknown-key")
            else:
                try:
                    setattr(self.text, key, copy.deepcopy(value))
                except Exception as error:  # transformers' own checks, of many types
                    raise ValueError(f"{field} of this model cannot be {shown(value)}. Correct it.") from error

    def override_rope(self, value: dict[str, Any], field: str, nested: bool) -> None:
        """Replace `rope_parameters`, or merge into them, as the engine does."""
        merges = nested if self.engine == "vllm" else not nested and self.version >= (0, 5, 23)
        current = self.text.rope_parameters if merges else {}
        parameters = {**copy.deepcopy(current), **copy.deepcopy(value)}
        for label in current.keys() & value.keys():
            if isinstance(current[label], dict) and isinstance(value[label], dict) and self.engine == "vllm":
                parameters[label] = {**current[label], **value[label]}
        tables = any(isinstance(each, dict) for each in self.before.values())
        if not tables and (labels := [label for label, _ in each_table(parameters) if label]):
            raise ValueError(f"{field} holds {labels[0]!r}, but this model has one table for all layers. Leave it out.")
        if tables and not (parameters and all(isinstance(each, dict) for each in parameters.values())):
            self.remark(field, "layer-types", fatal=not merges)
            return
        self.text.rope_parameters = parameters

    def complete(self) -> None:
        """Fill in what the engine assumes, and note what it refuses or loses."""
        for label, table in each_table(self.text.rope_parameters):
            before = self.before.get(label, {}) if label else self.before
            if table.get("rope_type") != table.get("type", table.get("rope_type")):
                # vLLM has patched `type` before the overrides are set; SGLang prefers rope_type.
                key = "The key is `rope_type`, not `type`: "
                told = "the server stops with KeyError." if "rope_type" not in table else "the old rope_type stays."
                is_fatal = self.engine == "vllm" and "rope_type" not in table
                if "rope_type" not in table or table["type"] != before.get("type"):  # not as published
                    self.remark("type", "type", is_fatal, key + told if self.engine == "vllm" else "")
            table.setdefault("rope_type", table.get("type", "default"))
            if "rope_theta" not in table:
                own = _THETAS[self.engine].get(self.text.model_type)
                table["rope_theta"] = 10000.0 if own is None else own
                first = _NEED_THETA.get(self.text.model_type, ())
                if self.engine == "vllm":
                    first = (0, 13) if own is None else ()
                if self.version < first:
                    self.remark("rope_theta", "theta-missing", fatal=True)
                elif table["rope_theta"] != before["rope_theta"]:
                    self.remark("rope_theta", "theta-lost")
            kind = kind_of(table)
            needed = ("factor", "original_max_position_embeddings") if self.is_yarn(kind) else NEEDED.get(kind, ())
            if self.only_yarn:
                needed = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
            for name in needed:
                if table.get(name) is None:
                    is_original = self.engine == "sglang" and name.startswith("original")
                    row = "gpt-oss" if self.only_yarn else "missing-original" if is_original else "missing"
                    told = ""
                    if is_original:
                        told = f"{name} of {kind} defaults to max_position_embeddings, here {length_limit(self.text)}."
                    elif row == "missing" and self.engine == "vllm":
                        told = f"{kind} needs {name}; without it the server does not start."
                    self.remark(f"{name} of {kind}", row, self.engine == "vllm", told)
                    if not name.startswith("beta"):
                        table[name] = length_limit(self.text) if name.startswith("original") else 1.0
            if self.only_yarn and kind != "yarn":
                self.remark(f'rope_type "{kind}"', "gpt-oss")
                table["rope_type"] = "yarn"
            for name in ("mrope_section", "partial_rotary_factor"):
                if name in before and name not in table:
                    if name == "partial_rotary_factor" and self.text.model_type in _OWN_SHARE[self.engine]:
                        table[name] = before[name]
                    else:
                        self.remark(name, "replaced")
        check_config(self.text)

    # ------------------------------------------------------------------------------------ the numbers

    def is_yarn(self, kind: str) -> bool:
        """Whether the class reads this rope_type as yarn: the DeepSeek families have no other."""
        return kind == "yarn" or (family_of(self.text).softmax_mscale and kind != "default")

    def serve(self, asked: int | None) -> Effective:
        tables = rope_tables(self.text, self.text.rope_parameters)
        if not tables:
            raise ValueError("rope_parameters hold no table for the layer types of this model. Correct it.")
        limit = self.limit()
        default = limit
        if self.engine == "vllm" and any(kind_of(table.parameters) == "longrope" for table in tables):
            default = getattr(self.text, "original_max_position_embeddings", None) or limit
        length = asked or default
        geometries = {table.label: self.read(table, length) for table in tables}
        return Effective(geometries, limit, length, self.rows(tables[0]), tuple(dict.fromkeys(self.remarks)))

    def limit(self) -> int:
        """The maximum length in tokens that the engine derives from the config."""
        whole, text = self.text.rope_parameters, self.text
        given = {name: value for name in CAPACITY if isinstance(value := getattr(text, name, None), int)}
        if self.engine == "sglang":
            keys = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
            fixed = self.has_original or whole.get("rope_type") == "llama3"
            return int(next(given[name] for name in keys if name in given) * (1 if fixed else whole.get("factor") or 1))
        exempt = given.get("model_max_length", 0)
        length, factor = exempt or min(given.values()), 1.0
        for _, table in () if "gemma3" in text.model_type else each_table(whole):
            kind = kind_of(table)
            if kind == "yarn" and self.version < (0, 30):
                factor, length = table["factor"], table["original_max_position_embeddings"]
            elif kind not in ("longrope", "llama3", "yarn"):
                factor = table.get("factor") or factor
        return int(max(length * factor, exempt))

    def rows(self, table: RopeTable) -> int | None:
        """Positions of the table of cos and sin; None where it grows, as most of SGLang's do."""
        kind, parameters = kind_of(table.parameters), table.parameters
        is_yarn = self.is_yarn(kind)
        if self.engine == "sglang" and (not is_yarn or self.version >= (0, 5, 21)):
            return None
        if is_yarn:
            rows = parameters["original_max_position_embeddings"] * parameters["factor"]
        else:
            multiplied = kind == "linear" or (kind == "dynamic" and self.version < (0, 22))
            rows = length_limit(self.text) * (parameters["factor"] if multiplied else 1)
        for_video = 4 if self.engine == "vllm" and "mrope_section" in parameters else 1
        return math.ceil(rows * for_video)

    def read(self, table: RopeTable, length: int) -> RopeGeometry:
        """The frequencies and the multiplier that the engine computes for a table."""
        kind, parameters = kind_of(table.parameters), dict(table.parameters)
        latent = family_of(self.text).softmax_mscale
        if self.is_yarn(kind):
            if latent and not parameters.pop("truncate", True):
                self.remark("truncate", "mla-truncate")
            terms = parameters.keys() & {"mscale", "mscale_all_dim"}
            if self.engine == "sglang" and self.version >= (0, 5, 16) and terms and "mrope_section" in parameters:
                self.remark(min(terms), "mrope-mscale", fatal=True)
            scale = self.yarn_scale(parameters, latent)
            parameters = {name: value for name, value in parameters.items() if name not in ("mscale", "mscale_all_dim")}
            parameters |= {"rope_type": "yarn", "attention_factor": scale}
        elif kind == "dynamic":
            newer = self.engine == "vllm" and self.version >= (0, 22)
            if not newer or length > table.limit:
                self.remark('rope_type "dynamic"', "dynamic-new" if newer else "dynamic")
            factor, power = parameters["factor"], table.rotary_dim / (table.rotary_dim - 2)
            parameters["rope_type"] = "default"
            if not newer:  # the base of NTK-aware scaling at max_position_embeddings * factor tokens
                parameters["rope_theta"] *= (factor * factor - (factor - 1)) ** power
        elif kind == "longrope":
            parameters |= self.longrope(table, length)
        elif kind == "proportional" and parameters.pop("factor", 1.0) != 1.0:
            self.remark("factor of proportional RoPE", "proportional")
        if kind not in ("default", "yarn") and "mrope_section" in parameters:
            self.remark("mrope_section", "mrope")
        found = replace(table, parameters=parameters).in_use
        meant = meant_scale(table, latent)
        if kind in ("yarn", "longrope") and not math.isclose(found.attention_factor, meant, rel_tol=1e-6):
            self.remark(*self.dropped(kind, latent, table.parameters))
        return found

    def dropped(self, kind: str, latent: bool, parameters: dict[str, Any]) -> tuple[str, str]:
        """The field that the engine does not read as transformers does, and the name of the reading."""
        if kind == "longrope":
            return "attention_factor", "longrope"
        if latent and "attention_factor" in parameters:
            return "attention_factor", "mla-attention-factor"
        if self.only_yarn:
            return "attention_factor", "gpt-oss"
        if "attention_factor" in parameters:
            return "attention_factor", "attention-factor"
        if self.engine == "vllm" and self.version >= (0, 30):
            return "attn_factor", "attn-factor"
        return "mscale", "mscale"

    def yarn_scale(self, parameters: dict[str, Any], latent: bool) -> float:
        """The multiplier of cos and sin for yarn, by the keys that this version reads."""
        older = self.engine == "vllm" and self.version < (0, 30)
        scale = yarn_growth(parameters["factor"])
        if self.only_yarn:
            return scale
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if latent:
            scale = _latent_growth(parameters)
        elif mscale and all_dim and not older and not (self.engine == "sglang" and self.version < (0, 5, 16)):
            scale = yarn_growth(parameters["factor"], mscale) / yarn_growth(parameters["factor"], all_dim)
        if older or self.engine == "sglang":
            return scale * (parameters.get("attn_factor") or 1.0)
        return scale if latent else parameters.get("attention_factor") or scale

    def longrope(self, table: RopeTable, length: int) -> dict[str, Any]:
        """The list in use at `length`, for all lengths, and its multiplier."""
        if self.text.model_type.removesuffix("_text") in INTERLEAVED:
            self.remark("longrope", "longrope-pairs", fatal=True)
        parameters, limit = table.parameters, length_limit(self.text)
        original = parameters.get("original_max_position_embeddings") or limit
        if length > original and list(parameters["short_factor"]) != list(parameters["long_factor"]):
            self.remark(
                *(("long_factor", "longrope-lists") if self.engine == "vllm" else ("longrope", "longrope-switch"))
            )
        name = "long" if length > original else "short"
        own = math.sqrt(1 + math.log(limit / original) / math.log(original)) if limit > original else 1.0
        factors = parameters[f"{name}_factor"]
        scale = parameters.get(f"{name}_mscale") or own
        return {"short_factor": factors, "long_factor": factors, "attention_factor": scale}


# ----------------------------------------------------------------------------------------- llama.cpp


def file_parameters(config: PreTrainedConfig) -> RopeTable:
    """The table of a config that flags change, as convert_hf_to_gguf.py would write it."""
    return _file_tables(config)[0]


def _file_tables(config: PreTrainedConfig) -> Sequence[RopeTable]:
    """That table, and those of layers that keep their own base. Raises ValueError if llama.cpp's graph is unknown."""
    text = text_config_of(config)
    tables = rope_tables(text, text.rope_parameters)
    own = any(graph.model_type == text.model_type and graph.windowed_rope == "own" for graph in ARCHITECTURES.values())
    if (len(tables) > 1 and not own) or family_of(text).softmax_mscale:
        raise ValueError(
            f"ctxext does not know llama.cpp's graph for {text.model_type}. Check the running server instead: "
            "ctxext verify http://localhost:8080 --probe FILE."
        )
    return tables


def _llama_cpp(command: Command, version: tuple[int, ...], config: PreTrainedConfig) -> Effective:
    """The constructor of llama_context: flags replace what the file of `config` holds."""
    (table, *local), remarks = _file_tables(config), list[Remark]()
    kept = kind_of(table.parameters)

    def remark(field: str, name: str, told: str = "") -> None:
        remarks.append(Remark(field, READINGS[f"llama.cpp-{name}"], told=told))

    keys, unread = metadata(command, config)
    file = _file(table, keys)
    for field, told in unread:
        remark(field, "override-kv", told)
    theta = command.number("--rope-freq-base") or file["rope.freq_base"]
    kind = command.options.get("--rope-scaling", file["rope.scaling.type"])
    flag = command.number("--rope-scale") or 1 / (command.number("--rope-freq-scale") or 1.0)
    factor = 1.0 if kind == "none" else flag if flag != 1.0 else file["rope.scaling.factor"]
    original = int(command.number("--yarn-orig-ctx") or file["rope.scaling.original_context_length"])
    weight = command.number("--yarn-ext-factor")  # of the unscaled frequencies in yarn's ramp
    if weight is None:
        weight = 1.0 if kind == "yarn" else 0.0
    is_stored = kept in ("llama3", "longrope")
    if is_stored and (factor != 1.0 or "--rope-scaling" in command.options):
        remark("the file's own scaling", "scaled-file")
    parameters: dict[str, Any] = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    geometry = replace(table, parameters=parameters).in_use
    multiplier = command.number("--yarn-attn-factor") or 1.0
    if weight:
        betas = {name: command.number(f"--yarn-{name.replace('_', '-')}") for name in ("beta_fast", "beta_slow")}
        parameters |= {"rope_type": "yarn", "original_max_position_embeddings": original, **betas}
        yarn = replace(table, parameters=parameters).in_use
        geometry = replace(yarn, inv_freq=geometry.inv_freq + weight * (yarn.inv_freq - geometry.inv_freq))
        if multiplier != 1.0:
            remark("--yarn-attn-factor", "attn-flag")
        multiplier = yarn_growth(factor)
        if not table.parameters.get("truncate", True):
            remark("truncate of yarn", "truncate")
    if kind == "yarn" and factor == 1.0:
        remark("--rope-scaling yarn", "no-scale")
    if factor != 1.0 and weight != (kind == "yarn"):
        remark("--yarn-ext-factor", "ext-factor")
    asked = command.length or file["context_length"]
    stored: Any = 1.0  # the factors in the file's tensors, which no flag removes
    if is_stored:
        stored = table.at(asked).inv_freq / table.plain(table.parameters["rope_theta"], table.limit).inv_freq
    of_all = file["rope.scaling.attn_factor"]  # multiplies whatever is computed
    geometry = replace(geometry, inv_freq=geometry.inv_freq * stored, attention_factor=multiplier * of_all)
    cap = file["context_length"]
    if version >= (2026, 9) and weight and factor != 1.0:
        cap = max(cap, math.floor(original * factor))
    if command.program is not None:
        cap = max(cap, asked)
    if asked > cap:
        remark("--ctx-size", "length" if version < (2026, 9) else "length-new")
    tables = {table.label: geometry, **{other.label: replace(other.in_use, attention_factor=of_all) for other in local}}
    return Effective(tables, cap, min(asked, cap), None, tuple(remarks))


def _file(table: RopeTable, keys: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a file as convert_hf_to_gguf.py writes it, with `keys` in the place of its own."""
    before, kind = table.parameters, kind_of(table.parameters)
    is_scaled = kind in ("linear", "yarn")
    found = {
        "context_length": table.limit,
        "rope.freq_base": before["rope_theta"],
        "rope.scaling.type": kind if is_scaled else "linear",
        "rope.scaling.factor": (before.get("factor") if is_scaled else keys.get("rope.scale_linear")) or 1.0,
        "rope.scaling.attn_factor": table.in_use.attention_factor if kind in ("llama3", "longrope") else 1.0,
        "rope.scaling.original_context_length": before.get("original_max_position_embeddings"),
        **{key: value for key, value in keys.items() if value},
    }
    found["rope.scaling.original_context_length"] = (
        found["rope.scaling.original_context_length"] or found["context_length"]
    )
    return found


def metadata(command: Command, config: PreTrainedConfig) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """The keys of --override-kv that llama.cpp reads, by the part of their names after the architecture, and those
    that it does not use, each with a sentence.

    Raises ValueError if a value is not valid.
    """
    architecture, keys, unread = architecture_of(text_config_of(config)), dict[str, Any](), list[tuple[str, str]]()
    for whole, kind, value in command.keys:
        prefix, _, key = whole.partition(".")
        if (right := _KEYS.get(key)) is None:
            continue
        if architecture not in (None, prefix):
            unread.append((whole, f"{whole} is not read: the architecture of this model's file is {architecture}."))
        elif kind != right:
            unread.append((whole, f"{whole} is ignored as a {kind}: write {whole}={right}:{value}."))
        else:
            keys.setdefault(key, _checked(whole, key, value))
    return keys, tuple(unread)


def _checked(whole: str, key: str, value: str) -> Any:
    """The value of a key of --override-kv."""
    kind = KINDS[f".{key}"]
    try:
        found = value if _KEYS[key] == "str" else int(value) if _KEYS[key] == "int" else float(value)
    except ValueError:
        found = None
    known = _KEYS[key] != "str" or value in ("none", "linear", "yarn", "longrope")
    if not (kind.holds(found) and known):
        words = kind.words if known else "none, linear, yarn or longrope"
        raise ValueError(f"{whole} in --override-kv must be {words}, got {value!r}. Correct it.")
    return found
