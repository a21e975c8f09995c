"""ManiSkill's vector environment under a reset rule: the real one where mani_skill is installed, over a double of the
simulator, which on a CPU has one environment only; that one, where it starts, is looked at as well."""

import pytest
import torch

from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations import stagger

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.integrations

from doubles import maniskill  # noqa: E402

N, K, H = 6, 4, 12


def host_env(**settings):
    return maniskill.vector_env(**{"num_envs": N, "max_episode_steps": H, **settings})


def zeros(num_envs=N):
    return torch.zeros(num_envs, 2)


def train(env, rollouts, rollout_steps):
    """A loop as people write it for ManiSkill: GAE with the values of final observations, a clipped policy step."""
    from torch.distributions import Normal

    actor, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    before = actor.weight.detach().clone()
    obs, _ = env.reset(seed=1)
    for _ in range(rollouts):
        rows = []
        for _ in range(rollout_steps):
            with torch.no_grad():
                action = Normal(actor(obs), 1.0).sample()
                logp, value = Normal(actor(obs), 1.0).log_prob(action).sum(1), critic(obs).squeeze(1)
                after, reward, terminated, truncated, infos = env.step(action)
                next_value = critic(after).squeeze(1)
                if "final_info" in infos:
                    mask = infos["_final_info"]
                    next_value[mask] = critic(infos["final_observation"][mask]).squeeze(1)
            done = terminated | truncated
            delta = reward + 0.99 * torch.where(terminated, 0.0, next_value) - value
            rows.append((obs, action, logp, value, delta, done))
            obs = after
        advantage, carried = [], torch.zeros(env.num_envs)
        for _, _, _, _, delta, done in reversed(rows):
            carried = delta + 0.99 * 0.95 * torch.where(done, 0.0, carried)
            advantage.insert(0, carried)
        o, a, old, v = (torch.cat([row[i] for row in rows]) for i in range(4))
        gain = torch.cat(advantage)
        ratio = (Normal(actor(o), 1.0).log_prob(a).sum(1) - old).exp()
        scaled = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy_loss = -torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        loss = policy_loss + 0.5 * (critic(o).squeeze(1) - gain - v).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (actor.weight != before).any()


def test_a_loop_on_staggered_environments():
    env = stagger(host_env(num_envs=64, max_episode_steps=40, record_metrics=True), rollout_steps=4)
    train(env, 12, 4)
    measures = env.measures()
    assert measures["batch/coverage"] >= 0.95
    assert measures["batch/tv_distance"] < 0.1
    assert measures["steps/warmup"] == 36 * 64  # 10 groups of 4 steps: the last begins at 36


def test_the_same_loop_without_staggering():
    env = stagger(host_env(num_envs=64, max_episode_steps=40), rollout_steps=4, bring_up="none")
    train(env, 12, 4)
    assert env.measures()["batch/coverage"] == 0.0
    assert env.measures()["batch/tv_distance"] == 1.0


def test_it_is_still_maniskills_environment():
    host = host_env(record_metrics=True)
    env = stagger(host, rollout_steps=K)
    assert isinstance(env, maniskill.vector_env_class())
    assert (env.num_envs, env.auto_reset, env.ignore_terminations, env.record_metrics) == (N, True, False, True)
    assert env.base_env is env.unwrapped is host.base_env
    assert env.single_action_space is host.single_action_space
    assert env.observation_space is host.observation_space
    assert env.metadata["autoreset_mode"] == host.metadata["autoreset_mode"]
    assert env.device == torch.device("cpu")
    assert env.call("get_wrapper_attr", "lengths") is host.base_env.lengths
    obs, info = env.reset(seed=5)
    assert obs[:, 0].tolist() == [0, 4, 8] * 2
    assert "reconfigure" in info
    assert host.base_env.seeds.count(5) == 1
    action = torch.rand(N, 2)
    obs, reward, terminated, truncated, infos = env.step(action)
    assert host.base_env.actions[-1] is action
    assert obs[:, 0].tolist() == reward.tolist() == [1, 5, 9] * 2
    assert (terminated.dtype, truncated.dtype) == (torch.bool, torch.bool)
    assert "final_info" not in infos
    with pytest.raises(AttributeError, match="nonsense"):
        env.nonsense  # noqa: B018


