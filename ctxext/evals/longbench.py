"""LongBench v2: multiple choice about long documents. Bai et al. (2024), arXiv:2412.15204.

The prompt, its cut and the score are those of github.com/THUDM/LongBench at commit
2e00731f8d0bff23dc4325161044d0ed8af94c1e (MIT), without chain of thought: a prompt of more than 120,000 tokens loses its
middle. Differences that remain: answers are greedy, where that code draws at a temperature of 0.1; a length below 128k
cuts prompts to it; and a thinking model has room for its thoughts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import DATA_TASKS, Place, RetrievalTask, Sample, Scene, reading, register_metric, written

TEMPLATE = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
MAX_PROMPT, MAX_NEW_TOKENS = 120_000, 128
PARTS = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
# The parts of its table: the field, and its values.
SUBSETS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(RetrievalTask):
    """Its questions, in the order of the file.

    Attributes:
        data: `data.json` of THUDM/LongBench-v2.
    """

    name: ClassVar[str] = "longbench_v2"
    uses_depth: ClassVar[bool] = False

    data: str | None = None

    def settings(self) -> dict[str, Any]:
        """With a hash of the file instead of its path."""
        held = self.data and blake2b(Path(self.data).read_bytes(), digest_size=8).hexdigest()
        return {"data": held}

    def sample(self, place: Place, prompter: Prompter, haystack: Haystack) -> Sample:
        if self.data is None:
            raise ValueError("longbench_v2 needs its questions. Pass data.json of THUDM/LongBench-v2 as data.")
        rows = read_questions(self.data)
        if place.trial >= len(rows):
            raise ValueError(
                f"{self.data} has {len(rows)} questions, got trials={place.trial + 1}. Pass trials={len(rows)}."
            )
        row = rows[place.trial]
        body = TEMPLATE.format(**{part: row[part].strip() for part in PARTS})
        room = max(MAX_NEW_TOKENS, prompter.answer_tokens or 0) if prompter.style == "thinking" else MAX_NEW_TOKENS
        around = len(prompter.encode(prompter.asked("")))
        limit = min(MAX_PROMPT, place.length - room - around)
        return written(
            Scene(place, prompter, haystack),
            prompter.asked(cut := without_middle(prompter, body, limit)),
            "",
            room,
            needles=(),
            body=cut,
            lead="",
            question=row["question"].strip(),
            references=(row["answer"],),
            metric="longbench_v2",
            begun=prompter.begins,
        )


def without_middle(prompter: Prompter, text: str, most: int) -> str:
    """The text, or if it has more than `most` tokens its first and last `most // 2`."""
    ids = prompter.tokenizer(text, verbose=False)["input_ids"]  # BOS counts, as in LongBench's code
    if len(ids) <= most:
        return text
    return str(prompter.tokenizer.decode([*ids[: most // 2], *ids[-(most // 2) :]], skip_special_tokens=True))


@lru_cache(maxsize=2)
def read_questions(path: str) -> list[dict[str, str]]:
    """The questions of a file. Raises ValueError if it is missing or has another form."""
    fields = (*PARTS, "answer", *SUBSETS)
    with reading(path, "questions of LongBench v2", "Pass data.json of THUDM/LongBench-v2."):
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        return [{name: str(row[name]) for name in fields} for row in rows]


@register_metric("longbench_v2")
def chosen_letter(sample: Sample, text: str) -> float:
    """Whether "The correct answer is (X)", or without brackets, names the right choice."""
    said = text.strip().replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if (found := re.search(pattern, said)) is not None:
            return float(found[1] == sample.references[0])
    return 0.0


DATA_TASKS[LongBenchV2.name] = LongBenchV2
