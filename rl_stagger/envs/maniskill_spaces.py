"""ManiSkill's nested observations as groups, and actions of one or several robots as one Box."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Obs
from rl_stagger.errors import ConfigError

TEXTURES = ("rgb", "depth")
_NOT_SEEN = ("sensor_data", "sensor_param")
_MILLIMETRES = 1000.0


class ObsLayout:
    """Read off one batch of observations: a tensor [N, D], or a dict with "sensor_data" (camera -> texture -> [N, H, W,
    C]) and, nested at will, vectors. Those make one vector, "policy", in ManiSkill's order."""

    def __init__(self, obs: Any) -> None:
        self.image_groups: Dict[str, torch.dtype] = {}
        """Those of uint8."""
        for _, texture, group, _ in _pictures(obs):
            if texture == "rgb":
                self.image_groups[group] = torch.uint8
        first = self.tensors(obs, "cpu")
        self.shapes: Dict[str, Tuple[int, ...]] = {group: tuple(x.shape[1:]) for group, x in first.items()}

    def tensors(self, obs: Any, device: Union[torch.device, str]) -> Obs:
        """Group -> [N, ...], copies: ManiSkill's own are written again."""
        vectors = [obs] if isinstance(obs, Tensor) else list(_vectors(obs))
        if not vectors:
            raise ConfigError("obs_mode: this task has nothing but pictures to see; add +state")
        flat = [x.reshape(len(x), -1).to(device, torch.float32) for x in vectors]
        found: Obs = {"policy": torch.cat(flat, dim=1)}  # a copy, of one tensor as well
        for _, texture, group, picture in _pictures(obs):
            x = picture.to(device).movedim(-1, 1)
            found[group] = x.contiguous().clone() if texture == "rgb" else x.to(torch.float32) / _MILLIMETRES
        return found


class ActionLayout:
    """One robot's Box, or a Dict of such in its order as one."""

    def __init__(self, space: Any) -> None:
        self._parts: List[Tuple[str, Any]] = list(space.spaces.items()) if hasattr(space, "spaces") else [("", space)]
        for name, part in self._parts:
            if type(part).__name__ != "Box" or len(part.shape) != 1:
                where = f" of robot {name}" if name else ""
                raise ConfigError(
                    f"action space {part}{where}: a Box with one axis, or a Dict of such, can be acted in"
                )
        self._one = not hasattr(space, "spaces")
        low = [float(x) for _, part in self._parts for x in part.low]
        high = [float(x) for _, part in self._parts for x in part.high]
        self.box = Box(len(low), low, high)

    def host(self, action: Tensor, device: Union[torch.device, str]) -> Any:
        """[N, A] clipped to the bounds, split by robot. The caller's tensor is left alone."""
        low, high = self.box.bounds(device)
        x = torch.minimum(torch.maximum(action.detach().to(device, torch.float32, copy=True), low), high)
        if self._one:
            return x
        sizes = [int(part.shape[0]) for _, part in self._parts]
        return {name: piece for (name, _), piece in zip(self._parts, x.split(sizes, dim=1))}


def _vectors(tree: Any) -> Iterator[Tensor]:
    """The leaves [N, ...] in order, without what cameras saw and how they stand."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key not in _NOT_SEEN:
                yield from _vectors(value)
    elif isinstance(tree, Tensor):
        yield tree


def _pictures(obs: Any) -> Iterator[Tuple[str, str, str, Tensor]]:
    """(camera, texture, group, [N, H, W, C]) of every picture."""
    if not isinstance(obs, dict):
        return
    for camera, textures in obs.get("sensor_data", {}).items():
        for texture, picture in textures.items():
            if texture not in TEXTURES:
                raise ConfigError(f"obs_mode: pictures of kind '{texture}' are not read; valid: {', '.join(TEXTURES)}")
            group = f"policy/{camera}" if texture == "rgb" else f"policy/{camera}_{texture}"
            yield camera, texture, group, picture
