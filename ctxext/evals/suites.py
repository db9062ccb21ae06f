"""Published benchmarks: their tasks, lengths and number of samples, their data, and published results beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ctxext.evals.babilong import BABILONG
from ctxext.evals.helmet import HELMET, KEYS
from ctxext.evals.longbench import SUBSETS, read_questions
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
        lengths: in tokens; `trials` samples of each task and length.
        text: the haystack file; None for the default. `style` likewise is the prompts'.
        title: of the table that `print_published` shows.
        shown: the models of published rows in it, with their size; empty if there are none.
        table: makes that table.
        deviations: what differs from the publishers' code.
    """

    name: str
    tasks: tuple[str, ...]
    settings: tuple[str, ...]
    lengths: tuple[int, ...]
    trials: int
    title: str
    shown: tuple[str, ...]
    deviations: Callable[[Summary], list[str]]
    table: Callable[[Suite, Summary], Table]
    text: Path | None = None
    style: str | None = None

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
        given = "--suite-data is not given" if data is None else f"{data} does not hold all of it"
        raise ValueError(
            f"--suite ruler-nvidia needs NVIDIA's data, and {given}. Missing: {ways}. Clone "
            "github.com/NVIDIA/RULER, run these in scripts/data/synthetic/json, and pass that folder as --suite-data."
        )
    settings = (
        "ruler.compat=nvidia",
        f"qa_1.data={data / 'squad.json'}",
        f"qa_2.data={data / 'hotpotqa.json'}",
        f"cwe.english_words={data / 'english_words.json'}",
    )
    return Suite(
        name="ruler-nvidia",
        tasks=RULER,
        settings=settings,
        lengths=tuple(4096 * 2**k for k in range(6)),
        trials=500,
        title="RULER, mean of 13 tasks (%)",
        shown=SHOWN,
        deviations=_of_ruler,
        table=by_length,
        text=data / "PaulGrahamEssays.json",
    )


def _of_ruler(summary: Summary) -> list[str]:
    return [
        "prompts have their own random numbers, with distinct keys and values; NVIDIA shuffles some lists alike "
        "in every sample",
        "sentences end by a regular expression, not by nltk's punkt",
        *(["words are ctxext's own: pip install wonderwords for RULER's"] if nvidia_words().source == "ctxext" else []),
        *(["the example of cwe is not a turn of its own in the chat template"] if _style(summary) != "base" else []),
        *(["a thinking model gets no answer prefix"] if _style(summary) == "thinking" else []),
    ]


def babilong(data: Path | None) -> Suite:
    """BABILong's tasks qa1 to qa5, 100 samples, 1k to 128k. Kuratov et al. (2024), arXiv:2406.10149.

    Args:
        data: the folder `data` of RMT-team/babilong, with files such as qa1/4k.json.

    Raises:
        ValueError: it has no such file.
    """
    if data is None or not (data / "qa1" / "4k.json").is_file():
        raise ValueError(
            f"--suite babilong needs BABILong's data, and {data or 'no --suite-data'} has no qa1/4k.json. Download "
            "RMT-team/babilong from the hub, and pass its folder data as --suite-data."
        )
    return Suite(
        name="babilong",
        tasks=BABILONG,
        settings=tuple(f"{task}.data={data}" for task in BABILONG),
        lengths=tuple(1024 * 2**k for k in range(8)),
        trials=100,
        title="BABILong, mean of qa1 to qa5 (%)",
        shown=("Phi-3-mini-128k-instruct", "gemini-3-flash-preview"),
        deviations=_of_thinking,
        table=by_length,
    )


def _of_thinking(summary: Summary) -> list[str]:
    return ["a thinking model has room for its thoughts"] * (_style(summary) == "thinking")


def helmet_recall(data: Path | None) -> Suite:
    """HELMET's synthetic recall: 4 tasks, 100 samples, 8k to 128k. Yen et al. (2024), arXiv:2410.02694.

    Args:
        data: the folder `data` of HELMET.

    Raises:
        ValueError: it has not the tasks' folders.
    """
    parts = ("ruler/niah_multikey_2", "ruler/niah_multikey_3", "ruler/niah_multivalue", "json_kv")
    missing = [part for part in parts if data is None or not (data / part).is_dir()]
    if missing:
        raise ValueError(
            f"--suite helmet-recall needs HELMET's data, and {data or 'no --suite-data'} has no {', '.join(missing)}. "
            "Run scripts/download_data.sh of princeton-nlp/HELMET, and pass its folder data as --suite-data."
        )
    return Suite(
        name="helmet-recall",
        tasks=HELMET,
        settings=tuple(f"{task}.data={data}" for task in HELMET),
        lengths=tuple(KEYS),
        trials=100,
        title="HELMET, synthetic recall, mean of 4 tasks (%)",
        shown=(),
        deviations=_of_helmet,
        table=by_length,
        style="base",
    )


def _of_helmet(summary: Summary) -> list[str]:
    chat = ["the answer is begun for the model in a chat template without system message; its configs have no template"]
    return chat * (_style(summary) != "base") + _of_thinking(summary)


