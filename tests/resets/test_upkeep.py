"""What keeps a mixture: measured on true phase, with early endings, with states and with cuts alone."""

import itertools

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv

from rl_stagger.envs.base import Capability
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.resets.bring_up import BRING_UPS
from rl_stagger.resets.config import value_at
from rl_stagger.resets.coverage import histogram_coverage, phase_bins, phase_histogram, total_variation
from rl_stagger.resets.density import binned, density_over, nonincreasing
from rl_stagger.resets.gates import GATES
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Collector
from rl_stagger.statistics import Statistics, read_metrics
from rl_stagger.stopwatch import Stopwatch

CPU = torch.device("cpu")
STATES = (Capability.SET_STATE,)


def batches(rule, rollouts, plan=False):
    """Per rollout: the phase histogram of its valid transitions, and the metrics."""
    torch.manual_seed(0)
    model = ActorCritic(rule.spec, ModelConfig(actor_hidden=(4,), critic_hidden=(4,)))
    collector = Collector(rule, model, rule.rollout_steps, True, 0, Stopwatch(CPU))
    horizon, bins = rule.spec.horizon_steps, phase_bins(rule.spec.horizon_steps, rule.rollout_steps)
    statistics = Statistics(rule.num_envs, horizon, rule.rollout_steps, CPU)
    found = []
    for iteration in range(rollouts):
        if plan:
            rule.plan(iteration, rule.rollout_steps)
        rollout = collector.collect()
        histogram = phase_histogram(rollout.phase, horizon, bins, rollout.valid)
        metrics = read_metrics(statistics.add(rollout))
        assert torch.equal(rollout.obs["policy"][:-1, :, 0].long(), rollout.phase) or type(rule.env) is not CounterEnv
        found.append((histogram, metrics))
    return found


def distances(found, density, horizon):
    wanted = binned(density_over(density, horizon), len(found[0][0])).float()
    return [float(total_variation(histogram, wanted)) for histogram, _ in found]


def coverages(found):
    return [float(histogram_coverage(histogram)) for histogram, _ in found]


# -- a density is held ----------------------------------------------------------------------------------------------
DENSITIES = ["1 + 3 * u", "4 - 3 * u", [1, 4, 1], [1, 0, 0, 0], "exp(-4 * u)", [0, 0, 1, 1]]


@pytest.mark.parametrize("gate", sorted(GATES))
@pytest.mark.parametrize("bring_up", sorted(BRING_UPS))
@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_the_density_asked_for_is_there_after_one_horizon(density, bring_up, gate):
    # H=100, K=10: ten rollouts are a horizon.
    env = CounterEnv(256, horizon_steps=100)
    rule = StaggeredResets(env, 10, allocation="density", density=density, bring_up=bring_up, gate=gate)
    found = distances(batches(rule, 25), density, 100)
    assert max(found[10:]) <= 0.05


def test_without_upkeep_a_density_is_only_begun():
    begun = {"allocation": "density", "density": [1, 0, 0, 0], "upkeep": "none"}
    rule = StaggeredResets(CounterEnv(256, horizon_steps=100), 10, **begun)
    found = distances(batches(rule, 12), [1, 0, 0, 0], 100)
    assert found[0] < 0.2
    assert max(found[3:8]) > 0.9
    assert "begun, not held" in rule.notes[0]


@pytest.mark.parametrize("density", ["4 - 3 * u", "exp(-4 * u)", [1, 0, 0, 0]], ids=str)
def test_cuts_alone_hold_what_falls(density):
    env = CounterEnv(256, horizon_steps=100, without=STATES)
    rule = StaggeredResets(env, 10, allocation="density", density=density)
    assert max(distances(batches(rule, 25), density, 100)[10:]) <= 0.05
    assert "early cuts alone, which can only favour early phases: what can be held is 0.00" in rule.notes[0]


