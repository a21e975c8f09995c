"""Cycles in a series, explained variance by phase, and forgetting, worked by hand."""

import math
import random

import pytest
import torch

from rl_stagger.algorithms.gae import explained_variance
from rl_stagger.resets.nonstationarity import (
    ForgettingTracker,
    PhaseBins,
    cyclic_index,
    cyclic_metrics,
    cyclic_window,
    explained_variance_by_bin,
    find_cycle,
)

CPU = torch.device("cpu")
NAN = float("nan")


def white(count, seed=0):
    draw = random.Random(seed)
    return [draw.gauss(0.0, 1.0) for _ in range(count)]


def sawtooth(count, horizon, rollout):
    """Steps into the episode at which each iteration begins."""
    return [float(i * rollout % horizon) for i in range(count)]


# -- cyclic index -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("horizon, rollout", [(200, 10), (40, 10), (20, 10)])
def test_a_pure_cycle_of_any_waveform_is_all_cyclic(horizon, rollout):
    count = 6 * horizon // rollout
    saw = sawtooth(count, horizon, rollout)
    for series in (saw, [float(x == 0) for x in saw], [math.sin(2 * math.pi * x / horizon + 1) for x in saw]):
        assert cyclic_index(series, horizon, rollout) == pytest.approx(1.0)
    # offset, scale and a straight line, as of learning, change nothing: the running mean takes the line with it
    tilted = [1e3 + 7.0 * x + 100.0 * i for i, x in enumerate(saw)]
    assert cyclic_index(tilted, horizon, rollout) == pytest.approx(1.0)


@pytest.mark.parametrize("horizon, rollout", [(100, 24), (101, 20), (25, 10)])
def test_a_period_that_is_not_whole(horizon, rollout):
    # Places are ceil(H / K) wide steps, and the sawtooth climbs within each of b places: a share of about 1 / b^2 is
    # seen as noise, 1/25 for H = 100, K = 24.
    bins = math.ceil(horizon / rollout)
    count = 10 * bins
    got = cyclic_index(sawtooth(count, horizon, rollout), horizon, rollout)
    assert 1.0 - 2.5 / bins**2 < got <= 1.0
    fine = cyclic_index(sawtooth(count * 4, horizon, rollout), horizon, rollout, num_bins=horizon)
    assert fine == pytest.approx(1.0, abs=0.05), "with a place for every step nothing is left inside"
    # folded by a whole number of iterations instead, the cycle would run out of step
    assert cyclic_index(sawtooth(count, horizon, rollout), bins * rollout, rollout) < got


@pytest.mark.parametrize("horizon, rollout, count", [(200, 10, 100), (40, 10, 36), (100, 24, 36), (200, 10, 400)])
def test_noise_is_not_cyclic(horizon, rollout, count):
    found = [cyclic_index(white(count, seed), horizon, rollout) for seed in range(40)]
    assert sum(found) / len(found) < 0.12
    assert found.count(0.0) > 8, "what chance gives is taken off, so that half of them would be negative"


def test_learning_progress_is_not_cyclic():
    curve = [1.0 / (1.0 + math.exp(-(i - 100) / 20)) for i in range(200)]
    assert find_cycle(curve, 200, 10).swing < 0.01
    noisy = [x + 0.05 * e for x, e in zip(curve, white(200))]
    assert cyclic_index(noisy, 200, 10) < 0.15


def test_half_cycle_half_noise_by_hand():
    # H / K = 2: a = 1, -1, 1, ... and b that is +1 in two iterations, -1 in the next two: var 1 each. The mean over
    # one period is (x[i-1] / 2 + x[i] + x[i+1] / 2) / 2, so of a nothing is taken and of b half or nothing:
    # b = 1 1 -1 -1 1 1 ...: (1/2 + 1 - 1/2) / 2 = 1/2, rest 1/2. Rest = a + b / 2: variances 1 and 1/4, share .8.
    # Chance: 1 of n * (1 - 1/2) values, n = 398: .8 -> (.8 - 1/199) / (1 - 1/199).
    series = [float((-1) ** i + (1 if i % 4 < 2 else -1)) for i in range(400)]
    chance = 1 / 199
    got = find_cycle(series, 20, 10)
    assert got.share == pytest.approx((0.8 - chance) / (1 - chance), abs=0.005)
    # series is 2 0 0 -2: mean square 2, and the cycle's is 1
    assert got.swing == pytest.approx(math.sqrt(1 / 2), abs=0.005)


