"""Long texts of different kinds: the bundled novel, documentation packages of Debian, and Python's standard library.

`apt-get` and `dpkg` fetch the packages once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import html
import inspect
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from filelock import FileLock

from ctxext.assets import PERSUASION

TEXTS = Path("runs/texts")
MODULES = (argparse, dataclasses, inspect, tarfile)
# Package, and its files below /usr/share in the order of their names.
PACKAGED = {
    "essay": ("anarchism", "doc/anarchism/html/secH3.html"),
    "manual": ("debian-reference-en", "debian-reference/debian-reference.en.txt.gz"),
    "lexicon": ("jargon-text", "doc/jargon-text/jargon.txt.gz"),
    "satire": ("dict-devil", "dictd/devil.dict.dz"),
    "editor": ("vim-runtime", "vim/vim*/doc/*.txt"),
    "language": ("rust-doc", "doc/rust-doc/html/book/print.html"),
    "security": ("harden-doc", "doc/harden-doc/html/en-US/*.html"),
    "database": ("postgresql-doc-15", "doc/postgresql-doc-15/html/*.html"),
    "mathematics": ("gap-doc", "gap/doc/ref/chap*_mj.html"),
    "scripting": ("perl-doc", "perl/*/pod/*.pod"),
}
NAMES = ("novel", *PACKAGED, "code")
LONGEST = 2_000_000  # characters
# Tokens of the second half of each by SmolLM2's tokenizer, rounded down to thousands.
SECOND_HALF = {
    "novel": 52_000, "essay": 44_000, "manual": 111_000, "lexicon": 202_000, "satire": 47_000, "editor": 311_000,
    "language": 151_000, "security": 72_000, "database": 267_000, "mathematics": 340_000, "scripting": 317_000,
    "code": 46_000,
}  # fmt: skip


def fetch(folder: Path = TEXTS) -> None:
    """Write a text of each of NAMES to `folder`, once.

    Raises FileNotFoundError if a package has no such files.
    """
    with FileLock(f"{folder}.lock"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            path = folder / f"{name}.txt"
            if not path.is_file():
                part = path.with_suffix(".part")
                part.write_text(text_of(name), encoding="utf-8")
                part.replace(path)  # whole, or not there


def text_of(name: str) -> str:
    """One of NAMES; its package is downloaded."""
    if name == "novel":
        return PERSUASION.read_text(encoding="utf-8")
    if name == "code":
        return "\n\n".join(Path(inspect.getfile(module)).read_text(encoding="utf-8") for module in MODULES)
    package, pattern = PACKAGED[name]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        (archive,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
        pages = sorted((Path(folder) / "usr/share").glob(pattern))
        if not pages:
            raise FileNotFoundError(f"{archive.name} has no /usr/share/{pattern}.")
        return "\n\n".join(map(plain, pages))[:LONGEST]


def halves(text: str) -> tuple[str, str]:
    """A text cut before the paragraph after its middle."""
    middle = text.index("\n\n", len(text) // 2)
    return text[:middle], text[middle:]


def plain(page: Path) -> str:
    """The text of a page, unpacked; of an HTML page without tags, its paragraphs apart."""
    packed = page.suffix in (".gz", ".dz")
    text = (gzip.decompress(page.read_bytes()) if packed else page.read_bytes()).decode("utf-8", errors="replace")
    if page.suffix != ".html":
        return text
    text = re.sub(r"(?is)<(script|style|head).*?</\1>", "", text)
    text = re.sub(r"(?i)</?(p|h\d|li|br|div|tr)\b[^>]*>", "\n\n", text)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", html.unescape(re.sub(r"<[^>]+>", "", text)))
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t\r]+", " ", text)).strip()
