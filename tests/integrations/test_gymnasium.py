"""Gymnasium's vector environments in a CleanRL-style loop, and their contract in each autoreset mode."""

import numpy as np
import pytest
import torch
from helpers.toy_envs_runner import CounterEnv
from torch import nn

import rl_stagger as rs
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import as_gymnasium, stagger

gym = pytest.importorskip("gymnasium")
pytestmark = pytest.mark.integrations

N, K, H = 6, 4, 12
MODES = ["NextStep", "SameStep", "Disabled"]
NO_ACTION = np.zeros((N, 1), dtype=np.float32)


def host_env(mode="SameStep", lengths=(), kind="sync", **settings):
    from helpers.gym_counter import counter_fns

    make = gym.vector.SyncVectorEnv if kind == "sync" else gym.vector.AsyncVectorEnv
    return make(counter_fns(N, H, lengths), autoreset_mode=mode, **settings)


class CleanRlLoop:
    """One-file PPO with continuous actions in the manner of CleanRL: a loop that knows Gymnasium and nothing of us.

    The steps that only reset (NEXT_STEP) are left out of the loss; time limits are bootstrapped where the last
    observation is to be had.
    """

    def __init__(self, envs, rollout_steps):
        size, actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.envs, self.rollout_steps = envs, rollout_steps
        self.actor = nn.Sequential(nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, actions))
        self.critic = nn.Sequential(nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(actions))
        parameters = [*self.actor.parameters(), *self.critic.parameters(), self.log_std]
        self.optimizer = torch.optim.Adam(parameters, lr=3e-4)
        self.mode = envs.metadata["autoreset_mode"].value
        self.wasted = 0

    def policy(self, obs):
        return torch.distributions.Normal(self.actor(obs), self.log_std.exp())

    def learn(self, iterations, seed=0):
        low, high = self.envs.single_action_space.low, self.envs.single_action_space.high
        obs, _ = self.envs.reset(seed=seed)
        was_done = np.zeros(self.envs.num_envs, dtype=bool)
        for _ in range(iterations):
            rows = []
            for _ in range(self.rollout_steps):
                x = torch.as_tensor(obs, dtype=torch.float32)
                with torch.no_grad():
                    dist = self.policy(x)
                    action = dist.sample()
                obs, reward, terminated, truncated, info = self.envs.step(np.clip(action.numpy(), low, high))
                done = terminated | truncated
                dummy = was_done if self.mode == "NextStep" else np.zeros_like(done)
                rows.append([x, action, dist.log_prob(action).sum(1), reward, ~dummy, *self.after(obs, done, info)])
                if self.mode == "Disabled" and done.any():
                    obs, _ = self.envs.reset(options={"reset_mask": done})
                self.wasted += int(dummy.sum())
                was_done = done & ~dummy
            self.update(rows, torch.as_tensor(terminated))
        return self

    def after(self, obs, done, info):
        last = np.array(obs, dtype=np.float32)
        if self.mode == "SameStep":
            for i in np.flatnonzero(done):
                last[i] = info["final_obs"][i]
        return torch.as_tensor(last), torch.as_tensor(done)

    def update(self, rows, terminated):
        x, action, old, reward, valid, after, done = (
            torch.stack([torch.as_tensor(row[i]) for row in rows]) for i in range(7)
        )
        with torch.no_grad():
            value, next_value = self.critic(x).squeeze(-1), self.critic(after).squeeze(-1)
            delta = reward.float() + 0.99 * next_value - value
            advantage, running = torch.zeros_like(delta), torch.zeros(delta.shape[1])
            for t in reversed(range(len(rows))):
                running = delta[t] + 0.99 * 0.95 * running * ~done[t]
                advantage[t] = running
        for _ in range(2):
            ratio = (self.policy(x).log_prob(action).sum(-1) - old).exp()
            policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[valid].mean()
            error = (self.critic(x).squeeze(-1) - (value + advantage))[valid].square().mean()
            self.optimizer.zero_grad()
            (policy + 0.5 * error).backward()
            self.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_cleanrl_style_loop_on_pendulum(mode):
    """T = 13 rollouts are more than an episode. Coverage stays under 1 for 20 environments in 10 bins."""
    from gymnasium.vector import SyncVectorEnv

    def train(**settings):
        host = SyncVectorEnv([lambda: gym.make("Pendulum-v1") for _ in range(20)], autoreset_mode=mode)
        env = stagger(host, rollout_steps=20, **settings)
        loop = CleanRlLoop(env, 20)
        before = [p.clone() for p in loop.actor.parameters()]
        loop.learn(13)
        assert any((a != b).any() for a, b in zip(before, loop.actor.parameters()))
        return env.measures(), loop.wasted

    measures, wasted = train()
    assert measures["batch/coverage"] >= 0.95
    assert measures["steps/warmup"] == 180 * 20
    assert (wasted > 0) == (mode == "NextStep")
    assert train(bring_up="none")[0]["batch/coverage"] <= 0.5


