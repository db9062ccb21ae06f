"""Learned and sinusoidal tables of live models, against formulas written out here."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from survey.small import LENGTH, small_model, stock_logits
from torch import Tensor, nn
from transformers import AutoConfig

from ctxext import extend_context, restore_context
from ctxext.patches import position_table

FACTOR = 3
LEARNED = {"gpt2": "causal", "opt": "causal", "gpt_neo": "causal", "bert": "causal", "roberta": "causal",
           "bart": "causal", "whisper": "causal", "mpnet": "masked", "nystromformer": "masked"}  # fmt: skip
SINUSOIDAL = {"marian": "causal", "pegasus": "causal", "roformer": "causal", "ctrl": "causal"}


def slow_rows(name: str, table: Tensor, n_rows: int) -> Tensor:
    """Row by row, in Python's own floats, as the papers say."""
    n, dim = table.shape
    old = table.double().tolist()
    rows = []
    for p in range(n_rows):
        if name == "tiling":
            rows.append(old[p % n])
        elif name == "row_interpolation":
            at = min(p * n / n_rows, n - 1)
            low, part = int(at), at - int(at)
            high = min(low + 1, n - 1)
            rows.append([(1 - part) * a + part * b for a, b in zip(old[low], old[high], strict=True)])
        else:
            i, j = divmod(p, n)
            base = [[(old[k][d] - 0.4 * old[0][d]) / 0.6 for d in range(dim)] for k in (i, j)]
            rows.append([0.4 * a + 0.6 * b for a, b in zip(*base, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def natively_longer(model: nn.Module, name: str) -> nn.Module:
    """A model of the class built with three times the positions, its table written by `slow_rows`."""
    (found,) = position_table.find(model, model.config).tables
    config = copy.deepcopy(model.config)
    setattr(config, found.limit, found.held + 2 * found.positions)
    native = type(model)._from_config(config).eval()
    old = model.state_dict()
    key = f"{found.path}.{found.name}"
    rows = slow_rows(name, old[key][found.first :], FACTOR * LENGTH)
    native.load_state_dict({**old, key: torch.cat([old[key][: found.first], rows.float()])})
    return native


@pytest.mark.parametrize("model_type", LEARNED)
def test_a_learned_table_runs_past_its_limit_as_the_formula_says(model_type: str) -> None:
    model = small_model(model_type, LEARNED[model_type])
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        stock_logits(model, LENGTH + 1)
    methods = ("hierarchical", "row_interpolation", "tiling") if model_type in ("gpt2", "opt") else ("hierarchical",)
    for method in methods:
        expected = stock_logits(natively_longer(model, method), FACTOR * LENGTH)
        extend_context(model, FACTOR, method)
        live = stock_logits(model, FACTOR * LENGTH)
        restore_context(model)
        torch.testing.assert_close(live, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "roberta"])
def test_a_hierarchical_table_leaves_short_text_bitwise_alone(model_type: str) -> None:
    model = small_model(model_type, LEARNED[model_type])
    before = stock_logits(model, LENGTH)
    extend_context(model, FACTOR, "hierarchical")
    assert torch.equal(stock_logits(model, LENGTH), before)


def test_rows_for_padding_stay() -> None:
    model = small_model("opt", "causal")
    before = model.model.decoder.embed_positions.weight[:2].clone()
    extend_context(model, FACTOR, "row_interpolation")
    assert torch.equal(model.model.decoder.embed_positions.weight[:2], before)
    # A padded row is the same computation as one without padding.
    ids = torch.randint(3, 100, (1, 100), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.full((1, 7), model.config.pad_token_id), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 100)], dim=1).long()
    with torch.no_grad():
        plain, shifted = model(ids).logits, model(padded, attention_mask=mask).logits[:, 7:]
    torch.testing.assert_close(shifted, plain, atol=1e-4, rtol=1e-4)


