"""Digests of task objects of one class, so that each fold of a cross-validation has its own run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TinyTask
from torch import nn
from torch.utils.data import Subset

from raytrain_ddp import (
    ArraySource,
    CheckpointConfig,
    FitResult,
    LogConfig,
    TrainConfig,
    fit_locally,
)
from raytrain_ddp.config.task_state import state_digest
from raytrain_ddp.errors import ConfigError


class Place:
    def __init__(self, k: int) -> None:
        self.k, self.own = k, self


@dataclass(slots=True)
class Slotted:
    k: int


class Color(Enum):
    RED, BLUE, GREEN, WHITE = range(4)


class Fold(TinyTask):
    """A fold of a cross-validation.

    Args:
        kind: how it differs from the others.
    """

    def __init__(self, k: int, kind: str = "number") -> None:
        super().__init__(TrainConfig())
        rows = np.arange(20) % 5 == k
        held: dict[str, Any] = {
            "number": k,
            "array": np.arange(20)[rows],
            "tensor": torch.arange(20)[rows],
            "subset": Subset(range(20), [k]),  # type: ignore[arg-type]
            "source": ArraySource({"x": np.arange(20)[rows]}),
            "set": {"a", str(k)},
            "path": Path("folds") / str(k),
            "namespace": SimpleNamespace(k=k),
            "frame": pd.DataFrame({"x": np.arange(20)[rows]}),
            "text": pd.Series([f"a{k}"]),
            "objects": np.array([{"k": k}, Place(k)], dtype=object),
            "keys": {Fold: k, local_fold: 1, Place(3): 2},
            "bf16": torch.tensor([float(k)], dtype=torch.bfloat16),
            "values": deque([range(k), slice(k), date(2026, 1, 1 + k), Decimal(k), bytearray([k])]),
            "slots": Slotted(k),
            "enum": Color(k),
        }
        self.held, self.net, self.lock = held[kind], nn.Linear(2, 2), threading.Lock()


KINDS = ["number", "array", "tensor", "subset", "source", "set", "path", "namespace"]
if importlib.util.find_spec("ml_dtypes"):  # registers bfloat16 with NumPy, as ONNX does
    import ml_dtypes  # noqa: F401
KINDS += ["frame", "text", "objects", "keys", "bf16", "values", "slots", "enum"]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_with_different_contents_have_different_digests(kind: str):
    names = [TrainConfig(task=Fold(k, kind)).task for k in (0, 1, 0)]
    assert names[0] == names[2] != names[1]


def local_fold(k: int) -> type[TinyTask]:
    class Local(TinyTask):
        def __init__(self, config: TrainConfig) -> None:
            super().__init__(config, rows=k)

    return Local


def local_property(k: int) -> type[TinyTask]:
    class Local(TinyTask):
        width = k

        @property
        def fold(self) -> int:
            return k

    return Local


class ModuleTask(nn.Module, TinyTask):  # type: ignore[misc]
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.layer = k, nn.Linear(2, 2)


def test_objects_with_mutual_references_are_visited_once():
    places = [Place(number) for number in range(60)]
    for place in places:
        place.own = places  # type: ignore[assignment]
    assert state_digest(places[0]) != state_digest(places[1])


@pytest.mark.parametrize(
    "made",
    [
        lambda k: lambda: Fold(k),
        lambda k: lambda config, k=k: Fold(k),
        lambda k: partial(Fold, k),
        local_fold,
        lambda k: Fold(k).model,
        lambda k: (lambda: Fold(0), lambda: Fold(1))[k],
        local_property,
        ModuleTask,
    ],
)
def test_functions_with_different_contents_have_different_digests(made: Callable[[int], Any]):
    names = [TrainConfig(task=made(k)).task for k in (0, 1, 0)]
    assert names[0] == names[2] != names[1]


DIGESTS = "from test_task_state import *; print(*map(name_of, KINDS))"


def name_of(kind: str) -> str:
    return TrainConfig(task=Fold(3, kind)).task


def test_an_objects_digest_is_the_same_in_another_process_and_after_training(tmp_path: Path):
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {DIGESTS}"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert said.split() == [*map(name_of, KINDS)]
    task = Fold(1)
    first = TrainConfig(task=task)
    task.held = task.step = 5  # type: ignore[attr-defined]
    assert TrainConfig(task=task).task == first.task


def test_each_fold_of_a_cross_validation_is_a_separate_run(tmp_path: Path):
    def fold(k: int, **fields: Any) -> FitResult:
        changes = {"checkpoint": CheckpointConfig(every_s=0), "log": LogConfig(tensorboard=False)}
        task = Sized(k)
        made = TrainConfig(task=task, storage=str(tmp_path), epochs=1, **changes, **fields)
        return fit_locally(made)

    paths = [Path(fold(k).path).name for k in (0, 1, 0, 1)]
    assert paths == ["Sized", "Sized-2", "Sized", "Sized-2"]
    fold(0, name="cv")
    with pytest.raises(ConfigError, match=r"run cv is at step .*\n +task +'.*:Sized\(.*\)' -> "):
        fold(1, name="cv")


class Sized(TinyTask):
    def __init__(self, k: int) -> None:
        super().__init__(TrainConfig(), rows=64 + k)
