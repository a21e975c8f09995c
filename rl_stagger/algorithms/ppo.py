"""PPO (Schulman et al. 2017, arXiv 1707.06347): the batch, and the learner that holds state.

Shapes: K steps, N environments, B = K * N rows of a batch. No function here reads from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Literal, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.algorithms.gae import explained_variance, masked_gae, masked_mean
from rl_stagger.algorithms.kl_schedule import adapt_rate, linear_rate
from rl_stagger.algorithms.losses import STATS, Rows, policy_gradient, standardize, value_gradient
from rl_stagger.algorithms.nets import make_nets
from rl_stagger.algorithms.optimizer import FlatAdam
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.rng import generator_state, make_generator, set_generator_state
from rl_stagger.rollout import Estimates, Rollout


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO."""

    name: Literal["ppo"] = "ppo"
    gamma: float = 0.99
    lam: float = 0.95
    """lambda of generalized advantage estimation."""
    epochs: int = 5
    """Passes over the batch per iteration."""
    minibatches: int = 4
    """Parts of the batch per epoch; sizes differ by at most one row."""
    clip: float = 0.2
    """The probability ratio is clipped to 1 +- clip."""
    value_loss: Literal["plain", "clipped"] = "plain"
    value_clip: float = 0.2
    """Clipped value loss: how far a value may move from the stored one, in the critic's units."""
    value_coef: float = 1.0
    """Weight of mean((V - target)^2), without a further 1/2."""
    entropy_coef: float = 0.0
    learning_rate: float = 1e-3
    schedule: Literal["fixed", "linear", "adaptive_kl"] = "adaptive_kl"
    learning_rate_end: float = 0.0
    """linear: the rate in the last iteration."""
    learning_rate_min: float = 1e-5
    """adaptive_kl: lower bound."""
    learning_rate_max: float = 1e-2
    """adaptive_kl: upper bound."""
    kl_target: float = 0.01
    """adaptive_kl: rate / factor above 2 * target, rate * factor under target / 2."""
    kl_factor: float = 1.5
    kl_measure: Literal["minibatch", "epoch"] = "epoch"
    """adaptive_kl: adapt at every minibatch by its own KL (rsl_rl), or once an epoch by the epoch's mean (steadier)."""
    kl_stop: Optional[float] = None
    """Leave the rest of the iteration's steps out once a minibatch's KL exceeds this. None: never."""
    grad_clip: Literal["joint", "separate"] = "joint"
    """Clip the norm of all gradients together, or actor's and critic's each."""
    max_grad_norm: float = 1.0
    adam_eps: float = 1e-8
    normalize_advantage: Literal["batch", "minibatch", "none"] = "batch"
    reward_scale: float = 1.0
    """Rewards are multiplied by this for learning; statistics stay in the task's units."""
    bootstrap: Literal["final_obs", "pre_step_value", "none"] = "final_obs"
    """Value of a truncated step's next state: V of the state before the reset; V(s_t) (rsl_rl's rule); or nothing."""

    def check(self) -> List[Tuple[str, object, str]]:
        """(field, value, what is right) of every setting that cannot work."""
        faults: List[Tuple[str, object, str]] = []

        def need(name: str, ok: bool, right: str) -> None:
            if not ok:
                faults.append((name, getattr(self, name), right))

        need("gamma", 0.0 <= self.gamma <= 1.0, "between 0 and 1, e.g. 0.99")
        need("lam", 0.0 <= self.lam <= 1.0, "between 0 and 1, e.g. 0.95")
        for name in ("epochs", "minibatches"):
            need(name, getattr(self, name) >= 1, "at least 1")
        for name in ("clip", "value_clip", "learning_rate", "kl_target", "max_grad_norm", "adam_eps", "reward_scale"):
            need(name, getattr(self, name) > 0.0, "above 0")
        for name in ("value_coef", "entropy_coef", "learning_rate_end"):
            need(name, getattr(self, name) >= 0.0, "at least 0")
        need("kl_factor", self.kl_factor > 1.0, "above 1, e.g. 1.5")
        need("kl_stop", self.kl_stop is None or self.kl_stop > 0.0, "above 0, or null for never")
        if self.schedule == "adaptive_kl":
            need("learning_rate_min", 0.0 < self.learning_rate_min <= self.learning_rate_max, "0 < min <= max")
            in_bounds = self.learning_rate_min <= self.learning_rate <= self.learning_rate_max
            bounds = (
                f"between learning_rate_min={self.learning_rate_min} and learning_rate_max={self.learning_rate_max}"
            )
            need("learning_rate", in_bounds, bounds)
            need("schedule", self.epochs * self.minibatches > 1, "fixed or linear: one step an iteration has no KL yet")
        return faults


