"""The documents of our lm-eval tasks, and their scores by length.

lm-eval calls these functions with its --model_args and --metadata together.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from transformers import AutoConfig, AutoTokenizer

from ctxext.assets import PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, Sample, make_task
from ctxext.evals.targets import known_lengths

# Tokens for a generated answer, as in ctxext_retrieval_template.
ANSWER_TOKENS = 96


class ScoresByLength(ConfigurableTask):
    """A task with a score for each length."""

    def __init__(self, config: dict[str, Any]) -> None:
        # lm-eval leaves the name of this class in the config, and its own constructor refuses it.
        super().__init__(config={name: value for name, value in config.items() if name != "class"})
        self._metrics = [_metric(length) for length in sorted(set(self.dataset["test"]["length"]))]

    @abstractmethod
    def score(self, doc: dict[str, Any], results: list[Any]) -> float:
        """The score of lm-eval's results for one document, from 0 to 1."""

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, float | None]:
        # Every document has every metric, as lm-eval gathers those of the first process from all.
        score = self.score(doc, results)
        return {name: score if name == _metric(doc["length"]) else None for name in self._metrics}

    def aggregation(self) -> dict[str, Callable[[list[float | None]], float | None]]:
        return dict.fromkeys(self._metrics, mean_of_present)

    def higher_is_better(self) -> dict[str, bool]:
        return dict.fromkeys(self._metrics, True)


class PasskeyTask(ScoresByLength):
    """Whether the number is the most likely continuation, as in greedy decoding.

    `ctxext eval` ends its prompts with the space before the number. lm-eval moves this space to the answer, so here the
    model must write it: one that begins a sentence instead is scored lower.
    """

    def score(self, doc: dict[str, Any], results: list[Any]) -> float:
        ((_, hit),) = results
        return float(hit)


class AnswerTask(ScoresByLength):
    """The score of `ctxext eval` for a generated answer."""

    def score(self, doc: dict[str, Any], results: list[Any]) -> float:
        (text,) = results
        return Sample(
            place=Place(self.config.task, doc["length"], doc["depth"], doc["trial"], 0),
            body=doc["body"],
            lead=doc["lead"],
            question="",
            references=tuple(doc["references"]),
            metric=doc["metric"],
            answer="",
            input_ids=(),
            n_prompt=0,
            answer_tokens=ANSWER_TOKENS,
            begun=True,
            rivals=tuple(doc["rivals"]),
        ).score(text)


def _metric(length: int) -> str:
    return f"acc@{length}"


def mean_of_present(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if all are (--limit left no prompt of that length)."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def passkey_documents(**metadata: Any) -> dict[str, Dataset]:
    """The prompts of `retrieval_documents`, with the answer that is scored by its likelihood."""
    return retrieval_documents(**{**metadata, "retrieval_task": "passkey", "answer_tokens": None})


def retrieval_documents(
    *,
    retrieval_task: str,
    answer_tokens: int | None = ANSWER_TOKENS,
    pretrained: str | None = None,
    tokenizer: str | None = None,
    max_seq_lengths: int | Sequence[int] | None = None,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 10,
    seed: int = 0,
    haystack: str | os.PathLike[str] = PERSUASION,
    original_max_position_embeddings: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **_: Any,
) -> dict[str, Dataset]:
    """Prompts of exactly `max_seq_lengths` tokens, answer and special tokens included, `trials` at every depth.

    Args:
        retrieval_task: a task of `ctxext eval`, in style "base".
        answer_tokens: left for the answer; None for those of the right answer.
        max_seq_lengths: default: 1, 2 and 4 times the trained length of `pretrained`, and further doublings up to its
            extended length.
        depths: of the number in the text, 0 (start) to 1 (just before the question).
        haystack: a file of natural text.

    Raises:
        ValueError: neither `tokenizer` nor `pretrained` is given, or no lengths and no `pretrained`.
    """
    name = tokenizer or pretrained
    if name is None or (max_seq_lengths is None and pretrained is None):
        raise ValueError(
            f"ctxext_{retrieval_task} sizes its prompts in tokens, so it needs the model: pass metadata such as "
            '{"pretrained": PATH}, or {"tokenizer": PATH, "max_seq_lengths": [4096, 8192]}.'
        )
    if max_seq_lengths is None:
        assert pretrained is not None
        config = AutoConfig.from_pretrained(pretrained, revision=revision, trust_remote_code=trust_remote_code)
        known, reach = known_lengths(config)
        trained = original_max_position_embeddings or known
        max_seq_lengths = [trained, 2 * trained, 4 * trained]
        while 2 * max_seq_lengths[-1] <= reach:
            max_seq_lengths.append(2 * max_seq_lengths[-1])
    lengths = [max_seq_lengths] if isinstance(max_seq_lengths, int) else list(max_seq_lengths)
    prompter = Prompter(
        AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code),
        "base",
        answer_tokens,
    )
    text = Haystack.from_file(Path(haystack), prompter.tokenizer, at_least=max(lengths))
    rows, task = [], make_task(retrieval_task)
    for turn, (trial, depth) in enumerate(product(range(trials), depths if task.uses_depth else (None,))):
        # lm-eval deals the documents to the processes in turn, and --limit cuts from the end. Rotate the lengths, so
        # that all processes get long prompts, and a small limit leaves some of each length.
        first = turn % len(lengths)
        for length in (*lengths[first:], *lengths[:first]):
            sample = task.sample(Place(task.name, length, depth, trial, seed), prompter, text)
            rows.append(
                {
                    "body": sample.body,
                    "lead": sample.lead.strip(),  # lm-eval puts a space, or a new turn of the chat, before it
                    "answer": f" {sample.answer.lstrip()}",
                    "length": length,
                    "depth": depth,
                    "trial": trial,
                    "references": list(sample.references),
                    "rivals": list(sample.rivals),
                    "metric": sample.metric,
                }
            )
    return {"test": Dataset.from_list(rows)}


def novel_documents(*, chapters_per_document: int = 1, **_: Any) -> dict[str, Dataset]:
    """Jane Austen's "Persuasion", 24 chapters, with `chapters_per_document`."""
    chapters = re.split(r"^(?=Chapter \d+$)", PERSUASION.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    starts = range(0, len(chapters), chapters_per_document)
    texts = ["".join(chapters[start : start + chapters_per_document]).strip() for start in starts]
    return {"test": Dataset.from_list([{"text": text} for text in texts])}
