"""Names of tasks and how to build them. Simulators are imported only when one of their tasks is made."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable, Dict, List, Optional, Union

import torch

from rl_stagger.envs.base import VecEnv
from rl_stagger.errors import ConfigError, nearest

_TASKS: Dict[str, str] = {
    "skill_chain": "rl_stagger.envs.native.skill_chain:SkillChain",
    "stage_gridworld": "rl_stagger.envs.native.stage_gridworld:StageGridworld",
    "cartpole_swingup": "rl_stagger.envs.native.cartpole_swingup:CartpoleSwingup",
    "pendulum": "rl_stagger.envs.native.pendulum:Pendulum",
    "point_reach": "rl_stagger.envs.native.point_reach:PointReach",
    "legged_bench": "rl_stagger.envs.native.legged_bench:LeggedBench",
    "mjlab": "rl_stagger.envs.mjlab:MjlabEnv",
}


def register_task(name: str, where: str) -> None:
    """Make `name` known to `make_env` and `task=`; `where` is "module:Class". A taken name is refused."""
    if name in _TASKS and _TASKS[name] != where:
        raise ConfigError(f"task '{name}' is registered already, as {_TASKS[name]}")
    _TASKS[name] = where


def task_names() -> List[str]:
    return sorted(_TASKS)


def entry_point(task: str) -> Optional[str]:
    """The "module:Class" of a registered name; None for others."""
    return _TASKS.get(task)


def make_env(
    task: str, num_envs: int, device: Union[torch.device, str] = "cpu", seed: int = 0, **settings: Any
) -> VecEnv:
    """Build a task by its registered name or "module:Class".

    `settings` are the task's own (see its class). Raises ConfigError for an unknown task or setting.
    """
    factory = _load(task)
    try:
        accepted = inspect.signature(factory).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    except (TypeError, ValueError):
        accepted, takes_any = {}, True
    needed = [name for name in ("num_envs", "device", "seed") if name not in accepted and not takes_any]
    if needed:
        raise ConfigError(f"task '{task}' does not accept '{needed[0]}'; make_env hands over num_envs, device and seed")
    unknown = [name for name in settings if name not in accepted]
    if unknown and not takes_any:
        raise ConfigError(
            f"task '{task}' has no setting '{unknown[0]}' (value {settings[unknown[0]]!r}); "
            + nearest(unknown[0], set(accepted) - {"num_envs", "device", "seed"})
        )
    env = factory(num_envs=num_envs, device=device, seed=seed, **settings)
    if not isinstance(env, VecEnv):
        raise ConfigError(f"task '{task}' gave a {type(env).__name__}, which is not an rl_stagger VecEnv")
    missing = [name for name in ("num_envs", "device", "spec") if not hasattr(env, name)]
    if missing:
        raise ConfigError(f"task '{task}': its environment has no attribute '{missing[0]}' (see envs/base.py)")
    env.made_from = (task, dict(settings))
    return env


def _load(task: str) -> Callable[..., Any]:
    where = _TASKS.get(task, task)
    if ":" not in where:
        raise ConfigError(f"task '{task}' is unknown; {nearest(task, _TASKS)}; or give 'module:Class'")
    module_name, _, attribute = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"task '{task}': there is no module '{module_name}'") from error
        raise
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"task '{task}': '{module_name}' has no '{attribute}'; {nearest(attribute, names)}") from None
