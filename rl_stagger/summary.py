"""The few numbers that stand for a run, from its metrics.jsonl alone."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from rl_stagger.resets.nonstationarity import cyclic_metrics


def summarize(lines: Sequence[Dict[str, Any]], horizon_steps: Optional[int], rollout_steps: int) -> Dict[str, Any]:
    """Summary of a run's metrics lines.

    `final_*` are means over the episodes that ended in the last tenth of the iterations, at least one horizon long
    (synchronous resets end episodes only once per horizon). `explained_variance_p10`: 10th percentile over the last
    three quarters of the iterations; `cyclic_*`, `swing_*`: cyclic indices of the reward and of the critic's error, and
    how large their cycles are, over the same.
    """
    if not lines:
        return {"iterations": 0}
    last = lines[-1]
    horizon_iters = -(-horizon_steps // rollout_steps) if horizon_steps else 1
    window = lines[-max(len(lines) // 10, horizon_iters, 1) :]
    trained = lines[len(lines) // 4 :]
    cyclic = cyclic_metrics(trained, horizon_steps, rollout_steps)
    returns, distances = _there(lines, "episode/return_mean"), _there(lines, "batch/tv_distance")
    forgotten = _there(lines, "batch/forgetting_events")
    return {
        "iterations": last["iteration"],
        "steps_total": last["steps/total"],
        "steps_warmup": last["steps/warmup"],
        "wall_s": last["time/wall_s"],
        "final_return": episode_mean(window, "episode/return_mean"),
        "final_length": episode_mean(window, "episode/length_mean"),
        "final_success_rate": episode_mean(window, "episode/success_rate"),
        "final_episodes": sum(line["episode/count"] for line in window),
        "final_iterations": [window[0]["iteration"], last["iteration"]],
        "best_return": max(returns, default=None),
        "explained_variance_p10": percentile(_there(trained, "critic/explained_variance"), 0.1),
        "coverage_min": min(_there(lines, "batch/coverage"), default=None),
        "tv_mean": sum(distances) / len(distances) if distances else None,
        "cyclic_reward": cyclic.get("batch/cyclic_reward"),
        "cyclic_error": cyclic.get("critic/cyclic_error"),
        "swing_reward": cyclic.get("batch/swing_reward"),
        "swing_error": cyclic.get("critic/swing_error"),
        "forgetting_total": sum(forgotten) if forgotten else None,
        "resets_max": max(_there(lines, "resets/per_step_max"), default=None),
        "steps_per_s": last["steps/total"] / last["time/wall_s"] if last["time/wall_s"] else None,
        "horizon_steps": horizon_steps,
        "rollout_steps": rollout_steps,
    }


def episode_mean(lines: Sequence[Dict[str, Any]], name: str) -> Optional[float]:
    """Mean of a per-episode metric over all episodes of these iterations; None if none ended."""
    pairs = [(line[name], line["episode/count"]) for line in lines if line.get(name) is not None]
    count = sum(n for _, n in pairs)
    return sum(x * n for x, n in pairs) / count if count else None


def percentile(values: Sequence[float], share: float) -> Optional[float]:
    """Linear interpolation between order statistics; None of nothing.

    >>> percentile([1.0, 2.0, 3.0], 0.25)
    1.5
    """
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _there(lines: Sequence[Dict[str, Any]], name: str) -> List[float]:
    """A metric's values where there are any."""
    return [line[name] for line in lines if line.get(name) is not None]
