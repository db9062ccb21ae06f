"""Each benchmark can be started from the root of the repository, where nothing but its own folder is on the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = """
import importlib, sys
for name in sys.argv[1:]:
    kept = list(sys.path)
    importlib.import_module(name)
    sys.path[:] = kept
"""


@pytest.mark.slow
def test_every_benchmark_finds_what_it_imports() -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *names], cwd=ROOT / "benchmarks", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(names) > 15
