"""mjlab (MuJoCo-Warp) tasks as a `VecEnv`, on "cpu" and "cuda:i" alike. Written against mjlab 1.6.0.

Why the resets are ours: with mjlab's `auto_reset` the observation of an ended episode is never computed. We turn it
off, so that `step` returns the exact final observation, and reset the done rows ourselves in the same step. That costs
one more `sim.forward()` and one more observation pass in the steps in which something resets.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs import base
from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_mask, where_rows
from rl_stagger.errors import ConfigError, nearest
from rl_stagger.rng import global_rng_state, set_global_rng_state

_PHYSICS = "qpos qvel act qacc_warmstart time ctrl mocap_pos mocap_quat qfrc_applied xfrc_applied eq_active".split()
_MANAGERS = ("action", "command", "observation", "reward", "metrics", "termination", "event")
_OWN_FIELDS = ("overrides.seed", "overrides.auto_reset", "overrides.scene.num_envs")
_CACHES = ("_cached_data", "_obs_buffer")
"""Last sensor readings and observations: mjlab computes them again whenever they matter."""
_ENDLESS_S = 1e8
"""Episode lengths from here on are mjlab's way to say "no time limit" (its play configs have 1e9 and 1e10)."""


class MjlabEnv(VecEnv):
    """One of mjlab's registered tasks.

    Observation groups: mjlab's `actor` is "policy"; the others keep their names, "critic" among them where the task
    defines it. Actions are unbounded, as in mjlab.

    `get_state` covers the physics, the clock and every [N, ...] tensor of the managers, their terms and the sensors:
    last actions, commands and their timers, push timers, air times, episode sums. Not covered: what belongs to a row
    rather than to its episode (randomised model fields, encoder biases, terrain level and origin; `state_dict` has
    those) and Python numbers inside terms. Observation histories and delays keep all rows behind one write pointer:
    tasks that have them lack SET_STATE, MANUAL_RESET and EXACT_RESUME. EXACT_RESUME is claimed on the CPU only:
    MuJoCo-Warp is not deterministic on a GPU.

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
        cfg, env_class = _load(task_id, play)
        override(cfg, overrides or {})
        self.num_envs, self.device = num_envs, torch.device(device)
        cfg.seed, cfg.auto_reset, cfg.scene.num_envs = seed, False, num_envs
        if horizon_steps is not None:
            cfg.episode_length_s = episode_length_s(horizon_steps, cfg.sim.mujoco.timestep * cfg.decimation)

        outer = global_rng_state()
        with contextlib.redirect_stdout(sys.stderr):  # mjlab prints its tables
            self._env = env_class(cfg, device=str(self.device))  # seeds Python's, NumPy's and torch's generators
        self._rng = _rng_state(self.device)
        set_global_rng_state(outer)

        limited = any(term.time_out for term in cfg.terminations.values() if term is not None)
        limited = limited and cfg.episode_length_s < _ENDLESS_S
        self.spec = base.EnvSpec(
            _groups(self._env.observation_manager.group_obs_dim),
            base.Box(int(self._env.action_manager.total_action_dim)),
            int(self._env.max_episode_length) if limited else None,
        )
        self.capabilities = self._find_capabilities()
        self.manual_reset = False
        self._obs: Optional[Obs] = None
        self._log: Dict[str, Any] = {}
        self._waiting = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._curriculum = self._env.curriculum_manager

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._env.episode_length_buf.clone()

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        with self._inside():
            log = self._reset_rows(mask if self._obs is not None else torch.ones_like(mask))
        if self.manual_reset:  # these episodes ended in steps that could not report them yet
            self._log.update(log)
        return dict(self._last_obs())

    def step(self, action: Tensor) -> Step:
        base.check_action(action, self.spec.action, self.num_envs)
        before, live = self._last_obs(), ~self._waiting
        with self._inside():
            frozen = self._rows(clone=True) if self.manual_reset else {}
            # mjlab refuses to step past rows that are done. Under manual resets that is what we promise, so its
            # guard is told that nothing is pending; `frozen` puts the waiting rows back where they were.
            self._env._manual_reset_pending.zero_()
            raw, reward, terminated, truncated, extras = self._env.step(action)
            log, self._log = {**self._log, **extras["log"]}, {}  # mjlab's reset would drop what the step logged
            self._write(frozen, self._waiting)
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
        return Step(dict(self._last_obs()), reward, terminated, truncated, final_obs, live, {"log": log})

    def set_manual_reset(self, manual: bool) -> None:
        if manual:
            self._need(Capability.MANUAL_RESET)
        self.manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        clock = self._env.episode_length_buf
        clock.copy_(torch.where(check_mask(env_mask, self.num_envs, self.device), steps.to(clock), clock))

    def set_evaluation(self, evaluating: bool) -> None:
        from mjlab.managers.curriculum_manager import NullCurriculumManager

        self._env.curriculum_manager = NullCurriculumManager() if evaluating else self._curriculum

    def seed(self, seed: int) -> None:
        devices = ["cpu", self.device] if self.device.type == "cuda" else ["cpu"]
        self._rng = [torch.Generator(device).manual_seed(seed).get_state() for device in devices]

    def close(self) -> None:
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

    # -- state ---------------------------------------------------------------------------------------------------
    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        self._need(Capability.SET_STATE)
        check_mask(env_mask, self.num_envs, self.device)
        self._last_obs()
        return self._rows(clone=True)

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        self._need(Capability.SET_STATE)
        mask, before = check_mask(env_mask, self.num_envs, self.device), self._last_obs()
        with self._inside():
            self._write(state, mask)
            self._waiting = self._waiting & ~mask
            self._env.sim.forward()
            for sensor in self._env.scene.sensors.values():
                sensor.reset(mask.nonzero().squeeze(-1)[:0])  # no row, only the readings that it has cached
            self._env.sim.sense()
            raw = self._env.observation_manager.compute(update_history=True)
            self._obs = where_rows(mask, _groups(raw), before)
        return dict(self._obs)

    def state_dict(self) -> Dict[str, Any]:
        state = {"rng": list(self._rng), "common_step_counter": self._env.common_step_counter}
        if Capability.SET_STATE in self.capabilities and self._obs is not None:
            state["sim_step_counter"] = self._env._sim_step_counter
            state["rows"] = self._rows(clone=True, identity=True)
            state["obs"] = {name: value.clone() for name, value in self._obs.items()}
            state["waiting"] = self._waiting.clone()
            state["log"] = dict(self._log)
        return state

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self._env.common_step_counter = int(state["common_step_counter"])  # the curricula in `reset` read it
        if "rows" in state:
            self.reset()  # mjlab's terms build some of their buffers in the first reset
            self._env._sim_step_counter = int(state["sim_step_counter"])
            self.set_state(state["rows"])
            self._obs = {name: value.to(self.device).clone() for name, value in state["obs"].items()}
            self._waiting = state["waiting"].to(self.device).clone()
            self._log = dict(state["log"])
        self._rng = [rng.cpu() for rng in state["rng"]]

    def _rows(self, clone: bool = False, identity: bool = False) -> Dict[str, Any]:
        """Name -> [N, ...] of all that an episode carries, live or cloned; `identity`: what its row carries as well."""
        env, sim = self._env, self._env.sim
        rows: Dict[str, Any] = {"elapsed_steps": env.episode_length_buf}
        present = [name for name in _PHYSICS if getattr(sim.wp_data, name).size > 0]  # mjlab cannot wrap empty ones
        rows.update({f"physics.{name}": getattr(sim.data, name) for name in present})
        roots: Dict[str, Any] = {name: getattr(env, f"{name}_manager") for name in _MANAGERS}
        roots["sensor"] = env.scene.sensors
        if identity:
            rows.update({f"model.{name}": getattr(sim.model, name) for name in sorted(sim.expanded_fields)})
            roots["entity"] = {name: entity.data for name, entity in env.scene.entities.items()}
            roots["terrain"] = vars(env.scene.terrain) if env.scene.terrain is not None else {}
        tensors = {name: value for name, value in _owned(roots) if isinstance(value, Tensor) and value.dim() > 0}
        rows.update({name: value for name, value in tensors.items() if value.shape[0] == self.num_envs})
        return {name: value[:].clone() for name, value in rows.items()} if clone else rows

    def _write(self, new: Dict[str, Tensor], mask: Tensor) -> None:
        """Write the rows of `mask` [N] of every array in `new`, in place: MuJoCo-Warp shares the memory."""
        live = self._rows(identity=any(name.startswith("entity.") for name in new)) if new else {}
        for name, value in new.items():
            if name not in live:
                raise ValueError(f"state has '{name}', which this task does not; {nearest(name, live)}")
            target = live[name]
            target[:] = torch.where(base.expand_mask(mask, target), value.to(self.device, target.dtype), target[:])

    def _need(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            raise self.lacks(capability)

    def _find_capabilities(self) -> FrozenSet[Capability]:
        has = {Capability.PARTIAL_RESET, Capability.SET_CLOCK, Capability.FINAL_OBS}
        entities = {name: vars(entity) for name, entity in self._env.scene.entities.items()}
        owned = _owned({"observation": self._env.observation_manager, "entity": entities})
        if not any(type(value).__name__ in ("CircularBuffer", "DelayBuffer") for _, value in owned):
            has |= {Capability.SET_STATE, Capability.MANUAL_RESET}
            has |= {Capability.EXACT_RESUME} if self.device.type == "cpu" else set()
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


def override(cfg: Any, overrides: Mapping[str, Any], path: str = "overrides") -> None:
    """Write dotted paths (or nested mappings) into mjlab's config, in place. Raises ConfigError for an unknown one."""
    for dotted, value in overrides.items():
        name, _, rest = str(dotted).partition(".")
        names, here = _names(cfg), f"{path}.{name}"
        if name not in names:
            raise ConfigError(f"{here}: mjlab's config has no '{name}' there; {nearest(name, names)}")
        old = cfg[name] if isinstance(cfg, dict) else getattr(cfg, name)
        if rest or (isinstance(value, Mapping) and _names(old)):
            override(old, {rest: value} if rest else value, here)
        elif here in _OWN_FIELDS:
            raise ConfigError(f"{here}: num_envs, seed and the adapter itself decide that")
        else:
            value = tuple(value) if isinstance(old, tuple) else value
            cfg.update({name: value}) if isinstance(cfg, dict) else setattr(cfg, name, value)


