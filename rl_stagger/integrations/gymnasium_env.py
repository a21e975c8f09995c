"""Gymnasium's `VectorEnv` in NumPy, for CleanRL-style loops. Written against 1.4; partial resets need 1.1.

The autoreset mode that the environment declares is kept:
  SAME_STEP  a done environment is reset in the same step; `infos["final_obs"]`, mask `infos["_final_obs"]`
  NEXT_STEP  the step after a done is a reset step, whose action is ignored: the loop has to leave it out
  DISABLED   the loop resets: `reset(options={"reset_mask": done})`
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, where_rows
from rl_stagger.envs.gymnasium import autoreset_mode, horizon_of, refuse_wrappers_that_count, time_limit
from rl_stagger.errors import ConfigError
from rl_stagger.integrations.base import (
    HostEnv,
    HostView,
    Rule,
    action_of_array,
    arrays_of_tensors,
    attribute_of_host,
    gymnasium_spaces,
    horizon_in_force,
    obs_groups,
    spec_of_spaces,
    tensors_of_arrays,
)
from rl_stagger.resets.rule import StaggeredResets


class FromGymnasium(HostEnv):
    """A Gymnasium `VectorEnv` under our contract, its autoreset mode honoured.

    Partial resets go through `options["reset_mask"]`; the clock is the TimeLimit wrapper's, in a SyncVectorEnv or
    AsyncVectorEnv. In NEXT_STEP the reset step is a dummy (`Step.valid` False). In DISABLED, environments that are
    done are reset here unless manual resets were asked for.
    """

    samples_actions = True

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        self.mode = autoreset_mode(host)
        refuse_wrappers_that_count(host, "put it around: {}(stagger(...))")
        base = host.unwrapped
        has = {Capability.FINAL_OBS}
        batched = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        if batched or self.mode is AutoresetMode.DISABLED:
            has.add(Capability.PARTIAL_RESET)
        limit = time_limit(base) if batched else None
        if limit is not None:
            has.add(Capability.SET_CLOCK)
        else:
            limit = horizon_of(host)
        if self.mode is AutoresetMode.DISABLED:
            has.add(Capability.MANUAL_RESET)
        self.groups = obs_groups(host.single_observation_space)
        spec = spec_of_spaces(
            host.single_observation_space, host.single_action_space, horizon_in_force(horizon_steps, limit)
        )
        super().__init__(host, host.num_envs, "cpu", spec, frozenset(has))
        self.next_reset: Dict[str, Any] = {}
        """Seed and options of the next full reset."""
        self.reset_info: Dict[str, Any] = {}
        self.pending = torch.zeros(self.num_envs, dtype=torch.bool)
        """[N] bool: done, and not reset yet (NEXT_STEP, or manual resets)."""
        self._manual_reset = False

    def set_manual_reset(self, manual: bool) -> None:
        if manual and Capability.MANUAL_RESET not in self.capabilities:
            raise self.lacks(Capability.MANUAL_RESET)
        self._manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        if Capability.SET_CLOCK not in self.capabilities:
            raise self.lacks(Capability.SET_CLOCK)
        new = steps.to(torch.int64)
        self.clock = new.clone() if env_mask is None else torch.where(env_mask, new, self.clock)
        self.host.unwrapped.set_attr("_elapsed_steps", self.clock.tolist())

    def to_host(self, obs: Obs) -> Any:
        return arrays_of_tensors(obs, self.groups)

    def sample_action(self, obs: Any) -> Any:
        if self.sampling_seed:
            self.host.action_space.seed(self.sampling_seed)
            self.sampling_seed = 0
        return self.host.action_space.sample()

    def _reset_all(self) -> Obs:
        arguments, self.next_reset = self.next_reset, {}
        obs, self.reset_info = self.host.reset(**arguments)
        self.pending = torch.zeros_like(self.pending)
        self._last = tensors_of_arrays(obs, self.groups)
        return dict(self._last)

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        if bool(env_mask.any()):  # Gymnasium refuses an empty mask
            obs, self.reset_info = self.host.reset(options={"reset_mask": env_mask.numpy().copy()})
            self._last = where_rows(env_mask, tensors_of_arrays(obs, self.groups), self._last)
        self.pending = self.pending & ~env_mask
        return dict(self._last)

    def _step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.host.step(action)
        self._last = tensors_of_arrays(obs, self.groups)
        ended = torch.as_tensor(np.asarray(terminated, dtype=bool)).clone()
        cut_off = torch.as_tensor(np.asarray(truncated, dtype=bool)).clone() & ~ended
        valid = torch.ones_like(ended)
        final = self._last
        if self.mode is AutoresetMode.NEXT_STEP:
            valid, self.pending = ~self.pending, ended | cut_off
        elif self.mode is AutoresetMode.SAME_STEP:
            final = self._final_obs(info)
        else:
            self.pending = ended | cut_off
            if not self._manual_reset:
                self._reset_rows(self.pending)
        reward = torch.as_tensor(np.array(reward, dtype=np.float64))
        return Step(dict(self._last), reward, ended, cut_off, dict(final), valid, {"host": info})

    def _final_obs(self, info: Dict[str, Any]) -> Obs:
        """`info["final_obs"]`: one array a row, None where not done, or one batch. Our observations elsewhere."""
        given, mask = info.get("final_obs"), info.get("_final_obs")
        if given is None or mask is None:
            return self._last
        if isinstance(given, dict) or given.dtype != object:
            return where_rows(torch.as_tensor(mask), tensors_of_arrays(given, self.groups), self._last)
        final = {group: x.clone() for group, x in self._last.items()}
        for i in np.flatnonzero(mask):
            batch = {key: np.asarray(x)[None] for key, x in given[i].items()} if isinstance(given[i], dict) else None
            one = tensors_of_arrays(np.asarray(given[i])[None] if batch is None else batch, self.groups)
            for group, x in one.items():
                final[group][i] = x[0]
        return final


class GymnasiumView(HostView, VectorEnv):
    """An environment of ours as a Gymnasium `VectorEnv`; of SAME_STEP autoreset where there is no host to say.

    A rule that cuts episodes by itself needs SAME_STEP: the other modes have no way to say "ended and already reset".
    """

    def __init__(self, env: VecEnv, host: Any = None) -> None:
        self.bind(env, host)
        self.num_envs = env.num_envs
        rule = self.stagger
        if host is not None:
            self.mode = autoreset_mode(host)
            self.single_observation_space, self.single_action_space = (
                host.single_observation_space,
                host.single_action_space,
            )
            self.observation_space, self.action_space = host.observation_space, host.action_space
            self.metadata, self.spec, self.render_mode = dict(host.metadata), host.spec, host.render_mode
            if rule is not None and self.mode is not AutoresetMode.SAME_STEP:
                _refuse_cuts(rule, self.mode)
        else:
            self.mode = AutoresetMode.SAME_STEP
            self.single_observation_space, self.single_action_space = gymnasium_spaces(env.spec)
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
            self.action_space = batch_space(self.single_action_space, self.num_envs)
            self.metadata = {"autoreset_mode": self.mode}
        self.groups = obs_groups(self.single_observation_space)

    __getattr__ = attribute_of_host

    @property
    def unwrapped(self) -> Any:
        return self if self.host is None else self.host.unwrapped

    def reset(self, *, seed: Any = None, options: Optional[Dict[str, Any]] = None) -> Tuple[Any, Dict[str, Any]]:
        """The bring-up; with `options["reset_mask"]` ([N] bool), a plain reset of those rows."""
        options = dict(options or {})
        inner = self._inner()
        rows = options.pop("reset_mask", None)
        if rows is not None:
            obs = self.view_reset_rows(torch.as_tensor(rows))
            return self._arrays(obs), dict(inner.reset_info) if inner is not None else {}
        if inner is not None:
            inner.next_reset = {key: x for key, x in (("seed", seed), ("options", options)) if x}
        elif seed is not None:
            self.vec_env.seed(int(seed))
        obs = self.view_reset()
        if inner is not None and self.mode is AutoresetMode.NEXT_STEP and bool(inner.pending.any()):
            obs = self.view_reset_rows(inner.pending)  # the loop does not expect a reset step right after a reset
        if self.mode is AutoresetMode.DISABLED:
            self.vec_env.set_manual_reset(True)
        return self._arrays(obs), dict(inner.reset_info) if inner is not None else {}

    def step(self, actions: Any) -> Tuple[Any, np.ndarray, np.ndarray, np.ndarray, Dict[str, Any]]:
        inner = self._inner()
        action = actions if inner is not None else action_of_array(actions, self.vec_env.spec, self.vec_env.device)
        step = self.view_step(action)
        info = dict(step.info["host"]) if inner is not None else {}
        terminated, truncated = step.terminated.cpu().numpy(), step.truncated.cpu().numpy()
        done, reward = terminated | truncated, step.reward.cpu().numpy().astype(np.float64)
        if self.mode is AutoresetMode.SAME_STEP and done.any():
            final = self._arrays(step.final_obs) if step.final_obs is not None else None
            if final is not None:
                info["final_obs"], info["_final_obs"] = _rows_where(done, final), done.copy()
        return self._arrays(step.obs), reward, terminated, truncated, info

    def render(self) -> Any:
        return self.host.render() if self.host is not None else super().render()

    def close_extras(self, **kwargs: Any) -> None:
        self.vec_env.close()

    def _inner(self) -> Optional[FromGymnasium]:
        inner: Any = self.stagger.env if self.stagger is not None else self.vec_env
        return inner if isinstance(inner, FromGymnasium) else None

    def _arrays(self, obs: Obs) -> Any:
        return arrays_of_tensors(obs, self.groups)


def stagger_host(host: Any, rule: Rule) -> GymnasiumView:
    """A Gymnasium `VectorEnv` under `rule`."""
    return GymnasiumView(rule.around(FromGymnasium(host, rule.horizon_steps)), host)


def _refuse_cuts(rule: StaggeredResets, mode: AutoresetMode) -> None:
    c = rule.config
    for name, value, idle in (
        ("upkeep", c.upkeep_in_force, "none"),
        ("num_groups_schedule", c.num_groups_schedule, None),
    ):
        if value != idle:
            raise ConfigError(
                f"reset.{name}={value!r}: its cuts need an environment of autoreset mode SAME_STEP, this one has "
                f"{mode.name}; leave it {idle!r} or use SyncVectorEnv(..., autoreset_mode='SameStep')"
            )


def _rows_where(mask: np.ndarray, batch: Any) -> np.ndarray:
    """[N] objects: row i of `batch` where `mask`, None elsewhere; as Gymnasium's own vector envs give it."""
    rows = np.full(len(mask), None, dtype=object)
    for i in np.flatnonzero(mask):
        rows[i] = {key: x[i].copy() for key, x in batch.items()} if isinstance(batch, dict) else batch[i].copy()
    return rows
