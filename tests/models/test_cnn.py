"""The convolutional network: sizes by hand, scaling, and images that do not fit."""

import pytest
import torch

from rl_stagger.models.actor_critic import ModelConfig
from rl_stagger.models.cnn import CNNConfig, ImageEncoder, conv_size

TINY = CNNConfig((2,), (2,), (1,), 3)


@pytest.mark.parametrize(
    "edge, kernel, stride, after",
    [
        (84, 8, 4, 20),
        (20, 4, 2, 9),
        (9, 3, 1, 7),
        (8, 8, 4, 1),
        (11, 8, 4, 1),
        (12, 8, 4, 2),
        (7, 8, 4, 0),
        (3, 8, 1, 0),
    ],
)
def test_conv_size(edge, kernel, stride, after):
    # (edge - kernel) // stride + 1: 84 -> 20 -> 9 -> 7 are Mnih et al.'s
    assert conv_size(edge, edge, kernel, stride) == (after, after)
    if after:
        got = torch.nn.Conv2d(1, 1, kernel, stride)(torch.zeros(1, 1, edge, edge + 1)).shape[2:]
        assert tuple(got) == conv_size(edge, edge + 1, kernel, stride)


def test_the_defaults_are_the_nature_networks_convolutions():
    net = ImageEncoder("policy", (4, 84, 84), CNNConfig(), True).net
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (256, 64 * 7 * 7)]


def test_by_hand():
    # One kernel of ones over a 2 x 2 image: its sum; ReLU; times 2, minus 1; ReLU.
    encoder = ImageEncoder("policy", (1, 2, 2), CNNConfig((1,), (2,), (1,), 1), True)
    with torch.no_grad():
        for layer, weight, bias in ((encoder.net[0], 1.0, 0.0), (encoder.net[3], 2.0, -1.0)):
            layer.weight.fill_(weight)
            layer.bias.fill_(bias)
    image = torch.tensor([[0, 51], [102, 102]], dtype=torch.uint8).view(1, 1, 2, 2)  # 0, .2, .4, .4: together 1
    torch.testing.assert_close(encoder(image), torch.tensor([[1.0]]))
    as_floats = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).view(1, 1, 2, 2)
    torch.testing.assert_close(encoder(as_floats), torch.tensor([[3.0]]), msg="floats are taken as they are")
    torch.testing.assert_close(encoder(-as_floats), torch.tensor([[0.0]]))


def test_leading_dimensions_stay():
    encoder = ImageEncoder("policy", (3, 5, 6), TINY, True)
    image = torch.randint(0, 256, (4, 7, 3, 5, 6), dtype=torch.uint8)
    together = encoder(image)
    assert tuple(together.shape) == (4, 7, 3)
    torch.testing.assert_close(together[2, 3], encoder(image[2, 3:4])[0])


@pytest.mark.parametrize(
    "shape, match",
    [
        ((3, 35, 90), r"image 'policy/camera' \[3, 35, 90\].*nothing is left after layer 3"),
        ((3, 7, 7), r"after layer 1; what fits is e.g. .*kernels=\[3\] model.cnn.strides=\[1\]"),
        ((1, 2, 9), r"kernels=\[2\]"),
        ((64, 64, 3), r"It looks like \(H, W, C\): the task must give channels first"),
    ],
)
def test_an_image_that_is_too_small_is_told_what_fits(shape, match):
    with pytest.raises(ValueError, match=match):
        ImageEncoder("policy/camera", shape, CNNConfig(), True)


def test_what_the_error_proposes_does_fit():
    for edge in (1, 2, 3, 7):
        kernel = min(3, edge)
        ImageEncoder("policy", (3, edge, edge), CNNConfig((16,), (kernel,), (1,)), True)
    ImageEncoder("policy", (3, 36, 36), CNNConfig(), True)


@pytest.mark.parametrize(
    "config, field",
    [
        (CNNConfig(()), "cnn.channels"),
        (CNNConfig(kernels=(8, 4)), "cnn.kernels"),
        (CNNConfig(strides=(4, 2, 1, 1)), "cnn.strides"),
        (CNNConfig(strides=(4, 0, 1)), "cnn.strides"),
        (CNNConfig(features=0), "cnn.features"),
    ],
)
def test_settings_that_cannot_work(config, field):
    assert next(name for name, _, _ in ModelConfig(cnn=config).check()) == field
    assert ModelConfig(cnn=CNNConfig()).check() == []
