"""The reset rule as a whole: a VecEnv around a VecEnv, that refuses what cannot work and keeps batches spread."""

import itertools

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv, PlainEnv

from rl_stagger.config import from_tree, to_tree
from rl_stagger.envs.base import Box, Capability, EnvSpec, VecEnv
from rl_stagger.envs.native.base import NativeEnv
from rl_stagger.envs.registry import make_env
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.resets.allocation import ALLOCATIONS
from rl_stagger.resets.bring_up import BRING_UPS
from rl_stagger.resets.config import ResetConfig
from rl_stagger.resets.coverage import histogram_coverage, phase_bins, phase_coverage, phase_histogram
from rl_stagger.resets.gates import GATES
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Collector
from rl_stagger.statistics import Statistics, read_metrics
from rl_stagger.stopwatch import Stopwatch

CPU = torch.device("cpu")
EVERY_RULE = list(itertools.product(sorted(BRING_UPS), sorted(GATES), sorted(ALLOCATIONS)))
every_rule = pytest.mark.parametrize("bring_up, gate, allocation", EVERY_RULE)
DENSITIES = {"density": "1 + 3 * u"}
"""What an allocation cannot do without."""


def rule_for(env, rollout_steps=3, **settings):
    rule = StaggeredResets(env, rollout_steps, **settings)
    rule.reset()
    return rule


def act(env):
    return torch.zeros(env.num_envs, 1)


def mask_of(n, *rows):
    mask = torch.zeros(n, dtype=torch.bool)
    mask[list(rows)] = True
    return mask


def collector_for(rule, steps):
    torch.manual_seed(0)
    model = ActorCritic(rule.spec, ModelConfig(actor_hidden=(8,), critic_hidden=(8,)))
    return Collector(rule, model, steps, True, 0, Stopwatch(CPU))


# -- a VecEnv -------------------------------------------------------------------------------------------------------
@every_rule
def test_it_honours_the_env_contract(bring_up, gate, allocation):
    env = CounterEnv(5, lengths=[0, 4, 0, 7, 0])
    density = DENSITIES.get(allocation)
    rule = StaggeredResets(env, 3, bring_up=bring_up, gate=gate, allocation=allocation, density=density)
    assert isinstance(rule, VecEnv)
    assert (rule.num_envs, rule.device, rule.spec) == (5, env.device, env.spec)
    obs = rule.reset()
    assert obs["policy"].shape == (5, 2)
    for _ in range(30):
        before = rule.phase_steps
        step = rule.step(act(rule))
        kinds = {name: getattr(step, name).dtype for name in ("reward", "terminated", "truncated", "valid")}
        flag = torch.bool
        assert kinds == {"reward": torch.float32, "terminated": flag, "truncated": flag, "valid": flag}
        assert not (step.terminated & step.truncated).any()
        assert step.final_obs is not None
        assert step.final_obs["policy"][step.done, 0].tolist() == (before[step.done] + 1).tolist()
        assert step.obs["policy"][:, 0].tolist() == rule.phase_steps.tolist(), "phase_steps is the true one"
        assert not (step.done & ~step.valid).any(), "a frozen environment does not end once more"
        assert rule.elapsed_steps.dtype == torch.int64
    for name in ("elapsed_steps", "phase_steps"):
        read = getattr(rule, name)
        read += 100
        assert int(getattr(rule, name).max()) < 100, f"{name} is a clone"


@pytest.mark.parametrize("gate", sorted(GATES))
def test_a_partial_reset_leaves_the_others(gate):
    rule = rule_for(CounterEnv(4), gate=gate)
    assert rule.phase_steps.tolist() == [0, 3, 6, 9]
    obs = rule.reset(mask_of(4, 2))
    for read in (obs["policy"][:, 0], rule.phase_steps, rule.elapsed_steps):
        assert read.tolist() == [0, 3, 0, 9]
    step = rule.step(act(rule))
    assert step.obs["policy"][:, 0].tolist() == [1, 4, 1, 10]
    assert step.valid.all()


@pytest.mark.parametrize("mask", [torch.tensor([2]), torch.tensor([0, 0, 1, 0]), [False, False, True, False]])
def test_a_mask_of_integers_is_refused(mask):
    rule = rule_for(CounterEnv(4))
    with pytest.raises(TypeError, match="bool"):
        rule.reset(mask)
    assert rule.phase_steps.tolist() == [0, 3, 6, 9]


