"""Check whether an extension is live in an engine, by comparing its log-probabilities of a text with the expected
ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from ctxext.export.probe import (
    FAR_TOKENS,
    Probe,
    Verdict,
    judge,
    judge_far,
    logprobs_of,
    make_probe,
    probe_beside,
    read_probe,
)
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.method_file import PROBE
from ctxext.hub.checkpoint import architecture_of, checkpoint_folder
from ctxext.utils.endpoint import Endpoint
from ctxext.utils.values import MAX_TOKENS, is_count, is_number, shown


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        engine: its name and version.
        where: the folder, file or address.
        notes: further observations, a sentence each.
    """

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
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Verify an extension in plain transformers (a folder or hub name), llama.cpp (a GGUF file) or a server (its
    address).

    Args:
        probe: a file of `Probe.save`. Optional for a folder (its `verify.json`, or a probe made from its config) and
            for a GGUF file with a probe beside it (model.verify.json for model.gguf, or verify.json).
        revision: a branch, tag or commit on the hub.
        model: the model to ask, if the server has several.
        api_key: for a server; None reads OPENAI_API_KEY.
        noise: as in `judge`.
        far: if the short text is live, also check positions near the target, up to this many tokens; None for as many
            as the probe covers and the engine serves, 0 for none. This costs one prompt of that length, or 8 if the
            server has no prefix cache.
        say: called with progress messages.

    Raises:
        ValueError: no probe for a file or a server, or one of another model; or as `make_probe`.
        FileNotFoundError: no such checkpoint, file or probe.
        ImportError: a GGUF file, without `ctxext[llama-cpp]`.
        ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `ctxext.utils.endpoint.Endpoint`.
    """
    if noise is not None and not noise > 0:
        raise ValueError(f"noise must be > 0 nats a token, got {noise}.")
    if far is not None and not is_count(far, 0, MAX_TOKENS):
        raise ValueError(f"far must be a number of tokens >= 0, got {shown(far)}.")
    if revision is not None and (str(where).startswith(("http://", "https://")) or str(where).endswith(".gguf")):
        raise ValueError(f"revision={revision!r} is for hub names, but {where} is not one. Drop it.")
    if str(where).startswith(("http://", "https://")):
        asking = _Asking(_needed(probe, str(where)), noise, far, say)
        engine, verdict, notes = _ask_server(str(where), asking, model, api_key)
    elif str(where).endswith(".gguf"):
        if not Path(where).is_file():
            raise FileNotFoundError(f"{where} does not exist. Check the path.")
        beside = (probe_beside(Path(where)), Path(where).parent / PROBE)
        read = _needed(probe or next((path for path in beside if path.is_file()), None), str(where))
        asking = _Asking(read, noise, far, say)
        engine, verdict, notes = _ask_llama_cpp(Path(where), asking)
    elif re.fullmatch(r"[\w.-]+:\d+(/.*)?", str(where)):
        raise ValueError(f"{where} is the address of a server without its scheme. Write http://{where}.")
    else:
        asking, engine, verdict, notes = _ask_transformers(
            checkpoint_folder(str(where), revision), probe, noise, far, say
        )
    if verdict.is_live and verdict.asked_to < asking.probe.target_length:
        notes.append(f"nothing was asked beyond {verdict.asked_to} of {asking.probe.target_length} tokens")
    return Verification(engine, str(where), asking.probe, verdict, tuple(notes))


@dataclass(frozen=True)
class _Asking:
    """The arguments probe, noise, far and say of `verify`."""

    probe: Probe
    noise: float | None
    far: int | None
    say: Callable[[str], None]

    def far_length(self, served: float | None = None) -> int:
        """The length at which to check positions near the target; 0 for none."""
        limits = [limit for limit in (self.far, served) if limit is not None]
        return self.probe.far_length(min(limits) if limits else None)

    def judged(self, logprobs: Tensor, ask_far: Callable[[list[int]], Tensor], served: float | None = None) -> Verdict:
        """The verdict on the short text and, if that is live, on the last tokens of a long one."""
        verdict, length = judge(self.probe, logprobs, self.noise), self.far_length(served)
        if not verdict.is_live or length == 0:
            return verdict
        self.say(f"reading a text of {length} tokens, for positions near the target (--far 0 leaves it out)")
        return judge_far(self.probe, verdict, length, ask_far(self.probe.far_ids(length)))


_Answer = tuple[str, Verdict, list[str]]


def _needed(probe: Path | None, where: str) -> Probe:
    if probe is None:
        raise ValueError(
            f"{where} does not say what it should compute. Make a probe from the extended checkpoint, `ctxext verify "
            f"DIR -o {PROBE}`, and pass it: --probe {PROBE}."
        )
    return read_probe(probe)


# --------------------------------------------------------------------------------- transformers


def _ask_transformers(
    folder: Path, path: Path | None, noise: float | None, far: int | None, say: Callable[[str], None]
) -> tuple[_Asking, str, Verdict, list[str]]:
    import transformers

    if read_record(folder) is not None:
        raise ValueError(
            f"{folder} keeps its extension in {RECORD}, as config.json cannot express it: plain transformers runs it "
            "as it was, and so does every other engine. Load it with ctxext.load, or extend with a static method such "
            "as 'yarn'."
        )
    say(f"loading {folder} with plain transformers")
    # Not with ctxext.load: this checks what everyone else gets.
    model = architecture_of(folder).from_pretrained(folder, use_safetensors=True).eval()
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{folder} is a {type(model).__name__}, without a language-modelling head: it gives no log-probabilities. "
            "Save the model with its head, and verify that."
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    say("reading the probe")
    if path is None and (folder / PROBE).is_file():
        path = folder / PROBE
    if path is None:
        say("making the probe from what the config says")
        probe = make_probe(model, tokenizer, far=far)
    else:
        probe = read_probe(path)
    _check_vocabulary(probe, model.config.get_text_config(decoder=True).vocab_size)
    notes = [] if path is not None else ["the probe was made from this folder's config by ctxext's own formulas"]
    notes += _other_tokens(probe, tokenizer(probe.text)["input_ids"])
    asking = _Asking(probe, noise, far, say)
    verdict = asking.judged(logprobs_of(model, probe.input_ids), lambda ids: logprobs_of(model, ids, 256)[-FAR_TOKENS:])
    return asking, f"transformers {transformers.__version__}", verdict, notes


def _check_vocabulary(probe: Probe, size: int) -> None:
    if max(probe.input_ids) >= size:
        raise ValueError(
            f"the probe has the token {max(probe.input_ids)}, but this model's vocabulary ends at {size - 1}: it is "
            "another model. Pass the probe that was made from its own extended checkpoint."
        )


def _other_tokens(probe: Probe, ids: Sequence[int]) -> list[str]:
    n = len(probe.input_ids)
    if tuple(ids[:n]) == probe.input_ids:
        return []
    return [
        f"its tokenizer reads the text as other tokens ({len(ids)}, where the probe has {n}): what is sent as text is "
        "not what the model was trained on"
    ]


# ------------------------------------------------------------------------------------ llama.cpp


def _ask_llama_cpp(path: Path, asking: _Asking) -> _Answer:
    from ctxext.export.llama_cpp import GGUFModel

    probe = asking.probe
    asking.say(f"loading {path} with llama.cpp")
    with GGUFModel(path, n_ctx=max(512, len(probe.input_ids) + 1, asking.far_length())) as model:
        asking.say("reading the probe")
        _check_vocabulary(probe, model.vocab_size)
        notes = _other_tokens(probe, model.tokenize(probe.text))
        verdict = asking.judged(
            model.logprobs(probe.input_ids),
            lambda ids: model.logprobs(ids, len(ids) - FAR_TOKENS),
            model.trained_length,
        )
        return "llama.cpp", verdict, notes


# -------------------------------------------------------------------------------------- servers


def _ask_server(url: str, asking: _Asking, model: str | None, api_key: str | None) -> _Answer:
    endpoint = Endpoint(url, model=model, api_key=api_key)
    asking.say(f"asking {endpoint.name} at {endpoint.url}")
    engine = f"{endpoint.card.get('owned_by') or 'OpenAI-compatible'} server, model {endpoint.name!r}"
    served = endpoint.card.get("max_model_len")  # of vLLM and SGLang

    def ask_far(ids: list[int]) -> Tensor:
        try:
            return served_tail(endpoint, ids, FAR_TOKENS)
        except (ValueError, RuntimeError) as error:
            raise type(error)(
                f"live in a short text, but it answers nothing about {len(ids)} tokens: {error} Where fewer are served "
                "on purpose, verify with --far 0."
            ) from error

    logprobs = served_logprobs(endpoint, asking.probe.input_ids)
    return engine, asking.judged(logprobs, ask_far, served if is_number(served) else None), []


def served_logprobs(endpoint: Endpoint, input_ids: Sequence[int]) -> Float64[Tensor, " token"]:
    """log p(input_ids[k] | input_ids[:k]) for k >= 1 under a served model, in nats, by /v1/completions.

    One request if the server returns log-probabilities of prompts: vLLM with `prompt_logprobs`, SGLang and OpenAI's
    first models with `echo`. Others, such as llama.cpp's server, get one request per token: a logit bias forces the
    true token, and the reported log-probability is the one before the bias.

    Raises:
        ValueError: the server returns none of these, or those of other tokens.
        ConnectionError, TimeoutError, PermissionError, RuntimeError: as in `Endpoint.call`.
    """
    ids = list(input_ids)
    found = _of_a_prompt(endpoint, ids)
    if found is not None:
        return found
    return _drawn(endpoint, ids, len(ids) - 1)


def served_tail(endpoint: Endpoint, input_ids: Sequence[int], n: int) -> Float64[Tensor, " token"]:
    """The last `n` of `served_logprobs`, one request per token if possible.

    For log-probabilities of a long prompt, a server would compute logits of the whole vocabulary at every position.
    With a prefix cache, the prompt is read once.

    Raises:
        ValueError, ConnectionError, TimeoutError, PermissionError, RuntimeError: as `served_logprobs`.
    """
    ids = list(input_ids)
    try:
        return _drawn(endpoint, ids, n)
    except ValueError:
        found = _of_a_prompt(endpoint, ids)
        if found is None:
            raise
        return found[-n:]


def _of_a_prompt(endpoint: Endpoint, ids: list[int]) -> Tensor | None:
    """Those of a whole prompt, in one request; None if the server does not return them."""
    request = {"model": endpoint.name, "prompt": ids, "max_tokens": 1, "temperature": 0}
    for ask, read in (
        ({"prompt_logprobs": 1}, _prompt_logprobs),
        ({"echo": True, "logprobs": 1}, _echoed_logprobs),
    ):
        try:
            choice = _choice(endpoint, {**request, **ask}, ids)
        except ValueError:  # refused; a server without this feature refuses the next form as well
            continue
        found = read(choice, ids)
        if found == []:
            raise ValueError(
                f"{endpoint.url} answers {len(ids)} tokens with log-probabilities of others: it reads other tokens. "
                "Check that it serves this model, with its own tokenizer."
            )
        if found is not None:
            return torch.tensor(found, dtype=torch.float64)
    return None


def _drawn(endpoint: Endpoint, ids: list[int], n: int) -> Tensor:
    """Those of the last `n` tokens, one request each."""
    values = [_drawn_logprob(endpoint, ids[:k], ids[k]) for k in range(len(ids) - n, len(ids))]
    if min(values) > -1e-3:
        raise ValueError(
            f"{endpoint.url} tells log-probabilities from after its sampling, so that they say nothing of the model. "
            "Serve it with vLLM, SGLang or llama.cpp, or verify the file: ctxext verify model.gguf."
        )
    return torch.tensor(values, dtype=torch.float64)


def _choice(endpoint: Endpoint, body: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    completion = endpoint.call("completions", body, f"the log-probabilities of {len(ids)} tokens")
    choices = completion.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise ValueError(f"{endpoint.url}/v1/completions answered no completion. Is it an OpenAI-compatible server?")
    return choices[0]


# Each returns None if the answer has another form, and an empty list if its tokens differ. An extra token is a BOS that
# the server adds.


def _prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> list[float] | None:
    """vLLM: for each prompt token, the likely tokens and itself, by id; null for the first."""
    given = choice.get("prompt_logprobs")
    if given is None:
        return None
    with suppress(KeyError, TypeError, ValueError):
        added = len(given) - len(ids)
        if added in (0, 1):
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(given[1 + added :], ids[1:])]
    return []


def _echoed_logprobs(choice: dict[str, Any], ids: list[int]) -> list[float] | None:
    """SGLang: the prompt's, then the new token's; null for the first."""
    scores = choice.get("logprobs")
    given = scores.get("token_logprobs") if isinstance(scores, dict) else None
    if not isinstance(given, list) or len(given) < len(ids):  # only of the new token
        return None
    with suppress(TypeError, ValueError):
        added = max(0, len(given) - len(ids) - 1)
        if added in (0, 1):
            return [float(value) for value in given[1 + added : len(ids) + added]]
    return []


def _drawn_logprob(endpoint: Endpoint, prompt: list[int], token: int) -> float:
    body = {
        "model": endpoint.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1,
        "logit_bias": {str(token): 100}, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    choice = _choice(endpoint, body, prompt)
    drawn: dict[str, Any] = {}
    with suppress(KeyError, TypeError, IndexError, ValueError):  # llama.cpp
        drawn = dict(choice["logprobs"]["content"][0])
    with suppress(KeyError, TypeError, IndexError):  # vLLM
        if choice["logprobs"]["tokens"][0] == f"token_id:{token}":
            drawn = {"id": token, "logprob": choice["logprobs"]["token_logprobs"][0]}
    if drawn.get("id") != token or not isinstance(drawn.get("logprob"), float):
        raise ValueError(
            f"{endpoint.url} gives no log-probabilities of a prompt, in none of the forms of vLLM, SGLang and "
            "llama.cpp. Serve the model with one of these, or verify its folder or file instead."
        )
    return float(drawn["logprob"])
