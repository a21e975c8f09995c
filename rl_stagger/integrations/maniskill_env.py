"""ManiSkill: `ManiSkillVectorEnv`. Written against mani_skill 3.0.1.

    env = stagger(ManiSkillVectorEnv(gym.make("PickCube-v1", num_envs=1024)), rollout_steps=16)

Time-outs: Gymnasium's five values, reset in the same step. In steps in which somebody was done there are
`infos["final_observation"]` and `infos["final_info"]` with their masks `_final_observation` and `_final_info`. The
rule's own cuts are truncations and appear in all of them.

The clock is `base_env.elapsed_steps` (int32, written in place). With record_metrics, ManiSkill takes it for the
episode's length; after bring_up="clock" that is wrong, so `episode_len`, and the mean reward made from it, are
corrected here to the steps really taken. An episode that the bring-up began counts return and length from its own
start: the metrics are of whole episodes, but for those that the rule cut.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, where_rows
from rl_stagger.errors import ConfigError
from rl_stagger.integrations.base import HostEnv, HostView, Rule, horizon_in_force
from rl_stagger.integrations.lookup import by_index, horizon_of, wrappers_of
from rl_stagger.integrations.nested import Layout, sample_boxes, spec_of
from rl_stagger.resets.rule import StaggeredResets

_SHARED = (
    "_env num_envs auto_reset ignore_terminations record_metrics spec metadata "
    "single_observation_space single_action_space observation_space action_space"
).split()


class FromManiSkill(HostEnv):
    """ManiSkill's vector environment under our contract. Resets once to see what observations look like.

    `clock` counts the steps really taken, whatever is written into `elapsed_steps`.
    """

    samples_actions = True

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        base = host.base_env
        if not host.auto_reset:
            raise ConfigError("auto_reset=False: who resets then? ManiSkillVectorEnv(env, auto_reset=True)")
        frequency = base.reconfiguration_freq
        if frequency != 0 and base.num_envs > 1:
            raise ConfigError(
                f"reconfiguration_freq={frequency}: ManiSkill rebuilds its scenes for all environments at once, "
                "staggered ones reset by parts; use reconfiguration_freq=0"
            )
        first, self.reset_info = host.reset()
        self.layout = Layout(first)
        self.last_obs = self.layout.tensors(first)
        has = frozenset({Capability.PARTIAL_RESET, Capability.SET_CLOCK, Capability.FINAL_OBS})
        spec = spec_of(
            self.last_obs, host.single_action_space, horizon_in_force(horizon_steps, horizon_of(wrappers_of(host)[1:]))
        )
        super().__init__(host, base.num_envs, host.device, spec, has)
        self.next_reset: Dict[str, Any] = {}
        """Seed and options of the next full reset."""
        self._generator = torch.Generator(device=self.device)
        self._generator_seed: Optional[int] = None

    @property
    def elapsed_steps(self) -> Tensor:
        return self.host.base_env.elapsed_steps.to(self.device, torch.int64, copy=True)

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        clock = self.host.base_env.elapsed_steps
        mask = torch.ones_like(clock, dtype=torch.bool) if env_mask is None else env_mask
        clock.copy_(torch.where(mask, steps.to(clock), clock))

    def to_host(self, obs: Obs) -> Any:
        return self.layout.host(obs)

    def sample_action(self, obs: Any) -> Any:
        if self._generator_seed != self.sampling_seed:
            self._generator_seed = self.sampling_seed
            self._generator.manual_seed(self.sampling_seed)
        return sample_boxes(self.host.single_action_space, self.num_envs, self._generator)

    def _reset_all(self) -> Obs:
        arguments, self.next_reset = self.next_reset, {}
        obs, self.reset_info = self.host.reset(**arguments)
        self.last_obs = self.layout.tensors(obs)
        return dict(self.last_obs)

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        seen = by_index(env_mask, lambda ids: self.host.reset(options={"env_idx": ids}))
        if seen is not None:
            obs, self.reset_info = seen
            # ManiSkill looks at everybody again; with noise in the observation, others would seem to move.
            self.last_obs = where_rows(env_mask, self.layout.tensors(obs), self.last_obs)
        return dict(self.last_obs)

    def _step(self, action: Any) -> Step:
        taken = self.clock + 1
        obs, reward, terminated, truncated, infos = self.host.step(action)
        self.last_obs = self.layout.tensors(obs)
        final = infos.get("final_observation")
        final_obs = dict(self.last_obs) if final is None else self.layout.tensors(final)
        ended = terminated.to(torch.bool, copy=True)
        cut_off = truncated.to(self.device, torch.bool, copy=True).expand(self.num_envs)
        info = {"host": _with_true_length(infos, taken)}
        always = torch.ones_like(ended)
        reward = torch.as_tensor(reward, device=self.device).reshape(self.num_envs).clone()
        return Step(dict(self.last_obs), reward, ended, cut_off, final_obs, always, info)


class ManiSkillView(HostView, ManiSkillVectorEnv):
    """A staggered `ManiSkillVectorEnv`, itself one: its spaces, settings, `base_env` and `_env` are the host's."""

    def __init__(self, env: StaggeredResets, host: Any) -> None:
        for name in _SHARED:
            setattr(self, name, getattr(host, name))
        self.bind(env, host)
        assert isinstance(env.env, FromManiSkill)
        self.inner: FromManiSkill = env.env

    def __getattr__(self, name: str) -> Any:
        host = self.__dict__.get("host")
        if host is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return getattr(host, name)

    def reset(self, *, seed: Any = None, options: Optional[Dict[str, Any]] = None) -> Tuple[Any, Dict[str, Any]]:
        """The bring-up; with `options["env_idx"]`, a plain reset of those environments."""
        options = dict(options or {})
        if "env_idx" in options:
            mask = torch.zeros(self.num_envs, dtype=torch.bool, device=self.vec_env.device)
            mask[torch.as_tensor(options["env_idx"], device=mask.device)] = True
            obs = self.view_reset_rows(mask)
        else:
            self.inner.next_reset = {key: x for key, x in (("seed", seed), ("options", options)) if x not in (None, {})}
            obs = self.view_reset()
        return self.inner.to_host(obs), dict(self.inner.reset_info)

    def step(self, actions: Any) -> Tuple[Any, Tensor, Tensor, Tensor, Dict[str, Any]]:
        step = self.view_step(actions)
        infos = dict(step.info["host"])
        cut = step.info.get("cut")
        if cut is not None and bool(cut.any()):
            assert step.final_obs is not None
            live = dict(infos)
            infos.setdefault("final_info", live)  # where somebody ended: taken before the reset, of everybody
            infos["final_observation"] = self.inner.to_host(step.final_obs)
            infos["_final_observation"] = infos["_final_info"] = infos["_elapsed_steps"] = step.done
        return self.inner.to_host(step.obs), step.reward.clone(), step.terminated, step.truncated, infos

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.host.call(name, *args, **kwargs)

    def close_extras(self, **kwargs: Any) -> None:
        self.host.close()


def stagger_host(host: Any, rule: Rule) -> ManiSkillView:
    """ManiSkill's vector environment under `rule`."""
    return ManiSkillView(rule.around(FromManiSkill(host, rule.horizon_steps)), host)


def _with_true_length(infos: Dict[str, Any], taken: Tensor) -> Dict[str, Any]:
    """`infos` with record_metrics' length, and what it divides by it, of the steps really taken ([N] int64)."""
    fixed = dict(infos)
    for holder, name in ((fixed, "episode"), (fixed.get("final_info"), "episode")):
        metrics = holder.get(name) if isinstance(holder, dict) else None
        if metrics and "episode_len" in metrics:
            length = taken.to(metrics["episode_len"])
            assert isinstance(holder, dict)
            holder[name] = {**metrics, "episode_len": length, "reward": metrics["return"] / length}
    return fixed
