"""Write the notebooks' Markdown cells to build/prose, where textlint reads them: `python tools/prose/cells.py`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "prose"

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        (FOLDER / f"{notebook.name}.md").write_text(text + "\n", encoding="utf-8")
