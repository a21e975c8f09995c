"""One good environment, and many that differ from it by one fault each. For the tests of the contract checker.

`FAULTS` names them: fault -> (class, the one check that must speak, what stands in the line that it must point at).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, FrozenSet, Optional, Tuple, Type

import torch
from torch import Tensor

from rl_stagger.envs.base import (
    Box,
    Capability,
    Discrete,
    EnvSpec,
    Obs,
    Step,
    VecEnv,
    check_action,
    check_mask,
    expand_mask,
)

H = 20
State = Dict[str, Tensor]


def rows(mask: Tensor, new: Any, old: Tensor) -> Tensor:
    return torch.where(expand_mask(mask, old), torch.as_tensor(new, dtype=old.dtype), old)


class Courier(VecEnv):
    """A point that is pushed about and wants to be at its goal; it falls off at |x| > 1.2.

    Observation "policy" [N, 3]: x, v, goal; "critic" [N, 4]: these and the wind, drawn with each episode. Written by
    hand, with parts that a fault can replace; all capabilities but rendering.
    """

    capabilities: FrozenSet[Capability] = frozenset(Capability) - {Capability.RENDER}

    def __init__(self, num_envs: int, device: Any = "cpu", seed: int = 0, horizon_steps: Optional[int] = H) -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.spec = EnvSpec({"policy": (3,), "critic": (4,)}, Box(1, -1.0, 1.0), horizon_steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.manual_reset = False
        zeros = torch.zeros(num_envs)
        self.s: State = {name: zeros.clone() for name in ("x", "v", "goal", "wind")}
        self.clock = torch.zeros(num_envs, dtype=torch.int64)
        self.waiting = torch.zeros(num_envs, dtype=torch.bool)

    @property
    def elapsed_steps(self) -> Tensor:
        return self.clock.clone()

    # -- parts ---------------------------------------------------------------------------------------------------
    def start(self) -> State:
        draw = torch.rand(self.num_envs, 4, generator=self.generator) * 2 - 1
        return {"x": 0.5 * draw[:, 0], "v": 0.1 * draw[:, 1], "goal": draw[:, 2], "wind": draw[:, 3]}

    def look(self) -> Obs:
        policy = torch.stack([self.s["x"], self.s["v"], self.s["goal"]], dim=1)
        return {"policy": policy, "critic": torch.cat([policy, self.s["wind"].unsqueeze(1)], dim=1)}

    def restart(self, mask: Tensor) -> None:
        fresh = self.start()
        self.s = {name: rows(mask, fresh[name], value) for name, value in self.s.items()}
        self.clock = rows(mask, 0, self.clock)
        self.waiting = self.waiting & ~mask

    def move(self, action: Tensor) -> State:
        v = 0.9 * self.s["v"] + 0.2 * action[:, 0] + 0.1 * self.s["wind"]
        return {**self.s, "v": v, "x": self.s["x"] + 0.2 * v}

    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        terminated = self.s["x"].abs() > 1.2
        if self.spec.horizon_steps is None:
            return terminated, torch.zeros_like(terminated)
        return terminated, (clock >= self.spec.horizon_steps) & ~terminated

    # -- the contract --------------------------------------------------------------------------------------------
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        self.restart(check_mask(env_mask, self.num_envs, self.device))
        return self.look()

    def step(self, action: Tensor) -> Step:
        check_action(action, self.spec.action, self.num_envs)
        live = ~self.waiting
        moved = self.move(action)
        self.s = {name: rows(live, moved[name], value) for name, value in self.s.items()}
        self.clock = self.clock + live
        terminated, truncated = self.ends(self.clock)
        terminated, truncated = terminated & live, truncated & live
        distance = (self.s["x"] - self.s["goal"]).abs()
        reward = torch.where(live, -distance, 0.0)
        final_obs = self.look()
        if self.manual_reset:
            self.waiting = self.waiting | terminated | truncated
        else:
            self.restart(terminated | truncated)
        info = {"success": distance < 0.1, "log": {"distance": distance, "wind": float(self.s["wind"].mean())}}
        return Step(self.look(), reward, terminated, truncated, final_obs, live, info)

    def need(self, capability: Capability) -> None:
        if capability not in self.capabilities:
            raise self.lacks(capability)

    def set_manual_reset(self, manual: bool) -> None:
        self.need(Capability.MANUAL_RESET)
        if not manual:
            self.restart(self.waiting)
        self.manual_reset = manual

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        self.need(Capability.SET_CLOCK)
        self.clock = rows(check_mask(env_mask, self.num_envs, self.device), steps, self.clock)

    def get_state(self, env_mask: Optional[Tensor] = None) -> State:
        self.need(Capability.SET_STATE)
        check_mask(env_mask, self.num_envs, self.device)
        return self.read()

    def read(self) -> State:
        return {**{name: value.clone() for name, value in self.s.items()}, "clock": self.clock.clone()}

    def write(self, state: State, mask: Tensor) -> None:
        self.s = {name: rows(mask, state[name], value) for name, value in self.s.items()}
        self.clock = rows(mask, state["clock"], self.clock)
        self.waiting = self.waiting & ~mask

    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        self.need(Capability.SET_STATE)
        self.write(state, check_mask(env_mask, self.num_envs, self.device))
        return self.look()

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def state_dict(self) -> Dict[str, Any]:
        saved = {"rows": self.read(), "waiting": self.waiting.clone(), "rng": self.generator.get_state()}
        return {**saved, "manual": self.manual_reset}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.write(state["rows"], torch.ones_like(self.waiting))
        self.waiting, self.manual_reset = state["waiting"].clone(), state["manual"]
        self.generator.set_state(state["rng"])


# -- what is declared -----------------------------------------------------------------------------------------------
class DeviceAsText(Courier):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.device = "cpu"  # type: ignore[assignment]


class SpecChanges(Courier):
    def step(self, action: Tensor) -> Step:
        self.spec = replace(self.spec, phase_columns={"critic": 1})
        return super().step(action)


class ClaimsWhatIsNotThere(Courier):
    capabilities = frozenset(Capability)


class WorksUnclaimed(Courier):
    capabilities = Courier.capabilities - {Capability.MANUAL_RESET}

    def set_manual_reset(self, manual: bool) -> None:
        self.manual_reset = manual


# -- what is returned -----------------------------------------------------------------------------------------------
class RewardInColumns(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, reward=step.reward.unsqueeze(1))


class RewardInDoubles(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, reward=step.reward.double())


class FlagsAsIntegers(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, terminated=step.terminated.long())


class GroupMissing(Courier):
    def look(self) -> Obs:
        return {"policy": super().look()["policy"]}


class ShapesChangeAtTheEnd(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, reward=step.reward[step.done]) if bool(step.truncated.any()) else step


class ExtraGroup(Courier):
    def look(self) -> Obs:
        return {**super().look(), "secret": self.s["wind"].clone()}


class LogOfText(Courier):
    def step(self, action: Tensor) -> Step:
        return replace(super().step(action), info={"log": {"speed": "fast"}})


class LogOfInfinity(Courier):
    def step(self, action: Tensor) -> Step:
        return replace(super().step(action), info={"log": {"speed": float("inf")}})


class NotFiniteAtTheBound(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, reward=torch.where(action[:, 0] >= 1.0, float("nan"), step.reward))


class NotFinite(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(
            step, obs={**step.obs, "policy": torch.where(step.truncated.unsqueeze(1), torch.inf, step.obs["policy"])}
        )


# -- ends -----------------------------------------------------------------------------------------------------------
class Both(Courier):
    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        terminated, truncated = super().ends(clock)
        return terminated | truncated, truncated


class TimeLimitAsTermination(Courier):
    def move(self, action: Tensor) -> State:
        state = super().move(action)
        return {**state, "x": state["x"].clamp(-1, 1)}  # nobody falls off

    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        return clock >= H, torch.zeros_like(self.waiting)


class OneStepShort(Courier):
    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        return super().ends(clock + 1)


class OneStepLong(Courier):
    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        return super().ends(clock - 1)


class NoLimit(Courier):
    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        return super().ends(torch.zeros_like(clock))


class CutNowAndThen(Courier):
    """A rule of its own that it does not mark."""

    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        terminated, truncated = super().ends(clock)
        return terminated, truncated | ((self.s["goal"] > 0.3) & (clock == 7) & ~terminated)


class HiddenLimit(Courier):
    """The spec says that there is none."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.spec = replace(self.spec, horizon_steps=None)

    def move(self, action: Tensor) -> State:
        state = super().move(action)
        return {**state, "x": state["x"].clamp(-1, 1)}

    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        return torch.zeros_like(self.waiting), clock >= H


