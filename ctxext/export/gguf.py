"""Extend GGUF files (llama.cpp's format) without changing their weights, or write them from a folder.

If llama.cpp's graph for an architecture takes frequency factors, any λ is stored in the tensor `rope_freqs.weight` (for
phi3 in two tensors), and the multiplier of cos and sin in `{arch}.rope.scaling.attn_factor`. Other architectures
support only what the metadata can express: a base, linear scaling, and YaRN with the paper's betas.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from ctxext.encodings.rope import RopeGeometry, inverse_frequencies
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.request import plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.hub.checkpoint import load_tokenizer, read_config
from ctxext.methods import ContextMethod, RopeScaling, geometry_in_use, longrope_parameters, yarn_growth
from ctxext.models.config_fields import ROPE_FIELDS, check_config
from ctxext.models.context import read_context
from ctxext.models.metadata import check_mark
from ctxext.utils.json_files import FACTOR, TEXT, TOKENS, Kind, parsed_json
from ctxext.utils.values import (
    MAX_COUNT,
    MAX_ROTARY,
    MAX_SIZE,
    are_numbers,
    are_words,
    is_count,
    is_number,
    one_line,
    shown,
)

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, ReaderField
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    # Name, array (bytes if it is quantised) and type of a tensor.
    Stored = tuple[str, np.ndarray, GGMLQuantizationType]

ROPE_FACTORS = "rope_freqs.weight"
# Of phi3: llama.cpp takes the first for context sizes beyond the original length, and the second up to it.
LONG_AND_SHORT = ("rope_factors_long.weight", "rope_factors_short.weight")
# Our own key: the extension metadata, as under `ctxext` in a config.
MARK = "ctxext.extension"
CONVERTER = "Convert it with llama.cpp's own convert_hf_to_gguf.py, then extend the file."


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp rotates in one of its architectures.

    Attributes:
        model_type: its name in transformers.
        factors: the tensors by whose numbers its graph divides the frequencies; none if it takes no factors.
        full_every: one layer in so many has full attention, the others a window, unless the file says otherwise.
        windowed_rope: how its layers with a window rotate: as the others ("same"), or by a base of their own and
            without scaling ("own"); the multiplier of cos and sin is that of all layers.
    """

    model_type: str
    factors: tuple[str, ...] = ()
    full_every: int = 1
    windowed_rope: Literal["same", "own"] = "same"


# Read in src/models/ of llama.cpp b11549: what each graph gives `ggml_rope_ext`.
ARCHITECTURES = {
    "llama": Architecture("llama", (ROPE_FACTORS,)),
    "granite": Architecture("granite", (ROPE_FACTORS,)),
    "phi3": Architecture("phi3", LONG_AND_SHORT),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe"),
    "gemma3": Architecture("gemma3_text", full_every=6, windowed_rope="own"),
    "gpt-oss": Architecture("gpt_oss", full_every=2),
}


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files are read and written by the package gguf. Install it: pip install '.[export]' in the clone"
        ) from error
    return gguf


# ------------------------------------------------------------------------------------------ reading


