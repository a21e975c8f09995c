"""rl_games' own Runner on staggered environments, and its contract row by row."""

import warnings

import numpy as np
import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

import rl_stagger as rs
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import as_rl_games, stagger

pytest.importorskip("rl_games")
pytestmark = pytest.mark.integrations
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's own, at the first import of its compiler
    import rl_games.torch_runner  # noqa: F401

N, K, H = 6, 4, 12


def train(env, epochs, tmp_path, num_actors, rollout_steps, **more):
    """rl_games' Runner with a continuous A2C agent on `env`; the agent."""
    from rl_games.common import env_configurations, vecenv
    from rl_games.torch_runner import Runner

    vecenv.register("STAGGER_TEST", lambda name, num_actors, **more: env)
    env_configurations.register("stagger_test", {"vecenv_type": "STAGGER_TEST", "env_creator": None})
    const = {"name": "const_initializer", "val": 0}
    space = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}, "fixed_sigma": True}
    mlp = {"units": [16], "activation": "elu", "initializer": {"name": "default"}}
    network = {
        "name": "actor_critic",
        "separate": False,
        "space": {"continuous": {**space, "sigma_init": const}},
        "mlp": mlp,
    }
    config = {
        "name": "t", "env_name": "stagger_test", "device": "cpu", "device_name": "cpu", "train_dir": str(tmp_path),
        "reward_shaper": {"scale_value": 1.0}, "normalize_advantage": True, "normalize_input": False,
        "gamma": 0.99, "tau": 0.95, "learning_rate": 1e-3, "lr_schedule": None, "grad_norm": 1.0, "entropy_coef": 0.0,
        "truncate_grads": True, "e_clip": 0.2, "clip_value": False, "num_actors": num_actors,
        "horizon_length": rollout_steps, "minibatch_size": num_actors * rollout_steps // 2, "mini_epochs": 2,
        "critic_coef": 1.0, "bounds_loss_coef": 0.0, "max_epochs": epochs, "save_best_after": 10_000,
        "print_stats": False, **more,
    }  # fmt: skip
    params = {"seed": 7, "algo": {"name": "a2c_continuous"}, "model": {"name": "continuous_a2c_logstd"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rl_games' and TensorBoard's own
        runner = Runner()
        runner.load({"params": {**params, "network": network, "config": config}})
        agent = runner.algo_factory.create("a2c_continuous", base_name="run", params=runner.params)
        before = [p.detach().clone() for p in agent.model.parameters()]
        agent.train()
    assert any((a != b).any() for a, b in zip(before, agent.model.parameters()))
    agent.writer.close()
    return agent


def host_env(**settings):
    """An `IVecEnv` written without us, with what the wild ones do: a partial reset beside the contract, buffers that
    are reused, a mask of time-outs that stands until the next reset."""
    from rl_games.common.ivecenv import IVecEnv

    class Task:
        def __init__(self, lengths):
            self.progress_buf = torch.zeros(N, dtype=torch.long)
            self.count, self.lengths, self.max_episode_length = torch.zeros(N), torch.tensor(lengths), H

        def reset_idx(self, ids):
            self.count[ids] = 0
            self.progress_buf[ids] = 0

    class Host(IVecEnv):
        def __init__(self, lengths=(0,) * N, central=False, numpy=False):
            self.env, self.central, self.numpy = Task(lengths), central, numpy
            self.obs, self.infos, self.seen = torch.zeros(N, 1), {"mine": 1}, []

        def _look(self):
            self.obs.copy_(self.env.count.unsqueeze(1))
            if self.numpy:
                return self.obs.numpy()
            return {"obs": self.obs, "states": self.obs * 10} if self.central else self.obs

        def reset(self):
            self.env.reset_idx(torch.arange(N))
            return self._look()

        def reset_rows(self, env_mask):
            self.env.reset_idx(env_mask.nonzero().squeeze(1))
            return self._look()

        def step(self, actions):
            self.seen.append(actions)
            task = self.env
            task.count += 1
            task.progress_buf += 1
            time_outs = task.progress_buf >= H
            done = time_outs | (task.count == task.lengths)
            reward = task.count.clone()
            if done.any():
                self.infos["time_outs"] = time_outs.numpy().copy() if self.numpy else time_outs.long()
                task.reset_idx(done.nonzero().squeeze(1))
            if self.numpy:
                return self._look(), reward.numpy(), done.numpy(), dict(self.infos)
            return self._look(), reward, done.long(), dict(self.infos)

        def get_env_info(self):
            from gymnasium import spaces

            box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
            info = {"action_space": spaces.Box(-1.0, 1.0, (1,), np.float32), "observation_space": box}
            return {**info, "state_space": box} if self.central else info

        def get_env_state(self):
            return {"level": 3}

    return Host(**settings)


def zeros(num_envs=N):
    return torch.zeros(num_envs, 1)


def test_runner_on_a_task_of_ours(tmp_path):
    env = stagger(as_rl_games(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10)
    train(env, 5, tmp_path, 64, 10)
    measures = env.measures()
    assert measures["batch/coverage"] >= 0.95
    assert measures["batch/tv_distance"] < 0.1
    assert measures["steps/warmup"] == 190 * 64  # 20 groups of 10 steps: the last begins at 190
    assert len(measures["batch/phase_histogram"]) == 20


def test_runner_without_staggering(tmp_path):
    env = stagger(as_rl_games(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10, bring_up="none")
    train(env, 5, tmp_path, 64, 10)
    assert env.measures()["batch/coverage"] == 0.0
    assert env.measures()["batch/tv_distance"] == 1.0


@pytest.mark.parametrize("settings", [{}, {"central": True}, {"numpy": True}], ids=["tensor", "central", "numpy"])
def test_runner_on_a_host_environment(tmp_path, settings):
    env = stagger(host_env(**settings), rollout_steps=K)
    train(env, 6, tmp_path, N, K)
    assert env.measures()["batch/coverage"] >= 0.95


def test_the_trainer_bootstraps_exactly_the_truncated(tmp_path):
    """Reward 0 everywhere, gamma .5, all values 2 (a network of zeros with bias 2): a truncated step is worth
    0 + .5 * 2 = 1 to rl_games, a terminated one 0."""

    class Still(CounterEnv):
        def step(self, action):
            step = super().step(action)
            step.reward = torch.zeros_like(step.reward)
            return step

    env = stagger(as_rl_games(Still(N, horizon_steps=H, lengths=(0, 0, 0, 0, 0, 9))), rollout_steps=K)
    agent = train(env, 1, tmp_path, N, K, gamma=0.5)
    env.reset()
    agent.obs = agent.obs_to_tensors(env.reset())
    with torch.no_grad():
        agent.model.a2c_network.value.weight.zero_()
        agent.model.a2c_network.value.bias.fill_(2.0)
        agent.play_steps()
    rewards = agent.experience_buffer.tensor_dict["rewards"].squeeze(2)
    # Offsets 0, 4, 8 twice: environments 2 and 5 stand at 8. 2 times out with its 4th step; 5 was reset at 8 steps
    # before the end of the warm-up and terminates with its 9th step, the 1st of the rollout.
    expected = torch.zeros(K, N)
    expected[3, 2] = 1.0
    assert rewards.tolist() == expected.tolist()


def test_it_is_still_rl_games_environment():
    from rl_games.common.ivecenv import IVecEnv

    host = host_env(central=True)
    env = stagger(host, rollout_steps=K)
    assert isinstance(env, IVecEnv)
    assert env.env is host.env
    assert env.get_number_of_agents() == 1
    assert env.get_env_info() == host.get_env_info()
    assert env.get_env_state() == {"level": 3}
    obs = env.reset()
    assert obs["obs"].squeeze(1).tolist() == [0, 4, 8] * 2
    assert obs["states"].squeeze(1).tolist() == [0, 40, 80] * 2
    action = torch.rand(N, 1)
    obs, reward, dones, infos = env.step(action)
    assert host.seen[-1] is action
    assert reward.tolist() == [1, 5, 9] * 2
    assert (dones.dtype, infos["mine"]) == (torch.int64, 1)
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018


def test_arrays_stay_arrays():
    host = host_env(numpy=True)
    env = stagger(host, rollout_steps=K)
    assert isinstance(env.reset(), np.ndarray)
    for _ in range(K):
        obs, reward, dones, infos = env.step(np.zeros((N, 1), np.float32))
    assert [type(x) for x in (obs, reward, dones, infos["time_outs"])] == [np.ndarray] * 4
    assert (obs.dtype, reward.dtype, dones.dtype) == (np.float32, np.float32, np.bool_)
    assert infos["time_outs"].tolist() == dones.tolist() == [False, False, True] * 2
    assert all(isinstance(action, np.ndarray) for action in host.seen)


def test_what_was_shown_is_not_written_again():
    env = stagger(host_env(), rollout_steps=K)
    kept = env.reset()
    env.step(zeros())
    assert kept.squeeze(1).tolist() == [0, 4, 8] * 2


def test_time_outs_are_those_of_this_step():
    """Groups at 0, 4, 8: time-outs after 4, 8, 12 steps. Environment 1 terminates at length 6, after 2 steps; the
    host's old mask then still stands, and is not passed on."""
    env = stagger(host_env(lengths=(0, 6, 0, 0, 0, 0)), rollout_steps=K)
    env.reset()
    marked, ended = [], []
    for _ in range(6):
        _, _, dones, infos = env.step(zeros())
        marked.append(infos["time_outs"].tolist())
        ended.append(dones.tolist())
    assert infos["time_outs"].dtype == torch.int64  # the host's
    no = [0] * N
    assert marked == [no, no, no, [0, 0, 1] * 2, no, no]
    assert ended == [no, [0, 1, 0, 0, 0, 0], no, [0, 0, 1] * 2, no, no]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "host's"])
def test_the_rules_own_cuts_are_time_outs(ours):
    """All begin together and the rule spreads them by cuts: what ends before step H is the rule's doing."""
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(as_rl_games(CounterEnv(N, horizon_steps=H)) if ours else host_env(), rollout_steps=K, **settings)
    env.reset()
    cuts = 0
    for _ in range(K):
        obs, _, dones, infos = env.step(zeros())
        assert (infos["time_outs"] > 0).equal(dones > 0)
        assert not infos["full_episodes"].any()
        assert (obs[dones > 0, 0] == 0).all()
        cuts += int((dones > 0).sum())
    assert 0 < cuts < N


def test_an_environment_of_ours():
    env = as_rl_games(CounterEnv(N, horizon_steps=H, lengths=(2, 0, 0, 0, 0, 0)))
    obs = env.reset()
    assert obs.tolist() == [[0, i] for i in range(N)]
    for t in range(1, H + 1):
        obs, reward, dones, infos = env.step(zeros())
        assert reward.tolist() == [1 + (t - 1) % 2] + [t] * (N - 1)
        assert infos["log"]["a"].tolist() == [0] * N
    assert dones.tolist() == [True] * N
    # Environment 0 terminates in every second step: at t = 12 as well, which is no time-out of its own clock.
    assert infos["time_outs"].tolist() == [False] + [True] * (N - 1)
    assert infos["full_episodes"].tolist() == [True] * N
    with pytest.raises(ConfigError, match="no reset rule here"):
        env.measures()


def test_action_bounds_can_be_given_where_there_are_none():
    from rl_stagger.envs.base import Box, EnvSpec

    task = CounterEnv(N, horizon_steps=H)
    task.spec = EnvSpec({"policy": (2,), "critic": (2,)}, Box(1), H)
    assert not np.isfinite(as_rl_games(task).get_env_info()["action_space"].high).any()
    env = stagger(as_rl_games(task, action_bound=2.0), rollout_steps=K)
    info = env.get_env_info()
    assert (info["action_space"].low.tolist(), info["action_space"].high.tolist()) == ([-2.0], [2.0])
    assert (info["observation_space"].shape, info["state_space"].shape) == ((2,), (2,))


def test_a_rule_that_was_there_before():
    env = as_rl_games(rs.StaggeredResets(CounterEnv(N, horizon_steps=H), rollout_steps=K))
    assert env.reset()[:, 0].tolist() == [0, 4, 8] * 2
    env.step(zeros())
    assert env.measures()["batch/phase_histogram"] == pytest.approx([1 / 3] * 3)


def test_a_host_without_partial_resets_can_have_its_clock_written():
    bare = host_env()
    bare.reset_rows = None
    with pytest.raises(CapabilityError, match=r"partial_reset.*possible here.*clock"):
        stagger(bare, rollout_steps=K)
    env = stagger(bare, rollout_steps=K, bring_up="clock")
    env.reset()
    assert bare.env.progress_buf.tolist() == [0, 4, 8] * 2
    assert env.measures()["steps/warmup"] == 0
    ended = torch.stack([env.step(zeros())[2] for _ in range(K)])
    assert ended.tolist() == [[0] * N] * 3 + [[0, 0, 1] * 2]


def test_without_a_clock_or_a_time_limit_the_rule_says_what_it_misses():
    bare = host_env()
    bare.env.progress_buf, bare.env.max_episode_length = torch.zeros(N, 1), None
    with pytest.raises(ConfigError, match="time limit"):
        stagger(bare, rollout_steps=K)
    bare.reset_rows = None
    with pytest.raises(CapabilityError, match="possible here: none"):
        stagger(bare, rollout_steps=K, horizon_steps=H, bring_up="clock")


def test_what_a_trainer_cannot_follow_is_refused():
    with pytest.raises(ConfigError, match=r"gate='block'.*masked"):
        stagger(as_rl_games(CounterEnv(N, horizon_steps=H)), rollout_steps=K, gate="block")
    many = host_env()
    many.get_number_of_agents = lambda: 2
    with pytest.raises(ConfigError, match=r"get_number_of_agents\(\) = 2"):
        stagger(many, rollout_steps=K)
    env = stagger(host_env(), rollout_steps=K)
    with pytest.raises(ConfigError, match="staggered already"):
        stagger(env, rollout_steps=K)


@pytest.mark.parametrize("kind", ["ManagerEnv", "DirectEnv"])
def test_isaac_labs_wrapper(kind):
    """A double of Isaac Lab's environments under one of its `RlGamesVecEnvWrapper`: what is seen is clipped."""
    pytest.importorskip("rsl_rl")  # the double has Isaac Lab's rsl_rl wrapper as well
    from doubles import isaac_lab
    from gymnasium import spaces
    from rl_games.common.ivecenv import IVecEnv

    class RlGamesVecEnvWrapper(IVecEnv):
        def __init__(self, env):
            self.env, self.unwrapped = env, env

        def _process_obs(self, obs):
            return {"obs": obs["policy"].clamp(-5, 5)}

        def reset(self):
            return self._process_obs(self.env.reset()[0])

        def step(self, actions):
            obs, reward, terminated, truncated, extras = self.env.step(actions)
            return self._process_obs(obs), reward, terminated | truncated, {**extras, "time_outs": truncated}

        def get_env_info(self):
            return {"action_space": spaces.Box(-1, 1, (3,)), "observation_space": spaces.Box(-5, 5, (2,))}

    base = getattr(isaac_lab, kind)(num_envs=N, max_episode_length=H)
    env = stagger(RlGamesVecEnvWrapper(base), rollout_steps=K)
    obs = env.reset()["obs"]
    assert obs[:, 0].tolist() == [0, 4, 5] * 2  # 8, clipped
    assert base.count.tolist() == [0, 4, 8] * 2
    assert base.row_resets == 2 * N + 4  # twice everybody, then groups 1 and 0, two rows each
    assert getattr(base, "written", 4) == 4  # write and forward, after each partial reset
    others = [0, 1, 3, 4, 5]
    assert env.stagger.reset(torch.arange(N) == 2)["policy"][others].equal(obs[others])  # no new noise
    env.reset()
    shown = env.step(torch.zeros(N, 3))[0]["obs"]
    kept = shown.clone()
    for _ in range(K - 1):
        _, _, dones, infos = env.step(torch.zeros(N, 3))
    assert shown.equal(kept)
    assert dones.tolist() == infos["time_outs"].tolist() == [False, False, True] * 2


def test_rl_games_own_maniskill_environment():
    """rl_games' `ManiskillEnv`, its constructor left out (it makes the simulator), around a double of the simulator."""
    from doubles import maniskill
    from rl_games.envs.maniskill import ManiskillEnv, remove_batch_dim

    inside = maniskill.vector_env(num_envs=N, max_episode_steps=H)
    host = ManiskillEnv.__new__(ManiskillEnv)
    host.env = inside
    host.action_space, host.observation_space = (
        remove_batch_dim(space) for space in (inside.action_space, inside.observation_space)
    )
    env = stagger(host, rollout_steps=K)
    assert env.reset()[:, 0].tolist() == [0, 4, 8] * 2
    for _ in range(K):
        _, _, dones, infos = env.step(torch.zeros(N, 2))
    assert dones.tolist() == infos["time_outs"].tolist() == [False, False, True] * 2
