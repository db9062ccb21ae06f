"""Probes: a short text with a model's log-probabilities, extended and unextended, to test whether an extension is live.

A static extension also changes short prompts, so one short request shows whether an engine applies it. The end of a
long request shows whether it does so up to the target.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from ctxext import __version__
from ctxext.core.apply import ATTRIBUTE, apply, extension_of, restore
from ctxext.core.edit import Edit
from ctxext.core.plan import Plan
from ctxext.core.probing import in_eval_mode
from ctxext.core.rotary_module import of_label
from ctxext.encodings.rope import RopeGeometry
from ctxext.extension.method_file import PROBE
from ctxext.extension.saving import saver
from ctxext.models.context import ContextFacts, read_context
from ctxext.patches import rotary
from ctxext.utils.json_files import TOKENS, read_json, write_json
from ctxext.utils.values import are_numbers, is_count, is_number, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The Gettysburg Address (1863). Of several texts it separated the states best in 16 bits: it repeats itself at a
# distance, and models have not memorised it so well that context hardly matters.
TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those "
    "who here gave their lives that that nation might live. It is altogether fitting and proper that we should do "
    "this. But, in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this ground. The "
    "brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract."
)
MAX_TOKENS = 199
# Near the target: the last tokens of the long text, and its default and largest length. A passkey at its beginning is
# asked for at its end, as a repeated text alone hardly shows that its beginning was truncated: the passkey's tokens
# show that. `FAR_TEXT` tokens of the text follow, as tokens predicted with certainty do not show a wrong table.
FAR_TOKENS = 12
FAR_TEXT = 8
FAR_LIMIT = 16384
MAX_FAR = 2**20

State = Literal["extended", "unextended", "without_temperature"]
# What the engine's log-probabilities are compared with.
MODELS = {
    "extended": "extended model",
    "unextended": "unextended model",
    "without_temperature": "extension without its attention factor",
}
# The verdict for each state.
WORDS = {
    "extended": "applied",
    "unextended": "ignored",
    "without_temperature": "applied without the attention factor",
}
MEANING = {
    "extended": "it matches the extended model",  # with the difference, by `_meaning`
    "unextended": "it runs the unextended model: it loads an unextended file, or its config, flags or version drop the "
    "extension; `ctxext export` shows what it needs",
    "without_temperature": "it rescales the frequencies, but does not multiply cos and sin by the attention factor; "
    "`ctxext export` says what it needs",
}
NONE = "no match"
SHORT = "applied to short texts only"
# What was tested is right, but that is not the whole check, and nobody asked for less.
PARTLY = "applied as far as tested"
# By generated passkeys alone. With 95% confidence, 5 of 8 or more means a rate above 25% (one-sided exact p = 0.027), 1
# of 8 or fewer one below 50% (p = 0.035).
MAYBE, MAYBE_NOT, UNKNOWN = "probably applied", "probably ignored", "no verdict"
PASSKEYS, MANY, FEW = 8, 5, 1
# Nats per token.
OTHER_MODEL = 3.0
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = " What is the pass key? The pass key is"
KEY = "71934"


class NotExtended(ValueError):
    """The model has plain RoPE."""


@dataclass(frozen=True)
class Probe:
    """A text, and its tokens' log-probabilities in each state in which an engine may run the model.

    Attributes:
        input_ids: the text by the model's tokenizer, with its BOS, if any; fewer than 200 tokens.
        expected: log p(input_ids[k] | input_ids[:k]) for k >= 1, in nats, by state: "extended", "unextended" (RoPE from
            before any scaling) and, where the method multiplies cos and sin, "without_temperature" (the rescaled
            frequencies alone).
        far: by length in tokens, beyond the trained one: the extended model's log-probabilities of the last
            `FAR_TOKENS` tokens of `far_ids`.
        far_unextended: the same of the unextended model, for a method that may change nothing in a short text: only
            these positions show it. Empty for others.
        noise_floor: mean |Δ log-probability|, nats per token, of the same model in bfloat16 with chunked prefill; the
            largest over the states.
        coarse_floor: the same with weights rounded to 8 bits.
        summary: the extension in words.
        dtype: of the model that gave the log-probabilities.
        far_start, far_end: the token ids around the repeated text of `far_ids`: a passkey, and the question for it with
            its answer and `FAR_TEXT` tokens of the text.
        cuts: for k from 1, the number of characters of the text that are its first k tokens when they stand alone; 0
            where no number is.
    """

    text: str
    input_ids: tuple[int, ...]
    expected: dict[State, tuple[float, ...]]
    far: dict[int, tuple[float, ...]]
    noise_floor: float
    coarse_floor: float
    summary: str
    trained_length: int
    target_length: int
    dtype: str
    versions: dict[str, str]
    cuts: tuple[int, ...] = ()
    far_unextended: dict[int, tuple[float, ...]] = field(default_factory=dict)
    far_start: tuple[int, ...] = ()
    far_end: tuple[int, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the text and of all token ids."""
        ids = [list(each) for each in (self.input_ids, self.far_start, self.far_end)]
        return hashlib.sha256(json.dumps([self.text, *ids]).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write it as JSON, atomically."""
        write_json(path, {**asdict(self), "fingerprint": self.fingerprint})

    def far_length(self, at_most: float | None = None) -> int:
        """The largest length in `far` up to `at_most` tokens; 0 if there is none."""
        return max((length for length in self.far if at_most is None or length <= at_most), default=0)

    def far_ids(self, length: int) -> list[int]:
        """`long_text` of this probe."""
        return long_text(self.input_ids, self.far_start, self.far_end, length)

    @property
    def short_length(self) -> int:
        """The length up to which no text of `far_ids` is made, in tokens."""
        return max(self.trained_length, 2 * len(self.input_ids), 2 * len(self.far_start + self.far_end))

    def shows_truncation(self, length: int) -> bool:
        """Whether the extended model finds the passkey of `far_ids(length)`, which it cannot without its beginning."""
        return sum(self.far[length][:-FAR_TEXT]) > -1.0


def long_text(ids: Sequence[int], start: Sequence[int], end: Sequence[int], length: int) -> list[int]:
    """A passkey, the text repeated, and the question for the passkey with its answer: one token shorter than `length`,
    to leave room for a generated one."""
    room = length - 1 - len(start) - len(end)
    repeated = (list(ids) * (room // len(ids) + 1))[:room]
    return [*start, *repeated, *end]


def probe_beside(gguf: Path) -> Path:
    """The path of a GGUF file's probe: model.verify.json beside model.gguf."""
    return gguf.with_suffix(f".{PROBE}")


def read_probe(path: Path) -> Probe:
    """The probe that `Probe.save` wrote.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is malformed, or was edited.
    """
    try:
        said = read_json(path).content
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist. Create it from the extended checkpoint: `ctxext verify DIR -o {path}`."
        ) from None
    except ValueError:
        said = {}
    if not {"fingerprint", "expected", "far"} <= said.keys():
        raise ValueError(
            f"{path} is not a probe. Create one from the extended checkpoint: `ctxext verify DIR -o {PROBE}`."
        )
    try:
        fingerprint = said.pop("fingerprint")
        expected = {state: tuple(values) for state, values in said.pop("expected").items()}
        far, far_unextended = (
            {int(length): tuple(values) for length, values in said.pop(name, {}).items()}
            for name in ("far", "far_unextended")
        )
        cuts = tuple(said.pop("cuts", ()))
        said.update({name: tuple(said[name]) for name in ("input_ids", "far_start", "far_end")})
        probe = Probe(**said, expected=expected, far=far, far_unextended=far_unextended, cuts=cuts)
        whole = (
            all(len(values) == len(probe.input_ids) - 1 for values in expected.values())
            and all(len(values) == FAR_TOKENS for values in (*far.values(), *far_unextended.values()))
            and far_unextended.keys() in (set(), far.keys())
            and all(
                are_numbers(values, high=1e-3)
                for values in (*expected.values(), *far.values(), *far_unextended.values())
            )
            and all(is_count(token, 0) for token in probe.input_ids + probe.far_start + probe.far_end)
            and len(cuts) in (0, len(probe.input_ids))
            and all(is_count(cut, 0, len(probe.text)) for cut in cuts)
            and all(is_number(floor, 0) for floor in (probe.noise_floor, probe.coarse_floor))
            and all(TOKENS.holds(length) for length in (probe.trained_length, probe.target_length))
            and all(probe.short_length < length <= MAX_FAR for length in far)
            and all(isinstance(text, str) for text in (probe.text, probe.summary))
            and {"extended", "unextended"} <= expected.keys() <= WORDS.keys()
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path} is not a probe of ctxext {__version__} ({one_line(error)}). Create it again."
        ) from error
    if fingerprint != probe.fingerprint or not whole:
        raise ValueError(f"{path} was edited: its tokens differ from those measured. Create it again.")
    return probe


