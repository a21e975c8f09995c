"""A stand-in for `isaacgymenvs.make` with five tasks, one for each way in which IsaacGymEnvs 1.5.1 ends episodes.

Real behaviour that is reproduced, by file of IsaacGymEnvs:
- tasks/base/vec_task.py: `reset_buf` starts at ones; `reset()` returns the buffer and resets nothing; `obs_dict`,
  `rew_buf`, `reset_buf` and `extras` are handed out themselves and written again; `time_outs` compares `progress_buf`
  with `max_episode_length - 1` after `post_physics_step`; one simulation per process, a second one is the first again.
- tasks/cartpole.py, ant.py: reset inside the next `post_physics_step`, after the physics: the action of that step moves
  a dead environment. anymal.py: the same, but its `reset_idx` leaves `reset_buf` at 1, and its time limit comes two
  steps later (`progress_buf > max_episode_length`).
- tasks/shadow_hand.py, allegro_kuka/allegro_kuka_base.py: reset at the next `pre_physics_step`; the observation is one
  step into the new episode. AllegroKuka makes a new `progress_buf` whenever somebody succeeds, zero in those rows.
- tasks/anymal_terrain.py: reset in the same step, the observation is a new episode's; `reset_buf` is a new bool tensor
  every step, so writing it asks for nothing; `progress_buf` is zero again before `time_outs` is computed; `reset_idx`
  moves terrain levels, also when called from outside; `extras["episode"]` stays as it was at the last reset.
"""

import sys
import types
from pathlib import Path
from typing import Any, Dict, Tuple

import torch
from torch import Tensor

EPISODE_LENGTH = 14
FALL_AT = 1.0


class VecTask:
    """N points on a line, pushed by one action; further out than FALL_AT they have fallen."""

    num_obs, num_states, num_actions, clip_actions = 3, 0, 2, 1.0

    def __init__(self, num_envs: int, max_episode_length: int) -> None:
        self.num_envs, self.max_episode_length = num_envs, max_episode_length
        self.device = self.rl_device = "cpu"
        self.position, self.velocity = torch.zeros(num_envs), torch.zeros(num_envs)
        self.actions = torch.zeros(num_envs, 2)
        self.obs_buf, self.states_buf = torch.zeros(num_envs, self.num_obs), torch.zeros(num_envs, self.num_states)
        self.rew_buf = torch.zeros(num_envs)
        self.reset_buf = torch.ones(num_envs, dtype=torch.long)
        self.timeout_buf = torch.zeros(num_envs, dtype=torch.long)
        self.progress_buf = torch.zeros(num_envs, dtype=torch.long)
        self.obs_dict: Dict[str, Tensor] = {}
        self.extras: Dict[str, Any] = {}

    def zero_actions(self) -> Tensor:
        return torch.zeros(self.num_envs, self.num_actions)

    def get_env_state(self) -> Any:
        return None

    def set_env_state(self, env_state: Any) -> None:
        pass

    def reset(self) -> Dict[str, Tensor]:
        self._fill_obs_dict()
        return self.obs_dict

    def step(self, actions: Tensor) -> Tuple[Dict[str, Tensor], Tensor, Tensor, Dict[str, Any]]:
        self.pre_physics_step(torch.clamp(actions, -self.clip_actions, self.clip_actions))
        self.simulate()
        self.post_physics_step()
        self.timeout_buf = (self.progress_buf >= self.max_episode_length - 1) & (self.reset_buf != 0)
        self.extras["time_outs"] = self.timeout_buf
        self._fill_obs_dict()
        return self.obs_dict, self.rew_buf, self.reset_buf, self.extras

    def simulate(self) -> None:
        push = self.actions.clamp(-1, 1).sum(1)
        self.velocity = 0.9 * self.velocity + 0.2 * push
        self.position = self.position + 0.1 * self.velocity

    def pre_physics_step(self, actions: Tensor) -> None:
        self.actions = actions.clone()

    def post_physics_step(self) -> None:
        raise NotImplementedError

    def reset_idx(self, env_ids: Tensor) -> None:
        self.position[env_ids] = 0.4 * torch.rand(len(env_ids)) - 0.2
        self.velocity[env_ids] = 0.0
        self.progress_buf[env_ids] = 0
        self.reset_buf[env_ids] = 0

    def compute_observations(self) -> None:
        self.obs_buf[:] = torch.stack([self.position, self.velocity, self.actions[:, 0]], dim=1)

    def compute_reward(self) -> None:
        self.rew_buf[:] = 1.0 - self.position.abs()

    def fallen(self) -> Tensor:
        return self.position.abs() > FALL_AT

    def _fill_obs_dict(self) -> None:
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -5.0, 5.0)
        if self.num_states > 0:
            self.obs_dict["states"] = torch.clamp(self.states_buf, -5.0, 5.0)


