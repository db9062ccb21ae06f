"""The engine's short cuts change nothing: read once, in chunks or side by side, it is what one forward pass says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import FAMILIES, LENGTH, tiny_model, token_ids
from survey.small import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.engine import Engine, KeyValues, length_dependent
from ctxext.evals.haystack import Haystack
from ctxext.evals.loading import load
from ctxext.evals.needle import Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import Place, Sample

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LENGTH,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + k / 2 for k in range(8)],
    "factor": 4.0,
}


def grid(trials: int, forks: tuple[int, ...], length: int = 150, n_answer: int = 5) -> list[list[Sample]]:
    """Random samples whose rows begin alike up to each of `forks`."""
    rows = []
    for trial in range(trials):
        base = token_ids(length, seed=trial)[0].tolist()
        row = []
        for k, fork in enumerate(forks):
            ids = base[:fork] + token_ids(length - fork, seed=1000 + 10 * trial + k)[0].tolist()
            place = Place("random", length, k / 10, trial, 0)
            row.append(Sample(place, "", "", "", ("1",), "numbers", "1", tuple(ids), length - n_answer, n_answer, True))
        rows.append(row)
    return rows


def plain(model, sample: Sample) -> tuple[list[int], torch.Tensor]:
    """Argmax and log-probabilities of the answer, from one forward pass over everything."""
    ids = torch.tensor([sample.input_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    rows = logprobs[sample.n_prompt - 1 : -1]
    return rows.argmax(-1).tolist(), rows.gather(-1, ids[0, sample.n_prompt :, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("trials", "chunk"), [(1, 4096), (3, 23)])
def test_answers_are_those_of_one_forward_pass(family: str, trials: int, chunk: int) -> None:
    """Also where the cache cannot be cropped: windows that slide (Gemma-2, gpt-oss), linear attention (Qwen3.5)."""
    model = tiny_model(family)
    rows = grid(trials, (0, 30, 31, 90, 140, 149))
    with temporarily_extended(model, 4):
        seen = dict(Engine(model, chunk=chunk).forced(rows))
        assert set(seen) == {sample for row in rows for sample in row}
        for sample, forced in seen.items():
            guess, logprobs = plain(model, sample)
            torch.testing.assert_close(forced.logprobs.double(), logprobs, atol=1e-4, rtol=1e-4)
            assert forced.guess.tolist() == guess


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_take_the_exact_path(parameters, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", rope_parameters=parameters)
    rows = grid(2, (0, 40, 100))
    assert length_dependent(model.config)

    def worst() -> float:
        model.load_state_dict(model.state_dict())
        return max(
            (f.logprobs - plain(model, s)[1]).abs().max().item() for s, f in Engine(model, chunk=40).forced(rows)
        )

    assert worst() < 1e-5
    ids = rows[0][0].input_ids
    exact = Engine(model, chunk=40).losses(ids).losses
    # The fast path would be wrong here, so the detection is what makes it right.
    monkeypatch.setattr(Engine, "whole", False)
    assert worst() > 1e-2
    assert (Engine(model, chunk=40).losses(ids).losses - exact).abs().max() > 1e-2


@pytest.fixture(scope="module")
def bundled():
    return load(MODEL)[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic_ntk", "self_extend"])
def test_late_rotation_takes_the_same_short_cuts_and_changes_nothing(bundled, method: str) -> None:
    """Across the trained length of 512: answers in chunks behind shared prefixes, back and forth, and losses."""
    rows = grid(2, (0, 300, 600), length=700)
    with temporarily_extended(bundled, 4, method):
        engine = Engine(bundled, chunk=300)
        for sample, forced in engine.forced(rows):
            torch.testing.assert_close(forced.logprobs.double(), plain(bundled, sample)[1], atol=1e-4, rtol=1e-4)
        # One trunk of 600 tokens in place, and what is left of the other branches.
        assert engine.tokens == 2 * (600 + 699 + 399 + 99)
        assert isinstance(engine._new_cache(1), KeyValues)
        ids = torch.tensor([rows[0][0].input_ids])
        with torch.no_grad():
            logits = bundled(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        torch.testing.assert_close(engine.losses(ids[0].tolist()).losses, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("method", ["dynamic_yarn", "dca"])
def test_a_pass_that_ends_early_leaves_keys_and_positions_in_step(family: str, method: str) -> None:
    """And where windows slide, branches run on copies of a cache that knows its positions."""
    model, rows = tiny_model(family), grid(1, (0, 30, 90, 140))
    with temporarily_extended(model, 4, method):
        for sample, forced in Engine(model, chunk=23).forced(rows):
            torch.testing.assert_close(forced.logprobs.double(), plain(model, sample)[1], atol=1e-4, rtol=1e-4)


def test_a_scale_of_the_whole_call_is_read_whole_and_generated_without_a_cache() -> None:
    model, rows = tiny_model("llama"), grid(2, (0, 40, 100))
    with temporarily_extended(model, 4, "transformers_dynamic"):
        engine = Engine(model, chunk=40)
        for sample, forced in engine.forced(rows):
            torch.testing.assert_close(forced.logprobs.double(), plain(model, sample)[1], atol=1e-5, rtol=1e-5)
        engine, sample, greedy = Engine(model), rows[0][0], []
        written = engine.generate(sample)
        for _ in written:
            ids = torch.tensor([[*sample.input_ids[: sample.n_prompt], *greedy]])
            greedy.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        assert written == greedy
        assert engine.tokens == sum(range(sample.n_prompt, sample.n_prompt + len(written)))


def test_what_does_not_depend_on_the_whole_length_is_not_taken_to() -> None:
    model = tiny_model("llama")
    assert not Engine(model).whole
    for method in ("pi", "yarn", "ntk", "resonance", "drope", "dynamic_ntk", "self_extend"):
        with temporarily_extended(model, 4, method):
            assert not Engine(model).whole
    # The method decides, not the scaling that it replaced.
    native = tiny_model("llama", rope_parameters=LONGROPE)
    assert Engine(native).whole
    with temporarily_extended(native, 4, "dynamic_ntk", existing="replace"):
        assert not Engine(native).whole


def test_shared_beginnings_are_read_once() -> None:
    model, forks = tiny_model("llama"), (0, 50, 100)
    engine = Engine(model)
    list(engine.forced(grid(3, forks)))
    # The last token predicts nothing; the trunk is read up to the deepest fork.
    assert engine.tokens == 3 * (100 + sum(149 - fork for fork in forks))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5"])
def test_generation_behind_a_chunked_prompt_is_stock_generation(family: str) -> None:
    model = tiny_model(family)
    for trial in range(3):
        sample = grid(trial + 1, (0,))[trial][0]
        prompt = torch.tensor([sample.input_ids[: sample.n_prompt]])
        stock = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5, pad_token_id=0
        )
        assert Engine(model, chunk=33).generate(sample) == stock[0, prompt.shape[1] :].tolist()


def test_teacher_forced_argmax_is_what_greedy_decoding_writes() -> None:
    """On answers that are greedy's own, and on answers that differ from it in one token."""
    model = tiny_model("llama")
    for trial in range(6):
        sample = grid(trial + 1, (0,))[trial][0]
        prompt = sample.input_ids[: sample.n_prompt]
        greedy = Engine(model).generate(sample)
        if len(greedy) < 5:
            continue
        for wrong in (None, 0, 3):
            answer = [token if k != wrong else (token + 1) % 128 for k, token in enumerate(greedy)]
            forced = Sample(**{**vars(sample), "input_ids": (*prompt, *answer)})
            ((_, seen),) = Engine(model).forced([[forced]])
            assert (seen.guess.tolist() == answer) == (wrong is None)