def test_a_cleanrl_style_loop_on_a_task_of_ours():
    env = stagger(as_gymnasium(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10)
    CleanRlLoop(env, 10).learn(5)
    assert env.measures()["batch/coverage"] >= 0.95


def test_cartpoles_that_fall_keep_the_coverage_low_but_measured():
    """Random CartPole episodes last about 20 of 500 steps: no start can hold them apart, and the measures say so."""
    env = stagger(gym.make_vec("CartPole-v1", 8, vectorization_mode="sync"), rollout_steps=50)
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(50):
        env.step(env.action_space.sample())
    assert env.measures()["batch/coverage"] < 0.5


@pytest.mark.parametrize("mode", MODES)
def test_it_is_still_gymnasiums_environment(mode):
    host = host_env(mode)
    env = stagger(host, rollout_steps=K)
    assert isinstance(env, gym.vector.VectorEnv)
    assert env.metadata["autoreset_mode"] is gym.vector.AutoresetMode(mode)
    assert env.single_observation_space == host.single_observation_space
    assert env.unwrapped is host
    assert env.get_attr("index") == tuple(range(N))
    obs, info = env.reset(seed=1)
    assert (obs.dtype, obs[:, 0].tolist(), type(info)) == (np.float32, [0, 4, 8] * 2, dict)
    obs, reward, terminated, truncated, info = env.step(NO_ACTION)
    assert (reward.dtype, reward.tolist()) == (np.float64, [1, 5, 9] * 2)
    assert (terminated.dtype, truncated.dtype) == (np.bool_, np.bool_)
    env.close()


def test_same_step_gives_the_last_observation():
    """Group 8 times out after 4 steps, environment 1 (at 4) terminates at length 6 after 2."""
    for env in (
        stagger(host_env("SameStep", lengths=(0, 6, 0, 0, 0, 0)), rollout_steps=K),
        stagger(as_gymnasium(CounterEnv(N, horizon_steps=H, lengths=(0, 6, 0, 0, 0, 0))), rollout_steps=K),
    ):
        env.reset()
        steps = [env.step(NO_ACTION) for _ in range(4)]
        obs, _, terminated, truncated, info = steps[1]
        assert terminated.tolist() == [False, True, False, False, False, False]
        assert not truncated.any()
        assert info["final_obs"][1].tolist() == [6, 1]
        assert (info["final_obs"][0], info["_final_obs"].tolist()) == (None, terminated.tolist())
        assert obs[1].tolist() == [0, 1]
        _, _, terminated, truncated, info = steps[3]
        assert truncated.tolist() == [False, False, True] * 2
        assert [info["final_obs"][i].tolist() for i in (2, 5)] == [[12, 2], [12, 5]]


def test_next_step_keeps_its_reset_step_out_of_the_measures():
    """Group 8 times out after 4 steps; the fifth only resets it: reward 0, observation 0, the action ignored."""
    env = stagger(host_env("NextStep"), rollout_steps=K)
    env.reset()
    steps = [env.step(NO_ACTION) for _ in range(6)]
    assert steps[3][3].tolist() == [False, False, True] * 2
    assert steps[3][0][2].tolist() == [12, 2]  # the last observation is what the step shows
    assert steps[4][0][2].tolist() == [0, 2]
    assert (steps[4][1][2], steps[5][1][2]) == (0.0, 1.0)
    assert env.stagger.phase_steps.tolist() == [6, 10, 1] * 2
    # The last 4 steps hold 4 * 6 rows, two of them dummies. Phases before them: 2 3 4 5 | 6 7 8 9 | 10 11 - 0.
    assert env.measures()["batch/phase_histogram"] == pytest.approx([6 / 22, 8 / 22, 8 / 22])


def test_next_step_begins_without_a_reset_step_pending():
    """Length 5: after the warm-up's 8 steps, group 0 has just begun and the others end in it, some in its last step."""
    env = stagger(host_env("NextStep", lengths=(0, 4, 8, 3, 2, 7)), rollout_steps=K)
    obs, _ = env.reset()
    _, reward, _, _, _ = env.step(NO_ACTION)
    assert reward.tolist() == (obs[:, 0] + 1).tolist()


def test_disabled_leaves_the_resets_to_the_loop():
    env = stagger(host_env("Disabled"), rollout_steps=K)
    env.reset()
    steps = [env.step(NO_ACTION) for _ in range(4)]
    done = steps[3][3]
    assert steps[3][0][done][:, 0].tolist() == [12, 12]
    obs, _ = env.reset(options={"reset_mask": done})
    assert obs[:, 0].tolist() == [4, 8, 0] * 2
    env.step(NO_ACTION)
    assert env.measures()["resets/per_step_max"] == 2
    obs, _ = env.reset()  # a whole bring-up again
    assert obs[:, 0].tolist() == [0, 4, 8] * 2


def test_the_rules_own_cuts_are_truncations_with_a_last_observation():
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(host_env("SameStep"), rollout_steps=K, **settings)
    env.reset()
    for _ in range(K):
        obs, _, terminated, truncated, info = env.step(NO_ACTION)
    assert not terminated.any()
    cut = np.flatnonzero(truncated)
    assert 0 < len(cut) < N
    assert info["_final_obs"].tolist() == truncated.tolist()
    assert [info["final_obs"][i].tolist() for i in cut] == [[4, i] for i in cut]
    assert [obs[i].tolist() for i in cut] == [[0, i] for i in cut]
    for mode in ("NextStep", "Disabled"):
        with pytest.raises(ConfigError, match=r"upkeep='on_coverage_below'.*SAME_STEP"):
            stagger(host_env(mode), rollout_steps=K, **settings)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_written_clock_ends_episodes(kind):
    env = stagger(host_env("SameStep", kind=kind), rollout_steps=K, bring_up="clock")
    env.reset()
    ended = [env.step(NO_ACTION)[3].tolist() for _ in range(4)]
    assert ended == [[False] * N] * 3 + [[False, False, True] * 2]
    env.close()


def test_processes_are_reset_row_by_row():
    env = stagger(host_env("NextStep", kind="async"), rollout_steps=K)
    assert env.reset()[0][:, 0].tolist() == [0, 4, 8] * 2
    env.close()


def test_a_vector_env_that_cannot_reset_rows_is_refused():
    """Gymnasium's own CartPoleVectorEnv takes no reset mask."""
    host = gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    with pytest.raises(CapabilityError, match=r"partial_reset.*possible here"):
        stagger(host, rollout_steps=K)


def test_dict_and_whole_number_observations_keep_their_types():
    class Odd(gym.Env):
        observation_space = gym.spaces.Dict(
            {"pixel": gym.spaces.Box(0, 255, (3,), np.uint8), "big": gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)}
        )
        action_space = gym.spaces.MultiDiscrete([3, 2])
        render_mode = None

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"pixel": np.array([0, 128, 255], np.uint8), "big": np.array([1e9 + 1.0])}, {}

        def step(self, action):
            assert self.action_space.contains(action)
            return *self.reset()[:1], 0.0, False, False, {}

    fns = [lambda: gym.wrappers.TimeLimit(Odd(), H) for _ in range(N)]
    env = stagger(gym.vector.SyncVectorEnv(fns, autoreset_mode="SameStep"), rollout_steps=K)
    obs, _ = env.reset()
    assert obs["pixel"].dtype == np.uint8
    assert obs["pixel"][5].tolist() == [0, 128, 255]
    assert obs["big"].dtype == np.float64
    assert obs["big"][0, 0] == 1e9 + 1.0
    env.step(env.action_space.sample())


