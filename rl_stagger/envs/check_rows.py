"""Checks of what happens to some environments and not to others: clocks, masks, resets, ends of episodes."""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, Discrete, Obs, Step, check_obs
from rl_stagger.envs.check_probe import (
    SAME,
    WINDOW,
    Anchor,
    End,
    Probe,
    Shot,
    Skip,
    amount,
    clone_tree,
    compare,
    difference,
    done_of,
    flat,
    rows_text,
)
from rl_stagger.envs.check_report import Finding

RETRIES = 3
"""A difference counts where it is there so many times: rare chances inside a step are not faults."""


# -- the clock ------------------------------------------------------------------------------------------------------
def check_clock_write(p: Probe) -> Iterator[Finding]:
    """SET_CLOCK: the masked clocks are written, the state stays, and the time limit looks at what was written."""
    p.need(Capability.SET_CLOCK)
    p.distrust("clock")
    env, rule = p.env, "set_elapsed_steps writes the masked rows' clocks, and the state does not move"
    p.reset_all()
    p.window(p.actions(2, 1))
    before, state = env.elapsed_steps, _state(p)
    most = 10 if p.horizon is None else max(p.horizon - 2, 0)
    wanted = torch.arange(p.num_envs, device=env.device).add(3).clamp(max=most)
    given = wanted.clone()
    env.set_elapsed_steps(given, p.some)
    if not _clock_is(p, torch.where(p.some, wanted, before)):
        yield p.error(_clock_text(p, p.some, wanted, before), rule, "set_elapsed_steps")
        return
    given.fill_(0)
    if not _clock_is(p, torch.where(p.some, wanted, before)):
        yield p.error("the clock follows the tensor that it was written from", rule, "set_elapsed_steps")
        return
    moved = _moved_state(state, _state(p), before, env.elapsed_steps)
    if moved:
        yield p.error(f"a clock write changed '{moved}' of get_state()", rule, "set_elapsed_steps")
        return
    env.set_elapsed_steps(wanted)
    if not _clock_is(p, wanted):
        yield p.error("env_mask=None did not write every row", rule, "set_elapsed_steps")
        return
    step = env.step(p.actions(1, 2)[0])
    off = (env.elapsed_steps != wanted + step.valid) & ~step.done & step.valid
    if bool(off.any()):
        row = int(off.nonzero()[0])
        yield p.error(
            f"row {row} was written to {int(wanted[row])} and stands at {int(env.elapsed_steps[row])} a step later",
            "the next step counts on from what was written",
        )
        return
    if p.horizon is not None and _limit_comes(p, p.horizon) and not _limit_follows(p, p.horizon):
        yield p.error(
            f"a clock written to H-1={p.horizon - 1} was not truncated within two steps",
            "the clock is what the time limit looks at",
            word="truncated",
        )
        return
    yield p.ok("masked rows only; state untouched" if state is not None else "masked rows only")


def _clock_is(p: Probe, wanted: Tensor) -> bool:
    return torch.equal(p.env.elapsed_steps.to(wanted), wanted)


def _clock_text(p: Probe, mask: Tensor, wanted: Tensor, before: Tensor) -> str:
    clock = p.env.elapsed_steps
    inside, outside = mask & (clock != wanted), ~mask & (clock != before)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        return f"{rows_text(outside)} outside the mask changed from {int(before[row])} to {int(clock[row])}"
    row = int(inside.nonzero()[0])
    return f"row {row} was to be {int(wanted[row])} and is {int(clock[row])}"


def _state(p: Probe) -> Optional[Dict[str, Tensor]]:
    return clone_tree(p.env.get_state()) if p.has(Capability.SET_STATE) and "state" not in p.failed else None


