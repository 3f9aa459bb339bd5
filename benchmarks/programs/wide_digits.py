"""What exact.py trains."""

from __future__ import annotations

from torch import nn

from raytrain_ddp.tasks.image_classification import ImageClassification


class WideDigits(ImageClassification):
    """The bundled digits, with an MLP of 25.2 M parameters. It sends as much as a ResNet-50, with a
    hundredth of the arithmetic."""

    def model(self) -> nn.Module:
        return wide_mlp(len(self.class_names))


def wide_mlp(classes: int) -> nn.Module:
    """An MLP for images, (n, 3, 8, 8) -> (n, classes)."""
    width = 3500
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * 8 * 8, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )
