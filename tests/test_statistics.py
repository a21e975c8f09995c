"""Episodes, phases and task logs, counted once each; against numbers by hand and a slow loop."""

import copy

import pytest
import torch
from helpers.toy_envs import LINEAR, TallyEnv, empty_rollout, flags

from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Collector, Estimates
from rl_stagger.statistics import SinceDone, Statistics, log_means, mean_where, read_metrics
from rl_stagger.stopwatch import Stopwatch

CPU = torch.device("cpu")
NAN = float("nan")


def statistics_for(rollout, horizon=None):
    return Statistics(rollout.num_envs, horizon, rollout.steps, CPU)


def on_host(statistics, rollout):
    return read_metrics(statistics.add(rollout))


def collect_all(env, rollout_steps, rollouts):
    """(metrics of each rollout, was_reset of all steps [T, N])."""
    model = ActorCritic(env.spec, LINEAR)
    collector = Collector(env, model, rollout_steps, True, 0, Stopwatch(CPU))
    statistics = Statistics(env.num_envs, env.spec.horizon_steps, rollout_steps, CPU)
    metrics, resets = [], []
    for _ in range(rollouts):
        metrics.append(on_host(statistics, collector.collect()))
        resets.append(collector.rollout.was_reset.clone())
    return metrics, torch.cat(resets)


# -- formulas -------------------------------------------------------------------------------------------------------
def test_totals_since_done_by_hand():
    # env 0: carry 10, x 1 2 3 4, done after t=1: 11 13 | 3 7, carry 7 on
    # env 1: carry 0,  x 1 1 1 1, done after t=0, t=1 and t=3: 1 | 1 | 1 2 |, nothing to carry
    # env 2: carry 5,  x 0 0 0 0, never done: 5 5 5 5, carry 5 on
    x = torch.tensor([[1.0, 1, 0], [2, 1, 0], [3, 1, 0], [4, 1, 0]])
    done = flags(4, 3, (1, 0), (0, 1), (1, 1), (3, 1))
    totals, carry = SinceDone(done).totals(x, torch.tensor([10.0, 0, 5]))
    assert totals.tolist() == [[11, 1, 5], [13, 1, 5], [3, 1, 5], [7, 2, 5]]
    assert carry.tolist() == [7, 0, 5]


@pytest.mark.parametrize("steps, envs", [(1, 1), (1, 6), (17, 5)])
def test_totals_since_done_equal_a_slow_loop_over_several_rollouts(steps, envs):
    draw = torch.Generator().manual_seed(0)
    carry = torch.zeros(envs, dtype=torch.int64)
    slow = [0] * envs
    for _ in range(4):
        x = torch.randint(0, 9, (steps, envs), generator=draw)
        done = torch.rand(steps, envs, generator=draw) < 0.25
        totals, carry = SinceDone(done).totals(x, carry)
        for t in range(steps):
            for n in range(envs):
                slow[n] += int(x[t, n])
                assert int(totals[t, n]) == slow[n]
                if done[t, n]:
                    slow[n] = 0
    assert carry.tolist() == slow


def test_mean_where():
    x = torch.tensor([1.0, NAN, 5.0])
    assert float(mean_where(x, torch.tensor([True, False, True]))) == 3.0
    assert torch.isnan(mean_where(x, torch.zeros(3, dtype=torch.bool)))


