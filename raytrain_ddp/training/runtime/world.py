"""This worker's place among the workers, process-wide set-up, seeds and broadcasts."""

from __future__ import annotations

import functools
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.config.process import cpus_of_process, ranks_of_launcher
from raytrain_ddp.config.sections import ComputeConfig, ScalingConfig
from raytrain_ddp.data.order import hash64, kept_globals, seed_globals
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.membership.process_group import (
    collective_timeout,
    join_launched,
    set_missing,
)

T = TypeVar("T")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class World:
    """One worker's place: its `rank` of `size`, its device, and its number of CPU threads.

    Args:
        ranks: those that the workers have in the run, which some workers may be missing from;
            empty: the same.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    threads: int
    ranks: tuple[int, ...] = ()

    def of_run(self, rank: int) -> int:
        """The rank in the run of a worker, for messages, logs and files."""
        return self.ranks[rank] if self.ranks else rank

    @property
    def is_main(self) -> bool:
        """Use it to guard writing, never a collective."""
        return self.rank == 0


def join_world(
    scaling: ScalingConfig,
    exact: bool = False,
    nccl: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> World:
    """This process's world: torchrun's if its variables are set, else of size 1.

    Args:
        scaling: `use_gpu`, `backend` and `cpus_per_worker` are used, the last as the number of
            threads. auto: with a GPU, this process's share of the CPUs, for its loader; without,
            OMP_NUM_THREADS or torch's own number.
        exact: auto is 1 on CPUs, as sums depend on the number of threads.
        nccl: see `nccl_settings`.
        tell: see `Waiting`.

    Raises:
        PreflightError: torchrun's variables contradict each other, the other processes do not
            connect, or a GPU is wanted but there is none for this process.
    """
    rank, size, local_rank = ranks_of_launcher()
    gpus = torch.cuda.device_count()
    use_gpu = gpus > 0 if scaling.use_gpu == "auto" else scaling.use_gpu
    if use_gpu and local_rank >= gpus:
        raise PreflightError(
            f"process {local_rank} of this machine needs a GPU, but there are {gpus}: start fewer, "
            "or train on CPUs with --scaling.use-gpu False."
        )
    if size > 1 and not dist.is_initialized():
        over_nccl = use_gpu and scaling.backend != "gloo"
        if over_nccl:
            set_missing(nccl or {})
        join_launched(
            rank,
            size,
            lambda store: dist.init_process_group(
                "cpu:gloo,cuda:nccl" if over_nccl else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=collective_timeout(scaling) if over_nccl else None,
            ),
            tell,
        )
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if scaling.cpus_per_worker != "auto" or (exact and not use_gpu):
        threads = scaling.threads
    else:
        threads = cpus_of_process() if use_gpu else torch.get_num_threads()
    return World(rank, size, local_rank, device, threads)


def choose_device(name: str) -> torch.device:
    """The device for ``--device``: cpu, cuda, cuda:NUMBER, or auto (a GPU if there is one).

    Raises:
        ConfigError: the name is invalid.
        PreflightError: the device does not exist.
    """
    gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    kind, colon, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:NUMBER.")
    if kind == "cuda" and int(number or 0) >= gpus:
        raise PreflightError(f"--device {name}: torch finds {gpus or 'no'} GPUs on this machine.")
    return torch.device(name)


def has_bf16(device: torch.device) -> bool:
    """Whether it is a GPU with bf16 in hardware: Ampere and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def set_up(world: World, compute: ComputeConfig) -> None:
    """Sets process-wide switches: gradients, threads, device, TF32, deterministic kernels."""
    torch.set_grad_enabled(True)  # the caller may be in torch.no_grad()
    torch.set_num_threads(world.threads)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        torch.set_float32_matmul_precision("high" if compute.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = compute.tf32
    if compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        # Filling what will be overwritten is a kernel for each tensor: 168 a step (ResNet-18).
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    elif world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(compute.deterministic)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of forward passes, by `compute.precision`."""
    dtype = _DTYPES.get(precision, torch.float32)
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)


def broadcast(value: Any, world: World, source: int = 0) -> Any:
    """The value of rank `source` on every rank; all ranks take part."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
    return box[0]


def from_all_ranks(value: T, world: World) -> list[T]:
    """The values of all ranks, by rank; all ranks take part."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast_tensor(tensor: Tensor) -> None:
    """Copies a tensor from rank 0 to all ranks; all take part.

    As bytes, since gloo supports few dtypes; and contiguous, since a collective would overwrite
    gaps in memory.
    """
    dense = tensor.detach().contiguous()  # itself if contiguous
    dist.broadcast(dense.view(-1).view(torch.uint8), 0)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def software_versions() -> dict[str, str]:
    """The versions of software that a result may depend on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("torchvision", "ray"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = _installed(name)
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found


_installed = functools.cache(metadata.version)  # reads and parses files: 3 ms each


def versions_here() -> dict[str, str]:
    """The versions of the software that affects the result, by name."""
    return {"raytrain_ddp": package_version(), **software_versions()}


def require_same_software(world: World) -> None:
    """Compares the versions of all ranks; all ranks take part.

    Ray compares only its own version and Python's. A node that joins later may have a different
    version of torch: the run would continue, but its result could not be reproduced.

    Raises:
        PreflightError: a version on this rank differs from that on rank 0.
    """
    mine, here = versions_here(), socket.gethostname()
    first, there = broadcast((mine, here), world)
    for name, own in mine.items():
        other = first.get(name, own)  # a package that a node lacks is not used
        if own != other:
            raise PreflightError(
                f"rank {world.of_run(world.rank)} (host {here}) has {name} {own}, rank "
                f"{world.of_run(0)} (host {there}) has {other}: install the same version on all "
                "nodes (raytrain doctor compares them)."
            )


def seed_all(seed: int) -> None:
    """Seeds torch's generators of all devices, numpy's and Python's."""
    seed_globals(seed)
    torch.manual_seed(seed)


def slot_seed(seed: int, step: int, slot: int) -> int:
    """The seed of all generators for one micro-batch of a global step, from 0. Below 2^63."""
    return hash64(seed, step, slot) >> 1


def seed_slot(device: torch.device, seed: int, step: int, slot: int) -> None:
    """Seeds torch's, numpy's and Python's generators for one micro-batch (dropout and the like)."""
    key = slot_seed(seed, step, slot)
    seed_globals(key)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)


@contextmanager
def keeping_generators(device: torch.device) -> Iterator[None]:
    """Restores torch's, numpy's and Python's generators afterward."""
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with kept_globals(), torch.random.fork_rng(gpus):
        yield
