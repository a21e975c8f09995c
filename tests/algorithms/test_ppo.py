"""PPO: losses by hand, the update's rules one by one, and that it learns."""

import copy
import dataclasses
import math

import pytest
import torch
from helpers.toy_envs import Bandit, BigObs, Target, empty_rollout, flags, scalar_model

from rl_stagger.algorithms.ppo import PPO, Batch, PPOConfig, Table
from rl_stagger.config import load_config
from rl_stagger.envs.base import Box, Discrete, EnvSpec
from rl_stagger.envs.registry import make_env
from rl_stagger.models.actor_critic import ActorCritic, ModelConfig
from rl_stagger.resets.rule import StaggeredResets
from rl_stagger.rollout import Collector, first_rows
from rl_stagger.stopwatch import Stopwatch

NAN = float("nan")
FIXED = PPOConfig(schedule="fixed", epochs=1, minibatches=1, learning_rate=0.01)
SMALL = ModelConfig(actor_hidden=(16,), critic_hidden=(16,), normalize_obs=False)


class Training:
    """The runner's iteration without its files: collect, batch, update, normalisers."""

    def __init__(self, env, model_config, config, steps, seed=0):
        torch.manual_seed(seed)
        self.env = env
        self.model = ActorCritic(env.spec, model_config)
        self.learner = PPO(self.model, config, 10, seed + 1)
        keep = config.bootstrap == "final_obs"
        self.collector = Collector(env, self.model, steps, keep, seed + 2, Stopwatch(env.device))
        self.done = 0

    def iterate(self):
        rollout = self.collector.collect()
        needed = rollout.needs_final
        batch, _, metrics = self.learner.make_batch(rollout, first_rows(needed, int(needed.sum())))
        metrics.update(self.learner.update(batch, self.done))
        self.model.update_normalizers(rollout.flat_obs(rollout.steps), batch.target, batch.valid)
        self.done += 1
        return {name: float(x) for name, x in metrics.items()}


def small_model(action=None, seed=0):
    torch.manual_seed(seed)
    return ActorCritic(EnvSpec({"policy": (3,)}, action or Box(2), None), SMALL)


def batch_for(model, rows, seed=0):
    """Rows that `model` itself acted out, with random advantages and targets."""
    draw = torch.Generator().manual_seed(seed)
    obs = {"policy": torch.randn(rows, 3, generator=draw)}
    with torch.no_grad():
        act, value = model.act(obs, draw), model.value(obs)
    advantage = torch.randn(rows, generator=draw)
    return Batch(obs, act.raw, act.log_prob, act.params, value, value + 1.0, advantage, torch.ones(rows).bool())


def parameters_of(learner):
    return learner.optimizer.flat.clone()


def updated(config, model, batch, iteration=0):
    """(metrics as floats, parameters after one update) of a copy of `model`."""
    learner = PPO(copy.deepcopy(model), config, 10, seed=3)
    metrics = learner.update(batch, iteration)
    return {name: float(x) for name, x in metrics.items()}, parameters_of(learner)


# -- minibatches ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, parts", [(13, 4), (9, 4), (17, 8), (12, 4), (7, 1), (8, 4)])
def test_minibatches_lose_no_row_and_are_never_one_row(rows, parts):
    # SB3 #265, #325
    batch = batch_for(small_model(), rows)
    order, table = torch.randperm(rows), Table(batch, ())
    split = [copy.deepcopy(table.gather(index)) for index in order.tensor_split(parts)]
    sizes = [part.valid.shape[0] for part in split]
    assert len(sizes) == parts
    assert sum(sizes) == rows
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    for name in ("action", "log_prob", "params", "value", "target", "advantage", "valid"):
        assert torch.equal(torch.cat([getattr(part, name) for part in split]), getattr(batch, name)[order].float()), (
            name
        )
    assert torch.equal(torch.cat([part.obs["policy"] for part in split]), batch.obs["policy"][order])


