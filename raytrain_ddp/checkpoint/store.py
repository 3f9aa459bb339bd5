"""The commit protocol: payload files first, ``manifest.json`` last, and nothing else decides.

    <storage>/claim-a0001-9f1c02ab.json                                      see listing.py
    <storage>/step-00000120-a0001/model.safetensors, ..., manifest.json      committed
    <storage>/step-00000140-a0001/model.safetensors                          left by a killed run
    <storage>/damaged-step-00000100-a0001/                                   set aside (local)
    <storage>/step-00000100-a0001/damaged.txt                                set aside (S3, GCS)

The name alone decides which checkpoint is newest: neither clocks nor a "latest" pointer count.
Checkpoints that a replaced writer commits do not count: the claim of its successor fences them
off, as long as the successor has a checkpoint itself, its own or the one it resumed from (see
`CheckpointListing.fenced`). Fenced-off checkpoints are removed only after the successor has
committed one, which no process that it replaced knows of. So no two writers can together remove
all checkpoints, however outdated their listings are.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from raytrain_ddp.checkpoint.committed import Checkpoint, CheckpointName
from raytrain_ddp.checkpoint.listing import (
    DAMAGED_MARK,
    DAMAGED_PREFIX,
    MANIFEST_FILE,
    RESERVED,
    CheckpointListing,
    Claim,
    ContendedError,
)
from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import Storage, is_plain_name
from raytrain_ddp.checkpoint.streams import Content
from raytrain_ddp.errors import CheckpointError, RunLockedError
from raytrain_ddp.failpoints import failpoint

__all__ = ["DAMAGED_MARK", "DAMAGED_PREFIX", "MANIFEST_FILE", "Checkpoint", "CheckpointName"]
__all__ += ["CheckpointStore"]

Verify = Callable[[Checkpoint], object]
LEAST_KEPT, CLAIMS_KEPT = 2, 10

_warn: Callable[[str], None] = logging.getLogger(__name__).warning


class CheckpointStore:
    """The checkpoints of one run, each in a folder of ``storage``.

    One process may write: the last one that claimed the run. What others write does not count.
    OSError from any method means that the store did not respond: it says nothing about the
    checkpoints, so none is then skipped as damaged.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._seen: tuple[list[Claim], set[CheckpointName]] | None = None  # as `latest` found it
        self._claim: Claim | None = None

    def claim(self, base: CheckpointName | None, about: Mapping[str, Any]) -> int:
        """Claims the run for a start that resumes from `base`; returns its attempt number.

        Call it after `latest` and before the first commit. Checkpoints of earlier attempts that
        are newer than `base` no longer count, whether they exist already or are written later.
        No two starts ever get the same number.

        Args:
            base: the result of `latest`; None if there is no checkpoint.
            about: JSON values for human readers of the file; nothing depends on them.

        Raises:
            ContendedError: since `latest`, another start has claimed the run, or another process
                has committed or pruned here. This start owns nothing.
            OSError: the store does not respond. A number may be used up: start again with `latest`.
        """
        self.storage.mkdir()
        listing = self._list()
        claim = Claim(listing.next_attempt(), base, uuid.uuid4().hex[:8])
        claims, names = self._seen or (listing.claims[-1:], set(listing.committed()))
        if claims != listing.claims[-1:] or not names.issuperset(listing.committed()):
            self._withdraw(claim, None)
        # Not under a temporary name: the other of two starters would sweep it away.
        self.storage.write(str(claim), json.dumps(dict(about), indent=1).encode())
        self._require_sole(claim, listing := self._list())
        numbers = sorted({claim.attempt for claim in listing.claims})[-CLAIMS_KEPT:]
        for old in listing.claims:
            if old.attempt not in numbers:
                with suppress(OSError):  # the next start tries again
                    self.storage.delete_file(str(old))
        self._claim = claim
        return claim.attempt

    def commit(self, manifest: Manifest, files: Mapping[str, Content]) -> Checkpoint:
        """Writes a checkpoint named after ``manifest.step`` and ``manifest.attempt``.

        When it returns, the checkpoint is complete and durable. If it raises, what was written is
        removed now, by the next commit, or at the next start. ``manifest.files`` is filled in here.

        Raises:
            CheckpointError: a checkpoint of that name exists. RunLockedError: a later start has
                claimed the run.
            ValueError: a file name is not plain or is reserved by the store.
            OSError: the disk is full, or the store does not respond.
        """
        for filename in files:
            if not is_plain_name(filename) or filename in RESERVED:
                raise ValueError(f"{filename!r} cannot be the name of a checkpoint file")
        name = CheckpointName(manifest.step, manifest.attempt)
        folder = self.storage.join(str(name))
        listing = self._owned(name.attempt)
        if folder.exists(MANIFEST_FILE):
            raise CheckpointError(f"Checkpoint {folder} already exists: commits never replace it.")
        for left in listing.given_up(name.attempt):
            self.storage.delete_dir(left)
        try:
            folder.mkdir()
            failpoint("checkpoint.begin", step=name.step)
            entries = {}
            for filename, data in files.items():
                entries[filename] = FileEntry(*folder.write(filename, data))
                failpoint("checkpoint.payload", step=name.step)
            manifest = replace(manifest, files=entries)
            self._owned(name.attempt)  # the files may have taken minutes
            failpoint("checkpoint.manifest", step=name.step)
            folder.write_atomic(MANIFEST_FILE, manifest.to_json())
        except Exception as error:
            late = not self.storage.is_local and re.search("time(d )?out", str(error).lower())
            if not late:  # else the store may write it later
                with suppress(Exception):  # whatever failed is likely to fail here, too
                    self._delete(name)
            raise
        failpoint("checkpoint.committed", step=name.step)
        return Checkpoint(name, manifest, folder)

    def names(self) -> list[CheckpointName]:
        """The committed checkpoints that are not fenced off, newest first. Reads no file."""
        return self._list().names()

    def open(self, name: CheckpointName) -> Checkpoint:
        """The checkpoint of that name, after verifying its manifest but not its files.

        Raises:
            DamagedError: the manifest is missing, damaged, or that of another checkpoint.
            CheckpointError: a newer version of this package wrote it.
        """
        folder = self.storage.join(str(name))
        if not folder.exists(MANIFEST_FILE):
            raise DamagedError(f"Checkpoint {folder}: {MANIFEST_FILE} is missing.")
        try:
            manifest = Manifest.from_json(folder.read(MANIFEST_FILE))
        except CheckpointError as error:
            raise type(error)(f"Checkpoint {folder}: {error}") from None
        if (manifest.step, manifest.attempt) != (name.step, name.attempt):
            raise DamagedError(
                f"Checkpoint {folder}: its manifest belongs to step {manifest.step}, "
                f"attempt {manifest.attempt}."
            )
        return Checkpoint(name, manifest, folder)

    def latest(
        self, on_damaged: Callable[[str], None] = _warn, verify: Verify = Checkpoint.verify
    ) -> Checkpoint | None:
        """The newest checkpoint whose files all match their hashes, as `verify` finds.

        Each damaged one that is newer is reported in one line to ``on_damaged`` and set aside,
        never deleted. None means that no checkpoint was ever committed here, as far as can be seen.

        Raises:
            CheckpointError: all are damaged, or there are none although an earlier start resumed
                from one, or a newer version of this package wrote the newest.
        """
        seen = set()
        listing = self._look()
        while name := next((n for n in listing.names() if n not in seen), None):
            seen.add(name)
            try:
                checkpoint = self.open(name)
                verify(checkpoint)
                return checkpoint
            except (DamagedError, FileNotFoundError) as error:
                # A writer that prunes removes the manifest first: that is not damage.
                if self.storage.join(str(name)).exists(MANIFEST_FILE):
                    kept = self._set_aside(name, str(error))
                    on_damaged(f"{error} It is skipped and kept as {kept}.")
            # Another writer may have replaced all; and without a damaged one, others may count.
            listing = self._look()
        remedy = "Restore one from a backup, or start over under another --name."
        if damaged := [*listing.damaged(), *map(str, listing.names())]:
            raise CheckpointError(
                f"No usable checkpoint in {self.storage}: all are damaged ({', '.join(damaged)}). "
                + remedy
            )
        if based := [claim for claim in listing.claims if claim.base]:
            raise CheckpointError(
                f"No usable checkpoint in {self.storage}: attempt {based[-1].attempt} resumed from "
                f"{based[-1].base}, which is gone. " + remedy
            )
        return None

    def sweep(self) -> None:
        """Removes what killed writers left: unfinished commits and deletions, and temporary files.

        Call it on one rank only, after `claim`, which fences off other writers, and before
        `commit`.

        Raises:
            ContendedError: as `claim`; the claim is withdrawn.
        """
        listing = self._list()
        if self._claim:
            self._require_sole(self._claim, listing)
        for folder in listing.leftovers():
            self.storage.delete_dir(folder)
        self.storage.sweep()

    def prune(self, keep_last: int, best: CheckpointName | None = None) -> None:
        """Removes all committed checkpoints except ``best`` and the newest ``keep_last`` (at least
        2).

        Fenced-off ones do not count, and are removed once the owner has committed one itself.
        Those set aside as damaged do not count and are never removed.

        Raises:
            RunLockedError: a later start has claimed the run.
        """
        listing = self._owned()
        names = listing.names()
        surplus = [name for name in names[max(keep_last, LEAST_KEPT) :] if name != best]
        if names and listing.claims and names[0].attempt >= listing.claims[-1].attempt:
            surplus += listing.fenced()
        for name in sorted(surplus):
            self._owned()  # a successor may be about to resume from this one
            self._delete(name)
        failpoint("prune.done", step=names[0].step if names else 0)

    def _list(self) -> CheckpointListing:
        """One request on an object store for up to a thousand files."""
        return CheckpointListing.of(self.storage.walk())

    def _look(self) -> CheckpointListing:
        listing = self._list()
        self._seen = listing.claims[-1:], set(listing.committed())
        return listing

    def _owned(self, attempt: int | None = None) -> CheckpointListing:
        """The listing; RunLockedError if a later start than `attempt`, or than ours, owns the
        run."""
        listing = self._list()
        mine = attempt if attempt is not None or self._claim is None else self._claim.attempt
        if self._claim is not None and not listing.claims:
            text = "this run's checkpoints are gone: is the file system mounted? Were they deleted?"
            raise FileNotFoundError(errno.ENOENT, text, str(self.storage))
        if mine is None or not listing.claims:
            return listing
        newest = listing.claims[-1]
        # Two starts with one number are impossible, except on a store with stale listings.
        rivals = newest.attempt == mine and self._claim not in (None, newest)
        # Without our claim, commits of others cannot be distinguished from ours: a backup was
        # restored.
        gone = self._claim is not None and self._claim not in listing.claims
        if newest.attempt > mine or rivals or gone:
            raise RunLockedError(
                f"{self.storage}: attempt {newest.attempt} ({newest}) has taken over this run: "
                f"attempt {mine} commits nothing more, and ends."
            )
        return listing

    def _require_sole(self, claim: Claim, listing: CheckpointListing) -> None:
        # Of two starts that claim one number, at least one sees the other here, and yields.
        sole = [other for other in listing.claims if other.attempt >= claim.attempt] == [claim]
        if not sole or (claim.base is not None and claim.base not in listing.names()):
            self._withdraw(claim, claim.base if sole else None)

    def _withdraw(self, claim: Claim, gone: CheckpointName | None) -> NoReturn:
        self._claim = None
        with suppress(OSError):  # a claim that is left fences off nothing that is needed
            self.storage.delete_file(str(claim))
        raise ContendedError(
            f"{self.storage}: another process "
            + (f"has just removed {gone}, the newest." if gone else "is also working on this run.")
            + " Stop one of the two, or give this one another --name."
        )

    def _set_aside(self, name: CheckpointName, reason: str) -> str:
        """Removes a damaged checkpoint from `names` permanently; returns where it is kept."""
        folder = self.storage.join(str(name))
        with suppress(OSError):  # a run can resume from a read-only store
            if not self.storage.is_local:  # object stores cannot rename a folder
                folder.write_atomic(DAMAGED_MARK, reason.encode())
                return str(folder)
            kept = self._list().damaged_name(name)
            self.storage.rename(str(name), kept)
            return str(self.storage.join(kept))
        return str(folder)

    def _delete(self, name: CheckpointName) -> None:
        # The manifest first: an interrupted deletion then looks like an interrupted commit.
        self.storage.join(str(name)).delete_file(MANIFEST_FILE)
        failpoint("prune.manifest", step=name.step)
        self.storage.delete_dir(str(name))
