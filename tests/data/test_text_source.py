"""Text files as windows of characters, compared with nanoGPT's preparation."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from raytrain_ddp import Data, Draws, TextSource
from raytrain_ddp.errors import DataError

LENGTH = 32


def test_windows_equal_those_of_nanogpt(tmp_path: Path):
    """data/shakespeare_char/prepare.py, and x and y of get_batch in train.py."""
    path = Path(textwrap.__file__)
    data = path.read_text(encoding="utf-8")
    chars = sorted(set(data))
    stoi = {ch: i for i, ch in enumerate(chars)}
    n = len(data)
    for part, split in (((0.0, 0.9), data[: int(n * 0.9)]), ((0.9, 1.0), data[int(n * 0.9) :])):
        ids = np.array([stoi[c] for c in split], dtype=np.uint16)
        source = TextSource(str(path), LENGTH, part=part)
        assert source.characters == "".join(chars)
        rows = np.arange(source.blocks.sum())
        assert len(rows) == (len(ids) - 1) // LENGTH
        batch = Data(source).batch(Draws(0, 0, rows, np.zeros_like(rows)))
        data_of = torch.from_numpy(ids.astype(np.int64))
        ix = (rows * LENGTH).tolist()
        assert torch.equal(batch["x"], torch.stack([data_of[i : i + LENGTH] for i in ix]))
        assert torch.equal(batch["y"], torch.stack([data_of[i + 1 : i + 1 + LENGTH] for i in ix]))
        predicted = source.text_of(batch["y"].flatten().numpy())
        assert predicted == split[1 : 1 + len(rows) * LENGTH]  # each character once


def test_several_files_are_joined_in_order_and_vocabularies_are_shared(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes("zwei\r\né 😀".encode())
    (tmp_path / "a.txt").write_text("eins\n")
    (tmp_path / "c.md").write_text("other")
    memory = fsspec.filesystem("memory")
    for name in ("a.txt", "b.txt"):
        memory.pipe(f"/texts/{name}", (tmp_path / name).read_bytes())
    for place in (str(tmp_path), f"{tmp_path}/*.txt", "memory://texts"):
        source = TextSource(place, 12)
        record = source.read(np.array([0]))
        assert source.text_of(record["x"][0]) == "eins\nzwei\né "
        assert source.text_of(record["y"][0]) == "ins\nzwei\né 😀"
    known = TextSource(f"{tmp_path}/a.txt", 2, characters="snie\n")
    assert known.read(np.array([0, 1]))["x"].tolist() == [[3, 2], [1, 0]]
    with pytest.raises(DataError, match=r"b\.txt: the character 'z' is not one of the 5 in the"):
        TextSource(str(tmp_path), 2, characters="snie\n")


def test_the_fingerprint_is_of_text_vocabulary_and_length(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one and two and three")
    first = TextSource(str(tmp_path), 4)
    others = [TextSource(str(tmp_path), 5), TextSource(str(tmp_path), 4, part=(0.1, 1.0))]
    others.append(TextSource(str(tmp_path), 4, first.characters + "x"))
    assert TextSource(f"{tmp_path}/a.txt", 4).fingerprint() == first.fingerprint()
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_an_empty_vocabulary_has_no_characters(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcde")
    with pytest.raises(DataError, match="the character 'a' is not one of the 0"):
        TextSource(str(tmp_path), 4, "")


@pytest.mark.parametrize(
    ("name", "content", "reported"),
    [
        ("a.txt", b"", "0 characters, but a window needs 5"),
        ("a.txt", b"abcd", "4 characters, but a window needs 5"),
        ("a.txt", b"abc\xff", r"a\.txt: not UTF-8 at byte 3"),
        ("a.md", b"abcde", r"contains no \.txt files: specify other files by a glob"),
    ],
)
def test_unusable_text_is_named_in_the_error(
    name: str, content: bytes, reported: str, tmp_path: Path
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reported):
        TextSource(str(tmp_path), 4)
    with pytest.raises(DataError, match="no such file or folder"):
        TextSource(str(tmp_path / "gone"), 4)


def test_a_text_source_that_is_not_a_file_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "b.txt").symlink_to("gone")
    with pytest.raises(DataError, match=r"b\.txt: cannot be read: No such file or directory: rep"):
        TextSource(str(tmp_path), 2)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "b.txt").symlink_to("/dev/null")
    with pytest.raises(DataError, match=r"b\.txt: cannot be read: a named pipe, socket or device"):
        TextSource(str(tmp_path), 2)


@pytest.mark.parametrize("length", [0, -2, 2.0, "2"])
def test_a_window_has_a_whole_number_of_characters(length: Any, tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    with pytest.raises(DataError, match=f"length={length!r}: give a whole number of at least 1"):
        TextSource(str(tmp_path), length)


@pytest.mark.parametrize(
    "part", [(-0.5, 1), (0, 7), (0.9, 0.1), (0, float("nan")), 0.9, (0.5,), "01"]
)
def test_the_held_out_part_of_a_text_is_between_0_and_1(part: Any, tmp_path: Path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    with pytest.raises(DataError, match=rf"^part={re.escape(repr(part))}: give two fractions"):
        TextSource(str(tmp_path), 2, part=part)
