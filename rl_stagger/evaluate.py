"""Judging a trained policy, apart from training: one first episode per environment, deterministic and stochastic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.checkpoint import run_dir_of
from rl_stagger.device import pick_device
from rl_stagger.envs.base import Obs, VecEnv
from rl_stagger.errors import ConfigError
from rl_stagger.policy import TrainedRun, load_run, trained_env
from rl_stagger.rng import make_generator, seed_everything
from rl_stagger.run_dir import write_json

PHASE_BINS = 10


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of an evaluation."""

    run: str
    """Run directory, or one of its checkpoints (e.g. checkpoints/best.pt)."""
    episodes: int = 256
    """Environments, of which exactly the first episode counts."""
    seed: int = 10_000
    """Of the evaluation's environments; other episodes than those of training."""
    device: Optional[str] = None
    """null: the run's."""
    max_steps: Optional[int] = None
    """Stop after so many steps; needed where the task has no time limit. Unfinished episodes are reported."""
    policy: str = "both"
    """both | deterministic | stochastic."""
    difficulty: Optional[Union[int, List[int], str]] = None
    """null: what the training had reached. A level, a list of levels or "all" of a task that has them: each apart."""

    def check(self) -> None:
        """Raise ConfigError for what cannot work."""
        if self.episodes < 2:
            raise ConfigError(f"episodes={self.episodes}: at least 2, an interval needs them")
        if self.policy not in ("both", "deterministic", "stochastic"):
            raise ConfigError(f"policy={self.policy}: both, deterministic or stochastic")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"max_steps={self.max_steps}: at least 1, or null")
        if isinstance(self.difficulty, str) and self.difficulty != "all":
            raise ConfigError(f"difficulty={self.difficulty!r}: a level (0 is the easiest), a list of them, or all")
        if self.difficulty == []:
            raise ConfigError("difficulty=[]: at least one level, or null")

    def levels(self, count: int) -> List[int]:
        """The levels asked for, of a task with `count` of them. Raises ConfigError for one that there is not."""
        asked = list(range(count)) if self.difficulty == "all" else self.difficulty
        levels = asked if isinstance(asked, list) else [asked]
        for level in levels if levels else ["all"]:
            if not isinstance(level, int) or not 0 <= level < count:
                has = f"levels 0 to {count - 1}" if count else "no levels of difficulty"
                raise ConfigError(f"difficulty={level}: this task has {has}")
        return [int(level) for level in levels if level is not None]

    @staticmethod
    def usage() -> str:
        return (
            "usage: rl-stagger evaluate run=<run directory or checkpoint> [episodes=256] [policy=both|deterministic|"
            "stochastic]\n       [seed=10000] [device=cpu] [max_steps=N] [difficulty=all or 3 or '[0,5,9]']\n"
        )


class Episodes(NamedTuple):
    """The first episode of each environment. [N] each, on the CPU."""

    returns: Tensor
    lengths: Tensor
    success: Optional[Tensor]
    finished: Tensor
    phase_reward: Tensor
    """[bins] mean reward per step by phase of the episode, in parts of the time limit (of max_steps without one)."""
    phase_share: Tensor
    """[bins] share of episodes that were still running there."""


