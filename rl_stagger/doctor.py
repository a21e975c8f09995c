"""Whether staggered resets would help a task, and how: measured on the task itself, or read from a finished run."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from torch import Tensor

from rl_stagger.checkpoint import list_checkpoints, load_checkpoint, resolve_resume, run_dir_of
from rl_stagger.config import Config, TaskConfig, build_config, load_config
from rl_stagger.device import pick_device
from rl_stagger.diagnosis import (
    Profile,
    ResetCosts,
    arm_of,
    early_ends_by_third,
    reset_costs,
    watch_episodes,
)
from rl_stagger.envs.base import Capability, Obs, VecEnv
from rl_stagger.envs.phase_encoding import encoding_in_force, wrap_phase_encoding
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CapabilityError, ConfigError, NonFiniteError, nearest
from rl_stagger.logging.writers import read_json_lines
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.prescription import FEW_WINDOWS, Findings, Recommendation, recommend
from rl_stagger.resets.allocation import default_num_groups
from rl_stagger.resets.config import ResetConfig
from rl_stagger.resets.coverage import phase_bins
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rng import make_generator, seed_everything
from rl_stagger.run_dir import RUNS, task_folder
from rl_stagger.runner import Runner

SYNCHRONOUS = ResetConfig("synchronous", bring_up="none")
WATCH, COSTS, REFERENCE, RULE = 0.1, 0.05, 0.3, 0.36
"""Shares of the time given: watching episodes (twice), timing resets, and the two trainings; the rule's has the warm-up
besides."""
WANTED_HORIZONS, MOST_HORIZONS = 5, 10
LEAST_ITERATIONS = 20
TRIAL_ENVS = (32, 128)

Say = Callable[[str], None]
Lines = List[Dict[str, Any]]


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of the doctor itself; the rest of a command line is train.py's."""

    run: Optional[str] = None
    """A finished run, one of its checkpoints, or "latest", in place of a task."""
    seconds: float = 60.0
    """About so long."""
    device: Optional[str] = None
    """With run=...: another device than the run's."""

    def check(self) -> None:
        """Raise ConfigError for what cannot work."""
        if not 0.0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds={self.seconds}: above 0, e.g. 60")

    @staticmethod
    def usage() -> str:
        return (
            "usage: rl-stagger doctor task=<task> [seconds=60] [any of train's settings, e.g. reset=staggered "
            "rollout_steps=16]\n       rl-stagger doctor run=<latest | run directory | checkpoint> [seconds=60] "
            "[device=cpu]\n"
            "Says whether staggered resets would help, why, and what to type.\n"
        )


class Diagnosis(NamedTuple):
    """What was found, and what follows."""

    task: str
    rule: str
    """The rule that was asked about."""
    findings: Findings
    recommendation: Recommendation
    lines: Dict[str, Lines]
    """Rule -> metrics of its training, an object an iteration."""
    early_by_third: Tuple[Optional[float], ...] = ()
    """Of a run: share of terminated episodes in the thirds of its training."""
    notes: Tuple[str, ...] = ()
    seconds: float = 0.0

    def to_tree(self) -> Dict[str, Any]:
        """Plain values, as in doctor.json."""
        f = self.findings
        return {
            "task": self.task,
            "rule": self.rule,
            "horizon_steps": f.horizon_steps,
            "rollout_steps": f.rollout_steps,
            "windows": f.windows,
            "num_envs": f.num_envs,
            "iterations": f.iterations,
            "capabilities": sorted(c.value for c in f.capabilities),
            "profiles": [{**p._asdict(), "hazard": list(p.hazard)} for p in f.profiles],
            "early_ends_by_third": list(self.early_by_third),
            "costs": None if f.costs is None else f.costs._asdict(),
            "reference": None if f.reference is None else f.reference._asdict(),
            "under_rule": None if f.rule is None else f.rule._asdict(),
            "refused": f.refused,
            "warmup_share": f.warmup_share,
            "recommendation": {
                **self.recommendation._asdict(),
                "overrides": list(self.recommendation.overrides),
                "reasons": list(self.recommendation.reasons),
            },
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


# -- the command ----------------------------------------------------------------------------------------------------
def examine(arguments: Sequence[str]) -> Diagnosis:
    """`rl-stagger doctor`: measure, print, write doctor.json and doctor.png."""
    from rl_stagger.doctor_report import print_diagnosis, write_diagnosis

    config, rest = split_arguments(arguments)
    if config.run is not None:
        diagnosis, folder = diagnose_run(config, print)
    else:
        train = load_config(rest)
        train = dataclasses.replace(train, device=pick_device(train.device), resume=None)
        diagnosis = diagnose_task(train, config.seconds, print)
        folder = Path(train.run_dir) if train.run_dir else RUNS / "doctor" / _folder_name(train)
    print_diagnosis(diagnosis)
    for path in write_diagnosis(diagnosis, folder):
        print(f"written to {path}")
    return diagnosis


def split_arguments(arguments: Sequence[str]) -> Tuple[DoctorConfig, List[str]]:
    """(the doctor's own settings, those of train.py). ConfigError for what is neither, or for no task and no run."""
    from omegaconf import OmegaConf

    from rl_stagger.config import from_tree

    own, rest = [], []
    given = [a.partition("=")[0] for a in arguments]
    mine = ("run", "seconds", "device") if "run" in given else ("run", "seconds")
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise ConfigError(f"'{argument}': settings are given as key=value, e.g. task=skill_chain or run=runs/...")
        (own if key in mine else rest).append(argument)
    if "run" in given and rest:
        key = rest[0].partition("=")[0]
        raise ConfigError(f"{rest[0]}: with run=... the run's own settings count; {nearest(key, mine)}")
    if "run" not in given and "task" not in given:
        near = next((key for key in given if key not in ("seconds",)), None)
        hint = "" if near is None else f" (given: {near}=...)"
        raise ConfigError(f"which task, or which run?{hint}\n{DoctorConfig.usage()}".rstrip())
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(own))
    assert isinstance(tree, dict)
    config = from_tree(DoctorConfig, {str(key): value for key, value in tree.items()}, "")
    config.check()
    return config, rest


