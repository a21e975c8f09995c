"""Pictures of runs: one run's curves, and what a reset rule does to the training batches of several.

Drawn from metrics.jsonl alone, finished or not. Shapes: T iterations, B phase bins.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from rl_stagger.logging.heat_map import COLORMAP, DENSITY_MAX, MISSING, as_float, color_limits, phase_rows
from rl_stagger.logging.writers import read_json_lines
from rl_stagger.resets.nonstationarity import CYCLES

PathLike = Union[str, Path]
Lines = Sequence[Mapping[str, Any]]
Curve = Tuple[np.ndarray, np.ndarray]
"""Iterations [n] and the values there [n], finite ones only."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette: told apart with every kind of colour vision."""
CYCLE_METRICS = [names for _, *names in CYCLES]
X_LABEL = "training iteration"
STYLES = ("-", "--", "-.", ":")
ON_THE_RIGHT = "right"


# -- from lines to arrays -------------------------------------------------------------------------------------------
def curve(lines: Lines, name: str) -> Curve:
    """A metric where it is there and finite."""
    points = [(line["iteration"], as_float(line.get(name))) for line in lines]
    points = [(x, y) for x, y in points if math.isfinite(y)]
    return np.array([x for x, _ in points], dtype=float), np.array([y for _, y in points], dtype=float)


def phase_shares(lines: Lines) -> Tuple[np.ndarray, int]:
    """(histograms [T, B], the first one's iteration). NaN rows where an iteration is missing.

    Where B changed in the course of the run, every histogram is spread over the largest.
    """
    return phase_rows(lines, "batch/phase_histogram", shares=True)


def read_horizon(run_dir: PathLike) -> Optional[int]:
    """ "horizon_steps" of summary.json; None where there is none."""
    try:
        horizon = json.loads((Path(run_dir) / "summary.json").read_text(encoding="utf-8"))["horizon_steps"]
        return int(horizon) if horizon else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- one run --------------------------------------------------------------------------------------------------------
def draw_curves(run_dir: PathLike, horizon_steps: Optional[int] = None) -> Path:
    """Write curves.png from the run's metrics.jsonl, as far as it goes. Returns its path."""
    path = Path(run_dir)
    lines = read_json_lines(path / "metrics.jsonl")
    horizon = horizon_steps or read_horizon(path)
    figure = new_figure(13.0, 13.5)
    figure.suptitle(_title(path, lines), fontsize=11)
    grid = figure.add_gridspec(4, 2, height_ratios=(1, 1, 1.6, 1))
    axes = [figure.add_subplot(grid[row, column]) for row in (0, 1, 3) for column in range(2)]
    _draw_returns(axes[0], lines)
    _draw_lengths(axes[1], lines)
    draw_explained(axes[2], {"": curve(lines, "critic/explained_variance")})
    _draw_step_size(axes[3], lines)
    _draw_resets(axes[4], lines)
    _draw_cycles(axes[5], lines)
    heats = []
    for column, draw in enumerate((_draw_batch_by_phase, _draw_critic_by_phase)):
        below = grid[2, column].subgridspec(2, 1, height_ratios=(3.2, 1), hspace=0.0)
        heat, strip = figure.add_subplot(below[0]), figure.add_subplot(below[1])
        draw(figure, heat, strip, lines, horizon)
        heats.append(heat)
        axes.append(strip)
    last = lines[-1]["iteration"] if lines else 1
    for axis in [*axes, *heats]:
        axis.set_xlim(0.5, max(last, 2) + 0.5)
    for axis in axes:
        axis.set_xlabel(X_LABEL)
    for heat in heats:
        heat.set(xlabel="")
        heat.tick_params(labelbottom=False)
    return save_figure(figure, path / "curves.png")


def _title(path: Path, lines: Lines) -> str:
    if not lines:
        return f"{path.name}: no iteration yet"
    steps = as_float(lines[-1].get("steps/total"))
    told = f", {steps:,.0f} environment steps" if math.isfinite(steps) else ""
    return f"{path.name}: training iteration {lines[-1]['iteration']}{told}"


