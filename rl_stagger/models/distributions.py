"""Action distributions, each as one "head" module: parameters in, sample, log-probability, entropy, KL and their
gradients out.

Shapes: B rows (any leading shape), A action numbers, P distribution parameters. torch.distributions is not used because
its checks read from the device.
`raw` is what is stored and what log-probabilities are of; `to_env(raw)` is what the environment gets.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_stagger.envs.base import ActionSpec, Box, Discrete

LOG_2PI = math.log(2.0 * math.pi)


# -- formulas -------------------------------------------------------------------------------------------------------
def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(x; mean, diag(std^2)); x, mean [..., A], std broadcastable; [...] out."""
    z = (x - mean) / std
    return -0.5 * (z.square() + LOG_2PI).sum(-1) - torch.log(std).expand_as(z).sum(-1)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of N(., diag(std^2)); std [..., A]; [...] out."""
    return (0.5 + 0.5 * LOG_2PI + torch.log(std)).sum(-1)


def gaussian_kl(mean_old: Tensor, std_old: Tensor, mean_new: Tensor, std_new: Tensor) -> Tensor:
    """KL(old || new) of diagonal Gaussians; [..., A] each; [...] out."""
    log_ratio = 2.0 * torch.log(std_old / std_new)  # of variances; expm1 keeps a small KL from rounding
    shift = ((mean_old - mean_new) / std_new).square()
    return 0.5 * (shift.sum(-1) + (torch.expm1(log_ratio) - log_ratio).sum(-1))


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), stable for large |x|."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


def categorical_kl(logits_old: Tensor, logits_new: Tensor) -> Tensor:
    """KL(old || new); [..., n] each; [...] out."""
    log_old, log_new = logits_old.log_softmax(-1), logits_new.log_softmax(-1)
    return (log_old.exp() * (log_old - log_new)).sum(-1)


class Terms(NamedTuple):
    """A log-probability and by-products of its making."""

    log_prob: Tensor
    """[B]."""
    kept: Tuple[Tensor, ...]
    """A head's own."""


