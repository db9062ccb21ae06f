"""`make engines`: an engine is exact, refused by export, or reported as a defect."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import public, run, subjects
from engines.built import InONNX, InOpenVINO
from engines.conformance import Conformance, EngineError, InLlamaCpp, InMLX, InVLLM
from engines.in_vllm import InVLLMPlugin
from engines.public import METHODS, OnPublicModel
from engines.subjects import FOLDER, OVERRIDES, TARGET, Subject
from engines.transformers_serve import LABELS, PLACES, InTransformersServe, label_logprobs, labels, pieces, read
from transformers import AutoModelForCausalLM

from ctxext import extend_context
from ctxext.export.probe import logprobs_of


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(subjects, "RUNS", tmp_path)
    return tmp_path


class Pretended(Conformance):
    """transformers in the place of an engine, extended as the request says."""

    name = "pretended"
    title = "transformers"

    def ready(self) -> dict[str, Any]:
        return {}

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        return {"base": str(subject.base), "method": method, "factor": 4.0}, ("serve",)

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        return {"base": str(subject.base), "method": "", "factor": 1.0}

    def ask(self, request: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(request["base"], dtype=torch.float32).eval()
        if request["factor"] > 1:
            extend_context(model, request["factor"], request["method"])
        return [logprobs_of(model, ids) for ids in prompts]


@pytest.mark.slow
def test_a_mistake_is_judged_with_as_many_texts_as_asked(runs: Path) -> None:
    part = Pretended(runs, rounds=3)
    request = part.served(Subject("bundled"), "yarn", FOLDER)[0]
    found = part.mistaken("yarn", lambda: {**request, "factor": 8.0}, ("no match",))
    assert (found["right"], found["judged right"], found["verdicts"]) == (True, 3, {"no match": 3})
    assert part.mistaken("yarn", lambda: {**request, "factor": 1.0}, ("no match",))["judged right"] == 0
    record = part.record({"mistake: one": found, "mistake: of before": {"right": True}})
    assert (record["mistakes"], record["mistakes judged right"]) == (4, 4)


@pytest.mark.slow
def test_what_is_served_as_meant_is_exact_and_what_is_not_is_named(runs: Path) -> None:
    part = Pretended(runs)
    found = part.compared(Subject("bundled"), "yarn", FOLDER)
    assert part.exact(found)
    assert found["verdict"] == "applied"
    assert found["mean"] < 1e-6 < found["effect"]
    assert part.exact(part.unextended(Subject("bundled")))
    request = part.served(Subject("bundled"), "yarn", FOLDER)[0]
    for factor, verdict in ((1.0, "ignored"), (8.0, "no match")):
        wrong = part.judged(Subject("bundled"), "yarn", {**request, "factor": factor})
        assert wrong["verdict"] == verdict
        assert wrong["mean"] > 0.01
        served = partial(dict, request, factor=factor)
        assert part.mistaken("yarn", served, (verdict,))["right"]
        assert not part.mistaken("yarn", served, ("applied",))["right"]


def test_an_engine_that_does_not_start_is_neither_exact_nor_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise EngineError("no kernel")

    monkeypatch.setattr(Pretended, "judged", broken)
    part = Pretended(runs)
    found = part.compared(Subject("bundled"), "yarn", FOLDER)
    assert found["error"] == "no kernel"
    kept = {"environment": {}, "one yarn": found, "two yarn": {"refused": "because"}, "three yarn": {"mean": 1e-6},
            "one unextended": {"mean": 1e-6}}  # fmt: skip
    record = part.record(kept)
    assert (record["neither"], record["exact"], record["refused by export"]) == (["one yarn"], 1, 1)
    differs = part.record({**kept, "one unextended": {"mean": 0.9}})
    assert (differs["neither"], differs["of these not exact"]) == ([], ["one yarn"])
    assert part.mistaken("yarn", dict, ("does not start",))["right"]


@pytest.mark.parametrize("engine", [InVLLM, InMLX, InLlamaCpp, InTransformersServe, InONNX, InOpenVINO, InVLLMPlugin])
def test_every_method_has_a_cell_in_every_form(engine: type[Conformance], runs: Path) -> None:
    part = engine(runs)
    names = [cell.name for cell in part.cells()]
    assert len(names) == len(set(names))
    for subject in part.subjects:
        for method in subject.methods:
            assert {f"{subject.name} {method} {form}" for form in part.forms} <= set(names)


def test_the_public_model_is_extended_by_every_rope_type_that_a_config_may_have(runs: Path) -> None:
    def rope_type(method: str) -> str:
        folder = Subject("bundled").extended(method)
        return json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"]

    types = {method: rope_type(method) for method in Subject("bundled").methods}
    chosen = [types[method] for method in METHODS]
    assert sorted(chosen) == sorted(set(types.values()))
    names = [cell.name for cell in OnPublicModel(runs).cells()]
    assert len(names) == len(set(names)) == 4 + 6 * 4


@pytest.mark.slow
def test_an_engine_may_round_on_the_public_model_but_not_differ(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "ENGINES", (Pretended,))
    part = OnPublicModel(runs, tiny=True)
    kept = {cell.name: cell.run() for cell in part.cells()}
    record = part.record({**kept})
    assert (record["exact"], record["neither"], record["differs unextended"]) == (1, [], {})
    cell = kept["pretended yarn"]
    for mean, exact in ((2.9e-5, True), (3.1e-5, False)):
        served = part.record({**kept, "pretended yarn": {**cell, "mean": mean}})
        assert served["cells"]["pretended yarn"]["exact"] is exact
    ignored = part.record({**kept, "pretended yarn": {**cell, "verdict": "ignored"}})
    assert ignored["neither"] == ["pretended yarn"]


def test_the_mistakes_of_vllm_are_mistakes(runs: Path) -> None:
    """None of their overrides is the one that export prints."""
    part = InVLLM(runs)
    mistakes = [cell for cell in part.negatives()]
    right = json.dumps(Subject("bundled").export("vllm", "yarn", OVERRIDES).config["rope_parameters"])
    assert len(mistakes) >= 14
    for cell in mistakes:
        (_, request, expected) = cell.run.args
        request = request()
        assert expected
        assert right not in request["arguments"][4] or "text_config" in request["arguments"][4]


def test_labels_are_compared_where_the_marks_are_up_to_the_target() -> None:
    texts = pieces(TARGET - 1)
    ids = [token for each in read(texts) for token in each]
    assert (len(texts), len(labels())) == (PLACES, LABELS)
    assert 0.95 * TARGET < len(ids) < TARGET
    assert read(list(labels())) == [[token] for token in labels().values()]
    model = AutoModelForCausalLM.from_pretrained(Subject("bundled").base, dtype=torch.float32).eval()
    found = label_logprobs(model, texts[:3])
    short = torch.tensor([[token for each in read(texts[:2]) for token in each]])
    expected = model(short).logits[0, -1, list(labels().values())].double().log_softmax(-1)
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_transformers_serving_the_unextended_folder_is_not_exact(runs: Path) -> None:
    part, subject = InTransformersServe(runs), Subject("bundled")
    assert part.exact(part.judged(subject, "yarn", part.served(subject, "yarn", FOLDER)[0]))
    wrong = part.judged(subject, "yarn", part.plain(subject, subject.target))
    assert not part.exact(wrong)
    assert wrong["mean"] > 0.01
    assert part.exact(part.unextended(subject))
    with pytest.raises(EngineError, match="returned 500"):
        part.answered(str(runs / "nowhere"), pieces(TARGET - 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "exact"), [("llama.cpp", 4), ("mlx-lm", 2), ("transformers-serve", 2), ("onnxruntime-genai", 4)]
)
def test_the_small_engines_are_exact(
    engine: str,
    exact: int,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """mlx-lm gets its environment from the package index, unless it is in the cache."""
    monkeypatch.setattr("engines.conformance.RUNS", runs)
    arguments = ["--tiny", "--only", engine, "--output", str(runs), "--state", str(runs / "state")]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run.main()
    said = capsys.readouterr().out
    assert f"{exact} exact, 0 refused by export, 0 neither" in said
    assert ended.value.code == 0
    record = json.loads((runs / f"{engine}.json").read_text())
    assert record["complete"]
    assert not record["differs unextended"]
