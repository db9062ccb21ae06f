"""The evaluators on a model in vLLM and on one that vLLM serves, against the same model in transformers, in float32.

    python benchmarks/evaluators_vllm.py                 # the bundled model, extended by yarn ×4
    python benchmarks/evaluators_vllm.py --model runs/SmolLM2-135M-Instruct --lengths 1024 --trials 2

vLLM runs in an environment of its own (`benchmarks/engines/environments.py`), with ctxext on its path. All three
measure the same samples; their differences have bars, and so has the time of the passkey grid on SmolLM2.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from engines.environments import VLLM
from engines.servers import running
from engines.vllm_evals import measured
from engines.wheels import beside
from finetuning import free_port
from report import Report, largest, options

from ctxext.assets import MODEL
from ctxext.evals.loading import load
from ctxext.evals.perplexity import unpacked
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Results, read_results
from ctxext.evals.server import ServedModel
from ctxext.evals.targets import LiveModel, Served, known_lengths
from ctxext.hub.checkpoint import extend_folder

HERE = Path(__file__).resolve().parent


def compared(report: Report, name: str, ours: Results, theirs: Results) -> None:
    """How far the samples of `ours` are from those of transformers."""
    pairs = list(zip(*(sorted(each.records, key=lambda record: record["key"]) for each in (ours, theirs)), strict=True))
    assert all(one["key"] == other["key"] for one, other in pairs)
    keys = [pair for pair in pairs if "score" in pair[0]]
    read = [pair for pair in pairs if "score" not in pair[0]]
    alike = [(one["hit"], one["got"]) == (other["hit"], other["got"]) for one, other in keys]
    report.add(f"{name}: same answers", sum(alike) / len(alike), at_least=1.0)
    apart = largest(abs(one["logprob"] - other["logprob"]) for one, other in keys)
    report.add(f"{name}: largest difference of an answer's log-probability (nats)", apart, at_most=1e-3)
    losses = [abs(unpacked(one, "losses") - unpacked(other, "losses")) for one, other in read]
    report.add(f"{name}: largest difference of a token's loss (nats)", largest(map(largest, losses)), at_most=1e-3)
    top = [(unpacked(one, "top1") == unpacked(other, "top1")).mean() for one, other in read if "top1" in one]
    report.add(f"{name}: same most likely token", float(sum(top) / len(top)), at_least=0.999)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--lengths", default="512,1024")
    parser.add_argument("--trials", type=int, default=4)
    args = parser.parse_args()
    size = tuple(map(int, args.lengths.split(","))), args.trials
    VLLM.ready(print)
    report = Report(f"evaluators in vLLM, {args.model.name}", seed=0)
    packages = beside("jaxtyping==0.3.11", "wadler-lindig==0.1.8")
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, packages))),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder, path = args.model, Path(temporary)
        if args.model == MODEL:
            folder = path / "yarn"
            extend_folder(MODEL, folder, 4, "yarn", say=lambda line: None)
        model, tokenizer = load(folder, "float32", "cpu")
        trained, reach = known_lengths(model.config)
        expected, seconds = measured(LiveModel(model, Prompter(tokenizer), "model"), path / "transformers.jsonl", *size)

        worker = (HERE / "engines/vllm_evals.py", folder, path / "vllm.jsonl", args.lengths, args.trials)
        command, environment = [str(each) for each in (VLLM.python, *worker)], {**os.environ, **variables}
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        told = json.loads(ran.stdout.splitlines()[-1])
        compared(report, "vLLM", read_results(path / "vllm.jsonl"), expected)
        bar = None if args.model == MODEL else 0.2
        report.add("vLLM: passkey grid, time over transformers", told.pop("seconds") / seconds, at_most=bar)

        url = f"http://127.0.0.1:{(port := free_port())}"
        serve = (
            VLLM.folder / "bin/vllm",
            "serve",
            folder,
            "--max-model-len",
            reach,
            "--dtype",
            "float32",
            "--port",
            port,
        )
        with running([*map(str, serve)], f"{url}/health", path / "server.log", **variables):
            prompter = Prompter(tokenizer)
            target = Served(ServedModel(url, style=prompter.style), prompter, trained)
            found, served = measured(target, path / "served.jsonl", *size)
        compared(report, "served by vLLM", found, expected)
        report.add("served by vLLM: passkey grid, time over transformers", served / seconds)
        report.add("transformers: passkey grid (s)", seconds)
    name = "evaluators_vllm.json" if args.model == MODEL else f"evaluators_vllm_{args.model.name}.json"
    report.finish(args.output or Path("docs/benchmarks") / name, lengths=size[0], trials=args.trials, **told)


if __name__ == "__main__":
    main()
