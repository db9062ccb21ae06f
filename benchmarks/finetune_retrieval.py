"""Fine-tuning with and without retrieval rows in the data, for the same tokens, steps and text.

    python benchmarks/finetune_retrieval.py                # 27 runs of the recipe; some 11 hours on one core
    python benchmarks/finetune_retrieval.py --minutes 60   # as many as fit; the same command goes on
    for k in 1 2; do OMP_NUM_THREADS=1 python benchmarks/finetune_retrieval.py & done    # shared by two processes
    python benchmarks/finetune_retrieval.py --only pi --seeds 1
    python benchmarks/finetune_retrieval.py --tiny         # two steps of each on short rows, to see that it works

PI and NTK-aware at 4 times the bundled model's length, a larger base (ABF) at 8 times: methods that lose passkeys there
without training, which YaRN hardly does. The steps are those of recipes/configs/tiny_yarn_4x.yaml. With retrieval rows,
a fifth of the rows are text of the same novels with hidden sentences and questions (`ctxext.data.retrieval`), one
sentence a row or eight.
Passkeys are measured in a novel that is not trained on, and have another wording and other numbers than the rows:
whether they are found, and the loss of the number (summed over its digits), which still moves where none is found.

What a finished run measured is kept in docs/finetune/retrieval/cells.json and not measured again. Writes
docs/finetune/retrieval.json and the curves docs/finetune/retrieval.png of the runs so far, whose order is one seed of
all arms after the other. Intervals are Student's t over seeds, paired by seed for differences.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from at_scale.cells import Budget, Cell, Part, Store, run_part
from fidelity.row import spread
from fit import lost, measure_saved
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from report import Report, options

from ctxext.assets import MODEL
from ctxext.evals.results import forget_variant
from ctxext.evals.training import TRAINED as FINE_TUNED
from ctxext.training.stages import FIGURES

ROOT = Path(__file__).parents[1]
ARMS = {"pi": ("pi", 4), "ntk": ("ntk", 4), "abf x8": ("abf", 8)}
NONE, ONE, EIGHT = "no retrieval rows", "one sentence a row", "eight sentences a row"
DATA = {NONE: 0, ONE: 1, EIGHT: 8}  # sentences a row
COLORS = {NONE: "#aaaaaa", ONE: "#0072b2", EIGHT: "#d55e00"}
WIDTHS = {NONE: 4, ONE: 2, EIGHT: 2}  # so that equal values show both lines
NOVELS, NOVEL = "../data/austen/*.txt", "../data/austen/northangerabbey.txt"
SHARE = 0.2  # of the tokens in retrieval rows, each in the place of one of the novels
TRAINED, TOKENS, STEPS = 512, 8192, 100  # the model's length; tokens of a step; steps
TEXTS = 8  # for the loss of passkeys, at five depths each
SECONDS = {4: 1200.0, 8: 2000.0}  # of a run, by factor, on one core without AVX-512: guesses from single steps
TINY = (
    "extension.factor=2", "data.length=384", f"evaluation.lengths=[{TRAINED}]", "training.steps=2",
    "training.batch_size=2", "training.micro_batch_size=1", "evaluation.every=1",
    "evaluation.depths=2", "evaluation.trials=1", "evaluation.windows=2", "evaluation.mid_training_trials=1",
    "evaluation.mid_training_windows=1",
)  # fmt: skip


def folder_name(arm: str, sentences: str, seed: int) -> str:
    """The name of a run's folder."""
    return f"{arm}-{sentences}-{seed}".replace(" ", "-")


