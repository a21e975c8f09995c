"""skrl's own PPO and SequentialTrainer on staggered environments, and its contract row by row."""

import warnings

import numpy as np
import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

import rl_stagger as rs
from rl_stagger.envs.base import Box, EnvSpec
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import as_skrl, stagger

pytest.importorskip("skrl")
pytestmark = pytest.mark.integrations

N, K, H = 6, 4, 12


def agent_of(env, rollout_steps, tmp_path, **more):
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

    class Policy(GaussianMixin, Model):
        def __init__(self):
            Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
            GaussianMixin.__init__(self)
            self.net = torch.nn.Linear(self.num_observations, self.num_actions)
            self.log_std = torch.nn.Parameter(torch.zeros(self.num_actions))

        def compute(self, inputs, role):
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):
        def __init__(self):
            spaces = {"observation_space": env.observation_space, "state_space": env.state_space}
            Model.__init__(self, **spaces, action_space=env.action_space, device="cpu")
            DeterministicMixin.__init__(self)
            self.seen = "states" if env.state_space is not None else "observations"
            self.net = torch.nn.Linear(self.num_states or self.num_observations, 1)

        def compute(self, inputs, role):
            return self.net(inputs[self.seen]), {}

    cfg = PPO_CFG(rollouts=rollout_steps, learning_epochs=2, mini_batches=2, time_limit_bootstrap=True, **more)
    cfg.experiment.directory, cfg.experiment.write_interval, cfg.experiment.checkpoint_interval = str(tmp_path), 0, 0
    return PPO(
        models={"policy": Policy(), "value": Value()},
        memory=RandomMemory(memory_size=rollout_steps, num_envs=env.num_envs, device="cpu"),
        cfg=cfg,
        observation_space=env.observation_space,
        state_space=env.state_space,
        action_space=env.action_space,
        device="cpu",
    )


def train(env, rollouts, rollout_steps, tmp_path, **more):
    """skrl's SequentialTrainer with a PPO agent on `env`; the agent."""
    from skrl.trainers.torch import SequentialTrainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # skrl's own
        agent = agent_of(env, rollout_steps, tmp_path, **more)
        cfg = {"timesteps": rollouts * rollout_steps, "headless": True, "disable_progressbar": True}
        trainer = SequentialTrainer(env=env, agents=agent, cfg={**cfg, "close_environment_at_exit": False})
        before = [p.detach().clone() for p in agent.policy.parameters()]
        trainer.train()
    assert any((a != b).any() for a, b in zip(before, agent.policy.parameters()))
    return agent


def host_env(**settings):
    """A skrl `Wrapper` written without us, with a partial reset beside the contract and buffers that are reused."""
    from gymnasium import spaces
    from skrl.envs.wrappers.torch import Wrapper

    class Task:
        device, num_envs, max_episode_length = "cpu", N, H
        observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

        def __init__(self, lengths):
            self.episode_length_buf = torch.zeros(N, dtype=torch.long)
            self.count, self.lengths = torch.zeros(N), torch.tensor(lengths)

        def reset_idx(self, ids):
            self.count[ids] = 0
            self.episode_length_buf[ids] = 0

    class Host(Wrapper):
        def __init__(self, lengths=(0,) * N, critic=False):
            super().__init__(Task(lengths))
            self.critic, self.obs, self.seen = critic, torch.zeros(N, 1), []

        @property
        def state_space(self):
            return self.observation_space if self.critic else None

        def _look(self):
            self.obs.copy_(self._env.count.unsqueeze(1))
            return self.obs

        def reset(self):
            self._env.reset_idx(torch.arange(N))
            return self._look(), {"mine": 0}

        def reset_rows(self, env_mask):
            self._env.reset_idx(env_mask.nonzero().squeeze(1))
            return self._look()

        def step(self, actions):
            self.seen.append(actions)
            task = self._env
            task.count += 1
            task.episode_length_buf += 1
            truncated, terminated = task.episode_length_buf >= H, task.count == task.lengths
            reward = task.count.clone()
            task.reset_idx((truncated | terminated).nonzero().squeeze(1))
            return self._look(), reward.view(-1, 1), terminated.view(-1, 1), truncated.view(-1, 1), {"mine": 1}

        def state(self):
            return self.obs * 10 if self.critic else None

        def render(self, *args, **kwargs):
            return None

        def close(self):
            self.closed = True

    return Host(**settings)


