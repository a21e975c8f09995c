"""Densities over the horizon, worked by hand."""

import pytest
import torch

from rl_stagger.resets.density import binned, density_over, first_share, nonincreasing


def test_weights_are_of_equal_parts():
    # H = 6, two parts of 3 steps, 1 against 3: 1/12 and 3/12 a step.
    assert density_over([1, 3], 6).tolist() == pytest.approx([1 / 12] * 3 + [3 / 12] * 3)
    # H = 5 is not divided by 2: steps 0, 1, 2 (p * 2 // 5 = 0) and 3, 4. 1, 1, 1, 2, 2 over 7.
    assert density_over((1.0, 2.0), 5).tolist() == pytest.approx([1 / 7] * 3 + [2 / 7] * 2)


@pytest.mark.parametrize(
    "text, weights",
    [
        # H = 2: u = .25 and .75.
        ("1 + 4 * u", [2.0, 4.0]),
        ("u ** 2", [0.0625, 0.5625]),
        ("exp(-log(4) * u / 0.5)", [0.5, 0.125]),
        ("u < 0.5", [1.0, 0.0]),
        ("max(u, 1 - u) - 0.25 + (u >= .5)", [0.5, 1.5]),
        ("-u + 1", [0.75, 0.25]),
        ("abs(sin(pi * 2 * u))", [1.0, 1.0]),
    ],
)
def test_an_expression_is_read_in_the_middle_of_a_step(text, weights):
    assert density_over(text, 2).tolist() == pytest.approx([w / sum(weights) for w in weights])


@pytest.mark.parametrize(
    "wanted, match",
    [
        ("1 + v", "'v' is not known.*Valid: "),
        ("expp(u)", "'expp' is not known; did you mean 'exp'"),
        ("__import__('os')", "'__import__' is not known"),
        ("u.real", "only numbers, u"),
        ("[1, 2]", "only numbers, u"),
        ("1 +", "not an expression of u"),
        ("u - 0.5", "a weight of -0.[0-9]+; weights are finite and at least 0"),
        ("1 / (u - u)", "at u = .*division by zero"),
        ("(u - 2) ** 0.5", "not a real number"),
        ("0 * u", "all weights are 0"),
        ([1, -2], "a weight of -2"),
        ([1, float("nan")], "a weight of nan"),
        ([0, 0], "all weights are 0"),
        ([], "at least one weight"),
        ("9" * 400, "at u = .*int too large"),
        ("-" * 3000 + "u", "not an expression|nested too deeply"),
        ("u" + "+u" * 3000, "not an expression|nested too deeply"),
        ("u\0", "not an expression"),
        ([1] * 11, "11 weights for a horizon of 10 steps"),
    ],
)
def test_what_is_no_density(wanted, match):
    with pytest.raises(ValueError, match=match):
        density_over(wanted, 10)


def test_large_weights_do_not_overflow():
    assert density_over([1e308, 1e308], 4).tolist() == [0.25] * 4


def test_first_share():
    # Half of [1, 2, 3, 4] / 10 is [1, 2] / 3.
    assert first_share(density_over([1, 2, 3, 4], 4), 0.5).tolist() == pytest.approx([1 / 3, 2 / 3, 0, 0])
    assert first_share(density_over([1, 2], 4), 1.0).tolist() == pytest.approx([1 / 6, 1 / 6, 2 / 6, 2 / 6])
    assert first_share(density_over([1], 4), 0.01).tolist() == [1, 0, 0, 0], "one step at least"
    with pytest.raises(ValueError, match=r"nothing of the density lies in the first 0\.5"):
        first_share(density_over([0, 1], 4), 0.5)


def test_nonincreasing_is_the_smallest_above():
    # [1, 4, 3, 2] -> [4, 4, 3, 2] over 13.
    wanted = torch.tensor([0.1, 0.4, 0.3, 0.2])
    assert nonincreasing(wanted).tolist() == pytest.approx([4 / 13, 4 / 13, 3 / 13, 2 / 13])
    assert nonincreasing(torch.tensor([0.1, 0.2, 0.7])).tolist() == pytest.approx([1 / 3] * 3), (
        "cuts cannot favour late"
    )
    falling = torch.tensor([0.5, 0.3, 0.2])
    assert nonincreasing(falling).tolist() == pytest.approx(falling.tolist())


def test_bins_follow_the_rule_of_the_phase_histogram():
    # H = 5, 2 bins: steps 0..2 and 3..4.
    assert binned(torch.tensor([0.1, 0.1, 0.2, 0.3, 0.3]), 2).tolist() == pytest.approx([0.4, 0.6])
