"""Small environments, models and rollouts whose numbers can be worked out by hand, for the tests of learning and
statistics."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Discrete, EnvSpec, Obs
from rl_stagger.envs.native.base import NativeEnv, State
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.rollout import Rollout

LINEAR = ModelConfig(actor_hidden=(), critic_hidden=(), normalize_obs=False)
"""No hidden layer, no normaliser."""


class TallyEnv(NativeEnv):
    """Nothing happens but time. Observation [N, 1]: steps since the state's reset. Reward: that number, from 1.

    Environment i terminates when the state is `lengths[i]` steps old (0: never); `success` is then i % 2 == 0.
    """

    def __init__(self, num_envs: int, horizon_steps: Optional[int], lengths: Sequence[int] = (), seed: int = 0) -> None:
        super().__init__(EnvSpec({"policy": (1,)}, Box(1), horizon_steps), num_envs, "cpu", seed)
        self.lengths = torch.tensor(list(lengths) or [0] * num_envs)

    def _start(self) -> State:
        return {"age": torch.zeros(self.num_envs, dtype=torch.int64)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        age = state["age"] + 1
        terminated = (self.lengths > 0) & (age >= self.lengths)
        return {"age": age}, age.float(), terminated, {"success": torch.arange(self.num_envs) % 2 == 0}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        return {"policy": state["age"].float().unsqueeze(1)}


class Bandit(NativeEnv):
    """Two arms, one-step episodes: arm 1 pays 1, arm 0 nothing."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(EnvSpec({"policy": (1,)}, Discrete(2), None), num_envs, device, seed)

    def _start(self) -> State:
        return {"x": torch.ones(self.num_envs)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        return state, action.float(), torch.ones(self.num_envs, dtype=torch.bool), {}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        return {"policy": state["x"].unsqueeze(1).clone()}


class Target(NativeEnv):
    """One-step episodes: the best action is half the observation, a random number in [-1, 1). Reward -(a - x / 2)^2."""

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        super().__init__(EnvSpec({"policy": (1,)}, Box(1, -1.0, 1.0), None), num_envs, "cpu", seed)

    def _start(self) -> State:
        return {"x": self._rand() * 2 - 1}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        reward = -(action[:, 0] - 0.5 * state["x"]).square()
        return state, reward, torch.ones(self.num_envs, dtype=torch.bool), {}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        return {"policy": state["x"].unsqueeze(1).clone()}


class BigObs(NativeEnv):
    """A drifting state of size 6, shown times 50 and shifted by 100, so that a normaliser has much to do."""

    def __init__(self, num_envs: int, horizon_steps: int = 7, seed: int = 0) -> None:
        super().__init__(EnvSpec({"policy": (6,)}, Box(2, -1.0, 1.0), horizon_steps), num_envs, "cpu", seed)

    def _start(self) -> State:
        return {"x": self._randn(6)}

    def _advance(self, state: State, action: Tensor, elapsed: Tensor) -> Tuple[State, Tensor, Tensor, Dict[str, Any]]:
        x = state["x"] + 0.1 * action.sum(1, keepdim=True)
        return {"x": x}, -x[:, 0].square(), torch.zeros(self.num_envs, dtype=torch.bool), {}

    def _observe(self, state: State, elapsed: Tensor) -> Obs:
        return {"policy": 100.0 + 50.0 * state["x"]}


def scalar_model(action: Any = None) -> ActorCritic:
    """One observed number x: the value is V(x) = x, the actor's output 0 (+ its bias 0)."""
    model = ActorCritic(EnvSpec({"policy": (1,)}, action or Box(1), None), LINEAR)
    with torch.no_grad():
        model.critic[0].weight.fill_(1.0)
        model.actor[0].weight.zero_()
    return model


def empty_rollout(steps: int, num_envs: int, spec: Optional[EnvSpec] = None, keep_final_obs: bool = True) -> Rollout:
    """A rollout of one observed and one acted number, all zero, every row valid."""
    spec = spec or EnvSpec({"policy": (1,)}, Box(1), None)
    num_params = spec.action.n if isinstance(spec.action, Discrete) else spec.action.size
    rollout = Rollout(steps, num_envs, spec, num_params, keep_final_obs, torch.device("cpu"))
    rollout.valid.fill_(True)
    return rollout


def flags(steps: int, num_envs: int, *true_at: Tuple[int, int]) -> Tensor:
    """[K, N] bool, True at the given (t, env)."""
    mask = torch.zeros(steps, num_envs, dtype=torch.bool)
    for t, env in true_at:
        mask[t, env] = True
    return mask
