"""A served model answers as the model itself does, and what goes wrong on the way is said."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from functools import cache
from typing import Any

import pytest
import torch
from live_server import CHAT_TEMPLATE, Fault, LiveServer
from transformers import AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, Sample, make_task
from ctxext.evals.server import ServedModel
from ctxext.export.served import NoLogprobs
from ctxext.utils import endpoint as client

PROSE = "She had been forced into prudence in her youth, she learned romance as she grew older."


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def make_samples(tokenizer) -> Callable[..., list[Sample]]:
    haystack = Haystack.from_file(PERSUASION, tokenizer)

    @cache
    def make(style: str = "base", answer_tokens: int | None = None, length: int = 256) -> list[Sample]:
        task, prompter = make_task("passkey"), Prompter(tokenizer, style, answer_tokens)
        places = task.places([length], [0.0, 0.3, 0.6, 1.0], trials=2, seed=0)
        return [task.sample(place, prompter, haystack) for place in places]

    return make


@pytest.fixture(scope="module")
def samples(make_samples) -> list[Sample]:
    return make_samples()


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    with LiveServer(chat_template=CHAT_TEMPLATE) as server:
        yield server


@pytest.fixture
def live(shared: LiveServer) -> LiveServer:
    """The shared server as it was at first."""
    fresh = LiveServer.__dataclass_fields__
    for name in ("extra_token", "thought", "reasoning_field", "repetition_penalty", "refused_fields", "usage", "peak"):
        setattr(shared, name, fresh[name].default)
    shared.prompt_scores = ""
    shared.api_key, shared.names = None, ("austen-4m",)
    shared.requests.clear()
    shared.faults.clear()
    return shared


@pytest.fixture(autouse=True)
def no_key_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(client.time, "sleep", slept.append)
    return slept


@pytest.fixture(scope="module")
def generated(shared: LiveServer) -> Callable[[Sample], str]:
    """What the model says by itself."""

    @cache
    def generate(sample: Sample) -> str:
        prompt = torch.tensor([sample.input_ids[: sample.n_prompt]])
        with torch.inference_mode():
            out = shared.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=sample.answer_tokens, do_sample=False
            )
        return shared.tokenizer.decode(out[0, sample.n_prompt :], skip_special_tokens=True)

    return generate


def test_a_served_model_answers_as_the_model_itself(live: LiveServer, samples: list[Sample], generated) -> None:
    served = ServedModel(live.url, style="base", concurrency=1)
    answers = [served.answer(sample) for sample in samples]
    assert answers == [generated(sample) for sample in samples]
    assert len(set(answers)) == len(samples) == 8
    assert sum(sample.score(answer) for sample, answer in zip(samples, answers)) >= 6


def test_answers_do_not_depend_on_concurrency(live: LiveServer, samples: list[Sample]) -> None:
    serial = dict(ServedModel(live.url, style="base", concurrency=1).answers(samples))
    assert live.peak == 1
    together = dict(ServedModel(live.url, style="base", concurrency=3).answers(iter(samples)))
    assert together == serial
    assert len(serial) == 8
    assert live.peak == 3


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_served_model_scores_text_as_the_model_itself(live: LiveServer, tokenizer, form: str) -> None:
    """Also a text that leaves no room for an answer; SGLang does not say which tokens are the most likely."""
    live.prompt_scores, served = form, ServedModel(live.url, style="base")
    served.check_scores(range(5, 21), tokenizer)
    for length in (200, 512) if form == "vllm" else (200,):
        ids = [5 + (7 * k) % 4000 for k in range(length)]
        here, there = Engine(live.model).losses(ids), served.losses(ids)
        assert (here.losses - there.losses).abs().max() < 1e-4
        assert (there.top1 is None) == (form == "sglang")
        assert form == "sglang" or here.top1.equal(there.top1)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_right_answers_are_scored_as_under_teacher_forcing(
    live: LiveServer, samples: list[Sample], tokenizer, form: str
) -> None:
    live.prompt_scores, served = form, ServedModel(live.url, style="base")
    served.check_scores(range(5, 21), tokenizer)
    ((sample, forced),) = Engine(live.model).forced([samples[:1]])
    assert served.logprob(sample) == pytest.approx(float(forced.logprobs.sum()), abs=1e-3)


def test_a_server_without_log_probabilities_is_told_from_one_with(live: LiveServer, tokenizer) -> None:
    served = ServedModel(live.url, style="base")
    with pytest.raises(NoLogprobs, match="returns no prompt log-probabilities in the format"):
        served.check_scores(range(5, 21), tokenizer)
    assert not served.scores


@dataclass
class Lying(LiveServer):
    """One that spoils the log-probabilities of a prompt, or the whole reply."""

    spoil: Callable[[dict[str, Any]], None] = lambda choice: None

    def score(self, ids: list[int], body: dict[str, Any], choice: dict[str, Any]) -> None:
        super().score(ids, body, choice)
        if choice.get("prompt_logprobs") or ("echo" in body and choice.get("logprobs")):
            self.spoil(choice)


def echoed(change: Callable[[list[Any]], list[Any]]) -> Callable[[dict[str, Any]], None]:
    def spoil(choice: dict[str, Any]) -> None:
        choice["logprobs"]["token_logprobs"] = change(choice["logprobs"]["token_logprobs"])

    return spoil


def entries(change: Callable[[float], Any]) -> Callable[[dict[str, Any]], None]:
    def spoil(choice: dict[str, Any]) -> None:
        for each in (each for entry in choice["prompt_logprobs"][1:] for each in entry.values()):
            each["logprob"] = change(each["logprob"])

    return spoil


def shifted(choice: dict[str, Any]) -> None:
    """Each token with the value of the one before it."""
    own = [min(entry.values(), key=lambda each: each["logprob"]) for entry in choice["prompt_logprobs"][1:]]
    values = [each["logprob"] for each in own]
    for each, value in zip(own[1:], values):
        each["logprob"] = value


NOT_OF_EACH, NO_LOGPROBS = "did not return one log-probability for each of the", "NaN, infinite or positive log-prob"


@pytest.mark.parametrize(
    ("form", "spoil", "said"),
    [
        ("sglang", echoed(lambda given: given[1:]), NOT_OF_EACH),
        ("sglang", echoed(lambda given: [*given[1:], None]), NOT_OF_EACH),
        ("sglang", echoed(lambda given: [*given, -1.0]), NOT_OF_EACH),
        ("sglang", echoed(lambda given: [each and math.nan for each in given]), NO_LOGPROBS),
        ("vllm", entries(lambda value: -value), NO_LOGPROBS),
        ("vllm", entries(lambda value: math.nan), NO_LOGPROBS),
        ("vllm", entries(lambda value: -math.inf), NO_LOGPROBS),
        ("vllm", entries(lambda value: True), NOT_OF_EACH),
        ("vllm", entries(str), NOT_OF_EACH),
        ("vllm", entries(lambda value: 0.0), "log-probabilities of 0 for every token"),
        ("vllm", lambda choice: choice["prompt_logprobs"].__setitem__(1, None), NOT_OF_EACH),
        ("vllm", shifted, "other log-probabilities if they are sent one by one"),
    ],
)
def test_what_are_not_the_log_probabilities_of_the_tokens_sent_is_refused(
    live: LiveServer, tokenizer, form: str, spoil: Callable[[dict[str, Any]], None], said: str
) -> None:
    with Lying(model=live.model, prompt_scores=form, spoil=spoil) as server:
        served = ServedModel(server.url, style="base", retries=0)
        with pytest.raises(ValueError, match=said):
            served.check_scores(tokenizer(PROSE)["input_ids"], tokenizer)
    assert not served.scores


def test_a_server_that_adds_a_token_is_refused_where_log_probabilities_are_read(live: LiveServer, tokenizer) -> None:
    live.prompt_scores, live.extra_token = "vllm", True
    with pytest.raises(ValueError, match=r"puts a token \(a BOS\) before the tokens sent"):
        ServedModel(live.url, style="base").check_scores(tokenizer(PROSE)["input_ids"], tokenizer)


def test_a_tokenizer_of_another_model_is_told(live: LiveServer, tokenizer) -> None:
    """It has as many tokens, under other numbers."""
    live.prompt_scores = "sglang"

    class Permuted:
        def decode(self, ids: Any, **options: Any) -> str:
            return tokenizer.decode([(4000 - k) if 5 < k < 3995 else k for k in ids], **options)

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [(4000 - k) if 5 < k < 3995 else k for k in tokenizer(text)["input_ids"]]}

    permuted = Permuted()
    with pytest.raises(ValueError, match="other log-probabilities if they are sent as text"):
        ServedModel(live.url, style="base").check_scores(permuted(PROSE)["input_ids"], permuted)


def test_a_server_that_answers_as_another_model_is_told(live: LiveServer, samples: list[Sample]) -> None:
    served = ServedModel(live.url, style="base", concurrency=1)
    served.answer(samples[0])
    live.names = ("austen-4m", "fallback")
    served.name = "fallback"
    with pytest.raises(ConnectionError, match="answers as 'fallback', and answered as 'austen-4m' before"):
        served.answer(samples[1])


def test_samples_are_drawn_only_as_fast_as_they_are_answered(live: LiveServer, samples: list[Sample]) -> None:
    drawn: list[Sample] = []

    def draw() -> Iterator[Sample]:
        for sample in samples:
            drawn.append(sample)
            yield sample

    answers = ServedModel(live.url, style="base", concurrency=2).answers(draw())
    next(answers)
    assert len(drawn) == 2
    next(answers)
    assert len(drawn) == 3


def test_an_error_is_raised_after_what_was_under_way(live: LiveServer, samples: list[Sample], generated) -> None:
    live.faults.append(Fault(400))
    answered: list[tuple[Sample, str]] = []
    with pytest.raises(ValueError, match="out of order"):
        answered.extend(ServedModel(live.url, style="base", concurrency=4).answers(samples))
    assert len(answered) == len(live.requests) - 1
    assert 3 <= len(answered) < 7
    assert all(answer == generated(sample) for sample, answer in answered)


def test_an_error_of_the_samples_loses_no_answer(live: LiveServer, samples: list[Sample]) -> None:
    def draw() -> Iterator[Sample]:
        yield from samples[:3]
        raise ValueError("the haystack is too short")

    answers = ServedModel(live.url, style="base", concurrency=4).answers(draw())
    assert {sample for sample, _ in (next(answers), next(answers), next(answers))} == set(samples[:3])
    with pytest.raises(ValueError, match="the haystack is too short"):
        next(answers)


def test_a_prompt_of_another_size_for_the_server_is_an_error(live: LiveServer, samples: list[Sample]) -> None:
    live.extra_token = True
    sample = samples[0]
    with pytest.raises(ValueError, match=f"read {sample.n_prompt + 1} tokens .* prompt of {sample.n_prompt} tokens"):
        ServedModel(live.url, style="base").answer(sample)
    assert ServedModel(live.url, style="base", strict_size=False).answer(sample)
    live.usage = False
    assert ServedModel(live.url, style="base").answer(sample)


def test_greedy_means_no_penalty_that_the_server_would_apply(
    live: LiveServer, samples: list[Sample], generated
) -> None:
    live.repetition_penalty = 5.0
    served = ServedModel(live.url, style="base")
    assert [served.answer(sample) for sample in samples[:3]] == [generated(sample) for sample in samples[:3]]
    served._extras = {}
    assert [served.answer(sample) for sample in samples[:3]] != [generated(sample) for sample in samples[:3]]


@pytest.mark.parametrize(("style", "other"), [("chat", "thinking"), ("thinking", "chat")])
def test_a_chat_is_templated_by_the_server_as_by_the_prompter(
    live: LiveServer, make_samples, generated, style: str, other: str
) -> None:
    samples = make_samples(style, 6)
    live.thought = "<think>Hm.</think>" if style == "thinking" else ""
    answers = dict(ServedModel(live.url, style=style).answers(samples))
    assert answers == {sample: generated(sample) for sample in samples}
    # The template begins the answer, and the model goes on behind it.
    assert sum(sample.references[0] in answer for sample, answer in answers.items()) >= 6
    path, body = live.requests[-1]
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert body["chat_template_kwargs"] == {"enable_thinking": style == "thinking"}
    # Asked in the other style, the template writes another prompt, and its size tells.
    with pytest.raises(ValueError, match="chat template differs"):
        ServedModel(live.url, style=other).answer(samples[0])


@pytest.mark.slow
def test_a_begun_answer_reaches_a_chat_server_as_it_is(live: LiveServer, make_samples, tokenizer, generated) -> None:
    """The spaces of its lead included, which a chat template could strip."""
    prompter = Prompter(tokenizer, "chat", answer_tokens=64)
    task = make_task("niah_single_1", compat="nvidia")
    sample = task.sample(Place(task.name, 500, None, 0, 0), prompter, Haystack.from_file(PERSUASION, tokenizer))
    assert sample.lead.startswith(" ")
    for one, end in ((sample, sample.lead), (make_samples("chat")[0], " The pass key isThe pass key is ")):
        assert tokenizer.decode(one.input_ids[: one.n_prompt]).endswith(end)
        assert ServedModel(live.url, style="chat").answer(one) == generated(one)
        path, body = live.requests[-1]
        assert path == "/v1/completions"
        assert body["prompt"] == list(one.input_ids[: one.n_prompt])
        assert "chat_template_kwargs" not in body


def test_a_field_that_the_server_refuses_is_left_out_from_then_on(live: LiveServer, make_samples, generated) -> None:
    live.refused_fields = ("repetition_penalty", "chat_template_kwargs")
    # What this style's template writes without being told is the thinking prompt.
    sample = make_samples("thinking", 6)[0]
    live.thought = "<think>Hm.</think>"
    served = ServedModel(live.url, style="thinking")
    assert served.answer(sample) == generated(sample)
    assert [sorted(live.refused_fields & body.keys()) for _, body in live.requests] == [
        ["chat_template_kwargs", "repetition_penalty"],
        ["chat_template_kwargs"],
        [],
    ]
    served.answer(sample)
    assert len(live.requests) == 4
    # Without the field a chat is another prompt: that does not pass unseen.
    with pytest.raises(ValueError, match="chat template differs"):
        ServedModel(live.url, style="chat").answer(make_samples("chat", 6)[0])


def test_vllm_may_refuse_the_field_under_another_name(live: LiveServer, make_samples, generated) -> None:
    """Its words for Mistral's own tokenizer."""
    live.faults.append(Fault(400, b'{"error": {"message": "chat_template is not supported for Mistral tokenizers."}}'))
    sample = make_samples("thinking", 6)[0]
    live.thought = "<think>Hm.</think>"
    assert ServedModel(live.url, style="thinking").answer(sample) == generated(sample)
    assert ["chat_template_kwargs" in body for _, body in live.requests] == [True, False]


