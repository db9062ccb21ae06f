"""An extension survives what people do next: casts, meta, copies, accelerate, PEFT, compile, training, re-saves."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import peft
import pytest
import torch
from families import LENGTH, logits, tiny_config, tiny_model, token_ids
from live import METHODS, arguments, assert_unchanged, late, rotary_of, same, snapshot, starve, text_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    ColPaliConfig,
    ColPaliForRetrieval,
)

from ctxext import extend_context, load, restore_context
from ctxext.attention import call, softmax
from ctxext.core.apply import extension_of
from ctxext.methods import Paper, RopeScaling, over_lengths, register

IDS = token_ids(150)
method_module = sys.modules[RopeScaling.__module__]  # where the registry is

# Standard, partial rotary, half-width tables with experts, nested with linear attention.
KINDS = ["llama", "gpt_neox", "gpt_oss", "qwen3_5"]
kinds = pytest.mark.parametrize("family", KINDS)
casts = pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])


def extended(family: str = "llama", method: str = "yarn", **changes: Any) -> Any:
    model = tiny_model(family, **changes)
    return extend_context(model, **arguments(method, model))


def reload(model: Any, folder: Any, **kwargs: Any) -> Any:
    """Save, and load by transformers alone: what comes back carries nothing of ctxext's."""
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()
    assert extension_of(again) is None
    return again


# ----------------------------------------------------------------------------------------- casts


@casts
@kinds
def test_a_cast_leaves_the_frequencies_float32_exact(family: str, cast: torch.dtype) -> None:
    model = extended(family)
    before = {name: getattr(rotary_of(model), name).clone() for name in ("inv_freq", "original_inv_freq")}
    model.to(cast)
    assert next(model.parameters()).dtype == cast
    for name, table in before.items():
        assert table.dtype == torch.float32
        assert same(getattr(rotary_of(model), name), table)


def test_half_and_bfloat16_methods_are_casts_too() -> None:
    model = extended()
    before = rotary_of(model).inv_freq.clone()
    for cast in (model.half, model.bfloat16, model.float):
        cast()
        assert same(rotary_of(model).inv_freq, before)


@kinds
def test_a_cast_model_equals_its_checkpoint_loaded_in_that_type(family: str, tmp_path: Any) -> None:
    model = extended(family)
    model.save_pretrained(tmp_path)
    native = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cast = model.to(torch.bfloat16)
    for name, parameter in native.named_parameters():
        cast.get_parameter(name).data = parameter.data  # a few stay float32 at load, such as routers
    assert torch.equal(logits(cast, IDS), logits(native, IDS))


@kinds
def test_restoring_a_model_cast_before_is_bitwise(family: str) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    before = snapshot(model)
    restore_context(extend_context(model))
    assert_unchanged(model, before)


# ------------------------------------------------------------------------------------------ meta


def materialise(model: Any, source: Any) -> Any:
    """Give a model on meta real storage and the weights and tables of `source`."""
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    for name, buffer in source.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if "visual" in name:  # transformers' own tables, which to_empty leaves as garbage
            model.get_submodule(owner)._buffers[leaf] = buffer.clone()
    return model


@kinds
def test_to_meta_and_back_keeps_the_logits(family: str) -> None:
    model, source = extended(family), tiny_model(family)
    before = logits(model, IDS)
    materialise(model.to("meta"), source)
    assert torch.equal(logits(model, IDS), before)
    restore_context(model)
    assert torch.equal(logits(model, IDS), logits(source, IDS))


@kinds
def test_restoring_on_meta_leaves_nothing_on_the_cpu(family: str) -> None:
    model = extended(family).to("meta")
    restore_context(model)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


@kinds
def test_a_model_extended_on_meta_is_proven_at_its_first_forward(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family)
    extend_context(model)
    assert model.context_extension.proof.consumed is None
    assert rotary_of(model).inv_freq.device.type == "meta"
    source = tiny_model(family)
    materialise(model, source)
    assert torch.equal(logits(model, IDS), logits(extended(family), IDS))
    assert model.context_extension.proof.consumed
    assert not model._forward_pre_hooks
    restore_context(model)
    assert torch.equal(logits(model, IDS), logits(source, IDS))


