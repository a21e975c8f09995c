"""Running moments for observations and values: frozen while an iteration lasts, merged once after it."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import Tensor, nn


def masked_batch_moments(x: Tensor, valid: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """(mean [...], population variance [...], count scalar) of `x` [B, ...] over rows where `valid` [B].

    Rows outside `valid` have no influence, whatever stands in them.
    """
    mask = valid.reshape(valid.shape + (1,) * (x.dim() - 1))
    kept = torch.where(mask, x, torch.zeros_like(x))
    count = valid.sum().to(x.dtype)
    mean = kept.sum(0) / count.clamp(min=1.0)
    centered = torch.where(mask, x - mean, torch.zeros_like(x))
    return mean, centered.square().sum(0) / count.clamp(min=1.0), count


def merge_moments(
    mean_a: Tensor, var_a: Tensor, count_a: Tensor, mean_b: Tensor, var_b: Tensor, count_b: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Moments of two samples together (Chan, Golub and LeVeque 1979). Merging an empty sample changes nothing."""
    count = count_a + count_b
    share = count_b / count.clamp(min=1.0)
    delta = mean_b - mean_a
    mean = mean_a + delta * share
    var = var_a * (1.0 - share) + var_b * share + delta.square() * share * (1.0 - share)
    return mean, var, count


class RunningNormalizer(nn.Module):
    """(x - mean) / sqrt(var + eps), clipped to +-clip. Starts as the identity; only `update` moves it."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: Tuple[int, ...], clip: float = 10.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.clip, self.eps = clip, eps
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., *shape] -> the same shape."""
        return (x - self.mean).mul_((self.var + self.eps).rsqrt_()).clamp_(-self.clip, self.clip)

    def std(self) -> Tensor:
        return (self.var + self.eps).sqrt()

    @torch.no_grad()
    def update(self, x: Tensor, valid: Tensor) -> None:
        """Merge the rows of `x` [B, *shape] where `valid` [B] is True."""
        mean, var, count = masked_batch_moments(x, valid)
        merged = merge_moments(self.mean, self.var, self.count, mean, var, count)
        for buffer, value in zip((self.mean, self.var, self.count), merged):
            buffer.copy_(value)


class IdentityNormalizer(nn.Module):
    """Leaves everything as it is; stands where normalisation is off."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def update(self, x: Tensor, valid: Tensor) -> None:
        return None
