"""Relative positions in live models: T5's buckets, XLNet's sines, and the distance vectors of speech encoders."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from site_checks import Patched, assert_same_state, state, through_pickle, tiny, tokens
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel, UdopModel

from ctxext.core.edit import Edit
from ctxext.core.patch import FormulaProof
from ctxext.core.probing import seen_by
from ctxext.methods import ContextMethod, DistanceInterpolation, MaxDistanceScaling
from ctxext.patches import relative_bias

_T5: dict[str, Any] = dict(
    d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, initializer_factor=3.0,
    relative_attention_max_distance=20, n_positions=64,
)  # fmt: skip
BUCKETS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "longt5": {**_T5, "local_radius": 15},
    "longt5 with global blocks": {
        **_T5, "local_radius": 15, "encoder_attention_type": "transient-global", "global_block_size": 4,
    },
    "switch_transformers": {**_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}  # fmt: skip
_XLNET: dict[str, Any] = dict(d_model=32, n_layer=2, n_head=4, d_inner=32, initializer_range=0.3)
_SPEECH: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, feature_projection_input_dim=16,
    initializer_range=0.3, left_max_position_embeddings=12, right_max_position_embeddings=4,
)  # fmt: skip
every_t5 = pytest.mark.parametrize("family", BUCKETS)
every_kind = pytest.mark.parametrize("kind", ["t5", "xlnet", "wav2vec2-bert"])


def model_of(kind: str, **fields: Any) -> PreTrainedModel:
    if kind == "xlnet":
        return tiny("xlnet", AutoModelForCausalLM, **{**_XLNET, **fields})
    if kind == "wav2vec2-bert":
        return tiny("wav2vec2-bert", AutoModel, **{**_SPEECH, **fields})
    return tiny(kind.split()[0], AutoModelForSeq2SeqLM, **{**BUCKETS[kind], **fields})


def patch(model: PreTrainedModel, factor: float = 4.0) -> Patched:
    encoding = relative_bias.find(model, model.config)
    method: ContextMethod = (
        MaxDistanceScaling(factor=factor) if encoding.name == "t5" else DistanceInterpolation(factor=factor)
    )
    return Patched(model, encoding, method, round(factor * encoding.trained_length))


def output(model: nn.Module, n_tokens: int = 90) -> Tensor:
    ids = tokens(n_tokens)
    with torch.no_grad():
        if model.main_input_name == "input_features":
            return model(torch.randn(1, n_tokens, 16, generator=torch.Generator().manual_seed(0)))[0]
        decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        return model(ids, **decoder)[0]


# ------------------------------------------------------------------------------------------ buckets


@every_t5
def test_scaled_buckets_are_those_of_a_model_configured_so_and_of_a_plain_reload(family: str, tmp_path: Any) -> None:
    model = model_of(family)
    stock = output(model)
    patched = patch(model)
    assert (output(model) - stock).abs().max() > 0.1
    assert torch.equal(output(model), output(model_of(family, relative_attention_max_distance=80)))
    assert model.config.n_positions == 256
    model.save_pretrained(tmp_path)
    assert torch.equal(output(type(model).from_pretrained(tmp_path)), output(model))
    proof = patched.prove()
    assert proof.formula_error == 0
    assert proof.effect > 0.1


@every_t5
def test_proof_tells_buckets_that_stayed(family: str) -> None:
    patched = patch(model_of(family))
    patched.edit.undo()
    proof = patched.prove()
    assert proof.formula_error > FormulaProof.FORMULA_BAR
    assert proof.effect == 0


def test_proof_tells_a_bias_that_nothing_reads() -> None:
    patched = patch(model_of("t5"))
    spare = patched.model.encoder.block[1].layer[0].SelfAttention
    spare.relative_attention_bias = nn.Embedding(32, 4)
    assert patched.prove().formula_error == math.inf


def test_every_holder_is_set_also_without_a_bias_of_its_own() -> None:
    model = patch(model_of("t5")).model
    distances = [
        m.relative_attention_max_distance for m in model.modules() if hasattr(m, "relative_attention_max_distance")
    ]
    assert distances == 6 * [80]


def test_lengths_are_the_config_s_or_published() -> None:
    for family, length in (("t5", 512), ("mt5", 1024), ("longt5", 4096), ("umt5", 512)):
        model = model_of(family)
        assert relative_bias.find(model, model.config).trained_length == 64
        del model.config.n_positions
        found = relative_bias.find(model, model.config)
        assert (found.trained_length, found.source.split(":")[0]) == (length, "as published")
        assert "n_positions" not in found.updates(MaxDistanceScaling(factor=2), 2 * length)


def test_udop_is_refused_as_its_encoder_has_other_biases() -> None:
    fields = {key: _T5[key] for key in ("d_model", "d_kv", "d_ff", "num_layers", "num_heads")}
    model = tiny("udop", _Of(UdopModel), **fields)
    with pytest.raises(ValueError, match="relative_bias_args"):
        relative_bias.find(model, model.config)


class _Of:
    """A class instead of an auto class."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def from_config(self, config: Any, attn_implementation: Any) -> Any:
        return self.cls(config)


