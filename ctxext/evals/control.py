"""The control of a retrieval run: does the baseline do the task within its trained length, asked in this form?

A model that cannot find a number in a short text says nothing about context extension, whatever its positions are.
So before anything is compared, the baseline answers a few prompts with the same text at a short length. Where it fails,
the other forms of asking are tried, and the first one in which it does every task is used for the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter, Style
from ctxext.evals.samples import RetrievalTask, fingerprint
from ctxext.evals.statistics import in_percent
from ctxext.evals.targets import LiveModel, Variant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The share that the baseline has to find.
ENOUGH = 0.9
# Tokens of a prompt at most, and samples: this many trials at each depth.
LENGTH, TRIALS, DEPTHS = 1024, 2, (0.0, 0.25, 0.5, 0.75, 1.0)
# Tokens for an answer in the model's own words.
OWN_WORDS = 64


@dataclass(frozen=True)
class Form:
    """How a model is asked: in a style, and with an answer that is begun in the needle's own words or is all its own.

    Attributes:
        style, answer_tokens: of `Prompter`.
    """

    style: Style
    answer_tokens: int | None = None

    def prompter(self, tokenizer: PreTrainedTokenizerBase) -> Prompter:
        return Prompter(tokenizer, self.style, self.answer_tokens)

    def __str__(self) -> str:
        begun = self.answer_tokens is None or self.style == "base"
        return f"{self.style}, {'the answer begun for the model' if begun else 'in its own words'}"


def other_forms(prompter: Prompter, *, begun: bool = False) -> list[Form]:
    """The forms to try where that of `prompter` does not work.

    Args:
        begun: only those whose answers teacher forcing can score.
    """
    forms = [Form("base")]
    if getattr(prompter.tokenizer, "chat_template", None):
        forms = [Form("chat"), *forms, *([] if begun else [Form("chat", OWN_WORDS)])]
    return [form for form in forms if form != Form(prompter.style, prompter.answer_tokens)]


@dataclass(frozen=True)
class Control:
    """What a control found.

    Attributes:
        form: the one to ask in.
        length: of the prompts, in tokens.
        found: by form and task, the share that the baseline finds; forms in the order in which they were tried.
        key: of all that it depends on.
    """

    form: Form
    length: int
    found: dict[str, dict[str, float]]
    key: str

    @property
    def failing(self) -> dict[str, float]:
        """The tasks that the baseline does not do in the form that is used, with their shares."""
        return {task: share for task, share in self.found.get(str(self.form), {}).items() if share < ENOUGH}

    def describe(self) -> dict[str, Any]:
        """For the header of a results file."""
        return {**asdict(self), "used": str(self.form)}

    @classmethod
    def of_header(cls, about: Mapping[str, Any]) -> Control | None:
        """The control that `describe` wrote to a header; None where there was none."""
        known = about.get("control")
        return known and cls(Form(**known["form"]), known["length"], known["found"], known["key"])

    def said(self) -> str:
        """For people; "" where the first form works."""
        first, *_ = [*self.found, str(self.form)]
        if first == str(self.form) and not self.failing:
            return ""
        tried = "; ".join(f"{form}: {_shares(found)}" for form, found in self.found.items())
        verdict = (
            "In no form does it do all of the tasks, so retrieval says little about an extension; asked here: "
            f"{self.form}."
            if self.failing
            else f"Asked here: {self.form}."
        )
        return (
            f"Within {self.length:,} tokens the baseline does not do what is measured in the form first tried "
            f"({tried}). {verdict}"
        )


def _shares(found: Mapping[str, float]) -> str:
    return ", ".join(f"{task} {in_percent(share)}%" for task, share in found.items())


def controlled(tasks: Sequence[RetrievalTask]) -> list[RetrievalTask]:
    """The tasks that a model either does within its trained length or not at all: those that look something up."""
    return [task for task in tasks if task.looks_up]


def control(
    target: LiveModel,
    tasks: Sequence[RetrievalTask],
    haystack: Haystack,
    *,
    longest: int,
    others: Sequence[Form],
    seed: int = 0,
    known: Control | None = None,
) -> Control:
    """Find out in which form the baseline does `tasks`.

    Args:
        target: the model; its prompter has the form that is tried first.
        longest: tokens of a prompt at most; the trained length ends it as well.
        others: the forms to try after that of `target`.
        known: what the results file has of an earlier run. It holds where it depends on the same; otherwise what it
            found of other tasks in the same form is kept.

    A control that is interrupted is repeated in full: it is a function of its arguments, and answers ten prompts of at
    most `LENGTH` tokens a task and form, of which each five share their beginning.
    """
    tasks, prompter = controlled(tasks), target.prompter
    length = min(LENGTH, target.about["trained_length"], longest)
    first = Form(prompter.style, prompter.answer_tokens)
    settings = {task.name: task.settings() for task in tasks}
    key = fingerprint(target.fingerprint, haystack.fingerprint, settings, length, seed)
    if known is not None and (known.form, known.key) == (first, key):
        return known
    found = {str(first): dict(known.found.get(str(first), {}))} if known is not None else {}
    for form in (first, *others):
        measured = {
            task.name: share
            for task in tasks
            if (share := found_in(target.asking(form.prompter(prompter.tokenizer)), task, haystack, length, seed))
            is not None
        }
        found[str(form)] = {**found.get(str(form), {}), **measured}
        if all(share >= ENOUGH for share in measured.values()):
            return Control(form, length, found, key)
    # No form works: the first is what was asked for.
    return Control(first, length, found, key)


def found_in(target: LiveModel, task: RetrievalTask, haystack: Haystack, length: int, seed: int) -> float | None:
    """The share that the baseline finds; None where no prompt of this length can be made."""
    places = task.places([length], DEPTHS, TRIALS, seed)
    try:
        samples = [task.sample(place, target.prompter, haystack) for place in places]
    except ValueError:
        return None
    each = len(samples) // TRIALS
    rows = [samples[k : k + each] for k in range(0, len(samples), each)]
    with target.applied(Variant()):
        outcomes = [one for part in target.outcomes([[row] for row in rows], False) for one in part]
    return sum(record["score"] for _, record in outcomes) / len(outcomes)
