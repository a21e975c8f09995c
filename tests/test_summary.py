"""A run's few numbers, from metrics lines written by hand."""

import pytest

from rl_stagger.summary import episode_mean, percentile, summarize


def line(iteration, count=0, ret=None, length=None, success=None, ev=None, coverage=None, speed=100.0):
    return {
        "iteration": iteration,
        "steps/total": iteration * 50,
        "steps/warmup": 7,
        "time/wall_s": iteration * 0.5,
        "speed/steps_per_s": speed,
        "episode/count": count,
        "episode/return_mean": ret,
        "episode/length_mean": length,
        "episode/success_rate": success,
        "critic/explained_variance": ev,
        "batch/coverage": coverage,
    }


def test_episode_mean_weighs_by_episodes():
    # 1 episode of 10, 3 of 2 and an iteration without any: (10 + 6) / 4 = 4
    lines = [line(1, 1, 10.0), line(2), line(3, 3, 2.0)]
    assert episode_mean(lines, "episode/return_mean") == 4.0
    assert episode_mean(lines, "episode/length_mean") is None
    assert episode_mean([], "episode/return_mean") is None
    assert episode_mean([{"episode/count": 3}], "episode/success_rate") is None


@pytest.mark.parametrize(
    "values, share, want",
    [
        ([], 0.1, None),
        ([5.0], 0.1, 5.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0], 0.25, 1.5),
        ([0.0, 10.0], 0.1, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
        ([1.0, 2.0], 0.0, 1.0),
    ],
)
def test_percentile(values, share, want):
    assert percentile(values, share) == (None if want is None else pytest.approx(want))


def test_percentile_equals_numpys():
    numpy = pytest.importorskip("numpy")
    values = [float((i * 37) % 23) for i in range(17)]
    for share in (0.0, 0.1, 0.33, 0.9, 1.0):
        assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, 100 * share)))


def test_the_last_tenth_decides():
    # 40 iterations, H = 10, K = 5: the window is max(40 / 10, 10 / 5) = 4 iterations, 37 to 40: returns 37 .. 40 of one
    # episode each: mean 38.5
    lines = [line(i, 1, float(i), 10.0, 0.25 if i < 37 else 0.75) for i in range(1, 41)]
    got = summarize(lines, horizon_steps=10, rollout_steps=5)
    assert got["final_return"] == 38.5
    assert got["final_length"] == 10.0
    assert got["final_success_rate"] == 0.75
    assert got["final_episodes"] == 4
    assert got["best_return"] == 40.0
    assert (got["iterations"], got["steps_total"], got["steps_warmup"]) == (40, 2000, 7)
    assert got["wall_s"] == 20.0
    assert (got["horizon_steps"], got["rollout_steps"]) == (10, 5)


def test_the_window_is_at_least_one_horizon_long():
    # Synchronous resets, H = 100, K = 10: episodes end in every tenth iteration only. A tenth of 15 iterations would be
    # one, and hold none; the window is 10, from 6 to 15, and holds those of iteration 10.
    lines = [line(i, 8, 5.0) if i == 10 else line(i) for i in range(1, 16)]
    got = summarize(lines, horizon_steps=100, rollout_steps=10)
    assert got["final_return"] == 5.0
    assert got["final_episodes"] == 8
    uneven = summarize(lines, horizon_steps=51, rollout_steps=10)  # ceil(51 / 10) = 6, from 10 on
    assert uneven["final_episodes"] == 8
    assert summarize(lines, horizon_steps=50, rollout_steps=10)["final_episodes"] == 0


def test_a_window_longer_than_the_run_is_the_run():
    got = summarize([line(1, 2, 1.0), line(2, 2, 3.0)], horizon_steps=1000, rollout_steps=1)
    assert got["final_return"] == 2.0
    assert summarize([line(1, 2, 1.0)], horizon_steps=None, rollout_steps=1)["final_return"] == 1.0


def test_explained_variance_leaves_out_the_first_quarter():
    # 8 iterations, the first two (terrible) do not count; of 0 .1 .2 .3 .4 .5 the 10th percentile is .05; None is
    # skipped
    values = [-9.0, -9.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    lines = [line(i + 1, ev=ev) for i, ev in enumerate(values)]
    assert summarize(lines, None, 1)["explained_variance_p10"] == pytest.approx(0.05)
    lines[2] = line(3)
    assert summarize(lines, None, 1)["explained_variance_p10"] == pytest.approx(0.14)


def test_coverage_and_speed():
    lines = [line(1, coverage=0.5, speed=10.0), line(2, coverage=0.25, speed=30.0), line(3, speed=20.0)]
    got = summarize(lines, None, 1)
    assert got["coverage_min"] == 0.25
    # 3 iterations; time and steps as `line` has them
    assert got["steps_per_s"] == lines[-1]["steps/total"] / lines[-1]["time/wall_s"] == 100.0
    assert summarize([line(1)], None, 1)["coverage_min"] is None


def test_what_the_mixture_did():
    # 80 iterations with H = 20, K = 5 (P = 4); the reward's cycle begins after the first quarter, which does not count.
    lines = [
        {
            **line(i + 1),
            "batch/tv_distance": None if i == 0 else 0.25 + 0.5 * (i % 2),
            "batch/reward_mean": float(i % 4) if i >= 20 else 1000.0 * i,
            "critic/error_rms": 2.0,
            "batch/forgetting_events": 2 if i in (30, 40) else 0,
            "resets/per_step_max": 5.0 if i == 7 else 1.0,
        }
        for i in range(81)
    ]
    got = summarize(lines, horizon_steps=20, rollout_steps=5)
    assert got["tv_mean"] == 0.5
    assert got["cyclic_reward"] == pytest.approx(1.0)
    assert got["swing_reward"] == pytest.approx(
        (1.25 / 3.5) ** 0.5, rel=0.02
    )  # 0 1 2 3: variance 1.25, mean square 3.5
    assert (got["cyclic_error"], got["swing_error"]) == (0.0, 0.0)
    assert (got["forgetting_total"], got["resets_max"]) == (4, 5.0)
    bare = summarize([line(1)], 20, 5)
    names = (
        "tv_mean",
        "cyclic_reward",
        "cyclic_error",
        "swing_reward",
        "swing_error",
        "forgetting_total",
        "resets_max",
    )
    assert [bare[name] for name in names] == [None] * 7


def test_a_run_without_episodes_or_lines():
    assert summarize([], 10, 5) == {"iterations": 0}
    got = summarize([line(1), line(2)], 10, 5)
    assert got["final_episodes"] == 0
    for name in ("final_return", "final_length", "final_success_rate", "best_return", "explained_variance_p10"):
        assert got[name] is None
