"""The clock in the observation, by hand: u = clock / H with H = 12; and what the critic pays for reading it."""

import dataclasses
import json
import math

import pytest
import torch
from helpers.image_envs import SideOfLight
from helpers.toy_envs import Bandit
from helpers.toy_envs_runner import RESETS, CounterEnv, PlainEnv, small_tree

import rl_stagger as rs
from rl_stagger.algorithms.ppo import PPO, Batch, PPOConfig
from rl_stagger.checkpoint import load_checkpoint
from rl_stagger.config import build_config, load_config, to_tree
from rl_stagger.doctor import diagnose
from rl_stagger.envs.base import Box, Capability, EnvSpec, check_step
from rl_stagger.envs.phase_encoding import PhaseEncoding, PhaseEncodingConfig, encode_phase, wrap_phase_encoding
from rl_stagger.errors import CapabilityError
from rl_stagger.evaluate import EvaluateConfig, evaluate_run
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.models.cnn import CNNConfig
from rl_stagger.policy import load_policy, spec_from_tree, spec_to_tree
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Health
from rl_stagger.run_dir import read_metrics_lines

LINEAR, FOURIER = PhaseEncodingConfig("linear"), PhaseEncodingConfig("fourier")
SMALL = ModelConfig((3,), (3,))
LEGGED = {"termination_probability": 0.1, "critic_obs": True, "horizon_steps": 13}


class TwoGroups(CounterEnv):
    """A CounterEnv with a critic's group of three numbers, the first being the clock that the environment itself saw,
    and a group that is no vector."""

    def __init__(self, num_envs, **more):
        super().__init__(num_envs, **more)
        shapes = {"policy": (2,), "critic": (3,), "image": (2, 2)}
        self.spec = EnvSpec(shapes, self.spec.action, self.spec.horizon_steps)

    def _observe(self, state, elapsed):
        obs = super()._observe(state, elapsed)
        critic = torch.cat([elapsed.float().unsqueeze(1), obs["policy"]], dim=1)
        return {**obs, "critic": critic, "image": obs["policy"].unsqueeze(1).expand(-1, 2, -1).clone()}


def counter(num_envs=3, config=LINEAR, **more):
    return PhaseEncoding(CounterEnv(num_envs, **more), config)


def act(env):
    return env.step(torch.zeros(env.num_envs, 1))


def shown_clock(obs, group="policy", horizon=12):
    """The clock that the last column tells, in whole steps."""
    steps = obs[group][:, -1] * horizon
    torch.testing.assert_close(steps, steps.round())
    return steps.round().long().tolist()


def mask(*flags):
    return torch.tensor(flags, dtype=torch.bool)


# -- the formula ----------------------------------------------------------------------------------------------------
def test_linear_by_hand():
    got = encode_phase(torch.tensor([0, 3, 12, 15, -1]), 12, "linear", 2)
    assert (got.dtype, got.tolist()) == (torch.float32, [[0.0], [0.25], [1.0], [1.0], [0.0]]), "u in [0, 1]"


def test_fourier_by_hand():
    # u = 1/4, 1/8: 2 pi k u = pi/2, pi (k = 1, 2) and pi/4, pi/2; sines first, then cosines.
    half = math.sqrt(0.5)
    got = encode_phase(torch.tensor([3, 0, 6]), 12, "fourier", 2)
    want = torch.tensor([[1.0, 0.0, 0.0, -1.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, -1.0, 1.0]])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    eighth = encode_phase(torch.tensor([1]), 8, "fourier", 3)
    want = torch.tensor([[half, 1.0, half, half, 0.0, -half]])  # k = 3: 3 pi / 4
    torch.testing.assert_close(eighth, want, atol=1e-6, rtol=0)


def test_none_is_no_column():
    assert encode_phase(torch.tensor([3, 4]), 12, "none", 2).shape == (2, 0)