def _draw_returns(axis: Any, lines: Lines) -> None:
    both = [x for x in lines if math.isfinite(as_float(x.get("episode/return_mean")))]
    both = [x for x in both if math.isfinite(as_float(x.get("episode/return_std")))]
    if both:
        (x, mean), (_, spread) = curve(both, "episode/return_mean"), curve(both, "episode/return_std")
        axis.fill_between(x, mean - spread, mean + spread, color=COLORS[0], alpha=0.18, linewidth=0, label="± std")
    _line(axis, curve(lines, "episode/return_mean"), COLORS[0], "mean")
    axis.set(title="Episode return", ylabel="return")
    add_legend(axis)


def _draw_lengths(axis: Any, lines: Lines) -> None:
    success = curve(lines, "episode/success_rate")
    _line(axis, curve(lines, "episode/length_mean"), COLORS[0])
    axis.set(title="Episode length", ylabel="length (env steps)")
    axis.set_ylim(bottom=0)
    if len(success[0]):
        axis.set_title("Episode length and success rate")
        right = _right_axis(axis, COLORS[1])
        _line(right, success, COLORS[1])
        right.set(ylabel="success rate", ylim=(-0.03, 1.03))


def _draw_step_size(axis: Any, lines: Lines) -> None:
    kl, rate = curve(lines, "policy/kl"), curve(lines, "optim/lr")
    _line(axis, kl, COLORS[0])
    axis.set(title="KL of an update and learning rate", ylabel="KL")
    right = _right_axis(axis, COLORS[1])
    _line(right, rate, COLORS[1])
    right.set(ylabel="learning rate")
    for side, values in ((axis, kl[1]), (right, rate[1])):
        positive = values[values > 0]
        if len(positive) and positive.max() > 8 * positive.min():
            side.set_yscale("log", nonpositive="mask")


# -- several runs ---------------------------------------------------------------------------------------------------
def draw_comparison(
    run_dirs: Mapping[str, PathLike],
    out_path: PathLike,
    horizon_steps: Optional[int] = None,
    window: Optional[Tuple[int, int]] = None,
) -> Path:
    """`draw_batches` from the metrics.jsonl of one run directory per arm. `horizon_steps`: else from summary.json."""
    lines = {arm: read_json_lines(Path(path) / "metrics.jsonl") for arm, path in run_dirs.items()}
    horizons = [read_horizon(path) for path in run_dirs.values()]
    phases = {arm: phase_shares(x) for arm, x in lines.items()}
    first = min((start for shares, start in phases.values() if len(shares)), default=1)
    return draw_batches(
        {
            arm: np.pad(shares, ((start - first if len(shares) else 0, 0), (0, 0)), constant_values=np.nan)
            for arm, (shares, start) in phases.items()
        },
        out_path,
        horizon_steps=horizon_steps or next((h for h in horizons if h), None),
        returns={arm: curve(x, "episode/return_mean") for arm, x in lines.items()},
        explained_variance={arm: curve(x, "critic/explained_variance") for arm, x in lines.items()},
        first_iteration=first,
        window=window,
    )


def draw_batches(
    phases: Mapping[str, np.ndarray],
    out_path: PathLike,
    horizon_steps: Optional[int] = None,
    returns: Optional[Mapping[str, Curve]] = None,
    explained_variance: Optional[Mapping[str, Curve]] = None,
    first_iteration: int = 1,
    window: Optional[Tuple[int, int]] = None,
) -> Path:
    """What each arm's training batches are made of, over training, side by side, and what it learns from them below.

    `phases`: arm -> phase histograms [T, B], a row for each iteration from `first_iteration` on. `window`: the first
    and the last iteration of the heat maps; the curves always show all.
    """
    below = [
        (title, curves)
        for title, curves in (("Episode return", returns), ("Explained variance of the critic", explained_variance))
        if curves and any(len(x) for x, _ in curves.values())
    ]
    figure = new_figure(max(11.0, 5.2 * len(phases)), 7.2 if below else 3.9)
    grid = figure.add_gridspec(2 if below else 1, 1, height_ratios=(1.15, 1)[: 2 if below else 1])
    top = grid[0].subgridspec(1, max(1, len(phases)))
    heats, image = [], None
    for column, (arm, shares) in enumerate(phases.items()):
        axis = figure.add_subplot(top[column], sharey=heats[0] if heats else None)
        image = draw_phases(axis, shares, first_iteration, horizon_steps) or image
        axis.set_title(arm, color=COLORS[column % len(COLORS)], fontweight="bold")
        if window is not None:
            axis.set_xlim(window[0] - 0.5, window[1] + 0.5)
        if heats:
            axis.set_ylabel("")
            axis.tick_params(labelleft=False)
        heats.append(axis)
    if image is not None:
        add_colorbar(figure, image, heats)
    bottom = grid[1].subgridspec(1, len(below)) if below else None
    for column, (title, curves) in enumerate(below):
        assert bottom is not None
        axis = figure.add_subplot(bottom[column])
        if curves is explained_variance:
            draw_explained(axis, curves)
        else:
            _draw_arms(axis, curves)
        axis.set(title=title, xlabel=X_LABEL)
        axis.set_xlim(first_iteration - 0.5, max(x[-1] for x, _ in curves.values() if len(x)) + 0.5)
        add_legend(axis)
    return save_figure(figure, Path(out_path))


