"""Route by length: two real servers behind LiteLLM, which gets its environment from the package index or the cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engines import route


@pytest.mark.slow
def test_short_prompts_get_the_plain_model_s_answer_and_long_ones_the_extended_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["route.py", "--fallback-only", "--output", str(tmp_path / "route.json")])
    with pytest.raises(SystemExit) as ended:
        route.main()
    assert ended.value.code == 0
    rows = json.loads((tmp_path / "route.json").read_text())["requests"]["context_window_fallbacks"]
    answered = {row["tokens"]: row["answered by"] for row in rows}
    assert answered[511] == "plain"
    assert answered[512] == answered[2047] == "extended"
    assert answered[2048] is None
    short = [row for row in rows if row["tokens"] < 512]
    assert all(row["largest difference from plain"] == 0 < row["of extended from plain"] for row in short)
