"""Small pictures of the native tasks: shapes with smooth edges on a canvas, in torch on the CPU; no window needed."""

from __future__ import annotations

from typing import Dict, Tuple

import torch
from torch import Tensor

Point = Tuple[float, float]
COLOURS: Dict[str, Tuple[int, int, int]] = {
    "paper": (245, 245, 242),
    "line": (170, 170, 175),
    "body": (45, 45, 55),
    "moving": (40, 90, 220),
    "goal": (150, 210, 150),
    "done": (40, 160, 70),
    "mark": (190, 50, 40),
}


class Canvas:
    """A picture [height, width, 3] of a rectangle of the plane; x to the right, y upward, in the caller's unit."""

    def __init__(self, low: Point, high: Point, pixels_per_unit: float) -> None:
        """`low` and `high`: the corners at the lower left and the upper right. Both sides get an even number of pixels,
        which video formats ask for."""
        self.pixels_per_unit = pixels_per_unit
        width, height = (2 * round((high[i] - low[i]) * pixels_per_unit / 2) for i in (0, 1))
        columns, rows = torch.arange(width) + 0.5, torch.arange(height) + 0.5
        self._x = (low[0] + columns / pixels_per_unit).unsqueeze(0)
        self._y = (high[1] - rows / pixels_per_unit).unsqueeze(1)
        self._picture = torch.tensor(COLOURS["paper"], dtype=torch.float32).repeat(height, width, 1)

    def disc(self, centre: Point, radius: float, colour: str) -> None:
        self._paint(torch.hypot(self._x - centre[0], self._y - centre[1]) - radius, colour)

    def stroke(self, start: Point, end: Point, width: float, colour: str) -> None:
        """A line with round ends."""
        along = (end[0] - start[0], end[1] - start[1])
        length2 = max(along[0] ** 2 + along[1] ** 2, 1e-12)
        x, y = self._x - start[0], self._y - start[1]
        share = ((x * along[0] + y * along[1]) / length2).clamp(0.0, 1.0)
        self._paint(torch.hypot(x - share * along[0], y - share * along[1]) - width / 2, colour)

    def box(self, low: Point, high: Point, colour: str) -> None:
        """A filled rectangle."""
        x_out = torch.maximum(low[0] - self._x, self._x - high[0])
        y_out = torch.maximum(low[1] - self._y, self._y - high[1])
        self._paint(torch.maximum(x_out, y_out), colour)

    def picture(self) -> Tensor:
        """[height, width, 3] uint8."""
        return self._picture.round().to(torch.uint8)

    def _paint(self, distance: Tensor, colour: str) -> None:
        """`distance` [height, width] from the shape's edge, negative inside; half a pixel on both sides is blended."""
        cover = (0.5 - distance * self.pixels_per_unit).clamp(0.0, 1.0).unsqueeze(-1)
        self._picture += cover * (torch.tensor(COLOURS[colour], dtype=torch.float32) - self._picture)
