"""Learning rates from KL divergences fed by hand."""

import pytest
import torch

from rl_stagger.algorithms.kl_schedule import adapt_rate, linear_rate


def adapted(kl, rate=1e-3, rate_min=1e-5, rate_max=1e-2, target=0.01, factor=1.5):
    return float(adapt_rate(torch.tensor(rate), torch.tensor(kl), target, rate_min, rate_max, factor))


@pytest.mark.parametrize(
    "kl, moved",
    [
        (0.021, 1 / 1.5),  # above 2 * .01
        (10.0, 1 / 1.5),
        (float("inf"), 1 / 1.5),
        (0.0199, 1.0),  # between .005 and .02
        (0.01, 1.0),
        (0.0051, 1.0),
        (0.0049, 1.5),  # under .01 / 2
        (1e-9, 1.5),
        (0.0, 1.0),  # nothing was measured
        (-1e-9, 1.0),  # rounding of nothing
        (float("nan"), 1.0),
    ],
)
def test_one_move(kl, moved):
    assert adapted(kl) == pytest.approx(1e-3 * moved, rel=1e-6)


def test_bounds_come_from_the_caller_and_hold():
    # rl_games PR #374: bounds are settings
    assert adapted(1.0, rate=3e-4, rate_min=2.9e-4) == pytest.approx(2.9e-4)
    assert adapted(1e-4, rate=3e-4, rate_max=3.1e-4) == pytest.approx(3.1e-4)


def test_a_sequence_by_hand():
    # 1e-3, then KL .03 -> / 2, .001 -> * 2, .001 -> * 2, .01 -> as it was: 5e-4, 1e-3, 2e-3, 2e-3
    rate, seen = torch.tensor(1e-3), []
    for kl in (0.03, 0.001, 0.001, 0.01):
        rate = adapt_rate(rate, torch.tensor(kl), 0.01, 1e-5, 1e-2, 2.0)
        seen.append(float(rate))
    assert seen == pytest.approx([5e-4, 1e-3, 2e-3, 2e-3])


def test_repeated_extremes_end_at_the_bounds():
    for kl, bound in ((1.0, 1e-5), (1e-6, 1e-2)):
        rate = torch.tensor(1e-3)
        for _ in range(40):
            rate = adapt_rate(rate, torch.tensor(kl), 0.01, 1e-5, 1e-2)
        assert float(rate) == pytest.approx(bound)


def test_linear():
    assert [linear_rate(4.0, 0.0, i, 5) for i in range(5)] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert linear_rate(4.0, 2.0, 0, 1) == 4.0
    assert linear_rate(4.0, 2.0, 9, 5) == 2.0  # past the end
