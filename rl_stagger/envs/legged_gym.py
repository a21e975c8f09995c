"""Tasks of legged_gym as a `VecEnv`. Written against its commit 8fa29acc, rsl_rl v1.0.2 and Isaac Gym Preview 4 (or 3).

A done environment is reset in the same step, before observations are computed: there is no final observation to be
had, so `algorithm.bootstrap=pre_step_value` is what time limits are bootstrapped with.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import copy
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Dict, Iterator, Mapping, Optional, Union

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
from rl_stagger.errors import ConfigError, nearest

if TYPE_CHECKING:
    from isaacgym import gymapi


class LeggedGymEnv(VecEnv):
    """One of legged_gym's registered tasks; one simulation a process.

    Groups: observations are "policy", privileged ones are "critic" where the task has any. The clock is
    `episode_length_buf`. A time-out is believed in the step of a done only: `extras["time_outs"]` keeps its old rows
    until somebody is reset again.

    `state_dict` holds terrain levels, the ranges of commands, the step counter that pushes and command curricula look
    at, and random numbers; after loading it the episodes begin anew, with one invalid step. In evaluation, and in full
    resets, both curricula stand still. `set_difficulty` puts all robots on one row of a graded terrain; a robot that
    walks off it meets the next one. Resets of some rows at will, and states, are not to be had.
    """

    one_per_process = True

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        task_id: str = "anymal_c_flat",
        overrides: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """`overrides`: dotted path in the task's config -> value, e.g. {"env.episode_length_s": 10}."""
        import_isaac_gym("legged_gym")
        self.num_envs, self.device = num_envs, torch.device(device)
        self._random = OwnRandomness(self.device, seed)
        self._evaluating = False
        with contextlib.redirect_stdout(sys.stderr), self._random.inside():
            self._env = make_task(task_id, num_envs, device_name(self.device), seed, overrides or {})
        self._terrain = Terrain(self._env)
        graded = self._terrain.present and bool(self._env.cfg.terrain.curriculum)
        self.difficulty_levels = self._terrain.num_levels if graded else 0
        self._fixed_level = False
        kept = self.state_dict()
        with self._inside(frozen=True):
            ending = find_ending(self._advance, lambda: self._env.episode_length_buf, int(self._env.max_episode_length))
        self.load_curriculum(kept)
        self._env.common_step_counter = kept["common_step_counter"]
        if ending is not None and ending.style is not ResetStyle.SAME_STEP:
            raise ConfigError(f"task_id={task_id!r}: it does not reset in the step of a done, as legged_gym's tasks do")
        shapes = {"policy": (int(self._env.num_obs),)}
        if self._env.num_privileged_obs is not None:
            shapes["critic"] = (int(self._env.num_privileged_obs),)
        clip = float(self._env.cfg.normalization.clip_actions)
        action = base.Box(int(self._env.num_actions), -clip, clip)
        self.spec = base.EnvSpec(shapes, action, None if ending is None else ending.limit)
        self.capabilities = frozenset({Capability.SET_CLOCK})
        self._obs: Optional[Obs] = None
        self._begin_anew = False

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._env.episode_length_buf.to(self.device, torch.int64, copy=True)

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        if not bool(check_mask(env_mask, self.num_envs, self.device).all()):
            raise self.lacks(Capability.PARTIAL_RESET)
        with self._inside(frozen=True):  # no robot has shown yet what it can do
            raw, privileged = self._env.reset()  # with a step without action inside
            self._env.episode_length_buf.zero_()
            self._obs = self._groups(raw, privileged)
        self._begin_anew = False
        return dict(self._obs)

    def step(self, action: Tensor) -> Step:
        base.check_action(action, self.spec.action, self.num_envs)
        valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if self._begin_anew:
            obs, no = self.reset(), torch.zeros_like(valid)
            reward = torch.zeros(self.num_envs, device=self.device)
            return Step(obs, reward, no, no.clone(), None, no.clone(), {"reset": valid, "log": {}})
        if self._obs is None:
            raise RuntimeError("LeggedGymEnv: call reset() before the first step")
        with self._inside():
            raw, privileged, reward, reset_buf, extras = self._env.step(action)
            self._obs = self._groups(raw, privileged)
            done = (reset_buf != 0).to(self.device)
            time_outs = extras.get("time_outs", self._env.time_out_buf)
            truncated = done & (time_outs != 0).to(self.device)
            log = log_of(extras, done)
            reward = reward.to(self.device, torch.float32, copy=True)
        return Step(dict(self._obs), reward, done & ~truncated, truncated, None, valid, {"log": log})

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        mask = check_mask(env_mask, self.num_envs, self.device)
        clock = self._env.episode_length_buf
        clock.copy_(torch.where(mask.to(clock.device), steps.to(clock), clock))

    def seed(self, seed: int) -> None:
        self._random.seed(seed)

    def close(self) -> None:
        gym: gymapi.Gym = self._env.gym
        gym.destroy_sim(self._env.sim)

    def _advance(self) -> Tensor:
        env = self._env
        return env.step(torch.zeros(env.num_envs, env.num_actions, device=env.device))[3] != 0

    def _groups(self, raw: Tensor, privileged: Optional[Tensor]) -> Obs:
        """Clones: the task goes on writing into its buffers."""
        groups = {"policy": raw} if privileged is None else {"policy": raw, "critic": privileged}
        return {name: x.to(self.device, torch.float32, copy=True) for name, x in groups.items()}

    # -- difficulty and state ------------------------------------------------------------------------------------
    def set_evaluation(self, evaluating: bool) -> None:
        self._evaluating = evaluating

    def set_difficulty(self, level: int) -> None:
        if not 0 <= level < self.difficulty_levels:
            levels = f"levels 0 to {self.difficulty_levels - 1}" if self.difficulty_levels else "no graded terrain"
            raise ConfigError(f"difficulty={level}: this task has {levels}")
        self._terrain.set_level(level)
        self._fixed_level = True

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        self._terrain.load_state_dict(state.get("terrain", {}))
        for name, bounds in state.get("command_ranges", {}).items():
            self._env.command_ranges[name] = [float(bound) for bound in bounds]

    def state_dict(self) -> Dict[str, Any]:
        ranges = {name: [float(bound) for bound in bounds] for name, bounds in self._env.command_ranges.items()}
        return {
            "episodes": False,
            "terrain": self._terrain.state_dict(),
            "command_ranges": ranges,
            "common_step_counter": int(self._env.common_step_counter),
            "rng": self._random.state_dict(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.load_curriculum(state)
        self._env.common_step_counter = int(state["common_step_counter"])
        self._random.load_state_dict(state["rng"])
        self._begin_anew = True

    @contextlib.contextmanager
    def _inside(self, frozen: bool = False) -> Iterator[None]:
        """Our random stream, prints on stderr, and curricula that stand still in evaluation and where `frozen`."""
        cfg = self._env.cfg
        kept = (cfg.terrain.curriculum, cfg.commands.curriculum)
        if frozen or self._evaluating:
            cfg.terrain.curriculum, cfg.commands.curriculum = False, False
        elif self._fixed_level:
            cfg.terrain.curriculum = False
        try:
            with contextlib.redirect_stdout(sys.stderr), self._random.inside():
                yield
        finally:
            cfg.terrain.curriculum, cfg.commands.curriculum = kept


def make_task(task_id: str, num_envs: int, device: str, seed: int, overrides: Mapping[str, Any]) -> Any:
    """The registered task, built. Not by its own command line: its parser would take ours and refuse it."""
    from isaacgym import gymapi
    from legged_gym.envs import task_registry

    if task_id not in task_registry.task_classes:
        raise ConfigError(f"task_id={task_id!r}: {nearest(task_id, task_registry.task_classes)}")
    cfg = copy.deepcopy(task_registry.get_cfgs(task_id)[0])  # the registry's own stays as it is
    override(cfg, overrides)
    cfg.seed = seed
    on_gpu = device != "cpu"
    arguments = SimpleNamespace(
        physics_engine=gymapi.SIM_PHYSX, sim_device=device, device=device, headless=True, num_envs=num_envs,
        use_gpu=on_gpu, use_gpu_pipeline=on_gpu, subscenes=0, num_threads=0,
    )  # fmt: skip
    return task_registry.make_env(task_id, args=arguments, env_cfg=cfg)[0]


def override(cfg: Any, overrides: Mapping[str, Any]) -> None:
    """Write dotted paths into a config of nested classes. Raises ConfigError for a path that there is not."""
    for path, value in flatten(overrides).items():
        owner, names = cfg, path.split(".")
        for i, name in enumerate(names):
            if not hasattr(owner, name):
                there = [key for key in dir(owner) if not key.startswith("_")]
                raise ConfigError(f"overrides.{path}: there is no '{name}'; {nearest(name, there)}")
            if i == len(names) - 1:
                setattr(owner, name, value)
            else:
                owner = getattr(owner, name)
