"""From the doctor's findings to a reset rule: a pure function, with its reasons.

The bounds are rules of thumb: of the published account (H/K, K from H/10 to H/5, deterministic starts) and of our own
runs (docs/reset_rules.md). The trainings that it compares are short and of one seed each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import FrozenSet, List, NamedTuple, Optional, Tuple

from rl_stagger.diagnosis import Arm, Profile, ResetCosts
from rl_stagger.envs.base import Capability
from rl_stagger.resets.allocation import default_num_groups

FEW_WINDOWS, MANY_WINDOWS = 2.0, 5.0
"""H/K: up to the first a rollout sees most of an episode anyway, above the second staggering pays most."""
STILL_TV, SMALL_CYCLE = 0.2, 0.2
RANDOM_STARTS, FIXED_STARTS, ALIKE_PHASES = 0.8, 0.2, 0.05
MANY_EARLY, LOST_COVERAGE = 0.3, 0.9
LARGE_WARMUP = 0.2
LEAST_HORIZONS = 2.0
"""Shorter trainings tell nothing of cycles."""
EXPLAINED_GAIN, HALVED, LEAST_GAIN = 0.1, 0.5, 0.02
"""What counts as a difference in explained variance between two short trainings: the first; or what is left unexplained
falls to the second or less, by the third at least."""
FEW_ENVS = 0.25
"""A training with a smaller share of the environments is a weak test: batches of another size learn otherwise."""
LIKE_WHOLE, DEAR_IN_STEPS = 0.7, 3.0
"""A group's reset costs nearly a whole one, and so many steps: worth to be collected at a gate."""


@dataclass(frozen=True)
class Findings:
    """All that the recommendation looks at. None: not measured."""

    horizon_steps: Optional[int]
    rollout_steps: int
    num_envs: int
    iterations: int
    """Of the planned training."""
    capabilities: FrozenSet[Capability]
    profiles: Tuple[Profile, ...] = ()
    """Under the policies that were watched, the least trained first."""
    costs: Optional[ResetCosts] = None
    reference: Optional[Arm] = None
    """With synchronous resets."""
    rule: Optional[Arm] = None
    """With the rule that was asked about."""
    kept_up: bool = False
    """Whether that rule has an upkeep."""
    refused: Optional[str] = None
    """Why that rule cannot be had."""

    @property
    def windows(self) -> float:
        """H / K; 0 without a time limit."""
        return (self.horizon_steps or 0) / self.rollout_steps

    @property
    def warmup_share(self) -> float:
        """Env steps of a warm-up over those of the planned training."""
        horizon = self.horizon_steps or 0
        groups = min(default_num_groups(max(1, horizon), self.rollout_steps), self.num_envs)
        return (groups - 1) * horizon // groups / (self.rollout_steps * self.iterations)

    @property
    def phase_dependence(self) -> Optional[float]:
        """The largest seen: a policy that never leaves the start makes every task look even."""
        return max((p.phase_dependence for p in self.profiles if p.phase_dependence is not None), default=None)

    @property
    def start_spread(self) -> Optional[float]:
        """Of the most trained policy that was watched."""
        return next((p.start_spread for p in reversed(self.profiles) if p.start_spread is not None), None)

    @property
    def early_share(self) -> Optional[float]:
        """The largest seen: the policies of a training's beginning end early most."""
        return max((p.early_share for p in self.profiles if p.early_share is not None), default=None)


class Recommendation(NamedTuple):
    """What to do."""

    verdict: str
    """leave | stagger | impossible."""
    headline: str
    overrides: Tuple[str, ...]
    """For train.py's command line."""
    reasons: Tuple[str, ...]
    expected: str
    """What it expects to gain, and which figures it reads that from."""


def recommend(f: Findings) -> Recommendation:
    """The rule that the findings speak for; "leave" where staggering does not pay."""
    if f.horizon_steps is None:
        return _leave("this task has no time limit, so there is no horizon to spread over", expected="nothing to gain")
    h, k = f.horizon_steps, f.rollout_steps
    if f.windows <= FEW_WINDOWS:
        seen = "the whole horizon" if k >= h else f"{k / h:.0%} of it"
        shorter = f"rollout_steps from {max(1, h // 10)} to {max(1, h // 5)} would leave something to stagger"
        text = f"H/K = {h}/{k} = {f.windows:.1f}, at most {FEW_WINDOWS:g}: one rollout sees {seen} anyway"
        return _leave(text, shorter, expected="next to nothing: batches hardly differ")
    if not f.capabilities & {Capability.PARTIAL_RESET, Capability.SET_CLOCK}:
        return _impossible(f)
    reasons = [_windows_reason(f)]
    against = _still_mixture(f) or _alike(f) or _no_difference(f)
    if against is not None:
        return _leave(*reasons, *against, expected=_expected(f))
    return _stagger(f, reasons)