# -- episodes -------------------------------------------------------------------------------------------------------
def test_every_episode_is_counted_once():
    # env 0: three episodes in one rollout, of 1, 2 and 1 steps with returns 1, 5, 4 (r = 1 2 3 4), the second one cut
    # by the time limit. env 1: one of 4 steps, ending together with env 0's last: return 10.
    # Returns 1 5 4 10: mean 5, standard deviation sqrt((16 + 0 + 1 + 25) / 4) = 3.2404. Lengths 1 2 1 4: mean 2.
    rollout = empty_rollout(4, 2)
    rollout.reward.copy_(torch.tensor([[1.0, 1], [2, 2], [3, 3], [4, 4]]))
    rollout.terminated.copy_(flags(4, 2, (0, 0), (3, 0), (3, 1)))
    rollout.truncated.copy_(flags(4, 2, (2, 0)))
    rollout.phase.copy_(torch.tensor([[0, 0], [0, 1], [1, 2], [0, 3]]))
    rollout.clock.copy_(rollout.phase)
    got = on_host(statistics_for(rollout), rollout)
    assert got["episode/count"] == 4
    assert got["episode/partial_count"] == 0
    assert got["episode/return_mean"] == 5.0
    assert got["episode/return_std"] == pytest.approx(3.2403703)
    assert got["episode/length_mean"] == 2.0
    assert (got["episode/length_min"], got["episode/length_max"]) == (1.0, 4.0)
    assert (got["episode/terminated_count"], got["episode/truncated_count"]) == (3, 1)
    assert got["batch/reward_mean"] == 2.5


def test_both_flags_count_as_one_termination():
    rollout = empty_rollout(1, 1)
    rollout.terminated.fill_(True)
    rollout.truncated.fill_(True)
    got = on_host(statistics_for(rollout), rollout)
    assert (got["episode/count"], got["episode/terminated_count"], got["episode/truncated_count"]) == (1, 1, 0)


def test_an_episode_that_spans_rollouts():
    # 3 rollouts of 2 steps, r = 1: an episode of 5 steps ends in the third one, a new one is under way
    statistics = Statistics(1, None, 2, CPU)
    ages = [[0, 1], [2, 3], [4, 0]]
    for i, age in enumerate(ages):
        rollout = empty_rollout(2, 1)
        rollout.reward.fill_(1.0)
        rollout.phase.copy_(torch.tensor(age).unsqueeze(1))
        rollout.clock.copy_(rollout.phase)
        if i == 2:
            rollout.truncated[0] = True
        got = on_host(statistics, rollout)
        assert got["episode/count"] == (1 if i == 2 else 0)
        assert got["episode/return_mean"] == (5.0 if i == 2 else None)
        assert got["episode/length_min"] == (5.0 if i == 2 else None)
    assert statistics.state_dict()["length"].tolist() == [1]


def test_equals_a_slow_account_of_random_rollouts():
    draw = torch.Generator().manual_seed(0)
    envs, steps = 7, 13
    statistics = Statistics(envs, None, steps, CPU)
    age, total, length = [0] * envs, [0.0] * envs, [0] * envs
    for _ in range(5):
        rollout = empty_rollout(steps, envs)
        rollout.reward.copy_(torch.randint(-3, 4, (steps, envs), generator=draw))
        rollout.terminated.copy_(torch.rand(steps, envs, generator=draw) < 0.15)
        rollout.truncated.copy_(torch.rand(steps, envs, generator=draw) < 0.1)
        rollout.valid.copy_(torch.rand(steps, envs, generator=draw) < 0.8)
        ended = []
        for t in range(steps):
            for n in range(envs):
                rollout.phase[t, n] = rollout.clock[t, n] = age[n]
                if not rollout.valid[t, n]:
                    rollout.reward[t, n] = NAN
                    continue
                total[n], length[n], age[n] = total[n] + float(rollout.reward[t, n]), length[n] + 1, age[n] + 1
                if rollout.done[t, n]:
                    ended.append((total[n], length[n]))
                    total[n], length[n], age[n] = 0.0, 0, 0
        got = on_host(statistics, rollout)
        assert got["episode/count"] == len(ended) > 3
        assert got["episode/return_mean"] == pytest.approx(sum(r for r, _ in ended) / len(ended), abs=1e-5)
        assert got["episode/length_mean"] == pytest.approx(sum(n for _, n in ended) / len(ended))
        assert got["episode/length_max"] == max(n for _, n in ended)


