"""All jobs of a sweep in one table: what differs between them, how each ended, what it reached."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from rl_stagger.logging.console import SafeStream, duration, rich_console
from rl_stagger.logging.writers import as_float, read_json_lines, replace_file, strict_json

PathLike = Union[str, Path]
Row = Dict[str, Any]

RESULTS = {
    "status": "status",
    "iterations": "iterations",
    "steps_total": "env steps",
    "steps_warmup": "warm-up steps",
    "final_return": "final return",
    "best_return": "best return",
    "final_success_rate": "success rate",
    "final_length": "final length",
    "explained_variance_p10": "EV p10",
    "coverage_min": "coverage min",
    "wall_s": "time",
}
"""Keys of summary.json that the rows show, and what they are called on the screen."""
IF_ANY = ("steps_warmup", "final_success_rate", "coverage_min")
"""Only where a job has them."""
DROP_ORDER = (
    "wall_s",
    "best_return",
    "final_length",
    "steps_warmup",
    "steps_total",
    "coverage_min",
    "iterations",
    "explained_variance_p10",
    "final_success_rate",
)
"""What a narrow terminal does without, in this order."""
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
    labels = {key: f"{key}=" if key in (*RESULTS, "run", "run_dir", "error") else key for key in differing}
    results = [key for key in RESULTS if key not in IF_ANY or _any_has(key, summaries)]
    columns = ["run", *labels.values(), *results]
    if any(summary.get("error") for summary in summaries):
        columns.append("error")
    names = _names(paths)
    rows = []
    for name, summary, chosen in zip(names, summaries, settings):
        row = {"run": name, **{label: chosen.get(key) for key, label in labels.items()}}
        row.update({key: summary.get(key) for key in columns if key not in row})
        rows.append(row)
    return columns, rows


def _any_has(key: str, summaries: Sequence[Dict[str, Any]]) -> bool:
    nothing = (None, 0) if key == "steps_warmup" else (None,)
    return any(summary.get(key) not in nothing for summary in summaries)


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
    replace_file(folder / "sweep.csv", iter([as_csv([*columns, "run_dir"], records)]))
    out = SafeStream(sys.stdout if stream is None else stream)
    console = rich_console(out)
    if not out.isatty() and os.environ.get("COLUMNS", "").isdigit():
        console.width = int(os.environ["COLUMNS"])
    _show(console, f"sweep {folder.resolve().name}: {_count(rows)}", columns, rows)
    seeds = {row.get("seed") for row in rows} - {None}
    if len(seeds) > 1:
        _show_arms(console, columns, rows)
    _say(console, f"written to {folder / 'sweep.csv'} and sweep.json", whole=True)
    out.flush()
    return rows


def as_csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _count(rows: Sequence[Row]) -> str:
    """
    >>> _count([{"status": "finished"}])
    '1 job'
    """
    others = Counter(row["status"] for row in rows if row["status"] != "finished")
    return ", ".join([f"{len(rows)} job{'s' * (len(rows) != 1)}", *(f"{n} {status}" for status, n in others.items())])


def _show(console: Any, title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """The jobs; below it what all have in common, what did not fit, and the errors."""
    same = [column for column in columns if column in RESULTS and len(rows) > 1 and _is_same(column, rows)]
    shown = [column for column in columns if column not in same and column != "error"]
    styles = [{"failed": "red", "interrupted": "yellow"}.get(row["status"], "") for row in rows]
    headers = _headers(shown)
    dropped = []
    for column in DROP_ORDER:
        if _width(console, _rich_table(title, shown, headers, rows, styles)) <= console.width:
            break
        if column in shown:
            shown.remove(column)
            dropped.append(RESULTS[column])
    _print_table(console, title, shown, headers, rows, styles)
    if same:
        _say(console, f"the same in all: {', '.join(_common(column, rows[0][column]) for column in same)}")
    if dropped:
        _say(console, f"not shown in {console.width} columns, but in sweep.csv: {', '.join(dropped)}")
    for row in rows:
        if row.get("error"):
            _say(console, f"{row['run']}: {format_cell('error', row['error'])}")


def _is_same(column: str, rows: Sequence[Row]) -> bool:
    """A result that tells the jobs apart in no way. The final return stays: it is what a sweep is for."""
    return column != "final_return" and all(row[column] == rows[0][column] for row in rows)


def _common(column: str, value: Any) -> str:
    if column == "status":
        return str(value)
    return f"no {RESULTS[column]}" if value is None else f"{RESULTS[column]} {format_cell(column, value)}"


def _show_arms(console: Any, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """The final return over the seeds, for every combination of the other swept settings."""
    from rl_stagger.evaluate import mean_interval

    settings = [column for column in columns if column not in (*RESULTS, "run", "error", "seed")]
    arms: Dict[Tuple[Any, ...], List[float]] = {}
    left_out = 0
    for row in rows:
        values = arms.setdefault(tuple(row[column] for column in settings), [])
        final_return = as_float(row["final_return"])
        if row["status"] == "finished" and math.isfinite(final_return):
            values.append(final_return)
        else:
            left_out += 1
    lines = []
    for arm, values in arms.items():
        if values:
            mean, low, high = mean_interval(values)
            interval = f"[{fixed(low, 2)}, {fixed(high, 2)}]" if len(values) > 1 else "-"
            lines.append({**dict(zip(settings, arm)), "n": len(values), "mean": fixed(mean, 2), "95 %": interval})
    if lines:
        shown = [*settings, "n", "mean", "95 %"]
        headers = {**_headers(settings), "n": "n", "mean": "mean", "95 %": "95 % interval"}
        console.print()
        _print_table(console, "final return over the seeds", shown, headers, lines, [""] * len(lines))
    if lines and left_out:
        _say(console, f"left out: {left_out} job{'s' * (left_out > 1)} without a final return or not finished")


def _headers(columns: Sequence[str]) -> Dict[str, str]:
    """Results by their names on the screen, settings by the last part of theirs where that is enough."""
    last = Counter(column.rpartition(".")[2] for column in columns)
    short = {column: column.rpartition(".")[2] for column in columns}
    return {column: RESULTS.get(column, short[column] if last[short[column]] == 1 else column) for column in columns}


def _print_table(console: Any, *content: Any) -> None:
    """Where it is too narrow for what must be shown, texts are cut and never numbers."""
    tables = (_rich_table(*content, text_width=width) for width in (None, *range(40, 2, -1)))
    table = next((table for table in tables if _width(console, table) <= console.width), None)
    console.print(table if table is not None else _rich_table(*content, text_width=3))


def _rich_table(
    title: str,
    columns: Sequence[str],
    headers: Dict[str, str],
    rows: Sequence[Row],
    styles: Sequence[str],
    text_width: Optional[int] = None,
) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    cells = {column: [format_cell(column, row[column]) for row in rows] for column in columns}
    for column in columns:
        right = column in NUMBERS
        # Names of results may take two lines, everything else one: a value in pieces is none.
        header = headers[column].replace(" ", "\n", 1) if column in RESULTS else headers[column]
        justify, most = ("right", None) if right else ("left", text_width)
        table.add_column(Text(header), justify=justify, no_wrap=True, overflow="ellipsis", max_width=most)
    for values, style in zip(zip(*cells.values()), styles):
        table.add_row(*map(Text, values), style=style)
    return table


def _width(console: Any, table: Any) -> int:
    """What the table would take where there is room enough."""
    return table.__rich_measure__(console, console.options.update(width=10_000)).maximum


def _say(console: Any, text: str, whole: bool = False) -> None:
    """A line of text; `whole`: unbroken, so that a path can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=whole)


NUMBERS = {*RESULTS, "n", "mean", "95 %"} - {"status"}
COUNTS = ("iterations", "steps_total", "steps_warmup")
SHARES = ("explained_variance_p10", "final_success_rate", "coverage_min")


def format_cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    number = as_float(value)
    if column not in RESULTS or column == "status" or math.isnan(number):
        return " ".join(str(value).split())
    if column == "wall_s":
        return duration(number)
    if column in COUNTS and math.isfinite(number):
        return f"{number:,.0f}"
    return fixed(number, 3 if column in SHARES else 2)


def fixed(number: float, digits: int) -> str:
    """
    >>> fixed(-0.0001, 2), fixed(-1234.567, 2)
    ('0.00', '-1,234.57')
    """
    text = f"{number:,.{digits}f}"
    return text.lstrip("-") if not text.strip("-0.") else text
