"""Offsets of the allocations, worked by hand."""

import pytest
import torch

from rl_stagger.resets.allocation import (
    ALLOCATIONS,
    Layout,
    allocate,
    default_num_groups,
    density_offsets,
    group_of_env,
    mixed_offsets,
    random_offsets,
    uniform_offsets,
)
from rl_stagger.resets.coverage import phase_histogram, total_variation


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
    assert uniform_offsets(6, 200, 4).tolist() == [0, 50, 100, 150, 0, 50]
    # H=10, 4 groups: floor(g * 10 / 4) = 0, 2, 5, 7 (not g * floor(10 / 4) = 0, 2, 4, 6).
    assert uniform_offsets(4, 10, 4).tolist() == [0, 2, 5, 7]
    assert uniform_offsets(4, 10, 1).tolist() == [0, 0, 0, 0]
    assert uniform_offsets(10, 10, 10).tolist() == list(range(10))


@pytest.mark.parametrize("horizon, groups", [(200, 20), (1000, 42), (103, 5), (7, 7)])
def test_uniform_offsets_use_every_group_and_stay_below_the_horizon(horizon, groups):
    offsets = uniform_offsets(3 * groups, horizon, groups)
    distinct = offsets.unique()
    assert len(distinct) == groups
    assert int(offsets.min()) >= 0
    assert int(offsets.max()) < horizon
    gaps = distinct.diff()
    assert int(gaps.max() - gaps.min()) <= 1, "distances differ by at most one step"


def test_random_offsets_fill_the_range_and_ignore_groups():
    offsets = random_offsets(4000, 10, generator())
    assert sorted(offsets.unique().tolist()) == list(range(10))
    # 4000 draws, p = .1: 400 each, standard deviation 19; six of them.
    assert (offsets.bincount() - 400).abs().max() < 6 * 19


def test_random_offsets_follow_the_seed():
    a, b, other = (random_offsets(64, 1000, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
def test_every_allocation_gives_whole_steps_on_the_cpu(name):
    offsets = ALLOCATIONS[name](Layout(5, 12, 3), generator())
    assert (offsets.shape, offsets.dtype, offsets.device.type) == ((5,), torch.int64, "cpu")
    assert ((offsets >= 0) & (offsets < 12)).all()


def test_mixed_offsets_by_hand():
    # 10 environments in 2 groups, 0 and 50; a share of .3 is 3 environments.
    groups = uniform_offsets(10, 100, 2)
    mixed = mixed_offsets(10, 100, 2, 0.3, generator())
    assert 0 < int((mixed != groups).sum()) <= 3
    assert torch.equal(mixed_offsets(10, 100, 2, 0.0, generator()), groups)
    everywhere = mixed_offsets(1000, 100, 2, 1.0, generator())
    assert len(everywhere.unique()) == 100


def test_density_offsets_are_its_quantiles():
    # Probabilities .1, .2, .3, .4 and ten environments, at quantiles .05, .15, ..., .95: exactly 1, 2, 3, 4 of them.
    offsets = density_offsets(10, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), generator())
    assert offsets.bincount().tolist() == [1, 2, 3, 4]
    assert offsets.tolist() != sorted(offsets.tolist()), "dealt out in random order"


LAYOUT = Layout(420, 100, 5, 0.1, torch.linspace(1, 3, 100, dtype=torch.float64) / 200)


@pytest.mark.parametrize("world_size", [2, 4, 7])
@pytest.mark.parametrize("kind", sorted(ALLOCATIONS))
def test_the_ranks_together_are_the_whole_allocation(kind, world_size):
    """Each rank has a generator of its own, seeded alike."""
    whole = allocate(kind, LAYOUT, generator(9))
    ranks = [allocate(kind, LAYOUT, generator(9), rank, world_size) for rank in range(world_size)]
    assert [len(part) for part in ranks] == [420 // world_size] * world_size
    assert torch.equal(torch.cat(ranks), whole)
    bins = [phase_histogram(part, 100, 5) for part in ranks]
    if kind in ("density", "adaptive"):  # each rank is a sample of the whole, too
        assert max(float(total_variation(b, phase_histogram(whole, 100, 5))) for b in bins) < 0.25


def test_ranks_that_cannot_be():
    with pytest.raises(ValueError, match="rank=2: between 0 and world_size - 1 = 1"):
        allocate("uniform", LAYOUT, generator(), 2, 2)
    with pytest.raises(ValueError, match="420 environments cannot be dealt evenly to 8 ranks"):
        allocate("uniform", LAYOUT, generator(), 0, 8)
