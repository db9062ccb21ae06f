"""One engine against transformers: every method, served as `ctxext export` says, and what must not pass for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import torch
from at_scale.cells import Cell, Part
from engines.environments import MLX, VLLM, Environment, llama_cpp_source
from engines.subjects import FAMILIES, FOLDER, MISTAKES, OVERRIDES, RUNS, TARGET, Subject
from engines.wheels import beside

from ctxext.export.commands import parse_command
from ctxext.export.gguf import extend_gguf, why_not_written, write_gguf
from ctxext.export.llama_cpp import GGUFModel
from ctxext.export.lora import with_adapter
from ctxext.export.probe import FAR_TOKENS, MAX_TOKENS, NONE, SHORT, WORDS, Probe, judge, judge_far
from ctxext.export.rules import NotExportable
from ctxext.hub.checkpoint import read_config
from ctxext.models.text_config import text_section_of

# Mean |Δ log-probability| of an engine that computes the same in float32, in nats per token.
EXACT = 1e-5
APPLIED, IGNORED, COLD = WORDS["extended"], WORDS["unextended"], WORDS["without_temperature"]
HERE = Path(__file__).parent
CONFIG = "unextended folder, config.json replaced"
UNEXTENDED = "unextended"
NO_PROBE, DOWN = "no probe", "does not start"
GGUF = "extended GGUF file"
FLOAT32 = ("--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init")
LAST = 64  # tokens


class EngineError(RuntimeError):
    """The engine did not start, or rejected a prompt."""


def said_of(probe: Probe, short: torch.Tensor, text: torch.Tensor, target: int) -> str:
    """The verdict of `ctxext verify`, from an engine's log-probabilities of a probe's short and long text."""
    try:
        verdict = judge(probe, short)
        return (judge_far(probe, verdict, target, text[-FAR_TOKENS:]) if verdict.is_live else verdict).name
    except ValueError as error:
        return f"error: {error}"


@dataclass
class Conformance(Part, ABC):
    """A cell is one method on one model, served in one form."""

    forms: ClassVar[tuple[str, ...]] = (FOLDER, OVERRIDES)
    bar: ClassVar[float] = EXACT

    @property
    def subjects(self) -> Sequence[Subject]:
        return [Subject(name) for name in (("bundled",) if self.tiny else ("bundled", *FAMILIES))]

    def speed(self) -> float:
        return 1.0  # costs are seconds

    def cells(self) -> Sequence[Cell]:
        return [
            Cell("environment", 60, self.ready),
            *(cell for subject in self.subjects for cell in self.comparisons(subject)),
            *self.negatives(),
        ]

    def comparisons(self, subject: Subject) -> list[Cell]:
        methods = ("yarn", "llama3") if self.tiny else subject.methods
        return [
            Cell(f"{subject.name} {UNEXTENDED}", 8, partial(self.unextended, subject)),
            *(
                Cell(f"{subject.name} {method} {form}", 8, partial(self.compared, subject, method, form))
                for method in methods
                for form in self.forms
            ),
        ]

    def negatives(self) -> list[Cell]:
        """Mistakes, on the bundled model: another factor, another attention factor, no extension."""
        subject, cells = Subject("bundled"), []
        for method, mistakes in MISTAKES.items():
            cells.append(self.mistake(method, UNEXTENDED, partial(self.plain, subject, TARGET), IGNORED))
            for wrong in mistakes:
                expected = (COLD,) if wrong == "temperature removed" else (NONE, SHORT)
                cells.append(
                    self.mistake(method, wrong, partial(self.wrongly_served, subject, f"{method}, {wrong}"), *expected)
                )
        return cells

    def mistake(self, method: str, wrong: str, request: Callable[[], dict[str, Any]], *expected: str) -> Cell:
        texts = f", {self.rounds} texts" if self.rounds > 1 else ""
        run = partial(self.mistaken, method, request, expected)
        return Cell(f"mistake: {method}, {wrong}{texts}", 8 * self.rounds, run)

    @abstractmethod
    def ready(self) -> dict[str, Any]:
        """The engine and its version; its environment is created if necessary."""

    @abstractmethod
    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What `ask` is given, and the command line that stands for it. Raises NotExportable."""

    def wrongly_served(self, subject: Subject, scaling: str) -> dict[str, Any]:
        """What `ask` is given for one of `MISTAKES`."""
        return self.served(subject, scaling, self.forms[0])[0]

    @abstractmethod
    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        """What `ask` is given for the unextended model and prompts of up to `tokens`. Raises NotExportable."""

    @abstractmethod
    def ask(self, request: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The log-probabilities of each prompt's tokens but the first, or of its last ones.

        Raises:
            EngineError: the engine's own error, or its process died.
        """

    # ---------------------------------------------------------------------------------- measuring

    def judged(self, subject: Subject, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """What `ctxext verify` says of the engine, and how far it is from transformers up to the target."""
        try:
            probe = subject.probe(method)
        except ValueError as error:
            probe, said = None, f"{NO_PROBE}: {error}"
        text, *short = self.ask(request, [subject.text(), *([probe.input_ids] if probe else [])])
        expected = torch.tensor(subject.reference(method), dtype=torch.float64)
        apart = (text - expected[-len(text) :]).abs()
        effect = (torch.tensor(subject.reference(None), dtype=torch.float64) - expected).abs()[-len(text) :]
        if probe is not None:
            assert probe.far_ids(subject.target) == subject.text()
            said = said_of(probe, *short, text, subject.target)
        return {
            "verdict": said,
            "mean": None if apart.isnan().any() else float(apart.mean()),
            "max": None if apart.isnan().any() else float(apart.max()),
            "not finite": int(apart.isnan().sum()),
            "effect": float(effect.mean()),
            "positions": len(apart),
        }

    def compared(self, subject: Subject, method: str, form: str) -> dict[str, Any]:
        try:
            request, command = self.served(subject, method, form)
        except NotExportable as error:
            return {"refused": str(error)}
        try:
            found = self.judged(subject, method, request)
        except EngineError as error:
            return {"error": str(error), "command": list(command)}
        return {**found, "command": list(command)}

    def exact(self, cell: dict[str, Any], bar: float | None = None) -> bool:
        """Whether the engine computes the same, to within `bar`, and `ctxext verify` says so where it was asked."""
        applied = cell.get("verdict", APPLIED).partition(":")[0] in (APPLIED, NO_PROBE)
        return applied and cell.get("mean") is not None and cell["mean"] < (bar or self.bar)

    def unextended(self, subject: Subject) -> dict[str, Any]:
        """How far the engine is from transformers without any extension, within the trained length."""
        text = subject.text()[: subject.trained - 1]
        expected = torch.tensor(subject.reference(None)[: subject.trained - 2], dtype=torch.float64)
        try:
            (found,) = self.ask(self.plain(subject, subject.trained), [text])
        except NotExportable as error:
            return {"refused": str(error)}
        except EngineError as error:
            return {"error": str(error)}
        mean = float((found - expected[-len(found) :]).abs().mean())
        return {"mean": mean, "positions": len(found)}

    def mistaken(self, method: str, made: Callable[[], dict[str, Any]], expected: tuple[str, ...]) -> dict[str, Any]:
        try:
            request = made()
            found = self.judged(Subject("bundled"), method, request)
            verdicts = Counter([found["verdict"], *self.repeated(Subject("bundled"), method, request)])
        except EngineError as error:
            found, verdicts = {"verdict": DOWN, "error": str(error)}, Counter([DOWN])
        right = sum(verdicts[name] for name in expected)
        return {"right": right == verdicts.total(), "judged right": right, "verdicts": dict(verdicts),
                "expected": list(expected), **found}  # fmt: skip

    def repeated(self, subject: Subject, method: str, request: dict[str, Any]) -> list[str]:
        """The verdicts of `rounds` - 1 probes of other texts."""
        probes = [probe for k in range(1, self.rounds) if (probe := subject.probe_of_novel(method, k))]
        if not probes:
            return []
        found = self.ask(request, [ids for probe in probes for ids in (probe.input_ids, probe.far_ids(subject.target))])
        return [said_of(probe, *pair, subject.target) for probe, pair in zip(probes, zip(found[::2], found[1::2]))]

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        cells = {
            name: value if {"right", "refused"} & value.keys() else {**value, "exact": self.exact(value)}
            for name, value in kept.items()
            if name != "environment"
        }
        models = [name for name in cells if name.endswith(f" {UNEXTENDED}") and "right" not in cells[name]]
        plain = {name.removesuffix(f" {UNEXTENDED}"): cells.pop(name) for name in models}
        differs = {name: value for name, value in plain.items() if value.get("exact") is False}
        mistakes = [value for value in cells.values() if "right" in value]
        judged = [sum(value.get("verdicts", {"": 1}).values()) for value in mistakes]
        wrong = [name for name, value in cells.items()
                 if not (value.get("exact") or "refused" in value or "right" in value)]  # fmt: skip
        return {
            "environment": kept.get("environment"),
            "bar": self.bar,
            "exact": sum(bool(value.get("exact")) for value in cells.values()),
            "refused by export": sum("refused" in value for value in cells.values()),
            "differs unextended": differs,
            "of these not exact": [name for name in wrong if name.split()[0] in differs],
            "neither": [name for name in wrong if name.split()[0] not in differs],
            "mistakes": sum(judged),
            "mistakes judged right": sum(value.get("judged right", int(value["right"])) for value in mistakes),
            "cells": cells,
        }


@dataclass
class InItsEnvironment(Conformance):
    """An engine in an environment of its own, asked through a worker: a script that runs there."""

    environment: ClassVar[Environment]
    worker: ClassVar[str]

    def ready(self) -> dict[str, Any]:
        return self.environment.ready(print)

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        log = (self.folder / "worker.log").open("a")
        command = [str(self.environment.python), str(HERE / self.worker)]
        variables = {**os.environ, **self.variables()}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=variables
        )

    def variables(self) -> dict[str, str]:
        """Environment variables of the worker."""
        return {}

    def ask(self, request: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [
            torch.tensor([float("nan") if value is None else value for value in each], dtype=torch.float64)
            for each in self.answer(request, prompts)["logprobs"]
        ]

    def answer(self, request: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The worker's answer. Raises EngineError."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps({**request, "prompts": [list(ids) for ids in prompts]}), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            del self.__dict__["_process"]
            raise EngineError(f"the process ended with {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer


@dataclass
class InVLLM(InItsEnvironment):
    name = "vllm"
    title = f"vLLM {VLLM.version} (CPU build)"
    environment = VLLM
    worker = "vllm_worker.py"

    def variables(self) -> dict[str, str]:
        """Where torchvision is, without whose Python code models with images do not start."""
        return {"PYTHONPATH": str(beside("torchvision==0.28.0"))}

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        command = subject.export("vllm", method, form).flags
        return {"arguments": [*command[2:], *self.more(subject)]}, command

    def more(self, subject: Subject) -> tuple[str, ...]:
        return (*FLOAT32, "--language-model-only") if subject.name == "gemma3" else FLOAT32

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        return {"arguments": [str(subject.base), "--max-model-len", str(tokens), *self.more(subject)]}

    def cells(self) -> Sequence[Cell]:
        return [*super().cells(), Cell("bundled yarn with an adapter", 10, self.with_adapter)]

    def with_adapter(self) -> dict[str, Any]:
        """An adapter beside its extended base, against PEFT."""
        subject = Subject("bundled")
        folder, expected = subject.adapter("yarn")
        command = with_adapter(subject.export("vllm", "yarn", FOLDER), folder).flags
        try:
            (found,) = self.ask({"arguments": [*command[2:], *FLOAT32]}, [subject.text()])
        except EngineError as error:
            return {"error": str(error), "command": list(command)}
        apart, effect = ((found - each).abs() for each in (expected, torch.tensor(subject.reference("yarn"))))
        return {"mean": float(apart.mean()), "max": float(apart.max()), "effect": float(effect.mean()),
                "positions": len(apart), "command": list(command)}  # fmt: skip

    def negatives(self) -> list[Cell]:
        base = str(Subject("bundled").base)
        cells = []

        def add(name: str, method: str, overrides: dict[str, Any], *expected: str, **more: Any) -> None:
            arguments = [base, "--max-model-len", str(TARGET), "--hf-overrides", json.dumps(overrides), *FLOAT32]
            cells.append(self.mistake(method, name, lambda: {"arguments": arguments, **more}, *expected))

        for method in ("yarn", "resonance", "llama3"):
            right = Subject("bundled").export("vllm", method, OVERRIDES).config
            scaled, long = right["rope_parameters"], {"max_position_embeddings": TARGET}
            stale = {"rope_scaling": None} if "rope_scaling" in right else {}
            add("unextended", method, long, IGNORED)
            add("without theta", method, {
                **long, **stale, "rope_parameters": {k: v for k, v in scaled.items() if k != "rope_theta"}
            }, NONE, IGNORED)  # fmt: skip
            add("nested in text_config", method, {**long, "text_config": {"rope_parameters": scaled}}, DOWN)
            if method != "llama3":
                cold = {name: 1.0 for name in ("attention_factor", "attn_factor", "short_mscale", "long_mscale")
                        if name in scaled or name == "attention_factor"}  # fmt: skip
                add("temperature removed", method, {**long, "rope_parameters": {**scaled, **cold}}, COLD)
            if method != "resonance":
                for wrong in (2.0, 8.0):
                    add(
                        f"factor {wrong:g}",
                        method,
                        {**long, "rope_parameters": {**scaled, "factor": wrong}},
                        NONE,
                        SHORT,
                    )
            if method == "llama3":
                short = {"rope_parameters": scaled, "max_position_embeddings": TARGET // 2}
                add("a table of half the target", method, short, SHORT,
                    environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})  # fmt: skip
        return cells


@dataclass
class InMLX(InItsEnvironment):
    name = "mlx-lm"
    title = f"mlx-lm {MLX.version}"
    environment = MLX
    bar = 3e-5  # its CPU kernels round otherwise
    worker = "mlx_worker.py"
    forms = (CONFIG,)

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        export, folder = subject.export("mlx", method, OVERRIDES), RUNS / subject.name / f"{method}, mlx"
        if not folder.is_dir():
            shutil.copytree(subject.base, folder)
            (folder / "config.json").write_text(json.dumps(export.config))
        return {"folder": str(folder)}, ("mlx_lm.server", "--model", str(folder))

    def negatives(self) -> list[Cell]:
        """Also a config as transformers 5 alone writes it: mlx-lm reads no `rope_parameters`."""

        def as_saved() -> dict[str, Any]:
            folder, wrong = Subject("bundled").extended("yarn"), RUNS / "bundled" / "yarn, no rope_scaling, mlx"
            config = json.loads((folder / "config.json").read_text())
            shutil.copytree(folder, wrong, dirs_exist_ok=True)
            kept = {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_theta")}
            (wrong / "config.json").write_text(json.dumps(kept))
            return {"folder": str(wrong)}

        return [*super().negatives(), self.mistake("yarn", "neither rope_scaling nor rope_theta", as_saved, NONE)]

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        """With the bases where most of its classes read them; as transformers 5 alone writes them, they are lost."""
        folder = RUNS / subject.name / "base, mlx"
        if not folder.is_dir():
            config = json.loads((subject.base / "config.json").read_text())
            text = text_section_of(config, read_config(subject.base))
            tables = text["rope_parameters"]
            text["rope_theta"] = tables.get("full_attention", tables)["rope_theta"]
            if "sliding_attention" in tables:
                text["rope_local_base_freq"] = tables["sliding_attention"]["rope_theta"]
            shutil.copytree(subject.base, folder)
            (folder / "config.json").write_text(json.dumps(config))
        return {"folder": str(folder)}


class WithOptions(GGUFModel):
    """llama.cpp's server with the RoPE options of its command line."""

    def __init__(self, path: str, target: int, options: dict[str, str]) -> None:
        self.options = options
        super().__init__(path, n_ctx=target)

    def _parameters(self, xllamacpp: Any, *rest: Any) -> Any:
        params = super()._parameters(xllamacpp, *rest)
        for name, value in self.options.items():
            match name:
                case "--rope-freq-base":
                    params.rope_freq_base = float(value)
                case "--rope-scale":
                    params.rope_freq_scale = 1 / float(value)
                case "--rope-scaling":
                    types = xllamacpp.llama_rope_scaling_type
                    params.rope_scaling_type = getattr(types, f"LLAMA_ROPE_SCALING_TYPE_{value.upper()}")
                case "--yarn-orig-ctx":
                    params.yarn_orig_ctx = int(value)
                case "--model" | "--ctx-size":
                    pass
                case _:
                    raise ValueError(f"{name} is not passed to xllamacpp")
        return params


def with_keys(file: Path, output: Path, overrides: str) -> None:
    """A copy of a GGUF file with the keys of `--override-kv`, an option that xllamacpp lacks."""
    reader = gguf.GGUFReader(file)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(output, architecture)
    keys = dict(each.split("=") for each in overrides.split(","))
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and name not in keys:
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for name, value in keys.items():
        kind, _, number = value.partition(":")
        if kind == "int":
            writer.add_uint32(name, int(number))
        else:
            writer.add_float32(name, float(number))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class InLlamaCpp(Conformance):
    """Through the wheel xllamacpp, which carries llama.cpp's own server."""

    name = "llama.cpp"
    title = f"llama.cpp's server (xllamacpp {metadata.version('xllamacpp')})"
    forms = (FOLDER, GGUF)
    bar = 5e-4  # its CPU kernels round otherwise, and its GELU (Gemma) reads a table in float16

    def negatives(self) -> list[Cell]:
        """Also an extended file with a base on the command line."""

        def another_base() -> dict[str, Any]:
            return {**self.wrongly_served(Subject("bundled"), "yarn"), "options": {"--rope-freq-base": "10000"}}

        return [*super().negatives(), self.mistake("yarn", "--rope-freq-base 10000", another_base, NONE)]

    def wrongly_served(self, subject: Subject, scaling: str) -> dict[str, Any]:
        return self._up_to(subject.target, self.served(subject, scaling, FOLDER)[0])

    def _up_to(self, tokens: int, request: dict[str, Any]) -> dict[str, Any]:
        """The same file with another context length: the server rejects longer prompts."""
        file = Path(request["file"])
        longer = file.with_name(f"{file.stem}, {tokens} tokens.gguf")
        with_keys(file, longer, f"llama.context_length=int:{tokens}")
        return {**request, "file": str(longer), "tokens": tokens}

    def ready(self) -> dict[str, Any]:
        return {"versions": {"xllamacpp": metadata.version("xllamacpp")}}

    def plain(self, subject: Subject, tokens: int) -> dict[str, Any]:
        file = RUNS / subject.name / "base.gguf"
        if not file.is_file() and self.written_by_us(subject):
            write_gguf(subject.base, file)
        elif not file.is_file():
            convert = [sys.executable, str(HERE / "llama_cpp_convert.py"), str(llama_cpp_source())]
            subprocess.run([*convert, str(subject.base), str(file)], check=True, capture_output=True)
        request = {"file": str(file), "tokens": tokens}
        return request if tokens <= subject.trained else self._up_to(tokens, request)

    def written_by_us(self, subject: Subject) -> bool:
        return why_not_written(read_config(subject.base)) is None

    def served(self, subject: Subject, method: str, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The extended folder as a file; where ctxext writes none, the original's file with what export prints."""
        command = subject.export("llama.cpp", method, FOLDER if form == FOLDER else OVERRIDES).flags
        file = RUNS / subject.name / f"{method}, {form}.gguf"
        base = Path(self.plain(subject, subject.trained)["file"])
        file.unlink(missing_ok=True)
        if form == FOLDER and "MODEL.gguf" in command:
            options = parse_command(command).options
            with_keys(base, file, options.pop("--override-kv"))
            return {"file": str(file), "tokens": subject.target, "options": options}, command
        if form == FOLDER and self.written_by_us(subject):
            write_gguf(subject.extended(method), file)
        else:
            try:
                extend_gguf(base, file, method=subject.methods[method])
            except ValueError as error:
                raise NotExportable(str(error)) from error
        return {"file": str(file), "tokens": subject.target}, command

    def ask(self, request: dict[str, Any], prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Of prompts longer than a probe, those of the last tokens alone: each takes a request."""
        try:
            with WithOptions(request["file"], request["tokens"], request.get("options", {})) as model:
                return [model.logprobs(ids, 1 if len(ids) <= MAX_TOKENS else len(ids) - LAST) for ids in prompts]
        except ValueError as error:
            raise EngineError(str(error)) from error
