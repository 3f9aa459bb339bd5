"""A small convolutional network with batch norm, for 8 x 8 digits."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Three convolution stages, global average pooling, a linear head."""

    def __init__(self, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _stage(3, 32), _stage(32, 64), nn.MaxPool2d(2), _stage(64, 128)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:  # (n, 3, 8, 8) -> (n, classes)
        features = self.features(images).mean(dim=(2, 3))  # (n, 128)
        logits: Tensor = self.head(self.dropout(features))
        return logits


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(outputs),
            relu=nn.ReLU(),
        )
    )
