import pytest
import torch

from rl_stagger.envs.native.legged_bench import LeggedBench


def test_hand_worked_step():
    env = LeggedBench(2, termination_probability=0.0)
    env.reset()
    state = env.get_state()
    state["x"] = torch.full_like(state["x"], 0.5)
    env.set_state(state)
    env.gains = torch.full_like(env.gains, 0.01)
    action = torch.stack([torch.zeros(12), torch.ones(12)])
    step = env.step(action)
    # x' = tanh(0.9 * 0.5 + 12 * 0.01 * a): tanh(0.45) at a = 0, tanh(0.57) at a = 1.
    expected = torch.tanh(torch.tensor([0.45, 0.57]))
    torch.testing.assert_close(step.obs["policy"], expected.unsqueeze(1).expand(2, 48))
    torch.testing.assert_close(step.reward, expected)
    assert not step.terminated.any()


@pytest.mark.parametrize("probability", [0.0, 0.02, 1.0])
def test_terminations_come_at_their_rate(probability):
    env = LeggedBench(2000, termination_probability=probability)
    env.reset()
    ended = torch.stack([env.step(torch.zeros(2000, 12)).terminated for _ in range(10)]).float().mean().item()
    assert ended == pytest.approx(probability, abs=0.005)  # standard error 0.001 at 0.02


def test_a_reset_returns_to_the_bank_and_draws_nothing():
    env = LeggedBench(4)
    first = env.reset()["policy"]
    for _ in range(3):
        env.step(torch.ones(4, 12))
    generator = env.generator.get_state()
    assert torch.equal(env.reset()["policy"], first)
    assert torch.equal(env.generator.get_state(), generator)
    assert not torch.equal(first[0], first[1])


def test_the_critic_group_holds_the_policy_group():
    env, plain = LeggedBench(3, critic_obs=True), LeggedBench(3)
    assert env.spec.obs_shapes == {"policy": (48,), "critic": (60,)}
    env.reset(), plain.reset()
    action = torch.randn(3, 12)
    step, plain_step = env.step(action), plain.step(action)
    assert step.obs["critic"].shape == (3, 60)
    assert torch.equal(step.obs["critic"][:, :48], step.obs["policy"])
    torch.testing.assert_close(step.obs["policy"], plain_step.obs["policy"])
    assert torch.equal(step.terminated, plain_step.terminated)


def test_a_bad_probability_is_named():
    with pytest.raises(ValueError, match=r"termination_probability=1.5: .*between 0 and 1"):
        LeggedBench(2, termination_probability=1.5)
