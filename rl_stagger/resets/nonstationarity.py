"""What a mixture of phases that moves does to learning: cycles in a run's curves, the critic phase by phase, what is
forgotten.

The first part runs on the host, on series that were written down; the rest on the device, without reading from it.
Shapes: T iterations, K steps, N environments; [bins] equal parts of the horizon.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from rl_stagger.resets.coverage import bin_of_phase, phase_bins

WINDOW_PERIODS = 5
WINDOW_ITERS = 32
MOST_POSITIONS = 32
CYCLES = (
    ("batch/reward_mean", "batch/cyclic_reward", "batch/swing_reward"),
    ("critic/error_rms", "critic/cyclic_error", "critic/swing_error"),
)
"""(series, metric of its cyclic index, metric of its swing)."""


# -- cycles, on the host ----------------------------------------------------------------------------------------------
class Cycle(NamedTuple):
    """The part of a series that repeats with the horizon."""

    share: float
    """The cyclic index: its share of the variance, in [0, 1]: 0 for noise, 1 for a pure cycle, however small."""
    swing: float
    """Its root mean square over that of the series, in [0, 1]: how large it is."""


def cyclic_index(
    series: Sequence[Optional[float]],
    horizon_steps: int,
    rollout_steps: int,
    num_bins: Optional[int] = None,
    first: int = 0,
) -> Optional[float]:
    """`find_cycle`'s share alone."""
    cycle = find_cycle(series, horizon_steps, rollout_steps, num_bins, first)
    return None if cycle is None else cycle.share


def find_cycle(
    series: Sequence[Optional[float]],
    horizon_steps: int,
    rollout_steps: int,
    num_bins: Optional[int] = None,
    first: int = 0,
) -> Optional[Cycle]:
    """How much of a series [T] repeats with the horizon.

    `series[i]` belongs to the iteration that `first + i` others came before, None or NaN where there is no value. Under
    synchronous resets that iteration begins (first + i) * K mod H steps into the episode; the period P = H / K
    iterations need not be whole.

    1. A running mean over exactly one period is taken off, so that learning progress does not count. It takes nothing
       from a cycle, and half a period at each end has none and is left out.
    2. What is left is grouped by its place in the horizon, in `num_bins` places (None: ceil(H / K), at most 32). The
       share is the variance between the groups over all variance. Unlike the power at the period's frequency alone
       (6 / pi^2 of a sawtooth) this is 1 for every waveform.
    3. b groups of n values share (b - 1) / (n (1 - 1 / P)) of a white noise's variance by chance; that much is taken
       off and the rest scaled to 1 (the adjusted R^2 of regression on the groups).

    An index of few periods is rough. That of a series which hardly moves, as of a learned task, may be high and mean
    nothing; its swing says so.

    None: P is under 2, or fewer than three periods are there (two are left after step 1). A series that varies by
    rounding only has no cycle: 0.
    """
    period = horizon_steps / rollout_steps
    values = np.array([np.nan if x is None else x for x in series], dtype=float)
    there = np.isfinite(values)
    if period < 2 or len(values) < 3 * period or there.sum() < 0.5 * len(values):
        return None
    where = np.arange(len(values))
    values = np.interp(where, where[there], values[there])
    scale = np.abs(values).max()
    rest = values - values.mean()
    trend = _running_mean(rest, period)
    kept = np.isfinite(trend) & there
    rest = (rest - trend)[kept]
    total = float(np.square(rest).sum())
    if total <= len(rest) * (1e-6 * scale) ** 2:
        return Cycle(0.0, 0.0)
    num_bins = num_bins or min(phase_bins(horizon_steps, rollout_steps), MOST_POSITIONS)
    place = ((where[kept] + first) * rollout_steps % horizon_steps) * num_bins // horizon_steps
    count = np.bincount(place, minlength=num_bins)
    mean = np.bincount(place, rest, minlength=num_bins) / np.maximum(count, 1)
    share = float((count * np.square(mean)).sum()) / total
    chance = (int((count > 0).sum()) - 1) / (len(rest) * (1.0 - 1.0 / period))
    if chance >= 1.0:
        return None
    share = min(1.0, max(0.0, (share - chance) / (1.0 - chance)))
    return Cycle(share, math.sqrt(share * total / len(rest) / float(np.square(values).mean())))


def _running_mean(x: np.ndarray, width: float) -> np.ndarray:
    """Mean over [i - width / 2, i + width / 2] of `x` [T] as steps of length 1; NaN where that goes over an end.

    A width that is not whole counts the two outer values in part.
    """
    sums, edges = np.concatenate([[0.0], np.cumsum(x)]), np.arange(len(x) + 1)
    centre = np.arange(len(x)) + 0.5
    low, high = centre - width / 2, centre + width / 2
    mean = (np.interp(high, edges, sums) - np.interp(low, edges, sums)) / width
    return np.where((low >= -1e-9) & (high <= len(x) + 1e-9), mean, np.nan)


def cyclic_window(horizon_steps: int, rollout_steps: int) -> int:
    """Iterations that the cyclic indices in metrics.jsonl look back: five periods, of which four are left after the
    running mean, and at least 32."""
    return max(math.ceil(WINDOW_PERIODS * horizon_steps / rollout_steps), WINDOW_ITERS)


def cyclic_metrics(
    lines: Sequence[Mapping[str, Any]], horizon_steps: Optional[int], rollout_steps: int
) -> Dict[str, Optional[float]]:
    """The cyclic indices and swings of these iterations (a window, or a whole run). Nothing without a time limit."""
    metrics: Dict[str, Optional[float]] = {}
    if not horizon_steps or not lines:
        return metrics
    for source, index, swing in CYCLES:
        series = [_number(line.get(source)) for line in lines]
        cycle = find_cycle(series, horizon_steps, rollout_steps, first=lines[0]["iteration"] - 1)
        metrics[index], metrics[swing] = (None, None) if cycle is None else cycle
    return metrics


