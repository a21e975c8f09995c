"""rl_stagger: PPO for massively parallel simulators, with staggered resets."""

from __future__ import annotations

__version__ = "0.1.0"

from rl_stagger import _import_order  # noqa: F401  (first: Isaac Gym, where it is wanted, before torch)
from rl_stagger.algorithms.gae import gae
from rl_stagger.config import Config, load_config
from rl_stagger.envs.base import Box, Capability, Discrete, EnvSpec, Step, VecEnv
from rl_stagger.envs.phase_encoding import PhaseEncoding, PhaseEncodingConfig
from rl_stagger.envs.registry import make_env, register_task
from rl_stagger.errors import CapabilityError, CheckpointError, ConfigError, ContractError, NonFiniteError
from rl_stagger.policy import load_policy
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.runner import Runner, RunResult

__all__ = [
    "Box",
    "Capability",
    "CapabilityError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "ContractError",
    "Discrete",
    "EnvSpec",
    "NonFiniteError",
    "PhaseEncoding",
    "PhaseEncodingConfig",
    "RunResult",
    "Runner",
    "StaggeredResets",
    "Step",
    "VecEnv",
    "gae",
    "load_config",
    "load_policy",
    "make_env",
    "register_task",
]
