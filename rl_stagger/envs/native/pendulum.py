"""pendulum: swing a torque-limited rod up and hold it, with the constants of Gymnasium's Pendulum-v1."""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State
from rl_stagger.envs.native.render import Canvas

MASS_KG = 1.0
LENGTH_M = 1.0
STEP_DT_S = 0.05
MAX_TORQUE_NM = 2.0
MAX_SPEED_RAD_S = 8.0


class Pendulum(NativeEnv):
    """Action [N, 1]: torque u in [-2, 2] N m (clipped). Observation "policy" [N, 3]: cos th, sin th, thdot in rad/s.

    th is 0 upright, in [-pi, pi). One step of 0.05 s is semi-implicit Euler on a uniform rod (m = 1 kg, l = 1 m):
    thdot' = clip(thdot + (3 g / (2 l) sin th + 3 / (m l^2) u) dt, -8, 8) and th' = th + thdot' dt.
    Reward -(th^2 + 0.1 thdot^2 + 0.001 u^2), of the state before the step, so returns compare with Pendulum-v1's
    (an episode of 200 steps: about -1200 at random, about -150 when solved). Start: th uniform in [-pi, pi), thdot in
    [-1, 1). Nothing terminates; H = 200. Pendulum-v1 knows no success, hence no info["success"].
    Log "upright": 1 where |th| < 0.2 rad after the step.
    """

    capabilities = NativeEnv.capabilities | {Capability.RENDER}

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: int = 200,
        gravity_m_s2: float = 10.0,
    ) -> None:
        if not 0.0 <= gravity_m_s2 < math.inf:
            raise ValueError(f"gravity_m_s2={gravity_m_s2}: a finite number, at least 0")
        spec = EnvSpec({"policy": (3,)}, Box(1, -MAX_TORQUE_NM, MAX_TORQUE_NM), horizon_steps)
        super().__init__(spec, num_envs, device, seed)
        self.gravity_m_s2 = gravity_m_s2

    def _start(self) -> State:
        draw = self._rand(2) * 2 - 1
        return {"theta_rad": draw[:, 0] * math.pi, "theta_rad_s": draw[:, 1]}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        theta, speed = state["theta_rad"], state["theta_rad_s"]
        torque = action[:, 0].clamp(-MAX_TORQUE_NM, MAX_TORQUE_NM)
        reward = -(theta.square() + 0.1 * speed.square() + 0.001 * torque.square())
        pull = 3 * self.gravity_m_s2 / (2 * LENGTH_M) * torch.sin(theta) + 3 / (MASS_KG * LENGTH_M**2) * torque
        next_speed = (speed + pull * STEP_DT_S).clamp(-MAX_SPEED_RAD_S, MAX_SPEED_RAD_S)
        next_theta = wrap_angle_rad(theta + next_speed * STEP_DT_S)
        info = {"log": {"upright": (next_theta.abs() < 0.2).float()}}
        after = {"theta_rad": next_theta, "theta_rad_s": next_speed}
        return after, reward, torch.zeros_like(theta, dtype=torch.bool), info

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        theta = state["theta_rad"]
        return {"policy": torch.stack([torch.cos(theta), torch.sin(theta), state["theta_rad_s"]], dim=1)}

    def render(self, env_index: int = 0) -> Tensor:
        """The rod, 0 rad upward and turning to the left as th grows, [height, width, 3] uint8."""
        theta = float(self.state["theta_rad"][env_index])
        canvas = Canvas((-1.2, -1.2), (1.2, 1.2), 100.0)
        canvas.stroke((0.0, 0.0), (-LENGTH_M * math.sin(theta), LENGTH_M * math.cos(theta)), 0.16, "moving")
        canvas.disc((0.0, 0.0), 0.05, "body")
        return canvas.picture()


def wrap_angle_rad(angle: Tensor) -> Tensor:
    """The same angle in [-pi, pi), any shape."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
