"""Checkpoints of earlier versions, which must always open, and random damage to one of them.

tests/golden/format-1/ was written by version 0.1.0, and so was format-1-in-parts/, in which three
ranks have written the optimizer's state into eight files. A format written by a later version gets
a folder of its own; existing folders never change.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain_ddp.checkpoint.manifest import FORMAT, DamagedError
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointName, CheckpointStore
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.training.state.train_state import TrainState

GOLDEN = Path(__file__).parents[1] / "golden"
NEWEST = CheckpointName(12, 1)
DIGEST = "69d260710e4b82bea7389e315118eb94950cab60de2b328fa1764bbeb7be3b2f"


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


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_fault_47_every_format_ever_written_opens_verifies_and_loads(folder: str) -> None:
    reported: list[str] = []
    checkpoint = CheckpointStore(open_storage(str(GOLDEN / folder))).latest(reported.append)
    assert checkpoint is not None
    assert (checkpoint.name, reported) == (NEWEST, [])
    manifest = checkpoint.manifest
    assert folder.startswith(f"format-{manifest.format}")
    assert (manifest.epoch, manifest.world_size, manifest.metrics) == (1, 3, {"top1": 0.5})
    assert from_dict(manifest.config).name == "golden"
    state = golden_state()
    log = state.load(checkpoint)
    assert [record.step for record in log] == list(range(1, 13))
    assert (state.step, state.best, state.best_step, state.skipped) == (12, 0.5, 12, 0)
    group = state.optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"])) == (0.01, (0.9, 0.99))
    assert digest_of(state) == DIGEST


def test_fault_47_the_format_that_is_written_now_has_a_golden_checkpoint() -> None:
    assert (GOLDEN / f"format-{FORMAT}").is_dir()


def reseal(folder: Path, **changes: object) -> None:
    """Writes other fields into a manifest, with a valid checksum."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["sha256"]
    head = json.dumps({**fields, **changes}, indent=1).removesuffix("\n}") + ",\n "
    seal = hashlib.sha256(head.encode()).hexdigest()
    (folder / "manifest.json").write_text(f'{head}"sha256": "{seal}"\n}}\n')


def test_fault_47_a_newer_format_stops_the_run_and_is_named_in_the_error(tmp_path: Path) -> None:
    store = copied(tmp_path)
    folder = tmp_path / "checkpoints" / str(NEWEST)
    reseal(folder, format=FORMAT + 1, written_by="9.8.7", more={"unknown": 1})
    for _ in range(2):  # and it is not treated as damage
        with pytest.raises(CheckpointError, match=r"written by raytrain_ddp 9\.8\.7") as caught:
            store.latest()
        assert caught.value.exit_status == 5
        assert not isinstance(caught.value, DamagedError)
        assert f"format {FORMAT + 1}" in str(caught.value)
        assert "upgrade" in str(caught.value)
        assert "\n" not in str(caught.value)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("victim", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
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


# ------------------------------------------------------------- faults 9, 10: random damage


def corrupted(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """The damaged bytes of a file, and the name of the damage."""
    kind = draw.choice(["bit", "bits", "truncated", "overwritten", "zeros", "appended", "moved"])
    start = draw.randrange(len(data) or 1)
    end = draw.randint(start, min(len(data), start + draw.choice([1, 8, 64, 512])))
    changed = bytearray(data)
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else draw.randint(2, 40)):
            if data:
                changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "truncated":
        del changed[start:]
    elif kind == "overwritten":
        changed[start:end] = draw.randbytes(end - start)
    elif kind == "zeros":
        changed[start:end] = bytes(end - start)
    elif kind == "appended":
        changed += draw.randbytes(draw.randint(1, 100))
    else:  # a block is written to another block's position
        changed[start:end] = data[: end - start]
    return kind, bytes(changed)


def damage_at_random(tmp_path: Path, cases: int, seed: int) -> Counter[str]:
    """Damages one file of the newest checkpoint or its claims at a time, and counts the outcomes.

    Outcomes: detected, harmless (nothing depends on it), or without effect (the bytes are equal).
    """
    store = copied(tmp_path)
    older = store.open(NEWEST)
    files = {name: older.read(name) for name in older.manifest.files}
    store.claim(NEWEST, {"world_size": 3})
    store.commit(replace(older.manifest, step=20, attempt=2), files)
    store.claim(CheckpointName(20, 2), {"world_size": 3})
    # Damaged checkpoints get a mark, which is easy to remove.
    store = CheckpointStore(replace(store.storage, is_local=False))
    root = tmp_path / "checkpoints"
    newest = root / "step-00000020-a0002"
    victims = [*newest.iterdir(), *root.glob("claim-*")]
    assert len(victims) == 7
    draw, outcomes = random.Random(seed), Counter[str]()
    for case in range(cases):
        victim = draw.choice(victims)
        data = victim.read_bytes()
        kind, changed = corrupted(data, draw)
        victim.write_bytes(changed)
        reported: list[str] = []
        newest_good = store.latest(reported.append)
        assert newest_good is not None
        found = str(newest_good.name)
        where = f"seed {seed}, case {case}: {victim.name} {kind}"
        if changed == data:
            outcomes["without effect"] += 1
            assert (found, reported) == ("step-00000020-a0002", []), where
        elif victim.name.startswith("claim-"):
            outcomes["harmless"] += 1
            assert (found, reported) == ("step-00000020-a0002", []), where
        else:
            outcomes["noticed"] += 1
            assert found == str(NEWEST), where
            assert len(reported) == 1, where
            assert victim.name in reported[0] or "manifest" in reported[0], where
            assert victim.read_bytes() == changed, where  # kept unchanged
        victim.write_bytes(data)
        (newest / "damaged.txt").unlink(missing_ok=True)
    return outcomes


def test_faults_09_10_random_damage_is_noticed_or_harmless(tmp_path: Path) -> None:
    outcomes = damage_at_random(tmp_path, 300, seed=0)
    assert outcomes["noticed"] > 150
    assert outcomes["harmless"] > 30


@pytest.mark.slow
def test_faults_09_10_ten_thousand_times_random_damage_is_noticed_or_harmless(
    tmp_path: Path,
) -> None:
    outcomes = damage_at_random(tmp_path, 10_000, seed=1)
    print(dict(outcomes))
    assert outcomes.total() == 10_000
