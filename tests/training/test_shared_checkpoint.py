"""A start reads its checkpoint once: rank 0 does, and sends it to the others."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from tiny import bits, newest, plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.training.shared_checkpoint import Relay, SharedCheckpoint
from raytrain_ddp.training.world import World


def run_counted(rank: int, size: int, config: Mapping[str, Any]) -> Counter[str]:
    """How often this rank has read each file of a checkpoint, while it trained."""
    read, counted = Storage.read_into, Counter[str]()

    def reading(self: Storage, name: str, *given: Any) -> str:
        counted[name] += 1
        return read(self, name, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "read_into", reading)
        run_tiny(rank, size, config)
    return counted


def test_only_rank_0_reads_and_the_tensors_only_once(workers: Group, tmp_path: Path):
    whole, stopped = (tiny_config(tmp_path, name) for name in ("whole", "stopped"))
    workers(3, run_tiny, plain(whole))
    workers(3, run_tiny, plain(stopped), None, 7)
    first, *others = workers(3, run_counted, plain(stopped))
    assert first["model.safetensors"] == first["optimizer.safetensors"] == 1
    assert others == [{}, {}]
    assert bits(stopped) == bits(whole)


def read_failing(rank: int, size: int, config: Mapping[str, Any], failure: str) -> str:
    """What reading a file of the newest checkpoint raises on this rank."""
    world = World(rank, size, rank, torch.device("cpu"), 1)
    found = newest(from_dict(config))
    with pytest.MonkeyPatch.context() as patch:
        if failure == "storage":
            error = OSError(errno.EACCES, "no right")
            patch.setattr(Storage, "read_into", lambda *_: (_ for _ in ()).throw(error))
        shared = SharedCheckpoint(
            found.name, found.manifest, found.storage, lambda *_: False, world, Relay(world)
        )
        with pytest.raises(CheckpointError) as raised:
            shared.read("model.safetensors")
    return str(raised.value)


@pytest.mark.parametrize(
    ("failure", "told"),
    [("damage", r"model\.safetensors is damaged"), ("storage", r"fails: .*no right")],
)
def test_a_file_that_cannot_be_read_ends_all_ranks_with_the_same_words(
    failure: str, told: str, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "run", epochs=1)
    workers(1, run_tiny, plain(config), None, 2)
    path = Path(newest(config).storage.path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    texts = workers(3, read_failing, plain(config), failure)
    assert len({*texts}) == 1
    assert re.search(told, texts[0])
