"""ManiSkill's adapter on a double of its batch (the GPU path, with N rows), and the joining of worker processes.
test_maniskill_real.py runs the simulator."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace
from typing import Any, Dict

import pytest
import torch
from torch import Tensor

import rl_stagger as rs
from rl_stagger.envs.base import Capability
from rl_stagger.envs.check import check_env
from rl_stagger.envs.maniskill import ManiSkillEnv, make_maniskill, row_seeds
from rl_stagger.envs.maniskill_make import VULKAN, _about_vulkan
from rl_stagger.envs.maniskill_spaces import ActionLayout, ObsLayout
from rl_stagger.envs.maniskill_workers import JoinedEnvs, LocalPart, RemotePart, WorkerDied
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import ConfigError

N, H = 6, 12


def make(seed: int = 0, **settings: Any) -> ManiSkillEnv:
    pytest.importorskip("gymnasium")
    from doubles.maniskill import BaseEnv, TimeLimitWrapper

    endings = {name: settings.pop(name) for name in ("on_success", "on_fail") if name in settings}
    num_envs = settings.pop("num_envs", N)
    host = TimeLimitWrapper(BaseEnv(num_envs, **settings), H)
    return ManiSkillEnv(host, "cpu", row_seeds(seed, num_envs), **endings)


def zero(n: int = N) -> Tensor:
    return torch.zeros(n, 2)


def rows(*on: int) -> Tensor:
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(on)] = True
    return mask


@pytest.mark.parametrize(
    "settings",
    [{"lengths": [0, 5, 0, 0, 7, 0], "on_success": "terminate"}, {}, {"num_envs": 1, "reconfiguration_freq": 1}],
)
def test_the_contract_is_kept(settings: Dict[str, Any]) -> None:
    report = check_env(make(**settings), make=lambda seed: make(seed, **settings))
    assert not report.errors, str(report)
    # Noise comes from one stream, which a partial reset moves on: the checker cannot tell.
    assert {warning.check for warning in report.warnings} <= {"partial_reset"}, str(report)


def test_a_clock_is_written_in_place_and_obeyed() -> None:
    env = make()
    env.reset()
    env.set_elapsed_steps(torch.full((N,), H - 1), rows(2))
    step = env.step(zero())
    assert step.truncated.tolist() == [i == 2 for i in range(N)]
    assert step.final_obs is not None
    assert step.final_obs["policy"][2, 0] == 1
    assert step.obs["policy"][2, 0] == 0
    assert env.elapsed_steps.tolist() == [1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("ending", ["truncate", "terminate", "ignore"])
def test_what_success_does_is_a_setting(ending: str) -> None:
    env = make(lengths=[0, 3, 0, 0, 0, 0], on_success=ending)
    env.reset()
    steps = [env.step(zero()) for _ in range(4)]
    assert [bool(step.info["success"][1]) for step in steps] == [False, False, True, False]
    assert [bool(step.terminated[1]) for step in steps] == [False, False, ending == "terminate", False]
    assert [bool(step.truncated[1]) for step in steps] == [False, False, ending == "truncate", False]
    assert env.elapsed_steps[1] == (4 if ending == "ignore" else 1)


def test_an_ending_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="on_success='stop': one of truncate, terminate, ignore"):
        make(on_success="stop")


def test_a_batch_whose_scenes_are_built_anew_is_refused() -> None:
    with pytest.raises(ConfigError, match="reconfiguration_freq=1 with num_envs=6"):
        make(reconfiguration_freq=1)
    assert make(num_envs=1, reconfiguration_freq=1).num_envs == 1


def test_states_are_claimed_for_one_row_whose_scene_stays_only() -> None:
    assert Capability.SET_STATE not in make().capabilities
    assert Capability.SET_STATE not in make(num_envs=1, reconfiguration_freq=1).capabilities
    assert Capability.SET_STATE in make(num_envs=1).capabilities


# -- spaces -----------------------------------------------------------------------------------------------------------
def test_actions_of_two_robots_are_one_box_clipped_and_split() -> None:
    import numpy as np

    spaces = pytest.importorskip("gymnasium").spaces
    left, right = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Box(-2.0, 2.0, (3,), np.float32)
    layout = ActionLayout(spaces.Dict({"left": left, "right": right}))
    assert (layout.box.size, layout.box.low) == (5, [-1.0, -1.0, -2.0, -2.0, -2.0])
    given = torch.tensor([[0.5, 9.0, -9.0, 1.5, 2.0]])
    parts = layout.host(given, "cpu")
    assert parts["left"].tolist() == [[0.5, 1.0]]
    assert parts["right"].tolist() == [[-2.0, 1.5, 2.0]]
    assert given[0, 1] == 9.0, "the caller's is left alone"
    with pytest.raises(ConfigError, match="of robot left"):
        ActionLayout(spaces.Dict({"left": spaces.Discrete(3)}))


def test_nested_observations_are_one_vector_and_pictures_groups_of_their_own() -> None:
    rgb = torch.arange(2 * 4 * 6 * 3, dtype=torch.uint8).reshape(2, 4, 6, 3)
    depth = torch.full((2, 4, 6, 1), 1500, dtype=torch.int16)
    obs = {
        "agent": {"qpos": torch.ones(2, 3), "qvel": torch.zeros(2, 2)},
        "extra": {"is_grasped": torch.tensor([True, False])},
        "sensor_param": {"hand": {"cam2world_gl": torch.eye(4).expand(2, 4, 4)}},
        "sensor_data": {"hand": {"rgb": rgb, "depth": depth}},
    }
    layout = ObsLayout(obs)
    assert layout.shapes == {"policy": (6,), "policy/hand": (3, 4, 6), "policy/hand_depth": (1, 4, 6)}
    assert layout.image_groups == {"policy/hand": torch.uint8}
    seen = layout.tensors(obs, "cpu")
    assert seen["policy"].tolist() == [[1, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0]]
    assert torch.equal(seen["policy/hand"][1, 2], rgb[1, :, :, 2])
    assert seen["policy/hand_depth"][0, 0, 0, 0] == 1.5, "metres"
    rgb.zero_()
    assert seen["policy/hand"].any(), "a copy"
    with pytest.raises(ConfigError, match="segmentation"):
        ObsLayout({"sensor_data": {"hand": {"segmentation": rgb}}})
    with pytest.raises(ConfigError, match=r"add \+state"):
        ObsLayout({"sensor_data": {"hand": {"rgb": rgb}}})


# -- workers ----------------------------------------------------------------------------------------------------------
def two_pendulums(seed: int) -> Any:
    return make_env("pendulum", 2, seed=seed, horizon_steps=9)


def joined(remote: bool) -> JoinedEnvs:
    build = [
        RemotePart(two_pendulums, (s,), f"rows of seed {s}") if remote else LocalPart(two_pendulums(s)) for s in (1, 2)
    ]
    return JoinedEnvs(build, torch.device("cpu"))


def no_env() -> Any:
    raise ConfigError("horizon_steps=0: this cannot be built")


def test_worker_processes_do_what_one_process_does() -> None:
    near, far = joined(remote=False), joined(remote=True)
    try:
        assert (far.num_envs, far.spec, far.capabilities) == (4, near.spec, near.capabilities)
        mask = torch.tensor([False, True, True, False])
        assert torch.equal(near.reset()["policy"], far.reset()["policy"])
        for t in range(12):
            action = torch.full((4, 1), 0.1 * t)
            a, b = near.step(action), far.step(action)
            assert torch.equal(a.obs["policy"], b.obs["policy"])
            assert a.final_obs is not None
            assert b.final_obs is not None
            assert torch.equal(a.final_obs["policy"], b.final_obs["policy"])
            assert torch.equal(a.truncated, b.truncated)
            if t == 4:
                assert torch.equal(near.reset(mask)["policy"], far.reset(mask)["policy"])
                for env in (near, far):
                    env.set_elapsed_steps(torch.arange(4), ~mask)
            assert torch.equal(near.elapsed_steps, far.elapsed_steps)
    finally:
        far.close()
    assert not any(part._process.is_alive() for part in far._parts)  # type: ignore[union-attr]
    far.close()  # a second time is no fault
    with pytest.raises(RuntimeError, match="closed"):
        far.step(torch.zeros(4, 1))


def test_a_worker_that_dies_is_named_and_none_is_left_behind() -> None:
    env = joined(remote=True)
    env.reset()
    os.kill(env._parts[1]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(WorkerDied, match=r"rows of seed 2 has ended, signal 9 \(out of memory\?"):
        env.step(torch.zeros(4, 1))
    assert not any(part._process.is_alive() for part in env._parts)  # type: ignore[union-attr]


def test_errors_of_workers_come_here_and_later_questions_get_their_own_answers() -> None:
    with pytest.raises(ConfigError, match="horizon_steps=0"):
        JoinedEnvs([RemotePart(no_env, (), "rows 0 to 1")], torch.device("cpu"))
    env = joined(remote=True)
    try:
        with pytest.raises(RuntimeError, match="reset"):
            env.step(torch.zeros(4, 1))
        assert env.reset()["policy"].shape == (4, 3)
        assert env.elapsed_steps.tolist() == [0] * 4
    finally:
        env.close()


# -- what cannot work -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, match",
    [
        ({"num_workers": -1}, "num_workers=-1: a whole number of at least 0"),
        ({"horizon_steps": 0}, "horizon_steps=0"),
        ({"sim_backend": "physx"}, "did you mean 'physx_cpu'|physx_cuda"),
        ({"sim_backend": "physx_cuda"}, "physx_cuda with device=cpu: it needs a GPU"),
        ({"reward_mode": "dens"}, "did you mean 'dense'"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: Dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_maniskill(2, **settings)


def test_without_mani_skill_the_error_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    monkeypatch.setitem(sys.modules, "mani_skill.envs", None)
    with pytest.raises(ConfigError, match=r"pip install 'rl_stagger\[maniskill\]'"):
        rs.make_env("maniskill", 2, task_id="PushCube-v1", num_workers=0)


def test_a_missing_driver_is_known_by_its_words_and_the_message_says_what_to_type() -> None:
    assert _about_vulkan(RuntimeError("vk::createInstanceUnique: ErrorIncompatibleDriver"))
    assert _about_vulkan(RuntimeError("Failed to find a rendering device"))
    assert not _about_vulkan(RuntimeError("CUDA out of memory"))
    assert "apt-get install -t bookworm-backports mesa-vulkan-drivers" in VULKAN.format(what="x")
