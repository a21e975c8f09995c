"""What an environment does against its contract is named, or does no harm."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np
import pytest
import torch
from helpers.toy_envs import TallyEnv
from torch import Tensor

import rl_stagger as rs
from rl_stagger.envs.base import Step
from rl_stagger.run_dir import read_metrics_lines

OVERRIDES = ["task=skill_chain", "reset=synchronous", "num_envs=4", "rollout_steps=5", "iterations=2"]
QUIET = ["logging.tensorboard=false", "logging.curves=false", "logging.console=plain"]


class Changed(TallyEnv):
    """TallyEnv whose steps are changed by `change`, a function of the Step."""

    def __init__(self, change: Any, horizon_steps: int = 8) -> None:
        super().__init__(4, horizon_steps)
        self.change = change

    def step(self, action: Tensor) -> Step:
        return self.change(super().step(action))


def learn(env: rs.VecEnv, run_dir: Path, *overrides: str) -> Dict[str, Any]:
    return rs.Runner(env, rs.load_config([*OVERRIDES, *QUIET, f"run_dir={run_dir}", *overrides])).learn().summary


def replaced(**fields: Any) -> Any:
    return lambda step: dataclasses.replace(step, **{k: f(step) for k, f in fields.items()})


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda step: tuple(dataclasses.astuple(step)), r"step\(\) returned a tuple, expected rl_stagger.Step"),
        (replaced(obs=lambda s: {}), r"Step.obs has groups \[\], the spec has 'policy' as well"),
        (replaced(obs=lambda s: {"policy": s.obs["policy"][:1]}), r"Step.obs\['policy'\] is \[1, 1\] torch.float32"),
        (
            replaced(obs=lambda s: {"policy": s.obs["policy"].double().long()}),
            r"torch.int64 .* expected \[4, 1\] float",
        ),
        (replaced(obs=lambda s: {"policy": s.obs["policy"].to("meta")}), r"on meta, expected \[4, 1\] float on cpu"),
        (replaced(reward=lambda s: s.reward[:1]), r"Step.reward is \[1\]"),
        (replaced(reward=lambda s: 1.0), r"Step.reward is a float, expected a tensor \[4\]"),
        (replaced(terminated=lambda s: s.terminated.long()), r"Step.terminated is \[4\] torch.int64"),
        (replaced(truncated=lambda s: s.truncated.any()), r"Step.truncated is \[\] torch.bool"),
        (replaced(final_obs=lambda s: None), r"Step.final_obs is None, but the environment claims"),
        (replaced(info=lambda s: None), r"Step.info is a NoneType"),
        (replaced(info=lambda s: {"success": torch.rand(4)}), r"Step.info\['success'\] is \[4\] torch.float32"),
        (replaced(info=lambda s: {"log": {"speed": "fast"}}), r"info\['log'\]\['speed'\] is 'fast'"),
        (replaced(info=lambda s: {"log": {"speed": torch.ones(3)}}), r"info\['log'\]\['speed'\] has shape \(3,\)"),
    ],
)
def test_what_breaks_the_contract_is_named(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(rs.ContractError, match=says):
        learn(Changed(change), tmp_path / "run")


def test_numpy_logs_are_read(tmp_path: Path) -> None:
    log = {"one": np.float64(2.0), "each": np.arange(4.0)}
    learn(Changed(replaced(info=lambda s: {"log": log})), tmp_path / "run")
    assert read_metrics_lines(tmp_path / "run")[0]["task/one"] == 2.0
    assert read_metrics_lines(tmp_path / "run")[0]["task/each"] == 1.5


class InPlace(TallyEnv):
    """Writes every observation and the clock into the same tensors."""

    def __init__(self) -> None:
        super().__init__(4, 8)
        self.shown, self.clock = torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)

    @property
    def elapsed_steps(self) -> Tensor:
        return self.clock

    def reset(self, env_mask: Any = None) -> Any:
        obs = super().reset(env_mask)
        self.clock.copy_(self._elapsed)
        return {"policy": self.shown.copy_(obs["policy"])}


def test_tensors_used_again_do_not_reach_the_stored_batch(tmp_path: Path) -> None:
    runners = []
    for name, env in (("reused", InPlace()), ("fresh", TallyEnv(4, 8))):
        cfg = rs.load_config([*OVERRIDES, *QUIET, f"run_dir={tmp_path / name}"])
        runners.append(rs.Runner(env, cfg))
        runners[-1].learn()
    reused, fresh = (runner.collector.rollout for runner in runners)
    assert torch.equal(reused.obs["policy"], fresh.obs["policy"])
    assert torch.equal(reused.clock, fresh.clock)


def test_a_time_limit_that_never_comes_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Endless(TallyEnv):
        def step(self, action: Tensor) -> Step:
            self.spec = dataclasses.replace(self.spec, horizon_steps=None)
            step = super().step(action)
            self.spec = dataclasses.replace(self.spec, horizon_steps=8)
            return step

    learn(Endless(4, 8), tmp_path / "run", "iterations=4")
    assert capsys.readouterr().out.count("episodes go on past the time limit") == 1


def test_a_gate_that_never_opens_is_refused() -> None:
    with pytest.raises(rs.ConfigError, match=r"gate_interval_steps=9: .* use at most 8"):
        rs.StaggeredResets(TallyEnv(4, 8), 2, gate="block", gate_interval_steps=9)


def test_a_batch_without_a_valid_row_moves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = Changed(replaced(valid=lambda s: torch.zeros(4, dtype=torch.bool)))
    cfg = rs.load_config([*OVERRIDES, *QUIET, f"run_dir={tmp_path / 'run'}"])
    runner = rs.Runner(env, cfg)
    before = runner.learner.optimizer.flat.clone()
    runner.learn()
    assert torch.equal(runner.learner.optimizer.flat, before)
    assert capsys.readouterr().out.count("no valid transition in the batch") == 1


class Starter(TallyEnv):
    """Begins a second training in the folder `second_in`, from within the first one's step."""

    second_in: Optional[Path] = None
    tried = 0

    def step(self, action: Tensor) -> Step:
        if self.second_in is not None:
            overrides = [f"run_dir={self.second_in}", "resume=latest", "iterations=9"]
            with pytest.raises(rs.ConfigError, match="another process is training in this folder"):
                rs.Runner(Starter(4, 8), rs.load_config([*OVERRIDES, *QUIET, *overrides])).learn()
            self.tried += 1
        return super().step(action)


def test_two_trainings_in_one_folder_are_refused(tmp_path: Path) -> None:
    learn(Starter(4, 8), tmp_path / "run")
    env = Starter(4, 8)
    env.second_in = tmp_path / "run"
    learn(env, tmp_path / "run", "resume=latest", "iterations=3")
    assert env.tried == 5


def test_gae_refuses_flags_and_shapes_that_would_be_misread() -> None:
    x, no = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"terminated is torch.uint8"):
        rs.gae(x, x, x, no.byte(), no, 0.9, 0.5)
    with pytest.raises(ValueError, match=r"next_value has shape \(4, 1\), reward has \(4, 3\)"):
        rs.gae(x, x, x[:, :1], no, no, 0.9, 0.5)


def test_a_hydra_app_around_us_keeps_its_own_state() -> None:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from rl_stagger.overrides import config_dir

    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert rs.load_config(["seed=3"]).seed == 3
        assert GlobalHydra.instance().hydra is outer
