"""Engines that build a model of their own from a folder: ONNX Runtime GenAI and OpenVINO."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import engines.subjects
from engines.conformance import CONFIG, InItsEnvironment
from engines.environments import ONNX, OPENVINO
from engines.subjects import FOLDER, OVERRIDES, Subject

from ctxext.export.rules import build_command


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

    def plain(self, subject: Subject) -> dict[str, Any]:
        config = json.loads((subject.base / "config.json").read_text())
        return self.built(subject, "base", subject.base, config)[0]


@dataclass
class InONNX(Builds):
    name = engine = "onnxruntime-genai"
    title = f"ONNX Runtime GenAI {ONNX.version}"
    environment = ONNX
    worker = "onnx_worker.py"


@dataclass
class InOpenVINO(Builds):
    name = engine = "openvino"
    title = f"OpenVINO {OPENVINO.version}"
    environment = OPENVINO
    worker = "openvino_worker.py"
    forms = (FOLDER,)  # an export takes a quarter of a minute, and an extended folder is exported as it is
    more = ("--weight-format", "fp32")