class _File:
    """A GGUF file: its metadata by key, and its memory-mapped tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, _reader(path)
        self.architecture = self.get("general.architecture")
        parts = self.get("split.count")
        if parts is not None and parts > 1:
            raise ValueError(f"{path} is one part of {parts}. Join them: llama-gguf-split --merge.")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path} has llama.cpp's architecture {self.architecture!r}, which is not supported "
                f"(supported: {', '.join(ARCHITECTURES)}). llama.cpp's own options --rope-scaling, --rope-scale and "
                "--yarn-orig-ctx apply PI and YaRN at run time."
            )

    def get(self, key: str) -> Any:
        """The value of a key of `KINDS`, or None; a leading dot stands for the architecture's prefix."""
        kind, name = KINDS[key], f"{self.architecture}{key}" if key.startswith(".") else key
        field = self.reader.get_field(name)
        value = None if field is None else self.value(field)
        if field is not None and not kind.holds(value):
            raise ValueError(f"{name} in {self.path} must be {kind.words}, got {shown(value)}. {_AGAIN}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """The value of an integer key, or a valid `default`; raises if it has neither."""
        value = self.get(key)
        value = default if value is None else value
        if not KINDS[key].holds(value):
            raise ValueError(f"{self.path} lacks {self.architecture}{key}, {KINDS[key].words}. {_AGAIN}")
        return cast("int", value)

    def value(self, field: ReaderField) -> Any:
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown(field.name)} in {self.path} is not UTF-8 ({error}). {_AGAIN}") from error

    def tensor(self, name: str) -> np.ndarray | None:
        return next((tensor.data for tensor in self.reader.tensors if tensor.name == name), None)

    @property
    def graph(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def factors(self) -> tuple[np.ndarray, ...]:
        """The factors in the file that its graph takes."""
        found, pairs = {name: self.tensor(name) for name in self.graph.factors}, self.rotary_dim // 2
        for name, factors in found.items():
            if factors is not None and not (factors.shape == (pairs,) and are_numbers(factors.tolist(), 1e-6)):
                raise ValueError(f"{name} in {self.path} must be {pairs} numbers >= 1e-6. {_AGAIN}")
        there = tuple(factors for factors in found.values() if factors is not None)
        if there and len(there) < len(found):
            raise ValueError(f"{self.path} must hold {' and '.join(found)}, got one of them. {_AGAIN}")
        return there

    @property
    def window(self) -> int | None:
        """The sliding window in tokens of some layers, or of all for phi3; None without one."""
        return self.get(".attention.sliding_window") or None

    @property
    def layer_types(self) -> list[str]:
        """The kind of attention of each layer, in transformers' words."""
        layers, pattern = self.number(".block_count"), self.get(".attention.sliding_window_pattern")
        every = self.graph.full_every if pattern is None else pattern
        if self.window is None:
            slides = [False] * layers
        elif isinstance(every, list):
            slides = [bool(each) for each in every[:layers]]
        else:
            slides = [every == 0 or layer % every < every - 1 for layer in range(layers)]
        return ["sliding_attention" if each else "full_attention" for each in slides]

    @property
    def head_dim(self) -> int:
        return self.number(".attention.key_length", self.number(".embedding_length") // self.heads)

    @property
    def heads(self) -> int:
        return self.number(".attention.head_count")

    @property
    def rotary_dim(self) -> int:
        return self.number(".rope.dimension_count", self.head_dim)

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """How llama.cpp reads the file, as transformers' `rope_parameters`."""
        values = {key: self.get(key) for key in KINDS if key.startswith(".rope.")}
        values[".context_length"] = self.number(".context_length")
        try:
            return _as_rope_parameters(self.architecture, values, self.rotary_dim, self.factors)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error


_AGAIN = "Download or convert it again."


def _or_zero(kind: Kind) -> Kind:
    """As `kind`, or 0, which llama.cpp treats as a missing key."""
    return Kind(f"{kind.words}, or 0", lambda value: is_number(value, 0, 0) or kind.holds(value))


_SIZE = Kind(f"a whole number from 1 to {MAX_SIZE}", is_count)
_COUNT = Kind(f"a whole number from 0 to {MAX_COUNT}", partial(is_count, low=0, high=MAX_COUNT))
KINDS = {
    "general.architecture": TEXT,
    "split.count": _COUNT,
    "tokenizer.ggml.tokens": Kind("a list of strings", are_words),
    MARK: TEXT,
    ".block_count": _COUNT,
    ".context_length": TOKENS,
    ".embedding_length": _SIZE,
    ".attention.head_count": _SIZE,
    ".attention.head_count_kv": _SIZE,
    ".attention.key_length": _SIZE,
    ".attention.sliding_window": _COUNT,
    ".attention.sliding_window_pattern": Kind(
        f"{_COUNT.words}, or a list of them",
        lambda value: (
            all(isinstance(each, bool) or _COUNT.holds(each) for each in value)
            if isinstance(value, list)
            else _COUNT.holds(value)
        ),
    ),
    ".rope.dimension_count": Kind(
        f"an even number from 4 to {MAX_ROTARY}", lambda value: is_count(value, 4, MAX_ROTARY) and value % 2 == 0
    ),
    ".rope.freq_base": ROPE_FIELDS["rope_theta"],
    ".rope.freq_base_swa": ROPE_FIELDS["rope_theta"],
    ".rope.scale_linear": _or_zero(FACTOR),
    ".rope.scaling.type": TEXT,
    ".rope.scaling.factor": _or_zero(FACTOR),
    ".rope.scaling.original_context_length": _or_zero(TOKENS),
    ".rope.scaling.attn_factor": _or_zero(ROPE_FIELDS["attention_factor"]),
}


def check_magic(path: Path) -> None:
    """Raise FileNotFoundError or ValueError unless `path` begins as a GGUF file does."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Pass the path of a GGUF file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is neither a checkpoint folder nor a GGUF file. Check the path.")


def _reader(path: Path) -> GGUFReader:
    check_magic(path)
    base: Any = _gguf().GGUFReader

    class Reader(base):
        """A reader that checks counts against the file size: the base class reads past the end without an error."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != count:
                raise ValueError(f"it ends within the {count} values at byte {offset}")
            return found

    try:
        reader = Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a complete GGUF file. {_AGAIN}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} has the opposite byte order. Convert it with the gguf package's gguf-convert-endian.")
    return cast("GGUFReader", reader)


def _as_rope_parameters(
    architecture: str, values: dict[str, Any], rotary_dim: int, factors: Sequence[np.ndarray]
) -> dict[str, Any]:
    """The metadata's RoPE (`KINDS`) and factors as `rope_parameters`, read as llama.cpp reads it.

    `llama_model::load_hparams` and the constructor of `llama_context`, ggml-org/llama.cpp.
    """
    parameters, attention_factor = _of_full_attention(values, rotary_dim, factors)
    graph, base = ARCHITECTURES[architecture], values.get(".rope.freq_base_swa")
    if graph.windowed_rope == "same":
        if graph.full_every > 1 and base not in (None, values[".rope.freq_base"]):
            raise ValueError(f"its windowed layers have a base of {base:g}, and {graph.model_type} has one for all.")
        return parameters
    if attention_factor != 1.0:
        raise ValueError(f"its attn_factor of {attention_factor:g} multiplies cos and sin of windowed layers too.")
    local = {"rope_type": "default", "rope_theta": float(base or 10000.0)}
    return {"full_attention": parameters, "sliding_attention": local}


def _of_full_attention(
    values: dict[str, Any], rotary_dim: int, factors: Sequence[np.ndarray]
) -> tuple[dict[str, Any], float]:
    """`rope_parameters` of the layers with full attention, and the file's own multiplier of cos and sin."""
    length = values[".context_length"]
    original = int(values.get(".rope.scaling.original_context_length") or length)
    kind = values.get(".rope.scaling.type") or "linear"
    scale = float(values.get(".rope.scaling.factor") or values.get(".rope.scale_linear") or 1.0)
    attention_factor = float(values.get(".rope.scaling.attn_factor") or 1.0)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values.get(".rope.freq_base") or 10000.0)}
    if kind == "yarn":
        # The betas are always the paper's: none of the supported graphs loads them.
        parameters |= {"rope_type": "yarn", "factor": scale, "original_max_position_embeddings": original}
    elif kind == "linear" and scale != 1.0:
        parameters |= {"rope_type": "linear", "factor": scale}
        if values.get(".rope.scaling.original_context_length"):
            parameters["original_max_position_embeddings"] = original
    elif kind not in ("linear", "none") and not (kind == "longrope" and len(factors) == 2):
        raise ValueError(f"the file's scaling {kind!r} is unsupported. Extend the folder that it was converted from.")
    if not factors and attention_factor == 1.0:
        return parameters, 1.0
    plain = RopeGeometry.plain(rotary_dim, parameters["rope_theta"], original)
    rope = geometry_in_use(parameters, rotary_dim, length)
    rescale = plain.inv_freq / rope.inv_freq
    by_size = [rescale * torch.from_numpy(each.copy()).double() for each in factors] or [rescale]
    multiplier = rope.attention_factor * attention_factor
    found = longrope_parameters(by_size[0], multiplier, max(1.0, length / original), plain)
    return found | {"short_factor": by_size[-1].tolist()}, attention_factor


