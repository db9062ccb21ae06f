"""Extend GGUF files (llama.cpp's format) without changing their weights, or write them from a folder.

If llama.cpp's graph for an architecture takes frequency factors, any λ is stored in the tensor `rope_freqs.weight`, and
the multiplier of cos and sin in `{arch}.rope.scaling.attn_factor`. Other architectures support only what the metadata
can express: a base, linear scaling, and YaRN with the paper's betas.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from ctxext.encodings.rope import RopeGeometry, inverse_frequencies
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.request import plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.hub.checkpoint import read_config
from ctxext.methods import ContextMethod, RopeScaling, geometry_in_use, longrope_parameters
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

ROPE_FACTORS = "rope_freqs.weight"
# Our own key: the extension metadata, as under `ctxext` in a config.
MARK = "ctxext.extension"
CONVERTER = "Convert it with llama.cpp's own convert_hf_to_gguf.py, then extend the file."


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp rotates in one of its architectures.

    Attributes:
        model_type: its name in transformers.
        takes_factors: whether its graph divides the frequencies by the factors in the file.
        source: where this was read.
    """

    model_type: str
    takes_factors: bool
    source: str


# Whether `ggml_rope_ext` is given `model.get_rope_factors(...)` or a null pointer.
ARCHITECTURES = {
    "llama": Architecture("llama", True, "ggml-org/llama.cpp@069be0ae src/models/llama.cpp"),
    "granite": Architecture("granite", True, "ggml-org/llama.cpp@02eabed8 src/models/granite.cpp"),
    "qwen2": Architecture("qwen2", False, "ggml-org/llama.cpp@0215468f src/models/qwen2.cpp"),
    "qwen3": Architecture("qwen3", False, "ggml-org/llama.cpp@069be0ae src/models/qwen3.cpp"),
    "qwen3moe": Architecture("qwen3_moe", False, "ggml-org/llama.cpp@069be0ae src/models/qwen3moe.cpp"),
}


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file: `load` gives an array of this shape and dtype (bytes if it is quantised)."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]

    @classmethod
    def of_float32(cls, name: str, values: Float64[Tensor, " n"]) -> _Stored:
        array = values.float().numpy()
        return cls(name, _gguf().GGMLQuantizationType.F32, array.shape, array.dtype, lambda: array)


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files are read and written by the package gguf. Install it: pip install 'ctxext[export]'"
        ) from error
    return gguf


# ------------------------------------------------------------------------------------------ reading


