"""RULER's 13 tasks beside those of lm-eval's `ruler`: wording, sizes and scores, every difference with its reason.

lm-eval's generators run unmodified, three samples each instead of 500, on our data: the essays are *Persuasion*, the
words our lists, SQuAD and HotpotQA generated questions, the tokenizer one word a token. Ours run with
`compat="nvidia"`, which equals NVIDIA's own code (tests/support/ruler_golden.json).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from fidelity.row import ROOT, Row
from transformers import PreTrainedTokenizerBase

from ctxext.assets import PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.ruler import RULER
from ctxext.evals.samples import Place, Sample, make_task
from ctxext.evals.words import nvidia_words, own_words

sys.path.append(str(ROOT / "tests/support"))
from ruler_reference import HOTPOT, SQUAD, by_words

SAMPLES, LENGTH = 3, 4096
# lm-eval's files and functions; the first eight are of niah_utils by their own names.
GENERATORS = {
    "vt": ("vt_utils", "get_vt_dataset"),
    "cwe": ("cwe_utils", "get_cw_dataset"),
    "fwe": ("fwe_utils", "fwe_download"),
    "qa_1": ("qa_utils", "get_squad"),
    "qa_2": ("qa_utils", "get_hotpotqa"),
}
# The functions that draw the samples, whose number we change.
DRAWS = {
    "niah_utils": "generate_samples",
    "vt_utils": "sys_vartrack_w_noise_random",
    "cwe_utils": "sys_word_pair_random",
    "fwe_utils": "sys_kwext",
    "qa_utils": "generate_samples",
}
DELIMITERS = {"cwe": "\n\n"}  # target_delimiter in cwe.yaml, which the other files leave at a space

STEPS = "lm-eval grows a prompt by a fixed step and goes one step back; NVIDIA's code uses binary search"
# Why a task is worded, sized or scored otherwise. A difference that is not here, or no longer there, is unexplained.
REASONS: dict[tuple[str, str], str] = {
    **{(name, "size"): STEPS for name in RULER},
    ("vt", "wording"): (
        "lm-eval joins lines by spaces, so that text follows an assignment on its line, and asks after an empty line; "
        "its answer prefix has a misspelt word (assgined)"
    ),
    ("cwe", "wording"): "lm-eval leaves the one-shot example out, and asks for the answer after an empty line",
    ("cwe", "size"): f"{STEPS}; the example that is left out was counted",
    ("fwe", "size"): "lm-eval keeps no tokens for the answer",
    ("qa_1", "score"): (
        "lm-eval gives the share of the accepted answers that are in the response, and counts repeated ones; NVIDIA's "
        "code asks for any one"
    ),
}


def _sentences(text: str) -> list[str]:
    from ctxext.evals.haystack import _SENTENCE_END

    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    pieces = [text[a:b].strip() for a, b in zip([0, *ends], [*ends, len(text)])]
    return [piece for piece in pieces if piece]


@contextmanager
def lm_eval_ruler(tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, ModuleType]]:
    """lm-eval's modules of `ruler` on our data; what they import and download is replaced meanwhile."""
    lists = own_words()
    kinds = {"noun": lists.nouns, "adjective": lists.adjectives, "verb": lists.verbs}
    categories = {
        **{kind: list(of) for kind, of in kinds.items()},
        **{f"{kind}s": list(of) for kind, of in kinds.items()},
    }
    wonderwords, nltk = ModuleType("wonderwords"), ModuleType("nltk")
    vars(wonderwords)["RandomWord"] = type("RandomWord", (), {"_categories": categories})
    vars(nltk).update(sent_tokenize=_sentences, data=ModuleType("nltk.data"), download=None)
    vars(nltk)["data"].find = lambda name: name
    version = importlib.metadata.version
    essay = PERSUASION.read_text(encoding="utf-8").split()
    stand_ins = {"wonderwords": wonderwords, "nltk": nltk}
    importlib.import_module("datasets")  # once: what is imported below is forgotten with the stand-ins
    with (
        patch.dict(sys.modules, stand_ins),
        patch("importlib.metadata.version", lambda name: "3.9.2" if name == "nltk" else version(name)),
    ):
        modules = {name: importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in DRAWS}
        for name, module in modules.items():
            draw = getattr(module, DRAWS[name])

            def fewer(*args: Any, draw: Any = draw, num_samples: int = SAMPLES, **options: Any) -> Any:
                return draw(*args, num_samples=min(num_samples, SAMPLES), **options)

            vars(module)[DRAWS[name]] = fewer
            vars(module)["get_tokenizer"] = lambda *_: tokenizer
        haystack = modules["niah_utils"].get_haystack
        vars(modules["niah_utils"])["get_haystack"] = lambda type_haystack: (
            essay if type_haystack == "essay" else haystack(type_haystack=type_haystack)
        )
        vars(modules["qa_utils"])["download_json"] = lambda url: SQUAD if "SQuAD" in url else HOTPOT
        try:
            yield modules
        finally:
            for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
                del sys.modules[name]


