"""Passkey prompts: exact in tokens, a function of their place and seed, scored as greedy decoding would."""

from __future__ import annotations

from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.passkey import passkey_hits, passkey_sample


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def haystack(tokenizer) -> Haystack:
    return Haystack.from_file(PERSUASION, tokenizer)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.mark.parametrize("length", [64, 129, 512, 2048])
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_prompts_are_exact_in_tokens(tokenizer, haystack: Haystack, length: int, depth: float) -> None:
    sample = passkey_sample(tokenizer, haystack, length, depth, Random(0))
    assert len(sample.input_ids) == length
    assert sample.input_ids[0] == tokenizer.bos_token_id
    key = sample.input_ids[sample.answer]
    assert sample.input_ids[sample.first_mention] == sample.input_ids[sample.second_mention] == key
    assert len(tokenizer.decode(key).strip()) == 5


def test_the_needle_stands_between_sentences_at_its_depth(tokenizer, haystack: Haystack) -> None:
    for depth in (0.1, 0.5, 0.9):
        sample = passkey_sample(tokenizer, haystack, 2048, depth, Random(1))
        before, _ = tokenizer.decode(sample.input_ids).split(" The pass key is", 1)
        assert before.rstrip("\"'”’)").endswith((".", "!", "?"))
        assert sample.first_mention.start / 2048 == pytest.approx(depth, abs=0.06)


def test_a_prompt_that_cannot_fit_is_refused(tokenizer, haystack: Haystack) -> None:
    with pytest.raises(ValueError, match="at least"):
        passkey_sample(tokenizer, haystack, 20, 0.5, Random(0))
    with pytest.raises(ValueError, match="longer text"):
        passkey_sample(tokenizer, haystack, len(haystack.ids) + 100, 0.5, Random(0))


def test_samples_depend_on_their_place_and_seed_alone(model, tokenizer, haystack: Haystack) -> None:
    arguments = (model, tokenizer, haystack, 128)
    one = list(passkey_hits(*arguments, [0.5], 4, batch_size=1))
    many = [hit for hit in passkey_hits(*arguments, [0.0, 0.5], 4, batch_size=8) if hit[0] == 0.5]
    assert one == many


def test_a_hit_is_what_greedy_decoding_answers(model, tokenizer, haystack: Haystack) -> None:
    """At twice the trained length, where some prompts are answered and some are not."""
    length, trials = 1024, 6
    hits = [hit for *_, hit in passkey_hits(model, tokenizer, haystack, length, [0.0, 1.0], trials, seed=3)]
    answers = []
    for depth in (0.0, 1.0):
        for trial in range(trials):
            rng = Random(f"passkey/3/{length}/{depth}/{trial}")
            sample = passkey_sample(tokenizer, haystack, length, depth, rng)
            prompt = torch.tensor([sample.input_ids[: sample.answer.start]])
            n = sample.answer.stop - sample.answer.start
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n, do_sample=False
            )
            answers.append(out[0, sample.answer.start :].tolist() == sample.input_ids[sample.answer])
    assert hits == answers
    assert any(hits)
    assert not all(hits)
