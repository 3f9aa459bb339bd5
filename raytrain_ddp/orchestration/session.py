"""The session under Ray Train."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train import CheckpointUploadMode
from torch import nn

from raytrain_ddp.checkpoint.layout import CONFIG_FILE, checkpoint_store, run_storage
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.training.local import agreed_latest
from raytrain_ddp.training.recorder import Best, Recorder
from raytrain_ddp.training.session import Record, Snapshot
from raytrain_ddp.training.world import World
from raytrain_ddp.uri import without_secrets

_PUSH_EVERY_S = 0.2


class RaySession:
    """Ray Train places the workers and registers the checkpoints; rank 0 commits each of them.

    Args:
        board: handle of the Board actor.
    """

    def __init__(self, config: TrainConfig, board: Any, best: Best) -> None:
        context = ray.train.get_context()
        self.world = World(
            rank=context.get_world_rank(),
            size=context.get_world_size(),
            local_rank=context.get_local_rank(),
            device=ray.train.torch.get_device(),
            threads=max(1, int(config.scaling.cpus_per_worker)),
        )
        if not run_storage(config).exists(CONFIG_FILE):
            raise PreflightError(
                f"storage = {without_secrets(config.storage)}: node {socket.gethostname()} does "
                "not see the run's folder there. Several nodes need a shared folder or a URI."
            )
        self._board = board
        self._events: deque[Record] = deque()  # the thread that commits adds to it, too
        self._pushed_at = 0.0
        self._answer: Any = None
        self._signal = 0
        self._store = checkpoint_store(run_storage(config))
        self._recorder = Recorder(config, best, self._events.append) if self.world.is_main else None

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left unsaid: the last events are sent and their arrival waited for."""
        if self._recorder is not None:
            self._recorder.close()
        self.push(wait_s=10)  # once what is under way has arrived
        self.push(wait_s=10)  # once that has arrived

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        wrapped: nn.Module = ray.train.torch.prepare_model(
            model, parallel_strategy_kwargs=dict(options) if self.world.size > 1 else None
        )
        return wrapped

    def latest(self) -> Checkpoint | None:
        """From the storage, not from Ray's register: that lags behind by a poll, and a checkpoint
        that it lists may be damaged."""
        return agreed_latest(self._store, self.world, self.tell)

    def restore_log(self, records: Sequence[Record]) -> None:
        if self._recorder is not None:
            self._recorder.restore(records)

    def log(self, record: Record) -> None:
        if self._recorder is not None:
            self._recorder.log(record)
            self.tell(record)

    def tell(self, event: Record) -> None:
        if self.world.is_main:
            self._events.append(event)
            if event["kind"] in ("phase", "plan"):
                self.push()

    def records(self) -> Sequence[Record]:
        return self._recorder.records if self._recorder is not None else ()

    def drain(self) -> None:
        if self._recorder is not None:
            self._recorder.drain()

    def report(self, metrics: Mapping[str, float], snapshot: Snapshot | None) -> None:
        """Ray calls the commit from its upload thread, then registers the checkpoint."""
        if self._recorder is None or snapshot is None:
            ray.train.report(dict(metrics), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
            return
        recorder = self._recorder

        def commit(_: ray.train.Checkpoint, __: str) -> ray.train.Checkpoint:
            storage = recorder.commit(snapshot).storage
            return ray.train.Checkpoint(storage.path, storage.fs)

        recorder.begin()
        place = self._store.storage
        try:
            ray.train.report(
                dict(metrics),
                checkpoint=ray.train.Checkpoint(place.path, place.fs),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=commit,
                delete_local_checkpoint_after_upload=False,
            )
        except BaseException:
            recorder.call_off()
            raise

    def stop_requested(self) -> int:
        """Also keeps the events flowing: it is asked once a step."""
        if self.world.is_main and time.monotonic() - self._pushed_at >= _PUSH_EVERY_S:
            self.push()
        return self._signal

    def push(self, wait_s: float = 0) -> None:
        """Sends the events without waiting, and looks at the answer to the push before."""
        if not self.world.is_main:
            return
        if self._answer is not None:
            ready, _ = ray.wait([self._answer], timeout=wait_s)
            if not ready:
                return  # the board's machine is busy: say more next time
            self._signal = ray.get(ready[0])
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._answer = self._board.push.remote(events)
        self._pushed_at = time.monotonic()
