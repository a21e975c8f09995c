"""Evaluation: exactly one first episode per environment, intervals, and a run from end to end."""

import json
import math

import pytest
import torch
from helpers.toy_envs import TallyEnv
from scipy import stats

from rl_stagger.config import load_config
from rl_stagger.envs.base import Step
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CheckpointError, ConfigError
from rl_stagger.evaluate import (
    PHASE_BINS,
    EvaluateConfig,
    describe_episodes,
    evaluate_run,
    first_episodes,
    mean_interval,
    share_interval,
)
from rl_stagger.runner import Runner


def stand_still(obs):
    return torch.zeros(obs["policy"].shape[0], 1)


class Changed(TallyEnv):
    """A TallyEnv whose steps go through `change(step, t)` first, t from 0."""

    def __init__(self, change, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.change, self.t = change, -1

    def step(self, action) -> Step:
        self.t += 1
        return self.change(super().step(action), self.t)


# -- first episodes -------------------------------------------------------------------------------------------------
def test_exactly_one_episode_of_each_environment_counts():
    # Rewards 1 2 3 ...; episodes of 1, 2 and 40 steps: the first two environments play on but count once:
    # returns 1, 3, 40 * 41 / 2 = 820
    episodes = first_episodes(TallyEnv(3, 40, lengths=(1, 2, 0)), stand_still)
    assert episodes.returns.tolist() == [1.0, 3.0, 820.0]
    assert episodes.lengths.tolist() == [1, 2, 40]
    assert episodes.finished.all()


@pytest.mark.parametrize("length", [31, 32, 33, 100])
def test_stopping_early_loses_nothing(length):
    episodes = first_episodes(TallyEnv(2, 100, lengths=(3, length)), stand_still)
    assert episodes.lengths.tolist() == [3, length]
    assert float(episodes.returns[1]) == length * (length + 1) / 2


def test_it_stops_once_all_are_done():
    env = Changed(lambda step, t: step, 2, 10_000, lengths=(3, 5))
    first_episodes(env, stand_still)
    assert env.t + 1 == 32


def test_success_is_read_in_the_step_that_ends_the_episode():
    # env 0: seen before, not at the end. env 1: at the end only. env 2: only in its second episode. env 3: throughout.
    def change(step, t):
        step.info["success"] = torch.tensor([t == 0, t == 2, t == 5, True])
        return step

    episodes = first_episodes(Changed(change, 4, 3), stand_still)
    assert episodes.success is not None
    assert episodes.success.tolist() == [False, True, False, True]


def test_a_task_that_does_not_know_success():
    def change(step, t):
        del step.info["success"]
        return step

    episodes = first_episodes(Changed(change, 2, 3), stand_still)
    assert episodes.success is None
    assert "success" not in describe_episodes(episodes, 3)


def test_reward_by_phase():
    # H = 20: two steps a bin. env 0 ends after 5 steps, env 1 at 20. Rewards t + 1.
    # bin 0: 1 2 of both: 1.5. bin 2: 5 of both, 6 of env 1: 16 / 3. bin 3: 7 8 of env 1: 7.5. bin 9: 19 20.
    episodes = first_episodes(TallyEnv(2, 20, lengths=(5, 0)), stand_still)
    assert episodes.phase_reward.tolist() == pytest.approx([1.5, 3.5, 16 / 3, 7.5, 9.5, 11.5, 13.5, 15.5, 17.5, 19.5])
    assert episodes.phase_share.tolist() == [1.0, 1.0, 1.0] + [0.5] * 7


@pytest.mark.parametrize("max_steps, bins", [(10, 5), (500, 10)])
def test_phases_are_parts_of_the_time_limit_whatever_max_steps_is(max_steps, bins):
    episodes = first_episodes(TallyEnv(2, 20), stand_still, max_steps)
    want = [1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5, 15.5, 17.5, 19.5]
    assert episodes.phase_reward.tolist() == want[:bins] + [0.0] * (PHASE_BINS - bins)
    assert episodes.phase_share.tolist() == [1.0] * bins + [0.0] * (PHASE_BINS - bins)


def test_invalid_steps_do_not_count():
    def change(step, t):
        if t == 1:
            step.valid = torch.tensor([False, True])
            step.reward = torch.tensor([float("nan"), 2.0])
        return step

    # env 0 without its step 1: 1 + 3 + 4; its clock went on, so it ends at H = 4 all the same
    episodes = first_episodes(Changed(change, 2, 4), stand_still)
    assert episodes.returns.tolist() == [8.0, 10.0]
    assert episodes.lengths.tolist() == [3, 4]
    assert torch.isfinite(episodes.phase_reward).all()


def test_no_time_limit_needs_max_steps():
    with pytest.raises(ConfigError, match="max_steps=null: this task has no time limit"):
        first_episodes(TallyEnv(2, None), stand_still)
    episodes = first_episodes(TallyEnv(2, None, lengths=(2, 0)), stand_still, max_steps=3)
    assert episodes.finished.tolist() == [True, False]


def test_unfinished_episodes_are_reported_and_enter_no_mean():
    episodes = first_episodes(TallyEnv(4, None, lengths=(2, 3, 0, 0)), stand_still, max_steps=5)
    report = describe_episodes(episodes, None)
    assert (report["episodes"], report["unfinished"]) == (2, 2)
    assert report["length"]["mean"] == 2.5
    assert report["return"]["mean"] == 4.5  # 1 + 2 and 1 + 2 + 3
    assert report["success"]["mean"] == 0.5
    assert report["horizon_steps"] is None


@pytest.mark.parametrize("lengths", [(0, 0), (2, 0)])
def test_reports_are_json_even_with_too_few_episodes_for_an_interval(lengths):
    report = describe_episodes(first_episodes(TallyEnv(2, None, lengths), stand_still, max_steps=3), None)
    json.dumps(report, allow_nan=False)
    assert report["return"]["low"] is None
    assert report["return"]["mean"] == (3.0 if any(lengths) else None)


# -- intervals ------------------------------------------------------------------------------------------------------
def test_mean_interval_by_hand():
    # 1 2 3: mean 2, standard deviation 1, error 1 / sqrt 3; Student's t for 2 degrees of freedom 4.302653
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.0 - 2.4841377, 2.0 + 2.4841377))
    assert mean_interval([4.0, 4.0]) == (4.0, 4.0, 4.0)
    mean, low, high = mean_interval([4.0])
    assert mean == 4.0
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_mean_interval_equals_scipys(level):
    values = torch.randn(30, generator=torch.Generator().manual_seed(0)).double().tolist()
    want = stats.t.interval(level, 29, loc=sum(values) / 30, scale=stats.sem(values))
    assert mean_interval(values, level)[1:] == pytest.approx(want)


