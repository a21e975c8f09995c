"""Isaac Lab's tasks, manager-based and direct, as a `VecEnv`. Written against Isaac Lab 3.0.0, with its Newton physics
and no Isaac Sim ("kit-less") as well as with Isaac Sim; 2.x lacks final observations.

A done environment is reset inside `step`. Since 3.0 `cfg.compute_final_obs` has the observation of before the reset
computed as well, and we switch it on; older versions have none, and `algorithm.bootstrap=pre_step_value` is what time
limits are bootstrapped with.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import sys
from typing import Any, Dict, FrozenSet, Iterator, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs import base
from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_mask, where_rows
from rl_stagger.envs.env_config import episode_length_s, override
from rl_stagger.envs.isaac_gym_host import OwnRandomness, Terrain
from rl_stagger.errors import ConfigError, nearest
from rl_stagger.integrations.lookup import reset_isaac_lab

INSTALL = (
    "pip install isaaclab==3.0.0, which needs Python 3.12 and torch 2.11 (github.com/isaac-sim/IsaacLab; 2.x comes "
    "with Isaac Sim)"
)


class IsaacLabEnv(VecEnv):
    """One of Isaac Lab's registered tasks; one simulation a process.

    Groups keep Isaac Lab's names: "policy", and "critic" where the task has it. The clock is `episode_length_buf`,
    which may be written. A task under `is_finite_horizon` terminates at its time limit.

    Tasks with observation histories or delays lack PARTIAL_RESET: Isaac Lab's partial reset pushes one frame more into
    the histories of all rows. States cannot be set (controllers, actuators and terms have some that no call reads).

    `state_dict` holds terrain levels, reward weights and command ranges (what curricula move), the step counter that
    they look at, and random numbers; after loading it the episodes begin anew, with one invalid step. Curricula stand
    still in evaluation and while a caller cuts episodes short. `set_difficulty` puts all environments on one row of a
    graded terrain, evenly over its columns; a robot that walks off its row meets the next one.
    """

    one_per_process = True

    def __init__(
        self,
        num_envs: int,
        device: Union[torch.device, str] = "cpu",
        seed: int = 0,
        task_id: str = "Isaac-Cartpole",
        horizon_steps: Optional[int] = None,
        presets: Sequence[str] = (),
        overrides: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """`horizon_steps`: None = the task's own. `presets`: Isaac Lab's selectors, e.g. ["physics=newton_mjwarp"].
        `overrides`: dotted path in the task's env config -> value."""
        self.num_envs, self.device = num_envs, torch.device(device)
        self._random = OwnRandomness(self.device, seed)
        self._open = contextlib.ExitStack()
        with contextlib.redirect_stdout(sys.stderr), self._random.inside():
            cfg = load_cfg(task_id, num_envs, self.device, presets)
            override(cfg, overrides or {})
            cfg.seed = seed
            if horizon_steps is not None:
                cfg.episode_length_s = episode_length_s(horizon_steps, cfg.sim.dt * cfg.decimation)
            self._final = hasattr(cfg, "compute_final_obs")
            if self._final:
                cfg.compute_final_obs = True
            self._env = start(task_id, cfg, self._open)
        self._curriculum = getattr(self._env, "curriculum_manager", None)
        self._evaluating, self._fixed_level, self._begin_anew = False, False, False
        terrain = getattr(self._env.scene, "terrain", None)
        self._terrain = Terrain(terrain)
        self.difficulty_levels = self._terrain.num_levels if _graded(terrain) else 0
        self._obs: Optional[Obs] = None
        with self._inside(frozen=True):
            first = self._groups(self._env.reset()[0])
        limit = int(self._env.max_episode_length) if math.isfinite(self._env.max_episode_length) else None
        shapes = {name: tuple(x.shape[1:]) for name, x in first.items()}
        self.spec = base.EnvSpec(shapes, base.Box(_num_actions(self._env, task_id)), limit)
        self.capabilities = self._find_capabilities()

    def _find_capabilities(self) -> FrozenSet[Capability]:
        has = {Capability.SET_CLOCK}
        if self._final:
            has.add(Capability.FINAL_OBS)
        if not _remembers(getattr(self._env, "observation_manager", None)):
            has.add(Capability.PARTIAL_RESET)
        return frozenset(has)

    # -- stepping ------------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._env.episode_length_buf.to(self.device, torch.int64, copy=True)

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        whole = env_mask is None or self._obs is None or bool(mask.all())
        if not whole and Capability.PARTIAL_RESET not in self.capabilities:
            raise self.lacks(Capability.PARTIAL_RESET)
        with self._inside(frozen=True):  # how far a robot came says nothing where it was cut short
            if whole:
                self._obs = self._groups(self._env.reset()[0])
            elif bool(mask.any()):
                ids = mask.nonzero(as_tuple=False).squeeze(-1)
                # Looking draws new noise for every row; only the reset ones take it.
                self._obs = where_rows(mask, self._groups(reset_isaac_lab(self._env, ids)), self._last_obs())
        self._begin_anew = False
        return self._shown()

    def step(self, action: Tensor) -> Step:
        base.check_action(action, self.spec.action, self.num_envs)
        valid = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if self._begin_anew:
            obs, no = self.reset(), torch.zeros_like(valid)
            final = self._shown() if self._final else None
            reward = torch.zeros(self.num_envs, device=self.device)
            return Step(obs, reward, no, no.clone(), final, no.clone(), {"reset": valid, "log": {}})
        self._last_obs()
        with self._inside():
            self._env.extras.pop("final_obs", None)  # it and the log stay as they are until somebody resets again
            self._env.extras["log"] = {}
            raw, reward, terminated, truncated, extras = self._env.step(action)
            self._obs = self._groups(raw)
            reward = reward.to(self.device, torch.float32, copy=True)
            terminated = terminated.to(self.device, torch.bool, copy=True)
            truncated = truncated.to(self.device, torch.bool, copy=True) & ~terminated
            log = {name: x.clone() if isinstance(x, Tensor) else x for name, x in extras["log"].items()}
            final = self._groups(extras["final_obs"]) if "final_obs" in extras else self._shown()
        if self._env.cfg.is_finite_horizon:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        return Step(self._shown(), reward, terminated, truncated, final if self._final else None, valid, {"log": log})

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        mask = check_mask(env_mask, self.num_envs, self.device)
        clock = self._env.episode_length_buf
        clock.copy_(torch.where(mask.to(clock.device), steps.to(clock), clock))

    def seed(self, seed: int) -> None:
        self._random.seed(seed)

    def close(self) -> None:
        self._env.close()
        self._open.close()

    def _last_obs(self) -> Obs:
        if self._obs is None:
            raise RuntimeError("IsaacLabEnv: call reset() before the first step")
        return self._obs

    def _shown(self) -> Obs:
        """What the caller may write into."""
        return {name: x.clone() for name, x in self._last_obs().items()}

    def _groups(self, raw: Mapping[str, Any]) -> Obs:
        """Clones [N, ...] of Isaac Lab's observation groups."""
        for name, x in raw.items():
            if not isinstance(x, Tensor):
                raise ConfigError(f"observation group '{name}' has concatenate_terms=False; a policy needs one tensor")
            if x.dim() != 2:
                raise ConfigError(
                    f"observation group '{name}' has shape {list(x.shape[1:])}: pictures are not read here; take a "
                    f"task without cameras"
                )
        return {name: x.to(self.device, torch.float32, copy=True) for name, x in raw.items()}

    # -- difficulty and state ------------------------------------------------------------------------------------
    def set_evaluation(self, evaluating: bool) -> None:
        self._evaluating = evaluating

    def set_difficulty(self, level: int) -> None:
        if not 0 <= level < self.difficulty_levels:
            levels = f"levels 0 to {self.difficulty_levels - 1}" if self.difficulty_levels else "no graded terrain"
            raise ConfigError(f"difficulty={level}: this task has {levels}")
        terrain = self._env.scene.terrain
        columns = torch.arange(self.num_envs, device=terrain.terrain_types.device) % terrain.terrain_origins.shape[1]
        self._terrain.place(torch.full_like(terrain.terrain_levels, level), columns.to(terrain.terrain_types))
        self._fixed_level = True

    def evaluation_cases(self) -> Dict[str, Tensor]:
        if not self.difficulty_levels:
            return {}
        terrain = self._env.scene.terrain
        names = column_names(terrain.cfg.terrain_generator, terrain.terrain_origins.shape[1])
        types = terrain.terrain_types.to(self.device)
        cases = {name: torch.zeros(self.num_envs, dtype=torch.bool, device=self.device) for name in names}
        for column, name in enumerate(names):
            cases[name] |= types == column
        return cases

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        self._terrain.load_state_dict(state.get("terrain", {}))
        for owner, name, key in self._moved_by_curricula():
            if key in state.get("numbers", {}):
                value = state["numbers"][key]
                setattr(owner, name, tuple(value) if isinstance(value, list) else value)

    def state_dict(self) -> Dict[str, Any]:
        numbers = {key: getattr(owner, name) for owner, name, key in self._moved_by_curricula()}
        return {
            "episodes": False,
            "terrain": self._terrain.state_dict(),
            "numbers": {key: list(x) if isinstance(x, tuple) else x for key, x in numbers.items()},
            "common_step_counter": int(self._env.common_step_counter),
            "rng": self._random.state_dict(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.load_curriculum(state)
        self._env.common_step_counter = int(state["common_step_counter"])
        self._random.load_state_dict(state["rng"])
        self._begin_anew = True

    def _moved_by_curricula(self) -> Iterator[Tuple[Any, str, str]]:
        """(owner, attribute, name) of reward weights and of command ranges."""
        rewards = getattr(self._env, "reward_manager", None)
        if rewards is not None:
            for name in rewards.active_terms:
                yield rewards.get_term_cfg(name), "weight", f"reward.{name}.weight"
        commands = getattr(self._env, "command_manager", None)
        if commands is None:
            return
        for name in commands.active_terms:
            ranges = getattr(commands.get_term(name).cfg, "ranges", None)
            if dataclasses.is_dataclass(ranges):
                for field in dataclasses.fields(ranges):
                    if isinstance(getattr(ranges, field.name), tuple):
                        yield ranges, field.name, f"command.{name}.{field.name}"

    @contextlib.contextmanager
    def _inside(self, frozen: bool = False) -> Iterator[None]:
        """Our random stream, prints on stderr, and curricula that stand still in evaluation and where `frozen`."""
        if self._curriculum is not None:
            still = frozen or self._evaluating or self._fixed_level
            self._env.curriculum_manager = _Still() if still else self._curriculum
        try:
            with contextlib.redirect_stdout(sys.stderr), self._random.inside():
                yield
        finally:
            if self._curriculum is not None:
                self._env.curriculum_manager = self._curriculum


class _Still:
    """A curriculum manager that does nothing."""

    def compute(self, env_ids: Any = None) -> None:
        pass

    def reset(self, env_ids: Any = None) -> Dict[str, float]:
        return {}


# -- building ---------------------------------------------------------------------------------------------------------
def load_cfg(task_id: str, num_envs: int, device: torch.device, presets: Sequence[str]) -> Any:
    """The task's own env config. Raises ConfigError where Isaac Lab or the task is missing."""
    try:
        import gymnasium

        if importlib.util.find_spec("isaaclab") is None:
            raise ModuleNotFoundError("No module named 'isaaclab'")
        if not _kitless():
            launch_kit(device)  # before anything else of Isaac Lab
        import isaaclab_tasks  # noqa: F401  (registers the tasks)
        from isaaclab_tasks.utils import parse_env_cfg
    except ModuleNotFoundError as error:
        raise ConfigError(f"task isaaclab/{task_id}: Isaac Lab cannot be imported ({error}): {INSTALL}") from error
    known = [name for name in gymnasium.registry if name.startswith("Isaac")]
    if task_id not in known:
        raise ConfigError(f"task_id={task_id!r} is unknown to Isaac Lab; {nearest(task_id, known)}")
    more = {"overrides": list(presets)} if presets else {}
    return parse_env_cfg(task_id, device=str(device), num_envs=num_envs, **more)


def start(task_id: str, cfg: Any, stack: contextlib.ExitStack) -> Any:
    """The simulation, running, without Gymnasium's wrappers; `stack` ends what it needs besides."""
    import gymnasium

    if _kitless():
        from isaaclab.app.sim_launcher import launch_simulation

        stack.enter_context(launch_simulation(cfg, {"headless": True, "device": cfg.sim.device}))
    return gymnasium.make(task_id, cfg=cfg).unwrapped


def _kitless() -> bool:
    """Whether this Isaac Lab starts what a config needs by itself (3.0 on), Isaac Sim or not."""
    return importlib.util.find_spec("isaaclab.app.sim_launcher") is not None


def launch_kit(device: torch.device) -> None:
    """Isaac Lab 2.x: Isaac Sim has to run before its modules can be imported."""
    from isaaclab.app import AppLauncher

    AppLauncher(headless=True, device=str(device))


# -- what an environment says of itself -------------------------------------------------------------------------------
def _num_actions(env: Any, task_id: str) -> int:
    if hasattr(env, "action_manager"):
        return int(env.action_manager.total_action_dim)
    shape = getattr(env.single_action_space, "shape", None)
    if not shape:
        raise ConfigError(f"task_id={task_id!r}: its actions are {env.single_action_space}; a Box is needed here")
    return int(math.prod(shape))


def _remembers(observation_manager: Any) -> bool:
    """Whether observations hold earlier ones, by history or delay."""
    names = ("_group_obs_term_history_buffer", "_group_obs_term_delay_buffer")
    buffers = [getattr(observation_manager, name, None) or {} for name in names]
    return any(bool(terms) for groups in buffers for terms in groups.values())


def _graded(terrain: Any) -> bool:
    generator = getattr(getattr(terrain, "cfg", None), "terrain_generator", None)
    return generator is not None and bool(generator.curriculum) and Terrain(terrain).present


def column_names(generator: Any, num_columns: int) -> Tuple[str, ...]:
    """Terrain type of each column of a graded terrain: Isaac Lab gives columns out by cumulative proportion.

    >>> from types import SimpleNamespace as S
    >>> column_names(S(sub_terrains={"flat": S(proportion=1.0), "stairs": S(proportion=3.0)}), 4)
    ('flat', 'stairs', 'stairs', 'stairs')
    """
    names = list(generator.sub_terrains)
    shares = [float(sub.proportion) for sub in generator.sub_terrains.values()]
    upto = [sum(shares[: i + 1]) / sum(shares) for i in range(len(shares))]
    found = []
    for column in range(num_columns):
        place = column / num_columns + 0.001
        found.append(names[next((i for i, bound in enumerate(upto) if place < bound), len(names) - 1)])
    return tuple(found)
