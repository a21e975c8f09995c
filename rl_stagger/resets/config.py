"""Settings of a reset rule, and everything about them that can be judged without an environment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, Union

from rl_stagger.errors import ConfigError, nearest
from rl_stagger.resets.adaptive import AdaptiveConfig
from rl_stagger.resets.allocation import ALLOCATIONS
from rl_stagger.resets.bring_up import BRING_UPS
from rl_stagger.resets.density import density_over
from rl_stagger.resets.gates import GATES
from rl_stagger.resets.upkeep import UPKEEPS

Schedule = Tuple[Tuple[float, ...], ...]
"""((from, value), ...), `from` rising: what is in force from an iteration, or from a performance, on."""


@dataclass(frozen=True)
class LibraryConfig:
    """Recorded states, for bring_up=snapshot and for upkeep where states can be set."""

    mib: float = 16.0
    """Storage on the device; checkpoints grow by as much."""
    path: Optional[str] = None
    """A run or a checkpoint of the same task, whose states this run begins with."""

    def check(self) -> List[Tuple[str, object, str]]:
        return [] if 0 < self.mib < math.inf else [("mib", self.mib, "above 0, e.g. 16")]


@dataclass(frozen=True)
class ResetConfig:
    """A reset rule by its four parts."""

    name: str = "staggered"
    """What reports call it."""
    allocation: str = "uniform"
    """uniform: groups at even distances. random: each environment on its own. mixed: groups, a share at random.
    density: by `density`. adaptive: a density that follows a learning signal."""
    num_groups: Optional[int] = None
    """N_B; null: ceil(H / K)."""
    random_share: float = 0.1
    """mixed: share of the environments at random phases."""
    density: Union[str, Tuple[float, ...], None] = None
    """density: weights of equal parts of the horizon, or an expression of u = phase / H, e.g. "1 + 3 * u"."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    bring_up: str = "warmup"
    """none | clock | warmup | snapshot."""
    warmup_actions: str = "policy"
    """warmup: actions of the initial policy, or random ones ("random")."""
    gate: str = "immediate"
    """immediate | block."""
    gate_interval_steps: Optional[int] = None
    """block: steps between gates; null: K."""
    gate_capacity: Union[int, str, None] = None
    """block: environments that a gate lets through; "group": ceil(N / N_B); null: all that wait."""
    upkeep: str = "auto"
    """auto | none | hold | every | on_coverage_below."""
    upkeep_every_iters: int = 50
    """every: iterations from one restoring to the next."""
    upkeep_coverage: float = 0.9
    """on_coverage_below: the bound."""
    upkeep_interval_steps: Optional[int] = None
    """hold: steps between corrections by cuts; null: 1 for a density, K for groups."""
    upkeep_by: Literal["auto", "snapshot", "cut"] = "auto"
    """How environments are moved: into recorded states, or by early cuts alone; auto: states where they can be set."""
    whole_episode_share: float = 0.02
    """Where a density is held: this share of the environments (at least one, if above 0) is never moved and plays whole
    episodes from phase 0, so that the statistics have full ones to count."""
    library: LibraryConfig = field(default_factory=LibraryConfig)
    num_groups_schedule: Optional[Schedule] = None
    """[[iteration, N_B], ...]: N_B from that iteration on."""
    num_groups_by_return: Optional[Schedule] = None
    """dynamic N_B: [[mean episode return, N_B], ...], from the first time that return is reached on."""
    horizon_share_schedule: Optional[Schedule] = None
    """Curriculum: [[iteration, share], ...]: only the first share of the horizon is played from that iteration on."""

    @property
    def holds_density(self) -> bool:
        """Whether the wanted mixture is told in phases (else by groups that keep their distances)."""
        return self.allocation in ("density", "adaptive") or self.horizon_share_schedule is not None

    @property
    def has_all_groups(self) -> bool:
        """Whether nothing asks for fewer groups than a horizon has rollouts."""
        return self.num_groups is None and self.num_groups_schedule is None and self.num_groups_by_return is None

    @property
    def upkeep_in_force(self) -> str:
        if self.upkeep != "auto":
            return self.upkeep
        return "hold" if self.holds_density else "none"

    def check(self) -> List[Tuple[str, object, str]]:
        """(field, value, what is right) of every setting that cannot work."""
        faults: List[Tuple[str, object, str]] = []
        choices: Dict[str, Any] = {
            "allocation": ALLOCATIONS,
            "bring_up": BRING_UPS,
            "gate": GATES,
            "upkeep": UPKEEPS,
            "upkeep_by": ("auto", "snapshot", "cut"),
            "warmup_actions": ("policy", "random"),
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                faults.append((name, getattr(self, name), nearest(getattr(self, name), valid)))
        for name in ("num_groups", "gate_interval_steps", "upkeep_interval_steps", "upkeep_every_iters"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                faults.append(
                    (name, value, "at least 1" + ("" if name == "upkeep_every_iters" else ", or null for the default"))
                )
        for name in ("random_share", "whole_episode_share", "upkeep_coverage"):
            if not _is_number(getattr(self, name)) or not 0.0 <= getattr(self, name) <= 1.0:
                faults.append((name, getattr(self, name), "a share between 0 and 1"))
        capacity = self.gate_capacity
        if capacity is not None and capacity != "group" and (not isinstance(capacity, int) or capacity < 1):
            faults.append(("gate_capacity", capacity, "at least 1, group, or null for all that wait"))
        faults += self._check_density()
        faults += check_schedule("num_groups_schedule", self.num_groups_schedule, whole=True)
        faults += check_schedule("num_groups_by_return", self.num_groups_by_return, whole=True)
        faults += check_schedule("horizon_share_schedule", self.horizon_share_schedule, whole=False)
        if self.num_groups_schedule is not None and self.num_groups_by_return is not None:
            faults.append(
                ("num_groups_by_return", self.num_groups_by_return, "null where num_groups_schedule is given")
            )
        states = self.bring_up == "snapshot" or self.upkeep_in_force != "none"
        if self.library.path is not None and not states:
            faults.append(
                ("library.path", self.library.path, "null, or bring_up=snapshot or an upkeep that use states")
            )
        for name, part in (("adaptive", self.adaptive), ("library", self.library)):
            faults += [(f"{name}.{key}", value, right) for key, value, right in part.check()]
        return faults

    def _check_density(self) -> List[Tuple[str, object, str]]:
        if self.allocation == "density" and self.density is None:
            return [("density", None, "allocation=density needs weights [1,2,4] or an expression like '1 + 3 * u'")]
        if self.allocation != "density" and self.density is not None:
            right = f"null, or allocation=density (reset=density); the allocation is {self.allocation}"
            return [("density", self.density, right)]
        if self.upkeep == "none" and self.allocation == "adaptive":
            return [("upkeep", "none", "auto or hold: allocation=adaptive moves environments while it trains")]
        if self.upkeep == "none" and self.horizon_share_schedule is not None:
            return [("upkeep", "none", "auto or hold: horizon_share_schedule cuts episodes")]
        if self.density is not None:
            if not isinstance(self.density, (str, tuple)) or any(
                not _is_number(w) for w in self.density if not isinstance(self.density, str)
            ):
                return [("density", self.density, "weights like [1,2,4], or an expression like '1 + 3 * u'")]
            try:
                density_over(self.density, max(1_000, len(self.density)))
            except ValueError as error:
                return [("density", self.density, str(error))]
        return []


def config_of(settings: Mapping[str, Any]) -> ResetConfig:
    """ResetConfig of keyword arguments; nested parts may be dicts, tuples lists."""
    names = {f.name for f in fields(ResetConfig)}
    parts: Dict[str, Any] = {"adaptive": AdaptiveConfig, "library": LibraryConfig}
    for key in settings:
        if key not in names:
            raise ConfigError(f"{key}={settings[key]!r}: StaggeredResets has no such setting; {nearest(key, names)}")
    built: Dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    for key, part in parts.items():
        if isinstance(built.get(key), Mapping):
            known = {f.name for f in fields(part)}
            wrong = next((name for name in built[key] if name not in known), None)
            if wrong is not None:
                raise ConfigError(f"{key}.{wrong}={built[key][wrong]!r}: no such setting; {nearest(wrong, known)}")
            built[key] = part(**built[key])
    return ResetConfig(**built)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def check_schedule(
    name: str, schedule: Optional[Sequence[Sequence[float]]], whole: bool
) -> List[Tuple[str, object, str]]:
    """Faults of a schedule of whole numbers of at least 1, or of shares above 0 and at most 1."""
    if schedule is None:
        return []
    if not isinstance(schedule, (list, tuple)) or any(not isinstance(pair, (list, tuple)) for pair in schedule):
        return [(name, schedule, "a list of pairs [from, value], e.g. [[0,4],[100,20]]")]
    shown = [list(pair) for pair in schedule]
    if not schedule or any(len(pair) != 2 or not all(_is_number(x) for x in pair) for pair in schedule):
        return [(name, shown, "a list of pairs [from, value], e.g. [[0,4],[100,20]]")]
    starts, values = [pair[0] for pair in schedule], [pair[1] for pair in schedule]
    if any(b <= a for a, b in zip(starts, starts[1:])):
        return [(name, shown, "pairs with rising first numbers")]
    if whole and any(v < 1 or v != int(v) for v in values):
        return [(name, shown, "whole numbers of at least 1 as second numbers")]
    if not whole and any(not 0.0 < v <= 1.0 for v in values):
        return [(name, shown, "shares of the horizon above 0 and at most 1 as second numbers")]
    return []


def value_at(schedule: Optional[Sequence[Sequence[float]]], x: float) -> Optional[float]:
    """The value in force at `x`; None before the first entry or without a schedule.

    >>> value_at([[10, 4], [20, 8]], 15)
    4
    """
    found = [pair[1] for pair in schedule or () if pair[0] <= x]
    return found[-1] if found else None
