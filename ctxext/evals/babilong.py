"""BABILong: facts of bAbI's tasks among the sentences of books. Kuratov et al. (2024), arXiv:2406.10149.

Prompts, answers and scores are those of github.com/booydar/babilong at the commit named in `babilong.toml`, and so are
the samples: the data are the files of RMT-team/babilong on the hub. A length is that of a file; the tokens of a prompt
differ from it by tokenizer. Differences that remain: --style chooses the prompt form, and a thinking model has room
for its thoughts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from ctxext.evals.haystack import Haystack
from ctxext.evals.languages import read_table
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

_PROMPTS = read_table("babilong.toml")
BABILONG = tuple(f"babilong_{name}" for name in _PROMPTS)
TEMPLATE = "{instruction}\n\n{examples}\n\n{post_prompt}\n\n<context>\n{context}\n</context>\n\nQuestion: {question}"
MAX_NEW_TOKENS = 20


@dataclass(frozen=True, kw_only=True)
class BabiLong(RetrievalTask):
    """One of BABILong's tasks.

    Attributes:
        data: a folder with the data set's files, such as `qa1/4k.json` in it.
    """

    uses_depth: ClassVar[bool] = False

    name: str  # type: ignore[misc]  # an instance's: one class has several tasks
    data: str | None = None

    @property
    def folder(self) -> Path:
        if self.data is None:
            raise ValueError(
                f"{self.name} needs BABILong's files. Pass the folder `data` of RMT-team/babilong as data."
            )
        return Path(self.data) / self.name.removeprefix("babilong_")

    def settings(self) -> dict[str, Any]:
        """With the names and sizes of the data files instead of their path."""
        held = (
            None if self.data is None else [(path.name, path.stat().st_size) for path in sorted(self.folder.glob("*"))]
        )
        return {"name": self.name, "data": held and fingerprint(held)}

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        path = self.folder / f"{named(place.length)}.json"
        rows = _rows(path)
        if place.trial >= len(rows):
            raise ValueError(f"{path} has {len(rows)} samples, got trials={place.trial + 1}. Pass trials={len(rows)}.")
        row, prompt = rows[place.trial], _PROMPTS[self.name.removeprefix("babilong_")]
        parts = {part: prompt[part] for part in ("instruction", "examples", "post_prompt")}
        body = TEMPLATE.format(context=row["input"].strip(), question=row["question"], **parts).strip()
        room = max(MAX_NEW_TOKENS, prompter.room("", row["target"])) if prompter.style == "thinking" else MAX_NEW_TOKENS
        return written(
            Scene(place, prompter, haystack),
            prompter.asked(body),
            "",
            room,
            needles=(),
            body=body,
            lead="",
            question=row["question"],
            references=(row["target"],),
            rivals=tuple(label for label in prompt["labels"] if label != row["target"]),
            metric="babilong",
            begun=prompter.begins,
        )


def named(length: int) -> str:
    """A length as the data set's files have it: 4k, 128k, 1M. Raises ValueError if it is not such a length."""
    thousands, rest = divmod(length, 1024)
    if rest or not thousands:
        raise ValueError(f"BABILong has files for lengths such as 4k (4,096 tokens), got {length:,}.")
    return f"{thousands // 1024}M" if thousands % 1024 == 0 else f"{thousands}k"


@lru_cache(maxsize=8)
def _rows(path: Path) -> list[dict[str, str]]:
    """The samples of a file: a list, or one a line. Raises ValueError if it is missing or has another form."""
    with reading(path, "samples of BABILong", "Download RMT-team/babilong, and pass its folder `data`."):
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        return [{part: str(row[part]) for part in ("input", "question", "target")} for row in rows]


@register_metric("babilong")
def only_label(sample: Sample, text: str) -> float:
    """Whether the target is the only answer that the first sentence names, other than those in the question."""
    said = text.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    target, *others = (label.lower() for label in (*sample.references, *sample.rivals))
    named = {label for label in (target, *others) if label in said and label not in sample.question.lower()}
    return float(named == {target})


for _name in BABILONG:
    DATA_TASKS[_name] = partial(BabiLong, name=_name)