def test_a_dead_patch_made_on_meta_raises_at_the_first_forward_and_is_undone() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    starve(model)
    extend_context(model)
    source = tiny_model("llama")
    materialise(model, source)
    with pytest.raises(RuntimeError, match="no attention layer of LlamaForCausalLM uses its rotary embedding"):
        logits(model, IDS)
    assert extension_of(model) is None
    assert "rope_type" not in model.config.rope_parameters or model.config.rope_parameters["rope_type"] == "default"
    assert same(rotary_of(model).inv_freq, rotary_of(source).inv_freq)


def test_a_model_extended_on_meta_and_restored_there_is_stock() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    before = snapshot(model, run=False)
    restore_context(extend_context(model))
    assert_unchanged(model, before)


def test_the_deferred_proof_runs_inside_generate_and_on_copies() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    extend_context(model)
    materialise(model, tiny_model("llama"))
    twin = copy.deepcopy(model)
    model.generate(IDS[:, :5], max_new_tokens=2, do_sample=False)
    assert model.context_extension.proof.consumed
    assert twin.context_extension.proof.consumed is None
    logits(twin, IDS)
    assert twin.context_extension.proof.consumed


# ---------------------------------------------------------------------------------------- copies


@kinds
@pytest.mark.parametrize("first", ["copy", "original"])
def test_either_copy_is_restored_on_its_own(family: str, first: str) -> None:
    stock = logits(tiny_model(family), IDS)
    original = extended(family)
    before = logits(original, IDS)
    twin = copy.deepcopy(original)
    restored, kept = (twin, original) if first == "copy" else (original, twin)
    kept_before = snapshot(kept)
    restore_context(restored)
    assert torch.equal(logits(restored, IDS), stock)
    assert_unchanged(kept, kept_before)
    assert torch.equal(logits(kept, IDS), before)
    assert text_config(restored).max_position_embeddings == LENGTH
    restore_context(kept)
    assert torch.equal(logits(kept, IDS), stock)


def test_a_copy_saves_itself(tmp_path: Any) -> None:
    twin = copy.deepcopy(extended())
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    assert torch.equal(logits(reload(twin, tmp_path), IDS), logits(twin, IDS))


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("round_trip", [by_pickle, by_torch])
@kinds
def test_pickling_keeps_everything(family: str, round_trip: Any, tmp_path: Any) -> None:
    model = extended(family)
    again = round_trip(model)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert repr(again.context_extension) == repr(model.context_extension)
    before = rotary_of(again).inv_freq.clone()
    assert same(rotary_of(again.to(torch.bfloat16)).inv_freq, before)
    again.to(torch.float32).save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" in text.get("text_config", text)
    restore_context(again)
    assert torch.equal(rotary_of(again).inv_freq, rotary_of(tiny_model(family)).inv_freq)


@kinds
def test_the_state_dict_is_the_stock_models(family: str) -> None:
    stock, model = tiny_model(family, seed=1), extended(family)
    assert list(model.state_dict()) == list(stock.state_dict())
    model.load_state_dict(stock.state_dict())
    assert torch.equal(logits(model, IDS), logits(extend_context(tiny_model(family, seed=1)), IDS))


# ------------------------------------------------------------------------------------ accelerate


def device_map(model: Any) -> dict[str, str]:
    """The second layer on disk, everything else on the CPU."""
    inside = [path for path, _ in model.named_modules() if path.endswith(".layers.1")]
    above = {path.rpartition(".")[0] for path in inside} | {""}
    above |= {path[:i] for path in inside for i, letter in enumerate(path) if letter == "."}
    children = {
        f"{path}.{name}".lstrip("."): "cpu" for path in above for name, _ in model.get_submodule(path).named_children()
    }
    return {path: "disk" if path in inside else "cpu" for path in children if path not in above}


DISPATCHES = {
    "dispatch_model": lambda model, folder: accelerate.dispatch_model(
        model, {"": "cpu"}, main_device="cpu", force_hooks=True
    ),
    "disk offload": lambda model, folder: accelerate.dispatch_model(
        model, device_map(model), main_device="cpu", offload_dir=str(folder), force_hooks=True
    ),
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "cpu_offload with buffers": lambda model, folder: accelerate.cpu_offload(
        model, execution_device=torch.device("cpu"), offload_buffers=True
    ),
    "align hook": lambda model, folder: accelerate.hooks.add_hook_to_module(
        model, accelerate.hooks.AlignDevicesHook(io_same_device=True)
    ),
}
dispatches = pytest.mark.parametrize("dispatch", DISPATCHES)