def _moved_state(
    old: Optional[Dict[str, Tensor]], new: Optional[Dict[str, Tensor]], old_clock: Tensor, clock: Tensor
) -> str:
    """The first name whose value changed other than as the clock did."""
    for name in old or {}:
        assert old is not None
        assert new is not None
        a, b = old[name], new[name]
        is_clock = (
            a.shape == old_clock.shape and torch.equal(a.to(old_clock), old_clock) and torch.equal(b.to(clock), clock)
        )
        if not is_clock and difference({name: a}, {name: b}).amount > 0:
            return name
    return ""


def _limit_comes(p: Probe, horizon: int) -> bool:
    """False where episodes go on beyond H by themselves, which is for the check 'time_limit' to say."""
    episodes, age = p.trace.episodes()
    return horizon > 2 and int(age.max()) < horizon and all(e.length <= horizon for e in episodes)


def _limit_follows(p: Probe, horizon: int) -> bool:
    """False where a row written to H - 1 went on for two steps."""
    for attempt in range(RETRIES):
        p.reset_all()
        row = (p.num_envs - 1 - attempt) % p.num_envs
        mask = torch.arange(p.num_envs, device=p.env.device) == row
        p.env.set_elapsed_steps(torch.full_like(p.env.elapsed_steps, horizon - 1), mask)
        steps = [p.env.step(action) for action in p.actions(1, attempt)]
        steps += [p.env.step(action) for action in p.actions(1, attempt + 9)] if not bool(steps[0].done[row]) else []
        if any(bool(step.truncated[row]) for step in steps):
            return True
        if not any(bool(step.terminated[row]) for step in steps):
            return False
    return True


# -- masks ----------------------------------------------------------------------------------------------------------
def check_masks(p: Probe) -> Iterator[Finding]:
    """What is not [N] bool is refused: integers would index rows instead."""
    env, n = p.env, p.num_envs
    calls: List[Tuple[str, Callable[[Tensor], object]]] = []
    if p.has(Capability.PARTIAL_RESET):
        calls.append(("reset", env.reset))
    if p.has(Capability.SET_CLOCK):
        calls.append(("set_elapsed_steps", lambda mask: env.set_elapsed_steps(env.elapsed_steps, mask)))
    if p.has(Capability.SET_STATE):
        calls.append(("get_state", env.get_state))
        calls.append(("set_state", lambda mask: env.set_state(env.get_state(), mask)))
    if not calls:
        raise Skip("no method here takes a mask")
    p.reset_all()
    wrong = {
        "an int64 mask": p.some.long(),
        "indices": torch.zeros(1, dtype=torch.int64, device=env.device),
        "a bool mask of another length": torch.ones(n + 1, dtype=torch.bool, device=env.device),
    }
    found = False
    for method, call in calls:
        for what, mask in wrong.items():
            if _accepts(call, mask):
                found = True
                rule = "masks are bool [N]; anything else is refused (envs/base.py: check_mask)"
                yield p.error(f"{method} takes {what}", rule, method)
                break
    if not found:
        yield p.ok(f"integers, indices and other lengths are refused by {', '.join(name for name, _ in calls)}")


def _accepts(call: Callable[[Tensor], object], value: Tensor) -> bool:
    try:
        call(value)
    except Exception:
        return False
    return True


def check_actions(p: Probe) -> Iterator[Finding]:
    """Actions of another shape or kind are refused rather than broadcast."""
    spec, n, device = p.env.spec.action, p.num_envs, p.env.device
    p.reset_all()
    if isinstance(spec, Discrete):
        wrong = {"floats": torch.zeros(n, device=device), "[N, 1]": torch.zeros(n, 1, dtype=torch.int64, device=device)}
    else:
        assert isinstance(spec, Box)
        good = p.actions(1, 0)[0]
        wrong = {
            f"[N, {spec.size + 1}] for a Box({spec.size})": torch.cat([good, good[:, :1]], dim=1),
            "[N + 1, A]": torch.cat([good, good[:1]]),
            "integers": torch.zeros(n, spec.size, dtype=torch.int64, device=device),
        }
    taken = [what for what, action in wrong.items() if _accepts(p.env.step, action)]
    if taken:
        yield p.warning(
            f"step takes {' and '.join(taken)}",
            "actions are [N, A] float32 or [N] int64; base.check_action refuses others",
        )
    else:
        yield p.ok(f"{', '.join(wrong)}: refused")


