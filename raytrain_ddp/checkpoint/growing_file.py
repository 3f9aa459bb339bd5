"""Reads the lines that were added to a file since the last time; notices that it was replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytrain_ddp.checkpoint.storage import Storage

PIECE_BYTES = 8 * 2**20
_SEEN_BYTES = 256  # before the offset: if they are the same, so is what is before them


class GrowingFile:
    """The lines of a file that is appended to, or replaced."""

    def __init__(self, folder: Storage, name: str) -> None:
        self._folder, self._name = folder, name
        self._stamp: tuple[int, int] | None = None
        self._offset, self._seen = 0, b""

    def is_new(self) -> bool:
        """Whether it was written since the last call. If what was read is no longer at its
        beginning, `lines` starts over and `offset` is 0."""
        stamp = self._folder.stamp(self._name)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        if self._offset and not self._continues(stamp):
            self._offset, self._seen = 0, b""
        return True

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def pieces(self) -> int:
        """About how many pieces the new lines make up."""
        return 1 + ((self._stamp[0] if self._stamp else 0) - self._offset) // PIECE_BYTES

    def lines(self) -> Iterator[Sequence[bytes]]:
        """The complete lines after `offset`, in pieces, so that no file is in memory as a whole."""
        while data := self._part(self._offset, PIECE_BYTES):
            end = data.rfind(b"\n") + 1
            if not end and len(data) < PIECE_BYTES:
                return  # the rest of this line is being written
            whole = data[:end] if end else data
            self._offset += len(whole)
            self._seen = (self._seen + whole[-_SEEN_BYTES:])[-_SEEN_BYTES:]
            yield whole.splitlines()

    def _continues(self, stamp: tuple[int, int] | None) -> bool:
        if stamp is None or stamp[0] < self._offset:
            return False
        return self._part(self._offset - len(self._seen), len(self._seen)) == self._seen

    def _part(self, offset: int, most_bytes: int) -> bytes:
        if self._stamp is None or offset >= self._stamp[0]:
            return b""
        return self._folder.read_part(self._name, offset, most_bytes)
