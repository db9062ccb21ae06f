"""Part 6: where the ramp of rescale factors should begin and end, on models that differ in theta, length and training.

Each model gets a grid of corners and attention factors in YaRN's form, which config.json can express, beside the named
static methods; and a probe: within the trained length, the pairs of one octave of turns interpolated alone.
Two rules are tested, each on a model and half a novel that had no part in choosing it: the corners that are best on the
other models, and corners where the probe's loss passes thresholds that are best on the other models.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from at_scale.cells import Cell, Part
from at_scale.corner_rules import Grid, Point, by_rule, label
from at_scale.models import config_of, forward_cost, loaded, operations_a_second
from fit import DEPTHS, SEED, measure

from ctxext import temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.encodings.rope import RopeGeometry, rotations
from ctxext.evals.perplexity import beginning
from ctxext.evals.prompts import Prompter
from ctxext.evals.targets import UNEXTENDED
from ctxext.methods import ContextMethod, LongRoPE, YaRN, make_method

NAMED = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3", "abf", "resonance")
SLOW, FAST, TEMPERATURES = (0.25, 0.5, 1.0, 2.0), (1.0, 2.0, 4.0, 8.0, 32.0), (0.0, 0.05, 0.1)
FACTOR = 4
GRID: tuple[Point, ...] = tuple(point for point in product(SLOW, FAST, TEMPERATURES) if point[0] < point[1])
# Of every model; the rules compare models at these alone.
COMMON = {(0.25, 1.0), (0.5, 2.0), (0.5, 8.0), (1.0, 4.0), (1.0, 8.0), (1.0, 32.0), (2.0, 32.0)}
# On the bundled model, half of YaRN's temperature is ahead of none at every one of these corners.
COARSE = tuple(point for point in GRID if point[:2] in COMMON and point[2])


@dataclass(frozen=True)
class Subject:
    """A model, and how much is measured on it.

    Attributes:
        trained: tokens; `FACTOR` times as many are the target.
        steps: of recipes/pretrain.py, for a model that is trained first; None if the model is there already.
        options: of the same, beside theta, length and steps.
        trials: texts that hide a passkey at each depth: of the trained length, its double and the target.
        windows, short_windows: of text, of the target and the trained length.
    """

    name: str
    rope_theta: float = 1250.0
    trained: int = 512
    steps: int | None = None
    options: tuple[str, ...] = ()
    dim: int = 64
    trials: int = 8
    windows: int = 16
    short_windows: int = 24
    named: tuple[str, ...] = NAMED
    grid: tuple[Point, ...] = GRID

    @property
    def settings(self) -> str:
        """What was measured of each method."""
        return f"{self.trials} trials, depths {DEPTHS}, {self.windows} and {self.short_windows} windows"

    @property
    def folder(self) -> Path:
        return MODEL if self.steps is None else Path("runs/corners") / self.name.replace(" ", "-")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the passkeys, in tokens."""
        return tuple(self.trained * n for n in (1, 2, FACTOR))

    def ready(self) -> dict[str, Any] | None:
        """Train the model, unless it is there; its training record."""
        if self.steps is None:
            return None
        record = self.folder / "training.json"
        # The recipe saves on the way, too.
        if not record.is_file() or json.loads(record.read_text())["steps"] < self.steps:
            recipe = Path(__file__).parents[2] / "recipes/pretrain.py"
            given = {"--rope-theta": self.rope_theta, "--length": self.trained, "--steps": self.steps}
            words = [str(word) for pair in {**given, "--output": self.folder}.items() for word in pair]
            subprocess.run([sys.executable, str(recipe), *words, *self.options], check=True)
        return json.loads(record.read_text())

    def methods(self) -> dict[str, ContextMethod | None]:
        named = {name: make_method(name, float(FACTOR)) for name in self.named}
        return {UNEXTENDED: None, **named, **{label(point): self.ramp(*point) for point in self.grid}}

    def ramp(self, slow: float, fast: float, c: float) -> YaRN:
        form = {"factor": float(FACTOR), "truncate": False, "attention_factor": 1 + c * math.log(FACTOR)}
        return YaRN(beta_slow=slow, beta_fast=fast, **form)

    def probes(self) -> dict[str, ContextMethod | None]:
        """By log2 of turns, up to the fastest corner: the pairs of that octave interpolated, and no others."""
        octaves = rotations(RopeGeometry.plain(self.dim, self.rope_theta, self.trained)).log2().floor().int()
        probes: dict[str, ContextMethod | None] = {UNEXTENDED: None}
        for octave in octaves[octaves <= math.log2(FAST[-1])].unique().tolist():
            factors = torch.where(octaves == octave, float(FACTOR), 1.0)
            probes[str(octave)] = LongRoPE(factor=FACTOR, long_factor=(*factors.tolist(),), attention_factor=1.0)
        return probes


