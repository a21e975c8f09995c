"""A stand-in for legged_gym's `task_registry.make_env`, with a task on a plane and one on graded terrain.

Real behaviour that is reproduced, by file of legged_gym:
- utils/task_registry.py: without `args` the command line is parsed, by a parser that ends the program at words that it
  does not know; `get_cfgs` returns the registry's own config and writes the training seed into it.
- envs/base/legged_robot.py: a reset happens in the step of the done, before observations; the time limit comes at
  `episode_length_buf > max_episode_length`; `extras["time_outs"]` and `extras["episode"]` are set only in steps in
  which somebody is reset, and keep the old tensors otherwise; `reset_buf` starts as ones and is a new bool tensor every
  step; `rew_buf` is written in place; terrain levels move in `reset_idx` where `cfg.terrain.curriculum`, command ranges
  where `cfg.commands.curriculum`, both also when everything is reset from outside.
- envs/base/base_task.py: `reset()` is `reset_idx` of all and a step without action; `max_episode_length` is a float.
"""

import argparse
import sys
import types
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

FALL_AT = 1.0


class Cfg:
    """Nested classes become instances, as in legged_gym's BaseConfig."""

    def __init__(self) -> None:
        self.seed = 0
        self.env = types.SimpleNamespace(num_envs=4096, num_privileged_obs=None, episode_length_s=0.24)
        self.terrain = types.SimpleNamespace(curriculum=False)
        self.commands = types.SimpleNamespace(
            curriculum=False, max_curriculum=1.0, ranges=types.SimpleNamespace(lin_vel_x=[-0.5, 0.5])
        )
        self.normalization = types.SimpleNamespace(clip_actions=100.0, clip_observations=100.0)


class LeggedRobot:
    """N points on a line, pushed by one action."""

    num_obs, num_actions = 4, 2

    def __init__(self, cfg: Cfg) -> None:
        self.cfg, n = cfg, cfg.env.num_envs
        self.num_envs, self.device, self.sim = n, "cpu", object()
        self.gym = types.SimpleNamespace(destroyed=[])
        self.gym.destroy_sim = self.gym.destroyed.append
        self.num_privileged_obs = cfg.env.num_privileged_obs
        self.max_episode_length = float(round(cfg.env.episode_length_s / 0.02))
        self.command_ranges = {"lin_vel_x": list(cfg.commands.ranges.lin_vel_x)}
        self.position, self.velocity, self.commands = torch.zeros(n), torch.zeros(n), torch.zeros(n)
        self.obs_buf, self.rew_buf = torch.zeros(n, self.num_obs), torch.zeros(n)
        self.privileged_obs_buf: Optional[Tensor] = None
        self.reset_buf = torch.ones(n, dtype=torch.long)
        self.episode_length_buf = torch.zeros(n, dtype=torch.long)
        self.time_out_buf = torch.zeros(n, dtype=torch.bool)
        self.common_step_counter, self.extras = 0, {}  # type: int, Dict[str, Any]
        self.actions = torch.zeros(n, 2)
        if cfg.terrain.curriculum:
            self.terrain_levels, self.terrain_types = torch.arange(n) % 3, torch.arange(n) * 2 // n
            self.terrain_origins = torch.arange(4.0).reshape(4, 1, 1).repeat(1, 2, 3)
            self.env_origins = self.terrain_origins[self.terrain_levels, self.terrain_types]

    def reset(self) -> Tuple[Tensor, Optional[Tensor]]:
        self.reset_idx(torch.arange(self.num_envs))
        obs, privileged, _, _, _ = self.step(torch.zeros(self.num_envs, self.num_actions))
        return obs, privileged

    def step(self, actions: Tensor) -> Tuple[Tensor, Optional[Tensor], Tensor, Tensor, Dict[str, Any]]:
        self.actions = torch.clip(actions, -self.cfg.normalization.clip_actions, self.cfg.normalization.clip_actions)
        self.velocity = 0.9 * self.velocity + 0.2 * self.actions.clamp(-1, 1).sum(1)
        self.position = self.position + 0.1 * self.velocity
        self.episode_length_buf += 1
        self.common_step_counter += 1
        self.reset_buf = self.position.abs() > FALL_AT
        self.time_out_buf = self.episode_length_buf > self.max_episode_length
        self.reset_buf |= self.time_out_buf
        self.rew_buf[:] = 1.0 - (self.velocity - self.commands).abs()
        self.reset_idx(self.reset_buf.nonzero(as_tuple=False).flatten())
        self.obs_buf = torch.stack([self.position, self.velocity, self.commands, self.actions[:, 0]], dim=1)
        if self.num_privileged_obs is not None:
            self.privileged_obs_buf = torch.cat([self.obs_buf, self.position[:, None] ** 2], dim=1)
        return self.obs_buf, self.privileged_obs_buf, self.rew_buf, self.reset_buf, self.extras

    def reset_idx(self, env_ids: Tensor) -> None:
        if len(env_ids) == 0:
            return
        if self.cfg.terrain.curriculum:
            up = torch.where(self.position[env_ids].abs() > 0.5, 1, -1)
            self.terrain_levels[env_ids] = torch.clip(self.terrain_levels[env_ids] + up, 0, 3)
            self.env_origins[env_ids] = self.terrain_origins[self.terrain_levels[env_ids], self.terrain_types[env_ids]]
        if self.cfg.commands.curriculum:
            self.command_ranges["lin_vel_x"][1] = min(self.command_ranges["lin_vel_x"][1] + 0.1, 1.0)
        low, high = self.command_ranges["lin_vel_x"]
        self.commands[env_ids] = low + (high - low) * torch.rand(len(env_ids))
        self.position[env_ids] = 0.4 * torch.rand(len(env_ids)) - 0.2
        self.velocity[env_ids] = 0.0
        self.episode_length_buf[env_ids] = 0
        self.reset_buf[env_ids] = 1
        self.extras["episode"] = {"max_command_x": self.command_ranges["lin_vel_x"][1]}
        self.extras["time_outs"] = self.time_out_buf