@dispatches
@kinds
def test_a_dispatched_model_is_extended_and_restored(family: str, dispatch: str, tmp_path: Any) -> None:
    model, stock = tiny_model(family), logits(tiny_model(family), IDS)
    DISPATCHES[dispatch](model, tmp_path)
    hooked = hasattr(rotary_of(model), "_hf_hook")
    assert torch.equal(logits(model, IDS), stock)
    extend_context(model)
    assert model.context_extension.proof.consumed
    assert hasattr(rotary_of(model), "_hf_hook") == hooked
    assert torch.equal(logits(model, IDS), logits(extended(family), IDS))
    restore_context(model)
    assert hasattr(rotary_of(model), "_hf_hook") == hooked
    assert torch.equal(logits(model, IDS), stock)


@dispatches
@kinds
def test_an_extended_model_is_dispatched_and_restored(family: str, dispatch: str, tmp_path: Any) -> None:
    model, stock = extended(family), logits(tiny_model(family), IDS)
    before = logits(model, IDS)
    DISPATCHES[dispatch](model, tmp_path)
    assert torch.equal(logits(model, IDS), before)
    restore_context(model)
    assert torch.equal(logits(model, IDS), stock)


def test_hooks_removed_after_an_extension_leave_it_live(tmp_path: Any) -> None:
    model = tiny_model("llama")
    DISPATCHES["cpu_offload"](model, tmp_path)
    extend_context(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(logits(model, IDS), logits(extended(), IDS))


# --------------------------------------------------------------------- PEFT and the training loop


def lora(model: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def train_a_step(model: Any) -> None:
    model.train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    optimizer.step()
    model.zero_grad()
    model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3_5"])
@pytest.mark.parametrize("order", ["extend, then wrap", "wrap, then extend"])
def test_lora_is_trained_merged_and_saved(family: str, order: str, tmp_path: Any) -> None:
    model = tiny_model(family)
    if order == "extend, then wrap":
        wrapped = lora(extend_context(model))
    else:
        wrapped = lora(model)
        assert extend_context(wrapped) is wrapped
    assert torch.equal(logits(wrapped, IDS), logits(lora(extended(family)), IDS))
    train_a_step(wrapped)
    trained = logits(wrapped, IDS)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged, IDS), trained, rtol=0, atol=1e-3)
    merged.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert text.get("text_config", text)["rope_scaling"]["rope_type"] == "yarn"
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, IDS), logits(merged, IDS))
    restore_context(merged)
    assert text_config(merged).max_position_embeddings == LENGTH


def test_lora_adapter_loads_on_an_extended_base(tmp_path: Any) -> None:
    wrapped = lora(extended())
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(extended(), tmp_path).eval()
    assert torch.equal(logits(again, IDS), logits(wrapped, IDS))


def test_a_wrapped_model_is_restored_through_its_wrapper() -> None:
    wrapped = lora(tiny_model("llama"))
    before = snapshot(wrapped)
    extend_context(wrapped)
    with pytest.raises(RuntimeError, match="already extended"):
        extend_context(wrapped.base_model.model)
    restore_context(wrapped)
    assert_unchanged(wrapped, before)


@kinds
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(family: str, use_reentrant: bool) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        # gpt_oss has experts that only "eager" multiplies in float64.
        experts = {"experts_implementation": "eager"} if family == "gpt_oss" else {}
        model = extended(family, **experts).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@kinds
def test_gradients_equal_those_of_the_reloaded_checkpoint(family: str, tmp_path: Any) -> None:
    model = extended(family)
    again = type(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    for one in (model, again):
        one(input_ids=IDS, labels=IDS).loss.backward()
    theirs = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, theirs[name].grad), name


