"""Where a conversion lies until it is whole: a hidden folder beside the one it becomes.

    .NAME.converting/            becomes NAME by one rename
      train-00000-of-00004.parquet.part     a shard, under a name that nobody takes for one
      state/plan.json            what is being converted, and how: compared on resume
      state/train-00000-of-00004.json       a shard's record; there is none until it is whole
      state/spool/               images of sources that cannot be read row by row

What runs in a process of its own writes into it only by `replace_with` and `write_json`: a file is
all there, or not at all, also if two processes should write the same one.
"""

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
    """The folder in which `dest` grows. Nothing is written before `held`."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.folder = dest.parent / f".{dest.name}.converting"
        self.state = self.folder / "state"
        self.spool = self.state / "spool"

    @contextmanager
    def held(self) -> Iterator[None]:
        """For one process at a time.

        Raises:
            RunLockedError: another one holds it.
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
        """Writes down what is being done, or sees that what was done here earlier fits it.

        Raises:
            ConfigError: it does not.
        """
        before = read_json(self.state / "plan.json")
        if before is None or not self._has_work():
            write_json(self.state / "plan.json", plan, self.state)
        elif differences := different(before, plan):
            raise ConfigError(
                f"{self.dest}: a conversion was begun here with other input: "
                f"{'; '.join(differences)}. Give the same again, or delete {self.folder}."
            )

    def _has_work(self) -> bool:
        done = (self.folder.glob(f"*{PART}"), self.folder.glob("*.parquet"))
        return any(True for paths in (*done, self.spool.glob("*.json")) for _ in paths)

    def size_bytes(self, split: str) -> int:
        """What there is already of a split."""
        parts = (self.spool.glob(f"{split}-*.bin"), self.folder.glob(f"{split}-*{PART}"))
        return sum(path.stat().st_size for paths in parts for path in paths)

    def part(self, name: str) -> Path:
        """Where the shard `name` is, whole: as part, or finished when all were."""
        final = self.folder / name
        return final if final.exists() else self.folder / f"{name}{PART}"

    def finish(self, names: list[str], dataset: Mapping[str, Any]) -> None:
        """Makes `dest` of it: all shards get their names, the last step is one rename."""
        for name in names:
            if not (self.folder / name).exists():
                os.replace(self.folder / f"{name}{PART}", self.folder / name)
        write_json(self.folder / DATASET_FILE, dataset, self.state)
        self.give_name()

    def give_name(self) -> None:
        """The last step, when `dataset.json` is there."""
        shutil.rmtree(self.state)
        fsync(self.folder)
        os.replace(self.folder, self.dest)
        fsync(self.dest.parent)


def different(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """``["seed: 1, was 0"]``: in what two records, which may be nested, differ."""
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
    """Yields a path to write to, which becomes `path`, to last, if nothing is raised.

    Raises:
        DataError: there is no folder `state` here.
    """
    if not state.is_dir():
        raise DataError(f"{state}: not there: DST must be a folder that all machines share.")
    temp = state / f"tmp-{uuid4().hex}"
    try:
        yield temp
        fsync(temp)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any], state: Path) -> None:
    """Atomic, and lasting."""
    with replace_with(path, state) as temp:
        temp.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fsync(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