def zeros(num_envs=N):
    return torch.zeros(num_envs, 1)


def test_trainer_on_a_task_of_ours(tmp_path):
    env = stagger(as_skrl(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10)
    train(env, 5, 10, tmp_path)
    measures = env.measures()
    assert measures["batch/coverage"] >= 0.95
    assert measures["batch/tv_distance"] < 0.1
    assert measures["steps/warmup"] == 190 * 64  # 20 groups of 10 steps: the last begins at 190
    assert len(measures["batch/phase_histogram"]) == 20


def test_trainer_without_staggering(tmp_path):
    env = stagger(as_skrl(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10, bring_up="none")
    train(env, 5, 10, tmp_path)
    assert env.measures()["batch/coverage"] == 0.0
    assert env.measures()["batch/tv_distance"] == 1.0


@pytest.mark.parametrize("critic", [False, True])
def test_trainer_on_a_host_environment(tmp_path, critic):
    env = stagger(host_env(critic=critic), rollout_steps=K)
    train(env, 6, K, tmp_path)
    assert env.measures()["batch/coverage"] >= 0.95


def test_the_trainer_bootstraps_exactly_the_truncated(tmp_path):
    """Rewards 0, gamma .5, all values 2: a truncated step is worth 0 + .5 * 2 = 1 to skrl, a terminated one 0."""

    class Still(CounterEnv):
        def step(self, action):
            step = super().step(action)
            step.reward = torch.zeros_like(step.reward)
            return step

    env = stagger(as_skrl(Still(N, horizon_steps=H, lengths=(0, 0, 0, 0, 0, 9))), rollout_steps=K)
    agent = train(env, 1, K, tmp_path, discount_factor=0.5)
    # Offsets 0, 4, 8 twice: environments 2 and 5 stand at 8; 2 times out with its 4th step, 5 terminates with its 1st.
    ended = [agent.memory.get_tensor_by_name(name).squeeze(2).tolist() for name in ("terminated", "truncated")]
    no = [False] * N
    assert ended == [
        [[False] * 5 + [True], no, no, no],
        [no, no, no, [False, False, True, False, False, False]],
    ]
    with torch.no_grad():
        agent.value.net.weight.zero_()
        agent.value.net.bias.fill_(2.0)
    rewards = zeros()
    values = {"rewards": rewards, "terminated": torch.zeros(N, 1, dtype=torch.bool), "actions": zeros()}
    agent._current_log_prob, agent._current_values = zeros(), zeros()
    obs, truncated = torch.zeros(N, 2), torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool).view(N, 1)
    seen = {"observations": obs, "states": None, "next_observations": obs, "next_states": None}
    agent.record_transition(**seen, **values, truncated=truncated, infos={}, timestep=0, timesteps=1)
    assert rewards.squeeze(1).tolist() == [0, 0, 1, 0, 0, 0]


def test_it_is_still_skrls_environment():
    from skrl.envs.wrappers.torch import Wrapper

    host = host_env(critic=True)
    env = stagger(host, rollout_steps=K)
    assert isinstance(env, Wrapper)
    assert (env.num_envs, env.num_agents, env.device) == (N, 1, torch.device("cpu"))
    assert env.observation_space is host.observation_space
    assert env.state_space is host.state_space
    assert env.action_space is host.action_space
    assert env.lengths is host.lengths
    obs, infos = env.reset()
    assert obs.squeeze(1).tolist() == [0, 4, 8] * 2
    assert env.state().squeeze(1).tolist() == [0, 40, 80] * 2
    assert infos == {"mine": 0}
    action = torch.rand(N, 1)
    obs, reward, terminated, truncated, infos = env.step(action)
    assert host.seen[-1] is action
    assert obs.squeeze(1).tolist() == reward.squeeze(1).tolist() == [1, 5, 9] * 2
    assert [tuple(x.shape) for x in (reward, terminated, truncated)] == [(N, 1)] * 3
    assert infos["mine"] == 1
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018
    env.close()
    assert host.closed


def test_a_second_reset_goes_on_from_where_it_is():
    env = stagger(host_env(), rollout_steps=K)
    env.reset()
    kept = env.step(zeros())[0]
    env.step(zeros())
    again, _ = env.reset()
    assert kept.squeeze(1).tolist() == [1, 5, 9] * 2  # nor was what had been shown written again
    assert again.squeeze(1).tolist() == [2, 6, 10] * 2
    assert env.measures()["steps/warmup"] == 8 * N


def test_rewards_that_the_trainer_changes_in_place_are_its_own():
    task = CounterEnv(N, horizon_steps=H)
    kept = []
    step_of = task.step
    task.step = lambda action: kept.append(step_of(action)) or kept[-1]
    env = as_skrl(task)
    env.reset()
    _, reward, _, _, _ = env.step(zeros())
    reward += 100
    assert kept[0].reward.tolist() == [1] * N


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "host's"])
def test_the_rules_own_cuts_are_truncations(ours):
    """All begin together and the rule spreads them by cuts: what ends before step H is the rule's doing."""
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(as_skrl(CounterEnv(N, horizon_steps=H)) if ours else host_env(), rollout_steps=K, **settings)
    env.reset()
    cuts = 0
    for _ in range(K):
        obs, _, terminated, truncated, infos = env.step(zeros())
        assert not terminated.any()
        assert not infos["full_episodes"].any()
        assert (obs[truncated.squeeze(1), 0] == 0).all()
        cuts += int(truncated.sum())
        if ours:
            assert (infos["final_obs"]["policy"][truncated.squeeze(1), 0] == K).all()
    assert 0 < cuts < N


