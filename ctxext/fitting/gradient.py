"""Learn λ and the attention factor by gradient, with all weights frozen.

λ is parametrised by one ramp with learned corners and height, as a free value per pair overfits the training texts. The
loss of a long text is not smooth in the corners, as fast pairs turn often within it; so several methods and distant
ramps are tried first, and the gradient starts from the best. Every evaluation reads the same texts, so that only λ
changes the loss, by less than texts differ. Only these numbers get gradients, so memory is that of one row, with
recomputed layers if it is long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

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
from ctxext.utils.values import check_minutes, counted, is_number, suggest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Starting points: a named method, or the ramp between two numbers of turns within the trained length (log2).
NAMED = ("yarn", "llama3")
RAMPS = {f"ramp_{2.0**low:g}_{2.0**high:g}": (low, high) for low, high in ((-2, 0), (-1, 0), (-1, 1), (0, 1))}
STARTS = (*NAMED, *RAMPS)
# Logits held at once: longer rows are subsampled to every second, third, … position.
LOGITS = 2**28
# Tokens of the rows of an evaluation by default, and the bounds on the number of rows.
TOKENS, FEWEST_ROWS, MOST_ROWS = 40_000, 4, 32
ACTIVATIONS = 4 * 2**30  # bytes
# Passkey losses above this (nats) count logarithmically, so that one missed passkey does not dominate.
KEY_NATS = 0.01


@dataclass(frozen=True, kw_only=True)
class GradientSettings:
    """The settings of a fit by gradient.

    Attributes:
        evaluations: the maximum number of evaluations of loss and gradient; stops earlier at convergence.
        rows: the number of rows of the target length with a passkey; None for as many as TOKENS allows.
        short: weight of the KL divergence from the unextended model within the trained length, in nats per token.
        text: weight of the text loss of the rows, in nats per token.
        retrieval: weight of the passkey loss of the rows, in nats per passkey, logarithmic beyond KEY_NATS.
        start: one of STARTS; None for the one with the smallest weighted loss on held-out text.
        recompute: keep one hidden state per layer and recompute the rest in the backward pass; None: only if a row
            would take more than ACTIVATIONS.
        minutes: the time limit: no evaluation is begun that would exceed it; must suffice for one.
    """

    by: ClassVar[str] = "gradient"

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
        for name in ("evaluations", "rows"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be >= 1, got {count}.")
        for name in ("short", "text", "retrieval"):
            if not is_number(value := getattr(self, name), low=0):
                raise ValueError(f"{name} must be a finite number >= 0, got {value}.")
        check_minutes(self.minutes)
        if not self.short + self.text + self.retrieval > 0:
            raise ValueError(
                "short, text and retrieval are all 0, so there is nothing to learn. Set one of them above 0."
            )
        if self.start not in (None, *STARTS):
            raise ValueError(f"a fit cannot start from {self.start!r}{suggest(str(self.start), STARTS)}")

    def rows_at(self, target: int) -> int:
        """The number of rows of `target` tokens per evaluation."""
        return self.rows or min(MOST_ROWS, max(FEWEST_ROWS, TOKENS // target))

    def tokens(self, trained: int, target: int) -> int:
        """Approximate tokens read by a fit, counting a backward pass as two forward passes."""
        starts = len(STARTS) if self.start is None else 1
        descent = 3 * self.evaluations * self.rows_at(target) * target
        return (starts + 1) * self.tokens_to_try(trained, target) + descent

    def tokens_to_try(self, trained: int, target: int) -> int:
        """Tokens read per method for selection."""
        return 8 * trained + 6 * round((trained * target) ** 0.5) + 6 * target

    def weighed(self, kind: str, loss: Tensor) -> Tensor:
        """A loss's contribution to the objective."""
        weight = {"short": self.short, "text": self.text, "key": self.retrieval}[kind]
        return weight * (KEY_NATS * (loss / KEY_NATS).log1p() if kind == "key" else loss)


