"""The model `ctxext` of lm-eval: its own `hf`, extended after the weights are loaded."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers.utils import cached_file

from ctxext import __version__
from ctxext.api import extend_context
from ctxext.core.apply import extension_of
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.rope import RopePlan
from ctxext.hub.checkpoint import check_not_extended
from ctxext.methods import list_methods, method_class
from ctxext.utils.values import suggest

if TYPE_CHECKING:
    from lm_eval.api.model import CacheHook

# The arguments of `extend_context` besides the model and the options of the method.
ARGUMENTS = [name for name in inspect.signature(extend_context).parameters if name not in ("model", "options")]
UNEXTENDED = "none"


@register_model("ctxext")
class ExtendedHFLM(HFLM):
    """`--model ctxext --model_args pretrained=PATH,method=yarn,factor=4,beta_fast=16`

    The arguments are those of `hf`, those of `ctxext.extend_context`, and the options of the method. Without any of
    the latter two, the model is extended by its `context_extension.json`, if there is one; with method=none it is plain
    `hf`. With `accelerate launch` every process loads and extends its own copy and takes a share of the documents, on
    CPUs too.

    Args:
        max_length: tokens at which prompts are cut from the left; default: the extended length.

    Raises:
        ValueError: a method, option or argument is unknown, `pretrained` is not a path or name, or
            `extend_context` refuses.
    """

    def __init__(self, pretrained: str | os.PathLike[str], **arguments: Any) -> None:
        if not isinstance(pretrained, (str, os.PathLike)):
            raise ValueError(
                f"pretrained must be a folder or a name on the hub, got a {type(pretrained).__name__}. For a model "
                "in memory, call extend_context(model) and pass lm-eval's own HFLM(pretrained=model)."
            )
        method = None  # the default of the model's position encoding
        if "method" in arguments:
            method = UNEXTENDED if arguments["method"] is None else str(arguments["method"])  # lm-eval reads None
        known = _extension_arguments(method)
        extension = {name: arguments.pop(name) for name in known if name in arguments}
        if method == UNEXTENDED and len(extension) > 1:
            others = ", ".join(name for name in extension if name != "method")
            raise ValueError(
                f"method=none does not extend the model, so {others} would have no effect. Drop one or the other."
            )
        folder, record = _folder_of(os.fspath(pretrained), arguments), None
        if folder is not None and not extension:
            record = read_record(folder)
        elif folder is not None and method != UNEXTENDED:
            check_not_extended(folder, extension.get("existing", "refuse"))
        try:
            super().__init__(os.fspath(pretrained), **arguments)
        except TypeError as error:
            # HFLM passes unknown arguments to transformers, whose model refuses them.
            for name in arguments:
                if f"unexpected keyword argument '{name}'" in str(error):
                    raise ValueError(f"unknown model argument {name!r}{suggest(name, known)}") from error
            raise
        if folder is not None and record is not None:
            record.check_weights(folder)
            extension = record.arguments_for(self.model.config)
        if extension and method != UNEXTENDED:
            extend_context(self.model, **extension)
            done = extension_of(self.model)
            assert done is not None
            self._max_length: int = self._max_length or done.plan.target_length
            # With truncation=True the tokenizer would cut at the length it was saved with.
            self.tokenizer.model_max_length = self._max_length
        if hasattr(self, "accelerator"):
            # HFLM sets these only if it sees several GPUs. Otherwise (CPUs, one visible GPU per process) each process
            # would do all the work.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes

    def get_model_info(self) -> dict[str, Any]:
        """The "config" in lm-eval's results; `context_extension` is None if not extended."""
        return {**super().get_model_info(), "max_length": self.max_length, "context_extension": self._describe()}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Called with the database of --use_cache, whose keys are the prompts alone.

        Raises ValueError if it holds the answers of another model or extension.
        """
        if cache_hook.dbdict is not None:
            mine = json.dumps([self.pretrained, self.revision, self.max_length, self._describe()], sort_keys=True)
            theirs = cache_hook.dbdict.get("ctxext", None if len(cache_hook.dbdict) else mine)
            if theirs != mine:
                raise ValueError(
                    f"the cache holds the answers of another model: {theirs}, not {mine}. "
                    "Use a separate --use_cache path for every model and extension."
                )
            cache_hook.dbdict["ctxext"] = mine
        super().set_cache_hook(cache_hook)

    def _describe(self) -> dict[str, Any] | None:
        receipt = extension_of(self.model)
        if receipt is None:
            return None
        plan = receipt.plan
        return {
            "summary": plan.summary,
            "existing": plan.existing,
            "factor": plan.factor,
            "original_max_position_embeddings": plan.start,
            "max_position_embeddings": plan.target_length,
            **({"attention_factor": receipt.attention_factor} if isinstance(plan, RopePlan) else {}),
            "method": receipt.method and receipt.method.to_dict(),
            **plan.updates.get("ctxext", {"version": __version__}),
        }


def _folder_of(pretrained: str, arguments: dict[str, Any]) -> Path | None:
    """The folder, or that of the hub's cache, of the model's metadata or config.json; None if not found."""
    where = {name: arguments[name] for name in ("revision", "subfolder") if arguments.get(name)}
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    paths = [cached_file(pretrained, name, **where, **quietly) for name in (RECORD, "config.json")]
    return next((Path(path).parent for path in paths if path is not None), None)


def _extension_arguments(method: str | None) -> list[str]:
    """The names of all arguments for extending by `method` (None: by any)."""
    classes = list_methods() if method is None else [] if method == UNEXTENDED else [method_class(method)]
    return list(dict.fromkeys([*ARGUMENTS, *(field.name for cls in classes for field in fields(cls))]))
