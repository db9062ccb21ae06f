"""The contract of a position encoding: finding it in a model, and planning its extension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ctxext import __version__
from ctxext.core.patch import Patch
from ctxext.core.plan import DEFAULT_METHODS, ENCODINGS, Plan, Request, chosen_method, factor_and_target
from ctxext.methods import ContextMethod, method_class
from ctxext.models.metadata import Lengths, by_own_names, live_mark
from ctxext.models.text_config import text_config_of
from ctxext.utils.values import check_rows


class Encoding(ABC):
    """The position encoding of one model."""

    name: ClassVar[str]  # as in `ContextMethod.encoding`

    @abstractmethod
    def plan(self, config: Any, request: Request) -> Plan:
        """Plan the request for the model of `config`. Raises the errors of `ctxext.extend_context`."""


@dataclass(frozen=True)
class ModuleEncoding(Encoding):
    """An encoding found in a model's modules. (RoPE alone is found in the config.)

    Attributes:
        paths: the modules that hold it.
        trained_length: in tokens; `source` says where that number comes from.
        limit: tokens beyond which the stock model fails; None without a limit.
        length_field: the config field with the trained length; None if the config has none.
    """

    mechanism: ClassVar[Callable[..., Patch]]
    # As in `Plan`.
    why_not_portable: ClassVar[str | None] = None
    changes_weights: ClassVar[bool] = False

    paths: tuple[str, ...]
    trained_length: int
    source: str
    limit: int | None = field(default=None, kw_only=True)
    length_field: str | None = field(default=None, kw_only=True)

    def patch(self, method: ContextMethod, target_length: int) -> Patch:
        """The changes to a live model."""
        return self.mechanism(self, method, target_length)

    def updates(self, method: ContextMethod, target_length: int) -> dict[str, Any]:
        """The config fields to set, by name. Raises ValueError if this model cannot be extended in this way."""
        return {} if self.length_field is None else {self.length_field: target_length}

    def notes(self, method: ContextMethod) -> tuple[str, ...]:
        """Notes for the user, a sentence each."""
        return ()

    def original_length(self, config: Any) -> int:
        """The trained length in tokens, before ctxext extended the model."""
        mark = live_mark(text_config_of(config))
        return int(mark["original"]["length"]) if mark else self.trained_length

    def plan(self, config: Any, request: Request) -> Plan:
        if request.length is not None:
            raise ValueError(
                f"length={request.length} is for rotary position embeddings, but this model has {ENCODINGS[self.name]}."
            )
        text_config = text_config_of(config)
        mark = live_mark(text_config)
        self._check_existing(request.existing, mark)
        now = self._as_it_is(mark, request.original_max_position_embeddings)
        method = DEFAULT_METHODS[self.name] if request.method is None else request.method
        factor, target = factor_and_target(request.factor, request.target_length, method, now.trained_length)
        if target <= now.trained_length:
            raise ValueError(
                f"this model already covers {target} tokens: its context is {now.trained_length} "
                f"({now.source}). Pass a larger factor= or target_length=, or use the model unextended."
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
            trained_source=now.source if original == now.trained_length else "before its extension by ctxext",
            updates=updates,
            patches=(now.patch(chosen, target),),
            why_not_portable=now.why_not_portable,
            changes_weights=now.changes_weights,
            notes=now.notes(chosen),
        )

    def _as_it_is(self, mark: dict[str, Any] | None, given: int | None) -> ModuleEncoding:
        """Resolve the length that the factor counts from; `given` is the trained length that the caller passed."""
        if mark is not None:  # Without a length limit, only the metadata may hold the extended length.
            return replace(self, trained_length=mark["target"], source="the target of its extension by ctxext")
        if given in (None, self.trained_length):
            return self
        if self.limit is not None:
            raise ValueError(
                f"original_max_position_embeddings={given} does not apply: the length of {ENCODINGS[self.name]} is "
                f"its trained length, {self.trained_length} tokens ({self.source}). Leave it out."
            )
        return replace(self, trained_length=given, source="given or saved as original_max_position_embeddings=")

    def _check_existing(self, existing: str, mark: dict[str, Any] | None) -> None:
        if existing not in ("refuse", "compose") or (existing == "compose" and mark is None):
            raise ValueError(
                f"existing={existing!r} does not apply: this model has {ENCODINGS[self.name]}, "
                + ("which supports only existing='compose'." if mark else "and is not extended yet. Leave it out.")
            )
        if mark is None:
            return
        done = f"{mark['method']['name']}, {mark['original']['length']} → {mark['target']} tokens"
        if "sinusoidal" in (self.name, method_class(mark["method"]["name"]).encoding):
            raise ValueError(
                f"this model's sinusoidal table was already extended by ctxext ({done}) and cannot be extended again. "
                "Load the original model, or call restore_context(model)."
            )
        if existing == "refuse":
            raise ValueError(
                f"this model was already extended by ctxext ({done}). Pass existing='compose' to extend it further "
                f"(factor counts from {mark['target']}), or load the original model."
            )
