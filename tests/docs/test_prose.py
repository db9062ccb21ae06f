"""tools/prose: a page with a discouraged term or a long sentence fails, and a plain one passes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "prose"
pytestmark = pytest.mark.skipif(
    shutil.which("npx") is None or not (FOLDER / "node_modules").is_dir(), reason="needs make prose, which installs it"
)


def findings(page: Path, text: str) -> list[str]:
    """What textlint says of a page: the first line of each finding."""
    page.write_text(text, encoding="utf-8")
    command = ["npx", "--no-install", "textlint", "--format", "json", str(page)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    found = [each["message"].partition("\n")[0] for file in json.loads(done.stdout) for each in file["messages"]]
    assert done.returncode == (1 if found else 0), done.stderr
    return found


def test_discouraged_terms_are_found_in_prose_and_tables_but_not_in_code(tmp_path: Path) -> None:
    text = (
        "# Late rotation\n\nThe *shipped* model finds all keys. `survey` is code.\n\n| a |\n|---|\n| its reach |\n\n"
        "The survey is beside [the price](page.md).\n"
    )
    expected = [
        ("Late rotation", "in-attention RoPE"), ("shipped", "bundled"), ("finds all keys", "finds passkeys"),
        ("its reach", "maximum context length"), ("survey", "compatibility sweep"), ("beside", "next to"),
        ("the price", "short-context regression"),
    ]  # fmt: skip
    found = findings(tmp_path / "page.md", text)
    for wrong, right in expected:
        assert any(each.lower().startswith(f"{wrong} => {right}".lower()) for each in found), (wrong, found)


def test_a_long_sentence_is_found_and_a_plain_page_passes(tmp_path: Path) -> None:
    plain = "The cache holds pre-RoPE keys. Attention keys are keys, and a version is pinned.\n"
    assert findings(tmp_path / "page.md", plain) == []
    (found,) = findings(tmp_path / "page.md", "The model reads " + "one token after another, " * 10 + "and stops.\n")
    assert "exceeds the maximum sentence length" in found
