"""Runs in mlx-lm's own environment. Reads one JSON object a line, `{"folder": "...", "prompts": [[ids], ...]}`, and
writes a line with the log-probabilities of each prompt's tokens but the first, or `{"error": "..."}`."""

import json
import os
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402


def measured(folder, prompts):
    model, _ = load(folder)
    found = []
    for ids in prompts:
        logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        found.append(mx.take_along_axis(logprobs, mx.array(ids[1:])[:, None], axis=-1)[:, 0].tolist())
    return [[value if abs(value) < float("inf") else None for value in each] for each in found]


for line in sys.stdin:
    try:
        answer = {"logprobs": measured(**json.loads(line))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(answer), file=answers, flush=True)