def test_the_swing_tells_a_large_cycle_from_a_small_one():
    saw = sawtooth(100, 200, 10)
    small, large = find_cycle([1000.0 + x / 1000 for x in saw], 200, 10), find_cycle(saw, 200, 10)
    assert small.share == pytest.approx(large.share) == pytest.approx(1.0)
    assert small.swing == pytest.approx(0.0577 / 1000, rel=0.01)  # std of 0 .. .19 in twenties over 1000
    # std over rms of 0 10 ... 190: sqrt(3325) / sqrt(3325 + 95^2)
    assert large.swing == pytest.approx(math.sqrt(3325 / (3325 + 95**2)))


def test_what_cannot_be_told_is_none():
    assert cyclic_index([], 200, 10) is None
    assert cyclic_index(white(59), 200, 10) is None, "two periods must be left of three"
    assert cyclic_index(white(60), 200, 10) is not None
    assert cyclic_index(white(60), 10, 10) is None, "every batch is a whole horizon"
    assert cyclic_index(white(60), 19, 10) is None, "under two iterations there is no cycle to see"
    assert cyclic_index([None] * 60, 200, 10) is None


def test_a_series_that_stands_still_has_no_cycle():
    # float32 cannot average a constant exactly: the rounding may itself come in cycles
    rounding = [6.5 + 1e-7 * (i % 3) for i in range(60)]
    for series in ([3.0] * 60, [0.0] * 60, rounding):
        assert find_cycle(series, 30, 10) == (0.0, 0.0)


def test_gaps_do_not_shift_the_cycle():
    saw = sawtooth(100, 200, 10)
    holed = [None if i in (7, 33, 34, 71) else x for i, x in enumerate(saw)]
    assert cyclic_index(holed, 200, 10) > 0.95
    assert cyclic_index([NAN if x is None else x for x in holed], 200, 10) == cyclic_index(holed, 200, 10)


def test_where_a_series_begins_matters_only_for_periods_that_are_not_whole():
    saw = sawtooth(240, 100, 24)
    later = cyclic_index(saw[3:], 100, 24, first=3)
    assert later == pytest.approx(cyclic_index(saw, 100, 24), abs=0.01)
    whole = sawtooth(100, 200, 10)
    assert cyclic_index(whole[3:], 200, 10, first=3) == pytest.approx(cyclic_index(whole[3:], 200, 10))


@pytest.mark.parametrize("horizon, rollout, window", [(200, 10, 100), (40, 10, 32), (100, 24, 32), (101, 10, 51)])
def test_window(horizon, rollout, window):
    assert cyclic_window(horizon, rollout) == window


def test_metrics_of_lines():
    saw, noise = sawtooth(60, 200, 10), white(60)
    lines = [
        {"iteration": i + 1, "batch/reward_mean": saw[i], "critic/error_rms": noise[i] if i else "Infinity"}
        for i in range(60)
    ]
    got = cyclic_metrics(lines, 200, 10)
    assert got["batch/cyclic_reward"] == pytest.approx(1.0)
    assert got["critic/cyclic_error"] < 0.5
    assert got["batch/swing_reward"] > 0.5
    assert got["critic/cyclic_error"] == cyclic_index([None, *noise[1:]], 200, 10)
    assert cyclic_metrics(lines[:20], 200, 10) == dict.fromkeys(got)
    assert cyclic_metrics(lines, None, 10) == cyclic_metrics([], 200, 10) == {}


# -- phase by phase -------------------------------------------------------------------------------------------------
def test_explained_variance_by_hand():
    # H = 8, 4 bins of 2 steps. Bin 0: targets 0 2 4 (variance 8/3), off by 1 0 -1 (2/3): 1 - 1/4. Bin 1: a constant
    # offset explains all. Bin 2: empty. Bin 3: one row does not vary.
    phase = torch.tensor([0, 1, 1, 2, 3, 7, 4])
    target = torch.tensor([0.0, 2, 4, 10, 20, 5, NAN])
    value = torch.tensor([1.0, 2, 3, 0, 10, 9, NAN])
    valid = torch.tensor([True] * 6 + [False])
    got = explained_variance_by_bin(value, target, phase, valid, 8, 4)
    assert got.dtype == torch.float32
    assert got[:2].tolist() == pytest.approx([0.75, 1.0])
    assert torch.isnan(got[2:]).all()


def test_every_bin_equals_the_explained_variance_of_its_rows():
    draw = torch.Generator().manual_seed(0)
    phase = torch.randint(0, 30, (7, 50), generator=draw)
    target = torch.randn(7, 50, generator=draw) * 3 + phase
    value = target + torch.randn(7, 50, generator=draw)
    valid = torch.rand(7, 50, generator=draw) < 0.7
    got = explained_variance_by_bin(value, target, phase, valid, 30, 6)
    for i in range(6):
        rows = valid & (phase // 5 == i)
        assert float(got[i]) == pytest.approx(float(explained_variance(value, target, rows)), abs=1e-5)


def test_bins_of_nothing():
    bins = PhaseBins(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool), 8, 4)
    assert bins.count.tolist() == [0.0] * 4
    assert torch.isnan(bins.means(torch.ones(2, 3))).all()
    assert torch.isnan(torch.cat(bins.moments(torch.ones(2, 3)))).all()