# ------------------------------------------------------------------------------------ the verdict


@dataclass(frozen=True)
class Verdict:
    """The state that an engine runs a model in.

    Attributes:
        name: "applied", "ignored", "applied without the attention factor", "no match", or one of the constants above.
        distances: mean |Δ log-probability|, nats per token, to each state of the probe; empty without any.
        limit: the largest distance that noise explains, nats per token.
        reason: in words.
        asked_to: the longest text that was tested, in tokens.
        far_distance: the distance to the extended model near the target; None if that was not tested.
        passkeys: by prompt length in tokens, the number found of `PASSKEYS`; None if they were not asked for.
    """

    name: str
    distances: dict[State, float]
    limit: float
    reason: str
    asked_to: int
    far_distance: float | None = None
    passkeys: dict[int, int] | None = None

    @property
    def is_live(self) -> bool:
        return self.name == WORDS["extended"]


def judge(
    probe: Probe,
    logprobs: Float64[Tensor, " token"],
    noise: float | None = None,
    asked: Bool[Tensor, " token"] | None = None,
) -> Verdict:
    """The state nearest to an engine's log-probabilities, if it is near enough and clearly nearer than any other.

    Near enough means within 1.5 times the noise of 8-bit weights. Clearly nearer means a paired comparison over the
    tokens: the mean of |Δ| to the other state minus |Δ| to this one is at least three times its standard error. This
    separates states that differ by less than the noise of a single token.

    Rounding weights to 8 bits changes a small model as much as a slightly wrong factor, so such factors pass this text:
    ×3.5 and ×4.5 for yarn ×4 on the bundled model, ×3 and ×5 on SmolLM2-135M; ×2 and ×8 do not.

    Args:
        logprobs: the engine's, of `probe.input_ids[1:]`, in nats.
        noise: mean |Δ log-probability|, nats per token, that the engine's precision explains, for weights of fewer than
            8 bits.
        asked: the tokens to compare; None for all.

    Raises:
        ValueError: not one number per token, or numbers that are not log-probabilities.
    """
    if logprobs.shape != (len(probe.input_ids) - 1,):
        raise ValueError(
            f"the engine returned {tuple(logprobs.shape)} log-probabilities for {len(probe.input_ids)} tokens, "
            f"expected {len(probe.input_ids) - 1}: its tokens differ. Check that it serves this model."
        )
    if not bool((logprobs <= 1e-3).all()):  # NaN too
        raise ValueError("the engine returned NaN or positive log-probabilities. Check its log.")
    apart = {s: (logprobs - torch.tensor(v, dtype=torch.float64)).abs() for s, v in probe.expected.items()}
    if asked is not None:
        apart = {state: each[asked] for state, each in apart.items()}
    distances = {state: float(each.mean()) for state, each in apart.items()}
    nearest = min(distances, key=distances.__getitem__)
    limit = 1.5 * (probe.coarse_floor if noise is None else noise)
    name, reason = WORDS[nearest], _meaning(nearest, distances, limit, noise)
    others = (state for state in apart if state != nearest and not _clearly_nearer(apart[nearest], apart[state]))
    if not distances[nearest] <= limit:
        name = NONE
        # Far more than any precision or factor explains.
        other_model = distances[nearest] > max(OTHER_MODEL, 4 * limit)
        reason = (
            f"another model, tokenizer or extension: the probe is of {probe.summary}, and was written beside the file "
            "or folder to serve"
            if other_model
            else "another model, tokenizer or factor; pass noise= for weights below 8 bits. Closest: the "
            f"{MODELS[nearest]}"
        )
    elif (other := next(others, None)) is not None:
        name = NONE
        reason = f"as close to the {MODELS[other]} as to the {MODELS[nearest]}: its noise is too large to tell"
    return Verdict(name, distances, limit, reason, len(probe.input_ids))


