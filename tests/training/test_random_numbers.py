"""Random numbers in the code of a task: seeded, the same for all lanes, or refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TinyTask, plain, run_tiny, tiny_config
from torch import Tensor
from torch.utils.data import IterableDataset

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import ArraySource, Data, IterableSource, MapSource
from raytrain_ddp.data.order import Draws
from raytrain_ddp.errors import TaskError
from raytrain_ddp.tasks.task_check import eval_data_of, train_data_of
from raytrain_ddp.tasks.task_loading import load_task


def draws_of_all() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class DrawingTask(TinyTask):
    """Draws random numbers in its constructor and for its data, like random_split."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.drawn = draws_of_all()

    def train_data(self) -> Data:
        return Data(ArraySource({"x": np.array(draws_of_all())}))

    def eval_data(self) -> Data:
        return self.train_data()


def test_a_task_is_built_with_seeded_generators_and_does_not_change_their_state() -> None:
    config = TrainConfig(task=DrawingTask, seed=7)
    tasks = [load_task(c) for c in (config, config, TrainConfig(task=DrawingTask, seed=8))]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    before = draws_of_all()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    one, other, another = (
        load_task(c).drawn for c in (config, config, TrainConfig(task=DrawingTask))
    )  # type: ignore[attr-defined]
    sets = [
        data.batch(Draws(0, 0, np.arange(3)))["x"].tolist()
        for data in (train_data_of(tasks[0], 7), eval_data_of(tasks[0], 7))
        if data
    ]
    assert draws_of_all() == before
    assert one == other != another
    assert tasks[2].drawn != one  # type: ignore[attr-defined]
    assert sets[0] == sets[1] == pytest.approx(one), "as after torch.manual_seed(7) and the like"


class Shuffling(IterableDataset):  # type: ignore[type-arg]
    """Shuffles at the start, and draws a random number for each item."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        order = torch.randperm(40).tolist()
        random.shuffle(order)
        for row in order:
            yield row, random.random()


@pytest.mark.parametrize("shared", [False, True])
def test_an_iterable_that_shuffles_gives_each_item_once_for_all_lanes(shared: bool) -> None:
    def read(epoch: int, parts: list[tuple[int, int]]) -> list[Any]:
        source = IterableSource(Shuffling(), shared=shared)
        ranges = [Draws(3, epoch, np.arange(*part)) for part in parts]
        return [item for draws in ranges for item in source.read_seeded(draws)]

    whole = read(0, [(0, 40)])
    assert sorted(row for row, _ in whole) == [*range(40)]
    # Lanes start at any position and follow others; resumed lanes start at other positions.
    pieces = read(0, [(20, 25), (0, 10), (25, 33), (10, 20), (33, 40)])
    assert pieces == [*whole[20:25], *whole[:10], *whole[25:33], *whole[10:20], *whole[33:]]
    assert read(0, [(33, 40)]) == whole[33:]
    # In the next epoch, a lane starts where another one ended, in the order of that epoch.
    source = IterableSource(Shuffling(), shared=shared)
    lanes = [(0, 20), (20, 40)]
    both = [
        source.read_seeded(Draws(3, epoch, np.arange(*lane))) for epoch in (0, 1) for lane in lanes
    ]
    assert [*both[0], *both[1]] == whole
    assert [*both[2], *both[3]] == read(1, [(0, 40)])
    assert [row for row, _ in read(1, [(0, 40)])] != [row for row, _ in whole]


class Items:
    """A map-style data set whose items, by `draw`, depend on random numbers."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        x = torch.full((1, 4, 4), float(row)) + self.draw()
        return {"x": x, "y": torch.tensor(row % 5), "row": torch.tensor(row)}


def drawn_in_collate(records: Any) -> Any:
    return {
        name: torch.from_numpy(values) + 0 * int(random.random())
        for name, values in records.items()
    }


ARRAYS = {"x": np.zeros((96, 1, 4, 4), np.float32), "y": np.arange(96) % 5, "row": np.arange(96)}


READ_IN_THREADS = {
    "torch": lambda: MapSource(Items(lambda: torch.rand(())), shared=True),
    "NumPy": lambda: MapSource(Items(np.random.rand), shared=True),
    "collate": lambda: ArraySource(ARRAYS),
    "generator of its own": lambda: MapSource(Items(random.Random(0).random), shared=True),
}


class ReadInThreads(TinyTask):
    def __init__(self, config: TrainConfig, kind: str, part: str) -> None:
        super().__init__(config)
        self.kind, self.part = kind, part

    def data(self) -> Data:
        collate = {"collate": {"collate": drawn_in_collate}}.get(self.kind, {})
        return Data(READ_IN_THREADS[self.kind](), **collate)

    def train_data(self) -> Data:
        return self.data() if self.part == "train" else super().train_data()

    def eval_data(self) -> Data | None:
        return self.data() if self.part == "eval" else super().eval_data()


@pytest.mark.parametrize(
    ("kind", "part", "refused"),
    [
        ("torch", "train", "torch"),
        ("NumPy", "eval", "NumPy"),
        ("collate", "train", "Python"),
        ("generator of its own", "eval", ""),
    ],
)
def test_random_numbers_of_global_generators_are_refused_where_threads_read(
    kind: str, part: str, refused: str, tmp_path: Path
) -> None:
    config = plain(tiny_config(tmp_path, "run", epochs=1, limit_train_batches=1))
    options = {"kind": kind, "part": part}
    if not refused:
        run_tiny(0, 1, config, options, kind=ReadInThreads)
        return
    with pytest.raises(TaskError, match=f"generator of {refused}"):
        run_tiny(0, 1, config, options, kind=ReadInThreads)