@dataclass(frozen=True)
class Drawn:
    """One prompt with its answer prefix, the right answers, and its words (tokens), the answer's budget apart."""

    prompt: str
    references: tuple[str, ...]
    tokens: int


def of_lm_eval(name: str, modules: dict[str, ModuleType], tokenizer: PreTrainedTokenizerBase) -> list[Drawn]:
    from lm_eval.api.utils import requires_delimiter

    file, function = GENERATORS.get(name, ("niah_utils", name))
    found = []
    for doc in getattr(modules[file], function)(max_seq_lengths=[LENGTH])["test"]:
        begun = doc["gen_prefix"]
        between = DELIMITERS.get(name, " ") if requires_delimiter(doc["input"], begun) else ""
        prompt = doc["input"] + between + begun
        tokens = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        found.append(Drawn(prompt, tuple(doc["outputs"]), tokens))
    return found


def our_samples(name: str, prompter: Prompter, haystack: Haystack, folder: Path) -> list[Sample]:
    questions = {"qa_1": SQUAD, "qa_2": HOTPOT}
    options = {}
    if name in questions:
        (folder / name).write_text(json.dumps(questions[name]))
        options["data"] = str(folder / name)
    task = make_task(name, compat="nvidia", **options)
    return [task.sample(Place(name, LENGTH, None, trial, 42), prompter, haystack) for trial in range(SAMPLES)]


def ours(samples: list[Sample], prompter: Prompter) -> list[Drawn]:
    return [
        Drawn(prompter.asked(s.body) + s.lead, tuple(s.references), s.n_prompt - len(prompter.special)) for s in samples
    ]


def wording(name: str, prompt: str) -> list[str]:
    """A prompt without what is drawn at random and without its haystack."""
    if name.startswith("niah"):
        first, *_, last = prompt.split("\n")
        return [first, re.sub(r" for (\S+(?:, (?:and )?\S+)*) mentioned", " for KEYS mentioned", last)]
    if name == "vt":
        names = re.findall(r"VAR (\w+) =", prompt)
        prompt = re.sub("|".join(rf"\b{variable}\b" for variable in names), "NAME", prompt)
        prompt = re.sub(r"\b\d{5}\b", "VALUE", prompt)
        return sorted(set(re.sub("(NAME ?)+$", "NAME", line) for line in prompt.split("\n")))
    if name == "cwe":
        return [re.sub(r"\d+\. \S+ ?", "", prompt)]
    if name == "fwe":
        return re.split(r"(?<=coded words\. ).*(?=\nQuestion)", prompt)
    parts = re.split(r"Document \d+:\n.*?(?=\n\n(?:Document|Answer))", prompt, flags=re.S)
    return [parts[0], re.sub(r"Question: .*\?", "Question: QUESTION?", parts[-1])]


