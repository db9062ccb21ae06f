"""Stages: each has the weights of the one before and the config of the original model, and is run once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from survey.small import small_model

from ctxext.assets import MODEL
from ctxext.extension.metadata_file import weights_fingerprint
from ctxext.hub.checkpoint import extend_folder, extended_json
from ctxext.training.settings import Settings, read_settings
from ctxext.training.stages import FIGURES, is_finished, starting_point, what_next

CONFIG = Path(__file__).parents[2] / "recipes/configs/tiny_yarn_stages.yaml"


def stages_in(output: Path, *changes: str) -> list[Settings]:
    return read_settings(CONFIG, [f"output={output}", *changes])


def finish(settings: Settings) -> None:
    settings.saved.mkdir(parents=True, exist_ok=True)
    (Path(settings.output) / FIGURES).write_text(json.dumps({"settings": settings.model_dump(mode="json")}))


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """The bundled model with RoPE scaling of its own."""
    shutil.copytree(MODEL, tmp_path / "scaled")
    config = tmp_path / "scaled/config.json"
    content = json.loads(config.read_text())
    content["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1250.0}
    config.write_text(json.dumps({**content, "max_position_embeddings": 1024}))
    return tmp_path / "scaled"


@pytest.mark.parametrize("existing", ["refuse", "compose"])
def test_a_stage_counts_its_factor_from_the_original_model(existing: str, scaled: Path, tmp_path: Path) -> None:
    original = scaled if existing == "compose" else MODEL
    model = f"model={original if existing == 'compose' else 'bundled'}"
    changes = (model, f"extension.existing={existing}", "trainable={kind: full}", "stages.1.merge=false")
    stages = stages_in(tmp_path / "run", *changes)
    first, second = (stage.extension.arguments() for stage in stages)
    extend_folder(original, stages[0].saved, **first)
    weights = stages[0].saved / "model.safetensors"
    trained = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    weights.unlink()  # it is linked
    save_file(trained, weights, {"format": "pt"})

    start = starting_point(stages, 1, tmp_path / "run/stage-2/start")
    assert start.original == original
    assert start.name == original.name
    assert weights_fingerprint(start.folder) == weights_fingerprint(stages[0].saved) != weights_fingerprint(original)
    assert extended_json(start.folder, **second)[1] == extended_json(original, **second)[1]
    assert starting_point(stages, 1, tmp_path / "dry/start", alone=True).folder == original


def test_a_finished_stage_is_recognised_by_its_settings(tmp_path: Path) -> None:
    stages = stages_in(tmp_path)
    assert not is_finished(stages, 0)
    finish(stages[0])
    assert is_finished(stages, 0)
    assert is_finished(stages_in(tmp_path, "training.checkpoint_every=3", "tracker=null"), 0)
    assert not is_finished(stages, 1)
    for change in ("stages.0.training.steps=61", "training.seed=1", "stages.0.merge=true", "evaluation.windows=25"):
        assert not is_finished(stages_in(tmp_path, change), 0), change
    constant = ("training.schedule=constant", "stages.0.training.steps=70")
    finish(stages_in(tmp_path, *constant)[0])
    assert is_finished(stages_in(tmp_path, *constant), 0)
    assert not is_finished(stages_in(tmp_path, constant[0], "stages.0.training.steps=80"), 0)


def test_a_stage_that_another_started_from_is_not_trained_again(tmp_path: Path) -> None:
    stages = stages_in(tmp_path)
    finish(stages[0])
    Path(stages[1].output).mkdir()
    assert is_finished(stages, 0)
    with pytest.raises(ValueError, match=r"stage-1 holds no result .* or remove .*stage-2"):
        is_finished(stages_in(tmp_path, "stages.0.training.steps=61"), 0)
    assert not is_finished(stages_in(tmp_path, "stages.1.training.steps=61"), 1)


def test_every_stage_is_checked_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="covers 512 tokens"):
        starting_point(stages_in(tmp_path, "stages.1.extension={target_length: 512}"), 0, tmp_path / "start")
    small_model("gpt2", "causal", n_positions=128).save_pretrained(tmp_path / "gpt2")
    learned = (f"model={tmp_path / 'gpt2'}", "extension.method=null")
    with pytest.raises(ValueError, match=r"stage 2: .* makes new weights .* Train such a model in one stage"):
        starting_point(stages_in(tmp_path, *learned), 0, tmp_path / "start")


def test_a_merged_folder_is_offered_only_if_it_was_merged_from_the_adapter(tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapter.mkdir()
    assert what_next(adapter) == f"next: ctxext merge {adapter} -o {merged}"
    merged.mkdir()
    assert what_next(adapter).startswith(f"{merged} was not merged from these weights: remove it")
    (merged / "config.json").write_text("{}")
    assert what_next(adapter).startswith(f"next: ctxext eval {merged} ")
    for name, content in ("adapter_config.json", "{}"), ("adapter_model.safetensors", ""):
        (adapter / name).write_text(content)
    (merged / "ctxext.json").write_text("{")
    assert what_next(adapter).startswith(f"{merged} was not merged from these weights: remove it")
    assert what_next(tmp_path / "model").startswith(f"next: ctxext eval {tmp_path / 'model'} ")


def test_a_stage_that_extends_less_than_the_one_before_is_warned_of(tmp_path: Path) -> None:
    stages = stages_in(tmp_path, "stages.0.extension={factor: 8}", "stages.1.extension={factor: 4}")
    with pytest.warns(UserWarning, match="stage 2 extends to 2,048 tokens, fewer than the 4,096 of the stage before"):
        starting_point(stages, 0, tmp_path / "start")
