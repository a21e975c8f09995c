"""Several observation groups: vectors beside each other, images through the convolutional network."""

import math

import pytest
import torch

from rl_stagger.config import load_config
from rl_stagger.envs.base import Box, EnvSpec
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.models.cnn import CNNConfig

IMAGE = (2, 5, 5)
CNN = ModelConfig((), (), normalize_obs=False, name="cnn", cnn=CNNConfig((4,), (3,), (1,), 6))
MLP = ModelConfig((), (), normalize_obs=False)


def model_of(config, shapes, columns=None, dtypes=None):
    torch.manual_seed(0)
    uint8 = {name: torch.uint8 for name, shape in shapes.items() if shape == IMAGE}
    return ActorCritic(EnvSpec(shapes, Box(2), 10, columns or {}, uint8 if dtypes is None else dtypes), config)


def obs_of(model, rows=4):
    return {
        name: torch.randint(0, 256, (rows, *shape), dtype=torch.uint8) if shape == IMAGE else torch.randn(rows, *shape)
        for name, shape in model.obs_shapes.items()
    }


def changed(obs, name):
    return {**obs, name: 255 - obs[name] if obs[name].dtype == torch.uint8 else obs[name] + 1.0}


# -- vectors --------------------------------------------------------------------------------------------------------
def test_vectors_stand_beside_each_other():
    # Critic's weights 1 10 100 | 1000 over policy (3) and policy/goal (1): 1 + 20 + 300 + 4000
    model = model_of(MLP, {"policy": (3,), "other": (9,), "policy/goal": (1,)})
    with torch.no_grad():
        model.critic[0].weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
    obs = {"policy": torch.tensor([[1.0, 2.0, 3.0]]), "policy/goal": torch.tensor([[4.0]])}
    assert model.value(obs).item() == 4321.0
    assert tuple(model.actor[0].weight.shape) == (2, 4)


SHAPES = {"policy": (3,), "policy/camera": IMAGE, "critic": (2,), "critic/goal": (1,), "critic/camera": IMAGE}


@pytest.mark.parametrize("group", sorted(SHAPES))
def test_each_net_reads_its_own_groups_and_no_others(group):
    model = model_of(CNN, SHAPES)
    obs = obs_of(model)
    actors = group.startswith("policy")
    assert torch.equal(model.act_mode(changed(obs, group)), model.act_mode(obs)) != actors
    assert torch.equal(model.value(changed(obs, group)), model.value(obs)) == actors
    raw = torch.zeros(4, 2)
    now, then = (model.evaluate(model.normalize(o), raw) for o in (changed(obs, group), obs))
    assert torch.equal(now.params, then.params) != actors
    assert torch.equal(now.value, then.value) == actors


def test_training_and_acting_see_the_same():
    for shapes in (SHAPES, {"policy": (3,), "policy/camera": IMAGE}, {"policy": IMAGE}):
        for shared in (False, True):
            if shared and "critic" in shapes:
                continue
            model = model_of(ModelConfig((5,), (5,), shared_trunk=shared, name="cnn", cnn=CNN.cnn), shapes)
            obs = obs_of(model)
            seen = model.evaluate(model.normalize(obs), torch.zeros(4, 2))
            torch.testing.assert_close(seen.params, model.head.mode(model.params(model.normalize(obs))))
            torch.testing.assert_close(model.denormalize_value(seen.value), model.value(obs))


def test_numbers_from_0_to_255_that_are_no_image_are_normalised():
    # 300 rows: neither their sum nor their number may be counted in a byte
    model = model_of(ModelConfig(), {"policy": (2,)}, dtypes={"policy": torch.uint8})
    obs = {"policy": torch.tensor([[0, 100], [200, 100]], dtype=torch.uint8).repeat(150, 1)}
    model.update_normalizers(obs, torch.zeros(300), torch.ones(300, dtype=torch.bool))
    assert model.normalizers["policy"].mean.tolist() == [100.0, 100.0]
    torch.testing.assert_close(model.normalize(obs)["policy"][:2, 0], torch.tensor([-1.0, 1.0]))
    bare = model_of(MLP, {"policy": (2,)}, dtypes={"policy": torch.uint8})
    assert bare.value(obs).dtype == torch.float32


