"""A model behind an OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp's server): samples in, greedy answers out.

The server tokenises and templates on its own, so each answer's `usage.prompt_tokens` is held against the
sample's `n_prompt`: that prompts are exact to the token is checked on the server's side too. It does not
show that the tokens are the same ones, only that they are as many.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any, get_args

from ctxext.evals.prompts import Style
from ctxext.evals.samples import Sample, fingerprint
from ctxext.utils.endpoint import Endpoint


class ServedModel(Endpoint):
    """A served model that answers samples by greedy decoding.

    Samples for style "base" are sent as text to /v1/completions, those for "chat" and "thinking" as one user
    message to /v1/chat/completions. Where the prompt begins the answer behind a chat template, its token ids are
    sent to /v1/completions: as a final message to be continued, the server's template could strip it. Two fields
    go with each request that OpenAI does not have: `repetition_penalty` 1, as vLLM and SGLang otherwise take the
    one in the model's generation_config.json, which counts the prompt and so punishes the right answer; and, with
    a message, `chat_template_kwargs.enable_thinking`, which vLLM, SGLang and llama.cpp pass to the chat template
    as `Prompter` does. A server that refuses either by name is asked without it from then on; whether its
    prompts are still the same, their size shows.

    What this does not do: score given answers, measure log-probabilities, stream, or see the server's
    sampling. Servers batch requests, and in bfloat16 a near tie may fall otherwise in another batch. Where
    `</think>` is a special token it is not part of the text: serve such a model with its reasoning parser.

    Args:
        url: with or without /v1, such as "http://localhost:8000".
        style: that of the `Prompter` with which the samples are made.
        model: None: the one that the server has.
        api_key: None: the environment's OPENAI_API_KEY. An empty one is not sent.
        concurrency: requests at a time in `answers`.
        timeout: seconds for which the server may be silent; without streaming, that is a whole answer.
        retries: how often a request is sent again after a status of 429 or 5xx or a broken connection,
            after 1, 2, 4... seconds, or as many as Retry-After asks for if they are more.
        strict_size: whether a prompt that has another size for the server is an error. A server that
            tells no sizes is believed.

    Attributes:
        name: the model, as requests call it.
        fingerprint: of the name and of what /v1/models tells of the model itself. Weak: other weights, another
            quantisation or RoPE scaling under the same name and length go unnoticed, except that llama.cpp
            tells the number of parameters and bytes. Give each served variant a name of its own
            (vLLM and SGLang: --served-model-name, llama.cpp: --alias).
        max_length: tokens of prompt and answer together, if the server tells. llama.cpp's older servers tell the
            trained length (n_ctx_train) instead of the served one, so it is not a ground for leaving samples out.

    Raises:
        ValueError: an argument makes no sense, the address is no such server's, or it has not this model.
        ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `answer`.
    """

    def __init__(
        self,
        url: str,
        *,
        style: Style,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 4,
        timeout: float = 600.0,
        retries: int = 3,
        strict_size: bool = True,
    ) -> None:
        if style not in get_args(Style):
            raise ValueError(f"the prompt style must be one of {', '.join(get_args(Style))}, got {style!r}.")
        if concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency}.")
        super().__init__(url, model=model, api_key=api_key, timeout=timeout, retries=retries)
        self.style = style
        self.concurrency = concurrency
        self.strict_size = strict_size
        self._extras: dict[str, Any] = {"repetition_penalty": 1.0}
        if style != "base":
            self._extras["chat_template_kwargs"] = {"enable_thinking": style == "thinking"}

        meta = self.card.get("meta") or {}
        self.max_length: int | None = self.card.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
        # Not the whole card: vLLM draws "created" and the permission's id again for every request.
        told = ("id", "root", "parent", "max_model_len", "meta")
        self.fingerprint = fingerprint(*(self.card.get(key) for key in told))

    def answer(self, sample: Sample) -> str:
        """What the model says to one sample: at most `sample.answer_tokens` tokens, thoughts left out.

        An answer of a thinking model that ran out of tokens before `</think>` is empty.

        Raises:
            ValueError: the server refuses the request (a prompt too long for it, an unknown model), answers
                something else than a completion, or reads another number of tokens than the prompt has.
            ConnectionError: the server cannot be reached, or broke off the connection each time.
            TimeoutError: it was silent for `timeout` seconds. Not retried: it may still be computing.
            PermissionError: it wants another key (401, 403).
            RuntimeError: it still answers 429 or 5xx after the retries.
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
            # Null, or left out, where all of the tokens went into a thought that was delivered apart.
            text = message.get("content") or ""
            n_read = (completion.get("usage") or {}).get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f"{self.url}/v1/{path} answered no completion but {json.dumps(completion)[:400]}. "
                "Is it an OpenAI-compatible server?"
            )
        if self.strict_size and n_read not in (None, sample.n_prompt):
            raise ValueError(
                f"the server read {n_read} tokens in {about}. Its tokenizer or chat template is not the one with "
                "which the samples were made, or it cuts long prompts. Make the samples with the served model's "
                "tokenizer and in its style, or pass strict_size=False to measure at inexact lengths."
            )
        return _behind_thought(message, choice.get("finish_reason")) if self.style == "thinking" else text

    def answers(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, str]]:
        """The samples with their answers, as they are finished; never more than `concurrency` under way.

        After an error of a request, or of `samples`, no further one is sent; those under way are still yielded,
        then the (first) error is raised. Who stops iterating abandons what is under way.
        """
        waiting = iter(samples)
        finished: SimpleQueue[tuple[Sample, str, BaseException | None]] = SimpleQueue()
        errors: list[BaseException] = []
        running = 0

        def ask(sample: Sample) -> None:
            try:
                finished.put((sample, self.answer(sample), None))
            except BaseException as error:  # of a thread: raised again by the one that waits
                finished.put((sample, "", error))

        while True:
            try:
                for sample in islice(waiting, 0 if errors else self.concurrency - running):
                    # Daemons and no pool: Ctrl-C must not wait for answers that may take minutes.
                    Thread(target=ask, args=(sample,), daemon=True).start()
                    running += 1
            except Exception as error:  # of any kind: what was asked for is taken in before it is raised
                errors.append(error)
            if not running:
                break
            sample, text, failure = finished.get()
            running -= 1
            if failure is None:
                yield sample, text
            else:
                errors.append(failure)
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
    """The text behind the last `</think>`, or all of it where the server delivers thoughts apart.

    They are in `reasoning_content` (SGLang, llama.cpp, vLLM until 2025) or in `reasoning` (vLLM).
    """
    _, end, text = (message.get("content") or "").rpartition("</think>")
    apart = message.get("reasoning_content") or message.get("reasoning")
    # A template may open the thought itself, so that one which was cut off bears no mark.
    unfinished = finish_reason == "length" or "<think>" in text
    return "" if unfinished and not (end or apart) else text
