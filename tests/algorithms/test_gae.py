"""Returns and advantages against numbers worked by hand and a slow loop."""

import pytest
import torch
from helpers.toy_envs import empty_rollout, scalar_model

from rl_stagger.algorithms.gae import explained_variance, gae, masked_gae, masked_mean, masked_moments
from rl_stagger.algorithms.ppo import PPO, PPOConfig, bootstrap_values
from rl_stagger.rollout import first_rows

NAN = float("nan")


def column(*values):
    """[K, 1] float32."""
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def marks(*values):
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


def returns(reward, value, next_value, terminated, truncated, gamma, lam):
    return gae(reward, value, next_value, terminated, truncated, gamma, lam) + value


def slow_gae(reward, value, next_value, terminated, truncated, gamma, lam):
    """Each A_t as its own sum of discounted deltas, in Python floats."""
    steps, envs = reward.shape
    out = torch.zeros(steps, envs, dtype=torch.float64)
    for n in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                future = 0.0 if terminated[k, n] else float(next_value[k, n])
                out[t, n] += weight * (float(reward[k, n]) + gamma * future - float(value[k, n]))
                if terminated[k, n] or truncated[k, n]:
                    break
                weight *= gamma * lam
    return out


def random_case(steps, envs, seed=0):
    draw = torch.Generator().manual_seed(seed)
    reward, value, next_value = (torch.randn(steps, envs, generator=draw) for _ in range(3))
    terminated, truncated = (torch.rand(steps, envs, generator=draw) < 0.2 for _ in range(2))
    return reward, value, next_value, terminated, truncated


def test_hand_case_with_a_time_out_and_a_death():
    # gamma .9, lambda .5, gamma * lambda = .45; r = 1 2 3 4, V = .5 1 1.5 2
    # t=3: delta = 4 + .9 * 10 - 2 = 11;            return 2 + 11 = 13
    # t=2: death: delta = 3 - 1.5;                  return 3
    # t=1: time-out, V(final) = 5: 2 + 4.5 - 1;     return 6.5
    # t=0: delta = 1 + .9 * 1 - .5 = 1.4; A = 1.4 + .45 * 5.5 = 3.875; return 4.375
    got = returns(
        column(1, 2, 3, 4), column(0.5, 1, 1.5, 2), column(1, 5, 99, 10), marks(0, 0, 1, 0), marks(0, 1, 0, 0), 0.9, 0.5
    )
    torch.testing.assert_close(got, column(4.375, 6.5, 3, 13))


def test_truncated_step_keeps_the_future_and_a_terminated_one_does_not():
    # r = 1, gamma = .99, V(final) = 10: 1 + 9.9 = 10.9 when truncated, 1 when terminated
    args = column(1), column(0), column(10)
    torch.testing.assert_close(gae(*args, marks(0), marks(1), 0.99, 0.95), column(10.9))
    torch.testing.assert_close(gae(*args, marks(1), marks(0), 0.99, 0.95), column(1.0))


def test_terminated_wins_where_both_flags_are_set():
    torch.testing.assert_close(gae(column(1), column(0), column(10), marks(1), marks(1), 0.99, 0.95), column(1.0))


def test_two_one_step_episodes_do_not_leak_into_each_other():
    # skrl #224, #449: r = 0, gamma = 1; every episode is cut after one step, in two environments at once. The first
    # episodes' states are worth 1, the second ones' 100. A leak would give the first row 100, a double count 2.
    value = torch.tensor([[1.0, 1.0], [100.0, 100.0]])
    cut = torch.ones(2, 2, dtype=torch.bool)
    got = returns(torch.zeros(2, 2), value, value, ~cut, cut, 1.0, 0.95)
    assert got.flatten().tolist() == [1.0, 1.0, 100.0, 100.0]


def test_two_episodes_of_two_steps_in_one_environment():
    # The same numbers in one environment: V = 1 throughout the first episode and at its end, 100 in the second.
    value = column(1, 1, 100, 100)
    got = returns(column(0, 0, 0, 0), value, value, marks(0, 0, 0, 0), marks(0, 1, 0, 1), 1.0, 0.95)
    assert got.flatten().tolist() == [1.0, 1.0, 100.0, 100.0]


@pytest.mark.parametrize("steps, envs", [(1, 1), (1, 5), (7, 1), (23, 11)])
def test_equals_a_slow_loop(steps, envs):
    for seed in range(4):
        case = random_case(steps, envs, seed)
        torch.testing.assert_close(gae(*case, 0.97, 0.9).double(), slow_gae(*case, 0.97, 0.9), rtol=1e-5, atol=1e-5)


def test_lambda_0_is_one_step_and_lambda_1_the_whole_sum():
    reward, value, next_value = column(1, 2, 4), column(0, 0, 0), column(0, 0, 8)
    never = marks(0, 0, 0)
    # lambda 0: r + .5 * V': 1, 2, 4 + 4. lambda 1, V = 0 but at the end: 8; 2 + .5 * 8 = 6; 1 + .5 * 6 = 4
    assert gae(reward, value, next_value, never, never, 0.5, 0.0).flatten().tolist() == [1.0, 2.0, 8.0]
    assert gae(reward, value, next_value, never, never, 0.5, 1.0).flatten().tolist() == [4.0, 6.0, 8.0]


def test_constant_reward_has_the_same_value_at_every_phase():
    # CleanRL #198: r = 1 for ever, gamma = .9, so V = 10 everywhere; a time-out must not make any target differ from 10
    value = torch.full((6, 1), 10.0)
    got = returns(torch.ones(6, 1), value, value, marks(0, 0, 0, 0, 0, 0), marks(0, 0, 1, 0, 0, 1), 0.9, 0.95)
    torch.testing.assert_close(got, value)


