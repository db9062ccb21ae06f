"""Train short, test long: five position encodings in one body, each read at one, two and four times its length.

    python benchmarks/train_short_test_long.py                       # some forty minutes on one core
    python benchmarks/train_short_test_long.py --only rope --seeds 1

`recipes/pretrain.py` trains a model of 0.9 million parameters for each encoding and seed, with the same text, batches,
optimiser, and initial weights of the body; finished models are reused. Then half a trained length is scored at the end
of windows of *Persuasion*. The model reads the whole window, not extended and extended by `extend_context(model,
factor)` with the encoding's default method; both are compared with the same tokens where it reads only one trained
length that ends with them, which is what a user does without any extension.

Writes docs/positions/summary.json and the figure docs/positions/positions.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from report import Report, options
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_context, restore_context
from ctxext.assets import PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import Perplexity, sliding_losses
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.evals.statistics import paired_loss_difference

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "recipes"))
from positions import POSITIONS  # noqa: E402

FACTORS = (1, 2, 4)
COLORS = {"rope": "#0072b2", "alibi": "#d55e00", "learned": "#00875f", "sinusoidal": "#b0468a", "t5": "#b37400"}
NAMES = {"rope": "RoPE", "alibi": "ALiBi", "learned": "learned", "sinusoidal": "sinusoidal", "t5": "T5 bias"}
# RoPE's theta is to the length what LLaMA 2's 10000 is to its 4096. Few tokens a step: all but RoPE take many steps
# to learn to use positions at all.
RECIPE = (
    "--vocab-size", "1024", "--hidden-size", "128", "--rope-theta", "625", "--grow", "0", "0", "--needle-share", "0",
    "--batch-tokens", "512", "--learning-rate", "3e-3", "--warmup", "50",
)  # fmt: skip

Losses = NDArray[np.float64]


def train(position: str, seed: int, args: argparse.Namespace) -> Path:
    """The folder of the trained model; trains it unless it is there, finished and trained in this way."""
    folder = args.runs / f"{position}-{seed}"
    changes = {"position": position, "seed": seed, "length": args.length, "steps": args.steps}
    options = [option for name, value in changes.items() for option in (f"--{name}", str(value))]
    command = [*RECIPE, *options]
    record = folder / "training.json"
    if record.is_file() and json.loads(record.read_text()).get("command") == command:
        return folder
    subprocess.run([sys.executable, "recipes/pretrain.py", *command, "--output", str(folder)], cwd=ROOT, check=True)
    record.write_text(json.dumps({**json.loads(record.read_text()), "command": command}, indent=2) + "\n")
    return folder


@dataclass
class Measured:
    """One trained model: losses in nats of shape (windows, tokens - 1), by the length in tokens that was read.

    Attributes:
        alone: of the longest windows, where the model reads at most one trained length that ends with each token or
            behind it, and at least half of one: what a user does without any extension.
        stock: where it reads all that comes before; or why it cannot.
        extended: the same, extended to that length; or why it cannot be.
        method: what it was extended by.
    """

    training: dict[str, Any]
    alone: Losses
    stock: dict[int, Losses | str] = field(default_factory=dict)
    extended: dict[int, Losses | str] = field(default_factory=dict)
    method: str | None = None


def measure(folder: Path, windows: list[tuple[int, ...]], n_bos: int, length: int) -> Measured:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def read(end: int) -> Losses:
        engine = Engine(model)
        return np.stack([engine.losses(row[:end]).losses.double().numpy() for row in windows])

    engine = Engine(model)
    alone = [sliding_losses(engine, row[n_bos:], length, length // 2, row[:n_bos]).double().numpy() for row in windows]
    measured = Measured(json.loads((folder / "training.json").read_text()), np.stack(alone))
    for end in (factor * length for factor in FACTORS):
        try:
            measured.stock[end] = read(end)
        except IndexError as error:  # the table has no such row
            measured.stock[end] = f"IndexError: {error}"
    for factor in FACTORS[1:]:
        try:
            extend_context(model, factor=factor)
        except ValueError as error:  # such a model is not extended
            measured.extended[factor * length] = f"ValueError: {error}"
            continue
        measured.extended[factor * length] = read(factor * length)
        measured.method = model.context_extension.plan.method.name
        restore_context(model)
    # Within the trained length, what the largest factor costs.
    measured.extended[length] = measured.extended[FACTORS[-1] * length]
    return measured


def cell(losses: Losses | str, alone: Losses, end: int, tail: int) -> dict[str, Any]:
    """The mean loss of the last `tail` tokens of `end`, and what it is more than `alone`, paired by window."""
    if isinstance(losses, str):
        return {"error": losses}
    scored = slice(end - 1 - tail, end - 1)
    sums, sums_alone = losses[:, scored].sum(axis=1), alone[:, scored].sum(axis=1)
    against = paired_loss_difference(sums.tolist(), sums_alone.tolist(), [tail] * len(sums))
    return {"loss": float(losses[:, scored].mean()), "against": against._asdict()}


def mean_of(rows: list[Losses | str]) -> Losses | str:
    """The mean over seeds; the reason why there is none, if one could not be measured."""
    failed = next((row for row in rows if isinstance(row, str)), None)
    return np.mean(rows, axis=0) if failed is None else failed


def cells(runs: list[Measured], end: int, tail: int) -> dict[str, Any]:
    alone = np.mean([run.alone for run in runs], axis=0)
    rows = {way: mean_of([getattr(run, way)[end] for run in runs]) for way in ("stock", "extended")}
    return {way: cell(losses, alone, end, tail) for way, losses in rows.items()}


def curve(run: Measured, way: str, size: int) -> list[float] | None:
    """What `size` tokens at a time cost more than alone, as far as the model could be read; the first are one fewer."""
    read = [losses for losses in getattr(run, way).values() if not isinstance(losses, str)]
    if not read:
        return None
    longest = max(read, key=lambda losses: losses.shape[1])
    more = (longest - run.alone[:, : longest.shape[1]]).mean(axis=0)
    return [float(part.mean()) for part in np.split(more, range(size - 1, len(more), size))]


def summarise(runs: list[Measured], length: int) -> dict[str, Any]:
    tail = length // 2
    return {
        "method": runs[0].method,
        "parameters": runs[0].training["parameters"],
        "seconds_to_train": [run.training["seconds"] for run in runs],
        "lengths": {
            str(end): {**cells(runs, end, tail), "seeds": [cells([run], end, tail) for run in runs]}
            for end in runs[0].stock
        },
        "curves": {way: [curve(run, way, length // 8) for run in runs] for way in ("stock", "extended")},
    }


def add_figures(report: Report, position: str, found: dict[str, Any], length: int) -> None:
    report.add(f"{position}: loss at {length} (nats)", found["lengths"][str(length)]["stock"]["loss"])
    for end, at in found["lengths"].items():
        for way in ("stock", "extended"):
            if "against" in at.get(way, {}) and (way, end) != ("stock", str(length)):
                report.add(f"{position}: {way} at {end} against {length} alone (nats)", at[way]["against"]["value"])


def plot(summary: dict[str, Any], path: Path) -> None:
    """What each position costs more than alone: a panel an encoding, dashed where extended, thin for single seeds."""
    length, size = summary["length"], summary["length"] // 8
    figure = Figure(figsize=(11.0, 3.6), layout="constrained", dpi=120)
    panels = np.ravel(figure.subplots(1, len(summary["positions"]), sharey=True))
    for axes, (position, found) in zip(panels, summary["positions"].items()):
        for way, name, dashes in (("stock", "baseline", "-"), ("extended", found["method"], (0, (4, 1.5)))):
            curves = [curve for curve in found["curves"][way] if curve is not None]
            if not curves:
                continue
            style = {"color": "#555555" if way == "stock" else COLORS[position], "linestyle": dashes}
            middle = size * (np.arange(len(curves[0])) + 0.5)
            for curve in curves:
                axes.plot(middle, curve, **style, linewidth=0.6, alpha=0.6)
            label = f"{name} ×{FACTORS[-1]}" if way == "extended" else name
            axes.plot(middle, np.mean(curves, axis=0), **style, linewidth=2, label=label)
        ends = [end for end, at in found["lengths"].items() if "error" in at["stock"]]
        if ends:
            axes.annotate("the baseline cannot\nread beyond", (length, 0.6), xycoords=("data", "axes fraction"),
                          xytext=(4, 0), textcoords="offset points", fontsize=8, color="#555555")  # fmt: skip
        axes.axvline(length, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_title(NAMES[position], fontsize=10, color=COLORS[position])
        axes.set_xlim(0, FACTORS[-1] * length)
        axes.set_xticks([factor * length for factor in FACTORS])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=7, loc="upper left", borderaxespad=0, handlelength=1.6, handletextpad=0.5)
    panels[0].set_ylabel(f"loss minus the loss with the\nlast {length} tokens alone (nats)")
    panels[0].set_ylim(top=1.25 * panels[0].get_ylim()[1])
    figure.supxlabel("position (tokens)", fontsize=10)
    title = f"Trained at {length} tokens, read at {FACTORS[-1] * length:,}. Thin lines: single seeds"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__, ROOT / "docs/positions")
    parser.add_argument("--only", choices=POSITIONS, nargs="*", default=list(POSITIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence in training")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/positions", help="where the models are kept")
    parser.add_argument("--replot", action="store_true", help="draw the figure of summary.json again, and run nothing")
    args = parser.parse_args()
    if args.replot:
        plot(json.loads((args.output / "summary.json").read_text()), args.output / "positions.png")
        return
    report = Report("train short, test long", seed=0)
    with Progress() as progress:
        bar = progress.add_task("training", total=args.seeds * len(args.only))
        folders: dict[str, list[Path]] = {position: [] for position in args.only}
        for seed in range(args.seeds):
            for position in args.only:
                progress.update(bar, description=f"{position}, seed {seed}")
                folders[position].append(train(position, seed, args))
                progress.advance(bar)
        tokenizer = AutoTokenizer.from_pretrained(folders[args.only[0]][0])
        haystack, bos = Haystack.from_file(PERSUASION, tokenizer), Prompter(tokenizer).special
        places = [Place("perplexity", FACTORS[-1] * args.length, None, trial, 0) for trial in range(args.windows)]
        windows = [Perplexity().window(place, haystack, bos).input_ids for place in places]
        bar, found = progress.add_task("measuring", total=args.seeds * len(args.only)), {}
        for position in args.only:
            runs = []
            for folder in folders[position]:
                progress.update(bar, description=f"measuring {folder.name}")
                runs.append(measure(folder, windows, len(bos), args.length))
                progress.advance(bar)
            found[position] = summarise(runs, args.length)
    for position, summary in found.items():
        add_figures(report, position, summary, args.length)
    arguments = {"recipe": " ".join(RECIPE), "steps": args.steps, "windows": args.windows, "seeds": args.seeds}
    more = {"length": args.length, "tail": args.length // 2, "arguments": arguments, "positions": found}
    plot(more, args.output / "positions.png")
    report.finish(args.output / "summary.json", **more)


if __name__ == "__main__":
    main()
