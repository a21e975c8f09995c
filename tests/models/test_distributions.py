"""Action distributions against torch.distributions, sampling and hand-worked numbers."""

import math

import pytest
import torch
from torch import distributions as td

from rl_stagger.envs.base import Box, Discrete
from rl_stagger.models.distributions import (
    CategoricalHead,
    GaussianHead,
    TanhGaussianHead,
    categorical_kl,
    gaussian_entropy,
    gaussian_kl,
    gaussian_log_prob,
    log_tanh_slope,
    make_head,
)

BOUNDS = Box(3, [-1.0, -2.0, 0.0], [1.0, 3.0, 0.5])
MEAN = torch.tensor([[0.3, -1.2, 2.0], [0.0, 0.5, -0.7]])
STD = torch.tensor([0.5, 1.3, 0.2])
RAW = torch.tensor([[0.1, -2.0, 2.1], [1.5, 0.4, -0.6]])


def draw(head, params, generator):
    return head.sample(params, head.scale(), head.noise(params, generator))


def head_of(kind, spec=BOUNDS, init_std=1.0, floor=0.01, form="log"):
    return make_head(spec, kind, init_std, floor, form)


def reference(mean=MEAN, std=STD):
    return td.Independent(td.Normal(mean, std), 1)


def squashed(head, mean=MEAN, std=STD):
    """The distribution of the squashed action, by torch's own transforms."""
    affine = td.transforms.AffineTransform(head.center, head.half_range)
    return td.TransformedDistribution(td.Normal(mean, std), [td.transforms.TanhTransform(), affine])


# -- Gaussian -------------------------------------------------------------------------------------------------------
def test_gaussian_equals_torchs():
    torch.testing.assert_close(gaussian_log_prob(RAW, MEAN, STD), reference().log_prob(RAW))
    torch.testing.assert_close(gaussian_entropy(STD), reference().entropy()[0])
    other_mean, other_std = MEAN + 0.4, STD * torch.tensor([1.5, 0.7, 1.0])
    want = td.kl_divergence(reference(), reference(other_mean, other_std))
    torch.testing.assert_close(gaussian_kl(MEAN, STD, other_mean, other_std), want)


def test_gaussian_numbers_by_hand():
    # log N(1; 0, 1) = -1/2 - log(2 pi) / 2 = -1.4189385; entropy (1 + log 2 pi) / 2 = 1.4189385;
    # KL(N(0, 1) || N(1, 1)) = 1/2; KL(N(0, 1) || N(0, 2)) = log 2 + 1/8 - 1/2 = .3181472
    zero, one = torch.zeros(1), torch.ones(1)
    assert float(gaussian_log_prob(one, zero, one)) == pytest.approx(-1.4189385)
    assert float(gaussian_entropy(one)) == pytest.approx(1.4189385)
    assert float(gaussian_kl(zero, one, one, one)) == pytest.approx(0.5)
    assert float(gaussian_kl(zero, one, zero, 2 * one)) == pytest.approx(0.3181472)


def test_kl_is_zero_of_itself_and_a_small_one_is_no_rounding():
    assert gaussian_kl(MEAN, STD, MEAN, STD).tolist() == [0.0, 0.0]
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    assert categorical_kl(logits, logits).tolist() == [0.0]
    # stds off by e^d: KL = (e^(-2d) - 1 + 2d) / 2, about d^2 each
    for d in (1e-3, 1e-4, 1e-5):
        kl = gaussian_kl(torch.zeros(2), torch.ones(2), torch.zeros(2), torch.full((2,), math.exp(d)))
        assert float(kl) == pytest.approx(2 * d * d, rel=0.05)


@pytest.mark.parametrize("form", ["log", "direct"])
def test_std_starts_where_it_was_told_and_never_falls_below_its_floor(form):
    head = head_of("gaussian", init_std=0.7, floor=0.2, form=form)
    torch.testing.assert_close(head.scale(), torch.full((3,), 0.7))
    with torch.no_grad():
        head.std_param.fill_(-5.0)
    head.project()
    assert head.scale().tolist() == pytest.approx([0.2] * 3)
    assert torch.isfinite(head.log_prob(MEAN, head.scale(), RAW)).all()
    sample = draw(head, torch.zeros(4000, 3), torch.Generator().manual_seed(0))
    assert float(sample.detach().std()) == pytest.approx(0.2, rel=0.05)
    # At the floor it can still learn to grow
    head.scale().sum().backward()
    assert (head.std_param.grad > 0).all()


