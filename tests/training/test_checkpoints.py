"""Checkpoints: whole or not there, bound to their settings, and all that is needed to go on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_training import BINDING, LORA, make, train
from survey.small import small_model

from ctxext.training.checkpoints import (
    Progress,
    check_binding,
    checkpoints,
    gather_buffers,
    interruptible,
    latest_checkpoint,
    load_best,
    load_checkpoint,
    planned,
    save_checkpoint,
)
from ctxext.training.settings import TrainableSettings, TrainingSettings
from ctxext.training.trainable import trained_parameters


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}


@pytest.mark.parametrize("settings", [LORA, TrainableSettings(kind="full")], ids=["lora", "full"])
def test_going_on_from_a_checkpoint_changes_nothing(tmp_path: Path, settings: TrainableSettings) -> None:
    model, optimizer = make(settings)
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path, model, optimizer, Progress(3, 192, 180), BINDING)
    expected = train(model, optimizer, range(3, 6))

    again, fresh = make(settings, seed=1)
    progress = load_checkpoint(latest_checkpoint(tmp_path), again, fresh, BINDING)
    assert progress == Progress(3, 192, 180)
    assert train(again, fresh, range(3, 6)) == expected
    for name, tensor in tensors_of(model).items():
        assert torch.equal(tensor, tensors_of(again)[name]), name


def test_only_what_is_trained_is_stored(tmp_path: Path) -> None:
    settings = TrainableSettings(rank=4)
    model, optimizer = make(settings)
    train(model, optimizer, range(1))
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1), BINDING)
    trained = sum(p.numel() for p in trained_parameters(model).values())
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size < 1.2 * 12 * trained + 20_000  # values and AdamW's two moments
    assert size < 0.1 * 4 * model.num_parameters()


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    model, optimizer = make(TrainableSettings(rank=4))
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, model, optimizer, Progress(step), BINDING, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000010", "step-00000015"]


def test_training_is_over_when_the_loss_was_not_lower_for_the_patience() -> None:
    done, over = Progress(), []
    for step, loss in enumerate([3.0, 2.0, float("nan"), 2.5, 1.9, 1.9, 2.0, 1.8], 1):
        done = replace(done, step=10 * step).judged(loss)
        over.append((done.best_step, done.is_over(30), done.is_over(20), done.is_over(None)))
    assert [best for best, *_ in over] == [10, 20, 20, 20, 50, 50, 50, 80]
    assert [step for step, (_, is_over, *_) in enumerate(over, 1) if is_over] == []
    assert [step for step, (_, _, is_over, _) in enumerate(over, 1) if is_over] == [4, 7]
    assert not any(never for *_, never in over)
    assert not Progress(50).is_over(10)  # nothing was evaluated


def test_the_best_one_is_kept_and_loaded(tmp_path: Path) -> None:
    model, optimizer = make(TrainableSettings(rank=4))
    expected, progress = {}, Progress()
    for step, loss in (5, 3.0), (10, 2.0), (15, 2.5), (20, 2.4):
        train(model, optimizer, range(step, step + 1))
        progress = replace(progress, step=step).judged(loss)
        expected[step] = tensors_of(model)
        save_checkpoint(tmp_path, model, optimizer, progress, BINDING, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000010", "step-00000020"]
    assert check_binding(latest_checkpoint(tmp_path), BINDING) == progress
    load_best(tmp_path, model, optimizer, progress, BINDING)
    assert all(torch.equal(tensor, expected[10][name]) for name, tensor in tensors_of(model).items())
    load_best(tmp_path, model, optimizer, Progress(20), BINDING)  # without early stopping
    assert all(torch.equal(tensor, expected[10][name]) for name, tensor in tensors_of(model).items())


DECISIONS = """
import sys
from dataclasses import replace
import torch.distributed as dist
from accelerate import Accelerator
from ctxext.training.checkpoints import Progress
rank = Accelerator(cpu=True).process_index
done = Progress()
for step, losses in enumerate([(3.0, 3.0), (2.0, 4.0), (2.1, 1.0), (2.2, 0.5)], 1):  # of the two processes
    done = replace(done, step=step).judged(losses[rank])
