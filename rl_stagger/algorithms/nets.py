"""How training runs a model's nets: `FlatNets` by written-out passes for multi-layer perceptrons, `ModuleNets` through
autograd for all others. Both give the same numbers up to rounding. Neither reads from the device.

Shapes: B rows, P distribution parameters.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from rl_stagger.algorithms.losses import PolicyGradient, Rows
from rl_stagger.algorithms.optimizer import FlatAdam
from rl_stagger.envs.base import Obs
from rl_stagger.models.actor_critic import ActorCritic
from rl_stagger.models.passes import (
    ACTIVATION_PASSES,
    Buffers,
    Grads,
    Layer,
    backward_pass,
    even_pieces,
    forward_pass,
    linear_layers,
)

CPU_PIECE_ROWS = 2048
"""Rows that go through a net at once on a CPU: 2048 x 128 float32 are one MB, so that a layer stays in cache."""

PolicyLoss = Callable[[Tensor, Rows], PolicyGradient]
"""(params [B, P], rows) -> gradient."""
ValueLoss = Callable[[Tensor, Rows], Tuple[Tensor, Tensor]]
"""(value [B], rows) -> (gradient by value [B], mean error)."""


class Sums(NamedTuple):
    """What a minibatch's gradient leaves behind."""

    stats: Tensor
    """[5], the metrics `losses.STATS`."""
    ratio_error: Tensor
    """Scalar."""


class Nets:
    """A model's nets, as training needs them."""

    def __init__(self, model: ActorCritic) -> None:
        self.model = model

    def refresh(self) -> None:
        """The parameters have changed."""

    def params(self, obs: Obs, out: Tensor) -> None:
        """Write the distribution parameters for raw observations into `out` [N, P] float32."""
        raise NotImplementedError

    def values(self, normalized: Obs, most_rows: int) -> Tensor:
        """The critic's output [B], in its own units, for normalised observations; at most `most_rows` rows at once."""
        raise NotImplementedError

    def gradient(self, rows: Rows, policy_loss: PolicyLoss, value_loss: ValueLoss) -> Sums:
        """Add the losses' gradients on a minibatch to those of the parameters."""
        raise NotImplementedError


class ModuleNets(Nets):
    """Any model, through autograd."""

    @torch.no_grad()
    def params(self, obs: Obs, out: Tensor) -> None:
        out.copy_(self.model.params(self.model.normalize(obs)))

    @torch.no_grad()
    def values(self, normalized: Obs, most_rows: int) -> Tensor:
        """Images go in pieces: what a convolution of all of them would need in memory is many times their own size."""
        if not self.model.images:
            return self.model.critic_output(normalized)
        pieces = zip(*(x.split(most_rows) for x in normalized.values()))
        return torch.cat([self.model.critic_output(dict(zip(normalized, piece))) for piece in pieces])

    def gradient(self, rows: Rows, policy_loss: PolicyLoss, value_loss: ValueLoss) -> Sums:
        with torch.enable_grad():
            params, value = self.model.outputs(rows.obs)
        policy = policy_loss(params.detach(), rows)
        d_value, error = value_loss(value.detach(), rows)
        torch.autograd.backward([params, value], [policy.d_params, d_value])
        _add_own(self.model, policy.d_own)
        return Sums(torch.cat([policy.stats, error.reshape(1)]), policy.ratio_error)


