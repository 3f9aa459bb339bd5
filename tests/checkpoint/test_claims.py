"""Fault 7: writers that lost their claim, and which checkpoints claims fence off."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import (
    BOTH,
    both,
    claims_in,
    commit,
    content,
    fresh,
    latest,
    look_no_later_than,
    manifest,
    next_attempt,
    payload,
    start,
    unaware,
)

from raytrain_ddp.checkpoint.listing import CheckpointListing, ContendedError
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.errors import CheckpointError, RunLockedError

OTHER_NAMES = """
claim-a999999999999999-0a1b2c3d.json
claim-a100000000000001-from-step-00000020-a0001-0a1b2c3d.json
claim-a99999999999999999999-0a1b2c3d.json
claim-a0009-0a1b2c3d.json.bak
claim-a00009-00000000.json
claim-a0009-0000000G.json
step-00000020-a999999999999999/model.safetensors
step-00000020-a999999999999999/manifest.json
step-00000030-a0001-copy/manifest.json
step-90-a1/manifest.json
step-000000090-a0001/manifest.json
notes.txt
a_folder/with_a_file
\u03a9
"""


def test_files_and_folders_of_other_names_are_ignored(root: Path) -> None:
    store = fresh(root)
    start(store)
    commit(store, 20, 1)
    for name in [*OTHER_NAMES.split(), "claim-a0009-00000000.json ", "step-00000090-a0001 /x"]:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    (root / "link").symlink_to("/usr")
    (root / "loop").symlink_to(".")
    os.mkdir(os.path.join(os.fsencode(root), b"step-\xff\xfe"))
    for attempt in (2, 3, 4):
        store = fresh(root)
        base, number = start(store)
        assert base is not None
        assert (base.name, number) == (CheckpointName(10 * attempt, attempt - 1), attempt)
        commit(store, 10 * (attempt + 1), attempt)
        store.prune(9)
        store.storage.sweep()
    assert [name.step for name in store.names()] == [50, 40, 30, 20]


def test_of_two_claims_with_one_number_the_one_with_the_older_base_fences_nothing() -> None:
    """The process of the older one died before it could withdraw it."""
    paths = ["claim-a0003-from-step-00000100-a0002-ffffffff.json"]
    paths += ["claim-a0003-from-step-00000150-a0002-00000000.json"]
    paths += [f"step-00000{step}-a0002/manifest.json" for step in (100, 150)]
    assert CheckpointListing.of(paths).names() == [CheckpointName(150, 2), CheckpointName(100, 2)]
    assert CheckpointListing.of([paths[0], *paths[2:]]).fenced() == [CheckpointName(150, 2)]


def test_what_a_start_resumed_from_is_not_fenced_off_by_itself() -> None:
    """Not even if a later start has resumed from another one."""
    paths = ["claim-a0002-from-step-00000100-a0001-00000000.json"]
    paths += ["claim-a0003-from-step-00000150-a0001-00000000.json"]
    paths += [f"step-00000{step}-a0001/manifest.json" for step in (100, 150, 200)]
    listing = CheckpointListing.of(paths)
    assert listing.names() == [CheckpointName(150, 1), CheckpointName(100, 1)]
    assert listing.fenced() == [CheckpointName(200, 1)]


def test_attempt_numbers_increase_although_old_claims_are_swept(root: Path) -> None:
    for attempt in range(1, 15):
        assert start(fresh(root))[1] == attempt
    assert [claim.attempt for claim in claims_in(root)] == list(range(5, 15))  # the newest ten
    assert fresh(root).latest() is None
    (root / "damaged-step-00000020-a0019").mkdir()
    assert next_attempt(fresh(root)) == 20


def test_fault_07_a_replaced_writer_notices_it_after_a_long_upload(root: Path) -> None:
    zombie = fresh(root)
    start(zombie)
    commit(zombie, 10, 1)

    class Slow(dict[str, bytes]):
        def items(self) -> Any:  # the successor starts while the files are written
            yield from super().items()
            start(fresh(root))

    with pytest.raises(RunLockedError, match="attempt 2"):
        zombie.commit(manifest(20), Slow(payload(20)))
    assert not (root / "step-00000020-a0001").exists()


@BOTH
def test_fault_07_a_late_commit_is_ignored(tmp_path: Path, is_local: bool) -> None:
    zombie, store = both(tmp_path, is_local), both(tmp_path, is_local)
    start(zombie)
    for step in (10, 20):
        commit(zombie, step, 1)
    start(store)
    with unaware(zombie, 1):
        commit(zombie, 30, 1).verify()
    assert [name.step for name in both(tmp_path, is_local).names()] == [20, 10]
    assert content(both(tmp_path, is_local).latest()) == payload(20)
    store.prune(2)
    with pytest.raises(RunLockedError):
        zombie.prune(2)
    assert [name.step for name in store.names()] == [20, 10]  # it was ignored
    successor = both(tmp_path, is_local)
    found, attempt = start(successor)
    assert (content(found), attempt) == (payload(20), 3)
    assert (tmp_path / "step-00000030-a0001").exists()  # because it may be the only checkpoint left
    commit(successor, 25, 3)
    successor.prune(9)
    assert not (tmp_path / "step-00000030-a0001").exists()
    assert [name.step for name in successor.names()] == [25, 20, 10]


def test_fault_07_a_late_commit_counts_until_the_successor_commits(root: Path) -> None:
    """Nothing is lost: another start may resume from it."""
    zombie, store = fresh(root), fresh(root)
    start(zombie)
    start(store)
    with unaware(zombie, 1):
        commit(zombie, 10, 1)
    assert fresh(root).names() == [CheckpointName(10, 1)]
    commit(store, 5, 2)
    assert fresh(root).names() == [CheckpointName(5, 2)]
    assert start(fresh(root)) == (store.open(CheckpointName(5, 2)), 3)


def test_fault_31_a_contended_start_can_be_retried(root: Path) -> None:
    """By any code that retries after an OSError; the error also survives pickling between
    processes. Otherwise, it would begin at step 0, and remove the other writer's work."""
    writer, store = fresh(root), fresh(root)
    start(writer)
    assert store.latest() is None
    commit(writer, 10, 1)
    with pytest.raises(ContendedError) as caught:
        store.claim(None, {})
    reported = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(reported, OSError)
    assert isinstance(reported, RunLockedError)
    assert (reported.exit_status, str(reported)) == (8, str(caught.value))
    assert [claim.attempt for claim in claims_in(root)] == [1]
    assert start(store) == (store.open(CheckpointName(10, 1)), 2)