# -- resets of some -------------------------------------------------------------------------------------------------
def check_partial_reset(p: Probe) -> Iterator[Finding]:
    """PARTIAL_RESET: the masked rows start anew, and the others neither show nor do anything else than before."""
    p.need(Capability.PARTIAL_RESET)
    env, rule = p.env, "reset(env_mask) resets the masked rows and leaves the others untouched"
    start = clone_tree(p.reset_all())
    last = clone_tree([env.step(action) for action in p.actions(4, 5)][-1].obs)
    clock, state, mask = env.elapsed_steps, _state(p), p.some
    others = ~mask
    nobody = torch.zeros_like(mask)
    obs = env.reset(nobody)
    diff = difference(last, obs)
    if not torch.equal(env.elapsed_steps, clock) or diff.amount > p.tolerance:
        yield p.error("a mask without a True changed observations or clocks", rule, "reset")
        return
    obs = env.reset(mask)
    check_obs("reset(mask)", obs, env.spec, p.num_envs, env.device)
    now = env.elapsed_steps
    if bool((now[others] != clock[others]).any()):
        yield p.error(f"the clock of {rows_text(others & (now != clock))} outside the mask changed", rule, "reset")
        return
    if bool((now[mask] != 0).any()):
        yield p.error(f"the clock of {rows_text(mask & (now != 0))} in the mask is not 0", rule, "reset")
        return
    diff = difference(last, obs, others.cpu())
    if diff.amount > p.tolerance:
        yield p.error(
            f"the observation '{diff.name}' of row {diff.row} outside the mask changed by {amount(diff.amount)}",
            rule, "reset", "return",
        )  # fmt: skip
        return
    diff = difference(state or {}, _state(p) or {}, others.cpu())
    if diff.amount > 0:
        yield p.error(f"'{diff.name}' of get_state() changed in row {diff.row} outside the mask", rule, "reset")
        return
    had_moved = (flat(last) != flat(start)).any(dim=1) & mask.cpu()
    if bool(had_moved.any()) and difference(last, obs, had_moved).amount == 0:
        yield p.error(
            f"{rows_text(had_moved)}, in the mask: what is shown is what was there before", rule, "reset", "return"
        )
        return
    if not bool(others.any()):
        yield p.ok("with one environment there are no others; num_envs=8 would show them")
        return
    yield from _what_others_do(p, mask, rule)


def _what_others_do(p: Probe, mask: Tensor, rule: str) -> Iterator[Finding]:
    if p.way is None:
        yield p.ok(
            "masked rows only; what the others do afterwards cannot be compared, nothing brings a situation back"
        )
        return
    diff = SAME
    for attempt in range(RETRIES):
        anchor = Anchor(p, p.way, seed=100 + attempt)
        actions = p.actions(WINDOW, attempt)
        anchor.back()
        alone = p.window(actions)
        anchor.back()
        p.env.reset(mask)
        p.seed(anchor.seed + 1)
        diff = compare(alone, p.window(actions), ~mask)
        if diff.amount <= p.tolerance:
            yield p.ok("masked rows only; the others went on as they do without it")
            return
    seen = (
        f"{diff.name} of row {diff.row} outside the mask differs by {amount(diff.amount)}, {diff.step + 1} steps later"
    )
    if p.way == "state":
        yield p.error(seen + ", from a run without the reset", rule, "reset")
    else:
        yield p.warning(seen + "; or step() draws from what a reset moves on", rule, "reset")


def check_manual_reset(p: Probe) -> Iterator[Finding]:
    """MANUAL_RESET: done environments wait, frozen, until they are reset."""
    p.need(Capability.MANUAL_RESET)
    p.distrust("clock", "finite")
    p.env.set_manual_reset(True)
    try:
        yield from _manual_faults(p)
    finally:
        p.reset_all()
        p.env.set_manual_reset(False)


