"""Who moves where, so that a wanted number of environments is in every phase bin. Pure functions on the device.

Shapes: N environments, B bins. Nothing here reads from the device: movers are a mask, never a list.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

import torch
from torch import Tensor


class Moves(NamedTuple):
    """[N] each."""

    moved: Tensor
    """bool."""
    bin: Tensor
    """int64, the bin to start in; read where moved."""


def count_bins(bins: Tensor, mask: Tensor, num_bins: int) -> Tensor:
    """Environments of `mask` [N] in each bin; [B] float32."""
    counts = torch.zeros(num_bins, dtype=torch.float32, device=bins.device)
    return counts.scatter_add_(0, bins, mask.to(torch.float32))


def rank_in_bin(bins: Tensor, mask: Tensor, num_bins: int, draw: Tensor) -> Tensor:
    """Place of each environment of `mask` among those of its bin, from 0, in the order of `draw` ([N] in [0, 1)).

    [N] int64; unspecified outside the mask.
    """
    own = torch.where(mask, bins, num_bins)
    order = (own.to(torch.float64) + draw).argsort(stable=True)
    sorted_bins = own[order]
    counts = torch.zeros(num_bins + 1, dtype=torch.int64, device=bins.device)
    counts.scatter_add_(0, own, torch.ones_like(own))
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(own), device=bins.device) - starts[sorted_bins]
    return torch.zeros_like(own).scatter_(0, order, places)


def seat(
    bins: Tensor,
    seated: Tensor,
    free: Tensor,
    movable: Tensor,
    wanted: Tensor,
    can_start: Tensor,
    slack: float,
    draws: Tuple[Tensor, Tensor],
) -> Moves:
    """Fill bins that have too few environments with `free` ones and with those that are too many elsewhere.

    `bins` [N] int64: where each is. `seated` [N] bool counts as being there. `free` [N] bool: just reset, to be placed.
    `movable` [N] bool, among the seated: may be cut. `wanted` [B] float: environments a bin should have. `can_start`
    [B] bool: bins that an episode can begin in. A bin has too many above wanted + `slack`, and above ceil(wanted).
    `draws`: uniform numbers in [0, 1), [N] to choose who is cut, and a scalar to choose among bins that lack.

    Free ones are seated first. Where bins lack more than there are to seat, seats are chosen by systematic sampling
    (each bin gets its share of them up to one); where fewer, the rest stays where it is.
    """
    num_bins = wanted.shape[0]
    draw, shift = draws
    rank = rank_in_bin(bins, seated, num_bins, draw)
    allowed = torch.maximum((wanted - 1e-3).ceil(), (wanted + (slack + 1e-3)).floor())
    surplus = seated & movable & (rank.to(allowed.dtype) >= allowed[bins])
    staying = count_bins(bins, seated & ~surplus, num_bins)
    lacking = torch.where(can_start, (wanted - staying).clamp(min=0.0), torch.zeros_like(wanted))
    pool = free | surplus
    order = free.to(torch.int64).cumsum(0) - 1
    behind = free.sum() + surplus.to(torch.int64).cumsum(0) - 1
    place = torch.where(free, order, behind).to(torch.float64)
    edges = lacking.to(torch.float64).cumsum(0)
    size = pool.sum().clamp(min=1)
    stretch = (edges[-1] / size).clamp(min=1.0)
    position = (place + shift) * stretch
    target = torch.searchsorted(edges, position, right=True).clamp(max=num_bins - 1)
    return Moves(pool & (position < edges[-1]), target)
