"""What the hosts share: the measures, the rule as settings, both directions of translation.

`HostEnv` is a host's environment under our contract; `HostView` is an environment of ours, as one of the host's.
A staggered host environment is the one around the other: HostView(StaggeredResets(HostEnv(host))).

Actions that come from a host's trainer go through to its environment untouched.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, FrozenSet, Iterator, Optional

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, Discrete, EnvSpec, Obs, Step, VecEnv, check_mask
from rl_stagger.errors import ConfigError
from rl_stagger.resets.coverage import histogram_coverage, phase_bins, phase_histogram, total_variation
from rl_stagger.resets.rule import StaggeredResets

HostActor = Callable[[Any], Any]
"""The host's observations -> the host's actions."""


class Measures:
    """How evenly the batches are spread, from counts of the last two rollouts that stay on the device.

    `add` costs one histogram a step and reads nothing; `read` is the one place where the host waits.
    """

    def __init__(self, horizon_steps: Optional[int], rollout_steps: int, device: torch.device) -> None:
        self.horizon_steps, self.rollout_steps = horizon_steps, rollout_steps
        self.num_bins = phase_bins(horizon_steps, rollout_steps) if horizon_steps else 1
        self.steps_seen = 0
        self._counts = torch.zeros(2 * rollout_steps, self.num_bins, device=device)
        self._resets = torch.zeros(2 * rollout_steps, dtype=torch.int64, device=device)

    def add(self, phase: Tensor, valid: Tensor, was_reset: Tensor) -> None:
        """One step: `phase` [N] int64 before it, `valid` and `was_reset` [N] bool."""
        row = self.steps_seen % (2 * self.rollout_steps)
        self.steps_seen += 1
        self._resets[row] = was_reset.sum()
        if self.horizon_steps is not None:
            shares = phase_histogram(phase, self.horizon_steps, self.num_bins, valid)
            self._counts[row] = shares * valid.sum()

    def histogram(self, rollouts_back: int = 0) -> Tensor:
        """Share of each phase bin in the last K steps (1: in the K before); [bins], zeros where nothing was seen."""
        counts = self._counts[self._rows(rollouts_back)].sum(0)
        return counts / counts.sum().clamp(min=1.0)

    def on_device(self) -> Dict[str, Tensor]:
        """Scalars of the last K steps; NaN where there is nothing to say yet."""
        unknown = torch.full((), float("nan"), device=self._counts.device)
        rows = self._resets[self._rows(0)]
        measures = {
            "batch/coverage": unknown,
            "batch/tv_distance": unknown,
            "resets/per_step_max": rows.max().to(torch.float32) if self.steps_seen else unknown,
            "resets/per_step_mean": rows.to(torch.float32).mean() if self.steps_seen else unknown,
        }
        if self.horizon_steps is not None and self.steps_seen:
            measures["batch/coverage"] = histogram_coverage(self.histogram())
            if self.steps_seen >= 2 * self.rollout_steps:
                measures["batch/tv_distance"] = total_variation(self.histogram(), self.histogram(1))
        return measures

    def read(self) -> Dict[str, Any]:
        """`on_device` and the histogram as Python numbers, None where unknown. The host waits."""
        measures: Dict[str, Any] = {name: float(value) for name, value in self.on_device().items()}
        measures = {name: None if value != value else value for name, value in measures.items()}
        known = self.horizon_steps is not None and self.steps_seen > 0
        measures["batch/phase_histogram"] = self.histogram().tolist() if known else None
        return measures

    def _rows(self, rollouts_back: int) -> Any:
        last = self.steps_seen - rollouts_back * self.rollout_steps
        first = max(0, last - self.rollout_steps)
        return [t % (2 * self.rollout_steps) for t in range(first, last)]


@dataclass(frozen=True)
class Rule:
    """What a call of `stagger` asked for."""

    rollout_steps: int
    horizon_steps: Optional[int] = None
    actor: Optional[HostActor] = None
    settings: Dict[str, Any] = field(default_factory=dict)

    def around(self, env: VecEnv) -> StaggeredResets:
        """`env` under the rule; random actions of the host's in the warm-up unless an `actor` was given."""
        settings, host = dict(self.settings), env if isinstance(env, HostEnv) else None
        actor = self.actor
        if actor is None and host is not None and host.samples_actions:
            actor = host.sample_action
        if actor is not None:
            settings.setdefault("warmup_actions", "policy")
        staggered = StaggeredResets(env, self.rollout_steps, **settings)
        if host is not None:
            host.sampling_seed = int(settings.get("seed", 0)) + 1
            if actor is not None:
                staggered.actor = lambda obs, act=actor, look=host.to_host: act(look(obs))
        elif actor is not None:
            staggered.actor = actor
        return staggered


