"""mjlab (MuJoCo-Warp) tasks as a `VecEnv`, on "cpu" and "cuda:i" alike. Written against mjlab 1.6.0.

Why the resets are ours: with mjlab's `auto_reset` the observation of an ended episode is never computed. We turn it
off, so that `step` returns the exact final observation, and reset the done rows ourselves in the same step. That costs
one more `sim.forward()` and one more observation pass in the steps in which something resets.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import sys
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Union

import torch
from torch import Tensor

from rl_stagger.envs import base
from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_mask, where_rows
from rl_stagger.envs.env_config import episode_length_s, override
from rl_stagger.envs.mjlab_config import graded_terrain, load_task, set_terrain_level
from rl_stagger.envs.mjlab_render import MjlabRenderer, can_render
from rl_stagger.envs.mjlab_state import MjlabState
from rl_stagger.errors import ConfigError
from rl_stagger.rng import global_rng_state, set_global_rng_state

_ENDLESS_S = 1e8
"""Episode lengths from here on are mjlab's way to say "no time limit" (its play configs have 1e9 and 1e10)."""


class MjlabEnv(VecEnv):
    """One of mjlab's registered tasks.

    Observation groups: mjlab's `actor` is "policy"; the others keep their names, "critic" among them where the task
    defines it. Actions are unbounded, as in mjlab.

    `get_state` covers the physics, the clock and every [N, ...] tensor of the managers, their terms and the sensors:
    last actions, commands and their timers, push timers, air times, episode sums, histories and delays. Not covered:
    what belongs to a row rather than to its episode (randomised model fields, encoder biases, terrain level and
    origin). `state_dict` has those too, and what all rows share: the numbers that curricula have moved (command ranges,
    reward weights) and shared tensors. Neither sees what a user's own term hides in a closure or a generator of its
    own. EXACT_RESUME is claimed on the CPU only: MuJoCo-Warp is not deterministic on a GPU.

    Episodes that `reset(env_mask)` cuts short do not move curricula: terrain levels go by the distance walked.

    mjlab draws from torch's global generators. A stream of our own is swapped in around every call, so building and
    stepping disturb nobody else's random numbers, and `state_dict` is complete.

    Host waits: mjlab itself waits for the device in every step (its `nonzero` and guard, a `nonzero` per command and
    interval event, an `item` per log entry of a reset). We add one, the indices of the done rows that its reset needs;
    none under manual resets.
    """

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        task_id: str = "Mjlab-Cartpole-Balance",
        horizon_steps: Optional[int] = None,
        overrides: Optional[Mapping[str, Any]] = None,
        play: bool = False,
    ) -> None:
        """`horizon_steps`: None = the task's own. `overrides`: dotted path in mjlab's env config -> value.

        `play`: mjlab's play variant of the task (no noise, no pushes, no time limit unless `horizon_steps` sets one).
        """
        self.num_envs, self.device = num_envs, torch.device(device)
        self._task = (task_id, play, dict(overrides or {}), horizon_steps, seed)
        self._evaluating = False
        self._renderer: Optional[MjlabRenderer] = None
        self._build(None)

        shapes = _groups(self._env.observation_manager.group_obs_dim)
        pictures = [group for group, shape in shapes.items() if len(shape) > 1]
        if pictures:
            raise ConfigError(
                f"observation group '{pictures[0]}' has shape {list(shapes[pictures[0]])}: pictures are not read here; "
                f"take a task without cameras"
            )
        cfg = self._env.cfg
        limited = any(term.time_out for term in cfg.terminations.values() if term is not None)
        limited = limited and cfg.episode_length_s < _ENDLESS_S
        self.spec = base.EnvSpec(
            shapes,
            base.Box(int(self._env.action_manager.total_action_dim)),
            int(self._env.max_episode_length) if limited else None,
        )
        self.capabilities = self._find_capabilities()
        self.manual_reset = False
        self._log: Dict[str, Any] = {}

    def _build(self, level: Optional[int]) -> None:
        """A new mjlab environment; `level`: all of its terrain as difficult as this row of the task's own."""
        task_id, play, overrides, horizon_steps, seed = self._task
        cfg, env_class = load_task(task_id, play)
        override(cfg, overrides)
        cfg.seed, cfg.auto_reset, cfg.scene.num_envs = seed, False, self.num_envs
        if horizon_steps is not None:
            cfg.episode_length_s = episode_length_s(horizon_steps, cfg.sim.mujoco.timestep * cfg.decimation)
        self.difficulty_levels = graded_terrain(cfg).num_rows if graded_terrain(cfg) is not None else 0
        if level is not None:
            set_terrain_level(cfg, level)
        outer = global_rng_state()
        with contextlib.redirect_stdout(sys.stderr), torch.inference_mode(False):  # mjlab prints its tables
            self._env = env_class(cfg, device=str(self.device))  # seeds Python's, NumPy's and torch's generators
        self._rng = _rng_state(self.device)
        set_global_rng_state(outer)
        self._state = MjlabState(self._env)
        self._curriculum = self._env.curriculum_manager
        self._obs: Optional[Obs] = None
        self._waiting = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._env.episode_length_buf.clone()

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        with self._inside():
            if self._obs is None:
                log = self._reset_rows(torch.ones_like(mask))
            else:
                ended, cut = mask & self._waiting, mask & ~self._waiting
                with self._frozen_curriculum():  # how far a robot came says nothing where it was cut short
                    log = self._reset_rows(cut)
                log.update(self._reset_rows(ended))
        if self.manual_reset:  # these episodes ended in steps that could not report them yet
            self._log.update(log)
        return _clones(self._last_obs())

    def step(self, action: Tensor) -> Step:
        base.check_action(action, self.spec.action, self.num_envs)
        before, live = self._last_obs(), ~self._waiting
        with self._inside():
            frozen = self._state.copy_rows() if self.manual_reset else {}
            # mjlab refuses to step past rows that are done. Under manual resets that is what we promise, so its
            # guard is told that nothing is pending; `frozen` puts the waiting rows back where they were.
            self._env._manual_reset_pending.zero_()
            raw, reward, terminated, truncated, extras = self._env.step(action)
            log, self._log = {**self._log, **extras["log"]}, {}  # mjlab's reset would drop what the step logged
            if frozen:
                self._state.write_rows(frozen, self._waiting)
            self._obs = final_obs = where_rows(live, _groups(raw), before)
            reward = torch.where(live, reward, 0.0)  # copies, here and below: mjlab reuses reward and masks
            terminated, truncated = terminated & live, truncated & live & ~terminated
            if self._env.cfg.is_finite_horizon:
                terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
            done = terminated | truncated
            if self.manual_reset:
                self._waiting = self._waiting | done
            else:
                log.update(self._reset_rows(done))
        obs, final_obs = _clones(self._last_obs()), _clones(final_obs)
        return Step(obs, reward, terminated, truncated, final_obs, live, {"log": log})

    def set_manual_reset(self, manual: bool) -> None:
        if manual:
            self._need(Capability.MANUAL_RESET)
        self.manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        clock = self._env.episode_length_buf
        clock.copy_(torch.where(check_mask(env_mask, self.num_envs, self.device), steps.to(clock), clock))

    def seed(self, seed: int) -> None:
        devices = ["cpu", self.device] if self.device.type == "cuda" else ["cpu"]
        self._rng = [torch.Generator(device).manual_seed(seed).get_state() for device in devices]

    def render(self, env_index: int = 0) -> Any:
        self._need(Capability.RENDER)
        if self._renderer is None:
            self._renderer = MjlabRenderer(self._env)
        return self._renderer.draw(env_index)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._env.close()

    def _reset_rows(self, mask: Tensor) -> Dict[str, Any]:
        """Reset the rows of `mask` [N], update the last observation there, and return mjlab's log of those episodes."""
        ids = mask.nonzero(as_tuple=False).squeeze(-1)  # the host waits here; mjlab's reset takes indices only
        if len(ids) == 0:
            return {}
        # mjlab's reset adds every row's running command metrics up once more; the other rows get theirs back.
        metrics = [value for term in self._env.command_manager._terms.values() for value in term.metrics.values()]
        kept = [value.clone() for value in metrics]
        raw, extras = self._env.reset(env_ids=ids)
        for value, old in zip(metrics, kept):
            value.copy_(torch.where(mask, value, old))
        # It also draws new noise for every row: only the reset rows take the new observation.
        fresh = _groups(raw)
        self._obs = fresh if self._obs is None else where_rows(mask, fresh, self._obs)
        self._waiting = self._waiting & ~mask
        return dict(extras["log"])

    def _last_obs(self) -> Obs:
        if self._obs is None:
            raise RuntimeError("MjlabEnv: call reset() before the first step")
        return self._obs

    # -- difficulty ----------------------------------------------------------------------------------------------
    def set_evaluation(self, evaluating: bool) -> None:
        from mjlab.managers.curriculum_manager import NullCurriculumManager

        self._evaluating = evaluating
        self._env.curriculum_manager = NullCurriculumManager() if evaluating else self._curriculum

    @contextlib.contextmanager
    def _frozen_curriculum(self) -> Iterator[None]:
        was = self._evaluating
        self.set_evaluation(True)
        try:
            yield
        finally:
            self.set_evaluation(was)

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        if "shared" in state:
            self._state.load_shared(state["shared"])
        terrain, rows = self._env.scene.terrain, state.get("rows", {})
        if self.difficulty_levels and "terrain.terrain_levels" in rows:
            saved = rows["terrain.terrain_levels"]
            like = torch.arange(self.num_envs) * len(saved) // self.num_envs  # rows are in order of terrain type
            self._place(saved[like].to(self.device), rows["terrain.terrain_types"][like].to(terrain.terrain_types))

    def set_difficulty(self, level: int) -> None:
        """Rebuild the terrain with row `level`'s difficulty everywhere, so that nobody walks off to another level.

        Environments are spread evenly over the terrain types (the columns). Curricula keep what they have reached.
        """
        if not 0 <= level < self.difficulty_levels:
            raise ConfigError(f"difficulty={level}: {self._task[0]} has {_levels(self.difficulty_levels)}")
        shared, evaluating = self._state.shared(), self._evaluating
        self.close()
        self._build(level)
        self._state.load_shared(shared)
        self.set_evaluation(evaluating)
        terrain = self._env.scene.terrain
        columns = torch.arange(self.num_envs, device=self.device) % terrain.terrain_origins.shape[1]
        self._place(terrain.terrain_levels, columns)

    def evaluation_cases(self) -> Dict[str, Tensor]:
        if not self.difficulty_levels:
            return {}
        names = graded_terrain(self._env.cfg).sub_terrains
        return {name: self._env.scene.terrain.terrain_types == column for column, name in enumerate(names)}

    def _place(self, levels: Tensor, types: Tensor) -> None:
        """Start the next episodes on these rows and columns of the terrain, [N] int64 each."""
        terrain = self._env.scene.terrain
        terrain.terrain_levels.copy_(levels)
        terrain.terrain_types.copy_(types)
        terrain.env_origins.copy_(terrain.terrain_origins[levels, types])

    # -- state ---------------------------------------------------------------------------------------------------
    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        self._need(Capability.SET_STATE)
        check_mask(env_mask, self.num_envs, self.device)
        self._last_obs()
        return self._state.copy_rows()

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        self._need(Capability.SET_STATE)
        mask, before = check_mask(env_mask, self.num_envs, self.device), self._last_obs()
        with self._inside():
            self._state.write_rows(state, mask)
            self._waiting = self._waiting & ~mask
            nobody = mask.nonzero().squeeze(-1)[:0]
            self._env.sim.forward()
            for sensor in self._env.scene.sensors.values():
                sensor.reset(nobody)  # no row, only the readings that it has cached
            self._env.sim.sense()
            # Histories and delays are those of `state` and must not take this observation as one step more.
            raw = self._env.observation_manager.compute(update_history=True, env_ids=nobody)
            self._obs = where_rows(mask, _groups(raw), before)
        return _clones(self._obs)

    def state_dict(self) -> Dict[str, Any]:
        state: Dict[str, Any] = {"rng": list(self._rng), "shared": self._state.shared()}
        if self._obs is not None:
            state["sim_step_counter"] = self._env._sim_step_counter
            state["rows"] = self._state.copy_rows(identity=True)
            state["terrain_origins"] = self._terrain_origins().clone()
            state["obs"] = _clones(self._obs)
            state["waiting"] = self._waiting.clone()
            state["log"] = dict(self._log)
        return state

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if "rows" in state:
            if not torch.equal(state["terrain_origins"].to(self.device), self._terrain_origins()):
                raise ValueError(
                    "terrain_origins: the state is of another terrain; build the environment with its seed"
                )
            self.reset()  # mjlab's terms build some of their buffers in the first reset
            self._env._sim_step_counter = int(state["sim_step_counter"])
            self._state.load_shared(state["shared"])
            self.set_state(state["rows"])
            self._obs = {name: value.to(self.device).clone() for name, value in state["obs"].items()}
            self._waiting = state["waiting"].to(self.device).clone()
            self._log = dict(state["log"])
        else:
            self._state.load_shared(state["shared"])
        self._rng = [rng.cpu() for rng in state["rng"]]

    def _terrain_origins(self) -> Tensor:
        """[levels, types, 3] of the generated terrain; empty for a plane."""
        terrain = self._env.scene.terrain
        origins = None if terrain is None else terrain.terrain_origins
        return torch.zeros(0, device=self.device) if origins is None else origins

    def _need(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            raise self.lacks(capability)

    def _find_capabilities(self) -> FrozenSet[Capability]:
        has = set(Capability)
        if self.device.type != "cpu":
            has -= {Capability.EXACT_RESUME}
        if not can_render():
            has -= {Capability.RENDER}
        return frozenset(has)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Our random stream in place, no gradients, and no inference tensors left in mjlab's buffers."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), torch.inference_mode(False), torch.no_grad():
            torch.set_rng_state(self._rng[0])
            if cuda:
                torch.cuda.set_rng_state(self._rng[1], self.device)
            yield
            self._rng = _rng_state(self.device)


def _groups(groups: Mapping[str, Any]) -> Dict[str, Any]:
    """mjlab's observation groups (tensors [N, ...], new ones at every pass, or their shapes) under our names."""
    split = [group for group, value in groups.items() if isinstance(value, (dict, list))]
    if split:
        raise ConfigError(f"observation group '{split[0]}' has concatenate_terms=False; a policy here needs one tensor")
    return {"policy" if group == "actor" else group: value for group, value in groups.items()}


def _clones(obs: Obs) -> Obs:
    """What the caller may write into: our own copy is what frozen rows and partial resets show again."""
    return {name: value.clone() for name, value in obs.items()}


def _levels(count: int) -> str:
    return f"levels 0 to {count - 1}" if count else "no levels of difficulty"


def _rng_state(device: torch.device) -> List[Tensor]:
    """States of torch's global generators that mjlab draws from: the CPU's and, on a GPU, the device's."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]
