"""Published benchmarks: their tasks, lengths and number of samples, their data, and published results beside ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ctxext.evals.results import Results
from ctxext.evals.ruler import RULER
from ctxext.evals.statistics import RULER_THRESHOLD
from ctxext.evals.summary import Summary, label
from ctxext.evals.words import nvidia_words
from ctxext.utils.values import counted, suggest

# The files of NVIDIA's scripts/data/synthetic/json, and what writes each.
RULER_FILES = {
    "PaulGrahamEssays.json": "python download_paulgraham_essay.py",
    "squad.json": "bash download_qa_dataset.sh",
    "hotpotqa.json": "bash download_qa_dataset.sh",
    "english_words.json": "in the repository",
}
# Of the 45 rows, those shown beside ours: common models of up to 14 billion parameters.
SHOWN = ("Qwen3-14B 14B", "Llama3.1 8B", "Qwen3-8B 8B", "GLM4 9B", "Mistral 7B", "Phi3-mini 3.8B", "Llama2 7B")


@dataclass(frozen=True)
class Suite:
    """A published benchmark.

    Attributes:
        settings: as `--setting` has them.
        text: the haystack file.
    """

    name: str
    tasks: tuple[str, ...]
    settings: tuple[str, ...]
    text: Path
    lengths: tuple[int, ...]
    trials: int

    def lengths_within(self, reach: int) -> tuple[int, ...]:
        """The lengths that a model of this maximum length can run. Raises ValueError if it can run none."""
        within = tuple(length for length in self.lengths if length <= reach)
        if not within:
            raise ValueError(
                f"--suite {self.name} begins at {self.lengths[0]:,} tokens, and the model supports {reach:,}. Extend "
                "it (--method yarn --target-length ...), or pass --lengths."
            )
        return within


def ruler_nvidia(data: Path | None) -> Suite:
    """RULER as NVIDIA publishes it: 13 tasks, 500 samples, 4k to 128k. Hsieh et al. (2024), arXiv:2404.06654.

    Args:
        data: a folder with the files of `RULER_FILES`.

    Raises:
        ValueError: files are missing; it names them.
    """
    missing = [name for name in RULER_FILES if data is None or not (data / name).is_file()]
    if data is None or missing:
        ways = ", ".join(f"{name} ({RULER_FILES[name]})" for name in missing)
        raise ValueError(
            f"--suite ruler-nvidia needs NVIDIA's data, and {data or 'no --suite-data'} has no {ways}. Clone "
            "github.com/NVIDIA/RULER, run these in scripts/data/synthetic/json, and pass that folder as --suite-data."
        )
    settings = (
        "ruler.compat=nvidia",
        f"qa_1.data={data / 'squad.json'}",
        f"qa_2.data={data / 'hotpotqa.json'}",
        f"cwe.english_words={data / 'english_words.json'}",
    )
    lengths = tuple(4096 * 2**k for k in range(6))
    return Suite("ruler-nvidia", RULER, settings, data / "PaulGrahamEssays.json", lengths, trials=500)


SUITES = {"ruler-nvidia": ruler_nvidia}


def make_suite(name: str, data: Path | None) -> Suite:
    """A suite by its name. Raises ValueError for an unknown name, or if its data are missing."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}{suggest(name, SUITES)}")
    return SUITES[name](data)


@cache
def published() -> dict[str, Any]:
    """The table of RULER's README: `source`, and `rows` with scores in percent by length. By tools/ruler_rows.py."""
    return dict(json.loads(files("ctxext.evals.ruler").joinpath("published.json").read_text(encoding="utf-8")))


def print_published(results: Results) -> None:
    """Print the suite's own figures beside published ones, at the end of its measurement."""
    summary, screen = Summary(results), Console()
    screen.print(ruler_table(summary))
    screen.print(ruler_notes(summary), highlight=False, markup=False, soft_wrap=True)


def ruler_table(summary: Summary) -> Table:
    """The mean of the 13 tasks by length and the effective length: ours, and published rows."""
    lengths = summary.lengths(*RULER)
    title = "RULER, mean of 13 tasks (%)"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), title=title, title_justify="left")
    table.add_column("model", overflow="fold")
    for name in ("effective", *(f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths), "mean"):
        table.add_column(name, justify="right", no_wrap=True)

    def row(name: str, effective: str, scores: dict[int, float], style: str | None = None) -> None:
        shown = [scores.get(length) for length in lengths]
        held = [score for score in shown if score is not None]
        cells = ["" if score is None else f"{score:.1f}" for score in shown]
        mean = f"{sum(held) / len(held):.1f}" if len(held) == len(lengths) else ""
        table.add_row(name, effective, *cells, mean, style=style)

    for variant in summary.variants:
        shares = summary.by_length(variant, *RULER)
        reached = summary.effective_length(variant, RULER)["RULER"].length if shares else 0
        name = label(variant) if len(summary.variants) > 1 else summary.header.variants[variant]["model"]
        effective = f"{reached:,}" if reached else f"<{lengths[0]:,}"
        row(name, effective, {length: 100 * share.value for length, share in shares.items()}, "bold")
    for entry in published()["rows"]:
        name = f"{entry['model']} {entry['size']}"
        if name in SHOWN:
            row(name, entry["effective"], {int(length): score for length, score in entry["scores"].items()})
    return table


def ruler_notes(summary: Summary) -> str:
    """Where the other rows are from, and in what our run deviates from NVIDIA's."""
    trials = {
        len(summary.of(v, task)) // max(1, len(summary.lengths(task))) for v in summary.variants for task in RULER
    }
    style = str(summary.header.identity.get("prompts", "")).partition(" ")[0]
    said = [
        "prompts have their own random numbers, with distinct keys and values; NVIDIA shuffles some lists alike in "
        "every sample",
        "sentences end by a regular expression, not by nltk's punkt",
        *(["words are ctxext's own: pip install wonderwords for RULER's"] if nvidia_words().source == "ctxext" else []),
        *(["the example of cwe is not a turn of its own in the chat template"] if style != "base" else []),
        *(["a thinking model gets no answer prefix"] if style == "thinking" else []),
        *([f"{counted(min(trials), 'sample')} of a task and length, not 500"] if min(trials) < 500 else []),
    ]
    numbered = "\n".join(f"  {k}. {each}" for k, each in enumerate(said, 1))
    return (
        f"effective: the longest length up to which every mean is at least {100 * RULER_THRESHOLD:.1f}.\n"
        f"Other rows: {published()['source']}\n"
        f"Ours differs from NVIDIA's code at that commit:\n{numbered}"
    )
