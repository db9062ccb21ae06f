"""A score is that of the greedy answer, however it was found: by teacher forcing or by generation."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext import temporarily_extended
from ctxext.assets import MODEL, PERSUASION
from ctxext.evals.haystack import Haystack
from ctxext.evals.needle import Needles, Passkey
from ctxext.evals.prompts import Prompter
from ctxext.evals.samples import make_task
from ctxext.evals.targets import LiveModel

ROOT = Path(__file__).parents[2]
CHAT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}{{ '<s>assistant\n' }}"
TEXTS = {
    "novel": [PERSUASION],
    "essay": [ROOT / "docs/log.md"],
    "manual": [ROOT / "docs/engine_evidence.md", ROOT / "docs/in_attention.md", ROOT / "CONTRIBUTING.md"],
    "code": sorted((ROOT / "ctxext/evals").glob("*.py")),
}


@cache
def tokenizer(style: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = CHAT if style == "chat" else None
    return tokenizer


@cache
def haystack(kind: str, style: str) -> Haystack:
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in TEXTS[kind])
    return Haystack.from_text(text[:25_000], tokenizer(style), name=kind)


@cache
def model_of(kind: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    if kind == "random":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model.config).eval()
    return model


def rows_of(task: Any, kind: str, style: str, length: int) -> list[Any]:
    """Two trials, each at two depths."""
    prompter, text = Prompter(tokenizer(style)), haystack(kind, style)
    places = task.places([length], (0.2, 0.8), 2, 0)
    samples = [task.sample(place, prompter, text) for place in places]
    return [samples[:2], samples[2:]]


EXTENSIONS = {
    "as it is": None,
    "well extended": {"method": "yarn", "factor": 4},
    "badly extended": {"method": "pi", "factor": 8},
    "by the length of the call": {"method": "transformers_dynamic", "factor": 4},
    "random": None,
}


@pytest.mark.parametrize(
    ("style", "extension"),
    [
        ("base", "as it is"),
        pytest.param("chat", "badly extended", marks=pytest.mark.slow),
        *(pytest.param("base", extension, marks=pytest.mark.slow) for extension in [*EXTENSIONS][1:]),
        pytest.param("chat", "as it is", marks=pytest.mark.slow),
    ],
)
def test_a_forced_score_is_that_of_the_generated_answer(style: str, extension: str) -> None:
    model, how = model_of("random" if extension == "random" else "bundled"), EXTENSIONS[extension]
    target = LiveModel(model, Prompter(tokenizer(style)), "model")
    # Trials of one length run side by side.
    batches = [rows_of(Passkey(), kind, style, 200) for kind in TEXTS]
    if extension != "by the length of the call":
        batches += [rows_of(Passkey(), "novel", style, 600), rows_of(Needles(), "code", style, 400)]
    with nullcontext() if how is None else temporarily_extended(model, **how):
        forced, generated = (
            [
                (sample.place, record["score"], record["digits"], record["got"])
                for outcomes in target.outcomes(batches, generate)
                for sample, record in outcomes
            ]
            for generate in (False, True)
        )
    assert sorted(forced, key=repr) == sorted(generated, key=repr)
    assert len(forced) == 4 * len(batches)


def test_a_model_that_would_begin_a_sentence_instead_of_the_number_is_scored_by_what_it_writes() -> None:
    """It never writes a space of its own: what it says behind one counts only where the prompt ends with one."""
    prompter, model = Prompter(tokenizer("base")), copy.deepcopy(model_of("bundled"))
    head = model.lm_head.weight.detach().clone()
    head[prompter.encode("is ")[-1]] = 0.0
    model.lm_head.weight = torch.nn.Parameter(head)
    target, rows = LiveModel(model, prompter, "model"), rows_of(Passkey(), "novel", "base", 200)
    forced, generated = (
        {sample.place: record["score"] for part in target.outcomes([rows], generate) for sample, record in part}
        for generate in (False, True)
    )
    assert forced == generated


def test_models_that_answer_well_and_badly_are_told_apart() -> None:
    """So that the law above compares right answers with right ones, and wrong ones with wrong ones."""
    shares = {}
    for kind in ("bundled", "random"):
        target = LiveModel(model_of(kind), Prompter(tokenizer("base")), "model")
        outcomes = [one for part in target.outcomes([rows_of(Passkey(), "novel", "base", 256)], False) for one in part]
        shares[kind] = sum(record["score"] for _, record in outcomes) / len(outcomes)
    assert shares == {"bundled": 1.0, "random": 0.0}


@pytest.mark.parametrize("name", ["passkey", "needle", "needles", "niah_single_1", "niah_single_3"])
def test_a_lead_ends_where_the_first_token_of_the_answer_begins(name: str) -> None:
    task, prompter = make_task(name), Prompter(tokenizer("base"))
    (place,) = task.places([700], (0.5,), 1, 0)
    sample = task.sample(place, prompter, haystack("novel", "base"))
    assert sample.answer == ", ".join(sample.references)
    assert sample.lead.endswith(" ")
    assert prompter.decode(sample.input_ids[sample.n_prompt :]) == sample.answer
    assert prompter.encode(sample.body + sample.lead) == list(sample.input_ids[: sample.n_prompt])
