import pytest
import torch

from rl_stagger.envs.base import Capability
from rl_stagger.envs.native.stage_gridworld import (
    COLOURS,
    DOWN,
    LEFT,
    PIXELS_PER_CELL,
    RIGHT,
    UP,
    StageGridworld,
    draw_layout,
)


def known(num_envs=1, **settings):
    """Two rooms of 3 x 3: start (1, 0), key (0, 1), door in row 2, goal (0, 2) of the second room."""
    env = StageGridworld(num_envs, num_rooms=2, room_size=3, **settings)
    env.entrances[:] = torch.tensor([[1, 0], [2, 0]])
    env.keys[:] = torch.tensor([[0, 1], [-1, -1]])
    env.exits[:] = torch.tensor([[2, 2], [0, 2]])
    env.reset()
    return env


def play(env, actions):
    return [env.step(torch.full((env.num_envs,), action)) for action in actions]


def where(env):
    state = env.get_state()
    return state["room"][0].item(), state["cell"][0].tolist(), state["has_key"][0].item()


SOLUTION = [UP, RIGHT, DOWN, DOWN, RIGHT, RIGHT, RIGHT, UP, RIGHT, UP]


def test_the_whole_way_by_hand():
    env = known()
    steps = play(env, SOLUTION)
    # Key at the 2nd step, door at the 6th, goal at the 10th: 0.1, 0.2, 1.0.
    assert [round(s.reward.item(), 6) for s in steps] == [0, 0.1, 0, 0, 0, 0.2, 0, 0, 0, 1.0]
    assert [s.terminated.item() for s in steps] == [False] * 9 + [True]
    assert [s.info["success"].item() for s in steps] == [False] * 9 + [True]
    assert [s.info["log"]["room"].item() for s in steps] == [0.0] * 5 + [1.0] * 5
    assert not any(s.truncated.item() for s in steps)
    assert where(env) == (0, [1, 0], False)


def test_without_the_key_the_door_stays_shut():
    env = known()
    steps = play(env, [DOWN, RIGHT, RIGHT, RIGHT])
    assert where(env) == (0, [2, 2], False)
    assert all(s.reward.item() == 0 for s in steps)


def test_the_door_is_passed_only_to_the_right_and_only_in_its_row():
    env = known()
    play(env, [UP, RIGHT, RIGHT, RIGHT])  # with the key at (0, 2), one row off
    assert where(env) == (0, [0, 2], True)
    play(env, [DOWN, DOWN, DOWN])
    assert where(env) == (0, [2, 2], True)
    play(env, [RIGHT])
    assert where(env) == (1, [2, 0], False)
    play(env, [LEFT])  # fell shut
    assert where(env) == (1, [2, 0], False)


def test_a_key_is_paid_once():
    rewards = [s.reward.item() for s in play(known(), [UP, RIGHT, LEFT, RIGHT])]
    assert rewards == pytest.approx([0, 0.1, 0, 0])


def test_walls_hold():
    env = known()
    play(env, [LEFT, DOWN, DOWN, DOWN, LEFT])
    assert where(env) == (0, [2, 0], False)


def test_observation_by_hand():
    env = known()
    env.room_features[:, 2:] = torch.tensor([[0, 0.5, 1, 1], [-1, -1, 0, 1]])
    obs = play(env, [UP, RIGHT])[-1].obs["policy"]
    #            row 0    | col 1    | room 0 | key (0, 1) | exit (2, 2) | held
    expected = [1, 0, 0, 0, 1, 0, 1, 0, 0, 0.5, 1, 1, 1]
    assert obs.tolist() == [expected]


def test_room_features_follow_the_layout():
    env = StageGridworld(1, num_rooms=3, room_size=5, layout_seed=4)
    assert torch.equal(env.room_features[:, :3], torch.eye(3))
    torch.testing.assert_close(env.room_features[:, 5:], env.exits / 4.0)
    torch.testing.assert_close(env.room_features[:2, 3:5], env.keys[:2] / 4.0)
    assert env.room_features[2, 3:5].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("layout_seed", range(20))
