"""What a search makes small, against plain forward passes of an extended model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import YaRN, temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine
from ctxext.evals.needle import Needle, Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place
from ctxext.fitting.episodes import Material, split
from ctxext.fitting.live import LiveFactors
from ctxext.fitting.objectives import OBJECTIVES, Objective, Scorer

TRAINED, TARGET = 256, 384  # as if: the shipped model was trained at 512
METHOD = YaRN(factor=1.5)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def material() -> Material:
    """A text that says one number again and again, further apart than the short window of LongPPL's judge."""
    text = PERSUASION.read_text(encoding="utf-8")[:40_000]
    sentence = " The secret code is 48210. Remember it. 48210 is the secret code. "
    text = sentence.join(text[k : k + 300] for k in range(0, len(text), 300))
    return split(text, Prompter(AutoTokenizer.from_pretrained(MODEL)), TRAINED, TARGET)[0]


@pytest.fixture
def live(model: Any) -> Iterator[LiveFactors]:
    with LiveFactors(model, TRAINED) as live:
        yield live


@torch.no_grad()
def token_losses(model: Any, ids: Any) -> torch.Tensor:
    row = torch.tensor([list(ids)])
    return cross_entropy(model(input_ids=row).logits[0, :-1].double(), row[0, 1:], reduction="none")


def judged(model: Any, ids: tuple[int, ...], window: int) -> torch.Tensor:
    """Each token's loss given up to `window` tokens, BOS and itself included, the window moving on by half of it."""
    bos, body = ids[:1], ids[1:]
    losses = torch.zeros(len(body), dtype=torch.float64)
    begin, end, done = 0, window - 1, 0
    while done < len(body):
        piece = token_losses(model, [*bos, *body[begin:end]])
        losses[done:end] = piece[done - begin :]
        done, end = min(end, len(body)), min(end + window // 2, len(body))
        begin = end - (window - 1)
    return losses


def expected(model: Any, material: Material, objective: Objective) -> tuple[float, float]:
    """Value and short loss, by the written-out definitions."""
    texts = [material.text(TARGET, 0, trial).input_ids for trial in range(objective.windows)]
    shorts = [material.text(TRAINED, 0, trial).input_ids for trial in range(2 * objective.windows)]
    before = torch.cat([token_losses(model, ids) for ids in shorts]).mean()
    judges = (TRAINED // 8, TRAINED) if objective.name == "key_tokens" else ()
    seen = [[judged(model, ids, n) for n in judges] for ids in texts if judges]
    keys = [(short - long > 2) & (long < 2) for short, long in seen]
    with temporarily_extended(model, method=METHOD, original_max_position_embeddings=TRAINED):
        short = float(torch.cat([token_losses(model, ids) for ids in shorts]).mean() / before - 1)
        read = [token_losses(model, ids) for ids in texts]
        if objective.name == "perplexity":
            return float(torch.cat(read).mean()), short
        if objective.name == "key_tokens":
            assert 0 < torch.cat(keys).sum() < len(torch.cat(keys)) / 4
            return float(torch.cat([losses[key] for losses, key in zip(read, keys)]).mean()), short
        task, answers = (Passkey() if objective.name == "passkey" else Needle()), []
        for length in (round((TRAINED * TARGET) ** 0.5), TARGET):
            for depth in (0.1, 0.5, 0.9):
                for trial in range(objective.windows):
                    place = Place(task.name, length, depth, trial, 0)
                    sample = task.sample(place, material.prompter, material.haystack)
                    answers.append(float(token_losses(model, sample.input_ids)[sample.n_prompt - 1 :].sum()))
        return sum(answers) / len(answers), short


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_what_it_says(name: str, model: Any, material: Material) -> None:
    objective = Objective(name=name, windows=2, short_limit=0.0)
    value, short = expected(model, material, objective)
    with LiveFactors(model, TRAINED) as live:
        score = Scorer(Engine(model, chunk=100), live, objective, material)(METHOD)
    assert score.value == pytest.approx(value, rel=1e-4, abs=1e-4)
    assert score.short == pytest.approx(short, abs=1e-5)
    assert score.excess == max(0.0, score.short)


@pytest.mark.slow
def test_what_is_lost_within_the_limit_is_no_excess(live: LiveFactors, model: Any, material: Material) -> None:
    scores = [
        Scorer(Engine(model), live, Objective(windows=1, short_limit=limit), material)(YaRN(factor=16))
        for limit in (0.0, 0.01, 10.0)
    ]
    assert scores[0].short > 0.01  # or nothing is shown
    assert [score.excess for score in scores] == pytest.approx([scores[0].short, scores[0].short - 0.01, 0])


def test_an_objective_without_a_token_to_look_at_is_refused(live: LiveFactors, model: Any, material: Material) -> None:
    class Deaf(Engine):
        def losses(self, ids: Any) -> Any:  # as of a model that no context helps
            found = super().losses(ids)
            return found._replace(losses=torch.full_like(found.losses, 3.0))

    with pytest.raises(ValueError, match=r"no token of these texts needs a long context.*Pass another text"):
        Scorer(Deaf(model), live, Objective(name="key_tokens"), material)


def test_a_loss_that_is_no_number_is_refused(live: LiveFactors, model: Any, material: Material) -> None:
    scorer = Scorer(Engine(model), live, Objective(windows=1), material)
    weight = model.model.norm.weight
    kept = weight.detach().clone()
    try:
        weight.data[0] = float("nan")
        with pytest.raises(RuntimeError, match=r"perplexity is nan under .*Load the model in float32"):
            scorer(METHOD)
    finally:
        weight.data.copy_(kept)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "perplexty"}, "did you mean 'perplexity'"),
        ({"windows": 0}, "windows must be >= 1"),
        ({"short_limit": -0.1}, "short_limit must be >= 0"),
        ({"short_limit": float("nan")}, "short_limit must be >= 0"),
    ],
)
def test_objectives_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Objective(**settings)
