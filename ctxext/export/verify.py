"""Check whether an extension is live in an engine, by comparing its log-probabilities of a text with the expected
ones."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctxext.export.gguf import check_magic
from ctxext.export.probe import (
    FAR_LIMIT,
    FAR_TOKENS,
    PARTLY,
    PASSKEYS,
    NotExtended,
    Probe,
    Verdict,
    check_far,
    judge,
    judge_by_length,
    judge_far,
    judge_passkeys,
    logprobs_of,
    make_probe,
    passkey_prompt,
    probe_beside,
    read_probe,
)
from ctxext.export.served import (
    NoLogprobs,
    completion_of,
    prompt_scores,
    served_scores,
    token_scores,
    tokens_read,
    truncated,
)
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.method_file import PROBE
from ctxext.hub.checkpoint import (
    checkpoint_folder,
    extended_as_saved,
    load_model,
    load_tokenizer,
    rejecting,
    saved_extension,
)
from ctxext.utils.endpoint import Endpoint
from ctxext.utils.values import MAX_TOKENS, is_count, shown


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: the engine and its version, where it runs, and further notes, a sentence each."""

    engine: str
    where: str
    probe: Probe
    verdict: Verdict
    notes: tuple[str, ...]


def verify(
    where: str | Path,
    probe: Path | None = None,
    *,
    revision: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    noise: float | None = None,
    far: int | None = None,
    timeout: float = 600,
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Verify an extension in plain transformers (a folder or hub name), llama.cpp (a .gguf file) or a server (its URL).

    Args:
        probe: a file of `Probe.save`. By default that of the folder (its verify.json, or one made from its config) or
            of the GGUF file (model.verify.json beside model.gguf).
        revision: a branch, tag or commit on the hub.
        model: the model to ask, if the server has several.
        api_key: for a server; None reads OPENAI_API_KEY.
        noise: as in `judge`.
        far: check positions near the target as well, up to this many tokens, more than the trained length; None for as
            many as the probe covers, 0 for none. This costs one prompt of that length, or 12 without a prefix cache.
            Unless a smaller number is passed, an engine that serves less than the target is not live, but `PARTLY`.
        timeout: for each answer of a server, in seconds.
        say: called with progress messages.

    Raises:
        ValueError: no probe for a file or a server, or one of another model; no GGUF file; or as `make_probe`.
        FileNotFoundError: no such checkpoint, file or probe.
        ImportError: a GGUF file, without `ctxext[llama-cpp]`.
        ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `ctxext.utils.endpoint.Endpoint`.
    """
    if noise is not None and not noise > 0:
        raise ValueError(f"noise must be > 0 nats per token, got {noise}.")
    if far is not None and not is_count(far, 0, MAX_TOKENS):
        raise ValueError(f"far must be a number of tokens from 0 to {MAX_TOKENS}, got {shown(far)}.")
    where = str(where)
    is_server, is_gguf = bool(re.match("https?://", where, re.IGNORECASE)), where.lower().endswith(".gguf")
    if revision is not None and (is_server or is_gguf):
        raise ValueError(f"revision={revision!r} is for hub names, but {where} is not one. Drop it.")
    if is_gguf:
        if not Path(where).is_file():
            raise FileNotFoundError(f"{where} does not exist. Check the path.")
        check_magic(Path(where))
        # A verify.json beside it may be of any other model, which then seems to match.
        own = probe_beside(Path(where))
        probe = probe or (own if own.is_file() else None)
    if is_server or is_gguf:
        if probe is None:
            raise ValueError(
                f"{where} has no probe to compare with. Create one from the extended checkpoint, `ctxext "
                f"verify DIR -o {PROBE}`, and pass it: --probe {PROBE}."
            )
        read = read_probe(probe)
        _check_long_text(read, far)
        if is_server:
            endpoint = Endpoint(where, model=model, api_key=api_key, timeout=timeout)
            say(f"querying {endpoint.name} at {endpoint.url}")
            engine = _server(endpoint, read)
        else:
            engine = _llama_cpp(Path(where), read, far, say)
    elif re.fullmatch(r"[\w.-]+:\d+(/.*)?", where):
        raise ValueError(f"{where} is a server address without a scheme. Write http://{where}.")
    elif where.endswith(".json") and _is_probe(Path(where)):
        raise ValueError(
            f"{where} is a probe, which an engine is compared with. Pass the engine: ctxext verify WHERE --probe "
            f"{shlex.quote(where)}."
        )
    else:
        try:
            read, engine = _plain_transformers(checkpoint_folder(where, revision), probe, far, say)
        except NotExtended as error:
            raise ValueError(
                f"{where} is not extended, so there is nothing to verify. Extend it first: ctxext extend "
                f"{shlex.quote(where)} -o FOLDER."
            ) from error
    notes = list(engine.notes)
    wanted = min(far or read.target_length, read.target_length)
    if engine.logprobs is None:
        if far == 0:
            raise ValueError(
                f"{endpoint.url} returns no log-probabilities of prompts, so far=0 leaves nothing to test."
            )
        say("asking for passkeys, as the server returns no log-probabilities of prompts")
        verdict = judge_passkeys(read, *_passkeys(endpoint, read, far, engine.limit))
        return Verification(engine.name, where, read, verdict, tuple(notes))
    lengths = " or ".join(map(str, sorted(read.far)))
    if far and not read.far_length(far):
        raise ValueError(
            f"far={far} is below the probe's shortest long text. Pass far={lengths}, or far=0 to skip this check."
        )
    length = read.far_length(min(math.inf if far is None else far, engine.limit)) if engine.tail else 0
    if is_server and length > 0 and not read.shows_truncation(length):
        notes.append(
            f"the extended model does not find a passkey in a text of {length} tokens, so only usage.prompt_tokens can "
            "reveal truncation"
        )
    verdict = judge_engine(read, engine, length, noise, say)
    if verdict.is_live and far and length < min(far, engine.limit):
        notes.append(f"the probe has long texts of {lengths} tokens, so far={far} tested {verdict.asked_to}")
    if verdict.is_live and verdict.asked_to < read.target_length:
        untested = f"positions beyond {verdict.asked_to} of {read.target_length} tokens were not tested"
        create = f", as the probe holds no long text: create one with far={read.target_length}"
        notes.append(untested + create * (far is None and not read.far))
    if verdict.is_live and far != 0:
        missing = _missing(engine, "the server" if is_server else engine.name, wanted)
        if missing:
            reason = f"{verdict.reason}, but {missing}, or accept this with far={length}"
            verdict = replace(verdict, name=PARTLY, reason=reason)
    return Verification(engine.name, where, read, verdict, tuple(notes))


def judge_engine(
    probe: Probe,
    engine: Probed,
    length: int,
    noise: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """The verdict by log-probabilities of the probe's short text, and of its long text of `length` tokens; 0 for none.

    Raises:
        ValueError: the extension may change nothing in a short text, and there is no long one; or as `judge`.
    """
    assert engine.logprobs is not None
    if probe.far_unextended:
        if length == 0 or engine.tail is None:
            raise ValueError(
                f"{probe.summary} may change nothing in a short text, and {engine.name} was sent no long one. Serve at "
                f"least {min(probe.far)} tokens, take token ids as prompts, or raise far."
            )
        say(f"reading a text of {length} tokens")
        short, tail = engine.logprobs(probe.input_ids), engine.tail(probe.far_ids(length))
        return judge_by_length(probe, short, length, tail, noise)
    verdict = judge(probe, engine.logprobs(probe.input_ids), noise, engine.asked)
    if verdict.is_live and length > 0:
        assert engine.tail is not None
        say(f"reading a text of {length:,} tokens, near the target: minutes on a CPU if long (--far 0 skips it)")
        verdict = judge_far(probe, verdict, length, engine.tail(probe.far_ids(length)))
    return verdict


@dataclass(frozen=True)
class Probed:
    """A model in an engine. A new engine is a function that returns one of these.

    Attributes:
        logprobs: of every token of a text but the first; None: it returns none.
        tail: of the last `FAR_TOKENS` tokens of a long text; None: it takes no token ids.
        asked: the tokens that have one in `logprobs`; None for all.
        limit: the longest text that it serves, in tokens.
    """

    name: str
    logprobs: Callable[[Sequence[int]], Tensor] | None
    tail: Callable[[Sequence[int]], Tensor] | None
    asked: Tensor | None = None
    limit: float = math.inf
    notes: tuple[str, ...] = ()


def _check_long_text(probe: Probe, far: int | None) -> None:
    """Raise ValueError if a long text is asked for that is too short, or of which `probe` holds none."""
    check_far(probe, far)
    if far and not probe.far:
        raise ValueError(
            f"the probe holds no long text, so far={far} cannot be tested. Create one from the extended checkpoint, "
            f"`ctxext verify DIR --far {far} -o FILE`, or pass far=0 to skip this check."
        )


def _is_probe(path: Path) -> bool:
    with suppress(ValueError, OSError):
        return bool(read_probe(path))
    return False


def _missing(engine: Probed, what: str, wanted: int) -> str:
    """Why `engine` cannot be tested up to `wanted` tokens, and the remedy; empty if it can."""
    if engine.limit < wanted:
        return f"{what} stops at {engine.limit:,} of {wanted:,} tokens. Serve the whole length"
    if engine.tail is None:
        return f"{what} takes no token ids, so no long text was sent. Serve it with another engine"
    return ""


# --------------------------------------------------------------------------------- transformers


def _plain_transformers(
    folder: Path, path: Path | None, far: int | None, say: Callable[[str], None]
) -> tuple[Probe, Probed]:
    """The model as plain transformers loads it, and its probe."""
    import transformers

    record = read_record(folder)
    by = f"transformers {transformers.__version__}"
    say(f"loading {folder} with plain transformers" if record is None else f"loading {folder} with ctxext.load")
    model = load_model(folder)
    own: tuple[str, ...] = ()
    if record is not None:
        model, by = extended_as_saved(model, saved_extension(folder)), f"{by} with ctxext.load"
        own = (f"its extension is in {RECORD}, so every other engine runs the unextended model: use ctxext serve",)
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{folder} is a {type(model).__name__}, without a language-modelling head, so it has no log-probabilities. "
            "Save the model with its head, and verify that."
        )
    if not model.config.is_encoder_decoder:
        with rejecting(folder / "config.json"):
            logprobs_of(model, (0, 1))
    tokenizer = load_tokenizer(folder)
    say("reading the probe")
    if path is None and (folder / PROBE).is_file():
        path = folder / PROBE
    if path is None:
        say("creating the probe from the config")
        own = (
            *own,
            "the probe was made from this folder's config by ctxext's own formulas",
        )
    probe = make_probe(model, tokenizer, far=far) if path is None else read_probe(path)
    # In a config this would be a finding; ctxext applies its own file, so that only the probe can be wrong.
    if record is not None and probe.summary != record.summary:
        raise ValueError(
            f"the probe {path} is of {probe.summary}, but {folder} is extended by {record.summary}. Pass a probe of "
            "this folder, or none."
        )
    _check_long_text(probe, far)
    tokens = tokenizer(probe.text)["input_ids"]
    return probe, Probed(
        name=by,
        logprobs=lambda ids: logprobs_of(model, ids),
        tail=lambda ids: logprobs_of(model, ids, 256)[-FAR_TOKENS:],
        notes=(*own, *_checked_tokens(probe, tokens, model.config.get_text_config(decoder=True).vocab_size)),
    )


def _checked_tokens(probe: Probe, ids: Sequence[int], vocab_size: int) -> tuple[str, ...]:
    """A note if the model's own tokenizer reads the probe's text as other tokens, `ids`."""
    if max(probe.input_ids) >= vocab_size:
        raise ValueError(
            f"the probe contains token {max(probe.input_ids)}, but this model's vocabulary ends at {vocab_size - 1}: "
            "it is another model. Pass the probe created from this model's extended checkpoint."
        )
    n = len(probe.input_ids)
    if tuple(ids[:n]) == probe.input_ids:
        return ()
    return (
        f"its tokenizer splits the text into other tokens ({len(ids)}; the probe has {n}), so text prompts differ from "
        "what the model was trained on",
    )


# ------------------------------------------------------------------------------------ llama.cpp


def _llama_cpp(path: Path, probe: Probe, far: int | None, say: Callable[[str], None]) -> Probed:
    from ctxext.export.llama_cpp import GGUFModel

    say(f"loading {path} with llama.cpp")
    model = GGUFModel(path, n_ctx=max(512, len(probe.input_ids) + 1, probe.far_length(far)))
    say("reading the probe")
    return Probed(
        name="llama.cpp",
        logprobs=model.logprobs,
        tail=lambda ids: model.logprobs(ids, len(ids) - FAR_TOKENS),
        limit=model.trained_length,
        notes=_checked_tokens(probe, model.tokenize(probe.text), model.vocab_size),
    )


# -------------------------------------------------------------------------------------- servers


# Characters of 12 tokens. A prompt of passkeys, which has several times as many, holds the answer.
MAX_ANSWER = 400


def _server(endpoint: Endpoint, probe: Probe) -> Probed:
    owner = endpoint.card.get("owned_by")
    meta = endpoint.card.get("meta")
    n_ctx = meta.get("n_ctx") if isinstance(meta, dict) else None  # of llama.cpp
    served: Any = endpoint.card.get("max_model_len", n_ctx)
    known: dict[str, Any] = {
        "name": f"{owner if isinstance(owner, str) and owner else 'OpenAI-compatible'} server, model {endpoint.name!r}",
        "limit": served if is_count(served, high=MAX_TOKENS) else math.inf,
    }
    notes: tuple[str, ...] = ()
    if served is not None and known["limit"] == math.inf:
        notes = (f"/v1/models gives a maximum length of {shown(served)}, which is not a length, so it was ignored",)

    def tail(ids: Sequence[int]) -> Tensor:
        try:
            return _tail(endpoint, ids)
        except (ValueError, RuntimeError) as error:
            raise type(error)(
                f"live in a short text, but a request of {len(ids)} tokens failed: {error} If the server is meant to "
                "serve fewer, verify with --far 0."
            ) from error

    with suppress(NoLogprobs):
        found = served_scores(endpoint, probe.input_ids).logprobs
        return Probed(logprobs=lambda ids: found, tail=tail, notes=notes, **known)
    with suppress(NoLogprobs):
        by_text, asked = _by_text(endpoint, probe)
        notes += ("the server takes no token ids, so only the short text was sent",)
        return Probed(logprobs=lambda ids: by_text, tail=None, asked=asked, notes=notes, **known)
    return Probed(logprobs=None, tail=None, notes=notes, **known)


def _tail(endpoint: Endpoint, ids: Sequence[int]) -> Tensor:
    """One request per token if possible: for log-probabilities of a whole prompt, a server would compute logits of the
    whole vocabulary at every position."""
    with suppress(NoLogprobs):
        return token_scores(endpoint, ids, FAR_TOKENS).logprobs
    return prompt_scores(endpoint, ids).logprobs[-FAR_TOKENS:]


# ---------------------------------------------------------------------- servers that take text only


def _by_text(endpoint: Endpoint, probe: Probe) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the probe's tokens by mlx_lm.server, one request each, and which tokens have one.

    The text is cut where it has the same tokens by itself (`Probe.cuts`). mlx-lm reports log-probabilities after the
    logit bias: of a token with probability p and bias b, q = p exp(b) / (1 - p + p exp(b)). This is solved for p.

    Raises:
        NoLogprobs: the server returns none in this form, or the text cannot be cut at half of the tokens.
        ValueError: it reads other tokens.
    """
    # Longest first, and none of one token: mlx-lm 0.32.2 caches prompt and answer, and its generation thread ends at a
    # prompt that is exactly what the cache holds.
    places = [k for k in range(len(probe.input_ids) - 1, 1, -1) if probe.cuts and probe.cuts[k - 1]]
    if 2 * len(places) < len(probe.input_ids):
        raise NoLogprobs("the probe's text cannot be cut into prompts.")
    found = torch.full((len(probe.input_ids) - 1,), -math.inf, dtype=torch.float64)
    for k in places:
        found[k - 1] = _unbiased(endpoint, probe, k)
    return found, found > -math.inf


def _unbiased(endpoint: Endpoint, probe: Probe, k: int) -> float:
    token, prompt = probe.input_ids[k], probe.text[: probe.cuts[k - 1]]
    bias = 3 - probe.expected["extended"][k - 1]  # as large as needed: q must differ from 1
    for _ in range(4):
        choice = completion_of(endpoint, prompt, {"logprobs": True, "logit_bias": {str(token): bias}})
        if choice["n_read"] not in (None, k, k + 1):  # with a BOS that the server adds
            raise ValueError(
                f"{endpoint.url} reads {choice['n_read']} tokens where this model has {k}: it serves another model or "
                "tokenizer. Serve this one, or pass the probe of the served model."
            )
        drawn: dict[str, Any] = {}
        with suppress(KeyError, TypeError, IndexError, ValueError):
            drawn = dict(choice["logprobs"]["content"][0])
        logprob = drawn.get("logprob")
        if not isinstance(logprob, float) or not -math.inf < logprob < -1e-6:
            break
        if drawn.get("id") == token:
            return logprob - math.log(math.exp(logprob) - math.expm1(logprob) * math.exp(bias))
        bias += 6
    raise NoLogprobs(f"{endpoint.url} returns no log-probabilities in mlx-lm's format.")


# -------------------------------------------------------------- servers without log-probabilities


def _passkeys(
    endpoint: Endpoint, probe: Probe, far: int | None, limit: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The length in tokens and the number of passkeys of `PASSKEYS` found, within the trained length and near the
    target."""
    per_token = len(probe.text) / _ask(endpoint, probe.text)[1]
    if limit < (wanted := min(far or probe.target_length, probe.target_length)):
        shorter = f", or pass far={limit}" if limit > probe.short_length else ""
        raise ValueError(
            f"{endpoint.url} stops at {limit:,} of {wanted:,} tokens, and returns no log-probabilities of prompts. "
            f"Serve a longer context{shorter}."
        )
    if not (near := min(probe.target_length, far or FAR_LIMIT)) > probe.trained_length:
        raise ValueError(
            f"no prompt up to {near:,.0f} tokens goes beyond the trained length of {probe.trained_length:,}, and the "
            "server returns no log-probabilities. Serve a longer context, or pass a larger --far."
        )
    lengths = [int(0.9 * length) for length in (probe.trained_length, near)]
    found = []
    for length in lengths:
        hits = 0
        for trial in range(PASSKEYS):
            prompt, key = passkey_prompt(probe.text, int(length * per_token), trial)
            answer, n_read = _ask(endpoint, prompt)
            if n_read < 0.75 * length:
                raise ValueError(truncated(endpoint, n_read, f"about {length}"))
            hits += key in answer
        found.append(hits)
    return (lengths[0], found[0]), (lengths[1], found[1])


def _ask(endpoint: Endpoint, prompt: str) -> tuple[str, int]:
    """The continuation of a text, and the tokens read."""
    body = {"model": endpoint.name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    completion = endpoint.call("completions", body, f"a prompt of {len(prompt)} characters")
    n_read = tokens_read(completion)
    try:
        answer = completion["choices"][0]["text"]
    except (KeyError, IndexError, TypeError):
        answer = None
    if not isinstance(answer, str) or n_read is None:
        raise ValueError(
            f"{endpoint.url}/v1/completions returned no text with usage.prompt_tokens. Is it an OpenAI-compatible "
            "server? Otherwise verify the folder or file."
        )
    if len(answer) > MAX_ANSWER:
        raise ValueError(
            f"{endpoint.url} returned {len(answer)} characters where 12 tokens were asked for: it echoes the prompt or "
            "ignores max_tokens, so passkeys in its answers tell nothing. Change that, or verify the folder or file."
        )
    return answer, n_read