class _File:
    """A GGUF file: its metadata by key, and its memory-mapped tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, _reader(path)
        self.architecture = self.get("general.architecture", TEXT)
        parts = self.get("split.count", _COUNT)
        if parts is not None and parts > 1:
            raise ValueError(f"{path} is one part of {parts}. Join them: llama-gguf-split --merge.")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path} has llama.cpp's architecture {self.architecture!r}, which is not supported "
                f"(supported: {', '.join(ARCHITECTURES)}). llama.cpp's own options --rope-scaling, --rope-scale and "
                "--yarn-orig-ctx apply PI and YaRN as it runs."
            )

    def get(self, key: str, kind: Kind) -> Any:
        """The value of a key, or None; a leading dot stands for the architecture's prefix.

        Raises:
            ValueError: it is of another kind.
        """
        name = f"{self.architecture}{key}" if key.startswith(".") else key
        field = self.reader.get_field(name)
        value = None if field is None else self._value(field)
        if field is not None and not kind.holds(value):
            raise ValueError(f"{name} in {self.path} must be {kind.words}, got {shown(value)}. {_AGAIN}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """An integer of the architecture, with the bounds of `_NUMBERS`.

        Raises:
            ValueError: it has another type, or it is missing without a default.
        """
        kind = _NUMBERS[key]
        value = self.get(key, kind)
        value = default if value is None else value
        if not kind.holds(value):
            raise ValueError(f"{self.path} lacks {self.architecture}{key}, {kind.words}. {_AGAIN}")
        return cast("int", value)

    def _value(self, field: ReaderField) -> Any:
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown(field.name)} in {self.path} is not UTF-8 ({error}). {_AGAIN}") from error

    def fields(self) -> dict[str, Any]:
        """Every key with its value and types, as `_write` takes them."""
        return {
            name: (self._value(field), field.types[0], field.types[-1] if len(field.types) > 1 else None)
            for name, field in self.reader.fields.items()
            if not name.startswith("GGUF.") and name != "general.architecture"
        }

    def tensor(self, name: str) -> np.ndarray | None:
        return next((tensor.data for tensor in self.reader.tensors if tensor.name == name), None)

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
        factors, pairs = self.tensor(ROPE_FACTORS), self.rotary_dim // 2
        if factors is not None and not (factors.shape == (pairs,) and are_numbers(factors.tolist(), 1e-6, 1e6)):
            raise ValueError(f"{ROPE_FACTORS} in {self.path} must be {pairs} numbers from 1e-6 to 1e6. {_AGAIN}")
        values = {".context_length": self.number(".context_length")}
        values |= {key: self.get(key, kind) for key, kind in _ROPE.items()}
        try:
            return _as_rope_parameters(
                values, self.rotary_dim, None if factors is None else torch.from_numpy(factors.copy()).double()
            )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error


_AGAIN = "Fetch or convert it again."
_COUNT = Kind(f"a whole number from 0 to {MAX_COUNT}", partial(is_count, low=0, high=MAX_COUNT))
_SIZE = Kind(f"a whole number from 1 to {MAX_SIZE}", is_count)
_NUMBERS = {
    ".block_count": _COUNT,
    ".context_length": TOKENS,
    ".rope.dimension_count": Kind(
        f"an even number from 4 to {MAX_ROTARY}", lambda value: is_count(value, 4, MAX_ROTARY) and value % 2 == 0
    ),
    **dict.fromkeys(
        (".embedding_length", ".attention.head_count", ".attention.head_count_kv", ".attention.key_length"), _SIZE
    ),
}


def _or_zero(kind: Kind) -> Kind:
    """As `kind`, or 0, which llama.cpp treats as a missing key."""
    return Kind(f"{kind.words}, or 0", lambda value: is_number(value, 0, 0) or kind.holds(value))


_ROPE = {
    ".rope.freq_base": ROPE_FIELDS["rope_theta"],
    ".rope.scaling.type": TEXT,
    ".rope.scaling.original_context_length": _or_zero(TOKENS),
    ".rope.scaling.attn_factor": _or_zero(ROPE_FIELDS["attention_factor"]),
    **dict.fromkeys((".rope.scale_linear", ".rope.scaling.factor"), _or_zero(FACTOR)),
}


def _reader(path: Path) -> GGUFReader:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Pass the path of a GGUF file.")
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
        raise ValueError(f"{path} is not a complete GGUF file ({one_line(error)}). {_AGAIN}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} is of the other byte order. Convert it with the gguf package's gguf-convert-endian.")
    return cast("GGUFReader", reader)


def _as_rope_parameters(
    values: dict[str, Any], rotary_dim: int, factors: Float64[Tensor, " pair"] | None
) -> dict[str, Any]:
    """The metadata's RoPE (`_KEYS` and the context's length) as `rope_parameters`, read as llama.cpp reads it.

    `llama_model::load_hparams` and the constructor of `llama_context`, ggml-org/llama.cpp.
    """
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
    elif kind not in ("linear", "none"):
        raise ValueError(
            f"the file's scaling {kind!r} has two tables, and llama.cpp picks one by the size of the context. "
            "Extend the folder that it was converted from."
        )
    if factors is None and attention_factor == 1.0:
        return parameters
    plain = RopeGeometry.plain(rotary_dim, parameters["rope_theta"], original)
    rope = geometry_in_use(parameters, rotary_dim, length)
    rescale = plain.inv_freq / rope.inv_freq * (1.0 if factors is None else factors)
    return longrope_parameters(rescale, rope.attention_factor * attention_factor, max(1.0, length / original), plain)


def context_of_gguf(path: str | Path) -> PreTrainedConfig:
    """The context of a GGUF file as a transformers config, for `describe_context` and `extend_config`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a GGUF file, or its architecture is unsupported.
    """
    return _config(_File(Path(path)))


def _config(file: _File) -> PreTrainedConfig:
    from transformers import AutoConfig

    parameters = file.rope_parameters
    if file.rotary_dim != file.head_dim:
        parameters["partial_rotary_factor"] = file.rotary_dim / file.head_dim
    embedding = file.tensor("token_embd.weight")
    tokens = file.get("tokenizer.ggml.tokens", Kind("a list of strings", are_words)) or ()
    values = {
        "hidden_size": file.number(".embedding_length"),
        "num_hidden_layers": file.number(".block_count"),
        "num_attention_heads": file.heads,
        "num_key_value_heads": file.number(".attention.head_count_kv", file.heads),
        "head_dim": file.head_dim,
        "vocab_size": len(tokens) if embedding is None else embedding.shape[0],
        "max_position_embeddings": file.number(".context_length"),
        "rope_parameters": parameters,
    }
    try:
        config = AutoConfig.for_model(ARCHITECTURES[file.architecture].model_type, **values)
        check_config(config)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"{file.path} says what no model is: {one_line(error)}. {_AGAIN}") from error
    mark = file.get(MARK, TEXT)
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
    metadata = {
        name.removeprefix(file.architecture) if name.startswith(f"{file.architecture}.") else name: field
        for name, field in file.fields().items()
        if not name.startswith((f"{file.architecture}.rope.scal", MARK))
    }
    tensors = [
        _Stored(tensor.name, tensor.tensor_type, tensor.data.shape, tensor.data.dtype, partial(getattr, tensor, "data"))
        for tensor in file.reader.tensors
        if tensor.name != ROPE_FACTORS
    ]
    rope, factors = _rope(
        file.architecture, plan.extended, plan.updates["rope_parameters"], plan.target_length, plan.original_length
    )
    metadata |= rope | _mark(plan.updates["ctxext"], rope, factors, file.rotary_dim)
    tensors += factors
    _write(output, file.architecture, metadata, tensors, int(file.reader.alignment))
    return plan


def _check_original_known(file: _File, arguments: dict[str, Any]) -> None:
    """Refuse existing="replace" if the original length is unknown: some files, as Llama 3.1's, hold only scaled
    factors."""
    original = ".rope.scaling.original_context_length"
    known = file.tensor(ROPE_FACTORS) is None or any(
        file.get(key, kind) is not None for key, kind in ((original, _ROPE[original]), (MARK, TEXT))
    )
    if known or arguments.get("original_max_position_embeddings") is not None:
        return
    if arguments.get("existing", "refuse") in ("refuse", "replace"):
        raise ValueError(
            f"{file.path} is scaled already, by frequency factors ({ROPE_FACTORS}), and does not say from which "
            "length. existing='replace' starts again from it, once you say it: original_max_position_embeddings=8192 "
            "for Llama 3.1 to 3.3."
        )


def _rope(
    architecture: str, rope: RopeGeometry, parameters: dict[str, Any], length: int, original: int | None
) -> tuple[dict[str, Any], list[_Stored]]:
    """The metadata and the tensor with which llama.cpp rotates by `rope`.

    Args:
        parameters: the same as `rope_parameters`, for architectures without frequency factors.
    """
    said: dict[str, Any] = {
        ".context_length": length,
        ".rope.freq_base": rope.rope_theta,
        ".rope.scaling.type": "none",
    }
    if original is not None:
        said[".rope.scaling.original_context_length"] = original
    if rope.is_plain:
        return said, []
    if ARCHITECTURES[architecture].takes_factors:
        factors = inverse_frequencies(rope.dim, rope.rope_theta) / rope.inv_freq
        scaling = {".rope.scaling.attn_factor": rope.attention_factor}
        return said | scaling, [_Stored.of_float32(ROPE_FACTORS, factors)]
    kind = parameters["rope_type"]
    said[".rope.freq_base"] = float(parameters["rope_theta"])
    if kind == "linear":
        return said | {".rope.scaling.type": kind, ".rope.scaling.factor": float(parameters["factor"])}, []
    betas = (parameters.get("beta_fast", 32), parameters.get("beta_slow", 1), parameters.get("truncate", True))
    if kind == "yarn" and betas == (32, 1, True):
        # It multiplies the paper's temperature, which llama.cpp always applies.
        beside = rope.attention_factor / (0.1 * math.log(parameters["factor"]) + 1)
        scaling = {".rope.scaling.factor": float(parameters["factor"]), ".rope.scaling.attn_factor": beside}
        return said | {".rope.scaling.type": kind} | scaling, []
    if kind != "default":
        raise ValueError(
            f"llama.cpp's graph for {architecture!r} takes no frequency factors "
            f"({ARCHITECTURES[architecture].source}), so {kind!r} with these options cannot be said there. Use 'ntk', "
            "'pi', or 'yarn' or 'ntk_by_parts' with beta_fast=32, beta_slow=1 and truncate=True."
        )
    return said, []


def _mark(mark: dict[str, Any], rope: dict[str, Any], factors: list[_Stored], rotary_dim: int) -> dict[str, Any]:
    """Our metadata, with the values that the file will be read as, so that later edits of the file invalidate it."""
    stored = {key: _float32(value) if isinstance(value, float) else value for key, value in rope.items()}
    read = _as_rope_parameters(
        stored, rotary_dim, torch.from_numpy(factors[0].load().copy()).double() if factors else None
    )
    return {MARK: json.dumps({**mark, "fields": {"rope_parameters": read}}, sort_keys=True)}


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


# ------------------------------------------------------------------------------------------ converting


def write_gguf(folder: str | Path, output: str | Path, dtype: str = "F32") -> None:
    """Convert a transformers folder of the LLaMA architecture, with its static extension, to a GGUF file.

    Supports LLaMA, SmolLM2 and Mistral without a sliding window, with a byte-level BPE tokenizer. Weights are read one
    tensor at a time.

    Args:
        output: a file that does not exist yet.
        dtype: of the matrices: "F32", "F16", "BF16" or "Q8_0" (F16 where a row is not a multiple of 32 numbers).

    Raises:
        FileExistsError: `output` exists.
        FileNotFoundError: no config.json or no safetensors in `folder`.
        ValueError: unsupported architecture, tokenizer or dtype, or an extension that GGUF cannot express. No file is
            written on errors.
    """
    from transformers import AutoTokenizer

    folder, output = Path(folder), Path(output)
    _check_new(output)
    if dtype not in _FILE_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(_FILE_TYPES)}, got {dtype!r}.")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so it is not a transformers checkpoint.")
    config = read_config(folder)
    rope = _rope_of_folder(folder, config)
    metadata = {
        "general.name": folder.resolve().name,
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
        **_tokenizer(AutoTokenizer.from_pretrained(folder), config.vocab_size, folder),
    }
    facts = read_context(config)
    said, factors = _rope(
        "llama", rope, facts.rope_parameters, max(facts.reach, facts.tables[0].limit), facts.original_length
    )
    metadata |= said
    if facts.mark is not None:
        metadata |= _mark(facts.mark, said, factors, rope.dim)
    _write(output, "llama", metadata, [*_weights(folder, config, dtype), *factors])


def why_not_written(config: Any) -> str | None:
    """Why llama.cpp's `llama` cannot run a model of this config; None if it can."""
    if config.model_type not in ("llama", "mistral"):
        return f"is of model_type {config.model_type!r}, and 'llama' is written here"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        return f"slides over {window} tokens, which llama.cpp's 'llama' does not do"
    if config.hidden_act != "silu":
        return f"has the activation {config.hidden_act!r}; llama.cpp's 'llama' has silu"
    facts = read_context(config)
    if facts.rotary_dim != facts.tables[0].head_dim or facts.tables[0].n_zero:
        return "turns a part of each head, which llama.cpp's 'llama' does not do"
    return None


