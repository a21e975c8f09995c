"""The doctor's recommendation, branch by branch, from findings made up by hand."""

import dataclasses

import pytest

from rl_stagger.config import load_config
from rl_stagger.diagnosis import Arm, Profile, ResetCosts
from rl_stagger.envs.base import Capability
from rl_stagger.prescription import Findings, recommend

ALL = frozenset(Capability)
PROFILE = Profile("initial", 64, 200, 200.0, 0.0, (0.0,) * 10, start_spread=0.0, phase_dependence=0.4)
COSTS = ResetCosts(30, step_s=0.01, whole_s=0.005, one_s=0.005, group_s=0.005, group_envs=25)
REFERENCE = Arm("synchronous", 512, 100, 5.0, 0.0, 0.0, 1.0, 0.5, 0.6, 0.5, -0.2, 0.3, 0.1, 1.0, 0)
RULE = Arm("staggered", 512, 100, 5.0, 1.0, 1.0, 0.01, 0.1, 0.1, 0.1, 0.6, 0.9, 0.2, 1.0, 9000)
"""coverage, least, tv, cycles of reward, error and explained variance, p10, median, reward, valid share, warm-up."""

PLAIN = Findings(200, 10, 512, 300, ALL, (PROFILE,), COSTS, REFERENCE, RULE)
"""skill_chain as it is: H/K = 20, one start state, a critic that gains."""


def changed(**changes):
    return dataclasses.replace(PLAIN, **changes)


def reasons_of(findings):
    return "\n".join(recommend(findings).reasons)


def assert_left(findings, *says):
    r = recommend(findings)
    assert r.verdict == "leave"
    assert r.overrides == ("reset=synchronous",)
    for text in says:
        assert text in "\n".join(r.reasons)
    return r


# -- leave it -------------------------------------------------------------------------------------------------------
def test_no_time_limit():
    assert_left(changed(horizon_steps=None), "no time limit")


@pytest.mark.parametrize(
    "k, seen", [(100, "50%"), (150, "75%"), (200, "the whole horizon"), (400, "the whole horizon")]
)
def test_rollouts_of_half_a_horizon(k, seen):
    assert_left(changed(rollout_steps=k), f"one rollout sees {seen}", "rollout_steps from 20 to 40")


def test_just_under_half_a_horizon_is_looked_at():
    assert recommend(changed(rollout_steps=99)).verdict == "stagger"


def test_batches_that_stand_still_by_themselves():
    still = REFERENCE._replace(tv_distance=0.05, error_cycle=0.1, explained_cycle=None)
    assert_left(changed(reference=still), "tv distance 0.05")
    short = PROFILE._replace(policy="trained", median_steps=18.0)
    assert_left(changed(reference=still, profiles=(short,)), "end within 18 steps, 1.8 rollouts")


@pytest.mark.parametrize("change", [{"tv_distance": 0.2}, {"error_cycle": 0.2}, {"explained_cycle": 0.2},
                                    {"horizons": 1.9}, {"tv_distance": None}])  # fmt: skip
def test_batches_that_move_are_no_reason_to_leave(change):
    still = REFERENCE._replace(**{"tv_distance": 0.05, "error_cycle": 0.1, "explained_cycle": 0.1, **change})
    assert recommend(changed(reference=still)).verdict == "stagger"


def test_phases_that_look_alike_and_starts_that_cover_the_task():
    no_gain = RULE._replace(explained_p10=-0.15)
    alike = changed(profiles=(PROFILE._replace(phase_dependence=0.01),))
    everywhere = changed(profiles=(PROFILE._replace(start_spread=0.95),))
    assert_left(dataclasses.replace(alike, rule=no_gain), "the phases look alike: 1.0%", "the critic hardly gains")
    assert_left(dataclasses.replace(everywhere, rule=no_gain), "start states already cover the task", "0.95")
    assert_left(dataclasses.replace(alike, rule=None), "the phases look alike")
    # what the critic shows counts for more
    assert recommend(alike).verdict == "stagger"
    assert recommend(everywhere).verdict == "stagger"


def test_one_policy_that_sees_different_phases_suffices():
    # An untrained policy that never leaves the start makes every task look even.
    both = (PROFILE._replace(phase_dependence=0.0), PROFILE._replace(policy="later", phase_dependence=0.3))
    assert recommend(changed(profiles=both, rule=None)).verdict == "stagger"


def verdict_of(synchronous, staggered):
    """By the 10th percentiles of the explained variance alone."""
    arms = {"reference": REFERENCE._replace(explained_p10=synchronous), "rule": RULE._replace(explained_p10=staggered)}
    return recommend(changed(**arms)).verdict


