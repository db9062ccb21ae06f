"""Kill a measurement at random moments, resume it, and compare its results with those of an uninterrupted run.

    python benchmarks/soak.py --kills 100

Every kill is a SIGKILL. After it, every recorded sample is still there, and none is recorded twice; at the end the
files are equal, byte for byte.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass
class Soak:
    """Kills that hit a running measurement, files finished after them that equal the reference, and their samples."""

    kills: int = 0
    finished: int = 0
    samples: int = 0


def measure(path: Path) -> None:
    """A small grid on the bundled model, in many batches."""
    import torch

    from ctxext.assets import MODEL, PERSUASION
    from ctxext.evals.haystack import Haystack
    from ctxext.evals.loading import load
    from ctxext.evals.needle import Needle, Passkey
    from ctxext.evals.perplexity import Perplexity
    from ctxext.evals.prompts import Prompter
    from ctxext.evals.runner import Grid, Runner
    from ctxext.evals.targets import LiveModel, compared_variants

    torch.set_num_threads(1)
    model, tokenizer = load(MODEL)
    prompter = Prompter(tokenizer)
    grid = Grid(
        retrieval=(Passkey(), Needle()), texts=(Perplexity(),), lengths=(128, 256), depths=(0.0, 0.5, 1.0),
        trials=4, windows=4, batch_size=1,
    )  # fmt: skip
    haystack = Haystack.from_text(PERSUASION.read_text(encoding="utf-8")[:60_000], tokenizer)
    runner = Runner(LiveModel(model, prompter, "austen-4m"), haystack, grid)
    runner.run(path, compared_variants(model.config, ["yarn", "dynamic_ntk"]))


def recorded(path: Path) -> list[str]:
    """The samples in the file and its journals, each as often as it is there."""
    names = []
    for file in [path, *path.parent.glob(f"{path.name}.part-*")]:
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        for value in map(json.loads, lines[1:]):
            names += [f"{r['variant']} {r['key']}" for r in (value if isinstance(value, list) else [value])]
    return names


def soak(kills: int, seed: int = 0) -> Soak:
    """Kill `kills` times, finishing a file now and then.

    Raises:
        AssertionError: a recorded sample was lost or recorded twice, or the results differ.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "ctxext.evals.targets", "ctxext.evals.needle"])
    rng, outcome = Random(seed), Soak()

    def start(path: Path) -> multiprocessing.Process:
        process = context.Process(target=measure, args=(path,))
        process.start()
        return process

    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.jsonl"
        start(reference).join()
        begin = time.perf_counter()
        start(reference.with_name("again.jsonl")).join()
        seconds = time.perf_counter() - begin
        expected = reference.read_bytes()
        assert reference.with_name("again.jsonl").read_bytes() == expected
        path, before = Path(folder) / "killed.jsonl", set()
        while True:
            process = start(path)
            process.join(rng.uniform(0, 0.6 * seconds) if outcome.kills < kills else None)
            if process.is_alive():
                process.kill()
                process.join()
                outcome.kills += 1
                names = recorded(path)
                assert len(names) == len(set(names)), "a sample was recorded twice"
                assert before <= set(names), "a recorded sample was lost"
                before = set(names)
                continue
            assert process.exitcode == 0, f"the run ended with {process.exitcode}"
            assert path.read_bytes() == expected, "the results differ from those of an uninterrupted run"
            outcome.finished += 1
            outcome.samples += len(recorded(path))
            path.unlink()
            before = set()
            if outcome.kills >= kills:
                return outcome


def main() -> None:
    from report import Report, options

    parser = options(__doc__, "docs/benchmarks/soak.json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcome = soak(args.kills, args.seed)
    report = Report("soak", seed=args.seed)
    report.add("runs killed while they measured", outcome.kills, at_least=args.kills)
    report.add("files finished after kills, equal to an uninterrupted run's", outcome.finished, at_least=1)
    report.add("samples compared", outcome.samples)
    report.finish(args.output)


if __name__ == "__main__":
    main()
