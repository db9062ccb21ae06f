"""Runs in mlx-lm's own environment. Reads one JSON object a line, `{"folder": "...", "prompts": [[ids], ...]}`, and
writes a line with the log-probabilities of each prompt's tokens but the first, or `{"error": "..."}`."""

from answering import answer_requests  # isort: split

import mlx.core as mx
from mlx_lm import load


def measured(folder, prompts):
    model, _ = load(folder)
    found = []
    for ids in prompts:
        logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        found.append(mx.take_along_axis(logprobs, mx.array(ids[1:])[:, None], axis=-1)[:, 0].tolist())
    return found


answer_requests(measured)
