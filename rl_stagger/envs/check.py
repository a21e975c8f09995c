"""Does an environment keep the contract of `envs/base.py`?

    python -m rl_stagger.envs.check task=<task> [num_envs=8] [device=cpu] [seed=0] [steps=...] [settings.<name>=...]

or `check_env(env)`. docs/check.md says what each check looks at.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch

from rl_stagger.envs import check_rows, check_state, check_steps
from rl_stagger.envs.base import VecEnv
from rl_stagger.envs.check_probe import Probe, Skip
from rl_stagger.envs.check_report import ERROR, SKIPPED, Finding, Report, last_line, print_report
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CapabilityError, ConfigError, nearest
from rl_stagger.rng import global_rng_state, set_global_rng_state

USAGE = """usage: rl-stagger check task=<task> [num_envs=8] [device=cpu] [seed=0] [steps=...] [tolerance=0]
                        [settings.<name>=<value> ...]

Says whether an environment keeps the contract of rl_stagger/envs/base.py: task=skill_chain, task=<simulator>/<its task>
or task=module:Class, with settings of the task's own. steps: of the long run (default: an episode and a little more).
tolerance: by how much two replays may differ, for simulators that are not bitwise reproducible.
Exit codes: 0 kept, 1 broken, 2 a setting cannot work.
"""

Check = Callable[[Probe], Iterable[Finding]]

CHECKS: Dict[str, Check] = {
    "spec": check_steps.check_spec,
    "shapes": check_steps.check_shapes,
    "info": check_steps.check_info,
    "finite": check_steps.check_finite,
    "flags": check_steps.check_flags,
    "terminations": check_steps.check_terminations,
    "clock": check_steps.check_clock,
    "state": check_state.check_state,
    "state_rows": check_state.check_state_rows,
    "clock_write": check_rows.check_clock_write,
    "time_limit": check_steps.check_time_limit,
    "seeds": check_state.check_seeds,
    "partial_reset": check_rows.check_partial_reset,
    "reset_obs": check_rows.check_reset_obs,
    "manual_reset": check_rows.check_manual_reset,
    "dummy_steps": check_rows.check_dummy_steps,
    "final_obs": check_rows.check_final_obs,
    "resume": check_state.check_resume,
    "capabilities": check_state.check_capabilities,
    "kept_tensors": check_state.check_kept_tensors,
    "caller_writes": check_state.check_caller_writes,
    "masks": check_rows.check_masks,
    "actions": check_rows.check_actions,
}
"""In the order in which they run: later ones build on what earlier ones made sure of, and the roughest come last."""

FOUNDATIONS = ("spec", "shapes")
"""Where one of these fails nothing else can be looked at."""


def check_env(
    env: VecEnv,
    *,
    make: Optional[Callable[[int], VecEnv]] = None,
    steps: Optional[int] = None,
    tolerance: float = 0.0,
) -> Report:
    """Examine `env`, which is reset, stepped and written to; it is left reset.

    `make(seed)` builds another one like it (default: as `make_env` built this one, where it did). `steps`: of the long
    run; default an episode and a little more, at most 20 s. `tolerance`: by how much two replays may differ.
    An environment that raises does not make this raise.
    """
    start = time.monotonic()
    outer = global_rng_state()
    probe = Probe(env, make or _maker(env), steps, tolerance)
    findings: List[Finding] = []
    try:
        with torch.no_grad():
            for name, check in CHECKS.items():
                broken = [base for base in FOUNDATIONS if base in probe.failed]
                if broken:
                    findings.append(Finding(SKIPPED, name, f"nothing can be said before '{broken[0]}' is mended"))
                else:
                    findings += run_check(probe, name, check)
            _leave(probe)
    finally:
        set_global_rng_state(outer)
    return Report(_title(env), tuple(findings), time.monotonic() - start)


def run_check(probe: Probe, name: str, check: Check) -> List[Finding]:
    """What `check` finds. What it raises is a finding as well."""
    probe.check = name
    found: List[Finding] = []
    try:
        found += check(probe)
    except Skip as skip:
        found.append(probe.skipped(str(skip)))
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        rule = "what the checker did here is within the contract"
        found.append(Finding(ERROR, name, f"{type(error).__name__}: {text}", rule, last_line(probe.env, error)))
    if any(finding.level == ERROR for finding in found):
        probe.failed.add(name)
    return found


def _maker(env: VecEnv) -> Optional[Callable[[int], VecEnv]]:
    """Builds the environment again with another seed, where `make_env` built it."""
    made_from = getattr(env, "made_from", None)
    if made_from is None or getattr(env, "one_per_process", False):
        return None
    task, settings = made_from
    return lambda seed: make_env(task, env.num_envs, env.device, seed, **settings)


def _leave(probe: Probe) -> None:
    """A usable environment for the caller, if it can be had."""
    try:
        probe.reset_all()
    except Exception:  # a finding says so already
        return


def _title(env: VecEnv) -> str:
    name = type(env).__name__ if env.unwrapped is env else f"{type(env).__name__} around {type(env.unwrapped).__name__}"
    horizon = getattr(getattr(env, "spec", None), "horizon_steps", None)
    return f"{name}, num_envs={getattr(env, 'num_envs', '?')} on {getattr(env, 'device', '?')}, H={horizon}"


# -- the command ----------------------------------------------------------------------------------------------------
def main(arguments: List[str]) -> int:
    """`rl-stagger check ...`; returns the exit code."""
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(USAGE, end="")
        return 0 if arguments else 2
    try:
        report = _examine(arguments)
    except (ConfigError, CapabilityError) as error:
        print(f"rl-stagger: {error}", file=sys.stderr)
        return 2
    print_report(report)
    return 0 if report.ok else 1


def _examine(arguments: List[str]) -> Report:
    from rl_stagger.device import pick_device

    own, settings = parse(arguments)
    task, tolerance = own.pop("task"), own.pop("tolerance")
    steps, device = own.pop("steps"), pick_device(own["device"])
    num_envs, seed = own["num_envs"], own["seed"]
    try:
        env = make_env(task, num_envs, device, seed, **settings)
    except (ConfigError, CapabilityError):
        raise
    except Exception as error:
        if ":" not in task:
            if isinstance(error, (ValueError, TypeError)):
                raise ConfigError(f"task {task} with settings {settings}: {error}") from error
            raise
        text = (str(error).strip() or "no message").splitlines()[0]
        where = _raised_at(error)
        finding = Finding(
            ERROR, "build", f"{type(error).__name__}: {text}", "Class(num_envs, device, seed, ...)", where
        )
        return Report(f"{task}, num_envs={num_envs} on {device}", (finding,), 0.0)
    try:
        return check_env(env, steps=steps, tolerance=tolerance)
    finally:
        env.close()


def _raised_at(error: BaseException) -> str:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def parse(arguments: List[str]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """(task, num_envs, device, seed, steps, tolerance; the task's settings). ConfigError for what is neither."""
    from omegaconf import OmegaConf

    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"'{argument}': settings are given as key=value, e.g. num_envs=4")
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(arguments))
    assert isinstance(tree, dict)
    settings = {**(tree.pop("settings", None) or {})}
    own: Dict[str, Any] = {"task": None, "num_envs": 8, "device": "cpu", "seed": 0, "steps": None, "tolerance": 0.0}
    for key, value in tree.items():
        if key not in own:
            raise ConfigError(f"{key}={value!r}: {nearest(str(key), [*own, 'settings.<name>'])}")
        own[str(key)] = value
    for key, least in (("num_envs", 1), ("seed", 0), ("steps", 1)):
        value = own[key]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{key}={value!r}: a whole number of at least {least}")
    if not isinstance(own["tolerance"], (int, float)) or not 0.0 <= own["tolerance"] < float("inf"):
        raise ConfigError(f"tolerance={own['tolerance']!r}: a number of at least 0, e.g. 1e-5")
    if not isinstance(own["task"], str):
        raise ConfigError(f"which task?\n{USAGE}".rstrip())
    return own, settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
