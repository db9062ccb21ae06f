"""The models to measure: live, behind a server, or (`ctxext.evals.in_vllm`) in vLLM. All answer samples and score text;
a server only if it returns log-probabilities."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import MISSING, dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from ctxext.api import temporarily_extended
from ctxext.core.apply import extension_of
from ctxext.core.encoding import ModuleEncoding
from ctxext.core.plan import Plan, check_encoding, factor_and_target
from ctxext.evals.cost import Cost
from ctxext.evals.engine import Engine, Scorer, length_dependent
from ctxext.evals.perplexity import Judge, KeyTokens, TextTask, Window
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import Record
from ctxext.evals.samples import Sample, fingerprint
from ctxext.evals.server import ServedModel
from ctxext.export.served import NoLogprobs
from ctxext.extension.method_file import check_made_for, opened
from ctxext.extension.request import encoding_of, plan_extension
from ctxext.extension.rope import RopePlan
from ctxext.methods import ContextMethod, RopeMethod, list_methods, method_class
from ctxext.models.context import has_rope, read_context
from ctxext.models.families import family_of
from ctxext.models.text_config import text_config_of
from ctxext.utils.machine import machine

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedConfig, PreTrainedModel

UNEXTENDED = "none"
Rows = Sequence[Sequence[Sample]]


@dataclass(frozen=True)
class Variant:
    """A variant of the model.

    Attributes:
        extension: arguments of `extend_context`; None for the unextended model.
        gate_only: measure it only within the trained length, as the baseline of the short-context regression.
    """

    name: str = UNEXTENDED
    extension: dict[str, Any] | None = None
    gate_only: bool = False

    def describe(self, target: Target) -> dict[str, Any]:
        """For the results' header."""
        plan = target.plan(self)
        # In the form read back from JSON (lists for tuples), so that a run can resume.
        extension = None if plan is None else json.loads(json.dumps(plan.to_dict()))
        return {
            "model": target.name,
            "extension": extension,
            "fingerprint": fingerprint(target.fingerprint, extension),
            "limit": target.limit(self),
            "portable": target.is_portable(self),
        }


class Target(ABC):
    """The model that a runner measures.

    Attributes:
        name: a display name. `fingerprint` covers the weights and the config.
        engine: scores text.
        judge: the model that finds the key tokens; None for this one.
        facts: conditions that must agree for two measurements to be compared; `about` is for readers.
    """

    name: str
    fingerprint: str
    prompter: Prompter
    engine: Scorer
    judge: Judge | None = None
    facts: dict[str, str]
    about: dict[str, Any]

    def plan(self, variant: Variant) -> Plan | None:
        """The plan of `variant`; None for the unextended model."""
        return None

    def is_portable(self, variant: Variant) -> bool | None:
        """Whether config.json expresses the extension of `variant`; None if unknown, or if it has none."""
        plan = self.plan(variant)
        return None if plan is None else plan.is_portable

    def reach(self, variant: Variant) -> int | None:
        """The maximum length of `variant` by its config; None if unknown."""
        plan = self.plan(variant)
        return self.about["reach"] if plan is None else plan.target_length

    def limit(self, variant: Variant) -> int | None:
        """The hard length limit of `variant`, such as the end of a position table; None for none."""
        return None

    def whole(self, variant: Variant) -> bool:
        """Whether frequencies depend on the prompt length, so that windows give no figures for shorter lengths."""
        return False

    @abstractmethod
    def check(self, texts: Collection[TextTask], ids: Sequence[int], generate: bool) -> None:
        """Check, before the work, that the model can be measured by these text tasks.

        Args:
            ids: some tokens of the text.
            generate: answers are generated, and the right ones not scored.

        Raises:
            ValueError: it cannot.
        """

    @abstractmethod
    def applied(self, variant: Variant) -> AbstractContextManager[Any]:
        """Apply `variant` to the model within a `with` block."""

    @abstractmethod
    def outcomes(self, batches: Iterable[Rows], generate: bool) -> Iterator[list[tuple[Sample, Record]]]:
        """Answer batches of rows of samples of one length with a common prefix; each yielded group is written
        atomically."""

    def read(self, task: TextTask, window: Window) -> Record:
        """Score a window of text."""
        if isinstance(task, KeyTokens) and self.judge is not None:
            return self.judge.record(task, window)
        return task.record(window, self.engine)