DROPOUT = {
    "llama": {"attention_dropout": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "falcon": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
}


@pytest.mark.parametrize("family", DROPOUT)
def test_the_proof_takes_no_random_numbers_and_keeps_the_mode(family: str) -> None:
    model = tiny_model(family, **DROPOUT[family]).train()
    before, state = snapshot(model, run=False), torch.get_rng_state()
    extend_context(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    restore_context(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert_unchanged(model, before)


def test_mode_changes_made_while_extended_are_kept_by_restore() -> None:
    model = extended().train()
    restore_context(model)
    assert all(module.training for module in model.modules())


def test_extending_between_two_training_steps_keeps_the_optimizer_at_work() -> None:
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        if step == 2:
            extend_context(model)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[5] < losses[2]


# --------------------------------------------------------------------------------- saved and again


@kinds
@pytest.mark.parametrize("method", METHODS)
def test_a_plain_resave_gives_the_same_model(family: str, method: str, tmp_path: Any) -> None:
    model = extended(family, method)
    model.save_pretrained(tmp_path / "ours")
    plain = type(model).from_pretrained(tmp_path / "ours").eval()
    plain.save_pretrained(tmp_path / "theirs")
    again = type(model).from_pretrained(tmp_path / "theirs").eval()
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert text_config(again).max_position_embeddings == 4 * LENGTH


@pytest.mark.parametrize("resaved", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_reloaded_checkpoint_knows_that_it_is_extended(method: str, resaved: bool, tmp_path: Any) -> None:
    model = reload(extended("llama", method), tmp_path / "ours")
    if resaved:
        model = reload(model, tmp_path / "theirs")
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"already scaled by ctxext .*'compose'.*'keep'.*'replace'"):
        extend_context(model)
    assert_unchanged(model, before)
    # From the original frequencies, which is also how a factor is lowered.
    lower = tiny_model("llama")
    extend_context(lower, **arguments(method, lower, factor=2.0))
    extend_context(model, existing="replace", **arguments(method, tiny_model("llama"), factor=2.0))
    assert torch.equal(rotary_of(model).inv_freq, rotary_of(lower).inv_freq)
    assert torch.equal(logits(model, IDS), logits(lower, IDS))
    assert text_config(model).max_position_embeddings == 2 * LENGTH
    again = reload(copy.deepcopy(model), tmp_path / "lower")  # saving turns a config's dtype into a string
    assert torch.equal(logits(again, IDS), logits(lower, IDS))
    restore_context(model)
    assert_unchanged(model, before)


def test_the_mark_is_void_once_someone_edits_rope_parameters(tmp_path: Any) -> None:
    extended("llama", "ntk").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    written["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    written["rope_theta"] = 1e6
    written["max_position_embeddings"] = 128
    path.write_text(json.dumps(written))
    model = extend_context(AutoModelForCausalLM.from_pretrained(tmp_path), method="ntk")  # no refusal: it is plain now
    assert model.config.max_position_embeddings == 512


@dataclass(frozen=True, kw_only=True)
class Halved(RopeScaling):
    """λ_i = factor / 2, as a user might write."""

    paper: ClassVar[Paper] = Paper("Notes", 2026, "https://example.org")

    def rescale_factors(self, rope: Any, length: Any = None) -> torch.Tensor:
        return over_lengths(torch.full_like(rope.inv_freq, self.factor / 2), length)


def test_a_users_checkpoint_is_read_where_the_method_is_not_registered(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(method_module, "_METHODS", dict(method_module._METHODS))
        register("halved")(Halved)
        model = extend_context(tiny_model("llama"), method="halved")
        again = reload(model, tmp_path)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    with pytest.raises(ValueError, match=r"already scaled.*'compose'.*'keep'.*'replace'"):
        extend_context(again)
    extend_context(again, 2, existing="replace")
    assert torch.equal(logits(again, IDS), logits(extend_context(tiny_model("llama"), 2), IDS))


def test_sharded_saving_passes_through(tmp_path: Any) -> None:
    model = extended()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), IDS), logits(model, IDS))


def test_the_trainer_saves_a_portable_checkpoint(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    model = extended()
    rows = [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(2)]
    options = {"max_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), **options), train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]["rope_type"] == "yarn"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(again, IDS), logits(model.eval(), IDS))


# -------------------------------------------------------------------------------- compile and DDP


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, how: str) -> Any:
    if how == "torch.compile":
        return torch.compile(model, backend="eager", fullgraph=True)
    model.compile(backend="eager", fullgraph=True)
    return model


ways = pytest.mark.parametrize("how", ["torch.compile", "model.compile"])


@pytest.mark.slow
@ways
def test_an_extended_model_compiles_in_one_graph(how: str, fresh_dynamo: Any) -> None:
    model = compiled(extended().double(), how)
    torch.testing.assert_close(logits(model, IDS), logits(extended().double(), IDS), rtol=0, atol=1e-9)
    restore_context(model)
    torch.testing.assert_close(logits(model, IDS), logits(tiny_model("llama").double(), IDS), rtol=0, atol=1e-9)


@pytest.mark.slow
@ways
@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_model_is_extended(how: str, warm: bool, fresh_dynamo: Any) -> None:
    model, stock = compiled(tiny_model("llama").double(), how), logits(tiny_model("llama").double(), IDS)
    if warm:  # its graph holds the stock frequencies already
        torch.testing.assert_close(logits(model, IDS), stock, rtol=0, atol=1e-9)
    assert extend_context(model) is model
    torch.testing.assert_close(logits(model, IDS), logits(extended().double(), IDS), rtol=0, atol=1e-9)
    restore_context(model)
    torch.testing.assert_close(logits(model, IDS), stock, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_model_extended_on_meta_compiles(fresh_dynamo: Any) -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    extend_context(model)
    materialise(model, tiny_model("llama"))
    fast = compiled(model, "torch.compile")
    torch.testing.assert_close(logits(fast, IDS), logits(extended(), IDS), rtol=0, atol=1e-5)
    logits(model, IDS)  # where the compiled pass could not look, an eager one does
    assert extension_of(fast).proof.consumed


def test_a_data_parallel_wrapper_is_seen_through(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(tiny_model("llama"))
        extend_context(model)
        assert torch.equal(logits(model, IDS), logits(extended(), IDS))
        model(input_ids=IDS, labels=IDS).loss.backward()
        restore_context(model)
        assert torch.equal(logits(model, IDS), logits(tiny_model("llama"), IDS))
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------- attention and decoding


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.usefixtures("float64")
def test_every_attention_implementation_reads_the_patch(attention: str) -> None:
    stock, expected = logits(tiny_model("llama").double(), IDS), logits(extended().double(), IDS)
    model = tiny_model("llama").double()
    with torch.compiler.set_stance("force_eager"):  # flex attention would compile itself for half a minute
        model.set_attn_implementation(attention)
        extend_context(model)
        torch.testing.assert_close(logits(model, IDS), expected, rtol=0, atol=1e-9)
        restore_context(model)
        torch.testing.assert_close(logits(model, IDS), stock, rtol=0, atol=1e-9)
    assert model.config._attn_implementation == attention


@pytest.mark.usefixtures("float64")
def test_switching_the_attention_implementation_later_keeps_the_patch() -> None:
    model = extended().double()
    expected = logits(model, IDS)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, IDS), expected, rtol=0, atol=1e-9)
    restore_context(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", [*KINDS, "gemma2", "mixtral"])
def test_generation_with_a_cache_equals_generation_without(family: str) -> None:
    model = extended(family)
    prompt = IDS[:, : LENGTH - 10]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    cached, plain = (model.generate(prompt, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.shape[1] == LENGTH + 20
    assert torch.equal(cached, plain)


def test_extending_in_the_middle_of_a_conversation_needs_no_new_process() -> None:
    model = tiny_model("llama")
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    model.generate(IDS[:, :20], **options)
    extend_context(model)
    assert torch.equal(model.generate(IDS, **options), extended().generate(IDS, **options))


def test_resized_embeddings_are_kept_by_restore() -> None:
    model = extended()
    model.resize_token_embeddings(160)
    restore_context(model)
    assert model.config.vocab_size == 160
    assert logits(model, IDS).shape[-1] == 160


def test_a_base_model_extended_alone_is_restored_through_the_whole_one() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    extend_context(model.model)
    assert torch.equal(logits(model, IDS), logits(extended(), IDS))
    with pytest.raises(RuntimeError, match="already extended"):
        extend_context(model)
    restore_context(model)
    assert_unchanged(model, before)


def test_config_edits_made_meanwhile_are_kept_by_restore() -> None:
    model = tiny_model("llama")
    with_edit = tiny_config("llama", use_cache=False).to_dict()
    extend_context(model)
    model.config.use_cache = False
    restore_context(model)
    assert model.config.use_cache is False
    assert model.config.to_dict()["rope_parameters"] == with_edit["rope_parameters"]


# --------------------------------------------------------------------------------- in-attention RoPE

rotating = pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])


def rotated(method: str, family: str = "llama") -> Any:
    return extend_context(tiny_model(family), method=method)


@rotating
def test_late_restoring_a_model_cast_before_or_after(method: str) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    before = snapshot(model)
    restore_context(extend_context(model, method=method))
    assert_unchanged(model, before)
    model = rotated(method).to(torch.bfloat16)
    assert torch.equal(logits(model.float(), IDS), logits(extend_context(tiny_rounded(), method=method), IDS))


def tiny_rounded() -> Any:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


@rotating
def test_late_to_meta_and_back_keeps_the_logits(method: str) -> None:
    model, source = rotated(method), tiny_model("llama")
    before = logits(model, IDS)
    materialise(model.to("meta"), source)
    assert torch.equal(logits(model, IDS), before)
    model.to("meta")
    restore_context(model)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


@rotating
@pytest.mark.parametrize("first", ["copy", "original"])
def test_late_either_copy_is_restored_on_its_own(method: str, first: str) -> None:
    stock, original = logits(tiny_model("llama"), IDS), rotated(method)
    twin = copy.deepcopy(original)
    restored, kept = (twin, original) if first == "copy" else (original, twin)
    before = snapshot(kept)
    restore_context(restored)
    assert torch.equal(logits(restored, IDS), stock)
    assert_unchanged(kept, before)
    assert torch.equal(logits(kept, IDS), logits(rotated(method), IDS))
    restore_context(kept)
    assert torch.equal(logits(kept, IDS), stock)


@pytest.mark.parametrize("round_trip", [by_pickle, by_torch])
@rotating
def test_late_pickling_keeps_everything(method: str, round_trip: Any, tmp_path: Any) -> None:
    model = rotated(method)
    again = round_trip(model)
    assert torch.equal(logits(again, IDS), logits(model, IDS))
    assert repr(again.context_extension) == repr(model.context_extension)
    with pytest.warns(UserWarning, match="saved without it"):
        again.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), IDS), logits(model, IDS))
    restore_context(again)
    assert torch.equal(logits(again, IDS), logits(tiny_model("llama"), IDS))


def test_late_a_copy_goes_on_with_a_copied_cache() -> None:
    for method in ("dynamic_ntk", "self_extend"):
        model, ids = rotated(method).double(), IDS[:, :120]
        with torch.no_grad():
            cache = model(input_ids=ids[:, :100], use_cache=True).past_key_values
        for twin, kept in ((copy.deepcopy(model), copy.deepcopy(cache)), by_pickle((model, cache))):
            found = logits(twin, ids[:, 100:], past_key_values=kept)
            torch.testing.assert_close(found, logits(model, ids)[:, 100:], rtol=0, atol=1e-9)


@rotating
def test_late_the_state_dict_is_the_stock_models(method: str) -> None:
    stock, model = tiny_model("llama", seed=1), rotated(method)
    assert list(model.state_dict()) == list(stock.state_dict())
    model.load_state_dict(stock.state_dict())
    assert torch.equal(logits(model, IDS), logits(extend_context(tiny_model("llama", seed=1), method=method), IDS))


@dispatches
@rotating
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_late_a_dispatched_model_is_extended_and_restored(
    family: str, method: str, dispatch: str, tmp_path: Any
) -> None:
    model, stock = tiny_model(family), logits(tiny_model(family), IDS)
    DISPATCHES[dispatch](model, tmp_path)
    extend_context(model, method=method)
    assert torch.equal(logits(model, IDS), logits(rotated(method, family), IDS))
    restore_context(model)
    assert torch.equal(logits(model, IDS), stock)
    model = rotated(method, family)
    DISPATCHES[dispatch](model, tmp_path)
    assert torch.equal(logits(model, IDS), logits(rotated(method, family), IDS))
    restore_context(model)
    assert torch.equal(logits(model, IDS), stock)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope", "self_extend", "dca"])
def test_late_every_operation_is_on_one_of_two_devices(method: str, padded: bool, monkeypatch: Any) -> None:
    """Tensors without values know their device, so no second one is needed, and an operation on both raises."""
    model, devices = tiny_model("llama"), [torch.device("cpu"), torch.device("lazy:0")]
    extend_context(model, method=late(method, model))
    # What depends on values: tiles, the runs of queries on one rung, and the keys whose rotation changes.
    monkeypatch.setattr(softmax.Softmax, "fused", lambda *_: False)
    monkeypatch.setattr(call, "_runs", lambda rungs: [(0, 70), (70, rungs.shape[1])])
    monkeypatch.setattr(
        call, "_moved", lambda before, state, rotated, sign: (slice(rotated), slice(len(state[0])), False)
    )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for path, module in model.named_modules():
            device = devices[".layers.1" in path]
            for held in (module._parameters, module._buffers):
                tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
                held.update({name: mode.from_tensor(each.detach()).to(device) for name, each in tensors.items()})
        parts = zip([*model.model.layers, model.model.norm], [*devices, devices[0]])
        for module, device in parts:  # as accelerate moves what a module is given
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(execution_device=device))
        ids, mask = torch.zeros(2, 150, dtype=torch.long), torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
        output = model(input_ids=ids, attention_mask=mask if padded else None, use_cache=True)
        assert output.logits.device == devices[0]
        output = model(input_ids=ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
        for layer, device in zip(output.past_key_values.layers, devices):
            assert layer.keys.device == layer.key_positions.device == device


@rotating
@pytest.mark.parametrize("order", ["extend, then wrap", "wrap, then extend"])
def test_late_lora_is_trained_merged_and_saved(method: str, order: str, tmp_path: Any) -> None:
    model = tiny_model("llama")
    if order == "extend, then wrap":
        wrapped = lora(extend_context(model, method=method))
    else:
        wrapped = lora(model)
        assert extend_context(wrapped, method=method) is wrapped
    assert torch.equal(logits(wrapped, IDS), logits(lora(rotated(method)), IDS))
    train_a_step(wrapped)
    trained = logits(wrapped, IDS)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged, IDS), trained, rtol=0, atol=1e-3)
    with pytest.warns(UserWarning, match="saved without it"):
        merged.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), IDS), logits(merged, IDS))
    restore_context(merged)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(plain, IDS), logits(merged, IDS))


