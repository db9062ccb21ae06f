"""What keeps short inputs in a fine-tune: mixed windows or distillation, against neither, for the same data and steps.

    python benchmarks/finetune_short_inputs.py                # 9 runs of the recipe; three hours of one core
    python benchmarks/finetune_short_inputs.py --minutes 30   # as many as fit; the same command goes on
    python benchmarks/finetune_short_inputs.py --tiny         # two steps of each on short rows, to see that it works

YaRN at 4 times the bundled model's length, trained in float32, which every CPU does well; three tenths of the tokens
are documents within its trained length. Each trained model is measured on the second half of *Persuasion*, which none
is trained on: as it is saved, extended, and, for short inputs, also with the baseline's config, that is on the original
RoPE, as a router by length serves them.

What a finished run measured is kept in docs/finetune/short_inputs/cells.json and not measured again. Writes
docs/finetune/short_inputs.json of the seeds that every arm has. Intervals are Student's t over seeds, and of
differences from the arm `plain` paired by seed.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from at_scale.cells import Budget, Cell, Part, Store, run_part
from fidelity.row import spread
from finetuning import RECIPE, ROOT, TINY
from fit import SEED, found, lost, mean, measure_saved
from report import Report, options
from transformers import AutoConfig

from ctxext.assets import MODEL

PLAIN = "plain"
ARMS = {
    PLAIN: (),
    "mixed windows": ("training.mixed_window=true",),
    "distillation": ("training.distillation=0.5",),
}
TRAINED, FACTOR = 512, 4
SECONDS = 1300.0  # of a run, on one core without bfloat16 kernels
TRIALS = {TRAINED * FACTOR: 36}  # texts for passkeys, at five depths each
FEW = ("data.length=768", "training.steps=2", "training.batch_size=2", "training.micro_batch_size=1")
# Of a trained model: passkeys found, nats of a passkey, nats a token of long text, and of short text on both RoPEs.
MEASURED = ("passkey", "key_loss", "long", "short", "short_original")


def command(arm: str, seed: int, output: Path, tiny: bool) -> list[str]:
    changes = [
        f"output={output}", f"training.seed={seed}", "training.precision=fp32", "evaluation=null", "tracker=null",
        "merge=true", *ARMS[arm],
        *(FEW if tiny else ()),
    ]  # fmt: skip
    return [sys.executable, str(RECIPE), "--config", str(TINY), *changes]


def run(arm: str, seed: int, folder: Path, tiny: bool) -> dict[str, Any]:
    """Fine-tune, and measure what was saved; the recipe resumes a run that was interrupted."""
    output = folder / f"{arm.replace(' ', '-')}-{seed}"
    subprocess.run(command(arm, seed, output, tiny), cwd=ROOT, check=True)
    return measured(output / "merged", None, tiny)


def measured(folder: Path, factor: float | None, tiny: bool) -> dict[str, Any]:
    """Figures of MEASURED for a checkpoint, extended by YaRN if there is a factor."""
    sizes = {"windows": 2, "short_windows": 2} if tiny else {}
    extension = {"factor": factor, "method": "yarn"} if factor else None
    as_saved = measure_saved(folder, {768: 1} if tiny else TRIALS, extension, **sizes)
    stock = AutoConfig.from_pretrained(MODEL)
    original = measure_saved(folder, {TRAINED: 0}, config=stock, **{**sizes, "windows": 0})
    return {
        "passkey": found(as_saved),
        "key_loss": lost(as_saved),
        "long": mean(as_saved["long"]),
        "short": mean(as_saved["short"]),
        "short_original": mean(original["short"]),
        "prompts": len(as_saved["keys"]),
        "windows": [len(as_saved["long"]), len(as_saved["short"])],
    }


@dataclass
class ShortInputs(Part):
    """The model before training, and a fine-tune for each arm and seed; `folder` is for the runs."""

    name: ClassVar[str] = "short_inputs"
    title: ClassVar[str] = "fine-tunes that keep short inputs"
    in_seconds: ClassVar[bool] = True

    seeds: int = 3

    def cells(self) -> list[Cell]:
        return [
            *(
                Cell(name, 60.0, partial(measured, MODEL, factor, self.tiny), settings=f"tiny={self.tiny}")
                for name, factor in (("baseline", None), ("untrained", FACTOR))
            ),
            *(
                Cell(
                    f"{arm}, {seed}",
                    SECONDS,
                    partial(run, arm, seed, self.folder, self.tiny),
                    settings=" ".join(command(arm, seed, Path("run"), self.tiny)[4:]),
                )
                for seed in range(self.seeds)
                for arm in ARMS
            ),
        ]

    def speed(self) -> float:
        return 1.0  # costs are in seconds

    def record(self, kept: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """By arm, what the runs measured of the seeds that every arm has."""
        seeds = [seed for seed in range(self.seeds) if all(f"{arm}, {seed}" in kept for arm in ARMS)]
        return {arm: [kept[f"{arm}, {seed}"] for seed in seeds] for arm in ARMS} if seeds else {}


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """By arm and figure, the mean over seeds, and the difference from the arm `plain`."""
    return {
        arm: {
            what: {
                **spread([each[what] for each in cells]),
                "difference": spread([one[what] - other[what] for one, other in zip(cells, runs[PLAIN], strict=True)]),
            }
            for what in MEASURED
        }
        for arm, cells in runs.items()
    }


def main() -> None:
    parser = options(__doc__, ROOT / "docs/finetune")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before the run that would take longer")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/finetune_short_inputs", help="for the runs themselves"
    )
    parser.add_argument("--tiny", action="store_true", help="two steps on short rows; set another --output")
    args = parser.parse_args()
    store = Store(args.output / "short_inputs/cells.json")
    folder = (args.runs / "tiny" if args.tiny else args.runs).resolve()
    part = ShortInputs(folder, tiny=args.tiny, seeds=args.seeds)
    run_part(part, store, Budget(60 * args.minutes), print)
    done = {name: entry["value"] for name, entry in store.done(part.cells()).items()}
    runs = part.record(done)
    if not runs:
        sys.exit("no seed has a run of every arm yet")
    arms = summarise(runs)
    report = Report("short inputs in fine-tuning", seed=SEED, rehearsal=args.tiny)
    for arm, figures in arms.items():
        for what in MEASURED:
            report.add(f"{arm}: {what}", figures[what]["value"])
    report.finish(
        args.output / "short_inputs.json",
        seeds=len(runs[PLAIN]),
        prompts=runs[PLAIN][0]["prompts"],
        windows=runs[PLAIN][0]["windows"],
        untrained={name: done[name] for name in ("baseline", "untrained")},
        arms=arms,
        cells=runs,
    )


if __name__ == "__main__":
    main()
