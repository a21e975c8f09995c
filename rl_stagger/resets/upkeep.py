"""What keeps the spread up during training: environments that are too many in a phase are moved to where there are too
few. A move is a true start, from phase 0 or from a recorded state; clocks are never written without the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, FrozenSet, Optional, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, where_rows
from rl_stagger.resets.coverage import histogram_coverage, phase_histogram
from rl_stagger.resets.library import StateLibrary
from rl_stagger.resets.seats import seat
from rl_stagger.rng import generator_state, make_generator, set_generator_state

UPKEEPS: Dict[str, str] = {
    "auto": "hold where the allocation is a density or the horizon is scheduled, none otherwise",
    "none": "nothing is moved after the bring-up",
    "hold": "the wanted mixture is kept at all times",
    "every": "the mixture is restored every upkeep_every_iters iterations",
    "on_coverage_below": "the mixture is restored where a rollout ends with a coverage below upkeep_coverage",
}
REQUIRES: FrozenSet[Capability] = frozenset({Capability.PARTIAL_RESET})

FIXED_SLACK = 1.0
"""A density's bins are met to within one environment: flow from bin to bin is not even to the step."""


@dataclass(frozen=True)
class Target:
    """The wanted mixture.

    Groups and evenly random environments keep their distances by themselves, so theirs is told in a frame that moves
    with the clocks (f = clock - steps since the bring-up, modulo a period), in which everybody stands still: `wanted`
    counts the bring-up's offsets. A density is told in phases.
    """

    wanted: Tensor
    """[B] float32 on the device, sum 1."""
    moving: bool
    period_steps: int
    """Steps from one start to the next of an environment that runs to its time limit: H, or more where it waits."""