def judge_far(probe: Probe, verdict: Verdict, length: int, logprobs: Float64[Tensor, " token"]) -> Verdict:
    """Refine a verdict of "applied" with the engine's log-probabilities of the last tokens of `probe.far_ids(length)`.

    A cos/sin table that is too short, clamped or NaN past its end is right in a short text. On the bundled model such
    tables are off by 0.8 nats per token or more, a truncated prompt by 0.6, 8-bit weights by 0.015.
    """
    distance = float((logprobs - torch.tensor(probe.far[length], dtype=torch.float64)).abs().mean())
    if distance <= 2 * verdict.limit:
        return replace(verdict, asked_to=length, far_distance=distance)
    reason = (
        f"the last positions of {length} tokens are off by {distance:.2g} nats per token, although a short text is "
        "right: its cos/sin table is too short, it truncates or shifts long prompts, or its factor is another one. See "
        "`ctxext export`"
    )
    return replace(verdict, name=SHORT, reason=reason, asked_to=length, far_distance=distance)


def judge_by_length(
    probe: Probe,
    logprobs: Float64[Tensor, " token"],
    length: int,
    tail: Float64[Tensor, " last"],
    noise: float | None = None,
) -> Verdict:
    """`judge` for a method that may change nothing in a short text (`Probe.far_unextended`): `logprobs` of the short
    text tell the model, `tail` near the target whether it is extended.

    Clearly nearer means three times as near. `judge`'s paired comparison needs more tokens: a few that differ by a
    hundred times as much as others fail it at a distance of 0.
    """
    limit = 1.5 * (probe.coarse_floor if noise is None else noise)
    near_target = 2 * limit  # the noise of a long text is larger, as in `judge_far`
    short = min(float((logprobs - torch.tensor(v, dtype=torch.float64)).abs().mean()) for v in probe.expected.values())
    far: dict[State, tuple[float, ...]] = {
        "extended": probe.far[length],
        "unextended": probe.far_unextended[length],
    }
    distances = {state: float((tail - torch.tensor(v, dtype=torch.float64)).abs().mean()) for state, v in far.items()}
    nearest, other = sorted(distances, key=distances.__getitem__)
    name, reason = WORDS[nearest], _meaning(nearest, distances, near_target, noise)
    if not short <= limit:
        name = NONE
        reason = (
            f"another model, tokenizer or extension: the probe is of {probe.summary}, and a short text is off by "
            f"{short:.2g} nats per token"
        )
    elif not (distances[nearest] <= near_target and distances[other] >= 3 * distances[nearest]):
        name, reason = (
            NONE,
            f"another method or factor, or truncated prompts: near the target it matches neither. Closest: the "
            f"{MODELS[nearest]}",
        )
    return Verdict(name, distances, limit, reason, length)


