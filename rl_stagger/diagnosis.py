"""What the doctor measures: episodes, start states, phases, the cost of resets, what a training showed.

Shapes: N environments, D numbers of an observation, B parts of the horizon.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, VecEnv
from rl_stagger.resets.coverage import phase_bins
from rl_stagger.resets.nonstationarity import cyclic_index
from rl_stagger.summary import percentile

HAZARD_BINS = 10
MOST_WINDOWS = 50
MOST_OBS_NUMBERS = 1024
"""Of larger observations evenly chosen numbers are looked at."""
UNLIMITED_STEPS = 1000
"""How long a task without time limit is watched."""
CHECK_EVERY_STEPS = 32

Lines = Sequence[Mapping[str, Any]]


# -- episodes -------------------------------------------------------------------------------------------------------
class Profile(NamedTuple):
    """How first episodes go under one policy. Plain numbers."""

    policy: str
    episodes: int
    steps_watched: int
    median_steps: float
    """Of the episodes' lengths, as far as they were watched."""
    early_share: Optional[float]
    """Share of episodes that end before the time limit (within the steps watched); None without a time limit."""
    hazard: Tuple[Optional[float], ...]
    """[B] chance to end early in each tenth of the horizon, for those that reached it; None where nobody did."""
    start_spread: Optional[float]
    """Variance of first observations over that of whole episodes: 0 = all begin in one state, near 1 = starts cover
    what the policy visits. Median over the numbers of an observation; None where none of them varies."""
    phase_dependence: Optional[float]
    """Share of the observations' variance that lies between windows of K steps: what a batch of one window lacks."""


