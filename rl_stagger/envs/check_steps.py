"""Checks of what `reset` and `step` return, read from one long run of random actions."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, List

import torch
from torch import Tensor

from rl_stagger.envs.base import Box, Capability, Discrete, EnvSpec, check_step
from rl_stagger.envs.check_probe import Probe, done_of, flat, rows_text
from rl_stagger.envs.check_report import Finding

SEEN_ENDS = 3
"""So many ends of episodes make a coincidence unlikely."""


def check_spec(p: Probe) -> Iterator[Finding]:
    """The four attributes are there, are of their types, and can be meant."""
    env, rule = p.env, "num_envs, device, spec and capabilities are set before the first reset (envs/base.py)"
    faults: List[str] = []
    if not isinstance(env.num_envs, int) or env.num_envs < 1:
        faults.append(f"num_envs is {env.num_envs!r}, expected a whole number of at least 1")
    if not isinstance(env.device, torch.device):
        faults.append(f"device is a {type(env.device).__name__}, expected a torch.device")
    if not isinstance(env.spec, EnvSpec):
        faults.append(f"spec is a {type(env.spec).__name__}, expected an EnvSpec")
    else:
        faults += _spec_faults(env.spec)
    foreign = [c for c in env.capabilities if not isinstance(c, Capability)]
    if foreign or not isinstance(env.capabilities, frozenset):
        faults.append(f"capabilities is {env.capabilities!r}, expected a frozenset of Capability")
    for fault in faults:
        yield p.error(fault, rule, "__init__")
    if not faults:
        spec = env.spec
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in spec.obs_shapes.items())
        yield p.ok(f"{shapes}; {spec.action}; H={spec.horizon_steps}")


def _spec_faults(spec: EnvSpec) -> Iterator[str]:
    for name, shape in spec.obs_shapes.items():
        if not isinstance(shape, tuple) or not all(isinstance(size, int) and size > 0 for size in shape):
            yield f"spec.obs_shapes['{name}'] is {shape!r}, expected a tuple of whole numbers above 0"
    if isinstance(spec.action, Box):
        low, high = spec.action.bounds("cpu")
        if not bool((low < high).all()):
            yield f"spec.action has low={spec.action.low} and high={spec.action.high}; low must be below high"
    elif not isinstance(spec.action, Discrete):
        yield f"spec.action is a {type(spec.action).__name__}, expected Box or Discrete"
    for name, columns in spec.phase_columns.items():
        if name not in spec.obs_shapes or not 0 < columns <= spec.obs_shapes[name][-1]:
            yield f"spec.phase_columns['{name}'] is {columns}, which that group does not have"


def check_shapes(p: Probe) -> Iterator[Finding]:
    """Types, shapes, dtypes and devices of everything, in every step of the run; the spec stays as it was."""
    spec, rule = p.env.spec, "observations, reward and masks as in envs/base.py: [N, ...] on env.device, every step"
    trace = p.trace_or_nothing
    if trace.error is not None:
        raise trace.error
    if trace.form_fault:
        yield p.error(trace.form_fault, rule, trace.form_method, "return")
        return
    p.trace  # noqa: B018  (raises where there was no step)
    step = p.env.step(p.actions(1, 0)[0])
    check_step(step, spec, p.num_envs, p.env.device)
    found = False
    expected = {"reward": (step.reward, torch.float32)}
    expected.update({f"obs['{k}']": (step.obs[k], spec.obs_dtype(k)) for k in spec.obs_shapes})
    for name, (value, dtype) in expected.items():
        if value.dtype != dtype:
            found = True
            level, said = (p.error, "reward [N] float32") if name == "reward" else (p.warning, "spec.obs_dtypes")
            yield level(f"Step.{name} is {value.dtype}, expected {dtype}", said, word=name.partition("[")[0])
    extra = sorted(set(map(str, step.obs)) - set(spec.obs_shapes))
    if extra:
        found = True
        yield p.warning(f"the observation has the groups {extra}, which spec.obs_shapes has not", rule, word="obs")
    if step.reward.device != p.env.device and p.env.device.index is not None:
        found = True
        yield p.error(f"Step.reward is on {step.reward.device}, env.device is {p.env.device}", rule, word="reward")
    changed = _changed_fields(p.spec_at_start, p.env.spec)
    if changed:
        found = True
        yield p.error(f"env.spec has changed: {changed}", "the spec is known before the first step", "step")
    if not found:
        ends = sum(int(done_of(shot).sum()) for shot in trace.shots)
        text = f"{len(trace)} steps of {p.num_envs} environments, {ends} ends of episodes"
        yield p.ok(text + (f"; {trace.stopped}" if trace.stopped else ""))


def _changed_fields(old: Any, new: Any) -> str:
    """ "horizon_steps was 5, is 6" for every field of the spec that is another one."""
    names = [f.name for f in dataclasses.fields(EnvSpec) if getattr(old, f.name) != getattr(new, f.name)]
    return "; ".join(f"{name} was {getattr(old, name)!r}, is {getattr(new, name)!r}" for name in names)


def check_info(p: Probe) -> Iterator[Finding]:
    """`log` holds scalars and [N] of numbers; `success` is bool; both keep their kind."""
    rule = '"log": name -> scalar or [N] tensor (NaN = no event); "success": [N] bool'
    seen: Dict[str, str] = {}
    for t, info in enumerate(p.trace.infos):
        for fault in _info_faults(info, p.num_envs):
            yield p.error(f"step {t}: {fault}", rule, word="info")
            return
        seen.update({str(name): "" for name in info})
    names = ", ".join(sorted(seen))
    yield p.ok(f"info has {names}" if names else "info is empty")


def _info_faults(info: Dict[str, Any], num_envs: int) -> Iterator[str]:
    log = info.get("log", {})
    if not isinstance(log, dict):
        yield f"info['log'] is a {type(log).__name__}, expected a dict"
        return
    for name, value in log.items():
        try:
            x = (
                value.detach().cpu().double()
                if isinstance(value, Tensor)
                else torch.as_tensor(value, dtype=torch.float64)
            )
        except (TypeError, ValueError, RuntimeError):
            yield f"info['log']['{name}'] is {value!r}, expected a number or a tensor"
            continue
        if x.numel() != 1 and tuple(x.shape) != (num_envs,):
            yield f"info['log']['{name}'] has shape {list(x.shape)}, expected [] or [{num_envs}]"
        if bool(torch.isinf(x).any()):
            yield f"info['log']['{name}'] is infinite; NaN says that there was no event"


def check_finite(p: Probe) -> Iterator[Finding]:
    """No NaN and no infinity in observations and rewards, at the actions' bounds as well."""
    rule = "observations and rewards are finite for every action within the bounds"
    for name, (t, row) in p.trace.not_finite.items():
        yield p.error(f"{name} is not finite in row {row} of step {t}", rule, word=name[5:].partition("[")[0])
    if p.trace.not_finite:
        return
    p.reset_all()
    for action in p.extremes():
        for _ in range(2):
            step = p.env.step(action.clone())
            for name, value in {"obs": flat(step.obs).sum(1), "reward": step.reward.cpu()}.items():
                bad = ~torch.isfinite(value) & step.valid.cpu()
                if bool(bad.any()):
                    given = action[int(bad.nonzero()[0])].tolist()
                    yield p.error(
                        f"Step.{name} is not finite in {rows_text(bad)} for the action {given}", rule, word=name
                    )
                    return
    yield p.ok(f"{len(p.trace)} steps within the bounds and {2 * len(p.extremes())} at their edge")


