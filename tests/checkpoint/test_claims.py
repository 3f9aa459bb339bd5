"""Fault 7: writers that lost their claim, and which checkpoints claims fence off."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import (
    Faults,
    both,
    claims_in,
    commit,
    content,
    faulty_store,
    fresh,
    latest,
    manifest,
    payload,
    skip_successor_checks,
    start,
    sweep_faults,
    tree,
)
from hypothesis import given
from hypothesis import strategies as st

from raytrain_ddp.checkpoint.listing import CheckpointListing, Claim, ContendedError
from raytrain_ddp.checkpoint.storage import (
    Storage,
    is_plain_name,
)
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError, RunLockedError
from raytrain_ddp.failpoints import arm


def persistent_start(store: CheckpointStore) -> tuple[Checkpoint | None, int]:
    """Retries a contended start, as the recorder does after any OSError."""
    while True:
        try:
            return start(store)
        except ContendedError:
            time.sleep(random.uniform(0, 0.01))


def test_a_claims_file_name_contains_attempt_base_and_token(root: Path) -> None:
    store = fresh(root)
    assert start(store) == (None, 1)
    commit(store, 200, 1)
    assert start(fresh(root))[1] == 2
    first, second = claims_in(root)
    assert str(first) == f"claim-a0001-{first.token}.json"
    assert str(second) == f"claim-a0002-from-step-00000200-a0001-{second.token}.json"
    assert json.loads((root / str(second)).read_bytes()) == {"world_size": 3}


@given(
    st.integers(0, 10**14),
    st.none() | st.builds(CheckpointName, st.integers(0, 10**14), st.integers(0, 10**14)),
    st.integers(0, 2**32 - 1),
)
def test_claim_round_trip(attempt: int, base: CheckpointName | None, token: int) -> None:
    claim = Claim(attempt, base, f"{token:08x}")
    assert Claim.parse(str(claim)) == claim
    assert is_plain_name(str(claim))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "claim-a0001.json",
        "claim-a1-00000000.json",
        "claim-a0001-00000000.json ",
        "claim-a00001-00000000.json",
        "claim-a0001-0000000G.json",
        "claim-a0001-from-step-00000001-00000000.json",
        "claim-a0001-from-step-000000001-a0001-00000000.json",
        ".tmp-claim-a0001-00000000.json",
    ],
)
def test_other_file_names_are_not_claims(root: Path, text: str) -> None:
    assert Claim.parse(text) is None


GARBAGE = [
    "claim-a999999999999999-0a1b2c3d.json",
    "claim-a100000000000001-from-step-00000020-a0001-0a1b2c3d.json",
    "claim-a0003-from-step-00000020-a999999999999999-0a1b2c3d.json",
    "claim-a99999999999999999999-0a1b2c3d.json",
    "claim-a0001-0a1b2c3d.json.bak",
    "step-00000020-a999999999999999/model.safetensors",
    "step-00000020-a999999999999999/manifest.json",
    "step-999999999999999-a999999999999999/x",
    "damaged-step-00000020-a99999999999999999999/manifest.json",
    "step-00000030-a0001-copy/manifest.json",
    "notes.txt",
    "a folder/with a file",
    "Ω",
]


@pytest.mark.parametrize("name", [*GARBAGE, b"step-\xff\xfe", "link", "loop"])
def test_unknown_file_names_are_ignored(root: Path, name: str | bytes) -> None:
    store = fresh(root)
    start(store)
    commit(store, 20, 1)
    if name == "link":
        (root / "link").symlink_to("/usr")
    elif name == "loop":
        (root / "loop").symlink_to(".")
    elif isinstance(name, bytes):
        os.mkdir(os.path.join(os.fsencode(root), name))
    else:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    for attempt in (2, 3, 4):
        store = fresh(root)
        base, number = start(store)
        assert base is not None
        assert (base.name, number) == (
            CheckpointName(20 + 10 * (attempt - 2), attempt - 1),
            attempt,
        )
        store.sweep()
        commit(store, 10 * (attempt + 1), attempt)
        store.prune(9)
        store.storage.sweep()


def test_a_checkpoint_folder_may_be_a_symlink(root: Path, tmp_path: Path) -> None:
    store = fresh(root)
    commit(store, 20, 1)
    (root / "step-00000020-a0001").rename(tmp_path / "elsewhere")
    (root / "step-00000020-a0001").symlink_to(tmp_path / "elsewhere")
    assert fresh(root).names() == [CheckpointName(20, 1)]


def test_an_attempt_number_without_a_successor_is_named_in_the_error(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "claim-a100000000000000-0a1b2c3d.json").touch()
    with pytest.raises(CheckpointError, match="100000000000000"):
        start(fresh(root))


def test_of_two_claims_with_one_number_the_one_with_the_older_base_fences_nothing() -> None:
    """The process of the older one died before it could withdraw it."""
    paths = ["claim-a0003-from-step-00000100-a0002-ffffffff.json"]
    paths += ["claim-a0003-from-step-00000150-a0002-00000000.json"]
    paths += [f"step-00000{step}-a0002/manifest.json" for step in (100, 150)]
    assert CheckpointListing.of(paths).names() == [CheckpointName(150, 2), CheckpointName(100, 2)]
    assert CheckpointListing.of([paths[0], *paths[2:]]).fenced() == [CheckpointName(150, 2)]


def test_attempt_numbers_increase_although_old_claims_are_swept(root: Path) -> None:
    for attempt in range(1, 15):
        assert start(fresh(root))[1] == attempt
    assert [claim.attempt for claim in claims_in(root)] == list(range(5, 15))  # the newest ten
    assert os.listdir(root) != []
    assert fresh(root).latest() is None


def test_fault_07_a_replaced_writer_commits_nothing(root: Path) -> None:
    zombie, store = fresh(root), fresh(root)
    start(zombie)
    commit(zombie, 10, 1)
    start(store)
    before = tree(root)
    with pytest.raises(RunLockedError, match=r"attempt 2 .* has taken over .*: attempt 1 commits"):
        commit(zombie, 20, 1)
    assert tree(root) == before
    commit(store, 15, 2)
    assert latest(root)[0] == store.open(CheckpointName(15, 2))


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


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_late_commit_is_ignored(
    tmp_path: Path, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie, store = both(tmp_path, is_local), both(tmp_path, is_local)
    start(zombie)
    for step in (10, 20):
        commit(zombie, step, 1)
    start(store)
    with monkeypatch.context() as patch:  # it had checked before
        skip_successor_checks(patch)
        late = commit(zombie, 30, 1)
    late.verify()
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


def test_fault_07_a_late_commit_counts_until_the_successor_commits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: another start may resume from it."""
    zombie, store = fresh(root), fresh(root)
    start(zombie)
    start(store)
    with monkeypatch.context() as patch:
        skip_successor_checks(patch)
        commit(zombie, 10, 1)
    assert fresh(root).names() == [CheckpointName(10, 1)]
    commit(store, 5, 2)
    assert fresh(root).names() == [CheckpointName(5, 2)]
    assert start(fresh(root)) == (store.open(CheckpointName(5, 2)), 3)


