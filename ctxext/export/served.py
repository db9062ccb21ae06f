"""The log-probabilities that a served model gives the tokens of a prompt, by /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ctxext.utils.endpoint import Endpoint
from ctxext.utils.values import is_count


class NoLogprobs(ValueError):
    """The server refuses to return log-probabilities in one of the known forms, or ignores the request for them."""


class Scores(NamedTuple):
    """Of tokens of a prompt: log-probabilities in nats, and the most likely token in the place of each; None if the
    server does not return these. `added` counts the tokens, such as a BOS, that the server put before them."""

    logprobs: Float64[Tensor, " token"]
    top1: Int64[Tensor, " token"] | None = None
    added: int = 0


def served_scores(endpoint: Endpoint, input_ids: Sequence[int]) -> Scores:
    """log p(input_ids[k] | input_ids[:k]) for k >= 1 under a served model.

    One request if the server returns log-probabilities of prompts, otherwise one per token.

    Raises as `prompt_scores` and `token_scores`.
    """
    with suppress(NoLogprobs):
        return prompt_scores(endpoint, input_ids)
    return token_scores(endpoint, input_ids, len(input_ids) - 1)


def prompt_scores(
    endpoint: Endpoint, input_ids: Sequence[int], new_tokens: int = 1, *, text: str | None = None
) -> Scores:
    """Those of all tokens but the first, in one request: vLLM by `prompt_logprobs`; SGLang, `ctxext serve` and OpenAI's
    first models by `echo`, without the most likely tokens.

    Args:
        new_tokens: generated after the prompt; 0 for a prompt that leaves no room, which only `ctxext serve` takes.
        text: sent in the place of the tokens, which the server makes of it.

    Raises:
        NoLogprobs: the server does not return them.
        ValueError: it returns none for one of the tokens, or reads fewer tokens than were sent.
        ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `Endpoint.call`.
    """
    ids = list(input_ids)
    forms: tuple[tuple[dict[str, Any], Callable[..., Scores | None]], ...] = (
        ({"prompt_logprobs": 1}, _prompt_logprobs),
        ({"echo": True, "logprobs": 1}, _echoed_logprobs),
    )
    refusal = NoLogprobs(f"{endpoint.url} ignores the request for log-probabilities of a prompt.")
    for form, read in forms:
        try:
            choice = completion_of(endpoint, ids if text is None else text, {**form, "max_tokens": new_tokens})
        except NoLogprobs as error:  # a server without this feature rejects the next form as well
            refusal = error
            continue
        try:
            found = read(choice, ids)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"{endpoint.url} did not return one log-probability for each of the {len(ids)} tokens sent. Check that "
                "it serves this model with its own tokenizer, and does not cut prompts."
            ) from None
        if found is not None:
            return found
    raise refusal


def token_scores(endpoint: Endpoint, input_ids: Sequence[int], n: int, *, known: bool = False) -> Scores:
    """Those of the last `n` tokens, one request each, such as for llama.cpp's server: a logit bias forces the true
    token, and the log-probability is the one before the bias. With a prefix cache the prompt is read once.

    Args:
        known: the server was found to return log-probabilities from before the bias.

    Raises:
        NoLogprobs: it returns none in the format of llama.cpp or vLLM, or those after the bias.
        ValueError, ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `prompt_scores`.
    """
    ids = list(input_ids)
    found = [_drawn(endpoint, ids[:k], ids[k]) for k in range(len(ids) - n, len(ids))]
    logprobs, top1 = zip(*found)
    if not known and min(logprobs) > -1e-3:
        raise NoLogprobs(
            f"{endpoint.url} returns log-probabilities computed after sampling, not the model's own. "
            "Serve it with vLLM, SGLang or llama.cpp, or verify the file: ctxext verify model.gguf."
        )
    return _scores(logprobs, top1)


def _scores(logprobs: Iterable[float], top1: Iterable[int | None]) -> Scores:
    likely = [*top1]
    return Scores(
        torch.tensor([*logprobs], dtype=torch.float64),
        None if None in likely else torch.tensor(likely, dtype=torch.long),
    )


def check_logprobs(logprobs: Tensor, where: str) -> None:
    """Raise ValueError if one is NaN, infinite or positive."""
    if not bool((logprobs.isfinite() & (logprobs <= 1e-3)).all()):
        raise ValueError(
            f"{where} returned NaN, infinite or positive log-probabilities. Check its log, and that they are the "
            "model's own (vLLM: --logprobs-mode raw_logprobs)."
        )


def completion_of(endpoint: Endpoint, prompt: list[int] | str, form: dict[str, Any]) -> dict[str, Any]:
    """The completion of a prompt, as `form` asks for it.

    Raises:
        NoLogprobs: the server refuses the request, or returns no completion.
        ValueError: it reads fewer tokens than were sent.
    """
    body = {"model": endpoint.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, **form}
    try:
        completion = endpoint.call("completions", body, "the log-probabilities of a prompt")
    except ValueError as error:
        raise NoLogprobs(str(error)) from error
    choices = completion.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise NoLogprobs(f"{endpoint.url}/v1/completions returned no completion. Is it an OpenAI-compatible server?")
    n_read = tokens_read(completion)
    if isinstance(prompt, list) and n_read is not None and n_read < len(prompt):
        raise ValueError(truncated(endpoint, n_read, f"{len(prompt)}"))
    return {**choices[0], "n_read": n_read}


def tokens_read(completion: dict[str, Any]) -> int | None:
    usage = completion.get("usage")
    n_read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return n_read if is_count(n_read, 1) else None


def truncated(endpoint: Endpoint, n_read: int, sent: str) -> str:
    return (
        f"{endpoint.url} read {n_read} of {sent} tokens: it truncates prompts. Serve a longer context (vLLM: "
        "--max-model-len, llama.cpp: -c, Ollama: OLLAMA_CONTEXT_LENGTH), or lower --far (verify) or --lengths (eval)."
    )


# Both return None if the answer has another form, and raise KeyError, TypeError, ValueError or AttributeError if its
# tokens differ. The first entry is null, as nothing comes before it: a shifted list has none there. An extra one is of
# a BOS that the server adds.
def _prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> Scores | None:
    """vLLM: for each prompt token, the most likely token and itself, by id, with ranks; null for the first."""
    given = choice.get("prompt_logprobs")
    if given is None:
        return None
    added = len(given) - len(ids)
    if added not in (0, 1) or given[0] is not None:
        raise ValueError
    entries = given[1 + added :]
    likely = [next((int(token) for token, each in entry.items() if each.get("rank") == 1), None) for entry in entries]
    found = [_number(entry[str(token)]["logprob"]) for entry, token in zip(entries, ids[1:])]
    return _scores(found, likely)._replace(added=added)


def _echoed_logprobs(choice: dict[str, Any], ids: list[int]) -> Scores | None:
    """SGLang: the prompt's, then the new token's, if any; null for the first."""
    scores = choice.get("logprobs")
    given = scores.get("token_logprobs") if isinstance(scores, dict) else None
    if not isinstance(given, list) or len(given) < len(ids):  # only of the new token
        return None
    added = max(0, len(given) - len(ids) - 1) if choice["n_read"] is None else choice["n_read"] - len(ids)
    if added not in (0, 1) or len(given) - len(ids) - added not in (0, 1) or given[0] is not None:
        raise ValueError
    return _scores(map(_number, given[1 + added : len(ids) + added]), [None])._replace(added=added)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


def _drawn(endpoint: Endpoint, prompt: list[int], token: int) -> tuple[float, int | None]:
    """The log-probability of the next token, and the most likely one in its place, if the server returns it."""
    form = {"logprobs": 1, "logit_bias": {str(token): 100}, "return_tokens_as_token_ids": True}
    choice = completion_of(endpoint, prompt, form)
    drawn: dict[str, Any] = {}
    likely: dict[int, float] = {}
    with suppress(KeyError, TypeError, IndexError, ValueError):  # llama.cpp
        drawn = dict(choice["logprobs"]["content"][0])
        likely = {each["id"]: each["logprob"] for each in drawn["top_logprobs"]}
    with suppress(KeyError, TypeError, IndexError, ValueError, AttributeError):  # vLLM
        if choice["logprobs"]["tokens"][0] == f"token_id:{token}":
            drawn = {"id": token, "logprob": choice["logprobs"]["token_logprobs"][0]}
        top = choice["logprobs"]["top_logprobs"][0]
        likely = {int(name.removeprefix("token_id:")): logprob for name, logprob in top.items()}
    if drawn.get("id") != token or not isinstance(drawn.get("logprob"), float):
        raise NoLogprobs(
            f"{endpoint.url} returns no prompt log-probabilities in the format of vLLM, SGLang or "
            "llama.cpp. Serve the model with one of these, or verify its folder or file instead."
        )
    return float(drawn["logprob"]), max(likely, key=likely.__getitem__, default=None)
