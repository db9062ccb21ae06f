"""An OpenAI-compatible endpoint for a model in this process, extended by any method: transformers' own server
(`transformers serve`), given the model and the tokenizer that `ctxext.load` makes.

It adds what `ctxext verify` and `ctxext eval --server` need: the model in /v1/models with its maximum length, prompts
of token ids, log-probabilities, and an error for prompts beyond the maximum length, where transformers' server reads
on. Requests run one after another, as continuous batching has attention functions of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState

from ctxext.core.apply import extension_of
from ctxext.export.probe import logprobs_of
from ctxext.utils.values import is_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Tokens per forward pass, so that logits of a long prompt fit in memory.
CHUNK = 256


def make_app(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, limit: int) -> FastAPI:
    """The server as an ASGI application, for `uvicorn.run`.

    Args:
        name: the model's name in requests.
        limit: the maximum length, of prompt and answer together, in tokens.
    """
    extension = extension_of(model)
    whole = extension is not None and getattr(extension.plan.method, "of_the_call", False)
    manager, state = _OneModel(model, tokenizer, name, limit), _OneManager(_Bounded(limit, whole))
    app = build_server(
        manager,
        ChatCompletionHandler(manager, state),
        completion_handler=_Completions(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )
    app.add_exception_handler(HTTPException, _openai_error)
    return app


async def _openai_error(request: Request, error: Exception) -> JSONResponse:
    """An error as OpenAI's API and vLLM give it. Clients and proxies drop the message of FastAPI's own form."""
    assert isinstance(error, HTTPException)
    told = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": error.status_code}
    return JSONResponse({"error": told}, error.status_code)


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

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._loaded

    def get_gen_models(self) -> list[dict[str, Any]]:  # type: ignore[override]  # a cached static method there
        return [self._card]


class _Bounded(GenerateManager):
    """Rejects prompts that leave no room for an answer, and ends answers at the maximum length.

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
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.bound(inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    def bound(self, inputs: Any, gen_config: Any) -> None:
        room = self.limit - inputs["input_ids"].shape[-1]
        if room < 1:
            raise HTTPException(
                400,
                # As OpenAI and vLLM begin it: proxies know by these words that a longer model should be asked.
                f"This model's maximum context length is {self.limit} tokens with the answer, but the prompt has "
                f"{self.limit - room}. Shorten the prompt, or extend the model further.",
            )
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, room)
        gen_config.use_cache = not self.whole


class _OneManager(GenerationState):
    """Has one generation manager, for every kind of request."""

    def __init__(self, only: _Bounded) -> None:
        super().__init__()
        self.only = only

    def get_manager(self, model_id: str, use_cb: bool = False) -> _Bounded:
        return self.only


class _Completions(CompletionHandler):
    """Takes token ids as well as text, and returns log-probabilities: of the answer with `logprobs`, and of the prompt
    in front of it with `echo`. They are those of the tokens themselves; likelier ones are not listed."""

    def __init__(self, model_manager: _OneModel, state: _OneManager) -> None:
        super().__init__(model_manager, state)
        self._manager = state.only

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        prompt, scored = body.get("prompt"), body.get("logprobs") is not None
        if isinstance(prompt, str) and not scored and not body.get("echo"):
            return await super().handle_request(body, request_id)
        self._validate_request(body)
        model_id, model, tokenizer = self._resolve_model(body)
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        vocabulary: Any = model.get_input_embeddings().num_embeddings
        if not (isinstance(ids, list) and ids and all(is_count(each, 0, vocabulary - 1) for each in ids)):
            raise HTTPException(400, f"prompt must be a text or a list of token ids below {vocabulary}.")
        if scored and (body.get("stream") or body.get("logit_bias")):
            raise HTTPException(400, "logprobs works without stream and logit_bias only.")
        if body.get("echo") and not scored:
            raise HTTPException(400, "echo works with logprobs only.")
        manager = self._manager
        if scored and manager.whole:
            raise HTTPException(400, "this method has no log-probabilities: its frequencies depend on the whole call.")
        prompt_ids = torch.tensor([ids], device=model.device)
        inputs = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids)}
        config = self._build_generation_config(body, model.generation_config)
        asked = request_id, model, tokenizer, model_id, inputs, config, manager, body.get("suffix")
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
