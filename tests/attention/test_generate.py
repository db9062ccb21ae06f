"""`generate` under in-attention RoPE: the same tokens with every cache and with none."""

import functools

import pytest
import torch
from families import tiny_model
from in_attention_reference import FACTOR, METHODS, SOFT, extended, padded, rows

import ctxext

# Prompts on both sides of the trained length; the second crosses it while it is continued.
PROMPTS = (90, 58, 47)
N_NEW = 12
HOW = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
}
CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 17},
}


def pinned(name: str):
    return ctxext.extend_context(tiny_model("llama", **SOFT), FACTOR, name, length=200)


MODELS = {
    **{name: functools.partial(extended, name) for name in METHODS},
    **{f"{name}, pinned": functools.partial(pinned, name) for name in ("dynamic_ntk", "dynamic_yarn")},
    "mistral": functools.partial(extended, "dynamic_ntk", "mistral", sliding_window=96),
    "gemma2": functools.partial(extended, "self_extend", "gemma2"),
}


def generated(model, **options) -> torch.Tensor:
    torch.manual_seed(3)
    batch = padded([row[:length] for row, length in zip([rows()[0]] * 3, PROMPTS)], "left")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model.generate(**given, min_new_tokens=N_NEW, max_new_tokens=N_NEW, pad_token_id=0, **options)[:, -N_NEW:]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_every_cache_gives_the_tokens_of_no_cache(name: str, how: str) -> None:
    model = MODELS[name]()
    want = generated(model, use_cache=False, **HOW[how])
    for cache in CACHES:
        if not (cache == "chunked prefill" and how != "greedy"):
            assert torch.equal(generated(model, **HOW[how], **CACHES[cache]), want), cache


def test_the_tokens_are_those_of_the_method_and_not_of_the_stock_model() -> None:
    found = [generated(MODELS[name](), **HOW["greedy"]) for name in METHODS]
    found.append(generated(tiny_model("llama", **SOFT), **HOW["greedy"]))
    assert all(not torch.equal(one, other) for index, one in enumerate(found) for other in found[:index])


@pytest.mark.parametrize("name", ["dynamic_ntk", "dca", "mistral"])
def test_guessed_tokens_that_are_taken_back_leave_no_trace(name: str) -> None:
    """Prompt lookup: several tokens are read at a time, and those that were guessed wrong are cropped."""
    model = MODELS[name]()
    prompt = torch.cat([rows()[0][:20]] * 4)[None]  # repeats itself, so that something is guessed
    given = {"input_ids": prompt, "max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**given, use_cache=False)
    assert torch.equal(model.generate(**given, prompt_lookup_num_tokens=4), want)


def test_a_conversation_goes_on_from_its_cache() -> None:
    model = extended("self_extend")
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 10, "min_new_tokens": 10}
    first = model.generate(rows()[0][None, :60], return_dict_in_generate=True, **options)
    second = torch.cat([first.sequences, rows()[1][None, :25]], dim=1)
    found = model.generate(second, past_key_values=first.past_key_values, **options)
    assert torch.equal(found, model.generate(second, use_cache=False, **options))