def _names(cfg: Any) -> List[str]:
    """Keys of a dict, fields of a dataclass, nothing of anything else."""
    if isinstance(cfg, dict):
        return list(cfg)
    return [field.name for field in dataclasses.fields(cfg)] if dataclasses.is_dataclass(cfg) else []


def _load(task_id: str, play: bool) -> Tuple[Any, Any]:
    """(the task's own copy of its config, mjlab's env class)."""
    try:
        import mjlab.tasks  # noqa: F401  (registers the tasks)
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import list_tasks, load_env_cfg
    except ModuleNotFoundError as error:
        raise ConfigError(f"mjlab cannot be imported ({error}): pip install 'rl_stagger[mjlab]'") from error
    if task_id not in list_tasks():
        raise ConfigError(f"task_id '{task_id}' is unknown to mjlab; {nearest(task_id, list_tasks())}")
    return load_env_cfg(task_id, play=play), ManagerBasedRlEnv


def episode_length_s(horizon_steps: int, step_s: float) -> float:
    """Seconds that mjlab's ceil(seconds / step_s) turns into `horizon_steps` exactly."""
    if horizon_steps < 1:
        raise ConfigError(f"horizon_steps={horizon_steps}: at least 1")
    seconds = horizon_steps * step_s
    return seconds if math.ceil(seconds / step_s) == horizon_steps else seconds * (1 - 1e-9)