@rotating
def test_late_a_wrapped_model_is_restored_through_its_wrapper(method: str) -> None:
    wrapped = lora(tiny_model("llama"))
    before = snapshot(wrapped)
    extend_context(wrapped, method=method)
    with pytest.raises(RuntimeError, match="already extended"):
        extend_context(wrapped.base_model.model)
    restore_context(wrapped)
    assert_unchanged(wrapped, before)


@rotating
def test_late_a_base_model_extended_alone_is_restored_through_the_whole_one(method: str) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    extend_context(model.model, method=method)
    assert torch.equal(logits(model, IDS), logits(rotated(method), IDS))
    restore_context(model)
    assert_unchanged(model, before)


@rotating
@pytest.mark.parametrize("family", sorted(DROPOUT.keys() - {"falcon"}))
def test_late_the_proof_takes_no_random_numbers_and_keeps_the_mode(family: str, method: str) -> None:
    model = tiny_model(family, **DROPOUT[family]).train()
    before, state = snapshot(model, run=False), torch.get_rng_state()
    extend_context(model, method=method)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    restore_context(model)
    assert_unchanged(model, before)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "how"), [("dynamic_ntk", "torch.compile"), ("self_extend", "model.compile")])
def test_late_a_model_compiles_in_one_graph(method: str, how: str, fresh_dynamo: Any) -> None:
    # Each rung of the ladder is traced, so there are few.
    options: dict[str, Any] = {"dynamic_ntk": {"ratio": 4.0}, "self_extend": {}}[method]
    stock = logits(tiny_model("llama").double(), IDS)
    expected = logits(extend_context(tiny_model("llama").double(), method=method, **options), IDS)
    model = compiled(tiny_model("llama").double(), how)
    torch.testing.assert_close(logits(model, IDS, use_cache=False), stock, rtol=0, atol=1e-9)
    assert extend_context(model, method=method, **options) is model
    torch.testing.assert_close(logits(model, IDS, use_cache=False), expected, rtol=0, atol=1e-9)
    restore_context(model)
    torch.testing.assert_close(logits(model, IDS, use_cache=False), stock, rtol=0, atol=1e-9)