def test_a_comparison_without_difference():
    r = assert_left(changed(rule=RULE._replace(explained_p10=0.05)), "no difference for the critic", "0.60 and 0.10")
    assert "-0.20 synchronous, 0.05 staggered" in r.expected
    assert "mean reward per step at the end 0.10 and 0.20" in r.expected


@pytest.mark.parametrize("synchronous, staggered, verdict", [
    (0.3, 0.41, "stagger"), (0.3, 0.39, "leave"),
    (0.91, 0.96, "stagger"),  # what is left falls from 0.09 to 0.04
    (0.91, 0.94, "leave"),
    (0.98, 0.995, "leave"),  # to a quarter, but by 0.015
    (-3.0, -0.5, "leave"),  # neither explains anything
    (-3.0, 0.2, "stagger"),
])  # fmt: skip
def test_what_counts_as_a_difference(synchronous, staggered, verdict):
    assert verdict_of(synchronous, staggered) == verdict


def test_a_comparison_to_the_rules_disadvantage():
    worse = changed(reference=REFERENCE._replace(explained_p10=0.6), rule=RULE._replace(explained_p10=0.4))
    assert_left(worse, "explains less under the rule (explained variance p10 0.60 synchronous, 0.40 staggered)")


def test_a_comparison_with_few_of_the_environments_is_called_weak():
    for p10 in (0.6, 0.0):  # stagger, leave
        rule = RULE._replace(explained_p10=p10, num_envs=127)
        assert "a weak test: 127 of the 512 environments" in reasons_of(changed(rule=rule))
        assert "weak" not in reasons_of(changed(rule=rule._replace(num_envs=128)))


def test_too_short_a_comparison_decides_nothing():
    short = {"horizons": 1.5, "iterations": 30}
    r = recommend(changed(reference=REFERENCE._replace(**short), rule=RULE._replace(explained_p10=-0.9, **short)))
    assert r.verdict == "stagger"
    assert "too few to compare" in r.expected
    assert "seconds=" in r.expected


# -- stagger --------------------------------------------------------------------------------------------------------
def test_the_plain_case():
    r = recommend(PLAIN)
    assert (r.verdict, r.headline, r.overrides) == ("stagger", "stagger resets", ("reset=staggered",))
    text = "\n".join(r.reasons)
    # 19 * 200 // 20 = 190 steps of warm-up, of 10 * 300
    for says in ("H/K = 200/10 = 20.0", "tv distance 1.00", "N_B = 20 groups", "up to 6%", "K = 10", "20 to 40"):
        assert says in text
    for figure in ("-0.20 synchronous, 0.60 staggered", "0.60 and 0.10", "0.50 and 0.10", "5.0 horizons", "one seed"):
        assert figure in r.expected


def test_few_windows_and_random_starts_are_mixed_signs():
    assert recommend(changed(rollout_steps=60)).headline.startswith("try staggered")  # H/K = 3.3
    partly = (PROFILE._replace(start_spread=0.5),)
    assert recommend(changed(profiles=partly)).headline.startswith("try staggered")


@pytest.mark.parametrize("k, says", [(20, "within"), (40, "within"), (19, "below"), (41, "above")])
def test_what_is_said_of_k(k, says):
    assert says in next(x for x in recommend(changed(rollout_steps=k)).reasons if x.startswith("K ="))


def test_fewer_environments_than_groups():
    assert "N_B = 8 groups, one an environment; ceil(H/K) = 20" in reasons_of(changed(num_envs=8))


def test_dear_group_resets_are_collected():
    dear = COSTS._replace(group_s=0.05, whole_s=0.06)
    r = recommend(changed(costs=dear))
    assert r.overrides == ("reset=staggered_block",)
    assert "costs 5.0 steps, 83% of a whole reset" in "\n".join(r.reasons)
    early = (PROFILE._replace(early_share=0.6),)
    assert "wait for it" in reasons_of(changed(costs=dear, profiles=early))


@pytest.mark.parametrize(
    "change",
    [
        {"costs": COSTS._replace(group_s=0.05, whole_s=0.1)},  # half of a whole reset
        {"costs": COSTS._replace(group_s=0.029, whole_s=0.03)},  # under three steps
        {"costs": COSTS._replace(group_s=None)},
        {"costs": None},
        {"costs": COSTS._replace(group_s=0.05, whole_s=0.06), "capabilities": ALL - {Capability.MANUAL_RESET}},
    ],
)
def test_other_resets_happen_at_once(change):
    assert recommend(changed(**change)).overrides == ("reset=staggered",)


