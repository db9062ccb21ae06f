"""The results page: figures with intervals, interactive heat maps, and every failed sample.

A single self-contained file. Text and tables are HTML from the template `report.html`; interactive parts read an
embedded JSON block. All content is untrusted, so the template escapes everything, and the script creates text nodes
only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ctxext.evals.choice import recommended
from ctxext.evals.plots import grid_of, heat_colors, model_name, percent, times
from ctxext.evals.results import Record, Results
from ctxext.evals.statistics import RULER_THRESHOLD, Difference, Interval, in_percent, wilson
from ctxext.evals.summary import Summary, label
from ctxext.evals.targets import UNEXTENDED
from ctxext.utils.values import finite

# The number of samples per cell and variant on the page, failed ones first.
SAMPLES = 100


class Figure(NamedTuple):
    """A cell of the comparison: the value, and its interval and n in small print."""

    value: str
    note: str = ""


def write_report(results: Sequence[Results], path: Path) -> None:
    """Write the page of these results files, one section each.

    Raises:
        ValueError: there are no results.
    """
    from jinja2 import Environment, StrictUndefined

    if not results:
        raise ValueError("a report needs results, got none. Pass at least one results file.")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    template = environment.from_string(files("ctxext.evals").joinpath("report.html").read_text(encoding="utf-8"))
    sections = [_section(f"results-{k}", result) for k, result in enumerate(results, start=1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.render(sections=sections, ruler=RULER_THRESHOLD, kept=SAMPLES), encoding="utf-8")


def _section(anchor: str, results: Results) -> dict[str, Any]:
    """The template's data for one results file."""
    summary = Summary(results)
    scored = [record for record in summary.records if "score" in record]
    return {
        "id": anchor,
        "model": model_name(summary),
        "file": results.path.name,
        "trained": summary.trained_length,
        "samples": len(summary.records),
        "recommendation": [
            recommended(summary).text,
            *([f"Blank cells: {summary.cannot_run}."] if summary.cannot_run else []),
            *([f"{summary.uneven}."] if summary.uneven else []),
        ],
        "comparison": _comparison(summary),
        "maps": [_maps(summary, task) for task in summary.retrieval_tasks],
        "failed": sum(record["score"] < 1 for record in scored),
        "scored": len(scored),
        "cut": len(scored) > len(list(_kept(summary))),
        "filters": _filters(summary, scored),
        "curves": bool(summary.lengths("perplexity")),
        "settings": _settings(summary),
        "data": _data(summary),
    }


# ----------------------------------------------------------------------------------------- the comparison


def _comparison(summary: Summary) -> dict[str, Any]:
    """Groups of columns, and one row per variant; empty columns are omitted."""
    columns = [column for column in _columns(summary) if any(column[2].values())]
    groups: dict[str, list[str]] = defaultdict(list)
    for group, head, _ in columns:
        groups[group].append(head)
    rows = [(label(v), [cells.get(v) or Figure("") for *_, cells in columns]) for v in summary.variants]
    firsts = [0, *accumulate(len(heads) for heads in groups.values())]
    return {"groups": groups, "rows": rows, "firsts": firsts}


def _columns(summary: Summary) -> Iterator[tuple[str, str, dict[str, Figure | None]]]:
    """The group, heading and cells of each column."""
    variants, tasks = summary.variants, summary.retrieval_tasks
    for task in tasks:
        by_length = {v: summary.by_length(v, task) for v in variants}
        for length in summary.lengths(task):
            cells = {v: _share(by_length[v].get(length)) for v in variants}
            yield f"{summary.titled(task)} accuracy at", f"{length:,}", cells
    for after, length in pairwise([0, *summary.read_lengths]):
        cells = {v: _number(summary.perplexity(v, length, after)) for v in variants}
        yield "perplexity of tokens", f"{after + 1:,} to {length:,}", cells
    for length in summary.lengths("sliding_perplexity"):
        cells = {v: _number(summary.perplexity(v, length, task="sliding_perplexity")) for v in variants}
        yield "perplexity, sliding window", f"{length:,}", cells
    key = {v: summary.key_tokens(v) for v in variants}
    yield "perplexity", "key tokens", {v: found and _number(found[0], f"n = {found[1]:,}") for v, found in key.items()}
    effective = {v: summary.effective_length(v, summary.deciding_tasks) for v in variants}
    for rule in ("RULER", "85% of own"):
        reached = {v: found.get(rule) for v, found in effective.items()}
        cells = {
            v: r and Figure(_tokens(r.length), f"with 95% confidence: {_tokens(r.certain)}") for v, r in reached.items()
        }
        yield "effective length (tokens)", rule, cells
    gates = {v: summary.gate(v) for v in variants if v != UNEXTENDED}
    within = next((gate.length for gate in gates.values()), summary.trained_length)
    group = f"short-context regression (windows of {within:,} tokens)"
    yield group, "nats per token", {v: _difference(gate.loss, 1, 3) for v, gate in gates.items()}
    yield group, "same top token", {v: _share(gate.agreement, digits=1) for v, gate in gates.items()}
    for task in tasks:
        cells = {v: _difference(gate.retrieval.get(task), 100, 1) for v, gate in gates.items()}
        yield group, f"{summary.titled(task)}, points", cells


def _difference(difference: Difference | None, scale: float, digits: int) -> Figure | None:
    if difference is None:
        return None
    value, low, high = (f"{scale * number:+.{digits}f}" for number in difference[:3])
    return Figure(value, f"[{low}, {high}] n = {difference.n:,}")