def test_a_waiting_environment_that_is_reset_by_hand_waits_no_longer():
    rule = rule_for(CounterEnv(2, lengths=[1, 1]), 4, bring_up="none", gate="block")
    rule.step(act(rule))
    rule.reset(mask_of(2, 0))
    step = rule.step(act(rule))
    assert step.valid.tolist() == [True, False]
    assert step.terminated.tolist() == [True, False]
    # Env 1 is still shown as it ended: one step.
    assert step.obs["policy"][:, 0].tolist() == [1, 1]
    assert rule.phase_steps.tolist() == [1, 1]


def test_a_waiting_environment_whose_state_is_set_goes_on_from_there():
    rule = rule_for(CounterEnv(2, lengths=[3, 0]), 12, bring_up="none", gate="block")
    for _ in range(2):
        rule.step(act(rule))
    early = rule.get_state()
    rule.step(act(rule))
    obs = rule.set_state(early, mask_of(2, 0))
    assert obs["policy"][:, 0].tolist() == [2, 3]
    step = rule.step(act(rule))
    assert step.valid.tolist() == [True, True]
    assert step.terminated.tolist() == [True, False]
    assert step.obs["policy"][:, 0].tolist() == rule.phase_steps.tolist() == [3, 4]


def test_manual_resets_pass_through_the_immediate_gate():
    rule = StaggeredResets(CounterEnv(3, lengths=[2, 0, 0]), 3, bring_up="none")
    rule.set_manual_reset(True)
    rule.reset()
    for _ in range(3):
        step = rule.step(act(rule))
    assert step.obs["policy"][:, 0].tolist() == rule.phase_steps.tolist() == rule.elapsed_steps.tolist() == [2, 3, 3]
    assert step.valid.tolist() == [False, True, True]
    rule.reset(mask_of(3, 0))
    assert rule.phase_steps.tolist() == [0, 3, 3]


def test_a_warm_up_under_manual_resets_still_reaches_its_offsets():
    rule = StaggeredResets(CounterEnv(4, lengths=[2, 2, 0, 0]), 3)
    rule.set_manual_reset(True)
    obs = rule.reset()
    # Envs 0, 1 end every 2 steps; env 0 is reset in the last moment, env 1 has had 3 = 2 + 1 steps.
    assert obs["policy"][:, 0].tolist() == rule.phase_steps.tolist() == [0, 1, 6, 9]
    rule.step(act(rule))
    step = rule.step(act(rule))
    assert step.valid.tolist() == [True, False, True, True]


def test_the_block_gate_keeps_manual_resets_for_itself():
    rule = rule_for(CounterEnv(2, lengths=[1, 0]), bring_up="none", gate="block")
    assert Capability.MANUAL_RESET not in rule.capabilities
    assert Capability.MANUAL_RESET in rule_for(CounterEnv(2)).capabilities
    with pytest.raises(CapabilityError, match="manual_reset"):
        rule.set_manual_reset(True)
    rule.set_manual_reset(False)  # what is off already stays off, and the gate keeps working
    valid = [bool(rule.step(act(rule)).valid[0]) for _ in range(4)]
    assert valid == [True, False, False, True]


def test_a_rule_around_a_rule_is_still_an_environment():
    inner = StaggeredResets(CounterEnv(4), 3)
    outer = StaggeredResets(inner, 3, bring_up="none")
    assert outer.reset()["policy"][:, 0].tolist() == [0, 3, 6, 9]


def test_random_actions_of_a_warm_up_are_legal():
    class Watching(NativeEnv):
        def __init__(self, action):
            super().__init__(EnvSpec({"policy": (1,)}, action, 6), 400, "cpu", 0)
            self.seen = []

        def _start(self):
            return {"x": torch.zeros(self.num_envs)}

        def _advance(self, state, action, elapsed):
            self.seen.append(action)
            return state, state["x"], torch.zeros(self.num_envs, dtype=torch.bool), {}

        def _observe(self, state, elapsed):
            return {"policy": state["x"].unsqueeze(1).clone()}

    both = Watching(Box(2, [-1.0, 2.0], [1.0, 5.0]))
    rule_for(both, 1, num_groups=2)
    low, high = torch.cat(both.seen).amin(0), torch.cat(both.seen).amax(0)
    assert (low >= torch.tensor([-1.0, 2.0])).all()
    assert (high <= torch.tensor([1.0, 5.0])).all()
    assert (high - low > torch.tensor([1.9, 2.9])).all(), "all of the range"
    endless = Watching(Box(2, [-float("inf"), 0.0], float("inf")))
    assert not endless.spec.action.bounded
    rule_for(endless, 1, num_groups=2)
    assert torch.cat(endless.seen).isfinite().all()
    half = Watching(Box(1, low=0.0))
    rule_for(half, 1, num_groups=2)
    assert torch.cat(half.seen).min() >= 0


