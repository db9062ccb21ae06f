"""An OpenAI-compatible endpoint for a model in this process, extended by any method: transformers' own server
(`transformers serve`), given the model and the tokenizer that `ctxext.load` makes.

It adds what `ctxext verify` and `ctxext eval --server` need: the model in /v1/models with its maximum length, prompts
of token ids, log-probabilities, and an error for prompts beyond the maximum length, where transformers' server reads
on. A field of a request is applied or refused: transformers' server ignores some, decodes greedily at any temperature,
and returns the stop string. It also generates on for a client that hung up without streaming. Requests run one after
another, as continuous batching has attention functions of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as HTTPError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState, Modality

from ctxext.core.apply import extension_of
from ctxext.export.probe import logprobs_of
from ctxext.utils.values import are_words, is_count, is_number, one_line, shown, suggest

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# Tokens per forward pass, so that logits of a long prompt fit in memory.
CHUNK = 256
MAX_SEED = 2**63 - 1  # torch's
MAX_STOPS = 16  # transformers prepares each against the whole vocabulary, before every answer
# Set when the client of the request hangs up. transformers' handlers are given the body of a request alone.
GONE: ContextVar[Event] = ContextVar("GONE")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == each and type(value) is type(each) for each in values)


def _of_type(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_int(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return are_words(texts) and all(texts) and len(texts) <= MAX_STOPS


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token.isdecimal() and len(token) < 20 and is_number(bias, -100, 100) for token, bias in value.items()
    )


def _is_message(value: Any) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("role"), str)):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    return isinstance(content, (str, list, type(None))) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


# The fields of a request, what each must be, and how to check that. Some have only the value that changes nothing.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("the name in /v1/models", _of_type(str)),
    "stream": ("true or false", _of_type(bool)),
    "stream_options": (
        "{'include_usage': …}; usage is in the last chunk",
        lambda value: isinstance(value, dict) and value.keys() <= {"include_usage"},
    ),
    "max_tokens": ("a number of tokens >= 1", _is_int(1)),  # any: answers end at the maximum length
    "temperature": ("a finite number >= 0", lambda value: is_number(value, 0)),
    "top_p": ("a number above 0, at most 1", lambda value: is_number(value, 0, 1) and value > 0),
    "seed": (f"an integer from 0 to {MAX_SEED}", lambda value: is_count(value, 0, MAX_SEED)),
    "stop": (f"a text or a list of up to {MAX_STOPS} texts, none of them empty", _is_stop),
    "logit_bias": ("token ids as texts, each with a number from -100 to 100", _is_bias),
    "repetition_penalty": ("a number from 0.01 to 100", lambda value: is_number(value, 0.01, 100)),
    "frequency_penalty": ("0 here; use repetition_penalty", _is(0, 0.0)),
    "presence_penalty": ("0 here; use repetition_penalty", _is(0, 0.0)),
    "n": ("1 here; send the request again for more answers", _is(1)),
    "user": ("a text", _of_type(str)),
}
_TEXT_FIELDS = {
    **_FIELDS,
    "prompt": ("a text or a list of token ids, not empty", lambda value: isinstance(value, (str, list)) and value),
    "max_tokens": ("a number of tokens >= 1, or 0 with echo", _is_int(0)),
    "echo": ("true or false", _of_type(bool)),
    "logprobs": ("0 or 1: those of likelier tokens are not returned", _is(0, 1)),
    "best_of": ("1 here; send the request again for more answers", _is(1)),
    "suffix": ("empty: text cannot be inserted", _is("")),
}
_CHAT_FIELDS = {
    **_FIELDS,
    "messages": (
        "a list of messages, each with a role and a content of text",
        lambda value: isinstance(value, list) and value and all(map(_is_message, value)),
    ),
    "max_completion_tokens": ("a number of tokens >= 1", _is_int(1)),
    "chat_template_kwargs": ("an object", _of_type(dict)),
    "tools": ("a list", _of_type(list)),
    "tool_choice": ("'auto': the model chooses", _is("auto")),
    "parallel_tool_calls": ("true: the model chooses", _is(True)),
    "response_format": ("{'type': 'text'}: grammars are not supported", _is({"type": "text"})),
    "modalities": ("['text']", _is(["text"])),
    "logprobs": ("false; /v1/completions has log-probabilities", _is(False)),
    "top_logprobs": ("0; /v1/completions has log-probabilities", _is(0)),
    "service_tier": ("'auto' or 'default'", _is("auto", "default")),
    "store": ("false: nothing is stored", _is(False)),
    "metadata": ("an object", _of_type(dict)),
    "safety_identifier": ("a text", _of_type(str)),
}


def make_app(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, limit: int) -> FastAPI:
    """The server as an ASGI application, for `uvicorn.run`.

    Args:
        name: the model's name in requests.
        limit: the maximum length, of prompt and answer together, in tokens.
    """
    extension = extension_of(model)
    whole = extension is not None and getattr(extension.plan.method, "of_the_call", False)
    manager, state = _OneModel(model, tokenizer, name, limit), _OneManager(_Bounded(limit, whole))
    removed: Any = None
    app = build_server(
        manager,
        _Chat(manager, state),
        completion_handler=_Completions(manager, state),
        response_handler=removed,
        transcription_handler=removed,
        systemone_handler=removed,
        generation_state=state,
    )
    # The others load models, unload this one, or read requests whose fields are not checked.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in PATHS]
    app.add_middleware(_Watched)
    app.add_exception_handler(HTTPError, _openai_error)
    app.add_exception_handler(RequestValidationError, _openai_error)
    app.add_exception_handler(Exception, _openai_error)
    return app


async def _openai_error(request: Request, error: Exception) -> JSONResponse:
    """An error as OpenAI's API and vLLM give it. Clients and proxies drop the message of FastAPI's own form."""
    unread = "the body is not a JSON object. Send one, as application/json."
    status, message = 500, f"{type(error).__name__}: {one_line(error)}. Check the server's log."
    if isinstance(error, RequestValidationError):
        status, message = 400, unread
    elif isinstance(error, HTTPError):
        status, message = error.status_code, error.detail
        if message == "There was an error parsing the body":  # FastAPI's, of JSON that is nested too deeply
            message = unread
        if message in (HTTPStatus.NOT_FOUND.phrase, HTTPStatus.METHOD_NOT_ALLOWED.phrase):
            message = f"there is no {request.method} {request.url.path} here. Known: {', '.join(PATHS)}."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


class _Watched:
    """Sets `GONE` for each request, and watches whether its client hangs up while it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        gone, received = Event(), asyncio.Queue[Message](1)
        GONE.set(gone)

        async def watch() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    gone.set()
                await received.put(message)

        watching = asyncio.create_task(watch())
        try:
            await self.app(scope, received.get, send)
        finally:
            watching.cancel()


