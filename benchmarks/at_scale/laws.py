"""Part 1: every law with a device in it, on CUDA: tests/laws/test_cuda.py, test by test."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from at_scale.cells import Cell, Part

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/laws/test_cuda.py"


@dataclass
class Laws(Part):
    """A cell is one test function with all its parameters, in a process of its own. Tiny: the first, on the CPU."""

    name = "laws"
    title = "every law with a device in it, on CUDA"
    in_seconds = True

    @property
    def missing(self) -> str | None:
        if self.lacking("pytest"):
            return "pytest is not installed"
        return None if self.tiny or self.device == "cuda" else "no GPU"

    def cells(self) -> Sequence[Cell]:
        body = ast.parse(TESTS.read_text(encoding="utf-8")).body
        names = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        names = names[:1] if self.tiny else names
        return [Cell(name, 30.0, lambda name=name: self.outcomes(name)) for name in names]

    def speed(self) -> float:
        return 1.0  # the cost of a cell is a guess in seconds, which the first ones correct

    def outcomes(self, name: str) -> dict[str, dict[str, str]]:
        """Outcome and message of each of the tests that the function `name` makes.

        Raises RuntimeError if pytest could not run them.
        """
        marks = "not gpu and not slow" if self.tiny else "gpu"
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            # Without conftest.py, which needs hypothesis.
            command = [
                sys.executable, "-m", "pytest", f"{TESTS}::{name}", "-m", marks, "--noconftest", f"--junitxml={report}",
                "-p", "no:cacheprovider",
            ]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode not in (0, 1):
                raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            return {case.attrib["name"]: outcome(case) for case in ElementTree.parse(report).iter("testcase")}

    def record(self, kept: dict[str, Any]) -> dict[str, Any]:
        tests = {test: found for outcomes in kept.values() for test, found in outcomes.items()}
        counts = {
            how: sum(found["outcome"] == how for found in tests.values()) for how in ("passed", "failed", "skipped")
        }
        return {**counts, "tests": tests}


def outcome(case: ElementTree.Element) -> dict[str, str]:
    for tag, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return {"outcome": word, "message": found.attrib.get("message", "")[:500]}
    return {"outcome": "passed"}
