"""Everything a run tells: the run directory, writers, console, summary, curves."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

from rl_stagger.config import Config, to_tree
from rl_stagger.envs.base import VecEnv
from rl_stagger.logging.console import make_console
from rl_stagger.logging.writers import JsonLinesWriter, TensorBoardWriter, WandbWriter, Writer
from rl_stagger.resets.nonstationarity import cyclic_metrics, cyclic_window
from rl_stagger.run_dir import locked, new_run_dir, read_metrics_lines, write_json, write_start
from rl_stagger.summary import episode_mean, summarize

SAME_LENGTH_WARNING_EPISODES = 100
SPREAD_LOST_COVERAGE = 0.8
RATIO_ERROR_WARNING = 1e-3


class Reporter:
    """Owns a run's directory while `learn` lasts. A context manager: what happens to the run ends in summary.json."""

    def __init__(
        self,
        config: Config,
        env: VecEnv,
        notes: List[str],
        total: int,
        home: Optional[Path],
        iteration: int,
    ) -> None:
        """`home`: the directory of the run that is continued, `iteration` how far it is."""
        self.config, self.env = config, env
        self.run_dir = self._open_dir(home, iteration)
        self._lock = ExitStack()
        self._lock.enter_context(locked(self.run_dir))
        write_start(self.run_dir, config, notes)
        written = read_metrics_lines(self.run_dir)
        self._lines = [line for line in written if line["iteration"] <= iteration]
        self._since_save: List[Dict[str, Any]] = []
        self._best = self._saved_best()
        title = f"{config.task.label or config.task.name} | {config.reset.name} | seed {config.seed} | {config.device}"
        self.console = make_console(config.logging.console, total, title)
        self.writers = self._open_writers(iteration)
        self._terminated: Dict[str, float] = {"count": 0, "truncated": 0, "min": float("inf"), "max": 0.0}
        self._said: Set[str] = set()
        if len(written) > len(self._lines):
            dropped = f"{self._lines[-1]['iteration'] + 1 if self._lines else 1} to {written[-1]['iteration']}"
            notes = [*notes, f"going back to iteration {iteration}: iterations {dropped} of this run are dropped"]
        for note in [*notes, f"run directory {self.run_dir}"]:
            self.message(note)

    def report(self, metrics: Dict[str, Any]) -> None:
        """One iteration's metrics, to everybody."""
        self._watch(metrics)
        self._lines.append(metrics)
        metrics.update(self._cyclic())
        self._since_save.append(metrics)
        for writer in self.writers:
            writer.write(int(metrics["steps/total"]), metrics)
        self.console.update(metrics)

    def message(self, text: str) -> None:
        self.console.message(text)

    def is_best(self) -> bool:
        """Whether the episodes since the last call had the best mean return so far."""
        score = episode_mean(self._since_save, "episode/return_mean")
        self._since_save = []
        if score is None or (self._best is not None and score <= self._best):
            return False
        self._best = score
        folder = self.run_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        write_json(folder / "best.json", {"return_mean": score})
        return True

    def finish(self, status: str, error: Optional[str] = None) -> Dict[str, Any]:
        """Write summary.json and curves.png; returns the summary."""
        horizon = self.env.spec.horizon_steps
        summary = {
            "status": status,
            "run_dir": str(self.run_dir),
            "task": self.config.task.label or self.config.task.name,
            "reset": self.config.reset.name,
            "seed": self.config.seed,
            "num_envs": self.config.num_envs,
            **summarize(self._lines, horizon, self.config.rollout_steps),
        }
        if error is not None:
            summary["error"] = error
        write_json(self.run_dir / "summary.json", summary)
        if self.config.logging.curves and self._lines:
            from rl_stagger.logging.curves import draw_curves

            draw_curves(self.run_dir)
        return summary

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        with self._lock as stack:
            for writer in self.writers:
                stack.callback(writer.close)
            stack.callback(self.console.close)
            if error is not None:
                status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                self.finish(status, f"{type(error).__name__}: {error}".rstrip(": "))

    # -- helpers -------------------------------------------------------------------------------------------------
    def _cyclic(self) -> Dict[str, Any]:
        """The cyclic indices of the iterations so far, from what was written down: nothing to save for a resume."""
        horizon, steps = self.env.spec.horizon_steps, self.config.rollout_steps
        return cyclic_metrics(self._lines[-cyclic_window(horizon, steps) :], horizon, steps) if horizon else {}

    def _open_dir(self, home: Optional[Path], iteration: int) -> Path:
        """A new folder; or the continued run's own, unless another was asked for, which gets the metrics so far."""
        if home is None:
            return new_run_dir(self.config)
        if self.config.run_dir is None or Path(self.config.run_dir).resolve() == home.resolve():
            return home
        path = new_run_dir(self.config)
        lines = [line for line in read_metrics_lines(home) if line["iteration"] <= iteration]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (path / "metrics.jsonl").write_text(text, encoding="utf-8")
        return path

    def _open_writers(self, iteration: int) -> List[Writer]:
        cfg = self.config.logging
        writers: List[Writer] = [JsonLinesWriter(self.run_dir / "metrics.jsonl", keep_until=iteration + 1)]
        if cfg.tensorboard:
            step = int(self._lines[-1]["steps/total"]) if self._lines else 0
            writers.append(
                TensorBoardWriter(self.run_dir, purge_step=step + 1 if iteration else None, history=self._lines)
            )
        if cfg.wandb:
            name, tree = self.run_dir.name, to_tree(self.config)
            writers.append(WandbWriter(cfg.wandb_project, name, tree, self.run_dir, history=self._lines))
        return writers

    def _saved_best(self) -> Optional[float]:
        try:
            return float(json.loads((self.run_dir / "checkpoints" / "best.json").read_text())["return_mean"])
        except (OSError, ValueError, KeyError):
            return None

    def _watch(self, metrics: Dict[str, Any]) -> None:
        """Say once each what a user would otherwise find out late."""
        at = f"iteration {metrics['iteration']}"
        coverage, reset = metrics.get("batch/coverage"), self.config.reset
        spread = reset.bring_up == "warmup" and reset.upkeep_in_force == "none" and reset.has_all_groups
        if spread and coverage is not None and coverage < SPREAD_LOST_COVERAGE:
            self._once(
                f"note: {at}: coverage of the horizon is down to {coverage:.2f}. Episodes that end early bring "
                "environments back together; reset=upkept spreads them again whenever that happens. See curves.png."
            )
        if metrics["policy/ratio_max_error"] > RATIO_ERROR_WARNING:
            self._once(
                f"warning: {at}: before any step the policy gives other probabilities than when it acted (ratio off by "
                f"{metrics['policy/ratio_max_error']:.2g}). Does the task write into tensors that it returned?"
            )
        if metrics["batch/valid_share"] == 0:
            self._once(
                f"warning: {at}: no valid transition in the batch, nothing was learned; every environment waits."
            )
        if metrics.pop("fault/past_horizon", 0):
            self._once(
                f"warning: {at}: episodes go on past the time limit that the task declares "
                f"(horizon_steps={self.env.spec.horizon_steps}). Does it mark truncations and reset?"
            )
        self._watch_time_limit(metrics)

    def _once(self, text: str) -> None:
        """One message of a kind a run; kinds differ in their last words."""
        kind = text[-30:]
        if kind not in self._said:
            self._said.add(kind)
            self.message(text)

    def _watch_time_limit(self, metrics: Dict[str, Any]) -> None:
        """Warn once when every termination came at one and the same length: most likely an unmarked time limit."""
        seen = self._terminated
        seen["count"] += metrics["episode/terminated_count"]
        seen["truncated"] += metrics["episode/truncated_count"]
        if metrics["episode/terminated_count"]:
            seen["min"] = min(seen["min"], metrics["episode/length_min"])
            seen["max"] = max(seen["max"], metrics["episode/length_max"])
        same = seen["min"] == seen["max"] > 1 and not seen["truncated"]
        if same and seen["count"] >= SAME_LENGTH_WARNING_EPISODES:
            self._once(
                f"warning: all {int(seen['count'])} episodes were terminated at length {int(seen['min'])}, none "
                "truncated. If that is the time limit, the task should mark it as truncated: its last states have a "
                "future value."
            )
