"""The episode's clock as part of the observation: a wrapper that appends it to chosen groups.

With a time limit the value of a state depends on the time left, which many tasks do not show (Pardo et al. 2018, "Time
Limits in Reinforcement Learning", arXiv 1712.00378). Shapes: N environments, F columns.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Literal, Optional, Tuple, get_args

import torch
from torch import Tensor

from rl_stagger.envs.base import Obs, Step, VecEnv, check_obs, check_step
from rl_stagger.errors import ConfigError, nearest

Kind = Literal["none", "linear", "fourier"]


@dataclass(frozen=True)
class PhaseEncodingConfig:
    """What of the clock the nets see, with u = elapsed steps / H."""

    kind: Kind = "none"
    """linear: u itself. fourier: sin and cos of 2 pi k u, in which an episode's end at H looks like its start."""
    groups: Tuple[str, ...] = ("policy", "critic")
    """Observation groups that get the columns; those that the task does not have are passed over. Beside a group that
    cannot be made longer, an image, they stand as a group of their own, "<name>/phase"."""
    num_frequencies: int = 2
    """fourier: k = 1 .. num_frequencies."""
    critic_l2: float = 0.0
    """Weight in the loss of the squared first-layer weights by which the critic reads the columns."""

    def check(self) -> List[Tuple[str, object, str]]:
        """(field, value, what is right) of every setting that cannot work."""
        faults: List[Tuple[str, object, str]] = []
        if self.kind not in get_args(Kind):
            faults.append(("kind", self.kind, nearest(self.kind, get_args(Kind))))
        if not 1 <= self.num_frequencies <= 1000:
            faults.append(("num_frequencies", self.num_frequencies, "between 1 and 1000"))
        if not 0.0 <= self.critic_l2 < math.inf:
            faults.append(("critic_l2", self.critic_l2, "at least 0, e.g. 0.001"))
        elif self.critic_l2 > 0.0 and self.kind == "none":
            faults.append(("critic_l2", self.critic_l2, "0 where nothing is encoded, or phase_encoding.kind=linear"))
        if not self.groups and self.kind != "none":
            faults.append(("groups", "[]", "at least one observation group, e.g. [policy,critic]"))
        return faults


def encode_phase(elapsed_steps: Tensor, horizon_steps: int, kind: Kind, num_frequencies: int) -> Tensor:
    """[N] clocks in steps -> [N, F] float32, with u = clock / H clamped to [0, 1].

    none: F = 0. linear: u. fourier: sin(2 pi k u) for k = 1 .. n, then cos(2 pi k u) for them; F = 2 n.
    """
    u = (elapsed_steps.to(torch.float32) / horizon_steps).clamp(0.0, 1.0).unsqueeze(1)
    if kind == "linear":
        return u
    if kind == "fourier":
        k = torch.arange(1, num_frequencies + 1, dtype=torch.float32, device=u.device)
        angle = 2.0 * math.pi * k * u
        return torch.cat([angle.sin(), angle.cos()], dim=1)
    return u[:, :0]


