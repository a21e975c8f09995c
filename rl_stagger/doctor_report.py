"""What a person gets from the doctor: tables, doctor.json and doctor.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Optional, Sequence

import numpy as np

from rl_stagger.diagnosis import HAZARD_BINS, Arm, Profile
from rl_stagger.logging import curves
from rl_stagger.logging.writers import strict_json
from rl_stagger.prescription import shown

if TYPE_CHECKING:
    from rl_stagger.doctor import Diagnosis

ARM_ROWS = (
    ("coverage, median", "coverage"),
    ("coverage, least", "coverage_min"),
    ("tv distance, median", "tv_distance"),
    ("cyclic index: reward", "reward_cycle"),
    ("cyclic index: critic's error", "error_cycle"),
    ("cyclic index: explained variance", "explained_cycle"),
    ("explained variance, 10th percentile", "explained_p10"),
    ("explained variance, median", "explained_median"),
    ("mean reward per step, last horizon (not judged)", "reward"),
    ("share of valid samples", "valid_share"),
)


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> List[Path]:
    """Write doctor.json and doctor.png into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "doctor.json"
    report.write_text(strict_json(diagnosis.to_tree(), indent=2) + "\n", encoding="utf-8")
    return [report, draw_diagnosis(diagnosis, folder / "doctor.png")]


# -- tables ---------------------------------------------------------------------------------------------------------
def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Tables and the recommendation, on standard output."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    for table in (_sizes_table(diagnosis), _profile_table(diagnosis), _arms_table(diagnosis)):
        if table is not None:
            console.print(table)
    r = diagnosis.recommendation
    console.print(f"\n[bold]{r.headline}[/bold]")
    console.print(_bullets(r.reasons))
    console.print("what it expects from it:")
    console.print(_bullets([r.expected, *(f"note: {note}" for note in diagnosis.notes)]))
    print(f"\noverrides: {' '.join(r.overrides)}")