class Batch(NamedTuple):
    """One iteration's rows, flat: [B, ...]."""

    obs: Dict[str, Tensor]
    """Normalised, [B, O] per group; images as they are."""
    action: Tensor
    """Raw."""
    log_prob: Tensor
    params: Tensor
    value: Tensor
    """In the critic's units."""
    target: Tensor
    """In the critic's units."""
    advantage: Tensor
    valid: Tensor
    """[B] bool."""


# -- formulas -------------------------------------------------------------------------------------------------------
def bootstrap_values(
    value: Tensor, value_after: Tensor, final_value: Tensor, terminated: Tensor, truncated: Tensor, rule: str
) -> Tuple[Tensor, Tensor]:
    """(next_value, terminated) for `gae`, by the rule for truncated steps. All [K, N].

    `value_after[t]` = V(obs[t + 1]); `final_value[t]` = V(final_obs[t]), read where truncated.
    """
    if rule == "none":
        return value_after, terminated | truncated
    return torch.where(truncated, final_value if rule == "final_obs" else value, value_after), terminated


# -- the rows of a batch --------------------------------------------------------------------------------------------
class Table:
    """A batch packed into one row of float32 per transition, so that a minibatch is one gather.

    Images stay apart: they are gathered part by part, since a second copy of all of them may not fit in memory.
    """

    def __init__(self, batch: Batch, images: Tuple[str, ...]) -> None:
        self.discrete = not batch.action.is_floating_point()
        self.images = {name: batch.obs[name] for name in images}
        self.obs_names = [name for name in batch.obs if name not in images]
        columns = [batch.obs[name] for name in self.obs_names]
        columns += [batch.action, batch.params, *(getattr(batch, name) for name in SCALARS)]
        columns = [x if x.dim() == 2 else x.unsqueeze(1) for x in columns]
        self.widths = [x.shape[1] for x in columns]
        self.num_rows, self.device = columns[0].shape[0], columns[0].device
        self.packed = torch.empty(self.num_rows, sum(self.widths), device=self.device)
        for target, x in zip(self.packed.split(self.widths, 1), columns):
            target.copy_(x)
        self._parts: Dict[int, Tuple[Tensor, List[Tensor]]] = {}

    def gather(self, index: Tensor) -> Rows:
        """The rows `index` [B] int64. Their memory is used again by the next call with as many."""
        part, columns = self._part(len(index))
        torch.index_select(self.packed, 0, index, out=part)
        obs = dict(zip(self.obs_names, columns))
        for name, x in self.images.items():
            obs[name] = x.index_select(0, index)
        action, params, log_prob, value, target, advantage, valid = columns[len(self.obs_names) :]
        if self.discrete:
            action = action.squeeze(1).to(torch.int64)
        weight = valid / valid.sum().clamp_(min=1.0)
        return Rows(obs, action, log_prob, params, value, target, advantage, valid, weight)

    def _part(self, rows: int) -> Tuple[Tensor, List[Tensor]]:
        """Memory for so many gathered rows, and its columns."""
        if rows not in self._parts:
            part = torch.empty(rows, self.packed.shape[1], device=self.device)
            columns = list(part.split(self.widths, 1))
            first = len(columns) - len(SCALARS)
            self._parts[rows] = part, [*columns[:first], *(x.squeeze(1) for x in columns[first:])]
        return self._parts[rows]


SCALARS = ("log_prob", "value", "target", "advantage", "valid")
"""Fields of a batch with one number per row, in the order of a table's last columns."""


