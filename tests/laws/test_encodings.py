"""The laws of the verbs, for every position encoding other than RoPE: live, undone, saved, loaded, described."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from survey.small import LENGTH, small_config, small_model, stock_logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoConfig, MarianMTModel

import ctxext
from ctxext import describe_context, extend_config, extend_context, list_methods, restore_context, temporarily_extended
from ctxext.extension.metadata_file import RECORD, read_record
from ctxext.extension.request import plan_extension
from ctxext.hub.checkpoint import extend_folder

# One family of each kind of site, with the default method; the last says whether plain transformers loads it saved.
FAMILIES = {
    "gpt2": ("causal", "learned", "hierarchical", True),
    "bart": ("causal", "learned", "hierarchical", True),
    "marian": ("causal", "sinusoidal", "sinusoidal_interpolation", True),
    "xglm": ("causal", "sinusoidal", "sinusoidal_interpolation", False),
    "ctrl": ("causal", "sinusoidal", "sinusoidal_interpolation", False),
    "bloom": ("causal", "alibi", "alibi_scaling", False),
    "mpt": ("causal", "alibi", "alibi_scaling", False),
    "t5": ("seq2seq", "t5", "bucket_scaling", True),
    "umt5": ("seq2seq", "t5", "bucket_scaling", True),
    "xlnet": ("causal", "relative", "distance_interpolation", False),
}
families = pytest.mark.parametrize("model_type", FAMILIES)


def model_of(model_type: str) -> Any:
    return small_model(model_type, FAMILIES[model_type][0])


def state(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "tensors": {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "modules": {path: (id(module), type(module), sorted(module.__dict__)) for path, module in modules.items()},
        "numbers": {
            path: {k: v for k, v in module.__dict__.items() if isinstance(v, int | float)}
            for path, module in modules.items()
        },
        "hooks": {path: len(module._forward_pre_hooks) for path, module in modules.items()},
        "config": model.config.to_dict(),
        "logits": stock_logits(model, LENGTH),
    }


def assert_same(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    assert torch.equal(after.pop("logits"), before["logits"])
    tensors = after.pop("tensors")
    assert tensors.keys() == before["tensors"].keys()
    assert all(torch.equal(tensors[n], t) and tensors[n].dtype == t.dtype for n, t in before["tensors"].items())
    assert after == {key: value for key, value in before.items() if key not in ("logits", "tensors")}


@families
def test_the_default_is_the_encodings_own_and_the_receipt_says_so(model_type: str) -> None:
    _, encoding, method, portable = FAMILIES[model_type]
    model = model_of(model_type)
    description = describe_context(model)
    assert description.encoding == encoding
    assert f"{method} ×4" in description.would_do
    extend_context(model)
    receipt = model.context_extension
    assert receipt.method == next(cls for cls in list_methods(encoding) if cls.name == method)(factor=4)
    assert receipt.plan.is_portable == portable
    assert receipt.proof.formula_error < 1e-5
    assert receipt.proof.effect > 1e-3
    assert f"{method} ×4" in repr(receipt)
    with pytest.raises(ValueError, match="it has no frequencies"):
        _ = receipt.inv_freq


@families
def test_restoring_is_bitwise_also_after_an_exception(model_type: str) -> None:
    model = model_of(model_type)
    before = state(model)
    extend_context(model)
    with pytest.raises(RuntimeError, match="already extended"):
        extend_context(model)
    restore_context(model)
    assert_same(model, before)
    with pytest.raises(KeyError), temporarily_extended(model, 2):
        raise KeyError
    assert_same(model, before)


@families
def test_a_second_model_is_untouched(model_type: str) -> None:
    one, other = model_of(model_type), model_of(model_type)
    before = state(other)
    other.config = one.config  # which two models may share
    before["config"] = other.config.to_dict()
    extend_context(one)
    assert_same(other, before)


@families
def test_a_copy_and_a_pickle_are_extended_and_restore_by_themselves(model_type: str) -> None:
    model = model_of(model_type)
    stock = stock_logits(model, LENGTH)
    extend_context(model)
    live = stock_logits(model, 2 * LENGTH)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(stock_logits(twin, 2 * LENGTH), live)
        restore_context(twin)
        assert torch.equal(stock_logits(twin, LENGTH), stock)
        assert torch.equal(stock_logits(model, 2 * LENGTH), live)


@families
def test_saved_and_loaded_it_gives_the_same_logits(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    stock = stock_logits(model, LENGTH)
    extend_context(model)
    live = stock_logits(model, 2 * LENGTH)
    if FAMILIES[model_type][3]:
        model.save_pretrained(tmp_path)
        assert not (tmp_path / RECORD).exists()
        again = type(model).from_pretrained(tmp_path).eval()
    else:
        with pytest.warns(UserWarning, match=r"cannot be expressed in config\.json"):
            model.save_pretrained(tmp_path)
        plain = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(stock_logits(plain, LENGTH), stock)
        again = ctxext.load(tmp_path)
        assert again.context_extension.method == model.context_extension.method
    assert torch.equal(stock_logits(again, 2 * LENGTH), live)
    assert torch.equal(stock_logits(model, 2 * LENGTH), live)  # saving changed nothing


@pytest.mark.slow
def test_a_saved_table_loads_where_ctxext_cannot_be_imported(tmp_path: Path) -> None:
    model = extend_context(model_of("gpt2"))
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(3, 100)[None].repeat(1, 2)
    torch.save((ids, model(ids).logits), tmp_path / "logits.pt")
    code = (
        "import sys; sys.modules['ctxext'] = None\n"
        "import torch, transformers\n"
        "ids, expected = torch.load(sys.argv[2])\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "assert torch.equal(model(ids).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model", tmp_path / "logits.pt"], check=True)


@pytest.mark.parametrize("model_type", ["gpt2", "xglm", "bloom", "mpt", "t5"])
def test_a_cache_gives_what_one_pass_gives(model_type: str) -> None:
    model = extend_context(model_of(model_type))
    ids = torch.randint(3, 100, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids[:, :20]} if model_type == "t5" else {}
    name = "decoder_input_ids" if model_type == "t5" else "input_ids"
    with torch.no_grad():
        whole = model(**inputs, **{name: ids}).logits
        cache, parts = None, []
        for part in ids.split([50, 30, 40, 1, 1, 6], dim=1):
            output = model(**inputs, **{name: part}, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom"])
def test_what_is_extended_is_described_by_its_trained_length_and_its_method(model_type: str, tmp_path: Path) -> None:
    _, _, method, portable = FAMILIES[model_type]
    model_of(model_type).save_pretrained(tmp_path / "stock")
    extend_folder(tmp_path / "stock", tmp_path / "extended", say=lambda line: None)
    config = AutoConfig.from_pretrained(tmp_path / "extended")
    if not portable:
        plan_extension(config, **read_record(tmp_path / "extended").arguments_for(config)).apply_to(config)
    description = describe_context(config)
    trained = describe_context(model_of(model_type)).trained_length
    assert (description.trained_length, description.scaling["name"]) == (trained, method)
    assert f"{method} ×4" in str(description)
    assert "already extended" in description.would_do


def test_an_extended_table_is_extended_once_more_by_compose_alone(tmp_path: Path) -> None:
    model = extend_context(model_of("gpt2"), 2)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    description = describe_context(again, 2)
    assert (description.trained_length, description.reach) == (LENGTH, 2 * LENGTH)
    assert description.scaling == {"name": "hierarchical", "factor": 2.0, "alpha": 0.4}
    with pytest.raises(ValueError, match="already extended by ctxext") as caught:
        extend_context(again, 2)
    assert "existing='compose'" in str(caught.value)
    extend_context(again, 2, existing="compose")
    assert again.context_extension.plan.summary == "hierarchical ×2: 128 → 256 tokens"
    assert again.config.ctxext["original"] == {"length": LENGTH}


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "t5"])
def test_a_folder_is_extended_as_its_model_is(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    model.save_pretrained(tmp_path / "stock")
    said: list[str] = []
    result = extend_folder(tmp_path / "stock", tmp_path / "extended", say=said.append)
    assert result.plan.summary.endswith("→ 256 tokens" if model_type == "gpt2" else "tokens")
    assert (said != []) == (model_type == "gpt2")  # weights change, so the model is loaded
    assert (tmp_path / "extended" / RECORD).exists() == (model_type == "bloom")
    loaded = ctxext.load(tmp_path / "extended") if model_type == "bloom" else type(model).from_pretrained(
        tmp_path / "extended"
    )  # fmt: skip
    extend_context(model)
    assert torch.equal(stock_logits(loaded.eval(), 2 * LENGTH), stock_logits(model, 2 * LENGTH))
    assert json.loads((tmp_path / "stock" / "config.json").read_text()).get("ctxext") is None


def test_a_config_alone_is_extended_where_it_says_it_all() -> None:
    config = model_of("t5").config
    assert extend_config(config).relative_attention_max_distance == 4 * config.relative_attention_max_distance
    with pytest.raises(ValueError, match="creates new weights, so an extended config would match no checkpoint"):
        extend_config(model_of("gpt2").config)
    with pytest.raises(ValueError, match=r"config\.json cannot express alibi_scaling"):
        extend_config(model_of("bloom").config)


@families
def test_a_config_alone_is_planned_as_its_model_is(model_type: str) -> None:
    model = model_of(model_type)
    on_paper, live = plan_extension(model.config), plan_extension(model.config, model=model)
    assert on_paper.summary == live.summary
    assert on_paper.updates == live.updates


def test_a_model_without_weights_is_refused_and_left_alone() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    with pytest.raises(ValueError, match="is on the meta device"):
        extend_context(model)
    assert "context_extension" not in model.__dict__
    assert model.config.n_positions == 1024
    model.to_empty(device="cpu")


@pytest.mark.parametrize("model_type", ["gpt2", "xglm", "bloom", "t5", "gptj"])
def test_a_cast_model_is_extended_and_restored_in_its_dtype(model_type: str) -> None:
    model = small_model(model_type, "seq2seq" if model_type == "t5" else "causal").to(torch.bfloat16)
    before = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    extend_context(model)
    assert stock_logits(model, 2 * LENGTH).isfinite().all()
    restore_context(model)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(after[name], t) and after[name].dtype == t.dtype for name, t in before.items())


def test_an_extended_model_can_be_cast_and_restored() -> None:
    model = model_of("gpt2")
    before = model.transformer.wpe.weight.detach().clone()
    extend_context(model)
    model.to(torch.bfloat16)
    restore_context(model)
    assert model.transformer.wpe.weight.dtype == torch.bfloat16
    assert torch.equal(model.transformer.wpe.weight, before.bfloat16())


def test_a_dead_patch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.patches.alibi.ScaledBias.scaled", lambda self, bias: bias)
    model = model_of("bloom")
    before = state(model)
    with pytest.raises(RuntimeError, match=r"does not do what|does not change the output"):
        extend_context(model)
    assert_same(model, before)


def test_a_table_that_a_family_does_not_save_is_recorded(tmp_path: Path) -> None:
    """Marian leaves its tables out of what it saves, and builds plain sines as it loads."""
    config = small_config("marian", "causal")
    config.is_encoder_decoder = True  # The causal kind is its decoder alone.
    torch.manual_seed(0)
    model = MarianMTModel(config).eval()
    assert not extend_context(model).context_extension.plan.is_portable
    ids = torch.randint(3, 90, (1, 2 * LENGTH), generator=torch.Generator().manual_seed(0))
    live = model(ids, decoder_input_ids=ids).logits
    with pytest.warns(UserWarning, match=r"cannot be expressed in config\.json"):
        model.save_pretrained(tmp_path)
    assert torch.equal(ctxext.load(tmp_path)(ids, decoder_input_ids=ids).logits, live)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bloom", "gpt2", "t5"])
def test_a_model_that_was_compiled_before_is_extended_and_restored(model_type: str) -> None:
    torch._dynamo.reset()
    model = model_of(model_type)
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model_type == "t5" else {})}
    with torch.no_grad():
        stock = compiled(**inputs).logits
        extend_context(model, method="row_interpolation" if model_type == "gpt2" else None)
        live = model(**inputs).logits
        assert (live - stock).abs().max() > (0 if model_type == "t5" else 1e-2)
        torch.testing.assert_close(compiled(**inputs).logits, live, atol=1e-4, rtol=1e-4)
        restore_context(model)
        torch.testing.assert_close(compiled(**inputs).logits, stock, atol=1e-4, rtol=1e-4)


def test_what_a_person_changed_in_the_model_stays() -> None:
    model = small_model("bart", "causal").train()
    for module in model.modules():
        if "dropout" in module.__dict__:
            module.dropout = 0.0
    model.lm_head = nn.Linear(64, 7)
    head = model.lm_head
    extend_context(model)
    assert model.lm_head is head
    assert {module.dropout for module in model.modules() if isinstance(module.__dict__.get("dropout"), float)} == {0.0}


def test_parts_that_hold_a_config_of_their_own_follow() -> None:
    model = model_of("t5")
    before = model.encoder.config
    assert before is not model.config
    extend_context(model)
    assert model.encoder.config.relative_attention_max_distance == model.config.relative_attention_max_distance == 512
    restore_context(model)
    assert model.encoder.config is before
    assert before.relative_attention_max_distance == 128


def test_buckets_are_composed_from_where_they_reach(tmp_path: Path) -> None:
    model = extend_context(model_of("t5"))
    first = model.context_extension.plan
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    extend_context(again, 2, existing="compose")
    assert again.config.relative_attention_max_distance == 8 * 128
    assert again.context_extension.plan.start == first.target_length


@pytest.mark.parametrize("model_type", ["pegasus", "roformer"])
def test_sines_are_not_extended_twice(model_type: str, tmp_path: Path) -> None:
    model = extend_context(small_model(model_type, "causal"))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="cannot be extended again"):
        extend_context(again, 2, existing="compose")


def test_a_live_model_is_described_as_extended() -> None:
    for model_type in ("bloom", "xglm", "xlnet", "gpt2"):
        model = extend_context(model_of(model_type))
        description = describe_context(model)
        assert description.scaling is not None, model_type
        assert description.would_do.startswith("refuse: ")


def test_a_length_that_is_a_guess_can_be_corrected() -> None:
    model = model_of("xlnet")
    extend_context(model, 2, original_max_position_embeddings=1024)
    assert model.context_extension.plan.summary == "distance_interpolation ×2: 1,024 → 2,048 tokens"


def test_a_folder_that_keeps_a_record_is_extended_anew_by_replace(tmp_path: Path) -> None:
    model_of("bloom").save_pretrained(tmp_path / "stock")
    extend_folder(tmp_path / "stock", tmp_path / "once", 2)
    with pytest.raises(ValueError, match="existing='replace'"):
        extend_folder(tmp_path / "once", tmp_path / "twice", 4)
    extend_folder(tmp_path / "once", tmp_path / "twice", 4, existing="replace")
    assert ctxext.load(tmp_path / "twice").context_extension.method.factor == 4


def test_a_wrapper_that_holds_the_old_table_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = model_of("gpt2")
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match="Extend the model before wrapping it"):
            extend_context(wrapped)
        assert model.config.n_positions == LENGTH
        extend_context(nn.parallel.DistributedDataParallel(model_of("t5")))
    finally:
        torch.distributed.destroy_process_group()


def test_a_table_of_another_length_than_the_config_says_is_refused() -> None:
    model = model_of("gpt2")
    model.config.n_positions = 2 * LENGTH
    with pytest.raises(
        ValueError, match=r"implies a position table of shape \(128, 64\).* holds one of shape \(64, 64\)"
    ):
        extend_context(model)


def test_layers_that_see_a_window_alone_keep_it_in_a_longer_mask() -> None:
    def config(length: int) -> GPTNeoConfig:
        return GPTNeoConfig(
            vocab_size=128, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=2,
            max_position_embeddings=length, window_size=16,
        )  # fmt: skip

    model, native = (AutoModelForCausalLM.from_config(config(length)).eval() for length in (64, 128))
    before = model.transformer.h[1].attn.attention.bias
    extend_context(model, 2)
    assert torch.equal(model.transformer.h[1].attn.attention.bias, native.transformer.h[1].attn.attention.bias)
    restore_context(model)
    assert torch.equal(model.transformer.h[1].attn.attention.bias, before)
