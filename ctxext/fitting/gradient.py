"""λ and the attention factor by gradient, every weight frozen: the numbers that belong to one model.

λ of every pair comes from one ramp, whose corners and height are learned: a number of its own for each pair learns the
texts that it was given by heart. The loss of a long text is rough in where the corners are, as fast pairs turn often
within it; so methods and ramps that lie far apart are tried first, and the gradient goes on from the best. The same
texts are read at every evaluation, so that two evaluations differ by what λ changes alone, which is less than texts
differ by. Nothing but these numbers gets a gradient, so memory is that of one row, whose layers are recomputed in the
backward pass where it is long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, softplus

from ctxext.encodings.rope import RopeGeometry
from ctxext.fitting.episodes import Episode, Material
from ctxext.fitting.live import LiveFactors, recomputed
from ctxext.methods import LongRoPE, RopeScaling, make_method
from ctxext.models.text_config import text_config_of
from ctxext.utils.processes import ALONE, Processes
from ctxext.utils.values import counted, suggest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Where a fit may start: at a named method, or at the ramp between two numbers of turns within the trained length, here
# by their logarithms to base 2.
NAMED = ("yarn", "llama3")
RAMPS = {f"ramp_{2.0**low:g}_{2.0**high:g}": (low, high) for low, high in ((-2, 0), (-1, 0), (-1, 1), (0, 1))}
STARTS = (*NAMED, *RAMPS)
# Logits that are held at once: of a row with more, every second position counts, or every third, ….
LOGITS = 2**28
# Of the rows of one evaluation where nobody says how many, and how many rows that may be.
TOKENS, FEWEST_ROWS, MOST_ROWS = 40_000, 4, 32
ACTIVATIONS = 4 * 2**30  # bytes
# The loss in nats from which on a key counts by its logarithm: one that is lost is not to decide everything.
KEY_NATS = 0.01


@dataclass(frozen=True, kw_only=True)
class GradientSettings:
    """How λ is learned.

    Attributes:
        evaluations: of the loss and its gradient, at most; it ends before where nothing changes any more.
        rows: of the target length that hide a passkey in text; None for as many as hold TOKENS.
        short: weight of the divergence, in nats a token, from what the unextended model says within its length.
        text: weight of the loss of the rows' text, in nats a token.
        retrieval: weight of the loss of the rows' passkeys, in nats a key; of what is beyond KEY_NATS the logarithm.
        start: one of STARTS; None for that with the least sum of these losses on held-out text.
        recompute: keep one hidden state a layer for the backward pass and compute the rest again; None for only where
            a row would take more than ACTIVATIONS.
        minutes: begin no evaluation after which that time would be over; there must be time for one.
    """

    evaluations: int = 8
    rows: int | None = None
    short: float = 0.25
    text: float = 1.0
    retrieval: float = 2.0
    start: str | None = None
    recompute: bool | None = None
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.evaluations < 1 or (self.rows is not None and self.rows < 1):
            raise ValueError(f"evaluations and rows must be >= 1, got {self.evaluations} and {self.rows}.")
        for name in ("short", "text", "retrieval", "minutes"):
            value, least = getattr(self, name), " > 0" if name == "minutes" else " >= 0"
            if value is not None and not (0 <= value < math.inf and (value or name != "minutes")):
                raise ValueError(f"{name} must be a finite number{least}, got {value}.")
        if not self.short + self.text + self.retrieval > 0:
            raise ValueError("short, text and retrieval are all 0, so there is nothing to learn. Leave one above 0.")
        if self.start not in (None, *STARTS):
            raise ValueError(f"a fit cannot start from {self.start!r}{suggest(str(self.start), STARTS)}")

    def rows_at(self, target: int) -> int:
        """How many rows of `target` tokens an evaluation reads."""
        return self.rows or min(MOST_ROWS, max(FEWEST_ROWS, TOKENS // target))

    def tokens(self, trained: int, target: int) -> int:
        """How many a fit reads about, a backward pass counted as two forward ones."""
        starts = len(STARTS) if self.start is None else 1
        descent = 3 * self.evaluations * self.rows_at(target) * target
        return (starts + 1) * self.tokens_to_try(trained, target) + descent

    def tokens_to_try(self, trained: int, target: int) -> int:
        """How many are read to choose by, for each method."""
        return 8 * trained + 6 * round((trained * target) ** 0.5) + 6 * target

    def weighed(self, kind: str, loss: Tensor) -> Tensor:
        """What a loss adds to the sum that is made small."""
        weight = {"short": self.short, "text": self.text, "key": self.retrieval}[kind]
        return weight * (KEY_NATS * (loss / KEY_NATS).log1p() if kind == "key" else loss)


@dataclass
class Fit:
    """The outcome of a fit.

    Attributes:
        method: the rescale factors and the attention factor found.
        start: of STARTS, where it began.
        tried: the losses on validation text of every start that was tried, by name and kind, and their weighted sum.
        history: for each evaluation its seconds and losses.
        kept_start: whether `method` is the start itself, as what was learned has the larger weighted sum on text that
            was not learned from.
    """

    method: LongRoPE
    start: str
    tried: dict[str, dict[str, float]]
    history: list[dict[str, float]] = field(default_factory=list)
    kept_start: bool = False


KINDS = ("short", "text", "key")
Losses = dict[str, Tensor]


def row_losses(model: PreTrainedModel, episode: Episode) -> Losses:
    """The loss of a row's text in nats a token, and of its answer in nats."""
    ids = torch.tensor([episode.input_ids], device=model.device)
    n, n_answer = len(episode), episode.n_answer
    stride = _stride(model, n - episode.text_from)
    at = torch.cat(
        [torch.arange(episode.text_from - 1, n - 1 - n_answer, stride), torch.arange(n - 1 - n_answer, n - 1)]
    )
    at = at.to(model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=at).logits[0].float()
    losses = cross_entropy(logits, ids[0, at + 1], reduction="none")
    n_text = len(at) - n_answer
    return {"text": losses[:n_text].mean()} | ({"key": losses[n_text:].sum()} if n_answer else {})


