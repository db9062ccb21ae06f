"""Malformed servers, URLs and timeouts, and the error that each gets."""

from __future__ import annotations

import math
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import Fault, LiveServer

from ctxext.utils.endpoint import Endpoint


@pytest.mark.parametrize(
    "listed", [5, {"a": 1}, "a", [{"id": [1]}], [{"id": None}], [{"id": ""}], [{"name": "a"}], [7]], ids=repr
)
def test_a_list_without_a_named_model_lists_none(listed: Any) -> None:
    with LiveServer(listing=(200, {"data": listed})) as server:
        with pytest.raises(ValueError, match=r"lists no model\. Is it an OpenAI-compatible server"):
            Endpoint(server.url)
        assert Endpoint(server.url, model="austen-4m").name == "austen-4m"


def test_an_answer_that_is_nested_too_deeply_is_no_json_object() -> None:
    with LiveServer() as server:
        endpoint = Endpoint(server.url)
        for status, says in ((200, "returned no JSON object"), (400, "refused the request with 400")):
            server.faults.append(Fault(status, 100_000 * b'{"error":'))
            with pytest.raises(ValueError, match=says):
                endpoint.call("completions", {})


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a:99999", "http://.a/", f"http://{70 * 'a'}/", "http://", "a:8000"]
)
def test_what_is_not_a_url_is_quoted_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match=r"Pass (a URL|one) such as http://localhost:8000") as error:
        Endpoint(url)
    assert repr(url) in str(error.value)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, 1e12])
def test_a_timeout_that_no_socket_takes_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout must be above 0 and at most 1000000 seconds, got "):
        Endpoint("http://127.0.0.1:1", timeout=timeout)


def test_a_key_that_no_header_takes_is_refused_and_not_shown() -> None:
    for key in ("sk-a\nb", "sk-é"):
        with pytest.raises(ValueError, match="Correct OPENAI_API_KEY") as error:
            Endpoint("http://127.0.0.1:1", api_key=key)
        assert "sk-" not in str(error.value)


def test_a_date_that_does_not_exist_is_no_time_to_wait() -> None:
    with LiveServer() as server:
        endpoint = Endpoint(server.url, retries=0)
        server.faults.append(Fault(503, headers={"Retry-After": "Mon, 01 Jan 9999999999999 00:00:00 GMT"}))
        with pytest.raises(RuntimeError, match="returned 503"):
            endpoint.call("completions", {})


def test_remedies_are_those_of_the_command_line_too() -> None:
    with LiveServer(api_key="secret") as server:
        with pytest.raises(PermissionError, match=r"Set OPENAI_API_KEY to the server's key\.$"):
            Endpoint(server.url)
        endpoint = Endpoint(server.url, api_key="secret", retries=0)
        server.faults.append(Fault(503))
        with pytest.raises(RuntimeError, match=r"\. Wait until the server is less busy, or check its log\.$"):
            endpoint.call("completions", {})


def test_the_timeout_is_that_of_a_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that comes in time, as each byte of a slow server does, does not begin it anew."""
    with LiveServer() as server:
        endpoint = Endpoint(server.url, timeout=600)
        clock = iter([0.0, 599.0, 0.0, 601.0])
        monkeypatch.setattr("ctxext.utils.endpoint.time", SimpleNamespace(monotonic=lambda: next(clock)))
        asked = {"model": endpoint.name, "prompt": [1], "max_tokens": 1, "temperature": 0}
        assert endpoint.call("completions", asked)["choices"]
        with pytest.raises(TimeoutError, match=r"sent no whole answer within 600 s\. Raise the timeout"):
            endpoint.call("completions", asked)


def test_a_server_that_lists_no_models_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over https an http server gives no answer at all, nor does one that hangs."""
    monkeypatch.setattr("ctxext.utils.endpoint.LISTED", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.2 s\. Check the URL, such as http://"):
            Endpoint(url, timeout=600)
