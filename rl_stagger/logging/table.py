"""All jobs of a sweep in one table: what differs between them, how each ended, what it reached."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from rl_stagger.logging.console import SafeStream, duration, rich_console
from rl_stagger.logging.writers import as_float, read_json_lines, replace_file, strict_json

PathLike = Union[str, Path]
Row = Dict[str, Any]

RESULTS = (
    "status",
    "iterations",
    "steps_total",
    "final_return",
    "best_return",
    "final_length",
    "explained_variance_p10",
    "wall_s",
)
"""Keys of summary.json that every row shows."""
MARKS = ("summary.json", "metrics.jsonl", "config.yaml", ".hydra")
"""A directory with one of them is a job's."""
NOT_SETTINGS = re.compile(r"hydra(\.|/|@|$)|run_dir$")


# -- collecting -----------------------------------------------------------------------------------------------------
def sweep_table(run_dirs: Sequence[PathLike]) -> Tuple[List[str], List[Row]]:
    """(columns, a row for each run directory in the order given).

    Columns: "run", the settings in which the jobs differ, the results, and "error" where there was one. A job without
    a readable summary is a failed one.
    """
    paths = [Path(path) for path in run_dirs]
    summaries = [read_summary(path) for path in paths]
    settings = [split_overrides(summary["overrides"]) for summary in summaries]
    differing = differing_keys(settings)
    labels = {key: f"{key}=" if key in RESULTS + ("run", "error") else key for key in differing}
    columns = ["run", *labels.values(), *RESULTS]
    if any(summary.get("error") for summary in summaries):
        columns.append("error")
    names = _names(paths)
    rows = []
    for name, summary, chosen in zip(names, summaries, settings):
        row = {"run": name, **{label: chosen.get(key) for key, label in labels.items()}}
        row.update({key: summary.get(key) for key in columns if key not in row})
        rows.append(row)
    return columns, rows


def read_summary(run_dir: PathLike) -> Dict[str, Any]:
    """summary.json; of a job that left none, what else it left, as a failed one."""
    path = Path(run_dir)
    fault = "no summary.json" if path.is_dir() else "no run directory"
    summary: Any = None
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except ValueError:
        fault = "summary.json is unreadable"
    except OSError:
        pass
    if not isinstance(summary, dict):
        lines = read_json_lines(path / "metrics.jsonl")
        last = lines[-1] if lines else {}
        summary = {"status": "failed", "error": fault}
        summary.update(iterations=last.get("iteration"), steps_total=last.get("steps/total"))
    summary.setdefault("status", "failed")
    if not isinstance(summary.get("overrides"), list):
        summary["overrides"] = _hydra_overrides(path)
    return summary


def _hydra_overrides(path: Path) -> List[str]:
    try:
        text = (path / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    except OSError:
        return []
    return [line[2:].strip().strip("'\"") for line in text.splitlines() if line.startswith("- ")]


def split_overrides(overrides: Sequence[Any]) -> Dict[str, str]:
    """
    >>> split_overrides(["seed=1", "+task.settings.size=3", "hydra.job.num=2"])
    {'seed': '1', 'task.settings.size': '3'}
    """
    pairs = (str(override).lstrip("+~").partition("=") for override in overrides)
    return {key: value for key, _, value in pairs if key and not NOT_SETTINGS.match(key)}


def differing_keys(settings: Sequence[Dict[str, str]]) -> List[str]:
    """Keys in which the jobs differ, in their first order. A job whose settings are not known makes no difference."""
    known = [chosen for chosen in settings if chosen]
    keys = list(dict.fromkeys(key for chosen in known for key in chosen))
    return [key for key in keys if len({chosen.get(key) for chosen in known}) > 1]


def _names(paths: Sequence[Path]) -> List[str]:
    if len(paths) < 2:
        return [path.name for path in paths]
    absolute = [os.path.abspath(path) for path in paths]
    root = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [os.path.relpath(path, root) for path in absolute]


def find_jobs(sweep_dir: PathLike) -> List[Path]:
    """Run directories at any depth of `sweep_dir`, in natural order, and its folders in which there is none."""
    jobs: List[Path] = []

    def look(folder: Path) -> bool:
        children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
        if folder != Path(sweep_dir) and any((folder / mark).exists() for mark in MARKS):
            jobs.append(folder)
            return True
        found = [look(child) for child in children]
        if folder.parent == Path(sweep_dir) and not any(found):
            jobs.append(folder)
        return any(found)

    look(Path(sweep_dir))
    return sorted(jobs, key=_natural)


def _natural(path: Path) -> List[Tuple[int, str]]:
    """Sorts job 10 behind job 9."""
    return [(len(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", str(path))]


# -- showing --------------------------------------------------------------------------------------------------------
def print_sweep(sweep_dir: PathLike, run_dirs: Optional[Sequence[PathLike]] = None, stream: Any = None) -> List[Row]:
    """Print the table of a sweep and leave it as sweep.csv and sweep.json in `sweep_dir`. Returns the rows.

    `run_dirs`: the jobs, where the caller knows them; else they are looked for.
    """
    folder = Path(sweep_dir)
    jobs = [Path(path) for path in run_dirs] if run_dirs is not None else find_jobs(folder)
    columns, rows = sweep_table(jobs)
    overrides = [read_summary(job)["overrides"] for job in jobs]
    records = [{**row, "run_dir": str(job), "overrides": given} for job, row, given in zip(jobs, rows, overrides)]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "sweep.json", iter([strict_json(records, indent=2), "\n"]))
    replace_file(folder / "sweep.csv", iter([as_csv(columns, rows)]))
    out = SafeStream(sys.stdout if stream is None else stream)
    rich_console(out).print(_rich_table(folder.name, columns, rows))
    out.flush()
    return rows


def as_csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    failed = sum(row["status"] == "failed" for row in rows)
    caption = f"{len(rows)} jobs" + (f", {failed} failed" if failed else "")
    table = Table(title=Text(title, style="bold"), caption=caption, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        right = column in RESULTS[1:]
        table.add_column(Text(column.replace("_", " ") if right else column), justify="right" if right else "left")
    for row in rows:
        style = "red" if row["status"] == "failed" else ""
        table.add_row(*(Text(format_cell(column, row[column])) for column in columns), style=style)
    return table


def format_cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    number = as_float(value)
    if column not in RESULTS[1:] or math.isnan(number):
        return " ".join(str(value).split())
    if column == "wall_s":
        return duration(number)
    if column in ("iterations", "steps_total") and math.isfinite(number):
        return f"{number:,.0f}"
    return f"{number:,.2f}" if column != "explained_variance_p10" else f"{number:.3f}"
