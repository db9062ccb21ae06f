"""A warning about four-bit kernels is printed where a model has them, and only there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ctxext.assets import MODEL
from ctxext.cli import app
from ctxext.hub.checkpoint import load_model
from ctxext.utils import four_bits


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["ctxext", "methods"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit):
        app()
    yield
    four_bits.release_warnings()


def loaded(in_4bit: bool) -> Any:
    model = SimpleNamespace(is_loaded_in_4bit=in_4bit)
    model.eval = lambda: model
    return load_model(MODEL, SimpleNamespace(from_pretrained=lambda folder, **_: model))


def test_the_warning_waits_for_a_model_in_four_bits(command_line: None, caplog: pytest.LogCaptureFixture) -> None:
    four_bits.LOGGER.warning("no kernel")
    loaded(in_4bit=False)
    assert caplog.messages == []
    loaded(in_4bit=True)
    assert caplog.messages == ["no kernel"]


def test_extending_in_python_prints_nothing() -> None:
    code = (
        "from transformers import AutoConfig, AutoModelForCausalLM; from ctxext import extend_context; "
        "from ctxext.assets import MODEL; "
        "extend_context(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""