def command(arm: str, data: str, seed: int, output: Path, tiny: bool) -> list[str]:
    method, factor = ARMS[arm]
    target = TRAINED * factor
    batch, path, share = TOKENS // target, NOVEL if tiny else NOVELS, SHARE if DATA[data] else 0.0
    sources = [
        {"path": path, "name": "novels", "weight": 0.7 - share},
        {"path": path, "name": "short", "weight": 0.3, "max_document": TRAINED},
    ]
    if share:
        sources.append({"path": path, "name": "retrieval", "weight": share, "retrieval": DATA[data]})
    changes = [
        f"output={output}", f"extension.method={method}", f"extension.factor={factor}", f"training.seed={seed}",
        f"data.sources={json.dumps(sources)}", f"training.batch_size={batch}",
        f"training.micro_batch_size={batch}", f"training.steps={STEPS}", f"evaluation.lengths=[{TRAINED}, {target}]",
        "training.precision=fp32", "evaluation.trials=10", "tracker=null", "merge=true", *(TINY if tiny else ()),
    ]  # fmt: skip
    return [sys.executable, "recipes/finetune.py", "--config", "recipes/configs/tiny_yarn_4x.yaml", *changes]


@cache
def key_loss(folder: Path, target: int, texts: int, **extension: Any) -> float:
    """The mean loss of a passkey at the target length in nats; `extension` extends the checkpoint first."""
    return lost(measure_saved(folder, {target: texts}, extension, windows=0, short_windows=0))


def run(arm: str, data: str, seed: int, output: Path, tiny: bool) -> dict[str, Any]:
    """What one fine-tune measured; the recipe resumes it if it was interrupted.

    What is measured before training does not depend on the data, and is taken from a finished run.
    """
    finished = [
        path.parent / "results.jsonl" for path in output.parent.glob(f"{folder_name(arm, '*', seed)}/{FIGURES}")
    ]
    if finished and not (output / "base").exists():
        output.mkdir(parents=True, exist_ok=True)
        shutil.copy(finished[0], output)
        forget_variant(output / "results.jsonl", FINE_TUNED, ("weights", "method"))
    subprocess.run(command(arm, data, seed, output, tiny), cwd=ROOT, check=True)
    figures = json.loads((output / FIGURES).read_text())
    mid_training = [json.loads(line) for line in (output / "mid_training.jsonl").read_text().splitlines()]
    measured, name = figures["measured"], next(reversed(figures["measured"]["variants"]["trained"]["passkey"]))
    trained, untrained = (measured["variants"][variant] for variant in ("trained", "untrained"))
    method, factor = ARMS[arm]
    at = (768, 1) if tiny else (TRAINED * factor, TEXTS)
    return {
        "key_loss": key_loss(output / "merged", *at),
        "key_loss_untrained": key_loss(MODEL, *at, factor=factor, method=method),
        "passkey": trained["passkey"][name]["value"],
        "passkey_untrained": untrained["passkey"][name]["value"],
        "tail": measured["tail"]["difference"]["value"],
        "regression": trained["short_loss"]["value"],
        "tokens": mid_training[-1]["tokens"],
        "prompts": trained["passkey"][name]["n"],
        "mid_training": mid_training,
        "machine": figures["machine"],
    }


@dataclass
class Retrieval(Part):
    """A fine-tune for each arm, data and seed; `folder` is for the runs.

    Attributes:
        arms, seeds: those to run.
    """

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "fine-tunes with and without retrieval rows"
    in_seconds: ClassVar[bool] = True

    arms: Sequence[str] = tuple(ARMS)
    seeds: int = 3

    def cells(self) -> list[Cell]:
        # Two processes take different arms, so that what one measures before training is there for the next of its arm.
        return [self._cell(*each) for each in product(range(self.seeds), DATA, self.arms)]

    def _cell(self, seed: int, data: str, arm: str) -> Cell:
        name = folder_name(arm, str(DATA[data]), seed)
        return Cell(
            f"{arm}, {data}, {seed}",
            SECONDS[ARMS[arm][1]],
            partial(run, arm, data, seed, self.folder / name, self.tiny),
            settings=" ".join(command(arm, data, seed, Path("run"), self.tiny)[1:]),
            file=name,
        )

    def speed(self) -> float:
        return 1.0  # costs are in seconds

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        """By arm and data, what the runs measured whose seed is there with all data."""
        found: dict[str, dict[str, list[Any]]] = {}
        for arm in ARMS:
            runs = [{data: kept.get(f"{arm}, {data}, {seed}") for data in DATA} for seed in range(self.seeds)]
            if whole := [seed for seed in runs if all(seed.values())]:
                found[arm] = {data: [seed[data] for seed in whole] for data in DATA}
        return found