# -- reasons to leave it --------------------------------------------------------------------------------------------
def _leave(*reasons: str, expected: str) -> Recommendation:
    text = "leave resets as they are (synchronous): no clear gain from staggering here"
    return Recommendation("leave", text, ("reset=synchronous",), reasons, expected)


def _impossible(f: Findings) -> Recommendation:
    has = ", ".join(sorted(c.value for c in f.capabilities)) or "none"
    reasons = (
        _windows_reason(f),
        "the simulator can neither reset some environments alone (partial_reset) nor write clocks (set_clock); it has: "
        f"{has}. With either, reset.bring_up=warmup or reset.bring_up=clock would be possible",
    )
    headline = "leave resets as they are: this simulator cannot be staggered"
    return Recommendation("impossible", headline, ("reset=synchronous",), reasons, "not to be had as it is")


def _windows_reason(f: Findings) -> str:
    text = f"H/K = {f.horizon_steps}/{f.rollout_steps} = {f.windows:.1f}: "
    if f.windows > MANY_WINDOWS:
        return text + f"a synchronous batch shows 1/{f.windows:.0f} of the horizon at a time (staggering pays above 5)"
    return text + "between 2, under which there is nothing to gain, and 5, above which there is most"


def _still_mixture(f: Findings) -> Optional[Tuple[str, ...]]:
    """Synchronous batches that hardly change: whatever ends episodes spreads them already."""
    arm = f.reference
    if arm is None or arm.horizons < LEAST_HORIZONS or arm.tv_distance is None or arm.tv_distance >= STILL_TV:
        return None
    cycles = [x for x in (arm.error_cycle, arm.explained_cycle) if x is not None]
    if any(x >= SMALL_CYCLE for x in cycles):
        return None
    text = (
        f"the synchronous batches hardly change: tv distance {arm.tv_distance:.2f} (under {STILL_TV}), cyclic index "
        f"of the critic's error {shown(arm.error_cycle)} and of its explained variance {shown(arm.explained_cycle)} "
        f"(under {SMALL_CYCLE})"
    )
    short = [p for p in f.profiles if p.median_steps <= FEW_WINDOWS * f.rollout_steps]
    if short:
        p = short[-1]
        text += f"; half of the episodes ({p.policy} policy) end within {p.median_steps:.0f} steps, "
        text += f"{p.median_steps / f.rollout_steps:.1f} rollouts"
    return (text,)


def _alike(f: Findings) -> Optional[Tuple[str, ...]]:
    """Phases that look alike, or starts that cover the task, unless the critic says otherwise."""
    dependence, spread = f.phase_dependence, f.start_spread
    texts = []
    if dependence is not None and dependence < ALIKE_PHASES:
        texts.append(
            f"the phases look alike: {dependence:.1%} of the observations' variance lies between windows of K steps "
            f"(under {ALIKE_PHASES:.0%})"
        )
    if spread is not None and spread > RANDOM_STARTS:
        texts.append(
            f"the start states already cover the task: their variance is {spread:.2f} of that over whole episodes "
            f"(above {RANDOM_STARTS})"
        )
    pair = _comparable(f)
    if not texts or (pair is not None and _explains_more(*pair)):
        return None
    if pair is not None:
        texts.append(f"and the critic hardly gains in the short training ({_explained_text(*pair)})")
        texts += _weakness(f, pair[1])
    return tuple(texts)


def _no_difference(f: Findings) -> Optional[Tuple[str, ...]]:
    """A rule that lost its spread to early ends says nothing of one that is kept up."""
    pair = _comparable(f)
    if pair is None or (_lost_spread(f) and not f.kept_up and Capability.PARTIAL_RESET in f.capabilities):
        return None
    reference, rule = pair
    if _explains_more(rule, reference):
        text = f"in the short training the critic explains less under the rule ({_explained_text(*pair)})"
        return (text, *_weakness(f, rule))
    if not _explains_more(reference, rule):
        text = (
            f"the short training shows no difference for the critic ({_explained_text(*pair)}; {_cycles_text(*pair)})"
        )
        return (text, *_weakness(f, rule))
    return None


# -- what the two trainings say -------------------------------------------------------------------------------------
def _comparable(f: Findings) -> Optional[Tuple[Arm, Arm]]:
    """(synchronous, the rule) where both trained for long enough to be compared."""
    a, b = f.reference, f.rule
    if a is None or b is None or min(a.horizons, b.horizons) < LEAST_HORIZONS:
        return None
    return None if a.explained_p10 is None or b.explained_p10 is None else (a, b)


