"""The doctor's measures: early ends, start states, phases, costs, trainings; every number by hand."""

import types

import pytest
import torch
from helpers.toy_envs import TallyEnv
from helpers.toy_envs_runner import CounterEnv, PlainEnv

import rl_stagger.diagnosis as diagnosis
from rl_stagger.diagnosis import (
    HAZARD_BINS,
    ObsMoments,
    arm_of,
    early_ends_by_third,
    early_share_of,
    flat_policy_obs,
    hazards,
    reset_costs,
    watch_episodes,
)
from rl_stagger.envs.base import Box, Capability, EnvSpec
from rl_stagger.envs.native.base import NativeEnv
from rl_stagger.envs.phase_encoding import PhaseEncodingConfig, wrap_phase_encoding


def stand_still(obs):
    return torch.zeros(obs["policy"].shape[0], 1)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


class Lasting(NativeEnv):
    """Observation [N, 1]: a number drawn at the start, which stays (`same`: 5 for all)."""

    def __init__(self, num_envs, same=False):
        super().__init__(EnvSpec({"policy": (1,)}, Box(1), 20), num_envs, "cpu", 0)
        self.same = same

    def _start(self):
        return {"x": torch.full((self.num_envs,), 5.0) if self.same else self._randn()}

    def _advance(self, state, action, elapsed):
        return state, state["x"], torch.zeros(self.num_envs, dtype=torch.bool), {}

    def _observe(self, state, elapsed):
        return {"policy": state["x"].unsqueeze(1).clone()}


# -- early ends -----------------------------------------------------------------------------------------------------
def test_hazards_by_hand():
    # Two bins of 5 steps. Lengths 1 and 5 end in the first: 2 of 4. The other two reach the second and the time limit.
    lengths = torch.tensor([1, 5, 10, 10])
    found = hazards(lengths, flags(1, 1, 0, 0), flags(0, 0, 0, 0), 10, 2)
    assert found == [0.5, 0.0]
    assert early_share_of(found) == 0.5


def test_an_episode_that_was_not_watched_to_its_end_tells_nothing_about_its_last_bin():
    # Bins of 2 steps. Watched for 3 steps: reached bin 1, unknown there. The other one ends early in it: 1 of 1.
    found = hazards(torch.tensor([3, 4]), flags(0, 1), flags(1, 0), 10, 5)
    assert found == [0.0, 1.0, None, None, None]