@pytest.mark.parametrize("field", [None, "reasoning_content", "reasoning"])
def test_thoughts_are_no_part_of_an_answer(live: LiveServer, make_samples, generated, field: str | None) -> None:
    sample = make_samples("thinking", 6)[0]
    live.thought, live.reasoning_field = "<think>Is it 11111? </think> No, 22222.</think>", field
    assert ServedModel(live.url, style="thinking").answer(sample) == generated(sample)
    # Who does not ask for thoughts gets what the server says.
    chat = make_samples("chat", 6)[0]
    assert ("11111" in ServedModel(live.url, style="chat").answer(chat)) == (field is None)


@pytest.mark.parametrize("thought", ["<think>Is it 11111? ", "Is it 11111? "])
def test_a_thought_that_was_cut_off_is_no_answer(live: LiveServer, make_samples, thought: str) -> None:
    live.thought = thought
    assert ServedModel(live.url, style="thinking").answer(make_samples("thinking", 6)[0]) == ""


def test_an_answer_without_content_is_empty(live: LiveServer, make_samples) -> None:
    """As vLLM gives it where all tokens went into the thought."""
    live.faults.append(Fault(200, b'{"choices": [{"message": {"content": null, "reasoning": "Is it 11111?"}}]}'))
    assert ServedModel(live.url, style="thinking").answer(make_samples("thinking", 6)[0]) == ""


