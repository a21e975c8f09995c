"""What PPO minimises, and its gradient by the nets' outputs: pure functions of a minibatch's rows.

The gradient is written out: the loss is a mean over rows of functions of three numbers a row (log-probability, entropy,
value), so that it needs no autograd graph. Shapes: B rows. No function here reads from the device.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from rl_stagger.algorithms.gae import masked_center, masked_mean
from rl_stagger.models.distributions import Head

STATS = ("policy/kl", "policy/loss", "policy/entropy", "policy/clip_share", "critic/loss")
"""Metrics that are means over a minibatch's rows, in the order of `Gradient.stats`."""


class Rows(NamedTuple):
    """A minibatch, or a piece of one."""

    obs: Dict[str, Tensor]
    """Normalised, [B, O] per group; images as they are."""
    action: Tensor
    """Raw."""
    log_prob: Tensor
    params: Tensor
    value: Tensor
    """In the critic's units, as the target."""
    target: Tensor
    advantage: Tensor
    valid: Tensor
    """[B] float32, 1 or 0."""
    weight: Tensor
    """[B] float32: `valid` over the minibatch's number of valid rows, so that sums over pieces are means."""


class PolicyGradient(NamedTuple):
    d_params: Tensor
    """[B, P]."""
    d_own: Optional[Tensor]
    """By the head's own parameter."""
    stats: Tensor
    """[4], the first of `STATS`, this piece's part of the minibatch's means."""
    ratio_error: Tensor
    """Scalar, the largest |ratio - 1|."""


# -- formulas -------------------------------------------------------------------------------------------------------
def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 +- clip) * A) per row (eq. 7 of PPO), to be minimised, and its derivative by the
    log-probability: -ratio * A, or 0 where the clipped term is the smaller. [B] in and out."""
    gain, clipped = ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    return -torch.minimum(gain, clipped), (-gain).masked_fill_(gain > clipped, 0.0)


def value_error(value: Tensor, old_value: Tensor, target: Tensor, value_clip: Optional[float]) -> Tuple[Tensor, Tensor]:
    """Squared error per row, the larger of plain and clipped where `value_clip` is given, and its derivative by the
    value: 2 (V - target), or 0 where the clipped error is the larger. [B] in and out."""
    off = value - target
    plain, slope = off.square(), 2.0 * off
    if value_clip is None:
        return plain, slope
    near = old_value + (value - old_value).clamp(-value_clip, value_clip)
    clipped = (near - target).square()
    return torch.maximum(plain, clipped), slope.masked_fill_(clipped > plain, 0.0)


def standardize(x: Tensor, valid: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / std over the valid rows; 0 in the others. A batch that does not vary gives zeros."""
    centered = masked_center(x, valid)
    std = masked_mean(centered.square(), valid).sqrt()
    return torch.where(valid, centered / (std + eps), torch.zeros_like(x))


# -- the two halves -------------------------------------------------------------------------------------------------
def policy_gradient(
    head: Head, params: Tensor, rows: Rows, old_scale: Tensor, clip: float, entropy_coef: float
) -> PolicyGradient:
    """Of mean(clipped_surrogate) - entropy_coef * mean(entropy), for the nets' `params` [B, P] on `rows`."""
    scale = head.scale()
    terms = head.terms(params, scale, rows.action)
    # Masked before exp: an infinite ratio in an invalid row would make its gradient 0 * inf.
    ratio = ((terms.log_prob - rows.log_prob) * rows.valid).exp()
    surrogate, slope = clipped_surrogate(ratio, rows.advantage, clip)
    d_log_prob = slope * rows.weight
    d_entropy = rows.weight * -entropy_coef if entropy_coef else None
    d_params, d_own = head.slopes(terms, params, scale, d_log_prob, d_entropy)
    off = (ratio - 1.0).abs_()
    by_row = (
        head.kl(rows.params, old_scale, params, scale),
        surrogate,
        head.entropy(params, scale),
        (off > clip).to(off.dtype),
    )
    return PolicyGradient(d_params, d_own, torch.stack(by_row).mv(rows.weight), off.max())


def value_gradient(value: Tensor, rows: Rows, value_coef: float, value_clip: Optional[float]) -> Tuple[Tensor, Tensor]:
    """Of value_coef * mean(value_error), for the nets' `value` [B] on `rows`: (by value [B], mean error, a scalar)."""
    error, slope = value_error(value, rows.value, rows.target, value_clip)
    return slope * (value_coef * rows.weight), torch.dot(error, rows.weight)