def test_invalid_steps_count_nowhere():
    # The episode ends at t=0 (return 1); t=1 is frozen: NaN reward, and its flags are no second ending; t=2 and t=3 are
    # the next episode (return 2 + 3).
    rollout = empty_rollout(4, 1)
    rollout.reward.copy_(torch.tensor([[1.0], [NAN], [2.0], [3.0]]))
    rollout.terminated.copy_(flags(4, 1, (0, 0), (1, 0), (3, 0)))
    rollout.valid.copy_(~flags(4, 1, (1, 0)))
    rollout.phase.copy_(torch.tensor([[0], [99], [0], [1]]))
    rollout.clock.copy_(rollout.phase)
    rollout.success.copy_(flags(4, 1, (1, 0), (3, 0)))
    rollout.has_success = True
    got = on_host(statistics_for(rollout, horizon=4), rollout)
    assert got["episode/count"] == 2
    assert got["episode/partial_count"] == 0
    assert got["episode/return_mean"] == 3.0
    assert got["episode/length_mean"] == 1.5
    assert got["episode/success_rate"] == 0.5
    assert got["batch/reward_mean"] == 2.0
    assert got["batch/phase_histogram"] == [1.0], "one bin: K = H"


def test_success_is_read_where_full_episodes_end():
    rollout = empty_rollout(2, 3)
    rollout.success.copy_(torch.tensor([[True, True, True], [True, False, True]]))  # mid-episode successes do not count
    rollout.terminated[1, :] = True
    rollout.phase.copy_(torch.tensor([[0, 0, 4], [1, 1, 5]]))  # env 2 began midway: partial
    rollout.clock.copy_(rollout.phase)
    rollout.has_success = True
    got = on_host(statistics_for(rollout), rollout)
    assert got["episode/success_rate"] == 0.5
    assert (got["episode/count"], got["episode/partial_count"]) == (2, 1)
    rollout.has_success = False
    assert "episode/success_rate" not in on_host(statistics_for(rollout), rollout)


def test_no_episode_is_none_and_not_zero():
    got = on_host(statistics_for(empty_rollout(2, 2)), empty_rollout(2, 2))
    for name in ("return_mean", "return_std", "length_mean", "length_min", "length_max"):
        assert got[f"episode/{name}"] is None
    assert got["episode/count"] == 0


# -- partial episodes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("written", ["phase", "clock"])
def test_an_episode_that_was_not_seen_from_its_start_is_partial(written):
    rollout = empty_rollout(3, 1)
    rollout.reward.fill_(1.0)
    getattr(rollout, written).copy_(torch.tensor([[6], [7], [0]]))
    rollout.truncated.copy_(flags(3, 1, (1, 0), (2, 0)))
    got = on_host(statistics_for(rollout), rollout)
    assert (got["episode/count"], got["episode/partial_count"]) == (1, 1)
    assert got["episode/length_mean"] == 1.0, "the full one alone"
    assert got["episode/return_mean"] == 1.0


def test_partial_is_remembered_from_rollout_to_rollout():
    statistics = Statistics(1, None, 1, CPU)
    for age, ends, want in ((5, False, (0, 0)), (6, True, (0, 1)), (0, False, (0, 0)), (1, True, (1, 0))):
        rollout = empty_rollout(1, 1)
        rollout.phase.fill_(age)
        rollout.clock.fill_(age)
        rollout.terminated.fill_(ends)
        got = on_host(statistics, rollout)
        assert (got["episode/count"], got["episode/partial_count"]) == want


def test_cut_episodes_are_partial_and_the_next_is_not():
    rollout = empty_rollout(4, 1)
    rollout.reward.fill_(1.0)
    rollout.phase.copy_(torch.tensor([[0], [1], [0], [1]]))
    rollout.clock.copy_(rollout.phase)
    rollout.truncated.copy_(flags(4, 1, (1, 0), (3, 0)))
    rollout.cut.copy_(flags(4, 1, (1, 0)))
    got = on_host(statistics_for(rollout), rollout)
    assert (got["episode/count"], got["episode/partial_count"]) == (1, 1)
    assert (got["episode/cut_count"], got["episode/midway_count"]) == (1, 0)


