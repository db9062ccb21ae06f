"""Whether an extension is live in an engine is told from one short request, and nothing else passes for it."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.environments import MLX
from families import tiny_model, token_ids
from live_server import Fault, LiveServer
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import ctxext
from ctxext import extend_context, restore_context
from ctxext.assets import MODEL
from ctxext.cli import commands
from ctxext.encodings.rope import RopeGeometry
from ctxext.evals.engine import Engine
from ctxext.evals.server import ServedModel
from ctxext.export.gguf import write_gguf
from ctxext.export.llama_cpp import GGUFModel
from ctxext.export.probe import (
    FAR_TOKENS,
    MAX_TOKENS,
    Probe,
    in_state,
    judge,
    judge_by_length,
    judge_far,
    judge_passkeys,
    logprobs_of,
    make_probe,
    passkey_prompt,
    read_probe,
)
from ctxext.export.rules import export_for
from ctxext.export.served import served_scores
from ctxext.export.verify import verify
from ctxext.hub.checkpoint import extend_folder, load_model, read_config
from ctxext.methods import list_methods
from ctxext.utils.endpoint import Endpoint

TOLD = {
    "extended": "applied",
    "unextended": "ignored",
    "without_temperature": "applied without the attention factor",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def bundled(dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model in each state, as a checkpoint."""
    root = tmp_path_factory.mktemp("verify")
    extend_folder(MODEL, root / "extended", 4, "yarn", say=lambda line: None)
    extend_folder(MODEL, root / "without", 4, "yarn", attention_factor=1.0, say=lambda line: None)
    return {"extended": root / "extended", "unextended": MODEL, "without_temperature": root / "without"}


@pytest.fixture(scope="module")
def probe_file(folders: dict[str, Path], tokenizer) -> Path:
    path = folders["extended"].parent / "probe.json"
    model = AutoModelForCausalLM.from_pretrained(folders["extended"])
    make_probe(model, tokenizer).save(path)
    return path


@pytest.fixture(scope="module")
def probe(probe_file: Path) -> Probe:
    return read_probe(probe_file)


# ---------------------------------------------------------------------------------- the verdicts


@pytest.mark.parametrize("state", TOLD)
def test_transformers_is_in_the_state_of_its_config(state: str, folders: dict[str, Path], probe_file: Path) -> None:
    answer = verify(folders[state], probe_file)
    assert answer.verdict.name == TOLD[state]
    assert answer.verdict.distances[state] < 1e-4
    assert answer.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
@pytest.mark.parametrize("state", TOLD)
def test_llama_cpp_is_in_the_state_of_its_file(
    state: str, dtype: str, folders: dict[str, Path], probe_file: Path, tmp_path: Path
) -> None:
    write_gguf(folders[state], tmp_path / "model.gguf", dtype)
    answer = verify(tmp_path / "model.gguf", probe_file)
    assert answer.verdict.name == TOLD[state]
    assert answer.verdict.distances[state] < (1e-3 if dtype == "F32" else 0.02)
    assert answer.notes == ()


@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize("state", TOLD)
def test_a_server_is_in_the_state_of_its_model(
    state: str, form: str, folders: dict[str, Path], probe_file: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[state], dtype=torch.bfloat16).eval()
    with LiveServer(model=model, prompt_scores=form) as server:
        assert verify(server.url, probe_file, far=0).verdict.name == TOLD[state]
        assert len(server.requests) == {"vllm": 1, "sglang": 2}[form]


# ------------------------------------------------------------------- methods inside attention


@pytest.mark.slow
@pytest.mark.parametrize("method", ["self_extend", "dynamic_yarn"])
def test_a_method_inside_attention_is_told_by_the_end_of_a_long_text(method: str, tmp_path: Path) -> None:
    extend_folder(MODEL, tmp_path / "model", 2, method, say=lambda line: None)
    model = ctxext.load(tmp_path / "model", dtype=torch.float32)
    before = logprobs_of(model, range(5, 605))
    made = make_probe(model, AutoTokenizer.from_pretrained(MODEL))
    assert torch.equal(logprobs_of(model, range(5, 605)), before)
    made.save(tmp_path / "verify.json")
    assert read_probe(tmp_path / "verify.json") == made
    here = verify(tmp_path / "model", tmp_path / "verify.json")
    assert (here.verdict.name, here.verdict.asked_to) == ("applied", 1024)
    assert here.engine.endswith("with ctxext.load")
    another = extend_context(bundled(), 2, "rerope")
    another.save_pretrained(tmp_path / "another")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "another")
    with pytest.raises(ValueError, match=rf"is of {method} ×2: .*another is extended by rerope ×2: .*a probe of this"):
        verify(tmp_path / "another", tmp_path / "verify.json")
    for served, name in (
        (model.to(torch.bfloat16), "applied"),
        (bundled(torch.bfloat16), "ignored"),
        (another, "no match"),
        (tiny_model("llama", vocab_size=4096), "no match"),
    ):
        with LiveServer(model=served, max_length=1024, prompt_scores="vllm") as server:
            assert verify(server.url, tmp_path / "verify.json").verdict.name == name
    with (
        LiveServer(model=model, max_length=600, prompt_scores="vllm") as server,
        pytest.raises(ValueError, match=r"may change nothing in a short text.* Serve at least 1024 tokens"),
    ):
        verify(server.url, tmp_path / "verify.json")


