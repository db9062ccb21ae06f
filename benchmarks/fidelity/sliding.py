"""Sliding perplexity and perplexity by position beside a loop with one forward pass for each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from fidelity.row import Row
from report import largest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ctxext import temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import Perplexity, SlidingPerplexity, TextTask, unpacked
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place

FLOAT32 = 1e-4  # nats


@torch.inference_mode()
def token_by_token(model: PreTrainedModel, ids: Sequence[int], scored_from: int) -> list[float]:
    """The loss in nats of each token from `scored_from` on: the model reads what comes before it, without a cache."""
    found = []
    for k in range(scored_from, len(ids)):
        logits = model(torch.tensor([ids[:k]]), use_cache=False, logits_to_keep=1).logits[0, -1]
        found.append(float(logits.double().logsumexp(0) - logits[ids[k]].double()))
    return found


def differences(
    model: PreTrainedModel, task: TextTask, length: int, trials: Sequence[int], haystack: Haystack, bos: Sequence[int]
) -> tuple[float, float, int]:
    """The largest difference of a loss in nats, that of the logarithm of perplexity, and the number of tokens."""
    ours: list[float] = []
    theirs: list[float] = []
    for trial in trials:
        window = task.window(Place(task.name, length, None, trial, 0), haystack, bos)
        ours += unpacked(task.record(window, Engine(model)), "losses").tolist()
        theirs += token_by_token(model, window.input_ids, window.scored_from)
    assert len(ours) == len(theirs)
    most = largest(abs(a - b) for a, b in zip(ours, theirs))
    return most, abs(math.fsum(ours) - math.fsum(theirs)) / len(ours), len(ours)


def scored_once(task: SlidingPerplexity, length: int, windows: int, haystack: Haystack, bos: Sequence[int]) -> int:
    """How many tokens of the text are left out or scored twice up to the end of the last window."""
    scores = [0] * (length - len(bos) + (windows - 1) * task.stride)
    for trial in range(windows):
        window = task.window(Place(task.name, length, None, trial, 0), haystack, bos)
        start = trial * task.stride - window.n_bos
        for k in range(window.scored_from, len(window.input_ids)):
            scores[start + k] += 1
    return sum(score != 1 for score in scores)


def rows(tiny: bool = False) -> Iterator[Row]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    haystack, bos = Haystack.from_file(PERSUASION, tokenizer), Prompter(tokenizer).special
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    trained = model.config.max_position_embeddings
    sliding = SlidingPerplexity(stride=8 if tiny else 64)
    length, trials = (32, range(2)) if tiny else (256, range(3))
    most, mean, n = differences(model, sliding, length, trials, haystack, bos)
    scored = f"{n} tokens"
    yield Row("sliding perplexity: loss of a token, largest difference (nats)", most, FLOAT32, "loop", scored)
    yield Row("sliding perplexity: log of the perplexity, difference (nats)", mean, FLOAT32, "loop", scored)
    wrong = scored_once(sliding, length, 5, haystack, bos)
    yield Row("sliding perplexity: tokens not scored exactly once", wrong, 0, "loop", "5 windows")
    most, _, n = differences(model, Perplexity(), length, [0], haystack, bos)
    yield Row("perplexity by position: loss, largest difference (nats)", most, FLOAT32, "loop", f"{n} tokens")
    beyond = SlidingPerplexity(stride=4 if tiny else 64)
    for method in ("yarn", "dynamic_yarn"):
        with temporarily_extended(model, 4, method):
            most, _, n = differences(model, beyond, trained + 64, [1], haystack, bos)
        name = f"sliding perplexity beyond the trained length, {method}: loss, largest difference (nats)"
        yield Row(name, most, FLOAT32, "loop", f"{n} tokens")
