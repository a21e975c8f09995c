"""The contract checker: good environments pass, each fault is found by its check at its line, nothing crashes."""

from __future__ import annotations

import inspect
import linecache
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from helpers import faulty_envs
from helpers.faulty_envs import FAULTS, Chooser, Courier, NextStep
from torch import Tensor

import rl_stagger as rs
from rl_stagger.envs.base import Capability, Step
from rl_stagger.envs.check import CHECKS, check_env, main
from rl_stagger.envs.registry import make_env, native_task_names
from rl_stagger.errors import ContractError

SMALL: Dict[str, Dict[str, Any]] = {
    "cartpole_swingup": {"success_steps": 4},
    "skill_chain": {"num_stages": 4},
    "stage_gridworld": {"num_rooms": 2, "room_size": 2},
    "legged_bench": {"critic_obs": True},
}


def clean(report) -> None:
    assert not report.errors, str(report)
    assert not report.warnings, str(report)


# -- what is good ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", native_task_names())
def test_native_tasks_pass(task: str) -> None:
    clean(check_env(make_env(task, 6, horizon_steps=16, **SMALL.get(task, {}))))


@pytest.mark.parametrize("kind", [Courier, Chooser, NextStep])
@pytest.mark.parametrize("num_envs", [1, 6])
def test_every_capability_may_be_there_or_not(kind, num_envs: int) -> None:
    report = check_env(kind(num_envs))
    clean(report)
    assert {finding.check for finding in report.findings} == set(CHECKS)


def test_without_a_time_limit() -> None:
    clean(check_env(Courier(6, horizon_steps=None)))


@pytest.mark.parametrize("task", ["gym/CartPole-v1", "gym/Pendulum-v1"])
def test_gymnasium_tasks_pass(task: str) -> None:
    pytest.importorskip("gymnasium")
    clean(check_env(rs.make_env(task, num_envs=4), steps=120))


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_mjlab_cartpole_passes() -> None:
    pytest.importorskip("mjlab")
    report = check_env(rs.make_env("mjlab/cartpole_balance", num_envs=4), steps=30)
    clean(report)


def test_under_a_reset_rule() -> None:
    report = check_env(rs.StaggeredResets(Courier(6), rollout_steps=4))
    clean(report)
    assert report.env.startswith("StaggeredResets around Courier")


def test_random_numbers_of_the_caller_stay_as_they_are() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    check_env(Courier(2), steps=5)
    assert torch.equal(torch.get_rng_state(), state)


# -- what is not ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_found_by_its_own_check_and_at_its_line(name: str) -> None:
    kind, check, line = FAULTS[name]
    report = check_env(kind(6))
    found = [*report.errors, *report.warnings]
    assert {finding.check for finding in found} == {check}, str(report)
    path, number, method = re.match(r"(.+):(\d+) in (\w+)", found[0].where).groups()  # type: ignore[union-attr]
    assert Path(path).name == "faulty_envs.py"
    if method in vars(kind):
        source, first = inspect.getsourcelines(kind)
        assert first < int(number) < first + len(source), found[0].where
    assert line in linecache.getline(faulty_envs.__file__, int(number)), found[0].where
    assert all(finding.contract for finding in found)


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check for _, check, _ in FAULTS.values()} == set(CHECKS)


def test_noise_within_the_tolerance_is_none() -> None:
    class Noisy(Courier):
        capabilities = frozenset({Capability.PARTIAL_RESET, Capability.FINAL_OBS})

        def step(self, action: Tensor) -> Step:
            step = super().step(action)
            return replace(step, reward=step.reward + 1e-6 * torch.empty_like(step.reward).normal_(generator=NOISE))

    NOISE = torch.Generator().manual_seed(0)
    assert {finding.check for finding in check_env(Noisy(6)).warnings} == {"seeds"}
    clean(check_env(Noisy(6), tolerance=1e-4))


@pytest.mark.parametrize(
    "method", ["reset", "step", "elapsed_steps", "set_elapsed_steps", "get_state", "set_state", "seed", "state_dict",
               "set_manual_reset", "load_state_dict"],
)  # fmt: skip
def test_an_environment_that_raises_is_reported(method: str) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by design")

    broken = type("Broken", (Courier,), {method: property(fail) if method == "elapsed_steps" else fail})
    report = check_env(broken(2), steps=30)
    assert any("ZeroDivisionError: by design" in finding.seen for finding in report.errors), str(report)


@pytest.mark.parametrize("attribute", ["num_envs", "device", "spec", "capabilities"])
def test_an_attribute_that_is_not_set_is_reported(attribute: str) -> None:
    env = Courier(2)
    setattr(env, attribute, None)
    report = check_env(env)
    assert [finding.check for finding in report.errors] == ["spec"], str(report)


# -- the report -----------------------------------------------------------------------------------------------------
def test_raise_if_broken_holds_every_error() -> None:
    check_env(Courier(2)).raise_if_broken()
    report = check_env(faulty_envs.RewardReused(2))
    with pytest.raises(ContractError, match=r"RewardReused, num_envs=2.*\n.*error: kept_tensors: Step\.reward"):
        report.raise_if_broken()
    assert "breaks the contract: 1 errors" in str(report)


# -- the command ----------------------------------------------------------------------------------------------------
def test_exit_codes(capsys: pytest.CaptureFixture) -> None:
    assert main(["task=point_reach", "num_envs=2", "settings.horizon_steps=8"]) == 0
    assert "keeps the contract" in capsys.readouterr().out
    assert main(["task=tests.helpers.faulty_envs:RewardInColumns", "num_envs=2"]) == 1
    out = capsys.readouterr().out
    assert "breaks the contract" in out
    assert "faulty_envs.py" in out
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("num_env=3", "num_envs"),
        ("num_envs=0", "at least 1"),
        ("num_envs=two", "whole number"),
        ("seed=-1", "at least 0"),
        ("steps=0", "at least 1"),
        ("tolerance=-1", "at least 0"),
        ("device=warp", "warp"),
        ("settings.horizont_steps=3", "horizon_steps"),
        ("task=point_rech", "point_reach"),
        ("hello", "key=value"),
    ],
)
def test_what_cannot_work_exits_2_and_says_why(argument: str, said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["task=point_reach", argument]) == 2
    assert said in capsys.readouterr().err


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "rl_stagger.envs.check", "task=point_reach", "num_envs=1", "steps=5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "0 errors, 0 warnings" in done.stdout
