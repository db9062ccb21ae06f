"""`context_extension.json`: an extension's metadata, and the model it belongs to.

It is stored beside a model whose config cannot express its extension, beside an adapter trained on an extended model,
or alone on the hub. It is applied to no other model than the one it names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from ctxext import __version__
from ctxext.core.plan import Plan
from ctxext.methods import ContextMethod, method_from_dict
from ctxext.models.metadata import BESIDE, EXISTING, RECORD, Existing, still_says
from ctxext.models.text_config import text_config_of
from ctxext.utils.json_files import (
    FACTOR,
    OBJECT,
    TEXT,
    TOKENS,
    JsonObject,
    or_none,
    read_json,
    write_json,
)
from ctxext.utils.values import reached, shown

OTHER_WEIGHTS = "other weights"


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model that an extension belongs to.

    Attributes:
        name: a hub name, an absolute path, or one from the adapter's folder (../base); None for the folder that holds
            the metadata, or the base model of its card.
        revision: the commit, for a hub name.
        model_type: that of its text config.
        config: the original values of the text config's fields that the extension changes.
        weights: their `weights_fingerprint`; None if the model is known by name only.
    """

    name: str | None
    revision: str | None
    model_type: str
    config: dict[str, Any]
    weights: str | None

    @classmethod
    def of_json(cls, read: JsonObject) -> BaseModel:
        read.check_names({"name", "revision", "model_type", "config", "weights"})
        return cls(
            **{name: read.get(name, or_none(TEXT)) for name in ("name", "revision", "weights")},
            model_type=read.get("model_type", TEXT),
            config=read.get("config", OBJECT),
        )


