"""Extend checkpoints on disk without loading their weights."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import OutOfMemoryError

from ctxext.api import extend_context
from ctxext.assets import MODEL
from ctxext.core.plan import Plan
from ctxext.extension.metadata_file import (
    BESIDE,
    RECORD,
    Record,
    read_record,
    weights_fingerprint,
    write_record,
)
from ctxext.extension.method_file import PROBE
from ctxext.extension.request import check_on_paper, plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.extension.saving import save_portable, version_4_keys
from ctxext.methods import ContextMethod, RopeScaling, method_from_dict
from ctxext.models.config_fields import check_config, check_counts
from ctxext.models.metadata import live_mark
from ctxext.models.text_config import text_config_of, text_section_of
from ctxext.utils.download import hub_folder
from ctxext.utils.four_bits import release_warnings
from ctxext.utils.json_files import read_json
from ctxext.utils.screen import console
from ctxext.utils.values import one_line, shown, size_in_words

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Formats of weights and of training states other than safetensors: what reads them may run code.
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")

# What Trainer and accelerate save beside the weights in those formats.
TRAINING_STATES = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")

# Copies of at least this many bytes are announced.
LARGE_COPY = 64 * 2**20

# The names of a tokenizer's files.
TOKENIZER_FILES = ("*tok*", "*vocab*", "*merges*", "*.model", "tekken.json")

# A probe belongs to one extension and is not copied into another.
REWRITTEN = ("config.json", "tokenizer_config.json", RECORD, PROBE)


@dataclass(frozen=True)
class ExtendedFolder:
    """The result of `extend_folder`: the folder (None for a dry run), the plan, the config, and bytes by kind."""

    output: Path | None
    plan: Plan
    config: dict[str, Any]
    linked_bytes: int = 0
    copied_bytes: int = 0


def checkpoint_folder(name_or_path: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of a checkpoint, local or downloaded from the hub.

    Raises:
        FileNotFoundError: no such folder, or it holds no config.json.
        ValueError: it is a file or an adapter.
    """
    folder = local_folder(name_or_path, revision, ["*.json"] if config_only else None)
    if not (folder / "config.json").is_file():
        refuse_adapter(folder, name_or_path)
        remedy = inside(folder) or "Pass a folder that save_pretrained wrote, or a hub name (owner/name)."
        if (folder / RECORD).is_file():
            remedy = f"Its {RECORD} is only an extension: ctxext.load applies it."
        raise FileNotFoundError(
            f"{name_or_path!r} holds no config.json, so it is not a transformers checkpoint. {remedy}"
        )
    return folder


def local_folder(name_or_path: str, revision: str | None, patterns: list[str] | None = None) -> Path:
    """A folder as it is, or downloaded from the hub; "bundled" is the package's small model.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: it is a file, or a `revision` of a local folder.
    """
    folder = Path(name_or_path)
    if name_or_path == "bundled" and not folder.exists():
        folder = MODEL
    if folder.is_file():
        remedy = "Pass a folder that save_pretrained wrote, or a hub name (owner/name)."
        if folder.suffix == ".gguf":
            how = f"ctxext export {shlex.quote(name_or_path)} --engine llama.cpp --factor 4 -o OUT.gguf"
            raise ValueError(f"{name_or_path} is a GGUF file, not a checkpoint folder. To extend it: {how}")
        if (folder.absolute().parent / "config.json").is_file():
            remedy = f"Pass the checkpoint's folder: {folder.absolute().parent}"
        raise ValueError(f"{name_or_path} is a file. {remedy}")
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for hub names, but {name_or_path!r} is a folder. Drop it.")
        return folder
    if folder.suffix in (".gguf", ".safetensors"):
        raise FileNotFoundError(f"{name_or_path} does not exist. Check the path.")
    if folder.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") != 1:
        raise FileNotFoundError(
            f"{name_or_path!r} is neither a folder nor a hub name.{near_path(folder)} Check the path, or pass the full "
            "hub name, such as openai-community/gpt2."
        )
    try:
        return hub_folder(name_or_path, revision, patterns)
    except FileNotFoundError as error:
        near = near_path(folder)
        if not near and (folder.parent / "checkpoints").is_dir():  # of a fine-tune
            raise FileNotFoundError(
                f"{folder.parent} holds no {folder.name}: that run is not finished. Repeat its `ctxext finetune` "
                "command, which resumes it."
            ) from error
        raise FileNotFoundError(f"{error}{near}") from error


