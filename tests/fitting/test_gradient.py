"""λ by gradient, on a small random model."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from families import LENGTH, logits, tiny_model
from live import assert_unchanged, plain_rope, snapshot
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import YaRN, temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.prompts import Prompter
from ctxext.fitting.episodes import Material, split
from ctxext.fitting.gradient import (
    RAMPS,
    STARTS,
    Fit,
    GradientSettings,
    Ramp,
    Validation,
    best_step,
    descend,
    fit_by_gradient,
    start_at,
)
from ctxext.fitting.live import LiveFactors, frozen
from ctxext.methods import make_method
from ctxext.utils.processes import Processes

TARGET = 128
FACTOR = TARGET / LENGTH
QUICK: dict[str, Any] = {"evaluations": 4, "rows": 3, "start": "yarn"}


@cache
def materials() -> tuple[Material, Material]:
    text = PERSUASION.read_text(encoding="utf-8")[:20_000]
    return split(text, Prompter(AutoTokenizer.from_pretrained(MODEL)), LENGTH, TARGET)


def model_that_reads() -> Any:
    """Of the bundled tokenizer's size."""
    return tiny_model("llama", vocab_size=4096, initializer_range=0.1)


def fitted(model: Any, **settings: Any) -> Fit:
    with LiveFactors(model) as live, frozen(model):
        return fit_by_gradient(model, live, *materials(), GradientSettings(**{**QUICK, **settings}))


def test_a_fit_is_a_function_of_its_seed() -> None:
    model = model_that_reads()
    before = snapshot(model)
    one, same, other = (fitted(model, seed=seed) for seed in (1, 1, 5))  # none of them keeps its start
    assert_unchanged(model, before)
    assert one.method == same.method != other.method
    assert one.tried == same.tried
    assert one.history[0]["text"] != other.history[0]["text"]
    for fit in (one, other):
        assert fit.method.factor == FACTOR
        assert fit.method.fitted_to == (10_000.0, LENGTH)
        assert len(fit.history) == QUICK["evaluations"]


@pytest.mark.slow
def test_what_is_worse_than_its_start_on_other_text_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """λ of 10 in every pair spoils the bundled model; of a random one it would spoil nothing."""
    model, prompter = AutoModelForCausalLM.from_pretrained(MODEL).eval(), Prompter(AutoTokenizer.from_pretrained(MODEL))
    parts = split(PERSUASION.read_text(encoding="utf-8")[:50_000], prompter, 512, 768)
    monkeypatch.setattr(Ramp, "rescale_factors", lambda ramp, numbers: torch.full_like(ramp.octaves, 10.0) + numbers[0])
    with LiveFactors(model) as live, frozen(model):
        found = fit_by_gradient(model, live, *parts, GradientSettings(start="yarn", evaluations=1, rows=1))
    assert found.method == YaRN(factor=1.5)
    assert found.kept_start
    assert found.tried["fitted"]["total"] > found.tried["yarn"]["total"]


