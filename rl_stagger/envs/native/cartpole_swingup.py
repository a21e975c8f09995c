"""cartpole_swingup: swing a hanging pole up by moving its cart, then balance it in the middle of the track."""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State
from rl_stagger.envs.native.render import Canvas

GRAVITY_M_S2 = 9.81
CART_KG = 1.0
POLE_KG = 0.1
HALF_POLE_M = 0.5
STEP_DT_S = 0.02
BALANCED_COS = 0.95
"""Upright enough for `success`: cos(theta) of about 18 degrees."""


class CartpoleSwingup(NativeEnv):
    """Action [N, 1] in [-1, 1] (clipped), times `max_force_n` the force F on the cart.

    Observation "policy" [N, 5]: x in m, xdot in m/s, cos th, sin th, thdot in rad/s; th is 0 upright, pi hanging.
    Frictionless cart (M = 1 kg) with a uniform pole (m = 0.1 kg, half-length l = 0.5 m), semi-implicit Euler, 0.02 s:
    thddot = (g sin th - q cos th) / (l (4/3 - m cos^2 th / (M + m))) and xddot = q - m l thddot cos th / (M + m),
    where q = (F + m l thdot^2 sin th) / (M + m).
    Reward ((1 + cos th) / 2) * max(0, 1 - (x / track_half_m)^2), in [0, 1], of the state after the step. Terminated
    when |x| > track_half_m (reward 0). H = 500 (10 s). Success: cos th > 0.95 on each of the last `success_steps`
    steps and still on the track; log "upright" is cos th.
    """

    capabilities = NativeEnv.capabilities | {Capability.RENDER}

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: int = 500,
        max_force_n: float = 10.0,
        track_half_m: float = 2.4,
        reset_noise: float = 0.1,
        success_steps: int = 50,
    ) -> None:
        """`reset_noise`: episodes start at rest in the middle, hanging, plus uniform noise of this half-width in
        each of x (m), xdot (m/s), th (rad), thdot (rad/s)."""
        for name, value in (("max_force_n", max_force_n), ("track_half_m", track_half_m)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value}: a finite number above 0")
        if not 0.0 <= reset_noise < track_half_m:
            raise ValueError(f"reset_noise={reset_noise}: at least 0 and below track_half_m={track_half_m}")
        if not 1 <= success_steps <= horizon_steps:
            raise ValueError(f"success_steps={success_steps}: between 1 and horizon_steps={horizon_steps}")
        super().__init__(EnvSpec({"policy": (5,)}, Box(1, -1.0, 1.0), horizon_steps), num_envs, device, seed)
        self.max_force_n, self.track_half_m = max_force_n, track_half_m
        self.reset_noise, self.success_steps = reset_noise, success_steps

    def _start(self) -> State:
        noise = (self._rand(4) * 2 - 1) * self.reset_noise
        return {
            "x_m": noise[:, 0],
            "x_m_s": noise[:, 1],
            "theta_rad": noise[:, 2] + math.pi,
            "theta_rad_s": noise[:, 3],
            "balanced_steps": torch.zeros(self.num_envs, dtype=torch.int64, device=self.device),
        }

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        force_n = action[:, 0].clamp(-1.0, 1.0) * self.max_force_n
        x_acc, theta_acc = accelerations(state["theta_rad"], state["theta_rad_s"], force_n)
        x_speed = state["x_m_s"] + x_acc * STEP_DT_S
        theta_speed = state["theta_rad_s"] + theta_acc * STEP_DT_S
        x = state["x_m"] + x_speed * STEP_DT_S
        theta = state["theta_rad"] + theta_speed * STEP_DT_S
        upright = torch.cos(theta)
        reward = (0.5 + 0.5 * upright) * (1.0 - (x / self.track_half_m).square()).clamp(min=0.0)
        off_track = x.abs() > self.track_half_m
        balanced_steps = (state["balanced_steps"] + 1) * (upright > BALANCED_COS)
        after = {
            "x_m": x,
            "x_m_s": x_speed,
            "theta_rad": theta,
            "theta_rad_s": theta_speed,
            "balanced_steps": balanced_steps,
        }
        success = (balanced_steps >= self.success_steps) & ~off_track
        return after, reward, off_track, {"success": success, "log": {"upright": upright}}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        theta = state["theta_rad"]
        columns = [state["x_m"], state["x_m_s"], torch.cos(theta), torch.sin(theta), state["theta_rad_s"]]
        return {"policy": torch.stack(columns, dim=1)}

    def render(self, env_index: int = 0) -> Tensor:
        """The track from the side, [height, width, 3] uint8, 100 pixels a metre."""
        x, theta = float(self.state["x_m"][env_index]), float(self.state["theta_rad"][env_index])
        edge, tip = self.track_half_m + 0.3, 2.0 * HALF_POLE_M
        canvas = Canvas((-edge, -1.3), (edge, 1.3), 100.0)
        canvas.stroke((-self.track_half_m, 0.0), (self.track_half_m, 0.0), 0.02, "line")
        for end in (-self.track_half_m, self.track_half_m):
            canvas.stroke((end, -0.15), (end, 0.15), 0.04, "mark")
        canvas.box((x - 0.2, -0.1), (x + 0.2, 0.1), "body")
        canvas.stroke((x, 0.0), (x + tip * math.sin(theta), tip * math.cos(theta)), 0.06, "moving")
        return canvas.picture()


def accelerations(theta_rad: Tensor, theta_rad_s: Tensor, force_n: Tensor) -> Tuple[Tensor, Tensor]:
    """(xddot in m/s^2, thddot in rad/s^2), each [N], of the cart and pole under `force_n` [N]."""
    total_kg, pole_kg_m = CART_KG + POLE_KG, POLE_KG * HALF_POLE_M
    sin, cos = torch.sin(theta_rad), torch.cos(theta_rad)
    push = (force_n + pole_kg_m * theta_rad_s.square() * sin) / total_kg
    theta_acc = (GRAVITY_M_S2 * sin - push * cos) / (HALF_POLE_M * (4.0 / 3.0 - POLE_KG / total_kg * cos.square()))
    return push - pole_kg_m / total_kg * theta_acc * cos, theta_acc
