"""A worker's failure as the driver gets it, and a worker's process. Starts no Ray."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
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
    RaytrainError,
    RetriesExhausted,
    UnreachableError,
    status_of,
)
from raytrain_ddp.ray_backend.failure_causes import cause_of
from raytrain_ddp.ray_backend.failure_policy import as_error
from raytrain_ddp.ray_backend.worker import WorkerSettings, report_failure


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyError("label"), "error"),
        (ImportError("libnccl.so.2: cannot open shared object file"), "error"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), "peer"),
        (RuntimeError("my own test of nccl and gloo failed"), "error"),
        (SystemExit(1), "peer"),
        (OSError(errno.ENOSPC, "no space left on device"), "outside"),
        (UnreachableError("Storage s3://b did not respond within 25 s"), "outside"),
        (ConnectionResetError("the store hung up"), "outside"),
        (OSError("When reading 'b/x': AWS Error SLOW_DOWN during GetObject operation"), "outside"),
        (OSError("When reading 'b/x': AWS Error ACCESS_DENIED during GetObject"), "error"),
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


class OfTheUser(DataError):
    """An error with its own exit status and more than a message."""

    exit_status = 42

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


@pytest.mark.parametrize(
    ("error", "kind", "status", "said"),
    [
        (OfTheUser(7, "the shelf is empty"), RaytrainError, 42, "the shelf is empty (7)"),
        (type("Mine", (DataError,), {})("gone"), DataError, 4, "gone"),
        (type("Mine", (DataError,), {"exit_status": 300})("gone"), DataError, 4, "gone"),
        (type("Mine", (RaytrainError,), {"exit_status": True})("gone"), RaytrainError, 1, "gone"),
        (MemoryError(), RetriesExhausted, 7, "--micro-batch"),
        (torch.OutOfMemoryError("CUDA out of memory"), RetriesExhausted, 7, "--micro-batch"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_fault_26_an_error_keeps_its_exit_status_on_the_way_to_the_driver(
    error: Exception, kind: type, status: int, said: str, monkeypatch: pytest.MonkeyPatch
):
    import ray

    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    pushed: list[Any] = []
    mailbox = SimpleNamespace(push=SimpleNamespace(remote=pushed.extend))
    settings = {"micro_batch": 16, "batch_size": 64}
    report_failure(WorkerSettings(settings, ".", (), None, mailbox), 1, 5, error)
    reported = as_error(pushed[0])
    assert isinstance(reported, kind)
    assert (reported.exit_status, status_of(reported)) == (status, status)
    assert said in str(reported)
    assert pushed[0].cause == "error"  # ends the run at once: a retry would fail again


# ------------------------------------------------------------------ its process


def reported_cause(rank: int, size: int, is_affected: bool) -> tuple[str, str]:
    """The cause that a rank reports for an error after its group was ended."""
    import torch
    import torch.distributed as dist

    reported: list[Any] = []
    mailbox = SimpleNamespace(push=SimpleNamespace(remote=reported.extend))
    dist.destroy_process_group()
    try:
        dist.all_reduce(torch.zeros(1))
    except Exception as error:
        with mock.patch("ray.get"):
            report_failure(WorkerSettings({}, ".", (), None, mailbox), rank, 7, error, is_affected)
        raised = type(error).__name__
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return raised, reported[0].cause


@pytest.mark.filterwarnings("ignore")
def test_fault_01_a_rank_whose_group_was_ended_blames_its_peers(workers: Group):
    assert workers(2, reported_cause, True) == [("ValueError", "peer")] * 2
    assert workers(2, reported_cause, False) == [("ValueError", "error")] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux does it")
def test_fault_05_a_worker_that_misses_its_raylets_exit_ends_with_it():
    code = (
        "import os, time; from raytrain_ddp.ray_backend.worker import end_with_raylet\n"
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
