"""PPO (Schulman et al. 2017, arXiv 1707.06347): pure losses first, then the learner that holds state.

Shapes: K steps, N environments, B = K * N rows of a batch. No function here reads from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Literal, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.algorithms.gae import explained_variance, masked_center, masked_gae, masked_mean
from rl_stagger.algorithms.kl_schedule import adapt_rate, linear_rate
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
def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """-min(ratio * A, clip(ratio, 1 +- clip) * A) per row (eq. 7 of PPO); to be minimised. [B] in and out."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)


def value_error(value: Tensor, old_value: Tensor, target: Tensor, value_clip: Optional[float]) -> Tensor:
    """Squared error per row; the larger of plain and clipped where `value_clip` is given. [B] in and out."""
    plain = (value - target).square()
    if value_clip is None:
        return plain
    near = old_value + (value - old_value).clamp(-value_clip, value_clip)
    return torch.maximum(plain, (near - target).square())


def standardize(x: Tensor, valid: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / std over the valid rows; 0 in the others. A batch that does not vary gives zeros."""
    centered = masked_center(x, valid)
    std = masked_mean(centered.square(), valid).sqrt()
    return torch.where(valid, centered / (std + eps), torch.zeros_like(x))


def bootstrap_values(
    value: Tensor, value_after: Tensor, final_value: Tensor, terminated: Tensor, truncated: Tensor, rule: str
) -> Tuple[Tensor, Tensor]:
    """(next_value, terminated) for `gae`, by the rule for truncated steps. All [K, N].

    `value_after[t]` = V(obs[t + 1]); `final_value[t]` = V(final_obs[t]), read where truncated.
    """
    if rule == "none":
        return value_after, terminated | truncated
    return torch.where(truncated, final_value if rule == "final_obs" else value, value_after), terminated


# -- the learner ----------------------------------------------------------------------------------------------------
class PPO:
    """update(rollout) -> metrics. Holds the optimizer, the learning rate and the generator of the permutations."""

    def __init__(self, model: ActorCritic, config: PPOConfig, iterations: int, seed: int) -> None:
        self.model, self.config, self.iterations = model, config, iterations
        self.optimizer = FlatAdam(model.parameter_groups(), eps=config.adam_eps)
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
        seen_by_critic = [{name: normalized[name] for name in model.critic_groups}]
        if rollout.final_obs is not None and cfg.bootstrap == "final_obs":
            last = {name: x.flatten(0, 1).index_select(0, truncated_rows) for name, x in rollout.final_obs.items()}
            seen_by_critic.append({name: model.normalize_group(name, x) for name, x in last.items()})
        values = self._values(seen_by_critic, max(1, rows // cfg.minibatches))
        value = values[:rows].view(steps, envs)
        value_after = values[envs : rows + envs].view(steps, envs)
        final_value = value.flatten().clone()
        if values.shape[0] > rows + envs:
            final_value.index_copy_(0, truncated_rows, values[rows + envs :])
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
        batch = Batch(
            {name: x[:rows] for name, x in normalized.items()},
            rollout.action.flatten(0, 1),
            rollout.log_prob.flatten(),
            rollout.params.flatten(0, 1),
            model.normalize_value(value.flatten()),
            model.normalize_value(target.flatten()),
            advantage.flatten(),
            valid.flatten(),
        )
        return batch, estimates, metrics

    def _values(self, parts: List[Dict[str, Tensor]], piece_rows: int) -> Tensor:
        """V of the normalised rows of all `parts`, one after the other. Images go in pieces of `piece_rows`: what a
        convolution of all of them would need in memory is many times their own size."""
        if not self.model.images:
            obs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts[1:] else parts[0]
            return self.model.value(obs, normalized=True)
        pieces = (zip(*(x.split(piece_rows) for x in part.values())) for part in parts)
        names = list(parts[0])
        return torch.cat(
            [self.model.value(dict(zip(names, piece)), normalized=True) for part in pieces for piece in part]
        )

    # -- update --------------------------------------------------------------------------------------------------
    def update(self, batch: Batch, iteration: int) -> Dict[str, Tensor]:
        """Epochs of minibatch steps. Returns means over the minibatches as device scalars; "policy/ratio_max_error" is
        the largest |ratio - 1| before the first step, which is rounding alone.

        From a gradient that is not finite on nothing moves; "fault/bad_gradients" counts such minibatches.
        """
        cfg = self.config
        if cfg.schedule == "linear":
            self.rate.fill_(linear_rate(cfg.learning_rate, cfg.learning_rate_end, iteration, self.iterations))
        device, rows = batch.advantage.device, batch.valid.shape[0]
        # A first, untrained policy moves far at any rate: its KL may lower the rate by one factor only.
        floor = cfg.learning_rate_min if iteration else max(cfg.learning_rate_min, cfg.learning_rate / cfg.kl_factor)
        old_scale = self.model.head.scale().detach().clone()
        active = batch.valid.any()  # without one valid row there is nothing to step by
        bad = torch.zeros((), device=device)
        steps: List[Tensor] = []
        stats: Dict[str, Tensor] = {}
        for _ in range(cfg.epochs):
            order = torch.randperm(rows, generator=self.generator, device=device)
            active_before = active
            for part in _minibatches(batch, order, cfg.minibatches, self.model.images):
                loss, stats = self._loss(part, old_scale)
                kl = stats["policy/kl"]
                # Not at the first minibatch: before any step its KL says nothing about the step size.
                if steps and cfg.kl_measure == "minibatch":
                    self._adapt(kl, active, floor)
                if cfg.kl_stop is not None:
                    active = active & (kl <= cfg.kl_stop)
                self.optimizer.zero_grad()
                loss.backward()
                norm = self.optimizer.clip_grad_norm(cfg.max_grad_norm, cfg.grad_clip == "separate")
                finite = torch.isfinite(norm)
                bad += (~finite).to(bad.dtype)
                active = active & finite
                self.optimizer.step(self.rate, active)
                self.model.head.project()
                steps.append(torch.stack([*stats.values(), norm]))
            if cfg.kl_measure == "epoch" and len(steps) > 1:
                epoch_kl = torch.stack(steps[max(1, len(steps) - cfg.minibatches) :])[:, 0].mean()
                self._adapt(epoch_kl, active_before, floor)
        table = torch.stack(steps)
        metrics: Dict[str, Tensor] = dict(zip([*stats, "optim/grad_norm"], table.mean(0).unbind()))
        metrics["policy/ratio_max_error"] = table[0, list(stats).index("policy/ratio_max_error")]
        metrics["fault/bad_gradients"] = bad
        metrics["optim/lr"] = self.rate.clone()
        scale = self.model.head.scale().detach()
        if scale.numel():
            metrics["policy/std_mean"] = scale.mean()
        return metrics

    def _adapt(self, kl: Tensor, active: Tensor, floor: float) -> None:
        """Only while steps are taken: once they stop, the KL stands still and says nothing more about the rate."""
        cfg = self.config
        if cfg.schedule == "adaptive_kl":
            rate = adapt_rate(self.rate, kl, cfg.kl_target, floor, cfg.learning_rate_max, cfg.kl_factor)
            self.rate = torch.where(active, rate, self.rate)

    def _loss(self, part: Batch, old_scale: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:
        """The loss of one minibatch and its statistics by metric name, the KL divergence first."""
        cfg, valid = self.config, part.valid
        now = self.model.evaluate(part.obs, part.action)
        advantage = part.advantage
        if cfg.normalize_advantage == "minibatch":
            advantage = standardize(advantage, valid)
        # Masked before exp: an infinite ratio in an invalid row would make the gradient 0 * inf.
        ratio = torch.where(valid, now.log_prob - part.log_prob, torch.zeros_like(part.log_prob)).exp()
        policy_loss = masked_mean(clipped_surrogate(ratio, advantage, cfg.clip), valid)
        value_clip = cfg.value_clip if cfg.value_loss == "clipped" else None
        critic_loss = masked_mean(value_error(now.value, part.value, part.target, value_clip), valid)
        entropy = masked_mean(now.entropy, valid)
        loss = policy_loss + cfg.value_coef * critic_loss - cfg.entropy_coef * entropy
        with torch.no_grad():
            kl = masked_mean(self.model.head.kl(part.params, old_scale, now.params, now.scale), valid)
            off = (ratio - 1.0).abs()
            clip_share = masked_mean((off > cfg.clip).to(off.dtype), valid)
            ratio_error = torch.where(valid, off, torch.zeros_like(off)).max()
        stats = {
            "policy/kl": kl,
            "policy/loss": policy_loss.detach(),
            "critic/loss": critic_loss.detach(),
            "policy/entropy": entropy.detach(),
            "policy/clip_share": clip_share,
            "policy/ratio_max_error": ratio_error,
        }
        for name, (weight, penalty) in self.model.penalties().items():
            loss = loss + weight * penalty
            stats[name] = penalty.detach()
        return loss, stats

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


def _minibatches(batch: Batch, order: Tensor, parts: int, images: Tuple[str, ...]) -> Iterator[Batch]:
    """`batch` with its rows in `order`, in `parts` whose sizes differ by at most one row; no row is left out.

    One gather per tensor, of which the parts are views; images are gathered part by part, since a second copy of all of
    them may not fit in memory.
    """
    vectors = {
        name: x.index_select(0, order).tensor_split(parts) for name, x in batch.obs.items() if name not in images
    }
    fields = [x.index_select(0, order).tensor_split(parts) for x in batch[1:]]
    rows = order.tensor_split(parts) if images else ()
    for i in range(parts):
        obs = {name: x[i] for name, x in vectors.items()}
        for name in images:
            obs[name] = batch.obs[name].index_select(0, rows[i])
        yield Batch(obs, *(field[i] for field in fields))
