"""The matrix of families as JSON and as a page, and what changed between two of them."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ctxext.utils.machine import versions
from survey.matrix import COMPARED, EXTENDED, FACTOR, VERDICTS, Row
from survey.small import KINDS, LENGTH

_NOT_SEEN = "not seen"  # the encoding of what was never built


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By kind, as the auto classes are listed, and by name."""
    return sorted(rows, key=lambda row: (list(KINDS).index(row.kind), row.model_type))


def write_json(rows: Sequence[Row], path: Path) -> None:
    content = {
        "versions": {**versions(), "python": platform.python_version()},
        "factor": FACTOR,
        "trained_length": LENGTH,
        "compared_at": COMPARED,
        "rows": [asdict(row) for row in in_order(rows)],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Row]:
    """The rows that `write_json` wrote.

    Raises:
        ValueError: the file does not hold such rows.
    """
    try:
        return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} does not hold a matrix of families ({error}); write one with `python -m survey --json`."
        ) from error


def counts(rows: Sequence[Row]) -> list[list[str]]:
    """A table of how many rows have an encoding (down) and a verdict (across), its heading first."""
    found = Counter((_encoding(row), row.verdict) for row in rows)
    encodings = sorted({name for name, _ in found}, key=lambda name: (name == _NOT_SEEN, name))
    verdicts = [verdict for verdict in VERDICTS if any(found[name, verdict] for name in encodings)]
    table = [["encoding", *verdicts, "all"]]
    for name in encodings:
        numbers = [found[name, verdict] for verdict in verdicts]
        table.append([name, *(str(number or "") for number in numbers), str(sum(numbers))])
    sums = [sum(found[name, verdict] for name in encodings) for verdict in verdicts]
    return [*table, ["all", *map(str, sums), str(sum(sums))]]


def _encoding(row: Row) -> str:
    return row.encoding or _NOT_SEEN


def markdown(rows: Sequence[Row]) -> str:
    """A page: versions, counts, and a table for each encoding."""
    rows, used = in_order(rows), versions()
    extended = sum(row.verdict in EXTENDED for row in rows)
    causal = [row for row in rows if row.kind == "causal"]
    causal_extended = sum(row.verdict in EXTENDED for row in causal)
    parts = [
        "# Families",
        f"{len(rows)} model types of transformers {used['transformers']} (torch {used['torch']}, ctxext "
        f"{used['ctxext']}), {extended} of them extended and verified; of the {len(causal)} causal language models "
        f"{causal_extended}, {sum(row.in_attention is True for row in rows)} of them also inside attention "
        f"(`self_extend`). Each is built small with random weights and a trained length of {LENGTH} tokens, extended "
        f"by `extend_context(model, factor={FACTOR:g})`, and compared at {COMPARED} tokens.",
        "Written by `make families`.",
        "\n".join(f"- *{verdict}*: {meaning}" for verdict, meaning in VERDICTS.items()),
        _table(counts(rows)),
        "In the tables below:\n\n" + "\n".join(f"- *{column}*: {meaning}" for column, meaning in COLUMNS.items()),
        "<!-- filter -->",  # docs/site.py
    ]
    for name in [line[0] for line in counts(rows)[1:-1]]:
        mine = [row for row in rows if _encoding(row) == name]
        parts += [f"## {name[:1].upper()}{name[1:]}", _table([_HEADING, *map(_cells, mine)])]
    return "\n\n".join(parts) + "\n"


_HEADING = [
    "model type", "kind", "verdict", "method", "largest effect", "restored", "temperature", "in attention", "reason"
]  # fmt: skip


COLUMNS = {
    "kind": "the head that was built, the first that transformers has: causal, seq2seq, masked, speech or none (base)",
    "largest effect": "the largest change of a logit at twice the trained length; *the stock model stops*: there it "
    "raises an error, and the extended one does not",
    "restored": "bitwise if `restore_context` gives back the weights, the config and the logits",
    "temperature": "live if YaRN's attention factor changes the logits",
    "in attention": "whether Self-Extend runs too",
}


def _cells(row: Row) -> list[str]:
    def yes(value: bool | None, words: tuple[str, str]) -> str:
        return "" if value is None else words[not value]

    method = f"{row.method}, replacing the published scaling" if row.replaced and row.method else row.method
    effect = "" if row.effect is None else f"{row.effect:.2g}"
    if row.effect is None and row.verdict in EXTENDED:
        effect = "the stock model stops"
    restored, temperature = yes(row.restored, ("bitwise", "NOT")), yes(row.temperature, ("live", "dead"))
    inside = yes(row.in_attention, ("yes", f"no: {row.in_attention_reason}"))
    cells = [f"`{row.model_type}`", row.kind, row.verdict, method or "", effect, restored, temperature, inside]
    return [*cells, row.reason or ""]


def _table(lines: list[list[str]]) -> str:
    # A bar would end a cell, and a bracket begin a tag.
    cells = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    rule = ["---"] * len(cells[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def changes(before: Sequence[Row], after: Sequence[Row]) -> tuple[list[str], list[str]]:
    """What changed from one matrix to a later one, a line each; and of those lines the regressions.

    A regression is a model type that was extended and no longer is; a removed model type is not one.
    """
    old, new = ({row.model_type: row for row in rows} for rows in (before, after))
    lines, regressions = [], []
    for name in [*old, *(name for name in new if name not in old)]:
        was, now = old.get(name), new.get(name)
        if now is None:
            lines.append(f"gone: {name}")
        elif was is None:
            lines.append(f"new: {name}: {_words(now)}")
        elif was.verdict != now.verdict:
            lines.append(f"changed: {name}: {was.verdict} → {_words(now)}")
            if was.verdict in EXTENDED and now.verdict not in EXTENDED:
                regressions.append(lines[-1])
        elif was.in_attention != now.in_attention and was.in_attention is not None:
            lines.append(f"changed: {name}: in attention {was.in_attention} → {now.in_attention} "
                         f"({now.in_attention_reason})")  # fmt: skip
            if was.in_attention:
                regressions.append(lines[-1])
    return lines, regressions


def _words(row: Row) -> str:
    return row.verdict if row.reason is None else f"{row.verdict} ({row.reason})"
