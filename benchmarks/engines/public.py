"""A public model in the engines: SmolLM2-135M-Instruct at twice its 8,192 tokens, extended by one method for each
rope_type that a config.json may have. A cell takes minutes, so it has a record of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import engines.subjects
from at_scale.cells import Cell, Part
from engines.built import InONNX, InOpenVINO
from engines.conformance import UNEXTENDED, Conformance, InLlamaCpp, InVLLM
from engines.subjects import Subject

# The other static methods are written as one of these: abf as ntk, ntk_by_parts as yarn, the rest as longrope.
METHODS = ("yarn", "llama3", "longrope", "pi", "ntk")
# mlx-lm's CPU build takes a minute for 512 tokens; transformers' server returns no log-probabilities of prompts.
ENGINES: tuple[type[Conformance], ...] = (InVLLM, InLlamaCpp, InOpenVINO, InONNX)

# Over 30 layers and 16,384 keys, rounding adds up: with pi, transformers' own float32 is 5.1e-6 from its float64.
ROUNDING = 3.0


@dataclass
class OnPublicModel(Part):
    """A cell is one method in one engine: fast engines first, method by method, as transformers takes minutes too."""

    name = "smollm2"
    title = "SmolLM2-135M-Instruct at 16,384 tokens in the engines"

    @cached_property
    def subject(self) -> Subject:
        return Subject("bundled" if self.tiny else "smollm2")

    @cached_property
    def engines(self) -> dict[str, Conformance]:
        made = {}
        for engine in ENGINES:
            folder = engines.subjects.RUNS / "state" / self.name / engine.name  # for the workers' logs
            folder.mkdir(parents=True, exist_ok=True)
            made[engine.name] = engine(folder, self.device, self.tiny, self.rounds)
        return made

    def speed(self) -> float:
        return 1.0  # costs are seconds

    def cells(self) -> Sequence[Cell]:
        cells = [Cell(f"{name} environment", 60, engine.ready) for name, engine in self.engines.items()]
        for method in (UNEXTENDED, *METHODS[: 1 if self.tiny else None]):
            cells += [
                Cell(f"{name} {method}", 480 if name == "llama.cpp" else 240, partial(self.measured, engine, method))
                for name, engine in self.engines.items()
            ]
        return sorted(cells, key=lambda cell: cell.cost)

    def measured(self, engine: Conformance, method: str) -> dict[str, Any]:
        engine.ready()  # where a run resumes on another machine
        if method == UNEXTENDED:
            return engine.unextended(self.subject)
        return engine.compared(self.subject, method, engine.forms[0])

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        """As an engine's, of every engine; an engine's bar is `ROUNDING` times that for small models."""
        environments = {name: kept.pop(f"{name} environment", None) for name in self.engines}
        cells = {}
        for name, value in kept.items():
            engine = self.engines[name.split()[0]]
            if "refused" not in value:
                bar = engine.bar * ROUNDING
                value = {**value, "bar": bar, "exact": engine.exact(value, bar)}
            cells[name] = value
        plain = {name: cells.pop(name) for name in [*cells] if name.endswith(f" {UNEXTENDED}")}
        neither = [name for name, value in cells.items() if not (value.get("exact") or "refused" in value)]
        return {
            "environments": environments,
            "exact": sum(bool(value.get("exact")) for value in cells.values()),
            "refused by export": sum("refused" in value for value in cells.values()),
            "unextended": plain,
            "differs unextended": {name: value for name, value in plain.items() if value.get("exact") is False},
            "neither": neither,
            "mistakes": 0,
            "mistakes judged right": 0,
            "cells": cells,
        }