class _ClientGone(StoppingCriteria):
    def __init__(self, gone: Event) -> None:
        self.gone = gone

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.gone.is_set(), device=input_ids.device)


class _OneModel(ModelManager):
    """Has one model, which is loaded already and stays."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, limit: int) -> None:
        super().__init__()
        self.force_model = name
        self._loaded = model, tokenizer
        self._card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "ctxext",
            "max_model_len": limit,
        }

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name in answers: the one that was asked for, without a revision."""
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._loaded

    def get_gen_models(self) -> list[dict[str, Any]]:  # type: ignore[override]  # a cached static method there
        return [self._card]


class _Bounded(GenerateManager):
    """Rejects prompts that leave no room for an answer, ends answers at the maximum length or when the client hangs up,
    and draws by the seed.

    Attributes:
        whole: the frequencies depend on the whole call, so keys cannot be cached.
    """

    def __init__(self, limit: int, whole: bool) -> None:
        super().__init__()
        self.limit, self.whole = limit, whole

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.bound(inputs, gen_config)
        queue, streamer = super().generate_streaming(
            model, processor, {**inputs, **_until_gone()}, gen_config, *args, **kwargs
        )
        return (_BeforeStop(queue, gen_config.stop_strings) if gen_config.stop_strings else queue), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.bound(inputs, gen_config)
        return await super().generate_non_streaming(
            model, processor, {**inputs, **_until_gone()}, gen_config, *args, **kwargs
        )

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        gone = GONE.get()

        def unless_gone() -> Any:
            if gone.is_set():  # while the request waited for those before it
                raise HTTPException(499, "the client closed the connection.")
            return fn(*args, **kwargs)

        return super().async_submit(unless_gone)

    def bound(self, inputs: Any, gen_config: Any) -> None:
        room = self.limit - inputs["input_ids"].shape[-1]
        if room < min(gen_config.max_new_tokens, 1):
            raise HTTPException(
                400,
                # As OpenAI and vLLM begin it: proxies know by these words that a longer model should be asked.
                f"This model's maximum context length is {self.limit} tokens with the answer, but the prompt has "
                f"{self.limit - room}. Shorten the prompt, or extend the model further.",
            )
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, room)
        gen_config.use_cache = not self.whole
        if (seed := getattr(gen_config, "seed", None)) is not None:
            self.submit(torch.manual_seed, seed)  # on the thread that generates, right before it does


