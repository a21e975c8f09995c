"""Images to features: a small convolutional network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Tuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class CNNConfig:
    """Convolutions without padding, each followed by ReLU, then one linear layer with ReLU. The defaults' convolutions
    are those of Mnih et al. 2015 (Nature 518, 529-533)."""

    channels: Tuple[int, ...] = (32, 64, 64)
    """Of each layer's output."""
    kernels: Tuple[int, ...] = (8, 4, 3)
    """Edge of each layer's kernel in pixels."""
    strides: Tuple[int, ...] = (4, 2, 1)
    features: int = 256
    """Numbers that an image becomes; they stand beside the vectors of the observation."""

    def check(self) -> List[Tuple[str, object, str]]:
        """(field, value, what is right) of every setting that cannot work."""
        faults: List[Tuple[str, object, str]] = []
        if not self.channels:
            faults.append(("channels", "[]", "at least one layer, e.g. [32,64,64]"))
        for name in ("kernels", "strides"):
            if len(getattr(self, name)) != len(self.channels):
                faults.append((name, list(getattr(self, name)), f"{len(self.channels)} numbers, as channels has"))
        for name in ("channels", "kernels", "strides"):
            if any(number < 1 for number in getattr(self, name)):
                faults.append((name, list(getattr(self, name)), "every number at least 1"))
        if self.features < 1:
            faults.append(("features", self.features, "at least 1, e.g. 256"))
        return faults


def conv_size(height: int, width: int, kernel: int, stride: int) -> Tuple[int, int]:
    """(height, width) after a convolution without padding; 0 where the kernel does not fit in."""
    return tuple(max(0, (edge - kernel) // stride + 1) for edge in (height, width))  # type: ignore[return-value]


class ImageEncoder(nn.Module):
    """One image [..., C, H, W] to [..., features]. uint8 is divided by 255 here and not before, so that what is stored
    stays small; floats are taken as they are."""

    def __init__(self, name: str, shape: Tuple[int, int, int], config: CNNConfig, orthogonal: bool) -> None:
        """`name` is the observation group's, for errors: ValueError for an image that the kernels do not fit in."""
        super().__init__()
        channels, height, width = shape
        layers: List[nn.Module] = []
        for index, (out, kernel, stride) in enumerate(zip(config.channels, config.kernels, config.strides)):
            layers += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU()]
            channels, (height, width) = out, conv_size(height, width, kernel, stride)
            if not height or not width:
                raise ValueError(_too_small(name, shape, config, index))
        layers += [nn.Flatten(), nn.Linear(channels * height * width, config.features), nn.ReLU()]
        self.net = nn.Sequential(*layers)
        if orthogonal:
            for layer in layers:
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    assert layer.bias is not None
                    nn.init.orthogonal_(layer.weight, math.sqrt(2.0))
                    nn.init.zeros_(layer.bias)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image / 255.0 if image.dtype == torch.uint8 else image.to(torch.float32)
        return self.net(pixels.flatten(0, -4)).unflatten(0, image.shape[:-3])


def _too_small(name: str, shape: Tuple[int, int, int], config: CNNConfig, layer: int) -> str:
    text = (
        f"image '{name}' {list(shape)} (C, H, W) is too small for model.cnn.kernels={list(config.kernels)} "
        f"model.cnn.strides={list(config.strides)}: nothing is left after layer {layer + 1}"
    )
    if shape[2] <= 4 < min(shape[:2]):
        return f"{text}. It looks like (H, W, C): the task must give channels first"
    kernel = min(3, *shape[1:])
    return f"{text}; what fits is e.g. model.cnn.channels=[16] model.cnn.kernels=[{kernel}] model.cnn.strides=[1]"
