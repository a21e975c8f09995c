"""LeggedGymEnv against the double."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import legged_gym as double

import rl_stagger as rs
from rl_stagger.envs.check import check_env
from rl_stagger.envs.legged_gym import LeggedGymEnv

N = 8
H = 13
"""0.24 s of 0.02 s are 12 steps, and the limit comes when the count is above that."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.argv", ["train.py", "task=legged_gym/anymal_c_flat"])  # the real parser ends here
    return double.install(monkeypatch)


@pytest.fixture(params=["anymal_c_flat", "anymal_c_rough"])
def env(registry: Any, request: pytest.FixtureRequest) -> LeggedGymEnv:
    return LeggedGymEnv(N, seed=3, task_id=request.param)


@pytest.fixture
def rough(registry: Any) -> LeggedGymEnv:
    return LeggedGymEnv(N, seed=3, task_id="anymal_c_rough")


def rest(num_envs: int = N) -> torch.Tensor:
    return torch.zeros(num_envs, 2)


def test_keeps_the_contract(env: LeggedGymEnv) -> None:
    assert env.spec.horizon_steps == H
    report = check_env(env, steps=60)
    assert report.ok, str(report)
    assert not report.warnings, str(report)


def test_privileged_observations_are_the_critics(rough: LeggedGymEnv) -> None:
    assert rough.spec.obs_shapes == {"policy": (4,), "critic": (5,)}
    assert rough.reset()["critic"].shape == (N, 5)


def test_stale_time_outs_are_not_believed(env: LeggedGymEnv) -> None:
    env.reset()
    env.set_elapsed_steps(torch.full((N,), H - 1), torch.arange(N) == 2)
    assert torch.equal(env.step(rest()).truncated, torch.arange(N) == 2)
    step = env.step(rest())
    assert env._env.extras["time_outs"][2]  # what the simulator still says
    assert not step.done.any()
    env._env.position[2] = 2.0
    step = env.step(rest())
    assert step.terminated[2]
    assert not step.truncated.any()


def test_building_and_full_resets_move_no_curriculum(rough: LeggedGymEnv) -> None:
    levels, ranges = torch.arange(N) % 3, {"lin_vel_x": [-0.5, 0.5]}
    rough.reset()
    assert torch.equal(rough._env.terrain_levels, levels)
    assert rough._env.command_ranges == ranges
    rough.set_evaluation(True)
    for _ in range(H):
        rough.step(rest())
    assert torch.equal(rough._env.terrain_levels, levels)
    assert rough._env.command_ranges == ranges
    rough.set_evaluation(False)
    for _ in range(H):
        rough.step(rest())
    assert torch.equal(rough._env.terrain_levels, (levels - 1).clamp(min=0))
    assert rough._env.command_ranges["lin_vel_x"][1] > 0.5


def test_curricula_are_saved(registry: Any, rough: LeggedGymEnv) -> None:
    rough.reset()
    rough._env.terrain_levels[:] = torch.arange(N) % 4
    rough._env.command_ranges["lin_vel_x"] = [-0.7, 0.9]
    saved = rough.state_dict()
    other = LeggedGymEnv(N, seed=9, task_id="anymal_c_rough")
    other.load_state_dict(saved)
    assert torch.equal(other._env.terrain_levels, torch.arange(N) % 4)
    assert torch.equal(other._env.env_origins[:, 0], torch.arange(N) % 4.0)
    assert other._env.command_ranges == {"lin_vel_x": [-0.7, 0.9]}
    step = other.step(rest())  # what was shown before the load belongs to episodes that are gone
    assert not step.valid.any()
    assert step.info["reset"].all()
    assert other.step(rest()).valid.all()
    fewer = LeggedGymEnv(4, seed=9, task_id="anymal_c_rough")
    fewer.load_curriculum(saved)  # rows 0, 2, 4, 6 of 8
    assert fewer._env.terrain_levels.tolist() == [0, 2, 0, 2]


def test_a_fixed_difficulty_stays(rough: LeggedGymEnv) -> None:
    assert rough.difficulty_levels == 4
    rough.set_difficulty(3)
    rough.reset()
    for _ in range(2 * H):
        rough.step(rest())
    assert (rough._env.terrain_levels == 3).all()
    assert (rough._env.env_origins == 3).all()
    with pytest.raises(rs.ConfigError, match="levels 0 to 3"):
        rough.set_difficulty(4)


def test_old_episode_numbers_are_no_events(env: LeggedGymEnv) -> None:
    env.reset()
    assert torch.isnan(env.step(rest()).info["log"]["max_command_x"])


def test_overrides_reach_the_task_and_not_the_registry(registry: Any) -> None:
    env = LeggedGymEnv(
        N,
        task_id="anymal_c_flat",
        overrides={"env.episode_length_s": 0.1, "commands": {"ranges": {"lin_vel_x": [0, 0]}}},
    )
    assert env.spec.horizon_steps == 6
    assert registry.env_cfgs["anymal_c_flat"].env.episode_length_s == 0.24
    with pytest.raises(rs.ConfigError, match=r"env\.episode_lenght_s.*episode_length_s"):
        LeggedGymEnv(N, task_id="anymal_c_flat", overrides={"env.episode_lenght_s": 1})
    with pytest.raises(rs.ConfigError, match="anymal_c_flat"):
        LeggedGymEnv(N, task_id="anymal_c_falt")


def test_close_frees_the_simulation(env: LeggedGymEnv) -> None:
    env.close()
    assert env._env.gym.destroyed == [env._env.sim]


@pytest.mark.parametrize("rule", ["clock", "none"])
def test_trains_and_announces_its_bootstrap(env: LeggedGymEnv, tmp_path: Path, rule: str) -> None:
    config = rs.load_config(
        [
            "num_envs=8", "rollout_steps=4", "iterations=4", "logging.console=off", "logging.tensorboard=false",
            "logging.curves=false", "device=cpu", "algorithm.minibatches=2", "algorithm.epochs=1",
            f"run_dir={tmp_path / 'run'}",
        ]
    )  # fmt: skip
    runner = rs.Runner(rs.StaggeredResets(env, 4, bring_up=rule), config)
    assert any("pre_step_value" in note for note in runner.notes)
    most = 0
    for _ in range(4):
        assert runner.iterate()["fault/past_horizon"] == 0
        most = max(most, int(runner.collector.rollout.was_reset.sum(1).max()))
    # 13 steps in rollouts of 4 are 4 groups of 2; random pushes do not fell anybody within 13 steps.
    assert most == (2 if rule == "clock" else N)