def test_the_evaluation_that_loses_least_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps this long it is not the last."""
    monkeypatch.setattr(Ramp, "UNITS", 40 * Ramp.UNITS)
    settings = {"start": "yarn", "rows": 1, "text": 0.0, "retrieval": 0.0}
    totals = [step["total"] for step in fitted(model_that_reads(), evaluations=6, **settings).history]
    best = next(n for n in range(2, 6) if totals[n] > min(totals[:n]) < totals[0])
    fewer, more = (fitted(model_that_reads(), evaluations=evaluations, **settings) for evaluations in (best, best + 1))
    assert more.method == fewer.method
    assert not more.kept_start


def test_recomputing_changes_no_fit() -> None:
    kept, recomputed = (fitted(model_that_reads(), seed=1, recompute=choice) for choice in (False, True))
    assert not kept.kept_start
    assert recomputed.method.long_factor == pytest.approx(kept.method.long_factor, rel=1e-6)
    assert recomputed.method.attention_factor == pytest.approx(kept.method.attention_factor, rel=1e-6)


def test_the_start_is_the_one_with_the_least_loss_on_text_that_is_not_learned_from() -> None:
    """Against plain forward passes of models that are extended by name."""
    model = model_that_reads()
    found = fitted(model, start=None, evaluations=1, short=2.0, text=0.5, retrieval=0.3)
    check = Validation.of(materials()[1], 0)
    trained = {row: logits(model, torch.tensor([row.input_ids]))[0].log_softmax(-1) for row in check.short}
    sums = {}
    for name in STARTS:
        with temporarily_extended(model, method=start_at(name, plain_rope(model), FACTOR)):
            short, text, key = [], [], []
            for row, before in trained.items():
                after = logits(model, torch.tensor([row.input_ids]))[0].log_softmax(-1)
                short.append((before.exp() * (before - after)).sum(-1).mean())
            for row in check.rows:
                ids = torch.tensor([row.input_ids])
                losses = cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:], reduction="none")
                text.append(losses[: -row.n_answer].mean())
                key.append(losses[-row.n_answer :].sum())
        means = {
            kind: float(torch.stack(some).mean()) for kind, some in (("short", short), ("text", text), ("key", key))
        }
        bounded = float((0.01 * (1 + torch.stack(key) / 0.01).log()).mean())
        sums[name] = 2 * means["short"] + 0.5 * means["text"] + 0.3 * bounded
        assert found.tried[name] == pytest.approx({**means, "total": sums[name]}, rel=1e-4, abs=1e-6)
    assert found.start == min(sums, key=sums.__getitem__)


def test_every_start_is_near_a_ramp() -> None:
    """By as little as rounded corners take, and YaRN's blend of frequencies, which is none of their logarithms."""
    rope = plain_rope(tiny_model("llama"))
    for name in STARTS:
        method = start_at(name, rope, 8.0)
        ramp = Ramp(rope, method)
        found, start = ramp.rescale_factors(ramp.numbers).detach().log(), method.rescale_factors(rope).log()
        assert float((found - start).abs().max()) < 0.2, name
        torch.testing.assert_close(ramp.attention_factor(ramp.numbers.detach()), method.attention_scaling(rope))


def test_ramps_to_start_from_rise_between_their_turns() -> None:
    rope = plain_rope(tiny_model("llama"))
    turns = LENGTH * rope.inv_freq / (2 * math.pi)
    for name in RAMPS:
        low, high = map(float, name.split("_")[1:])
        method = start_at(name, rope, 8.0)
        share = (high / turns).log() / math.log(high / low)
        expected = (math.log(8) * share.clamp(0, 1)).exp()
        torch.testing.assert_close(method.rescale_factors(rope).log(), expected.log(), atol=0.15, rtol=0)
        assert method.attention_factor == pytest.approx(1 + 0.05 * math.log(8))


@pytest.mark.parametrize("seed", range(20))
def test_no_step_within_the_radius_is_better(seed: int) -> None:
    """Than `best_step`: of 2,000 others, also where the quadratic has no least value."""
    generator = torch.Generator().manual_seed(seed)
    square, slope, radius = (
        torch.randn(3, 3, generator=generator).double(),
        torch.randn(3, generator=generator).double(),
        0.2 + 0.1 * seed,
    )
    curvature = square + square.T if seed % 2 else square @ square.T

    def value(step: torch.Tensor) -> torch.Tensor:
        return step @ slope + ((step @ curvature) * step).sum(-1) / 2

    found = best_step(curvature, slope, radius)
    assert float(found.norm()) <= radius * (1 + 1e-6)
    others = torch.randn(2000, 3, generator=generator).double()
    others *= radius * torch.linspace(0, 1, 2000)[:, None] / others.norm(dim=1, keepdim=True)
    assert float(value(found)) <= float(value(others).min()) + 1e-9


def test_descent_finds_the_end_of_a_curved_valley() -> None:
    """Rosenbrock's, where the slope is nowhere the way: in 60 evaluations, and by no long step."""
    numbers = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
    seen: list[torch.Tensor] = []

    def evaluate() -> float:
        seen.append(numbers.detach().clone())
        value = (1 - numbers[0]) ** 2 + 100 * (numbers[1] - numbers[0] ** 2) ** 2
        numbers.grad = torch.autograd.grad(value, numbers)[0]
        return float(value.detach())

    descend(evaluate, numbers)
    assert float((torch.stack(seen) - 1).norm(dim=1).min()) < 1e-6
    assert len(seen) < 60
    assert max(float((after - before).norm()) for before, after in pairwise(seen[:3])) < 0.9