SMALL = {"trials": 2, "windows": 2, "short_windows": 2, "named": ("yarn",), "grid": GRID[:2]}
UNTRAINED = ("--hidden-size", "64", "--vocab-size", "512", "--batch-tokens", "1024")
TINY = (Subject("bundled", **SMALL), Subject("untrained", steps=2, options=UNTRAINED, dim=16, **SMALL))
SUBJECTS = (
    Subject("bundled"),
    # A tenth of the steps at the full length, where the bundled model has 45%.
    Subject("briefly at 512", steps=700, options=("--grow", "0.3", "0.9"), grid=COARSE),
    Subject("theta 20,000", rope_theta=20000.0, steps=700, grid=COARSE),
    Subject("1,024 tokens", trained=1024, steps=700, grid=COARSE),
)


@lru_cache(maxsize=1)
def opened(folder: Path) -> tuple[Any, Prompter]:
    model, tokenizer = loaded(folder, "cpu", torch.float32)
    return model, Prompter(tokenizer)


@dataclass
class Corners(Part):
    """A cell is one method on one model, or one octave of a model's probe."""

    name = "corners"
    title = "corners of the ramp, by model"
    only_on = "cpu"

    @property
    def subjects(self) -> Sequence[Subject]:
        return TINY if self.tiny else SUBJECTS

    def cells(self) -> Sequence[Cell]:
        cells = []
        for subject in self.subjects:
            cost = partial(forward_cost, config_of(tiny=True))
            target, trained = cost(subject.lengths[-1]), cost(subject.trained)
            shared = (1 + len(DEPTHS)) / 2  # passes for the prompts of one text, which begin alike
            short, settings = subject.short_windows * trained, subject.settings
            if subject.steps is not None:
                training = 3 * subject.steps * 8192 / subject.trained * trained
                cells.append(Cell(f"{subject.name}: ready", training, subject.ready))
            near, far = subject.lengths[:1], subject.lengths
            for octave, method in subject.probes().items():
                passes = short + subject.trials * shared * trained
                run = partial(measured, subject, method, near, 0)
                cells.append(Cell(f"{subject.name}: octave {octave}", passes, run, settings))
            for name, method in subject.methods().items():
                passes = subject.windows * target + subject.trials * shared * (target + 2 * trained) + short
                run = partial(measured, subject, method, far, subject.windows)
                cells.append(Cell(f"{subject.name}: {name}", passes, run, settings))
        return cells

    def speed(self) -> float:
        return operations_a_second(opened(MODEL)[0], 2048)

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        grids, training = {}, {}
        for subject in self.subjects:
            start = f"{subject.name}: "
            found = {name.removeprefix(start): value for name, value in kept.items() if name.startswith(start)}
            training[subject.name] = found.pop("ready", None)
            probe = {name.removeprefix("octave "): found.pop(name) for name in [*found] if name.startswith("octave ")}
            if len(found) == len(subject.methods()) and len(probe) == len(subject.probes()):
                grids[subject.name] = Grid(found, subject.grid, probe)
        models = {name: {"training": training[name], **grid.describe()} for name, grid in grids.items()}
        return {"models": models, "rules": by_rule(grids)}


def measured(subject: Subject, method: ContextMethod | None, lengths: Sequence[int], windows: int) -> dict[str, Any]:
    """What a cell holds: losses of passkeys of `lengths` by text and depth, and of long and short windows; and of the
    baseline, whose samples are those of every method, where in the text each begins and ends, as shares of it."""
    subject.ready()
    model, prompter = opened(subject.folder)
    text, trials = PERSUASION.read_text(encoding="utf-8"), dict.fromkeys(lengths, subject.trials)
    with nullcontext() if method is None else temporarily_extended(model, method=method):
        found = measure(model, prompter, text, trials, subject.trained, DEPTHS, windows, subject.short_windows)
    keys, places = {}, {}
    for length in lengths:
        of = [key for key in found["keys"] if key["length"] == length]
        texts = [[key for key in of if key["trial"] == trial] for trial in range(subject.trials)]
        keys[str(length)] = [[round(-key["logprob"], 6) for key in text] for text in texts]
        places[str(length)] = [place(first["start"] / found["text_tokens"], length, found) for first, *_ in texts]
    for kind, length in (("long", max(lengths)), ("short", subject.trained)):
        places[kind] = [place(beginning(SEED, trial), length, found) for trial in range(len(found[kind]))]
    rounded = {kind: [round(loss, 6) for loss in found[kind]] for kind in ("long", "short")}
    hits = {n: sum(key["hit"] for key in found["keys"] if key["length"] == int(n)) for n in keys}
    return {"keys": keys, "hits": hits, **rounded} | ({"places": places} if method is None else {})


def place(begin: float, length: int, found: dict[str, Any]) -> tuple[float, float]:
    return round(begin, 6), round(begin + length / found["text_tokens"], 6)