def _explains_more(a: Arm, b: Arm) -> bool:
    """Whether the critic of `b` explains clearly more than that of `a`, at the 10th percentile.

    Below 0 a critic explains nothing, and how far below depends on how little there was to explain.
    """
    left_a, left_b = (1.0 - max(0.0, arm.explained_p10 or 0.0) for arm in (a, b))
    gain = left_a - left_b
    return gain >= EXPLAINED_GAIN or (gain >= LEAST_GAIN and left_b <= HALVED * left_a)


def _explained_text(a: Arm, b: Arm) -> str:
    return f"explained variance p10 {shown(a.explained_p10)} {a.rule}, {shown(b.explained_p10)} {b.rule}"


def _cycles_text(a: Arm, b: Arm) -> str:
    return (
        f"cyclic index of its error {shown(a.error_cycle)} and {shown(b.error_cycle)}, of its explained variance "
        f"{shown(a.explained_cycle)} and {shown(b.explained_cycle)}"
    )


def _expected(f: Findings, overrides: Tuple[str, ...] = ()) -> str:
    """The figures that a gain is expected from; none that was not measured."""
    pair = _comparable(f)
    if pair is not None:
        rewards = f"{shown(pair[0].reward)} and {shown(pair[1].reward)}"
        text = (
            f"the critic's {_explained_text(*pair)}; {_cycles_text(*pair)}; mean reward per step at the end {rewards}"
        )
        text += f". Read from {_length_text(pair[0])}, one seed each. To be sure, train both with several: rl-stagger "
        text += "train -m seed=0,1,2 reset=synchronous,staggered"
        if len(overrides) > 1:
            text += f". Measured with {pair[1].rule}, not with all of what is recommended"
        return text
    arm = f.reference or f.rule
    if arm is None:
        return "not measured: there was no training to look at"
    if f.reference is not None and f.rule is not None:
        least = f"at least {LEAST_HORIZONS:g} horizons"
        return f"not measured: {_length_text(arm)} are too few to compare ({least}); give more seconds=..."
    missing = "synchronous resets" if f.reference is None else "a staggered rule"
    p10, error, explained = shown(arm.explained_p10), shown(arm.error_cycle), shown(arm.explained_cycle)
    return (
        f"no training with {missing} to compare with. {arm.rule}, {_length_text(arm)}: the critic's explained variance "
        f"p10 {p10}, cyclic index of its error {error}, of its explained variance {explained}"
    )


def _length_text(arm: Arm) -> str:
    return f"{arm.iterations} iterations ({arm.horizons:.1f} horizons) with {arm.num_envs} environments"


def _weakness(f: Findings, arm: Arm) -> Tuple[str, ...]:
    """What speaks against relying on a training, where anything does."""
    if arm.num_envs >= FEW_ENVS * f.num_envs:
        return ()
    text = (
        f"a weak test: {arm.num_envs} of the {f.num_envs} environments; more time, seconds=..., allows for more of them"
    )
    return (text,)


# -- the rule -------------------------------------------------------------------------------------------------------
def _stagger(f: Findings, reasons: List[str]) -> Recommendation:
    block = _block_reason(f)
    overrides = ["reset=staggered" if block is None else "reset=staggered_block"]
    reasons = [*reasons, *_signs(f)]
    if block is not None:
        reasons.append(block)
    bring_up, text = _bring_up(f)
    if bring_up != "warmup":
        overrides.append(f"reset.bring_up={bring_up}")
    reasons.append(text)
    upkeep = _upkeep(f)
    if upkeep is not None:
        overrides += upkeep[0]
        reasons.append(upkeep[1])
    reasons += _sizes(f)
    if _comparable(f) is not None and f.rule is not None:
        reasons += _weakness(f, f.rule)
    if f.refused is not None:
        reasons.append(f"the rule that was asked about cannot be had: {f.refused}")
    sure = f.windows > MANY_WINDOWS and (f.start_spread is None or f.start_spread < FIXED_STARTS)
    if _lost_spread(f) and not f.kept_up:
        sure = False
        reasons.append(
            "the rule that was tried lost its spread, so the short training says nothing of one that is kept up: ask "
            f"again with {' '.join(overrides)}"
        )
    headline = "stagger resets" if sure else "try staggered resets; the signs are mixed"
    return Recommendation("stagger", headline, tuple(overrides), tuple(reasons), _expected(f, tuple(overrides)))


