"""The data of a loop of one's own: where it is in them, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import (
    LoaderThreads,
    Slot,
    TrainLoader,
    shuffle_for,
    window_for,
)
from raytrain_ddp.data.loading.sources import Data, MapSource, Source, default_collate
from raytrain_ddp.data.order import Plan
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.own_state import Position
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.steps.device_feed import on_device

if TYPE_CHECKING:
    from torchmetrics import Metric


class Given(NamedTuple):
    """The arguments of `OwnRun.steps`."""

    dataset: Any
    batch_size: int
    micro_batch: int
    shuffle: bool
    collate_fn: Callable[[Any], Any] | None
    num_workers: int


class Loader:
    """Loads this worker's slots of the steps of an epoch; goes on from epoch to epoch, ahead of the
    loop, as long as its arguments stay the same."""

    def __init__(self, config: TrainConfig, world: World, clock: Clock) -> None:
        self._config, self._world, self._clock = config, world, clock
        self._given: Given | None = None
        self._next = -1  # the step that is loaded next
        self._loaded: Generator[list[Slot], None, None] | None = None

    def epoch(self, given: Given, at: Position, epochs: int) -> tuple[Plan, Iterator[list[Slot]]]:
        """The plan of an epoch, and the slots of its steps from `at` on.

        Raises:
            ConfigError: the sizes do not fit, or the epoch began with others.
        """
        before = self._given
        is_same = before and given.dataset is before.dataset and given[1:] == before[1:]
        if self._loaded is None or not is_same or at.step != self._next:
            self.close()
            self._loader = self._new(given)
            self._given, self._loaded = given, self._begun(at, epochs)
        assert self._loaded is not None
        loader, plan = self._loader, self._loader.plan
        order = f"{loader.data.source.fingerprint()} in {plan}, {loader.shuffle}"
        if at.of_epoch and order != at.data:
            raise ConfigError(
                f"run.steps(): the run stopped within an epoch with other data or sizes: "
                f"{at.data}; now {order}. Restore them, or start a new run."
            )
        at.data, self._next = order, at.step + plan.steps_per_epoch - at.of_epoch
        return plan, self._loaded

    def _new(self, given: Given) -> TrainLoader:
        world, batch, micro = self._world, given.batch_size, given.micro_batch
        slots, rest = divmod(batch, micro) if 0 < micro <= batch else (0, 0)
        if not slots or rest or slots < world.size:
            raise ConfigError(
                f"run.steps(batch_size={batch}, micro_batch={micro}) with {world.size} workers: "
                "micro_batch must divide batch_size, into at least one part for each worker."
            )
        data = data_of(given.dataset, given.collate_fn)
        if not data.rows:
            raise DataError("run.steps(): the data set has 0 rows.")
        return TrainLoader(
            data=data,
            plan=Plan(data.rows, slots, micro),
            shuffle=shuffle_for(data, "auto") if given.shuffle else "none",
            window=window_for(data, "auto"),
            seed=self._config.seed,
            world_size=world.size,
            rank=world.rank,
            threads=LoaderThreads(given.num_workers),
            pin=world.device.type == "cuda",
        )

    def _begun(self, at: Position, epochs: int) -> Generator[list[Slot], None, None]:
        per_epoch = self._loader.plan.steps_per_epoch
        move = on_device(self._world.device, self._clock)
        start = at.epoch * per_epoch + at.of_epoch
        with closing(self._loader.steps(start, epochs * per_epoch)) as steps:
            for slots in self._clock.waits(steps):
                yield move(slots)

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = None


class Scored(Task):
    """The part of a task that an evaluation needs."""

    def __init__(self, metrics: Mapping[str, Metric], update: Callable[..., None]) -> None:
        self._metrics, self._update = metrics, update

    def metrics(self) -> dict[str, Metric]:
        return dict(self._metrics)

    def evaluate(self, model: nn.Module, batch: Any, metrics: Mapping[str, Metric]) -> None:
        self._update(model, batch, metrics)


def update_all(model: nn.Module, batch: Any, metrics: Mapping[str, Metric]) -> None:
    inputs, targets = batch
    outputs = model(inputs)
    for metric in metrics.values():
        metric.update(outputs, targets)


def data_of(dataset: Any, collate_fn: Callable[[Any], Any] | None) -> Data:
    if isinstance(dataset, Data):
        return dataset
    source = dataset if isinstance(dataset, Source) else MapSource(dataset)
    return Data(source, collate_fn or default_collate)