def test_passing_faults_are_retried_ever_more_slowly(
    live: LiveServer, samples: list[Sample], generated, waits: list[float]
) -> None:
    live.faults += [Fault(503), Fault(0), Fault(200, b"{", {"Content-Length": "99"})]
    assert ServedModel(live.url, style="base").answer(samples[0]) == generated(samples[0])
    assert waits == [1.0, 2.0, 4.0]
    assert len(live.requests) == 4


def test_retries_wait_as_long_as_the_server_asks(
    live: LiveServer, samples: list[Sample], generated, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.time, "time", lambda: 1.7e9)
    live.faults += [
        Fault(429, headers={"Retry-After": "7"}),
        Fault(503, headers={"Retry-After": formatdate(1.7e9 + 60, usegmt=True)}),
    ]
    assert ServedModel(live.url, style="base").answer(samples[0]) == generated(samples[0])
    assert waits[0] == 7
    assert waits[1] == 60
    live.faults.append(Fault(429, headers={"Retry-After": "3600"}))
    with pytest.raises(RuntimeError, match=r"429 \(out of order\), and asks to wait 3600 s"):
        ServedModel(live.url, style="base", timeout=60).answer(samples[0])
    assert len(waits) == 2


def test_faults_that_do_not_pass_are_told(live: LiveServer, samples: list[Sample], waits: list[float]) -> None:
    live.faults += [Fault(503)] * 2
    with pytest.raises(RuntimeError, match=r"returned 503 \(out of order\).*check its log"):
        ServedModel(live.url, style="base", retries=1).answer(samples[0])
    live.faults += [Fault(0)] * 2
    with pytest.raises(ConnectionError, match="closed the connection"):
        ServedModel(live.url, style="base", retries=1).answer(samples[0])
    assert len(live.requests) == 4
    assert waits == [1.0, 1.0]


