"""A client for a model behind an OpenAI-compatible endpoint (vLLM, SGLang, llama.cpp's server)."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from email.message import Message
from email.utils import mktime_tz, parsedate_tz
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

# The standard library's client: huggingface-hub 1.x brings httpx and 2.x httpx2, so neither can be relied on.
from urllib.request import HTTPErrorProcessor, Request, build_opener

from ctxext.utils.values import one_line, suggest

MAX_TIMEOUT = 1e6  # Seconds, within what sockets take.
LISTED = 30.0  # Seconds for the list of models, which no server computes.
FIRST_WAIT = 1.0  # Seconds before the first retry; doubles with each further one.


class Endpoint:
    """One model of a server.

    Args:
        url: with or without /v1, such as "http://localhost:8000".
        model: None for the server's only model. A name is trusted where the server does not list its models.
        api_key: None reads OPENAI_API_KEY. An empty key is not sent.
        timeout: seconds, for a whole answer.
        retries: after status 429 or 5xx or a broken connection, at 1, 2, 4... seconds or Retry-After if that is longer.

    Attributes:
        name: the model's name in requests.
        card: its entry in /v1/models.

    Raises:
        ValueError: an argument is invalid, the address is not such a server's, or the server does not have this model.
        ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `call`.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600, retries: int = 3
    ) -> None:
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018 - raises if it is out of range, as the host's encoding does
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise ValueError(
                f"{url!r} is not a URL ({one_line(error)}). Pass one such as http://localhost:8000."
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"the url must begin with http:// or https://, got {url!r}. Pass a URL such as http://localhost:8000."
            )
        if retries < 0:
            raise ValueError(f"retries must be >= 0, got {retries}.")
        if not 0 < timeout <= MAX_TIMEOUT:
            raise ValueError(f"timeout must be above 0 and at most {MAX_TIMEOUT:.0f} seconds, got {timeout:g}.")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.timeout, self.retries = timeout, retries
        key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key has a line break or a character that is not ASCII. Correct OPENAI_API_KEY.")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._opener = build_opener(_EveryStatus)
        self.card = self._card(model)
        self.name: str = self.card["id"]

    def call(self, path: str, body: dict[str, Any] | None = None, about: str = "the request") -> dict[str, Any]:
        """Send a request, with retries, and return the server's JSON object.

        Args:
            path: after /v1/.
            body: sent by POST; None sends a GET.
            about: the request in words, for errors.

        Raises:
            ValueError: the server refuses the request, or does not answer with JSON.
            ConnectionError: the server cannot be reached, or the connection broke each time.
            TimeoutError: no whole answer within `timeout` seconds, or `LISTED` for the list of models. Not retried: the
                server may still be computing.
            PermissionError: the key was rejected (401, 403).
            RuntimeError: status 429 or 5xx after all retries.
        """
        url = f"{self.url}/v1/{path}"
        request = Request(url, None if body is None else json.dumps(body).encode(), self._headers)
        seconds = min(LISTED, self.timeout) if path == "models" else self.timeout
        failure: Exception
        attempt = 0
        while True:
            wait = FIRST_WAIT * 2**attempt
            end = time.monotonic() + seconds
            try:
                with self._opener.open(request, timeout=seconds) as response:
                    raw = _read(response, end)
            except (OSError, HTTPException) as error:
                failure = self._unreachable(url, error.reason if isinstance(error, URLError) else error, seconds)
            else:
                if response.status == 200:
                    return _json_object(url, raw)
                failure = self._refusal(url, response.status, response.headers, _message(raw), about)
                wait = max(wait, _retry_after(response.headers))
            passing = isinstance(failure, (RuntimeError, ConnectionResetError))
            if not passing or attempt == self.retries or wait > self.timeout:
                raise failure
            time.sleep(wait)
            attempt += 1

    def _unreachable(self, url: str, reason: Any, seconds: float) -> OSError:
        if isinstance(reason, TimeoutError) and seconds < self.timeout:
            return TimeoutError(
                f"{url} did not answer within {seconds:g} s. Check the URL, such as http:// for https://, and that the "
                "server is ready."
            )
        if isinstance(reason, TimeoutError):
            return TimeoutError(
                f"{url} sent no whole answer within {self.timeout:g} s. Raise the timeout (--timeout), or check the "
                "server's log."
            )
        if isinstance(reason, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, IncompleteRead)):
            return ConnectionResetError(f"{url} closed the connection ({reason}). Check the server's log.")
        return ConnectionError(
            f"{url} cannot be reached ({reason}). Start the server, or correct its URL, such as "
            "http://localhost:8000/v1."
        )

    def _refusal(self, url: str, status: int, headers: Message, message: str, about: str) -> Exception:
        """The error for a status other than 200; RuntimeError if a retry may help."""
        if status == 429 or status >= 500:
            pause = f", and asks to wait {_retry_after(headers):.0f} s" if "Retry-After" in headers else ""
            return RuntimeError(
                f"{url} returned {status} ({message}){pause}. Wait until the server is less busy, or check its log."
            )
        if status in (401, 403):
            sent = "a" if "Authorization" in self._headers else "no"
            return PermissionError(
                f"{url} returned {status} ({message}); {sent} key was sent. Set OPENAI_API_KEY to the server's key."
            )
        if 300 <= status < 400:
            return ValueError(f"{url} has moved to {headers.get('Location')}. Pass the new URL.")
        if status == 404:
            return ValueError(
                f"{url} returned 404 ({message}). Pass the server's URL up to /v1, and check that it has this endpoint."
            )
        return ValueError(
            f"{url} refused {about} with {status}: {message}. If the prompt is too long, serve a longer context "
            "(vLLM: --max-model-len, SGLang: --context-length, llama.cpp: -c), or measure at shorter lengths."
        )

    def _card(self, model: str | None) -> dict[str, Any]:
        """The entry of `model`, or of the only model, in /v1/models."""
        try:
            listed = self.call("models").get("data")
        except (ValueError, RuntimeError):  # refused, or an error of the server
            if model is None:
                raise
            listed = None
        cards = {
            card["id"]: card
            for card in (listed if isinstance(listed, list) else ())
            if isinstance(card, dict) and isinstance(card.get("id"), str) and card["id"]
        }
        if not cards and model is not None:
            return {"id": model}
        if not cards:
            raise ValueError(
                f"{self.url}/v1/models lists no model. Is it an OpenAI-compatible server, and ready? If it does not "
                "list its models, name one with --model."
            )
        if model is None and len(cards) > 1:
            raise ValueError(f"{self.url} serves {len(cards)} models. Name one of them: {', '.join(cards)}.")
        if model is not None and model not in cards:
            raise ValueError(f"{self.url} serves no model {model!r}{suggest(model, cards)}")
        return cards[model or next(iter(cards))]


