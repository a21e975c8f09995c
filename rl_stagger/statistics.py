"""What happened in a batch, counted once: episodes, phases, resets, task logs. Sums and counts on the device; the host
reads them in one transfer.

Works on a whole rollout [K, N] at a time, so that its cost does not grow with the number of steps.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.errors import ContractError
from rl_stagger.resets.coverage import histogram_coverage, phase_bins, phase_histogram, total_variation
from rl_stagger.resets.nonstationarity import ForgettingTracker, PhaseBins, explained_variance_of_bins
from rl_stagger.rollout import Estimates, Rollout

Metrics = Dict[str, Tensor]
"""Name -> scalar or [bins] tensor on the device; NaN = no such event in this iteration."""


# -- formulas -------------------------------------------------------------------------------------------------------
class SinceDone:
    """Sums over each episode's steps so far. Built once for a rollout's `done` [K, N] bool, which ends an episode after
    step t."""

    def __init__(self, done: Tensor) -> None:
        steps = torch.arange(done.shape[0], device=done.device).unsqueeze(1)
        last_done = torch.where(done, steps, -1).cummax(0).values
        before = torch.cat([torch.full_like(last_done[:1], -1), last_done[:-1]])
        self._ended, self._place, self._last = before >= 0, before.clamp_(min=0), done[-1]

    def totals(self, x: Tensor, carry: Tensor) -> Tuple[Tensor, Tensor]:
        """Sum of `x` [K, N] from each episode's first step up to and including t; `carry` [N]: the sum brought along
        from before the rollout. Returns (totals [K, N], the carry into the next rollout [N])."""
        running = carry + x.cumsum(0)
        totals = running - running.gather(0, self._place) * self._ended
        return totals, totals[-1].masked_fill(self._last, 0)


def mean_where(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask`; NaN where it is nowhere."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum()  # 0 / 0 is NaN


def log_means(logs: List[Dict[str, Any]], valid: Tensor, device: torch.device) -> Metrics:
    """Mean per event of everything a task logged; keys are the union over steps.

    A scalar is one event of its step; an [N] tensor is one event per valid row. NaN is no event. `valid`: [K, N].
    """
    scalars: Dict[str, List[Tensor]] = {}
    vectors: Dict[str, List[Tuple[int, Tensor]]] = {}
    for t, log in enumerate(logs):
        for key, value in log.items():
            if hasattr(value, "__array__") and not isinstance(value, Tensor):
                value = torch.as_tensor(value, device=device)
            if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == valid.shape[1]:
                vectors.setdefault(key, []).append((t, value.reshape(-1).to(torch.float32)))
            else:
                scalars.setdefault(key, []).append(_scalar(key, value, device))
    metrics: Metrics = {}
    for key in sorted(set(scalars) | set(vectors), key=str):
        parts, masks = [], []
        if key in vectors:
            rows = torch.stack([row for _, row in vectors[key]])
            parts.append(rows.flatten())
            masks.append(torch.stack([valid[t] for t, _ in vectors[key]]).flatten())
        if key in scalars:
            parts.append(torch.stack(scalars[key]))
            masks.append(torch.ones(len(scalars[key]), dtype=torch.bool, device=device))
        values, mask = torch.cat(parts), torch.cat(masks)
        metrics[f"task/{key}"] = mean_where(values, mask & ~torch.isnan(values))
    return metrics


def _scalar(key: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ContractError(f"info['log']['{key}'] has shape {tuple(value.shape)}; a scalar or one value per env")
        return value.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)
    try:
        return torch.full((), float(value), device=device)
    except (TypeError, ValueError):
        raise ContractError(f"info['log']['{key}'] is {value!r}; a number, or one number per env") from None


# -- the account ----------------------------------------------------------------------------------------------------
class Statistics:
    """Carries unfinished episodes from rollout to rollout.

    An episode is partial when its first counted step was not its first step (a written clock, a warm-up, a restored
    state) or when a reset rule cut it; partial episodes are counted apart and enter no mean.
    """

    def __init__(self, num_envs: int, horizon_steps: Optional[int], rollout_steps: int, device: torch.device) -> None:
        self.horizon_steps, self.device = horizon_steps, device
        self.num_bins = phase_bins(horizon_steps, rollout_steps) if horizon_steps else 0
        self._return = torch.zeros(num_envs, device=device)
        self._length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._partial = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._histogram = torch.full((self.num_bins,), float("nan"), device=device)
        self._forgetting = ForgettingTracker(self.num_bins, num_envs * rollout_steps, device)

    @torch.no_grad()
    def add(self, rollout: Rollout, estimates: Optional[Estimates] = None) -> Metrics:
        """Metrics of one rollout; those of the critic where the learner's `estimates` are given."""
        valid = rollout.valid
        done = rollout.done & valid
        terminated, cut = rollout.terminated & valid, rollout.cut & valid
        reward = torch.where(valid, rollout.reward, torch.zeros_like(rollout.reward))
        since = SinceDone(done)
        returns, self._return = since.totals(reward, self._return)
        lengths, self._length = since.totals(valid.to(torch.int64), self._length)
        begun_midway = valid & (lengths == 1) & (torch.maximum(rollout.phase, rollout.clock) > 0)
        marks, self._partial = since.totals((begun_midway | cut).to(torch.int64), self._partial)
        full = done & (marks == 0)
        partial = done & ~full
        length = lengths.to(returns.dtype)
        return_mean = mean_where(returns, full)
        metrics: Metrics = {
            "episode/return_mean": return_mean,
            "episode/return_std": mean_where((returns - return_mean).square(), full).sqrt(),
            "episode/length_mean": mean_where(length, full),
            "episode/count": full.sum(),
            "episode/partial_count": partial.sum(),
            "episode/midway_count": (partial & ~cut).sum(),
            "episode/cut_count": (done & cut).sum(),
            "episode/terminated_count": (terminated & full).sum(),
            "episode/truncated_count": (full & ~terminated).sum(),
            "episode/length_min": _extreme(length, full, largest=False),
            "episode/length_max": _extreme(length, full, largest=True),
            "batch/reward_mean": mean_where(rollout.reward, valid),
        }
        if self.horizon_steps:
            metrics["fault/past_horizon"] = ((rollout.clock >= self.horizon_steps) & valid).sum()
        if rollout.has_success:
            metrics["episode/success_rate"] = mean_where(rollout.success.to(returns.dtype), full)
        resets = rollout.was_reset.sum(1).to(torch.float32)
        metrics["resets/per_step_max"], metrics["resets/per_step_mean"] = resets.max(), resets.mean()
        metrics["resets/frozen_share"] = rollout.frozen.to(torch.float32).mean()
        if estimates is not None:
            error = estimates.target - estimates.value
            metrics["critic/error_rms"] = mean_where(error.square(), valid).sqrt()
        if self.horizon_steps:
            metrics.update(self._by_phase(rollout, estimates, self.horizon_steps))
        metrics.update(log_means(rollout.logs, valid, self.device))
        return metrics

    def _by_phase(self, rollout: Rollout, estimates: Optional[Estimates], horizon_steps: int) -> Metrics:
        """How the batch's phases are spread, and what reward and critic are like in each of them."""
        histogram = phase_histogram(rollout.phase, horizon_steps, self.num_bins, rollout.valid)
        bins = PhaseBins(rollout.phase, rollout.valid, horizon_steps, self.num_bins)
        reward = bins.means(rollout.reward)
        # A batch in which everybody waits has no mixture: the next one is held against the last that had.
        none, nan = bins.count.sum() == 0, torch.full((), float("nan"), device=self.device)
        metrics = {
            "batch/coverage": torch.where(none, nan, histogram_coverage(histogram)),
            "batch/tv_distance": torch.where(none, nan, total_variation(histogram, self._histogram)),
            "batch/phase_histogram": histogram,
            "batch/reward_by_phase": reward.to(torch.float32),
            "batch/forgetting_events": self._forgetting.add(reward, bins.count),
        }
        self._histogram = torch.where(none, self._histogram, histogram)
        if estimates is not None:
            value, target = estimates.value, estimates.target
            metrics["critic/explained_variance_by_phase"] = explained_variance_of_bins(bins, value, target)
            metrics["critic/error_by_phase"] = bins.means((target - value).square()).sqrt().to(torch.float32)
        return metrics

    def state_dict(self) -> Dict[str, Any]:
        return {
            "return": self._return.clone(),
            "length": self._length.clone(),
            "partial": self._partial.clone(),
            "histogram": self._histogram.clone(),
            **{f"forgetting_{name}": x for name, x in self._forgetting.state_dict().items()},
        }

    def load_state_dict(self, state: Dict[str, Any], episodes_too: bool) -> None:
        """`episodes_too`: the environment's state came back as well, so unfinished episodes go on."""
        self._histogram = state["histogram"].to(self.device).clone()
        self._forgetting.load_state_dict({name: state[f"forgetting_{name}"] for name in ForgettingTracker.FIELDS})
        if episodes_too:
            self._return = state["return"].to(self.device).clone()
            self._length = state["length"].to(self.device).clone()
            self._partial = state["partial"].to(self.device).clone()