def judge_passkeys(probe: Probe, within: tuple[int, int], near: tuple[int, int]) -> Verdict:
    """A weaker verdict, by passkeys that the served model found of `PASSKEYS`: for servers without log-probabilities.

    Args:
        within, near: the prompt length in tokens and the number found, within the trained length and near the target.
    """
    (short, found), (long, found_near) = within, near
    counts = f"it found {found_near} of {PASSKEYS} passkeys at {long:,} tokens and {found} of {PASSKEYS} at {short:,}"
    if found < MANY:
        name, why = UNKNOWN, "a model that finds few within its trained length says nothing beyond it"
    elif found_near >= MANY:
        name, why = (
            MAYBE,
            (
                "with 95% confidence over 25% near the target, where an unextended model finds almost none; another "
                "factor, a lost attention factor or another model cannot be told from this"
            ),
        )
    elif found_near <= FEW:
        name, why = (
            MAYBE_NOT,
            (
                "with 95% confidence under 50% near the target; an extended model that retrieves badly there looks the "
                "same, so compare with `ctxext eval` on the folder"
            ),
        )
    else:
        name, why = UNKNOWN, "too many for an unextended model, too few for one that retrieves there"
    why += ". The server returns no log-probabilities of prompts, so no more can be told"
    return Verdict(name, {}, 0.0, f"{counts}: {why}", long, passkeys={short: found, long: found_near})


