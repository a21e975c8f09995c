"""Which environment starts at which phase. Pure functions: sizes in, offsets [N] int64 in steps out, on the CPU.

A new rule is a function with the signature of `Allocation`, entered in ALLOCATIONS.
"""

from __future__ import annotations

from typing import Callable, Dict

import torch
from torch import Tensor

Allocation = Callable[[int, int, int, torch.Generator], Tensor]
"""(num_envs, horizon_steps, num_groups, generator) -> offsets [N] in [0, H)."""


def default_num_groups(horizon_steps: int, rollout_steps: int) -> int:
    """N_B = ceil(H / K): consecutive groups are one rollout apart."""
    return max(1, -(-horizon_steps // rollout_steps))


def group_of_env(num_envs: int, num_groups: int) -> Tensor:
    """Group of each environment, i mod N_B; [N] int64."""
    return torch.arange(num_envs) % num_groups


def uniform_offsets(num_envs: int, horizon_steps: int, num_groups: int, generator: torch.Generator) -> Tensor:
    """Groups at even distances: group g starts at floor(g * H / N_B)."""
    return group_of_env(num_envs, num_groups) * horizon_steps // num_groups


def random_offsets(num_envs: int, horizon_steps: int, num_groups: int, generator: torch.Generator) -> Tensor:
    """Each environment on its own, uniform over [0, H) (what rsl_rl's init_at_random_ep_len draws)."""
    return torch.randint(horizon_steps, (num_envs,), generator=generator)


ALLOCATIONS: Dict[str, Allocation] = {"uniform": uniform_offsets, "random": random_offsets}