def test_every_row_is_used_exactly_once_per_epoch(monkeypatch):
    model = small_model()
    learner = PPO(model, dataclasses.replace(FIXED, epochs=3, minibatches=4), 1, seed=0)
    batch = batch_for(model, 13)._replace(target=torch.arange(13.0))
    seen = []
    gradient = learner._gradient

    def watched(rows, old_scale):
        seen.append(rows.target.tolist())
        return gradient(rows, old_scale)

    monkeypatch.setattr(learner, "_gradient", watched)
    learner.update(batch, 0)
    epochs = [[row for part in seen[i : i + 4] for row in part] for i in (0, 4, 8)]
    assert len(seen) == 12
    for epoch in epochs:
        assert sorted(epoch) == list(range(13))
    assert epochs[0] != epochs[1] != epochs[2], "in another order each time"


# -- the batch ------------------------------------------------------------------------------------------------------
def test_batch_against_numbers_worked_by_hand():
    # K = 3, N = 2, V(x) = x, gamma .5, lambda 1, rewards doubled.
    # env 0: obs 1 2 3 | 4, r 1 1 1, time-out at t=1 with final obs 8.
    #   t=2: 2 + .5 * 4 = 4. t=1: 2 + .5 * 8 = 6. t=0: 2 + .5 * 6 = 5.
    # env 1: obs 0 0 6 | 9, r 0 4 2, death at t=1, where the final obs must not be looked at.
    #   t=2: 4 + .5 * 9 = 8.5. t=1: 8. t=0: .5 * 8 = 4.
    learner = PPO(scalar_model(), PPOConfig(gamma=0.5, lam=1.0, reward_scale=2.0, normalize_advantage="none"), 1, 0)
    rollout = empty_rollout(3, 2)
    rollout.obs["policy"].copy_(torch.tensor([[1.0, 0], [2, 0], [3, 6], [4, 9]]).unsqueeze(2))
    rollout.reward.copy_(torch.tensor([[1.0, 0], [1, 4], [1, 2]]))
    rollout.truncated.copy_(flags(3, 2, (1, 0)))
    rollout.terminated.copy_(flags(3, 2, (1, 1)))
    assert rollout.final_obs is not None
    rollout.final_obs["policy"].fill_(NAN)
    rollout.final_obs["policy"][1, 0] = 8.0
    batch, _, metrics = learner.make_batch(rollout, first_rows(rollout.needs_final, 1))
    target = torch.tensor([[5.0, 4.0], [6.0, 8.0], [4.0, 8.5]])
    torch.testing.assert_close(batch.target, target.flatten())
    torch.testing.assert_close(batch.value, rollout.obs["policy"][:3].flatten())
    torch.testing.assert_close(batch.advantage, batch.target - batch.value)
    assert float(metrics["critic/value_mean"]) == 2.0  # (1 + 0 + 2 + 0 + 3 + 6) / 6
    assert float(metrics["batch/valid_share"]) == 1.0


def test_normalize_advantage_over_the_batch_or_not_at_all():
    for mode, mean, std in (("batch", 0.0, 1.0), ("none", 2.0, 2.0), ("minibatch", 2.0, 2.0)):
        learner = PPO(scalar_model(), PPOConfig(normalize_advantage=mode), 1, 0)
        rollout = empty_rollout(1, 4)
        rollout.reward.copy_(torch.tensor([[0.0, 4.0, 0.0, 4.0]]))  # all end, V = 0: advantages 0 4 0 4
        rollout.terminated.fill_(True)
        batch, _, _ = learner.make_batch(rollout, first_rows(rollout.needs_final, 0))
        assert float(batch.advantage.mean()) == pytest.approx(mean, abs=1e-6)
        assert float(batch.advantage.std(unbiased=False)) == pytest.approx(std, rel=1e-5)


