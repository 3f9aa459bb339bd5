"""What doctor does on the nodes, in one actor per rank.

The class is sent by value, as a node may have another version of this package, or none: what its
methods need of it, or of torch, they import themselves.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MEET_S = 30.0  # time limit for the ranks to connect
_BUCKET_BYTES = 25 * 2**20  # what DDP reduces at once
_MAX_CALLS, _FOR_EACH_S = 200, 1.0


class NodeActor:
    """Each method returns JSON values, or raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def facts(self) -> dict[str, Any]:
        """What the node is and has.

        Returns:
            versions: see `versions`. devices: NVIDIA GPUs, even those that Ray does not count.
            resolves: the address that the host's name stands for; None: none.
        """
        resolves = None
        with suppress(OSError):
            resolves = socket.getaddrinfo(socket.gethostname(), None)[0][4][0]
        return {
            "versions": versions(),
            "devices": len([*Path("/dev").glob("nvidia[0-9]*")]),
            "resolves": resolves,
        }

    def commit(self, uri: str, folder: str) -> dict[str, Any]:
        """Reads the driver's checkpoint, and commits others: see storage_probe.py."""
        from raytrain_ddp.tools.doctor.storage_probe import commit_beside_driver

        return commit_beside_driver(uri, folder, self._name)

    def data(
        self, config: Mapping[str, Any], folder: str, import_paths: Sequence[str]
    ) -> dict[str, Any]:
        """Opens the data as a worker and ``--dry-run`` do.

        Args:
            config: in the form of `to_dict`.
            folder: the driver's working directory, for relative paths.
            import_paths: the location of the user's task on the driver's machine.

        Returns:
            train, eval: [rows, fingerprint] (eval None: there is no evaluation set).
        """
        import torch

        from raytrain_ddp.config.recipe import from_dict
        from raytrain_ddp.ray_backend.worker import enter_folder
        from raytrain_ddp.training.build import Build
        from raytrain_ddp.training.runtime.world import World

        enter_folder(folder, import_paths)
        build = Build(from_dict(dict(config)), World(0, 1, 0, torch.device("cpu"), threads=1))
        both = build.data, build.eval_data
        train, evaluation = (data and [data.rows, data.source.fingerprint()] for data in both)
        return {"train": train, "eval": evaluation}

    def free_port(self) -> int:
        """A port for rank 0 to listen on. Loads torch."""
        import torch.distributed

        assert torch.distributed.is_available()
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def measure(
        self, rank: int, host: str, port: int, size: int, backend: str, on_gpu: bool
    ) -> dict[str, Any]:
        """Times all-reduces; all ranks take part. A GPU that torch cannot use raises its error.

        Returns:
            latency_s: of 8 bytes on the CPU, which each training step needs.
            bus_bytes_per_s: of 25 MiB: 2 (n - 1) / n times the size per second, the rate at which
                each rank sends (the bus bandwidth of nccl-tests); on the GPU, if the run uses GPUs;
                0 for one rank.
            gpu: name, free and total bytes of this rank's; None on CPUs.
        """
        import torch
        import torch.distributed as dist

        device, gpu = torch.device("cuda:0" if on_gpu else "cpu"), None
        if on_gpu:  # Ray hides those of the other ranks
            torch.cuda.set_device(device)
            gpu = [torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device)]
        if size == 1:
            return {"latency_s": 0.0, "bus_bytes_per_s": 0.0, "gpu": gpu}
        dist.init_process_group(
            backend,
            init_method=f"tcp://{f'[{host}]' if ':' in host else host}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_MEET_S),
        )
        try:
            latency_s = _seconds(torch.zeros(1, dtype=torch.float64))
            bucket_s = _seconds(torch.zeros(_BUCKET_BYTES // 4, device=device))
        finally:
            dist.destroy_process_group()
        rate = 2 * (size - 1) / size * _BUCKET_BYTES / bucket_s
        return {"latency_s": latency_s, "bus_bytes_per_s": rate, "gpu": gpu}


def versions() -> dict[str, str | None]:
    """Versions of Python and installed packages, read from files; None: not installed. For this
    package also a hash of its code, as the version stays the same during development."""
    spec, digest = importlib.util.find_spec("raytrain_ddp"), hashlib.sha256()
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    own = f"{_installed('raytrain_ddp') or 'a checkout'}, code {digest.hexdigest()[:8]}"
    return {
        "Python": platform.python_version(),
        "Ray": _installed("ray"),
        "raytrain_ddp": own if spec else None,
        "torch": _installed("torch"),
        "NCCL": _installed("nvidia-nccl-cu13") or _installed("nvidia-nccl-cu12"),
    }


def _installed(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


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
        spent = torch.tensor([time.perf_counter() - began], device=tensor.device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        return float(spent.item()) / calls

    run(1)  # makes connections, allocates memory
    calls = int(_FOR_EACH_S / max(run(1), 1e-9))
    return run(min(max(calls, 1), _MAX_CALLS))
