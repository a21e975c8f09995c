"""The losses by hand, and their written-out gradients against autograd."""

import math

import pytest
import torch
from torch import nn

from rl_stagger.algorithms.losses import (
    STATS,
    Rows,
    clipped_surrogate,
    policy_gradient,
    standardize,
    value_error,
    value_gradient,
)
from rl_stagger.envs.base import Box, Discrete
from rl_stagger.models.distributions import make_head

NAN = float("nan")


# -- formulas -------------------------------------------------------------------------------------------------------
def test_clipped_surrogate_by_hand():
    # clip .2.        ratio:  1     1.5   1.5   .5    .5    1.1
    #                 A:      2     2     -2    2     -2    -1
    #           unclipped:    2     3     -3    1     -1    -1.1
    #             clipped:    2     2.4   -2.4  1.6   -1.6  -1.1
    #          -(smaller):    -2    -2.4  3     -1    1.6   1.1
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0, -1.0])
    want = torch.tensor([-2.0, -2.4, 3.0, -1.0, 1.6, 1.1])
    torch.testing.assert_close(clipped_surrogate(ratio, advantage, 0.2)[0], want)


def test_gradient_of_the_surrogate_stops_outside_the_clip_only_where_it_would_gain():
    # By the log-probability: ratio * (d / d ratio) = -ratio * A, or 0
    ratio, advantage = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]), torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    assert clipped_surrogate(ratio, advantage, 0.2)[1].tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -2.2])
    infinite = torch.tensor([float("inf")])
    assert clipped_surrogate(infinite, torch.ones(1), 0.2)[1].tolist() == [0.0], "and not 0 * inf"


def test_value_error_by_hand():
    # plain: (3 - 5)^2 = 4, (3 - 1)^2 = 4. Clipped at .5 around the old value 2: 2.5, so (2.5 - 5)^2 = 6.25 and
    # (2.5 - 1)^2 = 2.25; the larger of both counts: 6.25, 4. Derivatives 2 * (3 - 5) and 2 * (3 - 1), the first 0 where
    # the clipped error, which does not move with the value, is the larger.
    value, old, target = torch.tensor([3.0, 3.0]), torch.tensor([2.0, 2.0]), torch.tensor([5.0, 1.0])
    assert [x.tolist() for x in value_error(value, old, target, None)] == [[4.0, 4.0], [-4.0, 4.0]]
    assert [x.tolist() for x in value_error(value, old, target, 0.5)] == [[6.25, 4.0], [0.0, 4.0]]


def test_standardize():
    x, valid = torch.tensor([1.0, NAN, 3.0, 5.0]), torch.tensor([True, False, True, True])
    # mean 3, variance 8/3: (-2, 0, 2) / 1.63299
    torch.testing.assert_close(standardize(x, valid), torch.tensor([-1.2247449, 0.0, 0.0, 1.2247449]))


@pytest.mark.parametrize("constant", [0.0, 0.1, 100.3, -7e4])
def test_a_batch_that_does_not_vary_standardizes_to_zeros(constant):
    # float32 cannot average 999 times 100.3 exactly: the rounding must not be blown up to +-1
    x = torch.full((999,), constant)
    assert standardize(x, torch.ones(999).bool()).abs().max() < 1e-2


# -- gradients against autograd -------------------------------------------------------------------------------------
HEADS = {
    "gaussian, log": (Box(3), "gaussian", "log"),
    "gaussian, direct": (Box(3, -1.0, 1.0), "gaussian", "direct"),
    "tanh, log": (Box(3, -1.0, 2.0), "tanh_gaussian", "log"),
    "tanh, direct": (Box(3, -1.0, 2.0), "tanh_gaussian", "direct"),
    "choices": (Discrete(3), "gaussian", "log"),
}


def head_and_rows(kind, rows=40):
    """In float64: a head, parameters that moved since the rows were made, and rows of which a quarter is invalid."""
    draw = torch.Generator().manual_seed(0)
    spec, distribution, form = HEADS[kind]
    head = make_head(spec, distribution, 0.7, 0.01, form).double()
    old = torch.randn(rows, head.num_params, generator=draw, dtype=torch.float64)
    old_scale = head.scale().detach().clone()
    raw = head.sample(old, old_scale, head.noise(old, draw)).detach()
    log_prob = head.log_prob(old, old_scale, raw).detach()
    if head.own_parameter is not None:
        with torch.no_grad():
            head.own_parameter.add_(torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64))
    numbers = torch.randn(3, rows, generator=draw, dtype=torch.float64)
    valid = (torch.rand(rows, generator=draw) > 0.25).double()
    params = old + 0.3 * torch.randn(old.shape, generator=draw, dtype=torch.float64)
    return head, params, old_scale, Rows({}, raw, log_prob, old, *numbers, valid, valid / valid.sum())