def passkey_prompt(text: str, characters: int, trial: int) -> tuple[str, str]:
    """A prompt of about so many characters with a passkey near its start, and the passkey."""
    key = str(10_000 + (7_919 * (trial + 1)) % 90_000)
    needle = NEEDLE.format(key=key)
    room = characters - len(needle) - len(QUESTION)
    words = (text + " ") * (room // len(text) + 1)
    start = words.rfind(" ", 0, int(room * (0.05 + 0.01 * trial)) + 2)
    return words[:start] + needle + words[start:room].strip() + QUESTION, key


def _meaning(state: State, distances: dict[State, float], limit: float, noise: float | None) -> str:
    if state != "extended":
        return MEANING[state]
    what = "weights of 8 bits" if noise is None else "the stated noise"
    return f"{MEANING[state]} ({distances[state]:.4f}; {what} would explain up to {limit:.4f})"


def _clearly_nearer(near: Float64[Tensor, " token"], far: Float64[Tensor, " token"]) -> bool:
    margin = far - near
    return float(margin.mean()) >= 3 * float(margin.std()) / math.sqrt(len(margin)) > 0


# ------------------------------------------------------------------------------------ making one


def make_probe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str = TEXT, far: int | None = None
) -> Probe:
    """Make a probe of an extended model: extended live, or loaded from a folder.

    The frequencies and attention factor of every state come from our formulas, not from transformers' reading of the
    config. A method inside attention is compared with the restored model, at the end of a long text alone. The model
    is unchanged afterwards; two bfloat16 copies are made temporarily to measure the noise.

    Args:
        text: truncated to 200 tokens, or to the trained length.
        far: largest length for positions near the target, which costs a forward pass of that length and of its
            halves; 0 for none; None for `FAR_LIMIT` or the target, whichever is smaller.

    Raises:
        ValueError: the model is not extended, the extension changes nothing within the trained length or also the
            softmax scale, or it changes this text by less than the noise of 16 bits.
    """
    extension = extension_of(model)
    if extension is not None and extension.plan.in_attention:
        if getattr(extension.plan.method, "of_the_call", False):
            raise ValueError(_cannot_tell(extension.plan.summary, "its frequencies depend on the whole call"))
        return _probe_by_length(model, tokenizer, text, far, extension.plan)
    facts = _facts(model)
    ids = tokenizer(text)["input_ids"][: min(MAX_TOKENS, facts.lengths.start)]
    fine: Any = copy.deepcopy(model)
    fine = fine.to(torch.bfloat16)
    coarse = _in_8_bits(copy.deepcopy(fine))

    def measured(model: PreTrainedModel, chunk: int | None) -> dict[State, Tensor]:
        found: dict[State, Tensor] = {}
        for state in _states(facts):
            with in_state(model, state):
                found[state] = logprobs_of(model, ids, chunk)
        return found

    def distance(noisy: dict[State, Tensor]) -> float:
        return max(float((noisy[state] - each).abs().mean()) for state, each in expected.items())

    expected, noisy = measured(model, None), measured(fine, 48)
    del fine
    probe = Probe(
        text=text,
        input_ids=tuple(ids),
        far={},
        expected={state: tuple(round(value, 6) for value in each.tolist()) for state, each in expected.items()},
        noise_floor=distance(noisy),
        coarse_floor=distance(measured(coarse, 48)),
        summary=facts.summary,
        trained_length=facts.lengths.start,
        target_length=facts.reach,
        dtype=str(model.dtype).removeprefix("torch."),
        versions=_versions(),
        cuts=_cuts(tokenizer, text, ids),
        **around(tokenizer, text, ids),
    )
    check_far(probe, far)
    # The extended state must be separable in 16 bits; the other two need not be separable from each other.
    live, ignored = (torch.tensor(probe.expected[state], dtype=torch.float64) for state in ("extended", "unextended"))
    off = noisy["unextended"]
    if not (judge(probe, noisy["extended"]).is_live and _clearly_nearer((off - ignored).abs(), (off - live).abs())):
        raise ValueError(
            f"{probe.summary} changes these {len(ids)} tokens by {float((live - ignored).abs().mean()):.2g} nats each, "
            f"and 16-bit rounding by {probe.noise_floor:.2g}: a short text cannot show whether it is live. Measure at "
            "long lengths instead: ctxext eval."
        )
    return replace(probe, far=_far_values(model, probe, min(facts.reach, FAR_LIMIT if far is None else far, MAX_FAR)))


def check_far(probe: Probe, far: int | None) -> None:
    """Raise ValueError if texts of `far` tokens are too short to test a position beyond the trained length."""
    if far and far <= probe.short_length:
        raise ValueError(
            f"far={far} must be above {probe.short_length} tokens, or it tests no position beyond the trained length. "
            "Pass a larger one, or far=0 to skip this check."
        )


