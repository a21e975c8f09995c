"""Small environments whose every number can be worked out by hand, for the tests of resets and runner."""

from __future__ import annotations

import os
from typing import Any, Dict, FrozenSet, Optional, Sequence, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, EnvSpec, Obs, Step, VecEnv
from rl_stagger.envs.native.base import NativeEnv, State


class CounterEnv(NativeEnv):
    """Observation [N, 2]: true steps since the episode's start (which no clock can fake) and the environment's index.

    Environment i terminates after `lengths[i]` steps (0 = never). Reward: the true step just taken, from 1. The action
    [N, 1] does nothing but is logged. `without`: capabilities to take away.
    """

    def __init__(
        self,
        num_envs: int,
        device: Any = "cpu",
        seed: int = 0,
        horizon_steps: Optional[int] = 12,
        lengths: Sequence[int] = (),
        without: Sequence[Capability] = (),
    ) -> None:
        super().__init__(EnvSpec({"policy": (2,)}, Box(1, -1.0, 1.0), horizon_steps), num_envs, device, seed)
        self.capabilities = NativeEnv.capabilities - set(without)
        self.lengths = torch.tensor(list(lengths) or [0] * num_envs, device=self.device)
        self.steps_asked = 0
        self.resets_asked = 0

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        self.resets_asked += 1
        return super().reset(env_mask)

    def step(self, action: Tensor) -> Step:
        self.steps_asked += 1
        step = super().step(action)
        return step if Capability.FINAL_OBS in self.capabilities else _without_final(step)

    def state_dict(self) -> Dict[str, Any]:
        return super().state_dict() if Capability.EXACT_RESUME in self.capabilities else {}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        assert Capability.EXACT_RESUME in self.capabilities, "nothing was saved, so nothing may be loaded"
        super().load_state_dict(state)

    def _start(self) -> State:
        return {"count": torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        count = state["count"] + 1
        return (
            {"count": count},
            count.float(),
            (self.lengths > 0) & (count >= self.lengths),
            {"log": {"a": action[:, 0]}},
        )

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        index = torch.arange(self.num_envs, device=self.device)
        return {"policy": torch.stack([state["count"], index], dim=1).float()}


class PoisonedEnv(CounterEnv):
    """A CounterEnv that, in its `bad_step`-th step (from 1), gives `value` as `where` ("reward" | "obs") of `row`."""

    def __init__(self, num_envs: int, bad_step: int, where: str, value: float, row: int = 1, **more: Any) -> None:
        super().__init__(num_envs, **more)
        self.bad_step, self.where, self.value, self.row = bad_step, where, value, row

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if self.steps_asked == self.bad_step:
            if self.where == "reward":
                step.reward[self.row] = self.value
            else:
                step.obs["policy"][self.row, 0] = self.value
        return step


class PlainEnv(VecEnv):
    """As little as the contract asks for: no capability, no time limit, nothing saved. A point that is pushed to 0."""

    capabilities: FrozenSet[Capability] = frozenset()

    def __init__(self, num_envs: int, device: Any = "cpu", seed: int = 0) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.spec = EnvSpec({"policy": (1,)}, Box(1), None)
        self.x = torch.zeros(num_envs, device=self.device)
        self.clock = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    @property
    def elapsed_steps(self) -> Tensor:
        return self.clock.clone()

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = torch.ones_like(self.x, dtype=torch.bool) if env_mask is None else env_mask
        self.x, self.clock = torch.where(mask, 1.0, self.x), torch.where(mask, 0, self.clock)
        return {"policy": self.x.unsqueeze(1).clone()}

    def step(self, action: Tensor) -> Step:
        self.x, self.clock = self.x + 0.1 * action[:, 0].clamp(-1, 1), self.clock + 1
        reward, terminated = -self.x.abs(), (self.x.abs() > 1.5) | (self.clock >= 9)
        obs = self.reset(terminated)
        always = torch.ones_like(terminated)
        return Step(obs, reward, terminated, torch.zeros_like(terminated), None, always)


def _without_final(step: Step) -> Step:
    return Step(step.obs, step.reward, step.terminated, step.truncated, None, step.valid, step.info)


class SignalEnv(CounterEnv):
    """A CounterEnv that sends its own process the signal `number` in each of its `at_steps`-th steps (from 1)."""

    def __init__(self, num_envs: int, number: int, at_steps: Sequence[int], **more: Any) -> None:
        super().__init__(num_envs, **more)
        self.number, self.at_steps = number, at_steps

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if self.steps_asked in self.at_steps:
            os.kill(os.getpid(), self.number)
        return step


RESETS: Dict[str, Dict[str, Any]] = {
    "synchronous": {"bring_up": "none"},
    "staggered": {},
    "random_clock": {"allocation": "random", "bring_up": "clock"},
    "staggered_block": {"gate": "block"},
    "mixed": {"allocation": "mixed"},
    "upkept": {"upkeep": "on_coverage_below"},
    "snapshot": {"bring_up": "snapshot"},
    "density": {"allocation": "density", "density": "1 + 3 * u"},
    "adaptive": {"allocation": "adaptive"},
}
"""The files configs/reset/*.yaml, as trees."""


def small_tree(run_dir: Any = None, reset: str = "staggered", task: Any = "toy", **top: Any) -> Dict[str, Any]:
    """A configuration's tree for a run of a moment: 6 environments, 4 steps, tiny nets, no console and no curves.

    `top`: top-level keys; groups are merged into the small ones.
    """
    tree: Dict[str, Any] = {
        "task": {"name": task} if isinstance(task, str) else task,
        "reset": {"name": reset, **RESETS[reset]},
        "model": {"actor_hidden": [8], "critic_hidden": [8]},
        "algorithm": {"epochs": 2, "minibatches": 2},
        "checkpoint": {"every_iters": 0},
        "logging": {"console": "off", "tensorboard": False, "curves": False},
        "num_envs": 6,
        "rollout_steps": 4,
        "iterations": 2,
        "device": "cpu",
        "run_dir": None if run_dir is None else str(run_dir),
    }
    for key, value in top.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) else value
    return tree
