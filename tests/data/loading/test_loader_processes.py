"""Loader processes: the same batches, the user's own errors, and no leftover processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import alive, wait_until
from torch.utils.data import DataLoader

from raytrain_ddp.data.loading.loader import LoaderThreads, eval_batches
from raytrain_ddp.data.loading.loader_processes import LoaderProcesses
from raytrain_ddp.data.loading.sources import Data, MapSource
from raytrain_ddp.data.order import Draws
from raytrain_ddp.errors import DataError, LoaderDied, RemoteTraceback, TaskError
from raytrain_ddp.ray_backend.failure_causes import users_traceback

Point = namedtuple("Point", "x y")


class Items:
    """100 rows, made by a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 100

    def __getitem__(self, row: int) -> Any:
        return self._make(row)


def first(items: list[Any]) -> Any:
    return items[0]


@pytest.fixture
def batches() -> Iterator[Callable[..., Iterator[Any]]]:
    """(what makes an item, processes) -> the items of rows 0, 1, ..., one in each batch."""
    made: list[LoaderProcesses] = []

    def make(item: Callable[[int], Any], workers: int = 1, ahead: int = 2) -> Iterator[Any]:
        made.append(LoaderProcesses(Data(MapSource(Items(item)), first)))
        draws = (Draws(0, 0, np.array([row])) for row in range(100))
        return made[-1].batches(draws, LoaderThreads(workers, ahead=ahead))

    yield make
    for each in made:
        each.close()


def test_batches_equal_those_of_a_dataloader_and_random_numbers_here_stay() -> None:
    rows = Items(lambda row: {"x": torch.full((3, 90, 90), float(row)), "name": str(row)})
    theirs = [*DataLoader(rows, 8)]  # type: ignore[arg-type]
    data, state = Data(MapSource(rows)), torch.get_rng_state()
    for _ in range(2):  # by the same processes
        ours = [*eval_batches(data, 8, range(13), LoaderThreads(2))]
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one["x"], other["x"])
            assert one["name"] == other["name"]
    some = eval_batches(data, 8, range(13), LoaderThreads(2))
    next(some)
    within = [*eval_batches(data, 8, [5], LoaderThreads(2))]  # as the data are also evaluated on
    assert torch.equal(within[0]["x"], theirs[5]["x"])
    assert torch.equal(next(some)["x"], theirs[1]["x"])
    some.close()
    data.close()
    assert torch.equal(torch.get_rng_state(), state)


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(3)
    picture = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    return [
        torch.rand(3, 4),
        torch.rand(8, 3, 64, 64).to(memory_format=torch.channels_last),
        picture.transpose(1, 3)[:, ::2],
        torch.rand(2**17).bfloat16()[5:],
        torch.rand(2, 2, dtype=torch.complex64).conj(),
        torch.ones(1).expand(2**18),
        torch.empty(0, 3),
        torch.rand(2, requires_grad=True),
        torch.eye(3).to_sparse(),
    ]


def test_tensors_and_arrays_arrive_unchanged_and_writable(batches: Any) -> None:
    kept = torch.zeros(2**18)  # part of the data set

    def item(row: int) -> Any:
        return {"tensors": tensors(), "point": Point(np.arange(5), "text"), "kept": kept}

    made = batches(item)
    arrived = next(made)
    for one, other in zip(arrived["tensors"], tensors(), strict=True):
        assert (one.dtype, one.layout) == (other.dtype, other.layout)
        assert torch.equal(one.to_dense(), other.to_dense())
        assert one.requires_grad == other.requires_grad
    assert arrived["tensors"][1].is_contiguous(memory_format=torch.channels_last)
    assert arrived["point"].x.tolist() == [0, 1, 2, 3, 4]
    assert type(arrived["point"]) is Point
    arrived["tensors"][0] += 1
    arrived["point"].x[0] = 7
    arrived["kept"] += 1
    assert not next(made)["kept"].any()


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def users_code(row: int) -> Any:
    if row == 0:
        return row
    if row == 1:
        raise KeyError("oops")
    if row == 2:
        raise DataError("row 2 is bad.")
    if row == 3:
        raise Odd(1, 2)  # cannot be unpickled
    return (n for n in range(3))  # cannot be pickled


