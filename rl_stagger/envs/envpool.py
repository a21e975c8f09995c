"""envpool's tasks as a `VecEnv`: Gymnasium's classics, Atari, MuJoCo, MuJoCo Playground and more, stepped by threads in
C++. Written against envpool 1.2.5.

envpool resets a done environment in the next step, whatever its action (NEXT_STEP). Nothing is lost to such dummy
steps here: rows that are done are reset at once through `reset(options={"reset_mask": ...})`, so the observation that
`step` returned is the final one. The time limit is taken off and kept by our own clock, which can therefore be written;
envpool itself reports an episode that fails in its last step as truncated, not as terminated.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import difflib
import importlib
import warnings
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple, Union

import torch

from rl_stagger.envs.gymnasium import VectorEnvAdapter
from rl_stagger.envs.gymnasium_make import check_sizes
from rl_stagger.errors import ConfigError

_NO_LIMIT = 2**31 - 1
_PRIVILEGED = "privileged_state"
"""What MuJoCo Playground calls the observation that only the critic sees."""
_BOOKKEEPING = ("env_id", "players", "elapsed_step")


class EnvpoolEnv(VectorEnvAdapter):
    """N environments of an envpool id.

    envpool takes seeds when a pool is built and never again: after `seed`, the next reset of all builds a new one.
    Emulators and simulators behind it keep states that cannot be read: no SET_STATE, no EXACT_RESUME.
    """

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        task_id: str = "CartPole-v1",
        horizon_steps: Optional[int] = None,
        num_threads: int = 0,
        rescale_actions: bool = False,
        render_mode: Optional[str] = None,
        critic_keys: Optional[Sequence[str]] = None,
        env_kwargs: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """`horizon_steps`: None = the task's own. `num_threads`: 0 = as envpool chooses. `rescale_actions`: a Box with
        finite bounds is presented as [-1, 1]. `render_mode`: rgb_array, for `render`. `critic_keys`: of a Dict
        observation, what only the critic sees; None = MuJoCo Playground's "privileged_state" where there is one.
        `env_kwargs`: the task's own options (see its envpool config)."""
        check_sizes(num_envs, horizon_steps)
        pool = Pool(task_id, num_envs, {"num_threads": num_threads, "render_mode": render_mode, **(env_kwargs or {})})
        if critic_keys is None:
            keys = getattr(pool.single_observation_space, "spaces", {})
            critic_keys = [_PRIVILEGED] if _PRIVILEGED in keys else []
        horizon = pool.own_limit_steps if horizon_steps is None else horizon_steps
        super().__init__(pool, device, seed, horizon, rescale_actions, critic_keys)


class Pool:
    """An envpool as a Gymnasium `VectorEnv` of autoreset mode DISABLED and without a time limit."""

    spec = None

    def __init__(self, task_id: str, num_envs: int, options: Mapping[str, Any]) -> None:
        """`options`: for `envpool.make`. Raises ConfigError for what is not installed, not there or not accepted."""
        from gymnasium.vector import AutoresetMode

        self.envpool = _import_envpool(task_id)
        self.task_id, self.num_envs, self.render_mode = task_id, num_envs, options.get("render_mode")
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        known = self.envpool.list_all_envs()
        if task_id not in known:
            near = difflib.get_close_matches(task_id, known, n=4, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}? " if near else ""
            raise ConfigError(f"task envpool/{task_id}: there is no such task; {hint}envpool.list_all_envs() has all")
        config = self.envpool.make_spec(task_id).config
        self.own_limit_steps: Optional[int] = getattr(config, "max_episode_steps", None)
        self._options = {name: value for name, value in options.items() if value is not None}
        if self.own_limit_steps is not None:
            self._options["max_episode_steps"] = _NO_LIMIT
        self.pool = self._build(0)
        self.single_observation_space = self.pool.observation_space
        self.single_action_space = self.pool.action_space

    @property
    def unwrapped(self) -> Pool:
        return self

    def reset(self, *, seed: Optional[int] = None, options: Optional[Dict[str, Any]] = None) -> Tuple[Any, Dict]:
        """All N observations, after a reset of all or of the rows of `options["reset_mask"]`. `seed`: with all only."""
        if options is None:
            if seed is not None:
                self.pool.close()
                self.pool = self._build(seed)
            self._obs, _ = self.pool.reset()
        else:
            # Only the rows that were reset come back.
            rows, _ = self.pool.reset(options=options)
            self._obs = _put(self._obs, options["reset_mask"], rows)
        return self._obs, {}

    def step(self, action: Any) -> Tuple[Any, Any, Any, Any, Dict[str, Any]]:
        """Rows in the order of the environments, as envpool gives them while it steps all of them at once."""
        self._obs, reward, terminated, truncated, info = self.pool.step(action)
        return self._obs, reward, terminated, truncated, {k: x for k, x in info.items() if k not in _BOOKKEEPING}

    def render(self) -> Any:
        """[N, height, width, 3] uint8."""
        import numpy as np

        return self.pool.render(np.arange(self.num_envs, dtype=np.int32))

    def close(self) -> None:
        self.pool.close()

    def _build(self, seed: int) -> Any:
        import numpy as np

        parts = np.random.SeedSequence(seed).generate_state(self.num_envs)
        seeds = [
            int(part) % 2**31 for part in parts
        ]  # envpool's are int32; its own seed + i would repeat a neighbour's
        try:
            with _quiet():
                pool = self.envpool.make(
                    self.task_id, env_type="gymnasium", num_envs=self.num_envs, seed=seeds, **self._options
                )
                _ = pool.observation_space, pool.action_space  # built at the first use
                return pool
        except (TypeError, ValueError, AssertionError) as error:
            shown = {name: value for name, value in self._options.items() if name != "max_episode_steps"}
            raise ConfigError(f"task envpool/{self.task_id} with {shown}: {error}") from error


def _put(old: Any, mask: Any, rows: Any) -> Any:
    """`old` [N, ...] with `rows` in the places of `mask` [N], arrays or dicts of them; both stay as they are."""
    if isinstance(old, dict):
        return {key: _put(x, mask, rows[key]) for key, x in old.items()}
    new = old.copy()
    new[mask] = rows
    return new


def _import_envpool(task_id: str) -> Any:
    try:
        return importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        raise ConfigError(f"task envpool/{task_id} needs envpool: pip install 'rl_stagger[envpool]'") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Gymnasium's warnings on the precision of envpool's bounds are nobody's here to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