def context_of_gguf(path: str | Path) -> PreTrainedConfig:
    """The context of a GGUF file as a transformers config, for `describe_context` and `extend_config`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a GGUF file, or its architecture is unsupported.
    """
    return _config(_File(Path(path)))


def _config(file: _File) -> PreTrainedConfig:
    from transformers import AutoConfig

    parameters, context_length = file.rope_parameters, file.number(".context_length")
    if file.rotary_dim != file.head_dim:
        parameters["partial_rotary_factor"] = file.rotary_dim / file.head_dim
    embedding = file.tensor("token_embd.weight")
    values = {
        "hidden_size": file.number(".embedding_length"),
        "num_hidden_layers": file.number(".block_count"),
        "num_attention_heads": file.heads,
        "num_key_value_heads": file.number(".attention.head_count_kv", file.heads),
        "head_dim": file.head_dim,
        "vocab_size": len(file.get("tokenizer.ggml.tokens") or ()) if embedding is None else embedding.shape[0],
        "max_position_embeddings": context_length,
        "rope_parameters": parameters,
    }
    if file.graph.full_every > 1:
        values |= {"sliding_window": file.window, "layer_types": file.layer_types}
    if file.architecture == "phi3":  # beside rope_parameters, where it wins
        original = file.get(".rope.scaling.original_context_length") or context_length
        values |= {"sliding_window": file.window, "original_max_position_embeddings": original}
    try:
        config = AutoConfig.for_model(file.graph.model_type, **values)
        check_config(config)
    except Exception as error:  # transformers raises many exception types
        raise ValueError(f"{file.path} describes no valid model: {one_line(error)}. {_AGAIN}") from error
    mark = file.get(MARK)
    if mark is not None:
        config.ctxext = parsed_json(mark, f"{MARK} in {file.path}").content
        check_mark(config.ctxext, str(file.path), MARK)
    return config


