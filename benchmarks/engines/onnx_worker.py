"""Runs in ONNX Runtime GenAI's own environment. Reads one JSON object a line,
`{"build": [...], "output": "...", "prompts": [[ids], ...]}`; builds the model by that command, unless it is there, and
writes a line with the log-probabilities of each prompt's tokens but the first, or `{"error": "..."}`."""

import json
import os
import subprocess
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import onnxruntime_genai  # noqa: E402


def measured(build, output, prompts):
    if not os.path.isfile(os.path.join(output, "genai_config.json")):
        made = subprocess.run([sys.executable, *build[1:]], capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"{build[2]}: {made.stderr.strip().splitlines()[-1]}")
    model = onnxruntime_genai.Model(output)
    found = []
    for ids in prompts:
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=len(ids))
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(np.array([ids[:-1]], dtype=np.int32))
        logits = np.array(generator.get_output("logits"))[0].astype(np.float64)
        logprobs = logits - logits.max(-1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
        found.append(logprobs[np.arange(len(ids) - 1), ids[1:]].tolist())
    return [[value if abs(value) < float("inf") else None for value in each] for each in found]


for line in sys.stdin:
    try:
        answer = {"logprobs": measured(**json.loads(line))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(answer), file=answers, flush=True)