def test_partial_episodes_are_cut_or_began_midway():
    # env 0 began midway and runs to its end; env 1 did too, but is cut; env 2 is whole.
    rollout = empty_rollout(2, 3)
    rollout.phase.copy_(torch.tensor([[5, 5, 0], [6, 6, 1]]))
    rollout.clock.copy_(rollout.phase)
    rollout.truncated[1] = True
    rollout.cut.copy_(flags(2, 3, (1, 1)))
    got = on_host(statistics_for(rollout), rollout)
    assert [got[f"episode/{name}_count"] for name in ("partial", "midway", "cut")] == [2, 1, 1]
    assert got["episode/count"] == 1


def test_a_cut_of_a_frozen_step_does_not_mark_the_next_episode():
    rollout = empty_rollout(3, 1)
    rollout.terminated.copy_(flags(3, 1, (0, 0), (2, 0)))
    rollout.valid.copy_(~flags(3, 1, (1, 0)))
    rollout.cut.copy_(flags(3, 1, (1, 0)))
    got = on_host(statistics_for(rollout), rollout)
    assert (got["episode/count"], got["episode/partial_count"]) == (2, 0)


def test_first_episodes_of_a_written_clock_do_not_bias_the_statistics():
    # stable-baselines #69: N = H = 100, clocks written to 0..99: the first episodes last 100..1 steps and 99 of them
    # are partial. Full ones last 100 steps and return 1 + 2 + ... + 100 = 5050.
    env = StaggeredResets(TallyEnv(100, 100), 10, num_groups=100, bring_up="clock")
    metrics, _ = collect_all(env, 10, 20)
    assert [m["episode/count"] for m in metrics[:9]] == [0] * 9
    assert sum(m["episode/partial_count"] for m in metrics) == 99
    assert sum(m["episode/count"] for m in metrics) == 1 + 100
    for m in metrics:
        assert m["episode/length_mean"] in (None, 100.0)
        assert m["episode/return_mean"] in (None, 5050.0)


@pytest.mark.parametrize("bring_up", ["warmup", "none"])
def test_first_episodes_of_other_bring_ups(bring_up):
    # H = 12, K = 3: four groups of five. After a warm-up those at phases 3, 6 and 9 are seen from midway: 15 partial.
    env = StaggeredResets(TallyEnv(20, 12), 3, bring_up=bring_up)
    metrics, _ = collect_all(env, 3, 8)
    assert sum(m["episode/partial_count"] for m in metrics) == (15 if bring_up == "warmup" else 0)
    assert sum(m["episode/count"] for m in metrics) == (25 if bring_up == "warmup" else 40)
    for m in metrics:
        assert m["episode/length_mean"] in (None, 12.0)


def test_a_clock_drawn_at_random_spreads_the_resets():
    # N = 512, H = 100, K = 24. Each step a hundredth of the environments is due, about 5 of 512; 3 % are 15.
    # Synchronous resets come all at once.
    env = StaggeredResets(TallyEnv(512, 100), 24, allocation="random", bring_up="clock", seed=0)
    metrics, resets = collect_all(env, 24, 13)
    assert max(m["resets/per_step_max"] for m in metrics) <= 0.03 * 512
    assert int(resets.sum(1).max()) == max(m["resets/per_step_max"] for m in metrics)
    for m in metrics:
        assert m["episode/length_mean"] in (None, 100.0)
        assert m["episode/return_mean"] in (None, 5050.0)
    assert sum(m["resets/per_step_mean"] for m in metrics) / 13 == pytest.approx(5.12, rel=0.05)
    together, _ = collect_all(StaggeredResets(TallyEnv(512, 100), 24, bring_up="none"), 24, 13)
    assert max(m["resets/per_step_max"] for m in together) == 512


