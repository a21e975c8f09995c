"""Small environments that show pictures."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Discrete, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State

EDGE = 8
"""Of a picture, in pixels."""


class SideOfLight(NativeEnv):
    """Grey noise with one bright pixel: is it in the left half (action 0) or in the right (action 1)? Reward 1 where
    right, and a new picture after every step. With `layout`:

    "image": the picture (1, 8, 8) uint8 is the group "policy" and all there is.
    "beside": "policy" holds two numbers that say nothing, the picture is "policy/camera".
    "critic": besides, the critic reads a picture of its own, "critic/camera", and a vector "critic".
    """

    def __init__(
        self,
        num_envs: int,
        device: Any = "cpu",
        seed: int = 0,
        layout: str = "image",
        horizon_steps: int = 5,
        noise_max: int = 160,
    ) -> None:
        image, vector = (1, EDGE, EDGE), (2,)
        shapes: Dict[str, Tuple[int, ...]] = {
            "image": {"policy": image},
            "beside": {"policy": vector, "policy/camera": image},
            "critic": {"policy": vector, "policy/camera": image, "critic": vector, "critic/camera": image},
        }[layout]
        dtypes = {name: torch.uint8 for name, shape in shapes.items() if shape == image}
        spec = EnvSpec(shapes, Discrete(2), horizon_steps, obs_dtypes=dtypes)
        super().__init__(spec, num_envs, device, seed)
        self.noise_max = noise_max

    def _start(self) -> State:
        picture = (self._rand(1, EDGE, EDGE) * self.noise_max).to(torch.uint8)
        place = (self._rand() * EDGE * EDGE).long().clamp(max=EDGE * EDGE - 1)
        bright = torch.full_like(place, 255, dtype=torch.uint8).reshape(-1, 1)
        picture = picture.flatten(1).scatter(1, place.unsqueeze(1), bright).view_as(picture)
        return {"picture": picture, "right": place % EDGE >= EDGE // 2}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        right = (action == 1) == state["right"]
        return self._start(), right.float(), torch.zeros_like(right), {"success": right}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        picture = state["picture"]
        numbers = torch.stack([elapsed, elapsed + 1], dim=1).to(torch.float32)
        return {
            name: picture.clone() if self.spec.obs_dtype(name) == torch.uint8 else numbers.clone()
            for name in self.spec.obs_shapes
        }
