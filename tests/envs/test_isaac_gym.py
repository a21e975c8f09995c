"""IsaacGymEnv against the doubles of all ways in which IsaacGymEnvs' tasks end episodes."""

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import isaac_gym as double

import rl_stagger as rs
from rl_stagger.envs.base import Capability
from rl_stagger.envs.check import check_env
from rl_stagger.envs.isaac_gym import IsaacGymEnv
from rl_stagger.envs.isaac_gym_host import ResetStyle
from rl_stagger.envs.legged_gym import LeggedGymEnv
from rl_stagger.overrides import config_dir

N = 8
LENGTH = double.EPISODE_LENGTH
# Steps that an episode takes: Cartpole ends when progress is L - 1; Anymal when it is above L; ShadowHand's count
# begins at 1, with the step that its reset takes; AllegroKuka's is no clock.
KINDS = {
    "Cartpole": (ResetStyle.POST_PHYSICS, LENGTH - 1),
    "Anymal": (ResetStyle.POST_PHYSICS, LENGTH + 1),
    "ShadowHand": (ResetStyle.PRE_PHYSICS, LENGTH - 2),
    "AllegroKuka": (ResetStyle.PRE_PHYSICS, None),
    "AnymalTerrain": (ResetStyle.SAME_STEP, LENGTH - 1),
}
DEFERRED = [name for name, (style, _) in KINDS.items() if style is not ResetStyle.SAME_STEP]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    count = [0]

    def build(task_id: str, num_envs: int = N, **settings: Any) -> Any:
        count[0] += 1
        double.install(monkeypatch, tmp_path / f"isaacgymenvs{count[0]}")  # another process, as it were
        return IsaacGymEnv(num_envs, "cpu", 3, task_id=task_id, **settings)

    return build


def push(num_envs: int = N, strength: float = 1.0) -> torch.Tensor:
    return torch.full((num_envs, 2), strength)


@pytest.mark.parametrize("task_id", KINDS)
def test_told_apart_by_what_they_do(make: Any, task_id: str) -> None:
    env = make(task_id)
    assert (env.style, env.spec.horizon_steps) == KINDS[task_id]
    assert (Capability.FINAL_OBS in env.capabilities) == (task_id in DEFERRED)
    assert sorted(env.spec.obs_shapes) == (["critic", "policy"] if task_id == "ShadowHand" else ["policy"])


@pytest.mark.parametrize("task_id", KINDS)
@pytest.mark.parametrize("horizon_steps", [None, 7])
def test_keeps_the_contract(make: Any, task_id: str, horizon_steps: Any) -> None:
    env = make(task_id, horizon_steps=horizon_steps)
    report = check_env(env, steps=80)
    assert report.ok, str(report)
    assert not report.warnings, str(report)


@pytest.mark.parametrize("task_id", DEFERRED)
def test_the_step_that_a_reset_takes_is_invalid(make: Any, task_id: str) -> None:
    env = make(task_id)
    task = env._task
    env.reset()
    task.position[:] = torch.where(torch.arange(N) < 2, 2.0, 0.0)  # two have fallen
    step = env.step(push(strength=0.0))
    fallen = torch.arange(N) < 2
    assert torch.equal(step.terminated, fallen)
    assert not step.truncated.any()
    assert torch.equal(step.final_obs["policy"][:2, 0], torch.full((2,), 2.0))
    dummy = env.step(push())
    assert torch.equal(dummy.valid, ~fallen)
    assert torch.equal(dummy.reward == 0, fallen)
    assert (dummy.obs["policy"][:2, 0].abs() < 0.3).all()
    assert torch.equal(env.elapsed_steps, torch.where(fallen, 0, 2))


def test_lost_time_outs_are_told_by_the_counter(make: Any) -> None:
    env = make("AnymalTerrain")
    env.reset()
    for _ in range(LENGTH - 2):
        assert not env.step(push(strength=0.0)).done.any()
    step = env.step(push(strength=0.0))
    assert not env._task.extras["time_outs"].any()  # what the task itself says
    assert step.truncated.all()
    assert step.final_obs is None
    assert step.valid.all()


