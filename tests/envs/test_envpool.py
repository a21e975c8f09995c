"""envpool's adapter: on a double of it, and on envpool itself where that is installed (marker `sim`)."""

import sys

import pytest
import torch

import rl_stagger as rs
from rl_stagger.envs.base import Box, Capability, Discrete
from rl_stagger.envs.check import check_env
from rl_stagger.errors import ConfigError

pytest.importorskip("gymnasium")
from doubles import envpool as double

from rl_stagger.envs.envpool import EnvpoolEnv

N, H = 4, double.LIMIT
TASKS = ["Count-v1", "MuJoCoPlayground/Joystick-v1", "Look-v5"]


@pytest.fixture
def pools(monkeypatch):
    return double.install(monkeypatch)


def zeros(env):
    is_box = isinstance(env.spec.action, Box)
    return torch.zeros(env.num_envs, env.spec.action.size) if is_box else torch.zeros(env.num_envs, dtype=torch.int64)


@pytest.mark.parametrize("task_id", TASKS)
def test_the_contract_is_kept(pools, task_id):
    report = check_env(rs.make_env(f"envpool/{task_id}", N))
    assert report.ok, str(report)
    assert not report.warnings, str(report)


def test_no_step_is_spent_on_a_reset_and_the_final_observation_is_the_ended_episodes(pools):
    env = EnvpoolEnv(N, task_id="Count-v1")  # environment 1 fails at 4, 2 at 6 = H, 0 and 3 never
    env.reset()
    for t in range(1, 13):
        step = env.step(torch.full((N, 1), 0.5))
        assert step.valid.all()
        assert step.reward.tolist() == [0.5] * N
        assert step.terminated.tolist() == [False, t % 4 == 0, t % 6 == 0, False]
        assert step.truncated.tolist() == [t % 6 == 0, False, False, t % 6 == 0]
        assert step.final_obs["policy"][:, 0].tolist() == [(t - 1) % H + 1 for H in (6, 4, 6, 6)]
        assert step.obs["policy"][:, 0].tolist() == [t % H for H in (6, 4, 6, 6)]
        assert env.elapsed_steps.tolist() == [t % H for H in (6, 4, 6, 6)]


def test_playgrounds_privileged_state_is_the_critics(pools):
    env = EnvpoolEnv(N, task_id="MuJoCoPlayground/Joystick-v1")
    assert env.spec.obs_shapes == {"critic": (2,), "policy": (2,)}
    env.reset()
    step = env.step(zeros(env))
    assert step.obs["critic"].dtype == torch.float32
    assert torch.equal(step.obs["critic"], 10.0 * step.obs["policy"])
    assert step.info["log"]["reward_tracking"].tolist() == [0.5] * N  # of the step, before any reset
    assert set(step.info["log"]) == {"reward_tracking"}
    named = EnvpoolEnv(N, task_id="MuJoCoPlayground/Joystick-v1", critic_keys=["state"])
    obs = named.reset()
    assert torch.equal(obs["policy"], 10.0 * obs["critic"])
    with pytest.raises(ConfigError, match="did you mean 'state'"):
        EnvpoolEnv(N, task_id="MuJoCoPlayground/Joystick-v1", critic_keys=["stat"])


def test_images_and_choices(pools):
    env = EnvpoolEnv(N, task_id="Look-v5")
    assert env.spec.obs_shapes == {"policy": (4, 12, 12)}
    assert env.spec.obs_dtypes == {"policy": torch.uint8}
    assert env.spec.action == Discrete(3)
    env.reset()
    step = env.step(torch.tensor([0, 1, 2, 1]))
    assert step.reward.tolist() == [0.0, 1.0, 2.0, 1.0]
    assert step.obs["policy"][:, :, 0, 0].eq(1).all()


def test_a_partial_reset_gives_all_rows_although_envpool_gives_some(pools):
    env = EnvpoolEnv(N, task_id="MuJoCoPlayground/Joystick-v1")
    env.reset()
    last = env.step(zeros(env)).obs
    obs = env.reset(torch.tensor([False, True, False, True]))
    assert obs["policy"][:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    for name in ("policy", "critic"):
        assert torch.equal(obs[name][[0, 2]], last[name][[0, 2]])
        assert not torch.equal(obs[name][[1, 3], 1], last[name][[1, 3], 1])


@pytest.mark.parametrize(("horizon", "expected"), [(None, H), (3, 3), (9, 9)])
def test_the_time_limit_is_kept_here_and_its_clock_can_be_written(pools, horizon, expected):
    env = EnvpoolEnv(3, task_id="Count-v1", horizon_steps=horizon)
    assert env.spec.horizon_steps == expected
    assert pools[-1].limit == 2**31 - 1
    env.reset()
    env.set_elapsed_steps(torch.tensor([expected - 1, 0, 0]), torch.tensor([True, False, False]))
    step = env.step(zeros(env))
    assert step.truncated.tolist() == [True, False, False]
    assert step.final_obs["policy"][0, 0] == 1  # the state did not move with the clock


def test_seeds_belong_to_the_pool_and_do_not_overlap(pools):
    env = EnvpoolEnv(N, task_id="Count-v1", seed=1)
    first = env.reset()["policy"]
    used = list(pools[-1].seeds)
    env.seed(2)
    assert not torch.equal(env.reset()["policy"], first)
    assert not set(used) & set(pools[-1].seeds)
    before = len(pools)
    env.reset()
    env.step(zeros(env))
    assert len(pools) == before  # a pool is built for a seed, not for a reset
    env.seed(1)
    assert torch.equal(env.reset()["policy"], first)
    assert pools[-2].closed


def test_rendering(pools):
    assert EnvpoolEnv(N, task_id="Count-v1", render_mode="rgb_array").render(2)[0, 0].tolist() == [2, 2, 2]
    assert Capability.RENDER not in EnvpoolEnv(N, task_id="Count-v1").capabilities


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task_id": "Cuont-v1"}, "did you mean Count-v1"),
        ({"env_kwargs": {"bonuss": 1.0}}, "bonuss"),
        ({"horizon_steps": 0}, "horizon_steps=0"),
        ({"num_envs": 0}, "num_envs=0"),
    ],
)
def test_what_cannot_be_built_is_named(pools, settings, message):
    with pytest.raises(ConfigError, match=message):
        EnvpoolEnv(**{"num_envs": N, "task_id": "Count-v1", **settings})


