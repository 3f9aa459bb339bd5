"""The connections that belong to a process group."""

from __future__ import annotations

import os
import socket

from raytrain_ddp.training.runtime.connections import Connections


def test_a_file_descriptor_reused_by_another_connection_is_not_cut():
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
