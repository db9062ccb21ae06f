"""Whether a passkey score is what the model answers: SmolLM2-135M-Instruct on four kinds of text, on a CPU.

    python benchmarks/passkey_scores.py

Each prompt is answered twice: scored as `ctxext eval` does it, and by `generate`, which reads the prompt again. Both
have to agree sample by sample. Beside them stands what the model answers where the prompt ends before the space that
belongs to it, as the prompts of ctxext did at first: there the digits are right under teacher forcing, and the model
begins a sentence instead.

The essay and the manual are documentation packages of Debian, which `apt-get` and `dpkg` fetch once; the code is the
standard library of the Python that runs this. A prefill of 1,024 tokens takes some four seconds on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import html
import inspect
import re
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from report import Report
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import temporarily_extended
from ctxext.assets import PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.targets import LiveModel, outcome

FOLDER, TEXTS = Path("runs/SmolLM2-135M-Instruct"), Path("runs/texts")
# Text, style, length in tokens, depths, and how the model is extended.
CELLS = [
    *((text, "chat", 1024, (0.2, 0.8), None) for text in ("novel", "essay", "manual", "code")),
    *((text, "base", 1024, (0.2, 0.8), None) for text in ("novel", "essay")),
    ("essay", "chat", 1024, (0.2, 0.8), {"method": "pi", "factor": 16}),
    ("essay", "chat", 2048, (0.2, 0.8), None),
    ("essay", "chat", 4096, (0.5,), None),
]


def fetch(folder: Path) -> None:
    """Write the four texts to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("anarchism", "debian-reference-en"):
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive.name, "packages"], cwd=folder, check=True)
    documents = folder / "packages/usr/share"
    (folder / "novel.txt").write_text(PERSUASION.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "essay.txt").write_text(plain(documents / "doc/anarchism/html/secH3.html"), encoding="utf-8")
    manual = gzip.decompress((documents / "debian-reference/debian-reference.en.txt.gz").read_bytes())
    (folder / "manual.txt").write_bytes(manual)
    modules = (argparse, dataclasses, inspect, tarfile)
    code = "\n\n".join(Path(inspect.getfile(module)).read_text(encoding="utf-8") for module in modules)
    (folder / "code.txt").write_text(code, encoding="utf-8")


def plain(page: Path) -> str:
    """The text of a page of HTML, its paragraphs apart."""
    text = re.sub(r"(?is)<(script|style|head).*?</\1>", "", page.read_text(encoding="utf-8", errors="replace"))
    text = re.sub(r"(?i)</?(p|h\d|li|br|div|tr)\b[^>]*>", "\n\n", text)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", html.unescape(re.sub(r"<[^>]+>", "", text)))
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t\r]+", " ", text)).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/passkey_scores.json"))
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        sys.path.insert(0, "recipes")
        import smollm2

        smollm2.fetch(args.model)
    if not (args.texts / "code.txt").is_file():
        fetch(args.texts)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    texts = {
        name: Haystack.from_file(args.texts / f"{name}.txt", tokenizer) for name in ("novel", "essay", "manual", "code")
    }
    report, samples, agree = Report("passkey scores, SmolLM2-135M-Instruct", seed=0), [], []
    for text, style, length, depths, extension in CELLS:
        prompter, task = Prompter(tokenizer, style), Passkey()
        target = LiveModel(model, prompter, args.model.name)
        row = [task.sample(place, prompter, texts[text]) for place in task.places([length], depths, 1, 0)]
        # The same tokens, with the space on the answer's side.
        first = [replace(s, n_prompt=s.n_prompt - 1, answer_tokens=s.answer_tokens + 1) for s in row]
        with nullcontext() if extension is None else temporarily_extended(model, **extension):
            scored = dict(next(target.outcomes([[row]], generate=False)))
            generated = dict(one for outcomes in target.outcomes([[row]], generate=True) for one in outcomes)
            before = {
                sample.place: outcome(sample, prompter.decode(answer.written))
                for sample, answer in target.engine.answers([first])
            }
        found = [scored[s]["score"] for s in row]
        agree += [scored[s]["score"] == generated[s]["score"] for s in row]
        how = "" if extension is None else ", {method} ×{factor}".format(**extension)
        cell = f"{text}, {style}, {length}{how}"
        report.add(f"{cell}: passkey accuracy", sum(found) / len(row))
        report.add(f"{cell}: generated", sum(generated[s]["score"] for s in row) / len(row))
        report.add(f"{cell}: generated without the space", sum(b["score"] for b in before.values()) / len(row))
        samples += [
            {
                "cell": cell, "depth": s.place.depth, "expected": s.references[0], "scored": scored[s]["got"],
                "generated": generated[s]["got"], "without_the_space": before[s.place]["got"],
                "logprob": scored[s]["logprob"],
            }
            for s in row
        ]  # fmt: skip
    report.add("samples whose score is that of the generated answer", sum(agree) / len(agree), at_least=1.0)
    fingerprints = {name: text.fingerprint for name, text in texts.items()}
    report.finish(args.output, samples=samples, texts=fingerprints)


if __name__ == "__main__":
    main()
