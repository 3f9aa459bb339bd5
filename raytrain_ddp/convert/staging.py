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
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_ddp.data.discovery.discovery import DATASET_FILE
from raytrain_ddp.errors import ConfigError, RunLockedError
from raytrain_ddp.files import different, fsync, read_json, write_json

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