# -- panels ---------------------------------------------------------------------------------------------------------
def _draw_batch_by_phase(figure: Any, heat: Any, strip: Any, lines: Lines, horizon_steps: Optional[int]) -> None:
    image = draw_phases(heat, *phase_shares(lines), horizon_steps)
    heat.set_title("Phases in the training batch, and their coverage")
    if image is not None:
        add_colorbar(figure, image, [heat, strip])
    _line(strip, curve(lines, "batch/coverage"), COLORS[2])
    strip.set(ylabel="coverage", ylim=(-0.05, 1.05), yticks=(0, 1))


def _draw_critic_by_phase(figure: Any, heat: Any, strip: Any, lines: Lines, horizon_steps: Optional[int]) -> None:
    name = "critic/explained_variance_by_phase"
    table, first = phase_rows(lines, name)
    image = _draw_map(heat, table, first, horizon_steps, color_limits(name, table))
    heat.set(title="Explained variance by phase, and forgetting events", ylabel="")
    if image is not None:
        bar = figure.colorbar(image, ax=[heat, strip], extend="min", pad=0.015, fraction=0.04)
        bar.set_label("explained variance")
    x, events = curve(lines, "batch/forgetting_events")
    strip.bar(x, events, width=1.0, color=COLORS[1])
    strip.set(ylabel="events", ylim=(0, max(1.0, events.max() if len(events) else 1.0)))
    strip.yaxis.get_major_locator().set_params(integer=True, nbins=2)


def _draw_resets(axis: Any, lines: Lines) -> None:
    _line(axis, curve(lines, "resets/per_step_max"), COLORS[1], "most in a step")
    _line(axis, curve(lines, "resets/per_step_mean"), COLORS[0], "mean")
    axis.set(title="Resets per environment step", ylabel="environments")
    if axis.get_ylim()[1] > 20:
        axis.set_yscale("symlog", linthresh=1.0)
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylim(bottom=0)
    add_legend(axis)
    frozen = curve(lines, "resets/frozen_share")
    if frozen[1].any():
        axis.set_title("Resets per environment step, and share of frozen transitions")
        right = _right_axis(axis, COLORS[2])
        _line(right, frozen, COLORS[2], style="--")
        right.set(ylabel="frozen share", ylim=(0, 1.05 * frozen[1].max()))


def _draw_cycles(axis: Any, lines: Lines) -> None:
    """How much of the curves goes up and down with the horizon, how far, and how much the mixture moves."""
    for source, (index, swing), color in zip(("reward", "critic error"), CYCLE_METRICS, COLORS):
        _line(axis, curve(lines, index), color, f"{source}: cyclic index")
        _line(axis, curve(lines, swing), color, f"{source}: swing", style=":")
    _line(axis, curve(lines, "batch/tv_distance"), COLORS[2], "mixture: TV distance", style="--")
    axis.set(title="Cycles of one horizon, and movement of the mixture", ylim=(-0.03, 1.03))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=3, frameon=False, fontsize=9)


def draw_phases(axis: Any, shares: np.ndarray, first: int, horizon_steps: Optional[int]) -> Any:
    """Heat map of phase histograms [T, B] as densities: 1 where the batch is even. None if there is nothing to draw."""
    return _draw_map(axis, shares * shares.shape[1], first, horizon_steps, (0.0, DENSITY_MAX))


