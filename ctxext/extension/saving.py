"""Save an extended model: with a config.json that plain transformers loads, or with `context_extension.json`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.core.apply import ATTRIBUTE, Extension, apply, restore
from ctxext.core.plan import Plan
from ctxext.extension.adapter_config import carry_extension
from ctxext.extension.metadata_file import weights_fingerprint, write_record
from ctxext.extension.method_file import PROBE
from ctxext.extension.request import plan_extension
from ctxext.models.families import family_of
from ctxext.models.metadata import RECORD
from ctxext.models.text_config import text_config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def saver(plan: Plan) -> Callable[..., Any]:
    """The `save_pretrained` of a model extended by `plan`."""
    return save_portable if plan.is_portable else save_with_record


def version_4_keys(text_config: Any, rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor` and `rope_scaling` as transformers 4 and older engines read them.

    Without them transformers 4.57 silently loads a version 5 config as plain RoPE with theta 10000. Version 4 has no
    common keys for parameters per layer type.
    """
    if "rope_type" not in rope_parameters:
        return {}
    names = ("rope_theta", "partial_rotary_factor")
    keys: dict[str, Any] = {name: rope_parameters[name] for name in names if name in rope_parameters}
    for name, older in family_of(text_config).version_4_names.items():
        keys[older] = rope_parameters[name]
    scaled_by_default = (type(text_config)().rope_parameters or {}).get("rope_type", "default") != "default"
    more = rope_parameters.keys() - {"rope_type", *keys}  # e.g. mrope_section
    if rope_parameters["rope_type"] != "default" or scaled_by_default or more:
        # Version 5 reads `rope_scaling` instead of `rope_parameters`, so it must hold the same keys.
        keys["rope_scaling"] = copy.deepcopy(rope_parameters)
    return keys


def save_portable(model: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.save_pretrained` with a config.json that transformers 5 and 4 both read.

    The keys of version 4 are in the config only while it is written: if kept, they would go stale and override later
    edits of `rope_parameters`.
    """
    if "length" in kwargs:
        raise ValueError(
            f"length={kwargs['length']} freezes a dynamic method on saving, but this model is already static. "
            "Leave it out."
        )
    text_config = text_config_of(model.config)
    rope_parameters = getattr(text_config, "rope_parameters", None)
    keys = version_4_keys(text_config, rope_parameters) if rope_parameters else {}
    with _holding(text_config, keys):
        saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        _follow_up(model, Path(save_directory))
    return saved


@contextmanager
def _holding(config: Any, fields: dict[str, Any], instead_of: Iterable[str] = ()) -> Iterator[None]:
    """Let a config hold `fields`, and none of the other names in `instead_of`, within a `with` block."""
    held = config.__dict__
    before = {name: held.pop(name) for name in dict.fromkeys((*fields, *instead_of)) if name in held}
    held.update(fields)
    try:
        yield
    finally:
        for name in fields:
            held.pop(name, None)
        held.update(before)


def _follow_up(model: PreTrainedModel, folder: Path) -> bool:
    """Remove the metadata of a model saved in `folder` earlier. Returns whether only an adapter was saved now."""
    for name in (RECORD, PROBE):
        (folder / name).unlink(missing_ok=True)
    is_adapter = bool(getattr(model, "_hf_peft_config_loaded", False))  # by `model.add_adapter`
    if is_adapter:
        carry_extension(model if ATTRIBUTE in model.__dict__ else None, [folder])
    return is_adapter


def save_with_record(
    model: PreTrainedModel, save_directory: Any, *args: Any, length: int | None = None, **kwargs: Any
) -> Any:
    """`model.save_pretrained` for an extension that config.json cannot express.

    Writes the original config, so that plain transformers loads the unextended model; an entry in it names the
    extension, and `ctxext.load` reads `context_extension.json`.

    Args:
        length: for dynamic methods: write a plain checkpoint instead, frozen at the scale of this many tokens, its
            maximum length.

    Raises:
        ValueError: `length` for a method without a static form.
    """
    extension: Extension = model.__dict__[ATTRIBUTE]
    plan = extension.plan
    folder, main = Path(save_directory), kwargs.get("is_main_process", True)
    push = kwargs.pop("push_to_hub", False)
    if push and length is None and main:
        # transformers would upload before the metadata is written; `model.push_to_hub` calls this function.
        names = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
        hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        repo_id = kwargs.pop("repo_id", folder.name)
        save_with_record(model, save_directory, *args, **kwargs)
        return model.push_to_hub(repo_id, **hub, **{k: v for k, v in kwargs.items() if k == "max_shard_size"})
    if length is not None:
        return _save_frozen(model, extension, length, save_directory, *args, push_to_hub=push, **kwargs)
    pair = extension.text_configs(model)
    original = {name: value for name, value in pair.original.__dict__.items() if name in plan.updates}
    with _holding(pair.extended, original, instead_of=plan.updates):
        saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if not main or _follow_up(model, folder):
        return saved
    write_record(folder, plan, weights=weights_fingerprint(folder))
    warnings.warn(
        f"{plan.summary} cannot be expressed in config.json because {plan.why_not_portable}: "
        f"config.json was saved without it, and the extension is in {RECORD}. Reload with "
        f"ctxext.load({str(save_directory)!r}); plain transformers and other engines load the model without it.",
        stacklevel=2,
    )
    return saved


def _save_frozen(
    model: PreTrainedModel, extension: Extension, length: int, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    plan = extension.plan
    frozen = plan_extension(
        extension.original_config,
        method=plan.method,
        original_max_position_embeddings=plan.original_length,
        existing=plan.existing,
        length=length,
    )
    restore(model, extension)
    try:
        frozen_extension = apply(model, frozen)
        try:
            return save_portable(model, save_directory, *args, **kwargs)
        finally:
            restore(model, frozen_extension)
    finally:
        apply(model, plan, saver(plan))
