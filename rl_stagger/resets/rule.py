"""The reset rule as a whole: allocation, bring-up, gate and upkeep, put around any VecEnv."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Discrete, Obs, Step, VecEnv
from rl_stagger.errors import CapabilityError, ConfigError, nearest
from rl_stagger.resets.allocation import ALLOCATIONS, default_num_groups
from rl_stagger.resets.bring_up import BRING_UPS, Actor
from rl_stagger.resets.gates import GATES
from rl_stagger.resets.upkeep import UPKEEPS
from rl_stagger.rng import generator_state, make_generator, set_generator_state


@dataclass(frozen=True)
class ResetConfig:
    """A reset rule by its four parts."""

    name: str = "staggered"
    """What reports call it."""
    allocation: str = "uniform"
    """uniform: groups at even distances. random: each environment on its own."""
    num_groups: Optional[int] = None
    """N_B; null: ceil(H / K)."""
    bring_up: str = "warmup"
    """none | clock | warmup."""
    warmup_actions: str = "policy"
    """warmup: actions of the initial policy, or random ones ("random")."""
    gate: str = "immediate"
    """immediate | block."""
    gate_interval_steps: Optional[int] = None
    """block: steps between gates; null: K."""
    upkeep: str = "none"

    def check(self) -> List[Tuple[str, object, str]]:
        """(field, value, what is right) of every setting that cannot work."""
        faults: List[Tuple[str, object, str]] = []
        choices: Dict[str, Any] = {
            "allocation": ALLOCATIONS,
            "bring_up": BRING_UPS,
            "gate": GATES,
            "upkeep": UPKEEPS,
            "warmup_actions": ("policy", "random"),
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                faults.append((name, getattr(self, name), nearest(getattr(self, name), valid)))
        for name in ("num_groups", "gate_interval_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append((name, value, "at least 1, or null for the default"))
        return faults


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
        upkeep: str = "none",
        seed: int = 0,
        name: str = "custom",
    ) -> None:
        """`rollout_steps` is K. The attribute `actor` gives the actions of a warm-up with warmup_actions="policy";
        whoever trains sets it before the first reset."""
        config = ResetConfig(name, allocation, num_groups, bring_up, warmup_actions, gate, gate_interval_steps, upkeep)
        for field, value, right in config.check():
            raise ConfigError(f"reset.{field}={value!r}: {right}")
        self.env, self.config, self.rollout_steps = env, config, rollout_steps
        self.num_envs, self.device, self.spec = env.num_envs, env.device, env.spec
        # A gate that holds manual resets for itself cannot lend them to somebody outside.
        self.capabilities = env.capabilities - ({Capability.MANUAL_RESET} if gate == "block" else set())
        self.num_groups = _check_sizes(config, env, rollout_steps)
        self._bring_up = BRING_UPS[bring_up]()
        self._gate = GATES[gate](gate_interval_steps or rollout_steps)
        self._upkeep = UPKEEPS[upkeep]()
        _check_capabilities(env, config)
        self._offset_generator = torch.Generator().manual_seed(seed)
        self._action_generator = make_generator(self.device, seed + 1)
        self.offsets = torch.zeros(self.num_envs, dtype=torch.int64)
        """[N] int64 on the CPU: where the last bring-up put each environment."""
        self._phase = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._manual_reset = False
        self.warmup_steps = 0
        """Env steps spent in bring-ups so far, all environments together."""
        self.actor: Optional[Actor] = None
        self.watch: Callable[[str], ContextManager[None]] = lambda name: nullcontext()
        """Times the resets that the rule makes by itself."""

    @classmethod
    def from_config(cls, env: VecEnv, config: ResetConfig, rollout_steps: int, seed: int) -> StaggeredResets:
        return cls(
            env,
            rollout_steps,
            config.num_groups,
            config.allocation,
            config.bring_up,
            config.gate,
            config.gate_interval_steps,
            config.warmup_actions,
            config.upkeep,
            seed,
            config.name,
        )

    @property
    def clock_is_true(self) -> bool:
        """False where the bring-up wrote clocks without moving states."""
        return self._bring_up.moves_state

    @property
    def warmup_bound_steps(self) -> int:
        """Env steps that the bring-up takes at most, all environments together."""
        horizon, groups = self.spec.horizon_steps, self.num_groups
        if self.config.bring_up != "warmup" or horizon is None:
            return 0
        last = (groups - 1) * horizon // groups if self.config.allocation == "uniform" else horizon - 1
        return last * self.num_envs

    @property
    def elapsed_steps(self) -> Tensor:
        return self.env.elapsed_steps

    @property
    def phase_steps(self) -> Tensor:
        return self._phase.clone()

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        """None: the whole bring-up. A mask: plain resets of those rows."""
        if env_mask is not None:
            obs = self.env.reset(env_mask)
            self._phase = torch.where(env_mask, 0, self._phase)
            self._gate.release(env_mask, obs)
            return obs
        if self.spec.horizon_steps is not None and self.config.bring_up != "none":
            self.offsets = ALLOCATIONS[self.config.allocation](
                self.num_envs, self.spec.horizon_steps, self.num_groups, self._offset_generator
            )
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
        return start.obs

    def step(self, action: Tensor) -> Step:
        self._upkeep.before_step(self.env)
        step = self._gate.step(self.env, action, self.watch)
        if self._manual_reset:
            step.info["reset"] = torch.zeros_like(step.terminated)
        self._phase = torch.where(step.info["reset"], 0, self._phase + step.valid)
        return step

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
        self._action_generator = make_generator(self.device, seed + 1)

    def set_evaluation(self, evaluating: bool) -> None:
        self.env.set_evaluation(evaluating)

    def render(self, env_index: int = 0) -> Any:
        return self.env.render(env_index)

    def state_dict(self) -> Dict[str, Any]:
        return {
            "env": self.env.state_dict(),
            "gate": self._gate.state_dict(),
            "offsets": self.offsets.clone(),
            "phase": self._phase.clone(),
            "warmup_steps": self.warmup_steps,
            "offset_generator": generator_state(self._offset_generator),
            "action_generator": generator_state(self._action_generator),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])
        self._gate.load_state_dict(self.env, state["gate"])
        self.offsets = state["offsets"].clone()
        self._phase = state["phase"].to(self.device).clone()
        self.load_counters(state)
        set_generator_state(self._offset_generator, state["offset_generator"])
        set_generator_state(self._action_generator, state["action_generator"])

    def load_counters(self, state: Dict[str, Any]) -> None:
        """Only what is counted, for an environment whose own state cannot be brought back."""
        self.warmup_steps = int(state["warmup_steps"])

    def close(self) -> None:
        self.env.close()

    def describe(self) -> str:
        """One line for a person: the rule in force and what it leaves false."""
        c = self.config
        text = f"{c.name}: allocation {c.allocation}, {self.num_groups} groups, bring-up {c.bring_up}, gate {c.gate}"
        if not self.clock_is_true:
            text += " (clock written, states not moved: phases are false until each first time limit)"
        return text

    def _warmup_actor(self) -> Actor:
        if self.config.warmup_actions == "policy" and self.actor is not None:
            return self.actor
        return self._random_action

    def _random_action(self, obs: Obs) -> Tensor:
        """Uniform over the choices or bounds; standard normal where unbounded."""
        spec, shape = self.spec.action, (self.num_envs,)
        if isinstance(spec, Discrete):
            return torch.randint(spec.n, shape, generator=self._action_generator, device=self.device)
        low, high = spec.bounds(self.device)
        shape = (self.num_envs, spec.size)
        if not spec.bounded:
            noise = torch.randn(shape, generator=self._action_generator, device=self.device)
            return torch.minimum(torch.maximum(noise, low), high)
        return low + (high - low) * torch.rand(shape, generator=self._action_generator, device=self.device)


def _check_sizes(config: ResetConfig, env: VecEnv, rollout_steps: int) -> int:
    """N_B in force; 1 where nothing is spread."""
    horizon = env.spec.horizon_steps
    if rollout_steps < 1:
        raise ConfigError(f"rollout_steps={rollout_steps}: at least 1")
    if config.gate == "block" and horizon is not None and (config.gate_interval_steps or 1) > horizon:
        raise ConfigError(
            f"reset.gate_interval_steps={config.gate_interval_steps}: an episode lasts H={horizon} steps at most, all "
            f"environments would wait at a closed gate; use at most {horizon}"
        )
    if config.bring_up == "none":
        return 1
    if horizon is None:
        raise ConfigError(
            f"reset.bring_up={config.bring_up!r}: this task has no time limit to spread over; give it a horizon_steps "
            "or use reset.bring_up=none (reset=synchronous)"
        )
    if horizon <= rollout_steps:
        raise ConfigError(
            f"rollout_steps={rollout_steps}: a rollout already holds the whole horizon H={horizon}, there is nothing "
            f"to stagger; use rollout_steps < {horizon} or reset=synchronous"
        )
    if config.num_groups is not None and config.num_groups > horizon:
        raise ConfigError(f"reset.num_groups={config.num_groups}: at most one group a step, H={horizon}")
    groups = config.num_groups or default_num_groups(horizon, rollout_steps)
    return min(groups, env.num_envs)


def _check_capabilities(env: VecEnv, config: ResetConfig) -> None:
    """Refuse what the simulator cannot do, naming what it can."""
    for part, chosen, table in (("bring_up", config.bring_up, BRING_UPS), ("gate", config.gate, GATES)):
        missing = table[chosen].requires - env.capabilities  # type: ignore[attr-defined]
        if missing:
            lacks = ", ".join(sorted(c.value for c in missing))
            can = ", ".join(n for n, kind in table.items() if kind.requires <= env.capabilities)  # type: ignore[attr-defined]
            raise CapabilityError(
                f"reset.{part}={chosen!r} needs '{lacks}', which {type(env).__name__} does not have; "
                f"possible here: {can}"
            )
