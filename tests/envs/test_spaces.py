"""Gymnasium's spaces in the contract's words."""

import pytest
import torch

from rl_stagger.envs.base import Box, Discrete
from rl_stagger.envs.spaces import ActionMap, infos_of_step, numbers_of_infos, obs_of, obs_of_rows, obs_parts, spec_of
from rl_stagger.errors import ConfigError

np = pytest.importorskip("numpy")
spaces = pytest.importorskip("gymnasium.spaces")

ANY = spaces.Box(-np.inf, np.inf, (2,), np.float64)
RGB = spaces.Box(0, 255, (4, 6, 3), np.uint8)


def groups(space, **settings):
    return {part.group: part.shape for part in obs_parts(space, **settings)}


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (ANY, {"policy": (2,)}),
        (spaces.Box(-1, 1, ()), {"policy": (1,)}),
        (spaces.Box(-1, 1, (2, 3, 4)), {"policy": (24,)}),
        (spaces.Box(0, 255, (128,), np.uint8), {"policy": (128,)}),
        (spaces.MultiBinary(3), {"policy": (3,)}),
        (spaces.Discrete(5), {"policy": (5,)}),
        (spaces.MultiDiscrete([2, 3]), {"policy": (5,)}),
        (RGB, {"policy": (3, 4, 6)}),
        (spaces.Box(0, 255, (84, 84), np.uint8), {"policy": (1, 84, 84)}),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), {"policy": (4, 84, 84)}),
        (spaces.Box(0, 255, (84, 84, 12), np.uint8), {"policy": (12, 84, 84)}),
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]), {"policy": (2,), "policy/1": (3,)}),
        (spaces.Dict(policy=ANY, camera=RGB), {"policy": (2,), "policy/camera": (3, 4, 6)}),
        (spaces.Dict(a=ANY, b=spaces.Dict(c=ANY, d=ANY)), {"policy": (2,), "policy/b/c": (2,), "policy/b/d": (2,)}),
        (
            spaces.Dict({"policy": ANY, "critic": ANY, "policy/hand": ANY}),
            {"policy": (2,), "critic": (2,), "policy/hand": (2,)},
        ),
        (spaces.Dict(critic=spaces.Dict(height=ANY, mass=ANY), joints=ANY),
         {"critic": (2,), "critic/mass": (2,), "policy": (2,)}),
    ],
)  # fmt: skip
def test_groups_and_their_shapes(space, expected):
    assert groups(space) == expected
    spec = spec_of(obs_parts(space), Discrete(2), 5)
    assert spec.obs_shapes == expected
    assert set(spec.actor_groups) | set(spec.critic_groups) == set(expected)


def test_what_only_the_critic_sees_is_named():
    space = spaces.Dict(state=ANY, privileged_state=ANY)
    assert groups(space, critic_keys=["privileged_state"]) == {"critic": (2,), "policy": (2,)}
    with pytest.raises(ConfigError, match="did you mean 'privileged_state'"):
        obs_parts(space, ["privileged"])
    with pytest.raises(ConfigError, match="the actor needs"):
        obs_parts(spaces.Dict(critic=ANY))


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(ANY), spaces.Dict(a=ANY, b=spaces.Text(5))])
def test_observations_that_are_no_arrays_are_refused(space):
    with pytest.raises(ConfigError, match="observation space"):
        obs_parts(space)


@pytest.mark.parametrize(("shape", "seen"), [((4, 5, 3), (3, 4, 5)), ((5, 2, 1), (1, 5, 2)), ((1, 4, 5), (1, 4, 5))])
def test_a_pixel_is_where_it_was(shape, seen):
    batch = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    image = obs_of(batch, obs_parts(spaces.Box(0, 255, shape, np.uint8)))["policy"]
    assert image.dtype == torch.uint8
    assert tuple(image.shape) == (2, *seen)
    channels_last = shape[2] <= shape[0]
    for n, row, column, channel in [(0, 0, 0, 0), (1, 1, 1, 0), (1, 1, 0, seen[0] - 1)]:
        there = batch[n, row, column, channel] if channels_last else batch[n, channel, row, column]
        assert image[n, channel, row, column] == there


def test_one_hot_counts_from_the_spaces_start():
    one = obs_parts(spaces.Discrete(3, start=-1))
    assert obs_of(np.array([-1, 1]), one)["policy"].tolist() == [[1, 0, 0], [0, 0, 1]]
    two = obs_parts(spaces.MultiDiscrete([2, 3]))
    assert obs_of(np.array([[1, 0], [0, 2]]), two)["policy"].tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    "space",
    [
        ANY,
        spaces.Box(-1, 1, (3,), np.float32),
        RGB,
        spaces.Box(0, 255, (5, 2, 1), np.uint8),
        spaces.Box(0, 255, (2, 5), np.uint8),
        spaces.Discrete(3),
    ],
)
def test_what_a_simulator_writes_again_is_copied(space):
    space.seed(0)
    batch = np.stack([np.asarray(space.sample()) for _ in range(4)])
    found = obs_of(batch, obs_parts(space))["policy"]
    kept = found.clone()
    batch[...] = 0 if batch.any() else 1
    assert torch.equal(found, kept)
    frozen = np.ones_like(batch)
    frozen.flags.writeable = False
    obs_of(frozen, obs_parts(space))  # torch warns of read-only arrays, and warnings are errors here