def _manual_faults(p: Probe) -> Iterator[Finding]:
    env, rule = p.env, "under manual resets done environments stay as they are, invalid, until reset(env_mask)"
    first, num_steps = _first_end(p)
    waiting, shown = done_of(first), first
    if bool((first["elapsed_steps"][waiting] == 0).any()):
        yield p.error(f"{rows_text(waiting)}: reset although manual resets were asked for", rule, "set_manual_reset")
        return
    if not bool(first["Step.valid"][waiting].all()):
        yield p.error(f"the step that ended {rows_text(waiting)} is not valid", "it was a real step", word="valid")
        return
    for t, action in enumerate(p.actions(3, 21)):
        shot = p.shoot(env.step(action))
        after = f"{t + 1} step{'s' if t else ''} after the end"
        for what, word, bad in (
            ("valid", "valid", shot["Step.valid"]),
            ("rewarded", "reward", shot["Step.reward"] != 0),
            ("done again", "terminated", done_of(shot)),
            ("on a running clock", "", shot["elapsed_steps"] != first["elapsed_steps"]),
        ):
            if bool((bad & waiting).any()):
                yield p.error(f"{rows_text(bad & waiting)}, waiting: {what}, {after}", rule, word=word)
                return
        frozen = {name: value for name, value in shown.items() if "Step.obs" in name}
        diff = difference(frozen, shot, waiting)
        if diff.amount > p.tolerance:
            yield p.error(f"{diff.name} of the waiting row {diff.row} moved by {amount(diff.amount)}", rule, word="obs")
            return
        others = ~waiting & ~shot["Step.valid"]
        if bool(others.any()):
            yield p.error(f"{rows_text(others)}: not valid, though not waiting", rule, word="valid")
            return
        new = done_of(shot) & ~waiting
        if bool(new.any()):
            break  # the first to end are enough; these would need a picture of their own
    mask = waiting.to(env.device)
    if p.has(Capability.PARTIAL_RESET) and "partial_reset" not in p.failed:
        env.reset(mask)
        clock = env.elapsed_steps[mask]
        valid = env.step(p.actions(1, 22)[0]).valid[mask]
        if bool((clock != 0).any()) or not bool(valid.all()):
            yield p.error(f"{rows_text(waiting)}: reset(env_mask) did not start them anew", rule, "reset")
            return
    yield p.ok(f"{rows_text(waiting)}: ended in step {num_steps}, waited, began anew when reset")


def _first_end(p: Probe) -> Tuple[Shot, int]:
    """(what the first step in which somebody is done showed, its number)."""
    p.reset_all()
    horizon, limit = p.horizon, min(p.steps, 2000)
    if horizon is not None and horizon > 2 and p.has(Capability.SET_CLOCK) and "clock_write" not in p.failed:
        p.env.step(p.actions(1, 19)[0])
        p.env.set_elapsed_steps(torch.full_like(p.env.elapsed_steps, horizon - 1), p.some)
        limit = 3
    for t, action in enumerate(p.actions(limit, 20)):
        shot = p.shoot(p.env.step(action))
        if bool(done_of(shot).any()):
            return shot, t + 1
    raise Skip(f"no episode ended within {limit} steps")


