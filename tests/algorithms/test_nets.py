"""The written-out passes against autograd through the same modules."""

import copy

import pytest
import torch

from rl_stagger.algorithms import nets as nets_module
from rl_stagger.algorithms.losses import Rows, policy_gradient, value_gradient
from rl_stagger.algorithms.nets import FlatNets, ModuleNets, make_nets
from rl_stagger.algorithms.optimizer import FlatAdam
from rl_stagger.envs.base import Box, Discrete, EnvSpec
from rl_stagger.models.actor_critic import ACTIVATIONS, ActorCritic, ModelConfig
from rl_stagger.models.passes import ACTIVATION_PASSES, even_pieces

SPECS = {
    "one group": EnvSpec({"policy": (5,)}, Box(3), None),
    "asymmetric": EnvSpec({"policy": (5,), "critic": (4,), "critic/more": (2, 3)}, Box(2, -1.0, 1.0), None),
    "choices": EnvSpec({"policy": (5,)}, Discrete(4), None),
}
HIDDEN = {"none": ((), ()), "uneven": ((7, 9), (6,)), "deep": ((8, 8, 8), (8, 8, 8))}


def model_of(spec, hidden=((7, 9), (6,)), activation="elu", **settings):
    torch.manual_seed(0)
    model = ActorCritic(spec, ModelConfig(*hidden, activation=activation, **settings))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # no zero biases, no tiny last layer
    return model


def obs_of(model, rows, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *shape, generator=draw) for name, shape in model.obs_shapes.items()}


def rows_of(model, rows=50):
    draw = torch.Generator().manual_seed(2)
    obs = obs_of(model, rows)
    with torch.no_grad():
        act, value = model.act(obs, draw), model.value(obs)
    numbers = torch.randn(2, rows, generator=draw)
    valid = (torch.rand(rows, generator=draw) > 0.2).float()
    log_prob = act.log_prob + 0.1 * torch.randn(rows, generator=draw)
    normalized = model.normalize(obs)
    return Rows(normalized, act.raw, log_prob, act.params, value, *numbers, valid, valid / valid.sum())


@torch.no_grad()
def gradient_by(kind, model, rows):
    """(flat gradient, sums) by nets of that kind on a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = FlatAdam(model.parameter_groups())
    nets = kind(model, optimizer) if kind is FlatNets else kind(model)
    old_scale = model.head.scale().clone()
    sums = nets.gradient(
        rows,
        lambda params, part: policy_gradient(model.head, params, part, old_scale, 0.2, 0.05),
        lambda value, part: value_gradient(value, part, 0.5, 0.3),
    )
    return optimizer.grad, sums


def test_every_activation_has_passes():
    assert ACTIVATION_PASSES.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("hidden", sorted(HIDDEN))
@pytest.mark.parametrize("spec", sorted(SPECS))
@pytest.mark.parametrize("piece_rows", [2048, 16])
def test_gradients_are_autograds(monkeypatch, spec, hidden, activation, piece_rows):
    monkeypatch.setattr(nets_module, "CPU_PIECE_ROWS", piece_rows)
    model = model_of(SPECS[spec], HIDDEN[hidden], activation)
    rows = rows_of(model)
    got, sums = gradient_by(FlatNets, model, rows)
    want, want_sums = gradient_by(ModuleNets, model, rows)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums.stats, want_sums.stats)
    torch.testing.assert_close(sums.ratio_error, want_sums.ratio_error)
    assert float(want.abs().max()) > 1e-3


@pytest.mark.parametrize("spec", sorted(SPECS))
def test_outputs_are_the_modules(monkeypatch, spec):
    monkeypatch.setattr(nets_module, "CPU_PIECE_ROWS", 16)
    model = model_of(SPECS[spec])
    obs = obs_of(model, 50)
    model.update_normalizers(obs, torch.zeros(50), torch.ones(50, dtype=torch.bool))
    normalized = model.normalize(obs)
    flat = FlatNets(model, FlatAdam(model.parameter_groups()))
    for nets in (flat, ModuleNets(model)):
        out = torch.empty(50, model.head.num_params)
        nets.params(obs, out)
        torch.testing.assert_close(out, model.params(normalized).detach())
        torch.testing.assert_close(nets.values(normalized, 20), model.critic_output(normalized).detach())


def test_passes_follow_the_parameters():
    """Steps, loading and PopArt write the parameters in place; the passes must not hold older ones."""
    model = model_of(SPECS["one group"], normalize_value=True)
    optimizer = FlatAdam(model.parameter_groups())
    nets, obs = FlatNets(model, optimizer), obs_of(model, 6)

    def check():
        nets.refresh()
        got, want = nets.values(model.normalize(obs), 6), model.critic_output(model.normalize(obs)).detach()
        torch.testing.assert_close(got, want)
        return got

    first = check()
    optimizer.grad.normal_()
    optimizer.step(torch.tensor(0.1), torch.tensor(True))
    second = check()
    model.load_state_dict(model_of(SPECS["one group"], normalize_value=True).state_dict())
    third = check()
    model.update_normalizers(obs, 5.0 + torch.arange(6.0), torch.ones(6, dtype=torch.bool))
    check()
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, third)


def test_other_numbers_of_rows_share_the_buffers():
    model = model_of(SPECS["one group"])
    nets = FlatNets(model, FlatAdam(model.parameter_groups()))
    for rows in (5, 50, 1, 33, 50):
        obs = model.normalize(obs_of(model, rows, seed=rows))
        torch.testing.assert_close(nets.values(obs, rows), model.critic_output(obs).detach())


def test_who_gets_which():
    vector = SPECS["one group"]
    image = EnvSpec({"policy": (3, 48, 48)}, Box(1), None)
    for model, kind in (
        (model_of(vector), FlatNets),
        (model_of(vector, shared_trunk=True), ModuleNets),
        (model_of(image, name="cnn"), ModuleNets),
    ):
        assert type(make_nets(model, FlatAdam(model.parameter_groups()))) is kind


@pytest.mark.parametrize(
    "rows, most, want", [(5, 5, [5]), (6, 5, [3, 3]), (11, 5, [3, 4, 4]), (1, 9, [1]), (0, 9, [0])]
)
def test_even_pieces(rows, most, want):
    pieces = even_pieces(rows, most)
    assert [stop - start for start, stop in pieces] == want
    assert pieces[0][0] == 0
    assert pieces[-1][1] == rows
