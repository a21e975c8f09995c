import math

import pytest
import torch

from rl_stagger.envs.native.pendulum import Pendulum, wrap_angle_rad


def place(env, theta, speed):
    env.reset()
    state = env.get_state()
    state["theta_rad"], state["theta_rad_s"] = torch.tensor(theta), torch.tensor(speed)
    return env.set_state(state)


def test_hand_worked_steps():
    env = Pendulum(3)
    place(env, [math.pi / 2, 0.0, math.pi], [1.0, 0.0, 7.9])
    step = env.step(torch.tensor([[1.0], [5.0], [2.0]]))
    # Row 0: u = 1, thdot' = 1 + (15 * sin(pi/2) + 3 * 1) * 0.05 = 1.9, th' = pi/2 + 1.9 * 0.05;
    #        reward = -((pi/2)^2 + 0.1 * 1 + 0.001 * 1).
    # Row 1: u = 5 is clipped to 2: thdot' = 3 * 2 * 0.05 = 0.3, th' = 0.015, reward = -0.001 * 4.
    # Row 2: thdot' = 7.9 + (0 + 6) * 0.05 = 8.2, clipped to 8; th' = pi + 0.4; reward = -(pi^2 + 6.241 + 0.004).
    theta = torch.tensor([math.pi / 2 + 0.095, 0.015, math.pi + 0.4])
    expected = torch.stack([theta.cos(), theta.sin(), torch.tensor([1.9, 0.3, 8.0])], dim=1)
    torch.testing.assert_close(step.obs["policy"], expected, atol=1e-5, rtol=0)
    reward = [-(math.pi**2 / 4 + 0.101), -0.004, -(math.pi**2 + 6.245)]
    torch.testing.assert_close(step.reward, torch.tensor(reward), atol=1e-5, rtol=0)
    assert step.info["log"]["upright"].tolist() == [0.0, 1.0, 0.0]
    assert not step.terminated.any()


def test_the_reward_sees_the_wrapped_angle():
    env = Pendulum(1)
    place(env, [math.pi - 0.1], [4.0])  # th' = pi - 0.1 + about 0.2, which is about -pi + 0.1
    env.step(torch.zeros(1, 1))
    theta = env.get_state()["theta_rad"]
    assert -math.pi <= theta.item() < -math.pi + 0.3
    assert env.step(torch.zeros(1, 1)).reward.item() > -(math.pi**2) - 0.1 * 64


def test_wrap_angle():
    angles = torch.tensor([0.0, 3.0, math.pi + 1, -math.pi - 1, 7 * math.pi + 0.5])
    expected = torch.tensor([0.0, 3.0, 1 - math.pi, math.pi - 1, 0.5 - math.pi])
    torch.testing.assert_close(wrap_angle_rad(angles), expected, atol=1e-5, rtol=0)


def test_starts_fill_the_circle():
    obs = Pendulum(4096).reset()["policy"]
    theta = torch.atan2(obs[:, 1], obs[:, 0])
    assert theta.min() < -3.1
    assert theta.max() > 3.1
    assert theta.mean().abs() < 0.15
    assert obs[:, 2].min() >= -1
    assert obs[:, 2].max() <= 1
    assert obs[:, 2].std() > 0.5


def test_a_bad_gravity_is_named():
    with pytest.raises(ValueError, match="gravity_m_s2=-1"):
        Pendulum(2, gravity_m_s2=-1.0)
