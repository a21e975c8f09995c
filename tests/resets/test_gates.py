"""What a gate does to an environment that is done, step by step; the observation is the true step."""

from contextlib import nullcontext

import pytest
import torch
from helpers.toy_envs_runner import CounterEnv, PlainEnv

from rl_stagger.envs.base import Capability
from rl_stagger.errors import CapabilityError, ConfigError
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.resets.gates import BlockGate, ImmediateGate
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Collector
from rl_stagger.stopwatch import Stopwatch


def watch(name):
    return nullcontext()


def opened(gate, env):
    """`gate`, with all environments fresh."""
    gate.begin(env, env.reset())
    return gate


def play(gate, env, steps):
    """Per step, lists over environments: obs (true step), clock, reward, valid, terminated, truncated, reset."""
    table = []
    for _ in range(steps):
        step = gate.step(env, torch.zeros(env.num_envs, 1), watch)
        table.append(
            {
                "obs": step.obs["policy"][:, 0].tolist(),
                "clock": env.elapsed_steps.tolist(),
                "reward": step.reward.tolist(),
                "valid": step.valid.tolist(),
                "terminated": step.terminated.tolist(),
                "truncated": step.truncated.tolist(),
                "reset": step.info["reset"].tolist(),
                "final": step.final_obs["policy"][:, 0].tolist(),
            }
        )
    return table


def of_env(table, name, row):
    return [line[name][row] for line in table]


# -- immediate ------------------------------------------------------------------------------------------------------
def test_immediate_resets_in_the_same_step():
    env = CounterEnv(2, lengths=[3, 0], horizon_steps=5)
    table = play(opened(ImmediateGate(4), env), env, 6)
    assert of_env(table, "obs", 0) == [1, 2, 0, 1, 2, 0]
    assert of_env(table, "reset", 0) == [False, False, True, False, False, True]
    assert of_env(table, "obs", 1) == [1, 2, 3, 4, 0, 1]
    assert of_env(table, "truncated", 1) == [False] * 4 + [True, False]
    assert all(line["valid"] == [True, True] for line in table)


# -- block ----------------------------------------------------------------------------------------------------------
def test_a_waiting_environment_is_frozen():
    # Gate every 4 steps. Env 1 ends after 2 steps, so steps 3 and 4 are frozen; step 4 is the gate.
    env = CounterEnv(3, lengths=[0, 2, 0])
    table = play(opened(BlockGate(4), env), env, 5)
    assert of_env(table, "terminated", 1) == [False, True, False, False, False], "its end is told once"
    assert of_env(table, "obs", 1) == [1, 2, 2, 0, 1], "the last observation is held until the gate"
    assert of_env(table, "clock", 1) == [1, 2, 2, 0, 1]
    assert of_env(table, "reward", 1) == [1, 2, 0, 0, 1]
    assert of_env(table, "valid", 1) == [True, True, False, False, True]
    assert of_env(table, "reset", 1) == [False, False, False, True, False]
    assert of_env(table, "obs", 0) == [1, 2, 3, 4, 5], "the others go on"
    assert of_env(table, "valid", 0) == [True] * 5


def test_all_that_wait_reset_together():
    env = CounterEnv(4, lengths=[1, 2, 3, 0])
    gate = opened(BlockGate(4), env)
    before = env.resets_asked
    table = play(gate, env, 4)
    assert [sum(line["reset"]) for line in table] == [0, 0, 0, 3]
    assert table[3]["obs"] == [0, 0, 0, 4]
    assert env.resets_asked - before == 1, "one reset call for a whole block"


def test_done_in_the_gates_own_step_does_not_wait():
    env = CounterEnv(2, lengths=[4, 0])
    table = play(opened(BlockGate(4), env), env, 5)
    assert of_env(table, "valid", 0) == [True] * 5
    assert of_env(table, "obs", 0) == [1, 2, 3, 0, 1]
    assert (table[3]["terminated"][0], table[3]["reset"][0], table[3]["reward"][0]) == (True, True, 4.0)
    assert table[3]["final"][0] == 4, "the state in which it ended, not the one after the reset"


def test_done_right_after_a_gate_waits_for_the_whole_next_interval():
    env = CounterEnv(1, lengths=[1])
    table = play(opened(BlockGate(3), env), env, 7)
    # Ends in steps 1, 4 and 7.
    assert of_env(table, "valid", 0) == [True, False, False, True, False, False, True]
    assert of_env(table, "terminated", 0) == [True, False, False, True, False, False, True]


def test_interval_1_is_the_immediate_gate():
    lengths = [2, 0, 3, 5]
    env_a, env_b = CounterEnv(4, lengths=lengths, horizon_steps=7), CounterEnv(4, lengths=lengths, horizon_steps=7)
    assert play(opened(BlockGate(1), env_a), env_a, 20) == play(opened(ImmediateGate(1), env_b), env_b, 20)


