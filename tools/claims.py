"""Pick claims of README and docs at random, to be proven: `python tools/claims.py --seed 0`.

A claim is a sentence or a row of a table with a number or a name in code. The order is that of a hash of seed and
claim, so an edited page replaces its own claims alone. docs/claims.md has the proofs of one pick.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "claims.md"
MOST = 2  # of one page: the long tables would fill the list


def texts() -> dict[str, str]:
    """The pages by their path, without code blocks and comments, with links as their words."""
    found = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path != PAGE:
            text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
            found[str(path.relative_to(ROOT))] = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return found


def claims(text: str) -> list[str]:
    """The sentences and table rows of a page that hold a number or a name in code, on one line each."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |[|#]|\d+\. ))", text):
        line = re.sub(r"^(?:[-*]|\d+\.) ", "", " ".join(block.split()))
        if line.startswith("|"):
            found.append(line)
        elif not line.startswith(("#", ":::")):
            found += re.split(r"(?<=[.!?)]) (?=[A-Z`*\"])", line)
    # A rule of a table, a question, the lead to a list, a citation, the source of a table.
    nothing = re.compile(r"--\||[?:]$|, \d{4}\.$|^From \S+\.json")
    return [each for each in found if len(each) > 40 and re.search(r"\d|`", each) and not nothing.search(each)]


def pick(seed: int, count: int = 20) -> list[tuple[str, str]]:
    """`count` claims with their pages, at most `MOST` of one page."""
    everything = [(page, claim) for page, text in texts().items() for claim in claims(text)]
    times = Counter(claim for _, claim in everything)
    everything = [each for each in everything if times[each[1]] == 1]  # footnotes of many pages say no more than one
    everything.sort(key=lambda each: hashlib.sha256(f"{seed} {each[1]}".encode()).digest())
    chosen: list[tuple[str, str]] = []
    taken: Counter[str] = Counter()
    for page, claim in everything:
        if taken[page] < MOST and len(chosen) < count:
            taken[page] += 1
            chosen.append((page, claim))
    return chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    for number, (page, claim) in enumerate(pick(arguments.seed, arguments.count), 1):
        print(f"{number}. {page}\n   > {claim}\n")