class PhaseEncoding(VecEnv):
    """Any VecEnv with its clock at the end of some observation groups, or beside them; itself a VecEnv.

    It goes inside StaggeredResets. What is shown is `elapsed_steps`, which the time limit looks at, not the true phase:
    they differ after `bring_up=clock`. `final_obs` shows the clock that the episode ended with. A clock written by
    `set_elapsed_steps` shows from the next observation on. Raises ConfigError for a task without time limit and for
    groups that no net reads.
    """

    def __init__(self, env: VecEnv, config: PhaseEncodingConfig) -> None:
        for name, value, right in config.check():
            raise ConfigError(f"phase_encoding.{name}={value}: {right}")
        self.env, self.config = env, config
        self.num_envs, self.device, self.capabilities = env.num_envs, env.device, env.capabilities
        self.made_from, self.difficulty_levels = env.made_from, env.difficulty_levels
        horizon, shapes = env.spec.horizon_steps, env.spec.obs_shapes
        if horizon is None:
            raise ConfigError(
                f"phase_encoding.kind={config.kind}: this task has no time limit to measure phases by; give it a "
                "horizon_steps or use kind=none"
            )
        self.horizon_steps: int = horizon
        self._groups = _groups_to_encode(env, config)
        num_columns = self._columns(torch.zeros(1, dtype=torch.int64)).shape[1]
        longer = {
            target: (shapes[name][0] + num_columns if target == name else num_columns,)
            for name, target in self._groups.items()
        }
        columns_of = dict.fromkeys(self._groups.values(), num_columns)
        self.spec = dataclasses.replace(env.spec, obs_shapes={**shapes, **longer}, phase_columns=columns_of)
        self._checked = False

    # -- what is encoded -----------------------------------------------------------------------------------------
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        obs = self.env.reset(env_mask)
        check_obs("reset()", obs, self.env.spec, self.num_envs, self.device)
        return self._append(obs, self.env.elapsed_steps)

    def step(self, action: Tensor) -> Step:
        before = self.env.elapsed_steps
        step = self.env.step(action)
        if not self._checked:
            check_step(step, self.env.spec, self.num_envs, self.device)
            self._checked = True
        obs, final_obs = self._append(step.obs, self.env.elapsed_steps), step.final_obs
        if final_obs is not None:
            final_obs = self._append(final_obs, before + step.valid)
        return dataclasses.replace(step, obs=obs, final_obs=final_obs)

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        return self._append(self.env.set_state(state, env_mask), self.env.elapsed_steps)

    def _append(self, obs: Obs, elapsed_steps: Tensor) -> Obs:
        columns = self._columns(elapsed_steps)
        longer = {
            target: torch.cat([obs[name], columns.to(obs[name].dtype)], dim=1) if target == name else columns
            for name, target in self._groups.items()
        }
        return {**obs, **longer}

    def _columns(self, elapsed_steps: Tensor) -> Tensor:
        return encode_phase(elapsed_steps, self.horizon_steps, self.config.kind, self.config.num_frequencies)

    # -- what is passed on ---------------------------------------------------------------------------------------
    @property
    def unwrapped(self) -> VecEnv:
        return self.env.unwrapped

    @property
    def elapsed_steps(self) -> Tensor:
        return self.env.elapsed_steps

    @property
    def phase_steps(self) -> Tensor:
        return self.env.phase_steps

    def set_manual_reset(self, manual: bool) -> None:
        self.env.set_manual_reset(manual)

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        self.env.set_elapsed_steps(steps, env_mask)

    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        return self.env.get_state(env_mask)

    def seed(self, seed: int) -> None:
        self.env.seed(seed)

    def set_evaluation(self, evaluating: bool) -> None:
        self.env.set_evaluation(evaluating)

    def load_curriculum(self, state: Dict[str, Any]) -> None:
        self.env.load_curriculum(state)

    def set_difficulty(self, level: int) -> None:
        self.env.set_difficulty(level)

    def evaluation_cases(self) -> Dict[str, Tensor]:
        return self.env.evaluation_cases()

    def render(self, env_index: int = 0) -> Any:
        return self.env.render(env_index)

    def state_dict(self) -> Dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.env.load_state_dict(state)

    def close(self) -> None:
        self.env.close()


def wrap_phase_encoding(env: VecEnv, config: PhaseEncodingConfig) -> VecEnv:
    """`env` with the encoding that `config` asks for; `env` itself for kind=none and where it has that encoding.

    Raises ConfigError where it has another one.
    """
    if config.kind == "none" or (isinstance(env, PhaseEncoding) and env.config == config):
        return env
    return PhaseEncoding(env, config)


def encoding_in_force(env: VecEnv, asked: PhaseEncodingConfig, can_wrap: bool) -> PhaseEncodingConfig:
    """The encoding that a training in `env` (its reset rule taken off) will have: `env`'s own, else what is asked for.

    Raises ConfigError where `env` has another than is asked for, or none and it cannot be wrapped any more.
    """
    if isinstance(env, PhaseEncoding):
        if asked.kind != "none" and asked != env.config:
            raise ConfigError(f"phase_encoding={asked}: the environment given has {env.config} already; ask for one")
        return env.config
    if asked.kind != "none" and not can_wrap:
        raise ConfigError(
            f"phase_encoding.kind={asked.kind}: the StaggeredResets given holds no PhaseEncoding; wrap first: "
            "StaggeredResets(PhaseEncoding(env, PhaseEncodingConfig(...)), ...)"
        )
    return asked


def _groups_to_encode(env: VecEnv, config: PhaseEncodingConfig) -> Dict[str, str]:
    """The chosen groups that the task has -> the group that gets the columns: the same one, or "<name>/phase" beside
    what is no row of floats. ConfigError where they cannot be what was meant."""
    spec, shapes, asked = env.spec, env.spec.obs_shapes, f"phase_encoding.groups=[{','.join(config.groups)}]"
    targets: Dict[str, str] = {}
    found = tuple(name for name in shapes if name in config.groups)
    if not found:
        raise ConfigError(f"{asked}: this task has none of them; {nearest(config.groups[0], shapes)}")
    for name in found:
        if name not in spec.actor_groups + spec.critic_groups:
            readable = nearest(name, {*spec.actor_groups, *spec.critic_groups})
            raise ConfigError(f"{asked}: no net reads the observation group '{name}'; {readable}")
        appendable = len(shapes[name]) == 1 and spec.obs_dtype(name) == torch.float32
        targets[name] = name if appendable else f"{name}/phase"
        if targets[name] in spec.phase_columns:
            raise ConfigError(f"phase_encoding: observation group '{name}' is encoded already; wrap once")
    if config.critic_l2 > 0.0 and not set(found) & set(spec.critic_groups):
        reads = " and ".join(f"'{name}'" for name in spec.critic_groups)
        raise ConfigError(
            f"phase_encoding.critic_l2={config.critic_l2}: the critic reads group {reads}, which {asked} leaves out; "
            "add it or use 0"
        )
    return targets
