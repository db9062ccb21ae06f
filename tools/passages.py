"""Twenty passages that users see, before and after a change: `python tools/passages.py --since REV`.

Passages are docstrings, error messages, help texts and paragraphs of the documentation of the older revision, drawn at
random. Beside each stands the most similar passage of the same kind in the working tree, with how similar it is.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORTEST = 40  # characters


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def of_python(source: str) -> list[tuple[str, str]]:
    """(kind, text) of the strings with words in them."""
    tree, found, documented = ast.parse(source), [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            documented.add(id(node.body[0].value))  # type: ignore[attr-defined]
            found += [("docstring", paragraph) for paragraph in text.split("\n\n")]
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            found.append(("message", "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | documented:
            found.append(("message", node.value))
    return found


def passages(files: dict[str, str]) -> list[tuple[str, str, str]]:
    """(kind, file, text) of all passages of at least SHORTEST characters."""
    found = []
    for name, source in files.items():
        if name.endswith(".py"):
            parts = of_python(source)
        else:
            parts = [
                ("documentation", part) for part in re.split(r"\n\n+", source) if not part.startswith(("|", "<", "`"))
            ]
        for kind, text in parts:
            words = " ".join(text.split())
            if len(words) >= SHORTEST and words.count(" ") >= 5:
                found.append((kind, name, words))
    return found


def is_read(name: str) -> bool:
    """The package, the README and the documentation; no data."""
    return (name.startswith("ctxext/") and name.endswith(".py")) or (
        name.endswith(".md") and name.startswith(("docs/", "README", "recipes/")) and "families.md" not in name
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--since", required=True, help="the older revision")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = git("ls-tree", "-r", "--name-only", options.since).split("\n")
    before = passages({name: git("show", f"{options.since}:{name}") for name in names if is_read(name)})
    here = [name for name in git("ls-files").split("\n") if is_read(name) and (ROOT / name).is_file()]
    after = passages({name: (ROOT / name).read_text(encoding="utf-8") for name in here})
    for kind, name, text in random.Random(options.seed).sample(before, options.count):
        close = [(SequenceMatcher(None, text, other, autojunk=False).quick_ratio(), other, where)
                 for same, where, other in after if same == kind]  # fmt: skip
        close.sort(reverse=True)
        ratio, best, where = max(
            (SequenceMatcher(None, text, other, autojunk=False).ratio(), other, place) for _, other, place in close[:20]
        )
        print(f"## {kind}, {name}\n\nbefore: {text}\n")
        print("after: the same\n" if best == text else f"after ({ratio:.2f}, {where}): {best}\n")


if __name__ == "__main__":
    main()
