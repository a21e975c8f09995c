"""A Gymnasium environment whose every number can be worked out by hand."""

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """Observation [2]: steps since the episode's start, and the environment's index. Reward: the step just taken, from
    1. Terminates after `length` steps (0: never)."""

    def __init__(self, index=0, length=0):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.index, self.length, self.count = index, length, 0
        self.render_mode = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        return self._obs(), float(self.count), self.count == self.length, False, {}

    def _obs(self):
        return np.array([self.count, self.index], dtype=np.float32)


def counter_fns(num_envs, horizon_steps, lengths=()):
    """Functions that make `num_envs` Counters under a TimeLimit, as vector environments take them."""
    lengths = list(lengths) or [0] * num_envs

    def make(i):
        return lambda: gym.wrappers.TimeLimit(Counter(i, lengths[i]), horizon_steps)

    return [make(i) for i in range(num_envs)]
