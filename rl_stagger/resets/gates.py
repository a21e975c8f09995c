"""When a done environment may be reset. Each gate is a class entered in GATES and counts steps since the bring-up."""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Dict, FrozenSet, Optional, Type

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_step, where_rows

Watch = Callable[[str], ContextManager[None]]


class Gate:
    """Wraps one env step; says in info["reset"] [N] bool which rows were reset in it."""

    requires: FrozenSet[Capability] = frozenset()

    def __init__(self, interval_steps: int, capacity: Optional[int] = None) -> None:
        """`interval_steps`: from one gate to the next. `capacity`: environments that a gate lets through; None: all."""
        self.interval_steps, self.capacity = interval_steps, capacity
        self.waiting: Optional[Tensor] = None
        """[N] bool, who stands frozen before the next gate; None where nobody ever does."""
        self._checked = False

    def checked_step(self, env: VecEnv, action: Tensor) -> Step:
        """`env.step`; the first one is held against the contract."""
        step = env.step(action)
        if not self._checked:
            check_step(step, env.spec, env.num_envs, env.device)
            self._checked = True
        return step

    def begin(self, env: VecEnv, obs: Obs) -> None:
        """Called once after the bring-up, with its observations."""

    def pause(self, env: VecEnv) -> None:
        """Called before a bring-up: environments must reset themselves during it."""

    def release(self, env_mask: Tensor, obs: Obs) -> None:
        """Somebody else started the rows of `env_mask` anew; `obs` is what all N show since."""

    def step(self, env: VecEnv, action: Tensor, watch: Watch) -> Step:
        raise NotImplementedError

    def state_dict(self) -> Dict[str, Any]:
        return {}

    def load_state_dict(self, env: VecEnv, state: Dict[str, Any]) -> None:
        """Continue on `env`, whose own state is loaded already."""


class ImmediateGate(Gate):
    """A done environment is reset in the same step, by the environment itself."""

    def step(self, env: VecEnv, action: Tensor, watch: Watch) -> Step:
        step = self.checked_step(env, action)
        if "reset" not in step.info:
            step.info["reset"] = step.done
        return step


class BlockGate(Gate):
    """A done environment waits, frozen, and is reset at a later gate, together with others that wait.

    A gate comes every `interval_steps` steps. Where it has a capacity, the terminated go before the timed-out, and
    among them those that have waited longer. A frozen environment shows its last observation, its clock stands, its
    reward is 0, and its steps are invalid. One that is done in the gate's own step is in time for it.
    """

    requires = frozenset({Capability.MANUAL_RESET, Capability.PARTIAL_RESET})

    def __init__(self, interval_steps: int, capacity: Optional[int] = None) -> None:
        super().__init__(interval_steps, capacity)
        self.since_gate = 0
        self.waited: Optional[Tensor] = None
        """[N] int64, steps that an environment has been done."""
        self.was_terminated: Optional[Tensor] = None
        self.held: Obs = {}

    def begin(self, env: VecEnv, obs: Obs) -> None:
        env.set_manual_reset(True)
        self.since_gate = 0
        self.waiting = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        self.was_terminated = torch.zeros_like(self.waiting)
        self.waited = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self.held = obs

    def pause(self, env: VecEnv) -> None:
        env.set_manual_reset(False)

    def release(self, env_mask: Tensor, obs: Obs) -> None:
        if self.waiting is not None:
            self.waiting = self.waiting & ~env_mask
            self.held = where_rows(env_mask, obs, self.held)

    def step(self, env: VecEnv, action: Tensor, watch: Watch) -> Step:
        assert self.waiting is not None
        assert self.waited is not None
        assert self.was_terminated is not None
        frozen, live = self.waiting, ~self.waiting
        step = self.checked_step(env, action)
        terminated, truncated = step.terminated & live, step.truncated & live
        obs = where_rows(frozen, self.held, step.obs)
        waiting = frozen | terminated | truncated
        self.waited = torch.where(frozen, self.waited + 1, 0)
        self.was_terminated = torch.where(frozen, self.was_terminated, terminated)
        released = torch.zeros_like(waiting)
        self.since_gate += 1
        if self.since_gate >= self.interval_steps:
            self.since_gate = 0
            released = self._let_through(waiting)
            with watch("reset"):
                obs = where_rows(released, env.reset(released), obs)
            waiting = waiting & ~released
        self.waiting, self.held = waiting, obs
        reward = torch.where(live, step.reward, 0.0)
        info = {**step.info, "reset": released, "frozen": frozen}
        return Step(obs, reward, terminated, truncated, step.final_obs, step.valid & live, info)

    def _let_through(self, waiting: Tensor) -> Tensor:
        """[N] bool: the first `capacity` of the waiting line."""
        if self.capacity is None:
            return waiting
        assert self.waited is not None
        assert self.was_terminated is not None
        longest = torch.full_like(self.waited, 2**40)
        key = torch.where(self.was_terminated, 0, longest) - self.waited
        order = torch.where(waiting, key, 2 * longest).argsort(stable=True)
        place = torch.zeros_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return waiting & (place < self.capacity)

    def state_dict(self) -> Dict[str, Any]:
        names = ("since_gate", "waiting", "waited", "was_terminated")
        return {**{name: getattr(self, name) for name in names}, "held": dict(self.held)}

    def load_state_dict(self, env: VecEnv, state: Dict[str, Any]) -> None:
        if state["waiting"] is None:  # saved before its first bring-up
            return
        env.set_manual_reset(True)
        self.since_gate = int(state["since_gate"])
        self.waiting, self.waited = state["waiting"].to(env.device), state["waited"].to(env.device)
        self.was_terminated = state["was_terminated"].to(env.device)
        self.held = {name: x.to(env.device) for name, x in state["held"].items()}


GATES: Dict[str, Type[Gate]] = {"immediate": ImmediateGate, "block": BlockGate}