def _folder_name(config: Config) -> str:
    name = task_folder(config).relative_to(RUNS).as_posix().replace("/", "_")
    return f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"


def diagnose_task(config: Config, seconds: float = 60.0, say: Say = lambda text: None) -> Diagnosis:
    """`diagnose` of the task that train.py would build with `config`."""

    def build(num_envs: int) -> VecEnv:
        seed_everything(config.seed)
        return make_env(config.task.name, num_envs, config.device, config.seed, **config.task.settings)

    env = build(config.num_envs)
    try:
        on_cpu = env.device.type == "cpu"
        return diagnose(env, config, seconds, say, build if on_cpu else None)
    finally:
        env.close()


# -- any environment ------------------------------------------------------------------------------------------------
def diagnose(
    env: VecEnv,
    config: Union[Config, int],
    seconds: float = 60.0,
    say: Say = lambda text: None,
    build: Optional[Callable[[int], VecEnv]] = None,
) -> Diagnosis:
    """Examine `env` (any VecEnv) in about `seconds`.

    `config`: what would train in it, or K alone. Two short trainings are made, with synchronous resets and with the
    config's rule (`reset=staggered` where the config asks for synchronous ones), from the same seed. `build(num_envs)`
    makes the same task in another size: where `env` is too large to see a few horizons in the time, the trainings have
    fewer environments. A `rollout_steps_schedule` is not followed. `env` is left in any state. Raises ConfigError for
    settings that cannot work.
    """
    started = time.perf_counter()
    if isinstance(env, StaggeredResets):
        if not isinstance(config, int):
            config = dataclasses.replace(config, reset=env.config)
        env = env.env
    if isinstance(config, int):
        named = TaskConfig(f"{type(env).__module__}:{type(env).__qualname__}")
        config = Config(named, rollout_steps=config, num_envs=env.num_envs)
    encoding = encoding_in_force(env, config.phase_encoding, can_wrap=True)
    config = dataclasses.replace(config, resume=None, run_dir=None, phase_encoding=encoding)
    env = wrap_phase_encoding(env, encoding)
    asked = config.reset
    rule = asked if asked.bring_up != "none" else ResetConfig("staggered", gate=asked.gate)
    synchronous = dataclasses.replace(config, reset=SYNCHRONOUS)
    horizon, k = env.spec.horizon_steps, config.rollout_steps
    policy = Policy(env, config)
    say(f"watching episodes and timing resets of {env.num_envs} environments")
    groups = default_num_groups(horizon, k) if horizon else 1
    costs = reset_costs(env, policy, max(1, env.num_envs // groups), COSTS * seconds)
    windows = (horizon or 0) / k
    smaller = _of_fitting_size(env, synchronous, REFERENCE * seconds, build) if windows > FEW_WINDOWS else None
    small = env if smaller is None else wrap_phase_encoding(smaller, encoding)
    try:
        profiles = [watch_episodes(small, policy, k, WATCH * seconds, "initial")]
        findings = Findings(horizon, k, env.num_envs, config.iterations, env.capabilities, tuple(profiles), costs)
        lines: Dict[str, Lines] = {}
        if windows > FEW_WINDOWS:
            assert horizon is not None
            findings, lines = _compare(small, synchronous, rule, seconds, findings, say)
    finally:
        if smaller is not None:
            smaller.close()
    task = config.task.label or config.task.name
    return Diagnosis(task, asked.name, findings, recommend(findings), lines, seconds=time.perf_counter() - started)


class Policy:
    """An untrained policy for an environment, whatever number of them; sampled actions."""

    def __init__(self, env: VecEnv, config: Config) -> None:
        seed_everything(config.seed)
        try:
            self.model = ActorCritic(env.spec, config.model).to(env.device)
        except ValueError as error:
            raise ConfigError(f"model does not fit this task: {error}") from error
        self.generator = make_generator(env.device, config.seed)

    def __call__(self, obs: Obs) -> Tensor:
        return self.model.act(obs, self.generator).env_action


def _of_fitting_size(
    env: VecEnv, config: Config, seconds: float, build: Optional[Callable[[int], VecEnv]]
) -> Optional[VecEnv]:
    """The task with as many environments as let a training of a few horizons end in `seconds`; None: `env` will do.

    An iteration's time is taken to be a + b * num_envs, from two small trials.
    """
    horizon = env.spec.horizon_steps
    if build is None or horizon is None or env.num_envs <= max(TRIAL_ENVS):
        return None
    few, more = TRIAL_ENVS
    few_s, more_s = (_iteration_s(build(n), config) for n in TRIAL_ENVS)
    slope = max((more_s - few_s) / (more - few), 1e-9)
    wanted = max(WANTED_HORIZONS * phase_bins(horizon, config.rollout_steps), LEAST_ITERATIONS)
    fits = int(few + (seconds / wanted - few_s) / slope)
    return build(max(fits, few)) if fits < env.num_envs else None


def _iteration_s(env: VecEnv, config: Config) -> float:
    """Seconds of a training iteration in `env`, which is closed: the shorter of two after a first one."""
    try:
        runner = Runner(env, dataclasses.replace(config, num_envs=env.num_envs))
        _train(runner, 1, float("inf"))
        times = []
        for iteration in (2, 3):
            start = time.perf_counter()
            _train(runner, iteration, float("inf"))
            times.append(time.perf_counter() - start)
        return min(times)
    finally:
        env.close()


def _compare(
    env: VecEnv, synchronous: Config, rule: ResetConfig, seconds: float, findings: Findings, say: Say
) -> Tuple[Findings, Dict[str, Lines]]:
    """Train twice, from the same seed, and add what was seen."""
    horizon, k = findings.horizon_steps, findings.rollout_steps
    assert horizon is not None
    most = max(MOST_HORIZONS * phase_bins(horizon, k), LEAST_ITERATIONS)
    lines: Dict[str, Lines] = {}
    env.seed(synchronous.seed)
    say(f"training with synchronous resets, {env.num_envs} environments, about {REFERENCE * seconds:.0f} s")
    runner = Runner(env, dataclasses.replace(synchronous, num_envs=env.num_envs))
    seen = lines[SYNCHRONOUS.name] = _train(runner, most, REFERENCE * seconds)
    reference = arm_of(SYNCHRONOUS.name, env.num_envs, seen, horizon, k)
    generator = make_generator(env.device, synchronous.seed)
    later = watch_episodes(
        env, lambda obs: runner.model.act(obs, generator).env_action, k, WATCH * seconds, "short training's"
    )
    findings = dataclasses.replace(findings, profiles=(*findings.profiles, later), reference=reference)
    env.seed(synchronous.seed)
    try:
        runner = Runner(env, dataclasses.replace(synchronous, reset=rule, num_envs=env.num_envs))
    except (CapabilityError, ConfigError) as error:
        return dataclasses.replace(findings, refused=str(error)), lines
    say(f"training with {rule.name}, about {RULE * seconds:.0f} s")
    lines[rule.name] = _train(runner, len(seen), RULE * seconds)
    if rule.gate == "block":
        env.set_manual_reset(False)
    if not lines[rule.name]:
        return findings, lines
    arm = arm_of(rule.name, env.num_envs, lines[rule.name], horizon, k)
    return dataclasses.replace(findings, rule=arm, kept_up=rule.upkeep_in_force != "none"), lines


def _train(runner: Runner, iterations: int, seconds: float) -> Lines:
    """Up to `iterations` in total, at least one; nothing is written. Raises NonFiniteError like `learn`."""
    lines: Lines = []
    deadline = time.perf_counter() + seconds
    while runner.iteration < iterations:
        metrics = runner.iterate()
        if metrics.get("fault/bad_gradients"):
            raise NonFiniteError(f"iteration {runner.iteration + 1}: gradients were not finite")
        runner.iteration += 1
        runner.watch.read()
        rows = runner.env.num_envs * runner.config.rollout_steps
        counts = {"steps/total": runner.iteration * rows, "steps/warmup": runner.env.warmup_steps}
        lines.append({"iteration": runner.iteration, **metrics, **counts})
        if time.perf_counter() > deadline:
            break
    return lines


# -- a finished run -------------------------------------------------------------------------------------------------
def diagnose_run(config: DoctorConfig, say: Say = lambda text: None) -> Tuple[Diagnosis, Path]:
    """(diagnosis, the run's folder) of a finished run: its metrics, and its trained policy where its task can be built.

    Raises ConfigError where there are no metrics to read.
    """
    started = time.perf_counter()
    assert config.run is not None
    if config.run == "latest":
        config = dataclasses.replace(config, run=str(run_dir_of(resolve_resume("latest", RUNS, key="run"))))
    assert config.run is not None
    folder = _run_folder(config.run)
    run = _run_config(folder)
    lines = [dict(line) for line in read_json_lines(folder / "metrics.jsonl")]
    notes: List[str] = []
    if run.rollout_steps_schedule is not None:
        notes.append(
            f"K changed during this run (rollout_steps_schedule); everything here is told by K = {run.rollout_steps}"
        )
    horizon, capabilities = _recorded_horizon(folder), frozenset(Capability)
    profiles: Tuple[Profile, ...] = ()
    costs: Optional[ResetCosts] = None
    num_envs, k = run.num_envs, run.rollout_steps
    try:
        device = pick_device(config.device or run.device)
        env = make_env(run.task.name, num_envs, device, run.seed, **run.task.settings)
        env = wrap_phase_encoding(env, run.phase_encoding)
    except Exception as error:  # whatever keeps this machine from building the task leaves the run's metrics
        notes.append(f"the task could not be built here ({type(error).__name__}: {error}); read from its metrics alone")
    else:
        try:
            horizon, capabilities = env.spec.horizon_steps, env.capabilities
            policy, name = _run_policy(env, run, Path(config.run), folder)
            say(f"watching episodes of the {name} policy and timing resets of {num_envs} environments")
            groups = default_num_groups(horizon, k) if horizon else 1
            costs = reset_costs(env, policy, max(1, num_envs // groups), COSTS * config.seconds)
            profiles = (watch_episodes(env, policy, k, (1.0 - COSTS) * config.seconds, name),)
        finally:
            env.close()
    findings = Findings(horizon, k, num_envs, len(lines), capabilities, profiles, costs)
    if horizon is not None and lines:
        arm = arm_of(run.reset.name, num_envs, lines, horizon, k)
        plain = run.reset.bring_up == "none"
        kept_up = run.reset.upkeep_in_force != "none"
        findings = dataclasses.replace(findings, **{"reference" if plain else "rule": arm}, kept_up=kept_up)
    diagnosis = Diagnosis(
        run.task.label or run.task.name,
        run.reset.name,
        findings,
        recommend(findings),
        {run.reset.name: lines},
        tuple(early_ends_by_third(lines, horizon)),
        tuple(notes),
        time.perf_counter() - started,
    )
    return diagnosis, folder


def _run_folder(run: str) -> Path:
    """The folder of a run, given by itself or by one of its checkpoints."""
    path = Path(run)
    if not path.exists():
        raise ConfigError(f"run={run}: no such file or folder; give a run directory or one of its checkpoints")
    folder = path if path.is_dir() else run_dir_of(path)
    if not read_json_lines(folder / "metrics.jsonl"):
        raise ConfigError(f"run={run}: {folder} holds no metrics.jsonl with an iteration in it; is it a run directory?")
    return folder


def _run_config(folder: Path) -> Config:
    from omegaconf import OmegaConf

    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"run={folder}: there is no config.yaml in it; is it a run directory?")
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    assert isinstance(tree, dict)
    return build_config({**{str(key): value for key, value in tree.items()}, "resume": None})


def _recorded_horizon(folder: Path) -> Optional[int]:
    from rl_stagger.logging.curves import read_horizon

    return read_horizon(folder)


def _run_policy(env: VecEnv, run: Config, given: Path, folder: Path) -> Tuple[Policy, str]:
    """The run's policy, "trained"; its "initial" one where no checkpoint was kept."""
    policy = Policy(env, run)
    files = [given] if given.is_file() else list_checkpoints(folder / "checkpoints")
    if not files:
        return policy, "initial"
    policy.model.load_state_dict(load_checkpoint(files[-1])["model"])
    return policy, "trained"
