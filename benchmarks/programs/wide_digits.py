"""What exact.py trains."""

from __future__ import annotations

from torch import nn

from raytrain_ddp.tasks.image_classification import ImageClassification


class WideDigits(ImageClassification):
    """The bundled digits, with an MLP of 25.2 M parameters: as much to send as a ResNet-50 has, and
    a hundredth of its arithmetic."""

    def model(self) -> nn.Module:
        return wide_mlp(len(self.class_names))


def wide_mlp(classes: int) -> nn.Module:
    """Of images (n, 3, 8, 8)."""
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
