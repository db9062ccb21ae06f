"""Laws 6 to 11 of the design for the methods that rotate inside attention, on every family whose attention lets them.

That their numbers are right is the matter of `tests/attention`; here, that they come, go, stay and are saved.
"""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DEVIATING, LENGTH, from_config, logits, tiny_config, tiny_model, token_ids
from live import (
    DYNAMIC,
    EXACT_UNDER_A_CACHE,
    LATE,
    LATE_FAMILIES,
    REMAPPING,
    assert_unchanged,
    cached_logits,
    late,
    padded_batch,
    plain_rope,
    rotary_of,
    same,
    snapshot,
    text_config,
)
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import ctxext
from ctxext import extend_context, restore_context, temporarily_extended
from ctxext.assets import MODEL
from ctxext.attention import call, proof
from ctxext.attention.rotary import InAttentionRotary, Tables
from ctxext.cli import commands
from ctxext.core.apply import extension_of
from ctxext.extension.metadata_file import BESIDE, RECORD
from ctxext.hub.checkpoint import extend_folder
from ctxext.methods import DynamicNTK, LongRoPE, NTKAware
from ctxext.methods.change import neutral
from ctxext.patches.in_attention import InAttentionProof
from ctxext.publish.push import Extended

IDS = token_ids(150)  # well beyond the trained 64
matrix = pytest.mark.parametrize("method", LATE)
every_family = pytest.mark.parametrize("family", LATE_FAMILIES)
# Qwen3.5's linear attention computes in float32.
families_in_float64 = pytest.mark.parametrize("family", [family for family in LATE_FAMILIES if family != "qwen3_5"])


