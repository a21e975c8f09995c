import pytest
import torch

from rl_stagger.envs.native.point_reach import PointReach


def place(env, position, velocity, goal):
    env.reset()
    state = env.get_state()
    state.update(position_m=torch.tensor(position), velocity_m_s=torch.tensor(velocity), goal_m=torch.tensor(goal))
    return env.set_state(state)


def test_hand_worked_step():
    env = PointReach(1)
    place(env, [[0.0, 0.5]], [[1.0, 0.0]], [[0.5, 0.5]])
    step = env.step(torch.tensor([[-3.0, 0.5]]))  # clipped to (-1, 0.5)
    # v' = (1 + (2 * -1 - 1) * 0.05, 0 + (2 * 0.5 - 0) * 0.05) = (0.85, 0.05); p' = (0.0425, 0.5025);
    # goal - p' = (0.4575, -0.0025), whose length is 0.4575068.
    expected = [0.0425, 0.5025, 0.85, 0.05, 0.4575, -0.0025]
    torch.testing.assert_close(step.obs["policy"], torch.tensor([expected]), atol=1e-6, rtol=0)
    assert step.reward.item() == pytest.approx(-0.4575068, abs=1e-6)
    assert step.info["log"]["distance_m"].item() == pytest.approx(0.4575068, abs=1e-6)


def test_a_wall_stops_one_component():
    env = PointReach(1)
    place(env, [[0.99, 0.0]], [[1.0, 1.0]], [[0.0, 0.0]])
    obs = env.step(torch.zeros(1, 2)).obs["policy"]
    # v' = 0.95 each; x' = 0.99 + 0.0475 > 1 is clipped and loses its speed; y' = 0.0475 keeps its own.
    torch.testing.assert_close(obs[0, :4], torch.tensor([1.0, 0.0475, 0.0, 0.95]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("terminate", [False, True])
def test_success_within_the_radius(terminate):
    env = PointReach(2, terminate_on_success=terminate)
    place(env, [[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.099, 0.0], [0.101, 0.0]])
    step = env.step(torch.zeros(2, 2))
    assert step.info["success"].tolist() == [True, False]
    assert step.terminated.tolist() == [terminate, False]
    assert env.elapsed_steps.tolist() == [0 if terminate else 1, 1]


def test_success_is_read_at_the_last_step_not_on_the_way():
    env = PointReach(1, horizon_steps=3)
    place(env, [[0.0, 0.0]], [[3.0, 0.0]], [[0.1425, 0.0]])
    steps = [env.step(torch.zeros(1, 2)) for _ in range(3)]
    assert [s.info["success"].item() for s in steps] == [True, False, False]  # x = 0.14, 0.28, 0.41
    assert [s.truncated.item() for s in steps] == [False, False, True]


def test_starts_and_goals_fill_the_arena():
    obs = PointReach(2048).reset()["policy"]
    goal = obs[:, :2] + obs[:, 4:]
    for points in (obs[:, :2], goal):
        assert points.abs().max() <= 1.0
        assert (points.abs().amax(dim=0) > 0.95).all()
    assert (obs[:, 2:4] == 0).all()


def test_a_bad_radius_is_named():
    with pytest.raises(ValueError, match=r"goal_radius_m=0.0: above 0"):
        PointReach(2, goal_radius_m=0.0)