def near_path(missing: Path) -> str:
    """For an error: the path beside a missing one that was probably meant."""
    there = [path.name for path in missing.parent.iterdir()] if missing.parent.is_dir() else []
    near = get_close_matches(missing.name, there, n=1)
    return f" Did you mean {str(missing.with_name(near[0]))!r}?" if near else ""


def inside(folder: Path) -> str:
    """For an error: the adapters and checkpoints in a folder that is none itself, such as that of a run."""
    names = ("config.json", "adapter_config.json")
    found = sorted(str(path.parent) for name in names for path in folder.glob(f"*/{name}"))
    return f"Pass one of the checkpoints in it: {', '.join(found)}." if found else ""


def refuse_adapter(folder: Path, name: str) -> None:
    """Raise ValueError, with the command that merges it, if `folder` (called `name`) holds a PEFT adapter.

    vLLM's `--enable-lora` does not support `modules_to_save`, which adapters of `recipes/finetune.py` have.
    """
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{name} is an adapter. Merge it first: ctxext merge {shlex.quote(name)} -o MERGED.")


def read_config(folder: str | Path, **how: Any) -> PreTrainedConfig:
    """Load the config.json of a checkpoint with transformers.

    Args:
        how: arguments of `from_pretrained`. Code in the checkpoint's folder runs only with `trust_remote_code=True`.

    Raises:
        ValueError: transformers rejects it, or as `check_config`.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    content = read_json(path).content
    try:
        check_counts(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        with rejecting(path):
            config = AutoConfig.from_pretrained(folder, **{"trust_remote_code": False, **how})
    except ValueError:
        _check_model_type(content, path)
        raise
    check_config(config)
    return config


def _check_model_type(content: dict[str, Any], path: Path) -> None:
    """Raise ValueError if a config.json without code of its own has no model_type, or one unknown to transformers."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind = content.get("model_type")
    if kind is None and "auto_map" not in content:
        raise ValueError(f"{path} has no model_type, such as llama. Add it, or download the file again.")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING and "auto_map" not in content:
        raise ValueError(
            f"transformers {transformers.__version__} does not know model_type {shown(kind)}. Upgrade transformers, or "
            f"correct model_type in {path}."
        )


def check_weights(folder: Path, name: str = "model.safetensors") -> None:
    """Raise ValueError if `folder`'s weights, in one safetensors file or in shards, are cut or missing.

    Reads only headers and sizes, of what transformers loads: the one file before the shards, and no other file.
    """
    index = folder / f"{name}.index.json"
    paths = [folder / name]
    if not paths[0].is_file():
        named = read_json(index).part("weight_map").content.values() if index.is_file() else ()
        paths = sorted({folder / str(each) for each in named})
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{folder} lacks {path.name}, which {index.name} names. Download it again.")
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a complete safetensors file ({one_line(error)}). Download it again."
            ) from error


def weights_in(folder: Path) -> list[Path]:
    """The files of weights in a folder: its safetensors, or else its pickled weights."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith((".", *TRAINING_STATES)))
    safetensors = [path for path in files if path.suffix == ".safetensors"]
    return safetensors or [path for path in files if path.suffix in PICKLED]


def load_model(folder: Path, auto: Any = None, **from_pretrained: Any) -> Any:
    """Load the model of a checkpoint with transformers, in eval mode.

    Args:
        auto: an auto class; None for `architecture_of` the folder.
        from_pretrained: its arguments. Code in the folder runs only with `trust_remote_code=True`, and pickled weights
            are read only with `use_safetensors=False`.

    Raises:
        ValueError: it holds pickled weights alone, transformers rejects it, `dtype` is none, or as `read_config` and
            `check_weights`.
        OSError: it has no weights.
    """
    from_pretrained.setdefault("trust_remote_code", False)  # transformers asks on the terminal otherwise
    dtype = from_pretrained.get("dtype", "auto")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must be a torch dtype or its name, such as 'bfloat16', got {dtype!r}.")
    if "config" not in from_pretrained:
        read_config(folder, trust_remote_code=from_pretrained["trust_remote_code"])
    from_pretrained.setdefault("use_safetensors", True)
    weights = weights_in(folder)
    if not weights:
        raise FileNotFoundError(
            f"{folder} has no weights (model.safetensors). Copy them there, or pass a complete checkpoint."
        )
    if weights[0].suffix != ".safetensors" and from_pretrained["use_safetensors"]:
        raise ValueError(
            f"{folder} has its weights in {weights[0].name}, a pickle, which could run code. If you trust it, "
            "write them as safetensors: load the model with transformers, and call save_pretrained with a new folder."
        )
    check_weights(folder)
    with rejecting(folder / "config.json", OSError, ImportError, SafetensorError):
        model = (auto or architecture_of(folder)).from_pretrained(folder, **from_pretrained).eval()
    if getattr(model, "is_loaded_in_4bit", False):
        release_warnings()
    return model


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a checkpoint with transformers.

    Raises:
        ValueError: there is none, or transformers rejects it.
    """
    from transformers import AutoTokenizer

    names = sorted({path.name for pattern in TOKENIZER_FILES for path in folder.glob(pattern)})
    missing = f"{folder} has no tokenizer. Save it there too: tokenizer.save_pretrained({str(folder)!r})."
    if not names:
        raise ValueError(missing)
    file = folder / ("tokenizer_config.json" if "tokenizer_config.json" in names else names[0])
    with rejecting(file, ImportError):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer("a text")  # where a malformed model_max_length is read
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():  # transformers makes empty ones
        raise ValueError(missing)
    return tokenizer


