"""Rows of the table of errors: models, weights, targets, losses, tasks."""

from __future__ import annotations

from refused import Row

TIMM = "--model.name timm:"
OWN = {
    "own.py": "from torch import nn\n\ndef make(classes):\n    return nn.Linear(4, classes)\n\n"
    "def wrong(classes):\n    return classes\n"
}
ENDS = {"own.py": "import sys\nsys.exit('usage')\nclass Mine: pass\n"}
SEES = {
    "own.py": "import sys\nfrom raytrain_ddp import errors\n"
    "raise errors.DataError(f'arguments-{len(sys.argv)}')\nclass Mine: pass\n"
}
PACKAGE = {"base.py": "class Mine: ...\n", "own.py": "from .base import Mine\n"}
ROWS = [
    Row(TIMM + "convnext_tny", 2, "model.name 'timm:convnext_tiny'"),
    Row(TIMM + "convnext_tiny.fb_in22kk", 2, "model.name 'fb_in22k'"),
    Row("--model.name nowhere:make", 2, "model.name 'nowhere'", light=True),
    Row("--model.name nowhere.py:make", 2, "model.name nowhere.py", light=True),
    Row("--model.name own.py:mak", 2, "model.name 'mak' 'make'", OWN, light=True),
    Row("--model.name own.py:wrong --dry-run", 2, "model.name int torch.nn.Module", OWN),
    Row("--model.name own.py:make --model.args depth 3 --dry-run", 2, "model.args 'depth'", OWN),
    Row("--model.name resnet18 --model.args num_classes 3 --dry-run", 2, "model.args num_classes"),
    Row(TIMM + "test_resnet --model.args foo 1 --dry-run", 2, "model.args 'foo'"),
    Row("--model.weights DEFAULT", 2, "model.weights digits-cnn", light=True),
    Row("--model.name resnet18 --model.weights IMAGENET1K_V2", 2, "model.weights IMAGENET1K_V1"),
    Row("--model.name resnet50 --model.weights mine.pth", 2, "model.weights mine.pth"),
    Row(TIMM + "test_resnet --model.weights r16", 2, "model.weights r160_in1k"),
    Row("--loss.name mse", 2, "loss.name 'mse' data.target", light=True),
    Row("--loss.name focal --data.target-columns a b", 2, "loss.name 'focal'", light=True),
    Row("--data.target-columns a b", 2, "loss.name 'cross-entropy' bce", light=True),
    Row("--loss.name mse --data.target-columns a a", 2, "data.target_columns", light=True),
    Row("--task own.py:Mine", 1, "task own.py", ENDS),
    Row("--task own.py:Mine --epochs 2 --dry-run", 4, "arguments-1", SEES),
    Row("--task own.py:Mine", 2, "task own:Mine", PACKAGE),
]