def test_normalize_advantage_over_each_minibatch():
    # The loss before any step is -mean(A): 0 after standardising, -2 as it stands; a scale of A makes no difference.
    model = small_model()
    batch = batch_for(model, 8)._replace(advantage=torch.tensor([0.0, 4.0] * 4))
    for mode, want in (("minibatch", 0.0), ("none", -2.0), ("batch", -2.0)):  # "batch" was done in make_batch already
        metrics, _ = updated(dataclasses.replace(FIXED, normalize_advantage=mode), model, batch)
        assert metrics["policy/loss"] == pytest.approx(want, abs=1e-5)
    config = dataclasses.replace(FIXED, normalize_advantage="minibatch", epochs=2)
    _, one = updated(config, model, batch)
    _, other = updated(config, model, batch._replace(advantage=batch.advantage * 1000.0))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_critic_reads_its_own_group_and_its_final_observation():
    spec = EnvSpec({"policy": (1,), "critic": (2,)}, Box(1), None)
    model = ActorCritic(spec, ModelConfig(actor_hidden=(), critic_hidden=(), normalize_obs=False))
    with torch.no_grad():
        model.critic[0].weight.copy_(torch.tensor([[1.0, 10.0]]))  # V = c0 + 10 c1
    learner = PPO(model, PPOConfig(gamma=1.0, normalize_advantage="none"), 1, 0)
    rollout = empty_rollout(1, 1, spec)
    rollout.obs["policy"].fill_(1e6)
    rollout.obs["critic"].copy_(torch.tensor([[[1.0, 2.0]], [[5.0, 5.0]]]))
    assert rollout.final_obs is not None
    rollout.final_obs["critic"].copy_(torch.tensor([[[3.0, 4.0]]]))
    rollout.truncated.fill_(True)
    batch, _, _ = learner.make_batch(rollout, first_rows(rollout.needs_final, 1))
    assert batch.value.tolist() == [21.0]
    assert batch.target.tolist() == [43.0]


# -- the loss -------------------------------------------------------------------------------------------------------
def test_loss_is_the_weighted_sum_of_its_parts():
    # One row before any step: ratio 1, so the policy loss is -A = -2; V = x = 3, target 5: error 4; the entropy of a
    # standard normal is 1.41894. By the weight w of V = w x: .5 * 2 (3 - 5) * 3 = -6. By the policy's bias (the mean):
    # -A (a - mean) / std^2 = 0; by log std: -A ((a - mean)^2 / std^2 - 1) - .1 = 1.9.
    learner = PPO(scalar_model(), dataclasses.replace(FIXED, value_coef=0.5, entropy_coef=0.1), 1, 0)
    rows = torch.ones(1)
    batch = Batch(
        {"policy": torch.full((1, 1), 3.0)},
        torch.zeros(1, 1),
        torch.full((1,), -0.5 * math.log(2 * math.pi)),  # log N(0; 0, 1)
        torch.zeros(1, 1),
        rows * 3.0,
        rows * 5.0,
        rows * 2.0,
        rows.bool(),
    )
    model, stats = learner.model, learner.update(batch, 0)
    grads = [model.critic[0].weight.grad, model.actor[0].bias.grad, model.head.std_param.grad]
    norm = float(stats["optim/grad_norm"])
    assert norm == pytest.approx(math.sqrt(6.0**2 + 2.0**2 + 1.9**2), rel=1e-5), "and the critic's bias has -2"
    assert [float(grad) * norm for grad in grads] == pytest.approx([-6.0, 0.0, 1.9], rel=1e-4), "clipped to a norm of 1"
    want = {
        "policy/kl": 0.0,
        "policy/loss": -2.0,
        "critic/loss": 4.0,
        "policy/entropy": 1.4189385,
        "policy/clip_share": 0.0,
        "policy/ratio_max_error": 0.0,
    }
    assert {name: float(stats[name]) for name in want} == pytest.approx(want, abs=1e-5)


def test_value_loss_plain_and_clipped():
    # V = x = 3 while the stored value was 1: clipped at .2 it is 1.2, and (1.2 - 5)^2 = 14.44 > (3 - 5)^2 = 4; no
    # gradient then reaches the critic
    batch = Batch(
        {"policy": torch.full((2, 1), 3.0)},
        torch.zeros(2, 1),
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.ones(2),
        torch.full((2,), 5.0),
        torch.zeros(2),
        torch.ones(2).bool(),
    )
    for kind, want, moves in (("plain", 4.0, True), ("clipped", 14.44, False)):
        learner = PPO(scalar_model(), dataclasses.replace(FIXED, value_loss=kind, value_clip=0.2), 1, 0)
        metrics = learner.update(batch, 0)
        assert float(metrics["critic/loss"]) == pytest.approx(want, rel=1e-5)
        assert (float(learner.model.critic[0].weight.detach()) != 1.0) == moves


