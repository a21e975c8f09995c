"""The command `rl-stagger <subcommand> ...`; scripts/*.py call the same functions."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from rl_stagger.config import Config, build_config, from_tree
from rl_stagger.device import pick_device
from rl_stagger.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    ContractError,
    NonFiniteError,
    SimulatorError,
    nearest,
)
from rl_stagger.overrides import config_dir, explain_overrides, hydra_configs, name_rule, rewrite_overrides

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NON_FINITE, EXIT_INTERRUPTED = 0, 1, 2, 3, 75
EXIT_STOPPED = 130
"""75: stopped by a signal after saving; run again with resume=latest to go on. 130: stopped at once by a second one."""

RESULT_FILES = ("curves.png", "summary.json", "metrics.jsonl", "config.yaml", "environment.json", "checkpoints")

USAGE = """usage: rl-stagger <command> [key=value ...]

  train     train a policy          rl-stagger train task=skill_chain reset=staggered
            -m sweeps over lists    rl-stagger train -m seed=0,1,2 reset=synchronous,staggered
  evaluate  judge a trained policy  rl-stagger evaluate run=runs/... episodes=256
  doctor    would staggering help?  rl-stagger doctor task=skill_chain, or run=runs/...
  play      watch a trained policy  rl-stagger play run=runs/... video=out.mp4
  check     does an environment     rl-stagger check task=my_module:MyEnv
            keep the contract?