# ------------------------------------------------------------------------------------------ extending


def extend_gguf(
    source: str | Path,
    output: str | Path,
    factor: float | None = None,
    method: str | ContextMethod | None = None,
    **arguments: Any,
) -> RopePlan:
    """Write an extended copy of the GGUF file `source` to `output`. Weights are copied unchanged, one tensor at a time.

    Args:
        output: a file that does not exist yet.
        factor, method, **arguments: those of `ctxext.extend_context`; static methods only.

    Returns:
        The plan of the extension.

    Raises:
        FileExistsError: `output` exists.
        FileNotFoundError: no such `source`.
        ValueError: `source` is not a GGUF file of a supported architecture; its graph takes no frequency factors and
            its metadata cannot express the method; or as `ctxext.extend_context`. No file is written on errors.
    """
    source, output = Path(source), Path(output)
    _check_new(output)
    file = _File(source)
    _check_original_known(file, arguments)
    plan = plan_extension(_config(file), factor, method, **arguments)
    assert isinstance(plan, RopePlan)
    if plan.in_attention:
        assert plan.method is not None
        frozen = "Freeze it with length=, or use" if isinstance(plan.method, RopeScaling) else "Use"
        raise ValueError(
            f"{plan.method.name} rotates inside attention, which a GGUF file cannot express. {frozen} a static method "
            "such as 'yarn'."
        )
    if file.graph.full_every == 1 and file.window is not None and file.window < plan.target_length:
        raise ValueError(
            f"{source} has a sliding window of {file.window} tokens, which llama.cpp ignores for "
            f"{file.architecture!r}: beyond it, it runs another model. Nearest: a target of {file.window} tokens."
        )
    rope, factors = _rope(
        file.architecture, plan.extended, plan.updates["rope_parameters"], plan.target_length, plan.original_length
    )
    prefix = f"{file.architecture}."
    dropped = ["GGUF.", "general.architecture", f"{prefix}rope.scal", f"{prefix}rope.freq_base_swa", MARK]
    metadata = {
        name.removeprefix(file.architecture) if name.startswith(prefix) else name: (file.value(field), *field.types)
        for name, field in file.reader.fields.items()
        if not name.startswith(tuple(dropped))
    }
    metadata |= rope | _mark(plan.updates["ctxext"], file.architecture, rope, factors, file.rotary_dim)
    names = (ROPE_FACTORS, *LONG_AND_SHORT)
    tensors = [(each.name, each.data, each.tensor_type) for each in file.reader.tensors if each.name not in names]
    _write(output, file.architecture, metadata, tensors, factors, int(file.reader.alignment))
    return plan


