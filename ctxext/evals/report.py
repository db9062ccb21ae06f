"""The results page: figures with intervals, interactive heat maps, and every failed sample.

A single self-contained file. Text and tables are HTML from the template `report.html`; interactive parts read an
embedded JSON block. All content is untrusted, so the template escapes everything, and the script creates text nodes
only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from ctxext.evals.choice import recommended
from ctxext.evals.cost import figures
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


# The heading and the cells of each variant.
Column = tuple[str, dict[str, Figure | None]]


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
    between = _between(*results) if len(results) == 2 else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.render(sections=sections, between=between, kept=SAMPLES), encoding="utf-8")


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
        "compared": len(summary.variants) > 1,
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


# What the figures of a table mean, by the beginning of its title.
MEANINGS = {
    "accuracy": (
        "The share of samples whose greedy answer contains what the text hides; of several candidate numbers, the "
        "first counts. In brackets the 95% confidence interval of this rate alone: ten hits of ten are still "
        "consistent with 72%. n counts samples; those of one text, at several depths, are correlated, and widen "
        "the interval."
    ),
    "not counted": (
        "The baseline fails this task within its trained length, so it is left out of means, comparisons and the "
        "recommendation."
    ),
    "perplexity of tokens": (
        "The exponential of the mean loss of a token: lower is better. Each column covers the tokens at these "
        "positions alone. The text may be in the training data, so compare variants, and do not quote the value."
    ),
    "perplexity, sliding": (
        "Windows of this length that move on by less than their length; each token counts once, with at least the "
        "rest of the window before it."
    ),
    "perplexity of key": (
        "Tokens that the baseline predicts only with long context, by LongPPL's rule. A mean over all tokens "
        "hides failures of retrieval. n counts tokens."
    ),
    "effective length": (
        f"The longest length up to which every length's accuracy reaches {in_percent(RULER_THRESHOLD, 1)}% (RULER), "
        "or 85% of the variant's own at the shortest length. The small print asks the same of the lower end of the "
        "interval."
    ),
    "short-context": (
        "What a variant loses within the trained length, where no extension is needed, against the baseline on "
        "the same texts: the loss increase in nats per token, the share of positions with the same most likely "
        "token, and the difference of accuracy in points. n counts windows of text, or samples."
    ),
    "prefill": "Seconds to read one prompt of this length, alone in its batch, on the machine below.",
    "decoded": "Tokens decoded per second after such a prompt, one at a time.",
    "KV cache": "The keys and values that such a prompt keeps in memory.",
    "differences": (
        "On the samples that both files have: the difference, its 95% interval, the number of pairs, and p of an "
        "exact paired test, not adjusted for the number of differences here."
    ),
    "peak memory": "The most memory held during such a prompt: on a GPU the allocations, on a CPU the whole process.",
}


def _comparison(summary: Summary) -> list[dict[str, Any]]:
    """A table for each group of columns, with one row per variant; empty columns are omitted."""
    groups: dict[str, list[Column]] = defaultdict(list)
    for group, head, cells in _columns(summary):
        if any(cells.values()):
            groups[group].append((head, cells))
    return [_table(group, columns, summary.variants) for group, columns in groups.items()]


def _table(title: str, columns: Sequence[Column], variants: Sequence[str]) -> dict[str, Any]:
    kind = "not counted" if "(not counted)" in title else "accuracy" if "accuracy" in title else title
    measured = [v for v in variants if any(cells.get(v) for _, cells in columns)]
    return {
        "title": title,
        "meaning": next((said for begin, said in MEANINGS.items() if kind.startswith(begin)), ""),
        "heads": [head for head, _ in columns],
        "rows": [(label(v), [cells.get(v) or Figure("") for _, cells in columns]) for v in measured],
    }


def _columns(summary: Summary) -> Iterator[tuple[str, str, dict[str, Figure | None]]]:
    """The table, heading and cells of each column."""
    variants, tasks = summary.variants, summary.retrieval_tasks
    for task in tasks:
        by_length = {v: summary.by_length(v, task) for v in variants}
        for length in summary.lengths(task):
            cells = {v: _share(by_length[v].get(length)) for v in variants}
            yield f"{summary.titled(task)}: accuracy by length", f"{length:,}", cells
    for after, length in pairwise([0, *summary.read_lengths]):
        cells = {v: _number(summary.perplexity(v, length, after)) for v in variants}
        yield "perplexity of tokens", f"{after + 1:,} to {length:,}", cells
    for length in summary.lengths("sliding_perplexity"):
        cells = {v: _number(summary.perplexity(v, length, task="sliding_perplexity")) for v in variants}
        yield "perplexity, sliding window by length", f"{length:,}", cells
    key = {v: summary.key_tokens(v) for v in variants}
    cells = {v: found and _number(found[0], f"n = {found[1]:,}") for v, found in key.items()}
    yield "perplexity of key tokens", "perplexity", cells
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
    yield from _cost_columns(summary)


def _cost_columns(summary: Summary) -> Iterator[tuple[str, str, dict[str, Figure | None]]]:
    costs = {v: {n: figures(sample) for n, sample in summary.cost(v).items()} for v in summary.variants}
    headings = next((found for cost in costs.values() for found in cost.values()), {})
    for heading, length in product(headings, summary.lengths("cost")):
        cells: dict[str, Figure | None] = {
            v: Figure(cost[length][heading]) for v, cost in costs.items() if length in cost
        }
        yield f"{heading} by length", f"{length:,}", cells


def _difference(difference: Difference | None, scale: float, digits: int) -> Figure | None:
    if difference is None:
        return None
    value, low, high = (f"{scale * number:+.{digits}f}" for number in difference[:3])
    return Figure(value, f"[{low}, {high}]\nn = {difference.n:,}")


def _share(share: Interval | None, digits: int = 0) -> Figure | None:
    if share is None:
        return None
    value, low, high = (in_percent(number, digits) for number in share[:3])
    return Figure(f"{value}%", f"[{low}, {high}]\nn = {share.n:,}")


def _number(value: float | None, note: str = "") -> Figure | None:
    if value is None:
        return None
    return Figure(f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1e4 else f"{value:.1e}", note)


def _tokens(length: int) -> str:
    return f"{length:,}" if length else "none"


def _between(first: Results, second: Results) -> dict[str, Any]:
    """The second file against the first, on common samples: variants of one name, or without any each with each."""
    files = (first, second)
    sides = [{v: f"{k}. {v}" for v in Summary(each).variants} for k, each in enumerate(files, start=1)]
    header = replace(
        first.header,
        tasks=first.header.tasks | second.header.tasks,
        variants={side[v]: each.header.variants[v] for side, each in zip(sides, files) for v in side},
    )
    records = [r | {"variant": side[r["variant"]]} for side, each in zip(sides, files) for r in each.records]
    both = Summary(Results(first.path, header, records))
    rows = {v: (sides[1][v], sides[0][v]) for v in sides[0] if v in sides[1]} or {
        f"{label(b)} against {label(a)}": (sides[1][b], sides[0][a]) for a, b in product(*sides)
    }
    columns: list[Column] = []
    for task in both.retrieval_tasks:
        for length in both.lengths(task):
            found = {row: both.difference(*pair, [task], [length]) for row, pair in rows.items()}
            columns.append((f"{task} at {length:,}, points", {row: _tested(d, 100, 1) for row, d in found.items()}))
    known = [[each.header.identity.get(name) for name in ("text", "seed", "prompts")] for each in files]
    for length in both.read_lengths if known[0] == known[1] else ():
        found = {row: both.loss_difference(*pair, length) for row, pair in rows.items()}
        columns.append((f"nats per token up to {length:,}", {row: _tested(d, 1, 3) for row, d in found.items()}))
    columns = [(head, cells) for head, cells in columns if any(cells.values())]
    return {"names": [each.path.name for each in files], **_table("differences, 2 minus 1", columns, list(rows))}


def _tested(difference: Difference | None, scale: float, digits: int) -> Figure | None:
    """A difference, with its p."""
    found = _difference(difference, scale, digits)
    return found and difference and found._replace(note=f"{found.note}\np = {difference.p:.2g}")


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
