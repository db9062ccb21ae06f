"""Adapters of extended models: saved, loaded and merged with the extension they were trained with.

PEFT's adapter_config.json does not store RoPE parameters, so an adapter loaded on the unextended base is silently a
different model. The fine-tuning recipe trains on an extended base folder (`ctxext.hub.checkpoint.extend_folder`), which
`base_model_name_or_path` names, and `ctxext.json` beside the adapter holds what is needed to recreate its config.
Adapters of a live extended model have `context_extension.json` (`ctxext.extension.peft_hooks`).
"""

from __future__ import annotations

import copy
import html
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ctxext import __version__
from ctxext.core.apply import extension_of
from ctxext.extension.adapter_config import (
    ADAPTER_CONFIG,
    WARNING,
    adapter_record,
    base_named,
    located,
    name_base,
    origin,
    plain_name,
    portable,
    short_name,
    summary_in,
)
from ctxext.extension.adapter_config import BASE as RECORD
from ctxext.extension.metadata_file import RECORD as EXTENSION
from ctxext.extension.metadata_file import Record, read_record, weights_fingerprint, weights_unlike
from ctxext.extension.peft_hooks import watch_peft
from ctxext.extension.request import model_on_meta
from ctxext.extension.saving import save_portable
from ctxext.hub.checkpoint import (
    check_not_extended,
    check_weights,
    checkpoint_folder,
    config_in_use,
    extended_as_saved,
    inside,
    load_model,
    load_tokenizer,
    local_folder,
    planned_as_saved,
    read_config,
    saved_extension,
    written_whole,
)
from ctxext.methods import with_options
from ctxext.models.context import read_context
from ctxext.models.metadata import check_mark
from ctxext.models.rope_tables import rope_tables
from ctxext.models.text_config import text_config_of
from ctxext.patches.rotary import RotaryProof, table_errors
from ctxext.utils.extras import require
from ctxext.utils.json_files import OBJECT, TEXT, TOKENS, JsonObject, or_none, read_json, write_json
from ctxext.utils.values import finite

if TYPE_CHECKING:
    require("train")
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "adapter_model.safetensors"

# Measured figures by row and column: {"baseline": {"perplexity, positions 513–1,024": "74.30"}, …}.
Figures = Mapping[str, Mapping[str, float | str | None]]

# The text config fields that an extension sets (`Plan.updates`), by transformers' common names (for GPT-2's n_positions
# too).
EXTENDED_KEYS = (
    "rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "head_dim", "ctxext",
)  # fmt: skip

# The largest difference between a merged model's logits and its adapter's: RMS, in standard deviations of the logits.
# Merging reorders float32 sums (4e-7 on the bundled model, 2e-6 on random ones) and rounds weights once to the written
# dtype (3e-4 and 2e-3 there, up to 3e-3 and 2e-2). LoRA merged into both uses of a tied embedding is off by >= 1e-2.
LOGIT_BARS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


# ------------------------------------------------------------------------------------- the record


