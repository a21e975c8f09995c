"""Train a task on several seeds and say when each reached a threshold, and how the final policy does in evaluation.

    python benchmarks/solved.py --task cartpole_swingup --metric episode/success_rate --threshold 0.95 --seeds 3

Writes benchmarks/results/<task>.md. Further arguments are overrides for scripts/train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

import rl_stagger
from rl_stagger.run_dir import read_metrics_lines

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *overrides: str) -> None:
    """One of scripts/ in a process of its own, on one thread."""
    command = [sys.executable, str(ROOT / "scripts" / script), *overrides]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def steps_to(lines: List[Dict[str, Any]], metric: str, threshold: float, stay: int = 3) -> Optional[int]:
    """Env steps, warm-up included, at the first of `stay` iterations in a row at or above the threshold."""
    values = [
        (line["steps/total"] + line["steps/warmup"], line[metric]) for line in lines if line.get(metric) is not None
    ]
    for i in range(len(values) - stay + 1):
        if all(value >= threshold for _, value in values[i : i + stay]):
            return values[i][0]
    return None


def shown(part: Optional[Dict[str, float]], digits: int) -> str:
    return "-" if part is None else f"{part['mean']:.{digits}f} [{part['low']:.{digits}f}, {part['high']:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--metric", default="episode/return_mean")
    parser.add_argument("--threshold", type=float, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=256)
    args, overrides = parser.parse_known_args()

    name = args.task.replace("/", "_")
    rows: List[str] = []
    for seed in range(args.seeds):
        run_dir = ROOT / "runs" / f"benchmark_{name}" / f"seed{seed}"
        shutil.rmtree(run_dir, ignore_errors=True)
        run("train.py", f"task={args.task}", f"seed={seed}", f"run_dir={run_dir}", "logging.console=off", *overrides)
        run("evaluate.py", f"run={run_dir}", f"episodes={args.episodes}")
        lines = read_metrics_lines(run_dir)
        judged = json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))
        at = steps_to(lines, args.metric, args.threshold)
        total = lines[-1]["steps/total"] + lines[-1]["steps/warmup"]
        cells = [f"{seed}", "not reached" if at is None else f"{at:,}", f"{total:,}"]
        for kind in ("deterministic", "stochastic"):
            cells += [shown(judged[kind]["return"], 1), shown(judged[kind].get("success"), 3)]
        rows.append("| " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    text = [
        f"# {args.task}: solved?",
        "",
        f"`python benchmarks/solved.py {' '.join(sys.argv[1:])}`, rl_stagger {rl_stagger.__version__}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread.",
        "",
        f"Solved: `{args.metric}` at or above {args.threshold:g} in three iterations in a row. Env steps include the "
        f"warm-up. Evaluation: {args.episodes} first episodes of fresh environments, mean and 95 % interval.",
        "",
        "| seed | env steps to solved | in all | return, deterministic | success | return, stochastic | success |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]
    path = ROOT / "benchmarks" / "results" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
