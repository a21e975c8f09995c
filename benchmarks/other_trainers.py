"""Other people's trainers on skill_chain, as they are and with `stagger(...)` around the environment, at equal samples.

    .venv-integrations/bin/python benchmarks/other_trainers.py --seeds 3

Arms: rsl_rl's runner plain, with its own random start (`init_at_random_ep_len=True`), and staggered, with its adaptive
rate and with a fixed one; SB3's PPO plain and staggered. Writes benchmarks/results/other_trainers.md and .json. Needs
the extra `integrations`; about a minute of one core a run.

Returns are summed here, in front of the trainer, in the same way for all arms: the plain sum of an episode's rewards,
of episodes that the trainer saw from their first step to their last; those that a random clock shortened, or that a
warm-up began, do not count.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, List

import torch

import rl_stagger as rs
from rl_stagger.evaluate import mean_interval
from rl_stagger.integrations import as_rsl_rl, as_sb3, stagger

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRAINERS = {"rsl_rl": "rsl_rl, adaptive rate", "rsl_rl-fixed": "rsl_rl, fixed rate", "sb3": "SB3"}
ARMS = (
    "rsl_rl plain",
    "rsl_rl random clock",
    "rsl_rl staggered",
    "rsl_rl-fixed plain",
    "rsl_rl-fixed random clock",
    "rsl_rl-fixed staggered",
    "sb3 plain",
    "sb3 staggered",
)
ROLLOUT_STEPS, HIDDEN, LEARNING_RATE = 10, [64, 64], 1e-3


class Recorder:
    """Sums up episodes in front of a trainer, and coverage rollout by rollout where the environment measures it."""

    def __init__(self, view: Any) -> None:
        self.view, self._step = view, view.view_step
        self.sums = torch.zeros(view.num_envs, dtype=torch.float64)
        self.steps = 0
        self.ended: List[List[float]] = [[]]
        """Per iteration, the returns of the full episodes that ended in it."""
        self.coverage: List[float] = []
        view.view_step = self.step

    def step(self, action: Any) -> Any:
        step = self._step(action)
        self.sums += step.reward
        self.ended[-1] += self.sums[step.info["full"]].tolist()
        self.sums[step.done] = 0.0
        self.steps += 1
        if self.steps % ROLLOUT_STEPS == 0:
            self.ended.append([])
            if self.view.stagger is not None:
                self.coverage.append(self.view.measures()["batch/coverage"])
        return step

    def result(self) -> Dict[str, Any]:
        """Final return: mean over the episodes that ended in the last tenth of the iterations."""
        iterations = self.steps // ROLLOUT_STEPS
        last = [value for row in self.ended[iterations - max(1, iterations // 10) : iterations] for value in row]
        curve = [sum(row) / len(row) if row else None for row in self.ended[:iterations]]
        rule = self.view.stagger
        return {
            "iterations": iterations,
            "steps_total": self.steps * self.view.num_envs,
            "steps_warmup": rule.warmup_steps if rule is not None else 0,
            "final_return": sum(last) / len(last) if last else None,
            "final_episodes": len(last),
            "coverage_min": min(self.coverage) if self.coverage else None,
            "return_by_iteration": curve,
        }


def run_rsl_rl(env: Any, iterations: int, schedule: str, random_clock: bool) -> None:
    from rsl_rl.runners import OnPolicyRunner

    model = {
        "class_name": "rsl_rl.models.MLPModel",
        "hidden_dims": HIDDEN,
        "activation": "tanh",
        "obs_normalization": True,
    }
    cfg = {
        "num_steps_per_env": ROLLOUT_STEPS,
        "save_interval": iterations,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**model, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0}},
        "critic": dict(model),
        "algorithm": {
            "class_name": "rsl_rl.algorithms.PPO",
            "num_learning_epochs": 4,
            "num_mini_batches": 4,
            "learning_rate": LEARNING_RATE,
            "schedule": schedule,
            "desired_kl": 0.01,
            "gamma": 0.99,
            "lam": 0.95,
            "entropy_coef": 0.0,
            "clip_param": 0.2,
            "max_grad_norm": 1.0,
        },
    }
    OnPolicyRunner(env, cfg).learn(iterations, init_at_random_ep_len=random_clock)


def run_sb3(env: Any, iterations: int, seed: int) -> None:
    from stable_baselines3 import PPO

    batch = ROLLOUT_STEPS * env.num_envs
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=LEARNING_RATE,
        n_steps=ROLLOUT_STEPS,
        batch_size=batch // 4,
        n_epochs=4,
        gamma=0.99,
        gae_lambda=0.95,
        policy_kwargs={"net_arch": HIDDEN},
        seed=seed,
        device="cpu",
    )
    model.learn(iterations * batch)


def work(arm: str, seed: int, iterations: int, num_envs: int) -> Dict[str, Any]:
    """One run in this process."""
    torch.manual_seed(seed)
    trainer, kind = arm.split(" ", 1)
    env = (as_sb3 if trainer == "sb3" else as_rsl_rl)(rs.make_env("skill_chain", num_envs=num_envs, seed=seed))
    if kind == "staggered":
        env = stagger(env, rollout_steps=ROLLOUT_STEPS, seed=seed)
    recorder, start_s = Recorder(env), time.perf_counter()
    if trainer == "sb3":
        run_sb3(env, iterations, seed)
    else:
        run_rsl_rl(env, iterations, "fixed" if trainer.endswith("fixed") else "adaptive", kind == "random clock")
    return {"arm": arm, "seed": seed, **recorder.result(), "wall_s": round(time.perf_counter() - start_s, 1)}


def run(arm: str, seed: int, args: argparse.Namespace) -> Dict[str, Any]:
    """One run in a process of its own; a finished one is read again."""
    size = f"{args.iterations}x{args.num_envs}"
    path = args.runs / f"{arm.replace(' ', '_')}_seed{seed}_{size}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--one", arm, "--seed", str(seed), "--out"]
        command += [f"{path}.part", "--iterations", str(args.iterations), "--num-envs", str(args.num_envs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        shutil.move(f"{path}.part", path)
    return json.loads(path.read_text(encoding="utf-8"))


def interval_text(values: List[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]" if len(values) > 1 else f"{mean:.1f}"


def report(done: Dict[Any, Dict[str, Any]], args: argparse.Namespace) -> List[str]:
    seeds, one = range(args.seeds), done[ARMS[2], 0]
    final = {arm: [done[arm, seed]["final_return"] for seed in seeds] for arm in ARMS}
    versions = f"rsl-rl-lib {version('rsl-rl-lib')}, stable-baselines3 {version('stable-baselines3')}"
    shortest = min(done[arm, seed]["coverage_min"] for arm in ARMS if "staggered" in arm for seed in seeds)
    lines = [
        "# Other people's trainers on skill_chain, with and without `stagger(...)`",
        "",
        f"`python benchmarks/other_trainers.py {' '.join(sys.argv[1:])}`, rl_stagger {rs.__version__}, {versions}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, one thread a run.",
        "",
        f"N = {args.num_envs}, K = {ROLLOUT_STEPS}, H = 200, {one['iterations']} iterations, {one['steps_total']:,} "
        f"env steps each; two nets of 64, 64 tanh, learning rate {LEARNING_RATE} (the adaptive one by KL "
        "from there, SB3's constant), 4 epochs of 4 minibatches, otherwise the trainer's own defaults. The warm-up of "
        f"the staggered runs took {one['steps_warmup']:,} env steps besides "
        f"({100 * one['steps_warmup'] / one['steps_total']:.1f} %). "
        f"Lowest coverage of any staggered batch: {shortest:.3f}.",
        "",
        "Final return: mean over the full episodes that ended in the last tenth of the iterations, summed in front of "
        "the trainer.",
        "",
        "| arm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean [95 % interval] | over its plain |",
        "|---|" + "---:|" * (len(seeds) + 2),
    ]
    for arm in ARMS:
        cells = " | ".join(f"{value:.1f}" for value in final[arm])
        gain = sum(final[arm]) / sum(final[f"{arm.split()[0]} plain"]) - 1
        shown = "" if arm.endswith("plain") else f"{100 * gain:+.0f} %"
        lines.append(
            f"| {TRAINERS[arm.split()[0]]}: {arm.split(' ', 1)[1]} | {cells} | {interval_text(final[arm])} | {shown} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--num-envs", type=int, default=512)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "benchmark_other_trainers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", choices=ARMS, help="this arm only, in this process, with --seed and --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    if args.one:
        torch.set_num_threads(1)
        result = work(args.one, args.seed, args.iterations, args.num_envs)
        args.out.write_text(json.dumps(result), encoding="utf-8")
        return
    done = {(arm, seed): run(arm, seed, args) for seed in range(args.seeds) for arm in ARMS}
    lines = report(done, args)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "other_trainers.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = json.dumps({"runs": list(done.values())}, indent=1)
    (args.results / "other_trainers.json").write_text(rows + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
