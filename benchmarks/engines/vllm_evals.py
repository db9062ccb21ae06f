"""The grid of benchmarks/evaluators_vllm.py. Run in vLLM's own environment, it measures it there, with ctxext on the
path, and prints a line of JSON: `python vllm_evals.py FOLDER RESULTS.jsonl LENGTHS TRIALS`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ctxext.assets import PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity, SlidingPerplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.samples import make_task
from ctxext.evals.targets import Target, Variant
from ctxext.hub.checkpoint import load_tokenizer

DEPTHS = tuple(tenth / 10 for tenth in range(11))


def measured(target: Target, path: Path, lengths: tuple[int, ...], trials: int) -> tuple[Results, float]:
    """The samples, and the seconds of the passkey grid, without loading."""
    haystack, variants = Haystack.from_file(PERSUASION, target.prompter.tokenizer), [Variant("model")]
    grid: dict[str, Any] = {"lengths": lengths, "depths": DEPTHS, "trials": trials, "windows": 2}
    passkeys = Runner(target, haystack, Grid(retrieval=(Passkey(),), **grid))
    passkeys.check(variants)
    begin = time.perf_counter()
    passkeys.run(path, variants)
    seconds = time.perf_counter() - begin
    # Small models fail needles, so that the right answer is read after a wrong one.
    more: dict[str, Any] = {
        "retrieval": (make_task("needle"),),
        "texts": (Perplexity(), SlidingPerplexity(stride=min(lengths) // 2)),
        "gate": (min(lengths),),
        "depths": (0.5,),
    }
    results = Runner(target, haystack, Grid(**{**grid, **more})).run(path, variants)
    assert results is not None
    return results, seconds


def main() -> None:
    from ctxext.evals.in_vllm import InVLLM

    folder, path, lengths, trials = sys.argv[1:]
    target = InVLLM(Path(folder), Prompter(load_tokenizer(Path(folder))), "model", dtype="float32")
    seconds = measured(target, Path(path), tuple(map(int, lengths.split(","))), int(trials))[1]
    print(json.dumps({"seconds": seconds, "live": target.about["live"], "scoring": target.facts["scoring"]}))


if __name__ == "__main__":
    main()
