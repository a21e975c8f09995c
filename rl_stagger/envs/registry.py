"""Names of tasks and how to build them. Simulators are imported only when one of their tasks is made."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from rl_stagger.envs.base import VecEnv
from rl_stagger.errors import ConfigError, nearest
from rl_stagger.overrides import ANY, config_dir, simulator_of_any

_TASKS: Dict[str, str] = {
    "skill_chain": "rl_stagger.envs.native.skill_chain:SkillChain",
    "stage_gridworld": "rl_stagger.envs.native.stage_gridworld:StageGridworld",
    "cartpole_swingup": "rl_stagger.envs.native.cartpole_swingup:CartpoleSwingup",
    "pendulum": "rl_stagger.envs.native.pendulum:Pendulum",
    "point_reach": "rl_stagger.envs.native.point_reach:PointReach",
    "legged_bench": "rl_stagger.envs.native.legged_bench:LeggedBench",
    "mjlab": "rl_stagger.envs.mjlab:MjlabEnv",
    "maniskill": "rl_stagger.envs.maniskill:make_maniskill",
    "gym": "rl_stagger.envs.gymnasium:GymnasiumEnv",
    "envpool": "rl_stagger.envs.envpool:EnvpoolEnv",
    "isaacgym": "rl_stagger.envs.isaac_gym:IsaacGymEnv",
    "legged_gym": "rl_stagger.envs.legged_gym:LeggedGymEnv",
    "isaaclab": "rl_stagger.envs.isaac_lab:IsaacLabEnv",
}


def register_task(name: str, where: str) -> None:
    """Make `name` known to `make_env` and `task=`; `where` is "module:Class". A taken name is refused."""
    if name in _TASKS and _TASKS[name] != where:
        raise ConfigError(f"task '{name}' is registered already, as {_TASKS[name]}")
    _TASKS[name] = where


def task_names() -> List[str]:
    return sorted(_TASKS)


def native_task_names() -> List[str]:
    """Those that need no simulator."""
    return [name for name in task_names() if _TASKS[name].startswith("rl_stagger.envs.native.")]


def entry_point(task: str) -> Optional[str]:
    """The "module:Class" of a registered name; None for others."""
    return _TASKS.get(task)


def make_env(
    task: str, num_envs: int, device: Union[torch.device, str] = "cpu", seed: int = 0, **settings: Any
) -> VecEnv:
    """Build a task by its registered name, "<simulator>/<task>" or "module:Class".

    `settings` are the task's own (see its class); those of "<simulator>/<task>" count over the ones in its file in
    configs/task. Raises ConfigError for an unknown task or setting.
    """
    task, settings = _from_file(task, settings)
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


def _from_file(task: str, settings: Dict[str, Any]) -> Tuple[str, Dict[str, Any]]:
    """(registered name, settings) of "<simulator>/<task>"; what has no slash as it is."""
    if "/" not in task or ":" in task:
        return task, settings
    from omegaconf import OmegaConf

    folder, simulator = config_dir() / "task", simulator_of_any(task)
    path = folder / (f"{task}.yaml" if simulator is None else f"{simulator}/{ANY}.yaml")
    if not path.is_file():
        files = [file.relative_to(folder).with_suffix("").as_posix() for file in folder.glob("*/**/*.yaml")]
        raise ConfigError(f"task '{task}' is unknown; {nearest(task, files)}")
    written = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(written, dict)
    in_file = {**written["task"]["settings"]}
    if simulator is not None:
        in_file["task_id"] = task[len(simulator) + 1 :]
    return written["task"]["name"], {**in_file, **settings}


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
