"""Write the README's tables anew: methods from the registry, numbers from the JSON of `make figures`.

python docs/update_readme.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ctxext.tables import method_table

ROOT = Path(__file__).resolve().parent.parent


def demo_table() -> str:
    """Passkey and perplexity of docs/demo/comparison.json, in Markdown."""
    demo = json.loads((ROOT / "docs/demo/comparison.json").read_text())
    lengths, n = demo["lengths"], demo["trials"] * len(demo["depths"])
    bands = [f"{low:,}–{high:,}" for low, high in zip([0, *lengths], lengths)]
    head = ["method", *(f"passkey at {length:,}" for length in lengths), *(f"perplexity at {band}" for band in bands)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in demo["results"]:
        name = "not extended" if result["method"] == "none" else f"`{result['method']}`"
        found = [f"{100 * sum(row) / n:.0f}%" for row in result["hits"]]
        lines.append("| " + " | ".join([name, *found, *(f"{value:.1f}" for value in result["perplexity"])]) + " |")
    lines += [
        "",
        f"{n} prompts a cell, {demo['windows']} windows of {lengths[-1]:,} tokens, seed {demo['seed']}; "
        "from [docs/demo/comparison.json](docs/demo/comparison.json).",
    ]
    return "\n".join(lines)


def updated(readme: str) -> str:
    """The README with what stands between its markers written anew."""
    for name, table in (("methods", method_table()), ("demo", demo_table())):
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        block = f"{begin}\n{table}\n{end}"
        readme, count = re.subn(f"{begin}.*?{end}", lambda _, block=block: block, readme, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md has {count} blocks {begin} … {end}; it needs exactly one.")
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text()))