def _bullets(texts: Sequence[str]) -> Any:
    """Paragraphs whose later lines stand below their first; nothing in them is markup."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    for text in texts:
        grid.add_row(" -", Text(text))
    return grid


def _sizes_table(diagnosis: Diagnosis) -> Any:
    from rich.table import Table

    f = diagnosis.findings
    table = Table(title=f"{diagnosis.task}, asked about reset={diagnosis.rule}", title_justify="left")
    table.add_column("size")
    table.add_column("value", justify="right")
    table.add_row("H, time limit in steps", "none" if f.horizon_steps is None else str(f.horizon_steps))
    table.add_row("K, steps of a rollout", str(f.rollout_steps))
    table.add_row("H/K", f"{f.windows:.1f}" if f.horizon_steps else "-")
    table.add_row("N, environments", str(f.num_envs))
    if f.horizon_steps:
        table.add_row("warm-up / planned training", f"{f.warmup_share:.0%}")
    c = f.costs
    if c is not None:
        table.add_row("one env step of all", f"{1000 * c.step_s:.3g} ms")
        missing = "not possible"
        one = missing if c.one_s is None else f"{c.one_s / c.step_s:.2f} steps"
        group = missing if c.group_s is None else f"{c.group_s / c.step_s:.2f} steps"
        table.add_row("reset of one environment", one)
        table.add_row(f"reset of a group of {c.group_envs}", group)
        table.add_row("reset of all", f"{c.whole_s / c.step_s:.2f} steps")
    return table


def _profile_table(diagnosis: Diagnosis) -> Any:
    from rich.table import Table

    profiles = diagnosis.findings.profiles
    thirds = [x for x in diagnosis.early_by_third if x is not None]
    if not profiles and not thirds:
        return None
    table = Table(title="first episodes, by policy", title_justify="left")
    table.add_column("measure")
    for p in profiles:
        table.add_column(p.policy, justify="right")
    rows = [
        ("environments", [str(p.episodes) for p in profiles]),
        ("steps watched", [str(p.steps_watched) for p in profiles]),
        ("median length in steps", [f"{p.median_steps:.0f}" for p in profiles]),
        ("share that ends early", [shown(p.early_share) for p in profiles]),
        ("spread of start states (0 fixed, 1 random)", [shown(p.start_spread) for p in profiles]),
        ("phase dependence (0 alike)", [shown(p.phase_dependence) for p in profiles]),
    ]
    rows += [
        (
            f"ends early at {100 * i // HAZARD_BINS}-{100 * (i + 1) // HAZARD_BINS} % of H",
            [shown(p.hazard[i]) for p in profiles],
        )
        for i in range(HAZARD_BINS)
        if any(p.hazard[i] for p in profiles)
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    if thirds and profiles:
        shares = " / ".join(shown(x) for x in diagnosis.early_by_third)
        table.add_row("terminated in training's thirds", shares, *[""] * (len(profiles) - 1))
    return table


def _arms_table(diagnosis: Diagnosis) -> Any:
    from rich.table import Table

    f = diagnosis.findings
    arms = [arm for arm in (f.reference, f.rule) if arm is not None]
    if not arms:
        return None
    table = Table(title="trainings", title_justify="left")
    table.add_column("measure")
    for arm in arms:
        table.add_column(arm.rule, justify="right")
    table.add_row("iterations (horizons)", *[f"{a.iterations} ({a.horizons:.1f})" for a in arms])
    table.add_row("environments", *[str(a.num_envs) for a in arms])
    for title, name in ARM_ROWS:
        table.add_row(title, *[_cell(arm, name) for arm in arms])
    table.add_row("env steps of warm-up", *[f"{a.warmup_steps:,}" for a in arms])
    return table


def _cell(arm: Arm, name: str) -> str:
    value: Optional[float] = getattr(arm, name)
    return "-" if value is None else f"{value:.3g}" if name == "reward" else f"{value:.2f}"


# -- the picture ----------------------------------------------------------------------------------------------------
def draw_diagnosis(diagnosis: Diagnosis, path: Path) -> Path:
    """Phases of the batches of each training, its critic, early ends and reset costs. Returns `path`."""
    f = diagnosis.findings
    figure = curves.new_figure(12.0, 7.4)
    figure.suptitle(f"{diagnosis.task}: {diagnosis.recommendation.headline}", fontsize=12)
    grid = figure.add_gridspec(2, 1, height_ratios=(1.1, 1))
    arms = diagnosis.lines or {"no training": []}
    top = grid[0].subgridspec(1, len(arms))
    heats, image = [], None
    for column, (rule, lines) in enumerate(arms.items()):
        axis = figure.add_subplot(top[column])
        shares, first = curves.phase_shares(lines)
        image = curves.draw_phases(axis, shares, first, f.horizon_steps) or image
        axis.set_title(f"{rule}: phases in the batch", color=curves.COLORS[column])
        heats.append(axis)
    if image is not None:
        curves.add_colorbar(figure, image, heats)
    below = grid[1].subgridspec(1, 3, width_ratios=(1.3, 1, 0.8))
    axis = figure.add_subplot(below[0])
    curves.draw_explained(
        axis, {rule: curves.curve(lines, "critic/explained_variance") for rule, lines in diagnosis.lines.items()}
    )
    axis.set_xlabel(curves.X_LABEL)
    curves.add_legend(axis)
    _draw_hazards(figure.add_subplot(below[1]), f.profiles)
    _draw_costs(figure.add_subplot(below[2]), diagnosis)
    return curves.save_figure(figure, path)


def _draw_hazards(axis: Any, profiles: Any) -> None:
    axis.set(
        title="Early ends, of the episodes that got there", xlabel="phase in episode (% of horizon)", ylabel="share"
    )
    width = 0.8 / max(1, len(profiles))
    place = np.arange(HAZARD_BINS)
    for index, profile in enumerate(profiles):
        values = [np.nan if x is None else x for x in profile.hazard]
        axis.bar(
            place + (index + 0.5) * width - 0.4,
            values,
            width,
            label=f"{profile.policy} policy",
            color=curves.COLORS[2 + index],
        )
    axis.set_xticks(place[::2] - 0.5, [f"{100 * i // HAZARD_BINS}" for i in place[::2]])
    highest = max((x for p in profiles for x in _known(p)), default=0.0)
    axis.set_ylim(0, 1.1 * highest or 1.0)
    if highest:
        curves.add_legend(axis)
        return
    text = "no episode ended early" if profiles else "not watched"
    axis.text(0.5, 0.5, text, ha="center", va="center", color="0.5", transform=axis.transAxes)


def _known(profile: Profile) -> List[float]:
    return [x for x in profile.hazard if x is not None]


def _draw_costs(axis: Any, diagnosis: Diagnosis) -> None:
    axis.set(title="Cost of a reset", ylabel="env steps")
    c = diagnosis.findings.costs
    if c is None:
        axis.text(0.5, 0.5, "not timed", ha="center", va="center", color="0.5", transform=axis.transAxes)
        return
    parts = [("one", c.one_s), (f"group of {c.group_envs}", c.group_s), ("all", c.whole_s)]
    names = [name if value is not None else f"{name}\n(not possible)" for name, value in parts]
    bars = axis.bar(names, [(value or 0.0) / c.step_s for _, value in parts], 0.6, color=curves.COLORS[0])
    axis.bar_label(bars, [f"{value / c.step_s:.2g}" if value is not None else "" for _, value in parts])
    axis.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
    axis.margins(y=0.15)
