"""Storage and its index rule, the health check, and the collector."""

import re
import time

import pytest
import torch
from helpers.toy_envs import LINEAR, Bandit, TallyEnv, empty_rollout, flags

from rl_stagger.envs.base import Box, EnvSpec, Step
from rl_stagger.errors import NonFiniteError
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.rollout import Collector, Rollout, bad_rows, first_rows, health_tensor, raise_non_finite, read_health
from rl_stagger.stopwatch import Stopwatch

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def collector_of(env, steps, keep_final_obs=True):
    torch.manual_seed(0)
    return Collector(env, ActorCritic(env.spec, LINEAR), steps, keep_final_obs, 1, Stopwatch(CPU))


def everything(rollout):
    return {name: x for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)}


def one_step(n=2, fill=1.0, final=True, **info):
    """What a step of `n` environments returned, every number `fill`."""
    yes = torch.ones(n, dtype=torch.bool)
    obs = {"policy": torch.full((n, 1), fill)}
    return Step(obs, torch.full((n,), fill), yes, ~yes, {"policy": obs["policy"] + 1} if final else None, yes, info)


# -- the index rule -------------------------------------------------------------------------------------------------
def test_row_t_belongs_to_the_transition_that_leaves_obs_t():
    # H = 3: ages 0 1 2 | 0 1. The step that leaves age a is rewarded a + 1; the one that leaves 2 is truncated and its
    # final observation is 3. Row K of the observations is row 0 of the next rollout.
    env = TallyEnv(2, 3)
    collector = collector_of(env, 5)
    rollout = collector.collect()
    assert rollout.obs["policy"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert rollout.reward[:, 0].tolist() == [1, 2, 3, 1, 2]
    assert rollout.truncated[:, 0].tolist() == [False, False, True, False, False]
    assert rollout.was_reset[:, 0].tolist() == [False, False, True, False, False]
    assert rollout.phase[:, 0].tolist() == rollout.clock[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert rollout.final_obs is not None
    assert rollout.final_obs["policy"][2, 0, 0] == 3
    assert not rollout.terminated.any()
    assert torch.equal(rollout.obs["policy"][0], torch.zeros(2, 1))
    collector.collect()
    assert rollout.obs["policy"][:, 0, 0].tolist() == [2, 0, 1, 2, 0, 1]
    assert rollout.truncated[:, 0].tolist() == [True, False, False, True, False]


def test_what_is_stored_is_what_the_policy_did_there():
    sent = []

    class Watched(TallyEnv):
        def step(self, action):
            sent.append(action.clone())
            return super().step(action)

    collector = collector_of(Watched(4, 3), 6)
    model = collector.model
    with torch.no_grad():
        model.actor[0].weight.fill_(0.3)
    rollout = collector.collect()
    want = torch.stack([model.params(model.normalize({"policy": x})) for x in rollout.obs["policy"][:6]])
    torch.testing.assert_close(rollout.params, want.detach())
    assert torch.equal(rollout.action, torch.stack(sent))
    assert rollout.action.std() > 0.5


def test_what_an_environment_does_to_its_action_does_not_reach_the_storage():
    class Rude(TallyEnv):
        def step(self, action):
            step = super().step(action)
            action.fill_(1e6)
            return step

    assert collector_of(Rude(4, 3), 6).collect().action.abs().max() < 10.0


def test_discrete_actions_are_whole_numbers_and_reach_the_environment():
    rollout = collector_of(Bandit(50), 3).collect()
    assert rollout.action.dtype == torch.int64
    assert torch.equal(rollout.reward, rollout.action.float())
    assert tuple(rollout.params.shape) == (3, 50, 2)
    assert 0.2 < float(rollout.reward.mean()) < 0.8


def test_clipped_actions_go_to_the_environment_and_raw_ones_into_storage():
    sent = []

    class Watched(TallyEnv):
        def step(self, action):
            sent.append(action.clone())
            return super().step(action)

    env = Watched(100, 3)
    env.spec = EnvSpec({"policy": (1,)}, Box(1, -0.1, 0.1), 3)
    rollout = collector_of(env, 2).collect()
    assert float(torch.stack(sent).abs().max()) == pytest.approx(0.1)
    assert float(rollout.action.abs().max()) > 1.0
    assert torch.equal(torch.stack(sent), rollout.action.clamp(-0.1, 0.1))


def test_final_observations_are_needed_only_where_a_valid_step_was_truncated():
    rollout = empty_rollout(2, 3)
    rollout.truncated.copy_(flags(2, 3, (0, 0), (0, 1), (1, 2)))
    rollout.terminated.copy_(flags(2, 3, (0, 1), (1, 0)))
    rollout.valid.copy_(~flags(2, 3, (1, 2)))
    assert torch.equal(rollout.needs_final, flags(2, 3, (0, 0)))
    assert torch.equal(rollout.done, flags(2, 3, (0, 0), (0, 1), (1, 0), (1, 2)))


def test_only_groups_that_the_nets_read_are_stored():
    spec = EnvSpec({"policy": (2,), "critic": (3,), "teacher": (9,)}, Box(1), None)
    rollout = Rollout(4, 5, spec, 1, True, CPU)
    assert {name: tuple(x.shape) for name, x in rollout.obs.items()} == {"policy": (5, 5, 2), "critic": (5, 5, 3)}
    assert rollout.final_obs is not None
    assert {name: tuple(x.shape) for name, x in rollout.final_obs.items()} == {"critic": (4, 5, 3)}
    assert Rollout(4, 5, spec, 1, False, CPU).final_obs is None


def test_flat_obs():
    rollout = collector_of(TallyEnv(2, 3), 2).collect()
    assert rollout.flat_obs(2)["policy"].flatten().tolist() == [0, 0, 1, 1]
    assert rollout.flat_obs(3)["policy"].flatten().tolist() == [0, 0, 1, 1, 2, 2]


# -- storage --------------------------------------------------------------------------------------------------------
def test_storage_shares_no_memory_with_what_was_put_in():
    rollout = empty_rollout(1, 2)
    step = one_step(success=torch.tensor([True, False]), reset=torch.tensor([True, False]))
    obs, phase, clock = {"policy": torch.ones(2, 1)}, torch.tensor([3, 4]), torch.tensor([5, 6])
    rollout.put_before(0, obs, phase, clock)
    rollout.put_after(0, step)
    rollout.finish(step.obs)
    kept = {name: x.clone() for name, x in everything(rollout).items()}
    kept_obs = rollout.obs["policy"].clone()
    for x in (obs["policy"], step.obs["policy"], step.final_obs["policy"], step.reward, phase, clock):
        x.fill_(77)
    for x in (step.terminated, step.truncated, step.valid, step.info["success"], step.info["reset"]):
        x.logical_not_()
    for name, x in everything(rollout).items():
        assert torch.equal(x, kept[name]), name
    assert torch.equal(rollout.obs["policy"], kept_obs)
    assert rollout.phase.tolist() == [[3, 4]]
    assert rollout.clock.tolist() == [[5, 6]]


def test_what_a_step_does_not_say_is_not_left_over_from_the_last_rollout():
    rollout = empty_rollout(1, 2)
    obs, zeros = {"policy": torch.zeros(2, 1)}, torch.zeros(2, dtype=torch.int64)
    everybody, nobody = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    step = one_step(success=everybody, cut=everybody, frozen=everybody, reset=nobody)
    rollout.put_before(0, obs, zeros, zeros)
    rollout.put_after(0, step)
    assert rollout.success.all()
    assert rollout.cut.all()
    assert rollout.frozen.all()
    assert not rollout.was_reset.any()
    step = one_step()
    rollout.put_before(0, obs, zeros, zeros)
    rollout.put_after(0, step)
    assert not rollout.success.any()
    assert not rollout.cut.any()
    assert not rollout.frozen.any()
    assert rollout.was_reset.all(), "where nobody says otherwise, done environments were reset"


def test_logs_are_those_of_this_rollout_only():
    class Logging(TallyEnv):
        def step(self, action):
            step = super().step(action)
            step.info["log"] = {"age": 1.0}
            return step

    collector = collector_of(Logging(2, 3), 4)
    for _ in range(2):
        assert collector.collect().logs == [{"age": 1.0}] * 4


def test_collector_state_continues_with_the_same_actions():
    env = TallyEnv(3, 4)
    collector = collector_of(env, 3)
    collector.collect()
    state, env_state = collector.state_dict(), env.state_dict()
    want = {name: x.clone() for name, x in everything(collector.collect()).items()}
    other_env = TallyEnv(3, 4)
    other = collector_of(other_env, 3)
    other.collect()
    other_env.load_state_dict(env_state)
    other.load_state_dict(state, obs_too=True)
    for name, x in everything(other.collect()).items():
        assert torch.equal(x, want[name]), name


def test_collector_begins_anew_where_the_environment_does():
    env = TallyEnv(3, 4)
    collector = collector_of(env, 3)
    collector.collect()
    assert collector.brought_up
    collector.collect()
    assert not collector.brought_up
    other = collector_of(TallyEnv(3, 4), 3)
    other.load_state_dict(collector.state_dict(), obs_too=False)
    rollout = other.collect()
    assert rollout.obs["policy"][0].flatten().tolist() == [0, 0, 0]
    assert rollout.phase[0].tolist() == [0, 0, 0]


# -- rows without a host read -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (24, 64)])
def test_first_rows_equal_nonzero(share, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    want = mask.flatten().nonzero().flatten()
    got = first_rows(mask, int(mask.sum()))
    assert got.dtype == torch.int64
    assert torch.equal(got, want)


# -- health ---------------------------------------------------------------------------------------------------------
def healthy(steps=4, envs=5):
    rollout = empty_rollout(steps, envs)
    rollout.truncated.copy_(flags(steps, envs, (1, 3), (2, 0)))
    return rollout


def test_a_healthy_rollout():
    rollout = healthy()
    health = read_health(rollout)
    assert health.num_final == 2
    assert health.faults == {}
    assert health_tensor(rollout, bad_rows(rollout)).tolist() == [2, 0, 0, 0, 0]
    no_final = empty_rollout(4, 5, keep_final_obs=False)
    assert read_health(no_final).faults == {}


# rsl_rl #124, #33 and six more: "normal expects all elements of std >= 0" says none of this
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize(
    "tensor, name, row, step",
    [
        ("obs", "obs['policy']", 2, 2),
        ("obs", "obs['policy']", 4, 4),  # the one after the last transition
        ("reward", "reward", 2, 2),
        ("final_obs", "final_obs['policy']", 1, 1),
        ("params", "action distribution", 0, 0),
    ],
)
def test_what_is_not_finite_is_named(value, tensor, name, row, step):
    rollout = healthy()
    x = getattr(rollout, tensor)
    x = x["policy"] if isinstance(x, dict) else x
    x[row, 3] = value
    health = read_health(rollout)
    assert health.faults == {name: 1}
    with pytest.raises(NonFiniteError) as caught:
        raise_non_finite(rollout, health, iteration=7)
    text = str(caught.value)
    assert "iteration 7" in text
    assert re.search(rf"{re.escape(name)} of env 3: 1 rows, first at rollout step {step}\b", text)


def test_several_faults_are_all_named():
    rollout = healthy()
    rollout.reward[1, 3] = INF
    rollout.reward[2, 3] = NAN
    rollout.reward[3, 4] = NAN
    rollout.obs["policy"][3, 0] = NAN
    health = read_health(rollout)
    assert health.faults == {"obs['policy']": 1, "reward": 3}
    with pytest.raises(NonFiniteError, match=r"reward of env 3, 4: 3 rows, first at rollout step 1"):
        raise_non_finite(rollout, health, iteration=1)
    with pytest.raises(NonFiniteError, match=r"obs\['policy'\] of env 0: 1 rows, first at rollout step 3"):
        raise_non_finite(rollout, health, iteration=1)


def test_each_group_is_named_by_itself():
    spec = EnvSpec({"policy": (2,), "critic": (3, 2)}, Box(1), None)
    rollout = empty_rollout(3, 5, spec)
    rollout.obs["critic"][1, 3, 2, 0] = INF
    assert read_health(rollout).faults == {"obs['critic']": 1}


def test_scalar_observations_are_looked_at_too():
    rollout = empty_rollout(3, 5, EnvSpec({"policy": ()}, Box(1), None))
    rollout.obs["policy"][1, 3] = NAN
    assert read_health(rollout).faults == {"obs['policy']": 1}


def test_many_environments_are_not_all_listed():
    rollout = empty_rollout(1, 20)
    rollout.reward.fill_(NAN)
    with pytest.raises(NonFiniteError, match=r"reward of env 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.: 20 rows"):
        raise_non_finite(rollout, read_health(rollout), 1)


def test_what_is_never_read_may_be_nan():
    rollout = healthy()
    rollout.valid[3, 3] = False
    rollout.reward[3, 3] = NAN  # a frozen step's
    assert rollout.final_obs is not None
    rollout.final_obs["policy"].fill_(NAN)  # read where truncated only
    rollout.final_obs["policy"][1, 3] = rollout.final_obs["policy"][2, 0] = 0.0
    assert read_health(rollout).faults == {}
    rollout.terminated[1, 3] = True  # an ended episode's final observation is not read either
    rollout.final_obs["policy"][1, 3] = NAN
    assert read_health(rollout) == (1, {})


# -- stopwatch ------------------------------------------------------------------------------------------------------
def test_stopwatch_counts_inner_blocks_once(monkeypatch):
    # outer from 0 to 10 with an inner block from 3 to 7: 6 and 4 seconds
    now = iter([0.0, 3.0, 3.0, 7.0, 7.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch(CPU)
    with watch("outer"), watch("inner"):
        pass
    assert watch.read() == {"outer": 6.0, "inner": 4.0}
    with watch("outer"):
        pass
    assert watch.read() == {"outer": 1.0}, "reading starts again at zero"
    assert watch.read() == {}


def test_stopwatch_counts_a_block_that_raises(monkeypatch):
    now = iter([0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch(CPU)
    with pytest.raises(RuntimeError), watch("physics"):
        raise RuntimeError
    assert watch.read() == {"physics": 2.0}
