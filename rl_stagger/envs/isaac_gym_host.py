"""What the adapters of Isaac Gym's two families of tasks share: getting it imported, finding out how a task ends its
episodes, a random stream of its own, terrain levels."""

# pyright: reportMissingImports=false

from __future__ import annotations

import enum
import importlib
import importlib.util
import math
import random
import sys
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger import _import_order
from rl_stagger.errors import ConfigError, ContractError
from rl_stagger.rng import global_rng_state, seed_everything, set_global_rng_state

SOURCES = {
    "isaacgym": "NVIDIA's download Isaac Gym Preview 4 (developer.nvidia.com/isaac-gym): pip install -e python",
    "isaacgymenvs": "github.com/isaac-sim/IsaacGymEnvs (1.5.1): pip install -e IsaacGymEnvs",
    "legged_gym": "github.com/leggedrobotics/legged_gym, with rsl_rl v1.0.2: pip install -e legged_gym",
}
NEEDS = "It needs Python 3.6 to 3.8 (rl_stagger itself 3.8) and torch up to 2.4.1"


def import_isaac_gym(package: str) -> Any:
    """The module `package`, which builds on isaacgym. Raises ConfigError with what to do where that cannot work."""
    for name in ("isaacgym", package):
        if name in sys.modules:
            continue
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{name} is not installed. It comes from {SOURCES[name]}. {NEEDS}; this is Python {version}"
            )
        if name == "isaacgym" and _import_order.failure is not None:
            raise ConfigError(f"importing isaacgym failed: {_import_order.failure}. {NEEDS}; this is Python {version}")
        if name == "isaacgym" and "torch" in sys.modules:
            raise ConfigError(
                "isaacgym must be imported before torch, and torch is imported already. Put `import isaacgym` above "
                f"`import torch` and `import rl_stagger`, or set {_import_order.VARIABLE}=1 before Python starts; "
                "rl-stagger and scripts/*.py do so by themselves where they are given task=isaacgym/... or "
                "task=legged_gym/..."
            )
        importlib.import_module(name)
    return importlib.import_module(package)


def device_name(device: torch.device) -> str:
    """ "cpu" or "cuda:i", as Isaac Gym wants it."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def flatten(overrides: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Dotted path -> value; on a command line each dot has become a mapping.

    >>> flatten({"task": {"env.episodeLength": 9}, "task/env": "throw"})
    {'task.env.episodeLength': 9, 'task/env': 'throw'}
    """
    found: Dict[str, Any] = {}
    for name, value in overrides.items():
        inner = flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        found.update(inner)
    return found


# -- how episodes end -------------------------------------------------------------------------------------------------
class ResetStyle(enum.Enum):
    """When a task of Isaac Gym resets an environment that is done."""

    SAME_STEP = "same_step"
    """In the step that ends the episode; the observation is the next episode's first."""
    POST_PHYSICS = "post_physics"
    """In the next step, after its physics: the action moves a dead environment, the observation is a first one."""
    PRE_PHYSICS = "pre_physics"
    """In the next step, before its physics: the action, given for the dead state, is the new episode's first."""


class Ending(NamedTuple):
    """What a task did when its counter ran out."""

    style: ResetStyle
    limit: int
    """The counter's value in the step that the time limit ends, counting that step."""


MARGIN_STEPS, TRIES = 4, 3


def find_ending(advance: Callable[[], Tensor], counter: Callable[[], Tensor], longest: int) -> Optional[Ending]:
    """Try out how a task ends its episodes; None where no time limit follows the counter.

    `advance` makes one step without action and returns [N] bool, who is done. `counter` gives the task's own counter
    of steps, [N] int64, to be written in place. `longest`: `max_episode_length`; tasks end there or up to a step beside
    it. Counts as the time limit what most environments do in the same step.
    """
    advance()  # buffers say "reset" before the first step
    for _ in range(TRIES):
        begin = max(longest - MARGIN_STEPS, 1)
        counter().fill_(begin)
        alive = torch.ones_like(counter(), dtype=torch.bool)
        for steps in range(1, 2 * MARGIN_STEPS + 1):
            done = advance()
            ended, alive = done & alive, alive & ~done
            if 2 * int(ended.sum()) > len(ended) and begin + steps >= longest - 1:
                return Ending(_style(advance, counter, ended), begin + steps)
        advance()
    return None


