"""Engines that build a model of their own from a folder: ONNX Runtime GenAI and OpenVINO."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import engines.subjects
from at_scale.cells import Cell
from engines.conformance import CONFIG, IGNORED, InItsEnvironment
from engines.environments import ONNX, OPENVINO
from engines.subjects import FOLDER, OVERRIDES, Subject

from ctxext.export.rules import build_command

LENGTH = "max_position_embeddings"


@dataclass
class Builds(InItsEnvironment):
    """Builds a model with the command that `ctxext export` prints for a folder with its config."""

    engine: ClassVar[str]
    more: ClassVar[tuple[str, ...]] = ()  # float32, where the command leaves the precision to its default
    forms = (FOLDER, CONFIG)

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """A folder with the config of the extended folder's export, or of the unextended one's."""
        export = subject.export(self.engine, method, FOLDER if form == FOLDER else OVERRIDES)
        source = subject.extended(method) if form == FOLDER else subject.base
        return self.built(subject, f"{method}, {form}", source, export.config)

    def built(
        self, subject: Subject, what: str, source: Path, config: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The request and the command for the folder `source` with `config`."""
        folder = engines.subjects.RUNS / subject.name / f"{what}, {self.name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        (folder / "config.json").write_text(json.dumps(config))
        command = build_command(self.engine, str(folder))
        output = next(word for word in command if word.startswith(f"{folder}-"))
        shutil.rmtree(output, ignore_errors=True)
        return {"command": [*command, *self.more], "output": output}, command

    def wrongly_served(self, subject: Subject, scaling: str) -> dict[str, Any]:
        config = subject.export(self.engine, scaling, FOLDER).config
        return self.built(subject, scaling, subject.extended(scaling), {**config, LENGTH: subject.target})[0]

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        config = json.loads((subject.base / "config.json").read_text())
        return self.built(subject, f"base, {tokens} tokens", subject.base, {**config, LENGTH: tokens})[0]


@dataclass
class InONNX(Builds):
    name = engine = "onnxruntime-genai"
    title = f"ONNX Runtime GenAI {ONNX.version}"
    environment = ONNX
    worker = "onnx_worker.py"

    def negatives(self) -> list[Cell]:
        """Also the extended folder as it is, whose class ignores yarn."""

        def as_saved() -> dict[str, Any]:
            folder = Subject("bundled").extended("yarn")
            config = json.loads((folder / "config.json").read_text())
            return self.built(Subject("bundled"), "yarn, as saved", folder, config)[0]

        return [*super().negatives(), self.mistake("yarn", "config.json as saved", as_saved, IGNORED)]


@dataclass
class InOpenVINO(Builds):
    name = engine = "openvino"
    title = f"OpenVINO {OPENVINO.version}"
    environment = OPENVINO
    worker = "openvino_worker.py"
    forms = (FOLDER,)  # an export takes a quarter of a minute, and an extended folder is exported as it is
    more = ("--weight-format", "fp32")