# -- what is shown --------------------------------------------------------------------------------------------------
def test_every_observation_shows_the_clock_of_its_moment():
    # Env 0 terminates after 2 steps, the others at H = 4: final_obs shows the clock that the episode ended with.
    env = counter(horizon_steps=4, lengths=[2, 0, 0])
    assert shown_clock(env.reset(), horizon=4) == [0, 0, 0]
    seen = [act(env) for _ in range(5)]
    assert [shown_clock(step.obs, horizon=4) for step in seen] == [
        [1, 1, 1],
        [0, 2, 2],
        [1, 3, 3],
        [0, 0, 0],
        [1, 1, 1],
    ]
    assert [shown_clock(step.final_obs, horizon=4) for step in seen] == [
        [1, 1, 1], [2, 2, 2], [1, 3, 3], [2, 4, 4], [1, 1, 1],
    ]  # fmt: skip
    for step in seen:
        assert torch.equal(step.final_obs["policy"][:, 0] / 4, step.final_obs["policy"][:, 2]), "the count is the clock"
        assert step.obs["policy"][:, 1].tolist() == [0.0, 1.0, 2.0], "what was there stays where it was"


def test_partial_reset():
    env = counter()
    env.reset()
    act(env)
    assert shown_clock(env.reset(mask(0, 1, 0))) == [1, 0, 1]
    assert shown_clock(act(env).obs) == [2, 1, 2]


def test_a_written_clock_shows_from_the_next_observation_on():
    env = counter()
    env.reset()
    env.set_elapsed_steps(torch.tensor([5, 0, 11]), mask(1, 0, 1))
    assert env.elapsed_steps.tolist() == [5, 0, 11]
    step = act(env)
    assert shown_clock(step.obs) == [6, 1, 0], "env 2 met its time limit"
    assert shown_clock(step.final_obs) == [6, 1, 12]
    assert step.obs["policy"][:, 0].tolist() == [1.0, 1.0, 0.0], "the state itself did not move"


def test_set_state_shows_the_state_s_clock():
    env = counter()
    env.reset()
    act(env)
    state = env.get_state()
    for _ in range(3):
        act(env)
    assert shown_clock(env.set_state(state, mask(1, 0, 0))) == [1, 4, 4]
    env.set_elapsed_steps(torch.tensor([7, 8, 9]))
    assert shown_clock(env.set_state(env.get_state())) == [7, 8, 9]


def test_rows_that_wait_keep_the_clock_they_ended_with():
    env = counter(lengths=[2, 0, 0])
    env.reset()
    env.set_manual_reset(True)
    act(env)
    act(env)
    step = act(env)
    assert step.valid.tolist() == [False, True, True]
    assert shown_clock(step.obs) == shown_clock(step.final_obs) == [2, 3, 3]
    assert shown_clock(env.reset(mask(1, 0, 0))) == [0, 3, 3]


def test_the_chosen_groups_and_no_others():
    env = PhaseEncoding(TwoGroups(2), dataclasses.replace(FOURIER, groups=("critic", "not_there")))
    assert env.spec.obs_shapes == {"policy": (2,), "critic": (7,), "image": (2, 2)}
    assert env.spec.phase_columns == {"critic": 4}
    obs = env.reset()
    assert {name: tuple(x.shape[1:]) for name, x in obs.items()} == env.spec.obs_shapes
    for _ in range(3):
        step = act(env)
    for obs in (step.obs, step.final_obs):
        assert obs["critic"][:, 0].tolist() == [3.0, 3.0], "u = 1/4"
        want = torch.tensor([[1.0, 0.0, 0.0, -1.0]] * 2)
        torch.testing.assert_close(obs["critic"][:, 3:], want, atol=1e-6, rtol=0)
    both = PhaseEncoding(TwoGroups(2), LINEAR)
    assert both.spec.phase_columns == {"policy": 1, "critic": 1}
    both.reset()
    step = act(both)
    assert shown_clock(step.obs) == shown_clock(step.obs, "critic") == [1, 1]


def test_without_final_observations_none_are_made_up():
    env = counter(without=[Capability.FINAL_OBS])
    env.reset()
    assert act(env).final_obs is None
    assert Capability.FINAL_OBS not in env.capabilities


