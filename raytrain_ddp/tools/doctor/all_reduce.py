"""Measures all-reduces, in one actor per rank. Imports torch; receives the rendezvous address.

Sent to the nodes by value, like machine_facts.py.
"""

from __future__ import annotations

import math
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from raytrain_ddp.tools.doctor import network_facts

if TYPE_CHECKING:
    import torch

SIZES_MIB = (16, 64)
_MEET_S = 30.0  # time limit for the ranks to connect
_LEAST_CALLS, _MOST_CALLS = 1, 200
_FOR_EACH_S = 1.0
_MOST_S = 4.0  # larger sizes that would take longer are skipped


class Rank:
    """An actor; every call of `measure` forms its own process group."""

    def __init__(self) -> None:
        import torch.distributed  # takes seconds: done before the first call

        assert torch.distributed.is_available()

    def free_port(self) -> int:
        """A port for rank 0 to listen on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def measure(self, host: str, port: int, rank: int, size: int, backend: str) -> dict[str, Any]:
        """Times all-reduces; all ranks take part.

        Returns:
            latency_s: of 8 bytes, on the device.
            cpu_latency_s: of 8 bytes on the CPU, which each training step needs, too; None if
                the device is the CPU.
            bus_bytes_per_s: by MiB: 2 (n - 1) / n times the size per second, the rate at which each
                rank sends (the bus bandwidth of nccl-tests).
            talks: [own address, peer's address] of the connections that were made.
        """
        import torch
        import torch.distributed as dist

        has_gpu = torch.cuda.is_available()  # Ray hides those of others
        device = torch.device("cuda:0" if "nccl" in backend or has_gpu else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        before = network_facts.connections()
        dist.init_process_group(
            backend,
            init_method=f"tcp://{'[' + host + ']' if ':' in host else host}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_MEET_S),
        )
        try:
            latency_s = _seconds(torch.zeros(1, dtype=torch.float64, device=device))
            cpu_latency_s = None
            if device.type != "cpu":
                cpu_latency_s = _seconds(torch.zeros(1, dtype=torch.float64))
            rates: dict[str, float] = {}
            call_s = 0.0
            for mib in SIZES_MIB:
                if call_s * mib / SIZES_MIB[0] > _MOST_S:
                    break
                tensor = torch.zeros(mib * 2**18, device=device)
                call_s = _seconds(tensor)
                rates[str(mib)] = 2 * (size - 1) / size * mib * 2**20 / call_s
            talks = {
                (here[0], there[0])
                for here, there in network_facts.connections() - before
                if port not in (here[1], there[1])  # the rendezvous
            }
        finally:
            dist.destroy_process_group()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
        return {
            "latency_s": latency_s,
            "cpu_latency_s": cpu_latency_s,
            "bus_bytes_per_s": rates,
            "talks": sorted(map(list, talks)),
            "nccl": nccl,
        }


def _seconds(tensor: torch.Tensor) -> float:
    """Of one all-reduce in a series, on the slowest rank; all ranks take part."""
    import torch
    import torch.distributed as dist

    def run(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        spent = torch.tensor(
            [time.perf_counter() - began], dtype=torch.float64, device=tensor.device
        )
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent.item()) / calls

    run(1)  # makes connections, allocates memory
    calls = math.floor(_FOR_EACH_S / max(run(1), 1e-9))
    return run(min(max(calls, _LEAST_CALLS), _MOST_CALLS))
