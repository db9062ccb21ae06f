"""The plugin that runs in-attention methods in vLLM. It needs vLLM's environment, which `make engines` creates."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import subjects
from engines.environments import VLLM
from engines.in_vllm import BATCHED, CONTINUED, NEW_TOKENS, InAttentionSubject, InVLLMPlugin
from engines.subjects import FOLDER, TARGET, Subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (VLLM.folder / "environment.json").is_file(),
        reason=f"{VLLM.folder} does not exist; `python benchmarks/engines/run.py --only vllm` creates it",
    ),
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(subjects, "RUNS", tmp_path)
    return tmp_path


class WithoutPlugin(InVLLMPlugin):
    def variables(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("method", ["self_extend", "dynamic_yarn"])
def test_vllm_computes_what_ctxext_load_computes(method: str, runs: Path) -> None:
    """For a prompt read in parts, and for three sequences decoded in one batch, one of them from cached keys."""
    part, subject = InVLLMPlugin(runs), InAttentionSubject("bundled")
    assert TARGET > 3 * BATCHED
    found = part.compared(subject, method, FOLDER)
    assert part.exact(found), found
    assert found["effect"] > 1000 * found["mean"]
    continued = found["continuations"]
    assert continued["greedy"] == continued["tokens"] == NEW_TOKENS * len(CONTINUED)
    assert continued["read from the cache"][0] > 0


def test_stock_vllm_ignores_the_extension(runs: Path) -> None:
    part, subject = WithoutPlugin(runs), InAttentionSubject("bundled")
    found = part.compared(subject, "self_extend", FOLDER)
    assert found["mean"] == pytest.approx(found["effect"], rel=1e-3)
    assert not part.exact(found)


def test_a_folder_that_a_config_expresses_is_refused(runs: Path) -> None:
    part = InVLLMPlugin(runs)
    found = part.refused("is not extended by a method with in-attention", Subject("bundled"), "ntk", ())
    assert found["right"], found["said"]