def test_early_terminations_and_a_waiting_gate():
    # Episodes of 3 and 5 steps, gates every 4: env 0 is done at 3, waits one step, is reset at 4, 8, ...; env 1 is done
    # at 5, waits three, is reset at 8. In 24 steps 6 and 3 episodes, none partial, valid steps 3/4 and 5/8.
    env = StaggeredResets(TallyEnv(2, None, lengths=(3, 5)), 4, bring_up="none", gate="block")
    metrics, resets = collect_all(env, 4, 6)
    assert sum(m["episode/count"] for m in metrics) == 9
    assert sum(m["episode/partial_count"] for m in metrics) == 0
    assert {m["episode/length_min"] for m in metrics} == {3.0}
    assert {m["episode/length_max"] for m in metrics} == {3.0, 5.0}
    assert resets.sum(0).tolist() == [6, 3]
    returns = [m["episode/return_mean"] * m["episode/count"] for m in metrics]
    assert sum(returns) == pytest.approx(6 * 6 + 3 * 15)  # 1+2+3, 1+2+3+4+5
    assert [m["episode/success_rate"] for m in metrics] == [1.0, 0.5, 1.0, 0.5, 1.0, 0.5]  # env 0 always, env 1 never


# -- phases ---------------------------------------------------------------------------------------------------------
def test_coverage_and_distance_between_batches():
    # H = 4, K = 2: two bins. First batch all in the first half: coverage 0. Second half and half: coverage 1, distance
    # to the first (|1 - .5| + |0 - .5|) / 2 = .5. Third 3 : 1: -(.75 ln .75 + .25 ln .25) / ln 2 = .8112781, distance
    # .25
    statistics = Statistics(2, 4, 2, CPU)
    batches = [([[0, 0], [1, 1]], 0.0, None), ([[0, 2], [1, 3]], 1.0, 0.5), ([[0, 1], [1, 2]], 0.8112781, 0.25)]
    for phase, coverage, distance in batches:
        rollout = empty_rollout(2, 2)
        rollout.phase.copy_(torch.tensor(phase))
        got = on_host(statistics, rollout)
        assert got["batch/coverage"] == pytest.approx(coverage, abs=1e-6)
        assert got["batch/tv_distance"] == (None if distance is None else pytest.approx(distance))
    assert got["batch/phase_histogram"] == [0.75, 0.25]


def test_a_batch_in_which_everybody_waits_has_no_mixture():
    statistics = Statistics(2, 4, 2, CPU)
    found = []
    for phase, waits in ((0, False), (0, True), (2, False)):
        rollout = empty_rollout(2, 2)
        rollout.phase.fill_(phase)
        rollout.valid.fill_(not waits)
        found.append(on_host(statistics, rollout))
    assert [m["batch/coverage"] for m in found] == [0.0, None, 0.0]
    assert [m["batch/tv_distance"] for m in found] == [None, None, 1.0], "the third against the first"
    assert found[1]["batch/phase_histogram"] == [0.0, 0.0]


def test_phases_of_invalid_rows_do_not_count():
    rollout = empty_rollout(2, 2)
    rollout.phase.copy_(torch.tensor([[0, 3], [1, 3]]))
    rollout.valid[:, 1] = False
    assert on_host(statistics_for(rollout, horizon=4), rollout)["batch/phase_histogram"] == [1.0, 0.0]


def test_without_a_time_limit_there_are_no_phases():
    estimates = Estimates(*torch.zeros(3, 2, 2))
    got = read_metrics(statistics_for(empty_rollout(2, 2)).add(empty_rollout(2, 2), estimates))
    assert not [name for name in got if name.startswith("batch/") and name != "batch/reward_mean"]
    assert not [name for name in got if name.endswith("by_phase")]
    assert got["critic/error_rms"] == 0.0


