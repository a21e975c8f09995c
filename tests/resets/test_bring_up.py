"""How environments get to their offsets: what really moved, what was only written."""

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

from rl_stagger.envs.base import Capability
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CapabilityError
from rl_stagger.resets.bring_up import BRING_UPS, ClockBringUp, NoBringUp, WarmupBringUp
from rl_stagger.resets.rule import StaggeredResets


def idle(obs):
    return torch.zeros(obs["policy"].shape[0], 1)


def true_steps(obs):
    return obs["policy"][:, 0].long()


OFFSETS = torch.tensor([0, 3, 6, 9, 3])


# -- warmup ---------------------------------------------------------------------------------------------------------
def test_warmup_moves_states_and_clock_to_the_offsets():
    env = CounterEnv(5, horizon_steps=12)
    start = WarmupBringUp().run(env, OFFSETS, idle)
    assert true_steps(start.obs).tolist() == OFFSETS.tolist(), "the state itself has taken so many steps"
    assert env.elapsed_steps.tolist() == OFFSETS.tolist()
    assert start.phase_steps.tolist() == OFFSETS.tolist()


def test_warmup_counts_its_steps():
    env = CounterEnv(5, horizon_steps=12)
    start = WarmupBringUp().run(env, OFFSETS, idle)
    # The largest offset is 9: 9 steps of 5 environments.
    assert (start.warmup_steps, env.steps_asked) == (45, 9)
    rule = StaggeredResets(CounterEnv(4, horizon_steps=12), rollout_steps=3)
    rule.reset()
    assert rule.warmup_steps == 4 * 9
    rule.reset()
    assert rule.warmup_steps == 2 * 4 * 9, "totals of all bring-ups"


def test_warmup_to_zero_is_a_plain_reset():
    env = CounterEnv(3)
    start = WarmupBringUp().run(env, torch.zeros(3, dtype=torch.int64), idle)
    assert (start.warmup_steps, env.steps_asked) == (0, 0)
    assert true_steps(start.obs).tolist() == [0, 0, 0]


def test_warmup_where_the_largest_offset_is_not_the_last_group():
    env = CounterEnv(3)
    start = WarmupBringUp().run(env, torch.tensor([5, 2, 4]), idle)
    assert true_steps(start.obs).tolist() == [5, 2, 4]
    assert start.warmup_steps == 15


def test_an_environment_that_ends_early_is_as_far_as_it_then_is():
    # Env 1 ends after 4 steps. Offsets 0, 9: its 9 steps are 4 + 4 + 1.
    env = CounterEnv(2, lengths=[0, 4])
    start = WarmupBringUp().run(env, torch.tensor([0, 9]), idle)
    assert true_steps(start.obs).tolist() == [0, 1]
    assert start.phase_steps.tolist() == [0, 1]
    assert env.elapsed_steps.tolist() == [0, 1]


def test_warmup_through_time_limits():
    # All are reset together at first; H = 5 is shorter than the way of no one here, but the limit is met on it.
    env = CounterEnv(2, horizon_steps=5)
    start = WarmupBringUp().run(env, torch.tensor([4, 0]), idle)
    assert true_steps(start.obs).tolist() == [4, 0]


def test_warmup_acts_with_the_given_actor_on_what_it_sees():
    seen = []

    def actor(obs):
        seen.append(true_steps(obs).tolist())
        return idle(obs)

    WarmupBringUp().run(CounterEnv(2), torch.tensor([3, 1]), actor)
    # Env 1 is reset after 2 steps.
    assert seen == [[0, 0], [1, 1], [2, 0]]


def test_warmup_really_moves_the_stage_of_skill_chain():
    # gating 0: time alone opens the stages, one each H / P = 5 steps, so the stage tells the time really spent.
    env = make_env("skill_chain", 20, horizon_steps=100, num_stages=20, gating=0.0)
    env.right_actions = torch.full_like(env.right_actions, 50.0)  # no step is good
    rule = StaggeredResets(env, rollout_steps=5)
    rule.reset()
    assert rule.offsets.tolist() == list(range(0, 100, 5))
    assert env.state["stage"].tolist() == list(range(20))
    assert rule.phase_steps.tolist() == rule.offsets.tolist() == env.elapsed_steps.tolist()


# -- clock ----------------------------------------------------------------------------------------------------------
def test_clock_writes_clocks_and_leaves_states():
    env = CounterEnv(5, horizon_steps=12)
    start = ClockBringUp().run(env, OFFSETS, idle)
    assert env.elapsed_steps.tolist() == OFFSETS.tolist()
    assert true_steps(start.obs).tolist() == [0] * 5
    assert start.phase_steps.tolist() == [0] * 5, "the true phase, not what was written"
    assert (start.warmup_steps, env.steps_asked) == (0, 0)


def test_clock_is_true_again_after_the_first_time_limit():
    rule = StaggeredResets(CounterEnv(4, horizon_steps=12), rollout_steps=3, bring_up="clock")
    rule.reset()
    assert rule.elapsed_steps.tolist() == [0, 3, 6, 9]
    assert rule.phase_steps.tolist() == [0, 0, 0, 0]
    for _ in range(12):
        step = rule.step(torch.zeros(4, 1))
    assert rule.phase_steps.tolist() == rule.elapsed_steps.tolist() == true_steps(step.obs).tolist() == [0, 3, 6, 9]


def test_what_a_written_clock_leaves_false_is_said():
    clock = StaggeredResets(CounterEnv(4), rollout_steps=3, bring_up="clock")
    assert "states not moved" in clock.describe()
    assert not clock.clock_is_true
    warm = StaggeredResets(CounterEnv(4), rollout_steps=3, bring_up="warmup")
    assert "not moved" not in warm.describe()
    assert warm.clock_is_true


# -- none -----------------------------------------------------------------------------------------------------------
def test_none_resets_all_together_and_ignores_offsets():
    env = CounterEnv(5)
    start = NoBringUp().run(env, OFFSETS, idle)
    assert true_steps(start.obs).tolist() == env.elapsed_steps.tolist() == start.phase_steps.tolist() == [0] * 5
    assert (start.warmup_steps, env.steps_asked) == (0, 0)


@pytest.mark.parametrize("bring_up", sorted(BRING_UPS))
def test_a_second_reset_starts_from_anywhere(bring_up):
    rule = StaggeredResets(CounterEnv(4), rollout_steps=3, bring_up=bring_up)
    rule.reset()
    for _ in range(5):
        rule.step(torch.zeros(4, 1))
    obs = rule.reset()
    # snapshot: the first rollout's end has recorded states of phase 3, and of no later one.
    expected = {"warmup": [0, 3, 6, 9], "snapshot": [0, 3, 0, 0]}.get(bring_up, [0, 0, 0, 0])
    assert true_steps(obs).tolist() == rule.phase_steps.tolist() == expected


@pytest.mark.parametrize(
    "bring_up, missing, possible",
    [
        ("warmup", Capability.PARTIAL_RESET, "none, clock"),
        ("clock", Capability.SET_CLOCK, "none, warmup"),
        ("snapshot", Capability.SET_STATE, "none, clock, warmup"),
    ],
)
def test_what_a_simulator_cannot_do_is_refused_with_what_it_can(bring_up, missing, possible):
    env = CounterEnv(4, without=[missing])
    with pytest.raises(
        CapabilityError, match=f"bring_up='{bring_up}' needs '{missing.value}'.*possible here: {possible}"
    ):
        StaggeredResets(env, rollout_steps=3, bring_up=bring_up)