def test_ends_come_exactly_where_they_are():
    """Groups at 0, 4, 8: environments 2 and 5 time out with their 4th step, 1 succeeds at 6 steps, with its 2nd."""
    env = stagger(host_env(lengths=(0, 6, 0, 0, 0, 0)), rollout_steps=K)
    env.reset()
    ends, cuts = [], []
    for _ in range(K):
        obs, _, terminated, truncated, infos = env.step(zeros())
        ends.append(terminated.tolist())
        cuts.append(truncated.tolist())
        done = terminated | truncated
        assert ("final_info" in infos) == bool(done.any())
        if done.any():
            assert infos["_final_observation"].equal(done)
            assert infos["_final_info"].equal(done)
            assert infos["final_observation"][done, 0].tolist() == ([6] if terminated.any() else [H, H])
            assert (obs[done, 0] == 0).all()
    no = [False] * N
    assert ends == [no, [False, True] + [False] * 4, no, no]
    assert cuts == [no, no, no, [False, False, True] * 2]


def test_ignored_terminations_stay_ignored():
    env = stagger(host_env(lengths=(0, 6, 0, 0, 0, 0), ignore_terminations=True), rollout_steps=K)
    env.reset()
    ends = [env.step(zeros())[2].any().item() for _ in range(K)]
    assert ends == [False] * K


def test_what_was_shown_is_not_written_again_and_noise_is_not_drawn_anew():
    """The last group starts anew alone; what the others see at that moment is what their last step showed."""
    host = host_env()
    env = stagger(host, rollout_steps=K)
    obs, _ = env.reset()
    kept = obs.clone()
    again, _ = env.reset(options={"env_idx": torch.tensor([2])})
    assert again[2, 0] == 0
    assert again[[0, 1, 3, 4, 5]].equal(kept[[0, 1, 3, 4, 5]])
    assert host.base_env.elapsed_steps.tolist() == [0, 4, 0, 0, 4, 8]
    env.step(zeros())
    assert obs.equal(kept)
    assert env.measures()["resets/per_step_max"] == 1


def test_a_written_clock_is_not_an_episodes_length():
    """bring_up=clock: environment 2 has its clock at 8 and times out after 4 steps. Rewards 1 to 4: return 10, length
    4, mean 2.5; ManiSkill itself would say 12 and 10 / 12."""
    host = host_env(record_metrics=True)
    env = stagger(host, rollout_steps=K, bring_up="clock")
    env.reset()
    assert host.base_env.elapsed_steps.dtype == torch.int32
    assert host.base_env.elapsed_steps.tolist() == [0, 4, 8] * 2
    for _ in range(K - 1):
        infos = env.step(zeros())[4]
        length = infos["episode"]["episode_len"]
    assert length.tolist() == [3] * N
    _, _, _, truncated, infos = env.step(zeros())
    assert truncated.tolist() == [False, False, True] * 2
    metrics = infos["final_info"]["episode"]
    assert metrics["return"][2] == 10
    assert metrics["episode_len"][2] == 4
    assert metrics["reward"][2] == 2.5
    assert env.stagger.phase_steps.tolist() == [4, 4, 0] * 2
    assert env.measures()["steps/warmup"] == 0


def test_metrics_after_a_warm_up_are_of_whole_episodes():
    env = stagger(host_env(record_metrics=True), rollout_steps=K)
    env.reset()
    for _ in range(K):
        infos = env.step(zeros())[4]
    metrics = infos["final_info"]["episode"]
    assert metrics["episode_len"][[2, 5]].tolist() == [H, H]
    assert metrics["return"][[2, 5]].tolist() == [78, 78]  # 1 + ... + 12


def test_the_rules_own_cuts_are_truncations():
    """All begin together and the rule spreads them by cuts: what ends before step H is the rule's doing."""
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(host_env(record_metrics=True), rollout_steps=K, **settings)
    env.reset()
    cuts = 0
    for _ in range(K):
        obs, _, terminated, truncated, infos = env.step(zeros())
        assert not terminated.any()
        assert ("final_info" in infos) == bool(truncated.any())
        cuts += int(truncated.sum())
    assert 0 < cuts < N
    assert infos["_final_info"].equal(truncated)
    assert infos["final_observation"][truncated, 0].tolist() == [K] * cuts
    assert infos["final_info"]["episode"]["return"][truncated].tolist() == [10] * cuts  # 1 + 2 + 3 + 4
    assert (obs[truncated, 0] == 0).all()