class Upkeep:
    """Called by the reset rule after every step; `boundary` marks the last one of a rollout."""

    def __init__(
        self,
        env: VecEnv,
        kind: str,
        target: Target,
        library: Optional[StateLibrary],
        interval_steps: Optional[int],
        every_iters: int,
        coverage_bound: float,
        left_alone: int,
        seed: int,
        watch: Callable[[str], ContextManager[None]],
    ) -> None:
        """`library`: None where states cannot be set; then early cuts alone do it. `left_alone`: so many environments
        are never moved."""
        assert env.spec.horizon_steps is not None
        self.env, self.kind, self.target, self.library = env, kind, target, library
        self.interval_steps = interval_steps
        self.every_iters, self.coverage_bound = every_iters, coverage_bound
        index = torch.arange(env.num_envs, device=env.device)
        self.left_alone = (index + 1) * left_alone // env.num_envs > index * left_alone // env.num_envs
        """[N] bool, environments that are never moved: so many, evenly among all."""
        self.horizon_steps: int = env.spec.horizon_steps
        self.generator = make_generator(env.device, seed)
        self.watch = watch
        self.horizon_rollouts = 1
        """ceil(H / K) of the K in force."""
        self.steps_done = self.rollouts_done = 0
        self.spread_left = 0
        """So many of the next rollouts' ends restore the mixture, whatever the kind."""

    def seed(self, seed: int) -> None:
        if self.generator is not None:
            self.generator.manual_seed(seed)

    def begin(self, spread_rollouts: int = 0) -> None:
        """Called after a bring-up; `spread_rollouts`: how long to spread what it left together."""
        self.steps_done = self.rollouts_done = 0
        self.spread_left = spread_rollouts

    def spread(self) -> None:
        """Bring everybody to the target: at the next rollout's end where states can be set, over the next horizon where
        only cuts can do it."""
        self.spread_left = max(self.spread_left, 1 if self.library is not None else self.horizon_rollouts)

    def after_step(
        self, step: Step, clock: Tensor, phase: Tensor, waiting: Optional[Tensor], boundary: bool
    ) -> Tuple[Step, Tensor, Optional[Tensor]]:
        """(the step with its cuts, the phases after it, rows [N] that moved or None). `clock` and `phase`: [N] after
        the step; `waiting` [N]: rows that a gate keeps, which are left alone."""
        self.steps_done += 1
        self.rollouts_done += boundary
        if self.library is not None and boundary:
            self._record(clock, phase, waiting)
        active, may_cut = self._decide(phase, waiting, boundary)
        if active is False:
            return step, phase, None
        with self.watch("reset"):
            return self._move(step, clock, phase, waiting, active, may_cut)

    # -- when ----------------------------------------------------------------------------------------------------
    def _decide(self, phase: Tensor, waiting: Optional[Tensor], boundary: bool) -> Tuple[Union[bool, Tensor], bool]:
        """(whether to move anybody in this step, whether by cutting). A coverage only the device knows: a tensor."""
        if boundary and self.kind == "every" and self.rollouts_done % self.every_iters == 0:
            self.spread()
        if boundary and self.spread_left:
            self.spread_left -= 1
            return True, True
        if self.kind == "hold":
            if self.target.moving and self.interval_steps is None:
                return boundary, True
            if self.steps_done % (self.interval_steps or 1) == 0:
                return True, True
            return self.library is not None, False
        if boundary and self.kind == "on_coverage_below":
            counted = None if waiting is None else ~waiting
            histogram = phase_histogram(phase, self.horizon_steps, self.target.wanted.shape[0], counted)
            return histogram_coverage(histogram) < self.coverage_bound, True
        return False, False

    # -- who -----------------------------------------------------------------------------------------------------
    def _record(self, clock: Tensor, phase: Tensor, waiting: Optional[Tensor]) -> None:
        """States whose clock is true and that have begun."""
        assert self.library is not None
        mask = (clock == phase) & (phase > 0)
        mask = mask if waiting is None else mask & ~waiting
        self.library.record(self.env.get_state(), phase, mask, self._rand(self.env.num_envs))

    def _move(
        self,
        step: Step,
        clock: Tensor,
        phase: Tensor,
        waiting: Optional[Tensor],
        active: Union[bool, Tensor],
        may_cut: bool,
    ) -> Tuple[Step, Tensor, Tensor]:
        env, wanted = self.env, self.target.wanted
        counted = torch.ones_like(step.done) if waiting is None else ~waiting
        started = step.info["reset"]
        free = started & counted & ~self.left_alone
        seated = counted & ~free
        # Where only the clock was written, the state is another than the clock says: such rows keep their place.
        movable = seated & (clock == phase) & ~self.left_alone
        if not may_cut:
            movable = torch.zeros_like(movable)
        bins, first_bin, library_bins, can_start = self._frame(clock)
        scaled = wanted * counted.sum()
        draws = (self._rand(env.num_envs), self._rand(1))
        slack = 0.0 if self.target.moving else FIXED_SLACK
        moved, target = seat(bins, seated, free, movable, scaled, can_start, slack, draws)
        moved = moved & active
        from_start = moved & (target == first_bin)
        cut = moved & ~started
        obs, phase = step.obs, torch.where(from_start, 0, phase)
        fresh_obs = env.reset(from_start & cut)
        if self.library is not None and self.library.filled is not None:
            restored = moved & ~from_start
            state, recorded = self.library.draw(library_bins[target], self._rand(env.num_envs))
            fresh_obs = env.set_state(state, restored)
            phase = torch.where(restored, recorded, phase)
        return _cut(step, cut, where_rows(moved, fresh_obs, obs)), phase, moved

    def _frame(self, clock: Tensor) -> Tuple[Tensor, int, Tensor, Tensor]:
        """(bin of every environment [N], the bin that phase 0 is in, the library's bin for every bin [B], bins that an
        episode can begin in [B] bool)."""
        num_bins, device = self.target.wanted.shape[0], clock.device
        period = self.target.period_steps
        shift = self.steps_done if self.target.moving else 0
        bins = (((clock - shift) % period) * num_bins // period).clamp(0, num_bins - 1)
        first_bin = (-shift % period) * num_bins // period
        index = torch.arange(num_bins, device=device)
        middle = ((2 * index + 1) * period // (2 * num_bins) + shift) % period
        can_start = index == first_bin
        if self.library is None or self.library.filled is None:
            return bins, first_bin, index, can_start
        library_bins = self.library.bin_of(middle)
        can_start = can_start | ((self.library.filled[library_bins] > 0) & (middle < self.horizon_steps))
        return bins, first_bin, library_bins, can_start

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.env.device)

    # -- state ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> Dict[str, Any]:
        return {
            "steps_done": self.steps_done,
            "rollouts_done": self.rollouts_done,
            "spread_left": self.spread_left,
            "wanted": self.target.wanted.clone(),
            "period_steps": self.target.period_steps,
            "horizon_rollouts": self.horizon_rollouts,
            "generator": generator_state(self.generator),
            "library": {} if self.library is None else self.library.state_dict(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.steps_done, self.rollouts_done = int(state["steps_done"]), int(state["rollouts_done"])
        self.spread_left = int(state["spread_left"])
        wanted = state["wanted"].to(self.env.device)
        self.target = Target(wanted, self.target.moving, int(state["period_steps"]))
        self.horizon_rollouts = int(state["horizon_rollouts"])
        set_generator_state(self.generator, state["generator"])
        if self.library is not None:
            self.library.load_state_dict(state["library"], self.env.device)


def _cut(step: Step, cut: Tensor, obs: Obs) -> Step:
    """`step`, cut short in the rows of `cut`: truncated, the state reached being final. `obs`: what is shown now."""
    final_obs = None if step.final_obs is None else where_rows(cut, step.obs, step.final_obs)
    before = step.info.get("cut")
    info = {**step.info, "cut": cut if before is None else before | cut, "reset": step.info["reset"] | cut}
    return Step(obs, step.reward, step.terminated, step.truncated | cut, final_obs, step.valid, info)