def test_a_success_does_not_set_the_clock_back(make: Any) -> None:
    env = make("AllegroKuka")
    env.reset()
    env.step(push(strength=0.0))
    env._task.position[:], env._task.velocity[:] = 0.3, 0.0
    step = env.step(push(strength=0.0))
    assert (env._task.progress_buf == 0).all()
    assert not step.done.any()
    assert (env.elapsed_steps == 2).all()
    env._task.successes[:] = 2
    env._task.goal[:] = -0.3  # the success before turns it to 0.3
    step = env.step(push(strength=0.0))
    assert step.terminated.all()  # all successes, long before any limit: an end of the task's own
    assert (step.info["log"]["episode_successes"] == 3).all()


def test_a_limit_without_success_truncates(make: Any) -> None:
    env = make("AllegroKuka")
    env.reset()
    env._task.goal[:] = 5.0
    for _ in range(LENGTH - 3):
        assert not env.step(push(strength=0.0)).done.any()
    assert env.step(push(strength=0.0)).truncated.all()


def test_a_clock_written_while_a_row_is_dead_counts_from_its_reset(make: Any) -> None:
    for task_id in ("Cartpole", "ShadowHand"):
        env = make(task_id)
        env.reset()
        env._task.position[0] = 2.0
        env.step(push(strength=0.0))
        horizon = env.spec.horizon_steps
        env.set_elapsed_steps(torch.full((N,), horizon - 2))
        assert not env.step(push(strength=0.0)).valid[0]
        assert int(env.elapsed_steps[0]) == horizon - 2
        assert not env.step(push(strength=0.0)).truncated[0]
        assert env.step(push(strength=0.0)).truncated[0]


def test_a_fall_in_the_last_step_before_the_limit_is_a_fall(make: Any) -> None:
    # Anymal's own time_outs would call it a time-out from progress L - 1 on; its limit is at L + 1.
    env = make("Anymal")
    env.reset()
    env.set_elapsed_steps(torch.full((N,), LENGTH - 2))
    env._task.position[0] = 2.0
    step = env.step(push(strength=0.0))
    assert env._task.extras["time_outs"][0]
    assert step.terminated[0]
    assert not step.truncated.any()


def test_neither_probing_nor_a_full_reset_moves_levels(make: Any) -> None:
    env = make("AnymalTerrain")
    assert torch.equal(env._task.terrain_levels, torch.arange(N) % 3)
    env.reset()
    assert torch.equal(env._task.terrain_levels, torch.arange(N) % 3)
    for _ in range(LENGTH):
        env.step(push(strength=0.0))
    moved = env._task.terrain_levels.clone()
    assert not torch.equal(moved, torch.arange(N) % 3)
    env.set_evaluation(True)
    for _ in range(LENGTH):
        env.step(push(strength=0.0))
    assert torch.equal(env._task.terrain_levels, moved)


def test_curricula_are_saved_and_evaluation_freezes_them(make: Any) -> None:
    first = make("AllegroKuka")
    first.reset()
    for _ in range(5):
        first.step(push())
    tolerance = first._task.success_tolerance
    saved = first.state_dict()
    second = make("AllegroKuka")
    second.load_state_dict(saved)
    assert second._task.success_tolerance == tolerance
    second.set_evaluation(True)
    step = second.step(push())  # what was shown before belongs to episodes that are gone
    assert not step.valid.any()
    assert step.info["reset"].all()
    assert second.step(push()).valid.all()
    assert second._task.success_tolerance == tolerance
    second.set_evaluation(False)
    second.step(push())
    assert second._task.success_tolerance < tolerance

    terrain = make("AnymalTerrain")
    terrain.reset()
    terrain._task.terrain_levels[:] = 2
    other = make("AnymalTerrain", num_envs=4)
    other.load_curriculum(terrain.state_dict())
    assert (other._task.terrain_levels == 2).all()
    assert (other._task.env_origins == 2).all()