def test_a_claim_whose_base_was_pruned_meanwhile_is_withdrawn(root: Path) -> None:
    writer, store = fresh(root), fresh(root)
    start(writer)
    commit(writer, 10, 1)
    found = store.latest()
    for step in (20, 30):
        commit(writer, step, 1)
        writer.prune(2)
    assert found is not None
    with pytest.raises(ContendedError, match="is also working on this run"):
        store.claim(found.name, {})
    assert [claim.attempt for claim in claims_in(root)] == [1]
    commit(writer, 40, 1)
    assert content(latest(root)[0]) == payload(40)
    assert persistent_start(store) == (store.open(CheckpointName(40, 1)), 2)


def test_a_start_that_found_no_checkpoint_is_refused_after_a_concurrent_commit(root: Path) -> None:
    """Otherwise, it would begin at step 0 and eventually remove the other writer's work."""
    writer, store = fresh(root), fresh(root)
    start(writer)
    assert store.latest() is None
    commit(writer, 10, 1)
    with pytest.raises(ContendedError, match="is also working on this run"):
        store.claim(None, {})
    assert persistent_start(store) == (store.open(CheckpointName(10, 1)), 2)


def test_a_writer_whose_claim_was_deleted_commits_nothing(root: Path) -> None:
    """For example, after the folder was replaced by an older backup and resumed by another
    process."""
    writer = fresh(root)
    start(writer)
    commit(writer, 10, 1)
    backup = root.parent / "backup"
    shutil.copytree(root, backup)
    writer = fresh(root)
    start(writer)
    commit(writer, 20, 2)
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    with pytest.raises(RunLockedError, match="attempt 2 commits nothing"):
        commit(writer, 30, 2)
    assert [name.step for name in writer.names()] == [10]


