"""What `ctxext serve` answers over HTTP is what the extended model computes, for methods that no config expresses."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import ctxext
from ctxext.assets import MODEL, PERSUASION
from ctxext.cli import commands
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import make_task
from ctxext.evals.server import ServedModel
from ctxext.export.probe import logprobs_of, make_probe
from ctxext.export.serve import make_app
from ctxext.export.served import served_scores
from ctxext.export.verify import verify
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
    served = served_scores(Endpoint(url), IDS).logprobs
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
        ({"prompt": [5], "logprobs": 1, "logit_bias": {"7": 100}}, "logprobs does not work with logit_bias"),
        ({"prompt": [5], "logprobs": 1, "stop": "a"}, "logprobs does not work with stop"),
        ({"prompt": [5], "logprobs": 5}, "logprobs must be 0 or 1"),
        ({"prompt": [5], "echo": True}, "echo works with logprobs only"),
        ({"prompt": [5], "model": "other"}, "Server is pinned to 'austen'"),
        ({}, "prompt is missing"),
        ({"prompt": ""}, "prompt must be a text or a list of token ids, not empty; got ''"),
        ({"prompt": ["a", "b"]}, "a list of token ids below 4096"),
        ({"prompt": [5], "max_tokens": 0}, "max_tokens must be >= 1 without echo; got 0"),
        ({"prompt": [5], "max_tokens": -1}, "max_tokens must be a number of tokens >= 1, or 0 with echo; got -1"),
        ({"prompt": [5], "max_tokens": "9"}, "max_tokens must be"),
        ({"prompt": [5], "n": 2}, "n must be 1 here; send the request again for more answers; got 2"),
        ({"prompt": [5], "best_of": 2}, "best_of must be 1"),
        ({"prompt": [5], "temperature": -1}, "temperature must be a finite number >= 0; got -1"),
        ({"prompt": [5], "temperature": 10**400}, "temperature must be a finite number >= 0; got "),
        ({"prompt": [5], "top_p": 0}, "top_p must be a number above 0, at most 1; got 0"),
        ({"prompt": [5], "seed": 1.5}, "seed must be an integer"),
        ({"prompt": [5], "seed": 2**63}, f"seed must be an integer from 0 to {2**63 - 1}; got {2**63}"),
        ({"prompt": [5], "repetition_penalty": 1e-12}, "repetition_penalty must be a number from 0.01 to 100; got 1e-"),
        ({"prompt": [5], "stop": [str(n) for n in range(17)]}, "a list of up to 16 texts"),
        ({"prompt": [5], "stop": ["a", ""]}, "stop must be a text or a list of up to 16 texts, none of them empty"),
        ({"prompt": [5], "stop": ""}, "stop must be a text or a list of up to 16 texts, none of them empty; got ''"),
        ({"prompt": [5], "stop": "", "stream": True}, "stop must be a text or a list of up to 16 texts"),
        ({"prompt": "a\ud83d"}, "the body has '\\ud83d', half of a character. Send both halves"),
        ({"prompt": [5], "stop": "\ude00"}, "the body has '\\ude00', half of a character"),
        ({"prompt": [5], "model": "\ud83d"}, "the body has '\\ud83d', half of a character"),
        ({"prompt": [5], "\ud83d": 1}, "the body has '\\ud83d', half of a character"),
        ({"prompt": [5], "logit_bias": {"9" * 5000: 1}}, "logit_bias must be token ids"),
        ({"prompt": [5] * 1025, "max_tokens": 0, "echo": True, "logprobs": 1}, "the prompt has 1025"),
        ({"prompt": [5], "logit_bias": {"a": 1}}, "logit_bias must be token ids"),
        ({"prompt": [5], "logit_bias": {"4096": 1}}, "logit_bias must be of token ids below 4096; got '4096'"),
        ({"prompt": [5], "frequency_penalty": 0.5}, "frequency_penalty must be 0 here; use repetition_penalty"),
        ({"prompt": [5], "presence_penalty": 1}, "presence_penalty must be 0 here"),
        ({"prompt": [5], "suffix": "the end"}, "suffix must be empty"),
        ({"prompt": [5], "top_k": 5}, "unknown or unsupported field 'top_k'; did you mean 'top_p'?"),
        ({"prompt": [5], "generation_config": "{}"}, "unknown or unsupported field 'generation_config'"),
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


def refused(url: str, data: bytes | None) -> tuple[int, str]:
    """The status and message of an error; GET without data."""
    with pytest.raises(HTTPError) as error:
        urlopen(Request(url, data, {"Content-Type": "application/json"}))
    return error.value.code, json.load(error.value)["error"]["message"]


def test_a_model_without_a_chat_template_refuses_messages(url: str) -> None:
    body = json.dumps({"model": "austen", "messages": [{"role": "user", "content": "Hello"}]}).encode()
    assert refused(f"{url}/v1/chat/completions", body) == (
        400,
        "the model has no chat template. Send a prompt to /v1/completions instead.",
    )


def test_other_endpoints_and_bodies_are_refused_in_words(url: str) -> None:
    for path in ("/v1/responses", "/v1/systemone", "/v1/audio/transcriptions", "/load_model", "/reset", "/nowhere"):
        assert refused(f"{url}{path}", b"{}") == (
            404,
            f"there is no POST {path} here. Known: /v1/chat/completions, /v1/completions, /v1/models, /health.",
        )
    assert refused(f"{url}/v1/completions", None)[0] == 405
    for body in (b"[1]", b"{", b'{"prompt":' + 100_000 * b"["):
        assert refused(f"{url}/v1/completions", body) == (
            400,
            "the body is not a JSON object. Send one, as application/json.",
        )
    with urlopen(f"{url}/health") as answer:
        assert json.load(answer) == {"status": "ok"}


def streamed(url: str, path: str = "completions", **body: object) -> tuple[str, str]:
    """The text of a streamed answer, and the reason for its end."""
    data = json.dumps({"model": "austen", "temperature": 0, "stream": True, **body}).encode()
    with urlopen(Request(f"{url}/v1/{path}", data, {"Content-Type": "application/json"})) as answer:
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["text"] if path == "completions" else choice["delta"].get("content") for choice in choices]
    return "".join(filter(None, texts)), choices[-1]["finish_reason"]


def test_the_name_in_an_answer_is_the_one_that_was_asked_for(url: str) -> None:
    assert completion(url, prompt=IDS, max_tokens=1)["model"] == "austen"
    assert completion(url, prompt=IDS, max_tokens=1, logprobs=1)["model"] == "austen"


def test_an_answer_ends_before_the_first_stop_string(url: str) -> None:
    whole = completion(url, prompt=IDS, max_tokens=40)["choices"][0]["text"]
    assert streamed(url, prompt=IDS, max_tokens=40) == (whole, "length")
    words = whole.split()
    assert len(words) > 8
    # One that ends inside a token, one of several tokens, and the earlier of two.
    for stop in (words[4][:-1], f"{words[4]} {words[5]}", [words[8], words[4]], ["not there", words[4]]):
        before = whole[
            : min(at for each in ([stop] if isinstance(stop, str) else stop) if (at := whole.find(each)) >= 0)
        ]
        (choice,) = completion(url, prompt=IDS, max_tokens=40, stop=stop)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (before, "stop")
        assert streamed(url, prompt=IDS, max_tokens=40, stop=stop) == (before, "stop")
    # What only begins as a stop string does is not lost.
    almost = f"{words[4]} {words[5]} Darcy"
    assert streamed(url, prompt=IDS, max_tokens=40, stop=almost) == (whole, "length")


def test_temperature_and_top_p_sample_and_a_seed_repeats(url: str) -> None:
    def drawn(**how: object) -> str:
        return completion(url, prompt=IDS[:100], max_tokens=20, **how)["choices"][0]["text"]

    greedy = drawn()
    assert {drawn(temperature=1, seed=7), drawn(top_p=0.95, temperature=None, seed=7)}.isdisjoint({greedy})
    assert drawn(temperature=1.0, seed=7) == drawn(temperature=1.0, seed=7) != drawn(temperature=1.0, seed=8)
    assert drawn(temperature=1, top_p=1e-6) == drawn(temperature=0, top_p=0.5) == drawn(temperature=1e-9) == greedy
    assert streamed(url, prompt=IDS[:100], max_tokens=20, temperature=1, seed=7)[0] == drawn(temperature=1, seed=7)


def test_sampling_draws_beyond_the_50_likeliest_tokens(url: str, folder: Path) -> None:
    """Which is where transformers' default top_k would end."""
    model, tokenizer = ctxext.load(folder, dtype=torch.float32), load_tokenizer(folder)
    with torch.inference_mode():
        likeliest = model(torch.tensor([IDS[:20]])).logits[0, -1].topk(50)
    texts = {tokenizer.decode([token]) for token in likeliest.indices.tolist()}
    drawn = [
        completion(url, prompt=IDS[:20], max_tokens=1, temperature=3, seed=seed)["choices"][0]["text"]
        for seed in range(20)
    ]
    assert any(text not in texts for text in drawn)