def patched(family: str, method: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(family).to(dtype)
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"  # the others have no kernel for it
    return extend_context(model, method=late(method, model))


def gap(a: nn.Module, b: nn.Module) -> float:
    return float((logits(a, IDS) - logits(b, IDS)).abs().max())


# ------------------------------------------------------------------- law 5: what rotates is live


@pytest.mark.parametrize("family", [family for family in LATE_FAMILIES if family not in ("gemma2", "gpt_oss")])
def test_law_5_one_scale_for_the_whole_call_is_the_static_model_of_that_length(family: str) -> None:
    # By another way: there, the family's own code rotates. (Layers with a short window are left alone only here.)
    model = patched(family, "transformers_dynamic")
    static = extend_context(tiny_model(family), method="transformers_dynamic", length=IDS.shape[1])
    assert gap(model, static) <= 1e-4
    assert gap(model, tiny_model(family)) > 0.1


def test_each_query_stands_on_the_first_rung_that_holds_it() -> None:
    method = DynamicNTK(factor=4, ratio=1.1)
    module = rotary_of(extend_context(tiny_model("llama"), method=method))
    ladder, positions = module.rung_lengths.tolist(), torch.arange(300)
    wanted = [next((i for i, rung in enumerate(ladder) if p < rung), len(ladder) - 1) for p in positions.tolist()]
    assert module.of("").rungs(positions).tolist() == wanted
    for rung, inv_freq in zip(ladder, module.rung_inv_freq):
        factors = NTKAware(factor=rung / LENGTH).rescale_factors(module.ropes[""])
        assert torch.equal(inv_freq, (module.ropes[""].inv_freq / factors).float())


def test_the_receipt_says_what_was_seen_and_how_it_is_saved() -> None:
    model = patched("llama", "self_extend")
    seen = str(model.context_extension.proof)
    for words in ("self_extend ×4: 64 → 256 tokens", f"saved as          {RECORD}", f"verified          {seen}"):
        assert words in repr(model.context_extension)
    assert f"{model.context_extension.proof.effect:.1e}" in seen
    assert "self_extend ×4: 64 → 256 tokens" in repr(model)
    shown = [" ".join(row.split()) for row in repr(model.context_extension).splitlines()]
    assert "options group_size 9, window 16" in shown
    assert any(row.startswith("inverse freq.") and row.endswith("rad/token, unchanged") for row in shown)
    dynamic = repr(patched("llama", "dynamic_yarn").context_extension)
    assert "rad/token at 256 tokens (before" in dynamic
    assert " 1.13863 at 256 tokens" in dynamic


# ----------------------------------------------------------------------------- the proof can fail


def refused(model: nn.Module, error: type[BaseException], message: str, method: str = "dynamic_ntk") -> None:
    before = snapshot(model, run=False)
    with pytest.raises(error, match=message):
        extend_context(model, method=method)
    assert_unchanged(model, before)


@matrix
def test_a_wrong_rotation_is_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_was = Tables.as_it_was
    monkeypatch.setattr(Tables, "as_it_was", lambda self, positions: as_it_was(self, positions * 1.01))
    model = tiny_model("llama")
    refused(model, ValueError, "transforms queries and keys other than by rotation", late(method, model))


@matrix
def test_a_wrong_attention_is_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = call.Call._own

    def louder(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = own(self, *args, **kwargs)
        return output * 1.01, weights

    monkeypatch.setattr(call.Call, "_own", louder)
    model = tiny_model("llama")
    refused(model, RuntimeError, "with in-attention RoPE and its own frequencies, the output of", late(method, model))


@matrix
def test_a_method_that_does_not_reach_attention_is_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_method = InAttentionRotary.set_method
    monkeypatch.setattr(InAttentionRotary, "set_method", lambda self, method, rope: set_method(self, None, rope))
    model = tiny_model("llama")
    refused(model, RuntimeError, "does not change the output of LlamaForCausalLM", late(method, model))


HALVES = [torch.bfloat16, torch.float16]
half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_method_that_reaches_no_token_is_refused_in_every_dtype(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
    before = snapshot(model, run=False)
    options = {"long_factor": [2.0] * 32, "attention_factor": 1.0, "start_tokens": 4096}
    with pytest.raises(ValueError, match="changes nothing within the target of 2048 tokens"):
        extend_context(model, 4, "longrope", **options)
    assert_unchanged(model, before)


@half
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_change_that_rounding_hides_is_refused(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    n_pairs = plain_rope(model).dim // 2
    factors = [1.0] * (n_pairs - 1) + [1.00001]
    method = LongRoPE(factor=4, long_factor=factors, attention_factor=1.0, start_tokens=4)
    refused(model, RuntimeError, "hides. Load it in float32", method)


@half
@pytest.mark.parametrize("family", ["llama", "qwen3", "bundled"])
def test_every_method_is_live_in_16_bits(family: str, dtype: torch.dtype) -> None:
    for name in LATE:
        bundled = family == "bundled"
        model = AutoModelForCausalLM.from_pretrained(MODEL).eval() if bundled else tiny_model(family)
        model = model.to(dtype)
        found = extend_context(model, method=late(name, model)).context_extension.proof
        assert found.effect > 0, name
        assert found.score_change > 10 * found.score_bar, name


@half
@matrix
def test_a_method_that_does_not_reach_attention_is_seen_in_16_bits(
    method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").to(dtype)
    named = late(method, model)
    set_method = InAttentionRotary.set_method

    def keeping_the_neutral(self: Any, method: Any, rope: Any) -> None:
        set_method(self, neutral(named) if method is named else method, rope)

    monkeypatch.setattr(InAttentionRotary, "set_method", keeping_the_neutral)
    refused(model, RuntimeError, "does not change the output of LlamaForCausalLM", named)


# ------------------------------------------------------------------------- law 6: undo is bitwise


@every_family
@matrix
def test_law_6_restore_is_bitwise(family: str, method: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    extend_context(model, method=late(method, model))
    seen = model.context_extension.proof
    assert isinstance(seen, InAttentionProof)
    assert max(seen.rotation_error, seen.output_error) < 1e-5
    assert seen.effect > 0.01
    assert (logits(model, token_ids(100)) - before["logits"]).abs().max() > 0.1
    restore_context(model)
    assert_unchanged(model, before)


@matrix
def test_law_6_nesting_and_exceptions_leave_nothing_behind(method: str) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(KeyError), temporarily_extended(model, method=late(method, model)):  # noqa: PT012
        inside = snapshot(model)
        with pytest.raises(RuntimeError, match="already extended"), temporarily_extended(model, 2, "pi"):
            pass
        with pytest.raises(RuntimeError, match="already extended"), temporarily_extended(model, 2, "self_extend"):
            pass
        assert_unchanged(model, inside)
        raise KeyError("a user's mistake")
    assert_unchanged(model, before)


@pytest.mark.parametrize("where", ["look", "conventions"])
def test_law_6_an_interrupted_proof_leaves_nothing_behind(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, where, interrupt)
    refused(tiny_model("llama"), KeyboardInterrupt, "^$")


def test_law_6_one_model_takes_every_method_in_turn() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    for method in [*LATE, "yarn", *reversed(LATE)]:
        chosen = method if method == "yarn" else late(method, model)
        with temporarily_extended(model, method=chosen):
            assert gap(model, extend_context(tiny_model("llama"), method=chosen)) == 0.0
    assert_unchanged(model, before)


# ---------------------------------------------------------------- law 7: other models are untouched


def with_theta(family: str, theta: float) -> Any:
    return tiny_model(family, rope_parameters={"rope_type": "default", "rope_theta": theta})


@every_family
def test_law_7_a_second_model_with_another_theta_is_untouched(family: str) -> None:
    first, second = with_theta(family, 1e4), with_theta(family, 5e5)
    before, interface = snapshot(second), dict(ALL_ATTENTION_FUNCTIONS)
    extend_context(first, method="dynamic_ntk")
    assert_unchanged(second, before)
    assert {name: dict(ALL_ATTENTION_FUNCTIONS)[name] for name in interface} == interface
    extended = logits(first, IDS)
    extend_context(second, method="self_extend")
    assert torch.equal(logits(first, IDS), extended)
    assert gap(second, extend_context(with_theta(family, 5e5), method="self_extend")) == 0.0
    restore_context(first)
    assert gap(first, with_theta(family, 1e4)) == 0.0
    restore_context(second)
    assert_unchanged(second, before)


def test_law_7_models_that_share_a_config_object_are_told_apart() -> None:
    config = tiny_config("llama")
    first, second = from_config(config), from_config(config)
    before, stock = config.to_dict(), logits(second, IDS)
    extend_context(first, method="dca")
    assert torch.equal(logits(second, IDS), stock)
    extend_context(second, method="dynamic_yarn")
    assert config.to_dict() == before
    assert config._attn_implementation == "sdpa"
    for model in (first, second):
        assert gap(model, second) == (0.0 if model is second else pytest.approx(gap(first, second)))
        restore_context(model)
        assert model.config is config
        assert torch.equal(logits(model, IDS), stock)


# ------------------------------------------- law 8: what no config can say is saved beside the weights

SAVED = [("llama", method) for method in LATE] + [(family, "self_extend") for family in LATE_FAMILIES[1:]]


@pytest.mark.parametrize(("family", "method"), SAVED)
def test_law_8_a_saved_model_is_stock_to_others_and_itself_to_us(family: str, method: str, tmp_path: Path) -> None:
    stock, model = tiny_model(family), patched(family, method)
    stock.save_pretrained(tmp_path / "stock")
    expected, config = logits(model, IDS), set(model.config.__dict__)
    with pytest.warns(UserWarning, match=r"config\.json was saved without it.*ctxext\.load\("):
        model.save_pretrained(tmp_path / "late")
    assert torch.equal(logits(model, IDS), expected)
    assert set(model.config.__dict__) == config
    assert text_config(model).max_position_embeddings == model.context_extension.plan.target_length > LENGTH
    files = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("stock", "late")]
    assert files[1].pop(BESIDE) == model.context_extension.plan.summary
    assert files[0] == files[1]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "late").eval()
    assert extension_of(plain) is None
    assert gap(plain, stock) == 0.0
    again = ctxext.load(tmp_path / "late")
    assert again.context_extension.method == model.context_extension.method
    assert torch.equal(logits(again, IDS), expected)
    extend_context(plain, method=late(method, stock))
    assert torch.equal(logits(plain, IDS), expected)


def test_law_8_every_argument_of_the_extension_is_brought_back(tmp_path: Path) -> None:
    model = tiny_model("llama")
    arguments = {"original_max_position_embeddings": 48, "ratio": 1.1}
    extend_context(model, 5, "dynamic_yarn", **arguments)
    with pytest.warns(UserWarning, match="context_extension.json"):
        model.save_pretrained(tmp_path)
    again = ctxext.load(tmp_path)
    found, wanted = again.context_extension.plan, model.context_extension.plan
    for name in ("method", "existing", "target_length", "summary", "updates"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.rope.original_max_position_embeddings == 48
    assert gap(again, model) == 0.0


def test_law_8_scaling_that_was_there_before_is_brought_back(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    for existing in ("compose", "replace"):
        model = tiny_model("llama", rope_parameters=yarn)
        extend_context(model, 4, "dynamic_ntk", existing=existing)
        with pytest.warns(UserWarning, match="saved without it"):
            model.save_pretrained(tmp_path / existing)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / existing).eval()
        assert gap(plain, tiny_model("llama", rope_parameters=yarn)) == 0.0
        assert gap(ctxext.load(tmp_path / existing), model) == 0.0


NATIVE = {
    "linear": {},
    "dynamic": {},
    "yarn": {"original_max_position_embeddings": 32},
    "llama3": {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"original_max_position_embeddings": 32, "short_factor": [1.5] * 8, "long_factor": [1.5] * 8},
}


def scaled_natively(rope_type: str) -> Any:
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, **NATIVE[rope_type]}
    return tiny_model("llama", rope_parameters=parameters)


@pytest.mark.filterwarnings("ignore:.*saved without it")
@pytest.mark.parametrize("existing", ["compose", "replace"])
@pytest.mark.parametrize("rope_type", NATIVE)
def test_law_8_whatever_native_scaling_is_extended_is_loaded_again(
    rope_type: str, existing: str, tmp_path: Path
) -> None:
    # A linear scaling names no length before it, and a dynamic one has no frequencies to start from.
    refused = {("linear", "replace"): "is unknown for this model", ("dynamic", "compose"): "length-dependent"}
    for name in LATE:
        model = scaled_natively(rope_type)
        method = late(name, model, 2)
        if reason := refused.get((rope_type, existing)):
            with pytest.raises(ValueError, match=reason):
                extend_context(model, method=method, existing=existing)
            continue
        if name == "longrope":  # fitted to other frequencies than these
            method = replace(method, fitted_to=None)
        extend_context(model, method=method, existing=existing)
        model.save_pretrained(tmp_path / name)
        again = ctxext.load(tmp_path / name)
        assert again.context_extension.plan.lengths == model.context_extension.plan.lengths, name
        assert gap(again, model) == 0.0, name


@pytest.mark.parametrize("existing", ["compose", "keep"])
def test_law_8_an_unknown_length_before_scaling_is_read_back_wherever_it_is_written(
    existing: str, tmp_path: Path
) -> None:
    scaled_natively("linear").save_pretrained(tmp_path / "base")
    method = None if existing == "keep" else "self_extend"
    live = extend_context(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval(), 2, method, existing=existing)
    expected = logits(live, IDS)
    get_peft_model(live, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(ctxext.load(tmp_path / "adapter"), IDS), expected)
    extend_folder(tmp_path / "base", tmp_path / "extended", 2, method, existing=existing)
    assert torch.equal(logits(ctxext.load(tmp_path / "extended"), IDS), expected)
    assert Extended.of_folder(tmp_path / "extended").lengths.original is None
    assert CliRunner().invoke(commands, ["describe", str(tmp_path / "extended")]).exit_code == 0


@pytest.mark.parametrize("method", DYNAMIC)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3", "mixtral"])
def test_law_8_a_frozen_checkpoint_is_the_static_model_of_its_length(family: str, method: str, tmp_path: Path) -> None:
    stock = tiny_model(family)
    chosen = late(method, stock)
    if method == "longrope":
        chosen = replace(chosen, start_tokens=0)  # which config.json cannot express
    model = extend_context(tiny_model(family), method=chosen)
    expected, plan = logits(model, IDS), model.context_extension.plan
    with pytest.warns(UserWarning, match="saved without it"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, length=200)
    assert not (tmp_path / RECORD).exists()
    static = extend_context(tiny_model(family), method=chosen, length=200)
    frozen = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert gap(frozen, static) == 0.0
    assert gap(frozen, stock) > 0.1
    assert "rope_scaling" in (tmp_path / "config.json").read_text() or frozen.config.rope_parameters["rope_theta"] > 1e4
    assert torch.equal(logits(model, IDS), expected)
    assert model.context_extension.plan is plan


@pytest.mark.parametrize("method", REMAPPING)
def test_law_8_what_remaps_positions_cannot_be_frozen(method: str, tmp_path: Path) -> None:
    model = patched("llama", method)
    before = snapshot(model)
    with pytest.raises(ValueError, match="no static form, so length=100 does not apply"):
        model.save_pretrained(tmp_path, length=100)
    assert_unchanged(model, before)
    assert not list(tmp_path.iterdir())


def test_law_8_a_frozen_save_that_fails_leaves_the_extension(tmp_path: Path) -> None:
    model = patched("llama", "dynamic_ntk")
    expected = logits(model, IDS)
    with pytest.raises(TypeError):
        model.save_pretrained(tmp_path, length=200, max_shard_size=object())
    assert torch.equal(logits(model, IDS), expected)


def test_law_8_a_save_that_fails_leaves_the_live_config(tmp_path: Path) -> None:
    model = patched("llama", "self_extend")
    before, expected = {**model.config.__dict__}, logits(model, IDS)
    with pytest.raises(TypeError):
        model.save_pretrained(tmp_path, max_shard_size=object())
    stock = {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}  # which transformers' own saving writes
    assert model.config.__dict__ == {**before, **stock}
    assert torch.equal(logits(model, IDS), expected)
    assert not (tmp_path / RECORD).exists()


def test_law_8_a_static_save_over_it_takes_the_record_away(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="saved without it"):
        patched("llama", "dca").save_pretrained(tmp_path)
    static = extend_context(tiny_model("llama"), method="yarn")
    static.save_pretrained(tmp_path)
    assert not (tmp_path / RECORD).exists()
    assert gap(ctxext.load(tmp_path), static) == 0.0


def test_law_8_a_record_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="saved without it"):
        patched("llama", "dca").save_pretrained(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    for wrong in ({**record, "surprise": 1}, {"method": record["method"]}, [record]):
        (tmp_path / RECORD).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"does not match this version of ctxext|must hold a JSON object"):
            ctxext.load(tmp_path)
    (tmp_path / RECORD).write_text(json.dumps({**record, "method": {**record["method"], "name": "dac"}}))
    with pytest.raises(ValueError, match="unknown method 'dac'; did you mean 'dca'"):
        ctxext.load(tmp_path)


# -------------------------------------------------------------- law 9: a cache changes nothing


@families_in_float64
@pytest.mark.parametrize("method", EXACT_UNDER_A_CACHE)
def test_law_9_uneven_chunks_and_decoding_agree_with_the_full_forward(
    family: str, method: str, float64: torch.dtype
) -> None:
    model, ids = patched(family, method, float64), IDS[:, :140]
    found = cached_logits(model, ids, [37, 60, 40, 1, 1, 1])
    torch.testing.assert_close(found, logits(model, ids, use_cache=False), rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", DEVIATING)
@pytest.mark.parametrize("method", EXACT_UNDER_A_CACHE)
def test_law_9_holds_where_attention_deviates(family: str, method: str, float64: torch.dtype) -> None:
    model, ids = patched(family, method, float64), IDS[:, :140]
    whole = logits(model, ids, use_cache=False)
    found = cached_logits(model, ids, [37, 60, 40, 1, 1, 1])
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-9)
    torch.testing.assert_close(logits(model, ids[:, :-1]), whole[:, :-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", DEVIATING)
def test_law_6_restore_is_bitwise_where_attention_deviates(family: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    for method in ("dynamic_ntk", "self_extend"):
        extend_context(model, method=late(method, model))
        assert gap(copy.deepcopy(model), model) == gap(pickle.loads(pickle.dumps(model)), model) == 0.0
        restore_context(model)
        assert_unchanged(model, before)


def test_law_9_token_by_token_agrees_with_the_full_forward(float64: torch.dtype) -> None:
    for method in ("dynamic_ntk", "self_extend"):
        model, ids = patched("llama", method, float64), IDS[:, :90]
        torch.testing.assert_close(cached_logits(model, ids, [1] * 90), logits(model, ids), rtol=0, atol=1e-9)


@every_family
def test_law_9_a_scale_of_the_call_refuses_a_cache(family: str) -> None:
    model = patched(family, "transformers_dynamic")
    expected = logits(model, IDS)  # config.use_cache alone asks for none
    for asked in ({"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
        with pytest.raises(ValueError, match=r"has one scale for the whole call.*use_cache=False"):
            logits(model, IDS, **asked)
    assert torch.equal(logits(model, IDS, use_cache=False), expected)


# ------------------------------------------------- law 10: a sequence is computed on its own


@families_in_float64
@matrix
def test_law_10_rows_padding_and_earlier_calls_do_not_matter(family: str, method: str, float64: torch.dtype) -> None:
    model = patched(family, method, float64)
    rows = [IDS[0, :30], IDS[0, 20:140], IDS[0, :70]]
    alone = [logits(model, row[None])[0] for row in rows]
    for side in ("left", "right"):
        together = logits(model, **padded_batch(rows, side))
        for row, out, expected in zip(rows, together, alone):
            out = out[-len(row) :] if side == "left" else out[: len(row)]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)
    assert torch.equal(logits(model, rows[0][None])[0], alone[0])


@pytest.mark.parametrize("earlier", [LENGTH, 300], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_law_10_earlier_calls_of_a_natively_scaled_model_do_not_matter(rope_type: str, earlier: int) -> None:
    for name in LATE:
        cold, warm = scaled_natively(rope_type), scaled_natively(rope_type)
        if rope_type == "longrope":  # whose frequencies of long calls are not those of short ones
            for model in (cold, warm):
                model.config.rope_parameters["long_factor"] = [2.0] * 8
        logits(warm, token_ids(earlier))  # of 300 tokens: transformers keeps the grown frequencies
        rotary, before = warm.model.rotary_emb, snapshot(warm, run=False)
        held = {key: value for key, value in rotary.__dict__.items() if not key.startswith("_")}
        for model in (cold, warm):
            extend_context(model, method=late(name, model), existing="replace")
        assert gap(cold, warm) == 0.0, name
        restore_context(warm)
        assert_unchanged(warm, before)
        assert warm.model.rotary_emb is rotary
        now = {key: value for key, value in rotary.__dict__.items() if not key.startswith("_")}
        assert now.keys() == held.keys(), name
        assert all(now[key] is held[key] for key in held), name


# --------------------------------------------- law 11: frequencies do not depend on the weights' type

casts = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@casts
@matrix
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_law_11_a_cast_before_or_after_leaves_the_float32_frequencies(
    family: str, method: str, dtype: torch.dtype
) -> None:
    expected = rotary_of(patched(family, method))
    before = tiny_model(family).to(dtype)
    assert rotary_of(before).inv_freq.dtype == dtype
    extend_context(before, method=late(method, before))
    after = patched(family, method).to(dtype)
    tables = dict(expected.named_buffers())
    assert {"inv_freq", "rung_inv_freq", "rung_scaling", "rung_lengths"} < tables.keys()
    for model in (before, after):
        for name, table in rotary_of(model).named_buffers():
            assert same(table, tables.pop(name) if model is after else tables[name]), name
    assert not tables
    assert torch.equal(logits(before, IDS), logits(after, IDS))


@casts
@matrix
def test_law_11_a_cast_costs_no_more_than_it_costs_the_stock_model(method: str, dtype: torch.dtype) -> None:
    def off(family: str, extended: bool) -> float:
        exact = patched(family, method) if extended else tiny_model(family)
        cast = tiny_model(family).to(dtype)
        if extended:
            extend_context(cast, method=late(method, cast))
        expected = logits(exact, IDS)
        return float((logits(cast, IDS).float() - expected).abs().mean() / expected.abs().mean())

    assert off("gpt_neox", True) < 1.5 * off("gpt_neox", False) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "length", "theta"),
    [(128, 8192, 5e5), (128, 32768, 1e6), (256, 8192, 1e4)],
    ids=["llama3", "qwen", "gemma"],
)
def test_published_lengths_are_compared_with_the_phases_of_the_stock_model(
    head_dim: int, length: int, theta: float, dtype: torch.dtype
) -> None:
    """The last bit of a float32 frequency is 1e-3 radians at 32,768 tokens, and a cast of the whole model far more."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=2 * head_dim, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    model = extend_context(LlamaForCausalLM(config).to(dtype).eval(), 4, "self_extend")
    assert model.context_extension.proof.rotation_error < (3e-2 if dtype == torch.bfloat16 else 1e-6)
    exact = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    assert torch.equal(model.model.rotary_emb.start_inv_freq, exact.float())
