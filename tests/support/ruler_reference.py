"""Golden samples of NVIDIA's RULER at one commit: `python tests/support/ruler_reference.py CHECKOUT`.

It runs the scripts of a checkout of github.com/NVIDIA/RULER at `COMMIT`, unmodified and with their seed, 42, and
writes what is not left to chance in their prompts to `GOLDEN`: sizes, counts, and digests of the text without its
random parts. Their data is replaced: the essays by our novel, wonderwords by our word lists, nltk's sentence ends by
ours, SQuAD and HotpotQA by generated questions.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

COMMIT = "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a"
GOLDEN = Path(__file__).with_name("ruler_golden.json")
LENGTHS = (1024, 2048, 4096)
SAMPLES = 3
# Two of NVIDIA's.
TEMPLATES = {"base": "{task_template}", "meta-chat": "[INST] {task_template} [/INST]"}

SQUAD = {
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"The {thing} of {title} is {k} feet high. " + f"Stone {k} lies there. " * 8,
                    "qas": [
                        {
                            "question": f"How high is the {thing} of {title}?",
                            "answers": [{"text": f"{k} feet"}, {"text": f"{k} feet high"}, {"text": f"{k} feet"}],
                            "is_impossible": False,
                        },
                        {"question": "What is not said?", "answers": [], "is_impossible": True},
                    ],
                }
                for k, thing in enumerate(("tower", "gate", "bridge", "dome"), 100 + 10 * number)
            ],
        }
        for number, title in enumerate(f"Arden{k}" for k in range(30))
    ]
}
# Documents of one size, so that chance has no part in how many of them fit.
HOTPOT = [
    {
        "question": f"Whence came the founder of Town {k}?",
        "answer": f"Isle{k}",
        "supporting_facts": [[f"Town {k}", 0], [f"Hero {k}", 1]],
        "context": [
            [f"Town {k}", [f"Town {k} was founded by Hero {k}.", " It is known to be old."]],
            [f"Hero {k}", [f"Hero {k} came from the isle", f" of Isle{k}, and sailed very far away."]],
            *([f"Other {k}{j}", [f"Nothing is known of {k}{j}."] + [" It is not named."] * 2] for j in range(8)),
        ],
    }
    for k in range(20, 60)
]


# In place of NVIDIA's english_words.json.
ENGLISH = {k: f"word{k}" for k in range(10_000)}


def by_words() -> PreTrainedTokenizerFast:
    """One token for each word, and BOS: what NVIDIA's code counts can be counted by hand."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def shape(name: str, prompt: str, references: Sequence[str]) -> dict[str, Any]:
    """What is not left to chance in a prompt of RULER's, its answer prefix included."""
    if name.startswith("niah"):
        prompt, needles = NEEDLE.subn("", prompt)
        words = re.sub(r" for (\S+(?:, (?:and )?\S+)*) mentioned", " for KEYS mentioned", prompt).split()
        facts = {"needles": needles, "words": len(words)}
        text = " ".join(words)
    elif name == "vt":
        names = re.findall(r"^VAR (\w+) =", prompt, re.M)
        text = re.sub("|".join(rf"\b{variable}\b" for variable in names), "NAME", prompt)
        text = re.sub(r"\b\d{5}\b", "VALUE", text)
        example, _, puzzle = text.rpartition("Memorize and track")
        facts = {"example": example.count("\n"), "lines": puzzle.count("\n"), "assignments": len(names)}
        # The example's answer ends in a random order of lines no more than the example does.
        text = "\n".join([*sorted(example.split("\n")), *sorted(puzzle.split("\n"))])
    elif name == "cwe":
        lists = [Counter(re.findall(r"\d+\. (\S+)", part)).values() for part in re.split(r"Below is", prompt)[1:]]
        facts = {"counts": [sorted(Counter(counts).items()) for counts in lists]}
        facts["english"] = [len(re.findall(r"\d+\. word\d", part)) for part in re.split(r"Below is", prompt)[1:]]
        text = re.sub(r"\d+\. \S+ ?", "", prompt)
    elif name == "fwe":
        before, coded, after = re.split(r"(?<=coded words\. )(.*)(?=\nQuestion)", prompt)
        facts = {"counts": sorted(Counter(coded.split()).values(), reverse=True)[:8], "words": len(coded.split())}
        text = before + after
    else:
        parts = re.split(r"(Document \d+:\n.*?)(?=\n\n(?:Document|Answer))", prompt, flags=re.S)
        facts = {"documents": len(parts) // 2, "gold": sum(references[0] in part for part in parts[1::2])}
        text = "".join(parts[::2])
    facts = {**facts, "references": len(set(references)), "text": blake2b(text.encode(), digest_size=8).hexdigest()}
    return json.loads(json.dumps(facts))


def example_layout(prompt: str) -> str:
    """In which lines of vt's example a variable is assigned."""
    example = prompt.partition("Memorize and track")[2].partition("Memorize and track")[0]
    return "".join("v" if line.startswith("VAR") else "." for line in example.split("\n"))


def _reference(checkout: Path, name: str, length: int, template: str, tokenizer: str, folder: Path) -> list[dict]:
    """What one of NVIDIA's scripts writes, called as its prepare.py does."""
    import yaml
    from constants import TASKS  # type: ignore[import-not-found]

    task = yaml.safe_load((checkout / "scripts/synthetic.yaml").read_text())[name]
    base = TASKS[task["task"]]
    options = {
        "save_dir": folder, "save_name": name, "tokenizer_path": tokenizer, "tokenizer_type": "hf",
        "max_seq_length": length, "tokens_to_generate": base["tokens_to_generate"], "num_samples": SAMPLES,
        "template": TEMPLATES[template].format(task_template=base["template"]) + base["answer_prefix"], **task["args"],
    }  # fmt: skip
    sys.argv = [task["task"], *(str(part) for key, value in options.items() for part in (f"--{key}", value))]
    runpy.run_path(str(checkout / f"scripts/data/synthetic/{task['task']}.py"), run_name="__main__")
    return [json.loads(line) for line in (folder / name / "validation.jsonl").read_text().splitlines()]


def _stand_ins() -> None:
    """Modules instead of those that NVIDIA's scripts import and that would download, or that hold their words."""
    from ctxext.evals.haystack import _SENTENCE_END
    from ctxext.evals.words import own_words

    def words(file: str) -> list[str]:
        return list(getattr(own_words(), f"{file.removesuffix('list.txt')}s"))

    def sentences(text: str) -> list[str]:
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        pieces = [text[a:b].strip() for a, b in zip([0, *ends], [*ends, len(text)])]
        return [piece for piece in pieces if piece]

    def nothing(*_: Any, **__: Any) -> Any:
        return lambda function: function

    wonderwords, nltk, tokenize, tenacity = map(ModuleType, ("wonderwords", "nltk", "nltk.tokenize", "tenacity"))
    wonderwords.random_word = ModuleType("random_word")  # type: ignore[attr-defined]
    wonderwords.random_word._get_words_from_text_file = words  # type: ignore[attr-defined]
    tokenize.sent_tokenize = sentences  # type: ignore[attr-defined]
    for called in ("retry", "stop_after_attempt", "wait_fixed", "wait_random"):
        setattr(tenacity, called, nothing)
    tenacity.wait_fixed = tenacity.wait_random = lambda *_: 0  # type: ignore[attr-defined]
    sys.modules |= {"wonderwords": wonderwords, "nltk": nltk, "nltk.tokenize": tokenize, "tenacity": tenacity}


def main(source: str) -> None:
    from ctxext.assets import PERSUASION
    from ctxext.evals.ruler import RULER

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copytree(source, folder / "checkout", ignore=lambda *_: [".git"])
        held = folder / "checkout/scripts/data/synthetic/json"
        (held / "PaulGrahamEssays.json").write_text(json.dumps({"text": PERSUASION.read_text(encoding="utf-8")}))
        (held / "english_words.json").write_text(json.dumps(ENGLISH))
        (held / "squad.json").write_text(json.dumps(SQUAD))
        (held / "hotpotqa.json").write_text(json.dumps(HOTPOT))
        by_words().save_pretrained(folder / "words")
        _stand_ins()
        sys.path.insert(0, str(folder / "checkout/scripts/data/synthetic"))
        golden: dict[str, Any] = {"commit": COMMIT, "seed": 42, "samples": {}}
        runs = [*((("base", length), RULER) for length in LENGTHS), (("meta-chat", 2048), RULER)]
        # Where the words of our lists do not suffice.
        for (template, length), tasks in [*runs, (("base", 16_384), ("cwe",))]:
            for task in tasks:
                # NVIDIA makes a turn of the chat of its own of the example of cwe, and we do not.
                if (template, task) == ("meta-chat", "cwe"):
                    continue
                written = _reference(folder / "checkout", task, length, template, str(folder / "words"), folder)
                prompts = [sample["input"] + sample["answer_prefix"] for sample in written]
                shapes = [shape(task, prompt, s["outputs"]) for prompt, s in zip(prompts, written)]
                golden["samples"][f"{template}/{length}/{task}"] = {
                    "lengths": sorted({sample["length"] for sample in written}),
                    "shapes": sorted(shapes, key=json.dumps),
                    **({"layouts": len(set(map(example_layout, prompts)))} if task == "vt" else {}),
                }
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
