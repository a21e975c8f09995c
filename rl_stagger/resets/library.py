"""Recorded states by phase, on the device: bounded, the oldest replaced first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.errors import ConfigError
from rl_stagger.resets.coverage import bin_of_phase
from rl_stagger.resets.seats import rank_in_bin

State = Dict[str, Tensor]


class StateLibrary:
    """A ring of states for each of B phase bins. Storage is made at the first `record`, when the state's shape is
    known, of at most `capacity_bytes` and at most `most_per_bin` states a bin."""

    def __init__(self, num_bins: int, horizon_steps: int, capacity_bytes: int, most_per_bin: int) -> None:
        self.num_bins, self.horizon_steps = num_bins, horizon_steps
        self.capacity_bytes, self.most_per_bin = capacity_bytes, most_per_bin
        self.per_bin = 0
        """Places a bin."""
        self._states: State = {}
        """Name -> [B * per_bin + 1, ...]; the last row takes what is not kept."""
        self._phase: Optional[Tensor] = None
        """[B * per_bin + 1] int64, in steps."""
        self._written: Optional[Tensor] = None
        """[B] int64: states ever written to each bin."""

    def bin_of(self, phase: Tensor) -> Tensor:
        """[N] int64 phase in steps -> [N] int64."""
        return bin_of_phase(phase, self.horizon_steps, self.num_bins)

    @property
    def filled(self) -> Optional[Tensor]:
        """[B] int64, states in each bin; None before the first record."""
        return None if self._written is None else self._written.clamp(max=self.per_bin)

    @property
    def bytes(self) -> int:
        """What the storage takes."""
        return sum(x.numel() * x.element_size() for x in self._states.values())

    def record(self, state: State, phase: Tensor, mask: Tensor, draw: Tensor) -> None:
        """Keep the rows of `mask` [N] of `state` (name -> [N, ...]), at most a quarter of a bin's places each time, so
        that a bin holds states of several moments. `draw` [N] in [0, 1) chooses among them."""
        if self._written is None:
            self._open(state)
        self.check_fits(state)
        assert self._written is not None
        assert self._phase is not None
        bins = self.bin_of(phase)
        rank = rank_in_bin(bins, mask, self.num_bins, draw)
        kept = mask & (rank < max(1, self.per_bin // 4))
        place = bins * self.per_bin + (self._written[bins] + rank) % self.per_bin
        place = torch.where(kept, place, self.num_bins * self.per_bin)
        for name, x in self._states.items():
            x.index_copy_(0, place, state[name].to(x.dtype))
        self._phase.index_copy_(0, place, phase)
        self._written.scatter_add_(0, bins, kept.to(torch.int64))

    def check_fits(self, state: State) -> None:
        """ConfigError where `state` (name -> [N, ...]) is not of the kind that is kept here; reads no values."""
        kept = {name: tuple(x.shape[1:]) for name, x in self._states.items()}
        given = {name: tuple(x.shape[1:]) for name, x in state.items()}
        if kept != given:
            raise ConfigError(
                f"reset.library.path: its states are of another task: {_shown(kept)} there, {_shown(given)} here"
            )

    def draw(self, bins: Tensor, draw: Tensor) -> Tuple[State, Tensor]:
        """A recorded state of bin `bins` [N] for every row, chosen by `draw` [N] in [0, 1), and its phase [N]. Rows
        whose bin is empty hold anything."""
        assert self._written is not None
        assert self._phase is not None
        filled = self._written.clamp(max=self.per_bin)[bins]
        row = bins * self.per_bin + (draw * filled).to(torch.int64).clamp(max=self.per_bin - 1)
        return {name: x.index_select(0, row) for name, x in self._states.items()}, self._phase.index_select(0, row)

    def state_dict(self) -> Dict[str, Any]:
        if self._written is None:
            return {}
        assert self._phase is not None
        return {
            "states": {name: x[:-1].clone() for name, x in self._states.items()},
            "phase": self._phase[:-1].clone(),
            "written": self._written.clone(),
            "horizon_steps": self.horizon_steps,
        }

    def load_state_dict(self, state: Dict[str, Any], device: torch.device) -> None:
        """ValueError where the saved library has other bins or another horizon."""
        if not state:
            return
        if int(state["horizon_steps"]) != self.horizon_steps:
            raise ValueError(f"its states are of H={state['horizon_steps']}, this task has H={self.horizon_steps}")
        if len(state["written"]) != self.num_bins:
            raise ValueError(f"it has {len(state['written'])} phase bins, this run has {self.num_bins}")
        self._states = {name: _with_spare(x.to(device)) for name, x in state["states"].items()}
        self._phase, self._written = _with_spare(state["phase"].to(device)), state["written"].to(device).clone()
        self.per_bin = len(state["phase"]) // self.num_bins

    def load_from(self, path: str, device: torch.device, task: Optional[Tuple[str, Dict[str, Any]]]) -> None:
        """The states of another run (a run directory or a checkpoint). ConfigError where it has none that fit.

        `task`: (name, settings) of ours, where they are known; states of other settings mean something else.
        """
        from rl_stagger.checkpoint import load_checkpoint, resolve_resume

        checkpoint = resolve_resume(path, Path("runs"), key="reset.library.path")
        state = load_checkpoint(checkpoint)
        theirs = {"name": state["config"]["task"]["name"], **state["config"]["task"]["settings"]}
        for key, value in ({} if task is None else {"name": task[0], **task[1]}).items():
            if str(theirs.get(key)) != str(value):
                raise ConfigError(
                    f"reset.library.path={path}: its states are of another task, {key}={theirs.get(key)} there and "
                    f"{value} here"
                )
        saved = (state["env"].get("upkeep") or {}).get("library")
        if not saved:
            raise ConfigError(
                f"reset.library.path={path}: that run recorded no states; one with bring_up=snapshot or an upkeep does"
            )
        try:
            self.load_state_dict(saved, device)
        except ValueError as error:
            raise ConfigError(
                f"reset.library.path={path}: {error}; give both the same H, K and number of groups"
            ) from error

    def _open(self, state: State) -> None:
        row_bytes = sum(x[:1].numel() * x.element_size() for x in state.values())
        self.per_bin = min(self.capacity_bytes // (row_bytes * self.num_bins), self.most_per_bin)
        if self.per_bin < 1:
            least = row_bytes * self.num_bins / 2**20
            raise ConfigError(
                f"reset.library.mib={self.capacity_bytes / 2**20:g}: one state for each of {self.num_bins} phase bins "
                f"takes {least:.3g} MiB; at least {least:.3g}"
            )
        rows = self.num_bins * self.per_bin + 1
        device = next(iter(state.values())).device
        self._states = {
            name: torch.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=device) for name, x in state.items()
        }
        self._phase = torch.zeros(rows, dtype=torch.int64, device=device)
        self._written = torch.zeros(self.num_bins, dtype=torch.int64, device=device)


def _shown(shapes: Dict[str, Tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))


def _with_spare(x: Tensor) -> Tensor:
    """`x` and one more row, the one that takes what is not kept."""
    return torch.cat([x, torch.zeros_like(x[:1])])