def _check_original_known(file: _File, arguments: dict[str, Any]) -> None:
    """Refuse existing="replace" where the original length is unknown: Llama 3.1's files hold scaled factors alone."""
    told = (".rope.scaling.original_context_length", MARK)
    known = not file.factors or any(file.get(key) is not None for key in told)
    if known or arguments.get("original_max_position_embeddings") is not None:
        return
    if arguments.get("existing", "refuse") in ("refuse", "replace"):
        raise ValueError(
            f"{file.path} is already scaled by frequency factors ({ROPE_FACTORS}) and does not hold its original "
            "length. For existing='replace', pass that as well: original_max_position_embeddings=8192 for Llama 3.1 "
            "to 3.3."
        )


def _rope(
    architecture: str, rope: RopeGeometry, parameters: dict[str, Any], length: int, original: int | None
) -> tuple[dict[str, Any], np.ndarray | None]:
    """The metadata and the frequency factors with which llama.cpp rotates by `rope`.

    Args:
        parameters: the same as `rope_parameters`, for architectures without frequency factors.
    """
    graph = ARCHITECTURES[architecture]
    said = {".context_length": length, ".rope.freq_base": rope.rope_theta, ".rope.scaling.type": "none"}
    if original is not None:
        said[".rope.scaling.original_context_length"] = original
    if graph.windowed_rope == "own":
        local, parameters = parameters["sliding_attention"], parameters["full_attention"]
        if local["rope_type"] != "default":
            raise ValueError(
                f"llama.cpp's graph for {architecture!r} scales no layers with a window, and "
                f"{local['rope_type']!r} is set for these. Nearest: scale the layers with full attention alone."
            )
        said[".rope.freq_base_swa"] = float(local["rope_theta"])
    if rope.is_plain:
        return said, None
    if graph.factors:
        said[".rope.scaling.attn_factor"] = rope.attention_factor
        return said, (inverse_frequencies(rope.dim, rope.rope_theta) / rope.inv_freq).float().numpy()
    kind = parameters["rope_type"]
    said[".rope.freq_base"] = float(parameters["rope_theta"])
    betas = (parameters.get("beta_fast", 32), parameters.get("beta_slow", 1), parameters.get("truncate", True))
    if kind == "linear" or (kind == "yarn" and betas == (32, 1, True)):
        said |= {".rope.scaling.type": kind, ".rope.scaling.factor": float(parameters["factor"])}
        ratio = rope.attention_factor / yarn_growth(parameters["factor"])
        if kind == "yarn" and graph.windowed_rope == "same":
            # It multiplies the paper's temperature, which llama.cpp always applies.
            said[".rope.scaling.attn_factor"] = ratio
        elif kind == "yarn" and not math.isclose(ratio, 1.0):
            raise ValueError(
                f"llama.cpp multiplies cos and sin by attn_factor in the windowed layers of {architecture!r} too, so "
                f"an attention factor of {rope.attention_factor:.4g} cannot be expressed. Use 'yarn' with its own, "
                "'ntk' or 'pi'."
            )
        return said, None
    if kind != "default":
        raise ValueError(
            f"llama.cpp's graph for {architecture!r} takes no frequency factors, so it cannot express {kind!r} with "
            "these options. Use 'ntk', 'pi', or 'yarn' with beta_fast=32, beta_slow=1 and truncate=True."
        )
    return said, None


def _mark(
    mark: dict[str, Any], architecture: str, rope: dict[str, Any], factors: np.ndarray | None, rotary_dim: int
) -> dict[str, Any]:
    """Our metadata, with the values that the file will be read as, so that later edits of the file invalidate it."""
    stored = {
        key: torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value
        for key, value in rope.items()
    }
    tensors = () if factors is None else (factors,) * len(ARCHITECTURES[architecture].factors)
    read = _as_rope_parameters(architecture, stored, rotary_dim, tensors)
    return {MARK: json.dumps({**mark, "fields": {"rope_parameters": read}}, sort_keys=True)}


# ------------------------------------------------------------------------------------------ converting


