"""Mutation check: break one expression at a time, and run the tests that should notice.

`python tools/mutants.py --count 80` draws mutants at random, the same number from each room, and writes each into a
copy of the tree. One survives where the fast tests of its room pass. The JSON file is written after each
mutant; a stopped run resumes.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The files of each room, and the tests that hold them; from the quickest to the slowest, as the first failure ends it.
ROOMS = {
    "methods": (
        ["ctxext/methods/*.py"],
        ["tests/methods", "tests/encodings", "tests/extension", "tests/laws/test_refusals.py",
         "tests/laws/test_live.py"],
    ),
    "patches": (
        ["ctxext/patches/*.py", "ctxext/core/*.py"],
        ["tests/patches", "tests/extension", "tests/laws/test_refusals.py", "tests/laws/test_encodings.py",
         "tests/laws/test_live.py", "tests/laws/test_families.py"],
    ),
    "attention": (["ctxext/attention/*.py"], ["tests/attention", "tests/laws/test_in_attention.py"]),
    "statistics": (
        ["ctxext/evals/statistics.py", "ctxext/evals/choice.py", "ctxext/evals/summary.py"],
        ["tests/evals/test_statistics.py", "tests/evals/test_choice.py", "tests/evals/test_summary.py"],
    ),
}  # fmt: skip
COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
            "in": "not in", "not in": "in"}  # fmt: skip
COMPUTED = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "**": "*", "%": "*"}
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Pow: "**", ast.Mod: "%",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    room: str
    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str


def sites(room: str, path: Path) -> list[Mutant]:
    """Every expression of a file that can be broken; texts of errors, annotations and docstrings are left out."""
    data = path.read_bytes()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def add(node: ast.AST, begin: int, end: int, new: str) -> None:
        old = data[begin:end].decode()
        found.append(Mutant(room, str(path.relative_to(ROOT)), node.lineno, begin, end, old, new))  # type: ignore[attr-defined]

    def swap(left: ast.expr, sign: ast.AST, right: ast.expr, table: dict[str, str]) -> None:
        begin, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
        between, old = data[begin:end].decode(), SIGNS.get(type(sign))
        if old in table and between.count(old) == 1:
            add(left, begin, end, between.replace(old, table[old]))

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or _cites(node):
            return
        match node:
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                swap(left, sign, right, COMPARED)
            case ast.BinOp(left=left, op=sign, right=right) if not isinstance(left, ast.Constant | ast.JoinedStr) or (
                isinstance(left, ast.Constant) and isinstance(left.value, int | float)
            ):
                swap(left, sign, right, COMPUTED)
            case ast.BoolOp(op=sign, values=[left, right]):
                begin, end = at(left.end_lineno, left.end_col_offset), at(right.lineno, right.col_offset)
                between = data[begin:end].decode()
                old, new = ("and", "or") if isinstance(sign, ast.And) else ("or", "and")
                if between.count(old) == 1:
                    add(left, begin, end, between.replace(old, new))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                add(node, at(node.lineno, node.col_offset), at(operand.lineno, operand.col_offset), "")
            case ast.Constant(value=bool() as value):
                add(node, at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), str(not value))
            case ast.Constant(value=int() | float() as value):
                add(node, at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset), repr(value + 1))
        skipped = {"annotation", "returns", "decorator_list", "type_params"}
        for name, value in ast.iter_fields(node):
            if name not in skipped:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(ast.parse(data))
    return found


def _cites(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Paper"


def drawn(count: int, seed: int) -> list[Mutant]:
    """`count` mutants, the same number from each room, in turns."""
    chance = random.Random(seed)
    rooms = []
    for room, (patterns, _) in ROOMS.items():
        all_sites = [m for pattern in patterns for path in sorted(ROOT.glob(pattern)) for m in sites(room, path)]
        rooms.append(chance.sample(all_sites, count // len(ROOMS)))
    return [mutant for turn in zip(*rooms) for mutant in turn]


def survives(mutant: Mutant, copy: Path, seconds: int) -> bool:
    """Whether no test fails or hangs on the mutant."""
    path = copy / mutant.file
    data = path.read_bytes()
    path.write_bytes(data[: mutant.begin] + mutant.new.encode() + data[mutant.end :])
    try:
        tests = [name for name in ROOMS[mutant.room][1] if (copy / name).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "2", "-m", "not slow"]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run([*command, *tests], cwd=copy, env=environment, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
    finally:
        path.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=600, help="a mutant whose tests take longer counts as found")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks" / "mutants.json")
    options = parser.parse_args()
    mutants = drawn(options.count, options.seed)
    done = json.loads(options.output.read_text())["mutants"] if options.output.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", "*.egg-info"))
        for number, mutant in enumerate(mutants[len(done) :], len(done) + 1):
            held = survives(mutant, copy, options.seconds)
            done.append({**asdict(mutant), "survived": held})
            verdict = "SURVIVED" if held else "killed"
            print(
                f"{number}/{len(mutants)} {verdict} {mutant.file}:{mutant.line} {mutant.old!r} -> {mutant.new!r}",
                flush=True,
            )
            options.output.write_text(json.dumps({"seed": options.seed, "mutants": done}, indent=1) + "\n")
    survivors = sum(entry["survived"] for entry in done)
    print(f"killed {len(done) - survivors} of {len(done)}")


if __name__ == "__main__":
    main()