@dataclass
class Fit:
    """The outcome of a fit.

    Attributes:
        method: the rescale factors and the attention factor found, or the start.
        start: the starting point, one of STARTS.
        tried: the validation losses of every start tried, by name and kind, and their weighted sum.
        history: the seconds and losses of each evaluation.
        kept_start: whether `method` is the start itself: no step was better, or what they led to was worse on held-out
            text.
        searched: what a search says of its result, by name.
    """

    method: RopeScaling
    start: str
    tried: dict[str, dict[str, float]]
    history: list[dict[str, float]] = field(default_factory=list)
    kept_start: bool = False
    searched: dict[str, Any] = field(default_factory=dict)


KINDS = ("short", "text", "key")
Losses = dict[str, Tensor]


def row_losses(model: PreTrainedModel, episode: Episode) -> Losses:
    """The text loss of a row in nats per token, and its answer's loss in nats."""
    ids = torch.tensor([episode.input_ids], device=model.device)
    n, n_answer = len(episode), episode.n_answer
    stride = _stride(model, n - episode.text_from)
    places = [*range(episode.text_from - 1, n - 1 - n_answer, stride), *range(n - 1 - n_answer, n - 1)]
    at = torch.tensor(places, device=model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=at).logits[0].float()
    losses = cross_entropy(logits, ids[0, at + 1], reduction="none")
    n_text = len(at) - n_answer
    return {"text": losses[:n_text].mean()} | ({"key": losses[n_text:].sum()} if n_answer else {})


def short_loss(model: PreTrainedModel, live: LiveFactors, episode: Episode, use: Callable[[], None]) -> Losses:
    """The KL divergence from the unextended model, in nats per token."""
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
    """Activation bytes of a row of `length` tokens: about 34 values per hidden unit and layer.

    Korthikanti et al. (2022), equation 2, without attention's own scores.
    """
    config = text_config_of(model.config)
    return 34.0 * length * config.hidden_size * config.num_hidden_layers * model.dtype.itemsize / 2


@dataclass(frozen=True)
class Validation:
    """The selection criterion: the fit's losses on held-out text."""

    short: tuple[Episode, ...]
    rows: tuple[Episode, ...]

    @classmethod
    def of(cls, material: Material, seed: int) -> Validation:
        """Four texts of the trained length, six passkeys at the target length, and six at a shorter one."""
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
        """The mean losses of each kind under `method`, and their mean contribution to the objective."""
        parts = [short_loss(model, live, episode, lambda: live.use(method)) for episode in self.short]
        live.use(method)
        parts += [row_losses(model, episode) for episode in self.rows]
        found = {kind: torch.stack(values) for kind in KINDS if (values := [p[kind] for p in parts if kind in p])}
        total = sum(float(settings.weighed(kind, values).mean()) for kind, values in found.items())
        return {**{kind: float(values.mean()) for kind, values in found.items()}, "total": total}


def start_at(name: str, rope: RopeGeometry, factor: float) -> RopeScaling:
    """Build one of STARTS; ramps have half of YaRN's logarithm in their attention factor."""
    if name in NAMED:
        named = make_method(name, factor)
        assert isinstance(named, RopeScaling)
        return named
    low, high = RAMPS[name]
    log_factors = math.log(factor) * _ramp(_octaves(rope), torch.tensor(low), torch.tensor(high - low))
    return _as_method(log_factors.exp(), 1 + 0.05 * math.log(factor), rope, factor)


def _octaves(rope: RopeGeometry) -> Float64[Tensor, " pair"]:
    """log2 of each pair's turns within the trained length."""
    return (rope.inv_freq * rope.original_max_position_embeddings / (2 * math.pi)).log2()


def _ramp(octaves: Tensor, low: Tensor, width: Tensor) -> Tensor:
    """1 below `low`, 0 above `low + width`, linear in between, with smoothed corners, as a pair at a corner would make
    the loss non-smooth."""
    t = (low - octaves) / width + 1
    return softplus(t, beta=10) - softplus(t - 1, beta=10)


