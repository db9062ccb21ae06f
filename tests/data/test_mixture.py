"""Mixtures: which row comes when is a function of the seed and its number, and the shares are the weights."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from ctxext.data import Accounting, Mixture, Packed, Source


def packed(n_rows: int, weight: float = 1.0, name: str = "a", length: int = 4) -> Packed:
    rows = Dataset.from_dict(
        {
            "input_ids": np.arange(n_rows * length).reshape(n_rows, length),
            "labels": np.arange(n_rows * length).reshape(n_rows, length),
            "documents": [[length]] * n_rows,
            "padding": [0] * n_rows,
            "n_targets": [length - 1] * n_rows,
        }
    )
    n = n_rows * length
    accounting = Accounting(documents=n_rows, tokens_read=n, tokens_in_rows=n, padding=0, dropped=0, targets=n - n_rows)
    source = Source(path=name, weight=weight)
    return Packed(source=source, length=length, rows=rows.with_format("numpy"), accounting=accounting)


@pytest.fixture
def three() -> list[Packed]:
    return [packed(7, 0.6, "books"), packed(11, 0.3, "code"), packed(3, 0.1, "short")]


def test_any_stretch_of_a_run_is_what_the_whole_run_has_there(three) -> None:
    whole = Mixture(three, seed=3).rows(0, 500)
    mixture = Mixture(three, seed=3)
    for first, count in [(250, 40), (0, 10), (499, 1), (17, 100), (3, 0)]:
        assert mixture.rows(first, count) == whole[first : first + count]
        assert Mixture(three, seed=3).rows(first, count) == whole[first : first + count]


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@pytest.mark.slow
@given(weights, st.integers(0, 300))
def test_every_start_is_that_of_the_whole_run(weights, first) -> None:
    sources = [packed(5, weight) for weight in weights]
    assert Mixture(sources, seed=0).rows(first, 5) == Mixture(sources, seed=0).rows(0, first + 5)[first:]


@pytest.mark.slow
@given(weights)
def test_after_any_number_of_rows_no_other_counts_are_nearer_to_the_weights(weights) -> None:
    """No source can give a row to another: with Σ (n - k w)² / w convex in each n, that is the minimum of all."""
    shares = np.array(weights) / sum(weights)
    order = [source for source, _ in Mixture([packed(5, weight) for weight in weights], seed=0).rows(0, 60)]
    for k in range(1, 61):
        n = np.bincount(order[:k], minlength=len(shares))
        giving, taking = np.where(n > 0, (2 * n - 1) / shares, -np.inf), (2 * n + 1) / shares
        assert giving.max() <= taking.min() * (1 + 1e-9)


def test_two_sources_are_never_more_than_half_a_row_from_their_weights() -> None:
    order = [source for source, _ in Mixture([packed(5, 0.3), packed(5, 0.7)], seed=0).rows(0, 1000)]
    off = np.cumsum(np.array(order) == 0) - 0.3 * np.arange(1, 1001)
    assert abs(off).max() <= 0.5 + 1e-9


def test_each_epoch_reads_every_row_once_in_an_order_of_its_own(three) -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for source, index in Mixture(three, seed=3).rows(0, 400):
        seen[source].append(index)
    for one, indices in zip(three, seen.values()):
        n = len(one.rows)
        epochs = [tuple(indices[start : start + n]) for start in range(0, len(indices) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert len(epochs) >= 10
        assert len(set(epochs)) > len(epochs) / 3


def test_the_seed_changes_rows_but_not_shares(three) -> None:
    one, other = (Mixture(three, seed).rows(0, 100) for seed in (0, 1))
    assert one != other
    assert [source for source, _ in one] == [source for source, _ in other]


def test_rows_know_their_number_and_their_name(three) -> None:
    mixture = Mixture(three, seed=0)
    rows = mixture.read(20, 5)
    assert [row["index"] for row in rows] == [20, 21, 22, 23, 24]
    for row, (source, index) in zip(rows, mixture.rows(20, 5)):
        assert row["name"] == f"{three[source].source.name}#{index}"
        assert row["input_ids"].tolist() == three[source].rows[index]["input_ids"].tolist()


def test_epochs_say_how_often_each_source_is_read(three) -> None:
    assert Mixture(three, seed=0).epochs(100) == pytest.approx([60 / 7, 30 / 11, 10 / 3])


def test_a_mean_counts_each_source_by_its_weight(three) -> None:
    assert Mixture(three, seed=0).mean(lambda part: len(part.rows)) == pytest.approx(0.6 * 7 + 0.3 * 11 + 0.1 * 3)


def test_a_late_start_takes_no_more_work_than_an_early_one(three) -> None:
    class Counted(Mixture):
        looks = 0

        def _due(self, source: int, n: int) -> float:
            self.looks += 1
            return super()._due(source, n)

    def looks(first: int) -> int:
        mixture = Counted(three, seed=0)
        mixture.rows(first, 100)
        return mixture.looks

    # A row takes one look, and a start a few rows of one look for each source.
    assert looks(0) == 100 + len(three)
    assert looks(10**9) <= looks(0) + len(three) * (2 * len(three) + 1)


def test_rows_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of the same length, got lengths \[4, 8\]"):
        Mixture([packed(5), packed(5, length=8)], seed=0)
    with pytest.raises(ValueError, match=r"got lengths \[\]"):
        Mixture([], seed=0)
