"""Laws 1 to 3, as pure maths: for every method of the registry, and for each named formula by hand."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass, replace
from fractions import Fraction
from itertools import cycle, product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, modeling_rope_utils
from transformers.models.llama import modeling_llama

from ctxext.encodings.rope import RopeGeometry, correction_dim, cos_sin, inverse_frequencies, wavelengths
from ctxext.methods import (
    ABF,
    NO_ROTATION,
    PI,
    Branch,
    DroPE,
    DualChunkAttention,
    DynamicNTK,
    DynamicYaRN,
    Llama3,
    LongRoPE,
    NTKAware,
    NTKByParts,
    Paper,
    PositionRemapping,
    ReRoPE,
    Resonance,
    RopeMethod,
    RopeScaling,
    SelfExtend,
    TransformersDynamic,
    YaRN,
    geometry_in_use,
    list_methods,
    make_method,
    method_class,
    method_from_dict,
    method_from_rope_parameters,
    over_lengths,
    register,
    scaled_rope_parameters,
)
from ctxext.methods.remapping import STRING

LLAMA = RopeGeometry.plain(128, 500000.0, 8192)
Law = Callable[[type[RopeMethod]], None]
LAWS: dict[Law, type[RopeMethod]] = {}  # and the kind of method that each is for
Case = tuple[RopeGeometry, float]


def every(kind: type[RopeMethod]) -> Callable[[Law], Law]:
    """A law for every method of a kind in the registry; a new method enters by being registered."""

    def enter(law: Law) -> Law:
        LAWS[law] = kind
        known = [cls for cls in list_methods() if issubclass(cls, kind)]
        return pytest.mark.parametrize("cls", known, ids=lambda cls: cls.name)(law)

    return enter


every_method, every_scaling, every_remapping = every(RopeMethod), every(RopeScaling), every(PositionRemapping)


def cases(dims: list[int], lengths: list[int], thetas: list[float], factors: list[float]) -> list[Case]:
    grid = product(dims, thetas, lengths, factors)
    return [(RopeGeometry.plain(dim, theta, length), factor) for dim, theta, length, factor in grid]


# transformers computes in float32. Where 2i/d is exact in float32 (d a power of two) it stays within
# 4e-7 of the real numbers on this grid; at d = 80 or 96 the exponents round too, and its llama3, whose
# ramp subtracts near-equal numbers, is off by up to 1.3e-6. So this grid has powers of two ...
SHIPPED = cases([64, 128, 256], [2048, 4096, 8192, 32768, 131072], [1e4, 1e5, 5e5, 1e6, 1e7], [1.5, 4.0, 8.0])
# ... and this one, with odd sizes, huge bases and factors, is for transformers' own code run in float64.
EXACT = cases([16, 80, 96, 256], [64, 2048, 131072], [1e3, 5e5, 1e9], [1.5, 32.0, 128.0])
FEW = cases([16, 128], [512, 8192, 131072], [1e4, 5e5], [1.0, 1.7, 32.0])


def scaled_frequencies(method: RopeScaling, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
    return rope.inv_freq / method.rescale_factors(rope, length)


# ----------------------------------------------------------- law 1: factor 1 changes nothing at all

# DroPE drops every frequency, p-RoPE and CoPE the slowest, and Resonance rounds every wavelength, whatever the factor.
NO_FUNCTION_OF_THE_FACTOR = ("cope", "drope", "p_rope", "resonance")


@every_scaling
def test_factor_one_changes_nothing_bitwise(cls):
    unchanged = []
    for rope, _ in FEW:
        method = cls.example(rope, 1.0)
        unchanged.append(torch.equal(scaled_frequencies(method, rope), rope.inv_freq))
        assert float(method.attention_scaling(rope)) == 1.0
    assert all(unchanged) == (cls.name not in NO_FUNCTION_OF_THE_FACTOR)


@every_scaling
def test_factor_two_changes_something(cls):
    assert not torch.equal(scaled_frequencies(cls.example(LLAMA, 2.0), LLAMA), LLAMA.inv_freq)


# ------------------------------------------------------------------- the contract of every method


@every_scaling
def test_factors_are_positive_float64_a_pair(cls):
    for rope, factor in FEW:
        method, before = cls.example(rope, factor), rope.inv_freq.clone()
        factors, attention_factor = method.rescale_factors(rope), method.attention_scaling(rope)
        assert (factors.shape, factors.dtype) == ((rope.dim // 2,), torch.float64)
        assert (attention_factor.shape, attention_factor.dtype) == ((), torch.float64)
        assert factors.isfinite().all()
        assert (factors > 0).all()
        assert torch.equal(rope.inv_freq, before)


@every_scaling
def test_each_length_is_answered_on_its_own(cls):
    method = cls.example(LLAMA, 4.0)
    lengths = torch.tensor([[1, 8192, 8193], [10000, 32768, 99999]])
    factors, attention_factors = method.rescale_factors(LLAMA, lengths), method.attention_scaling(LLAMA, lengths)
    assert (factors.shape, attention_factors.shape) == ((2, 3, 64), (2, 3))
    assert factors.dtype == attention_factors.dtype == torch.float64
    for row, column in product(range(2), range(3)):
        alone = lengths[row, column]
        torch.testing.assert_close(factors[row, column], method.rescale_factors(LLAMA, alone), rtol=1e-14, atol=0)
        assert attention_factors[row, column] == method.attention_scaling(LLAMA, alone)
    moves = not torch.equal(factors[0, 0], factors[1, 0])
    assert moves == method.is_dynamic


@every_scaling
def test_no_length_means_the_full_reach(cls):
    method, full = cls.example(LLAMA, 4.0), torch.tensor(4 * 8192)
    assert torch.equal(method.rescale_factors(LLAMA), method.rescale_factors(LLAMA, full))
    assert torch.equal(method.attention_scaling(LLAMA), method.attention_scaling(LLAMA, full))


@every_scaling
def test_pinned_at_a_length_it_is_the_same_method_and_static(cls):
    method = cls.example(LLAMA, 4.0)
    if not method.is_dynamic:
        with pytest.raises(ValueError, match="length=9000 applies to dynamic methods only"):
            method.at_length(LLAMA, 9000)
        return
    for length in (100, 8192, 20000, 99999):
        pinned, at = method.at_length(LLAMA, length), torch.tensor(length)
        assert not pinned.is_dynamic
        assert torch.equal(pinned.rescale_factors(LLAMA), method.rescale_factors(LLAMA, at))
        assert float(pinned.attention_scaling(LLAMA)) == pytest.approx(float(method.attention_scaling(LLAMA, at)))


@every_method
def test_description_survives_json(cls):
    method = cls.example(LLAMA, 4.0)
    again = method_from_dict(json.loads(json.dumps(method.to_dict())))
    assert type(again) is cls
    assert again == method
    assert again != replace_factor(method, 8.0)


def replace_factor(method: RopeMethod, factor: Any) -> RopeMethod:
    within = {name: getattr(method, name) for name in ("rounds", "base") if hasattr(method, name)}
    return replace(method, factor=factor, **{name: replace(each, factor=factor) for name, each in within.items()})


@every_method
def test_bad_factor_is_refused(cls):
    for bad in (0.5, 0, -4, math.inf, math.nan, True, "4", None):
        with pytest.raises(ValueError, match="factor must be"):
            replace_factor(cls.example(LLAMA, 4.0), bad)


@every_method
def test_method_is_a_value(cls):
    method = cls.example(LLAMA, 4.0)
    assert {method: "known"}[cls.example(LLAMA, 4.0)] == "known"
    with pytest.raises(FrozenInstanceError):
        method.factor = 8.0


@every_method
def test_method_names_its_paper_and_says_what_it_does(cls):
    paper = vars(cls)["paper"]  # its own, not its parent's
    assert paper.title
    assert 2021 <= paper.year <= 2100
    assert paper.url.startswith("https://")
    assert not cls.__doc__.startswith(f"{cls.__name__}(")  # a dataclass without a docstring gets its signature


@every_method
def test_method_is_known_by_its_name_and_aliases(cls):
    for name in (cls.name, *cls.aliases):
        assert method_class(name) is cls
    assert list_methods().count(cls) == 1


# -------------------------------------------------------------------- law 2: the named formulas

NAMED = {
    "pi": PI,
    "ntk": NTKAware,
    "ntk_by_parts": NTKByParts,
    "yarn": YaRN,
    "llama3": Llama3,
    "by_parts_without_truncation": lambda factor: NTKByParts(factor=factor, truncate=False),
    "by_parts_over_rotations": lambda factor: NTKByParts(factor=factor, ramp="rotations"),
    "by_parts_clamped_to_pairs": lambda factor: NTKByParts(factor=factor, clamp="pairs"),
}
named = pytest.mark.parametrize("make", NAMED.values(), ids=NAMED)
not_pi = pytest.mark.parametrize("make", list(NAMED.values())[1:], ids=list(NAMED)[1:])


@named
def test_factors_never_decrease_and_lie_between_one_and_the_factor(make):
    for rope, factor in FEW:
        factors = make(factor=factor).rescale_factors(rope)
        assert (factors.diff() >= 0).all()
        assert factors.min() >= 1
        assert factors.max() <= factor * (1 + 1e-12)


@not_pi
def test_highest_frequency_is_never_interpolated(make):
    for rope, factor in FEW:
        assert make(factor=factor).rescale_factors(rope)[0] == 1


@named
def test_lowest_frequency_is_stretched_by_the_whole_factor(make):
    reached = 0
    for rope, factor in FEW:
        if wavelengths(rope.inv_freq)[-1] > rope.original_max_position_embeddings:
            assert float(make(factor=factor).rescale_factors(rope)[-1]) == pytest.approx(factor, rel=1e-12)
            reached += 1
    assert reached > 20


# ----------------------------------------------------------------------------- by hand


def test_pi_divides_every_frequency_by_the_factor():
    assert PI(factor=4).rescale_factors(RopeGeometry.plain(8, 10000.0, 2048)).tolist() == [4, 4, 4, 4]


def test_ntk_factors_are_a_geometric_series():
    assert NTKAware(factor=16).rescale_factors(RopeGeometry.plain(6, 10000.0, 2048)).tolist() == [1, 4, 16]


def test_yarn_by_hand():
    # d = 16, theta = 1e4, L = 2048: 32 turns at index 2.02 (down to 2), one turn at index 5.03 (up to 6).
    rope = RopeGeometry.plain(16, 10000.0, 2048)
    inverse = 1 / YaRN(factor=4).rescale_factors(rope)
    assert inverse.tolist() == pytest.approx([1, 1, 1, 0.8125, 0.625, 0.4375, 0.25, 0.25], rel=1e-14)
    assert float(YaRN(factor=math.exp(5)).attention_scaling(rope)) == pytest.approx(1.5)
    assert float(YaRN(factor=4, attention_factor=1.25).attention_scaling(rope)) == 1.25
    assert float(NTKByParts(factor=4).attention_scaling(rope)) == 1


def with_turns(*turns: float) -> RopeGeometry:
    """Pairs that turn so many times within a trained length of 4096."""
    inv_freq = torch.tensor(turns, dtype=torch.float64) * 2 * math.pi / 4096
    return RopeGeometry(inv_freq=inv_freq, rope_theta=10000.0, original_max_position_embeddings=4096)


def test_by_parts_over_rotations_by_hand():
    # Halfway between 1 and 32 turns: (1 + 1/4) / 2 of the frequency is left.
    factors = NTKByParts(factor=4, ramp="rotations").rescale_factors(with_turns(64, 32, 16.5, 1, 0.1))
    assert factors.tolist() == pytest.approx([1, 1, 1 / 0.625, 4, 4], rel=1e-12)


def test_llama3_by_hand():
    # Halfway between 1 and 4 turns: (1 + 1/8) / 2 of the frequency is left.
    factors = Llama3(factor=8).rescale_factors(with_turns(100, 4, 2.5, 1, 0.1))
    assert factors.tolist() == pytest.approx([1, 1, 1 / 0.5625, 8, 8], rel=1e-12)
    narrow = Llama3(factor=8, low_freq_factor=2, high_freq_factor=3).rescale_factors(with_turns(3, 2.5, 2))
    assert narrow.tolist() == pytest.approx([1, 1 / 0.5625, 8], rel=1e-12)


def test_llama3_with_equal_factors_is_a_step_as_in_llama_4_scout():
    rope = with_turns(3, 1.001, 0.999, 0.5)
    factors = Llama3(factor=16, low_freq_factor=1, high_freq_factor=1).rescale_factors(rope)
    assert factors.tolist() == pytest.approx([1, 1, 16, 16], rel=1e-12)
    scout = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=scout)
    theirs, _ = modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = RopeGeometry.plain(128, 500000.0, 8192)
    ours = scaled_frequencies(Llama3(factor=16, low_freq_factor=1, high_freq_factor=1), plain)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)


def test_clamp_to_pairs_stretches_the_last_pair_whole_where_the_code_does_not():
    rope = RopeGeometry.plain(64, 10000.0, 131072)
    assert wavelengths(rope.inv_freq)[-1] < 131072  # so the ramp would end beyond the last pair
    assert float(NTKByParts(factor=4, clamp="pairs").rescale_factors(rope)[-1]) == pytest.approx(4)
    assert float(NTKByParts(factor=4).rescale_factors(rope)[-1]) < 3.9


def test_longrope_uses_the_list_as_given_and_phi3s_attention_factor():
    rope = RopeGeometry.plain(8, 10000.0, 4096)
    method = LongRoPE(factor=32, long_factor=(0.9, 3, 2, 50))
    assert method.rescale_factors(rope).tolist() == [0.9, 3, 2, 50]
    # ln 32 / ln 4096 = 5 / 12; Phi-3-mini-128k's card has 1.19.
    assert float(method.attention_scaling(rope)) == pytest.approx(math.sqrt(17 / 12), rel=1e-14)
    assert float(replace(method, attention_factor=1.05).attention_scaling(rope)) == 1.05


@pytest.mark.parametrize("dim", [64, 128])
def test_abf_is_plain_rope_with_the_new_base(dim):
    rope = RopeGeometry.plain(dim, 10000.0, 4096)
    found = scaled_frequencies(ABF(factor=8, rope_theta=500000.0), rope)
    torch.testing.assert_close(found, inverse_frequencies(dim, 500000.0), rtol=1e-13, atol=0)


def test_abf_keeps_as_many_pairs_turning_fully_within_the_longer_length():
    for rope, factor in cases([16, 128], [512, 8192], [1e4, 5e5], [1, 2, 32]):
        longer = RopeGeometry.plain(
            rope.dim, ABF(factor=factor).new_theta(rope), factor * rope.original_max_position_embeddings
        )
        assert correction_dim(1, longer) == pytest.approx(correction_dim(1, rope), rel=1e-12)


def test_cope_slows_the_pairs_that_finish_no_turn_down_to_a_standstill():
    factors = make_method("cope", 4.0, clipped=5).rescale_factors(LLAMA)
    share = 2**-0.5  # cos(π/4)
    assert factors[:-5].tolist() == [1.0] * (LLAMA.dim // 2 - 5)
    assert factors[-5:].tolist() == pytest.approx([1, 2 / (1 + share), 2, 2 / (1 - share), NO_ROTATION], rel=1e-12)
    unfinished = LLAMA.inv_freq * LLAMA.original_max_position_embeddings < 2 * math.pi
    changed = make_method("cope", 4.0).rescale_factors(LLAMA) != 1
    assert not changed[~unfinished].any()
    assert changed.sum() == unfinished.sum() - 1  # the first of them keeps its own
    with pytest.raises(ValueError, match="from 2 to 64, got 65"):
        make_method("cope", 4.0, clipped=65).rescale_factors(LLAMA)


@pytest.mark.parametrize("p", [0, 0.25, 0.3, 0.75, 1])
def test_p_rope_drops_the_pairs_that_transformers_drops(p):
    config = LlamaConfig(
        head_dim=LLAMA.dim,
        rope_parameters={"rope_type": "proportional", "rope_theta": LLAMA.rope_theta, "partial_rotary_factor": p},
    )
    theirs, _ = modeling_rope_utils.ROPE_INIT_FUNCTIONS["proportional"](config)
    ours = scaled_frequencies(make_method("p_rope", 4.0, p=p), LLAMA)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=1e-11)
    if p == 0:
        assert torch.equal(ours, scaled_frequencies(DroPE(factor=4), LLAMA))


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_p_rope_refuses_what_is_no_share(p):
    with pytest.raises(ValueError, match="from 0 to 1"):
        make_method("p_rope", 4.0, p=p)


def test_drope_turns_nothing_at_a_million_tokens():
    cos, sin = cos_sin(torch.tensor([10**6]), scaled_frequencies(DroPE(factor=4), LLAMA))
    torch.testing.assert_close(cos, torch.ones_like(cos), rtol=0, atol=1e-11)
    torch.testing.assert_close(sin, torch.zeros_like(sin), rtol=0, atol=1e-5)


@pytest.mark.parametrize("inner", ["yarn", "ntk", "pi", "llama3"])
def test_resonance_wavelengths_are_whole_and_the_nearest(inner):
    method = Resonance(factor=4.5, rounds=inner)
    found, wanted = (wavelengths(scaled_frequencies(m, LLAMA)) for m in (method, method.inner))
    torch.testing.assert_close(found, found.round(), rtol=1e-14, atol=0)
    assert ((found - wanted).abs() <= 0.5 + 1e-6).all()
    assert ((found - wanted).abs() > 1e-3).any()
    assert method.attention_scaling(LLAMA) == method.inner.attention_scaling(LLAMA)


# ------------------------------------------------------------------------ the dynamic methods

DYNAMIC = [cls for cls in list_methods() if issubclass(cls, RopeScaling) and cls.example(LLAMA, 2.0).is_dynamic]
every_dynamic = pytest.mark.parametrize("cls", DYNAMIC, ids=lambda cls: cls.name)


@every_dynamic
def test_within_the_trained_length_a_dynamic_method_changes_nothing_bitwise(cls):
    lengths = torch.tensor([1, 4096, 8192])
    method = cls.example(LLAMA, 8.0)
    assert torch.equal(method.rescale_factors(LLAMA, lengths), torch.ones(3, 64, dtype=torch.float64))
    assert torch.equal(method.attention_scaling(LLAMA, lengths), torch.ones(3, dtype=torch.float64))
    assert (method.rescale_factors(LLAMA, lengths + 8192)[:, -1] > 1).all()


@pytest.mark.parametrize(("dynamic", "static"), [(DynamicNTK, NTKAware), (DynamicYaRN, YaRN)])
@pytest.mark.parametrize(("length", "scale"), [(12288, 1.5), (16384, 2), (65536, 8), (10**6, 8)])
def test_scale_is_length_over_trained_length_up_to_the_factor(dynamic, static, length, scale):
    method, at = dynamic(factor=8), torch.tensor(length)
    assert torch.equal(method.rescale_factors(LLAMA, at), static(factor=scale).rescale_factors(LLAMA))
    assert float(method.attention_scaling(LLAMA, at)) == float(static(factor=scale).attention_scaling(LLAMA))


@pytest.mark.parametrize(("ratio", "scale"), [(0.5, 1), (1, 1), (2, 5), (4, 13), (10, 37)])
def test_transformers_dynamic_reaches_factor_squared_minus_factor_plus_one(ratio, scale):
    method = TransformersDynamic(factor=4)
    found = method.rescale_factors(LLAMA, torch.tensor(int(ratio * 8192)))
    torch.testing.assert_close(found, NTKAware(factor=scale).rescale_factors(LLAMA), rtol=1e-14, atol=0)
    frozen = method.at_length(LLAMA, int(ratio * 8192))
    assert torch.equal(frozen.rescale_factors(LLAMA), found)
    assert frozen.factor == min(max(ratio, 1), 4)  # of the lengths, which is not the scale
    assert float(method.rescale_factors(LLAMA)[-1]) == pytest.approx(13)  # the full reach is 4 L


def test_a_pinned_dynamic_yarn_keeps_its_options():
    options = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "ramp": "rotations", "attention_factor": 1.5}
    assert DynamicYaRN(factor=8, ratio=1.1, **options).at_length(LLAMA, 16384) == YaRN(factor=2.0, **options)


@every_method
def test_what_no_config_can_say_rotates_late(cls):
    method = cls.example(LLAMA, 4.0)
    tempered = method.untempered is not method
    assert method.in_attention == (isinstance(method, PositionRemapping) or cls in DYNAMIC or tempered)


# ------------------------------------------------------------------------ the ladder of scales

LADDERS = list(product([8, 64, 4096, 131072], [1.0, 1.01, 1.7, 4.0, 32.0], [1.01, 1.25, 2.0, 100.0]))
with_a_ladder = pytest.mark.parametrize("cls", [DynamicNTK, DynamicYaRN], ids=lambda cls: cls.name)


@with_a_ladder
def test_the_ladder_by_hand(cls):
    assert cls(factor=4).ladder(LLAMA).tolist() == [8192, 10240, 12800, 16000, 20000, 25000, 31250, 32768]
    # Where the ratio is less than one token, a rung for every token.
    assert cls(factor=2, ratio=1.1).ladder(RopeGeometry.plain(16, 1e4, 8)).tolist() == list(range(8, 17))


@with_a_ladder
def test_the_ladder_climbs_from_the_trained_length_to_the_reach(cls):
    for trained, factor, ratio in LADDERS:
        ladder = cls(factor=factor, ratio=ratio).ladder(RopeGeometry.plain(16, 1e4, trained))
        assert (int(ladder[0]), int(ladder[-1])) == (trained, math.floor(factor * trained))
        assert (ladder.diff() > 0).all()


@with_a_ladder
def test_no_rung_is_further_than_the_ratio_and_one_token_from_the_last(cls):
    for trained, factor, ratio in LADDERS:
        ladder = cls(factor=factor, ratio=ratio).ladder(RopeGeometry.plain(16, 1e4, trained))
        assert (ladder[1:] <= ratio * (ladder[:-1] + 1)).all()
        # And no more of them than it takes: each costs a rotation of the keys.
        assert len(ladder) <= math.ceil(math.log(factor + 1 / trained) / math.log(ratio)) + 1


def test_a_static_method_has_one_rung():
    for method in (YaRN(factor=4), LongRoPE.example(LLAMA, 4.0)):
        assert method.ladder(LLAMA).tolist() == [4 * 8192]


# ------------------------------------------------------------------------ LongRoPE's two lists

SHORT, LONG = tuple(torch.linspace(1, 1.5, 64).tolist()), tuple(torch.linspace(1, 30, 64).tolist())
TWO_LISTS = LongRoPE(factor=8, short_factor=SHORT, long_factor=LONG)


def test_longrope_switches_right_after_the_trained_length():
    found = TWO_LISTS.rescale_factors(LLAMA, torch.tensor([1, 8192, 8193, 10**6]))
    assert [tuple(row) for row in found.tolist()] == [SHORT, SHORT, LONG, LONG]
    assert TWO_LISTS.ladder(LLAMA).tolist() == [8192, 65536]
    assert len(set(TWO_LISTS.attention_scaling(LLAMA, torch.tensor([1, 8192, 8193])).tolist())) == 1


@pytest.mark.parametrize(("length", "values"), [(100, SHORT), (8192, SHORT), (8193, LONG), (65536, LONG)])
def test_longrope_pinned_at_a_length_is_one_of_its_lists(length, values):
    method, factor = replace(TWO_LISTS, attention_factor=1.1), max(length / 8192, 1)
    assert method.at_length(LLAMA, length) == LongRoPE(factor=factor, long_factor=values, attention_factor=1.1)
    assert not method.at_length(LLAMA, length).in_attention
    with pytest.raises(ValueError, match="start_tokens=4 has no static form"):
        replace(method, start_tokens=4).at_length(LLAMA, length)


def test_longrope_is_late_only_where_a_config_cannot_say_it():
    assert TWO_LISTS.is_dynamic
    assert not replace(TWO_LISTS, short_factor=LONG).in_attention
    assert not replace(TWO_LISTS, short_factor=None).in_attention
    first_tokens = replace(TWO_LISTS, short_factor=None, start_tokens=4)
    assert first_tokens.in_attention
    assert not first_tokens.is_dynamic
    assert (first_tokens.start_tokens, YaRN(factor=4).start_tokens) == (4, 0)


def native_longrope() -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": LLAMA.rope_theta,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "short_factor": list(SHORT),
        "long_factor": list(LONG),
    }


def test_longrope_is_read_from_a_native_config_with_both_lists():
    read = method_from_rope_parameters(native_longrope(), 65536)
    assert read == TWO_LISTS
    assert method_from_dict(json.loads(json.dumps(read.to_dict()))) == TWO_LISTS


@pytest.mark.parametrize("length", [8192, 8193, 65536])
def test_longrope_agrees_with_transformers_on_both_sides_of_the_switch(length):
    with float64_transformers():
        found = in_transformers(native_longrope(), LLAMA, 65536, length)
        assert_agree(found, TWO_LISTS, LLAMA, 1e-12, torch.tensor(length))
        pinned = TWO_LISTS.at_length(LLAMA, length)
        assert_agree(in_transformers(pinned.rope_parameters(LLAMA), LLAMA, 65536), pinned, LLAMA, 1e-12)


# ------------------------------------------------------------------- methods that remap positions

SMALL = cases([16], [8, 64, 100], [1e4], [1.5, 4.0, 8.0])
OPTIONS: dict[type[PositionRemapping], list[dict[str, Any]]] = {
    SelfExtend: [{}, {"group_size": 20, "window": 5}, {"group_size": 16, "window": 1}],
    ReRoPE: [{}, {"window": 5}, {"window": 1}],
    DualChunkAttention: [{}, {"chunk_size": 7, "local_window": 3}, {"chunk_size": 6, "local_window": 1}],
    STRING: [{}, {"attention_factor": 1.07}],
}


def made(cls: type[PositionRemapping]) -> Iterator[tuple[PositionRemapping, RopeGeometry, int]]:
    """The method with each of its options at each size, and the tokens that it is asked to reach."""
    for (rope, asked), options in product(SMALL, OPTIONS.get(cls, [{}])):
        factor = cls.example(rope, asked).factor
        yield cls(factor=factor, **options), rope, round(factor * rope.original_max_position_embeddings)


def pairs(n_tokens: int) -> tuple[Tensor, Tensor]:
    """Positions of a query and of a key at or before it, for every such pair."""
    query, key = torch.tril_indices(n_tokens, n_tokens)
    return query, key


@every_remapping
def test_every_pair_belongs_to_exactly_one_branch(cls):
    for method, rope, target in made(cls):
        query, key = pairs(target)
        found = torch.stack([branch.holds(query, key) for branch in method.branches(rope)])
        assert (found.sum(0) == 1).all()


@every_remapping
def test_a_branch_never_lets_a_bucket_fall(cls):
    # Blocks of queries look at the buckets of their first and last position alone.
    for method, rope, target in made(cls):
        for branch in method.branches(rope):
            assert (branch.bucket(torch.arange(target)).diff() >= 0).all()


@every_remapping
def test_every_distance_within_reach_is_a_trained_one(cls):
    for method, rope, target in made(cls):
        method.check_reach(rope, target)
        for n_tokens in {target, int(min(method.reach(rope), 2 * target))}:
            found = method.distance(rope, *pairs(n_tokens))
            assert found.min() == 0
            # Self-Extend's fractions may pass the last trained distance, by less than one token.
            assert found.max() < rope.original_max_position_embeddings


def test_string_shifts_what_the_trained_length_hardly_saw():
    """A third of the trained length at factor 1, as in the authors' README; more where the factor needs it."""
    assert STRING(factor=1).sizes(LLAMA) == {"shift": 8192 // 3, "window": 128}
    assert STRING(factor=1.5).sizes(LLAMA) == {"shift": 4096 + 128, "window": 128}
    query = torch.tensor([2729, 2730, 8191])
    assert STRING(factor=1).distance(LLAMA, query, torch.tensor(0)).tolist() == [2729, 128, 8191 - 2730 + 128]
    assert STRING(factor=1).reach(LLAMA) == 8192 + 2730 - 128
    with pytest.raises(ValueError, match=r"covers 16256 tokens from 8192, not 16384.*factor up to 1.98; beyond, use"):
        STRING(factor=2).check_reach(LLAMA, 16384)
    for options, given in (({"window": 1024}, "window"), ({"shift": 3000, "window": 1024}, "shift and window")):
        with pytest.raises(ValueError, match=rf"not 15565\. Leave {given} out\.$"):
            STRING(factor=1.9, **options).check_reach(LLAMA, 15565)
    with pytest.raises(ValueError, match=r"shift must be larger than window, got 100 and 128\. Leave both out"):
        STRING(factor=1, shift=100).branches(LLAMA)
    with pytest.raises(ValueError, match=r"shift must be .* and at most the trained length of 8192, got 8193"):
        STRING(factor=1, shift=8193).branches(LLAMA)
    scaling = STRING(factor=1, attention_factor=1.5).query_scaling(LLAMA, query)
    assert scaling.tolist() == [2.25] * 3
    assert STRING(factor=1).query_scaling(LLAMA, query) is None


def test_a_query_temperature_is_that_of_the_models_that_have_it():
    """transformers' function of Ministral 3, and Llama 4's for positions counted from 0."""
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    positions = torch.tensor([[0, 8191, 8192, 16383, 16384, 100_000]])
    found = make_method("query_temperature", 16.0).query_scaling(LLAMA, positions)
    wanted = get_llama_4_attn_scale(positions, 0.1, 8192)[0, 0, :, 0]
    torch.testing.assert_close(found[0], wanted.double(), rtol=1e-6, atol=0)
    tempered = make_method("query_temperature", 16.0, base="rerope")
    own = make_method("rerope", 16.0).query_scaling(LLAMA, positions)
    torch.testing.assert_close(tempered.query_scaling(LLAMA, positions), found * own, rtol=1e-12, atol=0)
    for wrong, message in (
        ({"base": "transformers_dynamic"}, "base of 'query_temperature' must be another method"),
        ({"base": "query_temperature"}, "base of 'query_temperature' must be another method"),
        ({"base": YaRN(factor=2)}, "factor of 16.0, but its base has 2.0"),
        ({"beta": -1.0}, "beta must be a number from 0 to 10"),
    ):
        with pytest.raises(ValueError, match=message):
            make_method("query_temperature", 16.0, **wrong)


@every_remapping
def test_some_distances_are_remapped_and_that_to_itself_never(cls):
    for method, rope, target in made(cls):
        query, key = pairs(target)
        found = method.distance(rope, query, key)
        assert not found[query == key].any()
        assert not torch.equal(found, (query - key).double())


@every_remapping
def test_a_distance_is_asked_for_in_any_shape(cls):
    method = cls.example(LLAMA, 4.0)
    query, key = torch.tensor([30000, 5, 9000]), torch.tensor([0, 5, 8000])
    found = method.distance(LLAMA, query[:, None], key)
    assert (found.shape, found.dtype) == ((3, 3), torch.float64)
    assert torch.equal(found.diagonal(), method.distance(LLAMA, query, key))


@every_remapping
def test_a_remapping_method_has_no_static_form(cls):
    with pytest.raises(ValueError, match=r"no static form, so length=9000 does not apply.*'yarn'"):
        cls.example(LLAMA, 4.0).at_length(LLAMA, 9000)


def window_of(method: PositionRemapping, rope: RopeGeometry) -> int:
    trained = rope.original_max_position_embeddings
    if isinstance(method, DualChunkAttention):
        return method.local_window or trained // 8
    return method.window or trained // 4


# STRING's farthest distances look near by design.
@pytest.mark.parametrize("cls", [cls for cls in OPTIONS if cls is not STRING], ids=lambda cls: cls.name)
def test_distances_are_exact_up_to_the_window(cls):
    for method, rope, target in made(cls):
        query, key = pairs(target)
        found, true = method.distance(rope, query, key), (query - key).double()
        # At the window itself ReRoPE's two branches meet, and with dual chunks the key beside it is exact too.
        last = window_of(method, rope) + {SelfExtend: -1, ReRoPE: 0, DualChunkAttention: 1}[cls]
        near = true <= last
        assert torch.equal(found[near], true[near])
        assert not torch.equal(found[true <= last + 2], true[true <= last + 2])
        assert (found[~near] >= last).all()  # and what is far never looks near


def test_self_extend_grows_by_one_a_group():
    for method, rope, target in made(SelfExtend):
        group, window = method.sizes(rope).values()
        query, key = pairs(target)
        found, true = method.distance(rope, query, key), (query - key).double()
        far = true >= window
        assert ((found - (window + (true - window) / group))[far].abs() < 1).all()
        for last in (target - 1, target - 2):
            assert (method.distance(rope, torch.tensor(last), torch.arange(last + 1)).diff() <= 0).all()


def test_rerope_rectifies():
    for method, rope, target in made(ReRoPE):
        query, key = pairs(target)
        wanted = (query - key).clamp(max=window_of(method, rope)).double()
        assert torch.equal(method.distance(rope, query, key), wanted)


TRAINED_AT_16 = RopeGeometry.plain(16, 10000.0, 16)


def distances(method: PositionRemapping, query: int) -> list[float]:
    """What the query at a position sees of the keys 0, 1, …, itself."""
    return method.distance(TRAINED_AT_16, torch.tensor(query), torch.arange(query + 1)).tolist()


def test_self_extend_by_hand():
    # Groups of 3, 5 neighbours: the query is at 17 // 3 + 5 - 5/3 = 8 1/3 for keys from 0 to 12.
    whole, third = SelfExtend(factor=4, group_size=4, window=8), SelfExtend(factor=4, group_size=3, window=5)
    assert distances(whole, 11) == [8, 8, 8, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert distances(whole, 12) == [9, 9, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    far = [8, 8, 8, 7, 7, 7, 6, 6, 6, 5, 5, 5, 4]
    assert distances(third, 17) == pytest.approx([n + 1 / 3 for n in far] + [4, 3, 2, 1, 0], abs=1e-12)


def test_rerope_by_hand():
    assert distances(ReRoPE(factor=4, window=4), 9) == [4, 4, 4, 4, 4, 4, 3, 2, 1, 0]


def test_rerope_sharpens_queries_beyond_the_trained_length():
    positions, rope = torch.tensor([0, 7, 63, 511, 4095]), RopeGeometry.plain(16, 10000.0, 64)
    found = ReRoPE(factor=64).query_scaling(rope, positions)
    assert found.tolist() == pytest.approx([1, 1, 1, 1.5, 2], rel=1e-14)
    for method in (ReRoPE(factor=4, log_n=False), SelfExtend(factor=4), DualChunkAttention(factor=4)):
        assert method.query_scaling(rope, positions) is None


def test_dual_chunks_by_hand():
    method = DualChunkAttention(factor=4, chunk_size=6, local_window=2)  # chunks of 4
    assert distances(method, 3) == [3, 2, 1, 0]
    assert distances(method, 5) == [5, 4, 3, 2, 1, 0]  # from 1 + 4
    assert distances(method, 7) == [6, 5, 4, 3, 3, 2, 1, 0]  # from 3 + 4, but no more than 6
    assert distances(method, 9) == [6, 5, 4, 3, 5, 4, 3, 2, 1, 0]  # from 6, from 1 + 4, and from 1


def test_defaults_follow_from_the_trained_length():
    assert SelfExtend(factor=4).sizes(LLAMA) == {"group_size": 9, "window": 2048}
    near, far = ReRoPE(factor=4).branches(LLAMA)
    assert near.stop == far.first == 2048
    intra, successive, inter = DualChunkAttention(factor=4).branches(LLAMA)
    last = torch.tensor([5 * 5120 - 1])  # of a chunk of 6144 - 1024
    assert [int(branch.query(last)) for branch in (intra, successive, inter)] == [5119, 6144, 6144]


@pytest.mark.parametrize("factor", [1.5, 2, 3.7, 4, 8, 16, 100])
@pytest.mark.parametrize("trained", [8, 64, 100, 512, 2048, 4096, 131072])
def test_self_extend_takes_the_least_group_by_the_authors_rule(trained, factor):
    group, window = SelfExtend(factor=factor).sizes(RopeGeometry.plain(16, 1e4, trained)).values()

    def used(group: int) -> Fraction:
        return window + (Fraction(factor) * trained - window) / group

    assert used(group) <= Fraction(2, 3) * trained
    assert group == 1 or used(group - 1) > Fraction(2, 3) * trained


@pytest.mark.parametrize(("window", "target"), [(16, 256), (16, 209), (5, 1000), (63, 5000), (1, 65)])
def test_a_group_that_is_too_small_is_refused_with_the_least_that_will_do(window, target):
    rope = RopeGeometry.plain(16, 10000.0, 64)

    def check(group: int) -> None:
        SelfExtend(factor=target / 64, group_size=group, window=window).check_reach(rope, target)

    with pytest.raises(ValueError, match=f"window={window} covers .* not {target}. Pass group_size=") as caught:
        check(1)
    needed = int(re.search(r"Pass group_size=(\d+)", str(caught.value)).group(1))
    check(needed)
    with pytest.raises(ValueError, match=f"group_size={needed - 1} "):
        check(needed - 1)


# -------------------------------------------------------------- law 3: agreement with transformers


def in_transformers(parameters: dict[str, Any], rope: RopeGeometry, limit: int, seq_len: int | None = None) -> Case:
    """Frequencies and attention factor that transformers computes from a config of `limit` tokens."""
    config = LlamaConfig(head_dim=rope.dim, max_position_embeddings=limit, rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        return modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len)


def assert_agree(found: Case, method: RopeScaling, rope: RopeGeometry, rtol: float, length: Tensor | None = None):
    wanted = scaled_frequencies(method, rope, length)
    torch.testing.assert_close(found[0].to(torch.float64), wanted, rtol=rtol, atol=0)
    assert float(found[1]) == pytest.approx(float(method.attention_scaling(rope, length)), rel=1e-12)


@contextmanager
def float64_transformers() -> Iterator[None]:
    """transformers' own code, with every float32 in it made a float64."""

    class Float64Torch:
        float = float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_rope_utils, "torch", Float64Torch())
        patch.setattr(modeling_llama, "torch", Float64Torch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@every_scaling
def test_transformers_reads_our_frequencies_from_our_parameters(cls):
    assert len(SHIPPED) >= 200
    for rope, factor in SHIPPED:
        method, limit = cls.example(rope, factor), int(factor * rope.original_max_position_embeddings)
        assert_agree(in_transformers(method.rope_parameters(rope), rope, limit), method, rope, rtol=1e-6)


@every_scaling
def test_only_float32_rounding_parts_transformers_from_us(cls):
    with float64_transformers():
        for rope, factor in EXACT:
            method, limit = cls.example(rope, factor), int(factor * rope.original_max_position_embeddings)
            assert_agree(in_transformers(method.rope_parameters(rope), rope, limit), method, rope, rtol=1e-12)


NATIVE = {
    "pi": "linear",
    "ntk": "default",
    "abf": "default",
    "ntk_by_parts": "yarn",
    "yarn": "yarn",
    "dynamic_yarn": "yarn",
    "llama3": "llama3",
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_rope_type_is_written_where_there_is_one(name):
    # So the agreement above is of two formulas, and not of our λ with our λ in a list.
    assert method_class(name).example(LLAMA, 4.0).rope_parameters(LLAMA)["rope_type"] == NATIVE[name]


def test_transformers_dynamic_agrees_at_every_length():
    ratios = cycle([None, 0.5, 1, 1.001, 1.37, 2, 16])  # seven, so that each meets every length and factor
    for (rope, factor), ratio in zip(SHIPPED, ratios):
        trained = rope.original_max_position_embeddings
        seq_len = None if ratio is None else int(ratio * trained)  # without one, it takes the trained length
        parameters = {"rope_type": "dynamic", "rope_theta": rope.rope_theta, "factor": factor}
        method, length = TransformersDynamic(factor=factor), torch.tensor(seq_len or trained)
        assert_agree(in_transformers(parameters, rope, trained, seq_len), method, rope, 1e-6, length)


BELOW = RopeGeometry.plain(64, 10000.0, 64)
ABOVE = RopeGeometry.plain(64, 100.0, 131072)


@pytest.mark.parametrize(
    "options",
    [{}, {"truncate": False}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3}],
    ids=["defaults", "truncate", "betas", "attention_factor"],
)
@pytest.mark.parametrize("rope", [BELOW, LLAMA, ABOVE], ids=["below", "inside", "above"])
def test_yarn_agrees_with_its_options_and_at_both_ends_of_the_clamp(rope, options):
    assert correction_dim(16, BELOW) < 0 < 63 < correction_dim(2, ABOVE)  # the clamps at 0 and d - 1 are met
    for factor in (1.0, 4.0, 40.0):
        method = YaRN(factor=factor, **options)
        parameters, limit = method.rope_parameters(rope), int(factor * rope.original_max_position_embeddings) + 1
        with float64_transformers():
            assert_agree(in_transformers(parameters, rope, limit), method, rope, 1e-12)


def test_longrope_attention_formula_agrees():
    for rope, factor in SHIPPED:
        method = LongRoPE.example(rope, factor)
        parameters = method.rope_parameters(rope)
        del parameters["attention_factor"]  # so that transformers computes its own
        limit = int(factor * rope.original_max_position_embeddings)
        assert_agree(in_transformers(parameters, rope, limit, limit), method, rope, 1e-6)


@every_scaling
def test_scaling_on_scaling_multiplies_both(cls):
    below = YaRN(factor=4)
    in_use = geometry_in_use(below.rope_parameters(LLAMA), LLAMA.dim, 8192)
    method = cls.example(in_use, 4.0)
    inv_freq, attention_factor = in_transformers(scaled_rope_parameters(method, in_use), LLAMA, 4 * 4 * 8192)
    wanted = LLAMA.inv_freq / below.rescale_factors(LLAMA) / method.rescale_factors(in_use)
    torch.testing.assert_close(inv_freq.double(), wanted, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx((0.1 * math.log(4) + 1) * float(method.attention_scaling(in_use)))


@every_scaling
def test_our_own_reader_agrees_with_what_was_written(cls):
    for rope, factor in FEW:
        method = cls.example(rope, factor)
        read = geometry_in_use(method.rope_parameters(rope), rope.dim, rope.original_max_position_embeddings)
        torch.testing.assert_close(read.inv_freq, scaled_frequencies(method, rope), rtol=1e-12, atol=0)
        assert read.attention_factor == pytest.approx(float(method.attention_scaling(rope)))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.8},  # DeepSeek-V2
        {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "beta_fast": None, "truncate": False},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0 + i for i in range(64)]},
    ],
    ids=["mscale", "mscale equal", "defaults", "llama3", "longrope"],
)
def test_others_parameters_are_read_as_transformers_reads_them(parameters):
    parameters = {
        "rope_theta": LLAMA.rope_theta,
        "factor": 40.0,
        "original_max_position_embeddings": 8192,
        **parameters,
    }
    read = geometry_in_use(parameters, LLAMA.dim, 40 * 8192)
    with float64_transformers():
        inv_freq, attention_factor = in_transformers(parameters, LLAMA, 40 * 8192, 40 * 8192)
    torch.testing.assert_close(read.inv_freq, inv_freq, rtol=1e-12, atol=0)
    assert read.attention_factor == pytest.approx(attention_factor, rel=1e-12)


