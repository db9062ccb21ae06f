"""The optional dependencies, by extra."""

from __future__ import annotations

import importlib.util

# Packages that are not dependencies of torch, transformers and typer.
EXTRAS = {
    "eval": ("datasets", "matplotlib"),
    "train": ("accelerate", "datasets", "matplotlib", "peft", "psutil"),
    "export": ("gguf",),
    "serve": ("fastapi", "openai", "uvicorn"),
}


def require(extra: str) -> None:
    """Raise ImportError, naming the extra, unless everything in it is installed."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"this needs {', '.join(missing)}: pip install '.[{extra}]' in the clone")
