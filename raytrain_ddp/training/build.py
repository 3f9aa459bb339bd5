"""The parts of a run that follow from its config, each made when it is first needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp import user_code
from raytrain_ddp.checkpoint.run_folder import newest_manifest, run_storage
from raytrain_ddp.checkpoint.snapshot import unstorable
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config.field_types import require, value_of
from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.formats.labels import some_names, were_numbers
from raytrain_ddp.data.loading.loader import (
    LoaderThreads,
    TrainLoader,
    shuffle_for,
    start_processes,
    window_for,
)
from raytrain_ddp.data.loading.nested import to_device
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order import Plan
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tasks.model_parts import begin_training
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import (
    eval_data_of,
    loss_of_task,
    model_of,
    require_dense,
    train_data_of,
)
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.gradients.buffer_sync import own_memory
from raytrain_ddp.training.gradients.reduction import broadcast_model, require_same_model
from raytrain_ddp.training.optimizer.lr_schedule import LearningRates
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of
from raytrain_ddp.training.optimizer.weight_average import average_of
from raytrain_ddp.training.runtime.world import World, autocast, broadcast, seed_all, set_up
from raytrain_ddp.training.state.train_state import TrainState

if TYPE_CHECKING:
    from raytrain_ddp.training.steps.warm_up import WarmUp

_KEPT = ("reads", "task", "data", "eval_data", "identity", "model", "warmed_up", "is_begun")
_OF_EVALUATION = (
    *("stop.patience", "eval.every_steps", "eval.micro_batch"),
    *("limit_eval_batches", "data.eval_size", "data.eval_crop"),
)


class Build:
    """The parts of a run: task, data, plan, model, optimizer, state.

    A worker, a dry run, an evaluation and a search for the largest micro-batch use the parts that
    they need. When a process loses a peer, it keeps its Build, except for the parts that depend on
    the ranks.

    Args:
        world: the current world of this process.
        task: replaces the task that the config names.
        is_begun: the run's weights are not those of a new model: they will be loaded, or the model
            has been trained.

    Attributes:
        reads: the config fields that the task has read; None: unknown.
        warmed_up: the findings of the warm-up; None: the model is not warmed up yet.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        task: Task | None = None,
        is_begun: bool = False,
    ) -> None:
        self.config, self.world, self.is_begun = config, world, is_begun
        self.reads: set[str] | None = set()
        self.warmed_up: WarmUp | None = None
        if task is not None:
            self.task, self.reads = task, None

    def join(self, world: World) -> None:
        """Enters a process group. Unless it has only this process, model and state come later.

        Raises:
            ConfigError: the size of the group does not fit the config.
        """
        self.world, config = world, self.config
        for name in ("plan", "loader"):  # left from a warm-up in this process alone
            vars(self).pop(name, None)
        set_up(world, config.compute)
        config.require_slots(world.size)
        config.require_synced(world.size, world.size, world.device.type == "cuda")

    def remains(self) -> Build | None:
        """The parts that can join another process group when this one has ended.

        It is all or none, as the task, its data and its model may refer to each other. None if
        anything else refers to the model, as DDP does, or if processes read the data: the data may
        hold open files by now, which cannot be copied.
        """
        made = vars(self)
        if "model" in made and not self.keeps_model:
            return None
        if "state" in made and not all(each.shared for each in self._opened):
            return None
        left = Build(self.config, self.world)
        for name in _KEPT:
            if name in made:
                setattr(left, name, made[name])
        return left

    @property
    def keeps_model(self) -> bool:
        """Whether the model can be kept: nothing that depends on the ranks refers to it."""
        return self.config.exact and self.task.optimizer is None

    @cached_property
    def task(self) -> Task:
        return load_task(self.config, self.reads)

    # ------------------------------------------------------------------ data

    @cached_property
    def data(self) -> Data:
        """The training set."""
        return train_data_of(self.task, self.config.seed)

    @cached_property
    def eval_data(self) -> Data | None:
        """The evaluation set; None: there is none."""
        return eval_data_of(self.task, self.config.seed)

    @property
    def _opened(self) -> list[Data]:
        return [each for each in (self.data, self.eval_data) if each is not None]

    def open_data(self) -> None:
        """Opens both sets, and starts the processes that read them, if any.

        Raises:
            ConfigError, DataError: a set cannot be used, or a field needs an evaluation set.
        """
        config, opened = self.config, self._opened
        for name in _OF_EVALUATION if self.eval_data is None else ():
            rule = "has no effect, as there is no evaluation set: remove it, or provide one"
            value = value_of(config, name)
            require(value == value_of(TrainConfig(), name), name, value, rule)
        if self.data.source.blocks.min() < 1:
            raise DataError("the training set has a block of 0 rows: remove it from Source.blocks.")
        for each in opened:
            start_processes(each, loader_threads(config.data, self.world.threads))

    @cached_property
    def identity(self) -> RunIdentity:
        return RunIdentity.of(self.config, self.data, self.eval_data, self.task)

    @cached_property
    def plan(self) -> Plan:
        """How an epoch of the training set is divided; see `plan_for`."""
        return plan_for(self.config, self.data, self.world.size)

    @cached_property
    def loader(self) -> TrainLoader:
        """Loads this worker's slots."""
        config, world = self.config, self.world
        return TrainLoader(
            data=self.data,
            plan=self.plan,
            shuffle=shuffle_for(self.data, config.data.shuffle),
            window=window_for(self.data, config.data.shuffle_window),
            seed=config.seed,
            world_size=world.size,
            rank=world.rank,
            threads=loader_threads(config.data, world.threads),
            skip=config.data.may_skip,
            pin=world.device.type == "cuda",
            digests=config.log.audit,
            same_order=config.overfit_batches > 0,
        )

    # ------------------------------------------------------------------ model and state

    @cached_property
    def is_new(self) -> bool:
        """Whether no weights will be loaded: there is no checkpoint yet, nor a trained model."""
        return not self.is_begun and newest_manifest(run_storage(self.config)) is None

    @cached_property
    def model(self) -> nn.Module:
        """A new model on this worker's device, not wrapped; all ranks take part.

        If the task has its own optimizer, which may keep copies of weights, all ranks get rank 0's
        weights.

        Raises:
            ConfigError: the model differs from rank 0's, or cannot be stored.
        """
        config, world = self.config, self.world
        own_optimizer = self.task.optimizer is not None
        seed_all(config.seed)
        model = model_of(self.task, self.is_new)
        if not config.exact and not own_optimizer:
            require_dense(self.task, model)  # exact or the optimizer may handle sparse
        begin_training(model)
        own_memory(model)
        if config.ddp.sync_batchnorm and world.size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = self.placed(model)
        require_same_model(model, world)
        if own_optimizer:
            broadcast_model(model, world, is_loaded=False)
        for name, kind in unstorable(model.state_dict()).items():
            raise ConfigError(  # before hours of training, not at the first checkpoint
                f"the model's {name} ({kind}) cannot be stored in a checkpoint: use a dtype that "
                "safetensors supports (get_extra_state() may return such a tensor), "
                "torch.view_as_real for complex numbers, or persistent=False for a buffer that a "
                "resumed run does not need."
            )
        return model

    def agree_on_model(self) -> None:
        """Uses the kept model in this process group, or makes one; all ranks take part.

        Raises:
            ConfigError: the model differs from rank 0's.
        """
        if "model" in vars(self):
            self.model.zero_grad()  # frees the old gradients
            require_same_model(self.model, self.world)
        _ = self.model

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, in the memory layout and form that the config says."""
        if self.config.compute.channels_last is True:
            model = model.to(memory_format=torch.channels_last)
        model = model.to(self.world.device)
        if self.config.compute.compile:
            model.compile()
        return model

    def loss(self, batch: Batch, net: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        """The task's loss for a batch, shape (), and the scalars with it; in the run's precision.

        Args:
            net: the model, possibly wrapped in DDP.

        Raises:
            TaskError: the task's loss is not a valid loss.
        """
        task, device = self.task, self.world.device
        with autocast(device, self.config.compute.precision):
            result = task.loss(net, to_device(batch, device))
        return loss_of_task(task, result, needs_gradient=torch.is_grad_enabled())

    @cached_property
    def optimizer(self) -> Optimizer:
        return optimizer_of(self.task, self.model, self.config)

    @cached_property
    def rates(self) -> LearningRates:
        return LearningRates(self.task, self.optimizer, self.config, self.plan.steps_per_epoch)

    @cached_property
    def state(self) -> TrainState:
        """The state before the first step."""
        config, precision = self.config, self.config.compute.precision
        scaler = torch.amp.GradScaler(self.world.device.type, enabled=precision == "fp16")
        average = average_of(self.model, self.optimizer, config.ema)
        return TrainState(self.model, self.optimizer, scaler, average)

    def renew_optimizer(self) -> None:
        """Makes the optimizer and the state anew when they are needed next; the rates stay."""
        for name in ("optimizer", "state"):
            vars(self).pop(name, None)


def loader_threads(config: DataConfig, cpus: int) -> LoaderThreads:
    """The loader's threads. auto: one for each of `cpus`."""
    most = cpus if config.workers == "auto" else config.workers
    return LoaderThreads(most, config.prefetch, config.prefetch_mib * 2**20)


