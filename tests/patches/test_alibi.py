"""ALiBi in live models: BLOOM, MPT and Falcon against attention written out, and a model that holds its slopes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from site_checks import Patched, assert_same_state, state, through_pickle, tiny, tokens
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ctxext.core.edit import Edit
from ctxext.core.patch import FormulaProof
from ctxext.core.probing import seen_by
from ctxext.methods import AlibiScaling, SlopeScaling
from ctxext.patches import alibi

HEADS, LENGTH = 6, 64  # six heads, so that slopes come from two powers of two
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": dict(n_layer=2, n_head=HEADS, hidden_size=48, seq_length=LENGTH),
    "falcon": dict(
        alibi=True, num_hidden_layers=2, num_attention_heads=HEADS, hidden_size=48, max_position_embeddings=LENGTH,
        multi_query=False, new_decoder_architecture=False,
    ),
    "mpt": dict(n_layers=2, n_heads=HEADS, d_model=48, max_seq_len=LENGTH),
}  # fmt: skip
ATTENTION = {"bloom": "self_attention", "falcon": "self_attention", "mpt": "attn"}
every_family = pytest.mark.parametrize("family", FAMILIES)


@dataclass(frozen=True, kw_only=True)
class HeadByHead(SlopeScaling):
    """Head h keeps 1 / (factor + h) of its slope."""

    def slopes(self, slopes: Tensor) -> Tensor:
        return slopes / (self.factor + torch.arange(len(slopes)))


def model_of(family: str, **fields: Any) -> PreTrainedModel:
    return tiny(family, initializer_range=0.3, **{**FAMILIES[family], **fields})


def patched(family: str, method: SlopeScaling | None = None, **fields: Any) -> Patched:
    model = model_of(family, **fields)
    encoding = alibi.find(model, model.config)
    return Patched(model, encoding, method or AlibiScaling(factor=4), 4 * LENGTH)


def logits(model: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


# ------------------------------------------------------------------------------------- the formula


def slopes_of_six_heads() -> Tensor:
    """Those of four heads, then the first and third of eight."""
    return 2.0 ** -torch.tensor([2, 4, 6, 8, 1, 3], dtype=torch.float64)


def slow_attention(attention: nn.Module, hidden: Tensor, slopes: Tensor, real: Tensor) -> Tensor:
    """Softmax of q·k / √d - slope (i - j) over the keys up to the query that are `real`, in float64."""
    n_rows, n_tokens, width = hidden.shape
    dim = width // HEADS
    if hasattr(attention, "Wqkv"):
        query, key, value = attention.Wqkv(hidden).view(n_rows, n_tokens, 3, HEADS, dim).permute(2, 0, 3, 1, 4)
    else:
        query, key, value = (
            attention.query_key_value(hidden).view(n_rows, n_tokens, HEADS, 3, dim).permute(3, 0, 2, 1, 4)
        )
    position = torch.arange(n_tokens)
    distance = position[:, None] - position
    scores = query @ key.mT / math.sqrt(dim) - slopes[:, None, None] * distance
    scores = scores.masked_fill((distance < 0) | ~real[:, None, None, :], -torch.inf)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    merged = (weights @ value).transpose(1, 2).reshape(n_rows, n_tokens, width)
    return (attention.out_proj if hasattr(attention, "Wqkv") else attention.dense)(merged)


@pytest.mark.parametrize("path", ["no mask", "mask of ones", "left padding"])
@every_family
def test_attention_is_that_of_the_formula_with_the_new_slopes(family: str, path: str) -> None:
    method = HeadByHead(factor=4)
    model = patched(family, method).model
    ids, mask = tokens(40, 2), torch.ones(2, 40, dtype=torch.long)
    if path == "left padding":
        mask[1, :15] = 0
    calls = []
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    logits(model, ids, attention_mask=None if path == "no mask" else mask)
    slopes = method.slopes(slopes_of_six_heads())
    if family == "falcon":  # adds its bias before the logits are divided by √d
        slopes = slopes / math.sqrt(48 // HEADS)
    assert len(calls) == 2
    for attention, args, _, output in calls:
        got = output[0] - args[1] if family == "bloom" else output[0]  # BLOOM's adds the residual
        with torch.no_grad():
            want = slow_attention(copy.deepcopy(attention).double(), args[0].double(), slopes, mask.bool())
        assert (got - want)[mask.bool()].abs().max() < 1e-4


def test_eager_falcon_counts_its_bias_twice_in_transformers() -> None:
    """A defect of the stock model that the patch leaves as it is; this fails when transformers mends it."""
    ids = tokens(40)
    eager, sdpa = (model_of("falcon", attn_implementation=name) for name in ("eager", "sdpa"))
    assert (logits(eager, ids) - logits(sdpa, ids)).abs().max() > 0.1
    for block in eager.transformer.h:
        block.register_forward_pre_hook(without_one_of_two, with_kwargs=True)
    assert (logits(eager, ids) - logits(sdpa, ids)).abs().max() < 1e-4


def without_one_of_two(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, "alibi": torch.zeros_like(kwargs["alibi"])}


# ------------------------------------------------------------------------------------------- proof


@every_family
def test_proof_sees_the_patch(family: str) -> None:
    proof = patched(family, HeadByHead(factor=4)).prove()
    assert proof.formula_error < 1e-5
    assert proof.effect > 0.1
    assert proof.n_tokens == (LENGTH + 1 if family == "mpt" else LENGTH)


@every_family
def test_proof_tells_a_hook_that_does_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = patched(family)
    monkeypatch.setattr(alibi.ScaledBias, "scaled", lambda self, bias: bias)
    proof = patch.prove()
    assert proof.formula_error > FormulaProof.FORMULA_BAR
    assert proof.effect == 0


def test_what_falcon_masks_stays_the_least_number() -> None:
    """Even where slopes grow: a multiple of it would be infinite, and a row of infinities has no softmax."""
    model = patched("falcon", Steeper(factor=1)).model
    with seen_by(model, "transformer.h.0.self_attention", "attention_mask") as seen:
        logits(model, tokens(10))
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    assert (seen[0][..., future] == torch.finfo(torch.float32).min).all()


class Steeper(SlopeScaling):
    def slopes(self, slopes: Tensor) -> Tensor:
        return 4 * slopes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_family
def test_half_precision_is_off_by_its_rounding_alone(family: str, dtype: torch.dtype) -> None:
    patch = patched(family, HeadByHead(factor=3))
    patch.model.to(dtype)
    assert patch.prove().formula_error == 0
    assert logits(patch.model, tokens(40)).isfinite().all()


# ------------------------------------------------------------------------------------ what survives


@every_family
def test_decoding_with_a_cache_is_the_full_forward_pass(family: str) -> None:
    model, ids = patched(family).model, tokens(2 * LENGTH)
    whole, cache, parts = logits(model, ids), None, []
    for piece in ids.split([100, 20] + 8 * [1], dim=1):
        with torch.no_grad():
            output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4


@every_family
def test_a_row_does_not_feel_its_padding(family: str) -> None:
    model, ids = patched(family).model, tokens(30)
    padded = torch.cat([torch.zeros(1, 20, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(50) >= 20).long()[None]
    assert (logits(model, padded, attention_mask=mask)[:, 20:] - logits(model, ids)).abs().max() < 1e-4


@every_family
def test_undo_is_bitwise_also_on_a_copy_and_others_are_untouched(family: str) -> None:
    other, ids = model_of(family, seed=1), tokens(LENGTH)
    untouched, theirs = state(other), logits(other, ids)
    model = model_of(family)
    before, output = state(model), logits(model, ids)
    patch = Patched(model, alibi.find(model, model.config), AlibiScaling(factor=4), 4 * LENGTH)
    extended = logits(model, tokens(2 * LENGTH))
    for copied in (copy.deepcopy(model), through_pickle(model)):
        assert torch.equal(logits(copied, tokens(2 * LENGTH)), extended)
        Edit(copied, copy.deepcopy(patch.edit.undos)).undo()
        assert torch.equal(logits(copied, ids), output)
    assert torch.equal(logits(model, tokens(2 * LENGTH)), extended)
    assert not torch.equal(logits(model, ids), output)
    patch.undo()
    assert_same_state(model, before)
    assert torch.equal(logits(model, ids), output)
    assert_same_state(other, untouched)
    assert torch.equal(logits(other, ids), theirs)


@every_family
def test_gradient_checkpointing_and_compiling_change_nothing(family: str) -> None:
    model, ids = patched(family).model.train(), tokens(40)
    compiled = torch.compile(model, backend="eager")
    assert (compiled(ids).logits - model(ids).logits).abs().max() < 1e-5
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    assert torch.equal(*gradients)


@every_family
def test_a_model_without_weights_is_found_alike(family: str) -> None:
    with torch.device("meta"):
        model = model_of(family)
    assert alibi.find(model, model.config) == alibi.find(model_of(family), model.config)


def test_mpt_stops_at_its_limit_until_it_is_extended() -> None:
    with pytest.raises(RuntimeError):
        logits(model_of("mpt"), tokens(LENGTH + 1))
    model = patched("mpt").model
    assert logits(model, tokens(4 * LENGTH)).isfinite().all()
    assert {block.attn.max_seq_length for block in model.transformer.blocks} == {4 * LENGTH}


def test_lengths_come_from_the_config_where_it_has_them() -> None:
    for family in FAMILIES:
        model = model_of(family)
        assert alibi.find(model, model.config).trained_length == LENGTH
    silent = tiny("bloom", n_layer=1, n_head=2, hidden_size=16)
    found = alibi.find(silent, silent.config)
    assert (found.trained_length, found.limit, found.updates(AlibiScaling(factor=2), 4096)) == (2048, None, {})
    assert "published" in found.source


def test_falcon_with_rope_is_not_found() -> None:
    model = model_of("falcon", alibi=False)
    assert alibi.find(model, model.config) is None


# -------------------------------------------------------------------------------- a module of one's own


class OwnConfig(PreTrainedConfig):
    model_type = "own_alibi"
    num_attention_heads: int = HEADS
    vocab_size: int = 64
    pad_token_id: int = 0
    eos_token_id: int = 2
    max_position_embeddings: int = LENGTH


class OwnModel(PreTrainedModel):
    """Tokens attend by recency alone; each head sees its own."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(64, HEADS)
        self.register_buffer("slopes", slopes_of_six_heads().float())
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
        position = torch.arange(input_ids.shape[1])
        bias = -self.slopes[:, None, None] * (position[:, None] - position)
        weights = bias.masked_fill(position > position[:, None], -torch.inf).softmax(-1)
        return (torch.einsum("hqk,bkh->bqh", weights, self.tokens(input_ids)),)


def test_slopes_held_in_a_buffer_are_scaled_and_saved(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = OwnModel(OwnConfig())
    before = state(model)
    patch = Patched(model, alibi.find(model, model.config), AlibiScaling(factor=4), 4 * LENGTH)
    assert torch.equal(model.slopes, slopes_of_six_heads().float() / 4)
    proof = patch.prove()
    assert proof.formula_error < 1e-7
    assert proof.effect > 1e-3
    copy.deepcopy(model).save_pretrained(tmp_path)
    again = OwnModel.from_pretrained(tmp_path)
    assert torch.equal(again.slopes, model.slopes)
    assert again.config.max_position_embeddings == 4 * LENGTH
    patch.undo()
    assert_same_state(model, before)


class DeafModel(OwnModel):
    def forward(self, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
        return (self.tokens(input_ids),)


def test_slopes_that_nothing_reads_are_told() -> None:
    model = DeafModel(OwnConfig())
    patch = Patched(model, alibi.find(model, model.config), AlibiScaling(factor=4), 4 * LENGTH)
    assert patch.prove().effect == 0