class Cartpole(VecTask):
    """Reset inside the next post_physics_step."""

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        env_ids = self.reset_buf.nonzero(as_tuple=False).flatten()
        if len(env_ids) > 0:
            self.reset_idx(env_ids)
        self.compute_observations()
        self.compute_reward()
        self.reset_buf[:] = self.resets()

    def resets(self) -> Tensor:
        reset = torch.where(self.fallen(), torch.ones_like(self.reset_buf), self.reset_buf)
        return torch.where(self.progress_buf >= self.max_episode_length - 1, torch.ones_like(reset), reset)


class Anymal(Cartpole):
    """The same with another time limit, and a reset_idx that leaves reset_buf set."""

    def reset_idx(self, env_ids: Tensor) -> None:
        super().reset_idx(env_ids)
        self.reset_buf[env_ids] = 1

    def resets(self) -> Tensor:
        return (self.fallen() | (self.progress_buf > self.max_episode_length)).long()


class ShadowHand(VecTask):
    """Reset at the next pre_physics_step; more state for the critic."""

    num_states = 4

    def pre_physics_step(self, actions: Tensor) -> None:
        env_ids = self.reset_buf.nonzero(as_tuple=False).flatten()
        if len(env_ids) > 0:
            self.reset_idx(env_ids)
        self.actions = actions.clone()

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        self.compute_observations()
        self.states_buf[:] = torch.cat([self.obs_buf, self.position[:, None] ** 2], dim=1)[:, : self.num_states]
        self.compute_reward()
        reset = torch.where(self.fallen(), torch.ones_like(self.reset_buf), self.reset_buf)
        self.reset_buf[:] = self.more_resets(reset)

    def more_resets(self, reset: Tensor) -> Tensor:
        return torch.where(self.progress_buf >= self.max_episode_length - 1, torch.ones_like(reset), reset)


class AllegroKuka(ShadowHand):
    """Counts successes, and zeroes its progress at each."""

    num_states = 0
    max_consecutive_successes = 3

    def __init__(self, num_envs: int, max_episode_length: int) -> None:
        super().__init__(num_envs, max_episode_length)
        self.goal = torch.full((num_envs,), 0.3)
        self.successes = torch.zeros(num_envs)
        self.reset_goal_buf = torch.zeros(num_envs, dtype=torch.long)
        self.success_tolerance = 0.075

    def _extra_curriculum(self) -> None:
        self.success_tolerance *= 0.999

    def get_env_state(self) -> Any:
        return {"success_tolerance": self.success_tolerance}

    def set_env_state(self, env_state: Any) -> None:
        self.success_tolerance = env_state["success_tolerance"]

    def reset_idx(self, env_ids: Tensor) -> None:
        super().reset_idx(env_ids)
        self.successes[env_ids] = 0

    def pre_physics_step(self, actions: Tensor) -> None:
        goal_ids = self.reset_goal_buf.nonzero(as_tuple=False).flatten()
        self.goal[goal_ids] = -self.goal[goal_ids]
        super().pre_physics_step(actions)

    def post_physics_step(self) -> None:
        self._extra_curriculum()
        super().post_physics_step()
        self.extras["successes"] = self.successes.mean()
        self.extras["scalars"] = {"success_tolerance": self.success_tolerance}

    def more_resets(self, reset: Tensor) -> Tensor:
        is_success = (self.position - self.goal).abs() < self.success_tolerance
        self.successes += is_success
        self.reset_goal_buf[:] = is_success
        self.progress_buf = torch.where(is_success, torch.zeros_like(self.progress_buf), self.progress_buf)
        reset = torch.where(self.successes >= self.max_consecutive_successes, torch.ones_like(reset), reset)
        return super().more_resets(reset)