class LocalModel(Target):
    """A model in this process, whose prompts may have any form."""

    def asking(self, prompter: Prompter) -> Self:
        """The same model with another prompter."""
        other = copy(self)
        other.prompter = prompter
        return other

    def record(self, sample: Sample, written: Sequence[int], logprob: float | None = None) -> tuple[Sample, Record]:
        """The outcome of an answer of the tokens `written`."""
        prompt = sample.input_ids[: sample.n_prompt]
        return sample, outcome(sample, self.prompter.answer_text(prompt, written, sample.answer_tokens), logprob)


class LiveModel(LocalModel):
    """A model in transformers, which can be extended here."""

    engine: Engine

    def __init__(
        self, model: PreTrainedModel, prompter: Prompter, name: str, trained_length: int | None = None
    ) -> None:
        trained, reach = known_lengths(model.config)
        trained = trained_length or trained
        self.model, self.prompter, self.name = model, prompter, name
        self.engine = Engine(model)
        self._limit = hard_limit(model)
        self.fingerprint = model_fingerprint(model)
        self.facts = {"dtype": str(model.dtype).removeprefix("torch.")}
        self.about = {"trained_length": trained, "reach": reach, "machine": machine(model.device.type)}

    def plan(self, variant: Variant) -> Plan | None:
        if variant.extension is None:
            return None
        return plan_extension(self.model.config, model=self.model, **variant.extension)

    def is_portable(self, variant: Variant) -> bool | None:
        own = extension_of(self.model) if variant.extension is None else None
        return super().is_portable(variant) if own is None else own.plan.is_portable

    def limit(self, variant: Variant) -> int | None:
        plan = self.plan(variant)
        return self._limit if plan is None or self._limit is None else plan.target_length

    def whole(self, variant: Variant) -> bool:
        plan = self.plan(variant)
        return self.engine.whole if plan is None else length_dependent(self.model.config, plan)

    def check(self, texts: Collection[TextTask], ids: Sequence[int], generate: bool) -> None:
        """Every task can measure it."""

    def applied(self, variant: Variant) -> AbstractContextManager[Any]:
        return nullcontext() if variant.extension is None else temporarily_extended(self.model, **variant.extension)

    def refusal(self, variant: Variant, portable: bool = False) -> str | None:
        """Why this model cannot be run as `variant` (`portable`: or saved in its config.json), found by trying it; None
        if it can."""
        try:
            plan = self.plan(variant)
            with self.applied(variant):
                pass
        except (ValueError, RuntimeError) as error:
            return str(error)
        why = plan.why_not_portable if portable and plan is not None else None
        return why and f"config.json cannot express it, as {why}."

    def outcomes(self, batches: Iterable[Rows], generate: bool) -> Iterator[list[tuple[Sample, Record]]]:
        for rows in batches:
            if rows[0][0].answer and not generate:
                yield [self.record(sample, *answer) for sample, answer in self.engine.answers(rows)]
            else:
                for sample in (sample for row in rows for sample in row):
                    yield [self.record(sample, self.engine.generate(sample))]