# -- heads ----------------------------------------------------------------------------------------------------------
class Head(nn.Module):
    """Turns the network's output ("params", [..., P]) into actions. `scale` is what else the distribution needs
    and does not depend on the observation (std [A]); it is empty where there is none."""

    num_params: int

    @property
    def own_parameter(self) -> Optional[nn.Parameter]:
        """What it learns by itself, beside what the net gives."""
        return None

    def scale(self) -> Tensor:
        raise NotImplementedError

    def noise(self, like: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        """What `sample` needs for parameters of the shape of `like`, [..., P]; a new tensor."""
        raise NotImplementedError

    def sample(self, params: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        raise NotImplementedError

    def mode(self, params: Tensor) -> Tensor:
        raise NotImplementedError

    def log_prob(self, params: Tensor, scale: Tensor, raw: Tensor) -> Tensor:
        raise NotImplementedError

    def entropy(self, params: Tensor, scale: Tensor) -> Tensor:
        raise NotImplementedError

    def kl(self, params_old: Tensor, scale_old: Tensor, params_new: Tensor, scale_new: Tensor) -> Tensor:
        raise NotImplementedError

    def to_env(self, raw: Tensor) -> Tensor:
        raise NotImplementedError

    def terms(self, params: Tensor, scale: Tensor, raw: Tensor) -> Terms:
        """The log-probability, and what `slopes` needs to take its gradient."""
        raise NotImplementedError

    def slopes(
        self, terms: Terms, params: Tensor, scale: Tensor, d_log_prob: Tensor, d_entropy: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """The gradient of a loss, given those by each row's log-probability and entropy ([B] each; None: the entropy
        does not count): (by `params` [B, P], by the head's own parameter or None where it has none)."""
        raise NotImplementedError

    def project(self) -> None:
        """Bring parameters back into their range, in place, after an optimizer step."""


class GaussianHead(Head):
    """Gaussian with a std that does not depend on the observation. The environment gets the clipped action; storage and
    log-probabilities keep the raw one."""

    low: Tensor
    high: Tensor

    def __init__(self, spec: Box, init_std: float, std_floor: float, std_form: str) -> None:
        """`std_form`: "log" learns log std, "direct" learns std itself; both are held at or above `std_floor`."""
        super().__init__()
        self.num_params = spec.size
        self.std_form, self.std_floor = std_form, std_floor
        start = math.log(init_std) if std_form == "log" else init_std
        self.std_param = nn.Parameter(torch.full((spec.size,), float(start)))
        low, high = spec.bounds("cpu")
        self.bounded = not (math.isinf(float(low.max())) and math.isinf(float(high.min())))
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    @property
    def own_parameter(self) -> Optional[nn.Parameter]:
        return self.std_param

    def scale(self) -> Tensor:
        return self.std_param.exp() if self.std_form == "log" else self.std_param

    @torch.no_grad()
    def project(self) -> None:
        """Hold the parameter itself at the floor: clamping its value in use would leave it no gradient to rise by."""
        self.std_param.clamp_(min=math.log(self.std_floor) if self.std_form == "log" else self.std_floor)

    def noise(self, like: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        return torch.empty_like(like).normal_(generator=generator)

    def sample(self, params: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(params, noise, scale)

    def mode(self, params: Tensor) -> Tensor:
        return params

    def log_prob(self, params: Tensor, scale: Tensor, raw: Tensor) -> Tensor:
        return gaussian_log_prob(raw, params, scale)

    def entropy(self, params: Tensor, scale: Tensor) -> Tensor:
        return gaussian_entropy(scale).expand(params.shape[:-1])

    def kl(self, params_old: Tensor, scale_old: Tensor, params_new: Tensor, scale_new: Tensor) -> Tensor:
        return gaussian_kl(params_old, scale_old, params_new, scale_new)

    def to_env(self, raw: Tensor) -> Tensor:
        return torch.clamp(raw, self.low, self.high) if self.bounded else raw

    def terms(self, params: Tensor, scale: Tensor, raw: Tensor) -> Terms:
        z = (raw - params) / scale
        squares = z.square()
        constant = torch.log(scale).sum() + 0.5 * scale.shape[-1] * LOG_2PI
        return Terms(torch.sub(-constant, squares.sum(-1), alpha=0.5), (z, squares))

    def slopes(
        self, terms: Terms, params: Tensor, scale: Tensor, d_log_prob: Tensor, d_entropy: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[Tensor]]:
        z, squares = terms.kept
        d_params = z * (d_log_prob.unsqueeze(-1) / scale)
        by_log_std = torch.mv(squares.t(), d_log_prob) - d_log_prob.sum()
        if d_entropy is not None:
            by_log_std = by_log_std + d_entropy.sum()
        return d_params, by_log_std if self.std_form == "log" else by_log_std / scale


class TanhGaussianHead(GaussianHead):
    """Gaussian squashed by tanh into the bounds. Stored raw actions are those before the squash, so the log-probability
    is exact and needs no inverse; the KL divergence is that of the Gaussians (a bijection changes neither)."""

    center: Tensor
    half_range: Tensor

    # Gauss-Hermite nodes and weights for a standard normal: exact to degree 15, for the entropy's slope term.
    _NODES = (-2.9306374202572440, -1.9816567566958429, -1.1571937124467802, -0.3811869902073221)
    _WEIGHTS = (0.00019960407221136762, 0.017077983007413475, 0.20780232581489188, 0.66114701255824129)

    def __init__(self, spec: Box, init_std: float, std_floor: float, std_form: str) -> None:
        super().__init__(spec, init_std, std_floor, std_form)
        if not (torch.isfinite(self.low).all() and torch.isfinite(self.high).all()):
            raise ValueError(f"a tanh Gaussian needs finite bounds, the action is {spec}; use distribution=gaussian")
        self.register_buffer("center", 0.5 * (self.high + self.low), persistent=False)
        self.register_buffer("half_range", 0.5 * (self.high - self.low), persistent=False)

    def log_prob(self, params: Tensor, scale: Tensor, raw: Tensor) -> Tensor:
        slope = log_tanh_slope(raw) + torch.log(self.half_range)
        return gaussian_log_prob(raw, params, scale) - slope.sum(-1)

    def entropy(self, params: Tensor, scale: Tensor) -> Tensor:
        """Entropy of the squashed action: the Gaussian's plus E[log slope], the latter by 8-point Gauss-Hermite
        quadrature (physicists' nodes times sqrt 2, weights over sqrt pi)."""
        root2, root_pi = math.sqrt(2.0), math.sqrt(math.pi)
        slope = torch.zeros_like(params)
        for node, weight in zip(self._NODES, self._WEIGHTS):
            offset = root2 * node * scale
            slope = slope + weight / root_pi * (log_tanh_slope(params + offset) + log_tanh_slope(params - offset))
        return gaussian_entropy(scale) + (slope + torch.log(self.half_range)).sum(-1)

    def terms(self, params: Tensor, scale: Tensor, raw: Tensor) -> Terms:
        gaussian = super().terms(params, scale, raw)
        slope = log_tanh_slope(raw) + torch.log(self.half_range)
        return Terms(gaussian.log_prob - slope.sum(-1), gaussian.kept)

    def slopes(
        self, terms: Terms, params: Tensor, scale: Tensor, d_log_prob: Tensor, d_entropy: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[Tensor]]:
        d_params, d_own = super().slopes(terms, params, scale, d_log_prob, d_entropy)
        if d_entropy is None or d_own is None:
            return d_params, d_own
        # The slope term of the entropy: d log_tanh_slope(x) / dx = -2 tanh(x), by the same quadrature.
        root2, root_pi = math.sqrt(2.0), math.sqrt(math.pi)
        by_mean, by_std = torch.zeros_like(params), torch.zeros_like(params)
        for node, weight in zip(self._NODES, self._WEIGHTS):
            above, below = torch.tanh(params + root2 * node * scale), torch.tanh(params - root2 * node * scale)
            by_mean = by_mean - 2.0 * weight / root_pi * (above + below)
            by_std = by_std - 2.0 * weight / root_pi * root2 * node * (above - below)
        d_std = torch.mv(by_std.t(), d_entropy)
        d_own = d_own + (d_std * scale if self.std_form == "log" else d_std)
        return torch.addcmul(d_params, by_mean, d_entropy.unsqueeze(-1)), d_own

    def to_env(self, raw: Tensor) -> Tensor:
        return torch.addcmul(self.center, torch.tanh(raw), self.half_range)


class CategoricalHead(Head):
    """One of n choices; `params` are logits. `scale` is an empty tensor."""

    no_scale: Tensor

    def __init__(self, spec: Discrete) -> None:
        super().__init__()
        self.num_params = spec.n
        self.register_buffer("no_scale", torch.zeros(0), persistent=False)

    def scale(self) -> Tensor:
        return self.no_scale

    def noise(self, like: Tensor, generator: Optional[torch.Generator]) -> Tensor:
        return torch.empty_like(like).exponential_(generator=generator).log_()

    def sample(self, params: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        """Gumbel-max: argmax(logits - log(-log u)), drawn with exponential noise; needs no normalised probabilities."""
        return (params - noise).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def log_prob(self, params: Tensor, scale: Tensor, raw: Tensor) -> Tensor:
        return params.log_softmax(-1).gather(-1, raw.unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Tensor, scale: Tensor) -> Tensor:
        log_p = params.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    def kl(self, params_old: Tensor, scale_old: Tensor, params_new: Tensor, scale_new: Tensor) -> Tensor:
        return categorical_kl(params_old, params_new)

    def terms(self, params: Tensor, scale: Tensor, raw: Tensor) -> Terms:
        log_p = params.log_softmax(-1)
        return Terms(log_p.gather(-1, raw.unsqueeze(-1)).squeeze(-1), (log_p, raw))

    def slopes(
        self, terms: Terms, params: Tensor, scale: Tensor, d_log_prob: Tensor, d_entropy: Optional[Tensor]
    ) -> Tuple[Tensor, Optional[Tensor]]:
        log_p, raw = terms.kept
        p = log_p.exp()
        d_params = (p * -d_log_prob.unsqueeze(-1)).scatter_add_(-1, raw.unsqueeze(-1), d_log_prob.unsqueeze(-1))
        if d_entropy is not None:
            # dH / dlogit = -p (log p + H)
            entropy = -(p * log_p).sum(-1, keepdim=True)
            d_params = torch.addcmul(d_params, p * (log_p + entropy), d_entropy.unsqueeze(-1), value=-1.0)
        return d_params, None

    def to_env(self, raw: Tensor) -> Tensor:
        return raw


def make_head(spec: ActionSpec, distribution: str, init_std: float, std_floor: float, std_form: str) -> Head:
    """The head for `spec`: categorical for Discrete, otherwise `distribution` ("gaussian" | "tanh_gaussian")."""
    if isinstance(spec, Discrete):
        return CategoricalHead(spec)
    kind = TanhGaussianHead if distribution == "tanh_gaussian" else GaussianHead
    return kind(spec, init_std, std_floor, std_form)