MEASURED = ("passkey", "key_loss", "tail", "regression")


def summarise(cells: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, and the differences to fine-tuning without retrieval rows, paired by seed."""
    found: dict[str, Any] = {}
    for what in MEASURED:
        seeds = {data: [cell[what] for cell in runs] for data, runs in cells.items()}
        found[what] = {data: {**spread(values), "difference": None} for data, values in seeds.items()}
        for data in (ONE, EIGHT):
            gained = [a - b for a, b in zip(seeds[data], seeds[NONE], strict=True)]
            found[what][data]["difference"] = spread(gained)
    first = cells[NONE][0]
    untrained = {what: spread([cell[f"{what}_untrained"] for cell in cells[NONE]]) for what in ("passkey", "key_loss")}
    return {**found, "untrained": untrained, "tokens": first["tokens"], "prompts": first["prompts"]}


def plot(arms: dict[str, Any], cells: dict[str, Any], path: Path) -> None:
    """Passkey accuracy and loss of the last tokens by tokens trained: a column an arm, a thin line a seed."""
    figure = Figure(figsize=(2.6 * len(arms) + 1, 5), layout="constrained", dpi=120)
    panels = figure.subplots(2, len(arms), sharex="col", sharey="row", squeeze=False)
    for (found, loss), arm in zip(panels.T, arms):
        for data, runs in cells[arm].items():
            for axes, what in ((found, "passkey"), (loss, "tail_loss")):
                curves = [[point[what] for point in each["mid_training"]] for each in runs]
                tokens = [point["tokens"] / 1e3 for point in runs[0]["mid_training"]]
                for curve in curves:
                    axes.plot(tokens, curve, color=COLORS[data], linewidth=0.6, alpha=0.6)
                mean = [sum(values) / len(values) for values in zip(*curves)]
                axes.plot(tokens, mean, color=COLORS[data], linewidth=WIDTHS[data], label=data)
        method, factor = ARMS[arm]
        found.set_title(f"{method} ×{factor}, {TRAINED * factor:,} tokens", fontsize=10)
        found.set_ylim(-0.04, 1.05)
        found.yaxis.set_major_formatter(PercentFormatter(1))
        for axes in (found, loss):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    panels[0, 0].set_ylabel("passkey accuracy")
    panels[1, 0].set_ylabel(f"loss of last {TRAINED} (nats)")
    panels[0, 0].legend(frameon=False, fontsize=8)
    figure.supxlabel("tokens trained (thousands)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__, ROOT / "docs/finetune")
    parser.add_argument("--only", choices=ARMS, nargs="*", default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop before the run that would take longer")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/finetune_retrieval", help="for the runs themselves")
    parser.add_argument("--tiny", action="store_true", help="two steps on short rows; set another --output")
    args = parser.parse_args()
    store = Store(args.output / "retrieval/cells.json")
    folder = (args.runs / "tiny" if args.tiny else args.runs).resolve()
    part = Retrieval(folder, tiny=args.tiny, arms=args.only, seeds=args.seeds)
    run_part(part, store, Budget(60 * args.minutes), print)
    every = Retrieval(folder, tiny=args.tiny, seeds=args.seeds)
    done = store.done(every.cells())
    cells = every.record({name: entry["value"] for name, entry in done.items()})
    if not cells:
        sys.exit("no arm has a run with each kind of data yet")
    arms = {arm: summarise(runs) for arm, runs in cells.items()}
    report = Report("retrieval rows in fine-tuning", seed=0, rehearsal=args.tiny)
    for arm, found in arms.items():
        for what, data in product(MEASURED, (ONE, EIGHT)):
            report.add(f"{arm}: {what}, {data} over none", found[what][data]["difference"]["value"])
    plot(arms, cells, args.output / "retrieval.png")
    report.finish(
        args.output / "retrieval.json",
        seeds=min(len(runs[NONE]) for runs in cells.values()),
        share=SHARE,
        arms=arms,
        cells=cells,
        seconds=sum(entry["seconds"] for entry in done.values()),
    )


if __name__ == "__main__":
    main()