`rl-stagger train --help` lists all settings; `--version` prints the version.
Exit codes: 0 done, 1 failed, 2 a setting cannot work, 3 data or gradients not finite, 75 stopped by a signal and saved,
130 stopped at once by a second signal.
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a subcommand; returns the exit code. Modules in the current folder can be named: task=my_module:MyEnv."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a path that the terminal cannot show fails no run
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: Dict[str, Callable[[List[str]], int]] = {
        "train": train,
        "evaluate": evaluate,
        "doctor": doctor,
        "play": play,
        "check": check,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        import rl_stagger

        print(f"rl_stagger {rl_stagger.__version__}")
        return EXIT_OK
    if arguments[0] not in commands:
        return _complain(f"there is no command '{arguments[0]}'; {nearest(arguments[0], commands)}", EXIT_USAGE)
    return _guarded(lambda: commands[arguments[0]](arguments[1:]))


# -- train ----------------------------------------------------------------------------------------------------------
def train(arguments: List[str]) -> int:
    """Compose the configuration with Hydra and train; -m sweeps."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    overrides = rewrite_overrides([a for a in arguments if not a.startswith("-")])
    flags = [a for a in arguments if a.startswith("-")]
    if any(flag in ("-h", "--help") for flag in flags):
        from rl_stagger.help import train_help

        print(train_help(overrides), end="")
        return EXIT_OK
    if arguments and "--hydra-help" not in flags:
        _explain(rewrite_overrides(arguments), multirun=any(flag in ("-m", "--multirun") for flag in flags))
    codes: List[int] = []

    @hydra.main(config_path=str(config_dir()), config_name="config", version_base="1.3")
    def job(composed: DictConfig) -> None:
        job_overrides = list(HydraConfig.get().overrides.task)
        sweep_dir = _sweep_job_dir(HydraConfig.get())
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(tree, dict)
        code = _guarded(lambda: train_one({str(k): v for k, v in tree.items()}, job_overrides, sweep_dir), sweep_dir)
        codes.append(code)
        if sweep_dir is not None:
            _note_overrides(sweep_dir, job_overrides)
        if sweep_dir is None or code in (EXIT_INTERRUPTED, EXIT_STOPPED):
            sys.exit(code)

    before = sys.argv
    sys.argv = [sys.argv[0], *flags, *overrides]
    try:
        job()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED if stop.code else EXIT_OK
    finally:
        sys.argv = before
    return max(codes, default=EXIT_OK)


def train_one(tree: Dict[str, Any], overrides: Sequence[str], sweep_dir: Optional[Path]) -> int:
    """Train once with a composed tree; `overrides` are those that the user gave."""
    from rl_stagger.envs.registry import make_env
    from rl_stagger.rng import seed_everything
    from rl_stagger.runner import Runner

    tree = name_rule(tree, overrides)
    if sweep_dir is not None:
        if tree["run_dir"] is not None:
            raise ConfigError(f"run_dir={tree['run_dir']}: a sweep numbers its folders itself; use hydra.sweep.dir=...")
        if tree["resume"] is not None:
            raise ConfigError(f"resume={tree['resume']}: every job of a sweep would go on in that run; resume it alone")
        tree = {**tree, "run_dir": str(sweep_dir)}
    config = _resumed(build_config(tree), overrides) if tree["resume"] is not None else build_config(tree)
    config = dataclasses.replace(config, device=pick_device(config.device))
    for name in ("num_envs", "device", "seed"):
        if name in config.task.settings:
            raise ConfigError(f"task.settings.{name}={config.task.settings[name]}: set {name}=... itself")
    # Before the environment is built: simulators draw while they are made.
    seed_everything(config.seed)
    try:
        env = make_env(config.task.name, config.num_envs, config.device, config.seed, **config.task.settings)
    except (ValueError, TypeError) as error:
        if ":" in config.task.name or isinstance(error, ConfigError):
            raise  # a task of the user's own: its author wants to see where
        raise ConfigError(f"task {config.task.name} with settings {config.task.settings}: {error}") from error
    try:
        result = Runner(env, config).learn()
    finally:
        env.close()
    _print_result(result.summary, result.run_dir)
    return EXIT_OK if result.summary["status"] == "finished" else EXIT_INTERRUPTED


def _resumed(config: Config, overrides: Sequence[str]) -> Config:
    """The checkpoint's configuration under what the command line says anew."""
    from rl_stagger.checkpoint import load_checkpoint, resolve_resume, run_dir_of
    from rl_stagger.config import to_tree
    from rl_stagger.run_dir import RUNS, task_folder

    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    root = Path(config.run_dir) if config.run_dir else (task_folder(config) if "task" in keys else RUNS)
    assert config.resume is not None
    checkpoint = resolve_resume(config.resume, root)
    saved, composed = load_checkpoint(checkpoint)["config"], to_tree(config)
    # The run goes on where it was: a folder in the saved config may have moved since.
    saved = {**saved, "run_dir": str(run_dir_of(checkpoint)), "device": config.device}
    for key in keys:
        if not key.startswith("hydra"):
            _put(saved, key.split("."), _get(composed, key.split(".")))
    return build_config({**saved, "resume": str(checkpoint)})


def _get(tree: Any, path: List[str]) -> Any:
    return tree if not path else _get(tree[path[0]], path[1:])


def _put(tree: Dict[str, Any], path: List[str], value: Any) -> None:
    if len(path) == 1:
        tree[path[0]] = value
    else:
        _put(tree.setdefault(path[0], {}), path[1:], value)


def _explain(overrides: Sequence[str], multirun: bool) -> None:
    with hydra_configs():
        explain_overrides(overrides, multirun)


def _sweep_job_dir(hydra_config: Any) -> Optional[Path]:
    """Where this job of a sweep puts its run; None for a single run."""
    if "MULTIRUN" not in str(hydra_config.mode):
        return None
    return Path(hydra_config.sweep.dir) / hydra_config.sweep.subdir


def _print_result(summary: Dict[str, Any], run_dir: Path) -> None:
    def shown(name: str, digits: int) -> str:
        value = summary.get(name)
        return "-" if value is None else f"{value:.{digits}f}"

    warmup = f" and {summary['steps_warmup']:,} of warm-up" if summary.get("steps_warmup") else ""
    print(f"{summary['status']} after {summary['iterations']} iterations: ", end="")
    print(f"{summary.get('steps_total', 0):,} env steps{warmup}, {shown('steps_per_s', 0)} a second")
    first, last = summary.get("final_iterations", (0, 0))
    print(f"  final return {shown('final_return', 2)}, length {shown('final_length', 1)}, ", end="")
    print(f"success {shown('final_success_rate', 3)} ", end="")
    print(f"(the {summary.get('final_episodes', 0):,} whole episodes that ended in iterations {first} to {last})")
    print(f"  explained variance of the critic, 10th percentile {shown('explained_variance_p10', 3)}")
    files = [name for name in RESULT_FILES if (run_dir / name).exists()]
    print(f"  {run_dir / files[0]}" + "".join(f", {name}" for name in files[1:]))
    print(f"  compare runs with tensorboard --logdir {run_dir.parent}")
    if summary["status"] == "interrupted":
        print(f"  go on with rl-stagger train resume={run_dir}")


# -- evaluate -------------------------------------------------------------------------------------------------------
def evaluate(arguments: List[str]) -> int:
    """Judge a run's policy; prints a table and writes JSON into the run directory."""
    from omegaconf import OmegaConf

    from rl_stagger.evaluate import EvaluateConfig, evaluate_run

    if any(a in ("-h", "--help") for a in arguments):
        print(EvaluateConfig.usage(), end="")
        return EXIT_OK
    if arguments and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"'{argument}': settings are given as key=value, e.g. episodes=512")
    if not any(argument.startswith("run=") for argument in arguments):
        raise ConfigError(f"which run?\n{EvaluateConfig.usage()}".rstrip())
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(arguments))
    assert isinstance(tree, dict)
    evaluate_run(from_tree(EvaluateConfig, {str(k): v for k, v in tree.items()}, ""))
    return EXIT_OK


