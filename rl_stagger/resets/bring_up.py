"""How environments get to their offsets before the first update. Each way is a class entered in BRING_UPS."""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet, NamedTuple, Optional, Type

import torch
from torch import Tensor

from rl_stagger.envs.base import ActionSpec, Capability, Discrete, Obs, VecEnv, check_step
from rl_stagger.resets.library import StateLibrary

Actor = Callable[[Obs], Tensor]
"""Observations [N, ...] -> what the environment gets."""


class Start(NamedTuple):
    """Where a bring-up left the environments."""

    obs: Obs
    phase_steps: Tensor
    """[N] int64, true phase: steps the state has really taken since its reset."""
    warmup_steps: int
    """Env steps spent, all environments together."""


class BringUp:
    """Takes the environments from anywhere to their offsets ([N] int64, on the CPU).

    Stateless but for what its constructor is given; `library` holds recorded states where there are any.
    """

    requires: FrozenSet[Capability] = frozenset()
    moves_state = True
    """False where only the clock is written, so that clock and state disagree until the first real reset."""

    def run(self, env: VecEnv, offsets: Tensor, actor: Actor) -> Start:
        raise NotImplementedError


class NoBringUp(BringUp):
    """All environments reset together: the synchronous baseline. Offsets are not used."""

    def run(self, env: VecEnv, offsets: Tensor, actor: Actor) -> Start:
        return Start(env.reset(), torch.zeros_like(env.elapsed_steps), 0)


class ClockBringUp(BringUp):
    """Reset all, then write each episode clock to its offset. Free: no step is spent.

    What this leaves false until an environment's first time limit: the clock says `offset`, but the state is that of
    an episode's start. Resets are spread from then on, the first batches are not: they all show the beginning of
    the episode (`batch/coverage` is of the true phase and shows it). The first episodes are cut short; they are
    truncations to the returns and partial episodes to the statistics.
    """

    requires = frozenset({Capability.SET_CLOCK})
    moves_state = False

    def run(self, env: VecEnv, offsets: Tensor, actor: Actor) -> Start:
        obs = env.reset()
        phase = torch.zeros_like(env.elapsed_steps)
        env.set_elapsed_steps(offsets.to(env.device))
        # An observation may hold the clock: look again, without moving anything.
        if Capability.SET_STATE in env.capabilities:
            obs = env.set_state(env.get_state())
        elif Capability.PARTIAL_RESET in env.capabilities:
            obs = env.reset(torch.zeros_like(phase, dtype=torch.bool))
        return Start(obs, phase, 0)


class WarmupBringUp(BringUp):
    """Roll all environments forward and reset each at its moment, so that state and clock agree at the end.

    With T the largest offset, an environment with offset o is reset after T - o steps. The transitions are thrown
    away; T * N steps are counted as warm-up. An environment that terminates early on the way is as far as it then is.
    """

    requires = frozenset({Capability.PARTIAL_RESET})

    @torch.no_grad()
    def run(self, env: VecEnv, offsets: Tensor, actor: Actor) -> Start:
        obs = env.reset()
        steps = int(offsets.max())
        moments = set((steps - offsets).tolist())
        moment_of_env = (steps - offsets).to(env.device)
        phase = torch.zeros_like(env.elapsed_steps)
        for t in range(1, steps + 1):
            step = env.step(actor(obs))
            if t == 1:
                check_step(step, env.spec, env.num_envs, env.device)
            obs = step.obs
            phase = torch.where(step.done, 0, phase + step.valid)
            if t in moments:
                due = moment_of_env == t
                obs = env.reset(due)
                phase = torch.where(due, 0, phase)
        return Start(obs, phase, steps * env.num_envs)


class SnapshotBringUp(BringUp):
    """Put each environment into a recorded state of its phase. Free: no step is spent.

    Where nothing has been recorded yet (no `reset.library.path`), all begin together and the rule spreads them over the
    first horizon while training goes on, by starting a group anew at each rollout's end.
    """

    requires = frozenset({Capability.SET_STATE, Capability.PARTIAL_RESET})

    def __init__(self, library: Optional[StateLibrary] = None, generator: Optional[torch.Generator] = None) -> None:
        self.library, self.generator = library, generator

    @torch.no_grad()
    def run(self, env: VecEnv, offsets: Tensor, actor: Actor) -> Start:
        obs = env.reset()
        phase = torch.zeros_like(env.elapsed_steps)
        if self.library is None or self.library.filled is None:
            return Start(obs, phase, 0)
        self.library.check_fits(env.get_state())
        wanted = offsets.to(env.device)
        bins = self.library.bin_of(wanted)
        draw = torch.rand(env.num_envs, generator=self.generator, device=env.device)
        state, recorded = self.library.draw(bins, draw)
        found = (self.library.filled[bins] > 0) & (wanted > 0)
        obs = env.set_state(state, found)
        return Start(obs, torch.where(found, recorded, phase), 0)


def random_actor(spec: ActionSpec, num_envs: int, device: torch.device, generator: Optional[torch.Generator]) -> Actor:
    """Actions uniform over the choices or bounds; standard normal where unbounded."""

    def act(obs: Obs) -> Tensor:
        if isinstance(spec, Discrete):
            return torch.randint(spec.n, (num_envs,), generator=generator, device=device)
        low, high = spec.bounds(device)
        shape = (num_envs, spec.size)
        if not spec.bounded:
            noise = torch.randn(shape, generator=generator, device=device)
            return torch.minimum(torch.maximum(noise, low), high)
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    return act


BRING_UPS: Dict[str, Type[BringUp]] = {
    "none": NoBringUp, "clock": ClockBringUp, "warmup": WarmupBringUp, "snapshot": SnapshotBringUp,
}  # fmt: skip
