"""The environment contract. Whoever brings a simulator reads this file first.

Shapes: N environments, A action numbers. Everything per step is [N, ...] on `env.device`.
Index rule: what `step` returns belongs to the transition that left the observation it was given the action for;
only `Step.obs` already belongs to the next one.
"""

from __future__ import annotations

import abc
import enum
import math
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.errors import CapabilityError, ConfigError, ContractError, nearest

Obs = Dict[str, Tensor]
"""Observation group -> [N, ...]. "policy" is always there; "critic" where the critic sees something else. More groups
for the one and the other are called "policy/<name>" and "critic/<name>"; groups of other names no net reads."""

Bound = Union[float, Sequence[float], None]


@dataclass(frozen=True)
class Box:
    """`size` real numbers. Bounds are a number for all, one number each, or None (unbounded on that side)."""

    size: int
    low: Bound = None
    high: Bound = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Box.size={self.size}: an action needs at least one number")
        for name, bound in (("low", self.low), ("high", self.high)):
            if isinstance(bound, (list, tuple)) and len(bound) != self.size:
                raise ValueError(f"Box.{name} has {len(bound)} numbers, size is {self.size}")

    @property
    def bounded(self) -> bool:
        """True when both sides have finite bounds."""
        return _finite(self.low) and _finite(self.high)

    def bounds(self, device: Union[torch.device, str]) -> Tuple[Tensor, Tensor]:
        """(low, high), each [A] float32; -inf and +inf where unbounded."""
        low = _bound_tensor(self.low, -float("inf"), self.size, device)
        high = _bound_tensor(self.high, float("inf"), self.size, device)
        return low, high


@dataclass(frozen=True)
class Discrete:
    """One of `n` choices; actions are [N] int64."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"Discrete.n={self.n}: a choice needs at least two options")


ActionSpec = Union[Box, Discrete]


@dataclass(frozen=True)
class EnvSpec:
    """What a policy must know before the first step."""

    obs_shapes: Dict[str, Tuple[int, ...]]
    """Group -> shape of one environment's observation. "policy" always, "critic" where it differs."""
    action: ActionSpec
    horizon_steps: Optional[int]
    """H, the time limit in env steps; None = no time limit."""
    phase_columns: Dict[str, int] = field(default_factory=dict)
    """Group -> how many of its last columns encode the phase (see envs/phase_encoding.py)."""
    obs_dtypes: Dict[str, torch.dtype] = field(default_factory=dict)
    """Group -> torch.uint8 or torch.float32; groups that are not named here are float32. An image is a group
    (C, H, W), as a rule of uint8, which scales its 0 to 255 to 0 to 1 for the nets."""

    def __post_init__(self) -> None:
        if "policy" not in self.obs_shapes:
            raise ValueError(f"EnvSpec.obs_shapes has groups {sorted(self.obs_shapes)}; the group 'policy' is required")
        horizon = self.horizon_steps
        if horizon is not None and (not isinstance(horizon, int) or horizon < 1):
            raise ValueError(
                f"EnvSpec.horizon_steps={horizon}: a whole number of at least 1, or None for no time limit"
            )
        for name, dtype in self.obs_dtypes.items():
            if name not in self.obs_shapes:
                raise ValueError(f"EnvSpec.obs_dtypes: there is no group '{name}'; {nearest(name, self.obs_shapes)}")
            if dtype not in (torch.float32, torch.uint8):
                raise ValueError(f"EnvSpec.obs_dtypes['{name}']={dtype}: torch.float32 or torch.uint8")

    def obs_dtype(self, group: str) -> torch.dtype:
        """torch.float32 or torch.uint8."""
        return self.obs_dtypes.get(group, torch.float32)

    @property
    def actor_groups(self) -> Tuple[str, ...]:
        """What the actor reads: "policy" and every "policy/<name>", in the order of `obs_shapes`."""
        return self._groups_of("policy")

    @property
    def critic_groups(self) -> Tuple[str, ...]:
        """What the critic reads: "critic" and every "critic/<name>" where there are any, else what the actor reads."""
        return self._groups_of("critic") or self.actor_groups

    def _groups_of(self, role: str) -> Tuple[str, ...]:
        return tuple(name for name in self.obs_shapes if name == role or name.startswith(f"{role}/"))


@dataclass
class Step:
    """What one step of all N environments returned. No tensor here is written again by the environment."""

    obs: Obs
    """[N, ...], of the next state; after the reset where one happened."""
    reward: Tensor
    """[N] float32."""
    terminated: Tensor
    """[N] bool: the MDP ended (fell, failed, succeeded); no future value."""
    truncated: Tensor
    """[N] bool: cut off by the time limit or a reset rule; the last state's value counts."""
    final_obs: Optional[Obs]
    """[N, ...], the state in which the episode ended, before the reset; rows valid where done. None: not to be had."""
    valid: Tensor
    """[N] bool; False = a dummy or frozen step, which enters nothing."""
    info: Dict[str, Any] = field(default_factory=dict)
    """"log": name -> scalar or [N] tensor (NaN = no event in this row). "success": [N] bool, read where done, if the
    task knows it. "cut": [N] bool, episodes that a reset rule ended early (counted as partial). "reset": [N] bool, rows
    that were started anew in this step (else: those done). "frozen": [N] bool, rows that a gate keeps waiting."""

    @property
    def done(self) -> Tensor:
        """[N] bool, terminated or truncated."""
        return self.terminated | self.truncated