# Not transformers_dynamic: it gets no probe.
ROPE = [each for each in list_methods("rope") if not getattr(each, "of_the_call", False)]


@pytest.mark.parametrize("factor", [4, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 8))])
@pytest.mark.parametrize(
    "method", [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name != "yarn")) for each in ROPE]
)
def test_every_method_is_applied_in_its_own_folder_and_ignored_by_the_unextended_model(
    method: Any, factor: int, tmp_path: Path
) -> None:
    rope = RopeGeometry.plain(bundled().config.head_dim, 10000.0, 512)
    example = method.example(rope, factor)  # up to the factor that it reaches
    extend_folder(MODEL, tmp_path / "model", method=example, say=lambda line: None)
    own = verify(tmp_path / "model")
    assert (own.verdict.name, own.verdict.asked_to) == ("applied", round(512 * example.factor))
    own.probe.save(tmp_path / "verify.json")
    assert verify(MODEL, tmp_path / "verify.json").verdict.name == "ignored"


# ------------------------------------------------------------- servers that say less, or go wrong


def as_served(state: str, folders: dict[str, Path]):
    """The model of a state, or another one with the same tokenizer."""
    if state == "another model":
        return tiny_model("llama", vocab_size=4096, max_position_embeddings=2048)
    return AutoModelForCausalLM.from_pretrained(folders[state]).eval()


@pytest.mark.slow
@pytest.mark.parametrize("state", [*TOLD, "another model"])
def test_a_server_that_takes_text_alone_is_in_the_state_of_its_model(
    state: str, folders: dict[str, Path], probe_file: Path
) -> None:
    """mlx-lm's gives log-probabilities after the logit bias."""
    with LiveServer(model=as_served(state, folders), prompt_scores="mlx") as server:
        answer = verify(server.url, probe_file, far=0)
    assert answer.verdict.name == TOLD.get(state, "no match")
    if state in TOLD:
        assert answer.verdict.distances[state] < 1e-3
    assert answer.notes[0] == "the server takes no token ids, so only the short text was sent"


@pytest.mark.slow
def test_a_short_text_alone_is_applied_only_where_it_was_asked_for(folders: dict[str, Path], probe_file: Path) -> None:
    with LiveServer(model=as_served("extended", folders), max_length=2048, prompt_scores="mlx") as server:
        verdict = verify(server.url, probe_file).verdict
    assert verdict.name == "applied as far as tested"
    assert "takes no token ids, so no long text was sent" in verdict.reason
    assert verdict.reason.endswith("or accept this with far=0")


