"""Fine-tuning with and without retrieval rows in the data, for the same tokens, steps and text.

    python benchmarks/finetune_retrieval.py                # 24 runs of the recipe; some 8 hours on two cores
    python benchmarks/finetune_retrieval.py --minutes 60   # as many as fit; the same command goes on
    python benchmarks/finetune_retrieval.py --only pi --seeds 1
    python benchmarks/finetune_retrieval.py --tiny         # two steps of each on short rows, to see that it works

PI and NTK-aware at 4 times the bundled model's length, YaRN at 8 and 16 times. With retrieval rows (`retrieval: true`),
a fifth of the rows are text of the same novels with hidden sentences and questions (`ctxext.data.retrieval`).
Passkeys are measured in a novel that is not trained on, and have another wording and other numbers than the rows.

What a finished run measured is kept in docs/finetune/retrieval/cells.json and not measured again. Writes
docs/finetune/retrieval.json and the curves docs/finetune/retrieval.png of the runs so far, whose order is one seed of
every arm after the other. Intervals are Student's t over seeds, paired by seed for differences.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from at_scale.cells import Budget, Cell, Part, Store, run_part
from fidelity.row import spread
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from report import Report, options

ROOT = Path(__file__).parents[1]
ARMS = {"pi": ("pi", 4), "ntk": ("ntk", 4), "yarn x8": ("yarn", 8), "yarn x16": ("yarn", 16)}
COLORS = {"without": "#555555", "with": "#0072b2"}
NOVELS, ONE = "../data/austen/*.txt", "../data/austen/northangerabbey.txt"
# By name, the share of each source; a row of retrieval takes the place of one of the novels.
SHARES = {
    "without": {"novels": 0.7, "short": 0.3},
    "with": {"novels": 0.5, "retrieval": 0.2, "short": 0.3},
}
OF_SOURCE: dict[str, dict[str, Any]] = {"novels": {}, "short": {"max_document": 512}, "retrieval": {"retrieval": True}}
TRAINED, TOKENS, STEPS = 512, 8192, 200  # the model's length; tokens of a step; steps
# Of a run, by factor, on two idle cores: guesses from single steps, until the first run is measured.
SECONDS = {4: 540.0, 8: 1200.0, 16: 2400.0}
TINY = (
    "extension.factor=2", "data.length=384", f"evaluation.lengths=[{TRAINED}]", "training.steps=2",
    "training.batch_size=2", "training.micro_batch_size=1", "evaluation.every=1",
    "evaluation.depths=2", "evaluation.trials=1", "evaluation.windows=2", "evaluation.mid_training_trials=1",
    "evaluation.mid_training_windows=1",
)  # fmt: skip


def command(arm: str, data: str, seed: int, output: Path, tiny: bool) -> list[str]:
    method, factor = ARMS[arm]
    target = TRAINED * factor
    batch, path = TOKENS // target, ONE if tiny else NOVELS
    sources = [{"path": path, "name": name, "weight": share, **OF_SOURCE[name]} for name, share in SHARES[data].items()]
    changes = [
        f"output={output}", f"extension.method={method}", f"extension.factor={factor}", f"training.seed={seed}",
        f"data.sources={json.dumps(sources)}", f"training.batch_size={batch}",
        f"training.micro_batch_size={batch}", f"training.steps={STEPS}", f"evaluation.lengths=[{TRAINED}, {target}]",
        "training.precision=fp32", "evaluation.trials=10", "tracker=null", *(TINY if tiny else ()),
    ]  # fmt: skip
    return [sys.executable, "recipes/finetune.py", "--config", "recipes/configs/tiny_yarn_4x.yaml", *changes]


def run(arm: str, data: str, seed: int, folder: Path, tiny: bool) -> dict[str, Any]:
    """What one fine-tune measured; the recipe resumes it if it was interrupted."""
    output = folder / f"{arm.replace(' ', '-')}-{data}-{seed}"
    subprocess.run(command(arm, data, seed, output, tiny), cwd=ROOT, check=True)
    figures = json.loads((output / "figures.json").read_text())
    mid_training = [json.loads(line) for line in (output / "mid_training.jsonl").read_text().splitlines()]
    measured, name = figures["measured"], next(reversed(figures["measured"]["variants"]["trained"]["passkey"]))
    trained, untrained = (measured["variants"][variant] for variant in ("trained", "untrained"))
    return {
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
        return [
            Cell(
                f"{arm}, {data}, {seed}",
                SECONDS[ARMS[arm][1]],
                partial(run, arm, data, seed, self.folder, self.tiny),
                settings=" ".join(command(arm, data, seed, Path("run"), self.tiny)[1:]),
            )
            for seed in range(self.seeds)
            for arm in self.arms
            for data in SHARES
        ]

    def speed(self) -> float:
        return 1.0  # costs are in seconds

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        """By arm and data, what the runs measured whose seed is there with both data."""
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for arm in ARMS:
            names = [[f"{arm}, {data}, {seed}" for data in SHARES] for seed in range(self.seeds)]
            pairs = [pair for pair in names if all(name in kept for name in pair)]
            if pairs:
                found[arm] = {data: [kept[pair[k]] for pair in pairs] for k, data in enumerate(SHARES)}
        return found


MEASURED = ("passkey", "tail", "regression")


def summarise(cells: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds with and without retrieval rows, and the differences, paired by seed."""
    found: dict[str, Any] = {}
    for what in MEASURED:
        seeds = {data: [cell[what] for cell in runs] for data, runs in cells.items()}
        gained = [a - b for a, b in zip(seeds["with"], seeds["without"], strict=True)]
        found[what] = {**{data: spread(values) for data, values in seeds.items()}, "difference": spread(gained)}
    first = cells["with"][0]
    untrained = spread([cell["passkey_untrained"] for cell in cells["with"]])
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
                axes.plot(tokens, mean, color=COLORS[data], linewidth=2, label=f"{data} retrieval rows")
        method, factor = ARMS[arm]
        found.set_title(f"{method} ×{factor}, {TRAINED * factor:,} tokens", fontsize=10)
        found.set_ylim(-0.04, 1.05)
        found.yaxis.set_major_formatter(PercentFormatter(1))
        for axes in (found, loss):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    panels[0, 0].set_ylabel("passkey accuracy")
    panels[1, 0].set_ylabel(f"loss of the last {TRAINED} tokens (nats)")
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
        sys.exit("no arm has a run with and one without retrieval rows yet")
    arms = {arm: summarise(runs) for arm, runs in cells.items()}
    report = Report("retrieval rows in fine-tuning", seed=0, rehearsal=args.tiny)
    for arm, found in arms.items():
        for what in MEASURED:
            report.add(f"{arm}: {what}, with retrieval rows over without", found[what]["difference"]["value"])
    plot(arms, cells, args.output / "retrieval.png")
    report.finish(
        args.output / "retrieval.json",
        seeds=min(len(runs["with"]) for runs in cells.values()),
        shares=SHARES,
        arms=arms,
        cells=cells,
        seconds=sum(entry["seconds"] for entry in done.values()),
    )


if __name__ == "__main__":
    main()
