"""Isaac Lab's rsl_rl wrapper, on a double of its contract (no package of it to install), under rsl_rl's runner."""

import pytest
import torch

from rl_stagger.envs.base import Capability
from rl_stagger.integrations import stagger

pytest.importorskip("rsl_rl")
pytestmark = pytest.mark.integrations

N, K, H = 6, 4, 12
KINDS = ["ManagerEnv", "DirectEnv"]


def host_env(kind="ManagerEnv", **settings):
    from doubles import isaac_lab

    return isaac_lab.RslRlVecEnvWrapper(getattr(isaac_lab, kind)(**settings))


def zeros():
    return torch.zeros(N, 3)


def train(env, iterations):
    from rsl_rl.runners import OnPolicyRunner

    model = {"class_name": "rsl_rl.models.MLPModel", "hidden_dims": [8], "activation": "elu"}
    cfg = {
        "num_steps_per_env": K,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": dict(model),
        "algorithm": {"class_name": "rsl_rl.algorithms.PPO", "num_learning_epochs": 1, "num_mini_batches": 1},
    }
    OnPolicyRunner(env, cfg).learn(iterations)


@pytest.mark.parametrize("kind", KINDS)
def test_the_runner_sees_all_phases(kind):
    env = stagger(host_env(kind), rollout_steps=K)
    train(env, 6)
    assert env.measures()["batch/coverage"] >= 0.95
    assert env.measures()["steps/warmup"] == 8 * N
    env = stagger(host_env(kind), rollout_steps=K, bring_up="none")
    train(env, 6)
    assert env.measures()["batch/coverage"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_clocks_agree_after_the_bring_up(kind):
    env = stagger(host_env(kind), rollout_steps=K)
    obs = env.get_observations()
    assert obs["policy"][:, 0].tolist() == [0, 4, 8] * 2
    assert env.episode_length_buf.tolist() == [0, 4, 8] * 2
    assert env.unwrapped.count.tolist() == [0, 4, 8] * 2
    if kind == "DirectEnv":
        assert env.unwrapped.written > 0


def test_rows_that_are_not_reset_keep_what_they_showed():
    """Looking draws new noise for all; a partial reset must show it in its own rows only."""
    env = stagger(host_env(), rollout_steps=K)
    before = env.get_observations()["policy"].clone()
    mask = torch.tensor([True] + [False] * 5)
    after = env.stagger.reset(mask)["policy"]
    assert after[1:].equal(before[1:])
    assert after[0, 1] != before[0, 1]


def test_buffers_that_the_host_reuses_are_copied():
    env = stagger(host_env(), rollout_steps=K)
    first = env.step(zeros())
    kept = [first[1].clone(), first[2].clone(), first[3]["time_outs"].clone()]
    for _ in range(4):
        env.step(zeros())
    assert first[1].equal(kept[0])
    assert first[2].equal(kept[1])
    assert first[3]["time_outs"].equal(kept[2])


def test_time_outs_and_terminations():
    """Group 8 times out after 4 steps; environment 1 (at 4) terminates at length 6 after 2."""
    env = stagger(host_env(lengths=(0, 6, 0, 0, 0, 0)), rollout_steps=K)
    steps = [env.step(zeros()) for _ in range(4)]
    assert steps[1][2].tolist() == [0, 1, 0, 0, 0, 0]
    assert not steps[1][3]["time_outs"].any()
    assert steps[3][3]["time_outs"].tolist() == [False, False, True] * 2
    assert steps[3][3]["log"]["Episode_Reward/alive"] == 1.0


def test_a_finite_horizon_is_a_true_end_but_the_rules_cuts_are_not():
    env = stagger(host_env(finite=True), rollout_steps=K)
    steps = [env.step(zeros()) for _ in range(4)]
    assert steps[3][2].tolist() == [0, 0, 1] * 2
    assert not steps[3][3]["time_outs"].any()
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(host_env(finite=True), rollout_steps=K, **settings)
    obs, _, dones, extras = [env.step(zeros()) for _ in range(K)][-1]
    assert 0 < int(extras["time_outs"].sum()) < N
    assert extras["time_outs"].equal(dones > 0)
    assert (obs["policy"][dones > 0, 0] == 0).all()


def test_the_final_observation_where_the_host_has_been_told_to_compute_it():
    env = stagger(host_env(final_obs=True), rollout_steps=K)
    assert Capability.FINAL_OBS in env.stagger.capabilities
    assert Capability.FINAL_OBS not in stagger(host_env(), rollout_steps=K).stagger.capabilities
    env.get_observations()
    step = [env.stagger.step(zeros()) for _ in range(4)][-1]
    assert step.final_obs["policy"][2, 0] == 12
    assert step.obs["policy"][2, 0] == 0


def test_a_written_clock():
    env = stagger(host_env(), rollout_steps=K, bring_up="clock")
    env.get_observations()
    assert env.unwrapped.episode_length_buf.tolist() == [0, 4, 8] * 2
    assert env.unwrapped.count.tolist() == [0.0] * N
    with pytest.warns(UserWarning, match="init_at_random_ep_len"):
        env.episode_length_buf = torch.zeros(N, dtype=torch.long)
    assert env.unwrapped.episode_length_buf.tolist() == [0, 4, 8] * 2


def test_the_rest_of_the_wrapper_is_there():
    host = host_env()
    env = stagger(host, rollout_steps=K)
    assert env.unwrapped is host.unwrapped
    assert env.cfg is host.cfg
    env.close()
    assert host.unwrapped.closed
