"""`ctxext fit` as a person meets it, and what becomes of the file that it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import Result
from families import LENGTH, logits, tiny_model, token_ids
from finetuning import RECIPE, SMALL, TINY
from fitting.test_episodes import texts
from live import assert_unchanged, plain_rope, snapshot
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import ctxext
from ctxext import extend_context
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli import commands
from ctxext.evals.prompts import Prompter
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import RAMPS, GradientSettings
from ctxext.methods import LongRoPE, make_method

IDS = token_ids(2 * LENGTH)
TEXT = PERSUASION.read_text(encoding="utf-8")[:20_000]
QUICK = ("--factor", 2, "--evaluations", 3, "--start", "yarn")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    """The error, as one line without a frame."""
    return " ".join(f"{result.exception} {result.stderr}".replace("│", " ").split())


def model_on_disk(folder: Path, **changes: Any) -> Path:
    """A small random model beside the bundled tokenizer."""
    tiny_model("llama", vocab_size=4096, initializer_range=0.1, **changes).save_pretrained(folder)
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `other` (with another theta), `prose.txt`, and `fitted.json` of the first."""
    desk = tmp_path_factory.mktemp("desk")
    model_on_disk(desk / "model")
    model_on_disk(desk / "other", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    (desk / "prose.txt").write_text(TEXT, encoding="utf-8")
    result = run("fit", desk / "model", "-o", desk / "fitted.json", "--text", desk / "prose.txt", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert re.search(rf"plan: up to 3 evaluations of \d+ texts? of {2 * LENGTH} tokens, by gradient", said(result))
    assert re.search(r"tokens to read; a backward pass .* about .* on this machine: \d+ tokens took", said(result))
    assert "passkey loss" in " ".join(result.stderr.replace("┃", " ").split())
    return desk


def test_the_file_says_what_was_found_and_how(desk: Path) -> None:
    saved = read_saved(desk / "fitted.json")
    method, about = saved.method, saved.about
    assert isinstance(method, LongRoPE)
    assert (method.factor, method.fitted_to) == (2.0, (10_000.0, LENGTH))
    assert (about["by"], about["model"], about["start"]) == ("gradient", "model", "yarn")
    assert (about["trained_length"], about["target_length"]) == (LENGTH, 2 * LENGTH)
    assert about["losses"].keys() == {"yarn", "fitted"}
    assert len(about["history"]) == about["settings"]["evaluations"] == 3
    assert about["text"].startswith("prose.txt ")


@pytest.mark.parametrize("start", RAMPS)
def test_where_no_step_was_better_the_start_is_saved_and_said(desk: Path, tmp_path: Path, start: str) -> None:
    """One evaluation is that of the start, and rounding does not make it better than itself."""
    result = run(
        *("fit", desk / "model", "-o", tmp_path / "start.json", "--text", desk / "prose.txt", "--factor", 2),
        *("--start", start, "--evaluations", 1, "--rows", 1),
    )
    assert f"no better than {start} on held-out text, so {start} itself is saved" in said(result)
    assert read_saved(tmp_path / "start.json").about["kept_start"]


def test_a_search_is_a_fit_by_another_name(desk: Path) -> None:
    searched = desk / "searched.json"
    result = run(
        *("fit", desk / "model", "-o", searched, "--text", desk / "prose.txt", "--factor", 2),
        *("--by", "longrope2", "--evaluations", 4, "--rows", 1),
    )
    assert result.exit_code == 0, said(result)
    plan = rf"plan: up to 4 evaluations of 1 text of {2 * LENGTH} tokens, by longrope2 +[\d,]+ tokens to read +about "
    assert re.search(plan, said(result))
    assert re.search(r"Critical dimension: [24], 6 in theory", said(result)) or "dimension: 6, 6 in" in said(result)
    method, about = read_saved(searched).method, read_saved(searched).about
    assert (about["by"], about["start"], about["settings"]["evaluations"]) == ("longrope2", "yarn", 4)
    assert about["losses"].keys() == {"yarn", "fitted"}
    assert len(about["history"]) == 5
    found = LongRoPE(factor=2.0, long_factor=about["long_factor"], fitted_to=(10_000.0, LENGTH))
    assert method == (make_method("yarn", 2.0) if about["kept_start"] else found)
    searched.unlink()


RELOAD = """
import sys
sys.modules["ctxext"] = None
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[4]))
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    torch.save(model(input_ids=torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.mark.slow
def test_a_fitted_model_is_reloaded_bitwise_without_ctxext(desk: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(desk / "model").eval()
    plain = logits(model, IDS)
    extend_context(model, method=str(desk / "fitted.json"))
    model.save_pretrained(tmp_path / "fitted")
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [tmp_path / "fitted", tmp_path / "ids.pt", tmp_path / "logits.pt", torch.get_num_threads()]
    subprocess.run([sys.executable, "-c", RELOAD, *map(str, arguments)], check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model, IDS))
    assert not torch.allclose(logits(model, IDS), plain, atol=1e-2)


def finetune(model: Path, method: Path, output: Path) -> None:
    """The recipe in this process, for two steps."""
    spec = importlib.util.spec_from_file_location("recipe_on_a_fit", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    changes = (f"model={model}", f"extension.method={method}", "extension.factor=null", "training.steps=2")
    changes += (f"data.sources=[{{path: {model.parent / 'prose.txt'}, name: prose}}]",)
    try:
        recipe.main(["--config", str(TINY), f"output={output}", *SMALL, *changes])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_an_adapter_that_was_trained_on_a_fit_finds_it_again(desk: Path, tmp_path: Path) -> None:
    finetune(desk / "model", desk / "fitted.json", tmp_path / "run")
    found = ctxext.load(tmp_path / "run/adapter")
    table = next(module.inv_freq for name, module in found.named_modules() if name.endswith("rotary_emb"))
    method = read_saved(desk / "fitted.json").method
    rope = plain_rope(tiny_model("llama"))
    torch.testing.assert_close(table.double(), rope.inv_freq / method.rescale_factors(rope), rtol=1e-6, atol=0)


MEASURED = ("--tasks", "perplexity", "--lengths", 128, "--windows", 1)


def test_a_fit_is_measured_beside_the_named_methods_and_by_itself(desk: Path, tmp_path: Path) -> None:
    path, out = desk / "fitted.json", tmp_path / "results.jsonl"
    other = shutil.copy(path, tmp_path / "other.json")
    method = json.loads(path.read_text())["method"]
    for command in (("compare", "--methods", f"yarn,{path},{other}", "--factor", 2), ("eval", "--method", path)):
        result = run(command[0], desk / "model", *command[1:], *MEASURED, "-o", out)
        assert result.exit_code == 0, said(result)
        header, *records = map(json.loads, out.read_text().splitlines())
        assert header["variants"][str(path)]["extension"]["method"] == method
        assert str(path) in [record["variant"] for record in records]
        out.unlink()


def test_a_fit_of_another_model_is_refused_wherever_a_method_is_named(desk: Path, tmp_path: Path) -> None:
    words = "was fitted to a model with theta 10000 trained at 64 tokens, but this one has theta 500000"
    method, other = desk / "fitted.json", desk / "other"
    for command in (
        ("compare", other, "--methods", f"yarn,{method}", "--factor", 2, *MEASURED, "-o", tmp_path / "r.jsonl"),
        ("eval", other, "--method", method, *MEASURED, "-o", tmp_path / "r.jsonl"),
        ("extend", other, "--method", method, "-o", tmp_path / "out"),
        ("export", other, "--method", method, "--engine", "vllm"),
    ):
        result = run(*command)
        assert result.exit_code != 0
        assert words in said(result), command
    with pytest.raises(ValueError, match=words):
        finetune(other, method, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_fit_as_one_does(desk: Path, tmp_path: Path) -> None:
    def commands_for(name: str) -> list[list[str]]:
        common = ("fit", desk / "model", "--text", desk / "prose.txt")
        out = tmp_path / name
        return [[str(argument) for argument in (*common, *QUICK, "--minutes", 60, "-o", out / "fitted.json")]]

    assert run(*commands_for("one")[0]).exit_code == 0
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    script = Path(__file__).with_name("fit_in_processes.py")
    done = subprocess.run(
        [*launch, "--main_process_port", "0", str(script), json.dumps(commands_for("two")), str(tmp_path)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (read_saved(tmp_path / who / "fitted.json") for who in ("one", "two"))
    assert two.method.long_factor == pytest.approx(one.method.long_factor, rel=1e-5)
    assert two.method.attention_factor == pytest.approx(one.method.attention_factor, rel=1e-5)
    for alone, together in zip(one.about["history"], two.about["history"], strict=True):
        assert all(together[kind] == pytest.approx(alone[kind], rel=1e-4) for kind in ("short", "text"))
    assert (tmp_path / "texts-0").read_text() == (tmp_path / "texts-1").read_text() == texts()


def quick_fit(model: Any) -> SavedMethod:
    settings = GradientSettings(evaluations=1, start="yarn")
    return fit(model, Prompter(AutoTokenizer.from_pretrained(MODEL)), TEXT, 2.0, settings=settings)


def test_what_cannot_be_extended_is_refused_before_the_work_and_a_model_in_training_left_so() -> None:
    """Where every layer slides over a window within the trained length, no λ changes anything that was not trained."""
    model = tiny_model("mistral", vocab_size=4096, sliding_window=32).train()
    before = snapshot(model, run=False)
    with pytest.raises(ValueError, match="every layer with RoPE has a sliding window of 32 tokens"):
        quick_fit(model)
    assert_unchanged(model, before)
    model = tiny_model("falcon", vocab_size=4096, hidden_dropout=0.5)
    quiet = quick_fit(model)
    model.train()
    before = snapshot(model, run=False)
    assert quick_fit(model).about["losses"] == quiet.about["losses"]
    assert_unchanged(model, before)


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--factor", 400), "too few to fit at 25,600.*Pass a longer text, or a smaller factor"),
        (("--factor", 1), "covers 64 tokens"),
        (("--factor", 0.5), "factor must be >= 1, got 0.5"),
        (("--factor", 2, "--target-length", 128), "factor= or target_length=, not both"),
        (("--evaluations", 0), "evaluations must be >= 1, got 0"),
        (("--rows", -1), "rows must be >= 1, got -1"),
        (("--minutes", 0), "minutes must be a finite number > 0"),
        (("--factor", 2, "--minutes", 1e-5), "not enough to try the starts.*Pass at least [0-9.]+ minutes"),
        (("--start", "yarm"), "did you mean 'yarn'"),
        (("--start", "dca"), "cannot start from 'dca'"),
        (("--by", "longrope"), "cannot be made by 'longrope'; did you mean 'longrope2'?"),
        (("--by", "longrope2", "--start", "yarn"), "--start is for --by gradient, got --by longrope2. Drop --start"),
        (("--by", "longrope2", "--retrieval", 1), "--retrieval is for --by gradient"),
        (("--by", "longrope2", "--factor", 2, "--minutes", 1e-5), "not enough to evaluate one candidate"),
        (("--text", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("-o", "fitted"), "must end in .json"),
        (("-o", "folder.json"), "is a folder"),
        (("-o", "prose.txt/fitted.json"), "cannot be written"),
    ],
    ids=lambda case: " ".join(map(str, case)) if isinstance(case, tuple) else "",
)
def test_a_mistake_gets_a_remedy_and_leaves_no_trace(
    arguments: tuple[object, ...], words: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    Path("folder.json").mkdir(exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in desk.rglob("*")}
    defaults = () if "-o" in arguments else ("-o", "new.json")
    text = () if "--text" in arguments else ("--text", "prose.txt")
    result = run("fit", "model", *defaults, *text, *arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, (SystemExit, ValueError, OSError))
    assert re.search(words, said(result)), said(result)
    assert {path: path.stat().st_mtime_ns for path in desk.rglob("*")} == before


def test_a_checkpoint_with_an_extension_beside_its_config_is_refused(desk: Path, tmp_path: Path) -> None:
    assert run("extend", desk / "model", "--method", "self_extend", "-o", tmp_path / "late").exit_code == 0
    result = run("fit", tmp_path / "late", "-o", tmp_path / "new.json", "--text", desk / "prose.txt", *QUICK)
    assert "is already extended by self_extend" in said(result)


def test_answers_in_the_model_s_own_words_are_refused() -> None:
    model = tiny_model("llama", vocab_size=4096)
    prompter = Prompter(AutoTokenizer.from_pretrained(MODEL), answer_tokens=64)
    with pytest.raises(ValueError, match="scores answers token by token"):
        fit(model, prompter, TEXT, 2.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_has_its_gradients_where_they_are_switched_off(mode: Any) -> None:
    prompter = Prompter(AutoTokenizer.from_pretrained(MODEL))
    settings = GradientSettings(evaluations=2, rows=1, start="yarn")
    methods = []
    for context in (nullcontext, mode):
        model = tiny_model("llama", vocab_size=4096, initializer_range=0.1)
        with context():
            methods.append(fit(model, prompter, TEXT, 2.0, settings=settings).method)
    assert methods[0] == methods[1]
