"""point_reach: a point mass in a square arena that must come to, and stay at, a random goal."""

from __future__ import annotations

from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State
from rl_stagger.envs.native.render import Canvas

ARENA_HALF_M = 1.0
STEP_DT_S = 0.05
MAX_ACCELERATION_M_S2 = 2.0
DRAG_PER_S = 1.0


class PointReach(NativeEnv):
    """Action [N, 2] in [-1, 1] (clipped), times 2 m/s^2 the acceleration along x and y.

    Observation "policy" [N, 6]: position in m (2), velocity in m/s (2), goal minus position in m (2).
    One step of 0.05 s: v' = v + (2 a - v) dt and p' = p + v' dt; walls at +-1 m stop the mass (p' clipped, that
    component of v' zero). Reward -|goal - p'| in m: at most 0, so ending at the goal never costs return. Start:
    position and goal uniform in the arena, at rest. H = 100. Success: |goal - p'| <= `goal_radius_m` at this step,
    hence at the last one where done; with `terminate_on_success` it ends the episode. Log "distance_m" is |goal - p'|.
    """

    capabilities = NativeEnv.capabilities | {Capability.RENDER}

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: int = 100,
        goal_radius_m: float = 0.1,
        terminate_on_success: bool = False,
    ) -> None:
        if not 0.0 < goal_radius_m < ARENA_HALF_M:
            raise ValueError(f"goal_radius_m={goal_radius_m}: above 0 and below {ARENA_HALF_M}, half the arena's width")
        super().__init__(EnvSpec({"policy": (6,)}, Box(2, -1.0, 1.0), horizon_steps), num_envs, device, seed)
        self.goal_radius_m, self.terminate_on_success = goal_radius_m, terminate_on_success

    def _start(self) -> State:
        draw = (self._rand(4) * 2 - 1) * ARENA_HALF_M
        return {
            "position_m": draw[:, :2],
            "velocity_m_s": torch.zeros(self.num_envs, 2, device=self.device),
            "goal_m": draw[:, 2:],
        }

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        velocity, goal = state["velocity_m_s"], state["goal_m"]
        acceleration = MAX_ACCELERATION_M_S2 * action.clamp(-1.0, 1.0) - DRAG_PER_S * velocity
        velocity = velocity + acceleration * STEP_DT_S
        free = state["position_m"] + velocity * STEP_DT_S
        position = free.clamp(-ARENA_HALF_M, ARENA_HALF_M)
        velocity = torch.where(position == free, velocity, 0.0)
        distance_m = torch.linalg.vector_norm(goal - position, dim=1)
        success = distance_m <= self.goal_radius_m
        terminated = success.clone() if self.terminate_on_success else torch.zeros_like(success)
        after = {"position_m": position, "velocity_m_s": velocity, "goal_m": goal}
        return after, -distance_m, terminated, {"success": success, "log": {"distance_m": distance_m}}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        position = state["position_m"]
        return {"policy": torch.cat([position, state["velocity_m_s"], state["goal_m"] - position], dim=1)}

    def render(self, env_index: int = 0) -> Tensor:
        """The arena from above, the goal as large as it counts, [height, width, 3] uint8."""
        edge = ARENA_HALF_M + 0.1
        x, y = self.state["position_m"][env_index].tolist()
        goal_x, goal_y = self.state["goal_m"][env_index].tolist()
        canvas = Canvas((-edge, -edge), (edge, edge), 120.0)
        canvas.box((-edge, -edge), (edge, edge), "body")
        canvas.box((-ARENA_HALF_M, -ARENA_HALF_M), (ARENA_HALF_M, ARENA_HALF_M), "paper")
        canvas.disc((goal_x, goal_y), self.goal_radius_m, "goal")
        canvas.disc((x, y), 0.04, "moving")
        return canvas.picture()
