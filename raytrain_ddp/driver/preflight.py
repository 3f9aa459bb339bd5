"""Checks a config before anything is started. Imports neither torch nor Ray."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import forget_storages, newest_manifest, run_storage
from raytrain_ddp.config.field_types import value_of
from raytrain_ddp.config.recipe import absolute_path, fields_of, flat, with_paths
from raytrain_ddp.config.sections import TORCHVISION_ROOT, DataConfig, ModelConfig
from raytrain_ddp.config.train_config import TaskName, TrainConfig
from raytrain_ddp.data.discovery.data_check import locate
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.data.torchvision_datasets import torchvision_class
from raytrain_ddp.errors import ConfigError, PreflightError, UnreachableError, with_backoff
from raytrain_ddp.tasks.model_zoo import check_weights
from raytrain_ddp.tasks.task import OwnLoop
from raytrain_ddp.tasks.task_loading import BUILT_IN, check_task_name
from raytrain_ddp.uri import reason_of, without_secrets

T = TypeVar("T")


def check(config: TrainConfig) -> TrainConfig:
    """Returns the config with absolute paths, which mean the same in each worker and later.

    Raises:
        ConfigError: the task or model does not exist, or torch's defaults were changed.
        DataError: the data does not exist, or cannot be read.
        PreflightError: a package that the log needs is not installed.
    """
    if not isinstance(config, TrainConfig):  # from Python
        raise ConfigError(f"fit takes a TrainConfig, not a {type(config).__name__}.")
    forget_storages()
    if torch := sys.modules.get("torch"):
        defaults = {"dtype": "torch.float32", "device": "cpu"}
        for name, other in defaults.items():
            if str(found := getattr(torch, f"get_default_{name}")()) != other:
                raise ConfigError(
                    f"torch's default {name} is {found} here, but {other} in other workers. Call "
                    f"torch.set_default_{name}({other if name == 'dtype' else repr(other)})."
                )
    for name, is_wanted in (("wandb", config.log.wandb), ("mlflow", config.log.mlflow)):
        if is_wanted and importlib.util.find_spec(name) is None:
            raise PreflightError(
                f"log.{name}: the package is not installed: pip install 'raytrain_ddp[{name}]'."
            )
    check_task_name(config.task)
    sources = {config.data.source, config.data.eval_source or config.data.source}
    for name in sorted(each for each in sources if each.startswith("torchvision:")):
        torchvision_class(name.partition(":")[2])
    if config.task in BUILT_IN:
        model = check_weights(config.model, config.storage, lambda: _is_begun(config))
        config = replace(config, data=_with_classes(config), model=model)
    if config.data.root is None and all(each.startswith("torchvision:") for each in sources):
        config = replace(config, data=replace(config.data, root=TORCHVISION_ROOT))
    return with_paths(config, absolute_path)


def _is_begun(config: TrainConfig) -> bool:
    """Whether the run has a checkpoint, and no longer needs the weights that it started from."""
    if config.name is None:
        return False
    return answered(config, lambda: newest_manifest(run_storage(config))) is not None


def fingerprints(config: TrainConfig) -> tuple[str, str]:
    """Returns the fingerprints of the training and evaluation sets of a built-in task, as a
    checkpoint records them. The second is empty without evaluation data. Torchvision's data sets
    need torch.
    """
    splits = open_splits(config.data, locate(config.data), binary=config.loss.name == "bce")
    splits.close()
    return splits.train.fingerprint(), splits.eval.fingerprint() if splits.eval else ""


def _with_classes(config: TrainConfig) -> DataConfig:
    """The data config with the class names, so that all workers and later resumes use the same
    ones. For torchvision sets, which need torch, the workers determine them."""
    data, found = config.data, locate(config.data)
    if any(
        split is not None and split.kind == "torchvision" for split in (found.train, found.eval)
    ):
        return data
    # Reads lists of files and footers, and labels if necessary.
    splits = open_splits(data, found, binary=config.loss.name == "bce")
    splits.close()
    names = tuple(splits.class_names)
    return data if names == data.target_columns else replace(data, classes=names)


def try_model(config: TrainConfig, is_new: bool) -> None:
    """Builds the model of a built-in task and its parameter groups in this process, so that what
    does not fit is reported, and weights are downloaded, before workers are taken.

    Loads torch, as Ray Train does later anyway, but not for a model with nothing to refuse.

    Args:
        is_new: there is no checkpoint yet, so the model starts from its weights.

    Raises:
        ConfigError, PreflightError, CheckpointError: as `begun_model`, `freeze`, `param_groups`.
    """
    optim, plain = config.optim, ModelConfig(config.model.name, dropout=config.model.dropout)
    touched = optim.groups or optim.head_lr is not None or optim.layer_decay != 1
    if ":" not in config.model.name and config.model == plain and not touched:
        return
    from raytrain_ddp.tasks.model_parts import freeze
    from raytrain_ddp.tasks.model_zoo import begun_model
    from raytrain_ddp.training.optimizer.task_optimizer import param_groups

    # The number of classes of torchvision's data sets is unknown here.
    classes = len(config.data.classes or config.data.target_columns or range(10))
    model, _ = begun_model(config.model, classes, load=is_new)
    freeze(model, config.model.freeze)
    param_groups(model, optim)


def answered(config: TrainConfig, ask: Callable[[], T]) -> T:
    """The result of `ask`, which queries the storage; retried a few times if that may help.

    Raises:
        PreflightError: the storage cannot be read.
    """

    def pause(wait_s: float, error: OSError) -> bool:
        if isinstance(error, UnreachableError):  # one that was tried for long enough
            return False
        time.sleep(wait_s)
        return True

    try:
        return with_backoff(lambda _: ask(), pause)
    except UnreachableError:
        raise
    except OSError as error:
        raise PreflightError(
            f"storage = {without_secrets(config.storage)}: it cannot be read: "
            f"{reason_of(config.storage, error)}. Fix it, then run the same command again."
        ) from None


def is_complete(config: TrainConfig, manifest: Manifest | None) -> bool:
    """Whether nothing is left to do; with more epochs than before, something is, and with another
    rule for the end, something may be; only a loop of one's own knows how long it is."""
    is_own = isinstance(config.task, TaskName) and isinstance(config.task.target, OwnLoop)
    if manifest is None or not manifest.finished or is_own:
        return False
    then = {**flat(TrainConfig()), **dict(fields_of(manifest.config))}
    rules = ("steps", "max_time", "stop.patience", "stop.min_delta")
    same = all(value_of(config, name) == then[name] for name in rules)
    return same and config.epochs <= int(then["epochs"])
