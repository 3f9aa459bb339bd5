"""Which failures end a run at once, and which are left to Ray's retries. Starts no Ray."""

from __future__ import annotations

import errno

import pytest

from raytrain_ddp.errors import DataError
from raytrain_ddp.orchestration.launch import _as_error
from raytrain_ddp.orchestration.worker import _cause, _tell_failure, _users_traceback


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
        (SystemExit(1), "peer"),
        (OSError(errno.ENOSPC, "no space left on device"), "outside"),
        (OSError(errno.EIO, "input/output error"), "outside"),
        (ConnectionResetError("the store hung up"), "outside"),
        (TimeoutError("the store is slow"), "outside"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Ray's import
def test_a_failure_is_the_tasks_own_a_peers_or_from_outside(error: BaseException, cause: str):
    assert _cause(error) == cause


def users_code() -> None:
    raise ValueError("mine")


def test_the_users_traceback_has_the_users_frames_and_the_error():
    try:
        users_code()
    except ValueError as error:
        text = _users_traceback(error)
    assert text.startswith("Traceback")
    assert 'raise ValueError("mine")' in text
    assert text.rstrip().endswith("ValueError: mine")


class FakeBoard:
    """Takes what a worker pushes, as the actor's handle would."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self.push = self

    def remote(self, events: list[dict[str, object]]) -> None:
        self.events += events


@pytest.mark.filterwarnings("ignore")
def test_a_workers_error_reaches_the_driver_as_the_same_exception(monkeypatch: pytest.MonkeyPatch):
    import ray

    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    board = FakeBoard()
    _tell_failure(board, 2, DataError("x.parquet: damaged"))
    error = _as_error(board.events[0])
    assert type(error) is DataError
    assert str(error) == "x.parquet: damaged"
    assert error.exit_status == 4