@pytest.mark.parametrize("chunk", [17, 4096])
def test_losses_are_those_of_one_forward_pass(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.evals.engine.LOGITS", 128 * 40)  # at most 40 tokens of logits at a time
    model, ids = tiny_model("llama"), token_ids(200)
    with temporarily_extended(model, 4):
        losses, top1 = Engine(model, chunk=chunk).losses(ids[0].tolist())
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(top1, logits.argmax(-1))


@pytest.mark.parametrize("extended", [False, True], ids=["stock", "extended"])
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "bloom", "mpt", "xglm", "gptj", "gemma3_text", "deepseek_v3"])
def test_the_short_cuts_are_exact_for_every_position_encoding(model_type: str, extended: bool) -> None:
    model, n_tokens = small_model(model_type, "causal"), LENGTH * (4 if extended else 1)
    rows = grid(2, (0, n_tokens // 3, n_tokens - 20), length=n_tokens)
    with temporarily_extended(model, 4) if extended else nullcontext():
        engine = Engine(model, chunk=23)
        for sample, forced in engine.forced(rows):
            guess, logprobs = plain(model, sample)
            torch.testing.assert_close(forced.logprobs.double(), logprobs, atol=1e-4, rtol=1e-4)
            assert forced.guess.tolist() == guess
        ids = torch.tensor([rows[0][0].input_ids])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        torch.testing.assert_close(engine.losses(ids[0].tolist()).losses, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("own", [
    {"no_repeat_ngram_size": 3}, {"num_beams": 4}, {"cache_implementation": "static"}, {"repetition_penalty": 5.0},
    {"prompt_lookup_num_tokens": 3}, {"return_dict_in_generate": True},
])  # fmt: skip
def test_what_a_checkpoint_prefers_for_chats_does_not_change_the_greedy_answer(own: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    prompter = Prompter(AutoTokenizer.from_pretrained(MODEL), answer_tokens=8)
    haystack = Haystack.from_text(PERSUASION.read_text(encoding="utf-8"), prompter.tokenizer)
    sample = Passkey().sample(Place("passkey", 256, 0.5, 0, 0), prompter, haystack)
    greedy = Engine(model).generate(sample)
    model.generation_config.update(**own)
    before = model.generation_config.to_dict()
    assert Engine(model).generate(sample) == greedy
    assert model.generation_config.to_dict() == before