def test_seeds_decide_random_offsets_and_warm_up_actions():
    def made(seed):
        rule = StaggeredResets(make_env("pendulum", 16, horizon_steps=20), 4, allocation="random", seed=seed)
        return rule.reset()["policy"], rule.offsets

    (obs, offsets), (obs_again, offsets_again), (obs_other, offsets_other) = made(1), made(1), made(2)
    assert torch.equal(obs, obs_again)
    assert torch.equal(offsets, offsets_again)
    assert not torch.equal(offsets, offsets_other)
    assert not torch.equal(obs, obs_other)
    rule = StaggeredResets(make_env("pendulum", 16, horizon_steps=20), 4, allocation="random", seed=2)
    rule.seed(1)
    rule.reset()
    assert torch.equal(rule.offsets, offsets)


# -- refused at start -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, match",
    [
        ({"bring_up": "warm_up"}, "reset.bring_up='warm_up'.*did you mean 'warmup'"),
        ({"gate": "blok"}, "reset.gate='blok'.*did you mean 'block'"),
        ({"allocation": "unifrm"}, "reset.allocation='unifrm'.*did you mean 'uniform'"),
        ({"warmup_actions": "randm"}, "reset.warmup_actions='randm'.*did you mean 'random'"),
        ({"upkeep": "respread"}, "reset.upkeep='respread'.*Valid: auto, every, hold, none, on_coverage_below"),
        ({"num_groups": 0}, "reset.num_groups=0: at least 1"),
        ({"gate_interval_steps": -1}, "reset.gate_interval_steps=-1: at least 1"),
        ({"num_groups": 13}, "reset.num_groups=13.*H=12"),
        ({"rollout_steps": 0}, "rollout_steps=0: at least 1"),
        ({"rollout_steps": 12}, "rollout_steps=12.*H=12.*rollout_steps < 12 or reset=synchronous"),
        ({"rollout_steps": 40}, "rollout_steps=40.*rollout_steps < 12"),
    ],
)
def test_settings_that_cannot_work(settings, match):
    with pytest.raises(ConfigError, match=match):
        StaggeredResets(CounterEnv(4), **{"rollout_steps": 3, **settings})


@pytest.mark.parametrize("bring_up", ["clock", "warmup"])
def test_nothing_to_spread_over_without_a_time_limit(bring_up):
    with pytest.raises(ConfigError, match=r"no time limit.*horizon_steps.*reset=synchronous"):
        StaggeredResets(CounterEnv(4, horizon_steps=None), 3, bring_up=bring_up)
    assert rule_for(CounterEnv(4, horizon_steps=None), bring_up="none").num_groups == 1


def test_synchronous_takes_rollouts_as_long_as_it_likes():
    assert rule_for(CounterEnv(4), 40, bring_up="none").num_groups == 1


def test_an_environment_that_can_do_nothing_is_told_what_is_possible():
    class Limited(PlainEnv):
        def __init__(self):
            super().__init__(4)
            self.spec = EnvSpec({"policy": (1,)}, Box(1), 9)

    for bring_up in ("clock", "warmup"):
        with pytest.raises(CapabilityError, match="possible here: none"):
            StaggeredResets(Limited(), 3, bring_up=bring_up)
    assert rule_for(Limited(), bring_up="none").phase_steps.tolist() == [0] * 4


# -- sizes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bring_up", ["clock", "warmup"])
def test_one_environment(bring_up):
    rule = rule_for(CounterEnv(1), bring_up=bring_up)
    assert (rule.num_groups, rule.offsets.tolist()) == (1, [0])
    assert rule.step(act(rule)).obs["policy"][0, 0] == 1


def test_one_environment_at_random():
    drawn = set()
    for seed in range(20):
        drawn.add(int(rule_for(CounterEnv(1), allocation="random", seed=seed).offsets))
    assert len(drawn) > 5, "one environment has a phase of its own too"


