"""Adam over one flat vector, steered from the device.

Why not torch.optim.Adam: the learning rate and "skip this step" must be device scalars (a KL-adaptive rate may not cost
a host read per minibatch), from torch 2.0 on, on CPU, CUDA and "meta" alike; no torch optimizer offers that on all.
With one flat vector a step is torch's fused kernel once where it is there (8 times faster on a CPU), and else some
twenty operations, whatever the number of layers.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

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
        self.count = torch.zeros((), device=self.flat.device)
        """Steps taken; float32, as the fused kernel wants it."""
        self._fused = _fused_step(self.flat.device)
        self._places: Dict[int, Tuple[slice, torch.Size]] = {}
        self._slices: List[slice] = []
        start = 0
        for group in groups:
            group_start = start
            for p in group:
                stop = start + p.numel()
                p.data = self.flat[start:stop].view_as(p)
                p.grad = self.grad[start:stop].view_as(p)
                self._places[id(p)] = slice(start, stop), p.shape
                start = stop
            self._slices.append(slice(group_start, start))

    def view(self, vector: Tensor, parameter: Tensor) -> Tensor:
        """The part of `vector`, laid out as `flat` is, that belongs to `parameter`; in its shape."""
        place, shape = self._places[id(parameter)]
        return vector[place].view(shape)

    def zero_grad(self) -> None:
        self.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, separate: bool) -> Tensor:
        """Scale gradients to a norm of at most `max_norm`, over all parameters or each group. Returns the joint norm
        before clipping (scalar)."""
        if not separate:
            joint = torch.linalg.vector_norm(self.grad)
            self.grad.mul_((max_norm / (joint + 1e-6)).clamp_(max=1.0))
            return joint
        norms = [torch.linalg.vector_norm(self.grad[s]) for s in self._slices]
        for norm, s in zip(norms, self._slices):
            self.grad[s].mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def step(self, rate: Tensor, active: Tensor) -> None:
        """One step at learning rate `rate` (scalar); nothing moves where `active` (scalar bool) is False, even if the
        gradient is not finite."""
        on = active.to(self.flat.dtype)
        self.count.add_(on)
        if self._fused is not None:
            self._fused(self, rate, 1.0 - on)
        else:
            self._step(rate, active, on)

    def _step(self, rate: Tensor, active: Tensor, on: Tensor) -> None:
        beta1, beta2 = self.betas
        grad = torch.where(active, self.grad, torch.zeros_like(self.grad))
        self.exp_avg.lerp_(grad, (1.0 - beta1) * on)
        self.exp_avg_sq.lerp_(grad.square(), (1.0 - beta2) * on)
        count = self.count.to(torch.float64)  # 1 - 0.999^count in float32 is off by 1e-5
        correction1 = 1.0 - beta1**count
        correction2 = 1.0 - beta2**count
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


def _fused_step(device: torch.device) -> Optional[Callable[[FlatAdam, Tensor, Tensor], None]]:
    """(optimizer, rate, 1 = skip this step) -> one step by torch's fused kernel; None where it cannot take a rate from
    the device. torch has it on CUDA from 2.1, on CPUs from 2.4 on; asking it is surer than its version."""
    kernel = getattr(torch, "_fused_adam_", None)
    if kernel is None or device.type == "meta":
        return None

    def step(optimizer: FlatAdam, rate: Tensor, skip: Tensor) -> None:
        beta1, beta2 = optimizer.betas
        kernel(
            [optimizer.flat],
            [optimizer.grad],
            [optimizer.exp_avg],
            [optimizer.exp_avg_sq],
            [],
            [optimizer.count],
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=optimizer.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=skip,
        )

    ones = [torch.ones(1, device=device) for _ in range(4)]
    scalar = torch.ones((), device=device)
    try:
        kernel(
            *([x] for x in ones), [], [scalar], lr=scalar, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=scalar,
        )  # fmt: skip
    except (RuntimeError, TypeError):  # NotImplementedError, which is one too: no kernel on this device
        return None
    return step