# -------------------------------------------------------------------------------- the registry


@pytest.fixture
def registry(monkeypatch):
    """The registry, as it was before once the test is over."""
    import ctxext.methods.contract as module

    monkeypatch.setattr(module, "_METHODS", dict(module._METHODS))


@dataclass(frozen=True, kw_only=True)
class HalfPI(RopeScaling):
    """λ_i = factor on the lower half of the frequencies, 1 elsewhere."""

    paper: ClassVar[Paper] = Paper("A user's notes", 2026, "https://example.org")

    def rescale_factors(self, rope: RopeGeometry, length: Tensor | None = None) -> Tensor:
        factors = torch.ones(rope.dim // 2, dtype=torch.float64)
        factors[rope.dim // 4 :] = self.factor
        return over_lengths(factors, length)


@pytest.mark.usefixtures("registry")
def test_a_users_own_method_enters_the_same_matrix():
    register("half_pi", aliases=["hpi"])(HalfPI)
    assert list_methods()[-1] is HalfPI
    assert make_method("hpi", 4) == HalfPI(factor=4)
    laws = [law for law, kind in LAWS.items() if issubclass(HalfPI, kind)]
    assert len(laws) > 14
    for law in laws:
        law(HalfPI)


@dataclass(frozen=True, kw_only=True)
class Halved(PositionRemapping):
    """Distances from half the trained length on count half."""

    paper: ClassVar[Paper] = Paper("A user's notes", 2026, "https://example.org")

    def branches(self, rope: RopeGeometry) -> tuple[Branch, ...]:
        edge = rope.original_max_position_embeddings // 2

        def as_it_is(positions: Tensor) -> Tensor:
            return positions

        near = Branch(-math.inf, edge, as_it_is, as_it_is, as_it_is)
        return near, Branch(edge, math.inf, as_it_is, lambda p: (p + edge) / 2, lambda p: p / 2)

    def reach(self, rope: RopeGeometry) -> float:
        return rope.original_max_position_embeddings * 1.5


@pytest.mark.usefixtures("registry")
def test_a_users_own_remapping_enters_the_same_matrix(monkeypatch):
    register("halved")(Halved)
    monkeypatch.setattr(sys.modules[__name__], "SMALL", cases([16], [8, 64], [1e4], [1.5]))
    laws = [law for law, kind in LAWS.items() if issubclass(Halved, kind)]
    assert len(laws) > 10
    for law in laws:
        law(Halved)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("name", "aliases"), [("yarn", []), ("linear", []), ("fresh", ["dynamic"])])
def test_a_taken_name_is_refused_and_nothing_is_registered(name, aliases):
    before = list_methods()
    with pytest.raises(ValueError, match="is already taken by"):
        register(name, aliases=aliases)(HalfPI)
    assert list_methods() == before
    with pytest.raises(ValueError, match="unknown method 'fresh'"):
        method_class("fresh")


@pytest.mark.usefixtures("registry")
def test_a_class_of_the_same_name_in_another_module_does_not_replace_ours():
    theirs = type("YaRN", (HalfPI,), {"__module__": "their_notebook"})
    with pytest.raises(ValueError, match="taken"):
        register("yarn")(theirs)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("yarm", {}, "unknown method 'yarm'; did you mean 'yarn'\\? Known: pi, linear, ntk"),
        ("zzz", {}, "unknown method 'zzz'. Known: pi"),
        ("yarn", {"beta_fats": 16}, "method 'yarn' has no option 'beta_fats'; did you mean 'beta_fast'\\?"),
        ("linear", {"beta_fast": 16}, "method 'pi' has no option 'beta_fast'. It takes none."),
        ("longrope", {}, "method 'longrope' needs long_factor. Pass long_factor=..., which `ctxext fit` finds."),
    ],
)
def test_unknown_and_missing_words_are_named_with_a_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_method(name, 4, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("yarn", {"beta_fast": 1.0, "beta_slow": 32.0}),
        ("yarn", {"beta_slow": 0.0}),
        ("ntk_by_parts", {"ramp": "cosine"}),
        ("yarn", {"clamp": "none"}),
        ("dynamic_ntk", {"ratio": 1.0}),
        ("dynamic_ntk", {"ratio": math.inf}),
        ("dynamic_yarn", {"ratio": math.nan}),
        ("llama3", {"low_freq_factor": 4.0, "high_freq_factor": 3.9}),
        ("llama3", {"low_freq_factor": 0.0}),
        ("longrope", {"long_factor": (1.0, 0.0)}),
        ("longrope", {"long_factor": (1.0, math.inf)}),
        ("longrope", {"long_factor": (1.0, 2.0), "short_factor": (1.0, math.nan)}),
        ("longrope", {"long_factor": (1.0, 2.0), "start_tokens": -1}),
        ("longrope", {"long_factor": (1.0, 2.0), "start_tokens": 1.5}),
        ("resonance", {"rounds": "dynamic_yarn"}),
        ("resonance", {"rounds": YaRN(factor=2)}),
    ],
)
def test_an_option_out_of_range_is_refused(name, options):
    with pytest.raises(ValueError, match=r"must|rounds"):
        make_method(name, 4, **options)


