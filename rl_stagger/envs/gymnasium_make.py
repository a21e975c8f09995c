"""Building Gymnasium's vector environments, and saying what is wrong where that fails."""

# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import importlib
from typing import Any, Callable, Dict, Mapping, Optional, Sequence

from rl_stagger.errors import ConfigError, nearest

PACKAGES = {
    "ALE/": ("ale_py", "ale-py"),
    "MiniGrid-": ("minigrid", "minigrid"),
    "BabyAI-": ("minigrid", "minigrid"),
    "Fetch": ("gymnasium_robotics", "gymnasium-robotics"),
    "HandManipulate": ("gymnasium_robotics", "gymnasium-robotics"),
    "AntMaze": ("gymnasium_robotics", "gymnasium-robotics"),
    "PointMaze": ("gymnasium_robotics", "gymnasium-robotics"),
    "Adroit": ("gymnasium_robotics", "gymnasium-robotics"),
    "FrankaKitchen": ("gymnasium_robotics", "gymnasium-robotics"),
    "Meta-World/": ("metaworld", "metaworld"),
}
"""Start of an id -> (module that registers it, package that has the module)."""


def make_vector_env(
    task_id: str,
    num_envs: int,
    vectorization: str,
    env_kwargs: Mapping[str, Any],
    wrappers: Sequence[str] = (),
) -> Any:
    """`gymnasium.make_vec`, with autoreset DISABLED where the mode is ours to choose. Raises ConfigError for what is
    not installed, not registered or not accepted, and says what would be."""
    gym = _import_gymnasium(task_id)
    modes = [mode.value for mode in gym.VectorizeMode]
    if vectorization not in modes:
        raise ConfigError(f"vectorization={vectorization!r}: {nearest(vectorization, modes)}")
    _register(gym, task_id)
    settings: Dict[str, Any] = {"vectorization_mode": vectorization, **env_kwargs}
    if vectorization != "vector_entry_point":
        mode = gym.vector.AutoresetMode.DISABLED
        settings.update(vector_kwargs={"autoreset_mode": mode, "copy": False}, wrappers=[_wrap(w) for w in wrappers])
        settings.setdefault("disable_env_checker", True)  # rl-stagger check looks at more than it does
    elif wrappers:
        raise ConfigError("wrappers: vectorization=vector_entry_point has no single environments to wrap; use sync")
    try:
        return gym.make_vec(task_id, num_envs, **settings)
    except (gym.error.UnregisteredEnv, gym.error.DependencyNotInstalled, gym.error.DeprecatedEnv, ImportError) as error:
        ids = [name for name in gym.registry if "/" not in name]
        known = f"; {nearest(task_id, ids)}" if isinstance(error, gym.error.UnregisteredEnv) else ""
        raise ConfigError(f"task_id={task_id!r}: {error}{known}") from error
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(f"task_id={task_id!r} with env_kwargs={dict(env_kwargs)}: {error}") from error


def check_sizes(num_envs: int, horizon_steps: Optional[int]) -> None:
    """Raise ConfigError for what cannot be built."""
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ConfigError(f"num_envs={num_envs!r}: a whole number of at least 1")
    if horizon_steps is not None and (not isinstance(horizon_steps, int) or horizon_steps < 1):
        raise ConfigError(f"horizon_steps={horizon_steps!r}: a whole number of at least 1, or null")


def _import_gymnasium(task_id: str) -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise ConfigError(f"task gym/{task_id} needs Gymnasium: pip install 'rl_stagger[gym]'") from error


def _register(gym: Any, task_id: str) -> None:
    """Import the module that registers `task_id`, where it is one of those that Gymnasium does not know by itself."""
    if task_id in gym.registry:
        return
    for start, (module, package) in PACKAGES.items():
        if task_id.startswith(start):
            try:
                gym.register_envs(importlib.import_module(module))
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"task gym/{task_id} comes with {package}, which is not installed: pip install {package}"
                ) from error


def _wrap(wrapper: str) -> Callable[[Any], Any]:
    """Environment -> wrapped environment, of "module:Class" or "module:Class(name=value, ...)"."""
    module, _, call = str(wrapper).partition(":")
    try:
        tree = ast.parse(call, mode="eval").body
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords} if isinstance(tree, ast.Call) else {}
        name = tree.func if isinstance(tree, ast.Call) and not tree.args else tree
        if not isinstance(name, ast.Name):
            raise ValueError
    except (SyntaxError, ValueError):
        right = "'module:Class' or 'module:Class(name=value, ...)' with numbers, texts, lists and the like as values"
        raise ConfigError(f"wrappers: {wrapper!r} is not {right}") from None
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"wrappers: {wrapper!r}: there is no module {module!r}") from error
    if not hasattr(found, name.id):
        raise ConfigError(f"wrappers: {module} has no {name.id!r}; {nearest(name.id, vars(found))}")
    return lambda env: getattr(found, name.id)(env, **arguments)