def _read(response: Any, end: float) -> bytes:
    """The whole body. A socket's own timeout begins anew with every byte, so a server that drips would never reach it.

    Raises TimeoutError after `end`, by the monotonic clock, and IncompleteRead if the connection breaks.
    """
    parts = []
    while part := response.read1(2**16):
        parts.append(part)
        if time.monotonic() > end:
            raise TimeoutError
    if response.length:
        raise IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


class _EveryStatus(HTTPErrorProcessor):
    """Returns every status as a response. Follows no redirect: a POST would lose its prompt, and the key could leak."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _json_object(url: str, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if raw.lstrip().startswith((b"data:", b"event:")):
        raise ValueError(
            f"{url} streams its answer, although the request does not ask for it: {raw[:80]!r}. Turn streaming off in "
            "the server or proxy, or pass the URL of the server behind it."
        )
    if not isinstance(value, dict):
        raise ValueError(f"{url} returned no JSON object: {raw[:200]!r}. Is it an OpenAI-compatible server?")
    return value


def _message(raw: bytes) -> str:
    """OpenAI's error.message, vLLM's and SGLang's message, FastAPI's detail, or the whole body."""
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        said = raw.decode(errors="replace")
    for key in ("error", "message", "detail"):
        said = said.get(key, said) if isinstance(said, dict) else said
    # A server may quote the whole prompt.
    return str(said)[:400].rstrip(". \n")


def _retry_after(headers: Message) -> float:
    """Seconds of a Retry-After header, given in seconds or as a date (RFC 9110, 10.2.3); 0 without one."""
    asked = headers.get("Retry-After", "0")
    try:
        return float(asked)
    except ValueError:
        with suppress(ValueError, OverflowError):  # a year that is none
            date = parsedate_tz(asked)
            return mktime_tz(date) - time.time() if date else 0.0
        return 0.0