def _style(advance: Callable[[], Tensor], counter: Callable[[], Tensor], ended: Tensor) -> ResetStyle:
    if int(counter()[ended].median()) == 0:
        return ResetStyle.SAME_STEP
    advance()
    begun = int(counter()[ended].median())
    if begun not in (0, 1):
        raise ContractError(
            f"progress_buf is {begun} one step after a time limit; a task of Isaac Gym starts an episode with 0 or 1"
        )
    return ResetStyle.PRE_PHYSICS if begun else ResetStyle.POST_PHYSICS


# -- random numbers ---------------------------------------------------------------------------------------------------
class OwnRandomness:
    """Isaac Gym's tasks draw from the global generators of torch, NumPy and Python. Inside `inside()` these are a
    stream of our own; outside they are as if nothing had been drawn."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._own: Tuple[Any, ...] = ()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        outer = self._read()
        seed_everything(seed)
        self._own = self._read()
        self._write(outer)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The own stream in place, no gradients, and no inference tensors left in the task's buffers."""
        outer = self._read()
        self._write(self._own)
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self._own = self._read()
            self._write(outer)

    def state_dict(self) -> Dict[str, Any]:
        with self.inside():
            return global_rng_state()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        with self.inside():
            set_global_rng_state(state)

    def _read(self) -> Tuple[Any, ...]:
        import numpy as np

        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda  # noqa: NPY002  (the tasks' own)

    def _write(self, state: Tuple[Any, ...]) -> None:
        import numpy as np

        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        torch.set_rng_state(state[2])
        if state[3] is not None:
            torch.cuda.set_rng_state(state[3], self._device)


# -- terrain ----------------------------------------------------------------------------------------------------------
class Terrain:
    """Levels of difficulty of a task that has `terrain_levels`, `terrain_types` ([N] int64 each), `terrain_origins`
    ([levels, types, 3]) and `env_origins` ([N, 3]). A new level counts from an environment's next reset on."""

    def __init__(self, task: Any) -> None:
        self._task = task
        names = ("terrain_levels", "terrain_types", "terrain_origins", "env_origins")
        self.present = all(isinstance(getattr(task, name, None), Tensor) for name in names)

    @property
    def num_levels(self) -> int:
        return len(self._task.terrain_origins) if self.present else 0

    def state_dict(self) -> Dict[str, Tensor]:
        if not self.present:
            return {}
        return {"levels": self._task.terrain_levels.clone(), "types": self._task.terrain_types.clone()}

    def load_state_dict(self, state: Dict[str, Tensor]) -> None:
        """Take over levels, whatever the number of environments: rows are in order of terrain type."""
        if not self.present or not state:
            return
        count, device = len(self._task.terrain_levels), self._task.terrain_levels.device
        like = torch.arange(count) * len(state["levels"]) // count
        self.place(state["levels"][like.to(state["levels"].device)].to(device), state["types"][like].to(device))

    def set_level(self, level: int) -> None:
        self.place(torch.full_like(self._task.terrain_levels, level), self._task.terrain_types.clone())

    def place(self, levels: Tensor, types: Tensor) -> None:
        task = self._task
        task.terrain_levels.copy_(levels)
        task.terrain_types.copy_(types)
        task.env_origins.copy_(task.terrain_origins[task.terrain_levels, task.terrain_types])


# -- what tasks report ------------------------------------------------------------------------------------------------
def log_of(extras: Dict[str, Any], done: Tensor) -> Dict[str, Any]:
    """Numbers in `extras`, under their names. "episode" keeps its old numbers until somebody resets again: NaN, no
    event, in steps in which nobody of `done` [N] was."""
    found: Dict[str, Any] = {}
    for name, value in {**extras, **extras.get("scalars", {})}.items():
        if _is_number(value):
            found[name] = value.clone() if isinstance(value, Tensor) else value
    for name, value in extras.get("episode", {}).items():
        if _is_number(value):
            x = torch.as_tensor(value, dtype=torch.float32, device=done.device)
            found[name] = torch.where(done.any(), x, math.nan)
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
