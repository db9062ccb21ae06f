"""Save an extended model's metadata with its adapters, whoever saves them.

PEFT's files do not describe the base model's positions, and trainers create and save the `PeftModel` themselves. So the
first extension in a process, or the first adapter that ctxext loads, wraps `PeftModel.save_pretrained`,
`PeftModel.load_adapter` and transformers' `model.load_adapter`. Other models' adapters are saved and loaded as before.

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

from ctxext.core.apply import extended_model, extension_of, transformers_model
from ctxext.extension.adapter_config import (
    ADAPTER_CONFIG,
    adapter_record,
    base_named,
    carry_extension,
    extension_in,
    located,
    method_in,
    plain_name,
    trained_under,
)
from ctxext.extension.metadata_file import RECORD
from ctxext.methods import ContextMethod, with_options
from ctxext.models.text_config import text_config_of
from ctxext.utils.four_bits import hold_warnings


@functools.cache
def watch_peft() -> None:
    """Wrap PEFT's two methods and transformers' `load_adapter`, once per process."""
    if importlib.util.find_spec("peft") is None:
        return
    hold_warnings()
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
            _check_files(self, path.parent)
        elif known is not None:
            _check_trained_under(self, known.base_model_name_or_path, model_id)
        loaded = load(self, model_id, adapter_name, *args, **kwargs)
        config = self.peft_config[adapter_name]
        if known is None and not path.is_file():  # already downloaded by PEFT
            try:
                _check_trained_under(self, config.base_model_name_or_path, model_id)
            except ValueError:
                self.delete_adapter(adapter_name)
                raise
        config.base_model_name_or_path = _base_to_save(self, config.base_model_name_or_path, path.parent)
        return loaded

    return load_adapter


def _checking_first(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_adapter(self: Any, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = Path(peft_model_id or "", ADAPTER_CONFIG)
        if peft_model_id is not None and path.is_file():
            _check_files(self, path.parent)
        return load(self, peft_model_id, *args, **kwargs)

    return load_adapter


def _summary(model: Any) -> str | None:
    """The extension of a model that ctxext extended, or that plain transformers loaded extended."""
    extension = extension_of(model)
    if extension is not None:
        return extension.plan.summary
    return extension_in(text_config_of(transformers_model(model).config))


def _method(model: Any) -> ContextMethod | None:
    """The method of the extension that `_summary` describes."""
    extension = extension_of(model)
    return method_in(text_config_of(transformers_model(model).config)) if extension is None else extension.method


def _base_to_save(model: Any, named: str | None, adapter: Path) -> str | None:
    """The base that PEFT is to name if it saves the adapter again; while saving, it looks up the vocabulary there."""
    from transformers import AutoConfig

    if extension_of(model) is not None or trained_under(named) is None:
        name = plain_name(named)
        return name and located(name, adapter)
    base = transformers_model(model).name_or_path
    if base and Path(base).is_dir() and extension_in(text_config_of(AutoConfig.from_pretrained(base))) is not None:
        return base
    return named  # only its config in memory is extended


def _check_files(model: Any, folder: Path) -> None:
    """Raise ValueError if the adapter in `folder` was trained with another extension, or its files disagree."""
    record = adapter_record(folder) if (folder / RECORD).is_file() else None
    _check_trained_under(model, base_named(folder / ADAPTER_CONFIG), folder)
    method = _method(model)
    if record is not None and record.method != method:
        raise ValueError(
            f"{folder} was trained with {with_options(record.method)}, but this model is extended by "
            f"{with_options(method)}. Extend it with the same options first."
        )


def _check_trained_under(model: Any, named: str | None, adapter: Any) -> None:
    """Raise ValueError unless an adapter with this base name was trained with the extension of `model`."""
    trained = trained_under(named)
    if trained is not None and trained != (summary := _summary(model)):
        raise ValueError(
            f"{adapter} was trained with {trained}, but this model is "
            f"{'not extended' if summary is None else f'extended by {summary}'}. Load it with "
            f"ctxext.load({str(adapter)!r}), or extend the model in the same way first."
        )
