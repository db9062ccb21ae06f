"""Load models and texts from command-line arguments."""

from __future__ import annotations

import math
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.evals.haystack import CODE_ENDS, FILLER, Haystack
from ctxext.evals.languages import prose, prose_languages, standard_library
from ctxext.utils.screen import console
from ctxext.utils.values import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ctxext.evals.perplexity import Judge


def load(
    folder: Path, dtype: str = "auto", device: str | None = None, *, bare: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and tokenizer of a checkpoint for evaluation.

    Args:
        bare: ignore the folder's `context_extension.json`.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from ctxext.evals.targets import check_causal, check_continues_text
    from ctxext.hub.checkpoint import (
        extended_as_saved,
        load_model,
        load_tokenizer,
        read_config,
        rejecting,
        saved_extension,
    )
    from ctxext.utils.machine import slow_in_bfloat16

    logging.disable_progress_bar()
    placed = placement(dtype, device)
    check_continues_text(read_config(folder))
    extension = None if bare else saved_extension(folder)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, AutoModelForCausalLM, **placed)
    if model.dtype == torch.bfloat16 and slow_in_bfloat16(model.device.type):
        console.print("note: this CPU is some ten times slower in bfloat16 than with --dtype float32.")
    with rejecting(folder / "config.json", ValueError):
        check_causal(model)
    return extended_as_saved(model, extension), tokenizer


def load_judge(folder: Path, name: str, dtype: str = "auto", device: str | None = None) -> Judge:
    """Load the model of `--judge`."""
    from ctxext.evals.engine import Engine
    from ctxext.evals.perplexity import Judge
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.targets import known_lengths, model_fingerprint

    model, tokenizer = load(folder, dtype, device)
    bos = Prompter(tokenizer, "base").bos
    return Judge(f"{name} {model_fingerprint(model)}", Engine(model), tokenizer, bos, known_lengths(model.config)[0])


def placement(dtype: str, device: str | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `--dtype` and `--device`."""
    import torch

    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if device not in (known := devices()):
        raise ValueError(f"device {device!r} is not available to torch. Pass one of {', '.join(known)}.")
    check_dtype(dtype)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    return {"dtype": dtype, "device_map": device if device != "cpu" else None}


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}. Pass one of {', '.join(DTYPES)}.")


def devices() -> list[str]:
    """The values of `--device` on this machine."""
    import torch

    kind, n = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    return ["auto", "cpu", *([kind.type, *(f"{kind.type}:{k}" for k in range(n))] if kind and n else [])]


def known_by(folder: Path) -> dict[str, Any]:
    """The identity by which model cards match a checkpoint: its weights and its own extension."""
    from ctxext.extension.metadata_file import weights_fingerprint
    from ctxext.hub.checkpoint import method_of

    about: dict[str, Any] = {}
    with suppress(ValueError):  # no safetensors
        about["weights"] = weights_fingerprint(folder)
    with suppress(ValueError):  # an unregistered method
        if (method := method_of(folder)) is not None:
            about["method"] = method.to_dict()
    return about


def load_text(
    choice: str | None, tokenizer: PreTrainedTokenizerBase, at_least: int, *, by_document: bool = False
) -> Haystack:
    """Load the text of `--haystack`, repeated until it has `at_least` tokens.

    Args:
        by_document: perplexity reads each document on its own.
    """
    from ctxext.assets import PERSUASION

    if choice == "filler":
        return Haystack.from_text(FILLER * 200, tokenizer, at_least=at_least, name="filler")
    if by_document:
        if choice is None:
            raise ValueError("by_document=True needs documents. Pass haystack=FILE.jsonl.")
        haystack = Haystack.of_documents(choice, tokenizer, at_least=at_least)
    elif choice == "code":
        name = f"the standard library of Python {platform.python_version()}"
        haystack = Haystack.from_text(standard_library(), tokenizer, at_least=at_least, name=name, ends=CODE_ENDS)
    elif choice in prose_languages():
        haystack = Haystack.from_text(prose(choice), tokenizer, at_least=at_least, name=choice)
    else:
        haystack = Haystack.from_file(PERSUASION if choice is None else choice, tokenizer, at_least=at_least)
    if haystack.repeats > 1:
        console.print(
            f"note: {haystack.name} has {haystack.n_tokens:,} tokens; prompts of {at_least:,} repeat it. "
            "Pass a longer text with --haystack.",
            highlight=False,
        )
    return haystack


def default_lengths(trained: int, reach: int) -> tuple[int, ...]:
    """The trained length and its doublings up to `reach`."""
    steps = max(1, math.ceil(math.log2(reach / trained)))
    return tuple(sorted({*(trained * 2**k for k in range(steps)), reach}))
