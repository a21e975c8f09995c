"""The density that follows a learning signal, worked by hand."""

import pytest
import torch

from rl_stagger.resets.adaptive import AdaptiveConfig, AdaptiveDensity, density_of_signal

CPU = torch.device("cpu")
ALL = torch.ones(2, dtype=torch.bool)


def test_proportional_with_a_floor():
    # Signals 1 and 3: shares .25 and .75; floor .2: .1 + .8 * share.
    assert density_of_signal(torch.tensor([1.0, 3.0]), ALL, 1.0, 0.2).tolist() == pytest.approx([0.3, 0.7])


def test_temperature_flattens():
    # Square roots 1 and 3 of 1 and 9: .25 and .75.
    assert density_of_signal(torch.tensor([1.0, 9.0]), ALL, 2.0, 0.0).tolist() == pytest.approx([0.25, 0.75])


def test_a_bin_without_data_counts_as_the_mean():
    seen = torch.tensor([True, True, False])
    found = density_of_signal(torch.tensor([1.0, 3.0, 77.0]), seen, 1.0, 0.0)
    assert found.tolist() == pytest.approx([1 / 6, 3 / 6, 2 / 6])


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e6])
def test_no_temperature_overflows(temperature):
    found = density_of_signal(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool), temperature, 0.3)
    assert found.isfinite().all()
    assert float(found.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("seen", [[True, True], [False, False]])
def test_no_signal_is_even(seen):
    assert density_of_signal(torch.zeros(2), torch.tensor(seen), 1.0, 0.3).tolist() == pytest.approx([0.5, 0.5])


def follow(adaptive, phases, errors, valid=None):
    error = torch.tensor([errors], dtype=torch.float32)
    valid = torch.ones_like(error, dtype=torch.bool) if valid is None else torch.tensor([valid])
    adaptive.follow(torch.tensor([phases]), error, valid)


def made(**settings):
    return AdaptiveDensity(AdaptiveConfig(floor=1e-9, **settings), 2, 10, CPU)


def test_critic_error_is_the_systematic_part_and_advantage_all_of_it():
    # Bin 0: +2 and -2, mean 0; bin 1: 1 and 1.
    systematic, all_of_it = made(signal="critic_error", every_iters=1), made(signal="advantage", every_iters=1)
    for adaptive in (systematic, all_of_it):
        follow(adaptive, [0, 4, 5, 9], [2.0, -2.0, 1.0, 1.0])
    assert systematic.density.tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    assert all_of_it.density.tolist() == pytest.approx([2 / 3, 1 / 3])


def test_the_average_moves_and_the_update_waits():
    adaptive = made(signal="advantage", smoothing=0.5, every_iters=2)
    follow(adaptive, [0, 5], [1.0, 1.0])
    assert adaptive.density.tolist() == [0.5, 0.5]
    follow(adaptive, [0, 5], [3.0, 1.0])
    # Two iterations together: means 2 and 1.
    assert adaptive.density.tolist() == pytest.approx([2 / 3, 1 / 3])
    follow(adaptive, [0, 5], [0.0, 1.0])
    follow(adaptive, [0, 5], [0.0, 1.0])
    # .5 * 2 + .5 * 0 = 1, and 1.
    assert adaptive.density.tolist() == pytest.approx([0.5, 0.5])


def test_invalid_rows_and_absent_bins_change_nothing():
    adaptive = made(signal="advantage", smoothing=0.5, every_iters=1)
    follow(adaptive, [0, 5], [1.0, 3.0])
    follow(adaptive, [0, 5], [1.0, float("nan")], [True, False])
    assert adaptive.density.tolist() == pytest.approx([0.25, 0.75])


def test_state_goes_round():
    adaptive = made(signal="advantage", every_iters=3)
    for _ in range(4):
        follow(adaptive, [0, 5], [1.0, 3.0])
    again = made(signal="advantage", every_iters=3)
    again.load_state_dict(adaptive.state_dict())
    for _ in range(2):
        for one in (adaptive, again):
            follow(one, [0, 5], [5.0, 3.0])
    assert again.density.tolist() == adaptive.density.tolist() != [0.5, 0.5]
