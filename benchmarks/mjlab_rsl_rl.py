"""Train a task of mjlab with the rsl_rl runner that mjlab ships and as its `train` script does it, for comparison.

Writes one JSON object an iteration: how many env steps it has had and the mean return and length of the episodes that
ended in it. A return is the plain sum of an episode's rewards. Every finished episode counts once, in the iteration in
which it ends (rsl_rl's own figure is the mean of the last 100 episodes). Those that the initial random clock cut short
are counted apart, as partial.

    OMP_NUM_THREADS=1 python benchmarks/mjlab_rsl_rl.py --iterations 50 --num-envs 256 --out runs/rsl_rl.jsonl
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, TextIO

import mjlab.tasks  # noqa: F401  (registers the tasks)
import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper
from mjlab.tasks.registry import load_env_cfg, load_rl_cfg, load_runner_cls

from rl_stagger.envs.mjlab import episode_length_s


class RecordedEnv(RslRlVecEnvWrapper):
    """rsl_rl's view of the env, which also sums up every episode and writes a row after each rollout."""

    def __init__(self, env: ManagerBasedRlEnv, clip_actions: Any, rollout_steps: int, random_clock: bool, out: TextIO):
        super().__init__(env, clip_actions=clip_actions)
        self.rollout_steps, self.out = rollout_steps, out
        self.steps, self.start_s = 0, time.perf_counter()
        self.returns = torch.zeros(self.num_envs, dtype=torch.float64, device=self.device)
        self.lengths = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.partial = torch.full((self.num_envs,), random_clock, device=self.device)
        self.ended: Dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        """Partial or not -> (return, length in steps) of the episodes that ended in this rollout."""

    def step(self, actions: torch.Tensor) -> Any:
        obs, reward, dones, extras = super().step(actions)
        self.returns += reward
        self.lengths += 1
        done = dones > 0
        ended = zip(self.partial[done].tolist(), self.returns[done].tolist(), self.lengths[done].tolist())
        for partial, episode_return, length in ended:
            self.ended[partial].append((episode_return, length))
        self.returns.masked_fill_(done, 0.0)
        self.lengths.masked_fill_(done, 0)
        self.partial &= ~done
        self.steps += 1
        if self.steps % self.rollout_steps == 0:
            self._write_row()
        return obs, reward, dones, extras

    def _write_row(self) -> None:
        full = self.ended[False]
        row = {
            "iteration": self.steps // self.rollout_steps,
            "steps/total": self.steps * self.num_envs,
            "episode/return_mean": sum(value for value, _ in full) / len(full) if full else None,
            "episode/length_mean": sum(length for _, length in full) / len(full) if full else None,
            "episode/count": len(full),
            "episode/partial_count": len(self.ended[True]),
            "time/wall_s": round(time.perf_counter() - self.start_s, 3),
        }
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()
        self.ended = {False: [], True: []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="Mjlab-Cartpole-Balance")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--rollout-steps", type=int, help="default: the task's own")
    parser.add_argument("--horizon-steps", type=int, help="default: the task's own")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--synchronous", action="store_true", help="without rsl_rl's random initial clock")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; settings go beside it")
    args = parser.parse_args()

    env_cfg, agent_cfg = load_env_cfg(args.task), load_rl_cfg(args.task)
    env_cfg.scene.num_envs, env_cfg.seed, agent_cfg.seed = args.num_envs, args.seed, args.seed
    agent_cfg.num_steps_per_env = args.rollout_steps or agent_cfg.num_steps_per_env
    if args.horizon_steps is not None:
        step_s = env_cfg.sim.mujoco.timestep * env_cfg.decimation
        env_cfg.episode_length_s = episode_length_s(args.horizon_steps, step_s)

    settings = asdict(agent_cfg)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    described = {**vars(args), "out": str(args.out), "agent": settings}
    args.out.with_suffix(".settings.json").write_text(json.dumps(described, indent=2) + "\n")
    with args.out.open("w") as out:
        base = ManagerBasedRlEnv(env_cfg, device=args.device)  # seeds torch, so the networks below as well
        env = RecordedEnv(base, agent_cfg.clip_actions, agent_cfg.num_steps_per_env, not args.synchronous, out)
        runner_class = load_runner_cls(args.task) or MjlabOnPolicyRunner
        runner = runner_class(env, settings, None, args.device)  # no log directory: no files but ours
        runner.learn(args.iterations, init_at_random_ep_len=not args.synchronous)
        env.close()


if __name__ == "__main__":
    main()