# -- doctor ---------------------------------------------------------------------------------------------------------
def doctor(arguments: List[str]) -> int:
    """Say whether staggered resets would help a task or would have helped a run."""
    from rl_stagger.doctor import DoctorConfig, examine

    if any(a in ("-h", "--help") for a in arguments):
        print(DoctorConfig.usage(), end="")
        return EXIT_OK
    examine(arguments)
    return EXIT_OK


# -- play -----------------------------------------------------------------------------------------------------------
def play(arguments: List[str]) -> int:
    """Run a policy in one environment and film it."""
    from rl_stagger.play import play as play_run

    return play_run(arguments)


# -- check ----------------------------------------------------------------------------------------------------------
def check(arguments: List[str]) -> int:
    """Say whether an environment keeps the contract of envs/base.py."""
    from rl_stagger.envs.check import main as check_main

    return check_main(arguments)


# -- errors ---------------------------------------------------------------------------------------------------------
def _guarded(call: Callable[[], int], sweep_dir: Optional[Path] = None) -> int:
    """Run `call`; our own errors become one line and an exit code, in a sweep also a failed job's summary."""
    try:
        return call()
    except (ConfigError, CapabilityError, CheckpointError) as error:
        code, text = EXIT_USAGE, str(error)
    except NonFiniteError as error:
        code, text = EXIT_NON_FINITE, str(error)
    except ContractError as error:
        code, text = EXIT_FAILED, f"the environment does not keep its contract: {error}"
    except SimulatorError as error:
        code, text = EXIT_FAILED, str(error)
    except KeyboardInterrupt:
        return _complain("stopped at once, without saving; earlier checkpoints are as they were", EXIT_STOPPED)
    except Exception as error:
        if sweep_dir is None:
            raise
        import traceback

        traceback.print_exc()
        code, text = EXIT_FAILED, f"{type(error).__name__}: {error}"
    if sweep_dir is not None:
        _write_failed(sweep_dir, text)
    return _complain(text, code)


def _write_failed(sweep_dir: Path, text: str) -> None:
    """A sweep's table shows this job as failed, even if it fell before its run began."""
    from rl_stagger.run_dir import write_json

    path = sweep_dir / "summary.json"
    if not path.exists():
        sweep_dir.mkdir(parents=True, exist_ok=True)
        write_json(path, {"status": "failed", "run_dir": str(sweep_dir), "error": text})


def _note_overrides(sweep_dir: Path, overrides: Sequence[str]) -> None:
    """What distinguishes this job from its neighbours, for the sweep's table."""
    from rl_stagger.run_dir import write_json

    path = sweep_dir / "summary.json"
    if path.exists():
        write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "overrides": list(overrides)})


def _complain(text: str, code: int) -> int:
    print(f"rl-stagger: {text}", file=sys.stderr)
    return code