def short_loss(model: PreTrainedModel, live: LiveFactors, episode: Episode, use: Callable[[], None]) -> Losses:
    """Kullback-Leibler divergence, in nats a token, from what the model says as it was trained."""
    ids = torch.tensor([episode.input_ids], device=model.device)
    at = torch.arange(0, len(episode), _stride(model, len(episode)), device=model.device)

    def logprobs() -> Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=at).logits[0].float().log_softmax(-1)

    with torch.no_grad():
        live.use(None)
        trained = logprobs()
    use()
    return {"short": kl_div(logprobs(), trained, log_target=True, reduction="batchmean")}


def _stride(model: PreTrainedModel, n_positions: int) -> int:
    return math.ceil(n_positions * text_config_of(model.config).vocab_size / LOGITS)


def _activations(model: PreTrainedModel, length: int) -> float:
    """Bytes that a row of `length` tokens leaves for the backward pass: some 34 numbers a hidden one and layer.

    Korthikanti et al. (2022), equation 2, without attention's own scores.
    """
    config = text_config_of(model.config)
    return 34.0 * length * config.hidden_size * config.num_hidden_layers * model.dtype.itemsize / 2


@dataclass(frozen=True)
class Validation:
    """What methods are chosen by: the losses of the fit, on text that it does not read."""

    short: tuple[Episode, ...]
    rows: tuple[Episode, ...]

    @classmethod
    def of(cls, material: Material, seed: int) -> Validation:
        """Four texts of the trained length; six keys at the target length, and six at a shorter one."""
        lengths = [material.between(material.trained, share) for share in (0.5, 1)]
        return cls(
            tuple(material.text(material.trained, seed, trial) for trial in range(4)),
            tuple(
                material.hidden(length, depth, seed, trial)
                for length in lengths
                for depth in (0.0, 0.5, 1.0)
                for trial in range(2)
            ),
        )

    @torch.no_grad()
    def losses(
        self, model: PreTrainedModel, live: LiveFactors, method: RopeScaling, settings: GradientSettings
    ) -> dict[str, float]:
        """The mean losses of each kind under `method`, and the mean of what they add to the sum."""
        found: dict[str, list[Tensor]] = {}
        for episode in self.short:
            for kind, value in short_loss(model, live, episode, lambda: live.use(method)).items():
                found.setdefault(kind, []).append(value)
        live.use(method)
        for episode in self.rows:
            for kind, value in row_losses(model, episode).items():
                found.setdefault(kind, []).append(value)
        means = {kind: float(torch.stack(values).mean()) for kind, values in found.items()}
        total = sum(float(settings.weighed(kind, torch.stack(values)).mean()) for kind, values in found.items())
        return {**means, "total": total}


