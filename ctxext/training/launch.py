"""Training engines: compares what was requested with what accelerate set up, and refuses a difference.

accelerate falls back silently. Measured with 1.15 on a machine without GPUs, with 2 processes requested:

| launch                                         | what accelerate gives                               |
|------------------------------------------------|-----------------------------------------------------|
| `--cpu`, or `distributed_type: MULTI_CPU`      | one process                                         |
| `--multi_gpu`, script without `cpu=True`       | two trainings that know nothing of each other       |
| `--use_fsdp --fsdp_version 2`, with `cpu=True` | plain DDP                                           |

`make_accelerator` turns the second into DDP over gloo and refuses the others. The launcher's request is read from its
command line with its own parser, because the environment it sets lacks the first and the third.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor

from ctxext.training.section import Section
from ctxext.utils.machine import slow_in_bfloat16
from ctxext.utils.screen import console
from ctxext.utils.values import MAX_COUNT

if TYPE_CHECKING:
    from accelerate import Accelerator, ParallelismConfig

# Sequence-parallel engines, and the sharded engine each is built on.
CARRIER = {"context_parallel": "fsdp2", "ulysses": "zero3"}
_Processes = Annotated[int, Field(ge=1, le=MAX_COUNT)]

EngineKind = Literal["any", "single", "ddp", "fsdp2", "context_parallel", "zero3", "ulysses"]


class EngineSettings(Section):
    """A requested engine, or the running one (all fields set, never "any"), see `engine_of`.

    Sizes are in processes. A group of `context_parallel_size` (ring attention, FSDP2) or `sequence_parallel_size`
    (Ulysses, ZeRO-3) processes reads the same rows, each a part of their tokens.
    """

    kind: EngineKind = "any"
    processes: _Processes | None = None
    context_parallel_size: _Processes = 1
    sequence_parallel_size: _Processes = 1

    @model_validator(mode="after")
    def _sizes_belong_to_the_kind(self) -> EngineSettings:
        for kind, name in ("context_parallel", "context_parallel_size"), ("ulysses", "sequence_parallel_size"):
            size = getattr(self, name)
            if (self.kind == kind) != (size > 1):
                raise ValueError(
                    f"engine.kind={kind} and engine.{name} of 2 or more go together, got kind={self.kind} and "
                    f"{name}={size}. Set both or neither."
                )
        if self.processes and self.processes % self.group_size:
            raise ValueError(
                f"engine.processes must be a multiple of the {self.group_size} that share a sequence, "
                f"got {self.processes}."
            )
        return self

    @property
    def group_size(self) -> int:
        """Processes that read the same rows."""
        return self.context_parallel_size * self.sequence_parallel_size

    @property
    def pieces(self) -> int:
        """Pieces of a row: one per process that reads it, or a head and a tail piece each in a ring."""
        return self.group_size * (2 if self.kind == "context_parallel" else 1)


@dataclass(frozen=True)
class Launch:
    """The request on the command line of `accelerate launch` and in its config file."""

    engine: EngineSettings
    cpu: bool
    mixed_precision: str


def requested_launch() -> Launch | None:
    """The request to the `accelerate launch` that started this process, if one did."""
    try:
        command = psutil.Process(os.getppid()).cmdline()  # a worker's parent is the launcher, also of several
    except psutil.Error:
        return None
    return read_launch(command)


def read_launch(command: list[str]) -> Launch | None:
    """Parse the command line of `accelerate launch`; None for another program.

    torchrun's would say no more than the environment that it sets.
    """
    program = next((i for i, word in enumerate(command) if i and not word.startswith("-")), 0)
    for start in (0, program) if command else ():  # "accelerate …", or "python -m accelerate.commands.launch …"
        name, arguments = Path(command[start]).name, command[start + 1 :]
        if name in ("accelerate", "accelerate.commands.accelerate_cli") and arguments[:1] == ["launch"]:
            return _read_accelerate(arguments[1:])
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return _read_accelerate(arguments)
    return None


def _read_accelerate(arguments: list[str]) -> Launch:
    from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args(arguments)
    launch.logger.disabled = True  # the launcher has already warned about its defaults
    try:
        args, _, _ = launch._validate_launch_command(args)  # reads the config file
    finally:
        launch.logger.disabled = False
    engine = _engine(
        bool(args.use_fsdp),
        bool(args.use_deepspeed),
        max(args.num_processes, 1),  # with no GPU and no --num_processes accelerate counts 0 and starts 1
        # The sizes are in args even if `--use_fsdp` with a config file makes accelerate drop them.
        args.parallelism_config_cp_size,
        args.parallelism_config_sp_size,
    )
    return Launch(engine, bool(args.cpu or args.use_cpu), args.mixed_precision)


def _read_environment() -> EngineSettings:
    """The request in accelerate's environment variables, and the number of started processes."""
    from accelerate.utils import get_int_from_env, parse_flag_from_env

    processes = get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1)
    fsdp, deepspeed = parse_flag_from_env("ACCELERATE_USE_FSDP"), parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if not (fsdp or deepspeed):
        return EngineSettings(processes=processes)
    parallel = parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")
    sizes = (int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", 1)) if parallel else 1 for name in ("CP", "SP"))
    return _engine(fsdp, deepspeed, processes, *sizes)


def _engine(
    fsdp: bool = False, deepspeed: bool = False, processes: int = 1, context: int = 1, sequence: int = 1
) -> EngineSettings:
    kind: EngineKind
    if context > 1 or sequence > 1:
        kind = "context_parallel" if context > 1 else "ulysses"
    elif fsdp or deepspeed:
        kind = "fsdp2" if fsdp else "zero3"  # FSDP 1 and other stages of ZeRO are refused by engine_of
    else:
        kind = "ddp" if processes > 1 else "single"
    return EngineSettings(
        kind=kind, processes=processes, context_parallel_size=context, sequence_parallel_size=sequence
    )


def make_accelerator(
    engine: EngineSettings,
    *,
    mixed_precision: str,
    log_with: str | None = None,
    project_dir: str | os.PathLike | None = None,
) -> Accelerator:
    """Create the accelerator that `engine`, the launcher and the environment request.

    Without an accelerator (or under `--cpu`, or `use_cpu: true`) several processes train by DDP over gloo.

    Raises:
        RuntimeError: accelerate would run something else than requested: no tracker, another number of processes,
            another engine, independent trainings, another precision or gradient accumulation. The error gives the
            command to use instead. If possible, it is raised before accelerate has changed anything.
    """
    from accelerate import Accelerator
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers.integrations import unset_hf_deepspeed_config

    if log_with is not None and log_with not in (available := sorted(map(str, get_available_trackers()))):
        raise RuntimeError(
            f"tracker: {log_with} is not installed, or not one of accelerate's trackers. Install it (pip install "
            f"{log_with}), or choose {' or '.join(available)}, or null for none."
        )
    launch, environment = requested_launch(), _read_environment()
    processes = environment.processes or 1
    cpu = not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    cpu = bool(cpu or (launch and launch.cpu))
    asked = {"the settings": engine, "the environment": environment}
    if launch:
        asked["`accelerate launch`"] = launch.engine
        if launch.mixed_precision not in ("no", mixed_precision):
            raise RuntimeError(
                f"`accelerate launch` sets mixed_precision={launch.mixed_precision}, but the settings ask for "
                f"{mixed_precision}. Remove it from the launcher's command line or config file."
            )
    # On CPUs accelerate supports only DDP; with GPUs only the number of processes is known so far.
    _refuse_another(asked, _engine(processes=processes) if cpu else EngineSettings(processes=processes), cpu)

    accelerator = Accelerator(
        # In a first run all wait for the process that downloads and tokenises.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=6))],
        cpu=cpu,
        mixed_precision=mixed_precision,
        log_with=log_with,
        project_dir=project_dir,
        parallelism_config=_parallelism(engine, processes),
    )
    # Under ZeRO 3 accelerate registers its config with transformers, regardless of zero3_init_flag, and later
    # from_pretrained calls return partitioned weights, on which checks of a whole model fail.
    unset_hf_deepspeed_config()
    _refuse_another(asked, engine_of(accelerator), cpu)
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
    if ranks != list(range(processes)):
        raise RuntimeError(f"{processes} processes must have the ranks 0 to {processes - 1}, got {ranks}.")
    if accelerator.gradient_accumulation_steps != 1:
        raise RuntimeError(
            f"the launcher's gradient_accumulation_steps={accelerator.gradient_accumulation_steps} would replace the "
            "settings' batch_size. Remove it from the launcher's config file."
        )
    if mixed_precision == "bf16" and slow_in_bfloat16(accelerator.device.type) and accelerator.is_main_process:
        console.print("note: this CPU is some ten times slower in bf16 than in fp32: set training.precision=fp32.")
    if accelerator.is_fsdp2 and mixed_precision == "bf16":
        # accelerate's default would round the loss to bfloat16 and reduce gradients in it.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return accelerator


def engine_of(accelerator: Accelerator) -> EngineSettings:
    """The running engine. One process without sharding is "single", however it was started.

    Raises:
        RuntimeError: accelerate runs an unsupported engine (FSDP 1, ZeRO 1 or 2, tensor parallel), or a device mesh
            without the configured parallel sizes.
    """
    from accelerate.utils import DistributedType

    given, parallel = accelerator.distributed_type, accelerator.parallelism_config
    context, sequence = (parallel.cp_size, parallel.sp_size) if parallel else (1, 1)
    fsdp = accelerator.is_fsdp2
    zero3 = given == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 3
    ddp = given == DistributedType.NO or given.name.startswith("MULTI_")
    if not (ddp or fsdp or zero3) or (parallel and parallel.tp_size > 1):
        raise RuntimeError(
            f"the recipes support DDP, FSDP 2 and ZeRO 3 (with context parallel or Ulysses), got another version of "
            f"{given.value}, or tensor parallel. Use a config from recipes/accelerate."
        )
    mesh = accelerator.torch_device_mesh
    if context > 1 and (mesh is None or mesh["cp"].size() != context):
        raise RuntimeError(f"context parallel over {context} processes needs a device mesh of that size, got {mesh}.")
    return _engine(fsdp, zero3, accelerator.num_processes, context, sequence)


def data_parallel(accelerator: Accelerator) -> tuple[int, int]:
    """The data-parallel (rank, size); neighbouring processes that share a sequence share a rank."""
    group_size = engine_of(accelerator).group_size
    return accelerator.process_index // group_size, accelerator.num_processes // group_size


def check_batch(engine: EngineSettings, batch: Mapping[str, Int[Tensor, "row token"]]) -> None:
    """Check that a batch can be split between the ranks of a group.

    Raises:
        ValueError: unshifted labels (the last token of a part would lose its target); positions that restart (masks of
            packed documents are silently dropped, trl#6843) or, under Ulysses, jump; a mask that hides tokens (dropped
            too); an indivisible length.
    """
    if engine.group_size == 1:
        return
    needed, have = {"input_ids", "position_ids", "shift_labels"}, set(batch) - {"attention_mask"}
    if have != needed:
        raise ValueError(
            f"a batch for {engine.kind} must have {sorted(needed)}, got {sorted(have)}. Shift labels before the split: "
            "shift_labels[:, t] is the target of token t."
        )
    ring = engine.kind == "context_parallel"
    steps = batch["position_ids"].diff(dim=1)
    if (steps <= 0 if ring else steps != 1).any():  # DeepSpeed treats every jump as a new document
        raise ValueError(
            f"positions must {'grow' if ring else 'grow by one'} along a row under {engine.kind}, got a "
            f"{'restart' if (steps <= 0).any() else 'jump'}. Put one document in each row, and skip positions only "
            "under engines other than Ulysses."
        )
    if "attention_mask" in batch and not batch["attention_mask"].all():
        raise ValueError(f"{engine.kind} drops attention masks, got one that hides tokens. Use rows without padding.")
    if (tokens := batch["input_ids"].shape[1]) % engine.pieces:
        raise ValueError(f"{engine.kind} needs a length divisible by {engine.pieces}, got {tokens} tokens.")


@contextmanager
def on_my_part(
    accelerator: Accelerator, batch: Mapping[str, Int[Tensor, "row token"]]
) -> Iterator[dict[str, Int[Tensor, "row part"]]]:
    """The part of `batch` that this rank reads. Run forward and backward inside; `batch` itself is unchanged.

    Context parallel gives each rank a head and a tail piece of the rows (to balance attention), Ulysses a contiguous
    slice, as DeepSpeed's `UlyssesSPDataLoaderAdapter` does. Other engines: the whole batch. Raises as `check_batch`.
    """
    engine = engine_of(accelerator)
    check_batch(engine, batch)
    if engine.kind == "context_parallel":
        part = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in batch.items()}
        part.pop("attention_mask", None)
        cut = list(part.values())  # in place
        with accelerator.maybe_context_parallel(cut, [1] * len(cut), no_restore_buffers=set(cut)):
            # Its hooks drop any mask; without one, transformers would treat the gap between head and tail as packed
            # documents, and first build a mask of tokens × tokens.
            yield {**part, "attention_mask": torch.ones_like(part["input_ids"])}
    else:
        yield contiguous_part(batch, accelerator.process_index % engine.group_size, engine.group_size)