def _groups(groups: Mapping[str, Any]) -> Dict[str, Any]:
    """mjlab's observation groups (tensors [N, ...], new ones at every pass, or their shapes) under our names."""
    split = [group for group, value in groups.items() if isinstance(value, (dict, list))]
    if split:
        raise ConfigError(f"observation group '{split[0]}' has concatenate_terms=False; a policy here needs one tensor")
    return {"policy" if group == "actor" else group: value for group, value in groups.items()}


def _owned(roots: Dict[str, Any]) -> Iterator[Tuple[str, Any]]:
    """(dotted name, value) of all that `roots` own; the env, entities and the simulator's arrays are not theirs."""
    from mjlab.entity import Entity
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.sim.sim_data import TorchArray

    foreign = (ManagerBasedRlEnv, Entity, TorchArray, types.FunctionType, types.MethodType, type)
    seen, todo = set(), list(roots.items())
    while todo:
        name, value = todo.pop()
        yield name, value
        parts: Dict[Any, Any] = {}
        if isinstance(value, (dict, list, tuple)):
            parts = value if isinstance(value, dict) else dict(enumerate(value))
        elif isinstance(value, foreign) or id(value) in seen:
            continue
        elif type(value).__module__.startswith("mjlab") or hasattr(value, "_env"):  # a user's own terms have _env
            seen.add(id(value))
            parts = {key: part for key, part in vars(value).items() if key not in _CACHES}
        todo.extend((f"{name}.{key}", part) for key, part in parts.items())


def _rng_state(device: torch.device) -> List[Tensor]:
    """States of torch's global generators that mjlab draws from: the CPU's and, on a GPU, the device's."""
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]
