"""Which configs of a model an extension swaps, and which it leaves."""

from __future__ import annotations

import copy

import pytest
from families import tiny_model
from torch import nn

from ctxext import extend_context, restore_context


class Part(nn.Module):
    """Holds a config of the model's class, as a draft head does."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config


@pytest.mark.parametrize("same", [True, False])
def test_a_part_with_a_config_of_its_own_follows_only_where_it_says_the_same(same: bool) -> None:
    model = tiny_model("llama")
    held = copy.deepcopy(model.config)
    if not same:
        held.max_position_embeddings *= 2
    before = held.to_dict()
    model.part = Part(held)
    extend_context(model, 4, "yarn")
    assert (model.part.config.to_dict() == before) is not same
    assert held.to_dict() == before
    restore_context(model)
    assert model.part.config is held


def test_a_shared_config_is_swapped_once_and_stays_shared() -> None:
    model = tiny_model("llama")
    config = model.config
    model.part = Part(config)
    extend_context(model, 4, "yarn")
    assert model.part.config is model.config
    assert model.config is not config
    restore_context(model)
    assert model.part.config is model.config is config