def _extreme(x: Tensor, mask: Tensor, largest: bool) -> Tensor:
    worst = -float("inf") if largest else float("inf")
    kept = torch.where(mask, x, torch.full_like(x, worst))
    value = kept.max() if largest else kept.min()
    return torch.where(torch.isinf(value), torch.full_like(value, float("nan")), value)


# -- to the host ----------------------------------------------------------------------------------------------------
def read_metrics(metrics: Metrics) -> Dict[str, Any]:
    """All metrics in one transfer, the second host read of an iteration. Scalars become floats (None for NaN), vectors
    lists; counts stay whole numbers."""
    kinds: Dict[torch.dtype, List[str]] = {}
    for name, value in metrics.items():
        kinds.setdefault(value.dtype, []).append(name)
    parts = [torch.cat([metrics[name].detach().reshape(-1) for name in names]) for names in kinds.values()]
    flat = torch.cat([part.to(torch.float64) for part in parts]).tolist()
    read: Dict[str, List[Optional[float]]] = {}
    start = 0
    for name in (name for names in kinds.values() for name in names):
        stop = start + metrics[name].numel()
        read[name] = [None if math.isnan(x) else x for x in flat[start:stop]]
        start = stop
    host: Dict[str, Any] = {}
    for name, value in metrics.items():
        values = read[name]
        if value.dim() > 0:
            host[name] = values
        elif value.is_floating_point() or values[0] is None:
            host[name] = values[0]
        else:
            host[name] = int(values[0])
    return host
