import math

import pytest
import torch

from rl_stagger.envs.native.cartpole_swingup import GRAVITY_M_S2, CartpoleSwingup, accelerations


def place(env, **columns):
    env.reset()
    state = env.get_state()
    for name, values in columns.items():
        state[name] = torch.tensor(values)
    return env.set_state(state)


AT_REST = {"x_m_s": [0.0], "theta_rad_s": [0.0]}


def test_hand_worked_step_upright_at_full_force():
    env = CartpoleSwingup(1)
    place(env, x_m=[0.0], theta_rad=[0.0], **AT_REST)
    step = env.step(torch.tensor([[3.0]]))  # clipped to 1: F = 10 N
    # q = 10 / 1.1 = 9.090909; thddot = -q / (0.5 * (4/3 - 0.1 / 1.1)) = -14.634146;
    # xddot = q + 0.05 / 1.1 * 14.634146 = 9.756098. One step of 0.02 s: xdot = 0.19512195, x = 0.0039024,
    # thdot = -0.29268293, th = -0.00585366.
    expected = [0.00390244, 0.19512195, math.cos(0.00585366), -0.00585363, -0.29268293]
    torch.testing.assert_close(step.obs["policy"], torch.tensor([expected]), atol=1e-6, rtol=0)
    reward = (1 + math.cos(0.00585366)) / 2 * (1 - (0.00390244 / 2.4) ** 2)
    assert step.reward.item() == pytest.approx(reward, abs=1e-6)


def test_hanging_at_rest_stays_and_earns_nothing():
    env = CartpoleSwingup(1)
    place(env, x_m=[0.0], theta_rad=[math.pi], **AT_REST)
    for _ in range(20):
        step = env.step(torch.zeros(1, 1))
    assert step.reward.item() == pytest.approx(0.0, abs=1e-5)
    assert step.obs["policy"][0, 2].item() == pytest.approx(-1.0, abs=1e-5)


def test_leaving_the_track_terminates_without_reward():
    env = CartpoleSwingup(2)
    place(env, x_m=[2.39, -2.39], x_m_s=[1.0, 0.0], theta_rad=[0.0, 0.0], theta_rad_s=[0.0, 0.0])
    step = env.step(torch.zeros(2, 1))
    assert step.terminated.tolist() == [True, False]
    assert step.reward[0] == 0.0
    # Upright off the middle: 1 - (2.39 / 2.4)^2.
    assert step.reward[1].item() == pytest.approx(1 - (2.39 / 2.4) ** 2, abs=1e-5)
    assert step.final_obs["policy"][0, 0].item() == pytest.approx(2.41, abs=1e-4)
    assert not step.info["success"].any()


def test_energy_is_kept_without_force():
    """Lagrange's energy of cart and rod, T = (M+m) v^2 / 2 + m l v w cos + (2/3) m l^2 w^2, V = m g l cos."""
    env = CartpoleSwingup(1, track_half_m=50.0)
    place(env, x_m=[0.0], theta_rad=[1.0], **AT_REST)

    def energy(state):
        v, w, theta = state["x_m_s"], state["theta_rad_s"], state["theta_rad"]
        kinetic = 0.55 * v**2 + 0.05 * v * w * theta.cos() + (2 / 3) * 0.1 * 0.25 * w**2
        return (kinetic + 0.1 * GRAVITY_M_S2 * 0.5 * theta.cos()).item()

    start = energy(env.get_state())
    drift = 0.0
    for _ in range(400):
        env.step(torch.zeros(1, 1))
        drift = max(drift, abs(energy(env.get_state()) - start))
    assert drift < 0.12 * 2 * 0.1 * GRAVITY_M_S2 * 0.5  # 12 % of the height that the swing-up has to win


def test_accelerations_are_odd():
    theta, speed, force = torch.tensor([0.3]), torch.tensor([1.5]), torch.tensor([4.0])
    forward, backward = accelerations(theta, speed, force), accelerations(-theta, -speed, -force)
    torch.testing.assert_close(forward[0], -backward[0])
    torch.testing.assert_close(forward[1], -backward[1])


def test_success_needs_balanced_steps_in_a_row():
    env = CartpoleSwingup(2, success_steps=3)
    place(env, x_m=[0.0] * 2, x_m_s=[0.0] * 2, theta_rad=[0.0, math.pi], theta_rad_s=[0.0, 0.0])
    seen = [env.step(torch.zeros(2, 1)).info["success"].tolist() for _ in range(4)]
    assert seen == [[False, False], [False, False], [True, False], [True, False]]
    state = env.get_state()
    state["theta_rad"][0] = 1.0
    env.set_state(state)
    assert not env.step(torch.zeros(2, 1)).info["success"].any()


def test_starts_hang_in_the_middle():
    obs = CartpoleSwingup(1000, reset_noise=0.2).reset()["policy"]
    assert obs[:, 0].abs().max() <= 0.2
    assert obs[:, 0].std() > 0.05
    assert (obs[:, 2] < math.cos(math.pi - 0.2) + 1e-5).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_force_n": 0.0}, "max_force_n=0.0: .*above 0"),
        ({"track_half_m": float("nan")}, "track_half_m=nan"),
        ({"reset_noise": 3.0}, "reset_noise=3.0: .*below track_half_m"),
        ({"success_steps": 501}, "success_steps=501: between 1 and horizon_steps=500"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        CartpoleSwingup(2, **settings)