def test_a_logit_bias_forces_and_forbids_a_token(url: str, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    greedy = completion(url, prompt=IDS, max_tokens=1)["choices"][0]["text"]
    (token,) = (each for each in range(4096) if tokenizer.decode([each]) == " Emma")
    for streaming in (False, True):
        ask = streamed if streaming else lambda *a, **k: (completion(*a, **k)["choices"][0]["text"], "")
        assert ask(url, prompt=IDS, max_tokens=2, logit_bias={str(token): 100})[0] == " Emma Emma"
        (first,) = tokenizer(greedy, add_special_tokens=False)["input_ids"]
        assert ask(url, prompt=IDS, max_tokens=1, logit_bias={str(first): -100})[0] != greedy
    assert completion(url, prompt=IDS, max_tokens=1, logit_bias={})["choices"][0]["text"] == greedy


def test_fields_that_change_nothing_are_accepted(url: str) -> None:
    plain = completion(url, prompt=IDS, max_tokens=4)["choices"]
    neutral = {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "echo": False, "suffix": "",
               "stop": None, "logprobs": None, "user": "me", "repetition_penalty": 1.0}  # fmt: skip
    assert completion(url, prompt=IDS, max_tokens=4, **neutral)["choices"] == plain
    assert (
        completion(url, prompt=IDS, max_tokens=8, repetition_penalty=50)["choices"]
        != (completion(url, prompt=IDS, max_tokens=8)["choices"])
    )


def test_bounds_that_nothing_needs_are_not_set(url: str) -> None:
    plain = completion(url, prompt=IDS, max_tokens=2)["choices"]
    assert completion(url, prompt=IDS, max_tokens=2, temperature=1, top_p=1e-12)["choices"] == plain
    usage = completion(url, prompt=[*IDS, *IDS][:1020], max_tokens=10**30)["usage"]
    assert usage["total_tokens"] <= 1024
    (choice,) = completion(url, prompt=[*IDS, *IDS][:1024], max_tokens=0, echo=True, logprobs=1)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 1024


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


def test_eval_scores_text_as_the_extended_model(url: str, folder: Path) -> None:
    """Also a text of the maximum length, which leaves no room for a generated token."""
    served, model = ServedModel(url, style="base"), ctxext.load(folder, dtype=torch.float32)
    served.check_scores(IDS[:16], load_tokenizer(folder))
    for ids in (IDS, [5 + (7 * k) % 4000 for k in range(1024)]):
        assert (served.losses(ids).losses.double() + logprobs_of(model, ids)).abs().max() < 1e-4


def test_verify_says_applied(url: str, folder: Path) -> None:
    make_probe(ctxext.load(folder, dtype=torch.float32), load_tokenizer(folder)).save(folder.parent / "verify.json")
    verdict = verify(url, folder.parent / "verify.json").verdict
    assert (verdict.name, verdict.asked_to) == ("applied", 1024)
    assert verdict.distances["extended"] < 1e-4


@contextmanager
def serving_here(model: Any, tokenizer: Any) -> Iterator[str]:
    """The application in a thread; gives its URL."""
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(model, tokenizer, "austen", 1024),
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
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_an_address_that_cannot_be_listened_on_is_refused_before_loading() -> None:
    def said(*arguments: object) -> str:
        return str(CliRunner().invoke(commands, ["serve", "nowhere", *map(str, arguments)]).exception)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert said("--port", port) == (
            f"port {port} of 127.0.0.1 is in use. Stop what listens there, or pass another --port; 0 is a free one."
        )
    assert "'nowhere' is neither a folder" in said("--port", port)
    for host in ("192.0.2.1", "no.such.host.invalid", 70 * "a"):
        assert said("--host", host) == (
            f"--host {host} is not an address of this machine. Pass 127.0.0.1, or 0.0.0.0 for every network interface."
        )
    for wrong in (70000, -1):
        assert said("--port", wrong) == f"--port must be from 0 to 65535, got {wrong}."


class Steps:
    """Counts a model's forward passes, and lets them pass only while `open`."""

    def __init__(self, model: Any) -> None:
        self.count, self.open, self.begun = 0, Event(), Event()
        self.forward, model.forward = model.forward, self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        self.begun.set()
        assert self.open.wait(60)
        return self.forward(*args, **kwargs)


def sent(url: str, **body: object) -> socket.socket:
    """The connection of a request whose answer was not read."""
    data = json.dumps({"model": "austen", "temperature": 0, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def noticed(url: str) -> None:
    """Returns when the server has seen what was sent or closed before."""
    for _ in range(5):
        with urlopen(f"{url}/health"):
            pass


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"logprobs": 1}], ids=str)
def test_an_answer_ends_when_its_client_hangs_up(how: dict, folder: Path) -> None:
    model = ctxext.load(folder, dtype=torch.float32)
    whole = {"prompt": IDS[:20], "max_tokens": 900, "logit_bias": {"0": -100}}  # without its end
    whole = {**whole, **how} if "logprobs" not in how else {**whole, **how, "logit_bias": None}
    with serving_here(model, load_tokenizer(folder)) as url:
        steps = Steps(model)
        answered = sent(url, **whole)
        assert steps.begun.wait(60)
        waiting = sent(url, **whole)
        noticed(url)
        answered.close()
        waiting.close()
        noticed(url)
        steps.open.set()
        assert completion(url, prompt=IDS[:20], max_tokens=3)["usage"]["completion_tokens"] == 3
        # One of the first request, at most one of the second, and three of the third.
        assert steps.count <= 5


