"""The store as a state machine: processes that start, write, die and come back, in any order."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import (
    FILES,
    Faults,
    Killed,
    both,
    claims_in,
    commit,
    content,
    faulty_store,
    flip_bit,
    moved,
    payload,
    start,
    tree,
    unaware,
)

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError, RunLockedError


class Writer:
    """A process that started the run; all but the newest are zombies."""

    def __init__(self, store: CheckpointStore, attempt: int, step: int) -> None:
        self.store, self.attempt, self.step = store, attempt, step


class StoreMachine(RuleBasedStateMachine):
    """Starts, commits, kills, prunes, damage, and zombies in any order.

    A start finds the newest valid commit that is not fenced off. It is never older than that of the
    previous start, except after damage; and there is one as long as any valid commit exists.
    """

    @initialize(is_local=st.booleans())
    def begin(self, is_local: bool) -> None:
        self.folder = tempfile.mkdtemp(prefix="raytrain-store-")
        self.root = Path(self.folder) / "run"
        self.is_local = is_local
        self.good: set[CheckpointName] = set()
        self.bad: set[CheckpointName] = set()  # damaged, and possibly not detected yet
        self.writers: list[Writer] = []
        self.attempts: list[int] = []
        self.resumed: CheckpointName | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self) -> CheckpointStore:
        return both(self.root, self.is_local)

    def under_fault(self, act: Callable[[CheckpointStore], Any], mode: str, at: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            try:
                act(faulty_store(self.root, Faults(mode, at), self.is_local, patch))
            except (OSError, Killed):
                return False
        return True

    # ------------------------------------------------------------------- the model

    def noticed(self) -> set[CheckpointName]:
        """The damaged checkpoints that are kept aside, according to the folder."""
        plain = {str(name): name for name in self.bad}
        kept = set()
        for path in self.root.iterdir() if self.root.exists() else []:
            name = path.name.removeprefix("damaged-")[: len("step-00000000-a0000")]
            if path.name.startswith("damaged-") or (path / "damaged.txt").exists():
                kept.add(plain[name])
        return kept

    def counted(self, aside: Set[CheckpointName] = frozenset()) -> set[CheckpointName]:
        there = self.good | (self.bad - self.noticed() - aside)
        standing = [
            claim
            for claim in claims_in(self.root)
            if claim.base in there or any(name.attempt >= claim.attempt for name in there)
        ]
        fenced = {
            name
            for claim in standing
            for name in there
            if claim.attempt > name.attempt and (claim.base is None or claim.base < name)
        }
        numbered = {claim.attempt: claim for claim in standing}
        line, last = set(), standing[-1:]
        while last and last[0].base:  # the base of the newest start, the base of that start, ...
            line.add(last[0].base)
            last = [numbered[last[0].base.attempt]] if last[0].base.attempt in numbered else []
        return there - (fenced - line)

    def newest(self) -> CheckpointName | None:
        return max(self.good & self.counted(), default=None)

    def live(self) -> Writer | None:
        claims = claims_in(self.root)
        newest = self.writers[-1] if self.writers else None
        return newest if newest and newest.attempt == claims[-1].attempt else None

    def dropped(self, names: set[CheckpointName]) -> None:
        self.good -= names
        self.bad -= names - self.noticed()

    # ------------------------------------------------------------------ looking and starting

    def look(self, store: CheckpointStore) -> tuple[Checkpoint | None, bool]:
        """Compares latest() with the model; False if it is an error because all are damaged."""
        reported: list[str] = []
        noticed, passed = self.noticed(), set[CheckpointName]()
        while (newest := max(self.counted(passed), default=None)) in self.bad:
            passed.add(newest)
        based = any(claim.base for claim in claims_in(self.root))
        if newest is None and (passed or noticed or based):
            with pytest.raises(CheckpointError):
                store.latest(reported.append)
            found = None
        else:
            found = store.latest(reported.append)
            assert (found.name if found else None) == newest
            if found is not None:
                assert content(found) == payload(found.name.step, found.name.attempt)
        assert len(reported) == len(passed)
        assert self.noticed() == noticed | passed
        return found, found is not None or not (passed or noticed or based)

    @rule()
    def a_reader_looks(self) -> None:
        self.look(self.store())

    @rule()
    def start(self) -> None:
        store = self.store()
        found, usable = self.look(store)
        if not usable:
            return
        if self.resumed is not None:
            assert found is not None
            assert found.name >= self.resumed
        self.resumed = found.name if found else None
        attempt = store.claim(self.resumed, {})
        assert attempt > max(self.attempts, default=0)
        assert attempt > max((n.attempt for n in self.good | self.bad), default=0)
        self.attempts.append(attempt)
        self.writers.append(Writer(store, attempt, found.name.step if found else 0))
        store.sweep()
        known = {str(name) for name in self.good | self.bad}
        for path in self.root.iterdir():
            assert path.name in known or path.name.startswith(("damaged-", "claim-"))

    @rule(mode=st.sampled_from(["eio", "enospc", "late", "kill"]), at=st.integers(0, 40))
    def start_under_fault(self, mode: str, at: int) -> None:
        with suppress(CheckpointError):
            self.under_fault(start, mode, at)
        claims = claims_in(self.root)
        self.attempts += [claims[-1].attempt] if claims else []

    @rule(mode=st.sampled_from(["late", "kill"]), data=st.data())
    def claim_and_die(self, mode: str, data: st.DataObject) -> None:
        """A start that dies around the time it writes its claim; this must happen often enough."""
        newest = self.newest()
        if newest is not None or not claims_in(self.root):
            at = data.draw(st.integers(1, 12))
            self.under_fault(lambda store: store.claim(newest, {}), mode, at)
            claims = claims_in(self.root)
            self.attempts += [claims[-1].attempt] if claims else []

    # ----------------------------------------------------------------------- writing

    @rule(steps=st.integers(1, 3))
    def commit(self, steps: int) -> None:
        if writer := self.live():
            writer.step += steps
            self.good.add(commit(writer.store, writer.step, writer.attempt).name)

    @rule(mode=st.sampled_from(["eio", "enospc", "late", "kill"]), at=st.integers(0, 25))
    def commit_under_fault(self, mode: str, at: int) -> None:
        writer = self.live()
        if writer is None:
            return
        writer.step += 1
        name = CheckpointName(writer.step, writer.attempt)
        returned = self.under_fault(lambda s: commit(s, name.step, name.attempt), mode, at)
        there = {path: data for path, data in tree(self.root).items() if str(name) in path}
        is_whole = f"{name}/manifest.json" in there
        assert is_whole or not returned
        if is_whole:
            files = payload(name.step, name.attempt)
            assert all(there.get(f"{name}/{file}") == data for file, data in files.items())
            self.good.add(name)

    @rule(data=st.data())
    def a_zombie_commits(self, data: st.DataObject) -> None:
        zombies = [writer for writer in self.writers if writer is not self.live()]
        if zombies:
            writer = data.draw(st.sampled_from(zombies))
            before = tree(self.root)
            with pytest.raises(RunLockedError):
                commit(writer.store, writer.step + 1, writer.attempt)
            assert tree(self.root) == before

    @rule(data=st.data())
    def a_zombie_commits_late(self, data: st.DataObject) -> None:
        """It checked for a newer claim before there was one."""
        zombies = [writer for writer in self.writers if writer is not self.live()]
        if zombies:
            writer = data.draw(st.sampled_from(zombies))
            writer.step += 1
            with unaware(writer.store, writer.attempt) as store:
                self.good.add(commit(store, writer.step, writer.attempt).name)

    @rule(keep_last=st.integers(0, 4), data=st.data())
    def prune(self, keep_last: int, data: st.DataObject) -> None:
        if writer := self.live():
            listed = sorted(self.counted(), reverse=True)
            best = data.draw(st.sampled_from([None, *listed]))
            writer.store.prune(keep_last, best)
            kept = {*listed[: max(2, keep_last)], *({best} - {None})}
            if listed and listed[0].attempt < writer.attempt:  # it has not committed itself yet
                kept |= (self.good | self.bad) - set(listed)
            self.dropped((self.good | self.bad) - kept)

    @rule(mode=st.sampled_from(Faults.MODES), at=st.integers(0, 25))
    def prune_under_fault(self, mode: str, at: int) -> None:
        def prune(store: CheckpointStore) -> None:
            with moved(writer.store, store.storage):
                writer.store.prune(2)

        if writer := self.live():
            listed = sorted(self.counted(), reverse=True)
            self.under_fault(prune, mode, at)
            left = set(self.store().names())
            assert set(listed[:2]) <= left <= set(listed)
            there = {n for n in self.good | self.bad if (self.root / str(n) / FILES[2]).exists()}
            self.dropped((self.good | self.bad) - there)

    @rule(data=st.data())
    def a_zombie_prunes(self, data: st.DataObject) -> None:
        zombies = [writer for writer in self.writers if writer is not self.live()]
        if zombies:
            before = tree(self.root)
            with pytest.raises(RunLockedError):
                data.draw(st.sampled_from(zombies)).store.prune(2)
            assert tree(self.root) == before

    # ------------------------------------------------------------------------ damage

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        if self.good:
            name = data.draw(st.sampled_from(sorted(self.good)))
            victim = self.root / str(name) / data.draw(st.sampled_from(FILES))
            flip_bit(victim, data.draw(st.integers(0, 8 * victim.stat().st_size - 1)))
            self.good.remove(name)
            self.bad.add(name)
            self.resumed = None  # only this sets a run back

    @rule(data=st.data(), left=st.binary(max_size=5))
    def damage_a_claim(self, data: st.DataObject, left: bytes) -> None:
        if claims := claims_in(self.root):
            (self.root / str(data.draw(st.sampled_from(claims)))).write_bytes(left)

    @invariant()
    def what_counts_is_listed(self) -> None:
        if hasattr(self, "root"):
            assert set(self.store().names()) == self.counted()
            assert self.counted() or not self.good


@settings(
    max_examples=int(os.environ.get("STORE_MACHINE_EXAMPLES", "60")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
class _Machine(StoreMachine):
    pass


test_invariants_08_09_store_as_state_machine = _Machine.TestCase
