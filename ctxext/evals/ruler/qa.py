"""Question answering: documents that answer a question, among others that do not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain, cycle, islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from ctxext.evals.ruler.fitting import GAP, Draft, RulerTask, tails
from ctxext.evals.ruler.invented import Story, invent
from ctxext.evals.samples import Place, Scene


@dataclass(frozen=True)
class Question:
    """A question about the documents of a `Corpus`, which are given by their indices.

    Attributes:
        gold: the documents that answer it.
        context, more: documents about the same things: NVIDIA's `context`, always in the prompt, and its
            `more_context`, the first to be added.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    context: tuple[int, ...]
    more: tuple[int, ...] = ()

    def answered_by(self, document: str) -> bool:
        return any(answer.lower() in document.lower() for answer in self.answers)


@dataclass(frozen=True)
class Corpus:
    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    def story(self, question: Question) -> Story:
        return Story(question.text, question.answers, tuple(self.documents[k] for k in question.gold))

    @cached_property
    def askable(self) -> list[Question]:
        """Questions whose answer can be found in the text. "no" cannot: it would be found in "know"."""
        return [
            question
            for question in self.questions
            if not {answer.lower() for answer in question.answers} & {"", "yes", "no"}
            and any(question.answered_by(self.documents[k]) for k in question.gold)
        ]


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(RulerTask):
    """What do these documents say about a question? RULER, section 3.4.

    Attributes:
        hops: without `data`, the documents that must be read one after the other.
        data: a JSON file with questions: a dev file of SQuAD (v1 or v2) or of HotpotQA (distractor), or
            {"documents": [text, …], "questions": [{"question": …, "answers": [text, …], "documents": [index, …]}, …]}.
            None: invented people and towns.
    """

    tokens_to_generate: ClassVar[int] = 32
    metric: ClassVar[str] = "part"
    template: ClassVar[str] = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nThe following are given documents.\n\n{context}\n\n"
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nQuestion: {query}"
    )
    lead: ClassVar[str] = " Answer:"

    hops: int = 1
    data: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hops not in (1, 2):
            raise ValueError(f"hops must be 1 or 2, got {self.hops}.")
        if self.data is not None and not Path(self.data).is_file():
            raise FileNotFoundError(
                f"data of {self.name}: {self.data} does not exist. Pass the JSON file of SQuAD or HotpotQA."
            )
        if not self.exact and self.data is None:
            raise ValueError(
                f"{self.name} with compat='nvidia' needs NVIDIA's documents, got data=None. "
                "Pass the dev file of SQuAD (qa_1) or of HotpotQA, distractor (qa_2), as data."
            )

    def settings(self) -> dict[str, Any]:
        """With a hash of the data file instead of its path."""
        held = None if self.data is None else blake2b(Path(self.data).read_bytes(), digest_size=8).hexdigest()
        return {**super().settings(), "data": held}

    def fewest(self) -> int:
        return 0

    def step(self, length: int) -> int:
        return 10

    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """`units` counts documents; in mode "exact" without the gold ones and the first, whose beginning is cut off."""
        fills: tuple[tuple[str, ...], ...] = ()
        if self.exact:
            story, distractors = invent(rng, self.hops) if self.data is None else self._read(scene, rng)
            others = list(islice(distractors, units + 12))
            documents = [*story.documents, *others[:units]]
            documents = [GAP, *rng.sample(documents, len(documents))]
            # The first document is the end of two others in a row.
            fills = tuple(tails(f"{one}\n{other}") for one, other in zip(others[units::2], others[units + 1 :: 2]))
        else:
            story, documents = self._read_as_nvidia(scene, rng, units)
        context = "\n\n".join(f"Document {k}:\n{document}" for k, document in enumerate(documents, 1))
        return Draft.of(
            self.template,
            self.lead,
            context,
            {"query": story.question},
            references=story.answers,
            needles=story.documents,
            fills=fills,
        )

    def _read(self, scene: Scene, rng: Random) -> tuple[Story, Iterator[str]]:
        """A question, and endless documents that do not answer it, related ones first."""
        corpus = read_corpus(str(self.data))
        # The same questions at every length.
        place = Place(self.name, 0, None, 0, scene.place.seed)
        questions = place.rng("questions").sample(corpus.askable, len(corpus.askable))
        asked = questions[scene.place.trial % len(questions)]
        near = [k for k in (*asked.context, *asked.more) if k not in asked.gold]
        far = sorted(set(range(len(corpus.documents))) - {*asked.gold, *near})
        order = [*rng.sample(near, len(near)), *rng.sample(far, len(far))]
        others = (corpus.documents[k] for k in order if not asked.answered_by(corpus.documents[k]))
        if (first := next(others, None)) is None:
            raise ValueError(f"{self.data} has no document without the answer to {asked.text!r}. Pass a larger file.")
        return corpus.story(asked), cycle(chain([first], others))

    def _read_as_nvidia(self, scene: Scene, rng: Random, units: int) -> tuple[Story, list[str]]:
        """The question of this trial, in the file's order, and `units` documents."""
        corpus = read_corpus(str(self.data))
        n = len(corpus.documents)
        asked = corpus.questions[scene.place.trial % len(corpus.questions)]
        if units < n:
            others = [k for k in range(n) if k not in {*asked.context, *asked.more}]
            wanted = max(0, units - len(asked.context))
            first = rng.sample(asked.more, min(wanted, len(asked.more)))
            order = [*asked.context, *first, *rng.sample(others, wanted - len(first))]
        else:
            order = [k % n for k in range(units)]
        return corpus.story(asked), [corpus.documents[k] for k in rng.sample(order, len(order))]


