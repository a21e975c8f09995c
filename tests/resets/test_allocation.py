"""Offsets of the allocations, worked by hand."""

import pytest
import torch

from rl_stagger.resets.allocation import (
    ALLOCATIONS,
    default_num_groups,
    group_of_env,
    random_offsets,
    uniform_offsets,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "horizon, rollout, groups", [(200, 10, 20), (100, 24, 5), (1000, 24, 42), (5, 5, 1), (3, 9, 1)]
)
def test_default_groups_are_one_rollout_apart(horizon, rollout, groups):
    assert default_num_groups(horizon, rollout) == groups


def test_groups_are_dealt_round():
    assert group_of_env(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert group_of_env(2, 5).tolist() == [0, 1]


def test_uniform_offsets_by_hand():
    # H=200, 4 groups: 0, 50, 100, 150, then round again.
    assert uniform_offsets(6, 200, 4, generator()).tolist() == [0, 50, 100, 150, 0, 50]
    # H=10, 4 groups: floor(g * 10 / 4) = 0, 2, 5, 7 (not g * floor(10 / 4) = 0, 2, 4, 6).
    assert uniform_offsets(4, 10, 4, generator()).tolist() == [0, 2, 5, 7]
    assert uniform_offsets(4, 10, 1, generator()).tolist() == [0, 0, 0, 0]
    assert uniform_offsets(10, 10, 10, generator()).tolist() == list(range(10))


@pytest.mark.parametrize("horizon, groups", [(200, 20), (1000, 42), (103, 5), (7, 7)])
def test_uniform_offsets_use_every_group_and_stay_below_the_horizon(horizon, groups):
    offsets = uniform_offsets(3 * groups, horizon, groups, generator())
    distinct = offsets.unique()
    assert len(distinct) == groups
    assert int(offsets.min()) >= 0
    assert int(offsets.max()) < horizon
    gaps = distinct.diff()
    assert int(gaps.max() - gaps.min()) <= 1, "distances differ by at most one step"


def test_random_offsets_fill_the_range_and_ignore_groups():
    offsets = random_offsets(4000, 10, 2, generator())
    assert sorted(offsets.unique().tolist()) == list(range(10))
    # 4000 draws, p = .1: 400 each, standard deviation 19; six of them.
    assert (offsets.bincount() - 400).abs().max() < 6 * 19


def test_random_offsets_follow_the_seed():
    a, b, other = (random_offsets(64, 1000, 1, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
def test_every_allocation_gives_whole_steps_on_the_cpu(name):
    offsets = ALLOCATIONS[name](5, 12, 3, generator())
    assert (offsets.shape, offsets.dtype, offsets.device.type) == ((5,), torch.int64, "cpu")
    assert ((offsets >= 0) & (offsets < 12)).all()