def test_early_share_is_the_plain_share_where_all_was_watched():
    # 4 episodes of 2, 7 and twice 20 steps: 1 - (3/4)(2/3) = 1/2
    found = hazards(torch.tensor([2, 7, 20, 20]), flags(1, 1, 0, 0), flags(0, 0, 0, 0), 20, 10)
    assert found == [0.25, 0.0, 0.0, pytest.approx(1 / 3), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert early_share_of(found) == pytest.approx(0.5)


def test_watching_finds_the_known_lengths():
    env = TallyEnv(4, 20, lengths=(2, 7, 0, 0))
    profile = watch_episodes(env, stand_still, 5, 60.0, "still")
    assert (profile.policy, profile.episodes, profile.steps_watched) == ("still", 4, 20)
    assert profile.hazard == (0.25, 0.0, 0.0, pytest.approx(1 / 3), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert profile.early_share == pytest.approx(0.5)
    assert profile.median_steps == 7.0  # torch's median of an even number is the lower middle one


def test_an_end_in_the_very_step_of_the_time_limit_is_not_early():
    profile = watch_episodes(TallyEnv(2, 20, lengths=(20, 0)), stand_still, 5, 60.0, "still")
    assert profile.early_share == 0.0
    assert profile.hazard == (0.0,) * HAZARD_BINS


def test_without_time_to_watch_one_step_is_seen_and_nothing_claimed():
    profile = watch_episodes(TallyEnv(2, 100), stand_still, 5, 0.0, "still")
    assert profile.steps_watched == 1
    assert profile.hazard == (None,) * HAZARD_BINS


def test_a_task_without_time_limit_has_no_early_ends():
    profile = watch_episodes(PlainEnv(3), stand_still, 4, 60.0, "still")
    assert profile.early_share is None
    assert profile.median_steps == 9.0
    assert profile.steps_watched == 32  # all done by then


# -- start states and phases ----------------------------------------------------------------------------------------
def test_one_start_state_and_phases_that_are_all_there_is():
    # Ages 0..19, all environments alike, K = 5. Window means 2 7 12 17: variance (7.5^2 + 2.5^2) / 2 = 31.25. Ages:
    # (20^2 - 1) / 12 = 33.25. Nothing to take off: environments agree.
    profile = watch_episodes(TallyEnv(3, 20), stand_still, 5, 60.0, "still")
    assert profile.start_spread == 0.0
    assert profile.phase_dependence == pytest.approx(31.25 / 33.25)


def test_starts_that_are_all_there_is():
    profile = watch_episodes(Lasting(50), stand_still, 5, 60.0, "still")
    assert profile.start_spread == pytest.approx(1.0)
    assert profile.phase_dependence == pytest.approx(0.0, abs=1e-9)


def test_an_observation_that_never_changes():
    profile = watch_episodes(Lasting(4, same=True), stand_still, 5, 60.0, "still")
    assert profile.start_spread is None
    assert profile.phase_dependence is None


def test_chance_is_taken_off_the_phase_dependence():
    # Two environments, two windows of one step: 3 and 1, then -3 and -1. Means 2, -2: between 4. A mean of two errs by
    # ((1 + 1) / 1) / 2 = 1, weighted by w (1 - w) = 1/4 twice: 1/2. Whole variance (9 + 1 + 9 + 1) / 4 = 5.
    moments = ObsMoments(torch.tensor([[3.0], [1.0]]))
    for values in ([[3.0], [1.0]], [[-3.0], [-1.0]]):
        moments.add(torch.tensor(values), flags(1, 1))
        moments.close_window()
    spread, dependence = moments.read()
    assert spread == pytest.approx(1.0 / 5.0)
    assert dependence == pytest.approx(3.5 / 5.0)


def test_rows_that_do_not_count_are_left_out():
    moments = ObsMoments(torch.tensor([[0.0], [0.0]]))
    moments.add(torch.tensor([[1.0], [100.0]]), flags(1, 0))
    moments.close_window()
    moments.add(torch.tensor([[-1.0], [100.0]]), flags(1, 0))
    moments.close_window()
    assert moments.read() == (0.0, pytest.approx(1.0))


def test_large_observations_are_thinned():
    assert flat_policy_obs({"policy": torch.zeros(2, 3, 40, 40)}).shape == (2, 960)
    assert flat_policy_obs({"policy": torch.zeros(2, 7)}).shape == (2, 7)


def test_an_encoded_phase_is_no_phase_dependence():
    obs = {"policy": torch.tensor([[1.0, 2.0, 3.0]])}
    assert flat_policy_obs(obs, 2).tolist() == [[1.0]]
    encoded = wrap_phase_encoding(Lasting(50), PhaseEncodingConfig(kind="linear"))
    assert watch_episodes(encoded, stand_still, 5, 60.0, "still").phase_dependence == pytest.approx(0.0, abs=1e-9)


# -- costs ----------------------------------------------------------------------------------------------------------
class Priced(PlainEnv):
    """A step takes 1 s, a whole reset 8 s, a partial one 2 s and 0.5 s for each environment, on a clock of its own."""

    capabilities = frozenset({Capability.PARTIAL_RESET})

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.now = 0.0

    def reset(self, env_mask=None):
        self.now += 8.0 if env_mask is None else 2.0 + 0.5 * int(env_mask.sum())
        return {"policy": self.x.unsqueeze(1).clone()}

    def step(self, action):
        self.now += 1.0
        step = PlainEnv.step.__get__(self)(action)
        self.now -= 2.0 + 0.5 * int(step.terminated.sum())  # its own resets are in the step's price
        return step


@pytest.fixture
def priced(monkeypatch):
    env = Priced(6)
    monkeypatch.setattr(diagnosis, "time", types.SimpleNamespace(perf_counter=lambda: env.now))
    return env


def test_costs_by_the_clock(priced):
    costs = reset_costs(priced, stand_still, 3, seconds=1e9, most=5)
    assert costs._asdict() == {"repetitions": 5, "step_s": 1.0, "whole_s": 8.0, "one_s": 2.5, "group_s": 3.5,
                               "group_envs": 3}  # fmt: skip


def test_costs_stop_in_time_but_not_before_three_rounds(priced):
    assert reset_costs(priced, stand_still, 3, seconds=0.0).repetitions == 3


def test_no_partial_reset_is_timed_where_there_is_none():
    env = CounterEnv(4, without=[Capability.PARTIAL_RESET])
    costs = reset_costs(env, stand_still, 2, seconds=0.0)
    assert costs.one_s is None
    assert costs.group_s is None
    assert costs.whole_s > 0
    assert costs.step_s > 0


# -- trainings ------------------------------------------------------------------------------------------------------
def test_an_arm_by_hand():
    # H = 4, K = 2: two iterations a horizon, 8 are 4. Reward and error alternate: pure cycles. The later half
    # of the coverages is 5 6 7 8 tenths, of the distances all 1. Explained variance of the last six, iterations 3..8 in
    # tenths: 10th percentile 0.3 + 0.05, median 0.55.
    lines = [
        {
            "iteration": i,
            "batch/coverage": i / 10,
            "batch/tv_distance": None if i == 1 else 1.0,
            "batch/reward_mean": float(i % 2),
            "critic/error_rms": 2.0 - i % 2,
            "critic/explained_variance": i / 10,
            "batch/valid_share": 1.0,
            "steps/warmup": 12,
        }
        for i in range(1, 9)
    ]
    arm = arm_of("mine", 3, lines, 4, 2)
    assert (arm.rule, arm.num_envs, arm.iterations, arm.horizons, arm.warmup_steps) == ("mine", 3, 8, 4.0, 12)
    assert (arm.coverage, arm.coverage_min, arm.tv_distance, arm.valid_share) == (pytest.approx(0.65), 0.5, 1.0, 1.0)
    assert (arm.reward_cycle, arm.error_cycle) == (pytest.approx(1.0), pytest.approx(1.0))
    assert arm.explained_cycle == pytest.approx(0.0, abs=1e-6)  # a straight line is progress
    assert (arm.explained_p10, arm.explained_median) == (pytest.approx(0.35), pytest.approx(0.55))
    assert arm.reward == 0.5  # of iterations 7 and 8


def test_an_arm_of_a_short_training_claims_no_cycles():
    arm = arm_of("mine", 3, [{"iteration": 1, "batch/reward_mean": 1.0}], 100, 10)
    assert (arm.reward_cycle, arm.error_cycle, arm.coverage, arm.explained_p10) == (None, None, None, None)
    assert arm.horizons == pytest.approx(0.1)


def test_early_ends_by_third():
    # 6 iterations of 10 episodes (the second without any): 4 of 10, then 0 of 20, then 5 + 10 of 20
    terminated, count = [4, None, 0, 0, 5, 10], [10, 0, 10, 10, 10, 10]
    lines = [
        {"iteration": i + 1, "episode/count": c, "episode/terminated_count": t}
        for i, (c, t) in enumerate(zip(count, terminated))
    ]
    assert early_ends_by_third(lines, 100) == [0.4, 0.0, 0.75]
    assert early_ends_by_third(lines, None) == [None, None, None]
    assert early_ends_by_third([], 100) == [None, None, None]
