"""Checks of what an environment remembers and gives away: states, seeds, saves, tensors, capabilities."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, VecEnv
from rl_stagger.envs.check_probe import (
    PREFIX,
    WINDOW,
    Diff,
    Probe,
    Shot,
    Skip,
    amount,
    clone_tree,
    compare,
    difference,
    field_of,
    off,
    tensors_of,
)
from rl_stagger.envs.check_report import Finding, writes

SLOW_BUILD_S = 15.0
"""An environment that takes longer to build is not built again for the sake of one more comparison."""
START_NOISE = 1e-3
"""Starts that differ by less come of arithmetic, by more of other random numbers."""


# -- states ---------------------------------------------------------------------------------------------------------
def check_state(p: Probe) -> Iterator[Finding]:
    """SET_STATE: from a state that was set, the same actions give the same observations, rewards and ends."""
    p.need(Capability.SET_STATE)
    env, rule = p.env, "get_state gives clones of all that the next steps depend on; set_state brings it back"
    p.seed(60)
    p.reset_all()
    p.window(p.actions(PREFIX, 60))
    state = env.get_state()
    wrong = [name for name, x in state.items() if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[0] != p.num_envs]
    if wrong:
        yield p.error(f"get_state()['{wrong[0]}'] is no tensor [{p.num_envs}, ...]", rule, "get_state", "return")
        return
    kept, clock = clone_tree(state), env.elapsed_steps
    actions = p.actions(WINDOW, 61)
    p.window(actions)
    if difference(kept, state).amount > 0:
        name = difference(kept, state).name
        yield p.error(f"get_state()['{name}'] changed while the environment went on", rule, "get_state", "return")
        return
    shown = clone_tree(env.set_state(clone_tree(kept)))
    p.seed(61)
    first = p.window(actions)
    obs, again = _replay(p, kept, actions, scribble=False)
    diff = difference(shown, obs)
    if diff.amount > p.tolerance:
        seen = (
            f"set_state gave '{diff.name}' of row {diff.row} {amount(diff.amount)} off what it gave for the same state"
        )
        if _reproducible(p):
            yield p.error(seen, rule, "set_state", "return")
        else:
            yield p.warning(
                seen + ", or observations draw noise that seed() does not cover", rule, "set_state", "return"
            )
        return
    if not torch.equal(again[0]["elapsed_steps"], first[0]["elapsed_steps"]):
        yield p.error(f"the clock was {clock.tolist()[:6]} and was not brought back", rule, "set_state")
        return
    worst = max(diff, compare(first, again))
    if worst.amount > p.tolerance:
        seen = f"after set_state, {worst.name} of row {worst.row} is {off(worst)}"
        if _reproducible(p):
            yield p.error(seen, rule, "get_state", "return")
        else:
            yield p.warning(seen + "; or steps draw what seed() does not cover", rule, "get_state", "return")
        return
    scribbled = max(compare(first, _replay(p, kept, actions, scribble=True)[1]), Diff(0.0, "", 0))
    if scribbled.amount > p.tolerance:
        yield p.error(
            "set_state keeps the tensors that it was given: writing into them later changes the run", rule, "set_state"
        )
        return
    names = ", ".join(sorted(state)[:5]) + (f" and {len(state) - 5} more" if len(state) > 5 else "")
    yield p.ok(f"{WINDOW} steps replay {_exactness(worst.amount)} ({names})")


def _replay(p: Probe, state: Dict[str, Tensor], actions: List[Tensor], scribble: bool) -> Tuple[Obs, List[Shot]]:
    """(what set_state showed, the steps from there), after something else has happened in between."""
    p.reset_all()
    p.window(p.actions(2, 62))
    given = clone_tree(state)
    obs = clone_tree(p.env.set_state(given))
    if scribble:
        for value in given.values():
            scribble_on(value)
    p.seed(61)
    return obs, p.window(actions)


def _exactness(value: float) -> str:
    return "exactly" if value == 0 else f"to within {amount(value)}"


def check_state_rows(p: Probe) -> Iterator[Finding]:
    """set_state writes the masked rows and no others."""
    p.need(Capability.SET_STATE)
    p.distrust("state")
    env, rule = p.env, "set_state(state, env_mask) writes the masked rows; the others stay"
    p.reset_all()
    p.window(p.actions(2, 63))
    old = clone_tree(env.get_state())
    last = clone_tree([env.step(action) for action in p.actions(3, 64)][-1].obs)
    now, mask = clone_tree(env.get_state()), p.some.cpu()
    shown = env.set_state(clone_tree(old), p.some)
    after = clone_tree(env.get_state())
    for what, other, rows in (("outside the mask changed", now, ~mask), ("in the mask was not written", old, mask)):
        diff = difference(other, after, rows)
        if diff.amount > p.tolerance:
            yield p.error(f"'{diff.name}' of row {diff.row} {what}", rule, "set_state")
            return
    diff = difference(last, shown, ~mask)
    if diff.amount > p.tolerance:
        yield p.error(
            f"set_state gave '{diff.name}' of row {diff.row}, outside the mask, {amount(diff.amount)} off what "
            "was shown",
            rule, "set_state", "return",
        )  # fmt: skip
        return
    yield p.ok("masked rows only" if p.num_envs > 1 else "with one environment there are no others")


def _reproducible(p: Probe) -> bool:
    """True where seed() and the same actions give the same steps, so that nothing is drawn past it."""
    first, second = _episode(p, 65), _episode(p, 65)
    return compare(first[1], second[1]).amount <= p.tolerance


# -- seeds ----------------------------------------------------------------------------------------------------------
def check_seeds(p: Probe) -> Iterator[Finding]:
    """The same seed gives the same episodes, another seed others."""
    rule = "seed(n) re-seeds all that the environment draws from: same seed, same trajectory; another, another"
    if not writes(p.env.unwrapped, "seed"):
        if p.make is None:
            raise Skip("seed() is not written, and no other instance could be built to compare")
        yield from _built_anew(
            p, "the same seed builds the same environment", "in new instances (seed() is not written)"
        )
        return
    a, b = _episode(p, 11), _episode(p, 11)
    apart = difference(a[0], b[0])
    if apart.amount > max(p.tolerance, START_NOISE):
        yield p.error(f"two starts after seed(11) differ in '{apart.name}' by {amount(apart.amount)}", rule, "seed")
        return
    later = compare(a[1], b[1])
    if max(apart.amount, later.amount) > p.tolerance:
        worst = max(apart, later)
        yield p.warning(
            f"after seed(11) twice, {worst.name} differs by {amount(worst.amount)} in step {worst.step}; a simulator "
            "that is not bitwise reproducible needs tolerance=...",
            rule, "seed",
        )  # fmt: skip
        return
    p.seed(99)
    p.env.seed(11)
    own = _play(p)
    if max(difference(a[0], own[0]), compare(a[1], own[1])).amount > p.tolerance:
        yield p.warning(
            "it draws from Python's, NumPy's or torch's global generators, which seed() does not reach",
            rule + "; a generator of its own is nobody else's", "seed",
        )  # fmt: skip
        return
    if _same_start_for_every_seed(p, a[0]):
        yield p.error("six other seeds gave the same start, though starts differ from reset to reset", rule, "seed")
        return
    exactly = _exactness(max(apart.amount, later.amount))
    yield from _built_anew(p, rule, exactly if p.make is None else f"{exactly}, in new instances as well")


def _episode(p: Probe, seed: int) -> Tuple[Obs, List[Shot]]:
    p.seed(seed)
    return _play(p)


def _play(p: Probe) -> Tuple[Obs, List[Shot]]:
    obs = clone_tree(p.reset_all())
    return obs, p.window(p.actions(WINDOW, 66))


def _same_start_for_every_seed(p: Probe, start: Obs) -> bool:
    """True where seeds do not matter to starts that are drawn."""
    for seed in range(12, 18):
        p.seed(seed)
        if difference(start, p.reset_all()).amount > 0:
            return False
    previous, changes = clone_tree(p.reset_all()), 0
    for _ in range(6):
        obs = clone_tree(p.reset_all())
        changes += int(difference(previous, obs).amount > 0)
        previous = obs
    return changes >= 3


def _built_anew(p: Probe, rule: str, exactly: str) -> Iterator[Finding]:
    if p.make is None:
        yield p.ok(f"the same seed replays {exactly} (no other instance could be built to compare)")
        return
    start = time.monotonic()
    first = _of_new(p, 21)
    if time.monotonic() - start > SLOW_BUILD_S:
        yield p.ok(f"the same seed replays {exactly} (building another instance takes too long to compare)")
        return
    p.build_s = time.monotonic() - start
    again, other = _of_new(p, 21), _of_new(p, 22)
    diff = max(difference(first[0], again[0]), compare(first[1], again[1]))
    if diff.amount > p.tolerance:
        yield p.error(
            f"two instances built with seed 21 differ by {amount(diff.amount)} in {diff.name}", rule, "__init__"
        )
        return
    same = max(difference(first[0], other[0]), compare(first[1], other[1])).amount == 0
    text = f"the same seed replays {exactly}"
    yield p.ok(text + ("; another seed changes nothing here: nothing is drawn" if same else "; another seed differs"))


def _of_new(p: Probe, seed: int) -> Tuple[Obs, List[Shot]]:
    """The first steps of an instance built with `seed`."""
    assert p.make is not None
    p.seed(5, own=False)
    other = p.like(p.make(seed))
    try:
        return _play(other)
    finally:
        other.env.close()


# -- saves ----------------------------------------------------------------------------------------------------------
def check_resume(p: Probe) -> Iterator[Finding]:
    """EXACT_RESUME: what was saved goes on bitwise; without it, what was saved can at least be loaded."""
    env, rule = p.env, "state_dict holds all that the next step depends on, random numbers included"
    exact = p.has(Capability.EXACT_RESUME)
    p.seed(70)
    p.reset_all()
    p.window(p.actions(PREFIX, 70))
    late = (
        p.has(Capability.SET_CLOCK)
        and p.horizon is not None
        and p.horizon > 4
        and not p.failed & {"clock", "clock_write"}
    )
    if late:
        p.env.set_elapsed_steps(torch.full_like(env.elapsed_steps, (p.horizon or 0) - 3), p.some)
    saved = env.state_dict()
    if not saved and not exact:
        raise Skip("state_dict() is empty, and EXACT_RESUME is not claimed")
    fault = _unsavable(saved)
    if fault:
        plain = "what can be saved: tensors, numbers, strings, lists and dicts of them"
        yield p.error(f"state_dict(){fault}", plain, "state_dict", "return")
        return
    kept = clone_tree(saved)
    actions = p.actions(2 * WINDOW, 71)
    first = p.window(actions)
    changed = _first_difference(kept, saved)
    if changed:
        yield p.error(f"state_dict(){changed} changed while the environment went on", rule, "state_dict", "return")
        return
    again = _resumed(p, kept, actions)
    if not exact:
        yield p.ok("what is saved can be loaded; EXACT_RESUME is not claimed, so no more is asked")
        return
    diff = compare(first, again, to_the_end=True)
    if diff.amount > 0:
        seen = f"after load_state_dict, {diff.name} of row {diff.row} is {off(diff)}"
        yield p.error(seen, rule, "state_dict", "return")
        return
    if p.make is None or p.build_s > SLOW_BUILD_S:
        yield p.ok(f"{len(actions)} steps go on bitwise in the same instance")
        return
    other = p.like(p.make(98))
    try:
        diff = compare(first, _resumed(other, kept, actions), to_the_end=True)
    finally:
        other.env.close()
    if diff.amount > 0:
        seen = f"in a new instance, {diff.name} of row {diff.row} is {off(diff)}"
        yield p.error(seen, rule, "state_dict", "return")
        return
    yield p.ok(f"{len(actions)} steps go on bitwise, in a new instance as well")


def _resumed(p: Probe, saved: Dict[str, Any], actions: List[Tensor]) -> List[Shot]:
    """The steps after loading, once the environment has been elsewhere."""
    p.seed(72)
    p.reset_all()
    p.window(p.actions(2, 72))
    p.env.load_state_dict(clone_tree(saved))
    return p.window(actions)


def _unsavable(tree: Any, path: str = "") -> str:
    """Path and type of the first thing that a checkpoint cannot hold; "" for none."""
    if tree is None or isinstance(tree, (Tensor, bool, int, float, str)):
        return ""
    if isinstance(tree, dict):
        odd = [key for key in tree if not isinstance(key, (str, int))]
        found = (_unsavable(value, f"{path}[{key!r}]") for key, value in tree.items())
        return f"{path} has the key {odd[0]!r}" if odd else next((text for text in found if text), "")
    if isinstance(tree, (list, tuple)):
        return next((text for text in (_unsavable(x, f"{path}[{i}]") for i, x in enumerate(tree)) if text), "")
    return f"{path} is a {type(tree).__name__}"


def _first_difference(a: Any, b: Any, path: str = "") -> str:
    """Path to the first tensor that differs between two trees of the same form; "" for none."""
    if isinstance(a, Tensor):
        return path if difference({"x": a}, {"x": b}).amount > 0 else ""
    items = a.items() if isinstance(a, dict) else enumerate(a) if isinstance(a, (list, tuple)) else ()
    return next(
        (found for key, x in items for found in [_first_difference(x, b[key], f"{path}[{key!r}]")] if found), ""
    )


# -- tensors --------------------------------------------------------------------------------------------------------
def check_kept_tensors(p: Probe) -> Iterator[Finding]:
    """What was returned is never written again by the environment, and what it was given not at all."""
    rule = "no tensor that was returned is written again by the environment (clone what a simulator reuses)"
    trace = p.trace
    if trace.action_written:
        yield p.error("step() wrote into the action that it was given", "the action is the caller's", "step")
    written: Dict[str, int] = {}
    for kept in trace.kept:
        if difference({"x": kept.tensor}, {"x": kept.clone}).amount > 0:
            written.setdefault(kept.name, kept.step)
    for name, step in written.items():
        method = "reset" if name.startswith("reset") else "elapsed_steps" if name == "elapsed_steps" else "step"
        when = f"in step {step}" if step >= 0 else "by the first reset"
        word = "return" if method != "step" else field_of(name)
        yield p.error(f"{name}, returned {when}, changed afterwards", rule, method, word)
    if not written and not trace.action_written:
        yield p.ok(f"{len(trace.kept)} tensors kept from the first steps are as they were")


def check_caller_writes(p: Probe) -> Iterator[Finding]:
    """What a caller does to the tensors that it got, or to the action afterwards, does not reach the environment."""
    rule = "what is returned is the caller's: writing into it must not move the environment (return clones)"
    anchor = p.anchor()
    actions = p.actions(WINDOW, 81)

    def run(chosen: Optional[str]) -> List[Shot]:
        """The window; `chosen`: the field that is written over after every step, "" for all, None for none."""
        obs = anchor.back()
        if chosen in ("", "obs"):
            for value in obs.values():
                scribble_on(value)
        shots = []
        for action in actions:
            given = action.clone()
            step = p.env.step(given)
            shots.append(p.shoot(step))
            for name, value in tensors_of(step).items():
                if chosen is not None and chosen in ("", field_of(name)):
                    scribble_on(value)
            if chosen in ("", "action"):
                scribble_on(given)
        if p.has(Capability.PARTIAL_RESET):  # what a reset shows of the rows that it leaves alone may be kept as well
            nobody = torch.zeros(p.num_envs, dtype=torch.bool, device=p.env.device)
            shots[-1] = {**shots[-1], **{f"Step.obs['{k}']": v.cpu().clone() for k, v in p.env.reset(nobody).items()}}
        return shots

    clean = run(None)
    if compare(clean, run("")).amount <= p.tolerance:
        yield p.ok("writing over all that was returned changes nothing")
        return
    p.reset_all()
    guilty = [
        field
        for field in ("obs", "reward", "terminated", "truncated", "final_obs", "valid", "info", "action")
        if compare(clean, run(field)).amount > p.tolerance
    ]
    for field in guilty or [""]:
        what = "the action it was given" if field == "action" else f"Step.{field}" if field else "what step returned"
        yield p.warning(f"writing into {what} changes how the environment goes on", rule, word=field)


def scribble_on(x: Tensor) -> None:
    """Write something else into `x` where that can be done at all."""
    try:
        x.logical_not_() if x.dtype == torch.bool else x.add_(1)
    except RuntimeError:  # an expanded or an inference tensor: nobody can write there by accident
        return


# -- capabilities ---------------------------------------------------------------------------------------------------
METHODS: Dict[Capability, Tuple[str, ...]] = {
    Capability.PARTIAL_RESET: ("reset",),
    Capability.MANUAL_RESET: ("set_manual_reset",),
    Capability.SET_CLOCK: ("set_elapsed_steps",),
    Capability.SET_STATE: ("get_state", "set_state"),
    Capability.FINAL_OBS: (),
    Capability.EXACT_RESUME: ("state_dict", "load_state_dict"),
    Capability.RENDER: ("render",),
}


def check_capabilities(p: Probe) -> Iterator[Finding]:
    """What is claimed is there; what is not claimed refuses."""
    env, rule = p.env, "a capability is claimed only where its methods work"
    missing = False
    for capability in sorted(env.capabilities, key=lambda c: c.value):
        for method in METHODS[capability]:
            if not writes(env, method):
                missing = True
                yield p.error(f"'{capability.value}' is claimed, but {method} is not written", rule, method)
    if missing:
        return
    if p.has(Capability.RENDER):
        p.reset_all()
        picture = torch.as_tensor(env.render(0))
        if picture.dim() != 3 or picture.shape[2] != 3 or picture.dtype != torch.uint8 or picture.device.type != "cpu":
            what = f"{list(picture.shape)} {picture.dtype} on {picture.device}"
            yield p.error(
                f"render(0) is {what}", "render gives [height, width, 3] uint8 on the CPU", "render", "return"
            )
            return
    refuse = "a method of a capability that is not claimed refuses (`raise self.lacks(...)`), or it is claimed"
    unclaimed = [c for c in Capability if not p.has(c) and not p.wrapped and _works(env, c)]
    for capability in unclaimed:
        method = METHODS[capability][-1]
        yield p.warning(f"{method} works, but '{capability.value}' is not claimed: nobody uses it", refuse, method)
    if not unclaimed:
        yield p.ok(", ".join(sorted(c.value for c in env.capabilities)) or "none")


def _works(env: VecEnv, capability: Capability) -> bool:
    """True where the methods of an unclaimed capability are written and do not refuse."""
    tries: Dict[Capability, Callable[[], object]] = {
        Capability.MANUAL_RESET: lambda: (env.set_manual_reset(True), env.set_manual_reset(False)),
        Capability.SET_CLOCK: lambda: env.set_elapsed_steps(env.elapsed_steps),
        Capability.SET_STATE: lambda: env.set_state(env.get_state()),
        Capability.RENDER: lambda: env.render(0),
    }
    if capability not in tries or not all(writes(env, method) for method in METHODS[capability]):
        return False
    try:
        tries[capability]()
    except Exception:
        return False
    return True