def test_environment_gets_the_clipped_action_and_the_raw_one_keeps_its_log_prob():
    # tianshou #312, CleanRL #240: std 1, bound .1
    head = head_of("gaussian", Box(2, -0.1, 0.1))
    params = torch.zeros(1000, 2)
    with torch.no_grad():
        raw = draw(head, params, torch.Generator().manual_seed(0))
        sent = head.to_env(raw)
    assert float(raw.abs().max()) > 1.0
    assert float(sent.abs().max()) == pytest.approx(0.1)
    inside = raw.abs() < 0.1
    assert torch.equal(sent[inside], raw[inside])
    assert torch.equal(sent[~inside], 0.1 * raw[~inside].sign())
    log_prob = head.log_prob(params, head.scale(), raw)
    torch.testing.assert_close(log_prob, td.Independent(td.Normal(params, torch.ones(2)), 1).log_prob(raw))
    assert not torch.allclose(log_prob, head.log_prob(params, head.scale(), sent), atol=0.1)


def test_unbounded_sides_are_not_clipped():
    raw = torch.tensor([[-50.0, 50.0]])
    assert head_of("gaussian", Box(2)).to_env(raw).tolist() == [[-50.0, 50.0]]
    assert head_of("gaussian", Box(2, -1.0, None)).to_env(raw).tolist() == [[-1.0, 50.0]]


def test_gaussian_samples_have_their_mean_and_std():
    head = head_of("gaussian", Box(2), init_std=0.5)
    sample = draw(head, torch.tensor([1.0, -3.0]).expand(20_000, 2), torch.Generator().manual_seed(1))
    # standard errors: .5 / sqrt(20000) = .0035 of the mean, .0025 of the std
    torch.testing.assert_close(sample.mean(0), torch.tensor([1.0, -3.0]), rtol=0, atol=0.015)
    torch.testing.assert_close(sample.std(0), torch.tensor([0.5, 0.5]), rtol=0, atol=0.012)
    assert torch.equal(head.mode(MEAN), MEAN)


# -- tanh Gaussian --------------------------------------------------------------------------------------------------
def test_tanh_gaussian_log_prob_equals_torchs_of_the_squashed_action():
    head = head_of("tanh_gaussian")
    action = head.to_env(RAW)
    assert ((action > head.low) & (action < head.high)).all()
    want = squashed(head).log_prob(action).sum(-1)
    torch.testing.assert_close(head.log_prob(MEAN, STD, RAW), want, rtol=1e-4, atol=1e-4)


def test_tanh_gaussian_by_hand():
    # raw 0, mean 0, std 1, bounds -2..2: tanh' = 1, half range 2: -log(2 pi) / 2 - log 2 = -1.6120858
    head = head_of("tanh_gaussian", Box(1, -2.0, 2.0))
    zero = torch.zeros(1, 1)
    assert float(head.log_prob(zero, torch.ones(1), zero)) == pytest.approx(-1.6120858)
    # to_env(atanh(1/2)) = 2 * 1/2; log slope there log(1 - 1/4)
    raw = torch.full((1, 1), math.atanh(0.5))
    assert float(head.to_env(raw)) == pytest.approx(1.0)
    assert float(log_tanh_slope(raw)) == pytest.approx(math.log(0.75))
    shifted = head_of("tanh_gaussian", Box(1, 1.0, 3.0))
    assert float(shifted.to_env(raw)) == pytest.approx(2.5)
    assert float(shifted.to_env(zero)) == pytest.approx(2.0)


@pytest.mark.parametrize("std", [0.05, 0.5, 1.0, 1.5])
def test_tanh_gaussian_entropy_equals_a_monte_carlo_estimate(std):
    head = head_of("tanh_gaussian")
    scale = torch.full((3,), std)
    draw = torch.Generator().manual_seed(0)
    rows = 100_000
    for mean in MEAN:
        raw = mean + scale * torch.randn(rows, 3, generator=draw)
        minus_log_prob = -head.log_prob(mean.expand(rows, 3), scale, raw)
        error = float(minus_log_prob.std()) / math.sqrt(rows)
        got = float(head.entropy(mean.unsqueeze(0), scale))
        assert got == pytest.approx(float(minus_log_prob.mean()), abs=5 * error + 0.01)


