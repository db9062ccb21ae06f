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
    """Passkey, perplexity and the price at short length of docs/demo/summary.json, in Markdown."""
    demo = json.loads((ROOT / "docs/demo/summary.json").read_text())
    figures = demo["figures"]
    lengths, bands = list(figures["none"]["retrieval"]["passkey"]), list(figures["none"]["perplexity"])
    head = [
        "method",
        *(f"passkey at {int(length):,}" for length in lengths),
        *(f"perplexity at {'–'.join(f'{int(end):,}' for end in band.split('-'))}" for band in bands),
        "price within 512 (nats)",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method, figure in figures.items():
        shares = figure["retrieval"]["passkey"].values()
        found = [f"{share['value']:.0%} [{100 * share['low']:.0f}, {100 * share['high']:.0f}]" for share in shares]
        loss = figure["gate"]["loss"]
        price = "" if method == "none" else f"{loss['value']:+.3f} [{loss['low']:+.3f}, {loss['high']:+.3f}]"
        name = "not extended" if method == "none" else f"`{method}`"
        cells = [name, *found, *(f"{value:.1f}" for value in figure["perplexity"].values()), price]
        lines.append("| " + " | ".join(cells) + " |")
    n = next(iter(figures["none"]["retrieval"]["passkey"].values()))["n"]
    lines += [
        "",
        f"{n} prompts a cell, with 95% intervals; {demo['windows']} windows of {int(lengths[-1]):,} tokens, "
        f"seed {demo['identity']['seed']}; from [docs/demo/summary.json](docs/demo/summary.json).",
    ]
    return "\n".join(lines)


def evaluators_table() -> str:
    """What the evaluators save, of docs/benchmarks/evaluators.json."""
    figures = json.loads((ROOT / "docs/benchmarks/evaluators.json").read_text())["figures"]
    value = {name: figure["value"] for name, figure in figures.items()}
    told = value["passkey grid: time over plain told the answer's length"]
    return (
        "On two CPU cores and the shipped model, against the plain way with the same answers: a passkey grid of 11 "
        f"depths takes {value['passkey grid: tokens over plain']:.2f} of the tokens and "
        f"{value['passkey grid: time over plain']:.2f} of the time of a `generate` for each prompt "
        f"({told:.2f} if that is told to stop after the answer), a perplexity curve of 32 points "
        f"{value['perplexity curve: time over plain']:.2f} of the time of a pass a point, and scoring 16,384 tokens "
        f"{value['scoring: growth over stock']:.2f} of the memory of the stock loss "
        "([docs/benchmarks/evaluators.json](docs/benchmarks/evaluators.json))."
    )


def updated(readme: str) -> str:
    """The README with what stands between its markers written anew."""
    for name, table in (("methods", method_table()), ("demo", demo_table()), ("evaluators", evaluators_table())):
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        block = f"{begin}\n{table}\n{end}"
        readme, count = re.subn(f"{begin}.*?{end}", lambda _, block=block: block, readme, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md has {count} blocks {begin} … {end}; it needs exactly one.")
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text()))