def test_rows_become_a_batch():
    space = spaces.Dict(a=ANY, n=spaces.Discrete(2))
    rows = [{"a": np.array([1.0, 2.0]), "n": 1}, {"a": np.array([3.0, 4.0]), "n": 0}]
    obs = obs_of_rows(rows, obs_parts(space))
    assert obs["policy"].tolist() == [[1, 2], [3, 4]]
    assert obs["policy/n"].tolist() == [[0, 1], [1, 0]]


# -- actions ----------------------------------------------------------------------------------------------------------
def test_a_box_of_actions_is_clipped_and_may_be_rescaled():
    space = spaces.Box(np.array([0.0, -2.0]), np.array([1.0, 2.0]), dtype=np.float64)
    plain, scaled = ActionMap(space), ActionMap(space, rescale=True)
    assert plain.spec == Box(2, [0.0, -2.0], [1.0, 2.0])
    assert scaled.spec == Box(2, -1.0, 1.0)
    assert plain.array(torch.tensor([[-1.0, 3.0], [0.5, 1.5]])).tolist() == [[0.0, 2.0], [0.5, 1.5]]
    # low + (a + 1) / 2 * (high - low)
    assert scaled.array(torch.tensor([[-1.0, 1.0], [0.0, 0.5], [9.0, -9.0]])).tolist() == [[0, 2], [0.5, 1], [1, -2]]
    assert plain.array(torch.zeros(3, 2)).dtype == np.float64


def test_an_unbounded_box_is_left_as_it_is():
    low, high = np.array([-np.inf, 0.0], np.float32), np.array([np.inf, 1.0], np.float32)
    space = spaces.Box(low, high)
    mapped = ActionMap(space, rescale=True)
    assert mapped.spec == Box(2, [-float("inf"), 0.0], [float("inf"), 1.0])
    assert mapped.array(torch.tensor([[-50.0, -50.0]])).tolist() == [[-50.0, 0.0]]


def test_choices_begin_where_the_space_begins_and_shapes_are_the_spaces():
    assert ActionMap(spaces.Discrete(3, start=2)).array(torch.tensor([0, 2])).tolist() == [2, 4]
    matrix = ActionMap(spaces.Box(-1, 1, (2, 3), np.float32))
    assert matrix.spec == Box(6, -1.0, 1.0)
    assert matrix.array(torch.zeros(4, 6)).shape == (4, 2, 3)


def test_the_callers_action_is_not_shared():
    for mapped, action in ((ActionMap(spaces.Discrete(3)), torch.tensor([1, 1])),
                           (ActionMap(spaces.Box(-1, 1, (1,), np.float32)), torch.ones(2, 1))):  # fmt: skip
        array = mapped.array(action)
        array[...] = 0
        assert bool(action.eq(1).all())


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.Discrete(1),
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Dict(arm=spaces.Box(-1, 1, (2,))),
        spaces.MultiBinary(2),
    ],
)
def test_other_actions_are_refused(space):
    with pytest.raises(ConfigError, match="action space"):
        ActionMap(space)


# -- infos ------------------------------------------------------------------------------------------------------------
def test_numbers_of_infos_are_nan_where_nothing_was_said():
    info = {
        "speed": np.array([1.5, 0.0, np.inf]),
        "_speed": np.array([True, False, True]),
        "count": np.array([1, 2, 3], dtype=np.int32),
        "is_success": np.array([True, False, True]),
        "position": np.zeros((3, 2)),
        "final_obs": np.array([None, None, None], dtype=object),
        "name": ["a", "b", "c"],
    }
    found = numbers_of_infos(info, 3)
    assert set(found) == {"speed", "count"}
    assert found["speed"][0] == 1.5
    assert found["speed"].isnan().tolist() == [False, True, True]
    assert found["count"].tolist() == [1.0, 2.0, 3.0]


def test_infos_of_the_last_step_come_before_those_of_the_reset():
    yes_no = np.array([True, False, False])
    info = {
        "speed": np.array([0.0, 2.0, 3.0]),
        "_speed": np.array([False, True, True]),
        "seed": np.array([4, 0, 0]),
        "_seed": yes_no,
        "final_info": {
            "speed": np.array([1.0, 0.0, 0.0]),
            "_speed": yes_no,
            "hit": np.array([5, 0, 0]),
            "_hit": yes_no,
        },
        "_final_info": yes_no,
    }
    found = numbers_of_infos(infos_of_step(info, 3), 3)
    assert found["speed"].tolist() == [1.0, 2.0, 3.0]
    assert found["hit"].isnan().tolist() == [False, True, True]
    assert set(found) == {"speed", "seed", "hit"}
    assert infos_of_step({"speed": info["speed"]}, 3).keys() == {"speed"}
