"""What the workers share, in an environment of their own. Imported before the engine, which may print."""

import json
import os
import subprocess
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def answer_requests(measured):
    """Answer each line of JSON with the log-probabilities that `measured(**request)` returns, null where one is not
    finite, or with the error. It may return them as "logprobs" of a dict, which is sent whole."""
    for line in sys.stdin:
        try:
            found = measured(**json.loads(line))
            answer = found if isinstance(found, dict) else {"logprobs": found}
            answer["logprobs"] = [
                [value if abs(value) < float("inf") else None for value in each] for each in answer["logprobs"]
            ]
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), file=answers, flush=True)


def build(name, command, file):
    """Build the engine's own model by `command`, unless its `file` is there."""
    if not os.path.isfile(file):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode or not os.path.isfile(file):
            raise RuntimeError(f"{name}: {made.stderr.strip().splitlines()[-1]}")


def logprobs_of(logits, ids):
    """log p of each of `ids` but the first, from a row of logits before each."""
    import numpy as np

    found = []
    for row, following in zip(logits, ids[1:]):
        row = row.astype(np.float64)
        row -= row.max()
        found.append(float(row[following] - np.log(np.exp(row).sum())))
    return found
