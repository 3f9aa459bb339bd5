"""Old checkpoints are read: a table of what was in them and what is restored.

tests/golden/format-1/ was written by version 0.1.0, and so was format-1-in-parts/, in which three
ranks have written the optimizer's state into eight files. A format written by a later version gets
a folder of its own; existing folders never change.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_storage import sealed
from torch import nn

from raytrain_ddp.checkpoint.manifest import FORMAT, DamagedError
from raytrain_ddp.checkpoint.run_folder import config_of
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.config.recipe import changed_fields
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.training.state.train_state import TrainState

GOLDEN = Path(__file__).parents[1] / "golden"
NEWEST = CheckpointName(12, 1)
DIGEST = "69d260710e4b82bea7389e315118eb94950cab60de2b328fa1764bbeb7be3b2f"


@dataclass(frozen=True)
class Old:
    """A checkpoint of an earlier version, made from a golden one.

    Attributes:
        folder: in tests/golden.
        config, state: fields that it has besides; None: that it lacks.
        manifest: other fields of it.
        restored: what `TrainState.load` finds, if not that of the golden one.
    """

    folder: str = "format-1"
    config: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    restored: Mapping[str, Any] = field(default_factory=dict)


WITHDRAWN = {"ddp.powersgd_rank": 4, "ddp.shard_optimizer": False, "scaling.on_divergence": "stop"}
OLD = {
    "format 1": Old(),
    "optimizer in eight parts": Old("format-1-in-parts"),
    "without fields that came later": Old(config={"optim.clip_norm": None, "log": None}),
    "fields withdrawn later": Old(config=WITHDRAWN),
    "other values of these": Old(
        config={"ddp.shard_optimizer": True, "scaling.on_divergence": "resync"}
    ),
    "compressed by PowerSGD": Old(config={"ddp.powersgd_rank": 2, "ddp.compression": "powersgd"}),
    "counts of skipped updates": Old(state={"nonfinite": 3}, restored={"nonfinite": 3}),
    "start of a branch": Old(
        state={"branched_at": 12, "renewed": ["lr"]},
        restored={"branched_at": 12, "lr": 0.001, "betas": (0.9, 0.999)},
    ),
    "start of a branch with another optimizer": Old(
        state={"renewed": ["*"]}, restored={"lr": 0.001, "betas": (0.9, 0.999)}
    ),
}


def golden_state() -> TrainState:
    """A model and an optimizer like those of the golden checkpoint."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def digest_of(state: TrainState) -> str:
    """Digest of all numbers in the model and the optimizer."""
    digest = hashlib.sha256()
    tensors = dict(state.model.state_dict())
    for number, moments in state.optimizer.state_dict()["state"].items():
        tensors |= {f"{number}/{name}": tensor for name, tensor in moments.items()}
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def copied(tmp_path: Path) -> CheckpointStore:
    shutil.copytree(GOLDEN / "format-1", tmp_path / "checkpoints")
    return CheckpointStore(open_storage(str(tmp_path / "checkpoints")))


def reseal(folder: Path, **changes: object) -> None:
    """Writes other fields into a manifest, with a valid checksum."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["sha256"]
    (folder / "manifest.json").write_bytes(sealed({**fields, **changes}))


def opened(old: Old, folder: Path) -> Checkpoint:
    """The checkpoint, found by a store."""
    shutil.copytree(GOLDEN / old.folder, folder)
    place = folder / str(NEWEST)
    written = json.loads((place / "manifest.json").read_bytes())
    for name, value in old.config.items():
        section, _, last = name.rpartition(".")
        table = written["config"][section] if section else written["config"]
        table[last] = value
        if value is None:
            del table[last]
    state = json.dumps({**json.loads((place / "state.json").read_bytes()), **old.state}).encode()
    (place / "state.json").write_bytes(state)
    entry = {"size_bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    files = {**written["files"], "state.json": entry}
    reseal(place, config=written["config"], files=files, **old.manifest)
    checkpoint = CheckpointStore(open_storage(str(folder))).latest(pytest.fail)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("name", OLD)
def test_fault_47_old_checkpoints_are_read(name: str, tmp_path: Path) -> None:
    old, golden = OLD[name], opened(Old(), tmp_path / "golden")
    checkpoint = opened(old, tmp_path / "old")
    assert checkpoint.name == NEWEST
    manifest = checkpoint.manifest
    assert (manifest.epoch, manifest.world_size, manifest.metrics) == (1, 3, {"top1": 0.5})
    config = config_of(checkpoint)
    assert config.name == "golden"
    assert changed_fields(golden.manifest.config, config) == []
    state = golden_state()
    log = state.load(checkpoint)
    assert [record.step for record in log] == list(range(1, 13))
    group = state.optimizer.param_groups[0]
    found = {**vars(state), "lr": group["lr"], "betas": tuple(group["betas"])}
    expected = {
        **{"step": 12, "best": 0.5, "best_step": 12, "skipped": 0, "nonfinite": 0},
        **{"evaluated_step": 12, "branched_at": 0, "lr": 0.01, "betas": (0.9, 0.99)},
        **old.restored,
    }
    assert {name: found[name] for name in expected} == expected
    assert digest_of(state) == DIGEST


def test_fault_47_each_format_ever_written_and_that_of_today_are_in_the_table() -> None:
    folders = {path.name for path in GOLDEN.iterdir() if path.is_dir()}
    assert {old.folder for old in OLD.values()} == folders
    assert f"format-{FORMAT}" in folders
    for folder in folders:
        checkpoint = CheckpointStore(open_storage(str(GOLDEN / folder))).open(NEWEST)
        checkpoint.verify()
        assert folder.startswith(f"format-{checkpoint.manifest.format}")


def test_fault_47_a_newer_format_stops_the_run_and_is_named_in_the_error(tmp_path: Path) -> None:
    """Resuming from an older checkpoint would silently lose work after a downgrade."""
    store = copied(tmp_path)
    checkpoint = store.open(NEWEST)
    files = {name: checkpoint.read(name) for name in checkpoint.manifest.files}
    newer = store.commit(replace(checkpoint.manifest, step=20), files)
    changes = {"format": FORMAT + 1, "written_by": "9.8.7", "more": {"unknown": 1}}
    reseal(Path(newer.storage.path), **changes)
    for _ in range(2):  # and it is not treated as damage
        with pytest.raises(CheckpointError, match=r"9\.8\.7") as caught:
            store.latest()
        assert caught.value.exit_status == 5
        assert not isinstance(caught.value, DamagedError)
        assert "\n" not in str(caught.value)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("victim", "kind"),
    [("model.safetensors", "torch"), ("optimizer.safetensors", "pickle"), ("state.json", "torch")],
)
def test_fault_43_no_file_of_a_checkpoint_is_ever_unpickled(
    tmp_path: Path, victim: str, kind: str
) -> None:
    """Even if an attacker added a valid checksum."""
    store = copied(tmp_path)
    folder, canary = tmp_path / "checkpoints" / str(NEWEST), tmp_path / "canary"
    if kind == "torch":
        torch.save(Canary(canary), folder / victim)
    else:
        (folder / victim).write_bytes(pickle.dumps(Canary(canary)))
    data = (folder / victim).read_bytes()
    files = json.loads((folder / "manifest.json").read_bytes())["files"]
    files[victim] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(folder, files=files)
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises((CheckpointError, ValueError)):
        golden_state().load(checkpoint)
    assert not canary.exists()
