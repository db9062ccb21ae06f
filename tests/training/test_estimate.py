"""Estimates: what two short passes say of a long one."""

from __future__ import annotations

import time

import pytest
import torch

from ctxext.training.estimate import Estimate, PeakMemory, duration, estimate, gib


@pytest.mark.slow
def test_time_and_memory_go_on_as_they_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]  # a machine that does nothing else
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def step(tokens: int) -> None:
        held = torch.ones(tokens, 2**15)  # 128 KiB a token
        gradients = torch.ones(2**25)  # 128 MiB, whatever the tokens
        clock[0] += tokens * 4e-5 + tokens**2 * 1e-7
        del held, gradients

    expected = estimate(step, length=2048, micro_batches=10, trained=1000, memory=PeakMemory(torch.device("cpu")))
    assert expected.seconds == pytest.approx(10 * (2048 * 4e-5 + 2048**2 * 1e-7), rel=0.3)
    assert expected.growth == pytest.approx(2048 * 2**17 + 2**27, rel=0.1)
    assert expected.state == 8_000
    assert expected.peak == expected.held + expected.state + expected.growth
    assert expected.fits


def test_more_than_there_is_does_not_fit() -> None:
    assert not Estimate(held=2**30, state=2**30, growth=2**31, room=2**31, seconds=1).fits
    assert Estimate(held=None, state=2**30, growth=None, room=0, seconds=1).fits


@pytest.mark.slow
def test_the_peak_is_seen_after_it_has_passed() -> None:
    memory = PeakMemory(torch.device("cpu"))
    before = memory.now
    held = torch.ones(2**26)  # 256 MiB
    del held
    assert memory.at_most - before > 0.9 * 2**28
    memory.restart()
    assert memory.at_most - before < 0.5 * 2**28


def test_figures_are_written_for_people() -> None:
    assert [duration(s) for s in (8, 200, 3900)] == ["8 s", "3 min 20 s", "1 h 05 min"]
    assert (gib(2**30), gib(None)) == ("1.00 GiB", "unknown")


@pytest.mark.slow
def test_lengths_are_tried_that_a_step_can_cut() -> None:
    read: list[int] = []
    for groups, length in ((3, 192), (3, 1200), (5, 160), (7, 4096)):
        estimate(read.append, length=length, micro_batches=1, trained=1, memory=PeakMemory(torch.device("cpu")),
                 multiple=2 * groups)  # fmt: skip
        assert all(tokens % (2 * groups) == 0 and 0 < tokens <= length for tokens in read)
        read.clear()
