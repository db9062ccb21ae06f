"""Question answering: the documents that answer a question, among others that do not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain, cycle, islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from ctxext.evals.ruler.fitting import GAP, Draft, RulerTask, Scene, tails
from ctxext.evals.ruler.invented import Story, invent
from ctxext.evals.samples import Place


@dataclass(frozen=True)
class Question:
    """A question about the documents of a `Corpus`, which are given by their indices.

    Attributes:
        gold: the documents that answer it; `near` are others about the same things.
        context, more: NVIDIA's `context`, always in the prompt, and its `more_context`, the first to be added.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    context: tuple[int, ...]
    more: tuple[int, ...]

    @property
    def near(self) -> list[int]:
        return [k for k in (*self.context, *self.more) if k not in self.gold]

    def story(self, corpus: Corpus) -> Story:
        return Story(self.text, self.answers, tuple(corpus.documents[k] for k in self.gold))

    def answered_by(self, document: str) -> bool:
        return any(answer.lower() in document.lower() for answer in self.answers)


@dataclass(frozen=True)
class Corpus:
    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    @cached_property
    def askable(self) -> list[Question]:
        """Questions whose answer can be found in the text: "no" would be found in "know"."""
        return [
            question
            for question in self.questions
            if not {answer.lower() for answer in question.answers} & {"", "yes", "no"}
            and any(question.answered_by(self.documents[k]) for k in question.gold)
        ]


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(RulerTask):
    """What do these documents say about that? RULER, section 3.4.

    Attributes:
        hops: documents that have to be read one after the other, where no `data` are given.
        data: a JSON file with questions: a dev file of SQuAD (v1 or v2) or of HotpotQA (distractor), or
            {"documents": [text, …], "questions": [{"question": …, "answers": [text, …], "documents": [index, …]}, …]}.
            None: people and towns that do not exist.
    """

    tokens_to_generate: ClassVar[int] = 32
    metric: ClassVar[Literal["all", "part"]] = "part"
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
        if not self.exact and self.data is None:
            raise ValueError(
                f"{self.name} with compat='nvidia' needs the documents that NVIDIA has, got data=None. "
                "Pass the dev file of SQuAD (qa_1) or of HotpotQA, distractor (qa_2), as data."
            )

    def settings(self) -> dict[str, Any]:
        """With what the file holds, not where it lies."""
        held = None if self.data is None else blake2b(Path(self.data).read_bytes(), digest_size=8).hexdigest()
        return {**super().settings(), "data": held}

    def fewest(self, scene: Scene) -> int:
        return 0

    def step(self, length: int) -> int:
        return 10

    def draft(self, scene: Scene, rng: Random, units: int) -> Draft:
        """Units: documents; in mode "exact" those beside the answer's and the first, whose beginning is cut off."""
        fills: tuple[tuple[str, ...], ...] = ()
        if self.exact:
            story, distractors = invent(rng, self.hops) if self.data is None else self._read(scene, rng)
            others = list(islice(distractors, units + 12))
            documents = [*story.documents, *others[:units]]
            documents = [GAP, *rng.sample(documents, len(documents))]
            # The first document ends as two others do, one behind the other.
            fills = tuple(tails(f"{one}\n{other}") for one, other in zip(others[units::2], others[units + 1 :: 2]))
        else:
            story, documents = self._read_as_nvidia(scene, rng, units)
        context = "\n\n".join(f"Document {k}:\n{document}" for k, document in enumerate(documents, 1))
        return Draft(
            text=self.template.format(context=context, query=story.question),
            question=f"Question: {story.question}",
            lead=self.lead,
            references=story.answers,
            needles=story.documents,
            fills=fills,
        )

    def _read(self, scene: Scene, rng: Random) -> tuple[Story, Iterator[str]]:
        """A question, and documents without end that do not hold an answer to it: first those near to it."""
        corpus = read_corpus(str(self.data))
        # The same questions at every length.
        place = Place(self.name, 0, None, 0, scene.place.seed)
        questions = place.rng("questions").sample(corpus.askable, len(corpus.askable))
        asked = questions[scene.place.trial % len(questions)]
        near = rng.sample(asked.near, len(asked.near))
        far = sorted(set(range(len(corpus.documents))) - {*asked.gold, *near})
        order = [*near, *rng.sample(far, len(far))]
        others = (corpus.documents[k] for k in order if not asked.answered_by(corpus.documents[k]))
        if (first := next(others, None)) is None:
            raise ValueError(f"{self.data} has no document without the answer to {asked.text!r}. Pass a larger file.")
        return asked.story(corpus), cycle(chain([first], others))

    def _read_as_nvidia(self, scene: Scene, rng: Random, units: int) -> tuple[Story, list[str]]:
        """The question of this trial in the file's order, and as many documents as there are to be."""
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
        return asked.story(corpus), [corpus.documents[k] for k in rng.sample(order, len(order))]


@lru_cache(maxsize=4)
def read_corpus(path: str) -> Corpus:
    """The documents and questions of a JSON file: SQuAD's, HotpotQA's or ours.

    Raises:
        ValueError: the file is none of these, or has no question that its documents answer.
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
        questions.append(Question(asked["question"], _texts([asked["answer"]]), gold, tuple(context), ()))
    return Corpus(tuple(documents), tuple(questions))


def _ours(data: Any) -> Corpus:
    documents = _texts(data["documents"])
    questions = []
    for asked in data["questions"]:
        gold = tuple(asked["documents"])
        if not gold or not all(k in range(len(documents)) for k in gold):
            raise IndexError(f"question {asked['question']!r} names documents {list(gold)} of {len(documents)}")
        questions.append(Question(asked["question"], _texts(asked["answers"]), gold, gold, ()))
    return Corpus(documents, tuple(questions))


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    """Each once, in order."""
    texts = tuple(dict.fromkeys(values))
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"expected texts, got {texts}")
    return texts