def test_cuts_and_ends_in_one_step():
    """Environment 0 succeeds at step K; two of six are wanted at the beginning, so the rule cuts one of the others."""
    settings = {"bring_up": "none", "upkeep": "on_coverage_below", "upkeep_by": "cut"}
    env = stagger(host_env(record_metrics=True, lengths=(K, 0, 0, 0, 0, 0)), rollout_steps=K, **settings)
    env.reset()
    for _ in range(K):
        obs, _, terminated, truncated, infos = env.step(zeros())
    assert terminated.tolist() == [True] + [False] * 5
    assert truncated.sum() == 1
    done = terminated | truncated
    assert infos["_final_info"].equal(done)
    assert infos["final_observation"][done, 0].tolist() == [K, K]
    assert obs[done, 0].tolist() == [0, 0]
    assert infos["final_info"]["success"].equal(terminated)
    assert infos["final_info"]["episode"]["return"][done].tolist() == [10, 10]
    assert env.step(zeros())[4]["episode"]["return"][done].tolist() == [1, 1]


def test_nested_observations_keep_their_nest():
    env = stagger(host_env(nested=True), rollout_steps=K)
    obs, _ = env.reset()
    assert sorted(env.stagger.spec.obs_shapes) == ["camera.rgb", "policy"]
    assert obs["agent"]["qpos"][:, 0].tolist() == [0, 4, 8] * 2
    assert obs["camera"]["rgb"].dtype == torch.uint8
    assert obs["camera"]["rgb"].squeeze(1).tolist() == [0, 8, 16] * 2
    for _ in range(K):
        infos = env.step(zeros())[4]
    assert infos["final_observation"]["agent"]["qpos"][2, 0] == H


def test_two_robots_get_random_actions_of_their_own_kind():
    host = host_env(two_robots=True)
    stagger(host, rollout_steps=K, seed=3).reset()
    first = host.base_env.actions[0]
    assert {name: tuple(x.shape) for name, x in first.items()} == {"left": (N, 2), "right": (N, 2)}
    assert first["left"].abs().max() <= 1
    again = host_env(two_robots=True)
    stagger(again, rollout_steps=K, seed=3).reset()
    assert again.base_env.actions[0]["right"].equal(first["right"])


def test_an_actor_warms_up_with_what_maniskill_shows():
    host = host_env(nested=True)
    env = stagger(host, rollout_steps=K, actor=lambda obs: obs["agent"]["qpos"] * 0 + 0.25)
    env.reset()
    assert all((action == 0.25).all() for action in host.base_env.actions)


def test_what_cannot_be_staggered_is_refused():
    with pytest.raises(ConfigError, match=r"reconfiguration_freq=1.*use reconfiguration_freq=0"):
        stagger(host_env(reconfiguration_freq=1, ignore_terminations=True), rollout_steps=K)
    with pytest.raises(ConfigError, match="auto_reset=False"):
        stagger(host_env(auto_reset=False), rollout_steps=K)
    with pytest.raises(CapabilityError, match=r"gate='block'.*possible here: immediate"):
        stagger(host_env(), rollout_steps=K, gate="block")


def test_the_real_simulator():
    """One environment, as many as ManiSkill has on a CPU; skipped where sapien finds no rendering device."""
    if maniskill.vector_env_class() is maniskill.ManiSkillVectorEnv:
        pytest.skip("mani_skill is not installed")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gymnasium
        import mani_skill.envs  # noqa: F401
        from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

        settings = {"num_envs": 1, "obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "cpu"}
        try:
            inside = gymnasium.make("PickCube-v1", **settings)
        except RuntimeError as error:
            pytest.skip(str(error))
        env = stagger(ManiSkillVectorEnv(inside, record_metrics=True), rollout_steps=10, bring_up="clock", num_groups=5)
        assert env.stagger.spec.horizon_steps == 50
        env.reset(seed=0)
        env.vec_env.set_elapsed_steps(torch.tensor([45]))
        for t in range(1, 6):
            obs, _, terminated, truncated, infos = env.step(torch.zeros(1, 8))
            assert truncated.tolist() == [t == 5]
        assert not terminated.any()
        assert infos["final_info"]["episode"]["episode_len"].tolist() == [5]
        assert infos["final_observation"].shape == obs.shape == (1, 42)
        assert env.base_env.elapsed_steps.tolist() == [0]
        env.step(torch.zeros(1, 8))
        shown, _ = env.reset(options={"env_idx": torch.tensor([0])})
        assert env.stagger.elapsed_steps.tolist() == env.stagger.phase_steps.tolist() == [0]
        assert shown.shape == (1, 42)
        env.close()