# -- the clock ------------------------------------------------------------------------------------------------------
class ClockHandedOut(Courier):
    @property
    def elapsed_steps(self) -> Tensor:
        return self.clock


class ClockInt32(Courier):
    @property
    def elapsed_steps(self) -> Tensor:
        return self.clock.int()


class ClockGoesOn(Courier):
    """Not zeroed by a reset inside a step."""

    def step(self, action: Tensor) -> Step:
        before = self.clock
        step = super().step(action)
        self.shown = torch.where(step.done, before + 1, self.clock)
        return step

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        obs = super().reset(env_mask)
        self.shown = self.clock.clone()
        return obs

    @property
    def elapsed_steps(self) -> Tensor:
        return getattr(self, "shown", self.clock).clone()


class ClockWriteIgnoresMask(Courier):
    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        check_mask(env_mask, self.num_envs, self.device)
        self.clock = steps.clone()


class ClockWriteMovesState(Courier):
    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        super().set_elapsed_steps(steps, env_mask)
        self.s["v"] = self.s["v"] * 0.5


class ClockWriteKeepsTensor(Courier):
    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        mask = check_mask(env_mask, self.num_envs, self.device)
        steps.copy_(torch.where(mask, steps, self.clock))
        self.clock = steps


class LimitByAnotherClock(Courier):
    """The time limit counts by itself, so a written clock is not obeyed."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.capabilities = self.capabilities - {Capability.SET_STATE, Capability.EXACT_RESUME}
        self.own = torch.zeros(num_envs, dtype=torch.int64)

    def restart(self, mask: Tensor) -> None:
        super().restart(mask)
        self.own = rows(mask, 0, self.own)

    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        self.own = self.own + ~self.waiting
        return super().ends(self.own)


# -- final observations ---------------------------------------------------------------------------------------------
class FinalObsIsTheNextEpisodes(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, final_obs={name: value.clone() for name, value in step.obs.items()})


class FinalObsIsTheNextEpisodesAtLimits(Courier):
    """At terminations it is right."""

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        assert step.final_obs is not None
        final_obs = {k: rows(step.truncated, step.obs[k], v) for k, v in step.final_obs.items()}
        return replace(step, final_obs=final_obs)


class FinalObsIsTheNextEpisodesAtTerminations(Courier):
    """At time limits it is right."""

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        assert step.final_obs is not None
        final_obs = {k: rows(step.terminated, step.obs[k], v) for k, v in step.final_obs.items()}
        return replace(step, final_obs=final_obs)


class FinalObsIsStale(Courier):
    def step(self, action: Tensor) -> Step:
        final_obs = self.look()
        return replace(super().step(action), final_obs=final_obs)


class FinalObsIsNone(Courier):
    def step(self, action: Tensor) -> Step:
        return replace(super().step(action), final_obs=None)


class FinalObsNotClaimed(Courier):
    capabilities = Courier.capabilities - {Capability.FINAL_OBS}


class RewardOfTheNextEpisode(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, reward=torch.where(step.valid, -(self.s["x"] - self.s["goal"]).abs(), 0.0))


class ObsIsTheOldEpisodes(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        assert step.final_obs is not None
        return replace(step, obs={name: value.clone() for name, value in step.final_obs.items()})


# -- dummy steps ----------------------------------------------------------------------------------------------------
class NextStep(Courier):
    """Resets in the step after the end, whose action is ignored, as Gymnasium's NEXT_STEP mode. Marks it."""

    capabilities = frozenset({Capability.PARTIAL_RESET, Capability.FINAL_OBS})
    marks, counts = True, False

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.pending = torch.zeros(num_envs, dtype=torch.bool)

    def restart(self, mask: Tensor) -> None:
        super().restart(mask)
        self.pending = self.pending & ~mask

    def step(self, action: Tensor) -> Step:
        check_action(action, self.spec.action, self.num_envs)
        dummy = self.pending
        moved = self.move(action)
        self.s = {name: rows(~dummy, moved[name], value) for name, value in self.s.items()}
        self.clock = self.clock + ~dummy
        terminated, truncated = self.ends(self.clock)
        terminated, truncated = terminated & ~dummy, truncated & ~dummy
        final_obs, done = self.look(), terminated | truncated
        self.restart(dummy)
        self.clock = torch.where(done, 0, self.clock + (dummy if self.counts else 0))
        self.pending = done
        reward = torch.where(dummy, 0.0, -(self.s["x"] - self.s["goal"]).abs())
        valid = ~dummy if self.marks else torch.ones_like(dummy)
        return Step(self.look(), reward, terminated, truncated, final_obs, valid)


