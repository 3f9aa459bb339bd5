"""Whose the connections of a process group are."""

from __future__ import annotations

import os
import socket

import pytest
from processes import Group

from raytrain_ddp.training.runtime.connections import Connections, require_members


def _met(rank: int, size: int, keys: tuple[str, ...]) -> str:
    try:
        require_members(keys[rank])
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("keys", "strangers"),
    [("aaa", set[int]()), ("aab", {0, 1, 2}), ("abc", {0, 1, 2})],
)
def test_a_rank_of_another_group_is_recognized(workers: Group, keys: str, strangers: set[int]):
    reported = workers(3, _met, tuple(keys))
    assert {rank for rank, text in enumerate(reported) if "another process group" in text} == (
        strangers
    )


def test_a_number_that_is_another_connections_by_now_is_not_cut():
    connections = Connections()
    own, peer = socket.socketpair()
    connections._own = {own.fileno(): os.readlink(f"/proc/self/fd/{own.fileno()}")}
    assert [number for number, _ in connections._connections()] == [own.fileno()]
    number = own.detach()
    other, others_peer = socket.socketpair()
    os.dup2(other.fileno(), number)
    connections.cut()
    others_peer.send(b"x")
    assert other.recv(1) == b"x"
    os.close(number)
    for each in (peer, other, others_peer):
        each.close()