def _draw_map(
    axis: Any, table: np.ndarray, first: int, horizon_steps: Optional[int], limits: Tuple[float, float]
) -> Any:
    """Heat map of one number per phase bin [T, B], grey where there is none. None if there is nothing to draw."""
    axis.set(xlabel=X_LABEL, ylabel="phase in episode (env steps)")
    if not horizon_steps:
        axis.set_ylabel("phase in episode\n(share of horizon)")
    if table.size == 0:
        axis.text(0.5, 0.5, "no phases recorded", ha="center", va="center", transform=axis.transAxes)
        axis.set(yticks=())
        return None
    from matplotlib import colormaps

    colors = colormaps[COLORMAP].with_extremes(bad=MISSING)
    return axis.imshow(
        np.ma.masked_invalid(np.asarray(table, dtype=float).T),
        origin="lower",
        aspect="auto",
        interpolation="none" if table.shape[0] <= 1000 else "antialiased",
        extent=(first - 0.5, first + table.shape[0] - 0.5, 0, horizon_steps or 1),
        cmap=colors,
        vmin=limits[0],
        vmax=limits[1],
    )


def add_colorbar(figure: Any, image: Any, axes: Sequence[Any]) -> None:
    bar = figure.colorbar(image, ax=list(axes), extend="max", pad=0.015, fraction=0.04)
    bar.set_label("density (1 = even)")
    bar.set_ticks([0, 1, 2, 3])


def _draw_arms(axis: Any, curves: Mapping[str, Curve]) -> None:
    for i, (arm, points) in enumerate(curves.items()):
        _line(axis, points, COLORS[i % len(COLORS)], arm, style=STYLES[i // len(COLORS) % len(STYLES)])


def draw_explained(axis: Any, curves: Mapping[str, Curve]) -> None:
    """Between -1 and 1: an untrained critic can be worse by orders of magnitude and would flatten the rest."""
    _draw_arms(axis, curves)
    lowest = min((points[1].min() for points in curves.values() if len(points[1])), default=0.0)
    axis.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
    axis.set(title="Explained variance of the critic", ylabel="explained variance")
    axis.set_ylim(max(-1.0, min(-0.05, lowest - 0.05)), 1.05)
    if lowest < -1.0:
        axis.text(0.99, 0.02, f"lowest: {lowest:.3g}", ha="right", va="bottom", transform=axis.transAxes, color="0.35")


def _line(axis: Any, points: Curve, color: str, label: str = "", style: str = "-") -> None:
    """Few points, as of synchronous resets that end episodes once a horizon, get marks."""
    x, y = points
    marker = "o" if len(x) and len(x) <= max(12, (x[-1] - x[0] + 1) / 4) else ""
    axis.plot(x, y, style, color=color, label=label or "_", linewidth=1.5, marker=marker, markersize=3.5)
    if axis.get_label() != ON_THE_RIGHT:
        axis.grid(True, color="0.92")
        axis.set_axisbelow(True)
    if not len(x):
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", color="0.5", transform=axis.transAxes)


def _right_axis(axis: Any, color: str) -> Any:
    right = axis.twinx()
    right.set_label(ON_THE_RIGHT)
    axis.yaxis.label.set_color(COLORS[0])
    axis.tick_params(axis="y", which="both", labelcolor=COLORS[0])
    right.yaxis.label.set_color(color)
    right.tick_params(axis="y", which="both", labelcolor=color)
    right.spines["top"].set_visible(False)
    return right


def add_legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", framealpha=0.8, edgecolor="none", fontsize=9)


# -- the sheet ------------------------------------------------------------------------------------------------------
def new_figure(width_in: float, height_in: float) -> Any:
    """A figure of its own: nothing of a user's pyplot is read or changed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for axis in figure.axes:
        if axis.get_xlabel() == X_LABEL:
            axis.xaxis.get_major_locator().set_params(integer=True)
        if axis.spines["top"].get_visible() and not axis.images and axis.get_label() != "<colorbar>":
            axis.spines["top"].set_visible(False)
    figure.savefig(path, dpi=120, facecolor="white")
    return path
