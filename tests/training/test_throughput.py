"""Throughput: the operations that a model needs, the peaks of devices, and what a step holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import from_config, tiny_config
from peft import LoraConfig, get_peft_model
from survey.small import small_model
from torch.utils.flop_counter import FlopCounterMode

from ctxext.data import Accounting, Mixture, Packed, Source
from ctxext.training.throughput import PEAKS, Throughput, Work, in_words, peak_of

TOKENS = 48


def counted(model: Any) -> int:
    """Operations that torch sees in a forward and a backward pass, whose attention computes masked pairs too."""
    ids = torch.randint(0, 128, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


def with_masked_pairs(work: Work) -> float:
    return work.by_token * TOKENS + work.by_pair * TOKENS**2 * len(work.windows)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_operations_are_those_that_torch_counts(family: str) -> None:
    model = from_config(tiny_config(family, attn_implementation="eager"))
    assert with_masked_pairs(Work.of(model)) == pytest.approx(counted(model), rel=1e-12)


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    model = from_config(tiny_config("llama", attn_implementation="eager"))
    whole = Work.of(model).by_token
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm", "lm_head"])
    adapter = get_peft_model(model, config)
    work = Work.of(adapter)
    assert 4 / 6 < work.by_token / whole < 0.95
    assert with_masked_pairs(work) == pytest.approx(counted(adapter), rel=1e-12)


def test_only_pairs_that_attend_are_counted() -> None:
    work = Work(by_token=0, by_pair=1, windows=(None, 3))
    assert work.operations([1]) == 2
    assert work.operations([5]) == 15 + (1 + 2 + 3 + 3 + 3)
    assert work.operations([5, 1]) == work.operations([5]) + work.operations([1])


def test_chunks_attend_to_themselves_alone() -> None:
    work = Work(by_token=0, by_pair=1, windows=(None, 3), chunked=True)
    assert work.operations([2]) == 3 + 3
    assert work.operations([8]) == 36 + (6 + 6 + 3)
    model = small_model("llama4_text", "causal", attention_chunk_size=64)
    assert (Work.of(model).chunked, set(Work.of(model).windows)) == (True, {64, None})


def test_a_mixture_of_experts_computes_with_some_of_them() -> None:
    few, all_of_them = (
        Work.of(small_model("qwen3_moe", "causal", num_experts=4, num_experts_per_tok=n)).by_token for n in (1, 4)
    )
    model = small_model("qwen3_moe", "causal", num_experts=4, num_experts_per_tok=4)
    experts = sum(weight.numel() for weight in model.parameters() if weight.ndim == 3)
    assert experts > 0
    assert all_of_them - few == pytest.approx(6 * experts * 3 / 4)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", PEAKS["H100"]),
        ("NVIDIA H100 PCIe", PEAKS["H100 PCIe"]),
        ("NVIDIA H200 NVL", PEAKS["H200 NVL"]),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
    ],
)
def test_a_device_has_the_peak_of_its_own_name_or_none(device: str, peak: float | None) -> None:
    assert peak_of(device) == peak


def packed(n_rows: int, weight: float, padding: int, targets: int) -> Packed:
    accounting = Accounting(
        documents=n_rows, tokens_read=0, tokens_in_rows=8 * n_rows, padding=padding * n_rows, dropped=0,
        targets=targets * n_rows,
    )  # fmt: skip
    rows: Any = {"documents": [[8 - padding, padding] if padding else [8]] * n_rows, "padding": [padding] * n_rows}
    rows = type("Rows", (dict,), {"__len__": lambda self: n_rows})(rows)
    return Packed(source=Source(path=f"{weight}", weight=weight), length=8, rows=rows, accounting=accounting)


@pytest.mark.parametrize("known", [True, False])
def test_a_step_is_described_by_the_weights_of_its_sources(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture([packed(3, 3, padding=0, targets=7), packed(5, 1, padding=4, targets=2)], seed=0)
    device, precision = torch.device("cuda"), "bf16" if known else "fp32"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    accelerator: Any = SimpleNamespace(device=device, num_processes=2)
    settings: Any = SimpleNamespace(training=SimpleNamespace(batch_size=4, precision=precision))
    model = from_config(tiny_config("llama"))
    found = Throughput.of(accelerator, settings, model, mixture)
    assert (found.tokens, found.packing, found.targets) == (32, 1 - 4 / 32, 23)
    speed = found.at(0.5)
    assert speed["tokens_per_second"] == 64
    if not known:
        assert "mfu" not in speed
        assert in_words(**speed) == "64 tokens/s, MFU unknown"
        return
    work = Work.of(model)
    operations = 3 * work.operations([8]) + work.operations([4])
    assert speed["mfu"] == pytest.approx(operations / (0.5 * 2 * PEAKS["H100"]))
    assert in_words(1234.5, 0.412) == "1,234 tokens/s, MFU 41%"
    assert str(found) == "each step reads 32 tokens: 87.5% are text and the rest padding, 23 have a loss"