def test_a_horizon_that_is_no_multiple_of_the_interval():
    # H=5, gates at 3, 6, 9, ...: truncated in step 5, frozen in 6, again from there: truncated in 11, frozen in 12.
    env = CounterEnv(1, horizon_steps=5)
    table = play(opened(BlockGate(3), env), env, 12)
    assert of_env(table, "truncated", 0) == [t in (5, 11) for t in range(1, 13)]
    assert of_env(table, "valid", 0) == [t not in (6, 12) for t in range(1, 13)]
    assert of_env(table, "clock", 0) == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]


def test_an_interval_of_its_own():
    # K=2, but gates every 5 steps.
    rule = StaggeredResets(CounterEnv(2, lengths=[1, 0]), rollout_steps=2, bring_up="none", gate="block",
                           gate_interval_steps=5)  # fmt: skip
    rule.reset()
    valid = [rule.step(torch.zeros(2, 1)).valid.tolist() for _ in range(6)]
    assert valid == [[True, True], *[[False, True]] * 4, [True, True]]
    default = StaggeredResets(CounterEnv(2, lengths=[1, 0]), rollout_steps=2, bring_up="none", gate="block")
    default.reset()
    assert [bool(default.step(torch.zeros(2, 1)).valid[0]) for _ in range(4)] == [True, False, True, False]


def test_phase_stands_while_waiting():
    rule = StaggeredResets(CounterEnv(2, lengths=[2, 0]), rollout_steps=4, bring_up="none", gate="block")
    rule.reset()
    phases = []
    for _ in range(5):
        rule.step(torch.zeros(2, 1))
        phases.append(rule.phase_steps.tolist())
        assert rule.phase_steps.tolist() == rule.elapsed_steps.tolist()
    assert phases == [[1, 1], [2, 2], [2, 3], [0, 4], [1, 5]]


def test_what_a_frozen_environment_gives_enters_nothing():
    class Babbling(CounterEnv):
        """Whatever waits goes on talking."""

        def step(self, action):
            waits = self._waiting.clone()
            step = super().step(action)
            step.reward[waits], step.terminated[waits], step.obs["policy"][waits] = float("nan"), True, -1.0
            return step

    env = Babbling(2, lengths=[1, 0])
    table = play(opened(BlockGate(4), env), env, 4)
    assert of_env(table, "reward", 0) == [1, 0, 0, 0]
    assert of_env(table, "terminated", 0) == [True, False, False, False]
    assert of_env(table, "obs", 0) == [1, 1, 1, 0]


@pytest.mark.parametrize("interval, frozen", [(3, [[1], [0], [0, 1], [1]]), (4, [[1], [0, 1], [1], [0, 1]])])
def test_waiting_goes_on_over_a_rollouts_end(interval, frozen):
    # K=2, rollouts are steps (1 2) (3 4) (5 6) (7 8); env 0 ends with each first step of an episode.
    # Interval 3: steps 2, 3, 5, 6, 8 are frozen. Interval 4: steps 2, 3, 4, 6, 7, 8.
    rule = StaggeredResets(CounterEnv(1, lengths=[1]), rollout_steps=2, bring_up="none", gate="block",
                           gate_interval_steps=interval)  # fmt: skip
    model = ActorCritic(rule.spec, ModelConfig(actor_hidden=(4,), critic_hidden=(4,)))
    collector = Collector(rule, model, 2, True, 0, Stopwatch(torch.device("cpu")))
    seen = []
    last = None
    for _ in range(4):
        rollout = collector.collect()
        seen.append((~rollout.valid[:, 0]).nonzero().flatten().tolist())
        if last is not None:
            assert torch.equal(rollout.obs["policy"][0], last), "the next rollout begins where this one stopped"
        last = rollout.obs["policy"][-1].clone()
        assert rollout.reward[~rollout.valid].abs().sum() == 0
    assert seen == frozen


def valid_transitions(gate, steps, num_envs=6, **env):
    """For each environment its valid (phase, reward, terminated, truncated, next obs), in order."""
    rule = StaggeredResets(CounterEnv(num_envs, **env), rollout_steps=4, gate=gate)
    rule.reset()
    found = [[] for _ in range(num_envs)]
    for _ in range(steps):
        phase = rule.phase_steps
        step = rule.step(torch.zeros(num_envs, 1))
        for i in step.valid.nonzero().flatten().tolist():
            row = (phase[i], step.reward[i], step.terminated[i], step.truncated[i], step.obs["policy"][i, 0])
            found[i].append([float(x) for x in row])
    return found


def test_block_is_immediate_where_nothing_ends_early_and_groups_stand_at_gates():
    # H=24, K=4: offsets 0, 4, ..., 20, so every time limit falls on a gate.
    block = valid_transitions("block", 60, horizon_steps=24)
    assert block == valid_transitions("immediate", 60, horizon_steps=24)
    assert all(len(rows) == 60 for rows in block), "nobody ever waits"


