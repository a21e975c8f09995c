"""What a host's environment has beside its contract: a clock, a time limit, resets of single rows."""

from __future__ import annotations

import inspect
from typing import Any, Callable, FrozenSet, Iterable, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability
from rl_stagger.integrations.base import HostEnv

_CLOCKS = ("episode_length_buf", "progress_buf", "elapsed_steps")
_HORIZONS = ("max_episode_length", "horizon_steps", "max_episode_steps", "_max_episode_steps")


def clock_of(owners: Iterable[Any], num_envs: int) -> Optional[Tensor]:
    """The first tensor [N] among `owners` that is named like an episode clock. To be looked up at every use: some
    environments replace theirs."""
    for owner in owners:
        for name in _CLOCKS:
            clock = getattr(owner, name, None)
            if isinstance(clock, Tensor) and tuple(clock.shape) == (num_envs,):
                return clock
    return None


def horizon_of(owners: Iterable[Any]) -> Optional[int]:
    """The first number among `owners` that is named like a time limit, in steps."""
    for owner in owners:
        for name in _HORIZONS:
            value = getattr(owner, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return int(value)
        limit = getattr(getattr(owner, "spec", None), "max_episode_steps", None)
        if limit is not None:
            return int(limit)
    return None


def wrappers_of(env: Any) -> Tuple[Any, ...]:
    """`env` and all that it wraps, from the outside in."""
    found = []
    while env is not None and all(env is not other for other in found):
        found.append(env)
        held = getattr(env, "__dict__", {})  # some wrappers pass on names that they lack: what they hold themselves
        env = next((held[name] for name in ("env", "_env", "venv") if held.get(name) is not None), None)
    last = getattr(found[-1], "unwrapped", None) if found else None
    return tuple(found) if last is None or last is found[-1] else (*found, last)


def by_index(env_mask: Tensor, reset: Callable[[Tensor], Any]) -> Any:
    """`reset(indices)` of the masked rows; None where the mask is empty."""
    ids = env_mask.nonzero(as_tuple=False).squeeze(-1)  # the host waits here; such resets take indices only
    return reset(ids) if len(ids) > 0 else None


def reset_isaac_lab_rows(env: Any, ids: Tensor) -> Any:
    """A partial reset of an Isaac Lab environment; what its `reset` gave, None where it has none that takes rows."""
    if "env_ids" in inspect.signature(env.reset).parameters:
        return env.reset(env_ids=ids)
    env._reset_idx(ids)
    env.scene.write_data_to_sim()
    env.sim.forward()
    return None


def reset_isaac_lab(env: Any, ids: Tensor) -> Any:
    """A partial reset of an Isaac Lab environment; its observation groups, all N rows seen anew."""
    given = reset_isaac_lab_rows(env, ids.to(env.device))
    if given is not None:
        return dict(given[0])
    look = getattr(env, "_compute_observations", env._get_observations)  # since 3.0: with the noise that step() adds
    return dict(look())


class LookedInto(HostEnv):
    """A host whose own contract has neither clocks nor partial resets, but what it wraps may have them.

    Subclasses set `_inside` (where to look for a clock) and `_partial_reset` (None: there is none) first.
    """

    _inside: Tuple[Any, ...]
    _partial_reset: Optional[Callable[[Tensor], Any]]

    def _found(self, num_envs: int) -> FrozenSet[Capability]:
        has = set()
        if self._partial_reset is not None:
            has.add(Capability.PARTIAL_RESET)
        if clock_of(self._inside, num_envs) is not None:
            has.add(Capability.SET_CLOCK)
        return frozenset(has)

    @property
    def elapsed_steps(self) -> Tensor:
        clock = clock_of(self._inside, self.num_envs)
        return self.clock.clone() if clock is None else clock.to(self.device, torch.int64, copy=True)

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        clock = clock_of(self._inside, self.num_envs)
        if clock is None:
            raise self.lacks(Capability.SET_CLOCK)
        mask = torch.ones_like(clock, dtype=torch.bool) if env_mask is None else env_mask.to(clock.device)
        clock.copy_(torch.where(mask, steps.to(clock), clock))