# -- ends of episodes -----------------------------------------------------------------------------------------------
def check_reset_obs(p: Probe) -> Iterator[Finding]:
    """`Step.obs` is of the state that the environment is in, after the reset where there was one."""
    p.need(Capability.SET_STATE)
    p.distrust("state", "clock", "finite")
    if p.way != "state" or p.replay_error > p.tolerance:
        raise Skip("set_state does not replay here")
    env = p.env
    ended = False
    p.reset_all()
    by_clock = p.has(Capability.SET_CLOCK) and p.horizon is not None and p.horizon > 2 and "clock_write" not in p.failed
    for t, action in enumerate(p.actions(8 if by_clock else min(p.steps, 300), 31)):
        if by_clock and t == 4:
            env.set_elapsed_steps(torch.full_like(env.elapsed_steps, (p.horizon or 0) - 1), p.some)
        step = env.step(action)
        done, valid, obs = step.done.cpu(), step.valid.cpu(), clone_tree(step.obs)
        if t in (2, 3) or bool(done.any()):
            diff = difference(obs, env.set_state(env.get_state()), valid)
            if diff.amount > p.tolerance:
                when = "which was done" if bool(done[diff.row]) else f"in step {t}"
                yield p.error(
                    f"Step.obs['{diff.name}'] of row {diff.row}, {when}, is {amount(diff.amount)} off what the "
                    "state shows",
                    "Step.obs is of the next state; after the reset where one happened",
                    word="obs",
                )
                return
        ended = ended or bool(done.any())
        if ended and not by_clock:
            break
    yield p.ok("observations are those of the state, also where an episode had ended" if ended else "no episode ended")


def check_final_obs(p: Probe) -> Iterator[Finding]:
    """FINAL_OBS: the observation in which the episode ended; not the next episode's, not the one before."""
    rule = "final_obs is of the state in which the episode ended, before the reset"
    if not p.has(Capability.FINAL_OBS):
        if any(end.final is not None for end in p.trace.ends):
            yield p.warning("Step.final_obs is given, FINAL_OBS is not claimed: nobody uses it", rule, "__init__")
            return
        p.need(Capability.FINAL_OBS)
    p.distrust("finite", "dummy_steps")
    if any(end.final is None for end in p.trace.ends):
        yield p.error("FINAL_OBS is claimed, but Step.final_obs is None where an episode ended", rule, word="final_obs")
        return
    seen = _Ends(p)
    if not seen.count:
        yield from _exact_or_skip(p, rule)
        return
    if "reset_obs" not in p.failed and seen.told_apart >= 1 and seen.equal_to_start == seen.told_apart:
        yield p.error(
            f"final_obs is the same as obs in all {seen.told_apart} rows that were done: one of them is the "
            "other episode's",
            rule, word="final_obs",
        )  # fmt: skip
        return
    exact = list(_exact_faults(p, rule))
    if exact:
        yield from exact[:1]
        return
    if seen.equal_to_before == seen.count and seen.usual_change > 0.9:
        yield p.warning(
            f"final_obs is the observation before the last step in all {seen.count} rows that were done",
            rule,
            word="final_obs",
        )
        return
    if p.final_proof:
        yield p.ok(p.final_proof)
    elif seen.jumps > 0.5 and seen.count >= 4:
        yield p.warning(
            f"final_obs is no continuation: in {seen.jumps:.0%} of {seen.count} ends it is further from the last "
            "observation than the next episode's start, and further than steps go",
            rule, word="final_obs",
        )  # fmt: skip
    else:
        yield p.ok(f"{seen.count} ends: differs from the next episode's start (not proven: nothing to compare with)")


def _exact_or_skip(p: Probe, rule: str) -> Iterator[Finding]:
    faults = list(_exact_faults(p, rule))
    if faults:
        yield faults[0]
    elif p.final_proof:
        yield p.ok(p.final_proof)
    else:
        yield p.skipped(f"no episode ended in {len(p.trace)} steps")