def _share(share: Interval | None, digits: int = 0) -> Figure | None:
    if share is None:
        return None
    value, low, high = (in_percent(number, digits) for number in share[:3])
    return Figure(f"{value}%", f"[{low}, {high}] n = {share.n:,}")


def _number(value: float | None, note: str = "") -> Figure | None:
    if value is None:
        return None
    return Figure(f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1e4 else f"{value:.1e}", note)


def _tokens(length: int) -> str:
    return f"{length:,}" if length else "none"


# ------------------------------------------------------------------------------------------------ the maps


def _maps(summary: Summary, task: str) -> dict[str, Any]:
    """The heat maps of one task: for each variant, rows of cells by depth, None if not measured."""
    lengths, depths = grid_of(summary, task)
    maps = []
    for k, variant in enumerate(summary.variants):
        if cells := _by_cell(summary, variant, task):
            rows = [[_cell(variant, [k, task, n, depth], cells.get((n, depth))) for n in lengths] for depth in depths]
            maps.append({"name": label(variant), "rows": list(zip(map(percent, depths), rows))})
    return {
        "title": summary.titled(task),
        "lengths": [(f"{length:,}", times(length, summary.trained_length)) for length in lengths],
        "variants": maps,
    }


def _cell(variant: str, pick: list[Any], records: list[Record] | None) -> dict[str, Any] | None:
    if not records:
        return None
    _, task, length, depth = pick
    share = wilson(sum(record["score"] for record in records), len(records))
    tip = [
        f"{label(variant)}: {task}",
        f"{length:,} tokens" + ("" if depth is None else f", depth {percent(depth)}"),
        f"accuracy {share.percent()}",
    ]
    if digits := [record["digits"] for record in records if record["digits"] is not None]:
        tip.append(f"digit accuracy {in_percent(sum(digits) / len(digits))}%")
    if logprobs := [record["logprob"] for record in records if record["logprob"] is not None]:
        tip.append(f"mean log-probability {sum(logprobs) / len(logprobs):.2f}")
    background, color = heat_colors(share.value)
    return {
        "number": in_percent(share.value),
        "background": background,
        "color": color,
        "pick": pick,
        "tip": "\n".join(tip),
    }


def _by_cell(summary: Summary, variant: str, task: str) -> dict[tuple[int, float | None], list[Record]]:
    """The samples of each cell of a map."""
    cells = defaultdict(list)
    for record in summary.of(variant, task):
        cells[record["length"], record["depth"]].append(record)
    return cells


# ------------------------------------------------------------------------------- the samples and the curves


def _data(summary: Summary) -> dict[str, Any]:
    """The script's data: the prompts, the variants' outcomes on them, and the curves."""
    prompts: dict[str, int] = {}
    texts: list[Any] = []
    outcomes: list[Any] = []
    for record in _kept(summary):
        if record["key"] not in prompts:
            prompts[record["key"]] = len(texts)
            names = ("task", "length", "depth", "trial", "expected", "question", "contexts", "needle_tokens", "tokens")
            texts.append({name: record[name] for name in names})
        measured = [record["score"], record["digits"], record["logprob"], record["got"]]
        outcomes.append([summary.variants.index(record["variant"]), prompts[record["key"]], *finite(measured)])
    return {
        "variants": [label(variant) for variant in summary.variants],
        "unextended": summary.variants.index(UNEXTENDED) if UNEXTENDED in summary.variants else None,
        "prompts": texts,
        "outcomes": outcomes,
        "trained": summary.trained_length,
        "ticks": summary.read_lengths,
        "curves": [
            [(round(x, 1), float(f"{y:.5g}")) for x, y in summary.curve(variant) if math.isfinite(y)]
            for variant in summary.variants
        ],
    }


def _kept(summary: Summary) -> Iterator[Record]:
    """Samples of the heat maps, failed ones first, `SAMPLES` per cell."""
    for variant in summary.variants:
        for task in summary.retrieval_tasks:
            for records in _by_cell(summary, variant, task).values():
                yield from sorted(records, key=lambda record: record["score"])[:SAMPLES]


def _filters(summary: Summary, scored: list[Record]) -> list[tuple[str, list[tuple[Any, str]]]]:
    """The filters for failed samples: name, and values with their labels; only filters with a choice."""
    failed = [record for record in scored if record["score"] < 1]
    found = {name: {record[name] for record in failed} - {None} for name in ("variant", "task", "length", "depth")}
    choices: list[tuple[str, list[tuple[Any, str]]]] = [
        ("variant", [(k, label(v)) for k, v in enumerate(summary.variants) if v in found["variant"]]),
        ("task", [(task, task) for task in summary.retrieval_tasks if task in found["task"]]),
        ("length", [(length, f"{length:,}") for length in sorted(found["length"])]),
        ("depth", [(depth, percent(depth)) for depth in sorted(found["depth"])]),
    ]
    return [(name, values) for name, values in choices if len(values) > 1]


# --------------------------------------------------------------------------------------------- the settings


def _settings(summary: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of names and values, by heading."""
    header = summary.header
    return [
        ("Measured with", [(name, _plain(value)) for name, value in header.identity.items()]),
        ("Model and machine", [(_name(name), _plain(value)) for name, value in header.about.items()]),
        ("Variants", [(label(name), _plain(value)) for name, value in header.variants.items()]),
        ("Tasks", [(name, _plain(value)) for name, value in header.tasks.items()]),
    ]


def _name(name: str) -> str:
    return {"reach": "maximum context length"}.get(name, name.replace("_", " "))


def _plain(value: Any) -> str:
    """Format a setting."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name} ({_plain(inner)})" if isinstance(inner, dict) else f"{name} {_plain(inner)}"
            for name, inner in value.items()
            if inner is not None
        )
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
