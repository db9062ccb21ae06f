"""Find the best method for a model at a length within a time limit.

All candidates answer the same samples. Candidates significantly behind are eliminated; the rest share the remaining
time, in rounds with twice as many texts each. Rescale factors are never fitted on the text used for comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ctxext.core.plan import Plan
from ctxext.evals.choice import (
    TIED_LOSS,
    Choice,
    beyond_difference,
    by_measurement,
    choose,
    found_share,
    reasons,
    short_regression,
    summary_loss,
)
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Passkey
from ctxext.evals.perplexity import Perplexity
from ctxext.evals.prompts import Prompter
from ctxext.evals.results import read_results
from ctxext.evals.runner import Grid, Runner
from ctxext.evals.summary import Summary
from ctxext.evals.targets import UNEXTENDED, LiveModel, Variant, compared_variants
from ctxext.export.rules import ENGINES, NotExportable, export_for
from ctxext.extension.describe import kv_cache_bytes
from ctxext.extension.method_file import SavedMethod
from ctxext.extension.request import encoding_of, plan_extension
from ctxext.fitting.episodes import split
from ctxext.fitting.fit import fit
from ctxext.fitting.gradient import GradientSettings
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.methods import ContextMethod, list_methods
from ctxext.models.context import has_rope
from ctxext.models.text_config import text_config_of
from ctxext.utils.machine import versions
from ctxext.utils.values import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FITTED = "fitted"
# A candidate is eliminated at this unadjusted p: elimination saves time and is not reported as behind.
LEAVES = 0.01
# The smallest number of texts: one window does not show the variance between windows.
FIRST = 2
# The share of the time for a fit, and the fewest worthwhile evaluations.
FIT_SHARE, EVALUATIONS = 0.4, 5
# The share of the time for measuring the speed of the chosen method.
SPEED_SHARE = 0.1
# Tokens decoded at the target length to measure the decoding speed.
WRITTEN = 8
# The maximum number of texts; more would not narrow any relevant interval.
MOST = 100
# Texts beyond the trained length for the unextended model.
MOST_UNEXTENDED = 8

Advance = Callable[[float, str], None]


# ---------------------------------------------------------------------------------- who stays in it


def staying(summary: Summary, candidates: Sequence[str]) -> list[str]:
    """The candidates that could still turn out best, in their order; at least two.

    A candidate is eliminated if its retrieval accuracy is significantly below the best's, or if it is not higher and
    its loss is larger by significantly more than TIED_LOSS.
    """
    target = summary.beyond[-1]
    best, *others = by_measurement(summary, candidates)
    stay = [best]
    for variant in others:
        found = beyond_difference(summary, variant, best)
        loss = summary.loss_difference(variant, best, target)
        finds_less = found is not None and found.value < 0 and found.p < LEAVES
        loses_more = loss is not None and loss.low > TIED_LOSS and loss.p < LEAVES
        if not (finds_less or (loses_more and (found is None or found.value <= 0))):
            stay.append(variant)
    # Keep the second best, to measure the lead of the first.
    stay += others[: 2 - len(stay)]
    return [variant for variant in candidates if variant in stay]


# -------------------------------------------------------------------------------------- the speed


@dataclass(frozen=True)
class Speed:
    """Prefill speed in tokens per second, and decoding time in milliseconds per token."""

    prefill: float
    decode: float


@torch.inference_mode()
def speeds(
    target: LiveModel,
    variants: Sequence[Variant],
    ids: Sequence[int],
    *,
    repeats: int = 3,
    written: int = WRITTEN,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Speed]:
    """The speed of each variant at len(ids) tokens, medians of `repeats`; the variants take turns.

    Args:
        ids: the tokens, read in chunks of 1,024; the last `written` one by one.
        now: the clock, in seconds.
    """
    row = torch.tensor([list(ids)], device=target.model.device)
    n_read = row.shape[1] - written
    edges = [*range(0, n_read, 1024), *range(n_read, row.shape[1] + 1)]
    times: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            with target.applied(variant):
                cache, clock = None, {}
                begun = now()
                for low, high in pairwise(edges):
                    output = target.model(
                        input_ids=row[:, low:high], past_key_values=cache, use_cache=True, logits_to_keep=1
                    )
                    cache = output.past_key_values
                    if high >= n_read:
                        output.logits[0, -1, 0].item()  # synchronises a GPU
                        clock[high] = now()
                read = clock[n_read]
                times[variant.name].append((n_read / (read - begun), 1000 * (clock[row.shape[1]] - read) / written))
    return {name: Speed(*(median(part) for part in zip(*measured))) for name, measured in times.items()}


# ---------------------------------------------------------------------------------- the recommendation


@dataclass(frozen=True)
class Recommended:
    """The recommendation.

    Attributes:
        variant: the chosen candidate's name.
        saved: the method, with the figures in `about`; write it with `saved.save(path)`.
        why: the reasons, as a paragraph.
        summary: the summary of all measurements.
        left_out: methods that were not measured, with reasons.
        speed: of the chosen method, and of the unextended model if it can run at that length.
        kv_cache_bytes: of one sequence of the target length, in the model's dtype.
        texts: the number of texts of each candidate.
        text_used_up: whether the text was used up before the time.
    """

    variant: str
    saved: SavedMethod
    why: str
    summary: Summary
    left_out: dict[str, str]
    speed: dict[str, Speed]
    kv_cache_bytes: int
    texts: dict[str, int]
    text_used_up: bool


def recommend(
    model: PreTrainedModel,
    prompter: Prompter,
    text: str,
    factor: float | None = None,
    *,
    minutes: float,
    results: Path,
    target_length: int | None = None,
    methods: Sequence[str | ContextMethod] | None = None,
    fitted: bool = True,
    portable: bool = False,
    original_max_position_embeddings: int | None = None,
    existing: str = "refuse",
    names: tuple[str, str] = ("model", "text"),
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
    began: float | None = None,
    now: Callable[[], float] = time.perf_counter,
    advance: Advance = lambda share, state: None,
) -> Recommended:
    """Find the best way to extend `model` within `minutes`; the model is unchanged.

    Args:
        prompter: of the model's tokenizer, `Prompter(tokenizer)`.
        text: prose, longer than the target length; if it is long enough, one half is used for fitting. factor,
        target_length, original_max_position_embeddings, existing: as in `ctxext.extend_context`.
        results: a new file for the samples.
        methods: candidates; None for every registered method that needs neither training nor options.
        fitted: whether to fit rescale factors as well.
        portable: exclude methods that config.json cannot express.
        names: the names of model and text, for the file.
        about: facts for the header of the results.
        began: the start time, by `now()`; None for now.
        now: the clock, in seconds.
        advance: called with the used share of the time and a progress message.

    Raises:
        ValueError: the text is shorter than the target length, the time is too short to measure each candidate on FIRST
            texts, `results` exists, or as `extend_context`.
    """
    clock = _Clock(60 * minutes, now() if began is None else began, now, advance)
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be a finite number > 0, got {minutes}.")
    if results.exists():
        raise ValueError(f"{results} is there already. Choose another file for the samples, or remove it.")
    with frozen(model):
        how = {"original_max_position_embeddings": original_max_position_embeddings, "existing": existing}
        usual = _usual(model) if methods is None else methods
        candidates = compared_variants(model.config, usual, factor, target_length=target_length, **how)[1:]
        target = LiveModel(model, prompter, names[0], original_max_position_embeddings)
        target.about |= about or {}
        left_out: dict[str, str] = {}
        for variant in list(candidates):
            clock.tell(f"trying {variant.name}")
            refusal = target.refusal(variant) or (portable and _no_config_says(model, variant))
            if refusal:
                candidates.remove(variant)
                left_out[variant.name] = refusal
        if not candidates:
            raise ValueError(f"no method can be used here: {'; '.join(left_out.values())}")
        trained = target.about["trained_length"]
        longest = max(target.reach(variant) or 0 for variant in candidates)
        if longest <= trained:
            raise ValueError(f"the model covers {longest} tokens already: it was trained at {trained}. Ask for more.")
        learnt, compared = "", Haystack.from_text(text, prompter.tokenizer, name=names[1])
        if compared.n_tokens < longest:
            raise ValueError(
                f"{names[1]} has {compared.n_tokens:,} tokens, fewer than the target length of {longest:,}: nothing "
                "can be measured there. Pass a longer text, or ask for less."
            )
        if fitted:
            try:
                LiveFactors(model, original_max_position_embeddings)
                first, second = split(text, prompter, trained, longest, held_out=0.5, name=names[1])
                split(first.haystack.text, prompter, trained, longest, name=f"half of {names[1]}")
                learnt, compared = first.haystack.text, second.haystack
            except ValueError as error:
                left_out[FITTED] = str(error)
        race = _Race(target, compared, candidates, longest, clock, seed, results)
        race.begin()
        saved = None
        if learnt:
            room = min(FIT_SHARE * clock.seconds, clock.left - race.first_round(len(candidates) + 1))
            least = GradientSettings(evaluations=EVALUATIONS).tokens(trained, longest) / race.tokens_a_second
            if room >= least:
                try:
                    saved = fit(
                        model, prompter, learnt, target_length=longest, names=names,
                        original_max_position_embeddings=original_max_position_embeddings,
                        settings=GradientSettings(minutes=room / 60, seed=seed),
                        advance=lambda share, state: clock.tell("fitting"),
                    )  # fmt: skip
                except (ValueError, RuntimeError) as error:  # or out of memory: only a fit has a backward pass
                    left_out[FITTED] = str(error)
                else:
                    race.candidates.append(Variant(FITTED, {"method": saved.method, **how}))
            else:
                enough = max(least / FIT_SHARE, clock.seconds - room + least)
                left_out[FITTED] = f"there is no time to fit; {minutes_up(enough)} minutes in all are needed."
        race.run()
        return _recommended(race, saved, left_out, names)


def _usual(model: PreTrainedModel) -> list[str]:
    """The methods that need neither training nor options."""
    has = has_rope(text_config_of(model.config))
    encoding = "rope" if has else encoding_of(model.config, model).name
    return [
        cls.name
        for cls in list_methods(encoding)
        if "zero-shot" in cls.training and all(f.name == "factor" or f.default is not MISSING for f in fields(cls))
    ]


def _no_config_says(model: PreTrainedModel, variant: Variant) -> str | None:
    """Why config.json cannot express a variant; None if it can."""
    why = plan_extension(model.config, model=model, **(variant.extension or {})).why_not_portable
    return why and f"config.json cannot express it, as {why}."


@dataclass
class _Clock:
    """The time limit, in seconds."""

    seconds: float
    began: float
    now: Callable[[], float]
    advance: Advance

    @property
    def left(self) -> float:
        return self.seconds - (self.now() - self.began)

    def tell(self, state: str) -> None:
        self.advance(min(1.0, 1 - self.left / self.seconds), state)


class _Race:
    """Measures candidates in rounds, and tracks the time per text of each.

    Attributes:
        candidates: the remaining candidates.
        plans: the plans of all candidates.
        texts: the number of texts of each candidate.
        length: the target, in tokens.
        tokens_a_second: the unextended model's speed.
        text_used_up: whether the text was used up before the time.
    """

    def __init__(
        self,
        target: LiveModel,
        text: Haystack,
        candidates: list[Variant],
        length: int,
        clock: _Clock,
        seed: int,
        path: Path,
    ) -> None:
        self.target, self.text, self.clock, self.path, self.length = target, text, clock, path, length
        self.candidates, self.tokens_a_second = candidates, math.nan
        self.plans: dict[str, Plan] = {}
        self.text_used_up = False
        self.texts: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        trained = target.about["trained_length"]
        # The target, its logarithmic midpoint, and the trained length.
        self._grid = Grid(
            retrieval=(Passkey(),),
            texts=(Perplexity(),),
            lengths=tuple(sorted({round(math.sqrt(trained * length)), length})),
            gate=(min(trained, 4096),),
            trials=FIRST,
            windows=FIRST,
            seed=seed,
        )

    def begin(self) -> None:
        """Measure the unextended model, to estimate the time of the candidates.

        Raises:
            ValueError: the time is too short for a first round of all candidates.
        """
        # From a short text first, to fail early.
        self.clock.tell("looking at the clock")
        engine, probe = self.target.engine, self.text.token_ids[: min(self.target.about["trained_length"], 512)]
        self.tokens_a_second = max(self._pace(lambda: engine.losses(probe)) for _ in range(3))
        self._refuse_unless_in_time(len(self.candidates) + 1)
        self.tokens_a_second = self._pace(lambda: self._measure(Variant(), FIRST))
        self._refuse_unless_in_time(len(self.candidates))

    def _pace(self, work: Callable[[], Any]) -> float:
        """The speed of `work` in tokens per second."""
        read, begun = self.target.engine.tokens, self.clock.now()
        work()
        return (self.target.engine.tokens - read) / (self.clock.now() - begun)

    def _refuse_unless_in_time(self, candidates: int) -> None:
        lacking = self.first_round(candidates) - self.clock.left
        if lacking > 0:
            raise ValueError(
                f"{counted(self.clock.seconds / 60, 'minute')} is not enough to measure "
                f"{counted(candidates, 'candidate')} on {FIRST} texts each up to {self.length:,} tokens. Pass "
                f"{minutes_up(self.clock.seconds + lacking)} minutes at least, or fewer methods."
            )

    def first_round(self, candidates: int) -> float:
        """The estimated seconds of the first round with this many candidates, and of the work after the last round."""
        lengths, again = {*self._grid.lengths, *self._grid.gate}, sum(1 - depth for depth in self._grid.depths)
        tokens = (1 + again) * sum(lengths) + self.length + self._grid.gate[0]
        # Methods with in-attention RoPE take about 1.5 times as long.
        return 1.2 * FIRST * candidates * tokens / self.tokens_a_second + self.speed_repeats * self._speed_seconds

    @property
    def _speed_seconds(self) -> float:
        """To measure the speed of two variants once, one of them possibly with in-attention RoPE."""
        return 2.5 * (self.length + 32 * WRITTEN) / self.tokens_a_second

    @property
    def speed_repeats(self) -> int:
        """The number of speed measurements."""
        return max(1, min(3, int(SPEED_SHARE * self.clock.seconds / self._speed_seconds)))

    def run(self) -> None:
        """Run rounds until the time or the text is used up."""
        config, model = self.target.model.config, self.target.model
        self.plans = {v.name: plan_extension(config, model=model, **(v.extension or {})) for v in self.candidates}
        # A second pass over the text has different windows; a third one would add little.
        most = min(MOST, max(FIRST, 2 * self.text.n_tokens // self.length))
        texts = FIRST
        while True:
            for variant in self.candidates:
                self._measure(variant, texts)
            if texts == most:
                self.text_used_up = True
                return
            self._keep(staying(Summary(read_results(self.path)), [variant.name for variant in self.candidates]))
            front = self.choice().ranking
            while not (room := self._room(front)) and len(front) > 2:
                # The remaining time is for the leaders.
                front = front[:-1]
            if not room:
                return
            self._keep(front)
            texts = min(2 * texts, texts + room, most)
            # The baseline's failure beyond the trained length is soon clear; the short-context regression needs every
            # text.
            self._measure(Variant(gate_only=texts > MOST_UNEXTENDED), texts)

    def choice(self) -> Choice:
        """The best of the remaining candidates; eliminated ones count as compared."""
        summary = Summary(read_results(self.path))
        return choose(summary, [v.name for v in self.candidates], left=len(self.plans) - len(self.candidates))

    def _keep(self, names: Collection[str]) -> None:
        self.candidates = [variant for variant in self.candidates if variant.name in names]

    def _room(self, names: Sequence[str]) -> int:
        """How many more texts of these candidates fit in the time."""
        each = sum(self._seconds[name] for name in (UNEXTENDED, *names))
        return max(0, int((self.clock.left - self.speed_repeats * self._speed_seconds) / each))

    def _measure(self, variant: Variant, texts: int) -> None:
        limit, lengths = self.target.limit(variant), self._grid.lengths
        within = tuple(length for length in lengths if limit is None or length <= limit)
        # If a position table is shorter than all lengths, measure it within the trained length.
        grid = replace(self._grid, lengths=within or self._grid.gate, trials=texts, windows=texts)
        before, begun = self.texts.get(variant.name, 0), self.clock.now()
        Runner(
            self.target, self.text, grid, beyond=True,
            advance=lambda name, _: self.clock.tell(f"{name}: texts {before + 1} to {texts}"),
        ).run(self.path, [variant], merge=False)  # fmt: skip
        self._seconds[variant.name] = (self.clock.now() - begun) / (texts - before)
        self.texts[variant.name] = texts

    def finish(self) -> Summary:
        """Merge the results into one file."""
        last = max(self.texts[variant.name] for variant in self.candidates)
        grid = replace(self._grid, trials=last, windows=last)
        results = Runner(self.target, self.text, grid, beyond=True).run(self.path, self.candidates)
        assert results is not None
        return Summary(results)


def minutes_up(seconds: float) -> str:
    """Seconds in minutes, rounded up to a tenth."""
    return f"{math.ceil(seconds / 6) / 10:g}"


def _recommended(
    race: _Race, fitted: SavedMethod | None, left_out: dict[str, str], names: tuple[str, str]
) -> Recommended:
    """Choose, measure the speed of the choice, and say why."""
    target, config, summary, choice = race.target, race.target.model.config, race.finish(), race.choice()
    chosen = next(variant for variant in race.candidates if variant.name == choice.variant)
    limit = target.limit(Variant())
    timed = [Variant()] * (limit is None or limit >= race.length) + [chosen]
    race.clock.tell("speed")
    speed = speeds(target, timed, race.text.token_ids[: race.length], repeats=race.speed_repeats, now=race.clock.now)
    cache = kv_cache_bytes(text_config_of(config), race.length, target.model.dtype.itemsize)
    plan = race.plans[choice.variant]
    engines = [engine for engine in ENGINES if _runs(engine, config, plan)]
    said = why(summary, choice, plan, engines)
    about = {
        "model": names[0],
        "trained_length": summary.trained_length,
        "target_length": race.length,
        "text": f"{names[1]} {race.text.fingerprint}",
        "by": "recommend",
        "recommendation": said,
        "figures": {
            v: {
                "texts": race.texts[v],
                "found": (share := found_share(summary, v)) and share._asdict(),
                "loss": loss if math.isfinite(loss := summary_loss(summary, v)) else None,
                "short_regression": short_regression(summary, v),
            }
            for v in race.plans
        },
        "speed": {name: asdict(measured) for name, measured in speed.items()},
        "kv_cache_bytes": cache,
        "left_out": left_out,
        "minutes": race.clock.seconds / 60,
        "seconds": race.clock.seconds - race.clock.left,
        "machine": target.about["machine"],
        "versions": versions(),
    }
    if fitted is not None:
        about["fit"] = fitted.about
    assert plan.method is not None
    return Recommended(
        choice.variant, SavedMethod(plan.method, about), said, summary, left_out, speed, cache,
        dict(race.texts), race.text_used_up,
    )  # fmt: skip


def _runs(engine: str, config: PreTrainedConfig, plan: Plan) -> bool:
    try:
        export_for(engine, config, plan)
    except NotExportable:
        return False
    return True


def why(summary: Summary, choice: Choice, plan: Plan, engines: Sequence[str]) -> str:
    """The reasons, and where it runs, as a paragraph."""
    said = reasons(summary, choice)
    left = [v for v in summary.variants if v != UNEXTENDED and v not in choice.ranking]
    if left:
        said.append(f"Measured on fewer texts, as others did better there, and no longer compared: {', '.join(left)}.")
    if engines:
        said.append(f"Its saved config runs in {', '.join(engines)}.")
    elif plan.is_portable:
        said.append("Plain transformers loads the model as it is saved extended.")
    else:
        said.append(f"config.json cannot express it, as {plan.why_not_portable}: ctxext.load runs it in transformers.")
        plain = next((v for v in choice.ranking if v in summary.portable), None)
        if plain is not None:
            said.append(f"Of those that config.json can express, for servers too, {plain} comes first (--portable).")
    return " ".join(said)