def _until_gone() -> dict[str, StoppingCriteriaList]:
    return {"stopping_criteria": StoppingCriteriaList([_ClientGone(GONE.get())])}


class _OneManager(GenerationState):
    """Has one generation manager, for every kind of request."""

    def __init__(self, only: _Bounded) -> None:
        super().__init__()
        self.only = only

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Bounded:
        return self.only


class _BeforeStop(asyncio.Queue[Any]):
    """Passes on what comes before the first stop string. A text that may be the beginning of one is held back."""

    def __init__(self, source: asyncio.Queue[Any], stops: Sequence[str]) -> None:
        super().__init__()
        self._source, self._stops, self._held, self._stopped = source, stops, "", False

    async def get(self) -> Any:
        while self.empty():
            item = await self._source.get()
            if type(item) is not str:  # the end, an error, a tool call, or a thought
                held, self._held = self._held, ""
                for each in (held, item) if held else (item,):
                    self.put_nowait(each)
            elif not self._stopped:
                text = before_stop(self._held + item, self._stops)
                self._stopped = text != self._held + item
                kept = 0 if self._stopped else _begun(text, self._stops)
                if len(text) > kept:
                    self.put_nowait(text[: len(text) - kept])
                self._held = text[len(text) - kept :]
        return await super().get()


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings; all of it if it has none."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _begun(text: str, stops: Sequence[str]) -> int:
    """The number of characters at the end of a text with which a stop string begins; 0 for none."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


class _Checked(BaseHandler):
    """Applies the fields of a request, or refuses them.

    Attributes:
        fields: those that the endpoint has: what each must be, and how to check that.
    """

    fields: dict[str, tuple[str, Callable[[Any], Any]]]

    def _validate_request(self, body: dict[str, Any]) -> None:
        for name in [name for name, value in body.items() if value is None]:
            del body[name]  # as if it were absent
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise HTTPException(
                400, f"the body has {half!a}, half of a character. Send both halves of the surrogate pair."
            ) from error
        for name, value in body.items():
            if name not in self.fields:
                raise HTTPException(400, f"unknown or unsupported field {name!r}{suggest(name, self.fields)} Drop it.")
            what, holds = self.fields[name]
            if not holds(value):
                raise HTTPException(400, f"{name} must be {what}; got {shown(value)}.")
        for name in ({"prompt", "messages"} & self.fields.keys()) - body.keys():
            raise HTTPException(400, f"{name} is missing: {self.fields[name][0]}.")

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        # Without the seed, which is set when generating, and penalties of 0, which set a repetition penalty of 1.
        rest = {name: value for name, value in body.items() if name != "seed" and not name.endswith("_penalty")}
        if not body.get("logit_bias"):
            rest.pop("logit_bias", None)
        config: Any = super()._build_generation_config(rest, model_generation_config, use_cb=use_cb)
        if "temperature" in body or "top_p" in body:
            config.do_sample = body.get("temperature", 1) >= 1e-5  # as vLLM: logits / 0 are infinite
            config.top_k = 0 if config.top_k is None else config.top_k  # not transformers' 50
        if "repetition_penalty" in body:
            config.repetition_penalty = float(body["repetition_penalty"])
        if bias := body.get("logit_bias"):
            vocabulary = self._vocabulary()
            if wrong := [token for token in bias if int(token) >= vocabulary]:
                raise HTTPException(400, f"logit_bias must be of token ids below {vocabulary}; got {shown(wrong[0])}.")
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()}
        if isinstance(config.stop_strings, str):
            config.stop_strings = [config.stop_strings]
        config.stop_strings = config.stop_strings or None
        config.seed = body.get("seed")
        return config

    def _vocabulary(self) -> int:
        manager: Any = self.model_manager
        return int(manager.load_model_and_processor()[0].get_input_embeddings().num_embeddings)

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        handler: Any = super()
        answer: JSONResponse = await handler._non_streaming(*args, **kwargs)
        config = args[5]
        if not config.stop_strings:
            return answer
        body = json.loads(bytes(answer.body))
        (choice,) = body["choices"]
        holder, name = (choice, "text") if "text" in choice else (choice["message"], "content")
        if (text := holder.get(name)) and (before := before_stop(text, config.stop_strings)) != text:
            holder[name], choice["finish_reason"] = before, "stop"
        return JSONResponse(body)


class _Chat(_Checked, ChatCompletionHandler):
    """Refuses messages that the chat template does not take."""

    fields = _CHAT_FIELDS

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        self._validate_request(body)
        if body.keys() >= {"max_tokens", "max_completion_tokens"}:
            raise HTTPException(400, "max_tokens and max_completion_tokens are the same. Drop one.")
        *_, tokenizer = self._resolve_model(body)
        writer: Any = tokenizer
        if not writer.chat_template:
            raise HTTPException(400, "the model has no chat template. Send a prompt to /v1/completions instead.")
        try:
            messages = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
            arguments = body.get("chat_template_kwargs", {})
            writer.apply_chat_template(
                messages, add_generation_prompt=True, tools=body.get("tools"), tokenize=False, **arguments
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HTTPException(
                400,
                f"the chat template does not take these messages, tools or chat_template_kwargs ({one_line(error)}). "
                "Change them, or send a prompt to /v1/completions.",
            ) from error
        return await super().handle_request(body, request_id)


class _Completions(_Checked, CompletionHandler):
    """Takes token ids as well as text, and returns log-probabilities: of the answer with `logprobs`, and of the prompt
    in front of it with `echo`. They are those of the tokens themselves; likelier ones are not listed."""

    fields = _TEXT_FIELDS

    def __init__(self, model_manager: _OneModel, state: _OneManager) -> None:
        super().__init__(model_manager, state)
        self._manager = state.only

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        self._validate_request(body)
        prompt, scored = body["prompt"], "logprobs" in body
        model_id, model, tokenizer = self._resolve_model(body)
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        vocabulary = self._vocabulary()
        if not (ids and all(is_count(each, 0, vocabulary - 1) for each in ids)):
            raise HTTPException(400, f"prompt must be a text or a list of token ids below {vocabulary}.")
        if scored and (also := [each for each in ("stream", "logit_bias", "stop") if body.get(each)]):
            raise HTTPException(400, f"logprobs does not work with {also[0]}. Drop one of them.")
        if body.get("echo") and not scored:
            raise HTTPException(400, "echo works with logprobs only. Add logprobs=1, or drop echo.")
        if body.get("max_tokens") == 0 and not body.get("echo"):
            raise HTTPException(400, "max_tokens must be >= 1 without echo; got 0.")
        manager = self._manager
        if scored and manager.whole:
            raise HTTPException(400, "this method has no log-probabilities: its frequencies depend on the whole call.")
        prompt_ids = torch.tensor([ids], device=model.device)
        inputs = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids)}
        config = self._build_generation_config(body, model.generation_config)
        asked = request_id, model, tokenizer, model_id, inputs, config, manager
        if not scored:
            return self._streaming(*asked) if body.get("stream") else await self._non_streaming(*asked)
        manager.bound(inputs, config)
        new: list[int] = []
        if body.get("max_tokens") != 0:
            made = await manager.generate_non_streaming(model, tokenizer, inputs, config, request_id=request_id)
            new = made[2].tolist()
        every = [*ids, *new]
        scores = [None, *(await manager.async_submit(logprobs_of, model, every, CHUNK)).tolist()]
        first = 0 if body.get("echo") else len(ids)
        choice = {
            "index": 0,
            "text": tokenizer.decode(every[first:], skip_special_tokens=True),
            "finish_reason": "length" if len(new) >= config.max_new_tokens else "stop",
            "logprobs": {
                "tokens": [tokenizer.decode([each]) for each in every[first:]],
                "token_logprobs": scores[first:],
                "top_logprobs": None,
                "text_offset": None,
            },
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(every)}
        answer = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": body["model"]}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})