@dataclass(frozen=True, kw_only=True)
class AdapterBase:
    """The base of an adapter: the content of `ctxext.json` beside it.

    Attributes:
        base: the original model, a hub name (with its `revision`) or an absolute path.
        extended: the absolute path of the extended base used in training. In the file, paths are relative to its folder
            if they lie beside it.
        fingerprint: the `weights_fingerprint` of the base; the extension does not change it.
        config: the text config fields set by the extension: rope_parameters, max_position_embeddings and related ones.
        provenance: free-form JSON of the recipe (settings, data, tokens, figures).
        version: the ctxext version that wrote it.
    """

    base: str
    revision: str | None = None
    extended: str
    fingerprint: str
    config: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    version: str = __version__

    @classmethod
    def of(
        cls,
        extended: Path | str,
        base: Path | str,
        revision: str | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> AdapterBase:
        """From the extended folder, and the hub name or folder of the original model.

        Raises:
            ValueError: its weights are not safetensors, or it has no extension and no maximum length.
        """
        folder = Path(extended).resolve()
        text_config = text_config_of(config_in_use(folder))
        own_names = {key: text_config.attribute_map.get(key, key) for key in EXTENDED_KEYS}
        config = {key: getattr(text_config, own) for key, own in own_names.items() if own in text_config.__dict__}
        if not config.keys() & {"max_position_embeddings", "ctxext"}:
            raise ValueError(
                f"{folder / 'config.json'} has no maximum length and no extension. Extend the model, or save the "
                "adapter with PEFT: model.save_pretrained."
            )
        name, revision = origin(base, revision)
        return cls(
            base=name,
            revision=revision,
            extended=str(folder),
            fingerprint=weights_fingerprint(folder),
            config=config,
            provenance=provenance or {},
        )

    @property
    def name(self) -> str:
        """The original model's hub name, or its folder's name."""
        return short_name(self.base)

    @property
    def method(self) -> dict[str, Any] | None:
        """The method's name and options (`RopeScaling.to_dict`), or None."""
        return self.config.get("ctxext", {}).get("method")

    @property
    def rope_parameters(self) -> dict[str, Any] | None:
        """The extended base's `rope_parameters`; None for a model without RoPE, whose extension is in its weights."""
        return self.config.get("rope_parameters")

    @property
    def max_position_embeddings(self) -> int:
        """The extended model's maximum length in tokens."""
        if "max_position_embeddings" not in self.config:  # T5
            return int(self.config["ctxext"]["target"])
        return int(self.config["max_position_embeddings"])

    @property
    def original_max_position_embeddings(self) -> int:
        """The base's trained length in tokens before any scaling, or the start length if that is unknown."""
        mark = self.config.get("ctxext")
        return int(mark["original"]["length"] or mark["start"]) if mark else self.max_position_embeddings

    def agrees(self, config: PreTrainedConfig) -> bool:
        """Whether `config` has this extension."""
        text_config = config.get_text_config(decoder=True)
        names = self.config.keys() & {"rope_parameters", "max_position_embeddings"}
        fields = {name: self.config[name] for name in names} or self.config.get("ctxext", {}).get("fields", {})
        return all(getattr(text_config, name, None) == value for name, value in fields.items())

    @classmethod
    def of_folder(cls, folder: Path) -> AdapterBase:
        """From `ctxext.json` in `folder`.

        Raises:
            ValueError: a field is malformed; the error names it.
        """
        base = cls._of_json(read_json(folder / RECORD))
        return replace(base, base=located(base.base, folder), extended=located(base.extended, folder))

    @classmethod
    def _of_json(cls, read: JsonObject) -> AdapterBase:
        read.check_names({f.name for f in fields(cls)})
        config, of_config = read.get("config", OBJECT), read.part("config")
        read.check(config.keys() <= {*EXTENDED_KEYS}, f"config may only have the fields {', '.join(EXTENDED_KEYS)}")
        if config.keys() & {"max_position_embeddings", "rope_parameters"} or "ctxext" not in config:
            of_config.get("max_position_embeddings", TOKENS)
        for name in config.keys() & {"original_max_position_embeddings", "head_dim"}:
            of_config.get(name, or_none(TOKENS))
        if "rope_parameters" in config:
            of_config.get("rope_parameters", OBJECT)
        if "ctxext" in config:
            check_mark(config["ctxext"], read.file, "config.ctxext")
        return cls(
            **{name: read.get(name, TEXT) for name in ("base", "extended", "fingerprint", "version")},
            revision=read.get("revision", or_none(TEXT)),
            config=config,
            provenance=read.get("provenance", OBJECT),
        )


# ----------------------------------------------------------------------------------------- saving


def check_all_saved(model: nn.Module) -> None:
    """Check that everything trained would be saved: PEFT silently omits parameters unfrozen by `requires_grad_`.

    Raises:
        ValueError: parameters would be lost; the error names them.
    """
    require("train")
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        return
    # Under all names, as a tied parameter may be saved under any; whole or sharded, as only identity counts.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = {id(value) for value in get_peft_model_state_dict(model, state_dict=parameters).values()}
    lost = [name for name, value in model.named_parameters() if value.requires_grad and id(value) not in saved]
    if lost:
        modules = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in lost})
        raise ValueError(
            f"{len(lost)} trained parameters would not be saved with the adapter: {', '.join(lost[:3])}"
            f"{' …' if lost[3:] else ''}. Name their modules in modules_to_save={modules!r} of the PEFT config instead "
            "of unfreezing them."
        )


