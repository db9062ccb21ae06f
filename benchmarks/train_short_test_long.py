"""Train short, test long: five position encodings in one body, each read at one, two and four times its length.

    python benchmarks/train_short_test_long.py                       # some forty minutes on one core
    python benchmarks/train_short_test_long.py --only rope --seeds 1

`recipes/pretrain.py` trains a model of 0.9 million parameters for each encoding and seed, alike but for the encoding
(the same text, batches, optimiser, and initial weights of the body); one that is finished is not trained again. Then
the last half of a trained length is scored at the end of windows of *Persuasion*: the model reads the whole window,
not extended and extended by `extend_context(model, factor)` with the encoding's default method; against the same
tokens where it reads only one trained length that ends with them, which is what a user does without any extension.

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
from report import Report
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import extend_context, restore_context
from ctxext.assets import PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.haystack import Haystack
from ctxext.evals.perplexity import Perplexity
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
    """The folder of the trained model; trains it unless it stands there, finished and trained in this way."""
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
    """One trained model.

    Attributes:
        alone: by length in tokens, for each window the mean loss in nats of its last tokens, half a trained length,
            where the model reads one trained length that ends with them.
        stock: the same where it reads all of that length, not extended; or why it cannot.
        extended: the same, extended to that length (by the largest factor at the trained length); or why it cannot be.
        curves: by what was read ("stock" or "extended"), the loss of each token, mean over windows.
    """

    training: dict[str, Any]
    method: str | None = None
    alone: dict[int, Losses] = field(default_factory=dict)
    stock: dict[int, Losses | str] = field(default_factory=dict)
    extended: dict[int, Losses | str] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)


def measure(folder: Path, windows: list[tuple[int, ...]], n_bos: int, length: int) -> Measured:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    measured, tail = Measured(json.loads((folder / "training.json").read_text())), length // 2

    def read(rows: list[tuple[int, ...]]) -> Losses:
        engine = Engine(model)
        return np.stack([engine.losses(row).losses.double().numpy() for row in rows])

    def tails(losses: Losses, end: int) -> Losses:
        return losses[:, end - 1 - tail : end - 1].mean(axis=1)

    for factor in FACTORS:
        end = factor * length
        last = [(*row[:n_bos], *row[end - length + n_bos : end]) for row in windows]
        measured.alone[end] = tails(read(last), length)
        try:
            losses = read([row[:end] for row in windows])
        except IndexError as error:  # the table has no such row
            measured.stock[end] = f"{type(error).__name__}: {error}"
            continue
        measured.stock[end], measured.curves["stock"] = tails(losses, end), losses.mean(axis=0).tolist()
    for factor in FACTORS[1:]:
        end = factor * length
        try:
            extend_context(model, factor=factor)
        except (ValueError, RuntimeError) as error:
            measured.extended[end] = f"{type(error).__name__}: {error}"
            continue
        measured.method = model.context_extension.plan.method.name
        losses = read([row[:end] for row in windows])
        measured.extended[end], measured.curves["extended"] = tails(losses, end), losses.mean(axis=0).tolist()
        measured.extended[length] = tails(losses, length)
        restore_context(model)
    return measured


def cell(losses: Losses | str, alone: Losses, tail: int) -> dict[str, Any]:
    if isinstance(losses, str):
        return {"error": losses}
    tokens = [tail] * len(losses)
    against = paired_loss_difference((losses * tail).tolist(), (alone * tail).tolist(), tokens)
    return {"loss": float(losses.mean()), "against": against._asdict()}


def cells(runs: list[Measured], tail: int) -> dict[str, Any]:
    """What the runs of one encoding say: by length, the mean over them, and each on its own."""

    def of(runs: list[Measured], end: int) -> dict[str, Any]:
        alone = np.mean([run.alone[end] for run in runs], axis=0)
        found: dict[str, Any] = {"alone": float(alone.mean())}
        for way in ("stock", "extended"):
            rows = [getattr(run, way).get(end) for run in runs]
            if all(row is not None for row in rows):
                failed = next((row for row in rows if isinstance(row, str)), None)
                found[way] = cell(np.mean(rows, axis=0) if failed is None else failed, alone, tail)
        return found

    return {str(end): {**of(runs, end), "seeds": [of([run], end) for run in runs]} for end in runs[0].alone}


def binned(curves: list[list[float]], size: int) -> list[float]:
    """The mean over runs, and over `size` tokens at a time; the last of them one token short."""
    mean = np.mean(curves, axis=0)
    return [float(part.mean()) for part in np.split(mean, range(size, len(mean), size))]


def summarise(runs: list[Measured], length: int) -> dict[str, Any]:
    size = length // 8
    return {
        "method": runs[0].method,
        "parameters": runs[0].training["parameters"],
        "seconds_to_train": [run.training["seconds"] for run in runs],
        "lengths": cells(runs, length // 2),
        "curves": {
            way: {
                "mean": binned([run.curves[way] for run in runs], size),
                "seeds": [binned([run.curves[way]], size) for run in runs],
            }
            for way in ("stock", "extended")
            if all(way in run.curves for run in runs)
        },
    }


def add_figures(report: Report, position: str, found: dict[str, Any], length: int) -> None:
    report.add(f"{position}: loss at {length} (nats)", found["lengths"][str(length)]["stock"]["loss"])
    for end, at in found["lengths"].items():
        for way in ("stock", "extended"):
            if "against" in at.get(way, {}) and (way, end) != ("stock", str(length)):
                report.add(f"{position}: {way} at {end} against {length} alone (nats)", at[way]["against"]["value"])


def plot(summary: dict[str, Any], path: Path) -> None:
    """Loss by position, a line an encoding, dashed where extended; thin lines are single seeds."""
    length, size = summary["length"], summary["length"] // 8
    figure = Figure(figsize=(9.0, 4.8), layout="constrained", dpi=120)
    axes = figure.subplots()
    within = min(value for found in summary["positions"].values() for value in found["curves"]["stock"]["mean"])
    axes.set_ylim(within - 0.15, within + 1.6)
    for position, found in summary["positions"].items():
        for way, curves in found["curves"].items():
            style = {"color": COLORS[position], "linestyle": "-" if way == "stock" else (0, (4, 1.5))}
            for curve in curves["seeds"]:
                axes.plot(size * (np.arange(len(curve)) + 0.5), curve, **style, linewidth=0.5, alpha=0.5)
            label = NAMES[position] if way == "stock" else f"{NAMES[position]}, {found['method']} ×{FACTORS[-1]}"
            mean = curves["mean"]
            axes.plot(size * (np.arange(len(mean)) + 0.5), mean, **style, linewidth=2, label=label)
    axes.axvline(length, color="#555555", linewidth=1)
    axes.annotate(f"trained at {length} ", (length, 0.98), xycoords=("data", "axes fraction"), ha="right", va="top")
    axes.set_xlim(0, FACTORS[-1] * length)
    axes.set_xticks([factor * length for factor in (0, *FACTORS)])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("loss (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(frameon=False, fontsize=9, loc="outside right upper")
    figure.suptitle("Train short, test long", fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=POSITIONS, nargs="*", default=list(POSITIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence in training")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/positions", help="where the models are kept")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/positions")
    parser.add_argument("--replot", action="store_true", help="draw the figure of summary.json anew, and run nothing")
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
