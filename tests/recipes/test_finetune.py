"""The fine-tune recipe, run as people run it."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from finetuning import (
    DEEPSPEED,
    RECIPE,
    SMALL,
    STEPS,
    TINY,
    command,
    finish,
    free_port,
    kill,
    killed,
    log,
    outcome,
    start,
)
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from survey.small import small_model
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.assets import MODEL
from ctxext.evals.results import Header
from ctxext.hub.adapters import merge
from ctxext.publish.push import prepared
from ctxext.training.checkpoints import checkpoints
from ctxext.training.settings import read_settings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("finetune_recipe", RECIPE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def main(recipe, capsys: pytest.CaptureFixture[str]):
    """The recipe's main in this process, by default with the tiny run in small; returns what it printed.

    Also the one process that others are compared with: a process of its own would import for half a minute.
    """

    def run(output: Path, *changes: str, config: Path = TINY, small: tuple[str, ...] = SMALL) -> str:
        try:
            recipe.main(["--config", str(config), f"output={output}", *small, *changes])
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    finish(output)
    return output


def test_a_run_that_is_killed_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    rng, output, seen = random.Random(0), tmp_path / "killed", []
    for _ in range(3):
        seen.append(killed(output, rng))
        for path in checkpoints(output / "checkpoints"):
            load_file(path / "trained.safetensors")
            json.loads((path / "state.json").read_text())
    assert seen[0] < STEPS  # it was training
    said = finish(output)
    assert "Resuming from" in said
    assert outcome(output) == outcome(whole)


@pytest.fixture
def dropping(tmp_path: Path) -> Path:
    """The bundled model with dropout of its own, in attention."""
    shutil.copytree(MODEL, tmp_path / "dropping")
    config = tmp_path / "dropping/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.1}))
    return tmp_path / "dropping"


def assert_same_training(one: list[dict], other: list[dict]) -> None:
    """Of two logs."""
    for alone, together in zip(one, other, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        # torch adds up the norm of a large gradient in float32, and in other parts where it is sharded.
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=3e-4)
        assert (together["tokens"], together["targets"]) == (alone["tokens"], alone["targets"])


def test_two_processes_give_the_losses_of_one_and_resume_bit_for_bit_with_dropout(
    main, dropping: Path, tmp_path: Path
) -> None:
    # Dropout of LoRA and of attention, recomputed in the backward pass, over accumulated micro-batches of two rows.
    changes = (
        f"model={dropping}", "training.steps=9", "training.batch_size=8", "training.micro_batch_size=2",
        "training.gradient_checkpointing=recompute",
    )  # fmt: skip
    one, two, disturbed = tmp_path / "one", tmp_path / "two", tmp_path / "disturbed"
    main(one, *changes)
    finish(two, *changes, processes=2)
    assert_same_training(log(one), log(two))
    rng = random.Random(1)
    seen = [killed(disturbed, rng, *changes, processes=2) for _ in range(2)]
    assert seen[0] < 9
    finish(disturbed, *changes, processes=2)
    assert outcome(disturbed) == outcome(two)


def test_every_micro_batch_of_every_seed_draws_dropout_of_its_own(
    recipe, main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, forward_backward = [], recipe.Run.forward_backward

    def record(*args, **named):
        drawn.append(torch.rand(()).item())
        return forward_backward(*args, **named)

    monkeypatch.setattr(recipe.Run, "forward_backward", record)
    for seed in 0, 1:
        main(tmp_path / f"seed-{seed}", "training.steps=3", f"training.seed={seed}")
    assert len(set(drawn)) == len(drawn) >= 2 * 3 * 4


# A model trained, so to say, at 64 tokens; half of the documents have 64, the others up to 128.
SHORT = ("extension.original_max_position_embeddings=64", "data.sources.1.max_document=64")


def test_mixed_windows_train_another_model_and_save_the_extended_one(main, tmp_path: Path) -> None:
    changes = (*SHORT, "training.steps=2", "merge=true")
    main(tmp_path / "extended", *changes)
    main(tmp_path / "mixed", *changes, "training.mixed_window=true")
    assert log(tmp_path / "mixed")[0]["loss"] != pytest.approx(log(tmp_path / "extended")[0]["loss"], rel=1e-4)
    configs = [(tmp_path / name / "merged/config.json").read_text() for name in ("mixed", "extended")]
    assert configs[0] == configs[1]
    record = json.loads((tmp_path / "mixed/adapter/ctxext.json").read_text())
    assert record["provenance"]["settings"]["training"]["mixed_window"]
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        adapter = ctxext.load(tmp_path / "mixed/adapter")(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed/merged")(input_ids=ids).logits
    torch.testing.assert_close(adapter, merged, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="within 512 tokens and longer ones, but all are no longer"):
        main(tmp_path / "none", "training.mixed_window=true")


@pytest.fixture
def engine(tmp_path: Path):
    """A function that writes the bundled file of a sharded engine, for two processes instead of eight."""

    def write(name: str, **fsdp: bool) -> Path:
        if name in ("zero3", "ulysses") and not DEEPSPEED.is_dir() and importlib.util.find_spec("deepspeed") is None:
            pytest.skip(f"{name} runs under DeepSpeed, and `make test-all` could not install it")
        file = {"fsdp2": "fsdp2", "context_parallel": "fsdp2_context_parallel"}.get(name, "zero3_ulysses")
        bundled = yaml.safe_load((RECIPE.parent / f"accelerate/{file}.yaml").read_text())
        bundled["num_processes"], parallel = 2, bundled.pop("parallelism_config", None)
        if size := {"ulysses": "sp", "context_parallel": "cp"}.get(name):
            bundled["parallelism_config"] = {**parallel, f"parallelism_config_{size}_size": 2}
        if fsdp:
            bundled["fsdp_config"] |= {f"fsdp_{key}": value for key, value in fsdp.items()}
        path = tmp_path / f"{name}{''.join(fsdp)}.yaml"
        path.write_text(yaml.safe_dump(bundled))
        return path

    return write


# What engines that split rows ask for: joined documents and no dropout.
SPLIT = (
    "training.steps=3", "trainable.dropout=0.0", "data.documents=joined",
    "data.sources=[{path: ../data/austen/*.txt, name: novels}]",
)  # fmt: skip


@pytest.mark.parametrize("name", ["fsdp2", "zero3", "ulysses", "context_parallel"])
def test_the_bundled_file_of_a_sharded_engine_gives_the_losses_of_one_process(
    name: str, main, engine, whole: Path, tmp_path: Path
) -> None:
    """Over gloo. Context parallel has an attention of the test's own."""
    changes, one = ("training.steps=3",), whole
    if name in ("ulysses", "context_parallel"):
        changes = SPLIT
        main(one := tmp_path / "one", *changes)
    finish(tmp_path / "two", *changes, "training.gradient_checkpointing=recompute", engine=engine(name))
    assert_same_training(log(one)[:3], log(tmp_path / "two"))


