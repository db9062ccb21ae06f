"""Run the notebooks and keep what they print and draw, which GitHub and the docs site show.

python tools/run_notebooks.py             # all, or those named:
python tools/run_notebooks.py finetune
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
# What a screen overwrites, and colours; then progress bars, and blanks at the ends of lines.
NOISE = (re.compile(r".*\r|\x1b\[[\d;]*m"), re.compile(r"^.*(\d%\||examples/s\]).*\n| +$", re.MULTILINE))
# What differs from machine to machine: durations, and any other number.
VARYING = re.compile(r"\d+ min( \d+ s)?|\d+ s\b|\d[\d,.]*(e[+-]?\d+)?")


def executed(path: Path, folder: Path) -> NotebookNode:
    """The notebook with the outputs of a run in `folder`: what it printed, and its pictures."""
    notebook = nbformat.read(path, as_version=4)
    shutil.copy(NOTEBOOKS / "pictures.py", folder)
    # No limit of time, so that a busy machine does not decide.
    run = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=None, startup_timeout=600, resources=run).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = list(_kept(cell.outputs, folder))
    return notebook


def _kept(outputs: list[NotebookNode], folder: Path) -> Iterator[NotebookNode]:
    """Without warnings, progress bars, colours and this machine's paths; and of a figure its picture alone."""
    for stream, group in groupby(outputs, lambda output: output.output_type == "stream"):
        if stream:
            text = "".join(output.text for output in group if output.name == "stdout")
            text = text.replace("\r\n", "\n").replace(f"{folder}/", "")
            for noise in NOISE:
                text = noise.sub("", text)
            if text.strip():
                yield nbformat.v4.new_output("stream", name="stdout", text=text)
            continue
        for output in group:
            kind = "image/png" if "image/png" in output.data else "text/plain"
            output.data, output.metadata = {kind: output.data[kind]}, {}
            yield output


def printed(notebook: NotebookNode) -> list[list[Any]]:
    """What each code cell shows, alike on any machine: words with their numbers masked, and the kind of a picture."""

    def shown(output: NotebookNode) -> str:
        if "data" in output and "image/png" in output.data:
            return "picture"
        return VARYING.sub("#", output.text if "text" in output else output.data["text/plain"])

    return [list(map(shown, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", choices=[[], *known], default=[], metavar="NAME", help=", ".join(known))
    for name in parser.parse_args().names or known:
        path = NOTEBOOKS / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder).resolve()), path)
        print(path)


if __name__ == "__main__":
    main()
