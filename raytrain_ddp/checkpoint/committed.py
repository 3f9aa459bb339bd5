"""A committed checkpoint: its name and its files, verified on every read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.streams import new_memory, no_one
from raytrain_ddp.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"step-([0-9]{8,15})-a([0-9]{4,15})")
MOST_ATTEMPTS = 10**14
"""No run is started this often: a name with a higher number is not ours, and is ignored."""


@dataclass(frozen=True, order=True)
class CheckpointName:
    """``step-00000120-a0001``; ordered by step, then by attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}-a{self.attempt:04d}"

    @staticmethod
    def parse(text: str) -> CheckpointName | None:
        """The name written as ``text``, or None if it is not a checkpoint's name."""
        match = _NAME.fullmatch(text)
        name = CheckpointName(int(match[1]), int(match[2])) if match else None
        if name is None or str(name) != text or name.attempt > MOST_ATTEMPTS:
            return None
        return name


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint; each file is verified when it is read."""

    name: CheckpointName
    manifest: Manifest
    storage: Storage

    def __str__(self) -> str:
        return str(self.storage)

    def has(self, filename: str) -> bool:
        return filename in self.manifest.files

    def read(self, filename: str) -> bytes:
        """The content of a file, exactly as it was committed.

        Raises:
            DamagedError: the file is missing or differs (a CheckpointError).
            CheckpointError: the checkpoint never had such a file.
        """
        return bytes(self.view(filename))

    def view(self, filename: str) -> memoryview:
        """As `read`, in memory that belongs to the caller, who may write to it."""
        data = new_memory(self._entry(filename).size_bytes)
        self.read_into(filename, [data])
        return data

    def tensors(self, filename: str) -> dict[str, Tensor]:
        """The tensors of a file, in the memory that the file was read into."""
        from raytrain_ddp.checkpoint.tensor_places import view_tensors  # imports torch

        return view_tensors(self.view(filename))

    def read_into(
        self,
        filename: str,
        views: Sequence[memoryview],
        on_chunk: Callable[[memoryview], None] = no_one,
    ) -> None:
        """As `view`, into memory of the file's size; see `read_hashed`."""
        entry = self._entry(filename)
        self._compare(filename, entry, self.storage.read_into(filename, views, on_chunk))

    def head(self, filename: str, most_bytes: int = 2**26) -> bytes:
        """The header of a file of tensors, not verified; empty if the file cannot be one."""
        size_bytes = min(self._entry(filename).size_bytes, most_bytes)
        head_bytes = 8 + int.from_bytes(self.storage.read_part(filename, 0, 8), "little")
        if head_bytes > size_bytes:
            return b""
        return self.storage.read_part(filename, 0, head_bytes)

    def verify(self) -> None:
        """Reads all files in chunks; raises DamagedError at the first that is missing or
        differs."""
        for filename in self.manifest.files:
            self._compare(filename, self._entry(filename), self.storage.sha256(filename))

    def _entry(self, filename: str) -> FileEntry:
        entry = self.manifest.files.get(filename)
        if entry is None:
            known = ", ".join(self.manifest.files) or "none"
            raise CheckpointError(f"Checkpoint {self} has no file {filename!r}; it has: {known}.")
        size_bytes = self.storage.size_bytes(filename)
        if size_bytes is None:
            raise DamagedError(f"Checkpoint {self}: {filename} is missing or not a regular file.")
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
