"""Running moments: merged exactly, masked, frozen between merges."""

import pytest
import torch
from helpers.toy_envs import LINEAR

from rl_stagger.envs.base import Box, EnvSpec
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.models.normalizer import IdentityNormalizer, RunningNormalizer, masked_batch_moments, merge_moments

NAN = float("nan")


def all_valid(rows):
    return torch.ones(rows, dtype=torch.bool)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_moments_of_batches_in_turn_are_those_of_all_rows_together(shape):
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(rows, *shape, generator=draw) * (i + 1) + 5 * i for i, rows in enumerate((7, 1, 50))]
    normalizer = RunningNormalizer(shape)
    for batch in batches:
        normalizer.update(batch, all_valid(len(batch)))
    together = torch.cat(batches)
    assert float(normalizer.count) == 58
    torch.testing.assert_close(normalizer.mean, together.mean(0))
    torch.testing.assert_close(normalizer.var, together.var(0, unbiased=False))
    want = (together - together.mean(0)) / (together.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(normalizer(together), want.clamp(-10, 10), rtol=1e-4, atol=1e-5)


def test_merge_by_hand():
    # {1, 3}: mean 2, variance 1. {7, 9, 11, 13}: mean 10, variance 5. Together 1 3 7 9 11 13: mean 44 / 6 = 7.3333,
    # squares 430 / 6 = 71.6667, variance 71.6667 - 53.7778 = 17.8889
    merged = merge_moments(*(torch.tensor(x) for x in (2.0, 1.0, 2.0, 10.0, 5.0, 4.0)))
    assert [float(x) for x in merged] == pytest.approx([44 / 6, 17.888889, 6.0])


def test_an_empty_batch_changes_nothing():
    normalizer = RunningNormalizer((2,))
    nobody = torch.zeros(4, dtype=torch.bool)
    normalizer.update(torch.full((4, 2), NAN), nobody)
    assert normalizer.mean.tolist() == [0.0, 0.0]
    assert normalizer.var.tolist() == [1.0, 1.0]
    assert float(normalizer.count) == 0
    normalizer.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), all_valid(2))
    before = {name: x.clone() for name, x in normalizer.state_dict().items()}
    normalizer.update(torch.full((4, 2), NAN), nobody)
    for name, x in normalizer.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert normalizer.mean.tolist() == [2.0, 4.0]
    assert normalizer.var.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e20])
def test_rows_outside_the_mask_have_no_influence(garbage):
    x = torch.tensor([[1.0, 2.0], [garbage, garbage], [3.0, 6.0], [garbage, 0.0]])
    mean, var, count = masked_batch_moments(x, torch.tensor([True, False, True, False]))
    assert mean.tolist() == [2.0, 4.0]
    assert var.tolist() == [1.0, 4.0]
    assert float(count) == 2


def test_moments_far_from_zero_keep_their_digits():
    # A sum of squares in float32 would lose a variance of 1 beside a mean of 1e4
    draw = torch.Generator().manual_seed(0)
    normalizer = RunningNormalizer(())
    for _ in range(20):
        normalizer.update(1e4 + torch.randn(1000, generator=draw), all_valid(1000))
    assert float(normalizer.mean) == pytest.approx(1e4, abs=0.05)
    assert float(normalizer.var) == pytest.approx(1.0, rel=0.05)


def test_only_update_moves_it_and_outputs_are_clipped():
    normalizer = RunningNormalizer((1,), clip=3.0)
    normalizer.update(torch.tensor([[0.0], [2.0]]), all_valid(2))  # mean 1, variance 1
    before = {name: x.clone() for name, x in normalizer.state_dict().items()}
    out = normalizer(torch.tensor([[1.0], [2.0], [100.0], [-1e30], [float("inf")]]))
    torch.testing.assert_close(out, torch.tensor([[0.0], [1.0], [3.0], [-3.0], [3.0]]), rtol=1e-4, atol=1e-5)
    assert normalizer.training
    for name, x in normalizer.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_starts_as_the_identity():
    x = torch.randn(10, 3)
    torch.testing.assert_close(RunningNormalizer((3,))(x), x, rtol=1e-4, atol=1e-4)


def test_a_constant_observation_stays_finite():
    normalizer = RunningNormalizer((1,))
    normalizer.update(torch.full((50, 1), 7.0), all_valid(50))
    assert torch.isfinite(normalizer(torch.tensor([[7.0], [8.0]]))).all()


def test_identity_normalizer():
    x = torch.randn(4, 2)
    identity = IdentityNormalizer()
    assert identity.update(x, all_valid(4)) is None
    assert torch.equal(identity(x), x)
    assert identity.state_dict() == {}


# -- PopArt ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hidden", [(), (16, 16)])
def test_values_in_reward_units_stay_what_they_were_when_the_moments_move(hidden):
    torch.manual_seed(0)
    config = ModelConfig(hidden, hidden, normalize_obs=False, normalize_value=True)
    model = ActorCritic(EnvSpec({"policy": (3,)}, Box(1), None), config)
    obs = {"policy": torch.randn(64, 3)}
    draw = torch.Generator().manual_seed(1)
    for scale, shift in ((3.0, 20.0), (0.1, -4.0), (100.0, 700.0)):
        with torch.no_grad():
            before = model.value(obs)
            target = torch.randn(500, generator=draw) * scale + shift
            model.update_normalizers(
                {"policy": torch.zeros(500, 3)}, model.normalize_value(target), torch.ones(500).bool()
            )
            after = model.value(obs)
        assert float(model.value_normalizer.mean.abs()) > 1.0
        size = float(model.value_normalizer.mean.abs() + model.value_normalizer.std())
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * size)


def test_value_moments_are_those_of_the_targets_in_reward_units():
    model = ActorCritic(EnvSpec({"policy": (1,)}, Box(1), None), ModelConfig((), (), normalize_value=True))
    targets = [torch.tensor([10.0, 30.0]), torch.tensor([50.0, 70.0]), torch.tensor([90.0, 110.0])]
    for target in targets:  # as the learner gives them: in the units in force when they were made
        model.update_normalizers({"policy": torch.zeros(2, 1)}, model.normalize_value(target), torch.ones(2).bool())
    assert float(model.value_normalizer.mean) == pytest.approx(60.0, rel=1e-5)
    assert float(model.value_normalizer.var) == pytest.approx(7000 / 6, rel=1e-4)
    # and back again: normalize_value and denormalize_value undo each other
    value = torch.tensor([-5.0, 60.0, 400.0])
    torch.testing.assert_close(model.denormalize_value(model.normalize_value(value)), value, rtol=1e-5, atol=1e-4)
    assert model.normalize_value(value).tolist() == pytest.approx([-1.903, 0.0, 9.955], abs=2e-3)


def test_without_value_normalisation_values_are_left_alone():
    model = ActorCritic(EnvSpec({"policy": (1,)}, Box(1), None), LINEAR)
    weight = model.critic[0].weight.clone()
    model.update_normalizers({"policy": torch.ones(2, 1)}, torch.tensor([1e3, 2e3]), torch.ones(2).bool())
    assert torch.equal(model.critic[0].weight, weight)
    assert model.normalize_value(torch.tensor([5.0])).tolist() == [5.0]