@pytest.mark.parametrize("action", [Box(2), Box(2, -1.0, 1.0), Discrete(3)])
@pytest.mark.parametrize("normalize", ["none", "minibatch"])
def test_invalid_rows_change_nothing(action, normalize):
    model = small_model(action)
    with torch.no_grad():
        model.actor[-1].weight.mul_(100.0)  # so that entropies of choices differ from row to row
    config = dataclasses.replace(FIXED, normalize_advantage=normalize, entropy_coef=0.1, value_loss="clipped")
    clean = batch_for(model, 10)
    more = batch_for(model, 6, seed=8)
    garbage = more._replace(
        log_prob=torch.full_like(more.log_prob, -1e4),  # a ratio of e^(10000)
        value=more.value + 1e6,
        target=more.target - 1e6,
        advantage=more.advantage * 1e6,
        valid=torch.zeros(6).bool(),
    )
    mixed = Batch(
        {"policy": torch.cat([clean.obs["policy"], garbage.obs["policy"]])},
        *(torch.cat(pair) for pair in zip(clean[1:], garbage[1:])),
    )
    want, moved = updated(config, model, clean)
    got, moved_too = updated(config, model, mixed)
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(moved_too, moved, rtol=1e-6, atol=1e-6)
    assert not torch.equal(moved, parameters_of(PPO(model, config, 1, 0))), "and the valid rows were learned from"


