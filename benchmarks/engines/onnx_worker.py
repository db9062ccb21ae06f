"""Runs in ONNX Runtime GenAI's own environment. Reads one JSON object a line,
`{"command": [...], "output": "...", "prompts": [[ids], ...]}`; builds the model by that command, unless it is there,
and writes a line with the log-probabilities of each prompt's tokens but the first, or `{"error": "..."}`."""

from answering import answer_requests, build, logprobs_of  # isort: split

import os
import sys

import numpy as np
import onnxruntime_genai


def measured(command, output, prompts):
    build(command[2], [sys.executable, *command[1:]], os.path.join(output, "genai_config.json"))
    model = onnxruntime_genai.Model(output)
    found = []
    for ids in prompts:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=len(ids))
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(np.array([ids[:-1]], dtype=np.int32))
        found.append(logprobs_of(np.array(generator.get_output("logits"))[0], ids))
    return found


answer_requests(measured)