def test_an_environment_of_ours():
    task = CounterEnv(N, horizon_steps=H, lengths=(2, 0, 0, 0, 0, 0))
    env = as_skrl(task)
    assert (env.observation_space.shape, env.state_space, env.action_space.high.tolist()) == ((2,), None, [1.0])
    obs, _ = env.reset()
    assert obs.tolist() == [[0, i] for i in range(N)]
    for _ in range(H):
        obs, reward, terminated, truncated, infos = env.step(zeros())
    assert reward.squeeze(1).tolist() == [2] + [H] * (N - 1)
    assert terminated.squeeze(1).tolist() == [True] + [False] * (N - 1)
    assert truncated.squeeze(1).tolist() == [False] + [True] * (N - 1)
    assert infos["full_episodes"].tolist() == [True] * N
    assert infos["final_obs"]["policy"][:, 0].tolist() == [2] + [H] * (N - 1)
    assert obs[:, 0].tolist() == [0] * N
    with pytest.raises(ConfigError, match="no reset rule here"):
        env.measures()


def test_what_the_critic_sees_is_skrls_state(tmp_path):
    class Two(CounterEnv):
        def _observe(self, state, elapsed):
            obs = super()._observe(state, elapsed)["policy"]
            return {"policy": obs, "critic": torch.stack([obs * 10, obs * 100], dim=1)}

    task = Two(N, horizon_steps=H)
    task.spec = EnvSpec({"policy": (2,), "critic": (2, 2)}, Box(1), H)
    env = stagger(as_skrl(task), rollout_steps=K)
    assert env.state_space.shape == (4,)
    env.reset()
    assert env.state()[:, 0].tolist() == [0, 40, 80] * 2
    train(env, 2, K, tmp_path)
    assert env.measures()["batch/coverage"] >= 0.95


def test_a_rule_that_was_there_before():
    env = as_skrl(rs.StaggeredResets(CounterEnv(N, horizon_steps=H), rollout_steps=K))
    assert env.reset()[0][:, 0].tolist() == [0, 4, 8] * 2
    env.step(zeros())
    assert env.measures()["batch/phase_histogram"] == pytest.approx([1 / 3] * 3)


