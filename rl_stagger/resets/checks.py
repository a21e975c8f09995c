"""What a reset rule and an environment cannot do together, refused at start with what would be right."""

from __future__ import annotations

from typing import AbstractSet

from rl_stagger.envs.base import Capability, VecEnv
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.resets.allocation import default_num_groups
from rl_stagger.resets.bring_up import BRING_UPS
from rl_stagger.resets.config import ResetConfig
from rl_stagger.resets.density import density_over, first_share
from rl_stagger.resets.gates import GATES
from rl_stagger.resets.upkeep import REQUIRES as UPKEEP_REQUIRES


def check_sizes(config: ResetConfig, env: VecEnv, rollout_steps: int, total_envs: int) -> int:
    """N_B in force; 1 where nothing is spread."""
    horizon = env.spec.horizon_steps
    if not isinstance(rollout_steps, int) or rollout_steps < 1:
        raise ConfigError(f"rollout_steps={rollout_steps}: at least 1, a whole number")
    interval = config.gate_interval_steps or rollout_steps
    if config.gate == "block" and horizon is not None and interval > horizon:
        name = "reset.gate_interval_steps" if config.gate_interval_steps else "rollout_steps"
        raise ConfigError(
            f"{name}={interval}: a gate every so many steps, but an episode lasts H={horizon} steps at most, all "
            f"environments would wait at a closed gate; use at most {horizon}"
        )
    later = [*(config.num_groups_schedule or ()), *(config.num_groups_by_return or ())]
    part = "bring_up" if config.bring_up != "none" else "upkeep"
    chosen = config.bring_up if config.bring_up != "none" else config.upkeep_in_force
    if chosen == "none" and later:
        part, chosen = "num_groups_schedule", [list(pair) for pair in later]
    elif chosen == "none":
        return 1
    if horizon is None:
        raise ConfigError(
            f"reset.{part}={chosen!r}: this task has no time limit to spread over; give it a horizon_steps "
            "or use reset.bring_up=none (reset=synchronous)"
        )
    if horizon <= rollout_steps:
        raise ConfigError(
            f"rollout_steps={rollout_steps}: a rollout already holds the whole horizon H={horizon}, there is nothing "
            f"to stagger; use rollout_steps < {horizon} or reset=synchronous"
        )
    for groups in [config.num_groups or 1, *(int(value) for _, value in later)]:
        if groups > horizon:
            raise ConfigError(f"reset.num_groups={groups}: at most one group a step, H={horizon}")
    return min(config.num_groups or default_num_groups(horizon, rollout_steps), total_envs)


def check_density(config: ResetConfig, horizon_steps: int) -> None:
    """Raise ConfigError for a density that is none over this horizon, or over a part of it that is scheduled."""
    if config.density is None:
        return
    try:
        density = density_over(config.density, horizon_steps)
        for _, share in config.horizon_share_schedule or ():
            first_share(density, share)
    except ValueError as error:
        raise ConfigError(f"reset.density={config.density!r}, over H={horizon_steps} steps: {error}") from error


def check_capabilities(env: VecEnv, config: ResetConfig) -> None:
    """Refuse what the simulator cannot do, naming what it can."""
    for part, chosen, table in (("bring_up", config.bring_up, BRING_UPS), ("gate", config.gate, GATES)):
        missing = table[chosen].requires - env.capabilities  # type: ignore[attr-defined]
        if missing:
            can = ", ".join(n for n, kind in table.items() if kind.requires <= env.capabilities)  # type: ignore[attr-defined]
            raise _refusal(env, f"{part}={chosen!r}", missing, can)
    schedules = config.num_groups_schedule or config.num_groups_by_return
    if config.upkeep_in_force != "none" or schedules:
        missing = UPKEEP_REQUIRES - env.capabilities
        if missing:
            what = f"upkeep={config.upkeep_in_force!r}" if not schedules else "num_groups_schedule"
            raise _refusal(env, what, missing, "upkeep none, without schedules")
    if config.upkeep_by == "snapshot" and Capability.SET_STATE not in env.capabilities:
        raise _refusal(env, "upkeep_by='snapshot'", {Capability.SET_STATE}, "cut")


def _refusal(env: VecEnv, what: str, missing: AbstractSet[Capability], possible: str) -> CapabilityError:
    lacks = ", ".join(sorted(c.value for c in missing))
    return CapabilityError(
        f"reset.{what} needs '{lacks}', which {type(env.unwrapped).__name__} does not have; possible here: {possible}"
    )
