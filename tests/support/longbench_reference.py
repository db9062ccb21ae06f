"""Goldens of LongBench v2's code at one commit: `python tests/support/longbench_reference.py CHECKOUT`.

Of a clone of github.com/THUDM/LongBench it runs `pred.py`, unmodified, with a client that keeps what it is sent:
prompts of questions of our own, cut at two sizes, and its verdicts on answers. Without tiktoken, which it uses for
OpenAI's models.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

GOLDEN = Path(__file__).with_name("longbench_golden.json")
MODEL_NAME, CUTS = "Llama-3.1-8B-Instruct", (120_000, 1500, 400)
SAID = (
    "The correct answer is (A)", "**The correct answer is (B)**.", "Hm. The correct answer is C", "A", "",
    "The correct answer is (D), not (A)", "the correct answer is (A)", "The correct answer is: (A)",
    "The correct answer is (E)",
    "The correct answer is B. No: The correct answer is (C)", " *The* correct answer is **A**",
)  # fmt: skip


def question(k: int, text: str) -> dict[str, str]:
    choices = {f"choice_{letter}": f"{letter.lower()}{k} " for letter in "ABCD"}
    size, difficulty = ("short", "medium", "long")[k % 3], ("easy", "hard")[k % 2]
    return {
        "_id": str(k), "domain": "novels", "question": f"What happens in part {k}? ", "answer": "ABCD"[k % 4],
        "context": f" {text[: 2000 * (k + 1)]}", "length": size, "difficulty": difficulty, **choices,
    }  # fmt: skip


def digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def main(checkout: Path) -> None:
    from transformers import AutoTokenizer

    from ctxext.assets import MODEL, PERSUASION

    novel, tokenizer = PERSUASION.read_text(encoding="utf-8"), AutoTokenizer.from_pretrained(MODEL)
    sys.modules["tiktoken"] = ModuleType("tiktoken")
    os.chdir(checkout)
    theirs = runpy.run_path("pred.py", run_name="pred")
    sent: list[str] = []

    def create(messages: list[dict[str, str]], **_: Any) -> SimpleNamespace:
        sent.append(messages[0]["content"])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=""))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    prompts: dict[str, list[str]] = {}
    names = {"$DOC$": "context", "$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in "ABCD"}}
    for cut in CUTS:
        theirs["maxlen_map"][MODEL_NAME], sent[:] = cut, []
        for k in range(6):
            row, prompt = question(k, novel), theirs["template_0shot"]
            for mark, name in names.items():  # as its get_pred does
                prompt = prompt.replace(mark, row[name].strip())
            theirs["query_llm"](prompt, MODEL_NAME, tokenizer, client)
        prompts[str(cut)] = list(map(digest, sent))
    verdicts = [[said, theirs["extract_answer"](said.strip())] for said in SAID]
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    GOLDEN.write_text(json.dumps({"commit": commit, "prompts": prompts, "verdicts": verdicts}, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
