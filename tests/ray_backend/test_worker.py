"""A worker's failure as the driver gets it, and a worker's process. Starts no Ray."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("ray")
import torch
from processes import Group

from raytrain_ddp.errors import (
    CheckpointError,
    DataError,
    PreflightError,
    RaytrainError,
    RetriesExhausted,
    UnreachableError,
    status_of,
)
from raytrain_ddp.ray_backend.failure_causes import cause_of
from raytrain_ddp.ray_backend.failure_policy import as_error
from raytrain_ddp.ray_backend.worker import WorkerSettings, report_failure
from raytrain_ddp.ray_backend.worker_process import Tee
from raytrain_ddp.signals import handling, heeded


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyError("label"), "error"),
        (FileNotFoundError(errno.ENOENT, "no such file", "x.csv"), "error"),
        (ImportError("libnccl.so.2: cannot open shared object file"), "error"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), "peer"),
        (RuntimeError("[gloo] Read error: Connection reset by peer"), "peer"),
        (SystemExit(1), "peer"),
        (OSError(errno.ENOSPC, "no space left on device"), "outside"),
        (UnreachableError("Storage s3://b did not respond within 25 s"), "outside"),
        (PreflightError("Cannot open storage s3://b: access denied"), "error"),
        (ConnectionResetError("the store hung up"), "outside"),
        (TimeoutError("the store is slow"), "outside"),
        (OSError(errno.EHOSTUNREACH, "no route to host"), "outside"),
        (OSError("When reading 'b/x': AWS Error SLOW_DOWN during GetObject operation"), "outside"),
        (OSError("When reading 'b/x': AWS Error ACCESS_DENIED during GetObject"), "error"),
        (OSError("image file is truncated"), "error"),
        (CheckpointError("there are only damaged ones"), "error"),
        (because(CheckpointError("no answer"), OSError(errno.EIO, "i/o error")), "outside"),
        (because(CheckpointError("no answer"), PermissionError(errno.EACCES, "no")), "error"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "outside"),
        (RuntimeError("CUDA error: device-side assert triggered"), "error"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Ray's import
def test_a_failure_is_attributed_to_the_task_a_peer_or_an_outside_cause(
    error: BaseException, cause: str
):
    assert cause_of(error) == cause


class FakeMailbox:
    """Receives what a worker pushes, as the mailbox actor's handle would."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self.push = self

    def remote(self, events: list[dict[str, object]]) -> None:
        self.events += events


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> FakeMailbox:
    import ray

    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    return FakeMailbox()


def given(mailbox: FakeMailbox) -> WorkerSettings:
    return WorkerSettings({"micro_batch": 16, "batch_size": 64}, ".", (), None, mailbox)


class OfTheUser(DataError):
    """An error with its own exit status and more than a message."""

    exit_status = 42

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


def users(status: object, base: type[RaytrainError] = DataError) -> RaytrainError:
    error: RaytrainError = type("Mine", (base,), {"exit_status": status})("the shelf is empty")
    return error


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (OfTheUser(7, "the shelf is empty"), 42, "the shelf is empty (7)"),
        (type("Mine", (DataError,), {})("gone"), 4, "gone"),
        (type("Mine", (RaytrainError,), {})("gone"), 1, "gone"),
        (type("Mine", (DataError,), {})(), 4, "Mine: "),
        *[(users(status), 4, "the shelf is empty") for status in (0, -1, 126, 300, "4", None)],
        (users(True, RaytrainError), 1, "the shelf is empty"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_user_defined_error_keeps_its_message_and_exit_status(
    error: RaytrainError, status: int, text: str, mailbox: FakeMailbox
):
    assert status_of(error) == status
    report_failure(given(mailbox), 0, 3, error)
    reported = as_error(mailbox.events[0])
    assert (str(reported), reported.exit_status, status_of(reported)) == (text, status, status)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory"),
    ],
    ids=["host", "device", "torch on the host"],
)
@pytest.mark.filterwarnings("ignore")
def test_fault_26_out_of_memory_ends_the_run_and_names_the_setting_that_helps(
    error: Exception, mailbox: FakeMailbox
):
    report_failure(given(mailbox), 1, 5, error)
    reported = as_error(mailbox.events[0])
    assert type(reported) is RetriesExhausted
    assert reported.exit_status == 7
    assert mailbox.events[0].cause == "error"  # ends the run at once: a retry would fail again
    for words in ("rank 1", "step 5", "--micro-batch"):
        assert words in str(reported)
    assert "\n" not in str(reported)


# ------------------------------------------------------------------ its process


def reported_cause(rank: int, size: int, torn_down: bool) -> tuple[str, str]:
    """The cause that a rank reports for an error after Ray destroyed its group."""
    import torch
    import torch.distributed as dist

    reported: list[Any] = []
    mailbox = SimpleNamespace(push=SimpleNamespace(remote=reported.extend))
    dist.destroy_process_group()
    try:
        dist.all_reduce(torch.zeros(1))
    except Exception as error:
        with mock.patch("ray.get"):
            report_failure(WorkerSettings({}, ".", (), None, mailbox), rank, 7, error, torn_down)
        raised = type(error).__name__
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return raised, reported[0].cause


@pytest.mark.filterwarnings("ignore")
def test_fault_01_a_rank_whose_group_ray_destroyed_blames_its_peers(
    workers: Group,
):
    assert workers(2, reported_cause, True) == [("ValueError", "peer")] * 2
    assert workers(2, reported_cause, False) == [("ValueError", "error")] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux does it")
def test_fault_05_a_worker_that_misses_its_raylets_exit_ends_with_it():
    code = (
        "import os, time; from raytrain_ddp.ray_backend.worker_process import end_with_raylet\n"
        "if os.fork(): time.sleep(60)\n"
        "end_with_raylet(); print(flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()  # both have started
    killed = time.monotonic()
    parent.kill()
    assert parent.stdout.read() == ""  # once the other end is closed
    assert time.monotonic() - killed < 20
    parent.wait()
    parent.stdout.close()


def test_fault_35_the_stop_signals_without_ray_also_stop_a_run_on_ray():
    """Slurm's warnings before a time limit, too; SIGHUP not under nohup."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        number, heard = signal.Signals[name], list[int]()
        before = signal.getsignal(number)
        with handling(heeded(), lambda n, _, heard=heard: heard.append(n)):
            signal.raise_signal(number)
        assert heard == [number]
        assert signal.getsignal(number) == before
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in heeded()
        with handling(heeded(), lambda n, _: heard.append(n)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [signal.SIGUSR2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_fault_08_a_worker_log_on_a_full_disk_costs_no_message_and_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    streams = sys.stdout, sys.stderr

    def task() -> None:
        with Tee(str(tmp_path / "logs"), 0):
            print("a line", flush=True)
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        task()
    assert (sys.stdout, sys.stderr) == streams
    assert capsys.readouterr().out == "a line\n"


def test_fault_08_a_worker_runs_without_a_log_if_none_can_be_created(tmp_path: Path):
    (tmp_path / "logs").write_text("in the way")
    with Tee(str(tmp_path / "logs"), 0):
        print("a line")
