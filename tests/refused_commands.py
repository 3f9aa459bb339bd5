"""Rows of the table of errors: names, recipes, flags."""

from __future__ import annotations

from pathlib import Path

from refused import Row

LONG = "a" * 300
ROWS = [
    Row("--epoch 3", 2, "--epochs", light=True),
    Row("--model.name resnet51", 2, "model.name 'resnet51' 'resnet50'", light=True),
    Row("--data.source nowhere/x", 4, "data.source nowhere/x", light=True),
    Row("bad.toml", 2, "bad.toml not valid TOML", {"bad.toml": "epochs = [\n"}, light=True),
    Row("wrong.toml", 2, "wrong.toml epoch 'epochs'", {"wrong.toml": "epoch = 3\n"}, light=True),
    Row("folder.toml", 2, "folder.toml digits", {"folder.toml": Path.mkdir}, light=True),
    Row("run --num-workers 1 " + LONG, 2, LONG),
]
