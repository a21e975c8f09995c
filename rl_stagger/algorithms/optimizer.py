"""Adam over one flat vector, steered from the device.

Why not torch.optim.Adam: the learning rate and "skip this step" must be device scalars (a KL-adaptive rate may not cost
a host read per minibatch), from torch 2.0 on, on CPU, CUDA and "meta" alike; no torch optimizer offers that on all.
One flat vector makes a step about ten operations whatever the number of layers.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor, nn


class FlatAdam:
    """Adam (Kingma and Ba 2014, arXiv 1412.6980, algorithm 1) on parameters that become views of one vector.

    Build it after the modules are on their device; moving them later would break the views.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """`groups`: lists of parameters, each to be clipped on its own when clipping is separate."""
        parameters = [p for group in groups for p in group]
        if not parameters:
            raise ValueError("FlatAdam needs at least one parameter")
        self.betas, self.eps = betas, eps
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.grad = torch.zeros_like(self.flat)
        self.exp_avg = torch.zeros_like(self.flat)
        self.exp_avg_sq = torch.zeros_like(self.flat)
        self.count = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        """Steps taken; in float64, since 1 - 0.999^count in float32 is off by 1e-5."""
        self._slices: List[slice] = []
        start = 0
        for group in groups:
            group_start = start
            for p in group:
                stop = start + p.numel()
                p.data = self.flat[start:stop].view_as(p)
                p.grad = self.grad[start:stop].view_as(p)
                start = stop
            self._slices.append(slice(group_start, start))

    def zero_grad(self) -> None:
        self.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, separate: bool) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`, over all parameters or each group. Returns the joint norm
        before clipping (scalar)."""
        norms = torch.stack([torch.linalg.vector_norm(self.grad[s]) for s in self._slices])
        joint = torch.linalg.vector_norm(norms)
        if separate:
            for index, s in enumerate(self._slices):
                self.grad[s].mul_((max_norm / (norms[index] + 1e-6)).clamp(max=1.0))
        else:
            self.grad.mul_((max_norm / (joint + 1e-6)).clamp(max=1.0))
        return joint

    @torch.no_grad()
    def step(self, rate: Tensor, active: Tensor) -> None:
        """One step at learning rate `rate` (scalar); nothing moves where `active` (scalar bool) is False, even if the
        gradient is not finite."""
        beta1, beta2 = self.betas
        on = active.to(self.flat.dtype)
        grad = torch.where(active, self.grad, torch.zeros_like(self.grad))
        self.count.add_(on)
        self.exp_avg.lerp_(grad, (1.0 - beta1) * on)
        self.exp_avg_sq.lerp_(grad.square(), (1.0 - beta2) * on)
        correction1 = 1.0 - beta1**self.count
        correction2 = 1.0 - beta2**self.count
        denominator = (self.exp_avg_sq / correction2.clamp(min=1e-30)).sqrt_().add_(self.eps)
        scale = on * rate / correction1.clamp(min=1e-30)
        self.flat.sub_(self.exp_avg.div(denominator).mul_(scale))

    def state_dict(self) -> Dict[str, Any]:
        return {
            "exp_avg": self.exp_avg.clone(),
            "exp_avg_sq": self.exp_avg_sq.clone(),
            "count": self.count.clone(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        for name in ("exp_avg", "exp_avg_sq", "count"):
            getattr(self, name).copy_(state[name])
