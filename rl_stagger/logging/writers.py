"""Where the metrics of an iteration go: JSON lines, TensorBoard, Weights & Biases, or several of them.

Metrics are host values: a number, None (no such event in this iteration) or a list of them (one per phase bin).
"""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    from typing_extensions import Protocol

from rl_stagger.errors import ConfigError
from rl_stagger.logging.heat_map import HeatMaps, as_float

PathLike = Union[str, Path]


class Writer(Protocol):
    """Told once an iteration."""

    def write(self, step: int, metrics: Dict[str, Any]) -> None:
        """`step`: environment steps so far; `metrics["iteration"]`: completed iterations, 1 after the first."""
        ...

    def close(self) -> None: ...


class Writers:
    """Tells several writers; none of them is a writer that does nothing."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self.writers: Tuple[Writer, ...] = tuple(writers)

    def write(self, step: int, metrics: Dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Closes every one, also when one of them fails; then raises the first failure."""
        failures: List[Exception] = []
        for writer in self.writers:
            try:
                writer.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


# -- JSON lines -----------------------------------------------------------------------------------------------------
class JsonLinesWriter:
    """One strict JSON object a line; each is with the operating system before `write` returns.

    `keep_until`, for a resume: the first iteration that will be written again. Lines from it on are dropped. What a
    kill left of a torn last line is dropped in any case.
    """

    def __init__(self, path: PathLike, keep_until: Optional[int] = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = (strict_json(x) for x in _objects(self.path) if keep_until is None or _iteration(x) < keep_until)
            replace_file(self.path, (f"{line}\n" for line in kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run is

    def write(self, step: int, metrics: Dict[str, Any]) -> None:
        line = strict_json({"iteration": metrics["iteration"], "steps/total": step, **metrics})
        self._file.write(f"{line}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: PathLike) -> List[Dict[str, Any]]:
    """The objects of a metrics.jsonl, also of one that is being written; [] where there is none.

    Torn lines are passed over. A line replaces all lines of the same or a later iteration before it.
    """
    lines: List[Dict[str, Any]] = []
    if not Path(path).exists():
        return lines
    for line in _objects(Path(path)):
        while lines and _iteration(line) <= _iteration(lines[-1]):
            lines.pop()
        lines.append(line)
    return lines


def _objects(path: Path) -> Iterator[Dict[str, Any]]:
    """The lines that are whole and have an iteration."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("iteration"), int):
                yield line


def _iteration(line: Dict[str, Any]) -> int:
    return line["iteration"]


def strict_json(value: Any, indent: Optional[int] = None) -> str:
    """JSON that every parser takes: NaN becomes null, infinities the text "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def replace_file(path: Path, chunks: Iterator[str]) -> None:
    """Write `path` so that a kill at any moment leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if temporary.exists():
            temporary.unlink()


# -- services -------------------------------------------------------------------------------------------------------
class TensorBoardWriter:
    """Event files over environment steps. Lists, one number per phase bin, become pictures (see HeatMaps), now and then
    and at the end; those whose name ends in "histogram" also histograms over [0, 1) of the horizon.

    `purge_step`, for a resume: events of an earlier life from this step on are hidden; `history`: its lines.
    """

    def __init__(
        self, log_dir: PathLike, purge_step: Optional[int] = None, history: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step, flush_secs=20)
        self._maps, self._step = HeatMaps(history), 0

    def write(self, step: int, metrics: Dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (list, tuple)):
                if name.endswith("histogram"):
                    self._write_histogram(name, [as_float(x) for x in value], step)
            elif not math.isnan(as_float(value)):
                self._writer.add_scalar(name, as_float(value), step)
        self._step = step
        self._maps.add(metrics)
        if self._maps.due():
            self._write_maps()

    def _write_maps(self) -> None:
        for name, image in self._maps.draw().items():
            self._writer.add_image(name, image, self._step, dataformats="HWC")

    def _write_histogram(self, name: str, values: List[float], step: int) -> None:
        shares, bins = _shares(values), len(values)
        filled = [i for i, share in enumerate(shares) if share > 0]
        if not filled:
            return
        centres = [(i + 0.5) / bins for i in range(bins)]
        self._writer.add_histogram_raw(
            name,
            # TensorBoard drops empty buckets at both ends and stretches the rest from min to max.
            min=filled[0] / bins,
            max=(filled[-1] + 1) / bins,
            num=sum(shares),
            sum=sum(share * x for share, x in zip(shares, centres)),
            sum_squares=sum(share * x * x for share, x in zip(shares, centres)),
            bucket_limits=[(i + 1) / bins for i in range(bins)],
            bucket_counts=shares,
            global_step=step,
        )

    def close(self) -> None:
        if self._maps.stale:
            self._write_maps()
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run; the same run again when a run directory is resumed. An extra.

    Lists become the same pictures as for TensorBoard, under their name with "_map".
    """

    def __init__(
        self,
        project: str,
        run_name: str,
        config: Mapping[str, Any],
        run_dir: PathLike,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("logging.wandb=true: wandb is not installed; pip install 'rl_stagger[wandb]'") from error
        id_file = Path(run_dir) / "wandb_run_id.txt"
        known = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else ""
        run_id = known or secrets.token_hex(4)
        self._wandb = wandb
        self._run = wandb.init(
            project=project, name=run_name, config=dict(config), dir=str(run_dir), id=run_id, resume="allow"
        )
        replace_file(id_file, iter([f"{run_id}\n"]))
        # A step axis of our own: wandb drops what is logged at a step of its own that is past, as after a resume.
        self._run.define_metric("steps/total")
        self._run.define_metric("*", step_metric="steps/total")
        self._maps = HeatMaps(history)

    def write(self, step: int, metrics: Dict[str, Any]) -> None:
        row: Dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, (list, tuple)):
                if name.endswith("histogram") and value:
                    edges = [i / len(value) for i in range(len(value) + 1)]
                    shares = _shares([as_float(x) for x in value])
                    row[name] = self._wandb.Histogram(np_histogram=(shares, edges))  # pyright: ignore[reportArgumentType]
            elif not math.isnan(as_float(value)):
                row[name] = value
        row["steps/total"] = step
        self._maps.add(metrics)
        if self._maps.due():
            row.update({f"{name}_map": self._wandb.Image(image) for name, image in self._maps.draw().items()})
        self._run.log(row)

    def close(self) -> None:
        self._run.finish()


def _shares(values: Sequence[float]) -> List[float]:
    return [value if math.isfinite(value) and value > 0 else 0.0 for value in values]
