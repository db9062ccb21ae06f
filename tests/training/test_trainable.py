"""What is trained: all of it, LoRA where it was asked for, embeddings and norms with ties kept."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, tiny_model
from peft import PeftModel
from survey.small import LENGTH, small_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ctxext import extend_context
from ctxext.assets import MODEL
from ctxext.data import Plain, check_positions
from ctxext.hub.adapters import check_all_saved
from ctxext.training.loss import use_chunked_loss
from ctxext.training.settings import TrainableSettings
from ctxext.training.trainable import attach_trainable, check_no_dropout, check_rotary, trained_parameters


def base():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_full_trains_everything_in_float32() -> None:
    model = attach_trainable(base().to(torch.bfloat16), TrainableSettings(kind="full"))
    assert trained_parameters(model).keys() == dict(model.named_parameters()).keys()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_dropout_of_the_model_itself_is_found_by_name() -> None:
    check_no_dropout(attach_trainable(base(), TrainableSettings(rank=4)))
    # Of gpt2's four, the one of its classifier is not used in training.
    model = small_model("gpt2", "causal", attn_pdrop=0.1, embd_pdrop=0.0, resid_pdrop=0.2, summary_first_dropout=0.3)
    with pytest.raises(ValueError, match=r"the model's config has \{'resid_pdrop': 0\.2, 'attn_pdrop': 0\.1\}"):
        check_no_dropout(attach_trainable(model, TrainableSettings(rank=4)))


def test_lora_is_on_attention_alone_unless_asked() -> None:
    names = trained_parameters(attach_trainable(base(), TrainableSettings(rank=4)))
    assert {name.split(".")[-4] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all("lora_" in name for name in names)
    names = trained_parameters(attach_trainable(base(), TrainableSettings(rank=4, targets=["down_proj"])))
    assert {name.split(".")[-4] for name in names} == {"down_proj"}


def test_embeddings_and_norms_are_trained_saved_and_stay_tied() -> None:
    model = attach_trainable(base(), TrainableSettings(rank=4, embeddings=True, norms=True))
    names = trained_parameters(model)
    assert sum("norm" in name for name in names) == 2 * 4 + 1
    assert sum("embed_tokens" in name for name in names) == 1
    check_all_saved(model)
    ids = torch.randint(0, 4096, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    trained = next(p for name, p in names.items() if "embed_tokens" in name)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        trained.mul_(1.5)  # the embeddings and, if they are tied, the head
        wrapped = model.base_model.model
        assert torch.equal(wrapped.lm_head.weight, trained)
        assert not torch.equal(model(input_ids=ids).logits, before)


def test_what_lora_trains_is_float32_on_a_half_precision_base() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    model = attach_trainable(model, TrainableSettings(rank=4, norms=True))
    assert {p.dtype for p in trained_parameters(model).values()} == {torch.float32}
    assert torch.bfloat16 in {p.dtype for p in model.parameters()}


def test_a_half_precision_base_passes_the_proofs_as_it_will_train() -> None:
    # A float32 norm hands float32 to a bfloat16 projection; autocast is what brings them together.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    model = attach_trainable(model, TrainableSettings(rank=4, embeddings=True, norms=True))
    with torch.autocast("cpu", torch.bfloat16):
        use_chunked_loss(model)
        check_positions(model, Plain(), 64, 4096)
        ids = torch.randint(0, 4096, (1, 64))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained_parameters(model).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_attention_embeddings_and_norms(family: str) -> None:
    model = attach_trainable(tiny_model(family), TrainableSettings(rank=2, embeddings=True, norms=True))
    assert isinstance(model, PeftModel)
    names = trained_parameters(model)
    for kind in ("lora_", "norm", "emb"):
        assert any(kind in name.lower().replace(".ln_", ".norm_") for name in names), kind
    check_all_saved(model)


def test_a_projection_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no projection is named 'q_porj'. Available: .*q_proj"):
        attach_trainable(base(), TrainableSettings(targets=["q_porj"]))


def test_rotary_tables_that_were_cast_or_changed_are_refused() -> None:
    check_rotary(base())
    with pytest.raises(RuntimeError, match="too coarse for long positions"):
        check_rotary(base().to(torch.bfloat16))
    changed = base()
    changed.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(RuntimeError, match="do not match the model's config"):
        check_rotary(changed)


@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3", "gptj", "gpt2"])
def test_rotary_tables_of_every_kind_pass_as_loaded(model_type: str) -> None:
    check_rotary(small_model(model_type, "causal"))


def test_each_table_of_a_model_with_several_is_checked() -> None:
    model = small_model("gemma3_text", "causal")
    model.model.rotary_emb.sliding_attention_inv_freq.mul_(0.5)
    with pytest.raises(RuntimeError, match="do not match the model's config"):
        check_rotary(model)


def test_new_rows_of_a_position_table_are_trained_beside_lora_and_saved() -> None:
    stock = attach_trainable(small_model("gpt2", "causal"), TrainableSettings(rank=2))
    names = trained_parameters(stock)
    assert all("lora_" in name and ".attn." in name for name in names)
    model = attach_trainable(extend_context(small_model("gpt2", "causal"), 4), TrainableSettings(rank=2))
    (table,) = trained_parameters(model).keys() - names.keys()
    assert ".wpe." in table
    check_all_saved(model)
    ids = torch.randint(3, 100, (1, 2 * LENGTH + 1))  # the last one predicts nothing
    model(input_ids=ids, labels=ids).loss.backward()
    rows = trained_parameters(model)[table].grad.abs().sum(-1)
    assert (rows > 0).tolist() == [True] * (2 * LENGTH) + [False] * (2 * LENGTH)


def test_a_look_at_a_model_in_four_bits_does_not_change_its_gradients() -> None:
    pytest.importorskip("bitsandbytes")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, quantization_config=quantization)
    model = attach_trainable(model, TrainableSettings(rank=4, quantization="nf4"))
    ids, gradients = torch.randint(0, 4096, (1, 64)), []
    for _ in range(2):
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in trained_parameters(model).items()})
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "falcon"])
def test_a_head_stays_tied_to_embeddings_of_any_name(model_type: str) -> None:
    model = small_model(model_type, "causal", tie_word_embeddings=True)
    attached = attach_trainable(model, TrainableSettings(rank=4, embeddings=True, targets="all-linear"))
    whole = attached.get_base_model()
    parts = [whole.get_input_embeddings(), whole.get_output_embeddings()]
    embeddings, head = (part.modules_to_save["default"].weight for part in parts)
    assert embeddings is head
    assert head.requires_grad
