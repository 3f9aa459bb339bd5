"""The commit protocol: payload files first, ``manifest.json`` last, and nothing else decides.

    <storage>/step-00000120-a0001/model.safetensors, ..., manifest.json      committed
    <storage>/step-00000140-a0001/model.safetensors                          leftover of a kill
    <storage>/damaged-step-00000100-a0001/                                   kept aside (local)
    <storage>/step-00000100-a0001/damaged.txt                                kept aside (S3, GCS)

Which checkpoint is newest follows from its name alone: neither clocks nor a "latest" pointer count.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import TEMP_PREFIX, BytesLike, Storage, is_plain_name
from raytrain_ddp.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
DAMAGED_MARK = "damaged.txt"
DAMAGED_PREFIX = "damaged-"
LEAST_KEPT = 2

_NAME = re.compile(r"step-([0-9]{8,15})-a([0-9]{4,15})")
_ANY_FOLDER = re.compile(rf"(?:{DAMAGED_PREFIX})?step-[0-9]+-a([0-9]+)(?:-[0-9]+)?")

_warn: Callable[[str], None] = logging.getLogger(__name__).warning


@dataclass(frozen=True, order=True)
class CheckpointName:
    """``step-00000120-a0001``; ordered by step, then by attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}-a{self.attempt:04d}"

    @staticmethod
    def parse(text: str) -> CheckpointName | None:
        """The name that is written ``text``, or None where it is something else."""
        match = _NAME.fullmatch(text)
        name = CheckpointName(int(match[1]), int(match[2])) if match else None
        return name if str(name) == text else None


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint; its files are checked each time that they are read."""

    name: CheckpointName
    manifest: Manifest
    storage: Storage

    def __str__(self) -> str:
        return str(self.storage)

    def read(self, filename: str) -> bytes:
        """The content of a file, exactly as it was committed.

        Raises:
            DamagedError: the file is missing or differs (a CheckpointError).
            CheckpointError: the checkpoint never had such a file.
        """
        entry = self._entry(filename)
        data = self.storage.read(filename)
        self._compare(filename, entry, hashlib.sha256(data).hexdigest())
        return data

    def verify(self) -> None:
        """Read all files piece by piece; DamagedError at the first that is missing or differs."""
        for filename in self.manifest.files:
            self._compare(filename, self._entry(filename), self.storage.sha256(filename))

    def _entry(self, filename: str) -> FileEntry:
        entry = self.manifest.files.get(filename)
        if entry is None:
            known = ", ".join(self.manifest.files) or "none"
            raise CheckpointError(f"Checkpoint {self} has no file {filename!r}; it has: {known}.")
        size_bytes = self.storage.size_bytes(filename)
        if size_bytes is None:
            raise DamagedError(f"Checkpoint {self}: {filename} is missing or no plain file.")
        if size_bytes != entry.size_bytes:
            raise DamagedError(
                f"Checkpoint {self}: {filename} has {size_bytes} bytes "
                f"instead of {entry.size_bytes}."
            )
        return entry

    def _compare(self, filename: str, entry: FileEntry, sha256: str) -> None:
        if sha256 != entry.sha256:
            raise DamagedError(
                f"Checkpoint {self}: {filename} is damaged (sha256 {sha256[:12]}... "
                f"instead of {entry.sha256[:12]}...)."
            )


class CheckpointStore:
    """The checkpoints of one run, each in a folder of ``storage``; one process may write.

    OSError from any method means that the store did not answer: nothing follows from that about
    the checkpoints in it, and so none is then passed over.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def commit(self, manifest: Manifest, files: Mapping[str, BytesLike]) -> Checkpoint:
        """Write a checkpoint named after ``manifest.step`` and ``manifest.attempt``.

        When it returns, the checkpoint is whole and outlasts a power cut. When it raises, what was
        written is removed, or swept at the next start. ``manifest.files`` is filled in here.

        Raises:
            CheckpointError: there is a checkpoint of that name already.
            ValueError: a file name is not plain, or is one that the store itself uses.
            OSError: the disk is full, or the store does not answer.
        """
        for filename in files:
            if not is_plain_name(filename) or filename in (MANIFEST_FILE, DAMAGED_MARK):
                raise ValueError(f"{filename!r} cannot be the name of a checkpoint file")
        name = CheckpointName(manifest.step, manifest.attempt)
        folder = self.storage.join(str(name))
        if folder.exists(MANIFEST_FILE):
            raise CheckpointError(f"Checkpoint {folder} exists already: a commit replaces none.")
        self.storage.delete_dir(str(name))  # the leftover of a killed writer, if any
        try:
            folder.mkdir()
            entries = {
                filename: FileEntry(memoryview(data).nbytes, folder.write(filename, data))
                for filename, data in files.items()
            }
            manifest = replace(manifest, files=entries)
            folder.write_atomic(MANIFEST_FILE, manifest.to_json())
        except Exception:
            with suppress(Exception):  # what is wrong now is likely to stop this as well
                self._delete(name)
            raise
        return Checkpoint(name, manifest, folder)

    def names(self) -> list[CheckpointName]:
        """The committed checkpoints, newest first; whether their files hold is not looked at."""
        return self._names(self._folders())

    def open(self, name: CheckpointName) -> Checkpoint:
        """The checkpoint of that name, after a check of its manifest but not of its files.

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

    def latest(self, on_damaged: Callable[[str], None] = _warn) -> Checkpoint | None:
        """The newest checkpoint of which every byte is as it was written.

        Each damaged one that is newer is told in one line to ``on_damaged`` and kept aside, never
        deleted. None means that no checkpoint was ever committed here, as far as can be seen.

        Raises:
            CheckpointError: there are only damaged ones, or a newer version of this package
                wrote the newest.
        """
        seen: set[CheckpointName] = set()
        # Listed again, since a writer beside us may have replaced all that was there.
        while unseen := [name for name in self.names() if name not in seen]:
            for name in unseen:
                seen.add(name)
                try:
                    checkpoint = self.open(name)
                    checkpoint.verify()
                    return checkpoint
                except (DamagedError, FileNotFoundError) as error:
                    # A pruning writer takes the manifest away first: that is no damage.
                    if self.storage.join(str(name)).exists(MANIFEST_FILE):
                        kept = self._set_aside(name, str(error))
                        on_damaged(f"{error} It is passed over and kept as {kept}.")
        damaged = sorted(
            folder
            for folder, files in self._folders().items()
            if folder.startswith(DAMAGED_PREFIX)
            or (CheckpointName.parse(folder) and files & {DAMAGED_MARK, MANIFEST_FILE})
        )
        if damaged:
            raise CheckpointError(
                f"No usable checkpoint in {self.storage}: all are damaged ({', '.join(damaged)}). "
                "Restore one from a backup, or start over under another --name."
            )
        return None

    def sweep(self) -> None:
        """Remove what killed writers left: folders without manifest, and temporary files.

        Call it when no other process writes here: before training, on one rank only.
        """
        for folder, files in self._folders().items():
            if CheckpointName.parse(folder) and not files & {MANIFEST_FILE, DAMAGED_MARK}:
                self.storage.delete_dir(folder)
        for entry in self.storage.walk():
            if entry.startswith(TEMP_PREFIX) and "/" not in entry:
                self.storage.delete_file(entry)

    def prune(self, keep_last: int, best: CheckpointName | None = None) -> None:
        """Remove all committed checkpoints but ``best`` and the newest ``keep_last`` (at least 2).

        Those kept aside as damaged are neither removed nor counted.
        """
        for name in reversed(self.names()[max(keep_last, LEAST_KEPT) :]):
            if name != best:
                self._delete(name)

    def next_attempt(self) -> int:
        """1 + the highest attempt that left any trace: committed, leftover or damaged."""
        matches = (_ANY_FOLDER.fullmatch(folder) for folder in self._folders())
        return 1 + max((int(match[1]) for match in matches if match), default=0)

    def _folders(self) -> dict[str, set[str]]:
        """Each folder of the store with the names in it; one request on an object store."""
        folders: dict[str, set[str]] = {}
        for entry in self.storage.walk():
            folder, slash, rest = entry.partition("/")
            if slash:
                folders.setdefault(folder, set()).add(rest)
        return folders

    @staticmethod
    def _names(folders: Mapping[str, set[str]]) -> list[CheckpointName]:
        committed = (
            CheckpointName.parse(folder)
            for folder, files in folders.items()
            if MANIFEST_FILE in files and DAMAGED_MARK not in files
        )
        return sorted((name for name in committed if name), reverse=True)

    def _set_aside(self, name: CheckpointName, reason: str) -> str:
        """Take a damaged checkpoint out of `names` for good; return where it is kept."""
        folder = self.storage.join(str(name))
        with suppress(OSError):  # a store that cannot be written to still can be resumed from
            if not self.storage.is_local:  # object stores cannot rename a folder
                folder.write_atomic(DAMAGED_MARK, reason.encode())
                return str(folder)
            taken = self._folders()
            kept = f"{DAMAGED_PREFIX}{name}"
            copies = 1
            while kept in taken:
                copies += 1
                kept = f"{DAMAGED_PREFIX}{name}-{copies}"
            self.storage.rename(str(name), kept)
            return str(self.storage.join(kept))
        return str(folder)

    def _delete(self, name: CheckpointName) -> None:
        # The manifest first: half a deletion then looks like half a commit.
        self.storage.join(str(name)).delete_file(MANIFEST_FILE)
        self.storage.delete_dir(str(name))