def longbench_v2(data: Path | None) -> Suite:
    """LongBench v2's 503 questions, prompts of up to 120,000 tokens. Bai et al. (2024), arXiv:2412.15204.

    Args:
        data: `data.json` of THUDM/LongBench-v2, or the folder that holds it.

    Raises:
        ValueError: there is no such file.
    """
    file = data / "data.json" if data is not None and data.is_dir() else data
    if file is None or not file.is_file():
        raise ValueError(
            f"--suite longbench-v2 needs its questions, and {data or 'no --suite-data'} has no data.json. Download it "
            "from THUDM/LongBench-v2 on the hub, and pass it as --suite-data."
        )
    questions = read_questions(str(file))
    return Suite(
        name="longbench-v2",
        tasks=("longbench_v2",),
        settings=(f"longbench_v2.data={file}",),
        lengths=(131_072,),
        trials=len(questions),
        title="LongBench v2 (%)",
        shown=(),
        deviations=_of_longbench,
        table=partial(by_subset, questions),
    )


def _of_longbench(summary: Summary) -> list[str]:
    shorter = [length for length in summary.lengths("longbench_v2") if length < 131_072]
    return [
        "greedy answers, where that code draws at a temperature of 0.1",
        *(["a length below 131,072 cuts the middle of longer prompts"] if shorter else []),
        *_of_thinking(summary),
    ]


def _style(summary: Summary) -> str:
    return str(summary.header.identity.get("prompts", "")).partition(" ")[0]


SUITES = {
    "ruler-nvidia": ruler_nvidia,
    "babilong": babilong,
    "helmet-recall": helmet_recall,
    "longbench-v2": longbench_v2,
}


def make_suite(name: str, data: Path | None) -> Suite:
    """A suite by its name. Raises ValueError for an unknown name, or if its data are missing."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}{suggest(name, SUITES)}")
    return SUITES[name](data)


@cache
def published(name: str) -> dict[str, Any]:
    """Published results: their `source`, and `rows` with scores in percent by length. By tools/published_rows.py."""
    file = files("ctxext.evals").joinpath("published", f"{name.partition('-')[0]}.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def print_published(suite: Suite, results: Results) -> None:
    """Print the suite's own figures beside published ones, at the end of its measurement."""
    summary, screen = Summary(results), Console()
    screen.print(suite.table(suite, summary))
    screen.print(suite_notes(suite, summary), highlight=False, markup=False, soft_wrap=True)


def by_length(suite: Suite, summary: Summary) -> Table:
    """The mean of the tasks by length and the effective length: ours, and published rows."""
    lengths = summary.lengths(*suite.tasks)
    table = _table(suite, "effective", *(f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths), "mean")

    def row(name: str, effective: str, scores: dict[int, float], style: str | None = None) -> None:
        shown = [scores.get(length) for length in lengths]
        held = [score for score in shown if score is not None]
        cells = ["" if score is None else f"{score:.1f}" for score in shown]
        mean = f"{sum(held) / len(held):.1f}" if len(held) == len(lengths) else ""
        table.add_row(name, effective, *cells, mean, style=style)

    for variant in summary.variants:
        shares = summary.by_length(variant, *suite.tasks)
        reached = summary.effective_length(variant, suite.tasks)["RULER"].length if shares else 0
        name = label(variant) if len(summary.variants) > 1 else summary.header.variants[variant]["model"]
        effective = f"{reached:,}" if reached else f"<{lengths[0]:,}"
        row(name, effective, {length: 100 * share.value for length, share in shares.items()}, "bold")
    for entry in published(suite.name)["rows"] if suite.shown else ():
        name = f"{entry['model']} {entry['size']}".strip()
        if name in suite.shown:
            row(name, entry["effective"], {int(length): score for length, score in entry["scores"].items()})
    return table


def by_subset(questions: Sequence[Mapping[str, str]], suite: Suite, summary: Summary) -> Table:
    """The accuracy over all questions, and by their difficulty and length, as in LongBench v2's table."""
    subsets = [(field, value) for field, values in SUBSETS.items() for value in values]
    table = _table(suite, "prompts to", "overall", *(value for _, value in subsets))
    for variant in summary.variants:
        for length in summary.lengths(*suite.tasks):
            records = [r for r in summary.of(variant, "longbench_v2") if r["length"] == length]
            groups = [[r["score"] for r in records]]
            groups += [
                [r["score"] for r in records if questions[r["trial"]][field] == value] for field, value in subsets
            ]
            cells = [f"{100 * sum(scores) / len(scores):.1f}" if scores else "" for scores in groups]
            name = label(variant) if len(summary.variants) > 1 else summary.header.variants[variant]["model"]
            table.add_row(name, f"{length:,}", *cells)
    return table


def _table(suite: Suite, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), title=suite.title, title_justify="left")
    table.add_column("model", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def suite_notes(suite: Suite, summary: Summary) -> str:
    """Where the other rows are from, and in what our run deviates from the publishers'."""
    trials = min(
        len(summary.of(v, task)) // max(1, len(summary.lengths(task))) for v in summary.variants for task in suite.tasks
    )
    said, lines = suite.deviations(summary), []
    said += [f"{counted(trials, 'sample')} of a task and length, not {suite.trials}"] * (trials < suite.trials)
    if suite.shown:
        lines.append(f"effective: the longest length up to which every mean is at least {100 * RULER_THRESHOLD:.1f}.")
        lines.append(f"Other rows: {published(suite.name)['source']}")
    lines.append(f"Ours differs from the publishers' code{':' if said else ' in nothing known.'}")
    return "\n".join((*lines, *(f"  {k}. {each}" for k, each in enumerate(said, 1))))