class DummyStepsNotMarked(NextStep):
    marks = False


class DummyStepsCounted(NextStep):
    """Neither marked nor told by the clock."""

    marks, counts = False, True

    def ends(self, clock: Tensor) -> Tuple[Tensor, Tensor]:
        return super().ends(clock)


# -- resets of some -------------------------------------------------------------------------------------------------
class ResetIgnoresMask(Courier):
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        check_mask(env_mask, self.num_envs, self.device)
        return super().reset()


class ResetDoesNothing(Courier):
    """The clock alone starts anew."""

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        mask = check_mask(env_mask, self.num_envs, self.device)
        if env_mask is None or bool(mask.all()):
            return super().reset(env_mask)
        self.clock = rows(mask, 0, self.clock)
        return self.look()


class ResetKeepsClock(Courier):
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        clock = self.clock
        obs = super().reset(env_mask)
        if env_mask is not None and not bool(env_mask.all()):
            self.clock = clock
        return obs


class ResetShowsNoiseToAll(Courier):
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        obs = super().reset(env_mask)
        return {**obs, "policy": obs["policy"] + 0.01 * torch.rand(self.num_envs, 3, generator=self.generator)}


class ResetTouchesTheOthers(Courier):
    """What they show and hold stays; what they do next does not."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.disturbed = False

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        self.disturbed = env_mask is not None and bool(env_mask.any()) and not bool(env_mask.all())
        return super().reset(env_mask)

    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        self.disturbed = False
        return super().set_state(state, env_mask)

    def move(self, action: Tensor) -> State:
        return super().move(action * 0 if self.disturbed else action)


class MaskOfIntegers(Courier):
    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        if env_mask is not None and env_mask.dtype == torch.int64 and env_mask.shape == (self.num_envs,):
            chosen = torch.zeros(self.num_envs, dtype=torch.bool)
            chosen[env_mask] = True
            return super().reset(chosen)
        return super().reset(env_mask)


class AnyAction(Courier):
    def step(self, action: Tensor) -> Step:
        return super().step(action.reshape(-1)[: self.num_envs].float().unsqueeze(1))


# -- manual resets --------------------------------------------------------------------------------------------------
class WaitingRowsAreValid(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, valid=torch.ones_like(step.valid))


class WaitingRowsAreRewarded(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        return replace(step, reward=torch.where(step.valid, step.reward, -1.0))


class WaitingRowsMove(Courier):
    def step(self, action: Tensor) -> Step:
        self.s["x"] = torch.where(self.waiting, self.s["x"] + 0.01, self.s["x"])
        return super().step(action)


class ManualResetIgnored(Courier):
    def set_manual_reset(self, manual: bool) -> None:
        pass


# -- states ---------------------------------------------------------------------------------------------------------
class StateIncomplete(Courier):
    """The wind, drawn with the episode, is missing."""

    def get_state(self, env_mask: Optional[Tensor] = None) -> State:
        state = super().get_state(env_mask)
        del state["wind"]
        return state

    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        return super().set_state({**state, "wind": self.s["wind"]}, env_mask)


class StateWithoutClock(Courier):
    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        return super().set_state({**state, "clock": self.clock}, env_mask)


class StateNotCloned(Courier):
    def get_state(self, env_mask: Optional[Tensor] = None) -> State:
        check_mask(env_mask, self.num_envs, self.device)
        return {**self.s, "clock": self.clock}

    def move(self, action: Tensor) -> State:
        for name, value in super().move(action).items():
            self.s[name].copy_(rows(~self.waiting, value, self.s[name]))
        return self.s


class StateKeptByReference(Courier):
    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        obs = super().set_state(state, env_mask)
        if env_mask is None:
            self.s = {name: state[name] for name in self.s}
        return obs


class SetStateIgnoresMask(Courier):
    def set_state(self, state: State, env_mask: Optional[Tensor] = None) -> Obs:
        check_mask(env_mask, self.num_envs, self.device)
        return super().set_state(state)


class ResumeWithoutRandomNumbers(Courier):
    def load_state_dict(self, state: Dict[str, Any]) -> None:
        rng = self.generator.get_state()
        super().load_state_dict(state)
        self.generator.set_state(rng)


class SavesAnObject(Courier):
    def state_dict(self) -> Dict[str, Any]:
        return {**super().state_dict(), "spec": self.spec}


class SaveNotCloned(Courier):
    def state_dict(self) -> Dict[str, Any]:
        self.count = getattr(self, "count", torch.zeros(1))
        return {**super().state_dict(), "count": self.count}

    def step(self, action: Tensor) -> Step:
        if hasattr(self, "count"):
            self.count += 1
        return super().step(action)


# -- seeds ----------------------------------------------------------------------------------------------------------
class SeedIgnored(Courier):
    def seed(self, seed: int) -> None:
        pass


class SeedAlwaysTheSame(Courier):
    def seed(self, seed: int) -> None:
        super().seed(0)


class GlobalRandomNumbers(Courier):
    """Draws from torch's global generator."""

    capabilities = Courier.capabilities - {Capability.EXACT_RESUME}

    def start(self) -> State:
        draw = torch.rand(self.num_envs, 4) * 2 - 1
        return {"x": 0.5 * draw[:, 0], "v": 0.1 * draw[:, 1], "goal": draw[:, 2], "wind": draw[:, 3]}