class _Ends:
    """Counts over the ends of episodes in the long run whose rows were really started anew."""

    def __init__(self, p: Probe) -> None:
        self.count = self.told_apart = self.equal_to_start = self.equal_to_before = 0
        jumps, sizes = 0, torch.stack(p.trace.sizes)
        going = p.trace.stacked("Step.valid") & ~p.trace.stacked("reset")
        usual = float(torch.quantile(sizes[going][:100_000], 0.95)) if bool(going.any()) else 0.0
        self.usual_change = float(torch.stack(p.trace.moved)[going].float().mean()) if bool(going.any()) else 0.0
        for end in p.trace.ends:
            rows, start = _started(end)
            if end.final is None or start is None or not bool(rows.any()):
                continue
            before, final, fresh = flat(end.before)[rows], flat(end.final)[rows], flat(start)[rows]
            apart = (fresh != before).any(dim=1)
            self.count += int(rows.sum())
            self.told_apart += int(apart.sum())
            self.equal_to_start += int(((final == fresh).all(dim=1) & apart).sum())
            self.equal_to_before += int((final == before).all(dim=1).sum())
            gone = torch.linalg.vector_norm(final - before, dim=1)
            jumps += int(((gone > torch.linalg.vector_norm(fresh - before, dim=1)) & (gone > 3 * usual)).sum())
        self.jumps = jumps / max(self.count, 1)


def _started(end: End) -> Tuple[Tensor, Optional[Obs]]:
    """(rows that began a new episode, where its first observation is: in this step, or after a dummy step)."""
    if not end.after:
        return end.rows, end.obs
    obs, shot = end.after[0]
    dummy, waiting = ~shot["Step.valid"], shot["frozen"]
    if bool((dummy & ~waiting & end.rows).any()):
        return end.rows & dummy & ~waiting, obs
    return end.rows & ~waiting, end.obs


def _exact_faults(p: Probe, rule: str) -> Iterator[Finding]:
    """Against the same step in a twin without the reset; notes the proof in the probe where there was one."""
    p.final_proof = ""
    manual = p.has(Capability.MANUAL_RESET) and "manual_reset" not in p.failed
    checked: List[str] = []
    for what, twin in (("time limits", _twin_of_limit(p, manual)), ("terminations", _twin_of_termination(p, manual))):
        if twin is None:
            continue
        diff = difference(twin.final, twin.reference, twin.rows)
        if diff.amount > p.tolerance + p.replay_error:
            as_obs = difference(twin.final, twin.obs, twin.rows).amount == 0
            hint = "; it is the next episode's first observation" if as_obs else ""
            yield p.error(
                f"at {what}, final_obs['{diff.name}'] of row {diff.row} is {amount(diff.amount)} off what the same "
                f"step shows without a reset{hint}",
                rule, word="final_obs",
            )  # fmt: skip
            return
        off = (twin.reward_off > p.tolerance + p.replay_error) & twin.rows
        if bool(off.any()):
            yield p.error(
                f"at {what}, the reward of {rows_text(off)} is not that of the same step without a reset",
                "what step returns belongs to the transition that was made, not to the next episode",
                word="reward",
            )
            return
        checked.append(what)
    if checked:
        p.final_proof = f"equal to what the same step shows without a reset, at {' and '.join(checked)}"


class _Twin(NamedTuple):
    """The same last step of an episode twice: with the reset, and without."""

    rows: Tensor
    """[N] bool on the CPU"""
    final: Obs
    obs: Obs
    reference: Obs
    reward_off: Tensor
    """[N]"""