@pytest.mark.parametrize("hits, n", [(0, 10), (3, 10), (10, 10), (499, 500)])
def test_share_interval_equals_scipys(hits, n):
    want = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    share, low, high = share_interval(hits, n)
    assert share == hits / n
    assert (low, high) == pytest.approx((want.low, want.high), abs=1e-9)
    assert 0.0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1.0


def test_share_interval_by_hand():
    # none of 10: z^2 / (n + z^2) with z = 1.959964
    assert share_interval(0, 10) == pytest.approx((0.0, 0.0, 3.841459 / 13.841459))


# -- a run ----------------------------------------------------------------------------------------------------------
def train(run_dir, task, *more):
    quiet = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false", "device=cpu"]
    config = load_config([f"task={task}", f"run_dir={run_dir}", "num_envs=8", "rollout_steps=5", "iterations=2",
                          "model.actor_hidden=[8]", "model.critic_hidden=[8]", *quiet, *more])  # fmt: skip
    env = make_env(config.task.name, config.num_envs, "cpu", config.seed, **config.task.settings)
    return Runner(env, config).learn().run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run") / "pendulum", "pendulum", "task.settings.horizon_steps=20")


def test_a_run_is_evaluated_deterministically_and_stochastically(run_dir, capsys):
    report = evaluate_run(EvaluateConfig(str(run_dir), episodes=16))
    written = json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))
    assert written == report
    assert report["iteration"] == 2
    assert report["task"] == "pendulum"
    for kind in ("deterministic", "stochastic"):
        part = report[kind]
        assert (part["episodes"], part["unfinished"], part["horizon_steps"]) == (16, 0, 20)
        assert part["length"] == {"mean": 20.0, "low": 20.0, "high": 20.0}
        assert part["return"]["low"] < part["return"]["mean"] < part["return"]["high"] < 0
        assert [p["running_share"] for p in part["phase"]] == [1.0] * PHASE_BINS
        rewards = [p["reward_per_step"] for p in part["phase"]]
        assert 20 * sum(rewards) / PHASE_BINS == pytest.approx(part["return"]["mean"], rel=1e-5)
    assert report["deterministic"]["return"] != report["stochastic"]["return"]
    printed = capsys.readouterr().out
    assert "deterministic" in printed
    assert "evaluation.json" in printed


def test_evaluations_repeat_and_depend_on_their_seed(run_dir):
    one, two = (evaluate_run(EvaluateConfig(str(run_dir), episodes=8)) for _ in range(2))
    assert one == two
    other = evaluate_run(EvaluateConfig(str(run_dir), episodes=8, seed=7))
    assert other["stochastic"]["return"] != one["stochastic"]["return"]
    assert other["deterministic"]["return"] != one["deterministic"]["return"]


