"""The state of ManiSkill's episodes: what its own `get_state_dict` has, and what that leaves out.

`get_state_dict` has poses and velocities of actors and articulations. The clock, what controllers remember (targets)
and what a task keeps in tensors of its own [N, ...] are added here. What nobody can read is PhysX's memory of contacts:
a replay from a written state differs by some 1e-6 in positions, and by 1e-5 after some steps in contact.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import expand_mask

_NOT_TASK_STATE = ("_elapsed_steps", "_last_obs", "_init_raw_obs", "_init_raw_state")


def read_state(base: Any) -> Dict[str, Tensor]:
    """Name -> [N, ...] clone, all of `base`."""
    state = {name: x.clone() for name, x in _flat(base.get_state_dict(), "") if not name.startswith("controller/")}
    state.update({name: x.clone() for name, x in _memory(base)})
    state["elapsed_steps"] = base.elapsed_steps.to(torch.int64, copy=True)
    return state


def write_state(base: Any, state: Dict[str, Tensor], env_mask: Tensor) -> None:
    """Write the rows of `env_mask` [N] from `state`, as `read_state` gave it."""
    current = read_state(base)
    # Memory that a controller or a task begins to keep in its first step, a state from before has not.
    missing = sorted(name for name in set(current) - set(state) if not name.startswith(("controller/", "task/")))
    if missing:
        raise ValueError(f"state: '{missing[0]}' is missing; it has {', '.join(sorted(state))}")
    mask = env_mask.to(base.device)
    rows = {
        name: torch.where(expand_mask(mask, old), state[name].to(old.device, old.dtype), old)
        for name, old in current.items()
        if name in state
    }
    base.set_state_dict(
        _nested({name: x for name, x in rows.items() if name.startswith(("actors/", "articulations/"))})
    )
    for name, tensor in _memory(base):
        if name in rows:
            tensor.copy_(rows[name])
    base.elapsed_steps.copy_(rows["elapsed_steps"])


def controller_memory(base: Any) -> List[Tuple[str, Tensor]]:
    """(name, tensor [N, ...] itself) of all that the controllers remember from step to step."""
    agent = getattr(base, "agent", None)
    if agent is None:
        return []
    controllers = agent.controller if isinstance(agent.controller, dict) else {"agent": agent.controller}
    open_: List[Tuple[str, Any]] = list(controllers.items())
    found: List[Tuple[str, Tensor]] = []
    while open_:
        path, controller = open_.pop()
        open_ += [(f"{path}.{name}", inner) for name, inner in getattr(controller, "controllers", {}).items()]
        found += _rows(vars(controller), f"controller/{path}.", base.num_envs)
    return found


def _memory(base: Any) -> List[Tuple[str, Tensor]]:
    task = {name: value for name, value in vars(base).items() if name not in _NOT_TASK_STATE}
    return controller_memory(base) + _rows(task, "task/", base.num_envs)


def _rows(attributes: Dict[str, Any], prefix: str, num_envs: int) -> List[Tuple[str, Tensor]]:
    """Tensors and poses [N, ...] among `attributes`."""
    found = []
    for name, value in attributes.items():
        tensor = getattr(value, "raw_pose", None) if type(value).__name__ == "Pose" else value
        if isinstance(tensor, Tensor) and tensor.dim() > 0 and len(tensor) == num_envs:
            found.append((prefix + name, tensor))
    return found


def _flat(tree: Dict[str, Any], prefix: str) -> Iterator[Tuple[str, Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _nested(flat: Dict[str, Tensor]) -> Dict[str, Dict[str, Tensor]]:
    tree: Dict[str, Dict[str, Tensor]] = {}
    for name, x in flat.items():
        kind, _, rest = name.partition("/")
        tree.setdefault(kind, {})[rest] = x
    return tree