def test_reward_and_critic_by_phase():
    # H = 4, K = 2: phases 0 1 | 2 3. Env 0 in the first half: rewards 1 3, errors target - V 1 -1. Env 1 in the second:
    # rewards 5 and (frozen) NaN, error 3. All errors: sqrt((1 + 1 + 9) / 3). Targets 2 4 in the first half, variance 1;
    # errors vary by 1: explained 0. One row in the second: cannot vary.
    rollout = empty_rollout(2, 2)
    rollout.phase.copy_(torch.tensor([[0, 2], [1, 3]]))
    rollout.reward.copy_(torch.tensor([[1.0, 5.0], [3.0, NAN]]))
    rollout.valid.copy_(~flags(2, 2, (1, 1)))
    target = torch.tensor([[2.0, 7.0], [4.0, NAN]])
    error = torch.tensor([[1.0, 3.0], [-1.0, NAN]])
    estimates = Estimates(target - error, target, error)
    got = read_metrics(statistics_for(rollout, horizon=4).add(rollout, estimates))
    assert got["batch/reward_by_phase"] == [2.0, 5.0]
    assert got["critic/error_by_phase"] == [1.0, 3.0]
    assert got["critic/error_rms"] == pytest.approx((11 / 3) ** 0.5)
    assert got["critic/explained_variance_by_phase"] == [0.0, None]
    rollout.valid[0, 1] = False
    got = read_metrics(statistics_for(rollout, horizon=4).add(rollout, estimates))
    assert got["batch/reward_by_phase"] == [2.0, None]
    assert got["critic/error_by_phase"] == [1.0, None]


def test_forgetting_is_counted_phase_by_phase():
    # Two bins, one batch [2, 2] holds 2 rows of each: half of a level. The first half of the horizon goes 0 0 8 8 8 8,
    # level 0 0 4 6 7 7.5, then is given nothing: 3.75, under 3/4 of the best. The second half learns and stays.
    statistics = Statistics(2, 4, 2, CPU)
    events = []
    for first, second in [(0, 0), (0, 0), (8, 8), (8, 8), (8, 8), (8, 8), (0, 8), (0, 8), (8, 8)]:
        rollout = empty_rollout(2, 2)
        rollout.phase.copy_(torch.tensor([[0, 2], [1, 3]]))
        rollout.reward.copy_(torch.tensor([[first, second], [first, second]]))
        events.append(on_host(statistics, rollout)["batch/forgetting_events"])
    assert events == [0, 0, 0, 0, 0, 0, 1, 0, 0]


def test_frozen_share():
    rollout = empty_rollout(2, 4)
    rollout.frozen.copy_(flags(2, 4, (0, 1), (1, 1), (1, 2)))
    assert on_host(statistics_for(rollout), rollout)["resets/frozen_share"] == 3 / 8


def test_a_waiting_gate_freezes_what_is_not_valid():
    env = StaggeredResets(TallyEnv(2, None, lengths=(3, 5)), 4, bring_up="none", gate="block")
    metrics, _ = collect_all(env, 4, 6)
    # env 0 waits 1 step of 4, env 1 3 of 8 (see above)
    assert sum(m["resets/frozen_share"] for m in metrics) / 6 == pytest.approx((1 / 4 + 3 / 8) / 2)


def test_resets_per_step():
    rollout = empty_rollout(3, 4)
    rollout.was_reset.copy_(flags(3, 4, (0, 0), (2, 0), (2, 1), (2, 3)))
    got = on_host(statistics_for(rollout), rollout)
    assert got["resets/per_step_max"] == 3.0
    assert got["resets/per_step_mean"] == pytest.approx(4 / 3)


# -- task logs ------------------------------------------------------------------------------------------------------
def means(logs, valid):
    return read_metrics(log_means(logs, valid, CPU))


