"""mjlab's adapter on a CPU, cartpole throughout; the first use of a model compiles kernels for about a minute."""

import sys

import pytest
import torch

from rl_stagger.envs.base import Capability
from rl_stagger.envs.mjlab import MjlabEnv
from rl_stagger.errors import ConfigError

pytest.importorskip("mjlab")
pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")]

N, H = 4, 6
GO1 = {
    "task_id": "Mjlab-Velocity-Flat-Unitree-Go1",
    "overrides": {"sim.mujoco.cone": "pyramidal", "sim.mujoco.impratio": 1.0, "sim.njmax": 64},
}


def make(horizon_steps=H, seed=0, **settings):
    return MjlabEnv(N, seed=seed, horizon_steps=horizon_steps, **settings)


def actions(count, size=1, seed=7):
    return torch.randn(count, N, size, generator=torch.Generator().manual_seed(seed))


def rows(*on):
    mask = torch.zeros(N, dtype=torch.bool)
    mask[list(on)] = True
    return mask


def assert_same(a, b, where=None):
    assert a.keys() == b.keys()
    for name in a:
        left, right = (a[name], b[name]) if where is None else (a[name][where], b[name][where])
        assert torch.equal(left, right), name


def test_spec_and_groups():
    env = MjlabEnv(N)
    assert env.spec.obs_shapes == {"policy": (5,), "critic": (5,)}
    assert env.spec.action.size == 1
    assert not env.spec.action.bounded
    assert env.spec.horizon_steps == 1000  # 50 s at 20 steps/s
    assert MjlabEnv(N, play=True).spec.horizon_steps is None
    assert Capability.EXACT_RESUME in env.capabilities


@pytest.mark.parametrize("horizon", [1, 3, 6, 7, 33])
def test_time_limit_is_exact(horizon):
    env = make(horizon)
    assert env.spec.horizon_steps == horizon
    env.reset()
    for t in range(1, 2 * horizon + 1):
        step = env.step(torch.zeros(N, 1))
        assert step.truncated.tolist() == [t % horizon == 0] * N
        assert not step.terminated.any()
        assert step.valid.all()
        assert env.elapsed_steps.tolist() == [t % horizon] * N
        assert ("Episode_Termination/time_out" in step.info["log"]) == (t % horizon == 0)


def test_clock_write_truncates_that_row_only():
    env = make()
    env.reset()
    env.set_elapsed_steps(torch.full((N,), H - 1), rows(2))
    assert env.elapsed_steps.tolist() == [0, 0, H - 1, 0]
    assert env.step(torch.zeros(N, 1)).truncated.tolist() == [False, False, True, False]
    assert env.elapsed_steps.tolist() == [1, 1, 0, 1]


def test_final_obs_is_the_state_that_a_longer_episode_goes_through():
    short, long = make(H), make(10 * H)
    assert_same(short.reset(), long.reset())
    for action in actions(H):
        a, b = short.step(action), long.step(action)
        assert_same(a.final_obs, b.obs)
        assert torch.equal(a.reward, b.reward)
    assert a.done.all()
    assert not b.done.any()
    assert not torch.equal(a.obs["policy"], a.final_obs["policy"])


def test_partial_reset_leaves_the_other_rows_alone():
    env, twin = make(), make()
    env.reset(), twin.reset()
    for action in actions(3):
        env.step(action), twin.step(action)
    others, before = ~rows(1), env.get_state()
    obs = env.reset(rows(1))
    assert_same(env.get_state(), before, others)
    assert env.elapsed_steps.tolist() == [3, 0, 3, 3]
    assert not torch.equal(obs["policy"][1], twin.step(torch.zeros(N, 1)).obs["policy"][1])
    env.step(torch.zeros(N, 1))
    for action in actions(2, seed=8):
        assert_same(env.step(action).final_obs, twin.step(action).final_obs, others)


def test_state_round_trip_replays():
    env = make(100)
    env.reset()
    for action in actions(3):
        env.step(action)
    state = env.get_state()
    first = [env.step(action) for action in actions(5, seed=8)]
    assert env.set_state(state)["policy"].shape == (N, 5)
    assert env.elapsed_steps.tolist() == [3] * N
    for action, was in zip(actions(5, seed=8), first):
        now = env.step(action)
        assert_same(now.obs, was.obs)
        assert torch.equal(now.reward, was.reward)


def test_masked_state_write_and_foreign_names():
    env = make(100)
    env.reset()
    state = env.get_state()
    env.step(torch.ones(N, 1))
    later = env.get_state()
    env.set_state(state, rows(0))
    assert_same(env.get_state(), later, ~rows(0))
    assert_same(env.get_state(), state, rows(0))
    with pytest.raises(ValueError, match=r"physics\.qpos"):
        env.set_state({"physics.qpo": state["physics.qpos"]})