sys.stdout.write(f"{done.best_step} {done.best_loss} {done.is_over(2)};")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_process_takes_the_same_decision(tmp_path: Path) -> None:
    (tmp_path / "decisions.py").write_text(DECISIONS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29617"]
    run = subprocess.run([*launcher, str(tmp_path / "decisions.py")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(filter(None, run.stdout.split(";"))) == ["2 2.0 True"] * 2


def test_what_was_not_finished_is_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make(TrainableSettings(rank=4))
    whole = save_checkpoint(tmp_path, model, optimizer, Progress(5), BINDING)
    partial = tmp_path / ".step-00000010.partial"
    partial.mkdir()
    (partial / "trained.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == whole
    # and it is no hindrance to the next attempt
    assert save_checkpoint(tmp_path, model, optimizer, Progress(10), BINDING).name == "step-00000010"
    assert not partial.exists()


def test_a_checkpoint_of_other_settings_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1), BINDING)
    other, fresh = make(seed=1)
    before = tensors_of(other)
    with pytest.raises(ValueError, match=r"data\.length is 128, was 64"):
        load_checkpoint(path, other, fresh, {**BINDING, "data.length": 128})
    assert not fresh.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(other).items())


def test_the_number_of_steps_is_refused_where_earlier_steps_depended_on_it(tmp_path: Path) -> None:
    model, optimizer = make()
    linear = {"training.schedule": "linear", "training.steps": 5}
    path = save_checkpoint(tmp_path, model, optimizer, Progress(5), linear)
    with pytest.raises(ValueError, match=r"steps is 9, was 5 \(the rates of a linear schedule depend on it"):
        check_binding(path, {**linear, "training.steps": 9})
    with pytest.raises(ValueError, match=r"settings: training\.schedule is 'constant', was 'linear'\. Resume"):
        check_binding(path, {"training.schedule": "constant"})
    path = save_checkpoint(tmp_path, model, optimizer, Progress(5), BINDING)
    assert check_binding(path, BINDING, 5) == check_binding(path, BINDING, 9) == Progress(5)
    with pytest.raises(ValueError, match=r"has trained 5 steps, more than the 4 .* Raise training\.steps"):
        check_binding(path, BINDING, 4)


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(TrainableSettings(rank=4))
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1), BINDING)
    other, fresh = make(LORA)
    with pytest.raises(ValueError, match="has 32 trained parameters"):
        load_checkpoint(path, other, fresh, BINDING)


@pytest.mark.parametrize("name", ["state.json", "trained.safetensors"])
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(name: str, tmp_path: Path) -> None:
    model, optimizer = make(TrainableSettings(rank=4))
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1), BINDING)
    for damage in (lambda file: file.write_text("half"), Path.unlink):
        damage(path / name)
        with pytest.raises(ValueError, match=rf"{name} is corrupt \(.*\)\. Remove {path} to resume from"):
            load_checkpoint(path, model, optimizer, BINDING)


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from small_training import BINDING, LORA, make, train
from ctxext.training.checkpoints import Progress, save_checkpoint
folder = Path(sys.argv[1])
model, optimizer = make(LORA)
train(model, optimizer, range(1))
save_checkpoint(folder, model, optimizer, Progress(1), BINDING)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(folder, model, optimizer, Progress(2), BINDING)
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_it_and_says_so(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1] / "support")
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), tests], capture_output=True, text=True, check=True
    )
    assert "step 2 could not be saved" in run.stdout
    assert "step-00000001 is complete: free disk space and run the same command again" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    model, optimizer = make()
    assert load_checkpoint(tmp_path / "step-00000001", model, optimizer, BINDING) == Progress(1)


