"""The tests of every command, method, task, engine and way to train, as a table: `python tools/tested.py`.

A test is one of a thing if its code or its parameters name it, or if it runs over the registry that holds it. Exits
with 1 if something has none.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import get_args

import typer

from ctxext.cli import commands
from ctxext.evals.samples import list_tasks
from ctxext.export.rules import ENGINES
from ctxext.methods import list_methods
from ctxext.training.launch import EngineKind

TESTS = Path(__file__).resolve().parents[1] / "tests"
READ = ("perplexity", "sliding_perplexity", "key_tokens", "short")  # tasks that need no retrieval


def things() -> dict[str, list[str]]:
    """What users were promised, by kind."""
    return {
        "command": sorted(getattr(typer.main.get_command(commands), "commands", {})),
        "method": sorted(method.name for method in list_methods()),
        "task": [*sorted(list_tasks()), *READ],
        "engine": list(ENGINES),
        "training": [kind for kind in get_args(EngineKind) if kind != "any"],
    }


def tests() -> dict[str, str]:
    """The code of every test function, and of the functions and constants of its module that it names."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {
            target.id: ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        functions = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
        parts |= {name: code for name, code in functions.items() if not name.startswith("test_")}
        for name, code in functions.items():
            if name.startswith("test_"):
                used = [part for part, text in parts.items() if re.search(rf"\b{part}\b", code)]
                found[f"{path.relative_to(TESTS.parent)}::{name}"] = "\n".join([code, *(parts[part] for part in used)])
    return found


def of(name: str, code: dict[str, str]) -> list[str]:
    """The tests of a thing, that whose name or file is the thing's own first."""
    found = [test for test, text in code.items() if re.search(rf"['\" ]{re.escape(name)}['\" ]", text)]
    return sorted(found, key=lambda test: (name.replace("-", "_") not in test, test))


def main() -> int:
    code, untested = tests(), 0
    print("| kind | name | tests | one of them |\n|---|---|---|---|")
    for kind, names in things().items():
        for name in names:
            found = of(name, code)
            untested += not found
            print(f"| {kind} | {name} | {len(found)} | {found[0] if found else '**none**'} |")
    return int(untested > 0)


if __name__ == "__main__":
    sys.exit(main())
