"""FlatAdam against torch.optim.Adam."""

import copy

import pytest
import torch
from torch import nn

from rl_stagger.algorithms import optimizer as optimizer_module
from rl_stagger.algorithms.optimizer import FlatAdam

ON, OFF = torch.tensor(True), torch.tensor(False)


@pytest.fixture(autouse=True, params=["torch's fused kernel", "written out"])
def step_by(request, monkeypatch):
    """Every test by both ways of a step; the second is what an older torch and the meta device get."""
    if request.param == "written out":
        monkeypatch.setattr(optimizer_module, "_fused_step", lambda device: None)
    elif optimizer_module._fused_step(torch.device("cpu")) is None:
        pytest.skip("this torch has no fused kernel that takes its rate from the device")


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def split(net):
    return [list(net[0].parameters()), list(net[2].parameters())]


def loss_of(net, step):
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 3, generator=draw), torch.randn(8, 2, generator=draw)
    return (net(x) - y).square().mean() * 3.0


def flat_steps(net, optimizer, steps, rate=0.01, active=ON):
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step(torch.tensor(rate), active)


def weights(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


@pytest.mark.parametrize("betas, eps", [((0.9, 0.999), 1e-8), ((0.8, 0.99), 1e-3)])
def test_twenty_steps_equal_torchs_adam(betas, eps):
    ours, theirs = small_net(), small_net()
    optimizer = FlatAdam(split(ours), betas, eps)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=betas, eps=eps)
    begin = weights(ours)
    for step in range(20):
        flat_steps(ours, optimizer, [step])
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=2e-7)
    assert (weights(ours) - begin).abs().min() > 1e-3, "every weight moved"


def test_first_step_is_the_rate_times_the_sign():
    # m / (1 - b1) = g, v / (1 - b2) = g^2, so the step is rate * g / |g|
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FlatAdam([[p]])
    (p * torch.tensor([3.0, -0.5])).sum().backward()
    optimizer.step(torch.tensor(0.1), ON)
    torch.testing.assert_close(p.detach(), torch.tensor([0.9, -1.9]), rtol=1e-5, atol=0)


def test_the_rate_may_change_from_step_to_step():
    ours, theirs = small_net(), small_net()
    optimizer, reference = FlatAdam(split(ours)), torch.optim.Adam(theirs.parameters(), lr=1.0)
    for step, rate in enumerate((0.01, 0.002, 0.05)):
        flat_steps(ours, optimizer, [step], rate)
        reference.param_groups[0]["lr"] = rate
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_equals_torchs(max_norm, separate):
    ours, theirs = small_net(), small_net()
    optimizer = FlatAdam(split(ours))
    loss_of(ours, 0).backward()
    loss_of(theirs, 0).backward()
    joint = torch.cat([p.grad.reshape(-1) for p in theirs.parameters()]).norm()
    for group in split(theirs) if separate else [list(theirs.parameters())]:
        nn.utils.clip_grad_norm_(group, max_norm)
    torch.testing.assert_close(optimizer.clip_grad_norm(max_norm, separate), joint, rtol=1e-6, atol=0)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-8)


def test_separate_clipping_leaves_the_small_group_alone():
    # norms 3 and 4, joint 5. Joint at 2.5: both halved. Separate at 3.5: the first as it was, the second 4 -> 3.5.
    for separate, max_norm, want in ((False, 2.5, [1.5, 2.0]), (True, 3.5, [3.0, 3.5])):
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = FlatAdam([[a], [b]])
        (3 * a + 4 * b).sum().backward()
        assert float(optimizer.clip_grad_norm(max_norm, separate)) == pytest.approx(5.0)
        assert optimizer.grad.tolist() == pytest.approx(want, rel=1e-5)


def test_an_inactive_step_moves_nothing_even_with_nan_gradients():
    net = small_net()
    optimizer = FlatAdam(split(net))
    flat_steps(net, optimizer, range(3))
    before, moments = weights(net), optimizer.state_dict()
    for poison in (float("nan"), float("inf"), 1.0):
        optimizer.grad.fill_(poison)
        optimizer.clip_grad_norm(1.0, separate=False)
        optimizer.step(torch.tensor(0.01), OFF)
    assert torch.equal(weights(net), before)
    for name, x in optimizer.state_dict().items():
        assert torch.equal(x, moments[name]), name


def test_steps_after_an_inactive_one_go_on_as_if_it_had_not_been():
    one, two = small_net(), small_net()
    first, second = FlatAdam(split(one)), FlatAdam(split(two))
    flat_steps(one, first, [0, 1, 2])
    flat_steps(two, second, [0, 1])
    flat_steps(two, second, [7], active=OFF)
    flat_steps(two, second, [2])
    assert torch.equal(weights(one), weights(two))


def test_state_round_trip_is_bitwise():
    net = small_net()
    optimizer = FlatAdam(split(net))
    flat_steps(net, optimizer, range(4))
    saved, saved_net = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    flat_steps(net, optimizer, range(4, 8))
    again = small_net(seed=9)
    restored = FlatAdam(split(again))
    again.load_state_dict(saved_net)
    restored.load_state_dict(saved)
    flat_steps(again, restored, range(4, 8))
    assert torch.equal(weights(again), weights(net))
    for name, x in restored.state_dict().items():
        assert torch.equal(x, optimizer.state_dict()[name]), name


def test_a_saved_state_is_a_copy():
    net = small_net()
    optimizer = FlatAdam(split(net))
    saved = optimizer.state_dict()
    flat_steps(net, optimizer, [0])
    assert not saved["exp_avg"].any()
    assert float(saved["count"]) == 0


def test_parameters_stay_views_of_the_vector():
    net = small_net()
    values = weights(net)
    optimizer = FlatAdam(split(net))
    assert torch.equal(optimizer.flat, values), "building changes no value"
    flat_steps(net, optimizer, [0])
    assert torch.equal(optimizer.flat, weights(net)), "steps reach the module"
    net.load_state_dict(small_net(seed=4).state_dict())
    assert torch.equal(optimizer.flat, weights(small_net(seed=4))), "loading reaches the vector"
    flat_steps(net, optimizer, [1])
    assert torch.equal(optimizer.flat, weights(net)), "and steps still reach the module"
    assert not torch.equal(optimizer.flat, weights(small_net(seed=4)))


def test_needs_a_parameter():
    with pytest.raises(ValueError, match="at least one parameter"):
        FlatAdam([[]])