class HostEnv(VecEnv):
    """A host's environment under our contract; the episode clock is counted here.

    Subclasses write `_reset_all`, `_step` and, with PARTIAL_RESET, `_reset_rows`. `step` takes the host's own actions.
    """

    samples_actions = False
    """True where `sample_action` draws from the host's own action space."""

    def __init__(
        self, host: Any, num_envs: int, device: Any, spec: EnvSpec, capabilities: FrozenSet[Capability]
    ) -> None:
        self.host, self.num_envs, self.device = host, num_envs, torch.device(device)
        self.spec, self.capabilities = spec, capabilities
        self.sampling_seed = 0
        self.clock = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        """[N] int64, steps since each reset."""

    # -- what a host's adapter writes ----------------------------------------------------------------------------
    def _reset_all(self) -> Obs:
        raise NotImplementedError

    def _reset_rows(self, env_mask: Tensor) -> Obs:
        """All N observations after a reset of the masked rows."""
        raise self.lacks(Capability.PARTIAL_RESET)

    def _step(self, action: Any) -> Step:
        raise NotImplementedError

    def to_host(self, obs: Obs) -> Any:
        """Our observations as the host gives them."""
        raise NotImplementedError

    def sample_action(self, obs: Any) -> Any:
        """One random action of the host's for all N environments."""
        raise NotImplementedError

    # -- the contract --------------------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self.clock.clone()

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        if env_mask is None:
            self.clock = torch.zeros_like(self.clock)
            return self._reset_all()
        mask = check_mask(env_mask, self.num_envs, self.device)
        if Capability.PARTIAL_RESET not in self.capabilities:
            raise self.lacks(Capability.PARTIAL_RESET)
        obs = self._reset_rows(mask)
        self.clock = torch.where(mask, 0, self.clock)
        return obs

    def step(self, action: Any) -> Step:
        step = self._step(action)
        self.clock = torch.where(step.done, 0, self.clock + step.valid)
        return step

    def close(self) -> None:
        self.host.close()


