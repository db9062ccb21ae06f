"""Sinusoidal tables that grow by themselves, in live models."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from site_checks import Patched, assert_same_state, state, through_pickle, tiny, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MusicgenForCausalLM, PreTrainedModel

from ctxext import extend_context
from ctxext.core.edit import Edit
from ctxext.core.patch import FormulaProof
from ctxext.core.probing import seen_by
from ctxext.methods import SinusoidalInterpolation
from ctxext.patches import sinusoidal

LENGTH, WIDTH, PAD = 64, 32, 1
_SEQ2SEQ: dict[str, Any] = dict(
    d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=32, decoder_ffn_dim=32, decoder_start_token_id=2, init_std=0.3, pad_token_id=PAD,
    max_position_embeddings=LENGTH,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "m2m_100": _SEQ2SEQ,
    "nllb-moe": {**_SEQ2SEQ, "num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "fsmt": {**_SEQ2SEQ, "src_vocab_size": 64, "tgt_vocab_size": 64, "langs": ["en", "de"]},
    "xglm": dict(
        d_model=WIDTH, num_layers=2, attention_heads=4, ffn_dim=32, max_position_embeddings=LENGTH, init_std=0.3,
        pad_token_id=PAD,
    ),
    "musicgen_decoder": dict(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32, max_position_embeddings=LENGTH,
        initializer_factor=0.3, num_codebooks=1,
    ),
}  # fmt: skip
FIRST_ROW = {"musicgen_decoder": 0}  # all others keep theirs after the row for padding
every_family = pytest.mark.parametrize("family", FAMILIES)


class Music:
    """MusicGen's decoder is no auto model's."""

    @staticmethod
    def from_config(config: Any, attn_implementation: Any) -> PreTrainedModel:
        return MusicgenForCausalLM(config)


def model_of(family: str, **fields: Any) -> PreTrainedModel:
    auto = {"xglm": AutoModelForCausalLM, "musicgen_decoder": Music}.get(family, AutoModelForSeq2SeqLM)
    return tiny(family, auto, **{**FAMILIES[family], **fields})


def patch(model: PreTrainedModel, factor: float = 4.0) -> Patched:
    encoding = sinusoidal.find(model, model.config)
    return Patched(model, encoding, SinusoidalInterpolation(factor=factor), round(factor * LENGTH))


def tables_of(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if path.endswith("embed_positions")]


def output(model: nn.Module, n_tokens: int = LENGTH) -> Tensor:
    ids = tokens(n_tokens)
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **decoder)[0]


def sines_at(position: float, cosines_first: bool) -> Tensor:
    """Pair i turns by position · 10000^(-i / 15), for 16 pairs: tensor2tensor's table."""
    angles = [position / 10000 ** (i / (WIDTH // 2 - 1)) for i in range(WIDTH // 2)]
    sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
    return torch.tensor(cosines + sines if cosines_first else sines + cosines)


@every_family
def test_each_token_gets_the_sines_of_a_quarter_of_its_position(family: str) -> None:
    """Beyond the table that was made as well, where the module makes a longer one."""
    model = model_of(family)
    stock = output(model)
    patched = patch(model)
    assert (output(model) - stock).abs().max() > 0.1
    first = FIRST_ROW.get(family, PAD + 1)
    assert tables_of(model) == list(patched.patch.encoding.paths)
    for path in patched.patch.encoding.paths:
        with seen_by(model, path) as seen:
            output(model, 5 * LENGTH)
        rows = seen[0].reshape(-1, WIDTH)
        assert len(rows) == 5 * LENGTH
        for token in range(0, 5 * LENGTH, 13):
            want = sines_at(first + token / 4, cosines_first=family == "musicgen_decoder")
            assert (rows[token] - want).abs().max() < 1e-5


@every_family
def test_proof_sees_the_patch_and_tells_a_table_that_stayed(family: str) -> None:
    patched = patch(model_of(family))
    proof = patched.prove()
    assert proof.formula_error < 1e-5
    assert proof.effect > 0.1
    patched.edit.undo()
    proof = patched.prove()
    assert proof.formula_error > FormulaProof.FORMULA_BAR
    assert proof.effect == 0


def test_proof_tells_a_model_that_asks_no_table() -> None:
    patched = patch(model_of("xglm"))
    patched.model.model.embed_positions.forward = lambda ids, *_: torch.zeros(*ids.shape, WIDTH)
    proof = patched.prove()
    assert proof.formula_error > FormulaProof.FORMULA_BAR


@pytest.mark.parametrize("family", ["m2m_100", "fsmt"])
def test_padding_keeps_its_row_of_zeros_and_moves_nobody(family: str) -> None:
    model = patch(model_of(family)).model
    ids, path = tokens(20), tables_of(model)[0]
    padded = torch.cat([torch.full((1, 6), PAD), ids], dim=1)
    with torch.no_grad(), seen_by(model, path) as seen:
        alone = model(ids, decoder_input_ids=ids)[0]
        together = model(padded, attention_mask=(padded != PAD).long(), decoder_input_ids=ids)[0]
    assert (seen[1][0, :6] == 0).all()
    assert torch.equal(seen[1][0, 6:], seen[0][0])
    assert (together - alone).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_family
def test_the_unscaled_method_is_refused_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    """Such a model makes the same rows itself, so that only rounding could tell the two apart."""
    model = model_of(family).to(dtype)
    before = state(model)
    with pytest.raises(ValueError, match=r"changes nothing in this model.*Use the model unextended"):
        extend_context(model, 4, "sinusoidal_extrapolation")
    assert_same_state(model, before)


@every_family
def test_next_to_no_scaling_leaves_the_stock_model(family: str) -> None:
    model = model_of(family)
    stock = output(model, 3 * LENGTH)
    method = SinusoidalInterpolation(factor=1 + 1e-9)
    Patched(model, sinusoidal.find(model, model.config), method, 4 * LENGTH)
    # The family takes its angles in float32.
    assert (output(model, 3 * LENGTH) - stock).abs().max() < 2e-3 * stock.abs().max()


# FSMT counts padding into its cached positions; that is the stock model's own.
@pytest.mark.parametrize("family", ["m2m_100", "nllb-moe", "xglm"])
def test_decoding_with_a_cache_is_the_full_forward_pass(family: str) -> None:
    model, ids = patch(model_of(family)).model, tokens(2 * LENGTH)
    source = {"input_ids": ids[:, :10]} if model.config.is_encoder_decoder else {}
    name = "decoder_input_ids" if source else "input_ids"
    cache, parts = None, []
    with torch.no_grad():
        whole = model(**source, **{name: ids}).logits
        for piece in ids.split([100, 20] + 8 * [1], dim=1):
            step = model(**source, **{name: piece}, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            parts.append(step.logits)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-4 * whole.abs().max()


def test_fsmt_saves_its_tables_and_is_reloaded_exactly(tmp_path: Any) -> None:
    model = model_of("fsmt")
    patched = patch(model)
    assert patched.patch.encoding.why_not_portable is None
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(output(again, 4 * LENGTH), output(model, 4 * LENGTH))


@pytest.mark.parametrize("family", ["m2m_100", "xglm"])
def test_what_is_not_saved_is_there_again_once_a_reload_is_extended(family: str, tmp_path: Any) -> None:
    model = model_of(family)
    config = copy.deepcopy(model.config)
    stock, patched = output(model), patch(model)
    assert patched.patch.encoding.why_not_portable is not None
    extended = output(model, 5 * LENGTH)
    model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(output(again), stock)
    patch(again)
    assert torch.equal(output(again, 5 * LENGTH), extended)


@every_family
def test_undo_is_bitwise_also_on_a_copy_and_others_are_untouched(family: str) -> None:
    model, other = model_of(family), model_of(family)
    before, stock, theirs = state(model), output(model), state(other)
    patched = patch(model)
    assert all(isinstance(model.get_submodule(path), sinusoidal.ScaledRows) for path in tables_of(model))
    extended = output(model, 5 * LENGTH)  # the tables have grown by now
    for copied in (copy.deepcopy(model), through_pickle(model)):
        assert torch.equal(output(copied, 6 * LENGTH), output(model, 6 * LENGTH))
        Edit(copied, copy.deepcopy(patched.edit.undos)).undo()
        assert torch.equal(output(copied), stock)
    assert torch.equal(output(model, 5 * LENGTH), extended)
    patched.undo()
    assert_same_state(model, before)
    assert torch.equal(output(model), stock)
    assert_same_state(other, theirs)


def test_half_precision_rounds_each_row_once_also_when_the_table_grows() -> None:
    patched = patch(model_of("xglm").to(torch.bfloat16))
    assert patched.prove().formula_error == 0
    with seen_by(patched.model, "model.embed_positions") as seen:
        output(patched.model, 5 * LENGTH)
    want = torch.stack([sines_at(2 + token / 4, False) for token in range(5 * LENGTH)])
    assert seen[0].dtype == torch.bfloat16
    assert (seen[0][0].float() - want).abs().max() <= 2**-8


@every_family
def test_a_model_without_weights_is_found_alike(family: str) -> None:
    with torch.device("meta"):
        model = model_of(family)
        found = sinusoidal.find(model, model.config)
    assert found == sinusoidal.find(model_of(family), model.config)
    assert found.source == "max_position_embeddings of the config"
    assert (found.trained_length, found.limit) == (LENGTH, None)