def textbook_loss(head, params, old_scale, rows, clip, entropy_coef):
    """PPO's policy loss as it is written in the paper, for autograd: (loss, the means that are reported)."""
    keep = rows.valid > 0
    log_prob = head.log_prob(params, head.scale(), rows.action)[keep]
    ratio, advantage = (log_prob - rows.log_prob[keep]).exp(), rows.advantage[keep]
    surrogate = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    entropy = head.entropy(params, head.scale())[keep].mean()
    kl = head.kl(rows.params, old_scale, params, head.scale())[keep].mean()
    share = ((ratio - 1).abs() > clip).double().mean()
    return surrogate - entropy_coef * entropy, [kl, surrogate, entropy, share], (ratio - 1).abs().max()


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_policy_gradient_is_autograds(kind, entropy_coef):
    head, params, old_scale, rows = head_and_rows(kind)
    leaf = nn.Parameter(params.clone())
    loss, means, ratio_error = textbook_loss(head, leaf, old_scale, rows, 0.2, entropy_coef)
    loss.backward()
    with torch.no_grad():
        found = policy_gradient(head, params, rows, old_scale, 0.2, entropy_coef)
    assert leaf.grad is not None
    torch.testing.assert_close(found.d_params, leaf.grad)
    torch.testing.assert_close(found.stats, torch.stack(means).detach())
    torch.testing.assert_close(found.ratio_error, ratio_error.detach())
    if head.own_parameter is None:
        assert found.d_own is None
    else:
        assert found.d_own is not None
        torch.testing.assert_close(found.d_own, head.own_parameter.grad)
    assert 0.0 < float(found.stats[STATS.index("policy/clip_share")]) < 1.0, "both sides of the clip were met"


@pytest.mark.parametrize("value_clip", [None, 0.5])
def test_value_gradient_is_autograds(value_clip):
    _, _, _, rows = head_and_rows("choices")
    value = nn.Parameter(rows.value + torch.linspace(-1, 1, 40, dtype=torch.float64))
    keep = rows.valid > 0
    plain = (value - rows.target).square()
    if value_clip is not None:
        near = rows.value + (value - rows.value).clamp(-value_clip, value_clip)
        plain = torch.max(plain, (near - rows.target).square())
    error = plain[keep].mean()
    (0.7 * error).backward()
    d_value, mean = value_gradient(value.detach(), rows, 0.7, value_clip)
    torch.testing.assert_close(d_value, value.grad)
    torch.testing.assert_close(mean, error.detach())


@torch.no_grad()
def test_sums_over_pieces_are_the_minibatch():
    head, params, old_scale, rows = head_and_rows("gaussian, log")
    whole = policy_gradient(head, params, rows, old_scale, 0.2, 0.1)
    parts = []
    for piece in (slice(0, 7), slice(7, 40)):
        part = Rows({}, *(x[piece] for x in rows[1:]))
        parts.append(policy_gradient(head, params[piece], part, old_scale, 0.2, 0.1))
    torch.testing.assert_close(parts[0].stats + parts[1].stats, whole.stats)
    torch.testing.assert_close(parts[0].d_own + parts[1].d_own, whole.d_own)
    torch.testing.assert_close(torch.cat([part.d_params for part in parts]), whole.d_params)


@torch.no_grad()
def test_an_invalid_row_with_an_infinite_ratio_has_no_gradient():
    head, params, old_scale, rows = head_and_rows("gaussian, log")
    log_prob = torch.where(rows.valid > 0, rows.log_prob, torch.full_like(rows.log_prob, -1e4))
    found = policy_gradient(head, params, rows._replace(log_prob=log_prob), old_scale, 0.2, 0.0)
    want = policy_gradient(head, params, rows, old_scale, 0.2, 0.0)
    for name in ("d_params", "d_own", "stats"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    assert math.isfinite(float(found.ratio_error))