def test_old_episode_numbers_are_no_events(make: Any) -> None:
    env = make("AnymalTerrain")
    env.reset()
    step = env.step(push(strength=0.0))
    assert torch.isnan(step.info["log"]["terrain_level"])
    env.set_elapsed_steps(torch.full((N,), env.spec.horizon_steps - 1))
    assert torch.isfinite(env.step(push(strength=0.0)).info["log"]["terrain_level"])


def test_random_numbers_are_its_own(make: Any) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    env = make("Cartpole")
    env.reset()
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"horizon_steps": 99}, ["horizon_steps=99", "1 to 13", "task.env.episodeLength"]),
        ({"overrides": {"task.env.episodeLenght": 9}}, ["episodeLenght"]),
        ({"task_id": "Cartpool"}, ["Cartpool"]),
    ],
)
def test_bad_settings_are_named(make: Any, settings: Any, words: Any) -> None:
    task_id = settings.pop("task_id", "Cartpole")
    with pytest.raises(rs.ConfigError) as caught:
        make(task_id, **settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("overrides", [{"task.env.episodeLength": 9}, {"task": {"env": {"episodeLength": 9}}}])
def test_overrides_reach_the_task(make: Any, overrides: Any) -> None:
    assert make("Cartpole", overrides=overrides).spec.horizon_steps == 8


def test_a_second_simulation_is_refused(make: Any) -> None:
    make("Cartpole")
    with pytest.raises(rs.ConfigError, match="another process"):
        IsaacGymEnv(N, task_id="Cartpole")


def test_without_isaac_gym_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("isaacgym", "isaacgymenvs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(rs.ConfigError, match=r"Preview 4.*3\.6 to 3\.8.*2\.4\.1"):
        IsaacGymEnv(2, task_id="Ant")


@pytest.mark.parametrize("task_id", KINDS)
@pytest.mark.parametrize("rule", ["clock", "none"])
def test_trains(make: Any, tmp_path: Path, task_id: str, rule: str) -> None:
    env = make(task_id, num_envs=16, horizon_steps=8)
    staggered = rs.StaggeredResets(env, 4, bring_up=rule)
    config = rs.load_config(
        [
            "num_envs=16", "rollout_steps=4", "iterations=4", "logging.console=off", "logging.tensorboard=false",
            "logging.curves=false", "device=cpu", "algorithm.minibatches=2", "algorithm.epochs=1",
            f"run_dir={tmp_path / 'run'}",
        ]
    )  # fmt: skip
    runner = rs.Runner(staggered, config)
    together = 0
    for _ in range(4):
        metrics = runner.iterate()
        assert metrics["fault/past_horizon"] == 0
        together = max(together, int(runner.collector.rollout.was_reset.sum(1).max()))
    if task_id != "AllegroKuka":  # there successes end episodes as they like
        assert together == (8 if rule == "clock" else 16)  # two groups of 16 rows, or one
    assert (runner.config.algorithm.bootstrap == "final_obs") == (task_id in DEFERRED)


@pytest.mark.parametrize("simulator", ["isaacgym", "legged_gym"])
def test_task_files_set_what_there_is_and_rules_that_work(simulator: str) -> None:
    names = sorted(path.stem for path in (config_dir() / "task" / simulator).glob("*.yaml") if path.stem != "any")
    factory = {"isaacgym": IsaacGymEnv, "legged_gym": LeggedGymEnv}[simulator]
    wanted = set(inspect.signature(factory).parameters) - {"num_envs", "device", "seed"}
    for name in [*names, {"isaacgym": "BallBalance", "legged_gym": "a1"}[simulator]]:
        config = rs.load_config([f"task={simulator}/{name}"])
        assert set(config.task.settings) == wanted
        assert config.task.label == f"{simulator}/{name}"
        assert config.reset.bring_up in ("clock", "none")  # what needs no reset of single environments
        assert config.num_envs * config.rollout_steps % config.algorithm.minibatches == 0
