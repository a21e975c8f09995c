"""The reset rule as a whole: allocation, bring-up, gate and upkeep, put around any VecEnv."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, VecEnv
from rl_stagger.errors import ConfigError
from rl_stagger.resets.adaptive import AdaptiveDensity
from rl_stagger.resets.allocation import Layout, allocate, even_density
from rl_stagger.resets.bring_up import BRING_UPS, Actor, SnapshotBringUp, random_actor
from rl_stagger.resets.checks import check_capabilities, check_density, check_sizes
from rl_stagger.resets.config import ResetConfig, config_of, value_at
from rl_stagger.resets.coverage import phase_bins, total_variation
from rl_stagger.resets.density import binned, density_over, first_share, nonincreasing
from rl_stagger.resets.gates import GATES
from rl_stagger.resets.library import StateLibrary
from rl_stagger.resets.upkeep import Target, Upkeep
from rl_stagger.rng import generator_state, make_generator, set_generator_state

RANK_STRIDE = 1_000_003
"""Between the seeds of two ranks' own random numbers."""


class StaggeredResets(VecEnv):
    """Any VecEnv under a reset rule; itself a VecEnv.

    `reset()` performs the bring-up and returns the observations after it. `elapsed_steps` is the environment's clock,
    `phase_steps` the true phase; they agree except after `bring_up="clock"`, see ClockBringUp.
    Raises ConfigError for sizes that cannot work and CapabilityError for what the simulator cannot do.
    """

    def __init__(
        self,
        env: VecEnv,
        rollout_steps: int,
        num_groups: Optional[int] = None,
        allocation: str = "uniform",
        bring_up: str = "warmup",
        gate: str = "immediate",
        gate_interval_steps: Optional[int] = None,
        warmup_actions: str = "random",
        upkeep: str = "auto",
        seed: int = 0,
        name: str = "custom",
        rank: int = 0,
        world_size: int = 1,
        **more: Any,
    ) -> None:
        """`rollout_steps` is K. The attribute `actor` gives the actions of a warm-up with warmup_actions="policy";
        whoever trains sets it before the first reset. `more`: other settings of `ResetConfig`, nested ones as dicts.

        `rank`, `world_size`: this environment's place among those of several processes, all with the same `seed`:
        offsets are allocated over all of them, other random numbers are each rank's own.
        """
        parts = {
            "name": name, "allocation": allocation, "num_groups": num_groups, "bring_up": bring_up,
            "warmup_actions": warmup_actions, "gate": gate, "gate_interval_steps": gate_interval_steps,
            "upkeep": upkeep,
        }  # fmt: skip
        self._setup(env, config_of({**parts, **more}), rollout_steps, seed, rank, world_size)

    def _setup(
        self, env: VecEnv, config: ResetConfig, rollout_steps: int, seed: int, rank: int, world_size: int
    ) -> None:
        for field, value, right in config.check():
            raise ConfigError(f"reset.{field}={value!r}: {right}")
        if env.spec.horizon_steps is not None:
            check_density(config, env.spec.horizon_steps)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}: between 0 and world_size - 1 = {world_size - 1}")
        self.env, self.config, self.rollout_steps = env, config, rollout_steps
        self.rank, self.world_size = rank, world_size
        self.num_envs, self.device, self.spec = env.num_envs, env.device, env.spec
        self.difficulty_levels = env.difficulty_levels
        # A gate that holds manual resets for itself cannot lend them to somebody outside.
        block = config.gate == "block"
        self.capabilities = env.capabilities - ({Capability.MANUAL_RESET} if block else set())
        self._total_envs = env.num_envs * world_size
        self.num_groups = check_sizes(config, env, rollout_steps, self._total_envs)
        check_capabilities(env, config)
        self.watch: Callable[[str], ContextManager[None]] = lambda name: nullcontext()
        """Times the resets that the rule makes by itself."""
        capacity = self._gate_capacity(rollout_steps)
        self._gate = GATES[config.gate](config.gate_interval_steps or rollout_steps, capacity)
        self._offset_generator = torch.Generator().manual_seed(seed)
        own_seed = seed + rank * RANK_STRIDE
        self._action_generator = make_generator(self.device, own_seed + 1)
        self.offsets = torch.zeros(self.num_envs, dtype=torch.int64)
        """[N] int64 on the CPU: where the last bring-up put each environment."""
        self._phase = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._manual_reset = False
        self.warmup_steps = 0
        """Env steps spent in bring-ups so far, all environments together."""
        self.actor: Optional[Actor] = None
        self._begun = False
        self._steps_in_rollout = 0
        self._horizon_share = 1.0
        self._best_return: Optional[float] = None
        self._adaptive: Optional[AdaptiveDensity] = None
        self._upkeep = self._make_upkeep(own_seed + 2)
        self.plan(0, rollout_steps)
        self._bring_up = BRING_UPS[config.bring_up]()
        if isinstance(self._bring_up, SnapshotBringUp) and self._upkeep is not None:
            self._bring_up = SnapshotBringUp(self._upkeep.library, self._upkeep.generator)

    @classmethod
    def from_config(
        cls, env: VecEnv, config: ResetConfig, rollout_steps: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> StaggeredResets:
        rule = cls.__new__(cls)
        rule._setup(env, config, rollout_steps, seed, rank, world_size)
        return rule

    @property
    def clock_is_true(self) -> bool:
        """False where the bring-up wrote clocks without moving states."""
        return self._bring_up.moves_state

    @property
    def warmup_bound_steps(self) -> int:
        """Env steps that the bring-up takes at most, all environments together."""
        if self.config.bring_up != "warmup" or self.spec.horizon_steps is None:
            return 0
        horizon, groups = self._horizon_in_use, self.num_groups
        last = (groups - 1) * horizon // groups if self.config.allocation == "uniform" else horizon - 1
        return last * self.num_envs

    @property
    def left_alone(self) -> int:
        """Environments that are never moved, where a density is held."""
        c = self.config
        held = c.holds_density and c.upkeep_in_force != "none" and c.whole_episode_share > 0
        return max(1, round(c.whole_episode_share * self.num_envs)) if held else 0

    @property
    def notes(self) -> List[str]:
        """What the rule promises only in part here, a line each."""
        found = []
        c = self.config
        if c.allocation == "density" and c.upkeep_in_force == "none":
            found.append(
                "reset.upkeep=none: the density is begun, not held; environments walk through all phases and take the "
                "mixture with them"
            )
        interval, horizon = c.gate_interval_steps or self.rollout_steps, self.spec.horizon_steps
        if c.gate == "block" and horizon is not None and interval * self.num_groups > 1.5 * horizon:
            found.append(
                f"reset.gate_interval_steps={interval}: {self.num_groups} groups of H={horizon} steps begin at "
                f"{-(-horizon // interval)} gates a horizon; groups that meet at a gate stay together"
            )
        if self._upkeep is not None and self._upkeep.library is None and c.upkeep_in_force != "none":
            text = (
                f"reset.upkeep={c.upkeep_in_force}: states are not set here, environments are moved by early cuts alone"
            )
            text += ", which can only favour early phases"
            if c.holds_density and c.allocation != "adaptive":
                wanted = self._wanted_density()
                distance = float(total_variation(wanted, nonincreasing(wanted)))
                text += f": what can be held is {distance:.2f} in total variation from what was asked for"
            found.append(text)
        return found

    @property
    def unwrapped(self) -> VecEnv:
        return self.env.unwrapped

    @property
    def elapsed_steps(self) -> Tensor:
        return self.env.elapsed_steps

    @property
    def phase_steps(self) -> Tensor:
        return self._phase.clone()

    def read_clocks(self) -> Tuple[Tensor, Tensor]:
        return self._phase, self.env.read_clocks()[1]

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        """None: the whole bring-up. A mask: plain resets of those rows."""
        if env_mask is not None:
            obs = self.env.reset(env_mask)
            self._phase = torch.where(env_mask, 0, self._phase)
            self._gate.release(env_mask, obs)
            return obs
        if self.spec.horizon_steps is not None:
            goal = self._aim()
            self.offsets = goal if self.config.bring_up != "none" else torch.zeros_like(goal)
        self._gate.pause(self.env)
        if self._manual_reset:
            self.env.set_manual_reset(False)
        with self.watch("reset"):
            start = self._bring_up.run(self.env, self.offsets, self._warmup_actor())
        if self._manual_reset:
            self.env.set_manual_reset(True)
        self._phase = start.phase_steps
        self.warmup_steps += start.warmup_steps
        self._gate.begin(self.env, start.obs)
        self._steps_in_rollout = 0
        self._begun = True
        if self._upkeep is not None:
            together = self.config.bring_up == "snapshot"
            self._upkeep.begin(self._upkeep.horizon_rollouts if together else 0)
        return start.obs

    def step(self, action: Tensor) -> Step:
        step = self._gate.step(self.env, action, self.watch)
        self._steps_in_rollout += 1
        boundary = self._steps_in_rollout >= self.rollout_steps
        if boundary:
            self._steps_in_rollout = 0
        if self._manual_reset:
            step.info["reset"] = torch.zeros_like(step.terminated)
        self._phase = (self._phase + step.valid).masked_fill_(step.info["reset"], 0)
        if self._upkeep is not None and not self._manual_reset:
            step, self._phase, moved = self._upkeep.after_step(
                step, self.env.elapsed_steps, self._phase, self._gate.waiting, boundary
            )
            if moved is not None:
                self._gate.release(moved, step.obs)
        return step

    # -- training goes on ----------------------------------------------------------------------------------------
    def plan(self, iteration: int, rollout_steps: int) -> None:
        """What is scheduled for the coming iteration (0 for the first), whose rollout has `rollout_steps` steps."""
        c = self.config
        other_steps = rollout_steps != self.rollout_steps
        self._set_rollout_steps(rollout_steps)
        groups, share = value_at(c.num_groups_schedule, iteration), value_at(c.horizon_share_schedule, iteration)
        if c.num_groups_by_return is not None and self._best_return is not None:
            groups = value_at(c.num_groups_by_return, self._best_return)
        wanted = min(int(groups), self._total_envs) if groups is not None else self.num_groups
        changed = (wanted, share or 1.0) != (self.num_groups, self._horizon_share)
        self.num_groups, self._horizon_share = wanted, share or 1.0
        if self._upkeep is None:
            return
        self._upkeep.horizon_rollouts = phase_bins(self._upkeep.target.period_steps, rollout_steps)
        if self._begun and (changed or other_steps):
            self._aim()  # at a gate, the period is a multiple of the interval
        if self._begun and changed:
            self._upkeep.spread()

    def check_rollout_steps(self, rollout_steps: int) -> None:
        """Raise ConfigError where rollouts of so many steps could not work later on."""
        check_sizes(self.config, self.env, rollout_steps, self._total_envs)
        self._gate_capacity(rollout_steps)

    def follow(self, phase: Tensor, error: Tensor, valid: Tensor) -> None:
        """What an iteration's learning showed: true phases in steps and target - V (the advantage before
        standardisation), all [K, N]. Read by allocation=adaptive."""
        if self._adaptive is not None and self._upkeep is not None:
            self._adaptive.follow(phase, error, valid)
            self._upkeep.target = self._density_target()

    def note_return(self, mean_return: Optional[float]) -> None:
        """The iteration's mean episode return, or None; read by num_groups_by_return."""
        if mean_return is not None:
            best = self._best_return
            self._best_return = mean_return if best is None else max(best, mean_return)

    def set_manual_reset(self, manual: bool) -> None:
        if self.config.gate == "block":
            if manual:
                raise self.lacks(Capability.MANUAL_RESET)
            return  # nobody has asked for them but the gate, which goes on needing them
        self.env.set_manual_reset(manual)
        self._manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        self.env.set_elapsed_steps(steps, env_mask)

    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        return self.env.get_state(env_mask)

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        obs = self.env.set_state(state, env_mask)
        clock = self.env.elapsed_steps
        mask = torch.ones_like(clock, dtype=torch.bool) if env_mask is None else env_mask
        self._phase = torch.where(mask, clock, self._phase)
        self._gate.release(mask, obs)
        return obs

    def seed(self, seed: int) -> None:
        self.env.seed(seed)
        self._offset_generator.manual_seed(seed)
        own_seed = seed + self.rank * RANK_STRIDE
        self._action_generator = make_generator(self.device, own_seed + 1)
        if self._upkeep is not None:
            self._upkeep.seed(own_seed + 2)

    def set_evaluation(self, evaluating: bool) -> None:
        self.env.set_evaluation(evaluating)

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        self.env.load_curriculum(state.get("env", state))

    def set_difficulty(self, level: int) -> None:
        self.env.set_difficulty(level)

    def evaluation_cases(self) -> Dict[str, Tensor]:
        return self.env.evaluation_cases()

    def render(self, env_index: int = 0) -> Any:
        return self.env.render(env_index)

    def state_dict(self) -> Dict[str, Any]:
        return {
            "env": self.env.state_dict(),
            "gate": self._gate.state_dict(),
            "upkeep": None if self._upkeep is None else self._upkeep.state_dict(),
            "adaptive": None if self._adaptive is None else self._adaptive.state_dict(),
            "offsets": self.offsets.clone(),
            "phase": self._phase.clone(),
            "begun": self._begun,
            "rollout_steps": self.rollout_steps,
            "steps_in_rollout": self._steps_in_rollout,
            "num_groups": self.num_groups,
            "horizon_share": self._horizon_share,
            "best_return": self._best_return,
            "warmup_steps": self.warmup_steps,
            "offset_generator": generator_state(self._offset_generator),
            "action_generator": generator_state(self._action_generator),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])
        self._gate.load_state_dict(self.env, state["gate"])
        if self._upkeep is not None:
            self._upkeep.load_state_dict(state["upkeep"])
        self.offsets = state["offsets"].clone()
        self._phase = state["phase"].to(self.device).clone()
        self._begun, self._steps_in_rollout = bool(state["begun"]), int(state["steps_in_rollout"])
        self._set_rollout_steps(int(state["rollout_steps"]))
        self.load_counters(state)
        set_generator_state(self._offset_generator, state["offset_generator"])
        set_generator_state(self._action_generator, state["action_generator"])

    def load_counters(self, state: Dict[str, Any]) -> None:
        """Only what is counted and learned, for an environment whose own state cannot be brought back."""
        self.warmup_steps = int(state["warmup_steps"])
        self.num_groups, self._horizon_share = int(state["num_groups"]), float(state["horizon_share"])
        self._best_return = state["best_return"]
        if self._adaptive is not None:
            self._adaptive.load_state_dict(state["adaptive"])

    def close(self) -> None:
        self.env.close()

    def describe(self) -> str:
        """One line for a person: the rule in force and what it leaves false."""
        c = self.config
        groups = f", {self.num_groups} groups" if c.allocation in ("uniform", "mixed") else ""
        groups += f" {c.density}" if c.density is not None else ""
        text = f"{c.name}: allocation {c.allocation}{groups}, bring-up {c.bring_up}, gate {c.gate}"
        if c.upkeep_in_force != "none":
            text += f", upkeep {c.upkeep_in_force}"
        if not self.clock_is_true:
            text += " (clock written, states not moved: phases are false until each first time limit)"
        return text

    # -- helpers -------------------------------------------------------------------------------------------------
    @property
    def _horizon_in_use(self) -> int:
        assert self.spec.horizon_steps is not None
        return max(1, round(self._horizon_share * self.spec.horizon_steps))

    def _set_rollout_steps(self, rollout_steps: int) -> None:
        self.rollout_steps = rollout_steps
        self._gate.interval_steps = self.config.gate_interval_steps or rollout_steps

    def _gate_capacity(self, rollout_steps: int) -> Optional[int]:
        """Environments of this rank that a gate lets through; None: all."""
        c, interval = self.config, self.config.gate_interval_steps or rollout_steps
        if c.gate != "block" or c.gate_capacity is None or self.spec.horizon_steps is None:
            return min(c.gate_capacity, self.num_envs) if isinstance(c.gate_capacity, int) else None
        capacity = -(-self.num_envs // self.num_groups) if c.gate_capacity == "group" else int(c.gate_capacity)
        gates = -(-self.spec.horizon_steps // interval)
        if capacity * gates < self.num_envs:
            raise ConfigError(
                f"reset.gate_capacity={c.gate_capacity}: {gates} gates in a horizon would let {capacity * gates} of "
                f"{self.num_envs} environments through, the rest would wait for ever; at least "
                f"{-(-self.num_envs // gates)}"
            )
        return min(capacity, self.num_envs)

    def _make_upkeep(self, seed: int) -> Optional[Upkeep]:
        """None where nothing is ever moved."""
        c, env = self.config, self.env
        kind = c.upkeep_in_force
        moves = kind != "none" or c.bring_up == "snapshot" or c.num_groups_schedule or c.num_groups_by_return
        if not moves:
            return None
        horizon = env.spec.horizon_steps
        assert horizon is not None
        later = [*(c.num_groups_schedule or ()), *(c.num_groups_by_return or ())]
        groups = max([self.num_groups, *(int(value) for _, value in later)])
        self._num_bins = min(horizon, max(phase_bins(horizon, self.rollout_steps), groups))
        if c.allocation == "adaptive":
            self._adaptive = AdaptiveDensity(c.adaptive, self._num_bins, horizon, self.device)
        library = None
        if c.upkeep_by != "cut" and Capability.SET_STATE in env.capabilities:
            size = int(c.library.mib * 2**20)
            library = StateLibrary(self._num_bins, horizon, size, max(64, self.num_envs))
            if c.library.path is not None:
                library.load_from(c.library.path, self.device, env.unwrapped.made_from)
        self._library = library
        even = torch.full((self._num_bins,), 1.0 / self._num_bins, device=self.device)
        return Upkeep(
            env,
            kind,
            Target(even, not c.holds_density, horizon if c.holds_density else self._period_steps),
            library,
            c.upkeep_interval_steps,
            c.upkeep_every_iters,
            c.upkeep_coverage,
            self.left_alone,
            seed,
            lambda name: self.watch(name),
        )

    @property
    def _period_steps(self) -> int:
        """Steps from one start to the next of an environment that runs to its time limit; at a gate it waits."""
        horizon, interval = self.spec.horizon_steps, self._gate.interval_steps
        assert horizon is not None
        return -(-horizon // interval) * interval if self.config.gate == "block" else horizon

    def _aim(self) -> Tensor:
        """Allocate anew and tell the upkeep; the offsets [N]."""
        goal = self._allocate()
        if self._upkeep is not None and self.config.holds_density:
            self._upkeep.target = self._density_target()
        elif self._upkeep is not None:
            period, bins = self._period_steps, self._num_bins
            counts = torch.bincount(goal * bins // period, minlength=bins).to(torch.float32)
            self._upkeep.target = Target((counts / len(goal)).to(self.device), True, period)
        return goal

    def _density_target(self) -> Target:
        horizon = self.spec.horizon_steps
        assert horizon is not None
        if self._adaptive is None:
            wanted = self._wanted_density().to(device=self.device, dtype=torch.float32)
        else:
            wanted = self._adaptive.density
            if self._horizon_share < 1.0:
                starts = torch.arange(self._num_bins, device=self.device) * horizon
                inside = starts < self._horizon_in_use * self._num_bins
                wanted = torch.where(inside, wanted, torch.zeros_like(wanted))
                wanted = wanted / wanted.sum()
        return Target(wanted if self._library is not None else nonincreasing(wanted), False, horizon)

    def _wanted_density(self) -> Tensor:
        """[B] float64 on the CPU: what the settings ask for, adaptive ones apart."""
        horizon = self.spec.horizon_steps
        assert horizon is not None
        asked = self.config.density
        density = even_density(horizon) if asked is None else density_over(asked, horizon)
        return binned(first_share(density, self._horizon_share), self._num_bins)

    def _allocate(self) -> Tensor:
        c, horizon = self.config, self.spec.horizon_steps
        assert horizon is not None
        density = None
        if c.density is not None:
            density = first_share(density_over(c.density, horizon), self._horizon_share)[: self._horizon_in_use]
        layout = Layout(self._total_envs, self._horizon_in_use, self.num_groups, c.random_share, density)
        return allocate(c.allocation, layout, self._offset_generator, self.rank, self.world_size)

    def _warmup_actor(self) -> Actor:
        if self.config.warmup_actions == "policy" and self.actor is not None:
            return self.actor
        return random_actor(self.spec.action, self.num_envs, self.device, self._action_generator)
