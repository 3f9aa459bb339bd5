"""A small convolutional network with batch norm, for 8 x 8 digits."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Four convolution blocks, global average pooling, a linear head; 0.13 M parameters."""

    def __init__(self, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _block(3, 32, stride=1),
            _block(32, 64, stride=1),
            _block(64, 64, stride=2),
            _block(64, 128, stride=2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:  # (n, 3, 8, 8) -> (n, classes)
        features = self.features(images).mean(dim=(2, 3))  # (n, 128)
        logits: Tensor = self.head(self.dropout(features))
        return logits


def _block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
