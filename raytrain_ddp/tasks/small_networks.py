"""Networks for small images: for digits, and those of the sources of the recipes mnist and
cifar10."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """A network for 8 x 8 digits: four convolution blocks with batch norm, global average pooling,
    and a linear head; 0.13 M parameters."""

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


def mnist_cnn(classes: int) -> nn.Module:
    """Two convolutions and two linear layers with dropout, for 28 x 28 images; 1.2 M parameters.
    (Of the MNIST examples of Keras and of PyTorch.)"""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(128, classes)),
    )


def cifar_resnet18(classes: int) -> nn.Module:
    """torchvision's ResNet-18, but for 32 x 32 images: its first convolution is 3 x 3 and keeps
    the size, and no pooling follows; 11.2 M parameters."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]