def sines(position: float, dim: int) -> list[float]:
    """Marian's layout: all sines, then all cosines. Vaswani et al. (2017), section 3.5."""
    angles = [position / 10000 ** (2 * i / dim) for i in range(dim // 2)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


@pytest.mark.parametrize("model_type", SINUSOIDAL)
@pytest.mark.parametrize("method", ["sinusoidal_interpolation", "sinusoidal_extrapolation"])
def test_a_table_of_sines_is_regrown_at_the_methods_positions(model_type: str, method: str) -> None:
    model = small_model(model_type, SINUSOIDAL[model_type])
    with pytest.raises((IndexError, RuntimeError)):
        stock_logits(model, LENGTH + 1)
    (found,) = position_table.find(model, model.config).tables
    extend_context(model, FACTOR, method)
    table = getattr(model.get_submodule(found.path), found.name)
    every = FACTOR if method == "sinusoidal_interpolation" else 1
    expected = torch.tensor([sines(p / every, table.shape[1]) for p in range(FACTOR * LENGTH)])
    torch.testing.assert_close(table.cpu(), expected, atol=1e-6, rtol=0)
    assert stock_logits(model, FACTOR * LENGTH).isfinite().all()
    assert model.context_extension.plan.is_portable == (model_type != "ctrl")  # whose table is no weight


def test_the_buffers_that_count_positions_grow_with_the_table() -> None:
    model = small_model("gpt_neo", "causal")
    masks = [path for path, module in model.named_modules() if "bias" in module._buffers]
    position_ids = small_model("bert", "causal")
    extend_context(model, FACTOR)
    assert masks
    for path in masks:
        mask = model.get_submodule(path).bias[0, 0]
        n = FACTOR * LENGTH
        # GPT-Neo's local layers see a window, which is another triangle.
        assert mask.shape == (n, n)
        assert torch.equal(mask, mask.tril())
    extend_context(position_ids, FACTOR)
    embeddings = position_ids.bert.embeddings
    assert embeddings.position_ids.tolist() == [list(range(FACTOR * LENGTH))]
    assert embeddings.token_type_ids.tolist() == [[0] * FACTOR * LENGTH]


def test_a_window_that_shows_in_the_longer_mask_alone_is_refused() -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    settings = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    config = GPTNeoConfig(
        max_position_embeddings=64, window_size=100, attention_types=[[["global", "local"], 1]], **settings
    )
    with pytest.raises(ValueError, match="less than the window of 100"):
        extend_context(GPTNeoForCausalLM(config), 4)
    assert extend_context(GPTNeoForCausalLM(config), 1.5).config.max_position_embeddings == 96


def test_a_buffer_that_is_not_understood_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("bert", "causal")
    model.bert.embeddings.position_ids[0, 5] = 17
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    with pytest.raises(ValueError, match="position_ids grows with the model's limit"):
        extend_context(model, FACTOR)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert "context_extension" not in model.__dict__


def test_more_than_the_square_of_the_rows_is_refused() -> None:
    model = small_model("gpt2", "causal")
    with pytest.raises(ValueError, match=r"64 rows cover 64² = 4096 positions"):
        extend_context(model, target_length=LENGTH**2 + 1)


def test_a_table_that_nothing_reads_is_told() -> None:
    model = small_model("gpt2", "causal")

    class Nothing(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 0

    model.transformer.wpe.__class__ = Nothing
    with pytest.raises(RuntimeError, match=r"does not do what|does not change the output"):
        extend_context(model, FACTOR)
    assert model.config.n_positions == LENGTH
    assert len(model.transformer.wpe.weight) == LENGTH


def test_a_half_grown_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_table, "differences", lambda before, after: iter(()))
    model = small_model("gpt2", "causal")
    found = position_table.LearnedTable
    monkeypatch.setattr("ctxext.extension.request.find_encoding", lambda *_: found(**KEPT, config=model.config))
    with pytest.raises(RuntimeError):
        extend_context(model, FACTOR)
    assert model.config.n_positions == LENGTH


_TABLE = position_table.Table("transformer.wpe", "weight", 0, "n_positions", LENGTH, LENGTH)
KEPT: dict[str, Any] = {
    "paths": ("transformer.wpe",), "trained_length": LENGTH, "source": "n_positions of the config", "limit": LENGTH,
    "tables": (_TABLE,), "saved": True,
}  # fmt: skip


def test_a_table_is_found_on_meta_as_well() -> None:
    config = AutoConfig.for_model("bart")
    with torch.device("meta"):
        from transformers import BartModel

        model = BartModel(config)
    found = position_table.find(model, config)
    assert found is not None
    assert found.paths == ("encoder.embed_positions", "decoder.embed_positions")
    assert [table.first for table in found.tables] == [2, 2]
    assert found.trained_length == 1024
