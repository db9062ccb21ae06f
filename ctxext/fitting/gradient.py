"""λ and the attention factor by gradient descent, every weight frozen: the d/2 + 1 numbers that belong to one model.

Nothing but λ gets a gradient, so memory is that of one row, whose layers are recomputed in the backward pass where it
is long. A step reads text at the trained length (where it is to say what the unextended model says), longer text, and
hidden numbers at lengths up to the target.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from ctxext.encodings.rope import RopeGeometry
from ctxext.fitting.episodes import Episode, Material
from ctxext.fitting.live import LiveFactors, recomputed
from ctxext.methods import LongRoPE, RopeScaling, make_method
from ctxext.sites.twin import text_config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Where a fit may start: the best of these on validation text.
STARTS = ("yarn", "ntk_by_parts", "llama3", "ntk")
# Positions of a row whose logits are held at once.
SCORED = 2048
# That a fit reads where nobody says how many steps.
TOKENS = 400_000
ACTIVATIONS = 4 * 2**30  # bytes


@dataclass(frozen=True, kw_only=True)
class GradientSettings:
    """How λ is learned.

    Attributes:
        steps: of the optimizer; None for as many as read TOKENS, and at least 30.
        learning_rate: of ln λ, for pairs that turn at most once within the target length. Faster ones get as much less
            as they turn more, so that a step moves the angle of every pair at the target by no more than theirs.
        attention_learning_rate: of ln attention_factor.
        rows: in each step that hide a pass key in text: one of the target length, the others shorter.
        short: weight of the divergence, in nats a token, from what the unextended model says within its length.
        text: weight of the loss of the rows' text, in nats a token.
        retrieval: weight of the loss of the rows' pass keys, in nats a key.
        start: a static method by name; None for that of STARTS with the least sum of "short" and "text" on held-out
            text: a few keys say little, and those that are lost are what descent mends first.
        monotone: keep λ from falling with the pair's index, as LongRoPE does.
        recompute: keep one hidden state a layer for the backward pass and compute the rest again; None for only where
            a row would take more than ACTIVATIONS.
        minutes: end after that time at the latest, with the schedule run through.
    """

    steps: int | None = None
    learning_rate: float = 0.04
    attention_learning_rate: float = 0.01
    rows: int = 3
    short: float = 1.0
    text: float = 1.0
    retrieval: float = 50.0
    start: str | None = None
    monotone: bool = False
    recompute: bool | None = None
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or (self.steps is not None and self.steps < 1):
            raise ValueError(f"steps and rows must be >= 1, got {self.steps} and {self.rows}.")
        for name in ("learning_rate", "attention_learning_rate", "short", "text", "retrieval", "minutes"):
            value, least = getattr(self, name), " > 0" if name == "minutes" else " >= 0"
            if value is not None and not (0 <= value < math.inf and (value or name != "minutes")):
                raise ValueError(f"{name} must be a finite number{least}, got {value}.")
        if not self.short + self.text + self.retrieval > 0:
            raise ValueError("short, text and retrieval are all 0, so there is nothing to learn. Leave one above 0.")
        if self.start is not None:
            starting_point(self.start, 2.0)


@dataclass
class Fit:
    """The outcome of a fit.

    Attributes:
        method: the rescale factors and the attention factor found.
        start: the named method that it began with.
        tried: the losses on validation text of every method that was tried, by name and kind.
        history: for each step its seconds and losses.
        kept_start: whether `method` is the start itself, as what was learned has the larger sum of losses, weighted as
            in the steps, on text that was not learned from.
    """

    method: LongRoPE
    start: str
    tried: dict[str, dict[str, float]]
    history: list[dict[str, float]] = field(default_factory=list)
    kept_start: bool = False


def starting_point(name: str, factor: float) -> RopeScaling:
    """A static method by name.

    Raises:
        ValueError: there is none by that name, it follows the length, or it needs options.
    """
    method = make_method(name, factor)
    if not isinstance(method, RopeScaling) or method.is_dynamic:
        raise ValueError(f"start must be a method with one λ for all lengths ({', '.join(STARTS)}), got {name!r}.")
    return method


KINDS = ("short", "text", "retrieval")
Losses = dict[str, Tensor]


def row_losses(model: PreTrainedModel, episode: Episode) -> Losses:
    """The loss of a row's text in nats a token (of at most SCORED of them), and of its answer in nats."""
    ids = torch.tensor([episode.input_ids], device=model.device)
    n, n_answer = len(episode), episode.n_answer
    stride = -(-(n - episode.text_from) // SCORED)
    at = torch.cat(
        [torch.arange(episode.text_from - 1, n - 1 - n_answer, stride), torch.arange(n - 1 - n_answer, n - 1)]
    )
    at = at.to(model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=at).logits[0].float()
    losses = cross_entropy(logits, ids[0, at + 1], reduction="none")
    n_text = len(at) - n_answer
    return {"text": losses[:n_text].mean()} | ({"retrieval": losses[n_text:].sum()} if n_answer else {})


def short_loss(model: PreTrainedModel, live: LiveFactors, episode: Episode, use: Callable[[], None]) -> Losses:
    """Kullback-Leibler divergence, in nats a token, from what the model says as it was trained."""
    ids = torch.tensor([episode.input_ids], device=model.device)
    at = torch.arange(0, len(episode), -(-len(episode) // SCORED), device=model.device)

    def logprobs() -> Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=at).logits[0].float().log_softmax(-1)

    with torch.no_grad():
        live.use(None)
        trained = logprobs()
    use()
    return {"short": kl_div(logprobs(), trained, log_target=True, reduction="batchmean")}


def _activations(model: PreTrainedModel, length: int) -> float:
    """Bytes that a row of `length` tokens leaves for the backward pass: some 34 numbers a hidden one and layer.

    Korthikanti et al. (2022), equation 2, without attention's own scores.
    """
    config = text_config_of(model.config)
    return 34.0 * length * config.hidden_size * config.num_hidden_layers * model.dtype.itemsize / 2


@dataclass(frozen=True)
class Validation:
    """What methods are chosen by: the losses of the steps, on text that no step reads."""

    short: tuple[Episode, ...]
    rows: tuple[Episode, ...]

    @classmethod
    def of(cls, material: Material, seed: int) -> Validation:
        """Four texts of the trained length; keys at three depths, at the target length and a shorter one."""
        lengths = [material.between(material.trained, share) for share in (0.5, 1)]
        return cls(
            tuple(material.text(material.trained, seed, trial) for trial in range(4)),
            tuple(material.hidden(length, depth, seed) for length in lengths for depth in (0.0, 0.5, 1.0)),
        )

    @torch.no_grad()
    def losses(self, model: PreTrainedModel, live: LiveFactors, method: RopeScaling) -> dict[str, float]:
        """The mean losses of each kind under `method`."""
        found: dict[str, list[float]] = {}
        for episode in self.short:
            for kind, value in short_loss(model, live, episode, lambda: live.use(method)).items():
                found.setdefault(kind, []).append(float(value))
        live.use(method)
        for episode in self.rows:
            for kind, value in row_losses(model, episode).items():
                found.setdefault(kind, []).append(float(value))
        return {kind: sum(values) / len(values) for kind, values in found.items()}


class Factors:
    """The numbers that are learned.

    λ is exp(angle / turns), angle >= 0, where turns are those of the pair within the target, at least 1.
    """

    def __init__(self, rope: RopeGeometry, start: RopeScaling, target: int, monotone: bool) -> None:
        self.turns = (rope.inv_freq * target / (2 * math.pi)).clamp(min=1)
        self.monotone = monotone
        self.angles = (start.rescale_factors(rope).log().clamp(min=0) * self.turns).requires_grad_()
        self.log_attention = start.attention_scaling(rope).log().clone().requires_grad_()

    def rescale_factors(self, angles: Tensor) -> Float64[Tensor, " pair"]:
        log = angles / self.turns
        return (log.cummax(-1).values if self.monotone else log).exp()

    @torch.no_grad()
    def bound(self) -> None:
        """Bring what went below λ = 1 back to it."""
        self.angles.clamp_(min=0)


def fit_by_gradient(
    model: PreTrainedModel,
    live: LiveFactors,
    training: Material,
    held_out: Material,
    settings: GradientSettings = GradientSettings(),
    *,
    advance: Callable[[float, str], None] = lambda share, state: None,
    reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    rank: int = 0,
    world: int = 1,
) -> Fit:
    """Learn λ and the attention factor.

    Args:
        live: of `model`, entered; `model` is `frozen`.
        training, held_out: text to learn from, and other text to choose by.
        advance: called with the share that is done and what is being done.
        reduce: the sum of a tensor over all processes; `rank` and `world` say which of them this is.

    Raises:
        RuntimeError: a loss is not finite.
    """
    began = time.perf_counter()
    rope, factor = live.rope, training.target / training.trained
    check = Validation.of(held_out, settings.seed)
    tried: dict[str, dict[str, float]] = {}
    starts: dict[str, RopeScaling] = {}
    for name in STARTS if settings.start is None else (settings.start,):
        advance(0.0, f"trying {name}")
        starts[name] = starting_point(name, factor)
        tried[name] = check.losses(model, live, starts[name])
    start = min(tried, key=lambda name: tried[name]["short"] + tried[name]["text"])
    steps = settings.steps or max(30, TOKENS // training.tokens_of_a_step(settings.rows))
    recompute = _activations(model, training.target) > ACTIVATIONS if settings.recompute is None else settings.recompute
    factors = Factors(rope, starts[start], training.target, settings.monotone)
    optimizer = torch.optim.Adam(
        [
            {"params": [factors.angles], "lr": settings.learning_rate},
            {"params": [factors.log_attention], "lr": settings.attention_learning_rate},
        ],
        betas=(0.9, 0.95),
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    history: list[dict[str, float]] = []
    passed: list[tuple[Tensor, Tensor]] = []

    def use() -> None:
        live.put(factors.rescale_factors(factors.angles), factors.log_attention.exp())

    share = 0.0
    with recomputed(model) if recompute else nullcontext():
        while share < 1:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * min(1.0, (len(history) + 1) / 5) * (1 + math.cos(math.pi * share)) / 2
            optimizer.zero_grad()
            short, rows = training.step(settings.seed, len(history), settings.rows)
            losses: dict[str, float] = {}
            parts = [partial(short_loss, model, live, short, use), *(partial(_row, use, model, row) for row in rows)]
            for part in parts[rank::world]:
                found = {kind: value / (1 if kind == "short" else len(rows)) for kind, value in part().items()}
                sum(getattr(settings, kind) * value for kind, value in found.items()).backward()
                for kind, value in found.items():
                    losses[kind] = losses.get(kind, 0.0) + float(value.detach())
            # With the mean of the clocks, as all processes have to end at the same step.
            said = [*(losses.get(kind, 0.0) for kind in KINDS), (time.perf_counter() - began) / world]
            *gathered, elapsed = reduce(torch.tensor(said, dtype=torch.float64)).tolist()
            losses = dict(zip(KINDS, gathered))
            if not math.isfinite(sum(gathered)):
                raise RuntimeError(
                    f"step {len(history)} has losses that are not finite ({losses}). Load the model in float32 or "
                    "bfloat16, and see that the unextended model reads this text."
                )
            for number in (factors.angles, factors.log_attention):
                number.grad = reduce(torch.zeros_like(number) if number.grad is None else number.grad)
            optimizer.step()
            factors.bound()
            history.append({"seconds": elapsed, **losses})
            share = max(len(history) / steps, elapsed / (60 * settings.minutes) if settings.minutes else 0.0)
            if share >= 0.5:
                passed.append((factors.angles.detach().clone(), factors.log_attention.detach().clone()))
            advance(min(share, 1.0), ", ".join(f"{kind} {value:.3f}" for kind, value in losses.items()))
    # The mean of the second half: what single steps add in noise is gone.
    angles, log_attention = (torch.stack(part).mean(0) for part in zip(*passed))
    fitted = _as_method(factors.rescale_factors(angles), log_attention.exp(), rope, factor)
    tried["fitted"] = check.losses(model, live, fitted)
    learned, begun = (sum(getattr(settings, kind) * tried[name][kind] for kind in KINDS) for name in ("fitted", start))
    kept = learned > begun
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


def _row(use: Callable[[], None], model: PreTrainedModel, episode: Episode) -> Losses:
    use()
    return row_losses(model, episode)
