"""The whole state of Gymnasium's classic control tasks, where it can be read and written exactly.

Their physics is one attribute, `state`, and their random numbers one generator, `np_random`. Other tasks keep more
than their interface shows (MuJoCo's warm starts, an emulator's memory, a wrapper's frames): for those there is no state
here.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
from torch import Tensor

_MODULES = "gymnasium.envs.classic_control."
_OBSERVE = {
    "CartPoleEnv": None,
    "MountainCarEnv": None,
    "Continuous_MountainCarEnv": None,
    "PendulumEnv": "_get_obs",
    "AcrobotEnv": "_get_ob",
}
"""Task -> the method that makes an observation of its state; None: the state is the observation."""
_STATELESS = {"OrderEnforcing", "PassiveEnvChecker", "TimeLimit"}
"""Wrappers that keep nothing between two steps, but for the clock."""


class ClassicControlState:
    """States and random numbers of the N environments in a SyncVectorEnv."""

    def __init__(self, envs: List[Any]) -> None:
        self.envs = [env.unwrapped for env in envs]

    @staticmethod
    def of(vector_env: Any) -> Optional[ClassicControlState]:
        """None unless every environment inside is one of classic control's, under none but `_STATELESS` wrappers."""
        if type(vector_env).__name__ != "SyncVectorEnv" or not all(_is_exact(env) for env in vector_env.envs):
            return None
        return ClassicControlState(vector_env.envs)

    def read(self) -> Dict[str, Tensor]:
        """ "physics" [N, D] float64; "physics_is_float32" [N] bool: what the task computes with until its next step."""
        import numpy as np

        rows = [np.asarray(env.state) for env in self.envs]
        return {
            "physics": torch.from_numpy(np.stack(rows).astype(np.float64)),
            "physics_is_float32": torch.tensor([row.dtype == np.float32 for row in rows]),
        }

    def write(self, state: Dict[str, Tensor], env_mask: Tensor) -> None:
        """Write the rows of `env_mask` ([N] bool); all tensors on the CPU."""
        import numpy as np

        for i in env_mask.nonzero().flatten().tolist():
            dtype = np.float32 if bool(state["physics_is_float32"][i]) else np.float64
            self.envs[i].state = np.array(state["physics"][i].numpy(), dtype=dtype)

    def observations(self) -> List[Any]:
        """What each environment's state looks like."""
        import numpy as np

        look = [_OBSERVE[type(env).__name__] for env in self.envs]
        return [
            np.array(env.state, dtype=np.float32) if method is None else getattr(env, method)()
            for env, method in zip(self.envs, look)
        ]

    def rng(self) -> List[Dict[str, Any]]:
        """The state of each environment's generator, in plain numbers."""
        return [env.np_random.bit_generator.state for env in self.envs]

    def set_rng(self, states: List[Dict[str, Any]]) -> None:
        for env, state in zip(self.envs, states):
            env.np_random.bit_generator.state = state


def _is_exact(env: Any) -> bool:
    while env is not env.unwrapped:
        if type(env).__name__ not in _STATELESS:
            return False
        env = env.env
    return type(env).__module__.startswith(_MODULES) and type(env).__name__ in _OBSERVE