# -- tensors --------------------------------------------------------------------------------------------------------
class RewardReused(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        self.reward = getattr(self, "reward", torch.zeros(self.num_envs))
        return replace(step, reward=self.reward.copy_(step.reward))


class StateHandedOut(Courier):
    """The reward is a part of the state, which the next step reads."""

    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        reward = torch.where(step.valid, self.s["v"], 0.0)
        self.s["v"] = reward if bool(step.valid.all()) else self.s["v"]
        return replace(step, reward=reward) if bool(step.valid.all()) and not bool(step.done.any()) else step


class ActionWritten(Courier):
    def step(self, action: Tensor) -> Step:
        return super().step(action.clamp_(-0.5, 0.5))


class ActionKept(Courier):
    """Smooths with the last action, which it has not cloned."""

    capabilities = frozenset({Capability.PARTIAL_RESET, Capability.FINAL_OBS})

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.last = torch.zeros(num_envs, 1)

    def restart(self, mask: Tensor) -> None:
        super().restart(mask)
        self.last = rows(mask, 0.0, self.last)

    def step(self, action: Tensor) -> Step:
        check_action(action, self.spec.action, self.num_envs)
        smooth = 0.5 * (action + self.last)
        step = super().step(smooth)
        self.last = action if not bool(step.done.any()) else rows(step.done, 0.0, action)
        return step


# -- what raises ----------------------------------------------------------------------------------------------------
class RaisesAtTheEnd(Courier):
    def step(self, action: Tensor) -> Step:
        step = super().step(action)
        if bool(step.done.any()):
            raise IndexError("no such row")
        return step


class RaisesInGetState(Courier):
    def get_state(self, env_mask: Optional[Tensor] = None) -> State:
        raise KeyError("qpos")


class Chooser(Courier):
    """The good one with three choices in place of a force."""

    def __init__(self, num_envs: int, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.spec = replace(self.spec, action=Discrete(3))

    def move(self, action: Tensor) -> State:
        return super().move((action - 1.0).unsqueeze(1))


FAULTS: Dict[str, Tuple[Type[Courier], str, str]] = {
    kind.__name__: (kind, check, line)
    for kind, check, line in (
        (DeviceAsText, "spec", "def __init__("),
        (SpecChanges, "shapes", "def step("),
        (ClaimsWhatIsNotThere, "capabilities", "class ClaimsWhatIsNotThere(Courier):"),
        (WorksUnclaimed, "capabilities", "def set_manual_reset("),
        (RewardInColumns, "shapes", "return replace(step, reward=step.reward.unsqueeze(1))"),
        (RewardInDoubles, "shapes", "return replace(step, reward=step.reward.double())"),
        (FlagsAsIntegers, "shapes", "return replace(step, terminated=step.terminated.long())"),
        (GroupMissing, "shapes", "return self.look()"),
        (ShapesChangeAtTheEnd, "shapes", "return replace(step, reward=step.reward[step.done]) if bool("),
        (ExtraGroup, "shapes", "return Step(self.look(), reward, terminated, truncated, fina"),
        (LogOfText, "info", 'return replace(super().step(action), info={"log": {"speed":'),
        (LogOfInfinity, "info", 'return replace(super().step(action), info={"log": {"speed":'),
        (NotFinite, "finite", 'step, obs={**step.obs, "policy": torch.where(step.truncated.'),
        (NotFiniteAtTheBound, "finite", "return replace(step, reward=torch.where(action[:, 0] >= 1.0,"),
        (Both, "flags", "terminated, truncated = terminated & live, truncated & live"),
        (TimeLimitAsTermination, "terminations", "terminated, truncated = terminated & live, truncated & live"),
        (OneStepShort, "time_limit", "terminated, truncated = terminated & live, truncated & live"),
        (OneStepLong, "time_limit", "terminated, truncated = terminated & live, truncated & live"),
        (NoLimit, "time_limit", "terminated, truncated = terminated & live, truncated & live"),
        (CutNowAndThen, "time_limit", "terminated, truncated = terminated & live, truncated & live"),
        (HiddenLimit, "time_limit", "terminated, truncated = terminated & live, truncated & live"),
        (ClockHandedOut, "clock", "return self.clock"),
        (ClockInt32, "clock", "return self.clock.int()"),
        (ClockGoesOn, "clock", "def step("),
        (ClockWriteIgnoresMask, "clock_write", "def set_elapsed_steps("),
        (ClockWriteMovesState, "clock_write", "def set_elapsed_steps("),
        (ClockWriteKeepsTensor, "clock_write", "def set_elapsed_steps("),
        (LimitByAnotherClock, "clock_write", "terminated, truncated = terminated & live, truncated & live"),
        (FinalObsIsTheNextEpisodes, "final_obs", "return replace(step, final_obs={name: value.clone() for name"),
        (FinalObsIsTheNextEpisodesAtLimits, "final_obs", "final_obs = {k: rows(step.truncated, step.obs[k], v) for k,"),
        (
            FinalObsIsTheNextEpisodesAtTerminations,
            "final_obs",
            "final_obs = {k: rows(step.terminated, step.obs[k], v) for k,",
        ),
        (FinalObsIsStale, "final_obs", "final_obs = self.look()"),
        (FinalObsIsNone, "final_obs", "return replace(super().step(action), final_obs=None)"),
        (FinalObsNotClaimed, "final_obs", "def __init__("),
        (RewardOfTheNextEpisode, "final_obs", "return replace(step, reward=torch.where(step.valid, -(self.s"),
        (ObsIsTheOldEpisodes, "reset_obs", "return replace(step, obs={name: value.clone() for name, valu"),
        (DummyStepsNotMarked, "dummy_steps", "valid = ~dummy if self.marks else torch.ones_like(dummy)"),
        (DummyStepsCounted, "dummy_steps", "valid = ~dummy if self.marks else torch.ones_like(dummy)"),
        (ResetIgnoresMask, "partial_reset", "def reset("),
        (ResetDoesNothing, "partial_reset", "return self.look()"),
        (ResetKeepsClock, "partial_reset", "def reset("),
        (ResetShowsNoiseToAll, "partial_reset", "def reset("),
        (ResetTouchesTheOthers, "partial_reset", "def reset("),
        (MaskOfIntegers, "masks", "def reset("),
        (AnyAction, "actions", "def step("),
        (WaitingRowsAreValid, "manual_reset", "return replace(step, valid=torch.ones_like(step.valid))"),
        (WaitingRowsAreRewarded, "manual_reset", "return replace(step, reward=torch.where(step.valid, step.rew"),
        (WaitingRowsMove, "manual_reset", "def step("),
        (ManualResetIgnored, "manual_reset", "def set_manual_reset("),
        (StateIncomplete, "state", 'return super().set_state({**state, "wind": self.s["wind"]},'),
        (StateWithoutClock, "state", "def set_state("),
        (StateNotCloned, "state", 'return {**self.s, "clock": self.clock}'),
        (StateKeptByReference, "state", "def set_state("),
        (SetStateIgnoresMask, "state_rows", "def set_state("),
        (ResumeWithoutRandomNumbers, "resume", 'return {**saved, "manual": self.manual_reset}'),
        (SavesAnObject, "resume", 'return {**super().state_dict(), "spec": self.spec}'),
        (SaveNotCloned, "resume", 'return {**super().state_dict(), "count": self.count}'),
        (SeedIgnored, "seeds", "def seed("),
        (SeedAlwaysTheSame, "seeds", "def seed("),
        (GlobalRandomNumbers, "seeds", "def seed("),
        (RewardReused, "kept_tensors", "return replace(step, reward=self.reward.copy_(step.reward))"),
        (ActionWritten, "kept_tensors", "def step("),
        (StateHandedOut, "caller_writes", 'reward = torch.where(step.valid, self.s["v"], 0.0)'),
        (ActionKept, "caller_writes", "def step("),
        (RaisesAtTheEnd, "shapes", 'raise IndexError("no such row")'),
        (RaisesInGetState, "state", 'raise KeyError("qpos")'),
    )
}