class HostView:
    """What every environment that we hand to a host has beside the host's own type."""

    vec_env: VecEnv
    """The environment inside, under our contract."""
    host: Any = None
    """The host's environment it was made from; None for one of our own."""

    def bind(self, vec_env: VecEnv, host: Any = None) -> None:
        """To be called first in the constructor. Raises ConfigError for a rule that no host's trainer can follow."""
        rule = vec_env if isinstance(vec_env, StaggeredResets) else None
        if rule is not None:
            _refuse_what_needs_our_trainer(rule)
        self.vec_env, self.host = vec_env, host
        self._view_obs: Optional[Obs] = None
        self._measures: Optional[Measures] = None
        if rule is not None:
            self._measures = Measures(rule.spec.horizon_steps, rule.rollout_steps, rule.device)
        self._whole = torch.zeros(vec_env.num_envs, dtype=torch.bool, device=vec_env.device)
        self._reset_between = torch.zeros_like(self._whole)

    @property
    def stagger(self) -> Optional[StaggeredResets]:
        """The reset rule inside; None where there is none."""
        return self.vec_env if isinstance(self.vec_env, StaggeredResets) else None

    def measures(self) -> Dict[str, Any]:
        """Spread of the last `rollout_steps` steps as Python numbers; None where there is nothing to say yet."""
        rule = self.stagger
        if rule is None or self._measures is None:
            raise ConfigError(
                "measures(): no reset rule here; stagger(env, rollout_steps=...), bring_up='none' to compare"
            )
        return {**self._measures.read(), "steps/warmup": rule.warmup_steps}

    def restaggered(self, rule: Rule, **options: Any) -> Any:
        """The same kind of view around the environment inside, now under `rule`."""
        if rule.horizon_steps not in (None, self.vec_env.spec.horizon_steps):
            raise ConfigError(
                f"horizon_steps={rule.horizon_steps}: the environment says its own, {self.vec_env.spec.horizon_steps}"
            )
        return type(self)(rule.around(self.vec_env), **options)  # type: ignore[call-arg]

    # -- for the subclasses --------------------------------------------------------------------------------------
    def view_reset(self) -> Obs:
        """Bring-up, or a plain reset where there is no rule."""
        with _as_usual():
            obs = self.vec_env.reset()
            self.mark_whole()
            self._view_obs = obs
        return obs

    def mark_whole(self) -> None:
        """The running episodes that nobody has begun or shortened before now are the whole ones."""
        self._whole = (self.vec_env.phase_steps == 0) & (self.vec_env.elapsed_steps == 0)

    def view_reset_rows(self, env_mask: Tensor) -> Obs:
        """A plain reset of the masked rows, between two steps."""
        with _as_usual():
            mask = env_mask.to(self.vec_env.device)
            obs = self.vec_env.reset(mask)
            self._whole, self._reset_between = self._whole | mask, self._reset_between | mask
            self._view_obs = obs
        return obs

    def view_obs(self) -> Obs:
        """The observations that the next action belongs to; the bring-up happens here if it has not."""
        return self.view_reset() if self._view_obs is None else self._view_obs

    def view_step(self, action: Any) -> Step:
        """One step, measured. `info["full"]` [N] bool: episodes that ended here and were seen from their first step."""
        self.view_obs()
        with _as_usual():
            phase = self.vec_env.phase_steps
            step = self.vec_env.step(action)
            cut = step.info.get("cut")
            step.info["full"] = step.done & self._whole if cut is None else step.done & self._whole & ~cut
            self._whole = self._whole | step.done
            if self._measures is not None:
                self._measures.add(phase, step.valid, step.info["reset"] | self._reset_between)
                self._reset_between = torch.zeros_like(self._reset_between)
                self._plan()
        self._view_obs = step.obs
        return step

    def _plan(self) -> None:
        """Schedules go by rollouts: K steps make one, whatever the host's trainer does."""
        rule = self.stagger
        assert rule is not None
        assert self._measures is not None
        if self._measures.steps_seen % rule.rollout_steps == 0:
            rule.plan(self._measures.steps_seen // rule.rollout_steps, rule.rollout_steps)


def _refuse_what_needs_our_trainer(rule: StaggeredResets) -> None:
    c = rule.config
    for name, value, why in (
        ("gate", c.gate, "frozen steps must be masked from learning, which other trainers do not; use 'immediate'"),
        ("allocation", c.allocation, "it follows advantages, which only our own trainer shows; use 'density'"),
        ("num_groups_by_return", c.num_groups_by_return, "only our own trainer tells returns; use num_groups_schedule"),
    ):
        if value in ("block", "adaptive") or (name == "num_groups_by_return" and value is not None):
            raise ConfigError(f"reset.{name}={value!r}: {why}")


@contextlib.contextmanager
def _as_usual() -> Iterator[None]:
    """No gradients, and no inference tensors left in anybody's buffers (rsl_rl collects under inference_mode)."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def horizon_in_force(asked: Optional[int], found: Optional[int]) -> Optional[int]:
    """H: what the environment says, or what was asked for where it says nothing. ConfigError where they differ."""
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise ConfigError(f"horizon_steps={asked!r}: a whole number of at least 1, or None")
    if asked is not None and found is not None and asked != found:
        raise ConfigError(f"horizon_steps={asked}: the environment says its own, {found}")
    return found if asked is None else asked


def attribute_of_host(view: Any, name: str) -> Any:
    """A view's `__getattr__`: what its host's contract does not ask for comes from the host's environment."""
    host = view.__dict__.get("host")
    if host is None or name.startswith("__"):
        raise AttributeError(f"{type(view).__name__} has no attribute '{name}'")
    return getattr(host, name)


# -- Gymnasium spaces, for the hosts that speak them -------------------------------------------------------------------
def spec_of_spaces(obs_space: Any, action_space: Any, horizon_steps: Optional[int]) -> EnvSpec:
    """Our spec of one environment's Gymnasium spaces. An action space that we have no word for is a Box of its size:
    actions pass through untouched and warm-ups sample the host's own space."""
    shapes = {group: tuple(space.shape) for group, _, space in obs_groups(obs_space)}
    kind = type(action_space).__name__
    if kind == "Discrete" and int(action_space.n) > 1:
        return EnvSpec(shapes, Discrete(int(action_space.n)), horizon_steps)
    size = 1
    for length in action_space.shape or ():
        size *= int(length)
    if kind == "Box":
        low, high = (bound.reshape(-1).tolist() for bound in (action_space.low, action_space.high))
        return EnvSpec(shapes, Box(size, low, high), horizon_steps)
    return EnvSpec(shapes, Box(size), horizon_steps)


def obs_groups(obs_space: Any) -> Any:
    """(our group, the host's key or None, space) of a Box-like space or of a flat Dict of them.

    Without a key "policy", the first key is called so. Raises ConfigError for nested or other spaces.
    """
    parts = dict(obs_space.spaces) if type(obs_space).__name__ == "Dict" else {None: obs_space}
    for key, space in parts.items():
        if getattr(space, "shape", None) is None:
            raise ConfigError(f"observation space {key or ''} {space}: only arrays, or one flat Dict of arrays")
    first = next(iter(parts))
    return [
        ("policy" if key == "policy" or ("policy" not in parts and key == first) else str(key), key, space)
        for key, space in parts.items()
    ]


def tensors_of_arrays(obs: Any, groups: Any) -> Obs:
    """The host's arrays [N, ...] as our groups: floats keep their type, other numbers become float (float64 where a
    float32 would lose digits). Copies: hosts reuse their buffers."""
    found: Obs = {}
    for group, key, _ in groups:
        x = torch.as_tensor(obs if key is None else obs[key]).clone()
        if not x.is_floating_point():
            x = x.to(torch.float32 if x.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16) else torch.float64)
        found[group] = x
    return found


