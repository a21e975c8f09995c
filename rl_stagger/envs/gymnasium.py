"""Gymnasium's environments as a `VecEnv`: those that we build ourselves, and anybody's `VectorEnv`, in each of the
three autoreset modes. Written against gymnasium 1.4; masked resets need 1.1.

Why what we build has autoreset DISABLED: the observation that `step` returns is then the final one of an ended episode,
and the reset of the rows that are done, in the same step, is ours.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_action, check_mask, where_rows
from rl_stagger.envs.gymnasium_make import check_sizes, make_vector_env
from rl_stagger.envs.gymnasium_state import ClassicControlState
from rl_stagger.envs.spaces import ActionMap, infos_of_step, numbers_of_infos, obs_of, obs_of_rows, obs_parts, spec_of
from rl_stagger.errors import ConfigError, nearest

_SUCCESS = ("is_success", "success")
"""What Gymnasium-Robotics, Meta-World and others call it in their infos."""


class VectorEnvAdapter(VecEnv):
    """A Gymnasium `VectorEnv` of any autoreset mode (`metadata["autoreset_mode"]`).

    DISABLED: done environments are reset here, in the same step. SAME_STEP: in there. NEXT_STEP: the step after a done
    is a reset step, in which the action does nothing; `Step.valid` is False in it.

    Masked resets need DISABLED, a SyncVectorEnv or an AsyncVectorEnv. The clock can be written where each environment
    inside has a TimeLimit, whose count is written as well, and where the time limit is kept here. Manual resets need
    DISABLED: a row that waits shows its last observation, while its environment has been reset already and idles along,
    since a VectorEnv can only step all. States can be set, and runs be resumed exactly, in classic control tasks under
    SyncVectorEnv and DISABLED.

    Everything here lives on the CPU; `device` is where the tensors go that are returned.
    """

    def __init__(
        self,
        vector_env: Any,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        horizon_steps: Optional[int] = None,
        rescale_actions: bool = False,
        critic_keys: Sequence[str] = (),
    ) -> None:
        """`horizon_steps`: H where the environment has no time limit; it is kept here, which needs DISABLED.
        `rescale_actions`: a Box with finite bounds is presented as [-1, 1]. `critic_keys`: of a Dict observation, what
        only the critic sees."""
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

        refuse_wrappers_that_count(vector_env)
        base, self.mode = vector_env.unwrapped, autoreset_mode(vector_env)
        self.host, self.num_envs, self.device = vector_env, int(vector_env.num_envs), torch.device(device)
        self._by_rows = isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        inner_limit = time_limit(base) if self._by_rows else None
        limit = horizon_of(vector_env) if inner_limit is None else inner_limit
        if None not in (limit, horizon_steps) and limit != horizon_steps:
            raise ConfigError(f"horizon_steps={horizon_steps}: the environment says its own, {limit}")
        self._limit_here = horizon_steps is not None and limit is None
        if self._limit_here and self.mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                f"horizon_steps={horizon_steps}: the environment has no time limit, and in autoreset mode "
                f"{self.mode.name} nobody else can end its episodes; put a TimeLimit around each, or use DISABLED"
            )
        self._write_inside = inner_limit is not None
        has = {Capability.FINAL_OBS}
        if self._by_rows or self.mode is AutoresetMode.DISABLED:
            has.add(Capability.PARTIAL_RESET)
        if isinstance(base, AsyncVectorEnv) and self.mode is AutoresetMode.NEXT_STEP and not base.shared_memory:
            has.discard(Capability.PARTIAL_RESET)  # its workers do not hear of masked resets then, and reset again
        if self._write_inside or self._limit_here:
            has.add(Capability.SET_CLOCK)
        self._physics: Optional[ClassicControlState] = None
        if self.mode is AutoresetMode.DISABLED:
            has.add(Capability.MANUAL_RESET)
            self._physics = ClassicControlState.of(vector_env)
        if self._physics is not None:
            has |= {Capability.SET_STATE, Capability.EXACT_RESUME}
        if vector_env.render_mode == "rgb_array":
            has.add(Capability.RENDER)
        self.capabilities = frozenset(has)
        self._parts = obs_parts(vector_env.single_observation_space, critic_keys)
        self._actions = ActionMap(vector_env.single_action_space, rescale_actions)
        self.spec = spec_of(self._parts, self._actions.spec, horizon_steps if limit is None else limit)
        self.manual_reset = False
        self._last: Optional[Obs] = None
        self._ended: Dict[str, Tensor] = {}
        """States in which waiting rows ended; other rows mean nothing."""
        self._pictures: Dict[int, Any] = {}
        """What waiting rows looked like when they ended."""
        self._clock = torch.zeros(self.num_envs, dtype=torch.int64)
        self._waiting = torch.zeros(self.num_envs, dtype=torch.bool)
        """[N] bool: done, and not begun anew yet (NEXT_STEP, or manual resets)."""
        self._seeds: List[Optional[int]] = []
        self.seed(seed)

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._clock.to(self.device, copy=True)

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device).cpu()
        if self._last is None or env_mask is None:
            mask = torch.ones_like(mask)
        elif Capability.PARTIAL_RESET not in self.capabilities:
            raise self.lacks(Capability.PARTIAL_RESET)
        self._begin(mask)
        return self._show(self._last_obs())

    def step(self, action: Tensor) -> Step:
        from gymnasium.vector import AutoresetMode

        check_action(action, self.spec.action, self.num_envs)
        before, live = self._last_obs(), ~self._waiting
        arrays, reward, terminated, truncated, info = self.host.step(self._actions.array(action))
        raw_ended, raw_cut = _bools(terminated), _bools(truncated)
        self._clock = self._clock + live
        late = self._clock >= (self.spec.horizon_steps or 0) if self._limit_here else torch.zeros_like(live)
        ended, cut_off = raw_ended & live, (raw_cut | late) & ~raw_ended & live
        done = ended | cut_off
        self._last = final = obs_of(arrays, self._parts)
        if self.mode is AutoresetMode.DISABLED and self.manual_reset:
            self._last = final = where_rows(live, final, before)
            self._wait(done)
            self._reset_host(raw_ended | raw_cut)
        elif self.mode is AutoresetMode.DISABLED:
            self._begin(done)
        else:
            if self.mode is AutoresetMode.NEXT_STEP:
                self._waiting = done
            else:
                final = self._final_obs(info)
            self._clock = torch.where(done, 0, self._clock)
        info = infos_of_step(info, self.num_envs)
        reward = torch.where(live, torch.tensor(reward, dtype=torch.float32), 0.0)
        more: Dict[str, Any] = {"log": {k: x.to(self.device) for k, x in numbers_of_infos(info, self.num_envs).items()}}
        success = next((info[name] for name in _SUCCESS if name in info), None)
        if success is not None:
            more["success"] = _bools(success).to(self.device)
        obs = self._show(self._last_obs())
        final_obs = obs if final is self._last else self._show(final)
        ended, cut_off, live = (x.to(self.device) for x in (ended, cut_off, live))
        return Step(obs, reward.to(self.device), ended, cut_off, final_obs, live, more)

    def set_manual_reset(self, manual: bool) -> None:
        """Rows that still wait when manual resets end are reset at once."""
        if manual and Capability.MANUAL_RESET not in self.capabilities:
            raise self.lacks(Capability.MANUAL_RESET)
        if self.manual_reset and not manual:
            self._begin(self._waiting)
        self.manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        if Capability.SET_CLOCK not in self.capabilities:
            raise self.lacks(Capability.SET_CLOCK)
        mask = check_mask(env_mask, self.num_envs, self.device).cpu()
        self._write_clock(torch.where(mask, steps.to("cpu", torch.int64), self._clock))

    def seed(self, seed: int) -> None:
        """Each environment takes its own part of `seed` at its next reset from here; a VectorEnv that cannot seed its
        rows takes it at the next reset of all."""
        import numpy as np

        self._seeds = [int(part) for part in np.random.SeedSequence(seed).generate_state(self.num_envs)]

    def render(self, env_index: int = 0) -> Any:
        if Capability.RENDER not in self.capabilities:
            raise self.lacks(Capability.RENDER)
        from gymnasium.error import DependencyNotInstalled

        if bool(self._waiting[env_index]) and env_index in self._pictures:
            return self._pictures[env_index].copy()
        envs = getattr(self.host.unwrapped, "envs", None)
        try:
            return envs[env_index].render() if envs is not None else self.host.render()[env_index]
        except DependencyNotInstalled as error:
            raise ConfigError(f"render_mode='rgb_array': {error}") from error

    def close(self) -> None:
        self.host.close()

    def _last_obs(self) -> Obs:
        if self._last is None:
            raise RuntimeError(f"{type(self).__name__}: call reset() before the first step")
        return self._last

    def _show(self, obs: Obs) -> Obs:
        """`obs` as the caller may have it."""
        return {group: x.to(self.device, copy=True) for group, x in obs.items()}

    def _begin(self, mask: Tensor) -> None:
        """New episodes in the rows of `mask` [N]."""
        fresh = self._reset_host(mask)
        if fresh is not None:
            self._last = fresh if self._last is None else where_rows(mask, fresh, self._last)
        self._clock = torch.where(mask, 0, self._clock)
        self._waiting = self._waiting & ~mask

    def _reset_host(self, mask: Tensor) -> Optional[Obs]:
        """All N observations after a reset of the rows of `mask`; None where there are none to reset."""
        if not bool(mask.any()):
            return None  # Gymnasium refuses an empty mask
        whole = bool(mask.all())
        arguments: Dict[str, Any] = {} if whole else {"options": {"reset_mask": mask.numpy().copy()}}
        if self._by_rows:
            arguments["seed"] = [seed if reset else None for seed, reset in zip(self._seeds, mask.tolist())]
        elif whole:
            arguments["seed"] = self._seeds[0]
        if self._by_rows or whole:
            self._seeds = [None if reset else seed for seed, reset in zip(self._seeds, mask.tolist())]
        arrays, _ = self.host.reset(**arguments)
        return obs_of(arrays, self._parts)

    def _wait(self, done: Tensor) -> None:
        """The rows of `done` [N] wait from now on for a reset that somebody asks for."""
        if self._physics is not None:
            state = self._physics.read()
            self._ended = where_rows(done, state, self._ended) if self._ended else state
        if Capability.RENDER in self.capabilities:
            self._pictures.update({i: self.render(i) for i in done.nonzero().flatten().tolist()})
        self._waiting = self._waiting | done

    def _final_obs(self, info: Dict[str, Any]) -> Obs:
        """SAME_STEP's `info["final_obs"]`, one observation a row or one batch; elsewhere the observation of now."""
        import numpy as np

        given, mask = info.get("final_obs"), info.get("_final_obs")
        if given is None or mask is None or not np.any(mask):
            return self._last_obs()
        if isinstance(given, (dict, tuple)) or given.dtype != object:
            return where_rows(_bools(mask), obs_of(given, self._parts), self._last_obs())
        rows = np.flatnonzero(mask)
        final = {group: x.clone() for group, x in self._last_obs().items()}
        for group, x in obs_of_rows([given[i] for i in rows], self._parts).items():
            final[group][torch.from_numpy(rows)] = x
        return final

    def _write_clock(self, clock: Tensor) -> None:
        self._clock = clock
        if self._write_inside:
            self.host.unwrapped.set_attr("_elapsed_steps", clock.tolist())

    # -- state ---------------------------------------------------------------------------------------------------
    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        check_mask(env_mask, self.num_envs, self.device)
        physics = self._need_physics()
        self._last_obs()
        state = physics.read()
        if self._ended:
            state = where_rows(self._waiting, self._ended, state)
        return self._show({**state, "elapsed_steps": self._clock})

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device).cpu()
        physics, before = self._need_physics(), self._last_obs()
        state = {name: x.cpu() for name, x in state.items()}
        physics.write(state, mask)
        self._write_clock(torch.where(mask, state["elapsed_steps"], self._clock))
        self._waiting = self._waiting & ~mask
        self._last = where_rows(mask, obs_of_rows(physics.observations(), self._parts), before)
        return self._show(self._last)

    def state_dict(self) -> Dict[str, Any]:
        """Empty where the environments' random numbers cannot be read."""
        if self._physics is None or self._last is None:
            return {}
        return {
            "physics": self._physics.read(),
            "rng": self._physics.rng(),
            "seeds": list(self._seeds),
            "ended": {name: x.clone() for name, x in self._ended.items()},
            "clock": self._clock.clone(),
            "waiting": self._waiting.clone(),
            "obs": {group: x.clone() for group, x in self._last.items()},
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if not state:
            return
        physics = self._need_physics()
        if len(state["clock"]) != self.num_envs:
            raise ValueError(f"the saved state has {len(state['clock'])} environments, here are {self.num_envs}")
        self._reset_host(torch.ones_like(self._waiting))  # Gymnasium steps nothing that was never reset
        physics.write(state["physics"], torch.ones_like(self._waiting))
        physics.set_rng(state["rng"])
        self._seeds = list(state["seeds"])
        self._ended = {name: x.cpu().clone() for name, x in state["ended"].items()}
        self._write_clock(state["clock"].cpu().clone())
        self._waiting = state["waiting"].cpu().clone()
        self._last = {group: x.cpu().clone() for group, x in state["obs"].items()}

    def _need_physics(self) -> ClassicControlState:
        if self._physics is None:
            raise self.lacks(Capability.SET_STATE)
        return self._physics


class GymnasiumEnv(VectorEnvAdapter):
    """N environments of a Gymnasium id, with autoreset DISABLED where the vectorization is ours to choose."""

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        task_id: str = "CartPole-v1",
        horizon_steps: Optional[int] = None,
        vectorization: str = "sync",
        rescale_actions: bool = False,
        render_mode: Optional[str] = None,
        critic_keys: Sequence[str] = (),
        env_kwargs: Optional[Mapping[str, Any]] = None,
        wrappers: Sequence[str] = (),
    ) -> None:
        """`horizon_steps`: None = the task's own. `vectorization`: sync (one after the other, in this process), async
        (a process each) or vector_entry_point (the task's own batched form, where it has one: NEXT_STEP as a rule).
        `rescale_actions`: a Box with finite bounds is presented as [-1, 1]. `render_mode`: rgb_array, for `render`.
        `critic_keys`: of a Dict observation, what only the critic sees. `env_kwargs`: what `gymnasium.make` hands on
        to the task. `wrappers`: "module:Class" or "module:Class(name=value)" each, put around each environment in this
        order.
        """
        check_sizes(num_envs, horizon_steps)
        arguments = dict(env_kwargs or {})
        if horizon_steps is not None:
            arguments["max_episode_steps"] = horizon_steps
        if render_mode is not None:
            arguments["render_mode"] = render_mode
        host = make_vector_env(task_id, num_envs, vectorization, arguments, wrappers)
        super().__init__(host, device, seed, horizon_steps, rescale_actions, critic_keys)