def test_one_kind_alone_and_a_single_checkpoint(run_dir):
    checkpoint = sorted((run_dir / "checkpoints").glob("iter_*.pt"))[-1]
    report = evaluate_run(EvaluateConfig(str(checkpoint), episodes=4, policy="stochastic"))
    assert "stochastic" in report
    assert "deterministic" not in report
    assert report["checkpoint"] == str(checkpoint)
    assert (run_dir / "evaluation.json").is_file()


def test_the_evaluated_policy_is_the_trained_one_with_its_normaliser(run_dir):
    # The same episodes played by hand with the checkpoint's model
    from rl_stagger.checkpoint import load_checkpoint
    from rl_stagger.config import build_config
    from rl_stagger.models.actor_critic import ActorCritic

    state = load_checkpoint(sorted((run_dir / "checkpoints").glob("iter_*.pt"))[-1])
    assert float(state["model"]["normalizers.policy.count"]) == 2 * 8 * 5
    env = make_env("pendulum", 4, "cpu", 10_000, horizon_steps=20)
    model = ActorCritic(env.spec, build_config(state["config"]).model)
    model.load_state_dict(state["model"])
    want = first_episodes(env, model.act_mode).returns.mean()
    report = evaluate_run(EvaluateConfig(str(run_dir), episodes=4, policy="deterministic"))
    assert report["deterministic"]["return"]["mean"] == pytest.approx(float(want))


def test_a_task_without_time_limit_needs_max_steps(tmp_path):
    folder = train(tmp_path / "bandit", "helpers.toy_envs:Bandit", "reset=synchronous")
    with pytest.raises(ConfigError, match="max_steps=null: this task has no time limit"):
        evaluate_run(EvaluateConfig(str(folder), episodes=4))
    report = evaluate_run(EvaluateConfig(str(folder), episodes=4, max_steps=5))
    assert report["deterministic"]["length"]["mean"] == 1.0
    assert report["deterministic"]["horizon_steps"] is None


def test_settings_that_cannot_work_are_named(tmp_path):
    for settings, text in (
        ({"episodes": 1}, "episodes=1"),
        ({"policy": "greedy"}, "policy=greedy"),
        ({"max_steps": 0}, "max_steps=0"),
    ):
        with pytest.raises(ConfigError, match=text):
            evaluate_run(EvaluateConfig(run=str(tmp_path), **settings))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        evaluate_run(EvaluateConfig(run=str(tmp_path)))
    assert "run=" in EvaluateConfig.usage()


# -- difficulty -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def graded_run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("graded") / "run", "helpers.graded_env:Graded", "reset=synchronous")


def test_each_level_and_each_case_apart(graded_run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    config = EvaluateConfig(str(graded_run), episodes=4, policy="deterministic", difficulty=[2, 0])
    hard, easy = evaluate_run(config)["deterministic"]["difficulties"]
    # 4 steps of 10 * level + 1 on stairs, of 10 * level - 1 on a slope
    assert (hard["difficulty"], hard["return"]["mean"]) == (2, 80.0)
    assert {case: part["return"]["mean"] for case, part in hard["cases"].items()} == {"stairs": 84.0, "slope": 76.0}
    assert {case: part["episodes"] for case, part in easy["cases"].items()} == {"stairs": 2, "slope": 2}
    assert easy["return"]["mean"] == 0.0
    printed = capsys.readouterr().out
    assert "difficulty" in printed
    assert "84.00" in printed
    whole = evaluate_run(EvaluateConfig(str(graded_run), episodes=4, policy="deterministic", difficulty="all"))
    assert [part["difficulty"] for part in whole["deterministic"]["difficulties"]] == [0, 1, 2]
    assert whole["deterministic"]["difficulties"][2] == hard


def test_without_a_level_it_is_judged_where_training_had_come_to(graded_run):
    # Training reset all once, and that brought it to level 0; a curriculum that still moved would be at 1 by now.
    report = evaluate_run(EvaluateConfig(str(graded_run), episodes=4, policy="deterministic"))["deterministic"]
    assert report["return"]["mean"] == 0.0
    assert report["cases"]["stairs"]["return"]["mean"] == 4.0


def test_levels_that_there_are_not(graded_run, run_dir):
    for difficulty, folder, text in (
        (3, graded_run, r"difficulty=3: this task has levels 0 to 2"),
        ([0, -1], graded_run, r"difficulty=-1"),
        ("hard", graded_run, r"difficulty='hard': a level"),
        ([], graded_run, r"difficulty=\[\]"),
        (0, run_dir, r"difficulty=0: this task has no levels"),
        ("all", run_dir, r"difficulty=all: this task has no levels"),
    ):
        with pytest.raises(ConfigError, match=text):
            evaluate_run(EvaluateConfig(str(folder), episodes=4, difficulty=difficulty))