def test_a_dear_warm_up_gives_way_to_what_the_simulator_can_do():
    short = changed(iterations=50)  # 190 of 500 steps: 38 %
    assert recommend(short).overrides == ("reset=staggered", "reset.bring_up=snapshot")
    assert "38%" in reasons_of(short)
    no_state = dataclasses.replace(short, capabilities=ALL - {Capability.SET_STATE})
    assert recommend(no_state).overrides == ("reset=staggered", "reset.bring_up=clock")
    neither = dataclasses.replace(short, capabilities=ALL - {Capability.SET_STATE, Capability.SET_CLOCK})
    assert recommend(neither).overrides == ("reset=staggered",)
    assert "nothing cheaper" in reasons_of(neither)
    assert "not with all of what is recommended" in recommend(short).expected


def test_early_ends_call_for_upkeep_unless_the_spread_was_kept():
    early = (PROFILE._replace(early_share=0.9), PROFILE._replace(policy="later", early_share=0.0))
    kept = changed(profiles=early)
    assert recommend(kept).overrides == ("reset=staggered",)
    assert "90% of the first episodes end early" in reasons_of(kept)
    assert "no upkeep needed" in reasons_of(kept)
    for rule in (RULE._replace(coverage=0.84), None):
        r = recommend(changed(profiles=early, rule=rule))
        assert r.overrides == ("reset=staggered", "reset.upkeep=on_coverage_below")
        assert "into recorded states" in "\n".join(r.reasons)
    no_state = changed(profiles=early, rule=None, capabilities=ALL - {Capability.SET_STATE})
    assert "by early cuts alone" in reasons_of(no_state)


def test_a_rule_that_lost_its_spread_says_nothing_of_one_that_is_kept_up():
    early = (PROFILE._replace(early_share=0.9),)
    lost = changed(profiles=early, rule=RULE._replace(coverage=0.7, explained_p10=-0.2))
    r = recommend(lost)
    assert r.overrides == ("reset=staggered", "reset.upkeep=on_coverage_below")
    assert r.headline.startswith("try staggered")
    assert "ask again with reset=staggered reset.upkeep=on_coverage_below" in "\n".join(r.reasons)
    # asked again; and where nothing can be moved
    assert_left(dataclasses.replace(lost, kept_up=True), "no difference for the critic")
    assert_left(dataclasses.replace(lost, capabilities=frozenset({Capability.SET_CLOCK})), "no difference")
    # spread lost without early ends is no matter of upkeep
    assert_left(dataclasses.replace(lost, profiles=(PROFILE,)), "no difference for the critic")


# -- what a simulator lacks -----------------------------------------------------------------------------------------
def test_without_partial_resets_only_clocks_can_be_spread():
    clock = changed(
        capabilities=frozenset({Capability.SET_CLOCK}), profiles=(PROFILE._replace(early_share=0.9),), rule=None
    )
    r = recommend(clock)
    assert r.overrides == ("reset=staggered", "reset.bring_up=clock")
    assert "no upkeep is possible" in "\n".join(r.reasons)


def test_a_simulator_that_can_do_neither():
    r = recommend(changed(capabilities=frozenset({Capability.FINAL_OBS})))
    assert (r.verdict, r.overrides) == ("impossible", ("reset=synchronous",))
    assert "it has: final_obs" in "\n".join(r.reasons)


def test_a_refused_rule_is_told():
    assert "cannot be had: needs x" in reasons_of(changed(rule=None, refused="needs x"))


# -- one training, or none ------------------------------------------------------------------------------------------
def test_one_training_alone():
    alone = recommend(changed(rule=None))
    assert alone.verdict == "stagger"
    assert "no training with a staggered rule to compare with" in alone.expected
    assert "p10 -0.20" in alone.expected
    assert "no training with synchronous resets" in recommend(changed(reference=None)).expected
    assert "no training to look at" in recommend(changed(reference=None, rule=None)).expected


@pytest.mark.parametrize(
    "findings",
    [
        PLAIN,
        changed(horizon_steps=None),
        changed(iterations=50, profiles=(PROFILE._replace(early_share=0.9),), rule=None),
        changed(iterations=50, capabilities=ALL - {Capability.SET_STATE}),
        changed(costs=COSTS._replace(group_s=0.05, whole_s=0.06)),
    ],
)
def test_train_takes_the_overrides(findings):
    load_config(["task=skill_chain", *recommend(findings).overrides])