def _probe_by_length(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, far: int | None, plan: Plan
) -> Probe:
    """`make_probe` for a method inside attention: what tells is the end of a long text, where the model is extended and
    where it is restored."""
    ids = tokenizer(text)["input_ids"][: min(MAX_TOKENS, plan.start)]
    probe = Probe(
        text=text,
        input_ids=tuple(ids),
        far={},
        expected={},
        noise_floor=0.0,
        coarse_floor=0.0,
        summary=plan.summary,
        trained_length=plan.start,
        target_length=plan.target_length,
        dtype=str(model.dtype).removeprefix("torch."),
        versions=_versions(),
        cuts=_cuts(tokenizer, text, ids),
        **around(tokenizer, text, ids),
    )
    check_far(probe, far)
    lengths = _far_lengths(probe, min(plan.target_length, FAR_LIMIT if far is None else far, MAX_FAR))
    if not lengths:
        raise ValueError(
            f"{plan.summary} rotates inside attention, which shows at the end of a text beyond {plan.start:,} tokens, "
            f"and far={far} makes none. Pass far={plan.target_length}."
        )
    extended, extended_far = logprobs_of(model, ids), _tails(model, probe, lengths)
    restore(model, model.__dict__[ATTRIBUTE])
    try:
        unextended, unextended_far = logprobs_of(model, ids), _tails(model, probe, lengths)
        fine: Any = copy.deepcopy(model)
        fine = fine.to(torch.bfloat16)
        noise = float((logprobs_of(fine, ids, 48) - unextended).abs().mean())
        coarse = float((logprobs_of(_in_8_bits(fine), ids, 48) - unextended).abs().mean())
    finally:
        apply(model, plan, saver(plan))
    apart = {each: float((torch.tensor(extended_far[each]) - torch.tensor(unextended_far[each])).abs().mean())
             for each in lengths}  # fmt: skip
    # `judge_by_length` wants one state three times as near; noise may be twice that measured.
    lengths = [each for each in lengths if apart[each] > 6 * noise]
    if not lengths:
        raise ValueError(
            f"{probe.summary} changes the end of a text of {max(apart)} tokens by {apart[max(apart)]:.2g} nats each, "
            f"and 16-bit rounding by {noise:.2g}: it cannot show whether it is live. Measure with ctxext eval."
        )
    values: dict[State, Tensor] = {"extended": extended, "unextended": unextended}
    return replace(
        probe,
        expected={state: tuple(round(value, 6) for value in each.tolist()) for state, each in values.items()},
        far={each: extended_far[each] for each in lengths},
        far_unextended={each: unextended_far[each] for each in lengths},
        noise_floor=noise,
        coarse_floor=coarse,
    )


