"""Learning rates: fixed, linear, and adapted to the measured KL divergence. Rates are device scalars."""

from __future__ import annotations

import torch
from torch import Tensor


def adapt_rate(
    rate: Tensor, kl: Tensor, target: float, rate_min: float, rate_max: float, factor: float = 1.5
) -> Tensor:
    """The next learning rate, without a host read (rule of Rudin et al. 2021, arXiv 2109.11978).

    KL > 2 * target: rate / factor. 0 < KL < target / 2: rate * factor. Otherwise, and for a KL of NaN, as it was.
    Always within [rate_min, rate_max]. `rate`, `kl`: scalars.
    """
    too_far = kl > 2.0 * target
    too_near = (kl < 0.5 * target) & (kl > 0.0)
    moved = torch.where(too_far, rate / factor, torch.where(too_near, rate * factor, rate))
    return moved.clamp(rate_min, rate_max)


def linear_rate(rate_start: float, rate_end: float, iteration: int, iterations: int) -> float:
    """From `rate_start` at iteration 0 straight to `rate_end` at the last of `iterations`."""
    share = min(1.0, iteration / max(1, iterations - 1))
    return rate_start + (rate_end - rate_start) * share