_KINDS = {
    "version": TEXT,
    "summary": TEXT,
    "factor": FACTOR,
    "existing": EXISTING,
    "original_max_position_embeddings": or_none(TOKENS),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of `context_extension.json`, which is the file `where`.

    Attributes:
        summary: the plan in one line.
        method: None if the current scaling was kept.
        factor: target length / start length.
        original_max_position_embeddings: the trained length before any scaling, in tokens; None if unknown, which only
            existing scaling that is kept or composed with allows.
    """

    where: str
    version: str
    summary: str
    method: ContextMethod | None
    factor: float
    existing: Existing
    original_max_position_embeddings: int | None
    model: BaseModel

    @classmethod
    def of_json(cls, read: JsonObject) -> Record:
        """Raises ValueError, naming the field, if one is malformed."""
        read.check_names({*_KINDS, "method", "model"})
        values = {name: read.get(name, kind) for name, kind in _KINDS.items()}
        kept = values["existing"] == "keep" and read.content["method"] is None
        method = None if kept else method_from_dict(read.content["method"], read.file)
        original = values["original_max_position_embeddings"]
        if original is None:  # as `Plan.to_dict` writes it for a linear scaling, whose config names no such length
            unneeded = values["existing"] in ("keep", "compose")
            read.check(unneeded, f"original_max_position_embeddings must be {TOKENS.words}")
        else:
            target = reached(values["factor"], original)
            read.check(TOKENS.holds(target), f"factor × original_max_position_embeddings must be {TOKENS.words}")
        return cls(where=read.file, method=method, model=BaseModel.of_json(read.part("model")), **values)

    def arguments_for(self, config: Any) -> dict[str, Any]:
        """The arguments of `extend_context` that repeat this extension. Raises ValueError for another config."""
        for name, then in {"model_type": self.model.model_type, **self.model.config}.items():
            now = json.loads(json.dumps(getattr(text_config_of(config), name, None)))
            if not still_says(now, then):
                raise ValueError(
                    f"{self.where} belongs to a model with {name} {shown(then)}, but this one has {shown(now)}. "
                    f"Extend this model again, or delete {RECORD} to load it unextended."
                )
        arguments: dict[str, Any] = {
            "existing": self.existing,
            "original_max_position_embeddings": self.original_max_position_embeddings,
        }
        return {**arguments, **({"factor": self.factor} if self.method is None else {"method": self.method})}

    def check_weights(self, folder: Path) -> None:
        """Raise ValueError unless the extension belongs to the weights in `folder`."""
        unlike = None if self.model.weights is None else weights_unlike(folder, self.model.weights)
        if unlike == OTHER_WEIGHTS:
            raise ValueError(
                f"{self.where} does not belong to the weights in {folder}: another model has been saved there since. "
                f"Extend this model again, or delete {RECORD} to load it unextended."
            )
        if unlike is not None:
            raise ValueError(
                f"{self.where} belongs to a model of another dtype: {folder} has {unlike}. Restore the original files "
                "and pass dtype= to ctxext.load, or extend this model again."
            )


def write_record(folder: Path, plan: Plan, **base: str | None) -> None:
    """Write the metadata of `plan` into `folder`; `base` has name, revision and weights of `BaseModel`, as known."""
    config = plan.text_config
    held = {name: getattr(config, name, None) for name in plan.updates if name != "ctxext"}
    known = {"name": None, "revision": None, "model_type": config.model_type, "config": held, "weights": None, **base}
    write_json(folder / RECORD, {"version": __version__, "summary": plan.summary, **plan.to_dict(), "model": known})


def read_record(folder: Path) -> Record | None:
    """The metadata in `folder`, or None.

    Raises:
        ValueError: it is malformed, names an unregistered method, or does not belong to the config.json beside it
            (another model was saved there since).
    """
    path, config = folder / RECORD, folder / "config.json"
    beside = read_json(config).content.get(BESIDE) if config.is_file() else None
    if not path.is_file():
        if beside is not None:
            raise ValueError(
                f"{config} says that the model is extended by {RECORD}, which is missing ({shown(beside)}). Copy that "
                "file too, or save the extended model with model.save_pretrained (config.save_pretrained does not "
                f"write it). To load the model unextended, delete the entries {BESIDE!r} and 'ctxext'."
            )
        return None
    record = Record.of_json(read_json(path))
    if config.is_file() and beside != record.summary:
        raise ValueError(
            f"{path} ({record.summary}) does not belong to the config.json beside it: another model has been "
            f"saved there since. Delete {RECORD} to load that model, or extend it again."
        )
    return record


def weights_fingerprint(folder: Path) -> str:
    """A fingerprint of a checkpoint's safetensors, followed by their dtypes.

    Of each tensor's name, shape, type and up to 32 of its values; independent of sharding. Reads only the disk pages
    that hold those values.

    Raises:
        ValueError: there are no safetensors; pickled weights are not loaded.
    """
    from safetensors import safe_open

    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():  # other files, such as consolidated.safetensors, do not belong to the model
        paths = [folder / str(name) for name in {*read_json(index).part("weight_map").content.values()}]
    else:
        paths = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no safetensors. Load the model and call save_pretrained, which writes them.")
    lines, dtypes = [], set()
    for path in paths:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is not a dict
                tensor = tensors.get_tensor(name)
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
                flat = tensor.reshape(-1)
                values = flat[:: max(1, flat.numel() // 32)][:32].contiguous()
                about = f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode()
                lines.append(about + values.view(torch.uint8).numpy().tobytes())
    digest = blake2b(digest_size=8)
    for line in sorted(lines):
        digest.update(line)
    return f"{digest.hexdigest()} {'+'.join(sorted(dtypes))}"


def weights_unlike(folder: Path, fingerprint: str) -> str | None:
    """How the weights in `folder` differ from those of `fingerprint`, in words; None if they are the same."""
    now = weights_fingerprint(folder)
    dtypes, dtypes_then = now.partition(" ")[2], fingerprint.partition(" ")[2]
    if now == fingerprint:
        return None
    return OTHER_WEIGHTS if dtypes == dtypes_then else f"{dtypes} weights instead of {dtypes_then}"