def _twin_of_limit(p: Probe, manual: bool) -> Optional[_Twin]:
    """Clocks of some rows written to H - 1, and a step. Without the reset: under manual resets, or no clock written."""
    horizon = p.horizon
    by_clock = p.has(Capability.SET_CLOCK) and not p.failed & {"clock", "clock_write"}
    if horizon is None or horizon <= 2 or not by_clock or p.way is None:
        return None
    anchor, action = p.anchor(), p.actions(1, 41)[0]
    late = torch.full_like(p.env.elapsed_steps, horizon - 1)

    def ends(write: bool) -> Step:
        if write:
            p.env.set_elapsed_steps(late, p.some)
            p.seed(anchor.seed + 2)
        step = p.env.step(action.clone())
        return Step(clone_tree(step.obs), step.reward.clone(), step.terminated.clone(), step.truncated.clone(),
                    clone_tree(step.final_obs), step.valid.clone())  # fmt: skip

    anchor.back()
    ended = ends(True)
    rows = (ended.truncated & p.some).cpu()
    if ended.final_obs is None or not bool(rows.any()):
        return None
    if manual:
        twin = _without_reset(p, lambda: (anchor.back(), p.env.set_manual_reset(True)), lambda: ends(True))
        reference = twin.obs
    else:
        anchor.back()
        p.seed(anchor.seed + 2)
        twin = ends(False)
        if bool((twin.done.cpu() & rows).any()):
            return None
        # Columns that show the clock differ by themselves: they are left as they are.
        anchor.back()
        shown = clone_tree(_shown_with_clock(p, late))
        reference = {
            name: torch.where(
                _clock_columns(anchor.obs[name], shown.get(name, anchor.obs[name])),
                ended.final_obs[name],
                twin.obs[name],
            )
            for name in twin.obs
        }
    off = (ended.reward - twin.reward).abs().cpu() if manual else torch.zeros(p.num_envs)
    return _Twin(rows, ended.final_obs, ended.obs, reference, off)


def _without_reset(p: Probe, prepare: Callable[[], object], run: Callable[[], Step]) -> Step:
    try:
        prepare()
        return run()
    finally:
        p.reset_all()
        p.env.set_manual_reset(False)


def _shown_with_clock(p: Probe, clock: Tensor) -> Obs:
    """What the present state shows under another clock; the present one where states cannot be set."""
    p.env.set_elapsed_steps(clock)
    if p.has(Capability.SET_STATE) and "state" not in p.failed:
        return p.env.set_state(p.env.get_state())
    nobody = torch.zeros(p.num_envs, dtype=torch.bool, device=p.env.device)
    return p.env.reset(nobody) if p.has(Capability.PARTIAL_RESET) else {}


def _clock_columns(a: Tensor, b: Tensor) -> Tensor:
    """[1, ...] bool: numbers that changed in some row."""
    return (a != b).any(dim=0, keepdim=True)


def _twin_of_termination(p: Probe, manual: bool) -> Optional[_Twin]:
    """The first step of the long run in which somebody terminated, again, under manual resets."""
    found = p.trace.before_termination
    if found is None or not manual or p.way != "state":
        return None
    state, action, ended = found

    def prepare() -> None:
        p.env.set_state(clone_tree(state))
        p.env.set_manual_reset(True)

    again = _without_reset(p, prepare, lambda: _copied(p.env.step(action.clone())))
    same_ends = torch.equal(again.terminated, ended.terminated) and torch.equal(again.truncated, ended.truncated)
    others = ~ended.done.cpu()
    if ended.final_obs is None or not same_ends or difference(again.obs, ended.obs, others).amount > p.tolerance:
        return None  # steps draw: the same state does not end again
    off = (again.reward - ended.reward).abs().cpu()
    return _Twin(ended.terminated.cpu(), ended.final_obs, ended.obs, again.obs, off)


def _copied(step: Step) -> Step:
    return Step(clone_tree(step.obs), step.reward.clone(), step.terminated.clone(), step.truncated.clone(), None,
                step.valid.clone())  # fmt: skip