SHARDED = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[2])
from small_training import BINDING, LORA, make
from safetensors.torch import load_file
from ctxext.hub.adapters import AdapterBase, save_trained
from ctxext.assets import MODEL
from ctxext.core.apply import transformers_model
from ctxext.training.checkpoints import Progress, gather_trained, load_checkpoint, save_checkpoint
from ctxext.training.loss import use_chunked_loss
from ctxext.training.trainable import trained_parameters

folder = Path(sys.argv[1])
sharded = int(sys.argv[3]) > 1
if sharded:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)

def build(seed):
    model, _ = make(LORA, seed)
    inner = transformers_model(model)
    use_chunked_loss(inner)
    if sharded:
        for layer in inner.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(trained_parameters(model).values(), lr=1e-3)

def train(model, optimizer, steps):
    losses = []
    for step in steps:
        ids = torch.randint(0, 4096, (2, 32), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=62, use_cache=False).loss
        (loss * world).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if sharded:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses

model, optimizer = build(0)
first = train(model, optimizer, range(2))
save_checkpoint(folder, model, optimizer, Progress(2), BINDING)
then = train(model, optimizer, range(2, 4))
again, fresh = build(1)
assert load_checkpoint(folder / "step-00000002", again, fresh, BINDING) == Progress(2)
assert train(again, fresh, range(2, 4)) == then
tensors = gather_trained(again)
if rank == 0:
    record = AdapterBase.of(MODEL, MODEL)
    save_trained(again, folder / "adapter", record, state_dict=tensors)
    saved = load_file(folder / "adapter/adapter_model.safetensors")
    assert sum(t.numel() for t in tensors.values()) <= sum(t.numel() for t in saved.values())
    print(json.dumps({"losses": first + then, "sums": {k: v.double().sum().item() for k, v in saved.items()}}))
if sharded:
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_training_is_that_of_one_process_and_its_checkpoints_are_whole(tmp_path: Path) -> None:
    script, tests, outcomes = tmp_path / "sharded.py", str(Path(__file__).parents[1] / "support"), []
    script.write_text(SHARDED)
    for world in (1, 2):
        launcher = (
            [sys.executable] if world == 1 else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        )
        command = [*launcher, str(script), str(tmp_path / f"of-{world}"), tests, str(world)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        outcomes.append(json.loads(run.stdout.strip().splitlines()[-1]))
    one, two = outcomes
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["sums"].keys() == one["sums"].keys()
    assert two["sums"] == pytest.approx(one["sums"], rel=1e-3, abs=1e-3)


def test_what_a_model_saves_beside_its_parameters_is_gathered_too() -> None:
    model = small_model("glm4_moe", "causal")
    name = next(name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    model.get_buffer(name).fill_(0.5)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gathered = gather_buffers(model)
    assert gathered.keys() == model.state_dict().keys() - parameters.keys()
    assert bool((gathered[name] == 0.5).all())


def test_after_an_interruption_it_is_said_where_the_same_command_resumes(tmp_path: Path) -> None:
    said: list[str] = []

    @interruptible(tmp_path, 50, said.append)
    def interrupted() -> None:
        raise KeyboardInterrupt

    model, optimizer = make(LORA)
    train(model, optimizer, range(1))
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    saved = save_checkpoint(tmp_path, model, optimizer, Progress(1), BINDING)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert said[0].startswith("Nothing was saved before step 50: set training.checkpoint_every ")
    assert said[1:] == [f"The same command resumes from {saved}."]
    training = TrainingSettings(steps=50, checkpoint_every=50)
    assert planned(training, 51, Progress()).startswith("A checkpoint every 50 steps")
    assert planned(training, 50, Progress()).startswith(
        "No checkpoint before the end (training.checkpoint_every is 50)"
    )
    assert planned(training, 50, Progress(50)) == "50 steps of 50 are done."
    assert planned(training, 51, Progress(50)).startswith("50 steps of 51 are done.\nA checkpoint every 50 steps")
    assert planned(training, 20, Progress()).startswith("The warm-up takes 20 steps and the run 20, ")