def write_gguf(folder: str | Path, output: str | Path, dtype: str = "F32") -> None:
    """Convert a transformers folder, with its static extension, to a GGUF file, one tensor at a time.

    Supports LLaMA, SmolLM2 and Mistral without a sliding window, with a byte-level BPE tokenizer.

    Args:
        output: a file that does not exist yet.
        dtype: of the matrices: "F32", "F16", "BF16" or "Q8_0" (F16 where a row is not a multiple of 32 numbers).

    Raises:
        FileExistsError: `output` exists.
        FileNotFoundError: no config.json or no safetensors in `folder`.
        ValueError: unsupported architecture, tokenizer or dtype, or an extension that GGUF cannot express. No file is
            written on errors.
    """
    folder, output = Path(folder), Path(output)
    _check_new(output)
    if dtype not in _FILE_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(_FILE_TYPES)}, got {dtype!r}.")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so it is not a transformers checkpoint.")
    config, name = read_config(folder), folder.resolve().name
    reason = why_not_written(config)
    if reason is not None:
        raise ValueError(f"{name} {reason}. {CONVERTER}")
    record, facts = read_record(folder), read_context(config)
    scaling = facts.scaling if record is None else record.method
    if scaling is not None and scaling.in_attention:
        raise ValueError(
            f"{name} is extended by {scaling.name} (see {RECORD} or its config). Its scale is length-dependent, "
            "which a GGUF file cannot express. Extend the original model with a static method such as 'yarn'."
        )
    rope = facts.tables[0].in_use
    metadata = {
        "general.name": name,
        "general.file_type": _FILE_TYPES[dtype],
        ".block_count": config.num_hidden_layers,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.key_length": rope.dim,
        ".attention.value_length": rope.dim,
        ".attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        ".rope.dimension_count": rope.dim,
        ".vocab_size": config.vocab_size,
        **_tokenizer(load_tokenizer(folder), config.vocab_size, folder),
    }
    said, factors = _rope(
        "llama", rope, facts.rope_parameters, max(facts.reach, facts.tables[0].limit), facts.original_length
    )
    metadata |= said
    if facts.mark is not None:
        metadata |= _mark(facts.mark, "llama", said, factors, rope.dim)
    _write(output, "llama", metadata, _weights(folder, config, dtype), factors)


def why_not_written(config: Any) -> str | None:
    """Why llama.cpp's `llama` cannot run a model of this config; None if it can."""
    if config.model_type not in ("llama", "mistral"):
        return f"has model_type {config.model_type!r}, but only 'llama' is supported"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        return f"has a sliding window of {window} tokens, which llama.cpp's 'llama' does not support"
    if config.hidden_act != "silu":
        return f"uses the activation {config.hidden_act!r}, but llama.cpp's 'llama' uses silu"
    facts = read_context(config)
    if facts.rotary_dim != facts.tables[0].head_dim or facts.tables[0].n_zero:
        return "rotates only part of each head, which llama.cpp's 'llama' does not support"
    return None


_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's llama_ftype