@contextmanager
def rejecting(file: Path, *others: type[Exception]) -> Iterator[None]:
    """Raise transformers' errors, but `others` and a full GPU, as a ValueError that names the file."""
    try:
        yield
    except Exception as error:  # transformers raises many exception types
        if isinstance(error, (OutOfMemoryError, *others)):
            raise
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise ValueError(
                f"{file.parent} needs Python code of its own (auto_map in {file.name}), which ctxext does not run. If "
                "you trust it, load the model in Python with trust_remote_code=True, and extend it there."
            ) from error
        remedy = "Fix it, or download it again."
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            remedy = "Leave that argument out: from_pretrained does not take it."
        raise ValueError(
            f"transformers rejects {file} ({type(error).__name__}: {one_line(error)}). {remedy}"
        ) from error


def check_not_extended(folder: Path, existing: str | None = None) -> Record | None:
    """The extension metadata in `folder` that existing="replace" replaces, or None; `existing` is None where the caller
    has no such argument.

    Raises:
        ValueError: there is one, and `existing` is not "replace".
    """
    record = read_record(folder)
    if record is not None and existing != "replace":
        method, freeze = record.method, ""
        if existing is not None and isinstance(method, RopeScaling) and method.in_attention:
            same = f"method={method.name!r}, factor={method.factor:g}"
            freeze = f"; with {same} and length= as well, it is frozen at that length"
        raise ValueError(
            f"{folder} is already extended by {record.summary} (see its {RECORD}), which cannot be scaled further. "
            f"Pass the original model{'' if existing is None else ', or existing=' + repr('replace')}{freeze}."
        )
    return record


def method_of(folder: Path) -> ContextMethod | None:
    """The method that the checkpoint in `folder` was extended by, or None.

    Raises:
        ValueError: the method is not registered here.
    """
    record = read_record(folder)
    if record is not None:
        return record.method
    mark = live_mark(text_config_of(read_config(folder)))
    return None if mark is None or mark["method"] is None else method_from_dict(mark["method"])


def architecture_of(folder: Path) -> Any:
    """The model class of the checkpoint in `folder`; AutoModelForCausalLM if its config names none."""
    import transformers

    names = read_json(folder / "config.json").content.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def saved_extension(folder: Path) -> Record | None:
    """The extension to apply after loading the checkpoint in `folder`; None if its config expresses everything.

    Raises:
        ValueError: its metadata is malformed, or belongs to another model.
    """
    record = read_record(folder)
    if record is not None:
        planned_as_saved(read_config(folder), record)
        record.check_weights(folder)
    return record


def config_in_use(folder: Path) -> PreTrainedConfig:
    """The config of the checkpoint in `folder`, with the fields that its `saved_extension` sets."""
    config, record = read_config(folder), saved_extension(folder)
    if record is not None:
        planned_as_saved(config, record).apply_to(text_config_of(config))
    return config


def planned_as_saved(config: PreTrainedConfig, record: Record) -> Plan:
    """Plan a saved extension for the model of `config`.

    Raises:
        ValueError: it belongs to another model, or cannot be applied; the error names the file.
    """
    arguments = record.arguments_for(config)
    with _naming(record):
        return plan_extension(config, **arguments)