def start_at(name: str, rope: RopeGeometry, factor: float) -> RopeScaling:
    """One of STARTS; a ramp has half of YaRN's logarithm in its attention factor."""
    if name in NAMED:
        named = make_method(name, factor)
        assert isinstance(named, RopeScaling)
        return named
    low, high = RAMPS[name]
    log_factors = math.log(factor) * _ramp(_octaves(rope), torch.tensor(low), torch.tensor(high - low))
    attention_factor = torch.tensor(1 + 0.05 * math.log(factor), dtype=torch.float64)
    return _as_method(log_factors.exp(), attention_factor, rope, factor)


def _octaves(rope: RopeGeometry) -> Float64[Tensor, " pair"]:
    """By pair, how often it turns within the trained length: the logarithm to base 2."""
    return (rope.inv_freq * rope.original_max_position_embeddings / (2 * math.pi)).log2()


def _ramp(octaves: Tensor, low: Tensor, width: Tensor) -> Tensor:
    """1 below `low`, 0 above `low + width`, a line in between; rounded, as a pair at a corner would bend the loss."""
    t = (low - octaves) / width + 1
    return softplus(t, beta=10) - softplus(t - 1, beta=10)


class Ramp:
    """The four numbers that are learned, and what they say.

    ln λ of a pair is `height` where it turns less than 2^`low` times within the trained length, 0 where it turns more
    than 2^`high` times, and linear in the logarithm of its turns in between.

    Attributes:
        numbers: of shape (..., 4), 0 at the start: of `low`, of the logarithm of `high - low`, of `height` and of the
            logarithm of the attention factor, in units by which what a model says changes about alike.
    """

    UNITS = torch.tensor([0.3, 0.3, 0.6, 0.2], dtype=torch.float64)

    def __init__(self, rope: RopeGeometry, start: RopeScaling) -> None:
        self.octaves = _octaves(rope)
        log = start.rescale_factors(rope).log()
        self.begun = torch.tensor([0.0, math.log(2), log.max(), start.attention_scaling(rope).log()]).double()
        self.numbers = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([self.numbers], max_iter=200, line_search_fn="strong_wolfe")

        def distance() -> Tensor:
            optimizer.zero_grad()
            distance = (self.rescale_factors(self.numbers).log() - log).square().sum()
            distance.backward()
            return distance

        optimizer.step(distance)  # to the ramp that is nearest to the start's λ
        self.begun += self.UNITS * self.numbers.detach()
        self.numbers = torch.zeros_like(self.numbers, requires_grad=True)

    def rescale_factors(self, numbers: Tensor) -> Float64[Tensor, " pair"]:
        low, log_width, height, _ = (self.begun + self.UNITS * numbers)[..., None].unbind(-2)
        return (height.clamp(min=0) * _ramp(self.octaves, low, log_width.exp())).exp()

    def attention_factor(self, numbers: Tensor) -> Tensor:
        return (self.begun + self.UNITS * numbers)[..., 3].exp()