def test_block_has_the_same_episodes_as_immediate_only_later_where_some_end_early():
    early = {"horizon_steps": 24, "lengths": [0, 5, 0, 7, 0, 6]}
    block, immediate = valid_transitions("block", 60, **early), valid_transitions("immediate", 60, **early)
    assert block[0] == immediate[0]
    for rows, others in zip(block, immediate):
        assert len(rows) <= len(others)
        # What is shown after an end differs (held, or the next episode's first); the transition itself does not.
        assert [row[:4] for row in rows] == [row[:4] for row in others[: len(rows)]]
    assert len(block[1]) < 60


def test_block_needs_manual_and_partial_resets():
    with pytest.raises(
        CapabilityError, match=r"gate='block' needs 'manual_reset, partial_reset'.*possible here: immediate"
    ):
        StaggeredResets(PlainEnv(4), rollout_steps=2, bring_up="none", gate="block")
    env = CounterEnv(4, without=[Capability.MANUAL_RESET])
    with pytest.raises(CapabilityError, match="gate='block' needs 'manual_reset', which CounterEnv does not have"):
        StaggeredResets(env, rollout_steps=3, gate="block")


# -- a gate with a capacity -----------------------------------------------------------------------------------------
def test_the_terminated_go_before_the_timed_out_and_the_longest_waiting_first():
    # H=4; envs 0, 1 time out in step 4, env 2 is terminated in step 3, env 3 in step 2. Gates at 5, 6, 7, 8, one each.
    env = CounterEnv(4, lengths=[0, 0, 3, 2], horizon_steps=4)
    gate = opened(BlockGate(5, capacity=1), env)
    table = play(gate, env, 5)
    assert table[-1]["reset"] == [False, False, False, True], "terminated, and waits longer than env 2"
    gate.interval_steps = 1
    assert play(gate, env, 1)[0]["reset"] == [False, False, True, False]
    # Env 3 ends again in step 7 (its second): a new terminated one goes before those that timed out long ago.
    assert play(gate, env, 1)[0]["reset"] == [False, False, False, True]
    # Step 8: nobody else is terminated yet; of the two that timed out together the first by index.
    assert play(gate, env, 1)[0]["reset"] == [True, False, False, False]


def test_who_is_not_let_through_goes_on_waiting_frozen():
    env = CounterEnv(3, lengths=[1, 1, 0], horizon_steps=50)
    table = play(opened(BlockGate(2, capacity=1), env), env, 5)
    assert of_env(table, "reset", 0) == [False, True, False, False, False]
    assert of_env(table, "reset", 1) == [False, False, False, True, False]
    # Env 0 begins anew after step 2, ends in step 3 and waits behind env 1, which has waited since step 1.
    assert of_env(table, "valid", 0) == [True, False, True, False, False]
    assert of_env(table, "valid", 1) == [True, False, False, False, True]
    assert of_env(table, "obs", 1) == [1, 1, 1, 0, 1]
    assert of_env(table, "obs", 2) == [1, 2, 3, 4, 5]


def test_a_capacity_of_one_group():
    # N=10, H=12, K=3: 4 groups, ceil(10 / 4) = 3 a gate.
    rule = StaggeredResets(CounterEnv(10), 3, gate="block", gate_capacity="group")
    assert rule._gate.capacity == 3
    with pytest.raises(
        ConfigError, match=r"reset\.gate_capacity=2: 4 gates in a horizon would let 8 of 10.*at least 3"
    ):
        StaggeredResets(CounterEnv(10), 3, gate="block", gate_capacity=2)


def test_the_line_survives_a_save():
    settings = {"gate": "block", "bring_up": "none", "gate_capacity": 1, "gate_interval_steps": 2}
    first = StaggeredResets(CounterEnv(4, lengths=[3, 1, 2, 1], horizon_steps=8), 4, **settings)
    first.reset()
    for _ in range(5):
        first.step(torch.zeros(4, 1))
    second = StaggeredResets(CounterEnv(4, lengths=[3, 1, 2, 1], horizon_steps=8), 4, **settings)
    second.load_state_dict(first.state_dict())
    for _ in range(20):
        a, b = first.step(torch.zeros(4, 1)), second.step(torch.zeros(4, 1))
        assert a.info["reset"].tolist() == b.info["reset"].tolist()
        assert a.info["frozen"].tolist() == b.info["frozen"].tolist() == (~a.valid).tolist()


@pytest.mark.parametrize("rollout_steps, horizon", [(1, 7), (3, 7), (4, 10), (7, 20)])
def test_frozen_steps_are_told_whatever_the_sizes(rollout_steps, horizon):
    """K = 1 and horizons that K does not divide: an episode of H steps begins anew at the next multiple of K."""
    rule = StaggeredResets(CounterEnv(6, horizon_steps=horizon), rollout_steps, bring_up="none", gate="block")
    rule.reset()
    period = -(-horizon // rollout_steps) * rollout_steps
    for t in range(3 * period):
        step = rule.step(torch.zeros(6, 1))
        frozen = t % period >= horizon
        assert step.info["frozen"].tolist() == [frozen] * 6
        assert step.valid.tolist() == [not frozen] * 6
        assert step.truncated.tolist() == [t % period == horizon - 1] * 6
        assert step.info["reset"].tolist() == [t % period == period - 1] * 6