def test_the_rest_is_the_environment_s():
    env = rs.make_env("skill_chain", 4, horizon_steps=40)
    wrapped = PhaseEncoding(env, LINEAR)
    assert (wrapped.num_envs, wrapped.device, wrapped.made_from) == (
        4,
        env.device,
        ("skill_chain", {"horizon_steps": 40}),
    )
    assert (wrapped.capabilities, wrapped.spec.action) == (env.capabilities, env.spec.action)
    wrapped.reset()
    wrapped.step(torch.zeros(4, 4))
    saved = wrapped.state_dict()
    assert saved.keys() == env.state_dict().keys()
    wrapped.step(torch.zeros(4, 4))
    wrapped.load_state_dict(saved)
    assert wrapped.elapsed_steps.tolist() == wrapped.phase_steps.tolist() == env.elapsed_steps.tolist() == [1] * 4
    assert torch.equal(wrapped.render(2), env.render(2))
    generators = []
    for seed in (5, 6, 5):
        wrapped.seed(seed)
        generators.append(torch.rand(3, generator=env.generator).tolist())
    assert generators[0] == generators[2] != generators[1]


def test_difficulties_are_the_environment_s():
    env, told = CounterEnv(2), []
    env.difficulty_levels, env.evaluation_cases = 3, lambda: {"stairs": mask(1, 0)}
    env.set_difficulty, env.load_curriculum, env.set_evaluation = told.append, told.append, told.append
    wrapped = PhaseEncoding(env, LINEAR)
    assert (wrapped.difficulty_levels, wrapped.evaluation_cases()["stairs"].tolist()) == (3, [True, False])
    wrapped.set_difficulty(2)
    wrapped.load_curriculum({"level": 1})
    wrapped.set_evaluation(True)
    assert told == [2, {"level": 1}, True]


@pytest.mark.parametrize("layout", ["image", "beside", "critic"])
def test_beside_an_image_the_clock_is_a_group_of_its_own(layout):
    env = SideOfLight(2, layout=layout, horizon_steps=12)
    plain, wrapped = env.spec, PhaseEncoding(env, FOURIER)
    added = {"image": {"policy/phase": 4}, "beside": {"policy": 4}, "critic": {"policy": 4, "critic": 4}}[layout]
    assert wrapped.spec.phase_columns == added
    kept = {name: shape for name, shape in plain.obs_shapes.items() if name not in added}
    assert wrapped.spec.obs_shapes == {**kept, **dict.fromkeys(added, (4 if layout == "image" else 6,))}
    wrapped.reset()
    for _ in range(3):
        step = wrapped.step(torch.zeros(2, dtype=torch.int64))
    check_step(step, wrapped.spec, 2, wrapped.device)
    for obs in (step.obs, step.final_obs):
        for name in added:  # u = 1/4
            torch.testing.assert_close(obs[name][:, -4:], torch.tensor([[1.0, 0.0, 0.0, -1.0]] * 2), atol=1e-6, rtol=0)
    with pytest.raises(rs.ConfigError, match="observation group 'policy' is encoded already; wrap once"):
        PhaseEncoding(wrapped, FOURIER)
    cnn = ModelConfig((3,), (3,), name="cnn", cnn=CNNConfig((1,), (3,), (1,), 1))
    model = ActorCritic(wrapped.spec, cnn, phase_l2=0.1)
    assert model.phase_penalty() > 0.0
    later = {name: x + 1.0 if name in added else x for name, x in step.obs.items()}
    assert not torch.equal(model.value(later), model.value(step.obs))
    assert not torch.equal(model.act(later).params, model.act(step.obs).params)


def test_none_adds_nothing():
    env = CounterEnv(3)
    assert wrap_phase_encoding(env, PhaseEncodingConfig()) is env
    wrapped = wrap_phase_encoding(env, LINEAR)
    assert isinstance(wrapped, PhaseEncoding)
    assert wrap_phase_encoding(wrapped, LINEAR) is wrapped is wrap_phase_encoding(wrapped, PhaseEncodingConfig())


