"""A trained policy, from a checkpoint: on its own, or in the environment that it was trained in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import torch

from rl_stagger.checkpoint import load_checkpoint, resolve_resume
from rl_stagger.config import Config, build_config
from rl_stagger.envs.base import Box, Discrete, EnvSpec, VecEnv
from rl_stagger.envs.phase_encoding import wrap_phase_encoding
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import ConfigError
from rl_stagger.models.actor_critic import ActorCritic


def load_policy(run: Union[str, Path], device: Union[torch.device, str] = "cpu") -> ActorCritic:
    """The actor-critic of a run directory (its newest checkpoint) or of one checkpoint, normalisers included.

    `policy.act_mode(obs)` is the deterministic action as the environment gets it, `policy.act(obs).env_action` one that
    is sampled; `obs` maps each observation group to [N, ...]. Raises CheckpointError for a missing or damaged file.
    """
    trained = load_run(run)
    return trained_model(spec_from_tree(trained.state["spec"]), trained, device)


class TrainedRun(NamedTuple):
    """A checkpoint and the settings that it was trained with."""

    checkpoint: Path
    state: Dict[str, Any]
    """As `load_checkpoint` gives it."""
    config: Config


def load_run(run: Union[str, Path], key: str = "resume") -> TrainedRun:
    """Of "latest" (under runs/), a run directory or a checkpoint. `key`: what errors call the setting."""
    checkpoint = resolve_resume(str(run), Path("runs"), key)
    state = load_checkpoint(checkpoint)
    return TrainedRun(checkpoint, state, build_config({**state["config"], "resume": None}))


def trained_model(spec: EnvSpec, trained: TrainedRun, device: Union[torch.device, str]) -> ActorCritic:
    """The actor-critic for `spec`, normalisers included, its parameters frozen."""
    model = ActorCritic(spec, trained.config.model)
    model.load_state_dict(trained.state["model"])
    return model.to(device).eval().requires_grad_(False)


def trained_env(
    trained: TrainedRun, num_envs: int, device: str, seed: int, settings: Optional[Dict[str, Any]] = None
) -> Tuple[VecEnv, ActorCritic]:
    """The run's task anew, for judging: with its phase encoding, without its reset rule, curricula frozen at what the
    training had reached; and the policy. `settings` of the task count over the run's.

    Raises ConfigError where with them the policy does not fit the task any more.
    """
    task = trained.config.task
    in_force = {**task.settings, **(settings or {})}
    try:
        env = make_env(task.name, num_envs, device, seed, **in_force)
    except (ValueError, TypeError) as error:
        if not settings or isinstance(error, ConfigError):
            raise  # nothing that was asked for now
        raise ConfigError(f"task {task.name} with settings {in_force}: {error}") from error
    try:
        env = wrap_phase_encoding(env, trained.config.phase_encoding)
        _check_fit(spec_from_tree(trained.state["spec"]), env.spec)
        env.load_curriculum((trained.state.get("env") or {}).get("env") or {})
        env.set_evaluation(True)
        return env, trained_model(env.spec, trained, env.device)
    except BaseException:
        env.close()
        raise


def _check_fit(trained: EnvSpec, now: EnvSpec) -> None:
    """ConfigError unless what the policy reads and does is what it was; the time limit may differ."""
    was, here = spec_to_tree(trained), spec_to_tree(now)
    for name in was.keys() - {"horizon_steps"}:
        if was[name] != here[name]:
            raise ConfigError(
                f"task.settings: the task now has {name} {here[name]}, the policy was trained with {was[name]}"
            )


def spec_to_tree(spec: EnvSpec) -> Dict[str, Any]:
    """What a checkpoint says of the environment's shapes, as plain values."""
    action = spec.action
    if isinstance(action, Discrete):
        described: Dict[str, Any] = {"n": action.n}
    else:
        bounds = [list(b) if isinstance(b, (list, tuple)) else b for b in (action.low, action.high)]
        described = {"size": action.size, "low": bounds[0], "high": bounds[1]}
    shapes = {name: list(shape) for name, shape in spec.obs_shapes.items()}
    return {
        "obs_shapes": shapes,
        "action": described,
        "horizon_steps": spec.horizon_steps,
        "phase_columns": dict(spec.phase_columns),
        "uint8": sorted(name for name in spec.obs_shapes if spec.obs_dtype(name) == torch.uint8),
    }


def spec_from_tree(tree: Dict[str, Any]) -> EnvSpec:
    """Older trees without phase columns or uint8 groups are of environments that have none."""
    action = Discrete(**tree["action"]) if "n" in tree["action"] else Box(**tree["action"])
    shapes = {name: tuple(shape) for name, shape in tree["obs_shapes"].items()}
    dtypes = dict.fromkeys(tree.get("uint8", ()), torch.uint8)
    return EnvSpec(shapes, action, tree["horizon_steps"], dict(tree.get("phase_columns", {})), dtypes)
