"""A user's data set behaves as in a DataLoader and keeps all guarantees."""

from __future__ import annotations

import datetime
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, wraps
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import Lines, Pictures, PicturesTask, require_right, write_pictures
from processes import Died, Group, Raised
from tiny import AUDITED, WorkerResult, audit_of, bits, plain, run_tiny, tiny_config
from torch.utils.data import DataLoader

from raytrain_ddp import errors
from raytrain_ddp.config.sections import CheckpointConfig, DataConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import LoaderThreads, TrainLoader, eval_batches, shuffle_for
from raytrain_ddp.data.loading.sources import ArraySource, Batch, Data, IterableSource, MapSource
from raytrain_ddp.data.order import Draws, Plan

ROWS = 107
DIES = 54  # a row of the last step of an epoch


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "pictures.bin"
    write_pictures(path, ROWS)
    return str(path)


def loader_of(data: Data, count: int, rank: int = 0, size: int = 1, seed: int = 9) -> TrainLoader:
    plan = Plan(ROWS, slots=4, micro_batch=6)
    threads = LoaderThreads(count, ahead=2)
    return TrainLoader(data, plan, "full", 3, seed, size, rank, threads, digests=True)


def digests_of(data: Data, count: int, steps: int) -> list[str]:
    slots = [s for step in loader_of(data, count).steps(0, steps) for s in step]
    for slot in slots:
        require_right(slot.batch)
    return [slot.digest for slot in slots]


def test_random_transforms_are_the_same_for_any_number_of_loader_workers(pictures: str):
    """Two epochs; this process's torch, NumPy, and Python generators are unchanged."""
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    steps = 2 * Plan(ROWS, 4, 6).steps_per_epoch
    runs = [digests_of(Data(MapSource(Pictures(pictures, ROWS))), n, steps) for n in (0, 1, 2)]
    assert runs[0] == runs[1] == runs[2]
    assert len({digest for digest in runs[0] if digest}) == sum(map(bool, runs[0]))
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert now == states


