"""Runs in OpenVINO's own environment. Reads one JSON object a line,
`{"build": [...], "output": "...", "prompts": [[ids], ...]}`; builds the model by that command, unless it is there, and
writes a line with the log-probabilities of each prompt's tokens but the first, or `{"error": "..."}`."""

import json
import os
import subprocess
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import openvino  # noqa: E402

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def measured(build, output, prompts):
    file = os.path.join(output, "openvino_model.xml")
    if not os.path.isfile(file):
        command = [os.path.join(os.path.dirname(sys.executable), build[0]), *build[1:]]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode or not os.path.isfile(file):
            raise RuntimeError(f"{build[0]}: {made.stderr.strip().splitlines()[-1]}")
    model = openvino.Core().compile_model(file, "CPU", FLOAT32)
    inputs = {name for each in model.inputs for name in each.get_names()}
    found = []
    for ids in prompts:
        n = len(ids) - 1
        given = {
            "input_ids": np.array([ids[:-1]], dtype=np.int64),
            "attention_mask": np.ones((1, n), dtype=np.int64),
            "position_ids": np.arange(n, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request = model.create_infer_request()  # with a state of its own
        logits = request.infer({name: value for name, value in given.items() if name in inputs})[model.output("logits")]
        logprobs = logits[0].astype(np.float64)
        logprobs -= logprobs.max(-1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
        found.append(logprobs[np.arange(n), ids[1:]].tolist())
    return [[value if abs(value) < float("inf") else None for value in each] for each in found]


for line in sys.stdin:
    try:
        answer = {"logprobs": measured(**json.loads(line))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(answer), file=answers, flush=True)