@rotating
def test_late_a_data_parallel_wrapper_is_seen_through(method: str, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(tiny_model("llama"))
        extend_context(model, method=method)
        assert torch.equal(logits(model, IDS), logits(rotated(method), IDS))
        model(input_ids=IDS, labels=IDS).loss.backward()
        restore_context(model)
        assert torch.equal(logits(model, IDS), logits(tiny_model("llama"), IDS))
    finally:
        torch.distributed.destroy_process_group()


@rotating
@pytest.mark.usefixtures("float64")
def test_late_rotation_over_eager_attention_is_the_same_and_shows_its_weights(method: str) -> None:
    model = tiny_model("llama").double()
    model.set_attn_implementation("eager")
    extend_context(model, method=method)
    torch.testing.assert_close(logits(model, IDS), logits(rotated(method).double(), IDS), rtol=0, atol=1e-9)
    restore_context(model)
    assert model.config._attn_implementation == "eager"


def test_late_edits_made_meanwhile_are_kept_by_restore() -> None:
    model = rotated("self_extend")
    model.resize_token_embeddings(160)
    model.config.use_cache = False
    assert logits(model, IDS).shape[-1] == 160
    model.train()
    restore_context(model)
    assert (model.config.vocab_size, model.config.use_cache) == (160, False)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())


