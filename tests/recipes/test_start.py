"""The page from a model to a verified server: its commands are those that run, and they run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ctxext.assets import MODEL

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import start

COMMANDS = [step.command for step in start.STEPS]


def test_the_page_has_the_commands_and_the_server_that_the_script_runs() -> None:
    text = start.PAGE.read_text(encoding="utf-8")
    assert start.commands_of(text) == COMMANDS
    assert f"```python\n{start.SERVER}```" in text
    assert text.startswith(start.INTRODUCTION)
    assert text.endswith(start.END)
    assert re.search("^APPLIED ", text, re.M)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    said = start.run(MODEL, tmp_path)
    described, extended, exported, _, verified = (said[command] for command in COMMANDS)
    assert "yarn ×4: 512 → 2,048 tokens" in described
    assert "plain transformers loads it" in extended
    assert "smollm2-32k.verify.json, of short texts" in exported
    assert re.search("^APPLIED ", verified, re.M)
    assert start.commands_of(start.page(said)) == COMMANDS
