"""A density that follows what there is to learn: more environments in the phases with the larger learning signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Literal, Tuple

import torch
from torch import Tensor

from rl_stagger.resets.coverage import bin_of_phase


@dataclass(frozen=True)
class AdaptiveConfig:
    """allocation=adaptive."""

    signal: Literal["advantage", "critic_error"] = "critic_error"
    """advantage: mean |target - V| of a phase bin's transitions, noise included. critic_error: |mean (target - V)|,
    what the critic gets wrong about the phase as a whole. (With targets from GAE, target - V is the advantage.)"""
    smoothing: float = 0.9
    """Share of the old in the moving average, per update."""
    temperature: float = 1.0
    """1: density proportional to the signal; larger: flatter; smaller: sharper."""
    floor: float = 0.3
    """This share of the environments stays even over the horizon."""
    every_iters: int = 5
    """Iterations between updates of the density."""

    def check(self) -> List[Tuple[str, object, str]]:
        faults: List[Tuple[str, object, str]] = []
        if not 0.0 <= self.smoothing < 1.0:
            faults.append(("smoothing", self.smoothing, "at least 0 and below 1, e.g. 0.9"))
        if self.temperature <= 0.0:
            faults.append(("temperature", self.temperature, "above 0, e.g. 1"))
        if not 0.0 < self.floor <= 1.0:
            faults.append(("floor", self.floor, "above 0 and at most 1: no phase may be lost for ever"))
        if self.every_iters < 1:
            faults.append(("every_iters", self.every_iters, "at least 1"))
        return faults


def density_of_signal(signal: Tensor, seen: Tensor, temperature: float, floor: float) -> Tensor:
    """floor / B + (1 - floor) * s^(1 / temperature) / sum; [B], sum 1. Bins not `seen` [B] count as the mean of those
    seen; even where nothing is seen or the signal is zero."""
    count = seen.sum().clamp(min=1)
    mean = torch.where(seen, signal, torch.zeros_like(signal)).sum() / count
    filled = torch.where(seen, signal, mean)
    # Over the largest: a power of a number up to 1 cannot overflow.
    scaled = (filled / filled.max().clamp(min=1e-12)).clamp(min=0.0).pow(1.0 / temperature)
    total = scaled.sum()
    even = torch.full_like(signal, 1.0 / signal.shape[0])
    share = torch.where(total > 0, scaled / total.clamp(min=1e-12), even)
    return floor * even + (1.0 - floor) * share


class AdaptiveDensity:
    """Moving average of the signal per phase bin, and the density in force."""

    def __init__(self, config: AdaptiveConfig, num_bins: int, horizon_steps: int, device: torch.device) -> None:
        self.config, self.num_bins, self.horizon_steps = config, num_bins, horizon_steps
        self.iterations = 0
        self._sum = torch.zeros(num_bins, device=device)
        self._count = torch.zeros(num_bins, device=device)
        self._average = torch.zeros(num_bins, device=device)
        self._seen = torch.zeros(num_bins, dtype=torch.bool, device=device)
        self.density = torch.full((num_bins,), 1.0 / num_bins, device=device)
        """[B], sum 1."""

    @torch.no_grad()
    def follow(self, phase: Tensor, error: Tensor, valid: Tensor) -> None:
        """One iteration's batch: phases in steps, target - V in reward units. All [K, N]."""
        error = error.abs() if self.config.signal == "advantage" else error
        bins = bin_of_phase(phase, self.horizon_steps, self.num_bins).flatten()
        mask = valid.flatten()
        self._sum.scatter_add_(0, bins, torch.where(valid, error, torch.zeros_like(error)).flatten())
        self._count.scatter_add_(0, bins, mask.to(torch.float32))
        self.iterations += 1
        if self.iterations % self.config.every_iters:
            return
        here = self._count > 0
        mean = (self._sum / self._count.clamp(min=1.0)).abs()
        keep = torch.where(self._seen, self.config.smoothing, 0.0)
        self._average = torch.where(here, keep * self._average + (1.0 - keep) * mean, self._average)
        self._seen = self._seen | here
        self.density = density_of_signal(self._average, self._seen, self.config.temperature, self.config.floor)
        self._sum, self._count = torch.zeros_like(self._sum), torch.zeros_like(self._count)

    def state_dict(self) -> Dict[str, Any]:
        tensors = {name: getattr(self, name).clone() for name in ("_sum", "_count", "_average", "_seen", "density")}
        return {"iterations": self.iterations, **tensors}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.iterations = int(state["iterations"])
        for name in ("_sum", "_count", "_average", "_seen", "density"):
            setattr(self, name, state[name].to(self.density.device).clone())