def _weights(folder: Path, config: Any, dtype: str) -> Iterator[Stored]:
    """The tensors of the folder under llama.cpp's names, each loaded as it is written."""
    from safetensors import safe_open

    gguf = _gguf()
    # As in transformers: other files, such as consolidated.safetensors, may hold the same weights again.
    index, files = folder / "model.safetensors.index.json", [folder / "model.safetensors"]
    if not files[0].is_file() and index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(shards))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no {file.name}. Save the model with save_pretrained first.")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key.endswith("rotary_emb.inv_freq") or (key == "lm_head.weight" and config.tie_word_embeddings):
                    continue
                name = names.get_name(key, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise ValueError(f"{folder} holds {key}, for which llama.cpp's 'llama' has no name. {CONVERTER}")
                shape = tuple(opened.get_slice(key).get_shape())
                stored = dtype if len(shape) > 1 else "F32"
                if stored == "Q8_0" and shape[-1] % 32:
                    stored = "F16"
                kind = gguf.GGMLQuantizationType[stored]
                weight = gguf.LazyNumpyTensor(
                    meta=gguf.LazyNumpyTensor.meta_with_dtype_and_shape("float32", shape),
                    args=(file, key, heads.get(name.split(".")[-2], 0)),
                    func=_weight,
                )
                yield name, gguf.quants.quantize(weight, kind), kind


def _weight(file: Path, key: str, n_heads: int) -> np.ndarray:
    """A tensor in float32; one of queries or keys (`n_heads` > 0) with its pairs where llama.cpp rotates them."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        weight = opened.get_tensor(key).float()
    if n_heads:
        # llama.cpp rotates pairs (2i, 2i + 1), transformers pairs (i, i + d/2).
        weight = weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    return cast("np.ndarray", weight.numpy())


# Pre-tokenizers, with llama.cpp's names for them and whether it ignores merges if a whole word is a token. The tests
# check each against llama.cpp.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {
    ("ByteLevel by words",): ("gpt-2", False),
    ("single digits", "ByteLevel by words"): ("smollm", False),
    (rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}", "ByteLevel"): ("llama-bpe", True),
    (rf"{_LETTERS}|\p{{N}}|{_REST}", "ByteLevel"): ("qwen2", False),
}


def _pre_tokenizer(spec: dict[str, Any] | None) -> tuple[str, ...]:
    """The steps of a `pre_tokenizer` of tokenizer.json, in the terms of `_PRE_TOKENIZERS`."""
    match spec:
        case {"type": "Sequence", "pretokenizers": steps}:
            return tuple(word for step in steps for word in _pre_tokenizer(step))
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": by_words}:
            return ("ByteLevel by words" if by_words else "ByteLevel",)
        case {"type": "Digits", "individual_digits": True}:
            return ("single digits",)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return (pattern,)
    return (json.dumps(spec),)  # which matches none of them


def _tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: Path) -> dict[str, Any]:
    """A byte-level BPE tokenizer as metadata."""
    if not tokenizer.is_fast:
        raise ValueError(f"{folder} has no fast tokenizer (tokenizer.json). {CONVERTER}")
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = _pre_tokenizer(spec["pre_tokenizer"])
    if spec["model"]["type"] != "BPE" or spec["normalizer"] is not None or steps not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{folder} has an unsupported tokenizer: {spec['model']['type']} after {', '.join(steps)}. {CONVERTER}"
        )
    pre, ignores_merges = _PRE_TOKENIZERS[steps]
    if bool(spec["model"].get("ignore_merges")) != ignores_merges:
        raise ValueError(
            f"{folder} has a tokenizer with ignore_merges={spec['model'].get('ignore_merges')}, but llama.cpp "
            f"assumes {str(ignores_merges).lower()} for its pre-tokenizer {pre!r}. {CONVERTER}"
        )
    beyond = {added["content"]: added["id"] for added in spec["added_tokens"] if added["id"] >= vocab_size}
    if beyond or len(spec["model"]["vocab"]) > vocab_size:
        raise ValueError(
            f"{folder} has more tokens than its model's vocabulary of {vocab_size} "
            f"({', '.join(beyond) or len(spec['model']['vocab'])}). {CONVERTER}"
        )
    types = _gguf().TokenType
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [int(types.UNUSED)] * vocab_size
    for token, index in spec["model"]["vocab"].items():
        tokens[index], kinds[index] = token, int(types.NORMAL)
    for added in spec["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = int(types.CONTROL if added["special"] else types.USER_DEFINED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    begin = tokenizer("").input_ids
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": ids["bos"] is not None and begin[:1] == [ids["bos"]],
        "tokenizer.ggml.add_eos_token": ids["eos"] is not None and begin[-1:] == [ids["eos"]],
        **{f"tokenizer.ggml.{names[name]}_token_id": index for name, index in ids.items() if index is not None},
    }
    return found if tokenizer.chat_template is None else {**found, "tokenizer.chat_template": tokenizer.chat_template}


# ------------------------------------------------------------------------------------------ writing


def _check_new(output: Path) -> None:
    if output.exists():
        raise FileExistsError(f"{output} already exists. Choose another file, or remove it first.")


def _write(
    output: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: Iterable[Stored],
    factors: np.ndarray | None,
    alignment: int = 32,
) -> None:
    """Write a file atomically, with one tensor in memory at a time.

    Args:
        metadata: values by key (a leading dot stands for the architecture's prefix), or a file's value and types.
        alignment: of the tensors, in bytes.
    """
    gguf = _gguf()
    writer = gguf.GGUFWriter(None, architecture)
    writer.data_alignment = alignment
    for key, value in metadata.items():
        if not isinstance(value, tuple):
            value = (value, gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value))
        content, kind, *inner = value
        writer.add_key_value(f"{architecture}{key}" if key.startswith(".") else key, content, kind, *inner[-1:])
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    for name in ARCHITECTURES[architecture].factors if factors is not None else ():
        writer.add_tensor(name, factors)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as building:
        path = Path(building) / output.name
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        path.replace(output)
