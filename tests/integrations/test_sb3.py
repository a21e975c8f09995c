"""stable-baselines3's own PPO on staggered environments, and its contract row by row."""

import numpy as np
import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

import rl_stagger as rs
from rl_stagger.envs.base import Box, Capability, EnvSpec
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import as_sb3, stagger

pytest.importorskip("stable_baselines3")
pytestmark = pytest.mark.integrations

N, K, H = 6, 4, 12
NO_ACTION = np.zeros((N, 1), dtype=np.float32)


def host_env(lengths=(), monitored=False, subprocesses=False, num_envs=N):
    from helpers.gym_counter import counter_fns
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    fns = counter_fns(num_envs, H, lengths)
    if monitored:
        fns = [lambda fn=fn: Monitor(fn()) for fn in fns]
    return SubprocVecEnv(fns) if subprocesses else DummyVecEnv(fns)


def ppo(env, rollout_steps, **more):
    from stable_baselines3 import PPO

    settings = {"n_epochs": 2, "batch_size": rollout_steps * env.num_envs // 2, "seed": 0, "device": "cpu", **more}
    return PPO("MlpPolicy", env, n_steps=rollout_steps, **settings)


def test_ppo_on_a_task_of_ours():
    env = stagger(as_sb3(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10)
    model = ppo(env, 10)
    model.learn(64 * 10 * 25)
    assert env.measures()["batch/coverage"] >= 0.95
    assert env.measures()["batch/tv_distance"] < 0.1
    assert model.ep_info_buffer
    assert {episode["l"] for episode in model.ep_info_buffer} == {200}


def test_ppo_without_staggering():
    env = stagger(as_sb3(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10, bring_up="none")
    ppo(env, 10).learn(64 * 10 * 5)
    assert env.measures()["batch/coverage"] == 0.0


def test_ppo_on_pendulum_with_a_normaliser_around():
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    env = stagger(make_vec_env("Pendulum-v1", 10, seed=0), rollout_steps=20)
    model = ppo(VecNormalize(env), 20)
    model.learn(10 * 20 * 15)
    assert env.measures()["batch/coverage"] >= 0.95
    assert env.measures()["steps/warmup"] == 180 * 10
    assert {episode["l"] for episode in model.ep_info_buffer} == {200}


def test_it_is_still_sb3s_environment():
    from stable_baselines3.common.vec_env import VecEnv

    host = host_env()
    env = stagger(host, rollout_steps=K)
    assert isinstance(env, VecEnv)
    assert env.observation_space == host.observation_space
    assert env.get_attr("index") == list(range(N))
    assert env.env_method("get_wrapper_attr", "index", indices=[2]) == [2]
    obs = env.reset()
    assert (type(obs), obs.dtype, obs.shape) == (np.ndarray, np.float32, (N, 2))
    assert obs[:, 0].tolist() == [0, 4, 8] * 2
    obs, reward, done, infos = env.step(NO_ACTION)
    assert reward.tolist() == [1, 5, 9] * 2
    assert (reward.dtype, done.dtype, len(infos)) == (np.float32, np.bool_, N)
    env.close()


@pytest.mark.parametrize("ours", [False, True])
def test_a_time_limit_has_its_last_observation_and_a_failure_no_mark(ours):
    """Groups at 0, 4, 8. Environment 1 terminates at length 6, after 2 steps; those of group 8 time out after 4, their
    episode's observation then 12 steps old."""
    if ours:
        env = stagger(as_sb3(CounterEnv(N, horizon_steps=H, lengths=(0, 6, 0, 0, 0, 0))), rollout_steps=K)
    else:
        env = stagger(host_env(lengths=(0, 6, 0, 0, 0, 0)), rollout_steps=K)
    env.reset()
    ends = [env.step(NO_ACTION) for _ in range(4)]
    obs, _, done, infos = ends[1]
    assert done.tolist() == [False, True, False, False, False, False]
    assert infos[1]["TimeLimit.truncated"] is False
    assert infos[1]["terminal_observation"].tolist() == [6, 1]
    assert obs[1].tolist() == [0, 1]
    obs, _, done, infos = ends[3]
    assert done.tolist() == [False, False, True] * 2
    for i in (2, 5):
        assert infos[i]["TimeLimit.truncated"] is True
        assert infos[i]["terminal_observation"].tolist() == [12, i]
    assert "terminal_observation" not in infos[0]


@pytest.mark.parametrize("ours", [False, True])
def test_only_full_episodes_are_reported(ours):
    """Groups at 0, 4, 8: what ends after 4 and 8 steps was begun in the warm-up. Rewards 1 .. 12 make 78."""
    if ours:
        env = stagger(as_sb3(CounterEnv(N, horizon_steps=H)), rollout_steps=K)
    else:
        env = stagger(host_env(monitored=True), rollout_steps=K)
    env.reset()
    for t in range(1, 17):
        _, _, done, infos = env.step(NO_ACTION)
        told = [i for i, info in enumerate(infos) if "episode" in info]
        assert told == {12: [0, 3], 16: [2, 5]}.get(t, [])
        for i in told:
            assert (infos[i]["episode"]["r"], infos[i]["episode"]["l"]) == (78.0, 12)
        assert done.any() == (t % 4 == 0)


def test_the_rules_own_cuts_are_time_limits():
    """All begin together and the rule spreads them by cuts after K steps, in states that are 4 steps old."""
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(host_env(monitored=True), rollout_steps=K, **settings)
    env.reset()
    for _ in range(K):
        obs, _, done, infos = env.step(NO_ACTION)
    cut = np.flatnonzero(done)
    assert 0 < len(cut) < N
    for i in cut:
        assert infos[i]["TimeLimit.truncated"] is True
        assert infos[i]["terminal_observation"].tolist() == [4, i]
        assert obs[i].tolist() == [0, i]
        assert "episode" not in infos[i]


def test_a_written_clock_ends_episodes():
    env = stagger(host_env(), rollout_steps=K, bring_up="clock")
    env.reset()
    ended = [env.step(NO_ACTION)[2].tolist() for _ in range(4)]
    assert ended == [[False] * N] * 3 + [[False, False, True] * 2]


def test_subprocesses_are_reached_row_by_row():
    """Two groups at 0 and 6; then the first one's clock is written to its last step."""
    env = stagger(host_env(num_envs=2, subprocesses=True), rollout_steps=6)
    assert env.reset()[:, 0].tolist() == [0, 6]
    env.stagger.set_elapsed_steps(torch.tensor([H - 1, 0]), torch.tensor([True, False]))
    _, _, done, infos = env.step(NO_ACTION[:2])
    assert done.tolist() == [True, False]
    assert infos[0]["terminal_observation"].tolist() == [1, 0]
    env.close()


def test_a_wrapper_inside_is_refused_with_the_right_order():
    from stable_baselines3.common.vec_env import VecNormalize

    with pytest.raises(ConfigError, match=r"VecNormalize\(stagger\(venv"):
        stagger(VecNormalize(host_env()), rollout_steps=K)


def test_an_environment_without_a_time_limit_needs_a_word():
    from helpers.gym_counter import Counter
    from stable_baselines3.common.vec_env import DummyVecEnv

    host = DummyVecEnv([lambda i=i: Counter(i, H) for i in range(N)])
    with pytest.raises(ConfigError, match="no time limit"):
        stagger(host, rollout_steps=K)
    env = stagger(host, rollout_steps=K, horizon_steps=H)
    assert env.reset()[:, 0].tolist() == [0, 4, 8] * 2
    with pytest.raises(CapabilityError, match="set_clock"):
        stagger(host, rollout_steps=K, horizon_steps=H, bring_up="clock")


def test_actors_see_the_hosts_observations():
    seen = []

    def actor(obs):
        seen.append(obs)
        return NO_ACTION

    stagger(host_env(), rollout_steps=K, actor=actor).reset()
    assert len(seen) == 8
    assert (type(seen[0]), seen[3][0].tolist()) == (np.ndarray, [3.0, 0.0])


def test_random_warm_ups_follow_the_seed():
    """Pendulum's state after a warm-up depends on the actions."""
    from stable_baselines3.common.env_util import make_vec_env

    def start(seed):
        env = stagger(make_vec_env("Pendulum-v1", 4, seed=5), rollout_steps=50, seed=seed)
        return env.reset()

    assert np.array_equal(start(1), start(1))
    assert not np.array_equal(start(1), start(2))


def test_unbounded_actions_need_bounds():
    class Unbounded(CounterEnv):
        def __init__(self):
            super().__init__(N, horizon_steps=H)
            self.spec = EnvSpec({"policy": (2,)}, Box(1), H)

    with pytest.raises(ConfigError, match="action_bound"):
        as_sb3(Unbounded())
    env = stagger(as_sb3(Unbounded(), action_bound=2.0), rollout_steps=K)
    assert (env.action_space.low, env.action_space.high) == (-2.0, 2.0)


def test_more_groups_are_a_dict():
    class TwoGroups(CounterEnv):
        def __init__(self):
            super().__init__(N, horizon_steps=H)
            self.spec = EnvSpec({"policy": (2,), "critic": (2,)}, Box(1, -1.0, 1.0), H)

        def _observe(self, state, elapsed):
            obs = super()._observe(state, elapsed)["policy"]
            return {"policy": obs, "critic": -obs}

    env = stagger(as_sb3(TwoGroups()), rollout_steps=K)
    obs = env.reset()
    assert {name: x[1].tolist() for name, x in obs.items()} == {"policy": [4, 1], "critic": [-4, -1]}
    from stable_baselines3 import PPO

    PPO("MultiInputPolicy", env, n_steps=K, batch_size=12, n_epochs=1, device="cpu").learn(3 * N * K)
    assert env.measures()["batch/coverage"] >= 0.95


def test_what_a_host_can_do():
    from rl_stagger.integrations.sb3_env import FromSb3

    assert FromSb3(host_env()).capabilities == {Capability.PARTIAL_RESET, Capability.SET_CLOCK, Capability.FINAL_OBS}
    assert torch.equal(FromSb3(host_env()).elapsed_steps, torch.zeros(N, dtype=torch.int64))