# -- what a VectorEnv says of itself ----------------------------------------------------------------------------------
def autoreset_mode(host: Any) -> Any:
    """The AutoresetMode that `host` declares. Raises ConfigError where it declares none."""
    from gymnasium.vector import AutoresetMode

    mode = host.metadata.get("autoreset_mode")
    if isinstance(mode, AutoresetMode):
        return mode
    valid = {value.value: value for value in AutoresetMode}
    if mode not in valid:
        raise ConfigError(f"metadata['autoreset_mode']={mode!r} of {host}: {nearest(str(mode), valid)}")
    return valid[mode]


def refuse_wrappers_that_count(host: Any, instead: str = "leave it out") -> None:
    """Gymnasium's statistics lose the mask of a partial reset and start anew in all rows; its normaliser refuses it.
    `instead`: what to do; "{}" stands for the wrapper's name."""
    from gymnasium.vector import VectorWrapper

    while isinstance(host, VectorWrapper):
        name = type(host).__name__
        if name in ("RecordEpisodeStatistics", "NormalizeObservation"):
            raise ConfigError(f"env has {name} inside, which knows no partial resets; {instead.format(name)}")
        host = host.env


def time_limit(base: Any) -> Optional[int]:
    """Steps of the TimeLimit wrapper inside a SyncVectorEnv or AsyncVectorEnv; None where there is none, or not one for
    all."""
    # A worker of AsyncVectorEnv ends at an attribute that it does not have: ask first.
    if not all(base.call("has_wrapper_attr", "_elapsed_steps")):
        return None
    limits = set(base.get_attr("_max_episode_steps"))
    return int(limits.pop()) if len(limits) == 1 else None


def horizon_of(host: Any) -> Optional[int]:
    """The time limit that a VectorEnv says of itself, in steps."""
    limit = getattr(host.unwrapped, "max_episode_steps", None)
    if limit is None and host.spec is not None:
        limit = host.spec.max_episode_steps
    return None if limit is None else int(limit)


def _bools(x: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(x, dtype=bool))
