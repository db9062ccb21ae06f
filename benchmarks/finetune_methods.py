"""The fine-tune recipe on the bundled model at four times its length: by YaRN, NTK-aware, PI, and YaRN with PoSE.

    python benchmarks/finetune_methods.py            # some twenty minutes on two cores
    python benchmarks/finetune_methods.py --only yarn

Each is the command that a user runs, timed from its start to its end with nothing cached. The bars are YaRN's; the
others appear beside it. Writes docs/finetune/summary.json and the curves docs/finetune/curves.png.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from report import Report, options

ROOT = Path(__file__).parents[1]
RUNS: dict[str, tuple[str, ...]] = {
    "yarn": ("tiny_yarn_4x",),
    "ntk": ("tiny_yarn_4x", "extension.method=ntk"),
    "pi": ("tiny_yarn_4x", "extension.method=pi"),
    "yarn, PoSE": ("tiny_pose_4x",),
}
# Dashes and markers of their own, and the last line the thinnest, so that equal values show every line.
STYLES: dict[str, dict[str, Any]] = {
    "yarn": {"color": "#0072b2", "linewidth": 4, "marker": "o", "markersize": 9},
    "ntk": {"color": "#00875f", "linewidth": 2, "marker": "s", "markersize": 5},
    "pi": {"color": "#d55e00", "linewidth": 2, "marker": "^", "markersize": 6},
    "yarn, PoSE": {"color": "#f2b6da", "linewidth": 1.6, "linestyle": (0, (4, 2)), "marker": "D", "markersize": 4},
}


def finetune(name: str, config: str, *changes: str) -> tuple[Path, float]:
    """Run the recipe as its users do; the folder it wrote, and the seconds of the whole command."""
    output = ROOT / "runs/finetune" / name.replace(", ", "-").lower()
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu.yaml"]
    command += ["recipes/finetune.py", "--config", f"recipes/configs/{config}.yaml", f"output={output}", *changes]
    command.append("training.precision=bf16")  # for CPUs with bfloat16 units
    print(f"\n{name}: {' '.join(command[1:])}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        begin = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "HF_DATASETS_CACHE": cache})
        return output, time.perf_counter() - begin


def read_run(output: Path, seconds: float) -> dict[str, Any]:
    figures = json.loads((output / "figures.json").read_text())
    mid_training = [json.loads(line) for line in (output / "mid_training.jsonl").read_text().splitlines()]
    kept = ("settings", "machine", "processes", "parameters_trained", "estimated", "took", "measured")
    return {"seconds": seconds, "mid_training": mid_training, **{name: figures[name] for name in kept}}


def tokens_to(run: dict[str, Any], better: float = 0.0) -> float:
    """Tokens until the last tokens of a window cost no more than the base's within its own length; inf if never."""
    bar = run["measured"]["tail"]["base_mid_training"] + better
    return next((point["tokens"] for point in run["mid_training"] if point["tail_loss"] <= bar), math.inf)


def add_figures(report: Report, name: str, run: dict[str, Any], bars: bool) -> None:
    base, trained = run["measured"]["variants"]["none"], run["measured"]["variants"]["trained"]
    short, *_, long = base["passkey"]
    base_loss = math.log(next(iter(base["perplexity"].values())))

    def add(what: str, value: float, **bar: float) -> None:
        report.add(f"{name}: {what}", value, **(bar if bars else {}))

    add("minutes of the whole command", run["seconds"] / 60, at_most=6)
    for variant in ("untrained", "trained"):
        found = run["measured"]["variants"][variant]["passkey"][long]["value"]
        add(f"passkey at {long}, {variant}", found, **({"at_least": 0.97} if variant == "trained" else {}))
    add(
        f"loss of the last {short} of {long} tokens over the base's within {short} (nats)",
        run["measured"]["tail"]["difference"]["value"],
        at_most=0.0,
    )
    add(
        "loss within the trained length over the base's (share)",
        trained["short_loss"]["value"] / base_loss,
        at_most=0.005,
    )
    add("passkey within the trained length over the base's (share)", trained["short_passkey"]["value"], at_least=-0.01)
    report.add(f"{name}: tokens until no worse than the base within its length", tokens_to(run))


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss of the last tokens, and passkey accuracy, by tokens trained; losses far above the base's have a panel."""
    first = next(iter(runs.values()))
    tail, (short, *_, long) = first["measured"]["tail"], map(int, first["measured"]["variants"]["none"]["passkey"])
    evaluation = first["settings"]["evaluation"]
    losses = [point["tail_loss"] for run in runs.values() for point in run["mid_training"]]
    base, lowest = tail["base_mid_training"], min(tail["base_mid_training"], *losses)
    top = base + 5 * (base - lowest)
    figure = Figure(figsize=(10, 4.8), layout="constrained", dpi=120)
    panels = figure.subplot_mosaic([["far", "found"], ["loss", "found"]], height_ratios=[1, 4])
    far, loss, found = panels["far"], panels["loss"], panels["found"]
    for name, run in runs.items():
        points, keys = run["mid_training"], ("tokens", "tail_loss", "passkey")
        tokens, *values = ([point[key] for point in points] for key in keys)
        for axes, measured in zip((far, loss, found), (values[0], *values)):
            axes.plot(tokens, measured, label=name, **STYLES[name])
    loss.set_ylim(lowest - 0.3 * (base - lowest), top)
    far.set_ylim(top, 1.02 * max(top, *losses))
    far.tick_params(labelbottom=False)
    loss.axhline(base, color="#555555", linewidth=1, linestyle=(0, (4, 3)))
    loss.annotate(
        f"baseline within {short:,} tokens", (0.01, base), xycoords=("axes fraction", "data"),
        xytext=(0, -4), textcoords="offset points", va="top", fontsize=8, color="#555555",
    )  # fmt: skip
    loss.set_ylabel(f"loss of the last {tail['tokens']} of {long:,} tokens (nats)")
    prompts = evaluation["depths"] * evaluation["mid_training_trials"]
    found.set_ylabel(f"passkey accuracy at {long:,} tokens, {prompts} prompts")
    found.set_ylim(-0.04, 1.05)
    found.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (far, loss, found):
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
    for axes in (loss, found):
        axes.set_xlabel("tokens trained (thousands)")
    found.legend(frameon=False, fontsize=9, loc="center right", handlelength=4)
    figure.suptitle(f"The bundled model, {short:,} tokens, fine-tuned at {long:,}", fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__, ROOT / "docs/finetune")
    parser.add_argument("--only", choices=RUNS, nargs="*", default=list(RUNS))
    parser.add_argument("--replot", action="store_true", help="draw the curves of summary.json again, and run nothing")
    args = parser.parse_args()
    if args.replot:
        plot(json.loads((args.output / "summary.json").read_text())["runs"], args.output / "curves.png")
        return
    runs = {name: read_run(*finetune(name, *RUNS[name])) for name in args.only}
    report = Report("fine-tunes of the bundled model at 4x", seed=0)
    print(flush=True)
    for name, run in runs.items():
        add_figures(report, name, run, bars=name == "yarn")
    plot(runs, args.output / "curves.png")
    report.finish(args.output / "summary.json", runs=runs)


if __name__ == "__main__":
    main()