# -- images ---------------------------------------------------------------------------------------------------------
def test_images_are_left_alone_until_the_net():
    model = model_of(ModelConfig((), (), name="cnn", cnn=CNN.cnn), {"policy": (3,), "policy/camera": IMAGE})
    obs = obs_of(model)
    assert model.normalize(obs)["policy/camera"] is obs["policy/camera"]
    before = model.value(obs)
    model.update_normalizers(obs, torch.zeros(4), torch.ones(4, dtype=torch.bool))
    assert list(model.normalizers.state_dict()) == ["policy.mean", "policy.var", "policy.count"]
    assert not torch.equal(model.value(obs), before), "the vector's normaliser moved"


def test_actor_and_critic_share_the_network_of_an_image_that_both_see():
    both = model_of(CNN, {"policy": IMAGE})
    assert len(both.encoders) == 1
    actors, critics = both.parameter_groups()
    assert {id(p) for p in critics} == {id(p) for p in both.critic.parameters()}
    seen = both.evaluate({"policy": torch.randint(0, 256, (4, *IMAGE), dtype=torch.uint8)}, torch.zeros(4, 2))
    for part in (seen.value.sum(), seen.params.sum()):
        both.zero_grad()
        part.backward(retain_graph=True)
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in both.encoders.parameters())
    apart = model_of(CNN, SHAPES)
    actors, critics = ({id(p) for p in part} for part in apart.parameter_groups())
    assert {id(p) for p in apart.encoders["critic/camera"].parameters()} < critics
    assert {id(p) for p in apart.encoders["policy/camera"].parameters()} < actors
    assert not actors & critics
    assert len(actors | critics) == len(list(apart.parameters()))


def test_a_group_s_name_may_hold_a_dot():
    model = model_of(CNN, {"policy": (1,), "policy/hand.rgb": IMAGE})
    assert torch.isfinite(model.value(obs_of(model))).all()


def test_orthogonal_or_torchs_own():
    weight = model_of(CNN, {"policy": IMAGE}).encoders["policy"].net[0].weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(4), atol=1e-5, rtol=0)
    plain = model_of(ModelConfig(init="default", name="cnn", cnn=CNN.cnn), {"policy": IMAGE})
    assert plain.encoders["policy"].net[0].weight.abs().max() <= 1 / math.sqrt(2 * 3 * 3)


@pytest.mark.parametrize(
    "config, shapes, match",
    [
        (MLP, {"policy": IMAGE}, r"model=mlp: the observation group 'policy' is an image \[2, 5, 5\]; use model=cnn"),
        (MLP, {"policy": (2,), "critic/camera": IMAGE}, r"'critic/camera' is an image"),
        (CNN, {"policy": (2,), "camera": IMAGE}, r"model=cnn: none .* is an image .*'policy' \[2\]; use model=mlp"),
        (ModelConfig(name="cnn"), {"policy": IMAGE}, r"image 'policy' \[2, 5, 5\] .* too small"),
        (ModelConfig(shared_trunk=True), {"policy": (2,), "critic/goal": (2,)}, r"shared_trunk=true: .*different"),
    ],
)
def test_models_that_do_not_fit_the_task(config, shapes, match):
    with pytest.raises(ValueError, match=match):
        model_of(config, shapes)


def test_an_image_that_no_net_reads_is_no_matter():
    assert model_of(MLP, {"policy": (2,), "camera": IMAGE}).images == ()


def test_floats_of_three_dimensions_are_flat_for_the_mlp_as_ever():
    model = model_of(MLP, {"policy": IMAGE}, dtypes={})
    assert tuple(model.critic[0].weight.shape) == (1, 50)


# -- where the phase stands -----------------------------------------------------------------------------------------
def test_the_phase_penalty_finds_the_columns_of_every_group():
    # The critic reads policy (3, the last a phase) | camera (6 features) | policy/more (2, both phases)
    columns = {"policy": 1, "policy/more": 2}
    model = model_of(CNN, {"policy": (3,), "policy/camera": IMAGE, "policy/more": (2,)}, columns)
    with torch.no_grad():
        model.critic[0].weight.copy_(torch.arange(11.0).unsqueeze(0))
    assert model.phase_penalty().item() == 2.0**2 + 9.0**2 + 10.0**2


# -- settings -------------------------------------------------------------------------------------------------------
def test_model_cnn_on_the_command_line():
    model = load_config(["model=cnn", "model.cnn.kernels=[3,3,3]", "model.actor_hidden=[7]"]).model
    assert (model.name, model.cnn.kernels, model.actor_hidden) == ("cnn", (3, 3, 3), (7,))
    assert load_config(["model=cnn"]).model == ModelConfig(name="cnn")
