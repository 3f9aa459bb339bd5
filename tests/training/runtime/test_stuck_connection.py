"""gloo permanently stops reading a connection if it received half of a message for a collective
that failed in the meantime. Other collectives then wait on, even if the connection is closed."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from processes import PRELOADED

from raytrain_ddp.membership.connections import Connections, write_to_all

_TIME_LIMIT_S = 20.0  # gloo's own time limit is 60 s here
_MANY_ELEMENTS = 100_000_000  # more than the buffers of sockets hold


def _rank(rank: int, port: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    connections = Connections()
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    connections.opened(dist.group.WORLD)
    dist.barrier()
    if rank == 0:
        sent = dist.isend(torch.ones(_MANY_ELEMENTS), 1, tag=1)
        time.sleep(2 * _TIME_LIMIT_S)
        del sent
        os._exit(0)
    big = torch.zeros(_MANY_ELEMENTS)
    work = dist.irecv(big, 0, tag=1)
    while not big[0]:
        time.sleep(0.0001)
    del work  # like gloo's own receive buffer when an all-reduce fails
    assert not big[-1]
    times: dict[str, float] = {}

    def end() -> None:
        time.sleep(0.5)
        connections.cut()
        time.sleep(2)
        times["replaced"] = time.monotonic()
        connections.replace()
        write_to_all(dist.group.WORLD, 1, 2)

    threading.Thread(target=end, daemon=True).start()
    try:
        dist.irecv(torch.zeros(4), 0, tag=2).wait()
        said = "no error"
    except RuntimeError as error:
        late = time.monotonic() - times["replaced"] if times else -1.0  # -1: it was only shut down
        said = f"{late:.2f} {error}"
    (Path(folder) / "said").write_text(said)
    dist.destroy_process_group()  # gloo removes the sockets from its epoll
    (Path(folder) / "said").write_text(f"{said}\nended")
    os._exit(0)


def test_leaving_ends_a_connection_that_gloo_no_longer_reads_without_ending_the_process(
    tmp_path: Path,
):
    import torch.distributed as dist

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    ranks: list[Any] = [
        context.Process(target=_rank, args=(rank, port, str(tmp_path))) for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        ranks[1].join(timeout=100)
    finally:
        for process in ranks:
            process.kill()
    late, _, rest = (tmp_path / "said").read_text().partition(" ")
    assert 0 <= float(late) < _TIME_LIMIT_S, rest
    assert rest.endswith("\nended")
    assert ranks[1].exitcode == 0