def test_wrappers_that_count_go_around():
    from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics

    with pytest.raises(ConfigError, match=r"RecordEpisodeStatistics\(stagger\(\.\.\.\)\)"):
        stagger(RecordEpisodeStatistics(host_env()), rollout_steps=K)
    env = RecordEpisodeStatistics(NormalizeObservation(stagger(host_env("NextStep"), rollout_steps=K)))
    env.reset()
    ended = [env.step(NO_ACTION)[4].get("episode") for _ in range(4)]
    assert ended[3]["l"].tolist() == [0, 0, 4] * 2  # it counts from where the training began


def test_a_staggered_environment_inside_a_wrapper_is_found():
    inner = stagger(host_env(), rollout_steps=K)
    wrapped = gym.wrappers.vector.ClipReward(inner, -1, 1)
    with pytest.raises(ConfigError, match="what it wraps is staggered already"):
        stagger(wrapped, rollout_steps=K)


@pytest.mark.parametrize("asked", [H + 1, H - 1, 0, -5, 2.5, "x"])
def test_a_horizon_that_contradicts_the_environment_is_refused(asked):
    with pytest.raises(ConfigError, match=f"horizon_steps=.*{asked}"):
        stagger(host_env(), rollout_steps=K, horizon_steps=asked)
    assert stagger(host_env(), rollout_steps=K, horizon_steps=H).stagger.spec.horizon_steps == H