# transformers' Switch Transformers hands use_cache to its encoder, which refuses it.
@pytest.mark.parametrize("family", [family for family in BUCKETS if family != "switch_transformers"])
def test_a_decoder_with_a_cache_is_the_full_forward_pass(family: str) -> None:
    model, ids = patch(model_of(family)).model, tokens(70)
    with torch.no_grad():
        whole = model(ids, decoder_input_ids=ids).logits
        first = model(ids, decoder_input_ids=ids[:, :60], use_cache=True)
        cache, parts = first.past_key_values, [first.logits]
        for token in ids[:, 60:].split(1, dim=1):
            parts.append(model(ids, decoder_input_ids=token, past_key_values=cache, use_cache=True).logits)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-3 * whole.abs().max()


# -------------------------------------------------------------------------------------------- XLNet


@pytest.mark.parametrize("fields", [{}, {"clamp_len": 20}, {"attn_type": "uni"}], ids=str)
def test_xlnet_sees_the_sines_of_a_quarter_of_the_distance(fields: dict[str, Any]) -> None:
    model = model_of("xlnet", **fields)
    stock = output(model)
    patched = patch(model)
    with seen_by(model, "transformer.layer.1", "r") as seen:
        assert (output(model) - stock).abs().max() > 0.1
    n_rows, width = 90 + (90 if model.config.attn_type == "bi" else 1), 32
    assert seen[0].shape[0] == n_rows
    for row in range(0, n_rows, 7):
        distance = 90 - row
        if "clamp_len" in fields:
            distance = max(-80, min(80, distance))
        angles = [distance / 4 / 10000 ** (2 * i / width) for i in range(width // 2)]
        want = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        assert (seen[0][row, 0] - want).abs().max() < 1e-5
    proof = patched.prove()
    assert proof.formula_error < 1e-5
    assert proof.effect > 0.1


def test_proof_tells_xlnet_s_sines_that_stayed() -> None:
    patched = patch(model_of("xlnet"))
    patched.edit.undo()
    proof = patched.prove()
    assert proof.formula_error > FormulaProof.FORMULA_BAR
    assert proof.effect == 0


# --------------------------------------------------------------------------------- distance vectors


def test_each_pair_of_frames_has_the_vector_between_the_trained_ones() -> None:
    model = model_of("wav2vec2-bert")
    attention = model.encoder.layers[1].self_attn
    trained, stock = attention.distance_embedding.weight.detach().clone(), output(model)
    patched = patch(model)
    with seen_by(model, "encoder.layers.1.self_attn.distance_embedding") as seen:
        assert (output(model) - stock).abs().max() > 0.1
    for query in range(0, 90, 5):
        for key in range(0, 90, 3):
            index = 12 + max(-48, min(16, key - query)) / 4
            part, below = math.modf(index)
            above = min(int(below) + 1, 16)
            want = (1 - part) * trained[int(below)] + part * trained[above]
            assert (seen[0][query, key] - want).abs().max() < 1e-6
    proof = patched.prove()
    assert proof.formula_error < 1e-6
    assert proof.effect > 0.1


def test_distance_vectors_are_saved_and_reloaded_exactly(tmp_path: Any) -> None:
    model = patch(model_of("wav2vec2-bert")).model
    assert (model.config.left_max_position_embeddings, model.config.right_max_position_embeddings) == (48, 16)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(output(again), output(model))


def test_proof_tells_distance_vectors_that_stayed() -> None:
    patched = patch(model_of("wav2vec2-bert"))
    patched.edit.undo()
    proof = patched.prove()
    assert proof.formula_error > FormulaProof.FORMULA_BAR
    assert proof.effect == 0


# ------------------------------------------------------------------------------------ what survives


@every_kind
def test_undo_is_bitwise_also_on_a_copy_and_others_are_untouched(kind: str) -> None:
    model, other = model_of(kind), model_of(kind)
    before, stock, theirs = state(model), output(model), state(other)
    patched = patch(model)
    extended = output(model)
    assert not torch.equal(extended, stock)
    for copied in (copy.deepcopy(model), through_pickle(model)):
        assert torch.equal(output(copied), extended)
        Edit(copied, copy.deepcopy(patched.edit.undos)).undo()
        assert torch.equal(output(copied), stock)
    assert torch.equal(output(model), extended)
    patched.undo()
    assert_same_state(model, before)
    assert torch.equal(output(model), stock)
    assert_same_state(other, theirs)


@every_kind
def test_a_model_without_weights_is_found_alike(kind: str) -> None:
    with torch.device("meta"):
        model = model_of(kind)
    assert relative_bias.find(model, model.config) == relative_bias.find(model_of(kind), model.config)


@every_kind
def test_half_precision_is_off_by_its_rounding_alone(kind: str) -> None:
    patched = patch(model_of(kind).to(torch.bfloat16))
    assert patched.prove().formula_error <= (2**-8 if kind == "xlnet" else 0)