def _rope_of_folder(folder: Path, config: Any) -> RopeGeometry:
    """The frequencies in use; raises unless llama.cpp's `llama` supports the folder's architecture and extension."""
    name = folder.resolve().name
    reason = why_not_written(config)
    if reason is not None:
        raise ValueError(f"{name} {reason}. {CONVERTER}")
    record = read_record(folder)
    facts = read_context(config)
    scaling = facts.scaling if record is None else record.method
    if scaling is not None and scaling.in_attention:
        raise ValueError(
            f"{name} is extended by {scaling.name} ({RECORD} or its config says so). Its scale changes with "
            "the length, which a GGUF file cannot express. Extend the original by a static method such as 'yarn'."
        )
    return facts.tables[0].in_use


_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # llama.cpp's llama_ftype


def _weights(folder: Path, config: Any, dtype: str) -> Iterator[_Stored]:
    """The tensors of the folder under llama.cpp's names, loaded lazily."""
    from safetensors import safe_open

    gguf = _gguf()

    # As transformers does: other files, such as consolidated.safetensors, may hold the same weights again.
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
                yield _as_stored(name, kind, shape, file, key, heads.get(name.split(".")[-2], 0))


def _as_stored(
    name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], file: Path, key: str, n_heads: int
) -> _Stored:
    import numpy as np
    from safetensors import safe_open

    gguf = _gguf()

    def load() -> np.ndarray:
        with safe_open(file, framework="pt") as opened:
            weight = opened.get_tensor(key).float()
        if n_heads:
            # llama.cpp rotates pairs (2i, 2i + 1), transformers pairs (i, i + d/2).
            weight = weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        return cast("np.ndarray", gguf.quants.quantize(weight.numpy(), kind))

    if kind.name in ("F32", "F16"):
        return _Stored(name, kind, shape, np.dtype("float32" if kind.name == "F32" else "float16"), load)
    return _Stored(name, kind, gguf.quants.quant_shape_to_byte_shape(shape, kind), np.dtype("uint8"), load)