def test_task_logs_are_means_per_event():
    # Isaac Lab #2977, mjlab PR #960: an entry on some steps only counts there, and is neither dropped nor counted twice
    valid = torch.ones(3, 2, dtype=torch.bool)
    logs = [
        {"every": 1.0, "vector": torch.tensor([1.0, 2.0])},
        {"every": torch.tensor(2.0), "sparse": 10},
        {"every": torch.tensor([6.0]), "vector": torch.tensor([3.0, 10.0]), "late": torch.tensor(True)},
    ]
    assert means(logs, valid) == {"task/every": 3.0, "task/late": 1.0, "task/sparse": 10.0, "task/vector": 4.0}


def test_nan_in_a_task_log_is_no_event():
    valid = torch.ones(2, 2, dtype=torch.bool)
    logs = [{"v": torch.tensor([NAN, 2.0]), "s": NAN, "n": NAN}, {"v": torch.tensor([4.0, NAN]), "s": 7.0, "n": NAN}]
    assert means(logs, valid) == {"task/n": None, "task/s": 7.0, "task/v": 3.0}


def test_task_logs_of_invalid_rows_do_not_count():
    valid = torch.tensor([[True, False], [True, True]])
    logs = [{"v": torch.tensor([1.0, 100.0])}, {"v": torch.tensor([[2.0], [3.0]])}]
    assert means(logs, valid) == {"task/v": 2.0}


def test_a_key_may_be_a_scalar_on_one_step_and_a_vector_on_another():
    # three events: 1, 2 and 6
    logs = [{"x": torch.tensor([1.0, 2.0])}, {"x": 6.0}]
    assert means(logs, torch.ones(2, 2, dtype=torch.bool)) == {"task/x": 3.0}


def test_a_log_of_another_size_is_refused_by_name():
    with pytest.raises(ValueError, match=r"info\['log'\]\['odd'\] has shape \(3,\)"):
        means([{"odd": torch.zeros(3)}], torch.ones(1, 2, dtype=torch.bool))


def test_logs_reach_the_metrics():
    rollout = empty_rollout(2, 2)
    rollout.logs = [{"height": torch.tensor([1.0, 3.0])}, {}]
    assert on_host(statistics_for(rollout), rollout)["task/height"] == 2.0


# -- state and host ---------------------------------------------------------------------------------------------------
def test_state_round_trip_continues_episodes_or_begins_anew():
    def rollout_of(age, ends):
        rollout = empty_rollout(1, 1)
        rollout.reward.fill_(1.0)
        rollout.phase.fill_(age)
        rollout.clock.fill_(age)
        rollout.terminated.fill_(ends)
        return rollout

    statistics = Statistics(1, 4, 1, CPU)
    statistics.add(rollout_of(0, False))
    saved = copy.deepcopy(statistics.state_dict())
    same = on_host(statistics, rollout_of(1, True))
    for episodes_too, age, length in ((True, 1, 2.0), (False, 0, 1.0)):
        other = Statistics(1, 4, 1, CPU)
        other.load_state_dict(saved, episodes_too)
        assert torch.equal(other.state_dict()["forgetting_level"], saved["forgetting_level"])
        got = on_host(other, rollout_of(age, True))
        assert got["episode/length_mean"] == length
        assert got["batch/tv_distance"] is not None
        if episodes_too:
            assert got == same


def test_read_metrics_types():
    got = read_metrics(
        {
            "count": torch.tensor(3),
            "big": torch.tensor(2**40 + 1),
            "flag": torch.tensor(True),
            "mean": torch.tensor(2.0),
            "none": torch.tensor(NAN),
            "bins": torch.tensor([0.5, NAN]),
            "one_bin": torch.tensor([1.0]),
            "infinite": torch.tensor(float("inf")),
        }
    )
    want = {
        "count": 3,
        "big": 2**40 + 1,
        "flag": 1,
        "mean": 2.0,
        "none": None,
        "bins": [0.5, None],
        "one_bin": [1.0],
        "infinite": float("inf"),
    }
    assert got == want
    assert {name: type(value) for name, value in got.items()} == {name: type(value) for name, value in want.items()}
