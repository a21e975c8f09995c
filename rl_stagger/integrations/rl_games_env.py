"""rl_games: `IVecEnv`. Written against rl_games 1.6.5.

    vecenv.register("MINE", lambda name, num_actors, **more: stagger(make(num_actors), rollout_steps=horizon_length))
    env_configurations.register("my_env", {"vecenv_type": "MINE", "env_creator": None})

Time-outs: its trainer adds gamma * V(s_t) to the reward where `infos["time_outs"]` is set and `value_bootstrap` is on
(its default). Every truncation is marked there, the rule's own cuts included; terminations never are.

Statistics: rl_games sums rewards from one done to the next and reports every sum (`game_rewards`, `episode_lengths`).
An episode that the bring-up began before training, or that the rule cut, enters there as a short one: read the reports
after one horizon, and under a rule that goes on cutting use `infos["full_episodes"]` ([N] bool, whole ones).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from rl_games.common.ivecenv import IVecEnv
from torch import Tensor

from rl_stagger.envs.base import Obs, Step, VecEnv, where_rows
from rl_stagger.errors import ConfigError
from rl_stagger.integrations.base import (
    HostView,
    Rule,
    action_of_array,
    attribute_of_host,
    gymnasium_spaces,
    horizon_in_force,
)
from rl_stagger.integrations.lookup import LookedInto, by_index, horizon_of, reset_isaac_lab, wrappers_of
from rl_stagger.integrations.nested import Layout, spec_of

_ROOTS = {"obs": "policy", "states": "critic"}


class FromRlGames(LookedInto):
    """An `IVecEnv` under our contract.

    rl_games' contract has neither partial resets nor clocks. A partial reset is there where the `IVecEnv` has
    `reset_rows(env_mask) -> observations`, and for Isaac Lab's wrapper and rl_games' ManiSkill environment. A clock is
    there where the environment inside has a tensor `episode_length_buf`, `progress_buf` or `elapsed_steps` [N]. There
    is no final observation. Resets once to see what observations look like.
    """

    def __init__(self, host: Any, horizon_steps: Optional[int] = None) -> None:
        agents = host.get_number_of_agents()
        if agents != 1:
            raise ConfigError(f"get_number_of_agents() = {agents}: only one agent an environment")
        first = host.reset()
        self.layout = Layout(first, _ROOTS)
        self.last_obs = self.layout.tensors(first)
        policy = self.last_obs["policy"]
        num_envs = policy.shape[0]
        self._inside = wrappers_of(host)
        self._partial_reset = _find_partial_reset(host)
        horizon = horizon_in_force(horizon_steps, horizon_of(self._inside))
        spec = spec_of(self.last_obs, host.get_env_info()["action_space"], horizon)
        super().__init__(host, num_envs, policy.device, spec, self._found(num_envs))

    def to_host(self, obs: Obs) -> Any:
        return self.layout.host(obs)

    def _reset_all(self) -> Obs:
        self.last_obs = self.layout.tensors(self.host.reset())
        return dict(self.last_obs)

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        assert self._partial_reset is not None
        fresh = self._partial_reset(env_mask)
        if fresh is not None:
            self.last_obs = where_rows(env_mask, self.layout.tensors(fresh), self.last_obs)
        return dict(self.last_obs)

    def _step(self, action: Any) -> Step:
        if self.layout.numpy and isinstance(action, Tensor):  # the rule's own random actions
            action = action.cpu().numpy()
        obs, reward, dones, infos = self.host.step(action)
        self.last_obs = self.layout.tensors(obs)
        done = torch.as_tensor(dones).to(self.device) > 0
        time_outs = infos.get("time_outs") if isinstance(infos, dict) else None
        truncated = torch.zeros_like(done)
        if time_outs is not None:
            # Some environments leave an old mask standing in steps without a reset.
            truncated = (torch.as_tensor(time_outs).to(self.device) > 0).reshape(done.shape) & done
        reward = torch.as_tensor(reward).to(self.device, copy=True).reshape(done.shape)
        info = {"host": infos, "host_dones": dones}
        return Step(dict(self.last_obs), reward, done & ~truncated, truncated, None, torch.ones_like(done), info)


class RlGamesView(HostView, IVecEnv):
    """An environment of ours as rl_games' `IVecEnv`; observations {"obs", "states"} where there is a group "critic".

    `action_bound` stands in for action bounds that the task does not have: rl_games stretches its actions from [-1, 1]
    to the bounds unless told `clip_actions: False`.
    """

    def __init__(self, env: VecEnv, host: Any = None, action_bound: Optional[float] = None) -> None:
        self.bind(env, host)
        self.action_bound = action_bound

    __getattr__ = attribute_of_host

    def restaggered(self, rule: Rule, **options: Any) -> Any:
        return super().restaggered(rule, action_bound=self.action_bound, **options)

    def reset(self) -> Any:
        """The bring-up."""
        return self._shown(self.view_reset())

    def step(self, actions: Any) -> Tuple[Any, Any, Any, Any]:
        inner = self._inner()
        step = self.view_step(actions if inner else action_of_array(actions, self.vec_env.spec, self.vec_env.device))
        time_outs = step.truncated & ~step.terminated
        if inner is None:
            infos = {name: x for name, x in step.info.items() if name in ("log", "success")}
            infos.update(time_outs=time_outs, full_episodes=step.info["full"])
            return self._shown(step.obs), step.reward.clone(), step.done, infos
        infos, dones = step.info["host"], step.info["host_dones"]
        if isinstance(infos, dict):
            given = infos.get("time_outs", dones)  # rl_games must not see a tensor among arrays
            infos = {**infos, "time_outs": _like(given, time_outs), "full_episodes": step.info["full"]}
        elif "cut" in step.info:
            raise ConfigError(
                f"infos is a {type(infos).__name__}: the rule's cuts cannot be marked in it; upkeep='none'"
            )
        reward = step.reward.cpu().numpy() if inner.layout.numpy else step.reward
        return self._shown(step.obs), reward, _like(dones, step.done), infos

    def get_number_of_agents(self) -> int:
        return 1

    def get_env_info(self) -> Dict[str, Any]:
        if self.host is not None:
            return self.host.get_env_info()
        spaces, action_space = gymnasium_spaces(self.vec_env.spec, self.action_bound)
        groups = spaces.spaces if hasattr(spaces, "spaces") else {"policy": spaces}
        info = {"observation_space": groups["policy"], "action_space": action_space, "agents": 1, "value_size": 1}
        return {**info, "state_space": groups["critic"]} if "critic" in groups else info

    def has_action_masks(self) -> bool:
        return False if self.host is None else self.host.has_action_masks()

    def seed(self, seed: int) -> Any:
        return self.vec_env.seed(seed) if self.host is None else self.host.seed(seed)

    def set_train_info(self, env_frames: int, *args: Any, **kwargs: Any) -> None:
        if self.host is not None:
            self.host.set_train_info(env_frames, *args, **kwargs)

    def get_env_state(self) -> Any:
        return None if self.host is None else self.host.get_env_state()

    def set_env_state(self, env_state: Any) -> None:
        if self.host is not None:
            self.host.set_env_state(env_state)

    def close(self) -> None:
        if hasattr(self.vec_env if self.host is None else self.host, "close"):
            self.vec_env.close()

    def _inner(self) -> Optional[FromRlGames]:
        inner: Any = self.stagger.env if self.stagger is not None else self.vec_env
        return inner if isinstance(inner, FromRlGames) else None

    def _shown(self, obs: Obs) -> Any:
        inner = self._inner()
        if inner is not None:
            return inner.to_host(obs)
        return {"obs": obs["policy"], "states": obs["critic"]} if "critic" in obs else obs["policy"]


def stagger_host(host: Any, rule: Rule) -> RlGamesView:
    """rl_games' `IVecEnv` under `rule`."""
    return RlGamesView(rule.around(FromRlGames(host, rule.horizon_steps)), host)


def _find_partial_reset(host: Any) -> Optional[Callable[[Tensor], Any]]:
    """[N] bool -> the host's observations of all N, or None where nobody was reset."""
    if callable(getattr(host, "reset_rows", None)):
        return host.reset_rows
    inside = wrappers_of(host)
    base = inside[-1]
    names = {cls.__name__ for env in inside for cls in type(env).__mro__}
    if "ManiSkillVectorEnv" in names and getattr(base, "reconfiguration_freq", 0) == 0:
        return lambda mask: by_index(mask, lambda ids: host.env.reset(options={"env_idx": ids})[0])
    if callable(getattr(base, "_reset_idx", None)) and callable(getattr(host, "_process_obs", None)):
        return lambda mask: by_index(mask, lambda ids: host._process_obs(reset_isaac_lab(base, ids)))
    return None


def _like(given: Any, mask: Tensor) -> Any:
    """`mask` [N] bool in the type, dtype, shape and place of what the host gave."""
    if isinstance(given, Tensor):
        return mask.to(given.device, given.dtype).reshape(given.shape)
    return mask.cpu().numpy().astype(getattr(given, "dtype", bool))
