"""The hidden staging folder of a conversion, next to the destination.

    .NAME.converting/            becomes NAME by one rename
      train-00000-of-00004.parquet.part     a shard, under a name that no reader accepts
      state/plan.json            what is being converted, and how: compared on resume
      state/train-00000-of-00004.json       a shard's record; written when the shard is complete
      state/spool/               images of sources without random access

Worker processes write into it only by `replace_with` and `write_json`: a file is complete or does
not exist, even if two processes write the same one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from raytrain_ddp.data.discovery import DATASET_FILE
from raytrain_ddp.errors import ConfigError, DataError, RunLockedError
from raytrain_ddp.files import fsync

PART = ".part"


class Stage:
    """The folder in which `dest` is built. Nothing is written before `held`."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.folder = dest.parent / f".{dest.name}.converting"
        self.state = self.folder / "state"
        self.spool = self.state / "spool"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder for one process.

        Raises:
            RunLockedError: another process holds the lock.
        """
        self.spool.mkdir(parents=True, exist_ok=True)
        with (self.state / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunLockedError(
                    f"{self.dest}: another process is converting into it: wait for it, or stop it."
                ) from None
            yield

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Records what is being converted, or compares it with an earlier conversion here.

        Raises:
            ConfigError: they differ.
        """
        before = read_json(self.state / "plan.json")
        if before is None or not self._has_work():
            write_json(self.state / "plan.json", plan, self.state)
        elif differences := different(before, plan):
            raise ConfigError(
                f"{self.dest}: a conversion was started here with other input: "
                f"{'; '.join(differences)}. Use the same input, or delete {self.folder}."
            )

    def _has_work(self) -> bool:
        done = (self.folder.glob(f"*{PART}"), self.folder.glob("*.parquet"))
        return any(True for paths in (*done, self.spool.glob("*.json")) for _ in paths)

    def size_bytes(self, split: str) -> int:
        """The size of the files of a split that exist already."""
        parts = (self.spool.glob(f"{split}-*.bin"), self.folder.glob(f"{split}-*{PART}"))
        return sum(path.stat().st_size for paths in parts for path in paths)

    def part(self, name: str) -> Path:
        """The path of a complete shard: as part, or under its final name."""
        final = self.folder / name
        return final if final.exists() else self.folder / f"{name}{PART}"

    def finish(self, names: list[str], dataset: Mapping[str, Any]) -> None:
        """Turns the folder into `dest`: renames all shards; the last step is one rename."""
        for name in names:
            if not (self.folder / name).exists():
                os.replace(self.folder / f"{name}{PART}", self.folder / name)
        write_json(self.folder / DATASET_FILE, dataset, self.state)
        self.give_name()

    def give_name(self) -> None:
        """The last step, after `dataset.json` is written."""
        shutil.rmtree(self.state)
        fsync(self.folder)
        os.replace(self.folder, self.dest)
        fsync(self.dest.parent)


def different(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """``["seed: 1, was 0"]``: the differences between two records, which may be nested."""
    lines = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += different(old, new, key)
        elif old != new:
            what = f"{name} {key}" if name else key
            digest = isinstance(old, str) and isinstance(new, str) and len(old) == len(new) == 64
            lines.append(f"{what} changed" if digest else f"{what} {new!r}, was {old!r}")
    return lines


@contextmanager
def replace_with(path: Path, state: Path) -> Iterator[Path]:
    """Yields a path to write to; if nothing is raised, it then durably replaces `path`.

    Raises:
        DataError: the folder `state` does not exist here.
    """
    if not state.is_dir():
        raise DataError(f"{state}: not found: DST must be a folder that all machines share.")
    temp = state / f"tmp-{uuid4().hex}"
    try:
        yield temp
        fsync(temp)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any], state: Path) -> None:
    """Atomic and durable."""
    with replace_with(path, state) as temp:
        temp.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fsync(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
