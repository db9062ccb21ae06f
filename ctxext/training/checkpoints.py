"""Checkpoints of a run: the trained parameters, the optimizer's state and the step, without the frozen base model.

The rows and random numbers of a step depend only on the seed and the step, so nothing else is needed to resume bitwise.
Checkpoints are written to a temporary folder and renamed when complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ctxext.hub.adapters import AdapterBase, save_trained
from ctxext.training.settings import Settings, TrainingSettings
from ctxext.training.trainable import trained_parameters
from ctxext.utils.json_files import OBJECT, Kind, read_json
from ctxext.utils.values import counted, is_count, is_number, one_line, shown

TENSORS, STATE, ZERO = "trained.safetensors", "state.json", "zero"
# The types of the fields of `Progress`.
_KINDS = {
    "int": Kind("a whole number >= 0", partial(is_count, low=0, high=2**62)),
    "float": Kind("a finite number >= 0", partial(is_number, low=0)),
}


@dataclass(frozen=True)
class Progress:
    """The progress of a run: tokens read, tokens with a loss, seconds of all steps.

    `peak` is the peak memory of the main process in bytes; 0 if unknown. With early stopping, `best_loss` is the lowest
    validation loss in nats, after `best_step` steps; 0 before the first evaluation.
    """

    step: int = 0
    tokens: int = 0
    targets: int = 0
    seconds: float = 0.0
    peak: int = 0
    best_step: int = 0
    best_loss: float = 0.0

    def judged(self, loss: float) -> Progress:
        """After an evaluation. Every process calls it, and takes the main process's loss: roundings may differ."""
        (loss,) = broadcast_object_list([loss])
        is_best = math.isfinite(loss) and (self.best_step == 0 or loss < self.best_loss)
        return replace(self, best_step=self.step, best_loss=loss) if is_best else self

    def is_over(self, patience: int | None) -> bool:
        """Whether there was no lower loss in the last `patience` steps; None for never."""
        return bool(patience and self.best_step and self.step - self.best_step >= patience)


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Any, progress: Progress, binding: dict[str, Any], *, keep: int = 2
) -> Path:
    """Write `folder/step-…` atomically, and delete all but the last `keep` and the best. Every process calls it.

    Args:
        model: the model in training, wrapped or not. Sharded tensors are gathered one by one on the main process.
        binding: the settings that a run must share with the checkpoint to resume from it.

    Raises:
        OSError: it could not be written, e.g. the disk is full. Earlier checkpoints are kept.
    """
    path = checkpoint_of(folder, progress.step)
    partial = folder / f".{path.name}.partial"
    try:
        if _is_main():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _wait()
        if hasattr(model, "save_checkpoint"):  # only DeepSpeed's engine can gather its shards
            save: Any = model.save_checkpoint
            save(str(partial), tag=ZERO, exclude_frozen_parameters=True)
            tensors = {}
        else:
            tensors = _gather(_named_state(model, optimizer))
        _wait()
        if _is_main():
            save_file(tensors, partial / TENSORS)
            state = {"progress": asdict(progress), "binding": binding}
            (partial / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            for written in (partial / TENSORS, partial / STATE, partial):
                _flush(written)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
            _flush(folder)
            for old in checkpoints(folder)[:-keep]:
                if old != checkpoint_of(folder, progress.best_step):
                    shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        if _is_main():
            shutil.rmtree(partial, ignore_errors=True)
        last = latest_checkpoint(folder)
        raise OSError(
            f"step {progress.step} could not be saved in {folder} ({error}). "
            + (
                f"{last.name} is complete: free disk space and run the same command again."
                if last
                else "Nothing was saved yet."
            )
        ) from error
    _wait()
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
    trained = {_plain(name): parameter for name, parameter in trained_parameters(model).items()}
    tensors = path / TENSORS
    with _readable(tensors):
        file = safe_open(tensors, "pt")  # memory-mapped
    with file:
        held: dict[str, dict[str, Tensor]] = {}  # by parameter: its value, and AdamW's state
        for key in file.keys():  # noqa: SIM118
            kind, _, name = key.partition("/")
            held.setdefault(name, {})[kind] = file.get_tensor(key)
        if held.keys() != trained.keys():
            raise ValueError(
                f"{path} has {len(held)} trained parameters, but this run trains {len(trained)}; "
                f"{min(held.keys() ^ trained.keys())!r} is in only one of them. Use another output folder."
            )
        kinds = {kind for state in held.values() for kind in state}
        for name, state in held.items():
            if state.keys() not in ({"parameter"}, kinds):  # without gradients a parameter has no state
                raise ValueError(f"{tensors} lacks {min(kinds - state.keys())}/{name}. Use another output folder.")
            for kind, value in state.items():
                if value.shape != trained[name].shape and (
                    value.ndim or kind == "parameter"
                ):  # AdamW's step is a number
                    raise ValueError(
                        f"{kind}/{name} in {tensors} has the shape {[*value.shape]}, not {[*trained[name].shape]}. Use "
                        "another output folder."
                    )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(_like(parameter, held[name].pop("parameter")))
                optimizer.state[parameter] = {
                    kind: _like(parameter, value) if value.shape == parameter.shape else value
                    for kind, value in held[name].items()
                }
    return progress


def load_best(folder: Path, model: nn.Module, optimizer: Any, progress: Progress, binding: dict[str, Any]) -> None:
    """Load the checkpoint of the lowest validation loss, if there was an evaluation for early stopping."""
    if progress.best_step:
        load_checkpoint(checkpoint_of(folder, progress.best_step), model, optimizer, binding)


def check_binding(path: Path, binding: dict[str, Any], steps: int | None = None) -> Progress:
    """The progress of the run at `path`.

    Args:
        steps: those of the whole run, which may be more than when it was saved.

    Raises:
        ValueError: its `binding` has other settings (the error names them), it is beyond `steps`, or its state is
            malformed.
    """
    with _readable(path / STATE):
        state = read_json(path / STATE)
    theirs, ours = state.get("binding", OBJECT), json.loads(json.dumps(binding))
    differ = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if "training.schedule" in differ:  # only that of a constant one does not depend on the length
        differ = [key for key in differ if key not in ("training.steps", "training.tokens")]
    if differ:
        said = "; ".join(f"{key} is {shown(ours.get(key))}, was {shown(theirs.get(key))}" for key in differ[:5])
        if {"training.steps", "training.tokens"} & {*differ}:
            schedule = theirs.get("training.schedule")
            said += f" (the rates of a {schedule} schedule depend on it, unlike a constant one's)"
        raise ValueError(
            f"{path} is from a run with other settings: {said}. Resume with its original settings, or choose "
            "another output folder."
        )
    progress = state.part("progress")
    progress.check_names({each.name for each in fields(Progress)})
    found = Progress(**{each.name: progress.get(each.name, _KINDS[str(each.type)]) for each in fields(Progress)})
    if steps is not None and found.step > steps:
        raise ValueError(
            f"{path} has trained {found.step:,} steps, more than the {steps:,} of the settings. Raise training.steps, "
            "or choose another output folder."
        )
    return found


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise ValueError if a checkpoint's file cannot be read within the block."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(
            f"{file} is corrupt ({one_line(error.__cause__ or error)}). Remove {file.parent} to resume from the "
            "checkpoint before it."
        ) from error


