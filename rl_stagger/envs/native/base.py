"""What all native tasks share: clock, time limit, resets, final observations, state access. No loop over environments.

A task writes three functions of its state, a dict of [N, ...] tensors:
`_start` draws fresh episodes, `_advance` moves one step, `_observe` looks.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, EnvSpec, Obs, Step, VecEnv, check_action, check_mask, where_rows
from rl_stagger.rng import generator_state, make_generator, set_generator_state

State = Dict[str, Tensor]


class NativeEnv(VecEnv):
    """A batched task in torch, on any device (torch's "meta" included)."""

    capabilities = frozenset(
        {
            Capability.PARTIAL_RESET,
            Capability.MANUAL_RESET,
            Capability.SET_CLOCK,
            Capability.SET_STATE,
            Capability.FINAL_OBS,
            Capability.EXACT_RESUME,
        }
    )

    def __init__(self, spec: EnvSpec, num_envs: int, device: Union[torch.device, str], seed: int) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: at least 1")
        self.spec = spec
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.manual_reset = False
        self.generator = make_generator(self.device, seed)
        self._state: Optional[State] = None
        self._elapsed = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._waiting = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    # -- what a task writes --------------------------------------------------------------------------------------
    def _start(self) -> State:
        """Fresh start states for all N rows, drawn from `self.generator`."""
        raise NotImplementedError

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        """(next state, reward [N], terminated [N] bool, info). `elapsed` [N] counts this step already."""
        raise NotImplementedError

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        """Observation groups of `state`, as tensors of their own."""
        raise NotImplementedError

    # -- the contract --------------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        if self._state is None:
            raise RuntimeError(f"{type(self).__name__}: call reset() before the first step")
        return self._state

    @property
    def elapsed_steps(self) -> Tensor:
        return self._elapsed.clone()

    def read_clocks(self) -> Tuple[Tensor, Tensor]:
        return self._elapsed, self._elapsed

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        fresh = self._start()
        self._state = fresh if self._state is None else where_rows(mask, fresh, self._state)
        self._elapsed = torch.where(mask, 0, self._elapsed)
        self._waiting = self._waiting & ~mask
        return self._observe(self._state, self._elapsed)

    def step(self, action: Tensor) -> Step:
        action = check_action(action, self.spec.action, self.num_envs)
        before, live = self.state, ~self._waiting
        elapsed = self._elapsed + live
        after, reward, terminated, info = self._advance(before, action, elapsed)
        if self.manual_reset:
            after = where_rows(live, after, before)
            reward, terminated = torch.where(live, reward, 0.0), terminated & live
        truncated = torch.zeros_like(terminated)
        if self.spec.horizon_steps is not None:
            truncated = (elapsed >= self.spec.horizon_steps) & live & ~terminated
        self._state, self._elapsed = after, elapsed
        final_obs = obs = self._observe(after, elapsed)
        done = terminated | truncated
        if self.manual_reset:
            self._waiting = self._waiting | done
        else:
            obs, info["reset"] = self.reset(done), done
        return Step(obs, reward, terminated, truncated, final_obs, live, info)

    def set_manual_reset(self, manual: bool) -> None:
        """Rows that still wait when manual resets end are reset at once."""
        if self.manual_reset and not manual and self._state is not None:
            self.reset(self._waiting)
        self.manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        mask = check_mask(env_mask, self.num_envs, self.device)
        self._elapsed = torch.where(mask, steps.to(torch.int64), self._elapsed)

    def get_state(self, env_mask: Optional[Tensor] = None) -> State:
        check_mask(env_mask, self.num_envs, self.device)
        state = {name: value.clone() for name, value in self.state.items()}
        state["elapsed_steps"] = self._elapsed.clone()
        return state

    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        missing = set(self.state) | {"elapsed_steps"}
        if set(state) != missing:
            raise ValueError(f"state has {sorted(state)}, expected {sorted(missing)}")
        self._state = where_rows(mask, state, self.state)
        self._elapsed = torch.where(mask, state["elapsed_steps"], self._elapsed)
        self._waiting = self._waiting & ~mask
        return self._observe(self._state, self._elapsed)

    def seed(self, seed: int) -> None:
        self.generator = make_generator(self.device, seed)

    def state_dict(self) -> Dict[str, Any]:
        return {
            "state": {name: value.clone() for name, value in (self._state or {}).items()},
            "elapsed_steps": self._elapsed.clone(),
            "waiting": self._waiting.clone(),
            "generator": generator_state(self.generator),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        saved_envs = state["elapsed_steps"].shape[0]
        if saved_envs != self.num_envs:
            raise ValueError(f"the saved state has {saved_envs} environments, this task has num_envs={self.num_envs}")
        self._state = {name: value.to(self.device).clone() for name, value in state["state"].items()} or None
        self._elapsed = state["elapsed_steps"].to(self.device).clone()
        self._waiting = state["waiting"].to(self.device).clone()
        set_generator_state(self.generator, state["generator"])

    # -- drawing -------------------------------------------------------------------------------------------------
    def _rand(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), [N, *shape]."""
        return torch.rand((self.num_envs, *shape), generator=self.generator, device=self.device)

    def _randn(self, *shape: int) -> Tensor:
        """Standard normal, [N, *shape]."""
        return torch.randn((self.num_envs, *shape), generator=self.generator, device=self.device)
