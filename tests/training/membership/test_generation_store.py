"""The store of a generation: the roster decides how long ranks wait for its server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raytrain_ddp.training.membership.generation_store import open_store
from raytrain_ddp.training.membership.roster import Seat


def is_over_after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


@pytest.mark.parametrize("answers", ["refuses", "is silent"])
def test_a_dead_store_server_is_a_lost_rank(answers: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers == "is silent":  # the kernel accepts connections, nothing reads them
            server.listen(5)
        seat = Seat(1, f"127.0.0.1:{server.getsockname()[1]}", "key", rank=1, size=2)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="a rank was lost before"):
            open_store(seat, None, 1, is_over_after(0.6))
        assert time.monotonic() - began < 3


def test_a_rank_that_does_not_connect_is_a_lost_rank() -> None:
    offered = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RuntimeError, match="a rank was lost before"):
        open_store(
            Seat(1, f"127.0.0.1:{offered.port}", "key", 0, 2), offered, 0, is_over_after(0.6)
        )


def test_ranks_that_all_connect_share_keys_prefixed_by_the_generation() -> None:
    offered = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [Seat(1, f"127.0.0.1:{offered.port}", "key", rank, 2) for rank in range(2)]
    found = []
    other = threading.Thread(
        target=lambda: found.append(open_store(seats[1], None, 1, is_over_after(60)))
    )
    other.start()
    store = open_store(seats[0], offered, 0, is_over_after(60))
    other.join(30)
    store.set("from 0", "x")
    assert found[0].get("from 0") == b"x"
    assert offered.get("key/from 0") == b"x", "another generation could find it"