def test_a_waiting_row_is_frozen():
    env, twin = make(), make()
    env.reset(), twin.reset()
    env.set_manual_reset(True)
    for each in (env, twin):
        each.set_elapsed_steps(torch.full((N,), H - 1), rows(2))
    action = torch.ones(N, 1)
    ended = env.step(action)
    twin.step(action)
    assert ended.truncated.tolist() == [False, False, True, False]
    assert ended.valid.all()
    assert_same(ended.obs, ended.final_obs)
    state = env.get_state()
    for _ in range(2):
        step, other = env.step(action), twin.step(action)
        assert step.valid.tolist() == [True, True, False, True]
        assert not step.done.any()
        assert step.reward[2] == 0
        assert_same(step.obs, ended.obs, 2)
        assert_same(env.get_state(), state, 2)
        assert_same(step.obs, other.obs, [0, 1, 3])  # the live rows notice nothing
        assert env.elapsed_steps[2] == H
    env.reset(rows(2))
    assert env.elapsed_steps.tolist() == [3, 3, 0, 3]
    step = env.step(action)
    assert step.valid.all()
    assert step.info["log"]["Episode_Termination/time_out"] == 1


def test_returned_tensors_are_not_written_again():
    env = make(3)
    kept = [(env.reset(), None)]
    for action in actions(7):
        step = env.step(action)
        tensors = {"r": step.reward, "te": step.terminated, "tr": step.truncated, "v": step.valid}
        tensors.update({f"o{k}": v for k, v in step.obs.items()})
        tensors.update({f"f{k}": v for k, v in step.final_obs.items()})
        tensors["clock"] = env.elapsed_steps
        kept.append((tensors, None))
        kept = [(live, copy or {k: v.clone() for k, v in live.items()}) for live, copy in kept]
        for live, copy in kept:
            assert_same(live, copy)
            assert all(torch.isfinite(v).all() for v in live.values())


def test_fresh_instance_continues_bitwise():
    env = make()
    env.reset()
    env.set_elapsed_steps(torch.arange(N))
    for action in actions(3):
        env.step(action)
    saved = env.state_dict()
    torch.randn(5)  # the global stream is not what mjlab draws from
    resumed = make(seed=99)
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.elapsed_steps, env.elapsed_steps)
    for action in actions(3 * H, seed=8):  # every row resets, so the random stream is tested too
        a, b = env.step(action), resumed.step(action)
        assert_same(a.obs, b.obs)
        assert torch.equal(a.reward, b.reward)
        assert torch.equal(a.truncated, b.truncated)


def test_seed_decides_and_global_generators_are_untouched():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    env, same, other = make(seed=1), make(seed=1), make(seed=2)
    first = env.reset()["policy"]
    assert torch.equal(first, same.reset()["policy"])
    assert not torch.equal(first, other.reset()["policy"])
    env.seed(5), other.seed(5)
    assert torch.equal(env.reset()["policy"], other.reset()["policy"])
    assert torch.equal(torch.rand(2), expected)


def test_overrides():
    env = make(overrides={"decimation": 1, "terminations": {"time_out": {"time_out": True}}})
    assert env.spec.horizon_steps == H
    env.reset()
    assert env.step(torch.zeros(N, 1)).reward.max() <= 0.01  # mjlab scales by the step's 10 ms
    with pytest.raises(ConfigError, match="did you mean 'cone'"):
        make(overrides={"sim.mujoco.cones": "pyramidal"})
    with pytest.raises(ConfigError, match="num_envs"):
        make(overrides={"scene.num_envs": 3})
    with pytest.raises(ConfigError, match="Mjlab-Cartpole-Balance"):
        make(task_id="Mjlab-Cartpole-Balanc")


def test_pictures_are_refused_rather_than_left_out():
    with pytest.raises(ConfigError, match="observation group 'camera' has shape"):
        MjlabEnv(2, task_id="Mjlab-Lift-Cube-Yam-Rgb")


def test_step_before_reset_is_refused():
    with pytest.raises(RuntimeError, match="reset"):
        make().step(torch.zeros(N, 1))


def test_without_mjlab_the_error_says_how_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mjlab", None)
    monkeypatch.setitem(sys.modules, "mjlab.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install 'rl_stagger\[mjlab\]'"):
        make()


@pytest.mark.slow
def test_go1_flat():
    env = make(50, **GO1)
    assert env.spec.obs_shapes == {"policy": (48,), "critic": (72,)}
    assert env.spec.action.size == 12
    env.reset()
    for action in actions(3, 12):
        step = env.step(action)
        assert all(torch.isfinite(value).all() for value in (*step.obs.values(), step.reward))
    assert "Metrics/slip_velocity_mean" in step.info["log"]  # written by a reward, in steps without a reset as well
    before, seen = env.get_state(), step.obs
    obs = env.reset(rows(1))
    assert_same(env.get_state(), before, ~rows(1))  # the command metrics included
    assert_same(obs, seen, ~rows(1))  # no new noise for the others
    env.set_evaluation(True)
    env.reset(rows(3))
    env.set_evaluation(False)

    saved, resumed = env.state_dict(), make(50, seed=9, **GO1)
    resumed.load_state_dict(saved)
    env.set_elapsed_steps(torch.tensor([49, 0, 47, 0])), resumed.set_elapsed_steps(torch.tensor([49, 0, 47, 0]))
    for action in actions(5, 12, seed=8):
        a, b = env.step(action), resumed.step(action)
        assert_same(a.obs, b.obs)
        assert torch.equal(a.reward, b.reward)
