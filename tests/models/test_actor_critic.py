"""The actor-critic: which observation goes where, and what belongs to it."""

import math

import pytest
import torch

from rl_stagger.envs.base import Box, Discrete, EnvSpec
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig, mlp

SMALL = ModelConfig((8,), (8,))


def spec_of(action=None, **shapes):
    return EnvSpec(shapes or {"policy": (3,)}, action or Box(2, -1.0, 1.0), None)


def model_of(config=SMALL, action=None, seed=0, **shapes):
    torch.manual_seed(seed)
    return ActorCritic(spec_of(action, **shapes), config)


def rows_of(model, rows=5, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *shape, generator=draw) for name, shape in model.obs_shapes.items()}


# -- observation groups ---------------------------------------------------------------------------------------------
def test_the_critic_reads_its_own_group_and_the_actor_never_does():
    model = model_of(policy=(3,), critic=(5,))
    assert model.critic_groups == ("critic",)
    obs = rows_of(model)
    value, action = model.value(obs), model.act_mode(obs)
    assert tuple(value.shape) == (5,)
    other_critic = {**obs, "critic": obs["critic"] + 1.0}
    assert torch.equal(model.act_mode(other_critic), action)
    assert not torch.allclose(model.value(other_critic), value)
    other_policy = {**obs, "policy": obs["policy"] + 1.0}
    assert torch.equal(model.value(other_policy), value)
    assert not torch.allclose(model.act_mode(other_policy), action)
    assert torch.equal(model.value({"critic": obs["critic"]}), value), "the critic's group is all it needs"


def test_the_critic_reads_the_policys_group_where_there_is_no_other():
    model = model_of()
    assert model.critic_groups == ("policy",)
    obs = rows_of(model)
    assert not torch.allclose(model.value(obs), model.value({"policy": obs["policy"] + 1.0}))


def test_groups_that_no_net_reads_are_left_out():
    model = model_of(policy=(3,), teacher=(99,))
    assert set(model.obs_shapes) == set(model.normalizers) == {"policy"}
    assert tuple(model.value({"policy": torch.zeros(2, 3)}).shape) == (2,)


# -- shared trunk ---------------------------------------------------------------------------------------------------
def test_shared_trunk():
    model = model_of(ModelConfig((8, 6), (99,), shared_trunk=True))
    assert [tuple(p.shape) for p in model.critic.parameters()] == [(1, 6), (1,)], "critic_hidden is not used"
    assert [tuple(p.shape) for p in model.actor.parameters()] == [(2, 6), (2,)]
    obs = rows_of(model)
    model.value(obs).sum().backward()
    first = next(model.trunk.parameters())
    assert first.grad is not None
    assert first.grad.abs().sum() > 0
    first.grad = None
    model.evaluate(model.normalize(obs), torch.zeros(5, 2)).log_prob.sum().backward()
    assert first.grad is not None
    assert first.grad.abs().sum() > 0


def test_shared_trunk_is_refused_where_actor_and_critic_see_different_things():
    with pytest.raises(ValueError, match="shared_trunk"):
        model_of(ModelConfig(shared_trunk=True), policy=(3,), critic=(5,))


def test_separate_nets_share_nothing():
    model = model_of()
    model.value(rows_of(model)).sum().backward()
    assert all(p.grad is None for p in model.actor.parameters())


@pytest.mark.parametrize("shared", [False, True])
def test_evaluate_agrees_with_act_and_value(shared):
    model = model_of(ModelConfig((8,), (8,), shared_trunk=shared, normalize_value=True))
    model.update_normalizers(
        {"policy": torch.randn(50, 3) * 4 + 1}, torch.randn(50) * 9 - 30, torch.ones(50, dtype=torch.bool)
    )
    obs = rows_of(model)
    act = model.act(obs, torch.Generator().manual_seed(0))
    now = model.evaluate(model.normalize(obs), act.raw)
    torch.testing.assert_close(now.params, act.params)
    torch.testing.assert_close(now.log_prob, act.log_prob)
    torch.testing.assert_close(model.denormalize_value(now.value), model.value(obs))
    torch.testing.assert_close(model.value(model.normalize(obs), normalized=True), model.value(obs))
    assert not torch.allclose(now.value, model.value(obs), atol=1.0), "evaluate's are in the critic's own units"
    assert tuple(now.entropy.shape) == tuple(now.value.shape) == (5,)


