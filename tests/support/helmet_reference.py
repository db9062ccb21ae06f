"""Goldens of HELMET's code at one commit: `python tests/support/helmet_reference.py CHECKOUT`.

Of a clone of github.com/princeton-nlp/HELMET it runs `data.py` and `model_utils.py`, unmodified, on files of our own in
the format of its data: the prompts of its samples in their order, some of them cut, and its verdicts. Without
pytrec_eval, which its recall tasks do not use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

GOLDEN = Path(__file__).with_name("helmet_golden.json")
LENGTH, SAMPLES = 8192, 100
# HELMET's names of the tasks, and the tokens that they generate.
DATASETS = {"niah_mk_2": 50, "niah_mk_3": 100, "niah_mv": 50, "json_kv": 100}
SAID = ("{}", "The value is {}.", "THE {}!", "nothing", "", "a {} or so\nand more", "Corresponding value: {}\nKey: x")


def files(folder: Path) -> dict[str, Path]:
    """Write the files of one length, more samples than are drawn, with contexts within it and beyond."""
    paths = {}
    for name in DATASETS:
        rng, rows = Random(name), []
        for k in range(120):
            words = rng.choices(["river", "stone", "lamp", "road", "hill", "door"], k=rng.choice((20, 400, 6000)))
            context, value = " ".join(words) + ".", f"{rng.randrange(10**6)}-{k}"
            row: dict[str, Any] = {"context": context, "answer": [value, f"{value}b"] if name == "niah_mv" else [value]}
            if name == "json_kv":
                demos = [[f"key{k}{j}", f"value{j}"] for j in range(3)]
                row |= {"question": f"key-{k}", "demos": demos, "num_kvs": 105, "answer": value}
            else:
                row |= {"query": f"old-{k}", "type_needle_v": "uuid" if name == "niah_mk_3" else "number"}
            rows.append(row)
        folders = {"niah_mk_2": "niah_multikey_2", "niah_mk_3": "niah_multikey_3", "niah_mv": "niah_multivalue"}
        file = f"ruler/{folders[name]}/validation_{LENGTH}.jsonl" if name in folders else "json_kv/test_k105_dep6.jsonl"
        paths[name] = folder / file
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def digest(prompt: str) -> str:
    return blake2b(prompt.encode(), digest_size=8).hexdigest()


def main(checkout: Path) -> None:
    from transformers import AutoTokenizer

    from ctxext.assets import MODEL

    sys.modules["pytrec_eval"] = ModuleType("pytrec_eval")
    sys.path.insert(0, str(checkout))
    from data import load_json_kv, load_ruler  # type: ignore[import-not-found]
    from model_utils import tokenize  # type: ignore[import-not-found]

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    golden: dict[str, Any] = {"prompts": {}, "verdicts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files(Path(folder)).items():
            if name == "json_kv":
                loaded, score = load_json_kv(str(path), 2, SAMPLES, 42), "substring_exact_match"
            else:
                loaded, score = load_ruler(f"ruler_{name}", str(path), SAMPLES, 42), "ruler_recall"
            rows = [dict(row) for row in loaded["data"]]
            ids = [tokenize(dict(row), loaded, tokenizer, LENGTH, DATASETS[name])["input_ids"][0] for row in rows]
            golden["prompts"][name] = [digest(str(each.tolist())) for each in ids]
            verdicts = []
            for row, said in zip(rows, SAID):
                answer = row["answer"] if isinstance(row["answer"], str) else row["answer"][0]
                output = said.format(answer)
                verdicts.append([output, float(loaded["post_process"]({"output": output}, row)[0][score])])
            golden["verdicts"][name] = verdicts
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    golden["commit"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    GOLDEN.write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