@contextmanager
def _naming(record: Record) -> Iterator[None]:
    """Add the file's name to errors about its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error


def extended_as_saved(model: Any, record: Record | None) -> Any:
    """Extend the model in place by its `saved_extension`; returns it in eval mode."""
    if record is None:
        if live_mark(text_config_of(model.config)) is not None:  # saved again, older engines are to read it as well
            model.save_pretrained = partial(save_portable, model)
        return model.eval()
    # It describes the folder, not the model: saving writes new metadata.
    model.config.__dict__.pop(BESIDE, None)
    arguments = record.arguments_for(model.config)
    with _naming(record):
        return extend_context(model.eval(), **arguments)


def extended_json(folder: Path, /, **arguments: Any) -> tuple[Plan, dict[str, Any]]:
    """The plan for the checkpoint in `folder`, and its new config.json; all other keys are kept.

    If config.json cannot express the extension, it only refers to `context_extension.json`.
    """
    former = check_not_extended(folder, arguments.get("existing", "refuse"))
    config = read_config(folder)
    raw = read_json(folder / "config.json").content
    if former is not None:
        if arguments.get("original_max_position_embeddings") is None:
            arguments["original_max_position_embeddings"] = former.original_max_position_embeddings
        if former.method is not None and former.method.encoding != "rope":
            arguments["existing"] = "refuse"  # its config is the original model's
    plan = plan_extension(config, **arguments)
    check_on_paper(config, plan)
    if not plan.is_portable:
        return plan, {**raw, BESIDE: plan.summary}
    raw.pop(BESIDE, None)
    section = text_section_of(raw, config)
    section.update(plan.updates)
    if isinstance(plan, RopePlan):
        section.pop("rope_scaling", None)
        section.update(version_4_keys(plan.text_config, plan.updates["rope_parameters"]))
    return plan, raw


def extend_folder(
    folder: Path,
    output: Path | None,
    /,
    factor: float | None = None,
    method: str | ContextMethod | None = None,
    *,
    say: Callable[[str], None] = print,
    **arguments: Any,
) -> ExtendedFolder:
    """Write an extended copy of the checkpoint in `folder` to `output`: a new config, the same weight files.

    If config.json cannot express the extension, the config is unchanged, and `ctxext.load(output)` reads
    `context_extension.json`. If the method creates new weights (a longer position table), the model is loaded, extended
    and saved.

    Safetensors are hard-linked, which takes no space and no time; across disks they are copied. Never edit a linked
    file in place, as safetensors before 0.8 did: both folders share it. All other files are copied, as libraries write
    them in place.

    Args:
        output: a new folder; None only computes the config.
        say: called with progress messages.
        **arguments: those of `ctxext.extend_context`.

    Raises:
        FileExistsError: `output` exists.
        ValueError: as `ctxext.extend_context` and `check_weights`; or `output` is inside `folder`. Nothing is written
            on errors.
    """
    plan, config = extended_json(folder, factor=factor, method=method, **arguments)
    if output is None:
        return ExtendedFolder(None, plan, config)
    if output.exists():
        raise FileExistsError(f"{output} already exists. Choose another folder, or remove it first.")
    if output.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{output} is inside {folder}, whose copy it would be. Choose a folder outside.")
    check_weights(folder)
    weights = None if plan.is_portable else _fingerprint(folder, plan)
    with written_whole(output) as building:
        if plan.changes_weights:
            say("this method creates new weights: loading the model")
            model = load_model(folder, dtype="auto")
            origin = plan.original_length
            extend_context(model, method=plan.method, existing=plan.existing, original_max_position_embeddings=origin)
            model.save_pretrained(building)
        saved = None if plan.changes_weights else config
        linked, copied = link_with_config(folder, building, saved, plan.target_length, say)
        if not plan.is_portable:
            write_record(building, plan, weights=weights)
    return ExtendedFolder(output, plan, config, linked, copied)


def link_with_config(
    folder: Path, building: Path, config: dict[str, Any] | None, target_length: int, say: Callable[[str], None]
) -> tuple[int, int]:
    """Link the weights in `folder` into the folder `building`, and copy its other files but config.json.

    Args:
        building: empty, or with a saved model, whose config and weights stay.
        config: None where `building` has one.
        target_length: in tokens, for the tokenizer's config.
        say: called with progress messages.

    Returns:
        The bytes of weights linked, and of weights copied.
    """
    done = _link_or_copy(folder, building, say)
    if config is not None:
        _write_json(building / "config.json", config)
    _write_tokenizer_config(folder, building, target_length)
    return done


def _fingerprint(folder: Path, plan: Plan) -> str | None:
    """The fingerprint of the weights that the metadata will belong to; None if there are none yet."""
    weights = weights_in(folder)
    if not weights:
        return None
    if weights[0].suffix == ".safetensors":
        return weights_fingerprint(folder)
    raise ValueError(
        f"{folder} holds pickled weights, but {plan.summary} needs ctxext.load, which reads only safetensors. Load "
        "the model with transformers and call save_pretrained, which writes them, or use a static method."
    )


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` at the end of the block; on errors nothing changes.

    Folders cannot be swapped atomically: an existing one is moved to a hidden name between two renames.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}). Choose another folder.") from error
    former = building.with_name(f"{building.name}.former")
    try:
        yield building
        building.chmod(0o755)
        if folder.exists():
            folder.rename(former)
        building.rename(folder)
    except BaseException:
        if former.exists():
            former.rename(folder)
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(former, ignore_errors=True)


def visible_files(folder: Path) -> list[Path]:
    """The files in `folder`, relative to it, but hidden ones and those of a Trainer's checkpoints (checkpoint-500).

    Raises:
        FileNotFoundError: one is a link to a file that is not there.
    """
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if not path.is_dir()]
    found = [path for path in found if not any(re.match(r"\.|checkpoint-\d+$", part) for part in path.parts)]
    for path in found:
        if not (folder / path).exists():
            raise FileNotFoundError(
                f"{folder / path} is a link to {(folder / path).readlink()}, which does not exist. Restore that file, "
                "or download the checkpoint again."
            )
    return found


def _link_or_copy(folder: Path, building: Path, say: Callable[[str], None]) -> tuple[int, int]:
    written = {path.name for path in building.iterdir()}
    weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json") if written else ()
    linked, to_copy = 0, []
    for path in visible_files(folder):
        if str(path) in {*REWRITTEN, *written} or path.name.endswith(weights):
            continue
        source, target = (folder / path).resolve(), building / path  # the hub's cache contains links to its blobs
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            with suppress(OSError):  # another disk
                os.link(source, target)
                linked += source.stat().st_size
                continue
        to_copy.append((source, target))
    sizes = {target: source.stat().st_size for source, target in to_copy}
    if (size := sum(sizes.values())) >= LARGE_COPY:
        say(f"copying {len(sizes)} files, {size_in_words(size)}: only safetensors on the same disk are hard-linked")
    for source, target in to_copy:
        shutil.copy2(source, target)
    return linked, sum(size for path, size in sizes.items() if path.suffix in (".safetensors", *PICKLED))


def _write_tokenizer_config(folder: Path, building: Path, target_length: int) -> None:
    path = folder / "tokenizer_config.json"
    if path.is_file():
        config = read_json(path).content
        length = config.get("model_max_length")
        if not (isinstance(length, int | float) and length >= target_length):
            config["model_max_length"] = target_length
        _write_json(building / path.name, config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def extended_base(base: Path, folder: Path, **arguments: Any) -> Path:
    """The extended base of a training run in `folder`, written if missing.

    Args:
        arguments: of `ctxext.extend_context`.

    Raises:
        ValueError: an adapter cannot express the extension, or the existing folder has another one.
    """
    plan, _ = extended_json(base, **arguments)
    if not (plan.is_portable or plan.in_attention):
        raise ValueError(
            f"{plan.summary} cannot be expressed in the config.json of {base.name} because {plan.why_not_portable}, "
            "so a trained model could not be reloaded. Use another method from `ctxext methods`, or extend without "
            "training (ctxext.extend_context or `ctxext extend`)."
        )
    if not folder.exists():
        extend_folder(base, folder, say=console.print, **arguments)
        return folder
    there = text_config_of(config_in_use(folder))
    if any(getattr(there, name, None) != value for name, value in plan.updates.items()):
        raise ValueError(
            f"{folder} was not extended as in the settings ({plan.summary}). Choose another output, or "
            "remove that folder."
        )
    # Position tables are loaded, extended and saved again, possibly under other file names.
    if not plan.changes_weights and weights_fingerprint(folder) != weights_fingerprint(base):
        raise ValueError(f"{folder} holds other weights than {base}. Choose another output, or remove that folder.")
    return folder
