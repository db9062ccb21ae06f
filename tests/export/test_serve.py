"""What `ctxext serve` answers over HTTP is what the extended model computes, for methods that no config expresses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import make_task
from ctxext.evals.server import ServedModel
from ctxext.export.probe import logprobs_of, make_probe
from ctxext.export.serve import make_app
from ctxext.export.verify import served_logprobs, verify
from ctxext.hub.checkpoint import extend_folder, load_tokenizer
from ctxext.utils.endpoint import Endpoint

IDS = [5 + (7 * k) % 4000 for k in range(700)]  # beyond the trained length of 512


@contextmanager
def serving(folder: Path, *more: str) -> Iterator[str]:
    """`ctxext serve`, as a process of its own; gives its URL."""
    command = [sys.executable, "-m", "ctxext", "serve", str(folder), "--port", "0", *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        read = []
        for line in process.stderr:
            read.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0]
                return
        pytest.fail("".join(read))
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "self_extend"
    extend_folder(MODEL, folder, 2, "self_extend", say=lambda line: None)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(folder, "--served-model-name", "austen") as url:
        yield url


def completion(url: str, **body: object) -> dict:
    data = json.dumps({"model": "austen", "temperature": 0, **body}).encode()
    with urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


def test_the_only_model_is_listed_with_its_maximum_length(url: str) -> None:
    card = Endpoint(url).card
    assert (card["id"], card["max_model_len"]) == ("austen", 1024)


def test_log_probabilities_are_those_of_the_extended_model(url: str, folder: Path) -> None:
    served = served_logprobs(Endpoint(url), IDS)
    extended = logprobs_of(ctxext.load(folder, dtype=torch.float32), IDS)
    unextended = logprobs_of(ctxext.load(MODEL, dtype=torch.float32), IDS)
    assert (served - extended).abs().max() < 1e-4
    assert (served - unextended)[512:].abs().mean() > 0.05


def test_log_probabilities_of_the_answer_are_those_of_what_was_generated(url: str, folder: Path) -> None:
    (choice,) = completion(url, prompt=IDS, max_tokens=4, logprobs=1)["choices"]
    model = ctxext.load(folder, dtype=torch.float32)
    new = model.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)[0].tolist()
    assert choice["text"] == load_tokenizer(folder).decode(new[700:])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs_of(model, new)[699:].tolist(), abs=1e-4)
    assert completion(url, prompt=IDS, max_tokens=4)["choices"][0]["text"] == choice["text"]


def test_a_text_and_its_tokens_are_one_prompt(url: str, folder: Path) -> None:
    text = "It is a truth universally acknowledged"
    told = [completion(url, prompt=each, max_tokens=3, echo=True, logprobs=1)["choices"][0]
            for each in (text, load_tokenizer(folder)(text)["input_ids"])]  # fmt: skip
    assert told[0] == told[1]
    assert told[0]["text"].startswith(text)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            {"prompt": [5] * 1024},
            "This model's maximum context length is 1024 tokens with the answer, but the prompt has 1024.",
        ),
        ({"prompt": [5] * 1024, "echo": True, "logprobs": 1}, "the prompt has 1024"),
        ({"prompt": [4096]}, "a list of token ids below 4096"),
        ({"prompt": [[5, 6]]}, "a list of token ids below 4096"),
        ({"prompt": [5], "logprobs": 1, "logit_bias": {"7": 100}}, "without stream and logit_bias"),
        ({"prompt": [5], "echo": True}, "echo works with logprobs only"),
        ({"prompt": [5], "model": "other"}, "Server is pinned to 'austen'"),
    ],
)
def test_what_it_cannot_serve_is_refused(url: str, body: dict, says: str) -> None:
    endpoint = Endpoint(url)
    with pytest.raises(ValueError, match=re.escape(says)):
        endpoint.call("completions", {"model": "austen", "temperature": 0, "max_tokens": 1, **body})


def test_an_error_has_openai_s_form(url: str) -> None:
    body = json.dumps({"model": "austen", "prompt": [5] * 1024, "max_tokens": 1}).encode()
    request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(HTTPError) as refused:
        urlopen(request)
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["message"].startswith("This model's maximum context length is 1024")


def test_an_answer_ends_at_the_maximum_length(url: str) -> None:
    usage = completion(url, prompt=IDS[:500] + IDS[:500], max_tokens=100)["usage"]
    assert usage["completion_tokens"] <= usage["total_tokens"] - 1000 <= 24


def test_eval_gets_the_extended_model_s_answers(url: str, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    task, prompter = make_task("passkey"), Prompter(tokenizer, "base", None)
    haystack = Haystack.from_file(PERSUASION, tokenizer)
    samples = [task.sample(place, prompter, haystack) for place in task.places([900], [0.1, 0.5], trials=2, seed=0)]
    served = ServedModel(url, style="base")
    assert served.max_length == 1024
    assert [sample.score(answer) for sample, answer in served.answers(samples)] == [1.0] * 4


def test_verify_says_applied(url: str, folder: Path) -> None:
    make_probe(ctxext.load(folder, dtype=torch.float32), load_tokenizer(folder)).save(folder.parent / "verify.json")
    verdict = verify(url, folder.parent / "verify.json").verdict
    assert (verdict.name, verdict.asked_to) == ("applied", 1024)
    assert verdict.distances["extended"] < 1e-4


@pytest.mark.parametrize("method", ["dca", "rerope", "dynamic_yarn", "transformers_dynamic", "yarn"])
def test_every_kind_of_method_is_served(method: str) -> None:
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), 2, method)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(model, load_tokenizer(MODEL), "austen", 1024),
            port=0,
            log_level="error",
            timeout_graceful_shutdown=1,
        )
    )
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        if method == "transformers_dynamic":
            asked = {"model": "austen", "prompt": IDS, "logprobs": 1, "max_tokens": 1}
            with pytest.raises(ValueError, match="its frequencies depend on the whole call"):
                Endpoint(url).call("completions", asked)
        else:
            assert (served_logprobs(Endpoint(url), IDS) - logprobs_of(model, IDS)).abs().max() < 1e-4
        text = completion(url, prompt=IDS, max_tokens=4)["choices"][0]["text"]
        cached = method != "transformers_dynamic"
        new = model.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False, use_cache=cached)[0, 700:]
        assert text == load_tokenizer(MODEL).decode(new)
    finally:
        server.should_exit = True
        thread.join()
