"""What `--device` may name, and what `--dtype` costs."""

from __future__ import annotations

import pytest
import torch

from ctxext.assets import MODEL
from ctxext.evals.loading import devices, load
from ctxext.utils.machine import slow_in_bfloat16


@pytest.mark.parametrize("device", ["tpu", "cuda:7", "cuda:x", "CPU"])
def test_a_device_that_torch_does_not_see_is_refused_by_its_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(
        ValueError, match=f"^device '{device}' is not available to torch. Pass one of auto, cpu, cuda, "
    ):
        load(MODEL, device=device)


def test_the_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for n, gpus in ((0, []), (2, ["cuda", "cuda:0", "cuda:1"])):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda n=n: n)
        assert devices() == ["auto", "cpu", *gpus]


@pytest.mark.parametrize(
    ("dtype", "slow", "said"), [("bfloat16", True, 1), ("bfloat16", False, 0), ("float32", True, 0)]
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told_of(
    dtype: str, slow: bool, said: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ctxext.utils.machine.slow_in_bfloat16", lambda device: slow)
    load(MODEL, dtype, "cpu")
    assert capsys.readouterr().err.count("slower in bfloat16 than with --dtype float32") == said


def test_only_a_cpu_is_slow_in_bfloat16() -> None:
    assert not slow_in_bfloat16("cuda")
    assert slow_in_bfloat16("cpu") == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())