def test_a_host_without_partial_resets_can_have_its_clock_written():
    bare = host_env()
    bare.reset_rows = None
    with pytest.raises(CapabilityError, match=r"partial_reset.*possible here.*clock"):
        stagger(bare, rollout_steps=K)
    env = stagger(bare, rollout_steps=K, bring_up="clock")
    env.reset()
    assert bare.episode_length_buf.tolist() == [0, 4, 8] * 2
    ended = [env.step(zeros())[3].squeeze(1).tolist() for _ in range(K)]
    assert ended == [[False] * N] * 3 + [[False, False, True] * 2]
    assert env.measures()["steps/warmup"] == 0


def test_the_gate_that_freezes_is_refused():
    with pytest.raises(ConfigError, match=r"gate='block'.*masked"):
        stagger(as_skrl(CounterEnv(N, horizon_steps=H)), rollout_steps=K, gate="block")


@pytest.mark.parametrize("kind", ["ManagerEnv", "DirectEnv"])
def test_skrls_own_isaac_lab_wrapper(tmp_path, kind):
    """skrl's `IsaacLabWrapper` around a double of Isaac Lab's environments."""
    pytest.importorskip("rsl_rl")  # the double has Isaac Lab's rsl_rl wrapper as well
    from doubles import isaac_lab
    from gymnasium import spaces
    from skrl.envs.wrappers.torch.isaaclab_envs import IsaacLabWrapper

    base = getattr(isaac_lab, kind)(num_envs=N, max_episode_length=H)
    base.single_observation_space = spaces.Dict({"policy": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
    base.single_action_space, base.state_space = spaces.Box(-1.0, 1.0, (3,), np.float32), None
    env = stagger(IsaacLabWrapper(base), rollout_steps=K)
    obs, _ = env.reset()
    assert obs[:, 0].tolist() == [0, 4, 8] * 2
    assert base.row_resets == 2 * N + 4  # twice everybody, then groups 1 and 0, two rows each
    others = [0, 1, 3, 4, 5]
    assert env.stagger.reset(torch.arange(N) == 2)["policy"][others].equal(obs[others])  # no new noise
    even = stagger(IsaacLabWrapper(base), rollout_steps=K)
    train(even, 6, K, tmp_path)
    assert even.measures()["batch/coverage"] >= 0.95


def test_skrls_own_maniskill_wrapper(tmp_path):
    """skrl's `ManiSkillWrapper`, which resets by itself, around a double of the simulator."""
    from doubles import maniskill
    from skrl.envs.wrappers.torch.mani_skill_envs import ManiSkillWrapper

    inside = maniskill.TimeLimitWrapper(maniskill.BaseEnv(N, lengths=(0, 6, 0, 0, 0, 0)), H)
    env = stagger(ManiSkillWrapper(inside), rollout_steps=K)
    obs, _ = env.reset()
    assert obs[:, 0].tolist() == [0, 4, 8] * 2
    ends = []
    for _ in range(K):
        _, _, terminated, truncated, _ = env.step(torch.zeros(N, 2))
        ends.append((terminated.squeeze(1).tolist(), truncated.squeeze(1).tolist()))
    no = [False] * N
    assert ends == [(no, no), ([False, True] + [False] * 4, no), (no, no), (no, [False, False, True] * 2)]
    even = stagger(ManiSkillWrapper(maniskill.TimeLimitWrapper(maniskill.BaseEnv(N), H)), rollout_steps=K)
    train(even, 6, K, tmp_path)
    assert even.measures()["batch/coverage"] >= 0.95


def test_around_gymnasium_the_rule_goes_inside(tmp_path):
    import gymnasium
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.envs.wrappers.torch.gymnasium_envs import GymnasiumWrapper

    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    make = lambda: gymnasium.make("Pendulum-v1", max_episode_steps=20)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # skrl's own
        host = wrap_env(gymnasium.vector.SyncVectorEnv([make] * 8, autoreset_mode=mode), verbose=False)
    env = stagger(host, rollout_steps=5)
    assert type(env) is GymnasiumWrapper
    train(env, 4, 5, tmp_path)
    assert env.measures()["batch/coverage"] >= 0.95
    assert env.stagger.spec.horizon_steps == 20