def hazards(lengths: Tensor, early: Tensor, censored: Tensor, span_steps: int, bins: int) -> List[Optional[float]]:
    """P(end early in bin | reached its first step) for each of `bins` equal parts of `span_steps`; None: nobody did.

    `lengths` [N] int64: steps of each first episode, or until watching stopped (`censored` [N] bool, which tells
    nothing about its last bin). `early` [N] bool: ended before the time limit. L steps end in step L - 1.
    """
    last = ((lengths - 1).clamp(min=0) * bins // span_steps).clamp(max=bins - 1)
    found: List[Optional[float]] = []
    for index in range(bins):
        at_risk = (last > index) | ((last == index) & ~censored)
        at_risk = at_risk & (lengths > 0)
        count = int(at_risk.sum())
        found.append(int((at_risk & early & (last == index)).sum()) / count if count else None)
    return found


def early_share_of(hazard: Sequence[Optional[float]]) -> float:
    """1 - prod(1 - h) over the bins that were reached (Kaplan and Meier, 1958): the plain share of early ends where
    every episode was watched to its end."""
    alive = 1.0
    for h in hazard:
        alive *= 1.0 - (h or 0.0)
    return 1.0 - alive


class ObsMoments:
    """Sums of observations [N, D] by window of an episode, kept on the device."""

    def __init__(self, first: Tensor) -> None:
        """`first`: the observations after a whole reset, [N, D]."""
        self.origin = first.to(torch.float64).mean(0)
        x = first.to(torch.float64) - self.origin
        self.start_variance = x.square().mean(0)
        self._sum, self._square, self._count = torch.zeros_like(x[0]), torch.zeros_like(x[0]), torch.zeros_like(x[0, 0])
        self._env_sum, self._env_count = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        self._windows: List[Tuple[Tensor, Tensor, Tensor]] = []

    def add(self, obs: Tensor, counted: Tensor) -> None:
        """One step's observations [N, D]; rows outside `counted` [N] bool do not count."""
        x = torch.where(counted.unsqueeze(1), obs.to(torch.float64) - self.origin, torch.zeros_like(self._env_sum))
        self._sum, self._square = self._sum + x.sum(0), self._square + x.square().sum(0)
        self._count = self._count + counted.sum()
        self._env_sum, self._env_count = self._env_sum + x, self._env_count + counted

    def close_window(self) -> None:
        """The steps since the last call are a window of their own."""
        rows, there = self._env_count.sum(), (self._env_count > 0).to(torch.float64)
        mean = self._env_sum.sum(0) / rows.clamp(min=1.0)
        env_mean = self._env_sum / self._env_count.clamp(min=1.0).unsqueeze(1)
        envs = there.sum()
        centre = (there.unsqueeze(1) * env_mean).sum(0) / envs.clamp(min=1.0)
        squares = (there.unsqueeze(1) * (env_mean - centre)).square().sum(0)
        error = squares / (envs - 1.0).clamp(min=1.0) / envs.clamp(min=1.0)
        self._windows.append((rows, mean, error))
        self._env_sum, self._env_count = torch.zeros_like(self._env_sum), torch.zeros_like(self._env_count)

    def read(self) -> Tuple[Optional[float], Optional[float]]:
        """(start spread, phase dependence), see Profile; None where no number of the observation varies.

        Phase dependence is the weighted variance of the windows' means, less what N environments would show by chance
        (the variance of their own means over N), over the whole variance; mean over the numbers that vary.
        """
        total = self._square / self._count.clamp(min=1.0) - (self._sum / self._count.clamp(min=1.0)).square()
        scale = self.origin.square() + self._square / self._count.clamp(min=1.0)
        varies = total > 1e-10 * scale
        if not bool(varies.any()):
            return None, None
        spread = float((self.start_variance[varies] / total[varies]).median())
        rows = torch.stack([w[0] for w in self._windows])
        means, errors = torch.stack([w[1] for w in self._windows]), torch.stack([w[2] for w in self._windows])
        weight = (rows / rows.sum().clamp(min=1.0)).unsqueeze(1)
        between = (weight * (means - (weight * means).sum(0)).square()).sum(0)
        chance = (weight * (1.0 - weight) * errors).sum(0)
        share = ((between - chance).clamp(min=0.0)[varies] / total[varies]).clamp(max=1.0)
        return spread, float(share.mean())


@torch.no_grad()
def watch_episodes(
    env: VecEnv, act: Callable[[Obs], Tensor], rollout_steps: int, seconds: float, policy: str
) -> Profile:
    """Run `act` until every environment has ended its first episode, at most H steps and `seconds`."""
    horizon = env.spec.horizon_steps
    limit = horizon or UNLIMITED_STEPS
    windows = min(phase_bins(limit, rollout_steps), MOST_WINDOWS)
    deadline = time.perf_counter() + seconds
    obs, clock_columns = env.reset(), env.spec.phase_columns.get("policy", 0)
    moments = ObsMoments(flat_policy_obs(obs, clock_columns))
    running = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    lengths = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
    early = torch.zeros_like(running)
    steps = 0
    for t in range(limit):
        if t and t * windows // limit != (t - 1) * windows // limit:
            moments.close_window()
        moments.add(flat_policy_obs(obs, clock_columns), running)
        step = env.step(act(obs))
        counted = running & step.valid
        lengths = lengths + counted
        ended = counted & step.done
        early = early | (ended & (lengths < limit))
        running, obs, steps = running & ~ended, step.obs, t + 1
        if steps % CHECK_EVERY_STEPS == 0 and not bool(running.any()):
            break
        if time.perf_counter() > deadline:
            break
    moments.close_window()
    censored = running & (lengths < limit)
    hazard = hazards(lengths.cpu(), early.cpu(), censored.cpu(), limit, HAZARD_BINS)
    spread, dependence = moments.read()
    share = None if horizon is None else early_share_of(hazard)
    median = float(lengths.to(torch.float64).median())
    return Profile(policy, env.num_envs, steps, median, share, tuple(hazard), spread, dependence)


def flat_policy_obs(obs: Obs, phase_columns: int = 0) -> Tensor:
    """[N, D] of the group "policy" without its last `phase_columns`, which hold nothing but the clock. D is at most
    MOST_OBS_NUMBERS."""
    x = obs["policy"].flatten(1)
    x = x[:, : x.shape[1] - phase_columns]
    return x[:, :: -(-x.shape[1] // MOST_OBS_NUMBERS)]


# -- costs ----------------------------------------------------------------------------------------------------------
class ResetCosts(NamedTuple):
    """Medians in seconds."""

    repetitions: int
    step_s: float
    """One step of all environments, resets of those that end included."""
    whole_s: float
    one_s: Optional[float]
    """A reset of one environment; None where the simulator resets all or nobody."""
    group_s: Optional[float]
    """A reset of N / N_B environments."""
    group_envs: int


@torch.no_grad()
def reset_costs(
    env: VecEnv, act: Callable[[Obs], Tensor], group_envs: int, seconds: float, most: int = 30
) -> ResetCosts:
    """Time steps and resets in turns, at least three times and then until `most` or `seconds`; the first round does
    not count."""
    partial = Capability.PARTIAL_RESET in env.capabilities
    masks = {}
    if partial:
        for name, count in (("one", 1), ("group", group_envs)):
            masks[name] = torch.arange(env.num_envs, device=env.device) < count
    times: Dict[str, List[float]] = {"step": [], "whole": [], **{name: [] for name in masks}}
    deadline = time.perf_counter() + seconds
    obs = env.reset()
    for index in range(most + 1):
        action = act(obs)
        seen = {"step": _timed(env, lambda action=action: env.step(action))}
        for name, mask in masks.items():
            seen[name] = _timed(env, lambda mask=mask: env.reset(mask))
        seen["whole"] = _timed(env, env.reset)
        obs = env.reset()
        if index:
            for name, value in seen.items():
                times[name].append(value)
        if index >= 3 and time.perf_counter() > deadline:
            break
    median = {name: percentile(values, 0.5) for name, values in times.items()}
    step_s, whole_s = median["step"], median["whole"]
    assert step_s is not None
    assert whole_s is not None
    return ResetCosts(len(times["step"]), step_s, whole_s, median.get("one"), median.get("group"), group_envs)


def _timed(env: VecEnv, call: Callable[[], Any]) -> float:
    wait_for(env.device)
    start = time.perf_counter()
    call()
    wait_for(env.device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- a training -----------------------------------------------------------------------------------------------------
class Arm(NamedTuple):
    """What a training under one rule showed. None: not to be had."""

    rule: str
    num_envs: int
    iterations: int
    horizons: float
    """Iterations * K / H."""
    coverage: Optional[float]
    """Median over the later half of the iterations, as `tv_distance`."""
    coverage_min: Optional[float]
    tv_distance: Optional[float]
    reward_cycle: Optional[float]
    error_cycle: Optional[float]
    """Cyclic index of the critic's error, as `reward_cycle` and `explained_cycle`."""
    explained_cycle: Optional[float]
    explained_p10: Optional[float]
    """10th percentile of the critic's explained variance over the last three quarters of the iterations."""
    explained_median: Optional[float]
    reward: Optional[float]
    """Mean reward per step of the last horizon's batches."""
    valid_share: Optional[float]
    warmup_steps: int


def arm_of(rule: str, num_envs: int, lines: Lines, horizon_steps: int, rollout_steps: int) -> Arm:
    """The measures of an Arm from the metrics of its iterations."""
    half, quarter = lines[len(lines) // 2 :], lines[len(lines) // 4 :]
    last = lines[-phase_bins(horizon_steps, rollout_steps) :]

    def cycle(*names: str) -> Optional[float]:
        name = next((name for name in names if any(line.get(name) is not None for line in lines)), None)
        if name is None:
            return None
        first = lines[0]["iteration"] - 1
        series = [_number(line.get(name)) for line in lines]
        return cyclic_index(series, horizon_steps, rollout_steps, first=first)

    coverage = _values(half, "batch/coverage")
    explained, reward = _values(quarter, "critic/explained_variance"), _values(last, "batch/reward_mean")
    return Arm(
        rule,
        num_envs,
        len(lines),
        len(lines) * rollout_steps / horizon_steps,
        percentile(coverage, 0.5),
        min(coverage, default=None),
        percentile(_values(half, "batch/tv_distance"), 0.5),
        cycle("batch/reward_mean"),
        cycle("critic/error_rms", "critic/loss"),
        cycle("critic/explained_variance"),
        percentile(explained, 0.1),
        percentile(explained, 0.5),
        sum(reward) / len(reward) if reward else None,
        percentile(_values(half, "batch/valid_share"), 0.5),
        int(lines[-1].get("steps/warmup", 0)) if lines else 0,
    )


def early_ends_by_third(lines: Lines, horizon_steps: Optional[int]) -> List[Optional[float]]:
    """[3] share of the full episodes that were terminated, in the first, middle and last third of the iterations.

    Under a rule that cuts no episodes a termination comes before the time limit or in its very step.
    """
    found: List[Optional[float]] = []
    for index in range(3):
        part = lines[index * len(lines) // 3 : (index + 1) * len(lines) // 3]
        count = sum(_values(part, "episode/count"))
        found.append(sum(_values(part, "episode/terminated_count")) / count if count and horizon_steps else None)
    return found


def _values(lines: Lines, name: str) -> List[float]:
    return [x for x in (_number(line.get(name)) for line in lines) if x is not None]


def _number(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