def test_a_step_that_loses_is_taken_back_and_the_next_is_shorter() -> None:
    numbers = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    seen: list[torch.Tensor] = []

    def evaluate() -> float:
        seen.append(numbers.detach().clone())
        if len(seen) > 3:
            raise StopIteration
        numbers.grad = torch.tensor([0.3, -0.4], dtype=torch.float64)
        return float(len(seen))

    with pytest.raises(StopIteration):
        descend(evaluate, numbers)
    lengths = [float((at - seen[0]).norm()) for at in seen]
    assert lengths == pytest.approx([0.0, 0.3, 0.15, 0.075])


def test_with_weight_on_short_text_alone_the_fit_goes_back_to_the_trained_frequencies() -> None:
    found = fitted(model_that_reads(), start="yarn", evaluations=30, text=0.0, retrieval=0.0)
    assert found.tried["fitted"]["short"] < 0.05 * found.tried["yarn"]["short"]
    assert min(found.method.long_factor) >= 1
    assert max(found.method.long_factor) < 1.1


def test_no_fit_falls_below_one_or_with_the_pair() -> None:
    """Whatever the numbers."""
    ramp = Ramp(plain_rope(tiny_model("llama")), make_method("llama3", 4.0))
    for seed in range(50):
        numbers = 3 * torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        factors = ramp.rescale_factors(numbers)
        assert float(factors.min()) >= 1
        assert float(factors.diff().min()) >= -1e-12


def test_a_model_that_says_no_numbers_is_refused_and_left_as_it_was() -> None:
    model = model_that_reads()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    before = snapshot(model, run=False)
    with pytest.raises(RuntimeError, match=r"losses that are not finite.*Load the model in float32"):
        fitted(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize(("target", "rows"), [(1_024, 32), (4_096, 9), (32_768, 4)])
def test_rows_are_fewer_where_they_are_longer(target: int, rows: int) -> None:
    assert GradientSettings().rows_at(target) == rows
    assert GradientSettings(rows=7).rows_at(target) == 7


def test_minutes_that_hold_no_evaluation_are_refused_once_a_start_was_tried() -> None:
    model, states, settings = model_that_reads(), [], GradientSettings(minutes=1e-6)
    with (
        LiveFactors(model) as live,
        pytest.raises(ValueError, match=r"not enough to try the starts.*at least .* minutes, or one start"),
    ):
        fit_by_gradient(model, live, *materials(), settings, advance=lambda share, state: states.append(state))
    assert states == ["trying yarn"]


def test_processes_end_at_the_evaluation_at_which_their_clocks_mean_to() -> None:
    """This one is told the sum of the losses, and the mean of the clocks, of two."""
    model = model_that_reads()

    def evaluations_at(clock: float) -> int:
        class Told(Processes):
            def total(self, tensor: torch.Tensor) -> torch.Tensor:
                return torch.cat([tensor[:-1], tensor.new_tensor([clock])]) if tensor.shape == (5,) else tensor

        settings = GradientSettings(**QUICK, minutes=1.0)
        with LiveFactors(model) as live, frozen(model):
            return len(fit_by_gradient(model, live, *materials(), settings, processes=Told(world=2)).history)

    assert (evaluations_at(0.0), evaluations_at(61.0)) == (4, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluations": 0}, "evaluations must be >= 1, got 0"),
        ({"rows": 0}, "rows must be >= 1, got 0"),
        ({"minutes": 0.0}, "minutes must be a finite number > 0, got 0"),
        ({"minutes": math.nan}, "minutes must be a finite number > 0, got nan"),
        ({"text": -1.0}, "text must be a finite number >= 0"),
        ({"retrieval": math.inf}, "retrieval must be a finite number >= 0, got inf"),
        ({"short": 0.0, "text": 0.0, "retrieval": 0.0}, "nothing to learn"),
        ({"start": "yarm"}, "did you mean 'yarn'"),
        ({"start": "dynamic_ntk"}, "cannot start from 'dynamic_ntk'.*Known: yarn, llama3, ramp_0.25_1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientSettings(**settings)
