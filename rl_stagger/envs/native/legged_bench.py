"""legged_bench: the shapes and episode lengths of a legged-locomotion task at almost no cost, for speed work.

It is a load, not a robot: what a trainer takes per step beside this task is the trainer's own.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State

OBS_SIZE = 48
CRITIC_OBS_SIZE = 60
ACTION_SIZE = 12
LEAK = 0.9
INPUT_GAIN = 0.1
START_SCALE = 0.1


class LeggedBench(NativeEnv):
    """Action [N, 12], unbounded. Observation "policy" [N, 48], the first 48 numbers of the state x.

    x' = tanh(0.9 x + a B), B a fixed random matrix; everything is without units and |x| <= 1. Reward x'[0], in [-1, 1].
    Each step terminates an episode with probability `termination_probability`, whatever the policy does. H = 1000.
    `critic_obs` adds the group "critic" [N, 60]: the same 48 numbers and 12 that the policy does not see.
    Start states are a fixed bank, one row per environment, so that a reset draws nothing. No success, no log.
    """

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: int = 1000,
        termination_probability: float = 0.002,
        critic_obs: bool = False,
        layout_seed: int = 0,
    ) -> None:
        """`layout_seed` fixes B and the start states, whatever `seed` is."""
        if not 0.0 <= termination_probability <= 1.0:
            raise ValueError(f"termination_probability={termination_probability}: a probability between 0 and 1")
        obs_shapes: Dict[str, Tuple[int, ...]] = {"policy": (OBS_SIZE,)}
        if critic_obs:
            obs_shapes["critic"] = (CRITIC_OBS_SIZE,)
        super().__init__(EnvSpec(obs_shapes, Box(ACTION_SIZE), horizon_steps), num_envs, device, seed)
        self.termination_probability, self.critic_obs = termination_probability, critic_obs
        state_size = CRITIC_OBS_SIZE if critic_obs else OBS_SIZE
        layout = torch.Generator().manual_seed(layout_seed)
        gains = torch.randn(ACTION_SIZE, CRITIC_OBS_SIZE, generator=layout) * INPUT_GAIN
        starts = torch.randn(num_envs, CRITIC_OBS_SIZE, generator=layout) * START_SCALE
        self.gains = gains[:, :state_size].contiguous().to(self.device)
        self.starts = starts[:, :state_size].contiguous().to(self.device)

    def _start(self) -> State:
        return {"x": self.starts}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        x = torch.addmm(state["x"], action, self.gains, beta=LEAK).tanh_()
        return {"x": x}, x[:, 0].clone(), self._rand() < self.termination_probability, {}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        x = state["x"]
        if self.critic_obs:
            return {"policy": x[:, :OBS_SIZE].clone(), "critic": x.clone()}
        return {"policy": x.clone()}
