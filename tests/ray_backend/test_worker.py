"""Which failures end a run at once, and which are left to Ray's retries. Starts no Ray."""

from __future__ import annotations

import errno
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_ddp.errors import (
    CheckpointError,
    DataError,
    PreflightError,
    RaytrainError,
    RetriesExhausted,
    UnreachableError,
    status_of,
)
from raytrain_ddp.ray_backend.failure_causes import cause_of, failure_event, users_traceback
from raytrain_ddp.ray_backend.failure_policy import as_error
from raytrain_ddp.ray_backend.ray_session import RaySession
from raytrain_ddp.ray_backend.worker import WorkerSettings, report_failure
from raytrain_ddp.training.session import Requests


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyError("label"), "error"),
        (FileNotFoundError(errno.ENOENT, "no such file", "x.csv"), "error"),
        (PermissionError(errno.EACCES, "denied"), "error"),
        (ImportError("libnccl.so.2: cannot open shared object file"), "error"),
        (RuntimeError("shapes cannot be multiplied"), "error"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), "peer"),
        (RuntimeError("NCCL error: remote process exited"), "peer"),
        (RuntimeError("[gloo] Read error: Connection reset by peer"), "peer"),
        (SystemExit(1), "peer"),
        (OSError(errno.ENOSPC, "no space left on device"), "outside"),
        (UnreachableError("Storage s3://b did not respond within 25 s"), "outside"),
        (PreflightError("Cannot open storage s3://b: access denied"), "error"),
        (OSError(errno.EIO, "input/output error"), "outside"),
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
        (RuntimeError("CUDA error: unspecified launch failure"), "outside"),
        (RuntimeError("CUDA error: device-side assert triggered"), "error"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Ray's import
def test_a_failure_is_attributed_to_the_task_a_peer_or_an_outside_cause(
    error: BaseException, cause: str
):
    assert cause_of(error) == cause


def test_an_exit_in_user_code_is_not_retried():
    with pytest.raises(SystemExit) as caught:
        sys.exit(5)
    assert cause_of(caught.value) == "error"


def users_code() -> None:
    raise ValueError("mine")


def test_a_users_traceback_has_only_user_frames_and_the_error():
    try:
        users_code()
    except ValueError as error:
        text = users_traceback(error)
    assert text.startswith("Traceback")
    assert 'raise ValueError("mine")' in text
    assert text.rstrip().endswith("ValueError: mine")


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


@pytest.mark.filterwarnings("ignore")
def test_a_workers_error_reaches_the_driver_as_the_same_exception(mailbox: FakeMailbox):
    report_failure(given(mailbox), 2, 5, DataError("x.parquet: damaged"))
    error = as_error(mailbox.events[0])
    assert type(error) is DataError
    assert str(error) == "x.parquet: damaged"
    assert error.exit_status == 4
    assert mailbox.events[0].step == 5


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
    for words in ("rank 1", "at step 5", "GiB", "--micro-batch (now 16)", "batch of 64 stays"):
        assert words in str(reported)
    assert "\n" not in str(reported)


def test_without_ray_a_peers_exit_is_not_reported_as_this_workers_error():
    reported = failure_event(RuntimeError("[gloo] Connection closed by peer [10.0.0.2]"))
    assert reported.message.startswith("another worker has ended")
    assert reported.rank is None
    try:
        raise ValueError("mine")
    except ValueError as error:
        reported = failure_event(error)
    assert reported.message.startswith("the task failed:\nTraceback")
    assert (reported.rank, reported.error) == (0, "ValueError")


def test_a_worker_joins_at_the_next_step_unless_the_storage_fails():
    session: Any = RaySession.__new__(RaySession)
    session.step, session._newcomer = 0, True
    session._notice = SimpleNamespace(requests=None)
    session._asked = lambda _: Requests()
    committer = SimpleNamespace(fails=False)
    session.recorder = SimpleNamespace(committer=committer)
    assert session.requests().look
    session._newcomer = False
    assert not session.requests().look
    session._newcomer = True
    committer.fails = True  # a new generation reads the storage
    assert not session.requests().look
