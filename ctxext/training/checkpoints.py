"""Checkpoints of a run: the trained parameters, the optimizer's state and the step, without the frozen base model.

The rows and random numbers of a step depend only on the seed and the step, so nothing else is needed to resume bitwise.
Checkpoints are written to a temporary folder and renamed when complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ctxext.hub.adapters import AdapterBase, save_trained
from ctxext.training.trainable import trained_parameters
from ctxext.utils.json_files import OBJECT, Kind, read_json
from ctxext.utils.values import is_count, is_number, one_line, shown

TENSORS, STATE, ZERO = "trained.safetensors", "state.json", "zero"
# The types of the fields of `Progress`.
_KINDS = {
    "int": Kind("a whole number >= 0", partial(is_count, low=0, high=2**62)),
    "float": Kind("a finite number >= 0", partial(is_number, low=0)),
}


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        tokens, targets: tokens read, and tokens with a loss.
        seconds: seconds of all steps so far.
        peak: peak memory of the main process in bytes; 0 if unknown.
    """

    step: int = 0
    tokens: int = 0
    targets: int = 0
    seconds: float = 0.0
    peak: int = 0

    def after(self, tokens: int, targets: int, seconds: float, peak: int) -> Progress:
        """After one more step, which read `tokens`, took `seconds` and needed up to `peak` bytes."""
        return Progress(
            step=self.step + 1,
            tokens=self.tokens + tokens,
            targets=self.targets + targets,
            seconds=self.seconds + seconds,
            peak=max(self.peak, peak),
        )


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: Any,
    progress: Progress,
    binding: dict[str, Any],
    *,
    keep: int = 2,
    main: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> Path:
    """Write `folder/step-…` atomically, and delete all but the last `keep`. Every process calls it.

    Args:
        model: the model in training, wrapped or not. Sharded tensors are gathered one by one on the main process.
        binding: the settings that a run must share with the checkpoint to resume from it.
        main: whether this process writes.
        wait: waits for all processes.

    Raises:
        OSError: it could not be written, e.g. the disk is full. Earlier checkpoints are kept.
    """
    path = folder / f"step-{progress.step:08d}"
    partial = folder / f".{path.name}.partial"
    try:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        wait()
        if hasattr(model, "save_checkpoint"):  # only DeepSpeed's engine can gather its shards
            save: Any = model.save_checkpoint
            save(str(partial), tag=ZERO, exclude_frozen_parameters=True)
            tensors = {}
        else:
            tensors = _gather(_named_state(model, optimizer), main)
        wait()
        if main:
            save_file(tensors, partial / TENSORS)
            state = {"progress": asdict(progress), "binding": binding}
            (partial / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            for written in (partial / TENSORS, partial / STATE, partial):
                _flush(written)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
            _flush(folder)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
        last = latest_checkpoint(folder)
        raise OSError(
            f"step {progress.step} could not be saved in {folder} ({error}). "
            + (f"{last.name} is whole: make room and run the same command again." if last else "Nothing was saved yet.")
        ) from error
    wait()
    return path


def load_checkpoint(path: Path, model: nn.Module, optimizer: Any, binding: dict[str, Any]) -> Progress:
    """Load the checkpoint at `path` into a model and an optimizer set up as in the original run.

    Raises:
        ValueError: it is incomplete, or belongs to a run with other settings (the error names them) or another model.
            Nothing is changed.
    """
    progress = check_binding(path, binding)
    if hasattr(model, "load_checkpoint"):
        load: Any = model.load_checkpoint
        load(str(path), tag=ZERO, load_module_strict=False)
        return progress
    trained = trained_parameters(model)
    with _opened(path / TENSORS) as file:
        keys = {*file.keys()}
        names = {key.partition("/")[2] for key in keys if key.startswith("parameter/")}
        if names != {*map(_plain, trained)}:
            other = sorted(names ^ {*map(_plain, trained)})
            raise ValueError(
                f"{path} holds {len(names)} trained parameters, this run trains {len(trained)}; {other[0]!r} is in one "
                "of them only. Use another output folder."
            )
        kinds = sorted({key.partition("/")[0] for key in keys} - {"parameter"})
        for name, parameter in trained.items():
            its = {f"{kind}/{_plain(name)}" for kind in kinds}
            if its & keys and not its <= keys:  # none for a parameter without gradients
                raise ValueError(f"{path / TENSORS} lacks {min(its - keys)}. Use another output folder.")
            for key in {f"parameter/{_plain(name)}", *its & keys}:
                shape, whole = file.get_slice(key).get_shape(), [*parameter.shape]
                if shape != whole and (shape or key.startswith("parameter/")):  # AdamW counts steps in one number
                    raise ValueError(
                        f"{key} in {path / TENSORS} has the shape {shape}, not {whole}. Use another output folder."
                    )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(_like(parameter, file.get_tensor(f"parameter/{_plain(name)}")))
                optimizer.state[parameter] = {
                    kind: _like(parameter, value) if value.shape == parameter.shape else value
                    for kind in kinds
                    if f"{kind}/{_plain(name)}" in keys
                    for value in [file.get_tensor(f"{kind}/{_plain(name)}")]
                }
    return progress


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The memory-mapped tensors of a checkpoint."""
    try:
        file = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} is not whole ({one_line(error)}). Remove {path.parent}: the run resumes from the checkpoint "
            "before it."
        ) from error
    with file:
        yield file


def check_binding(path: Path, binding: dict[str, Any]) -> Progress:
    """The progress of the run at `path`.

    Raises:
        ValueError: its `binding` has other settings (the error names them), or its state is malformed.
    """
    state = read_json(path / STATE)
    theirs, ours = state.get("binding", OBJECT), json.loads(json.dumps(binding))
    differ = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if differ:
        said = "; ".join(f"{key} is {shown(ours.get(key))}, there {shown(theirs.get(key))}" for key in differ[:5])
        raise ValueError(
            f"{path} is of a run with other settings: {said}. Go on with the settings it was begun with, or choose "
            "another output folder."
        )
    progress = state.part("progress")
    progress.check_names({each.name for each in fields(Progress)})
    return Progress(**{each.name: progress.get(each.name, _KINDS[str(each.type)]) for each in fields(Progress)})


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`."""
    return next(reversed(checkpoints(folder)), None)


def gather_trained(model: nn.Module, main: bool = True) -> dict[str, Tensor]:
    """The full trained parameters by name, on the CPU; empty except on the main process. Every process calls it."""
    return _gather(((_plain(name), parameter) for name, parameter in trained_parameters(model).items()), main)


def gather_buffers(model: nn.Module, main: bool = True) -> dict[str, Tensor]:
    """The model's persistent buffers, such as a router's expert bias; as `gather_trained`."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return _gather(((_plain(name), tensor) for name, tensor in state.items() if name not in parameters), main)


def _gather(named: Iterable[tuple[str, Tensor]], main: bool) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in named:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if main:
            tensors[name] = whole.detach().cpu().contiguous()
    return tensors


def _named_state(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The trained parameters as `parameter/NAME`, and AdamW's state as `exp_avg/NAME` and so on."""
    for name, parameter in trained_parameters(model).items():
        yield f"parameter/{_plain(name)}", parameter
        for kind, value in optimizer.state[parameter].items():
            yield f"{kind}/{_plain(name)}", value


def _plain(name: str) -> str:
    """A parameter's name without the prefixes of DDP and torch.compile."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` on the device and with the sharding of `parameter`."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def _flush(path: Path) -> None:
    """Flush it to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_result(
    accelerator: Accelerator, model: nn.Module, output: Path, record: AdapterBase, tokenizer: Any, *, kind: str
) -> Path:
    """Save the adapter, or the whole model for a full fine-tune; gathered from all processes."""
    lora = kind == "lora"
    folder = output / ("adapter" if lora else "model")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # only it can gather its shards, in its own dtype
        tensors = accelerator.get_state_dict(model)
    else:
        tensors = gather_trained(model, accelerator.is_main_process)
        if not lora:
            tensors |= gather_buffers(model, accelerator.is_main_process)
    if accelerator.is_main_process:
        save_trained(accelerator.unwrap_model(model), folder, record, tokenizer, tensors)
    accelerator.wait_for_everyone()
    return folder
