"""Every operation of a claim and a start fails once, and another process comes between any two."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from faulty_storage import (
    BOTH,
    Faults,
    both,
    claims_in,
    commit,
    content,
    fresh,
    in_turns,
    interleaved,
    latest,
    look_no_later_than,
    moved,
    operations_of,
    payload,
    start,
    sweep_faults,
    tree,
    unaware,
)

from raytrain_ddp.checkpoint.listing import ContendedError
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.errors import RunLockedError


@BOTH
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


@BOTH
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
        with unaware(zombie, attempt + 1):
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


@BOTH
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


@BOTH
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


@BOTH
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


@BOTH
def test_fault_07_a_prune_and_a_start_in_any_order_leave_a_complete_checkpoint(
    tmp_path: Path, is_local: bool
) -> None:
    """The start took the oldest checkpoint for the newest, and the prune is about to remove it."""
    stores: dict[Path, tuple[CheckpointStore, CheckpointStore]] = {}

    def prepare(root: Path) -> None:
        writer, starter = stores[root] = both(root, is_local), both(root, is_local)
        start(writer)
        for step in (10, 20, 30):
            commit(writer, step, 1)
        look_no_later_than(starter, 10)

    def prune(store: CheckpointStore) -> None:
        writer, _ = stores[Path(store.storage.path)]
        with moved(writer, store.storage):
            writer.prune(2)

    def go_on(store: CheckpointStore) -> None:
        _, starter = stores[Path(store.storage.path)]
        with moved(starter, store.storage):
            starter.claim(CheckpointName(10, 1), {})
            starter.sweep()

    outcomes = set()
    first = operations_of(tmp_path / "prune", prepare, prune, is_local)
    second = operations_of(tmp_path / "start", prepare, go_on, is_local)
    for i in range(first + 1):
        for j in range(1, second + 1):
            root, where = tmp_path / f"{i}-{j}", f"{i} of {first}, then {j} of {second}"
            prepare(root)
            old, new = in_turns(root, is_local, prune), in_turns(root, is_local, go_on)
            for process, operations in ((old, i), (new, j), (old, 2**30), (new, 2**30)):
                process.go_on(operations)
                assert both(root, is_local).names(), where
            results = (type(old.result), type(new.result))
            assert results[0] in (type(None), RunLockedError), (where, old.result)
            assert results[1] in (type(None), ContendedError), (where, new.result)
            outcomes.add(results)
            reported: list[str] = []
            successor = both(root, is_local)
            found, attempt = start(successor, reported)
            assert found is not None, where
            assert content(found) == payload(found.name.step), where
            assert reported == [], where
            commit(successor, 40, attempt)
            successor.prune(2)
            assert successor.names()[0] == CheckpointName(40, attempt), where
    # If neither is reported, the start owns the run, but its base is gone.
    none = type(None)
    assert outcomes == {(RunLockedError, none), (none, ContendedError), (none, none)}


@BOTH
def test_fault_31_two_starts_in_any_order_never_get_the_same_attempt(
    tmp_path: Path, is_local: bool
) -> None:
    def prepare(root: Path) -> None:
        start(both(root, is_local))

    outcomes = set()
    count = operations_of(tmp_path, prepare, start, is_local)
    for i in range(count + 1):
        for j in range(1, count + 1):
            root, where = tmp_path / f"{i}-{j}", f"{i}, then {j} of {count}"
            prepare(root)
            one, two = in_turns(root, is_local, start), in_turns(root, is_local, start)
            for process, operations in ((one, i), (two, j), (one, 2**30), (two, 2**30)):
                process.go_on(operations)
            results = [one.result, two.result]
            numbers = [result[1] for result in results if isinstance(result, tuple)]
            assert len(set(numbers)) == len(numbers), where
            contended = [error for error in results if isinstance(error, ContendedError)]
            assert len(contended) + len(numbers) == 2, (where, results)
            outcomes.add(len(numbers))
            assert [claim.attempt for claim in claims_in(root)] == [1, *sorted(numbers)], where
            assert start(both(root, is_local))[1] == 1 + max(numbers, default=1), where
    assert outcomes == {1, 2}
