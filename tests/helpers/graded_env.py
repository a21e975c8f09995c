"""A task with levels of difficulty and two kinds of episodes."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State


class Graded(NativeEnv):
    """Episodes of `horizon_steps` that pay 10 * level + 1 a step in even rows, 2 less in odd ones.

    A curriculum, unless frozen, raises the level by one at each full reset.
    """

    difficulty_levels = 3

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0, horizon_steps: Optional[int] = 4) -> None:
        self.level, self.frozen = -1, False
        super().__init__(EnvSpec({"policy": (1,)}, Box(1), horizon_steps), num_envs, device, seed)

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        if not self.frozen and env_mask is None:
            self.level += 1
        return super().reset(env_mask)

    def set_evaluation(self, evaluating: bool) -> None:
        self.frozen = evaluating

    def set_difficulty(self, level: int) -> None:
        self.level = level

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        self.level = state["level"]

    def state_dict(self) -> Dict[str, Any]:
        return {**super().state_dict(), "level": self.level}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "level"})
        self.level = state["level"]

    def evaluation_cases(self) -> Dict[str, Tensor]:
        even = torch.arange(self.num_envs) % 2 == 0
        return {"stairs": even, "slope": ~even, "nowhere": torch.zeros_like(even)}

    def _start(self) -> State:
        return {"place": torch.zeros(self.num_envs)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Any:
        odd = torch.arange(self.num_envs) % 2
        return state, 10.0 * self.level + 1 - 2 * odd, torch.zeros_like(odd, dtype=torch.bool), {}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        return {"policy": state["place"].unsqueeze(1)}
