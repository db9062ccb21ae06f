"""Run the fine-tune recipe from the command line, and kill it: for finetune_soak.py and the tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RECIPE, TINY = ROOT / "recipes/finetune.py", ROOT / "recipes/configs/tiny_yarn_4x.yaml"
SHARDED = ROOT / "tests/recipes/sharded_on_cpu.py"
DEEPSPEED = Path(sys.prefix) / "deepspeed"  # on the path of these runs alone: transformers looks for it at every import
# A smaller tiny run: short rows, no evaluation.
STEPS = 24
SMALL = (
    "data.length=128", f"training.steps={STEPS}", "training.batch_size=4", "training.micro_batch_size=1",
    "training.checkpoint_every=3", "training.precision=fp32", "trainable.dropout=0.1", "evaluation=null",
    "tracker=null",
)  # fmt: skip


def command(
    output: Path, *changes: str, processes: int = 1, engine: Path | None = None, config: Path = TINY
) -> list[str]:
    """`engine`: a file for `accelerate launch` that names a sharded engine, which then runs on CPUs."""
    launcher = [sys.executable]
    if engine is not None:
        launcher += ["-m", "accelerate.commands.launch", "--config_file", str(engine), "--main_process_port"]
        launcher += [str(free_port()), str(SHARDED)]
    elif processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}"]
    return [*launcher, str(RECIPE), "--config", str(config), f"output={output}", *SMALL, *changes]


def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """The arguments are those of `command`, here and below."""
    overlay = [str(DEEPSPEED)] if DEEPSPEED.is_dir() else []
    return subprocess.Popen(
        command(*arguments, **options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join([*overlay, *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
    )


def finish(*arguments: Any, **options: Any) -> str:
    """Run to the end; returns its output."""
    process = start(*arguments, **options)
    said = process.communicate()[0]
    assert process.returncode == 0, said[-9000:]
    return " ".join(said.split())


def killed(output: Path, rng: random.Random, *changes: str, **options: Any) -> int:
    """Kill all processes of a run at a random moment of its training; returns the steps logged by then."""
    process = start(output, *changes, **options)
    before, more = len(log(output)), rng.randrange(1, 8)
    while process.poll() is None and len(log(output)) < before + more:
        time.sleep(0.01)
    time.sleep(rng.random() * 0.2)  # anywhere in a step, or while a checkpoint is written
    kill(process.pid)
    process.communicate()
    return len(log(output))


def kill(pid: int) -> None:
    """Kill a process and its children: a launcher's workers lead process groups of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended
        process = psutil.Process(pid)
        for one in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def log(output: Path) -> list[dict[str, Any]]:
    """The steps in the log, without an incomplete last line."""
    path = output / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def outcome(output: Path) -> dict[str, bytes]:
    """The files of a finished run: its loss curve, its adapter, and the state to resume from."""
    last = max((output / "checkpoints").iterdir())
    files: Sequence[Path] = (
        output / "log.jsonl",
        output / "adapter/adapter_model.safetensors",
        last / "trained.safetensors",
    )
    return {str(file.relative_to(output)): file.read_bytes() for file in files}


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