def test_fewer_environments_than_groups_are_spread_over_the_whole_horizon():
    # H=200, K=10 asks for 20 groups; 4 environments make 4 groups, 50 apart (not 0, 10, 20, 30).
    rule = rule_for(CounterEnv(4, horizon_steps=200), 10)
    assert rule.num_groups == 4
    assert rule.phase_steps.tolist() == [0, 50, 100, 150]


def test_as_many_groups_as_steps():
    rule = rule_for(CounterEnv(12), num_groups=12)
    assert rule.phase_steps.tolist() == list(range(12))


def test_one_group_is_synchronous():
    assert rule_for(CounterEnv(4), num_groups=1).phase_steps.tolist() == [0] * 4


# -- coverage, on true phase ----------------------------------------------------------------------------------------
def coverage_of_batches(rule, rollout_steps, batches):
    """(coverage, total variation) of each batch, as the run's statistics count them."""
    collector = collector_for(rule, rollout_steps)
    statistics = Statistics(rule.num_envs, rule.spec.horizon_steps, rollout_steps, CPU)
    lines = [read_metrics(statistics.add(collector.collect())) for _ in range(batches)]
    return [line["batch/coverage"] for line in lines], [line["batch/tv_distance"] for line in lines]


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_batch_covers_the_horizon(gate):
    # H=200, K=10: 20 groups of 10 steps each, in every batch: exactly even, and the same mixture for ever.
    rule = StaggeredResets(make_env("skill_chain", 40, horizon_steps=200), 10, gate=gate)
    coverage, distance = coverage_of_batches(rule, 10, 45)
    assert min(coverage) > 0.99
    assert max(distance[1:]) < 0.01


def test_every_batch_covers_the_horizon_where_the_rollout_does_not_divide_it():
    # H=100, K=24: 5 groups, 20 apart, 24 steps each. Bins are 20 steps as well, and moving all groups by the same
    # distance moves every bin alike: coverage 1, though some phases are met twice in a batch.
    rule = StaggeredResets(make_env("skill_chain", 40, horizon_steps=100), 24)
    coverage, distance = coverage_of_batches(rule, 24, 12)
    assert min(coverage) > 0.99
    assert max(distance[1:]) < 0.01


def test_coverage_where_nothing_divides_anything():
    # H=103, K=24, N=12: groups of 3, 3, 2, 2, 2 environments; the best that can be had.
    rule = StaggeredResets(make_env("skill_chain", 12, horizon_steps=103), 24)
    coverage, _ = coverage_of_batches(rule, 24, 12)
    # Shares 3/12, 3/12, 2/12, 2/12, 2/12 give .9832; group edges that fall within a step move it by a little.
    assert 0.97 < min(coverage) <= max(coverage) < 0.995


def test_synchronous_batches_see_one_part_at_a_time():
    rule = StaggeredResets(make_env("skill_chain", 8, horizon_steps=200), 10, bring_up="none")
    coverage, distance = coverage_of_batches(rule, 10, 21)
    assert max(coverage) == 0.0, "one bin of 20 in every batch"
    assert min(distance[1:]) == 1.0, "and never the one before"


def test_block_with_early_endings_still_covers():
    env = CounterEnv(40, horizon_steps=40, lengths=[0, 0, 0, 30] * 10)
    coverage, _ = coverage_of_batches(StaggeredResets(env, 4, gate="block"), 4, 40)
    assert min(coverage) > 0.9


def test_a_written_clock_does_not_pass_for_coverage():
    rule = StaggeredResets(CounterEnv(40, horizon_steps=40), 4, bring_up="clock")
    coverage, _ = coverage_of_batches(rule, 4, 12)
    # Batch 1: nobody has moved. From step 4 on one group after the other begins anew; after 40 steps all are true.
    assert coverage[0] == 0.0
    assert coverage[1] < 0.5
    assert min(coverage[10:]) > 0.99
    clocks = StaggeredResets(CounterEnv(40, horizon_steps=40), 4, bring_up="clock")
    clocks.reset()
    assert phase_coverage(clocks.elapsed_steps, 40, 10) > 0.99, "by the clock it would have looked even"


