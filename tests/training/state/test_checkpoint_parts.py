"""Several ranks write a checkpoint: it is complete or does not exist, and has the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch
from faulty_storage import Faults, FaultyHandler, Killed
from processes import Died, Group
from tiny import kept_steps, newest, plain, run_tiny, tiny_config
from torch import Tensor

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.config.sections import CheckpointConfig, DdpConfig, EmaConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.failpoints import arm
from raytrain_ddp.training.state import checkpoint_parts
from raytrain_ddp.training.state.checkpoint_parts import (
    PARTS,
    PartWriter,
    divided,
    sealed,
    stems_of,
)

# ------------------------------------------------------------------ files per rank


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_parts, "LEAST_BYTES", 1)


def state(count: int = 30) -> dict[str, Tensor]:
    return {f"state/{n}/exp_avg": torch.full((1 + n % 7,), float(n)) for n in range(count)}


def test_a_small_state_is_one_file_written_by_rank_0(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_parts, "LEAST_BYTES", 10_000)
    assert stems_of(state()) == {"optimizer": [*state()]}
    assert divided(state(), [], [], 3) == [{"optimizer": [*state()]}, {}, {}]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 20])
def test_the_files_do_not_depend_on_the_ranks_and_each_tensor_is_in_one_file(size: int):
    parts = divided(state(), [torch.zeros(9)], [], size)
    assert len(parts) == size
    files = {stem: names for each in parts for stem, names in each.items()}
    assert dict(sorted(files.items())) == stems_of(state())
    assert sum(len(each) for each in parts) == len(files) == PARTS
    assert sorted(n for names in files.values() for n in names) == sorted(state())


def test_ranks_of_all_hosts_write_and_rank_0_does_not_if_the_model_is_large():
    hosts = ["a"] * 8 + ["b"] * 8 + ["c"] * 8
    own = [rank for rank, each in enumerate(divided(state(), [], hosts, 24)) if each]
    assert own == [0, 1, 2, 8, 9, 10, 16, 17]
    model = [torch.zeros(10_000)]
    assert not divided(state(), model, hosts, 24)[0]


def test_a_large_tensor_is_not_split_between_parts():
    parts = divided({"a": torch.zeros(1000), "b": torch.zeros(1)}, [], [], 2)
    assert sorted(stem for each in parts for stem in each) == ["optimizer-0", "optimizer-1"]


# ------------------------------------------------------------------ files and their seals


def write(folder: Storage, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    writer = PartWriter(1, lambda _: True)
    writer.submit(folder, 7, files)
    try:
        writer.wait()
    finally:
        writer.close()


FILES = {"optimizer-0": {"a": torch.arange(100.0)}, "optimizer-1": {"b": torch.arange(50.0)}}


def test_sealed_files_are_found_with_their_hashes(tmp_path: Path):
    folder = open_storage(str(tmp_path)).join("step")
    write(folder, FILES)
    found = sealed(folder, [*FILES], 7, lambda _: True, 0.0)
    for name, entry in found.items():
        assert entry.size_bytes == folder.size_bytes(name)
        assert entry.sha256 == folder.sha256(name)
    assert [*found] == ["optimizer-0.safetensors", "optimizer-1.safetensors"]


def test_rank_0_waits_for_a_late_file(tmp_path: Path):
    folder = open_storage(str(tmp_path)).join("step")
    later = threading.Timer(0.3, write, (folder, FILES))
    later.start()
    pause = threading.Event()
    assert len(sealed(folder, [*FILES], 7, lambda s: not pause.wait(s), 0.0)) == 2
    later.join()


@pytest.mark.parametrize("closing", [False, True])
def test_a_file_that_is_never_written_is_an_error_that_is_not_retried(
    closing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint_parts, "_CLOSING_S" if closing else "_LONGEST_S", 0.2)
    folder = open_storage(str(tmp_path)).join("step")
    write(folder, {"optimizer-0": FILES["optimizer-0"]})
    with pytest.raises(OSError, match="other ranks have not written optimizer-1") as raised:
        sealed(folder, [*FILES], 7, lambda _: not closing, 0.0)
    assert raised.value.errno == errno.ECANCELED


def test_rank_0_is_told_why_a_rank_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = open_storage(str(tmp_path)).join("step")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Storage, "write", full)
    write(folder, FILES)
    with pytest.raises(OSError, match=r"rank 1: .*No space left") as raised:
        sealed(folder, [*FILES], 7, lambda _: True, 0.0)
    assert raised.value.errno == errno.ECANCELED


def read_seal(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except ValueError:  # half of a seal, on a store without atomic writes
        return {}


class SealedFiles:
    """A folder in which each sealed file must match its seal."""

    def __init__(self, root: Path) -> None:
        self.root, self.seen = root, dict[str, str]()

    def check(self) -> None:
        for path in self.root.glob("*.seal.json"):
            if "sha256" in (seal := read_seal(path)):
                file = self.root / path.name.replace(".seal.json", ".safetensors")
                data = file.read_bytes()
                assert seal["size_bytes"] == len(data)
                assert seal["sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_a_sealed_file_is_complete_and_unchanged_whichever_write_operation_fails(
    mode: str, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.fsync", lambda _: None)
    number, reached = 0, True
    while reached:
        root = tmp_path / str(number)
        root.mkdir()
        watched = SealedFiles(root)

        class CheckingFaults(Faults):
            def __call__(self, *given: Any) -> Any:
                watched.check()  # noqa: B023
                return super().__call__(*given)

        faults = CheckingFaults(mode, number)
        folder = Storage(pafs.PyFileSystem(FaultyHandler(faults, is_local)), str(root), is_local)
        try:
            write(folder, FILES)
        except Killed:
            assert "kill" in mode
        watched.check()
        reached = len(faults.done) > number
        whole = [path for path in root.glob("*.seal.json") if "sha256" in read_seal(path)]
        if not reached or mode in ("eio", "late", "torn"):
            assert len(whole) == 2, f"{mode} in operation {number}: it is tried again"
        number += 1
    assert number > 4


# ------------------------------------------------------------------ whole runs


def run_in_parts(
    rank: int,
    size: int,
    config: Mapping[str, Any],
    points: str = "",
    folder: str = "",
    **how: int,
) -> Any:
    before = checkpoint_parts.LEAST_BYTES
    checkpoint_parts.LEAST_BYTES = 1
    arm(points, folder)
    try:
        return run_tiny(rank, size, config, **how)
    finally:
        arm("", "")
        checkpoint_parts.LEAST_BYTES = before


def stopped(rank: int, size: int, config: Mapping[str, Any], at: int) -> Any:
    return run_in_parts(rank, size, config, stop_at=at)


ADAM: dict[str, Any] = {
    "exact": True,
    "optim": OptimConfig(name="adamw", lr=0.01),
    "checkpoint": CheckpointConfig(every_s=0.0, every_steps=4, keep_last=3),
}


def hashes(config: TrainConfig) -> dict[str, str]:
    files = newest(config).manifest.files
    return {n: e.sha256 for n, e in files.items() if n.endswith(".safetensors")}


def leftovers(config: TrainConfig) -> list[str]:
    return checkpoint_store(run_storage(config))._list().leftovers()


@pytest.fixture(scope="module")
def alone(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """An undisturbed run of one process, whose checkpoints have the same files."""
    config = tiny_config(tmp_path_factory.mktemp("alone"), "alone", **ADAM)
    workers(1, run_in_parts, plain(config))
    return config


def test_three_ranks_write_the_same_files_as_one(
    workers: Group, alone: TrainConfig, tmp_path: Path
):
    config = tiny_config(tmp_path, "run", **ADAM)
    ran = workers(3, run_in_parts, plain(config))
    assert len(hashes(config)) == 1 + PARTS
    assert hashes(config) == hashes(alone)
    assert kept_steps(config) == kept_steps(alone)
    newest(config).verify()
    assert not leftovers(config)
    folder = Path(newest(config).storage.path)
    assert 4 <= len([*folder.glob("*.seal.json")]) <= PARTS, "ranks 1 and 2 wrote some"
    assert not [e for e in ran[0].events if e["kind"] == "checkpoint_failed"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_resumes_from_parts_with_the_same_bits(
    workers: Group, alone: TrainConfig, tmp_path: Path, size: int
):
    config = tiny_config(tmp_path, "run", **ADAM)
    assert workers(3, stopped, plain(config), 14)[0].outcome.step == 14
    ran = workers(size, run_in_parts, plain(config))
    assert ran[0].start_step == 14
    assert hashes(config) == hashes(alone)


def test_a_run_can_switch_between_checkpoints_of_one_file_and_of_parts(
    workers: Group, alone: TrainConfig, tmp_path: Path
):
    config = tiny_config(tmp_path, "run", **ADAM)
    workers(3, run_tiny, plain(config), None, 9)  # before there were parts
    assert sorted(hashes(config)) == ["model.safetensors", "optimizer.safetensors"]
    workers(2, stopped, plain(config), 18)
    assert len(hashes(config)) == 1 + PARTS
    assert workers(1, run_in_parts, plain(config))[0].start_step == 18
    assert hashes(config) == hashes(alone)


KILLS = [
    "checkpoint.begin:kill@step=16",
    "checkpoint.payload:kill@step=16,hit=2",
    "checkpoint.parts:kill@step=16",
    "checkpoint.manifest:kill@step=16",
    "checkpoint.committed:kill@step=16",
    "checkpoint.part:kill@rank=1,step=16",
    "checkpoint.part:kill@rank=2,step=16,hit=2",
    "checkpoint.sealed:kill@rank=1,step=16",
    "checkpoint.sealed:kill@rank=2,step=16,hit=2",
]


@pytest.mark.parametrize("point", KILLS)
def test_a_rank_killed_at_any_point_leaves_a_complete_checkpoint_or_none(
    workers: Group, alone: TrainConfig, tmp_path: Path, point: str
):
    config = tiny_config(tmp_path, "run", **ADAM)
    fired = str(tmp_path / "fired")
    results = workers.outcomes(3, run_in_parts, plain(config), point, fired, wait_s=12.0)
    assert any(isinstance(each, Died) for each in results), results
    store = checkpoint_store(run_storage(config))
    for name in store.names():
        store.open(name).verify()
    ran = workers(3, run_in_parts, plain(config))
    assert ran[0].start_step in (12, 16, 20)
    assert hashes(config) == hashes(alone)
    assert not leftovers(config)


def test_a_part_that_cannot_be_written_fails_one_checkpoint_and_the_training_continues(
    workers: Group, alone: TrainConfig, tmp_path: Path
):
    config = tiny_config(tmp_path, "run", **ADAM)
    ran = workers(
        *(3, run_in_parts, plain(config)),
        *("checkpoint.part:enospc@rank=1,step=16", str(tmp_path / "fired")),
    )
    failed = [e for e in ran[0].events if e["kind"] == "checkpoint_failed"]
    assert [(e["step"], e["in_a_row"]) for e in failed] == [(16, 1)]
    assert "rank 1" in failed[0]["message"]
    assert hashes(config) == hashes(alone)
    assert not leftovers(config), "the next commit removed what was written"


def test_a_transient_failure_of_a_part_is_retried(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "run", **ADAM)
    ran = workers(
        *(3, run_in_parts, plain(config)),
        *("checkpoint.sealed:eio@rank=2,step=16", str(tmp_path / "fired")),
    )
    assert not [e for e in ran[0].events if e["kind"] == "checkpoint_failed"]
    newest(config).verify()


def test_runs_with_an_average_or_a_sharded_optimizer_write_parts_with_the_same_bits(
    workers: Group, tmp_path: Path
):
    averaged = {**ADAM, "ema": EmaConfig(decay=0.9)}
    one = tiny_config(tmp_path, "one", **averaged)
    workers(1, run_in_parts, plain(one))
    for name, ddp in (("whole", DdpConfig()), ("shares", DdpConfig(shard_optimizer=True))):
        config = replace(tiny_config(tmp_path, name, **averaged), ddp=ddp)
        workers(3, stopped, plain(config), 13)
        workers(3, run_in_parts, plain(config))
        assert len(hashes(config)) == 2 + PARTS
        assert hashes(config) == hashes(one)