def test_errors_arrive_in_order_with_the_users_traceback(batches: Any) -> None:
    made = batches(users_code, 2)
    assert next(made) == 0
    with pytest.raises(KeyError, match="oops") as caught:
        next(made)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = users_traceback(caught.value)
    assert text == str(caught.value.__cause__)
    assert text.splitlines()[-3].endswith("in users_code")
    assert text.splitlines()[-1] == "KeyError: 'oops'"
    for row, kind, message in (
        (2, DataError, r"^row 2 is bad\.$"),
        (3, RuntimeError, r"^Odd: 1 and 2$"),
        (4, TaskError, "cannot be sent .*generator"),
    ):
        with pytest.raises(kind, match=message) as caught:
            next(batches(lambda _, row=row: users_code(row)))
        assert (caught.value.__cause__ is None) == (kind is not RuntimeError)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: sys.exit(4), "exited with status 4"),
    ],
)
def test_fault_37_the_death_of_a_process_is_an_error_that_names_its_rows(
    end: Callable[[], None], how: str, batches: Any
) -> None:
    made = batches(lambda row: end() if row == 3 else row, 2)
    with pytest.raises(LoaderDied, match=f"a loader process {how} while it loaded rows 3. If"):
        assert [next(made) for _ in range(9)] == []


def test_loader_processes_ignore_signals_to_the_training(batches: Any) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach all processes: the training ends after its step."""
    made = batches(lambda row: os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(next(made), number)
    assert next(made) == next(made)


_SCRIPT = """
import os, sys, time
import numpy as np, torch
from raytrain_ddp.data.loading.loader import TrainLoader
from raytrain_ddp.data.order import Plan
from raytrain_ddp.data.loading.sources import Data, MapSource
from raytrain_ddp.data.loading.loader import LoaderThreads

class Pid:
    def __init__(self):
        self.pids = os.getpid(), os.getppid()

class Rows:
    def __len__(self):
        return 40
    def __getitem__(self, row):
        if row % 20 >= 10 and sys.argv[1] == "stuck":
            time.sleep(1000)
        return {"row": torch.tensor(row), "pid": Pid()}

def collate(items):
    rows = torch.stack([each["row"] for each in items])
    return {"row": rows, "pids": [each["pid"] for each in items]}

data = Data(MapSource(Rows()), collate)  # of __main__, and no guard
loader = TrainLoader(data, Plan(40, 2, 5), "none", 1, 0, 1, 0, LoaderThreads(2))
steps = loader.steps(0, 4)
next(steps)
made = [each for slot in next(steps) for each in slot.batch["pids"] if isinstance(each, Pid)]
pids = {pid for each in made for pid in each.pids}
print(*pids, flush=True)
if sys.argv[1] == "raise":
    raise ValueError("done")
if sys.argv[1] != "end":
    time.sleep(1000)
"""


@pytest.mark.parametrize("way", ["end", "raise", "kill", "stuck"])
def test_fault_37_no_process_outlives_a_script(way: str, tmp_path: Path) -> None:
    """A script without a __main__ guard that ends, raises, or is killed."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(script), way], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    pids = {int(pid) for pid in process.stdout.readline().split()}
    assert len(pids) == 3  # with the fork server
    assert process.pid not in pids
    is_killed = way in ("kill", "stuck")
    if is_killed:
        process.kill()
    assert process.wait(30) == {"end": 0, "raise": 1}.get(way, -signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)), 60)
    said = process.communicate()[1]
    # torch's thread in a loader process may say that it has lost a process that was killed.
    assert is_killed or said.count("Traceback") == (way == "raise"), said


def test_fault_38_batches_need_no_dev_shm(batches: Any) -> None:
    made = batches(lambda row: torch.full((2**23,), row, dtype=torch.uint8), 2)
    assert [int(next(made)[-1]) for _ in range(6)] == [*range(6)]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