# -- what cannot work -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "override, match",
    [
        ("kind=sine", r"phase_encoding.kind=sine: did you mean 'linear'\?|phase_encoding.kind=sine: Valid: fourier"),
        ("kind=fourier phase_encoding.num_frequencies=0", r"phase_encoding.num_frequencies=0: between 1 and 1000"),
        ("kind=linear phase_encoding.critic_l2=-1", r"phase_encoding.critic_l2=-1.0: at least 0"),
        ("critic_l2=0.1", r"phase_encoding.critic_l2=0.1: 0 where nothing is encoded, or phase_encoding.kind=linear"),
        ("kind=linear phase_encoding.groups=[]", r"phase_encoding.groups=\[\]: at least one observation group"),
        ("kinds=linear", r"no key 'phase_encoding.kinds'; did you mean 'kind'\?"),
    ],
)
def test_settings_that_cannot_work(override, match):
    with pytest.raises(rs.ConfigError, match=match):
        load_config(f"phase_encoding.{override}".split())


@pytest.mark.parametrize(
    "env, config, match",
    [
        (CounterEnv(2), {"groups": ("critik",)}, r"groups=\[critik\]: this task has none of them; Valid: policy"),
        (TwoGroups(2), {"groups": ("critik",)}, r"did you mean 'critic'\? Valid: critic, image, policy"),
        (
            TwoGroups(2),
            {"groups": ("policy", "image")},
            r"no net reads the observation group 'image'; Valid: critic, policy",
        ),
        (PlainEnv(2), {}, r"phase_encoding.kind=linear: this task has no time limit"),
        (Bandit(2), {"kind": "fourier"}, r"phase_encoding.kind=fourier: this task has no time limit"),
        (TwoGroups(2), {"groups": ("policy",), "critic_l2": 0.1}, r"critic_l2=0.1: the critic reads group 'critic'"),
        (counter(), {}, r"observation group 'policy' is encoded already; wrap once"),
        (CounterEnv(2), {"kind": "cosine"}, r"phase_encoding.kind=cosine: .*Valid: fourier, linear, none"),
    ],
)
def test_tasks_that_cannot_take_it(env, config, match):
    with pytest.raises(rs.ConfigError, match=match):
        PhaseEncoding(env, dataclasses.replace(LINEAR, **config))


def test_an_environment_that_breaks_its_contract_is_still_named():
    env = counter()
    env.env.spec = dataclasses.replace(env.env.spec, obs_shapes={"policy": (5,)})
    with pytest.raises(rs.ContractError, match=r"reset\(\)\['policy'\] is \[3, 2\]"):
        env.reset()
    env = counter()
    env.reset()
    step = env.env.step
    env.env.step = lambda action: dataclasses.replace(step(action), obs={})
    with pytest.raises(rs.ContractError, match=r"Step.obs has groups \[\]"):
        act(env)


# -- under a reset rule ---------------------------------------------------------------------------------------------
def test_after_a_warmup_clock_and_state_agree():
    rule = StaggeredResets(counter(4), rollout_steps=3)
    obs = rule.reset()
    assert shown_clock(obs) == obs["policy"][:, 0].long().tolist() == [0, 3, 6, 9]
    for _ in range(12):
        step = rule.step(torch.zeros(4, 1))
        assert shown_clock(step.obs) == rule.elapsed_steps.tolist() == rule.phase_steps.tolist()


def test_the_first_observation_after_a_written_clock_shows_it():
    rule = StaggeredResets(counter(4), rollout_steps=3, bring_up="clock")
    obs = rule.reset()
    assert shown_clock(obs) == rule.elapsed_steps.tolist() == [0, 3, 6, 9]
    assert obs["policy"][:, 0].tolist() == [0.0] * 4, "the states did not move"
    for _ in range(3):
        step = rule.step(torch.zeros(4, 1))
        assert shown_clock(step.obs) == rule.elapsed_steps.tolist()
    assert shown_clock(step.final_obs) == [3, 6, 9, 12]


def test_a_recorded_state_brings_its_clock():
    rule = StaggeredResets(counter(4), rollout_steps=3, bring_up="snapshot")
    rule.reset()
    for _ in range(24):
        step = rule.step(torch.zeros(4, 1))
        assert shown_clock(step.obs) == rule.elapsed_steps.tolist() == step.obs["policy"][:, 0].long().tolist()
    assert len(set(rule.elapsed_steps.tolist())) > 1, "somebody was moved"


