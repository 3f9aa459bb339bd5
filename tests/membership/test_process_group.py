"""Waiting for the processes of a launcher, also if its variables are left over."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_python import fit

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.membership import process_group
from raytrain_ddp.membership.process_group import join_launched


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.setattr(process_group, "LIMIT_S", 2.0)
    return number


def joined(rank: int, size: int, ends: dict[str, Any], name: str = "") -> threading.Thread:
    """Joins in a thread; `ends` gets its end by name, and "told" what it told."""

    def join() -> None:
        tell: Callable[[str], None] = ends.setdefault("told", []).append
        stores: list[object] = ends.setdefault("stores", [])  # rank 0's serves the others
        try:
            ends[name or str(rank)] = join_launched(rank, size, stores.append, tell)
        except PreflightError as error:
            ends[name or str(rank)] = str(error)

    thread = threading.Thread(target=join)
    thread.start()
    return thread


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_for_a_process_that_does_not_come_ends(port: int, rank: int) -> None:
    ends: dict[str, Any] = {}
    joined(rank, 2, ends).join()
    assert str(port) in ends[str(rank)]


def test_a_rank_that_exists_twice_is_refused(port: int) -> None:
    ends: dict[str, Any] = {}
    threads = [joined(0, 3, ends), joined(1, 3, ends, "one"), joined(1, 3, ends, "other")]
    for thread in threads:
        thread.join()
    assert sum("has RANK = 1, too" in str(ends[name]) for name in ("one", "other")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_at_which_something_else_listens_is_refused(port: int, rank: int) -> None:
    ends: dict[str, Any] = {}
    with socket.create_server(("127.0.0.1", port)):
        joined(rank, 2, ends).join()
    assert f"127.0.0.1:{port}" in ends[str(rank)]


def test_a_wait_for_other_processes_ends_on_signals(tmp_path: Path, port: int) -> None:
    processes = []
    for rank, number in ((0, signal.SIGINT), (1, signal.SIGTERM)):
        folder = tmp_path / f"{rank}-{number}"
        folder.mkdir()
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port + len(processes))}
        processes.append((fit(folder, "--local", "--epochs", "1", **given), number))
    for process, number in processes:
        for line in process.stdout:
            if "waits for" in line:
                break
        process.send_signal(number)
        process.communicate(timeout=20)
        assert abs(process.returncode) in (number, 128 + number)