def test_silence_is_an_error_after_the_timeout(live: LiveServer, samples: list[Sample], waits: list[float]) -> None:
    live.faults.append(Fault(500, seconds=600))
    with pytest.raises(TimeoutError, match=r"sent no whole answer within 0\.5 s\. Raise the timeout"):
        ServedModel(live.url, style="base", timeout=0.5).answer(samples[0])
    assert waits == []


def test_a_server_that_is_not_there_is_told(waits: list[float]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port}/v1/models cannot be reached .*refused"):
            ServedModel(f"http://127.0.0.1:{port}", style="base")
    assert waits == []


def test_a_prompt_that_is_too_long_is_refused_in_the_servers_words(live: LiveServer, make_samples) -> None:
    sample = make_samples(length=640)[0]
    with pytest.raises(ValueError, match=r"passkey prompt of 63\d tokens .* maximum context length is 512 .*--max-mod"):
        ServedModel(live.url, style="base").answer(sample)
    assert len(live.requests) == 1


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<html>welcome</html>", "no JSON object: b'<html>welcome"),
        (b"[1]", "no JSON object"),
        (b'{"error": "Unexpected endpoint"}', "no completion: .*Unexpected endpoint"),
        (b'{"choices": []}', "no completion"),
        (b'{"choices": [{"text": ["a"]}]}', "no completion"),
    ],
)
def test_what_is_no_completion_is_shown(live: LiveServer, samples: list[Sample], body: bytes, shown: str) -> None:
    live.faults.append(Fault(200, body))
    with pytest.raises(ValueError, match=shown):
        ServedModel(live.url, style="base").answer(samples[0])