def test_the_base_of_a_start_stays_valid_despite_a_later_claim(root: Path) -> None:
    """Attempt 2 resumes from step 10 of attempt 1; a zombie of attempt 1 commits 30 and removes 10;
    attempt 3 resumes from 30. Every base of attempts 3 and 4 is kept."""
    zombie, second = fresh(root), fresh(root)
    start(zombie)
    commit(zombie, 10, 1)
    start(second)
    with pytest.MonkeyPatch.context() as patch:
        skip_successor_checks(patch)
        commit(zombie, 30, 1)
        zombie._delete(CheckpointName(10, 1))
    third = fresh(root)
    assert start(third) == (third.open(CheckpointName(30, 1)), 3)
    commit(third, 40, 3)
    fourth = fresh(root)
    start(fourth)
    commit(fourth, 50, 4)
    assert [name.step for name in fourth.names()] == [50, 40, 30]


def test_of_simultaneous_starts_exactly_one_can_commit(root: Path) -> None:
    for round_ in range(10):
        begin = threading.Barrier(6)
        stores: list[tuple[CheckpointStore, int]] = []
        refused: list[RunLockedError] = []

        def run(begin: threading.Barrier, stores: Any, refused: Any) -> None:
            store = fresh(root)
            found = store.latest()
            begin.wait()
            try:
                stores.append((store, store.claim(found.name if found else None, {})))
            except ContendedError as error:
                refused.append(error)
                stores.append((store, persistent_start(store)[1]))

        threads = [threading.Thread(target=run, args=(begin, stores, refused)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        attempts = {attempt for _, attempt in stores}
        assert len(attempts) == 6  # all numbers are different
        assert claims_in(root)[-1].attempt == max(attempts)
        committed = 0
        for store, attempt in stores:
            with suppress(RunLockedError):
                commit(store, round_, attempt)
                committed += 1
        assert committed == 1
        found = fresh(root).latest()
        assert found is not None
        assert found.name.step == round_


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_02_08_a_failure_of_any_operation_of_a_claim(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    def prepare(store: CheckpointStore) -> None:
        attempt = start(store)[1]
        for step in (10, 20):
            commit(store, step, attempt)

    def act(store: CheckpointStore) -> None:
        store.claim(CheckpointName(20, 1), {"world_size": 3})

    claimed = set()
    for root, returned, where in sweep_faults(tmp_path, prepare, act, mode, is_local):
        numbers = [claim.attempt for claim in claims_in(root)]
        assert numbers == [1, 2] if returned else numbers in ([1], [1, 2]), where
        claimed.add(len(numbers))
        found, reported = latest(root)
        assert (content(found), reported) == (payload(20), []), where
        again, attempt = start(fresh(root))
        assert (again, attempt) == (found, 1 + max(numbers)), where
        assert not any(".tmp-" in path for path in tree(root)), where
        with pytest.raises(RunLockedError):
            commit(fresh(root), 30, attempt - 1)
        assert content(commit(fresh(root), 30, attempt)) == payload(30, attempt)
    assert 1 in claimed


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_02_08_a_failure_of_any_operation_of_a_start(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    """With everything a start does: a late commit, a leftover, a temporary file, old claims."""

    def prepare(store: CheckpointStore) -> None:
        for _ in range(11):
            attempt = start(store)[1]
        commit(store, 10, attempt)
        zombie = fresh(Path(store.storage.path))
        start(zombie)
        commit(zombie, 20, attempt + 1)
        start(store)
        with pytest.MonkeyPatch.context() as patch:
            skip_successor_checks(patch)
            commit(zombie, 30, attempt + 1)
        root = Path(store.storage.path)
        (root / "step-00000025-a0013").mkdir()
        (root / "step-00000025-a0013" / "x").write_bytes(b"x")
        (root / ".tmp-1").write_bytes(b"x")

    for root, _, where in sweep_faults(tmp_path, prepare, start, mode, is_local):
        reported: list[str] = []
        store = fresh(root)
        found, attempt = start(store, reported)
        assert (content(found), reported) == (payload(20, 12), []), where
        assert attempt in (14, 15), where
        assert not any(".tmp-" in path or "step-00000025" in path for path in tree(root)), where
        commit(store, 21, attempt)
        store.prune(2)
        folders = [path.name for path in root.iterdir() if path.is_dir()]
        kept = ["step-00000020-a0012", f"step-00000021-a{attempt:04d}"]
        assert sorted(folders) == kept, where  # the late commit is removed, too
        assert [claim.attempt for claim in claims_in(root)][-1] == attempt, where


def interleaved(
    tmp_path: Path,
    is_local: bool,
    prepare: Callable[[CheckpointStore], Any],
    act: Callable[[CheckpointStore], Any],
    other: Callable[[Path], Any],
) -> Iterator[tuple[Path, Any, Any, str]]:
    """Run ``act`` once for each of its operations, and run ``other`` before that operation.

    Yields the folder, the results or errors of ``act`` and ``other``, and the operation.
    """

    def outcome(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except (OSError, RunLockedError) as error:
            return error

    with pytest.MonkeyPatch.context() as patch:
        counter = Faults()
        store = faulty_store(tmp_path / "count", counter, is_local, patch)
        prepare(store)
        before = len(counter.done)
        act(store)
    for n in range(before, len(counter.done)):
        root = tmp_path / str(n)
        others: list[Any] = []
        faults = Faults("meanwhile", n, lambda: others.append(outcome(lambda: other(root))))  # noqa: B023
        with pytest.MonkeyPatch.context() as patch:
            store = faulty_store(root, faults, is_local, patch)
            prepare(store)
            result = outcome(lambda: act(store))  # noqa: B023
        assert len(others) == 1
        yield root, result, others[0], f"before operation {n}, {counter.done[n]}"


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_successor_starts_before_any_operation_of_a_commit(
    tmp_path: Path, is_local: bool
) -> None:
    zombies: dict[Path, CheckpointStore] = {}

    def prepare(store: CheckpointStore) -> None:
        zombies[Path(store.storage.path)] = store
        start(store)
        for step in (10, 20):
            commit(store, step, 1)

    def act(store: CheckpointStore) -> None:
        commit(store, 30, 1)
        store.prune(2)

    def other(root: Path) -> Checkpoint:
        store = both(root, is_local)
        found, attempt = start(store)
        assert found is not None
        made = commit(store, found.name.step + 5, attempt)
        store.prune(9)
        return made

    bases = set()
    for root, result, made, where in interleaved(tmp_path, is_local, prepare, act, other):
        bases.add(made.name.step - 5)
        assert made.name.step > 30 or isinstance(result, (OSError, RunLockedError, type(None)))
        zombie = zombies[root]
        with pytest.raises(RunLockedError):
            commit(zombie, 40, 1)
        with pytest.raises(RunLockedError):
            zombie.prune(2)
        reported: list[str] = []
        found = both(root, is_local).latest(reported.append)
        assert found is not None, where
        assert (found.name, reported) == (made.name, []), where
        assert content(found) == payload(found.name.step, 2), where
        successor = both(root, is_local)
        assert start(successor)[0] == found, where
        commit(successor, found.name.step + 1, 3)
        successor.prune(9)
        left = {path.name for path in root.iterdir() if path.is_dir()}
        assert left == {str(name) for name in both(root, is_local).names()}, where
    assert bases == {20, 30}


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_zombie_commits_before_any_operation_of_a_start(
    tmp_path: Path, is_local: bool
) -> None:
    zombies: dict[Path, CheckpointStore] = {}

    def prepare(store: CheckpointStore) -> None:
        root = Path(store.storage.path)
        zombies[root] = zombie = both(root, is_local)
        start(zombie)
        for step in (10, 20):
            commit(zombie, step, 1)

    def other(root: Path) -> None:
        zombie = zombies[root]
        for step in (30, 40):
            commit(zombie, step, 1)
            zombie.prune(2)

    results = set()
    for root, result, _, where in interleaved(tmp_path, is_local, prepare, start, other):
        if isinstance(result, RunLockedError):
            results.add("refused")
            found, attempt = start(both(root, is_local))
        else:
            assert not isinstance(result, Exception), where
            found, attempt = result
        assert found is not None
        results.add(found.name.step)
        assert both(root, is_local).latest() == both(root, is_local).open(found.name), where
        assert content(found) == payload(found.name.step), where
        made = commit(both(root, is_local), found.name.step + 5, attempt)
        assert content(both(root, is_local).latest()) == content(made), where
    assert results == {20, 40, "refused"}


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_31_a_start_and_commit_before_any_operation_of_another_start_are_never_lost(
    tmp_path: Path, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(2**32 - 1, 0, -1))  # the slower one has the higher token
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(f"{next(numbers):08x}" + "0" * 24))

    def prepare(store: CheckpointStore) -> None:
        commit(store, 10, 1)

    def other(root: Path) -> Checkpoint:
        store = both(root, is_local)
        found, attempt = start(store)
        assert found is not None
        return commit(store, 20, attempt)

    outcomes = set()
    for root, result, made, where in interleaved(tmp_path, is_local, prepare, start, other):
        outcomes.add(type(result))
        found = both(root, is_local).latest()
        assert found is not None
        if isinstance(made, RunLockedError):
            assert found.name.step == 10
        else:
            assert found == both(root, is_local).open(made.name), where
            if isinstance(result, tuple):
                assert result[1] != made.name.attempt, where
    assert outcomes == {tuple, ContendedError}


@pytest.mark.parametrize("site", ["begin", "payload", "manifest", "committed"])
def test_failpoints_of_a_commit_fire_at_their_documented_place(
    root: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointStore, "_delete", lambda *_: None)  # as a kill would leave it
    store = fresh(root)
    arm(f"checkpoint.{site}:eio@step=7", str(tmp_path / "fired"))
    try:
        commit(store, 6)
        with pytest.raises(OSError, match=f"failpoint checkpoint.{site}"):
            commit(store, 7)
    finally:
        arm("", "")
    left = {path.name for path in (root / "step-00000007-a0001").iterdir()}
    expected = {
        "begin": set(),
        "payload": {"model.safetensors"},
        "manifest": {"model.safetensors", "state.json"},
        "committed": {"model.safetensors", "state.json", "manifest.json"},
    }
    assert left == expected[site]
    assert [name.step for name in store.names()] == ([7, 6] if site == "committed" else [6])


@pytest.mark.parametrize(("site", "left"), [("manifest", 4), ("done", 2)])
def test_failpoints_of_pruning_fire_at_their_documented_place(
    root: Path, tmp_path: Path, site: str, left: int
) -> None:
    store = fresh(root)
    for step in (10, 20, 30, 40):
        commit(store, step)
    arm(f"prune.{site}:eio", str(tmp_path / "fired"))
    try:
        with pytest.raises(OSError, match=f"failpoint prune.{site}"):
            store.prune(2)
    finally:
        arm("", "")
    assert len(os.listdir(root)) == left
    assert len(store.names()) == min(left, 3)


def test_fault_12_a_missing_base_checkpoint_is_an_error(root: Path) -> None:
    """The claim of an earlier start proves that a checkpoint existed, so the run must not restart
    at 0."""
    start(fresh(root))
    commit(fresh(root), 10, 1)
    start(fresh(root))
    shutil.rmtree(root / "step-00000010-a0001")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"attempt 2 resumed from step-00000010-a0001, w"):
            start(fresh(root))


def test_fault_31_a_contended_start_can_be_retried(root: Path) -> None:
    """By any code that retries after an OSError; the error also survives pickling between
    processes."""
    store = fresh(root)
    assert store.latest() is None
    start(fresh(root))
    with pytest.raises(ContendedError, match="is also working on this run") as caught:
        store.claim(None, {})
    reported = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(reported, OSError)
    assert isinstance(reported, RunLockedError)
    assert (reported.exit_status, str(reported)) == (8, str(caught.value))
    assert [claim.attempt for claim in claims_in(root)] == [1]
    assert start(store) == (None, 2)


def test_fault_07_a_replaced_writer_stops_pruning(root: Path) -> None:
    zombie = fresh(root)
    start(zombie)
    for step in (10, 20, 30, 40, 50):
        commit(zombie, step, 1)
    delete_file, deleted = Storage.delete_file, []

    def replaced_at_the_second(storage: Storage, name: str) -> None:
        delete_file(storage, name)
        if name == "manifest.json":
            deleted.append(name)
            if len(deleted) == 2:
                start(fresh(root))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "delete_file", replaced_at_the_second)
        with pytest.raises(RunLockedError, match=r"attempt 2 .* has taken over this run"):
            zombie.prune(2)
    assert [name.step for name in fresh(root).names()] == [50, 40, 30]


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_a_start_whose_base_was_deleted_withdraws_its_claim(tmp_path: Path, is_local: bool) -> None:
    """A replaced writer checked before there was a claim, and prunes afterward."""
    writer, store = both(tmp_path, is_local), both(tmp_path, is_local)
    start(writer)
    commit(writer, 10, 1)
    found = store.latest()
    assert found is not None
    for step in (20, 30):
        commit(writer, step, 1)
    store._look()  # as if these were damaged and could not be marked
    assert store.claim(found.name, {}) == 2
    assert both(tmp_path, is_local).names() == [found.name]
    with pytest.MonkeyPatch.context() as patch:
        skip_successor_checks(patch)
        writer._delete(found.name)
    assert [name.step for name in both(tmp_path, is_local).names()] == [30, 20]
    with pytest.raises(ContendedError, match="just removed step-00000010-a0001"):
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
        with pytest.raises(CheckpointError, match=r"which is gone\. Restore one from a backup"):
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
    with pytest.raises(OSError, match="is the file system mounted") as caught:
        commit(store, 20)
    assert caught.value.errno == errno.ENOENT
    assert not root.exists()
    elsewhere.rename(root)
    commit(store, 20)
    assert [name.step for name in store.names()] == [20, 10]
