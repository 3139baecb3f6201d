"""Networks of the accuracy workloads, and the way from stored images to their input."""

from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Model", "Residual", "cropped", "plain", "shifted"]


class Model(nn.Module):
    """A body and a linear head; with `half` the body computes in bfloat16 where torch's autocast allows it."""

    def __init__(self, body: nn.Sequential, width: int, classes: int, half: bool = False) -> None:
        super().__init__()
        self.body = body
        self.head: torch.nn.Linear = nn.Linear(width, classes)
        self.half_precision = half
        # Images are stored with their channels last; convolutions in that order take half the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no overload for it

    def features(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the last layer."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half_precision):
            found: Tensor = self.body(inputs)
        return found.float()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.features(inputs))
        return logits


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut.extend([nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum, rectified."""
        total: Tensor = self.inner(inputs) + self.shortcut(inputs)
        return total.relu()


def dense(shape: tuple[int, ...], classes: int, width: int, half: bool) -> Model:
    """Return two hidden layers of 25 times `width`: 400 at the default width."""
    inputs, hidden = shape[0] * shape[1], 25 * width
    body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return Model(body, hidden, classes, half)


def convolutions(shape: tuple[int, ...], classes: int, width: int, half: bool) -> Model:
    """Return three convolutions of 1.5, 3 and 6 times `width`: 24, 48 and 96 channels at the default width."""
    channels = [shape[2] if len(shape) > 2 else 1, 3 * width // 2, 3 * width, 6 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return Model(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()), 4 * channels[-1], classes, half)


def resnet(shape: tuple[int, ...], classes: int, width: int, half: bool) -> Model:
    """Return ResNet-18 in its CIFAR form: a 3 x 3 stem without pooling, and `width` channels in the first stage.

    The published form has a width of 64.
    """
    first = nn.Conv2d(shape[2] if len(shape) > 2 else 1, width, 3, 1, 1, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    for before, after, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)):
        layers += [Residual(before * width, after * width, stride), Residual(after * width, after * width, 1)]
    return Model(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8 * width, classes, half)


MODELS = {"dense": dense, "convolutions": convolutions, "resnet": resnet}
"""Each makes a network from the shape of a stored image, the classes, a width, and whether it computes in bfloat16."""


def plain(images: Tensor) -> Tensor:
    """Return stored images as input: channels first, 0 to 1 shifted to about -1 to 1."""
    floats = images.float().div_(127.5).sub_(1)
    return floats.permute(0, 3, 1, 2) if images.ndim == 4 else floats[:, None]


def shifted(images: Tensor) -> Tensor:
    """Return the same, each batch moved by up to 4 pixels."""
    inputs = plain(images)
    down, right = (int(shift) for shift in torch.randint(-4, 5, (2,)))
    inputs = torch.roll(nn.functional.pad(inputs, (4, 4, 4, 4)), (down, right), (2, 3))[:, :, 4:-4, 4:-4]
    return inputs.contiguous(memory_format=torch.channels_last)


def cropped(images: Tensor) -> Tensor:
    """Return the same, and half of the images mirrored."""
    inputs = shifted(images)
    mirrored = torch.rand(len(inputs)) < 0.5
    inputs[mirrored] = inputs[mirrored].flip(3)
    return inputs
