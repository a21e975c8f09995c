"""Gymnasium's spaces in the contract's words: observation groups, action specs, and arrays to tensors and back.

Spaces are told by the names of their classes, so nothing of Gymnasium is imported here: its own spaces, those of the
old gym and what a simulator brings of the same form all do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import ActionSpec, Box, Discrete, EnvSpec, Obs
from rl_stagger.errors import ConfigError, nearest

Key = Union[str, int]


@dataclass(frozen=True)
class ObsPart:
    """One array of an observation, and the group that it becomes."""

    group: str
    path: Tuple[Key, ...]
    """Keys from the whole observation down to the array; () where the observation is the array."""
    kind: str
    """vector: any numbers, flattened. one_hot: counts of choices. image_hwc, image_chw, image_hw: uint8 pictures."""
    shape: Tuple[int, ...]
    """Of the group."""
    choices: Tuple[int, ...] = ()
    """one_hot: how many there are of each."""
    first: Tuple[int, ...] = ()
    """one_hot: the number of each first choice."""

    def find(self, obs: Any) -> Any:
        """This array in a whole observation."""
        for key in self.path:
            obs = obs[key]
        return obs

    def tensor(self, array: Any, device: Union[torch.device, str] = "cpu") -> Tensor:
        """[N, *shape] of [N, ...]. Always a copy: simulators write into their arrays again."""
        import numpy as np

        x = np.asarray(array)
        if self.kind.startswith("image"):
            x = np.moveaxis(x, -1, 1) if self.kind == "image_hwc" else x
            x = np.array(x, dtype=np.uint8, order="C").reshape(len(x), *self.shape)
        elif self.kind == "one_hot":
            columns = x.reshape(len(x), -1) - np.asarray(self.first)
            parts = [np.eye(n, dtype=np.float32)[columns[:, i]] for i, n in enumerate(self.choices)]
            x = np.concatenate(parts, axis=1)
        else:
            x = np.array(x, dtype=np.float32, order="C").reshape(len(x), *self.shape)
        return torch.from_numpy(x).to(device)


def obs_parts(space: Any, critic_keys: Sequence[str] = ()) -> List[ObsPart]:
    """The arrays of one environment's observation space, in its order; Dict and Tuple spaces may be nested.

    One array is the group "policy". Of several, "policy" is the one of that name, else the first; the others are
    "policy/<path>". Those at "critic", "critic/..." and at `critic_keys` (paths) are groups that only the critic reads.
    A Box of uint8 with two or three axes is an image: of three, the smaller of the outer ones is that of the channels.
    Discrete numbers become one-hot, other arrays are flattened. Raises ConfigError for spaces that have no arrays.
    """
    leaves = {"/".join(str(key) for key in path): (path, leaf) for path, leaf in _leaves(space, ())}
    for key in critic_keys:
        if key not in leaves:
            raise ConfigError(f"critic_keys: the observation has no {key!r}; {nearest(key, leaves)}")
    hidden = [name for name in leaves if name in critic_keys or name.partition("/")[0] == "critic"]
    actors = [name for name in leaves if name not in hidden]
    if not actors:
        raise ConfigError(f"observation space {space}: nothing but the critic's; the actor needs an observation too")
    names = {**_group_names("policy", actors), **_group_names("critic", hidden)}
    return [_part(names[name], path, leaf) for name, (path, leaf) in leaves.items()]


def _group_names(role: str, names: Sequence[str]) -> Dict[str, str]:
    """Path -> group: `role` for the one called so, else for the first; "<role>/<path>" for the others."""
    main = role if role in names else names[0] if names else ""
    found = {name: name if name.partition("/")[0] == role else f"{role}/{name}" for name in names}
    return {**found, main: role} if names else found


def obs_of(batch: Any, parts: List[ObsPart]) -> Obs:
    """Group -> [N, ...] of a batch of N observations."""
    return {part.group: part.tensor(part.find(batch)) for part in parts}


def obs_of_rows(rows: Sequence[Any], parts: List[ObsPart]) -> Obs:
    """Group -> [N, ...] of N observations of single environments."""
    import numpy as np

    return {part.group: part.tensor(np.stack([np.asarray(part.find(row)) for row in rows])) for part in parts}


class ActionMap:
    """One environment's action space, and the contract's actions as its arrays."""

    def __init__(self, space: Any, rescale: bool = False) -> None:
        """`rescale`: a Box with finite bounds is presented as [-1, 1]. Raises ConfigError for other spaces than one
        Discrete or one Box of floats."""
        self.space, self.rescale = space, False
        kind = type(space).__name__
        self.spec: ActionSpec
        if kind == "Discrete" and int(space.n) > 1:
            self.spec = Discrete(int(space.n))
        elif kind == "Box" and space.dtype.kind == "f":
            low, high = (bound.reshape(-1).tolist() for bound in (space.low, space.high))
            self.spec = Box(len(low), _same(low), _same(high))
            if rescale and self.spec.bounded:
                self.rescale, self.spec = True, Box(len(low), -1.0, 1.0)
        else:
            raise ConfigError(
                f"action space {space}: a policy here acts in one Discrete of at least two choices or in one Box of "
                "floats; an action wrapper of the simulator's can make it one"
            )

    def array(self, action: Tensor) -> Any:
        """[N, *shape] of the space's dtype, within its bounds; the caller's tensor is left alone."""
        import numpy as np

        x = np.array(action.detach().cpu().numpy())
        if isinstance(self.spec, Discrete):
            return (x + int(getattr(self.space, "start", 0))).astype(self.space.dtype)
        x = x.reshape(len(x), *self.space.shape)
        low, high = self.space.low, self.space.high
        if self.rescale:
            x = low + (x + 1.0) * 0.5 * (high - low)
        return np.clip(x, low, high).astype(self.space.dtype)


def spec_of(parts: List[ObsPart], action: ActionSpec, horizon_steps: Optional[int]) -> EnvSpec:
    shapes = {part.group: part.shape for part in parts}
    dtypes = {part.group: torch.uint8 for part in parts if part.kind.startswith("image")}
    return EnvSpec(shapes, action, horizon_steps, obs_dtypes=dtypes)


def _leaves(space: Any, path: Tuple[Key, ...]) -> Iterator[Tuple[Tuple[Key, ...], Any]]:
    kind = type(space).__name__
    if kind == "Dict":
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif kind == "Tuple":
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, space


def _part(group: str, path: Tuple[Key, ...], space: Any) -> ObsPart:
    kind = type(space).__name__
    if kind == "Discrete":
        return ObsPart(group, path, "one_hot", (int(space.n),), (int(space.n),), (int(getattr(space, "start", 0)),))
    if kind == "MultiDiscrete":
        choices = tuple(int(n) for n in space.nvec.reshape(-1))
        start = getattr(space, "start", None)
        first = tuple(int(n) for n in start.reshape(-1)) if start is not None else (0,) * len(choices)
        return ObsPart(group, path, "one_hot", (sum(choices),), choices, first)
    if kind not in ("Box", "MultiBinary"):
        name = "/".join(str(key) for key in path)
        raise ConfigError(
            f"observation space {name + ' ' if name else ''}{space}: Box, Discrete, MultiDiscrete, MultiBinary, and "
            "Dict and Tuple of these, can be read; an observation wrapper of the simulator's can make it one"
        )
    shape = tuple(int(size) for size in space.shape)
    if kind == "Box" and str(space.dtype) == "uint8" and len(shape) in (2, 3):
        if len(shape) == 2:
            return ObsPart(group, path, "image_hw", (1, *shape))
        if shape[2] <= shape[0]:
            return ObsPart(group, path, "image_hwc", (shape[2], shape[0], shape[1]))
        return ObsPart(group, path, "image_chw", shape)
    size = 1
    for length in shape:
        size *= length
    return ObsPart(group, path, "vector", (size,))


def _same(values: List[float]) -> Union[float, List[float]]:
    return values[0] if len(set(values)) == 1 else values


def infos_of_step(info: Dict[str, Any], num_envs: int) -> Dict[str, Any]:
    """`info` with what SAME_STEP put aside as `final_info`: of rows that were done, the infos of their last step in
    place of those of the reset. Arrays [N] only."""
    import numpy as np

    final = info.get("final_info")
    if not isinstance(final, dict):
        return info
    found = {name: x for name, x in info.items() if name not in ("final_info", "_final_info")}
    for name, last in final.items():
        if name.startswith("_") or not isinstance(last, np.ndarray) or last.shape != (num_envs,):
            continue
        said, now = np.asarray(final.get(f"_{name}", True)), info.get(name)
        found[name] = np.where(said, last, now) if isinstance(now, np.ndarray) else last
        found[f"_{name}"] = said | np.asarray(info.get(f"_{name}", False))
    return found


def numbers_of_infos(info: Dict[str, Any], num_envs: int) -> Dict[str, Tensor]:
    """Name -> [N] float32 of what a Gymnasium vector environment's `info` says in numbers; NaN where it said nothing.

    `info` has an array [N] for each name and, as `_<name>`, the mask of the rows that it was said of.
    """
    import numpy as np

    found: Dict[str, Tensor] = {}
    for name, value in info.items():
        if name.startswith("_") or not isinstance(value, np.ndarray) or value.shape != (num_envs,):
            continue
        if value.dtype.kind not in "iuf":
            continue
        x = value.astype(np.float32)
        said = info.get(f"_{name}")
        x[~np.isfinite(x) | (~np.asarray(said, dtype=bool) if said is not None else False)] = np.nan
        found[name] = torch.from_numpy(x)
    return found
