"""What `--device` may name."""

from __future__ import annotations

import pytest
import torch

from ctxext.assets import MODEL
from ctxext.evals.loading import devices, load


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
