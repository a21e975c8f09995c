"""mjlab's task configs: loading one and writing settings into it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from typing import Any, Dict, List, Mapping, Tuple

from rl_stagger.errors import ConfigError, nearest

_OWN_FIELDS = ("overrides.seed", "overrides.auto_reset", "overrides.scene.num_envs")


def load_task(task_id: str, play: bool) -> Tuple[Any, Any]:
    """(the task's own copy of its config, mjlab's env class)."""
    try:
        import mjlab.tasks  # noqa: F401  (registers the tasks)
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import list_tasks, load_env_cfg
    except ModuleNotFoundError as error:
        raise ConfigError(f"mjlab cannot be imported ({error}): pip install 'rl_stagger[mjlab]'") from error
    if task_id not in list_tasks():
        raise ConfigError(f"task_id '{task_id}' is unknown to mjlab; {nearest(task_id, list_tasks())}")
    warp_config: Any = importlib.import_module("warp").config
    if not warp_config.quiet:  # it says a line for each of a hundred kernels
        warp_config.quiet = True
        print("mjlab: the first use of a robot compiles its kernels, for about a minute", file=sys.stderr)
    return load_env_cfg(task_id, play=play), ManagerBasedRlEnv


def override(cfg: Any, overrides: Mapping[str, Any], path: str = "overrides") -> None:
    """Write dotted paths (or nested mappings) into mjlab's config, in place. Raises ConfigError for an unknown one.

    Items of a tuple or list go by their `name`, else by their index.
    """
    for dotted, value in overrides.items():
        name, _, rest = str(dotted).partition(".")
        inside, here = _inside(cfg), f"{path}.{name}"
        if name not in inside:
            raise ConfigError(f"{here}: mjlab's config has no '{name}' there; {nearest(name, inside)}")
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
    """Seconds that mjlab's ceil(seconds / step_s) turns into `horizon_steps` exactly."""
    if horizon_steps < 1:
        raise ConfigError(f"horizon_steps={horizon_steps}: at least 1")
    seconds = horizon_steps * step_s
    return seconds if math.ceil(seconds / step_s) == horizon_steps else seconds * (1 - 1e-9)


def graded_terrain(cfg: Any) -> Any:
    """The generator of a terrain whose rows are levels of difficulty and whose columns are its types; else None."""
    generator = cfg.scene.terrain.terrain_generator if cfg.scene.terrain is not None else None
    return generator if generator is not None and generator.curriculum else None


def set_terrain_level(cfg: Any, level: int) -> None:
    """All rows of a graded terrain get the difficulty that row `level` has, the easiest being 0."""
    generator = graded_terrain(cfg)
    low, high = generator.difficulty_range
    difficulty = low + (high - low) * level / max(generator.num_rows - 1, 1)
    generator.difficulty_range = (difficulty, difficulty)
