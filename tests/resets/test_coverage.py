"""Histogram, coverage and total variation, worked by hand."""

import math

import pytest
import torch

from rl_stagger.resets.coverage import (
    bin_of_phase,
    histogram_coverage,
    phase_bins,
    phase_coverage,
    phase_histogram,
    total_variation,
)


@pytest.mark.parametrize("horizon, rollout, bins", [(200, 10, 20), (100, 24, 5), (101, 20, 6), (8, 8, 1), (8, 50, 1)])
def test_one_bin_for_each_rollout_that_fits(horizon, rollout, bins):
    assert phase_bins(horizon, rollout) == bins


def test_histogram_by_hand():
    # H=8, 4 bins of 2 steps: phases 0,1 | 2 | - | 6,7,7 -> shares 2/6, 1/6, 0, 3/6.
    histogram = phase_histogram(torch.tensor([0, 1, 2, 6, 7, 7]), 8, 4)
    assert torch.allclose(histogram, torch.tensor([2.0, 1.0, 0.0, 3.0]) / 6)
    assert histogram.dtype == torch.float32


def test_histogram_where_the_horizon_is_no_multiple_of_the_bins():
    # H=10, 4 bins of 2.5 steps: bin = floor(4 * phase / 10): 0,1,2 | 3,4 | 5,6,7 | 8,9.
    histogram = phase_histogram(torch.arange(10), 10, 4)
    assert torch.allclose(histogram, torch.tensor([3.0, 2.0, 3.0, 2.0]) / 10)


def test_histogram_of_a_rollout_counts_only_valid_rows():
    phase = torch.tensor([[0, 4], [1, 5]])
    valid = torch.tensor([[True, True], [True, False]])
    assert torch.allclose(phase_histogram(phase, 8, 2, valid), torch.tensor([2.0, 1.0]) / 3)


def test_histogram_of_nothing_is_zero_and_finite():
    nobody = torch.zeros(4, dtype=torch.bool)
    assert phase_histogram(torch.arange(4), 4, 2, nobody).tolist() == [0.0, 0.0]
    assert histogram_coverage(torch.zeros(2)).item() == 0.0


def test_phases_at_and_past_the_horizon_count_in_the_last_bin():
    assert phase_histogram(torch.tensor([7, 8, 80]), 8, 4).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_bin_of_phase_keeps_the_shape():
    phase = torch.tensor([[0, 1, 2], [7, 8, 80]])
    assert bin_of_phase(phase, 8, 4).tolist() == [[0, 0, 1], [3, 3, 3]]


def test_coverage_by_hand():
    # p = (1/2, 1/4, 1/4): entropy 1.5 bits of log2(3) = 1.585 -> 0.9464.
    assert histogram_coverage(torch.tensor([0.5, 0.25, 0.25])).item() == pytest.approx(1.5 / math.log2(3), abs=1e-6)
    # Half of four bins, evenly: 1 bit of 2.
    assert histogram_coverage(torch.tensor([0.5, 0.5, 0.0, 0.0])).item() == pytest.approx(0.5, abs=1e-6)
    assert histogram_coverage(torch.full((7,), 1 / 7)).item() == pytest.approx(1.0, abs=1e-6)
    assert histogram_coverage(torch.tensor([0.0, 1.0, 0.0])).item() == 0.0
    assert histogram_coverage(torch.tensor([1.0])).item() == 1.0, "one bin cannot be uneven"


def test_total_variation_by_hand():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.25, 0.75])
    # |.5| + |.25| + |.75| = 1.5, halved.
    assert total_variation(p, q).item() == pytest.approx(0.75)
    assert total_variation(p, p).item() == 0.0
    assert total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == 1.0


def test_phase_coverage_is_the_contract_of_other_peoples_code():
    even = phase_coverage(torch.arange(20).repeat(3), 20, 4)
    assert isinstance(even, float)
    assert even == pytest.approx(1.0, abs=1e-6)
    assert phase_coverage(elapsed_steps=torch.zeros(9, dtype=torch.int64), horizon_steps=20, num_bins=4) == 0.0
    # Two of four bins, evenly.
    assert phase_coverage(torch.tensor([[0, 5], [4, 9]]), 20, 4) == pytest.approx(0.5, abs=1e-6)
