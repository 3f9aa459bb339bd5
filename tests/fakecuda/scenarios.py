"""The scenarios run on emulated GPUs, rank by rank; test_emulated_gpu.py has the assertions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import emulated
import torch
import torch.distributed as dist
from tiny import ScriptedMembership, decode_tensors, plain, run_tiny, tiny_config

from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import LogConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DivergedError
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.loop import take_part
from raytrain_ddp.training.membership import Membership, Requests
from raytrain_ddp.training.runtime.world import World, choose_device, join_world


def trains(
    rank: int, size: int, folder: Path, device: str, script: Any = None, **changes: Any
) -> dict[str, Any]:
    """Two epochs of the tiny task, with an evaluation and a checkpoint after each."""
    log = LogConfig(every_steps=5, tensorboard=False)
    config = tiny_config(folder, "tiny", **{"epochs": 2, "log": log, **changes})
    place = f"cuda:{rank}" if device == "cuda" else "cpu"
    ran = run_tiny(rank, size, plain(config), device=place, prepare=_count_steps, **(script or {}))
    return {"digest": ran.digest, "start": ran.start_step, "step": ran.outcome.step}


def _count_steps(membership: ScriptedMembership) -> None:
    def begin(step: int) -> None:
        emulated.step = step

    membership.before_step = begin


def fits(
    rank: int, size: int, folder: Path, device: str, name: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """A few steps of the built-in task on the bundled digits, an evaluation and a checkpoint."""
    config = _changed(
        {
            "name": name,
            "storage": str(folder),
            "epochs": 1,
            "batch_size": 48,
            "micro_batch": 8,
            "limit_train_batches": 6,
            "limit_eval_batches": 3,
            "log": {"every_steps": 3, "tensorboard": False},
        },
        changes,
    )
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    task, events = load_task(config), []
    world = World(rank, size, rank, place, 1)
    membership = _Counting(world, events.append)
    outcome = take_part(membership, config, lambda _: Build(config, world, task))
    assert outcome is not None
    losses = [event.loss for event in events if hasattr(event, "loss")]
    weights = _weights_of(folder / name) if rank == 0 else {}
    return {"step": outcome.step, "losses": losses, **weights}


class _Counting(Membership):
    def requests(self, step: int | None, may_join: bool = False) -> Requests:
        emulated.step += step is not None
        return super().requests(step)


def _changed(base: dict[str, Any], changes: Mapping[str, Any]) -> TrainConfig:
    for name, value in changes.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return from_dict(base)


def _weights_of(run: Path) -> dict[str, Any]:
    """Of the only checkpoint: a hash of the trained weights, and the sums of the evaluated ones."""
    (manifest,) = run.rglob("manifest.json")
    evaluated = decode_tensors((manifest.parent / "model.safetensors").read_bytes())
    trained = manifest.parent / "trained.safetensors"
    own = (trained if trained.exists() else manifest.parent / "model.safetensors").read_bytes()
    return {
        "trained": hashlib.sha256(own).hexdigest(),
        "evaluated": [float(tensor.double().sum()) for tensor in evaluated.values()],
    }


# ------------------------------------------------------------------ mistakes to be detected


def forgets(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Trains without the feed's wait for its copies."""
    # What has not arrived is poisoned, so that the loss may not be finite.
    with patch.object(torch.cuda.Stream, "wait_stream"), suppress(DivergedError):
        return trains(rank, size, folder, "cuda", epochs=1)
    return {}


def mistakes(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Short mistakes that fail on a real GPU, and what the emulator reports for them."""
    gpu = torch.device("cuda", 0)
    found = {
        "not waited": _kinds(lambda: _crosses(gpu, waits=False, records=True)),
        "not recorded": _kinds(lambda: _crosses(gpu, waits=True, records=False)),
        "right": _kinds(lambda: _crosses(gpu, waits=True, records=True)),
        "uninitialized": bool(torch.empty(2**22, device=gpu).isnan().all()),
    }
    refused: dict[str, Callable[[], object]] = {
        "mixed devices": lambda: torch.ones(3, device=gpu) + torch.ones(3),
        "too large": lambda: torch.empty(2**40, device=gpu),
    }
    for name, call in refused.items():
        try:
            call()
        except Exception as error:
            found[name] = type(error).__name__
    return found


def _kinds(call: Callable[[], None]) -> list[str]:
    """Of the races that a call makes."""
    call()
    emulated.report()
    found = sorted({kind for kind, *_ in emulated.races})
    emulated.races.clear()
    return found


def _crosses(gpu: torch.device, waits: bool, records: bool) -> None:
    """A tensor is created on one stream, read on another one, and freed; its memory is reused."""
    host, beside = torch.ones(4).pin_memory(), torch.cuda.Stream(gpu)
    training = torch.cuda.current_stream(gpu)
    with torch.cuda.stream(beside):
        moved = host.to(gpu, non_blocking=True)
    if waits:
        training.wait_stream(beside)
    _ = moved + 1
    if records:
        moved.record_stream(training)
    del moved
    with torch.cuda.stream(beside):
        _ = host.to(gpu, non_blocking=True)


# ------------------------------------------------------------------ torchrun


def joins(rank: int, size: int, folder: Path, port: int) -> list[str]:
    """The device of a process under torchrun, which has a collective on both kinds of tensors."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in {**address, **place}.items()})
    world = join_world(ScalingConfig(backend="gloo"))
    for device in (world.device, torch.device("cpu")):
        total = torch.ones(3, device=device)
        dist.all_reduce(total)
        assert total.tolist() == [size] * 3
    dist.destroy_process_group()
    return [str(device) for device in (world.device, choose_device("auto"), choose_device("cpu"))]