# -- shapes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("normalize", [True, False])
def test_observations_of_any_shape(shape, normalize):
    config = ModelConfig((8,), (8,), normalize_obs=normalize)
    model = model_of(config, policy=shape, critic=(2, *shape))
    size = math.prod(shape)
    assert model.actor[0].in_features == size
    assert model.critic[0].in_features == 2 * size
    obs = rows_of(model, rows=6)
    flat = model.normalize(obs)
    assert {name: tuple(x.shape) for name, x in flat.items()} == {"policy": (6, size), "critic": (6, 2 * size)}
    assert tuple(model.act(obs).raw.shape) == (6, 2)
    assert tuple(model.value(obs).shape) == (6,)
    deep = {name: x.reshape(2, 3, *x.shape[1:]) for name, x in obs.items()}
    torch.testing.assert_close(model.value(deep), model.value(obs).reshape(2, 3))
    model.update_normalizers(obs, torch.zeros(6), torch.ones(6, dtype=torch.bool))
    if normalize:
        torch.testing.assert_close(model.normalizers["policy"].mean, obs["policy"].mean(0))


def test_each_number_of_an_observation_has_moments_of_its_own():
    model = model_of(policy=(2, 2))
    x = torch.tensor([[[0.0, 10.0], [100.0, 5.0]], [[2.0, 30.0], [500.0, 5.0]]])
    model.update_normalizers({"policy": x}, torch.zeros(2), torch.ones(2, dtype=torch.bool))
    got = model.normalize({"policy": x})["policy"]
    torch.testing.assert_close(got, torch.tensor([[-1.0, -1, -1, 0], [1, 1, 1, 0]]), rtol=1e-4, atol=1e-4)


def test_discrete_actions():
    model = model_of(action=Discrete(4))
    act = model.act(rows_of(model))
    assert act.raw.dtype == torch.int64
    assert tuple(act.raw.shape) == (5,)
    assert tuple(act.params.shape) == (5, 4)
    assert torch.equal(act.env_action, act.raw)
    assert tuple(model.act_mode(rows_of(model)).shape) == (5,)


def test_bounded_actions_reach_the_environment_inside_their_bounds():
    for distribution in ("gaussian", "tanh_gaussian"):
        model = model_of(ModelConfig((8,), (8,), distribution=distribution), Box(2, -0.1, 0.1))
        with torch.no_grad():
            model.actor[-1].bias.fill_(5.0)
        obs = rows_of(model, rows=200)
        with torch.no_grad():
            act, mode = model.act(obs), model.act_mode(obs)
        assert float(act.env_action.abs().max()) <= 0.1 + 1e-7
        assert float(act.raw.abs().max()) > 1.0
        torch.testing.assert_close(mode, torch.full((200, 2), 0.1), rtol=0, atol=1e-4)


# -- initial weights ------------------------------------------------------------------------------------------------
def test_orthogonal_gains():
    model = model_of(ModelConfig((16, 16), (16, 16)))
    for net, last in ((model.actor, 0.01), (model.critic, 1.0)):
        linear = [m for m in net if isinstance(m, torch.nn.Linear)]
        for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last)):
            # orthogonal rows or columns: every singular value is the gain
            values = torch.linalg.svdvals(layer.weight.detach())
            torch.testing.assert_close(values, torch.full_like(values, gain), rtol=1e-4, atol=1e-5)
            assert not layer.bias.any()