@pytest.mark.parametrize("room_size", [2, 5])
def test_layouts_can_be_solved_and_fit_together(room_size, layout_seed):
    entrances, keys, exits = draw_layout(4, room_size, layout_seed)
    assert torch.equal(entrances[1:, 0], exits[:-1, 0])
    assert (entrances[:, 1] == 0).all()
    assert (exits[:-1, 1] == room_size - 1).all()
    for cells in (keys[:-1], exits, entrances):
        assert (cells >= 0).all()
        assert (cells < room_size).all()
    assert (keys != entrances).any(dim=1).all()
    assert (exits[-1] != entrances[-1]).any()
    env = StageGridworld(1, num_rooms=4, room_size=room_size, layout_seed=layout_seed)
    env.reset()
    steps = play(env, solution(entrances, keys, exits))
    assert len(steps) == env.shortest_steps
    assert steps[-1].info["success"].item()
    assert not any(s.info["success"].item() for s in steps[:-1])


def solution(entrances, keys, exits):
    """Straight to each key and exit; a goal or door cell on the way does no harm before its time."""
    actions = []
    for room in range(len(keys)):
        stops = [keys[room], exits[room]] if room < len(keys) - 1 else [exits[room]]
        at = entrances[room]
        for stop in stops:
            rows, columns = (stop - at).tolist()
            actions += [DOWN if rows > 0 else UP] * abs(rows) + [RIGHT if columns > 0 else LEFT] * abs(columns)
            at = stop
        actions += [RIGHT] if room < len(keys) - 1 else []
    return actions


def test_reset_noise_begins_in_random_rooms():
    env = StageGridworld(4000, reset_noise=0.5)
    env.reset()
    state = env.get_state()
    # A quarter of the noisy half falls on room 0: 0.5 + 0.125, the other rooms 0.125 each.
    shares = torch.bincount(state["room"], minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.125, 0.125, 0.125]), atol=0.03, rtol=0)
    assert torch.equal(state["cell"], env.entrances[state["room"]])
    quiet = StageGridworld(100)
    quiet.reset()
    assert (quiet.get_state()["room"] == 0).all()


def test_the_layout_is_the_same_whatever_the_seed():
    one, two = StageGridworld(1, seed=1, layout_seed=3), StageGridworld(1, seed=2, layout_seed=3)
    assert torch.equal(one.keys, two.keys)
    assert torch.equal(one.exits, two.exits)
    assert not torch.equal(one.keys, StageGridworld(1, seed=1, layout_seed=5).keys)


def cell_colour(picture, row, column):
    block = picture[
        row * PIXELS_PER_CELL : (row + 1) * PIXELS_PER_CELL, column * PIXELS_PER_CELL : (column + 1) * PIXELS_PER_CELL
    ]
    assert (block == block[0, 0]).all()
    return {tuple(c): name for name, c in COLOURS.items()}[tuple(block[0, 0].tolist())]


def test_render():
    env = known(num_envs=2)
    assert Capability.RENDER in env.capabilities
    picture = env.render(1)
    # 5 x 9 cells: room 0 in columns 1 to 3, its right wall in 4, room 1 in 5 to 7; rows from 1.
    assert picture.shape == (5 * PIXELS_PER_CELL, 9 * PIXELS_PER_CELL, 3)
    assert picture.dtype == torch.uint8
    assert picture.device.type == "cpu"
    grid = [[cell_colour(picture, row, column) for column in range(9)] for row in range(5)]
    w, f = "wall", "floor"
    assert grid == [
        [w] * 9,
        [w, f, "key", f, w, f, f, "goal", w],
        [w, "agent", f, f, w, f, f, f, w],
        [w, f, f, f, "locked_door", f, f, f, w],
        [w] * 9,
    ]
    play(env, SOLUTION[:2])
    picture = env.render(1)
    assert cell_colour(picture, 1, 2) == "agent"
    assert cell_colour(picture, 3, 4) == "open_door"
    play(env, SOLUTION[2:6])
    picture = env.render(0)
    assert cell_colour(picture, 3, 5) == "agent"
    assert cell_colour(picture, 1, 2) == "floor"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_rooms": 0}, "num_rooms=0: at least 1"),
        ({"room_size": 1}, "room_size=1: at least 2"),
        ({"reset_noise": 1.5}, "reset_noise=1.5: a share between 0 and 1"),
        ({"key_reward": float("inf")}, "key_reward=inf: a finite number"),
        ({"horizon_steps": 5}, "horizon_steps=5: at least .*shortest"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        StageGridworld(2, **settings)