class Served(Target):
    """A model behind an OpenAI-compatible server; `prompter` has its tokenizer.

    If the server returns log-probabilities of given tokens, it scores text and, unless answers are only generated, the
    right answers.
    """

    engine: ServedModel

    def __init__(self, served: ServedModel, prompter: Prompter, trained_length: int) -> None:
        self.engine, self.prompter, self.name, self.fingerprint = served, prompter, served.name, served.fingerprint
        self.facts = {"dtype": "as served", "scoring": "generate"}
        self.about = {"trained_length": trained_length, "reach": served.max_length, "machine": "served"}

    def check(self, texts: Collection[TextTask], ids: Sequence[int], generate: bool) -> None:
        refuse_cost(texts)
        if generate and not texts:
            return
        try:
            self.engine.check_scores(ids, self.prompter.tokenizer)
        except (NoLogprobs, RuntimeError) as error:
            if texts:
                names = ", ".join(task.name for task in texts)
                raise ValueError(
                    f"{names} needs log-probabilities of given tokens, which {self.engine.url} does not return "
                    f"({str(error).rstrip('.')}). Serve the model with vLLM, SGLang, llama.cpp or `ctxext serve`, or "
                    "use retrieval tasks, such as --tasks passkey."
                ) from None

    def applied(self, variant: Variant) -> AbstractContextManager[Any]:
        if variant.extension is not None:
            raise ValueError("a served model cannot be extended. Extend the checkpoint, then serve it.")
        return nullcontext()

    def outcomes(self, batches: Iterable[Rows], generate: bool) -> Iterator[list[tuple[Sample, Record]]]:
        def asked(sample: Sample) -> tuple[str, float | None]:
            scored = sample.answer and self.engine.scores and not generate
            return self.engine.answer(sample), self.engine.logprob(sample) if scored else None

        # One stream, so that requests overlap across batches.
        samples = (sample for rows in batches for row in rows for sample in row)
        for sample, (text, logprob) in self.engine.each(samples, asked):
            yield [(sample, outcome(sample, text, logprob))]


def refuse_cost(texts: Iterable[TextTask]) -> None:
    """Raise ValueError for a task that measures transformers itself."""
    if any(isinstance(task, Cost) for task in texts):
        raise ValueError(
            "cost measures the time and memory of a model in transformers, not of a server or vLLM. Drop it from "
            "--tasks, or evaluate the checkpoint without --server and --backend."
        )