def test_tanh_gaussian_kl_is_that_of_the_gaussians():
    head = head_of("tanh_gaussian")
    other = (MEAN + 0.2, STD * 1.1)
    torch.testing.assert_close(head.kl(MEAN, STD, *other), gaussian_kl(MEAN, STD, *other))


def test_tanh_gaussian_needs_finite_bounds():
    for spec in (Box(2), Box(2, -1.0, None), Box(2, None, 1.0)):
        with pytest.raises(ValueError, match="finite bounds"):
            head_of("tanh_gaussian", spec)


# -- categorical ----------------------------------------------------------------------------------------------------
def test_categorical_equals_torchs():
    head = CategoricalHead(Discrete(4))
    logits = torch.tensor([[1.0, -0.5, 2.0, 0.0], [3.0, 3.0, -9.0, 1.0]])
    other = logits + torch.tensor([0.2, -0.4, 0.0, 1.0])
    want = td.Categorical(logits=logits)
    for raw in (torch.tensor([0, 1]), torch.tensor([2, 3])):
        torch.testing.assert_close(head.log_prob(logits, head.scale(), raw), want.log_prob(raw))
    torch.testing.assert_close(head.entropy(logits, head.scale()), want.entropy())
    kl = head.kl(logits, head.scale(), other, head.scale())
    torch.testing.assert_close(kl, td.kl_divergence(want, td.Categorical(logits=other)))
    assert head.mode(logits).tolist() == [2, 0]
    assert head.scale().numel() == 0


def test_categorical_samples_come_as_often_as_they_should():
    head = CategoricalHead(Discrete(3))
    logits = torch.log(torch.tensor([0.7, 0.2, 0.1])) + 5.0
    drawn = draw(head, logits.expand(30_000, 3), torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.int64
    share = torch.bincount(drawn, minlength=3) / 30_000
    # standard errors below .0027
    torch.testing.assert_close(share, torch.tensor([0.7, 0.2, 0.1]), rtol=0, atol=0.012)


# -- all of them ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, spec, size", [("gaussian", BOUNDS, 3), ("tanh_gaussian", BOUNDS, 3), ("gaussian", Discrete(4), 4)]
)
def test_shapes_for_any_leading_shape(kind, spec, size):
    head = head_of(kind, spec)
    assert head.num_params == size
    for lead in ((), (5,), (2, 5)):
        params = torch.zeros(*lead, size)
        raw = draw(head, params, torch.Generator().manual_seed(0))
        assert raw.shape == head.to_env(raw).shape == head.mode(params).shape
        for x in (
            head.log_prob(params, head.scale(), raw),
            head.entropy(params, head.scale()),
            head.kl(params, head.scale(), params + 1, head.scale()),
        ):
            assert tuple(x.shape) == lead


@pytest.mark.parametrize("kind, spec", [("gaussian", BOUNDS), ("tanh_gaussian", BOUNDS), ("gaussian", Discrete(3))])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
def test_finite_for_huge_parameters_and_gradients_too(kind, spec, size):
    head = head_of(kind, spec)
    params = (torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, 1.0]]) * size).requires_grad_()
    raw = draw(head, params.detach(), torch.Generator().manual_seed(0))
    out = head.log_prob(params, head.scale(), raw).sum() + head.entropy(params, head.scale()).sum()
    out = out + head.kl(params.detach() * 0, head.scale().detach(), params, head.scale()).sum()
    assert torch.isfinite(out)
    assert torch.isfinite(head.to_env(raw)).all()
    out.backward()
    assert params.grad is not None
    assert torch.isfinite(params.grad).all()


@pytest.mark.parametrize("kind, spec", [("gaussian", BOUNDS), ("tanh_gaussian", BOUNDS), ("gaussian", Discrete(3))])
def test_the_same_generator_state_draws_the_same_actions(kind, spec):
    head = head_of(kind, spec)
    params = torch.zeros(50, 3)
    one, two = (draw(head, params, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, draw(head, params, torch.Generator().manual_seed(4)))


def test_make_head_picks_by_the_action():
    assert type(head_of("gaussian")) is GaussianHead
    assert type(head_of("tanh_gaussian")) is TanhGaussianHead
    assert type(head_of("tanh_gaussian", Discrete(2))) is CategoricalHead