def plan_for(config: TrainConfig, data: Data, workers: int) -> Plan:
    """How an epoch of the training data is divided.

    Raises:
        ConfigError: a slot is empty, but ddp.sync_batchnorm with several workers needs samples.
    """
    limit = config.overfit_batches or config.limit_train_batches
    repeats, spread = config.augment.repeats, config.augment.spread_repeats
    plan = Plan(data.rows, config.slots, config.micro_batch, repeats, limit, spread)
    if config.ddp.sync_batchnorm and workers > 1 and plan.has_empty_slots:
        raise ConfigError(
            f"ddp.sync_batchnorm needs samples for all {plan.slots} slots in the last step of an "
            f"epoch, but that step has only {plan.samples(plan.steps_per_epoch - 1)}: change "
            "batch_size or the data."
        )
    return plan


_KEY, _CODE = "data", "code"  # in a checkpoint's state.json


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint records about the data and the user's code.

    Args:
        train, eval: fingerprints; "" if there is no evaluation set.
        train_rows, eval_rows: the number of rows of each set.
        classes: class names, if the task has any.
        code: SHA-256 of each module of the user that the config names, by module name.
        image_size: side of the training images as they are stored, in pixels; 0: unknown.
    """

    train: str
    eval: str
    train_rows: int
    eval_rows: int
    classes: tuple[str, ...]
    code: Mapping[str, str]
    image_size: int = 0

    @staticmethod
    def of(config: TrainConfig, data: Data, eval_data: Data | None, task: Any) -> RunIdentity:
        names = task.class_names
        return RunIdentity(
            data.source.fingerprint(),
            eval_data.source.fingerprint() if eval_data else "",
            data.rows,
            eval_data.rows if eval_data else 0,
            # A user's task may use `class_names` for anything.
            (*map(str, names),) if isinstance(names, list | tuple) else (),
            user_code.hashes(config.task, config.model.name),
            task.stored_image_size,
        )

    def document(self) -> dict[str, Any]:
        """The part of a checkpoint's state.json that holds this."""
        values = {**asdict(self), "classes": list(self.classes)}
        return {_CODE: dict(values.pop("code")), _KEY: values}

    def require_alike(self, world: World) -> None:
        """All ranks take part.

        Raises:
            DataError: this rank has different data than rank 0.
        """
        first: RunIdentity = broadcast(self, world)
        for what, mine, theirs, rows in (
            ("training data", self.train, first.train, self.train_rows),
            ("evaluation data", self.eval, first.eval, self.eval_rows),
            ("classes", self.classes, first.classes, 0),
        ):
            if mine != theirs:
                size = f" ({rows} rows)" if rows else ""
                raise DataError(
                    f"rank {world.of_run(world.rank)} has different {what}{size} than rank "
                    f"{world.of_run(0)}: all nodes need the same files."
                )

    def require_same(self, checkpoint: Checkpoint) -> None:
        """Raises DataError if the checkpoint was made with different data, and names them."""
        before = checkpoint.manifest.data_fingerprint
        document = json.loads(checkpoint.read("state.json"))
        if before != self.train:
            raise _other("training", self.train_rows, self.train, before, checkpoint)
        kept = document.get(_KEY)
        if kept is None:  # an older checkpoint
            return
        if kept["eval"] != self.eval:
            raise _other("evaluation", self.eval_rows, self.eval, kept["eval"], checkpoint)
        names, mine = kept["classes"], list(self.classes)
        if names and names != mine and not were_numbers(names, mine):
            raise DataError(
                f"the training data are the same, but have {some_names(mine)}; {checkpoint.name} "
                f"has {some_names(names)}. Restore data.classes or README.md; or, if this version "
                "reads as text what was read as numbers, start a new run with another --name."
            )


def _other(what: str, rows: int, now: str, before: str, checkpoint: Checkpoint) -> DataError:
    remedy = "restore them, or start a new run with another --name."
    if not now:
        return DataError(
            f"there are no {what} data, but {checkpoint.name} was made with some: {remedy}"
        )
    those = f"those of {checkpoint.name} ({before[:12]})"
    there = those if before else f"{checkpoint.name}, which was made without any"
    return DataError(
        f"the {what} data ({rows} rows, fingerprint {now[:12]}) differ from {there}: {remedy}"
    )
