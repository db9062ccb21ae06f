"""Refuse a trainer that would compare or generate with the unextended model.

TRL loads the reference model of DPO and of GRPO by the name of the trained one, and so does vLLM, which generates for
GRPO. An extension that is only in memory is not there. So the first extension in a process wraps `Trainer.train` and
`Trainer.evaluate`, of which every trainer of transformers and TRL is made. For models that ctxext did not extend, they
behave as before.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

from ctxext.core.apply import extension_of, transformers_model
from ctxext.core.plan import Plan
from ctxext.models.text_config import text_config_of


@functools.cache
def watch_trainers() -> None:
    """Wrap transformers' `Trainer`, once per process."""
    if importlib.util.find_spec("accelerate") is None:
        return
    try:
        from transformers import Trainer
    except ImportError:  # of a package that it needs: then nobody trains with it
        return
    trainer: Any = Trainer
    trainer.train, trainer.evaluate = _checked(Trainer.train), _checked(Trainer.evaluate)
    trainer._load_from_checkpoint = _resuming(Trainer._load_from_checkpoint)


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_trainer(self)
        return method(self, *args, **kwargs)

    return checked


def _resuming(load: Callable[..., Any]) -> Callable[..., Any]:
    """To log its version, transformers reads the config of a checkpoint into the base class, which lacks the maximum
    length that the keys for transformers 4 ask it for."""
    from transformers import PreTrainedConfig

    @functools.wraps(load)
    def resuming(*args: Any, **kwargs: Any) -> Any:
        base: Any = PreTrainedConfig
        base.max_position_embeddings = None
        try:
            return load(*args, **kwargs)
        finally:
            del base.max_position_embeddings

    return resuming


def check_trainer(trainer: Any) -> None:
    """Check that whatever `trainer` loaded beside an extended model has the same extension.

    Raises:
        ValueError: the reference or teacher model, or the checkpoint that vLLM generates from, is not extended in the
            same way.
    """
    extension = extension_of(trainer.model)
    if extension is None:
        return
    plan, model, trains = extension.plan, transformers_model(trainer.model), type(trainer).__name__
    for role, attribute in (("reference", "ref_model"), ("teacher", "teacher_model")):
        other = getattr(trainer, attribute, None)
        if other is not None and not _has(plan, other):
            raise ValueError(
                f"the {role} model of {trains} is not extended as the trained one, by {plan.summary}. TRL loads it by "
                f"name, unless you pass it. Pass {attribute}=, extended in the same way, or train a saved folder."
            )
    served = str(model.name_or_path)
    if getattr(trainer.args, "use_vllm", False) and not _says(plan, type(model.config).from_pretrained(served)):
        raise ValueError(
            f"vLLM would generate for {trains} from {served}, which is not extended by {plan.summary}. Save the "
            "extended model with save_pretrained, and train that folder."
        )
    kept = getattr(trainer.args, "max_length", None)
    if kept is not None and kept <= plan.start < plan.target_length:
        warnings.warn(
            f"{trains} cuts every example at max_length={kept} tokens, and the model was trained at {plan.start} "
            f"already: no longer distance is trained. Pass max_length={plan.target_length}.",
            stacklevel=3,
        )


def _has(plan: Plan, model: Any) -> bool:
    """Whether `model` is extended by `plan`, in memory or by its config."""
    other = extension_of(model)
    if other is not None:
        return other.plan.method == plan.method and _fields(other.plan) == _fields(plan)
    return _says(plan, transformers_model(model).config)


def _says(plan: Plan, config: Any) -> bool:
    """Whether the config expresses `plan`."""
    text = text_config_of(config)
    return plan.why_not_portable is None and all(getattr(text, k, None) == v for k, v in _fields(plan).items())


def _fields(plan: Plan) -> dict[str, Any]:
    """What it sets in the config; ctxext's own metadata alone where there is nothing else."""
    return {name: value for name, value in plan.updates.items() if name != "ctxext"} or plan.updates
