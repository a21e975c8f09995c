"""How the contract checker handles an environment: driving it, bringing it back to where it was, comparing.

Shapes: N environments, T recorded steps. All that is recorded is cloned to the CPU.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Discrete, Obs, Step, VecEnv, check_obs, check_step
from rl_stagger.envs.check_report import ERROR, OK, SKIPPED, WARNING, Finding, locate
from rl_stagger.errors import ContractError
from rl_stagger.rng import seed_everything

LONG_HORIZON = 1000
SHORT_RUN = 200
"""Steps of the long run where the time limit is further away than LONG_HORIZON, or there is none."""
MOST_SECONDS = 20.0
"""The long run stops then, unless somebody asked for a number of steps."""
WINDOW = 5
PREFIX = 3
PRIVATE_SEED = 7919

Shot = Dict[str, Tensor]
"""What one step showed: name of a field -> clone on the CPU."""


class Skip(Exception):
    """A check that cannot apply here; the message says why."""


class Diff(NamedTuple):
    """The largest difference between two recordings."""

    amount: float
    name: str
    row: int
    step: int = 0


SAME = Diff(0.0, "", 0)


class Episode(NamedTuple):
    """An ended one: its length by our own count, and how it ended."""

    length: int
    kind: str
    """terminated, truncated or cut."""
    step: int
    row: int


class End(NamedTuple):
    """A step in which somebody was done."""

    step: int
    rows: Tensor
    """[N] bool"""
    before: Obs
    """What the rows showed before the step."""
    obs: Obs
    final: Optional[Obs]
    after: List[Tuple[Obs, Shot]]
    """(observation, shot) of the step after it, if there was one."""


class Kept(NamedTuple):
    """A tensor that the environment returned, and what it held then."""

    name: str
    step: int
    tensor: Tensor
    clone: Tensor


class Trace:
    """The long run: many steps of random actions after a reset."""

    def __init__(self) -> None:
        self.shots: List[Shot] = []
        self.actions: List[Tensor] = []
        self.clocks: List[Optional[Tensor]] = []
        """[N] int64 before the first step and after each."""
        self.clock_fault = ""
        self.form_fault = ""
        self.form_method = "step"
        """Who gave what has the wrong form."""
        self.error: Optional[Exception] = None
        self.stopped = ""
        self.moved: List[Tensor] = []
        """[N] bool: the observation changed in this step."""
        self.sizes: List[Tensor] = []
        """[N], how far it moved."""
        self.ends: List[End] = []
        self.kept: List[Kept] = []
        self.infos: List[Dict[str, Any]] = []
        self.not_finite: Dict[str, Tuple[int, int]] = {}
        """Name -> (step, row) where it first was not finite."""
        self.action_written = False
        self.before_termination: Optional[Tuple[Dict[str, Tensor], Tensor, Step]] = None
        """(state, action, step) of the first step in which somebody terminated."""
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.shots)

    def stacked(self, name: str) -> Tensor:
        """[T, N]"""
        return torch.stack([shot[name] for shot in self.shots])

    def episodes(self) -> Tuple[List[Episode], Tensor]:
        """(the ended ones, [N] ages of the unfinished)."""
        found: List[Episode] = []
        age = torch.zeros_like(self.shots[0]["reset"], dtype=torch.int64)
        for t, shot in enumerate(self.shots):
            age = age + shot["Step.valid"]
            for row in (done_of(shot) & shot["Step.valid"]).nonzero().flatten().tolist():
                kind = "terminated" if shot["Step.terminated"][row] else "truncated"
                kind = "cut" if shot["cut"][row] else kind
                found.append(Episode(int(age[row]), kind, t, row))
            age = torch.where(shot["reset"] | shot["cut"], 0, age)
        return found, age


class Anchor:
    """A situation in the middle of episodes that the environment can be brought back to."""

    def __init__(self, probe: Probe, way: str, prefix_steps: int = PREFIX, seed: int = PRIVATE_SEED) -> None:
        self.probe, self.way, self.seed = probe, way, seed
        self.prefix = probe.actions(prefix_steps, seed)
        self.obs = self._walk()
        self.clock = probe.env.elapsed_steps.clone()
        self.state = clone_tree(probe.env.get_state()) if way == "state" else None
        probe.seed(self.seed + 1)

    def back(self) -> Obs:
        """Everything as it was; returns the observations."""
        obs = self._walk() if self.state is None else self.probe.env.set_state(clone_tree(self.state))
        self.probe.seed(self.seed + 1)
        return obs

    def _walk(self) -> Obs:
        self.probe.seed(self.seed)
        obs = self.probe.reset_all()
        for action in self.prefix:
            obs = self.probe.env.step(action.clone()).obs
        return clone_tree(obs)


class Probe:
    """An environment under examination, and what the checks have learned about it so far."""

    def __init__(
        self, env: VecEnv, make: Optional[Callable[[int], VecEnv]], steps: Optional[int], tolerance: float
    ) -> None:
        self.env, self.make, self.asked_steps, self.tolerance = env, make, steps, tolerance
        self.check = ""
        self.failed: Set[str] = set()
        """Names of the checks that found an error."""
        self._begun = False
        self._trace: Optional[Trace] = None
        self._way: Optional[str] = None
        self._way_known = False
        self.final_proof = ""
        """How the final observations were proven, where they were."""
        self.build_s = 0.0
        """Seconds that building another instance took."""
        self.spec_at_start = getattr(env, "spec", None)
        self.replay_error = 0.0
        """Largest difference between two replays, where there is a way back."""

    # -- what it is ----------------------------------------------------------------------------------------------
    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    @property
    def horizon(self) -> Optional[int]:
        return self.env.spec.horizon_steps

    @property
    def wrapped(self) -> bool:
        """Something of ours is around the environment; a reset rule there may begin episodes in the middle."""
        return self.env.unwrapped is not self.env

    def has(self, capability: Capability) -> bool:
        return capability in self.env.capabilities

    def need(self, capability: Capability) -> None:
        if not self.has(capability):
            raise Skip(f"'{capability.value}' is not among the capabilities")

    def distrust(self, *checks: str) -> None:
        """Skip where one of these checks failed already."""
        broken = [name for name in checks if name in self.failed]
        if broken:
            raise Skip(f"builds on '{broken[0]}', which failed")

    @property
    def some(self) -> Tensor:
        """[N] bool: every other row, not the first; the only one where there is only one."""
        mask = torch.arange(self.num_envs, device=self.env.device) % 2 == 1
        return mask if self.num_envs > 1 else ~mask

    @property
    def steps(self) -> int:
        """Of the long run."""
        if self.asked_steps is not None:
            return self.asked_steps
        if self.horizon is None or self.horizon > LONG_HORIZON:
            return SHORT_RUN
        return self.horizon * (3 if self.num_envs < 3 and self.horizon <= SHORT_RUN else 1) + 8

    # -- findings ------------------------------------------------------------------------------------------------
    def error(self, seen: str, contract: str, method: str = "step", word: str = "") -> Finding:
        return Finding(ERROR, self.check, seen, contract, locate(self.env.unwrapped, method, word))

    def warning(self, seen: str, contract: str, method: str = "step", word: str = "") -> Finding:
        return Finding(WARNING, self.check, seen, contract, locate(self.env.unwrapped, method, word))

    def ok(self, seen: str) -> Finding:
        return Finding(OK, self.check, seen)

    def skipped(self, why: str) -> Finding:
        return Finding(SKIPPED, self.check, why)

    # -- driving -------------------------------------------------------------------------------------------------
    def seed(self, seed: int, own: bool = True) -> None:
        """Python's, NumPy's and torch's generators, and the environment's own."""
        seed_everything(seed)
        if own:
            self.env.seed(seed)

    def seed_as_in_trace(self) -> None:
        self.seed(PRIVATE_SEED)

    def like(self, env: VecEnv) -> Probe:
        """A probe of another instance, which is compared by the same rules."""
        return Probe(env, None, self.asked_steps, self.tolerance)

    def reset_all(self) -> Obs:
        """Every environment at the start of an episode, also under a reset rule."""
        if self.wrapped and self._begun and self.has(Capability.PARTIAL_RESET):
            return self.env.reset(torch.ones(self.num_envs, dtype=torch.bool, device=self.env.device))
        obs = self.env.reset()
        if self.wrapped and not self._begun:
            self._begun = True
            return self.reset_all()
        self._begun = True
        return obs

    def actions(self, steps: int, seed: int) -> List[Tensor]:
        """Random ones within the bounds, standard normal where unbounded; the same for the same arguments."""
        draw = torch.Generator().manual_seed(seed)
        return [self.draw(draw) for _ in range(steps)]

    def draw(self, generator: torch.Generator) -> Tensor:
        spec, n = self.env.spec.action, self.num_envs
        if isinstance(spec, Discrete):
            return torch.randint(spec.n, (n,), generator=generator).to(self.env.device)
        low, high = spec.bounds("cpu")
        uniform = torch.rand(n, spec.size, generator=generator)
        normal = torch.randn(n, spec.size, generator=generator)
        inside = low + uniform * (high - low)
        one_sided = torch.where(torch.isfinite(low), low + normal.abs(), high - normal.abs())
        bounded = torch.isfinite(low) & torch.isfinite(high)
        free = ~torch.isfinite(low) & ~torch.isfinite(high)
        action = torch.where(bounded, inside, torch.where(free, normal, one_sided))
        return action.to(self.env.device)

    def extremes(self) -> List[Tensor]:
        """Actions at the bounds (every choice of a Discrete one), three times as far as usual where unbounded."""
        spec, n, device = self.env.spec.action, self.num_envs, self.env.device
        if isinstance(spec, Discrete):
            return [torch.full((n,), i, dtype=torch.int64, device=device) for i in sorted({0, spec.n - 1})]
        low, high = spec.bounds(device)
        low, high = torch.where(torch.isfinite(low), low, -3.0), torch.where(torch.isfinite(high), high, 3.0)
        sign = torch.arange(spec.size, device=device) % 2 == 0
        rows = [low, high, torch.where(sign, low, high), torch.where(sign, high, low)]
        return [row.expand(n, -1).clone() for row in rows]

    def window(self, actions: Sequence[Tensor]) -> List[Shot]:
        return [self.shoot(self.env.step(action.clone())) for action in actions]

    def shoot(self, step: Step, clock: Optional[Tensor] = None) -> Shot:
        """Clones of all that `step` and the clock (`clock` if given) show now."""
        shot: Shot = {"Step.reward": step.reward, "Step.terminated": step.terminated, "Step.truncated": step.truncated}
        shot["Step.valid"] = step.valid
        shot.update({f"Step.obs['{name}']": value for name, value in step.obs.items()})
        if step.final_obs is not None:
            shot.update({f"Step.final_obs['{name}']": value for name, value in step.final_obs.items()})
        if "success" in step.info:
            shot["Step.info['success']"] = step.info["success"]
        no = torch.zeros_like(step.valid)
        shot["reset"] = step.info.get("reset", step.terminated | step.truncated)
        shot["cut"], shot["frozen"] = step.info.get("cut", no), step.info.get("frozen", no)
        shot["elapsed_steps"] = self.env.elapsed_steps if clock is None else clock
        return {name: value.detach().cpu().clone() for name, value in shot.items()}

    # -- the way back --------------------------------------------------------------------------------------------
    @property
    def way(self) -> Optional[str]:
        """How the same situation can be had twice: by "state", by "seed" and the same actions, or None."""
        if not self._way_known:
            self._way = next((way for way in ("state", "seed") if self._replays(way)), None)
            self._way_known = True
        return self._way

    def anchor(self) -> Anchor:
        if self.way is None:
            raise Skip("the same situation cannot be had twice here: neither set_state nor seed() brings it back")
        return Anchor(self, self.way)

    def _replays(self, way: str) -> bool:
        if way == "state" and (not self.has(Capability.SET_STATE) or self.failed & {"state", "state_rows"}):
            return False
        actions = self.actions(WINDOW, 3)
        try:
            anchor = Anchor(self, way)
            anchor.back()
            first = self.window(actions)
            self.reset_all()
            again = anchor.back()
            diff = max(difference(clone_tree(anchor.obs), clone_tree(again)), compare(first, self.window(actions)))
        except Exception:
            return False
        if diff.amount <= self.tolerance:
            self.replay_error = diff.amount
        return diff.amount <= self.tolerance

    # -- the long run --------------------------------------------------------------------------------------------
    @property
    def trace(self) -> Trace:
        """The long run. Skips the check where there was not one good step."""
        if not self.trace_or_nothing.shots:
            raise Skip("no step went well")
        return self.trace_or_nothing

    @property
    def trace_or_nothing(self) -> Trace:
        if self._trace is None:
            self._trace = Trace()
            start = time.monotonic()
            try:
                self._run(self._trace, start)
            except Exception as error:
                self._trace.error = error
            self._trace.seconds = time.monotonic() - start
        return self._trace

    def _run(self, trace: Trace, start: float) -> None:
        env = self.env
        generator = torch.Generator().manual_seed(PRIVATE_SEED)
        self.seed(PRIVATE_SEED)
        obs = self.reset_all()
        try:
            check_obs("reset()", obs, env.spec, env.num_envs, env.device)
        except ContractError as fault:
            trace.form_fault, trace.form_method = str(fault), "reset"
            return
        self._keep(trace, -1, {f"reset()['{name}']": value for name, value in obs.items()})
        self._read_clock(trace)
        obs = clone_tree(obs)
        for t in range(self.steps):
            if self.asked_steps is None and time.monotonic() - start > MOST_SECONDS:
                trace.stopped = f"stopped after {MOST_SECONDS:.0f} s at step {t}; steps={self.steps} goes on"
                return
            state = self._state_before(trace)
            action = self.draw(generator)
            given = action.clone()
            step = env.step(given)
            try:
                check_step(step, env.spec, env.num_envs, env.device)
            except ContractError as fault:
                trace.form_fault = f"step {t}: {fault}"
                return
            trace.action_written = trace.action_written or not torch.equal(action, given)
            trace.actions.append(action)
            self._read_clock(trace)
            clock = trace.clocks[-1]
            shot = self.shoot(step, torch.zeros(self.num_envs, dtype=torch.int64) if clock is None else clock)
            done = done_of(shot)
            trace.shots.append(shot)
            if t < 8 or (bool(done.any()) and len(trace.ends) < 3):
                self._keep(trace, t, tensors_of(step))
            trace.infos.append(step.info if t < SHORT_RUN else {})
            self._watch(trace, t, obs, step, shot)
            if state is not None and bool(shot["Step.terminated"].any()):
                trace.before_termination = (state, action, copy_step(step))
            obs = clone_tree(step.obs)

    def _state_before(self, trace: Trace) -> Optional[Dict[str, Tensor]]:
        if not self.has(Capability.SET_STATE) or trace.before_termination is not None:
            return None
        try:
            return clone_tree(self.env.get_state())
        except Exception:  # the check 'state' names it
            return None

    def _read_clock(self, trace: Trace) -> None:
        try:
            clock = self.env.elapsed_steps
        except Exception as error:
            trace.clock_fault = trace.clock_fault or f"elapsed_steps raised {type(error).__name__}: {error}"
            trace.clocks.append(None)
            return
        if not isinstance(clock, Tensor) or tuple(clock.shape) != (self.num_envs,):
            what = f"{list(clock.shape)}" if isinstance(clock, Tensor) else type(clock).__name__
            trace.clock_fault = trace.clock_fault or f"elapsed_steps is {what}, expected [{self.num_envs}]"
            trace.clocks.append(None)
            return
        if clock.dtype != torch.int64:
            trace.clock_fault = trace.clock_fault or f"elapsed_steps is {clock.dtype}, expected torch.int64"
        trace.clocks.append(clock.detach().cpu().to(torch.int64).clone())
        if len(trace.clocks) <= 8:
            trace.kept.append(Kept("elapsed_steps", len(trace.clocks) - 2, clock, clock.clone()))

    @staticmethod
    def _keep(trace: Trace, t: int, tensors: Dict[str, Tensor]) -> None:
        trace.kept += [Kept(name, t, value, value.detach().clone()) for name, value in tensors.items()]

    def _watch(self, trace: Trace, t: int, before: Obs, step: Step, shot: Shot) -> None:
        """Note ends of episodes, movement, and what is not finite."""
        obs, done = clone_tree(step.obs), done_of(shot)
        if trace.ends and trace.ends[-1].step == t - 1:
            trace.ends[-1].after.append((obs, shot))
        change = flat(obs) - flat(before)
        trace.moved.append((flat(obs) != flat(before)).any(dim=1))
        trace.sizes.append(torch.linalg.vector_norm(torch.nan_to_num(change), dim=1))
        if bool(done.any()) and len(trace.ends) < 200:
            final = clone_tree(step.final_obs) if step.final_obs is not None else None
            trace.ends.append(End(t, done, before, obs, final, []))
        for name, value in shot.items():
            if not value.is_floating_point() or name in trace.not_finite:
                continue
            bad = ~torch.isfinite(value.flatten(1)).all(dim=1) if value.dim() > 1 else ~torch.isfinite(value)
            bad = bad & (done if "final_obs" in name else shot["Step.valid"] if "reward" in name else bad)
            if bool(bad.any()):
                trace.not_finite[name] = (t, int(bad.nonzero()[0]))


# -- tensors --------------------------------------------------------------------------------------------------------
def done_of(shot: Shot) -> Tensor:
    return shot["Step.terminated"] | shot["Step.truncated"]


def clone_tree(tree: Any) -> Any:
    """Clones of every tensor in nested dicts and lists."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: clone_tree(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(clone_tree(value) for value in tree) if type(tree) in (list, tuple) else tree
    return tree


