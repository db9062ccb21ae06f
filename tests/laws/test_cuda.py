"""Every law with a device in it, small on a CPU and larger on CUDA (`-m gpu`), where kernels, dtypes and graphs differ.

Each test has the same body on both. In bfloat16 the bar is what bfloat16 costs a natively configured model.
"""

from __future__ import annotations

import copy
import functools
import shutil
import warnings
from typing import Any

import pytest
import torch
from devices import LARGE, ON_CUDA, SMALL, Form, every_form, in_chunks, kernel, logits, off
from families import from_config
from in_attention_reference import LATE, assert_rows, rows, soft_model, truth
from live import rotary_of
from torch import Tensor, nn
from transformers import StaticCache

import ctxext
from ctxext import extend_context, restore_context
from ctxext.core.apply import extension_of
from ctxext.training.loss import linear_cross_entropy, restore_loss, use_chunked_loss

IN_ATTENTION = ("dynamic_ntk", "dynamic_yarn", "self_extend", "rerope", "dca")
METHODS = ("yarn", *IN_ATTENTION)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
FLOAT32_BAR = 1e-4  # float32 phases at some thousand tokens; a dead patch is above 0.1


@functools.cache
def noise(device: str) -> float:
    """How far the natively configured model in bfloat16 is `off` itself in float32."""
    form = SMALL if device == "cpu" else LARGE
    return off(*(logits(native(form, dtype), form.ids()) for dtype in (torch.bfloat16, torch.float32)))


def assert_close(found: Tensor, wanted: Tensor, form: Form, dtype: torch.dtype) -> None:
    """Within float32's bar; in 16 bits, within twice what 16 bits cost the natively configured model."""
    assert found.device.type == wanted.device.type
    assert off(found, wanted) <= (FLOAT32_BAR if dtype == torch.float32 else 2 * noise(form.device))


# ------------------------------------------------------------------ laws 5 and 11: live, and in float32


def native(form: Form, dtype: torch.dtype) -> Any:
    """transformers' own YaRN, configured by hand and loaded in `dtype`."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": form.trained, "rope_theta": 10000.0}
    stock = form.model()
    config = copy.deepcopy(stock.config)
    config.rope_parameters, config.max_position_embeddings = yarn, 4 * form.trained
    made = from_config(config, dtype=dtype)
    made.load_state_dict(stock.state_dict())
    return made.to(form.device)


# The kernels that sdpa may choose, each with the dtypes that it has.
KERNELS = [
    *(pytest.param(SMALL, dtype, name, id=f"cpu-{dtype}-{name}") for dtype in DTYPES for name in ("flash", "math")),
    *(
        pytest.param(LARGE, dtype, name, id=f"cuda-{dtype}-{name}", marks=ON_CUDA)
        for dtype in DTYPES
        for name in ("flash", "efficient", "math")
        if (dtype, name) != ("float32", "flash")
    ),
]


@pytest.mark.parametrize(("form", "dtype", "name"), KERNELS)
def test_a_static_method_is_the_natively_configured_model_under_every_kernel(form: Form, dtype: str, name: str) -> None:
    model, ids = extend_context(form.model(DTYPES[dtype]), 4, "yarn"), form.ids()
    with kernel(name):
        found, wanted = logits(model, ids), logits(native(form, DTYPES[dtype]), ids)
        stock = logits(form.model(DTYPES[dtype]), ids)
    assert torch.equal(found, wanted)
    assert off(stock, wanted) > 0.1


@every_form
@every_method
def test_a_model_cast_to_bfloat16_has_the_frequencies_of_float32(form: Form, method: str) -> None:
    half, whole = (extend_context(form.model(dtype), 4, method) for dtype in (torch.bfloat16, torch.float32))
    for name, buffer in rotary_of(whole).named_buffers():
        found = rotary_of(half).get_buffer(name)
        assert found.device.type == form.device
        assert found.dtype == buffer.dtype
        assert torch.equal(found, buffer), name


@every_form
@pytest.mark.parametrize("name", LATE)
@torch.no_grad()
def test_in_attention_rope_is_the_slow_truth(form: Form, name: str) -> None:
    """In float64, of every pair of tokens by its method's own formula; the truth is computed on the CPU."""
    model = soft_model("llama").to(form.device)
    arguments, _ = LATE[name]
    extend_context(model, **arguments(rotary_of(model).inv_freq.numel()))
    ids = rows()[0][None].to(form.device)
    assert_rows(logits(model, ids).cpu(), truth(name)[:1])
    assert_rows(in_chunks(model, ids, [70, 1, 1, 108]).cpu(), truth(name)[:1])


