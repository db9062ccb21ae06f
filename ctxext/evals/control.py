"""The control of a retrieval run: whether the baseline solves the tasks within its trained length in this prompt form.

A model that cannot find a number in a short text tells nothing about context extension. So before any comparison, the
baseline answers a few short prompts with the same text. If it fails, other prompt forms are tried, and the first in
which it solves every task is used for the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ctxext.evals.haystack import Haystack
from ctxext.evals.prompts import Prompter, Style
from ctxext.evals.samples import RetrievalTask, fingerprint
from ctxext.evals.statistics import in_percent
from ctxext.evals.targets import LocalModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The accuracy that the baseline must reach.
ENOUGH = 0.9
# The maximum prompt length in tokens, and trials per depth.
LENGTH, TRIALS, DEPTHS = 1024, 2, (0.0, 0.25, 0.5, 0.75, 1.0)
# Tokens for a free-form answer.
OWN_WORDS = 64


@dataclass(frozen=True)
class Form:
    """A prompt form: the style, and whether the prompt begins the answer in the needle's words.

    Attributes:
        style, answer_tokens: as in `Prompter`.
    """

    style: Style
    answer_tokens: int | None = None

    def prompter(self, tokenizer: PreTrainedTokenizerBase) -> Prompter:
        return Prompter(tokenizer, self.style, self.answer_tokens)

    def __str__(self) -> str:
        begun = self.answer_tokens is None or self.style == "base"
        return f"{self.style}, {'the answer begun for the model' if begun else 'in its own words'}"


def other_forms(prompter: Prompter, *, begun: bool = False) -> list[Form]:
    """The forms to try if that of `prompter` fails.

    Args:
        begun: only forms whose answers can be scored by teacher forcing.
    """
    forms = [Form("base")]
    if getattr(prompter.tokenizer, "chat_template", None):
        forms = [Form("chat"), *forms, *([] if begun else [Form("chat", OWN_WORDS)])]
    return [form for form in forms if form != Form(prompter.style, prompter.answer_tokens)]


@dataclass(frozen=True)
class Control:
    """The result of a control.

    Attributes:
        form: the form to use.
        length: the prompt length in tokens.
        found: the baseline's accuracy by form and task; forms in the order tried.
        key: a hash of everything it depends on.
    """

    form: Form
    length: int
    found: dict[str, dict[str, float]]
    key: str

    @property
    def failing(self) -> dict[str, float]:
        """The tasks that the baseline fails in the form used, with its accuracy."""
        return {task: share for task, share in self.found.get(str(self.form), {}).items() if share < ENOUGH}

    def describe(self) -> dict[str, Any]:
        """For the header of a results file."""
        return {**asdict(self), "used": str(self.form)}

    @classmethod
    def of_header(cls, about: Mapping[str, Any]) -> Control | None:
        """The control that `describe` wrote to a header, or None."""
        known = about.get("control")
        return known and cls(Form(**known["form"]), known["length"], known["found"], known["key"])

    def said(self) -> str:
        """The result as text; "" if the first form works."""
        first, *_ = [*self.found, str(self.form)]
        if first == str(self.form) and not self.failing:
            return ""
        tried = "; ".join(
            f"{form}: {', '.join(f'{task} {in_percent(share)}%' for task, share in found.items())}"
            for form, found in self.found.items()
        )
        within = f"Within {self.length:,} tokens the baseline fails"
        if not self.failing:
            failed = ", ".join(task for task, share in self.found[first].items() if share < ENOUGH)
            return f"{within} {failed} in the first prompt form ({tried}). Using instead: {self.form}."
        failing, others = ", ".join(self.failing), len(self.found) > 1
        counts = ", ".join(task for task in self.found[str(self.form)] if task not in self.failing)
        verdict = "So retrieval says little about an extension, and is not counted."
        if counts:
            verdict = f"Not counted: {failing}, which says little about an extension. Counted: {counts}."
        where = " in the first prompt form, and no other form solves every task" if others else ""
        return f"{within} {failing}{where} ({tried}). {verdict} Using: {self.form}."


def control(
    target: LocalModel,
    tasks: Sequence[RetrievalTask],
    haystack: Haystack,
    *,
    longest: int,
    others: Sequence[Form],
    seed: int = 0,
    known: Control | None = None,
) -> Control:
    """Find the form in which the baseline solves `tasks`.

    Args:
        target: the model; its prompter's form is tried first.
        tasks: lookup tasks, which a model solves within its trained length or not at all.
        longest: the maximum prompt length in tokens, capped by the trained length.
        others: further forms to try.
        known: the control of an earlier run in the results file. It is reused if it depends on the same inputs;
            otherwise its results for other tasks in the same form are kept.

    An interrupted control is repeated in full. It is a function of its arguments, and answers ten prompts of at most
    `LENGTH` tokens per task and form, in two groups with a common prefix.
    """
    prompter = target.prompter
    length = min(LENGTH, target.about["trained_length"], longest)
    first = Form(prompter.style, prompter.answer_tokens)
    settings = {task.name: task.settings() for task in tasks}
    key = fingerprint(target.fingerprint, haystack.fingerprint, settings, length, seed)
    if known is not None and (known.form, known.key) == (first, key):
        return known
    found = {str(first): dict(known.found.get(str(first), {}))} if known is not None else {}
    for form in (first, *others):
        asked = target.asking(form.prompter(prompter.tokenizer))
        shares = {task.name: found_in(asked, task, haystack, length, seed) for task in tasks}
        measured = {name: share for name, share in shares.items() if share is not None}
        found[str(form)] = found.get(str(form), {}) | measured
        if all(share >= ENOUGH for share in measured.values()):
            return Control(form, length, found, key)
    # No form works: keep the requested one.
    return Control(first, length, found, key)


def found_in(target: LocalModel, task: RetrievalTask, haystack: Haystack, length: int, seed: int) -> float | None:
    """The baseline's accuracy; None if no prompt of this length can be made."""
    places = task.places([length], DEPTHS, TRIALS, seed)
    try:
        samples = [task.sample(place, target.prompter, haystack) for place in places]
    except ValueError:
        return None
    each = len(samples) // TRIALS
    batches = [[samples[k : k + each]] for k in range(0, len(samples), each)]
    outcomes = [one for part in target.outcomes(batches, generate=False) for one in part]
    return sum(record["score"] for _, record in outcomes) / len(outcomes)