def test_context_parallel_trains_skipped_positions_as_one_process(main, engine, tmp_path: Path) -> None:
    changes = (*SPLIT, "data.positions=pose")
    main(tmp_path / "one", *changes)
    finish(tmp_path / "two", *changes, engine=engine("context_parallel"))
    assert_same_training(log(tmp_path / "one"), log(tmp_path / "two"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("name", ["fsdp2", "context_parallel"])
def test_two_gpus_give_the_losses_of_one(name: str, engine, tmp_path: Path) -> None:
    """With torch's ring attention."""
    changes = (*SPLIT, "data.length=1024")
    file = engine(name)
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    for output, words in (("one", ["--num_processes", "1"]), ("two", ["--config_file", str(file)])):
        arguments = [str(RECIPE), "--config", str(TINY), f"output={tmp_path / output}", *SMALL, *changes]
        port = ["--main_process_port", str(free_port())]
        run = subprocess.run([*launch, *words, *port, *arguments], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-9000:]
    for alone, together in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)


def test_two_machines_give_the_losses_of_one_process(whole: Path, tmp_path: Path) -> None:
    """Two launchers, as on two machines, with one CPU process each instead of eight GPUs."""
    bundled = yaml.safe_load((RECIPE.parent / "accelerate/fsdp2_two_machines.yaml").read_text())
    bundled |= {"num_processes": 2, "main_process_ip": "127.0.0.1"}
    file, output, port = tmp_path / "engine.yaml", tmp_path / "two", str(free_port())
    file.write_text(yaml.safe_dump(bundled))
    machines = []
    for rank in range(2):
        words = command(output, "training.steps=3", engine=file)
        words[words.index("--main_process_port") + 1] = port
        words[words.index(str(file)) + 1 : words.index(str(file)) + 1] = ["--machine_rank", str(rank)]
        machines.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [machine.communicate()[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)[-9000:]
    assert_same_training(log(whole)[:3], log(output))
    assert json.loads((output / "figures.json").read_text())["processes"] == 2


@pytest.mark.parametrize(
    ("changes", "fsdp"),
    [
        (["trainable={kind: full}"], {}),
        (["training.precision=bf16", "training.gradient_checkpointing=recompute"], {}),
        ([], {"offload_params": True}),
        (["extension.method=dynamic_yarn"], {}),
        (["training.mlp_tokens=48", "training.gradient_checkpointing=recompute"], {}),
        (["training.distillation=0.5", *SHORT], {}),
    ],
    ids=["full", "bf16", "offloaded", "in attention", "tiled", "distilled"],
)
def test_fsdp2_trains_what_one_process_trains(
    changes: list[str], fsdp: dict[str, bool], main, engine, tmp_path: Path
) -> None:
    one, two, full = tmp_path / "one", tmp_path / "two", changes == ["trainable={kind: full}"]
    changes += ["training.steps=3"] + ([] if full else ["trainable.dropout=0.0", "merge=true"])
    main(one, *changes)
    finish(two, *changes, engine=engine("fsdp2", **fsdp))
    loose = 1e-3 if "training.precision=bf16" in changes else 1e-5
    for alone, together in zip(log(one), log(two), strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=loose)
    ids = torch.arange(2, 702)[None]  # beyond the trained 512
    with torch.no_grad():
        alone, together = (ctxext.load(run / ("model" if full else "merged"))(ids).logits for run in (one, two))
    torch.testing.assert_close(together, alone, atol=100 * loose, rtol=0)


EVALUATION = (
    "evaluation={text: bundled, lengths: [512], depths: 2, trials: 1, windows: 2, every: 2, mid_training_trials: 1, "
    "mid_training_windows: 1}"
)


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_a_sharded_model_is_evaluated_in_training_as_a_whole_one(name: str, main, engine, tmp_path: Path) -> None:
    one, two, changes = tmp_path / "one", tmp_path / "two", ("training.steps=2", "trainable.dropout=0.0", EVALUATION)
    main(one, *changes)
    finish(two, *changes, engine=engine(name))
    alone, together = (
        [json.loads(line) for line in (run / "mid_training.jsonl").read_text().splitlines()] for run in (one, two)
    )
    assert [each["step"] for each in together] == [0, 2]
    for looked, expected in zip(together, alone, strict=True):
        assert looked["tail_loss"] == pytest.approx(expected["tail_loss"], rel=1e-5)
        assert looked["passkey"] == expected["passkey"]


def test_fsdp2_resumes_bit_for_bit_with_dropout(engine, tmp_path: Path) -> None:
    undisturbed, disturbed, file = tmp_path / "undisturbed", tmp_path / "disturbed", engine("fsdp2")
    finish(undisturbed, "training.steps=9", engine=file)
    assert killed(disturbed, random.Random(2), "training.steps=9", engine=file) < 9
    assert "Resuming from" in finish(disturbed, "training.steps=9", engine=file)
    assert outcome(disturbed) == outcome(undisturbed)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled config of stages, on one novel, with the steps of `training.steps` in each."""
    tree = yaml.safe_load((TINY.parent / "tiny_yarn_stages.yaml").read_text())
    for stage in tree["stages"]:
        del stage["training"]["steps"]
    tree["data"]["sources"] = [{"path": str(RECIPE.parent / "data/austen/northangerabbey.txt"), "name": "novel"}]
    path = tmp_path_factory.mktemp("staged") / "staged.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_stages_that_are_killed_go_on_bit_for_bit(staged: Path, tmp_path: Path) -> None:
    whole, disturbed, changes = tmp_path / "whole", tmp_path / "killed", ("training.steps=8",)
    finish(whole, *changes, config=staged)
    process = start(disturbed, *changes, config=staged)
    while process.poll() is None and len(log(disturbed / "stage-2")) < 4:
        time.sleep(0.01)
    kill(process.pid)
    process.communicate()
    assert len(log(disturbed / "stage-2")) < 8
    said = finish(disturbed, *changes, config=staged)
    assert "stage-1 is finished" in said
    assert "Resuming from" in said
    for stage in "stage-1", "stage-2":
        assert outcome(disturbed / stage) == outcome(whole / stage)
    assert "stage-2 is finished" in finish(disturbed, *changes, config=staged)

    merge(whole / "stage-1/adapter", tmp_path / "merged")
    before, after = (load_file(at / "model.safetensors") for at in (tmp_path / "merged", whole / "stage-2/base"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    rope = json.loads((whole / "stage-2/base/config.json").read_text())["rope_parameters"]
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (4, 512)
    merged = AutoModelForCausalLM.from_pretrained(whole / "stage-2/merged")
    ids = torch.arange(2, 702)[None]
    with torch.no_grad():
        expected = ctxext.load(whole / "stage-2/adapter")(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-3, rtol=1e-3)


STAGED = ("training.steps=2", "trainable={kind: full}", "stages.1.merge=false")


def test_stages_of_two_processes_give_the_losses_of_one(main, staged: Path, tmp_path: Path) -> None:
    main(tmp_path / "1", *STAGED, EVALUATION, config=staged)
    finish(tmp_path / "2", *STAGED, EVALUATION, processes=2, config=staged)
    for stage in "stage-1", "stage-2":
        assert_same_training(log(tmp_path / "1" / stage), log(tmp_path / "2" / stage))
    first, second = (json.loads((tmp_path / f"2/stage-{k}/figures.json").read_text())["measured"] for k in (1, 2))
    assert first["variants"]["none"] == second["variants"]["none"]  # the original model
    # Of the weights of the first stage, at twice their length.
    assert first["variants"]["untrained"]["short_loss"] != second["variants"]["untrained"]["short_loss"]


def test_stages_under_fsdp2_give_the_losses_of_one_process(main, engine, staged: Path, tmp_path: Path) -> None:
    main(tmp_path / "1", *STAGED, config=staged)
    finish(tmp_path / "2", *STAGED, config=staged, engine=engine("fsdp2"))
    for stage in "stage-1", "stage-2":
        assert_same_training(log(tmp_path / "1" / stage), log(tmp_path / "2" / stage))


@pytest.mark.parametrize("given", ["adapter", "merged"])
def test_a_run_starts_from_an_adapter_as_from_what_it_merges_into(
    given: str, main, whole: Path, tmp_path: Path
) -> None:
    merged = merge(whole / "adapter", tmp_path / "merged")
    changes = (f"model={whole / 'adapter' if given == 'adapter' else merged}", "extension.factor=8", "training.steps=2")
    with pytest.raises(ValueError, match="existing='replace'"):
        main(tmp_path / "refused", *changes)
    said = main(tmp_path / "run", *changes, "extension.existing=replace")
    assert "trained at 512 tokens, extended to 4,096" in said
    start, base = (load_file(at / "model.safetensors") for at in (merged, tmp_path / "run/base"))
    assert all(torch.equal(tensor, base[name]) for name, tensor in start.items())
    rope = json.loads((tmp_path / "run/base/config.json").read_text())["rope_parameters"]
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (8, 512)
    ctxext.load(tmp_path / "run/adapter")


def test_a_finished_run_of_a_constant_schedule_is_lengthened_bit_for_bit(main, tmp_path: Path) -> None:
    whole, longer = tmp_path / "whole/run", tmp_path / "longer/run"  # results name the model by its folder
    changes = ("training.schedule=constant", "training.checkpoint_every=2", EVALUATION)
    main(whole, *changes, "training.steps=6")
    main(longer, *changes, "training.steps=4")
    trained = json.loads((longer / "figures.json").read_text())["measured"]
    merged = merge(longer / "adapter", longer / "merged")
    assert f"is finished. next: ctxext eval {merged}" in main(longer, *changes, "training.steps=4")
    said = main(longer, *changes, "training.steps=6")
    assert outcome(longer) == outcome(whole)
    assert "4 steps of 6 are done." in said
    assert f"{merged} was not merged from these weights: remove it" in said
    assert f"next: ctxext merge {longer / 'adapter'} -o {merged}" in said
    with prepared(merged, "ada/merged") as push:
        assert f"{longer / 'adapter'} has other weights than were merged" in push.notes()[0]
    for name in "mid_training.jsonl", "results.jsonl":  # what was saved before is not taken for what is saved now
        assert (longer / name).read_bytes() == (whole / name).read_bytes()
    assert json.loads((longer / "figures.json").read_text())["measured"] != trained
    with pytest.raises(ValueError, match="has trained 6 steps, more than the 5"):
        main(longer, *changes, "training.steps=5")


def test_early_stopping_saves_the_weights_of_the_lowest_loss_and_resumes_bit_for_bit(main, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    changes = (
        "training.schedule=constant", "training.warmup_steps=0", "training.learning_rate=1e-2",
        "training.early_stopping=2", "training.keep_checkpoints=1", EVALUATION,
        "data.sources=[{path: ../data/austen/northangerabbey.txt}]", "extension.factor=2",
    )  # fmt: skip
    main(whole, *changes, "training.steps=20")
    losses = {
        line["step"]: line["tail_loss"]
        for line in map(json.loads, (whole / "mid_training.jsonl").open())
        if line["step"]
    }
    figures, best = json.loads((whole / "figures.json").read_text()), min(losses, key=losses.__getitem__)
    assert figures["saved_step"] == best
    assert len(log(whole)) == figures["took"]["steps"] == best + 4 < 20
    kept = [load_file(path / "trained.safetensors") for path in checkpoints(whole / "checkpoints")]
    assert len(kept) == 2  # the best and the last
    saved = {tensor.double().sum().item() for tensor in load_file(whole / "adapter/adapter_model.safetensors").values()}
    sums = [{t.double().sum().item() for name, t in each.items() if name.startswith("parameter/")} for each in kept]
    assert saved <= sums[0]
    assert not saved & sums[1]

    main(resumed, *changes, "training.steps=3")  # killed, so to say
    main(resumed, *changes, "training.steps=20")
    for file in "log.jsonl", "adapter/adapter_model.safetensors":
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()


def test_what_saves_memory_changes_no_loss(main, tmp_path: Path) -> None:
    losses, gradients = {}, "training.gradient_checkpointing"
    for change in (f"{gradients}=none", f"{gradients}=recompute", f"{gradients}=offload", "training.loss=stock",
                   "training.mlp_tokens=48"):  # fmt: skip
        main(tmp_path / change, "training.steps=3", "trainable.dropout=0.0", change)
        losses[change] = [line["loss"] for line in log(tmp_path / change)]
    for change, saved in losses.items():
        assert saved == pytest.approx(losses[f"{gradients}=none"], rel=1e-5), change


def test_a_checkpoint_of_other_settings_is_refused_and_stays(main, whole: Path) -> None:
    before = outcome(whole)
    with pytest.raises(ValueError, match=r"from a run with other settings: training\.seed is 1, was 0"):
        main(whole, "training.seed=1")
    with pytest.raises(ValueError, match="was not extended as in the settings"):
        main(whole, "extension.method=pi")
    assert outcome(whole) == before


def test_figures_of_an_earlier_model_are_seen_before_the_training(main, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.jsonl").write_text(Header({}, {}, {"trained": {}}, {"trained_length": 512}).line() + "\n")
    with pytest.raises(FileExistsError, match="holds results of an earlier run"):
        main(tmp_path / "run", "evaluation={text: bundled, lengths: [512]}")


def test_a_base_of_other_weights_is_not_taken_for_this_one(recipe, tmp_path: Path) -> None:
    (settings,), folder = read_settings(TINY), tmp_path / "base"
    assert recipe.extended_base(MODEL, folder, **settings.extension.arguments()) == folder
    recipe.extended_base(MODEL, folder, **settings.extension.arguments())  # it may stand there already
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="holds other weights than"):
        recipe.extended_base(other, folder, **settings.extension.arguments())


def test_a_loss_that_is_no_number_stops_the_run_names_the_batch_and_keeps_the_checkpoint(main, tmp_path: Path) -> None:
    output = tmp_path / "diverges"
    bounds = ("training.learning_rate=1e30", "training.warmup_steps=0", "training.checkpoint_every=1")
    with pytest.raises(FloatingPointError, match=r"step 2: the loss is .*novels#"):
        main(output, *bounds)
    assert not (output / "adapter").exists()
    (last,) = checkpoints(output / "checkpoints")
    assert last.name == "step-00000001"
    load_file(last / "trained.safetensors")


def test_a_dry_run_says_what_it_would_take_and_trains_nothing(main, tmp_path: Path) -> None:
    said = main(tmp_path / "dry", "--dry-run")
    assert "Estimate: about" in said
    assert "GiB per process" in said
    assert [*tmp_path.iterdir()] == []


def test_the_stages_of_the_bundled_config_are_estimated_each_at_its_length(main, small, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    model = small("llama", max_position_embeddings=8192, **sizes)
    config, novel = TINY.parent / "llama3_8b_128k_stages.yaml", RECIPE.parent / "data/austen/emma.txt"
    changes = (f"model={model}", f"data.sources=[{{path: {novel}}}]", "data.processes=null", "training.precision=fp32")
    said = main(tmp_path / "runs", *changes, "--dry-run", config=config, small=())
    for length, tokens in ("32,768", "262,144"), ("131,072", "1,048,576"):
        assert f"trained at 8,192 tokens, extended to {length}." in said
        assert f"each step reads {tokens} tokens: 100.0% are text" in said
    assert said.count("Estimate: about") == 2
    assert said.count("A checkpoint every 5 steps") == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("longest", "is_said"), [(300, True), (512, True), (600, False)])
def test_documents_within_the_trained_length_are_warned_of(main, longest: int, is_said: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        main(tmp_path, "data.length=1024", *(f"data.sources.{k}.max_document={longest}" for k in (0, 1)), "--dry-run")
    assert any("no longer distance is trained" in str(each.message) for each in caught) == is_said


def test_rows_within_the_trained_length_are_warned_of(main, tmp_path: Path) -> None:
    joined = ("data.length=512", "data.documents=joined", "data.sources=[{path: ../data/austen/emma.txt}]")
    for changes in ("data.length=512",), joined:
        with pytest.warns(UserWarning, match="no row has more than the trained 512 tokens"):
            main(tmp_path, *changes, "--dry-run")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        main(tmp_path, *joined, "data.positions=pose", "--dry-run")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("training.step=9",), "unknown key 'training.step'; did you mean 'training.steps'?"),
        (("training.micro_batch_size=4", "engine.processes=2"), "the settings requested 2 processes, got 1"),
        (("data.sources.0.path=nowhere.txt",), "nowhere.txt was not found"),
        (("extension.target_length=512", "extension.factor=null"), "covers 512 tokens"),
        (("model=nobody/nothing",), "is not a local folder and could not be downloaded"),
        (("data.length=4096",), "beyond the 2,048 tokens"),
        (("data.length=2048", "data.positions=pose", "data.documents=joined"), "leave none to skip"),
        (("evaluation={text: nowhere.txt}",), "nowhere.txt was not found"),
        (("evaluation={text: bundled, lengths: [1m]}",), "has 1,048,576 tokens, beyond the target of 2,048"),
        (("training.attention=flash_attention_2",), "training.attention=flash_attention_2: FlashAttention2 has been"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    main, tmp_path: Path, changes: tuple[str, ...], said: str
) -> None:
    with pytest.raises((ValueError, RuntimeError, OSError), match=re.escape(said)):
        main(tmp_path / "refused", *changes)
    assert not (tmp_path / "refused").exists()


def test_a_held_out_text_shorter_than_a_window_is_refused(main, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("One two three. Four. " * 20)
    with pytest.raises(ValueError, match=r"short\.txt has [\d]+ tokens, fewer than a window of 2,048"):
        main(tmp_path / "refused", f"evaluation={{text: {tmp_path / 'short.txt'}}}")


@pytest.fixture
def small(tmp_path: Path):
    """A function that saves a small random model of a type, beside the bundled tokenizer."""

    def save(model_type: str, **changes: int) -> Path:
        small_model(model_type, "causal", vocab_size=4096, **changes).save_pretrained(tmp_path / model_type)
        for path in MODEL.glob("tokenizer*"):
            shutil.copy(path, tmp_path / model_type)
        return tmp_path / model_type

    return save


def test_a_longer_table_of_positions_is_trained_and_comes_back_with_its_adapter(main, small, tmp_path: Path) -> None:
    changes = ("extension.method=null", "data.length=256", "trainable.targets=attention", "trainable.embeddings=false")
    main(tmp_path / "run", f"model={small('gpt2', n_positions=128)}", *changes, "evaluation=null", "merge=true")
    adapter, base = tmp_path / "run/adapter", tmp_path / "run/base"
    rows = load_file(adapter / "adapter_model.safetensors")["base_model.model.transformer.wpe.weight"]
    assert len(rows) == 512
    assert not torch.equal(rows, load_file(base / "model.safetensors")["transformer.wpe.weight"])
    ids = torch.arange(500)[None]
    model = ctxext.load(adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
    assert "512 tokens" in (adapter / "README.md").read_text()
    shutil.rmtree(base)
    with pytest.raises(FileNotFoundError, match="the original model, which is not extended"):
        ctxext.load(adapter)


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_length_dependent_method_is_trained_and_comes_back_with_its_result(kind: str, main, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ("extension.method=dynamic_yarn", "training.steps=2", "trainable.dropout=0.0")
    main(run, *(changes if kind == "lora" else (*changes[:2], "trainable={kind: full}")))
    saved = run / ("adapter" if kind == "lora" else "model")
    model, ids = ctxext.load(saved), torch.arange(2, 702)[None]
    assert "2,048 tokens" in (saved / "README.md").read_text()
    with torch.no_grad():
        logits = model(ids).logits
        within = model(ids[:, :512]).logits  # where the RoPE is the original one
        torch.testing.assert_close(logits[:, :512], within, atol=1e-4, rtol=1e-4)
        if kind == "lora":
            assert "dynamic_yarn" in str(model.get_base_model().context_extension)
            with pytest.raises((OSError, ValueError), match="extended by ctxext"):
                AutoPeftModelForCausalLM.from_pretrained(saved)
            merge(saved, run / "merged")
            torch.testing.assert_close(ctxext.load(run / "merged")(ids).logits, logits, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="was not extended as in the settings"):
        main(run, *changes[1:])


@pytest.mark.parametrize(("model_type", "why"), [("bloom", "its slopes follow"), ("gptj", "no RoPE parameters")])
def test_what_a_record_alone_carries_is_not_trained_on(main, small, model_type: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"cannot be expressed in the config\.json of {model_type} because .*{why}"):
        main(tmp_path / "run", f"model={small(model_type)}", "extension.method=null", "evaluation=null")
    assert not (tmp_path / "run").exists()


def test_accelerate_that_would_start_one_process_in_silence_is_refused(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    arguments = [str(RECIPE), "--config", str(TINY), f"output={tmp_path / 'silent'}", *SMALL]
    run = subprocess.run([*launch, *arguments], capture_output=True, text=True)
    assert run.returncode != 0
    assert "the engine is not the requested one" in " ".join(run.stderr.split())


def test_the_estimate_stands_beside_what_was_used(whole: Path) -> None:
    figures = json.loads((whole / "figures.json").read_text())
    assert figures["took"]["seconds"] > 0
    assert figures["estimated"]["seconds"] > 0
    assert figures["estimated"]["peak_bytes"] == pytest.approx(figures["took"]["peak_bytes"], rel=0.5)


@pytest.mark.parametrize("config", ["tiny_yarn_4x", "tiny_yarn_4x.yaml"])
def test_the_command_line_takes_a_config_by_name(config: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ctxext", "finetune", "--config", config, "training.step=1"],
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "did you mean 'training.steps'" in run.stderr
