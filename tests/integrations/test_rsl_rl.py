"""rsl_rl's own runner on staggered environments, and its contract row by row."""

import warnings

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

import rl_stagger as rs
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import as_rsl_rl, stagger

pytest.importorskip("rsl_rl")
pytestmark = pytest.mark.integrations

N, K, H = 6, 4, 12


def train_cfg(rollout_steps, group):
    model = {"class_name": "rsl_rl.models.MLPModel", "hidden_dims": [16], "activation": "elu"}
    return {
        "num_steps_per_env": rollout_steps,
        "save_interval": 100,
        "obs_groups": {"actor": [group], "critic": [group]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": dict(model),
        "algorithm": {
            "class_name": "rsl_rl.algorithms.PPO",
            "num_learning_epochs": 2,
            "num_mini_batches": 2,
            "schedule": "adaptive",
            "desired_kl": 0.01,
        },
    }


def runner_of(env, rollout_steps, log_dir=None):
    from rsl_rl.runners import OnPolicyRunner

    group = next(iter(env.get_observations().keys()))
    return OnPolicyRunner(env, train_cfg(rollout_steps, group), log_dir=log_dir)


def zeros(num_envs=N):
    return torch.zeros(num_envs, 1)


def host_env(**settings):
    """rsl_rl's own kind of environment, written without us, with what the wild ones do: a partial reset beside the
    contract, a buffer that is reused, a mask of time-outs that stands until the next reset."""
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict

    class Host(VecEnv):
        def __init__(self, horizon_steps=H, lengths=(0,) * N):
            self.num_envs, self.num_actions, self.device, self.cfg = N, 1, "cpu", {"mine": True}
            self.max_episode_length = horizon_steps
            self.episode_length_buf = torch.zeros(N, dtype=torch.long)
            self.count, self.lengths = torch.zeros(N), torch.tensor(lengths)
            self.obs, self.extras = torch.zeros(N, 1), {}

        def get_observations(self):
            self.obs.copy_(self.count.unsqueeze(1))
            return TensorDict({"proprio": self.obs}, batch_size=[N])

        def reset_idx(self, env_ids):
            self.count[env_ids] = 0
            self.episode_length_buf[env_ids] = 0

        def step(self, actions):
            self.count += 1
            self.episode_length_buf += 1
            time_outs = self.episode_length_buf >= self.max_episode_length
            done = time_outs | (self.count == self.lengths)
            if done.any():
                self.extras["time_outs"] = time_outs.clone()
                self.reset_idx(done.nonzero().squeeze(1))
            return self.get_observations(), self.count.clone(), done.long(), self.extras

    return Host(**settings)


def test_runner_on_a_task_of_ours(tmp_path):
    env = stagger(as_rsl_rl(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10)
    runner = runner_of(env, 10, str(tmp_path))
    before = [p.clone() for p in runner.alg.get_policy().parameters()]
    runner.learn(5)
    assert any((a != b).any() for a, b in zip(before, runner.alg.get_policy().parameters()))
    measures = env.measures()
    assert measures["batch/coverage"] >= 0.95
    assert measures["batch/tv_distance"] < 0.1
    assert measures["steps/warmup"] == 190 * 64  # 20 groups of 10 steps: the last begins at 190
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("stagger/coverage")[-1].value >= 0.95


def test_runner_without_staggering():
    env = stagger(as_rsl_rl(rs.make_env("skill_chain", num_envs=64, seed=0)), rollout_steps=10, bring_up="none")
    runner_of(env, 10).learn(5)
    assert env.measures()["batch/coverage"] == 0.0
    assert env.measures()["batch/tv_distance"] == 1.0


def test_runner_on_a_host_environment():
    env = stagger(host_env(), rollout_steps=K)
    runner_of(env, K).learn(6)
    assert env.measures()["batch/coverage"] >= 0.95


def test_it_is_still_rsl_rls_environment():
    from rsl_rl.env import VecEnv
    from tensordict import TensorDict

    host = host_env()
    env = stagger(host, rollout_steps=K)
    assert isinstance(env, VecEnv)
    assert env.cfg is host.cfg
    assert (env.num_envs, env.num_actions, env.max_episode_length, env.lengths is host.lengths) == (N, 1, H, True)
    obs, reward, dones, extras = env.step(zeros())
    assert isinstance(obs, TensorDict)
    assert list(obs.keys()) == ["proprio"]
    assert (dones.dtype, extras["time_outs"].dtype, reward.dtype) == (torch.int64, torch.bool, torch.float32)
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018


def test_looking_does_not_step_and_the_bring_up_happens_once():
    env = stagger(host_env(), rollout_steps=K)
    first = env.get_observations()["proprio"].clone()
    assert first.squeeze(1).tolist() == [0, 4, 8] * 2
    assert env.get_observations()["proprio"].equal(first)
    assert env.measures()["steps/warmup"] == 8 * N


def test_observations_are_not_written_again():
    env = stagger(host_env(), rollout_steps=K)
    first = env.get_observations()["proprio"]
    second = env.step(zeros())[0]["proprio"]
    env.step(zeros())
    assert first.squeeze(1).tolist() == [0, 4, 8] * 2
    assert second.squeeze(1).tolist() == [1, 5, 9] * 2


def test_time_outs_are_those_of_this_step():
    """Groups at 0, 4, 8: time-outs after 4, 8, 12 steps. Environment 1 terminates at length 6, after 2 steps; the
    host's old mask then still stands, and is not passed on."""
    env = stagger(host_env(lengths=(0, 6, 0, 0, 0, 0)), rollout_steps=K)
    marked, ended = [], []
    for _ in range(6):
        _, _, dones, extras = env.step(zeros())
        marked.append(extras["time_outs"].tolist())
        ended.append(dones.tolist())
    no = [False] * N
    assert marked == [no, no, no, [False, False, True] * 2, no, no]
    assert ended == [[0] * N, [0, 1, 0, 0, 0, 0], [0] * N, [0, 0, 1] * 2, [0] * N, [0] * N]


def test_the_rules_own_cuts_are_time_outs():
    """All begin together and the rule spreads them by cuts: what ends before step H is the rule's doing."""
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(host_env(), rollout_steps=K, **settings)
    cuts = 0
    for _ in range(K):
        obs, _, dones, extras = env.step(zeros())
        assert extras["time_outs"].equal(dones > 0)
        assert (obs["proprio"][dones > 0] == 0).all()
        cuts += int(dones.sum())
    assert 0 < cuts < N


def test_a_random_clock_is_refused_under_a_spread():
    env = stagger(host_env(), rollout_steps=K)
    runner = runner_of(env, K)
    with pytest.warns(UserWarning, match="init_at_random_ep_len=False"):
        runner.learn(1, init_at_random_ep_len=True)
    assert sorted(env.episode_length_buf.tolist()) == [0, 0, 4, 4, 8, 8]  # K steps on from 0, 4, 8


def test_a_random_clock_is_let_through_where_nothing_is_spread():
    host = host_env()
    env = stagger(host, rollout_steps=K, bring_up="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.episode_length_buf = torch.arange(N)
    assert host.episode_length_buf.tolist() == list(range(N))
    env = as_rsl_rl(CounterEnv(N, horizon_steps=H))
    env.episode_length_buf = torch.arange(N, dtype=torch.int32)
    assert env.episode_length_buf.tolist() == list(range(N))
    full = [env.view_step(zeros()).info["full"].tolist() for _ in range(H)]
    assert not any(row[i] for row in full for i in range(1, N))  # shortened by the clock
    assert full[-1][0]


def test_a_host_without_partial_resets_can_have_its_clock_written():
    bare = host_env()
    bare.reset_idx = None
    with pytest.raises(CapabilityError, match=r"partial_reset.*possible here.*clock"):
        stagger(bare, rollout_steps=K)
    env = stagger(bare, rollout_steps=K, bring_up="clock")
    env.get_observations()
    assert bare.episode_length_buf.tolist() == [0, 4, 8] * 2
    env.step(zeros())
    with pytest.raises(CapabilityError, match="neither reset"):
        env.reset()
    assert env.measures()["steps/warmup"] == 0


def test_lengths_that_differ_need_a_word():
    lengths = torch.tensor([12, 12, 12, 12, 12, 10])
    with pytest.raises(ConfigError, match="10 to 12"):
        stagger(host_env(horizon_steps=lengths), rollout_steps=K)
    env = stagger(host_env(horizon_steps=lengths), rollout_steps=K, horizon_steps=12)
    assert env.stagger.spec.horizon_steps == 12
    same = stagger(host_env(horizon_steps=torch.full((N,), 12)), rollout_steps=K)
    assert same.stagger.spec.horizon_steps == 12


def test_choices_are_refused():
    with pytest.raises(ConfigError, match="continuous actions only"):
        as_rsl_rl(rs.make_env("stage_gridworld", num_envs=2))


def test_a_task_log_without_events_does_not_spoil_the_mean():
    class Quiet(CounterEnv):
        def step(self, action):
            step = super().step(action)
            step.info["log"] = {"x": torch.full((N,), 3.0 if self.steps_asked == 1 else float("nan"))}
            return step

    env = as_rsl_rl(Quiet(N, horizon_steps=H))
    assert [float(env.step(zeros())[3]["log"]["x"]) for _ in range(2)] == [3.0, 3.0]