@pytest.mark.parametrize(
    ("bad", "words"),
    [(0, "a number of tokens >= 1"), (-4, "a number of tokens >= 1")]
    + [(bad, "a whole number within ±134217728") for bad in (2.5, True, "64", math.nan, 10**9)],
)
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("self_extend", "group_size"),
        ("self_extend", "window"),
        ("rerope", "window"),
        ("dca", "chunk_size"),
        ("dca", "local_window"),
        ("string", "shift"),
        ("string", "window"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(name, option, bad, words):
    with pytest.raises(ValueError, match=rf"{option}.* must be {words}, got {bad!r}"):
        make_method(name, 4, **{option: bad})


@pytest.mark.parametrize("name", ["self_extend", "rerope"])
@pytest.mark.parametrize("window", [8192, 10**6])
def test_a_window_beyond_the_trained_length_is_refused_with_both_numbers(name, window):
    with pytest.raises(ValueError, match=f"below the trained length of 8192, got {window}. Leave it out"):
        make_method(name, 4, window=window).branches(LLAMA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 8192}, "chunk_size must be .* below the trained length of 8192, got 8192. Leave it out"),
        ({"chunk_size": 64, "local_window": 64}, "local_window must be smaller than chunk_size, got 64 and 64. Leave"),
        ({"chunk_size": 64}, "local_window must be smaller than chunk_size, got 1024 and 64. Leave"),
    ],
)
def test_chunks_that_do_not_fit_are_refused_with_both_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        DualChunkAttention(factor=4, **options).branches(LLAMA)


