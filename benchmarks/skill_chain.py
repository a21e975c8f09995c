"""Synchronous against staggered resets on skill_chain, at equal samples: table, JSON and picture from our own runs.

    python benchmarks/skill_chain.py --seeds 5 --layouts 0 1 2 3 4 5 --jobs 2

Writes benchmarks/results/skill_chain.md and .json and docs/images/batches.png. About 20 s of one core a run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

import rl_stagger
from rl_stagger.evaluate import mean_interval
from rl_stagger.logging.curves import draw_comparison

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "batches.png"
ARMS = ("synchronous", "staggered")


def train(run_dir: Path, overrides: List[str]) -> Dict[str, Any]:
    """One run in a process of its own; its summary. A finished run in the folder is taken as it is."""
    summary = run_dir / "summary.json"
    if not summary.exists() or json.loads(summary.read_text(encoding="utf-8"))["status"] != "finished":
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), "task=skill_chain", f"run_dir={run_dir}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "logging.console=off", *overrides], check=True, env=environment, stdout=subprocess.DEVNULL
        )
    return json.loads(summary.read_text(encoding="utf-8"))


def interval_text(values: List[float], digits: int = 1) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--layouts", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5], help="one seed each, beside")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "benchmark_skill_chain")
    args = parser.parse_args()

    jobs: Dict[Tuple[str, str, int], Tuple[Path, List[str]]] = {}
    for arm in ARMS:
        for seed in range(args.seeds):
            jobs["seed", arm, seed] = (args.runs / f"{arm}_seed{seed}", [f"reset={arm}", f"seed={seed}"])
        for layout in args.layouts:
            where = args.runs / f"{arm}_layout{layout}"
            jobs["layout", arm, layout] = (where, [f"reset={arm}", "seed=0", f"task.settings.layout_seed={layout}"])
    with ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(jobs, pool.map(lambda job: train(*job), jobs.values())))

    final = {arm: [done["seed", arm, seed]["final_return"] for seed in range(args.seeds)] for arm in ARMS}
    trust = {arm: [done["seed", arm, seed]["explained_variance_p10"] for seed in range(args.seeds)] for arm in ARMS}
    one = done["seed", "staggered", 0]
    gain = sum(final["staggered"]) / sum(final["synchronous"]) - 1
    command = "python benchmarks/skill_chain.py " + " ".join(sys.argv[1:])
    lines = [
        "# skill_chain: synchronous against staggered resets",
        "",
        f"`{command}`, rl_stagger {rl_stagger.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, one thread a run.",
        "",
        f"N = {one['num_envs']}, K = {one['rollout_steps']}, H = {one['horizon_steps']}, {one['iterations']} "
        f"iterations, {one['steps_total']:,} env steps each; settings of `task=skill_chain` but `reset` and `seed`. "
        f"Warming up the staggered runs took {one['steps_warmup']:,} env steps besides "
        f"({100 * one['steps_warmup'] / one['steps_total']:.1f} %).",
        "",
        "Final return: mean over the episodes that ended in the last tenth of the iterations. Explained variance: 10th "
        "percentile over the last three quarters.",
        "",
        "| reset | " + " | ".join(f"seed {seed}" for seed in range(args.seeds)) + " | mean [95 % interval] |",
        "|---|" + "---:|" * (args.seeds + 1),
    ]
    for name, table, digits in (("final return", final, 1), ("explained variance", trust, 2)):
        for arm in ARMS:
            cells = " | ".join(f"{value:.{digits}f}" for value in table[arm])
            lines.append(f"| {arm}, {name} | {cells} | {interval_text(table[arm], digits)} |")
    lines += ["", f"Staggered over synchronous in mean final return: {100 * gain:+.0f} %.", ""]
    lines += ["Other layouts of the task (`task.settings.layout_seed`), one seed each; final return:", ""]
    lines += ["| reset | " + " | ".join(f"layout {layout}" for layout in args.layouts) + " |"]
    lines += ["|---|" + "---:|" * len(args.layouts)]
    for arm in ARMS:
        cells = " | ".join(f"{done['layout', arm, layout]['final_return']:.1f}" for layout in args.layouts)
        lines.append(f"| {arm} | {cells} |")
    lines += ["", "In layouts where both arms end low, a policy does best to park just outside a stage's right action."]

    RESULTS.mkdir(parents=True, exist_ok=True)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    (RESULTS / "skill_chain.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [{"kind": kind, "arm": arm, "number": number, **done[kind, arm, number]} for kind, arm, number in done]
    rows = [{key: value for key, value in row.items() if key != "run_dir"} for row in rows]
    (RESULTS / "skill_chain.json").write_text(json.dumps({"command": command, "runs": rows}, indent=1) + "\n")
    draw_comparison({arm: args.runs / f"{arm}_seed0" for arm in ARMS}, PICTURE, window=(1, 80))
    print("\n".join(lines))
    print(f"\nwritten: {RESULTS / 'skill_chain.md'}, {PICTURE}")


if __name__ == "__main__":
    main()
