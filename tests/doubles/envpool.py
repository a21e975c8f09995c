"""envpool as far as our adapter meets it, made after envpool 1.2.5 (its Python sources, and from running it):

- the step after a done is a reset step: action ignored, reward 0, `elapsed_step` 0, observation of the new episode;
- `reset` of some rows (`options["reset_mask"]`) gives back only those rows, and a row reset so has no reset step;
- an episode that fails in its last step is reported as truncated alone;
- seeds are taken when the pool is made, `seed` as `seed + i` or a list of int32; `reset(seed=...)` warns, and no more;
- an unknown task is an AssertionError, an unknown option a TypeError; the spaces are built at their first use, with
  Gymnasium's warning on their bounds.

Simulated in place of physics: a count. `install(monkeypatch)` makes `import envpool` find this module.
"""

import sys
import types
import warnings
from collections import namedtuple

import numpy as np
from gymnasium import spaces

TASKS = {"Count-v1": "array", "MuJoCoPlayground/Joystick-v1": "dict", "Look-v5": "image"}
LENGTHS = (0, 4, 6)
"""Environment i fails at its step LENGTHS[i % 3] (0: never)."""
LIMIT = 6
FIELDS = ("num_envs", "num_threads", "seed", "max_episode_steps", "bonus")


def install(monkeypatch):
    """Returns the list of every pool that is built from now on."""
    module, built = types.ModuleType("envpool"), []
    module.list_all_envs = lambda: list(TASKS)
    module.make_spec = lambda task_id: types.SimpleNamespace(config=namedtuple("Config", FIELDS)(1, 0, 42, LIMIT, 0.0))

    def make(task_id, env_type, render_mode=None, **options):
        assert task_id in TASKS, f"{task_id} is not supported, `envpool.list_all_envs()` may help."
        unknown = set(options) - set(FIELDS)
        if unknown:
            raise TypeError(f"Config.__new__() got an unexpected keyword argument '{unknown.pop()}'")
        assert env_type == "gymnasium"
        built.append(Pool(TASKS[task_id], render_mode, **options))
        return built[-1]

    module.make = make
    monkeypatch.setitem(sys.modules, "envpool", module)
    return built


class Pool:
    """Observation [N, 2]: steps since the reset, and a number drawn at the reset. Reward: the action's first number,
    plus `bonus`."""

    def __init__(self, kind, render_mode, num_envs, seed, max_episode_steps=LIMIT, num_threads=0, bonus=0.0):
        self.kind, self.render_mode, self.num_envs, self.bonus = kind, render_mode, num_envs, bonus
        seeds = [seed + i for i in range(num_envs)] if isinstance(seed, int) else seed
        assert all(-(2**31) <= s < 2**31 for s in seeds), "seeds are int32"
        self.seeds = list(seeds)
        self.draws = [np.random.default_rng(abs(s)) for s in seeds]
        self.limit, self.closed = max_episode_steps, False
        self.count = np.zeros(num_envs, dtype=np.int32)
        self.drawn = np.zeros(num_envs)
        self.pending = np.ones(num_envs, dtype=bool)
        self.steps = 0

    @property
    def observation_space(self):
        if not hasattr(self, "_observation_space"):
            warnings.warn("Box low's precision lowered by casting to float32", UserWarning, stacklevel=2)
            plain = spaces.Box(-np.inf, np.inf, (2,), np.float32)
            double = spaces.Box(-np.inf, np.inf, (2,), np.float64)
            self._observation_space = {
                "array": plain,
                "dict": spaces.Dict({"privileged_state": double, "state": double}),
                "image": spaces.Box(0, 255, (4, 12, 12), np.uint8),
            }[self.kind]
        return self._observation_space

    @property
    def action_space(self):
        return spaces.Discrete(3) if self.kind == "image" else spaces.Box(-2.0, 2.0, (1,), np.float64)

    def reset(self, env_id=None, *, seed=None, options=None):
        if seed is not None:
            warnings.warn("EnvPool seeds are fixed when the environment is created.", stacklevel=2)
        rows = np.arange(self.num_envs) if options is None else np.flatnonzero(options["reset_mask"])
        assert len(rows), "reset_mask must select at least one environment."
        self._begin(rows)
        return self._obs(rows), self._info(rows)

    def step(self, action):
        assert np.shape(action)[0] == self.num_envs
        self.steps += 1
        again, rows = self.pending.copy(), np.arange(self.num_envs)
        self.count = self.count + ~again
        reward = np.where(again, 0.0, np.reshape(action, (self.num_envs, -1))[:, 0] + self.bonus)
        fails = np.array([LENGTHS[i % 3] for i in rows])
        truncated = ~again & (self.count >= self.limit)
        terminated = ~again & (self.count == fails) & ~truncated
        self._begin(np.flatnonzero(again))
        self.pending = terminated | truncated
        return self._obs(rows), reward, terminated, truncated, self._info(rows)

    def render(self, env_ids):
        return np.stack([np.full((4, 6, 3), i, dtype=np.uint8) for i in env_ids])

    def close(self):
        self.closed = True

    def _begin(self, rows):
        self.count[rows], self.pending[rows] = 0, False
        for i in rows:
            self.drawn[i] = self.draws[i].random()

    def _obs(self, rows):
        seen = np.stack([self.count[rows], self.drawn[rows]], axis=1)
        if self.kind == "dict":
            return {"privileged_state": 10.0 * seen, "state": seen}
        if self.kind == "image":
            picture = np.zeros((len(rows), 4, 12, 12), dtype=np.uint8)
            picture[:, :, 0, 0] = self.count[rows, None]
            picture[:, :, 1, 1] = (255 * self.drawn[rows, None]).astype(np.uint8)
            return picture
        return seen.astype(np.float32)

    def _info(self, rows):
        ids = rows.astype(np.int32)
        info = {"env_id": ids, "players": {"env_id": ids}, "elapsed_step": self.count[rows]}
        return {**info, "reward_tracking": self.count[rows] / 2.0}