def checkpoint_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return folder / f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*"))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`."""
    return next(reversed(checkpoints(folder)), None)


def planned(training: TrainingSettings, steps: int, done: Progress) -> str:
    """Where a run of so many steps goes on, and where it can resume after an interruption."""
    every, said = training.checkpoint_every, []
    if training.warmup_steps >= steps:
        said.append(
            f"The warm-up takes {counted(training.warmup_steps, 'step')} and the run {steps:,}, so the learning rate "
            "rises to the end: lower training.warmup_steps, or train for longer."
        )
    if done.step:
        said.append(f"{counted(done.step, 'step')} of {steps:,} are done.")
    if every < steps:
        said.append(f"A checkpoint every {counted(every, 'step')}, from which the same command resumes.")
    elif not done.step:
        said.append(
            f"No checkpoint before the end (training.checkpoint_every is {every}): an interrupted run starts again."
        )
    return "\n".join(said)


@contextmanager
def interruptible(folder: Path, every: int, say: Callable[[str], None]) -> Iterator[None]:
    """After Ctrl-C, say what the same command does, with checkpoints in `folder`, one each `every` steps."""
    try:
        yield
    except KeyboardInterrupt:
        if last := latest_checkpoint(folder):
            say(f"The same command resumes from {last}.")
        else:
            say(
                f"Nothing was saved before step {every}: set training.checkpoint_every to fewer steps, and start again."
            )
        raise


def gather_trained(model: nn.Module) -> dict[str, Tensor]:
    """The full trained parameters by name, on the CPU; empty except on the main process. Every process calls it."""
    return _gather(trained_parameters(model).items())


def gather_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's persistent buffers, such as a router's expert bias; as `gather_trained`."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return _gather((name, tensor) for name, tensor in model.state_dict().items() if name not in parameters)


def _gather(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in named:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if _is_main():
            tensors[_plain(name)] = whole.detach().cpu().contiguous()
    return tensors


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _named_state(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The trained parameters as `parameter/NAME`, and AdamW's state as `exp_avg/NAME` and so on."""
    for name, parameter in trained_parameters(model).items():
        for kind, value in {"parameter": parameter, **optimizer.state[parameter]}.items():
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
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_result(
    accelerator: Accelerator, model: nn.Module, settings: Settings, record: AdapterBase, tokenizer: Any
) -> None:
    """Save the adapter, or the whole model for a full fine-tune; gathered from all processes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:  # only it can gather its shards, in its own dtype
        tensors = accelerator.get_state_dict(model)
    else:
        tensors = gather_trained(model) | ({} if settings.trainable.kind == "lora" else gather_buffers(model))
    if accelerator.is_main_process:
        save_trained(accelerator.unwrap_model(model), settings.saved, record, tokenizer, tensors)
    accelerator.wait_for_everyone()
