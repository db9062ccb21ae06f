"""The chart of pairs: which of them reach phases that they never had in training."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig

from ctxext.extension.pairs import NEW, SEEN, TRAINED, PairTurns, pair_turns, turns_in_use
from ctxext.extension.request import plan_extension
from ctxext.models.context import read_context

FACTOR, TRAINED_LENGTH = 4, 2048
LLAMA = LlamaConfig(
    hidden_size=128,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=TRAINED_LENGTH,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
# By hand: pair i turns 2048 · 10000^(-i/32) / 2π times, which falls below 1 from pair 21 on.
UNFINISHED = 32 - 21


def turns(method: str | None, **options: object) -> PairTurns:
    (found,) = pair_turns(plan_extension(LLAMA, FACTOR, method, **options))
    return found


def test_turns_are_those_of_the_frequencies_by_hand():
    found = turns("pi")
    hand = [TRAINED_LENGTH * 10000 ** (-i / 32) / (2 * math.pi) for i in range(32)]
    assert found.trained.tolist() == pytest.approx(hand, rel=1e-12)
    assert found.target.tolist() == pytest.approx(hand, rel=1e-12)  # PI undoes the longer text exactly
    assert int(found.unfinished.sum()) == UNFINISHED


@pytest.mark.parametrize(
    ("method", "new"), [("pi", 0), ("yarn", 0), ("llama3", 0), ("drope", 0), ("ntk", UNFINISHED - 1)]
)
def test_a_new_phase_is_one_that_a_pair_never_had(method, new):
    found = turns(method)
    assert int(found.new.sum()) == new
    assert "with it, " + (f"{new} still do" if new else "none does") in found.summary


def test_a_method_that_leaves_slow_pairs_alone_leaves_all_of_them_new():
    plain = turns("pi").trained
    found = PairTurns("x", TRAINED_LENGTH, FACTOR * TRAINED_LENGTH, plain, FACTOR * plain)
    assert "with it, they still do." in found.summary


def test_where_every_pair_finishes_a_turn_no_phase_is_new():
    some = torch.tensor([8.0, 2.0], dtype=torch.float64)
    found = PairTurns("x", 512, 1024, some, 2 * some)
    assert not found.new.any()
    assert found.summary == "All 2 pairs complete a turn within 512 tokens: no angle is new."


def test_the_chart_has_a_mark_for_each_pair_in_its_row():
    found = turns("ntk")
    title, _, *rows, _, key, _, summary = found.chart()
    assert title == "ntk ×4: 2,048 → 8,192 tokens"
    assert f"every pair, fastest first: {TRAINED} within 2,048 tokens" in key
    assert summary == found.summary
    octaves = {row.split()[0]: row.partition("┼" if "┼" in row else "│")[2] for row in rows}
    for pair in range(32):
        for mark, value in ((TRAINED, found.trained[pair]), (NEW if found.new[pair] else SEEN, found.target[pair])):
            octave = math.floor(math.log2(value))
            cell = octaves[f"{2**octave:,}" if octave >= 0 else f"1/{2**-octave}"][pair]
            assert cell == mark or (cell in (NEW, SEEN) and mark == TRAINED)
    assert sum(row.count(NEW) for row in rows) == int(found.new.sum())


def test_pairs_that_do_not_rotate_and_heads_with_many_pairs_fit_into_the_chart():
    many = torch.logspace(10, -3, 128, base=2, dtype=torch.float64)
    found = PairTurns("x", 512, 1024, many, torch.full_like(many, 1e-9))
    lines = found.chart()
    assert max(map(len, lines[:-1])) <= 80
    assert "one pair in 2" in lines[-3]
    stopped = lines[-5]
    assert stopped.split()[0] == "0"
    assert stopped.count(SEEN) == 64
    assert sum(line.count(SEEN) for line in lines[:-4]) == 64
    assert "128 pairs no longer rotate, which the model must be trained for" in lines[-1]


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "llama3", "longrope"])
def test_a_model_that_is_scaled_already_is_drawn_as_its_extension_was(method):
    options = {"long_factor": tuple(1 + i / 8 for i in range(32))} if method == "longrope" else {}
    plan = plan_extension(LLAMA, FACTOR, method, **options)
    config = LlamaConfig(**LLAMA.to_dict())
    plan.apply_to(config)
    (found,), (planned,) = turns_in_use(read_context(config)), pair_turns(plan)
    assert (found.trained_length, found.target_length) == (TRAINED_LENGTH, FACTOR * TRAINED_LENGTH)
    torch.testing.assert_close(found.trained, planned.trained)
    torch.testing.assert_close(found.target, planned.target)


def test_frequencies_that_depend_on_the_text_have_no_chart():
    config = LlamaConfig(**LLAMA.to_dict())
    config.rope_parameters = {**LLAMA.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="no one chart"):
        turns_in_use(read_context(config))


def test_each_table_that_changes_is_drawn_by_its_layers():
    config = Gemma3TextConfig(max_position_embeddings=4096, sliding_window=512)
    (found,) = pair_turns(plan_extension(config, FACTOR, "yarn"))
    assert found.title.endswith("full_attention")


def test_a_method_that_maps_positions_has_no_chart():
    with pytest.raises(ValueError, match="self_extend keeps every frequency"):
        pair_turns(plan_extension(LLAMA, FACTOR, "self_extend"))


def test_an_extended_model_is_drawn_from_its_plain_frequencies_when_replaced():
    scaled = LlamaConfig(**LLAMA.to_dict())
    scaled.rope_parameters = {**LLAMA.rope_parameters, "rope_type": "linear", "factor": 2.0}
    plan = plan_extension(scaled, FACTOR, "yarn", existing="replace", original_max_position_embeddings=TRAINED_LENGTH)
    (found,) = pair_turns(plan)
    assert torch.equal(found.trained, turns("yarn").trained)
