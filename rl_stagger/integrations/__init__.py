"""Staggered resets for other people's trainers: `stagger(env, rollout_steps=...)` around the env they are given.

    env = stagger(env, rollout_steps=24)      # still of the host's own type
    OnPolicyRunner(env, cfg).learn(300)       # the host's trainer, unchanged
    env.measures()["batch/coverage"]

A host is found by the names of the environment's classes, so that no library is imported that is not loaded already.
"""

from __future__ import annotations

import importlib
from typing import Any, Optional

from rl_stagger.errors import ConfigError
from rl_stagger.integrations.base import HostActor, HostView, Rule
from rl_stagger.integrations.lookup import wrappers_of

__all__ = ["as_gymnasium", "as_rl_games", "as_rsl_rl", "as_sb3", "as_skrl", "stagger"]

_HOSTS = (
    ("isaaclab_rl", "RslRlVecEnvWrapper", "isaaclab_env"),
    ("mjlab", "RslRlVecEnvWrapper", "isaaclab_env"),
    ("rsl_rl", "VecEnv", "rsl_rl_env"),
    ("rl_games", "IVecEnv", "rl_games_env"),
    ("skrl", "Wrapper", "skrl_env"),
    ("stable_baselines3", "VecEnv", "sb3_env"),
    ("mani_skill", "ManiSkillVectorEnv", "maniskill_env"),
    ("gymnasium", "VectorEnv", "gymnasium_env"),
)
"""(package, class, module of this folder). Where several fit, the first here counts."""


def stagger(
    env: Any,
    rollout_steps: int,
    *,
    horizon_steps: Optional[int] = None,
    actor: Optional[HostActor] = None,
    **rule_settings: Any,
) -> Any:
    """`env` under a reset rule, as an environment of the same host.

    `rollout_steps`: K, the steps a trainer takes between two updates. `horizon_steps`: H, where the host's environment
    does not say its time limit. `actor`: the host's observations -> the host's actions, for the warm-up; None: random
    actions. `rule_settings`: what `rl_stagger.StaggeredResets` takes (allocation, bring_up, num_groups, seed, ...).

    The bring-up takes place when the trainer first resets or looks at the environment. Raises ConfigError for an
    unknown kind of environment or setting, CapabilityError where the host cannot do what the rule needs.
    """
    rule = Rule(rollout_steps, horizon_steps, actor, rule_settings)
    if isinstance(env, HostView):
        if env.stagger is not None:
            raise ConfigError(f"env={type(env).__name__}: it is staggered already ({env.stagger.describe()})")
        return env.restaggered(rule)
    for inner in wrappers_of(env)[1:]:
        if isinstance(inner, HostView) and inner.stagger is not None:
            raise ConfigError(
                f"env={type(env).__name__}: what it wraps is staggered already ({inner.stagger.describe()})"
            )
    classes = [(cls.__module__.split(".")[0], cls.__name__) for cls in type(env).__mro__]
    for package, name, module in _HOSTS:
        if (package, name) in classes:
            return importlib.import_module(f"{__name__}.{module}").stagger_host(env, rule)
    known = ", ".join(f"{package}'s {name}" for package, name, _ in _HOSTS)
    raise ConfigError(
        f"env={type(env).__module__}.{type(env).__name__}: not an environment of a known host. Known: {known}. One of "
        "our own (VecEnv) becomes one by as_rsl_rl, as_rl_games, as_skrl, as_sb3 or as_gymnasium"
    )


def as_rsl_rl(env: Any, **options: Any) -> Any:
    """One of our own `VecEnv`s as rsl_rl's `VecEnv`."""
    from rl_stagger.integrations.rsl_rl_env import RslRlView

    return RslRlView(env, **options)


def as_rl_games(env: Any, **options: Any) -> Any:
    """One of our own `VecEnv`s as rl_games' `IVecEnv`."""
    from rl_stagger.integrations.rl_games_env import RlGamesView

    return RlGamesView(env, **options)


def as_skrl(env: Any, **options: Any) -> Any:
    """One of our own `VecEnv`s as an environment that skrl's trainers take."""
    from rl_stagger.integrations.skrl_env import SkrlView

    return SkrlView(env, **options)


def as_sb3(env: Any, **options: Any) -> Any:
    """One of our own `VecEnv`s as stable-baselines3's `VecEnv`."""
    from rl_stagger.integrations.sb3_env import Sb3View

    return Sb3View(env, **options)


def as_gymnasium(env: Any, **options: Any) -> Any:
    """One of our own `VecEnv`s as a Gymnasium `VectorEnv` with SAME_STEP autoreset."""
    from rl_stagger.integrations.gymnasium_env import GymnasiumView

    return GymnasiumView(env, **options)
