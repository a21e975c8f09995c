"""Forward and backward passes of multi-layer perceptrons, written out.

Autograd would record some forty operations a layer and allocate every intermediate anew; here a pass is one or two
operations a layer, into buffers that are kept. Rows go through in pieces that stay in a CPU's cache. Nothing here reads
from the device. Shapes: B rows, sizes of a layer [out, in] as torch.nn.Linear has them.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

aten: Any = torch.ops.aten


class Activation(NamedTuple):
    """A pointwise function, in place, and its backward pass."""

    forward_: Callable[[Tensor], Tensor]
    """In place: z [B, out] -> h."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of h, what was kept) -> gradient of z."""
    backward_: Callable[[Tensor, Tensor], Tensor]
    """The same, into the gradient's own memory."""
    keeps_input: bool = False
    """Whether the backward pass needs z; else it needs h."""


ACTIVATION_PASSES: Dict[str, Activation] = {
    "elu": Activation(
        functional.elu_,
        lambda d, h: aten.elu_backward.default(d, 1.0, 1.0, 1.0, True, h),
        lambda d, h: aten.elu_backward.grad_input(d, 1.0, 1.0, 1.0, True, h, grad_input=d),
    ),
    "relu": Activation(
        torch.relu_,
        lambda d, h: aten.threshold_backward.default(d, h, 0.0),
        lambda d, h: aten.threshold_backward.grad_input(d, h, 0.0, grad_input=d),
    ),
    "tanh": Activation(
        torch.tanh_,
        lambda d, h: aten.tanh_backward.default(d, h),
        lambda d, h: aten.tanh_backward.grad_input(d, h, grad_input=d),
    ),
    "silu": Activation(
        lambda z: functional.silu(z, inplace=True),
        lambda d, z: aten.silu_backward.default(d, z),
        lambda d, z: aten.silu_backward.grad_input(d, z, grad_input=d),
        keeps_input=True,
    ),
    "gelu": Activation(
        lambda z: aten.gelu_.default(z),
        lambda d, z: aten.gelu_backward.default(d, z),
        lambda d, z: aten.gelu_backward.grad_input(d, z, grad_input=d),
        keeps_input=True,
    ),
}
"""By the name in the settings. The overloads are named one by one: to find them costs as much as the operation does."""


class Layer(NamedTuple):
    """One linear layer. The same tensors for as long as the net lives; an optimizer writes them in place."""

    weight: Tensor
    weight_t: Tensor
    bias: Tensor


class Grads(NamedTuple):
    """Where a layer's gradients are added up; float32."""

    weight: Tensor
    bias: Tensor


class Buffers:
    """Memory for one net's passes over at most `rows` rows."""

    def __init__(self, rows: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, keeps_input: bool):
        """`sizes`: of every layer's output."""
        self.rows = rows

        def like(size: int) -> Tensor:
            return torch.empty(rows, size, dtype=dtype, device=device)

        self._outputs = [like(size) for size in sizes]
        self._inputs = [like(size) for size in sizes[:-1]] if keeps_input else []
        widest = max(sizes[:-1], default=1)
        self._gradients = (like(widest), like(widest))
        self._views: Dict[int, BufferViews] = {}

    def views(self, rows: int) -> BufferViews:
        """The first `rows` rows of everything, made once for each number of rows."""
        if rows not in self._views:
            gradients = []
            for index, x in enumerate(self._outputs[:-1]):
                flat = self._gradients[index % 2].view(-1)[: rows * x.shape[1]]
                gradients.append(flat.view(rows, x.shape[1]))
            self._views[rows] = BufferViews(
                [x[:rows] for x in self._outputs],
                [x[:rows] for x in self._inputs],
                gradients,
                [x.t() for x in gradients],
                torch.ones_like(self._outputs[0][:rows, 0]),
            )
        return self._views[rows]


class BufferViews(NamedTuple):
    outputs: List[Tensor]
    inputs: List[Tensor]
    gradients: List[Tensor]
    gradients_t: List[Tensor]
    ones: Tensor
    """[B]; sums over rows as a product with it are the fastest."""


class Kept(NamedTuple):
    """What a forward pass leaves for the backward pass."""

    x: Tensor
    outputs: List[Tensor]
    """Of every layer, after its activation; the last is the net's."""
    inputs: List[Tensor]
    """What went into the activations, where they need it."""


def forward_pass(
    x: Tensor,
    layers: Sequence[Layer],
    activation: Activation,
    buffers: Optional[BufferViews],
    out: Optional[Tensor] = None,
) -> Kept:
    """`x` [B, in] through all `layers`, an activation between them. Without buffers every result is a new tensor; `out`
    takes the last one in the buffer's place."""
    outputs: List[Tensor] = []
    inputs: List[Tensor] = []
    h, last = x, len(layers) - 1
    for index, layer in enumerate(layers):
        if buffers is None:
            h = torch.addmm(layer.bias, h, layer.weight_t)
        else:
            place = out if out is not None and index == last else buffers.outputs[index]
            h = torch.addmm(layer.bias, h, layer.weight_t, out=place)
        if index < last:
            if activation.keeps_input:
                inputs.append(h.clone() if buffers is None else buffers.inputs[index].copy_(h))
            activation.forward_(h)
        outputs.append(h)
    return Kept(x, outputs, inputs)


def backward_pass(
    d: Tensor, kept: Kept, layers: Sequence[Layer], activation: Activation, grads: Sequence[Grads], buffers: BufferViews
) -> None:
    """Add the gradients of all layers to `grads`, given that of the net's output `d` [B, out]."""
    d_t, exact = d.t(), d.dtype == grads[0].weight.dtype
    for index in range(len(layers) - 1, -1, -1):
        below = kept.outputs[index - 1] if index else kept.x
        if exact:
            grads[index].weight.addmm_(d_t, below)
            grads[index].bias.addmv_(d_t, buffers.ones)
        else:
            grads[index].weight.add_(torch.mm(d_t, below))
            grads[index].bias.add_(torch.mv(d_t, buffers.ones))
        if index:
            saved = kept.inputs[index - 1] if activation.keeps_input else below
            d = torch.mm(d, layers[index].weight, out=buffers.gradients[index - 1])
            d = activation.backward_(d, saved)
            d_t = buffers.gradients_t[index - 1]


def gradients_of(d: Tensor, kept: Kept, layers: Sequence[Layer], activation: Activation) -> List[Tensor]:
    """What `backward_pass` adds, as new tensors [weight, bias, weight, bias, ...] of `d`'s dtype: for a compiler, which
    plans memory by itself."""
    found: List[Tensor] = []
    for index in range(len(layers) - 1, -1, -1):
        below = kept.outputs[index - 1] if index else kept.x
        found = [torch.mm(d.t(), below), d.sum(0), *found]
        if index:
            saved = kept.inputs[index - 1] if activation.keeps_input else below
            d = activation.backward(torch.mm(d, layers[index].weight), saved)
    return found


def linear_layers(net: nn.Module) -> List[nn.Linear]:
    """The linear layers of an `mlp`, first to last."""
    return [module for module in net.children() if isinstance(module, nn.Linear)]


def even_pieces(rows: int, most: int) -> List[Tuple[int, int]]:
    """(start, stop) of as few pieces as hold `rows` rows at `most` each; their sizes differ by at most one."""
    parts = max(1, -(-rows // most))
    edges = [rows * i // parts for i in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:]))
