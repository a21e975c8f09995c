"""The training loop: collect, returns, update, report."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import torch

from rl_stagger.algorithms.ppo import PPO
from rl_stagger.checkpoint import CheckpointStore, load_checkpoint, resolve_resume, run_dir_of
from rl_stagger.config import Config, TaskConfig, check_config, from_tree, to_tree
from rl_stagger.envs.base import Capability, VecEnv
from rl_stagger.envs.phase_encoding import PhaseEncoding, encoding_in_force, wrap_phase_encoding
from rl_stagger.envs.registry import entry_point
from rl_stagger.errors import CheckpointError, ConfigError, NonFiniteError
from rl_stagger.logging.console import make_console
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.policy import spec_from_tree, spec_to_tree
from rl_stagger.reporter import Reporter
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rng import global_rng_state, seed_everything, set_global_rng_state
from rl_stagger.rollout import Collector, first_rows, raise_non_finite, read_health
from rl_stagger.run_dir import task_folder
from rl_stagger.statistics import Statistics, read_metrics
from rl_stagger.stopwatch import Stopwatch

MUST_AGREE = ("task", "phase_encoding", "spec", "model", "reset", "num_envs", "rollout_steps", "seed")
"""What a resumed run shares with its checkpoint ("spec": the environment's shapes); the rest may be changed."""

WARMUP_WARNING_SHARE = 0.2


class RunResult(NamedTuple):
    """What `learn` leaves behind."""

    run_dir: Path
    summary: Dict[str, Any]
    """Also in summary.json. "status": finished | interrupted."""


class Runner:
    """Trains a policy in any VecEnv.

    `env` is the truth for its sizes and device: config in force (`self.config`) takes them over. A plain environment is
    put under the config's reset rule. With `config.resume` the state of that checkpoint is loaded here.
    """

    def __init__(self, env: VecEnv, config: Config) -> None:
        self.notes: List[str] = []
        """What a user must know about this run; printed at start and saved with it."""
        self.config = self._in_force(env, config)
        resume = self._resolve(self.config)
        torch.set_num_threads(self.config.threads)
        seed_everything(self.config.seed)
        cfg, seed = self.config, self.config.seed
        if not isinstance(env, StaggeredResets):
            env = wrap_phase_encoding(env, cfg.phase_encoding)
            # A checkpoint brings its own recorded states.
            library = cfg.reset.library if resume is None else dataclasses.replace(cfg.reset.library, path=None)
            rule = dataclasses.replace(cfg.reset, library=library)
            env = StaggeredResets.from_config(env, rule, cfg.rollout_steps, seed)
        elif env.rollout_steps != cfg.rollout_steps:
            raise ConfigError(
                f"rollout_steps={cfg.rollout_steps}: the StaggeredResets given was built with {env.rollout_steps}"
            )
        for _, steps in cfg.rollout_steps_schedule or ():
            try:
                env.check_rollout_steps(int(steps))
            except ConfigError as error:
                raise ConfigError(f"rollout_steps_schedule: {error}") from error
        self.env, self.device = env, env.device
        self.notes += [f"reset rule {env.describe()}", *env.notes]
        if resume is None:
            self.notes += _first_notes(env, cfg)
        self.watch = env.watch = Stopwatch(self.device)
        try:
            self.model = ActorCritic(env.spec, cfg.model, cfg.phase_encoding.critic_l2).to(self.device)
        except ValueError as error:
            raise ConfigError(f"model does not fit this task: {error}") from error
        env.actor = lambda obs: self.model.act(obs, self.collector.generator).env_action
        self.learner = PPO(self.model, cfg.algorithm, cfg.iterations, seed + 1)
        keep_final_obs = cfg.algorithm.bootstrap == "final_obs"
        steps = cfg.most_rollout_steps
        self.collector = Collector(env, self.model, steps, keep_final_obs, seed + 2, self.watch, self.learner.nets)
        self.statistics = Statistics(env.num_envs, env.spec.horizon_steps, cfg.rollout_steps, self.device)
        self.iteration = 0
        self.steps_total = 0
        """Env steps collected for learning, all environments together."""
        self.wall_s = 0.0
        self.read_health, self.read_metrics = read_health, read_metrics
        """The two host reads of an iteration, and the only ones."""
        self._stop_signal: Optional[int] = None
        self._home = None if resume is None else run_dir_of(resume)
        if resume is not None:
            self.load_state_dict(load_checkpoint(resume), resume)

    # -- the loop ------------------------------------------------------------------------------------------------
    def learn(self, iterations: Optional[int] = None) -> RunResult:
        """Train until `iterations` (default: the config's) are done in total, and write the run directory.

        SIGINT or SIGTERM finish the iteration, save and return with status "interrupted". Raises NonFiniteError when
        data or gradients are not finite: before the first step for data, from the first bad gradient on otherwise.
        """
        total = self._in_total(iterations)
        if self._home is not None and self.iteration >= total and (self._home / "summary.json").exists():
            make_console(self.config.logging.console, total, "").message(
                f"nothing to do: {self._home} is at iteration {self.iteration} of {total}; give more iterations=..."
            )
            return RunResult(self._home, json.loads((self._home / "summary.json").read_text(encoding="utf-8")))
        reporter = Reporter(self.config, self.env, self.notes, total, self._home, self.iteration)
        self._home = reporter.run_dir
        store = CheckpointStore(reporter.run_dir / "checkpoints", self.config.checkpoint.keep_last)
        with reporter, self._signals(reporter.message):
            while self.iteration < total and self._stop_signal is None:
                started = time.perf_counter()
                metrics = self.iterate()
                reporter.report(self._finish_iteration(metrics, started))
                every = self.config.checkpoint.every_iters
                if every and self.iteration % every == 0 and self.iteration < total:
                    store.save(self.iteration, self.state_dict(), reporter.is_best())
            store.save(self.iteration, self.state_dict(), reporter.is_best())
            status = "finished" if self.iteration >= total else "interrupted"
            return RunResult(reporter.run_dir, reporter.finish(status))

    def iterate(self) -> Dict[str, Any]:
        """One iteration: collect, returns, update, statistics. Returns the metrics on the host."""
        steps = self.config.rollout_steps_at(self.iteration)
        self.env.plan(self.iteration, steps)
        rollout = self.collector.collect(steps)
        health = self.read_health(rollout)
        if health.faults:
            raise_non_finite(rollout, health, self.iteration + 1)
        with self.watch("learn"):
            final_rows = first_rows(rollout.needs_final, health.num_final)
            batch, estimates, metrics = self.learner.make_batch(rollout, final_rows)
            metrics.update(self.learner.update(batch, self.iteration))
            self.model.update_normalizers(rollout.flat_obs(rollout.steps), batch.target, batch.valid)
            metrics.update(self.statistics.add(rollout, estimates))
            self.env.follow(rollout.phase, estimates.advantage, rollout.valid)
        return self.read_metrics(metrics)

    def _finish_iteration(self, metrics: Dict[str, Any], started: float) -> Dict[str, Any]:
        """Count the iteration and add what the host knows."""
        if metrics.pop("fault/bad_gradients"):
            raise NonFiniteError(
                f"iteration {self.iteration + 1}: gradients were not finite although the data were; no step was taken "
                "with them. Lower algorithm.learning_rate or the scale of rewards (algorithm.reward_scale); the last "
                "checkpoint is intact."
            )
        self.iteration += 1
        self.env.note_return(metrics["episode/return_mean"])
        seconds, parts = time.perf_counter() - started, self.watch.read()
        self.wall_s += seconds
        rows = self.env.num_envs * self.env.rollout_steps
        self.steps_total += rows
        times = {f"time/{name}_s": parts.get(name, 0.0) for name in ("physics", "policy", "learn", "reset")}
        return {
            "iteration": self.iteration,
            **metrics,
            "steps/total": self.steps_total,
            "steps/warmup": self.env.warmup_steps,
            "speed/steps_per_s": rows / seconds,
            "time/per_reset_ms": self._per_reset_ms(metrics, times["time/reset_s"]),
            **times,
            "time/host_s": max(0.0, seconds - sum(times.values())),
            "time/wall_s": self.wall_s,
        }

    def _per_reset_ms(self, metrics: Dict[str, Any], reset_s: float) -> Optional[float]:
        """Time per reset that the rule made by itself: all where a gate makes them, else those of episodes that it cut.
        None where it made none, and where the time holds a bring-up."""
        if self.env.config.gate == "block":
            count = metrics["resets/per_step_mean"] * self.env.rollout_steps
        else:
            count = metrics["episode/cut_count"]
        return 1000.0 * reset_s / count if count and not self.collector.brought_up else None

    # -- state ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> Dict[str, Any]:
        """All that a resume needs, one tree."""
        return {
            "config": to_tree(self.config),
            "spec": spec_to_tree(self.env.spec),
            "iteration": self.iteration,
            "steps_total": self.steps_total,
            "wall_s": self.wall_s,
            "model": self.model.state_dict(),
            "learner": self.learner.state_dict(),
            "collector": self.collector.state_dict(),
            "env": self.env.state_dict(),
            "statistics": self.statistics.state_dict(),
            "rng": global_rng_state(),
        }

    def load_state_dict(self, state: Dict[str, Any], source: Path) -> None:
        """Continue from `state`, which came from file `source`. CheckpointError where it does not fit this run."""
        if "steps_total" not in state:
            raise CheckpointError(
                f"resume={source}: written by an earlier version, whose runs cannot be continued; evaluating it and "
                "load_policy still work"
            )
        # Through the types: settings that did not exist yet when it was saved have their defaults.
        saved = to_tree(from_tree(Config, state["config"], ""))
        saved["spec"] = spec_to_tree(spec_from_tree(state["spec"]))
        now = {**to_tree(self.config), "spec": spec_to_tree(self.env.spec)}
        for name in MUST_AGREE:
            if saved[name] != now[name]:
                raise CheckpointError(
                    f"resume={source}: the checkpoint has {_difference(name, saved[name], now[name])}; "
                    "continue with the checkpoint's settings or start a new run"
                )
        self.iteration, self.steps_total, self.wall_s = state["iteration"], state["steps_total"], state["wall_s"]
        self.model.load_state_dict(state["model"])
        self.learner.load_state_dict(state["learner"])
        if saved["algorithm"]["learning_rate"] != now["algorithm"]["learning_rate"]:
            self.learner.rate.fill_(self.config.algorithm.learning_rate)
        saved_env = state["env"]["env"]
        env_too = bool(saved_env) and saved_env.get("episodes", True)
        if env_too:
            self.env.load_state_dict(state["env"])
        else:
            self.env.load_counters(state["env"])
            if saved_env:
                self.env.unwrapped.load_state_dict(saved_env)
        self.collector.load_state_dict(state["collector"], env_too)
        self.statistics.load_state_dict(state["statistics"], env_too)
        set_global_rng_state(state["rng"])
        if not env_too:
            rest = "; its curricula go on" if saved_env else ""
            self.notes.append(f"resume: this simulator's state cannot be read; episodes start anew{rest}")
        elif Capability.EXACT_RESUME not in self.env.capabilities:
            self.notes.append("resume: this simulator's state was read back, but does not continue to the last bit")

    # -- start ---------------------------------------------------------------------------------------------------
    @staticmethod
    def _resolve(config: Config) -> Optional[Path]:
        """The checkpoint to resume from, found before any folder is made."""
        if config.resume is None:
            return None
        search_in = Path(config.run_dir) if config.run_dir is not None else task_folder(config)
        return resolve_resume(config.resume, search_in)

    def _in_force(self, env: VecEnv, config: Config) -> Config:
        """`config` with what the environment decides."""
        algorithm = config.algorithm
        if algorithm.bootstrap == "final_obs" and Capability.FINAL_OBS not in env.capabilities:
            algorithm = dataclasses.replace(algorithm, bootstrap="pre_step_value")
            self.notes.append(
                "algorithm.bootstrap=pre_step_value: this simulator gives no final observation, so time limits are "
                "bootstrapped with V(s_t), the value one step before"
            )
        reset = env.config if isinstance(env, StaggeredResets) else config.reset
        inner = env.env if isinstance(env, StaggeredResets) else env
        in_force = dataclasses.replace(
            config,
            task=task_of(env, config.task),
            algorithm=algorithm,
            reset=reset,
            phase_encoding=encoding_in_force(inner, config.phase_encoding, can_wrap=inner is env),
            num_envs=env.num_envs,
            rollout_steps=config.rollout_steps_at(0),
            device=str(env.device),
        )
        check_config(in_force)
        return in_force

    def _in_total(self, iterations: Optional[int]) -> int:
        total = self.config.iterations if iterations is None else iterations
        if total < 1:
            raise ConfigError(f"iterations={total}: at least 1")
        if total != self.config.iterations:
            self.config = dataclasses.replace(self.config, iterations=total)
            self.learner.iterations = total
        return total

    @contextmanager
    def _signals(self, message: Callable[[str], None]) -> Iterator[None]:
        """SIGINT and SIGTERM ask the loop to stop after the iteration; a second one stops at once."""
        self._stop_signal = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            if self._stop_signal is not None:
                raise KeyboardInterrupt
            self._stop_signal = number
            message(f"{signal.Signals(number).name}: finishing this iteration, then saving. Once more to stop at once.")

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _first_notes(env: StaggeredResets, config: Config) -> List[str]:
    """What the first minutes of a run will look like."""
    notes = []
    warmup, rows = env.warmup_bound_steps, env.num_envs * config.rollout_steps
    if warmup:
        share = warmup / (rows * config.iterations)
        free = "snapshot" if Capability.SET_STATE in env.capabilities else "clock"
        cheaper = f"; reset.bring_up={free} costs none" if share > WARMUP_WARNING_SHARE else ""
        notes.append(f"warming up with {warmup:,} env steps, {100 * share:.0f} % of this training{cheaper}")
    if env.left_alone:
        notes.append(
            f"{env.left_alone} of {env.num_envs} environments play whole episodes; returns and lengths are of these "
            "(reset.whole_episode_share)"
        )
    elif env.spec.horizon_steps is not None and env.spec.horizon_steps > config.rollout_steps:
        first = -(-env.spec.horizon_steps // config.rollout_steps)
        notes.append(f"episodes of full length first end at iteration {first}")
    if env.spec.phase_columns:
        columns = " and ".join(f"{count} columns of '{name}'" for name, count in env.spec.phase_columns.items())
        notes.append(f"phase encoding {config.phase_encoding.kind}: the last {columns} hold the episode's clock")
    return notes


def task_of(env: VecEnv, task: TaskConfig) -> TaskConfig:
    """What to write down so that `make_env` builds this environment again; `task` itself where it says so already."""
    inner = env.env if isinstance(env, StaggeredResets) else env
    if inner.made_from is None:
        inner = inner.env if isinstance(inner, PhaseEncoding) else inner
        built = f"{type(inner).__module__}:{type(inner).__qualname__}"
        return task if entry_point(task.name) in (None, built) else TaskConfig(built)
    name, settings = inner.made_from
    plain = {key: _plain(value) for key, value in settings.items()}
    return TaskConfig(name, plain, task.label if name == task.name else None)


def _plain(value: Any) -> Any:
    """`value` as a file can hold it; anything but numbers, text and containers of them as its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _difference(name: str, saved: Any, now: Any) -> str:
    """The first setting in which two trees differ, both values named."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in {**saved, **now}:
            if saved.get(key) != now.get(key):
                return _difference(f"{name}.{key}", saved.get(key), now.get(key))
    return f"{name}={saved}, this run has {now}"
