"""What a person sees while a run goes on: a table that renews itself, plain lines, or nothing.

A terminal that goes away, is narrow or knows no Unicode never stops the training.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

try:
    from typing import Literal, Protocol
except ImportError:  # pragma: no cover
    from typing_extensions import Literal, Protocol

from rl_stagger.logging.writers import as_float

Clock = Callable[[], float]


class Console(Protocol):
    """Shows messages and the newest metrics."""

    def message(self, text: str) -> None: ...

    def update(self, metrics: Dict[str, Any]) -> None:
        """`metrics` as a writer gets them: "iteration" is the number of completed iterations."""
        ...

    def close(self) -> None: ...


def make_console(
    mode: Literal["auto", "live", "plain", "off"],
    total_iterations: int,
    title: str,
    stream: Any = None,
    clock: Clock = time.monotonic,
) -> Console:
    """live: a table that renews itself, on a terminal; plain: lines; auto: live where it can be. `stream`: stdout."""
    if mode not in ("auto", "live", "plain", "off"):
        raise ValueError(f"console={mode}: expected auto, live, plain or off")
    if mode == "off":
        return SilentConsole()
    out = SafeStream(sys.stdout if stream is None else stream)
    progress = Progress(total_iterations, clock)
    if mode != "plain" and out.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        return LiveConsole(out, progress, title)
    return PlainConsole(out, progress, title)


class SilentConsole:
    """Shows nothing."""

    def message(self, text: str) -> None: ...

    def update(self, metrics: Dict[str, Any]) -> None: ...

    def close(self) -> None: ...


# -- what is shown --------------------------------------------------------------------------------------------------
FIELDS: Tuple[Tuple[str, str, str, Callable[[float], str]], ...] = (
    ("steps/total", "env steps", "steps", lambda x: f"{x:,.0f}"),
    ("speed/steps_per_s", "steps per second", "steps/s", lambda x: f"{x:,.0f}"),
    ("episode/return_mean", "episode return", "return", lambda x: f"{x:,.2f}" if abs(x) < 1e6 else f"{x:.3g}"),
    ("episode/length_mean", "episode length", "length", lambda x: f"{x:,.1f}"),
    ("episode/success_rate", "success rate", "success", lambda x: f"{100 * x:.1f}%"),
    ("batch/coverage", "coverage", "coverage", lambda x: f"{x:.3f}"),
    ("critic/explained_variance", "explained variance", "EV", lambda x: f"{x:.3f}" if abs(x) < 1e3 else f"{x:.2g}"),
    ("optim/lr", "learning rate", "lr", lambda x: f"{x:.2e}"),
    ("policy/kl", "KL", "KL", lambda x: f"{x:.5f}" if abs(x) < 10 else f"{x:.2e}"),
)
"""Metric, name in the table, name in a line, format."""
WIDTHS = {"steps": 13, "steps/s": 9, "return": 10, "length": 8, "success": 6, "coverage": 5, "EV": 7, "lr": 8, "KL": 8}
OPTIONAL = ("episode/success_rate", "batch/coverage")
"""Not every task has them: they appear once they were seen."""


class Progress:
    """The last known value of every metric, how old it is, and how long the rest will take."""

    def __init__(self, total_iterations: int, clock: Clock) -> None:
        self.total, self.clock = max(1, int(total_iterations)), clock
        self.iteration = 0
        self._last: Dict[str, Tuple[float, int]] = {}
        self._start_s = clock()
        self._first: Optional[Tuple[int, float]] = None

    def add(self, metrics: Dict[str, Any]) -> None:
        self.iteration = int(metrics.get("iteration") or self.iteration + 1)
        if self._first is None:
            self._first = (self.iteration, self.clock())
        for name, *_ in FIELDS:
            value = as_float(metrics.get(name))
            if not math.isnan(value):
                self._last[name] = (value, self.iteration)

    def shown(self) -> List[Tuple[str, str, str, int]]:
        """(metric, name in the table, value or "-", iterations since it was measured) of each field."""
        rows = []
        for name, label, _, form in FIELDS:
            if name in self._last:
                value, iteration = self._last[name]
                text = form(value) if math.isfinite(value) else str(value)
                rows.append((name, label, text, self.iteration - iteration))
            elif name not in OPTIONAL:
                rows.append((name, label, "-", 0))
        return rows

    def elapsed_s(self) -> float:
        return self.clock() - self._start_s

    def left_s(self) -> Optional[float]:
        """At the mean pace since the first iteration, which alone pays for the warm-up."""
        if self._first is None:
            return None
        first, at_s = self._first
        done = self.iteration - first
        pace_s = (self.clock() - at_s) / done if done > 0 else at_s - self._start_s
        return pace_s * max(0, self.total - self.iteration)


def duration(seconds: Optional[float]) -> str:
    """
    >>> duration(3725.0)
    '1:02:05'
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# -- plain lines ----------------------------------------------------------------------------------------------------
class PlainConsole:
    """A line for every iteration that takes a second or more, else about one a second; the last one always."""

    interval_s = 1.0

    def __init__(self, stream: SafeStream, progress: Progress, title: str) -> None:
        self._stream, self._progress = stream, progress
        self._shown_at_s = -math.inf
        self._pending = False
        self.message(title)

    def message(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def update(self, metrics: Dict[str, Any]) -> None:
        self._progress.add(metrics)
        self._pending = True
        now_s = self._progress.clock()
        # An iteration of 0.95 s shall have its line, too.
        if now_s - self._shown_at_s >= 0.9 * self.interval_s or self._progress.iteration >= self._progress.total:
            self._shown_at_s = now_s
            self._show()

    def close(self) -> None:
        if self._pending:
            self._show()

    def _show(self) -> None:
        self._pending = False
        self.message(plain_line(self._progress))


def plain_line(progress: Progress) -> str:
    width = len(str(progress.total))
    short = {name: label for name, _, label, _ in FIELDS}
    parts = [f"[{progress.iteration:>{width}}/{progress.total}]"]
    stale = 0
    for name, _, value, age in progress.shown():
        parts.append(f"{short[name]} {value:>{WIDTHS[short[name]]}}")
        if name == "episode/return_mean":
            stale = age
    parts.append(f"elapsed {duration(progress.elapsed_s()):>7}")
    parts.append(f"left {duration(progress.left_s()):>7}")
    if stale:
        parts.append(f"(last episode ended {stale} iteration{'s' * (stale > 1)} ago)")
    return "  ".join(parts)


# -- the live table -------------------------------------------------------------------------------------------------
class LiveConsole:
    """A table that renews itself in place; messages and other people's prints scroll by above it."""

    interval_s = 0.15

    def __init__(self, stream: SafeStream, progress: Progress, title: str) -> None:
        from rich.live import Live

        self._progress, self._title = progress, title
        self._console = rich_console(stream)
        self._drawn_at_s = -math.inf
        # No refresh thread: it would draw in the middle of a physics step and die alone with a broken pipe.
        self._live = Live(self._table(), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)
        self._open = True

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def update(self, metrics: Dict[str, Any]) -> None:
        self._progress.add(metrics)
        now_s = self._progress.clock()
        if now_s - self._drawn_at_s >= self.interval_s or self._progress.iteration >= self._progress.total:
            self._drawn_at_s = now_s
            self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        """Leaves the last state on the screen and gives the cursor back."""
        if self._open:
            self._open = False
            self._live.update(self._table())
            self._live.stop()

    def _table(self) -> Any:
        from rich import box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress, wide = self._progress, self._console.width >= 60
        table = Table(title=Text(self._title, style="bold"), title_justify="left", box=box.ROUNDED, show_header=False)
        # Where it is narrow, names give way to values.
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(4, self._console.width - 17))
        table.add_column(no_wrap=True, overflow="ellipsis", justify="right", min_width=10 if wide else None)
        if wide:
            table.add_column(no_wrap=True, overflow="ellipsis", min_width=20)
        bar = ProgressBar(
            progress.total,
            min(progress.iteration, progress.total),
            width=20,
            complete_style="green",
            finished_style="green",
        )
        rows: List[Tuple[str, str, Any]] = [("iteration", f"{progress.iteration}/{progress.total}", bar)]
        for _, label, value, age in progress.shown():
            note = f"{age} iteration{'s' * (age > 1)} ago" if age else ""
            rows.append((label, value, Text(note, style="dim")))
        rows.append(("elapsed", duration(progress.elapsed_s()), ""))
        rows.append(("time left", duration(progress.left_s()), ""))
        for label, value, note in rows:
            table.add_row(*(Text(label, style="cyan"), value, note)[: len(table.columns)])
        return table


def rich_console(stream: SafeStream) -> Any:
    """A rich console on `stream`; what is no terminal counts as wide enough for any table."""
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, width=None if stream.isatty() else 240)  # pyright: ignore[reportArgumentType]


# -- the way out ----------------------------------------------------------------------------------------------------
class SafeStream:
    """A text stream that cannot fail: it replaces what the encoding lacks, and is silent once the other end is gone."""

    def __init__(self, stream: Any) -> None:
        self._stream: Optional[Any] = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except BlockingIOError:
                pass
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except BlockingIOError:
                pass
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        try:
            return self._stream is not None and bool(self._stream.isatty())
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is gone")
        return self._stream.fileno()

    def _give_up(self) -> None:
        """The descriptor leads nowhere from now on, so that a print by a task or Python's last flush works, too."""
        stream, self._stream = self._stream, None
        try:
            descriptor = stream.fileno()  # pyright: ignore[reportOptionalMemberAccess]
            nowhere = os.open(os.devnull, os.O_WRONLY)
        except (OSError, ValueError, AttributeError):
            return
        try:
            os.dup2(nowhere, descriptor)
        finally:
            os.close(nowhere)