def copy_step(step: Step) -> Step:
    fields = {
        name: clone_tree(getattr(step, name)) for name in ("obs", "reward", "terminated", "truncated", "final_obs")
    }
    return Step(**fields, valid=step.valid.clone(), info={})


def tensors_of(step: Step) -> Dict[str, Tensor]:
    """Every tensor that `step` holds, not cloned."""
    found = {f"Step.{name}": getattr(step, name) for name in ("reward", "terminated", "truncated", "valid")}
    found.update({f"Step.obs['{name}']": value for name, value in step.obs.items()})
    found.update({f"Step.final_obs['{name}']": value for name, value in (step.final_obs or {}).items()})
    log = step.info.get("log")
    found.update({f"Step.info['{name}']": value for name, value in step.info.items() if isinstance(value, Tensor)})
    if isinstance(log, dict):
        found.update({f"Step.info['log']['{name}']": x for name, x in log.items() if isinstance(x, Tensor)})
    return found


def field_of(name: str) -> str:
    """ "obs" of "Step.obs['policy']"; "" of what is no field of a Step."""
    return name[5:].partition("[")[0] if name.startswith("Step.") else ""


def flat(obs: Obs) -> Tensor:
    """All groups of an observation beside each other, [N, D] float64 on the CPU."""
    return torch.cat([x.detach().cpu().reshape(x.shape[0], -1).double() for _, x in sorted(obs.items())], dim=1)