def descend(evaluate: Callable[[], float], numbers: Tensor) -> None:
    """Move `numbers` to where `evaluate`, which leaves its gradient in `numbers.grad`, is least.

    A trust region whose model learns its curvature by symmetric rank-one updates (Nocedal and Wright, 2006, algorithm
    6.2): no step is much longer than the last that went as expected, and one that went wrong teaches, too. A line
    search may spend most of few evaluations on one step.
    """

    def read(at: Tensor) -> tuple[float, Tensor]:
        with torch.no_grad():
            numbers.copy_(at.view_as(numbers))
        value = evaluate()
        assert numbers.grad is not None
        return value, numbers.grad.flatten().clone()

    here = numbers.detach().flatten().clone()
    value, slope = read(here)
    radius, longest, shortest = 0.3, 1.0, 1e-3
    curvature = torch.eye(len(here), dtype=here.dtype) * slope.norm() / radius
    while radius > shortest and float(slope.norm()) > 0:
        step = best_step(curvature, slope, radius)
        length = float(step.norm())
        expected = float(slope @ step + step @ curvature @ step / 2)
        new_value, new_slope = read(here + step)
        missed = new_slope - slope - curvature @ step
        if abs(float(missed @ step)) > 1e-8 * float(missed.norm()) * length:
            curvature = curvature + missed.outer(missed) / (missed @ step)
        if (gained := (new_value - value) / expected) < 0.25:
            radius = length / 2
        elif gained > 0.75 and length > 0.8 * radius:
            radius = min(2 * radius, longest)
        if new_value < value:
            here, value, slope = here + step, new_value, new_slope


def best_step(curvature: Tensor, slope: Tensor, radius: float) -> Tensor:
    """The step of at most `radius` at the end of which a quadratic is least (Nocedal and Wright, 2006, section 4.3)."""
    values, vectors = torch.linalg.eigh(curvature)
    along = vectors.T @ slope

    def step(shift: float) -> Tensor:
        return -vectors @ (along / (values + shift))

    low = max(0.0, -float(values[0])) + 1e-12
    if float(step(low).norm()) <= radius:
        return step(low)
    high = low + float(slope.norm()) / radius
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(step(middle).norm()) > radius else (low, middle)
    return step(high)


class _Enough(Exception):
    """There is no evaluation, or no time, left."""