def test_what_cuts_alone_cannot_hold_is_said_at_start_and_is_as_said():
    env = CounterEnv(256, horizon_steps=100, without=STATES)
    rule = StaggeredResets(env, 10, allocation="density", density=[1, 4, 1])
    wanted = binned(density_over([1, 4, 1], 100), 10)
    reachable = nonincreasing(wanted)
    said = float(total_variation(wanted, reachable))
    assert f"what can be held is {said:.2f}" in rule.notes[0]
    last = batches(rule, 25)[-1][0]
    assert float(total_variation(last, reachable.float())) <= 0.05


def test_a_density_is_held_against_early_endings():
    # Half of the environments end after 30 of 100 steps: without starts from states no even mixture can be had.
    env = CounterEnv(256, horizon_steps=100, lengths=[0, 30] * 128)
    rule = StaggeredResets(env, 10, allocation="density", density="1 + 0 * u")
    found = batches(rule, 30)
    assert max(distances(found, "1 + 0 * u", 100)[10:]) <= 0.05
    metrics = [line for _, line in found[10:]]
    assert all(
        line["episode/length_mean"] in (None, 100.0, 30.0) or 30 < line["episode/length_mean"] < 100 for line in metrics
    )
    assert sum(line["episode/count"] for line in metrics) > 0, "full episodes go on being counted"


# -- the statistics stay true ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", sorted(GATES))
@pytest.mark.parametrize("density", ["1 + 3 * u", "4 - 3 * u", [0, 0, 1, 1]], ids=str)
def test_no_length_but_the_true_one_is_reported(density, gate):
    rule = StaggeredResets(CounterEnv(128, horizon_steps=40), 5, allocation="density", density=density, gate=gate)
    full, partial = 0, 0
    for _, line in batches(rule, 40):
        full, partial = full + line["episode/count"], partial + line["episode/partial_count"]
        # The sum of 1 .. 40.
        assert (line["episode/length_mean"], line["episode/return_mean"]) in ((40.0, 820.0), (None, None))
        assert line["episode/terminated_count"] == 0
    # 2 % of 128 are 3 environments, which play 200 / 40 episodes each but for the first they are found in.
    assert full >= 3 * 4
    assert partial > full


def test_a_cut_is_a_truncation_with_the_state_reached():
    env = CounterEnv(64, horizon_steps=40)
    rule = StaggeredResets(env, 5, allocation="density", density=[1, 0, 0, 0])
    rule.reset()
    cuts = 0
    for _ in range(60):
        phase = rule.phase_steps
        step = rule.step(torch.zeros(64, 1))
        cut = step.info["cut"]
        cuts += int(cut.sum())
        assert not (cut & step.terminated).any()
        assert (step.truncated >= cut).all()
        assert step.valid.all()
        assert step.final_obs["policy"][cut, 0].tolist() == (phase[cut] + 1).tolist(), "before the move"
        assert step.obs["policy"][:, 0].tolist() == rule.phase_steps.tolist() == rule.elapsed_steps.tolist(), "after it"
        assert step.info["reset"][cut].all()
    assert cuts > 64


def test_a_moved_environment_waits_no_longer():
    env = CounterEnv(64, horizon_steps=40, lengths=[3] * 32 + [0] * 32)
    rule = StaggeredResets(env, 5, allocation="density", density="1 + 0 * u", gate="block")
    found = batches(rule, 40)
    assert all(line["batch/valid_share"] > 0.5 for _, line in found) if "batch/valid_share" in found[0][1] else True
    for _ in range(20):
        step = rule.step(torch.zeros(64, 1))
        assert not (step.info["frozen"] & step.valid).any()
        assert not (step.info["frozen"] & step.info.get("cut", torch.zeros(64, dtype=torch.bool))).any()


# -- groups ----------------------------------------------------------------------------------------------------------
EARLY = {"horizon_steps": 100, "lengths": [7, 0, 0, 0] * 64}
"""A quarter of the environments ends every 7 steps."""


def test_groups_left_alone_never_move():
    for upkeep, bring_up in itertools.product(["hold", "every", "on_coverage_below"], ["warmup", "clock"]):
        rule = StaggeredResets(
            CounterEnv(60, horizon_steps=100), 10, upkeep=upkeep, upkeep_every_iters=2, bring_up=bring_up
        )
        assert all(line["episode/cut_count"] == 0 for _, line in batches(rule, 25)), (upkeep, bring_up)