# -- invalid rows ---------------------------------------------------------------------------------------------------
def test_what_stands_in_invalid_rows_has_no_influence():
    reward, value, next_value, terminated, truncated = random_case(9, 4, seed=3)
    valid = torch.rand(9, 4, generator=torch.Generator().manual_seed(5)) < 0.6
    assert 0 < valid.sum() < 36
    want = masked_gae(reward, value, next_value, terminated, truncated, valid, 0.97, 0.9)
    for garbage in (NAN, float("inf"), -1e30):
        spoiled = [torch.where(valid, x, torch.full_like(x, garbage)) for x in (reward, value, next_value)]
        flipped = [torch.where(valid, x, ~x) for x in (terminated, truncated)]
        assert torch.equal(masked_gae(*spoiled, *flipped, valid, 0.97, 0.9), want)
    assert torch.isfinite(want).all()
    assert (want[~valid] == 0).all()


def test_nothing_crosses_an_invalid_row():
    # gamma .9, lambda .5, V = 0 but V' = 2 before the gap: t=0: 1 + 1.8; t=1 is no step; t=2: 4 stays where it is
    valid = marks(1, 0, 1)
    never = marks(0, 0, 0)
    got = masked_gae(column(1, 7, 4), column(0, 5, 0), column(2, 5, 0), never, never, valid, 0.9, 0.5)
    torch.testing.assert_close(got, column(2.8, 0, 4))


def test_all_rows_valid_is_plain_gae():
    case = random_case(9, 4)
    assert torch.equal(masked_gae(*case, torch.ones(9, 4, dtype=torch.bool), 0.97, 0.9), gae(*case, 0.97, 0.9))


def test_a_dummy_step_after_a_done_one():
    # Gymnasium's NEXT_STEP mode: the episode times out at t=0 (V(final) = 10), t=1 is the dummy, t=2 the next episode
    got = masked_gae(
        column(1, NAN, 3), column(0, 0, 0), column(10, NAN, 0), marks(0, 0, 1), marks(1, 0, 0), marks(1, 0, 1), 0.9, 0.5
    )
    torch.testing.assert_close(got, column(10, 0, 3))


# -- which value a truncated step gets --------------------------------------------------------------------------------
def test_bootstrap_rules():
    value, after, final = column(7, 1), column(3, 4), column(100, 50)
    truncated, terminated = marks(1, 0), marks(0, 0)
    for rule, first in (("final_obs", 100.0), ("pre_step_value", 7.0)):
        next_value, ended = bootstrap_values(value, after, final, terminated, truncated, rule)
        assert next_value.flatten().tolist() == [first, 4.0]
        assert ended.flatten().tolist() == [False, False]
    _, ended = bootstrap_values(value, after, final, terminated, truncated, "none")
    assert ended.flatten().tolist() == [True, False]


@pytest.mark.parametrize("rule, target", [("final_obs", 90.0), ("pre_step_value", 6.3), ("none", 0.0)])
def test_time_out_of_a_one_step_episode_adds_the_value_of_the_final_state(rule, target):
    # rsl_rl #151: H = 1, r = 0, V(s0) = 7, V(final) = 100, gamma = .9, and the next episode begins in V = 3:
    # .9 * 100 = 90; rsl_rl's own rule .9 * 7 = 6.3; without bootstrap 0. V(x) = x here.
    model = scalar_model()
    learner = PPO(model, PPOConfig(gamma=0.9, lam=0.95, bootstrap=rule, normalize_advantage="none"), 1, seed=0)
    rollout = empty_rollout(1, 1, keep_final_obs=rule == "final_obs")
    rollout.obs["policy"].copy_(torch.tensor([7.0, 3.0]).reshape(2, 1, 1))
    if rollout.final_obs is not None:
        rollout.final_obs["policy"].fill_(100.0)
    rollout.truncated.fill_(True)
    batch, _, _ = learner.make_batch(rollout, first_rows(rollout.needs_final, 1))
    torch.testing.assert_close(batch.target, torch.tensor([target]), rtol=0, atol=1e-5)
    torch.testing.assert_close(batch.advantage, torch.tensor([target - 7.0]), rtol=0, atol=1e-5)


# -- masked sums ------------------------------------------------------------------------------------------------------
def test_masked_mean_and_moments():
    x, valid = torch.tensor([1.0, NAN, 3.0, 5.0]), torch.tensor([True, False, True, True])
    mean, var = masked_moments(x, valid)  # 1 3 5: mean 3, variance (4 + 0 + 4) / 3
    assert float(masked_mean(x, valid)) == float(mean) == 3.0
    assert float(var) == pytest.approx(8 / 3)
    assert float(masked_mean(x, torch.zeros(4, dtype=torch.bool))) == 0.0


def test_explained_variance():
    valid = torch.tensor([True, True, True, False])
    target = torch.tensor([0.0, 2.0, 4.0, NAN])  # variance 8 / 3
    assert float(explained_variance(target + 5.0, target, valid)) == pytest.approx(1.0)
    assert float(explained_variance(torch.zeros(4), target, valid)) == pytest.approx(0.0)
    # off by 1, 0, -1: residual variance 2 / 3, so 1 - 1/4
    assert float(explained_variance(torch.tensor([1.0, 2.0, 3.0, 9.0]), target, valid)) == pytest.approx(0.75)
    assert torch.isnan(explained_variance(target, torch.ones(4), valid))
    # float32 cannot average 999 times 100.3 exactly: what is left is rounding
    assert torch.isnan(explained_variance(torch.randn(999), torch.full((999,), 100.3), torch.ones(999).bool()))
