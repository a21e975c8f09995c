"""rsl_rl 5.x: `VecEnv` with TensorDict observations. Written against rsl-rl-lib 5.5.1.

Its trainer adds gamma * V(s_t) to the reward where `extras["time_outs"]` is set, and never calls `reset`: the
bring-up happens when it first asks for the observations. Its own report (`Train/mean_reward`) counts every episode from
the first training step, the ones that the warm-up began included.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from typing import Any, Dict, FrozenSet, Optional, Tuple

import torch
from rsl_rl.env import VecEnv as RslRlVecEnv
from tensordict import TensorDict
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, EnvSpec, Obs, Step, VecEnv, where_rows
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.integrations.base import HostEnv, HostView, Rule, attribute_of_host


class FromRslRl(HostEnv):
    """rsl_rl's environment under our contract.

    The host's clock is `episode_length_buf`; it may be written. A partial reset is not part of rsl_rl's contract: it is
    used where the environment has `reset_idx(env_ids)`. There is no final observation.
    """

    extra_capabilities: FrozenSet[Capability] = frozenset()

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        first = host.get_observations()
        self.last_obs = obs_of(first)
        self._stepped = False
        has = {Capability.SET_CLOCK} | self.extra_capabilities
        if callable(getattr(host, "reset_idx", None)):
            has.add(Capability.PARTIAL_RESET)
        shapes = {name: tuple(x.shape[1:]) for name, x in self.last_obs.items()}
        self._first_group = next(iter(first.keys()))
        spec = EnvSpec(shapes, Box(int(host.num_actions)), horizon_steps or _horizon_of(host))
        super().__init__(host, int(host.num_envs), host.device, spec, frozenset(has))

    @property
    def elapsed_steps(self) -> Tensor:
        return self.host.episode_length_buf.to(torch.int64).clone()

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        clock = self.host.episode_length_buf
        new = steps.to(clock)
        self.host.episode_length_buf = new.clone() if env_mask is None else torch.where(env_mask, new, clock)

    def to_host(self, obs: Obs) -> TensorDict:
        return tensordict_of(obs, self.num_envs, self.device, self._first_group)

    def _reset_all(self) -> Obs:
        """rsl_rl's own contract has no reset. Without one, a host that has not stepped yet counts as reset."""
        if callable(getattr(self.host, "reset", None)):
            self.host.reset()
        elif Capability.PARTIAL_RESET in self.capabilities:
            return self._reset_rows(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        elif self._stepped:
            raise CapabilityError(f"{type(self.host).__name__} has neither reset() nor reset_idx(env_ids)")
        self.last_obs = obs_of(self.host.get_observations())
        return dict(self.last_obs)

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        ids = env_mask.nonzero(as_tuple=False).squeeze(-1)  # the host waits here; such resets take indices only
        if len(ids) > 0:
            self._reset_ids(ids)
            # Looking again may draw new noise or advance a history: only the reset rows take what it gives.
            self.last_obs = where_rows(env_mask, obs_of(self.host.get_observations()), self.last_obs)
        return dict(self.last_obs)

    def _reset_ids(self, ids: Tensor) -> None:
        self.host.reset_idx(ids)

    def _step(self, action: Any) -> Step:
        self._stepped = True
        obs, reward, dones, extras = self.host.step(action)
        done = dones > 0
        # Some environments leave an old mask standing in steps without a reset.
        time_outs = extras.get("time_outs")
        truncated = torch.zeros_like(done) if time_outs is None else (time_outs > 0).reshape(done.shape) & done
        self.last_obs = obs_of(obs)
        info = {"log": {}, "host": dict(extras)}
        valid = torch.ones_like(done)
        reward = reward.reshape(done.shape).clone()
        return Step(dict(self.last_obs), reward, done & ~truncated, truncated, self._final_obs(extras), valid, info)

    def _final_obs(self, extras: Dict[str, Any]) -> Optional[Obs]:
        return None


class RslRlView(HostView, RslRlVecEnv):
    """An environment of ours as rsl_rl's `VecEnv`. Every truncation is marked in `extras["time_outs"]`, the rule's own
    cuts included; spread and resets appear in its log under `stagger/`."""

    def __init__(self, env: VecEnv, host: Any = None, cfg: Any = None) -> None:
        self.bind(env, host)
        if not isinstance(env.spec.action, Box):
            raise ConfigError(f"action {env.spec.action}: rsl_rl trains continuous actions only")
        self.num_envs, self.num_actions, self.device = env.num_envs, env.spec.action.size, env.device
        self.max_episode_length = env.spec.horizon_steps if env.spec.horizon_steps is not None else 2**31 - 1
        self.cfg = cfg if cfg is not None else getattr(host, "cfg", {"task": env.made_from})
        self._held_log: Dict[str, Tensor] = {}

    __getattr__ = attribute_of_host

    @property
    def episode_length_buf(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[N] int64: the episodes' clocks. A copy."""
        self.view_obs()
        return self.vec_env.elapsed_steps

    @episode_length_buf.setter
    def episode_length_buf(self, steps: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """What `learn(init_at_random_ep_len=True)` writes. Ignored under a rule that has spread the episodes itself."""
        rule = self.stagger
        if rule is not None and rule.config.bring_up != "none":
            warnings.warn(
                "episode_length_buf was written (learn(init_at_random_ep_len=True)?), the write ignored: it would set "
                "the clocks apart from the states that staggered resets have spread. Use init_at_random_ep_len=False",
                stacklevel=2,
            )
            return
        self.view_obs()
        self.vec_env.set_elapsed_steps(steps.to(torch.int64))
        self.mark_whole()

    def get_observations(self) -> TensorDict:
        return self._shown(self.view_obs())

    def reset(self) -> Tuple[TensorDict, Dict[str, Any]]:
        return self._shown(self.view_reset()), {}

    def step(self, actions: Tensor) -> Tuple[TensorDict, Tensor, Tensor, Dict[str, Any]]:
        step = self.view_step(actions)
        extras = dict(step.info.get("host", {}))
        extras["time_outs"] = step.truncated
        log = {**extras["log"]} if isinstance(extras.get("log"), dict) else self._log(step.info.get("log", {}))
        rule = self.stagger
        if rule is not None and self._measures is not None:
            if self._measures.steps_seen % rule.rollout_steps == 0:
                shown = self._measures.on_device().items()
                self._held_log.update({f"stagger/{name.split('/')[1]}": x for name, x in shown if "tv_" not in name})
            log.update({name: x for name, x in self._held_log.items() if name.startswith("stagger/")})
        # rsl_rl reads extras["episode"] in place of extras["log"] where both are given.
        extras["episode" if "episode" in extras else "log"] = {**extras.get("episode", {}), **log}
        return self._shown(step.obs), step.reward, step.done.to(torch.int64), extras

    def seed(self, seed: int = -1) -> int:
        self.vec_env.seed(seed)
        return seed

    def close(self) -> None:
        self.vec_env.close()

    def _shown(self, obs: Obs) -> TensorDict:
        inner: Any = self.stagger.env if self.stagger is not None else self.vec_env
        if isinstance(inner, HostEnv):
            return inner.to_host(obs)
        return tensordict_of(obs, self.num_envs, self.device)

    def _log(self, log: Dict[str, Any]) -> Dict[str, Any]:
        """One number a name. NaN means no event; rsl_rl averages whatever it gets, so the last event's stays."""
        for name, value in log.items():
            mean = torch.as_tensor(value, dtype=torch.float32, device=self.device).nanmean()
            held = self._held_log.get(name, torch.zeros_like(mean))
            self._held_log[name] = torch.where(torch.isnan(mean), held, mean)
        return {name: self._held_log[name] for name in log}


def stagger_host(host: Any, rule: Rule) -> RslRlView:
    """rsl_rl's environment under `rule`."""
    return RslRlView(rule.around(FromRslRl(host, rule.horizon_steps)), host)


def obs_of(obs: Any) -> Obs:
    """rsl_rl's TensorDict as our groups, cloned; without a group "policy", the first is called so."""
    groups = {name: x.clone() for name, x in obs.items()}
    nested = [name for name, x in groups.items() if not isinstance(x, Tensor)]
    if nested:
        raise ConfigError(f"observation group '{nested[0]}' is nested; rl_stagger takes one tensor a group")
    if "policy" not in groups:
        groups = {"policy" if i == 0 else name: x for i, (name, x) in enumerate(groups.items())}
    return groups


def tensordict_of(obs: Obs, num_envs: int, device: Any, first_group: str = "policy") -> TensorDict:
    """`obs_of` backwards."""
    groups = dict(obs) if first_group in obs else {first_group: obs["policy"], **obs}
    if first_group not in obs:
        del groups["policy"]
    return TensorDict(groups, batch_size=[num_envs], device=device)


def _horizon_of(host: Any) -> Optional[int]:
    length = host.max_episode_length
    if isinstance(length, Tensor):
        if bool((length != length.reshape(-1)[0]).any()):
            raise ConfigError(
                f"max_episode_length differs between environments ({int(length.min())} to {int(length.max())}); give "
                "stagger(horizon_steps=...), the longest"
            )
        length = length.reshape(-1)[0]
    return int(length)
