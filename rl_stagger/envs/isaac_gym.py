"""Tasks of IsaacGymEnvs as a `VecEnv`. Written against isaacgymenvs 1.5.1 and Isaac Gym Preview 4.

Why the resets stay the simulator's: in the GPU pipeline what `reset_idx` writes reaches the physics with the next
`simulate`, a second write of root states before it replaces the first (AllegroKuka therefore defers its own), and the
tasks' observation functions keep books of their own. An observation right after a reset of ours would not be exact in
all of them. The step that the simulator spends on a reset is marked invalid instead, as in Gymnasium's NEXT_STEP mode.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Union

import torch
from torch import Tensor

from rl_stagger.envs import base
from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_mask
from rl_stagger.envs.isaac_gym_host import (
    OwnRandomness,
    ResetStyle,
    Terrain,
    device_name,
    find_ending,
    flatten,
    import_isaac_gym,
    log_of,
)
from rl_stagger.errors import ConfigError


class IsaacGymEnv(VecEnv):
    """One task of IsaacGymEnvs; one simulation a process.

    Groups: `obs` is "policy", `states` is "critic" where the task has any.

    At start a few steps without action find out when the task resets (`ResetStyle`) and at which count its time limit
    comes. Where it resets in the next step, a done row shows its last observation, which is `final_obs` too, and the
    next step of the row is invalid: its action does nothing for the new episode. Where it resets in the same step there
    is no final observation, and time-outs, which the task loses, are told by its counter before the step.

    The clock is our own count of valid steps. A row that ends in the very step of its time limit counts as timed out,
    whatever else happened to it. A task that zeroes its `progress_buf` at each success (`max_consecutive_successes` >
    0) has no time limit for the episode as a whole; `horizon_steps` gives it one, and its own limit without a success
    still truncates.

    Not to be had: resets of some rows at will, and states. `state_dict` holds terrain levels, what the task itself
    saves (`get_env_state`) and random numbers; after loading it the episodes begin anew, with one invalid step.
    """

    one_per_process = True

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        task_id: str = "Cartpole",
        horizon_steps: Optional[int] = None,
        overrides: Optional[Mapping[str, Any]] = None,
        graphics_device_id: int = -1,
    ) -> None:
        """`horizon_steps`: episodes are cut there, at or before the task's own time limit; None = the task's own.
        `overrides`: dotted path in IsaacGymEnvs' config -> value, e.g. {"task.env.episodeLength": 300}."""
        isaacgymenvs = import_isaac_gym("isaacgymenvs")
        if getattr(sys.modules.get("isaacgymenvs.tasks.base.vec_task"), "EXISTING_SIM", None) is not None:
            raise ConfigError(
                f"task_id={task_id!r}: there is a simulation in this process already, and IsaacGymEnvs would put the "
                "new task into it; start another process"
            )
        self.num_envs, self.device = num_envs, torch.device(device)
        self._random, name = OwnRandomness(self.device, seed), device_name(self.device)
        with self._inside():
            cfg = compose_task(isaacgymenvs, task_id, num_envs, overrides or {})
            task = self._task = isaacgymenvs.make(
                seed=seed, task=task_id, num_envs=num_envs, sim_device=name, rl_device=name,
                graphics_device_id=graphics_device_id, headless=True, force_render=False, cfg=cfg,
            )  # fmt: skip
        self._terrain = Terrain(task)
        kept = self._terrain.state_dict()
        with self._inside(), frozen_curriculum(task):
            ending = find_ending(self._advance, lambda: task.progress_buf, int(task.max_episode_length))
        self._terrain.load_state_dict(kept)

        self.style = ResetStyle.POST_PHYSICS if ending is None else ending.style
        self._limit = None if ending is None else ending.limit
        self._offset = 1 if self.style is ResetStyle.PRE_PHYSICS else 0
        self.progress_is_clock = ending is not None and not getattr(task, "max_consecutive_successes", 0) > 0
        own = ending.limit - self._offset if ending is not None and self.progress_is_clock else None
        self.horizon_steps = self._check_horizon(horizon_steps, own)
        self.spec = base.EnvSpec(self._shapes(), _action_spec(task), self.horizon_steps)
        has = {Capability.SET_CLOCK}
        if self.style is not ResetStyle.SAME_STEP:
            has.add(Capability.FINAL_OBS)
        self.capabilities = frozenset(has)
        self._clock = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._dead = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        """[N] bool: done, and not reset yet."""
        self._obs: Optional[Obs] = None
        self._begin_anew = False
        self._evaluating = False

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._clock.clone()

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        if not bool(check_mask(env_mask, self.num_envs, self.device).all()):
            raise self.lacks(Capability.PARTIAL_RESET)
        task = self._task
        with self._inside(), frozen_curriculum(task):  # nobody has walked far enough for a harder level, or too little
            if self.style is ResetStyle.SAME_STEP:
                task.reset_idx(torch.arange(self.num_envs, device=task.progress_buf.device))
            else:
                task.reset_buf.fill_(1)
            raw, _, reset_buf, _ = task.step(task.zero_actions())
            self._obs = self._groups(raw)
            self._dead = self._pending(reset_buf)
            self._clock = torch.zeros_like(self._clock)
            self._write_progress(~self._dead)
        self._begin_anew = False
        return dict(self._obs)

    def step(self, action: Tensor) -> Step:
        base.check_action(action, self.spec.action, self.num_envs)
        if self._begin_anew:
            return self._dummy()
        if self._obs is None:
            raise RuntimeError("IsaacGymEnv: call reset() before the first step")
        task, live = self._task, ~self._dead
        at_horizon = live & (self._clock + 1 >= self.horizon_steps) if self.horizon_steps else torch.zeros_like(live)
        same_step = self.style is ResetStyle.SAME_STEP
        with self._inside():
            if same_step and self._limit is not None:
                self._write(task.progress_buf, at_horizon, torch.full_like(task.progress_buf, self._limit - 1))
            before = task.progress_buf.clone()
            raw, reward, reset_buf, extras = task.step(action.clone())
            self._obs = self._groups(raw)
            done = (reset_buf != 0) & live
            at_limit = self._at_limit(before + 1 if same_step else task.progress_buf, extras)
            terminated = done & ~at_limit
            truncated = live & ~terminated & (done | at_horizon)
            if not same_step:
                self._write(task.reset_buf, truncated, torch.ones_like(task.reset_buf))
            log = log_of(extras, done)
            if not same_step and isinstance(getattr(task, "successes", None), Tensor):
                log["episode_successes"] = torch.where(done, task.successes.to(self.device, torch.float32), math.nan)
            begun, self._dead = self._dead, self._pending(reset_buf) | (truncated & (not same_step))
            # A clock that was written while its row waited for the reset counts from that reset on.
            self._clock = torch.where(terminated | truncated, 0, self._clock + live)
            self._write_progress(begun & ~self._dead)
        reward = torch.where(live, reward.to(self.device), 0.0)
        final_obs = None if same_step else dict(self._obs)
        return Step(
            {k: x.clone() for k, x in self._obs.items()}, reward, terminated, truncated, final_obs, live, {"log": log}
        )

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        mask = check_mask(env_mask, self.num_envs, self.device)
        self._clock = torch.where(mask, steps.to(self._clock), self._clock)
        with self._inside():
            self._write_progress(mask & ~self._dead)

    def seed(self, seed: int) -> None:
        self._random.seed(seed)

    def close(self) -> None:
        """Isaac Gym frees its simulation when the process ends."""

    def _advance(self) -> Tensor:
        _, _, reset_buf, _ = self._task.step(self._task.zero_actions())
        return reset_buf != 0

    def _pending(self, reset_buf: Tensor) -> Tensor:
        """[N] bool: rows that the simulator resets in the next step; a copy."""
        return torch.zeros_like(self._dead) if self.style is ResetStyle.SAME_STEP else (reset_buf != 0).to(self.device)

    def _at_limit(self, progress: Tensor, extras: Dict[str, Any]) -> Tensor:
        """[N] bool: at the task's own time limit."""
        if self._limit is not None:
            return (progress >= self._limit).to(self.device)
        time_outs = extras.get("time_outs")
        return torch.zeros_like(self._dead) if time_outs is None else (time_outs != 0).to(self.device)

    def _write_progress(self, mask: Tensor) -> None:
        """The task's counter follows the clock, where it is one, in the rows of `mask`."""
        if self.progress_is_clock:
            progress = self._task.progress_buf
            self._write(progress, mask, self._clock.to(progress) + self._offset)

    @staticmethod
    def _write(buffer: Tensor, mask: Tensor, value: Tensor) -> None:
        """In place: tasks hold on to their buffers."""
        buffer.copy_(torch.where(mask.to(buffer.device), value, buffer))

    def _groups(self, raw: Mapping[str, Any]) -> Dict[str, Tensor]:
        """Clones: the simulator reuses what it returns."""
        names = {"obs": "policy", "states": "critic"}
        return {names[k]: x.to(self.device, torch.float32, copy=True) for k, x in raw.items() if k in names}

    def _shapes(self) -> Dict[str, Any]:
        task = self._task
        if not task.num_obs:
            raise ConfigError(f"task_id: {type(task).__name__} has no observation vector (numObservations is 0)")
        shapes = {"policy": (int(task.num_obs),)}
        if getattr(task, "num_states", 0):
            shapes["critic"] = (int(task.num_states),)
        return shapes

    def _check_horizon(self, wanted: Optional[int], own: Optional[int]) -> Optional[int]:
        if wanted is None:
            return own
        if wanted < 1 or (own is not None and wanted > own):
            most = f"1 to {own}, the task's own time limit" if own is not None else "at least 1"
            raise ConfigError(f"horizon_steps={wanted}: {most}; longer with overrides task.env.episodeLength")
        if self.style is ResetStyle.SAME_STEP and self._limit is None:
            raise ConfigError(f"horizon_steps={wanted}: {type(self._task).__name__} has no time limit to move")
        return wanted

    # -- difficulty and state ------------------------------------------------------------------------------------
    def set_evaluation(self, evaluating: bool) -> None:
        self._evaluating = evaluating

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        self._terrain.load_state_dict(state.get("terrain", {}))
        if state.get("task") is not None:
            self._task.set_env_state(state["task"])

    def state_dict(self) -> Dict[str, Any]:
        saved = self._task.get_env_state() if hasattr(self._task, "get_env_state") else None
        return {
            "episodes": False,
            "terrain": self._terrain.state_dict(),
            "task": saved,
            "rng": self._random.state_dict(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.load_curriculum(state)
        self._random.load_state_dict(state["rng"])
        self._begin_anew = True

    def _dummy(self) -> Step:
        """New episodes everywhere: what was shown before the load belongs to episodes that are gone."""
        obs = self.reset()
        no = torch.zeros_like(self._dead)
        final_obs = None if self.style is ResetStyle.SAME_STEP else {k: x.clone() for k, x in obs.items()}
        reward = torch.zeros(self.num_envs, device=self.device)
        return Step(obs, reward, no, no.clone(), final_obs, no.clone(), {"reset": torch.ones_like(no), "log": {}})

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Our random stream, what Isaac Gym prints on stderr, and the curriculum still in evaluation."""
        still = frozen_curriculum(self._task) if getattr(self, "_evaluating", False) else contextlib.nullcontext()
        with contextlib.redirect_stdout(sys.stderr), self._random.inside(), still:
            yield


@contextlib.contextmanager
def frozen_curriculum(task: Any) -> Iterator[None]:
    """AnymalTerrain's levels and AllegroKuka's tolerance stay as they are."""
    levels = getattr(task, "curriculum", None)
    if isinstance(levels, bool):
        task.curriculum = False
    if hasattr(task, "_extra_curriculum"):
        task._extra_curriculum = lambda: None
    try:
        yield
    finally:
        if isinstance(levels, bool):
            task.curriculum = levels
        vars(task).pop("_extra_curriculum", None)


def _action_spec(task: Any) -> base.Box:
    clip = float(getattr(task, "clip_actions", math.inf))
    bound = clip if math.isfinite(clip) else None
    return base.Box(int(task.num_actions), None if bound is None else -bound, bound)


def compose_task(isaacgymenvs: Any, task_id: str, num_envs: int, overrides: Mapping[str, Any]) -> Any:
    """IsaacGymEnvs' config for one task. Always handed over: without one, its `make` takes the task's name from a Hydra
    program around it, which is ours and calls it something else."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    words = [f"task={task_id}", f"num_envs={num_envs}", f"task.env.numEnvs={num_envs}", "headless=True"]
    words += [f"{key}={value}" for key, value in flatten(overrides).items()]
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        folder = Path(isaacgymenvs.__file__).resolve().parent / "cfg"
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose("config", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"task_id={task_id!r}, overrides={dict(overrides)}: {str(error).splitlines()[0]}") from error
    finally:
        GlobalHydra.instance().hydra = outer