def test_without_envpool_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"rl_stagger\[envpool\]"):
        rs.make_env("envpool/CartPole-v1", N)


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "task=envpool/Look-v5",
            "model=cnn",
            "model.cnn.channels=[4]",
            "model.cnn.kernels=[3]",
            "model.cnn.strides=[2]",
        ],
        ["task=envpool/MuJoCoPlayground/Joystick-v1", "reset=staggered_block"],
    ],
)
def test_a_training_runs_on_it(pools, overrides, tmp_path):
    quiet = ["logging.curves=false", "logging.tensorboard=false", "logging.console=off", f"run_dir={tmp_path / 'run'}"]
    cfg = rs.load_config([*overrides, "num_envs=6", "rollout_steps=3", "iterations=4", *quiet])
    env = rs.make_env(cfg.task.name, cfg.num_envs, seed=cfg.seed, **cfg.task.settings)
    assert rs.Runner(env, cfg).learn().summary["status"] == "finished"


# -- envpool itself ---------------------------------------------------------------------------------------------------
@pytest.fixture
def envpool():
    return pytest.importorskip("envpool")


@pytest.mark.sim
@pytest.mark.parametrize("task_id", ["CartPole-v1", "Pendulum-v1", "MuJoCoPlayground/Go1JoystickFlatTerrain-v1"])
def test_envpool_keeps_the_contract(envpool, task_id):
    report = check_env(rs.make_env(f"envpool/{task_id}", 4, num_threads=1), steps=60)
    assert report.ok, str(report)
    assert not report.warnings, str(report)


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_envpool_behaves_as_the_double_does(envpool):
    import numpy as np

    make = {"env_type": "gymnasium", "num_envs": 3, "num_threads": 1}
    pool = envpool.make("Pendulum-v1", seed=[1, 2, 3], max_episode_steps=3, **make)
    first, _ = pool.reset()
    torque = np.zeros((3, 1), dtype=np.float32)
    for _ in range(3):
        _, _, _, truncated, _ = pool.step(torque)
    assert truncated.all()
    rows, _ = pool.reset(options={"reset_mask": np.array([True, False, False])})
    assert rows.shape == (1, 3)  # only the rows that were reset
    _, reward, _, _, info = pool.step(torque)
    assert reward[0] != 0  # has had its reset
    assert reward[1:].tolist() == [0.0, 0.0]  # the reset steps of the others
    assert info["elapsed_step"].tolist() == [1, 0, 0]
    again = envpool.make("Pendulum-v1", seed=[1, 2, 3], **make)
    with pytest.warns(UserWarning, match="seed"):
        assert np.array_equal(again.reset(seed=7)[0], first)  # seeds are taken when it is made
    pool = envpool.make("CartPole-v1", seed=1, max_episode_steps=9, **make)
    pool.reset()
    for _ in range(9):
        _, _, terminated, truncated, _ = pool.step(np.ones(3, dtype=np.int32))
    assert truncated.any()
    assert not (terminated & truncated).any()


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:.*precision lowered")
@pytest.mark.parametrize("task_id", ["CartPole-v1", "MuJoCoPlayground/Go1JoystickFlatTerrain-v1"])
def test_taking_envpools_own_time_limit_off_changes_no_episode(envpool, task_id):
    import numpy as np

    make = {"env_type": "gymnasium", "num_envs": 3, "num_threads": 1, "seed": [4, 5, 6]}
    with_limit, without = (envpool.make(task_id, **make, **more) for more in ({}, {"max_episode_steps": 2**31 - 1}))
    space = with_limit.action_space
    space.seed(0)
    for pool in (with_limit, without):
        pool.reset()
    for _ in range(60):
        action = np.stack([space.sample() for _ in range(3)])
        (a, *more), (b, *other) = with_limit.step(action), without.step(action)
        for name in a if isinstance(a, dict) else [None]:
            assert np.array_equal(a if name is None else a[name], b if name is None else b[name])
        assert all(np.array_equal(x, y) for x, y in zip(more[:3], other[:3]))