class FlatNets(Nets):
    """Actor and critic are two multi-layer perceptrons; parameters and gradients are the optimizer's vectors."""

    def __init__(self, model: ActorCritic, optimizer: FlatAdam) -> None:
        super().__init__(model)
        self.optimizer = optimizer
        self._activation = ACTIVATION_PASSES[model.activation]
        flat = optimizer.flat
        self.piece_rows = CPU_PIECE_ROWS if flat.device.type == "cpu" else None
        self._low = flat
        self._layers = [self._layers_of(net, self._low) for net in (model.actor, model.critic)]
        self._grads = [self._grads_of(net) for net in (model.actor, model.critic)]
        self._buffers: Dict[int, Buffers] = {}

    def params(self, obs: Obs, out: Tensor) -> None:
        model = self.model
        seen = _beside({name: model.normalize_group(name, obs[name]) for name in model.actor_groups})
        forward_pass(seen, self._layers[0], self._activation, self._buffer(0, len(seen)), out)

    def values(self, normalized: Obs, most_rows: int) -> Tensor:
        seen = _beside({name: normalized[name] for name in self.model.critic_groups})
        value = torch.empty(seen.shape[0], device=seen.device)
        for start, stop in even_pieces(len(seen), min(most_rows, self.piece_rows or most_rows)):
            value[start:stop].copy_(self._forward(1, seen[start:stop]).outputs[-1].squeeze(-1))
        return value

    def gradient(self, rows: Rows, policy_loss: PolicyLoss, value_loss: ValueLoss) -> Sums:
        stats: Optional[Tensor] = None
        worst: Optional[Tensor] = None
        for piece in pieces_of(rows, self.piece_rows):
            kept = self._forward(0, _beside({name: piece.obs[name] for name in self.model.actor_groups}))
            policy = policy_loss(kept.outputs[-1], piece)
            self._backward(0, policy.d_params, kept)
            kept = self._forward(1, _beside({name: piece.obs[name] for name in self.model.critic_groups}))
            d_value, error = value_loss(kept.outputs[-1].squeeze(-1), piece)
            self._backward(1, d_value.unsqueeze(-1), kept)
            _add_own(self.model, policy.d_own)
            found = torch.cat([policy.stats, error.reshape(1)])
            stats = found if stats is None else stats + found
            worst = policy.ratio_error if worst is None else torch.maximum(worst, policy.ratio_error)
        assert stats is not None
        assert worst is not None
        return Sums(stats, worst)

    # -- passes --------------------------------------------------------------------------------------------------
    def _forward(self, net: int, seen: Tensor) -> Any:
        return forward_pass(seen, self._layers[net], self._activation, self._buffer(net, len(seen)))

    def _backward(self, net: int, d: Tensor, kept: Any) -> None:
        backward_pass(d, kept, self._layers[net], self._activation, self._grads[net], self._buffer(net, len(d)))

    def _buffer(self, net: int, rows: int) -> Any:
        buffers = self._buffers.get(net)
        if buffers is None or buffers.rows < rows:
            sizes = [layer.weight.shape[0] for layer in self._layers[net]]
            flat = self._low
            buffers = Buffers(rows, sizes, flat.dtype, flat.device, self._activation.keeps_input)
            self._buffers[net] = buffers
        return buffers.views(rows)

    def _layers_of(self, net: nn.Module, vector: Tensor) -> List[Layer]:
        found = []
        for linear in linear_layers(net):
            weight = self.optimizer.view(vector, linear.weight)
            found.append(Layer(weight, weight.t(), self.optimizer.view(vector, linear.bias)))
        return found

    def _grads_of(self, net: nn.Module) -> List[Grads]:
        grad = self.optimizer.grad
        view = self.optimizer.view
        return [Grads(view(grad, linear.weight), view(grad, linear.bias)) for linear in linear_layers(net)]


def make_nets(model: ActorCritic, optimizer: FlatAdam) -> Nets:
    """The faster of the two that `model` allows."""
    return ModuleNets(model) if model.images or model.shares_trunk else FlatNets(model, optimizer)


def pieces_of(rows: Rows, most: Optional[int]) -> List[Rows]:
    """`rows` in as few pieces of at most `most` rows as it takes; views."""
    if most is None or len(rows.weight) <= most:
        return [rows]
    return [
        Rows({name: x[start:stop] for name, x in rows.obs.items()}, *(x[start:stop] for x in rows[1:]))
        for start, stop in even_pieces(len(rows.weight), most)
    ]


def _add_own(model: ActorCritic, d_own: Optional[Tensor]) -> None:
    own = model.head.own_parameter
    if d_own is not None and own is not None and own.grad is not None:
        own.grad.add_(d_own)


def _beside(groups: Obs) -> Tensor:
    """[B, O] of each group -> one row."""
    parts: Sequence[Tensor] = list(groups.values())
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