def compared_variants(
    config: Any,
    methods: Sequence[str | ContextMethod] | None = None,
    factor: float | None = None,
    *,
    zero_shot: bool = False,
    **how: Any,
) -> list[Variant]:
    """The unextended model, and one variant for each of `methods` (None: every registered one that reaches the target).

    Args:
        factor, how: as in `extend_context`. A method whose required options are missing uses its `example`.
        zero_shot: of the registered methods only those that need neither training nor options.

    Raises:
        ValueError: as `extend_context` if no method fits; an unknown or repeated name.
    """
    plan = _plan_for_all(config, methods, factor, **how)
    known = [cls for cls in list_methods(plan.encoding) if not zero_shot or _is_zero_shot(cls)]
    names = [cls.name for cls in known if _example(cls, plan).factor == plan.factor] if methods is None else methods
    made: list[ContextMethod] = []
    for name in names:
        if name in (UNEXTENDED, "baseline"):
            raise ValueError("the baseline is always measured, and it is not a method. Leave it out.")
        check_made_for(name, plan.original_length or plan.start)
        method = opened(name)
        if isinstance(method, ContextMethod):
            factor_and_target(factor, how.get("target_length"), method, plan.start)
        made.append(method if isinstance(method, ContextMethod) else _of_factor(method_class(str(method)), plan))
    kept = {name: value for name, value in how.items() if name != "target_length"}
    # Named by the argument: two files may hold the same method.
    written = [name if isinstance(name, str) else name.name for name in names]
    twice = next((name for name in written if written.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{twice!r} is given twice, and results are kept by name. Name each method once; a variant of "
            "it needs a file of its own."
        )
    return [Variant(), *(Variant(name, {"method": method, **kept}) for name, method in zip(written, made))]


def _plan_for_all(config: Any, methods: Sequence[str | ContextMethod] | None, factor: float | None, **how: Any) -> Plan:
    """A plan whose lengths those of all methods are; by one that factor 1 suits, if others refuse and any is given."""
    try:
        return plan_extension(config, factor, "pi" if has_rope(text_config_of(config)) else None, **how)
    except ValueError:
        suited = {name for cls in list_methods("rope") if cls.changes_trained for name in (cls.name, *cls.aliases)}
        first = next((name for name in methods or () if isinstance(name, str) and name in suited), None)
        if first is None:
            raise
        return plan_extension(config, factor, first, **how)


def _is_zero_shot(cls: type[ContextMethod]) -> bool:
    return "zero-shot" in cls.training and all(f.name == "factor" or f.default is not MISSING for f in fields(cls))


def _example(cls: type[ContextMethod], plan: Plan) -> ContextMethod:
    check_encoding(cls, plan.encoding)
    if isinstance(plan, RopePlan):
        assert issubclass(cls, RopeMethod)
        return cls.example(plan.rope, plan.factor)
    return cls(factor=plan.factor)


def _of_factor(cls: type[ContextMethod], plan: Plan) -> ContextMethod:
    """An example with the plan's factor, even if the method does not reach it: its refusal says so."""
    made = _example(cls, plan)
    return made if made.factor == plan.factor else cls(factor=plan.factor)


def known_lengths(config: Any) -> tuple[int, int]:
    """The trained and the maximum length of a model, in tokens.

    Raises:
        ValueError: the config contains neither.
    """
    try:
        if not has_rope(text_config_of(config)):
            site = encoding_of(config)
            assert isinstance(site, ModuleEncoding)
            return site.original_length(config), site.trained_length
        facts = read_context(config)
        return facts.trained_length, facts.reach
    except ValueError as error:
        text_config = text_config_of(config)
        length = getattr(text_config, "max_position_embeddings", None)
        if not length:
            raise ValueError(f"the config does not give the trained length: {error}") from None
        return length, length


def check_continues_text(config: PreTrainedConfig) -> None:
    """Raise ValueError unless transformers has a language model for this config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder:
        raise ValueError(_unmeasured(config, "is an encoder-decoder model: it does not continue a text"))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        raise ValueError(_unmeasured(config, "is not a language model: it does not predict the next token"))


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise ValueError if `model` is not causal, such as BERT."""
    ids = torch.tensor([[0, 0], [0, 1]], device=model.device)
    here, after = model(input_ids=ids).logits.float().diff(dim=0)[0].abs().amax(-1).tolist()
    if here > 0.1 * after:
        raise ValueError(_unmeasured(model.config, "is an encoder: its attention is not causal"))


def _unmeasured(config: PreTrainedConfig, reason: str) -> str:
    return (
        f"{type(config).__name__} (model_type {config.model_type!r}) {reason}, so it cannot be evaluated. "
        "`ctxext describe` and `ctxext extend` support it."
    )


def hard_limit(model: PreTrainedModel) -> int | None:
    """The length beyond which a model fails; None if only its quality degrades.

    For a model extended in this process, its target length.
    """
    try:
        if not has_rope(text_config_of(model.config)):
            found = encoding_of(model.config, model)
            assert isinstance(found, ModuleEncoding)
            return found.limit
        has_end = family_of(model.config).sin_cos_tables
        return read_context(model.config).reach if has_end else None
    except ValueError:  # no position encoding with a limit, or an unsupported one
        return None


def outcome(sample: Sample, text: str, logprob: float | None = None) -> Record:
    """The record of a greedy answer.

    Args:
        logprob: of the right answer, in nats; None if not measured.
    """
    score = sample.score(text)
    # What is needed to judge the outcome: the prompt is too long to store.
    around, contexts = 160, []
    for needle in sample.needles:
        at = sample.body.find(needle)
        contexts.append([sample.body[max(0, at - around) : at], needle, sample.body[at + len(needle) :][:around]])
    return {
        "hit": score == 1.0,
        "score": score,
        "digits": digit_accuracy(sample, text),
        "logprob": logprob,
        "got": text,
        "expected": list(sample.references),
        "question": sample.question,
        "needle_tokens": list(sample.needle_tokens),
        "start": sample.start,
        "contexts": contexts,
        "tokens": len(sample.input_ids),
        "answer_tokens": sample.answer_tokens,
    }


def digit_accuracy(sample: Sample, text: str) -> float | None:
    """The share of the answer's digits that are right in place; None if the answer is not a number."""
    if sample.metric != "numbers":
        return None
    pairs = zip(sample.numbers(text), sample.references)
    return sum(a == b for pair in pairs for a, b in zip(*pair)) / sum(map(len, sample.references))


def model_fingerprint(model: torch.nn.Module) -> str:
    """A fingerprint of the config, and of up to 256 values of each parameter and buffer."""
    digest = blake2b(digest_size=8)
    of: Any = model.config
    config = of.to_dict()
    for key in ("transformers_version", "_name_or_path", "_attn_implementation"):
        config.pop(key, None)
    digest.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // 256)][:256].double().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + values.numpy().tobytes())
    return digest.hexdigest()
