"""Loss by position: the plain next-token loss, whatever the chunks."""

from __future__ import annotations

import math

import pytest
import torch
from families import tiny_model, token_ids

from ctxext import temporarily_extended
from ctxext.evals.perplexity import perplexity, position_losses


class NoBos:
    bos_token_id = None


class Bos:
    bos_token_id = 1


def test_losses_are_those_of_one_forward_pass() -> None:
    model, ids = tiny_model("llama"), token_ids(300)
    with temporarily_extended(model, 4):
        losses = position_losses(model, NoBos, ids[0].tolist(), 150, 2, chunk=37)
        for row, start in zip(losses, (0, 150)):
            part = ids[:, start : start + 150]
            with torch.no_grad():
                logits = model(input_ids=part).logits
            expected = torch.nn.functional.cross_entropy(logits[0, :-1], part[0, 1:], reduction="none")
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


def test_bos_counts_as_a_token_of_the_window() -> None:
    losses = position_losses(tiny_model("llama"), Bos, token_ids(200)[0].tolist(), 64, 3)
    assert losses.shape == (3, 63)


def test_perplexity_is_weighted_by_token() -> None:
    assert perplexity(torch.tensor([0.0, 0.0, math.log(8)])) == pytest.approx(2.0)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="need 256 tokens of text, got 100"):
        position_losses(tiny_model("llama"), NoBos, list(range(100)), 128, 2)