@every_form
@every_dtype
@every_method
def test_a_device_gives_what_the_cpu_gives(form: Form, dtype: torch.dtype, method: str) -> None:
    ids = form.ids()
    found, wanted = (
        logits(extend_context(form.model(dtype).to(place), 4, method), ids.to(place)).cpu()
        for place in (form.device, "cpu")
    )
    assert_close(found, wanted, form, dtype)


# -------------------------------------------------- laws 9 and 10: one computation, and rows by themselves


@every_form
@every_dtype
@every_method
def test_chunks_and_single_tokens_are_one_pass(form: Form, dtype: torch.dtype, method: str) -> None:
    """Single tokens across the trained length and across a rung."""
    ids, edge = form.ids(), form.trained
    chunks = [edge - 3, *[1] * 6, edge // 5, *[1] * 6]
    chunks.append(form.n_tokens - sum(chunks))
    model = extend_context(form.model(dtype), 4, method)
    assert_close(in_chunks(model, ids, chunks), logits(model, ids), form, dtype)


@every_form
@every_dtype
@every_method
def test_a_row_does_not_depend_on_its_batch(form: Form, dtype: torch.dtype, method: str) -> None:
    ids, short = form.ids(batch=3), form.trained + form.trained // 4
    mask = torch.ones_like(ids)
    mask[1, : form.n_tokens - short] = 0  # padded on the left
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model = extend_context(form.model(dtype), 4, method)
    batch = logits(model, ids, attention_mask=mask, position_ids=positions)[1, -short:]
    assert_close(batch, logits(model, ids[1:2, -short:])[0], form, dtype)


# ------------------------------------------------------------------------ laws 6 and 7: undone, and moved


@every_form
@every_dtype
@every_method
def test_restoring_is_bitwise_on_the_device(form: Form, dtype: torch.dtype, method: str) -> None:
    model, other, ids = form.model(dtype), form.model(dtype), form.ids()
    before, buffers = logits(model, ids), {name: buffer.clone() for name, buffer in model.named_buffers()}
    extend_context(model, 4, method)
    assert torch.equal(logits(other, ids), before)  # a second model is untouched
    assert not torch.equal(logits(model, ids), before)
    restore_context(model)
    assert torch.equal(logits(model, ids), before)
    for name, buffer in model.named_buffers():
        assert buffer.device.type == form.device
        assert torch.equal(buffer, buffers[name]), name


@every_form
@every_method
def test_an_extended_model_moves_between_devices(form: Form, method: str) -> None:
    """Extended on the CPU and moved there and back; the same logits as extended on the device."""
    ids = form.ids()
    there = logits(extend_context(form.model(), 4, method), ids)
    model = extend_context(form.model().to("cpu"), 4, method)
    first = logits(model, ids.cpu())
    assert torch.equal(logits(model.to(form.device), ids), there)
    assert torch.equal(logits(model.to("cpu"), ids.cpu()), first)
    assert extension_of(model) is not None


@every_form
@every_dtype
@every_method
def test_a_saved_model_loads_onto_its_device(form: Form, dtype: torch.dtype, method: str, tmp_path: Any) -> None:
    """`device_map="auto"`, as people load a model that may not fit on one GPU."""
    pytest.importorskip("accelerate.hooks")  # recipes/accelerate passes for a package of that name
    model = extend_context(form.model(dtype), 4, method)
    with warnings.catch_warnings():  # of what config.json cannot express
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
    loaded = ctxext.load(str(tmp_path), dtype=dtype, device_map="auto")
    assert {parameter.device.type for parameter in loaded.parameters()} == {form.device}
    assert torch.equal(logits(loaded, form.ids()), logits(model, form.ids()))


@every_form
@every_method
def test_a_model_spread_over_a_device_and_the_cpu_is_extended_and_restored(
    form: Form, method: str, tmp_path: Any
) -> None:
    """The last layer is held on the CPU and moved to the device for every pass, by accelerate's hooks."""
    accelerate = pytest.importorskip("accelerate.big_modeling")
    last = form.model().config.num_hidden_layers - 1
    inside = [name for name, _ in form.model().model.named_children() if name != "layers"]
    spread = {f"model.layers.{index}": form.device for index in range(last)}
    spread |= {f"model.{name}": form.device for name in inside} | {"lm_head": form.device}
    spread |= {f"model.layers.{last}": "disk" if form.device == "cpu" else "cpu"}
    model = form.model().to("cpu")
    accelerate.dispatch_model(model, spread, main_device=form.device, offload_dir=str(tmp_path), force_hooks=True)
    stock, ids = logits(model, form.ids()), form.ids()
    extend_context(model, 4, method)
    found = logits(model, ids)
    assert off(found, logits(extend_context(form.model(), 4, method), ids).to(found.device)) <= FLOAT32_BAR
    restore_context(model)
    assert torch.equal(logits(model, ids), stock)


@every_form
@every_method
def test_a_model_that_runs_on_two_devices_is_extended_and_restored(form: Form, method: str) -> None:
    """The last layer runs on the CPU, as the layers of `device_map="auto"` run on several GPUs."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = form.model(), form.ids()
    last, above = model.model.layers[-1].to("cpu"), model.model.norm
    for module, device in ((last, "cpu"), (above, form.device)):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=device))
    stock = logits(model, ids)
    extend_context(model, 4, method)
    whole = logits(extend_context(form.model(), 4, method), ids)
    assert off(logits(model, ids), whole) <= FLOAT32_BAR
    n = form.trained
    assert off(in_chunks(model, ids, [n, 1, 1, ids.shape[1] - n - 2]), whole) <= FLOAT32_BAR
    restore_context(model)
    assert torch.equal(logits(model, ids), stock)


# --------------------------------------------------------------------- compiled, and with CUDA graphs


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# The compiler's own products are slow to make on a CPU, where tests/attention/test_compiled.py traces the same graphs.
COMPILED = [pytest.param(SMALL, id="cpu", marks=pytest.mark.slow), pytest.param(LARGE, id="cuda", marks=ON_CUDA)]


def needs_a_compiler(form: Form) -> None:
    if form.device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend", "dca"])
def test_a_pass_compiled_by_the_default_backend_is_the_eager_one(form: Form, method: str) -> None:
    needs_a_compiler(form)
    model, ids = extend_context(form.model(), 4, method), form.ids()
    assert off(logits(torch.compile(model, fullgraph=True), ids), logits(model, ids)) <= FLOAT32_BAR


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "self_extend", "dca"])
@torch.no_grad()
def test_a_decoding_step_over_a_static_cache_is_the_eager_one(form: Form, method: str) -> None:
    """With mode="reduce-overhead", which records CUDA graphs where there is a GPU, across the trained length."""
    needs_a_compiler(form)
    model, ids, start = extend_context(form.model(), 4, method), form.ids(), form.trained - 3
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=form.n_tokens)
    model(input_ids=ids[:, :start], past_key_values=cache)
    found = []
    for at in range(start, start + 6):
        torch.compiler.cudagraph_mark_step_begin()
        found.append(step(input_ids=ids[:, at : at + 1], past_key_values=cache).logits.clone())
    assert off(torch.cat(found, dim=1), logits(model, ids[:, : start + 6])[:, start:]) <= FLOAT32_BAR


@every_form
@every_method
def test_generate_gives_the_same_tokens_with_every_cache(form: Form, method: str) -> None:
    model, prompt = extend_context(form.model(), 4, method), form.ids(n_tokens=form.trained - 4)
    options = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}
    want = model.generate(prompt, use_cache=False, **options)
    caches = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "chunked prefill": {"prefill_chunk_size": 17},
    }
    for cache, given in caches.items():
        assert torch.equal(model.generate(prompt, **given, **options), want), cache


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("form", COMPILED[1:])
@every_method
def test_generate_with_a_compiled_static_cache_gives_the_same_tokens(form: Form, method: str) -> None:
    """As `generate` compiles by itself, which it does on a GPU alone."""
    model, prompt = extend_context(form.model(), 4, method), form.ids(n_tokens=form.trained - 4)
    options = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}
    want = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, cache_implementation="static", **options), want)


# ------------------------------------------------------------------------------------------ training


# In 16 bits the stock loss rounds the gradient of its logits, and a GPU sums some gradients in any order.
GRADIENT_BAR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def gradients(model: Any, ids: Tensor) -> Tensor:
    model.train().zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@every_form
@every_dtype
@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn", "self_extend"])
def test_recomputed_layers_have_the_same_gradients(form: Form, dtype: torch.dtype, method: str) -> None:
    model, ids = extend_context(form.model(dtype), 4, method), form.ids()
    wanted = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert off(gradients(model, ids), wanted) <= GRADIENT_BAR[dtype]


@every_form
@every_dtype
def test_the_chunked_loss_has_the_gradients_of_the_stock_loss(form: Form, dtype: torch.dtype) -> None:
    model, ids = extend_context(form.model(dtype), 4, "yarn"), form.ids()
    wanted = gradients(model, ids)
    use_chunked_loss(model)
    found = gradients(model, ids)
    restore_loss(model)
    assert off(found, wanted) <= GRADIENT_BAR[dtype]


@every_form
def test_the_chunked_loss_is_float64s_in_many_chunks(form: Form) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(form.device) for n in (300, 500))
    targets = torch.randint(500, (300,), generator=generator).to(form.device)
    wanted = nn.functional.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="sum")
    found = linear_cross_entropy(hidden, weight, targets, chunk=17)
    assert found.device.type == form.device
    assert abs(float(found / wanted) - 1) < 1e-5