@torch.no_grad()
def first_episodes(env: VecEnv, act: Callable[[Obs], Tensor], max_steps: Optional[int] = None) -> Episodes:
    """Run `act` until every environment has ended its first episode; what comes after it does not count.

    Raises ConfigError for a task without time limit when `max_steps` is not given.
    """
    limit = max_steps or env.spec.horizon_steps
    if limit is None:
        raise ConfigError("max_steps=null: this task has no time limit; give one")
    span = env.spec.horizon_steps or limit
    obs = env.reset()
    device = env.device
    returns = torch.zeros(env.num_envs, dtype=torch.float64, device=device)
    lengths = torch.zeros(env.num_envs, dtype=torch.int64, device=device)
    success = torch.zeros(env.num_envs, dtype=torch.bool, device=device)
    running = torch.ones(env.num_envs, dtype=torch.bool, device=device)
    reward_sum = torch.zeros(PHASE_BINS, dtype=torch.float64, device=device)
    step_count, reached = torch.zeros_like(reward_sum), torch.zeros_like(reward_sum)
    knows_success = False
    for t in range(limit):
        step = env.step(act(obs))
        obs = step.obs
        counted = running & step.valid
        reward = torch.where(counted, step.reward, 0.0).to(torch.float64)
        returns += reward
        lengths += counted
        place = min(t * PHASE_BINS // span, PHASE_BINS - 1)
        reward_sum[place] += reward.sum()
        step_count[place] += counted.sum()
        if t == 0 or place != min((t - 1) * PHASE_BINS // span, PHASE_BINS - 1):
            reached[place] = counted.sum()
        ended = counted & step.done
        if "success" in step.info:
            knows_success = True
            success = torch.where(ended, step.info["success"], success)
        running = running & ~ended
        if t % 32 == 31 and not bool(running.any()):
            break
    return Episodes(
        returns.cpu(),
        lengths.cpu(),
        success.cpu() if knows_success else None,
        (~running).cpu(),
        (reward_sum / step_count.clamp(min=1)).cpu(),
        (reached / env.num_envs).cpu(),
    )


# -- intervals ------------------------------------------------------------------------------------------------------
def mean_interval(values: List[float], level: float = 0.95) -> Tuple[float, float, float]:
    """(mean, low, high): Student's t interval for the mean of independent values."""
    from scipy import stats

    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, float("nan"), float("nan")
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.5 + level / 2, n - 1)) * error
    return mean, mean - half, mean + half


def share_interval(hits: int, n: int, level: float = 0.95) -> Tuple[float, float, float]:
    """(share, low, high): Wilson's interval (1927) for a share; never leaves [0, 1]."""
    from scipy import stats

    z = float(stats.norm.ppf(0.5 + level / 2))
    share = hits / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return share, max(0.0, center - half), min(1.0, center + half)


def describe_episodes(episodes: Episodes, horizon_steps: Optional[int]) -> Dict[str, Any]:
    """Plain numbers for JSON: means with 95 % intervals over the finished episodes."""
    report = _describe(episodes, horizon_steps)
    report["phase"] = [
        {"from": i / PHASE_BINS, "reward_per_step": reward, "running_share": share}
        for i, (reward, share) in enumerate(zip(episodes.phase_reward.tolist(), episodes.phase_share.tolist()))
    ]
    return report


def describe_cases(
    episodes: Episodes, cases: Dict[str, Tensor], horizon_steps: Optional[int]
) -> Dict[str, Dict[str, Any]]:
    """Case -> the same numbers (without phases) of its episodes. `cases`: name -> [N] bool; empty ones are left out."""
    report = {}
    for name, mask in cases.items():
        rows = mask.cpu()
        if bool(rows.any()):
            success = None if episodes.success is None else episodes.success[rows]
            part = episodes._replace(
                returns=episodes.returns[rows],
                lengths=episodes.lengths[rows],
                success=success,
                finished=episodes.finished[rows],
            )
            report[name] = _describe(part, horizon_steps)
    return report


def _describe(episodes: Episodes, horizon_steps: Optional[int]) -> Dict[str, Any]:
    done = episodes.finished
    count = int(done.sum())
    report: Dict[str, Any] = {"episodes": count, "unfinished": int((~done).sum()), "horizon_steps": horizon_steps}
    for name, values in (("return", episodes.returns), ("length", episodes.lengths)):
        kept = values[done].tolist()
        mean, low, high = mean_interval(kept) if kept else (None, None, None)
        if count < 2:
            low = high = None  # JSON has no NaN
        report[name] = {"mean": mean, "low": low, "high": high}
    if episodes.success is not None and count:
        share, low, high = share_interval(int(episodes.success[done].sum()), count)
        report["success"] = {"mean": share, "low": low, "high": high}
    return report