def save_trained(
    model: PreTrainedModel | PeftModel,
    folder: Path,
    base: AdapterBase,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Save an adapter or a fully trained model, with `ctxext.json`, a model card and the tokenizer.

    An adapter names its base and extension as in `ctxext.extension.adapter_config`: `ctxext.load` finds the base, and
    plain PEFT fails instead of loading it unextended. An existing `folder` is replaced once the new one is complete.

    Args:
        state_dict: the gathered trained tensors by name, if an engine shards them.

    Raises:
        ValueError: as `check_all_saved`. On any error an existing `folder` is unchanged.
    """
    require("train")
    from peft import PeftModel

    check_all_saved(model)
    if state_dict is not None:
        state_dict = _under_all_names(model, state_dict)
    extension = extension_of(model)
    is_portable = extension is None or extension.plan.is_portable
    with written_whole(folder) as building:
        if isinstance(model, PeftModel):
            model.save_pretrained(str(building), state_dict=state_dict)
            if extension is None and "ctxext" in base.config:
                name = portable(base.extended if Path(base.base).is_absolute() else base.base, building)
                name_base(building, name, base.revision, summary_in(base.config["ctxext"]))
        elif is_portable:
            save_portable(model, building, state_dict=state_dict)
        else:
            model.save_pretrained(building, state_dict=state_dict)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, building, base.max_position_embeddings)
        write_record(building, base)


def _under_all_names(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """PEFT looks up a tied parameter under each of its names; a gathered state has only one."""
    names = dict(model.named_parameters(remove_duplicate=False))
    tensors = {id(names[name]): tensor for name, tensor in state_dict.items() if name in names}
    return {**state_dict, **{name: tensors[id(value)] for name, value in names.items() if id(value) in tensors}}


def write_record(folder: Path, base: AdapterBase, figures: Figures | None = None) -> None:
    """Write `ctxext.json` and the model card into the folder of an adapter or a model.

    Args:
        figures: kept as `provenance["figures"]` for a merged model's card.
    """
    if figures is not None:
        base = replace(base, provenance={**base.provenance, "figures": figures})
    paths = {"base": portable(base.base, folder), "extended": portable(base.extended, folder)}
    write_json(folder / RECORD, finite({**asdict(base), **paths}))
    write_model_card(folder, base, base.provenance.get("figures"))


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, length: int) -> None:
    """A tokenizer with the old length would silently truncate texts."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = max(tokenizer.model_max_length, length)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------- loading


def load(
    name_or_path: Path | str, *, is_trainable: bool = False, revision: str | None = None, **from_pretrained: Any
) -> PreTrainedModel | PeftModel:
    """Load a model, extended as it was saved, from a folder or the hub; for an adapter, its base with the adapter.

    For an extension alone (`ctxext.publish.push`), the model that its card names, extended.

    An adapter's base is searched for where the adapter says, then in a folder `base` in, beside or above the adapter;
    then the original base is extended. Its weights must be those used in training, and its rotary embedding must match
    `ctxext.json`.

    Args:
        is_trainable: keeps the adapter's parameters trainable.
        **from_pretrained: arguments of `from_pretrained` for the base or the plain model: dtype, device_map, …

    Returns:
        The model, in eval mode. `model.context_extension` is set where `context_extension.json` holds the extension;
        `describe_context(model)` describes an extension that its config holds.

    Raises:
        TypeError: `name_or_path` is neither a string nor a path.
        FileNotFoundError: no base was found (the error lists the places), or `name_or_path` holds no model.
        ValueError: the base has other weights; or a ctxext file is malformed, or belongs to another model or adapter.
        RuntimeError: the loaded model's frequencies differ from `ctxext.json`.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise TypeError(f"expected a folder or a hub name, got {type(name_or_path).__name__}.")
    folder = _folder(name_or_path, revision)
    if _is_adapter(folder):
        return _load_adapter(_found(folder), is_trainable, **from_pretrained)
    if (folder / "config.json").is_file():
        base, extension = folder, saved_extension(folder)
    else:
        extension, base = read_record(folder), checkpoint_folder(_base_of(folder))
        check_not_extended(base)
    model = load_model(base, **from_pretrained)
    return extended_as_saved(model, extension)


def _folder(name_or_path: Path | str, revision: str | None) -> Path:
    """The folder of an adapter, a model or an extension, downloaded if given by hub name."""
    folder, name = local_folder(str(name_or_path), revision), str(name_or_path)
    if not _is_adapter(folder) and not any((folder / file).is_file() for file in ("config.json", EXTENSION)):
        raise FileNotFoundError(
            f"{name!r} is neither an adapter (adapter_config.json and {WEIGHTS}) nor a model (config.json) nor an "
            f"extension ({EXTENSION}). {inside(folder) or 'Check the path.'}"
        )
    return folder


def _base_of(folder: Path) -> str:
    """The model that an extension alone was made for, from its card."""
    from huggingface_hub.repocard import metadata_load

    card = folder / "README.md"
    base = (metadata_load(card) or {}).get("base_model") if card.is_file() else None
    if not isinstance(base, str):
        raise ValueError(
            f"{folder} holds only an extension ({EXTENSION}), and no README.md names its model (base_model). "
            "Download that model and put the file beside its config.json to extend it."
        )
    return base


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and (folder / WEIGHTS).is_file()


@dataclass(frozen=True)
class _Found:
    """An adapter, its base and the config to load that with; `extension` is applied afterwards."""

    folder: Path
    base: Path
    config: PreTrainedConfig
    record: AdapterBase | None = None
    extension: Record | None = None


def _found(folder: Path) -> _Found:
    named = plain_name(base_named(folder / ADAPTER_CONFIG))
    if (folder / RECORD).is_file() and not (folder / EXTENSION).is_file():
        record = AdapterBase.of_folder(folder)
        place = None if named is None else Path(located(named, folder))
        return _Found(folder, *_base_by_record(folder, record, place), record=record)
    extension = adapter_record(folder)
    if extension is not None:
        return _Found(folder, *_base_by_name(folder, extension), extension=extension)
    if named is None:
        raise ValueError(
            f"{folder / ADAPTER_CONFIG} names no base model (base_model_name_or_path), and there is no {RECORD} "
            "beside it. Add the base model's folder or name."
        )
    base = checkpoint_folder(named)
    config = read_config(base)
    if read_record(base) is None:
        _warn_if_plain(folder, config)
    return _Found(folder, base, config)


def served_base(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The base of the adapter in `folder`, and the arguments of `extend_context` that extend it; {} if it is extended.

    Raises:
        FileNotFoundError, ValueError: the base is not found, or was changed, or is only found unextended.
    """
    found = _found(folder)
    if found.extension is not None:
        return found.base, found.extension.arguments_for(found.config)
    if found.record is not None and not found.record.agrees(read_config(found.base)):
        raise ValueError(
            f"the extended base that {folder} was trained on is gone; {found.base} is the original model. Extend it "
            "again into a folder 'base' beside the adapter, or merge the adapter: ctxext merge."
        )
    return found.base, {}


def _places(folder: Path) -> tuple[Path, ...]:
    """The places searched for a base besides the one that the adapter names."""
    here = folder.resolve()
    return tuple(place / "base" for place in (here, *here.parents[:2]))


def _base_by_name(folder: Path, extension: Record) -> tuple[Path, PreTrainedConfig]:
    """The base of an adapter of a live extended model."""
    name = extension.model.name
    if name is None:
        raise ValueError(
            f"{extension.where} names no base model, because it was not loaded from a folder or the hub. Save the base "
            "model, and write its folder as model.name in that file."
        )
    name = located(name, folder)
    for place in (Path(name), *_places(folder)):
        if (place / "config.json").is_file():
            break
    else:
        place = checkpoint_folder(name, None if Path(name).is_absolute() else extension.model.revision)
    config = read_config(place)
    planned_as_saved(config, extension)
    extension.check_weights(place)
    return place, config


def _base_by_record(folder: Path, record: AdapterBase, named: Path | None) -> tuple[Path, PreTrainedConfig]:
    """The base of an adapter trained on an extended folder."""
    places = [Path(record.extended), *_places(folder)]
    if named is not None:
        places.insert(0, named)
    tried, changed = [], False
    for place in dict.fromkeys(places):
        if not (place / "config.json").is_file():
            tried.append(f"{place}: no model there")
            continue
        config = read_config(place)
        if not record.agrees(config):
            tried.append(f"{place}: its extension differs from {RECORD}")
        elif not any(place.glob("*.safetensors")):
            tried.append(f"{place}: no safetensors")
        elif unlike := weights_unlike(place, record.fingerprint):
            tried.append(f"{place}: {unlike}")
            changed = True
        else:
            return place, config
    try:
        place = checkpoint_folder(record.base, record.revision)
    except FileNotFoundError as error:
        tried.append(f"{record.base}: {error}")
    else:
        if record.rope_parameters is None:
            tried.append(f"{record.base}: the original model, which is not extended")
        elif unlike := weights_unlike(place, record.fingerprint):
            tried.append(f"{record.base}: {unlike}")
            changed = True
        else:
            config = read_config(place)
            config.get_text_config(decoder=True).update(copy.deepcopy(record.config))
            _check_buildable(config, record, folder)
            return place, config
    raise (ValueError if changed else FileNotFoundError)(
        f"the base that {folder} was trained on was {'changed' if changed else 'not found'}. Searched:\n  "
        + "\n  ".join(tried)
        + f"\nPut the extended base (fingerprint {record.fingerprint}) in a folder 'base' beside the adapter. To load "
        "it in another dtype, pass dtype=."
    )


def _warn_if_plain(folder: Path, config: PreTrainedConfig) -> None:
    try:
        facts = read_context(config)
    except ValueError:
        return
    if not facts.is_scaled:
        warnings.warn(
            f"{folder} has no {RECORD}, and its base is not extended (plain RoPE, {facts.trained_length} tokens). "
            "If it was trained on an extended base, extend that first and load the adapter on it with PEFT.",
            stacklevel=4,
        )


def _check_buildable(config: PreTrainedConfig, record: AdapterBase, folder: Path) -> None:
    """Raise ValueError unless a model can be built from the config of the `record` in `folder`."""
    try:
        model_on_meta(config)
        if record.rope_parameters is not None:
            for table in rope_tables(config.get_text_config(decoder=True), record.rope_parameters):
                table.in_use  # noqa: B018, reading it computes it
    except Exception as error:  # rotary embeddings raise many exception types
        raise ValueError(
            f"config in {folder / RECORD} builds no model ({type(error).__name__}: {error}). Restore it, or save the "
            "adapter again."
        ) from error


def _load_adapter(found: _Found, is_trainable: bool = False, **from_pretrained: Any) -> PeftModel:
    require("train")
    from peft import PeftModel

    watch_peft()
    check_weights(found.folder, "adapter_model.safetensors")
    of_base = saved_extension(found.base)
    model = load_model(found.base, config=found.config, **from_pretrained)
    if found.record is not None:
        _check_live(model, found.record)
    model = extended_as_saved(model, of_base)
    extension, done = found.extension, extension_of(model)
    if done is None:
        extended_as_saved(model, extension)
    elif extension is not None and (done.plan.summary, done.method) != (extension.summary, extension.method):
        raise ValueError(
            f"{found.folder} was trained with {extension.summary}, {with_options(extension.method)}, but its base "
            f"{found.base} is extended by {done.plan.summary}, {with_options(done.method)}. Put the base model used in "
            "training in a folder 'base' beside the adapter."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf".*{WARNING}")  # so it was
        return PeftModel.from_pretrained(model, found.folder, is_trainable=is_trainable).eval()


def _check_live(model: PreTrainedModel, record: AdapterBase) -> None:
    """Raise RuntimeError unless the loaded rotary embedding agrees with the formula of the recorded parameters."""
    if record.rope_parameters is None:
        return  # position tables are weights, which the fingerprint covers
    text_config = model.config.get_text_config(decoder=True)
    for path, error in table_errors(model, text_config, record.rope_parameters):
        if error > RotaryProof.FREQUENCY_BAR:
            raise RuntimeError(
                f"the frequencies of {path!r} differ from {RECORD} (relative error {error:.1e}): "
                "this version of transformers reads the config differently. Use the version used in training."
            )


# ---------------------------------------------------------------------------------------- merging


def merge(folder: Path | str, output: Path | str, dtype: torch.dtype | str | None = None) -> Path:
    """Merge an adapter and its base into one checkpoint, without PEFT.

    Plain transformers loads it extended; if config.json cannot express the extension, only `ctxext.load` does.

    Merges in float32 (4 bytes per parameter in memory) and rounds once to `dtype`. Before the folder is moved into
    place, it is loaded and its logits are compared with the adapter's.

    Args:
        folder: an adapter, here or on the hub.
        output: a new folder.
        dtype: dtype of the written weights; None for the base's.

    Raises:
        FileExistsError: `output` exists.
        ValueError: no adapter; its base is quantised; or a trained part cannot be merged, such as LoRA on an embedding
            tied to the head.
        RuntimeError: the written model's logits are not the adapter's.
        Those of `load`. On any error nothing is left behind.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} already exists. Choose another folder, or remove it first.")
    adapter = _folder(folder, None)
    if not _is_adapter(adapter):
        raise ValueError(f"{folder} is a model, not an adapter, so there is nothing to merge. Use it as it is.")
    found = _found(adapter)
    base, config, record = found.base, found.config, found.record
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{base} is stored quantised, and merging into quantised weights loses precision. Use the adapter "
            "unmerged, or train on the unquantised checkpoint (it may be quantised on loading) and merge that."
        )
    dtype = _dtype(dtype or config.dtype or torch.float32)
    model = _load_adapter(found, dtype=torch.float32)
    _refuse_tied_targets(model)
    expected = _probe(model)
    merged = model.merge_and_unload(safe_merge=True)
    _compare(_probe(merged), expected, torch.float32, "merging")
    with written_whole(output) as building:
        extension = extension_of(merged)
        save = partial(save_portable, merged) if extension is None else merged.save_pretrained
        if extension is not None:
            reach = extension.plan.target_length
        else:  # BLOOM's and T5's configs have no length
            reach = getattr(merged.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
        merged.to(dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*config\.json was saved without it")  # names `building`
            save(building)
        for place in (adapter, base):
            if (place / "tokenizer_config.json").is_file():
                _save_tokenizer(load_tokenizer(place), building, reach)
                break
        if record is not None:  # measurements of the adapter are those of this model
            merged_from = {"merged_from": weights_fingerprint(adapter)}
            write_record(building, replace(record, provenance={**record.provenance, **merged_from}))
        del model, merged
        # In float32, so that only the rounding of the weights differs, not that of activations.
        written: Any = load(building, dtype=torch.float32)
        if record is not None:
            _check_live(written, record)
        _compare(_probe(written), expected, dtype, f"writing it in {str(dtype).removeprefix('torch.')}")
    return output


def changed_adapter(merged: Path) -> Path | None:
    """The adapter beside a merged model, as a fine-tune leaves them, if it has other weights than were merged."""
    adapter = merged.with_name("adapter")
    if not (_is_adapter(adapter) and (merged / RECORD).is_file()):
        return None
    try:
        known = AdapterBase.of_folder(merged).provenance.get("merged_from")
        return None if known in (None, weights_fingerprint(adapter)) else adapter
    except ValueError:  # the record is damaged
        return adapter


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in LOGIT_BARS:
        names = ", ".join(str(known).removeprefix("torch.") for known in LOGIT_BARS)
        raise ValueError(f"dtype must be one of {names}, got {dtype!r}.")
    return dtype


def _refuse_tied_targets(model: PeftModel) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    base: Any = model.get_base_model()
    if not base.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    names = [name for name, module in base.named_modules() if module in ends and isinstance(module, BaseTunerLayer)]
    if names:
        raise ValueError(
            f"{', '.join(names)} is tied (embedding and head share one matrix), and LoRA was trained on one side only: "
            "merging would change the other side too. Train it in modules_to_save with ensure_weight_tying=True, or "
            "use this adapter unmerged."
        )


@torch.no_grad()
def _probe(model: Any) -> Tensor:
    """The logits of 64 tokens spread over the vocabulary, float32 of shape (token, vocabulary)."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(64, device=model.device)[None] * 7919 % vocabulary
    decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **decoded).logits[0].float()


