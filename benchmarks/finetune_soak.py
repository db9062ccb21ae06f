"""Kill fine-tunes at random moments, in one and in two processes, and compare them with uninterrupted ones.

    python benchmarks/finetune_soak.py --kills 20

Every kill is a SIGKILL of all processes at once. After each, every checkpoint must be readable; in the end the loss
curve, the adapter and the last checkpoint must equal those of the uninterrupted run, byte for byte.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

from finetuning import STEPS, finish, killed, outcome
from report import Report, options
from rich.progress import track
from safetensors.torch import load_file

from ctxext.training.checkpoints import checkpoints


def readable(output: Path) -> int:
    """Read all checkpoints; returns their number."""
    whole = checkpoints(output / "checkpoints")
    for path in whole:
        load_file(path / "trained.safetensors")
        json.loads((path / "state.json").read_text())
    return len(whole)


def main() -> None:
    parser = options(__doc__, "docs/benchmarks/finetune_soak.json")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, report = Random(args.seed), Report("fine-tunes killed", seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            reference = Path(folder) / f"reference-{processes}"
            finish(reference, processes=processes)
            expected, equal, finished, in_training, read = outcome(reference), 0, 0, 0, 0
            output = Path(folder) / f"killed-{processes}-{finished}"
            for _ in track(range(args.kills // 2), f"{processes} processes"):
                steps = killed(output, rng, processes=processes)
                in_training += steps < STEPS
                read += readable(output)
                if steps == STEPS or rng.random() < 0.2:
                    finish(output, processes=processes)
                    equal += outcome(output) == expected
                    finished += 1
                    output = Path(folder) / f"killed-{processes}-{finished}"
            finish(output, processes=processes)
            equal += outcome(output) == expected
            finished += 1
            name = f"{processes} process{'es' * (processes > 1)}"
            report.add(f"{name}: kills", args.kills // 2, at_least=args.kills // 2)
            report.add(f"{name}: of them before the last step", in_training, at_least=args.kills // 4)
            report.add(f"{name}: checkpoints read after kills", read, at_least=1)
            report.add(f"{name}: runs finished after kills", finished, at_least=1)
            report.add(f"{name}: share equal to the uninterrupted run, byte for byte", equal / finished, at_least=1)
    report.finish(args.output)


if __name__ == "__main__":
    main()