def _number(value: Any) -> Optional[float]:
    """None for what is not there or not finite (JSON has infinities as text)."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


# -- phase by phase, on the device ------------------------------------------------------------------------------------
class PhaseBins:
    """Sums over the rows of each phase bin. Built once for a batch: `phase`, `valid` of one shape, e.g. [K, N]."""

    def __init__(self, phase: Tensor, valid: Tensor, horizon_steps: int, num_bins: int) -> None:
        self.num_bins = num_bins
        self._valid = valid.flatten()
        self._bin = bin_of_phase(phase.flatten(), horizon_steps, num_bins)
        self.count = self.sums(torch.ones_like(self._bin, dtype=torch.float64))
        """[bins] float64: valid rows."""

    def sums(self, x: Tensor) -> Tensor:
        """[bins] float64. In double precision the order of a GPU's additions does not show."""
        rows = torch.where(self._valid, x.flatten().to(torch.float64), 0.0)
        return torch.zeros(self.num_bins, dtype=torch.float64, device=x.device).scatter_add_(0, self._bin, rows)

    def means(self, x: Tensor) -> Tensor:
        """[bins] float64; NaN where a bin is empty."""
        empty = torch.full_like(self.count, float("nan"))
        return torch.where(self.count > 0, self.sums(x) / self.count.clamp(min=1.0), empty)

    def moments(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """(mean, population variance) of each bin; NaN where it is empty."""
        mean = self.means(x)
        off = x.flatten().to(torch.float64) - mean.index_select(0, self._bin)
        return mean, self.means(off.square())


def explained_variance_of_bins(bins: PhaseBins, value: Tensor, target: Tensor) -> Tensor:
    """1 - Var(target - value) / Var(target) of each bin's own rows; [bins] float32.

    NaN where a bin is empty or its target varies by rounding only. By its own variance, and not the batch's: what is
    asked is whether the critic tells the states of one phase apart; how large its errors are says `error_by_phase`.
    """
    _, residual = bins.moments(target - value)
    mean, total = bins.moments(target)
    varies = total > 1e-13 * mean.square()
    shares = 1.0 - residual / torch.where(varies, total, torch.ones_like(total))
    return torch.where(varies, shares, torch.full_like(shares, float("nan"))).to(torch.float32)


def explained_variance_by_bin(
    value: Tensor, target: Tensor, phase: Tensor, valid: Tensor, horizon_steps: int, num_bins: int
) -> Tensor:
    """`explained_variance_of_bins` from the rows themselves, all of one shape."""
    return explained_variance_of_bins(PhaseBins(phase, valid, horizon_steps, num_bins), value, target)


class ForgettingTracker:
    """Counts the times that a phase bin's reward falls by more than `drop` of what it had gained.

    A bin's level is the mean reward per valid step over its last `memory_rows` rows, by an exponential average; with
    memory_rows = K * N it spans one batch that is all of one phase, or H / K batches that are even, and is equally
    noisy in both. It counts from the time that so many rows were seen. Falls are measured against the distance from
    the worst level so far to the best (rewards may be negative), in bins where that distance is at least
    `least_range` of the largest bin's: where nothing was gained, nothing but noise can be lost.

    One fall is one event: the next one needs the bin to come back to within drop / 2 first.
    """

    FIELDS = ("level", "seen", "best", "worst", "fallen")

    def __init__(
        self, num_bins: int, memory_rows: int, device: torch.device, drop: float = 0.25, least_range: float = 0.1
    ) -> None:
        if not 0.0 < drop < 1.0:
            raise ValueError(f"drop={drop}: above 0 and below 1, e.g. 0.25")
        self.memory_rows, self.drop, self.least_range, self.device = memory_rows, drop, least_range, device
        zeros = torch.zeros(num_bins, dtype=torch.float64, device=device)
        self.level, self.seen = zeros, zeros.clone()
        self.best, self.worst = torch.full_like(zeros, -float("inf")), torch.full_like(zeros, float("inf"))
        self.fallen = torch.zeros(num_bins, dtype=torch.bool, device=device)

    def add(self, reward: Tensor, count: Tensor) -> Tensor:
        """One batch: each bin's mean reward (anything where it is empty) and rows, [bins] float64. The number of new
        events, int64 scalar."""
        self.seen = self.seen + count
        weight = (count / self.seen.clamp(min=1.0, max=float(self.memory_rows))).clamp(max=1.0)
        self.level = torch.where(count > 0, self.level + weight * (reward - self.level), self.level)
        judged = self.seen >= self.memory_rows
        self.best = torch.where(judged, torch.maximum(self.best, self.level), self.best)
        self.worst = torch.where(judged, torch.minimum(self.worst, self.level), self.worst)
        gained = torch.where(judged, self.best - self.worst, torch.zeros_like(self.level))
        lost = torch.where(judged, self.best - self.level, torch.zeros_like(self.level))
        rounding = 1e-6 * torch.maximum(self.best.abs(), self.worst.abs())
        matters = judged & (gained > rounding) & (gained >= self.least_range * gained.max())
        falls = matters & (lost > self.drop * gained) & ~self.fallen
        self.fallen = (self.fallen | falls) & (lost > 0.5 * self.drop * gained)
        return falls.sum()

    def state_dict(self) -> Dict[str, Any]:
        return {name: getattr(self, name).clone() for name in self.FIELDS}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        for name in self.FIELDS:
            setattr(self, name, state[name].to(self.device).clone())