def test_invalid_steps_of_a_rollout_change_nothing_even_if_nan():
    def batch_of(garbage):
        learner = PPO(scalar_model(), PPOConfig(), 1, 0)
        rollout = empty_rollout(3, 3)
        draw = torch.Generator().manual_seed(0)
        for x in (rollout.obs["policy"], rollout.reward, rollout.action, rollout.params):
            x.copy_(torch.randn(x.shape, generator=draw))
        rollout.truncated.copy_(flags(3, 3, (0, 1)))
        rollout.valid.copy_(~flags(3, 3, (1, 1), (2, 1)))
        rollout.reward[1:, 1] = garbage
        assert rollout.final_obs is not None
        rollout.final_obs["policy"][1:, 1] = garbage
        batch, _, metrics = learner.make_batch(rollout, first_rows(rollout.needs_final, 1))
        return batch, metrics

    (clean, want), (dirty, got) = batch_of(0.0), batch_of(NAN)
    for name in ("value", "target", "advantage", "valid"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
    assert {name: float(x) for name, x in want.items()} == {name: float(x) for name, x in got.items()}
    assert float(got["batch/valid_share"]) == pytest.approx(7 / 9)
    assert float(clean.advantage.sum()) == pytest.approx(0.0, abs=1e-5), "standardised over the valid rows alone"


# -- the update -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("normalize_value", [False, True])
def test_ratio_is_1_before_the_first_step_however_large_the_observations(normalize_value):
    # rsl_rl PR #225: the normaliser must stand still between rollout and update; it must also move afterwards
    model_config = ModelConfig(normalize_obs=True, normalize_value=normalize_value)
    training = Training(BigObs(32), model_config, PPOConfig(), steps=8)
    identity = copy.deepcopy(training.model.normalizers["policy"].state_dict())
    for iteration in range(3):
        before = copy.deepcopy(training.model.normalizers["policy"].state_dict())
        metrics = training.iterate()
        after = training.model.normalizers["policy"].state_dict()
        assert metrics["policy/ratio_max_error"] < 1e-5, f"iteration {iteration}"
        assert metrics["fault/bad_gradients"] == 0
        assert not torch.equal(before["mean"], after["mean"])
    assert after["count"] == 3 * 8 * 32
    assert not torch.equal(identity["mean"], before["mean"])
    assert after["mean"].mean() == pytest.approx(100.0, abs=15.0)
    assert after["var"].sqrt().mean() == pytest.approx(50.0, rel=0.3)


@pytest.mark.parametrize("spec", [Box(2, -0.1, 0.1), Discrete(3)])
def test_ratio_is_1_for_clipped_actions_and_choices(spec):
    # tianshou #312, CleanRL #240: std 1, bound .1
    model = small_model(spec)
    metrics, _ = updated(FIXED, model, batch_for(model, 64))
    assert metrics["policy/ratio_max_error"] < 1e-5


@pytest.mark.parametrize("measure", ["minibatch", "epoch"])
def test_the_first_kl_does_not_slam_the_learning_rate(measure):
    # rl_games PR #371
    config = load_config(["task=skill_chain", f"algorithm.kl_measure={measure}"])
    env = make_env("skill_chain", num_envs=512, seed=0, **config.task.settings)
    env = StaggeredResets.from_config(env, config.reset, config.rollout_steps, 0)
    training = Training(env, config.model, config.algorithm, config.rollout_steps)
    assert config.algorithm.schedule == "adaptive_kl"
    metrics = training.iterate()
    assert metrics["optim/lr"] >= config.algorithm.learning_rate / 1.5
    assert metrics["optim/lr"] <= config.algorithm.learning_rate_max
    assert metrics["policy/kl"] > 0


def test_adaptive_rate_follows_the_kl_of_its_own_minibatches():
    # A target far above (below) any KL of these steps: 2 * 3 minibatches without the very first move it 5 times up
    # (down), 2 epochs twice. In the first iteration it goes down once at most.
    model = small_model()
    batch = batch_for(model, 64)
    for measure, moves in (("minibatch", 5), ("epoch", 2)):
        base = PPOConfig(epochs=2, minibatches=3, learning_rate=1e-4, kl_measure=measure, learning_rate_min=1e-9)
        up, down = dataclasses.replace(base, kl_target=100.0), dataclasses.replace(base, kl_target=1e-12)
        for config, iteration, want in ((up, 0, 1.5**moves), (down, 1, 1.5**-moves), (down, 0, 1 / 1.5)):
            metrics, _ = updated(config, model, batch, iteration)
            assert metrics["optim/lr"] == pytest.approx(1e-4 * want, rel=1e-5), (measure, iteration)


def test_the_first_minibatch_of_an_iteration_is_no_measurement():
    # Before any step the KL is rounding: one whole-batch step an epoch gives the first epoch nothing to go by
    model = small_model()
    batch = batch_for(model, 64)
    shifted = batch._replace(params=batch.params + 1e-3)  # as if rounding had given a positive KL
    for measure in ("minibatch", "epoch"):
        config = PPOConfig(epochs=2, minibatches=1, learning_rate=1e-4, kl_target=100.0, kl_measure=measure)
        for b in (batch, shifted):
            metrics, _ = updated(config, model, b, iteration=1)
            assert metrics["optim/lr"] == pytest.approx(1.5e-4, rel=1e-5), measure


def test_fixed_and_linear_rates():
    model = small_model()
    batch = batch_for(model, 16)
    metrics, _ = updated(FIXED, model, batch, iteration=5)
    assert metrics["optim/lr"] == pytest.approx(0.01)
    config = dataclasses.replace(FIXED, schedule="linear", learning_rate_end=0.001)
    for iteration, want in ((0, 0.01), (9, 0.001), (3, 0.007)):  # 10 iterations
        metrics, _ = updated(config, model, batch, iteration)
        assert metrics["optim/lr"] == pytest.approx(want, rel=1e-5)


def test_kl_stop_leaves_the_rest_of_the_steps_out():
    model = small_model()
    batch = batch_for(model, 64)
    config = dataclasses.replace(FIXED, epochs=6, learning_rate=0.05)
    metrics, free = updated(config, model, batch)
    assert metrics["policy/kl"] > 1e-3
    _, one_step = updated(dataclasses.replace(config, epochs=1), model, batch)
    _, stopped = updated(dataclasses.replace(config, kl_stop=1e-7), model, batch)
    assert torch.equal(stopped, one_step), "the first step's KL is 0, the second's above the bound"
    assert not torch.equal(free, one_step)
    _, never = updated(dataclasses.replace(config, kl_stop=1e6), model, batch)
    assert torch.equal(never, free)


@pytest.mark.parametrize("high", [0.5, NAN])
def test_kl_stop_is_for_the_rest_of_the_iteration(monkeypatch, high):
    # KLs fed by hand, bound .1: 0 .05 .5 0 0 0: two steps, none after that even though the KL is small again
    model = small_model()
    learner = PPO(model, dataclasses.replace(FIXED, epochs=3, minibatches=2, kl_stop=0.1), 1, 0)
    kls, gradient = iter([0.0, 0.05, high, 0.0, 0.0, 0.0]), learner._gradient

    def fed(rows, old_scale):
        return gradient(rows, old_scale)._replace(kl=torch.tensor(next(kls)))

    monkeypatch.setattr(learner, "_gradient", fed)
    learner.update(batch_for(model, 16), 0)
    assert float(learner.optimizer.count) == 2
    monkeypatch.setattr(learner, "_gradient", gradient)
    learner.update(batch_for(model, 16), 1)
    assert float(learner.optimizer.count) > 2, "the next iteration begins anew"


@pytest.mark.parametrize("measure", ["minibatch", "epoch"])
def test_after_a_kl_stop_the_rate_is_not_adapted_any_more(measure):
    # One step, then its KL is above the bound and the target: one cut for it, and not one for each of the 18
    # minibatches or 9 epochs that are left out.
    model = small_model()
    batch = batch_for(model, 64)
    config = PPOConfig(
        epochs=10, minibatches=2, learning_rate=0.05, learning_rate_max=1.0, kl_target=1e-7, kl_stop=1e-6,
        kl_measure=measure,
    )  # fmt: skip
    metrics, _ = updated(config, model, batch, iteration=1)
    assert metrics["optim/lr"] == pytest.approx(0.05 / 1.5, rel=1e-5)


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_a_bad_gradient_moves_nothing_and_is_counted(poison):
    model = small_model()
    clean = batch_for(model, 16)
    advantage = clean.advantage.clone()
    advantage[3] = poison
    learner = PPO(model, dataclasses.replace(FIXED, epochs=3), 1, 0)
    before, state = parameters_of(learner), learner.state_dict()
    metrics = learner.update(clean._replace(advantage=advantage), 0)
    assert float(metrics["fault/bad_gradients"]) == 3
    assert torch.equal(parameters_of(learner), before)
    for name, x in learner.optimizer.state_dict().items():
        assert torch.equal(x, state["optimizer"][name]), name
    metrics = learner.update(clean, 1)
    assert float(metrics["fault/bad_gradients"]) == 0
    assert torch.isfinite(parameters_of(learner)).all()
    assert not torch.equal(parameters_of(learner), before), "good data are learned from again"


def test_nothing_moves_from_the_first_bad_minibatch_on():
    model = small_model()
    batch = batch_for(model, 16)
    batch.advantage[3] = NAN
    learner = PPO(model, dataclasses.replace(FIXED, epochs=2, minibatches=4), 1, 0)
    before = parameters_of(learner)
    metrics = learner.update(batch, 0)
    assert float(metrics["fault/bad_gradients"]) == 2
    assert torch.isfinite(parameters_of(learner)).all()
    # The bad row is in the fourth minibatch of the first epoch: three steps before it, none after
    assert not torch.equal(parameters_of(learner), before)
    assert float(learner.optimizer.count) == 3


def test_gradients_are_clipped_before_the_step():
    model = small_model()
    batch = batch_for(model, 16)
    for kind in ("joint", "separate"):
        learner = PPO(copy.deepcopy(model), dataclasses.replace(FIXED, max_grad_norm=1e-3, grad_clip=kind), 1, 0)
        metrics = learner.update(batch, 0)
        assert float(metrics["optim/grad_norm"]) > 0.1, "the norm before clipping is reported"
        bound = 1e-3 if kind == "joint" else math.sqrt(2) * 1e-3
        assert float(learner.optimizer.grad.norm()) == pytest.approx(bound, rel=1e-3)


def test_state_round_trip_is_bitwise():
    model = small_model()
    batches = [batch_for(model, 32, seed=i) for i in range(4)]
    learner = PPO(model, PPOConfig(), 10, seed=0)
    for i in (0, 1):
        learner.update(batches[i], i)
    saved, saved_model = copy.deepcopy(learner.state_dict()), copy.deepcopy(model.state_dict())
    for i in (2, 3):
        learner.update(batches[i], i)
    other = PPO(small_model(seed=9), PPOConfig(learning_rate=5e-3), 10, seed=77)
    other.model.load_state_dict(saved_model)
    other.load_state_dict(saved)
    for i in (2, 3):
        other.update(batches[i], i)
    assert torch.equal(parameters_of(other), parameters_of(learner))
    assert torch.equal(other.rate, learner.rate)


# -- settings -------------------------------------------------------------------------------------------------------
def test_the_defaults_are_right():
    assert PPOConfig().check() == []


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"gamma": 1.01}, "gamma"),
        ({"lam": -0.1}, "lam"),
        ({"epochs": 0}, "epochs"),
        ({"minibatches": 0}, "minibatches"),
        ({"clip": 0.0}, "clip"),
        ({"value_clip": -1.0}, "value_clip"),
        ({"value_coef": -1.0}, "value_coef"),
        ({"entropy_coef": -1e-9}, "entropy_coef"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"reward_scale": 0.0}, "reward_scale"),
        ({"adam_eps": 0.0}, "adam_eps"),
        ({"kl_target": 0.0}, "kl_target"),
        ({"kl_factor": 1.0}, "kl_factor"),
        ({"kl_stop": 0.0}, "kl_stop"),
        ({"learning_rate": 0.02}, "learning_rate"),  # above learning_rate_max
        ({"learning_rate": 1e-6}, "learning_rate"),  # below learning_rate_min
        ({"learning_rate_min": 0.02}, "learning_rate_min"),
        ({"learning_rate_end": -1.0}, "learning_rate_end"),
        ({"epochs": 1, "minibatches": 1}, "schedule"),
    ],
)
def test_what_cannot_work_is_named(settings, field):
    faults = PPOConfig(**settings).check()
    assert field in [name for name, _, _ in faults]
    for name, value, right in faults:
        assert value == getattr(PPOConfig(**settings), name)
        assert right


