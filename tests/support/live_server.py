"""A real OpenAI-compatible server around the bundled model: `python tests/support/live_server.py --port 8000`.

It decodes greedily with transformers' own `generate`, one request at a time. Its switches make it the servers
that a client meets: one with another tokenizer, one that is overloaded, one that wants a key.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any
from uuid import uuid4

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL

# As Qwen3's, it tells the model not to think only where it is told so.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %} Do not think.{% endif %} The pass key is{% endif %}"
)


@dataclass
class Fault:
    """What happens to the next POST instead of an answer.

    Attributes:
        status: 0 breaks off the connection.
        seconds: of silence before it.
    """

    status: int
    body: bytes = b'{"error": {"message": "out of order"}}'
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class LiveServer:
    """The server, to be used in a `with` statement, and what it was asked.

    Attributes:
        port: 0 takes a free one.
        names: of the models in /v1/models, which are all the same.
        listing: status and JSON of /v1/models instead of these.
        extra_token: put a token in front of each prompt, as another tokenizer would.
        chat_template: None: /v1/chat/completions is refused.
        thought: put in front of each chat answer; with `reasoning_field`, delivered in that field of the message.
        repetition_penalty: where a request states none, as vLLM takes it from generation_config.json.
        refused_fields: fields of a request that are an error, as for OpenAI.
        prompt_scores: how log-probabilities of a prompt are given: "vllm", "sglang" or "" for not at all. "mlx" takes
            prompts of text alone and gives those of the new token, after the logit bias.
        truncates: read the last `max_length` tokens of a longer prompt, without an error.
        faults: for the next POSTs, in their order.
        requests: the path and body of each POST, in the order of arrival.
        peak: the largest number of POSTs at a time.
    """

    port: int = 0
    names: tuple[str, ...] = ("austen-4m",)
    listing: tuple[int, dict[str, Any]] | None = None
    api_key: str | None = None
    max_length: int = 512
    extra_token: bool = False
    chat_template: str | None = None
    thought: str = ""
    reasoning_field: str | None = None
    repetition_penalty: float = 1.0
    refused_fields: tuple[str, ...] = ()
    usage: bool = True
    prompt_scores: str = ""
    truncates: bool = False
    model: Any = None  # None: the bundled one
    faults: deque[Fault] = field(default_factory=deque)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.tokenizer.chat_template = self.chat_template
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.running = 0
        self.closing = Event()
        self._counting, self._computing = Lock(), Lock()
        handler = type("Handler", (_Handler,), {"live": self})
        self.httpd = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.url = f"http://127.0.0.1:{self.httpd.server_port}"

    def __enter__(self) -> LiveServer:
        Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.httpd.shutdown()
        self.httpd.server_close()

    @contextmanager
    def counted(self, path: str, body: dict[str, Any]) -> Iterator[Fault | None]:
        """Note a POST; gives the fault that is its due."""
        with self._counting:
            self.requests.append((path, body))
            self.running += 1
            self.peak = max(self.peak, self.running)
            fault = self.faults.popleft() if self.faults else None
        try:
            yield fault
        finally:
            with self._counting:
                self.running -= 1

    def cards(self) -> dict[str, Any]:
        """/v1/models, with vLLM's fields that are new each time."""
        card = {
            "object": "model",
            "created": time.time_ns(),
            "owned_by": "tests",
            "root": "austen-4m",
            "max_model_len": self.max_length,
            "permission": [{"id": f"modelperm-{uuid4().hex}"}],
        }
        return {"object": "list", "data": [{"id": name, **card} for name in self.names]}

    def complete(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The status and the JSON for one request."""
        chat = path == "/v1/chat/completions"
        for name in self.refused_fields:
            if name in body:
                return _error(400, f"Unrecognized request argument supplied: {name}")
        if body["model"] not in self.names:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if body.get("temperature") != 0:
            return _error(400, "this server decodes greedily: pass temperature 0")
        if self.prompt_scores == "mlx" and not isinstance(body.get("prompt"), str):
            return _error(400, "text input must be of type `str`")
        if self.prompt_scores == "mlx" and not isinstance(body.get("logprobs", False), bool):
            return _error(400, "logprobs must be of type bool")
        if chat and not self.chat_template:
            return _error(400, "you must provide a chat template, as the tokenizer has none")
        if chat:
            ids = self.tokenizer.apply_chat_template(
                body["messages"],
                add_generation_prompt=True,
                return_dict=False,
                **body.get("chat_template_kwargs", {}),
            )
        elif isinstance(body["prompt"], list):
            ids = body["prompt"]
        else:
            ids = self.tokenizer(body["prompt"], verbose=False)["input_ids"]
        ids = [*([self.tokenizer.bos_token_id] if self.extra_token else []), *ids]
        n_new = body.get("max_tokens", 16)
        if self.truncates:
            ids = ids[-(self.max_length - n_new) :]
        if len(ids) + n_new > self.max_length:
            return _error(
                400,
                f"This model's maximum context length is {self.max_length} tokens. However, you requested "
                f"{len(ids) + n_new} tokens ({len(ids)} in the prompt, {n_new} in the completion).",
            )
        penalty = body.get("repetition_penalty", self.repetition_penalty)
        with self._computing, torch.inference_mode():
            prompt = torch.tensor([ids])
            new = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=n_new,
                do_sample=False,
                repetition_penalty=penalty,
            )[0, len(ids) :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if new[-1] == self.tokenizer.eos_token_id else "length",
        }
        if not chat:
            choice["text"] = text
        elif self.reasoning_field:
            choice["message"] = {"role": "assistant", "content": text, self.reasoning_field: self.thought}
        else:
            choice["message"] = {"role": "assistant", "content": self.thought + text}
        completion = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [choice],
        }
        if self.prompt_scores:
            self.score(ids, body, choice)
        if self.usage:
            completion["usage"] = {
                "prompt_tokens": len(ids),
                "completion_tokens": len(new),
                "total_tokens": len(ids) + len(new),
            }
        return 200, completion

    def score(self, ids: list[int], body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Log-probabilities of a prompt, in vLLM's own field or, as SGLang, in front of the new tokens'."""
        with self._computing, torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        likely = logprobs.argmax(-1).tolist()
        if self.prompt_scores == "vllm" and body.get("logprobs") and body.get("logit_bias"):
            (token,) = map(int, body["logit_bias"])  # drawn for sure; the score is from before the bias
            top = {f"token_id:{i}": float(logprobs[-1, i]) for i in (token, likely[-1])}
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [float(logprobs[-1, token])],
                "top_logprobs": [top],
            }
        if self.prompt_scores == "vllm" and body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = [None] + [
                {str(i): {"logprob": float(row[i]), "rank": int((row > row[i]).sum()) + 1} for i in {best, token}}
                for row, best, token in zip(logprobs, likely, ids[1:])
            ]
        if self.prompt_scores == "mlx" and body.get("logprobs"):
            biased = logprobs[-1].clone()
            for token, bias in body.get("logit_bias", {}).items():
                biased[int(token)] += bias
            score, drawn = biased.log_softmax(-1).max(-1)
            choice["logprobs"] = {"content": [{"id": int(drawn), "logprob": float(score)}]}
        if self.prompt_scores == "sglang" and body.get("echo") and body.get("logprobs"):
            own = [float(row[token]) for row, token in zip(logprobs, ids[1:])]
            choice["logprobs"] = {"token_logprobs": [None, *own, float(logprobs[-1].max())]}