def test_at_a_gate_the_frozen_show_where_they_ended():
    # Env 1 ends after 2 steps and waits for the gate after the 3rd.
    rule = StaggeredResets(counter(2, lengths=[0, 2]), rollout_steps=3, bring_up="none", gate="block")
    rule.reset()
    seen = [rule.step(torch.zeros(2, 1)) for _ in range(4)]
    assert [shown_clock(step.obs) for step in seen] == [[1, 1], [2, 2], [3, 0], [4, 1]]
    assert shown_clock(seen[1].final_obs) == [2, 2]


# -- the penalty ----------------------------------------------------------------------------------------------------
def model_of(columns, config=SMALL, **shapes):
    torch.manual_seed(0)
    spec = EnvSpec(shapes or {"policy": (4,)}, Box(2, -1.0, 1.0), 12, columns)
    return ActorCritic(spec, config)


def test_the_penalty_by_hand():
    # The critic's first layer, one unit a row; the last two columns read the phase: 9 + 1 + 0 + 4 + .25 + 0 = 14.25
    model = model_of({"policy": 2})
    with torch.no_grad():
        model.critic[0].weight.copy_(torch.tensor([[7.0, 7.0, 3.0, 1.0], [7.0, 7.0, 0.0, -2.0], [7.0, 7.0, 0.5, 0.0]]))
    penalty = model.phase_penalty()
    assert penalty.item() == 14.25
    penalty.backward()
    grad = model.critic[0].weight.grad
    assert grad.tolist() == [[0.0, 0.0, 6.0, 2.0], [0.0, 0.0, 0.0, -4.0], [0.0, 0.0, 1.0, 0.0]], "2 w there alone"
    others = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert others == ["critic.0.weight"]


def test_the_penalty_is_of_the_net_that_the_critic_reads_with():
    own = model_of({"policy": 1, "critic": 2}, policy=(4,), critic=(5,))
    torch.testing.assert_close(own.phase_penalty(), own.critic[0].weight[:, 3:].square().sum())
    shared = model_of({"policy": 1}, ModelConfig((3,), (9,), shared_trunk=True))
    torch.testing.assert_close(shared.phase_penalty(), shared.trunk[0].weight[:, 3].square().sum())
    flat = model_of({"policy": 1}, ModelConfig((), ()))
    torch.testing.assert_close(flat.phase_penalty(), flat.critic[0].weight[0, 3].square())
    for columns in ({}, {"policy": 1}):
        penalty = model_of(columns, policy=(4,), critic=(5,)).phase_penalty()
        assert penalty.item() == 0.0, "the critic reads no clock"


def update_with(phase_l2):
    """(metrics, gradient by the critic's first layer, that layer's weight) of four rows the model itself acted out."""
    env = counter(4)
    torch.manual_seed(1)
    model = ActorCritic(env.spec, ModelConfig((4,), (4,)), phase_l2)
    obs, ones = model.normalize(env.reset()), torch.ones(4)
    with torch.no_grad():
        taken = model.act(obs, torch.Generator().manual_seed(0))
    batch = Batch(obs, taken.raw, taken.log_prob, taken.params, ones, ones, ones, ones.bool())
    weight = model.critic[0].weight.detach().clone()
    config = PPOConfig(epochs=1, minibatches=1, schedule="fixed", max_grad_norm=1e9)
    metrics = PPO(model, config, 1, seed=0).update(batch, 0)
    return metrics, model.critic[0].weight.grad, weight, model.phase_places


def test_the_loss_has_it_where_it_is_asked_for():
    plain, plain_grad, weight, (place,) = update_with(0.0)
    metrics, grad, same, _ = update_with(0.5)
    assert torch.equal(weight, same)
    assert metrics.keys() - plain.keys() == {"critic/phase_penalty"}
    assert float(metrics["critic/phase_penalty"]) == pytest.approx(float(weight[:, place].square().sum()), rel=1e-5)
    want = torch.zeros_like(weight)
    want[:, place] = 2 * 0.5 * weight[:, place]
    torch.testing.assert_close(grad - plain_grad, want)


# -- in a run -------------------------------------------------------------------------------------------------------
def config_of(run_dir, encoding, task="legged_bench", settings=LEGGED, **top):
    tree = small_tree(run_dir, task={"name": task, "settings": settings}, **top)
    return build_config({**tree, "phase_encoding": encoding})


