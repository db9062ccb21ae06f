"""Refuse a trainer that would compare or generate with the unextended model.

TRL loads the reference model of DPO and of GRPO by the name of the trained one, and so does vLLM, which generates for
GRPO. An extension that is only in memory is not there. So the first extension in a process wraps `Trainer.train`, of
which every trainer of transformers and TRL is made. For models that ctxext did not extend, it behaves as before.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any

from ctxext.core.apply import extension_of, transformers_model
from ctxext.core.plan import Plan
from ctxext.models.text_config import text_config_of


@functools.cache
def watch_trainers() -> None:
    """Wrap transformers' `Trainer.train`, once per process."""
    if importlib.util.find_spec("accelerate") is None:
        return
    from transformers import Trainer

    train = Trainer.train

    @functools.wraps(train)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_trainer(self)
        return train(self, *args, **kwargs)

    Trainer.train = checked  # type: ignore[method-assign]


def check_trainer(trainer: Any) -> None:
    """Check that whatever `trainer` loaded beside an extended model has the same extension.

    Raises:
        ValueError: the reference model, or the checkpoint that vLLM generates from, is not extended in the same way.
    """
    extension, reference = extension_of(trainer.model), getattr(trainer, "ref_model", None)
    if extension is None:
        return
    plan, model, trains = extension.plan, transformers_model(trainer.model), type(trainer).__name__
    if reference is not None and not _has(plan, reference):
        raise ValueError(
            f"the reference model of {trains} is not extended by {plan.summary}, as the trained one is: TRL loads it "
            f"from {model.name_or_path}. Pass ref_model=, extended in the same way."
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
        return other.plan.summary == plan.summary
    return _says(plan, transformers_model(model).config)


def _says(plan: Plan, config: Any) -> bool:
    """Whether the config expresses `plan`."""
    text = text_config_of(config)
    return plan.why_not_portable is None and all(getattr(text, k, None) == v for k, v in plan.updates.items())
