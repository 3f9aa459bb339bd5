"""The session without Ray: one plain process, or the processes that torchrun starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.checkpoint.layout import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import PreflightError, RaytrainError
from raytrain_ddp.sections import ScalingConfig
from raytrain_ddp.training.recorder import Best, Recorder
from raytrain_ddp.training.session import Record, Snapshot
from raytrain_ddp.training.world import World, broadcast


class LocalSession:
    """The whole of `train` in this process, for debugging, tests and torchrun.

    Args:
        show: is given each event on rank 0.
    """

    def __init__(
        self, config: TrainConfig, world: World, best: Best, show: Callable[[Record], None]
    ) -> None:
        self.world = world
        self._show = show
        self._store = checkpoint_store(run_storage(config))
        self._recorder = Recorder(config, best, show) if world.is_main else None
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="committer")
        self._commit: Future[Checkpoint] | None = None
        self._signal = 0
        self._told = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> LocalSession:
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._handlers.items():
            signal.signal(number, before)
        self._committer.shutdown()
        if self._recorder is not None:
            self._recorder.close()

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        model = model.to(self.world.device)
        if self.world.size == 1:
            return model
        devices = [self.world.device] if self.world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **options)

    def latest(self) -> Checkpoint | None:
        return agreed_latest(self._store, self.world, self.tell)

    def restore_log(self, records: Sequence[Record]) -> None:
        if self._recorder is not None:
            self._recorder.restore(records)

    def log(self, record: Record) -> None:
        if self._recorder is not None:
            self._recorder.log(record)
            self._show(record)

    def tell(self, event: Record) -> None:
        if self.world.is_main:
            self._show(event)

    def records(self) -> Sequence[Record]:
        return self._recorder.records if self._recorder is not None else ()

    def drain(self) -> None:
        if self._commit is not None:
            self._commit.result()

    def report(self, metrics: Mapping[str, float], snapshot: Snapshot | None) -> None:
        if self._recorder is not None and snapshot is not None:
            self.drain()
            self._commit = self._committer.submit(self._recorder.commit, snapshot)

    def stop_requested(self) -> int:
        if self._signal and not self._told:
            self._told = True
            self.tell({"kind": "note", "text": "Stopping after this step; the checkpoint follows."})
        return self._signal

    def stop_on_signals(self) -> None:
        """From now on Ctrl-C and SIGTERM ask for a checkpoint and an end; a second ends at once."""

        def ask(number: int, _: FrameType | None) -> None:
            self._signal = number  # told later: a handler may have interrupted the display
            signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, ask)


def agreed_latest(
    store: CheckpointStore, world: World, tell: Callable[[Record], None]
) -> Checkpoint | None:
    """Rank 0 finds and verifies the newest checkpoint; all ranks take part and open the same."""
    found: tuple[CheckpointName | None, RaytrainError | None] = (None, None)
    if world.is_main:
        try:
            newest = store.latest(on_damaged=lambda line: tell({"kind": "note", "text": line}))
            found = (newest.name if newest else None, None)
        except RaytrainError as error:
            found = (None, error)
    name, problem = broadcast(found, world)
    if problem is not None:
        raise problem
    return store.open(name) if name is not None else None


def join_world(scaling: ScalingConfig, threads: int | None = None) -> World:
    """This process's world: torchrun's, if its variables are set, else alone.

    Args:
        scaling: `use_gpu` and `backend` are followed; the number of workers is torchrun's.
        threads: for CPU arithmetic; default: what OMP_NUM_THREADS or torch says.

    Raises:
        PreflightError: there is no GPU for this process, and one is wanted.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    use_gpu = gpus > 0 if scaling.use_gpu == "auto" else scaling.use_gpu
    if use_gpu and local_rank >= gpus:
        raise PreflightError(
            f"process {local_rank} of this machine wants a GPU and there are {gpus}: start fewer, "
            "or train on CPUs with --scaling.use-gpu False."
        )
    if size > 1 and not dist.is_initialized():
        over_nccl = use_gpu and scaling.backend != "gloo"
        dist.init_process_group("cpu:gloo,cuda:nccl" if over_nccl else "gloo")
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    return World(rank, size, local_rank, device, threads or torch.get_num_threads())