class AnymalTerrain(VecTask):
    """Reset in the same step, on terrain with levels."""

    clip_actions = 100.0
    curriculum = True

    def __init__(self, num_envs: int, max_episode_length: int) -> None:
        super().__init__(num_envs, max_episode_length)
        self.init_done = False
        self.terrain_levels = torch.arange(num_envs) % 3
        self.terrain_types = torch.arange(num_envs) * 2 // num_envs
        self.terrain_origins = torch.arange(4.0).reshape(4, 1, 1).repeat(1, 2, 3)
        self.env_origins = self.terrain_origins[self.terrain_levels, self.terrain_types]
        self.reset_idx(torch.arange(num_envs))
        self.init_done = True

    def reset_idx(self, env_ids: Tensor) -> None:
        if self.init_done and self.curriculum:
            up = torch.where(self.position[env_ids].abs() > 0.5, 1, -1)
            self.terrain_levels[env_ids] = torch.clip(self.terrain_levels[env_ids] + up, 0) % len(self.terrain_origins)
            self.env_origins[env_ids] = self.terrain_origins[self.terrain_levels[env_ids], self.terrain_types[env_ids]]
        super().reset_idx(env_ids)
        self.reset_buf[env_ids] = 1
        self.extras["episode"] = {"terrain_level": self.terrain_levels.float().mean()}

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        self.reset_buf = self.fallen()
        out = self.progress_buf >= self.max_episode_length - 1
        self.reset_buf = torch.where(out, torch.ones_like(self.reset_buf), self.reset_buf)
        self.compute_reward()
        env_ids = self.reset_buf.nonzero(as_tuple=False).flatten()
        if len(env_ids) > 0:
            self.reset_idx(env_ids)
        self.compute_observations()


TASKS = {kind.__name__: kind for kind in (Cartpole, Anymal, ShadowHand, AllegroKuka, AnymalTerrain)}


def install(monkeypatch: Any, folder: Path) -> None:
    """Modules `isaacgym` and `isaacgymenvs`, with a config folder as the real one has. Good for one simulation."""
    (folder / "cfg" / "task").mkdir(parents=True)
    (folder / "cfg" / "config.yaml").write_text(
        "num_envs: ''\nheadless: false\ndefaults:\n  - task: Cartpole\n  - _self_\n", encoding="utf-8"
    )
    for name in TASKS:
        text = f"name: {name}\nenv:\n  numEnvs: ${{...num_envs}}\n  episodeLength: {EPISODE_LENGTH}\n"
        (folder / "cfg" / "task" / f"{name}.yaml").write_text(text, encoding="utf-8")
    isaacgymenvs: Any = types.ModuleType("isaacgymenvs")
    isaacgymenvs.__file__ = str(folder / "__init__.py")
    vec_task: Any = types.ModuleType("isaacgymenvs.tasks.base.vec_task")
    vec_task.EXISTING_SIM = None

    def make(seed: int, task: str, num_envs: int, sim_device: str, rl_device: str, graphics_device_id: int = -1,
             headless: bool = False, multi_gpu: bool = False, virtual_screen_capture: bool = False,
             force_render: bool = True, cfg: Any = None) -> VecTask:  # fmt: skip
        vec_task.EXISTING_SIM = object()
        if cfg is None:
            raise RuntimeError("without cfg, make() takes the task's name from the Hydra program around it")
        assert headless
        print("Setting sim options")
        return TASKS[cfg.task.name](int(cfg.task.env.numEnvs), int(cfg.task.env.episodeLength))

    isaacgymenvs.make = make
    monkeypatch.setitem(sys.modules, "isaacgym", types.ModuleType("isaacgym"))
    monkeypatch.setitem(sys.modules, "isaacgymenvs", isaacgymenvs)
    monkeypatch.setitem(sys.modules, vec_task.__name__, vec_task)
