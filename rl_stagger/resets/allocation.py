"""Which environment starts at which phase. Pure functions: sizes in, offsets [N] int64 in steps out, on the CPU.

A new rule is a function of a `Layout` and a generator, entered in ALLOCATIONS.
"""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional

import torch
from torch import Tensor


class Layout(NamedTuple):
    """What an allocation may look at. `num_envs` counts the environments of all ranks together."""

    num_envs: int
    horizon_steps: int
    """H, or the part of it that is in use."""
    num_groups: int
    random_share: float = 0.1
    density: Optional[Tensor] = None
    """[H] float64, sum 1 (resets/density.py); None: even."""


Allocation = Callable[[Layout, torch.Generator], Tensor]
"""-> offsets [N] in [0, H)."""


def default_num_groups(horizon_steps: int, rollout_steps: int) -> int:
    """N_B = ceil(H / K): consecutive groups are one rollout apart."""
    return max(1, -(-horizon_steps // rollout_steps))


def group_of_env(num_envs: int, num_groups: int) -> Tensor:
    """Group of each environment, i mod N_B; [N] int64."""
    return torch.arange(num_envs) % num_groups


def uniform_offsets(num_envs: int, horizon_steps: int, num_groups: int) -> Tensor:
    """Groups at even distances: group g starts at floor(g * H / N_B)."""
    return group_of_env(num_envs, num_groups) * horizon_steps // num_groups


def random_offsets(num_envs: int, horizon_steps: int, generator: torch.Generator) -> Tensor:
    """Each environment on its own, uniform over [0, H) (what rsl_rl's init_at_random_ep_len draws)."""
    return torch.randint(horizon_steps, (num_envs,), generator=generator)


def mixed_offsets(
    num_envs: int, horizon_steps: int, num_groups: int, random_share: float, generator: torch.Generator
) -> Tensor:
    """Groups, but round(random_share * N) environments, drawn without replacement, stand at random phases."""
    offsets = uniform_offsets(num_envs, horizon_steps, num_groups)
    chosen = torch.randperm(num_envs, generator=generator)[: round(random_share * num_envs)]
    offsets[chosen] = random_offsets(len(chosen), horizon_steps, generator)
    return offsets


def density_offsets(num_envs: int, density: Tensor, generator: torch.Generator) -> Tensor:
    """The (i + 0.5) / N quantiles of `density` [H], dealt out in random order, so that every slice of the environments
    is a sample of the whole."""
    middles = (torch.arange(num_envs, dtype=torch.float64) + 0.5) / num_envs
    offsets = torch.searchsorted(density.cumsum(0), middles).clamp(max=len(density) - 1)
    return offsets[torch.randperm(num_envs, generator=generator)]


def even_density(horizon_steps: int) -> Tensor:
    return torch.full((horizon_steps,), 1.0 / horizon_steps, dtype=torch.float64)


def _by_density(layout: Layout, generator: torch.Generator) -> Tensor:
    density = even_density(layout.horizon_steps) if layout.density is None else layout.density
    return density_offsets(layout.num_envs, density, generator)


ALLOCATIONS: Dict[str, Allocation] = {
    "uniform": lambda layout, generator: uniform_offsets(layout.num_envs, layout.horizon_steps, layout.num_groups),
    "random": lambda layout, generator: random_offsets(layout.num_envs, layout.horizon_steps, generator),
    "mixed": lambda layout, generator: mixed_offsets(
        layout.num_envs, layout.horizon_steps, layout.num_groups, layout.random_share, generator
    ),
    "density": _by_density,
    "adaptive": _by_density,
}
"""`adaptive` starts even; what it turns into is learned (resets/adaptive.py)."""


def allocate(kind: str, layout: Layout, generator: torch.Generator, rank: int = 0, world_size: int = 1) -> Tensor:
    """Offsets of one rank's N / world_size environments. All ranks draw from generators of the same seed and take
    their own slice, so the union over ranks is the allocation of N environments.

    Raises ValueError where the ranks' shares differ or there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: between 0 and world_size - 1 = {world_size - 1}")
    if layout.num_envs % world_size:
        raise ValueError(f"{layout.num_envs} environments cannot be dealt evenly to {world_size} ranks")
    share = layout.num_envs // world_size
    return ALLOCATIONS[kind](layout, generator)[rank * share : (rank + 1) * share]
