"""What the package ships: a small trained model, and the novel that was held out from its training."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

# A LLaMA of 4.2 million parameters, trained at 512 tokens by recipes/pretrain.py.
MODEL = Path(str(files("ctxext.assets"))) / "austen-4m"
# Jane Austen, "Persuasion" (1817), public domain.
PERSUASION = MODEL / "persuasion.txt"
