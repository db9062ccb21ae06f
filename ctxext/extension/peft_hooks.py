"""Save an extended model's metadata with its adapters, whoever saves them.

PEFT's files do not describe the base model's positions, and trainers create and save the `PeftModel` themselves. So the
first extension in a process wraps `PeftModel.save_pretrained`, `PeftModel.load_adapter` and transformers'
`model.load_adapter`. For models that ctxext did not extend, they behave as before.

The adapter's `base_model_name_or_path` then names the extension, so that loading the base by that name fails instead of
loading it unextended (AutoPeftModel, AutoModel.from_pretrained(adapter)). `PeftModel.from_pretrained(base, adapter)`
does not read it, and is refused while these wrappers are active.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctxext.core.apply import Extension, extended_model, extension_of
from ctxext.extension.metadata_file import (
    ADAPTER_CONFIG,
    RECORD,
    adapter_record,
    base_named,
    carry_extension,
    plain_name,
    trained_under,
)


@functools.cache
def watch_peft() -> None:
    """Wrap PEFT's two methods and transformers' `load_adapter`, once per process."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft import PeftModel
    from transformers.integrations.peft import PeftAdapterMixin

    PeftModel.save_pretrained = _carrying(PeftModel.save_pretrained)  # type: ignore[method-assign]
    PeftModel.load_adapter = _checking(PeftModel.load_adapter)  # type: ignore[method-assign]
    PeftAdapterMixin.load_adapter = _checking_first(PeftAdapterMixin.load_adapter)  # type: ignore[method-assign]


def _carrying(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        saved = save(*args, **kwargs)
        bound = inspect.signature(save).bind(*args, **kwargs)
        bound.apply_defaults()
        model, folder = bound.arguments["self"], Path(bound.arguments["save_directory"])
        if bound.arguments["is_main_process"]:
            names = bound.arguments["selected_adapters"] or list(model.peft_config)
            carry_extension(extended_model(model), [folder if name == "default" else folder / name for name in names])
        return saved

    return save_pretrained


def _checking(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(model_id, kwargs.get("subfolder") or "", ADAPTER_CONFIG)
        known = self.peft_config.get(adapter_name)
        if path.is_file():
            _check_files(extension_of(self), path.parent)
        elif known is not None:
            _check_trained_under(extension_of(self), known.base_model_name_or_path, model_id)
        loaded = load(self, model_id, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        if known is None and not path.is_file():  # already downloaded by PEFT
            try:
                _check_trained_under(extension_of(self), config.base_model_name_or_path, model_id)
            except ValueError:
                self.delete_adapter(adapter_name)
                raise
        # PEFT looks up the base's vocabulary by this name while saving.
        config.base_model_name_or_path = plain_name(config.base_model_name_or_path)
        return loaded

    return load_adapter


def _checking_first(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_adapter(self: Any, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = Path(peft_model_id or "", ADAPTER_CONFIG)
        if peft_model_id is not None and path.is_file():
            _check_files(extension_of(self), path.parent)
        return load(self, peft_model_id, *args, **kwargs)

    return load_adapter


def _check_files(extension: Extension | None, folder: Path) -> None:
    """Raise ValueError if the adapter in `folder` was trained with another extension, or its files disagree."""
    if (folder / RECORD).is_file():
        adapter_record(folder)
    _check_trained_under(extension, base_named(folder / ADAPTER_CONFIG), folder)


def _check_trained_under(extension: Extension | None, named: str | None, adapter: Any) -> None:
    """Raise ValueError unless an adapter with this base name was trained with `extension`."""
    trained, summary = trained_under(named), None if extension is None else extension.plan.summary
    if trained not in (None, summary):
        raise ValueError(
            f"{adapter} was trained with {trained}, but this model is "
            f"{'not extended' if summary is None else f'extended by {summary}'}. Load it with "
            f"ctxext.load({str(adapter)!r}), or extend the model in the same way first."
        )