def together(rule, at):
    """All environments of `rule` begin anew at once, as after a common fall."""
    for _ in range(at):
        rule.step(torch.zeros(rule.num_envs, 1))
    rule.reset(torch.ones(rule.num_envs, dtype=torch.bool))


@pytest.mark.parametrize("without", [(), STATES], ids=["states", "cuts"])
@pytest.mark.parametrize("upkeep", ["hold", "every", "on_coverage_below"])
def test_a_common_fall_is_mended(upkeep, without):
    env = CounterEnv(100, horizon_steps=100, without=without)
    rule = StaggeredResets(env, 10, upkeep=upkeep, upkeep_every_iters=3)
    rule.reset()
    together(rule, 200)
    histograms = []
    for _ in range(30):
        phases = []
        for _ in range(10):
            phases.append(rule.phase_steps)
            rule.step(torch.zeros(100, 1))
        histograms.append(histogram_coverage(phase_histogram(torch.stack(phases), 100, 10)))
    assert histograms[0] < 0.1
    # Cuts alone need a horizon; recorded states one rollout (three where it is done every third).
    bound = 0.9 if upkeep == "on_coverage_below" else 0.98
    assert min(histograms[16 if without else 4 :]) >= bound
    if not without:
        assert histograms[4] >= bound
    alone = StaggeredResets(CounterEnv(100, horizon_steps=100), 10)
    alone.reset()
    together(alone, 200)
    assert len(set(alone.phase_steps.tolist())) == 1, "without upkeep they stay together"


def test_every_waits_for_its_iteration():
    env = CounterEnv(100, horizon_steps=100)
    rule = StaggeredResets(env, 10, upkeep="every", upkeep_every_iters=5)
    rule.reset()
    together(rule, 200)  # the 20th rollout ends here
    cuts = []
    for _ in range(12):
        cuts.append(sum(int(rule.step(torch.zeros(100, 1)).info.get("cut", torch.zeros(1)).sum()) for _ in range(10)))
    assert [i for i, n in enumerate(cuts) if n] == [4], "the 25th: all are seated there, so nobody moves in the 30th"


def test_upkeep_never_writes_a_clock_without_the_state():
    """The literature's trap cannot be configured: after a horizon under any rule, clock and state agree."""
    choices = itertools.product(sorted(BRING_UPS), ["none", "hold", "every", "on_coverage_below"], [(), STATES])
    for bring_up, upkeep, without in choices:
        if bring_up == "snapshot" and without:
            continue
        rule = StaggeredResets(
            CounterEnv(40, **{**EARLY, "lengths": [7, 0, 0, 0] * 10}, without=without), 10, bring_up=bring_up,
            upkeep=upkeep, upkeep_every_iters=2,
        )  # fmt: skip
        rule.reset()
        for t in range(200):
            step = rule.step(torch.zeros(40, 1))
            assert step.obs["policy"][:, 0].tolist() == rule.phase_steps.tolist(), "the true phase is the state's"
            if t >= 100:
                assert rule.elapsed_steps.tolist() == rule.phase_steps.tolist(), (bring_up, upkeep, without)


# -- snapshot as a bring-up ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", sorted(GATES))
def test_snapshot_spreads_over_the_first_horizon_without_a_warm_up(gate):
    rule = StaggeredResets(CounterEnv(100, horizon_steps=100), 10, bring_up="snapshot", gate=gate)
    found = batches(rule, 30)
    assert rule.warmup_steps == 0
    assert coverages(found)[0] == 0.0
    assert min(coverages(found)[10:]) > 0.99
    assert all(line["episode/cut_count"] == 0 for _, line in found[11:]), "nobody is moved once all are spread"


def test_snapshot_from_a_librarys_states_is_spread_at_once():
    first = StaggeredResets(CounterEnv(100, horizon_steps=100), 10, bring_up="snapshot")
    batches(first, 12)
    second = StaggeredResets(CounterEnv(100, horizon_steps=100), 10, bring_up="snapshot")
    second._upkeep.library.load_state_dict(first.state_dict()["upkeep"]["library"], CPU)
    assert min(coverages(batches(second, 12))) > 0.95
    assert second.warmup_steps == 0