# -- forgetting -------------------------------------------------------------------------------------------------------
def follow(levels, **more):
    """Events of one bin that is seen once an iteration, with all the rows there are: its level is the last reward."""
    tracker = ForgettingTracker(1, 10, CPU, **more)
    rows = torch.tensor([10.0], dtype=torch.float64)
    return [int(tracker.add(torch.tensor([x], dtype=torch.float64), rows)) for x in levels]


@pytest.mark.parametrize("shift", [0.0, -100.0])
def test_one_fall_is_one_event(shift):
    # From 0 to 8: a quarter is lost under 6, back is from 7 on. 7.5 and 6 are no fall; 5 and 1 are one; 6.5 is not
    # back yet, so 4 is still the same fall; 7.5 is back, so 3 is the next. At -100 the same.
    levels = [0, 8, 7.5, 6, 5, 1, 6.5, 4, 7.5, 3]
    assert follow([x + shift for x in levels]) == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_a_higher_best_asks_for_more():
    # Best 8, fall to 5, back at 8, best 16: now 11.9 has lost more than a quarter.
    assert follow([0, 8, 5, 8, 16, 12, 11.9]) == [0, 0, 1, 0, 0, 0, 1]


def test_a_smaller_drop_counts_more():
    levels = [0.0, 10.0, 9.0, 10.0, 8.0]
    assert sum(follow(levels)) == 0
    assert follow(levels, drop=0.15) == [0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match=r"drop=1.5: above 0 and below 1"):
        follow(levels, drop=1.5)


def test_rounding_is_nothing_lost():
    assert sum(follow([5.0, 5.0 + 1e-7, 5.0, 5.0 - 1e-7, 5.0])) == 0


def test_a_level_has_the_same_memory_however_the_batch_is_mixed():
    # 12 rows: one batch of 12 rows of a bin, or three batches with 4 rows each. Three of 3, 3 and 3 are an average of 3
    # from the third on; then a new batch of 9 counts a third: 3 + (9 - 3) / 3 = 5. All 12 at once: 9.
    def level(batches):
        tracker = ForgettingTracker(1, 12, CPU)
        for reward, rows in batches:
            tracker.add(torch.tensor([reward], dtype=torch.float64), torch.tensor([rows], dtype=torch.float64))
        return float(tracker.level)

    assert level([(3.0, 4.0)] * 3 + [(9.0, 4.0)]) == pytest.approx(5.0)
    assert level([(3.0, 12.0), (9.0, 12.0)]) == pytest.approx(9.0)
    assert level([(1.0, 4.0), (5.0, 8.0)]) == pytest.approx((4 + 40) / 12), "a plain mean until all rows were seen"


def test_a_bin_that_is_not_in_the_batch_stands_still():
    tracker = ForgettingTracker(2, 4, CPU)
    rows = torch.tensor([4.0, 0.0], dtype=torch.float64)
    for x in (0.0, 8.0):
        tracker.add(torch.tensor([x, NAN], dtype=torch.float64), rows)
    assert tracker.level.tolist() == [8.0, 0.0]
    assert int(tracker.add(torch.tensor([NAN, 1.0], dtype=torch.float64), rows.flip(0))) == 0
    assert tracker.level.tolist() == [8.0, 1.0]
    assert int(tracker.add(torch.tensor([2.0, NAN], dtype=torch.float64), rows)) == 1


def test_bins_that_gained_next_to_nothing_are_not_judged():
    tracker = ForgettingTracker(2, 1, CPU)
    rows = torch.ones(2, dtype=torch.float64)
    events = [int(tracker.add(torch.tensor([x, y], dtype=torch.float64), rows)) for x, y in [(0, 0), (10, 0.5), (9, 0)]]
    assert events == [0, 0, 0]
    assert int(tracker.add(torch.tensor([9.0, 5.0], dtype=torch.float64), rows)) == 0
    assert int(tracker.add(torch.tensor([9.0, 0.0], dtype=torch.float64), rows)) == 1


def test_forgetting_goes_on_from_its_state():
    draw = torch.Generator().manual_seed(0)
    rewards, rows = torch.rand(40, 3, generator=draw, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    one, other = ForgettingTracker(3, 2, CPU), ForgettingTracker(3, 2, CPU)
    for reward in rewards[:20]:
        one.add(reward, rows)
    other.load_state_dict(one.state_dict())
    events = [int(one.add(reward, rows)) for reward in rewards[20:]]
    assert sum(events) > 3
    assert [int(other.add(reward, rows)) for reward in rewards[20:]] == events
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())