class Ramp:
    """The four learned parameters.

    ln λ of a pair is `height` below 2^`low` turns within the trained length, 0 above 2^`high` turns, and linear in the
    logarithm of its turns in between.

    Attributes:
        numbers: of shape (..., 4), 0 at the start: `low`, log(`high - low`), `height` and the log of the attention
            factor, scaled to have similar effects on the output.
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

        optimizer.step(distance)  # to the ramp nearest to the start's λ
        self.begun += self.UNITS * self.numbers.detach()
        self.numbers = torch.zeros_like(self.numbers, requires_grad=True)

    def rescale_factors(self, numbers: Tensor) -> Float64[Tensor, " pair"]:
        low, log_width, height, _ = (self.begun + self.UNITS * numbers)[..., None].unbind(-2)
        return (height.clamp(min=0) * _ramp(self.octaves, low, log_width.exp())).exp()

    def attention_factor(self, numbers: Tensor) -> Tensor:
        return (self.begun + self.UNITS * numbers)[..., 3].exp()


def descend(evaluate: Callable[[], float], numbers: Tensor) -> None:
    """Minimise `evaluate`, which leaves its gradient in `numbers.grad`, over `numbers`.

    A trust region method with symmetric rank-one updates (Nocedal and Wright, 2006, algorithm 6.2): failed steps
    improve the model too, whereas a line search may spend most of few evaluations on one step.
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
    """The minimiser of a quadratic within `radius` (Nocedal and Wright, 2006, section 4.3)."""
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
    """Evaluations or time are used up."""


def fit_by_gradient(
    model: PreTrainedModel,
    live: LiveFactors,
    training: Material,
    held_out: Material,
    settings: GradientSettings,
    *,
    advance: Callable[[float, str], None] = lambda share, state: None,
    processes: Processes = ALONE,
) -> Fit:
    """Learn λ and the attention factor: try the starts, then `descend` from the best.

    Args:
        live: the entered `LiveFactors` of `model`, which is `frozen`.
        training, held_out: the training text, and the text for selection.
        advance: called with the finished share and a progress message.

    Raises:
        ValueError: `settings.minutes` is too short for one evaluation.
        RuntimeError: a loss is not finite.
    """
    began = time.perf_counter()

    def clock() -> float:
        # Averaged over processes, which must stop at the same evaluation.
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
                    f"{training.target:,} tokens. Pass at least {math.ceil(10 * needed) / 10:g} minutes, or one start."
                )
    start = min(tried, key=lambda name: tried[name]["total"])
    ramp = Ramp(rope, starts[start])
    shorts, rows = training.texts(settings.seed, settings.rows_at(training.target))

    def use() -> None:
        live.put(ramp.rescale_factors(ramp.numbers), ramp.attention_factor(ramp.numbers))

    def read(row: Episode) -> Losses:
        use()
        return row_losses(model, row)

    # The rows, and their weight in the mean.
    parts = [
        *((partial(short_loss, model, live, short, use), 1 / len(shorts)) for short in shorts),
        *((partial(read, row), 1 / len(rows)) for row in rows),
    ]
    ready = elapsed()
    history: list[dict[str, float]] = []
    best: tuple[float, Tensor] = (math.inf, ramp.numbers.detach().clone())
    state = f"starting from {start}"

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
                "bfloat16, and check the baseline's loss on this text."
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
    kept = not numbers.any() or tried["fitted"]["total"] > tried[start]["total"]
    return Fit(starts[start] if kept else fitted, start, tried, history, kept)


def _as_method(
    rescale_factors: Tensor, attention_factor: Tensor | float, rope: RopeGeometry, factor: float
) -> LongRoPE:
    return LongRoPE(
        factor=factor,
        long_factor=tuple(rescale_factors.tolist()),
        attention_factor=float(attention_factor),
        fitted_to=(rope.rope_theta, rope.original_max_position_embeddings),
    )
