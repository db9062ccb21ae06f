"""HELMET's synthetic recall: three tasks of RULER and JSON key-value retrieval. Yen et al. (2024), arXiv:2410.02694.

Prompts, their cut, the choice of samples and the scores are those of github.com/princeton-nlp/HELMET at commit
4526dfbdc512bd9ff721da336bff4e3e75ecfd27 (MIT), without chat template as in its configs. The samples are those of its
files, and a length is that of a file. In style "chat" the answer is begun for the model, which that code leaves to an
option, and there is no system message.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import (
    DATA_TASKS,
    Place,
    RetrievalTask,
    Sample,
    Scene,
    fingerprint,
    reading,
    register_metric,
    written,
)

SHOTS, SEED = 2, 42  # demonstrations of json_kv; what the samples are drawn with


class Recall(NamedTuple):
    """One of its tasks: the file of a length, the prompt, the answer's beginning and limit in tokens, and the score."""

    file: str
    prompt: str
    lead: str
    max_new_tokens: int
    metric: str


_ONE = (
    "A special magic {type_needle_v} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {type_needle_v} afterwards.\n{context}\n"
    "What is the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
_SEVERAL = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
_LEAD = "The special magic {type_needle_v} for {query} mentioned in the provided text "
_KEYS = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n"
    "{demos}Key: {question}"
)
# How many keys the JSON object of each length has.
KEYS = {8192: 105, 16_384: 220, 32_768: 440, 65_536: 900, 131_072: 1800}
TABLE = {
    "helmet_niah_mk_2": Recall("ruler/niah_multikey_2/validation_{length}.jsonl", _ONE, _LEAD + "is", 50, "all"),
    "helmet_niah_mk_3": Recall("ruler/niah_multikey_3/validation_{length}.jsonl", _ONE, _LEAD + "is", 100, "all"),
    "helmet_niah_mv": Recall("ruler/niah_multivalue/validation_{length}.jsonl", _SEVERAL, _LEAD + "are", 50, "all"),
    "helmet_json_kv": Recall("json_kv/test_k{keys}_dep6.jsonl", _KEYS, "Corresponding value:", 100, "substring"),
}
HELMET = tuple(TABLE)


@dataclass(frozen=True, kw_only=True)
class HelmetRecall(RetrievalTask):
    """One of HELMET's recall tasks.

    Attributes:
        data: the folder `data` of HELMET, from its scripts/download_data.sh.
    """

    uses_depth: ClassVar[bool] = False

    name: str  # type: ignore[misc]  # an instance's: one class has several tasks
    data: str | None = None

    def path(self, length: int) -> Path:
        """The file of a length. Raises ValueError if `data` is not set, or if there is none of that length."""
        if self.data is None:
            raise ValueError(f"{self.name} needs HELMET's files. Pass its folder `data` as data.")
        if length not in KEYS:
            raise ValueError(f"HELMET has files for {', '.join(map(str, KEYS))} tokens, got {length}.")
        return Path(self.data) / TABLE[self.name].file.format(length=length, keys=KEYS[length])

    def settings(self) -> dict[str, Any]:
        """With the names and sizes of the data files instead of their path."""
        paths = [] if self.data is None else [path for path in map(self.path, KEYS) if path.is_file()]
        return {"name": self.name, "data": fingerprint([(path.name, path.stat().st_size) for path in paths])}

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        path, task = self.path(place.length), TABLE[self.name]
        rows = _rows(path)
        if place.trial >= len(rows):
            raise ValueError(f"{path} has {len(rows)} samples, got trials={place.trial + 1}. Pass trials={len(rows)}.")
        row = {**rows[place.trial], "demos": _demonstrated(rows[place.trial])}
        lead = "\n" + task.lead.format(**row)
        room = task.max_new_tokens
        if prompter.style == "thinking":
            room = max(room, prompter.answer_tokens or 0)
        excess = len(prompter.encode(prompter.prompt(task.prompt.format(**row), lead))) + room - place.length
        if excess > 0:
            read = prompter.tokenizer(row["context"], return_offsets_mapping=True, verbose=False)
            row["context"] = row["context"][: read["offset_mapping"][-excess][0]]
        body, answer = task.prompt.format(**row), row["answer"]
        return written(
            Scene(place, prompter, haystack),
            prompter.prompt(body, lead),
            "",
            room,
            needles=(),
            body=body,
            lead=lead,
            question=body.rpartition("\n")[2],
            references=(answer,) if isinstance(answer, str) else tuple(answer),
            metric=task.metric,
            begun=prompter.begins,
        )


def _demonstrated(row: dict[str, Any]) -> str:
    shown = [f"Key: {key}\nCorresponding value: {value}" for key, value in row.get("demos", ())[:SHOTS]]
    return "\n\n".join([*shown, ""])


@lru_cache(maxsize=8)
def _rows(path: Path) -> list[dict[str, Any]]:
    """The samples of a file in HELMET's order. Raises ValueError if it is missing or has another form."""
    from datasets import Dataset

    remedy = "Run scripts/download_data.sh of princeton-nlp/HELMET, and pass its folder `data`."
    with reading(path, "samples of HELMET", remedy):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [{**row, "answer": row["answer"] if "answer" in row else row["outputs"]} for row in rows]
        order = Dataset.from_dict({"row": range(len(rows))}).shuffle(seed=SEED)["row"]
        return [rows[k] for k in order if rows[k]["context"]]


@register_metric("substring")
def _substring(sample: Sample, text: str) -> float:
    """Whether the answer contains a reference, without punctuation, case and articles."""
    return float(any(_plain(reference) in _plain(text) for reference in sample.references))


def _plain(text: str) -> str:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


for _name in HELMET:
    DATA_TASKS[_name] = partial(HelmetRecall, name=_name)
