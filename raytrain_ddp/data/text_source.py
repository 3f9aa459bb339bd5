"""Text files as windows of characters, for language models. Does not import torch."""

from __future__ import annotations

from hashlib import sha256
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from raytrain_ddp.data.discovery.file_listing import list_on_disk
from raytrain_ddp.data.discovery.store_listing import list_in_store
from raytrain_ddp.data.loading.sources import require_count
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.errors import DataError
from raytrain_ddp.uri import without_secrets

_ROWS_PER_BLOCK = 256


class TextSource:
    """Consecutive windows of characters from text files, which are kept in memory.

    A record is a dict of the characters' numbers, {"x": int64 (n, length), "y": int64 (n, length)};
    y is one character later. Each character of the text is in one y per epoch, except for the first
    one, and the last ones if they do not fill a window.

    Args:
        source: UTF-8 text: a file, a folder (of .txt files), a glob or a URI. Several files are
            joined in the order of their paths.
        length: characters per window.
        characters: the vocabulary, such as that of the training text. Default: all that occur.
        part: which part of the text, as fractions: (0, 0.9) to train on, (0.9, 1) to evaluate on.

    Raises:
        DataError: there is no text or less than a window, it is not UTF-8, or a character is not in
            the vocabulary; names the file. Or an argument is invalid.
    """

    def __init__(
        self,
        source: str,
        length: int,
        characters: str | None = None,
        part: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        length = require_count("length", length)
        start, stop = _fractions(part)
        shown = f"text {without_secrets(source)!r}"
        listing = (list_in_store if "://" in source else list_on_disk)(source, shown)
        names = [*listing.files] if listing.pattern else listing.named((".txt",))
        if not names:
            raise DataError(f"{shown}: contains no .txt files: specify other files by a glob.")
        texts = [_decoded(f"{shown}: {name}", listing.content(name)) for name in names]
        text = "".join(texts)
        self.characters = "".join(sorted(set(text))) if characters is None else characters
        numbers, is_known = _numbers(text, self.characters)
        if not is_known.all():
            place = int(np.argmin(is_known))
            file = np.searchsorted([*accumulate(map(len, texts))], place, side="right")
            raise DataError(
                f"{shown}: {names[file]}: the character {text[place]!r} is not one of the "
                f"{len(self.characters)} in the vocabulary."
            )
        self._numbers = numbers[int(len(text) * start) : int(len(text) * stop)]
        self._length = length
        rows = (len(self._numbers) - 1) // length
        if rows < 1:
            raise DataError(
                f"{shown}: {len(self._numbers)} characters, but a window needs {length + 1}."
            )
        self.blocks = runs_of(rows, _ROWS_PER_BLOCK)

    def read(self, rows: Rows) -> dict[str, npt.NDArray[np.int64]]:
        places = rows[:, None] * self._length + np.arange(self._length + 1)
        windows = self._numbers[places].astype(np.int64)
        return {"x": windows[:, :-1].copy(), "y": windows[:, 1:].copy()}

    def fingerprint(self) -> str:
        digest = sha256(f"{self._length} {self.characters!r}".encode())
        digest.update(self._numbers.tobytes())
        return digest.hexdigest()

    def text_of(self, numbers: Rows) -> str:
        """The characters with these numbers, shape (n,)."""
        return "".join(self.characters[number] for number in numbers)


def _fractions(part: tuple[float, float]) -> tuple[float, float]:
    try:
        start, stop = part
        if 0 <= start < stop <= 1:
            return start, stop
    except (TypeError, ValueError):  # not two numbers
        pass
    raise DataError(
        f"part={part!r}: give two fractions from 0 to 1, the smaller one first, such as (0, 0.9)."
    )


def _decoded(where: str, content: bytes) -> str:
    """The text as `open` would read it."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _numbers(text: str, characters: str) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """The number of each character, in the smallest type, and whether it is in the vocabulary."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    if not len(known):
        return np.zeros(len(codes), np.uint8), np.zeros(len(codes), bool)
    order = np.argsort(known)
    places = order[np.minimum(np.searchsorted(known, codes, sorter=order), len(known) - 1)]
    return places.astype(np.min_scalar_type(len(known))), known[places] == codes