@pytest.mark.slow
@pytest.mark.skipif(not MLX.python.is_file(), reason="make engines creates mlx-lm's environment")
def test_mlx_lm_s_own_server_applies_what_export_writes(folders: dict[str, Path], tmp_path: Path) -> None:
    export, folder = export_for("mlx", read_config(folders["extended"])), tmp_path / "mlx"
    shutil.copytree(folders["extended"], folder)
    (folder / "config.json").write_text(json.dumps(export.config))
    make_probe(AutoModelForCausalLM.from_pretrained(folders["extended"]), AutoTokenizer.from_pretrained(MODEL)).save(
        tmp_path / "verify.json"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [MLX.python, "-m", "mlx_lm", "server", "--model", folder, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            with suppress(ConnectionError, ValueError):
                answer = verify(f"http://127.0.0.1:{port}", tmp_path / "verify.json", model=str(folder), far=0)
                break
            assert process.poll() is None
            time.sleep(1)
    finally:
        process.kill()
    assert answer.verdict.name == "applied"
    assert answer.verdict.distances["extended"] < 1e-3


PASSKEYS_SAY = {
    "extended": ("probably applied", {460: 8, 921: 8}),
    "unextended": ("probably ignored", {460: 8, 921: 0}),
    "without_temperature": ("probably applied", {460: 8, 921: 8}),  # which it cannot tell, and says
    "another model": ("no verdict", {460: 0, 921: 0}),
}


@pytest.mark.parametrize("state", PASSKEYS_SAY)
def test_without_log_probabilities_passkeys_tell_what_they_can(
    state: str, folders: dict[str, Path], probe_file: Path
) -> None:
    with LiveServer(model=as_served(state, folders), max_length=1024) as server:
        verdict = verify(server.url, probe_file, far=1024).verdict
    assert (verdict.name, verdict.passkeys) == PASSKEYS_SAY[state]
    assert not verdict.is_live
    assert "The server returns no log-probabilities of prompts" in verdict.reason
    if verdict.name == "probably applied":
        assert "another factor, a lost attention factor or another model cannot be told from this" in verdict.reason


@dataclass
class Echoing(LiveServer):
    """One that answers with the prompt in front."""

    def complete(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, answer = super().complete(path, body)
        if isinstance(body["prompt"], str):
            answer["choices"][0]["text"] = body["prompt"] + answer["choices"][0]["text"]
        return status, answer


def test_a_passkey_in_an_echoed_prompt_is_not_found(probe_file: Path) -> None:
    with (
        Echoing(max_length=2048) as server,
        pytest.raises(ValueError, match=r"\d+ characters where 12 tokens were asked for: it echoes the prompt or"),
    ):
        verify(server.url, probe_file)


def test_between_many_and_few_passkeys_there_is_no_verdict(probe: Probe) -> None:
    names = [judge_passkeys(probe, (400, 8), (900, found)).name for found in range(9)]
    assert names == 2 * ["probably ignored"] + 3 * ["no verdict"] + 4 * ["probably applied"]
    assert {judge_passkeys(probe, (400, 4), (900, found)).name for found in range(9)} == {"no verdict"}


def test_every_passkey_prompt_holds_its_own_passkey_once_near_its_start(probe: Probe) -> None:
    made = [passkey_prompt(probe.text, 5000, trial) for trial in range(8)]
    assert len({key for _, key in made}) == 8
    for prompt, key in made:
        assert prompt.count(key) == 2  # in two sentences, side by side
        assert prompt.index(key) < 0.2 * len(prompt)
        assert 4900 < len(prompt) <= 5000


@dataclass
class Boasting(LiveServer):
    """One that states a longer maximum length than it has, as vLLM or as llama.cpp."""

    stated: int = 1024
    llama_cpp: bool = False

    def cards(self) -> dict[str, Any]:
        cards = [{**card, "max_model_len": self.stated} for card in super().cards()["data"]]
        if self.llama_cpp:
            cards = [{**card, "meta": {"n_ctx": card.pop("max_model_len")}} for card in cards]
        return {"data": cards}


@pytest.mark.parametrize("form", ["vllm", "sglang", ""])
def test_a_server_that_truncates_prompts_is_named(form: str, twice: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twice).eval()
    with (
        Boasting(model=model, max_length=512, truncates=True, prompt_scores=form) as server,
        pytest.raises(ValueError, match=r"read 5\d\d of (about )?\d+ tokens: it truncates prompts\. Serve a longer"),
    ):
        verify(server.url, twice / "verify.json")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self_extend"])
def test_a_long_text_truncated_at_either_end_is_told_by_its_last_tokens(method: str, tokenizer) -> None:
    model = extend_context(bundled(), 4, method)
    made = make_probe(model, tokenizer)
    whole = made.far_ids(2048)
    assert len(whole) == 2047
    assert made.shows_truncation(2048)

    def judged(prompt: list[int]) -> str:
        tail = logprobs_of(model, [*prompt, *whole[-FAR_TOKENS:]], 256)[-FAR_TOKENS:]
        short = torch.tensor(made.expected["extended"], dtype=torch.float64)
        if made.far_unextended:
            return judge_by_length(made, short, 2048, tail).name
        return judge_far(made, judge(made, short), 2048, tail).name

    prompt = whole[:-FAR_TOKENS]
    assert judged(prompt) == "applied"
    for kept in (500, 1000, 1500, len(prompt) - 10 * 199, len(prompt) - 199, len(prompt) - 20):
        assert judged(prompt[-kept:]) != "applied"
        assert judged(prompt[:kept]) != "applied"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "pi"])
def test_a_server_that_truncates_without_saying_so_is_not_live(method: str, tokenizer, tmp_path: Path) -> None:
    model = extend_context(bundled(), 2, method)
    make_probe(model, tokenizer).save(tmp_path / "verify.json")
    for kept, name in ((1024, "applied"), (800, "applied to short texts only")):
        with Boasting(model=model, max_length=kept, truncates=True, usage=False, prompt_scores="vllm") as server:
            answer = verify(server.url, tmp_path / "verify.json")
        assert (answer.verdict.name, answer.verdict.asked_to) == (name, 1024)
        # PI finds no passkeys without training.
        assert any("does not find a passkey" in note for note in answer.notes) == (method == "pi")


def test_a_server_that_only_streams_is_named(probe_file: Path) -> None:
    with LiveServer() as server:
        server.faults.extend(8 * [Fault(200, b'data: {"choices": []}\n\n')])
        with pytest.raises(ValueError, match=r"streams its answer, although.* Turn streaming off"):
            verify(server.url, probe_file)


def test_a_server_that_is_down_or_slow_is_named(probe_file: Path) -> None:
    with LiveServer() as server:
        server.faults.append(Fault(200, seconds=5))
        with pytest.raises(TimeoutError, match=r"sent no whole answer within 0\.5 s\. Raise the timeout"):
            verify(server.url, probe_file, timeout=0.5)
    with pytest.raises(ConnectionError, match=r"cannot be reached .* Start the server"):
        verify(server.url, probe_file)


def test_a_model_that_is_not_served_is_named(probe_file: Path) -> None:
    with (
        LiveServer() as server,
        pytest.raises(ValueError, match="serves no model 'austin-4m'; did you mean 'austen-4m'"),
    ):
        verify(server.url, probe_file, model="austin-4m")


def test_nothing_is_tested_where_nothing_can_be(probe_file: Path) -> None:
    with LiveServer() as server:
        with pytest.raises(ValueError, match=r"far=0 leaves nothing to test"):
            verify(server.url, probe_file, far=0)
        with pytest.raises(ValueError, match=r"stops at 512 of 2,048 tokens.* Serve a longer context\.$"):
            verify(server.url, probe_file)
    with (
        LiveServer(max_length=1024) as server,
        pytest.raises(ValueError, match=r"stops at 1,024 of 2,048 tokens.*, or pass far=1024"),
    ):
        verify(server.url, probe_file)


# ------------------------------------------------------------------------------ near the target


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model at twice its length, with its probe."""
    folder = tmp_path_factory.mktemp("twice") / "model"
    extend_folder(MODEL, folder, 2, "yarn", say=lambda line: None)
    make_probe(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(MODEL)).save(
        folder / "verify.json"
    )
    return folder


def nan_from(rows: int) -> Callable:
    return lambda angles, positions: torch.where((positions >= rows)[..., None], torch.nan, angles)


# A table of cos and sin that ends at the trained length or a little before the target, as engines have them.
WRONG = {
    "clamped at the trained length": (lambda positions: positions.clamp(max=511), None),
    "clamped before the target": (lambda positions: positions.clamp(max=999), None),
    "wrapped": (lambda positions: positions % 512, None),
    "NaN past its end": (lambda positions: positions, nan_from(512)),
    "NaN near the target": (lambda positions: positions, nan_from(1000)),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_server_that_is_wrong_near_the_target_is_not_live(wrong: str, twice: Path) -> None:
    moved, spoiled = WRONG[wrong]
    model = AutoModelForCausalLM.from_pretrained(twice).eval()
    table = model.model.rotary_emb
    forward = table.forward

    def broken(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angles = forward(x, position_ids=moved(position_ids))
        return angles if spoiled is None else tuple(spoiled(each, position_ids) for each in angles)

    table.forward = broken
    form = "sglang" if wrong == "wrapped" else "vllm"
    with LiveServer(model=model, max_length=1024, prompt_scores=form) as server:
        assert verify(server.url, twice / "verify.json", far=0).verdict.is_live  # right in a short text
        verdict = verify(server.url, twice / "verify.json").verdict
    assert (verdict.name, verdict.asked_to) == ("applied to short texts only", 1024)
    assert "its cos/sin table is too short" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_server_that_is_right_near_the_target_is_live(form: str, twice: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twice, dtype=torch.bfloat16).eval()
    with LiveServer(model=model, max_length=1024, prompt_scores=form) as server:
        answer = verify(server.url, twice / "verify.json")
        assert (answer.verdict.name, answer.verdict.asked_to, answer.notes) == ("applied", 1024, ())
        assert answer.verdict.far_distance < 0.02
        lengths = [len(body["prompt"]) for _, body in server.requests]
    # Once a token near the target, or all of a prompt where that cannot be.
    assert lengths == {"vllm": [199, *range(1011, 1023)], "sglang": [199, 199, 1011, 1023, 1023]}[form]


def test_llama_cpp_and_transformers_are_asked_near_the_target(twice: Path, tmp_path: Path) -> None:
    write_gguf(twice, tmp_path / "model.gguf")
    for where in (twice, tmp_path / "model.gguf"):
        verdict = verify(where, twice / "verify.json").verdict
        assert (verdict.name, verdict.asked_to) == ("applied", 1024)
        assert verdict.far_distance < 0.01


@pytest.mark.slow
def test_a_server_of_fewer_tokens_than_the_target_is_applied_as_far_as_tested(
    folders: dict[str, Path], probe_file: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["extended"]).eval()
    for limit, asked_to, far in ((900, 199, 0), (1500, 1024, 1024)):
        with LiveServer(model=model, max_length=limit, prompt_scores="vllm") as server:
            answer = verify(server.url, probe_file)
            assert (answer.verdict.name, answer.verdict.asked_to) == ("applied as far as tested", asked_to)
            assert not answer.verdict.is_live
            assert f"the server stops at {limit:,} of 2,048 tokens" in answer.verdict.reason
            assert answer.verdict.reason.endswith(f"or accept this with far={far}")
            assert answer.notes == (f"positions beyond {asked_to} of 2048 tokens were not tested",)
            accepted = verify(server.url, probe_file, far=far).verdict
            assert (accepted.name, accepted.asked_to) == ("applied", asked_to)
    with LiveServer(model=model, max_length=900, prompt_scores="vllm") as server:
        reason = verify(server.url, probe_file, far=1024).verdict.reason
    assert "the server stops at 900 of 1,024 tokens" in reason


@pytest.mark.parametrize(("stated", "llama_cpp"), [(100, False), (600, False), (600, True)])
def test_a_stated_limit_below_the_target_is_believed(stated: int, llama_cpp: bool, twice: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twice).eval()
    with Boasting(model=model, stated=stated, llama_cpp=llama_cpp, max_length=1024, prompt_scores="vllm") as server:
        verdict = verify(server.url, twice / "verify.json").verdict
    assert (verdict.name, verdict.asked_to) == ("applied as far as tested", 199)
    assert f"the server stops at {stated} of 1,024 tokens" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("stated", [0, -1, 2.5, True, "600", [600], 10**30])
def test_a_stated_limit_that_is_no_length_does_not_spare_the_long_text(stated: Any, twice: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twice).eval()
    with Boasting(model=model, stated=stated, max_length=1024, prompt_scores="vllm") as server:
        answer = verify(server.url, twice / "verify.json")
    assert (answer.verdict.name, answer.verdict.asked_to) == ("applied", 1024)
    assert answer.notes == (
        f"/v1/models gives a maximum length of {stated!r}, which is not a length, so it was ignored",
    )
    with (
        Boasting(model=model, stated=stated, max_length=600, prompt_scores="vllm") as server,
        pytest.raises(ValueError, match="a request of 1023 tokens failed"),
    ):
        verify(server.url, twice / "verify.json")


@pytest.mark.slow
def test_a_method_inside_attention_is_applied_as_far_as_the_server_goes(tmp_path: Path) -> None:
    model = extend_context(bundled(), 4, "self_extend")
    make_probe(model, AutoTokenizer.from_pretrained(MODEL)).save(tmp_path / "verify.json")
    with LiveServer(model=model, max_length=1100, prompt_scores="vllm") as server:
        found = verify(server.url, tmp_path / "verify.json").verdict
        accepted = verify(server.url, tmp_path / "verify.json", far=1024).verdict
    assert (found.name, found.asked_to) == ("applied as far as tested", 1024)
    assert (accepted.name, accepted.asked_to) == ("applied", 1024)


def test_a_probe_without_a_long_text_says_how_to_make_one(
    probe: Probe, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "short.json"
    replace(probe, far={}).save(path)
    answer = verify(folders["extended"], path)
    assert answer.verdict.name == "applied"
    assert answer.notes[-1].endswith("were not tested, as the probe holds no long text: create one with far=2048")
    assert verify(folders["extended"], path, far=0).notes[-1].endswith("were not tested")
    with pytest.raises(ValueError, match=r"no long text, so far=1024 cannot be tested\. Create one .*--far 1024"):
        verify(folders["extended"], path, far=1024)


def test_a_server_that_refuses_what_it_says_it_serves_is_not_live(twice: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twice).eval()
    with Boasting(model=model, stated=4096, max_length=900, prompt_scores="vllm") as server:
        with pytest.raises(ValueError, match=r"a request of 1023 tokens failed.*--far 0"):
            verify(server.url, twice / "verify.json")
        assert verify(server.url, twice / "verify.json", far=0).verdict.is_live


def test_a_text_that_tests_nothing_far_is_refused_and_a_lowered_one_is_said(twice: Path, tmp_path: Path) -> None:
    shutil.copytree(twice, tmp_path / "without", ignore=shutil.ignore_patterns("verify.json"))
    for folder in (twice, tmp_path / "without"):
        with pytest.raises(ValueError, match=r"far=10 must be above .* Pass a larger one, or far=0"):
            verify(folder, far=10)
    with pytest.raises(ValueError, match=r"far=600 is below the probe's shortest long text\. Pass far=1024, or far=0"):
        verify(twice, far=600)
    answer = verify(twice, far=4096)
    assert answer.verdict.asked_to == 1024
    assert "the probe has long texts of 1024 tokens, so far=4096 tested 1024" in answer.notes
    assert not any("has long texts" in note for note in verify(twice, far=1024).notes)


def test_llama_cpps_server_gives_over_http_what_llama_cpp_computes(folders: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(folders["extended"], tmp_path / "extended.gguf")
    ids = list(range(5, 45))
    with GGUFModel(tmp_path / "extended.gguf", n_ctx=512) as model:
        served = served_scores(Endpoint(model._server.listening_address), ids).logprobs
        assert (served - model.logprobs(ids)).abs().max() < 1e-3


def test_eval_reads_llama_cpps_server_token_by_token(folders: dict[str, Path], tmp_path: Path) -> None:
    """In float32, as transformers reads the folder, with the most likely tokens."""
    write_gguf(folders["extended"], tmp_path / "extended.gguf", "F32")
    ids = list(range(5, 69))
    with GGUFModel(tmp_path / "extended.gguf", n_ctx=512) as model:
        served = ServedModel(model._server.listening_address, style="base")
        served.check_scores(ids[:16], AutoTokenizer.from_pretrained(folders["extended"]))
        there = served.losses(ids)
    here = Engine(load_model(folders["extended"], dtype=torch.float32).eval()).losses(ids)
    assert (here.losses - there.losses).abs().max() < 1e-3
    assert there.top1 is not None
    assert here.top1.equal(there.top1)


def test_what_no_state_explains_is_no_match(probe: Probe, tokenizer) -> None:
    model = bundled()
    for factor in (2, 8):
        extend_context(model, factor, "yarn")
        assert judge(probe, logprobs_of(model, probe.input_ids)).name == "no match"
        restore_context(model)
    another = tiny_model("llama", vocab_size=4096)
    verdict = judge(probe, logprobs_of(another, probe.input_ids))
    assert verdict.name == "no match"
    assert verdict.reason.startswith("another model, tokenizer or extension: the probe is of yarn ×4")


def test_no_match_names_the_flag_for_low_precision_and_the_closest_model(probe: Probe) -> None:
    off = torch.tensor(probe.expected["extended"], dtype=torch.float64) - 0.05
    assert judge(probe, off).reason == (
        "another model, tokenizer or factor; pass noise= for weights below 8 bits. Closest: the extended model"
    )


def test_half_way_between_two_states_is_neither(probe: Probe) -> None:
    """Noise as large as you like may be stated: what is as near to one state as to another is still not told."""
    extended, unextended = (torch.tensor(probe.expected[s], dtype=torch.float64) for s in ("extended", "unextended"))
    between = (extended + unextended) / 2
    assert judge(probe, between, noise=1.0).name == "no match"
    assert judge(probe, 0.7 * extended + 0.3 * unextended, noise=1.0).name == "applied"


def test_the_verdict_stands_clear_of_the_noise(probe: Probe) -> None:
    """In bfloat16, read in uneven chunks: another sum in another order, and the same verdict in each state."""
    model = extend_context(bundled(torch.bfloat16), 4, "yarn")
    for state, name in TOLD.items():
        with in_state(model, state):
            assert judge(probe, logprobs_of(model, probe.input_ids, chunk=23)).name == name
    assert (
        probe.noise_floor
        < probe.coarse_floor
        < 0.02
        < 0.1
        < judge(probe, torch.tensor(probe.expected["unextended"])).distances["extended"]
    )


# --------------------------------------------------------------------------------- the probe itself


def test_the_probe_is_the_formulas_and_not_what_the_model_makes_of_its_config(probe: Probe, tokenizer) -> None:
    model = extend_context(bundled(), 4, "yarn")
    model.model.rotary_emb.attention_scaling = 1.0  # a dead temperature
    dead = make_probe(model, tokenizer)
    assert dead.expected == probe.expected
    assert judge(dead, logprobs_of(model, dead.input_ids)).name == TOLD["without_temperature"]


@pytest.mark.parametrize("method", ["yarn", "ntk", "pi", "resonance"])
def test_each_state_is_the_model_so_extended(method: str, tmp_path: Path) -> None:
    """One of each saved form; Resonance is longrope, whose plain forward takes its original table back."""
    ids = token_ids(60)[0].tolist()
    model = tiny_model("llama")
    before = logprobs_of(model, ids)
    after = logprobs_of(extend_context(model, 4, method), ids)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for state, expected in (("extended", after), ("unextended", before)):
        with in_state(model, state):
            assert torch.allclose(logprobs_of(model, ids), expected, atol=1e-4)
    assert torch.equal(logprobs_of(model, ids), after)
    assert not torch.allclose(after, before, atol=1e-2)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gpt_neox", "qwen3_5"])
def test_states_reach_every_family(family: str) -> None:
    ids = token_ids(60)[0].tolist()
    model = tiny_model(family)
    before = logprobs_of(model, ids)
    after = logprobs_of(extend_context(model, 4, "yarn"), ids)
    for state, expected in (("extended", after), ("unextended", before)):
        with in_state(model, state):
            assert torch.allclose(logprobs_of(model, ids), expected, atol=1e-3)
    assert not torch.allclose(after, before, atol=1e-2)


def test_making_a_probe_leaves_the_model_as_it_was(tokenizer) -> None:
    model = extend_context(bundled(), 4, "yarn").train()
    tables = dict(model.model.rotary_emb._buffers)
    make_probe(model, tokenizer)
    assert all(model.model.rotary_emb._buffers[name] is table for name, table in tables.items())
    assert model.training


def test_a_probe_has_fewer_than_200_tokens_and_no_more_than_were_trained(probe: Probe, tokenizer) -> None:
    model = extend_context(bundled(), 4, "yarn")
    assert len(probe.input_ids) < 200
    assert len(make_probe(model, tokenizer, text=3 * probe.text).input_ids) == MAX_TOKENS
    short = bundled()
    short.config.max_position_embeddings = 100
    assert len(make_probe(extend_context(short, 4, "yarn"), tokenizer).input_ids) == 100


def test_a_probe_survives_its_file_and_no_edit_does(probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "new/verify.json"
    probe.save(path)
    with pytest.raises(ValueError, match="Out of range"):
        replace(probe, noise_floor=math.nan).save(path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert read_probe(path) == probe
    edits = (
        {"input_ids": [*probe.input_ids[:-1], 7]},
        {"expected": {**probe.expected, "extended": [-1.0]}},
        {"target_length": "2k"},  # which verify compares with a number
        {"trained_length": None},
        {"cuts": [*probe.cuts[:-1], 10_000]},
        {"far_end": probe.far_end[1:]},
        {"expected": {**probe.expected, "half": probe.expected["extended"]}},
    )
    for edit in edits:
        path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
        with pytest.raises(ValueError, match="was edited"):
            read_probe(path)
        probe.save(path)
    for other in ('{"text": 1}', '{"ctxext_results": 1}\n{"variant": "none"}', "[]", "\x89PNG"):
        path.write_text(other)
        with pytest.raises(ValueError, match=r"verify\.json is not a probe\. Create one .*ctxext verify DIR -o"):
            read_probe(path)
    path.write_text(json.dumps({"fingerprint": 1, "expected": {}, "far": {}}))
    with pytest.raises(ValueError, match="is not a probe of ctxext"):
        read_probe(path)
    with pytest.raises(FileNotFoundError, match=r"ctxext verify DIR -o"):
        read_probe(tmp_path / "none.json")


# ------------------------------------------------------------------------------------ the refusals


def whole(model):
    return extend_context(model, 4, "transformers_dynamic")


def as_trained(model):
    return model


def of_the_call(model):
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return model


def hardly(model):
    return extend_context(model, 1.01, "ntk")


def hardly_in_attention(model):
    return extend_context(model, 560 / 512, "dynamic_ntk")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (whole, "cannot be seen in a short text because its frequencies depend on the whole call"),
        (of_the_call, "cannot be seen in a short text because it is length-dependent"),
        (as_trained, "nothing is extended"),
        (hardly_in_attention, "changes the end of a text of 560 tokens by .* cannot show whether it is live"),
        (hardly, "a short text cannot show whether it is live"),
    ],
)
def test_what_a_short_text_cannot_show_gets_no_probe(made: Callable, says: str, tokenizer) -> None:
    with pytest.raises(ValueError, match=says):
        make_probe(made(bundled()), tokenizer)


def test_files_and_servers_need_a_probe(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for where in (tmp_path / "model.gguf", "http://127.0.0.1:1"):
        with pytest.raises(ValueError, match=r"has no probe to compare with.*--probe verify\.json"):
            verify(where)


def test_a_file_that_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("a text")
    with pytest.raises(ValueError, match=r"model\.gguf is neither a checkpoint folder nor a GGUF file"):
        verify(tmp_path / "model.gguf")


def test_the_probe_of_another_vocabulary_is_refused(probe: Probe, tmp_path: Path, folders: dict[str, Path]) -> None:
    replace(probe, input_ids=(*probe.input_ids[:-1], 90000)).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match="vocabulary ends at"):
        verify(folders["extended"], tmp_path / "other.json")


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_bos_that_a_server_adds_moves_no_token(form: str) -> None:
    model, ids = bundled(), list(range(5, 45))
    with LiveServer(model=model, prompt_scores=form, extra_token=True) as server:
        served = served_scores(Endpoint(server.url), ids).logprobs
        bos = server.tokenizer.bos_token_id
    assert torch.allclose(served, logprobs_of(model, [bos, *ids])[1:], atol=1e-3)


@dataclass
class OddServer(LiveServer):
    """One whose answers are not as they should be."""

    answer: Any = None

    def score(self, ids: list[int], body: dict[str, Any], choice: dict[str, Any]) -> None:
        choice.update(self.answer)


@pytest.mark.parametrize(
    "answer",
    [
        {"prompt_logprobs": [None] * 50},
        {"prompt_logprobs": [None] + 39 * [{"1": {"logprob": -1.0}}]},
        {"prompt_logprobs": [None] + 39 * [{"5": -1.0}]},
        {"prompt_logprobs": 7},
        {"logprobs": {"token_logprobs": 60 * [-1.0]}},
        {"logprobs": {"token_logprobs": 41 * [None]}},
    ],
)
def test_an_answer_about_other_tokens_is_refused(answer: dict[str, Any]) -> None:
    with (
        OddServer(answer=answer, prompt_scores="odd") as server,
        pytest.raises(ValueError, match="did not return one log-probability for each"),
    ):
        served_scores(Endpoint(server.url), range(5, 45))


@pytest.mark.parametrize("logprobs", [[], [1], {"content": []}, {"content": [7]}, {"token_logprobs": "words"}])
def test_an_answer_of_another_form_is_refused(logprobs: Any) -> None:
    with (
        OddServer(answer={"logprobs": logprobs}, prompt_scores="odd") as server,
        pytest.raises(ValueError, match="no prompt log-probabilities in the format"),
    ):
        served_scores(Endpoint(server.url), range(5, 45))


def test_a_file_has_its_own_probe_beside_it(probe_file: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(folders["extended"], tmp_path / "model.gguf", "Q8_0")
    shutil.copy(probe_file, tmp_path / "verify.json")  # perhaps of another model
    with pytest.raises(ValueError, match=r"model\.gguf has no probe to compare with"):
        verify(tmp_path / "model.gguf")
    (tmp_path / "verify.json").rename(tmp_path / "model.verify.json")
    assert verify(tmp_path / "model.gguf").verdict.is_live


def test_a_revision_is_of_the_hub_alone(probe_file: Path, tmp_path: Path) -> None:
    for where in (MODEL, tmp_path / "model.gguf", "http://127.0.0.1:1"):
        with pytest.raises(ValueError, match=r"revision='main' is for hub names.*Drop it"):
            verify(where, probe_file, revision="main")


def test_llama_cpp_in_this_process_is_asked_by_no_proxy(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(folders["unextended"], tmp_path / "model.gguf", "Q8_0")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with GGUFModel(tmp_path / "model.gguf") as model:
        assert len(model.tokenize("Emma Woodhouse")) > 1


def test_llama_cpp_closes_however_early(folders: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(folders["unextended"], tmp_path / "model.gguf", "Q8_0")
    for _ in range(20):  # it used to hang in most of these
        GGUFModel(tmp_path / "model.gguf").close()


def test_log_probabilities_that_are_none_are_refused(probe: Probe) -> None:
    n = len(probe.input_ids) - 1
    for wrong, says in (
        (torch.full((n,), math.nan), "NaN"),
        (torch.ones(n), "positive"),
        (-torch.ones(n - 1), "its tokens differ"),
    ):
        with pytest.raises(ValueError, match=says):
            judge(probe, wrong.double())


# -------------------------------------------------------------------------------- the command line


def test_the_command_succeeds_only_for_live(folders: dict[str, Path], tmp_path: Path) -> None:
    run = CliRunner().invoke
    written = tmp_path / "verify.json"
    live = run(commands, ["verify", str(folders["extended"]), "-o", str(written)])
    assert live.exit_code == 0
    assert live.stdout.startswith("APPLIED  yarn ×4: 512 → 2,048 tokens, in transformers")
    assert "ctxext's own formulas" in live.stdout
    ignored = run(commands, ["verify", str(MODEL), "--probe", str(written), "--json"])
    assert ignored.exit_code == 1
    said = json.loads(ignored.stdout)
    assert (said["name"], said["live"]) == ("ignored", False)
    again = run(commands, ["verify", str(folders["extended"]), "-o", str(written)])
    assert isinstance(again.exception, FileExistsError)


@dataclass
class Spoiled(LiveServer):
    """One whose log-probabilities beyond 600 tokens are NaN."""

    def score(self, ids: list[int], body: dict[str, Any], choice: dict[str, Any]) -> None:
        super().score(ids, body, choice)
        if len(ids) > 600:
            choice["logprobs"]["token_logprobs"] = [math.nan]


def test_what_is_printed_for_programs_is_json(twice: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(twice).eval()
    with Spoiled(model=model, max_length=1024, prompt_scores="vllm") as server:
        told = CliRunner().invoke(
            commands, ["verify", server.url.upper(), "--probe", str(twice / "verify.json"), "--json"]
        )
    said = json.loads(told.stdout, parse_constant=pytest.fail)
    assert (said["name"], said["far_distance"]) == ("applied to short texts only", None)


def test_the_difference_is_said_beside_the_noise(folders: dict[str, Path], probe: Probe, probe_file: Path) -> None:
    most = f"{1.5 * probe.coarse_floor:.4f}"
    assert verify(folders["extended"], probe_file).verdict.reason == (
        f"it matches the extended model (0.0000; weights of 8 bits would explain up to {most})"
    )
    assert verify(folders["extended"], probe_file, noise=0.05).verdict.reason == (
        "it matches the extended model (0.0000; the stated noise would explain up to 0.0750)"
    )


def test_a_probe_or_an_unextended_folder_in_place_of_the_engine_is_named(probe_file: Path) -> None:
    with pytest.raises(ValueError, match=rf"is a probe.*: ctxext verify WHERE --probe {re.escape(str(probe_file))}\.$"):
        verify(probe_file)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(MODEL))} is not extended.*: ctxext extend "):
        verify(MODEL)


def test_the_command_names_the_tokens_that_it_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    extend_folder(MODEL, tmp_path / "model", 2, "dca", say=lambda line: None)
    for folder, tokens in ((folders["extended"], "199"), (tmp_path / "model", "the last 12 of 1,024")):
        told = CliRunner().invoke(commands, ["verify", str(folder)])
        assert told.exit_code == 0
        assert f"difference in log-probability over {tokens} tokens" in " ".join(told.stdout.split())


def test_the_exit_code_is_that_of_the_expected_verdict(folders: dict[str, Path], probe_file: Path) -> None:
    def run(folder: Path | str, *more: str) -> Result:
        return CliRunner().invoke(commands, ["verify", str(folder), "--probe", str(probe_file), *more])

    def code(folder: Path | str, *more: str) -> int:
        return run(folder, *more).exit_code

    assert code(MODEL) == 1
    assert "The expected verdict was" not in run(MODEL).stdout
    assert code(MODEL, "--expect", "ignored") == 0
    model = AutoModelForCausalLM.from_pretrained(folders["extended"]).eval()
    with LiveServer(model=model, max_length=600, prompt_scores="vllm") as server:
        assert code(server.url) == 1  # left near the trained length
        assert code(server.url, "--expect", "applied-as-far-as-tested") == 0
        assert code(server.url, "--far", "0") == 0
    assert code(folders["extended"], "--expect", "ignored") == 1
    assert code(folders["without_temperature"], "--expect", "applied-without-the-attention-factor") == 0
    unknown = CliRunner().invoke(commands, ["verify", str(MODEL), "--expect", "ignore"])
    assert "unknown verdict --expect ignore; did you mean 'ignored'?" in str(unknown.exception)


def test_another_model_s_probe_is_refused_by_llama_cpp_too(
    probe: Probe, folders: dict[str, Path], tmp_path: Path
) -> None:
    write_gguf(folders["extended"], tmp_path / "model.gguf")
    replace(probe, input_ids=(90_000, *probe.input_ids[1:])).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match="vocabulary ends at"):
        verify(tmp_path / "model.gguf", tmp_path / "other.json")
    replace(probe, input_ids=(-1, *probe.input_ids[1:])).save(tmp_path / "negative.json")
    with pytest.raises(ValueError, match="was edited"):
        read_probe(tmp_path / "negative.json")


def test_what_is_not_there_or_no_address_is_named(tmp_path: Path, probe_file: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf does not exist"):
        verify(tmp_path / "nowhere.gguf")
    with pytest.raises(ValueError, match="Write http://localhost:8000"):
        verify("localhost:8000", probe_file)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    AutoModel.from_pretrained(MODEL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without a language-modelling head"):
        verify(tmp_path)
