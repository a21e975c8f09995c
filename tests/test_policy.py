"""The policy on its own is the policy that was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rl_stagger as rs
from rl_stagger.envs.base import Box, Discrete, EnvSpec
from rl_stagger.policy import spec_from_tree, spec_to_tree

QUIET = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]


@pytest.mark.parametrize("task", ["skill_chain", "stage_gridworld"])
def test_acts_as_the_trained_one(tmp_path: Path, task: str) -> None:
    overrides = [f"task={task}", "num_envs=8", "rollout_steps=4", "iterations=3", f"run_dir={tmp_path / 'run'}", *QUIET]
    cfg = rs.load_config(overrides)
    env = rs.make_env(task, 8, seed=1)
    runner = rs.Runner(env, cfg)
    runner.learn()
    obs = env.reset()
    policy = rs.load_policy(tmp_path / "run")
    for _ in range(20):
        action = policy.act_mode(obs)
        assert torch.equal(action, runner.model.act_mode(obs))
        obs = env.step(action).obs
    sampled = [model.act(obs, torch.Generator().manual_seed(0)).env_action for model in (policy, runner.model)]
    assert torch.equal(*sampled)


def test_missing_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(rs.CheckpointError, match="no such file or folder"):
        rs.load_policy(tmp_path / "nothing")


@pytest.mark.parametrize("action", [Discrete(3), Box(2), Box(2, -1.0, 1.0), Box(2, (-1.0, 0.0), (1.0, 2.0))])
def test_spec_survives(action) -> None:
    spec = EnvSpec({"policy": (3, 4), "critic": ()}, action, None)
    back = spec_from_tree(spec_to_tree(spec))
    assert back.obs_shapes == spec.obs_shapes
    assert spec_to_tree(back) == spec_to_tree(spec)
    assert type(back.action) is type(action)