def check_flags(p: Probe) -> Iterator[Finding]:
    """An episode ends in one way, and only where there was a step to end it."""
    terminated, truncated = p.trace.stacked("Step.terminated"), p.trace.stacked("Step.truncated")
    both = terminated & truncated
    if bool(both.any()):
        t, row = both.nonzero()[0].tolist()
        yield p.error(
            f"step {t}: row {row} is terminated and truncated ({int(both.sum())} times in {len(p.trace)} steps)",
            "terminated (no future value) or truncated (the last state's value counts), never both",
            word="truncated",
        )
    invalid = (terminated | truncated) & ~p.trace.stacked("Step.valid")
    if bool(invalid.any()):
        t, row = invalid.nonzero()[0].tolist()
        yield p.warning(
            f"step {t}: row {row} is done in a step that is not valid", "an invalid step enters nothing", word="valid"
        )
    if not bool((both | invalid).any()):
        yield p.ok(f"{int(terminated.sum())} terminations and {int(truncated.sum())} truncations, none both")


def check_terminations(p: Probe) -> Iterator[Finding]:
    """A time limit that is reported as a termination shows itself by its always equal length."""
    episodes, _ = p.trace.episodes()
    lengths = [e.length for e in episodes if e.kind == "terminated"]
    if not lengths:
        yield p.ok("no termination was seen")
        return
    same = len(set(lengths)) == 1 and lengths[0] > 1
    if same and (len(lengths) >= SEEN_ENDS or lengths[0] == p.horizon):
        yield p.warning(
            f"all {len(lengths)} terminations came at step {lengths[0]} of their episode"
            + (", which is H" if lengths[0] == p.horizon else ""),
            "a time limit is a truncation: the last state's value counts",
            word="terminated",
        )
    else:
        yield p.ok(f"{len(lengths)} terminations, at {min(lengths)} to {max(lengths)} steps")


