"""skrl: the torch `Wrapper`. Written against skrl 2.1.1.

    env = stagger(wrap_env(my_env), rollout_steps=24)          # PPO_CFG(rollouts=24, time_limit_bootstrap=True)
    SequentialTrainer(env=env, agents=agent, cfg=...).train()

Time-outs: every truncation comes in `truncated` [N, 1], the rule's own cuts included. Set `time_limit_bootstrap=True`:
with skrl's default, False, an advantage runs on across a truncation into the next episode, and staggered truncations
come in every rollout. With it, skrl adds gamma * V of the observation that the step returned, which after a reset in
the same step is the next episode's first one (so it is with skrl's own Isaac Lab and ManiSkill wrappers); the episode's
last observation, where there is one, is in `infos["final_obs"]`, which skrl does not read.

Statistics: skrl sums rewards from one end to the next; episodes that the bring-up began, or the rule cut, enter as
short ones. `infos["full_episodes"]` ([N] bool) marks the whole ones.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from skrl.envs.wrappers.torch.base import Wrapper
from torch import Tensor

from rl_stagger.envs.base import Obs, Step, VecEnv, where_rows
from rl_stagger.integrations.base import HostView, Rule, action_of_array, gymnasium_spaces, horizon_in_force
from rl_stagger.integrations.lookup import LookedInto, by_index, horizon_of, reset_isaac_lab, wrappers_of
from rl_stagger.integrations.nested import spec_of


class FromSkrl(LookedInto):
    """A skrl `Wrapper` under our contract.

    skrl's contract has neither partial resets nor clocks. A partial reset is there where the wrapper has
    `reset_rows(env_mask) -> observations`, and for skrl's own ManiSkill and Isaac Lab wrappers. A clock is there where
    the environment inside has a tensor `episode_length_buf`, `progress_buf` or `elapsed_steps` [N]. There is no final
    observation. Resets once to see what observations look like.
    """

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        obs, self.reset_info = host.reset()
        self.last_obs = self._groups(host, obs)
        num_envs = int(host.num_envs)
        self._inside = wrappers_of(host)[1:]
        self._partial_reset = _find_partial_reset(host)
        spec = spec_of(self.last_obs, host.action_space, horizon_in_force(horizon_steps, horizon_of(self._inside)))
        super().__init__(host, num_envs, host.device, spec, self._found(num_envs))

    def to_host(self, obs: Obs) -> Any:
        return obs["policy"]

    def _reset_all(self) -> Obs:
        """skrl's wrappers of batched environments reset once; later calls give what they gave last."""
        if hasattr(self.host, "_reset_once"):
            self.host._reset_once = True
        obs, self.reset_info = self.host.reset()
        self.last_obs = self._groups(self.host, obs)
        return dict(self.last_obs)

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        assert self._partial_reset is not None
        fresh = self._partial_reset(env_mask)
        if fresh is not None:
            self.last_obs = where_rows(env_mask, self._groups(self.host, fresh), self.last_obs)
        return dict(self.last_obs)

    def _step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, infos = self.host.step(action)
        self.last_obs = self._groups(self.host, obs)
        ended = terminated.reshape(-1).to(torch.bool, copy=True)
        cut_off = truncated.reshape(-1).to(torch.bool, copy=True) & ~ended
        reward = reward.reshape(-1).clone()
        return Step(dict(self.last_obs), reward, ended, cut_off, None, torch.ones_like(ended), {"host": infos})

    @staticmethod
    def _groups(host: Any, obs: Tensor) -> Obs:
        """The observation and, where there is one, skrl's "state" (what the critic sees); cloned."""
        state = host.state()
        return {"policy": obs.clone()} if state is None else {"policy": obs.clone(), "critic": state.clone()}