def contiguous_part(batch: Mapping[str, Int[Tensor, "row token"]], rank: int, size: int) -> dict[str, Tensor]:
    """The `rank`-th of `size` equal slices along the tokens, without copying."""
    return {name: tensor.chunk(size, dim=1)[rank] for name, tensor in batch.items()}


def _parallelism(engine: EngineSettings, processes: int) -> ParallelismConfig | None:
    """accelerate's ParallelismConfig for `engine`; None leaves it to the launcher's config file."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    rows = processes // engine.group_size
    if engine.kind == "context_parallel":
        return ParallelismConfig(cp_size=engine.group_size, dp_shard_size=rows)
    if engine.kind == "ulysses":
        attention = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        return ParallelismConfig(
            sp_size=engine.group_size, sp_backend="deepspeed", sp_handler=attention, dp_shard_size=rows
        )
    return None


def _refuse_another(asked: Mapping[str, EngineSettings], got: EngineSettings, cpu: bool) -> None:
    """Raise RuntimeError if anything requested another engine than `got` (kind "any" if not known yet)."""
    settings, environment, *launcher = asked.values()
    wrong = []
    for who, wanted in asked.items():
        # The settings may turn a launcher's FSDP 2 into context parallel, and its ZeRO 3 into Ulysses.
        kinds = "any", got.kind, CARRIER.get(settings.kind)
        if got.kind != "any" and wanted.kind not in kinds:
            wrong.append(f"{who} requested {wanted.kind}, got {got.kind}")
        if wanted.processes not in (None, got.processes):
            wrong.append(f"{who} requested {_count(wanted.processes)}, got {got.processes}")
        for size in "context_parallel_size", "sequence_parallel_size":
            if got.kind == wanted.kind and getattr(wanted, size) != getattr(got, size):
                wrong.append(f"{who} requested {size}={getattr(wanted, size)}, got {getattr(got, size)}")
    if (count := got.processes or 1) % settings.group_size:
        wrong.append(f"the settings requested groups of {settings.group_size}, got {_count(count)}")
    if wrong:
        engine = settings if settings.kind != "any" or not launcher else launcher[0]
        processes = settings.processes or (launcher and launcher[0].processes) or environment.processes or 1
        raise RuntimeError(
            f"the engine is not the requested one: {'; '.join(wrong)}. {_remedy(engine.kind, processes, cpu)}"
        )


def _count(processes: int) -> str:
    return f"{processes} process{'es' * (processes > 1)}"


def _remedy(kind: str, processes: int, cpu: bool) -> str:
    """The command to use instead of the refused one."""
    script = shlex.join(sys.argv)
    several = max(processes, 1 if kind == "any" else 2)
    # --multi_gpu is accelerate's only way to start several processes, even on CPUs.
    ddp = f"{'ACCELERATE_USE_CPU=true ' * cpu}accelerate launch --multi_gpu --num_processes {several} {script}"
    if kind in ("any", "single", "ddp"):
        return f"Start it with: {f'python {script}' if kind == 'single' or several == 1 else ddp}"
    files = {"context_parallel": "fsdp2_context_parallel", "zero3": "zero3_ulysses", "ulysses": "zero3_ulysses"}
    sharded = f"accelerate launch --config_file recipes/accelerate/{files.get(kind, kind)}.yaml {script}"
    return f"It needs GPUs: {sharded}. CPUs support only DDP: {ddp}" if cpu else f"Start it with: {sharded}"
