"""ManiSkill3 tasks as a `VecEnv`: one batch of N on the GPU, or N single environments in worker processes on the CPU.
Written against mani_skill 3.0.1.

Both paths are the same code: on the CPU a batch has one row (PhysX's CPU backend allows no more), and
`maniskill_workers.py` joins N of them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import (
    Capability,
    EnvSpec,
    Obs,
    Step,
    VecEnv,
    check_action,
    check_mask,
    expand_mask,
    where_rows,
)
from rl_stagger.envs.maniskill_make import check_settings, make_host
from rl_stagger.envs.maniskill_spaces import ActionLayout, ObsLayout
from rl_stagger.envs.maniskill_state import controller_memory, read_state, write_state
from rl_stagger.errors import ConfigError

ENDINGS = ("truncate", "terminate", "ignore")


def make_maniskill(
    num_envs: int,
    device: Union[torch.device, str] = "cpu",
    seed: int = 0,
    task_id: str = "PushCube-v1",
    horizon_steps: Optional[int] = None,
    sim_backend: str = "auto",
    num_workers: Optional[int] = None,
    control_mode: Optional[str] = None,
    reward_mode: Optional[str] = None,
    obs_mode: str = "state",
    on_success: str = "truncate",
    on_fail: str = "terminate",
    reconfiguration_freq: Optional[int] = None,
    render_backend: Optional[str] = None,
    env_kwargs: Optional[Mapping[str, Any]] = None,
) -> VecEnv:
    """N environments of the task `task_id` of ManiSkill's registry.

    `horizon_steps`: H; None = the task's own. `sim_backend`: auto (physx_cuda on a GPU device, else physx_cpu),
    physx_cuda or physx_cpu. `num_workers`: on physx_cpu, processes among which the N environments are divided; None =
    one per processor; 0 = all in this process. `control_mode`, `reward_mode`: ManiSkill's own, None = what the task has
    first. `obs_mode`: state, state_dict, or pictures (rgb, depth, rgb+depth, each also with +state).

    `on_success`, `on_fail`: what ends an episode there. truncate (the value of what would have come counts, as in
    ManiSkill's PPO baseline), terminate (nothing comes after) or ignore (only the time limit ends episodes; both
    ignored are ManiSkill's `ignore_terminations=True`, its baselines' `--no-partial-reset`).

    `reconfiguration_freq`: build the scene anew every so many resets; 0 = never, None = the task's own. More than one
    environment in a batch needs 0. `render_backend`: None = the GPU with a GPU device, else the CPU; none: no
    pictures. `env_kwargs`: what `gymnasium.make` hands on to the task.
    """
    device = torch.device(device)
    backend = sim_backend if sim_backend != "auto" else ("physx_cuda" if device.type == "cuda" else "physx_cpu")
    settings = {
        "task_id": task_id,
        "horizon_steps": horizon_steps,
        "sim_backend": backend if device.index is None or backend != "physx_cuda" else f"{backend}:{device.index}",
        "control_mode": control_mode,
        "reward_mode": reward_mode,
        "obs_mode": obs_mode,
        "reconfiguration_freq": reconfiguration_freq,
        "render_backend": render_backend or ("gpu" if device.type == "cuda" else "cpu"),
        "env_kwargs": dict(env_kwargs or {}),
    }
    endings = {"on_success": on_success, "on_fail": on_fail}
    check_settings(num_envs, num_workers, device, settings)
    if backend == "physx_cpu":
        from rl_stagger.envs.maniskill_workers import make_workers

        return make_workers(num_envs, device, seed, num_workers, settings, endings)
    return ManiSkillEnv(make_host(num_envs, settings), device, row_seeds(seed, num_envs), **endings)


def row_seeds(seed: int, num_envs: int) -> List[int]:
    """A seed for each row, which does not depend on how many rows there are."""
    import numpy as np

    return [int(x) % 2**31 for x in np.random.SeedSequence(seed).generate_state(num_envs)]


class ManiSkillEnv(VecEnv):
    """A batch as `gymnasium.make` gives it. Observation groups: "policy" is the state, or with pictures what else there
    is; a camera's picture is "policy/<camera>" (uint8), its depth "policy/<camera>_depth" (float32, in metres). Actions
    of several robots are one Box, in the order of ManiSkill's dict.

    `reset` and `step` see the same random numbers whatever else draws from torch's, NumPy's and Python's global
    generators, and leave those as they were.

    Manual resets: ManiSkill can only step all rows of a batch, so a row that waits idles along inside; what is shown of
    it is the step in which it ended. A batch of one stands still. Host waits: the indices of the done rows, once in a
    step.

    States can be set in a batch of one on the CPU whose scene is never built anew. Several rows on the GPU: not
    claimed, for nobody has measured there how exact it is.
    """

    def __init__(
        self,
        host: Any,
        device: Union[torch.device, str],
        seeds: Sequence[int],
        on_success: str = "truncate",
        on_fail: str = "terminate",
    ) -> None:
        for name, value in (("on_success", on_success), ("on_fail", on_fail)):
            if value not in ENDINGS:
                raise ConfigError(f"{name}={value!r}: one of {', '.join(ENDINGS)}")
        self._host, self._base = host, host.unwrapped
        self.num_envs, self.device = int(self._base.num_envs), torch.device(device)
        frequency = self._base.reconfiguration_freq
        if frequency != 0 and self.num_envs > 1:
            raise ConfigError(
                f"reconfiguration_freq={frequency} with num_envs={self.num_envs}: ManiSkill builds the scenes of all "
                "environments anew at once, and episodes here end one by one; use 0, or physx_cpu"
            )
        self._endings = {"success": on_success, "fail": on_fail}
        self._stream = _Stream(self._base.device)
        self._seeds: Optional[List[int]] = None
        self.seed_rows(seeds)
        with self._inside():
            self._layout = ObsLayout(host.reset(seed=list(seeds))[0])
        self._actions = ActionLayout(self._base.single_action_space)
        self.spec = EnvSpec(
            self._layout.shapes, self._actions.box, _horizon_of(host), obs_dtypes=self._layout.image_groups
        )
        has = {Capability.PARTIAL_RESET, Capability.MANUAL_RESET, Capability.SET_CLOCK, Capability.FINAL_OBS}
        if _can_render(self._base):
            has.add(Capability.RENDER)
        if self._base.device.type == "cpu" and self.num_envs == 1 and frequency == 0:
            has.add(Capability.SET_STATE)
        self.capabilities = frozenset(has)
        self.manual_reset = False
        self._last: Optional[Obs] = None
        self._said: Dict[str, Any] = {"log": {}}
        """The last real step's info: what it has names for."""
        self._waiting = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._base.elapsed_steps.to(self.device, torch.int64, copy=True)

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        with self._inside():
            self._reset_rows(mask if self._last is not None else torch.ones_like(mask))
        return _copies(self._last_obs())

    def step(self, action: Tensor) -> Step:
        check_action(action, self.spec.action, self.num_envs)
        before, live, clock = self._last_obs(), ~self._waiting, self.elapsed_steps
        if self.num_envs == 1 and self.manual_reset and not bool(live[0]):
            nobody = torch.zeros_like(live)
            none = torch.zeros(1, device=self.device)
            return Step(_copies(before), none, nobody, nobody.clone(), _copies(before), live, self._nothing_said())
        with self._inside():
            raw, reward, _, late, info = self._host.step(self._actions.host(action, self._base.device))
            final = self._layout.tensors(raw, self.device)
            flags = {
                name: x.to(self.device, torch.bool, copy=True) for name, x in info.items() if name in self._endings
            }
            late = torch.as_tensor(late, device=self.device).to(torch.bool).expand(self.num_envs)
            if self.manual_reset:
                final = where_rows(live, final, before)
                self.set_elapsed_steps(clock, self._waiting)
            ended = self._any(flags, "terminate") & live
            cut_off = (self._any(flags, "truncate") | late) & live & ~ended
            done = ended | cut_off
            reward = torch.as_tensor(reward, dtype=torch.float32, device=self.device).reshape(self.num_envs)
            reward = torch.where(live, reward, 0.0)
            log = self._log(info, done)
            self._last = final
            if self.manual_reset:
                self._waiting = self._waiting | done
            else:
                self._reset_rows(done)
        more: Dict[str, Any] = {"log": log}
        if "success" in flags:
            more["success"] = flags["success"] & live
        self._said = more
        return Step(_copies(self._last_obs()), reward, ended, cut_off, _copies(final), live, more)

    def set_manual_reset(self, manual: bool) -> None:
        """Rows that still wait when manual resets end are reset at once."""
        if self.manual_reset and not manual:
            with self._inside():
                self._reset_rows(self._waiting)
        self.manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        clock = self._base.elapsed_steps
        mask = check_mask(env_mask, self.num_envs, self.device).to(clock.device)
        clock.copy_(torch.where(mask, steps.to(clock), clock))

    def seed(self, seed: int) -> None:
        """The next reset of all rows takes its states from `seed`."""
        self.seed_rows(row_seeds(seed, self.num_envs))

    def seed_rows(self, seeds: Sequence[int]) -> None:
        """The same with a seed for each row; all random numbers after the first reset come from the first one."""
        self._seeds = list(seeds)
        self._stream.seed(self._seeds[0])

    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        if Capability.SET_STATE not in self.capabilities:
            raise self.lacks(Capability.SET_STATE)
        check_mask(env_mask, self.num_envs, self.device)
        self._last_obs()
        return {name: x.to(self.device) for name, x in read_state(self._base).items()}

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        if Capability.SET_STATE not in self.capabilities:
            raise self.lacks(Capability.SET_STATE)
        mask, before = check_mask(env_mask, self.num_envs, self.device), self._last_obs()
        if bool(mask.any()):
            with self._inside():
                write_state(self._base, state, mask)
                self._last = where_rows(mask, self._layout.tensors(self._base.get_obs(), self.device), before)
            self._waiting = self._waiting & ~mask
        return _copies(self._last_obs())

    def render(self, env_index: int = 0) -> Any:
        if Capability.RENDER not in self.capabilities:
            raise self.lacks(Capability.RENDER)
        pictures = self._base.render_rgb_array()
        return pictures[env_index].to("cpu", torch.uint8).numpy()

    def close(self) -> None:
        self._host.close()

    def _reset_rows(self, mask: Tensor) -> None:
        """New episodes in the rows of `mask` [N]."""
        ids = mask.nonzero(as_tuple=False).squeeze(-1)  # the host waits here; ManiSkill takes indices only
        if len(ids) == 0:
            return
        if len(ids) == self.num_envs:
            raw, _ = self._host.reset(seed=self._seeds)
            self._seeds = None
            self._last = self._layout.tensors(raw, self.device)
        else:
            kept = [(tensor, tensor.clone()) for _, tensor in controller_memory(self._base)]
            raw, _ = self._host.reset(options={"env_idx": ids.to(self._base.device)})
            # ManiSkill's reset sets every row's controllers back; the other rows get theirs again.
            for tensor, old in kept:
                rows = expand_mask(mask.to(tensor.device), tensor)
                tensor.copy_(torch.where(rows, tensor, old))
            # It also looks at everybody again; with noise in the observation, others would seem to move.
            self._last = where_rows(mask, self._layout.tensors(raw, self.device), self._last_obs())
        self._waiting = self._waiting & ~mask

    def _any(self, flags: Mapping[str, Tensor], ending: str) -> Tensor:
        """[N] bool: an event that ends episodes in this way has happened."""
        found = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        for name, flag in flags.items():
            if self._endings[name] == ending:
                found = found | flag
        return found

    def _log(self, info: Mapping[str, Any], done: Tensor) -> Dict[str, Tensor]:
        """What the task says of its state in numbers, for the rows of `done` [N]; NaN elsewhere."""
        found: Dict[str, Tensor] = {}
        for name, value in info.items():
            if name in ("success", "elapsed_steps") or not isinstance(value, Tensor):
                continue
            if tuple(value.shape) == (self.num_envs,):
                found[name] = torch.where(done, value.to(self.device, torch.float32), float("nan"))
        return found

    def _nothing_said(self) -> Dict[str, Any]:
        """The info of a step in which nothing happened."""
        silent: Dict[str, Any] = {
            "log": {name: torch.full_like(x, float("nan")) for name, x in self._said["log"].items()}
        }
        if "success" in self._said:
            silent["success"] = torch.zeros_like(self._said["success"])
        return silent

    def _last_obs(self) -> Obs:
        if self._last is None:
            raise RuntimeError("ManiSkillEnv: call reset() before the first step")
        return self._last

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """ManiSkill's tensors are written in place: none may become an inference tensor."""
        with torch.inference_mode(False), torch.no_grad(), self._stream.inside():
            yield