class SkrlView(HostView, Wrapper):
    """An environment of ours as skrl's `Wrapper`; the group "critic", where there is one, is skrl's state.

    As with skrl's own batched wrappers, `reset` takes effect once: training and evaluation after it go on from there.
    """

    def __init__(self, env: VecEnv, host: Any = None) -> None:
        Wrapper.__init__(self, env if host is None else host)
        self.bind(env, host)
        self._infos: Dict[str, Any] = {}
        if host is not None:
            self._spaces: Tuple[Any, Any, Any] = (host.observation_space, host.state_space, host.action_space)
            return
        groups, action_space = gymnasium_spaces(env.spec)
        spaces = {name: _flat(space) for name, space in getattr(groups, "spaces", {"policy": groups}).items()}
        self._spaces = (spaces["policy"], spaces.get("critic"), action_space)

    def __getattr__(self, name: str) -> Any:
        """What skrl does not ask for comes from the environment inside."""
        if name.startswith("__") or "_env" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        return self.vec_env.device

    @property
    def num_envs(self) -> int:
        return self.vec_env.num_envs

    @property
    def num_agents(self) -> int:
        return 1

    @property
    def observation_space(self) -> Any:
        return self._spaces[0]

    @property
    def state_space(self) -> Any:
        return self._spaces[1]

    @property
    def action_space(self) -> Any:
        return self._spaces[2]

    def reset(self) -> Tuple[Tensor, Dict[str, Any]]:
        obs = self.view_obs()
        inner = self._inner()
        return self._flat_obs(obs, "policy"), self._infos if inner is None else (self._infos or inner.reset_info)

    def step(self, actions: Tensor) -> Tuple[Tensor, Tensor, Tensor, Tensor, Any]:
        inner = self._inner()
        step = self.view_step(actions if inner else action_of_array(actions, self.vec_env.spec, self.vec_env.device))
        infos = (
            dict(step.info["host"] or {}) if inner else {k: step.info[k] for k in ("log", "success") if k in step.info}
        )
        infos["full_episodes"] = step.info["full"]
        if step.final_obs is not None:
            infos["final_obs"] = {group: x.flatten(1) for group, x in step.final_obs.items()}
        self._infos = infos
        terminated, truncated = step.terminated.unsqueeze(1), (step.truncated & ~step.terminated).unsqueeze(1)
        # skrl adds to the rewards in place.
        reward = step.reward.to(torch.float32, copy=True).unsqueeze(1)
        return self._flat_obs(step.obs, "policy"), reward, terminated, truncated, infos

    def state(self) -> Optional[Tensor]:
        obs = self.view_obs()
        return self._flat_obs(obs, "critic") if "critic" in obs else None

    def render(self, *args: Any, **kwargs: Any) -> Any:
        return self.vec_env.render() if self.host is None else self.host.render(*args, **kwargs)

    def close(self) -> None:
        self.vec_env.close()

    def _inner(self) -> Optional[FromSkrl]:
        inner: Any = self.stagger.env if self.stagger is not None else self.vec_env
        return inner if isinstance(inner, FromSkrl) else None

    def _flat_obs(self, obs: Obs, group: str) -> Tensor:
        return obs[group].flatten(1)


def stagger_host(host: Any, rule: Rule) -> Wrapper:
    """skrl's `Wrapper` under `rule`. Around a Gymnasium `VectorEnv` the rule goes inside, where resets are: what comes
    back is skrl's own GymnasiumWrapper, whose `measures()` and `stagger` are those of the environment in it."""
    if any(cls.__name__ == "GymnasiumWrapper" for cls in type(host).__mro__) and getattr(host, "_vectorized", False):
        from rl_stagger.integrations.gymnasium_env import stagger_host as stagger_gymnasium

        return type(host)(stagger_gymnasium(host._env, rule))
    return SkrlView(rule.around(FromSkrl(host, rule.horizon_steps)), host)


def _find_partial_reset(host: Any) -> Optional[Callable[[Tensor], Optional[Tensor]]]:
    """[N] bool -> the host's observations of all N, or None where nobody was reset."""
    if callable(getattr(host, "reset_rows", None)):
        return host.reset_rows
    names, base = {cls.__name__ for cls in type(host).__mro__}, host._unwrapped
    if "ManiSkillWrapper" in names and getattr(base, "reconfiguration_freq", 0) == 0:
        return lambda mask: by_index(mask, lambda ids: _see(host, host._env.reset(options={"env_idx": ids})[0]))
    if "IsaacLabWrapper" in names and callable(getattr(base, "_reset_idx", None)):
        return lambda mask: by_index(mask, lambda ids: _see_isaac_lab(host, ids))
    return None


def _see(host: Any, obs: Any) -> Tensor:
    """What the environment inside shows, as skrl's wrapper flattens it."""
    from skrl.utils.spaces.torch import flatten_tensorized_space, tensorize_space

    host._observations = flatten_tensorized_space(tensorize_space(host.observation_space, obs))
    return host._observations


def _see_isaac_lab(host: Any, ids: Tensor) -> Tensor:
    from skrl.utils.spaces.torch import flatten_tensorized_space, tensorize_space

    obs = reset_isaac_lab(host._unwrapped, ids)
    if obs.get("critic") is not None:
        host._states = flatten_tensorized_space(tensorize_space(host.state_space, obs["critic"]))
    return _see(host, obs["policy"])


def _flat(space: Any) -> Any:
    """A Box of one dimension: skrl's environments flatten what they show."""
    import numpy as np
    from gymnasium import spaces

    return spaces.Box(-np.inf, np.inf, (int(np.prod(space.shape)),), np.float32)
