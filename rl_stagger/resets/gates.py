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

    def __init__(self, interval_steps: int) -> None:
        self.interval_steps = interval_steps
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
        step.info.setdefault("reset", step.done)
        return step


class BlockGate(Gate):
    """A done environment waits, frozen, and is reset at the next gate, together with all that wait.

    Gates are the steps whose number is a multiple of `interval_steps`. A frozen environment shows its last observation,
    its clock stands, its reward is 0, and its steps are invalid. One that is done in the gate's own step does not wait.
    """

    requires = frozenset({Capability.MANUAL_RESET, Capability.PARTIAL_RESET})

    def __init__(self, interval_steps: int) -> None:
        super().__init__(interval_steps)
        self.steps_done = 0
        self.waiting: Optional[Tensor] = None
        self.held: Obs = {}

    def begin(self, env: VecEnv, obs: Obs) -> None:
        env.set_manual_reset(True)
        self.steps_done = 0
        self.waiting = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        self.held = obs

    def pause(self, env: VecEnv) -> None:
        env.set_manual_reset(False)

    def release(self, env_mask: Tensor, obs: Obs) -> None:
        if self.waiting is not None:
            self.waiting = self.waiting & ~env_mask
            self.held = where_rows(env_mask, obs, self.held)

    def step(self, env: VecEnv, action: Tensor, watch: Watch) -> Step:
        assert self.waiting is not None
        frozen, live = self.waiting, ~self.waiting
        step = self.checked_step(env, action)
        terminated, truncated = step.terminated & live, step.truncated & live
        obs = where_rows(frozen, self.held, step.obs)
        waiting = frozen | terminated | truncated
        released = torch.zeros_like(waiting)
        self.steps_done += 1
        if self.steps_done % self.interval_steps == 0:
            with watch("reset"):
                obs = env.reset(waiting)
            released, waiting = waiting, released
        self.waiting, self.held = waiting, obs
        reward = torch.where(live, step.reward, 0.0)
        info = {**step.info, "reset": released}
        return Step(obs, reward, terminated, truncated, step.final_obs, step.valid & live, info)

    def state_dict(self) -> Dict[str, Any]:
        return {"steps_done": self.steps_done, "waiting": self.waiting, "held": dict(self.held)}

    def load_state_dict(self, env: VecEnv, state: Dict[str, Any]) -> None:
        if state["waiting"] is None:  # saved before its first bring-up
            return
        env.set_manual_reset(True)
        self.steps_done = int(state["steps_done"])
        self.waiting = state["waiting"].to(env.device)
        self.held = {name: x.to(env.device) for name, x in state["held"].items()}


GATES: Dict[str, Type[Gate]] = {"immediate": ImmediateGate, "block": BlockGate}