def test_what_only_the_geometry_can_tell_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="long_factor has 3 numbers, but this model has 64 pairs"):
        LongRoPE(factor=4, long_factor=(1, 2, 3)).rescale_factors(LLAMA)
    short = LongRoPE(factor=4, long_factor=LONG, short_factor=(1, 2, 3))
    with pytest.raises(ValueError, match="short_factor has 3 numbers, but this model has 64 pairs"):
        short.rescale_factors(LLAMA, torch.tensor(10))
    with pytest.raises(ValueError, match="rope_theta must be a finite number >= the model's 500000, got 10000"):
        ABF(factor=4, rope_theta=10000.0).rescale_factors(LLAMA)


@pytest.mark.parametrize(
    "method",
    [
        YaRN(factor=8, beta_fast=16, truncate=False, ramp="rotations", clamp="pairs", attention_factor=1.1),
        LongRoPE(factor=2, long_factor=[1, 1.5]),
        ABF(factor=8, rope_theta=5e6),
        LongRoPE(factor=2, long_factor=[1, 1.5], short_factor=[1, 1.1], start_tokens=4),
        DynamicNTK(factor=2, ratio=1.1),
        DynamicYaRN(factor=2, ratio=1.5, beta_slow=2, attention_factor=1.2),
        SelfExtend(factor=8, group_size=7, window=100),
        ReRoPE(factor=8, window=100, log_n=False),
        DualChunkAttention(factor=8, chunk_size=100, local_window=10),
        Resonance(factor=3, rounds=NTKByParts(factor=3, beta_slow=2)),
    ],
    ids=lambda method: method.name,
)
def test_every_option_survives_json(method):
    assert method_from_dict(json.loads(json.dumps(method.to_dict()))) == method