def test_chat_applies_or_refuses_every_field(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}"
        "{{ message.content }}{% endfor %}{{ more }}"
    )
    text = "It is a truth universally acknowledged, that a single man"
    said = [{"role": "user", "content": text}]
    with serving_here(ctxext.load(folder, dtype=torch.float32), tokenizer) as url:

        def chat(**body: object) -> dict:
            asked = {"model": "austen", "messages": said, "temperature": 0, "max_tokens": 12, **body}
            return Endpoint(url).call("chat/completions", asked, "a chat")

        def content(**body: object) -> str:
            return chat(**body)["choices"][0]["message"]["content"]

        plain = content()
        assert plain == completion(url, prompt=text, max_tokens=12)["choices"][0]["text"]
        assert chat()["model"] == "austen"
        parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        neutral = {
            "n": 1,
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "logprobs": False,
            "store": False,
        }
        assert content(messages=parts, **neutral) == plain
        assert (
            content(max_tokens=None, max_completion_tokens=3)
            == completion(url, prompt=text, max_tokens=3)["choices"][0]["text"]
        )
        assert content(chat_template_kwargs={"more": " Emma"}) != plain
        stop = plain.split()[3]
        before = plain[: plain.index(stop)]
        (choice,) = chat(stop=stop)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (before, "stop")
        assert streamed(url, "chat/completions", messages=said, max_tokens=12, stop=stop) == (before, "stop")
        assert content(temperature=1, seed=3) == content(temperature=1, seed=3) != plain
        assert content(logit_bias={"900": 100}, max_tokens=1) == tokenizer.decode([900])
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://…"}}]}]
        for body, says in (
            ({"messages": []}, "messages must be a list of messages, each with a role and a content of text"),
            ({"messages": None}, "messages is missing"),
            ({"messages": [{"content": "a"}]}, "messages must be a list of messages"),
            ({"messages": image}, "messages must be a list of messages"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "does not take these messages, tools or chat_template_"),
            ({"max_tokens": 0}, "max_tokens must be a number of tokens >= 1; got 0"),
            ({"max_completion_tokens": 3}, "are the same. Drop one"),
            ({"logprobs": True}, "/v1/completions has log-probabilities"),
            ({"n": 2}, "n must be 1"),
            ({"tool_choice": "required"}, "tool_choice must be 'auto'"),
            ({"response_format": {"type": "json_object"}}, "grammars are not supported"),
            ({"reasoning_effort": "high"}, "unknown or unsupported field 'reasoning_effort'"),
            ({"messages": [{"role": "user", "content": 2000 * "word "}]}, "maximum context length is 1024"),
        ):
            with pytest.raises(ValueError, match=re.escape(says)):
                chat(**body)


@pytest.mark.parametrize("method", ["dca", "rerope", "dynamic_yarn", "transformers_dynamic", "yarn"])
def test_every_kind_of_method_is_served(method: str) -> None:
    model = ctxext.extend_context(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), 2, method)
    with serving_here(model, load_tokenizer(MODEL)) as url:
        if method == "transformers_dynamic":
            asked = {"model": "austen", "prompt": IDS, "logprobs": 1, "max_tokens": 1}
            with pytest.raises(ValueError, match="its frequencies depend on the whole call"):
                Endpoint(url).call("completions", asked)
        else:
            assert (served_scores(Endpoint(url), IDS).logprobs - logprobs_of(model, IDS)).abs().max() < 1e-4
        text = completion(url, prompt=IDS, max_tokens=4)["choices"][0]["text"]
        cached = method != "transformers_dynamic"
        new = model.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False, use_cache=cached)[0, 700:]
        assert text == load_tokenizer(MODEL).decode(new)
