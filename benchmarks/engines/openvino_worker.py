"""Runs in OpenVINO's own environment. Reads one JSON object a line,
`{"command": [...], "output": "...", "prompts": [[ids], ...]}`; builds the model by that command, unless it is there,
and writes a line with the log-probabilities of each prompt's tokens but the first, or `{"error": "..."}`."""

from answering import answer_requests, build, logprobs_of  # isort: split

import os
import sys

import numpy as np
import openvino

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def measured(command, output, prompts):
    file = os.path.join(output, "openvino_model.xml")
    build(command[0], [os.path.join(os.path.dirname(sys.executable), command[0]), *command[1:]], file)
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
        found.append(logprobs_of(logits[0], ids))
    return found


answer_requests(measured)
