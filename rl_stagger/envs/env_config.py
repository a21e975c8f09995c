"""Settings of ours in an env config of dataclasses, dicts and lists, as mjlab and Isaac Lab have them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Mapping

from rl_stagger.errors import ConfigError, nearest

_OWN_FIELDS = ("overrides.seed", "overrides.auto_reset", "overrides.compute_final_obs", "overrides.scene.num_envs")


def override(cfg: Any, overrides: Mapping[str, Any], path: str = "overrides") -> None:
    """Write dotted paths (or nested mappings) into a simulator's config, in place. ConfigError for an unknown one.

    Items of a tuple or list go by their `name`, else by their index.
    """
    for dotted, value in overrides.items():
        name, _, rest = str(dotted).partition(".")
        inside, here = _inside(cfg), f"{path}.{name}"
        if name not in inside:
            raise ConfigError(f"{here}: the simulator's config has no '{name}' there; {nearest(name, inside)}")
        old = inside[name]
        if rest or (isinstance(value, Mapping) and _inside(old)):
            override(old, {rest: value} if rest else value, here)
        elif here in _OWN_FIELDS:
            raise ConfigError(f"{here}: num_envs, seed and the adapter itself decide that")
        elif isinstance(cfg, (list, tuple)):
            raise ConfigError(f"{here}={value}: an item of a list is not replaced as a whole; name its fields")
        else:
            value = tuple(value) if isinstance(old, tuple) else value
            cfg.update({name: value}) if isinstance(cfg, dict) else setattr(cfg, name, value)


def _inside(cfg: Any) -> Dict[str, Any]:
    """Keys of a dict, fields of a dataclass, named items of a list; nothing of anything else."""
    if isinstance(cfg, dict):
        return cfg
    if isinstance(cfg, (list, tuple)):
        items: List[Any] = [item for item in cfg if dataclasses.is_dataclass(item)]
        return {str(getattr(item, "name", index)): item for index, item in enumerate(items)}
    if dataclasses.is_dataclass(cfg):
        return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    return {}


def episode_length_s(horizon_steps: int, step_s: float) -> float:
    """Seconds that the simulators' ceil(seconds / step_s) turns into `horizon_steps` exactly."""
    if horizon_steps < 1:
        raise ConfigError(f"horizon_steps={horizon_steps}: at least 1")
    seconds = horizon_steps * step_s
    return seconds if math.ceil(seconds / step_s) == horizon_steps else seconds * (1 - 1e-9)
