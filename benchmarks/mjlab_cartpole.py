"""mjlab's cart-pole balance: our trainer beside the rsl_rl trainer that mjlab ships, same nets, settings and samples.

    python benchmarks/mjlab_cartpole.py --seeds 3 --iterations 100 --num-envs 256

Arms: `rsl_rl` as shipped (episode clocks drawn at random at start, V(s_t) at time limits); ours with the same start
(`reset=random_clock`) and with `reset=staggered`, its warm-up counted as samples and, once more, apart. Writes
benchmarks/results/mjlab_cartpole.md, .json and .png. Needs the extra mjlab; about 3 minutes of one core a run.
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
from typing import Any, Dict, List, Optional, Tuple

from rl_stagger.evaluate import mean_interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ("rsl_rl", "ours random_clock", "ours staggered")
APART = "ours staggered, warm-up apart"
ARMS = (*RUNS, APART)
COLOURS = {RUNS[0]: "#666666", RUNS[1]: "#0072B2", RUNS[2]: "#D55E00", APART: "#E69F00"}
SOLVED = 45.0
"""Of at most 50: the return of an episode whose pole stands nearly still in the middle for nine tenths of it."""


def run_arm(arm: str, seed: int, args: argparse.Namespace) -> List[Dict[str, Any]]:
    """Metrics lines of one run, in a process of its own; a finished run is read again."""
    folder = args.runs / f"{arm.replace(' ', '_')}_seed{seed}"
    lines_file, finished = folder / "metrics.jsonl", folder / "finished"
    if not finished.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        sizes = [args.iterations, args.num_envs]
        if arm == "rsl_rl":
            command = [str(ROOT / "benchmarks" / "mjlab_rsl_rl.py"), "--iterations", str(sizes[0]), "--num-envs"]
            command += [str(sizes[1]), "--seed", str(seed), "--out", str(lines_file)]
        else:
            command = [str(ROOT / "scripts" / "train.py"), "task=mjlab/cartpole_balance", f"reset={arm.split()[1]}"]
            command += [f"iterations={sizes[0]}", f"num_envs={sizes[1]}", f"seed={seed}", f"run_dir={folder}"]
            command += ["logging.console=off", "logging.tensorboard=false", "checkpoint.every_iters=0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *command], check=True, env=environment, stdout=subprocess.DEVNULL)
        finished.touch()
    return [json.loads(line) for line in lines_file.read_text(encoding="utf-8").splitlines()]


def curve(lines: List[Dict[str, Any]], horizon_iters: int, warmup: bool) -> List[Tuple[int, float]]:
    """(env steps, warm-up counted or not, mean return of the full episodes of the last `horizon_iters` iterations)."""
    points = []
    for i, line in enumerate(lines):
        window = [x for x in lines[max(0, i - horizon_iters + 1) : i + 1] if x["episode/count"]]
        count = sum(x["episode/count"] for x in window)
        if count:
            mean = sum(x["episode/count"] * x["episode/return_mean"] for x in window) / count
            points.append((line["steps/total"] + (line.get("steps/warmup", 0) if warmup else 0), mean))
    return points


def value_at(points: List[Tuple[int, float]], steps: int) -> Optional[float]:
    """The last value of a curve at or before `steps`."""
    before = [value for at, value in points if at <= steps]
    return before[-1] if before else None


def interval_text(values: List[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def draw(curves: Dict[Tuple[str, int], List[Tuple[int, float]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (arm, seed), points in curves.items():
        steps = [at / 1e6 for at, _ in points]
        axes.plot(steps, [x for _, x in points], color=COLOURS[arm], lw=1.4, label=arm if seed == 1 else None)
    axes.axhline(SOLVED, color="black", lw=0.8, ls=":")
    axes.set_xlabel("env steps (millions)")
    axes.set_ylabel("return of full episodes")
    axes.set_title("mjlab/cartpole_balance, same nets and settings, every seed")
    axes.legend(frameon=False)
    figure.savefig(str(path), dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "benchmark_mjlab_cartpole")
    args = parser.parse_args()

    horizon_iters = -(-1000 // 32)
    curves: Dict[Tuple[str, int], List[Tuple[int, float]]] = {}
    for seed in range(1, args.seeds + 1):
        lines = {arm: run_arm(arm, seed, args) for arm in RUNS}
        for arm in RUNS:
            curves[arm, seed] = curve(lines[arm], horizon_iters, warmup=True)
        curves[APART, seed] = curve(lines["ours staggered"], horizon_iters, warmup=False)
        print(f"seed {seed}: " + ", ".join(f"{arm} {curves[arm, seed][-1][1]:.2f}" for arm in RUNS), flush=True)
    total = args.iterations * args.num_envs * 32
    marks = [total * part // 10 for part in (4, 5, 6, 7, 8, 9, 10)]
    command = "python benchmarks/mjlab_cartpole.py " + " ".join(sys.argv[1:])
    page = [
        "# mjlab/cartpole_balance: our trainer beside mjlab's own rsl_rl trainer",
        "",
        f"`{command}`, Python {platform.python_version()}, {platform.machine()}; N = {args.num_envs}, K = 32, "
        "H = 1000, nets 2 x 64 ELU, 5 epochs x 4 minibatches, KL-adaptive rate per minibatch (rsl_rl's rule), clipped "
        "value loss, entropy 0.01. The warm-up of `staggered` is counted as samples, or apart where it says so.",
        "",
        "Mean return of the full episodes of the last horizon, over seeds, at equal samples, with its 95 % interval:",
        "",
        "| arm | " + " | ".join(f"{mark / 1e6:.2f}M" for mark in marks) + " |",
        "|---|" + "---:|" * len(marks),
    ]
    for arm in ARMS:
        cells = []
        for mark in marks:
            values = [value_at(curves[arm, seed], mark) for seed in range(1, args.seeds + 1)]
            known = [value for value in values if value is not None]
            cells.append(interval_text(known) if len(known) == args.seeds else "-")
        page.append(f"| {arm} | " + " | ".join(cells) + " |")
    page += ["", f"Every seed, at {total / 1e6:.2f}M and at {marks[2] / 1e6:.2f}M env steps:", ""]
    for arm in ARMS:
        for mark in (total, marks[2]):
            values = [value_at(curves[arm, seed], mark) for seed in range(1, args.seeds + 1)]
            shown = ", ".join("-" if value is None else f"{value:.1f}" for value in values)
            page.append(f"- {arm}, {mark / 1e6:.2f}M: {shown}")
    page += ["", f"Solved (return {SOLVED:.0f} of at most 50), env steps by seed:", ""]
    for arm in ARMS:
        first = [next((at for at, x in curves[arm, s] if x >= SOLVED), None) for s in range(1, args.seeds + 1)]
        page.append(f"- {arm}: " + ", ".join("not reached" if at is None else f"{at:,}" for at in first))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "mjlab_cartpole.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    saved = [{"arm": arm, "seed": seed, "curve": points} for (arm, seed), points in curves.items()]
    (RESULTS / "mjlab_cartpole.json").write_text(json.dumps({"command": command, "runs": saved}) + "\n")
    draw(curves, RESULTS / "mjlab_cartpole.png")
    print("\n".join(page))


if __name__ == "__main__":
    main()