@rotating
def test_late_the_trainer_saves_what_load_brings_back(method: str, tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    model = rotated(method)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(2)]
    options = {"max_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), **options), train_dataset=rows)
    trainer.train()
    with pytest.warns(UserWarning, match="saved without it"):
        trainer.save_model(str(tmp_path / "out"))
    assert torch.equal(logits(load(tmp_path / "out"), IDS), logits(model.eval(), IDS))


# ---------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_never_touched(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has no wheel for this platform")
    from transformers import BitsAndBytesConfig

    tiny_model("llama", intermediate_size=128).save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, device_map="cpu").eval()
    ids = token_ids(150)
    before = logits(model, ids)
    weights = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    extend_context(model)
    assert (logits(model, ids) - before).abs().max() > 1
    for name, p in model.named_parameters():
        assert p.data_ptr() == weights[name][0]
        assert torch.equal(p, weights[name][1])
    restore_context(model)
    assert torch.equal(logits(model, ids), before)


def test_a_text_config_nested_twice_is_saved_extended(tmp_path: Path) -> None:
    text = {"model_type": "gemma", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": LENGTH, "pad_token_id": 0}  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 64}  # fmt: skip
    whole = {"model_type": "paligemma", "text_config": text, "vision_config": vision, "image_token_index": 250,
             "projection_dim": 64, "hidden_size": 64}  # fmt: skip
    model = ColPaliForRetrieval(ColPaliConfig(vlm_config=whole, embedding_dim=16)).eval()
    extend_context(model, 4)
    assert model.config.vlm_config.text_config.max_position_embeddings == 4 * LENGTH
    model.save_pretrained(tmp_path)
    again = ColPaliConfig.from_pretrained(tmp_path).vlm_config.text_config
    assert (again.max_position_embeddings, again.rope_parameters["rope_type"]) == (4 * LENGTH, "yarn")
    restore_context(model)
    assert model.config.vlm_config.text_config.max_position_embeddings == LENGTH


def test_longrope_without_a_factor_of_its_own_is_kept_as_it_was(tmp_path: Path) -> None:
    """transformers takes the attention factor from the two lengths, of which keeping raises one."""
    lists = {name: [2.0] * 8 for name in ("short_factor", "long_factor")}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **lists}
    model = tiny_model("phi3", rope_parameters=parameters, original_max_position_embeddings=LENGTH // 2)
    extend_context(model, 2, existing="keep")
    live = logits(model, token_ids(LENGTH))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, token_ids(LENGTH)), live)


def test_parts_of_a_flat_config_stay_those_of_their_modules() -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}  # fmt: skip
    vq = {"embed_dim": 16, "num_embeddings": 16, "latent_channels": 16, "base_channels": 32,
          "channel_multiplier": [1], "num_res_blocks": 1, "resolution": 32}  # fmt: skip
    names = {"<image>": 5, "IMGIMGA Z": 6}
    model = ChameleonForConditionalGeneration(ChameleonConfig(**sizes, vq_config=vq, vocabulary_map=names)).eval()
    for change in (lambda: extend_context(model, 4), lambda: restore_context(model)):
        change()
        assert model.config.vq_config is model.model.vqmodel.config
