"""The contract of a position encoding: finding it in a model, and planning its extension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ctxext import __version__
from ctxext.core.patch import Patch
from ctxext.core.plan import ENCODINGS, Plan, Request, chosen_method, factor_and_target
from ctxext.methods import ContextMethod, method_class
from ctxext.models.metadata import Lengths, by_own_names, live_mark
from ctxext.models.text_config import text_config_of
from ctxext.utils.values import check_rows


class Encoding(ABC):
    """The position encoding of one model."""

    name: ClassVar[str]  # as in `ContextMethod.encoding`
    default_method: ClassVar[str]

    @abstractmethod
    def plan(self, config: Any, request: Request) -> Plan:
        """Plan the request for the model of `config`. Raises the errors of `ctxext.extend_context`."""


@dataclass(frozen=True)
class ModuleEncoding(Encoding):
    """An encoding found in a model's modules. (RoPE alone is found in the config.)

    Attributes:
        paths: the modules that hold it.
        trained_length: tokens, with `source` saying where that number comes from.
        limit: tokens past which the stock model fails; None where no limit exists.
    """

    # As in `Plan`.
    why_not_portable: ClassVar[str | None] = None
    changes_weights: ClassVar[bool] = False

    paths: tuple[str, ...]
    trained_length: int
    source: str
    limit: int | None

    @abstractmethod
    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        """The changes to a live model."""

    @abstractmethod
    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        """The config fields to set, by name.

        Raises:
            ValueError: this model cannot be extended in this way.
        """

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        """Notes for the user, a sentence each."""
        return ()

    def original_length(self, config: Any) -> int:
        """The trained length in tokens, before ctxext extended the model."""
        mark = live_mark(text_config_of(config))
        return int(mark["original"]["length"]) if mark else self.trained_length

    def plan(self, config: Any, request: Request) -> Plan:
        if request.length is not None or request.rotated_copy:
            word = "rotated_copy" if request.rotated_copy else f"length={request.length}"
            raise ValueError(f"{word} is for rotary position embeddings, but this model has {ENCODINGS[self.name]}.")
        text_config = text_config_of(config)
        mark = live_mark(text_config)
        self._check_existing(request.existing, mark)
        now = self._as_it_is(mark, request.original_max_position_embeddings)
        method = self.default_method if request.method is None else request.method
        factor, target = factor_and_target(request.factor, request.target_length, method, now.trained_length)
        if target <= now.trained_length:
            raise ValueError(
                f"this model already covers {target} tokens: its context is {now.trained_length} "
                f"({now.source}). Ask for a longer target, or use it unextended."
            )
        if now.limit is not None:
            check_rows(target)
        chosen = chosen_method(method, factor, self.name, request.options)
        original = now.original_length(config)
        lengths = Lengths(original=original, trained=original, start=now.trained_length, target=target, factor=factor)
        updates = by_own_names(text_config, now.updates(chosen, target))
        updates["ctxext"] = {
            "version": __version__,
            "method": chosen.to_dict(),
            "existing": request.existing,
            **lengths.to_mark(),
            "fields": dict(updates),
        }
        return Plan(
            encoding=self.name,
            text_config=text_config,
            existing=request.existing,
            method=chosen,
            lengths=lengths,
            start_source=now.source,
            updates=updates,
            patches=(now.patch(chosen, target),),
            why_not_portable=now.why_not_portable,
            changes_weights=now.changes_weights,
            notes=now.notes(chosen),
        )

    def _as_it_is(self, mark: dict[str, Any] | None, given: int | None) -> ModuleEncoding:
        """Resolve the length that the factor counts from.

        Args:
            given: the trained length in tokens that the caller passed, if any.
        """
        if mark is not None:  # Without a length limit the config need not say how far the model was extended.
            return replace(self, trained_length=mark["target"], source="reached when ctxext extended it")
        if given in (None, self.trained_length):
            return self
        if self.limit is not None:
            raise ValueError(
                f"original_max_position_embeddings={given} has no meaning here: {ENCODINGS[self.name]} is as long as "
                f"it was trained, {self.trained_length} tokens ({self.source}). Leave it out."
            )
        return replace(self, trained_length=given, source="as you passed it")

    def _check_existing(self, existing: str, mark: dict[str, Any] | None) -> None:
        if existing not in ("refuse", "compose") or (existing == "compose" and mark is None):
            raise ValueError(
                f"existing={existing!r} has no meaning here: this model has {ENCODINGS[self.name]}, "
                + ("which only existing='compose' can extend once more." if mark else "not extended yet. Leave it out.")
            )
        if mark is None:
            return
        done = f"{mark['method']['name']}, {mark['original']['length']} → {mark['target']} tokens"
        if "sinusoidal" in (self.name, method_class(mark["method"]["name"]).encoding):
            raise ValueError(
                f"the table of this model was extended already by ctxext ({done}), and sines are not extended twice. "
                "Load the original, or call restore_context(model)."
            )
        if existing == "refuse":
            raise ValueError(
                f"this model was extended already by ctxext ({done}). Say existing='compose' to extend it once more "
                f"(factor counts from {mark['target']}), or load the original."
            )


def stated_length(config: Any, *names: str) -> tuple[str, int] | None:
    """The first of the fields `names` that holds a length in tokens, and that length."""
    found = ((name, getattr(config, name, None)) for name in names)
    return next(((name, value) for name, value in found if isinstance(value, int) and value > 0), None)