def difference(a: Dict[str, Tensor], b: Dict[str, Tensor], rows: Optional[Tensor] = None) -> Diff:
    """The largest absolute difference in `rows` ([N] bool on the CPU; None = all) over the names that both have."""
    worst = SAME
    for name in a:
        if name not in b:
            continue
        x, y = a[name].detach().cpu(), b[name].detach().cpu()
        if x.shape != y.shape:
            return Diff(float("inf"), name, 0)
        off = torch.where(x == y, 0.0, (x.double() - y.double()).abs())
        off = torch.where((x != x) & (y != y), 0.0, torch.nan_to_num(off, nan=float("inf")))
        off = (
            off.flatten(1).amax(dim=1)
            if off.dim() > 1 and off[0].numel()
            else off.flatten(1).sum(1)
            if off.dim() > 1
            else off
        )
        if rows is not None and off.shape == rows.shape:
            off = torch.where(rows, off, 0.0)
        if off.numel() and float(off.max()) > worst.amount:
            worst = Diff(float(off.max()), name, int(off.argmax()))
    return worst


def compare(
    first: Sequence[Shot], second: Sequence[Shot], rows: Optional[Tensor] = None, to_the_end: bool = False
) -> Diff:
    """The largest difference between two windows.

    A row counts until its episode ends: what comes after depends on what a reset draws. `to_the_end`: it goes on.
    """
    worst = SAME
    alive = torch.ones_like(first[0]["reset"]) if rows is None else rows.cpu()
    for t, (a, b) in enumerate(zip(first, second)):
        done = done_of(a)
        final = {name: value for name, value in a.items() if "final_obs" in name}
        later = {name: value for name, value in a.items() if "Step.obs" in name or name == "elapsed_steps"}
        now = {name: value for name, value in a.items() if name not in final and name not in later}
        same_now = alive if to_the_end else alive & ~done
        for part, mask in ((now, alive), (final, alive & done), (later, same_now)):
            diff = difference(part, b, mask)
            if diff.amount > worst.amount:
                worst = diff._replace(step=t)
        alive = same_now
    return worst


def amount(value: float) -> str:
    return f"{value:.3g}"


def off(diff: Diff) -> str:
    """ "0.3 off, 2 steps later"."""
    return f"{amount(diff.amount)} off, {diff.step + 1} step{'s' if diff.step else ''} later"


def rows_text(mask: Tensor) -> str:
    """ "row 3" or "rows 1, 3, 5 and 13 more"."""
    rows = mask.nonzero().flatten().tolist()
    shown = ", ".join(str(row) for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"
