"""Settings: what a YAML file may say, and how it is told what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxext.assets import MODEL
from ctxext.hub.checkpoint import extended_json
from ctxext.training.settings import Settings, read_settings

CONFIGS = sorted((Path(__file__).parents[2] / "recipes/configs").glob("*.yaml"))
TINY = next(path for path in CONFIGS if path.name == "tiny_yarn_4x.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_bundled_config_is_valid_and_says_where_it_was_measured(path: Path) -> None:
    for settings in read_settings(path):
        assert settings.measured_on
        assert settings.training.steps_of(settings.data.length or 2048) > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("training.step=5", "unknown key 'training.step'; did you mean 'training.steps'?"),
        ("trianing.steps=5", "unknown key 'trianing'; did you mean 'training'?"),
        ("steps=5", "unknown key 'steps'; did you mean 'training.steps'?"),
        ("extension.options.length=4kk", "'4kk' is not a number of tokens; write 131072 or 128k"),
        ("data.sources.0.wieght=2", "unknown key 'data.sources.0.wieght'; did you mean 'data.sources.0.weight'?"),
        ("data.sources=[{path: a.txt}, {path: b/a.txt}]", "two sources are named a.txt"),
        ("engine.process=2", "unknown key 'engine.process'; did you mean 'engine.processes'?"),
        ("data.sources=a.jsonl", "data.sources must be a list, such as [{path: ...}], got 'a.jsonl'"),
        ("data.sources=[a.jsonl]", "data.sources.0 must hold settings, such as path: ..., got 'a.jsonl'"),
        ("data.sources=[]", "data.sources is empty."),
        ("data.sources.0.retrieval=true", "retrieval of source 0 must be a number, got true"),
        ("data.sources=[{file: a.jsonl}]", "unknown key 'data.sources.0.file'. Known: path, name, weight, "),
        ("engine=fsdp2", "engine must hold settings, such as kind: ..., got 'fsdp2'"),
        ("trainable.targets=q_proj", "trainable.targets must be attention, all-linear, or a list such as [q_proj, "),
        ("evaluation.lengths=2048", "evaluation.lengths must be a list, such as [a, b], got 2048"),
        ("stage=[]", "unknown key 'stage'; did you mean 'stages'?"),
        ("training.steps=null", "training: needs its length: set steps or tokens."),
        ("training.attention=foo", "unknown attention implementation 'foo'. Known: eager, "),
        ("training.attention=paged|eager", "unknown attention implementation 'paged|eager'"),
        ("training.attention=ctxext_documents", "unknown attention implementation 'ctxext_documents'"),
        ("training.betas=[0.9, 0.9, 0.9]", "training.betas must have 2 values, got [0.9, 0.9, 0.9]"),
        ("training.betas=[0.9, false]", "training.betas must be a number, got false"),
        ("evaluation.lengths=[true, 512]", "evaluation.lengths must be a number, got true"),
        ("engine.processes=true", "engine.processes must be a number, got true"),
        ("extension.options=[]", "extension.options must be keys and values, such as {a: 1}, got []"),
        ("extension.options={1: 2}", "extension.options: a key must be text, got 1"),
        ("training={yes: 1}", "a key must be text, got True"),
        ("training={null: 1}", "a key must be text, got None"),
        ("training.learning_rate=-1", "training.learning_rate must be greater than 0, got -1"),
        ("trainable.kind=full", "embeddings, norms, rank, targets needs kind: lora"),
        ("data.sources.9.weight=1", "not an index into a list of 2"),
        ("data.sources.².weight=1", "not an index into a list of 2"),
        ("data.sources.0.weight=0", "weight"),
        ("data.positions=pose", "Set documents: joined"),
        ("training.tokens=1m", "Set one of them to null."),
        ("training.micro_batch_size=3", "must be a multiple of micro_batch_size, got 4 and 3"),
        ("extension.factor=0.5", "extension.factor must be at least 1, got 0.5"),
        ("training.steps=true", "training.steps must be a number, got true"),
        ("evaluation=none", "evaluation must hold settings, such as text: ..., or be null, got 'none'"),
        ("output=' '", "output must not be empty, got ' '"),
        ("data.sources.0.path=''", "path of source 0 must not be empty, got ''"),
        ("trainable.targets=[q_proj, '']", "trainable.targets must not be empty, got ''"),
        ("trainable.rank=true", "trainable.rank must be a number, got true"),
        ("training.mixed_window=maybe", "training.mixed_window must be true or false, got 'maybe'"),
        ("data.length=0", "data.length must be at least 1"),
        ("training.seed=134217729", "training.seed must be at most 134217728"),
        ("extension.target_length=lots", "not a number of tokens"),
        ("model", "write KEY=VALUE"),
        ("model.name=x", "and has no keys"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_settings(TINY, [change])


def minimal(folder: Path, **more: Any) -> Path:
    """A file that sets only what has no default."""
    tree = {"model": "bundled", "output": "run", "data": {"sources": [{"path": "a.txt"}]}, "training": {"steps": 1}}
    (folder / "minimal.yaml").write_text(yaml.safe_dump({**tree, **more}))
    return folder / "minimal.yaml"


def test_no_error_blames_a_setting_that_has_its_default(tmp_path: Path) -> None:
    path = minimal(tmp_path, evaluation={"text": "bundled", "windows": 2})
    (settings,) = read_settings(path)
    assert settings.measured_on is None
    assert settings.evaluation is not None
    assert settings.evaluation.windows == 2
    with pytest.raises(ValueError, match="evaluation: mid_training_windows must be at most windows"):
        read_settings(path, ["evaluation.mid_training_windows=3"])
    with pytest.raises(ValueError, match=r"got 8 \(its default\) and 3\."):
        read_settings(path, ["training.micro_batch_size=3"])
    with pytest.raises(ValueError, match=r"evaluation.windows must be at least 2, got 1") as error:
        read_settings(path, ["evaluation.windows=1"])
    assert "mid_training" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("training.attention=flash_attention_2", "training.attention: sdpa (got flash_attention_2)"),
        ("training.loss=stock", "training.loss: chunked (got stock)"),
        ("data.documents=separate", "data.documents: joined (got separate)"),
        ("trainable.dropout=0.1", "trainable.dropout: 0.0 (got 0.1)"),
    ],
)
def test_what_context_parallel_would_silently_change_is_refused(change: str, said: str) -> None:
    path = next(path for path in CONFIGS if path.stem == "qwen3_8b_128k_context_parallel")
    with pytest.raises(ValueError, match=re.escape(said)):
        read_settings(path, [change])


@pytest.mark.parametrize("setting", ["training.mixed_window=true", "training.distillation=0.5"])
@pytest.mark.parametrize("changes", [["data.documents=joined"], ["data.documents=joined", "data.positions=pose"]])
def test_what_goes_by_the_length_of_documents_needs_them_apart(setting: str, changes: list[str]) -> None:
    with pytest.raises(ValueError, match=r"goes by the length of each document.*Set separate\."):
        read_settings(TINY, [setting, *changes])


@pytest.mark.parametrize("change", ["trainable={kind: full}", "training.loss=stock"])
def test_distillation_needs_an_adapter_and_the_chunked_loss(change: str) -> None:
    with pytest.raises(ValueError, match=r"compares the model with and without its adapter.*Set lora and chunked\."):
        read_settings(TINY, ["training.distillation=0.5", change])


def test_positions_that_skip_do_not_go_with_ulysses() -> None:
    path = next(path for path in CONFIGS if path.stem == "tiny_pose_4x")
    (settings,) = read_settings(path)
    settings.check_engine("context_parallel")
    with pytest.raises(ValueError, match=r"data\.positions: plain \(got pose\)"):
        settings.check_engine("ulysses")


def test_a_tiled_mlp_is_refused_where_each_tile_would_gather_its_weights() -> None:
    (settings,) = read_settings(TINY, ["training.mlp_tokens=1k"])
    for kind in ("single", "ddp", "fsdp2"):
        settings.check_engine(kind)
    for kind in ("zero3", "ulysses"):
        with pytest.raises(ValueError, match=rf"training\.mlp_tokens does not support {kind}"):
            settings.check_engine(kind)


def test_commands_in_the_recipes_readme_fit_their_launchers() -> None:
    root = CONFIGS[0].parents[2]
    lines = re.findall(r"^\$ accelerate launch (.*)$", (root / "recipes/README.md").read_text(), re.M)
    assert len(lines) == 3
    for line in lines:
        words = line.split()
        file = root / words[words.index("--config_file") + 1] if "--config_file" in words else None
        processes = yaml.safe_load(file.read_text())["num_processes"] if file else 1
        k = words.index("--config")
        training = read_settings(root / words[k + 1], words[k + 2 :])[0].training
        assert training.batch_size % (processes * training.micro_batch_size) == 0, line


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"training\.step") as error:
        read_settings(TINY, ["training.step=5", "data.lenght=2k"])
    assert "'data.lenght'; did you mean 'data.length'?" in str(error.value)


def test_a_mistake_is_blamed_on_its_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^unknown key 'training\.stepss'"):
        read_settings(TINY, ["training.stepss=3"])
    with pytest.raises(ValueError, match=re.escape(f"{TINY} with training.tokens=1m: training: has steps: ")):
        read_settings(TINY, ["training.tokens=1m"])
    path = tmp_path / "mine.yaml"
    path.write_text(TINY.read_text() + "stepss: 3\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: unknown key 'stepss'")):
        read_settings(path, ["training.steps=3"])


def test_a_frozen_length_is_read_as_other_lengths_are() -> None:
    (settings,) = read_settings(TINY, ["extension.method=dynamic_yarn", "extension.options.length=2k"])
    assert settings.extension.options["length"] == 2048


def test_the_command_line_changes_what_the_file_says() -> None:
    (settings,) = read_settings(TINY, ["training.steps=7", "data.length=1k", "extension.options.beta_fast=16"])
    assert (settings.training.steps, settings.data.length) == (7, 1024)
    assert settings.extension.arguments() == {"method": "yarn", "factor": 4, "existing": "refuse", "beta_fast": 16}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["extension.method=self_extend"], "needs no training"),
        (["extension.method=dca", "extension.options.length=1024"], "needs no training"),
        (["extension.method=yarm"], "did you mean 'yarn'"),
    ],
)
def test_what_needs_no_training_is_not_trained_on(changes: list[str], words: str) -> None:
    """Known before anything is downloaded or written."""
    with pytest.raises(ValueError, match=words):
        read_settings(TINY, changes)


def test_a_pinned_dynamic_method_is_trained_on_as_the_static_one_that_it_is() -> None:
    (settings,) = read_settings(TINY, ["extension.method=dynamic_yarn", "extension.options.length=2048"])
    assert not extended_json(MODEL, **settings.extension.arguments())[0].in_attention


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    # YAML 1.1 takes 1e-4 for a word.
    (settings,) = read_settings(TINY, ["training.learning_rate=1e-4", "training.steps=null", "training.tokens=1m"])
    assert settings.training.learning_rate == 1e-4
    assert settings.training.steps_of(2048) == 2**20 // (4 * 2048)


def test_a_budget_of_less_than_a_step_is_refused() -> None:
    (settings,) = read_settings(TINY, ["training.steps=null", "training.tokens=4k"])
    with pytest.raises(ValueError, match="less than one step"):
        settings.training.steps_of(2048)


def test_a_key_that_is_written_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(TINY.read_text() + "\nmodel: another\n")
    with pytest.raises(ValueError, match="column 1: 'model' is written twice"):
        read_settings(path)
    with pytest.raises(ValueError, match="'steps' is written twice"):
        read_settings(TINY, ["training={steps: 1, steps: 2}"])
    path.write_text("a: &b {model: x}\nc: {<<: *b, model: y}")  # what YAML merges may be written again
    with pytest.raises(ValueError, match="unknown key"):
        read_settings(path)


@pytest.mark.parametrize("there", ["config.json", "adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_a_new_run_replaces_nothing(there: str, tmp_path: Path) -> None:
    (settings,) = read_settings(TINY, [f"output={tmp_path / 'run'}", "merge=true"])
    with settings.base_folder(dry_run=False):
        pass  # a new folder
    file = tmp_path / "run" / there
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    with settings.base_folder(dry_run=True):
        pass
    with pytest.raises(FileExistsError, match=f"{there.partition('/')[0]} exists, and .* has no checkpoints to resume"):
        settings.check_output()
    (tmp_path / "run/checkpoints").mkdir()
    settings.check_output()  # it resumes
    (inside,) = read_settings(TINY, [f"output={file / 'run'}"])
    with pytest.raises(FileExistsError, match=f"{file} is a file"):
        inside.check_output()


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", ""])
def test_what_is_no_tree_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"not valid YAML|must hold keys"):
        read_settings(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="recipes/configs"):
        read_settings(tmp_path / "missing.yaml")


def test_settings_survive_yaml(tmp_path: Path) -> None:
    (settings,) = read_settings(TINY)
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True)))
    assert read_settings(path) == [settings]


def test_a_checkpoint_is_bound_to_what_changes_the_result_and_to_nothing_else() -> None:
    (settings,) = read_settings(TINY)
    (free,) = read_settings(TINY, ["output=elsewhere", "training.checkpoint_every=1", "evaluation=null", "merge=true"])
    assert free.binding() == settings.binding()
    for change in ("training.seed=1", "data.length=1024", "extension.method=pi", "trainable.rank=8"):
        assert read_settings(TINY, [change])[0].binding() != settings.binding(), change
    assert {key.partition(".")[0] for key in settings.binding()} < set(Settings.model_fields)


def test_a_constant_schedule_is_not_bound_to_the_number_of_its_steps() -> None:
    for schedule, is_bound in ("constant", False), ("linear", True), ("cosine", True):
        (settings,) = read_settings(TINY, [f"training.schedule={schedule}"])
        assert ("training.steps" in settings.binding()) == is_bound
        assert "training.steps" in settings.binding("steps")
        rates = [[settings.training.learning_rate_at(step, steps) for step in range(40)] for steps in (50, 100)]
        assert (rates[0] == rates[1]) != is_bound


def test_early_stopping_is_bound_to_what_it_is_decided_by() -> None:
    with pytest.raises(ValueError, match=r"Set evaluation\.every"):
        read_settings(TINY, ["training.early_stopping=3", "evaluation.every=null"])
    on = "training.early_stopping=3"
    (settings,), (without,) = read_settings(TINY, [on]), read_settings(TINY)
    for change in ("evaluation.every=7", "evaluation.text=other.txt", "evaluation.mid_training_windows=3"):
        assert read_settings(TINY, [on, change])[0].binding() != settings.binding()
        assert read_settings(TINY, [change])[0].binding() == without.binding()
    assert read_settings(TINY, [on, "evaluation.trials=7"])[0].binding() == settings.binding()
    assert read_settings(TINY, [on, "evaluation.trials=7"])[0].binding("evaluation") != settings.binding("evaluation")


STAGES = next(path for path in CONFIGS if path.stem == "tiny_yarn_stages")


def test_a_stage_changes_the_settings_above_it_alone() -> None:
    (whole,) = read_settings(TINY)
    first, second = read_settings(STAGES, ["output=out", "stages.1.training.seed=3", "stages.1.data.length=256"])
    assert (first.output, second.output) == ("out/stage-1", "out/stage-2")
    assert (first.extension.factor, second.extension.factor) == (2, 4)
    assert (first.training.seed, second.training.seed) == (0, 3)
    assert (first.training.learning_rate, second.training.learning_rate) == (1e-3, 5e-4)
    assert first.extension.method == second.extension.method == "yarn"
    assert first.data == whole.data == second.data.model_copy(update={"length": None})
    assert (first.merge, second.merge) == (False, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["stages.1.training.step=5"], "stages.1: unknown key 'training.step'; did you mean 'training.steps'?"),
        (["training.step=5"], "unknown key 'training.step'; did you mean 'training.steps'?"),
        (
            ["stages.1.training.tokens=1m"],
            f"{STAGES} with stages.1.training.tokens=1m: stages.1: training: has steps: ",
        ),
        (["stages.2.training.steps=5"], "not an index into a list of 2"),
        (["stages=[]"], "stages must be a list of what each stage changes"),
        (["stages=[{training: 5, merge: true}]"], "stages.0: training must hold settings, such as steps: "),
        (["stages.1.model=x", "stages.0.training.precision=fp32"], "model, training.precision must be the same"),
        (["training.steps=5"], "Write stages.0.training.steps=5."),
    ],
)
def test_a_mistake_in_a_stage_is_named_with_the_stage(changes: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        read_settings(STAGES, changes)
    assert str(error.value).count("unknown key") <= 1
