"""Collators: where tokens stand, who sees whom on the live model, and where gradient comes from."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from ctxext.assets import MODEL, PERSUASION
from ctxext.data import CREAM, Mixture, Plain, PoSE, Source, check_positions, pack

ATTENTIONS = ("sdpa", "eager")
VOCABULARY = 4096


@pytest.fixture(scope="module", params=ATTENTIONS)
def model(request):
    return AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=request.param).eval()


def row_of(*documents: int, index: int = 0, padding: int = 0, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (sum(documents),), generator=generator).tolist()
    labels = ids.copy()
    labels[len(labels) - padding :] = [-100] * padding
    return {"input_ids": ids, "labels": labels, "documents": [*documents], "padding": padding, "index": index}


def logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        given = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return model(use_cache=False, **given).logits


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_no_token_attends_to_another_document(model) -> None:
    row = row_of(40, 1, 80, 23)
    packed = logits(model, Plain()([row]))[0]
    start = 0
    for n in row["documents"]:
        alone = {"input_ids": row["input_ids"][start : start + n], "labels": [0] * n, "documents": [n], "index": 0}
        assert_equal(packed[start : start + n], logits(model, Plain()([alone]))[0])
        start += n


def test_a_mask_of_ones_lets_packed_documents_see_each_other(model) -> None:
    """The trap: what position skipping needs is what packing must not have."""
    batch = Plain()([row_of(40, 80)])
    leaking = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    assert (logits(model, leaking) - logits(model, batch))[:, 40:].abs().max() > 1e-3


def test_long_distances_get_gradient_under_pose_and_none_without_its_mask(model) -> None:
    """The trap: without the mask, the loss of the second chunk knows nothing of the first."""
    batch = PoSE(target_length=2048)([row_of(120, index=1)])
    (cut,) = (batch["position_ids"][0].diff() != 1).nonzero()[0].tolist()
    assert batch["position_ids"][0, cut + 1] - batch["position_ids"][0, cut] > 256

    def gradient(**given) -> torch.Tensor:
        """Of the loss of the second chunk, but its first token, with respect to the embeddings of the first chunk."""
        embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        said = model(inputs_embeds=embeddings, position_ids=batch["position_ids"], use_cache=False, **given).logits
        loss = torch.nn.functional.cross_entropy(said[0, cut + 1 : -1], batch["labels"][0, cut + 2 :])
        return torch.autograd.grad(loss, embeddings)[0][0, : cut + 1]

    assert gradient(attention_mask=batch["attention_mask"]).norm(dim=-1).min() > 1e-6
    assert gradient().abs().max() == 0


@given(st.integers(2, 200), st.integers(0, 5000), st.integers(2, 5), st.integers(0, 10**6))
def test_pose_keeps_chunks_contiguous_and_moves_each_further_than_the_one_before(n, more, chunks, index) -> None:
    chunks = min(n, chunks)
    positions = PoSE(target_length=n + more, chunks=chunks).positions(row_of(n, index=index))
    assert positions[0] == 0
    assert positions[-1] < n + more
    assert (positions.diff() >= 1).all()
    assert (positions.diff() != 1).sum() <= chunks - 1


def test_pose_reaches_the_whole_target() -> None:
    pose = PoSE(target_length=1024)
    last = torch.tensor([pose.positions(row_of(64, index=k))[-1] for k in range(2000)])
    counts = torch.histc((last - 63).double(), 8, 0, 961)  # uniform: 250 each, give or take 15
    assert (counts - 250).abs().max() < 75


@given(st.integers(3, 300), st.integers(0, 5000), st.integers(0, 10**6), st.floats(0.01, 10))
def test_cream_has_a_head_a_middle_and_a_tail_in_this_order(n, more, index, sigma) -> None:
    target = n + more
    positions = CREAM(target_length=target, sigma=sigma).positions(row_of(n, index=index))
    assert len(positions) == n
    assert positions[0] == 0
    assert positions[-1] == target - 1
    assert (positions.diff() >= 1).all()
    assert (positions.diff() != 1).sum() <= 2


def test_cream_parts_half_of_the_rows_in_thirds_and_the_others_by_four_positions_a_scale() -> None:
    sides = []
    for k in range(400):
        gaps = (CREAM(target_length=2400).positions(row_of(300, index=k)).diff() != 1).nonzero().flatten() + 1
        sides.append(min(int(gaps[0]), 300 - int(gaps[-1])))  # at most one of the two gaps is closed
    assert set(sides) == {100, 4 * 8}
    assert 160 < sides.count(100) < 240


def test_cream_draws_the_middle_from_where_the_middle_is() -> None:
    """By the formula, integrated: α over [2, 2s] by the Gaussian, then the middle's end evenly between its bounds."""
    n, scale, draws = 300, 8, 4000
    cream = CREAM(target_length=n * scale)
    ends: dict[int, list[int]] = {n // 3: [], 4 * scale: []}
    for k in range(draws):
        side = n // 3 if Random(str(k)).random() < 0.5 else 4 * scale
        ends[side].append(int(cream.skip(n, Random(str(k)))[n - side - 1]))
    alpha = torch.linspace(2, 2 * scale, 10_001, dtype=torch.float64)
    weight = torch.exp(-(((alpha - (1 + scale)) / 3) ** 2) / 2)
    for side, found in ends.items():
        low, high = side + (n - 2 * side - 1) * alpha / 2, n * alpha / 2 - side - 1
        mean = ((low + high) / 2 * weight).sum() / weight.sum()
        square = ((low**2 + low * high + high**2) / 3 * weight).sum() / weight.sum()
        deviation = (square - mean**2).sqrt()
        sample = torch.tensor(found, dtype=torch.float64)
        assert abs(sample.mean() - mean) < 4 * deviation / len(found) ** 0.5
        assert sample.std() == pytest.approx(float(deviation), rel=0.06)


@pytest.mark.parametrize("collator", [PoSE(target_length=4096), CREAM(target_length=4096)])
def test_positions_are_a_function_of_seed_and_index_alone(collator) -> None:
    rows = [row_of(64, index=k, seed=k) for k in range(8)]
    together = collator(rows)["position_ids"]
    alone = torch.cat([collator([row])["position_ids"] for row in reversed(rows)]).flip(0)
    assert torch.equal(together, alone)
    assert len({tuple(positions.tolist()) for positions in together}) == 8
    assert not torch.equal(together, replace(collator, seed=1)(rows)["position_ids"])


@pytest.mark.parametrize("collator", [Plain(), PoSE(target_length=4096), CREAM(target_length=4096)])
def test_padding_changes_nothing_for_the_document_before_it(model, collator) -> None:
    padded = row_of(60, 30, padding=30)
    alone = {name: padded[name][:60] for name in ("input_ids", "labels")} | {"documents": [60], "index": 0}
    batch = collator([padded])
    assert batch["position_ids"].max() < 4096
    assert_equal(logits(model, batch)[0, :60], logits(model, collator([alone]))[0])


def test_only_skipping_collators_give_a_mask_and_all_tensors_are_of_one_shape() -> None:
    rows = [row_of(10, index=0), row_of(10, index=1)]
    for collator, names in [(Plain(), 3), (PoSE(target_length=99), 4), (CREAM(target_length=99), 4)]:
        batch = collator(rows)
        assert len(batch) == names
        assert all(tensor.shape == (2, 10) and tensor.dtype == torch.int64 for tensor in batch.values())
        assert "attention_mask" not in batch or batch["attention_mask"].all()
    assert Plain()([row_of(3, 1, 2)])["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]


@pytest.mark.parametrize(
    ("collator", "row", "said"),
    [
        (PoSE(target_length=99), row_of(5, 5), "skips positions within one document, but a row holds 2"),
        (CREAM(target_length=99), row_of(5, 5, 5, padding=5), "but a row holds 3"),
        (PoSE(target_length=9), row_of(10), "target_length=9 positions, but a row has 10"),
        (PoSE(target_length=9, chunks=4), row_of(3), "3 tokens cannot be split into 4"),
        (CREAM(target_length=9), row_of(2), "2 tokens is too short for a head"),
        (PoSE(target_length=99), {**row_of(5), "index": None, "name": "emma#1"}, "emma#1 has none"),
    ],
)
def test_rows_that_cannot_skip_are_refused(collator, row, said) -> None:
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(ValueError, match=said):
        collator([row])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks must be at least 2, got 1"):
        PoSE(target_length=99, chunks=1)
    with pytest.raises(ValueError, match=r"sigma must be > 0, got 0"):
        CREAM(target_length=99, sigma=0)
    with pytest.raises(ValueError, match=r"the same length, got \[5, 6\]"):
        Plain()([row_of(5), row_of(6)])


class Unmasked(PoSE):
    def __call__(self, rows):
        batch = super().__call__(rows)
        del batch["attention_mask"]
        return batch


class Masked(Plain):
    def __call__(self, rows):
        batch = super().__call__(rows)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


class Restarting(Plain):
    """Takes every half of a document for a document."""

    def positions(self, row):
        return torch.cat([torch.arange(n - n // 2) for n in (*row["documents"], *row["documents"])])[
            : len(row["labels"])
        ]


@pytest.mark.parametrize("collator", [Plain(), PoSE(target_length=2048), CREAM(target_length=2048)])
def test_the_guard_passes_what_is_right_and_leaves_the_model_as_it_was(model, collator) -> None:
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check_positions(model, collator, 512, VOCABULARY, batch_size=2)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()


@pytest.mark.parametrize(
    ("collator", "said"),
    [
        (Unmasked(target_length=2048), "the last token does not attend across a gap"),
        (Masked(), "packed documents attend to each other"),
        (Restarting(), "does not attend to its beginning"),
    ],
)
def test_the_guard_refuses_what_transformers_would_misread(model, collator, said) -> None:
    with pytest.raises(RuntimeError, match=said):
        check_positions(model, collator, 512, VOCABULARY)


@pytest.mark.parametrize("collator", [Plain(), PoSE(target_length=2048)])
def test_the_guard_refuses_a_model_that_does_not_pass_its_arguments_on(model, collator, monkeypatch) -> None:
    """As a wrapper that drops the mask, or one that makes its own."""
    forward = type(model).forward

    def meddled(self, attention_mask=None, **given):
        mask = torch.ones_like(given["input_ids"]) if isinstance(collator, Plain) else None
        return forward(self, attention_mask=mask, **given)

    monkeypatch.setattr(type(model), "forward", meddled)
    with pytest.raises(RuntimeError, match="attend"):
        check_positions(model, collator, 512, VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize("collator", [Plain(), PoSE(target_length=512)])
def test_a_stock_trainer_takes_them(tokenizer, tmp_path, collator) -> None:
    text = Dataset.from_dict({"text": [PERSUASION.read_text(encoding="utf-8")[:20_000]]})
    mixture = Mixture([pack(Source(path="novel"), text, tokenizer, 128, "joined")], seed=0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(MODEL),
        arguments,
        train_dataset=mixture.read(0, 8),
        data_collator=collator,
    )
    assert 2 < trainer.train().training_loss < 7
