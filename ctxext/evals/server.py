"""Answer samples by a model behind an OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp's server).

The server tokenises and applies the chat template itself, so each answer's `usage.prompt_tokens` is compared with the
sample's `n_prompt`. This checks the number of tokens, not the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ctxext.evals.engine import Losses
from ctxext.evals.prompts import Style, check_style
from ctxext.evals.samples import Sample, fingerprint
from ctxext.export.served import NoLogprobs, Scores, check_logprobs, prompt_scores, token_scores
from ctxext.utils.endpoint import Endpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
# Mean nats per token between two ways to ask for the same log-probabilities: more than rounding explains.
APART = 0.5


class ServedModel(Endpoint):
    """A served model that answers samples by greedy decoding.

    Samples of style "base" are sent as text to /v1/completions, those of "chat" and "thinking" as one user message to
    /v1/chat/completions. If the prompt begins the answer after a chat template, its token ids are sent to
    /v1/completions, as the server's template could strip a final message to continue. Each request has two fields that
    OpenAI lacks: `repetition_penalty` 1, as vLLM and SGLang otherwise use the model's generation_config.json, whose
    penalty counts the prompt and so penalises the right answer; and, with a message,
    `chat_template_kwargs.enable_thinking`, which vLLM, SGLang and llama.cpp pass to the chat template as `Prompter`
    does. If a server refuses either by name, it is omitted from then on; the prompt size shows whether prompts are
    still the same.

    Not supported: streaming. Servers batch requests, and in bfloat16 a near tie may be resolved differently in another
    batch. If `</think>` is a special token, it is missing in the text: serve such a model with its reasoning parser.

    Args:
        url, connection: as in `Endpoint`.
        style: that of the `Prompter` with which the samples are made.
        concurrency: parallel requests in `answers`.
        strict_size: whether a different prompt size on the server is an error. Servers that report no sizes are
            trusted.

    Attributes:
        fingerprint: of the model's entry in /v1/models. Weak: other weights, quantisation or RoPE scaling under the
            same name and length go unnoticed, except that llama.cpp reports the number of parameters and bytes. Give
            each served variant its own name (vLLM and SGLang: --served-model-name, llama.cpp: --alias).
        max_length: tokens of prompt and answer together, if the server reports it. Older llama.cpp servers report the
            trained length (n_ctx_train) instead of the served one, so samples are not skipped by it.

    Raises as `Endpoint`.
    """

    def __init__(
        self, url: str, *, style: Style, concurrency: int = 4, strict_size: bool = True, **connection: Any
    ) -> None:
        check_style(style)
        if concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency}.")
        super().__init__(url, **connection)
        self.style, self.concurrency, self.strict_size = style, concurrency, strict_size
        self._whole = self._by_token = False  # how it returns log-probabilities: found by `check_scores`
        self._extras: dict[str, Any] = {"repetition_penalty": 1.0}
        if style != "base":
            self._extras["chat_template_kwargs"] = {"enable_thinking": style == "thinking"}

        meta = self.card.get("meta") or {}
        self.max_length: int | None = self.card.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
        # Not the whole entry: vLLM changes "created" and the permission's id with every request.
        told = ("id", "root", "parent", "max_model_len", "meta")
        self.fingerprint = fingerprint(*(self.card.get(key) for key in told))

    def answer(self, sample: Sample) -> str:
        """The model's answer to one sample, of at most `sample.answer_tokens` tokens, without thoughts.

        Empty if a thinking model ran out of tokens before `</think>`. Raises as `call`, and ValueError if the server
        does not return a completion or reads another number of prompt tokens.
        """
        prompt: dict[str, Any]
        if self.style == "base":
            path, prompt = "completions", {"prompt": sample.body + sample.lead}
        elif sample.begun:
            path, prompt = "completions", {"prompt": list(sample.input_ids[: sample.n_prompt])}
        else:
            path, prompt = "chat/completions", {"messages": [{"role": "user", "content": sample.body}]}
        about = f"a {sample.place.task} prompt of {sample.n_prompt} tokens with {sample.answer_tokens} for the answer"
        completion = self._post(
            path, {"model": self.name, **prompt, "max_tokens": sample.answer_tokens, "temperature": 0}, about
        )
        try:
            choice = completion["choices"][0]
            message = {"content": choice["text"]} if path == "completions" else choice["message"]
            # Null or missing if all tokens went into a separate thought.
            text = message.get("content") or ""
            n_read = (completion.get("usage") or {}).get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f"{self.url}/v1/{path} returned no completion: {json.dumps(completion)[:400]}. "
                "Is it an OpenAI-compatible server?"
            )
        if self.strict_size and n_read not in (None, sample.n_prompt):
            raise ValueError(
                f"the server read {n_read} tokens in {about}: its tokenizer or chat template differs, or it cuts long "
                "prompts. Make the samples with the served model's tokenizer and style, or pass strict_size=False to "
                "measure at inexact lengths."
            )
        return _behind_thought(message, choice.get("finish_reason")) if self.style == "thinking" else text

    def check_scores(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out how the server returns log-probabilities of given tokens, which `losses` and `logprob` need.

        Args:
            ids: some tokens of a text.
            tokenizer: of the model.

        Raises:
            NoLogprobs: it returns none.
            ValueError: it returns others for the same tokens sent as text or one by one; and as `prompt_scores`.
            ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `prompt_scores`.
        """
        if self.scores:
            return
        whole = last = None
        with suppress(NoLogprobs):
            whole = self._checked(prompt_scores(self, ids))
        try:
            last = self._checked(token_scores(self, ids, 4))
        except NoLogprobs:
            if whole is None:
                raise
        if whole is not None:
            if whole.logprobs.min() > -1e-3:
                raise ValueError(f"{self.url} returns log-probabilities of 0 for every token. Check its log.")
            text = str(tokenizer.decode([*ids], skip_special_tokens=True))
            own = tokenizer(text)["input_ids"]
            others = {"as text": (prompt_scores(self, own, text=text), prompt_scores(self, own))}
            if last is not None:
                others["one by one"] = last, Scores(whole.logprobs[-4:])
            for way, (one, other) in others.items():
                # A BOS that is added to text alone is no other tokenizer.
                if one.added == other.added and (one.logprobs - other.logprobs).abs().mean() > APART:
                    raise ValueError(
                        f"{self.url} gives the same tokens other log-probabilities if they are sent {way}. Check that "
                        "it serves this model with its own tokenizer."
                    )
        self._whole, self._by_token = whole is not None, last is not None

    def _checked(self, scores: Scores) -> Scores:
        """The scores, unless they are of other tokens than the sample's, or not log-probabilities."""
        if scores.added:
            raise ValueError(
                f"{self.url} puts a token (a BOS) before the tokens sent, so that its log-probabilities are of another "
                "text. Make the server take token ids as they are."
            )
        check_logprobs(scores.logprobs, self.url)
        return scores

    def call(self, path: str, body: dict[str, Any] | None = None, about: str = "the request") -> dict[str, Any]:
        """As `Endpoint.call`; a server that answers by the name of another model than before is refused."""
        answer = super().call(path, body, about)
        name = answer.get("model")
        if isinstance(name, str) and (first := self.__dict__.setdefault("_answers_as", name)) != name:
            raise ConnectionError(
                f"{self.url} answers as {name!r}, and answered as {first!r} before. Use a server that does not change "
                "the model, and another --output."
            )
        return answer

    @property
    def scores(self) -> bool:
        """Whether `check_scores` found that it returns log-probabilities."""
        return self._whole or self._by_token

    def losses(self, ids: Sequence[int]) -> Losses:
        """The loss of each token but the first, after `check_scores`: one request, or one per token."""
        if not self._whole:
            scores = self._checked(token_scores(self, ids, len(ids) - 1, known=True))
        elif len(ids) != self.max_length:
            scores = self._checked(prompt_scores(self, ids))
        elif self._by_token:  # the prompt must leave room for a token: the last one is generated
            before, last = prompt_scores(self, ids[:-1]), token_scores(self, ids, 1, known=True)
            top1 = None if before.top1 is None or last.top1 is None else torch.cat([before.top1, last.top1])
            scores = self._checked(Scores(torch.cat([before.logprobs, last.logprobs]), top1, before.added))
        else:
            scores = self._checked(prompt_scores(self, ids, new_tokens=0))
        return Losses(-scores.logprobs.float(), scores.top1)

    def logprob(self, sample: Sample) -> float:
        """The log-probability of the sample's right answer in nats, after `check_scores`: one request per token if
        possible, as a server with a prefix cache has read the prompt."""
        ids, n_answer = sample.input_ids, len(sample.input_ids) - sample.n_prompt
        if self._by_token:
            return self._checked(token_scores(self, ids, n_answer, known=True)).logprobs.sum().item()
        return -self.losses(ids).losses[-n_answer:].double().sum().item()

    def answers(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, str]]:
        """The samples with their answers as they finish: `each` of `answer`."""
        return self.each(samples, self.answer)

    def each(self, samples: Iterable[Sample], asked: Callable[[Sample], T]) -> Iterator[tuple[Sample, T]]:
        """What `asked` returns for each sample, as it finishes, with at most `concurrency` at a time.

        After an error, of a request or of `samples`, no further request is sent; answers in flight are still yielded,
        then the first error is raised.
        """
        waiting = iter(samples)
        finished: SimpleQueue[tuple[Sample, T | BaseException]] = SimpleQueue()
        errors: list[BaseException] = []
        running = 0

        def ask(sample: Sample) -> None:
            try:
                finished.put((sample, asked(sample)))
            except BaseException as error:  # re-raised by the thread that waits
                finished.put((sample, error))

        while True:
            try:
                for sample in islice(waiting, 0 if errors else self.concurrency - running):
                    # Daemon threads, not a pool: Ctrl-C must not wait for answers that may take minutes.
                    Thread(target=ask, args=(sample,), daemon=True).start()
                    running += 1
            except Exception as error:  # any kind: requests in flight are collected before it is raised
                errors.append(error)
            if not running:
                break
            sample, answer = finished.get()
            running -= 1
            if isinstance(answer, BaseException):
                errors.append(answer)
            else:
                yield sample, answer
        if errors:
            raise errors[0]

    def _post(self, path: str, body: dict[str, Any], about: str) -> dict[str, Any]:
        extras = {name: value for name, value in self._extras.items() if "messages" in body or "chat" not in name}
        try:
            return self.call(path, {**body, **extras}, about)
        except ValueError as error:
            # OpenAI: "Unrecognized request argument supplied: chat_template_kwargs". vLLM with Mistral's own
            # tokenizer: "chat_template is not supported for Mistral tokenizers".
            refused = [name for name in extras if name.removesuffix("_kwargs") in str(error)]
            if not refused:
                raise
        self._extras = {name: value for name, value in self._extras.items() if name not in refused}
        return self._post(path, body, about)


def _behind_thought(message: dict[str, Any], finish_reason: str | None) -> str:
    """The text after the last `</think>`, or all of it if the server returns thoughts separately.

    Thoughts are in `reasoning_content` (SGLang, llama.cpp, vLLM until 2025) or in `reasoning` (vLLM).
    """
    _, end, text = (message.get("content") or "").rpartition("</think>")
    apart = message.get("reasoning_content") or message.get("reasoning")
    # A template may open the thought itself, so a truncated one has no tag.
    unfinished = finish_reason == "length" or "<think>" in text
    return "" if unfinished and not (end or apart) else text
