"""A batch sampler for scripts of their own that resumes at any step, on any number of workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from raytrain_ddp.data.order import EpochOrder, Plan, items_of_rank, runs_of
from raytrain_ddp.errors import ConfigError

T = TypeVar("T")


class BatchSampler:
    """The `batch_sampler` of a torch DataLoader: this worker's rows of each step of an epoch. A
    step has the same rows on any number of workers, and each row is used once per epoch, also by
    the smaller last step. A step is reached without reading those before it.

        sampler = BatchSampler(len(dataset), batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for epoch in range(sampler.epoch, 10):
            for x, y in sampler.counted(loader):
                ...  # state_dict() now counts this step as done

    Workers' shares of a step differ by a row or two: weight their losses by their rows.

    Args:
        batch_size: of all workers together.
        rank: this worker's place. Default: torchrun's RANK, else 0.
        world_size: the number of workers. Default: torchrun's WORLD_SIZE, else 1.

    Attributes:
        epoch, step: the position: epochs done, and steps of the current one.

    Raises:
        ConfigError: the last step has too few rows for all workers.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        place = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._plan, self._seed = Plan(rows, batch_size, 1), seed
        self._shuffle, self._mine = shuffle, items_of_rank(batch_size, size, place)
        self.epoch = self.step = 0
        last = self._plan.steps_per_epoch - 1
        counts = self._plan.counts(last)
        dealt = [items_of_rank(batch_size, size, each) for each in range(size)]
        if not all(counts[slots.start : slots.stop].any() for slots in dealt):
            raise ConfigError(
                f"BatchSampler({rows}, batch_size={batch_size}): the last step has "
                f"{self._plan.samples(last)} rows, too few for {size} workers: use another "
                "batch_size."
            )

    def __len__(self) -> int:
        """Steps that are left in the epoch."""
        return self._plan.steps_per_epoch - self.step

    def __iter__(self) -> Iterator[list[int]]:
        kind, blocks = "full" if self._shuffle else "none", runs_of(self._plan.rows, 4096)
        kept = 2 * len(self._mine) + 2
        order = EpochOrder(blocks, kind, self._seed, self.epoch, windows_kept=kept)  # type: ignore[arg-type]
        for step in range(self.step, self._plan.steps_per_epoch):
            spans = [self._plan.span(step, slot) for slot in self._mine]
            yield np.concatenate([order.at(np.arange(*span)) for span in spans]).tolist()

    def counted(self, loader: Iterable[T]) -> Iterator[T]:
        """Passes on the batches of an epoch, and counts each as a step, however many of them the
        loader makes ahead."""
        for batch in loader:
            self.step += 1
            yield batch
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        plan = self._plan
        order = {"rows": plan.rows, "batch_size": plan.slots, "seed": self._seed}
        return {"epoch": self.epoch, "step": self.step, **order, "shuffle": self._shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues there, on any number of workers.

        Raises:
            ConfigError: it is the state of another order.
        """
        for name, mine in self.state_dict().items():
            if name not in ("epoch", "step") and state[name] != mine:
                raise ConfigError(
                    f"BatchSampler: the state is of {name} = {state[name]}, not {mine}."
                )
        self.epoch, self.step = state["epoch"], state["step"]
