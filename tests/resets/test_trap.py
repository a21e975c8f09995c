"""What the measures say of whole runs: synchronous, staggered, and a spread that is on the clocks only."""

import pytest
import torch
from helpers.toy_envs import LINEAR
from helpers.toy_envs_runner import CounterEnv, small_tree

import rl_stagger as rs
from rl_stagger.config import build_config
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.resets.coverage import phase_coverage
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Collector
from rl_stagger.run_dir import read_metrics_lines
from rl_stagger.statistics import Statistics, read_metrics
from rl_stagger.stopwatch import Stopwatch
from rl_stagger.summary import summarize

CPU = torch.device("cpu")


def batches(env, rollout_steps, rollouts, before_each):
    """(metrics, coverage of the clocks) of each batch."""
    collector = Collector(env, ActorCritic(env.spec, LINEAR), rollout_steps, True, 0, Stopwatch(CPU))
    statistics = Statistics(env.num_envs, env.spec.horizon_steps, rollout_steps, CPU)
    collector.start()
    found = []
    for _ in range(rollouts):
        before_each()
        rollout = collector.collect()
        clocks = phase_coverage(rollout.clock, env.spec.horizon_steps, statistics.num_bins)
        found.append((read_metrics(statistics.add(rollout)), clocks))
    return found


def test_clocks_that_are_rewritten_look_even_and_the_true_phase_does_not():
    # H = 12, K = 3: clocks are set to 0, 3, 6, 9 before every rollout, so that each batch has every clock. The states
    # go on as they are: a batch shows 0..2, then 3..5 (and 0..2 of the quarter whose clock ran out), 6..8, ...
    env = StaggeredResets(CounterEnv(8, horizon_steps=12), 3, bring_up="none")
    offsets = torch.arange(8) % 4 * 3
    found = batches(env, 3, 6, lambda: env.set_elapsed_steps(offsets))
    assert [clocks for _, clocks in found] == pytest.approx([1.0] * 6, abs=1e-6)
    assert found[0][0]["batch/phase_histogram"] == [1.0, 0.0, 0.0, 0.0]
    assert found[0][0]["batch/coverage"] == 0.0
    for i, (metrics, _) in enumerate(found[1:], start=1):
        want = [0.25, 0.0, 0.0, 0.0]
        want[min(i, 3)] += 0.75  # never timed out: at and past the horizon all is the last bin
        assert metrics["batch/phase_histogram"] == want
        # entropy of 1/4 and 3/4 is .8113 bits, of 2
        assert metrics["batch/coverage"] == pytest.approx(0.8112781 / 2, abs=1e-6)
    honest = StaggeredResets(CounterEnv(8, horizon_steps=12), 3, bring_up="warmup")
    assert [m["batch/coverage"] for m, _ in batches(honest, 3, 6, lambda: None)] == pytest.approx([1.0] * 6, abs=1e-6)


def run_of(run_dir, reset, iterations, **more):
    task = {"name": "skill_chain", "settings": {"horizon_steps": 40, "num_stages": 4}}
    config = build_config(small_tree(run_dir, reset, task, rollout_steps=5, iterations=iterations, **more))
    env = rs.make_env("skill_chain", config.num_envs, "cpu", 0, **config.task.settings)
    rs.Runner(env, config).learn()
    return read_metrics_lines(run_dir)


def test_cycles_and_movement_are_of_synchronous_resets(tmp_path):
    # Period H / K = 8; 96 iterations are 12 of them.
    summaries, lines = {}, {}
    for reset in ("synchronous", "staggered"):
        lines[reset] = run_of(tmp_path / reset, reset, 96, num_envs=64)
        summaries[reset] = summarize(lines[reset], horizon_steps=40, rollout_steps=5)
    together, spread = summaries["synchronous"], summaries["staggered"]
    assert together["tv_mean"] == pytest.approx(1.0)
    assert spread["tv_mean"] < 0.05
    assert together["cyclic_reward"] > spread["cyclic_reward"] + 0.3
    assert together["cyclic_error"] > spread["cyclic_error"] + 0.2
    assert together["swing_reward"] > 5 * spread["swing_reward"]
    assert together["resets_max"] == 64
    assert spread["resets_max"] == 8
    for line in lines["synchronous"]:
        seen = [x for x in line["batch/reward_by_phase"] if x is not None]
        assert len(seen) == 1, "a batch of synchronous environments knows one phase"
        assert line["batch/reward_mean"] == pytest.approx(seen[0], rel=1e-4, abs=1e-6)
    for line in lines["staggered"]:
        assert None not in line["critic/error_by_phase"]
        assert line["critic/error_rms"] > 0
    # The online index begins with the third period.
    known = [line["iteration"] for line in lines["synchronous"] if line["batch/cyclic_reward"] is not None]
    assert known == list(range(24, 97))


def test_a_resumed_run_has_the_same_cycles(tmp_path):
    straight = run_of(tmp_path / "a", "synchronous", 28)
    run_of(tmp_path / "b", "synchronous", 25)
    resumed = run_of(tmp_path / "b", "synchronous", 28, resume="latest")
    names = [name for name in straight[0] if "cyclic" in name or "swing" in name or "forgetting" in name]
    assert len(names) == 5
    for before, after in zip(straight, resumed):
        assert {name: before[name] for name in names} == {name: after[name] for name in names}
    assert straight[-1]["batch/cyclic_reward"] is not None


def test_the_cost_of_a_reset_is_of_those_that_the_rule_made(tmp_path):
    # Episodes of 8 steps, K = 4, gates every 3 steps: at every third end they are late and wait.
    task = {"name": "skill_chain", "settings": {"horizon_steps": 8, "num_stages": 2}}
    for gate in ("block", "immediate"):
        tree = small_tree(tmp_path / gate, "synchronous", task, rollout_steps=4, iterations=9)
        tree["reset"].update(gate=gate, gate_interval_steps=3)
        config = build_config(tree)
        rs.Runner(rs.make_env("skill_chain", 6, "cpu", 0, **config.task.settings), config).learn()
        lines = read_metrics_lines(tmp_path / gate)
        assert lines[0]["time/per_reset_ms"] is None
        for line in lines[1:]:
            resets = line["resets/per_step_mean"] * 4
            if gate == "block" and resets:
                assert line["time/per_reset_ms"] == pytest.approx(1000 * line["time/reset_s"] / resets)
                assert line["time/per_reset_ms"] > 0
            else:
                assert line["time/per_reset_ms"] is None
        assert sum(line["resets/per_step_mean"] > 0 for line in lines) >= 3
        assert (max(line["resets/frozen_share"] for line in lines) > 0) == (gate == "block")