def check_time_limit(p: Probe) -> Iterator[Finding]:
    """H is true: truncations come at H, and nothing goes on beyond it."""
    horizon = p.horizon
    episodes, age = p.trace.episodes()
    lengths = [e.length for e in episodes if e.kind == "truncated"]
    longest = max([*(e.length for e in episodes), int(age.max())])
    if horizon is None:
        if len(lengths) >= SEEN_ENDS and len(set(lengths)) == 1:
            yield p.warning(
                f"spec.horizon_steps is None, but all {len(lengths)} truncations came at step {lengths[0]}",
                "spec.horizon_steps is the time limit, None where there is none",
                word="truncated",
            )
        else:
            yield p.ok(f"no time limit; the longest episode seen had {longest} steps")
        return
    rule = f"spec.horizon_steps={horizon} is the time limit: episodes are truncated in that step and go on in no case"
    if lengths and horizon not in lengths and len(set(lengths)) == 1:
        yield p.error(f"all {len(lengths)} truncations came at step {lengths[0]}", rule, word="truncated")
        return
    if longest > horizon or int(age.max()) == horizon:
        row = next((e.row for e in episodes if e.length > horizon), int(age.argmax()))
        yield p.error(f"row {row} went on beyond step {horizon} of its episode", rule, word="truncated")
        return
    others = [e for e in episodes if e.kind == "truncated" and e.length != horizon]
    if others:
        at = sorted({e.length for e in others})
        yield p.warning(
            f"{len(others)} of {len(lengths)} truncations came at another length than H: {at[:6]}; the first in row "
            f"{others[0].row} of step {others[0].step}",
            rule + '; what a reset rule cuts is marked in info["cut"]',
            word="truncated",
        )
        return
    written = p.has(Capability.SET_CLOCK) and horizon > 2 and not p.failed & {"clock", "clock_write"}
    found = _limit_by_clock(p, horizon) if written else None
    if found is not None and found != horizon:
        yield p.error(f"a clock written to {horizon - 2} was truncated at {found}", rule, word="truncated")
    elif horizon in lengths:
        yield p.ok(f"{len(lengths)} episodes were truncated, all at step {horizon}")
    elif found == horizon:
        yield p.ok(f"truncated at {horizon} by a written clock; the longest episode seen had {longest} steps")
    elif any(e.length == horizon for e in episodes):
        yield p.ok(f"the longest episode seen had {longest} steps, and ended otherwise")
    else:
        yield p.skipped(f"no episode got to H={horizon} in {len(p.trace)} steps (the longest: {longest}); {_more(p)}")


def _limit_by_clock(p: Probe, horizon: int) -> Any:
    """At which clock a row written to H - 2 is truncated; None where that was not seen."""
    for attempt in range(3):
        p.reset_all()
        row = attempt % p.num_envs
        mask = torch.arange(p.num_envs, device=p.env.device) == row
        p.env.set_elapsed_steps(torch.full_like(p.env.elapsed_steps, horizon - 2), mask)
        for clock, action in zip((horizon - 1, horizon, horizon + 1), p.actions(3, attempt)):
            step = p.env.step(action)
            if bool(step.truncated[row]):
                return clock
            if bool(step.terminated[row]):
                break
    return None


def _more(p: Probe) -> str:
    assert p.horizon is not None
    return p.trace.stopped or f"steps={p.horizon + 8} would"


def check_clock(p: Probe) -> Iterator[Finding]:
    """int64, a clone, one up with every valid step, 0 after a reset."""
    trace, rule = p.trace, "elapsed_steps is [N] int64, a clone: +1 in every valid step, 0 after a reset"
    if trace.clock_fault:
        yield p.error(trace.clock_fault, rule, "elapsed_steps", "return")
        return
    read = p.env.elapsed_steps
    kept = read.clone()
    read.add_(3)
    if not torch.equal(p.env.elapsed_steps, kept):
        read.sub_(3)
        yield p.error("writing into what elapsed_steps returned moved the clock", rule, "elapsed_steps", "return")
        return
    fault = _clock_fault(p)
    if fault:
        yield p.error(fault, rule, "step")
        return
    clock = p.env.phase_steps
    if clock.shape != kept.shape or clock.dtype != torch.int64:
        yield p.error(f"phase_steps is {list(clock.shape)} {clock.dtype}", "phase_steps is [N] int64", "phase_steps")
        return
    yield p.ok(f"counted {int(trace.stacked('Step.valid').sum())} valid steps")


def _clock_fault(p: Probe) -> str:
    trace = p.trace
    first = trace.clocks[0]
    assert first is not None
    if bool((first != 0).any()):
        return f"after reset() the clock of {rows_text(first != 0)} is {int(first[first != 0][0])}"
    after_done = torch.zeros_like(trace.shots[0]["reset"])
    before = first
    for t, shot in enumerate(trace.shots):
        now, valid, reset = trace.clocks[t + 1], shot["Step.valid"], shot["reset"] | shot["cut"]
        assert now is not None
        dummy = after_done & (now == 0)  # the check 'dummy_steps' looks at those
        right = torch.where(valid, now == before + 1, (now == before) | (now == 0)) | reset | dummy
        right = right & ((now == 0) | ~shot["reset"])
        if not bool(right.all()):
            row = int((~right).nonzero()[0])
            kind = (
                "was reset" if bool(shot["reset"][row]) else "took a valid step" if bool(valid[row]) else "stood still"
            )
            return f"step {t}: row {row} {kind}, its clock went from {int(before[row])} to {int(now[row])}"
        after_done, before = done_of(shot), now
    return ""
