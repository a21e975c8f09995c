"""Who moves where, worked by hand."""

import pytest
import torch

from rl_stagger.resets.seats import count_bins, rank_in_bin, seat


def bools(*rows, n=6):
    mask = torch.zeros(n, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


def test_counts():
    bins = torch.tensor([0, 0, 1, 2, 2, 2])
    assert count_bins(bins, bools(0, 2, 3, 5), 4).tolist() == [1, 1, 2, 0]


def test_ranks_count_within_each_bin_in_the_order_of_the_draw():
    bins = torch.tensor([0, 0, 1, 2, 2, 2])
    draw = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2, 0.8])
    rank = rank_in_bin(bins, bools(0, 1, 2, 3, 5), 3, draw)
    # Bin 0: env 1 (.1) before env 0 (.5). Bin 2: env 3 (.3), then env 5 (.8); env 4 is outside.
    assert [int(rank[i]) for i in (0, 1, 2, 3, 5)] == [1, 0, 0, 0, 1]


def moves(bins, wanted, free=(), movable=None, can_start=None, slack=0.0, shift=0.5, seated=None):
    """Env -> the bin it is moved to."""
    n, b = len(bins), len(wanted)
    free = bools(*free, n=n)
    seated = ~free if seated is None else bools(*seated, n=n)
    movable = seated if movable is None else bools(*movable, n=n)
    can_start = torch.ones(b, dtype=torch.bool) if can_start is None else torch.tensor(can_start)
    draw = torch.linspace(0, 0.9, n)
    found = seat(
        torch.tensor(bins), seated, free, movable, torch.tensor(wanted), can_start, slack, (draw, torch.tensor([shift]))
    )
    return {i: int(found.bin[i]) for i in range(n) if found.moved[i]}


def test_nobody_moves_where_the_bins_are_as_wanted():
    assert moves([0, 0, 1, 1, 2, 2], [2.0, 2.0, 2.0]) == {}
    assert moves([0, 0, 1, 1, 2, 2], [2.1, 1.9, 2.0]) == {}, "a fraction of an environment is no lack"


def test_too_many_here_go_where_there_are_too_few():
    # Bin 0 has 4 of 2, bin 2 none of 2: the last two of bin 0 by the draw, envs 2 and 3.
    assert moves([0, 0, 0, 0, 1, 1], [2.0, 2.0, 2.0]) == {2: 2, 3: 2}


def test_the_free_are_seated_before_anybody_is_cut():
    # Envs 0 and 1 are free. Bin 1 lacks 1, bin 2 lacks 1; bin 0 has all of its 2: nobody else has to move.
    assert moves([0, 0, 0, 0, 1, 2], [2.0, 2.0, 2.0], free=(0, 1)) == {0: 1, 1: 2}
    # Bin 2 has 3 of 1 and bin 1 none of 3; env 0 is free and takes the first seat, two of bin 2 the others.
    assert moves([0, 0, 0, 2, 2, 2], [2.0, 3.0, 1.0], free=(0,)) == {0: 1, 4: 1, 5: 1}


def test_where_there_are_more_to_seat_than_seats_the_rest_stays():
    # Four free ones, one seat (bin 1).
    assert len(moves([0, 0, 0, 0, 1, 1], [0.0, 3.0], free=(0, 1, 2, 3))) == 1


def test_where_there_are_more_seats_than_to_seat_every_bin_gets_its_share():
    # Bins 1 and 2 lack 3 each; two free ones: systematic sampling gives one to each, whatever the shift.
    for shift in (0.01, 0.5, 0.99):
        found = moves([0, 0, 0, 0, 0, 0], [0.0, 3.0, 3.0], free=(0, 1), movable=(), shift=shift)
        assert sorted(found.values()) == [1, 2]


def test_nobody_is_put_where_no_episode_can_begin():
    # Bin 2 lacks 2, bin 0 lacks none: cuts that would go nowhere are not made.
    assert moves([0, 0, 1, 1, 1, 1], [2.0, 2.0, 2.0], can_start=[True, False, False]) == {}
    # Bin 0 lacks 2, bin 1 has 2 too many: what cuts alone can do.
    assert moves([1, 1, 1, 1, 2, 2], [2.0, 2.0, 2.0], can_start=[True, False, False]) == {2: 0, 3: 0}


def test_only_the_movable_are_cut():
    assert moves([0, 0, 0, 0, 1, 1], [2.0, 2.0, 2.0], movable=(0, 1)) == {}, "those too many may not"
    assert moves([0, 0, 0, 0, 1, 1], [2.0, 2.0, 2.0], movable=(3,)) == {3: 2}


def test_who_is_not_seated_counts_nowhere():
    # Envs 4 and 5 wait at a gate: bin 1 is empty, and they are not moved.
    assert moves([0, 0, 0, 0, 1, 1], [2.0, 2.0], seated=(0, 1, 2, 3)) == {2: 1, 3: 1}


@pytest.mark.parametrize("slack, cut", [(0.0, 2), (1.0, 1), (2.0, 0)])
def test_slack_leaves_so_many_more(slack, cut):
    assert len(moves([0, 0, 0, 0, 1, 1], [2.0, 2.0, 2.0], slack=slack)) == cut


def test_many_environments_end_as_wanted():
    generator = torch.Generator().manual_seed(0)
    bins = (torch.rand(4000, generator=generator).square() * 20).long()
    wanted = torch.linspace(1, 3, 20)
    wanted = wanted / wanted.sum() * 4000
    everybody, nobody = torch.ones(4000, dtype=torch.bool), torch.zeros(4000, dtype=torch.bool)
    draws = (torch.rand(4000, generator=generator), torch.rand(1, generator=generator))
    found = seat(bins, everybody, nobody, everybody, wanted, torch.ones(20, dtype=torch.bool), 0.0, draws)
    after = torch.where(found.moved, found.bin, bins)
    assert float((count_bins(after, everybody, 20) - wanted).abs().max()) <= 1.0
    kept = count_bins(bins, ~found.moved, 20)
    before = count_bins(bins, everybody, 20)
    assert (kept >= torch.minimum(before, wanted.floor())).all(), "no more are cut than are too many"