# -- dummy steps ----------------------------------------------------------------------------------------------------
def check_dummy_steps(p: Probe) -> Iterator[Finding]:
    """A step that a simulator spends on the reset itself, with the action ignored, is marked invalid."""
    rule = "a step that made no transition has valid=False (as after a done in Gymnasium's NEXT_STEP mode)"
    shots, after = p.trace.shots, p.trace.stacked
    previous_done = torch.zeros_like(after("reset"))
    previous_done[1:] = (after("Step.terminated") | after("Step.truncated"))[:-1]
    after_end = previous_done & ~after("frozen")
    if not bool(after_end.any()):
        raise Skip(f"no step after the end of an episode in {len(shots)} steps")
    marked = after_end & ~after("Step.valid")
    counted = after_end & after("Step.valid")
    if not bool(counted.any()):
        yield p.ok(f"{int(marked.sum())} steps after the end of an episode, all marked")
        return
    stood = counted & (after("elapsed_steps") == 0) & ~after("reset")
    if (
        bool(stood.any())
        and not p.trace.clock_fault
        and bool(torch.tensor([c is not None for c in p.trace.clocks]).all())
    ):
        t, row = stood.nonzero()[0].tolist()
        yield p.error(
            f"step {t}: row {row}, done in the step before, is valid, but its clock stands at 0", rule, word="valid"
        )
        return
    verdict = _action_counts_after_end(p)
    if verdict is False:
        yield p.error(
            "the action of the step after an end changes nothing, though at an episode's start it does",
            rule,
            word="valid",
        )
        return
    reward, others = after("Step.reward"), after("Step.valid") & ~after_end
    others[0] = others[0] & True
    zero_after, zero_else = reward[counted] == 0, reward[others] == 0
    if verdict is None and bool(zero_after.all()) and others.sum() >= 5 and float(zero_else.float().mean()) < 0.1:
        yield p.warning(
            f"the reward is exactly 0 in all {int(counted.sum())} steps after an end, and in "
            f"{float(zero_else.float().mean()):.0%} of the others; all are valid",
            rule, word="valid",
        )  # fmt: skip
        return
    text = f"{int(counted.sum())} steps after an end are real ones"
    yield p.ok(text + (f", {int(marked.sum())} are marked invalid" if bool(marked.any()) else ""))


def _action_counts_after_end(p: Probe) -> Optional[bool]:
    """Whether the step after an end listens to its action as an episode's first step does; None: not to be told."""
    pair = p.extremes()[:2]
    reach = _way_to_an_end(p)
    if reach is None:
        return None
    results, first = [], []
    rows = torch.zeros(p.num_envs, dtype=torch.bool)
    for action in pair:
        rows = reach()
        p.seed(77)
        results.append(p.shoot(p.env.step(action.clone())))
        p.seed(76)
        p.reset_all()
        p.seed(77)
        first.append(p.shoot(p.env.step(action.clone())))
    listens = _changed(results[0], results[1]) & rows & results[0]["Step.valid"]
    at_start = _changed(first[0], first[1]) & rows
    if not bool(at_start.any()) or not bool((rows & results[0]["Step.valid"]).any()):
        return None
    return bool(listens.any())


def _changed(a: Shot, b: Shot) -> Tensor:
    """[N] bool: rows that showed anything else."""
    names = [name for name in a if name == "Step.reward" or "Step.obs" in name]
    return torch.stack(
        [(a[name] != b[name]).flatten(1).any(1) if a[name].dim() > 1 else a[name] != b[name] for name in names]
    ).any(0)


def _way_to_an_end(p: Probe) -> Optional[Callable[[], Tensor]]:
    """Brings the environment to just after an end, always the same; returns the rows [N] that ended. None: no way."""
    horizon = p.horizon
    by_clock = p.has(Capability.SET_CLOCK) and not p.failed & {"clock", "clock_write"}
    if p.way is None:
        return None
    if by_clock and horizon is not None and horizon > 2:
        anchor, action = p.anchor(), p.actions(1, 51)[0]

        def write_clock() -> Tensor:
            anchor.back()
            p.env.set_elapsed_steps(torch.full_like(p.env.elapsed_steps, horizon - 1), p.some)
            return p.env.step(action.clone()).done.cpu()

        return write_clock
    if p.way != "seed" or not p.trace.ends or p.trace.ends[0].step > 300:
        return None
    end = p.trace.ends[0]

    def walk() -> Tensor:
        p.seed_as_in_trace()
        p.reset_all()
        dones = [p.env.step(action.clone()).done.cpu() for action in p.trace.actions[: end.step + 1]]
        return dones[-1]

    return walk