# Pre-tokenizers and llama.cpp's names for them. The tests check each against llama.cpp.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {
    ("ByteLevel by words",): "gpt-2",
    ("single digits", "ByteLevel by words"): "smollm",
    (rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}", "ByteLevel"): "llama-bpe",
    (rf"{_LETTERS}|\p{{N}}|{_REST}", "ByteLevel"): "qwen2",
}

# Pre-tokenizers for which llama.cpp ignores merges if a whole word is a token.
_WHOLE_WORDS = ("llama-bpe",)


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
    if bool(spec["model"].get("ignore_merges")) != (_PRE_TOKENIZERS[steps] in _WHOLE_WORDS):
        raise ValueError(
            f"{folder} has a tokenizer with ignore_merges={spec['model'].get('ignore_merges')}, which llama.cpp takes "
            f"for {'false' if spec['model'].get('ignore_merges') else 'true'} under its name "
            f"{_PRE_TOKENIZERS[steps]!r}. {CONVERTER}"
        )
    beyond = {added["content"]: added["id"] for added in spec["added_tokens"] if added["id"] >= vocab_size}
    if beyond or len(spec["model"]["vocab"]) > vocab_size:
        raise ValueError(
            f"{folder} has more tokens than the {vocab_size} of its model's vocabulary "
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
        "tokenizer.ggml.pre": _PRE_TOKENIZERS[steps],
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
        raise FileExistsError(f"{output} exists already. Choose another file, or remove it first.")


def _write(
    output: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: list[_Stored],
    alignment: int = 32,
) -> None:
    """Write a file atomically, with one tensor in memory at a time.

    Args:
        metadata: values by key (a leading dot stands for the architecture's prefix), or tuples as from `fields`.
        alignment: of the tensors, in bytes.
    """
    gguf = _gguf()
    with _written_whole(output) as building:
        writer = gguf.GGUFWriter(building, architecture)
        writer.data_alignment = alignment
        for key, value in metadata.items():
            if not isinstance(value, tuple):
                kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
                value = (value, kind, None)
            content, kind, inner = value
            writer.add_key_value(f"{architecture}{key}" if key.startswith(".") else key, content, kind, inner)
        for tensor in tensors:
            n_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            writer.add_tensor_info(tensor.name, tensor.shape, tensor.dtype, n_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.load())
        writer.close()


@contextmanager
def _written_whole(output: Path) -> Iterator[Path]:
    """A temporary file that is renamed to `output` at the end of the block; on errors nothing is left."""
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    os.close(handle)
    try:
        yield Path(name)
        Path(name).chmod(0o644)
        os.replace(name, output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