class TaskRegistry:
    def __init__(self) -> None:
        rough = Cfg()
        rough.env.num_privileged_obs, rough.terrain.curriculum, rough.commands.curriculum = 5, True, True
        self.task_classes = {"anymal_c_flat": LeggedRobot, "anymal_c_rough": LeggedRobot}
        self.env_cfgs = {"anymal_c_flat": Cfg(), "anymal_c_rough": rough}

    def get_cfgs(self, name: str) -> Tuple[Cfg, Any]:
        self.env_cfgs[name].seed = 1
        return self.env_cfgs[name], types.SimpleNamespace(seed=1)

    def make_env(self, name: str, args: Any = None, env_cfg: Any = None) -> Tuple[LeggedRobot, Cfg]:
        if args is None:
            parser = argparse.ArgumentParser()
            parser.add_argument("--task")
            args = parser.parse_args()
        cfg = self.get_cfgs(name)[0] if env_cfg is None else env_cfg
        if args.num_envs is not None:
            cfg.env.num_envs = args.num_envs
        assert (args.sim_device, args.headless, args.use_gpu_pipeline) == ("cpu", True, False)
        assert (args.physics_engine, args.subscenes, args.num_threads) == ("SIM_PHYSX", 0, 0)
        print(f"Setting seed: {cfg.seed}")
        torch.manual_seed(cfg.seed)
        return self.task_classes[name](cfg), cfg


def install(monkeypatch: Any) -> TaskRegistry:
    """Modules `isaacgym`, `isaacgym.gymapi`, `legged_gym` and `legged_gym.envs`."""
    isaacgym: Any = types.ModuleType("isaacgym")
    isaacgym.gymapi = types.ModuleType("isaacgym.gymapi")
    isaacgym.gymapi.SIM_PHYSX = "SIM_PHYSX"
    legged_gym: Any = types.ModuleType("legged_gym")
    legged_gym.envs = types.ModuleType("legged_gym.envs")
    legged_gym.envs.task_registry = TaskRegistry()
    for module in (isaacgym, isaacgym.gymapi, legged_gym, legged_gym.envs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return legged_gym.envs.task_registry
