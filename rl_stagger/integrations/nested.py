"""Observations and actions that a host nests in dicts, as our flat groups, and back."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Discrete, EnvSpec, Obs
from rl_stagger.errors import ConfigError

Path = Tuple[str, ...]

_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)
"""Whole numbers that a float32 holds exactly."""


class Layout:
    """How a host nests its observations, read off one of them.

    A leaf's group is its path joined by dots, its first key renamed by `roots`; without a group "policy" the first leaf
    is called so. Leaves are tensors or arrays [N, ...]; what is not a float becomes one and comes back as it was.
    """

    def __init__(self, obs: Any, roots: Optional[Mapping[str, str]] = None) -> None:
        self.leaves: Dict[str, Tuple[Path, torch.dtype]] = {}
        self.numpy = False
        for path, leaf in _leaves(obs):
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ConfigError(
                    f"observation {'.'.join(path)} is a {type(leaf).__name__}, expected tensors or arrays"
                )
            self.numpy = not isinstance(leaf, Tensor)
            parts = tuple((roots or {}).get(key, key) if i == 0 else key for i, key in enumerate(path))
            self.leaves[".".join(parts)] = (path, torch.as_tensor(leaf).dtype)
        if not self.leaves:
            raise ConfigError("the observation is empty")
        if "policy" not in self.leaves:
            names = list(self.leaves)
            self.leaves = {"policy" if name == names[0] else name: self.leaves[name] for name in names}

    def tensors(self, obs: Any) -> Obs:
        """Group -> [N, ...] float, cloned: hosts reuse their buffers."""
        found = dict(_leaves(obs))
        return {group: _as_float(torch.as_tensor(found[path]).clone()) for group, (path, _) in self.leaves.items()}

    def host(self, obs: Obs) -> Any:
        """`tensors` backwards."""
        nested: Dict[str, Any] = {}
        for group, (path, dtype) in self.leaves.items():
            leaf: Any = obs[group].to(dtype)
            leaf = leaf.cpu().numpy() if self.numpy else leaf
            if not path:
                return leaf
            at = nested
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = leaf
        return nested


def spec_of(obs: Obs, action_space: Any, horizon_steps: Optional[int]) -> EnvSpec:
    """Our spec, from one batch of observations [N, ...] and one environment's action space. An action space that we
    have no word for is a Box of its size: the host samples it itself."""
    shapes = {group: tuple(x.shape[1:]) for group, x in obs.items()}
    parts = [space for _, space in _leaves(action_space)]
    if len(parts) == 1 and type(parts[0]).__name__ == "Discrete" and int(parts[0].n) > 1:
        return EnvSpec(shapes, Discrete(int(parts[0].n)), horizon_steps)
    if len(parts) == 1 and type(parts[0]).__name__ == "Box":
        low, high = (bound.reshape(-1).tolist() for bound in (parts[0].low, parts[0].high))
        finite = [all(abs(x) < float("inf") for x in bound) for bound in (low, high)]
        return EnvSpec(shapes, Box(len(low), low if finite[0] else None, high if finite[1] else None), horizon_steps)
    sizes = [_size(space) for space in parts]
    return EnvSpec(shapes, Box(max(1, sum(sizes))), horizon_steps)


def sample_boxes(action_space: Any, num_envs: int, generator: torch.Generator) -> Any:
    """Uniform actions [N, ...] in every Box of a (nested) action space, on the generator's device, nested alike;
    standard normal where a bound is infinite."""
    if hasattr(action_space, "spaces"):
        return {key: sample_boxes(space, num_envs, generator) for key, space in action_space.spaces.items()}
    if type(action_space).__name__ != "Box":
        raise ConfigError(f"action space {action_space}: no random actions for it here; give stagger(actor=...)")
    device, shape = generator.device, (num_envs, *action_space.shape)
    low, high = (torch.as_tensor(b, dtype=torch.float32, device=device) for b in (action_space.low, action_space.high))
    within = torch.rand(shape, generator=generator, device=device)
    beyond = torch.minimum(torch.maximum(torch.randn(shape, generator=generator, device=device), low), high)
    bounded = torch.isfinite(low) & torch.isfinite(high)
    span = torch.where(bounded, high - low, 0.0)
    return torch.where(bounded, torch.where(bounded, low, 0.0) + span * within, beyond)


def _leaves(tree: Any, path: Path = ()) -> Iterator[Tuple[Path, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, path + (str(key),))
    else:
        yield path, tree


def _as_float(x: Tensor) -> Tensor:
    if x.is_floating_point():
        return x
    return x.to(torch.float32 if x.dtype in _SMALL else torch.float64)


def _size(space: Any) -> int:
    size = 1
    for length in getattr(space, "shape", None) or ():
        size *= int(length)
    return size
