"""A checkpoint is read once per start: rank 0 reads it and sends it to the others."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_storage import manifest
from processes import Group
from tiny import bits, plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint import streams
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.state.shared_checkpoint import SharedCheckpoint


def run_counted(rank: int, size: int, config: Mapping[str, Any]) -> Counter[str]:
    """How often this rank read each file of a checkpoint during the training."""
    read, counted = Storage.read_into, Counter[str]()

    def reading(self: Storage, name: str, *given: Any) -> str:
        counted[name] += 1
        return read(self, name, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "read_into", reading)
        run_tiny(rank, size, config)
    return counted


def test_only_rank_0_reads_the_checkpoint_and_each_tensor_file_once(workers: Group, tmp_path: Path):
    whole, stopped = (tiny_config(tmp_path, name) for name in ("whole", "stopped"))
    workers(3, run_tiny, plain(whole))
    workers(3, run_tiny, plain(stopped), None, 7)
    first, *others = workers(3, run_counted, plain(stopped))
    assert first["model.safetensors"] == first["optimizer.safetensors"] == 1
    assert others == [{}, {}]
    assert bits(stopped) == bits(whole)


def start_failing(rank: int, size: int, config: Mapping[str, Any]) -> None:
    def reading(*_: object) -> str:
        raise OSError(errno.EACCES, "no right")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "read_into", reading)
        run_tiny(rank, size, config)


def test_a_storage_that_cannot_be_read_ends_all_ranks_with_the_same_message(
    workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "run", epochs=1)
    workers(1, run_tiny, plain(config), None, 2)
    ended = workers.outcomes(3, start_failing, plain(config))
    assert all(each.exit_status == CheckpointError.exit_status for each in ended)
    (line,) = {each.text.splitlines()[-1] for each in ended}
    assert "no right" in line


SIZE = 2**18 + 5  # of 1 MiB and more, tensors are read by themselves


def receive_tensors(
    rank: int, size: int, config: Mapping[str, Any]
) -> tuple[list[str], float, bool, int]:
    """The tensors of a start whose ranks have different tensors already."""
    made = from_dict(config)
    world = World(rank, size, rank, torch.device("cpu"), 1)
    counted = Counter[str]()
    read = Storage.read_into

    def reading(self: Storage, name: str, *given: Any) -> str:
        counted[name] += 1
        return read(self, name, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK_BYTES", 10**6)
        patch.setattr(Storage, "read_into", reading)
        known = {} if rank == 1 else {f"w{n}": torch.zeros(SIZE) for n in range(rank, 4, 2)}
        reported: list[Any] = []
        session = LocalSession(made, world, Best("loss", "min"), reported.append)
        found = session.latest({"model.safetensors": known})
        assert isinstance(found, SharedCheckpoint)
        tensors = found.tensors("model.safetensors")
        own = all(tensors[n].data_ptr() == known[n].data_ptr() for n in known)
        session.close()
    total = float(sum(each.double().sum() for each in tensors.values()))
    return sorted(tensors), total, own, counted["model.safetensors"]


@pytest.mark.parametrize("damaged", [b"", b"shape", b"F32"])
def test_each_rank_receives_tensors_into_its_existing_memory(
    damaged: bytes, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "run")
    store = checkpoint_store(run_storage(config))
    for step in (1, 2):
        made = {f"w{n}": torch.full((SIZE,), float(step * n)) for n in range(4)}
        store.commit(manifest(step), {"model.safetensors": encode_tensors(made)})
    if damaged:
        path = Path(store.storage.path) / "step-00000002-a0001" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[data.index(damaged) + 1] ^= 1
        data[-1] ^= 1
        path.write_bytes(data)
    found = workers(3, receive_tensors, plain(config))
    step = 1 if damaged else 2
    names = [f"w{n}" for n in range(4)]
    assert [each[:3] for each in found] == [(names, 6.0 * SIZE * step, True)] * 3
    assert [each[3] for each in found] == [1 + bool(damaged), 0, 0]