# -- schedules -------------------------------------------------------------------------------------------------------
def test_value_at():
    schedule = [[10, 4], [20, 8]]
    assert [value_at(schedule, x) for x in (0, 9.9, 10, 19, 20, 500)] == [None, None, 4, 4, 8, 8]
    assert value_at(None, 3) is None


def occupied(histogram):
    return int((histogram > 0.02).sum())


def test_the_number_of_groups_follows_its_schedule():
    # Two groups fill at most 3 of 10 bins (a rollout of 10 steps walks from one bin into the next); ten fill all.
    rule = StaggeredResets(CounterEnv(100, horizon_steps=100), 10, num_groups_schedule=[[0, 2], [12, 10], [24, 1]])
    found = batches(rule, 40, plan=True)
    assert max(occupied(h) for h, _ in found[:12]) <= 4
    assert min(occupied(h) for h, _ in found[14:24]) == 10
    assert max(occupied(h) for h, _ in found[27:]) <= 2
    assert rule.num_groups == 1


def test_the_number_of_groups_follows_the_return():
    rule = StaggeredResets(
        CounterEnv(100, horizon_steps=100), 10, num_groups=2, num_groups_by_return=[[5.0, 4], [9.0, 10]]
    )
    rule.reset()
    seen = []
    for iteration, value in enumerate([None, 4.0, 6.0, 2.0, None, 9.5, 1.0]):
        rule.plan(iteration, 10)
        seen.append(rule.num_groups)
        rule.note_return(value)
    rule.plan(7, 10)
    assert [*seen, rule.num_groups] == [2, 2, 2, 4, 4, 4, 10, 10], "once reached, kept"


@pytest.mark.parametrize("without", [(), STATES], ids=["states", "cuts"])
def test_the_curriculum_plays_early_segments_first(without):
    env = CounterEnv(256, horizon_steps=100, without=without)
    rule = StaggeredResets(env, 10, horizon_share_schedule=[[0, 0.3], [10, 1.0]])
    found = batches(rule, 40, plan=True)
    for histogram, _ in found[1:10]:
        assert float(histogram[4:].sum()) < 0.03
        assert float((histogram[:3] - 1 / 3).abs().max()) < 0.08
    assert min(coverages(found)[25:]) > 0.97


def test_rollouts_of_another_length_keep_the_gate_at_their_end():
    env = CounterEnv(12, horizon_steps=12, lengths=[1, 0, 0] * 4)
    rule = StaggeredResets(env, 3, gate="block", bring_up="none")
    rule.reset()
    ends = []
    for iteration, steps in enumerate([3, 3, 4, 4, 2]):
        rule.plan(iteration, steps)
        resets = [bool(rule.step(torch.zeros(12, 1)).info["reset"][0]) for _ in range(steps)]
        ends.append(resets)
    assert ends == [[False] * (steps - 1) + [True] for steps in (3, 3, 4, 4, 2)]


