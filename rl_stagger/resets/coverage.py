"""How evenly phases fill the horizon, and how much the mixture moves from batch to batch. Pure functions.

Shapes: any shape of phases in; [bins] histograms. Only `phase_coverage` reads from the device (it returns a float).
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor


def phase_bins(horizon_steps: int, rollout_steps: int) -> int:
    """ceil(H / K): one bin for each rollout that fits into an episode."""
    return max(1, -(-horizon_steps // rollout_steps))


def bin_of_phase(phase: Tensor, horizon_steps: int, num_bins: int) -> Tensor:
    """Which of `num_bins` equal parts of [0, H) a phase (int64, in steps) is in; same shape, int64.

    Phases at or past H are in the last one.
    """
    return (phase * num_bins // horizon_steps).clamp(0, num_bins - 1)


def phase_histogram(phase: Tensor, horizon_steps: int, num_bins: int, valid: Optional[Tensor] = None) -> Tensor:
    """Share of phases (int64, in steps) in each of `num_bins` equal parts of [0, H); [num_bins] float32, sum 1.

    Phases at or past H count in the last bin. Rows outside `valid` (bool, same shape) do not count; zeros if none does.
    """
    bins = bin_of_phase(phase.flatten(), horizon_steps, num_bins)
    weight = torch.ones_like(bins, dtype=torch.float32) if valid is None else valid.flatten().to(torch.float32)
    counts = torch.zeros(num_bins, dtype=torch.float32, device=phase.device).scatter_add_(0, bins, weight)
    return counts / counts.sum().clamp(min=1.0)


def histogram_coverage(histogram: Tensor) -> Tensor:
    """Normalised entropy -sum p log p / log(bins) of a histogram [bins]; scalar in [0, 1], 1 = even."""
    bins = histogram.shape[0]
    if bins == 1:
        return torch.ones((), device=histogram.device)
    return (-torch.xlogy(histogram, histogram).sum() / math.log(bins)).clamp(0.0, 1.0) + 0.0  # never -0.0


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """sum |p - q| / 2 of two histograms [bins]; scalar in [0, 1], 0 = the same mixture."""
    return 0.5 * (p - q).abs().sum()


def phase_coverage(elapsed_steps: Tensor, horizon_steps: int, num_bins: int) -> float:
    """Coverage of a batch's phases in [0, 1] (see `histogram_coverage`)."""
    return float(histogram_coverage(phase_histogram(elapsed_steps, horizon_steps, num_bins)))
