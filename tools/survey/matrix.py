"""One model type extended, compared with a native build, and restored: a row of the matrix of families."""

from __future__ import annotations

import copy
import re
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctxext.api import describe_context, extend_context, restore_context
from ctxext.extension.metadata_file import RECORD
from survey.small import LENGTH, small_model, stock_logits, without_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FACTOR = 4.0
COMPARED = 2 * LENGTH  # tokens at which logits are compared
EFFECT = 1e-4  # a change of logits below this counts as none

# What can come of an extension, the best first.
VERDICTS = {
    "native": "extended, and bitwise equal to what plain transformers builds from the saved config and weights",
    "formula": "extended in a way that config.json cannot express; the formula was verified, and the logits changed",
    "wrong": "extended, but a native build differs, nothing moved, or restoring left something behind",
    "refused": "refused by ctxext, with its reason",
    "unbuildable": "no small model of it ran here, with the error; `extend_context` may work on a real one",
    "no tokens": "it reads no tokens, so no position of a token can be new",
}
EXTENDED = ("native", "formula")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one model type.

    Attributes:
        verdict: one of VERDICTS.
        reason: the first sentence of an error, or what is wrong.
        replaced: whether its published config scales positions already, which was replaced.
        native_difference: largest |difference| of logits to the native build; None where config.json cannot express it.
        effect: largest |difference| of logits to the stock model at twice the trained length; None where that does
            not run.
        restored: whether weights, buffers, config and logits after `restore_context` were bitwise those before.
        temperature: whether YaRN's attention factor moves the logits; None where another method was used.
        in_attention: of extended causal models with RoPE, whether Self-Extend runs and restores too; None of others.
        in_attention_reason: why it does not.
    """

    model_type: str
    kind: str
    verdict: str
    encoding: str | None = None
    method: str | None = None
    reason: str | None = None
    replaced: bool = False
    native_difference: float | None = None
    effect: float | None = None
    restored: bool | None = None
    temperature: bool | None = None
    in_attention: bool | None = None
    in_attention_reason: str | None = None


def examine(model_type: str, kind: str) -> Row:
    """Build a model type small, extend it by the default method, compare, restore; never raises."""
    row = Row(model_type=model_type, kind=kind, verdict="unbuildable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if (why := without_tokens(model_type, kind)) is not None:
                return replace(row, verdict="no tokens", reason=why)
            model = small_model(model_type, kind)
            stock_logits(model, LENGTH)
        except Exception as error:  # a row for every model: its own code raises many kinds
            return replace(row, reason=_words(error))
        return _extend(model, row)


def _extend(model: PreTrainedModel, row: Row) -> Row:
    stock = _logits_where_it_runs(model)
    before = _state(model)
    try:
        description = describe_context(model)
        row = replace(row, encoding=description.encoding, replaced=description.scaling is not None)
        existing: dict[str, Any] = {"existing": "replace"} if row.replaced else {}
        extend_context(model, FACTOR, **existing)
    except Exception as error:  # a row for every model: its own code raises many kinds
        return replace(row, verdict="refused", reason=_words(error), restored=_same(before, _state(model)))
    method = model.context_extension.method
    row = replace(row, verdict="wrong", method=None if method is None else method.name)
    try:
        live = stock_logits(model, COMPARED)
        row = replace(row, effect=None if stock is None else _difference(live, stock))
        if (native := _saved_and_loaded(model)) is not None:
            row = replace(row, native_difference=_difference(live, stock_logits(native, COMPARED)))
        restore_context(model)
        row = replace(row, restored=_same(before, _state(model)))
        if row.method == "yarn":
            row = replace(row, temperature=_temperature(model, existing, live))
    except Exception as error:  # a row for every model: its own code raises many kinds
        return replace(row, reason=_words(error))
    if (wrong := _what_is_wrong(row)) is not None:
        return replace(row, reason=wrong)
    row = replace(row, verdict="formula" if row.native_difference is None else "native")
    if row.kind == "causal" and row.encoding == "rope":
        reason = _not_in_attention(model, existing, before)
        row = replace(row, in_attention=reason is None, in_attention_reason=reason)
    return row


def _not_in_attention(model: PreTrainedModel, existing: dict[str, Any], before: dict[str, Any]) -> str | None:
    """Why Self-Extend, which rotates inside attention, does not run on a model; None if it does."""
    try:
        extend_context(model, FACTOR, "self_extend", **existing)
        whole = stock_logits(model, COMPARED)
        first = stock_logits(model, COMPARED - 1)  # causal
        restore_context(model)
    except Exception as error:  # a row for every model: its own code raises many kinds
        return _words(error)
    if not _difference(whole[:, :-1], first) <= EFFECT * float(whole.abs().max()):
        return "the last token moves earlier logits"
    return None if _same(before, _state(model)) else "restore_context left something behind"


def _what_is_wrong(row: Row) -> str | None:
    if row.effect is not None and not row.effect > EFFECT:
        return "nothing moved beyond the trained length"
    if row.native_difference:
        return "what plain transformers loads from the saved model differs"
    return None if row.restored else "restore_context left something behind"


def _logits_where_it_runs(model: PreTrainedModel) -> Tensor | None:
    try:
        return stock_logits(model, COMPARED)
    except Exception:  # a row for every model: its own code raises many kinds
        return None


def _saved_and_loaded(model: PreTrainedModel) -> PreTrainedModel | None:
    """What plain transformers builds from the saved model; None where that takes our own record."""
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).save_pretrained(folder)  # a copy, as saving notes the class and dtype in the config
        if (Path(folder) / RECORD).exists():
            return None
        loaded: PreTrainedModel = type(model).from_pretrained(folder, dtype=torch.float32)
        return loaded.eval()


def _temperature(model: PreTrainedModel, existing: dict[str, Any], live: Tensor) -> bool | None:
    """Whether YaRN's attention factor moves the logits (`live` has it): a norm after RoPE would undo it."""
    try:
        extend_context(model, FACTOR, "yarn", attention_factor=1.0, **existing)
    except Exception:  # a row for every model: its own code raises many kinds
        return None
    without = stock_logits(model, COMPARED)
    restore_context(model)
    return _difference(without, live) > EFFECT


def _state(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that an extension may touch, logits included."""
    logits = stock_logits(model, LENGTH), _logits_where_it_runs(model)
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {
        "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "config": copy.deepcopy(model.config.to_dict()),
        "logits": logits,
    }


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    pairs = [*zip(before["logits"], after["logits"])]
    pairs += [(tensor, after["tensors"].get(name)) for name, tensor in before["tensors"].items()]
    return (
        before["config"] == after["config"]
        and before["tensors"].keys() == after["tensors"].keys()
        and all(a is b is None or (a is not None and b is not None and _equal(a, b)) for a, b in pairs)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)  # which compares values across dtypes


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _words(error: Exception) -> str:
    """The first sentence of an error, in one line; its type as well where the message alone says little."""
    text = re.sub(r" from '/[^']*'", "", " ".join(str(error).split()))  # where a module lies on this machine
    sentence = text.split(". ")[0].removesuffix(".")[:300]
    return sentence if isinstance(error, ValueError) and sentence else f"{type(error).__name__}: {sentence}"
