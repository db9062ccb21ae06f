"""The page from a .jsonl file to a served, verified model: its commands are those that run, and they run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from ctxext.cli import commands

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("from_data_to_server", ROOT / "docs/from_data_to_server.py")
assert spec is not None
assert spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = script  # where its dataclass looks up its module
spec.loader.exec_module(script)

COMMANDS = [step.command for step in script.STEPS]


def test_the_page_has_the_commands_that_the_script_runs() -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.commands_of(text) == COMMANDS
    assert f"```yaml\n{script.CONFIG}```" in text
    for step in script.STEPS:
        assert step.text in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_has_its_flags(command: str) -> None:
    _, name, *words = shlex.split(command)
    made = get_command(commands).commands[name]  # type: ignore[attr-defined]
    made.make_context(name, words)  # raises for an unknown flag or a missing argument


def test_the_page_names_no_folder_of_the_machine_that_made_it() -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w/:.-])/(home|tmp|root|work|Users)/", text)


@pytest.mark.slow
def test_the_commands_of_the_page_run_and_each_names_the_next(tmp_path: Path) -> None:
    said = script.run(tmp_path)
    finetuned, merged, measured, pushed, served, probed, verified = (said[command] for command in COMMANDS)
    assert f"next: {COMMANDS[1]}" in finetuned
    assert "next: ctxext eval run/merged -o run/merged.jsonl" in merged
    assert "next: ctxext push run/merged OWNER/NAME --results run/merged.jsonl --dry-run" in measured
    assert f"next: {COMMANDS[3].removesuffix(' --dry-run')}" in pushed
    assert pushed.count("### Measured") == pushed.count("### Load it") == 1
    assert "| | baseline | untrained | trained |" in pushed
    assert str(tmp_path) not in "".join(said.values())
    assert "Uvicorn running" in served
    assert re.search("^APPLIED ", probed, re.M)
    assert re.search("^APPLIED ", verified, re.M)
    # The measurement of the merged model is accepted as well.
    assert script.commands_of(script.page(said)) == COMMANDS