class _Stream:
    """Random numbers of our own in the place of the global generators, which ManiSkill draws from."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._state: List[Any] = self._read()

    def seed(self, seed: int) -> None:
        outer = self._read()
        random.seed(seed)
        torch.manual_seed(seed)
        _numpy_random().seed(seed % 2**32)
        self._state = self._read()
        self._write(outer)

    @contextmanager
    def inside(self) -> Iterator[None]:
        outer = self._read()
        self._write(self._state)
        try:
            yield
        finally:
            self._state = self._read()
            self._write(outer)

    def _read(self) -> List[Any]:
        cuda = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)
        return [random.getstate(), _numpy_random().get_state(), torch.get_rng_state(), cuda]

    def _write(self, state: List[Any]) -> None:
        random.setstate(state[0])
        _numpy_random().set_state(state[1])
        torch.set_rng_state(state[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state(state[3], self._cuda)


def _numpy_random() -> Any:
    import numpy as np

    return np.random


def _copies(obs: Obs) -> Obs:
    return {group: x.clone() for group, x in obs.items()}


def _horizon_of(host: Any) -> Optional[int]:
    """The time limit of ManiSkill's own wrapper, in steps."""
    while True:
        limit = vars(host).get("_max_episode_steps")
        if limit is not None:
            return int(limit)
        if host is host.unwrapped:
            return None
        host = host.env


def _can_render(base: Any) -> bool:
    scene = getattr(base, "scene", None)
    return scene is not None and bool(scene.can_render())
