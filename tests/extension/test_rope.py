"""Scaling on top of scaling: the frequencies in use decide the ramp, and one set of lengths says what a factor is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from families import from_config, tiny_config
from transformers import AutoConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ctxext import describe_context, extend_config, extend_context
from ctxext.core.plan import factor_and_target
from ctxext.encodings.rope import RopeGeometry, inverse_frequencies
from ctxext.export.probe import _facts
from ctxext.extension.request import plan_extension
from ctxext.methods import ABF, NO_ROTATION, LongRoPE, Paper, Resonance, RopeScaling, YaRN, make_method, register
from ctxext.models.context import read_context

LENGTH = 65536  # which the scaling below reaches
FACTOR = 4.0


def native(rope_type: str, n_pairs: int) -> dict[str, Any]:
    return {
        "linear": {"factor": 8.0},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "yarn": {"factor": 16.0, "original_max_position_embeddings": 4096},
        "longrope": {
            "factor": 16.0, "original_max_position_embeddings": 4096, "short_factor": [1.0] * n_pairs,
            "long_factor": torch.linspace(1.05, 3.9, n_pairs).square().tolist(),
        },
    }[rope_type]  # fmt: skip


def scaled_config(rope_type: str, head_dim: int, theta: float) -> LlamaConfig:
    rope = {"rope_type": rope_type, "rope_theta": theta, **native(rope_type, head_dim // 2)}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaConfig(**sizes, head_dim=head_dim, max_position_embeddings=LENGTH, rope_parameters=rope)


def frequencies(config: LlamaConfig) -> torch.Tensor:
    """Those that transformers itself rotates by beyond the first length, as float64."""
    rotary = LlamaRotaryEmbedding(config)
    if config.rope_parameters["rope_type"] == "longrope":
        rotary(torch.zeros(1), torch.tensor([[LENGTH - 1]]))
        plain = inverse_frequencies(config.head_dim, config.rope_parameters["rope_theta"])
        return plain / torch.tensor(config.rope_parameters["long_factor"]).double()
    return rotary.inv_freq.double()


def ramp_by_hand(
    inv_freq: torch.Tensor, beta_fast: float, beta_slow: float, truncate: bool, length: int = LENGTH
) -> torch.Tensor:
    """How far each pair is interpolated, from its turns within `length` alone: linear in their logarithm."""
    turns = inv_freq * length / (2 * math.pi)
    fast, slow = beta_fast, beta_slow
    if truncate:  # outwards, to the turns of a pair
        fast, slow = turns[turns >= beta_fast].min(), turns[turns <= beta_slow].max()
    return ((fast / turns).log() / math.log(fast / slow)).clamp(0, 1)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 5e5), (64, 1e4), (26, 3e6), (80, 12345.0)])
@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("method", ["yarn", "ntk_by_parts", "dynamic_yarn"])
def test_the_ramp_goes_by_the_turns_of_the_frequencies_in_use(
    method: str, rope_type: str, head_dim: int, theta: float, truncate: bool
) -> None:
    config = scaled_config(rope_type, head_dim, theta)
    if method == "dynamic_yarn" and rope_type == "longrope":
        config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    in_use = frequencies(config)
    plan = plan_extension(config, FACTOR, method, existing="compose", truncate=truncate)
    share = ramp_by_hand(in_use, 32.0, 1.0, truncate)
    expected = in_use * (1 - share * (1 - 1 / FACTOR))
    torch.testing.assert_close(plan.extended.inv_freq, expected, rtol=2e-6, atol=0)
    if method != "dynamic_yarn":  # as plain transformers reads it
        written = extend_config(config, FACTOR, method, existing="compose", truncate=truncate)
        torch.testing.assert_close(frequencies(written), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", ["yarn", "ntk_by_parts", "dynamic_yarn", "llama3", "abf"])
@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn", "longrope"])
def test_a_pair_that_finishes_no_turn_is_interpolated_by_the_whole_factor(rope_type: str, name: str) -> None:
    """In the length that the scaling reaches: so it meets no angle that it has not seen within that."""
    config = scaled_config(rope_type, 128, 5e5)
    if rope_type == "longrope":
        config.rope_parameters["short_factor"] = config.rope_parameters["long_factor"]
    plan = plan_extension(config, FACTOR, name, existing="compose")
    turns = plan.rope.inv_freq * LENGTH / (2 * math.pi)
    rescaled = plan.rope.inv_freq / plan.extended.inv_freq
    assert 0 < int((turns < 1).sum()) < len(turns)
    assert float(rescaled[turns <= 1].min()) >= FACTOR * (1 - 1e-12)
    if name != "abf":
        assert float((rescaled[turns >= 32] - 1).abs().max()) < 1e-12


def test_proportional_rope_is_composed_with_by_its_turns() -> None:
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 8.0,
        },
    }  # fmt: skip
    config = AutoConfig.for_model(
        "gemma4_text", max_position_embeddings=2048, global_head_dim=256, rope_parameters=parameters
    )
    # Exponents are of all 128 pairs, the first 32 turn, and the scaling divides by 8.
    in_use = 1e6 ** (-torch.arange(32, dtype=torch.float64) / 128) / 8
    share = ramp_by_hand(in_use, 32.0, 2.0, False, length=2048)
    assert float(share[0]) == 0
    assert float(share[-1]) == 1
    method = YaRN(factor=FACTOR, beta_slow=2.0, truncate=False)
    plan = plan_extension(config, method=method, existing="compose")
    torch.testing.assert_close(plan.extended.inv_freq, in_use * (1 - share * (1 - 1 / FACTOR)), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["yarn", "ntk_by_parts", "llama3"])
def test_a_pinned_dynamic_method_is_composed_with_by_its_turns(name: str) -> None:
    config = LlamaConfig(head_dim=64, max_position_embeddings=4096, hidden_size=256, num_attention_heads=4)
    pinned = extend_config(config, 16, "dynamic_yarn", length=LENGTH)
    plan = plan_extension(pinned, FACTOR, name, existing="compose")
    turns = plan.rope.inv_freq * LENGTH / (2 * math.pi)
    rescaled = plan.rope.inv_freq / plan.extended.inv_freq
    assert plan.start == LENGTH
    assert float((rescaled[turns <= 1] - FACTOR).abs().max()) < 1e-9
    assert float((rescaled[turns >= 32] - 1).abs().max()) < 1e-9


@pytest.mark.parametrize("method", ["dynamic_yarn", "dynamic_ntk", "transformers_dynamic", "longrope"])
def test_a_method_frozen_below_the_target_is_a_plan_for_that_length(method: str) -> None:
    config, dim = LlamaConfig(max_position_embeddings=512, hidden_size=256, num_attention_heads=4), 64
    options = {"long_factor": (3.0,) * (dim // 2), "short_factor": (1.0,) * (dim // 2)} if method == "longrope" else {}
    plan = plan_extension(config, FACTOR, method, length=1024, **options)
    assert plan.summary == f"{plan.method.name} ×2: 512 → 1,024 tokens"
    assert plan.factor == plan.method.factor == 2.0
    written = extend_config(config, FACTOR, method, length=1024, **options)
    assert written.max_position_embeddings == 1024
    assert written.rope_parameters.get("factor", 2.0) == 2.0
    assert plan.notes[0] == f"frozen at 1,024 tokens: the factor is 2, not {FACTOR:g}."
    described = describe_context(written, target_length=4096)
    assert (described.summary, described.reach) == (plan.summary, 1024)
    again = plan_extension(config, method=plan.method)  # as from the metadata
    assert (again.lengths, again.updates) == (plan.lengths, plan.updates)
    dynamic = plan_extension(config, FACTOR, method, **options)
    inv_freq, attention_factor = dynamic.method.scaled(plan.rope, torch.tensor(1024))
    torch.testing.assert_close(plan.extended.inv_freq, inv_freq, rtol=1e-15, atol=0)
    assert plan.extended.attention_factor == float(attention_factor)


@pytest.mark.parametrize("existing", ["compose", "keep"])
def test_a_native_longrope_that_was_kept_is_extended_again_as_without_it(existing: str) -> None:
    longrope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [1, 1.1, 1.5, 2, 2.5, 3, 4, 4],
    }  # fmt: skip
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, original_max_position_embeddings=64,
        pad_token_id=0, rope_parameters=longrope,
    )  # fmt: skip
    method = None if existing == "keep" else "yarn"
    plain = plan_extension(config, 2, method, existing=existing)
    again = plan_extension(extend_config(config, 2, existing="keep"), 2, method, existing=existing)
    assert (plain.start, again.start, again.target_length) == (256, 512, 1024)
    assert torch.equal(again.rope.inv_freq, plain.rope.inv_freq)
    with pytest.raises(
        ValueError, match=r"existing='compose' to scale further, from 512 .*existing='keep' to only raise"
    ):
        plan_extension(extend_config(config, 2, existing="keep"), 2)


def test_resonance_rounds_the_wavelengths_in_use() -> None:
    plan = plan_extension(scaled_config("llama3", 128, 5e5), FACTOR, Resonance(factor=FACTOR), existing="compose")
    wavelengths = 2 * math.pi / plan.extended.inv_freq
    torch.testing.assert_close(wavelengths, wavelengths.round(), rtol=1e-12, atol=0)


def test_what_was_fitted_to_unscaled_frequencies_is_not_put_on_scaled_ones() -> None:
    rope = RopeGeometry.plain(64, 1e4, LENGTH)
    method = LongRoPE(factor=FACTOR, long_factor=(2.0,) * 32, fitted_to=(1e4, LENGTH))
    assert method.rescale_factors(rope).shape == (32,)
    with pytest.raises(ValueError, match=r"fitted to unscaled frequencies.*existing='replace'"):
        plan_extension(scaled_config("linear", 64, 1e4), method=method, existing="compose")


def test_abf_on_scaled_frequencies_raises_the_base_that_they_have() -> None:
    # As many pairs turn fully within the target as did within the length in use.
    rope = plan_extension(scaled_config("llama3", 128, 5e5), existing="compose").rope
    after = rope.inv_freq / ABF(factor=FACTOR).rescale_factors(rope)
    assert int((after * FACTOR * LENGTH > 2 * math.pi).sum()) == int((rope.inv_freq * LENGTH > 2 * math.pi).sum())


# ------------------------------------------------------------------------------------ where it started

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def test_gemma_3_is_replaced_from_the_length_that_it_was_pre_trained_at() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=131072, rope_parameters=rope)
    assert plan_extension(config, existing="replace").summary == "yarn ×4: 32,768 → 131,072 tokens"
    assert plan_extension(config, existing="compose").summary == "yarn ×4: 131,072 → 524,288 tokens"
    with pytest.raises(ValueError, match=r"32,768 → 131,072 tokens.*start again from the original 32,768"):
        plan_extension(config)
    known = plan_extension(config, existing="replace", original_max_position_embeddings=8192)
    assert known.lengths.start == known.lengths.original == 8192


def test_replace_asks_for_a_length_that_nothing_says() -> None:
    config = tiny_config("llama", rope_parameters=LINEAR)
    composed = extend_config(config, 2, existing="compose")
    for unknown in (config, composed, extend_config(config, 2, existing="keep")):
        with pytest.raises(ValueError, match=r"which is unknown for this model.*Pass original_max_position_embeddings"):
            plan_extension(unknown, 8, existing="replace")
        plan = plan_extension(unknown, 8, existing="replace", original_max_position_embeddings=32)
        assert (plan.start, plan.target_length) == (32, 256)
    assert read_context(config).original_length is None
    assert "original length unknown" in str(describe_context(config))
    said = tiny_config("llama", rope_parameters={**LINEAR, "original_max_position_embeddings": 32})
    assert plan_extension(said, existing="replace").start == 32
    counted = tiny_config("llama", rope_parameters={**LINEAR, "rope_type": "dynamic"})
    assert plan_extension(counted, existing="replace").start == 64


# ------------------------------------------------------------------------------- one model, one factor

LLAMA31 = {"rope_type": "llama3", "rope_theta": 1e4, **native("llama3", 0), "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("first", "again", "start", "original"),
    [
        (None, {"method": "yarn"}, 64, 64),
        (LLAMA31, {"method": "yarn", "existing": "compose"}, 64, 8),
        (LLAMA31, {"existing": "keep"}, 64, 8),
        (LLAMA31, {"method": "pi", "existing": "replace", "factor": 32.0}, 8, 8),
    ],
)
def test_a_model_has_one_factor_wherever_it_is_read(
    first: dict[str, Any] | None, again: dict[str, Any], start: int, original: int
) -> None:
    model = from_config(tiny_config("llama", **({} if first is None else {"rope_parameters": first})))
    plan = extend_context(model, **{"factor": 4.0, **again}).context_extension.plan
    lengths = plan.lengths
    assert (lengths.original, lengths.start, lengths.target) == (original, start, 256)
    assert lengths.factor == lengths.target / lengths.start
    config = type(model.config).from_dict(model.config.to_dict())  # as it is saved
    mark = config.ctxext
    assert (mark["original"]["length"], mark["start"], mark["target"], mark["factor"]) == (
        original, start, 256, lengths.factor,
    )  # fmt: skip
    description = describe_context(config)
    assert description.summary == plan.summary
    assert (description.original_length, description.trained_length, description.reach) == (original, start, 256)
    assert plan.summary in str(description)
    assert _facts(model).summary == plan.summary  # what verify says
    with pytest.raises(ValueError, match=plan.summary):
        plan_extension(config)


@pytest.mark.parametrize("name", ["start", "trained", "target", "factor"])
@pytest.mark.parametrize("bad", [None, "64", -1, math.nan])
def test_a_mark_with_a_wrong_number_is_named(name: str, bad: Any) -> None:
    config = extend_config(tiny_config("llama"), 4)
    config.ctxext = {**config.ctxext, name: bad}
    with pytest.raises(ValueError, match=rf"ctxext\.{name} in .* must be"):
        read_context(config)


@pytest.mark.parametrize("theta", [None, {}, {"full_attention": 1e4}])
def test_a_mark_without_the_base_of_a_table_is_named(theta: Any) -> None:
    config = extend_config(tiny_config("llama"), 4)
    original = {k: v for k, v in {**config.ctxext["original"], "rope_theta": theta}.items() if v is not None}
    config.ctxext = {**config.ctxext, "original": original}
    with pytest.raises(ValueError, match=r"ctxext\.original\.rope_theta in its config must hold the base"):
        read_context(config)


def test_a_config_without_our_mark_still_says_where_its_frequencies_started() -> None:
    config = scaled_config("llama3", 64, 5e5)
    composed = extend_config(config, FACTOR, "yarn", existing="compose")
    del composed.ctxext
    parameters = composed.rope_parameters
    assert (parameters["factor"], parameters["original_max_position_embeddings"]) == (FACTOR * LENGTH / 8192, 8192)
    assert plan_extension(composed, existing="replace").start == 8192


# ----------------------------------------------------------------------------------------- λ that is none


@dataclass(frozen=True, kw_only=True)
class AnyLambda(RopeScaling):
    """λ = value at the last pair, and an attention factor."""

    name: ClassVar[str] = "_any_lambda"
    paper: ClassVar[Paper] = Paper("A test", 2026, "https://example.org")

    value: Any = 2.0
    scaling: Any = 1.0

    def rescale_factors(self, rope: RopeGeometry, length: torch.Tensor | None = None) -> torch.Tensor:
        factors = torch.full_like(rope.inv_freq, 2.0)
        factors[-1] = self.value
        return factors

    def attention_scaling(self, rope: RopeGeometry, length: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tensor(self.scaling, dtype=torch.float64)


@pytest.fixture(autouse=True)
def only_here() -> Any:
    from ctxext.methods.contract import _METHODS

    register("_any_lambda")(AnyLambda)
    yield
    del _METHODS["_any_lambda"]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 0.0, -2.0, 1e300, 1e-300])
@pytest.mark.parametrize("name", ["value", "scaling"])
@pytest.mark.parametrize("existing", ["refuse", "compose"])
def test_no_lambda_and_no_attention_factor_but_a_finite_positive_one(existing: Any, name: str, bad: float) -> None:
    config = tiny_config("llama", **({"rope_parameters": LINEAR} if existing == "compose" else {}))
    method = AnyLambda(factor=2.0, **{name: bad})
    what = "rescale_factors" if name == "value" else "attention_scaling"
    with pytest.raises(ValueError, match=f"{what} of '_any_lambda' must be finite and > 0"):
        extend_config(config, method=method, existing=existing)


def test_no_rotation_is_a_number_of_the_format() -> None:
    config = extend_config(tiny_config("llama"), method=AnyLambda(factor=2.0, value=NO_ROTATION))
    assert config.rope_parameters["long_factor"][-1] == NO_ROTATION
    model = from_config(config)
    assert 0 < float(model.model.rotary_emb.inv_freq[-1]) * 1e6 < 1e-5  # radians over a million tokens


def test_lambda_has_one_number_a_pair() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Short(AnyLambda):
        def rescale_factors(self, rope: RopeGeometry, length: torch.Tensor | None = None) -> torch.Tensor:
            return super().rescale_factors(rope)[:-1]

    with pytest.raises(ValueError, match=r"must return a float64 tensor of shape \(8,\), got torch.float64 of shape"):
        extend_config(tiny_config("llama"), method=Short(factor=2.0))


def test_every_method_of_ours_returns_what_the_check_asks_for() -> None:
    rope = RopeGeometry.plain(26, 12345.0, 4096)
    for name in ("yarn", "dynamic_ntk", "dynamic_yarn", "transformers_dynamic"):
        method = make_method(name, FACTOR)
        lengths = torch.tensor([[1, 4096], [8000, 99999]])
        assert method.rescale_factors(rope, lengths).shape == (2, 2, 13)
        assert method.attention_scaling(rope, lengths).shape == (2, 2)


@pytest.mark.parametrize("trained", [100, 1000, 4096, 32768, 40960])
@pytest.mark.parametrize("asked", [1.7, 2.3, 3.7, 8, "11", "3001", "100001"])
def test_factor_times_length_is_never_less_than_the_target(trained: int, asked: float | str) -> None:
    """As vLLM and SGLang multiply them, and reject a longer --max-model-len."""
    factor, target = (None, trained + int(asked)) if isinstance(asked, str) else (asked, None)
    found, reached = factor_and_target(factor, target, "yarn", trained)
    assert found * trained * (1 + 1e-12) >= reached
    if target is None:
        assert found == factor
        assert factor * trained * (1 + 1e-12) - reached < 1
    else:
        assert reached == target
        assert found * trained >= target
