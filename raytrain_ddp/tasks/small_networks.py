"""Networks for small images, as the sources of the recipes mnist and cifar10 have them."""

from __future__ import annotations

from torch import nn


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
