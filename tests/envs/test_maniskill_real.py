"""ManiSkill3 itself, on its CPU physics. Needs a Vulkan driver: `make test-maniskill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rl_stagger as rs
from rl_stagger.envs.check import check_env
from rl_stagger.errors import ConfigError
from rl_stagger.evaluate import EvaluateConfig, evaluate_run
from rl_stagger.run_dir import read_metrics_lines

pytest.importorskip("mani_skill")
pytestmark = [
    pytest.mark.sim,
    # Of ManiSkill's own imports and of sapien without a GPU.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CONTACT_TOLERANCE = 1e-3
"""Replays differ by PhysX's memory of contacts, which nobody can read."""


def make(task: str, num_envs: int, **settings: Any) -> rs.VecEnv:
    return rs.make_env(f"maniskill/{task}", num_envs, seed=1, **settings)


@pytest.mark.parametrize("task, num_envs, num_workers", [("PushCube-v1", 3, 2), ("PickCube-v1", 1, 0)])
def test_the_contract_is_kept(task: str, num_envs: int, num_workers: int) -> None:
    env = make(task, num_envs, num_workers=num_workers)
    try:
        report = check_env(env, tolerance=CONTACT_TOLERANCE)
        assert not report.errors, str(report)
        assert not report.warnings, str(report)
    finally:
        env.close()


def test_final_observations_are_those_of_an_episode_that_goes_on() -> None:
    short, long = (make("PushCube-v1", 1, num_workers=0, horizon_steps=h, on_success="ignore") for h in (5, 50))
    try:
        assert torch.equal(short.reset()["policy"], long.reset()["policy"])
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            action = torch.rand(1, short.spec.action.size, generator=generator) * 2 - 1  # type: ignore[union-attr]
            a, b = short.step(action), long.step(action)
            assert a.final_obs is not None
            assert torch.equal(a.final_obs["policy"], b.obs["policy"])
        assert a.truncated.all()
        assert not b.done.any()
        assert not torch.equal(a.obs["policy"], a.final_obs["policy"])
    finally:
        short.close(), long.close()


def test_two_robots_are_one_box() -> None:
    env = make("TwoRobotPickCube-v1", 1, num_workers=0)
    try:
        assert env.spec.action.size == 16  # type: ignore[union-attr]
        assert env.spec.horizon_steps == 100
        env.reset()
        assert torch.isfinite(env.step(torch.zeros(1, 16)).obs["policy"]).all()
    finally:
        env.close()


def test_a_task_that_there_is_not_and_one_that_needs_a_download() -> None:
    with pytest.raises(ConfigError, match="did you mean 'PushCube-v1'"):
        rs.make_env("maniskill", 1, task_id="PushCub-v1", num_workers=0)
    with pytest.raises(ConfigError, match="download_asset PickSingleYCB-v1"):
        make("PickSingleYCB-v1", 1, num_workers=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("maniskill") / "run"
    quiet = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false", f"run_dir={run_dir}"]
    sizes = ["num_envs=10", "rollout_steps=10", "iterations=3", "task.settings.num_workers=2"]
    for task, reset in (("PickCube-v1", "staggered"), ("PushCube-v1-cpu", "staggered")):
        folder = run_dir.with_name(task)
        cfg = rs.load_config([f"task=maniskill/{task}", f"reset={reset}", *sizes, *quiet[:-1], f"run_dir={folder}"])
        env = rs.make_env(cfg.task.name, cfg.num_envs, "cpu", cfg.seed, **cfg.task.settings)
        try:
            assert rs.Runner(env, cfg).learn().summary["status"] == "finished"
        finally:
            env.close()
        lines = read_metrics_lines(folder)
        assert min(line["batch/coverage"] for line in lines) > 0.99, "H = 50 in five groups of K = 10"
    return run_dir.with_name("PushCube-v1-cpu")


def test_a_run_is_judged(trained: Path) -> None:
    report = evaluate_run(EvaluateConfig(str(trained), episodes=4, policy="deterministic"))
    assert report["deterministic"]["episodes"] == 4
    assert report["deterministic"]["success"] is not None


@pytest.mark.slow  # the first picture takes 13 s
def test_a_run_is_filmed(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    from rl_stagger.play import play

    film = tmp_path / "out.mp4"
    assert play([f"run={trained}", f"video={film}", "steps=5"]) == 0
    assert film.stat().st_size > 0
