"""Returns and advantages. Pure functions of [K, N] tensors: K steps, N environments."""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438), exact at time limits.

    All tensors are [K, N]; index t is the transition out of obs[t].
    `value[t]` = V(obs[t]). `next_value[t]` = V of the state after t: of the final observation where truncated, else of
    obs[t + 1]; it is ignored where terminated (terminated wins where both flags are set).
    Returns advantages [K, N]; add `value` for the targets. Raises for flags that are not bool and shapes that differ.
    The recursion is cut at every done:

        delta_t = r_t + gamma * (1 - terminated_t) * next_value_t - value_t
        A_t     = delta_t + gamma * lam * (1 - done_t) * A_{t+1}
    """
    if terminated.dtype != torch.bool or truncated.dtype != torch.bool:
        raise TypeError(f"terminated is {terminated.dtype}, truncated is {truncated.dtype}; both must be torch.bool")
    for name, x in (("value", value), ("next_value", next_value), ("terminated", terminated), ("truncated", truncated)):
        if x.shape != reward.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, reward has {tuple(reward.shape)}")
    delta = reward + gamma * torch.where(terminated, torch.zeros_like(next_value), next_value) - value
    carry = gamma * lam * (~(terminated | truncated)).to(delta.dtype)
    advantage: List[Tensor] = []
    running = torch.zeros_like(delta[0])
    for delta_t, carry_t in zip(reversed(delta.unbind()), reversed(carry.unbind())):
        running = torch.addcmul(delta_t, carry_t, running)
        advantage.append(running)
    return torch.stack(advantage[::-1])


def masked_gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """`gae` over batches with frozen or dummy steps (`valid` [K, N] bool): advantage 0 there, and nothing crosses them.

    What stands in an invalid row (even NaN) has no influence.
    """
    zero = torch.zeros_like(reward)
    advantage = gae(
        torch.where(valid, reward, zero),
        torch.where(valid, value, zero),
        torch.where(valid, next_value, zero),
        terminated | ~valid,
        truncated,
        gamma,
        lam,
    )
    return torch.where(valid, advantage, zero)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of `x` over the rows where `valid`; 0 where there is none. Same shapes; scalar out."""
    kept = torch.where(valid, x, torch.zeros_like(x))
    return kept.sum() / valid.sum().clamp(min=1)


def masked_moments(x: Tensor, valid: Tensor) -> Tuple[Tensor, Tensor]:
    """(mean, population variance) of `x` over the rows where `valid`; scalars."""
    mean = masked_mean(x, valid)
    return mean, masked_mean((x - mean).square(), valid)


def masked_center(x: Tensor, valid: Tensor) -> Tensor:
    """`x` minus its mean over the rows where `valid`. Taken twice: the second time removes the rounding of the first,
    which is all that is left of a batch that does not vary. Same shapes."""
    once = x - masked_mean(x, valid)
    return once - masked_mean(once, valid)


def explained_variance(prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """1 - Var(target - prediction) / Var(target) over valid rows; NaN where the target varies by rounding only."""
    _, residual = masked_moments(target - prediction, valid)
    mean, total = masked_moments(target, valid)
    varies = total > 1e-13 * mean.square()
    return torch.where(varies, 1.0 - residual / total, torch.full_like(total, float("nan")))