class Capability(enum.Enum):
    """What a simulator can do beyond stepping. A reset rule that needs more is refused at start."""

    PARTIAL_RESET = "partial_reset"
    """`reset(env_mask)` resets the masked rows and leaves the others untouched."""
    MANUAL_RESET = "manual_reset"
    """`set_manual_reset(True)`: done environments stay as they are until `reset(env_mask)`."""
    SET_CLOCK = "set_clock"
    """`set_elapsed_steps`."""
    SET_STATE = "set_state"
    """`get_state` and `set_state`, physics and clock."""
    FINAL_OBS = "final_obs"
    """`Step.final_obs` is given."""
    EXACT_RESUME = "exact_resume"
    """`state_dict` holds all that the next step depends on, random numbers included."""
    RENDER = "render"
    """`render`."""


class VecEnv(abc.ABC):
    """N environments stepped as one. Subclasses set the four attributes and write `reset`, `step`, `elapsed_steps`."""

    num_envs: int
    device: torch.device
    spec: EnvSpec
    capabilities: FrozenSet[Capability] = frozenset()
    difficulty_levels: int = 0
    """How many levels `set_difficulty` knows; 0 where the task has no fixed difficulties."""
    made_from: Optional[Tuple[str, Dict[str, Any]]] = None
    """(task, settings) where `make_env` built it, so that a run can say how to build it again."""

    @property
    @abc.abstractmethod
    def elapsed_steps(self) -> Tensor:
        """[N] int64, steps on each episode's clock (what the time limit looks at); a clone."""

    @property
    def phase_steps(self) -> Tensor:
        """[N] int64, how far the state really is in its episode; a clone.

        Differs from `elapsed_steps` only where somebody wrote the clock without moving the state.
        """
        return self.elapsed_steps

    def read_clocks(self) -> Tuple[Tensor, Tensor]:
        """(`phase_steps`, `elapsed_steps`), to be copied at once: perhaps the env's own, never to be written."""
        return self.phase_steps, self.elapsed_steps

    @property
    def unwrapped(self) -> VecEnv:
        """The simulator's own environment, inside whatever is wrapped around it."""
        return self

    @abc.abstractmethod
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        """Start new episodes where `env_mask` ([N] bool; None = everywhere). Returns all N observations."""

    @abc.abstractmethod
    def step(self, action: Tensor) -> Step:
        """One step of all environments. `action` is [N, A] float32 (Box) or [N] int64 (Discrete).

        Environments that are done are reset in the same step, unless manual resets were asked for.
        """

    def set_manual_reset(self, manual: bool) -> None:
        """Ask that done environments wait for `reset(env_mask)`. Raises CapabilityError where that cannot be had."""
        if manual:
            raise self.lacks(Capability.MANUAL_RESET)

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        """Write the masked rows' clocks from `steps` ([N] int64). The state does not move."""
        raise self.lacks(Capability.SET_CLOCK)

    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        """Name -> [N, ...] clones of physics and clock; rows outside the mask are unspecified."""
        raise self.lacks(Capability.SET_STATE)

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        """Write the masked rows from `state` (as `get_state` gave it). Returns all N observations."""
        raise self.lacks(Capability.SET_STATE)

    def seed(self, seed: int) -> None:
        """Re-seed what the environment draws from."""

    def set_evaluation(self, evaluating: bool) -> None:
        """Freeze curricula at the difficulty they have; the default has none to freeze."""

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        """Take over the difficulty that a training had reached from its environment's `state_dict`, whatever its N."""

    def set_difficulty(self, level: int) -> None:
        """All episodes from the next full `reset` on are this hard, 0 (easiest) to `difficulty_levels` - 1."""
        raise ConfigError(f"difficulty={level}: {type(self).__name__} has no fixed difficulties")

    def evaluation_cases(self) -> Dict[str, Tensor]:
        """Name -> [N] bool: kinds of episodes (of terrain, say) that an evaluation tells apart; {} = none."""
        return {}

    def render(self, env_index: int = 0) -> Any:
        """One picture of one environment, [height, width, 3] uint8 on the CPU."""
        raise self.lacks(Capability.RENDER)

    def state_dict(self) -> Dict[str, Any]:
        """What can be saved: tensors, numbers, strings, lists and dicts of them. Empty where nothing can be read.

        "episodes": False in it says that it holds curricula and the like, and that episodes begin anew after it.
        """
        return {}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from `state_dict`'s value."""

    def close(self) -> None:
        """Free the simulator."""

    def lacks(self, capability: Capability) -> CapabilityError:
        """The error for a missing capability, naming those that there are."""
        has = ", ".join(sorted(c.value for c in self.capabilities)) or "none"
        return CapabilityError(f"{type(self).__name__} cannot do '{capability.value}'. Its capabilities: {has}")