@BOTH
def test_a_start_whose_base_was_deleted_withdraws_its_claim(tmp_path: Path, is_local: bool) -> None:
    """A replaced writer checked before there was a claim, and prunes afterward."""
    writer, store = both(tmp_path, is_local), both(tmp_path, is_local)
    start(writer)
    for step in (10, 20, 30):
        commit(writer, step, 1)
    look_no_later_than(store, 10)
    assert store.claim(CheckpointName(10, 1), {}) == 2
    assert both(tmp_path, is_local).names() == [CheckpointName(10, 1)]
    with unaware(writer, 1):
        writer.prune(2)
    assert [name.step for name in both(tmp_path, is_local).names()] == [30, 20]
    with pytest.raises(ContendedError):
        store.sweep()
    assert [claim.attempt for claim in claims_in(tmp_path)] == [1]
    commit(writer, 40, 1)
    assert start(store)[0] == store.open(CheckpointName(40, 1))


def test_fault_12_a_restored_backup_is_used_despite_later_claims(root: Path) -> None:
    """Whether it is older or newer than the bases in the claims: restoring needs no knowledge of
    fencing."""
    for attempt, step in [(1, 100), (2, 200), (3, 300)]:
        store = fresh(root)
        start(store)
        commit(store, step, attempt)
    shutil.copytree(root, root.parent / "backup")
    for step in (100, 200, 300):
        for name in list(fresh(root).names()):
            shutil.rmtree(root / str(name))
        with pytest.raises(CheckpointError, match="backup"):
            fresh(root).latest()
        name = CheckpointName(step, step // 100)
        shutil.copytree(root.parent / "backup" / str(name), root / str(name))
        found, reported = latest(root)
        assert (found, reported) == (fresh(root).open(name), [])
    (root / str(name)).rename(root / "step-00000300-a0001")  # fenced off by attempts 2 and 3 ...
    assert fresh(root).names() == [CheckpointName(300, 1)]  # ... but they have no checkpoint
    shutil.copytree(root.parent / "backup" / "step-00000200-a0002", root / "step-00000200-a0002")
    assert fresh(root).names() == [CheckpointName(200, 2)]


def test_without_any_claim_nothing_is_committed(root: Path) -> None:
    """For example, if a file system is not mounted: the folder is then a different one."""
    store = fresh(root)
    store.claim(None, {})
    commit(store, 10)
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    with pytest.raises(OSError, match="mounted") as caught:
        commit(store, 20)
    assert caught.value.errno == errno.ENOENT
    assert not root.exists()
    elsewhere.rename(root)
    commit(store, 20)
    assert [name.step for name in store.names()] == [20, 10]