# -- ranks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [2, 4, 7])
@pytest.mark.parametrize(
    "settings", [{}, {"allocation": "mixed"}, {"allocation": "density", "density": "1 + 3 * u"}], ids=str
)
def test_the_union_over_ranks_holds_the_mixture(settings, world_size):
    density = settings.get("density", "1 + 0 * u")
    total = None
    for rank in range(world_size):
        rule = StaggeredResets(
            CounterEnv(280 // world_size, horizon_steps=100), 10, seed=5, rank=rank, world_size=world_size, **settings
        )
        histograms = torch.stack([histogram for histogram, _ in batches(rule, 15)])
        total = histograms if total is None else total + histograms
    wanted = binned(density_over(density, 100), 10).float()
    assert max(float(total_variation(h / world_size, wanted)) for h in total) <= 0.06
    with pytest.raises(ConfigError, match="rank=2: between 0 and world_size - 1 = 1"):
        StaggeredResets(CounterEnv(4), 3, rank=2, world_size=2)


# -- refused at start -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, match",
    [
        ({"allocation": "density"}, r"reset\.density=None: .*needs weights"),
        ({"density": "u"}, r"reset\.density='u': null, or allocation=density"),
        ({"allocation": "density", "density": "v"}, r"reset\.density='v': 'v' is not known"),
        ({"allocation": "density", "density": [1, -1]}, r"reset\.density=\(1, -1\): a weight of -1"),
        ({"allocation": "density", "density": [0, 1], "horizon_share_schedule": [[0, 0.5]]}, "nothing of the density"),
        ({"allocation": "adaptive", "upkeep": "none"}, r"reset\.upkeep='none': auto or hold"),
        (
            {"horizon_share_schedule": [[0, 1.5]]},
            r"reset\.horizon_share_schedule=\[\[0, 1\.5\]\]: shares of the horizon",
        ),
        ({"num_groups_schedule": [[5, 2], [5, 3]]}, "pairs with rising first numbers"),
        ({"num_groups_schedule": [[5, 2.5]]}, "whole numbers of at least 1"),
        ({"num_groups_schedule": [[5]]}, "a list of pairs"),
        ({"num_groups_schedule": [[5, 13]]}, r"reset\.num_groups=13: at most one group a step, H=12"),
        (
            {"num_groups_schedule": [[0, 2]], "num_groups_by_return": [[0, 2]]},
            "null where num_groups_schedule is given",
        ),
        ({"adaptive": {"floor": 0}}, r"reset\.adaptive\.floor=0: above 0"),
        ({"adaptive": {"flor": 0}}, r"adaptive\.flor=0: no such setting; did you mean 'floor'"),
        ({"library": {"mib": 0}}, r"reset\.library\.mib=0: above 0"),
        ({"upkeep_coverage": 2}, r"reset\.upkeep_coverage=2: a share between 0 and 1"),
        ({"whole_episode_share": -1}, r"reset\.whole_episode_share=-1: a share"),
        ({"upkeep_every_iters": 0}, r"reset\.upkeep_every_iters=0: at least 1"),
        ({"allocation": "density", "density": "u < 0.001"}, r"over H=12 steps: all weights are 0"),
        ({"allocation": "density", "density": [1] * 13}, r"over H=12 steps: 13 weights for a horizon of 12"),
        ({"allocation": "density", "density": 3}, r"reset\.density=3: weights like"),
        ({"allocation": "density", "density": [[1], [2]]}, r"reset\.density=.*: weights like"),
        ({"num_groups_schedule": [[0, float("inf")]]}, "a list of pairs"),
        ({"num_groups_schedule": [[float("nan"), 3]]}, "a list of pairs"),
        ({"num_groups_schedule": 5}, "num_groups_schedule=5: a list of pairs"),
        ({"num_groups": 2.5}, r"reset\.num_groups=2\.5: at least 1"),
        ({"num_groups": "x"}, r"reset\.num_groups='x': at least 1"),
        ({"random_share": None}, r"reset\.random_share=None: a share"),
        ({"gate": "block", "gate_capacity": 2.5}, r"reset\.gate_capacity=2\.5: at least 1"),
        ({"rollout_steps": 2.5}, r"rollout_steps=2\.5: at least 1, a whole number"),
        ({"library": {"mib": float("inf")}}, r"reset\.library\.mib=inf: above 0"),
        ({"library": {"path": "runs/x"}}, r"reset\.library\.path='runs/x': null, or bring_up=snapshot or an upkeep"),
        ({"num_group": 3}, "num_group=3: StaggeredResets has no such setting; did you mean 'num_groups'"),
        ({"gate": "block", "gate_capacity": 0}, r"reset\.gate_capacity=0: at least 1, group, or null"),
        ({"gate": "block", "gate_capacity": "grup"}, r"reset\.gate_capacity='grup': at least 1, group, or null"),
    ],
)
def test_settings_that_cannot_work(settings, match):
    with pytest.raises(ConfigError, match=match):
        StaggeredResets(CounterEnv(4), **{"rollout_steps": 3, **settings})