@lru_cache(maxsize=4)
def read_corpus(path: str) -> Corpus:
    """The documents and questions of a JSON file: SQuAD's, HotpotQA's or ours.

    Raises:
        ValueError: the file has another format, or no question that its documents answer.
        OSError: it cannot be read.
    """
    remedy = (
        "Pass a dev file of SQuAD or HotpotQA (distractor), or "
        '{"documents": [text, …], "questions": [{"question": …, "answers": [text, …], "documents": [index, …]}, …]}.'
    )
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        read = _hotpot if isinstance(data, list) else _squad if "data" in data else _ours
        corpus = read(data)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} holds no questions ({type(error).__name__}: {error}). {remedy}") from None
    if not corpus.askable:
        raise ValueError(f"{path} has {len(corpus.questions)} questions, none answered by its documents. {remedy}")
    return corpus


def _squad(data: Any) -> Corpus:
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data["data"]]
    documents = sorted({text for article in articles for text in article})
    index = {text: k for k, text in enumerate(documents)}
    questions = []
    for article, texts in zip(data["data"], articles):
        for paragraph in article["paragraphs"]:
            here = index[paragraph["context"]]
            more = tuple(index[text] for text in texts if index[text] != here)
            questions += [
                Question(asked["question"], _texts(a["text"] for a in asked["answers"]), (here,), (here,), more)
                for asked in paragraph["qas"]
                if not asked.get("is_impossible", False)
            ]
    return Corpus(tuple(documents), tuple(questions))


def _hotpot(data: Any) -> Corpus:
    def text(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents = sorted({text(*entry) for asked in data for entry in asked["context"]})
    index = {text: k for k, text in enumerate(documents)}
    questions = []
    for asked in data:
        titles = {title for title, _ in asked["supporting_facts"]}
        context = [index[text(*entry)] for entry in asked["context"]]
        gold = tuple(k for k, (title, _) in zip(context, asked["context"]) if title in titles)
        questions.append(Question(asked["question"], _texts([asked["answer"]]), gold, tuple(context)))
    return Corpus(tuple(documents), tuple(questions))


def _ours(data: Any) -> Corpus:
    documents = _texts(data["documents"])
    questions = []
    for asked in data["questions"]:
        gold = tuple(asked["documents"])
        if not gold or not all(k in range(len(documents)) for k in gold):
            raise IndexError(f"question {asked['question']!r} names documents {list(gold)} of {len(documents)}")
        questions.append(Question(asked["question"], _texts(asked["answers"]), gold, gold))
    return Corpus(documents, tuple(questions))


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    """The values without repeats, in order."""
    texts = tuple(dict.fromkeys(values))
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"expected texts, got {texts}")
    return texts