def responses(sample: Sample) -> list[str]:
    """What a model might say: all, some and none of the right answers, in other cases, echoed, with odd characters."""
    right = list(sample.references)
    return [
        ", ".join(right),
        " ".join(right).upper(),
        right[0],
        right[-1] + "\x00\x07 and so on",
        ", ".join(right[: len(right) // 2]),
        "I don't know.",
        "",
        sample.body[-400:] + " ".join(right),
    ]


def scored_otherwise(name: str, samples: list[Sample], common: ModuleType) -> tuple[int, int]:
    """How many responses to the same samples lm-eval scores otherwise, of how many."""
    score = common.process_results_part if name.startswith("qa") else common.process_results
    otherwise = total = 0
    for sample in samples:
        doc = {"max_length": LENGTH, "outputs": list(sample.references)}
        for response in responses(sample):
            theirs = score(doc, [response])[str(LENGTH)]
            otherwise += abs(theirs - sample.score(response)) > 1e-9
            total += 1
    return otherwise, total


@dataclass(frozen=True)
class Compared:
    """A task: whether lm-eval's is worded alike, the longest prompt of each in tokens, responses scored otherwise."""

    task: str
    worded_alike: bool
    tokens: tuple[int, int]
    scored_otherwise: int
    responses: int

    @property
    def differs(self) -> list[str]:
        found = {
            "wording": not self.worded_alike,
            "size": self.tokens[0] != self.tokens[1],
            "score": self.scored_otherwise > 0,
        }
        return [what for what, here in found.items() if here]

    @property
    def reasons(self) -> list[str]:
        return [REASONS[self.task, what] for what in self.differs if (self.task, what) in REASONS]

    @property
    def unexplained(self) -> int:
        expected = {what for task, what in REASONS if task == self.task}
        return len(expected ^ set(self.differs))


def compared(names: list[str]) -> list[Compared]:
    tokenizer = by_words()
    prompter, haystack = Prompter(tokenizer), Haystack.from_file(PERSUASION, tokenizer)
    found = []
    # Whether or not wonderwords is installed here, both have our words.
    own = patch("ctxext.evals.words.find_spec", lambda name: None)
    with lm_eval_ruler(tokenizer) as modules, own, tempfile.TemporaryDirectory() as folder:
        nvidia_words.cache_clear()
        common = importlib.import_module("lm_eval.tasks.ruler.common_utils")
        for name in names:
            samples = our_samples(name, prompter, haystack, Path(folder))
            mine = ours(samples, prompter)
            with redirect_stdout(io.StringIO()):
                theirs = of_lm_eval(name, modules, tokenizer)
            alike = {str(wording(name, one.prompt.rstrip())) for one in mine + theirs}
            most = max(one.tokens for one in theirs), max(one.tokens for one in mine)
            found.append(Compared(name, len(alike) == 1, most, *scored_otherwise(name, samples, common)))
    nvidia_words.cache_clear()
    return found


def rows(found: list[Compared]) -> Iterator[Row]:
    n = f"{len(found)} tasks"
    yield Row(
        "RULER: tasks that lm-eval words otherwise [3]", sum(not one.worded_alike for one in found), None, "lm-eval", n
    )
    yield Row("RULER: differences without a known reason", sum(one.unexplained for one in found), 0, "lm-eval", n)
    for title, bar, of in (
        (
            "RULER: responses to the same samples that lm-eval scores otherwise, without qa_1",
            0,
            [one for one in found if one.task != "qa_1"],
        ),
        ("RULER: the same for qa_1 [4]", None, [one for one in found if one.task == "qa_1"]),
    ):
        total = sum(one.responses for one in of)
        yield Row(title, sum(one.scored_otherwise for one in of), bar, "lm-eval", f"{total} responses")


def tasks(tiny: bool = False) -> list[str]:
    return ["niah_multikey_3", "cwe", "fwe", "qa_1"] if tiny else list(RULER)