def made(config, device=None):
    device = device or config.device
    return rs.make_env(config.task.name, config.num_envs, device, config.seed, **config.task.settings)


def train(config):
    return rs.Runner(made(config), config).learn()


def differences(a, b, path=""):
    """Paths at which two trees differ, to the last bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{path}/{key}" for key in a.keys() ^ b.keys()]
        return found + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{path}/{i}")]
    if isinstance(a, torch.Tensor):
        return (
            []
            if torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())
            else [path]
        )
    return [] if a == b else [path]


def state_at(run_dir, iteration):
    state = load_checkpoint(run_dir / "checkpoints" / f"iter_{iteration:07d}.pt")
    return {key: value for key, value in state.items() if key not in ("config", "wall_s")}


FULL = {"kind": "fourier", "critic_l2": 0.01}


@pytest.mark.parametrize("reset", ["staggered", "staggered_block", "random_clock", "snapshot"])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, reset):
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    train(config_of(straight, FULL, reset=reset, iterations=4))
    train(config_of(halves, FULL, reset=reset, iterations=2))
    torch.rand(7)
    train(config_of(halves, FULL, reset=reset, iterations=4, resume=str(halves)))
    assert differences(state_at(straight, 4), state_at(halves, 4)) == []
    assert state_at(straight, 4)["spec"]["phase_columns"] == {"policy": 4, "critic": 4}


def test_what_a_run_says_and_leaves(tmp_path):
    runner = rs.Runner(made(config_of(None, FULL)), config_of(tmp_path / "a", FULL))
    plain = made(config_of(None, FULL)).spec.obs_shapes
    assert runner.env.spec.obs_shapes == {name: (shape[0] + 4,) for name, shape in plain.items()}
    assert any("the last 4 columns of 'policy' and 4 columns of 'critic'" in note for note in runner.notes)
    assert runner.config.task.name == "legged_bench"
    result = runner.learn()
    penalties = [line["critic/phase_penalty"] for line in read_metrics_lines(result.run_dir)]
    assert all(penalty > 0.0 for penalty in penalties)
    policy = load_policy(result.run_dir)
    last = plain["critic"][0] + 4
    assert (policy.phase_places, policy.obs_shapes["critic"]) == ([slice(last - 4, last)], (last,))
    report = evaluate_run(EvaluateConfig(run=str(result.run_dir), episodes=4))
    assert report["stochastic"]["episodes"] == 4


def test_a_plain_run_has_no_trace_of_it(tmp_path):
    runner = rs.Runner(CounterEnv(6), build_config(small_tree(tmp_path / "a")))
    assert isinstance(runner.env.env, CounterEnv)
    assert runner.env.spec.phase_columns == {}
    result = runner.learn()
    assert all("critic/phase_penalty" not in line for line in read_metrics_lines(result.run_dir))


def test_the_penalty_makes_the_weights_smaller(tmp_path):
    def last_penalty(name, critic_l2):
        encoding = {"kind": "linear", "critic_l2": critic_l2}
        lines = read_metrics_lines(train(config_of(tmp_path / name, encoding, iterations=6)).run_dir)
        return [line["critic/phase_penalty"] for line in lines]

    little, much = last_penalty("little", 1e-6), last_penalty("much", 10.0)
    assert much[-1] < 0.5 * little[-1]


def test_the_environment_given_may_have_it_already(tmp_path):
    config = config_of(tmp_path / "a", {"kind": "none"})
    for env in (PhaseEncoding(made(config), FOURIER), StaggeredResets(PhaseEncoding(made(config), FOURIER), 4)):
        runner = rs.Runner(env, config)
        assert runner.config.phase_encoding == FOURIER, "the environment is the truth"
        assert runner.env.spec.phase_columns == {"policy": 4, "critic": 4}
    runner.learn()
    assert evaluate_run(EvaluateConfig(run=str(tmp_path / "a"), episodes=4))["deterministic"]["episodes"] == 4


def test_a_task_without_a_name_is_still_told_by_its_class(tmp_path):
    config = build_config(small_tree(None, task="unheard_of"))
    assert rs.Runner(counter(6), config).config.task.name == "unheard_of"
    named = build_config(small_tree(None, task="pendulum"))
    assert rs.Runner(counter(6), named).config.task.name == f"{CounterEnv.__module__}:CounterEnv"


@pytest.mark.parametrize(
    "env, match",
    [
        (
            lambda env: StaggeredResets(env, 4),
            "kind=fourier: the StaggeredResets given holds no PhaseEncoding; wrap first",
        ),
        (lambda env: PhaseEncoding(env, LINEAR), "the environment given has .*kind='linear'.* already"),
        (lambda env: StaggeredResets(PhaseEncoding(env, LINEAR), 4), "the environment given has .*kind='linear'"),
    ],
)
def test_what_was_given_and_what_was_asked_for(env, match):
    config = config_of(None, FULL)
    with pytest.raises(rs.ConfigError, match=match):
        rs.Runner(env(made(config)), config)


def test_it_must_agree_at_a_resume(tmp_path):
    train(config_of(tmp_path / "a", FULL))
    other = config_of(tmp_path / "a", {"kind": "linear"}, resume=str(tmp_path / "a"), iterations=3)
    with pytest.raises(rs.CheckpointError, match=r"phase_encoding.kind=fourier, this run has linear"):
        rs.Runner(made(other), other)


def test_a_checkpoint_from_before_is_of_no_encoding(tmp_path):
    train(config_of(tmp_path / "a", {}))
    file = tmp_path / "a" / "checkpoints" / "iter_0000002.pt"
    state = load_checkpoint(file)
    del state["config"]["phase_encoding"], state["spec"]["phase_columns"]
    torch.save(state, str(file))
    assert load_policy(tmp_path / "a").phase_places == []
    train(config_of(tmp_path / "a", {}, resume=str(tmp_path / "a"), iterations=3))
    file.with_name("iter_0000003.pt").unlink()
    asked = config_of(tmp_path / "a", {"kind": "linear"}, resume=str(tmp_path / "a"), iterations=3)
    with pytest.raises(rs.CheckpointError, match=r"phase_encoding.kind=none, this run has linear"):
        rs.Runner(made(asked), asked)


def test_a_spec_goes_through_a_tree():
    spec = PhaseEncoding(TwoGroups(2), PhaseEncodingConfig("linear", ("critic",))).spec
    assert spec_from_tree(json.loads(json.dumps(spec_to_tree(spec)))) == spec


@pytest.mark.parametrize("reset", sorted(RESETS))
def test_nothing_is_read_on_the_meta_device(reset):
    config = config_of(None, FULL, reset=reset)
    runner = rs.Runner(made(config, "meta"), config)
    seen = []
    runner.read_health = lambda rollout: Health(3, {})
    runner.read_metrics = lambda metrics: seen.append(metrics["critic/phase_penalty"].device.type)
    runner.iterate()
    runner.iterate()
    assert seen == ["meta", "meta"]
    assert runner.collector.rollout.obs["critic"].shape[-1] == runner.env.spec.obs_shapes["critic"][0]


def test_the_doctor_examines_with_it():
    # H / K = 13 / 2: windows enough for the doctor to train, and to watch its policy on what it was trained on.
    config = config_of(None, FULL, rollout_steps=2, iterations=20)
    assert diagnose(made(config), config, seconds=0.2).findings.rule is not None


def test_the_config_s_tree():
    config = load_config(
        ["phase_encoding.kind=fourier", "phase_encoding.groups=[critic]", "phase_encoding.critic_l2=1e-3"]
    )
    assert config.phase_encoding == PhaseEncodingConfig("fourier", ("critic",), 2, 0.001)
    assert build_config(to_tree(config)) == config
    assert load_config([]).phase_encoding == PhaseEncodingConfig()


def test_a_clock_shows_even_where_states_cannot_be_set():
    env = counter(4, without=[Capability.SET_STATE])
    rule = StaggeredResets(env, rollout_steps=3, bring_up="clock")
    assert shown_clock(rule.reset()) == rule.elapsed_steps.tolist() == [0, 3, 6, 9]


def test_what_is_missing_is_missing_in_the_simulator():
    env = counter(4, without=[Capability.SET_CLOCK])
    with pytest.raises(CapabilityError, match="which CounterEnv does not have"):
        StaggeredResets(env, rollout_steps=3, bring_up="clock")
