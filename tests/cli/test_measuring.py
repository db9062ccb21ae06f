"""`ctxext eval`, `compare` and `report` as a person meets them: what is printed, written, kept and refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from families import tiny_config, tiny_model
from live_server import CHAT_TEMPLATE, LiveServer
from rich.console import Console
from survey.small import small_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command

from ctxext import YaRN, __version__, extend_config
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli import app, commands, measuring
from ctxext.cli.fit import fit_table
from ctxext.evals.engine import Engine
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import unpacked
from ctxext.evals.results import read_results
from ctxext.evals.screen import print_summary
from ctxext.evals.summary import Summary
from ctxext.extension.method_file import SavedMethod, read_saved
from ctxext.fitting.race import Race
from ctxext.methods import list_methods
from ctxext.models.context import read_context
from ctxext.utils import endpoint

PASSKEY = ("--tasks", "passkey")
SMALL = ("--lengths", "96", "--depths", "1", "--trials", "1", "--windows", "1")
Record = dict[str, Any]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What stands on standard error, without line ends and frames."""
        return " ".join(re.sub("[│╭╮╰╯─]", " ", self.err).split())


def ctxext(*arguments: object) -> Outcome:
    """The command line in this process; typer's CliRunner would skip `app`, which words the errors."""
    out, err, code = StringIO(), StringIO(), 0
    # The command line puts the current folder into sys.path.
    with (
        patch.object(sys, "argv", ["ctxext", *map(str, arguments)]),
        patch.object(sys, "path", [*sys.path]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            app()
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def lines(path: Path) -> tuple[Record, list[Record]]:
    """The header and the samples of a results file, as anybody would read them."""
    header, *records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return header, records


def losses(records: list[Record], variant: str, task: str) -> np.ndarray:
    """In nats, of shape (window, token - 1)."""
    found = [r["losses"] for r in records if (r["variant"], r["task"]) == (variant, task)]
    return np.array([np.frombuffer(b64decode(packed), "<f4") for packed in found]).astype(float)


def regression(records: list[Record], variant: str) -> str:
    return f"{(losses(records, variant, 'short') - losses(records, 'none', 'short')).mean():+.3f}"


def row(records: list[Record], variant: str) -> list[str]:
    """What the table has to say of a variant that was read up to 1,024 tokens."""
    passkeys = [r for r in records if r["task"] == "passkey"]
    cells = []
    for length in sorted({r["length"] for r in passkeys}):
        hits = [r["hit"] for r in passkeys if (r["variant"], r["length"]) == (variant, length)]
        cells += [f"{sum(hits) / len(hits):.0%}"] if hits else []
    read = losses(records, variant, "perplexity")
    if len(read):
        # The first token has no loss.
        cells += [f"{math.exp(part.mean()):.1f}" for part in (read[:, :511], read[:, 511:])]
    if len(read) and len({r["variant"] for r in records}) <= 2:
        n_bytes = sum(r["bytes"] for r in records if (r["variant"], r["task"]) == (variant, "perplexity"))
        cells += [f"{read.sum() / math.log(2) / n_bytes:.3f}"]
    return cells if variant == "none" else [*cells, regression(records, variant)]


def printed(out: str) -> dict[str, list[str]]:
    """The first lines of the table's rows, by the variant."""
    rows = re.findall(r"^ ?([\w-]+) +(\d+% .*)$", out, re.M)
    return {name: cells.split() for name, cells in rows}


# ------------------------------------------------------------------------------------------------------ eval


@pytest.mark.slow
@pytest.mark.parametrize("command", [("eval", MODEL, "--method", "yarn"), ("compare", MODEL, "--methods", "yarn")])
def test_another_model_judges_the_key_tokens_of_documents(command: tuple[Any, ...], tmp_path: Path) -> None:
    """The baseline as judge finds what the baseline finds, and intervals are over documents."""
    chapters = PERSUASION.read_text(encoding="utf-8").split("Chapter ")[1:4]
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": chapter[:6000]}) + "\n" for chapter in chapters))
    how = ("--tasks", "perplexity,key_tokens", "--haystack", documents, "--by-document", "--lengths", 700)
    how = (*command, "--factor", 2, *how, "--setting", "key_tokens.gain=0.3", "--windows", 3)
    masks, headers = {}, {}
    for name, judge in (("own", ()), ("judge", ("--judge", MODEL))):
        outcome = ctxext(*how, *judge, "-o", tmp_path / f"{name}.jsonl")
        assert outcome.code == 0, outcome.err
        headers[name], records = lines(tmp_path / f"{name}.jsonl")
        masks[name] = {r["trial"]: r["mask"] for r in records if r["task"] == "key_tokens"}
    assert masks["own"] == masks["judge"]
    assert len(set(masks["own"].values())) == 3
    assert headers["own"]["tasks"]["key_tokens"]["judge"] is None
    assert headers["judge"]["tasks"]["key_tokens"]["judge"].startswith(f"{MODEL.name} ")
    assert headers["judge"]["about"]["documents"] == 3
    summary = Summary(read_results(tmp_path / "judge.jsonl"))
    loss, (perplexity, _) = summary.key_difference("yarn"), summary.key_tokens("yarn")
    assert loss.n == 3
    assert math.exp(loss.value) == pytest.approx(perplexity)
    assert loss.low < loss.value < loss.high
    refused = ctxext(*command, "--tasks", "passkey", "--judge", MODEL, "-o", tmp_path / "other.jsonl")
    assert "--judge is for key_tokens" in refused.said
    refused = ctxext(*how[:-1], 4, "-o", tmp_path / "other.jsonl")
    assert re.search(r"has 3 documents of 699 tokens or more.*--windows 3", refused.said)
    refused = ctxext(*command, "--by-document", "-o", tmp_path / "other.jsonl")
    assert "--haystack FILE.jsonl" in refused.said


# The spaces are as people write them.
EVAL = ("eval", MODEL, "--method", "yarn", "--tasks", "passkey, perplexity, short", "--lengths", "512, 1k")
EVAL = (*EVAL, "--depths", "2", "--trials", "2", "--windows", "2")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = tmp_path_factory.mktemp("eval") / "new/results.jsonl"
    outcome = ctxext(*EVAL, "-o", path)
    assert outcome.code == 0, outcome.err
    return path, outcome


def test_eval_prints_the_numbers_that_it_wrote(evaluated: tuple[Path, Outcome]) -> None:
    path, outcome = evaluated
    _, records = lines(path)
    assert printed(outcome.out) == {"baseline": row(records, "none"), "yarn": row(records, "yarn")}
    assert "austen-4m, trained at 512 tokens" in outcome.out
    assert f"{len(records)} samples in {path}; ctxext report {path} makes an HTML report" in outcome.err


def test_eval_measures_the_grid_and_the_unextended_model_only_within_its_length(
    evaluated: tuple[Path, Outcome],
) -> None:
    header, records = lines(evaluated[0])
    assert Counter((r["variant"], r["task"], r["length"]) for r in records) == {
        ("none", "passkey", 512): 4,
        ("none", "short", 512): 2,
        ("yarn", "passkey", 512): 4,
        ("yarn", "passkey", 1024): 4,
        ("yarn", "perplexity", 1024): 2,
        ("yarn", "short", 512): 2,
    }
    assert header["variants"]["yarn"]["extension"]["method"]["name"] == "yarn"
    assert [path.name for path in evaluated[0].parent.iterdir()] == ["results.jsonl"]


def test_eval_again_measures_nothing(evaluated: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    path, outcome = evaluated
    before = path.stat().st_mtime_ns, path.read_bytes()
    for work in ("forced", "generate", "losses"):
        monkeypatch.setattr(Engine, work, lambda *_: pytest.fail("the model was run again"))
    again = ctxext(*EVAL, "-o", path)
    assert (again.code, again.out) == (0, outcome.out)
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before


def test_eval_and_compare_share_a_file(evaluated: tuple[Path, Outcome], tmp_path: Path) -> None:
    """What one measured of an extension the other does not measure again."""
    path = tmp_path / "results.jsonl"
    shutil.copy(evaluated[0], path)
    _, before = lines(path)
    arguments = ("compare", MODEL, "--methods", "yarn,pi", *EVAL[4:], "-o", path)
    outcome = ctxext(*arguments)
    assert outcome.code == 0, outcome.err
    header, after = lines(path)
    assert list(header["variants"]) == ["none", "yarn", "pi"]
    assert len([r for r in after if r["variant"] == "yarn"]) == len([r for r in before if r["variant"] == "yarn"])
    other = ctxext(*EVAL, "--factor", 8, "-o", path)
    assert_remedy(other, r"holds other measurements \(variant yarn: extension.method.factor 4.0 → 8.0, .*\)\. Pass")
    assert len(other.said) < 400


def test_an_unextended_checkpoint_is_the_baseline(evaluated: tuple[Path, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    shutil.copy(evaluated[0], path)
    outcome = ctxext("eval", MODEL, *PASSKEY, "--lengths", "512", "--depths", "2", "--trials", "2", "-o", path)
    assert outcome.code == 0, outcome.err
    assert path.read_bytes().split(b"\n", 1)[1] == evaluated[0].read_bytes().split(b"\n", 1)[1]


def test_a_run_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, make = [], Passkey.sample
    monkeypatch.setattr(Passkey, "sample", lambda *given: sampled.append(given[1]) or make(*given))
    grid = (*PASSKEY, "--lengths", "96,128", "--depths", "1", "--trials", "1", "-o", tmp_path / "results.jsonl")
    assert ctxext("eval", MODEL, *grid, "--style", "base").code == 0
    assert sum(place.length == 96 for place in sampled) == 2  # one to see whether it fits, one that is measured


def test_a_task_that_does_not_fit_the_shortest_length_is_refused_before_the_work(tmp_path: Path) -> None:
    """So many sentences do not fit into 96 tokens; the passkeys, which do, would come before them."""
    path = tmp_path / "results.jsonl"
    outcome = ctxext("eval", MODEL, "--tasks", "passkey,needle_distractors", *SMALL, "-o", path)
    assert outcome.code == 1
    assert "a needle_distractors prompt needs at least" in outcome.said
    assert "goes on from there" not in outcome.said
    assert not [*tmp_path.iterdir()]


def test_a_trained_length_that_one_knows_better_is_the_one_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    known = ("--method", "yarn", "--original-max-position-embeddings", "256")
    outcome = ctxext("eval", MODEL, "--tasks", "passkey,short", *SMALL, "--windows", "2", *known, "-o", path)
    assert outcome.code == 0, outcome.err
    header, records = lines(path)
    assert {r["length"] for r in records if r["task"] == "short"} == {256}
    assert header["about"]["trained_length"] == 256
    assert "trained at 256 tokens" in " ".join(outcome.out.split())


def test_short_alone_measures_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    outcome = ctxext("eval", MODEL, "--tasks", "short", "--method", "yarn", "--windows", "2", "-o", path)
    assert outcome.code == 0, outcome.err
    assert Counter((r["variant"], r["task"], r["length"]) for r in lines(path)[1]) == {
        ("none", "short", 512): 2, ("yarn", "short", 512): 2,
    }  # fmt: skip
    assert "plan: 2 variants (baseline, yarn) × 1 task (short) at 512 tokens: 4 samples" in outcome.said


def test_ctrl_c_says_what_is_saved_and_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "results.jsonl", []
    asked = ("eval", MODEL, "--tasks", "perplexity", "--lengths", "96", "--windows", "3", "-o", path)
    losses_of = Engine.losses

    def interrupted(self: Engine, ids: Any) -> Any:
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(ids)
        return losses_of(self, ids)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "losses", interrupted)
        outcome = ctxext(*asked)
    assert outcome.code == 130
    assert f"Stopped. 2 samples kept beside {path}. To resume, run the same command" in outcome.said
    assert len(read_results(path).records) == 2
    again = ctxext(*asked)
    assert again.code == 0
    assert "1 sample, 96 tokens to read" in again.said
    assert len(lines(path)[1]) == 3


@pytest.mark.slow
def test_a_first_look_is_quick_and_a_second_adds_to_it(tmp_path: Path) -> None:
    """On a text that ends long before the time does, so that no clock decides."""
    text, path = tmp_path / "text.txt", tmp_path / "results.jsonl"
    text.write_text(PERSUASION.read_text(encoding="utf-8")[:6_000], encoding="utf-8")
    asked = ("eval", MODEL, "--quick", "--tasks", "passkey,perplexity", "--haystack", text, "-o", path)
    outcome = ctxext(*asked)
    assert outcome.code == 0, outcome.err
    _, records = lines(path)
    assert {r["length"] for r in records} == {256, 512}
    assert {r["depth"] for r in records if r["task"] == "passkey"} == {0.25, 0.75}
    assert "then more samples, until 5 min are over" in outcome.said
    assert "Some tasks ran out of text" in outcome.said
    again = ctxext(*asked)
    assert again.code == 0
    assert lines(path)[1] == records


# ------------------------------------------------------------------------------------- a checkpoint and its base


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("based")
    extended = ctxext("extend", MODEL, "--factor", 4, "--method", "yarn", "-o", folder / "austen-2k")
    assert extended.code == 0, extended.err
    grid = ("--tasks", "short,passkey", "--lengths", "96", "--depths", "2", "--trials", "1", "--windows", "2")
    outcome = ctxext("eval", folder / "austen-2k", "--base", MODEL, *grid, "-o", folder / "based.jsonl")
    assert outcome.code == 0, outcome.err
    return folder / "based.jsonl", outcome


def test_without_a_terminal_each_variant_gets_a_line(based: tuple[Path, Outcome]) -> None:
    said = [line for line in based[1].err.splitlines() if not re.match("  .* (took|for weights)", line)]
    assert [re.sub(", [0-9,]+ tokens to read", "", line) for line in said][:7] == [
        "plan: 1 variant (austen-2k) × 2 tasks (passkey, short)",
        "  at 96, 512 tokens: 6 samples",
        "control: does the baseline solve passkey within its trained length?",
        "plan: 1 variant (baseline) × 2 tasks (passkey, short)",
        "  at 512 tokens: 4 samples",
        "baseline: 4 samples done",
        "austen-2k: 6 samples done",
    ]
    assert based[1].err.count("on this machine: 512 tokens took") == 2
    assert "━" not in based[1].err


def test_a_checkpoint_and_its_base_are_measured_on_the_same_windows(
    based: tuple[Path, Outcome], evaluated: tuple[Path, Outcome]
) -> None:
    """As the base extended here would be."""
    header, records = lines(based[0])
    assert {name: variant["model"] for name, variant in header["variants"].items()} == {
        "none": "austen-4m",
        "austen-2k": "austen-2k",
    }
    assert Counter((r["variant"], r["task"], r["length"]) for r in records) == {
        ("none", "passkey", 512): 2,
        ("none", "short", 512): 2,
        ("austen-2k", "passkey", 96): 2,
        ("austen-2k", "passkey", 512): 2,
        ("austen-2k", "short", 512): 2,
    }
    _, others = lines(evaluated[0])
    keys = [[r["key"] for r in some if r["task"] == "short"] for some in (records, others)]
    assert keys[0] == keys[1]
    for here, there in (("none", "none"), ("austen-2k", "yarn")):
        assert losses(records, here, "short") == pytest.approx(losses(others, there, "short"), abs=1e-4)
    assert printed(based[1].out)["austen-2k"][-1] == regression(records, "austen-2k")
    assert float(regression(records, "austen-2k")) != 0


# --------------------------------------------------------------------- a checkpoint that is extended late


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late") / "austen-late"
    outcome = ctxext("extend", MODEL, "--factor", 4, "--method", "self_extend", "-o", folder)
    assert outcome.code == 0, outcome.err
    assert "It stays unextended, and ctxext.load reads context_extension.json beside it." in outcome.said
    return folder


@pytest.mark.slow
def test_a_checkpoint_that_is_extended_late_is_measured_as_the_method_is(late: Path, tmp_path: Path) -> None:
    grid = ("--tasks", "perplexity", "--lengths", "768", "--windows", "1", "-o")
    for name, arguments in (("here", (late,)), ("there", (MODEL, "--method", "self_extend", "--factor", 4))):
        outcome = ctxext("eval", *arguments, *grid, tmp_path / f"{name}.jsonl")
        assert outcome.code == 0, outcome.err
    (_, here), (_, there) = lines(tmp_path / "here.jsonl"), lines(tmp_path / "there.jsonl")
    assert np.array_equal(losses(here, "austen-late", "perplexity"), losses(there, "self_extend", "perplexity"))


def test_a_late_method_says_what_it_writes_and_how_to_freeze_it(late: Path, tmp_path: Path) -> None:
    outcome = ctxext("extend", MODEL, "--method", "dynamic", "-o", tmp_path / "late")
    for words in ("It stays unextended", "pass --length", "ctxext.load('"):
        assert words in outcome.said
    assert "pass --length" not in ctxext("extend", MODEL, "--method", "dca", "--dry-run").said
    assert (tmp_path / "late/context_extension.json").is_file()
    assert re.search("scaling in use +dynamic_ntk ×4", ctxext("describe", tmp_path / "late").out)
    said = " ".join(ctxext("describe", MODEL, "--method", "self_extend", "--factor", 2).out.split())
    assert (
        "self_extend ×2: 512 → 1,024 tokens, with group_size 5, window 128; config.json cannot express it because it "
        "rotates inside attention" in said
    )


def test_extend_notes_a_missing_tokenizer_and_another_factor(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        shutil.copy(MODEL / name, tmp_path / "bare")
    outcome = ctxext(
        "extend", tmp_path / "bare", "--method", "dynamic_yarn", "--factor", 4, "--length", "1k", "-o", tmp_path / "out"
    )
    assert outcome.code == 0
    assert "note: frozen at 1,024 tokens: the factor is 2, not 4." in outcome.said
    assert "has no tokenizer" in outcome.said
    assert "(16.1 MiB linked)" in outcome.said


def test_the_version_is_printed() -> None:
    assert ctxext("--version") == Outcome(0, f"{__version__}\n", "")


def test_a_checkpoint_that_is_extended_late_can_start_again(late: Path, tmp_path: Path) -> None:
    arguments = ("--method", "yarn", "--existing", "replace", *PASSKEY, *SMALL, "-o", tmp_path / "results.jsonl")
    outcome = ctxext("eval", late, *arguments)
    assert outcome.code == 0, outcome.err
    header, _ = lines(tmp_path / "results.jsonl")
    assert header["about"]["reach"] == 512  # of the model as it was


@pytest.mark.parametrize(
    "command",
    [("eval", "LATE", "--method", "yarn"), ("compare", "LATE"), ("demo", "--model", "LATE")],
    ids=lambda command: command[0],
)
def test_a_checkpoint_that_is_extended_in_attention_is_not_extended_on_top(
    command: tuple[str, ...], late: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = ctxext(*(late if word == "LATE" else word for word in command))
    has_flag = "demo" not in command
    assert_remedy(outcome, f"is already extended by self_extend .*the original model{', or --existing' * has_flag}")
    assert ("--existing" in outcome.said) == has_flag
    assert list(tmp_path.iterdir()) == []


def with_tokenizer(model: Any, folder: Path) -> Path:
    """Saved beside the bundled tokenizer, of 4,096 tokens."""
    model.save_pretrained(folder)
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def test_compare_leaves_out_what_a_model_refuses_and_says_why(tmp_path: Path) -> None:
    """Falcon has custom attention code, in which nothing can be rotated in attention."""
    with_tokenizer(tiny_model("falcon", vocab_size=4096), tmp_path / "falcon")
    grid = ("--factor", 2, "--tasks", "passkey", "--lengths", "96", "--depths", "1", "--trials", "1", "-o")
    outcome = ctxext("compare", tmp_path / "falcon", *grid, tmp_path / "results.jsonl")
    assert outcome.code == 0, outcome.err
    header, _ = lines(tmp_path / "results.jsonl")
    rope = read_context(tiny_config("falcon")).rope
    static = {cls.name for cls in list_methods("rope") if not cls.example(rope, 1.5).in_attention}
    assert set(header["variants"]) == {"none", *static}
    assert "skipping dca: FalconForCausalLM" in outcome.said
    outcome = ctxext("compare", tmp_path / "falcon", "--methods", "yarn,dca", *grid, tmp_path / "more.jsonl")
    assert_remedy(outcome, "dca cannot be compared: FalconForCausalLM")


# ------------------------------------------------------------------------------------------ compare and report


@pytest.mark.slow
def test_where_a_table_of_positions_ends_nothing_is_run_and_it_is_said(tmp_path: Path) -> None:
    path, model = tmp_path / "r.jsonl", small_model("gpt2", "causal", vocab_size=4096, n_positions=128)
    checkpoint = with_tokenizer(model, tmp_path / "gpt2")
    grid = ("--tasks", "passkey,perplexity", "--lengths", "96,256", "--depths", "1", "--trials", "1", "--windows", "1")
    outcome = ctxext("compare", checkpoint, *grid, "--target-length", "256", "--output", path)
    assert outcome.code == 0, outcome.said
    _, records = lines(path)
    run = {(r["variant"], r["task"], r["length"]) for r in records}
    assert {key[1:] for key in run if key[0] == "none"} == {("passkey", 96), ("perplexity", 96)}
    names = {cls.name for cls in list_methods("learned")}
    assert {key for key in run if key[0] != "none"} == {
        (name, *cell) for name in names for cell in (("passkey", 96), ("passkey", 256), ("perplexity", 256))
    }
    assert "baseline cannot run past 128 tokens" in " ".join(outcome.out.split())
    assert ctxext("report", path, "--output", tmp_path / "page.html").code == 0
    assert "cannot run past 128 tokens" in (tmp_path / "page.html").read_text()
    path.unlink()
    outcome = ctxext("eval", checkpoint, *grid, "--beyond", "--output", path)
    assert outcome.code == 1
    assert "cannot run past 128 tokens" in outcome.said
    assert not path.exists()


@pytest.mark.parametrize(
    ("model_type", "kind", "words"),
    [("t5", "seq2seq", "is an encoder-decoder"), ("bert", "masked", "its attention is not causal")],
)
def test_a_model_that_does_not_continue_a_text_is_refused(
    model_type: str, kind: str, words: str, tmp_path: Path
) -> None:
    checkpoint = with_tokenizer(small_model(model_type, kind, vocab_size=4096), tmp_path)
    outcome = ctxext("compare", checkpoint, *PASSKEY, *SMALL)
    assert outcome.code == 1
    assert words in outcome.said


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    path = tmp_path_factory.mktemp("compare") / "comparison.jsonl"
    grid = ("--lengths", "512,1k", "--depths", "3", "--trials", "2", "--windows", "2", "--factor", "4")
    methods = ("--methods", "pi, yarn", "--tasks", "passkey,perplexity,short")
    outcome = ctxext("compare", MODEL, *methods, *grid, "-o", path)
    assert outcome.code == 0, outcome.err
    return path, outcome


@pytest.mark.slow
def test_compare_recommends_with_its_share_its_regression_and_its_n(compared: tuple[Path, Outcome]) -> None:
    path, outcome = compared
    _, records = lines(path)
    beyond = [r["hit"] for r in records if (r["variant"], r["task"], r["length"]) == ("yarn", "passkey", 1024)]
    said = " ".join(outcome.out.split())
    assert "Best as measured: yarn." in said
    assert re.search(
        rf"accuracy is {sum(beyond) / len(beyond):.0%} \[[\d.]+, [\d.]+\] n={len(beyond)} \(95% interval", said
    )
    (cost,) = re.findall(r"short-context regression of yarn is (\S+) nats per token", said)
    assert cost == regression(records, "yarn")


def test_compare_prints_the_numbers_that_it_wrote(compared: tuple[Path, Outcome]) -> None:
    _, records = lines(compared[0])
    table = printed(compared[1].out)
    assert table == {name: row(records, name.replace("baseline", "none")) for name in ("baseline", "pi", "yarn")}
    assert {cells[1] for cells in table.values()} >= {"0%", "100%"}


@pytest.mark.parametrize("columns", [40, 80])
def test_no_number_is_cut_off_however_narrow_the_terminal(
    compared: tuple[Path, Outcome], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by default, with needles beside the keys: more columns than 80 characters hold."""
    results = read_results(compared[0])
    results.header.tasks["needle"] = {}
    results.records += [{**r, "task": "needle"} for r in results.records if r["task"] == "passkey"]
    results.header.about["lengths"] = [256, 512, 1024]
    summary, out = Summary(results), StringIO()
    monkeypatch.setenv("COLUMNS", str(columns))
    with redirect_stdout(out):
        print_summary(summary)
    assert "…" not in out.getvalue()
    numbers = re.findall(r"[+-]?\d+\.\d+|\d+%", out.getvalue())
    _, records = lines(compared[0])
    for variant in ("pi", "yarn"):
        # That to 512 tokens is two numbers here: to 256, and from there.
        *shares, _, beyond, cost = row(records, variant)
        assert {*shares, beyond, cost} <= {*numbers}


def test_title_and_caption_are_as_wide_as_the_terminal(
    compared: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = read_results(compared[0])
    results.records = [record for record in results.records if record["task"] == "passkey"]
    monkeypatch.setenv("COLUMNS", "150")
    print_summary(Summary(results))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "austen-4m, trained at 512 tokens"
    assert any(re.match(r"retrieval: up to \d+ samples? per cell, unadjusted 95% intervals", line) for line in shown)


def test_report_writes_the_page_and_the_figures(compared: tuple[Path, Outcome], tmp_path: Path) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "new/figures"
    outcome = ctxext("report", compared[0], "-o", page, "--figures", figures)
    assert outcome.code == 0, outcome.err
    html, cost = page.read_text(encoding="utf-8"), regression(lines(compared[0])[1], "yarn")
    assert html.lstrip().lower().startswith("<!doctype html>")
    assert "Best as measured: yarn." in html
    assert cost in html
    names = ["overview", *(f"passkey-{variant}" for variant in ("baseline", "pi", "yarn"))]
    expected = {f"comparison-{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert {path.name for path in figures.iterdir()} == {*expected, "comparison.json"}
    beginnings = {".png": b"\x89PNG", ".svg": b"<?xml", ".json": b"{"}
    for path in figures.iterdir():
        assert path.read_bytes().startswith(beginnings[path.suffix])
        assert f"wrote {path}\n" in outcome.err
    numbers = json.loads((figures / "comparison.json").read_text(encoding="utf-8"))
    assert f"{numbers['figures']['yarn']['gate']['loss']['value']:+.3f}" == cost


def test_report_takes_several_files(
    compared: tuple[Path, Outcome], based: tuple[Path, Outcome], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert ctxext("report", compared[0], based[0], "-o", page).code == 0
    html = page.read_text(encoding="utf-8")
    assert "comparison.jsonl" in html
    assert "based.jsonl" in html


@pytest.mark.slow
def test_figures_of_files_of_one_name_stand_side_by_side(compared: tuple[Path, Outcome], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = shutil.copy(compared[0], tmp_path / "other")
    page, figures = tmp_path / "page.html", tmp_path / "figures"
    assert ctxext("report", compared[0], other, "-o", page, "--figures", figures).code == 0
    assert {path.name for path in figures.glob("*.json")} == {"comparison-1.json", "comparison-2.json"}


# --------------------------------------------------------------------------------------------------- the server

# Keys are found and needles are not, by so small a model.
ASKED = ("--tasks", "passkey,needle", "--lengths", "96,384", "--depths", "2", "--trials", "2", "--generate")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "results.jsonl"
    with LiveServer() as server:
        outcome = ctxext("eval", MODEL, "--server", server.url, *ASKED, "-o", path)
    assert outcome.code == 0, outcome.err
    assert len(server.requests) == 16
    return path


@pytest.mark.slow
def test_a_server_gives_what_the_model_gives_here(served: Path, tmp_path: Path) -> None:
    local = tmp_path / "results.jsonl"
    assert ctxext("eval", MODEL, *ASKED, "-o", local).code == 0
    assert {r["hit"] for r in lines(local)[1]} == {True, False}
    here, there = ([{**record, "variant": "", "checksum": ""} for record in lines(path)[1]] for path in (local, served))
    assert here == there


@pytest.mark.parametrize(("style", "tokens"), [("chat", 64), ("thinking", 1024)])
def test_a_server_is_given_the_room_that_its_style_needs(style: str, tokens: int, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer.save_pretrained(tmp_path / "model")
    one = ("--lengths", "2k", "--depths", "1", "--trials", "1", "--beyond", "--generate")
    with LiveServer(chat_template=CHAT_TEMPLATE) as server:
        command = ("eval", tmp_path / "model", "--server", server.url, "--style", style, *PASSKEY, *one)
        ctxext(*command, "-o", tmp_path / "results.jsonl")  # refused there, as it is too long for this model
    assert {body["max_tokens"] for _, body in server.requests} == {tokens}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["fails", "is gone"])
def test_what_a_server_answered_before_it_failed_is_kept(
    end: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run goes on from there to the very file of a run that nothing disturbed."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.0)
    path = tmp_path / "results.jsonl"
    with LiveServer() as server:
        answered = break_after(5, server, end)
        outcome = ctxext("eval", MODEL, "--server", server.url, *ASKED, "-o", path)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert {"fails": "or check its log", "is gone": "Start the server"}[end] in outcome.said
    assert len(read_results(path).records) == len(answered) < 16
    with LiveServer() as server:
        outcome = ctxext("eval", MODEL, "--server", server.url, *ASKED, "-o", path)
    assert outcome.code == 0, outcome.err
    assert len(server.requests) == 16 - len(answered)
    assert path.read_bytes() == served.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.slow
def test_a_server_s_losses_are_those_measured_here(based: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Perplexity, the short-context regression against a server of the baseline, and the log-probability of answers,
    in float32."""
    extended, paths = based[0].parent / "austen-2k", [tmp_path / name for name in ("here.jsonl", "there.jsonl")]
    model = AutoModelForCausalLM.from_pretrained(extended, dtype=torch.float32).eval()
    tasks = ("--tasks", "passkey,perplexity,sliding_perplexity,short", "--setting", "sliding_perplexity.stride=300")
    grid = (*tasks, "--lengths", "600", "--depths", "1", "--trials", "1", "--windows", "2")
    with (
        LiveServer(prompt_scores="vllm") as base,
        LiveServer(model=model, max_length=2048, prompt_scores="vllm", names=("austen-2k",)) as server,
    ):
        where = {MODEL: (), base.url: ("--server", server.url)}
        for path, (baseline, served) in zip(paths, where.items()):
            outcome = ctxext("eval", extended, "--base", baseline, *served, *grid, "-o", path)
            assert outcome.code == 0, outcome.err
    here, there = ({(r["variant"], r["key"]): r for r in lines(path)[1]} for path in paths)
    assert here.keys() == there.keys()
    assert Counter(r["task"] for r in here.values()) == {
        "passkey": 3, "perplexity": 2, "short": 4, "sliding_perplexity": 2,
    }  # fmt: skip
    for key, own in here.items():
        if own["task"] == "passkey":
            assert (own["got"], own["hit"]) == (there[key]["got"], there[key]["hit"])
            assert there[key]["logprob"] == pytest.approx(own["logprob"], abs=1e-3)
        else:
            apart = unpacked(own, "losses") - unpacked(there[key], "losses")
            assert abs(apart).max() < 1e-4
            assert own.get("top1") == there[key].get("top1")


def test_a_server_without_log_probabilities_is_refused_before_the_run(server: LiveServer, tmp_path: Path) -> None:
    outcome = ctxext("eval", MODEL, *PERPLEXITY, *SMALL, "--server", server.url, "-o", tmp_path / "results.jsonl")
    assert_remedy(outcome, "perplexity needs log-probabilities .* does not return .*or use retrieval tasks")
    assert [*tmp_path.iterdir()] == []
    assert {body["max_tokens"] for _, body in server.requests} == {1}
    server.requests.clear()


def break_after(n: int, server: LiveServer, end: str) -> list[str]:
    """From `n` answers on the server has only errors, or does not listen any more; the requests that it answered."""
    complete, answered, lock = server.complete, [], Lock()

    def breaking(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with lock:
            if end == "fails" and len(answered) == n:
                return 500, {"error": {"message": "out of memory"}}
            answered.append(path)
            if len(answered) == n and end == "is gone":
                server.httpd.shutdown()
                server.httpd.server_close()
        return complete(path, body)

    server.complete = breaking  # type: ignore[method-assign]
    return answered


# ------------------------------------------------------------------------------------------------------- errors

TRIAL = ("--depths", "1", "--trials", "1")
PERPLEXITY = ("--tasks", "passkey,perplexity")
KEY_TOKENS = ("--tasks", "key_tokens", "--method", "yarn")
REMEDIES = {
    "unknown task": (("--tasks", "paskey", *SMALL), "unknown task 'paskey'; did you mean 'passkey'?"),
    "no task": (("--tasks", "", *SMALL), "Known: .*passkey,"),
    "unknown method": ((*PASSKEY, *SMALL, "--method", "yarm"), "did you mean 'yarn'?"),
    "too long": ((*PASSKEY, *TRIAL, "--lengths", "512,1k"), "supports 512 tokens, got 1,024.*--beyond"),
    "too long, extended": ((*PASSKEY, *TRIAL, "--lengths", "4k", "--method", "pi", "--factor", "2"), "supports 1,024"),
    "too short": ((*PASSKEY, *TRIAL, "--lengths", "20"),
                  r"prompt needs at least \d+ tokens .*, got 20\. Drop 20 from --lengths"),
    "too short within the trained length": (("--tasks", "vt,short", *TRIAL, "--lengths", "1k", "--method", "yarn"),
                                            "tokens with this tokenizer, got 512. `short` measures every task there"),
    "wrong depth": ((*PASSKEY, *SMALL, "--depths", "1.5"), r"from 0 \(beginning\) to 1 \(end\), got 1.5"),
    "no depth": ((*PASSKEY, *SMALL, "--depths", "deep"), "--depths must be a list, such as 0.1,0.5,0.9"),
    "no length": ((*PASSKEY, "--lengths", "abc"), "'abc' is not a number of tokens; write 131072 or 128k"),
    "no trial": ((*PASSKEY, *SMALL, "--trials", "0"), "error: --trials must be >= 1, got 0"),
    "a seed below 0": ((*PASSKEY, *SMALL, "--seed", "-1"), "error: --seed must be 0 to 134217728, got -1."),
    "one window": (("--tasks", "short", *SMALL, "--method", "yarn", "--windows", "1"),
                   "error: --windows must be >= 2 for the task `short`, got 1. Pass --windows 8, or drop the task"),
    "empty haystack": ((*PASSKEY, *SMALL, "--haystack", "empty.txt"), r"empty\.txt is empty\. Pass a text"),
    "no haystack": ((*PASSKEY, *SMALL, "--haystack", "nowhere.txt"), "nowhere.txt.* Pass "),
    "haystack is a folder": ((*PASSKEY, *SMALL, "--haystack", "."), "Pass "),
    "haystack is a picture": ((*PASSKEY, *SMALL, "--haystack", "figure.png"), "is not a UTF-8 text.*Pass prose"),
    "setting without name": ((*PASSKEY, *SMALL, "--setting", "passkey=3"), "--setting must be TASK.NAME=VALUE"),
    "setting of no task": ((*PASSKEY, *SMALL, "--setting", "paskey.digits=3"), "did you mean 'passkey'?"),
    "unknown setting": (("--tasks", "needle", *SMALL, "--setting", "needle.neddles=3"), "did you mean 'needles'?"),
    "setting of a task not asked for": ((*PASSKEY, *SMALL, "--setting", "needle.needles=3"), "needle.*--tasks"),
    "setting of a wrong kind": ((*PASSKEY, *SMALL, "--setting", "passkey.digits=five"), "digits.*'five'"),
    "setting of a wrong size": ((*PASSKEY, *SMALL, "--setting", "passkey.digits=0"), "digits must be >= 1, got 0"),
    "text too short for a window": ((*PERPLEXITY, *SMALL, "--haystack", "short.txt"),
                                    r"longer than the text.* Pass a longer --haystack\.$"),
    "no base": (("--tasks", "short", *SMALL), "Pass --method, or the baseline as --base"),
    "base for nothing": ((*PASSKEY, *SMALL, "--base", MODEL), "Add one of them to --tasks"),
    "key tokens of other windows": (("--tasks", "perplexity,key_tokens", *SMALL, "--method", "yarn", "--setting",
                                     "perplexity.bos=false"), "Set bos for both"),
    "key tokens alone": ((*KEY_TOKENS, *SMALL), "Add perplexity to --tasks"),
    "method's option without a method": ((*PASSKEY, *SMALL, "--factor", "4"), "work only with --method"),
    "unknown device": ((*PASSKEY, *SMALL, "--device", "tpu"), "device 'tpu' is not available to torch. Pass "),
    "unknown dtype": ((*PASSKEY, *SMALL, "--dtype", "float33"), "'float33'.*bfloat16"),
    "a dtype of whole numbers": ((*PASSKEY, *SMALL, "--dtype", "int8"), "'int8'. Pass one of auto, bfloat16,"),
    "a method of another factor": ((*PASSKEY, *SMALL, "--method", "fitted.json", "--factor", "8"),
                                   r"--factor 8 conflicts with the method's own factor, yarn ×4\. Leave "
                                   "--factor out, or create the method with that factor .* ctxext fit"),
    "a method that is a probe": ((*PASSKEY, *SMALL, "--method", "verify.json"), "verify.json holds no method. Pass "),
    "a method that is a results file": ((*PASSKEY, *SMALL, "--method", "based.jsonl"), "based.jsonl is not a method"),
    "no chat template": ((*PASSKEY, *SMALL, "--style", "chat"), "--style chat needs .*Use --style base"),
    "a server without a scheme": ((*PASSKEY, *SMALL, "--server", "localhost:9"), "--server must begin with http"),
    "minutes of a server": ((*PASSKEY, *SMALL, "--server", "SERVER", "--quick"), "--minutes and --quick measure one"),
    "no minutes": ((*PASSKEY, *SMALL, "--minutes", "0"), "--minutes must be a finite number > 0, got 0.0"),
    "no minutes for a first look": (("--quick", "--minutes", "0"), "--minutes must be a finite number > 0, got 0.0"),
    "cost of a server": (("--tasks", "cost", *SMALL, "--server", "SERVER"), "cost measures .* Drop it from --tasks"),
    "an unknown backend": ((*PASSKEY, *SMALL, "--backend", "vlm"), "unknown --backend 'vlm'; did you mean 'vllm'?"),
    "vLLM that is not installed": ((*PASSKEY, *SMALL, "--backend", "vllm"), "not installed: pip install vllm"),
    "vLLM and a method": ((*PASSKEY, *SMALL, "--backend", "vllm", "--method", "yarn"), "Extend it first: ctxext ext"),
    "vLLM and a server": ((*PASSKEY, *SMALL, "--backend", "vllm", "--server", "SERVER"), "Drop it, or --backend"),
    "vLLM and a device": ((*PASSKEY, *SMALL, "--backend", "vllm", "--device", "cpu"), "--device is for transformers"),
    "vLLM beyond the config": ((*PASSKEY, *SMALL, "--backend", "vllm", "--beyond"), "Drop --beyond, or use --backend"),
    "minutes of vLLM": ((*PASSKEY, *SMALL, "--backend", "vllm", "--quick"), "--minutes and --quick measure one"),
    "an option of no backend": ((*PASSKEY, *SMALL, "--backend-option", "seed=1"), "Pass --backend vllm, or drop it"),
    "an option without value": ((*PASSKEY, *SMALL, "--backend", "vllm", "--backend-option", "seed"), "NAME=VALUE"),
    "a server and a checkpoint": (("--tasks", "short", *SMALL, "--server", "SERVER", "--base", MODEL),
                                  "--base is the URL of a server with --server, .* got "),
    "a dtype of a server": ((*PASSKEY, *SMALL, "--server", "SERVER", "--dtype", "bfloat16"), "has loaded its own"),
    "a device of a server": ((*PASSKEY, *SMALL, "--server", "SERVER", "--device", "cpu"), "has loaded its own"),
    "no server": ((*PASSKEY, *SMALL, "--server", "http://localhost:1"), "Start the server"),
    "results of another seed": ((*PASSKEY, *SMALL, "--seed", "1", "-o", "based.jsonl"),
                                r"other measurements \(seed: 0 → 1\)\. Pass another file"),
    "corrupt results": ((*PASSKEY, *SMALL, "-o", "corrupt.jsonl"), "corrupt.jsonl is corrupt at line 3.*Restore it"),
    "no results": ((*PASSKEY, *SMALL, "-o", "figure.png"), "figure.png is not a results file"),
}  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, based: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what people pass by mistake; it is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("One two three. Four.")
    (tmp_path / "prose.txt").write_text("It is a truth universally acknowledged. " * 40)
    (tmp_path / "extended").mkdir()
    extend_config(AutoConfig.from_pretrained(MODEL), 8).save_pretrained(tmp_path / "extended")
    (tmp_path / "figure.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    shutil.copy(based[0], tmp_path)
    SavedMethod(YaRN(factor=4)).save(tmp_path / "fitted.json")
    (tmp_path / "verify.json").write_text('{"fingerprint": "a", "expected": {}, "far": {}}')
    whole = based[0].read_text(encoding="utf-8").splitlines()
    (tmp_path / "corrupt.jsonl").write_text("\n".join([*whole[:2], whole[2][:-9], *whole[3:], ""]))
    return tmp_path


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def assert_remedy(outcome: Outcome, words: str) -> None:
    assert outcome.code in (1, 2)
    assert outcome.err.count("error: ") == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert not re.search(r"error: \w+(Error|Exception)\b", outcome.err)
    assert re.search(words, outcome.said), outcome.said
    assert outcome.out == ""


@pytest.mark.parametrize("mistake", REMEDIES)
def test_a_mistake_gets_a_remedy_and_leaves_no_trace(mistake: str, desk: Path, server: LiveServer) -> None:
    arguments, words = REMEDIES[mistake]
    before = {path.name: path.read_bytes() for path in desk.iterdir() if path.is_file()}
    outcome = ctxext("eval", MODEL, *(server.url if argument == "SERVER" else argument for argument in arguments))
    assert_remedy(outcome, words)
    assert {path.name: path.read_bytes() for path in desk.iterdir() if path.is_file()} == before
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eval", "./nowhere"), "'./nowhere' is neither a folder"),
        (("eval", "."), "holds no config.json, .* Pass one of the checkpoints in it: extended"),
        (("describe", "gpt2"), r"'gpt2' is neither a folder .* the full hub name, such as openai-community/gpt2\."),
        (("compare", "./nowhere"), "'./nowhere' is neither a folder"),
        (("compare", MODEL, "--methods", "yarn,pie"), "unknown method 'pie'; did you mean 'pi'?"),
        (("compare", MODEL, "--methods", "yarn", "--factor", "0.5"), "factor must be >= 1, got 0.5"),
        (("compare", MODEL, "--methods", "yarn,fitted.json", "--factor", "8"), "--factor 8 conflicts"),
        (("compare", MODEL, "--methods", ""), "unknown method ''. Known: pi"),
        (("compare", MODEL, "--lengths", ""), "--lengths: '' is not a number of tokens"),
        (("eval", MODEL, "--lengths", ""), "--lengths: '' is not a number of tokens"),
        (("demo", "--lengths", ""), "--lengths: '' is not a number of tokens"),
        (("compare", MODEL, "--methods", "baseline,yarn"), "the baseline is always measured.* Leave it out"),
        (("compare", MODEL, "--minutes", "0"), "--minutes must be a finite number > 0, got 0"),
        (("compare", MODEL, "--quick", "--minutes", "0"), "--minutes must be a finite number > 0, got 0"),
        (
            ("compare", MODEL, "--minutes", "1", "-o", "based.jsonl"),
            "based.jsonl exists already.* --minutes .*Remove it",
        ),
        (("compare", MODEL, "--methods", "yarn,yarn"), "'yarn' is given twice.* Name each method once"),
        (("compare", MODEL, "--best", "fitted.json"), "fitted.json already exists. Pass --best another file name"),
        (("fit", MODEL, "-o", "fitted.json"), "fitted.json already exists. Pass --output another file name, or remove"),
        (("fit", MODEL, "-o", "f.json", "--text", "empty.txt"), "empty.txt is empty"),
        (("fit", MODEL, "-o", "f.json", "--text", "prose.txt"), "Pass a longer --text, or a smaller --factor"),
        (("fit", "extended", "-o", "f.json"), r"extended is already extended\. Pass the original checkpoint\."),
        (("compare", MODEL, "--minutes", "1", "--lengths", "256"), "covers 512 tokens. Pass .* --lengths 1024"),
        (("compare", MODEL, "--no-fit"), "--no-fit works only with --minutes"),
        (
            ("compare", MODEL, "--methods", "yarn", "--lengths", "512,4k"),
            "the target is 2,048 tokens, got --lengths up to 4,096. Pass --target-length 4096, lower .* pass --beyond",
        ),
        (("fit", MODEL, "-o", "new.json", "--evaluations", "-1"), "error: --evaluations must be >= 1, got -1."),
        (
            ("extend", MODEL, "--factor", "1", "--original-max-position-embeddings", "4k", "--dry-run"),
            r"is 4096 \(given or saved as --original-max-position-embeddings\). Pass a larger --factor or "
            r"--target-length, or",
        ),
        (("describe", "empty.txt"), "error: empty.txt is neither a checkpoint folder nor a GGUF file."),
        (("describe", MODEL, "--method", "yran"), "error: unknown method 'yran'; did you mean 'yarn'?"),
        (
            ("describe", MODEL, "--factor", "2", "--target-length", "4k"),
            "error: pass --factor or --target-length, not both",
        ),
        (("describe", MODEL, "--option", "beta_fats=1"), "did you mean 'beta_fast'?"),
        (("verify", MODEL, "--probe", "based.jsonl"), "based.jsonl is not a probe. Create one .*ctxext verify DIR"),
        (("report", "nowhere.jsonl"), "nowhere.jsonl does not exist. Create it with ctxext eval"),
        (("report", "figure.png"), "figure.png is not a results file"),
        (("report", MODEL), "austen-4m is a folder, not a results file. Pass a file of ctxext eval or ctxext compare"),
        (
            ("report", "based.jsonl", "-o", "/proc/x.html"),
            "/proc/x.html cannot be .*(Pass|Choose) another",
        ),
        (("report", "based.jsonl", "--figures", "short.txt"), "short.txt/based.json cannot be written in .*short.txt"),
        (("report", "based.jsonl", "-o", "."), "is a folder"),
        (("report", "based.jsonl", "-o", "./based.jsonl"), "--output based.jsonl would overwrite the results"),
        (("report", "based.json", "--figures", "."), "--figures: its based.json would overwrite the results"),
        (("compare", MODEL, "-o", "new.json", "--best", "./new.json"), "--best new.json would overwrite the results"),
        (("eval", MODEL, "-o", "."), "is a folder"),
        *(
            (
                (*command, "/proc/new.json"),
                "error: /proc/new.json cannot be written in /proc. Choose another folder.",
            )
            for command in (
                ("eval", MODEL, "-o"),
                ("fit", MODEL, "-o"),
                ("compare", MODEL, "--best"),
                ("report", "based.jsonl", "-o"),
            )
        ),
        (("demo", "-o", "/proc/new"), "error: /proc/new/results.jsonl cannot be written in /proc"),
        (("report", "based.jsonl", "corrupt.jsonl"), "corrupt.jsonl is corrupt at line 3.*Restore it"),
    ],
)
def test_so_does_a_path_or_a_name_that_is_wrong(arguments: tuple[Any, ...], words: str, desk: Path) -> None:
    before = sorted(desk.iterdir())
    assert_remedy(ctxext(*arguments), words)
    assert sorted(desk.iterdir()) == before


def test_a_model_that_cannot_be_extended_is_described_with_the_reason(tmp_path: Path) -> None:
    assert ctxext("extend", MODEL, "-o", tmp_path / "extended").code == 0
    outcome = ctxext("describe", tmp_path / "extended", "--factor", "8")
    assert outcome.code == 0
    assert re.search("ctxext extend would +refuse: .* is already scaled", " ".join(outcome.out.split())), outcome.out


def test_a_page_is_written_into_a_folder_that_is_not_there_yet(desk: Path) -> None:
    assert ctxext("report", "based.jsonl", "-o", "new/page.html").code == 0
    assert (desk / "new/page.html").is_file()


# --------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("name", ["eval", "compare", "report"])
def test_help_shows_and_explains_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = ctxext(name, "--help").out
    for parameter in get_command(commands).commands[name].params:
        named = [parameter.name.upper()] if parameter.param_type_name == "argument" else parameter.opts
        assert all(option in shown for option in named), parameter.name
        assert parameter.help, f"{parameter.name} has no help"


def test_h_is_help_in_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*get_command(commands).commands} - {"lm-eval"}:  # that has its own
        assert ctxext(name, "-h") == ctxext(name, "--help"), name
    assert "Usage: " in ctxext("-h").out


def test_help_shows_what_an_option_takes_and_no_python_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in {*get_command(commands).commands} - {"lm-eval"}:
        assert re.findall(r"<(?:bool|int|float|str|path|list)\b|\{\w+\}", ctxext(name, "-h").out) == [], name
    assert re.search(r"Usage: ctxext finetune \[OPTIONS\] \[KEY=VALUE\]\.\.\.", ctxext("finetune", "-h").out)
    assert re.search(r"--trials +N +Samples", ctxext("eval", "-h").out)


@pytest.mark.slow
def test_finetune_of_a_model_that_is_already_scaled_names_the_settings_that_allow_it(tmp_path: Path) -> None:
    assert ctxext("extend", MODEL, "--factor", 4, "-o", tmp_path / "extended").code == 0
    # In a process of its own: the state of an Accelerator would reach other tests.
    command = [sys.executable, "-m", "ctxext", "finetune", "--config", "tiny_yarn_4x"]
    changes = [f"model={tmp_path / 'extended'}", f"output={tmp_path / 'run'}"]
    run = subprocess.run([*command, *changes], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pass extension.existing=compose to scale further" in " ".join(run.stderr.split())
    assert not (tmp_path / "run").exists()


def test_ctxext_alone_shows_its_commands_in_groups_and_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    alone, some = ctxext(), {"Extend": "describe", "Measure": "compare", "Fit and train": "merge", "Serve": "lint"}
    assert alone.code == 0
    for panel, name in some.items():
        assert re.search(rf"─ {panel}.*?─.*? {name} ", alone.out, re.S)


def test_every_task_that_the_help_names_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = ctxext("eval", "--help").out
    tasks = ["passkey", "needle", "needles", "needle_distractors", "ruler", "perplexity", "sliding_perplexity"]
    tasks += ["key_tokens", "short"]
    assert all(task in shown for task in tasks)
    assert "13 tasks" in " ".join(shown.split())
    grid = measuring.make_grid(",".join(tasks), trained_length=512, lengths=(512,))
    assert len(grid.tasks) == len(tasks) - 1 + 13


@pytest.mark.slow
def test_key_tokens_are_shown_where_the_unextended_model_is_not_read(tmp_path: Path) -> None:
    tasks = (
        "--tasks",
        "perplexity,key_tokens",
        "--lengths",
        "1024",
        "--windows",
        "1",
        "--setting",
        "key_tokens.gain=0.1",
    )
    outcome = ctxext("eval", MODEL, "--method", "yarn", "--factor", "2", *tasks, "-o", tmp_path / "results.jsonl")
    assert outcome.code == 0, outcome.err
    assert "key tokens" in outcome.out
    assert "judged to need long context" in " ".join(outcome.out.split())
    assert "Only yarn was measured beyond the trained length" in " ".join(outcome.out.split())
    tasks = (*tasks[:-1], "key_tokens.gain=4.0")
    few = ctxext("eval", MODEL, "--method", "yarn", "--factor", "2", *tasks, "-o", tmp_path / "few.jsonl")
    assert re.search(r"key tokens: \d+, too few for a perplexity", " ".join(few.out.split()))
    assert "ppl of" not in few.out


@pytest.mark.slow
def test_the_base_of_a_longer_table_is_asked_for_nothing_beyond_its_own(tmp_path: Path) -> None:
    base = tmp_path / "base"
    small_model("gpt2", "causal", vocab_size=4096, n_positions=128).save_pretrained(base)
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, base)
    assert ctxext("extend", base, "--factor", "2", "-o", tmp_path / "long").code == 0
    tasks = ("--tasks", "perplexity,short", "--lengths", "128,256", "--windows", "2")
    outcome = ctxext("eval", tmp_path / "long", "--base", base, *tasks, "-o", tmp_path / "results.jsonl")
    assert outcome.code == 0, outcome.err


def test_compare_without_a_recommendation_ends_in_no_empty_line(tmp_path: Path) -> None:
    grid = ("--tasks", "perplexity", "--lengths", "256,512", "--windows", "2", "-o", tmp_path / "results.jsonl")
    outcome = ctxext("compare", MODEL, "--methods", "pi", "--factor", "4", *grid, "--best", tmp_path / "best.json")
    assert "error: none of these methods is recommended" in outcome.said
    assert outcome.out.strip()
    assert not outcome.out.endswith("\n\n")


def test_compare_says_what_else_its_file_has(tmp_path: Path) -> None:
    asked = ("--lengths", "1k", "--trials", "1", "--depths", "2", "--tasks", "passkey", "-o", tmp_path / "a.jsonl")
    first, second = (ctxext("compare", MODEL, "--methods", method, *asked) for method in ("pi", "yarn"))
    assert (first.code, second.code) == (0, 0)
    assert "already had" not in first.said
    assert f"{tmp_path / 'a.jsonl'} already had the samples of pi." in second.said
    assert {"baseline", "pi", "yarn"} == set(printed(second.out))


@pytest.mark.slow
def test_compare_within_minutes_writes_a_method_and_says_why(tmp_path: Path) -> None:
    """On a text that ends long before the time does, so that no clock decides."""
    text, best, results = tmp_path / "text.txt", tmp_path / "best.json", tmp_path / "results.jsonl"
    text.write_text(PERSUASION.read_text(encoding="utf-8")[:15_000], encoding="utf-8")
    asked = ("--factor", "2", "--minutes", "60", "--methods", "pi,yarn", "--no-fit", "--haystack", text)
    outcome = ctxext("compare", MODEL, *asked, "--best", best, "-o", results)
    assert outcome.code == 0, outcome.err
    chosen = read_saved(best)
    assert chosen.method.name in ("pi", "yarn")
    said = " ".join(outcome.out.split())
    assert chosen.about["recommendation"] in said
    assert "Engines that run the saved model: transformers, " in said
    assert "The text ran out" in outcome.said
    assert f"--method {best}" in outcome.said
    assert {record["variant"] for record in read_results(results).records} == {"none", "pi", "yarn"}
    assert_remedy(ctxext("compare", MODEL, *asked, "-o", results), "results.jsonl exists already")


@pytest.mark.slow
def test_a_first_look_compares_two_methods_at_one_length(tmp_path: Path) -> None:
    text, results = tmp_path / "text.txt", tmp_path / "results.jsonl"
    text.write_text(PERSUASION.read_text(encoding="utf-8")[:6_000], encoding="utf-8")
    outcome = ctxext("compare", MODEL, "--quick", "--tasks", "passkey", "--haystack", text, "-o", results)
    assert outcome.code == 0, outcome.err
    records = read_results(results).records
    assert {(r["variant"], r["length"]) for r in records} == {(v, 1024) for v in ("none", "yarn", "self_extend")}
    assert "plan: 3 variants (baseline, yarn, self_extend) × 1 task (passkey)" in outcome.said


def test_an_interrupted_compare_within_minutes_says_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, results = Race._measure, tmp_path / "results.jsonl"

    def interrupted(self: Race, variant: Any, texts: int) -> None:
        if variant.name != "none":
            raise KeyboardInterrupt
        measure(self, variant, texts)

    monkeypatch.setattr(Race, "_measure", interrupted)
    asked = ("--factor", "2", "--minutes", "60", "--methods", "pi", "--no-fit", "--lengths", "640", "-o", results)
    outcome = ctxext("compare", MODEL, "--tasks", "perplexity", *asked)
    assert outcome.code == 130
    left = tmp_path / "results.jsonl.part-0"
    assert f"Finished samples are kept in {left}" in outcome.said
    assert [record["variant"] for record in read_results(results).records][:1] == ["none"]
    assert "baseline: texts 1 to 2" in outcome.said
    assert "none" not in outcome.said
    again = ctxext("compare", MODEL, "--tasks", "perplexity", *asked)
    assert_remedy(again, re.escape(f"{left} exists already (samples of an unfinished run)"))


def test_an_interrupted_fit_says_that_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctxext.fitting.fit.fit_by_gradient", interrupted)
    outcome = ctxext("fit", MODEL, "-o", tmp_path / "fitted.json")
    assert outcome.code == 130
    assert f"A fit does not resume: {tmp_path / 'fitted.json'} was not written. interrupted" in outcome.said
    assert not any(tmp_path.iterdir())


def test_portable_leaves_out_what_no_config_can_say(tmp_path: Path) -> None:
    grid = ("--tasks", "perplexity", "--lengths", "96", "--windows", "1", "-o", tmp_path / "results.jsonl")
    outcome = ctxext("compare", MODEL, "--portable", *grid)
    assert outcome.code == 0, outcome.err
    assert "skipping self_extend: config.json cannot express it, as it rotates inside attention." in outcome.said
    measured = read_results(tmp_path / "results.jsonl").header.variants
    assert {"none", "llama3", "yarn"} <= measured.keys()
    assert all(about["portable"] for name, about in measured.items() if name != "none")
    outcome = ctxext("compare", MODEL, "--portable", "--methods", "llama3,self_extend", *grid)
    assert_remedy(outcome, "self_extend cannot be compared: config.json cannot express it.* Drop --portable")


def test_fit_shows_the_objective_by_which_it_decides() -> None:
    losses = {name: {"short": 0.01, "text": 3.0, "key": 1.0, "total": total} for name, total in
              {"yarn": 4.25, "llama3": 4.5, "fitted": 4.125}.items()}  # fmt: skip
    out = StringIO()
    about = {"trained_length": 512, "target_length": 2048, "losses": losses}
    Console(file=out, width=120).print(fit_table(SavedMethod(YaRN(factor=4), about)))
    assert "objective" in out.getvalue()
    shown = re.findall(r"(yarn|llama3|fitted) .* (\d\.\d{4})\W*$", out.getvalue(), re.M)
    assert shown == [("yarn", "4.2500"), ("llama3", "4.5000"), ("fitted", "4.1250")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lengths", "4"), "error: --lengths must exceed the trained length of 512 tokens, got 4."),
        (("--lengths", "256,512"), "error: --lengths must exceed the trained length of 512 tokens, got 256,512."),
        (("--trials", "-1"), "error: --trials must be >= 0, got -1."),
        (("--model", "nope"), "error: 'nope' is neither a folder nor a hub name"),
        (("--model", "."), "error: '.' holds no config.json"),
    ],
)
def test_a_mistake_in_demo_names_its_flag(arguments: tuple[str, ...], words: str, desk: Path) -> None:
    before = sorted(desk.iterdir())
    assert_remedy(ctxext("demo", *arguments), words)
    assert sorted(desk.iterdir()) == before


@pytest.mark.slow
def test_demo_compares_saves_and_reloads_without_ctxext(tmp_path: Path) -> None:
    outcome = ctxext("demo", "--lengths", "512,1k", "--trials", "1", "--windows", "2", "-o", tmp_path / "demo")
    assert outcome.code == 0, outcome.err
    assert set(printed(outcome.out)) == {"baseline", "pi", "ntk", "ntk_by_parts", "yarn"}
    assert any(path.suffix == ".png" for path in (tmp_path / "demo").iterdir())
    assert "largest logit difference 0." in outcome.said
    (best,) = re.findall(r"^(?:Use|Best as measured:) (\w+)", outcome.out, re.M)
    assert json.loads((tmp_path / "demo" / best / "config.json").read_text())["max_position_embeddings"] == 1024
    # A second run shows what it was asked for, though the file holds more.
    again = ctxext("demo", "--lengths", "512,1k", "--trials", "0", "--windows", "2", "-o", tmp_path / "demo")
    assert again.code == 0, again.err
    assert "passkey" not in again.out
    assert "passkey" in outcome.out
    assert all(name in again.out for name in printed(outcome.out))
    assert {r["task"] for r in read_results(tmp_path / "demo/results.jsonl").records} >= {"passkey", "perplexity"}