# -- a run ----------------------------------------------------------------------------------------------------------
def evaluate_run(config: EvaluateConfig) -> Dict[str, Any]:
    """Evaluate a run's policy; prints a table, writes evaluation.json into the run directory, returns its content."""
    config.check()
    trained = load_run(config.run, key="run")
    checkpoint, run = trained.checkpoint, trained.config
    device = pick_device(config.device or run.device)
    report: Dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "iteration": trained.state["iteration"],
        "task": run.task.label or run.task.name,
        "seed": config.seed,
    }
    kinds = ("deterministic", "stochastic") if config.policy == "both" else (config.policy,)
    for kind in kinds:
        report[kind] = _evaluate_policy(kind, trained, device, config)
    write_json(run_dir_of(checkpoint) / "evaluation.json", report)
    _print_report(report, kinds, run_dir_of(checkpoint) / "evaluation.json")
    return report


def _evaluate_policy(kind: str, trained: TrainedRun, device: str, config: EvaluateConfig) -> Dict[str, Any]:
    """A fresh environment and the saved policy; curricula frozen, no staggering.

    The numbers of its episodes, and "cases" of them where the task tells some apart; where levels were asked for,
    "difficulties" with those of each.
    """
    seed_everything(config.seed)
    torch.set_num_threads(trained.config.threads)
    env, model = trained_env(trained, config.episodes, device, config.seed)
    try:
        generator = make_generator(env.device, config.seed)

        def sample(obs: Obs) -> Tensor:
            return model.act(obs, generator).env_action

        act = model.act_mode if kind == "deterministic" else sample

        def judge() -> Dict[str, Any]:
            episodes, horizon_steps = first_episodes(env, act, config.max_steps), env.spec.horizon_steps
            cases = describe_cases(episodes, env.evaluation_cases(), horizon_steps)
            return {**describe_episodes(episodes, horizon_steps), **({"cases": cases} if cases else {})}

        if config.difficulty is None:
            return judge()
        judged = []
        for level in config.levels(env.difficulty_levels):
            env.set_difficulty(level)
            judged.append({"difficulty": level, **judge()})
        return {"difficulties": judged}
    finally:
        env.close()


def _print_report(report: Dict[str, Any], kinds: Tuple[str, ...], path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['task']}, iteration {report['iteration']}: mean [95 % interval]")
    levels = [(kind, part) for kind in kinds for part in report[kind].get("difficulties", [report[kind]])]
    leading = ["policy"]
    leading += ["difficulty"] if "difficulty" in levels[0][1] else []
    leading += ["case"] if "cases" in levels[0][1] else []
    for column in (*leading, "episodes", "return", "length", "success"):
        table.add_column(column, justify="left" if column in leading else "right")
    for kind, level in levels:
        for case, part in (("all", level), *level.get("cases", {}).items()):
            cells = {"policy": kind, "difficulty": str(level.get("difficulty")), "case": case}
            shown = [_shown(part.get(name), digits) for name, digits in (("return", 2), ("length", 1), ("success", 3))]
            unfinished = f" (+{part['unfinished']} unfinished)" if part["unfinished"] else ""
            table.add_row(*(cells[name] for name in leading), f"{part['episodes']}{unfinished}", *shown)
    console = Console()
    console.print(table)
    if "phase" in report[kinds[0]]:
        console.print(_phase_table(report, kinds))
    print(f"written to {path}")


def _phase_table(report: Dict[str, Any], kinds: Tuple[str, ...]) -> Any:
    from rich.table import Table

    phases = Table(title="mean reward per step by phase")
    phases.add_column("phase", justify="right")
    for kind in kinds:
        phases.add_column(kind, justify="right")
    for index in range(PHASE_BINS):
        parts = [report[kind]["phase"][index] for kind in kinds]
        cells = [f"{part['reward_per_step']:.3g}" if part["running_share"] else "-" for part in parts]
        phases.add_row(f"{100 * index // PHASE_BINS}-{100 * (index + 1) // PHASE_BINS} %", *cells)
    return phases


def _shown(value: Optional[Dict[str, Any]], digits: int) -> str:
    if value is None or value["mean"] is None:
        return "-"
    if value["low"] is None:
        return f"{value['mean']:.{digits}f}"
    return f"{value['mean']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