@pytest.mark.parametrize("count", [0, 1])
def test_repeats_epochs_and_seeds_draw_differently_and_evaluations_alike(pictures: str, count: int):
    data = Data(MapSource(Pictures(pictures, ROWS)))
    plan = Plan(ROWS, slots=1, micro_batch=8, repeats=2)
    loader = TrainLoader(data, plan, "none", 3, 9, 1, 0, LoaderThreads(count))
    per_epoch = plan.steps_per_epoch
    batches = [step[0].batch for step in loader.steps(0, per_epoch + 1)]
    first, again = batches[0], batches[per_epoch]
    assert first["row"].tolist() == again["row"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    pixels = [x.tolist() for batch in (first, again) for x in batch["x"]]
    other = next(replace(loader, seed=8).steps(0, 1))[0].batch
    pixels += [x.tolist() for x in other["x"]]
    assert len({str(x) for x in pixels}) == 24
    ours = [list(eval_batches(data, 16, range(7), LoaderThreads(count))) for _ in range(2)]
    for one, other in zip(*ours, strict=True):
        assert torch.equal(one["x"], other["x"])
    data.close()


class Curriculum:
    """Its items depend on the epoch, and, if it is iterated, so does their order."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, int]:
        return {"row": row, "epoch": self.epoch}


class Ordered(Curriculum):
    __getitem__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        rows = iter(range(ROWS))
        self._row = lambda: next(rows)  # of each copy

    def __iter__(self) -> Iterator[dict[str, int]]:
        for _ in range(ROWS):
            yield {"row": (self._row() + self.epoch) % ROWS, "epoch": self.epoch}


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("made", [MapSource, IterableSource])
def test_set_epoch_is_called_before_each_epoch(made: Any, count: int):
    data = Data(made(Curriculum() if made is MapSource else Ordered()))
    steps = Plan(ROWS, 4, 6).steps_per_epoch
    seen: dict[int, list[int]] = {}
    for start, stop in ((0, steps + 2), (steps + 2, 2 * steps)):  # as after a restart
        for rank in range(2):
            loader = replace(loader_of(data, count, rank, 2), shuffle=shuffle_for(data, "full"))
            for slots in loader.steps(start, stop):
                for slot in slots:
                    assert slot.batch["epoch"].unique().tolist() == [slot.step // steps]
                    seen.setdefault(slot.step // steps, []).extend(
                        slot.batch["row"].tolist() if slot.samples else []
                    )
    assert [sorted(rows) for rows in seen.values()] == [[*range(ROWS)]] * 2
    assert next(iter(eval_batches(data, 8, [0], LoaderThreads(count))))["epoch"].tolist() == [0] * 8
    data.close()


@pytest.mark.parametrize("count", [0, 1])
def test_fault_56_an_iterable_with_one_open_file_gives_all_lanes_the_right_items(
    pictures: str, count: int
):
    """Its iterators, if read in turns, would take each other's items."""
    data = Data(IterableSource(Lines(pictures), ROWS))
    plan = Plan(ROWS, slots=4, micro_batch=6)
    loader = TrainLoader(data, plan, "none", 3, 9, 1, 0, LoaderThreads(count), digests=True)
    slots = [s for step in loader.steps(0, plan.steps_per_epoch) for s in step if s.samples]
    for slot in slots:
        assert slot.batch["row"].tolist() == list(range(*plan.span(slot.step, slot.index)))
    resumed = [s.digest for s in next(loader.steps(2, 3))]
    assert resumed == [s.digest for s in slots if s.step == 2]


class Where:
    """Each item says in which process and thread it was made."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, int, str]:
        time.sleep(0.001)
        return row, os.getpid(), threading.current_thread().name


@pytest.mark.parametrize("shared", [False, True])
def test_fault_56_threads_load_only_data_sets_declared_thread_safe(shared: bool):
    data = Data(MapSource(Where(), shared=shared))
    batches = list(eval_batches(data, 4, range(20), LoaderThreads(2)))
    data.close()
    assert torch.cat([rows for rows, _, _ in batches]).tolist() == list(range(80))
    pids = {pid for _, some, _ in batches for pid in some.tolist()}
    threads = {name for _, _, names in batches for name in names}
    assert len(pids - {os.getpid()}) == (0 if shared else 2)  # this one makes the first batch
    assert len(threads) == (2 if shared else 1)


# ------------------------------------------------------------------ whole runs


def run_pictures(rank: int, size: int, *args: Any) -> WorkerResult:
    current_process().daemon = False  # it starts processes
    return run_tiny(rank, size, *args, kind=PicturesTask)


def test_fault_37_56_an_ordinary_dataset_gives_the_same_bits_despite_kills_and_resizes(
    workers: Group, tmp_path: Path
):
    """It keeps a file open, is used for training and evaluation, and has random transforms.

    With 2 loader processes, without, and on 3 ranks of which one's loader process is killed, and
    that are resized after that: all end with the same bits.
    """
    path = tmp_path / "pictures.bin"
    write_pictures(path, ROWS)
    options = {"path": str(path), "rows": ROWS}

    def config(name: str, count: int) -> TrainConfig:
        data = DataConfig(workers=count, prefetch=2)
        often = CheckpointConfig(every_steps=1, every_s=0.0)
        made = {"log": AUDITED, "data": data, "exact": True, "epochs": 2, "checkpoint": often}
        return tiny_config(tmp_path, name, **made)

    ends = []
    for count in (2, 0):
        of = config(f"by-{count}", count)
        workers(1, run_pictures, plain(of), options)
        ends.append((audit_of(of), bits(of)))
    assert ends[0] == ends[1]
    assert len(set(ends[0][0])) == 8

    disturbed = config("disturbed", 1)
    reported = workers.outcomes(3, run_pictures, plain(disturbed), {**options, "die_at": DIES})
    died = [rank for rank in reported if isinstance(rank, Raised) and rank.name == "LoaderDied"]
    assert len(died) == 1, reported
    assert died[0].exit_status == 7
    assert "was killed by SIGKILL while it loaded" in died[0].text
    assert f"{DIES}" in died[0].text
    assert not any(isinstance(rank, Died) for rank in reported)
    ran = workers(2, run_pictures, plain(replace(disturbed, data=DataConfig(workers=0))), options)
    assert ran[0].start_step > 0
    assert (audit_of(disturbed), bits(disturbed)) == ends[0]


# ------------------------------------------------------------------ cannot be pickled


class Elsewhere:
    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)


def test_a_data_set_that_cannot_be_copied_is_refused(pictures: str):
    with open(pictures, "rb") as file:
        for source, count in ((MapSource([file]), 1), (IterableSource([file]), 0)):
            with pytest.raises(errors.TaskError):
                loader_of(Data(source), count).any_batch()
    data = Data(MapSource([Elsewhere()]))
    with pytest.raises(errors.TaskError):
        next(data.processes.batches(iter([Draws(0, 0, np.array([0]))]), LoaderThreads(1)))
    data.close()


def with_default(items: list[Any], scale: float = 1.0) -> Batch:
    return torch.stack(items) * scale


def with_draws(records: list[Any], draws: Any = None) -> Batch:
    assert draws is not None
    return torch.stack(records)


@wraps(torch.stack)
def wrapped(records: list[Any], draws: Any) -> Batch:
    return with_draws(records, draws)


def test_the_collate_fn_of_a_dataloader_makes_the_same_batches():
    """Others receive random numbers, too."""
    rows = [torch.tensor([float(row), 1.0]) for row in range(6)]
    of_loaders = (torch.utils.data.default_collate, torch.stack, with_default)
    for collate in (*of_loaders, partial(with_default, scale=2.0), with_draws, wrapped):
        data = Data(MapSource(rows), collate)
        known = torch.stack if collate in (with_draws, wrapped) else collate
        theirs = [*DataLoader(rows, 3, collate_fn=known)]  # type: ignore[arg-type]
        for batch, ids in zip(theirs, ([0, 1, 2], [3, 4, 5]), strict=True):
            assert torch.equal(data.batch(Draws(0, 0, np.array(ids))), batch)


def test_the_fingerprint_is_that_of_the_content():
    """The bytes of objects are addresses."""

    def of(*words: str) -> set[str]:
        text = np.array(["".join(words), None, 1.5, ("a", [2]), datetime.date(2026, 1, 2)], object)
        pair = np.array([("".join(words), 1)] * 6, [("a", object), ("b", int)])
        return {ArraySource({"x": part}).fingerprint() for part in (text, pair)}

    assert of("r", "ed") == of("re", "d")
    assert not of("red") & of("redder")
    known = "60eb6aff414c0dc3"
    assert ArraySource({"x": np.arange(6).reshape(2, 3).T}).fingerprint().startswith(known)
    assert MapSource([1, 2]).fingerprint() != MapSource([1, 2, 3]).fingerprint()
    for value in (lambda: 0, {"a", "b"}, torch.ones(2), ("a", {"b"})):
        with pytest.raises(errors.DataError, match="'x'"):
            ArraySource({"x": np.array([value, None], object)}).fingerprint()