def test_bounds_of_the_adaptive_rate_do_not_bind_a_fixed_one():
    assert PPOConfig(schedule="fixed", learning_rate=0.5, epochs=1, minibatches=1).check() == []


# -- it learns ------------------------------------------------------------------------------------------------------
def test_learns_a_two_armed_bandit():
    training = Training(Bandit(64), SMALL, dataclasses.replace(FIXED, epochs=4, learning_rate=0.02), steps=4)
    for _ in range(15):
        training.iterate()
    obs = {"policy": torch.ones(1, 1)}
    assert float(training.model.act(obs).params.softmax(-1)[0, 1].detach()) > 0.95
    assert float(training.model.value(obs).detach()) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_learns_where_to_aim(distribution):
    model_config = ModelConfig((32,), (32,), distribution=distribution, init_std=0.5)
    training = Training(Target(256), model_config, PPOConfig(entropy_coef=0.0, learning_rate=3e-3), steps=4)
    probe = {"policy": torch.tensor([[-0.8], [0.0], [0.8]])}
    before = (training.model.act_mode(probe).detach().flatten() - torch.tensor([-0.4, 0.0, 0.4])).abs().max()
    for _ in range(25):
        training.iterate()
    error = (training.model.act_mode(probe).detach().flatten() - torch.tensor([-0.4, 0.0, 0.4])).abs().max()
    assert float(before) > 0.3
    assert float(error) < 0.12


def test_value_normalisation_follows_rewards_of_any_size():
    # Rewards of about -3000: with moments of the targets, the critic's values in reward units get there within a few
    # iterations; the moments themselves are those of the targets in reward units.
    class Scaled(Target):
        def step(self, action):
            step = super().step(action)
            step.reward = 1000.0 * step.reward - 3000.0
            return step

    config = PPOConfig(learning_rate=3e-3)
    training = Training(Scaled(128), dataclasses.replace(SMALL, normalize_value=True), config, steps=4)
    for _ in range(12):
        metrics = training.iterate()
    normalizer = training.model.value_normalizer
    assert -4000.0 < float(normalizer.mean) < -3000.0
    assert metrics["critic/value_mean"] == pytest.approx(float(normalizer.mean), rel=0.2)
