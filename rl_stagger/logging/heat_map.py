"""Metrics with one number per phase bin, over a whole run: as arrays, and as small pictures for TensorBoard and W&B.

A phase bin's number as a curve of its own says little, and there may be forty; as a picture, phase upwards and
iterations to the right, the cycle of synchronous resets is seen at once. Shapes: T iterations, B phase bins.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

Lines = Sequence[Mapping[str, Any]]

COLORMAP, MISSING = "viridis", "#d9d9d9"
DENSITY_MAX = 3.0
"""Phase density at the bright end of the colour scale; 1 is an even batch."""
FIRST_PICTURE, GROWTH = 16, 1.25
"""Iterations before the first picture, and how many times more before each next one."""
WIDTH_PX, HEIGHT_PX = 480, 160


def as_float(value: Any) -> float:
    """A metric as it stands in memory or in a JSON line; NaN for None and for what is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def phase_rows(lines: Lines, name: str, shares: bool = False) -> Tuple[np.ndarray, int]:
    """(a vector metric [T, B], the first one's iteration). NaN rows where an iteration is missing.

    Where B changed in the course of the run, every row is spread over the largest; `shares`: and divided, so that its
    sum stays what it was.
    """
    rows: List[Tuple[int, np.ndarray]] = []
    for line in lines:
        values = line.get(name)
        if isinstance(values, (list, tuple)) and values:
            rows.append((line["iteration"], np.array([as_float(x) for x in values])))
    if not rows:
        return np.zeros((0, 0)), 1
    bins, first = max(len(row) for _, row in rows), rows[0][0]
    table = np.full((rows[-1][0] - first + 1, bins), np.nan)
    for iteration, row in rows:
        source = np.arange(bins) * len(row) // bins
        table[iteration - first] = row[source] / (np.bincount(source)[source] if shares else 1)
    return table, first


def color_limits(name: str, table: np.ndarray) -> Tuple[float, float]:
    """The values at the dark and the bright end of the colour scale for metric `name` [T, B].

    Explained variance from -1 to 1, since a critic at its start may be worse by orders of magnitude; histograms from 0
    to three times even; anything else between the 2nd and 98th percentile.
    """
    if name.endswith("histogram"):
        return 0.0, DENSITY_MAX / max(1, table.shape[1])
    if "explained_variance" in name:
        return -1.0, 1.0
    values = table[np.isfinite(table)]
    if not values.size:
        return 0.0, 1.0
    low, high = (float(x) for x in np.percentile(values, [2, 98]))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def picture(name: str, table: np.ndarray) -> np.ndarray:
    """A vector metric [T, B] as [height, width, 3] uint8, the first phase at the bottom, grey where there is none.

    More iterations than pixels are averaged: leaving some out would show a wrong cycle.
    """
    from matplotlib import colormaps

    low, high = color_limits(name, table)
    columns = np.arange(len(table)) // math.ceil(len(table) / WIDTH_PX)
    there = np.isfinite(table)
    total, count = (np.zeros((columns[-1] + 1, table.shape[1])) for _ in range(2))
    np.add.at(total, columns, np.where(there, table, 0.0))
    np.add.at(count, columns, there)
    mean = np.ma.masked_where(count == 0, total / np.maximum(count, 1))
    colors = colormaps[COLORMAP].with_extremes(bad=MISSING)
    cells = colors((mean - low) / (high - low), bytes=True)[:, :, :3].transpose(1, 0, 2)[::-1]
    wide, tall = max(1, WIDTH_PX // cells.shape[1]), max(1, HEIGHT_PX // cells.shape[0])
    return np.ascontiguousarray(cells.repeat(tall, axis=0).repeat(wide, axis=1))


class HeatMaps:
    """Remembers a run's vector metrics and says when there is enough new for the next pictures."""

    def __init__(self, history: Lines = ()) -> None:
        """`history`: the lines of an earlier life of the run."""
        self._lines: List[Dict[str, Any]] = []
        self._drawn, self._next = 0, FIRST_PICTURE
        for line in history:
            self.add(line)
            self.due()
        self._drawn = len(self._lines)

    def add(self, metrics: Mapping[str, Any]) -> None:
        vectors = {name: x for name, x in metrics.items() if isinstance(x, (list, tuple)) and len(x) > 1}
        self._lines.append({"iteration": metrics["iteration"], **vectors})

    def due(self) -> bool:
        """Whether to draw now; asked once after each `add`."""
        if len(self._lines) < self._next:
            return False
        self._next = max(self._next + 1, math.ceil(GROWTH * self._next))
        return True

    @property
    def stale(self) -> bool:
        """Whether something came after the last pictures."""
        return len(self._lines) > self._drawn

    def draw(self) -> Dict[str, np.ndarray]:
        """Metric name -> picture."""
        self._drawn = len(self._lines)
        names = sorted({name for line in self._lines for name in line if name != "iteration"})
        return {name: picture(name, phase_rows(self._lines, name, name.endswith("histogram"))[0]) for name in names}