def _versions() -> dict[str, str]:
    import transformers

    return {
        "ctxext": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _cuts(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> tuple[int, ...]:
    """`Probe.cuts`; empty if the tokenizer does not know where its tokens end."""
    if not tokenizer.is_fast:
        return ()
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"][: len(ids)]]
    return tuple(end if tokenizer(text[:end])["input_ids"] == ids[:k] else 0 for k, end in enumerate(ends, 1))


def around(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> dict[str, Any]:
    """`Probe.far_start` and `Probe.far_end`."""

    def plain(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    text_ids = plain(text)
    bos = [] if list(ids[:1]) == text_ids[:1] else ids[:1]
    end = [*plain(f"{QUESTION} {KEY}"), *text_ids[:FAR_TEXT]]
    return {"far_start": (*bos, *plain(NEEDLE.format(key=KEY))), "far_end": tuple(end)}


def _far_lengths(probe: Probe, length: int) -> list[int]:
    lengths = []
    while length > probe.short_length:
        lengths.append(length)
        length //= 2
    return lengths


def _far_values(model: PreTrainedModel, probe: Probe, length: int) -> dict[int, tuple[float, ...]]:
    """`Probe.far` at `length` tokens, and at halves of it down to the trained length, for servers with shorter
    limits."""
    lengths = _far_lengths(probe, length)
    if not lengths:
        return {}
    with in_state(model, "extended"):
        return _tails(model, probe, lengths)


def _tails(model: PreTrainedModel, probe: Probe, lengths: Sequence[int]) -> dict[int, tuple[float, ...]]:
    ends = {each: logprobs_of(model, probe.far_ids(each), 256)[-FAR_TOKENS:] for each in lengths}
    return {each: tuple(round(value, 6) for value in end.tolist()) for each, end in ends.items()}


def _facts(model: PreTrainedModel) -> ContextFacts:
    extension = extension_of(model)
    if extension is not None and not extension.plan.is_portable:
        raise ValueError(_cannot_tell(extension.plan.summary, str(extension.plan.why_not_portable)))
    facts = read_context(model.config)
    if any(table.scaling is not None and table.scaling.in_attention for table in facts.tables):
        raise ValueError(_cannot_tell(f"rope_type {facts.rope_parameters['rope_type']!r}", "it is length-dependent"))
    if facts.softmax_factor != 1.0:
        raise ValueError(
            f"{type(model).__name__} scales its softmax by mscale_all_dim beside RoPE, which a probe does not cover. "
            "Measure at long lengths instead: ctxext eval."
        )
    return facts


def _cannot_tell(what: str, why: str) -> str:
    return (
        f"{what} cannot be seen in a short text because {why}: within the trained length it may equal the "
        "unextended model. Freeze it with length=, or use a static method such as 'yarn'."
    )


def _states(facts: ContextFacts) -> dict[State, dict[str, RopeGeometry]]:
    """The frequencies of each table, by its label, in each state that differs."""
    extended = {table.label: table.in_use for table in facts.tables}
    unextended = {table.label: facts.original_rope_of(table) for table in facts.tables}
    rescaled = any(not torch.equal(rope.inv_freq, unextended[k].inv_freq) for k, rope in extended.items())
    tempered = any(rope.attention_factor != 1.0 for rope in extended.values())
    if not rescaled and not tempered:
        raise NotExtended(
            f"{type(facts.text_config).__name__} has plain RoPE ({facts.trained_length} tokens): nothing is "
            "extended, so there is nothing to verify. Extend it first: ctxext extend."
        )
    states: dict[State, dict[str, RopeGeometry]] = {"extended": extended, "unextended": unextended}
    if rescaled and tempered:
        states["without_temperature"] = {k: replace(rope, attention_factor=1.0) for k, rope in extended.items()}
    return states


@contextmanager
def in_state(model: PreTrainedModel, state: State) -> Iterator[None]:
    """Put the model into another state within a `with` block.

    Raises:
        ValueError: as `make_probe`.
        KeyError: its extension has no such state.
    """
    facts = _facts(model)
    tables = _states(facts)[state]
    sites = rotary.find_rotary_sites(model, facts.text_config)
    if not sites:
        raise ValueError(f"found no standard rotary embedding in {type(model).__name__}, so no probe can be made.")
    in_use = {table.label: table.in_use.inv_freq for table in facts.tables}
    edit = Edit(model)
    try:
        for site, (label, rope) in itertools.product(sites, tables.items()):
            inv_freq = site.laid_out(label, rope.inv_freq, in_use[label]).float()  # independent of the model's dtype
            # Both buffers: longrope's forward restores the second one.
            for name in ("inv_freq", "original_inv_freq"):
                edit.set_tensor(site.paths[0], of_label(label, name), inv_freq)
            edit.set_attribute(site.paths[0], of_label(label, "attention_scaling"), rope.attention_factor)
        yield
    finally:
        edit.undo()


@torch.no_grad()
def _in_8_bits(model: PreTrainedModel) -> PreTrainedModel:
    """Round matrices in place as GGUF's Q8_0 does: integers up to 127, one scale per 32 values."""
    for weight in model.parameters():
        if weight.dim() == 2 and weight.shape[1] % 32 == 0:
            blocks = weight.float().unflatten(1, (-1, 32))
            scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
            weight.copy_(((blocks / scale).round() * scale).flatten(1))
    return model


@torch.inference_mode()
def logprobs_of(
    model: PreTrainedModel, input_ids: Sequence[int], chunk: int | None = None
) -> Float64[Tensor, " token"]:
    """log p(input_ids[k] | input_ids[:k]) for k >= 1 under a transformers model, in nats.

    Args:
        chunk: tokens per forward pass with a cache; None reads all at once.
    """
    ids = torch.tensor([list(input_ids)], device=model.device)
    found, cache = [], None
    with in_eval_mode(model):
        for piece, following in zip(*(part.split(chunk or ids.shape[1], dim=1) for part in (ids[:, :-1], ids[:, 1:]))):
            output = model(input_ids=piece, past_key_values=cache, use_cache=chunk is not None)
            cache = output.past_key_values if chunk is not None else None
            found.append(output.logits[0].double().log_softmax(-1).gather(-1, following[0, :, None])[:, 0])
    return torch.cat(found).cpu()
