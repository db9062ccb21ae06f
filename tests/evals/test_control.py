"""The control: is this model able to do the task in this form, before anything is compared?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals import control as module
from ctxext.evals.choice import recommended
from ctxext.evals.control import ENOUGH, Control, Form, control, found_in, other_forms
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Needle, Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.report import write_report
from ctxext.evals.results import Header, Results, read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.screen import asked_as_it_answers, summary_table
from ctxext.evals.summary import Summary
from ctxext.evals.targets import LiveModel, Variant

# A form in which the bundled model fails: the answer is begun with a line that it never saw.
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}{{ '<s>1 2 3 4 5 6 7 8 9\n' * 9 }}"
)
GRID = Grid(retrieval=(Passkey(),), lengths=(384, 700), depths=(0.5,), trials=1)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    torch.manual_seed(0)
    bundled = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    return {"bundled": bundled, "random": AutoModelForCausalLM.from_config(bundled.config).eval()}


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def text() -> Haystack:
    prose = PERSUASION.read_text(encoding="utf-8")[:40_000]
    return Haystack.from_text(prose, AutoTokenizer.from_pretrained(MODEL))


def test_a_model_that_answers_keeps_its_form_and_nothing_is_said(models, tokenizer, text) -> None:
    target = LiveModel(models["bundled"], Prompter(tokenizer, "base"), "model")
    found = control(target, [Passkey()], text, longest=700, others=other_forms(target.prompter))
    assert found.form == Form("base")
    assert list(found.found) == [str(Form("base"))]
    assert found.found[str(found.form)]["passkey"] >= ENOUGH
    assert found.said() == ""
    assert found.length <= 512  # its trained length
    # A handful of samples, whose common beginnings are read once.
    assert target.engine.tokens < 10 * 512


def test_a_model_that_does_not_answer_in_one_form_is_asked_in_another(models, tokenizer, text) -> None:
    target = LiveModel(models["bundled"], Prompter(tokenizer, "chat"), "model")
    found = control(target, [Passkey()], text, longest=400, others=other_forms(target.prompter))
    tried = [share["passkey"] for share in found.found.values()]
    assert tried[0] < ENOUGH <= tried[-1]
    assert found.form == Form("base")
    assert str(Form("base")) in found.said()
    assert found.describe()["used"] == str(Form("base"))


@pytest.mark.slow
def test_a_model_that_answers_in_no_form_keeps_the_first_and_that_is_said(models, tokenizer, text) -> None:
    target = LiveModel(models["random"], Prompter(tokenizer, "chat"), "model")
    found = control(target, [Passkey(), Needle()], text, longest=400, others=other_forms(target.prompter))
    assert found.form == Form("chat")
    assert len(found.found) == 3
    assert found.failing == {"passkey": 0.0, "needle": 0.0}
    assert "retrieval says little" in found.said()


BASE, CHAT_FORM = str(Form("base")), str(Form("chat"))


@pytest.mark.parametrize(
    ("used", "found", "said"),
    [
        (
            "base",
            {BASE: {"passkey": 1.0, "niah_single_1": 0.0}},
            f"fails niah_single_1 ({BASE}: passkey 100%, niah_single_1 0%). Not counted: niah_single_1, which says "
            f"little about an extension. Counted: passkey. Using: {BASE}.",
        ),
        (
            "chat",
            {CHAT_FORM: {"a": 1.0, "b": 0.5, "c": 0.0}, BASE: {"a": 0.0, "b": 1.0, "c": 1.0}},
            f"fails b, c in the first prompt form, and no other form solves every task ({CHAT_FORM}: a 100%, b 50%, c "
            f"0%; {BASE}: a 0%, b 100%, c 100%). Not counted: b, c, which says little about an extension. Counted: a. "
            f"Using: {CHAT_FORM}.",
        ),
        (
            "chat",
            {CHAT_FORM: {"a": 0.0}, BASE: {"a": 0.5}},
            f"fails a in the first prompt form, and no other form solves every task ({CHAT_FORM}: a 0%; {BASE}: a "
            f"50%). So retrieval says little about an extension, and is not counted. Using: {CHAT_FORM}.",
        ),
        (
            "base",
            {CHAT_FORM: {"a": 1.0, "b": 0.0}, BASE: {"a": 1.0, "b": 1.0}},
            f"fails b in the first prompt form ({CHAT_FORM}: a 100%, b 0%; {BASE}: a 100%, b 100%). Using instead: "
            f"{BASE}.",
        ),
    ],
)
def test_what_is_said_names_the_tasks_that_failed_and_those_that_count(
    used: Any, found: dict[str, dict[str, float]], said: str
) -> None:
    assert Control(Form(used), 512, found, "key").said() == f"Within 512 tokens the baseline {said}"


def test_forms_to_fit_in_are_those_that_teacher_forcing_scores(tokenizer) -> None:
    forms = other_forms(Prompter(tokenizer, "chat"), begun=True)
    assert forms == [Form("base")]
    tokenizer.chat_template = None
    assert other_forms(Prompter(tokenizer)) == []


@pytest.mark.slow
def test_the_form_stands_in_the_results_and_an_interrupted_run_keeps_it(
    models, tokenizer, text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    path = tmp_path / "results.jsonl"
    target = LiveModel(models["bundled"], Prompter(tokenizer), "model")
    asked = asked_as_it_answers(target, GRID, text, path)
    assert (target.prompter.style, asked.prompter.style) == ("chat", "base")
    assert "the baseline fails passkey in the first prompt form" in capsys.readouterr().err
    Runner(asked, text, GRID, beyond=True).run(path, [Variant()])
    found = Control.of_header(read_results(path).header.about)
    assert found is not None
    assert found.form == Form("base")
    assert len(found.found) == 2
    # Read from the file, not measured again; and with other tasks the form remains that of the file.
    again = LiveModel(models["bundled"], Prompter(tokenizer), "model")
    with monkeypatch.context() as patch:
        patch.setattr(module, "found_in", lambda *_: pytest.fail("the control was measured again"))
        assert asked_as_it_answers(again, GRID, text, path).prompter.style == "base"
    more = Grid(retrieval=(Passkey(), Needle()), lengths=(384, 700), depths=(0.5,), trials=1)
    assert asked_as_it_answers(again, more, text, path).prompter.style == "base"


def test_a_task_that_failed_its_control_is_shown_and_does_not_decide(models, tokenizer, text, tmp_path: Path) -> None:
    path, grid = tmp_path / "results.jsonl", replace(GRID, texts=(Perplexity(),), windows=4)
    target = LiveModel(models["random"], Prompter(tokenizer, "base"), "model")
    variants = [
        Variant(),
        Variant("yarn", {"method": "yarn", "factor": 2}),
        Variant("pi", {"method": "pi", "factor": 2}),
    ]
    asked = asked_as_it_answers(target, grid, text, path, free=False)
    Runner(asked, text, grid, beyond=True).run(path, variants)
    summary = Summary(read_results(path))
    assert (summary.retrieval_tasks, summary.deciding_tasks) == (["passkey"], [])
    said = recommended(summary)
    assert set(said.ranking) == {"yarn", "pi"}  # by their losses
    assert "Not counted: passkey (0%)" in said.text
    assert "retrieval accuracy" not in said.text
    assert "passkey (not counted)" in " ".join(str(column.header) for column in summary_table(summary).columns)
    write_report([read_results(path)], tmp_path / "report.html")
    assert "<h4>passkey (not counted)</h4>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    # Another task in the same file does not make this one count.
    needles = replace(grid, retrieval=(Needle(),))
    asked = asked_as_it_answers(target, needles, text, path, free=False)
    Runner(asked, text, needles, beyond=True).run(path, variants)
    assert Summary(read_results(path)).deciding_tasks == []


@pytest.mark.parametrize("about", [3, {"form": 3}, {"form": {"style": "base"}, "length": 8, "found": [], "key": ""}])
def test_a_broken_control_is_refused_by_file_and_field(about: Any, tmp_path: Path) -> None:
    header = Header({"seed": 0}, {}, {}, {"trained_length": 8, "lengths": [16], "control": about})
    with pytest.raises(ValueError, match=r"results\.jsonl has a broken about\.control in its header"):
        Summary(Results(tmp_path / "results.jsonl", header, []))


class Killed(Exception):
    """The process, by somebody else."""


@pytest.mark.slow
def test_a_control_that_is_killed_is_repeated_with_the_same_result(
    models, tokenizer, text, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[Control, int]:
        target = LiveModel(models["bundled"], Prompter(tokenizer, "chat"), "model")
        found = control(target, [Passkey()], text, longest=400, others=other_forms(target.prompter))
        return found, target.engine.tokens

    once, tokens = run()
    with monkeypatch.context() as patch:

        def killed(target: LiveModel, *how: Any) -> float | None:
            if target.prompter.style == "base":
                raise Killed
            return found_in(target, *how)

        patch.setattr(module, "found_in", killed)
        with pytest.raises(Killed):
            run()
    assert run() == (once, tokens)
    # Ten prompts a form, of which each five share their beginning.
    assert tokens < len(once.found) * 10 * 400


def test_a_form_that_somebody_chose_is_kept(models, tokenizer, text, capsys) -> None:
    target = LiveModel(models["bundled"], Prompter(tokenizer, "chat"), "model")
    assert asked_as_it_answers(target, GRID, text, free=False).prompter.style == "chat"
    assert "retrieval says little" in capsys.readouterr().err


def test_the_control_is_a_function_of_its_seed(models, tokenizer, text) -> None:
    target = LiveModel(models["bundled"], Prompter(tokenizer, "base"), "model")
    first, same, other = (control(target, [Passkey()], text, longest=200, others=[], seed=seed) for seed in (0, 0, 1))
    assert first == same
    assert first.key != other.key
