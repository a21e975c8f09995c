"""Pictures of the native tasks: shapes where they should be, and the pictures follow the state."""

import math

import pytest
import torch

from rl_stagger.envs.base import Capability
from rl_stagger.envs.native.render import COLOURS, Canvas
from rl_stagger.envs.registry import make_env, native_task_names

DRAWN = [name for name in native_task_names() if name != "legged_bench"]


def at(picture, row, column):
    """The colour's name at a pixel."""
    return {colour: name for name, colour in COLOURS.items()}[tuple(picture[row, column].tolist())]


# -- shapes ---------------------------------------------------------------------------------------------------------
def test_a_canvas_in_pixels():
    # 4 x 2 units at 10 pixels: 20 rows, 40 columns. The point (1, 0.5) is column 20 + 10, row 10 - 5.
    canvas = Canvas((-2.0, -1.0), (2.0, 1.0), 10.0)
    canvas.box((-2.0, -1.0), (0.0, 0.0), "goal")
    canvas.disc((1.0, 0.5), 0.3, "moving")
    canvas.stroke((-1.5, 0.5), (-0.5, 0.5), 0.2, "mark")
    picture = canvas.picture()
    assert (tuple(picture.shape), picture.dtype) == ((20, 40, 3), torch.uint8)
    assert {(r, c) for r in range(20) for c in range(40) if at_or_none(picture, r, c) == "goal"} == {
        (r, c) for r in range(10, 20) for c in range(20)
    }
    assert at(picture, 5, 30) == at(picture, 5, 28) == at(picture, 3, 30) == "moving"
    assert at(picture, 5, 26) == at(picture, 1, 30) == "paper"
    assert [at(picture, 5, c) for c in (3, 5, 14, 16)] == ["paper", "mark", "mark", "paper"]
    assert [at(picture, r, 10) for r in (3, 4, 5, 6)] == ["paper", "mark", "mark", "paper"]


def at_or_none(picture, row, column):
    return {colour: name for name, colour in COLOURS.items()}.get(tuple(picture[row, column].tolist()))


def test_edges_are_even_and_what_is_outside_is_cut_off():
    canvas = Canvas((0.0, 0.0), (1.5, 0.7), 10.0)
    canvas.disc((50.0, 50.0), 1.0, "mark")
    canvas.stroke((0.2, 0.2), (0.2, 0.2), 0.1, "body")
    picture = canvas.picture()
    assert picture.shape[0] % 2 == picture.shape[1] % 2 == 0
    assert not (picture == torch.tensor(COLOURS["mark"])).all(-1).any()


def test_an_edge_is_half_covered():
    canvas = Canvas((0.0, 0.0), (4.0, 2.0), 1.0)
    canvas.box((0.0, -1.0), (1.5, 3.0), "moving")  # ends in the middle of the second pixel
    middle = [round((a + b) / 2) for a, b in zip(COLOURS["paper"], COLOURS["moving"])]
    assert (canvas.picture()[0, 1] - torch.tensor(middle)).abs().max() <= 1


# -- tasks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", native_task_names())
def test_who_can_be_drawn_says_so(task):
    env = make_env(task, 3)
    assert (Capability.RENDER in env.capabilities) == (task in DRAWN)


@pytest.mark.parametrize("task", DRAWN)
def test_a_picture_is_of_the_environment_asked_for_and_touches_nothing(task):
    env = make_env(task, 3, seed=1)
    env.reset()
    other = {name: x.clone() for name, x in env.get_state().items()}
    moved = {"x_m": 1.0, "theta_rad": 1.0, "position_m": 0.3, "stage": 2, "room": 1}
    name = next(name for name in moved if name in other)
    other[name][1] = moved[name]
    before = [env.render(i) for i in range(3)]
    env.set_state(other)
    after = [env.render(i) for i in range(3)]
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, False, True]
    for picture in after:
        assert (picture.dtype, picture.device.type, picture.shape[2]) == (torch.uint8, "cpu", 3)
        assert picture.shape[0] % 2 == picture.shape[1] % 2 == 0
    assert all(torch.equal(x, other[name]) for name, x in env.get_state().items())


def with_state(task, **state):
    env = make_env(task, 1)
    env.reset()
    full = env.get_state()
    for name, value in state.items():
        full[name] = torch.as_tensor(value, dtype=full[name].dtype).reshape(full[name].shape)
    env.set_state(full)
    return env.render(0)


def test_the_pole_hangs_and_stands():
    # The track is 5.4 m wide: x = 1 m is column 370; the axle's row is 130, the pole 1 m = 100 pixels long
    upright = with_state("cartpole_swingup", x_m=1.0, theta_rad=0.0)
    assert (at(upright, 40, 370), at(upright, 220, 370), at(upright, 135, 355)) == ("moving", "paper", "body")
    hanging = with_state("cartpole_swingup", x_m=-1.0, theta_rad=math.pi)
    assert (at(hanging, 220, 170), at(hanging, 40, 170)) == ("moving", "paper")
    right = with_state("cartpole_swingup", x_m=0.0, theta_rad=math.pi / 2)
    assert at(right, 130, 350) == "moving"


def test_the_pendulum_turns_to_the_left():
    # 240 x 240 pixels, the axle in the middle
    assert at(with_state("pendulum", theta_rad=0.0), 40, 120) == "moving"
    assert at(with_state("pendulum", theta_rad=math.pi / 2), 120, 40) == "moving"


def test_the_arena():
    # 264 x 264 pixels, 120 a metre; (0.5, -0.5) is column 192, row 192
    picture = with_state("point_reach", position_m=[[0.5, -0.5]], goal_m=[[-0.5, 0.5]])
    assert (at(picture, 192, 192), at(picture, 72, 72), at(picture, 132, 132)) == ("moving", "goal", "paper")
    assert at(picture, 2, 132) == "body"


def test_the_chain():
    # 20 stages of 25 pixels from column 10; of 5 good steps 2 are done: 200 of the 500 pixels below
    picture = with_state("skill_chain", stage=3, good_steps=2)
    assert [at(picture, 35, 10 + 25 * s + 12) for s in (0, 2, 3, 4, 19)] == ["done", "done", "moving", "line", "line"]
    assert [at(picture, 75, c) for c in (15, 205, 215)] == ["done", "done", "line"]