class MinibatchStep(NamedTuple):
    """What a minibatch's gradient says; scalars but for `stats`."""

    stats: Tensor
    """[5], see `STATS`."""
    kl: Tensor
    ratio_error: Tensor
    norm: Tensor
    finite: Tensor
    """bool."""
    penalties: List[Tensor]


# -- the learner ----------------------------------------------------------------------------------------------------
class PPO:
    """update(rollout) -> metrics. Holds the optimizer, the learning rate and the generator of the permutations."""

    def __init__(self, model: ActorCritic, config: PPOConfig, iterations: int, seed: int) -> None:
        self.model, self.config, self.iterations = model, config, iterations
        self.optimizer = FlatAdam(model.parameter_groups(), eps=config.adam_eps)
        self.nets = make_nets(model, self.optimizer)
        device = self.optimizer.flat.device
        self.rate = torch.full((), config.learning_rate, dtype=torch.float32, device=device)
        self.generator = make_generator(device, seed)

    # -- returns -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def make_batch(self, rollout: Rollout, truncated_rows: Tensor) -> Tuple[Batch, Estimates, Dict[str, Tensor]]:
        """Values of all observations and of the final ones in one pass, then advantages and targets.

        `truncated_rows`: int64 indices into the K * N rows whose final observation is needed.
        Returns the batch, the estimates that it was made of, and metrics of the critic before the update.
        """
        cfg, model, steps, envs = self.config, self.model, rollout.steps, rollout.num_envs
        rows = steps * envs
        normalized = model.normalize(rollout.flat_obs(steps + 1))
        seen_by_critic = {name: normalized[name] for name in model.critic_groups}
        piece_rows = max(1, rows // cfg.minibatches)
        values = model.denormalize_value(self.nets.values(seen_by_critic, piece_rows))
        value = values[:rows].view(steps, envs)
        value_after = values[envs : rows + envs].view(steps, envs)
        final_value = value.flatten().clone()
        if rollout.final_obs is not None and cfg.bootstrap == "final_obs" and len(truncated_rows):
            last = {name: x.flatten(0, 1).index_select(0, truncated_rows) for name, x in rollout.final_obs.items()}
            last = {name: model.normalize_group(name, x) for name, x in last.items()}
            last_value = model.denormalize_value(self.nets.values(last, piece_rows))
            final_value.index_copy_(0, truncated_rows, last_value)
        next_value, terminated = bootstrap_values(
            value, value_after, final_value.view(steps, envs), rollout.terminated, rollout.truncated, cfg.bootstrap
        )
        advantage = masked_gae(
            rollout.reward * cfg.reward_scale,
            value,
            next_value,
            terminated,
            rollout.truncated,
            rollout.valid,
            cfg.gamma,
            cfg.lam,
        )
        target = advantage + value
        estimates = Estimates(value, target, advantage)
        valid = rollout.valid
        metrics = {
            "critic/explained_variance": explained_variance(value, target, valid),
            "critic/value_mean": masked_mean(value, valid),
            "batch/valid_share": valid.float().mean(),
        }
        if cfg.normalize_advantage == "batch":
            advantage = standardize(advantage, valid)
        action, params = rollout.action.flatten(0, 1), rollout.params.flatten(0, 1)
        batch = Batch(
            {name: x[:rows] for name, x in normalized.items()},
            action,
            model.head.log_prob(params, model.head.scale(), action),
            params,
            model.normalize_value(value.flatten()),
            model.normalize_value(target.flatten()),
            advantage.flatten(),
            valid.flatten(),
        )
        return batch, estimates, metrics

    # -- update --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def update(self, batch: Batch, iteration: int) -> Dict[str, Tensor]:
        """Epochs of minibatch steps. Returns means over the minibatches as device scalars; "policy/ratio_max_error" is
        the largest |ratio - 1| before the first step, which is rounding alone.

        From a gradient that is not finite on nothing moves; "fault/bad_gradients" counts such minibatches.
        """
        cfg = self.config
        if cfg.schedule == "linear":
            self.rate.fill_(linear_rate(cfg.learning_rate, cfg.learning_rate_end, iteration, self.iterations))
        # A first, untrained policy moves far at any rate: its KL may lower the rate by one factor only.
        floor = cfg.learning_rate_min if iteration else max(cfg.learning_rate_min, cfg.learning_rate / cfg.kl_factor)
        table = Table(batch, self.model.images)
        old_scale = self.model.head.scale().detach().clone()
        active = batch.valid.any()  # without one valid row there is nothing to step by
        steps: List[MinibatchStep] = []
        self.nets.refresh()
        for _ in range(cfg.epochs):
            order = torch.randperm(table.num_rows, generator=self.generator, device=table.device)
            active_before = active
            for index in order.tensor_split(cfg.minibatches):
                step = self._gradient(table.gather(index), old_scale)
                # Not at the first minibatch: before any step its KL says nothing about the step size.
                if steps and cfg.kl_measure == "minibatch":
                    self._adapt(step.kl, active, floor)
                if cfg.kl_stop is not None:
                    active = active & (step.kl <= cfg.kl_stop)
                active = active & step.finite
                self.optimizer.step(self.rate, active)
                self.model.head.project()
                self.nets.refresh()
                steps.append(step)
            if cfg.kl_measure == "epoch" and len(steps) > 1:
                last = steps[max(1, len(steps) - cfg.minibatches) :]
                self._adapt(torch.stack([step.kl for step in last]).mean(), active_before, floor)
        return self._summary(steps)

    def _gradient(self, rows: Rows, old_scale: Tensor) -> MinibatchStep:
        """The clipped gradient of one minibatch, in the optimizer, and what it says."""
        cfg, head = self.config, self.model.head
        if cfg.normalize_advantage == "minibatch":
            rows = rows._replace(advantage=standardize(rows.advantage, rows.valid > 0))
        value_clip = cfg.value_clip if cfg.value_loss == "clipped" else None
        self.optimizer.zero_grad()
        sums = self.nets.gradient(
            rows,
            lambda params, piece: policy_gradient(head, params, piece, old_scale, cfg.clip, cfg.entropy_coef),
            lambda value, piece: value_gradient(value, piece, cfg.value_coef, value_clip),
        )
        penalties = []
        for weight, penalty in self._penalties():
            with torch.enable_grad():
                (weight * penalty).backward()
            penalties.append(penalty.detach())
        norm = self.optimizer.clip_grad_norm(cfg.max_grad_norm, cfg.grad_clip == "separate")
        return MinibatchStep(sums.stats, sums.stats[0], sums.ratio_error, norm, torch.isfinite(norm), penalties)

    def _penalties(self) -> List[Tuple[float, Tensor]]:
        with torch.enable_grad():
            return list(self.model.penalties().values())

    def _adapt(self, kl: Tensor, active: Tensor, floor: float) -> None:
        """Only while steps are taken: once they stop, the KL stands still and says nothing more about the rate."""
        cfg = self.config
        if cfg.schedule == "adaptive_kl":
            rate = adapt_rate(self.rate, kl, cfg.kl_target, floor, cfg.learning_rate_max, cfg.kl_factor)
            self.rate = torch.where(active, rate, self.rate)

    def _summary(self, steps: List[MinibatchStep]) -> Dict[str, Tensor]:
        """The metrics of an update, from those of its minibatches."""
        means = torch.stack([step.stats for step in steps]).mean(0)
        metrics: Dict[str, Tensor] = dict(zip(STATS, means.unbind()))
        metrics["optim/grad_norm"] = torch.stack([step.norm for step in steps]).mean()
        metrics["policy/ratio_max_error"] = steps[0].ratio_error
        for place, name in enumerate(self.model.penalties()):
            metrics[name] = torch.stack([step.penalties[place] for step in steps]).mean()
        finite = torch.stack([step.finite for step in steps])
        metrics["fault/bad_gradients"] = len(steps) - finite.sum()
        metrics["optim/lr"] = self.rate.clone()
        scale = self.model.head.scale().detach()
        if scale.numel():
            metrics["policy/std_mean"] = scale.mean()
        return metrics

    # -- state ---------------------------------------------------------------------------------------------------
    def state_dict(self) -> Dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "rate": self.rate.clone(),
            "generator": generator_state(self.generator),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.rate = state["rate"].to(self.rate.device).clone()
        set_generator_state(self.generator, state["generator"])
