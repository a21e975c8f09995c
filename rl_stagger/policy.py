"""A trained policy on its own: from a checkpoint, without its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Union

import torch

from rl_stagger.checkpoint import load_checkpoint, resolve_resume
from rl_stagger.config import build_config
from rl_stagger.envs.base import Box, Discrete, EnvSpec
from rl_stagger.models.actor_critic import ActorCritic


def load_policy(run: Union[str, Path], device: Union[torch.device, str] = "cpu") -> ActorCritic:
    """The actor-critic of a run directory (its newest checkpoint) or of one checkpoint, normalisers included.

    `policy.act_mode(obs)` is the deterministic action as the environment gets it, `policy.act(obs).env_action` one that
    is sampled; `obs` maps each observation group to [N, ...]. Raises CheckpointError for a missing or damaged file.
    """
    state = load_checkpoint(resolve_resume(str(run), Path("runs")))
    policy = ActorCritic(spec_from_tree(state["spec"]), build_config({**state["config"], "resume": None}).model)
    policy.load_state_dict(state["model"])
    return policy.to(device).eval().requires_grad_(False)


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
    }


def spec_from_tree(tree: Dict[str, Any]) -> EnvSpec:
    """Older trees without phase columns are of environments that have none."""
    action = Discrete(**tree["action"]) if "n" in tree["action"] else Box(**tree["action"])
    shapes = {name: tuple(shape) for name, shape in tree["obs_shapes"].items()}
    return EnvSpec(shapes, action, tree["horizon_steps"], dict(tree.get("phase_columns", {})))
