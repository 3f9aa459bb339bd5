"""Distributed PyTorch training on Ray whose result does not depend on what happened to the run.

    from raytrain_ddp import TrainConfig, fit
    result = fit(TrainConfig(epochs=3))

Names are imported when first used: ``import raytrain_ddp`` loads neither torch nor Ray.
"""

from __future__ import annotations

import sys
from importlib import import_module

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].startswith(__name__):  # a command
    from raytrain_ddp.library_imports import protect

    protect()
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrain_ddp.config.sections import AugmentConfig as AugmentConfig
    from raytrain_ddp.config.sections import CheckpointConfig as CheckpointConfig
    from raytrain_ddp.config.sections import ComputeConfig as ComputeConfig
    from raytrain_ddp.config.sections import DataConfig as DataConfig
    from raytrain_ddp.config.sections import DdpConfig as DdpConfig
    from raytrain_ddp.config.sections import EmaConfig as EmaConfig
    from raytrain_ddp.config.sections import EvalConfig as EvalConfig
    from raytrain_ddp.config.sections import LogConfig as LogConfig
    from raytrain_ddp.config.sections import LossConfig as LossConfig
    from raytrain_ddp.config.sections import ModelConfig as ModelConfig
    from raytrain_ddp.config.sections import OptimConfig as OptimConfig
    from raytrain_ddp.config.sections import ScalingConfig as ScalingConfig
    from raytrain_ddp.config.sections import ScheduleConfig as ScheduleConfig
    from raytrain_ddp.config.sections import StopConfig as StopConfig
    from raytrain_ddp.config.train_config import TrainConfig as TrainConfig
    from raytrain_ddp.data.batch_sampler import BatchSampler as BatchSampler
    from raytrain_ddp.data.loading.sources import ArraySource as ArraySource
    from raytrain_ddp.data.loading.sources import Data as Data
    from raytrain_ddp.data.loading.sources import IterableSource as IterableSource
    from raytrain_ddp.data.loading.sources import MapSource as MapSource
    from raytrain_ddp.data.loading.sources import Source as Source
    from raytrain_ddp.data.order import Draws as Draws
    from raytrain_ddp.driver.result import FitResult as FitResult
    from raytrain_ddp.errors import RaytrainError as RaytrainError
    from raytrain_ddp.fit import fit as fit
    from raytrain_ddp.fit import fit_locally as fit_locally
    from raytrain_ddp.fit import launch as launch
    from raytrain_ddp.tasks.task import Task as Task
    from raytrain_ddp.tools.inference.loaded_model import load as load
    from raytrain_ddp.tools.report.write import plot as plot
    from raytrain_ddp.tools.report.write import report as report
    from raytrain_ddp.training.own_run import OwnRun as OwnRun

_NAMES = {  # module -> what it offers
    "config.sections": "AugmentConfig CheckpointConfig ComputeConfig DataConfig DdpConfig "
    "EmaConfig EvalConfig LogConfig LossConfig ModelConfig OptimConfig ScalingConfig "
    "ScheduleConfig StopConfig",
    "config.train_config": "TrainConfig",
    "data.loading.sources": "ArraySource Data IterableSource MapSource Source",
    "data.batch_sampler": "BatchSampler",
    "data.order": "Draws",
    "driver.result": "FitResult",
    "errors": "RaytrainError",
    "fit": "fit fit_locally launch",
    "tasks.task": "Task",
    "tools.inference.loaded_model": "load",
    "tools.report.write": "plot report",
    "training.own_run": "OwnRun",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOMES]  # noqa: PLE0604  (strings, kept in one place with their homes)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
