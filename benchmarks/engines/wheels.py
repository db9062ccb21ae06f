"""An engine's wheel without its libraries, unpacked but not installed, under the cache folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from engines.environments import CACHE

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def unpacked(name: str, version: str) -> Path:
    """The folder of a wheel's files but compiled libraries. The wheel itself, of up to 500 MB, is not kept."""
    folder = CACHE / "wheels" / f"{name}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            wanted = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", f"{name}=={version}")
            subprocess.run([*PIP, *wanted, "--dest", temporary], check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            with ZipFile(wheel) as file:
                kept = [each for each in file.namelist() if not each.endswith(".so")]
                file.extractall(Path(temporary, "kept"), kept)
            Path(temporary, "kept").rename(folder)
    return folder


def beside(*packages: str) -> Path:
    """A folder of packages that are put before the installed ones on the path."""
    folder = CACHE / "beside" / " ".join(packages)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            target = Path(temporary, "kept")
            subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", target, *packages], check=True)
            target.rename(folder)
    return folder
