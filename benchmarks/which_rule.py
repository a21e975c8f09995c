"""Every reset rule on skill_chain, over how much the task needs it: gating, reset noise, H/K. The table of
docs/which_rule.md.

    python benchmarks/which_rule.py --seeds 5 --jobs 2

Writes benchmarks/results/which_rule.md and .json and docs/images/rules.png. About 15 s of one core a run; finished runs
are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from skill_chain import RESULTS, ROOT, interval_text, train

import rl_stagger
from rl_stagger.logging.curves import draw_comparison
from rl_stagger.logging.writers import read_json_lines

RULES: Dict[str, List[str]] = {
    "synchronous": ["reset=synchronous"],
    "random clock": ["reset=random_clock"],
    "clock": ["reset=staggered", "reset.bring_up=clock"],
    "warmup": ["reset=staggered"],
    "block": ["reset=staggered_block"],
    "mixed": ["reset=mixed"],
    "snapshot": ["reset=snapshot"],
    "late density": ["reset=density", "reset.density=1 + 3 * u"],
    "early density": ["reset=density", "reset.density=4 - 3 * u"],
    "adaptive": ["reset=adaptive"],
    "curriculum": ["reset=staggered", "reset.horizon_share_schedule=[[0,0.25],[{a},0.5],[{b},1.0]]"],
}
STEPS = 3000
"""Env steps an environment takes in every cell: 300 rollouts of 10."""
CELLS: Dict[str, Dict[str, Any]] = {
    "base": {},
    "gating 0.5": {"task.settings.gating": 0.5},
    "gating 0": {"task.settings.gating": 0.0},
    "reset noise 0.5": {"task.settings.reset_noise": 0.5},
    "reset noise 1": {"task.settings.reset_noise": 1.0},
    "H/K = 5": {"rollout_steps": 40},
    "H/K = 2": {"rollout_steps": 100},
}
"""What differs from the base: gating 1, reset noise 0, H/K = 20 (H = 200, K = 10)."""
FIRST_CELL_ONLY = ("clock", "block", "mixed", "snapshot", "early density", "curriculum")
PICTURED = ("synchronous", "random clock", "snapshot", "late density")
REACHED = 120.0


def overrides_of(rule: str, cell: str, seed: int, num_envs: int) -> List[str]:
    settings = CELLS[cell]
    iterations = STEPS // settings.get("rollout_steps", 10)
    scheduled = [text.format(a=iterations // 6, b=iterations // 3) for text in RULES[rule]]
    sizes = [f"seed={seed}", f"num_envs={num_envs}", f"iterations={iterations}", "logging.tensorboard=false"]
    return [*scheduled, *sizes, "logging.curves=false", *(f"{key}={value}" for key, value in settings.items())]


def learning_curve(run_dir: Path) -> Tuple[Optional[float], float]:
    """(env steps until an iteration's mean return first reached REACHED, mean return over all training, 0 before the
    first episode has ended)."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    last, total, reached = 0.0, 0.0, None
    for line in lines:
        last = line["episode/return_mean"] if line["episode/return_mean"] is not None else last
        total += last
        if reached is None and last >= REACHED:
            reached = line["steps/total"]
    return reached, total / len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "benchmark_which_rule")
    args = parser.parse_args()

    keys = [
        (cell, rule, seed)
        for cell in args.cells
        for rule in args.rules
        for seed in range(args.seeds)
        if cell == args.cells[0] or rule not in FIRST_CELL_ONLY
    ]
    jobs = {key: overrides_of(key[1], key[0], key[2], args.num_envs) for key in keys}
    folders = {key: args.runs / re.sub(r"[^\w.]+", "_", f"{key[0]}_{key[1]}_seed{key[2]}") for key in jobs}
    with ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(jobs, pool.map(lambda key: train(folders[key], jobs[key]), jobs)))

    command = "python benchmarks/which_rule.py " + " ".join(sys.argv[1:])
    rows: List[Dict[str, Any]] = []
    for key, summary in done.items():
        reached, area = learning_curve(folders[key])
        kept = {name: value for name, value in summary.items() if name != "run_dir"}
        rows.append({"cell": key[0], "rule": key[1], "seed": key[2], "steps_to_reach": reached, "area": area, **kept})
    one = rows[0]
    lines = [
        "# Every reset rule on skill_chain",
        "",
        f"`{command}`, rl_stagger {rl_stagger.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, one thread a run.",
        "",
        f"N = {args.num_envs}, H = 200, {one['steps_total']:,} env steps of training a run (warm-ups come on top "
        "and are listed last); settings of `task=skill_chain` otherwise. Mean over seeds [95 % t interval].",
    ]
    tables = (
        ("Final return: full episodes that ended in the last tenth of the iterations", "final_return"),
        ("Mean return over the whole training, 0 before the first full episode has ended", "area"),
    )
    for title, name in tables:
        lines += [
            "",
            f"## {title}",
            "",
            "| rule | " + " | ".join(args.cells) + " |",
            "|---|" + "---:|" * len(args.cells),
        ]
        for rule in args.rules:
            cells = [[r[name] for r in rows if (r["cell"], r["rule"]) == (cell, rule)] for cell in args.cells]
            lines.append(f"| {rule} | " + " | ".join(interval_text(x) if x else "-" for x in cells) + " |")
    first = args.cells[0]
    lines += ["", f"## Every seed, {first}", ""]
    heads = (
        "rule",
        "final returns",
        f"thousand env steps until a mean return of {REACHED:g}",
        "10th percentile of the critic's explained variance",
        "largest share reset in a step",
        "warm-up, env steps",
    )
    lines += ["| " + " | ".join(heads) + " |", "|---|---|---|---|---:|---:|"]
    for rule in args.rules:
        own = [r for r in rows if (r["cell"], r["rule"]) == (first, rule)]
        reached = ["never" if r["steps_to_reach"] is None else f"{r['steps_to_reach'] / 1000:.0f}" for r in own]
        cells = [
            " ".join(f"{r['final_return']:.1f}" for r in own),
            " ".join(reached),
            " ".join(f"{r['explained_variance_p10']:.2f}" for r in own),
            f"{100 * max(r['resets_max'] for r in own) / args.num_envs:.0f} %",
            f"{own[0]['steps_warmup']:,}",
        ]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "which_rule.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (RESULTS / "which_rule.json").write_text(json.dumps({"command": command, "runs": rows}, indent=1) + "\n")
    pictured = {rule: folders[first, rule, 0] for rule in PICTURED if (first, rule, 0) in folders}
    draw_comparison(pictured, ROOT / "docs" / "images" / "rules.png", window=(1, min(80, one["iterations"])))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