class _Handler(BaseHTTPRequestHandler):
    live: LiveServer

    def do_GET(self) -> None:
        if not self.allowed():
            self.reply(*_error(401, "invalid key"))
        elif self.path == "/v1/models":
            self.reply(*(self.live.listing or (200, self.live.cards())))
        else:
            self.reply(*_error(404, f"no {self.path} here"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.live.counted(self.path, body) as fault:
            if fault is not None:
                self.live.closing.wait(fault.seconds)
                answer: Any = fault
            elif not self.allowed():
                answer = _error(401, "invalid key")
            elif self.path not in ("/v1/completions", "/v1/chat/completions"):
                answer = _error(404, f"no {self.path} here")
            else:
                answer = self.live.complete(self.path, body)
        # Not counted any more: the client's next request may be here before this one's thread has ended.
        if isinstance(answer, Fault):
            self.fail(answer)
        else:
            self.reply(*answer)

    def allowed(self) -> bool:
        return self.live.api_key is None or self.headers["Authorization"] == f"Bearer {self.live.api_key}"

    def fail(self, fault: Fault) -> None:
        if fault.status:
            self.send(fault.status, fault.body, fault.headers)
        else:
            # Closing without lingering sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def reply(self, status: int, value: dict[str, Any]) -> None:
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, raw: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        pass


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "BadRequestError", "code": status}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-length", type=int, default=512, help="tokens of prompt and answer together")
    parser.add_argument("--chat", action="store_true", help="give the tokenizer a chat template")
    arguments = parser.parse_args()
    server = LiveServer(
        port=arguments.port, max_length=arguments.max_length, chat_template=CHAT_TEMPLATE if arguments.chat else None
    )
    with server:
        print(f"serving {', '.join(server.names)} at {server.url}/v1; Ctrl-C ends it", flush=True)
        try:
            server.closing.wait()
        except KeyboardInterrupt:
            print()
