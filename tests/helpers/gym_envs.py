"""Gymnasium environments for the adapter's tests, registered under the name space `rl_stagger_test`."""

import gymnasium as gym
import numpy as np
from helpers.gym_counter import Counter, counter_fns

__all__ = ["ID", "Camera", "Counter", "counter_fns", "register"]

ID = "rl_stagger_test/Camera-v0"


class Camera(gym.Env):
    """Dict observation: the episode's step ("joints", twice), a picture [4, 6, 3] of it and a drawn "mass" in [0, 1).
    The heavy (0.5 and more) fail at step 7 and count as success, the light at step 5; infos say "speed" and
    "is_success". `reuse`: the arrays are the same ones at every step, as with some simulators."""

    def __init__(self, render_mode=None, gain=1.0, reuse=True):
        self.metadata = {"render_modes": ["rgb_array"]}
        self.observation_space = gym.spaces.Dict(
            camera=gym.spaces.Box(0, 255, (4, 6, 3), np.uint8),
            joints=gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
            mass=gym.spaces.Box(-np.inf, np.inf, (1,), np.float32),
        )
        self.action_space = gym.spaces.Discrete(3, start=5)
        self.render_mode, self.gain, self.reuse, self.count = render_mode, gain, reuse, 0
        self._seen = {"camera": np.zeros((4, 6, 3), np.uint8), "joints": np.zeros(2), "mass": np.zeros(1, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self._seen["mass"][0] = self.np_random.random()
        return self._look(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.count += 1
        heavy = bool(self._seen["mass"][0] >= 0.5)
        info = {"speed": self.gain * self.count, "is_success": heavy}
        return self._look(), float(action), self.count == (7 if heavy else 5), False, info

    def render(self):
        return np.full((8, 10, 3), self.count, dtype=np.uint8)

    def _look(self):
        self._seen["joints"][:] = self.count
        self._seen["camera"][...] = 0
        self._seen["camera"][0, self.count % 6] = (self.count, 20, 30)
        return self._seen if self.reuse else {name: x.copy() for name, x in self._seen.items()}


def register():
    if ID not in gym.registry:
        gym.register(ID, lambda **settings: Camera(**settings), max_episode_steps=9)
        gym.register("rl_stagger_test/Counter-v0", lambda **settings: Counter(**settings))