def arrays_of_tensors(obs: Obs, groups: Any) -> Any:
    """`tensors_of_arrays` backwards: the host's keys and dtypes, as NumPy arrays."""
    arrays = {key: obs[group].cpu().numpy().astype(space.dtype) for group, key, space in groups}
    return arrays.get(None, arrays)


def gymnasium_spaces(spec: EnvSpec, action_bound: Optional[float] = None) -> Any:
    """(observation space, action space) of one environment of ours. `action_bound` stands in for bounds that are not
    there; without it they are infinite."""
    import numpy as np
    from gymnasium import spaces

    parts: Dict[str, Any] = {
        name: spaces.Box(0, 255, shape, np.uint8)
        if spec.obs_dtype(name) == torch.uint8
        else spaces.Box(-np.inf, np.inf, shape, np.float32)
        for name, shape in spec.obs_shapes.items()
    }
    obs_space = parts["policy"] if len(parts) == 1 else spaces.Dict(parts)
    if isinstance(spec.action, Discrete):
        return obs_space, spaces.Discrete(spec.action.n)
    low, high = (bound.numpy() for bound in spec.action.bounds("cpu"))
    if action_bound is not None:
        low, high = np.maximum(low, -action_bound), np.minimum(high, action_bound)
    return obs_space, spaces.Box(low, high, dtype=np.float32)


def action_of_array(action: Any, spec: EnvSpec, device: torch.device) -> Tensor:
    """A host's NumPy actions as the contract asks: [N, A] float32 or [N] int64."""
    x = torch.as_tensor(action, device=device)
    if isinstance(spec.action, Discrete):
        return x.reshape(-1).to(torch.int64)
    return x.reshape(x.shape[0], -1).to(torch.float32)
