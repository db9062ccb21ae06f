"""Setting up a run: its trackers and its attention."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from families import tiny_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ctxext.training.launch import EngineSettings, make_accelerator
from ctxext.training.log import Log
from ctxext.training.settings import read_settings
from ctxext.training.setup import check_attention, start_trackers

STAGES = Path(__file__).parents[2] / "recipes/configs/tiny_yarn_stages.yaml"


def test_each_stage_has_the_curves_of_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    stages = read_settings(STAGES, [f"output={tmp_path}"])
    tracked = {"log_with": "tensorboard", "project_dir": stages[0].output}
    try:
        accelerator = make_accelerator(EngineSettings(), mixed_precision="no", **tracked)
        for number, settings in enumerate(stages, 1):
            Path(settings.output).mkdir()
            start_trackers(accelerator, settings)
            log = Log(Path(settings.output) / "log.jsonl", 0, accelerator)
            for step in 1, 2:
                log.add({"step": step, "loss": 10.0 * number + step}, tokens_per_second=5.0)
        accelerator.end_training()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    for number, settings in enumerate(stages, 1):
        events = EventAccumulator(f"{settings.output}/ctxext")
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("loss")] == [
            (step, 10 * number + step) for step in (1, 2)
        ]
        assert [event.value for event in events.Scalars("tokens_per_second")] == [5, 5]


def test_an_attention_implementation_that_a_model_lacks_is_refused_with_another(tmp_path: Path) -> None:
    for family in ("llama", "gemma2"):
        tiny_model(family).save_pretrained(tmp_path / family)
    check_attention(tmp_path / "llama", "sdpa")
    check_attention(tmp_path / "gemma2", "eager")
    with pytest.raises(ValueError, match=r"sdpa: .*Gemma2.*Set training\.attention to eager\."):
        check_attention(tmp_path / "gemma2", "sdpa")
    with pytest.raises(ValueError, match=r"flash_attention_2: FlashAttention2 .*Set training\.attention to sdpa\."):
        check_attention(tmp_path / "llama", "flash_attention_2")
    (tmp_path / "llama/config.json").write_text('{"model_type": "t5", "architectures": ["T5Model"]}')
    check_attention(tmp_path / "llama", "sdpa")  # loading reports what is wrong with it