def test_the_trap_of_rewriting_the_clock_at_every_rollout_is_exposed():
    """The article's sketch: every K steps it writes each clock to its offset and calls that staggering."""

    class Trap(StaggeredResets):
        done_steps = 0

        def step(self, action):
            if self.done_steps % self.rollout_steps == 0:
                self.set_elapsed_steps(self.offsets)
            self.done_steps += 1
            return super().step(action)

    env = CounterEnv(40, horizon_steps=40)
    rule = Trap(env, 4, bring_up="clock")
    collector = collector_for(rule, 4)
    bins = phase_bins(40, 4)
    by_phase, by_clock, truth = [], [], []
    for _ in range(10):
        rollout = collector.collect()
        by_phase.append(float(histogram_coverage(phase_histogram(rollout.phase, 40, bins))))
        by_clock.append(float(histogram_coverage(phase_histogram(rollout.clock, 40, bins))))
        truth.append(phase_coverage(rollout.obs["policy"][:-1, :, 0].long(), 40, bins))
    assert min(by_clock) > 0.95, "the clock claims an even batch"
    assert max(by_phase) < 0.5, "the measure in use does not believe it"
    assert by_phase == pytest.approx(truth, abs=1e-6), "it is that of the states"
    honest = StaggeredResets(CounterEnv(40, horizon_steps=40), 4)
    assert min(coverage_of_batches(honest, 4, 10)[0]) > 0.99


# -- state ----------------------------------------------------------------------------------------------------------
def equal_trees(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_trees(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def eventful(seed=0):
    """Chance in resets, in steps and in endings; two observation groups."""
    return make_env("legged_bench", 6, seed=seed, horizon_steps=12, termination_probability=0.1, critic_obs=True)


@every_rule
def test_state_goes_round_bitwise(bring_up, gate, allocation):
    settings = {
        "bring_up": bring_up, "gate": gate, "allocation": allocation, "density": DENSITIES.get(allocation),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(5)
    actions = torch.randn(40, 6, 12, generator=draw)
    first = rule_for(eventful(), 4, seed=3, **settings)
    for action in actions[:10]:  # not at a gate
        first.step(action)
    saved = first.state_dict()
    second = StaggeredResets(eventful(seed=99), 4, seed=77, **settings)
    second.load_state_dict(saved)
    assert equal_trees(second.state_dict(), saved)
    for action in actions[10:]:
        a, b = first.step(action), second.step(action)
        for name in ("obs", "reward", "terminated", "truncated", "final_obs", "valid", "info"):
            assert equal_trees(getattr(a, name), getattr(b, name)), name
        assert torch.equal(first.phase_steps, second.phase_steps)
    obs_a, obs_b = first.reset(), second.reset()  # the next bring-up draws the same, too
    assert equal_trees(obs_a, obs_b)
    assert equal_trees(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("gate", sorted(GATES))
def test_a_state_saved_before_the_first_reset_can_be_loaded(gate):
    fresh = StaggeredResets(CounterEnv(4), 3, gate=gate)
    again = StaggeredResets(CounterEnv(4), 3, gate=gate)
    again.load_state_dict(fresh.state_dict())
    assert again.reset()["policy"][:, 0].tolist() == [0, 3, 6, 9]


def test_a_saved_state_does_not_move_on_with_the_run():
    rule = rule_for(CounterEnv(4, lengths=[2, 0, 0, 0]), gate="block")
    rule.step(act(rule))
    saved = rule.state_dict()
    copy = {key: (value.clone() if isinstance(value, torch.Tensor) else value) for key, value in saved["gate"].items()}
    phase = saved["phase"].clone()
    for _ in range(5):
        rule.step(act(rule))
    assert torch.equal(saved["phase"], phase)
    assert equal_trees(saved["gate"], copy)


def test_config_and_constructor_name_the_same_settings():
    settings = {
        "name": "x", "allocation": "random", "num_groups": 5, "bring_up": "clock", "warmup_actions": "random",
        "gate": "block", "gate_interval_steps": 7, "gate_capacity": 3, "upkeep": "every", "upkeep_every_iters": 9,
        "num_groups_schedule": [[3, 2]], "adaptive": {"floor": 0.5}, "library": {"mib": 1.0},
    }  # fmt: skip
    config = from_tree(ResetConfig, settings, "reset")
    rule = StaggeredResets.from_config(CounterEnv(6), config, 3, seed=1)
    assert rule.config == config
    by_hand = StaggeredResets(CounterEnv(6), 3, seed=1, **settings)
    assert to_tree(by_hand.config) == {**to_tree(config), "num_groups_schedule": ([3, 2],)}
    assert rule.num_groups == 5
