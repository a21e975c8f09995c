"""stable-baselines3: `VecEnv` in NumPy. Written against 2.9.2.

Its trainer adds gamma * V(terminal_observation) where `infos[i]["TimeLimit.truncated"]`: every truncation is marked so,
the rule's own cuts included. `infos[i]["episode"]` is there for full episodes only; a VecMonitor put around counts all.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv
from torch import Tensor

from rl_stagger.envs.base import Capability, Discrete, Obs, Step, VecEnv
from rl_stagger.errors import ConfigError
from rl_stagger.integrations.base import (
    HostEnv,
    HostView,
    Rule,
    action_of_array,
    arrays_of_tensors,
    gymnasium_spaces,
    horizon_in_force,
    obs_groups,
    spec_of_spaces,
    tensors_of_arrays,
)


class FromSb3(HostEnv):
    """stable-baselines3's `VecEnv` under our contract.

    Partial resets and clocks are reached through `env_method`, in a DummyVecEnv or SubprocVecEnv. The clock is the
    TimeLimit wrapper's.
    """

    samples_actions = True

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        if isinstance(host, VecEnvWrapper):
            raise ConfigError(
                f"env={type(host).__name__}: its counts and statistics would miss the resets of the warm-up; stagger "
                "the VecEnv inside, then put the wrapper around: VecNormalize(stagger(venv, ...))"
            )
        has = {Capability.FINAL_OBS}
        limit = None
        if isinstance(host, (DummyVecEnv, SubprocVecEnv)):
            has.add(Capability.PARTIAL_RESET)
            limit = _time_limit(host)
            if limit is not None:
                has.add(Capability.SET_CLOCK)
        self.groups = obs_groups(host.observation_space)
        spec = spec_of_spaces(host.observation_space, host.action_space, horizon_in_force(horizon_steps, limit))
        super().__init__(host, host.num_envs, "cpu", spec, frozenset(has))

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        if Capability.SET_CLOCK not in self.capabilities:
            raise self.lacks(Capability.SET_CLOCK)
        new = steps.to(torch.int64)
        self.clock = new.clone() if env_mask is None else torch.where(env_mask, new, self.clock)
        for i, value in enumerate(self.clock.tolist()):
            if env_mask is None or bool(env_mask[i]):
                self.host.env_method("set_wrapper_attr", "_elapsed_steps", value, indices=[i])

    def to_host(self, obs: Obs) -> Any:
        return arrays_of_tensors(obs, self.groups)

    def sample_action(self, obs: Any) -> Any:
        space = self.host.action_space
        if self.sampling_seed:
            space.seed(self.sampling_seed)
            self.sampling_seed = 0
        return np.stack([space.sample() for _ in range(self.num_envs)])

    def _reset_all(self) -> Obs:
        self._last = tensors_of_arrays(self.host.reset(), self.groups)
        return dict(self._last)

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        rows = env_mask.nonzero().squeeze(-1).tolist()
        last = {group: x.clone() for group, x in self._last.items()}
        if rows:
            self.host.reset_infos = list(self.host.reset_infos)
            for i, (obs, info) in zip(rows, self.host.env_method("reset", indices=rows)):
                self.host.reset_infos[i] = info
                one = tensors_of_arrays(_batch(obs), self.groups)
                for group, x in one.items():
                    last[group][i] = x[0]
        self._last = last
        return dict(last)

    def _step(self, action: Any) -> Step:
        obs, reward, done, infos = self.host.step(action)
        self._last = tensors_of_arrays(obs, self.groups)
        dones = torch.as_tensor(np.asarray(done, dtype=bool))
        time_limit = torch.tensor([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        final = {group: x.clone() for group, x in self._last.items()}
        for i in np.flatnonzero(done):
            if infos[i].get("terminal_observation") is not None:
                one = tensors_of_arrays(_batch(infos[i]["terminal_observation"]), self.groups)
                for group, x in one.items():
                    final[group][i] = x[0]
        truncated = dones & time_limit
        return Step(
            dict(self._last),
            torch.as_tensor(np.asarray(reward, dtype=np.float32)).clone(),
            dones & ~truncated,
            truncated,
            final,
            torch.ones_like(dones),
            {"host": infos},
        )


class Sb3View(HostView, Sb3VecEnv):
    """An environment of ours as stable-baselines3's `VecEnv`. `action_bound` stands in for action bounds that the
    environment does not have: its algorithms need some."""

    def __init__(self, env: VecEnv, host: Any = None, action_bound: Optional[float] = None) -> None:
        self.bind(env, host)
        self.action_bound = action_bound
        if host is not None:
            obs_space, action_space = host.observation_space, host.action_space
        else:
            if action_bound is None and not isinstance(env.spec.action, Discrete) and not env.spec.action.bounded:
                raise ConfigError(
                    f"action {env.spec.action}: no bounds, which SB3 needs; as_sb3(env, action_bound=...)"
                )
            obs_space, action_space = gymnasium_spaces(env.spec, action_bound)
        self.groups = obs_groups(obs_space)
        self._start_s = time.time()
        self._sums = np.zeros(env.num_envs)
        self._lengths = np.zeros(env.num_envs, dtype=np.int64)
        Sb3VecEnv.__init__(self, env.num_envs, obs_space, action_space)

    def restaggered(self, rule: Rule, **options: Any) -> Any:
        return super().restaggered(rule, action_bound=self.action_bound, **options)

    # -- SB3's VecEnv --------------------------------------------------------------------------------------------
    def reset(self) -> Any:
        if self.host is None:
            seeds = [seed for seed in self._seeds if seed is not None]
            if seeds:
                self.vec_env.seed(int(seeds[0]))
            self._reset_seeds()
            self._reset_options()
        obs = self.view_reset()
        if self.host is not None:
            self.reset_infos = list(self.host.reset_infos)
        self._sums[:], self._lengths[:] = 0.0, 0
        return arrays_of_tensors(obs, self.groups)

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> Tuple[Any, np.ndarray, np.ndarray, List[Dict[str, Any]]]:
        action = self._actions
        if self.host is None:
            action = action_of_array(action, self.vec_env.spec, self.vec_env.device)
        step = self.view_step(action)
        reward, done = step.reward.cpu().numpy().astype(np.float32), step.done.cpu().numpy()
        infos = list(step.info["host"]) if self.host is not None else [{} for _ in range(self.num_envs)]
        self._sums += reward
        self._lengths += 1
        if done.any():
            self._end_episodes(step, done, infos)
        return arrays_of_tensors(step.obs, self.groups), reward, done, infos

    def _end_episodes(self, step: Step, done: np.ndarray, infos: List[Dict[str, Any]]) -> None:
        """Fill in `infos` of the environments that are `done` [N] bool."""
        truncated, full = step.truncated.cpu().numpy(), step.info["full"].cpu().numpy()
        final = None if step.final_obs is None else arrays_of_tensors(step.final_obs, self.groups)
        success = step.info.get("success")
        reached = None if success is None else success.cpu().numpy()
        for i in np.flatnonzero(done):
            infos[i]["TimeLimit.truncated"] = bool(truncated[i])
            if "terminal_observation" not in infos[i] and final is not None:
                infos[i]["terminal_observation"] = _row(final, i)
            if not full[i]:
                infos[i].pop("episode", None)
            elif self.host is None:
                length, spent_s = int(self._lengths[i]), round(time.time() - self._start_s, 6)
                infos[i]["episode"] = {"r": float(self._sums[i]), "l": length, "t": spent_s}
                if reached is not None:
                    infos[i]["is_success"] = bool(reached[i])
        self._sums[done], self._lengths[done] = 0.0, 0

    def close(self) -> None:
        self.vec_env.close()

    def seed(self, seed: Optional[int] = None) -> Any:
        return super().seed(seed) if self.host is None else self.host.seed(seed)

    def set_options(self, options: Any = None) -> None:
        if self.host is None:
            super().set_options(options)
        else:
            self.host.set_options(options)

    def get_attr(self, attr_name: str, indices: Any = None) -> List[Any]:
        if self.host is not None:
            return self.host.get_attr(attr_name, indices)
        if attr_name == "render_mode":
            return [None for _ in self._rows(indices)]
        return [getattr(self.vec_env, attr_name) for _ in self._rows(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        if self.host is None:
            raise ConfigError(f"set_attr('{attr_name}'): one batched environment has no attributes a row")
        self.host.set_attr(attr_name, value, indices)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> List[Any]:
        if self.host is None:
            raise ConfigError(f"env_method('{method_name}'): one batched environment has no methods a row")
        return self.host.env_method(method_name, *method_args, indices=indices, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> List[bool]:
        if self.host is None:
            return [False for _ in self._rows(indices)]
        return self.host.env_is_wrapped(wrapper_class, indices)

    def get_images(self) -> Any:
        return self.host.get_images() if self.host is not None else super().get_images()

    def _rows(self, indices: Any) -> Any:
        if indices is None:
            return range(self.vec_env.num_envs)
        return [indices] if isinstance(indices, int) else indices


def stagger_host(host: Any, rule: Rule) -> Sb3View:
    """stable-baselines3's environment under `rule`."""
    return Sb3View(rule.around(FromSb3(host, rule.horizon_steps)), host)


def _time_limit(host: Any) -> Optional[int]:
    """Steps of the TimeLimit wrapper; None where there is none, or not one for all."""
    try:
        limits = set(host.get_attr("_max_episode_steps"))
        host.get_attr("_elapsed_steps")
    except AttributeError:
        return None
    return int(limits.pop()) if len(limits) == 1 else None


def _batch(obs: Any) -> Any:
    """One environment's observation as a batch of one."""
    if isinstance(obs, dict):
        return {key: np.asarray(value)[None] for key, value in obs.items()}
    return np.asarray(obs)[None]


def _row(obs: Any, i: Any) -> Any:
    return {key: value[i].copy() for key, value in obs.items()} if isinstance(obs, dict) else obs[i].copy()