@pytest.mark.parametrize(
    "body", [b'{"message": "no"}', b'{"detail": "no"}', b'{"error": "no"}', b'{"error": {"message": "no."}}', b"no\n"]
)
def test_every_servers_words_are_found(live: LiveServer, samples: list[Sample], body: bytes) -> None:
    live.faults.append(Fault(422, body))
    with pytest.raises(ValueError, match=r"with 422: no\. If the prompt is too long"):
        ServedModel(live.url, style="base").answer(samples[0])


def test_a_redirect_is_not_followed(live: LiveServer, samples: list[Sample]) -> None:
    live.faults.append(Fault(307, headers={"Location": f"{live.url}/v2/completions"}))
    with pytest.raises(ValueError, match=r"has moved to .*/v2/completions"):
        ServedModel(live.url, style="base", api_key="secret").answer(samples[0])
    assert len(live.requests) == 1


def test_a_key_is_sent_and_never_shown(
    live: LiveServer, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    live.api_key = "secret"
    with pytest.raises(PermissionError, match=r"401 \(invalid key\); no key was sent\. Set OPENAI_API_KEY"):
        ServedModel(live.url, style="base")
    with pytest.raises(PermissionError, match="a key was sent") as error:
        ServedModel(live.url, style="base", api_key="hunter2")
    assert "hunter2" not in str(error.value)
    assert ServedModel(live.url, style="base", api_key="secret").answer(samples[0])
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    assert ServedModel(live.url, style="base").answer(samples[0])
    with pytest.raises(PermissionError, match="no key was sent"):
        ServedModel(live.url, style="base", api_key="")


def test_the_address_is_taken_with_and_without_v1(live: LiveServer) -> None:
    for tail in ("", "/", "/v1", "/v1/"):
        assert ServedModel(live.url + tail, style="base").url == live.url
    with pytest.raises(ValueError, match=r"404 \(no /elsewhere/v1/models here\).* up to /v1"):
        ServedModel(live.url + "/elsewhere", style="base")
    with pytest.raises(ValueError, match="begin with http"):
        ServedModel("localhost:8000", style="base")


def test_the_model_is_the_one_that_is_served(live: LiveServer, samples: list[Sample]) -> None:
    served = ServedModel(live.url, style="base")
    assert (served.name, served.max_length) == ("austen-4m", 512)
    live.names = ("austen-4m", "emma")
    with pytest.raises(ValueError, match=r"serves 2 models\. Name one of them: austen-4m, emma"):
        ServedModel(live.url, style="base")
    with pytest.raises(ValueError, match="no model 'ema'; did you mean 'emma'"):
        ServedModel(live.url, style="base", model="ema")
    emma = ServedModel(live.url, style="base", model="emma")
    assert emma.answer(samples[0])
    assert live.requests[-1][1]["model"] == "emma"
    assert emma.fingerprint != served.fingerprint
    live.names = ()
    with pytest.raises(ValueError, match="lists no model"):
        ServedModel(live.url, style="base")


@pytest.mark.parametrize("how", ["error", "missing", "none"])
def test_a_named_model_is_trusted_where_the_server_lists_none(
    live: LiveServer, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """`transformers serve` answers /v1/models with 500, or with an empty list."""
    answers = {"error": (500, {"error": "no cache folder"}), "missing": (404, {"error": "no /v1/models here"}),
               "none": (200, {"data": []})}  # fmt: skip
    monkeypatch.setattr(live, "listing", answers[how])
    served = ServedModel(live.url, style="base", model="austen-4m", retries=0)
    assert (served.name, served.max_length) == ("austen-4m", None)
    assert served.answer(samples[0])
    with pytest.raises((ValueError, RuntimeError)):
        ServedModel(live.url, style="base", retries=0)


def test_a_fingerprint_is_of_the_model_and_not_of_its_address(live: LiveServer) -> None:
    here = ServedModel(live.url, style="base")
    assert ServedModel(live.url, style="base").fingerprint == here.fingerprint
    with LiveServer() as other:
        assert ServedModel(other.url, style="base").fingerprint == here.fingerprint
    with LiveServer(max_length=1024) as longer:
        assert ServedModel(longer.url, style="base").fingerprint != here.fingerprint


@pytest.mark.parametrize(
    "wrong", [{"style": "poetry"}, {"concurrency": 0}, {"retries": -1}, {"timeout": 0}], ids=lambda wrong: str(wrong)
)
def test_arguments_that_make_no_sense_are_refused(live: LiveServer, wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        ServedModel(live.url, **{"style": "base", **wrong})
