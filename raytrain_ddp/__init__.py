"""Distributed PyTorch training on Ray whose result does not depend on what happened to the run.

    from raytrain_ddp import TrainConfig, fit
    result = fit(TrainConfig(epochs=3))

Names are imported when first used: ``import raytrain_ddp`` loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrain_ddp.config import TrainConfig as TrainConfig
    from raytrain_ddp.data.draws import Draws as Draws
    from raytrain_ddp.data.source import ArraySource as ArraySource
    from raytrain_ddp.data.source import Data as Data
    from raytrain_ddp.data.source import MapSource as MapSource
    from raytrain_ddp.data.source import Source as Source
    from raytrain_ddp.data.stream import IterableSource as IterableSource
    from raytrain_ddp.errors import RaytrainError as RaytrainError
    from raytrain_ddp.inputs import AugmentConfig as AugmentConfig
    from raytrain_ddp.inputs import DataConfig as DataConfig
    from raytrain_ddp.orchestration.driver import fit as fit
    from raytrain_ddp.orchestration.driver import fit_locally as fit_locally
    from raytrain_ddp.orchestration.result import FitResult as FitResult
    from raytrain_ddp.sections import CheckpointConfig as CheckpointConfig
    from raytrain_ddp.sections import ComputeConfig as ComputeConfig
    from raytrain_ddp.sections import DdpConfig as DdpConfig
    from raytrain_ddp.sections import EvalConfig as EvalConfig
    from raytrain_ddp.sections import LogConfig as LogConfig
    from raytrain_ddp.sections import ModelConfig as ModelConfig
    from raytrain_ddp.sections import OptimConfig as OptimConfig
    from raytrain_ddp.sections import ScalingConfig as ScalingConfig
    from raytrain_ddp.sections import ScheduleConfig as ScheduleConfig
    from raytrain_ddp.tasks.task import Task as Task

_HOMES = {
    "ArraySource": "data.source",
    "AugmentConfig": "inputs",
    "Data": "data.source",
    "DataConfig": "inputs",
    "Draws": "data.draws",
    "FitResult": "orchestration.result",
    "IterableSource": "data.stream",
    "MapSource": "data.source",
    "RaytrainError": "errors",
    "Source": "data.source",
    "Task": "tasks.task",
    "TrainConfig": "config",
    "fit": "orchestration.driver",
    "fit_locally": "orchestration.driver",
}
_HOMES |= dict.fromkeys(
    (
        "CheckpointConfig",
        "ComputeConfig",
        "DdpConfig",
        "EvalConfig",
        "LogConfig",
        "ModelConfig",
        "OptimConfig",
        "ScalingConfig",
        "ScheduleConfig",
    ),
    "sections",
)
__all__ = [*_HOMES]  # noqa: PLE0604  (strings, kept in one place with their homes)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