def test_trunk_gains_and_torchs_own_init():
    model = model_of(ModelConfig((16, 16), shared_trunk=True))
    for layer in (m for m in model.trunk if isinstance(m, torch.nn.Linear)):
        values = torch.linalg.svdvals(layer.weight.detach())
        torch.testing.assert_close(values, torch.full_like(values, math.sqrt(2)), rtol=1e-4, atol=1e-5)
    plain = model_of(ModelConfig((16,), (16,), init="default"))
    assert plain.actor[0].bias.any()
    assert float(torch.linalg.svdvals(plain.actor[0].weight.detach()).std()) > 0.01


@pytest.mark.parametrize("name, of_minus_one", [("elu", -0.632), ("relu", 0.0), ("tanh", -0.762), ("silu", -0.269)])
def test_activations(name, of_minus_one):
    net = mlp((1, 1, 1), name, "orthogonal", 1.0)
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[2].weight.fill_(1.0)
    assert float(net(torch.tensor([[-1.0]])).detach()) == pytest.approx(of_minus_one, abs=1e-3)
    assert len(net) == 3, "none after the last layer"
    assert len(mlp((1, 1), name, "orthogonal", 1.0, activate_last=True)) == 2


# -- what belongs to it ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [SMALL, ModelConfig((8,), shared_trunk=True), ModelConfig((), ())])
@pytest.mark.parametrize("action", [Box(2, -1.0, 1.0), Discrete(3)])
def test_parameter_groups_cover_every_parameter_once(config, action):
    model = model_of(config, action)
    groups = model.parameter_groups()
    listed = [id(p) for group in groups for p in group]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    assert len(set(listed)) == len(listed)
    assert {id(p) for p in groups[1]} == {id(p) for p in model.critic.parameters()}


def test_state_dict_holds_the_normalisers():
    config = ModelConfig((8,), (8,), normalize_value=True)
    model = model_of(config, policy=(3,), critic=(4,))
    obs = rows_of(model, rows=40)
    obs = {name: x * 7 + 3 for name, x in obs.items()}
    model.update_normalizers(obs, torch.randn(40) * 5 + 2, torch.ones(40, dtype=torch.bool))
    state = model.state_dict()
    for name in ("normalizers.policy.mean", "normalizers.critic.var", "normalizers.policy.count"):
        assert name in state
    assert "value_normalizer.mean" in state
    assert "head.std_param" in state
    other = model_of(config, seed=9, policy=(3,), critic=(4,))
    assert not torch.allclose(other.value(obs), model.value(obs))
    other.load_state_dict(state)
    assert torch.equal(other.value(obs), model.value(obs))
    assert torch.equal(other.act_mode(obs), model.act_mode(obs))


def test_acting_moves_no_normaliser():
    model = model_of()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    obs = {"policy": torch.full((5, 3), 50.0)}
    model.act(obs)
    model.value(obs)
    model.evaluate(model.normalize(obs), torch.zeros(5, 2))
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_masked_rows_do_not_reach_the_normalisers():
    model = model_of()
    x = torch.tensor([[1.0, 2.0, 3.0], [float("nan")] * 3, [3.0, 4.0, 5.0]])
    valid = torch.tensor([True, False, True])
    model.update_normalizers({"policy": x}, torch.zeros(3), valid)
    assert model.normalizers["policy"].mean.tolist() == [2.0, 3.0, 4.0]
    assert float(model.normalizers["policy"].count) == 2


# -- settings -------------------------------------------------------------------------------------------------------
def test_settings_that_cannot_work_are_named():
    assert ModelConfig().check() == []
    assert ModelConfig((), ()).check() == []
    for settings, field in (
        ({"actor_hidden": (64, 0)}, "actor_hidden"),
        ({"critic_hidden": (-1,)}, "critic_hidden"),
        ({"std_floor": 0.0}, "std_floor"),
        ({"init_std": 0.001}, "init_std"),
        ({"obs_clip": 0.0}, "obs_clip"),
    ):
        assert field in [name for name, _, _ in ModelConfig(**settings).check()]
