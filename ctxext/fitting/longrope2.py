"""LongRoPE2's search for the critical dimension and λ, by the loss of passkeys, with all weights frozen.

From the critical dimension on, λ is at least the factor. In theory that is where pairs no longer complete a turn within
the trained length. LongRoPE2's hypothesis is that the slowest pairs before it are insufficiently trained as well, so
that the real critical dimension is smaller; an evolutionary search finds it together with λ. Shang et al. (2025),
"LongRoPE2: Near-Lossless LLM Context Window Scaling", arXiv 2502.20082. The range of critical dimensions, the
mutations and their sizes are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ctxext.encodings.rope import RopeGeometry, correction_dim
from ctxext.fitting.episodes import Episode, Material
from ctxext.fitting.gradient import Fit, GradientSettings, Validation
from ctxext.fitting.live import LiveFactors
from ctxext.methods import LongRoPE, RopeScaling, YaRN
from ctxext.utils.processes import ALONE, Processes
from ctxext.utils.values import check_minutes, counted, is_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The critical pair turns at most this often within the trained length.
TURNS = 4
# Children have two of the best candidates as parents.
PARENTS = 4
# How often a child's critical dimension moves by one pair; how often λ of all pairs, or of one, is multiplied, and the
# deviation of the logarithm by which.
MOVES, CHANGES, SPREAD = 0.3, 0.3, 0.2
TOKENS, FEWEST_ROWS, MOST_ROWS = 20_000, 4, 32
# Selection on held-out text is by passkeys alone, as the search is.
PASSKEYS = GradientSettings(short=0.0, text=0.0, retrieval=1.0)


@dataclass(frozen=True, kw_only=True)
class LongRoPE2Settings:
    """The settings of a search.

    Attributes:
        evaluations: the number of candidates evaluated.
        rows: the number of rows of the target length with a passkey; None for as many as TOKENS allows.
        minutes: the time limit: no evaluation is begun that would exceed it; must suffice for one.
    """

    by: ClassVar[str] = "longrope2"

    evaluations: int = 40
    rows: int | None = None
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("evaluations", "rows"):
            count = getattr(self, name)
            if not ((name == "rows" and count is None) or is_count(count)):
                raise ValueError(f"{name} must be a whole number >= 1, got {count!r}.")
        check_minutes(self.minutes)

    def rows_at(self, target: int) -> int:
        """The number of rows of `target` tokens per evaluation."""
        return self.rows or min(MOST_ROWS, max(FEWEST_ROWS, TOKENS // target))

    def tokens(self, trained: int, target: int) -> int:
        """Approximate tokens read by a search: the rows for YaRN and each candidate, and both finalists held out."""
        return (self.evaluations + 1) * self.rows_at(target) * target + 2 * PASSKEYS.tokens_to_try(trained, target)


def critical_pairs(rope: RopeGeometry) -> range:
    """The pairs that may be critical: from the first with at most TURNS turns within the trained length to the first
    with at most one. The last is half the theoretical critical dimension, 2 ⌈(d/2) log_θ(L / 2π)⌉.
    """
    last = max(1, min(math.ceil(correction_dim(1, rope)), rope.dim // 2 - 1))
    return range(min(last, max(1, math.ceil(correction_dim(TURNS, rope)))), last + 1)


@dataclass(frozen=True)
class Candidate:
    """A critical pair, and λ from it on.

    Attributes:
        critical: index of the pair; the critical dimension is twice that.
        beyond: for each pair, λ if it is critical or beyond: at least the factor, non-decreasing.
    """

    critical: int
    beyond: tuple[float, ...]

    @property
    def rescale_factors(self) -> tuple[float, ...]:
        """λ_i = λ_c^(i/c) before the critical pair c, as by a larger base (NTK-aware), and `beyond` from it on."""
        before = (self.beyond[self.critical] ** (i / self.critical) for i in range(self.critical))
        return (*before, *self.beyond[self.critical :])


def candidates(
    rope: RopeGeometry, factor: float, rng: Random, best: Callable[[int], Sequence[Candidate]]
) -> Iterator[Candidate]:
    """Every critical pair with λ = `factor` from it on, the theoretical one first; then children without end.

    Args:
        best: returns that many of the best candidates so far.
    """
    pairs = critical_pairs(rope)
    yield from (Candidate(critical, (factor,) * (rope.dim // 2)) for critical in reversed(pairs))
    while True:
        parents = best(PARENTS)
        one, other = rng.choice(parents), rng.choice(parents)
        critical = rng.choice((one, other)).critical
        if rng.random() < MOVES:
            critical = min(max(critical + rng.choice((-1, 1)), pairs[0]), pairs[-1])
        inherited = [rng.choice(both) for both in zip(one.beyond, other.beyond)]
        every, *each = (rng.gauss(0, SPREAD) if rng.random() < CHANGES else 0.0 for _ in range(1 + len(inherited)))
        changed = (λ * math.exp(every + own) for λ, own in zip(inherited, each))
        yield Candidate(critical, tuple(sorted(max(factor, λ) for λ in changed)))


def needle_loss(model: PreTrainedModel, row: Episode) -> Tensor:
    """The loss of a row's passkey in nats, and of no other token: LongRoPE2's needle-driven perplexity."""
    ids = torch.tensor([row.input_ids], device=model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=row.n_answer).logits[0].float()
    return cross_entropy(logits, ids[0, -row.n_answer :], reduction="sum")


@torch.no_grad()
def fit_by_longrope2(
    model: PreTrainedModel,
    live: LiveFactors,
    training: Material,
    held_out: Material,
    settings: LongRoPE2Settings,
    *,
    advance: Callable[[float, str], None] = lambda share, state: None,
    processes: Processes = ALONE,
) -> Fit:
    """Search the critical dimension and λ with the smallest mean passkey loss; keep `yarn` if it is better on held-out
    text.

    Arguments and errors are those of `fit_by_gradient`.
    """
    began = time.perf_counter()
    rope, factor = live.rope, training.target / training.trained
    yarn, check = YaRN(factor=factor), Validation.of(held_out, settings.seed)
    rows = training.texts(settings.seed, settings.rows_at(training.target))[1]
    history: list[dict[str, float]] = []
    found: list[tuple[float, Candidate]] = []

    def held_out_losses(method: RopeScaling) -> dict[str, float]:
        losses = check.losses(model, live, method, PASSKEYS)
        return {**losses, "total": losses["key"]}

    def evaluate(method: RopeScaling) -> float:
        live.use(method)
        lost = sum(float(needle_loss(model, row)) for row in rows[processes.rank :: processes.world]) / len(rows)
        # The clock is averaged over processes, which must stop at the same evaluation.
        clock = (time.perf_counter() - began) / processes.world
        key, seconds = processes.total(torch.tensor([lost, clock], dtype=torch.float64)).tolist()
        if not math.isfinite(key):
            raise RuntimeError(
                f"evaluation {len(history)} has a passkey loss of {key}. Load the model in float32 or bfloat16, and "
                "check the baseline's loss on this text."
            )
        history.append({"seconds": seconds, "key": key})
        return key

    def as_method(candidate: Candidate) -> LongRoPE:
        fitted_to = (rope.rope_theta, rope.original_max_position_embeddings)
        return LongRoPE(factor=factor, long_factor=candidate.rescale_factors, fitted_to=fitted_to)

    def best(n: int) -> list[Candidate]:
        return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])[:n]]

    advance(0.0, "trying yarn")
    tried = {"yarn": held_out_losses(yarn)}
    given = evaluate(yarn)  # on the rows of the search, to compare with
    state = f"yarn: passkey loss {given:.4f}"
    for candidate in candidates(rope, factor, Random(f"longrope2 {settings.seed}"), best):
        if len(found) == settings.evaluations:
            break
        # YaRN's time again: the next evaluation and, at the end, the losses on held-out text.
        needed = (history[-1]["seconds"] + history[0]["seconds"]) / 60
        if settings.minutes and needed > settings.minutes:
            if found:
                break
            raise ValueError(
                f"{counted(settings.minutes, 'minute')} is not enough to evaluate one candidate at "
                f"{training.target:,} tokens. Pass at least {math.ceil(10 * needed) / 10:g} minutes."
            )
        advance(len(found) / settings.evaluations, state)
        key = evaluate(as_method(candidate))
        history[-1]["critical_dimension"] = 2 * candidate.critical
        found.append((key, candidate))
        least, leader = min(found, key=lambda pair: pair[0])
        state = f"critical dimension {2 * leader.critical}: passkey loss {least:.4f}"
    advance(1.0, state)
    (leader,) = best(1)
    fitted = as_method(leader)
    tried["fitted"] = held_out_losses(fitted)
    kept = tried["fitted"]["total"] > tried["yarn"]["total"]
    searched = {
        "critical_dimension": 2 * leader.critical,
        "theoretical_critical_dimension": 2 * critical_pairs(rope)[-1],
        "long_factor": fitted.long_factor,
    }
    return Fit(yarn if kept else fitted, "yarn", tried, history, kept, searched)
