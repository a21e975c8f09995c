"""mjlab's task configs: loading one and writing settings into it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import sys
from typing import Any, Tuple

from rl_stagger.errors import ConfigError, nearest


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