def fit_by_gradient(
    model: PreTrainedModel,
    live: LiveFactors,
    training: Material,
    held_out: Material,
    settings: GradientSettings = GradientSettings(),
    *,
    advance: Callable[[float, str], None] = lambda share, state: None,
    processes: Processes = ALONE,
) -> Fit:
    """Learn λ and the attention factor: try the starts, and `descend` from the best.

    Args:
        live: of `model`, entered; `model` is `frozen`.
        training, held_out: text to learn from, and other text to choose by.
        advance: called with the share that is done and what is being done.

    Raises:
        ValueError: `settings.minutes` are too few for one evaluation.
        RuntimeError: a loss is not finite.
    """
    began = time.perf_counter()

    def clock() -> float:
        # The processes' mean is that of all of them, as they have to end at the same evaluation.
        return (time.perf_counter() - began) / processes.world

    def elapsed() -> float:
        return float(processes.total(torch.tensor([clock()], dtype=torch.float64)))

    rope, factor = live.rope, training.target / training.trained
    check = Validation.of(held_out, settings.seed)
    tried: dict[str, dict[str, float]] = {}
    starts: dict[str, RopeScaling] = {}
    for name in STARTS if settings.start is None else (settings.start,):
        advance(0.0, f"trying {name}")
        starts[name] = start_at(name, rope, factor)
        tried[name] = check.losses(model, live, starts[name], settings)
        if settings.minutes and len(tried) == 1:
            pace = settings.tokens_to_try(training.trained, training.target) / elapsed()
            needed = replace(settings, evaluations=1).tokens(training.trained, training.target) / pace / 60
            if needed > settings.minutes:
                raise ValueError(
                    f"{counted(settings.minutes, 'minute')} is not enough to try the starts and evaluate one step at "
                    f"{training.target:,} tokens. Pass {math.ceil(10 * needed) / 10:g} minutes at least, or one start."
                )
    start = min(tried, key=lambda name: tried[name]["total"])
    ramp = Ramp(rope, starts[start])
    shorts, rows = training.texts(settings.seed, settings.rows_at(training.target))

    def use() -> None:
        live.put(ramp.rescale_factors(ramp.numbers), ramp.attention_factor(ramp.numbers))

    def read(row: Episode) -> Losses:
        use()
        return row_losses(model, row)

    # What is read, and its share in the mean.
    parts = [
        *((partial(short_loss, model, live, short, use), 1 / len(shorts)) for short in shorts),
        *((partial(read, row), 1 / len(rows)) for row in rows),
    ]
    ready = elapsed()
    history: list[dict[str, float]] = []
    best: tuple[float, Tensor] = (math.inf, ramp.numbers.detach().clone())
    state = f"beginning with {start}"

    def evaluate() -> float:
        nonlocal best, state
        if history and settings.minutes:
            now = history[-1]["seconds"]
            if now + (now - ready) / len(history) + ready / len(tried) > 60 * settings.minutes:
                raise _Enough
        if len(history) == settings.evaluations:
            raise _Enough
        ramp.numbers.grad = torch.zeros_like(ramp.numbers)
        said = dict.fromkeys(("total", *KINDS), 0.0)
        mine = parts[processes.rank :: processes.world]
        for index, (part, share) in enumerate(mine):
            advance((len(history) + index / len(mine)) / settings.evaluations, state)
            found = part()
            total = share * torch.stack([settings.weighed(kind, loss) for kind, loss in found.items()]).sum()
            total.backward()
            said["total"] += float(total.detach())
            for kind, loss in found.items():
                said[kind] += share * float(loss.detach())
        *losses, seconds = processes.total(torch.tensor([*said.values(), clock()], dtype=torch.float64)).tolist()
        said = dict(zip(said, losses))
        if not math.isfinite(sum(losses)):
            raise RuntimeError(
                f"evaluation {len(history)} has losses that are not finite ({said}). Load the model in float32 or "
                "bfloat16, and see that the baseline reads this text."
            )
        ramp.numbers.grad = processes.total(ramp.numbers.grad)
        best = min(best, (said["total"], ramp.numbers.detach().clone()), key=lambda pair: pair[0])
        history.append({"seconds": seconds, **said})
        state = ", ".join(f"{kind} {said[kind]:.3f}" for kind in KINDS)
        return said["total"]

    recompute = _activations(model, training.target) > ACTIVATIONS if settings.recompute is None else settings.recompute
    with recomputed(model) if recompute else nullcontext(), suppress(_Enough):
        descend(evaluate, ramp.numbers)
    advance(1.0, state)
    numbers = best[1]
    fitted = _as_method(ramp.rescale_factors(numbers), ramp.attention_factor(numbers), rope, factor)
    tried["fitted"] = check.losses(model, live, fitted, settings)
    kept = tried["fitted"]["total"] > tried[start]["total"]
    if kept:
        fitted = _as_method(starts[start].rescale_factors(rope), starts[start].attention_scaling(rope), rope, factor)
    return Fit(fitted, start, tried, history, kept)


def _as_method(rescale_factors: Tensor, attention_factor: Tensor, rope: RopeGeometry, factor: float) -> LongRoPE:
    return LongRoPE(
        factor=factor,
        long_factor=tuple(rescale_factors.tolist()),
        attention_factor=float(attention_factor),
        fitted_to=(rope.rope_theta, rope.original_max_position_embeddings),
    )
