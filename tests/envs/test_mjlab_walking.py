"""mjlab's walking tasks on a CPU, in smoke physics: final observations, terrain levels and difficulty."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import Tensor

import rl_stagger as rs
from rl_stagger.envs.mjlab import MjlabEnv
from rl_stagger.errors import ConfigError
from rl_stagger.evaluate import EvaluateConfig, evaluate_run

pytest.importorskip("mjlab")
pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:MULTICCD is enabled"),  # MuJoCo-Warp, of mjlab's own rough terrain
]

SMOKE = {"sim.mujoco.cone": "pyramidal", "sim.mujoco.impratio": 1.0}
FLAT = {"task_id": "Mjlab-Velocity-Flat-Unitree-Go1", "overrides": {**SMOKE, "sim.njmax": 64}}
ROWS = {"scene.terrain.terrain_generator.num_rows": 4, "sim.nconmax": 200}
ROUGH = {"task_id": "Mjlab-Velocity-Rough-Unitree-Go1", "overrides": {**SMOKE, **ROWS}}
N = 7
CASES = ["flat", "pyramid_stairs", "pyramid_stairs_inv", "hf_pyramid_slope", "hf_pyramid_slope_inv", "random_rough"]


def actions(count: int, seed: int = 7) -> Tensor:
    return torch.randn(count, N, 12, generator=torch.Generator().manual_seed(seed))


def make(settings: Dict[str, Any], horizon_steps: int, seed: int = 0) -> MjlabEnv:
    return MjlabEnv(N, seed=seed, horizon_steps=horizon_steps, **settings)


def levels(env: MjlabEnv) -> Tensor:
    return env._env.scene.terrain.terrain_levels.clone()


def rows(*on: int) -> Tensor:
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(on)] = True
    return mask


def test_final_obs_is_what_a_run_without_resets_shows() -> None:
    short, long = make(FLAT, 6), make(FLAT, 1000)
    first, other = short.reset(), long.reset()
    assert torch.equal(first["policy"], other["policy"])
    for action in actions(6):
        a, b = short.step(action), long.step(action)
        for group in ("policy", "critic"):
            assert torch.equal(a.final_obs[group], b.obs[group])
        assert torch.equal(a.reward, b.reward)
    assert a.truncated.all()
    assert not b.done.any()
    assert not torch.equal(a.obs["policy"], a.final_obs["policy"])


@pytest.fixture(scope="module")
def rough() -> Any:
    env = make(ROUGH, 1000)
    env.reset()
    env.step(actions(1)[0])
    yield env
    env.close()


def test_terrain_levels_move_at_true_ends_only(rough: MjlabEnv) -> None:
    terrain = rough._env.scene.terrain
    terrain.terrain_levels.fill_(2)
    rough.reset(rows(0, 1))  # cut by the caller
    assert levels(rough).tolist() == [2] * N
    rough.set_evaluation(True)
    rough.set_elapsed_steps(torch.full((N,), 999))
    assert rough.step(actions(1)[0]).truncated.all()
    assert levels(rough).tolist() == [2] * N, "frozen in an evaluation"
    rough.set_evaluation(False)
    # Standing still at the end of an episode in which they were told to walk, and told to stand: down, and as it was.
    command = rough._env.command_manager.get_term("twist")
    command.vel_command_b[:] = torch.tensor([1.0, 0.0, 0.0])
    command.time_left[:] = 100.0
    command.is_standing_env[:] = False
    rough.set_elapsed_steps(torch.full((N,), 999), rows(0, 3))
    ended = rough.step(torch.zeros(N, 12)).truncated
    assert ended[[0, 3]].all()
    assert (levels(rough)[ended] == 1).all()
    assert (levels(rough)[~ended & ~rows(0, 3)] == 2).all()


def test_a_checkpoint_brings_levels_and_episodes_back(rough: MjlabEnv) -> None:
    rough._env.scene.terrain.terrain_levels.copy_(torch.arange(N) % 4)
    saved, resumed = rough.state_dict(), make(ROUGH, 1000)
    resumed.load_state_dict(saved)
    assert levels(resumed).tolist() == [0, 1, 2, 3, 0, 1, 2]
    for env in (rough, resumed):
        env.set_elapsed_steps(torch.full((N,), 998), rows(1, 4))
    for action in actions(4, seed=8):
        a, b = rough.step(action), resumed.step(action)
        assert torch.equal(a.obs["policy"], b.obs["policy"])
        assert torch.equal(a.reward, b.reward)
    assert torch.equal(levels(rough), levels(resumed))
    resumed.close()


def test_another_number_of_environments_takes_over_the_levels(rough: MjlabEnv) -> None:
    rough._env.scene.terrain.terrain_levels.copy_(torch.tensor([3, 3, 3, 0, 0, 0, 0]))
    judge = MjlabEnv(14, seed=5, horizon_steps=1000, **ROUGH)
    judge.load_curriculum(rough.state_dict())
    assert levels(judge).tolist() == [3] * 6 + [0] * 8
    types = rough._env.scene.terrain.terrain_types
    assert torch.equal(judge._env.scene.terrain.terrain_types, types.repeat_interleave(2))
    judge.close()


def test_a_fixed_difficulty_fills_all_terrain_types_alike() -> None:
    env = make(ROUGH, 50)
    assert env.difficulty_levels == 4
    easy, hard = {}, {}
    for level, heights in ((0, easy), (3, hard)):
        env.set_difficulty(level)
        env.reset()
        cases = env.evaluation_cases()
        assert [name for name, mask in cases.items() if mask.any()] == [*CASES, "wave_terrain"]
        assert all(int(mask.sum()) == 1 for mask in cases.values())
        origins = env._env.scene.terrain.terrain_origins[:, :, 2]
        heights.update(enumerate(origins[:, 1].tolist()))  # of pyramids of stairs: the higher, the harder
    assert max(easy.values()) - min(easy.values()) < 0.01, "all rows alike"
    assert max(hard.values()) - min(hard.values()) < 0.01
    assert hard[0] > easy[0] + 0.1
    with pytest.raises(ConfigError, match=r"difficulty=4: .*levels 0 to 3"):
        env.set_difficulty(4)
    env.close()
    with pytest.raises(ConfigError, match="no levels"):
        make(FLAT, 6).set_difficulty(0)


def test_a_run_is_judged_by_level_and_terrain(tmp_path: Path) -> None:
    overrides = [f"++task.settings.overrides.{key}={value}" for key, value in ROUGH["overrides"].items()]
    quiet = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]
    sizes = ["num_envs=14", "rollout_steps=4", "iterations=2", "task.settings.horizon_steps=8"]
    cfg = rs.load_config(["task=mjlab/go1_rough", *overrides, *quiet, *sizes, f"run_dir={tmp_path / 'run'}"])
    env = rs.make_env(cfg.task.name, cfg.num_envs, "cpu", cfg.seed, **cfg.task.settings)
    assert rs.Runner(env, cfg).learn().summary["status"] == "finished"
    env.close()
    config = EvaluateConfig(str(tmp_path / "run"), episodes=14, policy="deterministic", difficulty=[0, 3])
    judged = evaluate_run(config)["deterministic"]["difficulties"]
    assert [part["difficulty"] for part in judged] == [0, 3]
    for part in judged:
        assert [*part["cases"]] == [*CASES, "wave_terrain"]
        assert sum(case["episodes"] for case in part["cases"].values()) == 14


@pytest.mark.slow  # three models more, whose kernels compile for a minute each
@pytest.mark.parametrize("task", ["g1_flat", "g1_rough", "lift_cube"])
def test_the_other_tasks_step(task: str) -> None:
    settings = {**rs.load_config([f"task=mjlab/{task}"]).task.settings, "horizon_steps": 3}
    env = rs.make_env("mjlab", 2, seed=0, **settings)
    env.reset()
    for _ in range(4):
        step = env.step(torch.randn(2, env.spec.action.size))
        assert all(torch.isfinite(value).all() for value in (*step.obs.values(), step.reward))
    assert "critic" in env.spec.obs_shapes
    env.close()