@pytest.mark.parametrize("name", ["num_groups_schedule", "num_groups_by_return"])
def test_no_schedule_of_groups_without_a_time_limit(name):
    with pytest.raises(ConfigError, match="no time limit"):
        StaggeredResets(CounterEnv(4, horizon_steps=None), 3, bring_up="none", **{name: [[0, 2]]})


def test_gates_that_merge_groups_are_told():
    rule = StaggeredResets(CounterEnv(8, horizon_steps=40), 4, gate="block", gate_interval_steps=40)
    assert "groups that meet at a gate stay together" in rule.notes[0]
    assert StaggeredResets(CounterEnv(8, horizon_steps=40), 4, gate="block").notes == []
    assert StaggeredResets(CounterEnv(8, horizon_steps=40), 7, gate="block").notes == []


@pytest.mark.parametrize("allocation", ["uniform", "random", "mixed", "density", "adaptive"])
@pytest.mark.parametrize("gate", sorted(GATES))
def test_a_saved_rule_goes_on_with_its_period_and_its_rollout(allocation, gate):
    """H = 12 is no multiple of K = 5, and K has changed since the start."""
    density = "1 + 3 * u" if allocation == "density" else None
    settings = {"allocation": allocation, "gate": gate, "upkeep": "hold", "density": density}
    first = StaggeredResets(CounterEnv(24, lengths=[0, 5, 7] * 8), 3, **settings)
    first.reset()
    first.plan(1, 5)
    for _ in range(10):
        first.step(torch.zeros(24, 1))
    second = StaggeredResets(CounterEnv(24, lengths=[0, 5, 7] * 8), 3, **settings)
    second.load_state_dict(first.state_dict())
    for rule in (first, second):
        rule.plan(2, 5)
    for _ in range(30):
        a, b = first.step(torch.zeros(24, 1)), second.step(torch.zeros(24, 1))
        assert torch.equal(a.obs["policy"], b.obs["policy"])
        assert torch.equal(a.truncated, b.truncated)
    assert first._upkeep.target.period_steps == second._upkeep.target.period_steps


def test_what_a_simulator_cannot_do():
    env = CounterEnv(4, without=[Capability.PARTIAL_RESET])
    with pytest.raises(CapabilityError, match=r"reset\.upkeep='hold' needs 'partial_reset'"):
        StaggeredResets(env, 3, bring_up="clock", upkeep="hold")
    env = CounterEnv(4, without=STATES)
    with pytest.raises(CapabilityError, match=r"reset\.upkeep_by='snapshot' needs 'set_state'.*possible here: cut"):
        StaggeredResets(env, 3, upkeep="hold", upkeep_by="snapshot")
    endless = CounterEnv(4, horizon_steps=None)
    with pytest.raises(ConfigError, match=r"reset\.upkeep='hold': this task has no time limit"):
        StaggeredResets(endless, 3, bring_up="none", upkeep="hold")


# -- the figures ---------------------------------------------------------------------------------------------
def test_clock_has_no_false_length_and_no_reset_spike():
    # N=512, H=100, K=24. Each environment on its own: about 5 of 512 reset in a step, 1 %; in groups a fifth at once.
    worst = {}
    for allocation in ("random", "uniform"):
        rule = StaggeredResets(
            make_env("skill_chain", 512, horizon_steps=100), 24, allocation=allocation, bring_up="clock"
        )
        found = [line for _, line in batches(rule, 20)]
        assert {line["episode/length_mean"] for line in found} <= {None, 100.0}
        assert sum(line["episode/count"] for line in found) > 512
        worst[allocation] = max(line["resets/per_step_max"] for line in found) / 512
    assert worst["random"] <= 0.03
    assert worst["uniform"] == pytest.approx(0.2, abs=0.01)
    spike = StaggeredResets(make_env("skill_chain", 512, horizon_steps=100), 24, bring_up="none")
    assert max(line["resets/per_step_max"] for _, line in batches(spike, 6)) == 512
