"""The trainer on a real simulator: every reset rule, resume and evaluation, on mjlab's cart-pole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest

import rl_stagger as rs
from rl_stagger.checkpoint import load_checkpoint
from rl_stagger.evaluate import EvaluateConfig, evaluate_run
from rl_stagger.run_dir import read_metrics_lines

pytest.importorskip("mjlab")
# Importing mjlab compiles a function with torch.jit.script, which torch deprecates.
pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")]

SIZES = ["task=mjlab/cartpole_balance", "task.settings.horizon_steps=24", "num_envs=12", "rollout_steps=8"]
QUIET = ["logging.console=off", "logging.tensorboard=false", "logging.curves=false"]


def train(run_dir: Path, iterations: int, *overrides: str) -> Dict[str, Any]:
    cfg = rs.load_config([*SIZES, *QUIET, f"run_dir={run_dir}", f"iterations={iterations}", *overrides])
    env = rs.make_env(cfg.task.name, cfg.num_envs, "cpu", cfg.seed, **cfg.task.settings)
    try:
        return rs.Runner(env, cfg).learn().summary
    finally:
        env.close()


def comparable(run_dir: Path) -> List[Dict[str, Any]]:
    lines = read_metrics_lines(run_dir)
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]


@pytest.mark.parametrize("reset", ["synchronous", "staggered", "random_clock", "staggered_block"])
def test_trains_under_every_reset_rule(tmp_path: Path, reset: str) -> None:
    summary = train(tmp_path / "run", 4, f"reset={reset}")
    assert summary["status"] == "finished"
    assert summary["final_length"] == 24
    coverage = [line["batch/coverage"] for line in comparable(tmp_path / "run")]
    # H = 3K: one of three windows at a time, against all three; a written clock moves no state.
    assert min(coverage) > 0.99 if reset.startswith("staggered") else coverage[0] == 0


def test_recorded_states_spread_the_environments(tmp_path: Path) -> None:
    train(tmp_path / "first", 6, "reset=snapshot")
    coverage = [line["batch/coverage"] for line in comparable(tmp_path / "first")]
    assert coverage[0] == 0
    assert min(coverage[3:]) > 0.99, "after one horizon"
    assert comparable(tmp_path / "first")[-1]["steps/warmup"] == 0
    train(tmp_path / "second", 3, "reset=snapshot", f"reset.library.path={tmp_path / 'first'}")
    assert min(line["batch/coverage"] for line in comparable(tmp_path / "second")) > 0.9, "at once"


@pytest.mark.parametrize("reset", ["density", "adaptive", "upkept"])
def test_a_mixture_is_held(tmp_path: Path, reset: str) -> None:
    summary = train(tmp_path / "run", 8, f"reset={reset}", "num_envs=48")
    lines = comparable(tmp_path / "run")
    assert summary["status"] == "finished"
    assert {line["episode/length_mean"] for line in lines} <= {None, 24.0}
    if reset == "density":  # 1 + 3 u over thirds: 1.5, 2.5, 3.5 of 7.5
        late = lines[-1]["batch/phase_histogram"]
        assert sum(abs(share - want / 7.5) for share, want in zip(late, (1.5, 2.5, 3.5))) / 2 < 0.07


@pytest.mark.parametrize("reset", ["staggered", "staggered_block", "density", "snapshot"])
def test_resume_is_bitwise(tmp_path: Path, reset: str) -> None:
    train(tmp_path / "whole", 4, f"reset={reset}")
    train(tmp_path / "parts", 2, f"reset={reset}")
    train(tmp_path / "parts", 4, f"reset={reset}", "resume=latest")
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    whole, parts = (load_checkpoint(tmp_path / name / "checkpoints" / "iter_0000004.pt") for name in ("whole", "parts"))
    assert all((whole["model"][name] == parts["model"][name]).all() for name in whole["model"])


def test_evaluation(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    report = evaluate_run(EvaluateConfig(run=str(tmp_path / "run"), episodes=4))
    assert report["deterministic"]["length"]["mean"] == 24
    assert report["stochastic"]["episodes"] == 4
