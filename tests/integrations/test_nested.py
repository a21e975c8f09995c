"""Nested observations and action spaces, and what is looked up in a host's environment; gymnasium's spaces only."""

import numpy as np
import pytest
import torch

from rl_stagger.envs.base import Box, Discrete
from rl_stagger.errors import ConfigError
from rl_stagger.integrations.lookup import by_index, clock_of, horizon_of, wrappers_of
from rl_stagger.integrations.nested import Layout, sample_boxes, spec_of

spaces = pytest.importorskip("gymnasium").spaces
pytestmark = pytest.mark.integrations


def test_a_nest_comes_back_as_it_was():
    obs = {"obs": {"a": torch.ones(2, 3, dtype=torch.float64), "b": torch.full((2, 1), 255, dtype=torch.uint8)}}
    obs["states"] = torch.tensor([[2**40], [1]])
    layout = Layout(obs, {"obs": "policy", "states": "critic"})
    flat = layout.tensors(obs)
    assert list(flat) == ["policy", "policy.b", "critic"]  # without a group "policy", the first leaf is called so
    assert [x.dtype for x in flat.values()] == [torch.float64, torch.float32, torch.float64]
    back = layout.host(flat)
    assert back["obs"]["b"].dtype == torch.uint8
    assert back["states"].equal(obs["states"])
    assert back["obs"]["a"].equal(obs["obs"]["a"])
    obs["obs"]["a"].zero_()
    assert flat["policy"].sum() == 6


def test_arrays_come_back_as_arrays():
    layout = Layout(np.ones((2, 3), np.float32))
    back = layout.host(layout.tensors(np.full((2, 3), 7, np.float32)))
    assert isinstance(back, np.ndarray)
    assert back.tolist() == [[7] * 3] * 2


@pytest.mark.parametrize("obs", [{}, {"a": [1, 2]}])
def test_what_is_no_observation_is_refused(obs):
    with pytest.raises(ConfigError):
        Layout(obs)


def test_action_spaces():
    obs = {"policy": torch.zeros(2, 3)}
    bounded = spec_of(obs, spaces.Box(-2.0, 3.0, (2,), np.float32), 5)
    assert (bounded.action, bounded.horizon_steps, bounded.obs_shapes) == (
        Box(2, [-2.0, -2.0], [3.0, 3.0]),
        5,
        {"policy": (3,)},
    )
    assert spec_of(obs, spaces.Box(-np.inf, np.inf, (2,), np.float32), 5).action == Box(2)
    assert spec_of(obs, spaces.Box(0.0, np.inf, (2,), np.float32), 5).action == Box(2, [0.0, 0.0], None)
    assert spec_of(obs, spaces.Discrete(4), 5).action == Discrete(4)
    two = spaces.Dict({"l": spaces.Box(-1, 1, (2,)), "r": spaces.Box(-1, 1, (3,))})
    assert spec_of(obs, two, 5).action == Box(5)


def test_random_actions_are_within_bounds_and_repeat():
    space = spaces.Box(np.array([-2, 0, -np.inf], np.float32), np.array([-1, np.inf, np.inf], np.float32))
    draw = [sample_boxes(space, 1000, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert draw[0].equal(draw[1])
    low, half, free = draw[0].unbind(1)
    assert (low >= -2).all()
    assert (low <= -1).all()
    assert low.mean().item() == pytest.approx(-1.5, abs=0.05)
    assert (half >= 0).all()
    assert half.isfinite().all()
    assert free.std().item() == pytest.approx(1.0, abs=0.1)
    with pytest.raises(ConfigError, match="actor"):
        sample_boxes(spaces.Discrete(3), 2, torch.Generator())


class Wrap:
    """Passes on names that it lacks, as skrl's wrappers do."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self.__dict__["_env"], name)


class Inner:
    def __init__(self):
        self.episode_length_buf, self.max_episode_length = torch.zeros(3), 7


class Limit:
    def __init__(self, env):
        self.env, self.max_episode_steps = env, 5

    @property
    def unwrapped(self):
        return self.env


def test_what_is_inside_is_found_from_the_outside_in():
    inner = Inner()
    chain = wrappers_of(Wrap(Limit(inner)))
    assert [type(env) for env in chain] == [Wrap, Limit, Inner]
    assert chain[-1] is inner
    assert horizon_of(chain[1:]) == 5
    assert horizon_of([inner]) == 7
    assert horizon_of([object()]) is None
    assert clock_of(chain, 3) is inner.episode_length_buf
    assert clock_of(chain, 4) is None


def test_nobody_is_not_reset():
    asked = []
    assert by_index(torch.tensor([False, False]), asked.append) is None
    by_index(torch.tensor([False, True]), asked.append)
    assert [ids.tolist() for ids in asked] == [[1]]
