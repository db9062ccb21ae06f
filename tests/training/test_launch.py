"""The engine that runs is the one asked for, or nothing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator, ParallelismConfig
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from pydantic import ValidationError
from transformers import AutoModelForCausalLM
from transformers.integrations import unset_hf_deepspeed_config
from transformers.integrations.deepspeed import set_hf_deepspeed_config

from ctxext.assets import MODEL
from ctxext.training.launch import EngineSettings, check_batch, contiguous_part, make_accelerator, read_launch

ROOT = Path(__file__).resolve().parents[2]
PROBE = str(Path(__file__).with_name("launch_probe.py"))
FILES = sorted((ROOT / "recipes/accelerate").glob("*.yaml"))
ACCELERATE = ["-m", "accelerate.commands.launch"]
SHARED = EngineSettings(kind="ulysses", sequence_parallel_size=2)
RING = EngineSettings(kind="context_parallel", context_parallel_size=2)


def run(*command: str, **environment: str) -> tuple[list[dict], str]:
    """What the processes of a launch said, by rank, and their errors. On CPUs, wherever the test runs."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    said = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("probe ")]
    assert (done.returncode == 0) == bool(said), done.stderr[-3000:]
    return sorted(said, key=lambda answer: answer["rank"]), done.stderr


def rows(tokens: int = 8, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    positions = torch.arange(tokens).repeat(2, 1)
    return {"input_ids": positions, "position_ids": positions, "shift_labels": positions + 1, **more}


@pytest.mark.slow
def test_a_plain_run_is_one_process() -> None:
    said, _ = run(PROBE, '{"kind": "single", "processes": 1}')
    assert said == [{"rank": 0, "data": [0, 1], "sum": 1.0}]


@pytest.mark.slow
def test_the_file_for_cpu_processes_gives_two_that_share_their_work() -> None:
    file = str(ROOT / "recipes/accelerate/cpu_processes.yaml")
    said, _ = run(*ACCELERATE, "--config_file", file, PROBE, '{"kind": "ddp", "processes": 2}', "parts")
    assert [answer["rank"] for answer in said] == [0, 1]
    assert [answer["data"] for answer in said] == [[0, 2], [1, 2]]
    assert [answer["sum"] for answer in said] == [11.0, 11.0]
    # A sequence-parallel group reads the same rows, each token in one place, with its position and its target.
    first, second = [0, 1, 6, 7], [2, 3, 4, 5]  # a head and a tail piece; they balance causal attention
    for name, tokens in ("cp", (first, second)), ("sp", ([0, 1, 2, 3], [4, 5, 6, 7])):
        for answer, mine in zip(said, tokens):
            # Of ones: without it, transformers takes the gap between head and tail for packed documents.
            mask = answer["parts"][name].pop("attention_mask", None)
            assert mask == ([[1] * 4] * 2 if name == "cp" else None)
            assert answer["parts"][name] == {
                "input_ids": [mine, [100 + token for token in mine]],
                "position_ids": [mine, mine],
                "shift_labels": [[token + 1 for token in mine], [101 + token for token in mine]],
                "data": [0, 1],
            }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--cpu", "MULTI_CPU"])
def test_two_processes_that_would_be_one_are_refused(how: str, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    options = ["--cpu", "--num_processes", "2"] if how == "--cpu" else ["--config_file", str(file)]
    said, errors = run(*ACCELERATE, *options, PROBE, "{}")
    assert not said
    assert "`accelerate launch` requested 2 processes, got 1" in errors
    assert f"ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 {PROBE}" in errors


@pytest.mark.slow
def test_two_trainings_that_know_nothing_of_each_other_are_refused() -> None:
    said, errors = run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", PROBE, "{}", "partial")
    assert not said
    assert "requested 2 processes, got 1" in errors


@pytest.mark.slow
def test_sharding_that_a_cpu_would_drop_is_refused() -> None:
    options = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--main_process_port", "0"]
    said, errors = run(*ACCELERATE, *options, PROBE, "{}")
    assert not said
    assert "`accelerate launch` requested fsdp2, got ddp" in errors
    assert "recipes/accelerate/fsdp2.yaml" in errors


@pytest.mark.slow
def test_zero3_that_a_cpu_would_drop_is_refused() -> None:
    file = str(ROOT / "recipes/accelerate/zero3_ulysses.yaml")
    said, errors = run(*ACCELERATE, "--cpu", "--config_file", file, "--num_processes", "8", PROBE, "{}")
    assert not said
    assert "`accelerate launch` requested ulysses, got single" in errors


@pytest.mark.parametrize(
    "engine",
    [
        EngineSettings(processes=2),
        EngineSettings(kind="ddp"),
        EngineSettings(kind="fsdp2"),
        EngineSettings(kind="zero3"),
        SHARED,
        RING,
    ],
    ids=lambda engine: engine.kind,
)
def test_settings_that_a_plain_run_cannot_meet_are_refused_before_anything_starts(
    engine: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import PartialState

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    before = PartialState._shared_state.copy()
    with pytest.raises(RuntimeError, match=r"the settings requested .* accelerate launch"):
        make_accelerator(engine, mixed_precision="no")
    assert PartialState._shared_state == before


def test_a_precision_that_the_settings_would_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = read_launch(["accelerate", "launch", "--cpu", "--mixed_precision", "bf16", "train.py"])
    monkeypatch.setattr("ctxext.training.launch.requested_launch", lambda: launch)
    with pytest.raises(RuntimeError, match="mixed_precision=bf16, but the settings ask for no"):
        make_accelerator(EngineSettings(), mixed_precision="no")


@pytest.mark.parametrize("name", ["aim", "tensorbord"])
def test_a_tracker_that_would_track_nothing_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"tracker: {name} is not installed.* or choose tensorboard"):
        make_accelerator(EngineSettings(), mixed_precision="no", log_with=name)


def test_a_model_loads_whole_after_accelerate_has_registered_zero3(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate registers ZeRO 3 with transformers where DeepSpeed is installed; this does so wherever it runs."""

    class Registered:
        def is_zero3(self) -> bool:
            return True

    registered, init = Registered(), Accelerator.__init__

    def init_under_zero3(accelerator: Accelerator, **options: object) -> None:
        init(accelerator, **options)
        set_hf_deepspeed_config(registered)

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(Accelerator, "__init__", init_under_zero3)
    try:
        make_accelerator(EngineSettings(), mixed_precision="no")
        model = AutoModelForCausalLM.from_pretrained(MODEL)
    finally:
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert all(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("command", "kind", "processes"),
    [
        ("accelerate launch --multi_gpu --num-processes 3 train.py --num_processes 5", "ddp", 3),
        ("/usr/bin/python /usr/bin/accelerate launch --cpu --num_processes 2 train.py", "ddp", 2),
        ("python -u -m accelerate.commands.launch --cpu train.py", "single", 1),
    ],
)
def test_a_launcher_is_read_as_it_reads_itself(command: str, kind: str, processes: int) -> None:
    launch = read_launch(command.split())
    assert launch
    assert (launch.engine.kind, launch.engine.processes) == (kind, processes)


@pytest.mark.parametrize(
    "command",
    ["python train.py", "bash", "python wrap.py accelerate launch train.py", "", "torchrun --nnodes 3 train.py"],
)
def test_other_parents_are_no_launchers(command: str) -> None:
    assert read_launch(command.split()) is None


KINDS = {
    "cpu": ("single", 1),
    "cpu_processes": ("ddp", 2),
    "gpu": ("single", 1),
    "ddp": ("ddp", 8),
    "fsdp2": ("fsdp2", 8),
    "fsdp2_two_machines": ("fsdp2", 16),
    "fsdp2_context_parallel": ("context_parallel", 8),
    "zero3_ulysses": ("ulysses", 8),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_config_file_asks_for_its_engine(path: Path) -> None:
    launch = read_launch(["accelerate", "launch", "--config_file", str(path), "train.py"])
    assert launch
    assert (launch.engine.kind, launch.engine.processes) == KINDS[path.stem]
    assert launch.engine.group_size == (8 if launch.engine.kind in ("context_parallel", "ulysses") else 1)
    assert launch.cpu == path.stem.startswith("cpu")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_config_file_holds_only_what_accelerate_knows(path: Path) -> None:
    load_config_from_file(str(path))  # refuses unknown keys, but not those within a section
    known = {action.dest for action in accelerate_launch.launch_command_parser()._actions}
    for section, value in yaml.safe_load(path.read_text()).items():
        assert not isinstance(value, dict) or set(value) <= known, section


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_sharding_config_file_builds_its_plugins(path: Path) -> None:
    args = accelerate_launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, defaults, _ = accelerate_launch._validate_launch_command(args)
    args.main_process_port = 0
    if args.use_fsdp:
        with patch_environment(**prepare_multi_gpu_env(args)):
            plugin, parallel = FullyShardedDataParallelPlugin(), ParallelismConfig()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is True
        assert not plugin.cpu_ram_efficient_loading
        assert parallel.total_size in (1, args.num_processes)
    elif args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        with patch_environment(**prepare_deepspeed_cmd_env(args)[1]):
            plugin, parallel = DeepSpeedPlugin(), ParallelismConfig()
        assert plugin.zero_stage == 3
        assert plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
        # Left to the settings: a number here would win over theirs.
        assert plugin.gradient_accumulation_steps == "auto"
        assert plugin.gradient_clipping == "auto"
        assert (parallel.sp_size, parallel.sp_handler.sp_attn_implementation) == (8, "sdpa")


def test_no_config_file_is_left_untested() -> None:
    assert {path.stem for path in FILES} == set(KINDS)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "context_parallel"},
        {"kind": "ulysses", "context_parallel_size": 2},
        {"sequence_parallel_size": 2},
        {"kind": "context_parallel", "context_parallel_size": 4, "processes": 6},
        {"kind": "fsdp"},
        {"process": 2},
    ],
)
def test_settings_that_contradict_themselves_are_refused(values: dict) -> None:
    with pytest.raises(ValidationError):
        EngineSettings(**values)


@pytest.mark.parametrize("engine", [RING, SHARED], ids=lambda engine: engine.kind)
def test_packed_documents_and_hidden_tokens_are_refused_where_masks_are_dropped(engine: EngineSettings) -> None:
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
    skipping = torch.arange(8) + torch.tensor([[0, 0, 0, 0, 9, 9, 9, 9]] * 2)
    mask = torch.ones(2, 8, dtype=torch.long)
    check_batch(engine, rows())
    check_batch(RING, rows(position_ids=skipping, attention_mask=mask))  # PoSE
    with pytest.raises(ValueError, match="got a jump"):
        check_batch(SHARED, rows(position_ids=skipping, attention_mask=mask))
    with pytest.raises(ValueError, match="restart"):
        check_batch(engine, rows(position_ids=packed))
    mask[1, 6:] = 0
    with pytest.raises(ValueError, match="hides tokens"):
        check_batch(engine, rows(attention_mask=mask))
    with pytest.raises(ValueError, match="Shift labels before the split"):
        check_batch(engine, rows(labels=mask))
    check_batch(EngineSettings(kind="ddp", processes=2), rows(position_ids=packed, attention_mask=mask))


def test_a_length_that_does_not_divide_is_refused() -> None:
    check_batch(SHARED, rows(6))
    with pytest.raises(ValueError, match="divisible by 4, got 6 tokens"):
        check_batch(RING, rows(6))


def test_slices_tile_the_tokens() -> None:
    batch = rows()
    slices = [contiguous_part(batch, rank, 4) for rank in range(4)]
    for name in batch:
        assert torch.cat([part[name] for part in slices], dim=1).equal(batch[name])