def _compare(logits: Tensor, expected: Tensor, dtype: torch.dtype, step: str) -> None:
    error = float((logits - expected).square().mean().sqrt() / expected.std())
    if not error <= LOGIT_BARS[dtype]:  # NaN too
        raise RuntimeError(
            f"{step} changed the model: its logits are off by {error:.1e} of their standard deviation, more than "
            f"the {LOGIT_BARS[dtype]:g} that rounding explains. Use the adapter unmerged."
        )


# ----------------------------------------------------------------------------------- the model card


def write_model_card(folder: Path, base: AdapterBase, figures: Figures | None = None) -> Path:
    """Write README.md into the folder of an adapter or a merged model; missing figures are empty cells."""
    local = Path(base.base).is_absolute()  # a local folder: private, and nothing to load from
    figures, hidden = figures or {}, ("figures", "merged_from")
    text = render_card(
        "model_card.md",
        adapter=_is_adapter(folder),
        base=base,
        local=local,
        path=f"path/to/{base.name}" if local else base.base,
        provenance=without_folders({key: value for key, value in base.provenance.items() if key not in hidden}),
        figures=figures,
        columns=list(dict.fromkeys(column for row in figures.values() for column in row)),
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def render_card(template: str, **values: Any) -> str:
    """Render a template of `ctxext/hub/cards`."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(cell=_cell, json=lambda value: json.dumps(value, indent=2, ensure_ascii=False))
    text = files("ctxext.hub").joinpath("cards", template).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)


def without_folders(value: Any) -> Any:
    """JSON for a card: of each absolute path, and each from the home folder, only the last part."""
    if isinstance(value, dict):
        return {key: without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each) for each in value]
    is_path = isinstance(value, str) and (Path(value).is_absolute() or value.startswith("~"))
    return Path(value).name if is_path else value


def _cell(value: Any) -> str:
    """A value as text that is safe in tables and Markdown."""
    if value is None:
        return ""
    if isinstance(value, float):
        value = f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return html.escape(" ".join(str(value).split()), quote=False).replace("\\", "\\\\").replace("|", "\\|")
