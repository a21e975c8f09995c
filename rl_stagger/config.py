"""Configuration: Hydra composes it, frozen dataclasses hold it, and whatever cannot work stops here by name."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from dataclasses import dataclass, field
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from rl_stagger.algorithms.ppo import PPOConfig
from rl_stagger.envs.phase_encoding import PhaseEncodingConfig
from rl_stagger.errors import ConfigError, nearest
from rl_stagger.models.actor_critic import ModelConfig
from rl_stagger.overrides import compose
from rl_stagger.resets.config import ResetConfig, Schedule, check_schedule, value_at

T = TypeVar("T")


@dataclass(frozen=True)
class TaskConfig:
    """Which task, and its own settings."""

    name: str
    """Registered name or "module:Class"."""
    settings: Dict[str, Any] = field(default_factory=dict)
    """Handed to the task as keyword arguments."""
    label: Optional[str] = None
    """What run folders and reports call it; null: the name."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run."""

    every_iters: int = 50
    """Save after every so many iterations (and at the end); 0: only at the end."""
    keep_last: int = 3
    """How many of the newest checkpoints stay; the best by episode return stays besides."""

    def check(self) -> List[Tuple[str, object, str]]:
        faults: List[Tuple[str, object, str]] = []
        if self.every_iters < 0:
            faults.append(("every_iters", self.every_iters, "at least 0"))
        if self.keep_last < 1:
            faults.append(("keep_last", self.keep_last, "at least 1"))
        return faults


@dataclass(frozen=True)
class LoggingConfig:
    """Who is told."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """live: a table that renews itself; plain: lines; auto: live on a terminal."""
    tensorboard: bool = True
    wandb: bool = False
    """Needs the extra: pip install 'rl_stagger[wandb]'."""
    wandb_project: str = "rl_stagger"
    curves: bool = True
    """Draw curves.png at the end."""


@dataclass(frozen=True)
class Config:
    """All that scripts/train.py would run."""

    task: TaskConfig
    reset: ResetConfig = field(default_factory=ResetConfig)
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    phase_encoding: PhaseEncodingConfig = field(default_factory=PhaseEncodingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    num_envs: int = 512
    """N."""
    rollout_steps: int = 16
    """K."""
    rollout_steps_schedule: Optional[Schedule] = None
    """[[iteration, K], ...]: K from that iteration on; before the first, rollout_steps."""
    iterations: int = 200
    """In total, also after a resume."""
    seed: int = 0
    device: str = "auto"
    """auto: cuda:0 where there is one, else cpu."""
    threads: int = 1
    """Threads of torch on the CPU; more than 1 only pays for large nets."""
    precision: Literal["float32"] = "float32"
    compile: Literal["off"] = "off"
    run_dir: Optional[str] = None
    """null: runs/<task>/<reset>_seed<seed>_<time>."""
    resume: Optional[str] = None
    """null | latest | a checkpoint or a run directory."""
    run_name: Optional[str] = None
    """Part of the run directory's name; null: <reset>_seed<seed>."""

    def rollout_steps_at(self, iteration: int) -> int:
        """K of the iteration (0 for the first)."""
        return int(value_at(self.rollout_steps_schedule, iteration) or self.rollout_steps)

    @property
    def most_rollout_steps(self) -> int:
        """The largest K: what storage must hold."""
        return max([self.rollout_steps, *(int(steps) for _, steps in self.rollout_steps_schedule or ())])

    @property
    def least_rollout_steps(self) -> int:
        return min([self.rollout_steps, *(int(steps) for _, steps in self.rollout_steps_schedule or ())])

    def check(self) -> List[Tuple[str, object, str]]:
        faults: List[Tuple[str, object, str]] = []
        for name in ("num_envs", "rollout_steps", "iterations", "threads"):
            if getattr(self, name) < 1:
                faults.append((name, getattr(self, name), "at least 1"))
        if not 0 <= self.seed < 2**32:
            faults.append(("seed", self.seed, "between 0 and 2^32 - 1"))
        if self.threads > (os.cpu_count() or 1):
            faults.append(("threads", self.threads, f"at most the machine's {os.cpu_count()} processors"))
        if self.run_dir == "":
            faults.append(("run_dir", "", "a folder, or null"))
        if self.run_name is not None and not re.fullmatch(r"[\w.,=+-]+", self.run_name):
            faults.append(("run_name", self.run_name, "letters, digits and . , = + - _ only"))
        schedule = check_schedule("rollout_steps_schedule", self.rollout_steps_schedule, whole=True)
        if schedule:
            return [*faults, *schedule]
        rows, parts = self.num_envs * self.least_rollout_steps, self.algorithm.minibatches
        if parts >= 1 and rows // parts < 2 and rows >= 1:
            right = f"num_envs * rollout_steps = {rows} rows make at most {max(1, rows // 2)} minibatches of 2 or more"
            faults.append(("algorithm.minibatches", parts, right))
        return faults


def load_config(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `scripts/train.py` would run with these overrides, e.g. ["task=skill_chain", "seed=1"].

    Raises ConfigError for what is unknown, of the wrong type or impossible.
    """
    return build_config(compose(overrides))


# -- building -------------------------------------------------------------------------------------------------------
def build_config(tree: Mapping[str, Any]) -> Config:
    """Typed configuration from a plain tree; every check of every part has passed."""
    config = from_tree(Config, tree, "")
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    for prefix, part in _parts(config):
        for name, value, right in part.check():
            raise ConfigError(f"{prefix}{name}={value}: {right}")


def _parts(config: Config) -> Iterator[Tuple[str, Any]]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value) and hasattr(value, "check"):
            yield f"{f.name}.", value
    yield "", config


def to_tree(config: Any) -> Dict[str, Any]:
    """The plain tree of a configuration; `from_tree` takes it back."""
    return dataclasses.asdict(config)


def from_tree(cls: Type[T], tree: Mapping[str, Any], path: str) -> T:
    """Fill dataclass `cls` from a mapping. ConfigError names field, value and what is right."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'config'}={tree!r}: expected a group of settings")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{prefix}{key}={tree[key]!r}: there is no such setting; {nearest(str(key), fields)}")
    for name, f in fields.items():
        if name not in tree and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing")
    return cls(**{key: _value(hints[key], value, prefix + key) for key, value in tree.items()})


def _value(kind: Any, value: Any, path: str) -> Any:
    """`value` as type `kind`; whole numbers serve as floats, nothing else is converted."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union:
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        for other in kinds[:-1]:
            try:
                return _value(other, value, path)
            except ConfigError:
                continue
        return _value(kinds[-1], value, path)
    if origin is Literal:
        if isinstance(value, bool) and not any(isinstance(choice, bool) for choice in args):
            value = {True: "on", False: "off"}[value]  # YAML reads a bare off as False
        if value not in args:
            raise ConfigError(f"{path}={value}: {nearest(str(value), args)}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path}={value!r}: expected a list like [64,64]")
        items = [_value(args[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}={value!r}: expected a group of settings")
        return dict(value)
    if dataclasses.is_dataclass(kind):
        return from_tree(kind, value, path)  # type: ignore[type-var]
    return _plain(kind, value, path)


def _plain(kind: Any, value: Any, path: str) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind is float and isinstance(value, str) and re.fullmatch(r"[+-]?[\d.]+e[+-]?\d+", value, re.IGNORECASE):
        value = float(value)  # YAML 1.1 reads 1e-3 as text
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind in names and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ConfigError(f"{path}={value!r}: expected {names[kind]}")
    if kind is float and value != value:
        raise ConfigError(f"{path}=nan: expected a number")
    return value