def _signs(f: Findings) -> List[str]:
    found = []
    if f.reference is not None and f.reference.tv_distance is not None:
        moving = f.reference.tv_distance >= STILL_TV
        what = "show another part of the task each time" if moving else "are fairly mixed by themselves"
        coverage = shown(f.reference.coverage)
        found.append(f"synchronous batches {what}: tv distance {f.reference.tv_distance:.2f}, coverage {coverage}")
    if f.start_spread is not None:
        kind = "much the same" if f.start_spread < FIXED_STARTS else "spread"
        found.append(f"start states are {kind}: their variance is {f.start_spread:.2f} of that over whole episodes")
    if f.phase_dependence is not None:
        found.append(f"{f.phase_dependence:.0%} of the observations' variance lies between windows of K steps")
    return found


def _block_reason(f: Findings) -> Optional[str]:
    c = f.costs
    able = {Capability.MANUAL_RESET, Capability.PARTIAL_RESET} <= f.capabilities
    if c is None or c.group_s is None or not able or c.step_s <= 0 or c.whole_s <= 0:
        return None
    if c.group_s < LIKE_WHOLE * c.whole_s or c.group_s < DEAR_IN_STEPS * c.step_s:
        return None
    text = (
        f"resetting {c.group_envs} environments costs {c.group_s / c.step_s:.1f} steps, {c.group_s / c.whole_s:.0%} of "
        "a whole reset: gate=block collects them at one moment every K steps"
    )
    if (f.early_share or 0.0) > MANY_EARLY:
        text += "; environments that end early wait for it, see batch/valid_share"
    return text


def _bring_up(f: Findings) -> Tuple[str, str]:
    share = f.warmup_share
    costs = f"a warm-up takes up to {share:.0%} of the planned training's samples"
    if Capability.PARTIAL_RESET not in f.capabilities:
        return "clock", (
            "bring_up=clock: the simulator cannot reset some environments alone, but its clocks can be written; phases "
            "are false until each first time limit"
        )
    if share <= LARGE_WARMUP:
        return "warmup", f"bring_up=warmup: {costs}"
    if Capability.SET_STATE in f.capabilities:
        return "snapshot", f"bring_up=snapshot: {costs}; spreading over the first horizon while it trains takes none"
    if Capability.SET_CLOCK in f.capabilities:
        return "clock", f"bring_up=clock: {costs}; written clocks are free, and false until each first time limit"
    return "warmup", f"bring_up=warmup: {costs}, and nothing cheaper is possible here; train longer, or accept it"


def _lost_spread(f: Findings) -> bool:
    """Whether early ends undid the rule's spread in its own training."""
    arm = f.rule
    if arm is None or arm.coverage is None or arm.horizons < LEAST_HORIZONS:
        return False
    return (f.early_share or 0.0) > MANY_EARLY and arm.coverage < LOST_COVERAGE


def _upkeep(f: Findings) -> Optional[Tuple[List[str], str]]:
    """Upkeep where episodes end early, unless the rule's own training kept its spread."""
    if (f.early_share or 0.0) <= MANY_EARLY:
        return None
    early = f"{f.early_share:.0%} of the first episodes end early, which brings environments back together"
    kept = f.rule.coverage if f.rule is not None and f.rule.horizons >= LEAST_HORIZONS else None
    if kept is not None and kept >= LOST_COVERAGE:
        return [], f"{early}, yet {f.rule.rule if f.rule else ''} kept a coverage of {kept:.2f}: no upkeep needed"
    if Capability.PARTIAL_RESET not in f.capabilities:
        return [], f"{early}; no upkeep is possible without partial resets"
    how = "into recorded states" if Capability.SET_STATE in f.capabilities else "by early cuts alone"
    lost = "" if kept is None else f" (coverage {kept:.2f} under {f.rule.rule if f.rule else ''})"
    return ["reset.upkeep=on_coverage_below"], f"{early}{lost}: upkeep spreads them again, {how}"


def _sizes(f: Findings) -> List[str]:
    """N_B and K."""
    assert f.horizon_steps is not None
    wanted = default_num_groups(f.horizon_steps, f.rollout_steps)
    groups = min(wanted, f.num_envs)
    text = f"N_B = {groups} groups, " + (
        "ceil(H/K)" if groups == wanted else f"one an environment; ceil(H/K) = {wanted}"
    )
    low, high = max(1, f.horizon_steps // 10), max(1, f.horizon_steps // 5)
    k = f.rollout_steps
    if low <= k <= high:
        return [text, f"K = {k}: within H/10 to H/5 = {low} to {high}, keep it"]
    side = "below" if k < low else "above"
    return [text, f"K = {k}: keep it; accounts of the method have H/10 to H/5 = {low} to {high}, this is {side}"]


def shown(value: Optional[float]) -> str:
    """Two decimals, or two digits of what is smaller; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value == 0.0 or abs(value) >= 0.1 else f"{value:.2g}"
