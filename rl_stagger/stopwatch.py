"""Where the time of an iteration goes, without making the host wait for the device."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Tuple

import torch


class Stopwatch:
    """`with watch("physics"): ...` adds to the time of "physics". Inner blocks are not counted in outer ones.

    On CUDA the time is the device's, by events that are read in `read`, after the iteration's one transfer.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._open: List[Tuple[str, Any]] = []
        self._events: List[Tuple[str, Any, Any]] = []
        self._seconds: Dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._open:
            self._add(*self._open[-1])
        self._open.append((name, self._now()))
        try:
            yield
        finally:
            self._add(*self._open.pop())
            if self._open:
                self._open[-1] = (self._open[-1][0], self._now())

    def read(self) -> Dict[str, float]:
        """Seconds by name since the last read; starts again at zero. On CUDA the caller has waited for the device."""
        for name, start, stop in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(stop) / 1000.0
        seconds, self._seconds, self._events = self._seconds, {}, []
        return seconds

    def _now(self) -> Any:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _add(self, name: str, start: Any) -> None:
        if self._cuda:
            self._events.append((name, start, self._now()))
        else:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