def check_mask(env_mask: Optional[Tensor], num_envs: int, device: torch.device) -> Tensor:
    """`env_mask` itself, or all True for None. Raises on anything but [N] bool: integers would index rows instead."""
    if env_mask is None:
        return torch.ones(num_envs, dtype=torch.bool, device=device)
    if not isinstance(env_mask, Tensor) or env_mask.dtype != torch.bool:
        kind = env_mask.dtype if isinstance(env_mask, Tensor) else type(env_mask).__name__
        raise TypeError(f"env_mask must be a bool tensor [N], got {kind}; for indices: mask[indices] = True")
    if tuple(env_mask.shape) != (num_envs,):
        raise ValueError(f"env_mask has shape {tuple(env_mask.shape)}, expected ({num_envs},)")
    return env_mask


def check_action(action: Tensor, spec: ActionSpec, num_envs: int) -> Tensor:
    """`action` if it has the shape and dtype that `spec` asks for; otherwise an error that says both."""
    if isinstance(spec, Discrete):
        if tuple(action.shape) != (num_envs,) or action.dtype != torch.int64:
            raise ValueError(f"action is {tuple(action.shape)} {action.dtype}, expected ({num_envs},) torch.int64")
    elif tuple(action.shape) != (num_envs, spec.size) or not action.is_floating_point():
        raise ValueError(f"action is {tuple(action.shape)} {action.dtype}, expected ({num_envs}, {spec.size}) float")
    return action


def check_obs(what: str, obs: Any, spec: EnvSpec, num_envs: int, device: torch.device) -> None:
    """Raise ContractError unless `obs` has every group of `spec` as [N, *shape] on `device`, of uint8 where the spec
    says so and of some float type elsewhere. Reads no values."""
    if not isinstance(obs, dict):
        raise ContractError(f"{what} is a {type(obs).__name__}, expected a dict of observation groups")
    for name, shape in spec.obs_shapes.items():
        if name not in obs:
            raise ContractError(f"{what} has groups {sorted(map(str, obs))}, the spec has '{name}' as well")
        kind = "uint8" if spec.obs_dtype(name) == torch.uint8 else "float"
        _check_tensor(f"{what}['{name}']", obs[name], (num_envs, *shape), kind, device)


def check_step(step: Any, spec: EnvSpec, num_envs: int, device: torch.device) -> None:
    """Raise ContractError for a `Step` whose fields have not the shapes, dtypes and device of the contract."""
    if not isinstance(step, Step):
        raise ContractError(f"step() returned a {type(step).__name__}, expected rl_stagger.Step")
    check_obs("Step.obs", step.obs, spec, num_envs, device)
    if step.final_obs is not None:
        check_obs("Step.final_obs", step.final_obs, spec, num_envs, device)
    _check_tensor("Step.reward", step.reward, (num_envs,), "float", device)
    for name in ("terminated", "truncated", "valid"):
        _check_tensor(f"Step.{name}", getattr(step, name), (num_envs,), "bool", device)
    if not isinstance(step.info, dict):
        raise ContractError(f"Step.info is a {type(step.info).__name__}, expected a dict")
    for name in ("success", "cut", "reset", "frozen"):
        if name in step.info:
            _check_tensor(f"Step.info['{name}']", step.info[name], (num_envs,), "bool", device)


def _check_tensor(what: str, x: Any, shape: Tuple[int, ...], kind: str, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise ContractError(f"{what} is a {type(x).__name__}, expected a tensor {list(shape)}")
    right_kind = x.is_floating_point() if kind == "float" else x.dtype == getattr(torch, kind)
    if tuple(x.shape) != shape or not right_kind or x.device.type != device.type:
        raise ContractError(
            f"{what} is {list(x.shape)} {x.dtype} on {x.device}, expected {list(shape)} {kind} on {device}"
        )


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """[N] bool -> [N, 1, ...], ready to broadcast against `like` [N, ...]."""
    return mask.reshape(mask.shape + (1,) * (like.dim() - mask.dim()))


def where_rows(mask: Tensor, chosen: Dict[str, Tensor], other: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """`chosen` in the rows of `mask` [N], `other` elsewhere, name by name; never data-dependent."""
    return {name: torch.where(expand_mask(mask, other[name]), chosen[name], other[name]) for name in other}


def _finite(bound: Bound) -> bool:
    if bound is None:
        return False
    return all(math.isfinite(x) for x in (bound if isinstance(bound, (list, tuple)) else [bound]))  # type: ignore[arg-type]


def _bound_tensor(bound: Bound, default: float, size: int, device: Union[torch.device, str]) -> Tensor:
    if bound is None:
        bound = default
    values = [float(x) for x in bound] if isinstance(bound, (list, tuple)) else [float(bound)] * size  # type: ignore[arg-type]
    return torch.tensor(values, dtype=torch.float32, device=device)
